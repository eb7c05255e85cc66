"""ChainTile: two products in a row. What lies between them never leaves the program."""

from __future__ import annotations

from dataclasses import replace

from forge.emit.triton_base import Kernel, statement
from forge.emit.triton_scalars import TRITON_TYPE
from forge.emit.writer import dim_text
from forge.plan import Access, ChainTile, Compute, KernelPlan, Load, Stmt, next_pow2


def chains(k: Kernel, tile: ChainTile) -> None:
    """A program owns `block_m` rows and reads the right operands whole; they are small and stay in the L2."""
    chain = k.plan.chain
    assert chain is not None
    w, wide, n = k.w, f".to({k.index_type})", dim_text(k.plan.cols)
    inner = chain.head.cols.value({})
    w.line(f"row = (tl.program_id(0){wide} * {tile.block_m} + tl.arange(0, {tile.block_m}))[:, None]")
    w.line(f"mid = tl.arange(0, {_width(inner)}){wide}[None, :]")
    w.line(f"deep = tl.arange(0, {_width(inner)}){wide}[:, None]")
    w.line(f"row_ok = row < {dim_text(k.plan.space[0])}")
    w.line(f"mid_ok = mid < {inner}")
    early, late = _apart(k)
    if loads_first(k.plan, tile):
        _columns(k, tile, "0")
        _loads(k, early, late)
        _head(k, tile, loaded=True)
        _second(k, [s for s in late if not isinstance(s, Load)])
        return
    _head(k, tile)
    for s in early:
        statement(k, s, ["row", "0"], {"r": "row_ok"})
    with w.block(f"for n0 in tl.range(0, {n}, {tile.block_n}, num_stages={tile.stages}):"):
        _columns(k, tile, "n0")
        _right(k)
        _second(k, late)


def loads_first(plan: KernelPlan, tile: ChainTile) -> bool:
    """Whether all that a program needs is asked for before anything is computed: each wait for memory that
    comes later costs as much as the first. Where one block holds it all, and `stages` is 1.
    """
    depth = plan.chain.head.matmul.k.static if plan.chain and plan.chain.head.matmul else None
    n = plan.cols.static
    once = depth is not None and n is not None and depth <= tile.block_k and n <= tile.block_n
    return once and tile.stages == 1


def _columns(k: Kernel, tile: ChainTile, first: str) -> None:
    k.w.line(f"col = ({first} + tl.arange(0, {tile.block_n})).to({k.index_type})[None, :]")
    k.w.line(f"col_ok = col < {dim_text(k.plan.cols)}")


def _right(k: Kernel) -> None:
    chain = k.plan.chain
    assert chain is not None
    inside = f"(deep < {chain.head.cols.value({})}) & col_ok"
    k.w.line(f"right = {dot_operand(k, chain.b, ['deep', 'col'], inside)}")


def _loads(k: Kernel, early: list[Stmt], late: list[Stmt]) -> None:
    for s in early:
        statement(k, s, ["row", "0"], {"r": "row_ok"})
    _right(k)
    for s in late:
        if isinstance(s, Load):
            statement(k, s, ["row", "col"], {"r": "row_ok", "c": "col_ok"})


def _second(k: Kernel, body: list[Stmt]) -> None:
    assert k.plan.chain is not None
    k.w.line(f'acc = tl.dot(left, right, input_precision="{k.plan.chain.precision}")')
    for s in body:
        statement(k, s, ["row", "col"], {"r": "row_ok", "c": "col_ok"})


def _width(inner: int) -> int:
    return max(next_pow2(inner), 16)


def _head(k: Kernel, tile: ChainTile, loaded: bool = False) -> None:
    """The first product and its body, up to the left operand of the second; the loads of that body stand
    before the product where it was `loaded` before.
    """
    chain, w = k.plan.chain, k.w
    assert chain is not None
    head = Kernel(chain.head, k.interpreted, w)
    head.pointer, head.fast = k.pointer, k.fast
    # Under a name of its own: Triton lets no name change its shape in a loop.
    head.axes["first"], head.dtypes["first"] = head.axes["acc"], head.dtypes["acc"]
    masks = {"r": "row_ok", "c": "mid_ok"}
    before = [s for s in chain.head.body if loaded and isinstance(s, Load)]
    for s in before:
        statement(head, s, ["row", "mid"], masks)
    _first(k, tile, _width(chain.head.cols.value({})))
    for s in (s for s in chain.head.body if s not in before):
        own = replace(s, args=_own(s.args)) if isinstance(s, Compute) else s
        statement(head, own, ["row", "mid"], masks)
    # Beyond the last column the right operand is zero, but 0 times an infinite or undefined value is not.
    left = f"tl.where(mid_ok, {chain.link}, 0.0)"
    kind = head.dtypes[chain.link]
    w.line(f"left = {left}" if k.interpreted else f"left = ({left}).to({TRITON_TYPE[kind]})")


def _own(args: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("first" if a == "acc" else a for a in args)


def _first(k: Kernel, tile: ChainTile, block_r: int) -> None:
    chain = k.plan.chain
    assert chain is not None and chain.head.matmul is not None
    w, spec, wide = k.w, chain.head.matmul, f".to({k.index_type})"
    depth = dim_text(spec.k)
    w.line(f"first = tl.zeros([{tile.block_m}, {block_r}], tl.float32)")
    with w.block(f"for k0 in tl.range(0, {depth}, {tile.block_k}, num_stages={tile.stages}):"):
        w.line(f"ka = (k0 + tl.arange(0, {tile.block_k})){wide}[None, :]")
        w.line(f"kb = (k0 + tl.arange(0, {tile.block_k})){wide}[:, None]")
        w.line(f"a = {dot_operand(k, spec.a, ['row', 'ka'], f'row_ok & (ka < {depth})')}")
        w.line(f"b = {dot_operand(k, spec.b, ['kb', 'mid'], f'(kb < {depth}) & mid_ok')}")
        w.line(f'first = tl.dot(a, b, first, input_precision="{spec.precision}")')


def _apart(k: Kernel) -> tuple[list[Stmt], list[Stmt]]:
    """Loads that are the same for all columns, once; the rest for every block of them."""
    early = [s for s in k.plan.body if isinstance(s, Load) and "c" not in k.axes[s.name]]
    return list(early), [s for s in k.plan.body if s not in early]


def dot_operand(k: Kernel, access: Access, index: list[str], mask: str) -> str:
    """Operands of a dot keep their stored type (the tensor cores' own), except in the interpreter."""
    still = "".join(
        f" + {at} * 0" for at, axis in zip(index, range(2), strict=True) if axis not in access.axes
    )
    address = f"{k.pointer[access.buffer]} + {k.offset(access, index)}{still}"
    text = f"tl.load({address}, mask={mask}, other=0)"
    return f"{text}.to(tl.float32)" if k.interpreted else text
