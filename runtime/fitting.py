"""Whether and how an artifact fits a module: leaves to tensors by name and shape, then a trial
(`runtime.trial`)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from esper_ir.diagnostics import EsperError
from library.launch import TensorSpec
from library.manifest import blueprint_document
from runtime import parameters, precision, trial
from runtime.adapters import Unfoldable, is_adapter
from runtime.binding import Block
from runtime.errors import fail
from runtime.seat import NHWC, Options, Place, Seat


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
        raise fail(
            "E0851",
            f"{name} has a forward of its own (hooked or compiled)",
            node=name,
            hint="swap first, then hook or compile: the swapped module can be compiled",
        )
    program = block.program
    leaves = [s for s in program.interface.inputs if s.kind != "input"]
    strange = sorted(set(wish.names) - {s.name for s in leaves})
    if strange:
        known = ", ".join(s.name for s in leaves) or "none"
        raise fail(
            "E0851",
            f"{block.artifact_id} has no leaves {', '.join(strange)}",
            node=name,
            hint=f"names={{leaf: tensor of the module}}; its leaves are {known}",
        )
    text = blueprint_document(block._handle.entry.container.manifest)
    places = [_place(name, module, spec, wish, text, program.device) for spec in leaves]
    params = tuple(p.name for p in _parameters(module))
    made = Seat(name, block, type(module), places, params, options)
    declared = {wish.names.get(name, name): at for name, at in program.interface.updates}
    made.channels_last, made.updates = wish.channels_last, {**declared, **wish.updates}
    _check_updates(name, module, made)
    _check_unused(name, module, made)
    if options.check and not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        made.grain = _grain(text, program.device)
        trial.hold(name, module, made, wish.mode, _dropped(text))
        block.uncount()  # the trial is not use
    else:
        _untried(made, wish.mode)
    made.settle()
    return made


def _untried(made: Seat, mode: str) -> None:
    """What draws or updates buffers is a step of training: without a trial the other mode is the module's."""
    made.mode = mode if mode != "auto" else "train" if made.draws or made.updates else "always"
    if mode == "auto" and made.mode == "train":
        made.left = {"eval": "not tried, and the artifact draws numbers or updates buffers"}


def _dropped(text: Any) -> list[float]:
    """The share of every dropout of a blueprint."""
    return [float(n.get("attrs", {}).get("p", 0.5)) for n in text["nodes"] if n["op"] == "dropout"]


# Of what a product does with float32 operands, and of dtypes inside a blueprint.
GRAINS = {"tf32": 2.0**-10, "bf16x3": 2.0**-16, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def _grain(text: Any, device: torch.device) -> float:
    """The coarsest rounding that a blueprint names, or that torch's flags give the module on a card."""
    attrs = [n.get("attrs", {}) for n in text["nodes"]]
    named = [str(a.get(key)) for a in attrs for key in ("precision", "dtype")]
    if device.type == "cuda":
        convolves = any(n["op"].startswith("conv") for n in text["nodes"])
        flags = ("matmul", "cudnn") if convolves else ("matmul",)
        named += ["tf32" for flag in flags if precision.allows_tf32(flag)]
    return max((GRAINS.get(name, 0.0) for name in named), default=0.0)


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
    if not isinstance(value, Tensor):
        raise _absent(name, module, spec, place, f": it is {_shown(value)}")
    if type(value).__name__ == "DTensor":
        raise fail("E0851", f"{name}.{place.path} is a DTensor", node=name, hint="swap before sharding")
    if value.dtype is not getattr(torch, spec.dtype):
        raise fail(
            "E0851",
            f"{name}.{place.path} is {value.dtype}, the leaf {spec.name} {spec.dtype}",
            node=name,
            hint=f"convert the module, .to(torch.{spec.dtype}), or compile the blueprint for {value.dtype}",
        )
    return Place(place.owners, last, _order(name, place, value, spec, wish))


def _order(name: str, place: Place, value: Tensor, spec: TensorSpec, wish: Wish) -> tuple[int, ...]:
    shape, wanted = list(value.shape), parameters.static_shape(spec)
    if wish.channels_last and len(shape) == 4 and [shape[i] for i in NHWC] == wanted:
        return NHWC
    if shape == wanted:
        return ()
    if len(shape) == 2 and shape[::-1] == wanted:
        return (1, 0)
    raise fail(
        "E0851",
        f"{name}.{place.path} has the shape {shape}, the leaf {spec.name} {wanted}",
        node=name,
        hint="compile the blueprint for the module's sizes; Fit(id, names=...) if another tensor is meant",
    )


def _shown(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _absent(name: str, module: nn.Module, spec: TensorSpec, place: Place, told: str = "") -> EsperError:
    own = [n for n, _ in (*module.named_parameters(), *module.named_buffers())]
    near = get_close_matches(place.path, own, 3, 0.1) or own[:3]
    return fail(
        "E0851",
        f"{name} ({type(module).__name__}) has no tensor {place.path} for the leaf {spec.name}{told}",
        node=name,
        hint=f"Fit(id, names={{{spec.name!r}: ...}}); the module has {', '.join(near) or 'none'}",
    )


def _check_updates(name: str, module: nn.Module, made: Seat) -> None:
    buffers = dict(module.named_buffers())
    count = len(made.out_dims)
    wrong = [n for n, at in made.updates.items() if n not in buffers or not 0 < at < count]
    if wrong:
        raise fail(
            "E0851",
            f"{name}: no buffer and output for the updates of {', '.join(wrong)}",
            node=name,
            hint="updates={buffer of the module: number of the block's output}, outputs counted from 0",
        )
    if made.updates and sorted(made.updates.values()) != list(range(count - len(made.updates), count)):
        raise fail(
            "E0851",
            f"{name}: what updates buffers must be the block's last outputs",
            node=name,
            hint="put them last in the blueprint, each once",
        )


def _check_unused(name: str, module: nn.Module, made: Seat) -> None:
    """A parameter that the artifact does not read would be trained by nobody."""
    used = {p.path for p in made.places if isinstance(p, Place)}
    wrapped = {path for path, inner in module.named_modules() if is_adapter(inner)}
    for path, _ in module.named_parameters(remove_duplicate=False):
        inside = any(path.startswith(f"{w}.") if w else True for w in wrapped)
        if path not in used and not inside:
            raise fail(
                "E0851",
                f"{name}.{path} is read by no leaf of {made.block.artifact_id}",
                node=name,
                hint="compile a blueprint that reads it, or name its leaf: Fit(id, names={leaf: name})",
            )
