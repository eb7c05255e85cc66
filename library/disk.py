"""The seam to the operating system: every call that changes the store's directories goes through one object.

Tests put a recorder here, which replays every legal state after a power loss; nothing else in the package
links, renames, unlinks or syncs an object.
"""

from __future__ import annotations

import os

CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Disk:
    """Plain calls relative to open directory descriptors. Raises OSError; callers name the refusal."""

    def open_dir(self, name: str, *, dir_fd: int | None = None) -> int:
        return os.open(name, DIRECTORY, dir_fd=dir_fd)

    def make_dir(self, name: str, dir_fd: int) -> bool:
        """True when it is new."""
        try:
            os.mkdir(name, 0o700, dir_fd=dir_fd)
        except FileExistsError:
            return False
        return True

    def create(self, name: str, dir_fd: int) -> int:
        return os.open(name, CREATE, 0o600, dir_fd=dir_fd)

    def write(self, fd: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def seal(self, fd: int) -> None:
        """Mode 0444, then the file's bytes and inode on the medium."""
        os.fchmod(fd, 0o444)
        os.fsync(fd)

    def sync_dir(self, fd: int) -> None:
        os.fsync(fd)

    def link(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        os.link(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)

    def rename(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)
