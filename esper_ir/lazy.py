"""Modules imported at first use, so that graphs can be read, checked and hashed without torch."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for a module; the first attribute asked for imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value


torch: Any = LazyModule("torch")
functional: Any = LazyModule("torch.nn.functional")


def fill() -> None:
    """Have all that these modules have at hand: a compiler of Python frames reads attributes and imports
    nothing.
    """
    for name, module in (("torch", torch), ("torch.nn.functional", functional)):
        found = vars(importlib.import_module(name))
        vars(module).update({k: v for k, v in found.items() if not k.startswith("__")})
