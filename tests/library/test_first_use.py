"""The first use of a library and of a key home: whatever it dies at, the next process finishes it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper_ir.diagnostics import EsperError
from library import history, rotation
from library.store import Library
from library.trust import TrustStore
from tests.library.helpers import make_container, validated
from tests.library.world import in_child

CALLS = ("mkdir", "open", "rename", "fsync", "posix_fallocate", "fchmod")
KILLED = 77


def interrupted(at: int, how: Callable[[], None]) -> None:
    """In this process: the Nth call that changes a disk ends in `how`."""
    counter = iter(range(1, 1 << 20))

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if next(counter) == at:
                how()
            return real(*arguments, **named)

        return call

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


def killed() -> None:
    os._exit(KILLED)


def failing() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("how", [killed, failing], ids=["killed", "failing"])
def test_dying_at_every_call_of_the_first_use(home: Path, fast_tmp: Path, how: Callable[[], None]) -> None:
    for at in range(1, 200):
        place = fast_tmp / f"{how.__name__}{at}"
        place.mkdir(mode=0o700)

        def work(at: int = at, place: Path = place) -> None:
            interrupted(at, how)
            with Library.open(place / "library", trust=place / "keys") as lib:
                lib.put_artifact(make_container(1))

        status = in_child(work)
        assert status in (0, KILLED, 16), (at, status)
        with Library.open(place / "library", trust=place / "keys") as lib:
            artifact = validated(lib, 1)
            assert lib.load(artifact).record.id == artifact
            assert history.audit(lib).findings == ()
            assert {len(r.keyids) for r in lib.trust.document().roles.values()} == {1}
        shutil.rmtree(place)
        if status == 0 and at > 60:
            return
    raise AssertionError("no end")


def test_a_key_home_that_cannot_be_written_is_only_a_missing_note(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Library.open(home) as lib:
        validated(lib, 1)

        def refuse(path: Path) -> None:
            raise EsperError("E0702", "read-only")

        monkeypatch.setattr("library.seen.make_private", refuse)
        assert lib.load(validated(lib, 2)).verdict is not None


@pytest.mark.parametrize("how", [killed, failing], ids=["killed", "failing"])
@pytest.mark.parametrize("role", ["validator", "root"])
def test_dying_at_every_call_of_a_rotation(
    home: Path, fast_tmp: Path, how: Callable[[], None], role: str
) -> None:
    """The old version or the new one, whole: what was proven loads, and the next proof can be signed."""
    with Library.open(home) as lib:
        artifact, keys = validated(lib, 1), lib.trust.home
    for at in range(1, 200):
        copy, place = fast_tmp / f"keys{at}", fast_tmp / f"library{at}"
        shutil.copytree(keys, copy)
        shutil.copytree(home, place)

        def work(at: int = at, copy: Path = copy) -> None:
            interrupted(at, how)
            rotation.rotate_key(TrustStore(copy), role)

        status = in_child(work)
        assert status in (0, KILLED, 16), (at, status)
        with Library.open(place, trust=copy) as lib:
            assert lib.load(artifact).record.id == artifact
            assert lib.trust.document().version in (1, 2) and lib.load(validated(lib, 2)).verdict
            lib.trust.amend()
            assert lib.load(artifact).record.id == artifact
        shutil.rmtree(copy)
        shutil.rmtree(place)
        if status == 0 and at > 20:
            return
    raise AssertionError("no end")
