"""What sits in a module whose forward an artifact runs: which tensors of the module are which leaves, how
inputs are folded, and the way back to the module's own forward.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from esper_ir.diagnostics import EsperError
from runtime.adapters import Unfoldable, adapted, is_adapter
from runtime.binding import SERVED_EAGERLY, Block
from runtime.errors import fail
from runtime.functions import no_tensor
from runtime.operators import NCHW, NHWC
from runtime.state import given, recomputing, with_drawn

log = logging.getLogger("esper.runtime")
SERVED = SERVED_EAGERLY | {"E0811", "E0854"}  # what a module's own forward may answer instead
EAGERLY = "swap with fallback='eager': the module's own forward answers"
_is_compiling = torch.compiler.is_compiling
_lists: Any = torch  # whose operators on lists are not among its typed names


@dataclass(frozen=True)
class Options:
    """`fallback`: "error" or "eager", as for `runtime.load`; `check`: compare with the module first."""

    fallback: str = "error"
    check: bool = True


@dataclass(frozen=True)
class Place:
    """A tensor of a module: the submodules on the way, its name, and how its axes are ordered for the leaf
    (empty: as they are)."""

    owners: tuple[str, ...]
    name: str
    order: tuple[int, ...] = ()

    @property
    def path(self) -> str:
        return ".".join((*self.owners, self.name))

    def of(self, module: nn.Module) -> Tensor:
        """The tensor as it is now: parametrised, sharded and gathered, or adapted ones included."""
        at: Any = module
        for part in self.owners:
            at = getattr(at, part)
        value = adapted(at, self.name) if is_adapter(at) else getattr(at, self.name)
        return value.permute(self.order) if self.order else value

    def quickly(self, module: nn.Module) -> Tensor:
        """The same past `nn.Module.__getattr__`, which a trace must see and a call need not."""
        at = owner_of(module, self.owners)
        value = at._parameters.get(self.name)
        if value is None:
            value = at._buffers.get(self.name)
        if value is None or "base_layer" in at._modules:
            return self.of(module)
        return value.permute(self.order) if self.order else value


def owner_of(module: nn.Module, names: tuple[str, ...]) -> Any:
    """A submodule past `nn.Module.__getattr__`."""
    at: Any = module
    for name in names:
        at = at._modules[name]
    return at


@dataclass(frozen=True)
class Update:
    """A buffer of a module that a step moves, and the number of the block's output that it becomes."""

    owners: tuple[str, ...]
    name: str
    output: int


class Seat:
    """`seat(module, args, kwargs)` is the module's result by the artifact."""

    def __init__(
        self,
        name: str,
        block: Block,
        original: type[nn.Module],
        places: Sequence[Place | Tensor],
        params: tuple[str, ...],
        options: Options,
    ) -> None:
        self.name, self.block, self.original, self.options = name, block, original, options
        self.places, self.params = tuple(places), params
        interface = block.program.interface
        inputs = given(interface)
        self.arity = len(inputs)
        self.ranks = [len(spec.shape) for spec in inputs]
        self.simple = False  # whether a call needs nothing but the leaves beside it
        # Only an axis that the range of a dim covers can take others into it.
        self.leads = tuple(bool(s.shape) and isinstance(s.shape[0], str) for s in inputs)
        self.dims = tuple(str(s.shape[0]) if s.shape else "" for s in inputs)
        self.out_dims = tuple(str(s.shape[0]) if s.shape else "" for s in interface.outputs)
        self.single = len(interface.outputs) == 1
        self.draws = bool(interface.random)
        self.channels_last = False
        self.folds = True
        self.mode = "always"
        self.left: Mapping[str, str] = {}  # mode that is the module's own -> why
        self.updates: Mapping[str, int] = {}
        self.moves: tuple[Update, ...] = ()  # the same, once settled
        self.eager_calls = 0
        self.grain = 0.0  # relative rounding of the coarsest step, where that is not a dtype's own

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.mode != "always" and module.training != (self.mode == "train"):
            return self.original.forward(module, *args, **kwargs)
        if _is_compiling():
            return self.run(module, self.inputs(args, kwargs))
        try:
            return self.run(module, self.inputs(args, kwargs))
        except AttributeError:
            strange = [v for v in (*args, *kwargs.values()) if not isinstance(v, Tensor)]
            if not strange:
                raise
            raise self._placed(no_tensor(self.block.artifact_id, strange[0])) from None
        except EsperError as error:
            if self.options.fallback == "error" or error.code not in SERVED:
                raise self._placed(error)  # noqa: B904 (the same error)
            if not self.eager_calls:
                log.warning("%s: answered by the module itself: %s", self.name, error.message)
            self.eager_calls += 1
        return self.original.forward(module, *args, **kwargs)

    def _placed(self, error: EsperError) -> EsperError:
        """The same error, saying which module and artifact it is about and what swap can do."""
        if error.node != self.name:
            error.message = f"{self.name} by {self.block.artifact_id}: {error.message}"
        hint = (error.hint or "").replace("load with fallback='eager'", EAGERLY)
        if error.code in SERVED and self.options.fallback == "error" and "fallback=" not in hint:
            hint = f"{hint}, or {EAGERLY}" if hint else EAGERLY
        if "flatten(" in hint and not self.folds:
            hint = (
                "in this block rows affect each other, so swap folds no leading axes: pass the declared rank"
            )
        error.hint = hint or None
        error.args = (error.render(),)
        return error

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The block's inputs of a call; E0854 for arguments that the block has no place for."""
        if len(args) == self.arity and not kwargs:
            return args
        given = dict(zip(self.params, args, strict=False)) | dict(kwargs)
        named = self.params[: self.arity]
        further = [k for k, v in given.items() if k not in named and v is not None]
        absent = [k for k in named if k not in given]
        if further or absent or len(args) > len(self.params):
            told = ", ".join([*(f"{k} given" for k in further), *(f"{k} missing" for k in absent)])
            raise fail(
                "E0854",
                f"{self.name} by {self.block.artifact_id} takes ({', '.join(named)}): {told}",
                node=self.name,
                hint="swap(..., fallback='eager') has the module answer such calls",
            )
        return tuple(given[k] for k in named)

    def run(self, module: nn.Module, inputs: Sequence[Tensor]) -> Any:
        """The block on the module's tensors. Errors as of a block's call."""
        traced = self.channels_last and _is_compiling() and any(t.dim() == 4 for t in inputs)
        if traced:
            return self._results(module, self._on_images(module, inputs), {}, True)
        leaves = self._leaves(module)
        if self.simple and [t.dim() for t in inputs] == self.ranks:
            return self.block(*inputs, *leaves)
        lead: dict[str, tuple[int, ...]] = {}
        tensors = [self._folded(at, value, lead) for at, value in enumerate(inputs)]
        if self.draws:
            tensors = with_drawn(self.block.program.interface, tensors, tensors[0].device)
        return self._results(module, self.block(*tensors, *leaves), lead, False)

    def _on_images(self, module: nn.Module, inputs: Sequence[Tensor]) -> Any:
        """What a compiler sees: images and filters go into the operator as torch has them."""
        tensors = list(inputs)
        if self.draws:
            tensors = with_drawn(self.block.program.interface, tensors, tensors[0].device)
        turned = sum(1 << at for at, value in enumerate(tensors) if value.dim() == 4)
        for place in self.places:
            if isinstance(place, Place) and place.order == NHWC:
                turned |= 1 << len(tensors)
                place = replace(place, order=())
            tensors.append(place if isinstance(place, Tensor) else place.of(module))
        return self.block.on_images(tensors, turned)

    def _results(
        self, module: nn.Module, found: Any, lead: Mapping[str, tuple[int, ...]], images: bool
    ) -> Any:
        """What the module gives, from what the block gave; buffers updated."""
        outputs = (found,) if self.single else found
        if self.updates and module.training:
            self._update(module, outputs)
        keep = len(outputs) - len(self.updates)
        shaped = tuple(
            value if images else self._unfolded(value, lead.get(dim, ()))
            for value, dim in zip(outputs[:keep], self.out_dims, strict=False)
        )
        return shaped[0] if keep == 1 else shaped

    def _leaves(self, module: nn.Module) -> list[Tensor]:
        try:
            if _is_compiling():
                return [p if isinstance(p, Tensor) else p.of(module) for p in self.places]
            return [p if isinstance(p, Tensor) else p.quickly(module) for p in self.places]
        except Unfoldable as reason:
            raise fail("E0854", f"{self.name}: {reason}", node=self.name) from None

    def settle(self) -> None:
        """Called when nothing about the seat changes any more."""
        self.simple = not (self.channels_last or self.updates or self.draws)
        self.moves = self._taken_apart()

    def _folded(self, at: int, value: Tensor, lead: dict[str, tuple[int, ...]]) -> Tensor:
        if self.channels_last and value.dim() == 4:
            return value.permute(NHWC)
        extra = value.dim() - self.ranks[at]
        if extra <= 0 or not self.leads[at] or not self.folds:
            return value
        lead[self.dims[at]] = tuple(value.shape[: extra + 1])
        return value.reshape(-1, *value.shape[extra + 1 :])

    def _unfolded(self, value: Tensor, lead: tuple[int, ...]) -> Tensor:
        if self.channels_last and value.dim() == 4:
            return value.permute(NCHW)
        return value.unflatten(0, lead) if lead else value

    def _update(self, module: nn.Module, outputs: Sequence[Tensor]) -> None:
        """Running statistics and the like: once per step, so not while a backward recomputes this forward."""
        if not _is_compiling() and recomputing():
            return
        buffers: list[Tensor] = []
        values: list[Tensor] = []
        counts: list[Tensor] = []
        for move in self.moves or self._taken_apart():
            held = owner_of(module, move.owners)._buffers
            buffer, value = held[move.name], outputs[move.output]
            buffers.append(buffer)
            values.append(value if value.shape == buffer.shape else value.reshape(buffer.shape))
            steps = held.get("num_batches_tracked")
            if move.name == "running_mean" and steps is not None:
                counts.append(steps)  # torch's norms count beside their statistics, and no blueprint reads it
        with torch.no_grad():  # all at once: a launch for each would cost as much as the block
            _lists._foreach_copy_(buffers, values)
            if counts:
                _lists._foreach_add_(counts, 1)

    def _taken_apart(self) -> tuple[Update, ...]:
        split = [(name.split("."), at) for name, at in self.updates.items()]
        return tuple(Update(tuple(parts[:-1]), parts[-1], at) for parts, at in split)

    def report(self) -> dict[str, Any]:
        """The block's report, and what answers in its place."""
        places = [p.path if isinstance(p, Place) else "constant" for p in self.places]
        own = {"leaves": places, "eager_calls": self.eager_calls, "mode": self.mode, "left": dict(self.left)}
        return {**self.block.report(), **own}


class Swapped(nn.Module):
    """In front of a module's own class while an artifact runs its forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._esper_seat(self, args, kwargs)  # type: ignore[operator]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A class made at run time cannot be found by name: say which one it was made from.
        return revive, (self.__dict__["_esper_seat"].original,), dict(self.__dict__)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def swapped_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `original`, under the same name: policies that go by names and types still match."""
    found = _classes.get(original)
    if found is None:
        facts = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        found = _classes[original] = type(original.__name__, (Swapped, original), facts)
    return found


def revive(original: type[nn.Module]) -> nn.Module:
    """An empty module of the swapped class, for copies and pickles."""
    kind = swapped_class(original)
    return kind.__new__(kind)


def seat_of(module: nn.Module) -> Seat | None:
    return module.__dict__.get("_esper_seat")


def unseat(module: nn.Module) -> Seat | None:
    """Give the module its own class back; None when another class was put around it since."""
    seat = module.__dict__["_esper_seat"]
    if type(module) is not swapped_class(seat.original):
        return None
    module.__class__ = seat.original
    del module.__dict__["_esper_seat"]
    return seat
