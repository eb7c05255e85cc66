"""The state of everything that grows, as plain values and tensors; and making a model that state again.

Restoring builds all seeds and grafts first, so that what cannot be loaded is refused with nothing changed.
The host's own tensors, the optimizer and the rest are `runtime.seeds.checkpoint`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from runtime.seeds.commands import Graft, GraftingStrategy
from runtime.seeds.errors import fail
from runtime.seeds.grafting import Reading
from runtime.seeds.layer import Site, Slot
from runtime.seeds.lifecycle import Lifecycle
from runtime.seeds.modules import Committed
from runtime.seeds.seed import Seed, Spec, make
from runtime.seeds.stepping import Late

SCHEMA = "esper-growth/1"
_PLAIN_NOTES = ("reason", "tags", "load_failed", "error", "held_out_loss")
_LATE = ("norm", "drift")


def state_of(growth: Any) -> dict[str, Any]:
    """Plain containers, numbers and tensors (copies)."""
    return {
        "schema": SCHEMA,
        "epoch": growth.epoch,
        "step": growth.step,
        "ticks": growth.ticks,
        "every": growth.every,
        "sites": {name: _site(site) for name, site in growth.sites.items()},
        "slots": {slot.id: _slot(slot) for slot in growth.slots if slot.state or slot.expires},
        "queue": growth.queue.state_dict(),
        "bans": growth.bans.state_dict(),
        "journal": growth.journal.lines[:],
    }


def _site(site: Site) -> dict[str, Any]:
    spec = site.spec
    return {
        "state": site.state.state_dict(),
        "slots": len(site.slots),
        "spec": None if spec is None else [list(spec.shape), _dtype(spec.dtype), str(spec.device)],
        "copies": site._copies,
        "teaching": site.teaching,
        "sampling": site.sampling,
        "chain": [_committed(graft) for graft in site.chain if isinstance(graft, Committed)],
    }


def _committed(graft: Committed) -> dict[str, Any]:
    trains = any(p.requires_grad for p in graft.parameters())
    place = {"first": graft.first, "end": graft.end, "axis": graft.axis, "alpha": graft.alpha}
    return {**place, "seed": _seed(graft.seed), "trains": trains}


def _seed(seed: Seed) -> dict[str, Any]:
    tensors = {name: t.detach().clone() for name, t in seed.state_dict().items()}
    return {
        "artifact": seed.artifact_id,
        "digest": seed.digest,
        "graft": asdict(seed.graft),
        "tensors": tensors,
    }


def _slot(slot: Slot) -> dict[str, Any]:
    reading = slot.reading
    notes = {k: v for k, v in slot.notes.items() if k in _PLAIN_NOTES}
    late = {k: v.read() for k, v in slot.notes.items() if k in _LATE and isinstance(v, Late)}
    return {
        "artifact": slot.artifact,
        "graft": asdict(slot.graft),
        "strategy": slot.strategy.value,
        "seed": None if slot.seed is None else _seed(slot.seed),
        "learns": slot.seed is not None and slot.seed.learns,
        "grads": {n: g.clone() for n, g in slot.grads.items()},
        "batches": slot.batches,
        "broken": slot.broken,
        "expires": slot.expires,
        "before": None if slot.before is None else {n: t.clone() for n, t in slot.before.items()},
        "reading": [reading.drift, reading.gradient, reading.falls],
        "notes": notes,
        "late": late,
    }


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- back again
# -------------------------------------------------------------------------------------------------------


def check(growth: Any, state: Mapping[str, Any]) -> None:
    """E1006 unless the state is of a model wrapped in the same places."""
    if state.get("schema") != SCHEMA:
        raise fail("E1006", f"the growth state is of {state.get('schema')!r}, not {SCHEMA!r}")
    here = {name: len(site.slots) for name, site in growth.sites.items()}
    there = {name: int(site["slots"]) for name, site in state["sites"].items()}
    if here != there:
        differ = sorted(set(here.items()) ^ set(there.items()))
        raise fail("E1006", f"other sites or slots: {differ[0][0]}", node=differ[0][0])


def restore(growth: Any, state: Mapping[str, Any]) -> None:
    """Make the growth side what `state_of` found. Errors: E1006, and those of loading an artifact; nothing is
    changed then."""
    check(growth, state)
    chains = {name: _chain(growth, site) for name, site in state["sites"].items()}
    seeds = {i: _rebuilt(growth, growth.slot(i), s, state) for i, s in state["slots"].items() if s["seed"]}
    for slot in growth.slots:
        slot.deaf()
    for name, site in growth.sites.items():
        _restore_site(site, state["sites"][name], chains[name])
    for slot in growth.slots:
        _restore_slot(slot, state["slots"].get(slot.id), seeds.get(slot.id))
    growth.epoch, growth.step, growth.ticks = state["epoch"], state["step"], state["ticks"]
    growth.every = state["every"]
    growth.queue.load_state_dict(state["queue"])
    growth.bans.load_state_dict(state["bans"])
    growth.journal.reset(state["journal"])
    growth.settle(Counter(slot.state for slot in growth.slots))


def _chain(growth: Any, site: Mapping[str, Any]) -> list[Committed]:
    if site["spec"] is None:
        return []
    shape, dtype, device = site["spec"]
    found = []
    for saved in site["chain"]:
        sizes = list(shape)
        sizes[saved["axis"]] = saved["end"] - saved["first"]
        spec = Spec(tuple(sizes), getattr(torch, dtype), torch.device(device))
        seed = _made(growth, saved["seed"], spec)
        seed.learn(bool(saved["trains"]))
        found.append(Committed(seed, saved["first"], saved["end"], saved["axis"], saved["alpha"], spec))
    return found


def _rebuilt(growth: Any, slot: Slot, saved: Mapping[str, Any], state: Mapping[str, Any]) -> Seed:
    shape, dtype, device = state["sites"][slot.site.name]["spec"]
    axis = 1 if len(shape) == 4 else -1
    size, more = divmod(shape[axis], len(slot.site.slots))
    sizes = list(shape)
    sizes[axis] = size + (slot.index < more)
    return _made(growth, saved["seed"], Spec(tuple(sizes), getattr(torch, dtype), torch.device(device)))


def _made(growth: Any, saved: Mapping[str, Any], spec: Spec) -> Seed:
    """A seed with these values. E1006 when the artifact of that name holds other bytes."""
    features = spec.shape[1 if len(spec.shape) == 4 else -1]
    graft = Graft(**saved["graft"])
    seed = make(saved["artifact"], growth.library, spec, features, graft, 0, growth.allow_unvalidated)
    if seed.digest != saved["digest"]:
        raise fail(
            "E1006", f"{saved['artifact']} has other bytes than the checkpoint's", node=saved["artifact"]
        )
    fill(seed, saved["tensors"])
    return seed


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write values into a module's tensors in place. E1006 for other names or shapes."""
    own = module.state_dict(keep_vars=True)
    if own.keys() != tensors.keys() or any(own[n].shape != t.shape for n, t in tensors.items()):
        raise fail("E1006", f"{type(module).__name__} has other tensors than the checkpoint")
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)


def _restore_site(site: Site, saved: Mapping[str, Any], chain: list[Committed]) -> None:
    del site.chain[:]
    site.chain.extend(chain)
    spec = saved["spec"]
    if spec is not None:
        site.spec = Spec(tuple(spec[0]), getattr(torch, spec[1]), site.spec.device if site.spec else
                         torch.device(spec[2]))  # fmt: skip
        site.state.move(site.spec.device)
    site.state.load_state_dict(saved["state"])
    site._copies, site.teaching = bool(saved["copies"]), bool(saved["teaching"])
    site.sampling = bool(saved["sampling"]) and site.observer is not None


def _restore_slot(slot: Slot, saved: Mapping[str, Any] | None, seed: Seed | None) -> None:
    slot.drop()
    slot.seed, slot.before, slot.notes = seed, None, {}
    slot.artifact, slot.expires, slot.broken, slot.reading = "", 0, False, Reading()
    slot.graft, slot.strategy = Graft(), GraftingStrategy.FIXED_RAMP
    if saved is None:
        return
    slot.artifact, slot.expires, slot.broken = saved["artifact"], saved["expires"], saved["broken"]
    slot.graft, slot.strategy = Graft(**saved["graft"]), GraftingStrategy(saved["strategy"])
    drift, gradient, falls = saved["reading"]
    slot.reading = Reading(drift, gradient, falls)
    late = {name: Late(torch.tensor(value)) for name, value in saved["late"].items()}
    slot.notes = {**saved["notes"], **late}
    place = slot.site.state.place
    slot.grads = {n: g.clone().to(place) for n, g in saved["grads"].items()}
    slot.batches = saved["batches"]
    if saved["before"] is not None:
        slot.before = {n: t.clone() for n, t in saved["before"].items()}
    if seed is not None:
        seed.learn(bool(saved["learns"]))
        if saved["learns"] and slot.state is not Lifecycle.TRAINING:
            slot.listen()


def fill_host(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write the host's own tensors in place, so that whoever holds them goes on holding them."""
    own = {**dict(model.named_buffers()), **model.state_dict(keep_vars=True)}
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)
