"""Rows copied ahead into shared memory, reductions that are one, and a row's softmax from one reading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from esper_ir.builder import Builder as Graphs
from esper_ir.graph import Blueprint
from esper_ir.types import DType
from forge.emit.triton import emit_kernel
from forge.online import joins
from forge.plan import KernelPlan, RowTile
from forge.service import front
from forge.target import resolve, targets
from forge.templates import staged
from forge.toolchain import build_candidates
from forge.tune import candidates, space
from forge.tune.tiles import tile_of, tile_row
from tests.forge.plans import layer_norm
from tests.forge.row_ways import logsumexp, several, softmax
from tests.forge.whole import check

ROOT = Path(__file__).parents[2]
STAGED = RowTile(1, 0, 4096, 8, 132, False, False, 5)


def norm() -> Blueprint:
    b = Graphs("norm")
    b.dim("rows", min=1, max=8192, tune=(8192,))
    x = b.input("x", "float16", ["rows", 4096])
    return b.build(b.layer_norm(x, b.param("w", "float16", [4096]), normalized_shape=[4096]))


def test_every_way_to_walk_rows_means_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.forge.row_ways"], cwd=ROOT, capture_output=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) > 10 and not [row for row in found if row["why"]]


@pytest.mark.parametrize("shape", [[8, 4, 1024], [64, 300, 256], [512, 1024, 64]])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_are_powers_of_two_for_any_number_of_operands(shape: list[int], dtype: str) -> None:
    """Of sums along an axis across memory: no other block compiles."""
    for count in (*range(1, 8), 40):
        b = Graphs("across")
        first, *others = (b.input(f"x{i}", dtype, list(shape)) for i in range(count))
        for other in others:
            first = b.mul(first, other)
        for source in front(b.build(b.sum(first, dims=[1])), "h100").kernels.by_key.values():
            tile = source.plan.tile
            if isinstance(tile, RowTile):
                assert min(tile.block_rows, tile.block_cols) > 0
                assert all(n & (n - 1) == 0 for n in (tile.block_rows, tile.block_cols)), (count, tile)


def loops(plan: KernelPlan, tile: RowTile) -> list[str]:
    text = emit_kernel(replace(plan, tile=tile))
    return [line.strip() for line in text.splitlines() if line.strip().startswith("for ")]


def test_a_row_is_read_once_for_a_maximum_and_the_sum_below_it() -> None:
    plan = softmax()
    once, twice = RowTile(1, 1, 8, 1, stages=3, online=True), RowTile(1, 1, 8, 1, stages=3)
    assert joins(plan) and joins(logsumexp()) and not joins(several())
    assert len(loops(logsumexp(), twice)) == 2 and len(loops(logsumexp(), once)) == 1
    assert len(loops(plan, twice)) == 3 and len(loops(plan, once)) == 2, "the quotients are one more"
    assert all("num_stages=3" in line for line in loops(plan, once))


def test_a_row_is_read_once_for_its_mean_and_the_squares_about_it() -> None:
    plan = layer_norm(20, DType.float32)
    once, twice = RowTile(1, 1, 4, 1, prefetch=True, online=True), RowTile(1, 1, 4, 1, prefetch=True)
    assert joins(plan) and len(loops(plan, twice)) == 3 and len(loops(plan, once)) == 2
    assert len(loops(plan, replace(once, block_cols=8))) == 3 + 3, "of a block in part the count is another"


def test_reductions_of_one_depth_are_one_where_nothing_was_loaded_ahead() -> None:
    def reductions(tile: RowTile) -> list[str]:
        text = emit_kernel(replace(several(), tile=tile))
        return [line.split("=")[0].strip() for line in text.splitlines() if "tl.reduce(" in line]

    whole = RowTile(1, 1, 32, 1)
    # A row of weights is by itself.
    assert [len(names.split(",")) for names in reductions(whole)] == [3, 2, 1]
    ahead = reductions(RowTile(1, 2, 32, 1, prefetch=True))
    assert len(ahead) == 6 and all("," not in name for name in ahead)


def test_old_tiles_keep_their_text_and_are_read_again() -> None:
    old = RowTile(1, 4, 4096, 4)
    row = {"kind": "RowTile", "tile": {"block_rows": 1, "rows_per_program": 4, "block_cols": 4096, "warps": 4,
                                       "programs": 0, "reverse": False, "prefetch": False}}  # fmt: skip
    assert "stages" not in repr(old) and "online" not in repr(old)
    assert tile_row(old) == row and tile_of("k", row) == old
    assert tile_of("k", tile_row(STAGED)) == STAGED and "stages=5" in repr(STAGED)


def test_stages_are_tried_where_memory_is_copied_meanwhile() -> None:
    """One or the other of two ways to load ahead; and what fits on chip."""

    def around(tile: RowTile, idle: tuple[str, ...] = ()) -> list[RowTile]:
        return [t for t in space.neighbours(tile, idle) if isinstance(t, RowTile)]

    assert any(t.programs and t.stages > 1 for t in around(RowTile(1, 1, 4096, 8)))
    assert not any(t.stages > 1 or t.programs for t in around(RowTile(1, 1, 64, 1), ("stages",)))
    assert all(not (t.prefetch and t.stages > 1) for t in around(RowTile(2, 0, 4096, 16, 128, True, True)))
    assert not space.fits(replace(STAGED, prefetch=True)) and not space.fits(replace(STAGED, block_rows=8))


def test_a_row_that_only_its_sums_leave_is_not_staged() -> None:
    """Triton would give every thread a row of the copied block, and take minutes for it."""
    b = Graphs("sums")
    b.dim("rows", min=1, max=8192, tune=(8192,))
    x = b.input("x", "float16", ["rows", 4096])
    work = front(replace(b.build(b.sum(x, dims=[1], keepdim=False)), differentiable=()), "h100")
    ((key, site),) = work.kernels.sites.items()
    found = candidates._plan(site, {key: STAGED})
    assert not isinstance(found, str) and [s.plan.tile for s in found[0]] == [replace(STAGED, stages=1)]


def test_rows_that_are_also_added_down_their_columns_are_held_whole() -> None:
    """A sweep would add each block of columns to the one before it, and store none."""
    work = front(norm(), "h100")
    key, site = next((k, s) for k, s in work.kernels.sites.items() if "bwd2" in s.name)
    tile, _ = work.kernels.choices.made[key]
    assert isinstance(tile, RowTile) and "block_cols" in candidates.idle(site, {})
    found = candidates._plan(site, {key: replace(tile, block_cols=tile.block_cols // 2)})
    assert isinstance(found, str) and "E0514" in found and not isinstance(candidates._plan(site, {}), str)


@pytest.mark.parametrize("name", sorted(n for n, t in targets().items() if t.kind in ("cuda", "hip")))
def test_stages_are_as_many_as_a_target_has_room_for(name: str) -> None:
    target = resolve(name)
    work = front(norm(), name)
    key, site = next((k, s) for k, s in work.kernels.sites.items() if s.low.phase.name == "inference")
    found = candidates._plan(site, {key: replace(STAGED, stages=40)})
    assert not isinstance(found, str)
    tiles = {s.plan.tile for s in found[0] if isinstance(s.plan.tile, RowTile)}
    row = 4096 * 2
    assert all(t.stages == 1 or t.stages * row < target.shared_bytes for t in tiles)
    assert {t.stages > 1 for t in tiles} == {target.async_copies}
    rules = [s.plan.tile for s in work.kernels.by_key.values() if isinstance(s.plan.tile, RowTile)]
    assert target.async_copies or all(t.stages == 1 for t in rules)
    assert ("stages" in candidates.idle(site, {})) is not target.async_copies


def gradients(dtype: str, width: int) -> Blueprint:
    b = Graphs("gradients")
    b.dim("rows", min=1, max=65536, tune=(4096,))
    x, w, c = b.input("x", dtype, ["rows", width]), b.param("w", dtype, [width]), b.param("c", dtype, [width])
    return b.build(b.layer_norm(x, w, c, normalized_shape=[width]))


def gate() -> Blueprint:
    b = Graphs("gate")
    b.dim("rows", min=1, max=4096, tune=(1024,))
    x, y = (b.input(name, "float32", ["rows", 2730]) for name in "xy")
    return b.build(b.div(b.mul(b.sqrt(x), y), b.param("w", "float32", [2730])))


def odd_rows() -> Blueprint:
    b = Graphs("odd")
    b.dim("n", min=1, max=64)
    x = b.add(b.input("x", "bfloat16", ["n", 96, 96, 27]), b.param("w", "bfloat16", [27]))
    return b.build(b.relu(b.group_norm(x, num_groups=32)))


SPILLING: list[tuple[Blueprint, int]] = [
    (gradients("float32", 8192), 0), (gradients("bfloat16", 16384), 1024), (gate(), 0), (odd_rows(), 0),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(SPILLING)))
def test_columns_added_beside_rows_have_registers(at: int) -> None:
    """A block under way and one at work fit a thread; rows so long that nothing does spill little of it."""
    blueprint, most = SPILLING[at]
    tiled = [s for s in front(blueprint, "h100").kernels.by_key.values() if isinstance(s.plan.tile, RowTile)]
    sources = [s for s in tiled if s.plan.tile.programs and "bwd2" in s.plan.name]
    made = build_candidates([(s,) for s in sources], resolve("h100"))
    assert made and all(not m.failed and m.kernels[0].spills <= most for m in made)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a100", "b200", "h100", "t4"])
def test_copies_lie_in_shared_memory_and_nothing_spills(name: str) -> None:
    target = resolve(name)
    sources = [s for s in front(norm(), name).kernels.by_key.values() if "bwd2" in s.plan.name]
    (made,) = build_candidates([(sources[0],)], target)
    assert not made.failed and made.kernels[0].spills == 0
    # Four blocks of two operands of a row.
    assert (made.kernels[0].shared >= 4 * 2 * 2 * 4096) is target.async_copies


def test_rows_that_the_cache_keeps_are_read_again() -> None:
    target = resolve("h100")
    assert not staged.lost(target, 2048, 256 << 10) and staged.lost(target, 256, 2 << 20)
    assert not staged.lost(target, 8, 2 << 20), "few rows are all there"


@pytest.mark.parametrize("cols", [32768, 33000])
def test_norms_of_rows_beyond_registers(cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read twice where blocks divide them: for the statistics, and for the result."""
    monkeypatch.setattr(staged, "lost", lambda target, rows, row: True)
    b = Graphs("norm")
    x = b.input("x", "float32", [2, cols])
    work = check(b.build(b.layer_norm(x, normalized_shape=[cols])), {}, "h100")
    (plan,) = [s.plan for s in work.kernels.by_key.values() if s.plan.name.startswith("inf")]
    assert isinstance(plan.tile, RowTile)
    assert plan.tile.online == (cols == 32768) and len(loops(plan, plan.tile)) == (2 if cols == 32768 else 6)
