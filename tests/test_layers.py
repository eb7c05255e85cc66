"""The packages' order, no cycles, imports inside functions only at named doors, what loads without what."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Any

import networkx as nx
import pytest

from tests.source import PACKAGES, ROOT, Import, imports, module_name, parse, python_files, relative

LAYERS: dict[str, Any] = tomllib.loads((ROOT / "tests" / "layers.toml").read_text(encoding="utf-8"))
DOORS: list[dict[str, Any]] = LAYERS.get("door", [])
WALLS: list[dict[str, Any]] = LAYERS.get("wall", [])
EXTERNAL: list[dict[str, Any]] = LAYERS.get("external", [])
OUTSIDE = ("bench", "tests", "docs", "examples")  # never imported by the product


def all_imports() -> list[Import]:
    return [found for path in python_files(*PACKAGES) for found in imports(path)]


def under(name: str, prefixes: list[str] | tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def top(name: str) -> str:
    return name.split(".")[0]


def test_packages_exist() -> None:
    missing = [name for name in PACKAGES if not (ROOT / name / "__init__.py").exists()]
    assert not missing, f"no package {missing}"


def test_package_order() -> None:
    allowed = {name: [name, *below] for name, below in LAYERS["packages"].items()}
    assert set(allowed) == set(PACKAGES)
    wrong = [
        str(found)
        for found in all_imports()
        if top(found.imported) in PACKAGES and not under(found.imported, allowed[top(found.importer)])
    ]
    assert not wrong, "against the import order of tests/layers.toml:\n" + "\n".join(wrong)


def test_product_imports_nothing_of_the_workshop() -> None:
    wrong = [str(found) for found in all_imports() if top(found.imported) in OUTSIDE]
    assert not wrong, "\n".join(wrong)


def test_walls_inside_packages() -> None:
    wrong = [
        f"{found} ({wall['reason']})"
        for wall in WALLS
        for found in all_imports()
        if under(found.importer, [wall["importer"]]) and under(found.imported, wall["imported"])
    ]
    assert not wrong, "\n".join(wrong)


def test_third_party_modules_stay_where_they_belong() -> None:
    wrong = [
        f"{found} ({rule['reason']})"
        for rule in EXTERNAL
        for found in all_imports()
        if under(found.imported, [rule["module"]]) and top(found.importer) not in rule["packages"]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    """Among modules, imports inside functions and for type checking included."""
    graph: Any = nx.DiGraph()
    names = {module_name(path) for path in python_files(*PACKAGES)}
    graph.add_edges_from((i.importer, i.imported) for i in all_imports() if i.imported in names)
    loops = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    loops += [[name] for name in nx.nodes_with_selfloops(graph)]
    assert not loops, f"import cycles: {loops}"


def _is_door(found: Import) -> bool:
    return any(row["file"] == found.file and under(found.imported, row["imports"]) for row in DOORS)


def test_imports_inside_functions() -> None:
    local = [found for found in all_imports() if found.local and not found.file.endswith("/cli.py")]
    wrong = [str(found) for found in local if not _is_door(found)]
    assert not wrong, (
        "imports inside functions (allowed in cli.py and at the doors of layers.toml):\n" + "\n".join(wrong)
    )


def test_doors_are_reasoned_and_used() -> None:
    local = [found for found in all_imports() if found.local]
    for row in DOORS:
        assert len(row.get("reason", "")) > 20, f"{row['file']}: give the reason"
        unused = [
            name
            for name in row["imports"]
            if not any(i.file == row["file"] and under(i.imported, [name]) for i in local)
        ]
        assert not unused, f"{row['file']}: no import of {unused} inside a function any more, remove the door"


def test_every_package_folder_is_listed_for_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "packages"
    ]
    found = {module_name(path / "__init__.py") for path in {file.parent for file in python_files(*PACKAGES)}}
    assert set(listed) == found, "pyproject.toml [tool.setuptools] packages"
    bare = [name for name in sorted(found) if not ROOT.joinpath(*name.split("."), "__init__.py").exists()]
    assert not bare, f"folders without __init__.py: {bare}"


def test_the_reader_sees_what_it_should() -> None:
    """The checks above stand on `imports`: it must see relative, local and from-package forms."""
    here = {(i.imported, i.local) for i in imports(ROOT / "tests" / "conftest.py")}
    assert ("torch", True) in here and ("pytest", False) in here
    assert parse(ROOT / "tests" / "source.py").body
    assert relative(ROOT / "tests" / "source.py") == "tests/source.py"


# A finder that refuses a module and all below it, as on a machine where it is not installed.
BLOCK = """
import importlib, importlib.abc, pkgutil, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is refused by the test", name=name)
sys.meta_path.insert(0, Refuse())
{body}
loaded = {{name.split(".")[0] for name in sys.modules}}
assert not loaded & {absent!r}, sorted(loaded & {absent!r})
print("imported")
"""
EVERY_MODULE = """
import {package}
for info in pkgutil.walk_packages({package}.__path__, "{package}."):
    if not info.name.endswith("__main__"):
        importlib.import_module(info.name)
"""


def fresh(body: str, blocked: set[str], absent: set[str]) -> str:
    """What a process says at its end that imported this, and none of those."""
    script = BLOCK.format(blocked=blocked, body=body, absent=absent | blocked)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("package", ["esper_ir", "library"])
def test_imports_without_torch(package: str) -> None:
    assert fresh(f"import {package}", {"torch", "triton"}, {"networkx", "pydantic"}) == "imported"


def test_every_library_module_imports_without_torch() -> None:
    assert fresh(EVERY_MODULE.format(package="library"), {"torch", "triton"}, set()) == "imported"


def test_runtime_imports_without_triton() -> None:
    """Every module of the runtime, and `import runtime` alone leaves networkx and pydantic out."""
    assert fresh("import runtime", {"triton"}, {"pydantic"}) == "imported"
    assert fresh(EVERY_MODULE.format(package="runtime"), {"triton"}, set()) == "imported"


def test_runtime_adds_no_networkx_to_torch() -> None:
    body = (
        "import torch\nbefore = 'networkx' in sys.modules\nimport runtime\n"
        "assert before or 'networkx' not in sys.modules"
    )
    assert fresh(body, {"triton"}, set()) == "imported"
