"""The eager twin: a torch module that runs the reference. Fallback, baseline and starting point of
training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint, Leaf
from esper_ir.ops.rules import torch_dtype
from esper_ir.reference import check_values, sizes_of
from esper_ir.safetensors import read_tensor
from esper_ir.straight import straight
from esper_ir.text import read_file
from esper_ir.verify import typed


def _shape(leaf: Leaf) -> list[int]:
    sizes = [d.static for d in leaf.type.shape]
    if any(s is None for s in sizes):
        raise EsperError(
            "E0404", f"{leaf.kind} {leaf.name} has a symbolic shape", node=leaf.name, hint="give sizes"
        )
    return [s for s in sizes if s is not None]


def _fans(shape: list[int]) -> tuple[int, int]:
    """(fan in, fan out) as torch.nn.init counts them: of a weight [out, in, ...]."""
    if len(shape) < 2:
        return (shape[0], shape[0]) if shape else (1, 1)
    receptive = math.prod(shape[2:])
    return shape[1] * receptive, shape[0] * receptive


def _bound(kind: str, init: Mapping[str, float], shape: list[int]) -> float:
    fan_in, fan_out = _fans(shape)
    if kind == "kaiming_uniform":
        gain = math.sqrt(2.0 / (1.0 + init.get("a", math.sqrt(5.0)) ** 2))
        return gain * math.sqrt(3.0 / max(fan_in, 1))
    return math.sqrt(6.0 / max(fan_in + fan_out, 1))


def initialise(leaf: Leaf, generator: torch.Generator | None = None) -> Tensor:
    """A fresh value of a param or buffer, drawn in float32 (float64 for float64) on the CPU, then rounded.

    Without an initialiser: zeros. Formulas are those of torch.nn.init. Raises EsperError E0404 for a symbolic
    shape.
    """
    init = dict(leaf.init or {"kind": "zeros"})
    kind = init.pop("kind")
    shape = _shape(leaf)
    dtype = torch_dtype(leaf.type.dtype)
    draw = torch.float64 if dtype is torch.float64 else torch.float32
    value = torch.zeros(shape, dtype=draw)
    if kind == "ones":
        value.fill_(1.0)
    elif kind == "constant":
        value.fill_(init["value"])
    elif kind == "eye":
        value = torch.eye(shape[0], shape[1], dtype=draw) if len(shape) == 2 else value.fill_(1.0)
    elif kind == "normal":
        value.normal_(init.get("mean", 0.0), init.get("std", 1.0), generator=generator)
    elif kind == "uniform":
        value.uniform_(init.get("low", 0.0), init.get("high", 1.0), generator=generator)
    elif kind in ("kaiming_uniform", "xavier_uniform"):
        bound = _bound(kind, init, shape)
        value.uniform_(-bound, bound, generator=generator)
    return value.to(dtype)


def constant_value(leaf: Leaf, base: Path | None = None) -> Tensor:
    """The value of a constant: inline data, or a tensor of a safetensors file in `base` whose digest must
    match.

    Raises EsperError E0112 (data of another shape, no such tensor), E0113 (no such file), exit 11 on another
    digest.
    """
    dtype, shape = torch_dtype(leaf.type.dtype), _shape(leaf)
    if isinstance(leaf.data, Mapping):
        found = read_tensor(read_file(leaf, base or Path()), leaf.data.get("key", leaf.name))
    else:
        try:
            found = torch.tensor(leaf.data, dtype=torch.float64 if leaf.type.dtype.is_floating else dtype)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise EsperError("E0112", f"{leaf.name}: {error}", node=leaf.name) from None
    if list(found.shape) != shape:
        raise EsperError(
            "E0112", f"{leaf.name}: data of shape {list(found.shape)}, declared {shape}", node=leaf.name
        )
    return found.to(dtype)


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a dotted name, made where it is missing, and the last part of the name."""
    *path, last = name.split(".")
    for part in path:
        inner = getattr(root, part, None)
        if inner is None:
            inner = nn.Module()
            root.add_module(part, inner)
        root = inner
    if not last or not isinstance(root, nn.Module) or hasattr(root, last):
        raise EsperError(
            "E0404", f"{name!r} cannot be an attribute of a torch module", node=name, hint="rename it"
        )
    return root, last


def draw(shape: Sequence[int], device: torch.device | None) -> Tensor:
    """Whole numbers from torch's generator of the device: what `checkpoint` keeps, and graphs replay anew."""
    return torch.randint(0, 1 << 62, tuple(shape), dtype=torch.int64, device=device)


def recomputing() -> bool:
    """Whether a backward is running in this thread, so that a forward now is one of activation checkpointing
    that repeats what the step did before. A trace runs no backward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class EagerTwin(nn.Module):
    """Runs the blueprint by its reference: parameters and buffers under the names of the blueprint, dots as
    nested modules. They start from `blueprint.values` where an importer found some, else from their
    initialisers.

    `forward(*inputs)` takes the inputs in the order of the blueprint and returns its output, or a tuple of
    them. Inputs that the blueprint calls random are drawn from torch's generator, and buffers that it updates
    are written in training, once per step: not while a backward repeats this forward. `torch.compile` makes
    one graph of it.
    """

    def __init__(
        self, blueprint: Blueprint, generator: torch.Generator | None = None, base: Path | None = None
    ) -> None:
        super().__init__()
        self.blueprint = blueprint
        self.graph = typed(blueprint)
        self._order = [(v.name, v.kind, tuple(v.name.split("."))) for v in blueprint.leaves]
        self._drawn = {n: _shape(v) for n in blueprint.random if (v := blueprint.leaf(n)) is not None}
        self._count = len(blueprint.of_kind("input")) - len(self._drawn)
        at, hidden = blueprint.outputs, len(blueprint.outputs) - len(blueprint.updates)
        self._updates = [
            (tuple(buffer.split(".")), at.index(source, hidden))
            for buffer, source in blueprint.updates.items()
        ]
        self._prepare()
        wanted = blueprint.differentiable
        for leaf in blueprint.of_kind("param"):
            trained = leaf.type.dtype.is_floating and (wanted is None or leaf.name in wanted)
            owner, name = _owner(self, leaf.name)
            owner.register_parameter(name, nn.Parameter(self._start(leaf, generator), requires_grad=trained))
        for leaf in blueprint.of_kind("buffer"):
            owner, name = _owner(self, leaf.name)
            owner.register_buffer(name, self._start(leaf, generator))
        for leaf in blueprint.of_kind("constant"):
            owner, name = _owner(self, leaf.name)
            held = blueprint.values.get(leaf.name)
            value = constant_value(leaf, base) if held is None else held.clone()
            owner.register_buffer(name, value, persistent=False)

    def _start(self, leaf: Leaf, generator: torch.Generator | None) -> Tensor:
        """The value that an importer found, else a fresh one."""
        held = self.blueprint.values.get(leaf.name)
        return initialise(leaf, generator) if held is None else held.clone()

    def _prepare(self) -> None:
        """What cannot be copied or pickled, from what can."""
        self._run = straight(self.graph)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()

    def values(self) -> dict[str, Tensor]:
        """Params, buffers and constants under their names in the blueprint."""
        return {name: self._leaf(path) for name, kind, path in self._order if kind != "input"}

    def _leaf(self, path: tuple[str, ...]) -> Tensor:
        found: Any = self
        for part in path:
            found = getattr(found, part)
        return found

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Raises EsperError E0402 when a shape or dtype does not fit the blueprint."""
        if len(inputs) != self._count:
            raise EsperError("E0402", f"{self.blueprint.name} takes {self._count} inputs, not {len(inputs)}")
        leaves, at = [], 0
        for name, kind, path in self._order:
            if kind != "input":
                leaves.append(self._leaf(path))
            elif name in self._drawn:
                leaves.append(draw(self._drawn[name], self._place(inputs)))
            else:
                leaves.append(inputs[at])
                at += 1
        out = self._run(*leaves)
        count = len(out) - len(self._updates)
        if self._updates and self.training and not recomputing():
            with torch.no_grad():
                for path, position in self._updates:
                    self._leaf(path).copy_(out[position])
        out = out[:count]
        return out[0] if len(out) == 1 else out

    def _place(self, inputs: Sequence[Tensor]) -> torch.device | None:
        """Where numbers are drawn."""
        return next((t.device for t in (*inputs, *self.parameters(), *self.buffers())), None)

    def extra_repr(self) -> str:
        return self.blueprint.name


def to_torch(blueprint: Blueprint, base: Path | None = None) -> EagerTwin:
    """The blueprint as a torch module that runs the reference."""
    return EagerTwin(blueprint, base=base)


def check_inputs(blueprint: Blueprint, values: Mapping[str, Tensor]) -> dict[str, int]:
    """Sizes of the dims that these tensors give; E0402 when they do not fit."""
    types = {leaf.name: leaf.type for leaf in blueprint.leaves if leaf.name in values}
    sizes = sizes_of(types, values)
    check_values(types, values, sizes)
    return sizes
