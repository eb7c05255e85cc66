"""Choice is a pure function with a reason per refusal; the machine is probed in one place; the commands'
exit codes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import runtime
from esper_ir.diagnostics import Rejected
from library.platform import Platform
from library.records import ArtifactRecord
from runtime import bench, loader, select, system
from runtime.cache import Cache
from runtime.cli import main
from runtime.select import Facts, Query, rank
from runtime.timing import Calls, Timing
from tests.runtime.conftest import Put

ROW = ArtifactRecord(
    id="ab-cpu-v3-fast-1",
    digest="d",
    size=1,
    blueprint="ab",
    name="scale",
    target="cpu-v3",
    kind="cpu",
    arch="x86-64-v3",
    pipeline="fast",
    version="1",
    objective="speed",
    determinism="deterministic",
    interface="i",
    state="VALIDATED",
    reason="",
    previous_state="",
    superseded_by="",
    created=1.0,
    seq=1,
)
V4 = replace(ROW, id="ab-cpu-v4-fast-1", arch="x86-64-v4")
BEST = replace(ROW, id="ab-cpu-v3-aggressive-1", pipeline="aggressive")
CARD = replace(ROW, id="ab-h100-fast-1", kind="cuda", arch="sm_90a")
OLD = replace(CARD, id="ab-a100-fast-1", arch="sm_80")
PENDING = replace(ROW, id="ab-cpu-v3-standard-1", state="PENDING_BENCHMARKING", pipeline="standard")
REVOKED = replace(ROW, id="ab-cpu-v3-fast-9", state="REVOKED", reason="bad")
LOOSE = replace(CARD, id="ab-h100-fast-2", determinism="library-nondeterministic")
ROWS = [ROW, V4, BEST, CARD, OLD, PENDING, REVOKED, LOOSE]
HERE = {"cpu": Platform(cpu_level=4), "cuda": Platform(cuda_cc=(9, 0), driver=13000)}


def chosen(query: Query, platforms: dict[str, Platform] = HERE) -> list[str]:
    return [row.id for row in rank(query, platforms, ROWS).chosen]


def test_the_order() -> None:
    assert chosen(Query("ab")) == [CARD.id, LOOSE.id, V4.id, BEST.id, ROW.id]
    assert chosen(Query("ab", ("cpu",))) == [V4.id, BEST.id, ROW.id]
    assert chosen(Query("ab", ("cpu",), unvalidated=True))[-1] == PENDING.id
    assert chosen(Query("ab", ("cpu",), faulty=frozenset({V4.id}))) == [BEST.id, ROW.id, V4.id]
    assert chosen(Query("ab", ("cuda",), deterministic=True)) == [CARD.id]


def test_every_refusal_has_its_reason() -> None:
    found = rank(Query("ab"), {"cpu": Platform(cpu_level=3)}, ROWS)
    assert {r.id for r in ROWS} == {r.id for r in found.chosen} | set(found.refused)
    assert found.refused[V4.id].code == "E0781" and "level 3" in found.refused[V4.id].reason
    assert found.refused[CARD.id].code == "E0801"
    assert "REVOKED" in found.refused[REVOKED.id].reason and "bad" in found.refused[REVOKED.id].reason
    assert all(isinstance(r, Rejected) and len(r.reason) > 5 for r in found.refused.values())


@pytest.mark.parametrize(
    ("capability", "fits"), [((9, 0), {"sm_90a"}), ((8, 6), {"sm_80"}), ((10, 0), set())]
)
def test_cards(capability: tuple[int, int], fits: set[str]) -> None:
    """An H100 file serves an H200 (both 9.0); an `a` file nothing else."""
    found = rank(Query("ab", ("cuda",)), {"cuda": Platform(cuda_cc=capability)}, ROWS)
    assert {row.arch for row in found.chosen} == fits


def test_what_manifests_say_is_judged_too() -> None:
    facts = {
        CARD.id: Facts(min_driver=13010),
        V4.id: Facts(externs=({"name": "mkl", "version": "2024"},)),
        BEST.id: Facts(externs=({"name": "nolib", "version": "1"},)),
        ROW.id: Facts(dtypes={"x": "float32"}, ranges={"rows": (1, 64, 4)}),
    }
    here = {**HERE, "cpu": Platform(cpu_level=4, externs={"mkl": "2025"})}
    found = rank(Query("ab"), here, ROWS, facts)
    assert found.refused[CARD.id].code == "E0782" and "13.1" in found.refused[CARD.id].reason
    assert found.refused[BEST.id].code == "E0783" and "nolib" in found.refused[BEST.id].reason
    assert V4.id in [row.id for row in found.chosen]  # another version is tolerated and counted
    strict = rank(Query("ab", strict=True), here, ROWS, facts)
    assert strict.refused[V4.id].code == "E0783" and "2025 instead of 2024" in strict.refused[V4.id].reason
    for size, fits in ((64, True), (8, True), (7, False), (65, False), (0, False)):
        asked = rank(Query("ab", sizes={"rows": size, "other": 1}), here, ROWS, facts)
        assert (ROW.id in asked.refused) is not fits
    narrow = rank(Query("ab", dtypes={"x": "bfloat16"}), here, ROWS, facts)
    assert narrow.refused[ROW.id].code == "E0811" and "float32" in narrow.refused[ROW.id].reason


def test_one_too_new_for_the_driver_is_passed_over(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the better artifact's manifest asks for is known before it is chosen."""
    loader._meant.clear()
    loader._libraries.clear()
    plain = put()
    better = put(pipeline="aggressive", externs=[{"op": "mm", "versions": {"nolib": "1"}}])
    assert runtime.load("abababababab").artifact_id == plain
    found = runtime.doctor("abababababab")["choice"]
    assert found["refused"][better]["code"] == "E0783" and found["chosen"] == [plain]
    versioned = put(pipeline="standard", externs=[{"op": "mm", "versions": {"torch": "0.1"}}])
    loader._meant.clear()
    assert runtime.load("abababababab").artifact_id == versioned
    loader._meant.clear()
    monkeypatch.setenv("ESPER_STRICT", "1")
    assert runtime.load("abababababab").artifact_id == plain


def test_the_order_of_rows_does_not_matter() -> None:
    rows, want = list(ROWS), chosen(Query("ab", unvalidated=True))
    for seed in range(20):
        random.Random(seed).shuffle(rows)
        assert [r.id for r in rank(Query("ab", unvalidated=True), HERE, rows).chosen] == want


def test_nothing_suits_names_all() -> None:
    ranking = rank(Query("ab"), {"cpu": Platform(cpu_level=1)}, [ROW, V4])
    error = select.nothing_suits("ab" * 32, ranking, ("cpu",), {"cpu"})
    assert error.code == "E0807" and ROW.id in str(error) and V4.id in str(error)
    assert select.nothing_suits("ab" * 32, ranking, ("cuda",), {"cpu"}).exit_code == 16


def test_levels_of_processors() -> None:
    v2 = frozenset("cx8 cmov fxsr mmx sse sse2 syscall cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3".split())
    v3 = v2 | frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
    assert [system.level_of(f) for f in (frozenset(), v2, v3, v3 - {"fma"})] == [0, 2, 3, 2]
    assert system.level_of(v3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())) == 4
    assert system.machine("cpu").cpu_level == system.cpu_level()
    assert "torch" in system.extern_versions("cpu")


class Item:
    def __init__(self, nbytes: int, pins: int = 0) -> None:
        self.nbytes, self.pins = nbytes, pins

    def forked(self) -> bool:
        return True


def test_least_recently_used_goes_first_and_never_what_is_in_use() -> None:
    cache: Cache[Item] = Cache(100)
    for name, size, pins in (("a", 40, 0), ("b", 40, 1), ("c", 20, 0)):
        cache.get(name, lambda size=size, pins=pins: Item(size, pins))
    cache.get("a", lambda: pytest.fail("a is there"))
    cache.get("d", lambda: Item(15))
    assert list(cache._entries) == ["b", "a", "d"]
    assert (cache.info().bytes, cache.info().evictions, cache.info().hits) == (95, 1, 1)
    with pytest.raises(ValueError):
        cache.get("e", lambda: (_ for _ in ()).throw(ValueError("x")))
    assert cache.get("e", lambda: Item(1)).nbytes == 1


def test_commands(put: Put, esper_library: Path) -> None:
    run, name = CliRunner(), put()
    found = run.invoke(main, ["bench", name, "--json", "--rounds", "3", "--library", str(esper_library)])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["schema"] == "esper-runtime-bench/1" and document["artifact"] == name
    assert [row["impl"] for row in document["rows"]] == ["esper", "eager"]
    assert document["load"]["cached"]["median_us"] < document["load"]["uncached"]["median_us"]
    assert all(row["wall"] == row["host"] for row in document["rows"]), "one thing on a processor"
    assert all(row["low_us"] <= row["median_us"] for r in document["rows"] for row in r["wall"].values())
    told = run.invoke(main, ["bench", name, "--rounds", "6"])
    assert told.exit_code == 0 and "eager over esper" in told.stdout and ".." in told.stdout
    shown = run.invoke(main, ["doctor", name])
    assert shown.exit_code == 0 and name in shown.stdout


def test_what_is_compiled_beside_a_block_is_one_graph(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile at its best is the peer; where it does not work the others are told all the same."""
    torch.compiler.reset()
    whole = partial(torch.compile, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", whole)
    found = bench.measure(put(), compiled=True, rounds=3)
    assert [row["impl"] for row in found["rows"]] == ["esper", "eager", "compile"], found["notes"]
    monkeypatch.setattr(torch, "compile", partial(whole, backend="no such backend"))
    found = bench.measure(put(), compiled=True, rounds=3)
    assert [row["impl"] for row in found["rows"]] == ["esper", "eager"]
    assert "torch.compile does not work here" in found["notes"][0]


@pytest.mark.parametrize(
    ("theirs", "says"),
    [(2.0, "faster"), (0.5, "slower"), (1.0, "level"), (None, "worthless")],
)
def test_what_a_comparison_says(theirs: float | None, says: str) -> None:
    ours = Timing((100.0,) * 20)
    other = Timing(tuple(100 * (theirs or (0.01, 100.0)[i % 2]) for i in range(20)))
    rows = [bench.Row("side", dict.fromkeys(bench.WORKS, Calls(t, t)), None) for t in (ours, other)]
    found = bench._compared(*rows)
    assert found["fb"]["says"] == says
    assert bool(bench._doubts([found])) == (says == "worthless")


def test_exit_codes(put: Put, esper_library: Path) -> None:
    run, name = CliRunner(), put()
    pending = put(version="34" * 32, validated=False)
    card = put(target={"name": "h100", "kind": "cuda", "arch": "sm_90a", "match": "exact"})
    wanted = {"ffffffffffff": 10, pending: 12, "abababababab-": 14, card: 16}
    for text, code in wanted.items():
        done = run.invoke(main, ["bench", text, "--json"])
        assert done.exit_code == code, (text, done.output)
        assert json.loads(done.stdout)["error"]["exit_code"] == code
    for path in (esper_library / "objects").rglob("*"):
        if path.is_file() and b"forward_aligned" in path.read_bytes():
            data = bytearray(path.read_bytes())
            data[-60] ^= 1
            path.chmod(0o644)
            path.write_bytes(bytes(data))
    assert run.invoke(main, ["bench", name]).exit_code == 11
