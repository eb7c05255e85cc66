"""A grown model as files: `runtime.save_model` and `runtime.load_model`.

    out/weights.pt     the state dict, grafts included; torch.load(weights_only=True)
    out/lineage.json   which artifact is grafted where, over which features, and the journal that led to it

A loaded model has the grafts and no slots: its layers run host and grafts, and nothing else is behind them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.store import Library
from runtime.seeds.checkpoint import fingerprint
from runtime.seeds.commands import GENESIS, Graft, check
from runtime.seeds.errors import fail
from runtime.seeds.growth import Growth
from runtime.seeds.lifecycle import Lifecycle
from runtime.seeds.modules import GRAFTS, Committed, composed_class
from runtime.seeds.ranks import whole
from runtime.seeds.resuming import fill
from runtime.seeds.seed import Spec, make

SCHEMA = "esper-lineage/1"
WEIGHTS, LINEAGE = "weights.pt", "lineage.json"


def save_model(model: nn.Module, folder: Path | str) -> Path:
    """Write weights and lineage of a wrapped (or loaded) model. Seeds that are not committed are left out and
    named in the lineage. A kill leaves the files that were there, or weights that the lineage does not know
    (E1007 on loading), never a mixture that loads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    growth: Growth | None = model.__dict__.get("_esper_growth")
    grafts = [row for name, module in model.named_modules() for row in _rows(name, module)]
    given = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    state = {n: whole(t.detach()).to("cpu") for n, t in given.items()}
    document = {
        "schema": SCHEMA,
        "host": fingerprint(model),
        "grafts": grafts,
        "live": [s.id for s in growth.busy() if s.seed is not None] if growth is not None else [],
        "journal": growth.journal.lines if growth is not None else model.__dict__.get("_esper_journal", []),
    }
    fresh = folder / f".{WEIGHTS}.tmp"
    torch.save(state, fresh)
    document["weights_sha256"] = _digest(fresh)
    text = folder / f".{LINEAGE}.tmp"
    text.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(fresh, folder / WEIGHTS)
    os.replace(text, folder / LINEAGE)
    return folder


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _rows(name: str, module: nn.Module) -> list[dict[str, Any]]:
    chain = module._modules.get(GRAFTS)
    found = []
    for place, graft in enumerate(chain if isinstance(chain, nn.ModuleList) else ()):
        assert isinstance(graft, Committed)
        found.append(
            {
                "layer": name,
                "place": place,
                "artifact": graft.seed.artifact_id,
                "digest": graft.seed.digest,
                "graft": asdict(graft.seed.graft),
                "features": [graft.first, graft.end],
                "axis": graft.axis,
                "alpha": graft.alpha,
                "shape": list(graft.shape),
                "dtype": graft.dtype,
            }
        )
    return found


def load_model(
    model: nn.Module,
    folder: Path | str,
    *,
    library: Library | Path | str | None = None,
    device: torch.device | str | None = None,
    allow_unvalidated: bool = False,
) -> nn.Module:
    """Make a fresh host what was saved: its grafts from the library by artifact id, then all weights. In
    place; the same model is returned, without slots (`wrap` gives it new ones).

    Errors: E1006 another model, or an artifact of other bytes, E1007 damaged files, E1011 a journal that was
    changed, those of `runtime.load`; the model is as it was then.
    """
    folder = Path(folder)
    document = _lineage(folder)
    if document["host"] != fingerprint(model):
        raise fail("E1006", f"{folder} is of another model", node=str(folder))
    weights: Mapping[str, Tensor] = torch.load(folder / WEIGHTS, weights_only=True)
    place = torch.device(device) if device is not None else next((p.device for p in model.parameters()), None)
    chains = _chains(document["grafts"], library, place or torch.device("cpu"), allow_unvalidated)
    if any(GRAFTS in m._modules for m in model.modules()):
        raise fail("E1002", "the model has grafts or slots already")
    own = set(model.state_dict()) | {n for n in weights if GRAFTS in n.split(".")}
    if own != set(weights):
        raise fail("E1006", f"{sorted(own ^ set(weights))[0]} is not in both", node=str(folder))
    for name, chain in chains.items():
        module = model.get_submodule(name)
        module.__class__ = composed_class(type(module))
        module.add_module(GRAFTS, nn.ModuleList(chain))
    fill(model, weights)
    model.__dict__["_esper_journal"] = document["journal"]
    return model


def _lineage(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / LINEAGE).read_bytes())
        digest = _digest(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise fail("E1007", f"{folder}: {error}", node=str(folder)) from None
    if document.get("schema") != SCHEMA:
        raise fail("E1007", f"{folder}: {LINEAGE} is no lineage", node=str(folder))
    if document["weights_sha256"] != digest:
        raise fail("E1007", f"{folder}: {WEIGHTS} is not what was written", node=str(folder))
    check(document["journal"])
    return document


def _chains(
    rows: Iterable[Mapping[str, Any]], library: Any, device: torch.device, unvalidated: bool
) -> dict[str, list[Committed]]:
    found: dict[str, list[Committed]] = {}
    for row in rows:
        first, end = row["features"]
        spec = Spec(tuple(row["shape"]), getattr(torch, row["dtype"]), device)
        seed = make(row["artifact"], library, spec, end - first, Graft(**row["graft"]), 0, unvalidated)
        if seed.digest != row["digest"]:
            raise fail("E1006", f"{row['artifact']} has other bytes than were grafted", node=row["artifact"])
        seed.learn(False)
        found.setdefault(row["layer"], []).append(
            Committed(seed, first, end, row["axis"], row["alpha"], spec)
        )
    return found


def replay(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a journal says the model is: state by slot, grafts by layer, head of the chain. E1011 for a
    journal that was changed."""
    check(lines)
    states: dict[str, str] = {}
    grafts: dict[str, list[str]] = {}
    for line in lines:
        if line["kind"] in ("command", "rollback"):
            states[line["slot"]] = line["to"]
        if line["kind"] == "command" and line["to"] == Lifecycle.FOSSILIZED.name:
            grafts.setdefault(line["slot"].rpartition("/")[0], []).append(line["artifact"])
    return {"states": states, "grafts": grafts, "head": lines[-1]["hash"] if lines else GENESIS}
