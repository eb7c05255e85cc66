"""Compile plans with the C emitter and call them as the runtime would."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from forge.ctoolchain import compile_c
from forge.emit.c import emit_module
from forge.plan import KernelPlan, PointTile, RowTile, ScanTile, SumTile
from forge.target import Target, resolve


@lru_cache(maxsize=256)
def library(plans: tuple[KernelPlan, ...], target: Target | None = None) -> ctypes.CDLL:
    """The shared object of some plans, loaded."""
    chosen = target or resolve("cpu")
    return load(compile_c(emit_module(plans, chosen), chosen).data)


def load(data: bytes) -> ctypes.CDLL:
    path = Path(mkdtemp()) / "module.so"
    path.write_bytes(data)
    out = ctypes.CDLL(str(path))
    path.unlink()
    path.parent.rmdir()
    return out


def programs(plan: KernelPlan, sizes: Mapping[str, int]) -> int:
    rows, cols = plan.rows.value(sizes), plan.cols.value(sizes)
    tile = plan.tile
    if isinstance(tile, RowTile):
        return tile.programs or -(-rows // tile.rows_per_program)
    if isinstance(tile, PointTile):
        return -(-rows * cols // tile.block)
    if isinstance(tile, ScanTile):
        outer = math.prod(s.value(sizes) for s in plan.space[:-2])
        return outer * -(-cols // tile.block)
    assert isinstance(tile, SumTile)
    return -(-cols // tile.block_cols)


def call(
    code: ctypes.CDLL, plan: KernelPlan, buffers: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> None:
    """Launch `plan` on dense tensors."""
    width = ctypes.c_int64 if plan.wide else ctypes.c_int32
    values: Sequence[ctypes.c_void_p | ctypes.c_int32 | ctypes.c_int64] = [
        *(ctypes.c_void_p(buffers[b].data_ptr()) for b in plan.buffers),
        *(width(sizes[s]) for s in plan.sizes),
    ]
    args = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    one = ctypes.c_int64(1)
    getattr(code, plan.name)(args, ctypes.c_int64(programs(plan, sizes)), one, one)
