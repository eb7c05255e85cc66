"""Launches that need nothing of each other as one kernel (horizontal fusion).

A small kernel costs its start more than its work: some 3.6 us on an H200, whatever it does. Weight gradients
of small networks, their second stages and the sums of biases wait for the same values and for nothing of each
other; side by side they are one launch, whose programs are dealt to them in order. Each part keeps its tile
but for the number of warps, so that its sums are added in an order that nothing else changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from forge.groups import Group
from forge.lowered import Call, Launch, Lowered
from forge.plan import (
    INDEX,
    Access,
    ChainTile,
    JoinedTile,
    KernelPlan,
    MatmulTile,
    PointTile,
    RowTile,
    Stmt,
    Store,
    SumTile,
    next_pow2,
)
from library.launch import Size

Done = tuple[Group, Lowered]
LITTLE = 1 << 21  # positions of a kernel's space, at the sizes to tune for
LITTLE_FLOPS = 2e9  # of a product
MOST = 8  # parts of a kernel: their code is fetched from memory
HELD = 64  # values of a tile that a thread holds, where its warps are chosen here


@dataclass
class Slot:
    """What runs at one moment: one step, or several that become one launch, each with its row."""

    steps: list[tuple[int, Launch | Call]]
    open: bool


@dataclass(frozen=True)
class Phase:
    """Steps in an order in which they can run, each with the number of its row, and what they touch."""

    steps: Sequence[tuple[int, Launch | Call]]
    sizes: Mapping[str, int]
    names: Mapping[str, int]
    shared_bytes: int
    touched: dict[int, tuple[frozenset[object], frozenset[object]]] = field(default_factory=dict)

    def conflict(self, a: Launch | Call, b: Launch | Call) -> bool:
        """Whether their order matters: one writes what the other reads or writes."""
        (reads, writes), (others, made) = self.memory(a), self.memory(b)
        return bool(writes & others or writes & made or reads & made)

    def memory(self, step: Launch | Call) -> tuple[frozenset[object], frozenset[object]]:
        """What it reads and writes; names of one buffer are one."""
        if id(step) not in self.touched:
            read, written = _memory(step)
            self.touched[id(step)] = self._one(read), self._one(written)
        return self.touched[id(step)]

    def _one(self, names: set[str]) -> frozenset[object]:
        return frozenset(self.names.get(n, n) for n in names)

    def placed(self, backwards: bool) -> list[Slot]:
        """Every step as early as it can be beside others, or as late (`backwards`)."""
        slots: list[Slot] = []
        for row, step in reversed(self.steps) if backwards else self.steps:
            own = step if isinstance(step, Launch) and self.little(step) else None
            home = self.earlier(slots, own) if own is not None else None
            if home is not None:
                home.steps.append((row, step))
            else:
                slots.append(Slot([(row, step)], own is not None))
        return self.advanced(slots[::-1] if backwards else slots)

    def advanced(self, slots: list[Slot]) -> list[Slot]:
        """Products, which take longest, begin with the first kernels that they may be beside; what adds up
        partial rows stays behind them.
        """
        for at, slot in enumerate(slots):
            for row, step in list(slot.steps):
                home = self.earlier(slots[:at], step) if slot.open else None
                if home is not None and isinstance(step, Launch) and step.plan.product:
                    home.steps.append((row, step))
                    slot.steps.remove((row, step))
        return [s for s in slots if s.steps]

    def earlier(self, before: Sequence[Slot], step: Launch | Call) -> Slot | None:
        """The first of the slots in which a step has room, and from which on it needs nothing."""
        after = [i for i, s in enumerate(before) if any(self.conflict(step, o) for _, o in s.steps)]
        free = before[max(after, default=-1) + 1 :]
        return next((s for s in free if s.open and isinstance(step, Launch) and self.room(s, step)), None)

    def little(self, launch: Launch) -> bool:
        """Whether its start costs more than its neighbours could take from it."""
        plan = launch.plan
        tile = plan.tile
        plain = type(tile) in (RowTile, PointTile, SumTile, MatmulTile, ChainTile) and not launch.scratch
        times = tile.unroll * tile.unroll_above if isinstance(tile, RowTile) else 1
        if not plain or launch.grid[2] != 1 or (plan.rows * plan.cols * times).value(self.sizes) > LITTLE:
            return False
        depths = [p.matmul.k * p.matmul.products
                  for p in (plan, plan.chain.head if plan.chain else plan) if p.matmul]  # fmt: skip
        depths += [plan.chain.head.cols] if plan.chain else []
        flops = sum(2 * (plan.rows * plan.cols * k).value(self.sizes) for k in depths)
        return flops <= LITTLE_FLOPS

    def room(self, slot: Slot, step: Launch) -> bool:
        """Whether one kernel can hold them: the same type of sizes, products of one kind and of the same
        warps, and all that they keep on chip, should the compiler not give parts the same memory.
        """
        plans = [s.plan for _, s in [*slot.steps, (0, step)] if isinstance(s, Launch)]
        warps = _warps(plans)
        products = {(type(p.tile), p.tile.warps) for p in plans if p.product}
        alike = len({p.wide for p in plans}) == 1 and len(products) <= 1 and len(plans) <= MOST
        kept = sum(map(_on_chip, plans)) <= self.shared_bytes
        return alike and kept and all(p.product or _held(p) <= HELD * 32 * warps for p in plans)


def joined(
    done: Sequence[Done], names: Mapping[str, int], sizes: Mapping[str, int], shared_bytes: int
) -> list[Done]:
    """The groups of a phase with little launches beside each other; `names`: the buffer of each value that
    has one already (two values may have the same); `shared_bytes`: on-chip memory of one program. Where that
    spares none, as they were.
    """
    steps = [(row, step) for row, (_, low) in enumerate(done) for step in low.steps]
    phase = Phase(steps, sizes, names, shared_bytes)
    late, early = phase.placed(True), phase.placed(False)
    slots = early if len(early) < len(late) else late
    if len(slots) == len(steps):
        return list(done)
    return [_row(done, slot) for slot in slots]


def _memory(step: Launch | Call) -> tuple[set[str], set[str]]:
    if isinstance(step, Call):
        return {o.value for o in step.inputs}, {o.value for o in step.outs}
    plan = step.plan
    plain = type(plan.tile) in (RowTile, PointTile, SumTile, MatmulTile, ChainTile)
    every = {*plan.buffers, *([step.scratch] if step.scratch else [])}
    written = {a.buffer for a in _stored(plan)} if plain else every
    if plan.chain is not None:
        written |= {a.buffer for a in _stored(plan.chain.head)}
    return every, written


def _stored(plan: KernelPlan) -> list[Access]:
    return [plan.accesses[s.access] for s in plan.body if isinstance(s, Store)]


def _warps(plans: Sequence[KernelPlan]) -> int:
    products = [p.tile.warps for p in plans if p.product]
    return max(products or [p.tile.warps for p in plans])


def _held(plan: KernelPlan) -> int:
    """Values of one operand in a tile."""
    tile = plan.tile
    if isinstance(tile, RowTile):
        return tile.block_rows * tile.block_cols
    return tile.block_parts * tile.block_cols if isinstance(tile, SumTile) else getattr(tile, "block", 0)


def _on_chip(plan: KernelPlan) -> int:
    """At most so many bytes of shared memory."""
    tile, size = plan.tile, max((a.dtype.itemsize for a in plan.operands), default=4)
    if isinstance(tile, MatmulTile):
        rights = tile.block_n * (plan.matmul.products if plan.matmul else 1)
        return max(
            size * tile.stages * tile.block_k * (tile.block_m + rights), 4 * tile.block_m * tile.block_n
        )
    if isinstance(tile, ChainTile) and plan.chain is not None:
        middle = max(next_pow2(plan.chain.head.cols.static or 1), 16)
        deep = tile.block_k * (tile.block_m + middle) + tile.block_n * middle
        return size * tile.stages * deep + 4 * tile.block_m * middle
    operands = len(plan.accesses) * getattr(tile, "stages", 1)
    return min(_held(plan) * 4 * operands, 1 << 15) if isinstance(tile, RowTile) else 1 << 13


def _row(done: Sequence[Done], slot: Slot) -> Done:
    """One step as a row of its own, several as one launch."""
    rows = list(dict.fromkeys(row for row, _ in slot.steps))
    groups, temps = [done[row][0] for row in rows], {k: v for r in rows for k, v in done[r][1].temps.items()}
    if len(slot.steps) == 1:
        (row, step), group = slot.steps[0], groups[0]
        later = step is not done[row][1].steps[0]
        return (replace(group, contraction=None, second=None, chain=None) if later else group,
                replace(done[row][1], steps=(step,)))  # fmt: skip
    launches = [s for _, s in slot.steps if isinstance(s, Launch)]
    launches.sort(key=lambda s: not s.plan.product)  # the longest programs begin first
    first = [done[row][0] for row, s in slot.steps if s is done[row][1].steps[0]]
    nodes = list({n.id: n for g in groups for n in g.nodes}.values())
    group = Group(groups[0].space, nodes, beside=tuple(first))
    return group, Lowered("beside each other", (_launch(launches),), temps)


def _launch(launches: Sequence[Launch]) -> Launch:
    warps = _warps([s.plan for s in launches])
    parts = tuple(replace(s.plan, tile=replace(s.plan.tile, warps=warps)) for s in launches)
    stages = max(1 if isinstance(p.tile, RowTile) else getattr(p.tile, "stages", 1) for p in parts)
    tile = JoinedTile(warps, stages, parts, tuple((s.grid[0], s.grid[1]) for s in launches))
    accesses, stores = _outside(parts)
    sizes = tuple(sorted({name for p in parts for name in p.sizes}))
    largest = max(parts, key=lambda p: len(p.space)).space
    plan = KernelPlan(parts[0].name, largest, accesses, stores, tile, sizes, wide=parts[0].wide)
    return Launch(plan, (total(tile.grids), 1, 1))


def total(grids: Sequence[tuple[Size, Size]]) -> Size:
    """Programs of all parts."""
    out: Size = 0
    for x, y in grids:
        out = _sum(out, _product(x, y))
    return out


def _product(x: Size, y: Size) -> Size:
    if isinstance(x, int) and isinstance(y, int):
        return x * y
    return x if y == 1 else y if x == 1 else ("mul", x, y)


def _sum(x: Size, y: Size) -> Size:
    if isinstance(x, int) and isinstance(y, int):
        return x + y
    return y if x == 0 else ("add", x, y)


def _outside(parts: Sequence[KernelPlan]) -> tuple[tuple[Access, ...], tuple[Stmt, ...]]:
    """What the parts touch in memory, in a space of the longest rank, and the stores among it."""
    accesses: list[Access] = []
    stores: list[Stmt] = []
    rank = max(len(p.space) for p in parts)
    for part in parts:
        halves = (part.chain.head, part) if part.chain else (part,)
        written = {a for p in halves for a in _stored(p)}
        for access in (*part.operands, *part.accesses):
            if access.buffer == INDEX:
                continue
            while len(access.strides) < rank:
                access = access.led()
            accesses.append(access)
            if access.buffer in {a.buffer for a in written}:
                stores.append(Store(len(accesses) - 1, ""))
    return tuple(accesses), tuple(stores)
