"""Movement inside rows at the leaves: the same bits, fewer kernels, on both kinds of target."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from esper_ir.builder import Builder, Value
from esper_ir.expand import expand
from esper_ir.grad import joint
from esper_ir.reference import evaluate
from esper_ir.types import Dim, TensorType
from esper_ir.verify import typed
from forge.access import Access
from forge.body import folded
from forge.emit.c import emit
from forge.lower import PhaseLowering
from forge.lowered import Launch
from forge.passes.inside import inside, leaves_moved
from forge.pipelines import FAST, _plain
from forge.plan import KernelPlan
from forge.service import front
from forge.target import resolve
from forge.views import movement
from tests.forge.test_blocks import BLOCKS, shrunk
from tests.forge.test_rewrites import same_bits, values
from tests.forge.whole import check

B, F = "bfloat16", "float32"
ONE = Dim.of(1)
Make = Callable[[Builder], tuple[Value, ...]]


def tables(b: Builder, half: int) -> tuple[Value, Value]:
    return b.input("cos", B, ["rows", half]), b.input("sin", B, ["rows", half])


def rms_rope(width: int) -> Make:
    def make(b: Builder) -> tuple[Value, ...]:
        x = b.input("x", B, [2, "rows", width])
        return (b.rope(b.rms_norm(x, b.param("w", B, [width])), *tables(b, width // 2)),)

    return make


def layer_rope_and_norm(b: Builder) -> tuple[Value, ...]:
    """Work on both sides, and the norm itself a result."""
    x = b.input("x", B, [2, "rows", 12])
    h = b.layer_norm(x, b.param("w", B, [12]), b.param("c", B, [12]), normalized_shape=[12])
    return b.rms_norm(b.mul(b.rope(h, *tables(b, 6)), 0.5)), h


def neighbours(b: Builder) -> tuple[Value, ...]:
    """Pairs of neighbours exchanged, and a thing of the whole row."""
    h = b.softmax(b.input("x", F, ["rows", 14]), dim=-1)
    pairs = b.reshape(h, shape=["rows", 7, 2])
    return (b.reshape(b.sub(b.op("reverse", pairs, dim=-1), pairs), shape=["rows", 14]),)


def any_width(b: Builder) -> tuple[Value, ...]:
    b.dim("half", min=1, max=96, tune=(32,))
    x = b.input("x", B, [2, "rows", "2*half"])
    tables = (b.input(name, B, ["rows", "half"]) for name in ("cos", "sin"))
    return (b.rope(b.rms_norm(x, b.param("w", B, ["2*half"])), *tables),)


CASES: dict[str, Make] = {
    "width 2": rms_rope(2), "width 10": rms_rope(10), "width 72": rms_rope(72),
    "both sides": layer_rope_and_norm, "neighbours": neighbours,
}  # fmt: skip


def blueprint(make: Make):
    b = Builder("inside")
    b.dim("rows", min=1, max=65536, tune=(64,))
    return b.build(*make(b))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_form_has_the_same_bits(name: str, backward: bool) -> None:
    graph = typed(blueprint(CASES[name]))
    plain = _plain(joint(graph, list(graph.inputs)).graph if backward else expand(graph), apart=True)
    forms = list(inside(plain))
    assert forms or name in ("width 2",)
    for form in forms:
        assert form.outputs == plain.outputs
        for special in (False, True):
            given = values(plain, 3, special)
            old, new = evaluate(plain, given), evaluate(form, given)
            assert all(same_bits(old[o], new[o]) for o in plain.outputs)


@pytest.mark.parametrize(("target", "backend"), [("h100", "plans"), ("cpu", "c")])
def test_a_width_that_varies(target: str, backend: str) -> None:
    for half in (1, 5):
        check(blueprint(any_width), {"rows": 3, "half": half}, target, backend)


@pytest.mark.parametrize(("name", "rows"), [*((name, 37) for name in CASES), ("width 10", 1)])
@pytest.mark.parametrize(("target", "backend"), [("h100", "plans"), ("cpu", "c")])
def test_compiled_it_means_the_same(name: str, target: str, backend: str, rows: int) -> None:
    check(blueprint(CASES[name]), {"rows": rows}, target, backend)


def phases(target: str) -> Mapping[str, PhaseLowering]:
    sizes, _ = BLOCKS["rope_qk_norm"]
    work = front(shrunk("rope_qk_norm", sizes), target, FAST.name)
    return {f"{low.phase.name} {len(low.phase.gradients or {})}": low for low in work.lowerings}


def kernels(low: PhaseLowering) -> list[KernelPlan]:
    steps = [step for _, lowered in low.lowered for step in lowered.steps]
    return [step.plan for step in steps if isinstance(step, Launch)]


@pytest.mark.parametrize("target", ["h100", "cpu"])
def test_norm_and_rotation_are_one_kernel(target: str) -> None:
    found = phases(target)
    assert {name: len(low.parts.groups) for name, low in found.items()} == dict.fromkeys(found, 1)
    parts = {a.parts for low in found.values() for p in kernels(low) for a in p.accesses if a.parts}
    assert parts and all([n for n, _ in p] == [Dim.of(2), Dim.of(4)] for p in parts)


def test_a_row_is_normed_once_on_a_processor() -> None:
    """The other half is read back: one rounding of the norm, one of the result."""
    low = phases("cpu")["inference 0"]
    (plan,) = kernels(low)
    text = emit(plan, resolve("cpu"))
    assert text.count("round_bf16(") == 2 and "k0[q0" in text


def test_nothing_moves_through_dear_work_or_to_what_is_not_in_memory() -> None:
    def dear(b: Builder) -> tuple[Value, ...]:
        return (b.op("reverse", b.exp(b.input("x", F, ["rows", 8])), dim=-1),)

    def scanned(b: Builder) -> tuple[Value, ...]:
        h = b.op("cumsum", b.input("x", F, ["rows", 8]), dim=0)
        total = b.sum(b.reshape(h, shape=["rows", 8, 1]), dims=[2])
        return (b.op("reverse", b.mul(total, 2.0), dim=-1),)

    for make in (dear, scanned):
        graph = _plain(expand(typed(blueprint(make))), apart=True)
        assert leaves_moved(graph) is graph


def test_reversed_and_partial_operands_are_views() -> None:
    def parts(b: Builder) -> tuple[Value, ...]:
        h = b.mul(b.input("x", F, ["rows", 8]), b.input("v", F, [8]))
        return (b.add(b.op("reverse", h, dim=-1), 1.0), b.op("slice", h, dim=0, start=0, end=1))

    graph = _plain(expand(typed(blueprint(parts))), apart=True)
    moved = leaves_moved(graph)
    leaves = {n.tensors[0] for n in moved if movement(n) in ("flip", "slice")}
    assert leaves <= set(graph.inputs) and leaves
    given = values(graph, 1, True)
    old, new = evaluate(graph, given), evaluate(moved, given)
    assert all(same_bits(old[o], new[o]) for o in graph.outputs)


def test_axes_become_one_where_memory_runs_along_the_innermost() -> None:
    space = (Dim.sym("m"), Dim.of(2), Dim.of(4))
    strides = (Dim.of(8), Dim.of(4), ONE)
    run = Access("x", TensorType.of(F, (1,)).dtype, strides)
    back = Access("x", run.dtype, (Dim.of(8), Dim.of(-4), ONE), offset=Dim.of(4))
    made = folded(space, [run, back], 1)
    assert made is not None and made[0] == (Dim.sym("m"), Dim.of(8))
    assert [a.strides for a in made[1]] == [(Dim.of(8), ONE)] * 2
    assert [a.parts for a in made[1]] == [(), ((Dim.of(2), Dim.of(-4)), (Dim.of(4), ONE))]
    assert folded(space, [Access("y", run.dtype, (Dim.of(8), ONE, Dim.of(2)))], 1) is None
    across = [Access("z", run.dtype, (ONE, Dim.sym("m")))]
    assert folded(space[:2], across, 1) == (space[:2], across), "one axis stays as it is"
