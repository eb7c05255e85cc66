"""Blocks as operators of torch: `esper::fwd` and `esper::bwd`, registered once per process for all artifacts.

Used where a trace or a dispatch mode must see the call: torch.compile, torch.export, selective
checkpointing, FLOP counting, fake and meta tensors. `mask` has a bit per input whose gradient is wanted,
known from requires_grad before the call; 0 runs the inference plan. `fwd` returns the outputs and then
those saved tensors that are neither input nor output; `bwd` returns one tensor per distinct gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from library.launch import Plan, TensorSpec, evaluate
from runtime.errors import fail
from runtime.executor import Program
from runtime.functions import double_backward, no_transform
from runtime.loader import load_entry

_transforms = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_programs: weakref.WeakValueDictionary[tuple[str, int], Program] = weakref.WeakValueDictionary()
_any: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
_define = torch.library.Library("esper", "DEF")
_define.define("fwd(str id, int mask, Tensor[] xs) -> Tensor[]", tags=(torch.Tag.needs_exact_strides,))
_define.define(
    "bwd(str id, SymInt[] dims, int mask, Tensor[] saved, Tensor?[] cotangents) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)


def enrol(program: Program) -> None:
    """Make a program callable by its artifact id while something holds it."""
    _programs[program.artifact_id, program.index] = program
    _any[program.artifact_id] = program


def _on(name: str, tensors: Sequence[Tensor | None]) -> Program:
    """The program of an artifact on the device of these tensors; loaded with every check if it is not held
    yet."""
    device = next(t.device for t in tensors if t is not None)
    found = _programs.get((name, -1 if device.type == "cpu" else int(device.index or 0)))
    if found is None:
        found = load_entry(name, device=device).program
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
        self._distinct: dict[int, tuple[list[str], dict[str, int]]] = {}
        plan = self.forward
        for number in plan.saved if plan else ():
            if plan and plan.buffers[number].source != "input" and number not in plan.outputs:
                self.fresh.append(number)

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


def _fwd(name: str, mask: int, xs: list[Tensor]) -> list[Tensor]:
    program = _on(name, xs)
    slots: list[Any] = list(xs)
    with program.current():
        dims = program.admit(slots)
        ready = program.ready("forward" if mask else "inference", dims)
        ready(slots)
    program.counters.launches += ready.launches
    out = [slots[i] for i in ready.layout.outputs]
    if not mask:
        return out
    roles = roles_of(program)
    kept = dict(zip(ready.plan.saved, ready.layout.saved, strict=True))
    return out + [slots[kept[number]] for number in roles.fresh]


def _fwd_fake(name: str, mask: int, xs: list[Tensor]) -> list[Tensor]:
    program = _described(name)
    dims = {d.name: xs[d.tensor].shape[d.axis] for d in program.interface.dims}
    out = [_like(spec, dims, xs[0]) for spec in program.interface.outputs]
    roles = roles_of(program)
    if mask and roles.forward is not None:
        out += [_like(roles.forward.buffers[number], dims, xs[0]) for number in roles.fresh]
    return out


def _like(spec: Any, dims: Mapping[str, Any], near: Tensor) -> Tensor:
    shape = [evaluate(s, dims) for s in spec.shape]
    return near.new_empty(shape, dtype=getattr(torch, spec.dtype))


def _bwd(
    name: str, dims: list[int], mask: int, saved: list[Tensor], cotangents: list[Tensor | None]
) -> list[Tensor]:
    program = _on(name, (*saved, *cotangents))
    order, _ = roles_of(program).distinct(mask)
    with program.current():
        slots = program.backward_feeds(tuple(dims), saved, cotangents)
        ready = program.ready("backward", tuple(dims), tuple(order))
        ready(slots)
    program.counters.launches += ready.launches
    slot = dict(zip(ready.plan.wanted, ready.layout.gradients, strict=True))
    out: list[Tensor] = []
    for head in order:
        tensor = slots[slot[head]]
        # Two names that this bucket's plan lets share memory although the first plan does not: no aliases
        # go out.
        out.append(tensor.clone() if any(tensor is other for other in out) else tensor)
    return out


def _bwd_fake(
    name: str, dims: list[int], mask: int, saved: list[Tensor], cotangents: list[Tensor | None]
) -> list[Tensor]:
    program = _described(name)
    values = dict(zip(program.dim_names, dims, strict=True))
    near = next(t for t in (*saved, *cotangents) if t is not None)
    specs: dict[str, TensorSpec] = {s.name: s for s in program.interface.inputs}
    return [_like(specs[head], values, near) for head in roles_of(program).distinct(mask)[0]]


class _Differentiable(torch.autograd.Function):
    """`esper::fwd` as a node of the graph. Written out, because torch.library.register_autograd sorts
    lists of tensors into trees on every call, which costs three times the rest."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, name: str, mask: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        found = _below(torch.ops.esper.fwd.default, keyset, name, mask, list(xs))
        program = _described(name)
        dims = [xs[d.tensor].shape[d.axis] for d in program.interface.dims]
        ctx.call = (name, mask, len(xs), dims)
        if mask:
            ctx.save_for_backward(*roles_of(program).saved(xs, found))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        name, mask, count, dims = ctx.call
        program = _described(name)
        cotangents = list(gradients[: len(program.interface.outputs)])
        if not mask or all(c is None for c in cotangents):
            return (None,) * (3 + count)
        _, position = roles_of(program).distinct(mask)
        found = torch.ops.esper.bwd.default(name, dims, mask, list(ctx.saved_tensors), cotangents)
        names = [spec.name for spec in program.interface.inputs]
        return None, None, None, *[found[position[n]] if n in position else None for n in names]


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


def _fwd_autograd(keyset: Any, name: str, mask: int, xs: list[Tensor]) -> list[Tensor]:
    if _transforms():
        raise no_transform(name)
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        return list(_Differentiable.apply(keyset, name, mask, *xs))
    return _below(torch.ops.esper.fwd.default, keyset, name, mask, xs)


def _bwd_autograd(
    keyset: Any,
    name: str,
    dims: list[int],
    mask: int,
    saved: list[Tensor],
    cotangents: list[Tensor | None],
) -> list[Tensor]:
    rest = (dims, mask, saved, cotangents)
    tensors = [t for t in (*saved, *cotangents) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(_Final.apply(keyset, name, rest, *tensors))
    return _below(torch.ops.esper.bwd.default, keyset, name, *rest)


for _name, _real in (("fwd", _fwd), ("bwd", _bwd)):
    _define.impl(_name, _real, "CPU")
    _define.impl(_name, _real, "CUDA")
torch.library.register_fake("esper::fwd", _fwd_fake, lib=_define)
torch.library.register_fake("esper::bwd", _bwd_fake, lib=_define)
_define.impl("fwd", _fwd_autograd, "Autograd", with_keyset=True)
_define.impl("bwd", _bwd_autograd, "Autograd", with_keyset=True)
