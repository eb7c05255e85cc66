"""Which artifact a slot gets: a library query by tags from the context, then the answers that fit the slot,
best first, and a reason for each that does not, nearest to fitting first."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from esper_ir.diagnostics import EsperError, Rejected
from library import launch, ledger
from library.contracts import KernelMatch, KernelQuery, KernelQueryResult
from library.query import near_tags
from library.records import ARTIFACT_MOVES, PENDING_BENCHMARKING
from library.store import Library
from runtime import loader, system
from runtime.seeds.lifecycle import Limits
from runtime.seeds.seed import NHWC, SPECULATIVE, Spec, layout_of
from runtime.select import Facts
from runtime.state import given
from runtime.strategy.errors import fail
from runtime.strategy.packet import HardwareContext
from runtime.strategy.settings import QuerySettings

LOW_MEMORY, HIGH_SPEED = "low_memory", "high_speed"
GROUPS = 8  # reasons that one line shows
_OWN = re.compile(r"[0-9a-f]{8,}[\w-]*|\[[^]]*\]|\(axis.*|[\d.]+%?")
"""What differs between refusals for one reason."""
FAILURES = ("CRASHED", "MISMATCH", "DIVERGED", "ROLLED_BACK")


@dataclass(frozen=True)
class Choice:
    """`artifact` "" when nothing fits. `query`: what was asked; `matches`: the answers that fit, best first;
    `refused`: reason by artifact id, nearest to fitting first; where nothing fits, also of what the library
    itself left out of its answer."""

    query: KernelQuery
    matches: tuple[KernelMatch, ...] = ()
    refused: Mapping[str, Rejected] = field(default_factory=dict)

    @property
    def artifact(self) -> str:
        return self.matches[0].artifact_id if self.matches else ""

    def tags(self) -> tuple[str, ...]:
        """Tags of the query that the chosen artifact has."""
        if not self.matches:
            return ()
        asked = (*self.query.required_tags, *self.query.preferred_tags)
        return tuple(tag for tag in asked if tag in self.matches[0].tags)

    def why(self) -> str:
        """One line: what was asked, what was taken, what was refused."""
        asked = ", ".join((*self.query.required_tags, *(f"{t}?" for t in self.query.preferred_tags))) or "any"
        return f"asked for {asked}: {self.artifact or 'nothing fits'}" + (
            self._left() if self.refused else ""
        )

    def _left(self) -> str:
        """How many were refused for each reason, in the words of the nearest one."""
        groups: dict[str, list[str]] = {}
        for wrong in self.refused.values():
            groups.setdefault(_OWN.sub("", wrong.reason).strip(), []).append(wrong.reason)
        told = [f"{len(reasons)} because: {reasons[0]}" for reasons in groups.values()]
        more = [f"{len(told) - GROUPS} more reasons"] if len(told) > GROUPS else []
        return f"; {len(self.refused)} refused, " + "; ".join([*told[:GROUPS], *more])


def query_of(settings: QuerySettings, context: HardwareContext, limits: Limits) -> KernelQuery:
    """Tags from the context: low memory is preferred under pressure, high speed with a latency budget."""
    preferred = list(settings.preferred)
    if context.memory_used >= settings.memory_pressure:
        preferred.insert(0, LOW_MEMORY)
    if settings.latency_budget_ms is not None:
        preferred.insert(0, HIGH_SPEED)
    return KernelQuery(
        required_tags=settings.required,
        preferred_tags=tuple(dict.fromkeys(preferred)),
        excluded_tags=settings.excluded,
        max_latency_ms=settings.latency_budget_ms,
        # With Speculative confidence opted in, an unmeasured risk is taken too; the gate has the last word.
        max_risk=None if limits.speculative else limits.max_risk,
        limit=settings.candidates,
    )


_NEAREST = (("E1004",), ("E0781", "E0782", "E0783"), ("E0811",), ("E0813",), ("E0810",))
_HINTS: Mapping[str, str] = {
    "risk not measured": " (esper-gauntlet risk scores it; limits.speculative takes it as it is)",
    "risk too high": " (limits.max_risk)",
    "latency_ms": " (query.latency_budget_ms)",
    "tag missing": " (query.required)",
    "tag excluded": " (query.excluded)",
    "ranked below": " (query.candidates)",
    "none of": "",
    PENDING_BENCHMARKING: " (esper-gauntlet bench proves it)",
}


def _unsure(match: KernelMatch, limits: Limits) -> str:
    """Why the first gate would not trust a verdict; "" when it does."""
    if limits.speculative or (match.conf_level or SPECULATIVE) != SPECULATIVE:
        return ""
    return "confidence is Speculative, nobody has used it yet (limits.speculative takes it)"


class Chooser:
    """Asks one library; remembers what it read of each artifact (their contents never change). E1030 for a
    tag that the library does not know."""

    def __init__(self, library: Library, settings: QuerySettings) -> None:
        self.library, self.settings = library, settings
        known = library.tags()
        for name in ("required", "preferred", "excluded"):
            for tag in getattr(settings, name):
                if tag not in known:
                    hint = near_tags(tag, known)
                    raise fail("E1030", f"unknown tag {tag!r}", node=f"query.{name}", hint=hint)
        self._facts: dict[str, Mapping[str, Any]] = {}
        self._interfaces: dict[str, launch.Interface] = {}
        self._asked: tuple[tuple[KernelQuery, int], KernelQueryResult] | None = None

    def choose(
        self, spec: Spec, context: HardwareContext, limits: Limits, taken: Callable[[str], str] = lambda _: ""
    ) -> Choice:
        """Artifacts for one slot. `taken` gives a reason why an id may not be used there ("": it may):
        embargo, tombstone, failed before."""
        query = query_of(self.settings, context, limits)
        fitting: list[KernelMatch] = []
        refused: dict[str, Rejected] = {}
        for match in self._ordered(self.library.find(query).matches):
            reason = taken(match.artifact_id) or _unsure(match, limits)
            wrong = self.misfit(spec, match.artifact_id) or (Rejected("E1004", reason) if reason else None)
            if wrong is None:
                fitting.append(match)
            else:
                refused[match.artifact_id] = wrong
        if not fitting:
            refused = {**self._left_out(query, spec), **refused}
        nearest = sorted(refused.items(), key=lambda pair: self._far(spec, *pair))
        return Choice(query, tuple(fitting), dict(nearest))

    def _left_out(self, query: KernelQuery, spec: Spec) -> dict[str, Rejected]:
        """What the library's answer left out, with its reason or, where it would not fit anyway, with that;
        and what fits the query but is none of the blueprints that are wanted."""
        found: dict[str, Rejected] = {}
        asked = self._explained(query)
        wanted = [(m.artifact_id, "none of query.blueprints") for m in asked.matches]
        for artifact_id, reason in [*wanted, *((r.artifact_id, r.reason) for r in asked.refused)]:
            state = reason.split(":")[0]
            if state in ARTIFACT_MOVES:
                found[artifact_id] = Rejected("E0740", reason + _HINTS.get(state, ""))
                continue
            kind = next((k for k in _HINTS if reason.startswith(k)), "")
            told = Rejected("E1004", reason + _HINTS.get(kind, ""))
            found[artifact_id] = self.misfit(spec, artifact_id) or told
        return found

    def _explained(self, query: KernelQuery) -> KernelQueryResult:
        """Looks at every artifact, so once for all slots, and again when the library changed."""
        key = query, ledger.size(self.library.index)
        if self._asked is None or self._asked[0] != key:
            self._asked = key, self.library.find(query, explain=True)
        return self._asked[1]

    def _far(self, spec: Spec, artifact_id: str, wrong: Rejected) -> tuple[float, ...]:
        """How far a refused artifact is from fitting: what only a setting keeps out, then another machine,
        dtype, size and shape, then what is not validated; the smaller ones first, and the more alike."""
        far = next((n for n, codes in enumerate(_NEAREST) if wrong.code in codes), len(_NEAREST))
        entry = given(self._interfaces[artifact_id])[:1] if artifact_id in self._interfaces else ()
        if not entry or wrong.code == "E1004":
            return far, self.parameters(artifact_id) if entry else 0, 0
        axes, here = entry[0].shape, spec.shape
        if len(here) == len(NHWC):  # images are given with the channels last
            here = tuple(here[axis] for axis in NHWC)
        unlike = [abs(a - b) for a, b in zip(axes[::-1], here[::-1], strict=False) if isinstance(a, int)]
        return far, abs(len(axes) - len(here)), sum(unlike)

    def _ordered(self, matches: tuple[KernelMatch, ...]) -> list[KernelMatch]:
        wanted = self.settings.blueprints
        if not wanted:
            return list(matches)
        ranked = [
            (number, match)
            for match in matches
            for number, blueprint in enumerate(wanted)
            if match.blueprint_id.startswith(blueprint)
        ]
        return [match for _, match in sorted(ranked, key=lambda pair: pair[0])]

    def misfit(self, spec: Spec, artifact_id: str) -> Rejected | None:
        """Why an artifact cannot sit in a chunk of this shape, dtype and device; None when it can."""
        manifest = self._manifest(artifact_id)
        if isinstance(manifest, EsperError):
            return Rejected(manifest.code, manifest.message)
        fits = layout_of(self._interfaces[artifact_id], spec)
        if isinstance(fits, Rejected):
            return fits
        facts, target = Facts.of(manifest), manifest["target"]
        machine = system.machine(spec.device.type, spec.device.index or 0)
        judged = machine.accepts(
            target["kind"],
            target["arch"],
            min_driver=facts.min_driver,
            externs=facts.externs,
            strict=loader.strict(),
        )
        return judged if isinstance(judged, Rejected) else None

    def parameters(self, artifact_id: str) -> int:
        """How many an artifact brings that learn; 0 where it cannot be read."""
        if isinstance(self._manifest(artifact_id), EsperError):
            return 0
        interface = self._interfaces[artifact_id]
        learn = [s for s in interface.inputs if s.kind == "param" and s.name in interface.differentiable]
        return sum(math.prod(n for n in s.shape if isinstance(n, int)) for s in learn)

    def evidence(self, artifact_id: str, limits: Limits) -> dict[str, float]:
        """Numbers that gate G0 asks for and the library holds under other names. Latency: the upper end of
        the interval of its mean where no p99 was measured, microseconds. Only where Speculative confidence is
        opted
        in: that it is taken, and a risk where nobody scored one, by the rule of succession, (failures + 1) /
        (trials + 2), over the cases that the gauntlet ran and what became of the artifact in use."""
        try:
            verdict, told = self.library.verdict(artifact_id), self.library.annotation(artifact_id)
            used = self.library.outcomes(artifact_id)
        except EsperError:
            return {}
        report: Mapping[str, Any] = {**(verdict.report if verdict else {}), **told}
        found: dict[str, float] = {}
        profile = report.get("wep") or {}
        bounds = profile.get("latency_interval_ms")
        if not isinstance(profile.get("latency_ms_p99"), int | float) and isinstance(bounds, list | tuple):
            found["latency_us"] = 1e3 * float(bounds[-1])
        if limits.speculative:
            found["confident"] = 1.0
        if limits.speculative and not isinstance(report.get("risk_score"), int | float):
            cases = sum(int(stage.get("metrics", {}).get("cases", 0)) for stage in report.get("stages", ()))
            failures = sum(outcome.outcome in FAILURES for outcome in used)
            found["risk"] = (failures + 1) / (cases + len(used) + 2)
        return found

    def _manifest(self, artifact_id: str) -> Mapping[str, Any] | EsperError:
        if artifact_id not in self._facts:
            try:
                manifest = self.library.load(artifact_id).container.manifest
                self._interfaces[artifact_id] = launch.from_json(manifest["launch"], lazy=True).interface
                self._facts[artifact_id] = manifest
            except EsperError as error:
                return error  # not remembered: revoked today, perhaps restored tomorrow
        return self._facts[artifact_id]
