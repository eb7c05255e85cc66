"""A launch that fails in use: the step completes if the device survived, and the next process knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import runtime
from library.outcomes import take_spool
from library.store import Library
from runtime import loader, outcomes
from runtime.errors import fail
from runtime.executor import Ready
from tests.runtime import artifacts as a
from tests.runtime.conftest import Put
from tests.runtime.test_executor import refusal


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ESPER_SPOOL", raising=False)
    monkeypatch.setenv("ESPER_NODE", "0")  # failures are planted in the path that everything falls back to
    loader.cache().release()
    loader._meant.clear()
    loader._libraries.clear()
    yield
    loader._faulty.clear()
    outcomes.memory.clear()


class Failing:
    """`break_at(phase, code)`: launches of that phase fail with that driver error from now on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.phases: tuple[str, ...] = ()
        self.code, self.count, real = 1, 0, Ready.__call__

        def call(ready: Ready, slots: list[Any]) -> list[Any]:
            if ready.plan.phase in self.phases:
                self.count += 1
                raise fail("E0820", "launch of scale failed", node="scale", details={"cuda_error": self.code})
            return real(ready, slots)

        patch.setattr(Ready, "__call__", call)

    def break_at(self, *phases: str, code: int = 1) -> None:
        self.phases, self.code = phases, code


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


def gradients(block: torch.nn.Module, x: torch.Tensor, flow: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(block(x), (x, block.w), flow)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_step_completes_by_the_twin(
    put: Put, failing: Failing, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    block = runtime.load(put())
    x, flow = torch.randn(3, a.N, requires_grad=True), torch.randn(3, a.N)
    want = gradients(block, x, flow)
    failing.break_at(phase)
    torch.testing.assert_close(gradients(block, x, flow), want)
    assert failing.count == 1 and block.report()["failed_in_use"]
    torch.testing.assert_close(gradients(block, x, flow), want)
    assert failing.count == 1  # the twin answers at once: nothing is launched again
    assert block.report()["counters"]["eager_fallbacks"] >= 1
    assert sum("eager twin answers" in r.message for r in caplog.records) == 1
    with torch.no_grad():
        assert torch.equal(block(x), x * block.w)


def test_functional_blocks_recover_what_was_kept(put: Put, failing: Failing) -> None:
    fn = runtime.load(put(), functional=True)
    x, w = torch.randn(3, a.N, requires_grad=True), torch.randn(a.N, requires_grad=True)
    y = fn(x, w)
    failing.break_at("backward")
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    torch.testing.assert_close((dx, dw), (w.detach().expand(3, -1), x.detach().sum(0)))


def test_a_lost_device_is_raised_with_the_artifact(put: Put, failing: Failing) -> None:
    name = put()
    block = runtime.load(name)
    failing.break_at("inference", "forward", code=700)
    error = refusal("E0820", block, torch.randn(3, a.N))
    assert error.details["artifact"] == name and name in loader._faulty


def test_strict_raises(put: Put, failing: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    block = runtime.load(put())
    monkeypatch.setenv("ESPER_STRICT", "1")
    failing.break_at("inference", "forward")
    refusal("E0820", block, torch.randn(3, a.N))
    assert failing.count == 1


def test_through_the_operators_it_is_raised_by_name(put: Put, failing: Failing) -> None:
    block = runtime.load(put(), dispatch="op")
    failing.break_at("inference", "forward")
    refusal("E0820", block, torch.randn(3, a.N))
    assert failing.count == 1


def crash(block: torch.nn.Module, failing: Failing) -> None:
    failing.break_at("inference", "forward")
    block(torch.randn(3, a.N))
    failing.break_at()


def later() -> None:
    """As a new process would begin."""
    loader.cache().release()
    loader._meant.clear()
    loader._libraries.clear()
    loader._faulty.clear()
    outcomes.memory.clear()


def test_the_next_process_ranks_it_last(put: Put, failing: Failing) -> None:
    fast, standard = put(), put(pipeline="standard")
    block = runtime.load("abababababab")
    assert block.artifact_id == standard
    crash(block, failing)
    assert runtime.load("abababababab").artifact_id == fast  # in this process
    later()
    assert runtime.load("abababababab").artifact_id == fast
    assert runtime.load(standard).artifact_id == standard  # by its id it still loads
    with Library.open() as library:
        (report,) = library.outcomes(standard)
        assert report.outcome == "CRASHED" and report.eval_metrics["code"] == "E0820"
        assert library.troubled() == [standard] == library.troubled("ab" * 32) and not library.troubled("cd")
        library.record_verdict(standard, {"stages": []}, passed=True)
        assert library.troubled() == []
    later()
    assert runtime.load("abababababab").artifact_id == standard  # proven again


def test_a_spool_where_the_library_is_not_to_be_written(
    put: Put, failing: Failing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fast, standard = put(), put(pipeline="standard")
    spool = tmp_path / "spool.jsonl"
    monkeypatch.setenv("ESPER_SPOOL", str(spool))
    block = runtime.load("abababababab")
    crash(block, failing)
    crash(runtime.load(standard), failing)  # told once per process
    assert len(spool.read_text().splitlines()) == 1
    record = json.loads(spool.read_text())
    assert record["schema"] == "esper-spool/1" and record["report"]["kernel_artifact_id"] == standard
    with spool.open("a") as file:
        file.write('{"schema": "esper-spool/1", "kind": "outc')
    later()
    assert runtime.load("abababababab").artifact_id == fast
    with Library.open() as library:
        assert library.outcomes(standard) == []
        assert take_spool(library, spool) == (1, 0) and take_spool(library, spool) == (0, 0)
        assert library.troubled() == [standard]
        library.record_verdict(standard, {"stages": []}, passed=True)
    later()
    assert runtime.load("abababababab").artifact_id == standard


def test_where_nothing_can_be_written_it_is_kept(
    put: Put, failing: Failing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    block = runtime.load(put())
    monkeypatch.setenv("ESPER_SPOOL", str(tmp_path / "absent" / "spool"))
    crash(block, failing)
    assert [r.kernel_artifact_id for r in outcomes.memory] == [block.artifact_id]
