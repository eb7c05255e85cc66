"""One judge per artifact and per card at a time, whoever dies in between.

Byte-range locks on one empty file of the library: byte number sha256(name). The system gives them back when
their process ends, so that a killed judge holds up nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from library.paths import writes_to

LOCK = "gauntlet.lock"
RANGE = 1 << 60


@contextlib.contextmanager
def exclusive(home: Path, *names: str) -> Iterator[None]:
    """Waits until nobody else holds any of `names`; taken in one order, so that none waits for ever. E0702
    where the library cannot be written."""
    with writes_to(home / LOCK):
        fd = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        for place in sorted(_place(name) for name in names):
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, place)
        yield
    finally:
        os.close(fd)


def physical(device: str) -> str:
    """The card that "cuda:0" means here, whatever CUDA_VISIBLE_DEVICES hides: "cuda 3"."""
    kind, _, index = device.partition(":")
    visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
    at = int(index or 0)
    return f"{kind} {visible[at] if kind == 'cuda' and at < len(visible) else at}"


def _place(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % RANGE
