"""What cannot be judged or written here: artifacts for other machines, libraries without write permission."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from esper_ir.diagnostics import EsperError
from gauntlet import annotating, cases, quarantine, runner
from gauntlet.cli import main
from gauntlet.exclusive import exclusive
from gauntlet.isolate import FINISHED
from gauntlet.risk import model
from library import seen
from library.manifest import pack, unpack
from library.store import Library
from tests.faults import handmade, toys
from tests.gauntlet.conftest import put
from tests.library.world import in_child

REFUSED, OTHER, NOBODY = 40, 41, 65534
SHM = "/dev/shm"


def _for_another_processor(home: Path) -> str:
    """The id of a stored artifact that no processor runs."""
    made = unpack(handmade.build(toys.affine()))
    manifest = json.loads(json.dumps(made.manifest))
    blobs = [(b["name"], b["kind"], bytes(made.blobs[b["name"]])) for b in manifest["blobs"]]
    manifest["target"]["arch"] = "x86-64-v9"
    kept = {k: v for k, v in manifest.items() if k not in ("artifact_id", "blobs")}
    with Library.open(home, roles=("compiler",)) as library:
        return library.put_artifact(pack(kept, blobs)).id


def _bench(home: Path, *words: str) -> Any:
    return CliRunner().invoke(main, ["bench", "--quick", "--library", str(home), *words])


def test_what_is_for_another_machine_is_left_and_no_failure(home: Path) -> None:
    here, elsewhere = put(home, toys.norm()), _for_another_processor(home)
    done = _bench(home, "--pending", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and "errors" not in told, told
    assert [(v["artifact_id"], v["verdict"]) for v in told["verdicts"]] == [(here, "VALIDATED")]
    assert [(e["code"], e["details"]["artifact"]) for e in told["left"]] == [("E0903", elsewhere)]
    again = _bench(home)
    assert again.exit_code == 0 and f"left pending: {elsewhere}" in again.stderr and "v9" in again.stderr
    assert "1 left pending" in again.stderr
    with Library.open(home, readonly=True) as library:
        assert library.record(elsewhere).state == "PENDING_BENCHMARKING"


def test_what_was_asked_for_by_name_is_an_error(home: Path) -> None:
    elsewhere = _for_another_processor(home)
    for words in ((elsewhere,), (elsewhere, "--pending")):
        done = _bench(home, *words)
        assert done.exit_code == 16 and "E0903" in done.stderr, done.stderr
    put(home, toys.norm())
    absent = _bench(home, "--pending", "--device", "cuda:99")
    assert absent.exit_code == 16 and "no cuda:99" in absent.stderr, "the device was asked for by name"


def _writes(home: Path) -> dict[str, Callable[[], object]]:
    """Everything the gauntlet writes beside a library by calls of its own, and marks of the key home."""
    server: Any = SimpleNamespace(run=lambda *a: SimpleNamespace(
        kind=FINISHED, last=lambda n: {"good": True}, detail="", output=""))  # fmt: skip
    deaf: Any = SimpleNamespace(run=lambda *a: SimpleNamespace(
        kind="", last=lambda n: None, detail="hung", output=""))  # fmt: skip
    peers: Any = SimpleNamespace(to_json=list)
    learned = model.Model("simulated", {}, 1.0, 0.0, {})
    return {
        "lock": lambda: exclusive(home, "artifact").__enter__(),
        "put aside": lambda: quarantine.probe(home, "cuda:1", deaf),
        "taken back": lambda: quarantine.admit(home, "cuda:0", server),
        "taken back after a failure": lambda: quarantine.probe(home, "cuda:0", server),
        "case": lambda: cases.save(home / runner.CASES, b"case"),
        "peers": lambda: annotating.write_peers(home, peers),
        "model": lambda: model.save(learned, home / "risk" / "model.json"),
        "seen": lambda: seen.forget(home, "origin"),
    }


@pytest.fixture
def open_place(tmp_path: Path) -> Iterator[Path]:
    """A private directory whose parents others may enter (pytest's they may not)."""
    place = Path(tempfile.mkdtemp(prefix="esper-test-", dir=SHM if os.access(SHM, os.W_OK) else tmp_path))
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.parametrize("what", _writes(Path()))
def test_a_library_without_write_permission(
    open_place: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As a user whom permissions bind: refused by name, whatever was to be written."""
    monkeypatch.setenv("ESPER_KEYS", str(open_place / "keys"))
    home = open_place / "library"
    put(home, toys.affine())
    aside = quarantine.place(home, "cuda:0")
    for path in (aside, home / "seen" / "origin"):
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"reason": "it hung"}')
    everything = [open_place, *open_place.rglob("*")]
    if os.geteuid() == 0:
        for path in everything:
            os.chown(path, NOBODY, NOBODY)
    closed = [p for p in everything if p.is_dir() and home in (p, *p.parents)]
    for path in closed:
        path.chmod(0o500)

    def work() -> None:
        if os.geteuid() == 0:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            _writes(home)[what]()
        except EsperError as error:
            raise SystemExit(REFUSED if error.code == "E0702" else OTHER) from error

    status = in_child(work)
    for path in closed:
        path.chmod(0o700)
    assert status == REFUSED
