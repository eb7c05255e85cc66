"""Which writes into tensors can be read as new values: those of tensors that nothing sees any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node

# Operators without alias annotation that may give back (a view of) their operand.
MAYBE = frozenset({
    "reshape", "contiguous", "flatten", "to", "type_as", "dropout", "feature_dropout", "alpha_dropout",
    "unflatten", "broadcast_tensors", "broadcast_to", "narrow", "chunk", "tensor_split", "movedim",
    "expand_as",
    "view_as", "reshape_as", "positive", "swapaxes", "swapdims", "ravel", "moveaxis", "numpy_T", "matrix_H",
    "mT", "mH", "adjoint", "atleast_1d", "atleast_2d", "atleast_3d", "squeeze_", "_to_copy", "lift",
    "unsafe_chunk", "hsplit", "vsplit", "dsplit", "einsum", "rrelu", "conj", "real", "resolve_conj",
    "resolve_neg", "meshgrid", "cat", "split", "float", "double", "half",
})  # fmt: skip


def writes(node: Node) -> bool:
    """An operator that writes into its first operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def functional_name(node: Node) -> str:
    """aten.add_.Tensor -> aten.add.Tensor."""
    head, name, overload = str(node.target).split(".")
    return f"{head}.{name.removesuffix('_')}.{overload}"


def _may_alias(node: Node) -> bool:
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True  # getitem and the like
    if any(r.alias_info is not None for r in schema.returns):
        return True
    return schema.name.split("::")[-1] in MAYBE


def _sources(node: Node) -> list[Node]:
    return node.all_input_nodes if _may_alias(node) else []


def plain(node: Node, graph: Graph, place: Mapping[Node, int]) -> bool:
    """The tensor written into is seen afterwards through this node only, and is no input."""
    seen: set[Node] = set()
    stack: list[Any] = [node.args[0]]
    while stack:
        at = stack.pop()
        if at in seen or at is node or not isinstance(at, Node):
            continue
        seen.add(at)
        if at.op != "call_function":
            return False
        if any(place[u] > place[node] for u in at.users if u is not node):
            return False
        stack += _sources(at)
        stack += [u for u in at.users if u is not node and _may_alias(u)]
    return True
