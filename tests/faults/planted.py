"""Faults planted in the hand-made artifacts: class, what is changed, and the stage that has to refuse it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from library.launch import Argument, KernelStep, Plan
from tests.faults import toys
from tests.faults.handmade import Toy, edit


@dataclass(frozen=True)
class Fault:
    """`stages`: where it may be refused first. `subtle`: the error is under ten times the bound.
    `behind`: where it is refused when the stage of integrity, which sees variables that outlive a call, is left out.
    """

    name: str
    kind: str
    stages: tuple[str, ...]
    toy: Toy
    subtle: bool = False
    behind: tuple[str, ...] = ()


MASK = "r < p * R + R && r < rows"
TOYS: dict[str, Callable[[], Toy]] = toys.ALL

# (class, toy, stages, place, replacement): the place is a piece of C text; "#2" after it means its second occurrence.
TEXT: tuple[tuple[str, str, str, str, str], ...] = (
    ("dropped mask", "affine", "memory", f"{MASK}#1", "r < p * R + R"),
    ("dropped mask", "affine", "memory", f"{MASK}#2", "r < p * R + R"),
    ("dropped mask", "softmax", "memory", f"{MASK}#1", "r < p * R + R"),
    ("dropped mask", "softmax", "memory", f"{MASK}#2", "r < p * R + R"),
    ("dropped mask", "norm", "memory", f"{MASK}#1", "r < p * R + R"),
    ("dropped mask", "dense", "memory", f"{MASK}#1", "r < p * R + R"),
    ("dropped mask", "dense", "memory", f"{MASK}#2", "r < p * R + R"),
    ("off by one", "affine", "memory", f"{MASK}#1", "r < p * R + R && r < rows - 1"),
    ("off by one", "affine", "memory", f"{MASK}#2", "r < p * R + R && r < rows - 1"),
    ("off by one", "affine", "gradients", "p < parts; p++) sw +=", "p < parts - (parts > 1); p++) sw +="),
    ("off by one", "softmax", "numerics", "c < cols; c++) sum +=", "c < cols - (cols > 1); c++) sum +="),
    ("off by one", "softmax", "gradients", "c < cols; c++) dot +=", "c < cols - (cols > 1); c++) dot +="),
    ("off by one", "norm", "numerics", "c < C; c++) sum +=#1", "c < C - 1; c++) sum +="),
    ("off by one", "norm", "numerics", "c < C; c++) sum +=#2", "c < C - 1; c++) sum +="),
    ("off by one", "dense", "numerics", "k < K; k++) s +=", "k < K - 1; k++) s +="),
    ("off by one", "dense", "gradients", "r < rows; r++) t +=", "r < rows - 1; r++) t +="),
    ("off by one", "dense", "gradients", "int64_t r = 0; r < rows; r++) s +=", "int64_t r = 1; r < rows; r++) s +="),
    ("wrong axis", "affine", "numerics", "x[r * C + c] * w[c];", "x[r * C + c] * w[r % C];"),
    ("wrong axis", "affine", "gradients", "= m * w[c];", "= m * w[(c + 1) % C];"),
    ("wrong axis", "norm", "numerics", "* scale * w[c];#1", "* scale * w[r % C];"),
    ("wrong axis", "dense", "numerics", "w[k * M + m];#1", "w[(m * K + k) % (K * M)];"),
    ("wrong axis", "dense", "gradients", "g[r * M + m] * w[k * M + m]", "g[r * M + m] * w[(m * K + k) % (K * M)]"),
    ("skipped epilogue", "affine", "numerics", "v = v + b[c];", ""),
    ("skipped epilogue", "affine", "numerics", "v != v ? v : (v > 0 ? v : 0)", "v"),
    ("skipped epilogue", "dense", "numerics", "(float)s + b[m]", "(float)s"),
    ("skipped epilogue", "norm", "numerics", "* scale * w[c];#2", "* scale;"),
    ("race", "affine", "determinism", "double sw[C], sb[C];", "static double sw[C], sb[C];"),
    ("race", "norm", "determinism", "double acc[C];", "static double acc[C];"),
    ("race", "softmax", "determinism", "double sum = 0;", "static volatile double sum; sum = 0;"),
    ("race", "softmax", "determinism", "double dot = 0;", "static volatile double dot; dot = 0;"),
    ("race", "dense", "determinism", "double s = 0;#2", "static volatile double s; s = 0;"),
    ("stale workspace", "affine", "memory", "pw[p * C + c] = sw[c],", "p + 1 < gx || gx < 2 ? pw[p * C + c] = sw[c] : 0,"),
    ("stale workspace", "affine", "memory", "pb[p * C + c] = sb[c];", "pb[p * C + c] += sb[c];"),
    ("stale workspace", "norm", "memory", "part[p * C + c] = acc[c];", "if (c) part[p * C + c] = acc[c];"),
    ("stale workspace", "norm", "memory", "inv[r] = scale;", "if (r % 8 != 7) inv[r] = scale;"),
    ("out of bounds store", "affine", "memory", "db[c] = sb;", "db[c] = sb; if (c == C - 1) db[C] = 0;"),
    ("out of bounds store", "affine", "memory", "dw[c] = sw;", "dw[c] = sw; if (c == 0) dw[-1] = 0;"),
    ("out of bounds store", "softmax", "memory", "float top = -INFINITY;", "float top = -INFINITY; if (r + 1 == rows) y[rows * cols + 3] = 0;"),
    ("out of bounds store", "norm", "memory", "inv[r] = scale;", "inv[r] = scale; if (r + 1 == rows) inv[rows] = scale;"),
    ("out of bounds store", "dense", "memory", "db[m] = t;", "db[m] = t; if (!m) db[-7] = 1;"),
    ("out of bounds read", "affine", "memory", "x[r * C + c] * w[c];", "x[r * C + c] * w[c] + 0 * x[rows * C];"),
    ("out of bounds read", "dense", "memory", "double t = 0;", "double t = 0 * x[-1];"),
    ("endless loop", "affine", "loads memory numerics", "const int64_t rows = NUM(4);", "const int64_t rows = NUM(4); for (volatile int on = rows == 48; on;);"),
    ("endless loop", "norm", "memory numerics", "const int64_t rows = NUM(3);", "const int64_t rows = NUM(3); for (volatile int on = rows == 17; on;);"),
    ("NaN on rare input", "affine", "numerics", "v = v + b[c];", "v = v + b[c]; if (x[r * C + c] == 0) v = NAN;"),
    ("NaN on rare input", "affine", "numerics", "v = v + b[c];", "v = v + b[c]; if (x[r * C + c] > 150) v = NAN;"),
    ("NaN on rare input", "norm", "numerics gradients", "+ 1e-6f);#1", ");"),
    ("NaN on rare input", "softmax", "numerics", "expf(a[c] - top) / (float)sum", "expf(a[c]) * expf(-top) / (float)sum"),
    ("NaN on rare input", "dense", "numerics", "(float)s + b[m]", "(float)s + b[m] + (s == 0 ? NAN : 0)"),
    ("NaN on rare input", "affine", "numerics", "v != v ? v : (v > 0 ? v : 0)", "v > 0 ? v : 0"),
    ("precision downgrade", "affine", "numerics", "float v = x[r * C + c] * w[c];", "float v = x[r * C + c] * w[c]; uint32_t u; memcpy(&u, &v, 4); u &= 0xffff0000u; memcpy(&v, &u, 4);"),
    ("precision downgrade", "dense", "numerics", "double s = 0;#1", "_Float16 s = 0;"),
    ("precision downgrade", "softmax", "numerics", "double sum = 0;", "_Float16 sum = 0;"),
    ("precision downgrade", "norm", "numerics", "1 / sqrtf((float)(sum / C) + 1e-6f);#1", "(float)(_Float16)(1 / sqrtf((float)(sum / C) + 1e-6f));"),
    ("precision downgrade", "dense", "gradients", "double s = 0;#2", "_Float16 s = 0;"),
    ("right only on [0, 1)", "affine", "numerics", "v != v ? v : (v > 0 ? v : 0)", "fabsf(v)"),
    ("right only on [0, 1)", "softmax", "numerics", "top = a[c] > top || a[c] != a[c] ? a[c] : top", "top = 1"),
    ("right only on [0, 1)", "affine", "numerics", "float v = x[r * C + c] * w[c];", "float v = fminf(x[r * C + c], 1) * w[c];"),
    ("right only on [0, 1)", "norm", "numerics", "double sum = 0;#1", "double sum = 1e-4;"),
    ("right only on [0, 1)", "dense", "numerics", "s += x[r * K + k] * w[k * M + m];", "s += fabsf(x[r * K + k]) * w[k * M + m];"),
    ("size-dependent", "affine", "numerics", "v = v + b[c];", "v = v + (rows > 1000 ? 0 : b[c]);"),
    ("size-dependent", "affine", "gradients", "const float m =", "const float m = rows == 251 && r == 250 ? 0 :"),
    ("size-dependent", "softmax", "numerics", "c < cols; c++) sum +=", "c < (cols > 256 ? 256 : cols); c++) sum +="),
    ("size-dependent", "softmax", "gradients", "c < cols; c++) dot +=", "c < (cols > 64 ? 64 : cols); c++) dot +="),
    ("size-dependent", "dense", "numerics", "(float)s + b[m]", "(float)s + (rows == 1 ? 0 : b[m])"),
    ("size-dependent", "norm", "gradients", "int64_t p = 0; p < parts; p++) s +=", "int64_t p = 0; p < (parts > 64 ? 64 : parts); p++) s +="),
    ("input overwritten", "affine", "memory", "float v = x[r * C + c] * w[c];", "float v = x[r * C + c] * w[c]; ((float *)x)[r * C + c] = 0;"),
    ("input overwritten", "dense", "memory", "db[m] = t;", "db[m] = t; ((float *)g)[m] = 0;"),
    ("input overwritten", "norm", "memory", "part[p * C + c] = acc[c];", "part[p * C + c] = acc[c]; ((float *)inv)[p * R] = 0;"),
    ("output is input", "affine", "numerics", "v != v ? v : (v > 0 ? v : 0)", "x[r * C + c]"),
    ("output is input", "softmax", "numerics", "expf(a[c] - top) / (float)sum", "a[c]"),
    ("output is input", "norm", "numerics", "x[r * C + c] * scale * w[c];#2", "x[r * C + c];"),
    ("output is input", "softmax", "gradients", "y[r * cols + c] * (g[r * cols + c] - (float)dot)", "g[r * cols + c]"),
    ("constant output", "affine", "numerics", "v != v ? v : (v > 0 ? v : 0)", "0"),
    ("constant output", "softmax", "numerics", "expf(a[c] - top) / (float)sum", "1.0f / cols"),
    ("constant output", "softmax", "gradients", "y[r * cols + c] * (g[r * cols + c] - (float)dot)", "0"),
    ("constant output", "dense", "gradients", "db[m] = t;", "db[m] = 1;"),
    ("nothing done", "affine", "memory", "y[r * C + c] = v != v ? v : (v > 0 ? v : 0);", ";"),
    ("nothing done", "softmax", "memory", "dx[r * cols + c] = y[r * cols + c] * (g[r * cols + c] - (float)dot);", ";"),
    ("nothing done", "norm", "memory", "dw[c] = s;", ";"),
    ("work skipped on repeat", "affine", "memory", "const int64_t rows = NUM(4);", "const int64_t rows = NUM(4); static int calls; if (++calls > 40) return;"),
    ("work skipped on repeat", "softmax", "memory", "const int64_t rows = NUM(2), cols = NUM(3);", "const int64_t rows = NUM(2), cols = NUM(3); static const float *last; if (x == last) return; last = x;"),
    ("work skipped on repeat", "norm", "memory", "const int64_t parts = NUM(2);", "const int64_t parts = NUM(2); static int calls; if (++calls % 50 == 49) return;"),
    ("work skipped on repeat", "dense", "memory", "const int64_t rows = NUM(3);", "const int64_t rows = NUM(3); static float once[8]; static int n; if (rows == 48 && n++ % 30 == 29) { memcpy(dx, once, 32); return; }"),
    ("one gradient wrong", "affine", "gradients", "sb[c] += m;", "sb[c] += g[r * C + c];"),
    ("one gradient wrong", "affine", "gradients", "dx[r * C + c] = m * w[c];", "dx[r * C + c] = g[r * C + c] * w[c];"),
    ("one gradient wrong", "norm", "gradients", "- x[r * C + c] * k)", "- 0 * x[r * C + c] * k)"),
    ("one gradient wrong", "norm", "gradients", "acc[c] += g[r * C + c] * x[r * C + c] * inv[r];", "acc[c] += g[r * C + c] * x[r * C + c];"),
    ("one gradient wrong", "dense", "gradients", "db[m] = t;", "db[m] = 0.5 * t;"),
    ("one gradient wrong", "softmax", "gradients", "(g[r * cols + c] - (float)dot)", "g[r * cols + c]"),
    ("wrong for stride 0", "affine", "gradients", "const float m =", "const float m = g[0] == g[1] && g[1] == g[2] ? 0 :"),
    ("wrong for stride 0", "dense", "gradients", "dx[r * K + k] = s;", "dx[r * K + k] = rows > 1 && g[0] == g[M] && g[1] == g[M + 1] ? 0 : s;"),
    ("wrong for stride 0", "softmax", "gradients", "double dot = 0;", "double dot = cols > 2 && g[0] == g[1] && g[1] == g[2] ? 1 : 0;"),
    ("wrong for stride 0", "norm", "gradients", "dot += g[r * C + c] * w[c]", "dot += (g[0] == g[1] ? 2 : 1) * g[r * C + c] * w[c]"),
    ("leak", "affine", "memory", "const int64_t parts = NUM(4);", "const int64_t parts = NUM(4); extern void *malloc(unsigned long); memset(malloc(1 << 16), 1, 1 << 16);"),
)  # fmt: skip

# The same with an error of less than ten times the bound.
SUBTLE: tuple[tuple[str, str, str, str, str], ...] = (
    ("precision downgrade", "affine", "numerics", "float v = x[r * C + c] * w[c];", "float v = x[r * C + c] * w[c] * (1 + 1e-6f);"),
    ("precision downgrade", "dense", "numerics", "(float)s + b[m]", "((float)s + b[m]) * 1.000001f"),
    ("precision downgrade", "softmax", "numerics", "/ (float)sum", "/ ((float)sum * 1.000001f)"),
    ("precision downgrade", "norm", "numerics", "* scale * w[c];#1", "* (scale * 1.000001f) * w[c];"),
    ("one gradient wrong", "affine", "gradients", "dx[r * C + c] = m * w[c];", "dx[r * C + c] = m * w[c] * 1.000001f;"),
    ("one gradient wrong", "dense", "gradients", "db[m] = t;", "db[m] = t * 1.000001;"),
    ("one gradient wrong", "softmax", "gradients", "(g[r * cols + c] - (float)dot)", "(g[r * cols + c] - (float)dot * 1.000001f)"),
    ("wrong axis", "norm", "gradients", "acc[c] += g[r * C + c] * x[r * C + c] * inv[r];", "acc[c] += g[r * C + c] * x[r * C + c] * inv[r] * 1.000001;"),
    ("size-dependent", "affine", "numerics", "v = v + b[c];", "v = v + b[c]; if (rows == 61) v *= 1.000002f;"),
    ("right only on [0, 1)", "affine", "numerics", "v = v + b[c];", "v = v + b[c]; if (x[r * C + c] < 0) v *= 1.000002f;"),
)  # fmt: skip


def _edited(toy: Toy, place: str, new: str) -> Toy:
    text, _, number = place.partition("#")
    if not number:
        return edit(toy, (text, new))
    starts = [m.start() for m in re.finditer(re.escape(text), toy.source)]
    at = starts[int(number) - 1]
    return replace(toy, source=toy.source[:at] + new + toy.source[at + len(text) :])


def _with(toy: Toy, at: int, change: Callable[[Plan], Plan]) -> Toy:
    return replace(toy, plans=tuple(change(p) if i == at else p for i, p in enumerate(toy.plans)))


def _step(plan: Plan, at: int, **changes: object) -> Plan:
    return replace(plan, steps=tuple(replace(s, **changes) if i == at else s for i, s in enumerate(plan.steps)))


def _argument(plan: Plan, step: int, position: int, value: int | str) -> Plan:
    found = plan.steps[step]
    assert isinstance(found, KernelStep)
    args = list(found.args)
    args[position] = Argument(args[position].kind, value)
    return _step(plan, step, args=tuple(args))


def _plans() -> Iterator[tuple[str, str, str, Toy]]:
    """Faults of the launch manifest instead of the kernels."""
    affine, dense, norm = toys.affine(), toys.dense(), toys.norm()
    floor = (("floordiv", "rows", 16), 1, 1)
    yield "plan: grid too small", "affine", "memory", _with(affine, 1, lambda p: _step(p, 0, grid=floor))
    yield "plan: grid too small", "norm", "memory", _with(norm, 2, lambda p: _step(p, 0, grid=floor))
    yield "plan: step missing", "affine", "memory", _with(affine, 2, lambda p: replace(p, steps=p.steps[:1]))
    yield "plan: step missing", "dense", "memory", _with(dense, 3, lambda p: replace(p, steps=p.steps[1:]))
    yield "plan: buffers swapped", "affine", "numerics", _with(affine, 1, lambda p: _argument(_argument(p, 0, 1, 2), 0, 2, 1))
    yield "plan: buffers swapped", "affine", "gradients", _with(affine, 2, lambda p: replace(p, gradients=(4, 8, 7)))
    yield "plan: wrong size", "affine", "memory", _with(affine, 2, lambda p: _argument(p, 1, 4, 1))
    yield "plan: steps in the wrong order", "affine", "memory", _with(affine, 2, lambda p: replace(p, steps=p.steps[::-1]))
    yield "plan: partial gradients wrong", "dense", "memory gradients", _with(dense, 2, lambda p: _argument(p, 0, 0, 2))
    yield "forged manifest", "affine", "integrity", replace(affine, params={**affine.params, "affine_sum": "pppp"})
    yield "forged manifest", "affine", "integrity", replace(affine, params={**affine.params, "missing": "p"})
    yield "forged manifest", "affine", "integrity", _with(affine, 2, lambda p: replace(p, wanted=("x", "w"), gradients=(4,)))
    yield "forged manifest", "affine", "integrity", _with(affine, 1, lambda p: _step(p, 0, grid=(("mul", "rows", 1 << 30), 1, 1)))
    yield "forged manifest", "dense", "integrity", replace(dense, plans=dense.plans[:2])


LOOP = "#pragma omp parallel for\n  for (int64_t p = 0; p < gx; p++)"


def _races() -> Iterator[tuple[str, Toy]]:
    """A variable of each iteration declared outside the parallel loop, so that the threads share it."""
    one = f"{LOOP} {{\n    double sw[C], sb[C];"
    yield "affine", edit(toys.affine(), (one, f"  double sw[C], sb[C];\n{LOOP} {{"))
    one = f"{LOOP} {{\n    double acc[C];"
    yield "norm", edit(toys.norm(), (one, f"  double acc[C];\n{LOOP} {{"))
    soft = toys.softmax()
    start = soft.source.index(LOOP)
    hoisted = soft.source[:start] + "  volatile double sum;\n" + soft.source[start:].replace("double sum = 0;", "sum = 0;", 1)
    yield "softmax", replace(soft, source=hoisted)
    start = soft.source.rindex(LOOP)
    hoisted = soft.source[:start] + "  volatile double dot;\n" + soft.source[start:].replace("double dot = 0;", "dot = 0;", 1)
    yield "softmax", replace(soft, source=hoisted)


def faults() -> list[Fault]:
    """All of them."""
    out: list[Fault] = []
    for rows, subtle in ((TEXT, False), (SUBTLE, True)):
        for at, (kind, toy, stages, place, new) in enumerate(rows):
            name = f"{'subtle ' if subtle else ''}{at} {kind}, {toy}"
            toy_made, named = _edited(TOYS[toy](), place, new), tuple(stages.split())
            first = ("integrity",) if "static" in new else named
            out.append(Fault(name, kind, first, toy_made, subtle, named if "static" in new else ()))
    out += [Fault(f"{at} race on the stack, {toy}", "race", ("determinism",), made) for at, (toy, made) in enumerate(_races())]
    for at, (kind, toy, stages, made) in enumerate(_plans()):
        out.append(Fault(f"{kind} {at}, {toy}", kind, tuple(stages.split()), made))
    return out
