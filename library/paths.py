"""Where the library and its trust home live,
and whether that place can be trusted to keep what it is given."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from esper_ir.diagnostics import EsperError
from library.errors import fail

# Types of /proc/self/mountinfo on which SQLite's write-ahead log or link(2) cannot be relied upon: another
# machine may write there too.
NETWORK_TYPES = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p afs ceph lustre gpfs beegfs beegfs_nodev glusterfs ncpfs ocfs2 gfs2 pvfs2 "
    "orangefs coda davfs davfs2 wekafs mfs lizardfs juicefs hdfs fuse".split()
)
# What lies behind a file system in user space cannot be told; these are known to be local.
LOCAL_FUSE = frozenset(
    "fuse.fuse-overlayfs fuse.gocryptfs fuse.encfs fuse.bindfs fuse.mergerfs fuse.ntfs-3g fuse.exfat".split()
)
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes spaces, tabs, line ends and backslashes
_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def library_home(path: Path | str | None) -> Path:
    """`path`, else ESPER_LIBRARY, else the user's data directory; absolute,
    `..` and `~` resolved by text only."""
    chosen = path or os.environ.get("ESPER_LIBRARY") or platformdirs.user_data_path("esper") / "library"
    return Path(os.path.abspath(Path(chosen).expanduser()))


def trust_home(path: Path | str | None = None) -> Path:
    """`path`, else ESPER_KEYS, else the user's configuration directory. Never inside a library:
    see library.trust."""
    chosen = path or os.environ.get("ESPER_KEYS") or platformdirs.user_config_path("esper") / "trust"
    return Path(os.path.abspath(Path(chosen).expanduser()))


@contextmanager
def writes_to(place: Path) -> Iterator[None]:
    """Where the system refuses what the body writes at `place`: E0702, E0703 or E0710 in place of OSError."""
    try:
        yield
    except OSError as error:
        raise os_error(error, "cannot write", place) from error


def os_error(error: OSError, doing: str, where: Path | str) -> EsperError:
    """The named refusal for an OSError: full disk E0703, permission or read-only disk E0702, else E0710."""
    text = f"{doing} {where}: {os.strerror(error.errno) if error.errno else error}"
    if error.errno in _SPACE:
        return fail("E0703", text, hint="free space, or run `esper-library gc`, which works on a full disk")
    if error.errno in _DENIED:
        return fail("E0702", text, hint="choose another place with --library or ESPER_LIBRARY")
    return fail("E0710", text, hint="check the disk; nothing half-written was kept")


def make_private(path: Path) -> None:
    """Create `path` with mode 0700 and missing parents, then check it as `check_private` does.

    What exists on the way is checked first: nothing is made behind a link or in a place that others control.
    """
    existing = next(p for p in (path, *path.parents) if os.path.lexists(p))
    _check_chain([existing, *existing.parents], first=existing == path)
    try:
        _make_parents(path)
    except OSError as error:
        raise os_error(error, "cannot create", path) from error
    check_private(path)


def _make_parents(path: Path) -> None:
    if os.path.lexists(path) or path.parent == path:
        return
    _make_parents(path.parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:  # another process was first
        return
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """The names in a directory on the medium. OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_private(path: Path) -> None:
    """E0704 unless `path` is a directory of this user that nobody else may write.

    It must be reached through no link that another user made and no directory in which another user could
    exchange it (sticky ones such as /tmp are fine).
    """
    _check_chain([path, *path.parents], first=True)


def _check_chain(chain: list[Path], *, first: bool) -> None:
    me = os.geteuid()
    for index, place in enumerate(chain):
        private = first and index == 0
        info = _lstat(place)
        if stat.S_ISLNK(info.st_mode):
            if (
                not private and info.st_uid == 0 and me != 0
            ):  # the administrator's, such as /home on some systems
                continue
            raise _unsafe(place, "is a symbolic link")
        if not stat.S_ISDIR(info.st_mode):
            raise _unsafe(place, "is not a directory")
        if info.st_uid not in (me, 0):
            raise _unsafe(place, f"belongs to user {info.st_uid}, not to you or root")
        writable = info.st_mode & (0o022 if private or not _private_group(info) else 0o002)
        if writable and (private or not info.st_mode & stat.S_ISVTX):
            raise _unsafe(place, f"can be written by others (mode {stat.S_IMODE(info.st_mode):04o})")


def _private_group(info: os.stat_result) -> bool:
    """A directory of a group that by convention holds only its namesake user (umask 002 systems)."""
    return info.st_uid == info.st_gid == os.geteuid() == os.getegid()


def _lstat(place: Path) -> os.stat_result:
    try:
        return os.lstat(place)
    except FileNotFoundError as error:
        raise fail("E0701", f"{place} does not exist", node=str(place)) from error
    except OSError as error:
        raise os_error(error, "cannot look at", place) from error


def refuse_inside(place: Path, *homes: Path) -> None:
    """E0720 for a file to be written inside one of `homes`, where it would take the place of something."""
    if "\0" in str(place):
        raise fail("E0720", f"{str(place)!r} is not a path")
    real = Path(os.path.realpath(place))
    for home in homes:
        if Path(os.path.realpath(home)) in (real, *real.parents):
            raise fail("E0720", f"{place} lies inside {home}", node=str(place), hint="give another place")


def read_regular(place: Path, limit: int = 1 << 20, *, follow: bool = True) -> bytes:
    """A file of at most `limit` bytes. OSError as when opening; E0704 for a pipe or device, which could
    block or never end; E0735 for more.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(place, flags)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise _unsafe(place, "is not a regular file")
        if info.st_size > limit:
            raise fail("E0735", f"{place} exceeds {limit} bytes", node=str(place))
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(limit + 1)
    finally:
        os.close(fd)


def _unsafe(place: Path, why: str) -> EsperError:
    return fail(
        "E0704",
        f"{place} {why}",
        node=str(place),
        hint="use a place that only you can write (chmod go-w), reached without symbolic links",
    )


def file_system_type(path: Path) -> str:
    """Type of the mount that holds `path`, by the longest mount point of /proc/self/mountinfo;
    "" where unknown."""
    best, kind = -1, ""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), left.split(" ")[4])
        inside = path == Path(point) or Path(point) in path.parents
        if inside and len(point) >= best:  # a later mount on the same point hides the earlier one
            best, kind = len(point), right.split(" ")[0]
    return kind


def refuse_network(path: Path) -> None:
    """E0705 on a network file system: the write-ahead log needs shared memory,
    which such a mount does not give."""
    kind = file_system_type(path)
    if kind in NETWORK_TYPES or (kind.startswith("fuse.") and kind not in LOCAL_FUSE):
        raise fail(
            "E0705",
            f"{path} is on a {kind} mount",
            node=str(path),
            hint="put the library on a local disk of each host and exchange artifacts with export and import",
        )
