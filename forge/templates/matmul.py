"""Contractions: a tiled product with what follows folded in, or a library call.

Weight gradients have a long contracted axis and few output tiles: their sum is split in a fixed number of
parts, written in float32 and added in ascending order by a second kernel, which then runs the epilogue.
"""

from __future__ import annotations

from dataclasses import replace

from esper_ir.diagnostics import EsperError
from esper_ir.graph import Graph, Node
from esper_ir.types import Dim, DType
from forge.body import collapse
from forge.groups import lowering_kind
from forge.lowered import DESCRIPTOR_BYTES, Launch, Lowered, Temp, ceildiv, size_of, symbols
from forge.plan import (
    Access,
    KernelPlan,
    Load,
    MatmulSpec,
    MatmulTile,
    Reduce,
    Stmt,
    Store,
    SumTile,
    next_pow2,
)
from forge.target import Target
from forge.templates.choice import NARROW
from forge.templates.rows import RowsInput
from forge.views import ONE, View

ZERO = Dim()
FILL = 128  # output tiles below which the contracted axis is split
HALF = 40  # tiles of 64 x 64 from which half of one is enough for each


def lower(given: RowsInput, views: dict[str, View]) -> Lowered:
    """The product and its epilogue as kernels."""
    node = given.group.contraction
    assert node is not None
    a, b = (views[v] for v in node.tensors[:2])
    space, accesses = two_axes(given, a)
    depth = a.shape[-1]
    m, n = space
    kinds = [given.graph.types[v.base].dtype for v in (a, b)]
    second, name = given.group.second, node.id
    spec = MatmulSpec(
        Access(a.base, kinds[0], left(a), offset=a.offset), _right(b, kinds[1]), depth, precision(node)
    )
    if second is not None:
        name = both(node.id, second.id)
        spec = replace(spec, second=_right(views[second.tensors[1]], kinds[1]))
    counts = (m.value(given.sizes), n.value(given.sizes), depth.value(given.sizes))
    prior = prior_of(*counts, kinds[0].itemsize, independent(node, given.graph), second is not None)
    tile = given.choose(space, accesses, prior, spec, name)
    if tile.descriptors and not describable(given.target, spec):
        tile = replace(tile, descriptors=False)
    tiles = ceildiv(m, tile.block_m) * ceildiv(n, tile.block_n)
    if second is not None or tile.split_k < _least_split(space, accesses):
        tile = replace(tile, split_k=1)
        plan = _plan(given, space, accesses, given.body.stmts, tile, spec)
        step, temps = _launch(plan, tiles, node.id)
        return Lowered("matmul" if second is None else "matmul dual", (step,), temps)
    return _split(given, space, accesses, tile, spec, tiles)


def both(first: str, second: str) -> str:
    """Name of two products that are one kernel, among the tiles that came with a product's way."""
    return f"{first}+{second}"


def _right(b: View, kind: DType) -> Access:
    return Access(b.base, kind, (b.strides[-2], b.strides[-1]), offset=b.offset)


def two_axes(given: RowsInput, a: View) -> tuple[tuple[Dim, Dim], list[Access]]:
    """The group's space as (m, n): leading axes merge because the left operand walks them as one."""
    rank = len(given.group.space)
    space, accesses = collapse(given.group.space, given.body.accesses, rank - 1)
    narrow = given.group.space[-1] == ONE
    if len(space) - (0 if narrow else 1) > 1:
        raise EsperError(
            "E0533", "an operand of the epilogue keeps the leading axes apart", node=given.group.name,
            hint="esper-forge explain shows the group",
        )  # fmt: skip
    while len(space) < 2:
        outer = len(space) == 1 and not narrow
        space = (ONE, *space) if outer else (*space, ONE)
        accesses = [x.led() if outer else replace(x, strides=(*x.strides, ZERO)) for x in accesses]
    return (space[0], space[1]), accesses


def left(a: View) -> tuple[Dim, Dim]:
    """Strides of a left operand along its rows, whose leading axes it walks as one, and along the contracted
    axis. An axis of one has none that counts.
    """
    steps = [step for size, step in zip(a.shape[:-1], a.strides, strict=False) if size != ONE]
    return steps[-1] if steps else ZERO, a.strides[-1]


def precision(node: Node) -> str:
    """How the tensor cores multiply float32: as the node says."""
    named = dict(node.attrs).get("precision", "ieee")
    return {"bf16x3": "bf16x3", "tf32": "tf32"}.get(str(named), "ieee")


def _plan(
    given: RowsInput, space: tuple[Dim, Dim], accesses: list[Access], stmts: list[Stmt], tile: MatmulTile,
    spec: MatmulSpec,
) -> KernelPlan:  # fmt: skip
    walked = (*accesses, *spec.operands)
    used = symbols(*space, spec.k, *(s for x in walked for s in x.dims))
    return KernelPlan(
        given.name, space, tuple(accesses), tuple(stmts), tile, used, spec, wide=far(given, space, spec.k)
    )


def _launch(plan: KernelPlan, tiles: Dim, node: str) -> tuple[Launch, dict[str, Temp]]:
    """A program per tile and part of the sum, with memory for the descriptors that each of them makes."""
    tile = plan.tile
    assert isinstance(tile, MatmulTile)
    grid = (size_of(tiles), tile.split_k, 1)
    if not tile.descriptors:
        return Launch(plan, grid), {}
    name, each = f"{node}:descriptors", 2 * DESCRIPTOR_BYTES // DType.float32.itemsize
    return Launch(plan, grid, name), {name: Temp(DType.float32, (tiles * tile.split_k, Dim.of(each)))}


def describable(target: Target, spec: MatmulSpec) -> bool:
    """Whether tensor descriptors can name the operands: dense rows of 16-bit values at steps of 16 bytes that
    are known when the kernel is built."""
    single = target.kind == "cuda" and target.capability >= 90 and spec.second is None
    return single and all(map(_dense, spec.operands))


def _dense(access: Access) -> bool:
    steps = sorted((s.static or 0) for s in access.strides)
    plain = access.offset == ZERO and not access.windows and access.table is None
    return plain and access.dtype.itemsize == 2 and steps[0] == 1 and steps[1] > 1 and steps[1] % 8 == 0


def far(given: RowsInput, space: tuple[Dim, Dim], depth: Dim, split: int = 1) -> bool:
    """Whether an address may lie past 31 bits, those of the parts of a `split` sum among them."""
    ranges = {n: (s.min, s.max) for n, s in given.graph.dims.items()}
    pairs = (space[0] * space[1] * split, space[0] * depth, depth * space[1])
    highs = [p.bounds(ranges)[1] for p in pairs]
    return any(h is None or h + 2**20 >= 2**31 for h in highs)


def independent(node: Node, graph: Graph) -> int:
    """Other products that neither make its operands nor read its result: they may run beside it."""
    before, behind = set(node.tensors), set(node.outputs)
    for other in reversed(list(graph)):
        if before & set(other.outputs):
            before |= set(other.tensors)
    for other in graph:
        if behind & set(other.tensors):
            behind |= set(other.outputs)
    products = [n for n in graph if lowering_kind(n) == "contraction"]
    return sum(not (before | behind) & set(n.outputs) for n in products)


def prior_of(m: int, n: int, k: int, itemsize: int, beside: int, two: bool = False) -> MatmulTile:
    """The tile where nothing was measured. For `two` products of one left operand that of either where such
    tiles fill a card; else half of that of one product with the columns of both, which has as many programs.
    Both accumulators and an epilogue fit the registers. `split_k` is over 1 where the two are better done
    apart, each in parts.
    """
    if not two:
        return _tile(m, n, k, itemsize, beside)
    each = _tile(m, n, k, itemsize, beside - 1)
    if each.split_k > 1 or -(-m // each.block_m) * -(-n // each.block_n) < FILL:
        each = _tile(m, 2 * n, k, itemsize, beside - 1)
        return replace(each, block_n=max(each.block_n // 2, 16))
    wide = each.block_m * each.block_n >= 64 * 128
    narrow = min(each.block_n, max(64 * 128 // each.block_m, 16))
    return replace(each, block_n=narrow, warps=8 if wide else each.warps)


def _tile(m: int, n: int, k: int, itemsize: int, beside: int) -> MatmulTile:
    """A prior by shape: tiles no larger than the product, the contracted axis split when tiles cannot fill a
    card.
    """
    # A short contraction is all epilogue: small tiles keep its unrolled code, which a cold cache must fetch,
    # short.
    narrow = min(m, n) <= NARROW
    small = _unsplit(m, n, k, beside) if itemsize == 2 and not narrow else None
    if small is not None:
        return small
    wide = 128 if k > 512 and max(m, n if narrow else 0) >= 4096 else 64
    block_n = min(max(next_pow2(n), 16), wide)
    block_m = min(max(next_pow2(m), 16), wide)
    block_k = min(max(next_pow2(k), 16), 64 if itemsize == 2 else 32)
    tiles = -(-m // block_m) * -(-n // block_n)
    split = 1
    while tiles * split < (2 * FILL if narrow else FILL) and k // (split * 2) >= 4 * block_k:
        split *= 2
    warps = 8 if block_m * block_n >= 128 * 128 else 4
    return MatmulTile(block_m, block_n, block_k, warps, 3 if k // split >= 4 * block_k else 2, 8, split)


def _unsplit(m: int, n: int, k: int, beside: int) -> MatmulTile | None:
    """Smaller tiles where those of 64 x 64 leave a card half empty, measured on an H200: up to 2,048 terms
    they take less time than a sum in parts and the kernel that adds these up. Products `beside` this one fill
    the card with larger tiles, which read less. None elsewhere.
    """
    tiles = -(-m // 64) * -(-n // 64)
    if FILL // 2 <= tiles < FILL and beside >= 2 and k <= 1024:
        return MatmulTile(64, 64, 64, 4, 3)
    rows, cols, stages = (64, 32, 3) if tiles >= HALF else (32, 32, 4)
    few = -(-m // rows) * -(-n // cols) < 64
    if not 256 < k <= (1024 if few else 2048) or tiles >= FILL:
        return None
    return MatmulTile(min(rows, next_pow2(m)), min(cols, next_pow2(n)), 128, 4, stages)


def _split(
    given: RowsInput,
    space: tuple[Dim, Dim],
    accesses: list[Access],
    tile: MatmulTile,
    spec: MatmulSpec,
    tiles: Dim,
) -> Lowered:
    node = given.group.contraction
    assert node is not None
    buffer = f"{node.id}:parts"
    kind = spec.a.dtype.compute
    m, n = space
    flat = m * n
    part = Access(buffer, kind, (n, ONE), partial=True)
    wide = far(given, space, spec.k, tile.split_k)
    first = replace(_plan(given, space, [part], [Store(0, "acc")], tile, spec), wide=wide)
    stmts: list[Stmt] = [Load("part", 0), Reduce("acc", "part", "sum", "col"), *given.body.stmts]
    shifted = [Store(s.access + 1, s.value) if isinstance(s, Store) else s for s in stmts[2:]]
    shifted = [Load(s.name, s.access + 1) if isinstance(s, Load) else s for s in shifted]
    outs = [x.led() for x in _as_one(space, accesses)]
    block = 256
    total = KernelPlan(
        given.name + "_sum", (Dim.of(tile.split_k), flat), (Access(buffer, kind, (flat, ONE)), *outs),
        (*stmts[:2], *shifted), SumTile(min(tile.split_k, 16), block, 4),
        symbols(flat, *(d for x in outs for d in x.dims)), wide=wide,
    )  # fmt: skip
    step, temps = _launch(first, tiles, node.id)
    steps = (step, Launch(total, (size_of(ceildiv(flat, block)), 1, 1)))
    return Lowered("matmul split", steps, {buffer: Temp(kind, (Dim.of(tile.split_k), flat)), **temps})


def _least_split(space: tuple[Dim, Dim], accesses: list[Access]) -> int:
    """Parts from which the sum is worth a kernel. An epilogue that does not walk both axes as one is slower
    there; one that reads windows cannot be done there.
    """
    if any(x.windows for x in accesses):
        return 1 << 30
    return 2 if len(collapse(space, accesses, None)[0]) == 1 else 4


def _as_one(space: tuple[Dim, Dim], accesses: list[Access]) -> list[Access]:
    """Both axes of the epilogue as one; what does not lie along them as one run is found by quotient and
    rest.
    """
    joined, walked = collapse(space, accesses, None)
    if len(joined) == 1:
        return walked
    apart = [() if a.strides[0] == a.strides[1] * space[1] else (*zip(space, a.strides, strict=True),)
             for a in accesses]  # fmt: skip
    return [replace(a, strides=a.strides[1:], parts=parts) for a, parts in zip(accesses, apart, strict=True)]
