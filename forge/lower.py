"""A phase graph becomes one Plan of the launch manifest: buffers, steps, and the kernels the steps name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from esper_ir.diagnostics import EsperError
from esper_ir.graph import Graph, Node
from esper_ir.types import Dim, DType
from forge.accumulate import accumulated, bias_of, biased
from forge.band import banded
from forge.body import Body, BodyBuilder
from forge.catenated import catenated
from forge.fuse import LITTLE
from forge.groups import Group, chunk_of, lowering_kind
from forge.horizontal import joined
from forge.lowered import Call, Launch, Lowered, Operand, Temp, size_of
from forge.partition import Partition, gathered, ordered, partition
from forge.passes.phases import Phase, moved_in_place, with_dense_operands
from forge.plan import Access, ChainTile, JoinedTile, KernelPlan, Load, MatmulTile, Store
from forge.recompute import recompute
from forge.reuse import in_place, in_turn
from forge.target import Target
from forge.templates import chain, dual, extern, matmul, rows, scan, table, ways
from forge.tune.journal import Choices
from forge.views import ONE, View, dense_strides, results, views
from library.launch import Argument, Bound, Buffer, ExternStep, Guard, KernelStep, Plan, TensorSpec, Variant
from library.launch import View as LaunchView

# "a": sizes along contiguous axes are multiples of 16; "g": any sizes. Addresses are multiples of 16 in both:
# results come so from torch's allocator, and the runtime copies an input that is not.
EVEN, GENERAL = "a", "g"


@dataclass(frozen=True)
class KernelSource:
    """One kernel to build: the plan (its name is the entry point) and what may be assumed of its
    parameters.
    """

    plan: KernelPlan
    variant: str
    divisible_sizes: bool = False


@dataclass
class Kernels:
    """Kernels of an artifact by (work, variant): equal plans are built and stored once. `choices` are
    the tiles picked for them, `sites` where each was picked first, `drafts` the phase and the node of every
    product that can be done in two ways.
    """

    by_key: dict[tuple[str, str], KernelSource] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    choices: Choices = field(default_factory=Choices)
    sites: dict[str, Site] = field(default_factory=dict)
    drafts: dict[str, tuple[Draft, str]] = field(default_factory=dict)

    def add(self, plan: KernelPlan, variant: str, divisible: bool) -> str:
        key = (plan.work, variant)
        if key not in self.by_key:
            base, name, n = f"{plan.name}_{variant}", f"{plan.name}_{variant}", 1
            while name in self.taken:
                n += 1
                name = f"{base}{n}"
            self.taken.add(name)
            self.by_key[key] = KernelSource(replace(plan, name=name), variant, divisible)
        return self.by_key[key].plan.name


@dataclass(frozen=True)
class PhaseLowering:
    """What `explain` shows of one phase at one bucket: groups, templates, plans, refusals."""

    phase: Phase
    parts: Partition
    lowered: tuple[tuple[Group, Lowered], ...]
    plan: Plan


@dataclass(frozen=True)
class Site:
    """A group in whose kernels a tile was picked: enough to make its steps again with other tiles."""

    low: _Lowerer
    parts: Partition
    group: Group
    name: str
    reverse: bool

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.low.sizes

    @property
    def values(self) -> tuple[str, ...]:
        """Values that are in memory with every tile."""
        return tuple(sorted(self.low.graph.types))

    def plan(self, choices: Choices) -> tuple[Plan, Kernels]:
        """The steps of the group alone, every buffer as memory that a caller gives, and their kernels."""
        return together([self], choices)


def together(sites: Sequence[Site], choices: Choices) -> tuple[Plan, Kernels]:
    """The steps of groups of one phase, in this order, every buffer as memory that a caller gives; and their
    kernels.
    """
    kernels = Kernels(choices=choices)
    low = replace(sites[0].low, kernels=kernels, buffers=[], numbers={}, fresh=set())
    low.declare()
    steps: list[KernelStep | ExternStep] = []
    for site in sites:
        lowered = _lower_group(low, site.parts, site.group, site.name, site.reverse)
        steps += _steps(low, site.group, lowered)
    buffers = tuple(replace(b, source="zeroed" if b.source == "zeroed" else "temp") for b in low.buffers)
    return Plan("forward", (), (), buffers, tuple(steps)), kernels


@dataclass(frozen=True)
class Draft:
    """What `lower_phase` was asked, to ask it again with other choices."""

    phase: Phase
    target: Target
    sizes: Mapping[str, int]
    interface: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    tag: str

    def groups(self, choices: Choices) -> list[tuple[Site, Lowered]]:
        """Every group of the phase, in order, with what it is lowered to."""
        kernels = Kernels(choices=choices)
        low = _Lowerer(self.phase, self.target, kernels, self.sizes, self.interface, self.outputs)
        low.declare()
        parts, done = _lowered(low, self.tag)
        rows = zip(done, _directions(low, parts), strict=True)
        return [
            (Site(low, parts, group, f"{self.tag}{at}", reverse), lowered)
            for at, ((group, lowered), reverse) in enumerate(rows)
        ]


@dataclass
class _Lowerer:
    phase: Phase
    target: Target
    kernels: Kernels
    sizes: Mapping[str, int]
    interface: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    buffers: list[Buffer] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    ways: ways.Ways = field(default_factory=ways.Ways)

    @property
    def graph(self) -> Graph:
        return self.phase.graph

    # Buffers --------------------------------------------------------------------------------------

    def buffer(self, name: str, source: str, index: int, dtype: DType, shape: tuple[Dim, ...]) -> int:
        if name not in self.numbers:
            self.numbers[name] = len(self.buffers)
            self.buffers.append(Buffer(name, source, index, dtype.value, tuple(size_of(s) for s in shape)))
        return self.numbers[name]

    def declare(self) -> None:
        """Every value with memory of its own: leaves, saved, cotangents, results, gradients."""
        inputs = {spec.name: i for i, spec in enumerate(self.interface)}
        cotangents = {f"grad:{spec.name}": i for i, spec in enumerate(self.outputs)}
        saved = {name: i for i, name in enumerate(self.phase.saved)}
        backward, known = self.phase.name == "backward", views(self.graph)
        for name, kind in self.graph.inputs.items():
            if backward and name in saved:
                self.buffer(name, "saved", saved[name], kind.dtype, kind.shape)
            elif backward:
                self.buffer(name, "cotangent", cotangents[name], kind.dtype, kind.shape)
            else:
                self.buffer(name, "input", inputs[name], kind.dtype, kind.shape)
        for name in self.graph.outputs:
            kind = self.graph.types[name]
            number = self.buffer(name, "gradient" if backward else "output", 0, kind.dtype, kind.shape)
            self.fresh.add(number)
            self.numbers.setdefault(known[name].base, number)  # an output that is a value in another shape

    def number(self, value: str, temps: Mapping[str, Temp]) -> int:
        if value in self.numbers:
            return self.numbers[value]
        kind = temps.get(value) or self.graph.types[value]
        self.fresh.add(self.buffer(value, "temp", 0, kind.dtype, kind.shape))
        return self.numbers[value]

    # Steps ----------------------------------------------------------------------------------------

    def launch(self, group: str, launch: Launch, temps: Mapping[str, Temp]) -> KernelStep:
        plan = launch.plan
        numbers = [self.number(b, temps) for b in plan.buffers]
        check = tuple(n for n in numbers if n not in self.fresh and self.buffers[n].source != "temp")
        divisible = _symbolic_run(plan)
        if self.target.kind == "cpu":
            variants = [Variant(Guard(), self.kernels.add(plan, GENERAL, False))]
        else:
            guard = Guard(check, tuple((s, 16) for s in plan.sizes) if divisible else ())
            variants = [Variant(guard, self.kernels.add(plan, EVEN, divisible))]
        if self.target.kind != "cpu" and divisible:
            variants.append(Variant(Guard(check), self.kernels.add(_general(plan), GENERAL, False)))
        args = [Argument("buffer", n) for n in numbers] + [Argument("size", s) for s in plan.sizes]
        if launch.scratch:
            args.append(Argument("buffer", self.number(launch.scratch, temps)))
        return KernelStep(group, tuple(variants), tuple(args), launch.grid)

    def call(self, group: str, call: Call, temps: Mapping[str, Temp]) -> ExternStep:
        inputs = tuple(self.view(o, temps) for o in call.inputs)
        outs = tuple(self.view(o, temps) for o in call.outs)
        return ExternStep(group, call.op, inputs, outs, call.attrs)

    def view(self, operand: Operand, temps: Mapping[str, Temp]) -> LaunchView:
        return LaunchView(
            self.number(operand.value, temps), tuple(size_of(s) for s in operand.shape), operand.permute
        )


def _general(plan: KernelPlan) -> KernelPlan:
    """The same grid and order of sums with a short step along the contracted axis: rows of odd length begin
    at odd addresses, every element is a load of its own, and a long step would only spill registers.
    """
    tile = plan.tile
    if isinstance(tile, ChainTile):
        return replace(plan, tile=replace(tile, block_k=min(tile.block_k, 32), stages=min(tile.stages, 2)))
    if isinstance(tile, JoinedTile):
        return replace(plan, tile=replace(tile, parts=tuple(map(_general, tile.parts))))
    if not isinstance(tile, MatmulTile):
        return plan
    return replace(plan, tile=replace(tile, block_k=min(tile.block_k, 16), stages=min(tile.stages, 2)))


def _symbolic_run(plan: KernelPlan) -> bool:
    """The contiguous axis has a symbolic size that is not known to be a multiple of 16."""
    if isinstance(plan.tile, JoinedTile):
        return any(map(_symbolic_run, plan.tile.parts))
    last = plan.space[-1]
    strides = [s for a in plan.accesses for s in a.strides]
    strides += [s for a in plan.operands for s in a.strides]
    depths = [p.matmul.k for p in (plan, plan.chain.head if plan.chain else plan) if p.matmul]
    return any(d.static is None and d.multiple({}) % 16 != 0 for d in (last, *strides, *depths))


def lower_phase(
    phase: Phase, target: Target, kernels: Kernels, sizes: Mapping[str, int], bucket: tuple[Bound, ...],
    interface: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], tag: str,
) -> PhaseLowering:  # fmt: skip
    """Plan of one phase for one bucket; `tag` begins the names of its kernels."""
    low = _Lowerer(phase, target, kernels, sizes, interface, outputs)
    low.declare()
    parts, done = _lowered(low, tag)
    done = accumulated(done, low.graph, set(low.numbers))
    if target.kind != "cpu":
        done = banded(done, set(low.numbers), sizes, target.async_copies)
        done = catenated(done, set(low.numbers))
        done = joined(done, low.numbers, sizes, target.shared_bytes)
    draft = Draft(phase, target, sizes, interface, outputs, tag)
    for node, key in low.ways.keys.items():
        kernels.drafts.setdefault(key, (draft, node))
    steps = [step for group, lowered in done for step in _steps(low, group, lowered)]
    plan = Plan(
        phase.name, bucket, phase.wanted, tuple(low.buffers), tuple(steps),
        outputs=tuple(low.numbers[r] for r in phase.results),
        saved=tuple(low.numbers[s] for s in phase.saved) if phase.name == "forward" else (),
        gradients=tuple(low.numbers[v] for v in (phase.gradients or {}).values()),
    )  # fmt: skip
    if target.kind == "cpu" or any(chunk_of(b.name) for b in plan.buffers):
        made = [step for _, lowered in done for step in lowered.steps]
        kernels_of = [step.plan if isinstance(step, Launch) else None for step in made]
        plan = in_turn(in_place(plan, kernels_of, chunks=target.kind != "cpu"))
    return PhaseLowering(low.phase, parts, tuple(done), plan)


def _steps(low: _Lowerer, group: Group, lowered: Lowered) -> list[KernelStep | ExternStep]:
    return [
        low.launch(group.name, step, lowered.temps)
        if isinstance(step, Launch)
        else low.call(group.name, step, lowered.temps)
        for step in lowered.steps
    ]


def _lowered(low: _Lowerer, tag: str) -> tuple[Partition, list[tuple[Group, Lowered]]]:
    """Groups and their kernels. Where the rest of a group does not walk the reduced axes, or the leading axes
    of its product, as one run of memory, the reductions and the product get groups of their own.
    """
    alone: frozenset[str] = frozenset()
    graph = moved_in_place(low.graph)
    low.ways = ways.chosen(graph, dict(views(graph)), low.target, low.sizes, low.kernels.choices)
    low.kernels.choices.products = low.ways.tiles
    while True:
        parts = _chained(low, graph, alone)
        low.phase = replace(low.phase, graph=parts.graph)
        done: list[tuple[Group, Lowered]] = []
        scattered = frozenset(_lower_groups(low, parts, tag, done))
        if not scattered:
            return parts, done
        alone |= scattered
        graph = with_dense_operands(graph, set(scattered))


def _chained(low: _Lowerer, graph: Graph, alone: frozenset[str]) -> Partition:
    """The groups of a graph, products in a row together. A chain that does not come about in the end leaves
    its products to the rule for products.
    """
    pairs = chain.candidates(graph, dict(views(graph)), low.target)
    pairs = {b: a for b, a in pairs.items() if a not in alone and b not in alone}
    while True:
        paired = frozenset(pairs) | frozenset(pairs.values())
        asked = (alone, paired | low.ways.own, frozenset(low.ways.library - paired))
        made = recompute(partition(graph, low.target, *asked), low.target, low.sizes)
        parts = gathered(made)
        groups = chain.merged(parts.groups, pairs, parts.views)
        groups = dual.merged(groups, low.ways.dual, parts.graph, parts.views)
        done = {g.chain[1].contraction.id for g in groups if g.chain and g.chain[1].contraction}
        if done >= pairs.keys():
            if low.target.kind != "cpu":
                groups = biased(groups, parts.graph, parts.views, parts.externs)
            return replace(parts, groups=ordered(groups, parts.views))
        pairs = {b: a for b, a in pairs.items() if b in done}


def _lower_groups(low: _Lowerer, parts: Partition, tag: str, done: list[tuple[Group, Lowered]]) -> set[str]:
    """Lower into `done`; the nodes of the first group that has to come apart, if there is one."""
    directions = _directions(low, parts)
    for position, (group, reverse) in enumerate(zip(parts.groups, directions, strict=True)):
        name, before = f"{tag}{position}", set(low.kernels.choices.made)
        try:
            done.append((group, _lower_group(low, parts, group, name, reverse)))
            for key in low.kernels.choices.made.keys() - before:
                low.kernels.sites[key] = Site(replace(low), parts, group, name, reverse)
        except EsperError as error:
            scattered = {
                n.id for n in group.nodes if lowering_kind(n) in ("reduction", "contraction", "scan")
            }
            if error.code != "E0533" or scattered <= parts.alone:
                raise
            return scattered
    return set()


def _directions(low: _Lowerer, parts: Partition) -> list[bool]:
    """Whether each group goes through its rows last to first: large ones in turn, so that each meets in the
    cache what the one before touched last. A backward begins where the forward ended.
    """
    out: list[bool] = []
    reverse = low.phase.name == "backward"
    for group in parts.groups:
        count = ONE
        for size in group.space:
            count = count * size
        large = count.value(dict(low.sizes)) > LITTLE
        if group.contraction is not None:
            reverse = True  # other kernels begin at the front, or the order is not known
        out.append(reverse and large and group.contraction is None)
        reverse = (not reverse) if large and group.contraction is None else reverse
    return out


def _lower_group(low: _Lowerer, parts: Partition, group: Group, name: str, reverse: bool) -> Lowered:
    if group.chain is not None:
        return _chain(low, parts, group, name)
    if group.contraction is not None and group.contraction.id in parts.externs:
        return _extern(low, parts, group, name)
    if group.contraction is not None and lowering_kind(group.contraction) == "opaque":
        return _table(low, parts, group.contraction, name)
    given, _ = _given(low, parts, group, _stored(parts, group), name, reverse)
    if group.contraction is not None:
        return matmul.lower(given, parts.views)
    return rows.lower(given) if group.scan is None else scan.lower(given)


def _given(
    low: _Lowerer, parts: Partition, group: Group, stored: set[str], name: str, reverse: bool = False
) -> tuple[rows.RowsInput, dict[str, str]]:
    """A group ready for its template, and the statement of the body that makes each value."""
    builder = BodyBuilder(low.graph, group, parts.views, stored)
    body = builder.build()
    given = rows.RowsInput(
        low.graph, group, body, low.target, dict(low.sizes), name, frozenset(stored), reverse,
        low.kernels.choices,
    )  # fmt: skip
    return given, builder.names


def _chain(low: _Lowerer, parts: Partition, group: Group, name: str) -> Lowered:
    assert group.chain is not None and group.contraction is not None
    joint = parts.views[group.contraction.tensors[0]].base
    stored, halves, link = _stored(parts, group), [], ""
    for part in group.chain:
        node = part.contraction
        assert node is not None
        a, b = (parts.views[v] for v in node.tensors[:2])
        given, names = _given(low, parts, part, stored & part.values(), name)
        halves.append(chain.Half(given, a, b, node))
        link = link or names[joint]
    first, second = halves
    return chain.lower(first, second, link)


def _stored(parts: Partition, group: Group) -> set[str]:
    """Values of the group that outputs or other groups read, by the memory they live in."""
    inside = {id(n) for n in group.nodes}
    own = group.values()
    read = results(parts.graph, parts.views, own - group.columns)
    for other in parts.groups:
        for node in other.nodes:
            if id(node) in inside:
                continue
            read |= {parts.views[v].base for v in node.tensors}
    # Inside the group a column result, complete only at its end, cannot be read; views of stored values can.
    return own & read


def _extern(low: _Lowerer, parts: Partition, group: Group, name: str) -> Lowered:
    """A library call; operands that are not a permutation of dense memory are copied to workspace first."""
    node = group.contraction
    assert node is not None
    copies: list[Launch] = []
    temps: dict[str, Temp] = {}
    operands: list[Operand] = []
    for position, side in enumerate(extern.sides(node, low.graph, parts.views)):
        try:
            operands.append(extern.operand(side, node, low.graph.types[side.base].numel))
        except extern.NotDense:
            dense = f"{node.id}:operand{position}"
            dtype = low.graph.types[side.base].dtype
            copies.append(_copy(low, side, dense, dtype, f"{name}_copy{position}"))
            temps[dense] = Temp(dtype, side.shape)
            whole = View(dense, side.shape, dense_strides(side.shape))
            operands.append(extern.operand(whole, node, temps[dense].numel))
    read = frozenset(v for n in low.graph for v in n.tensors) | frozenset(low.graph.outputs)
    call = extern.call(node, operands, read)
    for total in (n for n in group.nodes if n.op == "add"):  # movements that cost nothing are there too
        call = extern.with_bias(call, total, bias_of(total, node, low.graph, parts.views))
    return Lowered("extern", (*copies, call), temps)


def _table(low: _Lowerer, parts: Partition, node: Node, name: str) -> Lowered:
    """The gradient of a lookup; operands whose positions are not one run of memory are copied first."""
    copies: list[Launch] = []
    temps: dict[str, Temp] = {}
    sides: list[View] = []
    for at, value in enumerate(node.tensors):
        side = parts.views[value]
        lead = len(side.shape) - (1 if at == 0 else 0)
        if table.flat(side, lead) is None:
            dense, dtype = f"{node.id}:operand{at}", low.graph.types[side.base].dtype
            copies.append(_copy(low, side, dense, dtype, f"{name}_copy{at}"))
            temps[dense] = Temp(dtype, side.shape)
            side = View(dense, side.shape, dense_strides(side.shape))
        sides.append(side)
    kinds = [low.graph.types[v].dtype for v in node.tensors]
    ranges = {n: (s.min, s.max) for n, s in low.graph.dims.items()}
    made = table.lower(
        node, (sides[0], sides[1]), (kinds[0], kinds[1]), ranges, low.sizes, name, low.target.arch,
        low.kernels.choices,
    )  # fmt: skip
    return Lowered(made.template, (*copies, *made.steps), {**temps, **made.temps})


def _copy(low: _Lowerer, view: View, dense: str, dtype: DType, name: str) -> Launch:
    accesses = [
        Access(view.base, dtype, view.strides, False, view.offset, view.windows, view.fill),
        Access(dense, dtype, dense_strides(view.shape)),
    ]
    body = Body(accesses, [Load("v0", 0), Store(1, "v0")])
    made = rows.lower(rows.RowsInput(low.graph, Group(view.shape), body, low.target, dict(low.sizes), name))
    launch = made.steps[0]
    assert isinstance(launch, Launch)
    return launch


def buckets(
    dims: Mapping[str, tuple[int, ...]], ranges: Mapping[str, tuple[int, int]]
) -> list[dict[str, Bound]]:
    """One bucket per tuned size of each dim (product over dims), cut at the geometric mean of neighbours."""
    out: list[dict[str, Bound]] = [{}]
    for name, tuned in dims.items():
        low, high = ranges[name]
        sizes = sorted({min(max(t, low), high) for t in tuned}) or [low]
        cuts = [int((a * b) ** 0.5) for a, b in zip(sizes, sizes[1:], strict=False)]
        edges = [low, *(c + 1 for c in cuts)]
        ends = [*cuts, high]
        out = [{**b, name: Bound(name, s, e)} for b in out for s, e in zip(edges, ends, strict=True)]
    return out


def same_work(a: Plan, b: Plan) -> bool:
    """Two plans that differ in their bucket only."""
    return replace(a, bucket=()) == replace(b, bucket=())
