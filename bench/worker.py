"""One block at one size in a process of its own, which writes what it found line by line, so that a peer
that hangs or crashes takes nothing else with it.

    python -m bench.worker JOB.json OUT.jsonl

A job is done twice. `prepare`: every implementation is compiled into the caches and compared with float64,
beside the other jobs of a run. `measure`: all of them from the caches, with the card for itself.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import peers, waterfall
from bench.blocks import Block, Sizes, named
from bench.correct import Truth, digest, results, truth
from bench.measure import DEPTH, Effort, Figures, marginal, measured, steps
from bench.peers import OURS
from bench.results import device_here, plain
from bench.turns import Turn, bounded, guard_tuning
from library.store import Library
from runtime.binding import Block as Native

STACK_BYTES = 256 << 20  # inputs above this are not stacked: seventeen graphs of every peer must fit
CACHED_S = 45.0  # for what should only have to be read from a cache


@dataclass
class Impl:
    """What is measured: a function, the tensors it is called with, and what is known about it."""

    fn: peers.Fn
    args: list[Tensor]
    cotangent: Tensor
    facts: dict[str, Any] = field(default_factory=dict)

    def steps(self, phase: str, depth: int = 1) -> Callable[[], Any]:
        return steps(self.fn, self.args, self.cotangent, depth)[phase]


class Work:
    """One job: what is compared, and where lines go."""

    def __init__(self, job: dict[str, Any], out: Path) -> None:
        self.block: Block = named(job["block"])
        self.sizes: Sizes = job["sizes"]
        self.device = device_here()
        self.effort = Effort(**job["effort"])
        self.rates: dict[str, float] = job["ceilings"]
        self.out, self.job = out, job
        self.card = Turn(Path(job["card_lock"])) if job.get("card_lock") else None
        self.args = self.block.inputs(self.sizes, self.device)
        self.cotangent = self._cotangent()
        self.impls: dict[str, Impl] = {}

    def _cotangent(self) -> Tensor:
        with torch.no_grad():
            out = self.block.fn(*self.args)
        return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(self.device, out.dtype)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The card, for as long as something is timed on it or takes much of its memory."""
        with self.card.held() if self.card else nullcontext():
            try:
                yield
            finally:
                self.release()

    def release(self) -> None:
        """Memory that is only kept for later goes back: other processes are on the card."""
        if self.device.type == "cuda" and self.job["do"] == "prepare":
            torch.cuda.empty_cache()

    def tell(self, kind: str, **fields: Any) -> None:
        line = json.dumps(plain({"kind": kind, **fields}))
        with self.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def base(self, impl: str, phase: str) -> dict[str, Any]:
        flops = self.rates.get("bf16_TFLOPs", self.rates.get("fp32_TFLOPs", 0.0)) * 1e12
        floor = self.block.floor_ms(self.sizes, phase, self.rates["copy_TBps"] * 1e12, flops)
        label = self.block.size_label(self.sizes)
        row = {"block": self.block.name, "size": label, "dtype": self.block.leaves[0].dtype}
        facts = dict(self.impls[impl].facts) if impl in self.impls else {}
        counted = facts.pop("phases", {}).get(phase, {})
        return {**row, "phase": phase, "impl": impl, "floor_ms": floor, **facts, **counted}

    def lost(self, impl: str, why: str) -> None:
        nothing = {"mode": "plain", "wall_ms": None, "dev_ms": None, "correct": False, "why": why}
        for phase in ("f", "fb"):
            self.tell("row", **{**self.base(impl, phase), **nothing})

    # -- what takes part

    def add(self, name: str, library: Library) -> str:
        """The name under which it takes part; "" when it cannot, which is told."""
        try:
            impl, made = self._esper(library) if name == OURS else (name, self._peer(name))
        except Exception as error:
            self.lost("esper-fast" if name == OURS else name, _reason(error))
            return ""
        self.impls[impl] = made
        return impl

    def _esper(self, library: Library) -> tuple[str, Impl]:
        name = peers.blueprint_id(self.block.blueprint)
        block = peers.esper(name, library, allow_unvalidated=self.job["unproven"])
        report = block.report()
        facts = {
            "artifact": block.artifact_id,
            "proven": report["verdict"] is not None,
            "compile_s": self.job["compiled"].get(block.artifact_id, {}).get("total"),
            "phases": waterfall.counts(waterfall.plans(block, self.args)),
        }
        return f"esper-{report['pipeline']}", Impl(block, self.args, self.cotangent, facts)

    def _peer(self, name: str) -> Impl:
        args, cotangent = peers.tensors(name, self.args, self.cotangent)
        fn, seconds = peers.peer(name, self.block, args, cotangent)
        compiled = name.startswith(peers.COMPILE)
        if name in peers.OWN_TENSORS:  # what it wrote into them is undone before results are compared
            args, cotangent = peers.tensors(name, self.args, self.cotangent)
        return Impl(fn, args, cotangent, {"compile_s": seconds if compiled else 0.0})

    def check(self, against: Truth, name: str) -> None:
        impl = self.impls[name]
        with self.held():
            got = results(impl.fn, impl.args, impl.cotangent)
            impl.facts |= against.facts(got)
        if name.startswith(OURS):
            impl.facts["digests"] = dict(zip(against.names, map(digest, got), strict=True))

    # -- what is found

    def rows(self, mode: str, phase: str, found: Figures) -> None:
        for impl in self.impls:
            facts = self.base(impl, phase)
            if mode != "plain":
                facts.pop("digests", None)
            timed = found.row(impl)
            if mode == "plain" or timed["wall_ms"] is not None:
                self.tell("row", **facts, mode=mode, **timed)

    def measure(self) -> None:
        cuda = self.device.type == "cuda"
        for phase in ("f", "fb"):
            work = {n: impl.steps(phase) for n, impl in self.impls.items()}
            one = self._measured(work, self.effort, phase)
            self.rows("plain", phase, one)
            if cuda and "graphed" in self.job["modes"]:
                self.rows("graphed", phase, one.graphed((peers.REDUCE,)))
            if self.job["stack"] and phase == "fb" and self.block.chains and self._bytes() <= STACK_BYTES:
                fewer = replace(self.effort, repeats=min(5, self.effort.repeats))
                # CUDA graphs of the compiler are one per place in a stack: they are not what is stacked.
                deep = {n: i.steps(phase, DEPTH) for n, i in self.impls.items() if n != peers.REDUCE}
                self.rows("stack16", phase, marginal(one, self._measured(deep, fewer, phase)))
            if cuda:
                torch.cuda.empty_cache()

    def _measured(self, work: dict[str, Callable[[], Any]], effort: Effort, phase: str) -> Figures:
        graphs = peers.uncaptured(self.block)
        return measured(work, effort, self.device, phase, held=self.held, graphs=graphs)

    def waterfall(self) -> None:
        """Every step of ours on its own."""
        ours = next((i for n, i in self.impls.items() if n.startswith(OURS)), None)
        if ours is None or not self.job["waterfall"]:
            return
        assert isinstance(ours.fn, Native)
        effort = replace(self.effort, repeats=3, rounds=min(self.effort.rounds, 7))
        facts = self.job["compiled"].get(ours.fn.artifact_id, {})
        known = facts.get("flops", {}).get(self.block.size_label(self.sizes), {})
        with self.held():
            rows = waterfall.measure(ours.fn, ours.args, ours.cotangent, effort, self.rates, known)
        self.tell("waterfall", rows=rows)

    def _bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.args)


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def prepare(work: Work, library: Library) -> None:
    """Compiles and compares everything, a line as each is ready; what compiles longest comes last. Ours after
    eager, since nothing of it is left to compile: time that ends while a peer compiles is the peer's loss.
    If it brought the card's context down, the others need another process (`without_ours`)."""
    with work.held():
        against = truth(work.block.blueprint, work.block.fn, work.args, work.cotangent)
    for name in order(work.job["impls"], work.job.get("without_ours", False)):
        work.tell("trying", impl=name)
        impl = work.add(name, library)
        if impl:
            work.check(against, impl)
            work.tell("ready", name=name, facts=work.impls[impl].facts)
            del work.impls[impl]  # its memory is for the next
        if name == OURS and not _answers():
            work.tell("card_lost", impl=name)
            return


def order(impls: Sequence[str], without_ours: bool = False) -> tuple[str, ...]:
    """Eager, ours, then what has to be compiled, the longest last; `without_ours`: what comes after it."""
    first = [name for name in impls if name == peers.EAGER]
    rest = sorted((n for n in impls if n != peers.EAGER), key=lambda n: n == peers.MAX)
    return tuple(rest) if without_ours else (*first, OURS, *rest)


def _answers() -> bool:
    """Whether the card still works for this process."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def measure(work: Work, library: Library) -> None:
    """Everything that got ready, in one interleaved measurement."""
    for name, facts in work.job["ready"].items():
        with bounded(CACHED_S):
            impl = work.add(name, library)
        if impl:
            work.impls[impl].facts |= facts
    with _alone(work.job.get("turn_lock")):
        work.measure()
        work.waterfall()


@contextmanager
def _alone(path: str | None) -> Iterator[None]:
    """Only one process of a card measures; those after it get ready meanwhile."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    gc.freeze()  # a collection before every repeat would walk all of the compilers
    with Turn(Path(path)).held() if path else nullcontext():
        yield


def run(job: dict[str, Any], out: Path) -> None:
    begin = time.perf_counter()
    work = Work(job, out)
    if work.card is not None and work.device.type == "cuda":
        guard_tuning(work.card)
    with Library.open(job["library"], create=False, readonly=True) as library:
        {"prepare": prepare, "measure": measure}[job["do"]](work, library)
    work.tell("done", seconds=time.perf_counter() - begin)


def main() -> int:
    job, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    if device_here().type == "cpu":
        torch.set_num_threads(job.get("threads") or torch.get_num_threads())
    try:
        run(job, out)
    except Exception:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": "broke", "why": traceback.format_exc(limit=-4)[-1500:]}) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
