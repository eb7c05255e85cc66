"""Histories against a model: whatever is done in whatever order, the library says what the model says."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from esper_ir.diagnostics import EsperError
from library import history, rows
from library.audit import verify_library
from library.contracts import KernelQuery
from library.records import ARCHIVED, PENDING_BENCHMARKING, REJECTED, REVOKED, SUPERSEDED, VALIDATED
from library.store import Library
from tests.library.helpers import make_container

NUMBERS = st.integers(0, 4)
LOADS = {VALIDATED, SUPERSEDED}
REFUSALS = {PENDING_BENCHMARKING: "E0740", REJECTED: "E0741", REVOKED: "E0742", ARCHIVED: "E0743"}


@dataclass
class Known:
    """What the model knows of one artifact."""

    id: str
    state: str = PENDING_BENCHMARKING
    before: str = ""
    bundle: Path | None = None
    risk: float | None = None


class Histories(RuleBasedStateMachine):
    """Rules are the library's writing operations; a rule that the model calls illegal must be refused."""

    def __init__(self) -> None:
        super().__init__()
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.root = Path(tempfile.mkdtemp(prefix="esper-model-", dir=shm))
        self.model: dict[int, Known] = {}
        self.archives = 0

    @initialize()
    def start(self) -> None:
        self.lib = Library.open(self.root / "library", trust=self.root / "keys")

    def teardown(self) -> None:
        self.lib.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def attempt(self, legal: bool, work: object, *arguments: object, **named: object) -> bool:
        """Do it; EsperError exactly when the model says so."""
        assert callable(work)
        try:
            work(*arguments, **named)
        except EsperError as error:
            assert not legal, error
            assert error.exit_code in (10, 13, 14, 12), error
            return False
        assert legal, "the model forbids this"
        return True

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        record = self.lib.put_artifact(make_container(number, size=300))
        known = self.model.setdefault(number, Known(record.id))
        assert record.state == known.state and record.id == known.id

    @rule(number=NUMBERS, passed=st.booleans())
    def judge(self, number: int, passed: bool) -> None:
        known = self.model.get(number)
        if known is None:
            return
        result = VALIDATED if passed else REJECTED
        legal = known.state == PENDING_BENCHMARKING or (known.state, result) == (VALIDATED, VALIDATED)
        if self.attempt(legal, self.lib.record_verdict, known.id, {"wep": {}}, passed=passed):
            known.state = result

    @rule(number=NUMBERS)
    def revoke(self, number: int) -> None:
        known = self.model.get(number)
        if known and self.attempt(known.state != REVOKED, self.lib.revoke, known.id, "why"):
            known.state = REVOKED

    @rule(number=NUMBERS, by=NUMBERS)
    def supersede(self, number: int, by: int) -> None:
        known, better = self.model.get(number), self.model.get(by)
        if not known or not better or number == by:
            return
        legal = known.state == VALIDATED and better.state == VALIDATED
        if self.attempt(legal, self.lib.supersede, known.id, better.id):
            known.state = SUPERSEDED

    @rule(number=NUMBERS, risk=st.floats(0, 1))
    def annotate(self, number: int, risk: float) -> None:
        known = self.model.get(number)
        if known and self.attempt(
            known.state == VALIDATED, self.lib.annotate, known.id, {"risk_score": risk}
        ):
            known.risk = risk

    @rule(number=NUMBERS)
    def archive(self, number: int) -> None:
        known = self.model.get(number)
        if known is None:
            return
        self.archives += 1
        place = self.root / f"bundle{self.archives}"
        legal = known.state in (VALIDATED, REJECTED, SUPERSEDED)
        if self.attempt(legal, self.lib.archive, [known.id], place):
            known.before, known.state, known.bundle = known.state, ARCHIVED, place

    @rule(number=NUMBERS)
    def restore(self, number: int) -> None:
        known = self.model.get(number)
        if known and known.bundle and self.attempt(known.state == ARCHIVED, self.lib.restore, known.bundle):
            known.state = known.before

    @rule()
    def collect(self) -> None:
        self.lib.collect(grace_s=0, dry_run=False)
        assert set(self.lib.blobs.digests()) == set(rows.referenced_digests(self.lib.index))

    @rule()
    def reopen(self) -> None:
        self.lib.close()
        self.lib = Library.open(self.root / "library", trust=self.root / "keys")

    @invariant()
    def same_states_and_same_loads(self) -> None:
        if not hasattr(self, "lib"):
            return
        assert {r.id: r.state for r in self.lib.artifacts()} == {k.id: k.state for k in self.model.values()}
        for number, known in self.model.items():
            if known.state in LOADS:
                assert self.lib.load(known.id).container.data == make_container(number, size=300)
                continue
            try:
                self.lib.load(known.id)
                raise AssertionError("loaded what must not load")
            except EsperError as error:
                assert error.code == REFUSALS[known.state]

    @invariant()
    def found_are_the_validated(self) -> None:
        if not hasattr(self, "lib"):
            return
        found = {m.artifact_id: m.risk for m in self.lib.find(KernelQuery(limit=100)).matches}
        assert found == {k.id: k.risk for k in self.model.values() if k.state == VALIDATED}

    @invariant()
    def the_ledger_is_sound(self) -> None:
        if hasattr(self, "lib"):
            assert history.audit(self.lib).findings == ()
            found = verify_library(self.lib, self.lib.artifacts(), contents=True).findings
            assert found == ()


Histories.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestHistories = Histories.TestCase


@pytest.mark.slow
class TestHistoriesLong(Histories.TestCase):
    """Longer histories, and more of them."""

    settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
