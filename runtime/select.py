"""Which artifact of a blueprint runs here: a pure function of (query, platforms, rows, facts), every refusal
with its reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from esper_ir.diagnostics import Accepted, EsperError, Rejected
from library.platform import Platform
from library.records import PENDING_BENCHMARKING, VALIDATED, ArtifactRecord
from runtime.errors import fail

PIPELINES = ("aggressive", "standard", "fast")
"""Best first; a pipeline not named here comes after them."""


@dataclass(frozen=True)
class Query:
    """`kinds`: kinds of device wanted, best first; `faulty`: ids that failed in use, taken last;
    `unvalidated`: accept what is not proven yet, after everything that is; `strict`: refuse other versions
    of libraries; `dtypes` of inputs by name and `sizes` by dim: what a call would bring."""

    blueprint: str
    kinds: tuple[str, ...] = ("cuda", "cpu")
    faulty: frozenset[str] = frozenset()
    unvalidated: bool = False
    deterministic: bool = False
    strict: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What the manifest of an artifact says beyond its row: CUDA version of the driver it needs, {"name",
    "version"} of the libraries that it calls, dtype by input, (least, most, multiple of) by dim."""

    min_driver: int = 0
    externs: tuple[Mapping[str, str], ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Facts:
        """From a container's manifest."""
        driver, interface = manifest["target"].get("min_driver", 0), manifest["launch"]["interface"]
        return cls(
            driver if isinstance(driver, int) else 0,
            tuple(recorded_versions(manifest["externs"])),
            {spec["name"]: spec["dtype"] for spec in interface["inputs"] if spec["kind"] == "input"},
            {d["name"]: (d["min"], d["max"], d["multiple_of"]) for d in interface["dims"]},
        )


UNKNOWN = Facts()


def recorded_versions(externs: Sequence[Any]) -> list[dict[str, str]]:
    """{"name", "version"} of every library that the plans' extern steps reach, each once."""
    found: dict[str, str] = {}
    for step in externs:
        if isinstance(step, Mapping):
            found.update(step.get("versions", {}))
            found.update({step["name"]: step.get("version", "")} if "name" in step else {})
    return [{"name": name, "version": version} for name, version in sorted(found.items())]


@dataclass(frozen=True)
class Ranking:
    """`chosen` best first; `refused` by artifact id."""

    chosen: tuple[ArtifactRecord, ...]
    refused: Mapping[str, Rejected]


def rank(
    query: Query,
    platforms: Mapping[str, Platform],
    rows: Sequence[ArtifactRecord],
    facts: Mapping[str, Facts] | None = None,
) -> Ranking:
    """Order: not faulty, proven, kind of device, nearest architecture, pipeline, newest, id. `facts` by
    artifact id; a row without is judged by itself alone."""
    chosen: list[ArtifactRecord] = []
    refused: dict[str, Rejected] = {}
    for row in rows:
        judged = judge(query, platforms, row, (facts or {}).get(row.id, UNKNOWN))
        if isinstance(judged, Rejected):
            refused[row.id] = judged
        else:
            chosen.append(judged.value)
    return Ranking(tuple(sorted(chosen, key=lambda row: _order(query, row))), refused)


def judge(
    query: Query, platforms: Mapping[str, Platform], row: ArtifactRecord, facts: Facts = UNKNOWN
) -> Accepted[ArtifactRecord] | Rejected:
    """Whether one row may run: state, class of determinism, kind, architecture, driver, library versions,
    dtypes, sizes."""
    if row.state != VALIDATED and not (query.unvalidated and row.state == PENDING_BENCHMARKING):
        return Rejected("E0740", f"state {row.state}" + (f": {row.reason}" if row.reason else ""))
    if query.deterministic and row.determinism != "deterministic":
        return Rejected("E0807", f"determinism class {row.determinism}")
    if row.kind not in query.kinds:
        return Rejected("E0802", f"for {row.kind}, wanted {' or '.join(query.kinds)}")
    machine = platforms.get(row.kind)
    if machine is None:
        return Rejected("E0801", f"no {row.kind} device here")
    fits = machine.accepts(
        row.kind, row.arch, min_driver=facts.min_driver, externs=facts.externs, strict=query.strict
    )
    if isinstance(fits, Rejected):
        return fits
    return _serves(query, facts) or Accepted(row)


def _serves(query: Query, facts: Facts) -> Rejected | None:
    """Why the tensors of the query would be refused."""
    for name, dtype in query.dtypes.items():
        if facts.dtypes.get(name, dtype) != dtype:
            return Rejected("E0811", f"{name} is declared {facts.dtypes[name]}, wanted {dtype}")
    for name, size in query.sizes.items():
        least, most, step = facts.ranges.get(name, (size, size, 1))
        if not least <= size <= most or size % step:
            of = f", a multiple of {step}" if step > 1 else ""
            return Rejected("E0813", f"{name} = {size} is outside {least}..{most}{of}")
    return None


def _order(query: Query, row: ArtifactRecord) -> tuple[object, ...]:
    pipeline = PIPELINES.index(row.pipeline) if row.pipeline in PIPELINES else len(PIPELINES)
    proven = row.state == VALIDATED
    # Within one kind the higher architecture uses more of the machine: sm_90a over sm_80, x86-64-v4 over v3.
    higher = tuple(-ord(c) for c in row.arch)
    return (
        row.id in query.faulty,
        not proven,
        query.kinds.index(row.kind),
        higher,
        pipeline,
        -row.created,
        row.id,
    )


def nothing_suits(
    blueprint: str, ranking: Ranking, kinds: Collection[str], here: Collection[str]
) -> EsperError:
    """E0807 that lists every refusal; E0801 when only a card was wanted and there is none. `here`: kinds
    of device that this machine has."""
    lines = [f"{name}: {r.code} {r.reason}" for name, r in sorted(ranking.refused.items())]
    listed = "".join(f"\n    {line}" for line in lines[:20])
    code = "E0807" if set(kinds) & set(here) else "E0801"
    return fail(
        code,
        f"no artifact of blueprint {blueprint[:12]} for {' or '.join(kinds)} runs here{listed or ' (none)'}",
        node=blueprint,
        hint="`esper-forge compile` makes one for this machine, `esper-gauntlet bench --pending` proves it",
        details={"refused": {name: r.reason for name, r in ranking.refused.items()}},
    )
