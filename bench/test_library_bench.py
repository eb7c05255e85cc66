"""Figures of the library: `python -m bench.library` runs these and writes the results file; pytest runs them
alone.

Every timing is of durable work on the disk that holds pytest's temporary directory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.library_fixture import blueprint_id, fill
from library import history, lineage, rows
from library.contracts import KernelQuery
from library.store import Library
from tests.library.helpers import make_container, validated

ROOT = Path(__file__).resolve().parent.parent
KB60 = 60_000
ARTIFACTS, BLUEPRINTS = 100_000, 20_000
WRITERS, WRITE_SECONDS = 16, 10.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESPER_KEYS", str(tmp_path / "keys"))
    return tmp_path / "library"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """100,000 artifacts of 20,000 blueprints, and a lineage of 1,000 edges under one of them."""
    root = tmp_path_factory.mktemp("large")
    with Library.open(root / "library", trust=root / "keys") as lib:
        fill(lib, ARTIFACTS, BLUEPRINTS)
        with lib.index.write():
            for child in range(1, 1001):
                rows.add_edge(
                    lib.index, blueprint_id((child - 1) // 4), blueprint_id(child), "mutation", "", 0
                )
        yield lib


def say(
    benchmark: Any, name: str, value: float, unit: str, target: float | None, *, at_least: bool = False
) -> None:
    """Keep a figure where the harness finds it."""
    figures = benchmark.extra_info.setdefault("figures", {})
    figures[name] = {"value": value, "unit": unit, "target": target, "at_least": at_least}


def timed(
    benchmark: Any, work: Callable[..., Any], *, rounds: int, setup: Callable[[], Any] | None = None
) -> float:
    """Median seconds of one call."""
    if setup is None:
        benchmark.pedantic(work, rounds=rounds, iterations=1, warmup_rounds=2)
    else:
        benchmark.pedantic(work, rounds=rounds, iterations=1, setup=setup)
    return benchmark.stats.stats.median


def test_put(benchmark: Any, place: Path) -> None:
    with Library.open(place) as lib:
        lib.put_artifact(make_container(0))
        numbers = iter(range(1, 1000))

        def next_one() -> tuple[tuple[bytes], dict[str, Any]]:
            return (make_container(next(numbers), size=KB60),), {}

        median = timed(benchmark, lib.put_artifact, rounds=60, setup=next_one)
    say(benchmark, "put_60KB_ms_p50", median * 1e3, "ms", 25.0)
    say(benchmark, "put_60KB_ms_max", benchmark.stats.stats.max * 1e3, "ms", None)


def test_load(benchmark: Any, place: Path) -> None:
    with Library.open(place) as lib:
        ids = [validated(lib, n, size=KB60) for n in range(30)]
    with Library.open(place, readonly=True) as lib:
        lib.warm()
        turn = iter(range(1 << 30))
        median = timed(benchmark, lambda: lib.load(ids[next(turn) % len(ids)]), rounds=600)
    say(benchmark, "load_verified_60KB_us_p50", median * 1e6, "us", 500.0)


def test_open(benchmark: Any, large: Library) -> None:
    with Library.open(large.home, trust=large.trust.home, readonly=True) as opened:
        assert opened.artifacts(limit=1), "what is opened is the large one"

    def once() -> None:
        Library.open(large.home, trust=large.trust.home, readonly=True).close()

    say(benchmark, "open_ms_p50", timed(benchmark, once, rounds=30) * 1e3, "ms", 20.0)


QUERIES = {
    "plain": KernelQuery(),
    "arch": KernelQuery(target_gpu_arch="sm_90", limit=100),
    "tags": KernelQuery(required_tags=("high_speed", "deterministic"), excluded_tags=("high_memory",)),
    "preferred": KernelQuery(preferred_tags=("low_memory", "trainable", "deterministic"), max_risk=0.3),
    "tight_memory": KernelQuery(max_memory_mb=2.0, max_risk=0.1),
    "two_loose_bounds": KernelQuery(max_memory_mb=60.0, max_risk=0.06, required_tags=("low_speed",)),
    "slow_ones": KernelQuery(required_tags=("low_speed",)),
    "slow_ones_in_bounds": KernelQuery(required_tags=("low_speed",), max_memory_mb=300.0, max_risk=0.3),
    "not_the_fast": KernelQuery(excluded_tags=("high_speed", "medium_speed"), preferred_tags=("low_memory",)),
    "nothing": KernelQuery(max_memory_mb=0.5),
    "latency": KernelQuery(max_latency_ms=0.03, target_gpu_arch="h100"),
    "blueprint": KernelQuery(blueprint_id=blueprint_id(7)),
}


@pytest.mark.parametrize("name", QUERIES)
def test_find(benchmark: Any, large: Library, name: str) -> None:
    assert bool(large.find(QUERIES[name]).matches) is (name != "nothing")
    median = timed(benchmark, lambda: large.find(QUERIES[name]), rounds=50)
    say(benchmark, f"find_{name}_ms_p50", median * 1e3, "ms", 5.0)


def test_listing(benchmark: Any, large: Library) -> None:
    assert len(large.artifacts(state="VALIDATED", limit=1000)) == 1000
    median = timed(benchmark, lambda: large.artifacts(state="VALIDATED", limit=1000), rounds=20)
    say(benchmark, "list_1000_ms_p50", median * 1e3, "ms", 50.0)


def test_resolve(benchmark: Any, large: Library) -> None:
    whole = large.artifacts(limit=5000)[-1].id
    prefix = whole[:-1]
    assert large.resolve(prefix).id == whole
    say(
        benchmark,
        "resolve_prefix_ms_p50",
        timed(benchmark, lambda: large.resolve(prefix), rounds=50) * 1e3,
        "ms",
        50.0,
    )


def test_lineage(benchmark: Any, large: Library) -> None:
    median = timed(benchmark, lambda: lineage.descendants(large, blueprint_id(0)), rounds=20)
    assert len(lineage.descendants(large, blueprint_id(0))) == 1000
    say(benchmark, "lineage_1000_edges_ms_p50", median * 1e3, "ms", 50.0)


def test_audit(benchmark: Any, place: Path) -> None:
    """A ledger of 100,000 entries whose rows agree with it."""
    with Library.open(place) as lib:
        fill(lib, 42_000, 20_000)
        report = benchmark.pedantic(lambda: history.audit(lib), rounds=1, iterations=1)
        assert report.findings == () and report.entries >= 90_000
        seconds = benchmark.stats.stats.median * 100_000 / report.entries
    say(benchmark, "audit_100k_entries_s", seconds, "s", 10.0)


def fsync_rate(place: Path, seconds: float = 2.0) -> float:
    """Durable 4 KB appends per second of one process: what this disk allows."""
    fd = os.open(place / "probe", os.O_WRONLY | os.O_CREAT)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        os.write(fd, b"x" * 4096)
        os.fsync(fd)
        count += 1
    os.close(fd)
    return count / seconds


WRITER = """
import json, sys, time
from library.store import Library
from tests.library.helpers import make_container
place, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with Library.open(place, wait_s=60, roles=("compiler",)) as lib:
    lib.signer("compiler"); lib.warm()
    sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
    times, began = [], time.perf_counter()
    while time.perf_counter() - began < seconds:
        data = make_container(seed * 1000000 + len(times), size=20000)
        start = time.perf_counter(); lib.put_artifact(data); times.append(time.perf_counter() - start)
print(json.dumps(times))
"""


def test_sixteen_writers(benchmark: Any, place: Path) -> None:
    Library.open(place).close()
    rate = fsync_rate(place)
    command = [sys.executable, "-c", WRITER, str(place)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    writers = [subprocess.Popen([*command, str(n + 1), str(WRITE_SECONDS)], **pipes) for n in range(WRITERS)]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"

    def storm() -> list[float]:
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        return [t for w in writers for t in json.loads(w.communicate(timeout=300)[0])]

    times = benchmark.pedantic(storm, rounds=1, iterations=1)
    total = len(times) / WRITE_SECONDS
    # A put makes two objects and their shards durable, then commits: five syncs when nothing is shared.
    allowed = 0.8 * rate / 5
    say(benchmark, "writers16_artifacts_per_s", total, "1/s", min(200.0, allowed), at_least=True)
    say(benchmark, "writers16_put_ms_p50", statistics.median(times) * 1e3, "ms", None)
    say(benchmark, "writers16_put_ms_p99", statistics.quantiles(times, n=100)[98] * 1e3, "ms", None)
    say(benchmark, "disk_fsync_per_s", rate, "1/s", None)


MEMORY = """
import os, sys
def rss(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = rss()
from library.store import Library
with Library.open(sys.argv[1], trust=sys.argv[2], readonly=True) as lib:
    lib.warm(); lib.artifacts(limit=100)
    print(rss() - before)
"""


def test_memory(benchmark: Any, large: Library) -> None:
    command = [sys.executable, "-c", MEMORY, str(large.home), str(large.trust.home)]
    run = benchmark.pedantic(
        lambda: subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True),
        rounds=1,
        iterations=1,
    )
    assert int(run.stdout) > 0, run.stderr
    say(benchmark, "memory_beyond_python_MiB", int(run.stdout) / 2**20, "MiB", 60.0)


def test_overhead(benchmark: Any, place: Path) -> None:
    """Everything in the directory but the objects and the reserve, against the objects: 1,000 of 60 KB."""

    def build() -> tuple[int, int]:
        with Library.open(place) as lib:
            for number in range(1000):
                lib.put_artifact(make_container(number, size=KB60))
        sizes = {p: p.stat().st_size for p in place.rglob("*") if p.is_file() and p.name != "reserve"}
        objects = sum(size for p, size in sizes.items() if "objects" in p.parts)
        return sum(sizes.values()) - objects, objects

    beside, objects = benchmark.pedantic(build, rounds=1, iterations=1)
    say(benchmark, "overhead_percent", 100.0 * beside / objects, "%", 5.0)
