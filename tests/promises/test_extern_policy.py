"""Another library version than the one recorded: it runs and shows, strict mode refuses, ranks notice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.promises.shelf import Shelf, answer

# As a machine with another torch would see it: the version is faked before anything of Esper is imported.
SCRIPT = """
import json, os, torch
torch.__version__ = os.environ.get("FAKED", torch.__version__)
import runtime
from esper_ir.diagnostics import EsperError
from tests.promises.shelf import bits
try:
    block = runtime.load(os.environ["ARTIFACT"])
    found = bits(block, "small_mlp", 65)
    report = block.report()
    print(json.dumps({"bits": found, **{k: report[k] for k in ("mismatches", "plan_digest", "counters")}}))
except EsperError as refusal:
    print(json.dumps(refusal.to_json()))
"""


@pytest.fixture(scope="module")
def artifact(shelf: Shelf) -> str:
    return shelf.proven("small_mlp")


def _seen(shelf: Shelf, artifact: str, **more: str) -> dict[str, Any]:
    return answer(shelf.child(SCRIPT, ARTIFACT=artifact, **more))


@pytest.fixture(scope="module")
def same(shelf: Shelf, artifact: str) -> dict[str, Any]:
    """What a process with the version recorded sees."""
    return _seen(shelf, artifact)


@pytest.fixture(scope="module")
def other(shelf: Shelf, artifact: str) -> dict[str, Any]:
    """What one with another version sees."""
    return _seen(shelf, artifact, FAKED="2.99.0")


def test_other_version_runs_and_is_counted(same: dict[str, Any], other: dict[str, Any]) -> None:
    assert same["mismatches"] == []
    assert other["mismatches"] and "2.99.0" in str(other["mismatches"])
    assert other["bits"] == same["bits"]
    assert other["counters"]["launches"] > 0 and other["counters"]["eager_fallbacks"] == 0


def test_strict_mode_refuses(shelf: Shelf, artifact: str) -> None:
    assert _seen(shelf, artifact, ESPER_STRICT="1")["mismatches"] == []
    refusal = _seen(shelf, artifact, ESPER_STRICT="1", FAKED="2.99.0")
    assert refusal["code"] == "E0808" and refusal["exit_code"] == 16


def test_plan_digests_differ_between_ranks(
    shelf: Shelf, artifact: str, same: dict[str, Any], other: dict[str, Any]
) -> None:
    assert _seen(shelf, artifact)["plan_digest"] == same["plan_digest"] != other["plan_digest"]
