"""The optional autograd node: a call and its backward without the interpreter (`runtime/_node.cpp`).

It uses torch's internals, so it is built against the torch that is installed, by `python -m runtime build`,
and loaded only under the name that says this Python and this torch. Library calls of a plan are made there
too (`runtime/_calls.h`). Without it, or with ESPER_NODE=0, calls go through `runtime.functions`: the same
plans, the same results.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from runtime.dispatch import native_available
from runtime.errors import fail

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "_node.cpp"
BUILD_SECONDS = 600
FORMAT = 4  # of what is passed to it, as in `runtime/_node.cpp`


def file_name() -> str:
    """For this Python and this release of torch."""
    release = torch.__version__.partition("+")[0]
    return f"_node.{sys.implementation.cache_tag}-torch{release}.so"


def _load() -> tuple[Any, str]:
    """(module or None, why not)."""
    path = HERE / file_name()
    if not path.is_file():
        return None, "not built: python -m runtime build"
    loader = importlib.machinery.ExtensionFileLoader("runtime._node", str(path))
    spec = importlib.util.spec_from_loader("runtime._node", loader, origin=str(path))
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        return None, f"{path.name} cannot be loaded: {error}"
    if getattr(module, "FORMAT", 1) != FORMAT:
        return None, f"{path.name} was built from another source: python -m runtime build"
    return module, ""


_module, _reason = _load()


def available() -> bool:
    """Whether calls go through it: built for this torch, on by default, off by ESPER_NODE=0 or
    ESPER_NATIVE=0."""
    return _module is not None and native_available() and os.environ.get("ESPER_NODE", "1") != "0"


def state() -> str:
    """For doctor: "on", "off", or why it is not there."""
    return _reason or ("on" if available() else "off")


def block(dtypes: Any, classes: Any, index: int, gradients: Any) -> Any:
    """What one block gives to its calls, or None where the node is not used."""
    return _module.block(dtypes, classes, index, gradients) if available() else None


def _absent(*args: Any) -> Any:
    return None


call = _absent if _module is None else _module.call
learn = _absent if _module is None else _module.learn
copies = _absent if _module is None else _module.copies
launches = _absent if _module is None else _module.launches
perform = _absent if _module is None else _module.perform
execute = _absent if _module is None else _module.execute


def prepare(parts: Any, fresh: Any, given: int, index: int) -> Any:
    """A plan by itself for `execute`, or None where Python runs it."""
    return _module.prepare(parts, fresh, given, index) if available() else None


def build(compiler: str = "") -> Path:
    """Compile it beside its source, for the torch and Python that run this; E0827 when that fails. Takes
    about half a minute."""
    from_torch = Path(torch.__file__).parent
    include = from_torch / "include"
    out = HERE / file_name()
    part = out.with_suffix(f".{os.getpid()}.part")
    command = [compiler or os.environ.get("CXX", "g++"), "-O2", "-std=c++20", "-shared", "-fPIC"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    command += [
        f"-I{p}" for p in (include, include / "torch/csrc/api/include", sysconfig.get_path("include"))
    ]
    command += [
        str(SOURCE),
        "-o",
        str(part),
        f"-L{from_torch / 'lib'}",
        "-ltorch_python",
        "-ltorch_cpu",
        "-lc10",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
        problem = done.stderr if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        part.unlink(missing_ok=True)
        raise fail(
            "E0827",
            f"{SOURCE.name} cannot be built for torch {torch.__version__}: {problem.strip()[:600]}",
            hint="calls work without it, at more host time each; needed: g++, Python's headers",
        )
    os.replace(part, out)
    return out
