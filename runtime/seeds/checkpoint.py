"""Checkpoints on disk: whole or absent, a rolling window of them, and a training run made the same again.

    ckpt-00000120/state.pt        tensors and plain values, read with weights_only
    ckpt-00000120/manifest.json   step, epoch, digests, the model's fingerprint

A checkpoint is written beside and renamed into place when every byte is on the disk, so a kill at any moment
loses that save at most. Restoring reads and checks everything before it changes anything.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper_ir.diagnostics import EsperError
from runtime.seeds import resuming
from runtime.seeds.errors import fail
from runtime.seeds.growth import Growth
from runtime.seeds.modules import GRAFTS
from runtime.seeds.ranks import sharded

log = logging.getLogger("esper.growth")
SCHEMA = "esper-checkpoint/1"
STATE, MANIFEST = "state.pt", "manifest.json"


def reached(phase: str) -> None:
    """Called between the phases of a save: a seam for tests that stop there."""


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of names, shapes and dtypes of the host's state dict, grafts left out."""
    listed = [[n, list(t.shape), str(t.dtype)] for n, t in sorted(model.state_dict().items()) if not _ours(n)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _ours(name: str) -> bool:
    return GRAFTS in name.split(".")


# -- random numbers
# -------------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Of Python, numpy (where it is loaded), the processor and every card."""
    version, internal, gauss = random.getstate()
    found: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """The same again."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


# -- everything of a run
# -------------------------------------------------------------------------------------------------------


def names_of(growth: Growth) -> dict[str, nn.Parameter]:
    """Every parameter that an optimizer may hold: the host's with its grafts, and those of live seeds."""
    found = dict(growth.model.named_parameters())
    for slot in growth.slots if growth.busy() else ():
        if slot.seed is not None:
            found |= {f"{slot.id}.{name}": p for name, p in slot.seed.named().items()}
    return found


def capture(growth: Growth, **more: Any) -> dict[str, Any]:
    """Model, growth, optimizer by name, schedulers, scaler, random numbers of all ranks; and `more` (plain
    values). E1017 for a model whose parameters are sharded."""
    model, surgeon = growth.model, growth.surgeon
    _refuse_shards(model)
    parameters = names_of(growth)
    kept = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor) and not _ours(n)}
    host = {n: t.detach().clone() for n, t in kept.items()}
    hidden = {n: b.detach().clone() for n, b in model.named_buffers() if n not in host and not _ours(n)}
    local = {"random": random_state(), "columns": {n: s.state.state_dict() for n, s in growth.sites.items()}}
    return {
        "schema": SCHEMA,
        "fingerprint": fingerprint(model),
        "growth": growth.state_dict(),
        "host": host,
        "hidden": hidden,
        "learning": sorted(n for n, p in model.named_parameters() if p.requires_grad and not _ours(n)),
        "modes": sorted(n for n, m in model.named_modules() if m.training and not _ours(n)),
        "optimizer": surgeon.state_dict(parameters) if surgeon is not None else None,
        "scaler": growth.scaler.state_dict() if growth.scaler is not None else None,
        "ranks": growth.ranks.gather(local),
        **more,
    }


def put_back(growth: Growth, state: Mapping[str, Any]) -> None:
    """Make a run what `capture` found. Errors: E1006 for another model, wrapping, optimizer or number of
    ranks, E1017, and those of loading artifacts; nothing is changed then."""
    model = growth.model
    _refuse_shards(model)
    _check(growth, state)
    resuming.restore(growth, state["growth"])
    resuming.fill_host(model, {**state["host"], **state["hidden"]})
    learning, modes = set(state["learning"]), set(state["modes"])
    for name, parameter in model.named_parameters():
        if not _ours(name):
            parameter.requires_grad_(name in learning)
    for name, module in model.named_modules():
        if not _ours(name):
            module.training = name in modes
    for site in growth.sites.values():
        site.chain.train(model.training)
        for slot in site.slots:
            if slot.seed is not None:
                slot.seed.train(model.training)
    if growth.surgeon is not None and state["optimizer"] is not None:
        growth.surgeon.load_state_dict(state["optimizer"], names_of(growth))
    if growth.scaler is not None and state["scaler"] is not None:
        growth.scaler.load_state_dict(state["scaler"])
    local = state["ranks"][growth.ranks.mine]
    for name, columns in local["columns"].items():
        growth.sites[name].state.load_state_dict(columns)
    growth.reselect()
    set_random_state(local["random"])


def _refuse_shards(model: nn.Module) -> None:
    spread = next((n for n, p in model.named_parameters() if sharded(p)), None)
    if spread is not None:
        raise fail("E1017", f"{spread} is spread over ranks", node=spread,
                   hint="torch.distributed.checkpoint; runtime.save_model for the grown model")  # fmt: skip


def _check(growth: Growth, state: Mapping[str, Any]) -> None:
    if state.get("schema") != SCHEMA:
        raise fail("E1006", f"the checkpoint is of {state.get('schema')!r}, not {SCHEMA!r}")
    model = growth.model
    if state["fingerprint"] != fingerprint(model):
        here = {n: list(t.shape) for n, t in model.state_dict().items() if not _ours(n)}
        there = {n: list(t.shape) for n, t in state["host"].items()}
        differ = [n for n in {**there, **here} if here.get(n) != there.get(n)]
        first = differ[0] if differ else "a dtype"
        raise fail("E1006", f"the checkpoint is of another model: {first} differs", node=first,
                   hint=f"there {there.get(first)}, here {here.get(first)}")  # fmt: skip
    if len(state["ranks"]) != growth.ranks.many:
        raise fail(
            "E1006", f"the checkpoint is of {len(state['ranks'])} ranks, this run has {growth.ranks.many}"
        )
    kind = (state["optimizer"] or {}).get("optimizer", {}).get("kind")
    own = type(growth.surgeon.optimizer).__name__ if growth.surgeon is not None else None
    if kind is not None and own is not None and kind != own:
        raise fail("E1006", f"the checkpoint is of {kind}, this run uses {own}")


# -- files
# -------------------------------------------------------------------------------------------------------


def encoded(value: Any) -> Any:
    """Plain containers for what torch.load(weights_only=True) takes; E1007 names what cannot be kept."""
    if isinstance(value, Counter):
        return {"__counter__": [[k, v] for k, v in value.items()]}
    if isinstance(value, Mapping):
        return {k: encoded(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(encoded(v) for v in value)
    if isinstance(value, (list, set, frozenset)):
        return [encoded(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.Tensor)):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    raise fail("E1007", f"a {type(value).__name__} cannot be kept in a checkpoint", node=repr(value)[:60])


def decoded(value: Any) -> Any:
    """The other way."""
    if isinstance(value, dict):
        if set(value) == {"__counter__"}:
            return Counter(dict(value["__counter__"]))
        return {k: decoded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(decoded(v) for v in value)
    return value


class Shelf:
    """The checkpoints of a run in a folder, the newest `keep` of them."""

    def __init__(self, folder: Path | str, keep: int = 5) -> None:
        self.folder, self.keep = Path(folder), keep

    def save(self, state: Mapping[str, Any], *, step: int, epoch: int) -> Path:
        """Write one, durable when this returns; then drop what is too old, and what a kill left behind."""
        buffer = io.BytesIO()
        torch.save(encoded(state), buffer)
        data = buffer.getvalue()
        manifest = {
            "schema": SCHEMA, "step": step, "epoch": epoch, "fingerprint": state["fingerprint"],
            "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "torch": torch.__version__,
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        reached("begin")
        fresh = self.folder / f".writing-{os.getpid()}-{step:08d}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        _write(fresh / STATE, data)
        reached("state")
        _write(fresh / MANIFEST, (json.dumps(manifest, sort_keys=True) + "\n").encode())
        _sync(fresh)
        reached("manifest")
        place = self.folder / f"ckpt-{step:08d}"
        if place.exists():
            aside = self.folder / f".old-{os.getpid()}-{step:08d}"
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(place, aside)
            reached("aside")
        os.replace(fresh, place)
        _sync(self.folder)
        reached("renamed")
        self._tidy()
        reached("tidied")
        return place

    def _tidy(self) -> None:
        for old in self.all()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        for left in [*self.folder.glob(".writing-*"), *self.folder.glob(".old-*")]:
            shutil.rmtree(left, ignore_errors=True)

    def all(self) -> list[Path]:
        """Those that are whole, oldest first (by name: their manifests are looked at when read)."""
        return sorted(p for p in self.folder.glob("ckpt-*") if (p / MANIFEST).exists())

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest that is good, with its state; damaged ones are passed over."""
        for place in reversed(self.all()):
            try:
                return place, self.read(place)
            except EsperError as error:
                log.warning("passed over: %s", error.message)
        return None

    def read(self, place: Path) -> dict[str, Any]:
        """One state, its digest checked. E1007 for what is not what was written."""
        try:
            manifest = json.loads((place / MANIFEST).read_bytes())
            data = (place / STATE).read_bytes()
        except (OSError, ValueError, RecursionError) as error:
            raise fail("E1007", f"{place.name}: {error}", node=str(place)) from None
        wanted = manifest.get("sha256") if isinstance(manifest, dict) else None
        if hashlib.sha256(data).hexdigest() != wanted:
            raise fail("E1007", f"{place.name}: {STATE} is not what was written", node=str(place))
        return decoded(torch.load(io.BytesIO(data), weights_only=True))


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
