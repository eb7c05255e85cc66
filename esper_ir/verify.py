"""Everything that is wrong with a blueprint, at once; and its typed graph when nothing is."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from esper_ir.diagnostics import Diagnostic, EsperError, did_you_mean
from esper_ir.graph import Blueprint, Graph, Leaf, Node, producer, value_name
from esper_ir.infer import Inference, check_arity, complete
from esper_ir.opdef import OpDef
from esper_ir.registry import lookup
from esper_ir.text import MAX_NODES, MAX_RANK
from esper_ir.types import Dim, DType, TensorType

MAX_FINDINGS = 200
Types = dict[str, TensorType | None]
"""Type of every value; None where an error before it makes it unknown."""


def show_node(node: Node) -> str:
    """One line of the printed graph."""
    inside = [str(r) for r in node.inputs] + [f"{k}={v}" for k, v in node.attrs]
    text = f"{node.id} = {node.op}({', '.join(inside)})"
    return text if len(text) <= 160 else text[:157] + "..."


class _Check:
    """One verification; findings accumulate in `found`."""

    def __init__(self, bp: Blueprint) -> None:
        self.bp = bp
        self.found: list[Diagnostic] = []
        self.nodes: dict[str, Node] = {}
        self.place: dict[str, int] = {}
        self.leaves: dict[str, Leaf] = {}

    def report(self, code: str, message: str, node: str | None = None, hint: str | None = None,
               level: str = "error") -> None:  # fmt: skip
        context = self.context(node) if node in self.place else ""
        self.found.append(Diagnostic(code, message, node, level, context, hint))

    def absorb(self, error: EsperError, node: str) -> None:
        self.report(error.code, error.message, node, error.hint)

    def context(self, node: str | None) -> str:
        """The node marked among its neighbours in the text."""
        at = self.place[node or ""]
        lines = []
        for i in range(max(0, at - 1), min(len(self.bp.nodes), at + 2)):
            text = show_node(self.bp.nodes[i])
            lines.append(("> " if i == at else "  ") + text)
            if i == at:
                lines.append("  " + "^" * len(text))
        return "\n".join(lines)

    def names(self) -> None:
        """Leaves and nodes have names of their own."""
        if len(self.bp.nodes) > MAX_NODES:
            self.report("E0102", f"{len(self.bp.nodes):,} nodes: the limit is {MAX_NODES:,}")
        for leaf in self.bp.leaves:
            if leaf.name in self.leaves:
                self.report("E0304", f"two leaves are called {leaf.name!r}", leaf.name)
            self.leaves[leaf.name] = leaf
        for index, node in enumerate(self.bp.nodes):
            if node.id in self.nodes or node.id in self.leaves:
                self.report(
                    "E0304", f"the name {node.id!r} is used twice", node.id, "give every node its own id"
                )
            self.nodes.setdefault(node.id, node)
            self.place.setdefault(node.id, index)

    def symbols(self) -> None:
        """Shapes of leaves use declared dims and are never negative."""
        ranges = ranges_of(self.bp)
        for leaf in self.bp.leaves:
            if leaf.type.rank > MAX_RANK:
                self.report(
                    "E0102", f"{leaf.name} has {leaf.type.rank} axes: the limit is {MAX_RANK}", leaf.name
                )
            for dim in leaf.type.shape:
                unknown = sorted(dim.symbols() - set(self.bp.dims))
                if unknown:
                    known = f"declare it under dims; known: {', '.join(self.bp.dims) or 'none'}"
                    hint = did_you_mean(unknown[0], self.bp.dims, known)
                    self.report("E0307", f"{leaf.name}: unknown dim {unknown[0]!r}", leaf.name, hint)
                elif not _non_negative(dim, ranges):
                    self.report(
                        "E0206", f"{leaf.name}: cannot prove {dim} >= 0 over the declared range", leaf.name
                    )
            if leaf.compute is not None and not (leaf.compute.is_floating and leaf.type.dtype.is_floating):
                self.report(
                    "E0205", f"{leaf.name}: compute dtype of a tensor that is not floating", leaf.name
                )

    def source(self, ref: str) -> str | None:
        """The leaf or node that a reference means, None when there is none."""
        if ref in self.leaves or ref in self.nodes:
            return ref
        owner = producer(ref, self.nodes)
        return owner if owner in self.nodes else None

    def _meant(self, ref: str, reader: str = "") -> str:
        """Not the node that reads it: nothing reads itself."""
        known = (name for name in chain(self.leaves, self.nodes) if name != reader)
        return did_you_mean(ref, known) or "check the spelling"

    def references(self) -> None:
        for node in self.bp.nodes:
            for ref in node.tensors:
                if self.source(ref) is None:
                    self.report(
                        "E0302", f"{ref!r} is no input, param or node", node.id, self._meant(ref, node.id)
                    )
        if not self.bp.outputs:
            self.report("E0306", "there are no outputs", hint="name at least one value under outputs")
        for name in self.bp.outputs:
            if self.source(name) is None:
                self.report("E0302", f"output {name!r} is no value", hint=self._meant(name))
        if len(set(self.bp.outputs)) != len(self.bp.outputs):
            self.report("E0306", "an output is listed twice")
        for name in self.bp.differentiable or ():
            leaf = self.leaves.get(name)
            if leaf is None or leaf.kind not in ("input", "param") or not leaf.type.dtype.is_floating:
                self.report(
                    "E0310", f"differentiable names {name!r}", hint="a floating input or param is needed"
                )

    def calls(self) -> None:
        """What a call updates and draws: buffers from the last outputs, whole numbers for inputs."""
        count = len(self.bp.updates)
        for name in self.bp.updates:
            if (leaf := self.leaves.get(name)) is None or leaf.kind != "buffer":
                self.report("E0311", f"updates names {name!r}", hint="the key is a buffer")
        if sorted(self.bp.updates.values()) != sorted(self.bp.outputs[len(self.bp.outputs) - count :]):
            hint = "list what updates a buffer as the last outputs, each once"
            self.report("E0311", "updates are not the last outputs", hint=hint)
        if count and count >= len(self.bp.outputs):
            self.report("E0311", "every output updates a buffer", hint="one output is what callers see")
        for name in self.bp.random:
            leaf = self.leaves.get(name)
            fits = leaf is not None and leaf.kind == "input" and leaf.type.dtype is DType.int64
            if not fits or leaf is None or any(d.static is None for d in leaf.type.shape):
                hint = "an input of int64 whose shape is numbers"
                self.report("E0311", f"random names {name!r}", hint=hint)

    def order(self) -> list[Node]:
        """Topological order, stable by the place in the text; a cycle is reported and left out."""
        waiting = {n.id: 0 for n in self.nodes.values()}
        users: dict[str, list[str]] = {}
        for node in self.nodes.values():
            for ref in set(node.tensors):
                owner = self.source(ref)
                if owner in self.nodes:
                    waiting[node.id] += 1
                    users.setdefault(owner, []).append(node.id)
        ready = [self.place[n] for n, count in waiting.items() if not count]
        heapq.heapify(ready)
        out: list[Node] = []
        while ready:
            node = self.bp.nodes[heapq.heappop(ready)]
            out.append(node)
            for user in users.get(node.id, ()):
                waiting[user] -= 1
                if not waiting[user]:
                    heapq.heappush(ready, self.place[user])
        if len(out) < len(self.nodes):
            self.cycle({n for n, count in waiting.items() if count})
        return out

    def cycle(self, left: set[str]) -> None:
        """Walk operands within the nodes that could not be ordered until one repeats."""
        at = min(left, key=self.place.__getitem__)
        path: list[str] = []
        while at not in path:
            path.append(at)
            owners = (self.source(r) for r in self.nodes[at].tensors)
            at = next(o for o in owners if o in left)
        loop = [*path[path.index(at) :], at]
        shown = " <- ".join(loop if len(loop) <= 12 else [*loop[:6], "...", *loop[-5:]])
        self.report("E0303", f"cycle: {shown}", at, "a node may not depend on itself")


def _non_negative(dim: Dim, ranges: Mapping[str, tuple[int, int | None]]) -> bool:
    low, _ = dim.bounds(ranges)
    return low is not None and low >= 0


def ranges_of(bp: Blueprint | Graph) -> dict[str, tuple[int, int | None]]:
    """Declared range of every dim."""
    return {name: (spec.min, spec.max) for name, spec in bp.dims.items()}


class _Typing:
    """Types of all nodes in order, going on after an error with what is still known."""

    def __init__(self, check: _Check) -> None:
        self.check = check
        self.infer = Inference(check.bp.dims)
        self.types: Types = {}
        self.typed: list[Node] = []
        self.ranges = ranges_of(check.bp)
        self._proved: set[Dim] = set()
        self._leaf_dims = {d for leaf in check.bp.leaves for d in leaf.type.shape}
        self._told = {s for d in self._leaf_dims for s in d.symbols()}

    def leaves(self) -> Iterator[Node]:
        """Types of leaves; a param with another compute dtype is read through a cast."""
        for leaf in self.check.bp.leaves:
            self.types[leaf.name] = leaf.type
            if leaf.compute is not None and leaf.compute is not leaf.type.dtype:
                kind = TensorType(leaf.compute, leaf.type.shape)
                self.types[compute_name(leaf)] = kind
                yield Node(compute_name(leaf), "cast", (leaf.name,), (("dtype", leaf.compute),), (kind,))

    def node(self, node: Node, read: Mapping[str, str]) -> None:
        try:
            op = lookup(node.op)
            operands = [self.types.get(read.get(r, r)) if isinstance(r, str) else r for r in node.inputs]
            if any(o is None for o in operands):
                self._partly(op, node)
                return
            attrs, types = self.infer(op, operands, dict(node.attrs))  # type: ignore[arg-type]
            self._sizes(types)
        except EsperError as error:
            self.check.absorb(error, node.id)
            return
        inputs = tuple(read.get(r, r) if isinstance(r, str) else r for r in node.inputs)
        self.typed.append(Node(node.id, node.op, inputs, attrs, types))
        for i, kind in enumerate(types):
            name = value_name(node.id, i)
            if i and (name in self.check.nodes or name in self.check.leaves):
                self.check.report("E0304", f"output {i} of {node.id} is called {name!r} as well", node.id)
            self.types[name] = kind

    def _partly(self, op: OpDef, node: Node) -> None:
        """What can be said without the operand types; an unknown output number of a typed node is an
        error.
        """
        check_arity(op, len(node.inputs))
        complete(op, dict(node.attrs))
        for ref in node.tensors:
            owner = self.check.source(ref)
            if owner is not None and owner != ref and self.types.get(owner) is not None:
                hint = f"{owner} has fewer outputs"
                raise EsperError("E0302", f"{ref!r} is no value", hint=hint)

    def _sizes(self, types: Sequence[TensorType]) -> None:
        for kind in types:
            for dim in kind.shape:
                if dim.static is not None and dim.static >= 0 or dim in self._proved:
                    continue
                unknown = dim.symbols() - set(self.ranges)
                if unknown and unknown <= self._told:
                    continue  # reported once, at the leaf
                if unknown:
                    raise EsperError("E0307", f"unknown dim {min(unknown)!r}", hint="declare it under dims")
                if not _non_negative(dim, self.ranges) and dim not in self._leaf_dims:
                    raise EsperError("E0206", f"cannot prove {dim} >= 0 over the declared range of its dims")
                self._proved.add(dim)


def compute_name(leaf: Leaf) -> str:
    """Name of the cast through which the graph reads a param that has a compute dtype."""
    return f"{leaf.name}:compute"


def _unused(check: _Check) -> None:
    """Warnings: leaves and nodes that no output needs."""
    live: set[str] = set()
    stack = [s for s in (check.source(o) for o in check.bp.outputs) if s]
    while stack:
        name = stack.pop()
        if name in live:
            continue
        live.add(name)
        if name in check.nodes:
            stack += [s for s in (check.source(r) for r in check.nodes[name].tensors) if s]
    for leaf in check.bp.leaves:
        if leaf.name not in live:
            check.report("E0305", f"{leaf.kind} {leaf.name!r} is not used", leaf.name, level="warning")
    for node in check.nodes.values():
        if node.id not in live:
            check.report("E0309", "no output needs this node", node.id, "remove it", level="warning")


def examine(bp: Blueprint) -> tuple[list[Diagnostic], Graph | None]:
    """All findings, and the typed graph when none of them is an error."""
    check = _Check(bp)
    check.names()
    check.symbols()
    check.references()
    check.calls()
    typing = _Typing(check)
    casts = list(typing.leaves())
    read = {n.inputs[0]: n.id for n in casts if isinstance(n.inputs[0], str)}
    for node in check.order():
        typing.node(node, read)
    for name in bp.outputs:
        owner = check.source(name)
        if owner is not None and typing.types.get(owner) is not None and name not in typing.types:
            check.report("E0302", f"output {name!r} is no value", hint=f"{owner} has fewer outputs")
    for name, source in bp.updates.items():
        leaf, made = check.leaves.get(name), typing.types.get(source)
        if leaf is not None and made is not None and made != leaf.type:
            check.report("E0311", f"{source} is {made}, the buffer {name} {leaf.type}", source)
    _unused(check)
    found = sorted(check.found, key=lambda d: d.level != "error")
    if any(d.level == "error" for d in found):
        return found, None
    return found, _live_graph(bp, [*casts, *typing.typed], read)


def _live_graph(bp: Blueprint, nodes: Sequence[Node], read: Mapping[str, str]) -> Graph:
    owner = {name: n for n in nodes for name in n.outputs}
    outputs = tuple(read.get(o, o) for o in bp.outputs)
    live: set[str] = set()
    stack: list[Any] = [owner[o] for o in outputs if o in owner]
    while stack:
        node = stack.pop()
        if node.id not in live:
            live.add(node.id)
            stack += [owner[r] for r in node.tensors if r in owner]
    inputs = {leaf.name: leaf.type for leaf in bp.leaves}
    return Graph(inputs, tuple(n for n in nodes if n.id in live), outputs, dict(bp.dims))


def verify(bp: Blueprint) -> list[Diagnostic]:
    """Every finding at once, errors first: each has a code, the node and the node marked in the printed
    graph.
    """
    return examine(bp)[0]


def typed(bp: Blueprint) -> Graph:
    """The typed graph in topological order, dead nodes dropped, params with a `compute` dtype read through a
    cast.

    Raises one EsperError carrying every error found; its code is that of the only kind of error, else E0308.
    """
    found, graph = examine(bp)
    if graph is not None:
        return graph
    errors = [d for d in found if d.level == "error"]
    codes = {d.code for d in errors}
    code = codes.pop() if len(codes) == 1 else "E0308"
    first = errors[0]
    message = first.message if len(errors) == 1 else f"{bp.name} has {len(errors)} errors"
    more = len(errors) - MAX_FINDINGS
    hint = f"{more} more are not shown" if more > 0 else None
    raise EsperError(code, message, node=first.node, hint=hint, diagnostics=errors[:MAX_FINDINGS])
