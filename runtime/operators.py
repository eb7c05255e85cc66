"""Blocks as operators of torch: `esper::fwd` and `esper::bwd`, registered once per process for all artifacts.

Used where a trace or a dispatch mode must see the call: torch.compile, torch.export, selective
checkpointing, FLOP counting, fake and meta tensors. `mask` has a bit per input whose gradient is wanted,
known from requires_grad before the call; 0 runs the inference plan. `fwd` returns the outputs and then
those saved tensors that are neither input nor output; `bwd` returns one tensor per distinct gradient.
`turned` has a bit per input that is an image [n, c, h, w] where the block takes [n, h, w, c]; then outputs of
rank 4 are images too, and so are their cotangents. A permutation outside would be a node that compilers lay
out in memory by rules for images. How the programs that inductor writes call them: `runtime.inlined`.

Compiled graphs are cached beyond this process and this version: what the operators take and return changes
only with their names or their arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from library.launch import Plan, TensorSpec, evaluate
from runtime import inlined
from runtime.errors import fail
from runtime.executor import Program
from runtime.functions import double_backward, no_transform
from runtime.loader import load_entry

NHWC, NCHW = (0, 2, 3, 1), (0, 3, 1, 2)

_transforms = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_programs: weakref.WeakValueDictionary[tuple[str, int], Program] = weakref.WeakValueDictionary()
_any: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
_define = torch.library.Library("esper", "DEF")
# Any strides will do, and what is not dense is copied; what inductor lays out is asked for by `inlined`.
_tags = (torch.Tag.flexible_layout,)
_define.define("fwd(str id, int mask, Tensor[] xs, int turned) -> Tensor[]", tags=_tags)
_define.define(
    "bwd(str id, SymInt[] dims, int mask, Tensor[] saved, Tensor?[] cotangents, int turned) -> Tensor[]",
    tags=_tags,
)
_current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)


def enrol(program: Program) -> None:
    """Make a program callable by its artifact id while something holds it."""
    _programs[program.artifact_id, program.index] = program
    _any[program.artifact_id] = program


def _on(name: str, tensors: Sequence[Tensor | None]) -> Program:
    """The program of an artifact on the device of these tensors; loaded with every check if it is not held
    yet."""
    near = tensors[0]
    if near is None:
        near = next(t for t in tensors if t is not None)
    found = _programs.get((name, near.get_device()))
    if found is None:
        found = load_entry(name, device=near.device).program
        enrol(found)
    return found


def _described(name: str) -> Program:
    """A program of that artifact on any device: enough to tell shapes."""
    found = _any.get(name)
    if found is None:
        raise fail(
            "E0819",
            f"no block of {name} is loaded in this process",
            node=name,
            hint="load it before running a graph that was compiled with it",
        )
    return found


def mask_of(tensors: Sequence[Tensor], differentiable: Sequence[bool]) -> int:
    """Bit i is set when input i asks for a gradient that the block can give."""
    mask = 0
    for at, (tensor, can) in enumerate(zip(tensors, differentiable, strict=True)):
        if can and tensor.requires_grad:
            mask |= 1 << at
    return mask


class Roles:
    """Which tensors the operators return, from the first plan of each phase: the same for every bucket."""

    def __init__(self, program: Program) -> None:
        self.plans, self.artifact_id = program.launch.plans, program.artifact_id
        self.inputs = program.interface.inputs
        self.differentiable = program.interface.differentiable
        self.outputs = len(program.interface.outputs)
        self.forward = self._first("forward")
        self.fresh: list[int] = []
        self.flat: set[int] = set()  # places among the saved that are handed out with rank 2
        self._distinct: dict[int, tuple[list[str], dict[str, int]]] = {}
        plan = self.forward
        for number in plan.saved if plan else ():
            if plan and plan.buffers[number].source != "input" and number not in plan.outputs:
                self.fresh.append(number)
                if len(plan.buffers[number].shape) == 4:
                    self.flat.add(plan.saved.index(number))

    def images(self, turned: int) -> list[int]:
        """Places among the saved tensors of what is an image outside."""
        plan, found = self.forward, []
        if plan is None or not turned:
            return found
        for at, number in enumerate(plan.saved):
            buffer = plan.buffers[number]
            outside = turned >> buffer.index & 1 if buffer.source == "input" else number in plan.outputs
            if outside and len(buffer.shape) == 4:
                found.append(at)
        return found

    def _first(self, phase: str, wanted: Sequence[str] = ()) -> Plan | None:
        fitting = [p for p in self.plans if p.phase == phase and set(wanted) <= set(p.wanted)]
        return min(fitting, key=lambda p: len(p.wanted), default=None)

    def saved(self, xs: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
        """The saved tensors in order, from the inputs and what `fwd` returned."""
        plan, out = self.forward, []
        assert plan is not None
        for number in plan.saved:
            buffer = plan.buffers[number]
            if buffer.source == "input":
                out.append(xs[buffer.index])
            elif number in plan.outputs:
                out.append(results[plan.outputs.index(number)])
            else:
                out.append(results[self.outputs + self.fresh.index(number)])
        return out

    def distinct(self, mask: int) -> tuple[list[str], dict[str, int]]:
        """Names that stand for the distinct gradients of a mask; for every wanted name its position among
        them."""
        if mask not in self._distinct:
            self._distinct[mask] = self._find_distinct(mask)
        return self._distinct[mask]

    def _find_distinct(self, mask: int) -> tuple[list[str], dict[str, int]]:
        names = [
            s.name for at, s in enumerate(self.inputs) if mask >> at & 1 and s.name in self.differentiable
        ]
        plan = self._first("backward", names)
        if plan is None:
            raise fail("E0815", f"no backward plan gives {', '.join(names)}", node=self.artifact_id)
        buffer = dict(zip(plan.wanted, plan.gradients, strict=True))
        heads: dict[int, str] = {}
        for name in names:
            heads.setdefault(buffer[name], name)
        order = list(heads.values())
        return order, {name: order.index(heads[buffer[name]]) for name in names}


_roles: weakref.WeakKeyDictionary[Program, Roles] = weakref.WeakKeyDictionary()


def roles_of(program: Program) -> Roles:
    found = _roles.get(program)
    if found is None:
        found = _roles[program] = Roles(program)
    return found


def _images(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.permute(NCHW) if t.dim() == 4 else t for t in tensors]


def _inside(xs: Sequence[Tensor], turned: int) -> list[Any]:
    """The inputs as the block takes them."""
    if not turned:
        return list(xs)
    return [x.permute(NHWC) if turned >> at & 1 else x for at, x in enumerate(xs)]


def sizes(program: Program, xs: Sequence[Tensor], turned: int) -> list[Any]:
    """Values of the dims, in order."""
    return [
        xs[d.tensor].shape[NHWC[d.axis] if turned >> d.tensor & 1 else d.axis] for d in program.interface.dims
    ]


def forward(name: str, mask: int, xs: Sequence[Tensor], turned: int) -> list[Tensor]:
    """What `esper::fwd` computes, below autograd."""
    program = _on(name, xs)
    if program.index >= 0 and _current_device() != program.index:
        with program.current():
            return _forward(program, mask, xs, turned)
    return _forward(program, mask, xs, turned)


def _forward(program: Program, mask: int, xs: Sequence[Tensor], turned: int) -> list[Tensor]:
    slots = _inside(xs, turned)
    dims = program.admit(slots)
    mask = mask if roles_of(program).forward is not None else 0
    ready = program.ready("forward" if mask else "inference", dims)
    ready(slots)
    program.counters.launches += ready.launches
    out = [slots[i] for i in ready.layout.outputs]
    if turned:
        out = _images(out)
    if not mask:
        return out
    roles = roles_of(program)
    kept = dict(zip(ready.plan.saved, ready.layout.saved, strict=True))
    for number in roles.fresh:
        tensor = slots[kept[number]]
        # Four axes would be taken for an image, and copied into the layout that convolutions like.
        out.append(tensor.flatten(1) if tensor.dim() == 4 else tensor)
    return out


def _fwd_fake(name: str, mask: int, xs: list[Tensor], turned: int) -> list[Tensor]:
    inlined.tell("fwd", __name__, "forward", _fwd_images)
    program = _described(name)
    dims = dict(zip(program.dim_names, sizes(program, xs, turned), strict=True))
    out = [_like(spec, dims, xs[0], image=bool(turned)) for spec in program.interface.outputs]
    roles = roles_of(program)
    if mask and roles.forward is not None:
        out += [_like(roles.forward.buffers[number], dims, xs[0], flat=True) for number in roles.fresh]
    return out


def _like(
    spec: Any, dims: Mapping[str, Any], near: Tensor, image: bool = False, flat: bool = False
) -> Tensor:
    """Memory without contents, and not a view of any; of rank 4: `image` with the channels last, `flat` as a
    matrix."""
    shape, kind = [evaluate(s, dims) for s in spec.shape], getattr(torch, spec.dtype)
    if len(shape) == 4 and image:
        n, h, w, c = shape
        return near.new_empty_strided((n, c, h, w), (h * w * c, 1, w * c, c), dtype=kind)
    if len(shape) == 4 and flat:
        shape = [shape[0], shape[1] * shape[2] * shape[3]]
    return near.new_empty(shape, dtype=kind)


def backward(
    name: str,
    dims: Sequence[int],
    mask: int,
    saved: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    turned: int,
) -> list[Tensor]:
    """What `esper::bwd` computes, below autograd."""
    program = _on(name, (*saved, *cotangents))
    if program.index >= 0 and _current_device() != program.index:
        with program.current():
            return _backward(program, tuple(dims), mask, list(saved), cotangents, turned)
    return _backward(program, tuple(dims), mask, list(saved), cotangents, turned)


def _backward(
    program: Program,
    dims: tuple[int, ...],
    mask: int,
    saved: list[Tensor],
    cotangents: Sequence[Tensor | None],
    turned: int,
) -> list[Tensor]:
    roles = roles_of(program)
    order, _ = roles.distinct(mask)
    for at in roles.images(turned):
        saved[at] = saved[at].permute(NHWC)
    for at in roles.flat:
        assert roles.forward is not None
        spec = roles.forward.buffers[roles.forward.saved[at]]
        values = dict(zip(program.dim_names, dims, strict=True))
        saved[at] = saved[at].view([evaluate(s, values) for s in spec.shape])
    if turned:
        cotangents = [c.permute(NHWC) if c is not None and c.dim() == 4 else c for c in cotangents]
    ready = program.ready("backward", dims, tuple(order))
    slots = program.backward_feeds(dims, saved, cotangents, ready.layout.read)
    ready(slots)
    program.counters.launches += ready.launches
    slot = dict(zip(ready.plan.wanted, ready.layout.gradients, strict=True))
    out: list[Tensor] = []
    for head in order:
        tensor = slots[slot[head]]
        # Two names that this bucket's plan lets share memory although the first plan does not: no aliases
        # go out.
        out.append(tensor.clone() if any(tensor is other for other in out) else tensor)
    return _outside(program, order, out, turned)


def _outside(program: Program, order: Sequence[str], found: list[Tensor], turned: int) -> list[Tensor]:
    """Gradients of images as images."""
    if not turned:
        return found
    at = {spec.name: number for number, spec in enumerate(program.interface.inputs)}
    return [g.permute(NCHW) if turned >> at[head] & 1 else g for head, g in zip(order, found, strict=True)]


def _bwd_fake(
    name: str,
    dims: list[int],
    mask: int,
    saved: list[Tensor],
    cotangents: list[Tensor | None],
    turned: int,
) -> list[Tensor]:
    inlined.tell("bwd", __name__, "backward", _bwd_images)
    program = _described(name)
    values = dict(zip(program.dim_names, dims, strict=True))
    near = next(t for t in (*saved, *cotangents) if t is not None)
    specs: dict[str, TensorSpec] = {s.name: s for s in program.interface.inputs}
    order = roles_of(program).distinct(mask)[0]
    images = {spec.name for at, spec in enumerate(program.interface.inputs) if turned >> at & 1}
    return [_like(specs[head], values, near, image=head in images) for head in order]


def _fwd_images(name: str, mask: int, xs: Sequence[Any], turned: int) -> list[list[int]]:
    return [[at for at in range(len(xs)) if turned >> at & 1]]


def _bwd_images(
    name: str, dims: Any, mask: int, saved: Any, cotangents: Sequence[Any], turned: int
) -> list[list[int]]:
    outputs = _described(name).interface.outputs
    images = [at for at, spec in enumerate(outputs) if turned and len(spec.shape) == 4]
    return [[], roles_of(_described(name)).images(turned), images]


class _Differentiable(torch.autograd.Function):
    """`esper::fwd` as a node of the graph. Written out, because torch.library.register_autograd sorts
    lists of tensors into trees on every call, which costs three times the rest."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, name: str, mask: int, turned: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        found = _below(torch.ops.esper.fwd.default, keyset, name, mask, list(xs), turned)
        program = _described(name)
        ctx.call = (name, mask, turned, len(xs), sizes(program, xs, turned))
        if mask and roles_of(program).forward is not None:
            ctx.save_for_backward(*roles_of(program).saved(xs, found))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        name, mask, turned, count, dims = ctx.call
        program = _described(name)
        cotangents = list(gradients[: len(program.interface.outputs)])
        if not mask or all(c is None for c in cotangents):
            return (None,) * (4 + count)
        _, position = roles_of(program).distinct(mask)
        saved = list(ctx.saved_tensors)
        found = torch.ops.esper.bwd.default(name, dims, mask, saved, cotangents, turned)
        names = [spec.name for spec in program.interface.inputs]
        return None, None, None, None, *[found[position[n]] if n in position else None for n in names]


class _Final(torch.autograd.Function):
    """`esper::bwd` as a node that cannot be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, keyset: Any, name: str, rest: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(_below(torch.ops.esper.bwd.default, keyset, name, *rest))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise double_backward(ctx.name)


def _below(op: Any, keyset: Any, *values: Any) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *values)


def _fwd_autograd(keyset: Any, name: str, mask: int, xs: list[Tensor], turned: int) -> list[Tensor]:
    if _transforms():
        raise no_transform(name)
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        return list(_Differentiable.apply(keyset, name, mask, turned, *xs))
    return _below(torch.ops.esper.fwd.default, keyset, name, mask, xs, turned)


def _bwd_autograd(
    keyset: Any,
    name: str,
    dims: list[int],
    mask: int,
    saved: list[Tensor],
    cotangents: list[Tensor | None],
    turned: int,
) -> list[Tensor]:
    rest = (dims, mask, saved, cotangents, turned)
    tensors = [t for t in (*saved, *cotangents) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(_Final.apply(keyset, name, rest, *tensors))
    return _below(torch.ops.esper.bwd.default, keyset, name, *rest)


for _name, _real in (("fwd", forward), ("bwd", backward)):
    _define.impl(_name, _real, "CPU")
    _define.impl(_name, _real, "CUDA")
torch.library.register_fake("esper::fwd", _fwd_fake, lib=_define)
torch.library.register_fake("esper::bwd", _bwd_fake, lib=_define)
_define.impl("fwd", _fwd_autograd, "Autograd", with_keyset=True)
_define.impl("bwd", _bwd_autograd, "Autograd", with_keyset=True)
