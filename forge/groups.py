"""Fusion groups: which nodes may share one kernel, and how each value lies in the group's iteration space.

Values in `columns` (column reductions, and the pointwise `finishers` of them) are complete only after the
whole kernel; they are computed by a second kernel.

A group iterates over `space`, a shape. The *placement* of a value says for each of its axes which axis of the
space it runs along (None where its size is 1). Row reductions run over the space's axes from `split` on,
column reductions over the axes before it; both may live in one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from esper_ir.diagnostics import Rejected
from esper_ir.graph import Graph, Node
from esper_ir.opdef import Contraction, Creation, Movement, Pointwise, Reduction
from esper_ir.registry import OPS
from esper_ir.types import Dim
from forge.views import ONE, permutation

Placement = tuple[int | None, ...]
IN_CHUNK = "@"
"""In the name of a node that is done for some rows (`forge/passes/chunks.py`): before its number.
No name in a blueprint has it."""


def chunk_of(name: str) -> str:
    """Empty for what is done for all rows."""
    return name.rpartition(IN_CHUNK)[2] if IN_CHUNK in name else ""


@dataclass
class Group:
    """A growing set of nodes. `contraction` is the product that a matmul group starts from; `scan` is the
    axis that its running values go along, and whether from the end; `wanted` says where values that no
    operand places should lie, because of who reads them; `chain`: two products that run as one kernel
    (forge/templates/chain.py), whose nodes these are; `second`: a product of the same left operand that is
    made beside `contraction` (forge/templates/dual.py); `beside`: groups that begin in one launch.
    """

    space: tuple[Dim, ...]
    nodes: list[Node] = field(default_factory=list)
    placements: dict[str, Placement] = field(default_factory=dict)
    split: int | None = None
    contraction: Node | None = None
    columns: set[str] = field(default_factory=set)
    finishers: set[str] = field(default_factory=set)
    chain: tuple[Group, Group] | None = None
    scan: tuple[int, bool] | None = None
    wanted: dict[str, Placement] = field(default_factory=dict)
    beside: tuple[Group, ...] = ()
    second: Node | None = None

    @property
    def name(self) -> str:
        return self.nodes[0].id

    def values(self) -> set[str]:
        return {o for n in self.nodes for o in n.outputs}


KINDS: dict[type, str] = {
    Pointwise: "pointwise", Reduction: "reduction", Movement: "movement", Contraction: "contraction",
    Creation: "creation",
}  # fmt: skip


def lowering_kind(node: Node) -> str:
    """pointwise, reduction, movement, contraction, creation, or the class name of anything else."""
    low = type(OPS[node.op].lowering)
    return KINDS.get(low) or low.__name__.lower()


def right_aligned(shape: tuple[Dim, ...], space: tuple[Dim, ...]) -> Placement | None:
    """Placement of a shape that broadcasts to the space, or None."""
    lead = len(space) - len(shape)
    if lead < 0:
        return None
    out: list[int | None] = []
    for axis, size in enumerate(shape):
        if size == ONE:
            out.append(None)
        elif size == space[lead + axis]:
            out.append(lead + axis)
        else:
            return None
    return tuple(out)


def aligned(placement: Placement, shape: tuple[Dim, ...]) -> Placement:
    """Placement of an operand that broadcasts to what lies at `placement`."""
    lead = len(placement) - len(shape)
    return tuple(None if size == ONE else placement[lead + axis] for axis, size in enumerate(shape))


def everywhere(space: tuple[Dim, ...]) -> Placement:
    """Placement of a value that has the shape of the space."""
    return tuple(None if size == ONE else axis for axis, size in enumerate(space))


class Matcher:
    """Decides whether a node can join a group, over one graph whose constants (`full`) are folded into their
    users.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.types = graph.types

    def place(self, group: Group, node: Node) -> Placement | Rejected:
        """Placement of the node's result in the group."""
        kind = lowering_kind(node)
        if group.nodes and chunk_of(group.name) != chunk_of(node.id):
            return Rejected("chunk", f"{node.id} is done for other rows, when those of {group.name} are gone")
        if group.columns & set(node.tensors):
            return self._place_finisher(group, node)
        if kind == "reduction":
            return self._place_reduction(group, node)
        if kind == "pointwise":
            return self._place_pointwise(group, node)
        if kind == "movement":
            return self._place_movement(group, node)
        if kind == "scan":
            return self._place_scan(group, node)
        if kind == "lookup":
            return self._place_lookup(group, node)
        return Rejected("kind", f"{node.op} is a {kind}")

    def _place_lookup(self, group: Group, node: Node) -> Placement | Rejected:
        """Rows of a table from outside, along the last axis of the result."""
        numbers, table = node.tensors
        if group.contraction is not None or group.scan is not None:
            return Rejected("kind", f"{group.name} reads no rows by number")
        if table in group.placements:
            return Rejected("lookup", f"{table} is complete only after the whole kernel")
        shape = node.types[0].shape
        inside = group.placements.get(numbers)
        out: list[int | None] = [None] * len(shape) if inside is None else [*inside, None]
        return self._complete(group, node, shape, out)

    def _place_scan(self, group: Group, node: Node) -> Placement | Rejected:
        """Running values over the whole space, all along one axis and in one direction."""
        shape, axis = node.types[0].shape, int(node.attr("dim"))
        if group.contraction is not None or group.split is not None:
            return Rejected("kind", f"{group.name} does not hold whole runs along an axis")
        if shape[axis] == ONE:
            return Rejected("length", f"{node.id} runs along an axis of one position")
        whole = everywhere(group.space)
        if shape != group.space or any(self._operand(group, v) != whole for v in node.tensors):
            return Rejected("space", f"{node.id} has shape {_show(shape)}, the group {_show(group.space)}")
        if group.scan not in (None, (axis, bool(node.attr("reverse")))):
            return Rejected("direction", f"{node.id} runs another way than the group's running values")
        return whole

    def _place_finisher(self, group: Group, node: Node) -> Placement | Rejected:
        """Pointwise work on column results of one shape, and nothing else."""
        alike = all(v in group.columns and self.types[v].shape == node.types[0].shape for v in node.tensors)
        if lowering_kind(node) != "pointwise" or not alike:
            return Rejected("column", f"an operand of {node.id} is complete only after the whole kernel")
        return group.placements[node.tensors[0]]

    def _place_pointwise(self, group: Group, node: Node) -> Placement | Rejected:
        shape = node.types[0].shape
        out: list[int | None] = list(group.wanted.get(node.id, [None] * len(shape)))
        for operand in node.tensors:
            placement = group.placements.get(operand)
            if placement is None:
                continue
            lead = len(shape) - len(placement)
            for axis, at in enumerate(placement):
                if at is None:
                    continue
                if out[lead + axis] not in (None, at):
                    return Rejected("placement", f"operands of {node.id} lie along different axes")
                out[lead + axis] = at
        return self._complete(group, node, shape, out)

    def _complete(
        self, group: Group, node: Node, shape: tuple[Dim, ...], out: list[int | None]
    ) -> Placement | Rejected:
        """Axes that no operand inside the group fixes are aligned at the right."""
        lead = len(group.space) - len(shape)
        for axis, size in enumerate(shape):
            found = out[axis]
            if found is not None and group.space[found] != size:
                return Rejected("space", f"{node.id} is wider than the group along axis {axis}")
            if size == ONE or found is not None:
                continue
            at = lead + axis
            if at < 0 or group.space[at] != size or at in out:
                return Rejected(
                    "space", f"{node.id} has shape {_show(shape)}, the group {_show(group.space)}"
                )
            out[axis] = at
        known = [a for a in out if a is not None]
        if known != sorted(set(known)) and not self._turned_back(group, node):
            return Rejected("placement", f"{node.id} would use an axis twice or out of order")
        return tuple(out)

    def _turned_back(self, group: Group, node: Node) -> bool:
        """A copy of a value in another order of axes, in that in which the group reads its operands: where
        they are read along memory, the copy is written along memory.
        """
        made = self.graph.by_output
        source = made.get(node.tensors[0]) if node.op == "cast" else None
        order = self._exchanged(source)
        if order is None or group.contraction is not None or group.scan is not None:
            return False
        back = tuple(order.index(axis) for axis in range(len(order)))
        outside = {v for n in group.nodes for v in n.tensors if v not in group.placements}
        return any(self._exchanged(made.get(v)) == back for v in outside)

    def _exchanged(self, node: Node | None) -> tuple[int, ...] | None:
        low = OPS[node.op].lowering if node is not None else None
        if node is None or not isinstance(low, Movement) or low.kind != "permute":
            return None
        return permutation(node, len(node.types[0].shape))

    def _operand(self, group: Group, name: str) -> Placement | None:
        return group.placements.get(name) or right_aligned(self.types[name].shape, group.space)

    def _place_movement(self, group: Group, node: Node) -> Placement | Rejected:
        source = node.tensors[0]
        placement = group.placements.get(source)
        if placement is None:
            return Rejected("view", f"{node.id} only moves data from outside")
        low = OPS[node.op].lowering
        assert isinstance(low, Movement)
        old, new = self.types[source].shape, node.types[0].shape
        if low.kind == "permute":
            return tuple(placement[i] for i in permutation(node, len(new)))
        if low.kind == "expand":
            lead = len(new) - len(old)
            grown: list[int | None] = [None] * lead + list(placement)
            return self._complete(group, node, new, grown)
        if low.kind in ("slice", "flip", "window"):
            return Rejected("view", f"{node.id} moves along an axis")
        kept = [a for a, size in zip(placement, old, strict=True) if size != ONE]
        if [s for s in old if s != ONE] != [s for s in new if s != ONE]:
            return Rejected("reshape", f"{node.id} regroups axes")
        remaining = iter(kept)
        return tuple(None if size == ONE else next(remaining) for size in new)

    def _place_reduction(self, group: Group, node: Node) -> Placement | Rejected:
        if group.contraction is not None or group.scan is not None:
            return Rejected("kind", "neither a contraction nor a running value leaves whole rows in a tile")
        low = OPS[node.op].lowering
        assert isinstance(low, Reduction)
        if low.combine not in COMBINES:
            return Rejected("combine", f"no kernel reduces by {low.combine}")
        source = self._operand(group, node.tensors[0])
        if source is None:
            return Rejected(
                "space", f"{node.tensors[0]} does not lie in the group's space {_show(group.space)}"
            )
        dims = set(node.attr("dims"))
        axes = {a for a in (source[d] for d in dims) if a is not None}
        split = _split(group.space, axes)
        over = bool(axes) and max(axes) == max(_long_axes(group.space))
        if split is None or (group.split is not None and split != group.split):
            return Rejected(
                "axes", f"{node.id} reduces over axes {sorted(dims)}, the group is split at {group.split}"
            )
        kept = [a for i, a in enumerate(source) if i not in dims]
        order = [a for a in kept if a is not None]
        if not over and order != sorted(order):  # partial rows become the result as they lie
            return Rejected("placement", f"{node.id} keeps axes in another order than the group's")
        both = {"row", "col"} == self._kinds(group) | {"row" if over else "col"}
        if "squares" in self._combines(group) | {low.combine} and (both or over):
            return Rejected("combine", "squares about a mean are made down the columns alone")
        if both and _long(group.space[split:]):
            return Rejected(
                "length", "row and column reductions need the row in registers, and it is too long"
            )
        if set(source) - {None} != set(_long_axes(group.space)):
            return Rejected("broadcast", f"{node.tensors[0]} is broadcast along the axes it is reduced over")
        return (
            tuple(None if i in dims else a for i, a in enumerate(source))
            if node.attr("keepdim")
            else tuple(kept)
        )

    def _kinds(self, group: Group) -> set[str]:
        """Directions in which the group reduces already."""
        reducing = [n for n in group.nodes if lowering_kind(n) == "reduction"]
        return {"col" if n.id in group.columns else "row" for n in reducing}

    def _combines(self, group: Group) -> set[str]:
        """What the group's reductions make."""
        lows = (OPS[n.op].lowering for n in group.nodes)
        return {low.combine for low in lows if isinstance(low, Reduction)}

    def join(self, group: Group, node: Node, placement: Placement) -> None:
        """Put the node in; the placement comes from `place`."""
        group.nodes.append(node)
        group.placements[node.id] = placement
        if group.columns & set(node.tensors):
            group.columns.add(node.id)
            group.finishers.add(node.id)
        if lowering_kind(node) == "scan":
            group.scan = (int(node.attr("dim")), bool(node.attr("reverse")))
        if lowering_kind(node) != "reduction":
            return
        source = self._operand(group, node.tensors[0])
        assert source is not None
        axes = {a for a in (source[d] for d in node.attr("dims")) if a is not None}
        group.split = _split(group.space, axes)
        if max(axes) != max(_long_axes(group.space)):
            group.columns.add(node.id)

    def start(self, node: Node) -> Group:
        """A group of its own space for a node that joins nothing."""
        shape = node.types[0].shape
        if lowering_kind(node) == "reduction":
            shape = self.types[node.tensors[0]].shape
        return Group(shape)

    def reaches(self, group: Group, node: Node, owner: Mapping[str, Group]) -> bool:
        """True if some operand of the node, through other groups, needs this group: joining would make a
        cycle.
        """
        inside = group.values()
        stack = [v for v in node.tensors if v not in inside]
        seen: set[int] = set()
        while stack:
            other = owner.get(stack.pop())
            if other is None or id(other) in seen:
                continue
            if other is group:
                return True
            seen.add(id(other))
            made = other.values()
            stack += [v for n in other.nodes for v in n.tensors if v not in made]
        return False


# Elements of one row that stay in registers; beyond it a row is swept in blocks.
WHOLE_ROW = 16384
COMBINES = ("sum", "max", "min", "squares")


def _long_axes(space: tuple[Dim, ...]) -> list[int]:
    """Axes of another size than 1; the others lie nowhere."""
    return [axis for axis, size in enumerate(space) if size != ONE]


def _split(space: tuple[Dim, ...], axes: set[int]) -> int | None:
    """Where rows end and columns begin when `axes` are all columns, or all rows; None when they are
    neither.
    """
    long = _long_axes(space)
    if axes and axes == {a for a in long if a >= min(axes)}:
        return max((a + 1 for a in long if a < min(axes)), default=0)
    if axes and axes == {a for a in long if a <= max(axes)}:
        return max(axes) + 1
    return None


def _long(cols: tuple[Dim, ...]) -> bool:
    size = Dim.of(1)
    for c in cols:
        size = size * c
    return size.static is None or size.static > WHOLE_ROW


def _show(shape: tuple[Dim, ...]) -> str:
    return f"[{', '.join(str(s) for s in shape)}]"
