"""What all ranks must have alike, as a digest: slots and their states, artifacts, ramps, parameters of seeds
and grafts, and what learns."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import torch
from torch import Tensor

from runtime.seeds.lifecycle import HOLDING_SEED

_COLUMNS = ("lifecycle", "artifact", "round", "ramp_total", "ramp_done", "paused")


def key_of(slot: str, artifact: str, epoch: int) -> int:
    """Seed of the random numbers that a seed's parameters are drawn from: equal on every rank."""
    text = f"{slot}\n{artifact}\n{epoch}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    data = tensor.detach().to("cpu").contiguous()
    return zlib.crc32(data.reshape(-1).view(torch.uint8).numpy().tobytes()) if data.numel() else 0


def digest(growth: Any) -> str:
    """SHA-256 over all of it. Reads the parameters of live seeds and committed grafts, not the host's."""
    found = hashlib.sha256(f"{growth.epoch} {growth.step}".encode())
    for name, site in growth.sites.items():
        found.update(name.encode())
        for column in _COLUMNS:
            found.update(site.state.host[column].numpy().tobytes())
        for at, graft in enumerate(site.chain):
            _parameters(found, f"graft {at}", graft)
        for slot in site.active:
            if slot.seed is not None and slot.state in HOLDING_SEED:
                _parameters(found, slot.id, slot.seed)
    for name in growth.surgeon.names() if growth.surgeon is not None else ():
        found.update(f"group {name}".encode())
    return found.hexdigest()


def _parameters(found: Any, owner: str, module: Any) -> None:
    for name, parameter in module.named_parameters():
        found.update(f"{owner} {name} {parameter.requires_grad} {checksum(parameter)}".encode())


def shared(growth: Any) -> str:
    """The digest, where there is another rank to compare it with; else empty."""
    return digest(growth) if growth.ranks.many > 1 else ""


def agree(growth: Any) -> None:
    """E1012 where ranks differ."""
    if growth.ranks.many > 1:
        growth.ranks.agree("the structure of the grown model", digest(growth))
