"""Where in the user's program a node of torch's graph comes from, and what is reported about it."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path
from typing import Any

import torch

from esper_ir.diagnostics import Diagnostic, EsperError

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_TORCH = str(Path(torch.__path__[0]))
_AT = re.compile(r"^at [^;]*(?:; )?")


def _inside_torch(file: str) -> bool:
    return file.startswith((_TORCH, "torch/", "<"))


def user_line(stack: str | None) -> tuple[str, int] | None:
    """File and line of the innermost frame outside torch."""
    found = [(f, int(n)) for f, n, _ in _FRAME.findall(stack or "") if not _inside_torch(f)]
    return found[-1] if found else None


def _shown(place: tuple[str, int] | None) -> str:
    if place is None:
        return ""
    file, line = place
    code = linecache.getline(file, line).strip()
    return f"{file}:{line}\n  {code}" if code else f"{file}:{line}"


def finding(node: Any, error: EsperError) -> Diagnostic:
    """The error with the node, its operator and the line in the user's module."""
    hint = _AT.sub("", error.hint or "") or None
    shown = _shown(user_line(node.meta.get("stack_trace")))
    what = f"{_target(node)}: {error.message}"
    return Diagnostic(error.code, what, node.name, "error", shown, hint)


def _target(node: Any) -> str:
    return str(node.target).removesuffix(".default") if node.op == "call_function" else node.op


def refused(name: str, findings: list[Diagnostic]) -> EsperError:
    """One error with everything that stands in the way of an import."""
    codes = {d.code for d in findings}
    code = codes.pop() if len(codes) == 1 else "E0406"
    first = findings[0]
    message = (
        first.message if len(findings) == 1 else f"{name} has {len(findings)} places that cannot be imported"
    )
    return EsperError(code, message, node=first.node, diagnostics=findings)


def failed(name: str, error: Exception) -> EsperError:
    """torch.export refused or the module itself raised: its message, and the line in the user's module."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not _inside_torch(f.filename) and "esper_ir" not in f.filename]
    place = (outside[-1].filename, outside[-1].lineno or 0) if outside else user_line(str(error))
    text = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    message = f"torch cannot export {name}: {type(error).__name__}: {' '.join(text[:4])[:400]}"
    found = Diagnostic("E0405", message, name, context=_shown(place))
    return EsperError("E0405", message, node=name, diagnostics=[found] if place else [])
