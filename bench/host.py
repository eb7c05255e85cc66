"""Host time of one block under autograd, alone and as one of sixteen more in a stack, beside torch's own
floor.

The block is `softmax(relu(x * w) + x) * w` on 4096 numbers, small enough that the device never waits for
work. The forge may fuse it to one kernel each way; beside the artifact as it is, one with exactly three
launches each way (`bench.prepare.compile_repeated`) goes through the same path of the runtime. All variants
are interleaved round by round, and ratios are taken inside a round.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bench import peers
from bench.measure import DEPTH
from bench.prepare import HOST_BLOCK, HOST_STEPS, REPEATED
from bench.results import figure
from library.store import Library
from runtime import timing
from runtime.binding import Block as Native
from runtime.loader import UnvalidatedWarning
from runtime.timing import Timing

Step = Callable[[Tensor, Tensor], Tensor]
CALLS = 20
MUL, COMPILE, EAGER = "aten mul", "torch.compile", "eager"
FUSED, THREE = "esper", "esper 3+3"
OPERATOR = "esper 3+3, operator"
THREADS = {"own": True, "caller": False}
RATIO_COMPILE, RATIO_MUL, CALL_US = 0.5, 1.8, 12.0


def block_fn(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.relu(x * w) + x, -1) * w


def variants(library: Library, ids: Mapping[str, str], notes: list[str]) -> dict[str, Step]:
    """Steps by name; what cannot be built here is noted and left out."""
    found: dict[str, Step] = {MUL: lambda h, w: h * w, EAGER: block_fn}
    warnings.simplefilter("ignore", UnvalidatedWarning)
    try:
        compiled = torch.compile(block_fn, dynamic=False)
        x, w = leaves(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        torch.autograd.grad(compiled(x, w).sum(), (x, w))
        found[COMPILE] = compiled
    except Exception as error:
        notes.append(f"torch.compile: {str(error)[:200]}")
    for name, key, options in (
        (FUSED, HOST_BLOCK.stem, {}),
        (THREE, REPEATED, {}),
        (OPERATOR, REPEATED, {"dispatch": "op"}),
    ):
        try:
            # Unproven: the gauntlet cannot judge this block (it would not notice a zero dx). `wrong`
            # compares instead.
            found[name] = peers.esper(ids[key], library, allow_unvalidated=True, **options)
        except Exception as error:
            notes.append(f"{name}: {str(error)[:200]}")
    return found


def leaves(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(1, 4096, generator=generator).to(device).requires_grad_() for _ in range(2))
    return x, w


def wrong(steps: Mapping[str, Step], x: Tensor, w: Tensor) -> list[str]:
    """Variants of the block whose result or gradients are off."""
    flow = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.device)
    wanted = [block_fn(x, w), *torch.autograd.grad(block_fn(x, w), (x, w), flow)]
    bad = []
    for name, step in steps.items():
        out = step(x, w)
        got = [out, *torch.autograd.grad(out, (x, w), flow)]
        if name != MUL and not all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(got, wanted, strict=True)
        ):
            bad.append(name)
    return bad


def stacked(step: Step, x: Tensor, w: Tensor, flow: Tensor, depth: int) -> Callable[[], Any]:
    def run() -> Any:
        h = x
        for _ in range(depth):
            h = step(h, w)
        return torch.autograd.grad(h, (x, w), flow)

    return run


def measure(
    library: Library, ids: Mapping[str, str], rounds: int = 30, seconds: float = 80.0
) -> dict[str, Any]:
    """Rows and figures; rounds end early when `seconds` are over, at the end of a batch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    notes: list[str] = []
    x, w = leaves(device)
    steps = variants(library, ids, notes)
    bad = wrong(steps, x, w)
    flow = torch.randn_like(x)
    work = {(n, d): stacked(s, x, w, flow, d) for n, s in steps.items() for d in (1, DEPTH)}
    samples: dict[str, dict[Any, list[float]]] = {where: {key: [] for key in work} for where in THREADS}
    limit, batch = time.monotonic() + seconds, max(1, rounds // 10)
    done = 0
    while done < rounds and (time.monotonic() < limit or not done):
        for where, threaded in THREADS.items():
            with torch.autograd.set_multithreading_enabled(threaded):
                found = timing.host_times(work, calls=CALLS, rounds=batch)
            for key, timed in found.items():
                samples[where][key].extend(timed.samples)
        done += batch
    calls = _no_grad(steps, x.detach(), w.detach())
    marginals = {where: _marginals(steps, by_key) for where, by_key in samples.items()}
    rows = [
        _row(name, where, samples[where][name, 1], marginals[where][name], calls[name], name not in bad)
        for where in THREADS
        for name in steps
    ]
    launches = {n: _launches(s, x, w) for n, s in steps.items() if isinstance(s, Native)}
    return {
        "rows": rows,
        "figures": _figures(marginals, calls),
        "notes": notes,
        "launches": launches,
        "rounds": done,
    }


def _marginals(steps: Mapping[str, Step], by_key: Mapping[Any, list[float]]) -> dict[str, list[float]]:
    """Per round what one of the sixteen further blocks costs."""
    return {
        n: [(deep - one) / (DEPTH - 1) for one, deep in zip(by_key[n, 1], by_key[n, DEPTH], strict=True)]
        for n in steps
    }


def _no_grad(steps: Mapping[str, Step], x: Tensor, w: Tensor) -> dict[str, Timing]:
    with torch.no_grad():
        return timing.host_times({n: (lambda s=s: s(x, w)) for n, s in steps.items()}, calls=200, rounds=15)


def _launches(step: Native, x: Tensor, w: Tensor) -> dict[str, int]:
    """Counted, not believed: launches of one call without gradients and of one forward with backward."""
    before = step.report()["counters"]["launches"]
    with torch.no_grad():
        step(x, w)
    between = step.report()["counters"]["launches"]
    torch.autograd.grad(step(x, w).sum(), (x, w))
    return {"no_grad": between - before, "fb": step.report()["counters"]["launches"] - between}


def _row(
    name: str, where: str, one: list[float], marginal: list[float], call: Timing, right: bool
) -> dict[str, Any]:
    alone, stack = Timing(tuple(one)), Timing(tuple(marginal))
    return {
        "block": HOST_BLOCK.stem, "size": "1x4096", "dtype": "float32", "phase": "fb", "mode": "stack16",
        "impl": name, "backward_thread": where, "wall_ms": None, "dev_ms": None, "correct": right,
        "host_us": stack.median, "host_lo": stack.low, "host_hi": stack.high, "host_iqr": stack.iqr,
        "alone_us": alone.median, "no_grad_us": call.median, "no_grad_lo": call.low, "no_grad_hi": call.high,
    }  # fmt: skip


def ratio(ours: list[float], theirs: list[float]) -> Timing:
    """Per round; a round in which the reference came out at nothing is left out."""
    return Timing(tuple(a / b for a, b in zip(ours, theirs, strict=True) if b > 0))


def _ratios(where: str, by_name: Mapping[str, list[float]]) -> dict[str, Any]:
    """Marginal cost of each of our paths over torch.compile's and over one aten mul's, measured beside it."""
    found: dict[str, Any] = {}
    paths = ((THREE, "function"), (OPERATOR, "operator"), (FUSED, "fused"))
    ours = [row for row in paths if row[0] in by_name]
    peers = ((COMPILE, RATIO_COMPILE, "compile"), (MUL, RATIO_MUL, "mul"))
    others = [row for row in peers if row[0] in by_name]
    for (path, label), (other, target, label_other) in itertools.product(ours, others):
        got = ratio(by_name[path], by_name[other])
        gate = path == THREE and where == "own" and torch.cuda.is_available()
        found[f"host_marginal_{label}_over_{label_other}_{where}_thread"] = figure(
            got.median, "ratio", target if gate else None, lo=got.low, hi=got.high
        )
    return found


def _figures(
    marginals: Mapping[str, Mapping[str, list[float]]], calls: Mapping[str, Timing]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for where, by_name in marginals.items():
        found |= _ratios(where, by_name)
        if THREE in by_name:
            marginal = Timing(tuple(by_name[THREE]))
            found[f"host_marginal_us_{where}_thread"] = figure(
                marginal.median, "us", lo=marginal.low, hi=marginal.high
            )
    for name, label in ((THREE, "no_grad_call"), (OPERATOR, "no_grad_call_operator")):
        if name in calls:
            target = CALL_US if name == THREE and torch.cuda.is_available() else None
            found[f"{label}_us"] = figure(
                calls[name].median, "us", target, lo=calls[name].low, hi=calls[name].high
            )
    found["launches_each_way"] = figure(HOST_STEPS, "launches")
    return found
