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

OTHERWISE: Mapping[str, str] = MappingProxyType({
    "conv": "conv2d", "dense": "linear", "divide": "div", "fc": "linear", "hard_sigmoid": "hardsigmoid",
    "hard_swish": "hardswish", "layernorm": "layer_norm", "multiply": "mul", "negative": "neg",
    "power": "pow", "rmsnorm": "rms_norm", "sdpa": "scaled_dot_product_attention", "subtract": "sub",
    "swish": "silu",
})  # fmt: skip
"""Names that others give to an operator, to be pointed to ours."""


def lookup(name: str) -> OpDef:
    """The record of an operator; E0301 with the nearest names when there is none."""
    op = OPS.get(name)
    if op is None:
        ours = OTHERWISE.get(name)
        near = f"did you mean {ours}?" if ours else did_you_mean(name, OPS)
        hint = near or "`esper-forge ops` lists the operators"
        raise EsperError("E0301", f"unknown operator {name[:64]!r}", hint=hint)
    return op
