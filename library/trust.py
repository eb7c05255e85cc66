"""Who may say what: a root-signed, versioned, expiring document of keys, roles and revocations.

It lives in the trust home (ESPER_KEYS, else the user's configuration directory), outside every library,
together with the highest version and the ledger sizes seen: whoever can write a library can neither add a key
nor roll these back.
"""

from __future__ import annotations

import base64
import fcntl
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EsperError
from library import dsse
from library.canon import canonical_json, parse_json
from library.crypto import keyid_of
from library.dsse import Signer
from library.errors import fail
from library.keys import ROLES, key_path, load_signer, new_key
from library.paths import check_private, make_private, os_error, read_regular, sync_directory

DOCUMENT = "trust.json"
HIGHEST = "highest"
LOCK = ".lock"
_LOCKED = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
LIFETIME_S = 3 * 365 * 86400
_MAX_NUMBER = 1 << 53
_FIELDS = {
    "type",
    "version",
    "expires",
    "keys",
    "roles",
    "revoked_keys",
    "revoked_artifacts",
    "revoked_policies",
}


@dataclass(frozen=True)
class Role:
    """The keys of a role and how many distinct ones must sign."""

    keyids: tuple[str, ...]
    threshold: int = 1


@dataclass(frozen=True)
class TrustDocument:
    """One version. `keys`: id to raw public bytes; `revoked_keys`:
    id to the ledger sequence from which it is void."""

    version: int
    expires: float
    keys: Mapping[str, bytes]
    roles: Mapping[str, Role]
    revoked_keys: Mapping[str, int] = field(default_factory=dict)
    revoked_artifacts: frozenset[str] = frozenset()
    revoked_policies: frozenset[str] = frozenset()

    def role_keys(self, role: str) -> dict[str, bytes]:
        """Public keys that may act in `role`."""
        return {keyid: self.keys[keyid] for keyid in self.roles[role].keyids}

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "esper-trust/1",
            "version": self.version,
            "expires": self.expires,
            "keys": {keyid: base64.b64encode(raw).decode() for keyid, raw in self.keys.items()},
            "roles": {n: {"keyids": list(r.keyids), "threshold": r.threshold} for n, r in self.roles.items()},
            "revoked_keys": dict(self.revoked_keys),
            "revoked_artifacts": sorted(self.revoked_artifacts),
            "revoked_policies": sorted(self.revoked_policies),
        }

    @staticmethod
    def from_json(data: Any) -> TrustDocument:
        """Strict: unknown fields, values of another kind, keys whose id is not their digest, roles of unknown
        keys are E0751.
        """
        try:
            _check_kinds(data)
            keys = {keyid: base64.b64decode(text, validate=True) for keyid, text in data["keys"].items()}
            roles = {n: Role(tuple(r["keyids"]), r["threshold"]) for n, r in data["roles"].items()}
            document = TrustDocument(
                data["version"],
                float(data["expires"]),
                keys,
                roles,
                dict(data["revoked_keys"]),
                frozenset(data["revoked_artifacts"]),
                frozenset(data["revoked_policies"]),
            )
            document.check()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise fail("E0751", f"trust document is malformed: {error}") from error
        return document

    def check(self) -> None:
        """ValueError where the parts do not fit together."""
        if any(keyid_of(raw) != keyid for keyid, raw in self.keys.items()):
            raise ValueError("a key id is not the digest of its key")
        if set(self.roles) != set(ROLES):
            raise ValueError(f"roles must be exactly {', '.join(ROLES)}")
        for name, role in self.roles.items():
            if not 1 <= role.threshold <= max(1, len(set(role.keyids))) or len(set(role.keyids)) != len(
                role.keyids
            ):
                raise ValueError(f"threshold of role {name} cannot be met")
            if any(keyid not in self.keys for keyid in role.keyids):
                raise ValueError(f"role {name} names an unknown key")


Change = Callable[[TrustDocument], Mapping[str, Any]]


def _check_kinds(data: Any) -> None:
    """ValueError unless every part of a trust document is of its kind."""
    if data.keys() != _FIELDS or data["type"] != "esper-trust/1":
        raise ValueError("fields or type not known")
    roles = list(data["roles"].values())
    lists = [data["revoked_artifacts"], data["revoked_policies"], *(r["keyids"] for r in roles)]
    numbers = [data["version"], *data["revoked_keys"].values(), *(r["threshold"] for r in roles)]
    if any(role.keys() != {"keyids", "threshold"} for role in roles):
        raise ValueError("a role has other fields")
    if not all(isinstance(v, list) and all(isinstance(text, str) for text in v) for v in lists):
        raise ValueError("a list of texts is of another kind")
    if not all(type(n) is int and 0 < n < _MAX_NUMBER for n in numbers):
        raise ValueError("a number is of another kind or out of range")
    if type(data["expires"]) not in (int, float) or not 0 <= data["expires"] < _MAX_NUMBER:
        raise ValueError("expiry is not a time")


class TrustStore:
    """The trust home of this user. `document()` is cached until the file changes;
    cheap enough for every load."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._place = str(home / DOCUMENT)
        self._stamp: tuple[int, int, int] | None = None
        self._document: TrustDocument | None = None
        self._signers: dict[str, Signer] = {}

    def exists(self) -> bool:
        return (self.home / DOCUMENT).exists()

    def document(self) -> TrustDocument:
        """The current version, verified. E0748 absent, E0749 expired, E0750 rolled back,
        E0751 not root-signed."""
        try:
            info = os.stat(self._place)
        except FileNotFoundError as error:
            raise fail(
                "E0748",
                f"no trust store at {self.home}",
                node=str(self.home),
                hint="set ESPER_KEYS to the folder with the keys that signed this library, or put them back "
                "here, or `esper-library trust import FILE`; only where nothing was signed yet, open it with "
                "write access",
            ) from error
        except OSError as error:
            raise os_error(error, "cannot read", self.home / DOCUMENT) from error
        stamp = (info.st_mtime_ns, info.st_ino, info.st_size)
        if self._document is None or stamp != self._stamp:
            self._document, self._stamp = self._verified(), stamp
            self._signers.clear()
        if time.time() > self._document.expires:
            raise fail(
                "E0749",
                f"trust store expired, version {self._document.version}",
                hint="esper-library trust renew",
            )
        return self._document

    def _verified(self) -> TrustDocument:
        check_private(self.home)
        # The mark first: whoever installs a version writes the document before it, so that a document read
        # later is older only if it was put back.
        seen = self._highest()
        document = self.check_envelope(self._read(), None)
        if document.version < seen:
            raise fail(
                "E0750",
                f"trust store has version {document.version}, version {seen} was seen before",
                hint="put the newer trust.json back; an older one brings revoked keys back to life",
            )
        if document.version > seen:  # copied here by hand, or a crash after it was installed
            self._ratchet(document.version)
        return document

    def _ratchet(self, version: int) -> None:
        """Remember a version, unless somebody changes the trust home right now and remembers a later one.
        Where it cannot be written, nothing is remembered.
        """
        with suppress(EsperError, OSError):
            fd = os.open(self.home / LOCK, _LOCKED, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if version > self._highest():
                    replace_file(self.home / HIGHEST, b"%d\n" % version)
            finally:
                os.close(fd)

    def _read(self) -> bytes:
        try:
            return read_regular(self.home / DOCUMENT, 8 << 20)
        except OSError as error:
            raise os_error(error, "cannot read", self.home / DOCUMENT) from error

    def _highest(self) -> int:
        try:
            return int(read_regular(self.home / HIGHEST))
        except (OSError, ValueError, EsperError):
            return 0

    @staticmethod
    def check_envelope(envelope: bytes, current: TrustDocument | None) -> TrustDocument:
        """The document inside, signed by the root threshold of itself and, when given,
        of `current` before it."""
        claimed = TrustDocument.from_json(parse_json(unverified_payload(envelope)))
        for document in (claimed, current):
            if document is None:
                continue
            dsse.open_envelope(
                envelope,
                dsse.TRUST,
                document.role_keys("root"),
                threshold=document.roles["root"].threshold,
                what="trust store",
            )
        return claimed

    def bootstrap(self) -> bool:
        """First use: a local root, compiler and validator key and version 1,
        with a notice on stderr. Idempotent; whether they were made now."""
        if self.exists():
            return False
        make_private(self.home)
        with self.locked():
            if self.exists():
                return False
            if self._highest():  # new keys would make everything proven so far unknown, without a word
                raise fail(
                    "E0748",
                    f"trust.json is gone from {self.home}, where version {self._highest()} was",
                    node=str(self.home),
                    hint="put it back, or `esper-library trust import FILE`",
                )
            made = {role: new_key(self.home, role) for role in ROLES}
            document = TrustDocument(
                1,
                float(int(time.time()) + LIFETIME_S),
                dict(made.values()),
                {r: Role((made[r][0],)) for r in ROLES},
            )
            self._write(document, [load_signer(self.home, "root", made["root"][0])])
        print(
            f"esper: first use: created a local root, compiler and validator key in {self.home / 'keys'}\n"
            "esper: whoever reads the validator key can declare kernels proven; keep root offline if shared",
            file=sys.stderr,
        )
        return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time changes the trust home."""
        try:
            fd = os.open(self.home / LOCK, _LOCKED, 0o600)
        except OSError as error:
            raise os_error(error, "cannot lock", self.home) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _write(self, document: TrustDocument, roots: Sequence[Signer]) -> None:
        document.check()
        envelope = dsse.seal(canonical_json(document.to_json()), dsse.TRUST, roots)
        self.check_envelope(envelope, None)
        replace_file(self.home / DOCUMENT, envelope)
        replace_file(self.home / HIGHEST, b"%d\n" % document.version)
        self._document = None

    def install(self, envelope: bytes) -> TrustDocument:
        """Take version N+1, signed by the root thresholds of N and of N+1;
        or the first version where there is none."""
        make_private(self.home)
        with self.locked():
            return self._install(envelope)

    def _install(self, envelope: bytes) -> TrustDocument:
        current = self.document_or_expired() if self.exists() else None
        new = self.check_envelope(envelope, current)
        highest = max(self._highest(), current.version if current else 0)
        if new.version < highest or (current and new.version == highest):
            raise fail("E0750", f"trust store version {new.version} offered, version {highest} is installed")
        if current and new.version != current.version + 1:
            text = f"version {new.version} does not follow {current.version}: install those between"
            raise fail("E0751", text)
        if time.time() > new.expires:
            raise fail("E0749", f"trust store version {new.version} has expired")
        replace_file(self.home / DOCUMENT, envelope)
        replace_file(self.home / HIGHEST, b"%d\n" % new.version)
        self._document = None
        return new

    def document_or_expired(self) -> TrustDocument:
        """The current version though it may have expired: for renewing it."""
        try:
            return self.document()
        except EsperError as error:
            if error.code != "E0749" or self._document is None:
                raise
            return self._document

    def amend(self, change: Change | None = None, **fields: Any) -> TrustDocument:
        """Sign version N+1 with the local root keys and install it: with `fields` of TrustDocument, and those
        that `change` makes from version N. One process at a time, so that no other's change is lost.
        """
        make_private(self.home)
        with self.locked():
            current = self.document_or_expired()
            fresh = {"version": current.version + 1, "expires": float(int(time.time()) + LIFETIME_S)}
            new = replace(current, **{**fresh, **fields, **(change(current) if change else {})})
            new.check()
            holders = dict.fromkeys([*current.roles["root"].keyids, *new.roles["root"].keyids])
            here = [k for k in holders if key_path(self.home, "root", k).exists()]
            roots = [load_signer(self.home, "root", k) for k in here]
            return self._install(dsse.seal(canonical_json(new.to_json()), dsse.TRUST, roots))

    def envelope(self) -> bytes:
        """The signed document as it is kept, for export."""
        self.document_or_expired()
        return self._read()

    def signer(self, role: str) -> Signer:
        """A local private key that the trust store lists for `role` and has not revoked.
        E0747 when there is none."""
        document = self.document()
        if role not in self._signers:
            usable = [k for k in document.roles[role].keyids if k not in document.revoked_keys]
            local = [k for k in usable if key_path(self.home, role, k).exists()]
            if not local:
                raise fail(
                    "E0747",
                    f"no {role} key in {self.home / 'keys' / role} that the trust store lists",
                    hint=f"esper-library keys new {role}",
                )
            self._signers[role] = load_signer(self.home, role, local[-1])
        return self._signers[role]


def unverified_payload(envelope: bytes) -> bytes:
    """Payload of an envelope before its keys are known:
    only to learn which keys a trust document claims for itself."""
    try:
        return base64.b64decode(parse_json(envelope)["payload"], validate=True)
    except (ValueError, TypeError, KeyError) as error:
        raise fail("E0751", f"trust store is malformed: {error}") from error


def replace_file(place: Path, data: bytes) -> None:
    """Atomically and durably put `data` at `place`, mode 0600; on failure what was there stays, alone."""
    if place.name in ("", ".."):
        raise fail("E0720", f"{str(place)!r} does not name a file", node=str(place))
    staged = place.with_name(f".{place.name[:32]}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        _write_synced(staged, data)
        os.rename(staged, place)
        sync_directory(place.parent)
    except OSError as error:
        raise os_error(error, "cannot write", place) from error
    finally:
        with suppress(OSError):
            os.unlink(staged)


def _write_synced(place: Path, data: bytes) -> None:
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
