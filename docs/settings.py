"""The table of the controller's configuration, from its records: default as YAML, unit and meaning as the
comments of the fields have them (`# [unit] meaning`)."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import math
import re
import textwrap
from collections.abc import Iterator
from typing import Any

COMMENT = re.compile(r"  # (?:\[([^]]+)\] )?(.+)$")


def table() -> str:
    settings = importlib.import_module("runtime.strategy.settings")
    lines = ["| key | default | unit | meaning |", "|---|---|---|---|"]
    for key, default, unit, meaning in rows(settings.Settings, ""):
        allowed = settings.CHOICES.get(key)
        told = f"{meaning}: {', '.join(f'`{name}`' for name in allowed)}" if allowed else meaning
        lines.append(f"| `{key}` | {default} | {unit} | {told} |".replace("||", r"\|\|"))
    return "\n".join(lines) + "\n"


def rows(kind: Any, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """(key, default, unit, meaning) of every setting, those of the records in it by `record.key`. A field
    that has no meaning is refused."""
    told = comments(kind)
    for field in dataclasses.fields(kind):
        key = prefix + field.name
        inner = _record(kind, field.name)
        if inner is None or key == "schedule":
            if field.name not in told:
                raise SystemExit(f"{kind.__name__}.{field.name} has no comment that says what it means")
            yield (key, _shown(field.default), *told[field.name])
        if inner is not None:
            yield from rows(inner, f"{key}[]." if key == "schedule" else f"{key}.")


def comments(kind: Any) -> dict[str, tuple[str, str]]:
    """Unit ("" for a number without one) and meaning by field."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines, found = source.splitlines(), dict[str, tuple[str, str]]()
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said = COMMENT.search(lines[(node.end_lineno or node.lineno) - 1])
            if said:
                found[node.target.id] = said[1] or "", said[2]
    return found


def _record(kind: Any, name: str) -> Any:
    """The record that a field holds, alone, perhaps, or several; None for a plain value."""
    hint = inspect.get_annotations(kind, eval_str=True)[name]
    parts = [hint, *getattr(hint, "__args__", ())]
    return next((part for part in parts if dataclasses.is_dataclass(part)), None)


def _shown(value: Any) -> str:
    """A default as YAML has it."""
    if value is dataclasses.MISSING:
        return "needed"
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, float) and math.isinf(value):
        return "`.inf`"
    return f"`{value}`" if value != "" else '`""`'
