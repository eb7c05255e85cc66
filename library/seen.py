"""The largest ledger that this user has seen of each library,
kept in the trust home where a library writer cannot reach."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from esper_ir.diagnostics import EsperError
from library.canon import canonical_json, parse_json
from library.paths import make_private, read_regular, writes_to

_BYTES = 256


def note(home: Path, origin: str, size: int, root: bytes) -> None:
    """Remember (size, root) if it is the largest; skipped where the trust home cannot be written."""
    try:
        make_private(home / "seen")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(home / "seen" / origin, flags, 0o600)
    except (OSError, EsperError):
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if _parse(os.pread(fd, _BYTES, 0))[0] < size:
            os.pwrite(fd, canonical_json({"root": root.hex(), "size": size}).ljust(_BYTES), 0)
    except OSError:
        return
    finally:
        os.close(fd)


def recall(home: Path, origin: str) -> tuple[int, bytes]:
    """(size, root) of the largest seen; (0, b"") when nothing is known."""
    try:
        return _parse(read_regular(home / "seen" / origin))
    except (OSError, EsperError):
        return 0, b""


def forget(home: Path, origin: str) -> None:
    """Accept that a library was set back on purpose."""
    with writes_to(home / "seen" / origin):
        (home / "seen" / origin).unlink(missing_ok=True)


def _parse(data: bytes) -> tuple[int, bytes]:
    try:
        value = parse_json(data)
        return int(value["size"]), bytes.fromhex(value["root"])
    except (EsperError, KeyError, TypeError, ValueError):
        return 0, b""  # an empty or torn note says nothing; the signed checkpoints remain
