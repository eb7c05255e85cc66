"""Every field of an artifact's key changes its id, and the toolchain's fields are all there."""

from __future__ import annotations

import dataclasses
import json
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


@pytest.fixture(scope="module")
def work() -> Work:
    blueprint = text.load(ROOT / "examples" / "rmsnorm_residual.json")
    return run(pipeline("fast"), Work(blueprint, resolve("cpu"), "fast"))


def _stated(work: Work) -> dict[str, Any]:
    """The manifest as the key sees it."""
    return {k: v for k, v in work.manifest.items() if k not in ("version", "artifact_id")}


def _key(work: Work, stated: Mapping[str, Any]) -> str:
    return sha256_hex(canonical_json(package.version_key(work, stated)))


def _other(value: Any) -> Any:
    """A value of the same kind that differs."""
    if isinstance(value, dict):
        return {**value, "other": "x"}
    return [*value, "x"] if isinstance(value, list) else f"{value}x"


def test_the_key_covers_the_whole_manifest(work: Work) -> None:
    """One id has one content: whatever a manifest says is in the hash that its id ends in."""
    stated = _stated(work)
    before = _key(work, stated)
    assert before == _key(work, dict(stated)) == work.manifest["version"]
    for field, value in stated.items():
        assert _key(work, {**stated, field: _other(value)}) != before, field
    for part, value in stated["blueprint"].items():
        changed = {**stated["blueprint"], part: _other(value)}
        assert _key(work, {**stated, "blueprint": changed}) != before, part


@pytest.mark.parametrize("name", ["compiler", "flags", "march", "fp_fusion"])
def test_a_tool_changes_the_id(work: Work, name: str) -> None:
    assert name in work.manifest["toolchain"]
    stated = _stated(work)
    tools = {**stated["toolchain"], name: "another"}
    assert _key(work, {**stated, "toolchain": tools}) != _key(work, stated)


def test_a_template_changes_the_id(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key(work, _stated(work))
    monkeypatch.setattr(package, "TEMPLATES", {**package.TEMPLATES, "rows": 99})
    assert _key(work, _stated(work)) != before


def test_the_sealed_form_changes_the_id(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key(work, _stated(work))
    monkeypatch.setattr(package.sealed, "VERSION", 99)
    assert _key(work, _stated(work)) != before


def test_a_plan_changes_the_id(work: Work) -> None:
    """The frozen choices are in the key by the text of every kernel plan."""
    before = _key(work, _stated(work))
    kernels = dict(work.kernels.by_key)
    kernels.pop(next(iter(kernels)))
    other = dataclasses.replace(work, kernels=dataclasses.replace(work.kernels, by_key=kernels))
    assert _key(other, _stated(work)) != before


def _renamed(document: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(document).replace('"s"', '"summed"'))


@pytest.mark.parametrize(
    "edit",
    [lambda d: {**d, "metadata": {"note": "another"}}, _renamed, lambda d: {**d, "name": "another"}],
    ids=["note", "value renamed", "block renamed"],
)
def test_an_edit_without_meaning_is_another_artifact_of_the_same_blueprint(
    work: Work, edit: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Never the same id with other bytes, which a library refuses."""
    document = json.loads((ROOT / "examples" / "rmsnorm_residual.json").read_text())
    other = run(
        pipeline("fast"), Work(text.parse(json.dumps(edit(document))), resolve("cpu"), "fast")
    ).manifest
    assert other["blueprint"]["id"] == work.manifest["blueprint"]["id"]
    assert other["artifact_id"] != work.manifest["artifact_id"]


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
