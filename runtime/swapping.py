"""Artifacts in the place of a model's modules: `runtime.swap(model, {"layers.*.mlp": id})`.

A module that is replaced stays the object it was, with its parameters, hooks, name and keys of the state
dict; only its class becomes a subclass whose `forward` runs the artifact on the module's own tensors. So
optimizers, tied and frozen weights, wrappers that shard or adapt weights, and `undo` need nothing done for
them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from library.store import Library
from runtime import fitting
from runtime.binding import build
from runtime.errors import fail
from runtime.seat import Options, Seat, seat_of, swapped_class, unseat

MODES = ("auto", "always", "train", "eval")
log = logging.getLogger("esper.runtime")


@dataclass(frozen=True)
class Fit:
    """How an artifact takes a module's place, where a bare id does not say enough.

    `artifact`: as for `runtime.load`. `names`: leaf of the blueprint -> dotted name of the module's tensor
    (default: the leaf's own name). `channels_last`: images are NCHW outside, dense with the channels last
    inside. `mode`: "train" or "eval" leaves the module's own forward to the other one, "always" to none,
    "auto" to one in which artifact and module differ. `updates`: dotted name of a buffer -> number of the
    block's output that is its next value, written once per training step.
    """

    artifact: str
    names: Mapping[str, str] = field(default_factory=dict)
    channels_last: bool = False
    mode: str = "auto"
    updates: Mapping[str, int] = field(default_factory=dict)


Plan = Mapping[str | type[nn.Module], str | Fit]


def swap(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    undo: bool = False,
    library: Library | Path | str | None = None,
    allow_unvalidated: bool = False,
    fallback: str = "error",
    dispatch: str = "auto",
    check: bool = True,
) -> dict[str, str]:
    """Replace submodules of `model`; {module name: artifact id}. `undo=True` takes every replacement back.

    `plan`: a pattern of dotted names (`*` and `?` within a part) or a module class -> id, blueprint id or
    `Fit`. Weights may have torch's `[out, in]` layout where the blueprint's are `[in, out]`; they are
    transposed on the way in (a copy a call, counted). Inputs with further leading axes are folded into the
    blueprint's first. `check`: each replacement must agree with the module it replaces on random tensors,
    in train and in eval mode (see `runtime.trial`); where it does in one of them only, the module's own
    forward answers in the other, as `swapped(model)` tells. `fallback="eager"`: what the artifact does not
    serve is answered by the module's own forward, counted.

    Either all of the plan is done or nothing. Errors: those of `runtime.load`; E0850 no module matches, E0851
    the artifact does not fit the module, E0852 other results, E0853 replaced already, or wrapped since.
    """
    if undo:
        return {name: _undone(name, module) for name, module in _seated(model)}
    if plan is not None and not isinstance(plan, Mapping):
        hint = "a mapping of patterns or module classes to ids: {'layers.*.mlp': id}"
        raise fail("E0819", f"plan is a {type(plan).__name__}", hint=hint)
    options = Options(fallback, check)
    where: dict[str, Any] = {"library": library, "allow_unvalidated": allow_unvalidated}
    made: list[tuple[str, nn.Module, Seat]] = []
    for key, wanted in (plan or {}).items():
        fit = wanted if isinstance(wanted, Fit) else Fit(wanted)
        if fit.mode not in MODES:
            raise fail("E0819", f"mode={fit.mode!r}", hint=f"one of {', '.join(MODES)}")
        for name, module in _matching(model, key):
            if any(module is other for _, other, _ in made) or seat_of(module) is not None:
                raise fail("E0853", f"{name} is replaced already", node=name, hint="swap(model, undo=True)")
            block = build(fit.artifact, functional=True, dispatch=dispatch, **where)
            made.append((name, module, fitting.seat(name, module, block, fit, options)))
    for _, module, seat in made:
        module.__dict__["_esper_seat"] = seat
        module.__class__ = swapped_class(type(module))
        for mode, why in seat.left.items():
            log.info("%s mode is left to the module: %s", mode, why)
    return {name: seat.block.artifact_id for name, _, seat in made}


def swapped(model: nn.Module) -> dict[str, Any]:
    """The report of every replacement in a model, by module name."""
    return {name: seat.report() for name, seat in ((n, seat_of(m)) for n, m in _seated(model)) if seat}


def _seated(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if seat_of(module) is not None]


def _undone(name: str, module: nn.Module) -> str:
    seat = unseat(module)
    if seat is None:
        raise fail(
            "E0853",
            f"{name} was wrapped by {type(module).__name__} after it was replaced",
            node=name,
            hint="take replacements back before sharding the model",
        )
    return seat.block.artifact_id


def _matching(model: nn.Module, key: str | type[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Modules that a key means, each once. E0850 when there are none."""
    named = list(model.named_modules())
    if not isinstance(key, str | type):
        hint = "a pattern of dotted names such as 'layers.*.mlp', or a class of modules"
        raise fail("E0819", f"the plan has a {type(key).__name__} as a key", hint=hint)
    if isinstance(key, str):
        found = [(n, m) for n, m in named if n and _matches(n, key)]
    else:
        found = [(n, m) for n, m in named if type(m) is key]
    if not found:
        shown = key if isinstance(key, str) else key.__name__
        names = [n for n, _ in named if n] if isinstance(key, str) else [type(m).__name__ for _, m in named]
        near = get_close_matches(shown, dict.fromkeys(names), 3, 0.3) or list(dict.fromkeys(names))[:3]
        raise fail("E0850", f"no module matches {shown!r}", node=shown, hint=f"nearest: {', '.join(near)}")
    return found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
