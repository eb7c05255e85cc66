"""Own kernel or library call for a contraction, before anything is timed: a rule that orders candidates.

Fusing one bf16 write and read into a product pays while K < about 433/d, d being how much slower the fused
kernel is than the library's (spec: 5,400 at 8 %, 1,700 at 25 %); small products are launch bound and always
gain.
"""

from __future__ import annotations

from collections.abc import Mapping

from esper_ir.diagnostics import Accepted, Rejected
from esper_ir.graph import Graph, Node
from forge.target import Target
from forge.views import ONE, View

# Measured on an H200 without tuning: 1.4 to 2 times the library's time at K = 256 and K = 1024.
FUSED_SLOWDOWN = 2.0
SMALL_FLOPS = 2e9
NARROW = 32
"""Rows or columns of a product that memory bounds: the library reads its long operand at 55 % of copy."""
# Many instructions each; on a processor they cost more time than the bytes that computing them again spares.
SLOW = frozenset(
    "exp exp2 expm1 log log2 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc "
    "sigmoid pow fmod atan2".split()
)


def tuned_sizes(graph: Graph, largest: bool = True) -> dict[str, int]:
    """Bindings at the largest (or smallest) size each dim is tuned for."""
    pick = max if largest else min
    return {
        name: pick(spec.tune or (max(spec.min, min(spec.max, 4096)),)) for name, spec in graph.dims.items()
    }


def own_lookup(node: Node, views: Mapping[str, View], target: Target) -> Accepted[str] | Rejected:
    """Accepted when rows by number are loads of a kernel on this target."""
    if target.kind == "cpu":
        return Rejected("positions", "on a processor the library call says which position is out of range")
    if views[node.tensors[1]].windows:
        return Rejected("window", f"{node.tensors[1]} is no table in memory")
    return Accepted("lookup")


def own_lookup_gradient(node: Node, target: Target) -> Accepted[str] | Rejected:
    """Accepted when the template of templates/table.py should add up the rows of a table."""
    if target.kind == "cpu":
        return Rejected("order", "on a processor the library adds the rows one after the other")
    return Accepted("table")


def own_matmul(
    node: Node, graph: Graph, views: Mapping[str, View], target: Target
) -> Accepted[str] | Rejected:
    """Accepted when the matmul template should take the node on this target."""
    a, b = (graph.types[v] for v in node.tensors[:2])
    if target.contractions != "template":
        return Rejected("extern", f"contractions on {target.name} are library calls")
    if a.dtype is not b.dtype or a.dtype not in target.dot_dtypes:
        return Rejected(
            "dtype", f"{a.dtype.value} x {b.dtype.value} has no tensor-core form on {target.name}"
        )
    if b.rank != 2 or not rows_as_one(views[node.tensors[0]]):
        return Rejected("rank", "batched products are library calls")
    sizes = tuned_sizes(graph)
    depth = a.shape[-1]
    flops = 2 * (node.types[0].numel * depth).value(sizes)
    limit = 433 / FUSED_SLOWDOWN
    if min(d.static or NARROW + 1 for d in node.types[0].shape[-2:]) <= NARROW:
        return Accepted("matmul")
    if flops > SMALL_FLOPS and depth.value(sizes) > limit:
        return Rejected(
            "rule", f"K={depth.value(sizes)} is past {limit:.0f}: the library call is expected to win"
        )
    return Accepted("matmul")


def rows_as_one(view: View) -> bool:
    """Leading axes of the left operand walk memory as one axis; those of one do not count."""
    axes = [a for a in zip(view.shape[:-1], view.strides[:-1], strict=True) if a[0] != ONE]
    return all(outer == inner * size for (_, outer), (size, inner) in zip(axes, axes[1:], strict=False))
