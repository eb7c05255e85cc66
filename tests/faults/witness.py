"""Whether a mutant is a fault at all: an input, inside what the blueprint declares, for which it gives
another number than the clean artifact, and one that is wrong by the rule of docs/bounds.md.

Some changes of a kernel change nothing: |x| in the place of x where only tanh(x)^2 is used. No judge can
refuse such a mutant, and refusing it would be wrong. So a mutant that was not refused is run beside the
clean artifact on many draws. They are made here, and share nothing with the battery of the judge: sizes over
the whole declared range, and for every tensor by itself one of `HOW`. Where a number differs the rule is
asked, of the mutant and of the clean artifact on the same values: refused where the clean one is right, the
mutant counts as a fault that was missed. Only where that never happens, in `DRAWS` draws with all plans, it
does not count; the results file lists it. A factor of 1 + 2e-6 on eight of the 72 terms of a sum is such a
mutant: another order of the sum does as much.

What a mutant does beside its numbers (memory it may not touch, time, threads) is no matter of this search:
its class says so (`FaultClass.by_value`), and is always counted.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper_ir import oracle
from esper_ir.diagnostics import EsperError
from esper_ir.types import TensorType
from gauntlet.inputs import COTANGENT
from gauntlet.isolate import FINISHED, ForkServer, Limits
from gauntlet.jobs import decode_job, encode_job
from gauntlet.judge import settle
from gauntlet.stage import Context, Failed, Recipe, Sweep
from gauntlet.stages import gradients, numerics
from gauntlet.subject import Subject
from library.launch import Plan
from library.manifest import unpack

DRAWS, ELEMENTS = 1500, 1 << 18
"""Draws until a mutant is taken for the same; elements of the largest tensor of one."""
FEW = (-1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0)


def _bits(shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Every finite number of the type is as likely as any other."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    info = torch.iinfo(whole)
    drawn = torch.randint(info.min, info.max, tuple(shape), generator=rng, dtype=whole).view(dtype)
    return torch.nan_to_num(drawn, nan=0.0, posinf=0.0, neginf=-0.0)


def _scaled(shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Normal, of one size between 2^-12 and 2^8."""
    scale = 2.0 ** (20 * float(torch.rand((), generator=rng)) - 12)
    return (torch.randn(tuple(shape), generator=rng) * scale).to(dtype)


def _few(shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    places = torch.randint(0, len(FEW), tuple(shape), generator=rng)
    return torch.tensor(FEW, dtype=dtype)[places]


def _alike(shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """One number everywhere."""
    return torch.randn((), generator=rng).to(dtype).expand(tuple(shape)).contiguous()


def _whole(shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Whole numbers of one sign, from 8 to 12 times a power of two: sums of them are exact."""
    sign, power = (int(torch.randint(0, n, (), generator=rng)) for n in (2, 8))
    drawn = torch.randint(8, 13, tuple(shape), generator=rng)
    return (drawn * (1 - 2 * sign) * 2.0 ** (power - 6)).to(dtype)


def _infinite(shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Normal, some of it infinite."""
    drawn = torch.randn(tuple(shape), generator=rng)
    return torch.where(drawn.abs() > 2.5, drawn * math.inf, drawn).to(dtype)


Draw = Callable[[Sequence[int], torch.dtype, torch.Generator], Tensor]
HOW: Mapping[str, Draw] = {
    "bits": _bits, "scaled": _scaled, "few": _few, "alike": _alike, "infinite": _infinite, "whole": _whole,
}  # fmt: skip
WEIGHTS = (3, 4, 2, 2, 1, 2)


@dataclass(frozen=True)
class Seen:
    """`place`: the draw that tells a mutant from the clean artifact, or how the search ended; empty when all
    draws give the same numbers. `fault`: whether the rule refuses the mutant there."""

    place: str
    fault: bool


@dataclass(frozen=True)
class Draws:
    """The tensors of one draw by number, of leaves and of cotangents, and what they were."""

    leaves: tuple[Tensor, ...]
    flowing: tuple[Tensor, ...]
    place: str


def drawn(subject: Subject, seed: int) -> Draws:
    """The same for the same seed."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dims: dict[str, int] = {}
    for dim in subject.launch.interface.dims:
        low, most = max(dim.min, 1), max(dim.max, 1)
        while most > low and subject.elements({**subject.least_dims(), **dims, dim.name: most}) > ELEMENTS:
            most = max(most // 2, low)
        dims[dim.name] = subject.nearest(
            dim.name, round(math.exp(rng.uniform(math.log(low), math.log(most))))
        )
    limits = oracle.index_limits(subject.graph)
    names: list[str] = []

    def tensor(name: str, kind: TensorType) -> Tensor:
        if not kind.dtype.is_floating:
            return oracle.draw("normal", kind, dims, generator, limits.get(name)).to(subject.device)
        how = rng.choices(list(HOW), WEIGHTS)[0]
        names.append(f"{name} {how}")
        shape = [d.value(dims) for d in kind.shape]
        return HOW[how](shape, getattr(torch, kind.dtype.value), generator).to(subject.device)

    leaves = tuple(tensor(name, kind) for name, _, kind in subject.leaves)
    flowing = tuple(tensor(f"d({name})", kind) for name, _, kind in subject.results)
    return Draws(leaves, flowing, f"{dims}, {', '.join(names)}")


def numbers(subject: Subject, draws: Draws) -> list[tuple[str, list[Tensor]]]:
    """(plan, results) of every plan that serves these sizes."""
    dims = subject.program.dims_of([t.shape for t in draws.leaves])
    named = dict(zip(subject.program.dim_names, dims, strict=True))
    out: list[tuple[str, list[Tensor]]] = []
    saved: list[Tensor] = []

    def ran(plan: Plan, feeds: Sequence[Tensor]) -> list[Tensor]:
        found = subject.program.run(plan, [t.clone() for t in feeds], dims=dims)
        out.append((f"{plan.phase} {' '.join(plan.wanted)}", found))
        return found

    for phase in ("inference", "forward", "backward"):
        for plan in subject.plans(phase, named):
            found = ran(plan, [*saved, *draws.flowing] if phase == "backward" else draws.leaves)
            saved = found[len(plan.outputs) :] if phase == "forward" else saved
    return out


def other(a: Tensor, b: Tensor) -> bool:
    """Whether some element is another number; NaN is NaN, and zeros have no sign."""
    return bool(((a != b) & ~((a != a) & (b != b))).any())


def search(arguments: int, result: int, spill: int) -> None:
    """A worker: the mutant is the artifact of the job, the clean artifact lies in the place of the case."""
    job, clean, mutant = decode_job(os.pread(arguments, os.fstat(arguments).st_size, 0))
    device = settle(job["device"])
    torch.set_num_threads(1)
    right, changed = (Subject(unpack(data), device) for data in (clean, mutant))

    def say(**event: object) -> None:
        os.write(result, json.dumps(event).encode() + b"\n")

    say(event="launch", limit=job["seconds"])
    near = ""
    for turn in range(job["draws"]):
        draws = drawn(right, job["seed"] + turn)
        first, second = numbers(right, draws), _numbers(changed, draws)
        plans = [
            plan for (plan, known), (_, found) in zip(first, second or first, strict=True)
            if second is None or any(other(a, b) for a, b in zip(known, found, strict=True))
        ]  # fmt: skip
        place = f"draw {turn}: {plans[0] if plans else ''}, {draws.place}"
        if plans and (second is None or beyond(right, changed, draws, turn)):
            say(event="landed")
            say(event="witness", place=place, fault=True)
            say(event="done")
            return
        near = near or (place if plans else "")
    say(event="landed")
    if near:
        say(event="witness", place=near, fault=False)
    say(event="done")


def beyond(clean: Subject, mutant: Subject, draws: Draws, turn: int) -> bool:
    """Whether the rule of docs/bounds.md refuses the mutant for some results of this draw, and not the clean
    artifact."""
    sizes = clean.program.dims_of([t.shape for t in draws.leaves])
    dims = dict(zip(clean.program.dim_names, sizes, strict=True))
    stored = {name: t for (name, _, _), t in zip(clean.leaves, draws.leaves, strict=True)}
    flowing = {COTANGENT + n: t for (n, _, _), t in zip(clean.results, draws.flowing, strict=True)}
    one = Recipe("numerics", dims, "far", seed=turn)
    checks = [(numerics.STAGE, one)]
    for plan in clean.plans("backward", dims):
        checks.append((gradients.STAGE, replace(one, cotangent="normal", wanted=plan.wanted)))
    for subject in (clean, mutant):
        subject.stored = {**stored, **flowing}

    def wrong(subject: Subject, stage: Sweep, recipe: Recipe) -> bool:
        return isinstance(stage.check(Context(subject, lambda event: None), recipe), Failed)

    return any(wrong(mutant, *check) and not wrong(clean, *check) for check in checks)


def _numbers(subject: Subject, draws: Draws) -> list[tuple[str, list[Tensor]]] | None:
    """None where the mutant is refused for a call that the clean artifact answers."""
    try:
        return numbers(subject, draws)
    except EsperError:
        return None


def find(
    clean: bytes, mutant: bytes, device: str, server: ForkServer, *, seed: int = 0, draws: int = DRAWS
) -> Seen:
    """What tells them apart. The server must be allowed to run `tests`."""
    job = {"device": device, "seed": 7_000_003 * (seed + 1), "draws": draws, "seconds": 1800.0}
    limits = Limits(seconds=2400.0, address_space=device == "cpu")
    ending = server.run("tests.faults.witness:search", encode_job(job, mutant, clean), limits)
    if ending.kind != FINISHED:
        return Seen(f"{ending.kind}: {ending.detail}", True)
    seen = ending.last("witness")
    return Seen(str(seen["place"]), bool(seen["fault"])) if seen else Seen("", False)
