"""Immutable bytes named by their SHA-256: `objects/ab/cdef...`, published whole or not at all,
checked when read."""

from __future__ import annotations

import os
import re
import stat
import time
import uuid
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from esper_ir.diagnostics import EsperError
from library.canon import canonical_json, sha256_hex
from library.disk import READ, Disk
from library.errors import fail
from library.paths import os_error

MAX_BLOB_BYTES = 1 << 30
RESERVE = "reserve"
RESERVE_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
DIRECTORIES = ("objects", "staging", "quarantine", "measurements")


def _close(fds: dict[str, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


class Blobs:
    """The directories of one library. Thread-safe: holds only directory descriptors."""

    def __init__(self, home: Path, disk: Disk | None = None) -> None:
        self.home = home
        self.disk = disk or Disk()
        self._fds: dict[str, int] = {}
        weakref.finalize(self, _close, self._fds)  # of a handle that nobody closed
        try:
            for name in ("objects", "staging", "quarantine"):
                self._fds[name] = self.disk.open_dir(str(home / name))
        except OSError as error:
            self.close()
            raise os_error(error, "cannot open", home) from error

    def close(self) -> None:
        """Give the descriptors back; idempotent."""
        _close(self._fds)

    def put(self, data: bytes) -> str:
        """Durable when it returns: the digest of `data`. E0703, E0702, E0710 leave nothing behind."""
        return self.put_many([data])[0]

    def put_many(self, items: Iterable[bytes]) -> list[str]:
        """Stage, sync, link, and sync each directory once. Digests in the order of `items`."""
        contents = list(items)
        digests = [sha256_hex(data) for data in contents]
        try:
            self._publish(dict(zip(digests, contents, strict=True)))
        except OSError as error:
            raise os_error(error, "cannot write an object below", self.home) from error
        return digests

    def _publish(self, contents: dict[str, bytes]) -> None:
        staged: dict[str, str] = {}
        shards: dict[str, int] = {}
        try:
            for digest, data in contents.items():
                self._shard(digest[:2], shards)
                if not self._is_good(digest, data, shards[digest[:2]]):
                    staged[digest] = self._stage(data)
            for digest, name in staged.items():
                self._name(name, digest, contents[digest], shards[digest[:2]])
            for fd in shards.values():
                self.disk.sync_dir(fd)
        finally:
            for name in staged.values():
                self._discard(name)
            for fd in shards.values():
                os.close(fd)

    def _shard(self, name: str, shards: dict[str, int]) -> None:
        if name in shards:
            return
        if self.disk.make_dir(name, self._fds["objects"]):
            self.disk.sync_dir(self._fds["objects"])
        shards[name] = self.disk.open_dir(name, dir_fd=self._fds["objects"])

    def _stage(self, data: bytes) -> str:
        if len(data) > MAX_BLOB_BYTES:
            raise fail("E0735", f"object of {len(data)} bytes exceeds {MAX_BLOB_BYTES}")
        name = f"{int(time.time())}-{os.getpid()}-{uuid.uuid4().hex}"
        fd = self.disk.create(name, self._fds["staging"])
        try:
            self.disk.write(fd, data)
            self.disk.seal(fd)
        except BaseException:
            self._discard(name)
            raise
        finally:
            os.close(fd)
        return name

    def _name(self, staged: str, digest: str, data: bytes, shard: int) -> None:
        """Create-once: a second publisher of the same bytes loses silently, a torn older file is replaced."""
        try:
            self.disk.link(staged, self._fds["staging"], digest[2:], shard)
        except FileExistsError:
            if not self._is_good(digest, data, shard):
                self._keep_evidence(
                    digest, shard, "torn or foreign bytes found under this name while publishing"
                )
                self.disk.rename(staged, self._fds["staging"], digest[2:], shard)

    def _is_good(self, digest: str, data: bytes, shard: int) -> bool:
        try:
            info = os.stat(digest[2:], dir_fd=shard, follow_symlinks=False)
            if not stat.S_ISREG(info.st_mode) or info.st_size != len(data):
                return False
            found = self._read_fd(os.open(digest[2:], READ, dir_fd=shard))
        except FileNotFoundError:
            return False
        if sha256_hex(found) != digest:
            return False
        # The earlier publisher may have died between its link and its directory sync; its bytes are synced
        # before.
        return True

    def _discard(self, name: str) -> None:
        try:
            self.disk.unlink(name, self._fds["staging"])
        except OSError:
            return  # never named by a row; collection removes what stays in staging

    @staticmethod
    def _read_fd(fd: int) -> bytes:
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise fail("E0704", "an object is not a regular file")
            if info.st_size > MAX_BLOB_BYTES:
                raise fail("E0735", f"object of {info.st_size} bytes exceeds {MAX_BLOB_BYTES}")
            data = os.read(fd, info.st_size + 1)
            while 0 < len(data) < info.st_size and (more := os.read(fd, info.st_size - len(data))):
                data += more  # one read returns at most 2 GiB, and less when a signal comes between
            return data
        finally:
            os.close(fd)

    def read_raw(self, digest: str) -> bytes:
        """Bytes under `digest`, not yet hashed: for the caller that hashes them itself. E0731 when absent."""
        try:
            return self._read_fd(os.open(place_of(digest), READ, dir_fd=self._fds["objects"]))
        except FileNotFoundError as error:
            raise fail(
                "E0731",
                f"object {digest} is not in the library",
                node=digest,
                hint="`esper-library verify --repair` takes it from a bundle or files a compile job",
            ) from error
        except OSError as error:
            raise os_error(error, "cannot read object", digest) from error

    def read(self, digest: str) -> bytes:
        """Bytes whose SHA-256 is `digest`; others are moved to quarantine and E0730 is raised."""
        data = self.read_raw(digest)
        if sha256_hex(data) != digest:
            raise self.quarantine(digest, "bytes do not match the digest on reading")
        return data

    def quarantine(self, digest: str, reason: str) -> Exception:
        """Move the bytes out of `objects/` if the disk allows it; the E0730 to raise either way."""
        place_of(digest)
        try:
            shard = self.disk.open_dir(digest[:2], dir_fd=self._fds["objects"])
            try:
                self._put_back_if_good(digest, shard, self._keep_evidence(digest, shard, reason))
            finally:
                os.close(shard)
            kept = f"moved to {self.home / 'quarantine'}"
        except OSError as error:
            kept = f"could not be moved to quarantine ({error.strerror})"
        return fail(
            "E0730",
            f"object {digest}: {reason}; the bytes were {kept}",
            node=digest,
            hint="`esper-library verify --repair` restores it; find out what changed the file",
        )

    def _put_back_if_good(self, digest: str, shard: int, moved: str) -> None:
        """Whoever repaired the object between our read and the move gave it good bytes: they stay."""
        try:
            found = self._read_fd(os.open(moved, READ, dir_fd=self._fds["quarantine"]))
        except (OSError, EsperError):
            return
        if sha256_hex(found) == digest:
            with suppress(FileExistsError):
                self.disk.link(moved, self._fds["quarantine"], digest[2:], shard)
            self.disk.sync_dir(shard)
            self.disk.unlink(moved, self._fds["quarantine"])
            self.disk.unlink(moved + ".json", self._fds["quarantine"])

    def _keep_evidence(self, digest: str, shard: int, reason: str) -> str:
        stamp = f"{digest}.{time.time_ns()}"
        self.disk.rename(digest[2:], shard, stamp, self._fds["quarantine"])
        note = canonical_json({"digest": digest, "reason": reason, "time": time.time()})
        fd = self.disk.create(stamp + ".json", self._fds["quarantine"])
        try:
            self.disk.write(fd, note)
        finally:
            os.close(fd)
        return stamp

    def has(self, digest: str) -> bool:
        """Whether a file of that name exists; says nothing about its bytes."""
        try:
            os.stat(place_of(digest), dir_fd=self._fds["objects"], follow_symlinks=False)
        except OSError:
            return False
        return True

    def size(self, digest: str) -> int:
        """Bytes of an object as stored, 0 when it is absent."""
        try:
            return os.stat(place_of(digest), dir_fd=self._fds["objects"], follow_symlinks=False).st_size
        except OSError:
            return 0

    def remove(self, digest: str) -> int:
        """Unlink an object; bytes freed, 0 when it was gone already.
        The caller holds the transaction that decided."""
        name = place_of(digest)
        try:
            info = os.stat(name, dir_fd=self._fds["objects"], follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):  # nothing of ours; set aside, or it would be in the way for ever
                self.quarantine(digest, "a directory under an object's name")
                return 0
            self.disk.unlink(name, self._fds["objects"])
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise os_error(error, "cannot remove object", digest) from error
        return info.st_size

    def digests(self) -> list[str]:
        """Every name below `objects/` that is a digest, in no order."""
        try:
            with os.scandir(self._fds["objects"]) as entries:
                shards = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
            found = [f"{shard}{rest}" for shard in shards for rest in self._in_shard(shard)]
        except OSError as error:
            raise os_error(error, "cannot list", self.home / "objects") from error
        return [digest for digest in found if _DIGEST.match(digest)]

    def _in_shard(self, shard: str) -> list[str]:
        fd = self.disk.open_dir(shard, dir_fd=self._fds["objects"])
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def staged(self) -> list[tuple[str, float]]:
        """Names in staging with their age in seconds."""
        now = time.time()
        try:
            entries = list(os.scandir(self._fds["staging"]))
        except OSError as error:
            raise os_error(error, "cannot list", self.home / "staging") from error
        return [(entry.name, now - changed) for entry in entries if (changed := _changed(entry)) is not None]

    def drop_staged(self, name: str) -> None:
        """Remove one staging file that its owner left behind."""
        self._discard(name)


def place_of(digest: str) -> str:
    """Place below `objects/`. E0709 for what is no digest: a row may have been edited to lead elsewhere."""
    if not _DIGEST.match(digest):
        raise fail("E0709", f"a row names {digest[:80]!r} as an object, which is no digest", node=digest[:80])
    return f"{digest[:2]}/{digest[2:]}"


def _changed(entry: os.DirEntry[str]) -> float | None:
    """When a file was last written; None when it is gone meanwhile."""
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return None
