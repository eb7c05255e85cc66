"""Neighbouring columns that are one (RowTile.unroll_cols): operands as vectors, results side by side.

Windows of neighbours overlap: of eight loads a result, each of them at an address of its own, three vectors
for four results are left, which every thread takes apart in its registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forge.access import INDEX, Access
from forge.emit.triton_base import Kernel
from forge.emit.triton_scalars import TRITON_TYPE, number
from forge.emit.writer import dim_text
from forge.plan import Load, RowTile, Stmt, Store
from forge.views import ZERO

HELPERS = """@triton.jit
def _apart(x):
    a, b = tl.split(x.reshape(x.shape[0], x.shape[1] // 4, 2, 2))
    a, c = tl.split(a)
    b, d = tl.split(b)
    return a, b, c, d


@triton.jit
def _side_by_side(a, b, c, d):
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(a.shape[0], a.shape[1] * 4)


"""
LANES = 4
"""Columns that are one; halved twice."""


def begin(k: Kernel, tile: RowTile, first: str) -> None:
    """`at`: the columns themselves; `first` is the block's first group of them."""
    k.w.line(f"at = ({first}0) * {LANES} + {k.lanes(LANES * tile.block_cols, -1)}")


def statement(k: Kernel, s: Stmt, index: Sequence[str], masks: dict[str, str]) -> bool:
    """Whether the statement is done here: the first load of a vector takes it apart, the store of the last
    neighbour stores all.
    """
    if isinstance(s, Load):
        access = k.plan.accesses[s.access]
        return _in_vector(access) and _load(k, s, access, index, masks)
    return isinstance(s, Store) and _store(k, s, index, masks)


def _in_vector(access: Access) -> bool:
    return access.buffer != INDEX and access.window(len(access.strides) - 1) is not None


def _bare(access: Access) -> Access:
    """Without the last axis."""
    last = len(access.strides) - 1
    windows = tuple(w for w in access.windows if w.axis != last)
    return replace(access, strides=(*access.strides[:-1], ZERO), windows=windows)


def _load(k: Kernel, s: Load, access: Access, index: Sequence[str], masks: dict[str, str]) -> bool:
    window = access.window(len(access.strides) - 1)
    assert window is not None and (window.mul, window.div) == (LANES, 1)
    part, bare = window.add // LANES, _bare(access)
    names = k.vectors.get((bare, part))
    if names is None:
        names = k.vectors[bare, part] = tuple(f"{s.name}_{lane}" for lane in range(LANES))
        place = f"at + {part * LANES}" if part >= 0 else f"at - {-part * LANES}"
        low = f"({place} >= 0)" if part < 0 else ""
        inside = [low, f"({place} < {dim_text(window.size)})", *k.inside(bare, list(index))]
        mask = _both(masks.get("r", ""), *inside)
        where = f"{k.pointer[access.buffer]} + {k.offset(bare, list(index))} + {place}"
        load = f"tl.load({where}, mask={mask}, other={number(access.fill)})"
        k.w.line(f"{', '.join(names)} = _apart({k.widened(access, load)})")
    k.w.line(f"{s.name} = {names[window.add % LANES]}")
    return True


def _store(k: Kernel, s: Store, index: Sequence[str], masks: dict[str, str]) -> bool:
    access, tile = k.plan.accesses[s.access], k.plan.tile
    window = access.window(len(access.strides) - 1)
    group = next((g for g in k.stored if _next(k, g, access)), None)
    if group is None:
        group = []
        k.stored.append(group)
    group.append(s)
    if len(group) < LANES:
        return True
    assert isinstance(tile, RowTile)
    bare = _bare(k.plan.accesses[group[0].access])
    end = f"{LANES} * {dim_text(k.plan.cols)}" if window is None else dim_text(window.size)
    mask = _both(masks.get("r", ""), f"(at < {end})", *k.inside(bare, list(index)))
    shape = f"[{tile.block_rows}, {tile.block_cols}]"
    values = [v.value if k.axes[v.value] == "rc" else f"tl.broadcast_to({v.value}, {shape})" for v in group]
    made = f"(_side_by_side({', '.join(values)})).to({TRITON_TYPE[access.dtype]})"
    k.w.line(
        f"tl.store({k.pointer[access.buffer]} + {k.offset(bare, list(index))} + at, {made}, mask={mask})"
    )
    return True


def _next(k: Kernel, group: list[Store], access: Access) -> bool:
    """Whether the access is to the neighbour of the last of a group."""
    first, last = k.plan.accesses[group[0].access], len(access.strides) - 1
    if len(group) == LANES or replace(_bare(first), offset=ZERO) != replace(_bare(access), offset=ZERO):
        return False
    window = access.window(last)
    if window is None:
        return access.offset == first.offset + len(group)
    return access.offset == first.offset and window.add == len(group)


def _both(*masks: str) -> str:
    return " & ".join(m for m in masks if m)
