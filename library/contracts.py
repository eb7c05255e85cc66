"""The records that other parts and other tools exchange, under the names the design documents give them.

Plain frozen dataclasses with strict decoding: unknown, missing and wrongly typed fields are E0720 and name
the field. `json_schema` exports them for tools that want a schema.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from library.errors import fail

T = TypeVar("T")
OUTCOMES = ("FOSSILIZED", "CULLED", "CANCELLED", "ROLLED_BACK", "EXPOSED", "CRASHED", "MISMATCH", "DIVERGED")


@dataclass(frozen=True)
class Blueprint:
    """A graph as the library holds it."""

    id: str
    name: str
    status: str
    architecture_ir: str


@dataclass(frozen=True)
class CompiledKernelArtifact:
    """One compiled artifact. `compilation_metadata`: pipeline, compilation_seconds, peak_memory_gb,
    toolchain_version, optimization_flags; `kernel_binary_ref` is sha256:<digest> of the container."""

    id: str
    blueprint_id: str
    status: str
    compilation_pipeline: str
    kernel_binary_ref: str
    compilation_metadata: Mapping[str, Any]
    validation_report: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class UrabraskValidationReport:
    """What the gauntlet writes down. `wep` is the weighted evaluation profile;
    an unmeasured field is absent."""

    benchmark_results: Mapping[str, Any]
    generated_tags: tuple[str, ...]
    baseline_comparison: Mapping[str, Any]
    passed_validation: bool
    hardware_context: Mapping[str, Any]
    report_timestamp: float
    wep: Mapping[str, Any]
    risk_score: float | None = None
    conf_level: str = "Speculative"
    urabrask_interest: float | None = None


@dataclass(frozen=True)
class FieldReport:
    """What became of an artifact in one training run. `outcome` is one of OUTCOMES;
    EXPOSED is use without failure."""

    blueprint_id: str
    kernel_artifact_id: str
    seed_id: str
    pre_metric: float
    post_metric: float
    outcome: str
    eval_metrics: Mapping[str, Any] = field(default_factory=dict)


TAGS = (
    "high_speed", "medium_speed", "low_speed", "low_memory", "medium_memory", "high_memory",
    "numerically_stable", "deterministic", "trainable", "memory_bound", "compute_bound", "faster_than_eager",
    "faster_than_compile", "low_power", "high_power", "basis:rule", "basis:percentile",
)  # fmt: skip
"""The tags that the gauntlet gives (`esper-gauntlet tags --rules`). Annotations may bring others."""


@dataclass(frozen=True)
class KernelQuery:
    """What a caller wants. `max_latency_ms` bounds the p99 of forward+backward in the largest bucket, or at
    `shape` (its key in the report's `wep.shapes`); `target_gpu_arch` is an architecture ("sm_90") or target
    name ("h100")."""

    blueprint_id: str | None = None
    required_tags: tuple[str, ...] = ()
    preferred_tags: tuple[str, ...] = ()
    excluded_tags: tuple[str, ...] = ()
    max_latency_ms: float | None = None
    max_memory_mb: float | None = None
    max_risk: float | None = None
    target_gpu_arch: str | None = None
    shape: str | None = None
    limit: int = 10


@dataclass(frozen=True)
class KernelMatch:
    """One answer: the artifact and why it stands where it stands."""

    artifact_id: str
    blueprint_id: str
    target: str
    arch: str
    tags: tuple[str, ...]
    preferred_matched: int
    latency_ms: float | None
    memory_mb: float | None
    risk: float | None
    conf_level: str
    interest: float | None


@dataclass(frozen=True)
class Refusal:
    """An artifact that was not chosen, and the first reason."""

    artifact_id: str
    reason: str


@dataclass(frozen=True)
class KernelQueryResult:
    """`matches` best first; with `explain`, `refused` holds some
    refusals and `reasons` counts all of them."""

    matches: tuple[KernelMatch, ...]
    refused: tuple[Refusal, ...] = ()
    reasons: Mapping[str, int] = field(default_factory=dict)


def decode(kind: type[T], data: Any) -> T:
    """A record from parsed JSON, strictly."""
    if not isinstance(data, Mapping):
        raise fail("E0720", f"{kind.__name__} must be an object")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, kind))}
    unknown = sorted(set(data) - set(fields))
    missing = sorted(
        n
        for n, f in fields.items()
        if n not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    if unknown or missing:
        raise fail("E0720", f"{kind.__name__}: fields missing {missing}, unknown {unknown}")
    return kind(**{name: _value(f"{kind.__name__}.{name}", hints[name], data[name]) for name in data})


def _value(where: str, hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _value(where, next(a for a in arguments if a is not type(None)), value)
    if origin is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise fail("E0720", f"{where} must be a list of texts", node=where)
        return tuple(value)
    if origin is not None:
        if not isinstance(value, Mapping):
            raise fail("E0720", f"{where} must be an object", node=where)
        return dict(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise fail("E0720", f"{where} must be {hint.__name__}, not {type(value).__name__}", node=where)
    return value


_JSON_TYPES = {str: "string", float: "number", int: "integer", bool: "boolean"}


def json_schema(kind: type) -> dict[str, Any]:
    """JSON Schema (2020-12) of one contract record."""
    hints, properties, required = typing.get_type_hints(kind), {}, []
    for item in dataclasses.fields(typing.cast(Any, kind)):
        properties[item.name] = _schema_of(hints[item.name])
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            required.append(item.name)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": kind.__name__,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _schema_of(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [_schema_of(a) for a in arguments if a is not type(None)]
        return {"anyOf": [*inner, {"type": "null"}]}
    if origin is tuple:
        return {"type": "array", "items": {"type": "string"}}
    return {"type": _JSON_TYPES.get(hint, "object")}
