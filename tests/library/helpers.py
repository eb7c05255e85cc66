"""Small containers and libraries to test with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from library.manifest import FORMAT, FORMATS, pack
from library.store import Library


def text_of(blueprint: int) -> str:
    """A blueprint's text whose names do not stand in the order of the alphabet."""
    leaf = {"dtype": "float32", "shape": [4]}
    text = {"name": f"block_{blueprint}", "inputs": {"z": leaf, "a": leaf}, "nodes": [], "metadata": {}}
    return json.dumps(text, indent=1)


def make_manifest(number: int = 0, *, blueprint: int = 0, **changes: Any) -> dict[str, Any]:
    """A manifest that passes the grammar; `number` and `blueprint` make it another artifact."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "blueprint": {
            "id": hashlib.sha256(b"blueprint%d" % blueprint).hexdigest(),
            "name": f"block_{blueprint}",
            "interface": "ab12",
            "text": text_of(blueprint),
        },
        "target": {"name": "cpu-v3", "kind": "cpu", "arch": "x86-64-v3"},
        "pipeline": "fast",
        "objective": "speed",
        "version": hashlib.sha256(b"version%d" % number).hexdigest(),
        "toolchain": {"cc": "gcc 12.2"},
        "determinism": "deterministic",
        "dims": {},
        "launch": {"kernels": [{"name": "k", "grid": ["n", 1, 1]}]},
        "externs": [],
    }
    return {**manifest, **changes}


def old_manifest(number: int = 0, *, blueprint: int = 0) -> dict[str, Any]:
    """The same in the first format: the text as an object, whose names canonical JSON sorts."""
    new = make_manifest(number, blueprint=blueprint)
    tensor = {"kind": "input", "dtype": "float32", "shape": [4]}
    interface = {"inputs": [{"name": "z", **tensor}, {"name": "a", **tensor}]}
    text = {"text": json.loads(text_of(blueprint))}
    launch = {**new["launch"], "interface": interface}
    return {**new, "format": FORMATS[0], "blueprint": {**new["blueprint"], **text}, "launch": launch}


def make_container(number: int = 0, *, size: int = 2000, blueprint: int = 0, **changes: Any) -> bytes:
    """Container bytes with two blobs; deterministic."""
    seed = hashlib.sha256(b"code%d" % number).digest()
    code = (seed * (size // 32 + 1))[:size]
    manifest = make_manifest(number, blueprint=blueprint, **changes)
    return pack(manifest, [("code", "elf", code), ("choices", "json", b"{}")])


def validated(lib: Library, number: int = 0, report: dict[str, Any] | None = None, **changes: Any) -> str:
    """Store and prove one artifact; its id."""
    record = lib.put_artifact(make_container(number, **changes))
    lib.record_verdict(record.id, report or {"policy": "p1"}, passed=True)
    return record.id


def object_path(home: Path, digest: str) -> Path:
    return home / "objects" / digest[:2] / digest[2:]


def flip(path: Path, offset: int) -> None:
    """Change one byte of a file in place."""
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def contents(home: Path) -> dict[str, bytes]:
    """Every file below a directory, to compare; SQLite's shared memory and an empty log are not content."""
    return {
        str(path.relative_to(home)): path.read_bytes()
        for path in sorted(home.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
        if path.stat().st_size or not path.name.endswith("-wal")
    }
