"""Library calls: products as `mm` on two matrices or `bmm` on two stacks of them, and operators without a
template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from esper_ir.graph import Graph, Node
from esper_ir.opdef import Opaque
from esper_ir.registry import OPS
from esper_ir.types import Dim, DType
from forge.lowered import Call, Operand
from forge.views import ONE, View, dense_strides, is_dense

ZERO = Dim()


class NotDense(Exception):
    """The operand of a library call is not a permutation of dense memory; it is copied first."""


def template(node: Node) -> str:
    """Name of the call of an operator that has no template, else empty."""
    low = OPS[node.op].lowering
    return low.template if isinstance(low, Opaque) else ""


def sides(node: Node, graph: Graph, views: Mapping[str, View]) -> tuple[View, ...]:
    """The operands as the library will read them; of a product both of rank 2, or both with the batch axes of
    the result.
    """
    if template(node):
        return tuple(views[v] for v in node.tensors)
    a, b = (views[v] for v in node.tensors[:2])
    if len(b.shape) == 2 and is_dense(a):
        rows = ONE
        for size in a.shape[:-1]:
            rows = rows * size
        return View(a.base, (rows, a.shape[-1]), (a.shape[-1], ONE)), b
    if len(a.shape) == len(b.shape) == 2:
        return a, b
    batch = graph.types[node.id].shape[:-2]
    return _batched(a, batch), _batched(b, batch)


def _batched(view: View, batch: tuple[Dim, ...]) -> View:
    """Axes of size 1, and missing ones, repeated."""
    lead = len(batch) + 2 - len(view.shape)
    own = zip(view.shape[:-2], view.strides[:-2], batch[lead:], strict=True)
    strides = (*(ZERO for _ in range(lead)), *(ZERO if size == ONE else step for size, step, _ in own))
    return View(view.base, (*batch, *view.shape[-2:]), (*strides, *view.strides[-2:]), view.offset)


def operand(view: View, node: Node, whole: Dim) -> Operand:
    """A view as reshape-then-permute of dense memory of `whole` elements, of a product with one batch axis at
    most. NotDense when it is none, or only a part of that memory.
    """
    count = ONE
    for size in view.shape:
        count = count * size
    if count != whole or view.windows:
        raise NotDense(view.base)
    flat = view if template(node) or count == ZERO else _one_batch(view)
    if count == ZERO:
        return Operand(flat.base, _merged(flat.shape, node))
    order = sorted(range(len(flat.shape)), key=lambda axis: _rank(flat, axis))
    shape = tuple(flat.shape[axis] for axis in order)
    steps = zip((flat.strides[axis] for axis in order), dense_strides(shape), shape, strict=True)
    if view.offset != ZERO or any(step != wanted and size != ONE for step, wanted, size in steps):
        raise NotDense(view.base)
    permute = tuple(order.index(axis) for axis in range(len(order)))
    return Operand(view.base, shape, () if permute == tuple(range(len(permute))) else permute)


def _merged(shape: tuple[Dim, ...], node: Node) -> tuple[Dim, ...]:
    """Shape of an operand without elements: of a product with one batch axis at most."""
    if template(node) or len(shape) < 4:
        return shape
    batch = ONE
    for size in shape[:-2]:
        batch = batch * size
    return (batch, *shape[-2:])


def _one_batch(view: View) -> View:
    size, step = ONE, ZERO
    for count, stride in zip(view.shape[:-2], view.strides[:-2], strict=True):
        if count != ONE and size != ONE and step != stride * count:
            raise NotDense(view.base)
        size, step = size * count, step if count == ONE else stride
    batch = ((size,), (step,)) if len(view.shape) > 2 else ((), ())
    return View(view.base, (*batch[0], *view.shape[-2:]), (*batch[1], *view.strides[-2:]))


def _rank(view: View, axis: int) -> tuple[int, int]:
    """Sort key: axes whose stride is a multiple of more sizes come first; the position breaks ties."""
    stride = view.strides[axis]
    return (-sum(len(m) * 64 + abs(c).bit_length() for m, c in stride.terms), axis)


def call(node: Node, operands: Sequence[Operand], read: frozenset[str]) -> Call:
    """The results into the node's own memory; the last ones are left out where nobody reads them."""
    if template(node):
        count = max(i + 1 for i, name in enumerate(node.outputs) if name in read or not i)
        pairs = list(zip(node.outputs, node.types, strict=True))[:count]
        outs = tuple(Operand(n, t.shape) for n, t in pairs)
        return Call(template(node), tuple(operands), outs, _scalars(node))
    a, b = operands
    batch = (a.shape[_at(a, 0)],) if len(a.shape) == 3 else ()
    shape = (*batch, a.shape[_at(a, -2)], b.shape[_at(b, -1)])
    declared = dict(node.attrs).get("precision") or "ieee"
    attrs = {} if declared == "ieee" else {"precision": declared}
    return Call("bmm" if batch else "mm", (a, b), (Operand(node.id, shape),), attrs)


def with_bias(call: Call, total: Node, bias: str | None) -> Call:
    """A product with a vector added to each of its rows, as the result of `total`."""
    assert bias is not None and call.op == "mm"
    (out,) = call.outs
    inputs = (Operand(bias, out.shape[-1:]), *call.inputs)
    return Call("addmm", inputs, (Operand(total.id, out.shape),), call.attrs)


def _scalars(node: Node) -> dict[str, Any]:
    """Attributes as JSON scalars: numbers of a tuple joined by commas. Shapes are left out, the results have
    them.
    """
    out: dict[str, Any] = {}
    for name, value in node.attrs:
        attr = OPS[node.op].attr(name)
        if value is None or attr is None or attr.kind == "shape":
            continue
        if isinstance(value, tuple):
            value = ",".join(str(v) for v in value)
        out[name] = value.value if isinstance(value, DType) else value
    return out


def _at(operand: Operand, axis: int) -> int:
    """Where an axis of the permuted operand stands in its shape in memory."""
    return operand.permute[axis] if operand.permute else axis
