"""A page per family of operators, from their records: docs/operators/<family>.md."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "operators"
HEAD = """# Operators: {title}

{about}

Made from the records in `esper_ir/ops/{name}.py` by `make docs`; [all operators](../blueprint.md#operators).
"""


def families() -> dict[str, Any]:
    """Every module of `esper_ir.ops` that has records, by its name."""
    package = importlib.import_module("esper_ir.ops")
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    modules = {name: importlib.import_module(f"esper_ir.ops.{name}") for name in names}
    return {name: module for name, module in modules.items() if getattr(module, "OPS", ())}


def family_of() -> dict[str, str]:
    """Operator -> the name of its family's page."""
    return {op.name: name for name, module in families().items() for op in module.OPS}


def pages() -> Iterator[tuple[Path, str]]:
    for name, module in families().items():
        about = " ".join((module.__doc__ or "").split())
        parts = [HEAD.format(title=name.replace("_", " "), about=about, name=name)]
        parts += [_entry(op) for op in sorted(module.OPS, key=lambda op: op.name)]
        yield FOLDER / f"{name}.md", "\n".join(parts)


def stale() -> list[Path]:
    """Pages of families that are gone."""
    known = {f"{name}.md" for name in families()}
    return [path for path in sorted(FOLDER.glob("*.md")) if path.name not in known]


def _entry(op: Any) -> str:
    lines = [f"## `{op.name}`\n", f"{op.doc}.\n" if op.doc and not op.doc.endswith(".") else f"{op.doc}\n"]
    lines += [f"- operands: {_arity(op)}", f"- lowering: {_lowering(op)}", f"- gradient: {_gradient(op)}"]
    if op.commutative:
        lines.append("- the order of its operands is no meaning")
    if op.tolerance.factor != 1.0:
        lines.append(f"- error bound: {op.tolerance.factor:g} times the usual one: {op.tolerance.reason}")
    if op.params:
        lines += ["", "| attribute | kind | default | meaning |", "|---|---|---|---|"]
        lines += [_attribute(param) for param in op.params]
    return "\n".join(lines) + "\n"


def _arity(op: Any) -> str:
    least, most = op.arity
    return str(least) if least == most else f"{least} to {most}"


def _lowering(op: Any) -> str:
    kind = type(op.lowering).__name__.lower()
    detail = getattr(op.lowering, "template", None) or getattr(op.lowering, "combine", None)
    return f"{kind} ({detail})" if detail else kind


def _gradient(op: Any) -> str:
    kind = type(op.vjp).__name__
    if kind == "NotDifferentiable":
        return f"{'zero' if op.vjp.constant else 'none'}: {op.vjp.reason}"
    return "that of its expansion" if kind == "ByExpansion" else "by a rule of its own"


def _attribute(param: Any) -> str:
    required = type(param.default) is object
    default = "required" if required else "null" if param.default is None else _shown(param.default)
    choices = ", ".join(f"`{c}`" for c in param.choices)
    about = "; ".join(part for part in (param.doc, choices) if part)
    return f"| `{param.name}` | {param.kind} | {default} | {about.replace('|', '/')} |"


def _shown(value: Any) -> str:
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"
