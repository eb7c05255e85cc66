"""The closed table of library calls that a plan may contain; each gives its results and changes nothing else.

They are called with dense or transposed views of buffers, below autograd and with no autocast.
float32 is multiplied as the step declares (runtime/precision.py), whatever torch's process-wide flags say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper_ir.diagnostics import EsperError
from library.launch import View, evaluate
from runtime.calls import CALLS, Extern, Run
from runtime.errors import fail
from runtime.precision import declared
from runtime.widening import lacking, widened

_mm_typed = getattr(getattr(torch.ops.aten, "mm", None), "dtype_out", None)


@dataclass(frozen=True)
class Strided:
    """A buffer as a step sees it: `shape` and `stride` in elements from the buffer's first one; `whole`
    when that is how the buffer lies anyway."""

    buffer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    whole: bool

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.whole else tensor.as_strided(self.shape, self.stride)


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def strided(view: View, buffer_shape: tuple[int, ...], dims: Mapping[str, int]) -> Strided:
    """The first elements in another shape, then permuted; E0809 when there are too few, or the permutation is
    none."""
    shape = tuple(evaluate(s, dims) for s in view.shape) if view.shape else buffer_shape
    stride = dense(shape)
    order = view.permute or tuple(range(len(shape)))
    if sorted(order) != list(range(len(shape))) or _numel(shape) > _numel(buffer_shape):
        raise fail("E0809", f"a view {shape} permuted {view.permute} of a buffer {buffer_shape}")
    moved = tuple(shape[i] for i in order)
    return Strided(
        view.buffer,
        moved,
        tuple(stride[i] for i in order),
        moved == buffer_shape and order == tuple(sorted(order)),
    )


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _mm(attrs: Mapping[str, Any]) -> Run:
    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        (out,) = outs
        a, b = inputs
        if out.dtype is a.dtype:
            torch.mm(a, b, out=out)
        elif _mm_typed is not None and a.is_cuda:
            _mm_typed(a, b, out.dtype, out=out)
        else:
            torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)

    return run


def _addmm(attrs: Mapping[str, Any]) -> Run:
    beta, alpha = attrs.get("beta", 1), attrs.get("alpha", 1)

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        (out,) = outs
        bias, a, b = inputs
        torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=out)

    return run


def _bmm(attrs: Mapping[str, Any]) -> Run:
    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        torch.bmm(inputs[0], inputs[1], out=outs[0])

    return run


def _baddbmm(attrs: Mapping[str, Any]) -> Run:
    beta, alpha = attrs.get("beta", 1), attrs.get("alpha", 1)

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        (out,) = outs
        bias, a, b = inputs
        torch.baddbmm(bias, a, b, beta=beta, alpha=alpha, out=out)

    return run


TABLE: Mapping[str, Extern] = {
    "mm": Extern(2, frozenset({"precision"}), _mm, "matmul", wide=_mm),
    "addmm": Extern(3, frozenset({"precision", "alpha", "beta"}), _addmm, "matmul", wide=_addmm),
    "bmm": Extern(2, frozenset({"precision"}), _bmm, "matmul", wide=_bmm),
    "baddbmm": Extern(3, frozenset({"precision", "alpha", "beta"}), _baddbmm, "matmul", wide=_baddbmm),
    **CALLS,
}


def prepare(op: str, attrs: Mapping[str, Any], inputs: int) -> Run:
    """The call for one step. E0809 for an operator, attribute or arity outside the table."""
    record = TABLE.get(op)
    if record is None:
        raise _bad(op, f"unknown extern {op!r}; this version knows {', '.join(TABLE)}")
    unknown = sorted(set(attrs) - record.attrs)
    if unknown or not record.arity <= inputs <= max(record.arity, record.most):
        raise _bad(
            op,
            f"extern {op} takes {record.arity} inputs, not {inputs}; unknown attributes: {unknown}",
        )
    run = record.prepare(attrs)
    if record.wide and lacking():  # elsewhere, as beside most cards, nothing stands before the call
        run = widened(run, record.wide(attrs), product=record.flag == "matmul")
    return declared(run, record.flag, attrs.get("precision", "ieee") == "tf32") if record.flag else run


def _bad(op: str, what: str) -> EsperError:
    return fail("E0809", what, node=op, hint="this artifact needs another version of the runtime")
