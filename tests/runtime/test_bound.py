"""Plans bound in C: word for word what Python binds, or left to Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper_ir.diagnostics import EsperError
from library.launch import (
    Argument,
    Buffer,
    ExternStep,
    Guard,
    Interface,
    Kernel,
    KernelStep,
    LaunchManifest,
    Param,
    Plan,
    Variant,
    View,
)
from library.sealed import Sealed, SealedPlan, seal
from runtime import bound, dispatch
from runtime.dispatch import Segment, encode
from runtime.layout import Functions, Layout, lay_out
from tests.runtime import artifacts as a
from tests.runtime.conftest import manifest

pytestmark = pytest.mark.skipif(dispatch._bind is None, reason="the native dispatcher is not built")
SAVED = 2
KINDS = ("p" * 3, "pppl", "ppi", "pp")
NAMED = {"p": "ptr", "i": "i32", "l": "i64"}
KERNELS = tuple(
    Kernel(f"k{n}", "code", f"k{n}", tuple(Param(NAMED[c], 0, 8) for c in kinds), 1 << n, 100 * n, n % 3)
    for n, kinds in enumerate(KINDS)
)
OPERATORS = st.sampled_from(("add", "mul", "floordiv", "ceildiv", "mod", "min", "max", "sub"))
FUNCTIONS = Functions({k.name: k for k in KERNELS}, {k.name: 0x1000 + n for n, k in enumerate(KERNELS)})
LEAF = st.one_of(st.integers(0, 9), st.just("rows"))
SIZES = st.recursive(LEAF, lambda size: st.tuples(OPERATORS, size, size), max_leaves=4)
DTYPES = st.sampled_from(("float32", "bfloat16", "int64", "bool", "float64"))


def buffers(phase: str) -> st.SearchStrategy[list[Buffer]]:
    reads = ("saved", "cotangent") if phase == "backward" else ("input",)
    sources = st.sampled_from((*reads, "output", "gradient", "temp", "temp", "temp", "zeroed"))
    shape = st.lists(SIZES, max_size=3).map(tuple)
    index = st.integers(0, 1) if phase != "backward" else st.just(0)
    return st.lists(st.builds(Buffer, st.just("b"), sources, index, DTYPES, shape), min_size=1, max_size=9)


@st.composite
def plans(draw: Any) -> Plan:
    phase = draw(st.sampled_from(("inference", "forward", "backward")))
    made = draw(buffers(phase))
    number = st.integers(0, len(made) - 1)
    numbers = st.lists(number, max_size=3).map(tuple)
    guards = st.builds(
        Guard,
        numbers,
        st.lists(st.tuples(SIZES, st.integers(1, 4)), max_size=1).map(tuple),
        st.lists(st.tuples(SIZES, st.integers(0, 90)), max_size=1).map(tuple),
    )
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(KERNELS) - 1))
        args = tuple(
            Argument("buffer", draw(number)) if p.kind == "ptr" else Argument("size", draw(SIZES))
            for p in KERNELS[at].params
        )
        variants = (Variant(draw(guards), f"k{at}"), Variant(Guard(), f"k{at}"))[draw(st.integers(0, 1)) :]
        steps.append(KernelStep("g", variants, args, draw(st.tuples(SIZES, SIZES, SIZES))))
    return Plan(phase, (), (), tuple(made), tuple(steps), draw(numbers), draw(numbers), draw(numbers))


def sealed(plan: Plan, interface: Interface, kernels: tuple[Kernel, ...]) -> Plan:
    text = seal({**manifest(LaunchManifest(interface, (plan,), kernels)), "artifact_id": "x", "blobs": []})
    assert text
    return Sealed(text).launch().plans[0]


Quick = tuple[bound.BoundLayout, bytes]


def both(
    plan: Plan,
    dims: Mapping[str, int],
    interface: Interface = a.INTERFACE,
    kernels: tuple[Kernel, ...] = KERNELS,
    functions: Functions = FUNCTIONS,
) -> tuple[Layout | EsperError, Quick | None]:
    """By Python, and in C."""
    shut = sealed(plan, interface, kernels)
    again = lambda *_: lay_out(plan, interface, SAVED, dims, functions)  # noqa: E731
    quick = bound.bind(shut, interface, SAVED, dims, bound.Kernels(functions), None, again)
    try:
        return again(), quick
    except EsperError as error:
        return error, quick


def same(plain: Layout, quick: Quick) -> None:
    (part,) = plain.parts
    assert isinstance(part, Segment)
    layout, words = quick
    assert words == encode(part, None)
    for name in (
        "feeds",
        "given",
        "fresh",
        "outputs",
        "saved",
        "gradients",
        "workspace",
        "expected",
        "read",
        "parts",
    ):
        assert getattr(layout, name) == getattr(plain, name), name
    assert layout.launches == len(part.launches)


@given(plans(), st.sampled_from((0, 1, 3, 16, 64)))
@settings(max_examples=60, deadline=None)
def test_any_plan_is_bound_alike_or_refused_by_name(plan: Plan, rows: int) -> None:
    plain, quick = both(plan, {"rows": rows})
    if isinstance(plain, EsperError):
        assert quick is None
    else:
        assert quick is not None
        same(plain, quick)


@pytest.mark.parametrize("rows", [1, 16, 128, 999])
def test_the_plans_of_an_artifact_are_bound_alike(rows: int) -> None:
    launch = a.scale()
    functions = Functions({k.name: k for k in launch.kernels}, {k.name: 7 for k in launch.kernels})
    for plan in launch.plans:
        plain, quick = both(plan, {"rows": rows}, launch.interface, launch.kernels, functions)
        assert isinstance(plain, Layout) and quick is not None
        same(plain, quick)


def test_what_is_odd_is_left_to_python() -> None:
    """A library call, arguments that do not fit, sizes beyond 64 bits, more buffers than the tables hold."""
    plan, kernels = a.forward(), a.KERNELS
    (step,) = plan.steps
    assert isinstance(step, KernelStep)
    call = ExternStep("e", "mm", (View(0), View(1)), (View(2),), {})
    many = plan.buffers + (Buffer("t", "temp", 0, "int8", (1,)),) * 300

    def result(*shape: Any) -> tuple[Buffer, ...]:
        return (a.X, a.W, Buffer("y", "output", 0, "int64", shape))

    def steps(*arguments: Argument) -> tuple[KernelStep, ...]:
        return (a.step("s", step.variants, arguments, 1),)

    odd = {
        "a call": replace(plan, steps=(call,)),
        "nothing to do": replace(plan, steps=()),
        "too few arguments": replace(plan, steps=steps(*step.args[:3])),
        "other arguments": replace(plan, steps=steps(*step.args[::-1])),
        "too large": replace(plan, buffers=result(1 << 40, 1 << 40)),
        "negative": replace(plan, buffers=result(("sub", 1, 2))),
        "too many buffers": replace(plan, buffers=many),
        "no such source": replace(plan, buffers=(replace(a.X, source="saved"), a.W, a.Y)),
    }
    functions = Functions({k.name: k for k in kernels}, {k.name: 7 for k in kernels})
    for name, changed in odd.items():
        _, quick = both(changed, {"rows": 4}, a.INTERFACE, kernels, functions)
        assert quick is None, name
    table, laid = bound.Kernels(functions), lay_out(plan, a.INTERFACE, SAVED, {"rows": 4}, functions)
    assert bound.bind(plan, a.INTERFACE, SAVED, {"rows": 4}, table, None, lambda: laid) is None


def test_the_native_binder_believes_nothing() -> None:
    """Rows of another form give None or an error of Python, never a crash."""
    kernels = bound.Kernels(FUNCTIONS)
    shut = sealed(a.forward(), a.INTERFACE, a.KERNELS)
    assert isinstance(shut, SealedPlan)
    good, about = shut.rows(), (2, SAVED, False, frozenset([2]))
    assert good is not None
    buffers, steps = good
    bad: list[Any] = [None, 1, [], [[]], [[], []], [[1], [2]], [buffers, [[]]], [buffers, [["k"]]]]
    bad += [[buffers[:1], steps], [buffers, [["k", "g", [[[[0], [], []], "nowhere"]], [], [1, 1, 1]]]]]
    bad += [
        [[["x", "input", 0, "float32", [["add", 1]]]], steps],
        [[["x", "input", 9, "float32", []]], steps],
    ]
    bad += [[[["x", "input", "0", "float32", []]], steps]]
    bad += [[buffers, [["k", "g", [[[[0], [["rows", 0]], []], "k0"]], [], [1, 1, 1]]]]]
    for one in bad:
        try:
            found = dispatch.native_bind(one, {"rows": 4}, about, kernels, (0, 0, 0))
        except (KeyError, TypeError):
            continue
        assert found is None, one
