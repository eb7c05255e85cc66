"""Storing, finding, proving and loading."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from esper_ir.diagnostics import EsperError
from library.audit import verify_library
from library.bundle import export_bundle
from library.canon import sha256_hex
from library.records import ARCHIVED, PENDING_BENCHMARKING, REJECTED, REVOKED, SUPERSEDED, VALIDATED
from library.store import Library
from tests.library.helpers import contents, flip, make_container, make_manifest, object_path, validated


def code_of(call: object, *args: object, **kwargs: object) -> tuple[str, int]:
    assert callable(call)
    with pytest.raises(EsperError) as error:
        call(*args, **kwargs)
    return error.value.code, error.value.exit_code


def test_a_stored_artifact_is_pending_and_read_back(lib: Library) -> None:
    data = make_container()
    record = lib.put_artifact(data, side_files={"k.ptx": b"ptx"}, provenance={"host": "h"})
    assert record.state == PENDING_BENCHMARKING and record.digest == sha256_hex(data)
    assert lib.read(record.id) == data and lib.side_file(record.id, "k.ptx") == b"ptx"
    assert lib.blueprint(record.blueprint).state == "COMPILED"
    assert code_of(lib.side_file, record.id, "other") == ("E0721", 10)
    assert lib.put_artifact(data) == record and len(lib.artifacts()) == 1


def test_one_id_has_one_content(lib: Library, home: Path) -> None:
    lib.put_artifact(make_container(1))
    before = contents(home)
    manifest_like = make_container(1, size=2001)
    assert code_of(lib.put_artifact, manifest_like) == ("E0723", 14)
    assert contents(home).keys() == before.keys()


def test_two_versions_that_share_their_first_digits(lib: Library) -> None:
    """One in four billion: refused like any other conflict, with what to do."""
    version = make_manifest(1)["version"]
    lib.put_artifact(make_container(1))
    with pytest.raises(EsperError) as error:
        lib.put_artifact(make_container(1, version=version[:8] + version[:7:-1]))
    assert error.value.code == "E0723" and "by chance" in str(error.value)
    assert len(lib.artifacts()) == 1


def test_loading_needs_a_verdict(lib: Library) -> None:
    record = lib.put_artifact(make_container())
    assert code_of(lib.load, record.id) == ("E0740", 12)
    pending = lib.load(record.id, allow_unvalidated=True)
    assert pending.verdict is None and bytes(pending.container.blobs["choices"]) == b"{}"
    verdict = lib.record_verdict(record.id, {"policy": "p"}, passed=True)
    loaded = lib.load(record.id)
    assert loaded.record.state == VALIDATED and loaded.verdict is not None
    assert loaded.verdict.keyid == verdict.keyid and loaded.container.data == make_container()
    assert verdict.report == {"policy": "p"} and verdict.passed


def test_a_rejected_artifact_does_not_load(lib: Library) -> None:
    record = lib.put_artifact(make_container())
    lib.record_verdict(record.id, {}, passed=False, reason="numerics")
    assert code_of(lib.load, record.id) == ("E0741", 12)
    assert lib.record(record.id).reason == "numerics"
    assert lib.load(record.id, allow_unvalidated=True).record.state == REJECTED
    assert code_of(lib.record_verdict, record.id, {}, passed=True) == ("E0725", 14)


def test_verdicts_are_final_but_may_be_joined(lib: Library) -> None:
    artifact = validated(lib)
    lib.record_verdict(artifact, {"second": 1}, passed=True, card="other card")
    found = lib.verdict(artifact)
    assert found is not None and found.card == "other card"
    assert code_of(lib.record_verdict, artifact, {}, passed=False) == ("E0725", 14)


def test_revoked_and_superseded(lib: Library) -> None:
    old, new = validated(lib, 1), validated(lib, 2)
    lib.supersede(old, new, "faster")
    assert lib.record(old).state == SUPERSEDED and lib.load(old).record.superseded_by == new
    lib.revoke(new, "leaks")
    assert code_of(lib.load, new) == ("E0742", 13)
    assert code_of(lib.load, new, allow_unvalidated=True) == ("E0742", 13)
    assert code_of(lib.revoke, new, "again") == ("E0724", 14)
    assert lib.record(new).state == REVOKED


LEGAL = {
    PENDING_BENCHMARKING: {"pass", "fail", "revoke"},
    VALIDATED: {"pass", "revoke", "supersede", "archive", "annotate"},
    REJECTED: {"revoke", "archive"},
    SUPERSEDED: {"revoke", "archive"},
    ARCHIVED: {"restore", "revoke"},
    REVOKED: set(),
}


def artifact_in(lib: Library, state: str, better: str, bundle: Path) -> str:
    """An artifact that has come to be in a state, and a bundle of it from before that."""
    artifact = lib.put_artifact(make_container(1)).id
    if state != PENDING_BENCHMARKING:
        lib.record_verdict(artifact, {"policy": "p"}, passed=state != REJECTED)
    export_bundle(lib, [lib.record(artifact)], bundle)
    move = {
        SUPERSEDED: lambda: lib.supersede(artifact, better),
        ARCHIVED: lambda: lib.archive([artifact], bundle),
        REVOKED: lambda: lib.revoke(artifact, "bad"),
    }.get(state)
    if move is not None:
        move()
    assert lib.record(artifact).state == state
    return artifact


MOVES: dict[str, Callable[[Library, str, str, Path], object]] = {
    "pass": lambda lib, a, better, place: lib.record_verdict(a, {"policy": "q"}, passed=True),
    "fail": lambda lib, a, better, place: lib.record_verdict(a, {"policy": "q"}, passed=False),
    "supersede": lambda lib, a, better, place: lib.supersede(a, better),
    "archive": lambda lib, a, better, place: lib.archive([a], place / "out"),
    "restore": lambda lib, a, better, place: lib.restore(place / "b"),
    "annotate": lambda lib, a, better, place: lib.annotate(a, {"risk_score": 0.5}),
    "revoke": lambda lib, a, better, place: lib.revoke(a, "bad"),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("state", LEGAL)
def test_every_move_from_every_state(lib: Library, fast_tmp: Path, state: str, move: str) -> None:
    """What the table of the manual allows works; all else is refused by name and changes nothing."""
    better = validated(lib, 2)
    artifact = artifact_in(lib, state, better, fast_tmp / "b")
    before = lib.index.rows("SELECT size FROM ledger_state"), lib.record(artifact)
    if move in LEGAL[state]:
        MOVES[move](lib, artifact, better, fast_tmp)
        ((size,),), ((after,),) = before[0], lib.index.rows("SELECT size FROM ledger_state")
        assert after == size + 1, "one entry for one transition"
    else:
        code, exit_code = code_of(MOVES[move], lib, artifact, better, fast_tmp)
        assert code in ("E0724", "E0725") and exit_code == 14
        assert (lib.index.rows("SELECT size FROM ledger_state"), lib.record(artifact)) == before
    assert verify_library(lib, lib.artifacts(), contents=True).findings == ()


def test_illegal_moves_of_a_blueprint_change_nothing(lib: Library) -> None:
    artifact = lib.put_artifact(make_container()).id
    size = lib.index.row("SELECT size FROM ledger_state")
    for state in ("FAILED", "INVALID", "UNVALIDATED", "COMPILED", "NONSENSE", ""):
        move = lib.set_blueprint_state
        assert code_of(move, lib.record(artifact).blueprint, state) == ("E0724", 14)
    assert lib.index.row("SELECT size FROM ledger_state") == size


def test_resolve(lib: Library) -> None:
    one, two = lib.put_artifact(make_container(1)), lib.put_artifact(make_container(2))
    other = lib.put_artifact(make_container(3, blueprint=1))
    assert lib.resolve(one.id) == one and lib.resolve(one.id[:-2]) == one
    assert lib.resolve(other.blueprint) == other and lib.resolve(other.blueprint[:20]) == other
    assert lib.resolve(other.blueprint[:4]) == other
    assert lib.blueprint(other.blueprint[:4]).id == other.blueprint
    with pytest.raises(EsperError) as error:
        lib.resolve(one.blueprint)
    assert (error.value.code, error.value.exit_code) == ("E0722", 14)
    assert set(error.value.details["candidates"]) == {one.id, two.id}
    wrong = one.id[:-1] + ("0" if one.id[-1] != "0" else "1")
    with pytest.raises(EsperError) as error:
        lib.resolve(wrong)
    assert error.value.code == "E0721" and error.value.details["nearest"][0] == one.id
    for text in ("", "abc", "../../etc", "A" * 20, "x" * 300, "a b c d"):
        assert code_of(lib.resolve, text) == ("E0720", 2)


def test_flipped_byte_is_quarantined_and_never_returned(lib: Library, home: Path) -> None:
    artifact = validated(lib)
    digest = lib.record(artifact).digest
    flip(object_path(home, digest), 500)
    assert code_of(lib.load, artifact) == ("E0730", 11)
    assert not object_path(home, digest).exists() and len(list((home / "quarantine").iterdir())) == 2
    assert code_of(lib.load, artifact) == ("E0731", 11)
    lib.put_artifact(make_container())
    assert lib.load(artifact).record.state == VALIDATED


def test_roles(home: Path) -> None:
    with Library.open(home, roles=("compiler",)) as forge:
        artifact = forge.put_artifact(make_container()).id
        assert code_of(forge.record_verdict, artifact, {}, passed=True) == ("E0752", 12)
    with Library.open(home, roles=("validator",)) as gauntlet:
        assert code_of(gauntlet.put_artifact, make_container(9)) == ("E0752", 12)
        gauntlet.record_verdict(artifact, {}, passed=True)
    with Library.open(home, readonly=True) as runtime:
        runtime.warm()
        assert runtime.load(artifact).record.id == artifact
        assert code_of(runtime.put_artifact, make_container(9)) == ("E0712", 16)
        assert code_of(runtime.revoke, artifact, "") == ("E0712", 16)


def test_measurements(lib: Library, home: Path) -> None:
    lib.put_measurement("g", "sm_90", "t1", {"us": 1.5, "choice": [1, 2]})
    lib.put_measurement("g", "sm_90", "t1", {"us": 1.5, "choice": [1, 2]})
    lib.put_measurement("g", "sm_90", "t1", {"us": 1.4})
    lib.put_measurement("g", "sm_80", "t1", {"us": 9.0})
    assert [m["us"] for m in lib.measurements("g", "sm_90", "t1")] == [1.5, 1.4]
    with Library.open(home, readonly=True) as other:
        assert len(other.measurements("g", "sm_80", "t1")) == 1


def test_missing_library_is_not_made(home: Path) -> None:
    assert code_of(Library.open, home, readonly=True) == ("E0701", 10)
    assert code_of(Library.open, home, create=False) == ("E0701", 10)
    assert not home.exists()


def test_two_libraries_give_the_same_bytes(home: Path, tmp_path: Path) -> None:
    digests = set()
    for place in (home, tmp_path / "second"):
        with Library.open(place) as lib:
            digests.add(lib.put_artifact(make_container(), provenance={"host": str(place)}).digest)
    assert len(digests) == 1


def test_threads_share_one_handle(lib: Library) -> None:
    artifact = validated(lib)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(5):
                lib.put_artifact(make_container(1000 * number + i))
                assert lib.load(artifact).record.id == artifact
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(lib.artifacts()) == 21


def test_a_handle_is_not_carried_across_fork(lib: Library) -> None:
    lib.put_artifact(make_container())
    child = os.fork()
    if child == 0:
        try:
            lib.artifacts()
        except EsperError as error:
            os._exit(0 if error.code == "E0711" else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_closed_handle(home: Path) -> None:
    lib = Library.open(home)
    lib.close()
    lib.close()
    assert code_of(lib.artifacts) == ("E0711", 16)


def test_import_is_light() -> None:
    """Neither torch nor networkx nor pydantic nor what signs and verifies; less than 60 MiB beyond Python."""
    program = (
        "import sys\n"
        "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "before = rss()\n"
        "import library.store\n"
        "grown = rss() - before\n"
        "bad = {'torch', 'networkx', 'pydantic', 'cryptography', 'nacl', 'numpy'} & set(sys.modules)\n"
        "print(grown >> 20, sorted(bad))\n"
        "sys.exit(bool(bad) or grown > 60 << 20)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_bad_containers_leave_nothing(lib: Library, home: Path) -> None:
    before = contents(home)
    for data in (b"", b"ESPERART", make_container()[:-1], make_container() + b"x"):
        assert code_of(lib.put_artifact, data)[1] == 11
    assert code_of(lib.put_artifact, make_container(), side_files={"../x": b""}) == ("E0720", 2)
    assert code_of(lib.put_blueprint, "zz", b"{}", "x") == ("E0720", 2)
    assert code_of(lib.put_blueprint, make_manifest()["blueprint"]["id"], b"{", "x") == ("E0734", 11)
    assert contents(home) == before
