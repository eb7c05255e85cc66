"""The same blueprint and toolchain give the same id and bytes, wherever and however often it is compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from esper_ir import text
from forge.service import compile_blueprint
from library.store import Library
from tests.promises.shelf import Shelf
from tests.source import PACKAGES, ROOT

SCRIPT = "from forge.cli import main; main()"
EXAMPLES = ("rmsnorm_residual", "small_mlp")


def _compile_elsewhere(folder: Path, seed: str) -> dict[str, bytes]:
    """Id -> container of the examples, compiled by a copy of the source in `folder` into an empty library."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package)
    shutil.copytree(ROOT / "examples", folder / "examples")
    home = folder / "home"
    env = {**os.environ, "ESPER_LIBRARY": str(home / "library"), "ESPER_KEYS": str(home / "keys")}
    env |= {"PYTHONHASHSEED": seed, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    words = ["compile", *(f"examples/{name}.json" for name in EXAMPLES), "--json"]
    words += ["--pipeline", "fast", "--target", "h100", "--target", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    with Library.open(home / "library", readonly=True, trust=home / "keys") as library:
        return {row["artifact_id"]: library.read(row["artifact_id"]) for row in document["artifacts"]}


def test_two_folders_and_two_empty_libraries(shelf: Shelf, tmp_path: Path) -> None:
    made = _compile_elsewhere(tmp_path / "a" / "longer path", "2")
    names = [shelf.artifact(example, target) for example in EXAMPLES for target in ("h100", "cpu")]
    here = {name: shelf.library.read(name) for name in names}
    assert len(here) == 4 and here == made
    for folder in (tmp_path, ROOT):
        assert not [name for name, data in here.items() if str(folder).encode() in data]


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_journal_replay_gives_the_same_id(shelf: Shelf, tmp_path: Path, target: str) -> None:
    """Also: the journal is what decides, since another choice in it gives another id."""
    artifact_id = shelf.artifact("rmsnorm_residual", target)
    journal = json.loads(shelf.library.side_file(artifact_id, "journal.json"))
    assert journal["choices"]
    blueprint = text.load(ROOT / "examples" / "rmsnorm_residual.json")
    with Library.open(tmp_path / "library", trust=tmp_path / "trust") as library:

        def replay(document: Any) -> Any:
            return compile_blueprint(blueprint, targets=(target,), library=library, replay=document)[0]

        again = replay(journal)
        assert again.artifact_id == artifact_id
        assert library.read(artifact_id) == shelf.library.read(artifact_id)
        assert replay(_altered(journal)).artifact_id != artifact_id


def _altered(journal: dict[str, Any]) -> dict[str, Any]:
    """Every tile with one of its numbers doubled."""
    other = json.loads(json.dumps(journal))
    for row in other["choices"].values():
        field = next(name for name in ("block", "rows", "block_m", "warps") if name in row["tile"])
        row["tile"][field] *= 2
    return other
