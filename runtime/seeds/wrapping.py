"""`runtime.wrap`, `attach`, `unwrap`: slots in front of a model's layers, and back."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from library.store import Library
from runtime.seeds.errors import fail
from runtime.seeds.growth import Growth, growth_of
from runtime.seeds.layer import Site
from runtime.seeds.lifecycle import Limits
from runtime.seeds.modules import GRAFTS, grown_class

Sites = str | type[nn.Module] | Sequence[str | type[nn.Module]]


def wrap(
    model: nn.Module,
    sites: Sites,
    *,
    library: Library | Path | str | None = None,
    seeds_per_layer: int = 1,
    limits: Limits | None = None,
    run_dir: Path | str | None = None,
    allow_unvalidated: bool = False,
    group: Any = None,
) -> nn.Module:
    """Give layers of a model slots for seeds, in place; the same model is returned.

    `sites`: a pattern of dotted module names (`*` and `?` within a part), a module class, or several. The
    layer's result (its first tensor) is what a seed sees and changes. `seeds_per_layer`: into how many chunks
    the features (last axis; channels of images) are split, each with a slot of its own. `limits`: thresholds
    and defaults. `run_dir`: where journal and tombstones are kept; without it they are in memory. `group`:
    the process group of data-parallel ranks.

    Nothing of the host changes: module names, parameters, keys of the state dict and, while no seed is
    grafted, results to the bit. Errors: E1001 no module matches (with the nearest names), E1002 wrapped
    already, E1015 chunks; the model is as it was then.
    """
    if "_esper_growth" in model.__dict__:
        raise fail("E1002", "the model is wrapped already", hint="runtime.unwrap(model) first")
    if seeds_per_layer < 1:
        raise fail("E1015", f"seeds_per_layer={seeds_per_layer}", hint="1 or more")
    chosen = matching(model, sites)
    taken = [name for name, module in chosen if "_esper_site" in module.__dict__]
    if taken:
        raise fail("E1002", f"{taken[0]} has slots of another model", node=taken[0])
    for name, module in chosen:
        width = _features(module)
        if width is not None and seeds_per_layer > width:
            raise fail("E1015", f"{name} has {width} features, not {seeds_per_layer} chunks", node=name)
    settings, owner = limits or Limits(), uuid.uuid4().hex[:12]
    made = {
        name: Site(name, module, seeds_per_layer, f"{owner}:{name}", settings.trust_radius)
        for name, module in chosen
    }
    growth = Growth(model, made, settings, library=library, run_dir=run_dir, group=group,
                    allow_unvalidated=allow_unvalidated)  # fmt: skip
    for name, module in chosen:
        module.__dict__["_esper_site"] = made[name]
        module.__class__ = grown_class(type(module))
        module.add_module(GRAFTS, made[name].chain)
        if any(isinstance(m, nn.TransformerEncoderLayer) for m in _above(model, name)):
            module.register_forward_pre_hook(_called)
    model.__dict__["_esper_growth"] = growth
    return model


def attach(model: nn.Module, optimizer: Optimizer, *, scheduler: Any = None, scaler: Any = None) -> Growth:
    """Tell a wrapped model which optimizer takes the parameters of its seeds, with which schedulers (one, or
    several) and which gradient scaler. The optimizer's steps are the clock of all ramps. Errors of
    `Growth.attach`."""
    growth = growth_of(model)
    growth.attach(optimizer, scheduler, scaler)
    return growth


def unwrap(model: nn.Module) -> nn.Module:
    """Take the slots away again, in place. Live seeds are dropped; E1002 when grafts were committed, which
    are part of the host (`save_model` keeps them)."""
    growth = growth_of(model)
    grown = [name for name, site in growth.sites.items() if len(site.chain)]
    if grown:
        raise fail("E1002", f"{grown[0]} has committed grafts", node=grown[0], hint="runtime.save_model")
    for slot in growth.slots:
        slot.deaf()
        if growth.surgeon is not None:
            growth.surgeon.remove(slot.id)
    growth.detach()
    for name, site in growth.sites.items():
        module = model.get_submodule(name)
        if type(module) is not grown_class(site.original):
            raise fail("E1002", f"{name} was wrapped by {type(module).__name__} since", node=name)
    for name, site in growth.sites.items():
        module = model.get_submodule(name)
        module.__class__ = site.original
        del module.__dict__["_esper_site"], module._modules[GRAFTS]
        for key in [k for k, hook in module._forward_pre_hooks.items() if hook is _called]:
            del module._forward_pre_hooks[key]
    del model.__dict__["_esper_growth"]
    return model


def _called(module: nn.Module, args: Any) -> None:
    """A hook that does nothing. In eval mode torch's encoder layers compute from the weights of their parts
    without calling them, unless one of them has a hook; a graft would be left out then."""


def _above(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that a module is in."""
    parts = name.split(".")[:-1]
    return [model.get_submodule(".".join(parts[:many])) for many in range(len(parts) + 1)]


def matching(model: nn.Module, sites: Sites) -> list[tuple[str, nn.Module]]:
    """Modules that the patterns mean, each once, in the order of the model. E1001 for one without any."""
    wanted = [sites] if isinstance(sites, (str, type)) else list(sites)
    named = [(n, m) for n, m in model.named_modules() if n]
    found: dict[str, nn.Module] = {}
    for key in wanted:
        hits = [(n, m) for n, m in named if _means(key, n, m)]
        if not hits:
            raise _nothing(key, named)
        found.update(hits)
    return [(n, m) for n, m in named if n in found]


def _means(key: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if not isinstance(key, str):
        return type(module) is key
    parts, wanted = name.split("."), key.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _nothing(key: str | type[nn.Module], named: Sequence[tuple[str, nn.Module]]) -> Exception:
    shown = key if isinstance(key, str) else key.__name__
    names = [n for n, _ in named] if isinstance(key, str) else [type(m).__name__ for _, m in named]
    near = get_close_matches(shown, dict.fromkeys(names), 3, 0.3) or list(dict.fromkeys(names))[:3]
    return fail("E1001", f"no module matches {shown!r}", node=shown, hint=f"nearest: {', '.join(near)}")


def _features(module: nn.Module) -> int | None:
    for name in ("out_features", "out_channels", "num_features", "embed_dim", "embedding_dim"):
        found = getattr(module, name, None)
        if isinstance(found, int):
            return found
    return None
