"""The documentation under test: commands, options and error codes are described, and what it shows is run.

A fenced block with the info word `console` holds commands after `$ ` (continued by `> `); `python run` holds
a script. All such blocks of one page run in order, in the repository, against one empty library. More info
words: `ci` (the command stands in .ci/run and is run there), `exit=N` (the last command ends with N),
`skip="reason"` (not run, and why).
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from docs.build import TOOLS, commands, entries, load_tool
from docs.families import family_of
from docs.settings import rows
from esper_ir.registry import OPS
from tests.source import PACKAGES, ROOT, parse, python_files, relative

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "adr").glob("*.md")])
CODE = re.compile(r"E\d{4}")
FENCE = re.compile(r"^```(console|python run)\b([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROMISE = re.compile(r"`(tests/promises/\w+\.py)")
TEST_NAME = re.compile(r"[:`](test_\w+)`")
VARIABLE = re.compile(r"""["'](ESPER_[A-Z_]+)["']""")
FOLDER = re.compile(r"^#+ `([\w/]+)/`")
FILE = re.compile(r"`([\w/*.]+\.(?:py|c|toml|md|json))`")
PATH = re.compile(r"\b(?:docs|examples|bench|esper_ir|forge|gauntlet|library|runtime|tests)/[\w/.-]*\w")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def test_generated_parts_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "docs.build", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"run `make docs`: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("package", list(TOOLS))
def test_every_command_and_option_is_in_the_manual(package: str) -> None:
    page = (ROOT / "docs" / f"{package}.md").read_text(encoding="utf-8")
    wanted: set[str] = set()
    for path, context in commands(load_tool(package), TOOLS[package]):
        wanted.add(path)
        options = [
            p for p in context.command.get_params(context) if isinstance(p, click.Option) and not p.hidden
        ]
        wanted |= {name for option in options for name in option.opts if name.startswith("--")}
    missing = sorted(name for name in wanted if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", page))
    assert len(wanted) > 3 and not missing, f"docs/{package}.md does not mention {missing}"


def raised() -> dict[str, str]:
    """Error code -> the first source file that names it."""
    found: dict[str, str] = {}
    for path in python_files(*PACKAGES):
        texts = [
            n.value for n in ast.walk(parse(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str)
        ]
        for code in filter(CODE.fullmatch, texts):
            found.setdefault(code, relative(path))
    return found


def test_every_error_code_is_documented_and_none_too_many() -> None:
    source, described = raised(), entries()
    missing = {code: where for code, where in sorted(source.items()) if code not in described}
    assert not missing, f"no entry in docs/errors.d/: {missing}"
    stale = sorted(set(described) - set(source))
    assert not stale, f"described in docs/errors.d/ but raised nowhere: {stale}"
    short = [code for code, text in described.items() if len(text.split()) < 12]
    assert not short, f"say what happened and what to do: {short}"


def test_every_operator_is_on_the_page_of_its_family() -> None:
    page = family_of()
    assert set(page) == set(OPS)
    for name, family in page.items():
        text = (ROOT / "docs" / "operators" / f"{family}.md").read_text(encoding="utf-8")
        assert f"## `{name}`" in text, f"run `make docs`: {name}"


def test_every_environment_variable_is_described() -> None:
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    names = {
        name
        for path in python_files(*PACKAGES)
        for name in VARIABLE.findall(path.read_text(encoding="utf-8"))
    }
    missing = sorted(name for name in names if f"`{name}`" not in page)
    assert len(names) > 3 and not missing, f"docs/index.md does not mention {missing}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, missing


def test_architecture_names_files_that_exist() -> None:
    """A file is named from the repository's root or from the folder of its section's heading."""
    folder, missing = ROOT, []
    for line in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = FOLDER.match(line)
            folder = ROOT / heading.group(1) if heading else ROOT
        missing += [
            name for name in FILE.findall(line) if not (any(ROOT.glob(name)) or any(folder.glob(name)))
        ]
    assert not missing, missing


def test_examples_name_files_that_exist() -> None:
    named = {
        (relative(path), name)
        for path in (ROOT / "examples").iterdir()
        if path.is_file()  # a process that imports one of them leaves a folder there
        for name in PATH.findall(path.read_text(encoding="utf-8"))
    }
    missing = sorted(f"{where}: {name}" for where, name in named if not (ROOT / name).exists())
    assert named and not missing, missing


def test_every_setting_is_in_the_table_with_default_and_meaning() -> None:
    page = (ROOT / "docs" / "controller.md").read_text(encoding="utf-8")
    assert (
        "| `telemetry_every` | `50` | steps |" in page and "| `limits.max_latency_us` | `.inf` | us |" in page
    )
    assert "| `policy` | `heuristic` |" in page and "`fixed_schedule`, `off`, `replay` |" in page

    @dataclass(frozen=True)
    class Silent:
        a: int = 1  # [steps] between
        b: float = 0.5

    with pytest.raises(SystemExit, match="Silent.b has no comment"):
        list(rows(Silent, ""))


def test_every_promise_has_its_test() -> None:
    """The ADR names tests as `path::name`, or one `path` followed by `test_names` in the same paragraph."""
    text = (ROOT / "docs" / "adr" / "0001-what-we-promise.md").read_text(encoding="utf-8")
    missing: list[str] = []
    for paragraph in text.split("\n\n"):
        for path in dict.fromkeys(PROMISE.findall(paragraph)):
            source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
            names = TEST_NAME.findall(paragraph)
            missing += [f"{path}::{name}" for name in names if f"def {name}(" not in source]
    assert not missing, f"promised but not tested: {missing}"


@dataclass(frozen=True)
class Block:
    """One fenced block that a reader would run."""

    python: bool
    info: dict[str, str]
    text: str

    def lines(self) -> list[str]:
        """The commands, continuation lines joined."""
        found: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append(line[2:])
            elif line.startswith("> ") and found:
                found[-1] += "\n" + line[2:]
        return found

    def script(self) -> str:
        if self.python:
            return f"{shlex.quote(sys.executable)} - <<'SCRIPT'\n{self.text}SCRIPT\n"
        *first, last = self.lines()
        status = self.info.get("exit")
        checked = last if status is None else f"status=0; {last} || status=$?; test $status = {status}"
        return "\n".join([*first, checked]) + "\n"


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    for kind, words, text in FENCE.findall(page.read_text(encoding="utf-8")):
        info = dict(word.partition("=")[::2] for word in shlex.split(words))
        unknown = set(info) - {"ci", "exit", "skip"}
        assert not unknown, f"{relative(page)}: unknown words {unknown} after ```{kind}"
        found.append(Block(kind.startswith("python"), info, text))
    return found


def test_blocks_are_well_formed() -> None:
    """A skipped block says why, a `ci` block stands in .ci/run, and none is empty."""
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    for page in PAGES:
        for block in blocks(page):
            assert block.python or block.lines(), f"{relative(page)}: a console block without `$ ` lines"
            assert "skip" not in block.info or len(block.info["skip"]) > 5, f"{relative(page)}: skip why?"
            absent = [line for line in block.lines() if "ci" in block.info and line not in ci]
            assert not absent, f"{relative(page)}: not in .ci/run: {absent}"


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if not block.info.keys() & {"ci", "skip"}]


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=relative)
def test_what_a_page_shows_runs(page: Path, esper_library: Path) -> None:
    """Every command of the page succeeds, in order, with the scripts of this environment on PATH."""
    script = "set -euo pipefail\n" + "".join(block.script() for block in runnable(page))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-x", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
