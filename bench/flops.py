"""Floating-point operations of the steps of a plan: what bounds a product, where bytes do not.

Only matrix products, convolutions and attention count; work on single elements is bounded by bytes. A library
call's shapes say its operations. A kernel's launch does not say what it multiplies: that is asked of the
forge when the block is compiled (`bench.prepare.kernel_flops`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from library.launch import ExternStep


def of_call(step: ExternStep, inputs: Sequence[Sequence[int]], outs: Sequence[Sequence[int]]) -> int:
    """Operations of a library call from the shapes of its operands, as they are given to it."""
    op = step.op
    if op in ("mm", "addmm", "bmm", "baddbmm"):
        left = inputs[-2]
        return 2 * math.prod(outs[0]) * left[-1]
    if op.startswith("conv"):
        return _convolution(op, inputs, outs)
    if op in ("attention", "attention_grad"):
        query, key = inputs[:2] if op == "attention" else inputs[1:3]  # the gradient's first is the cotangent
        seen = 0.5 if step.attrs["is_causal"] else 1.0
        forward = 4 * seen * math.prod(query) * key[1 if step.attrs.get("layout") == "BSHD" else 2]
        return int(forward if op == "attention" else 2.5 * forward)
    return 0


def _convolution(op: str, inputs: Sequence[Sequence[int]], outs: Sequence[Sequence[int]]) -> int:
    """Each element of the result (of the cotangent, for a gradient) by as many products as a filter has
    elements; filters are [out, ..., in of one group]."""
    if op.endswith("_weight_grad"):
        return 2 * math.prod(inputs[0]) * math.prod(outs[0][1:])
    at = inputs[0] if op.endswith("_input_grad") else outs[0]
    return 2 * math.prod(at) * math.prod(inputs[1][1:])
