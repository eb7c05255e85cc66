"""Parameters, buffers and constants of a block, made as the blueprint says.

The formulas and the order of random draws are those of `esper_ir.eager` (a test holds the two together);
they stand here again because that module brings torch's decompositions with it, 130 ms that a first step
cannot pay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from library.launch import TensorSpec
from runtime.errors import fail

SECTIONS = {"param": "params", "buffer": "buffers", "constant": "constants"}


def static_shape(spec: TensorSpec) -> list[int]:
    """E0819 for a parameter whose size is symbolic: such a block is functional only."""
    sizes = [s for s in spec.shape if isinstance(s, int)]
    if len(sizes) != len(spec.shape):
        raise fail(
            "E0819",
            f"{spec.kind} {spec.name} has the symbolic shape {list(spec.shape)}",
            node=spec.name,
            hint="load with functional=True and pass it",
        )
    return sizes


@dataclass(frozen=True)
class Leaf:
    """One leaf of a block, read from its artifact once: `path`, the modules it stands in; `trained`, whether
    it asks for gradients; `written`, what the blueprint says of its value."""

    spec: TensorSpec
    path: tuple[str, ...]
    name: str
    shape: list[int]
    dtype: torch.dtype
    trained: bool
    written: Mapping[str, Any]

    def value(self, device: torch.device | None, generator: torch.Generator | None = None) -> Tensor:
        """A fresh one, drawn on the processor (None: by its default generator). On the meta device nothing is
        drawn."""
        if device is not None and device.type == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        if self.spec.kind == "constant":
            made = _constant(self.spec, self.written.get("data"), self.shape, self.dtype)
        else:
            made = _draw(self.written.get("init") or "zeros", self.shape, self.dtype, generator)
        return made.to(device)


def leaf_of(spec: TensorSpec, text: Mapping[str, Any], differentiable: Sequence[str] = ()) -> Leaf:
    """`text`: the blueprint's JSON. Errors of `static_shape`."""
    *path, name = spec.name.split(".")
    dtype = getattr(torch, spec.dtype)
    trained = spec.kind == "param" and dtype.is_floating_point and spec.name in differentiable
    written = text.get(SECTIONS[spec.kind], {}).get(spec.name, {})
    return Leaf(spec, tuple(path), name, static_shape(spec), dtype, trained, written)


def value_of(spec: TensorSpec, text: Mapping[str, Any], device: torch.device | None) -> Tensor:
    """A fresh value of one leaf. `text`: the blueprint's JSON. On the meta device nothing is drawn."""
    return leaf_of(spec, text).value(device)


def _constant(spec: TensorSpec, data: Any, shape: list[int], dtype: torch.dtype) -> Tensor:
    if data is None or isinstance(data, Mapping):
        raise fail(
            "E0819",
            f"the value of constant {spec.name} is not in the artifact",
            node=spec.name,
            hint="load with functional=True and pass it",
        )
    found = torch.tensor(data, dtype=torch.float64 if dtype.is_floating_point else dtype, device="cpu")
    return found.reshape(shape).to(dtype)


def _draw(
    init: str | Mapping[str, Any], shape: list[int], dtype: torch.dtype, generator: torch.Generator | None
) -> Tensor:
    given: dict[str, Any] = {"kind": init} if isinstance(init, str) else dict(init)
    kind = given.pop("kind")
    draw = torch.float64 if dtype is torch.float64 else torch.float32
    value = torch.zeros(shape, dtype=draw, device="cpu")
    if kind == "ones":
        value.fill_(1.0)
    elif kind == "constant":
        value.fill_(given["value"])
    elif kind == "eye":
        value = torch.eye(*shape, dtype=draw, device="cpu") if len(shape) == 2 else value.fill_(1.0)
    elif kind == "normal":
        value.normal_(given.get("mean", 0.0), given.get("std", 1.0), generator=generator)
    elif kind == "uniform":
        value.uniform_(given.get("low", 0.0), given.get("high", 1.0), generator=generator)
    elif kind in ("kaiming_uniform", "xavier_uniform"):
        bound = _bound(kind, given, shape)
        value.uniform_(-bound, bound, generator=generator)
    elif kind != "zeros":
        raise fail("E0809", f"unknown initialiser {kind!r}")
    return value.to(dtype)


def _bound(kind: str, init: Mapping[str, float], shape: list[int]) -> float:
    """torch.nn.init's: fans of a weight [out, in, ...]."""
    receptive = math.prod(shape[2:])
    into, out = (
        (shape[1] * receptive, shape[0] * receptive) if len(shape) > 1 else (shape[0] if shape else 1,) * 2
    )
    if kind == "kaiming_uniform":
        gain = math.sqrt(2.0 / (1.0 + init.get("a", math.sqrt(5.0)) ** 2))
        return gain * math.sqrt(3.0 / max(into, 1))
    return math.sqrt(6.0 / max(into + out, 1))


def leaves_of(
    specs: Sequence[TensorSpec], text: Mapping[str, Any], differentiable: Sequence[str]
) -> tuple[Leaf, ...]:
    """Those of a block in the order in which they are drawn and registered: params, buffers, constants."""
    return tuple(leaf_of(s, text, differentiable) for kind in SECTIONS for s in specs if s.kind == kind)


def attach(
    root: nn.Module,
    leaves: Sequence[Leaf],
    device: torch.device | None,
    generator: torch.Generator | None = None,
) -> None:
    """Register every leaf under its own name, dots as nested modules; values are those of `Leaf.value`."""
    for leaf in leaves:
        owner = _owner(root, leaf.path) if leaf.path else root
        value = leaf.value(device, generator)
        if leaf.spec.kind == "param":
            owner.register_parameter(leaf.name, nn.Parameter(value, requires_grad=leaf.trained))
        else:
            owner.register_buffer(leaf.name, value, persistent=leaf.spec.kind == "buffer")


def _owner(root: nn.Module, path: Sequence[str]) -> nn.Module:
    at = root
    for part in path:
        if part not in at._modules:
            at.add_module(part, nn.Module())
        child = at._modules[part]
        assert child is not None
        at = child
    return at
