"""Whether and how an artifact fits a module: leaves to tensors by name and shape, then a trial on random
tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper_ir.diagnostics import EsperError
from library.launch import DimSource, TensorSpec, evaluate
from library.manifest import blueprint_document
from runtime import parameters
from runtime.adapters import Unfoldable, is_adapter
from runtime.binding import Block
from runtime.errors import fail
from runtime.executor import Counters
from runtime.seat import NCHW, NHWC, Options, Place, Seat
from runtime.state import given

# Relative L2 error of a trial. Generous for the arithmetic, far below what a wrong wiring gives (about 1).
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Wish(Protocol):
    """What `runtime.swapping.Fit` says beyond the artifact."""

    @property
    def names(self) -> Mapping[str, str]: ...
    @property
    def channels_last(self) -> bool: ...
    @property
    def mode(self) -> str: ...
    @property
    def updates(self) -> Mapping[str, int]: ...


def seat(name: str, module: nn.Module, block: Block, wish: Wish, options: Options) -> Seat:
    """The block seated in the module (not yet installed). E0851 it does not fit, E0852 the trial failed."""
    if "forward" in module.__dict__:
        raise fail("E0851", f"{name} has a forward of its own (hooked or compiled)", node=name)
    program = block.program
    leaves = [s for s in program.interface.inputs if s.kind != "input"]
    strange = sorted(set(wish.names) - {s.name for s in leaves})
    if strange:
        raise fail("E0851", f"{block.artifact_id} has no leaves {', '.join(strange)}", node=name)
    text = blueprint_document(block._handle.entry.container.manifest)
    places = [_place(name, module, spec, wish, text, program.device) for spec in leaves]
    params = tuple(p.name for p in _parameters(module))
    made = Seat(name, block, type(module), places, params, options)
    declared = {wish.names.get(name, name): at for name, at in program.interface.updates}
    made.channels_last, made.mode, made.updates = wish.channels_last, wish.mode, {**declared, **wish.updates}
    _check_updates(name, module, made)
    _check_unused(name, module, made)
    # Numbers that both draw for themselves cannot agree.
    if (
        options.check
        and not made.draws
        and not any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    ):
        _tried(name, module, made)
        for counter in Counters.__slots__:
            setattr(block._counters, counter, int(counter == "loads"))  # the trial is not use
    made.settle()
    return made


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    """What forward takes beside the module."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [p for p in found if p.kind in kinds or p.kind is inspect.Parameter.KEYWORD_ONLY]


# -- leaves


def _place(
    name: str, module: nn.Module, spec: TensorSpec, wish: Wish, text: Any, device: torch.device
) -> Place | Tensor:
    if spec.kind == "constant" and spec.name not in wish.names:
        return parameters.value_of(spec, text, device)
    *owners, last = wish.names.get(spec.name, spec.name).split(".")
    place = Place(tuple(owners), last)
    try:
        value = place.of(module)
    except (KeyError, AttributeError):
        raise _absent(name, module, spec, place) from None
    except Unfoldable as reason:
        raise fail("E0851", f"{name}.{place.path}: {reason}", node=name) from None
    if not isinstance(value, Tensor) or type(value).__name__ == "DTensor":
        raise fail(
            "E0851",
            f"{name}.{place.path} is a {type(value).__name__}",
            node=name,
            hint="swap before sharding",
        )
    if value.dtype is not getattr(torch, spec.dtype):
        raise fail(
            "E0851", f"{name}.{place.path} is {value.dtype}, the leaf {spec.name} {spec.dtype}", node=name
        )
    return Place(place.owners, last, _order(name, place, value, parameters.static_shape(spec), wish))


def _order(name: str, place: Place, value: Tensor, wanted: list[int], wish: Wish) -> tuple[int, ...]:
    shape = list(value.shape)
    if wish.channels_last and len(shape) == 4 and [shape[i] for i in NHWC] == wanted:
        return NHWC
    if shape == wanted:
        return ()
    if len(shape) == 2 and shape[::-1] == wanted:
        return (1, 0)
    raise fail("E0851", f"{name}.{place.path} has the shape {shape}, the leaf {wanted}", node=name)


def _absent(name: str, module: nn.Module, spec: TensorSpec, place: Place) -> EsperError:
    own = [n for n, _ in (*module.named_parameters(), *module.named_buffers())]
    near = get_close_matches(place.path, own, 3, 0.1) or own[:3]
    return fail(
        "E0851",
        f"{name} has no tensor {place.path} for the leaf {spec.name}",
        node=name,
        hint=f"Fit(id, names={{{spec.name!r}: ...}}); the module has {', '.join(near) or 'none'}",
    )


def _check_updates(name: str, module: nn.Module, made: Seat) -> None:
    buffers = dict(module.named_buffers())
    count = len(made.out_dims)
    wrong = [n for n, at in made.updates.items() if n not in buffers or not 0 < at < count]
    if wrong:
        raise fail("E0851", f"{name}: no buffer and output for the updates of {', '.join(wrong)}", node=name)
    if made.updates and sorted(made.updates.values()) != list(range(count - len(made.updates), count)):
        raise fail("E0851", f"{name}: what updates buffers must be the block's last outputs", node=name)


def _check_unused(name: str, module: nn.Module, made: Seat) -> None:
    """A parameter that the artifact does not read would be trained by nobody."""
    used = {p.path for p in made.places if isinstance(p, Place)}
    wrapped = {path for path, inner in module.named_modules() if is_adapter(inner)}
    for path, _ in module.named_parameters(remove_duplicate=False):
        inside = any(path.startswith(f"{w}.") if w else True for w in wrapped)
        if path not in used and not inside:
            raise fail("E0851", f"{name}.{path} is read by no leaf of {made.block.artifact_id}", node=name)


# -- the trial


def _tried(name: str, module: nn.Module, made: Seat) -> None:
    """Compare on random tensors; square weights whose orientation the shapes do not tell are tried both ways.
    E0852 when no way agrees."""
    square = [i for i, p in enumerate(made.places) if isinstance(p, Place) and _square(module, p)]
    first, error, limit = made.places, 0.0, 0.0
    for ways in [(), tuple(square)] if square else [()]:
        made.places = tuple(_turned(p) if i in ways else p for i, p in enumerate(first))
        error, limit = _trial(name, module, made, 0)
        if error <= limit:
            made.folds = made.folds and _folds(name, module, made)
            return
    raise fail(
        "E0852",
        f"{name}: {made.block.artifact_id} gives other results than the module (relative error {error:.2g}, "
        f"at most {limit:.2g})",
        node=name,
        hint="check the names of the leaves and the blueprint's mathematics",
    )


def _square(module: nn.Module, place: Place) -> bool:
    value = place.of(module)
    return value.dim() == 2 and value.shape[0] == value.shape[1]


def _turned(place: Place | Tensor) -> Place | Tensor:
    return place if isinstance(place, Tensor) else Place(place.owners, place.name, (1, 0))


def _folds(name: str, module: nn.Module, made: Seat) -> bool:
    """Whether further leading axes may be folded into the first: rows must not meet each other."""
    if not any(made.leads) or made.channels_last:
        return False
    try:
        error, limit = _trial(name, module, made, 1)
    except EsperError:
        return False
    return error <= limit


class _Trial(nn.Module):
    """`inner` by its own forward, or by the seat."""

    def __init__(self, inner: nn.Module, seat: Seat, ours: bool) -> None:
        super().__init__()
        self.inner, self.__dict__["call"] = inner, (seat if ours else None)
        self.original = type(inner)

    def forward(self, *inputs: Tensor) -> Any:
        call = self.__dict__["call"]
        return self.original.forward(self.inner, *inputs) if call is None else call.run(self.inner, inputs)


def _trial(name: str, module: nn.Module, made: Seat, extra: int) -> tuple[float, float]:
    """(largest relative L2 error over the outputs and updated buffers, what is allowed); the module's own
    tensors and torch's generator are not touched."""
    generator = torch.Generator().manual_seed(20)
    interface = made.block.program.interface
    inputs = given(interface)
    dims = {d.name: _small(d) for d in interface.dims}
    device = made.block.program.device
    tensors = [
        _random(s, dims, generator, device, extra and lead)
        for s, lead in zip(inputs, made.leads, strict=True)
    ]
    if made.channels_last:
        tensors = [t.permute(NCHW) if t.dim() == 4 else t for t in tensors]
    named = (*module.named_parameters(), *module.named_buffers())
    values = {f"inner.{n}": _like(t.detach(), generator) for n, t in named}
    was = module.training
    try:
        module.train(made.mode != "eval") if made.mode != "always" else None
        wanted, kept = _outcome(name, _Trial(module, made, False), values, tensors, made)
        got, mine = _outcome(name, _Trial(module, made, True), values, tensors, made)
    finally:
        module.train(was)
    pairs = list(zip((*wanted, *kept), (*got, *mine), strict=True))
    limit = max(TOLERANCE.get(w.dtype, 1e-3) for w, _ in pairs)
    return max(_error(w, g) for w, g in pairs), limit


def _outcome(
    name: str, trial: _Trial, values: Mapping[str, Tensor], inputs: Sequence[Tensor], made: Seat
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs, and the updated buffers."""
    own = {n: v.clone() for n, v in values.items()}
    try:
        with torch.no_grad():
            found = functional_call(trial, own, tuple(inputs))
    except EsperError:
        raise
    except Exception as error:
        raise fail(
            "E0851",
            f"{name} cannot be tried with the block's inputs: {type(error).__name__}: {str(error)[:200]}",
            node=name,
            hint="swap(..., check=False) if you are sure",
        ) from error
    outputs = found if isinstance(found, tuple) else (found,)
    return outputs, tuple(own[f"inner.{n}"] for n in made.updates)


def _small(dim: DimSource) -> int:
    """A small size that is not 1, so that broadcasting hides nothing."""
    step = dim.multiple_of
    least = -(-max(dim.min, 3) // step) * step
    return least if least <= dim.max else dim.max // step * step


def _random(
    spec: TensorSpec, dims: Mapping[str, int], generator: torch.Generator, device: torch.device, extra: int
) -> Tensor:
    shape, dtype = [*[2] * extra, *[evaluate(s, dims) for s in spec.shape]], getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randn(shape, generator=generator).to(device, dtype)


def _like(value: Tensor, generator: torch.Generator) -> Tensor:
    """Of the same kind: matrices scaled so that sums stay near 1, vectors positive (scales, variances)."""
    if not value.is_floating_point():
        return value.clone()
    drawn = torch.randn(value.shape, generator=generator)
    if value.dim() < 2:
        made = 1.0 + 0.5 * drawn.clamp(-1.5, 1.5)
    else:
        made = drawn / max(1.0, value[0].numel()) ** 0.5
    out = torch.empty_like(value)
    return out.copy_(made)


def _error(wanted: Tensor, got: Tensor) -> float:
    """Infinite for other shapes or dtypes."""
    if wanted.shape != got.shape or wanted.dtype is not got.dtype:
        return float("inf")
    a, b = wanted.double(), got.double()
    scale = float(a.norm())
    return float((a - b).norm()) / (scale or 1.0)
