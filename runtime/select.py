"""Which artifact of a blueprint runs here: a pure function of (query, platforms, rows), every refusal with
its reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from esper_ir.diagnostics import Accepted, EsperError, Rejected
from library.platform import Platform
from library.records import PENDING_BENCHMARKING, VALIDATED, ArtifactRecord
from runtime.errors import fail

PIPELINES = ("aggressive", "standard", "fast")
"""Best first; a pipeline not named here comes after them."""


@dataclass(frozen=True)
class Query:
    """`kinds`: kinds of device wanted, best first; `faulty`: ids that failed in use, taken last;
    `unvalidated`: accept what is not proven yet, after everything that is."""

    blueprint: str
    kinds: tuple[str, ...] = ("cuda", "cpu")
    faulty: frozenset[str] = frozenset()
    unvalidated: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class Ranking:
    """`chosen` best first; `refused` by artifact id."""

    chosen: tuple[ArtifactRecord, ...]
    refused: Mapping[str, Rejected]


def rank(query: Query, platforms: Mapping[str, Platform], rows: Sequence[ArtifactRecord]) -> Ranking:
    """Order: not faulty, proven, kind of device, nearest architecture, pipeline, newest, id."""
    chosen: list[ArtifactRecord] = []
    refused: dict[str, Rejected] = {}
    for row in rows:
        judged = judge(query, platforms, row)
        if isinstance(judged, Rejected):
            refused[row.id] = judged
        else:
            chosen.append(judged.value)
    return Ranking(tuple(sorted(chosen, key=lambda row: _order(query, row))), refused)


def judge(
    query: Query, platforms: Mapping[str, Platform], row: ArtifactRecord
) -> Accepted[ArtifactRecord] | Rejected:
    """Whether one row may run: state, class of determinism, kind, architecture."""
    if row.state != VALIDATED and not (query.unvalidated and row.state == PENDING_BENCHMARKING):
        return Rejected("E0740", f"state {row.state}" + (f": {row.reason}" if row.reason else ""))
    if query.deterministic and row.determinism != "deterministic":
        return Rejected("E0807", f"determinism class {row.determinism}")
    if row.kind not in query.kinds:
        return Rejected("E0802", f"for {row.kind}, wanted {' or '.join(query.kinds)}")
    machine = platforms.get(row.kind)
    if machine is None:
        return Rejected("E0801", f"no {row.kind} device here")
    fits = machine.accepts(row.kind, row.arch)
    return fits if isinstance(fits, Rejected) else Accepted(row)


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
