"""Large products in chunks of rows: the same numbers in less memory, and where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from esper_ir import text
from esper_ir.builder import Builder, Value
from esper_ir.graph import Blueprint
from esper_ir.types import Dim, DType
from forge.groups import chunk_of
from forge.lower import PhaseLowering
from forge.passes import chunks
from forge.service import front
from forge.work import Work
from gauntlet.extents import Range, outside
from library.launch import ExternStep, KernelStep, evaluate
from tests.forge.whole import check, checked

WIDE, DEEP = 640, 24
CHUNK, WHOLE, TUNED = 32, 64, 128
"""Rows: of a chunk at the tuned size, from which on there are chunks, and those to be fast at."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "linear_cross_entropy.json"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if memory were a thousand times as small."""
    monkeypatch.setattr(chunks, "WHOLE", WHOLE * WIDE * 4)
    monkeypatch.setattr(chunks, "CHUNK", CHUNK * WIDE * 4)


def _block(body: Callable[[Builder, Value, Value], Value], dtype: str = "float32", **dim: Any) -> Blueprint:
    """`body` of a builder, rows x [rows, DEEP] and classes t [rows]."""
    b = Builder("block")
    rows = b.dim("rows", **{"min": 1, "max": 4096, "tune": [TUNED], **dim})
    return b.build(body(b, b.input("x", dtype, [rows, DEEP]), b.input("t", "int64", [rows])))


def _head(b: Builder, x: Value, t: Value) -> Value:
    w = b.param("w", "float32", [DEEP, WIDE])
    return b.op("cross_entropy", x @ w, t)


def _smoothed(b: Builder, x: Value, t: Value) -> Value:
    """As torch's linear layer has its weight, with a bias, weights of the classes and smoothed labels."""
    w, bias = b.param("w", "float32", [WIDE, DEEP]), b.param("bias", "float32", [WIDE])
    classes = b.param("classes", "float32", [WIDE])
    z = b.op("linear", x, w, bias)
    return b.op("cross_entropy", z, t, classes, label_smoothing=0.1, reduction="sum")


def _each(b: Builder, x: Value, t: Value) -> Value:
    """A loss per row, of a norm of x."""
    w, scale = b.param("w", "float32", [DEEP, WIDE]), b.param("scale", "float32", [DEEP])
    return b.op("cross_entropy", b.op("rms_norm", x, scale) @ w, t, reduction="none")


def _gated(b: Builder, x: Value, t: Value) -> Value:
    gate, up = (b.param(n, "float32", [DEEP, WIDE]) for n in ("gate", "up"))
    down = b.param("down", "float32", [WIDE, DEEP])
    return x + (b.op("silu", x @ gate) * (x @ up)) @ down


def _softmax(b: Builder, x: Value, t: Value) -> Value:
    """Weights of a mixture: a softmax between two products."""
    a, c = b.param("a", "float32", [DEEP, WIDE]), b.param("c", "float32", [WIDE, DEEP])
    return b.op("softmax", x @ a, dim=1) @ c


def _everything(b: Builder, x: Value, t: Value) -> Value:
    """One number of all elements: its gradient is the same for all."""
    return b.op("sum", b.op("square", x @ b.param("w", "float32", [DEEP, WIDE])))


def _batch_of_one(b: Builder, x: Value, t: Value) -> Value:
    a, c = b.param("a", "float32", [DEEP, WIDE]), b.param("c", "float32", [WIDE, DEEP])
    return b.op("gelu", b.op("unsqueeze", x, dim=0) @ a) @ c


def _weighted(b: Builder, x: Value, t: Value) -> Value:
    """A mean by weights of the classes: their sum is known before the first chunk."""
    z = x @ b.param("w", "float32", [DEEP, WIDE])
    return b.op("cross_entropy", z, t, b.param("classes", "float32", [WIDE]), label_smoothing=0.2)


BLOCKS = {
    "head": _head, "smoothed": _smoothed, "each": _each, "gated": _gated, "softmax": _softmax,
    "everything": _everything, "batch of one": _batch_of_one, "weighted": _weighted,
}  # fmt: skip


def chunked(low: PhaseLowering) -> bool:
    return any(chunk_of(n.id) for n in low.phase.graph)


def largest(low: PhaseLowering, rows: int) -> int:
    """Elements of the largest buffer that no caller gives or gets."""
    temps = [b for b in low.plan.buffers if b.source == "temp"]
    return max((_count(b.shape, rows) for b in temps), default=0)


def _count(shape: Any, rows: int) -> int:
    out = 1
    for size in shape:
        out *= evaluate(size, {"rows": rows})
    return out


def above(work: Work) -> list[PhaseLowering]:
    """Plans for the tuned size."""
    return [low for low in work.lowerings if low.plan.bucket[0].high >= TUNED]


@cache
def _work(name: str, target: str = "h100") -> Work:
    """One for all sizes. The limits are those of the fixture, which every test here has."""
    return front(_block(BLOCKS[name]), target, "fast", "memory")


@pytest.mark.parametrize("rows", [1, WHOLE - 1, WHOLE, 125, TUNED, 211])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_numbers_are_those_of_the_whole(name: str, rows: int) -> None:
    work = checked(_work(name), {"rows": rows})
    assert all(chunked(low) for low in above(work))


@pytest.mark.parametrize("target", ["h100", "cpu-v3"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_chunk_of_it_is_there_at_a_time(name: str, target: str) -> None:
    work = _work(name, target)
    for low in above(work):
        assert largest(low, TUNED) == CHUNK * WIDE, low.phase.name
        wide = [b for b in low.plan.buffers if _count(b.shape, TUNED) == CHUNK * WIDE]
        # What a chunk needs at once, maybe twice: little work of two chunks may be one launch.
        assert len(wide) <= (10 if name == "gated" else 4)


def test_the_logits_of_a_vocabulary_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """32,000 words, 8,192 rows: a third of what they would take holds all that lies between."""
    monkeypatch.undo()
    work = front(text.load(EXAMPLE), "h100", "fast", "memory")
    logits = 8192 * 32000 * 2
    plans = [low.plan for low in work.lowerings if low.plan.bucket[0].high > 8192]
    assert {p.phase for p in plans} == {"inference", "forward", "backward"}
    for plan in plans:
        temps = [b for b in plan.buffers if b.source == "temp"]
        took = sum(_count(b.shape, 8192) * DType(b.dtype).itemsize for b in temps)
        kept = [plan.buffers[n] for n in plan.saved if plan.buffers[n].source != "input"]
        assert 3 * took < logits and all(100 * _count(b.shape, 8192) < 8192 * 32000 for b in kept), took


def test_sums_over_rows_are_added_up_by_the_library() -> None:
    work = front(_block(_head), "h100", "fast", "memory")
    low = above(work)[-1]
    sums = [s for s in low.plan.steps if isinstance(s, ExternStep) and s.op == "addmm"]
    assert len(sums) == 3 and all(s.inputs[0].buffer == s.outs[0].buffer for s in sums)


@pytest.mark.parametrize("target", ["h100", "cpu-v3"])
def test_what_is_done_in_every_chunk_is_one_kernel(target: str) -> None:
    """Of the last chunk, which is longer, it is another; so is what reads rows of x, elsewhere each time."""
    work = front(_block(_gated), target, "fast", "memory")
    low = above(work)[0]
    outside = {n for n, b in enumerate(low.plan.buffers) if b.source == "input" and b.name == "x"}
    kernels: dict[str, list[str]] = {}
    for step in low.plan.steps:
        if isinstance(step, KernelStep) and not outside & {a.value for a in step.args if a.kind == "buffer"}:
            kernels.setdefault(step.group.rpartition("@")[0], []).append(step.variants[0].kernel)
    repeated = [names for names in kernels.values() if len(names) == 4]
    assert repeated and all(len(set(names)) == 2 for names in repeated), kernels


def test_few_rows_come_at_once() -> None:
    work = front(_block(_head), "h100", "fast", "memory")
    buckets = {(low.plan.bucket[0].low, low.plan.bucket[0].high): chunked(low) for low in work.lowerings}
    assert buckets == {(1, WHOLE - 1): False, (WHOLE, 4096): True}


def _stack(heads: int = 1) -> Blueprint:
    """A loss over batch and sequence."""
    b = Builder("stack")
    batch, seq = b.dim("batch", min=1, max=64, tune=[8]), b.dim("seq", min=1, max=512, tune=[16])
    x, t = b.input("x", "float32", [batch, seq, DEEP]), b.input("t", "int64", [batch, seq])
    z = b.op("linear", x, b.param("w", "float32", [WIDE, DEEP]), b.param("bias", "float32", [WIDE]))
    return b.build(
        b.op(
            "cross_entropy",
            b.op("reshape", z, shape=[batch * seq, WIDE]),
            b.op("reshape", t, shape=[batch * seq]),
        )
    )


@pytest.mark.parametrize("sizes", [(8, 16), (5, 15), (1, 128), (6, 12), (64, 1)])
def test_rows_of_batch_and_sequence(sizes: tuple[int, int]) -> None:
    work = check(_stack(), dict(zip(("batch", "seq"), sizes, strict=True)), aim="memory")
    tuned = [low for low in work.lowerings if all(b.low > 1 for b in low.plan.bucket)]
    assert tuned and all(map(chunked, tuned))
    least = min(b.low for b in tuned[0].plan.bucket) * max(b.low for b in tuned[0].plan.bucket)
    assert WHOLE <= least < TUNED
    for phase in {low.phase.name for low in work.lowerings}:  # every size has one plan
        boxes = [
            low.plan.bucket
            for low in work.lowerings
            if low.phase.name == phase and low.phase.wanted in ((), ("x", "w", "bias"))
        ]
        for batch, seq in ((1, 1), (5, 11), (6, 11), (6, 12), (64, 512)):
            assert sum(a.low <= batch <= a.high and s.low <= seq <= s.high for a, s in boxes) == 1


def test_for_speed_everything_comes_at_once() -> None:
    work = front(_block(_head), "h100", "fast")
    assert not any(map(chunked, work.lowerings))


def _sequences(b: Builder, batch: Dim, seq: Dim) -> Value:
    x, t = b.input("x", "float32", [batch, seq, DEEP]), b.input("t", "int64", [batch, seq])
    z = b.op("linear", x, b.param("w", "float32", [WIDE, DEEP]), b.param("bias", "float32", [WIDE]))
    z = b.op("reshape", b.op("tanh", z), shape=[batch * seq, WIDE])
    return b.op("cross_entropy", z, b.op("reshape", t, shape=[batch * seq]))


def _flat(b: Builder, batch: Dim, seq: Dim) -> Value:
    x = b.op("reshape", b.input("x", "float32", [batch, seq, DEEP]), shape=[batch * seq, DEEP])
    t = b.op("reshape", b.input("t", "int64", [batch, seq]), shape=[batch * seq])
    return b.op("cross_entropy", x @ b.param("w", "float32", [DEEP, WIDE]), t, reduction="none")


def _both_ways(b: Builder, batch: Dim, seq: Dim) -> Value:
    a, c = b.param("a", "float32", [DEEP, WIDE]), b.param("c", "float32", [WIDE, DEEP])
    return b.op("gelu", b.input("x", "float32", [batch, seq, DEEP]) @ a) @ c


def _seconds(b: Builder, batch: Dim, seq: Dim) -> Value:
    """Rows of which the axes say the second dim first: those of the product come one after the other."""
    x = b.op("reshape", b.input("x", "float32", [seq, batch, DEEP]), shape=[seq * batch, DEEP])
    z = b.op("reshape", b.op("tanh", x @ b.param("w", "float32", [DEEP, WIDE])), shape=[seq, batch, WIDE])
    return b.op("amax", z, dims=[2]) * b.input("scale", "float32", [seq, 1])


SEQUENCES = {"sequences": _sequences, "flat": _flat, "both ways": _both_ways, "seconds": _seconds}


@pytest.mark.parametrize("sizes", [(1, 1), (3, 40), (16, 16), (19, 9)])
@pytest.mark.parametrize("name", SEQUENCES)
def test_rows_of_two_dims(name: str, sizes: tuple[int, int]) -> None:
    b = Builder("block")
    batch, seq = (b.dim(n, min=1, max=4096, tune=[size]) for n, size in (("batch", 16), ("seq", 16)))
    dims = {"batch": sizes[0], "seq": sizes[1]}
    work = check(b.build(SEQUENCES[name](b, batch, seq)), dims, aim="memory")
    large = [low for low in work.lowerings if all(p.low > 1 for p in low.plan.bucket)]
    assert len(large) == 5 and all(map(chunked, large))


@pytest.mark.parametrize("name", ["linear_cross_entropy", "swiglu", "geglu", "linear_gelu"])
def test_the_judge_can_bound_every_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over more rows than it tries one by one: what is left for the last chunk is no difference."""
    monkeypatch.undo()
    work = front(text.load(EXAMPLE.with_name(f"{name}.json")), "h100", "fast", "memory")
    assert any(map(chunked, work.lowerings))
    for low in work.lowerings:
        ranges = {b.dim: Range(b.low, b.high) for b in low.plan.bucket}
        grids = [(size,) for s in low.plan.steps if isinstance(s, KernelStep) for size in s.grid]
        views = [v.shape for s in low.plan.steps if isinstance(s, ExternStep) for v in (*s.inputs, *s.outs)]
        for shape in {*grids, *views, *(b.shape for b in low.plan.buffers)}:
            assert not outside(shape, ranges, 0, 1 << 48), shape


def _normed(b: Builder, x: Value, t: Value) -> Value:
    """A mean over the rows stands between."""
    w = b.param("w", "float32", [DEEP, WIDE])
    z = x @ w
    return b.op("sum", b.op("exp", z - b.op("mean", z, dims=[0], keepdim=True)), dims=[1])


def _handed_out(b: Builder, x: Value, t: Value) -> Value:
    return b.op("relu", x @ b.param("w", "float32", [DEEP, WIDE]))


def _running(b: Builder, x: Value, t: Value) -> Value:
    w = b.param("w", "float32", [DEEP, WIDE])
    return b.op("sum", b.op("cumsum", x @ w, dim=0), dims=[1])


def _regrouped(b: Builder, x: Value, t: Value) -> Value:
    """An axis as long as the rows, that holds something else."""
    z = b.op("tanh", x @ b.param("w", "float32", [DEEP, WIDE]))
    return b.op("sum", b.op("reshape", z, shape=[WIDE, x.type.shape[0]]), dims=[0])


OTHERS = {
    "mean over rows": _normed, "a result": _handed_out, "running over rows": _running,
    "regrouped": _regrouped,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_needs_all_rows_comes_at_once(name: str) -> None:
    work = check(_block(OTHERS[name]), {"rows": 75}, aim="memory")
    assert not any(chunked(low) for low in work.lowerings if low.phase.name != "backward")


def test_a_narrow_sum_is_rounded_no_worse_than_eagers() -> None:
    """Weight gradients in bfloat16 are rounded once for every chunk."""

    def head(b: Builder, x: Value, t: Value) -> Value:
        z = x @ b.param("w", "bfloat16", [DEEP, WIDE])
        return b.op("cross_entropy", b.op("cast", z, dtype="float32"), t)

    check(_block(head, "bfloat16"), {"rows": TUNED}, aim="memory")
