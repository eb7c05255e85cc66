"""Tags by rule: what a report says, signed beside the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from esper_ir.diagnostics import EsperError
from forge.service import compile_file
from gauntlet import runner, tags
from gauntlet.cli import main
from gauntlet.isolate import ForkServer
from gauntlet.sampling import BRIEF
from library.contracts import TAGS
from library.store import Library
from tests.faults import handmade, toys
from tests.gauntlet.conftest import put
from tests.gauntlet.test_prove import WRONG_MASK


def _report(stages: tuple[str, ...] = (), **wep: Any) -> dict[str, Any]:
    return {"wep": wep, "stages": [{"name": n, "outcome": "passed"} for n in stages]}


def test_what_was_not_measured_gets_no_tag() -> None:
    assert tags.of(_report(forward_ms_median="unmeasured", roofline_share="unmeasured")) == ()


@pytest.mark.parametrize(
    ("wep", "tag"),
    [
        ({"roofline_share": 0.9}, "high_speed"),
        ({"roofline_share": 0.5, "forward_ms_median": 1.0, "eager_forward_ms_median": 9.0}, "medium_speed"),
        ({"forward_ms_median": 1.0, "eager_forward_ms_median": 4.0}, "high_speed"),
        ({"forward_ms_median": 1.0, "eager_forward_ms_median": 1.0}, "low_speed"),
        ({"workspace_bytes": 0, "bytes_moved": 1000}, "low_memory"),
        ({"workspace_bytes": 500, "bytes_moved": 1000}, "high_memory"),
        ({"tolerance_used": 0.4}, "numerically_stable"),
        ({"forward_ms_median": 1.0, "eager_forward_ms_median": 1.1}, "faster_than_eager"),
    ],
)
def test_rules(wep: dict[str, Any], tag: str) -> None:
    found = tags.of(_report(**wep))
    assert tag in found and found[-1] == tags.BASIS
    assert len({t for t in found if t.endswith("_speed")}) <= 1


@pytest.mark.parametrize(
    ("metrics", "given"), [({"bits_promised": 1}, True), ({"bits_promised": 0}, False), ({}, True)]
)
def test_bits_that_nobody_promises_are_not_called_deterministic(metrics: dict[str, int], given: bool) -> None:
    report = _report(("determinism",), roofline_share=0.9)
    report["stages"][0]["metrics"] = {"repeats": 4, **metrics}
    assert ("deterministic" in tags.of(report)) is given


def test_queries_know_every_tag_that_is_given() -> None:
    assert set(TAGS) == {*tags.ORDER, tags.BASIS, tags.PERCENTILE}


def test_what_eager_beats_is_not_called_faster() -> None:
    forward = {"forward_ms_median": 1.0, "eager_forward_ms_median": 3.0}
    slow = _report(**forward, backward_ms_median=9.0, eager_backward_ms_median=2.0)
    assert "faster_than_eager" not in tags.of(slow)
    together = _report(**forward, both_ms_median=4.0, eager_both_ms_median=3.0)
    assert "faster_than_eager" not in tags.of(together), "one call decides where it was measured"


@pytest.mark.parametrize("scaled", [False, True])
def test_what_has_no_parameters_is_not_called_trainable(home: Path, server: ForkServer, scaled: bool) -> None:
    """y = relu(x) * 2, whose gradients are proven too, and y = relu(x) * w."""
    document = {
        "format": "esper-blueprint/1", "name": "relu2",
        "dims": {"rows": {"min": 1, "max": 512, "tune": [16]}},
        "inputs": {"x": {"dtype": "float32", "shape": ["rows", 16]}},
        "params": {"w": {"dtype": "float32", "shape": [16], "init": {"kind": "ones"}}} if scaled else {},
        "nodes": [{"id": "r", "op": "relu", "inputs": ["x"]},
                  {"id": "y", "op": "mul", "inputs": ["r", "w" if scaled else 2.0]}],
        "outputs": ["y"],
    }  # fmt: skip
    path = home.parent / "relu2.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with Library.open(home, roles=("compiler",)) as library:
        (made,) = compile_file(path, targets=("cpu",), library=library)
    runner.prove(made.artifact_id, library=home, server=server, quick=True, effort=BRIEF)
    with Library.open(home) as library:
        verdict = library.verdict(made.artifact_id)
    assert verdict is not None
    passed = [s["name"] for s in verdict.report["stages"] if s["outcome"] == "passed"]
    assert "gradients" in passed and ("trainable" in verdict.report["generated_tags"]) is scaled


def test_tags_are_signed_and_listed(home: Path, server: ForkServer) -> None:
    good, bad = put(home, toys.affine()), put(home, handmade.edit(toys.affine(), WRONG_MASK))
    for artifact in (good, bad):
        runner.prove(artifact, library=home, server=server, quick=True, effort=BRIEF)
    made = CliRunner().invoke(main, ["annotate", "--json", "--library", str(home)])
    said = json.loads(made.stdout)["annotations"]
    assert made.exit_code == 0 and list(said) == [good]
    assert {"deterministic", "trainable", tags.BASIS} <= set(said[good]["generated_tags"])
    with Library.open(home, roles=("validator",)) as library:
        verdict = library.verdict(good)
        assert verdict and verdict.report["generated_tags"] == said[good]["generated_tags"]
        assert library.annotation(good) == said[good] and said[good]["conf_level"] == "Speculative"
        assert runner.annotate(good, library) == said[good]
        assert library.index.row("SELECT count(*) FROM annotations") == (1,), (
            "nothing new is not signed again"
        )
        with pytest.raises(EsperError) as refused:
            runner.annotate(bad, library)
    assert refused.value.code == "E0724"
    listed = CliRunner().invoke(main, ["tags", "--library", str(home)])
    assert good in listed.output and "trainable" in listed.output and bad not in listed.output
    shown = CliRunner().invoke(main, ["show", good, "--library", str(home)])
    assert "trainable" in shown.output and "= unmeasured" not in shown.output
    assert "latency_ms_median = " in shown.output and "unmeasured: " in shown.output
    with Library.open(home) as library:
        library.revoke(good, "wrong results")
    said_no = CliRunner().invoke(main, ["bench", good, "--library", str(home)])
    assert said_no.exit_code == 13 and "revoked" in said_no.output and "VALIDATED" not in said_no.output
    rules = CliRunner().invoke(main, ["tags", "--rules", "--json"])
    assert set(json.loads(rules.stdout)["rules"]) == {rule.tag for rule in tags.RULES}
