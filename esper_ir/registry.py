"""All operators by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import esper_ir.ops
from esper_ir.diagnostics import EsperError, did_you_mean
from esper_ir.discover import collect
from esper_ir.opdef import OpDef

OPS: Mapping[str, OpDef] = MappingProxyType(collect(esper_ir.ops, "OPS"))
"""Every operator of the language by its name."""


def lookup(name: str) -> OpDef:
    """The record of an operator; E0301 with the nearest names when there is none."""
    op = OPS.get(name)
    if op is None:
        hint = did_you_mean(name, OPS) or "`esper-forge ops` lists the operators"
        raise EsperError("E0301", f"unknown operator {name[:64]!r}", hint=hint)
    return op
