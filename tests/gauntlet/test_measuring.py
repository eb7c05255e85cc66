"""Measured on this processor, and on a card that is only pretended."""

from __future__ import annotations

import math
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from torch._dynamo.utils import counters

from esper_ir import text, verify
from gauntlet import nvbench, nvml, profile, runner, workload
from gauntlet.cli import main
from gauntlet.isolate import FINISHED, ILLEGAL, Ending, Errand, ForkServer
from gauntlet.jobs import decode_job
from gauntlet.measuring import peak_bytes
from gauntlet.opclass import of_graph
from gauntlet.progress import Estimate, Report
from gauntlet.report import UNMEASURED, WEP
from gauntlet.sampling import BRIEF, Effort
from gauntlet.subject import Subject
from library.manifest import unpack
from library.store import Library
from tests.faults import handmade, toys
from tests.gauntlet.conftest import put
from tests.gauntlet.test_page import report
from tests.source import ROOT

SHORT = Effort(samples=20, width=1.0, patience_s=0.0, seconds=0.3, heat_s=0.0, processes=2)
CARD_ONLY = ("registers", "spills", "shared_memory_bytes", "occupancy", "power_watts_avg", "power_watts_idle",
             "joules_per_call", "host_us_per_call", "compile_both_ms_median")  # fmt: skip


def test_eager_is_timed_where_it_is_measured_by_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What libraries plan for a thread is not there for another: nothing of it may run beside."""
    subject = Subject(unpack(handmade.build(toys.norm())), torch.device("cpu"))
    seen: list[tuple[dict[str, int], bool]] = []
    plain = Subject._measured

    def run(self: Subject, dims: dict[str, int]) -> float:
        seen.append((dims, torch.autograd.is_multithreading_enabled()))
        return plain(self, dims)

    monkeypatch.setattr(Subject, "_measured", run)
    at = subject.largest_dims(1 << 14)
    assert subject.eager_at(at) > 0 and seen == [(at, False)] * 2
    assert torch.autograd.is_multithreading_enabled() and at != subject.base_dims()


def test_the_profile_of_a_processor(server: ForkServer) -> None:
    container = handmade.build(toys.norm())
    said = profile.measure(container, profile.Job("cpu", effort=SHORT), server)
    assert said.outcome == "passed", said.reason
    found = said.metrics["profile"]
    wep = WEP.of(found)
    assert all(getattr(wep, name) == UNMEASURED for name in CARD_ONLY), "never zero"
    assert wep.processes == 2 and isinstance(wep.samples, int) and wep.samples >= 40
    assert wep.latency_ms_p99 == UNMEASURED or wep.samples >= profile.LEAST_P99
    for name in ("memory_mb_peak", "bytes_moved", "flops", "roofline_share", "load_us", "variance",
                 "throughput_ops_per_sec", "eager_both_ms_median", "precision_drift_vs_fp32"):  # fmt: skip
        assert isinstance(value := getattr(wep, name), float | int) and value >= 0, name
    low, high = found["latency_interval_ms"]
    assert low <= found["latency_ms_median"] <= high
    works = said.metrics["works"]
    assert set(works) == {
        *("forward", "backward", "both"),
        *("eager forward", "eager backward", "eager both"),
        "copy",
    }
    assert all(len(work["quantiles_us"]) == 41 for work in works.values())
    assert wep.bound_by in ("memory", "compute") and wep.shapes
    assert said.metrics["context"]["sandbox"] in ("limits", "landlock", "full")
    spent = said.metrics["process_seconds"]
    assert [set(s) for s in spent] == [
        {"begun", "waited", "sampled", "read once"},
        {"begun", "waited", "sampled"},
    ]
    assert sum(sum(s.values()) for s in spent) <= said.seconds


def test_in_a_hurry_eager_stands_ready_on_one_set() -> None:
    subject = Subject(unpack(handmade.build(toys.norm())), torch.device("cpu"))
    for baselines, most in ((workload.SETS, workload.SETS), (1, 1)):
        at = workload.workload(subject, workload.sizes(subject, True)[-1], 0, {}, baselines)
        counts = {name: len(works) for name, works in at.works.items()}
        assert counts["both"] == workload.SETS and counts["eager both"] == most


def test_processes_that_die_are_named(server: ForkServer) -> None:
    broken = profile.measure(b"\0" * 64, profile.Job("cpu", effort=SHORT), server)
    assert broken.outcome == "skipped" and "no process could measure: process 1" in broken.reason


@pytest.mark.parametrize(
    ("died", "enough", "begun"), [((), 0.0, 3), ((), math.inf, 5), ((0,), 0.0, 4), ((0, 3), 0.0, 5)]
)
def test_in_a_hurry_three_that_measured_do(
    monkeypatch: pytest.MonkeyPatch, died: tuple[int, ...], enough: float, begun: int
) -> None:
    """Those that die are no reason to look at fewer."""
    seen: list[int] = []

    def run_all(server: ForkServer, errands: Sequence[Errand]) -> list[Ending]:
        (number,) = (decode_job(e.arguments)[0]["number"] for e in errands)
        seen.append(number)
        if number in died:
            return [Ending(ILLEGAL, "SIGSEGV in candidate code", (), "", 0.0)]
        return [Ending(FINISHED, "", ({"event": "measured"},), "", 0.0)]

    monkeypatch.setattr(ForkServer, "run_all", run_all)
    monkeypatch.setattr(profile, "metrics_of", lambda found, job: {"processes": len(found)})
    job = profile.Job("cpu", effort=replace(SHORT, processes=5, enough_s=enough))
    said = profile.measure(b"", job, ForkServer())
    assert len(seen) == begun and said.outcome == ("failed" if len(died) > 1 else "passed")


@pytest.mark.parametrize(("enough", "begun"), [(3.5, 3), (4.0, 4), (4.9, 4), (5.0, 5)])
def test_none_is_begun_that_would_end_too_late(
    monkeypatch: pytest.MonkeyPatch, enough: float, begun: int
) -> None:
    now = [0.0]

    def run_all(server: ForkServer, errands: Sequence[Errand]) -> list[Ending]:
        now[0] += 1.0
        return [Ending(FINISHED, "", ({"event": "measured"},), "", 0.0) for _ in errands]

    monkeypatch.setattr(profile, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(ForkServer, "run_all", run_all)
    monkeypatch.setattr(profile, "metrics_of", lambda found, job: {"processes": len(found)})
    job = profile.Job("cpu", effort=replace(SHORT, processes=5, enough_s=enough))
    assert profile.measure(b"", job, ForkServer()).metrics["processes"] == begun


def test_without_a_folder_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**given: Any) -> None:
        raise FileNotFoundError(2, "no usable temporary directory")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", none)
    said = profile.measure(b"", profile.Job("cpu", effort=SHORT), ForkServer())
    assert said.outcome == "skipped" and "no usable temporary directory" in said.reason


def test_code_that_kills_what_measures_it_is_refused(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "TARGET", "tests.gauntlet.standins:illegal_measured")
    said = profile.measure(b"", profile.Job("cpu", effort=SHORT), server)
    assert said.outcome == "failed" and said.reason.count("illegal-access") == 2
    once = profile.measure(b"", profile.Job("cpu", effort=replace(SHORT, processes=1)), server)
    assert once.outcome == "skipped", "one death may be the machine's"


def test_who_speaks_in_the_name_of_what_measures_measures_nothing(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "TARGET", "tests.gauntlet.standins:pretender")
    said = profile.measure(b"", profile.Job("cpu", effort=SHORT), server)
    assert said.outcome == "skipped" and "in the judge's name" in said.reason


def test_again_stands_beside_and_is_history(home: Path, server: ForkServer) -> None:
    artifact = put(home, toys.affine())
    for again in (False, True):
        found = runner.prove(artifact, library=home, server=server, quick=True, effort=BRIEF, again=again)
        assert found.recorded and found.passed
    with Library.open(home, readonly=True) as library:
        verdicts = library.verdicts(artifact)
        assert len(verdicts) == 2 and verdicts[0].time >= verdicts[1].time
        assert library.verdict(artifact) == verdicts[0]


def test_tagging_again_keeps_what_was_said(home: Path) -> None:
    artifact = put(home, toys.affine())
    with Library.open(home, roles=("validator",)) as library:
        library.record_verdict(artifact, report(artifact), passed=True)
        first = runner.annotate(artifact, library)
        library.annotate(artifact, {**first, "generated_tags": ["by_hand"]})
        last = runner.annotate(artifact, library)
        versions = library.annotations(artifact)
    assert last["generated_tags"] == first["generated_tags"]
    assert [v["version"] for v in versions] == [1, 2, 3]
    assert versions[1]["annotation"]["generated_tags"] == ["by_hand"]
    shown = CliRunner().invoke(main, ["tags", "--metric", "speed", "--library", str(home)])
    assert shown.exit_code == 0 and "rule, 1 peers" in shown.stdout
    unknown = CliRunner().invoke(main, ["tags", "--metric", "beauty", "--library", str(home)])
    assert unknown.exit_code == 10 and "E0911" in unknown.stderr
    (home / "peers.json").write_text('{"schema": "esper-peers/0"}')
    damaged = CliRunner().invoke(main, ["tags", "--metric", "speed", "--library", str(home)])
    assert damaged.exit_code == 11 and "E0912" in damaged.stderr
    again = CliRunner().invoke(main, ["annotate", "--library", str(home)])
    assert again.exit_code == 0
    assert CliRunner().invoke(main, ["tags", "--metric", "speed", "--library", str(home)]).exit_code == 0


def test_an_unknown_baseline_is_a_usage_error(home: Path) -> None:
    run = CliRunner().invoke(main, ["bench", "--compare", "eager,magic", "--library", str(home)])
    assert run.exit_code == 2 and "torch.compile" in run.stderr


@pytest.mark.parametrize(
    ("name", "kind"),
    [("seed_attention", "attention"), ("conv_res", "convolution"), ("swiglu", "product"),
     ("softmax", "reduction"), ("bias_gelu", "pointwise"), ("embedding_norm", "lookup"),
     ("rope_qk_norm", "reduction")],
)  # fmt: skip
def test_classes(name: str, kind: str) -> None:
    assert of_graph(verify.typed(text.load(ROOT / "examples" / f"{name}.json"))) == kind


def test_what_is_compiled_beside_it_is_one_graph() -> None:
    """torch.compile at its best is the peer, not an interpreter that it gives up on."""
    torch.compiler.reset()
    counters.clear()
    graph = verify.typed(text.load(ROOT / "examples" / "digits_block.json"))
    sizes = dict.fromkeys(graph.dims, 8)
    leaves = {n: torch.randn([d.value(sizes) for d in t.shape]) for n, t in graph.inputs.items()}
    function = workload.eager(cast(Subject, SimpleNamespace(graph=graph)))
    found = torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")(leaves)
    torch.testing.assert_close(found, function(leaves))
    assert counters["stats"]["unique_graphs"] == 1


def test_peak_memory_is_that_of_one_call() -> None:
    x = torch.ones(1 << 20)

    def work() -> torch.Tensor:
        held = x + 1
        return held * 2

    work()
    assert 8 << 20 <= peak_bytes(work, torch.device("cpu")) < 9 << 20


# -- a card that is only pretended


def test_without_the_package_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    card = nvml.Card("0")
    assert card.absent == "nvidia-ml-py is not installed" and card.reading() == nvml.Reading()
    assert card.energy(lambda: 1) == nvml.Energy() and card.context()["ecc"] == UNMEASURED


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A driver that answers some questions: 300 W, 4 of them idle at first, capped by power."""
    fake: Any = ModuleType("pynvml")
    fake.joules, fake.bits = 0.0, 0x4 | 0x1

    def energy(handle: object) -> float:
        fake.joules += 30.0
        return fake.joules * 1e3

    def refuse(handle: object, *rest: object) -> None:
        raise RuntimeError("Not Supported")

    fake.nvmlInit, fake.nvmlDeviceGetHandleByIndex = lambda: None, lambda index: index
    fake.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: fake.bits
    fake.nvmlDeviceGetClockInfo = lambda handle, kind: 1755
    fake.nvmlDeviceGetTemperature = refuse
    fake.nvmlDeviceGetEccMode = lambda handle: (1, 1)
    fake.nvmlDeviceGetTotalEnergyConsumption = energy
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    yield fake


def test_what_the_driver_answers(fake_nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    card = nvml.Card("0")
    reading = card.reading()
    assert reading.throttled == ("power cap",) and reading.clock_mhz == 1755.0
    assert reading.temperature_c == UNMEASURED, "a refused question costs only its answer"
    told = card.context()
    assert told["nvml"] == "present" and told["ecc"] is True
    assert told["driver"] == told["power_limit_watts"] == told["max_clock_mhz"] == UNMEASURED
    fake_nvml.bits = 0x1
    assert card.reading().throttled == (), "an idle card is not throttled"
    monkeypatch.setattr(nvml, "IDLE_S", 0.05)
    ticks = iter(range(10**6))
    monkeypatch.setattr(nvml.time, "monotonic", lambda: float(next(ticks)))
    found = card.energy(lambda: 10, window_s=3.0, windows=3)
    assert len(found.windows_s) == 3 and isinstance(found.joules_per_call, float)
    calls = round(3 * 30.0 / found.joules_per_call)
    assert calls % 10 == 0 and isinstance(found.watts, float) and found.watts > 0


def test_nvbench_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bench", None)
    assert nvbench.cold_medians({}, torch.device("cuda"), "/tmp") == {"absent": "cuda-bench is not installed"}


def test_nvbench_as_a_second_opinion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Against the interface of cuda-bench 0.3: register, options that chain, samples in seconds."""
    registered: list[Any] = []

    class Benchmark:
        def __init__(self, fn: Any) -> None:
            self.fn, self.name = fn, ""

        def set_name(self, name: str) -> Benchmark:
            self.name = name
            return self

        def set_timeout(self, seconds: float) -> Benchmark:
            return self

    def register(fn: Any) -> Benchmark:
        registered.append(Benchmark(fn))
        return registered[-1]

    def run_all(argv: list[str]) -> None:
        assert argv[1:3] == ["--devices", "0"] and argv[3] == "--jsonbin"
        Path(argv[4]).write_text("{}")

    def from_json(path: Path) -> dict[str, Any]:
        assert path.exists()
        return {b.name: [SimpleNamespace(samples=array("f", [1e-3, 2e-3, 3e-3]))] for b in registered}

    bench: Any = ModuleType("cuda.bench")
    bench.register, bench.run_all_benchmarks = register, run_all
    found: Any = ModuleType("cuda.bench.results")
    found.BenchmarkResult = SimpleNamespace(from_json=from_json)
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bench", bench), ("cuda.bench.results", found)):
        monkeypatch.setitem(sys.modules, name, module)
    told = nvbench.cold_medians({"both": lambda: None}, torch.device("cuda:0"), str(tmp_path))
    assert told == {"both_ms": pytest.approx(2.0, rel=1e-5)}
    bench.run_all_benchmarks = lambda argv: 1 / 0
    assert "ZeroDivisionError" in nvbench.cold_medians({}, torch.device("cuda:0"), str(tmp_path))["absent"]


# -- time left


def test_time_left_learns_from_what_is_done() -> None:
    at = 0.0
    estimate = Estimate(3, 216.0, now=lambda: at)
    assert estimate.left() == 3 * 216
    for name, seconds in (("numerics", 2.0), ("measurement", 8.0)):
        estimate.stage(name)
        at += seconds
    assert estimate.left() == 3 * 216 - 10
    estimate.finished()
    assert estimate.left() == 20.0
    estimate.stage("numerics")
    at += 1.0
    assert estimate.left() == 19.0
    at += 4.0
    assert estimate.left() == 18.0, "a stage that takes longer than before is about to end"
    estimate.stage("measurement")
    estimate.finished()
    at += 100.0
    assert estimate.left() >= 0.0
    estimate.finished()
    assert estimate.left() == 0.0


def test_progress_is_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with Report(1, quick=True) as bar:
        bar.event("a", {"event": "stage", "name": "numerics"})
        bar.event("a", {"event": "stage", "name": "measurement", "part": 1, "parts": 5})
        bar.verdict(runner.Verdict("a", True, "", (), 1.0))
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "VALIDATED a 1.0 s\n"
