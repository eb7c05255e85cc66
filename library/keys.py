"""Private keys as files: PKCS#8 PEM, mode 0600, one directory per role,
so that a process opens only its own."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from library import crypto
from library.dsse import Signer
from library.errors import fail
from library.paths import make_private, os_error, sync_directory

ROLES = ("root", "compiler", "validator")
_MAX_KEY_BYTES = 16 << 10


def key_path(home: Path, role: str, keyid: str) -> Path:
    """Place of a private key below the trust home."""
    return home / "keys" / role / f"{keyid[:32]}.pem"


def new_key(home: Path, role: str, passphrase: bytes | None = None) -> tuple[str, bytes]:
    """Create and store a key; its id and raw public bytes. Never overwrites."""
    pem, raw = crypto.generate(passphrase)
    keyid = crypto.keyid_of(raw)
    place = key_path(home, role, keyid)
    make_private(place.parent)
    try:
        fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(fd)
        sync_directory(place.parent)
    except OSError as error:
        raise os_error(error, "cannot write key", place) from error
    return keyid, raw


def load_signer(home: Path, role: str, keyid: str, passphrase: bytes | None = None) -> Signer:
    """The private key `keyid` of `role`. E0747 absent, E0753 file others can read, E0754 passphrase."""
    place = key_path(home, role, keyid)
    key, raw = crypto.load_private(_read_private(place), passphrase or passphrase_from_environment())
    if crypto.keyid_of(raw) != keyid:
        raise fail("E0753", f"{place} holds another key than its name says", node=str(place))
    return Signer(role, keyid, key.sign)


def _read_private(place: Path) -> bytes:
    try:
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise fail(
            "E0747",
            f"no private key at {place}",
            node=str(place),
            hint="`esper-library keys new` or `keys rotate`",
        ) from error
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EACCES, errno.EPERM):
            raise os_error(error, "cannot open key", place) from error
        raise fail("E0753", f"cannot open key {place}: {error.strerror}", node=str(place)) from error
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise fail(
                "E0753",
                f"key {place} must be a regular file of yours with mode 0600",
                node=str(place),
                hint=f"chmod 600 {place}; if others could read it, rotate it",
            )
        return file.read(_MAX_KEY_BYTES)


def passphrase_from_environment() -> bytes | None:
    """First line of ESPER_PASSPHRASE_FILE, or of the descriptor ESPER_PASSPHRASE_FD;
    never from an argument."""
    name, descriptor = os.environ.get("ESPER_PASSPHRASE_FILE"), os.environ.get("ESPER_PASSPHRASE_FD")
    try:
        if name:
            with open(name, "rb") as file:  # a pipe of the shell is welcome here
                return file.readline().rstrip(b"\n") or None
        if descriptor:
            with os.fdopen(os.dup(int(descriptor)), "rb") as file:
                return file.readline().rstrip(b"\n") or None
    except (OSError, ValueError) as error:
        raise fail("E0754", f"passphrase cannot be read: {error}") from error
    return None
