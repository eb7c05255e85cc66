"""Bodies of pointwise operators, computed with torch in float64: another form of the same meaning.

torch's own function may lose in float64 what a body keeps: (1 + tanh u) / 2 is nothing for u = -20, where the
logistic function of 2u is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from esper_ir.graph import Node
from esper_ir.opdef import Pointwise
from esper_ir.registry import lookup
from esper_ir.scalar import INTEGRAL, PRIMITIVES, Arg, Cast, Const, Expr, Prim, walk

SPELLED = {"and": "logical_and", "or": "logical_or", "xor": "logical_xor", "not": "logical_not"}
TORCH: Mapping[str, Callable[..., Tensor]] = {
    name: getattr(torch, SPELLED.get(name, name)) for name in PRIMITIVES if name not in INTEGRAL
}


FLUSHED = frozenset({"exp", "exp2", "sigmoid"})
"""Functions whose results below the smallest normal number a card's own instructions make zero (PTX ISA:
ex2.approx.ftz and rcp.approx.ftz; div.full does not)."""


FUNCTIONS = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1",
    "log", "log1p", "log2", "pow", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
))  # fmt: skip
"""Whose results have errors of their own, the same for equal arguments."""


def asks(node: Node) -> bool:
    """Whether the body of the node has one of `FUNCTIONS`."""
    lowering = lookup(node.op).lowering
    if not isinstance(lowering, Pointwise):
        return False
    parts = walk(lowering.body(dict(node.attrs)))
    return any(isinstance(p, Prim) and p.name in FUNCTIONS for p in parts)


def value(expr: Expr, operands: Sequence[Any], least: float = 0.0) -> Any:
    """Of an expression over tensors and numbers; casts to short types are left out. Results of `FLUSHED`
    under `least` are zero."""
    if isinstance(expr, Arg):
        return operands[expr.index]
    if isinstance(expr, Cast):
        return value(expr.arg, operands, least)
    if isinstance(expr, Const):
        return expr.value
    found = TORCH[expr.name](*(_wide(value(a, operands, least)) for a in expr.args))
    return torch.where(found.abs() < least, 0.0, found) if least and expr.name in FLUSHED else found


def _wide(found: Any) -> Tensor:
    """As a tensor; a number of Python's keeps its digits."""
    return torch.as_tensor(found, dtype=torch.float64 if isinstance(found, float) else None)


def result(node: Node, operands: Sequence[Any], plain: Tensor, least: float = 0.0) -> Tensor:
    """What the body of the node gives, as `plain` lies; `plain` itself where there is none, or one of whole
    numbers. `least`: as for `value`."""
    lowering = lookup(node.op).lowering
    if not isinstance(lowering, Pointwise) or not plain.is_floating_point():
        return plain
    expr = lowering.body(dict(node.attrs))
    parts = [p for p in walk(expr) if isinstance(p, Prim)]
    whole = any(isinstance(o, Tensor) and o.dtype in WHOLE for o in operands)
    if whole or any(p.name not in TORCH for p in parts):
        return plain
    return _wide(value(expr, operands, least)).to(plain).broadcast_to(plain.shape)


WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
