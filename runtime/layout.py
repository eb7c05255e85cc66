"""A plan bound to sizes: where every buffer lies, what is allocated, which launches run with which numbers.

Pure: nothing here touches a device. `lay_out` turns a plan of the launch manifest and a value for every
dim into a `Layout` that `runtime.executor` makes launch-ready.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper_ir.diagnostics import EsperError
from library.launch import (
    Argument,
    Buffer,
    ExternStep,
    Interface,
    Kernel,
    KernelStep,
    Plan,
    TensorSpec,
    Variant,
    evaluate,
)
from runtime.dispatch import Choice, Launch, Segment
from runtime.errors import fail
from runtime.externs import Strided, dense, strided

WORKSPACE_ALIGN = 256
FEEDS = ("input", "saved", "cotangent")
ITEMSIZE = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Fresh:
    """Memory to allocate for one buffer (or the workspace) per call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ExternCall:
    """One library call on slots. `fresh`: from this slot on memory is the plan's own, and a result that
    the library allocated may take its place."""

    step: ExternStep
    inputs: tuple[tuple[int, Strided], ...]
    outs: tuple[tuple[int, Strided], ...]
    fresh: int


@dataclass(frozen=True)
class Layout:
    """`feeds` slots come first (what the caller passes), then `given` (buffers the caller provides), then
    `fresh`. `expected`: (slot, name, shape, dtype) of every buffer that a caller passes; `read`: those
    slots of it that the plan reads or hands on. `workspace` in bytes."""

    feeds: int
    given: tuple[int, ...]
    fresh: tuple[Fresh, ...]
    parts: tuple[Segment | ExternCall, ...]
    outputs: tuple[int, ...]
    saved: tuple[int, ...]
    gradients: tuple[int, ...]
    workspace: int
    expected: tuple[tuple[int, str, tuple[int, ...], str], ...]
    read: frozenset[int]


@dataclass(frozen=True)
class Functions:
    """What the device made of the kernels: address or handle by kernel name."""

    kernels: Mapping[str, Kernel]
    address: Mapping[str, int]


def lay_out(
    plan: Plan,
    interface: Interface,
    saved: int,
    dims: Mapping[str, int],
    functions: Functions,
    given: Collection[int] = (),
    separate: bool = False,
) -> Layout:
    """`saved`: tensors that the forward hands over; `given`: buffers the caller provides; `separate`: one
    slot per buffer and one segment per launch, for inspection between launches. E0809, E0812.
    """
    shapes = [tuple([s if isinstance(s, int) else evaluate(s, dims) for s in b.shape]) for b in plan.buffers]
    feeds = feed_count(plan, interface, saved)
    placer = _Placer(plan, shapes, (feeds, saved), tuple(sorted(given)), separate)
    launches = [_step(step, plan, shapes, dims, functions) for step in plan.steps]
    parts = _parts(launches, placer, separate)
    slot = [place[0] for place in placer.places]
    return Layout(
        feeds,
        placer.given,
        tuple(placer.fresh),
        parts,
        tuple(slot[n] for n in plan.outputs),
        tuple(slot[n] for n in plan.saved),
        tuple(slot[n] for n in plan.gradients),
        placer.size,
        placer.expected(),
        placer.read,
    )


def feed_count(plan: Plan, interface: Interface, saved: int) -> int:
    """Tensors a caller passes: all interface inputs, or all saved tensors and then one cotangent per
    output."""
    if plan.phase == "backward":
        return saved + len(interface.outputs)
    return len(interface.inputs)


def other_rank(spec: TensorSpec, shape: Sequence[int]) -> EsperError:
    """E0810 for a tensor of another rank than declared."""
    declared = ", ".join(map(str, spec.shape))
    further = spec.kind == "input" and 0 < len(spec.shape) < len(shape) and isinstance(spec.shape[0], str)
    fold = f"{spec.name}.flatten(0, {-len(spec.shape)})"
    return fail(
        "E0810",
        f"{spec.name} has the shape {list(shape)}, declared [{declared}]",
        node=spec.name,
        hint=f"if no row affects another: pass {fold}, unflatten the result; runtime.swap does so by itself"
        if further
        else f"pass a tensor with {len(spec.shape)} axes, or compile the blueprint for this shape",
    )


def other_size(spec: TensorSpec, shape: Sequence[int], wanted: Sequence[int]) -> EsperError:
    """E0810 for a tensor of another shape than the call's dims give it."""
    return fail(
        "E0810",
        f"{spec.name} has the shape {list(shape)}, expected {list(wanted)}",
        node=spec.name,
        hint=f"declared [{', '.join(map(str, spec.shape))}]: a number is fixed, a name one size everywhere; "
        "compile the blueprint for other sizes",
    )


class _Placer:
    """Gives every buffer a slot and an offset."""

    def __init__(
        self,
        plan: Plan,
        shapes: Sequence[tuple[int, ...]],
        feeds: tuple[int, int],
        given: tuple[int, ...],
        separate: bool,
    ) -> None:
        self.plan, self.shapes, self.given = plan, shapes, given
        self.feeds, self.saved = feeds
        self.bytes = [_bytes(b, s) for b, s in zip(plan.buffers, shapes, strict=True)]
        self.fresh: list[Fresh] = []
        self.zeros: list[tuple[int, int, int]] = []
        self.nullable: set[int] = set()
        self.size = 0
        self.places: list[tuple[int, int]] = [(-1, 0)] * len(plan.buffers)
        own = _own_memory(plan, separate)
        packed = [n for n in range(len(plan.buffers)) if not self._place_alone(n, own)]
        self.life = _lives(plan)
        used = {*self.life, *plan.outputs, *plan.saved, *plan.gradients}
        self.read = frozenset(self.places[n][0] for n in used if plan.buffers[n].source in FEEDS)
        self.nullable |= set(range(self.feeds)) - self.read
        self._pack(packed)
        self.slots = self.feeds + len(given) + len(self.fresh)

    def _place_alone(self, number: int, own: Collection[int]) -> bool:
        buffer = self.plan.buffers[number]
        if buffer.source in FEEDS:
            self.places[number] = (self._feed(buffer), 0)
        elif number in self.given:
            self.places[number] = (self.feeds + self.given.index(number), 0)
        elif number in own:
            self.places[number] = (self._allocate(self.shapes[number], buffer.dtype), 0)
        else:
            return False
        if not self.bytes[number]:
            self.nullable.add(self.places[number][0])
        elif buffer.source == "zeroed":
            self.zeros.append((self.places[number][0], 0, self.bytes[number]))
        return True

    def _feed(self, buffer: Buffer) -> int:
        backward = self.plan.phase == "backward"
        if backward == (buffer.source == "input"):
            raise fail(
                "E0809", f"a {self.plan.phase} plan cannot read the {buffer.source} buffer {buffer.name!r}"
            )
        slot = buffer.index + (self.saved if buffer.source == "cotangent" else 0)
        end = self.saved if buffer.source == "saved" else self.feeds
        if buffer.index < 0 or slot >= end:
            raise fail("E0809", f"buffer {buffer.name!r} has no source number {buffer.index}")
        return slot

    def expected(self) -> tuple[tuple[int, str, tuple[int, ...], str], ...]:
        rows = zip(self.places, self.plan.buffers, self.shapes, strict=True)
        callers = self.feeds + len(self.given)
        return tuple((p[0], b.name, shape, b.dtype) for p, b, shape in rows if 0 <= p[0] < callers)

    def _allocate(self, shape: tuple[int, ...], dtype: str) -> int:
        self.fresh.append(Fresh(shape, dense(shape), dtype))
        return self.feeds + len(self.given) + len(self.fresh) - 1

    def _pack(self, numbers: Sequence[int]) -> None:
        """Temporaries share one allocation; two whose lives do not overlap may share bytes. Zeroed ones
        lie first."""
        if not numbers:
            return
        offsets, life = {}, self.life
        for number in sorted(numbers, key=lambda n: self.plan.buffers[n].source != "zeroed"):
            zeroed = self.plan.buffers[number].source == "zeroed"
            span = (0, len(self.plan.steps)) if zeroed else life.get(number, (0, 0))
            taken = [
                (o, o + self.bytes[n]) for n, (o, s) in offsets.items() if s[0] <= span[1] and span[0] <= s[1]
            ]
            offsets[number] = (_first_fit(taken, self.bytes[number]), span)
        self.size = max((o + self.bytes[n] for n, (o, _) in offsets.items()), default=0)
        slot = self._allocate((self.size,), "uint8") if self.size else -1
        cleared = 0
        for number, (offset, _) in offsets.items():
            self.places[number] = (slot, offset)
            if self.plan.buffers[number].source == "zeroed":
                cleared = max(cleared, offset + self.bytes[number])
        if cleared:
            self.zeros.append((slot, 0, cleared))


def _own_memory(plan: Plan, separate: bool) -> frozenset[int]:
    """Buffers with an allocation of their own: results, and temporaries that torch must see as tensors."""
    own = {n for n, b in enumerate(plan.buffers) if b.source in ("output", "gradient") or separate}
    own |= {*plan.outputs, *plan.saved, *plan.gradients}
    for step in plan.steps:
        if isinstance(step, ExternStep):
            own |= {v.buffer for v in (*step.inputs, *step.outs)}
    return frozenset(own)


def _bytes(buffer: Buffer, shape: tuple[int, ...]) -> int:
    total = ITEMSIZE[buffer.dtype]
    for size in shape:
        if size < 0:
            raise fail("E0809", f"buffer {buffer.name!r} would have the shape {shape}")
        total *= size
    return total


def _lives(plan: Plan) -> dict[int, tuple[int, int]]:
    """First and last step that names each buffer."""
    life: dict[int, tuple[int, int]] = {}
    for at, step in enumerate(plan.steps):
        if isinstance(step, KernelStep):
            used = [a.value for a in step.args if a.kind == "buffer"]
        else:
            used = [v.buffer for v in (*step.inputs, *step.outs)]
        for number in used:
            assert isinstance(number, int)
            life[number] = (life.get(number, (at, at))[0], at)
    return life


def _first_fit(taken: list[tuple[int, int]], size: int) -> int:
    offset = 0
    for start, end in sorted(taken):
        if offset + size <= start:
            return offset
        offset = max(offset, -(-end // WORKSPACE_ALIGN) * WORKSPACE_ALIGN)
    return offset


def _step(
    step: KernelStep | ExternStep,
    plan: Plan,
    shapes: Sequence[tuple[int, ...]],
    dims: Mapping[str, int],
    functions: Functions,
) -> Launch | tuple[ExternStep, tuple[Strided, ...], tuple[Strided, ...]]:
    if isinstance(step, ExternStep):
        views = tuple(strided(v, shapes[v.buffer], dims) for v in step.inputs)
        return step, views, tuple(strided(v, shapes[v.buffer], dims) for v in step.outs)
    fitting = [v for v in step.variants if _fits(v, dims)]
    if not fitting:
        raise fail(
            "E0812",
            f"no kernel of {step.group} accepts {dict(dims)}",
            node=step.group,
            details={"dims": dict(dims)},
        )
    args = tuple((a.kind == "buffer", _number(a, dims)) for a in step.args)
    for variant in fitting:
        _check_arguments(step, args, functions.kernels[variant.kernel])
    x, y, z = step.grid
    grid = (evaluate(x, dims), evaluate(y, dims), evaluate(z, dims))
    if min(grid) < 0:
        raise fail("E0809", f"a grid of {grid}", node=step.group)
    return Launch(step.group, tuple(_choice(v, functions) for v in fitting), args, grid)


def _number(argument: Argument, dims: Mapping[str, int]) -> int:
    """A buffer's number, or the value of a size."""
    value = argument.value
    return value if argument.kind == "buffer" and isinstance(value, int) else evaluate(value, dims)


def _fits(variant: Variant, dims: Mapping[str, int]) -> bool:
    guard = variant.guard
    for size, divisor in guard.divisible:
        if evaluate(size, dims) % divisor:
            return False
    return not guard.at_most or all(evaluate(size, dims) <= bound for size, bound in guard.at_most)


def _choice(variant: Variant, functions: Functions) -> Choice:
    kernel = functions.kernels[variant.kernel]
    address = functions.address[kernel.name]
    return Choice(
        kernel.name, variant.guard.aligned, address, 32 * kernel.warps, kernel.shared, kernel.scratch
    )


def _check_arguments(step: KernelStep, args: Sequence[tuple[bool, int]], kernel: Kernel) -> None:
    kinds = kernel.kinds
    if len(args) != len(kinds):
        raise fail("E0809", f"{len(args)} arguments for {len(kinds)} parameters", node=kernel.name)
    for (is_buffer, value), kind in zip(args, kinds, strict=True):
        if is_buffer != (kind == "ptr"):
            raise fail(
                "E0809",
                f"a {'buffer' if is_buffer else 'size'} for a parameter of kind {kind}",
                node=kernel.name,
            )
        if kind == "i32" and not -(2**31) <= value < 2**31:
            raise fail("E0812", f"{value} does not fit the 32-bit argument of {step.group}", node=step.group)


def _parts(steps: Sequence[Any], placer: _Placer, separate: bool) -> tuple[Segment | ExternCall, ...]:
    """Consecutive launches become one segment; the first segment clears what must be zero."""
    parts: list[Segment | ExternCall] = []
    run: list[Launch] = []
    zeros = tuple(placer.zeros)

    def close() -> None:
        nonlocal run, zeros
        if run or zeros:
            parts.append(
                Segment(placer.slots, tuple(placer.places), zeros, frozenset(placer.nullable), tuple(run))
            )
        run, zeros = [], ()

    for step in steps:
        if isinstance(step, Launch):
            run.append(step)
            if separate:
                close()
            continue
        close()
        extern, *sides = step
        slot = [place[0] for place in placer.places]
        views, outs = (tuple((slot[v.buffer], v) for v in side) for side in sides)
        parts.append(ExternCall(extern, views, outs, placer.feeds + len(placer.given)))
    close()
    return tuple(parts)
