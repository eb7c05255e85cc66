"""Depthwise convolutions as sums over windows, so that they are a kernel of ours with the work around them.

Each channel has a filter of its own: nothing is contracted, tensor cores have nothing to do, and memory
bounds the work. A library writes the sum and another kernel reads it back; here what follows is in the same
kernel. The filters are laid out [kh, kw, channels] first, by a small kernel, so that threads read them along
the channels. The gradient of the filters is a sum down the columns for each of their elements, all in one
kernel with the work before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder, rewritten
from esper_ir.opdef import Val
from esper_ir.types import Dim

ONE = Dim.of(1)
OPS = ("convolution", "conv2d_input_grad", "conv2d_weight_grad")
TAPS = 9
"""Elements of a filter: beyond, the same positions are read too often from the cache."""
CHANNELS = 16
"""Fewer make too short runs of memory."""


def depthwise(graph: Graph) -> Graph:
    """The graph with depthwise convolutions, channels last, and their gradients by the operand as
    element-by-element work on windows; names of outputs stay."""
    found = {n.id for n in graph if _fits(graph, n)}
    if not found:
        return graph
    laid: dict[str, Val] = {}

    def change(builder: GraphBuilder, node: Node, values: dict[str, Val]) -> Sequence[Val] | None:
        if node.id not in found:
            return None
        builder.scope = node.id
        if node.op == "conv2d_weight_grad":
            joined = _filters(builder, node, values)
            builder.scope = ""
            return builder.emit_named(node.id, "reshape", [joined], {"shape": node.types[0].shape})
        total = _sum(builder, node, values, laid)
        builder.scope = ""
        return builder.emit_named(node.id, "cast", [total], {"dtype": node.types[0].dtype})

    return rewritten(graph, change)


def _fits(graph: Graph, node: Node) -> bool:
    if node.op not in OPS or len(node.inputs) != 2:
        return False
    attrs, made, given = dict(node.attrs), node.types[0], graph.types[node.tensors[0]]
    filters = graph.types[node.tensors[1]] if node.op != "conv2d_weight_grad" else made
    if node.op == "conv2d_weight_grad":
        made = graph.types[node.tensors[1]]  # both images, as in the other two
    out, kh, kw, part = filters.shape
    channels = given.shape[-1].static or 0
    own = attrs["data_format"] == "NHWC" and part == ONE and attrs["groups"] == channels == out.static
    taps = (kh * kw).static
    long = all(size.static is None or size.static > 1 for size in (*given.shape[1:3], *made.shape[1:3]))
    plain = node.op != "conv2d_input_grad" or attrs["stride"] == (1, 1)
    small = taps is not None and taps <= TAPS and channels >= CHANNELS and channels % 8 == 0
    return own and long and plain and small


def _sum(builder: GraphBuilder, node: Node, values: dict[str, Val], laid: dict[str, Val]) -> Val:
    """The products of all windows with their filters' elements, added in the type that sums are made in."""
    attrs = dict(node.attrs)
    image, weight = node.tensors
    filters = laid.get(weight)
    if filters is None:
        turned = builder("permute", values[weight], dims=(1, 2, 3, 0))
        filters = laid[weight] = builder("cast", turned, dtype=turned.type.dtype)
    kh, kw, _, channels = filters.type.shape
    wide, sizes = filters.type.dtype.compute, node.types[0].shape[1:3]
    total: Val | None = None
    for i in range(kh.static or 0):
        rows = _window(builder, values[image], 1, i, attrs, sizes[0], node.op)
        for j in range(kw.static or 0):
            moved = _window(builder, rows, 2, j, attrs, sizes[1], node.op)
            tap = builder("slice", filters, dim=0, start=i, end=i + 1)
            tap = builder("slice", tap, dim=1, start=j, end=j + 1)
            tap = builder("reshape", tap, shape=(channels,))
            both = [v if v.type.dtype is wide else builder("cast", v, dtype=wide) for v in (moved, tap)]
            product = builder("mul", *both)
            total = product if total is None else builder("add", total, product)
    assert total is not None
    return total


def _filters(builder: GraphBuilder, node: Node, values: dict[str, Val]) -> Val:
    """The gradient of the filters: for each of their elements the products of the cotangent with what it met,
    added over all positions.
    """
    attrs, kind = dict(node.attrs), node.types[0]
    grad, image = (values[v] for v in node.tensors)
    channels, kh, kw, _ = kind.shape
    wide, sizes = kind.dtype.compute, grad.type.shape
    given = grad if grad.type.dtype is wide else builder("cast", grad, dtype=wide)
    sums: list[Val] = []
    for i in range(kh.static or 0):
        rows = _window(builder, image, 1, i, attrs, sizes[1], "convolution")
        for j in range(kw.static or 0):
            met = _window(builder, rows, 2, j, attrs, sizes[2], "convolution")
            met = met if met.type.dtype is wide else builder("cast", met, dtype=wide)
            total = builder("sum", builder("mul", given, met), dims=(0, 1, 2))
            total = total if kind.dtype is wide else builder("cast", total, dtype=kind.dtype)
            sums.append(builder("reshape", total, shape=(channels, ONE)))
    return builder("cat", *sums, dim=1) if len(sums) > 1 else sums[0]


def _window(
    builder: GraphBuilder, x: Val, axis: int, tap: int, attrs: dict[str, Any], size: Dim, op: str
) -> Val:
    """What element `tap` of a filter meets along an axis; zero outside."""
    step = tap * attrs["dilation"][axis - 1] - attrs["padding"][axis - 1]
    mul = attrs["stride"][axis - 1]
    if op != "convolution":
        step, mul = -step, 1
    return builder("window", x, dim=axis, mul=mul, add=step, div=1, size=size)
