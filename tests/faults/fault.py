"""What a class of faults is: a name, and a function from a compiled block to mutants of it.

To add one, put a file into `tests/faults/classes/` with a constant CLASSES, a tuple of `FaultClass`. Nothing
else is needed: the bench `faults` and the tests find it. A function is given a `corpus.Block`: the texts of
its kernels by name (C functions on the processor, Triton modules for a card), the role of every argument
(`block.roles(kernel)`), and the manifest with the launch plans. It yields `Mutant`s:

    def _no_bias(block: Block) -> Iterator[Mutant]:
        for kernel, text in block.texts.items():
            if block.kind == "triton" and " + v12)" in text:
                yield Mutant("bias left out", kernel, "+ v12", text=text.replace(" + v12)", ")", 1))

    CLASSES = (FaultClass("bias left out", _no_bias),)

A mutant has to be wrong for some values and sizes that the blueprint allows, by more than rounding may
explain; it must not depend on what the judge happens to try. Where that is in doubt, leave it out.

A class also has small forms of its fault (`subtle`): the same with its effect scaled, so that on ordinary
values the error is a few times the bound (`sites.mixed`, `sites.few`). One that can have none says why.

Whoever adds a class to test the judge should not have read `gauntlet/`: this file, `corpus.py` (what a block
is), `sites.py` (where values are loaded and stored) and docs/gauntlet.md are enough. What the classes already
here do is no pattern to follow either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.faults.corpus import Block


@dataclass(frozen=True)
class Mutant:
    """One fault. Either `text`, the whole text of `kernel` with the fault in it (the entry keeps its name),
    or `launch`, the launch manifest as JSON with the fault in it. `place`: what was changed, for the reader.
    `subtle`: meant to be off by less than ten times the bound on ordinary values, or not at all there.
    `by_value`: wrong only by its numbers, whatever the others of its class are.
    """

    kind: str
    kernel: str
    place: str
    text: str = ""
    launch: Mapping[str, Any] | None = None
    subtle: bool = False
    by_value: bool = False


@dataclass(frozen=True)
class FaultClass:
    """`name` as the table shows it; `mutants` of one block, as many as there are places. `by_value`: a mutant
    of this class is wrong only by its numbers, so that one which gives the clean artifact's numbers for all
    values and sizes is no fault (`tests/faults/witness.py` looks); of other classes every mutant counts.
    `no_small`: why there can be no subtle mutant, in one sentence; empty where there are such. `cotangents`:
    what flows back in the ordinary cases that the error of a mutant is measured by."""

    name: str
    mutants: Callable[[Block], Iterator[Mutant]]
    by_value: bool = False
    no_small: str = ""
    cotangents: tuple[str, ...] = ("normal",)
