"""The classes in front of a model's own layers, and a graft as a module.

A layer stays the object it was; only its class becomes a subclass whose forward looks at one flag and
returns. Committed grafts are modules of the layer (`esper_grafts`), so weights, devices and modes follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runtime.seeds import traced
from runtime.seeds.seed import Seed, Spec

GRAFTS = "esper_grafts"
_traced = (
    torch.compiler.is_dynamo_compiling
)  # a constant while tracing, and the cheapest to ask in eager mode


class Grown(nn.Module):
    """In front of a layer's own class while it is wrapped."""

    _esper_original: type[nn.Module]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        done = super()._apply(fn, recurse)
        for slot in self.__dict__["_esper_site"].slots:
            if slot.seed is not None:
                slot.seed._apply(fn)
        return done

    def train(self, mode: bool = True) -> Any:
        for slot in self.__dict__["_esper_site"].slots:
            if slot.seed is not None:
                slot.seed.train(mode)
        return super().train(mode)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A class made at run time cannot be found by name: say which one it was made from.
        return revive, (self._esper_original,), dict(self.__dict__)


class Sequence(nn.Module):
    """Containers that call their children one after the other: grafts are not among them."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([m for n, m in self._modules.items() if n != GRAFTS and m is not None])

    def __len__(self) -> int:
        return sum(name != GRAFTS for name in self._modules)


def _first(found: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The first tensor of a layer's result, changed."""
    if isinstance(found, Tensor):
        return change(found)
    if isinstance(found, (tuple, list)) and found and isinstance(found[0], Tensor):
        rest = (change(found[0]), *found[1:])
        return type(found)(*rest) if hasattr(found, "_fields") else type(found)(rest)
    return found


class Composed(nn.Module):
    """In front of a layer's own class when it has grafts and no slots."""

    _esper_original: type[nn.Module]
    esper_grafts: nn.ModuleList

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        below: Any = super()
        found = below.forward(*args, **kwargs)
        for graft in self.esper_grafts:
            found = _first(found, graft)
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return revive, (self._esper_original, "composed"), dict(self.__dict__)


class GrownSequence(Sequence, Grown):
    """A wrapped container."""


class ComposedSequence(Sequence, Composed):
    """A container with grafts and no slots."""


_classes: dict[tuple[str, type[nn.Module]], type[nn.Module]] = {}


def _looking(original: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a wrapped layer: the layer's own, then one look. A closure, because `super()` costs as
    much as the look."""
    inner: Callable[..., Any] = original.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = inner(self, *args, **kwargs)
        site = self.__dict__["_esper_site"]
        if _traced():
            return _first(found, lambda h: traced.through(h, site.key))
        return found if site.quiet else _first(found, site.run)

    return forward


def _class(how: str, original: type[nn.Module]) -> type[nn.Module]:
    found = _classes.get((how, original))
    if found is None:
        facts: dict[str, Any] = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "_esper_original": original,
        }
        if how == "grown":
            facts["forward"] = _looking(original)
        within = issubclass(original, nn.Sequential)
        fronts = {"grown": (Grown, GrownSequence), "composed": (Composed, ComposedSequence)}[how]
        made: Any = type(original.__name__, (fronts[within], original), facts)
        found = _classes[how, original] = made
    return found


def grown_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `original`, under the same name: policies that go by names and types still match."""
    return _class("grown", original)


def composed_class(original: type[nn.Module]) -> type[nn.Module]:
    """The same for a layer with grafts and no slots."""
    return _class("composed", original)


def revive(original: type[nn.Module], how: str = "grown") -> nn.Module:
    """An empty module of such a class, for copies and pickles."""
    kind = _class(how, original)
    return kind.__new__(kind)


class Committed(nn.Module):
    """A graft that is part of the host: a seed over a chunk of the features, at a fixed alpha."""

    def __init__(self, seed: Seed, first: int, end: int, axis: int, alpha: float, spec: Spec) -> None:
        super().__init__()
        self.seed = seed
        self.first, self.end, self.axis, self.alpha = first, end, axis, alpha
        self.shape, self.dtype = spec.shape, str(spec.dtype).removeprefix("torch.")

    def forward(self, h: Tensor) -> Tensor:
        whole = self.end - self.first == h.shape[self.axis]
        piece = h if whole else h.narrow(self.axis, self.first, self.end - self.first)
        with torch.autocast(h.device.type, enabled=False):
            z = self.seed(piece)
        if self.alpha != 1.0:
            z = torch.lerp(piece, z, self.alpha)
        if whole:
            return z
        left = h.narrow(self.axis, 0, self.first)
        right = h.narrow(self.axis, self.end, h.shape[self.axis] - self.end)
        return torch.cat([left, z, right], self.axis)
