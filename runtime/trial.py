"""The trial of a replacement: a module by its own forward and by the artifact, on the same random tensors,
in train and in eval mode.

Results that are a function of the tensors must be near each other, for tensors of several sizes: an epsilon
shows among small ones, a clamp among large ones. Where both sides draw numbers they cannot agree one by one:
what is compared is the share that each dropout drops, where both sides name it, and over many runs the mean,
the spread and the share of zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from esper_ir.diagnostics import EsperError
from library.launch import DimSource, TensorSpec, evaluate
from runtime.errors import fail
from runtime.seat import NCHW, Place, Seat
from runtime.state import given

# Relative L2 error of a trial, by dtype of the result. In float32 a sixth of what lies between the two gelus
# (2e-4). What exceeds it is measured against the module's own noise before it is refused.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
NOISE = 4.0  # times the module's own noise that is allowed beyond
# Standard deviations of the inputs, vectors of the module scaled along. At 30 a relu6 has cut off what a relu
# passes; at 1e-3 an epsilon of 1e-6 is as large as the mean square beside it.
SIZES = (1.0, 30.0, 1e-3)
# Where both draw: runs that find the axis on which the means differ most, runs that are compared along it,
# and the standard errors within which two means count as one (beyond them lie 3e-12 of Student's t with 94
# degrees of freedom). At further sizes fewer runs (6e-9 of Student's t with 30).
LEARNT, COMPARED, ERRORS = 16, 48, 8.0
FEWER = (8, 16)
SHARE = 0.01  # of zeros that rounding may add
SHORT = (torch.float16, torch.bfloat16)
SEED = 20
# What says that an artifact does not hold in a mode; anything else is a fault of its own.
UNLIKE = frozenset({"E0851", "E0852", "E0854"})
Side = Callable[[], tuple[Tensor, ...]]


def hold(name: str, module: nn.Module, made: Seat, mode: str, dropped: Sequence[float]) -> None:
    """Settle places, mode and folding of a seat by trials. `mode`: "auto" tries train and eval, "always" the
    mode that the module is in. `dropped`: shares of the blueprint's dropouts. Square weights whose
    orientation the shapes do not tell are tried both ways. E0852 when nothing agrees."""
    now = "train" if module.training else "eval"
    other = "eval" if module.training else "train"
    modes = {"auto": (now, other), "always": (now,)}.get(mode, (mode,))
    square = [i for i, p in enumerate(made.places) if isinstance(p, Place) and _square(module, p)]
    first, tried = made.places, _Tried(name, module, made)
    refused: list[EsperError] = []
    for ways in [(), tuple(square)] if square else [()]:
        made.places = tuple(_turned(p) if i in ways else p for i, p in enumerate(first))
        found = {m: _refusal(tried, m, dropped) for m in modes}
        held = [m for m in modes if found[m] is None]
        refused += [error for error in found.values() if error is not None]
        if held:
            made.folds = made.folds and _folds(tried, held[0], dropped)
            made.left = {m: error.message for m, error in found.items() if error is not None}
            made.mode = mode if mode != "auto" else held[0] if made.left else "always"
            return
    raise refused[0]


def _refusal(tried: _Tried, mode: str, dropped: Sequence[float]) -> EsperError | None:
    """Why the artifact is not the module in this mode."""
    try:
        _compare(tried, mode, dropped, 0)
    except EsperError as error:
        if error.code not in UNLIKE:
            raise
        return error
    return None


def _square(module: nn.Module, place: Place) -> bool:
    value = place.of(module)
    return value.dim() == 2 and value.shape[0] == value.shape[1]


def _turned(place: Place | Tensor) -> Place | Tensor:
    return place if isinstance(place, Tensor) else Place(place.owners, place.name, (1, 0))


def _folds(tried: _Tried, mode: str, dropped: Sequence[float]) -> bool:
    """Whether further leading axes may be folded into the first: rows must not meet each other."""
    if not any(tried.made.leads) or tried.made.channels_last:
        return False
    try:
        _compare(tried, mode, dropped, 1)
    except EsperError:
        return False
    return True


# -- one trial


def _compare(tried: _Tried, mode: str, dropped: Sequence[float], extra: int) -> None:
    """E0852 unless both give the same in this mode; the module's own tensors, its modes and torch's
    generators are left as they were."""
    name, made = tried.name, tried.made
    device = made.block.program.device
    with ExitStack() as held:
        held.enter_context(_in_mode(tried.module, mode))
        held.enter_context(_own_generators(device))
        held.enter_context(torch.autocast(device.type, enabled=False))  # it does not reach inside a block
        tried.draw(extra)
        theirs, ours = tried.sides(1.0)
        watch, before = _Dropouts(), _drawn_so_far(device)
        with watch:
            wanted = theirs()
        draws = not all(map(torch.equal, before, _drawn_so_far(device)))
        both = draws and made.draws
        got = ours()
        why = _shares(dropped, watch.shares, both)
        if not why and both:
            why = _distributions(theirs, ours, wanted, got, (LEARNT, COMPARED))
        elif not why:
            again = theirs if draws else ours if made.draws else None
            why = _results(wanted, got, lambda: tried.noise(1.0, wanted)) or (
                again and _varies(again, wanted, draws)
            )
        if not why and not extra:
            why = next(filter(None, (_at_size(tried, size, both) for size in SIZES[1:])), "")
    if why:
        raise fail(
            "E0852",
            f"{name}: {made.block.artifact_id} gives other results than the module in {mode} mode ({why})",
            node=name,
            hint="check the names of the leaves, the blueprint's mathematics (epsilons, clamps, the kind of "
            "gelu) and the mode it was imported in",
        )


def _at_size(tried: _Tried, size: float, both: bool) -> str:
    """What differs for inputs of another size; nothing where the module's own result overflows."""
    theirs, ours = tried.sides(size)
    wanted = theirs()
    if not both:
        why = _results(wanted, ours(), lambda: tried.noise(size, wanted))
    elif all(bool(w.isfinite().all()) for w in wanted):
        why = _distributions(theirs, ours, wanted, ours(), FEWER)
    else:
        why = ""
    return why and f"{why}, for inputs of size {size:g}"


def _shares(ours: Sequence[float], theirs: Sequence[float], both: bool) -> str:
    """Dropouts that are not the same. Of two sides that draw, one may have dropouts that do not say so."""
    if both and len(ours) != len(theirs):
        return ""
    a, b = sorted(ours), sorted(theirs)
    if len(a) == len(b) and all(abs(p - q) < 1e-6 for p, q in zip(a, b, strict=True)):
        return ""
    told = [", ".join(f"{p:.4g}" for p in shares) or "nothing" for shares in (a, b)]
    return f"it drops {told[0]}, the module {told[1]}"


def _results(wanted: Sequence[Tensor], got: Sequence[Tensor], noise: Callable[[], list[float]]) -> str:
    """`noise`: the module's own, by result; asked only where it matters."""
    for at, (w, g) in enumerate(zip(wanted, got, strict=True)):
        if w.shape != g.shape or w.dtype is not g.dtype:
            return f"{g.dtype} of shape {list(g.shape)}, the module's {w.dtype} of shape {list(w.shape)}"
        error, limit = _distance(w, g), TOLERANCE.get(w.dtype, 1e-3)
        if not error <= limit:
            limit += NOISE * noise()[at]
        if not error <= limit:
            return f"relative error {error:.2g}, at most {limit:.2g}"
    return ""


def _varies(side: Side, first: Sequence[Tensor], module: bool) -> str:
    """Of two sides the one that draws numbers, unless they change nothing."""
    if not any(_results(first, side(), lambda: [0.0] * len(first)) for _ in range(COMPARED)):
        return ""
    return f"{'the module' if module else 'it'} draws numbers, {'it' if module else 'the module'} none"


def _distributions(
    theirs: Side, ours: Side, wanted: Sequence[Tensor], got: Sequence[Tensor], runs: tuple[int, int]
) -> str:
    """What differs between results that are drawn."""
    learnt, compared = runs
    if any(w.shape != g.shape or w.dtype is not g.dtype for w, g in zip(wanted, got, strict=True)):
        return "other shapes or dtypes"
    means = [_mean(theirs, learnt), _mean(ours, learnt)]
    axes = [((a + b) / 2, b - a) for a, b in zip(*means, strict=True)]
    limits = [max(TOLERANCE.get(w.dtype, 0.0), 1e-3) for w in wanted]
    a, b = (
        torch.stack([_numbers(side(), axes, limits) for _ in range(compared)]).double()
        for side in (theirs, ours)
    )
    for at, limit in enumerate(limits):
        size, spread = axes[at][0].norm(), a[:, at, 1].mean()
        # What an error of `limit` in every result may change; the centre is known to this much.
        known = (spread / (2 * learnt)).sqrt()
        slack = (limit * size, 2 * limit * (size * known + spread) + (limit * size) ** 2, SHARE)
        for which, label in enumerate(("mean", "spread", "share of zeros")):
            p, q = a[:, at, which], b[:, at, which]
            noise = ((p.var() + q.var()) / compared).sqrt()
            if not float((p.mean() - q.mean()).abs()) <= float(slack[which] + ERRORS * noise):
                return f"{label} {q.mean():.3g}, the module's {p.mean():.3g}"
    return ""


def _mean(side: Side, runs: int) -> list[Tensor]:
    total = [t.double() for t in side()]
    for _ in range(runs - 1):
        total = [t + more for t, more in zip(total, side(), strict=True)]
    return [t / runs for t in total]


def _numbers(
    found: Sequence[Tensor], axes: Sequence[tuple[Tensor, Tensor]], limits: Sequence[float]
) -> Tensor:
    """[results, 3]: place on the axis (centre, direction), squared distance from the centre, share of
    zeros."""
    rows: list[Tensor] = []
    for value, (centre, way), limit in zip(found, axes, limits, strict=True):
        off = value.double() - centre
        little = limit * centre.square().mean().sqrt()
        zeros = (value.abs() <= little).double().mean()
        along = (off * way).sum() / way.norm().clamp_min(1e-300)
        rows.append(torch.stack((along, off.square().sum(), zeros)))
    return torch.stack(rows).cpu()


def _distance(wanted: Tensor, got: Tensor) -> float:
    """Relative, over what is finite in `wanted`; infinite where `got` is not finite there."""
    seen = wanted.isfinite()
    a, b = wanted.double()[seen], got.double()[seen]
    error = float((a - b).norm()) / (float(a.norm()) or 1.0)
    return float("inf") if isnan(error) else error


# -- the two sides


class _Trial(nn.Module):
    """`inner` by its own forward, or by the seat."""

    def __init__(self, inner: nn.Module, seat: Seat, ours: bool) -> None:
        super().__init__()
        self.inner, self.__dict__["call"] = inner, (seat if ours else None)
        self.original = type(inner)

    def forward(self, *inputs: Tensor) -> Any:
        call = self.__dict__["call"]
        return self.original.forward(self.inner, *inputs) if call is None else call.run(self.inner, inputs)


class _Tried:
    """Random tensors for a module and an artifact, drawn once for all modes and sizes."""

    def __init__(self, name: str, module: nn.Module, made: Seat) -> None:
        self.name, self.module, self.made = name, module, made
        self.generator = torch.Generator().manual_seed(SEED)
        named = (*module.named_parameters(), *module.named_buffers())
        self.values = {f"inner.{n}": _like(t.detach(), self.generator) for n, t in named}
        self.buffers = [f"inner.{n}" for n, _ in module.named_buffers()]
        self.inputs: list[Tensor] = []

    def draw(self, extra: int) -> None:
        """Inputs with so many further leading axes."""
        made, self.generator = self.made, torch.Generator().manual_seed(SEED + 1)
        interface = made.block.program.interface
        dims = {d.name: _small(d) for d in interface.dims}
        self.inputs = [
            _random(s, dims, self.generator, made.block.program.device, extra and lead)
            for s, lead in zip(given(interface), made.leads, strict=True)
        ]
        if made.channels_last:
            self.inputs = [t.permute(NCHW) if t.dim() == 4 else t for t in self.inputs]

    def sides(self, size: float) -> tuple[Side, Side]:
        """The module and the artifact: each call gives outputs and updated buffers."""
        inputs, values = self._sized(size)
        return self._side(False, inputs, values), self._side(True, inputs, values)

    def noise(self, size: float, wanted: Sequence[Tensor]) -> list[float]:
        """How far the module's results are from what they should be, relative, by result: under a rounding
        of everything it gets, and against itself in float32 where its tensors have 16 bits."""
        inputs, values = self._sized(size)
        grain = self.made.grain
        near = self._side(False, [self._rounded(t, grain) for t in inputs],
                          {n: self._rounded(t, grain) for n, t in values.items()})  # fmt: skip
        runs = [near()]
        if any(t.dtype in SHORT for t in (*inputs, *values.values())):
            wide = self._side(False, [_wide(t) for t in inputs], {n: _wide(t) for n, t in values.items()})
            with suppress(EsperError):  # some modules take no other dtype
                runs.append(wide())
        return [max(_distance(w, run[at]) for run in runs) for at, w in enumerate(wanted)]

    def _sized(self, size: float) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Matrices keep their size, unless there is nothing else that a module of indices could show."""
        least = 2 if any(t.is_floating_point() for t in self.inputs) else 9
        if size == 1.0:
            return self.inputs, self.values
        values = {
            n: t * size if t.is_floating_point() and t.dim() < least else t for n, t in self.values.items()
        }
        return [t * size if t.is_floating_point() else t for t in self.inputs], values

    def _rounded(self, value: Tensor, grain: float) -> Tensor:
        if not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=self.generator).to(value.device) * 2 - 1
        step = max(grain, torch.finfo(value.dtype).eps)
        return (value.double() * (1.0 + step * signs)).to(value.dtype)

    def _side(self, ours: bool, inputs: Sequence[Tensor], values: Mapping[str, Tensor]) -> Side:
        trial = _Trial(self.module, self.made, ours)

        def run() -> tuple[Tensor, ...]:
            own = {**values, **{n: values[n].clone() for n in self.buffers}}
            return _outcome(self.name, trial, own, [t.clone() for t in inputs], self.made)

        return run


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in SHORT else value


def _outcome(
    name: str, trial: _Trial, own: Mapping[str, Tensor], inputs: Sequence[Tensor], made: Seat
) -> tuple[Tensor, ...]:
    try:
        with torch.no_grad():
            found = functional_call(trial, dict(own), tuple(inputs))
    except EsperError:
        raise
    except Exception as error:
        raise fail(
            "E0851",
            f"{name} cannot be tried with the block's inputs: {type(error).__name__}: {str(error)[:200]}",
            node=name,
            hint="swap(..., check=False) if you are sure",
        ) from error
    outputs = found if isinstance(found, tuple) else (found,)
    return (*outputs, *(own[f"inner.{n}"] for n in made.updates))


class _Dropouts(TorchFunctionMode):
    """Shares of the dropouts that a module runs, as far as torch's functions say them."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[float] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = dict(kwargs or {})
        share = found.get("dropout_p") if func is functional.scaled_dot_product_attention else None
        if inspect.isfunction(func) and func.__module__ == functional.__name__ and "dropout" in func.__name__:
            told = inspect.signature(func).bind(*args, **found)
            told.apply_defaults()
            share = told.arguments["training"] and told.arguments["p"]
        self.shares += [float(share)] if share else []
        return func(*args, **found)


@contextmanager
def _in_mode(module: nn.Module, mode: str) -> Iterator[None]:
    """As `.train()` and `.eval()` would leave it; a module that is in the mode keeps parts that are not."""
    was = [(part, part.training) for part in module.modules()]
    changed = module.training != (mode == "train")
    try:
        if changed:
            module.train(mode == "train")
        yield
    finally:
        if changed:
            module.train(mode != "train")
        for part, training in was:
            part.training = training


@contextmanager
def _own_generators(device: torch.device) -> Iterator[None]:
    """torch's generators with a fixed seed, so that a trial ends the same every time; put back afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(SEED)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(SEED)
        yield


def _drawn_so_far(device: torch.device) -> list[Tensor]:
    """State of the generators that a module may draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


# -- random tensors


def _small(dim: DimSource) -> int:
    """A small size that is not 1, so that broadcasting hides nothing."""
    step = dim.multiple_of
    least = -(-max(dim.min, 3) // step) * step
    return least if least <= dim.max else dim.max // step * step


def _random(
    spec: TensorSpec, dims: Mapping[str, int], generator: torch.Generator, device: torch.device, extra: int
) -> Tensor:
    shape, dtype = [*[2] * extra, *[evaluate(s, dims) for s in spec.shape]], getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randn(shape, generator=generator).to(device, dtype)


def _like(value: Tensor, generator: torch.Generator) -> Tensor:
    """Of the same kind: matrices scaled so that sums stay near 1, vectors positive (scales, variances)."""
    if not value.is_floating_point():
        return value.clone()
    drawn = torch.randn(value.shape, generator=generator)
    if value.dim() < 2:
        made = 1.0 + 0.5 * drawn.clamp(-1.5, 1.5)
    else:
        made = drawn / max(1.0, value[0].numel()) ** 0.5
    out = torch.empty_like(value)
    return out.copy_(made)
