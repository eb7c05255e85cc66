"""Measures one block at one size in a process of its own and writes what it found line by line, so that a
peer that hangs or crashes takes nothing else with it.

    python -m bench.worker JOB.json OUT.jsonl
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import peers, waterfall
from bench.blocks import Block, Sizes, named
from bench.correct import Truth, digest, results, truth
from bench.measure import DEPTH, Effort, Figures, marginal, measured, steps
from bench.results import device_here, plain
from library.store import Library
from runtime.binding import Block as Native

STACK_BYTES = 256 << 20  # inputs above this are not stacked: seventeen graphs of every peer must fit


class Work:
    """One job: what is compared, and where lines go."""

    def __init__(self, job: dict[str, Any], out: Path) -> None:
        self.block: Block = named(job["block"])
        self.sizes: Sizes = job["sizes"]
        self.device = device_here()
        self.effort = Effort(**job["effort"])
        self.rates: dict[str, float] = job["ceilings"]
        self.out, self.job = out, job
        self.args = self.block.inputs(self.sizes, self.device)
        self.cotangent = self._cotangent()
        self.fns: dict[str, peers.Fn] = {}
        self.facts: dict[str, dict[str, Any]] = {}

    def _cotangent(self) -> Tensor:
        with torch.no_grad():
            out = self.block.fn(*self.args)
        return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(self.device, out.dtype)

    def tell(self, kind: str, **fields: Any) -> None:
        line = json.dumps(plain({"kind": kind, **fields}))
        with self.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def base(self, impl: str, phase: str) -> dict[str, Any]:
        flops = self.rates.get("bf16_TFLOPs", self.rates.get("fp32_TFLOPs", 0.0)) * 1e12
        floor = self.block.floor_ms(self.sizes, phase, self.rates["copy_TBps"] * 1e12, flops)
        label = self.block.size_label(self.sizes)
        row = {"block": self.block.name, "size": label, "dtype": self.block.leaves[0].dtype}
        return {**row, "phase": phase, "impl": impl, "floor_ms": floor, **self.facts.get(impl, {})}

    def failed(self, impl: str, why: str) -> None:
        for phase in ("f", "fb"):
            self.tell(
                "row",
                **self.base(impl, phase),
                mode="plain",
                wall_ms=None,
                dev_ms=None,
                correct=False,
                why=why,
            )

    # -- what takes part

    def add_esper(self, library: Library) -> Native | None:
        try:
            block = peers.esper(
                peers.blueprint_id(self.block.blueprint), library, allow_unvalidated=self.job["unproven"]
            )
        except Exception as error:
            self.failed("esper-fast", _reason(error))
            return None
        impl = f"esper-{block.report()['pipeline']}"
        self.fns[impl] = block
        ready = waterfall.plans(block, self.args)
        for phase, counted in waterfall.counts(ready).items():
            self.facts.setdefault(impl, {})[phase] = counted
        compiled = self.job["compiled"].get(block.artifact_id, {})
        self.facts[impl] = {
            "artifact": block.artifact_id,
            "proven": block.report()["verdict"] is not None,
            "compile_s": compiled.get("total"),
            **self.facts[impl],
        }
        return block

    def add_peer(self, name: str) -> bool:
        try:
            fn, seconds = peers.peer(name, self.block, self.args, self.cotangent)
        except Exception as error:
            self.failed(name, _reason(error))
            return False
        self.fns[name] = fn
        self.facts[name] = {"compile_s": seconds if name in peers.COMPILE_OPTIONS else 0.0}
        return True

    # -- what is found

    def check(self, against: Truth, impls: list[str]) -> None:
        for impl in impls:
            got = results(self.fns[impl], self.args, self.cotangent)
            why = against.why_wrong(got)
            self.facts[impl] |= {"correct": not why, **({"why": why} if why else {})}
            if impl.startswith("esper"):
                named_digests = dict(zip(against.names, map(digest, got), strict=True))
                self.facts[impl]["digests"] = named_digests

    def rows(self, mode: str, phase: str, found: Figures) -> None:
        for impl in self.fns:
            facts = self.base(impl, phase)
            counted = facts.pop(phase, None) or {}
            facts = {k: v for k, v in facts.items() if k not in ("f", "fb")}
            if mode != "plain":
                facts = {k: v for k, v in facts.items() if k != "digests"}
            self.tell("row", **facts, **counted, mode=mode, **found.row(impl))

    def measure(self) -> None:
        stacked = self.block.chains and self.job["stack"] and self._bytes() <= STACK_BYTES
        for phase in ("f", "fb"):
            work = {n: steps(fn, self.args, self.cotangent)[phase] for n, fn in self.fns.items()}
            one = measured(work, self.effort, self.device, phase)
            self.rows("plain", phase, one)
            if stacked and phase == "fb":
                fewer = replace(
                    self.effort,
                    repeats=min(5, self.effort.repeats),
                    rounds=min(6, self.effort.rounds),
                    host_calls=5,
                    host_rounds=min(7, self.effort.host_rounds),
                )
                deep = {n: steps(fn, self.args, self.cotangent, DEPTH)[phase] for n, fn in self.fns.items()}
                self.rows("stack16", phase, marginal(one, measured(deep, fewer, self.device, phase)))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.args)


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def run(job: dict[str, Any], out: Path) -> None:
    begin = time.perf_counter()
    work = Work(job, out)
    with Library.open(job["library"], create=False, readonly=True) as library:
        native = work.add_esper(library)
        late = [n for n in job["impls"] if n == peers.MAX]
        for name in job["impls"]:
            if name not in late:
                work.add_peer(name)
        against = truth(work.block.blueprint, work.block.fn, work.args, work.cotangent)
        work.check(against, list(work.fns))
        work.measure()
        if native is not None:
            rates = work.rates["copy_TBps"] * 1e12
            effort = replace(work.effort, repeats=3)
            work.tell("waterfall", rows=waterfall.measure(native, work.args, work.cotangent, effort, rates))
        # The peer that may take minutes comes last; when it is there, all are measured again beside it.
        for name in late:
            work.tell("trying", impl=name)
            if work.add_peer(name):
                work.check(against, [name])
                work.measure()
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
