"""A deterministic artifact computes the same bits in every process, with any number of threads."""

from __future__ import annotations

import json

import pytest
import torch

from tests.promises.shelf import Shelf, answer, bits

EXAMPLES = ("rmsnorm_residual", "digits_block", "small_mlp")
TARGETS = ("cpu", pytest.param("h100", marks=pytest.mark.gpu))
ROWS = 999  # odd, and enough for several partial sums per column
SCRIPT = """
import json, os, torch
from tests.promises.shelf import bits, block_of
names = json.loads(os.environ["NAMES"])
print(json.dumps([bits(block_of(i), example, {rows}) for example, i in names]))
"""


@pytest.mark.parametrize("pairs", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", TARGETS)
def test_every_process_gives_bit_equal_gradients(shelf: Shelf, target: str, pairs: int) -> None:
    names = [(example, shelf.artifact(example, target)) for example in EXAMPLES]
    found: list[list[str]] = []
    for _ in range(pairs):  # two at a time: eight interpreters with torch would not fit a small machine
        pair = [shelf.child(SCRIPT.format(rows=ROWS), NAMES=json.dumps(names)) for _ in range(2)]
        found += [answer(process) for process in pair]
    here = [bits(shelf.block(example, target), example, ROWS) for example, _ in names]
    assert len(found) == 2 * pairs and all(one == here for one in found), (here, found)
    assert len(set(found[0])) == len(EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_thread_count_does_not_change_bits(shelf: Shelf, example: str) -> None:
    block = shelf.block(example)
    before = torch.get_num_threads()
    found = {}
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found[threads] = bits(block, example, ROWS)
    finally:
        torch.set_num_threads(before)
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("example", EXAMPLES)
def test_repeats_with_a_dirtied_allocator(shelf: Shelf, example: str) -> None:
    block = shelf.block(example)
    first = bits(block, example, ROWS)
    for repeat in range(3):
        dirt = [torch.full((997 * (repeat + k + 1),), float("nan")) for k in range(8)]
        del dirt
        assert bits(block, example, ROWS) == first
    assert bits(block, example, ROWS, seed=1) != first


def test_the_class_is_written_down(shelf: Shelf) -> None:
    """Of a processor's library products the bits depend on how many threads share them."""
    for example in EXAMPLES:
        report = shelf.block(example).report()
        ours = example == "rmsnorm_residual" or "-cpu" not in report["artifact"]
        assert report["determinism"] == ("deterministic" if ours else "library-nondeterministic"), report
