"""Two products that pointwise work joins as one kernel: when, what it means, its choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from esper_ir.builder import Builder, Value
from esper_ir.graph import Blueprint
from forge.emit.triton import emit
from forge.explain import explain, group_flops, render
from forge.horizontal import Phase
from forge.lower import Kernels, PhaseLowering
from forge.lowered import Launch
from forge.pass_manager import run
from forge.pipelines import FAST
from forge.plan import JoinedTile, KernelPlan, MatmulTile, ProductWay, Store
from forge.service import front
from forge.target import resolve
from forge.templates.matmul import FILL, prior_of
from forge.templates.ways import way_of_tile
from forge.toolchain import build
from forge.tune import priors, search, space
from forge.tune.journal import Choices, read
from forge.tune.products import DUAL, LIBRARY, OWN, way_sites
from forge.tune.shapes import shape_of
from forge.tune.tiles import tile_of, tile_row
from forge.work import Work
from tests.forge.whole import Machine, check, close, compared

Join = Callable[[Builder, Value, Value], Value]


def gated(
    join: Join | None = None, sizes: tuple[int, int, int] = (64, 40, 56), kind: str = "bfloat16", *,
    bias: bool = False, others: tuple[str, ...] = (),
) -> Blueprint:  # fmt: skip
    """join(x g, x u) of `sizes` (rows to tune for, depth, columns), and what `others` names: results too."""
    rows, depth, cols = sizes
    b = Builder("gated")
    b.dim("rows", min=1, max=8192, tune=(rows,))
    x = b.input("x", kind, ["rows", depth])
    g, u = (b.matmul(x, b.param(f"w{n}", kind, [depth, cols])) for n in "gu")
    if bias:
        g, u = (b.add(v, b.param(f"b{n}", kind, [cols])) for n, v in (("g", g), ("u", u)))
    named = {"g": g, "u": u}
    return b.build((join or swiglu)(b, g, u), *(named[n] for n in others))


def swiglu(b: Builder, g: Value, u: Value) -> Value:
    return b.mul(b.silu(g), u)


def geglu(b: Builder, g: Value, u: Value) -> Value:
    return b.mul(u, b.gelu(g))


def planned(blueprint: Blueprint, given: dict[str, Any] | None = None, target: str = "h100") -> Work:
    steps = tuple(s for s in FAST.steps if s[0] not in ("build", "package"))
    kernels = Kernels(choices=Choices(given or {}, priors=priors.NOTHING))
    return run(replace(FAST, steps=steps), Work(blueprint, resolve(target), "fast", kernels=kernels))


def phase(work: Work, name: str) -> PhaseLowering:
    return next(low for low in work.lowerings if low.phase.name == name)


def plans(low: PhaseLowering) -> list[KernelPlan]:
    """Kernels of a phase, those beside each other one by one."""
    made = [s.plan for _, lowered in low.lowered for s in lowered.steps if isinstance(s, Launch)]
    return [p for plan in made for p in (plan.tile.parts if isinstance(plan.tile, JoinedTile) else (plan,))]


def duals(low: PhaseLowering) -> list[KernelPlan]:
    return [p for p in plans(low) if p.matmul is not None and p.matmul.second is not None]


def written(plan: KernelPlan) -> int:
    return sum(isinstance(s, Store) for s in plan.body)


# When ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("join", [swiglu, geglu])
@pytest.mark.parametrize("bias", [False, True])
def test_forward_and_inference_are_one_kernel(join: Join, bias: bool) -> None:
    work = planned(gated(join, bias=bias))
    for name, stores in (("inference", 1), ("forward", 3)):
        (plan,) = plans(phase(work, name))
        assert duals(phase(work, name)) == [plan] and written(plan) == stores
        text = emit(plan)
        assert text.count("tl.dot(a, ") == 2 and text.count(" a = tl.load(") == 1
    assert not any(duals(low) for low in work.lowerings if low.phase.name == "backward")


def test_what_somebody_else_reads_is_stored_too() -> None:
    (plan,) = plans(phase(planned(gated(others=("u",))), "inference"))
    assert duals(phase(planned(gated(others=("u",))), "inference")) == [plan] and written(plan) == 2


def test_explain_names_it_and_counts_both_products() -> None:
    work = planned(gated(sizes=(64, 40, 56)))
    document = explain(work)
    (group,) = document["phases"][0]["groups"]
    assert group["template"] == "matmul dual" and "matmul dual" in render(document)
    low = phase(work, "inference")
    products = 2 * 2 * 64 * 40 * 56
    assert group_flops(low.parts.graph, low.lowered[0][0], {"rows": 64}) == products <= group["flops"]


def no_pair(kind: str) -> Blueprint:
    """Two products that are not made together, each for another reason."""
    b = Builder("apart")
    b.dim("rows", min=1, max=8192, tune=(64,))
    x, z = (b.input(n, "bfloat16", ["rows", 40]) for n in "xz")
    wide = {"columns": 72, "in a row": 40}.get(kind, 56)
    g = b.matmul(x, b.param("wg", "bfloat16", [40, 56 if kind != "in a row" else 40]))
    if kind == "steps":
        turned = b.permute(b.param("wu", "bfloat16", [wide, 40]), dims=(1, 0))
        return b.build(b.mul(b.silu(g), b.matmul(x, turned)))
    left = {"left": z, "in a row": b.silu(g)}.get(kind, x)
    u = b.matmul(left, b.param("wu", "bfloat16", [40, wide]))
    if kind in ("columns", "not joined"):
        return b.build(b.silu(g), b.tanh(u))
    return b.build(b.mul(b.silu(g), u))


@pytest.mark.parametrize("kind", ["left", "steps", "columns", "in a row", "not joined"])
def test_other_products_stay_apart(kind: str) -> None:
    work = planned(no_pair(kind))
    assert not any(map(duals, work.lowerings))
    assert any(p.product for p in plans(phase(work, "inference")))


def test_a_sum_over_the_rows_of_one_stands_between_them() -> None:
    def far(b: Builder, g: Value, u: Value) -> Value:
        return b.mul(b.sub(g, b.mean(g, dims=[1], keepdim=True)), u)

    work = check(gated(far), {"rows": 9}, "h100")
    assert not any(map(duals, work.lowerings))


@pytest.mark.parametrize("target", ["t4", "cpu-v3"])
def test_library_products_stay_library_calls(target: str) -> None:
    assert not any(map(duals, planned(gated(kind="float16"), target=target).lowerings))


def test_large_products_stay_with_the_library_unless_measured_otherwise() -> None:
    blueprint = gated(sizes=(8192, 1024, 4096))
    work = planned(blueprint)
    assert not any(map(duals, work.lowerings))
    tile = MatmulTile(128, 64, 64, 8, 3)
    given = dict.fromkeys(work.kernels.drafts, replace(way_of_tile(tile), dual=True))
    (plan,) = duals(phase(planned(blueprint, given), "inference"))
    assert plan.tile == tile


def test_tiles_have_room_for_both_sums() -> None:
    """As many programs as the columns of both would have where few, no more than 64 values a thread."""
    few = prior_of(256, 1024, 512, 2, 1, True)
    assert few.block_m * few.block_n == 64 * 32 and few.split_k == 1
    for m, k, n in ((2048, 256, 768), (4096, 576, 384), (8192, 768, 64), (33, 40, 56), (8192, 1024, 1024)):
        tile = prior_of(m, k=k, n=n, itemsize=2, beside=1, two=True)
        assert tile.block_m * tile.block_n * 2 <= 64 * tile.warps * 32
    assert -(-2048 // 64) * -(-768 // 64) >= FILL and prior_of(2048, 768, 256, 2, 1, True).block_n == 64


def test_sums_in_parts_are_made_apart() -> None:
    work = planned(gated(sizes=(16, 4096, 64)))
    assert not any(map(duals, work.lowerings))
    assert any(p.tile.split_k > 1 for p in plans(phase(work, "inference")) if isinstance(p.tile, MatmulTile))


# What it means ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 37, 64])
@pytest.mark.parametrize(
    "blueprint",
    [gated(), gated(geglu, (64, 41, 27), bias=True), gated(kind="float16", others=("g", "u")),
     gated(lambda b, g, u: b.add(b.mul(b.sigmoid(u), g), b.mul(u, 0.5)))],
)  # fmt: skip
def test_results_are_as_near_to_float64_as_eager(blueprint: Blueprint, rows: int) -> None:
    work = check(blueprint, {"rows": rows}, "h100")
    assert duals(phase(work, "inference")) and duals(phase(work, "forward"))


def test_all_sizes_may_vary() -> None:
    b = Builder("varying")
    for name, tuned in (("rows", 512), ("k", 128), ("n", 256)):
        b.dim(name, min=1, max=1024, tune=(tuned,))
    x, wg, wu = (b.input(n, "bfloat16", list(s)) for n, s in (("x", ("rows", "k")), ("g", "kn"), ("u", "kn")))
    work = check(b.build(swiglu(b, b.matmul(x, wg), b.matmul(x, wu))), {"rows": 33, "k": 17, "n": 21}, "h100")
    (plan,) = duals(phase(work, "inference"))
    assert {"k", "n", "rows"} == set(plan.sizes)


def test_leading_axes_are_walked_as_one() -> None:
    b = Builder("batched")
    b.dim("n", min=1, max=64, tune=(8,))
    x = b.input("x", "bfloat16", ["n", 3, 40])
    g, u = (b.matmul(x, b.param(f"w{n}", "bfloat16", [40, 24])) for n in "gu")
    work = check(b.build(swiglu(b, g, u)), {"n": 5}, "h100")
    assert duals(phase(work, "inference"))


def test_little_ones_begin_beside_each_other_by_the_work_of_both_products() -> None:
    low = phase(planned(gated(sizes=(2048, 256, 768))), "inference")
    (launch,) = [s for _, lowered in low.lowered for s in lowered.steps if isinstance(s, Launch)]
    assert launch.plan.matmul is not None
    single = replace(launch, plan=replace(launch.plan, matmul=replace(launch.plan.matmul, second=None)))
    little = [[Phase([], {"rows": r}, {}, 1 << 20).little(x) for r in (1024, 2048)] for x in (single, launch)]
    assert little == [[True, True], [True, False]]


@pytest.mark.parametrize("target", ["h100", "a100"])
def test_it_is_built_without_spills(target: str) -> None:
    work = planned(gated(geglu, (2048, 256, 768), bias=True), target=target)
    sources = {k: s for k, s in work.kernels.by_key.items() if s.plan.matmul and s.plan.matmul.second}
    made = build(Kernels(by_key=sources), work.target)
    assert len(made.kernels) == len(sources) >= 2
    assert all(k.spills == 0 for k in made.kernels), [(k.name, k.registers, k.spills) for k in made.kernels]


# Its choice ---------------------------------------------------------------------------------------


def test_the_pair_has_one_choice_with_the_way_apart_and_the_library_beside_it() -> None:
    work = planned(gated(sizes=(2048, 256, 768)))
    (key,) = [k for k, (draft, node) in work.kernels.drafts.items() if draft.phase.name == "inference"]
    assert work.kernels.choices.made[key] == (ProductWay(True, dual=True), "rule")
    site = way_sites(work.kernels, {key})[key]
    assert site.sides.keys() == {OWN, LIBRARY, DUAL} and site.partner
    counts = {}
    for side in site.sides:
        ways = {key: ProductWay(side[0], dual=side[1])}
        plan, kernels = site.plan(Choices(ways, priors=priors.NOTHING))
        counts[side] = (len(plan.steps), len(kernels.by_key))
        assert set(site.values) <= {b.name for b in plan.buffers}
    assert counts == {DUAL: (1, 1), OWN: (2, 2), LIBRARY: (3, 1)}, "both products go to the library"
    tile = MatmulTile(64, 128, 64, 4, 3)
    _, kernels = site.plan(Choices({key: replace(way_of_tile(tile), dual=True)}))
    assert [s.plan.tile for s in kernels.by_key.values()] == [tile]
    (hunt,) = [h for h in search.subjects(work.kernels)[0] if h.key == key]
    assert not hunt.idle and set(space.neighbours(hunt.prior, hunt.idle)) >= {
        ProductWay(True),
        ProductWay(False),
    }


def test_others_are_not_tried_as_one() -> None:
    work = planned(no_pair("left"))
    hunts = [h for h in search.subjects(work.kernels)[0] if isinstance(h.prior, ProductWay)]
    assert hunts and all(h.idle == ("dual",) for h in hunts)
    assert not any(getattr(t, "dual", False) for h in hunts for t in space.neighbours(h.prior, h.idle))


def test_the_tile_of_one_kernel_has_no_parts_and_no_descriptors() -> None:
    work = planned(gated(sizes=(2048, 256, 768)))
    sites = work.kernels.sites
    hunts = [h for h in search.hunts_of(work.kernels) if duals_of(sites[h.key].group)]
    assert hunts and all(h.idle == ("split_k", "descriptors") for h in hunts)
    way = ProductWay(True, 64, 64, 64, 4, 3, 8, 1, dual=True)
    near = list(space.neighbours(way))
    assert all(w.dual and w.split_k < 2 and not w.descriptors for w in near if isinstance(w, ProductWay))
    assert space.fits(way) and not space.fits(replace(way, split_k=2))
    assert not space.fits(replace(way, descriptors=True)) and not space.fits(ProductWay(False, dual=True))
    assert space.fits(replace(way, block_m=128, block_n=128, warps=8, dual=False))
    assert not space.fits(replace(way, block_m=128, block_n=256, warps=8))
    assert space.distance(way, replace(way, dual=False)) == 1


def duals_of(group: Any) -> bool:
    return group.second is not None


def test_parts_and_descriptors_that_a_journal_asks_for_are_left_out() -> None:
    blueprint = gated(sizes=(2048, 256, 768))
    tile = MatmulTile(64, 64, 64, 4, 3, 8, 2, True)
    keys = [k for k, (t, _) in planned(blueprint).kernels.choices.made.items() if isinstance(t, MatmulTile)]
    (plan,) = duals(phase(planned(blueprint, dict.fromkeys(keys, tile)), "inference"))
    assert plan.tile == replace(tile, split_k=1, descriptors=False)


def test_older_journals_are_read_and_mean_what_they_meant() -> None:
    later = ("descriptors", "dual")
    values: dict[str, Any] = {n: int(v) for n, v in asdict(ProductWay(True)).items() if n not in later}
    old = {"kind": "ProductWay", "tile": {**values, "own": True, "descriptors": False}}
    assert tile_of("k", old) == ProductWay(True) and tile_row(ProductWay(True)) == old
    row = tile_row(ProductWay(True, dual=True))
    assert row["tile"]["dual"] is True and tile_of("k", row) == ProductWay(True, dual=True)
    blueprint = gated(sizes=(2048, 256, 768))
    keys = planned(blueprint).kernels.drafts
    given = read({"schema": "esper-journal/1", "choices": dict.fromkeys(keys, old)}).given
    work = planned(blueprint, dict(given))
    assert not any(map(duals, work.lowerings)), "measured apart"
    assert len(plans(phase(work, "inference"))) == 2


def test_a_choice_is_replayed() -> None:
    work = planned(gated())
    again = planned(gated(), {k: t for k, (t, _) in work.kernels.choices.made.items()})
    assert duals(phase(again, "inference")) == duals(phase(work, "inference"))
    assert again.kernels.choices.to_json() == work.kernels.choices.to_json()


def test_keys_of_single_products_are_those_of_before() -> None:
    """What keys are made from does not name what a single product has not."""
    (plan,) = duals(phase(planned(gated()), "inference"))
    assert plan.matmul is not None
    single = replace(plan.matmul, second=None)
    assert repr(single) == repr(plan.matmul)
    work = (plan.space, plan.accesses, plan.body)
    families = [shape_of("sm_90a", *work, spec, {"rows": 64}).family for spec in (single, plan.matmul)]
    assert families[0] != families[1] and "acc2" in str(plan.body) and "acc2 = matmul" in str(plan)
    other = replace(plan, matmul=single)
    assert other.digest != plan.digest


def test_a_pair_that_is_asked_for_where_there_is_none_keeps_the_templates_tile() -> None:
    blueprint = no_pair("left")
    keys = planned(blueprint).kernels.drafts
    way = replace(way_of_tile(MatmulTile(16, 16, 16, 2, 2)), dual=True)
    work = planned(blueprint, dict.fromkeys(keys, way))
    found, wide, eager = compared(work, Machine(work), {"rows": 9})
    assert all(close(found[n], wide[n], eager[n]) for n in found)
    assert MatmulTile(16, 16, 16, 2, 2) not in [p.tile for low in work.lowerings for p in plans(low)]
    assert front(blueprint, "h100").kernels.drafts
