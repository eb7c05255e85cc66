"""Health of the wrapped layers: what is measured on sampled steps, added up on the device and read once per
epoch.

`HealthObserver` adds sums to the `health` column of a layer's state tensor; at the boundary the mechanics
copy that tensor once, and `runtime.seeds.health` turns the sums of all slots into means. Nothing here waits
for the device. Per chunk and sampled step, over at most `ROWS` samples:

- variance: mean over features of the variance over samples; dead: share of features with one value for all;
- correlation: mean absolute correlation between features; rank: effective rank (participation ratio) of
  their correlation matrix by the number of features, f / sum of squared correlations: 1 for independent
  features, 1/f for copies of one;
- entropy: of the histogram of standardised activations over `BINS` bins, nats;
- grad_norm: norm of the gradient of the loss at the chunk;
- gain: how much a new nonlinear branch here would lower the loss to first order. With g the gradient at the
  site and phi random ReLU features of the standardised activations, M = mean over samples of phi g^T is zero
  when no such feature predicts the gradient, and -M is the direction in which a branch would learn (the
  criterion of GradMax, Evci et al. 2022, for random incoming weights). The samples of a step are split into
  halves: <M1, M2> estimates |M|^2 without the bias of noise; alignment is <M1, M2> / (|M1| |M2|).
  gain = rms(h) sqrt(max(0, <M1, M2>)), in units of the loss. g is seen through `SEEN` random directions.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.seeds.state import HEALTH

try:
    _native: Any = importlib.import_module("runtime._health")  # the same sums in C, where built
except ImportError:
    _native = None

ROWS = 512  # samples of a step that are looked at
FEATURES = 128  # features of a chunk whose correlations are looked at
DRAWN = 16  # random features phi
SEEN = 8  # random directions of the gradient, per chunk
BINS, SPAN = 16, 4.0  # of the histogram, standard deviations
TINY = 1e-12
_AT = {name: number for number, name in enumerate(HEALTH)}
ACTIVATIONS = ("samples", "mean", "variance", "dead", "correlation", "entropy", "rank")
_GRADIENTS = slice(_AT["grad_samples"], _AT["grad_norm_sq"] + 1)
_PLACES = sum(_AT[name] << 8 * number for number, name in enumerate(ACTIVATIONS))  # as `_health.c` takes them


def parts(features: int, chunks: int) -> list[tuple[int, int, int, int]]:
    """Runs of chunks of one size: (first chunk, chunk after the last, first feature, feature after the last).
    The first chunks of a layer are one feature wider when its features do not divide evenly."""
    size, more = divmod(features, chunks)
    wide = more * (size + 1)
    runs = [(0, more, 0, wide), (more, chunks, wide, features)]
    return [run for run in runs if run[1] > run[0]]


@dataclass
class _Branch:
    """Of one site: fixed random directions `inward` [features, DRAWN] and `outward` [features, SEEN]
    (shared by
    layers of one width), the two halves of M per chunk, the scale of h, and the features of the forward that
    waits for its backward."""

    inward: Tensor
    outward: Tensor
    chunks: int
    halves: Tensor  # [2, chunks, DRAWN, SEEN]
    scale: Tensor  # [1 + chunks]: sampled forwards, and the variance of each chunk, both summed
    waiting: Tensor | None = None
    spare: Tensor | None = None  # memory of the last one

    def expect(self, unit: Tensor, variance: Tensor, *, restart: bool) -> None:
        """A run of chunks of standardised activations [samples, chunks, f]: its part of the projection."""
        width = unit.shape[1] * unit.shape[2]
        before = 0 if restart else self._seen
        part = unit.flatten(1) @ self.inward[before : before + width]
        self.waiting = part if restart or self.waiting is None else self.waiting + part
        self._seen = before + width
        first = 0 if restart else self._chunk
        self.scale[1 + first : 1 + first + variance.shape[0]] += variance.mean(1)
        self._chunk = first + variance.shape[0]
        if restart:
            self.scale[0] += 1.0

    _seen: int = 0
    _chunk: int = 0

    def meet(self, flat: Tensor) -> None:
        """The gradient [samples, features] of the forward that waits."""
        waiting, self.waiting = self.waiting, None
        picked = _picked(flat)
        if waiting is None or picked.shape[0] != waiting.shape[0]:  # of another forward
            return
        # The loss is a mean over all rows, a half is half of them.
        share = 2.0 * flat.shape[0] / picked.shape[0]
        if _fits(picked, self.halves):
            _native.halves(*_shape_of(picked, self.chunks), waiting.data_ptr(), waiting.shape[1],
                           self.outward.data_ptr(), self.outward.shape[1], share,
                           self.halves.data_ptr())  # fmt: skip
            self.spare = waiting
            return
        phi = torch.relu(waiting)
        phi = phi - phi.mean(0)
        pairs = picked.shape[0] // 2
        halves = phi[: 2 * pairs].view(pairs, 2, -1).transpose(0, 1)  # [2, pairs, DRAWN]
        for first, end, low, high in parts(flat.shape[1], self.chunks):
            g = picked[: 2 * pairs, low:high].reshape(2 * pairs, end - first, -1).transpose(0, 1)
            seen = torch.bmm(g, self.outward[low:high].view(end - first, g.shape[2], -1))
            seen = seen.view(end - first, pairs, 2, -1).permute(2, 0, 1, 3)  # [2, chunks, pairs, SEEN]
            both = torch.matmul(halves.transpose(1, 2).unsqueeze(1), seen)
            self.halves[:, first:end].add_(both, alpha=share)


class HealthObserver:
    """Adds the health of wrapped layers to their state tensors; see the module's text for what is measured.

    `memory`: share of M that is kept across a boundary, so that the predicted gain averages over epochs.
    `gains` False leaves the predicted gain out: the first step of degraded telemetry.
    """

    def __init__(self, *, memory: float = 0.7, seed: int = 0, gains: bool = True) -> None:
        self.memory, self.seed, self.gains = memory, seed, gains
        self._branches: dict[str, _Branch] = {}
        self._directions: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}
        self._at: dict[torch.device, Tensor] = {}

    # -- on sampled steps

    def activation(self, site: Any, h: Tensor, columns: Tensor) -> None:
        """`h`: the layer's result, before any seed. Adds to `columns`, fp32 [slots, len(HEALTH)]."""
        rows = _picked(rows_of(h))
        branch = self._branch(site, rows) if self.gains else None
        if _fits(rows, columns):
            _in_one_call(rows, columns, branch)
            return
        for number, (first, end, low, high) in enumerate(parts(rows.shape[1], columns.shape[0])):
            z = rows[:, low:high].view(rows.shape[0], end - first, -1)
            mean = z.mean(0)
            centred = z - mean
            variance = centred.square().mean(0)  # [chunks, features]
            unit = centred * torch.rsqrt(variance + TINY)
            columns[first:end].index_add_(1, self._places(columns), _sums(unit, mean, variance))
            if branch is not None:
                branch.expect(unit, variance, restart=number == 0)

    def gradient(self, site: Any, g: Tensor, columns: Tensor) -> None:
        """`g`: gradient of the loss at the layer's result, of h's shape."""
        flat = rows_of(g)
        native = _fits(flat, columns)
        if native:
            _native.gradient(*_shape_of(flat, columns.shape[0]), columns.data_ptr(), columns.stride(0),
                             _GRADIENTS.start)  # fmt: skip
        for first, end, low, high in parts(flat.shape[1], columns.shape[0]) if not native else ():
            square = flat[:, low:high].square().view(flat.shape[0], end - first, -1).sum((0, 2))
            found = torch.stack((torch.ones_like(square), square.sqrt(), square), 1)
            columns[first:end, _GRADIENTS].add_(found)
        branch = self._branches.get(site.name)
        if branch is not None:
            branch.meet(flat)

    # -- at a boundary

    def close_epoch(self, sites: Mapping[str, Any]) -> None:
        """Add predicted gain and alignment of the window that ends here to the columns of every site, before
        they are copied."""
        for name, branch in self._branches.items():
            if name not in sites:
                continue
            columns = sites[name].state.device["health"]
            first, second = branch.halves[0].flatten(1), branch.halves[1].flatten(1)
            both = (first * second).sum(1)
            size = (first.norm(dim=1) * second.norm(dim=1)).clamp_min(TINY)
            seen = branch.scale[0].clamp_min(1e-3)
            rms = (branch.scale[1:] / seen).sqrt()
            columns[:, _AT["windows"]] += 1.0
            columns[:, _AT["gain"]] += rms * both.clamp_min(0.0).sqrt() / seen
            columns[:, _AT["alignment"]] += both / size
            branch.halves.mul_(self.memory)
            branch.scale.mul_(self.memory)
            branch.waiting = None

    def _places(self, columns: Tensor) -> Tensor:
        """Numbers of the columns ACTIVATIONS, on the device of `columns`."""
        found = self._at.get(columns.device)
        if found is None:
            found = self._at[columns.device] = torch.tensor(
                [_AT[n] for n in ACTIVATIONS], device=columns.device
            )
        return found

    def _branch(self, site: Any, rows: Tensor) -> _Branch:
        branch = self._branches.get(site.name)
        if branch is None or branch.inward.device != rows.device or branch.inward.shape[0] != rows.shape[1]:
            branch = self._fresh(rows.shape[1], len(site.slots), rows.device)
            self._branches[site.name] = branch
        return branch

    def _fresh(self, features: int, chunks: int, device: torch.device) -> _Branch:
        """Directions from the seed alone, so that every rank and every resume draws the same."""
        seen = max(1, min(SEEN, features // chunks))
        key = (features, seen, device)
        if key not in self._directions:
            generator = torch.Generator().manual_seed(self.seed)
            inward = torch.randn(features, DRAWN, generator=generator) / math.sqrt(features)
            outward = torch.randn(features, seen, generator=generator) / math.sqrt(seen)
            self._directions[key] = inward.to(device), outward.to(device)
        halves = torch.zeros(2, chunks, DRAWN, seen, device=device)
        return _Branch(*self._directions[key], chunks, halves, torch.zeros(1 + chunks, device=device))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same averages."""
        return {
            name: {"halves": b.halves.cpu(), "scale": b.scale.cpu(), "features": b.inward.shape[0]}
            for name, b in self._branches.items()
        }

    def load_state_dict(self, state: Mapping[str, Any], sites: Mapping[str, Any]) -> None:
        """Of sites that exist here; others are dropped."""
        self._branches = {}
        for name, saved in state.items():
            site = sites.get(name)
            if site is None or len(site.slots) != saved["halves"].shape[1]:
                continue
            branch = self._fresh(int(saved["features"]), len(site.slots), site.state.place)
            branch.halves.copy_(saved["halves"])
            branch.scale.copy_(saved["scale"])
            self._branches[name] = branch


def rows_of(tensor: Tensor) -> Tensor:
    """fp32 [samples, features] of a layer's result or its gradient; images have their channels first."""
    if tensor.dim() == 2:
        return tensor if tensor.dtype is torch.float32 else tensor.float()
    moved = tensor.movedim(1, -1) if tensor.dim() == 4 else tensor
    return moved.reshape(-1, moved.shape[-1]).float()


def _picked(flat: Tensor) -> Tensor:
    """At most ROWS samples, evenly spaced."""
    return flat if flat.shape[0] <= ROWS else flat[:: -(-flat.shape[0] // ROWS)]


def _fits(rows: Tensor, columns: Tensor) -> bool:
    """Whether the sums in C can be asked."""
    return (
        _native is not None
        and rows.is_cpu
        and columns.is_cpu
        and rows.shape[0] > 0
        and (rows.shape[1] == 1 or rows.stride(1) == 1)
    )


def _shape_of(rows: Tensor, chunks: int) -> tuple[int, int, int, int, int]:
    """Address, rows, stride, features and chunks of a matrix, as `_health.c` takes them."""
    return rows.data_ptr(), rows.shape[0], rows.stride(0), rows.shape[1], chunks


def _in_one_call(rows: Tensor, columns: Tensor, branch: _Branch | None) -> None:
    """What `HealthObserver.activation` adds to `columns`, and the projection that waits for the gradient."""
    inward = waiting = scale = drawn = 0
    if branch is not None:
        spare = branch.spare
        same = spare is not None and spare.shape[0] == rows.shape[0]
        held = branch.waiting = spare if spare is not None and same else torch.empty(rows.shape[0], DRAWN)
        inward, waiting = branch.inward.data_ptr(), held.data_ptr()
        scale, drawn = branch.scale.data_ptr(), DRAWN
    _native.activation(*_shape_of(rows, columns.shape[0]), columns.data_ptr(), columns.stride(0), _PLACES,
                       inward, drawn, waiting, scale)  # fmt: skip


def _sums(unit: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """What one sampled step adds for a run of chunks to the columns ACTIVATIONS: [chunks, 7]."""
    correlation, rank = _correlations(unit, variance)
    dead = (variance <= TINY).float().mean(1)
    return torch.stack(
        (torch.ones_like(dead), mean.mean(1), variance.mean(1), dead, correlation, _entropy(unit), rank), 1
    )


def _correlations(unit: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """(mean absolute correlation, effective rank by features) per chunk of `unit` [samples, chunks, f]."""
    width = unit.shape[2]
    if width == 1:
        return variance.new_zeros(variance.shape[0]), variance.new_ones(variance.shape[0])
    step = -(-width // FEATURES)
    part = unit[:, :, ::step].transpose(0, 1)  # [chunks, samples, f]
    gram = part.transpose(1, 2) @ part / unit.shape[0]
    alive = (variance[:, ::step] > TINY).float().sum(1)
    pairs = part.shape[2] * (part.shape[2] - 1)
    total = gram.abs().sum((1, 2))
    return (total - alive) / pairs, alive.square() / gram.square().sum((1, 2)).clamp_min(1.0) / part.shape[2]


def _entropy(unit: Tensor) -> Tensor:
    """Per chunk of `unit` [samples, chunks, f], nats."""
    chunks = unit.shape[1]
    if chunks == 1:
        share = torch.histc(unit.clamp(-SPAN, SPAN), BINS, -SPAN, SPAN) / unit.numel()
        return -torch.xlogy(share, share).sum().view(1)
    cell = ((unit + SPAN) * (BINS / (2 * SPAN))).clamp_(0, BINS - 1).long()
    cell += BINS * torch.arange(chunks, device=unit.device).view(1, chunks, 1)
    share = torch.zeros(chunks * BINS, device=unit.device)
    share.index_add_(0, cell.flatten(), torch.ones((), device=unit.device).expand(cell.numel()))
    share = share.view(chunks, BINS) / (unit.shape[0] * unit.shape[2])
    return -torch.xlogy(share, share).sum(1)
