"""Artifacts of the examples, compiled and proven once for the whole folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forge.service import compile_file
from gauntlet.runner import prove
from library.store import Library
from tests.promises.shelf import Shelf

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ISOLATED = ("ESPER_LIBRARY", "ESPER_KEYS", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")


@dataclass(frozen=True)
class Proven:
    """`ids` by example name; `environment` is what a child process needs to find the library and its keys."""

    library: Path
    environment: dict[str, str]
    ids: dict[str, str]


@pytest.fixture(scope="session")
def proven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proven]:
    home = tmp_path_factory.mktemp("promises")
    kept = {name: os.environ.get(name) for name in (*ISOLATED, "ESPER_STRICT")}
    settings = {name: str(home / name.lower()) for name in ISOLATED}
    os.environ.update(settings)
    os.environ.pop("ESPER_STRICT", None)
    path = Path(settings["ESPER_LIBRARY"])
    ids: dict[str, str] = {}
    with Library.open(path) as library:
        for name in ("digits_block", "rmsnorm_residual"):
            made = compile_file(EXAMPLES / f"{name}.json", ("fast",), ("cpu",), library=library)
            ids[name] = made[0].artifact_id
    for artifact_id in ids.values():
        verdict = prove(artifact_id, library=path, quick=True)
        assert verdict.passed, verdict.reason
    yield Proven(path, settings, ids)
    for name, value in kept.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    """A library of its own in which examples are compiled when a test first asks for them, proven or not."""
    home = tmp_path_factory.mktemp("shelf")
    with Library.open(home / "library", trust=home / "trust") as library:
        yield Shelf(library, home / "trust")
