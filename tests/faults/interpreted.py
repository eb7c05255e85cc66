"""Faults in Triton text, run through Triton's interpreter on the processor, and races between programs.

    TRITON_INTERPRET=1 python -m tests.faults.interpreted BLOCK ROWS CLASS...

Prints JSON: for the clean block (kind "") and for the first mutants of each class whether a result was wrong,
and how many addresses one program of a launch wrote that another one of the same launch wrote or read.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import triton.runtime.interpreter as engine

from esper_ir import text
from esper_ir.discover import collect
from forge.emit.triton import emit
from forge.package import interface_of
from forge.pipelines import FAST
from forge.service import front
from library.launch import Buffer, KernelStep, LaunchManifest, Plan, to_json
from tests.faults import classes, corpus
from tests.faults.fault import FaultClass, Mutant
from tests.forge.interpreted import Interpreter, load_kernel
from tests.forge.whole import Sizes, Tensors, close, compared, pick

MOST = 2
"""Mutants of each class."""
FENCE = 1024
"""Elements before and behind a buffer: several rows."""


@dataclass(frozen=True, eq=False)
class Plain(corpus.Block):
    """A block that was not assembled: its manifest is made from the plans."""

    @property
    def manifest(self) -> dict[str, Any]:
        work = self.work
        assert work.graph is not None and work.joint is not None
        interface = interface_of(work.blueprint, work.graph.types, tuple(work.joint.gradients))
        plans = tuple(low.plan for low in work.lowerings)
        return {"launch": json.loads(json.dumps(to_json(LaunchManifest(interface, plans, ()))))}


def block(name: str) -> Plain:
    data = next(d for d in corpus.blueprints() if d["name"] == name)
    work = front(text.parse(json.dumps(data)), "h100", FAST.name)
    texts = {s.plan.name: emit(s.plan, interpreted=True) for s in work.kernels.by_key.values()}
    return Plain(name, "triton", texts, "", b"", work)


class Watched:
    """Who wrote and read which address in one launch."""

    def __init__(self) -> None:
        self.written: dict[int, tuple[int, ...]] = {}
        self.read: dict[int, set[tuple[int, ...]]] = {}
        self.races = 0
        builder = engine.interpreter_builder
        self._load, self._store = builder.create_masked_load, builder.create_masked_store
        builder.create_masked_load, builder.create_masked_store = self.load, self.store

    def launch(self) -> None:
        """What follows is another launch: the one before is over."""
        self.written, self.read = {}, {}

    @staticmethod
    def _addresses(ptrs: Any, mask: Any) -> list[int]:
        chosen = numpy.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
        return [int(a) for a in ptrs.data[chosen].reshape(-1)]

    def load(self, ptrs: Any, mask: Any, *rest: Any) -> Any:
        me = tuple(engine.interpreter_builder.grid_idx)
        for at in self._addresses(ptrs, mask):
            self.races += self.written.get(at, me) != me
            self.read.setdefault(at, set()).add(me)
        return self._load(ptrs, mask, *rest)

    def store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        me = tuple(engine.interpreter_builder.grid_idx)
        for at in self._addresses(ptrs, mask):
            self.races += self.written.get(at, me) != me or bool(self.read.get(at, set()) - {me})
            self.written[at] = me
        return self._store(ptrs, value, mask, *rest)


class Machine(Interpreter):
    """Runs a block with the text of one kernel exchanged. Around every buffer lies NaN (or 1), so that what
    is read there shows in a result; what is written there is a wrong result."""

    def __init__(self, made: Plain, watched: Watched, changed: Mapping[str, str]) -> None:
        super().__init__(made.work)
        self.watched = watched
        self.fences: list[torch.Tensor] = []
        self.made = {n: load_kernel(t, n) for n, t in {**made.texts, **changed}.items()}

    def run(self, plan: Plan, given: Tensors, dims: Sizes) -> list[torch.Tensor]:
        self.fences = []
        memory = super().run(plan, given, dims)
        assert all(bool(torch.all(f.isnan() if f.is_floating_point() else f == 1)) for f in self.fences)
        return memory

    def memory(self, buffer: Buffer, given: Tensors, dims: Sizes) -> torch.Tensor:
        value = super().memory(buffer, given, dims)
        around = torch.ones(value.numel() + 2 * FENCE, dtype=value.dtype)
        around = around * math.nan if value.is_floating_point() else around
        front, held, back = around.split([FENCE, value.numel(), FENCE])
        self.fences += [front, back]
        return held.copy_(value.reshape(-1)).view(value.shape)

    def launch(self, step: KernelStep, memory: list[torch.Tensor], dims: Sizes) -> None:
        self.watched.launch()
        super().launch(step, memory, dims)


def judged(made: Plain, watched: Watched, dims: Sizes, mutant: Mutant | None) -> dict[str, Any]:
    """Whether any result is wrong, or an input was written; and the races."""
    before = watched.races
    try:
        machine = Machine(made, watched, {mutant.kernel: mutant.text} if mutant else {})
        found, wide, eager = compared(made.work, machine, dims)
        wrong = not all(close(v, wide[n], eager[n]) for n, v in found.items())
    except AssertionError:
        wrong = True
    told = {"kind": mutant.kind, "place": mutant.place} if mutant else {"kind": "", "place": ""}
    return {**told, "wrong": wrong, "races": watched.races - before}


def main(name: str, rows: int, kinds: list[str]) -> list[dict[str, Any]]:
    made, watched, dims = block(name), Watched(), {"rows": rows}
    known: dict[str, FaultClass] = collect(classes, "CLASSES")
    lows = [pick(made.work, phase, dims) for phase in ("inference", "forward")]
    lows.append(
        pick(made.work, "backward", dims, frozenset(made.work.joint.gradients if made.work.joint else ()))
    )
    runnable = {s.variants[-1].kernel for low in lows for s in low.plan.steps if isinstance(s, KernelStep)}
    out = [judged(made, watched, dims, None)]
    for kind in kinds:
        found = [m for m in known[kind].mutants(made) if m.kernel in runnable and not m.subtle]
        out += [judged(made, watched, dims, m) for m in found[:MOST]]
    return out


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
