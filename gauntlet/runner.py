"""Proves one artifact: workers judge, the supervisor (here) alone signs.

The supervisor opens the library with the validator key, hands the verified bytes to a worker that sees
neither library nor keys, puts down what came back, stores a failing case and records the verdict. It imports
no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EXIT_BACKEND, EsperError
from gauntlet import annotating, cases, opclass, profile, quarantine, sanitizer, tags
from gauntlet.exclusive import exclusive, physical
from gauntlet.isolate import (
    CRASH,
    ENDLESS,
    FINISHED,
    ILLEGAL,
    MACHINE,
    MEMORY,
    Ending,
    Event,
    ForkServer,
    Limits,
)
from gauntlet.jobs import encode_job
from gauntlet.report import UNMEASURED, WEP, StageReport, UrabraskValidationReport
from gauntlet.sampling import Effort
from library.manifest import unpack
from library.records import PENDING_BENCHMARKING, REJECTED, REVOKED, VALIDATED
from library.store import Library

CASES = "cases"
ELSEWHERE = "E0903"
"""What this machine cannot judge, whatever the artifact is worth."""
BLAMED = (CRASH, ILLEGAL, ENDLESS, MEMORY)
POLICY = "stage-1/3"
"""Name of the rules a verdict was made under; a change of bounds or stages makes a new one."""
SEEDS = 1 << 30
"""Values of cases are drawn by one of so many numbers: which one nobody knows who made the artifact."""
SEED = "ESPER_SEED"
"""Where this is in the environment it is that number: for whoever has to get the same verdicts again."""
Progress = Callable[[str, Event], None]


@dataclass(frozen=True)
class Verdict:
    """`passed` None: the machine failed, nothing was recorded and the artifact is still pending. `case`:
    digest."""

    artifact_id: str
    passed: bool | None
    reason: str
    stages: tuple[StageReport, ...]
    seconds: float
    case: str = ""
    recorded: bool = True

    @property
    def state(self) -> str:
        if self.passed is None:
            return PENDING_BENCHMARKING
        return VALIDATED if self.passed else REJECTED

    def to_json(self) -> dict[str, Any]:
        return {
            "artifact_id": self.artifact_id,
            "verdict": self.state,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "case": self.case,
            "stages": [vars(s) for s in self.stages],
        }


@dataclass(frozen=True)
class Judgement:
    """What the workers found about some bytes, before anything is signed. `spill`: the failing case,
    encoded; `code`: of the error that ended the judge itself."""

    passed: bool | None
    reason: str
    stages: tuple[StageReport, ...]
    context: Mapping[str, Any]
    seconds: float
    spill: bytes = b""
    code: str = ""


def prove(
    artifact_id: str,
    *,
    library: Path | str | Library | None = None,
    quick: bool = False,
    device: str | None = None,
    server: ForkServer | None = None,
    progress: Progress | None = None,
    compare: tuple[str, ...] = ("eager",),
    effort: Effort | None = None,
    again: bool = False,
    seed: int | None = None,
) -> Verdict:
    """Run every stage on one artifact and record the signed verdict. An artifact that has a verdict keeps it,
    unless it is to be judged and measured `again`: then the new one stands beside it.

    `library`: an open one (with the validator's role), a path, or the default place. `device`: "cpu",
    "cuda:0"; by default what the artifact is for. `compare`: baselines of the measurement, `effort`: what it
    spends (None: what `quick` asks for). `seed`: of the values of all cases, recorded with the verdict (None:
    that of ESPER_SEED, else a new one). E07xx from the library; E0902, E0903 when the machine is not fit to
    judge.
    """
    if not isinstance(library, Library) or server is None:
        options: dict[str, Any] = {"quick": quick, "device": device, "progress": progress}
        options |= {"compare": compare, "effort": effort, "again": again, "seed": seed}
        with contextlib.ExitStack() as held:
            if not isinstance(library, Library):
                library = held.enter_context(Library.open(library, create=False, roles=("validator",)))
            server = server or held.enter_context(ForkServer())
            return prove(artifact_id, library=library, server=server, **options)
    record = library.resolve(artifact_id)
    chosen = device or default_device(record.kind)
    names = [record.id] if chosen == "cpu" else [record.id, physical(chosen)]
    with exclusive(library.home, *names):
        known = library.verdict(record.id)
        if record.state == REVOKED:
            library.load(record.id)  # refused by name, whatever the verdict was
        if known is not None and not again:
            return _known(record.id, known.passed, known.reason, known.report)
        quarantine.admit(library.home, chosen, server)
        container = library.load(record.id, allow_unvalidated=True).container.data
        seed = _new_seed() if seed is None else seed
        found = judge(
            container, chosen, server, quick=quick, seed=seed, progress=progress, artifact_id=record.id
        )
        if found.code == ELSEWHERE:
            raise _elsewhere(record.id, f"it is for {record.arch}, which {chosen} here cannot run")
        if found.passed and chosen != "cpu":
            found = followed_by(found, sanitizer.LATER if quick else sanitizer.checks(container, chosen))
        if found.passed:
            job = profile.Job(chosen, quick, compare=compare, effort=effort)
            found = followed_by(found, measured(container, job, server, progress, record.id))
        if not found.passed and chosen != "cpu":
            quarantine.probe(library.home, chosen, server)  # before anybody is blamed
        return _recorded(library, record.id, found)


def _new_seed() -> int:
    told = os.environ.get(SEED, "")
    return int(told) % SEEDS if told.isdecimal() else secrets.randbelow(SEEDS)


def measured(
    container: bytes, job: profile.Job, server: ForkServer, progress: Progress | None, artifact_id: str
) -> StageReport:
    """The stage of measurement, with what peers are chosen by."""
    said = profile.measure(container, job, server, (lambda e: progress(artifact_id, e)) if progress else None)
    op_class, dtype = opclass.of_manifest(unpack(container).manifest)
    own = {"op_class": op_class, "dtype": dtype}
    return replace(said, metrics={**said.metrics, "profile": {**said.metrics.get("profile", {}), **own}})


def followed_by(found: Judgement, said: StageReport) -> Judgement:
    """The judgement with what a later stage said, or why it did not."""
    grown = replace(found, stages=(*found.stages, said), seconds=found.seconds + said.seconds)
    if said.outcome != "failed":
        return grown
    return replace(grown, passed=False, reason=f"{said.name}: {said.reason}")


def _recorded(library: Library, artifact_id: str, found: Judgement) -> Verdict:
    """Signed and kept, with the failing case; nothing when the machine failed."""
    if found.passed is None:
        return Verdict(artifact_id, None, found.reason, found.stages, found.seconds, recorded=False)
    digest = cases.save(library.home / CASES, found.spill).stem if found.spill else ""
    stages = tuple(replace(s, case=digest) if s.outcome == "failed" else s for s in found.stages)
    report = _report(artifact_id, found, stages, _compile_seconds(library, artifact_id))
    card = str(found.context.get("card", ""))
    library.record_verdict(artifact_id, report.to_json(), passed=found.passed, reason=found.reason, card=card)
    return Verdict(artifact_id, found.passed, found.reason, stages, found.seconds, digest)


def _known(artifact_id: str, passed: bool, reason: str, report: Mapping[str, Any]) -> Verdict:
    stages = tuple(StageReport(**s) for s in report.get("stages", ()))
    case = next((s.case for s in stages if s.case), "")
    return Verdict(
        artifact_id, passed, reason, stages, float(report.get("seconds", 0.0)), case, recorded=False
    )


def default_device(kind: str) -> str:
    """Of an artifact for this kind of target. E0903 for kinds that nothing here can judge."""
    devices = {"cpu": "cpu", "cuda": "cuda:0"}
    if kind not in devices:
        raise _elsewhere(kind, f"no device of kind {kind!r} to prove an artifact on")
    return devices[kind]


def _elsewhere(node: str, what: str) -> EsperError:
    hint = "prove it on a machine that has one; nothing was recorded"
    return EsperError(ELSEWHERE, what, node=node, hint=hint, exit_code=EXIT_BACKEND)


def judge(
    container: bytes,
    device: str,
    server: ForkServer,
    *,
    quick: bool = False,
    seed: int = 0,
    stages: tuple[str, ...] | None = None,
    recipe: Mapping[str, Any] | None = None,
    case: bytes = b"",
    limits: Limits | None = None,
    progress: Progress | None = None,
    artifact_id: str = "",
) -> Judgement:
    """Judge bytes that were verified; nothing is stored or signed. `recipe`: replay this one case of one
    stage.

    An end that could be the machine's doing (time, memory, a lost worker) is tried once more in a fresh
    worker before it counts.
    """
    began = time.monotonic()
    job = {"device": device, "quick": quick, "seed": seed, "stages": stages, "recipe": recipe}
    limits, enough = (limits, True) if limits else limits_of(container, device)

    def tell(event: Event) -> None:
        if progress:
            progress(artifact_id, event)

    def ended() -> Ending:
        word = secrets.token_hex(16)
        data = encode_job({**job, "word": word}, container, case)
        return server.run("gauntlet.judge:run", data, limits, tell, word)

    ending = ended()
    if ending.kind in (ENDLESS, MEMORY, MACHINE):
        ending = ended()
    if ending.kind == MEMORY and not enough:
        ending = replace(
            ending, kind=MACHINE, detail=f"{ending.detail}; this machine has too little to judge it"
        )
    found = _judgement(ending, time.monotonic() - began)
    if (
        found.passed is False
        and not found.spill
        and (last := ending.last("case"))
        and ending.kind != FINISHED
    ):
        remake = {**job, "recipe": last["recipe"], "reason": found.reason}
        made = server.run("gauntlet.judge:materialise", encode_job(remake, container), Limits())
        found = replace(found, spill=made.spill)
    return found


OWN_COPIES, MOST_OF_MACHINE = 16, 0.75
"""Weights in float64 that the judge itself may hold (gradients in several forms, under roundings); of the
memory of this machine."""


def limits_of(container: bytes, device: str) -> tuple[Limits, bool]:
    """What a worker may use: beside the candidate's share the judge's own copies of weights. Whether this
    machine has as much."""
    if device != "cpu":
        return Limits(output_bytes=4 << 30, address_space=False), True
    wanted = Limits().memory_bytes + OWN_COPIES * _weight_bytes(container)
    there = int(MOST_OF_MACHINE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Limits(memory_bytes=max(min(wanted, there), Limits().memory_bytes)), wanted <= there


def _weight_bytes(container: bytes) -> int:
    """In float64, of all inputs of one size; 0 where the manifest is no manifest, as the worker will say."""
    try:
        inputs = unpack(container).manifest["launch"]["interface"]["inputs"]
        shapes = [s["shape"] for s in inputs]
        return 8 * sum(prod(s) for s in shapes if s and all(isinstance(n, int) for n in s))
    except (EsperError, KeyError, TypeError, ValueError):
        return 0


def _judgement(ending: Ending, seconds: float) -> Judgement:
    stages = [_stage(e) for e in ending.events if e.get("event") == "result"]
    context = {k: v for k, v in (ending.last("context") or {}).items() if k != "event"}
    failed = next((s for s in stages if s.outcome == "failed"), None)
    if ending.kind == FINISHED:
        planned = (ending.last("plan") or {"stages": ()})["stages"]
        if failed is None and [s.name for s in stages] != list(planned):
            return Judgement(None, "not every stage gave a result", tuple(stages), context, seconds)
        reason = f"{failed.name}: {failed.reason}" if failed else ""
        return Judgement(failed is None, reason, tuple(stages), context, seconds, ending.spill)
    running = (ending.last("stage") or {"name": "loads"})["name"]
    if ending.kind not in BLAMED or _judge_broke(ending):
        tail = ending.output.strip().splitlines()[-1:] or [""]
        why = f"{running}: {ending.detail} {tail[0]}".strip()
        code = str((ending.last("broke") or {}).get("code", ""))
        return Judgement(None, why, tuple(stages), context, seconds, code=code)
    reason = f"{ending.kind}: {ending.detail}"
    stages.append(StageReport(running, "failed", ending.seconds, reason))
    return Judgement(False, f"{running}: {reason}", tuple(stages), context, seconds)


def _judge_broke(ending: Ending) -> bool:
    """A Python exception of the judge itself ends the worker with 1 and says so."""
    return ending.kind == CRASH and "exit code 1" in ending.detail and bool(ending.last("broke"))


def _stage(event: Event) -> StageReport:
    return StageReport(
        event["name"],
        event["outcome"],
        round(float(event["seconds"]), 4),
        str(event.get("reason", "")),
        metrics=dict(event.get("metrics", {})),
    )


def _compile_seconds(library: Library, artifact_id: str) -> float | str:
    """As the compiler signed it."""
    try:
        told = json.loads(library.side_file(artifact_id, "provenance.json"))
        return round(sum(float(seconds) for seconds in told["seconds"].values()), 4)
    except (EsperError, ValueError, KeyError, TypeError, AttributeError):
        return UNMEASURED


def _report(
    artifact_id: str, found: Judgement, stages: tuple[StageReport, ...], compile_seconds: float | str
) -> UrabraskValidationReport:
    values: dict[str, Any] = {"compile_seconds": compile_seconds}
    for stage in stages:
        values |= stage.metrics.get("profile", {})
        used = stage.metrics.get("tolerance_used")
        if used is not None:
            values["tolerance_used"] = max(used, values.get("tolerance_used", 0.0))
        if "drift" in stage.metrics:
            values.setdefault("precision_drift_vs_fp64", stage.metrics["drift"])
    report = UrabraskValidationReport(
        artifact_id,
        bool(found.passed),
        found.reason,
        stages,
        WEP.of(values),
        {**found.context, **_of_card(stages), "machine": platform.machine(), "system": platform.platform()},
        time.time(),
        round(found.seconds, 3),
        {s.name: _brief(s.metrics) for s in stages},
        baseline_comparison=profile.gains(values),
        policy=POLICY,
    )
    return replace(report, generated_tags=tags.of(report.to_json())) if found.passed else report


def _of_card(stages: tuple[StageReport, ...]) -> dict[str, Any]:
    """Driver, error correction and limits of the card, and its clock while it was measured."""
    measured = next((s.metrics for s in stages if s.name == profile.NAME), {})
    if "card" not in measured:
        return {}
    return {**measured["card"], "clock_mhz": measured["clock_mhz"], "throttled": measured["throttled"]}


def _brief(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Without what stands elsewhere in the report: the profile, and the distributions of the works."""
    return {k: v for k, v in metrics.items() if k not in ("profile", "works")}


def replay(
    name: str,
    *,
    library: Path | str | Library | None = None,
    device: str | None = None,
    server: ForkServer | None = None,
) -> Judgement:
    """Run one stored case alone, with its stored tensors. E0904, E0905."""
    if not isinstance(library, Library):
        with Library.open(library, create=False, readonly=True) as opened:
            return replay(name, library=opened, device=device, server=server)
    if server is None:
        with ForkServer() as own:
            return replay(name, library=library, device=device, server=own)
    case = cases.load(library.home / CASES, name)
    loaded = library.load(case.artifact, allow_unvalidated=True)
    chosen = device or default_device(loaded.record.kind)
    return judge(
        loaded.container.data,
        chosen,
        server,
        stages=(case.stage,),
        recipe=case.recipe,
        case=cases.encode(case),
        artifact_id=case.artifact,
    )


def annotate(artifact_id: str, library: Library) -> dict[str, Any]:
    """Sign tags, confidence and interest over one VALIDATED artifact; what was signed, as it was where
    nothing is new. E0721, E0724, E0910."""
    said, _ = annotating.annotate(library, [artifact_id])
    return next(iter(said.values()))


def dumps(document: Any) -> str:
    """One JSON document for standard output."""
    return json.dumps(document, indent=2, sort_keys=True)
