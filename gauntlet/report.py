"""What is written down about an artifact: frozen records with units in their names, and their JSON.

`UrabraskValidationReport` and `WEP` (weighted evaluation profile) are the names of the design documents'
contracts. A number that was not measured is the text "unmeasured", never zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from esper_ir.diagnostics import EXIT_INTEGRITY, EsperError

SCHEMA = "esper-report/2"
READ = ("esper-report/1", SCHEMA)
"""Older reports lack fields, which count as not measured."""
UNMEASURED = "unmeasured"
UNRESOLVED = "unresolved"
"""Too short to tell from the cost of looking."""
Number = float | str
"""A measured number, UNMEASURED or UNRESOLVED."""
Span = tuple[float, float] | str


@dataclass(frozen=True)
class StageReport:
    """`outcome`: passed, failed or skipped; `reason` for the last two; `case`: digest of the stored case."""

    name: str
    outcome: str
    seconds: float
    reason: str = ""
    case: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WEP:
    """The weighted evaluation profile: forward plus backward at the largest measured sizes, unless the
    name says otherwise. A field that was not measured is UNMEASURED, a time too short to tell UNRESOLVED.

    Units are in the names: milliseconds, microseconds, bytes, megabytes (1e6 bytes), watts, joules, seconds.

    latency_interval_ms       span of the medians of the processes
    latency_ms_p99            of all samples, with its 95 % interval; needs 300
    forward_ms_median, ..     the artifact's, eager's and torch.compile's, interleaved in the same processes
    throughput_ops_per_sec    calls
    variance                  (largest - smallest) / median of the process medians
    conditions                "steady", or what spoiled the measurement: the canary moved, a throttled card
    memory_mb_peak            held by one call beyond its inputs
    occupancy                 share of the warps that can be resident, of the kernel where it is least
    bytes_moved, flops        at least, by forward and backward
    roofline_ms, _share       the floor by memory or by compute (`bound_by`), and its share of the median
    power_watts_avg, _idle    over windows of 5 s and more
    precision_drift_vs_fp64   root mean square error over the root mean square of the reference
    tolerance_used            the worst error over its bound (1.0 is the bound), over all cases
    host_us_per_call          to enqueue a call
    shapes                    per tuned size: latency_ms_median, latency_ms_p99, eager_ms_median, variance,
                              samples; memory_mb_peak at the largest
    op_class, dtype           what its peers are chosen by
    """

    latency_ms_mean: Number = UNMEASURED
    latency_ms_median: Number = UNMEASURED
    latency_interval_ms: Span = UNMEASURED
    latency_ms_p99: Number = UNMEASURED
    latency_p99_interval_ms: Span = UNMEASURED
    forward_ms_median: Number = UNMEASURED
    backward_ms_median: Number = UNMEASURED
    both_ms_median: Number = UNMEASURED
    eager_forward_ms_median: Number = UNMEASURED
    eager_backward_ms_median: Number = UNMEASURED
    eager_both_ms_median: Number = UNMEASURED
    compile_forward_ms_median: Number = UNMEASURED
    compile_backward_ms_median: Number = UNMEASURED
    compile_both_ms_median: Number = UNMEASURED
    throughput_ops_per_sec: Number = UNMEASURED
    samples: Number = UNMEASURED
    processes: Number = UNMEASURED
    variance: Number = UNMEASURED
    conditions: str = UNMEASURED
    memory_mb_peak: Number = UNMEASURED
    workspace_bytes: Number = UNMEASURED
    registers: Number = UNMEASURED
    spills: Number = UNMEASURED
    shared_memory_bytes: Number = UNMEASURED
    occupancy: Number = UNMEASURED
    bytes_moved: Number = UNMEASURED
    flops: Number = UNMEASURED
    bandwidth_bytes_per_s: Number = UNMEASURED
    peak_flops_per_s: Number = UNMEASURED
    roofline_ms: Number = UNMEASURED
    roofline_share: Number = UNMEASURED
    bound_by: str = UNMEASURED
    power_watts_avg: Number = UNMEASURED
    power_watts_idle: Number = UNMEASURED
    joules_per_call: Number = UNMEASURED
    precision_drift_vs_fp32: Number = UNMEASURED
    precision_drift_vs_fp64: Number = UNMEASURED
    tolerance_used: Number = UNMEASURED
    host_us_per_call: Number = UNMEASURED
    load_us: Number = UNMEASURED
    compile_seconds: Number = UNMEASURED
    op_class: str = UNMEASURED
    dtype: str = UNMEASURED
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(values: Mapping[str, Any]) -> WEP:
        """Only names of this record; others are refused."""
        known = {f.name for f in fields(WEP)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"not in the evaluation profile: {unknown}")
        typed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return WEP(**typed)


@dataclass(frozen=True)
class UrabraskValidationReport:
    """The signed content of a verdict. `report_timestamp`: seconds since 1970, UTC.

    `benchmark_results`: stage metrics by stage; `baseline_comparison`: percent gained against eager (positive
    is faster) by phase; `risk_score`, `conf_level`, `urabrask_interest` belong to annotations made later.
    `policy` names the rules; revoking one revokes its verdicts.
    """

    artifact_id: str
    passed_validation: bool
    reason: str
    stages: tuple[StageReport, ...]
    wep: WEP
    hardware_context: Mapping[str, Any]
    report_timestamp: float
    seconds: float
    benchmark_results: Mapping[str, Any] = field(default_factory=dict)
    generated_tags: tuple[str, ...] = ()
    baseline_comparison: Mapping[str, Any] = field(default_factory=dict)
    risk_score: Number = UNMEASURED
    conf_level: str = "Speculative"
    urabrask_interest: Number = UNMEASURED
    policy: str = ""
    schema: str = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data (tuples as lists)."""
        return json.loads(json.dumps(asdict(self)))

    @staticmethod
    def of(data: Mapping[str, Any]) -> UrabraskValidationReport:
        """The record back from its JSON. E0910 for what is none, or of a schema that is not known here."""
        try:
            if data["schema"] not in READ:
                raise ValueError(f"schema {data['schema']!r}, known are {', '.join(READ)}")
            stages = tuple(StageReport(**s) for s in data["stages"])
            profile, tags = WEP.of(data["wep"]), tuple(data["generated_tags"])
            return UrabraskValidationReport(
                **{**data, "stages": stages, "wep": profile, "generated_tags": tags}
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            name = str(data.get("artifact_id", "?")) if isinstance(data, Mapping) else "?"
            raise EsperError(
                "E0910",
                f"the report on {name} cannot be read: {type(error).__name__}: {error}",
                node=name,
                hint="`esper-gauntlet bench --again` makes another beside it",
                exit_code=EXIT_INTEGRITY,
            ) from error
