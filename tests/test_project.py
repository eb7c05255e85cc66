"""The project file, the pins and the CI script agree with each other."""

from __future__ import annotations

import importlib
import os
import re
import tomllib
from typing import Any

from tests.dealing import FIRST, TOGETHER, unit_of
from tests.source import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = re.compile(r"^[A-Za-z0-9._-]+")


def _name(requirement: str) -> str:
    found = NAME.match(requirement)
    assert found, requirement
    return found.group(0).lower().replace("_", "-")


def test_every_requirement_is_pinned() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_name(line) for line in pins if "==" in line and not line.startswith("#")}
    wanted = [
        *PROJECT["dependencies"],
        *(r for extra in PROJECT["optional-dependencies"].values() for r in extra),
    ]
    missing = sorted({_name(requirement) for requirement in wanted} - pinned)
    assert not missing, f"constraints.txt does not pin {missing}"


def test_the_core_needs_no_compiler() -> None:
    core = {_name(requirement) for requirement in PROJECT["dependencies"]}
    signing = {"cryptography", "pynacl"}
    assert core == {"torch", "numpy", "networkx", "click", "rich", "apsw", "platformdirs", *signing}


def test_scripts_exist() -> None:
    for target in PROJECT["scripts"].values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_make_names_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    wanted = ("install", "demo", "test", "test-slow", "test-gpu", "bench", "lint", "docs", "library")
    missing = [name for name in wanted if not re.search(rf"^{name}:", text, re.MULTILINE)]
    assert not missing, missing


def test_ci_runs_the_demo_and_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    lines = script.read_text(encoding="utf-8").splitlines()
    assert os.access(script, os.X_OK) and "set -euo pipefail" in lines
    assert lines[-2:] == ["make demo", "make test"]


def test_long_units_and_folders_of_the_dealing_exist() -> None:
    for place in (*TOGETHER, *FIRST):
        assert (ROOT / place).exists(), place
    assert {unit_of(f"{place}test_x.py::test_y") for place in TOGETHER} == set(TOGETHER)
