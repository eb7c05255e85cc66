"""The project's own source, read as text and syntax trees: what the frame's tests look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("esper_ir", "library", "runtime", "forge", "gauntlet")
FOLDERS = (*PACKAGES, "bench", "docs", "tests")


def python_files(*folders: str) -> list[Path]:
    """Every Python file under the given top-level folders, in a fixed order."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@dataclass(frozen=True)
class Import:
    """One imported module as seen in one file. `local` is true inside a function."""

    file: str
    importer: str
    imported: str
    line: int
    local: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.imported}"


def _resolve(node: ast.ImportFrom, path: Path) -> str:
    if node.level == 0:
        return node.module or ""
    parts = path.relative_to(ROOT).parent.parts
    base = parts[: len(parts) - (node.level - 1)]
    return ".".join((*base, node.module)) if node.module else ".".join(base)


def _is_module(name: str) -> bool:
    where = ROOT.joinpath(*name.split("."))
    if where.is_dir():
        return any(where.glob("*.py"))
    return any(where.parent.glob(f"{where.name}.*"))  # .py, or the source or binary of an extension


def _targets(node: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = _resolve(node, path)
    if base.split(".")[0] not in PACKAGES:
        return [base]
    # `from library import store` means the module library.store, `from library import Store` the package.
    full = [f"{base}.{alias.name}" for alias in node.names]
    return [name if _is_module(name) else base for name in full]


def _walk(node: ast.AST, local: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, local
        inside = local or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk(child, inside)


@cache
def imports(path: Path) -> list[Import]:
    """Every import of a file, those inside functions and under TYPE_CHECKING included."""
    file, importer = relative(path), module_name(path)
    found: list[Import] = []
    for node, local in _walk(parse(path), False):
        names = dict.fromkeys(_targets(node, path))
        found += [Import(file, importer, name, node.lineno, local) for name in names]
    return found
