"""Plans as C against the plan interpreter: equal bits for arithmetic, ulps where functions are involved."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from esper_ir.diagnostics import EsperError
from esper_ir.scalar import BOOLEAN, INTEGRAL, PRIMITIVES, Arg, Cast, Prim, prim
from esper_ir.types import Dim, DType
from forge.emit.c import emit
from forge.emit.c_across import PART
from forge.emit.c_reduce import LANES
from forge.plan import KernelPlan, MatmulTile, PointTile, RowTile
from forge.target import resolve
from tests.forge import plans as P
from tests.forge.native import call, library, programs
from tests.forge.plan_interpreter import RowSum, interleaved_sum, run_plan, torch_dtype
from tests.forge.plans import BF16, F32, A, B, Builder, tensors

WIDTHS = ((1, F32), (2, F32), (64, F32), (257, F32), (63, BF16), (65, BF16), (257, BF16))
FAMILIES: dict[str, Callable[[int, DType], KernelPlan]] = {
    "rms_forward": P.rms_forward, "rms_backward": P.rms_backward, "layer_norm": P.layer_norm,
    "softmax": P.softmax, "bias_gelu": P.bias_gelu, "broadcast_point": P.broadcast_point,
}  # fmt: skip
GUARD = 5
EXACT = ("rms_forward", "rms_backward", "layer_norm", "broadcast_point")


def renamed(plan: KernelPlan, name: str) -> KernelPlan:
    return KernelPlan(
        name, plan.space, plan.accesses, plan.body, plan.tile, plan.sizes, plan.matmul, plan.wide
    )


def memory(plan: KernelPlan, sizes: dict[str, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """A flat tensor per buffer, as long as the plan reaches, with finite values (outputs included)."""
    space = [s.value(sizes) for s in plan.space]
    count = programs(plan, sizes)
    lengths: dict[str, int] = {}
    for access in plan.accesses:
        reach = 1 + sum((n - 1) * s.value(sizes) for n, s in zip(space, access.strides, strict=True))
        if access.partial:
            reach = count * space[-1]
        lengths[access.buffer] = max(lengths.get(access.buffer, 1), reach)
    dtypes = dict(zip(plan.buffers, plan.buffer_dtypes, strict=True))
    return tensors({b: (n,) for b, n in lengths.items()}, dtypes, seed)


def both(
    plan: KernelPlan, code: object, sizes: dict[str, int], seed: int = 0, row_sum: RowSum | None = None
) -> tuple[dict, dict]:
    """Buffers after the native kernel, and after the interpreter. The native ones lie at odd addresses
    between guards, which must be as they were.
    """
    plain = memory(plan, sizes, seed)
    guarded = {k: torch.cat([torch.full_like(v[:1], 77).expand(GUARD), v] * 2) for k, v in plain.items()}
    native = {k: g[GUARD : GUARD + len(plain[k])] for k, g in guarded.items()}
    before = {k: g.clone() for k, g in guarded.items()}
    call(code, plan, native, sizes)  # type: ignore[arg-type]
    for name, after in guarded.items():
        end = GUARD + len(plain[name])
        assert torch.equal(after[:GUARD], before[name][:GUARD]), f"{plan.name}: written before {name}"
        assert torch.equal(after[end:], before[name][end:]), f"{plan.name}: written behind {name}"
    run_plan(plan, plain, sizes, row_sum=row_sum or interleaved_sum(LANES), libraries=False)
    return native, plain


def symbol(plan: KernelPlan) -> str:
    return plan.sizes[0] if plan.sizes else ""


@pytest.fixture(scope="module")
def families() -> dict[tuple[str, int, DType], tuple[KernelPlan, object]]:
    keys = [(name, width, dtype) for name in FAMILIES for width, dtype in WIDTHS]
    made = tuple(renamed(FAMILIES[n](w, d), f"{n}_{w}_{d.value}") for n, w, d in keys)
    code = library(made)
    return {key: (plan, code) for key, plan in zip(keys, made, strict=True)}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_match_the_interpreter(
    name: str, families: dict[tuple[str, int, DType], tuple[KernelPlan, object]]
) -> None:
    for (width, dtype), count in itertools.product(WIDTHS, (1, 7)):
        plan, code = families[name, width, dtype]
        native, plain = both(plan, code, {symbol(plan): count})
        for buffer in plan.buffers:
            where = f"{plan.name} rows {count}: {buffer}"
            if name in EXACT:
                assert torch.equal(native[buffer], plain[buffer]), where
            else:
                # The function's own 2 ulp, or one unit of the stored type when that crosses a tie.
                limit = 4e-7 if dtype is F32 else 2.0**-7
                torch.testing.assert_close(native[buffer], plain[buffer], rtol=limit, atol=1e-7, msg=where)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("parts", "cols"), [(1, 1), (5, 65), (64, 31)])
def test_second_stage_adds_in_order(dtype: DType, parts: int, cols: int) -> None:
    plan = P.column_sum(cols, dtype)
    native, plain = both(plan, library((plan,)), {"parts": parts})
    assert torch.equal(native["dw"], plain["dw"])


@pytest.mark.parametrize("reverse", [False, True])
def test_programs_that_take_turns(reverse: bool) -> None:
    plan = P.rms_backward(65, F32)
    tile = RowTile(2, 0, 65, 1, programs=4, reverse=reverse)
    turns = KernelPlan("turns", plan.space, plan.accesses, plan.body, tile, plan.sizes)
    for rows in (1, 9, 37):
        native, plain = both(turns, library((turns,)), {"m": rows})
        assert torch.equal(native["dh"], plain["dh"]) and torch.equal(native["part"], plain["part"])


def parted_sum(values: torch.Tensor) -> torch.Tensor:
    """Sums along the rows in ascending order of parts, each in ascending order of its elements."""
    total = torch.zeros_like(values[:, 0])
    for part in values.split(PART, dim=1):
        own = torch.zeros_like(total)
        for column in part.unbind(1):
            own = own + column
        total = total + own
    return total


@pytest.mark.parametrize("beside", [8, 32])
def test_rows_that_lie_side_by_side(beside: int) -> None:
    """Images with channels last: rows of the plan are a step of 1 apart, its columns a whole line. Blocks of
    rows end at the end of an image."""
    made: list[KernelPlan] = []
    for name, cols in itertools.product(("rms_forward", "layer_norm"), (1, 65, 130)):
        plan = FAMILIES[name](cols, BF16)
        n, channels = Dim.of("m"), 13
        steps = {"rc": (channels * cols, 1, channels), "r": (channels, 1, 0), "c": (0, 0, 1)}
        accesses = tuple(
            replace(a, strides=tuple(Dim.of(s) for s in steps[a.letters()])) for a in plan.accesses
        )
        tile = RowTile(beside, 2 * beside, cols, 1)
        space = (n, Dim.of(channels), Dim.of(cols))
        made.append(KernelPlan(f"{name}_{cols}_{beside}", space, accesses, plan.body, tile, plan.sizes))
    code = library(tuple(made))
    for plan, count in itertools.product(made, (1, 5)):
        native, plain = both(plan, code, {"m": count}, row_sum=parted_sum)
        for buffer in plan.buffers:
            assert torch.equal(native[buffer], plain[buffer]), f"{plan.name} {count}: {buffer}"


def test_values_of_a_line_are_computed_once() -> None:
    """A quotient that changes from image to image only, in programs that begin inside one."""
    b = Builder("steady", ("m", 7, 33))
    quotient = b.compute(prim("div", A, 3.0), (b.load_strided("s", BF16, (33, 0, 1)),), BF16)
    b.store(b.compute(prim("add", A, B), (b.load("x", BF16), quotient), BF16), "y", BF16)
    plan = b.plan(RowTile(1, 5, 64, 1), ("m",))
    assert "if (i == first || i1 == 0)" in emit(plan, resolve("cpu-v3"))
    code = library((plan,))
    for count in (1, 4):
        native, plain = both(plan, code, {"m": count})
        assert torch.equal(native["y"], plain["y"])


def test_backward_matches_autograd() -> None:
    """The two stages together are the gradient of the norm that torch computes in float64."""
    rows, cols = 37, 65
    main, second = P.rms_backward(cols, F32), P.column_sum(cols, F32)
    code = library((main, second))
    data = tensors(dict.fromkeys(("x", "r", "g"), (rows, cols)), dict.fromkeys(("x", "r", "g"), F32))
    data["w"] = torch.linspace(0.5, 1.5, cols)
    x, r, w = (data[n].double().requires_grad_() for n in ("x", "r", "w"))
    rstd = ((x + r).pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    ((x + r) * rstd * w * data["g"].double()).sum().backward()
    data |= {"rstd": rstd.detach().float().flatten(), "dh": torch.zeros(rows, cols)}
    data |= {"part": torch.zeros(10, cols), "dw": torch.zeros(cols)}
    call(code, main, data, {"m": rows})
    call(code, second, data, {"parts": 10})
    assert x.grad is not None and w.grad is not None
    torch.testing.assert_close(data["dh"], x.grad.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(data["dw"], w.grad.float(), rtol=1e-5, atol=1e-5)


# Scalar primitives

OURS = (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log1p",
    "tanh",
    "erf",
    "sin",
    "cos",
    "pow",
    "sigmoid",
    "rsqrt",
)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38, 88.8]


def scalar_plan(name: str, dtype: DType) -> KernelPlan:
    """One primitive over a vector; the result of a comparison is stored as bool."""
    b = Builder(f"{name}_{dtype.value}", ("n",))
    kinds = [DType.bool if name in ("and", "or", "xor", "not") else dtype] * PRIMITIVES[name]
    if name == "where":
        kinds[0] = DType.bool
    args = tuple(b.load(f"a{i}", kind) for i, kind in enumerate(kinds))
    result = DType.bool if name in BOOLEAN else dtype
    b.store(b.compute(Prim(name, tuple(Arg(i) for i in range(len(args)))), args, result), "y", result)
    return b.plan(PointTile(64, 1), ("n",))


def operands(plan: KernelPlan) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)), dtype=torch.float64)
    random = torch.randn((400, 2), generator=gen, dtype=torch.float64) * 4
    values = torch.cat([pairs, random]).T.contiguous()
    out = {}
    for at, (buffer, dtype) in enumerate(zip(plan.buffers, plan.buffer_dtypes, strict=True)):
        column = values[min(at, 1)] if at < 2 else values[0].flip(0)
        whole = column.nan_to_num(3.0, 5.0, -5.0).clamp(-9, 9).round()
        out[buffer] = (column if dtype.is_floating else whole).to(torch_dtype(dtype))
    return out


def ulps(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest distance in units of the last place; NaN and infinities must agree."""
    assert torch.equal(found.isnan(), wanted.isnan())
    same = (found == wanted) | found.isnan()
    apart, near = found[~same].double(), wanted[~same]
    assert bool(apart.isfinite().all()) and bool(near.isfinite().all()), (apart, near)
    tiny = torch.finfo(near.dtype).tiny
    step = torch.nextafter(near.abs().clamp_min(tiny), torch.full_like(near, torch.inf)).double()
    gap = (apart - near.double()).abs() / (step - near.abs().clamp_min(tiny).double())
    return float(gap.max()) if len(gap) else 0.0


FLOATS = (F32, BF16, DType.float64)
INTEGER = ("neg", "abs", "sign", "add", "sub", "mul", "maximum", "minimum", "eq", "lt", "ge", "where", "fmod",
           *sorted(INTEGRAL))  # fmt: skip


@pytest.fixture(scope="module")
def scalars() -> tuple[object, dict[str, KernelPlan]]:
    made = [scalar_plan(name, dtype) for name in PRIMITIVES if name not in INTEGRAL for dtype in FLOATS]
    made += [
        scalar_plan(name, dtype) for name in INTEGER for dtype in (DType.int32, DType.int64, DType.uint8)
    ]
    return library(tuple(made)), {p.name: p for p in made}


def run_scalar(scalars: tuple[object, dict[str, KernelPlan]], key: str) -> tuple[torch.Tensor, torch.Tensor]:
    code, made = scalars
    plan = made[key]
    data = operands(plan)
    if key.startswith("fmod") and not plan.buffer_dtypes[0].is_floating:
        data["a1"] = torch.where(data["a1"] == 0, 7, data["a1"])
    plain = {k: v.clone() for k, v in data.items()}
    sizes = {"n": len(data["y"])}
    call(code, plan, data, sizes)  # type: ignore[arg-type]
    run_plan(plan, plain, sizes, libraries=False)
    return data["y"], plain["y"]


@pytest.mark.parametrize("name", [p for p in PRIMITIVES if p not in INTEGRAL])
def test_every_primitive(name: str, scalars: tuple[object, dict[str, KernelPlan]]) -> None:
    for dtype in FLOATS:
        found, wanted = run_scalar(scalars, f"{name}_{dtype.value}")
        if wanted.dtype is torch.bool:
            assert torch.equal(found, wanted), (name, dtype)
            continue
        # libm promises less for the functions we leave to it; 16-bit results may round across a tie.
        limit = {F32: 2.0 if name in OURS else 4.0, DType.float64: 4.0}.get(dtype, 1.0)
        assert ulps(found, wanted) <= limit, (name, dtype)


@pytest.mark.parametrize("name", INTEGER)
def test_integer_primitives(name: str, scalars: tuple[object, dict[str, KernelPlan]]) -> None:
    for dtype in (DType.int32, DType.int64, DType.uint8):
        found, wanted = run_scalar(scalars, f"{name}_{dtype.value}")
        assert torch.equal(found, wanted), (name, dtype)


def test_casts_follow_torch() -> None:
    pairs = [(a, b) for a in DType for b in DType]
    made = []
    for source, to in pairs:
        b = Builder(f"cast_{source.value}_{to.value}", ("n",))
        b.store(b.compute(Cast(Arg(0), to), (b.load("x", source),), to), "y", to)
        made.append(b.plan(PointTile(64, 1), ("n",)))
    code = library(tuple(made))
    values = torch.tensor([0.0, 1.0, -1.0, 2.5, 3.5, 100.7, 0.1, 65519.0, 1e-7, 7e-8, 1e-41])
    for (source, to), plan in zip(pairs, made, strict=True):
        fits = values if source.is_floating else values.clamp(0, 100)
        fits = fits if to.is_floating else fits.clamp(0, 100)
        data = {"x": fits.to(torch_dtype(source)), "y": torch.zeros(len(values), dtype=torch_dtype(to))}
        call(code, plan, data, {"n": len(values)})
        assert torch.equal(data["y"], data["x"].to(torch_dtype(to))), plan.name


def test_mixed_types_are_computed_where_torch_computes_them() -> None:
    """A comparison of floats inside a floating result, a truth value in arithmetic, an integer divided."""
    b = Builder("mixed", ("n",))
    x, i, t = b.load("x", BF16), b.load("i", DType.int32), b.load("t", DType.bool)
    b.store(
        b.compute(prim("where", prim("gt", Arg(0), 0.0), Arg(0), prim("mul", Arg(0), 0.1)), (x,), BF16),
        "leaky",
        BF16,
    )
    b.store(b.compute(prim("add", Arg(0), Arg(1)), (x, t), BF16), "plus", BF16)
    b.store(b.compute(prim("div", Arg(0), Arg(1)), (i, i), F32), "ratio", F32)
    b.store(b.compute(prim("lt", Arg(0), 0.5), (i,), DType.bool), "less", DType.bool)
    plan = b.plan(PointTile(16, 1), ("n",))
    n = 33
    data = {
        "x": torch.randn(n).bfloat16(), "i": torch.arange(-16, n - 16, dtype=torch.int32),
        "t": torch.rand(n) > 0.5,
        "leaky": torch.zeros(n).bfloat16(), "plus": torch.zeros(n).bfloat16(), "ratio": torch.zeros(n),
        "less": torch.zeros(n, dtype=torch.bool),
    }  # fmt: skip
    call(library((plan,)), plan, data, {"n": n})
    assert torch.equal(data["leaky"], torch.nn.functional.leaky_relu(data["x"], 0.1))
    assert torch.equal(data["plus"], data["x"] + data["t"])
    torch.testing.assert_close(data["ratio"], data["i"] / data["i"], equal_nan=True)
    assert torch.equal(data["less"], data["i"] < 0.5)


def test_one_value_in_several_types() -> None:
    """Each store rounds for itself; a value rounded to one 16-bit type is not thereby one of the other."""
    b = Builder("several", ("n",))
    x = b.load("x", F32)
    short = b.compute(prim("mul", Arg(0), 1.1), (x,), BF16)
    wide = b.compute(prim("mul", Arg(0), 1.1), (x,), F32)
    for buffer, value, dtype in (
        ("a", short, BF16),
        ("b", short, DType.float16),
        ("c", wide, F32),
        ("d", wide, BF16),
        ("e", wide, DType.float16),
        ("f", short, F32),
    ):
        b.store(value, buffer, dtype)
    plan = b.plan(PointTile(16, 1), ("n",))
    native, plain = both(plan, library((plan,)), {"n": 1000})
    assert all(torch.equal(native[name], plain[name]) for name in plan.buffers)
    assert not torch.equal(native["f"], native["c"])


@pytest.mark.parametrize("dtype", [F32, BF16, DType.float64, DType.int32, DType.uint8])
def test_every_reduction(dtype: DType) -> None:
    """Rows that are all negative or all positive tell a wrong start value from a right one."""
    kinds = ("sum", "max", "min") if dtype.is_floating else ("sum", "max", "min", "prod")
    b = Builder("reductions", ("m", 37))
    loaded = b.load("x", dtype)
    for combine in kinds:
        b.store(b.reduce(loaded, combine), combine, dtype.compute, "r")
    plan = b.plan(RowTile(1, 2, 64, 1), ("m",))
    data = {"x": torch.randint(2, 9, (4, 37)).to(torch_dtype(dtype))}
    data["x"][::2] *= 1 if dtype is DType.uint8 else -1
    data |= {k: torch.zeros(4, dtype=torch_dtype(dtype.compute)) for k in kinds}
    call(library((plan,)), plan, data, {"m": 4})
    x = data["x"].to(torch_dtype(dtype.compute))
    assert torch.equal(data["max"], x.amax(1)) and torch.equal(data["min"], x.amin(1))
    assert torch.equal(data["sum"], x.sum(1, dtype=x.dtype))
    if "prod" in kinds:
        assert torch.equal(data["prod"], x.prod(1, dtype=x.dtype))


# Rules


def test_reductions_keep_nan_and_infinity() -> None:
    plan = P.softmax(65, F32)
    data = memory(plan, {"m": 3})
    data["x"][3], data["x"][70] = torch.nan, -torch.inf
    call(library((plan,)), plan, data, {"m": 3})
    y = data["y"].view(3, 65)
    assert y[0].isnan().all() and y[1, 5] == 0 and torch.allclose(y[1:].sum(-1), torch.ones(2))


def test_costly_values_are_computed_once_per_element() -> None:
    text = emit(P.softmax(64, F32), resolve("cpu"))
    assert text.count("exp_f(") == 2, "one in the vector loop and one in the loop over the rest"
    wide = P.softmax(64, F32)
    short = KernelPlan(wide.name, wide.space, wide.accesses, wide.body, RowTile(1, 1, 32, 1), wide.sizes)
    assert emit(short, resolve("cpu")).count("exp_f(") > 2, "rows longer than the tile are not kept"


def test_a_symbolic_width_is_never_kept_on_the_stack() -> None:
    """The array would be as wide as the tile, the row as wide as the caller likes."""
    b = Builder("wide", ("m", "n"))
    x = b.load("x", F32)
    e = b.compute(prim("exp", Arg(0)), (x,), F32)
    b.store(b.compute(prim("div", Arg(0), Arg(1)), (e, b.reduce(e)), F32), "y", F32)
    plan = b.plan(RowTile(1, 2, 16, 1), ("m", "n"))
    assert "float k0[" not in emit(plan, resolve("cpu"))
    native, plain = both(plan, library((plan,)), {"m": 3, "n": 300})
    torch.testing.assert_close(native["y"], plain["y"], rtol=1e-6, atol=0)


def test_names_from_a_blueprint_cannot_leave_their_place() -> None:
    hostile = 'x*/ int evil(void) { return 1; } /*\n"\\'
    b = Builder("hostile", ("n",))
    b.store(b.compute(prim("neg", Arg(0)), (b.load(hostile, F32),), F32), "é y", F32)
    plan = b.plan(PointTile(16, 1), ("n",))
    text = emit(plan, resolve("cpu"))
    assert "evil(" in text and "evil(" not in re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    data = {hostile: torch.ones(5), "é y": torch.zeros(5)}
    code = library((plan,))
    call(code, plan, data, {"n": 5})
    assert bool((data["é y"] == -1).all()) and not hasattr(code, "evil")


def test_same_bits_with_any_number_of_threads_and_vector_width() -> None:
    made = tuple(
        renamed(FAMILIES[name](192, dtype), f"{name}_{dtype.value}")
        for name, dtype in (
            ("rms_backward", BF16),
            ("softmax", F32),
            ("layer_norm", BF16),
            ("bias_gelu", F32),
        )
    )
    best, before = resolve("cpu"), torch.get_num_threads()
    results = []
    for target, threads in ((resolve("cpu-v3"), 2), (best, 1), (best, 2), (best, 3)):
        code = library(made, target)
        torch.set_num_threads(threads)  # the object uses the OpenMP runtime that torch loaded
        written = [memory(plan, {"m": 301}) for plan in made]
        for plan, data in zip(made, written, strict=True):
            call(code, plan, data, {"m": 301})
        results.append(written)
    torch.set_num_threads(before)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert all(torch.equal(one[name], two[name]) for name in one)


def test_refusals() -> None:
    softmax = P.softmax(8, F32)
    with pytest.raises(EsperError, match="E0522"):
        emit(softmax, resolve("h100"))
    tiled = KernelPlan("mm", softmax.space, (), (), MatmulTile(16, 16, 16, 4, 1), ("m",))
    with pytest.raises(EsperError, match="E0522"):
        emit(tiled, resolve("cpu-v3"))
    b = Builder("used_early", ("m", 8))
    total = b.reduce(b.load("x", F32), "sum", "col")
    b.store(total, "part", F32, "c", partial=True)
    b.store(b.compute(prim("neg", Arg(0)), (total,), F32), "y", F32, "c")
    with pytest.raises(EsperError, match="E0523"):
        emit(b.plan(RowTile(1, 1, 8, 1), ("m",)), resolve("cpu-v3"))
    b = Builder("sine_of_int", ("n",))
    b.store(b.compute(prim("sin", Arg(0)), (b.load("x", DType.int32),), DType.int32), "y", DType.int32)
    with pytest.raises(EsperError, match="E0524"):
        emit(b.plan(PointTile(8, 1), ("n",)), resolve("cpu-v3"))


def test_symbolic_columns_and_floordiv() -> None:
    b = Builder("halves", ("m", "floordiv(h, 2)"))
    b.store(b.reduce(b.load("x", F32)), "y", F32, "r")
    plan = KernelPlan(
        "halves", b.space, tuple(b.accesses), tuple(b.body), RowTile(1, 4, 64, 1), ("m", "h"), wide=True
    )
    sizes = {"m": 5, "h": 67}
    assert plan.cols == Dim.of("floordiv(h, 2)")
    native, plain = both(plan, library((plan,)), sizes)
    assert torch.equal(native["y"], plain["y"])


def test_side_by_side_a_columns_value_may_need_what_all_share() -> None:
    """A number made once a row, and a quotient by it that changes from column to column."""
    b = Builder("shared", ("m", 13, 5))
    count = b.compute(prim("mul", A, A), (b.load_strided("n", F32, (0, 0, 0)),), F32)
    mean = b.compute(prim("div", A, B), (b.load_strided("s", F32, (0, 0, 1)), count), F32)
    away = b.compute(prim("sub", A, B), (b.load_strided("x", F32, (65, 1, 13)), mean), F32)
    top = b.compute(prim("add", A, B), (b.reduce(away, "max"), count), F32)
    b.store(top, "y", F32, "r")
    plan = b.plan(RowTile(8, 16, 8, 1), ("m",))
    code = library((plan,))
    native, plain = both(plan, code, {"m": 3})
    assert torch.equal(native["y"], plain["y"])
