"""Every command of esper-library: what it prints, what it changes, how it ends."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from esper_ir.diagnostics import EsperError
from library.canon import canonical_json
from library.cli import main
from library.errors import CODES
from library.manifest import pack
from library.records import ARCHIVED, REVOKED, SUPERSEDED, VALIDATED
from library.store import Library
from tests.library.helpers import contents, flip, make_container, make_manifest, object_path, validated

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (arguments, result.exit_code, result.output, result.exception)
    return result


def run_json(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """stdout is exactly one JSON document that names its schema."""
    document = json.loads(run(*arguments, "--json", code=code).stdout)
    assert re.fullmatch(r"esper-library/[a-z-]+/1", document["schema"])
    return document


@pytest.fixture
def two(home: Path) -> tuple[str, str]:
    """Two proven artifacts in ESPER_LIBRARY."""
    with Library.open(home) as lib:
        report = {"generated_tags": ["trainable"], "wep": {"latency_ms_p99": 1.5}}
        return validated(lib, 1, report), validated(lib, 2, report)


def test_ls_and_show(two: tuple[str, str]) -> None:
    one, _ = two
    assert one in run("ls").stdout and "VALIDATED" in run("ls", "--state", "validated").stdout
    assert [a["id"] for a in run_json("ls")["artifacts"]] == list(two)
    assert len(run_json("ls", "--limit", "1")["artifacts"]) == 1
    assert run_json("ls", "--state", "rejected")["artifacts"] == []
    (blueprint,) = run_json("ls", "--blueprints")["blueprints"]
    assert len(run_json("ls", "--blueprint", blueprint["id"][:10])["artifacts"]) == 2
    shown = run_json("show", one[:-2])
    assert shown["artifact"]["id"] == one and shown["verdict"]["result"] == VALIDATED
    assert "block_0" in run("show", one).stdout


def test_refusals_have_codes_and_documents(two: tuple[str, str]) -> None:
    error = run_json("show", two[0][:12], code=14)["error"]
    assert error["code"] == "E0722" and set(error["details"]["candidates"]) == set(two)
    assert run_json("show", "ffffffffffff-none", code=10)["error"]["code"] == "E0721"
    assert "E0720" in run("show", "../x", code=2).stderr
    run("show", code=2)
    run("--library", "/nonexistent/place", "ls", code=10)


def test_query(two: tuple[str, str]) -> None:
    found = run_json("query", "--require", "trainable", "--max-latency-ms", "2", "--arch", "cpu-v3")
    assert {m["artifact_id"] for m in found["matches"]} == set(two)
    refused = run_json("query", "--exclude", "trainable", "--explain")
    assert refused["matches"] == [] and refused["reasons"] == {"tag excluded": 2}
    assert two[0] in run("query", "--prefer", "trainable").stdout
    run("query", "--limit", "0", code=2)


def test_verify_and_repair(two: tuple[str, str], home: Path, fast_tmp: Path) -> None:
    one, _ = two
    assert run_json("verify", "--contents")["ok"]
    run("export", fast_tmp / "b", one)
    with Library.open(home, readonly=True) as lib:
        place = object_path(home, lib.record(one).digest)
    flip(place, 100)
    assert run_json("verify")["ok"], "without --contents bytes are not read"
    report = run_json("verify", "--contents", code=11)
    assert [f["kind"] for f in report["findings"]] == ["corrupt"]
    assert run_json("verify", one, code=11)["checked"] == 1
    repaired = run_json("verify", "--repair", "--from", fast_tmp / "b")
    assert repaired["ok"] and [r["action"] for r in repaired["repairs"]] == ["restored"]
    place.unlink()
    assert "unavailable" in run("verify", "--repair", code=11).stdout
    assert run_json("ls", "--jobs")["jobs"][0]["kind"] == "compile"


def test_audit_and_proofs(two: tuple[str, str], home: Path) -> None:
    report = run_json("audit", "--sign")
    assert report["ok"] and report["checkpoints"] >= 1 and report["entries"] > 5
    assert run_json("audit", "--prove", "2")["index"] == 1
    assert run_json("audit", "--grown-from", "2")["old"] == 2
    run("audit", "--prove", "9999", code=10)
    with Library.open(home) as lib, lib.index.write():
        lib.index.run("UPDATE artifacts SET state = 'REJECTED'")
    assert {f["code"] for f in run_json("audit", code=11)["findings"]} == {"E0763"}
    assert "E0763" in run("audit", code=11).stdout


def test_archive_restore_supersede_revoke(two: tuple[str, str], home: Path, fast_tmp: Path) -> None:
    one, other = two
    run("archive", one, "--to", fast_tmp / "b", "--reason", "old")
    assert run_json("ls", "--state", "archived")["artifacts"][0]["id"] == one
    run("gc", "--apply", "--grace", "0")
    assert run_json("restore", fast_tmp / "b")["artifacts"] == [one]
    run("supersede", one, other, "--reason", "faster")
    told = run_json("revoke", other, "--reason", "wrong at n=7")
    assert told["in_trust_store"]
    with Library.open(home, readonly=True) as lib:
        assert (lib.record(one).state, lib.record(other).state) == (SUPERSEDED, REVOKED)
        assert lib.record(other).digest in lib.trust.document().revoked_artifacts
    run("revoke", other, code=2)
    run("archive", other, "--to", fast_tmp / "c", code=14)


def test_export_and_import(two: tuple[str, str], fast_tmp: Path) -> None:
    run("export", fast_tmp / "b")
    other = fast_tmp / "other"
    with Library.open(other):
        pass
    assert run_json("--library", other, "import", fast_tmp / "b", "--dry-run")["artifacts"] == list(two)
    assert run_json("--library", other, "ls")["artifacts"] == []
    assert run_json("--library", other, "import", fast_tmp / "b")["artifacts"] == list(two)
    assert run_json("--library", other, "verify", "--contents")["ok"]
    flip(fast_tmp / "b", -1)
    run("--library", other, "import", fast_tmp / "b", code=11)
    run("--library", other, "import", fast_tmp / "none", code=10)


def test_import_of_a_spool(two: tuple[str, str], fast_tmp: Path) -> None:
    line = {"schema": "esper-spool/1", "kind": "use", "key": "k", "artifact_id": two[0], "loads": 3}
    (fast_tmp / "spool").write_bytes(canonical_json(line) + b"\n")
    assert run_json("import", "--spool", fast_tmp / "spool")["outcomes"] == 1
    assert run_json("show", two[0])["outcomes"] == 1


def test_measurements_travel(two: tuple[str, str], home: Path, fast_tmp: Path) -> None:
    with Library.open(home) as lib:
        for us in (1.5, 1.25):
            lib.put_measurement("g", "sm_90", "t", {"us": us})
    assert run_json("export", fast_tmp / "m", "--measurements")["measurements"] == 2
    other = fast_tmp / "other"
    with Library.open(other):
        pass
    assert run_json("--library", other, "import", "--measurements", fast_tmp / "m")["measurements"] == 2
    assert run_json("--library", other, "import", "--measurements", fast_tmp / "m")["measurements"] == 0
    with Library.open(other, readonly=True) as lib:
        assert [m["us"] for m in lib.measurements("g", "sm_90", "t")] == [1.5, 1.25]
    (fast_tmp / "m").write_text('{"schema":"esper-measurements/1"}\n')
    run("--library", other, "import", "--measurements", fast_tmp / "m", code=11)


def test_curate_is_a_dry_run_by_default(two: tuple[str, str], home: Path, fast_tmp: Path) -> None:
    before = contents(home)
    planned = run_json("curate", "--keep-mb", "0", "--min-age-days", "0")
    assert len(planned["plans"]) == 1 and not planned["applied"]
    assert contents(home) == before
    assert planned["diversity"]["artifacts"] == 2
    run("curate", "--keep-mb", "0", "--min-age-days", "0", "--apply", fast_tmp / "b")
    with Library.open(home, readonly=True) as lib:
        assert len(lib.artifacts(state=ARCHIVED)) == 1
    assert "2 kinds" not in run("curate").stdout


def test_gc_is_a_dry_run_by_default(two: tuple[str, str], home: Path) -> None:
    with Library.open(home) as lib:
        lib.blobs.put(b"loose")
    assert run_json("gc")["marked"] == 1
    assert run_json("gc", "--apply", "--grace", "0")["removed"] == 1


def test_lineage_and_diff(home: Path, fast_tmp: Path) -> None:
    with Library.open(home) as lib:
        ids = [lib.put_artifact(make_container(n, blueprint=n)).blueprint for n in (1, 2)]
        lib.add_edge(ids[0], ids[1], "mutation", "renamed")
    assert run("lineage", ids[0], "--svg", fast_tmp / "x.svg").stdout.count("block_") == 2
    assert (fast_tmp / "x.svg").read_text().startswith("<svg")
    assert run_json("lineage", ids[1], "--up")["edges"][0]["parent"] == ids[0]
    assert '- name: "block_1"' in run("diff", ids[0], ids[1]).stdout
    assert run_json("diff", ids[0], ids[0])["lines"] == []


def test_keys_and_trust(two: tuple[str, str], fast_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_json("keys", "list")["keys"]
    assert [k["role"] for k in first] == ["root", "compiler", "validator"] and all(
        k["private"] for k in first
    )
    run("keys", "new", "compiler")
    rotated = run_json("keys", "rotate", "validator")["keyid"]
    assert any(k["keyid"] == rotated for k in run_json("keys", "list")["keys"])
    validator = next(k["keyid"] for k in first if k["role"] == "validator")
    run("keys", "revoke", validator[:10])
    assert run_json("verify", code=13)["findings"][0]["code"] == "E0755"
    version = run_json("trust", "renew")["version"]
    run("trust", "export", fast_tmp / "t")
    public = next(k["public"] for k in first if k["role"] == "validator")
    monkeypatch.setenv("ESPER_KEYS", str(fast_tmp / "elsewhere"))
    run("trust", "show", code=12)
    run("trust", "import", fast_tmp / "t")
    assert run_json("trust", "show")["version"] == version
    run("trust", "import", fast_tmp / "t", code=12)
    monkeypatch.setenv("ESPER_KEYS", str(fast_tmp / "third"))
    run("keys", "new", "validator")
    run("trust", "add", "validator", public)
    run("trust", "add", "validator", "ssh-ed25519 AAAA", code=2)
    run("trust", "bar-policy", "p1")
    assert "1 policies" in run("trust", "show").stdout


def test_doctor(two: tuple[str, str], home: Path) -> None:
    assert run_json("doctor")["ok"]
    (home / "FORMAT").write_text('{"format":"esper-library","version":9}')
    assert "E0706" in run("doctor", code=1).stdout


def test_as_a_process(two: tuple[str, str]) -> None:
    """Error text on stderr, one document on stdout, the exit code of the refusal."""
    command = [sys.executable, "-m", "library.cli", "show", "ffffffff", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 10
    assert json.loads(done.stdout)["error"]["code"] == "E0721" and done.stderr.startswith("E0721")


def test_reading_commands_change_nothing(two: tuple[str, str], home: Path) -> None:
    before = contents(home)
    for command in (
        ["ls"],
        ["show", two[0]],
        ["query"],
        ["verify", "--contents"],
        ["audit"],
        ["curate"],
        ["doctor"],
    ):
        run(*command)
    assert contents(home) == before


def named_in(file: str) -> dict[str, bool]:
    """Tests of a file, and whether each is marked slow."""
    tree = ast.parse((ROOT / "tests" / "library" / file).read_text(encoding="utf-8"))
    defined = {
        node.name: any("slow" in ast.unparse(mark) for mark in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assigned = (node.targets[0] for node in tree.body if isinstance(node, ast.Assign))
    return defined | {target.id: False for target in assigned if isinstance(target, ast.Name)}


def test_every_promise_of_the_manual_names_a_test() -> None:
    """Each row names tests that stand in the file it names, and those marked long are those marked slow."""
    text = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    table = text.split("## What is promised")[1].split("## Writing")[0]
    rows = [line for line in table.splitlines() if line.startswith("|") and "`test_" in line]
    assert len(rows) >= 45
    for row in rows:
        here: dict[str, bool] = {}
        for file, test, long in re.findall(r"`(test_\w+\.py)`|`([Tt]est\w+)`( \(long)?", row):
            if file:
                here = named_in(file)
            else:
                assert test in here, (test, row)
                assert here[test] == bool(long), (
                    f"{test} is marked {'slow' if here[test] else 'for each run'}"
                )


def test_exit_codes_of_the_errors() -> None:
    assert {code for code, _ in CODES.values()} == {2, 10, 11, 12, 13, 14, 15, 16}


def test_names_do_not_steer_the_terminal(home: Path) -> None:
    """A block's name, a reason and a report come from files of others."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31mred\u202egnp.exe\nsecond\tline"
    manifest = make_manifest()
    blueprint = {**manifest["blueprint"], "name": evil}
    with Library.open(home) as lib:
        record = lib.put_artifact(pack({**manifest, "blueprint": blueprint}, [("code", "elf", b"x")]))
        lib.record_verdict(record.id, {"policy": "p", "generated_tags": [f"t{evil[:4]}"]}, passed=True)
        other = lib.put_artifact(make_container(2)).id
        lib.record_verdict(other, {}, passed=False, reason=evil)
        lib.revoke(record.id, evil)
    commands = (
        ["ls"],
        ["ls", "--blueprints"],
        ["show", record.id],
        ["show", other],
        ["query", "--explain"],
        ["verify", "--contents"],
        ["lineage", record.blueprint],
    )
    for command in commands:
        result = CliRunner().invoke(main, command)
        text = result.output
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text), (command, text)
    assert "second\\tline" in run("ls").stdout, "shown, in one line"
    with pytest.raises(EsperError) as error, Library.open(home, readonly=True) as lib:
        lib.load(record.id)
    assert "\x1b" not in str(error.value) and "\\x1b" in str(error.value)


def test_it_says_its_version() -> None:
    from importlib.metadata import version

    assert version("esper-forge") in CliRunner().invoke(main, ["--version"]).output
