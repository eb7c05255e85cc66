"""The C toolchain: the same bytes everywhere, few needs, named refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from esper_ir.diagnostics import EXIT_BACKEND, EsperError
from forge.ctoolchain import compile_c, compiler_version, find_compiler, flags_of
from forge.emit.c import emit_module
from forge.target import resolve
from tests.forge import plans as P
from tests.forge.plans import BF16, F32

TARGET = resolve("cpu-v3")
SOURCE = '__attribute__((visibility("default"))) void f(int *x)\n{ *x = __LINE__; }\n'


@pytest.fixture(scope="module")
def data() -> bytes:
    return compile_c(emit_module((P.rms_backward(64, BF16), P.softmax(64, F32)), TARGET), TARGET).data


def test_two_folders_give_the_same_bytes(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "another" / "place"
    other.mkdir(parents=True)
    monkeypatch.chdir(other)
    for name, value in (
        ("CFLAGS", "-O0"),
        ("CC", "/nowhere/cc"),
        ("CPATH", "/nowhere"),
        ("LANG", "de_DE.UTF-8"),
    ):
        monkeypatch.setenv(name, value)
    text = emit_module((P.rms_backward(64, BF16), P.softmax(64, F32)), TARGET)
    assert compile_c(text, TARGET).data == data


def test_object_holds_no_path_and_no_name_of_the_compiler(data: bytes) -> None:
    for word in (os.getcwd().encode(), b"/tmp", b"/home", b"GCC", b"module.so", b"build-id"):
        assert word not in data, word
    assert b"rms_backward" in data and len(data) < 100_000


def test_needs_only_the_c_library_and_openmp(data: bytes, tmp_path: Path) -> None:
    if not shutil.which("readelf"):
        pytest.skip("no readelf here")
    path = tmp_path / "module.so"
    path.write_bytes(data)
    out = subprocess.run(["readelf", "-dW", str(path)], capture_output=True, text=True, check=True).stdout
    needed = {line.rpartition("[")[2].rstrip("]") for line in out.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libm.so.6", "libgomp.so.1"}, needed
    assert "RPATH" not in out and "RUNPATH" not in out


@pytest.mark.parametrize("first", ["import torch", "pass"])
def test_loads_with_torch_and_without(data: bytes, tmp_path: Path, first: str) -> None:
    path = tmp_path / "module.so"
    path.write_bytes(data)
    script = (
        f"import sys, ctypes\n{first}\nctypes.CDLL(sys.argv[1]).softmax\n"
        "print(sum('libgomp' in line and 'r-xp' in line for line in open('/proc/self/maps')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1", "one OpenMP runtime in the process"


def test_facts_are_recorded() -> None:
    done = compile_c(SOURCE, TARGET)
    assert done.version == compiler_version(find_compiler()) and done.version
    assert f"-march={TARGET.arch}" in done.flags and done.flags == flags_of(TARGET)
    assert "-ffp-contract=off" in done.flags and not any("fast-math" in f for f in done.flags)
    assert done.seconds > 0 and done.level != "none"
    assert compile_c(SOURCE, resolve("cpu-v4")).flags != done.flags


def test_clang_objects_need_no_second_openmp() -> None:
    flags = flags_of(TARGET, "Debian clang version 14.0.6")
    assert "-fopenmp" not in flags and "-fopenmp-simd" in flags and "-ffp-contract=off" in flags


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(EsperError, match="E0521") as refused:
        compile_c("void f(void) { this is no C; }", TARGET)
    assert "<stdin>" in str(refused.value.hint)
    with pytest.raises(EsperError, match="E0520"):
        compile_c(SOURCE, TARGET, compiler="no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EsperError) as absent:
        compile_c(SOURCE, TARGET)
    assert absent.value.code == "E0520" and absent.value.exit_code == EXIT_BACKEND
    assert "install" in str(absent.value.hint)


def test_a_compiler_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    slow = tmp_path / "slowcc"
    slow.write_text('#!/bin/sh\ncase "$1" in --version) echo slowcc 1;; *) sleep 60;; esac\n')
    slow.chmod(0o755)
    with pytest.raises(EsperError, match="E0831"):
        compile_c(SOURCE, TARGET, compiler=str(slow), seconds=2.0)
