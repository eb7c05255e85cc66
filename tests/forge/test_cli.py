"""`esper-forge`: every command, its documents, and what bad input is told."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from esper_ir.diagnostics import EXIT_BACKEND, EXIT_FAILURE, EXIT_NOT_FOUND, EXIT_USAGE
from forge.cli import main
from library.store import Library

ROOT = Path(__file__).parents[2]
RMS = str(ROOT / "examples" / "rmsnorm_residual.json")
SMALL: dict[str, Any] = {
    "format": "esper-blueprint/1",
    "name": "small",
    "dims": {"rows": {"min": 1, "max": 64, "tune": [8]}},
    "inputs": {"x": {"dtype": "float32", "shape": ["rows", 8]}},
    "params": {"w": {"dtype": "float32", "shape": [8], "init": {"kind": "ones"}}},
    "nodes": [{"id": "y", "op": "mul", "inputs": ["x", "w"]}],
    "outputs": ["y"],
}
Change = Callable[[dict[str, Any]], None]


def run(*words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(main, list(words), input=text, catch_exceptions=False)


def document(result: Result) -> dict[str, Any]:
    """What stands on standard output: one JSON document with a schema."""
    found = json.loads(result.stdout)
    assert isinstance(found, dict) and found["schema"].startswith("esper-")
    return found


def written(tmp_path: Path, change: Change = lambda blueprint: None) -> str:
    blueprint = json.loads(json.dumps(SMALL))
    change(blueprint)
    path = tmp_path / "blueprint.json"
    path.write_text(json.dumps(blueprint))
    return str(path)


def stored(library: Path) -> list[Path]:
    """What a library holds beside its own frame."""
    return [p for part in ("objects", "staging") for p in (library / part).rglob("*") if p.is_file()]


# Commands -----------------------------------------------------------------------------------------


def test_compile_prints_the_id_and_stores_the_artifact(esper_library: Path, tmp_path: Path) -> None:
    path = written(tmp_path)
    first = document(run("compile", path, "--target", "cpu", "--json"))
    (row,) = first["artifacts"]
    assert first["errors"] == [] and row["status"] == "PENDING_BENCHMARKING" and row["path"] == path
    assert row["target"].startswith("cpu") and row["pipeline"] == "fast" and row["kernels"] > 0
    assert row["seconds"]["total"] >= row["seconds"]["build"] and row["size_bytes"] > 0
    assert stored(esper_library)
    again = run("compile", path, "--target", "cpu")
    assert again.exit_code == 0 and row["artifact_id"] in again.stdout
    there = document(run("explain-miss", row["artifact_id"], row["artifact_id"], "--json"))
    assert there["differences"] == [] and "PENDING" not in again.stdout
    with Library.open(esper_library) as library:
        library.revoke(row["artifact_id"], "wrong results")
    assert "REVOKED" in run("compile", path, "--target", "cpu").stdout


def test_compile_takes_directories_globs_and_standard_input(esper_library: Path, tmp_path: Path) -> None:
    written(tmp_path)
    ids = set()
    for words in ([str(tmp_path)], [str(tmp_path / "*.json")]):
        ids |= {
            a["artifact_id"]
            for a in document(run("compile", *words, "--target", "cpu", "--json"))["artifacts"]
        }
    piped = run("compile", "-", "--target", "cpu", "--json", text=json.dumps(SMALL))
    ids |= {a["artifact_id"] for a in document(piped)["artifacts"]}
    assert len(ids) == 1


def test_warnings_go_to_standard_error(esper_library: Path, tmp_path: Path) -> None:
    extra = {"dtype": "float32", "shape": [8]}
    path = written(tmp_path, lambda b: b["params"].update(unused=extra))
    found = run("compile", path, "--target", "cpu", "--json")
    (row,) = document(found)["artifacts"]
    assert found.exit_code == 0 and "E0501" in found.stderr and "unused" in row["warnings"][0]
    shown = run("show", path)
    assert shown.exit_code == 0 and "E0501 [unused]" in shown.stderr and "E0501" not in shown.stdout


def test_explain_miss_names_the_fields(esper_library: Path, tmp_path: Path) -> None:
    first = document(run("compile", written(tmp_path), "--target", "cpu", "--json"))["artifacts"][0]
    wider = written(tmp_path, lambda b: b["params"]["w"].update(shape=[1]))
    second = document(run("compile", wider, "--target", "cpu", "--json"))["artifacts"][0]
    pair = (first["artifact_id"], second["artifact_id"])
    rows = document(run("explain-miss", *pair, "--json"))["differences"]
    shown = run("explain-miss", *pair).stdout.splitlines()
    assert shown[0].startswith("FIELD") and len(shown) == 1 + len(rows) and len(max(shown, key=len)) < 200
    same = run("explain-miss", pair[0], pair[0])
    assert same.exit_code == 0 and not same.stdout and "do not differ" in same.stderr
    assert any(row["field"].startswith("blueprint") for row in rows)


def test_measuring_says_what_it_came_to(esper_library: Path, tmp_path: Path) -> None:
    words = ("compile", written(tmp_path), "--target", "cpu", "--pipeline", "standard", "--budget", "2s")
    (row,) = document(run(*words, "--json"))["artifacts"]
    assert row["tuned"]["timed"] > 0 and row["tuned"]["gain"] >= 1 and row["tuned"]["building_s"] > 0
    line = run(*words).stdout
    assert re.search(r" s  \d+ tiles timed, gain over the rules' choice: (none|\d\.\d\dx), measuring", line)
    plain = document(run("compile", written(tmp_path), "--target", "cpu", "--json"))["artifacts"][0]
    assert plain["tuned"] == {}


@pytest.mark.parametrize("target", ["h100", "cpu"])
def test_explain(target: str) -> None:
    made = document(run("explain", RMS, "--target", target, "--json"))
    assert made["target"].startswith(target) and {p["phase"] for p in made["phases"]} == {
        "inference", "forward", "backward",
    }  # fmt: skip
    group = next(p for p in made["phases"] if p["phase"] == "forward")["groups"][0]
    assert group["bytes_read"] > group["bytes_written"] > 0 and group["floor_us"] > 0 and group["kernels"]
    shown = run("explain", RMS, "--target", target)
    assert shown.exit_code == 0 and "saved for the backward" in shown.stdout
    assert "figures at rows=" in shown.stdout
    for phase in made["phases"]:
        for group in phase["groups"]:
            inside = {node.split(":")[0] for node in group["nodes"]}
            assert not [r for r in phase["refused"] if {r["node"], r["group"]} <= inside]


def test_operations_and_floors_of_every_kind_of_step() -> None:
    """A convolution is bound by its operations, what follows by its bytes; a card without matrix instructions
    for bfloat16 has a floor by bytes; of a processor all are called estimates."""
    conv = str(Path(RMS).with_name("conv_res.json"))
    made = document(run("explain", conv, "--target", "h100", "--json"))
    phase = next(p for p in made["phases"] if p["phase"] == "forward")
    (called,) = (g for g in phase["groups"] if g["externs"])
    assert called["flops"] == 2 * phase["sizes"]["n"] * 56 * 56 * 128 * 3 * 3 * 128, called
    assert called["floor_us"] == pytest.approx(called["flops"] / 989e6, abs=0.01)
    assert all(g["flops"] > 0 for g in phase["groups"]) and made["floors"] == "floor"
    total = phase["total"]
    assert total["flops"] == sum(g["flops"] for g in phase["groups"]) and total["bytes"] > 0
    shown = run("explain", conv, "--target", "h100").stdout
    assert "GFLOP, floor 59.8 us" in shown and shown.splitlines()[-1].startswith("total: forward at n=")
    for target in ("t4", "cpu"):
        plain = run("explain", str(Path(RMS).with_name("digits_block.json")), "--target", target)
        assert plain.exit_code == 0, plain.output
    assert "floor" not in plain.stdout and "FLOP, estimate" in plain.stdout
    norm = document(run("explain", str(Path(RMS).with_name("layernorm.json")), "--target", "cpu", "--json"))
    assert norm["floors"] == "estimate" and norm["phases"][0]["total"]["flops"] > 0


def test_bytes_of_a_group_are_those_of_its_buffers() -> None:
    """8192 or 32768 rows of 4096 bf16: x and r are read, y is written, w and rstd are small."""
    made = document(run("explain", RMS, "--target", "h100", "--json"))
    for part in (p for p in made["phases"] if p["phase"] == "inference"):
        (group,) = part["groups"]
        matrix = part["sizes"]["rows"] * 4096 * 2
        assert group["bytes_read"] == 2 * matrix + 4096 * 2 and group["bytes_written"] == matrix


def test_show() -> None:
    made = document(run("show", RMS, "--json"))
    assert len(made["id"]) == 64 and made["types"]["y"] == "bfloat16[rows, 4096]"
    assert made["blueprint"]["name"] == "rmsnorm_residual"
    shown = run("show", RMS).stdout
    assert "rmsnorm_residual" in shown
    spec = made["blueprint"]["dims"]["rows"]
    tune = ", ".join(map(str, spec["tune"]))
    assert re.search(rf"dim rows +{spec['min']}\.\.{spec['max']}, .*tune {tune}", shown)


def test_print() -> None:
    assert "row_sum" in run("print", RMS, "--target", "h100").stdout
    assert "@triton.jit" in run("print", RMS, "--target", "h100", "--what", "text").stdout
    assert "#include" in run("print", RMS, "--target", "cpu", "--what", "text").stdout


def test_print_ptx(tmp_path: Path) -> None:
    shown = run("print", written(tmp_path), "--target", "h100", "--what", "ptx")
    assert ".target sm_90a" in shown.stdout and shown.stdout.count(".visible .entry") >= 2, shown.stderr
    refused = run("print", RMS, "--target", "cpu", "--what", "ptx")
    assert refused.exit_code == EXIT_USAGE and "E0552" in refused.stderr


def test_lists() -> None:
    ops = {row["op"] for row in document(run("ops", "--json"))["ops"]}
    targets = {row["target"] for row in document(run("targets", "--json"))["targets"]}
    pipelines = {row["pipeline"] for row in document(run("pipelines", "--json"))["pipelines"]}
    assert {"matmul", "gelu", "rms_norm"} <= ops and {"h100", "cpu-v3"} <= targets and "fast" in pipelines
    made_from = {row["template"]: row["does"] for row in document(run("templates", "--json"))["templates"]}
    assert {"rows", "matmul", "chain", "scan", "extern"} <= made_from.keys() and all(made_from.values())
    for command in ("ops", "targets", "templates", "pipelines"):
        shown = run(command)
        assert shown.exit_code == 0 and shown.stdout.count("\n") > 1 and shown.stdout[:2].isupper()


def test_doctor(esper_library: Path) -> None:
    found = run("doctor", "--json")
    rows = {row["check"]: row for row in document(found)["checks"]}
    assert {"triton", "c compiler", "sandbox", "target auto", "library"} <= set(rows)
    assert found.exit_code == (0 if all(r["ok"] for r in rows.values() if r["needed"]) else EXIT_FAILURE)


def test_doctor_without_a_compiler_says_so(
    esper_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = {row["check"]: row for row in document(run("doctor", "--json"))["checks"]}
    assert not rows["c compiler"]["ok"] and "E0520" in rows["c compiler"]["found"]


# Bad input ----------------------------------------------------------------------------------------


def two_nodes(first: dict[str, Any], second: dict[str, Any]) -> Change:
    return lambda b: b.update(nodes=[first, second])


CYCLE = two_nodes({"id": "y", "op": "mul", "inputs": ["x", "z"]}, {"id": "z", "op": "relu", "inputs": ["y"]})
BAD: dict[str, tuple[Change, str, str]] = {
    "unknown op": (lambda b: b["nodes"][0].update(op="mull"), "E0301", "mul"),
    "shape conflict": (lambda b: b["params"]["w"].update(shape=[7]), "E0204", "[7]"),
    "cycle": (CYCLE, "E0303", "cycle"),
    "dtype": (lambda b: b["inputs"]["x"].update(dtype="complex64"), "E0103", "complex64"),
    "dangling name": (lambda b: b["nodes"][0].update(inputs=["x", "v"]), "E0302", "v"),
    "dim of no axis": (lambda b: b["inputs"]["x"].update(shape=["2*rows", 8]), "E0536", "rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_blueprints_are_named_and_nothing_is_written(
    name: str, esper_library: Path, tmp_path: Path
) -> None:
    change, code, word = BAD[name]
    found = run("compile", written(tmp_path, change), "--target", "h100", "--json")
    made = document(found)
    told = json.dumps(made["errors"])
    assert found.exit_code == EXIT_FAILURE and made["artifacts"] == []
    assert code in told and word in told and code in found.stderr, told
    assert stored(esper_library) == []


@pytest.mark.parametrize(
    "text", ["", "{", json.dumps(SMALL)[:-20], "[]", '{"format": "esper-blueprint/1"}', "\xff"]
)
def test_text_that_is_no_blueprint(text: str, esper_library: Path) -> None:
    found = run("compile", "-", "--target", "h100", "--json", text=text)
    errors = document(found)["errors"]
    assert found.exit_code == EXIT_FAILURE and errors[0]["code"].startswith("E01")
    assert stored(esper_library) == []


def test_one_bad_file_does_not_stop_the_others(esper_library: Path, tmp_path: Path) -> None:
    good, bad = written(tmp_path), tmp_path / "bad.json"
    bad.write_text("{")
    found = run("compile", good, str(bad), "--target", "cpu", "--json")
    made = document(found)
    assert found.exit_code == EXIT_FAILURE and len(made["artifacts"]) == len(made["errors"]) == 1


@pytest.mark.parametrize(
    ("words", "code", "status"),
    [
        (["compile", "{path}", "--target", "h1000"], "E0510", EXIT_USAGE),
        (["compile", "{path}", "--pipeline", "fastt"], "E0513", EXIT_USAGE),
        (["compile", "nowhere.json"], "E0512", EXIT_NOT_FOUND),
        (["explain", "nowhere.json"], "E0512", EXIT_NOT_FOUND),
        (["explain", "{path}", "--target", "h1000"], "E0510", EXIT_USAGE),
        (["show", "nowhere*.json"], "E0512", EXIT_NOT_FOUND),
        (["compile", "{path}", "nowhere.json", "--target", "cpu"], "E0512", EXIT_NOT_FOUND),
        (["compile", "{folder}"], "E0512", EXIT_NOT_FOUND),
        (["compile", "{path}", "--target", "interpreter"], "E0515", EXIT_USAGE),
    ],
)
def test_what_is_unknown_is_named(
    words: list[str], code: str, status: int, esper_library: Path, tmp_path: Path
) -> None:
    path = written(tmp_path)
    (tmp_path / "empty").mkdir()
    filled = [w.format(path=path, folder=tmp_path / "empty") for w in words]
    plain, with_json = run(*filled), run(*filled, "--json")
    assert plain.exit_code == with_json.exit_code == status
    assert code in plain.stderr and code in with_json.stdout and plain.stdout == ""
    document(with_json)
    assert stored(esper_library) == []


def test_near_names_are_offered(esper_library: Path, tmp_path: Path) -> None:
    assert "h100" in run("compile", written(tmp_path), "--target", "h1000").stderr


def test_a_dtype_that_the_target_has_not(esper_library: Path) -> None:
    found = run("compile", RMS, "--target", "t4", "--json")
    (error,) = document(found)["errors"]
    assert found.exit_code == EXIT_FAILURE and error["code"] == "E0537" and "bfloat16" in error["message"]


def test_without_a_c_compiler(esper_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = run("compile", path, "--target", "cpu", "--json")
    (error,) = document(found)["errors"]
    assert found.exit_code == EXIT_BACKEND and error["code"] == "E0520" and error["hint"]
    assert stored(esper_library) == []


def test_a_library_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands where the directory should be (a mode would not stop the superuser)."""
    place = tmp_path / "library"
    place.write_text("not a directory")
    place.chmod(stat.S_IRUSR)
    monkeypatch.setenv("ESPER_KEYS", str(tmp_path / "keys"))
    found = run("compile", written(tmp_path), "--target", "cpu", "--library", str(place), "--json")
    assert found.exit_code != 0 and document(found)["error"]["code"].startswith("E07")
    assert place.read_text() == "not a directory"


def started(*words: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "forge.cli", *words, "--target", "cpu", "--json"]
    env, pipe = {**os.environ, **environment}, subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


def test_killed_in_the_middle_then_twice_at_once(esper_library: Path, tmp_path: Path) -> None:
    path = written(tmp_path)
    killed, deadline = started("compile", path), time.monotonic() + 60
    while not (esper_library / "esper.db").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL, "it was done before: the test says nothing"
    both = [started("compile", path) for _ in range(2)]
    told = [json.loads(p.communicate(timeout=120)[0]) for p in both]
    assert [p.returncode for p in both] == [0, 0]
    assert len({t["artifacts"][0]["artifact_id"] for t in told}) == 1
    with Library.open(esper_library, readonly=True) as library:
        assert len(library.artifacts()) == 1


def test_under_the_oldest_locale_and_without_a_home(tmp_path: Path) -> None:
    """Names of files are bytes: spaces and other alphabets where Python can spell ASCII alone."""
    folder = tmp_path / "a b ü 日本"
    folder.mkdir()
    path = written(folder)
    places = {"ESPER_LIBRARY": str(folder / "library"), "ESPER_KEYS": str(folder / "keys")}
    old = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HOME": "/nonexistent"}
    made = started("compile", path, **places, **old)
    out, err = made.communicate(timeout=120)
    assert made.returncode == 0 and json.loads(out)["artifacts"], err
    missing = started("compile", f"{path} nö", **places, **old)
    out, err = missing.communicate(timeout=120)
    assert missing.returncode == EXIT_NOT_FOUND and json.loads(out)["error"]["code"] == "E0512", err


@pytest.mark.parametrize("words", [["compile"], ["explain"], ["print", RMS, "--what", "all"], ["nothing"]])
def test_wrong_usage(words: list[str]) -> None:
    assert run(*words).exit_code == EXIT_USAGE


def test_long_texts_are_shown_where_they_part() -> None:
    from forge.cli import WIDEST, _apart

    same = "a" * 200
    first, second = _apart(same + "one" + "z" * 100, same + "two")
    assert first.startswith("...aaa") and "one" in first and second.endswith("two") and first != second
    assert max(len(first), len(second)) <= WIDEST
    assert _apart("short", "shorter") == ("short", "shorter")
