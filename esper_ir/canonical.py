"""Identity of a blueprint: its canonical form and the hash of it.

The canonical form is the typed graph without names: leaves by position, nodes in a structural order,
commutative operands ordered by what they compute, equal nodes once, dead nodes gone, defaults filled in, dims
numbered. The hash of every value covers its operator, attributes, types and the hashes of its operands (a
Merkle tree with shared parts computed once, built along the topological order, so without recursion).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from esper_ir.graph import Blueprint, Graph, Leaf, Node, Ref
from esper_ir.registry import lookup
from esper_ir.text import FORMAT
from esper_ir.types import Dim, DType, TensorType
from esper_ir.verify import typed

Names = Mapping[str, Dim]


def _occurrences(bp: Blueprint, symbol: str) -> tuple[Any, ...]:
    """Where a symbol stands, told without names: (leaf, axis, expression with this symbol marked) in
    order.
    """
    found = []
    for at, leaf in enumerate(bp.leaves):
        for axis, dim in enumerate(leaf.type.shape):
            symbols = dim.symbols()
            if symbol in symbols:
                marked = {s: Dim.sym("self" if s == symbol else "other") for s in symbols}
                found.append((at, axis, str(dim.substitute(marked))))
    return tuple(found)


def dim_names(bp: Blueprint) -> dict[str, Dim]:
    """Canonical name of every dim: numbered by where it first stands in the shapes of the leaves, then as
    declared.
    """
    declared = list(bp.dims)
    places = {s: _occurrences(bp, s) for s in declared}
    order = sorted(declared, key=lambda s: (not places[s], places[s], declared.index(s)))
    return {symbol: Dim.sym(f"s{i}") for i, symbol in enumerate(order)}


class _Encoder:
    """Values as JSON data without names; shapes and attributes are encoded once each."""

    def __init__(self, dims: Names) -> None:
        self.dims = dims
        self._types: dict[TensorType, list[Any]] = {}

    def dim(self, dim: Dim) -> int | str:
        return dim.static if dim.static is not None else str(dim.substitute(self.dims))

    def type(self, kind: TensorType) -> list[Any]:
        found = self._types.get(kind)
        if found is None:
            found = self._types[kind] = [kind.dtype.value, [self.dim(d) for d in kind.shape]]
        return found

    def attr(self, value: Any) -> Any:
        if isinstance(value, Dim):
            return {"dim": self.dim(value)}
        if isinstance(value, DType):
            return {"dtype": value.value}
        if isinstance(value, tuple):
            return [self.attr(v) for v in value]
        return number(value) if isinstance(value, (int, float)) else value


def number(value: int | float | bool) -> list[str]:
    """A number with its kind, exactly: 1, 1.0 and true differ, and so do 0.0 and -0.0."""
    return [type(value).__name__, value.hex() if isinstance(value, float) else repr(value)]


def _leaf(leaf: Leaf, encoder: _Encoder) -> list[Any]:
    compute = leaf.compute if leaf.compute is not leaf.type.dtype else None
    out: list[Any] = [leaf.kind, encoder.type(leaf.type), compute.value if compute else None]
    if leaf.kind == "constant":
        out.append(_data(leaf.data))
    return out


def _data(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"sha256": value["sha256"], "key": value.get("key")}  # the file's name is no meaning
    return [_data(v) for v in value] if isinstance(value, tuple) else number(value)


def _dump(value: Any) -> bytes:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


class _Merkle:
    """Digest of every value of a graph, and the node that stands for each digest."""

    def __init__(self, graph: Graph, leaves: Mapping[str, Any], encoder: _Encoder) -> None:
        self.encoder = encoder
        self.digest: dict[str, str] = {
            n: hashlib.sha256(_dump(["leaf", v])).hexdigest() for n, v in leaves.items()
        }
        self.row: dict[str, tuple[Node, list[Ref]]] = {}
        for node in graph.nodes:
            self._add(node)

    def _add(self, node: Node) -> None:
        operands = list(node.inputs)
        if lookup(node.op).commutative:
            operands.sort(key=self._operand)
        attrs = [[k, self.encoder.attr(v)] for k, v in node.attrs]
        types = [self.encoder.type(t) for t in node.types]
        parts = ["node", node.op, attrs, types, [self._operand(r) for r in operands]]
        whole = hashlib.sha256(_dump(parts)).hexdigest()
        self.row.setdefault(whole, (node, operands))
        for i, name in enumerate(node.outputs):
            self.digest[name] = f"{whole}.{i}"

    def _operand(self, ref: Ref) -> str:
        return self.digest[ref] if isinstance(ref, str) else "number " + " ".join(number(ref))


def _order(merkle: _Merkle, outputs: Sequence[str]) -> list[str]:
    """Node digests, operands before users, from the outputs in order: depth first without recursion."""
    done: dict[str, None] = {}
    stack = [(merkle.digest[o].partition(".")[0], False) for o in reversed(outputs)]
    while stack:
        digest, ready = stack.pop()
        if digest in done or digest not in merkle.row:
            continue
        if ready:
            done[digest] = None
            continue
        stack.append((digest, True))
        _, operands = merkle.row[digest]
        inner = [merkle.digest[r].partition(".")[0] for r in operands if isinstance(r, str)]
        stack += [(d, False) for d in reversed(inner)]
    return list(done)


def canonical_text(bp: Blueprint) -> bytes:
    """The canonical form as JSON bytes. Raises EsperError as `typed` when the blueprint does not verify."""
    graph = typed(bp)
    dims = dim_names(bp)
    encoder = _Encoder(dims)
    places = {leaf.name: f"l{i}" for i, leaf in enumerate(bp.leaves)}
    leaves = {leaf.name: [places[leaf.name], _leaf(leaf, encoder)] for leaf in bp.leaves}
    merkle = _Merkle(graph, leaves, encoder)
    order = _order(merkle, graph.outputs)
    label = {merkle.digest[n]: p for n, p in places.items()} | {d: f"n{i}" for i, d in enumerate(order)}

    def show(ref: Ref) -> Any:
        if not isinstance(ref, str):
            return number(ref)
        digest = merkle.digest[ref]
        head, _, output = digest.partition(".")
        return label[digest] if digest in label else f"{label[head]}.{output}"

    rows = []
    for digest in order:
        node, operands = merkle.row[digest]
        attrs = [[k, encoder.attr(v)] for k, v in node.attrs]
        rows.append([node.op, attrs, [encoder.type(t) for t in node.types], [show(r) for r in operands]])
    document = {
        "format": FORMAT,
        "dims": [[str(dims[n]), s.min, s.max, s.multiple_of] for n, s in _sorted_dims(bp, dims)],
        "leaves": [v for _, v in leaves.values()],
        "nodes": rows,
        "outputs": [show(o) for o in graph.outputs],
        "differentiable": [places[n] for n in differentiable(bp)],
    }
    return _dump(document)


def _sorted_dims(bp: Blueprint, dims: Names) -> list[tuple[str, Any]]:
    return sorted(bp.dims.items(), key=lambda item: int(str(dims[item[0]])[1:]))


def differentiable(bp: Blueprint) -> tuple[str, ...]:
    """Leaves whose gradient is wanted, in order: as listed, or every floating input and parameter."""
    if bp.differentiable is not None:
        return bp.differentiable
    kinds = ("input", "param")
    return tuple(v.name for v in bp.leaves if v.kind in kinds and v.type.dtype.is_floating)


def blueprint_id(bp: Blueprint) -> str:
    """sha256 (hex) of the canonical form: the same for another order of nodes or other names, another for any
    change of meaning. Raises EsperError when the blueprint does not verify.
    """
    return hashlib.sha256(canonical_text(bp)).hexdigest()


def interface_digest(bp: Blueprint) -> str:
    """sha256 (hex) of what users see beside the meaning: names, initialisers, sizes to tune for, what a call
    updates and draws."""
    document: dict[str, Any] = {
        "name": bp.name,
        "dims": [[n, list(s.tune)] for n, s in _sorted_dims(bp, dim_names(bp))],
        "leaves": [[v.name, v.kind, None if v.init is None else sorted(v.init.items())] for v in bp.leaves],
        "outputs": list(bp.outputs),
    }
    if bp.updates or bp.random:
        document["calls"] = [sorted(bp.updates.items()), list(bp.random)]
    return hashlib.sha256(_dump(document)).hexdigest()
