"""Named races: another process steps in between two steps of an operation, at the place where it hurts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from esper_ir.diagnostics import EsperError
from library.audit import verify_library
from library.bundle import export_bundle
from library.contracts import KernelQuery
from library.history import audit
from library.records import ARCHIVED, REVOKED, SUPERSEDED, VALIDATED
from library.repair import repair
from library.store import Library
from tests.library.helpers import flip, make_container, make_manifest, object_path, text_of, validated


@pytest.fixture
def other(home: Path, lib: Library) -> Iterator[Library]:
    """Another process's handle of the same library."""
    with Library.open(home) as opened:
        yield opened


def once(at: object, name: str, act: Callable[[], Any], patch: pytest.MonkeyPatch) -> None:
    """Before the first call of `at.name` another process does `act`."""
    real, done = getattr(at, name), []

    def first(*arguments: Any, **named: Any) -> Any:
        if not done:
            done.append(True)
            act()
        return real(*arguments, **named)

    patch.setattr(at, name, first)


def refused(code: str, call: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(EsperError) as error:
        call(*arguments)
    assert error.value.code == code, error.value


@pytest.fixture(autouse=True)
def sound(lib: Library) -> Iterator[None]:
    """Whatever happened: rows, ledger, signatures and queries agree."""
    yield
    assert audit(lib).findings == ()
    assert verify_library(lib, lib.artifacts(), contents=True).findings == ()


def test_revoked_while_it_is_restored(
    lib: Library, other: Library, fast_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = validated(lib)
    lib.archive([artifact], fast_tmp / "b")
    once(lib.blobs, "put_many", lambda: other.revoke(artifact, "bad"), monkeypatch)
    refused("E0724", lib.restore, fast_tmp / "b")
    assert lib.record(artifact).state == REVOKED


def test_restored_twice_at_once(
    lib: Library, other: Library, fast_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = validated(lib)
    lib.archive([artifact], fast_tmp / "b")
    once(lib.blobs, "put_many", lambda: other.restore(fast_tmp / "b"), monkeypatch)
    refused("E0724", lib.restore, fast_tmp / "b")
    assert lib.load(artifact).record.state == VALIDATED


@pytest.mark.parametrize("state", [REVOKED, SUPERSEDED])
def test_retired_while_it_is_annotated(
    lib: Library, other: Library, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """A query never gives what was taken out of it."""
    artifact, better = validated(lib, 1), validated(lib, 2)
    act = {
        REVOKED: lambda: other.revoke(artifact, "bad"),
        SUPERSEDED: lambda: other.supersede(artifact, better),
    }[state]
    once(lib.trust, "signer", act, monkeypatch)
    refused("E0724", lib.annotate, artifact, {"risk_score": 0.5})
    assert [m.artifact_id for m in lib.find(KernelQuery()).matches] == [better]


def test_the_better_one_is_revoked_meanwhile(
    lib: Library, other: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, better = validated(lib, 1), validated(lib, 2)
    once(lib.index, "_begin", lambda: other.revoke(better, "bad"), monkeypatch)
    refused("E0724", lib.supersede, old, better)
    assert lib.record(old).state == VALIDATED
    refused("E0724", lib.supersede, old, old)


def test_superseded_while_it_is_archived(
    lib: Library, other: Library, fast_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Archived as what it is by then, and restored as that, with what took its place."""
    old, better = validated(lib, 1), validated(lib, 2)
    once(lib.index, "_begin", lambda: other.supersede(old, better), monkeypatch)
    lib.archive([old], fast_tmp / "b")
    assert lib.record(old).state == ARCHIVED and lib.record(old).previous_state == SUPERSEDED
    lib.restore(fast_tmp / "b")
    assert (lib.record(old).state, lib.record(old).superseded_by) == (SUPERSEDED, better)


def test_proven_and_refused_at_once(lib: Library, other: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two judges: the first verdict is final."""
    artifact = lib.put_artifact(make_container()).id
    act = lambda: other.record_verdict(artifact, {}, passed=False, reason="wrong")  # noqa: E731
    once(lib.blobs, "put_many", act, monkeypatch)
    with pytest.raises(EsperError) as error:
        lib.record_verdict(artifact, {"policy": "p"}, passed=True)
    assert error.value.code == "E0725" and lib.record(artifact).state == "REJECTED"


def test_stored_twice_at_once(lib: Library, other: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_container()
    once(lib.blobs, "put_many", lambda: other.put_artifact(data, side_files={"a": b"x"}), monkeypatch)
    record = lib.put_artifact(data, side_files={"b": b"y"})
    assert lib.side_file(record.id, "a") == b"x" and len(lib.artifacts()) == 1
    lib.collect(grace_s=0, dry_run=False)
    assert verify_library(lib, lib.artifacts(), contents=True).findings == ()


def test_collected_between_the_look_and_the_row(
    lib: Library, other: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that lay there unnamed are reused by a writer while they are collected."""
    data = make_container()
    lib.blobs.put(data)
    once(lib.blobs, "put_many", lambda: other.collect(grace_s=0, dry_run=False), monkeypatch)
    record = lib.put_artifact(data)
    other.collect(grace_s=0, dry_run=False)
    assert lib.read(record.id) == data


def test_archived_between_the_row_and_the_read(
    lib: Library, other: Library, fast_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal says what happened to it, not that bytes are lost."""
    artifact = validated(lib)

    def act() -> None:
        other.archive([artifact], fast_tmp / "b")
        other.collect(grace_s=0, dry_run=False)

    once(lib.blobs, "read_raw", act, monkeypatch)
    refused("E0743", lib.load, artifact)
    assert lib.record(artifact).state == "ARCHIVED"


def test_repaired_between_the_read_and_the_quarantine(
    lib: Library, other: Library, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader that saw bad bytes does not take the good ones away."""
    data = make_container()
    artifact = validated(lib)
    digest = lib.record(artifact).digest
    flip(object_path(home, digest), 70)
    once(lib.blobs, "quarantine", lambda: other.blobs.put(data), monkeypatch)
    refused("E0730", lib.load, artifact)
    assert lib.load(artifact).container.data == data
    kept = [p.name for p in (home / "quarantine").iterdir() if not p.name.endswith(".json")]
    assert len(kept) == 1, "only what the repair set aside"


def test_an_archive_is_not_written_over(lib: Library, fast_tmp: Path) -> None:
    """A bundle with archived artifacts may be their only copy: neither archive nor export takes its place."""
    first, second = validated(lib, 1), validated(lib, 2)
    place, foreign = fast_tmp / "b", fast_tmp / "mine"
    lib.archive([first, first], place)
    lib.collect(grace_s=0, dry_run=False)
    kept = place.read_bytes()
    refused("E0720", lib.archive, [second], place)
    refused("E0720", export_bundle, lib, lib.artifacts(state=VALIDATED), place)
    assert place.read_bytes() == kept and lib.record(second).state == VALIDATED
    foreign.write_bytes(b"thesis")
    refused("E0720", lib.archive, [second], foreign)
    assert foreign.read_bytes() == b"thesis"
    assert lib.restore(place) == [first]
    export_bundle(lib, lib.artifacts(), place)
    lib.archive([second], place)
    assert lib.restore(place) == [second]


def test_an_archive_of_another_library_is_not_written_over(lib: Library, home: Path, fast_tmp: Path) -> None:
    artifact = validated(lib, 1)
    lib.archive([artifact], fast_tmp / "b")
    with Library.open(fast_tmp / "other") as second:
        mine = validated(second, 2)
        refused("E0720", second.archive, [mine], fast_tmp / "b")
    assert lib.restore(fast_tmp / "b") == [artifact]


def test_a_lost_text_in_another_spelling_is_replaced(lib: Library, home: Path) -> None:
    """The first text of a blueprint came with an artifact whose container is lost as well."""
    manifest = make_manifest()
    first = lib.put_blueprint(
        manifest["blueprint"]["id"], b'{"name": "block_0", "spelled": "otherwise"}', "block_0"
    )
    record = lib.put_artifact(make_container())
    object_path(home, first.text_digest).unlink()
    assert [r.action for r in repair(lib, lib.artifacts(), {})] == ["restored"]
    assert lib.blueprint_text(record.blueprint).decode() == text_of(0)


def test_an_archived_artifact_is_not_judged(lib: Library, fast_tmp: Path) -> None:
    """Its bytes are elsewhere: the refusal is about its state, not about lost bytes."""
    artifact = validated(lib)
    lib.archive([artifact], fast_tmp / "b")
    lib.collect(grace_s=0, dry_run=False)
    for passed in (True, False):
        with pytest.raises(EsperError) as error:
            lib.record_verdict(artifact, {"policy": "p"}, passed=passed)
        assert error.value.code == "E0725" and "ARCHIVED" in error.value.message


def test_an_archived_artifact_that_is_revoked_is_not_missed(lib: Library, fast_tmp: Path) -> None:
    """Its bytes lie in the archive and are wanted no more: nothing is lost, and nothing is to repair."""
    artifact = lib.put_artifact(make_container(), side_files={"k.ptx": b"ptx"}).id
    lib.record_verdict(artifact, {"policy": "p"}, passed=True)
    lib.archive([artifact], fast_tmp / "b")
    lib.revoke(artifact, "bad")
    lib.collect(grace_s=0, dry_run=False)
    assert not lib.blobs.has(lib.record(artifact).digest)
    assert repair(lib, lib.artifacts(), {}) == []
    refused("E0742", lib.load, artifact)
    refused("E0724", lib.restore, fast_tmp / "b")
