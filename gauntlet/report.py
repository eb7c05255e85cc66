"""What is written down about an artifact: frozen records with units in their names, and their JSON.

`UrabraskValidationReport` and `WEP` (weighted evaluation profile) are the names of the design documents'
contracts. A number that was not measured is the text "unmeasured", never zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

SCHEMA = "esper-report/1"
UNMEASURED = "unmeasured"
Number = float | str
"""A measured number or UNMEASURED."""


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
    """Forward plus backward at the largest measured sizes, unless the name says otherwise.

    Milliseconds, bytes, megabytes (1e6 bytes), watts, joules, microseconds as named. `latency_interval_ms`:
    the 95 % order-statistic interval of the median. `precision_drift_vs_fp64`: worst error over bound is
    `tolerance_used` (1.0 is the bound); drift is the root mean square error over the root mean square of the
    fp64 result.
    """

    latency_ms_mean: Number = UNMEASURED
    latency_ms_median: Number = UNMEASURED
    latency_ms_p99: Number = UNMEASURED
    latency_interval_ms: tuple[float, float] | str = UNMEASURED
    forward_ms_median: Number = UNMEASURED
    backward_ms_median: Number = UNMEASURED
    eager_forward_ms_median: Number = UNMEASURED
    eager_backward_ms_median: Number = UNMEASURED
    throughput_ops_per_sec: Number = UNMEASURED
    variance: Number = UNMEASURED
    memory_mb_peak: Number = UNMEASURED
    workspace_bytes: Number = UNMEASURED
    registers: Number = UNMEASURED
    spills: Number = UNMEASURED
    shared_memory_bytes: Number = UNMEASURED
    occupancy: Number = UNMEASURED
    bytes_moved: Number = UNMEASURED
    flops: Number = UNMEASURED
    roofline_share: Number = UNMEASURED
    power_watts_avg: Number = UNMEASURED
    joules_per_call: Number = UNMEASURED
    precision_drift_vs_fp32: Number = UNMEASURED
    precision_drift_vs_fp64: Number = UNMEASURED
    tolerance_used: Number = UNMEASURED
    host_us_per_call: Number = UNMEASURED
    load_us: Number = UNMEASURED
    compile_seconds: Number = UNMEASURED

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
        """The record back from its JSON."""
        stages = tuple(StageReport(**s) for s in data["stages"])
        tags = tuple(data["generated_tags"])
        return UrabraskValidationReport(
            **{**data, "stages": stages, "wep": WEP.of(data["wep"]), "generated_tags": tags}
        )
