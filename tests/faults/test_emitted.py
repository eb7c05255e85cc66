"""Faults in what the forge itself emits for the CPU, and the clean artifacts beside them.

The fast suite compiles one small block and takes a handful; the slow one takes 300 spread evenly over every
class of every small example, prints the table with its confidence bound and writes it into the folder
$ESPER_FAULTS_OUT when that is set.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forge.service import compile_file
from gauntlet.isolate import ForkServer
from gauntlet.runner import judge
from library.store import Library
from tests.faults.mutate import Mutant, mutants, rebuilt
from tests.faults.table import Row, keep, table
from tests.source import ROOT

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
SMALL = (
    "small_mlp", "rmsnorm_residual", "softmax", "digits_block", "layernorm", "lora", "kl_div", "bias_gelu",
)  # fmt: skip
PLANTED = 300


@dataclass(frozen=True)
class Emitted:
    """An artifact of the forge and the C text that it was made from."""

    name: str
    container: bytes
    text: str


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as found:
        found.start()
        yield found


def emitted(folder: Path, names: tuple[str, ...]) -> list[Emitted]:
    """Compile examples for the CPU here."""
    out = []
    with Library.open(folder / "library", trust=folder / "trust") as library:
        for name in names:
            made = compile_file(ROOT / "examples" / f"{name}.json", ("fast",), ("cpu",), library=library)[0]
            text = library.side_file(made.artifact_id, "module.c").decode()
            out.append(Emitted(name, library.read(made.artifact_id), text))
    return out


def spread(found: list[tuple[Emitted, Mutant]], count: int) -> list[tuple[Emitted, Mutant]]:
    """Evenly over the classes, and within a class over all places."""
    kinds = sorted({m.kind for _, m in found})
    rows = {kind: [pair for pair in found if pair[1].kind == kind] for kind in kinds}
    share = -(-count // len(kinds))
    return [row[i * len(row) // share] for row in rows.values() for i in range(min(share, len(row)))]


def test_a_few_faults_in_emitted_text_are_refused(tmp_path: Path, server: ForkServer) -> None:
    (block,) = emitted(tmp_path, ("digits_block",))
    assert judge(block.container, "cpu", server).passed
    for _, mutant in spread([(block, m) for m in mutants(block.text)], 12)[::2]:
        found = judge(rebuilt(block.container, mutant.text), "cpu", server)
        assert found.passed is False, (mutant.kind, mutant.kernel, mutant.place, found.reason)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_faults_in_emitted_text_are_refused(
    tmp_path: Path, server: ForkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = emitted(tmp_path, SMALL)
    chosen = spread([(block, m) for block in blocks for m in mutants(block.text)], PLANTED)
    rows, missed = [], []
    for block, mutant in chosen:
        found = judge(rebuilt(block.container, mutant.text), "cpu", server)
        rows.append(Row(mutant.kind, found.passed is False))
        if found.passed is not False:
            missed.append((block.name, mutant.kind, mutant.kernel, mutant.place, found.reason))
    clean = [judge(block.container, "cpu", server, seed=seed) for block in blocks for seed in range(2)]
    refused = [c.reason for c in clean if not c.passed]
    with capsys.disabled():
        print(f"\n{table(rows)}\nclean artifacts refused: {len(refused)} of {len(clean)}")
    keep(rows, len(clean), len(refused))
    assert len(rows) >= PLANTED - 20 and not missed and not refused, (missed, refused)
