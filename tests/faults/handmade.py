"""Small artifacts written by hand for the cpu target: a blueprint, C text and a launch manifest each.

They do not need the forge, so that the gauntlet is tested against something it has no common ancestor with.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from esper_ir import canonical, text, verify
from library import launch
from library.launch import Argument, Buffer, Guard, KernelStep, LaunchManifest, Param, Plan, Size, Variant
from library.manifest import pack

FLAGS = (
    "-O2",
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-nostartfiles",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-std=c11",
)
PROLOGUE = """
#include <math.h>
#include <stdint.h>
#include <string.h>
#define PTR(T, i) (*(T *const *)args[i])
#define NUM(i) (*(const int64_t *)args[i])
#define KERNEL(name) void name(void *const *args, int64_t gx, int64_t gy, int64_t gz)
"""
ROWS = 16
"""Rows of one program in all of these kernels."""

ARCH = "x86-64-v1" if platform.machine() == "x86_64" else platform.machine()
"""What gcc compiles for when it is told nothing."""


@dataclass(frozen=True)
class Toy:
    """`source` is C; `plans` use `Kernel` names that are entry points of it, `params` their parameter
    kinds."""

    name: str
    blueprint: Mapping[str, Any]
    source: str
    plans: tuple[Plan, ...]
    params: Mapping[str, str]
    flags: tuple[str, ...] = FLAGS
    determinism: str = "deterministic"
    tags: Mapping[str, Any] = field(default_factory=dict)


def interface(blueprint: Mapping[str, Any]) -> launch.Interface:
    """The launch interface of a blueprint whose dims each stand alone as an axis of some input."""
    typed = verify.typed(text.parse(json.dumps(blueprint)))
    leaves = [(n, k, blueprint[f"{k}s"][n]) for k in ("input", "param") for n in blueprint.get(f"{k}s", {})]
    specs = tuple(launch.TensorSpec(n, k, v["dtype"], tuple(v["shape"])) for n, k, v in leaves)
    outputs = tuple(
        launch.TensorSpec(
            name, "output", typed.types[name].dtype.value, tuple(d.to_json() for d in typed.types[name].shape)
        )
        for name in blueprint["outputs"]
    )
    dims = []
    for name, spec in blueprint["dims"].items():
        at = next((i, s.shape.index(name)) for i, s in enumerate(specs) if name in s.shape)
        low, high, multiple = spec.get("min", 1), spec["max"], spec.get("multiple_of", 1)
        dims.append(launch.DimSource(name, low, high, multiple, tuple(spec.get("tune", ())), *at))
    wanted = tuple(blueprint.get("differentiable", [s.name for s in specs]))
    return launch.Interface(specs, outputs, tuple(dims), wanted)


def build(toy: Toy) -> bytes:
    """Container bytes: the C text compiled and packed beside its launch manifest."""
    code = _compile(toy.source, toy.flags)
    kernels = tuple(
        launch.Kernel(entry, "code.so", entry, _params(kinds)) for entry, kinds in sorted(toy.params.items())
    )
    manifest = LaunchManifest(interface(toy.blueprint), toy.plans, kernels)
    blueprint = text.parse(json.dumps(toy.blueprint))
    target = {"name": "cpu", "kind": "cpu", "arch": ARCH}
    fields = {
        "format": "esper-artifact/1",
        "blueprint": {
            "id": canonical.blueprint_id(blueprint),
            "name": toy.name,
            "interface": hashlib.sha256(toy.name.encode()).hexdigest(),
            "text": dict(toy.blueprint),
        },
        "target": target,
        "pipeline": "fast",
        "objective": "latency",
        "version": hashlib.sha256(code + repr(manifest).encode() + toy.name.encode()).hexdigest(),
        "toolchain": {"cc": "gcc", "flags": list(toy.flags)},
        "determinism": toy.determinism,
        "dims": dict(toy.blueprint["dims"]),
        "launch": launch.to_json(manifest),
        "externs": [],
    }
    return pack(fields, [("code.so", "cpu", code)])


def _params(kinds: str) -> tuple[Param, ...]:
    """ "ppn" -> two pointers and a 64-bit size."""
    return tuple(Param("ptr" if kind == "p" else "i64", 8 * at, 8) for at, kind in enumerate(kinds))


@functools.cache
def _compile(source: str, flags: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "code.c").write_text(PROLOGUE + source)
        command = ["gcc", *flags, "-o", str(path / "code.so"), str(path / "code.c"), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(f"{done.stderr}\n{source}")
        return (path / "code.so").read_bytes()


def step(kernel: str, grid: Size, *args: int | str, group: str = "") -> KernelStep:
    """A launch: ints are buffer numbers, texts are sizes."""
    arguments = tuple(Argument("buffer" if isinstance(a, int) else "size", a) for a in args)
    return KernelStep(group or kernel, (Variant(Guard(), kernel),), arguments, (grid, 1, 1))


def buffers(*rows: tuple[str, str, int, tuple[Size, ...]], dtype: str = "float32") -> tuple[Buffer, ...]:
    """(name, source, index, shape) each."""
    return tuple(Buffer(name, source, index, dtype, shape) for name, source, index, shape in rows)


def programs(rows: str = "rows") -> Size:
    return ("ceildiv", rows, ROWS)


def edit(toy: Toy, *changes: tuple[str, str], name: str = "") -> Toy:
    """The same artifact with C text replaced; every change must be found exactly once."""
    source = toy.source
    for old, new in changes:
        if source.count(old) != 1:
            raise AssertionError(f"{toy.name}: {source.count(old)} places for {old!r}")
        source = source.replace(old, new)
    return replace(toy, source=source, name=name or toy.name)
