"""The measuring side without measuring: definitions, verdicts, figures, files, what happens to peers that
hang."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bench import blocks, compare, correct, figures, load, measure, prepare, report, results
from esper_ir import reference, text
from forge.pass_manager import run
from forge.target import resolve
from forge.work import Work
from runtime.timing import Timing

AVAILABLE = blocks.available()


def small(block: blocks.Block) -> dict[str, int]:
    """The block's sizes with the free ones small; widths stay what the blueprint fixes."""
    free = {"rows": 3, "n": 2, "batch": 1}
    return {name: free.get(name, size) for name, size in block.sizes[0].items()}


@pytest.mark.parametrize("block", AVAILABLE, ids=lambda b: b.name)
def test_a_block_is_its_blueprint(block: blocks.Block):
    """Leaves of the same types in the same order, and the plain function means what the blueprint means."""
    blueprint = text.load(block.blueprint)
    names = [leaf.name for leaf in blueprint.leaves]
    shapes = [leaf.dims(small(block)) for leaf in block.leaves]
    assert [len(leaf.type.shape) for leaf in blueprint.leaves] == list(map(len, shapes))
    assert [leaf.type.dtype.value for leaf in blueprint.leaves] == [leaf.dtype for leaf in block.leaves]
    if sum(map(math.prod, shapes)) > 1 << 24:
        return  # the values of the large products are compared by the harness itself
    args = block.inputs(small(block), torch.device("cpu"))
    meant = next(iter(reference.evaluate(blueprint, dict(zip(names, args, strict=True))).values()))
    got = block.fn(*args)
    assert got.dtype == meant.dtype and got.shape == meant.shape
    torch.testing.assert_close(got, meant, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("block", blocks.BLOCKS, ids=lambda b: b.name)
def test_sizes_and_floors(block: blocks.Block):
    assert len(block.sizes) == 3 and len({block.size_label(s) for s in block.sizes}) == 3
    for sizes in block.sizes:
        forward, both = (block.floor_ms(sizes, phase, 4e12, 6e14) for phase in measure.PHASES)
        assert 0 < forward < both


def test_floor_of_the_gate():
    block = blocks.named("rmsnorm_residual")
    sizes = block.sizes[0]
    one = 8192 * 4096 * 2
    assert block.least_bytes(sizes, "f") == 3 * one + 2 * 4096
    assert block.least_bytes(sizes, "fb") == 7 * one + 3 * 2 * 4096
    assert block.floor_ms(sizes, "fb", 4.25e12, 7e14) == pytest.approx(0.1105, rel=1e-2)


def test_inputs_are_the_same_for_the_same_seed():
    block = blocks.named("small_mlp")
    first, again = (block.inputs(small(block), torch.device("cpu")) for _ in range(2))
    assert [correct.digest(a) for a in first] == [correct.digest(b) for b in again]
    assert correct.digest(first[0]) != correct.digest(
        block.inputs(small(block), torch.device("cpu"), seed=1)[0]
    )


def test_a_wrong_result_is_told():
    block = blocks.named("rmsnorm_residual")
    args = block.inputs(small(block), torch.device("cpu"))
    flow = torch.randn(3, 4096).bfloat16()
    truth = correct.truth(block.blueprint, block.fn, args, flow)
    assert truth.why_wrong(correct.results(block.fn, args, flow)) == ""
    wrong = correct.results(lambda x, r, w: block.fn(x, r, w) * 1.1, args, flow)
    assert truth.why_wrong(wrong).startswith("y: ")


def row(impl: str, ms: float, spread: float = 0.001, **more: Any) -> dict[str, Any]:
    times = {
        f"{q}_{end}": ms + d
        for q in ("wall", "dev")
        for end, d in (("ms", 0), ("lo", -spread), ("hi", spread))
    }
    base = {
        "block": "rmsnorm_residual",
        "size": "8192x4096",
        "dtype": "bfloat16",
        "phase": "fb",
        "mode": "plain",
    }
    return {**base, "impl": impl, "correct": True, "floor_ms": 0.11, **times, **more}


def document(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = results.header("blocks", {"copy_TBps": 4.25})
    return {
        **head,
        "card": "NVIDIA H200",
        "date": "2026-01-02T03:04:05Z",
        "rows": rows,
        "figures": {},
        **more,
    }


def test_figures_of_blocks():
    rows = [
        row("esper-fast", 0.12),
        row("eager", 1.4),
        row("compile", 0.15),
        row("liger", 0.1, correct=False),
    ]
    found = figures.of_blocks(rows, {"copy_TBps": 4.25}, "NVIDIA H200")
    assert found["fb_dev_geomean_vs_best_peer"]["value"] == pytest.approx(0.15 / 0.12), "a wrong peer is none"
    assert found["rmsnorm_residual_fb_dev_ms"]["met"] is True
    scaled = figures.of_blocks(rows, {"copy_TBps": 3.0}, "NVIDIA H100 80GB HBM3")[
        "rmsnorm_residual_fb_dev_ms"
    ]
    assert scaled["target"] == pytest.approx(0.125 * 4.25 / 3.0)
    slower = figures.of_blocks(
        [row("esper-fast", 0.2), row("compile", 0.15)], {"copy_TBps": 4.25}, "NVIDIA H200"
    )
    assert (
        slower["fb_dev_slower_than_best_peer"]["value"] == 1
        and slower["rmsnorm_residual_fb_dev_ms"]["met"] is False
    )


def test_nothing_measured_meets_nothing():
    found = figures.of_blocks([], {"copy_TBps": 3.0}, "NVIDIA H100", lost=["a 1", "b 2"])
    assert found["wrong_or_missing"]["value"] == 2
    assert not [name for name, one in found.items() if one["met"]]
    wrong = figures.of_blocks([row("esper-fast", 0.1, correct=False)], {"copy_TBps": 4.25}, "NVIDIA H200")
    assert wrong["rmsnorm_residual_fb_dev_ms"]["value"] is None and wrong["wrong_or_missing"]["met"] is False


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [(0.2, 0.1, "faster"), (0.1, 0.2, "slower"), (0.1, 0.1001, "same")],
)
def test_compare(first: float, second: float, verdict: str):
    a, b = row("esper-fast", first, 0.0001), row("esper-fast", second, 0.0001)
    found = compare.of_rows(a, b, "dev")
    assert found is not None and found.verdict == verdict


def test_compare_wide_intervals_and_wrong_rows():
    a, b = row("esper-fast", 0.1, 0.02), row("esper-fast", 0.11, 0.02)
    found = compare.of_rows(a, b, "dev")
    assert found is not None and found.verdict == "ambiguous"
    found = compare.of_rows(a, {**b, "correct": False}, "dev")
    assert found is not None and found.verdict == "ambiguous" and "wrong" in found.reason
    assert compare.of_rows(a, {**b, "dev_ms": None}, "dev") is None


def test_compare_command_and_bits(tmp_path: Path):
    paths = []
    for name, bits, ms in (("a", "1", 0.1), ("b", "2", 0.2)):
        rows = [row("esper-fast", ms, digests={"y": bits}, artifact="id")]
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(document(rows)), encoding="utf-8")
    done = CliRunner().invoke(compare.main, [*map(str, paths), "--quantity", "dev", "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 1 and told["rows"][0]["verdict"] == "slower" and len(told["bits_differ"]) == 1
    assert told["alone"] == []


def test_compare_says_what_it_cannot_compare(tmp_path: Path):
    """Rows of one side alone, and files that are none."""
    first, second, other = (tmp_path / f"{name}.json" for name in "abc")
    first.write_text(json.dumps(document([row("esper-fast", 0.2), row("liger", 0.1)])), encoding="utf-8")
    second.write_text(json.dumps(document([row("esper-fast", 0.1)])), encoding="utf-8")
    done = CliRunner().invoke(compare.main, [str(first), str(second), "--quantity", "wall"])
    assert done.exit_code == 0, done.output
    assert "faster     wall  2.000x [1.970, 2.030]" in done.output
    assert "only in the first: rmsnorm_residual 8192x4096 bfloat16 fb liger plain" in done.output
    assert done.output.splitlines()[-1] == "1 faster, 0 slower, 0 same, 0 ambiguous"
    for broken in ("{", "{}", json.dumps({"schema": results.SCHEMA, "bench": "load"})):
        other.write_text(broken, encoding="utf-8")
        done = CliRunner().invoke(compare.main, [str(first), str(other)])
        assert done.exit_code == 1 and "c.json" in done.output and "Traceback" not in done.output


def test_the_file(tmp_path: Path):
    made = document([row("eager", float("nan"))], commit="0123456789abcdef")
    path = results.write(made, tmp_path)
    assert path.name == "blocks-2026-01-02-h200-0123456.json"
    read = results.read(path)
    assert read["rows"][0]["wall_ms"] is None, "no NaN in a file"
    later = {**made, "date": "2026-01-03T00:00:00Z", "commit": "f" * 40}
    results.write(later, tmp_path)
    assert [d["commit"][:1] for d in results.newest("blocks", tmp_path)] == ["f"]
    assert results.short_card("NVIDIA H100 80GB HBM3") == "h100" and results.short_card("cpu") == "cpu"


def test_picture(tmp_path: Path):
    results.write(document([row("esper-fast", 0.12), row("eager", 1.4), row("compile", 0.15)]), tmp_path)
    (path,) = report.write(tmp_path)
    told = path.read_text(encoding="utf-8")
    assert told.count("<rect") == 4 and "esper-fast 0.12 ms" in told and report.COLOURS["ours"] in told


def test_a_graphed_step_is_its_replay():
    wall, dev, host = (Timing((t, t, t)) for t in (30.0, 10.0, 5.0))
    one = measure.Figures({"a": wall, "b": wall}, {}, {"a": dev}, {"a": host, "b": host}, {"a": dev})
    found = one.graphed(("b",))
    assert found.wall == {"a": dev, "b": wall} and found.host == {"a": dev, "b": host}
    assert found.dev == {"a": dev} and one.graphed().row("b")["wall_ms"] is None


def test_the_way_on_a_card(monkeypatch: pytest.MonkeyPatch):
    """Without one: what is captured, and that everything timed is timed while the card is held."""
    inside: list[str] = []
    depth = [0]

    @contextmanager
    def held() -> Iterator[None]:
        depth[0] += 1
        yield
        depth[0] -= 1

    def timed(what: str, us: float) -> Any:
        def time(work: Any, **options: Any) -> dict[str, Timing]:
            assert depth[0] == 1
            inside.append(f"{what} {' '.join(work)}")
            return {name: Timing((us,) * 3) for name in work}

        return time

    monkeypatch.setattr(measure.timing, "wall_times", timed("once", 1e4))
    monkeypatch.setattr(measure.timing, "device_times", timed("device", 20.0))
    monkeypatch.setattr(measure.timing, "host_times", timed("host", 5.0))
    monkeypatch.setattr(measure.timing, "captured", lambda fn: (fn, fn() != "not"))
    work = {"a": lambda: "", "b": lambda: "not", "c": lambda: ""}
    effort = measure.Effort(repeats=2)
    found = measure.measured(work, effort, torch.device("cuda"), "fb", held=held, graphs=("c",))
    assert inside == ["once a b c", *["device a b c"] * 2, "host a b c", *["device a"] * 2, "host a"]
    assert set(found.wall) == {"a", "b", "c"} and set(found.dev) == set(found.replay) == {"a"}
    graphed = found.graphed(("c",))
    assert set(graphed.wall) == {"a", "c"} and graphed.row("c")["host_us"] == 5.0


def test_long_calls_have_fewer_rounds():
    usual = measure.Effort()
    assert usual.within(0.1) == usual
    long = usual.within(20.0)
    assert (long.rounds, long.host_calls, long.repeats) == (2, 2, usual.repeats)


def test_long_calls_of_a_processor_have_fewer_rounds_too(monkeypatch):
    asked = []

    def timed(work, *, rounds=30, at_least_us=50.0, warm=5):
        asked.append(rounds)
        return {name: Timing((2e6,) * rounds) for name in work}  # two seconds

    monkeypatch.setattr(measure.timing, "cpu_times", timed)
    effort = measure.Effort(repeats=3, rounds=15, span_ms=30_000.0)
    found = measure.measured({"a": lambda: None}, effort, torch.device("cpu"), "f")
    assert asked == [1, 5, 5, 5] and set(found.wall) == {"a"}


def test_marginal_is_per_block():
    one = measure.Figures(host={"a": Timing((10.0, 10.0, 10.0))})
    deep = measure.Figures(host={"a": Timing((26.0, 42.0, 26.0))})
    assert measure.marginal(one, deep).host["a"].samples == (1.0, 2.0, 1.0)


def test_three_launches_each_way():
    blueprint = text.load(prepare.HOST_BLOCK)
    steps = tuple(s for s in prepare.repeating().steps if s[0] not in ("build", "package"))
    work = run(replace(prepare.repeating(), steps=steps), Work(blueprint, resolve("h100"), "fast"))
    counts = {low.plan.phase: len(low.plan.steps) for low in work.lowerings}
    assert counts == {"inference": 1, "forward": 3, "backward": 3}


def test_bare_environment():
    class Place:
        home = Path("/somewhere")

    made = load.bare_environment(Place())  # type: ignore[arg-type]
    assert made["PATH"] == "/nonexistent" and made["HOME"] == load.NOWHERE
    with pytest.raises(OSError):
        Path(made["HOME"]).mkdir()


def test_effort_is_data():
    assert replace(measure.Effort(), repeats=1).rounds == measure.Effort().rounds
