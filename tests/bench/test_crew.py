"""The processes of a run: what is kept of those that end early, who may use a card, what a worker says."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.runtime import benchmarking

from bench import (
    bits,
    crew,
    figures,
    harness,
    measure,
    merge,
    peers,
    results,
    shard,
    turns,
    waterfall,
    worker,
)
from bench.blocks import SIZES, named
from bench.crew import Crew, Job, Means
from bench.flops import of_call
from bench.prepare import kernel_flops
from forge.service import compile_file
from library.launch import ExternStep
from library.store import Library

MLP = named("small_mlp")
TINY = {"rows": 4, "cols": 64, "hidden": 256}


def means(**changes: Any) -> Means:
    now = time.monotonic()
    given = {
        "cards": (),
        "width": 1,
        "compile_end": now + 60,
        "end": now + 60,
        "limit": 30.0,
        "caches": Path(),
    }
    return Means(**{**given, **changes})


def test_a_process_that_hangs_is_told_and_killed() -> None:
    ended = crew.bounded([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    assert ended.startswith("stopped")
    job = Job(MLP, MLP.sizes[0], {"impls": [peers.MAX]})
    said = [{"kind": "trying", "impl": "eager"}, {"kind": "ready", "name": "eager"}]
    lines = crew.unfinished([*said, {"kind": "trying", "impl": peers.MAX}], ended, job)
    assert [(x["kind"], x.get("impl"), x.get("phase")) for x in lines] == [
        ("row", peers.MAX, "f"),
        ("row", peers.MAX, "fb"),
        ("killed", None, None),
    ]
    assert crew.unfinished([{"kind": "done"}], "", job) == []
    assert [x["kind"] for x in crew.unfinished(said, ended, job)] == ["killed"]


def test_ours_comes_before_what_compiles_and_its_peers_get_another_process() -> None:
    assert worker.order([peers.EAGER, peers.MAX, peers.COMPILE]) == (
        peers.EAGER, peers.OURS, peers.COMPILE, peers.MAX,
    )  # fmt: skip
    assert worker.order([peers.EAGER, peers.LIGER], without_ours=True) == (peers.LIGER,)
    said = [{"kind": "ready", "name": peers.EAGER}, {"kind": "trying", "impl": peers.OURS}]
    assert crew.ours_brought_it_down([*said, {"kind": "killed", "why": "exit code 1"}])
    assert crew.ours_brought_it_down([*said, {"kind": "card_lost"}, {"kind": "done"}])
    ready = {"kind": "ready", "name": peers.OURS}
    later = {"kind": "trying", "impl": peers.LIGER}
    assert not crew.ours_brought_it_down([*said, ready, {"kind": "killed", "why": "stopped"}])
    assert not crew.ours_brought_it_down([*said, later, {"kind": "killed", "why": "stopped"}])
    assert not crew.ours_brought_it_down([*said, ready, later, {"kind": "done"}])


class Played(Crew):
    """No processes: what they would say, and in which order they were asked."""

    asked: list[tuple[str, str]]

    def _process(self, job: Job, do: str, card: str, seconds: float, more: Any) -> list[dict[str, Any]]:
        self.asked.append((do, job.label))
        if job.block.name == "softmax":
            raise OSError("no more processes")
        return [{"kind": "ready", "name": "esper", "facts": {}}] if do == "prepare" else [{"kind": "done"}]


@pytest.mark.parametrize("cards", [(), ("0", "1")])
def test_all_is_compiled_then_measured_in_order(cards: tuple[str, ...]) -> None:
    jobs = [Job(named(n), named(n).sizes[0], {"impls": []}) for n in ("swiglu", "layernorm", "lora")]
    told: list[str] = []
    made = Played(jobs, means(cards=cards), lambda job, lines: told.append(f"{job.label} {lines[0]['kind']}"))
    made.asked = []
    made.go()
    assert [what for what, _ in made.asked] == ["prepare"] * 3 + ["measure"] * 3
    assert len(told) == 6 and sorted(told[3:]) == sorted(f"{job.label} done" for job in jobs)
    if not cards:
        assert [label for _, label in made.asked[3:]] == [job.label for job in jobs]


@pytest.mark.parametrize(("cards", "most"), [((), 25.0), (("0",), 60.0)])
def test_on_a_processor_a_block_has_its_limit_for_compiling_too(cards: tuple[str, ...], most: float) -> None:
    """There the next block waits for it."""
    given: list[float] = []

    class Told(Played):
        def _process(self, job: Job, do: str, card: str, seconds: float, more: Any) -> list[dict[str, Any]]:
            given.append(seconds)
            return [{"kind": "killed", "why": "late"}]

    made = Told([Job(MLP, TINY, {"impls": []})], means(cards=cards, limit=25.0), lambda job, lines: None)
    made.go()
    assert most - 2 < given[0] <= most


class Counted(Played):
    """How many are prepared at once."""

    now, most = 0, 0

    def _process(self, job: Job, do: str, card: str, seconds: float, more: Any) -> list[dict[str, Any]]:
        with self.changed:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.05)
        with self.changed:
            self.now -= 1
        return [{"kind": "done"}]


@pytest.mark.parametrize(("room", "most"), [(0.0, 2), (float("inf"), 6)])
def test_what_is_compared_fits_a_card(room: float, most: int) -> None:
    """Without room for two, each card has one process."""
    jobs = [Job(MLP, TINY, {"impls": []})] * 6
    made = Counted(jobs, means(cards=("0", "1"), width=6, room=room), lambda job, lines: None)
    made.go()
    assert made.most == most and set(made.taken.values()) == {0.0}


def test_a_run_ends_when_a_process_cannot_start_or_time_is_over() -> None:
    told: list[dict[str, Any]] = []
    softmax = Job(named("softmax"), named("softmax").sizes[0], {"impls": []})
    made = Played([softmax], means(), lambda job, lines: told.extend(lines))
    made.asked = []
    with pytest.raises(OSError, match="no more"):
        made.go()
    late = Played(
        [Job(MLP, TINY, {"impls": []})], means(compile_end=0.0), lambda job, lines: told.extend(lines)
    )
    late.asked = []
    late.go()
    assert late.asked == [] and told[-1]["why"] == "no time was left to compile"


def _hold(path: str, begun: Any, seconds: float) -> None:
    with turns.Turn(Path(path)).held():
        begun.set()
        time.sleep(seconds)


def test_one_process_holds_the_card(tmp_path: Path) -> None:
    path, context = tmp_path / "card", multiprocessing.get_context("fork")
    begun = context.Event()
    other = context.Process(target=_hold, args=(str(path), begun, 0.3))
    other.start()
    assert begun.wait(10)
    mine, begin = turns.Turn(path), time.monotonic()
    with mine.held(), mine.held():
        assert time.monotonic() - begin > 0.1
    other.join()


def test_what_takes_too_long_is_late() -> None:
    with pytest.raises(turns.Late), turns.bounded(0.05):
        time.sleep(5)
    with turns.bounded(5):
        pass


def test_tuning_waits_for_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = type(benchmarking.benchmarker).__mro__[:-1]
    for kind in kinds:  # taken back after the test
        for name, method in list(vars(kind).items()):
            if name.startswith("benchmark"):
                monkeypatch.setattr(kind, name, method)
    turn = turns.Turn(tmp_path / "card")
    assert any(name.endswith(".benchmark_gpu") for name in turns.guard_tuning(turn))
    inside: list[int] = []
    benchmarking.benchmarker.benchmark_cpu(lambda: inside.append(turn._depth), warmup=1, rep=1)
    assert set(inside) == {1} and turn._depth == 0


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Lines of both parts of a job, eager and ours, at a size for a test."""
    home = tmp_path_factory.mktemp("crew")
    home.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_LIBRARY", str(home / "library"))
        patch.setenv("ESPER_KEYS", str(home / "keys"))
        with Library.open() as library:
            (made,) = compile_file(MLP.blueprint, targets=("cpu",), library=library)
            library.record_verdict(made.artifact_id, {"stages": []}, passed=True)
        flops = {"4x64x256": {"inference u": 131072}}
        job = {
            "block": MLP.name, "sizes": TINY, "impls": ["eager"], "effort": asdict(measure.QUICK),
            "stack": False, "modes": ["plain"], "waterfall": True,
            "ceilings": {"copy_TBps": 0.01, "fp32_TFLOPs": 0.05},
            "library": str(home / "library"), "compiled": {made.artifact_id: {"flops": flops}}, "threads": 1,
            "unproven": False,
        }  # fmt: skip
        worker.run({**job, "do": "prepare"}, home / "prepare")
        lines = [json.loads(line) for line in (home / "prepare").read_text().splitlines()]
        ready = {line["name"]: line["facts"] for line in lines if line["kind"] == "ready"}
        worker.run({**job, "do": "measure", "ready": ready}, home / "measure")
        return lines + [json.loads(line) for line in (home / "measure").read_text().splitlines()]


def test_a_worker_prepares_and_measures(told: list[dict[str, Any]]) -> None:
    assert [line["kind"] for line in told[:5]] == ["trying", "ready", "trying", "ready", "done"]
    rows = [line for line in told if line["kind"] == "row"]
    assert [(r["impl"], r["phase"]) for r in rows] == [
        (impl, phase) for phase in ("f", "fb") for impl in ("eager", "esper-fast")
    ]
    assert all(r["correct"] and r["wall_ms"] > 0 and r["floor_ms"] > 0 for r in rows)
    ours = rows[1]
    assert ours["kernels"] and set(ours["digests"]) == {"y", "d(x)", "d(w1)", "d(w2)"} and ours["proven"]


def test_a_waterfall_has_every_step(told: list[dict[str, Any]]) -> None:
    (rows,) = (line["rows"] for line in told if line["kind"] == "waterfall")
    assert {r["phase"] for r in rows} == {"inference", "forward", "backward"}
    assert {r["kind"] for r in rows if r["step"] != "all"} <= {"kernel", "extern"}
    for row in rows:
        assert (
            row["bytes"] > 0
            and row["ms"] > 0
            and row["share"] == pytest.approx(row["floor_ms"] / row["ms"], rel=1e-3)
        )
    first = next(r for r in rows if r["phase"] == "inference" and r["step"] == "u")
    assert first["flops"] == 131072 or first["kind"] == "extern"


def test_operations_of_steps() -> None:
    def call(op: str, inputs: list[list[int]], out: list[int], **attrs: Any) -> int:
        return of_call(ExternStep("g", op, (), (), attrs), inputs, [out])

    assert call("mm", [[3, 5], [5, 7]], [3, 7]) == 2 * 3 * 5 * 7
    assert call("addmm", [[3, 7], [3, 5], [5, 7]], [3, 7]) == 2 * 3 * 5 * 7
    assert call("bmm", [[2, 3, 5], [2, 5, 7]], [2, 3, 7]) == 2 * 2 * 3 * 5 * 7
    image, filters = [2, 8, 8, 4], [6, 3, 3, 4]
    products = 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4)
    assert call("conv2d", [image, filters], [2, 8, 8, 6]) == products
    assert call("conv2d_input_grad", [[2, 8, 8, 6], filters], image) == products
    assert call("conv2d_weight_grad", [[2, 8, 8, 6], image], filters) == products
    q = [2, 4, 16, 8]
    assert call("attention", [q, q, q], q, is_causal=True) == 2 * 2 * 4 * 16 * 16 * 8
    assert call("attention_grad", [q] * 6, q, is_causal=False) == 10 * 2 * 4 * 16 * 16 * 8
    assert call("cat", [q], q) == 0
    found = kernel_flops(MLP.blueprint, "h100", MLP)["1024x64x256"]
    product = 2 * 1024 * 64 * 256
    phases = Counter[str]()
    for step, count in found.items():
        phases[step.split()[0]] += count
    assert phases == {"inference": 2 * product, "forward": 2 * product, "backward": 4 * product}
    assert found["inference u"] == 2 * product, "two products in one kernel"
    bound = waterfall.bounded(10**9, 10**12, 2.0, {"copy_TBps": 1.0, "bf16_TFLOPs": 500.0})
    assert bound == {"floor_ms": 2.0, "bound": "flops", "ms": 2.0, "share": 1.0}


def test_kernels_that_miss_their_share_are_named() -> None:
    step = {
        "block": "b",
        "phase": "forward",
        "step": "s",
        "kind": "kernel",
        "bound": "bytes",
        "floor_ms": 0.05,
    }
    rows = [{**step, "share": 0.95}, {**step, "share": 0.5}, {**step, "floor_ms": 0.001, "share": 0.1}]
    found = figures._kernels(rows)["memory_bound_kernels_under_90_percent"]
    assert (found["value"], found["over"], found["which"]) == (1, 2, ["b forward s 0.50"])


def test_bits_that_are_declared_to_vary_break_no_promise() -> None:
    base = {
        "block": "b",
        "size": "1",
        "determinism": bits.DETERMINISTIC,
        "repeatable": True,
        "digests": {"y": "0"},
    }
    free = {"determinism": "library-nondeterministic", "repeatable": False, "digests": {"y": "1"}}
    found = bits.figures([base, {**base, **free, "block": "c"}, {**base, "digests": {"y": "2"}}])
    assert found["bits_not_repeatable"]["met"] and found["bits_vary_as_declared"]["value"] == 1
    assert found["bits_differ_between_paths"]["which"] == ["b 1"]
    broken = bits.figures([{**base, "repeatable": False}])
    assert broken["bits_not_repeatable"]["which"] == ["b 1"]


def test_words_of_options() -> None:
    read = harness._words(SIZES)
    assert read(None, None, "large,medium") == ("medium", "large")  # type: ignore[arg-type]
    with pytest.raises(Exception, match="huge"):
        read(None, None, "huge")  # type: ignore[arg-type]


def test_peers_have_their_switches_and_tensors() -> None:
    assert peers.best_options()["coordinate_descent_tuning"] and peers.compile_options(peers.COMPILE) == {}
    args = MLP.inputs(TINY, worker.device_here())
    same, flow = peers.tensors(peers.EAGER, args, args[0])
    own, other = peers.tensors(peers.REDUCE, args, args[0])
    assert same[0] is args[0] and flow is args[0]
    assert own[0] is not args[0] and own[0].requires_grad and other is not args[0]


def row(size: str, ms: float | None, impl: str = "esper-fast") -> dict[str, Any]:
    times = {f"{q}_{end}": ms for q in ("wall", "dev") for end in ("ms", "lo", "hi")}
    base = {"block": "lora", "size": size, "dtype": "bfloat16", "phase": "fb", "mode": "plain", "impl": impl}
    return {**base, "correct": ms is not None, "floor_ms": 0.1, **times}


def a_run(day: int, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = results.header("blocks", {"copy_TBps": 4.0})
    made = {
        **head,
        "commit": "c" * 40,
        "dirty": False,
        "card": "NVIDIA H200",
        "date": f"2026-01-0{day}T00:00:00Z",
    }
    return {**made, "rows": rows, "figures": {}, "waterfall": [], "problems": [], **more}


def test_two_runs_of_a_commit_are_one_file(tmp_path: Path) -> None:
    folder, new = tmp_path / "results", tmp_path / "new.json"
    lost = [{"block": "lora", "size": "b", "why": "no time"}]
    steps = [{"block": "lora", "size": "a", "step": "all", "kind": "", "floor_ms": 0.1}]
    runs = [
        a_run(1, [row("a", 1.0), row("a", 3.0, "eager")], problems=lost, waterfall=steps),
        a_run(2, [row("a", 2.0), row("a", None, "eager"), row("b", 1.0)], waterfall=[]),
    ]
    for made in (*runs, runs[1]):  # the same file again changes nothing
        new.write_text(json.dumps(made), encoding="utf-8")
        written = merge.take(new, folder)
    assert [p.name for p in folder.iterdir()] == ["blocks-2026-01-02-h200-ccccccc.json"] == [written.name]
    found = results.read(written)
    assert [(r["size"], r["impl"], r["wall_ms"]) for r in found["rows"]] == [
        ("a", "esper-fast", 2.0),
        ("a", "eager", 3.0),  # the second run had no time for it
        ("b", "esper-fast", 1.0),
    ]
    assert found["problems"] == [] and len(found["runs"]) == 2 and found["waterfall"] == steps
    assert found["figures"]["wrong_or_missing"]["value"] == 0
    new.write_text(json.dumps({**runs[0], "dirty": True}), encoding="utf-8")
    with pytest.raises(ValueError, match="not a commit"):
        merge.take(new, folder)


def test_shares_of_tests_tell_what_passed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\n@pytest.mark.parametrize('n', range(4))\n"
        "def test_it(n):\n    assert n != 2\n    if n == 3: os._exit(3)\n"
    )
    texts = []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.shard", "-p", "no:cacheprovider", "."]
    for share in range(2):
        log = tmp_path / f"{share}.jsonl"
        subprocess.run(
            command, cwd=tmp_path, capture_output=True,
            env={"PATH": "", "PYTHONPATH": str(results.ROOT), "SHARD": f"{share}/2", "SHARD_LOG": str(log)},
        )  # fmt: skip
        texts.append(log.read_text(encoding="utf-8"))
    found = shard.summary(texts)
    assert (found["collected"], found["passed"], found["failed"]) == (4, 2, 1)
    assert found["stopped_in"] == ["test_some.py::test_it[3]"] and found["not_begun"] == []
    assert "assert 2 != 2" in found["tests"]["test_some.py::test_it[2]"]["why"]


def test_long_files_are_left_for_the_end(tmp_path: Path) -> None:
    for name in ("test_card.py", "test_z.py"):
        (tmp_path / name).write_text("def test_it(): pass\n")
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.shard", "-p", "no:cacheprovider", "."]
    env = {"PATH": "", "PYTHONPATH": str(results.ROOT), "SHARD_LOG": str(log)}
    subprocess.run(command, cwd=tmp_path, capture_output=True, env=env, check=True)
    first = json.loads(log.read_text(encoding="utf-8").splitlines()[0])
    assert first["collected"] == ["test_z.py::test_it", "test_card.py::test_it"]
