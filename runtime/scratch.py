"""Folders for files that nobody needs afterwards, also when who made them was killed.

A folder is locked (flock) for as long as it is used, which ends with the process. The next of its kind that
is made removes those of this user that are locked by nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

YOUNG_S = 60.0
"""A folder that is younger may have been made just now and not be locked yet."""


@contextmanager
def folder(prefix: str) -> Iterator[str]:
    """A new one below `tempfile.gettempdir()`, empty, for this process and those it tells; gone afterwards,
    as far as it can be removed. OSError where there is no room for one."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as made:
        held = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: the folder is old before long
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):
                _sweep(prefix)
            yield made
        finally:
            os.close(held)


def _sweep(prefix: str) -> None:
    """Removes folders of this kind that nobody uses."""
    for found in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if _left_behind(found):
                shutil.rmtree(found, ignore_errors=True)


def _left_behind(found: Path) -> bool:
    """Of this user, no link, of some age, and locked by nobody."""
    handle = os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(handle)
        if about.st_uid != os.getuid() or time.time() - max(about.st_mtime, about.st_ctime) < YOUNG_S:
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    finally:
        os.close(handle)
