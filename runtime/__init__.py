"""Artifact id -> something a training script calls. Neither compiler nor Triton; bytes verified before
they are loaded.

    block = runtime.load("9f2c41d0a7e3-cpu-v3-fast-5b1e07c2")      # an nn.Module
    loss = criterion(block(x), y); loss.backward()
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.api import cache_info as cache_info
    from runtime.api import doctor as doctor
    from runtime.api import load as load
    from runtime.api import same_on_all_ranks as same_on_all_ranks
    from runtime.api import twin as twin
    from runtime.binding import Block as Block
    from runtime.controller import TamiyoController as TamiyoController
    from runtime.loader import UnvalidatedWarning as UnvalidatedWarning
    from runtime.seeds.growth import Growth as Growth
    from runtime.seeds.growth import growth_of as growth_of
    from runtime.seeds.saving import load_model as load_model
    from runtime.seeds.saving import save_model as save_model
    from runtime.seeds.trainer import Trainer as Trainer
    from runtime.seeds.wrapping import attach as attach
    from runtime.seeds.wrapping import unwrap as unwrap
    from runtime.seeds.wrapping import wrap as wrap
    from runtime.swapping import Fit as Fit
    from runtime.swapping import swap as swap
    from runtime.swapping import swapped as swapped

_HOMES = {
    "load": "runtime.api",
    "twin": "runtime.api",
    "doctor": "runtime.api",
    "cache_info": "runtime.api",
    "same_on_all_ranks": "runtime.api",
    "Block": "runtime.binding",
    "UnvalidatedWarning": "runtime.loader",
    "TamiyoController": "runtime.controller",
    "Growth": "runtime.seeds.growth",
    "growth_of": "runtime.seeds.growth",
    "load_model": "runtime.seeds.saving",
    "save_model": "runtime.seeds.saving",
    "Trainer": "runtime.seeds.trainer",
    "attach": "runtime.seeds.wrapping",
    "unwrap": "runtime.seeds.wrapping",
    "wrap": "runtime.seeds.wrapping",
    "Fit": "runtime.swapping",
    "swap": "runtime.swapping",
    "swapped": "runtime.swapping",
}
__all__ = [
    "Block",
    "Fit",
    "Growth",
    "TamiyoController",
    "Trainer",
    "UnvalidatedWarning",
    "attach",
    "cache_info",
    "doctor",
    "growth_of",
    "load",
    "load_model",
    "same_on_all_ranks",
    "save_model",
    "swap",
    "swapped",
    "twin",
    "unwrap",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Loaded when first used: `import runtime` alone costs nothing."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    # Nothing that an import makes is garbage, and looking through all of torch for some takes longer than it.
    collecting = gc.isenabled()
    gc.disable()
    try:
        value = getattr(import_module(home), name)
    finally:
        if collecting:
            gc.enable()
    globals()[name] = value
    return value
