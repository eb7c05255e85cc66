"""Static analysis: every pattern has a block that fires it and a similar one that must not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from esper_ir.builder import Builder, Value
from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint
from esper_ir.registry import OPS
from esper_ir.text import load, render
from esper_ir.verify import typed
from forge.analysis import CHECKS, analyse, deny
from forge.cli import main
from forge.service import front
from forge.target import resolve, targets
from runtime.calls import CALLS
from tests.source import ROOT

F, B = "float32", "bfloat16"
Make = Callable[[Builder], Value]
EXAMPLES = sorted((ROOT / "examples").glob("*.json"))


def x(b: Builder, *shape: int | str, dtype: str = F) -> Value:
    return b.input("x", dtype, list(shape) or ["rows", 64])


def chain(b: Builder, dtype: str, count: int) -> Value:
    y = x(b, "rows", 8, dtype=dtype)
    for i in range(count):
        y = b.add(y, b.tanh(y) if i == 0 else b.input(f"z{i}", dtype, ["rows", 8]))
    return y


def half_sum(b: Builder, dtype: str, width: int) -> Value:
    return b.cumsum(x(b, "rows", width, dtype=dtype), dim=1)


def mean_of_squares(b: Builder, square: Callable[[Value], Value]) -> Value:
    v = x(b)
    mean = b.mean(v, dims=[1], keepdim=True)
    return b.sub(b.mean(square(v), dims=[1], keepdim=True), b.mul(mean, mean))


def two_means(b: Builder) -> Value:
    """Squares of another tensor than the mean's."""
    v, z = x(b), b.input("z", F, ["rows", 64])
    mean = b.mean(v, dims=[1])
    return b.sub(b.mean(b.square(z), dims=[1]), b.square(mean))


def softmax_by_hand(b: Builder, shifted: bool) -> Value:
    v = x(b)
    e = b.exp(b.sub(v, b.amax(v, dims=[1], keepdim=True)) if shifted else v)
    return b.div(e, b.sum(e, dims=[1], keepdim=True))


def gaussian(b: Builder) -> Value:
    """Never positive under the exponential."""
    return b.sum(b.exp(b.neg(b.square(x(b)))), dims=[1])


def only_compared(b: Builder) -> Value:
    return b.where(b.gt(x(b), b.param("w", F, [64])), b.op("square", b.input("z", F, ["rows", 64])), 0.0)


def also_used(b: Builder) -> Value:
    w = b.param("w", F, [64])
    return b.where(b.gt(x(b), w), w, 0.0)


def dead(b: Builder, used: bool) -> Value:
    w = b.param("w", F, [64])
    return b.mul(x(b), w) if used else b.relu(x(b))


def product(b: Builder, rows: int, inner: int = 4096) -> Value:
    b.dim("n", min=1, max=1 << 20, tune=(rows,))
    return b.matmul(x(b, "n", inner, dtype=B), b.param("w", B, [inner, 4096]))


CASES: dict[str, tuple[str, Make, Make]] = {
    "dead parameter": ("E0501", lambda b: dead(b, False), lambda b: dead(b, True)),
    "log of softmax": ("E0502", lambda b: b.log(b.softmax(x(b))), lambda b: b.log_softmax(x(b))),
    "log of something else": (
        "E0502", lambda b: b.log(b.softmax(x(b))), lambda b: b.log(b.sigmoid(b.softmax(x(b)))),
    ),
    "long running sum": ("E0503", lambda b: half_sum(b, B, 4096), lambda b: half_sum(b, F, 4096)),
    "short running sum": ("E0503", lambda b: half_sum(b, "float16", 300), lambda b: half_sum(b, B, 16)),
    "many additions": ("E0503", lambda b: chain(b, B, 40), lambda b: chain(b, F, 40)),
    "few additions": ("E0503", lambda b: chain(b, B, 40), lambda b: chain(b, B, 8)),
    "zero gradient": ("E0504", only_compared, also_used),
    "mean of squares": (
        "E0505", lambda b: mean_of_squares(b, lambda v: b.mul(v, v)), lambda b: b.var(x(b), dims=[1]),
    ),
    "mean of other squares": ("E0505", lambda b: mean_of_squares(b, b.square), two_means),
    "softmax by hand": (
        "E0506", lambda b: softmax_by_hand(b, False), lambda b: softmax_by_hand(b, True),
    ),
    "exponentials below one": ("E0506", lambda b: b.log(b.sum(b.exp(x(b)), dims=[1])), gaussian),
    "saturating chain": (
        "E0507", lambda b: b.sigmoid(b.tanh(x(b))), lambda b: b.sigmoid(b.mul(b.tanh(x(b)), 3.0)),
    ),
    "attention of attention": ("E0507", lambda b: b.softmax(b.softmax(x(b))), lambda b: b.softmax(x(b))),
    "few rows": ("E0518", lambda b: product(b, 4), lambda b: product(b, 4096)),
    "tiny product": ("E0518", lambda b: product(b, 4), lambda b: product(b, 4, 16)),
}  # fmt: skip


def block(make: Make, name: str = "block") -> Blueprint:
    b = Builder(name)
    b.dim("rows", min=1, max=65536, tune=(512,))
    return b.build(make(b))


def codes(bp: Blueprint, target: str = "h100") -> list[str]:
    return [f.code for f in analyse(bp, typed(bp), resolve(target))]


@pytest.mark.parametrize("name", CASES)
def test_each_pattern_fires_and_its_likeness_does_not(name: str) -> None:
    code, bad, good = CASES[name]
    found = [f for f in analyse(block(bad), typed(block(bad)), resolve("h100")) if f.code == code]
    assert found and all(f.level == "warning" and f.node and f.hint for f in found)
    assert code not in codes(block(good))


def test_a_seed_keeps_its_shape() -> None:
    def wide(b: Builder) -> Value:
        return b.matmul(x(b), b.param("w", F, [64, 32]))

    def same(b: Builder) -> Value:
        return b.matmul(x(b), b.param("w", F, [64, 64]))

    assert "E0508" in codes(block(wide, "seed_wide")) and "E0508" not in codes(block(same, "seed_same"))
    assert "E0508" not in codes(block(wide, "wide"))
    b = Builder("wide", role="seed")
    b.dim("rows")
    assert "E0508" in codes(b.build(wide(b)))


def test_working_set_is_compared_with_the_card() -> None:
    def large(rows: int) -> Blueprint:
        b = Builder("large")
        b.dim("n", min=1, max=1 << 31, tune=(rows,))
        v = b.input("x", F, ["n", 8192])
        return b.build(b.matmul(v, b.param("w", F, [8192, 8192])))

    assert "E0509" in codes(large(1 << 20)) and "E0509" not in codes(large(1 << 16))
    assert "E0509" in codes(large(1 << 19), "t4") and "E0509" not in codes(large(1 << 19), "h200")
    assert "E0509" not in codes(large(1 << 20), "cpu-v3"), "the memory of a machine is not the target's"


def test_every_check_has_a_case() -> None:
    assert len(CHECKS) == len({code for code, _, _ in CASES.values()} | {"E0508", "E0509"})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_clean(path: Path) -> None:
    bp = load(path)
    assert codes(bp) == []


def test_denied_warnings_are_errors(tmp_path: Path, esper_library: Path) -> None:
    bp = block(CASES["log of softmax"][1])
    findings = front(bp, "cpu").findings
    deny(findings, ("E0501",))
    for codes_ in (("E0502",), ("all",)):
        with pytest.raises(EsperError) as error:
            deny(findings, codes_)
        assert error.value.code == "E0502" and error.value.diagnostics
    path = tmp_path / "bp.json"
    path.write_text(render(bp), encoding="utf-8")
    done = CliRunner().invoke(main, ["compile", str(path), "--target", "cpu", "--deny", "E0502", "--json"])
    assert done.exit_code == 1 and "E0502" in done.stderr
    assert json.loads(done.stdout)["artifacts"] == []


def test_ops_tells_gradients_and_lowering_for_every_target() -> None:
    done = CliRunner().invoke(main, ["ops", "--json"])
    document = json.loads(done.stdout)
    assert document["schema"] == "esper-ops/2"
    rows = {row["op"]: row for row in document["ops"]}
    assert set(rows) == set(OPS)
    for row in rows.values():
        assert (row["gradient"] in ("rule", "expansion")) != bool(row["reason"])
        assert set(row["lowering"]) == set(targets()) and all(row["lowering"].values())
        calls = {w.removeprefix("call ") for v in row["lowering"].values() for w in v.split(" + ")}
        assert calls - {"kernel", "product", "mm"} <= set(CALLS)
    assert rows["matmul"]["lowering"]["h100"] == "product"
    assert rows["matmul"]["lowering"]["cpu-v3"] == "call mm"
    assert rows["floor"]["reason"] and rows["softmax"]["gradient"] == "rule"
