"""An artifact in the layout of Hugging Face kernels: what is written, and that odd names stay names."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from esper_ir.diagnostics import EsperError
from library.cli import main
from library.hub import BUNDLE, export_kernel, front_of, take
from library.manifest import pack, unpack
from library.store import Library
from tests.library.helpers import contents, make_container, make_manifest


def named(name: str, *leaves: tuple[str, str]) -> dict[str, Any]:
    """A manifest of a block with these (name, kind) leaves."""
    made = make_manifest()
    tensors = [{"name": n, "kind": k, "dtype": "float32", "shape": [4]} for n, k in leaves]
    interface = {"inputs": tensors, "differentiable": [n for n, _ in leaves]}
    return {
        "blueprint": {**made["blueprint"], "name": name},
        "launch": {**made["launch"], "interface": interface},
    }


def container(number: int = 0, **changes: Any) -> bytes:
    return pack({**make_manifest(number), **changes}, [("code", "elf", b"code")])


def proven(lib: Library, number: int = 0, **changes: Any) -> str:
    artifact = lib.put_artifact(container(number, **changes)).id
    lib.record_verdict(artifact, {"policy": "p"}, passed=True)
    return artifact


BLOCK = named("Norm_and Scale", ("x", "input"), ("ln.weight", "param"))


def test_the_layout(lib: Library, tmp_path: Path) -> None:
    artifact = proven(lib, **BLOCK)
    variant = export_kernel(lib, lib.record(artifact), tmp_path / "repo")
    assert variant == tmp_path / "repo" / "build" / "torch-cpu"
    names = {path.name for path in variant.iterdir()}
    assert names == {"__init__.py", "layers.py", "metadata.json", BUNDLE}
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "norm-and-scale" and metadata["backend"] == {"type": "cpu"}
    assert metadata["id"] == f"_norm_and_scale_cpu_{artifact[-8:]}"
    assert metadata["version"] == 1 and metadata["python-depends"] == []
    digests = metadata["digest"]["files"]
    assert digests.keys() == names - {"metadata.json"} and metadata["digest"]["algorithm"] == "sha256"
    for name, digest in digests.items():
        assert base64.b64decode(digest) == hashlib.sha256((variant / name).read_bytes()).digest()
    front = ast.parse((variant / "__init__.py").read_text())
    assert {f.name for f in front.body if isinstance(f, ast.FunctionDef)} == {"norm_and_scale", "load"}
    layers = (variant / "layers.py").read_text()
    assert "class NormAndScale(nn.Module)" in layers and "_call(x, self.ln.weight)" in layers
    card = (tmp_path / "repo" / "README.md").read_text()
    publics = re.findall(r"trust add (\w+) (esper-ed25519:\S+)", card)
    assert [role for role, _ in publics] == ["compiler", "validator"]


def test_a_card_of_cuda_names_its_architecture(lib: Library, tmp_path: Path) -> None:
    target = {"name": "h100", "kind": "cuda", "arch": "sm_90a"}
    artifact = proven(lib, target=target)
    variant = export_kernel(lib, lib.record(artifact), tmp_path / "repo")
    assert variant.name == "torch-cuda"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda", "archs": ["9.0a"]}


def test_two_targets_share_a_repository(lib: Library, tmp_path: Path) -> None:
    for target in ({"name": "h100", "kind": "cuda", "arch": "sm_90"}, make_manifest()["target"]):
        export_kernel(lib, lib.record(proven(lib, target=target)), tmp_path / "repo")
    assert {p.name for p in (tmp_path / "repo" / "build").iterdir()} == {"torch-cuda", "torch-cpu"}


def test_only_what_loads_is_exported_and_nothing_is_left_behind(lib: Library, tmp_path: Path) -> None:
    pending = lib.put_artifact(make_container(7)).id
    revoked = proven(lib, 8)
    lib.revoke(revoked, "bad")
    for artifact, code in ((pending, None), (revoked, "E0742")):
        with pytest.raises(EsperError) as error:
            export_kernel(lib, lib.record(artifact), tmp_path / "repo")
        assert code in (None, error.value.code) and error.value.exit_code in (12, 13)
    assert not (tmp_path / "repo").exists()
    good = proven(lib, 9)
    variant = export_kernel(lib, lib.record(good), tmp_path / "repo")
    before = contents(tmp_path / "repo")
    with pytest.raises(EsperError) as error:
        export_kernel(lib, lib.record(good), tmp_path / "repo")
    assert error.value.code == "E0720" and contents(tmp_path / "repo") == before
    assert [p.name for p in variant.parent.iterdir()] == ["torch-cpu"]


def test_a_place_that_cannot_be_written(lib: Library, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EsperError) as error:
        export_kernel(lib, lib.record(proven(lib)), tmp_path / "file")
    assert error.value.exit_code == 16 and (tmp_path / "file").read_text() == "x"


ODD = [
    "lambda", "1st", "Ünïcode", "", "---", "nn", "True", "load", "runtime", "a'; import os #", '"""', "{x}",
    "%s", "x" * 256, "layers", "take", "artifact_id", "none", "self", "\n", "\x1b[2J",
]  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_names_stay_names(name: str, lib: Library, tmp_path: Path) -> None:
    """Python text with names of a blueprint in it: always text, never a statement of theirs."""
    leaves = (
        ("x", "input"),
        (name or "y", "input"),
        ("self", "input"),
        ("_block", "input"),
        ("a b", "param"),
    )
    artifact = proven(lib, **named(name, *leaves))
    variant = export_kernel(lib, lib.record(artifact), tmp_path / "repo")
    tree = ast.parse((variant / "__init__.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(functions) == 2 and functions[1].name == "load" != functions[0].name
    arguments = [argument.arg for argument in functions[0].args.args]
    assert len(set(arguments)) == len(leaves) and not {"self", "_block"} & set(arguments)
    kinds = [ast.Expr, ast.ImportFrom, ast.Try, ast.Assign, ast.Assign, ast.FunctionDef, ast.FunctionDef]
    assert [type(node) for node in tree.body] == [*kinds, ast.Assign]
    assert not (variant / "layers.py").exists(), "no module has a parameter of that name"
    assert re.fullmatch(
        r"[a-z][-a-z0-9]*[a-z0-9]", json.loads((variant / "metadata.json").read_text())["name"]
    )


def test_constants_and_odd_parameters_have_no_layer() -> None:
    assert front_of(unpack(container(**BLOCK)).manifest).has_layer
    for leaf in (("c", "constant"), ("w.class", "param"), ("9", "buffer")):
        manifest = unpack(container(**named("b", ("x", "input"), leaf))).manifest
        assert not front_of(manifest).has_layer


def test_take_brings_it_once_and_only_what_is_meant(lib: Library, home: Path, tmp_path: Path) -> None:
    artifact, other = proven(lib, 1), proven(lib, 2)
    variant = export_kernel(lib, lib.record(artifact), tmp_path / "repo")
    (tmp_path / "link").symlink_to(variant / BUNDLE)
    place = tmp_path / "fresh"
    assert take(tmp_path / "link", artifact, place) == artifact
    before = contents(place)
    assert take(tmp_path / "gone", artifact, place) == artifact and contents(place) == before
    with pytest.raises(EsperError) as error:
        take(variant / BUNDLE, other, place)
    assert error.value.code == "E0770"


def test_take_believes_only_the_own_trust_store(
    lib: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = proven(lib)
    variant = export_kernel(lib, lib.record(artifact), tmp_path / "repo")
    data = bytearray((variant / BUNDLE).read_bytes())
    data[-1] ^= 1
    (tmp_path / "changed").write_bytes(bytes(data))
    with pytest.raises(EsperError) as error:
        take(tmp_path / "changed", artifact, tmp_path / "one")
    assert error.value.exit_code == 11
    monkeypatch.setenv("ESPER_KEYS", str(tmp_path / "stranger"))
    for code in ("E0748", "E0744"):
        with pytest.raises(EsperError) as error:
            take(variant / BUNDLE, artifact, tmp_path / "two")
        assert error.value.code == code
        Library.open(tmp_path / "unrelated").close()  # makes keys of their own, which is not enough
    card = (tmp_path / "repo" / "README.md").read_text()
    for role, public in re.findall(r"trust add (\w+) (\S+)", card):
        assert CliRunner().invoke(main, ["trust", "add", role, public]).exit_code == 0
    assert take(variant / BUNDLE, artifact, tmp_path / "two") == artifact


def test_the_command(lib: Library, tmp_path: Path) -> None:
    artifact = proven(lib)
    command = ["export", "--hf-kernel", str(tmp_path / "repo"), artifact[:12], "--json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["variant"] == str(tmp_path / "repo" / "build" / "torch-cpu")
    assert CliRunner().invoke(main, ["export", "--hf-kernel", str(tmp_path / "other")]).exit_code == 2
