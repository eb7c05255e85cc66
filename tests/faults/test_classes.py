"""Faults in what the forge emits, drawn from the classes of `tests/faults/classes/`.

The fast suite compiles one block and takes a handful; the slow one does what the bench `faults` does.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from bench import faults
from bench.results import write
from esper_ir.discover import collect
from gauntlet.isolate import ForkServer
from gauntlet.runner import judge
from tests.faults import classes, corpus
from tests.faults.fault import FaultClass, Mutant

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
KINDS: dict[str, FaultClass] = collect(classes, "CLASSES")
SAMPLE = (
    "dropped mask", "size-dependent error", "wrong only for constant cotangents", "stale workspace", "race",
    "gradient of one input wrong",
)  # fmt: skip


@pytest.fixture(scope="module")
def block() -> corpus.Block:
    """y = relu(x w + b): plans for every set of gradients, sums in two steps."""
    data = next(d for d in corpus.blueprints() if d["name"] == "affine_relu_40_f32")
    return corpus.compiled(data, "cpu")


def test_blueprints_are_many_and_distinct() -> None:
    found = corpus.blueprints()
    assert len({d["name"] for d in found}) == len(found) >= faults.BLUEPRINTS


def test_every_class_has_mutants_that_are_others(block: corpus.Block) -> None:
    assert len(KINDS) >= 20
    for name, kind in KINDS.items():
        found = list(kind.mutants(block))
        assert found, f"{name} finds no place in the simplest of blocks"
        for mutant in found:
            assert mutant.kind == name and bool(mutant.text) != (mutant.launch is not None)
            if mutant.text:
                assert mutant.text != block.texts[mutant.kernel] and f"{mutant.kernel}(" in mutant.text
            else:
                assert mutant.launch != block.manifest["launch"]


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_every_class_has_small_forms_or_says_why_not(target: str) -> None:
    """In both languages; one block has no mean, the other no arguments that may be taken for each other."""
    if target != "cpu":
        pytest.importorskip("triton")
    names = ("affine_relu_40_f32", "layer_norm_40_f32")
    blocks = [corpus.compiled(d, target) for d in corpus.blueprints() if d["name"] in names]
    for name, kind in KINDS.items():
        small = [m for block in blocks for m in kind.mutants(block) if m.subtle]
        only_c = target != "cpu" and name == "work skipped on repeat"
        assert bool(small) != bool(kind.no_small) or only_c, f"{name}: {len(small)}, {kind.no_small}"


def test_four_of_five_are_small() -> None:
    every = [(f"b{at % 7}", Mutant("k", "", str(at), text="t", subtle=at < 20)) for at in range(60)]
    found = faults._spread(every, random.Random(3))
    assert sorted(m.place for _, m in found) == sorted(m.place for _, m in every)
    assert [m.subtle for _, m in found[:25]] == 5 * [True, True, True, True, False]
    assert len({name for name, m in found[:9] if m.subtle}) == 7


def test_a_draw_is_even_and_repeats(block: corpus.Block) -> None:
    found = faults.draw([block], 60, 3)
    kinds = [m.kind for _, m in found]
    assert found == faults.draw([block], 60, 3) != faults.draw([block], 60, 4)
    assert len(found) == 60 and set(kinds) == set(KINDS)
    assert len({(m.kernel, m.place, m.text, str(m.launch)) for _, m in found}) == 60


def _artifacts(block: corpus.Block, chosen: list[Mutant], folder: Path) -> list[tuple[str, bytes]]:
    made = list(faults._written(folder, block, chosen, 0))
    return [(p.kind, (folder / p.file).read_bytes()) for p in made]


def test_a_few_are_refused_and_the_clean_one_is_not(
    block: corpus.Block, server: ForkServer, tmp_path: Path
) -> None:
    assert judge(block.container, "cpu", server, quick=True).passed
    chosen = [list(KINDS[name].mutants(block))[0] for name in SAMPLE]
    for kind, data in _artifacts(block, chosen, tmp_path):
        found = judge(data, "cpu", server, quick=True)
        assert found.passed is False, (kind, found.reason)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The seed of a run is never one that the judge was changed after."""
    found = faults.run(None, "cpu", faults.COUNT, 7, 2, 6000.0, False)
    with capsys.disabled():
        faults.show(found)
    write(found, tmp_path)
    assert not found["wrong"], found["wrong"]
    counted = {name: f for name, f in found["figures"].items() if f["unit"] != "s"}  # whose machine is it?
    assert all(f["met"] is not False for f in counted.values()), found["figures"]
