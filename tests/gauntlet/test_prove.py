"""From a stored artifact to a signed verdict, and what a rejection leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from esper_ir.builder import Builder
from esper_ir.diagnostics import EsperError
from forge.service import compile_blueprint
from gauntlet import cases, inputs, runner
from gauntlet.cli import main
from gauntlet.isolate import ForkServer
from gauntlet.report import UrabraskValidationReport
from gauntlet.sampling import BRIEF
from gauntlet.stage import Recipe
from gauntlet.subject import Subject
from library.store import Library
from tests.faults import handmade, toys
from tests.gauntlet.conftest import put

WRONG_MASK = ("const float m = y[r * C + c] <= 0 ? 0 : g[r * C + c];", "const float m = g[r * C + c];")


def test_a_clean_artifact_is_validated_and_signed(home: Path, server: ForkServer) -> None:
    artifact = put(home, toys.affine())
    with pytest.raises(EsperError) as refused, Library.open(home, readonly=True) as library:
        library.load(artifact)
    assert refused.value.code == "E0740"
    found = runner.prove(artifact, library=home, server=server, quick=True, effort=BRIEF)
    assert found.passed and not found.reason
    assert [s.outcome for s in found.stages].count("passed") == len(found.stages) >= 8
    with Library.open(home, readonly=True) as library:
        loaded = library.load(artifact)
        verdict = library.verdict(artifact)
    assert loaded.verdict and loaded.verdict.result == "VALIDATED" and verdict and verdict.passed
    report = UrabraskValidationReport.of(verdict.report)
    assert report.to_json() == verdict.report and report.passed_validation and report.policy == runner.POLICY
    assert report.wep.power_watts_avg == "unmeasured" and isinstance(report.wep.load_us, float)
    assert report.hardware_context["sandbox"] in ("limits", "landlock", "full")


def test_what_no_gradient_reaches_may_be_proven(home: Path, server: ForkServer) -> None:
    """Gradients are wanted by default: a count of larger elements has none, times a weight it has one."""
    b = Builder("count_larger")
    x = b.input("x", "float32", [b.dim("n", min=1, max=64, tune=(16,))])
    w = b.input("w", "float32", ["n"])
    larger = b.gt(b.reshape(x, shape=["n", 1]), b.reshape(x, shape=[1, "n"]))
    counts = b.sum(b.cast(larger, dtype="float32"), dims=[1])
    for outputs, wanted in (([counts], []), ([b.mul(counts, w)], ["w"])):
        with Library.open(home, roles=("compiler",)) as library:
            (made,) = compile_blueprint(b.build(*outputs), targets=("cpu",), library=library)
        found = runner.prove(made.artifact_id, library=home, server=server, quick=True, effort=BRIEF)
        assert found.passed, found.reason
        with Library.open(home, readonly=True) as library:
            manifest = library.load(made.artifact_id).container.manifest
        assert manifest["launch"]["interface"]["differentiable"] == wanted


def test_a_verdict_is_not_made_twice(home: Path, server: ForkServer) -> None:
    artifact = put(home, toys.dense())
    first = runner.prove(artifact, library=home, server=server, quick=True, effort=BRIEF)
    again = runner.prove(artifact, library=home, server=server)
    assert (
        first.recorded
        and not again.recorded
        and again.passed
        and again.seconds == pytest.approx(first.seconds, abs=0.01)
    )
    with Library.open(home, readonly=True) as library:
        assert library.index.row("SELECT count(*) FROM verdicts") == (1,)


def test_a_rejection_can_be_replayed(home: Path, server: ForkServer) -> None:
    artifact = put(home, handmade.edit(toys.affine(), WRONG_MASK))
    found = runner.prove(artifact, library=home, server=server, quick=True, effort=BRIEF)
    assert found.passed is False and found.reason.startswith("gradients: d(")
    assert found.stages[-1].name == "gradients" and found.stages[-1].case == found.case
    case = cases.load(home / runner.CASES, found.case[:12])
    assert case.artifact == artifact and set(case.tensors) == {"x", "w", "b", "cotangent:y"}
    assert case.recipe["dims"]["rows"] == 1, "the smallest input that fails is kept"
    again = runner.replay(found.case, library=home, server=server)
    assert again.passed is False and again.reason.startswith("gradients: d(")
    with Library.open(home, readonly=True) as library, pytest.raises(EsperError) as refused:
        library.load(artifact)
    assert refused.value.code == "E0741"


def test_a_case_of_equal_rows_can_be_replayed(home: Path, server: ForkServer) -> None:
    """It has the tensors, and its recipe says along which dim they are alike."""
    little = "dx[r * C + c] = m * w[c] * (r == rows - 1 ? 1.00001f : 1.0f);"
    wrong = handmade.edit(toys.affine(), ("dx[r * C + c] = m * w[c];", little))
    for made, right in ((wrong, False), (toys.affine(), True)):
        artifact = put(home, made)
        with Library.open(home, readonly=True) as library:
            container = library.load(artifact, allow_unvalidated=True).container
        subject = Subject(container, torch.device("cpu"))
        recipe = Recipe("gradients", {"rows": 5}, "equal rows 3", cotangent="equal rows 3", wanted=("x", "w"))
        tensors = inputs.stored_form(subject, recipe)
        case = cases.Case(artifact, "gradients", "", recipe.to_json(), tensors)
        path = cases.save(home / runner.CASES, cases.encode(case))
        again = runner.replay(path.stem, library=home, server=server)
        assert again.passed is right and ("of equal rows it differs" in again.reason) is not right, again


def test_a_case_passes_where_the_artifact_is_right(home: Path, server: ForkServer) -> None:
    """The replay judges the artifact named in the case, on the tensors of the case."""
    good, bad = put(home, toys.affine()), put(home, handmade.edit(toys.affine(), WRONG_MASK))
    found = runner.prove(bad, library=home, server=server, quick=True, effort=BRIEF)
    case = cases.load(home / runner.CASES, found.case)
    moved = cases.Case(good, case.stage, case.reason, case.recipe, case.tensors)
    path = cases.save(home / runner.CASES, cases.encode(moved))
    assert runner.replay(path.stem, library=home, server=server).passed


def test_a_crash_keeps_the_case_that_caused_it(home: Path, server: ForkServer) -> None:
    wild = handmade.edit(
        toys.affine(), ("dx[r * C + c] = m * w[c];", "dx[(r + 900000000) * C + c] = m * w[c];")
    )
    found = runner.prove(put(home, wild), library=home, server=server, quick=True, effort=BRIEF)
    assert found.passed is False and "illegal-access" in found.reason and found.stages[-1].name == "loads"
    case = cases.load(home / runner.CASES, found.case or _only_case(home))
    assert case.stage == "loads" and "x" in case.tensors
    again = runner.replay(_only_case(home), library=home, server=server)
    assert again.passed is False and "illegal-access" in again.reason


def _only_case(home: Path) -> str:
    names = [p.stem for p in (home / runner.CASES).iterdir()]
    assert len(names) == 1
    return names[0]


def test_the_machine_s_failure_blames_nobody(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = put(home, toys.affine())
    with ForkServer(packages=("tests",)) as deaf:  # refuses the judge: no worker ever starts
        found = runner.prove(artifact, library=home, server=deaf, quick=True, effort=BRIEF)
    assert found.passed is None and found.state == "PENDING_BENCHMARKING" and not found.recorded
    with Library.open(home, readonly=True) as library:
        assert library.record(artifact).state == "PENDING_BENCHMARKING" and library.verdict(artifact) is None


def test_command_line(home: Path) -> None:
    good, bad = put(home, toys.norm()), put(home, handmade.edit(toys.affine(), WRONG_MASK))
    run = CliRunner().invoke(main, ["bench", "--pending", "--quick", "--json", "--library", str(home)])
    document = json.loads(run.stdout)
    assert run.exit_code == 1 and document["schema"] == "esper-gauntlet/1"
    assert {v["artifact_id"]: v["verdict"] for v in document["verdicts"]} == {
        good: "VALIDATED",
        bad: "REJECTED",
    }
    again = CliRunner().invoke(main, ["bench", good, "--json", "--library", str(home)])
    assert again.exit_code == 0 and json.loads(again.stdout)["verdicts"][0]["verdict"] == "VALIDATED"
    shown = CliRunner().invoke(main, ["show", bad[:16], "--library", str(home)])
    assert shown.exit_code == 0 and "REJECTED" in shown.output and "gradients" in shown.output
    case = next(v["case"] for v in document["verdicts"] if v["artifact_id"] == bad)
    replayed = CliRunner().invoke(main, ["replay", case, "--library", str(home)])
    assert replayed.exit_code == 1 and "still fails" in replayed.output
    missing = CliRunner().invoke(main, ["replay", "0" * 64, "--library", str(home)])
    assert missing.exit_code == 10 and "E0904" in missing.stderr
    unknown = CliRunner().invoke(
        main, ["bench", "ffffffffffff-cpu-fast-00000000", "--json", "--library", str(home)]
    )
    assert unknown.exit_code == 10 and json.loads(unknown.stdout)["errors"][0]["code"] == "E0721"


def test_nothing_pending(home: Path) -> None:
    run = CliRunner().invoke(main, ["bench", "--json", "--library", str(home)])
    assert run.exit_code == 0 and json.loads(run.stdout)["verdicts"] == []
    absent = CliRunner().invoke(main, ["bench", "--json", "--library", str(home.parent / "elsewhere")])
    assert absent.exit_code == 10 and json.loads(absent.stdout)["error"]["code"] == "E0701"


REJECTED = {
    "memory": (("y[r * C + c] = v != v", "y[r * C + c + (r == 2)] = v != v"), "memory"),
    "numerics": (("v = v + b[c];", "v = v - b[c];"), "numerics"),
    "gradients": (WRONG_MASK, "gradients"),
    "machine code": (("KERNEL(affine_fwd)", "int counter = 1;\nKERNEL(affine_fwd)"), "integrity"),
}


@pytest.mark.parametrize("kind", REJECTED)
def test_every_rejection_says_what_ran_and_can_be_replayed(home: Path, server: ForkServer, kind: str) -> None:
    change, stage = REJECTED[kind]
    artifact = put(home, handmade.edit(toys.affine(), change))
    found = runner.prove(artifact, library=home, server=server, quick=True)
    assert found.passed is False and found.stages[-1].name == stage, found.reason
    with Library.open(home, readonly=True) as library:
        verdict = library.verdict(artifact)
    assert verdict and verdict.report["hardware_context"]["cases"] == "quick"
    told = {s["name"]: s["outcome"] for s in verdict.report["stages"]}
    assert list(told)[-1] == stage and told.pop(stage) == "failed" and set(told.values()) <= {"passed"}
    shown = CliRunner().invoke(main, ["show", artifact, "--library", str(home)])
    assert all(name in shown.output for name in (*told, stage)) and found.stages[-1].reason in shown.output
    assert "cases quick" in shown.output and "sandbox " in shown.output
    assert bool(found.case) == (stage != "integrity"), "where nothing ran there is no input"
    if found.case:
        assert f"esper-gauntlet replay {found.case[:16]}" in shown.output
        again = runner.replay(found.case, library=home, server=server)
        assert again.passed is False and [s.name for s in again.stages] == [stage]
        tensors = cases.load(home / runner.CASES, found.case).tensors
        assert {"x", "w", "b"} <= set(tensors)


def test_nobody_knows_the_values_of_a_verdict_before(
    home: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is drawn by a number of its own, which the verdict has: by it the same are drawn once more, or by
    one that the environment has, as in these tests."""
    monkeypatch.delenv(runner.SEED)
    artifact = put(home, toys.affine())

    def judged(seed: int | None) -> tuple[int, object]:
        options = {"library": home, "server": server, "quick": True, "effort": BRIEF, "again": True}
        assert runner.prove(artifact, **options, seed=seed).passed
        with Library.open(home, readonly=True) as library:
            verdict = library.verdict(artifact)
        assert verdict is not None
        seen = verdict.report["benchmark_results"]["numerics"]["drift"]  # no bound or step of a type is near
        return verdict.report["hardware_context"]["seed"], seen

    (first, drift), (other, differently) = judged(None), judged(None)
    assert first != other and drift != differently
    assert judged(first) == (first, drift)
    monkeypatch.setenv(runner.SEED, str(other))
    assert judged(None) == (other, differently)
