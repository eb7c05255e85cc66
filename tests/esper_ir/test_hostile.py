"""A hundred thousand damaged files: nothing but EsperError comes out, and no handler hides what does."""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from esper_ir.canonical import blueprint_id
from esper_ir.diagnostics import EsperError
from esper_ir.registry import OPS
from esper_ir.text import load
from esper_ir.verify import typed, verify
from tests.esper_ir.test_text import EXAMPLES, mutated
from tests.source import ROOT

FEWEST_CODES = 30
WHOLE = {
    "format": "esper-blueprint/1",
    "name": "whole",
    "dims": {"rows": {"min": 1, "max": 64, "tune": [32], "multiple_of": 1}, "cols": {}},
    "inputs": {
        "x": {"dtype": "float32", "shape": ["rows", 8]},
        "z": {"dtype": "bfloat16", "shape": ["rows", "2*cols"]},
        "i": {"dtype": "int64", "shape": ["rows"]},
    },
    "params": {"w": {"dtype": "float32", "shape": [8, 8], "init": {"kind": "normal", "std": 0.1}}},
    "buffers": {"m": {"dtype": "float32", "shape": [8], "init": {"kind": "zeros"}}},
    "constants": {"k": {"dtype": "float32", "shape": [2, 2], "data": [[1.0, 2.0], [3.0, 4.0]]}},
    "nodes": [
        {"id": "a", "op": "matmul", "inputs": ["x", "w"], "attrs": {"precision": "tf32"}},
        {"id": "b", "op": "sub", "inputs": ["a", "m"]},
        {"id": "c", "op": "softmax", "inputs": ["b"], "attrs": {"dim": 1}},
        {"id": "d", "op": "reshape", "inputs": ["c"], "attrs": {"shape": ["rows", 2, -1]}},
        {"id": "e", "op": "max", "inputs": ["d"], "attrs": {"dim": -1, "keepdim": True}},
        {"id": "f", "op": "cross_entropy", "inputs": ["c", "i"], "attrs": {"reduction": "sum"}},
        {"id": "g", "op": "sum", "inputs": ["k"]},
        {"id": "h", "op": "cast", "inputs": ["z"], "attrs": {"dtype": "float32"}},
        {"id": "u", "op": "mul", "inputs": ["m", 0.9]},
    ],
    "outputs": ["e", "e.1", "f", "g", "h", "u"],
    "updates": {"m": "u"},
    "differentiable": ["x", "w"],
    "metadata": {"description": "all sections"},
}
DEEP: list[Any] = []
for _ in range(70):
    DEEP = [DEEP]
POOL: list[Any] = [
    0, -1, 1, 3, 8, 64, 2**40, 10**30, 1.5, 1e300, True, False, None, "", "x", "a", "b", "e.1", "e.7", "w",
    "nowhere", "rows", "cols", "rows+", "rows*rows", "floordiv(rows, 2)", "floordiv(rows, 0)", "3*cols-100",
    [], {}, [1], [[1]], ["rows"], "float16", "float8", "int64", "bool", "normal", "magic", {"kind": "x"},
    {"min": 9, "max": 2}, {"sha256": "0" * 64, "file": "missing.safetensors"}, "esper-blueprint/2", "mean",
    "a b", [1] * 17, DEEP, {"file": "../outside.safetensors", "sha256": "0" * 64},
]  # fmt: skip


def swapped(document: Any, rng: random.Random, names: list[str]) -> Any:
    """Well-formed JSON with values exchanged, keys lost or added: past the reader into meaning."""
    if rng.random() < 0.03:
        return rng.choice(POOL)
    if isinstance(document, list):
        kept = [swapped(v, rng, names) for v in document if rng.random() > 0.01]
        return kept + kept[:1] if rng.random() < 0.02 else kept
    if not isinstance(document, dict):
        return document
    out = {k: swapped(v, rng, names) for k, v in document.items() if rng.random() > 0.01}
    if "op" in document and rng.random() < 0.1:
        out["op"] = rng.choice(names)
    if rng.random() < 0.02:
        out[rng.choice(["extra", "dim", "shape", "compute", "id", "attrs", "value"])] = rng.choice(POOL)
    return out


def damaged(rng: random.Random, bases: list[bytes], names: list[str]) -> bytes:
    data = rng.choice(bases)
    if rng.random() < 0.35:
        return mutated(data, rng)
    text = json.dumps(swapped(json.loads(data), rng, names))
    if rng.random() < 0.03:
        return text.replace('"nodes"', '"name"', 1).encode()
    return mutated(text.encode(), rng) if rng.random() < 0.05 else text.encode()


def reached(path: Path, codes: Counter[str]) -> None:
    """Read, verify and hash; every code that shows is counted."""
    try:
        blueprint = load(path)
        found = verify(blueprint)
        codes.update(d.code for d in found)
        typed(blueprint)
        if not any(d.level == "error" for d in found):
            blueprint_id(blueprint)
    except EsperError as error:
        assert error.code.startswith("E0") and error.message and str(error)
        codes.update({error.code, *(d.code for d in error.diagnostics)})


def run(count: int, folder: Path, seed: int) -> Counter[str]:
    rng, codes = random.Random(seed), Counter[str]()
    bases = [json.dumps(WHOLE).encode(), *(p.read_bytes() for p in EXAMPLES)]
    names = [*sorted(OPS), "gellu", "", "sum "]
    path = folder / "damaged.json"
    for number in range(count):
        path.write_bytes(damaged(rng, bases[:1] if number % 2 else bases, names))
        reached(path, codes)
    reached(folder / "no-such-file.json", codes)
    return codes


def test_the_undamaged_file_is_right(tmp_path: Path) -> None:
    path = tmp_path / "whole.json"
    path.write_text(json.dumps(WHOLE), encoding="utf-8")
    assert [d for d in verify(load(path)) if d.level == "error"] == []


def test_some_damaged_files(tmp_path: Path) -> None:
    assert len(run(1500, tmp_path, 1)) >= 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_damaged_files(tmp_path: Path) -> None:
    codes = run(100_000, tmp_path, 7)
    assert len(codes) >= FEWEST_CODES, sorted(codes)


def handlers(path: Path) -> list[str]:
    """Where everything is caught."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"Exception"}
        if kinds & {"Exception", "BaseException"}:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_no_handler_catches_everything() -> None:
    """Handlers name what they expect; only importers, which run a user's module, cannot."""
    files = sorted(p for p in (ROOT / "esper_ir").rglob("*.py") if "importers" not in p.parts)
    assert len(files) > 40 and not [h for p in files for h in handlers(p)]
