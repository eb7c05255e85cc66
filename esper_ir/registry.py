"""All operators by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

import esper_ir.ops
from esper_ir.diagnostics import EsperError
from esper_ir.discover import collect
from esper_ir.opdef import OpDef

OPS: Mapping[str, OpDef] = MappingProxyType(collect(esper_ir.ops, "OPS"))
"""Every operator of the language by its name."""


def nearest(name: str) -> list[str]:
    """Up to three operator names that look like `name`."""
    return difflib.get_close_matches(name[:64], list(OPS), n=3, cutoff=0.6)


def lookup(name: str) -> OpDef:
    """The record of an operator; E0301 with the nearest names when there is none."""
    op = OPS.get(name)
    if op is None:
        close = nearest(name)
        hint = f"did you mean {' or '.join(close)}?" if close else "`esper-forge ops` lists the operators"
        raise EsperError("E0301", f"unknown operator {name[:64]!r}", hint=hint)
    return op
