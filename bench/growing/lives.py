"""Figures about lives of seeds: time from command to active, cache hits, stalls with the forge busy, the trap
of attribution, decisions for many slots, rollbacks."""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F

import runtime
from bench.growing import artifacts, cores, trial
from bench.growing.hosts import WIDTH
from bench.results import ROOT, figure
from forge.service import compile_file
from gauntlet.isolate import ForkServer
from gauntlet.runner import prove
from gauntlet.sampling import BRIEF
from library.store import Library
from runtime import loader
from runtime.seeds.commands import KasminaControlCommand
from runtime.seeds.facts import SlotFacts
from runtime.seeds.health import health_of
from runtime.seeds.lifecycle import Fault, Lifecycle, Limits, Verb
from runtime.seeds.state import HEALTH
from runtime.strategy.choosing import Choice, query_of
from runtime.strategy.packet import HardwareContext, SystemStatePacket
from runtime.strategy.plateau import plateau
from runtime.strategy.policies import Heuristic, View, carry
from runtime.strategy.settings import Planned, QuerySettings, Settings
from runtime.strategy.sites import scores
from tests.runtime.seeds import garden, test_checkpoint

S = Lifecycle
ROLLBACKS = 300
QUICK = Limits(speculative=True, max_rent=10.0, embargo_epochs=0, deadline_least=1000)


class Bed:
    """A small wrapped host with its optimizer and endless data."""

    def __init__(self, library: Library, artifact: str, limits: Limits = QUICK, called: Any = None) -> None:
        self.model = runtime.wrap(trial.host(0), "blocks.*", library=library, limits=limits)
        self.growth, self.artifact = runtime.growth_of(self.model), artifact
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3, fused=True)
        runtime.attach(self.model, self.optimizer)
        self.data = trial.data(0)
        self.called = called(self.model) if called is not None else self.model
        self.order = torch.Generator().manual_seed(0)
        self.step()
        for slot in self.growth.slots:  # numbers of G0 that an artifact without a p99 lacks
            self.know(slot.id)

    def know(self, slot_id: str) -> None:
        self.growth.measure(slot_id, risk=0.0, confident=True, latency_us=1.0)

    def step(self) -> None:
        rows = torch.randint(trial.TRAIN, (trial.BATCH,), generator=self.order)
        self.optimizer.zero_grad()
        F.mse_loss(self.called(self.data.x[rows]), self.data.y[rows]).backward()
        self.optimizer.step()

    def send(self, verb: Verb, artifact: str = "", number: int = 0, **more: Any) -> Any:
        slot = self.growth.slots[number]
        self.growth.submit(KasminaControlCommand(slot.site.name, slot.index, verb, artifact, **more))
        return self.growth.commit()


def commands(library: Library, artifact: str, rounds: int = 200) -> dict[str, Any]:
    """A cached artifact from its command to TRAINING, one boundary (beside it the thread's own time, which
    others on the machine disturb least), and the cache's hits meanwhile; and telemetry from the device to a
    packet."""
    bed = Bed(library, artifact)
    tamiyo = runtime.TamiyoController(
        bed.model, config=Settings(policy="off", limits=QUICK, field_reports=False)
    )
    times, own, looks = [], [], []
    before = loader.cache_info()
    for number in range(rounds + 1):
        bed.know(bed.growth.slots[0].id)
        busy, began = time.thread_time(), time.perf_counter()
        bed.send(Verb.REQUEST_GERMINATION, artifact)
        spent, busy = time.perf_counter() - began, time.thread_time() - busy
        assert bed.growth.slots[0].state is S.TRAINING, tamiyo.explain()
        bed.step()
        began = time.perf_counter()
        tamiyo.look()
        looks.append(1e3 * (time.perf_counter() - began))
        bed.send(Verb.CANCEL_GERMINATION)
        if number == 0:
            before = loader.cache_info()  # from here on it is loaded
        else:
            times.append(1e3 * spent)
            own.append(1e3 * busy)
    after = loader.cache_info()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return {
        "command_to_active_ms_p50": figure(statistics.median(times), "ms", 1.0),
        "command_to_active_ms_p99": figure(sorted(times)[int(0.99 * len(times))], "ms"),
        "command_to_active_own_ms_p50": figure(statistics.median(own), "ms"),
        "cache_hit_ratio": figure(
            hits / max(hits + misses, 1), "ratio", 0.995, at_least=True, lookups=hits + misses
        ),
        "telemetry_to_packet_ms_p50": figure(statistics.median(looks), "ms", 10.0),
    }


# -- decisions


def decision(slots: int = 10_000, rounds: int = 9) -> dict[str, Any]:
    """Health, scores, plateau, carrying on and choosing for many slots, from facts to commands."""
    facts = [_facts(number) for number in range(slots)]
    settings, history = Settings(), (2.0, 1.5, 1.2, *[1.0] * 7)
    choice = Choice(query_of(QuerySettings(), HardwareContext(), Limits()))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        states = {f.slot: f for f in facts}
        packet = SystemStatePacket(9, None, 1.0, HardwareContext(), health_of(facts), states, history)
        found = scores(packet, settings.sites)
        flat = plateau(history, 99, settings.plateau)
        view = View(packet, found, flat, settings, Limits(), lambda slot: choice, 0, {})
        made = [*carry(view), *Heuristic().germinate(view)]
        times.append(1e3 * (time.perf_counter() - began))
        assert made and made[0].slot == f"layer{7 * slots // 10_000}/7"
    return {"decision_ms_10000_slots": figure(statistics.median(times), "ms", 100.0, slots=slots)}


def _facts(number: int) -> SlotFacts:
    sums = dict.fromkeys(HEALTH, 10.0) | {"rank": 1.0, "dead": 0.0, "gain": 0.01, "alignment": 1.0}
    if number == 707:
        sums |= {"gain": 500.0, "alignment": 9.0}
    layer, chunk = divmod(number, 100)
    return SlotFacts(
        f"layer{layer}/{chunk}",
        f"layer{layer}", chunk, (0, 64), S.DORMANT, "", 0.0, 0, False, Fault.NONE, 0, 0,
        0,
        -1, False, "FIXED_RAMP", 0, 0, sums, {}, {},
    )  # fmt: skip


# -- stalls


class Busy:
    """Another process that compiles again and again, as `esper-forge compile --background` does, in a library
    of its own, on other cores than this one where there are some. It can be stopped for a while."""

    def __init__(self, folder: str) -> None:
        code = (
            "import os; from pathlib import Path; from forge.service import compile_file\n"
            "from library.store import Library\n"
            "from runtime.sandbox import give_way\n"
            "give_way(whole=True)\n"
            f"os.sched_setaffinity(0, {sorted(cores.others())!r})\n"
            f"place = Path({folder!r})\n"
            "number = 0\n"
            "while True:\n"
            "    number += 1\n"
            "    with Library.open(place / str(number), trust=place / 'trust') as library:\n"
            "        compile_file(Path('examples/seed_mlp_64.json'), targets=('cpu',), library=library)\n"
        )
        self.process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        time.sleep(8.0)  # imports done, compiling

    def rest(self, on: bool) -> None:
        """Stop or go on; what its own workers have begun ends in the meantime."""
        os.killpg(self.process.pid, signal.SIGSTOP if on else signal.SIGCONT)
        time.sleep(1.0)


@contextmanager
def busy_forge() -> Iterator[Busy]:
    """The process, ended at the end. Raises RuntimeError when it had ended before."""
    with tempfile.TemporaryDirectory(prefix="esper-busy-", ignore_cleanup_errors=True) as folder:
        busy = Busy(folder)
        try:
            yield busy
            if busy.process.poll() is not None:
                raise RuntimeError("the forge that was to be busy ended")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(busy.process.pid, signal.SIGKILL)
            busy.process.wait()


class Stalls:
    """Counts what would be a compiler in the loop: processes started, graphs that dynamo or inductor made,
    Triton imported, blocks answered by their twins."""

    started: list[str] = []
    armed = False

    def __init__(self) -> None:
        if not Stalls.armed:  # an audit hook cannot be taken back
            Stalls.armed = True
            sys.addaudithook(lambda event, _: Stalls.started.append(event) if event in _PROCESSES else None)
        self.begin()

    def begin(self) -> None:
        self._processes, self._graphs = len(Stalls.started), self._made()

    @staticmethod
    def _made() -> int:
        return int(counters["stats"]["unique_graphs"]) + int(counters["inductor"]["fxgraph_cache_miss"])

    def compiles(self) -> int:
        return len(Stalls.started) - self._processes + self._made() - self._graphs


_PROCESSES = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system")


def stalls(library: Library, artifact: str, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Lives of seeds under torch.compile, the forge busy and resting in turns: graphs made after the first
    steps, processes started, fallbacks; and the p99 of a step with it busy, by that with it at rest. Beside
    it the same of the thread's own time, and how many steps had to give their core away: what the first has
    and these have not is the machine's."""
    counter = Stalls()
    bed = Bed(library, artifact, replace(QUICK, min_training_steps=4, g2_margin=-10.0, trust_radius=100.0),
              torch.compile)  # fmt: skip
    _life(bed, artifact, [], 0)
    times: dict[bool, list[Step]] = {False: [], True: []}
    fallbacks = 0
    with busy_forge() as busy:
        counter.begin()
        with cores.pinned():
            for number in range(1, 1 + 2 * TURNS):
                resting = bool(number % 2)
                busy.rest(resting)
                fallbacks = max(fallbacks, _life(bed, artifact, times[not resting], number))
        compiled = counter.compiles()
        busy.rest(False)
    p99, own = ({on: high([step[i] for step in found]) for on, found in times.items()} for i in (0, 1))
    preempted = {on: sum(step[2] for step in found) / len(found) for on, found in times.items()}
    say(f"p99 of a step: {1e3 * p99[False]:.2f} ms alone, {1e3 * p99[True]:.2f} ms with the forge busy")
    facts: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "steps": len(times[True])}
    return {
        "compiles_in_the_loop": figure(compiled, "count", 0),
        "eager_fallbacks_in_the_loop": figure(fallbacks, "count", 0),
        "step_p99_busy_over_idle": figure(p99[True] / p99[False], "ratio", 1.02, **facts),
        "step_own_p99_busy_over_idle": figure(own[True] / own[False], "ratio"),
        "steps_preempted_idle": figure(100.0 * preempted[False], "%"),
        "steps_preempted_busy": figure(100.0 * preempted[True], "%"),
        "step_ms_p50_idle": figure(1e3 * statistics.median(step[0] for step in times[False]), "ms"),
        "step_ms_p50_busy": figure(1e3 * statistics.median(step[0] for step in times[True]), "ms"),
    }


Step = tuple[float, float, bool]  # seconds of one step, the thread's own, whether it lost its core meanwhile


def high(values: Sequence[float]) -> float:
    """p99."""
    return sorted(values)[int(0.99 * len(values))]


TURNS, LIFE = 5, 400  # times that the forge is busy, and rests; steps of one, two lives of a seed


def _switches() -> int:
    """How often this thread had to give its core away."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _life(bed: Bed, artifact: str, times: list[Step], turn: int) -> int:
    """Steps with seeds that come, learn, are grafted and go; the blocks' fallbacks. `turn`: how many of these
    came before."""
    fallbacks = 0
    for number in range(turn * LIFE, (turn + 1) * LIFE):
        lost, own, began = _switches(), time.thread_time(), time.perf_counter()
        bed.step()
        times.append((time.perf_counter() - began, time.thread_time() - own, _switches() > lost))
        if number % 10:
            continue
        slot = bed.growth.slots[(number // 100) % 2]
        bed.know(slot.id)
        if slot.state is S.DORMANT:
            bed.growth.submit(KasminaControlCommand(slot.site.name, 0, Verb.REQUEST_GERMINATION, artifact))
        elif slot.state is S.TRAINING:
            bed.growth.measure(slot.id, held_out_gain=1.0, predicted_gain=-1.0, trust_ratio=0.0, activity=1.0,
                               gradients_finite=True)  # fmt: skip
            bed.growth.submit(KasminaControlCommand(slot.site.name, 0, Verb.PROMOTE))
        elif number % 100 == 90:
            bed.growth.submit(KasminaControlCommand(slot.site.name, 0, Verb.CULL, hard=True))
        if slot.seed is not None:
            fallbacks = max(fallbacks, slot.seed.block.report()["counters"]["eager_fallbacks"])
        bed.growth.commit()
    return fallbacks


# -- the trap


def still(name: str, trainable: bool) -> dict[str, Any]:
    """A seed that does nothing: x * 1, or x + 1e-30 p, with a parameter that learns and changes no bit."""
    nodes: list[dict[str, Any]] = [{"id": "y", "op": "mul", "inputs": ["x", 1.0]}]
    params: dict[str, Any] = {}
    if trainable:
        params = {"p": {"dtype": "float32", "shape": [WIDTH], "init": {"kind": "normal"}}}
        nodes = [
            {"id": "z", "op": "mul", "inputs": ["p", 1e-30]},
            {"id": "y", "op": "add", "inputs": ["x", "z"]},
        ]
    return {
        "format": "esper-blueprint/1",
        "name": name,
        "dims": {"rows": {"min": 1, "max": 65536, "tune": [128]}},
        "inputs": {"x": {"dtype": "float32", "shape": ["rows", WIDTH]}},
        "params": params,
        "nodes": nodes,
        "outputs": ["y"],
    }


def traps(library: Library, folder: Path) -> dict[str, str]:
    """Artifact ids of the two."""
    found = {}
    with ForkServer() as server:
        for name, trainable in (("still_trainable", True), ("still_fixed", False)):
            path = folder / f"{name}.json"
            path.write_text(json.dumps(still(name, trainable)), encoding="utf-8")
            (made,) = compile_file(path, targets=("cpu",), library=library)
            verdict = prove(made.artifact_id, library=library, server=server, quick=True, effort=BRIEF)
            if not verdict.passed:
                raise RuntimeError(f"{name}: {verdict.reason}")
            found[name] = made.artifact_id
    return found


GATES_OF_TRAP = {"G2": ("TRAINING", "GRAFTING"), "G4": ("EVALUATING", "FINE_TUNING"),
                 "G5": ("EVALUATING", "FOSSILIZED")}  # fmt: skip


def trap(folder: str, hosts: int = 20, epochs: int = 14) -> dict[str, Any]:
    """No-op seeds asked for at epoch 1 beside hosts that learn fast: which gates they passed. A fixed
    function has no incubation, so G2 is asked of the trainable one alone; alpha is nothing to a no-op, so G3
    may pass. `folder` gets a library of its own."""
    with artifacts.stocked(Path(folder), ()) as library:
        found = [
            _trapped(library, name, artifact, seed, epochs)
            for name, artifact in traps(library, Path(folder)).items()
            for seed in range(hosts // 2)
        ]
    facts = {"hosts": hosts, "hosts_loss_fell_by": statistics.median(fell for fell, _ in found)}
    return {
        f"trap_passed_{gate}": figure(sum(move in moves for _, moves in found), "seeds", 0, **facts)
        for gate, move in GATES_OF_TRAP.items()
    }


def _trapped(
    library: Library, name: str, artifact: str, seed: int, epochs: int
) -> tuple[float, set[tuple[str, str]]]:
    """By which share a host's loss fell, and the moves of the seed beside it."""
    settings = replace(
        trial.SETTINGS,
        policy="fixed_schedule",
        schedule=(Planned(1, "blocks.1/0", artifact),),
        limits=replace(trial.SETTINGS.limits or QUICK, settle_steps=5),
    )
    heard: list[Any] = []
    given, model = trial.data(seed), trial.host(seed)
    before = trial.test_loss(model, given)
    done = trial.train(model, given, seed, library, settings, heard.append, epochs)
    moves = {(e.facts["source"], e.facts["target"]) for e in heard if e.kind == "SEED_STAGE_CHANGED"}
    if not any(target == "LOADING" for _, target in moves):
        raise RuntimeError(f"{name}: the seed was never loaded")
    return 1.0 - done.loss / before, moves


# -- rollbacks


def rollbacks(first: int, end: int) -> list[str]:
    """The trials of the test suite, more of them: a run goes on from a checkpoint in some state of a seed, is
    put back to it, goes on again, and must be equal to the bit in everything that a checkpoint holds. What
    was not, of the trials from `first` to `end`."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="esper-rollback-") as folder:
        keep = {name: os.environ.get(name) for name in ("ESPER_LIBRARY", "ESPER_KEYS")}
        os.environ |= {"ESPER_LIBRARY": f"{folder}/library", "ESPER_KEYS": f"{folder}/keys"}
        ids = garden.fill(Path(folder))
        for number in range(first, end):
            state = test_checkpoint.STATES[number % len(test_checkpoint.STATES)]
            torch.manual_seed(number)
            differs = test_checkpoint.rolled(ids, Path(folder) / str(number), state, 1 + number % 4)
            wrong += [f"{number} {state}: {', '.join(differs[:3])}"] if differs else []
        for name, value in keep.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    return wrong


def rolled_back(wrong: list[str], of: int, trials: int = ROLLBACKS) -> dict[str, Any]:
    """The figure, from the trials that were made."""
    target = trials if of == trials else None
    return {
        "rollback_bit_equal": figure(of - len(wrong), "trials", target, at_least=True, of=of, wrong=wrong[:5])
    }
