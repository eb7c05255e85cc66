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
- gain: which share of the gradient's mean square a new nonlinear branch here could explain, and so take away.
  With g the gradient at the site, phi random ReLU features of the standardised activations and S = mean of
  phi phi^T, the least-squares fit of g by phi is phi^T inv(S) M, M = mean over samples of phi g^T: zero when
  no such feature predicts the gradient (the criterion of GradMax, Evci et al. 2022, for random incoming
  weights, by the natural measure of the features). The samples of a step are split into halves:
  tr(M1^T inv(S) M2) estimates what is explained without the bias of noise; alignment is that by the root of
  the same of each half with itself. A share has no scale: layers whose gradients are small or large for what
  stands behind them are compared by what they lack. g is seen through `SEEN` random directions.
"""

from __future__ import annotations

import functools
import importlib
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.seeds.state import HEALTH

try:
    _native: Any = importlib.import_module("runtime._health")  # the same sums in C, where built
    if getattr(_native, "ARGUMENTS", 1) != 4:  # built from other sources than these
        _native = None
except ImportError:
    _native = None

ROWS = 512  # samples of a step that are looked at
FEATURES = 128  # features of a chunk whose correlations are looked at
DRAWN = 16  # random features phi; as many as `_health.c` has lanes
SEEN = 4  # random directions of the gradient, per chunk; the most that `_health.c` takes
RIDGE = 0.01  # of the mean square of a feature, so that features that are copies of others do no harm
BINS, SPAN = 16, 4.0  # of the histogram, standard deviations
TINY = 1e-12
_KEPT = ("halves", "among", "power")  # across boundaries
_AT = {name: number for number, name in enumerate(HEALTH)}
ACTIVATIONS = ("samples", "mean", "variance", "dead", "correlation", "entropy", "rank")
_PLACE = struct.Struct("14q")  # `place_t` of `_health.c`
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
    """Of one site: fixed random directions `inward` [features, DRAWN] and `outward` [SEEN, features]
    (bfloat16, both shared by layers of one width); the two halves of M per chunk; S; the mean square of
    the gradient per chunk; and the features of the forward that waits for its backward. Sums over sampled
    backwards."""

    inward: Tensor
    outward: Tensor
    chunks: int
    halves: Tensor  # [2, chunks, DRAWN, SEEN]
    among: Tensor  # S, the lower triangle row by row
    power: Tensor  # [chunks]
    waiting: Tensor | None = None

    def expect(self, unit: Tensor, *, restart: bool) -> None:
        """A run of chunks of standardised activations [samples, chunks, f]: its part of the projection."""
        width = unit.shape[1] * unit.shape[2]
        before = 0 if restart else self._seen
        part = unit.flatten(1) @ self.inward[before : before + width].float()
        self.waiting = part if restart or self.waiting is None else self.waiting + part
        self._seen = before + width

    _seen: int = 0

    def meet(self, flat: Tensor) -> None:
        """The gradient [samples, features] of the forward that waits."""
        waiting, self.waiting = self.waiting, None
        picked = _picked(flat)
        if waiting is None or picked.shape[0] != waiting.shape[0]:  # of another forward
            return
        # The loss is a mean over all rows, a half is half of them.
        share = 2.0 * flat.shape[0] / picked.shape[0]
        phi = torch.relu(waiting)
        phi = phi - phi.mean(0)
        pairs = picked.shape[0] // 2
        many = max(2 * pairs, 1)
        used = phi[: 2 * pairs]
        self.among.add_((used.T @ used)[*_triangle(flat.device)], alpha=1.0 / many)
        halves = phi[: 2 * pairs].view(pairs, 2, -1).transpose(0, 1)  # [2, pairs, DRAWN]
        for first, end, low, high in parts(flat.shape[1], self.chunks):
            g = picked[: 2 * pairs, low:high].reshape(2 * pairs, end - first, -1).transpose(0, 1)
            seen = torch.bmm(g, self.outward[:, low:high].T.float().reshape(end - first, g.shape[2], -1))
            seen = seen.view(end - first, pairs, 2, -1).permute(2, 0, 1, 3)  # [2, chunks, pairs, SEEN]
            both = torch.matmul(halves.transpose(1, 2).unsqueeze(1), seen)
            self.halves[:, first:end].add_(both, alpha=share)
            self.power[first:end].add_(seen.square().sum((0, 2, 3)), alpha=flat.shape[0] ** 2 / many)

    def explained(self) -> tuple[Tensor, Tensor]:
        """Gain and alignment per chunk; nothing waits for the device."""
        first, second = self.halves.unbind(0)  # [chunks, DRAWN, SEEN]
        whole = self.among.new_zeros(DRAWN, DRAWN)
        lower, left = _triangle(whole.device)
        whole[lower, left] = whole[left, lower] = self.among
        whole.diagonal().add_(RIDGE * whole.diagonal().mean() + TINY)
        both = torch.cat((first, second), 2)
        fit = torch.linalg.solve_ex(whole, both)[0]
        one, two = fit.split(first.shape[2], 2)
        shared, own, other = ((a * b).sum((1, 2)) for a, b in ((first, two), (first, one), (second, two)))
        size = (own.clamp_min(0.0) * other.clamp_min(0.0)).sqrt()
        return shared.clamp_min(0.0) / self.power.clamp_min(TINY), shared / size.clamp_min(TINY)


@dataclass(frozen=True)
class _Seat:
    """What stays the same from one sampled step of a site to the next: the spec of its result (the site's own
    object), whether that is rows of fp32 as it lies, and where everything is, as `_health.c` takes it.
    `aside`: the same with other columns, which nobody reads. `held`: the tensors that both point to."""

    spec: Any
    plain: bool
    gains: bool
    place: bytes
    aside: bytes
    held: tuple[Tensor, ...]


class _Ear:
    """Hears the gradient of one forward."""

    __slots__ = ("_seat", "_waiting")

    def __init__(self, seat: _Seat, waiting: bytearray | None) -> None:
        self._seat, self._waiting = seat, waiting

    def __call__(self, g: Tensor) -> None:
        seat, waiting, self._waiting = self._seat, self._waiting, None
        if g.shape != seat.spec.shape or g.dtype is not seat.spec.dtype or not g.is_cpu:
            return  # a hook before this one made another of it
        if not (seat.plain and g.is_contiguous()):
            g = rows_of(g.detach()).contiguous()
        _native.backward(seat.place, g.data_ptr(), waiting)


class HealthObserver:
    """Adds the health of wrapped layers to their state tensors; see the module's text for what is measured.

    `memory`: share of M that is kept across a boundary, so that the predicted gain averages over epochs.
    `gains` False leaves the predicted gain out: the first step of degraded telemetry.
    """

    def __init__(self, *, memory: float = 0.7, seed: int = 0, gains: bool = True) -> None:
        self.memory, self.seed, self.gains = memory, seed, gains
        self._branches: dict[str, _Branch] = {}
        self._seats: dict[str, _Seat] = {}
        self._directions: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}
        self._at: dict[torch.device, Tensor] = {}

    # -- on sampled steps

    def activation(self, site: Any, h: Tensor, columns: Tensor) -> None:
        """`h`: the layer's result, before any seed. Adds to `columns`, fp32 [slots, len(HEALTH)]."""
        rows = _picked(rows_of(h))
        branch = self._branch(site, rows.shape[1], rows.device) if self.gains else None
        for number, (first, end, low, high) in enumerate(parts(rows.shape[1], columns.shape[0])):
            z = rows[:, low:high].view(rows.shape[0], end - first, -1)
            mean = z.mean(0)
            centred = z - mean
            variance = centred.square().mean(0)  # [chunks, features]
            unit = centred * torch.rsqrt(variance + TINY)
            columns[first:end].index_add_(1, self._places(columns), _sums(unit, mean, variance))
            if branch is not None:
                branch.expect(unit, restart=number == 0)

    def gradient(self, site: Any, g: Tensor, columns: Tensor) -> None:
        """`g`: gradient of the loss at the layer's result, of h's shape."""
        flat = rows_of(g)
        for first, end, low, high in parts(flat.shape[1], columns.shape[0]):
            square = flat[:, low:high].square().view(flat.shape[0], end - first, -1).sum((0, 2))
            found = torch.stack((torch.ones_like(square), square.sqrt(), square), 1)
            columns[first:end, _GRADIENTS].add_(found)
        branch = self._branches.get(site.name)
        if branch is not None:
            branch.meet(flat)

    def attend(self, site: Any, h: Tensor, counts: bool = True) -> Callable[[Tensor], None] | None:
        """`activation` by `_health.c`, and a function that is `gradient` for this forward; None where the
        site has no seat for such a result. One call each that touches little else: a sampled step comes too
        rarely to find its code in the caches. `counts` False where h was observed before."""
        seat = self._seats.get(site.name)
        if (
            seat is None
            or seat.spec is not site.spec
            or h.shape != seat.spec.shape
            or h.dtype is not seat.spec.dtype
            or seat.gains is not self.gains
            or not h.is_cpu
        ):
            return None
        if not (seat.plain and h.is_contiguous()):
            h = rows_of(h.detach()).contiguous()
        return _Ear(seat, _native.activation(seat.place if counts else seat.aside, h.data_ptr()))

    def seat(self, site: Any, h: Tensor, columns: Tensor) -> bool:
        """Make a site's seat for results like `h`, which the site has seen (`site.spec`). False on a card, or
        without the C part."""
        if _native is None or not (columns.is_cpu and h.is_cpu):
            return False
        rows = rows_of(h.detach())
        branch = self._branch(site, rows.shape[1], rows.device) if self.gains else None
        place, held = _place(columns, rows, branch)
        aside, also = _place(torch.zeros_like(columns), rows, branch)
        plain = h.dim() in (2, 3) and h.dtype is torch.float32
        self._seats[site.name] = _Seat(site.spec, plain, self.gains, place, aside, (*held, also[0]))
        return True

    # -- at a boundary

    def close_epoch(self, sites: Mapping[str, Any]) -> None:
        """Add predicted gain and alignment of the window that ends here to the columns of every site, before
        they are copied."""
        for name, branch in self._branches.items():
            if name not in sites:
                continue
            columns = sites[name].state.device["health"]
            gain, alignment = branch.explained()
            columns[:, _AT["windows"]] += 1.0
            columns[:, _AT["gain"]] += gain
            columns[:, _AT["alignment"]] += alignment
            for sums in (branch.halves, branch.among, branch.power):
                sums.mul_(self.memory)
            branch.waiting = None

    def _places(self, columns: Tensor) -> Tensor:
        """Numbers of the columns ACTIVATIONS, on the device of `columns`."""
        found = self._at.get(columns.device)
        if found is None:
            found = self._at[columns.device] = torch.tensor(
                [_AT[n] for n in ACTIVATIONS], device=columns.device
            )
        return found

    def _branch(self, site: Any, features: int, device: torch.device) -> _Branch:
        branch = self._branches.get(site.name)
        if branch is None or branch.inward.device != device or branch.inward.shape[0] != features:
            branch = self._fresh(features, len(site.slots), device)
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
            self._directions[key] = inward.bfloat16().to(device), outward.T.contiguous().bfloat16().to(device)
        halves = torch.zeros(2, chunks, DRAWN, seen, device=device)
        among = torch.zeros(DRAWN * (DRAWN + 1) // 2, device=device)
        return _Branch(*self._directions[key], chunks, halves, among, torch.zeros(chunks, device=device))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same averages."""
        return {
            name: {"features": b.inward.shape[0], **{n: getattr(b, n).cpu() for n in _KEPT}}
            for name, b in self._branches.items()
        }

    def load_state_dict(self, state: Mapping[str, Any], sites: Mapping[str, Any]) -> None:
        """Of sites that exist here; others are dropped."""
        self._branches, self._seats = {}, {}
        for name, saved in state.items():
            site = sites.get(name)
            if site is None or len(site.slots) != saved["halves"].shape[1]:
                continue
            branch = self._fresh(int(saved["features"]), len(site.slots), site.state.place)
            if any(n not in saved or saved[n].shape != getattr(branch, n).shape for n in _KEPT):
                continue  # of a version that kept other sums: this site's averages begin anew
            for kept in _KEPT:
                getattr(branch, kept).copy_(saved[kept])
            self._branches[name] = branch


@functools.lru_cache(8)
def _triangle(device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns of the lower triangle of S."""
    lower, left = torch.tril_indices(DRAWN, DRAWN).to(device)
    return lower, left


def rows_of(tensor: Tensor) -> Tensor:
    """fp32 [samples, features] of a layer's result or its gradient; images have their channels first."""
    if tensor.dim() == 2:
        return tensor if tensor.dtype is torch.float32 else tensor.float()
    moved = tensor.movedim(1, -1) if tensor.dim() == 4 else tensor
    return moved.reshape(-1, moved.shape[-1]).float()


def _every(samples: int) -> int:
    """Which share of the samples is looked at: one in so many, at most ROWS."""
    return -(-samples // ROWS) or 1


def _picked(flat: Tensor) -> Tensor:
    """At most ROWS samples, evenly spaced."""
    return flat if flat.shape[0] <= ROWS else flat[:: _every(flat.shape[0])]


def _place(columns: Tensor, rows: Tensor, branch: _Branch | None) -> tuple[bytes, tuple[Tensor, ...]]:
    """What the sums in C read of a result [samples, features] and add to: a packed `place_t`, and the tensors
    that it points to."""
    held: tuple[Tensor, ...] = ()
    directions = sums = (0, 0, 0)
    if branch is not None:
        held = (branch.inward, branch.outward, branch.halves, branch.among, branch.power)
        directions = (branch.inward.data_ptr(), branch.outward.data_ptr(), branch.outward.shape[0])
        sums = tuple(tensor.data_ptr() for tensor in held[2:])
    samples, features = rows.shape
    place = _PLACE.pack(samples, _every(samples), features, columns.shape[0], columns.data_ptr(),
                        columns.stride(0), _PLACES, _GRADIENTS.start, *directions, *sums)  # fmt: skip
    return place, (columns, *held)


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
