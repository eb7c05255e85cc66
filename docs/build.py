"""Rebuilds what is generated in the documentation; `--check` only says what is stale.

    python -m docs.build [--check]

docs/errors.md comes from docs/errors.d/*.md (one `## E0123 Title` entry per code), the command references
from the click tools themselves, docs/torch.md's table from what tests/runtime/matrix/ declares and the tests
run, docs/controller.md's from the records of the configuration, the README's blueprint from examples/, its
table and docs/measurements.md from bench/results/.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from docs import families, measured, samples, settings

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ENTRY = re.compile(r"^#{1,4} +`?(E\d{4})`?.*$", re.MULTILINE)
RANGES = (
    ("E01-E04", "The graph language"),
    ("E05-E06", "The forge"),
    ("E07", "The library"),
    ("E08", "The runtime"),
    ("E09", "The gauntlet"),
    ("E10", "Growth"),
)
TOOLS = {"forge": "esper-forge", "gauntlet": "esper-gauntlet", "library": "esper-library"}
WIDTH = 100
ERRORS_HEAD = """# Errors

Every refusal carries a code, the node, file or artifact it concerns and what to do about it. A command line
tool prints it to standard error and exits with the number given in the entry; the exit codes of all tools are
listed in [index.md](index.md#exit-codes). In Python it is `esper_ir.diagnostics.EsperError` with `.code`,
`.node`, `.hint` and `.exit_code`.

This page is generated from `docs/errors.d/` by `make docs`.
"""


def entries() -> dict[str, str]:
    """Code -> its entry (heading and text), from every fragment; a code told twice is refused."""
    found: dict[str, str] = {}
    for path in sorted((DOCS / "errors.d").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        heads = list(ENTRY.finditer(text))
        for head, following in zip(heads, [*heads[1:], None], strict=True):
            code = head.group(1)
            if code in found:
                raise SystemExit(f"{path.name}: {code} has an entry already")
            body = text[head.end() : following.start() if following else len(text)].strip()
            title = head.group(0).lstrip("#").replace("`", "").strip()
            found[code] = f"### {title}\n\n{body}\n"
    return found


def _in_range(code: str, span: str) -> bool:
    first, _, last = span.partition("-")
    return first <= code[:3] <= (last or first)


def errors_page() -> str:
    parts, known = [ERRORS_HEAD], entries()
    for span, title in RANGES:
        codes = sorted(code for code in known if _in_range(code, span))
        if codes:
            parts += [f"## {title}\n", *(known[code] for code in codes)]
    return "\n".join(parts)


def commands(tool: click.Command, name: str) -> Iterator[tuple[str, click.Context]]:
    """Every command of a click tool with its full name, groups included."""
    settings = {**tool.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    yield from _commands(click.Context(tool, info_name=name, **settings))


def _commands(context: click.Context) -> Iterator[tuple[str, click.Context]]:
    yield context.command_path, context
    if not isinstance(context.command, click.Group):
        return
    for name in context.command.list_commands(context):
        child = context.command.get_command(context, name)
        if child is not None and not child.hidden:
            yield from _commands(
                click.Context(
                    child, info_name=name, parent=context, terminal_width=WIDTH, max_content_width=WIDTH
                )
            )


def load_tool(package: str) -> click.Command:
    return importlib.import_module(f"{package}.cli").main


def reference(package: str) -> str:
    """The help of every command, as a manual section."""
    parts = []
    for path, context in commands(load_tool(package), TOOLS[package]):
        help_text = "\n".join(line.rstrip() for line in context.get_help().splitlines())
        parts.append(f"### `{path}`\n\n```text\n{help_text}\n```\n")
    return "\n".join(parts)


def operators() -> str:
    """One line per operator of the graph language."""
    ops: dict[str, Any] = dict(importlib.import_module("esper_ir.registry").OPS)
    page = families.family_of()
    rows = [
        f"| [`{name}`](operators/{page[name]}.md#{name}) | {_attributes(op)} | {_kind(op)} | {op.doc} |"
        for name, op in sorted(ops.items())
    ]
    return "\n".join(["| operator | attributes | lowering | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _attributes(op: Any) -> str:
    return ", ".join(f"`{param.name}`" for param in op.params) or "-"


def _kind(op: Any) -> str:
    return type(op.lowering).__name__.lower()


def example() -> str:
    text = (ROOT / "examples" / "rmsnorm_residual.json").read_text(encoding="utf-8").rstrip()
    return f"```json\n{text}\n```\n"


def torch_table() -> str:
    """What a block does with every feature of torch, from the table that the tests run."""
    matrix = "tests.runtime.matrix"
    parts = {
        "On a processor and on a card": [
            row for part in ("steps", "combined", "modules") for row in _rows(f"{matrix}.{part}")
        ],
        "Two processes": _rows(f"{matrix}.ranks"),
        "On a card": [r for r in _rows(f"{matrix}.cards") if r.place == "card"],
        "On two cards": [r for r in _rows(f"{matrix}.cards") if r.place == "cards"],
    }
    lines: list[str] = []
    for title, rows in parts.items():
        lines += [f"### {title}\n", "| | eager | compile | dynamic | |", "|---|---|---|---|---|"]
        for row in rows:
            said = [_said(row.says.get(mode)) for mode in ("eager", "compile", "dynamic")]
            lines.append(f"| {row.feature} | {' | '.join(said)} | {row.note} |")
        lines.append("")
    return "\n".join(lines)


def risk_features() -> str:
    """What a risk model may know, with the direction that it is held to."""
    ways = {1: "up", -1: "down", 0: "-"}
    found = importlib.import_module("gauntlet.risk.features").FEATURES
    rows = [f"| `{f.name}` | {f.text} | {ways[f.more]} |" for f in found]
    return "\n".join(["| feature | meaning | more makes the risk go |", "|---|---|---|", *rows]) + "\n"


def _rows(module: str) -> Any:
    return importlib.import_module(module).ROWS


def _said(outcome: str | None) -> str:
    if outcome is None:
        return "-"
    if re.fullmatch(r"E\d{4}", outcome):
        return f"refused: [{outcome}](errors.md)"
    return {"works": "yes", "torch": "refused by torch"}[outcome]


def between(text: str, mark: str, body: str) -> str:
    """`text` with what stands between the marks `<!-- mark:begin -->` and `<!-- mark:end -->` replaced."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    if begin not in text:
        return text
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n{body}{end}{rest.split(end, 1)[1]}"


def pages() -> Iterator[tuple[Path, str]]:
    """Every page that has generated parts, with the text it should have."""
    yield DOCS / "errors.md", errors_page()
    for package in TOOLS:
        path = DOCS / f"{package}.md"
        yield path, between(path.read_text(encoding="utf-8"), "commands", reference(package))
    path = DOCS / "risk.md"
    text = between(path.read_text(encoding="utf-8"), "features", risk_features())
    yield path, between(text, "bench", measured.risk_tables())
    path = DOCS / "controller.md"
    yield path, between(path.read_text(encoding="utf-8"), "settings", settings.table())
    path = DOCS / "torch.md"
    yield path, between(path.read_text(encoding="utf-8"), "torch", torch_table())
    yield DOCS / "samples.md", samples.page()
    path = DOCS / "blueprint.md"
    yield path, between(path.read_text(encoding="utf-8"), "operators", operators())
    yield from families.pages()
    path = ROOT / "README.md"
    text = between(path.read_text(encoding="utf-8"), "example", example())
    yield path, between(text, "bench", measured.summary())
    path = DOCS / "measurements.md"
    yield path, between(path.read_text(encoding="utf-8"), "bench", measured.tables())


def main() -> int:
    stale = [path.relative_to(ROOT).as_posix() for path in families.stale()]
    if "--check" not in sys.argv:
        for path in families.stale():
            path.unlink()
    for path, text in pages():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(ROOT).as_posix())
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        print(("stale: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
