"""A throw-away library with hand-made artifacts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from library.launch import LaunchManifest, to_json
from library.manifest import FORMAT, pack
from library.store import Library
from runtime import loader
from tests.runtime import artifacts as a
from tests.runtime import shelf

TEXT: dict[str, Any] = {
    "format": "esper-blueprint/1",
    "name": "scale",
    "dims": {"rows": {"min": 1, "max": 1000, "tune": [16, 128], "multiple_of": 1}},
    "inputs": {"x": {"dtype": "float32", "shape": ["rows", a.N]}},
    "params": {"w": {"dtype": "float32", "shape": [a.N], "init": {"kind": "normal", "std": 0.5}}},
    "nodes": [{"id": "y", "op": "mul", "inputs": ["x", "w"]}],
    "outputs": ["y"],
}


def manifest(launch: LaunchManifest, **changes: Any) -> dict[str, Any]:
    """A manifest for `scale`; top-level fields can be exchanged."""
    return {
        "format": FORMAT,
        "blueprint": {"id": "ab" * 32, "name": "scale", "interface": "cd" * 32, "text": json.dumps(TEXT)},
        "target": {"name": "cpu-v2", "kind": "cpu", "arch": "x86-64-v2", "match": "minimum"},
        "pipeline": "fast",
        "objective": "speed",
        "version": "12" * 32,
        "toolchain": {},
        "determinism": "deterministic",
        "dims": {},
        "launch": to_json(launch),
        "externs": [],
    } | changes


def container(launch: LaunchManifest | None = None, **changes: Any) -> bytes:
    return pack(manifest(launch or a.scale(), **changes), [("code.so", "so", a.compiled())])


Put = Callable[..., str]


@pytest.fixture
def put(esper_library: Path) -> Iterator[Put]:
    """`put(launch, validated=True, **manifest fields)` stores an artifact and returns its id."""
    with Library.open() as library:

        def store(launch: LaunchManifest | None = None, *, validated: bool = True, **changes: Any) -> str:
            record = library.put_artifact(container(launch, **changes))
            if validated:
                library.record_verdict(record.id, {"stages": []}, passed=True)
            return record.id

        yield store


Shelf = tuple[Path, dict[str, str]]


def _stocked(home: Path, target: str, only: tuple[str, ...] = ()) -> Shelf:
    home.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_LIBRARY", str(home / "library"))
        patch.setenv("ESPER_KEYS", str(home / "keys"))
        return home, shelf.fill(home, target, only)


@pytest.fixture(scope="session")
def shelf_home(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """A library of `tests.runtime.shelf` for this processor, and artifact ids by name."""
    return _stocked(tmp_path_factory.mktemp("shelf"), "cpu")


@pytest.fixture(scope="session")
def card_home(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """What the tests on a card need of it, for the card here."""
    needed = ("layers.*.mlp", "dropped", "norm_relu")
    return _stocked(tmp_path_factory.mktemp("cards"), "auto", needed)


def _in_force(made: Shelf, patch: pytest.MonkeyPatch) -> dict[str, str]:
    patch.setenv("ESPER_LIBRARY", str(made[0] / "library"))
    patch.setenv("ESPER_KEYS", str(made[0] / "keys"))
    patch.delenv("ESPER_STRICT", raising=False)
    loader.cache().release()
    loader._meant.clear()
    loader._libraries.clear()
    return made[1]


@pytest.fixture
def ids(shelf_home: Shelf, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Artifact ids by name, their library being the one in force."""
    return _in_force(shelf_home, monkeypatch)


@pytest.fixture
def card_ids(card_home: Shelf, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return _in_force(card_home, monkeypatch)
