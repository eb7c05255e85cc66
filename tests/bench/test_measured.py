"""The README's tables: the newest run of each block, the run named where runs differ, misses kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import figures, results
from docs import measured


def put(folder: Path, day: int, card: str, rows: list[dict[str, Any]]) -> None:
    head = {"bench": "blocks", "card": card, "commit": str(day) * 40, "date": f"2026-01-0{day}T00:00:00Z"}
    document = {**head, "versions": {"torch": "2"}, "rows": rows, "figures": {}}
    (folder / f"{day}.json").write_text(json.dumps(document), encoding="utf-8")


def row(block: str, impl: str, ms: float | None, **more: Any) -> dict[str, Any]:
    base = {"block": block, "size": "1", "dtype": "bfloat16", "phase": "fb", "mode": "plain", "floor_ms": 0.5}
    times = {f"{kind}_{end}": ms for kind in ("wall", "dev") for end in ("ms", "lo", "hi")}
    return {**base, "impl": impl, **times, "correct": ms is not None, **more}


def test_one_run_is_named_once(tmp_path: Path) -> None:
    assert "No measurement" in measured.tables(tmp_path)
    put(tmp_path, 1, "NVIDIA H200", [row("a", "eager", 2.0), row("a", "esper-fast", 1.0)])
    told = measured.tables(tmp_path)
    assert "| block | floor | esper-fast | eager |" in told and "commit 1111111" in told
    assert "| a 1 bfloat16 | 0.500 | 1.000 / 1.000 | 2.000 / 2.000 |" in told and ".svg" not in told
    (tmp_path / "h200.svg").touch()
    assert "(../bench/results/h200.svg)" in measured.tables(tmp_path)


def test_each_block_is_from_the_newest_run_that_has_it(tmp_path: Path) -> None:
    put(tmp_path, 1, "NVIDIA H200", [row("a", "esper-fast", 1.0), row("b", "esper-fast", 3.0)])
    late = [row("a", "esper-fast", 2.0), row("a", "liger", None, why="stopped after 9 s")]
    put(tmp_path, 2, "NVIDIA H100 80GB HBM3", [*late, row("b", "esper-fast", None, why="no time")])
    put(tmp_path, 3, "cpu", [row("a", "esper-fast", 9.0)])
    lines = measured.tables(tmp_path).splitlines()
    assert "| a 1 bfloat16 | 0.500 | 2.000 / 2.000 | stopped after 9 s | H100 2222222 |" in lines
    assert "| b 1 bfloat16 | 0.500 | 3.000 / 3.000 | - | H200 1111111 |" in lines  # the later run has no time
    assert "| a 1 bfloat16 | 0.500 | 9.000 / 9.000 |" in lines  # processors have a table of their own
    wrong = row("a", "esper-fast", 1.0, correct=False)
    assert measured.cell(wrong) == "wrong" and measured.cell(None) == "-"


def test_the_summary_stands_beside_the_fastest_right_peer(tmp_path: Path) -> None:
    assert "No measurement" in measured.summary(tmp_path)
    rows = [row("a", "esper-fast", 1.0), row("a", "eager", 3.0), row("a", "liger", 0.5, correct=False)]
    rows += [row("b", "esper-fast", 2.0), row("b", "compile", 1.0), row("b", "eager", 4.0)]
    rows += [row("c", "esper-fast", None, why="killed"), row("c", "eager", 1.0), row("d", "esper-fast", 5.0)]
    put(tmp_path, 1, "NVIDIA H200", rows)
    lines = measured.summary(tmp_path).splitlines()
    told = [line for line in lines if line.startswith("| ") and " 1 bfloat16 " in line]
    assert told[0] == "| a 1 bfloat16 | 1.000 | 3.000 eager | 3.00x | 1.000 | 3.000 eager | 3.00x |"
    assert told[1].startswith("| b 1 bfloat16 | 2.000 | 1.000 compile | 0.50x |"), "what is slower is shown"
    assert "| c 1 bfloat16 | no figure | 1.000 eager | - |" in told[2]
    assert told[3].startswith("| d 1 bfloat16 | 5.000 | - | - |")


def test_a_peer_that_is_off_in_single_elements_still_counts(tmp_path: Path) -> None:
    """Another place to round falls on the other side of a kink here and there; ours has to be right."""
    off: dict[str, Any] = {
        "correct": False,
        "why": "d(x): element [1, 2] is off by 1e-3, 9.00 x its bound (1.0)",
    }
    rows = [row("a", "esper-fast", 1.0), row("a", "eager", 3.0), row("a", "compile", 2.0, **off)]
    rows += [row("a", "liger", 0.5, correct=False, why="y: RMSE 1e-2 against float64", single=False)]
    put(tmp_path, 1, "NVIDIA H200", [*rows, row("b", "esper-fast", 1.0, **off), row("b", "eager", 2.0)])
    lines = [line for line in measured.summary(tmp_path).splitlines() if " 1 bfloat16 " in line]
    assert "| 2.000 compile | 2.00x |" in lines[0] and "no figure" in lines[1]
    table = measured.tables(tmp_path)
    assert "2.000 / 2.000 ~" in table and table.count("wrong") == 2
    assert figures.ratios(rows, "wall")["a 1"] == (2.0, 2.0, 2.0)


def test_a_bench_that_a_newer_one_has_in_it_has_no_table(tmp_path: Path) -> None:
    figure = {"first_step_ms": results.figure(9.0, "ms", 50.0)}
    for day, bench, card in ((1, "host", "NVIDIA H200"), (2, "runtime", "NVIDIA H200"), (3, "load", "cpu")):
        put(tmp_path, day, card, [])
        path = tmp_path / f"{day}.json"
        document = json.loads(path.read_text(encoding="utf-8"))
        more = {"bench": bench, "figures": figure, "host": {"processor": "AMD EPYC", "cores": 2}}
        path.write_text(json.dumps({**document, **more}), encoding="utf-8")
    told = measured.tables(tmp_path)
    assert "host on" not in told and "runtime on NVIDIA H200" in told
    assert "load on cpu (AMD EPYC, 2 cores)" in told


def test_the_summary_says_what_calls_and_loads_cost(tmp_path: Path) -> None:
    """Of each figure the newest, whatever bench it is from; what nobody measured has no line."""
    assert not measured.gates([])
    old, new = (results.figure(us, "us", 12.0) for us in (11.0, 13.0))
    head = {"card": "NVIDIA H200", "commit": "1" * 40}
    found = [{**head, "figures": {"no_grad_call_us": old}}, {**head, "figures": {"no_grad_call_us": new}}]
    lines = [line for line in measured.gates(found) if line.startswith("| ")]
    assert lines[1:] == ["| a call without gradients | 13 us | 12 us | no | H200 1111111 |"]


def test_figures_of_parts_that_a_run_left_out_are_from_earlier_ones(tmp_path: Path) -> None:
    def put_figures(commit: int, notes: list[str], **values: float) -> None:
        document = {
            "bench": "growth", "commit": str(commit) * 40, "date": f"2026-01-0{commit}", "card": "cpu",
            "versions": {"torch": "2.13.0"}, "rows": [], "notes": notes,
            "figures": {n: {"value": v, "unit": "ms", "target": None, "met": None, "over": 7}
                        for n, v in values.items()},
        }  # fmt: skip
        (tmp_path / f"growth-{commit}.json").write_text(json.dumps(document))

    put_figures(1, [], a=1.0, b=1.0)
    put_figures(2, ["left out: a"], b=2.0, c=2.0)
    put_figures(3, ["left out: a", "left out: b"], c=3.0)
    told = measured.tables(tmp_path)
    assert "| c | 3 ms (over 7) | - | - |" in told and told.count("| c |") == 1
    assert (
        "| b | 2 ms (over 7) | - | - | 2222222 |" in told
        and "| a | 1 ms (over 7) | - | - | 1111111 |" in told
    )
    put_figures(4, [], d=4.0)
    assert "| d | 4 ms (over 7) |" in measured.tables(tmp_path) and "earlier" not in measured.tables(tmp_path)


def test_a_peer_that_was_stopped_is_held_against_ours_all_the_same(tmp_path: Path) -> None:
    """Its newest time on such a card, with the run; no other card's, none that was wrong, and never ours."""
    best = row("a", "compile-max-autotune", 1.5)
    put(tmp_path, 1, "NVIDIA H200", [row("a", "esper-fast", 1.4), row("a", "eager", 3.0), best])
    put(
        tmp_path,
        2,
        "NVIDIA H100 80GB HBM3",
        [row("a", "esper-fast", 9.0), row("a", "compile-max-autotune", 0.1)],
    )
    put(tmp_path, 3, "NVIDIA H200", [row("a", "compile-max-autotune", 0.2, correct=False)])
    why = {"why": "stopped after 9 s", "correct": True}
    late = [
        row("a", "esper-fast", 1.0),
        row("a", "eager", 2.0),
        row("a", "compile-max-autotune", None, **why),
    ]
    put(tmp_path, 4, "NVIDIA H200", late)
    assert "| 1.000 | 1.500 compile-max-autotune (1111111) | 1.50x |" in measured.summary(tmp_path)
    assert "| 1.500 / 1.500 (1111111) |" in measured.tables(tmp_path)
    assert measured._stopped(json.loads(json.dumps({"bench": "blocks", "rows": late}))) == (
        "compile-max-autotune at 1 sizes"
    )
