"""A share of the cases of bench.products in a process of its own, which tells rows line by line.

    python -m bench.products_worker JOB.json OUT.jsonl

First every implementation is made and compared with float64, beside the other processes; then, when all are
ready, each case is timed with the card for itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import peers
from bench.correct import results, truth
from bench.crew import bounded
from bench.families import SMALL, Case, cases
from bench.measure import Effort, Figures, measured
from bench.peers import REDUCE
from bench.results import device_here, plain
from bench.turns import Turn, guard_tuning
from bench.waterfall import Plans, plans
from bench.worker import Impl
from library.launch import ExternStep
from library.store import Library
from runtime import timing

OWN = "esper-own"
EFFORT = Effort(5, 8, 5, 10, span_ms=80.0)
TINY = Effort(2, 2, 2, 2, span_ms=5.0)
ALONE_S = 60.0
LOOK_ROUNDS = 9  # of every tile, before the quickest is timed


@dataclass
class Ready:
    """A case with what takes part; `own`: kernels of ours by tile, of which the quickest will."""

    case: Case
    args: list[Tensor]
    cotangent: Tensor
    impls: dict[str, Impl] = field(default_factory=dict)
    own: dict[str, Impl] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Share:
    """What one process does."""

    def __init__(self, job: Mapping[str, Any], out: Path) -> None:
        self.folder, self.place, self.out = Path(job["folder"]), Path(job["place"]), out
        self.made = json.loads((self.folder / "products.json").read_text())
        known = {c.name: c for c in cases(tiny=job["tiny"])}
        self.cases = [known[name] for name in job["cases"]]
        self.job, self.device = job, device_here()
        self.card = Turn(self.place / "card")
        self.effort = TINY if job["tiny"] else EFFORT

    def go(self) -> None:
        if self.device.type == "cuda":
            guard_tuning(self.card)
        with self._library() as library:
            ready = [self.prepare(case, library) for case in self.cases]
            self._wait()
            for each in ready:
                with self.card.held():
                    self.tell(each, self._timed_or_why(each))

    def _library(self) -> Library:
        place, trust = self.folder / "library", self.folder / "trust"
        return Library.open(place, trust=trust, roles=(), create=False)

    def _wait(self) -> None:
        (self.place / f"{self.job['at']}.ready").touch()
        while not (self.place / "go").exists():
            time.sleep(0.05)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The card, for what takes much of its memory; what is only kept for later goes back."""
        with self.card.held():
            try:
                yield
            finally:
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    # -- what takes part

    def prepare(self, case: Case, library: Library) -> Ready:
        args = case.block.inputs(case.sizes, self.device)
        with self.held():
            with torch.no_grad():
                out = case.block.fn(*args)
            seeded = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
            cotangent = seeded.to(self.device, out.dtype)
            against = truth(self.folder / f"{case.name}.json", case.block.fn, args, cotangent)
        ready, made = Ready(case, args, cotangent), self.made["cases"][case.name]
        asked: list[tuple[str, Any]] = [("esper-fast", made)]
        asked += [(f"{OWN} {at}", row) for at, row in enumerate(self._sound(case, made.get("tiles", ())))]
        asked += [(name, None) for name in case.impls(self.device.type == "cuda")]
        for name, row in asked:
            try:
                impl = self._peer(name, ready) if row is None else self._ours(row, ready, library)
                with self.held():
                    facts = against.facts(results(impl.fn, impl.args, impl.cotangent))
            except Exception as error:  # one that cannot take part: the others do
                ready.failed[name] = f"{type(error).__name__}: {error}"[:300]
                continue
            impl.facts |= facts
            if not name.startswith(OWN):
                ready.impls[name] = impl
            elif not facts["correct"]:
                ready.failed[name] = facts["why"]
            else:
                ready.own[name] = impl
        return ready

    def _sound(self, case: Case, tiles: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The tiles; those with descriptors only if they ran in a process of their own: what reads outside
        its memory there takes all that a process has on the card with it."""
        risky = [t["artifact"] for t in tiles if t["tile"]["descriptors"] and "artifact" in t]
        if not risky or self.device.type != "cuda":
            return list(tiles)
        job, out = self.place / f"{case.name}.job", self.place / f"{case.name}.ran"
        job.write_text(json.dumps({**self.job, "cases": [case.name], "run": risky}))
        why = bounded([sys.executable, "-m", "bench.products_worker", str(job), str(out)], ALONE_S)
        ran = set(out.read_text().split()) if out.exists() else set()
        return [
            {**t, "why": f"did not run alone: {why}"} if t.get("artifact") in set(risky) - ran else t
            for t in tiles
        ]

    def run_alone(self) -> None:
        """Run each artifact of the job once, and say so."""
        (case,) = self.cases
        args = case.block.inputs(case.sizes, self.device)
        with self._library() as library:
            for artifact in self.job["run"]:
                peers.esper(artifact, library, allow_unvalidated=True)(*args)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                with self.out.open("a", encoding="utf-8") as file:
                    file.write(artifact + "\n")

    def _ours(self, row: Mapping[str, Any], ready: Ready, library: Library) -> Impl:
        if "why" in row:
            raise ValueError(row["why"])
        block = peers.esper(row["artifact"], library, allow_unvalidated=True)
        wide = {"tile": row["tile"]} if "tile" in row else {}
        facts = {"artifact": row["artifact"], "compile_s": row["compile_s"], **wide}
        found = plans(block, ready.args)
        facts["counts"] = {p: _counts(found, p) for p in _phases(ready.case)}
        return Impl(block, ready.args, ready.cotangent, facts)

    def _peer(self, name: str, ready: Ready) -> Impl:
        args, cotangent = peers.tensors(name, ready.args, ready.cotangent)
        fn, seconds = peers.peer(name, ready.case.block, args, cotangent)
        if name in peers.OWN_TENSORS:  # what it wrote into them is undone before results are compared
            args, cotangent = peers.tensors(name, ready.args, ready.cotangent)
        return Impl(fn, args, cotangent, {"compile_s": seconds})

    # -- what is found

    def _timed_or_why(self, ready: Ready) -> list[dict[str, Any]]:
        try:
            return self.timed(ready)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:300]
            return [self._row(ready, "esper-fast", _phases(ready.case)[-1], "plain", {"why": why})]

    def timed(self, ready: Ready) -> list[dict[str, Any]]:
        if time.monotonic() > self.job["end"]:
            return [self._row(ready, "esper-fast", "fb", "plain", {"why": "no time was left to measure"})]
        impls = dict(ready.impls)
        if ready.own:
            impls[OWN] = self._quickest(ready)
        rows: list[dict[str, Any]] = []
        for phase in _phases(ready.case):
            work = {name: impl.steps(phase) for name, impl in impls.items()}
            found = measured(work, self.effort, self.device, phase, graphs=(REDUCE,))
            rows += self._rows(ready, impls, phase, "plain", found)
            if self.device.type == "cuda" and ready.case.family == SMALL:
                rows += self._rows(ready, impls, phase, "graphed", found.graphed((REDUCE,)))
        lost = [(n, w) for n, w in ready.failed.items() if not n.startswith(OWN)]
        last = _phases(ready.case)[-1]
        return [*rows, *(self._row(ready, n, last, "plain", {"correct": False, "why": w}) for n, w in lost)]

    def _quickest(self, ready: Ready) -> Impl:
        """The kernel of ours that a short look finds quickest; its facts say among how many."""
        work = {name: impl.steps("f") for name, impl in ready.own.items()}
        with torch.no_grad():
            if self.device.type == "cuda":
                found = timing.device_times(work, rounds=LOOK_ROUNDS, graph=False)
            else:
                found = timing.cpu_times(work, rounds=2)
        best = min(found, key=lambda name: found[name].median)
        refused = [w for n, w in ready.failed.items() if n.startswith(OWN)]
        looked = [{**ready.own[n].facts["tile"], "us": t.median} for n, t in found.items()]
        ready.own[best].facts |= {"tried": len(found), "refused": refused, "looked": looked}
        return ready.own[best]

    def _rows(
        self, ready: Ready, impls: Mapping[str, Impl], phase: str, mode: str, found: Figures
    ) -> list[dict[str, Any]]:  # fmt: skip
        rows = [
            self._row(ready, name, phase, mode, {**i.facts, **found.row(name)}) for name, i in impls.items()
        ]
        return [r for r in rows if mode == "plain" or r["wall_ms"] is not None]

    def _row(
        self, ready: Ready, impl: str, phase: str, mode: str, facts: Mapping[str, Any]
    ) -> dict[str, Any]:  # fmt: skip
        case = ready.case
        counted = facts.get("counts", {}).get(phase, {})
        base = {
            "case": case.name, "family": case.family, "block": case.block.name, "size": case.size,
            "dtype": "bfloat16", "phase": phase, "mode": mode, "impl": impl, "correct": False,
            "wall_ms": None, "dev_ms": None,
        }  # fmt: skip
        kept = {k: v for k, v in facts.items() if k != "counts"}
        flops = case.block.flops(case.sizes) * (1.0 if phase == "f" else 1.0 + case.block.backward)
        dev = kept.get("dev_ms")
        return {**base, **kept, **counted, "TFLOPs": flops / dev / 1e9 if dev else None}

    def tell(self, ready: Ready, rows: list[dict[str, Any]]) -> None:
        with self.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(plain(row)) + "\n" for row in rows)


def _phases(case: Case) -> tuple[str, ...]:
    return ("f", "fb") if case.trains else ("f",)


def _counts(found: Plans, phase: str) -> dict[str, int]:
    """Kernels and library calls of a phase."""
    needed = ("inference",) if phase == "f" else ("forward", "backward")
    steps = [s for name in needed for s in found.plan(name).steps]
    externs = sum(isinstance(s, ExternStep) for s in steps)
    return {"kernels": len(steps) - externs, "externs": externs}


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if device_here().type == "cpu":
        torch.set_num_threads(1 if job["tiny"] else torch.get_num_threads())
    share = Share(job, Path(sys.argv[2]))
    (share.run_alone if "run" in job else share.go)()
    return 0


if __name__ == "__main__":
    sys.exit(main())
