"""What gates are asked with: what the mechanics measured, and losses of one validation in three arms."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, variance
from typing import Any

import torch
from torch import Tensor, nn

from runtime.seeds.facts import Arms
from runtime.seeds.layer import Site, Slot, overriding
from runtime.seeds.lifecycle import Measured, Number
from runtime.seeds.ranks import Ranks
from runtime.seeds.seed import same_random
from runtime.seeds.state import PROBE

# Two-sided 95 % points of Student's t for 1 to 30 degrees of freedom, then by the normal's with its first
# correction (Abramowitz and Stegun 26.7.5).
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z = 1.959964


def quantile(freedom: int) -> float:
    """Student's t, two-sided 95 %."""
    if freedom < 1:
        return math.inf
    return _T[freedom - 1] if freedom <= len(_T) else _Z + (_Z**3 + _Z) / (4 * freedom)


def mean_of(values: Sequence[float]) -> Measured:
    """Mean with its 95 % interval; one value alone has an infinite one."""
    middle, many = fmean(values), len(values)
    if many < 2:
        return Measured(middle, -math.inf, math.inf, many)
    reach = quantile(many - 1) * math.sqrt(variance(values) / many)
    return Measured(middle, middle - reach, middle + reach, many)


def mean_of_sums(count: float, total: float, square: float) -> Measured:
    """The same from a count, a sum and a sum of squares."""
    middle, many = total / count, round(count)
    if many < 2:
        return Measured(middle, -math.inf, math.inf, many)
    spread = max(square - count * middle * middle, 0.0) / (count - 1)
    reach = quantile(many - 1) * math.sqrt(spread / count)
    return Measured(middle, middle - reach, middle + reach, many)


def of_incubation(probe: Mapping[str, float], seed_steps: int) -> dict[str, Number]:
    """What G2 asks, from the sums of the probe."""
    found: dict[str, Number] = {"training_steps": float(seed_steps)}
    if probe["held"] >= 1:
        found["held_out_gain"] = mean_of_sums(probe["held"], probe["gain"], probe["gain_sq"])
        found["predicted_gain"] = mean_of_sums(probe["held"], probe["predicted"], probe["predicted_sq"])
        found["trust_ratio"] = probe["ratio"] / probe["held"]
    if probe["grads"] >= 1:
        found["activity"] = probe["seed_grad"] / max(probe["host_grad"], 1e-30)
        found["gradients_finite"] = probe["nonfinite"] == 0
    return found


def of_arms(arms: Arms) -> dict[str, Number]:
    """What G3, G4 and G5 ask, from paired losses. All are relative: by the loss without the graft, or by the
    snapshot's. `contribution` is the smaller of ablation and gain over the snapshot, by its lower end."""
    found: dict[str, Number] = {}
    ablation = _relative(arms.without, arms.with_graft)
    gain = _relative(arms.snapshot, arms.with_graft)
    if gain is not None:
        found["snapshot_excess"] = found["validation_excess"] = Measured(
            -gain.value, -gain.high, -gain.low, gain.samples
        )
    if ablation is not None:
        found["ablation"] = ablation
    if ablation is not None and gain is not None:
        found["contribution"] = min((ablation, gain), key=lambda m: m.low)
    return found


def _relative(worse: Sequence[float], better: Sequence[float]) -> Measured | None:
    """(worse - better) / mean(worse), batch by batch; None where the arms are not of one validation."""
    if not worse or len(worse) != len(better) or not all(map(math.isfinite, (*worse, *better))):
        return None
    scale = abs(fmean(worse)) or 1e-30
    return mean_of([(a - b) / scale for a, b in zip(worse, better, strict=True)])


Validate = Callable[[nn.Module], Iterable[Any]]


def losses(validate: Validate, model: nn.Module) -> tuple[float, ...]:
    """One arm: eval mode, no gradients, the random numbers of the training put back after."""
    modes = {m: m.training for m in model.modules()}
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        model.eval()
        with torch.no_grad(), same_random(place):
            found = validate(model)
            values = list(found) if not isinstance(found, (int, float, Tensor)) else [found]
            flat = [x for v in values for x in (v.reshape(-1).tolist() if isinstance(v, Tensor) else [v])]
            return tuple(float(x) for x in flat)
    finally:
        for module, mode in modes.items():
            module.training = mode


def gathered_back(model: nn.Module) -> None:
    """Modules under `fully_shard` may keep what a forward gathered, and their parameters are copies then:
    have every rank hold its own shards again."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(fsdp, "FSDPModule", None)
    found: list[Any] = [m for m in model.modules() if isinstance(m, kind)] if kind is not None else []
    for module in found:
        module.reshard()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the host with its committed grafts, by name, each once; of sharded ones this
    rank's shards."""
    gathered_back(model)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def kept(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all of them, on the processor: it is read at boundaries only."""
    return {name: t.detach().to("cpu", copy=True) for name, t in tensors_of(model).items()}


@contextmanager
def as_before(model: nn.Module, before: Mapping[str, Tensor]) -> Iterator[None]:
    """The host's tensors as they were, written in place and put back in place. What came since stays."""
    here = {n: t for n, t in tensors_of(model).items() if n in before}
    now = {name: t.detach().clone() for name, t in here.items()}
    try:
        _write(here, before)
        yield
    finally:
        gathered_back(model)
        _write(here, now)


def _write(here: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in here.items():
            tensor.copy_(values[name])


def over_ranks(found: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """One arm from those of all ranks: the mean of their first batches, of their second, and so on. Batches
    that several ranks have alike so count once, and an interval is not narrowed by them."""
    many = min((len(one) for one in found), default=0)
    return tuple(fmean(one[i] for one in found) for i in range(many))


def measure_arms(
    model: nn.Module, sites: Mapping[str, Site], slot: Slot, validate: Validate, ranks: Ranks
) -> tuple[Arms, dict[str, Number]]:
    """The three arms of a live slot, and what gates ask of them; the training's state is put back to the
    bit. A collective call."""
    began = time.perf_counter()
    with_graft = losses(validate, model)
    middle = time.perf_counter()
    with overriding(sites, {slot.id: 0.0}):
        without = losses(validate, model)
        end = time.perf_counter()
        snapshot: tuple[float, ...] = ()
        if slot.before is not None:
            with as_before(model, slot.before):
                snapshot = losses(validate, model)
    if ranks.many > 1:
        told = ranks.gather((with_graft, without, snapshot))
        with_graft, without, snapshot = (over_ranks([arms[i] for arms in told]) for i in range(3))
    arms = Arms(with_graft, without, snapshot)
    extra = (middle - began) / max(end - middle, 1e-9) - 1
    return arms, {**of_arms(arms), "latency_share": extra}


def probe_of(slot: Slot) -> dict[str, float]:
    """The probe's sums in the mirror, by name."""
    return dict(zip(PROBE, slot.site.state.row("probe", slot.index), strict=True))
