"""Discovery of records: one typed scan of a package, no registries filled by import side effects."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any


def collect(package: ModuleType, constant: str) -> dict[str, Any]:
    """Records named by `constant` in every module of `package`, by their `name`.

    A name with two owners is refused. `constant` is either one record or a tuple of records; modules without
    it contribute nothing.
    """
    found: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        records = getattr(module, constant, ())
        for record in records if isinstance(records, tuple) else (records,):
            if record.name in found:
                first, second = owner[record.name], module.__name__
                raise RuntimeError(f"{constant} {record.name!r} is defined in {first} and {second}")
            found[record.name] = record
            owner[record.name] = module.__name__
    return found
