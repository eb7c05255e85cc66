"""An artifact as data: the manifest, its version hash from a listed key, and the container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import esper_ir.canonical as canonical
import esper_ir.text as text
from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint
from forge.lower import PhaseLowering
from forge.lowered import Call, size_of
from forge.target import Target
from forge.work import Work
from library import sealed
from library.canon import canonical_json, sha256_hex
from library.launch import DimSource, Interface, LaunchManifest, TensorSpec, to_json
from library.manifest import FORMAT, pack
from runtime.calls import NONDETERMINISTIC

# Versions of what turns a graph into kernels; a change that alters generated kernels bumps its entry.
TEMPLATES = {
    "rows": 5,
    "pointwise": 2,
    "matmul": 3,
    "chain": 1,
    "extern": 2,
    "scan": 1,
    "table": 2,
    "emit": 9,
}


def version_key(work: Work, stated: Mapping[str, Any]) -> tuple[Any, ...]:
    """Everything the version hash covers; a test varies each entry and expects another hash.

    `stated` is the whole manifest but for the hash, the id and the blobs that follow from it, so that one id
    has one content: two spellings of one meaning, or two releases of a library it calls, are two artifacts.
    """
    return (TEMPLATES, dict(stated), [str(s.plan) for s in work.kernels.by_key.values()], sealed.VERSION)


def interface_of(
    blueprint: Blueprint, lowerings_types: Mapping[str, Any], wanted: tuple[str, ...]
) -> Interface:
    """Inputs in blueprint order, outputs with their inferred types, and the axis each dim is read from."""
    from_leaves = tuple(
        TensorSpec(v.name, v.kind, v.type.dtype.value, tuple(size_of(s) for s in v.type.shape))
        for v in blueprint.leaves
    )
    outputs = tuple(
        TensorSpec(
            o, "output", lowerings_types[o].dtype.value, tuple(size_of(s) for s in lowerings_types[o].shape)
        )
        for o in blueprint.outputs
    )
    dims = tuple(_source(blueprint, name) for name in blueprint.dims)
    places = {name: at for at, name in enumerate(blueprint.outputs)}
    updates = tuple((name, places[source]) for name, source in blueprint.updates.items())
    return Interface(from_leaves, outputs, dims, wanted, updates, blueprint.random)


def _source(blueprint: Blueprint, name: str) -> DimSource:
    spec = blueprint.dims[name]
    for position, leaf in enumerate(blueprint.leaves):
        for axis, size in enumerate(leaf.type.shape):
            if str(size) == name:
                return DimSource(name, spec.min, spec.max, spec.multiple_of, spec.tune, position, axis)
    raise EsperError(
        "E0536", f"no axis of an input is {name} alone", node=name,
        hint="a size is read from an axis that is the dim itself; leave out a dim that nothing uses",
    )  # fmt: skip


def externs_of(lowerings: tuple[PhaseLowering, ...]) -> list[str]:
    """Operators of libraries that the plans call."""
    calls = {
        s.op for low in lowerings for _, group in low.lowered for s in group.steps if isinstance(s, Call)
    }
    return sorted(calls)


def determinism(calls: Sequence[str], target: Target) -> str:
    """Kernels of ours add in a fixed order everywhere; some library calls do not."""
    loose = NONDETERMINISTIC["cpu" if target.kind == "cpu" else "cuda"] & set(calls)
    return "library-nondeterministic" if loose else "deterministic"


def target_record(target: Target, toolchain: Mapping[str, Any]) -> dict[str, Any]:
    """What the runtime needs to decide whether this machine can run the code. `min_driver` as CUDA counts
    (13000 is
    13.0): an object of ELF ABI 8 is refused by older drivers.
    """
    known = asdict(target)
    record = {k: known[k] for k in ("name", "kind", "arch", "match")}
    if target.kind == "cuda":
        record["min_driver"] = 13000 if toolchain.get("elf_abi", 0) >= 8 else 12040
    return record


def package(work: Work, library_versions: Mapping[str, str]) -> tuple[dict[str, Any], bytes]:
    """(manifest, container bytes) of finished work."""
    assert work.built is not None and work.graph is not None
    built = work.built
    wanted = tuple(work.joint.gradients) if work.joint else ()
    interface = interface_of(work.blueprint, work.graph.types, wanted)
    plans = tuple(low.plan for low in work.lowerings)
    launch = to_json(LaunchManifest(interface, plans, built.kernels))
    blueprint_id = canonical.blueprint_id(work.blueprint)
    calls = externs_of(work.lowerings)
    stated = {
        "format": FORMAT,
        "blueprint": {
            "id": blueprint_id,
            "name": work.blueprint.name,
            "interface": canonical.interface_digest(work.blueprint),
            "text": text.render(work.blueprint),
        },
        "target": target_record(work.target, built.toolchain),
        "pipeline": work.pipeline,
        "objective": work.objective,
        "toolchain": dict(built.toolchain),
        "determinism": determinism(calls, work.target),
        "dims": {d.name: {"min": d.min, "max": d.max, "multiple_of": d.multiple_of} for d in interface.dims},
        "launch": launch,
        "externs": [{"op": op, "versions": dict(library_versions)} for op in calls],
    }
    version = sha256_hex(canonical_json(version_key(work, stated)))
    artifact_id = f"{blueprint_id[:12]}-{work.target.name}-{work.pipeline}-{version[:8]}"
    manifest = {**stated, "version": version, "artifact_id": artifact_id}
    return manifest, pack(manifest, built.blobs)
