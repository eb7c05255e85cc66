"""The public functions of the runtime."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from esper_ir.diagnostics import EsperError
from library.manifest import blueprint_document
from library.paths import library_home
from library.store import Library
from runtime import binding, loader, node, system
from runtime.binding import Block
from runtime.cache import CacheInfo
from runtime.dispatch import native_available
from runtime.eager import module_of
from runtime.errors import fail


def load(
    name: str,
    *,
    device: torch.device | str | None = None,
    library: Library | Path | str | None = None,
    functional: bool = False,
    allow_unvalidated: bool = False,
    fallback: str = "error",
    dispatch: str = "auto",
    debug: bool = False,
) -> Block:
    """The block that `name` means, ready to call.

    `name`: an artifact id or unique prefix of one, or a blueprint id (8 hexadecimal digits or more) for
    its best validated artifact on this machine. `device`: default the current card or the cpu, by the
    artifact; "meta" makes parameters without memory. `functional`: no parameters, the result is called
    with every leaf in blueprint order. `fallback="eager"`: sizes that no plan serves are answered by the
    eager twin, counted and logged once. `dispatch="op"`: always through the operators `esper::fwd` and
    `esper::bwd`. `debug`: synchronise and look for NaN after every kernel.

    Errors: E0721 not found, E0722 ambiguous, E0730 to E0734 integrity, E0740 to E0746 not validated or not
    trusted, E0801 no card, E0802 other hardware, E0806 unvalidated under ESPER_STRICT, E0807 nothing suits.
    """
    return binding.build(
        name,
        device=device,
        library=library,
        functional=functional,
        allow_unvalidated=allow_unvalidated,
        fallback=fallback,
        dispatch=dispatch,
        debug=debug,
    )


def twin(
    name: str, *, library: Library | Path | str | None = None, allow_unvalidated: bool = False
) -> nn.Module:
    """The eager twin of an artifact: a module of plain torch with the same parameter names, any number of
    derivatives."""
    entry = loader.load_entry(name, library=library, allow_unvalidated=allow_unvalidated)
    return module_of(blueprint_document(entry.container.manifest), entry.program.device)


def same_on_all_ranks(block: Block, group: Any = None) -> str:
    """The plan digest that all ranks of a process group share; E0840 names the ranks that differ. A
    collective call."""
    mine = block.plan_digest()
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    if len(set(found)) > 1:
        listed = ", ".join(f"rank {rank}: {digest[:12]}" for rank, digest in enumerate(found))
        raise fail(
            "E0840",
            f"{block.artifact_id}: the plans differ between ranks ({listed})",
            node=block.artifact_id,
            hint="install the same library versions everywhere and load by the full artifact id",
        )
    return mine


def cache_info() -> CacheInfo:
    """Counters of the process's cache of loaded artifacts."""
    return loader.cache_info()


def doctor(name: str | None = None, *, library: Library | Path | str | None = None) -> dict[str, Any]:
    """Machine, driver, library and trust as data; with a blueprint or artifact id also what would be
    chosen and why the others are not. Raises nothing: what is wrong stands in the answer."""
    machines = {kind: _facts(platform) for kind, platform in loader.platforms_here().items()}
    found: dict[str, Any] = {
        "schema": "esper-doctor/1",
        "torch": torch.__version__,
        "machines": machines,
        "cuda": torch.cuda.is_available(),
        "native": {"built": system.native_built(), "used": native_available(), "node": node.state()},
        "strict": loader.strict(),
        "library": {"path": str(library_home(library if not isinstance(library, Library) else library.home))},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("ESPER_")},
        "problems": [],
    }
    try:
        opened = loader.open_library(library)
        found["library"] |= {"artifacts": len(opened.artifacts())}
        if name is not None:
            found["choice"] = _choice(opened, name)
    except EsperError as error:
        found["problems"].append(error.to_json())
    return found


def _facts(platform: Any) -> dict[str, Any]:
    return {**platform.__dict__, "externs": dict(platform.externs)}


def _choice(opened: Library, name: str) -> dict[str, Any]:
    if "-" in name:
        blueprint = opened.resolve(name).blueprint
    else:
        blueprint = name
    ranking, full, _ = loader.survey(opened, blueprint, None)
    return {
        "blueprint": full,
        "chosen": [row.id for row in ranking.chosen],
        "refused": {k: {"code": r.code, "reason": r.reason} for k, r in sorted(ranking.refused.items())},
    }
