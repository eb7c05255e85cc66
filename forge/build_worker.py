"""Runs in a sandboxed worker: Triton text to PTX for each kernel, one joined module to a cubin.

Requests and answers are JSON; Triton is imported only here. Nothing of the environment reaches it but
what the sandbox lets through.
"""

from __future__ import annotations

import base64
import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EsperError
from forge.ptx import join
from forge.sass import bad_carries

TOOL_HINT = "install triton again: the tool is a part of its wheel"


def run(request: dict[str, Any]) -> dict[str, Any]:
    """`stage` "compile": {"code": {entry: PTX text or base64 of an hsaco}, "kernels": {entry: facts},
    "triton": version}.
    `stage` "candidates": `sets` of kernels, each a module of its own: a list with {"cubin", "kernels",
    "usage"} or {"failed": why}, so that a tile that cannot be built costs itself only.
    `stage` "assemble" (from PTX texts): {"cubin": base64, "ptx": text, "usage": {entry: registers, spills},
    "ptxas"}.
    """
    folder = Path(tempfile.mkdtemp())
    if request["stage"] == "assemble":
        return _assemble(join(request["texts"]), request, folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    import triton

    if request["stage"] == "candidates":
        return {"sets": [_candidate(kernels, request, folder) for kernels in request["sets"]],
                "triton": triton.__version__}  # fmt: skip
    built = {k["entry"]: _compile(k, request, folder) for k in request["kernels"]}
    code = {
        entry: c if isinstance(c, str) else base64.b64encode(c).decode() for entry, (c, _) in built.items()
    }
    return {
        "code": code,
        "kernels": {e: facts for e, (_, facts) in built.items()},
        "triton": triton.__version__,
    }


def _candidate(kernels: list[dict[str, Any]], request: dict[str, Any], folder: Path) -> dict[str, Any]:
    try:
        built = {k["entry"]: _compile(k, request, folder) for k in kernels}
        made = _assemble(join([str(code) for code, _ in built.values()]), request, folder)
    except Exception as error:  # whatever the compiler raises, the next set is built
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    return {
        **{k: made[k] for k in ("cubin", "usage")},
        "kernels": {e: facts for e, (_, facts) in built.items()},
    }


def _compile(kernel: dict[str, Any], request: dict[str, Any], folder: Path) -> tuple[Any, dict[str, Any]]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = folder / f"{kernel['entry']}.py"
    source.write_text(kernel["text"])
    spec = importlib.util.spec_from_file_location(kernel["entry"], source)
    if spec is None or spec.loader is None:
        raise EsperError("E0540", "generated kernel text cannot be imported", node=kernel["entry"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    attrs = {(i,): [["tt.divisibility", 16]] for i in kernel["divisible"]}
    ast = ASTSource(getattr(module, kernel["entry"]), dict(kernel["signature"]), {}, attrs)
    target = GPUTarget(request["backend"], request["arch"], request["warp"])
    done = triton.compile(ast, target=target, options=dict(kernel["options"]))
    meta = done.metadata
    scratch = [int(getattr(meta, n, 0) or 0) for n in ("global_scratch_size", "profile_scratch_size")]
    if scratch != [kernel.get("scratch", 0), 0] or getattr(meta, "tensordesc_meta", None):
        raise EsperError("E0543", "the kernel needs scratch memory or host descriptors", node=kernel["entry"])
    facts = {"warps": int(meta.num_warps), "shared": int(meta.shared)}
    return done.asm["hsaco" if request["backend"] == "hip" else "ptx"], facts


def _assemble(ptx: str, request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The first named assembler whose output passes the look at its instructions."""
    faults: list[str] = []
    for name in request["assemblers"]:
        cubin, log, version = _run_ptxas(_tool(name), ptx, request, folder)
        faults = bad_carries(_disassemble(folder))
        if not faults:
            return {
                "cubin": base64.b64encode(cubin).decode(), "ptx": ptx, "usage": _usage(log), "ptxas": version,
                "elf_abi": cubin[8],
            }  # fmt: skip
    what = f"every assembler of this Triton miscompiles a product ({faults[0]})"
    raise EsperError(
        "E0547", what, node=request["proc"], hint="install a Triton that carries ptxas 12.9 or newer"
    )


def _run_ptxas(ptxas: Path, ptx: str, request: dict[str, Any], folder: Path) -> tuple[bytes, str, str]:
    # Relative names: what ptxas writes must not depend on where it ran.
    (folder / "module.ptx").write_text(ptx)
    flags = ["-v", f"--gpu-name={request['proc']}", *request["ptxas_flags"]]
    command = [str(ptxas), *flags, "module.ptx", "-o", "module.cubin"]
    done = _tool_run(command, folder)
    version = _tool_run([str(ptxas), "--version"], folder).stdout
    if not (folder / "module.cubin").is_file():
        raise EsperError("E0544", f"{ptxas.name} wrote no code", node=request["proc"], hint=TOOL_HINT)
    named = re.search(r"V(\d+\.\d+\.\d+)", version)
    return (folder / "module.cubin").read_bytes(), done.stderr, named.group(1) if named else "unknown"


def _tool_run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A tool of the wheel to its end; E0544 says how it failed."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise EsperError("E0544", f"{name} cannot be run: {error}", node=name, hint=TOOL_HINT) from error
    if done.returncode != 0:
        ended = f"ended by signal {-done.returncode}. " if done.returncode < 0 else ""
        text = f"{name} failed: {ended}{done.stderr.strip()[-400:]}"
        raise EsperError("E0544", text, node=name, hint=TOOL_HINT)
    return done


def _disassemble(folder: Path) -> str:
    return _tool_run([str(_tool("nvdisasm")), "-c", "module.cubin"], folder).stdout


def _tool(name: str) -> Path:
    """A tool that Triton's wheel carries, by name, never one found on PATH."""
    import triton.backends.nvidia as nvidia

    path = Path(nvidia.__path__[0]) / "bin" / name
    if not path.exists():
        raise EsperError("E0545", f"Triton's wheel carries no {name}", hint="install triton >= 3.6")
    return path


def _usage(log: str) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    entry = ""
    for line in log.splitlines():
        named = re.search(r"Compiling entry function '(\w+)'", line) or re.search(
            r"Function properties for (\w+)", line
        )
        entry = named.group(1) if named else entry
        spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if spill and entry:
            out.setdefault(entry, {})["spills"] = int(spill.group(1)) + int(spill.group(2))
        used = re.search(r"Used (\d+) registers", line)
        if used and entry:
            out.setdefault(entry, {})["registers"] = int(used.group(1))
    return out
