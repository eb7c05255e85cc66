"""The directory of a library: made step by step so that dying anywhere
leaves either nothing or something to finish."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from library import ledger
from library.blobs import DIRECTORIES, RESERVE, RESERVE_BYTES
from library.canon import canonical_json, parse_json
from library.errors import fail
from library.index import DATABASE, HOLDER, Index
from library.paths import check_private, make_private, os_error, read_regular, refuse_network
from library.schema import FORMAT_VERSION
from library.trust import replace_file

FORMAT = "FORMAT"
_OURS = {
    *DIRECTORIES,
    FORMAT,
    RESERVE,
    HOLDER,
    "devices",  # cards that the gauntlet has put aside
    DATABASE,
    f"{DATABASE}-wal",
    f"{DATABASE}-shm",
    f"{DATABASE}-journal",
}


def open_layout(home: Path, *, create: bool) -> Path:
    """Check the library at `home`, or make it; its real path.

    E0701 none there, E0704 unsafe, E0705 network, E0706 newer format.
    """
    if not (home / FORMAT).exists():
        if not create:
            raise fail(
                "E0701",
                f"no library at {home}",
                node=str(home),
                hint="--library or ESPER_LIBRARY names another; `esper-forge compile` makes one",
            )
        make_private(home)
        _make(Path(os.path.realpath(home)))
    check_private(home)
    real = Path(os.path.realpath(home))
    if real != home:
        check_private(real)
    refuse_network(real)
    _check_format(real)
    return real


def _make(home: Path) -> None:
    refuse_network(home)
    try:
        present = os.listdir(home)
    except OSError as error:
        raise os_error(error, "cannot list", home) from error
    foreign = sorted(n for n in present if n not in _OURS and not n.startswith(f".{FORMAT}."))
    if foreign:
        raise fail(
            "E0704", f"{home} holds other files ({', '.join(foreign[:3])}): not making a library there"
        )
    for name in DIRECTORIES:
        make_private(home / name)
    make_reserve(home)
    index = Index(home, readonly=False)
    try:
        with index.write():
            index.migrate()
            if not index.run("SELECT 1 FROM meta WHERE key = 'origin'"):
                origin = uuid.uuid4().hex
                index.run("INSERT INTO meta VALUES ('origin', ?)", (origin,))
                ledger.begin(index, origin)
    finally:
        index.close()
    replace_file(
        home / FORMAT, canonical_json({"format": "esper-library", "version": FORMAT_VERSION}) + b"\n"
    )


def make_reserve(home: Path) -> None:
    """Space that collection gives back first, so that it can work on a full disk."""
    try:
        fd = os.open(home / RESERVE, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        raise os_error(error, "cannot reserve space in", home) from error


def _check_format(home: Path) -> None:
    try:
        value = parse_json(read_regular(home / FORMAT))
    except OSError as error:
        raise os_error(error, "cannot read", home / FORMAT) from error
    if (
        not isinstance(value, dict)
        or value.get("format") != "esper-library"
        or type(value.get("version")) is not int
    ):
        raise fail("E0706", f"{home / FORMAT} is not the mark of a library", node=str(home))
    if value["version"] > FORMAT_VERSION:
        raise fail(
            "E0706",
            f"{home} has format {value['version']}, this version reads up to {FORMAT_VERSION}",
            node=str(home),
            hint="use the version of the project that made it, or a newer one",
        )
