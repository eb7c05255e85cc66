"""find(): artifacts that fit a query, best first, and a reason for each that does not.

Order: more preferred tags, then lower p99 latency (unmeasured last), then lower risk, then id. Artifacts with
equal tags form a set; the sets that fit are known after looking at a few hundred rows, and each is read in
rank order.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from esper_ir.diagnostics import did_you_mean
from library.canon import parse_json
from library.contracts import TAGS, KernelMatch, KernelQuery, KernelQueryResult, Refusal
from library.errors import fail
from library.index import Index
from library.records import VALIDATED, ArtifactRecord

UNRANKED = 1e12
_MOST = 1e300
_SHOWN = 100
_FEW, _MANY, _AT_ONCE = 2000, 8000, 32
_FACTS = (
    """f.artifact, a.id, a.blueprint, f.latency_ms, f.memory_mb, f.risk, f.conf_level, f.interest, f.shapes"""
)
_FITS = """f.rank <= ?2 AND (?3 IS NULL OR f.memory_mb <= ?3) AND f.risk_rank <= ?4
    AND f.tagset IN (SELECT value FROM json_each(?1)) ORDER BY f.rank, f.risk_rank, f.artifact LIMIT ?5"""
# The same answer by several ways; the one that has to look at the fewest rows is taken.
_WAYS = {
    index: f"SELECT f.artifact FROM facts f INDEXED BY {index} WHERE {_FITS}"
    for index in ("facts_rank", "facts_set", "facts_memory", "facts_risk")
}
# The planner uses the index for a plain bound only; this way is taken only when there is one.
_WAYS["facts_memory"] = _WAYS["facts_memory"].replace(
    "(?3 IS NULL OR f.memory_mb <= ?3)", "f.memory_mb <= ?3"
)
_FIRST = f"""SELECT f.artifact FROM (SELECT rank, risk_rank, artifact, tagset, memory_mb FROM facts
    INDEXED BY facts_rank ORDER BY rank, risk_rank, artifact LIMIT ?6) f WHERE {_FITS}"""
_BESTS = """SELECT j.value, (SELECT f.rank FROM facts f INDEXED BY facts_set WHERE f.tagset = j.value
    ORDER BY f.rank LIMIT 1) FROM json_each(?1) j"""
_SOME_SETS = """SELECT f.rank, f.risk_rank, f.artifact FROM json_each(?1) j
    CROSS JOIN facts f INDEXED BY facts_set WHERE f.tagset = j.value AND f.rank <= ?2
    AND (?3 IS NULL OR f.memory_mb <= ?3) AND f.risk_rank <= ?4
    ORDER BY f.rank, f.risk_rank, f.artifact LIMIT ?5"""
_DETAILS = f"""SELECT f.tagset, {_FACTS} FROM json_each(?1) j CROSS JOIN facts f ON f.artifact = j.value
    JOIN artifacts a ON a.num = f.artifact ORDER BY j.key"""
_BY_BLUEPRINT = f"""SELECT f.tagset, {_FACTS} FROM artifacts a JOIN facts f ON f.artifact = a.num
    WHERE a.blueprint = ?1"""
_COUNT_MEMORY = "SELECT count(*) FROM (SELECT 1 FROM facts WHERE memory_mb <= ?1 LIMIT ?2)"
_COUNT_RISK = "SELECT count(*) FROM (SELECT 1 FROM facts WHERE risk_rank <= ?1 LIMIT ?2)"
_COUNT_SETS = "SELECT total(size) FROM tagsets WHERE num IN (SELECT value FROM json_each(?1))"


@dataclass(frozen=True)
class _TagSet:
    num: int
    arch: str
    target: str
    tags: frozenset[str]


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


def near_tags(tag: str, known: Iterable[str]) -> str:
    """A hint: the tags that look like one that is not known."""
    return did_you_mean(tag, sorted(known), "`esper-gauntlet tags --rules` lists those given by rule")


class Finder:
    """find() over one database. Keeps the tag sets it has read: their rows never change, only more are
    added.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._sets: dict[int, _TagSet] = {}
        self._tags = set(TAGS)

    def tags(self) -> frozenset[str]:
        """What a query may name: the tags that are given by rule or rank, and all that any artifact here
        has or had."""
        with self.index.lock:
            self._read()
        return frozenset(self._tags)

    def find(self, query: KernelQuery, *, explain: bool = False) -> KernelQueryResult:
        """Ranked answers; under 5 ms with 100,000 artifacts, longer with `explain`, which looks at each
        one. E0720 also for a tag that nothing here has and no rule gives.
        """
        check_query(query)
        with self.index.lock:
            self._read()
            self._check_tags(query)
            matches = self._of_blueprint(query) if query.blueprint_id else self._of_sets(query)
        if not explain:
            return KernelQueryResult(tuple(matches))
        chosen = {match.artifact_id for match in matches}
        refused: list[Refusal] = []
        reasons: Counter[str] = Counter()
        for artifact_id, reason in _refusals(self.index, query, chosen):
            reasons[reason.split(":")[0]] += 1
            if len(refused) < _SHOWN:
                refused.append(Refusal(artifact_id, reason))
        return KernelQueryResult(tuple(matches), tuple(refused), dict(reasons))

    def _read(self) -> None:
        """Tag sets that came since the last look."""
        text = "SELECT num, arch, target, tags FROM tagsets WHERE num > ?"
        for num, arch, target, tags in self.index.rows(text, (max(self._sets, default=0),)):
            self._sets[num] = _TagSet(num, arch, target, frozenset(tags.split()))
            self._tags |= self._sets[num].tags

    def _check_tags(self, query: KernelQuery) -> None:
        for name in ("required_tags", "preferred_tags", "excluded_tags"):
            for tag in getattr(query, name):
                if tag not in self._tags:
                    raise fail("E0720", f"unknown tag {tag!r}", node=name, hint=near_tags(tag, self._tags))

    def _groups(self, query: KernelQuery) -> list[list[int]]:
        """Tag sets that fit, grouped by how many preferred tags they have, most first."""
        required, excluded = frozenset(query.required_tags), frozenset(query.excluded_tags)
        preferred, arch = frozenset(query.preferred_tags), query.target_gpu_arch
        groups: dict[int, list[int]] = {}
        for num, found in self._sets.items():
            if arch is not None and arch not in (found.arch, found.target):
                continue
            if required <= found.tags and excluded.isdisjoint(found.tags):
                groups.setdefault(len(preferred & found.tags), []).append(num)
        return [groups[count] for count in sorted(groups, reverse=True)]

    def _of_sets(self, query: KernelQuery) -> list[KernelMatch]:
        wanted = query.limit if query.shape is None else max(500, query.limit)
        matches: list[KernelMatch] = []
        for group in self._groups(query):
            nums = self._nums(query, group, wanted)
            matches += self._details(query, self.index.rows(_DETAILS, (json.dumps(nums),)))
            if query.shape is None and len(matches) >= query.limit:
                break
        if query.shape is not None:
            matches.sort(key=_best_first)
        return matches[: query.limit]

    def _nums(self, query: KernelQuery, group: list[int], wanted: int) -> list[int]:
        """The best `wanted` artifacts of some tag sets, by the way that looks at the fewest rows."""
        sets = json.dumps(group)
        latency = UNRANKED if query.max_latency_ms is None or query.shape else query.max_latency_ms
        risk = UNRANKED if query.max_risk is None else query.max_risk
        bounds = (latency, query.max_memory_mb, risk, wanted)
        costs = {"facts_set": self._count(_COUNT_SETS, (sets,))}
        if query.max_memory_mb is not None:
            costs["facts_memory"] = self._count(_COUNT_MEMORY, (query.max_memory_mb, _MANY + 1))
        if query.max_risk is not None:
            costs["facts_risk"] = self._count(_COUNT_RISK, (query.max_risk, _MANY + 1))
        cost, way = min((cost, way) for way, cost in costs.items())
        if cost > _FEW and (way == "facts_set" or cost > _MANY):
            first = self.index.rows(_FIRST, (sets, *bounds, max(_FEW, 10 * wanted)))
            if len(first) == wanted:
                return [row[0] for row in first]
            if len(group) < len(self._sets):
                return self._best_sets_first(sets, *bounds)
            way = "facts_rank"
        return [row[0] for row in self.index.rows(_WAYS[way], (sets, *bounds))]

    def _best_sets_first(
        self, sets: str, latency: float, memory: float | None, risk: float, wanted: int
    ) -> list[int]:
        """Tags go with rank (the fastest share one): sets are read in the order of their best member.

        Done when the next set's best is worse than all that is wanted.
        """
        bests = sorted((best, num) for num, best in self.index.rows(_BESTS, (sets,)) if best is not None)
        top: list[tuple[Any, ...]] = []
        for start in range(0, len(bests), _AT_ONCE):
            chunk = [num for best, num in bests[start : start + _AT_ONCE] if best <= latency]
            if not chunk:
                break
            values = (json.dumps(chunk), latency, memory, risk, wanted)
            top = sorted(top + self.index.rows(_SOME_SETS, values))[:wanted]
            if len(top) == wanted:
                latency = top[-1][0]
        return [row[2] for row in top]

    def _count(self, text: str, values: tuple[Any, ...]) -> float:
        row = self.index.row(text, values)
        return row[0] if row else 0

    def _of_blueprint(self, query: KernelQuery) -> list[KernelMatch]:
        sets = {num for group in self._groups(query) for num in group}
        rows = self.index.rows(_BY_BLUEPRINT, (query.blueprint_id,))
        matches = self._details(query, [row for row in rows if row[0] in sets])
        return sorted(matches, key=_best_first)[: query.limit]

    def _details(self, query: KernelQuery, rows: Iterable[tuple[Any, ...]]) -> list[KernelMatch]:
        preferred = frozenset(query.preferred_tags)
        found = [_match(self._sets[row[0]], row[1:], preferred, query.shape) for row in rows]
        return [match for match in found if not _too_much(match, query)]


def _best_first(match: KernelMatch) -> tuple[Any, ...]:
    return -match.preferred_matched, _last(match.latency_ms), _last(match.risk), match.artifact_id


def _last(value: float | None) -> float:
    return math.inf if value is None else value


def _match(group: _TagSet, row: tuple[Any, ...], preferred: frozenset[str], shape: str | None) -> KernelMatch:
    _, artifact_id, blueprint, latency, memory, risk, conf_level, interest, shapes = row
    match = KernelMatch(
        artifact_id,
        blueprint,
        group.target,
        group.arch,
        tuple(sorted(group.tags)),
        len(preferred & group.tags),
        latency,
        memory,
        risk,
        conf_level,
        interest,
    )
    if shape is None:
        return match
    known = parse_json(shapes.encode())
    at = known.get(shape, {}) if isinstance(known, dict) else None
    if not isinstance(at, dict):
        raise fail("E0709", f"what queries know of {artifact_id} is damaged", node=artifact_id)
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
        group = _TagSet(0, arch, target, frozenset(tags.split()))
        reason = _mismatch(group, query) or _too_much(
            _match(group, tuple(row), frozenset(), query.shape), query
        )
        yield artifact_id, reason or "ranked below the limit"


def _mismatch(group: _TagSet, query: KernelQuery) -> str:
    if query.target_gpu_arch not in (None, group.arch, group.target):
        return f"architecture: {group.arch}"
    missing = sorted(set(query.required_tags) - group.tags)
    if missing:
        return f"tag missing: {', '.join(missing)}"
    excluded = sorted(group.tags & set(query.excluded_tags))
    return f"tag excluded: {', '.join(excluded)}" if excluded else ""


def facts_of(record: ArtifactRecord, report: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """What find() knows about an artifact from a report and annotation: its tag set, and the columns of facts
    from rank on.
    """
    wep = _mapping(report.get("wep"))
    given = report.get("generated_tags")
    listed = given if isinstance(given, list | tuple) else ()
    tags = " ".join(sorted({str(t) for t in listed if len(str(t).split()) == 1}))
    latency, memory = _number(wep.get("latency_ms_p99")), _number(wep.get("memory_mb_peak"))
    risk = _number(report.get("risk_score"))
    values = (
        UNRANKED if latency is None else latency,
        UNRANKED if risk is None else risk,
        latency,
        memory,
        risk,
        str(report.get("conf_level") or ""),
        _number(report.get("urabrask_interest")),
        json.dumps(_mapping(wep.get("shapes")), sort_keys=True),
    )
    return (record.arch, record.target, tags), values


def write_facts(index: Index, num: int, record: ArtifactRecord, report: Mapping[str, Any]) -> None:
    """What find() will know about a VALIDATED artifact, from a report or annotation. Inside a transaction."""
    tagset, values = facts_of(record, report)
    index.run("INSERT OR IGNORE INTO tagsets (arch, target, tags) VALUES (?, ?, ?)", tagset)
    ((number,),) = index.run("SELECT num FROM tagsets WHERE arch = ? AND target = ? AND tags = ?", tagset)
    drop_facts(index, num)  # not REPLACE: it would not tell the tag set that a member left
    index.run("INSERT INTO facts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (num, number, *values))


def known_facts(index: Index, artifact_id: str) -> tuple[tuple[str, ...], tuple[Any, ...]] | None:
    """As `facts_of`, from the rows that find() reads; None without them."""
    row = index.row(
        """SELECT t.arch, t.target, t.tags, f.rank, f.risk_rank, f.latency_ms, f.memory_mb, f.risk,
        f.conf_level, f.interest, f.shapes FROM facts f JOIN tagsets t ON t.num = f.tagset
        JOIN artifacts a ON a.num = f.artifact WHERE a.id = ?""",
        (artifact_id,),
    )
    return (row[:3], row[3:]) if row else None


def drop_facts(index: Index, num: int) -> None:
    """Forget an artifact that left VALIDATED. Inside a transaction."""
    index.run("DELETE FROM facts WHERE artifact = ?", (num,))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _MOST:
        return None
    return float(value)
