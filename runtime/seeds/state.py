"""The layout of the state tensor: which columns, of which type, who writes them. One per wrapped layer.

A layer with n slots has one uint8 buffer on its device that holds every column one after the other
(structure of arrays), each a typed view of shape [n] or [n, width]; and a mirror of the same bytes on the
host. The host decides from the mirror, so a training step reads nothing back; the device's columns are what
blend operators read. At an epoch boundary the device buffer is copied once (`StateTensor.fetch`), must equal
the mirror in all columns that both know, and the CRC-32 of the mirror must be the one that the last write
left.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.seeds.errors import fail
from runtime.seeds.lifecycle import Fault, Lifecycle

__all__ = ["COLUMNS", "Column", "Fault", "HEALTH", "Lifecycle", "PROBE", "StateTensor", "artifact_prefix"]

HEALTH: tuple[str, ...] = (
    "samples",  # sampled steps that the sums below are over
    "mean",  # sum of the chunk's mean activation
    "variance",  # sum of its variance over samples
    "dead",  # sum of the ratio of features that had one value for all samples
    "correlation",  # sum of the mean absolute correlation between features
    "entropy",  # sum of the entropy of the activation histogram, nats
    "grad_samples",  # sampled backwards
    "grad_norm",  # sum of the norm of the gradient at the site
    "grad_norm_sq",  # sum of its square
    "rank",  # sum of the effective rank of the features, by their number
    "windows",  # boundaries that the last two are over
    "gain",  # sum of the predicted gain (runtime/seeds/telemetry.py)
    "alignment",  # sum of its agreement between two halves of the samples
)
"""fp32 sums per chunk that telemetry adds on sampled steps (`Observer` in runtime/seeds/layer.py). Extend by
appending: the width of the column follows."""

PROBE: tuple[str, ...] = (
    "held",  # held-out backwards that the sums below are over
    "gain",  # sum of 1 - L_inc(z) / L_inc(identity)
    "gain_sq",
    "predicted",  # sum of <g, z - h> / (||g|| ||h||)
    "predicted_sq",
    "ratio",  # sum of ||z - h|| / ||h||
    "ratio_max",
    "seed_grad",  # sum of the norm of the seed's gradient by the root of its parameter count
    "host_grad",  # sum of the norm of the host's gradient at the site by the root of its size
    "grads",  # backwards that the last two are over
    "nonfinite",  # outputs or gradients of the seed that were not finite
)
"""fp32 sums per slot that incubation adds and gate G2 reads; zeroed when a seed enters TRAINING and after
each boundary in TRAINING (a gate judges the newest epoch)."""


@dataclass(frozen=True)
class Column:
    """One column. `owner` "host": the mirror is right and the device copy must equal it; "device": kernels
    and hooks add to it, the mirror knows it after a boundary."""

    name: str
    dtype: torch.dtype
    owner: str
    width: int = 1


COLUMNS: tuple[Column, ...] = (
    Column("artifact", torch.int64, "host"),  # first 64 bits of the artifact's digest, as a signed number
    Column("alpha", torch.float32, "host"),
    Column("ramp_start", torch.float32, "host"),
    Column("ramp_target", torch.float32, "host"),
    Column("ramp_total", torch.int32, "host"),  # progress that the ramp takes, in units of one step
    Column("ramp_done", torch.int32, "host"),
    Column("last_update_epoch", torch.int32, "host"),  # epoch in which the slot entered its state
    Column("entered_step", torch.int32, "host"),  # optimizer step in which it did
    Column("seed_steps", torch.int32, "host"),  # optimizer steps that moved the seed
    Column("exec_us", torch.int32, "host"),  # of a call of the seed, measured at its probe
    Column("lifecycle", torch.uint8, "host"),
    Column("round", torch.uint8, "host"),  # of evaluation: 1, then 2 after FINE_TUNING
    Column("paused", torch.uint8, "host"),
    Column("fault", torch.uint8, "device"),
    Column("health", torch.float32, "device", len(HEALTH)),
    Column("probe", torch.float32, "device", len(PROBE)),
)
_BY_NAME = {column.name: column for column in COLUMNS}


def artifact_prefix(digest: str) -> int:
    """The first 64 bits of a hexadecimal digest as int64; 0 for an empty one."""
    number = int(digest[:16] or "0", 16)
    return number - (1 << 64) if number >= 1 << 63 else number


def offsets(slots: int) -> dict[str, tuple[int, int]]:
    """First byte and number of bytes of every column, each column at a multiple of 8."""
    found: dict[str, tuple[int, int]] = {}
    at = 0
    for column in COLUMNS:
        size = slots * column.width * column.dtype.itemsize
        found[column.name] = (at, size)
        at += -(-size // 8) * 8
    found[""] = (at, 0)
    return found


def _views(data: Tensor, slots: int) -> dict[str, Tensor]:
    places = offsets(slots)
    out: dict[str, Tensor] = {}
    for column in COLUMNS:
        first, size = places[column.name]
        flat = data[first : first + size].view(column.dtype)
        out[column.name] = flat if column.width == 1 else flat.view(slots, column.width)
    return out


class StateTensor:
    """The columns of one wrapped layer. `host[name]` and `device[name]` are views; write by `set`."""

    def __init__(self, slots: int, device: torch.device | str = "cpu") -> None:
        self.slots = slots
        size = offsets(slots)[""][0]
        self._mirror = torch.zeros(size, dtype=torch.uint8)
        self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        places = offsets(slots)
        # The host's columns come first.
        self._owned = min(places[c.name][0] for c in COLUMNS if c.owner == "device")
        self._bind()
        self._crc = self.crc()

    def _bind(self) -> None:
        self.host: Mapping[str, Tensor] = _views(self._mirror, self.slots)
        self.device: Mapping[str, Tensor] = _views(self._bytes, self.slots)
        # The same memory for single numbers: a tensor takes ten times as long for one.
        self._numbers = {name: view.numpy() for name, view in self.host.items()}
        self._there = {n: v.numpy() for n, v in self.device.items()} if self._bytes.is_cpu else None
        self._known = self._mirror[: self._owned].numpy().data
        self._rest = self._mirror[self._owned :].numpy()
        whole = self._bytes.numpy() if self._bytes.is_cpu else None
        # (columns of the host, columns of the device) where the device's copy lies in host memory.
        self._beside = None if whole is None else (whole[: self._owned].data, whole[self._owned :])

    def __deepcopy__(self, memo: dict[int, Any]) -> StateTensor:
        made = StateTensor(self.slots, self.place)
        made.load_state_dict(self.state_dict())
        return made

    @property
    def place(self) -> torch.device:
        return self._bytes.device

    def get(self, name: str, slot: int) -> Any:
        """A value of the mirror as a Python number."""
        return self._numbers[name][slot].item()

    def column(self, name: str) -> list[Any]:
        """A column of the mirror as Python numbers."""
        return self._numbers[name].tolist()

    def row(self, name: str, slot: int) -> list[float]:
        """A wide column of one slot, from the mirror."""
        return self._numbers[name][slot].tolist()

    def set(self, slot: int, **values: float | int) -> None:
        """Write columns of a slot in the mirror and on the device. Neither waits for the device."""
        for name, value in values.items():
            self._numbers[name][slot] = value
            if self._there is not None:
                self._there[name][slot] = value
            else:  # a kernel takes the number along; an assignment would copy it from the host and wait
                self.device[name].select(0, slot).fill_(value)
        self._crc = self.crc()

    def clear(self, slot: int, *names: str) -> None:
        """Zero columns of a slot on both sides."""
        for name in names:
            self._numbers[name][slot] = 0
            if self._there is not None:
                self._there[name][slot] = 0
            else:
                self.device[name][slot].zero_()
        self._crc = self.crc()

    def empty(self, name: str) -> None:
        """Zero a column of the device's own there, for all slots; the mirror knows it after a boundary."""
        if self._there is not None:
            self._there[name].fill(0)
        else:
            self.device[name].zero_()

    def crc(self) -> int:
        """CRC-32 of the mirror, the columns that the host owns."""
        return zlib.crc32(self._known)

    def fetch(self, layer: str) -> None:
        """One copy of the device's bytes; the mirror then knows the device's own columns. E1010 when the
        mirror is not what the last write left, or the device's copy of the host's columns differs."""
        if self.crc() != self._crc:
            raise fail("E1010", f"{layer}: the mirror changed since it was written", node=layer)
        if self._beside is not None:
            known, rest = self._beside
        else:
            copied = self._bytes.to("cpu", copy=True).numpy()
            known, rest = copied[: self._owned].data, copied[self._owned :]
        if zlib.crc32(known) != self._crc:
            there = _views(self._bytes.to("cpu", copy=True), self.slots)
            wrong = [n for n, v in self.host.items() if _BY_NAME[n].owner == "host" and not v.equal(there[n])]
            raise fail("E1010", f"{layer}: columns {', '.join(wrong)} differ on the device", node=layer)
        self._rest[:] = rest

    def move(self, device: torch.device) -> None:
        """Follow the layer to another device."""
        if device != self._bytes.device:
            self._bytes = self._bytes.to(device)
            self._bind()

    def state_dict(self) -> dict[str, Tensor]:
        """The device's bytes (with its own columns as they are now) and the mirror's."""
        return {"mirror": self._mirror.clone(), "device": self._bytes.detach().to("cpu", copy=True)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._mirror.copy_(state["mirror"])
        self._bytes.copy_(state["device"])
        self._crc = self.crc()
