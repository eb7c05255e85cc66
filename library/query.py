"""find(): artifacts that fit a query, best first, and a reason for each that does not.

Order: more preferred tags, then lower p99 latency (unmeasured last), then lower risk, then id. Artifacts with
equal tags form a set; the sets that fit are known after looking at a few hundred rows, and each is read in
rank order.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from library.contracts import KernelMatch, KernelQuery, KernelQueryResult, Refusal
from library.errors import fail
from library.index import Index
from library.records import VALIDATED, ArtifactRecord

UNRANKED = 1e12
_SHOWN = 100
_FACTS = """f.rank, f.risk_rank, f.artifact, a.id, a.blueprint, f.latency_ms, f.memory_mb, f.risk,
    f.conf_level, f.interest, f.shapes"""
_FROM = "FROM facts f JOIN artifacts a ON a.num = f.artifact"
_BY_SET = f"""SELECT {_FACTS} {_FROM} WHERE f.tagset = ?1 AND f.rank <= ?2
    AND (?3 IS NULL OR f.memory_mb <= ?3) AND f.risk_rank <= ?4
    ORDER BY f.rank, f.risk_rank, f.artifact LIMIT ?5"""
_BY_BLUEPRINT = f"""SELECT f.tagset, {_FACTS} {_FROM} WHERE a.blueprint = ?1"""


@dataclass(frozen=True)
class _TagSet:
    num: int
    arch: str
    target: str
    tags: frozenset[str]
    preferred: int


def check_query(query: KernelQuery) -> None:
    """E0720 for limits and bounds that make no sense."""
    if not 1 <= query.limit <= 10_000:
        raise fail("E0720", f"limit must be 1 to 10000, not {query.limit}")
    for name in ("max_latency_ms", "max_memory_mb", "max_risk"):
        bound = getattr(query, name)
        if bound is not None and not (math.isfinite(bound) and bound >= 0):
            raise fail("E0720", f"{name} must be a number of at least 0, not {bound}")
    both = set(query.required_tags) & set(query.excluded_tags)
    if both:
        raise fail("E0720", f"tags both required and excluded: {', '.join(sorted(both))}")


def find(index: Index, query: KernelQuery, *, explain: bool = False) -> KernelQueryResult:
    """Ranked answers; under 5 ms with 100,000 artifacts, longer with `explain`, which looks at every
    artifact."""
    check_query(query)
    matches = _by_blueprint(index, query) if query.blueprint_id else _by_sets(index, query)
    if not explain:
        return KernelQueryResult(tuple(matches))
    chosen = {match.artifact_id for match in matches}
    refused: list[Refusal] = []
    reasons: Counter[str] = Counter()
    for artifact_id, reason in _refusals(index, query, chosen):
        reasons[reason.split(":")[0]] += 1
        if len(refused) < _SHOWN:
            refused.append(Refusal(artifact_id, reason))
    return KernelQueryResult(tuple(matches), tuple(refused), dict(reasons))


def _tag_sets(index: Index, query: KernelQuery) -> list[_TagSet]:
    arch = query.target_gpu_arch
    text = "SELECT num, arch, target, tags FROM tagsets WHERE ?1 IS NULL OR arch = ?1 OR target = ?1"
    found = []
    for num, set_arch, target, joined in index.rows(text, (arch,)):
        tags = frozenset(joined.split())
        if tags.issuperset(query.required_tags) and tags.isdisjoint(query.excluded_tags):
            preferred = len(tags.intersection(query.preferred_tags))
            found.append(_TagSet(num, set_arch, target, tags, preferred))
    return sorted(found, key=lambda s: -s.preferred)


def _by_sets(index: Index, query: KernelQuery) -> list[KernelMatch]:
    bound = UNRANKED if query.max_latency_ms is None or query.shape else query.max_latency_ms
    wanted = query.limit if query.shape is None else max(500, query.limit)
    risk = UNRANKED if query.max_risk is None else query.max_risk
    matches: list[KernelMatch] = []
    for _, group in groupby(_tag_sets(index, query), key=lambda s: s.preferred):
        lists = [
            [(s, row) for row in index.rows(_BY_SET, (s.num, bound, query.max_memory_mb, risk, wanted))]
            for s in group
        ]
        merged = heapq.merge(*lists, key=lambda pair: pair[1][:3])
        matches += _take(merged, query, wanted)
        if query.shape is None and len(matches) >= query.limit:
            break
    if query.shape is not None:
        matches.sort(key=lambda m: (-m.preferred_matched, _last(m.latency_ms), _last(m.risk), m.artifact_id))
    return matches[: query.limit]


def _by_blueprint(index: Index, query: KernelQuery) -> list[KernelMatch]:
    sets = {s.num: s for s in _tag_sets(index, query)}
    rows = index.rows(_BY_BLUEPRINT, (query.blueprint_id,))
    pairs = [(sets[row[0]], row[1:]) for row in rows if row[0] in sets]
    matches = list(_take(pairs, query, len(pairs)))
    matches.sort(key=lambda m: (-m.preferred_matched, _last(m.latency_ms), _last(m.risk), m.artifact_id))
    return matches[: query.limit]


def _last(value: float | None) -> float:
    return math.inf if value is None else value


def _take(
    pairs: Iterable[tuple[_TagSet, tuple[Any, ...]]], query: KernelQuery, count: int
) -> list[KernelMatch]:
    found: list[KernelMatch] = []
    for group, row in pairs:
        match = _match(group, row, query.shape)
        if not _too_much(match, query):
            found.append(match)
        if len(found) >= count:
            break
    return found


def _match(group: _TagSet, row: tuple[Any, ...], shape: str | None) -> KernelMatch:
    _, _, _, artifact_id, blueprint, latency, memory, risk, conf_level, interest, shapes = row
    match = KernelMatch(
        artifact_id,
        blueprint,
        group.target,
        group.arch,
        tuple(sorted(group.tags)),
        group.preferred,
        latency,
        memory,
        risk,
        conf_level,
        interest,
    )
    if shape is None:
        return match
    at = json.loads(shapes).get(shape, {})
    return replace(match, latency_ms=at.get("latency_ms_p99"), memory_mb=at.get("memory_mb_peak", memory))


def _too_much(match: KernelMatch, query: KernelQuery) -> str:
    """The first bound that a match breaks, as a reason; "" when it keeps all."""
    if query.shape is not None and match.latency_ms is None:
        return f"shape not measured: {query.shape}"
    for what, value, bound in (
        ("latency_ms", match.latency_ms, query.max_latency_ms),
        ("memory_mb", match.memory_mb, query.max_memory_mb),
        ("risk", match.risk, query.max_risk),
    ):
        if bound is not None and value is None:
            return f"{what} not measured"
        if bound is not None and value is not None and value > bound:
            return f"{what} too high: {value:g} > {bound:g}"
    return ""


def _refusals(index: Index, query: KernelQuery, chosen: set[str]) -> Iterable[tuple[str, str]]:
    text = f"""SELECT a.id, a.state, a.reason, a.arch, a.target, t.tags, {_FACTS}
        FROM artifacts a LEFT JOIN facts f ON f.artifact = a.num LEFT JOIN tagsets t ON t.num = f.tagset
        WHERE ?1 IS NULL OR a.blueprint = ?1"""
    for artifact_id, state, why, arch, target, tags, *row in index.rows(text, (query.blueprint_id,)):
        if artifact_id in chosen:
            continue
        if state != VALIDATED or tags is None:
            yield artifact_id, f"{state}: {why}" if why else state
            continue
        group = _TagSet(0, arch, target, frozenset(tags.split()), 0)
        reason = _mismatch(group, query) or _too_much(_match(group, tuple(row), query.shape), query)
        yield artifact_id, reason or "ranked below the limit"


def _mismatch(group: _TagSet, query: KernelQuery) -> str:
    if query.target_gpu_arch not in (None, group.arch, group.target):
        return f"architecture: {group.arch}"
    missing = sorted(set(query.required_tags) - group.tags)
    if missing:
        return f"tag missing: {', '.join(missing)}"
    excluded = sorted(group.tags & set(query.excluded_tags))
    return f"tag excluded: {', '.join(excluded)}" if excluded else ""


def write_facts(index: Index, num: int, record: ArtifactRecord, report: Mapping[str, Any]) -> None:
    """What find() will know about a VALIDATED artifact, from a report or annotation. Inside a transaction."""
    wep = _mapping(report.get("wep"))
    tags = " ".join(sorted({str(t) for t in report.get("generated_tags") or () if " " not in str(t)}))
    values = (record.arch, record.target, tags)
    index.run("INSERT OR IGNORE INTO tagsets (arch, target, tags) VALUES (?, ?, ?)", values)
    ((tagset,),) = index.run("SELECT num FROM tagsets WHERE arch = ? AND target = ? AND tags = ?", values)
    latency, memory = _number(wep.get("latency_ms_p99")), _number(wep.get("memory_mb_peak"))
    risk = _number(report.get("risk_score"))
    index.run(
        "INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            num,
            tagset,
            UNRANKED if latency is None else latency,
            UNRANKED if risk is None else risk,
            latency,
            memory,
            risk,
            str(report.get("conf_level") or ""),
            _number(report.get("urabrask_interest")),
            json.dumps(_mapping(wep.get("shapes"))),
        ),
    )


def drop_facts(index: Index, num: int) -> None:
    """Forget an artifact that left VALIDATED. Inside a transaction."""
    index.run("DELETE FROM facts WHERE artifact = ?", (num,))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
