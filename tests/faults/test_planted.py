"""Every planted fault is refused, at the stage that exists for it; clean artifacts pass.

The fast suite takes every ninth fault; the slow one takes all and prints the table with its confidence bound.
"""

from __future__ import annotations

import pytest

from gauntlet.isolate import ForkServer
from gauntlet.runner import Judgement, judge
from tests.faults import toys
from tests.faults.handmade import build
from tests.faults.planted import Fault, faults
from tests.faults.table import Row, bound, table

ALL = faults()
SAMPLE = ALL[::9]
BEHIND = ("loads", "memory", "selftest", "numerics", "gradients", "determinism")


def judged(fault: Fault, server: ForkServer) -> Judgement:
    return judge(build(fault.toy), "cpu", server)


def complaint(fault: Fault, found: Judgement) -> str:
    """Empty when the fault was refused where it should be. A stray access may also end the process at the
    first call: what lies beyond a buffer decides."""
    if found.passed is not False:
        return f"{fault.name}: not refused ({found.reason or 'passed'})"
    stage = found.stages[-1].name
    return (
        ""
        if stage in fault.stages or ("memory" in fault.stages and "illegal-access" in found.reason)
        else f"{fault.name}: refused at {stage}, not at {fault.stages}: {found.reason}"
    )


@pytest.mark.parametrize("fault", SAMPLE, ids=lambda f: f.name)
def test_a_fault_is_refused(fault: Fault, server: ForkServer) -> None:
    assert not complaint(fault, judged(fault, server))


HIDDEN = [f for f in ALL if f.behind]


@pytest.mark.parametrize("fault", HIDDEN[::4], ids=lambda f: f.name)
def test_state_is_also_seen_by_what_it_does(fault: Fault, server: ForkServer) -> None:
    """Integrity refuses variables that outlive a call; the stages behind it refuse what they lead to."""
    found = judge(build(fault.toy), "cpu", server, stages=BEHIND)
    assert found.passed is False and found.stages[-1].name in fault.behind, found.reason


CLEAN = ("affine", "softmax")
"""Products and sums over rows; the others wait for the slow suite, where all are judged."""


@pytest.mark.parametrize(
    "name", [name if name in CLEAN else pytest.param(name, marks=pytest.mark.slow) for name in toys.ALL]
)
def test_a_clean_artifact_passes(name: str, server: ForkServer) -> None:
    found = judge(build(toys.ALL[name]()), "cpu", server)
    assert found.passed, found.reason


def test_the_list_is_broad() -> None:
    kinds = {f.kind for f in ALL}
    assert len(ALL) >= 100 and len(kinds) >= 20
    assert len({f.name for f in ALL}) == len(ALL)
    assert sum(f.subtle for f in ALL) >= 10


@pytest.mark.slow
def test_all_faults_are_refused(server: ForkServer, capsys: pytest.CaptureFixture[str]) -> None:
    rows, wrong = [], []
    for fault in ALL:
        found = judged(fault, server)
        rows.append(Row(fault.kind, found.passed is False))
        wrong += [text] if (text := complaint(fault, found)) else []
    for fault in HIDDEN:
        found = judge(build(fault.toy), "cpu", server, stages=BEHIND)
        rows.append(Row(f"{fault.kind}, integrity left out", found.passed is False))
        wrong += [] if found.passed is False else [f"{fault.name}: not refused without integrity"]
    clean = [
        judge(build(make()), "cpu", server, seed=seed) for make in toys.ALL.values() for seed in range(3)
    ]
    with capsys.disabled():
        print("\n" + table(rows))
        print(f"clean artifacts refused: {sum(not c.passed for c in clean)} of {len(clean)}")
    assert not wrong, "\n".join(wrong)
    assert all(c.passed for c in clean), [c.reason for c in clean if not c.passed]


def test_the_bound_is_the_rule_of_three_for_no_misses() -> None:
    assert bound(0, 300) == pytest.approx(3 / 300, rel=0.01)
    assert bound(0, 0) == 1.0 and bound(5, 10) > 0.5 and bound(10, 10) == 1.0
