"""Simulated deployments: every candidate is examined a little, and what passes is trained with several times.

The supervisor of it: workers run candidate code, each in a fresh process; what kills one while a training
runs is the outcome of that training. Everything that became of a candidate is written in one go, so that a
run that is stopped goes on with the next.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gauntlet import opclass
from gauntlet.isolate import CRASH, ENDLESS, FINISHED, ILLEGAL, MEMORY, Ending, ForkServer, Limits
from gauntlet.jobs import encode_job
from gauntlet.risk import features
from gauntlet.risk.outcomes import REFUSED, SIMULATED, Log, Outcome, read
from library.manifest import unpack

BLAMED = (CRASH, ILLEGAL, ENDLESS, MEMORY)
TRAININGS = 4
"""With each artifact that passes its examination."""


@dataclass(frozen=True)
class Candidate:
    """An artifact to try: `container` reads its bytes; `planted`: class of the fault in it, empty for none;
    `turn` tells examinations of one artifact apart."""

    name: str
    planted: str
    container: Callable[[], bytes]
    turn: int = 0


@dataclass
class _Life:
    """What workers said about one candidate."""

    stages: list[dict[str, Any]] = field(default_factory=list)
    examined: bool = False
    deployments: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    became: dict[int, tuple[str, str]] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        if kind == "result":
            self.stages.append({"metrics": {}, "reason": "", **event})
        elif kind == "examined":
            self.examined = True
        elif kind == "deploy":
            self.deployments[event["seed"]] = event["deployment"]
        elif kind == "became":
            self.became[event["seed"]] = (event["outcome"], event["reason"])

    def open(self) -> list[int]:
        """Trainings that began and did not end."""
        return [seed for seed in self.deployments if seed not in self.became]


def collect(
    candidates: Iterable[Candidate],
    path: Path,
    server: ForkServer,
    *,
    wanted: int,
    seconds: float = float("inf"),
    trainings: int = TRAININGS,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Go on until there are so many outcomes in the file, the candidates are used up, or the time is
    over; how many there are. Candidates that the file knows are left out. `progress`: outcomes and
    failures so far."""
    end = time.monotonic() + seconds
    known = read(path) if path.exists() else []
    done, ended = {o.artifact for o in known}, [o for o in known if o.outcome != REFUSED]
    count, failures = len(ended), sum(o.failed for o in ended)
    with Log(path) as log:
        for candidate in candidates:
            if count >= wanted or time.monotonic() > end:
                break
            container = candidate.container()
            name = f"{hashlib.sha256(container).hexdigest()[:24]}.{candidate.turn}"
            if name in done:
                continue
            found = outcomes(candidate, container, name, server, trainings)
            log.append(found)
            done.add(name)
            count += sum(o.outcome != REFUSED for o in found)
            failures += sum(o.failed for o in found)
            if progress and found:
                progress(count, failures)
    return count


def outcomes(
    candidate: Candidate, container: bytes, name: str, server: ForkServer, trainings: int
) -> list[Outcome]:
    """What became of one candidate; nothing where the machine failed before anything was known."""
    seed = zlib.crc32(name.encode())
    seeds = [seed % 10_000_019 + at for at in range(trainings)]
    life = _Life()
    for _ in range(trainings + 1):  # a worker that dies takes one training with it
        left = [s for s in seeds if s not in life.became]
        job = {"device": "cpu", "quick": True, "seed": seed, "seeds": left, "examined": life.examined}
        ending = server.run(
            "gauntlet.risk.worker:run", encode_job(job, container), Limits(seconds=120.0), life.take
        )
        if ending.kind == FINISHED or not _goes_on(life, ending):
            break
    return _told(candidate, container, name, life, trainings)


def _goes_on(life: _Life, ending: Ending) -> bool:
    """Put down what a worker died of; whether there is something left to run."""
    own = ending.kind in BLAMED and not ending.last("broke")
    if own and not life.examined:
        life.stages.append({"name": "", "outcome": "failed", "reason": f"{ending.kind}: {ending.detail}"})
    for seed in life.open():
        if own:
            life.became[seed] = ("CRASHED", f"{ending.kind}: {ending.detail}")
        else:
            del life.deployments[seed]
    return own and life.examined


def _told(candidate: Candidate, container: bytes, name: str, life: _Life, trainings: int) -> list[Outcome]:
    manifest = unpack(container).manifest
    stages = life.stages
    profile = {k: v for s in stages for k, v in s.get("metrics", {}).get("profile", {}).items()}
    report = {"stages": stages, "wep": profile}
    graph = features.graph_of(manifest)
    pattern = features.check_pattern(report)

    def outcome(key: str, became: str, reason: str, known: Mapping[str, float]) -> Outcome:
        return Outcome(
            f"{name}:{key}", name, candidate.name, features.family(graph), opclass.of_graph(graph), pattern,
            became, reason, candidate.planted, SIMULATED, time.time(), known,
        )  # fmt: skip

    if not life.examined:
        failed = next((s for s in stages if s["outcome"] == "failed"), None)
        if failed is None:
            return []
        return [
            outcome("", REFUSED, f"{failed['name']}: {failed['reason']}"[:300], features.of(report, manifest))
        ]
    return [
        outcome(str(seed), became, reason, features.of(report, manifest, used(life.deployments[seed])))
        for seed, (became, reason) in life.became.items()
    ]


def used(deployment: Mapping[str, Any]) -> list[dict[str, int]]:
    """The sizes of a training: of full batches and of the last one."""
    return [dict(deployment["dims"]), dict(deployment["last"])]
