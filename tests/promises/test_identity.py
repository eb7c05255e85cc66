"""Every field of an artifact's key changes its id, and the toolchain's fields are all there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import forge.package as package
from esper_ir import text
from esper_ir.diagnostics import EsperError
from forge.pass_manager import run
from forge.pipelines import pipeline
from forge.target import resolve
from forge.work import Work
from library.canon import canonical_json, sha256_hex
from library.manifest import pack
from tests.promises.shelf import Shelf
from tests.source import ROOT

Key = tuple[Any, ...]


@pytest.fixture(scope="module")
def work() -> Work:
    blueprint = text.load(ROOT / "examples" / "rmsnorm_residual.json")
    return run(pipeline("fast"), Work(blueprint, resolve("cpu"), "fast"))


def _key(work: Work, launch: Mapping[str, Any], interface: str = "a" * 64) -> str:
    assert work.built is not None
    return sha256_hex(canonical_json(package.version_key(work, work.built, launch, interface)))


def _launch(work: Work) -> dict[str, Any]:
    return dict(work.manifest["launch"])


def _target(work: Work, **changed: Any) -> Work:
    return dataclasses.replace(work, target=dataclasses.replace(work.target, **changed))


def _tools(work: Work, name: str, value: Any) -> Work:
    assert work.built is not None
    built = dataclasses.replace(work.built, toolchain={**work.built.toolchain, name: value})
    return dataclasses.replace(work, built=built)


WORKS: dict[str, Callable[[Work], Work]] = {
    "target": lambda w: _target(w, name="other"),
    "arch": lambda w: _target(w, arch="other"),
    "pipeline": lambda w: dataclasses.replace(w, pipeline="standard"),
    "objective": lambda w: dataclasses.replace(w, objective="memory"),
    "compiler": lambda w: _tools(w, "compiler", "gcc 99"),
    "flags": lambda w: _tools(w, "flags", ["-O0"]),
    "march": lambda w: _tools(w, "march", "other"),
    "ptxas": lambda w: _tools(w, "ptxas", "99.0"),
    "fp_fusion": lambda w: _tools(w, "fp_fusion", "other"),
}


@pytest.mark.parametrize("field", [*WORKS, "interface", "launch", "format", "templates"])
def test_every_field_changes_the_id(work: Work, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key(work, _launch(work))
    assert before == _key(work, _launch(work))
    changed, launch, interface = work, _launch(work), "a" * 64
    if field in WORKS:
        changed = WORKS[field](work)
    elif field == "interface":
        interface = "b" * 64
    elif field == "launch":
        launch = {**launch, "plans": launch["plans"][:-1]}
    elif field == "format":
        monkeypatch.setattr(package, "FORMAT", "esper-artifact/99")
    else:
        monkeypatch.setattr(package, "TEMPLATES", {**package.TEMPLATES, "rows": 99})
    assert _key(changed, launch, interface) != before


def test_a_plan_changes_the_id(work: Work) -> None:
    """The frozen choices are in the key by the text of every kernel plan."""
    before = _key(work, _launch(work))
    kernels = dict(work.kernels.by_key)
    kernels.pop(next(iter(kernels)))
    other = dataclasses.replace(work, kernels=dataclasses.replace(work.kernels, by_key=kernels))
    assert _key(other, _launch(work)) != before


@pytest.mark.parametrize(
    ("target", "fields"),
    [
        ("cpu", {"compiler", "flags", "march", "fp_fusion"}),
        ("h100", {"triton", "ptxas", "arch", "fp_fusion"}),
    ],
)
def test_the_toolchain_is_named(shelf: Shelf, target: str, fields: set[str]) -> None:
    artifact_id = shelf.artifact("rmsnorm_residual", target)
    manifest = shelf.library.load(artifact_id, allow_unvalidated=True).container.manifest
    assert fields <= manifest["toolchain"].keys()
    assert all(str(manifest["toolchain"][name]) for name in fields)
    assert isinstance(manifest["toolchain"]["fp_fusion"], bool)


def test_one_id_one_content(shelf: Shelf) -> None:
    """The id ends in the version hash, and a second content under one id is a conflict."""
    artifact_id = shelf.artifact("rmsnorm_residual")
    container = shelf.library.load(artifact_id, allow_unvalidated=True).container
    manifest = dict(container.manifest)
    assert manifest["artifact_id"] == artifact_id and artifact_id.endswith(manifest["version"][:8])
    blobs = [(row["name"], row["kind"], bytes(container.blobs[row["name"]])) for row in manifest.pop("blobs")]
    other = pack({**manifest, "objective": "memory"}, blobs)
    with pytest.raises(EsperError) as refusal:
        shelf.library.put_artifact(other)
    assert refusal.value.code == "E0723" and refusal.value.exit_code == 14
    assert shelf.library.read(artifact_id) == container.data
