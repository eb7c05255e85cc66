"""The hand-made artifacts: affine+relu, softmax, a norm, a dense layer, an add that broadcasts."""

from __future__ import annotations

from typing import Any

from library.launch import Plan, Size
from tests.faults.handmade import Toy, buffers, programs, step

C = 40
K, M = 24, 20


def _blueprint(
    name: str,
    inputs: dict[str, list[Any]],
    params: dict[str, list[Any]],
    nodes: list[dict[str, Any]],
    dims: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    typed = {n: {"dtype": "float32", "shape": shape} for n, shape in inputs.items()}
    owned = {
        n: {"dtype": "float32", "shape": shape, "init": {"kind": "normal", "std": 0.2}}
        for n, shape in params.items()
    }
    return {
        "format": "esper-blueprint/1",
        "name": name,
        "dims": dims,
        "inputs": typed,
        "params": owned,
        "nodes": nodes,
        "outputs": [nodes[-1]["id"]],
        "metadata": {},
    }


def _node(name: str, op: str, *inputs: str | float, **attrs: Any) -> dict[str, Any]:
    return {"id": name, "op": op, "inputs": list(inputs), **({"attrs": attrs} if attrs else {})}


ROWS = {"rows": {"min": 1, "max": 4096, "tune": [64]}}

AFFINE_C = """
enum { C = 40, R = 16 };
KERNEL(affine_fwd) {
  const float *x = PTR(float, 0), *w = PTR(float, 1), *b = PTR(float, 2);
  float *y = PTR(float, 3);
  const int64_t rows = NUM(4);
#pragma omp parallel for
  for (int64_t p = 0; p < gx; p++)
    for (int64_t r = p * R; r < p * R + R && r < rows; r++)
      for (int64_t c = 0; c < C; c++) {
        float v = x[r * C + c] * w[c];
        v = v + b[c];
        y[r * C + c] = v != v ? v : (v > 0 ? v : 0);
      }
}
KERNEL(affine_bwd) {
  const float *x = PTR(float, 0), *w = PTR(float, 1), *y = PTR(float, 2), *g = PTR(float, 3);
  float *dx = PTR(float, 4), *pw = PTR(float, 5), *pb = PTR(float, 6);
  const int64_t rows = NUM(7);
#pragma omp parallel for
  for (int64_t p = 0; p < gx; p++) {
    double sw[C], sb[C];
    for (int64_t c = 0; c < C; c++) sw[c] = 0, sb[c] = 0;
    for (int64_t r = p * R; r < p * R + R && r < rows; r++)
      for (int64_t c = 0; c < C; c++) {
        const float m = y[r * C + c] <= 0 ? 0 : g[r * C + c];
        dx[r * C + c] = m * w[c];
        sw[c] += m * x[r * C + c];
        sb[c] += m;
      }
    for (int64_t c = 0; c < C; c++) pw[p * C + c] = sw[c], pb[p * C + c] = sb[c];
  }
}
KERNEL(affine_sum) {
  const float *pw = PTR(float, 0), *pb = PTR(float, 1);
  float *dw = PTR(float, 2), *db = PTR(float, 3);
  const int64_t parts = NUM(4);
  for (int64_t c = 0; c < C; c++) {
    double sw = 0, sb = 0;
    for (int64_t p = 0; p < parts; p++) sw += pw[p * C + c], sb += pb[p * C + c];
    dw[c] = sw;
    db[c] = sb;
  }
}
"""


def affine() -> Toy:
    """y = relu(x * w + b), gradients of all three, column sums in two steps."""
    full: tuple[Size, ...] = ("rows", C)
    parts = programs()
    blueprint = _blueprint(
        "affine_relu",
        {"x": ["rows", C]},
        {"w": [C], "b": [C]},
        [_node("m", "mul", "x", "w"), _node("s", "add", "m", "b"), _node("y", "relu", "s")],
        ROWS,
    )
    given = (
        ("x", "input", 0, full),
        ("w", "input", 1, (C,)),
        ("b", "input", 2, (C,)),
        ("y", "output", 0, full),
    )
    run = (step("affine_fwd", parts, 0, 1, 2, 3, "rows"),)
    back = buffers(
        ("x", "saved", 0, full),
        ("w", "saved", 1, (C,)),
        ("y", "saved", 2, full),
        ("g", "cotangent", 0, full),
        ("dx", "gradient", 0, full),
        ("pw", "temp", 0, (parts, C)),
        ("pb", "temp", 0, (parts, C)),
        ("dw", "gradient", 0, (C,)),
        ("db", "gradient", 0, (C,)),
    )
    steps = (
        step("affine_bwd", parts, 0, 1, 2, 3, 4, 5, 6, "rows"),
        step("affine_sum", 1, 5, 6, 7, 8, parts),
    )
    plans = (
        Plan("forward", (), (), buffers(*given), run, (3,), (0, 1, 3)),
        Plan("inference", (), (), buffers(*given), run, (3,)),
        Plan("backward", (), ("x", "w", "b"), back, steps, gradients=(4, 7, 8)),
    )
    return Toy(
        "affine_relu",
        blueprint,
        AFFINE_C,
        plans,
        {"affine_fwd": "ppppi", "affine_bwd": "pppppppi", "affine_sum": "ppppi"},
    )


SOFTMAX_C = """
enum { R = 16 };
KERNEL(softmax_fwd) {
  const float *x = PTR(float, 0);
  float *y = PTR(float, 1);
  const int64_t rows = NUM(2), cols = NUM(3);
#pragma omp parallel for
  for (int64_t p = 0; p < gx; p++)
    for (int64_t r = p * R; r < p * R + R && r < rows; r++) {
      const float *a = x + r * cols;
      float top = -INFINITY;
      double sum = 0;
      for (int64_t c = 0; c < cols; c++) top = a[c] > top || a[c] != a[c] ? a[c] : top;
      for (int64_t c = 0; c < cols; c++) sum += expf(a[c] - top);
      for (int64_t c = 0; c < cols; c++) y[r * cols + c] = expf(a[c] - top) / (float)sum;
    }
}
KERNEL(softmax_bwd) {
  const float *y = PTR(float, 0), *g = PTR(float, 1);
  float *dx = PTR(float, 2);
  const int64_t rows = NUM(3), cols = NUM(4);
#pragma omp parallel for
  for (int64_t p = 0; p < gx; p++)
    for (int64_t r = p * R; r < p * R + R && r < rows; r++) {
      double dot = 0;
      for (int64_t c = 0; c < cols; c++) dot += y[r * cols + c] * g[r * cols + c];
      for (int64_t c = 0; c < cols; c++) dx[r * cols + c] = y[r * cols + c] * (g[r * cols + c] - (float)dot);
    }
}
"""


def softmax() -> Toy:
    """y = softmax over the last axis, both sizes symbolic."""
    full: tuple[Size, ...] = ("rows", "cols")
    dims = {"rows": {"min": 1, "max": 2048}, "cols": {"min": 1, "max": 513, "tune": [64]}}
    blueprint = _blueprint("softmax", {"x": ["rows", "cols"]}, {}, [_node("y", "softmax", "x", dim=-1)], dims)
    given = buffers(("x", "input", 0, full), ("y", "output", 0, full))
    run = (step("softmax_fwd", programs(), 0, 1, "rows", "cols"),)
    back = buffers(("y", "saved", 0, full), ("g", "cotangent", 0, full), ("dx", "gradient", 0, full))
    plans = (
        Plan("forward", (), (), given, run, (1,), (1,)),
        Plan("inference", (), (), given, run, (1,)),
        Plan(
            "backward",
            (),
            ("x",),
            back,
            (step("softmax_bwd", programs(), 0, 1, 2, "rows", "cols"),),
            gradients=(2,),
        ),
    )
    return Toy("softmax", blueprint, SOFTMAX_C, plans, {"softmax_fwd": "ppii", "softmax_bwd": "pppii"})


NORM_C = """
enum { C = 40, R = 16 };
KERNEL(norm_fwd) {
  const float *x = PTR(float, 0), *w = PTR(float, 1);
  float *y = PTR(float, 2), *inv = PTR(float, 3);
  const int64_t rows = NUM(4);
#pragma omp parallel for
  for (int64_t p = 0; p < gx; p++)
    for (int64_t r = p * R; r < p * R + R && r < rows; r++) {
      double sum = 0;
      for (int64_t c = 0; c < C; c++) sum += x[r * C + c] * x[r * C + c];
      const float scale = 1 / sqrtf((float)(sum / C) + 1e-6f);
      inv[r] = scale;
      for (int64_t c = 0; c < C; c++) y[r * C + c] = x[r * C + c] * scale * w[c];
    }
}
KERNEL(norm_inf) {
  const float *x = PTR(float, 0), *w = PTR(float, 1);
  float *y = PTR(float, 2);
  const int64_t rows = NUM(3);
#pragma omp parallel for
  for (int64_t r = 0; r < rows; r++) {
    double sum = 0;
    for (int64_t c = 0; c < C; c++) sum += x[r * C + c] * x[r * C + c];
    const float scale = 1 / sqrtf((float)(sum / C) + 1e-6f);
    for (int64_t c = 0; c < C; c++) y[r * C + c] = x[r * C + c] * scale * w[c];
  }
}
KERNEL(norm_bwd) {
  const float *x = PTR(float, 0), *w = PTR(float, 1), *inv = PTR(float, 2), *g = PTR(float, 3);
  float *dx = PTR(float, 4), *part = PTR(float, 5);
  const int64_t rows = NUM(6);
#pragma omp parallel for
  for (int64_t p = 0; p < gx; p++) {
    double acc[C];
    for (int64_t c = 0; c < C; c++) acc[c] = 0;
    for (int64_t r = p * R; r < p * R + R && r < rows; r++) {
      double dot = 0;
      for (int64_t c = 0; c < C; c++) dot += g[r * C + c] * w[c] * x[r * C + c];
      const float k = (float)dot * inv[r] * inv[r] / C;
      for (int64_t c = 0; c < C; c++) {
        dx[r * C + c] = inv[r] * (g[r * C + c] * w[c] - x[r * C + c] * k);
        acc[c] += g[r * C + c] * x[r * C + c] * inv[r];
      }
    }
    for (int64_t c = 0; c < C; c++) part[p * C + c] = acc[c];
  }
}
KERNEL(norm_sum) {
  const float *part = PTR(float, 0);
  float *dw = PTR(float, 1);
  const int64_t parts = NUM(2);
  for (int64_t c = 0; c < C; c++) {
    double s = 0;
    for (int64_t p = 0; p < parts; p++) s += part[p * C + c];
    dw[c] = s;
  }
}
"""


def norm() -> Toy:
    """y = x * rsqrt(mean(x*x) + 1e-6) * w, the row's scale saved."""
    full: tuple[Size, ...] = ("rows", C)
    parts = programs()
    blueprint = _blueprint(
        "norm",
        {"x": ["rows", C]},
        {"w": [C]},
        [
            _node("sq", "mul", "x", "x"),
            _node("ms", "mean", "sq", dims=[1], keepdim=True),
            _node("me", "add", "ms", 1e-6),
            _node("inv", "rsqrt", "me"),
            _node("n", "mul", "x", "inv"),
            _node("y", "mul", "n", "w"),
        ],
        ROWS,
    )
    given = (("x", "input", 0, full), ("w", "input", 1, (C,)), ("y", "output", 0, full))
    saving = buffers(*given, ("inv", "temp", 0, ("rows",)))
    back = buffers(
        ("x", "saved", 0, full),
        ("w", "saved", 1, (C,)),
        ("inv", "saved", 2, ("rows",)),
        ("g", "cotangent", 0, full),
        ("dx", "gradient", 0, full),
        ("part", "temp", 0, (parts, C)),
        ("dw", "gradient", 0, (C,)),
    )
    steps = (step("norm_bwd", parts, 0, 1, 2, 3, 4, 5, "rows"), step("norm_sum", 1, 5, 6, parts))
    plans = (
        Plan("forward", (), (), saving, (step("norm_fwd", parts, 0, 1, 2, 3, "rows"),), (2,), (0, 1, 3)),
        Plan("inference", (), (), buffers(*given), (step("norm_inf", 1, 0, 1, 2, "rows"),), (2,)),
        Plan("backward", (), ("x", "w"), back, steps, gradients=(4, 6)),
    )
    params = {"norm_fwd": "ppppi", "norm_inf": "pppi", "norm_bwd": "ppppppi", "norm_sum": "ppi"}
    return Toy("norm", blueprint, NORM_C, plans, params)


DENSE_C = """
enum { K = 24, M = 20, R = 16 };
KERNEL(dense_fwd) {
  const float *x = PTR(float, 0), *w = PTR(float, 1), *b = PTR(float, 2);
  float *y = PTR(float, 3);
  const int64_t rows = NUM(4);
#pragma omp parallel for
  for (int64_t p = 0; p < gx; p++)
    for (int64_t r = p * R; r < p * R + R && r < rows; r++)
      for (int64_t m = 0; m < M; m++) {
        double s = 0;
        for (int64_t k = 0; k < K; k++) s += x[r * K + k] * w[k * M + m];
        y[r * M + m] = (float)s + b[m];
      }
}
KERNEL(dense_dx) {
  const float *w = PTR(float, 0), *g = PTR(float, 1);
  float *dx = PTR(float, 2);
  const int64_t rows = NUM(3);
#pragma omp parallel for
  for (int64_t p = 0; p < gx; p++)
    for (int64_t r = p * R; r < p * R + R && r < rows; r++)
      for (int64_t k = 0; k < K; k++) {
        double s = 0;
        for (int64_t m = 0; m < M; m++) s += g[r * M + m] * w[k * M + m];
        dx[r * K + k] = s;
      }
}
KERNEL(dense_dw) {
  const float *x = PTR(float, 0), *g = PTR(float, 1);
  float *dw = PTR(float, 2), *db = PTR(float, 3);
  const int64_t rows = NUM(4);
#pragma omp parallel for
  for (int64_t m = 0; m < M; m++) {
    double t = 0;
    for (int64_t r = 0; r < rows; r++) t += g[r * M + m];
    db[m] = t;
    for (int64_t k = 0; k < K; k++) {
      double s = 0;
      for (int64_t r = 0; r < rows; r++) s += x[r * K + k] * g[r * M + m];
      dw[k * M + m] = s;
    }
  }
}
"""


def dense() -> Toy:
    """y = x @ w + b; the gradient of x alone, and all three, as plans of their own."""
    xs: tuple[Size, ...] = ("rows", K)
    ys: tuple[Size, ...] = ("rows", M)
    parts = programs()
    blueprint = _blueprint(
        "dense",
        {"x": ["rows", K]},
        {"w": [K, M], "b": [M]},
        [_node("p", "matmul", "x", "w"), _node("y", "add", "p", "b")],
        ROWS,
    )
    given = buffers(
        ("x", "input", 0, xs), ("w", "input", 1, (K, M)), ("b", "input", 2, (M,)), ("y", "output", 0, ys)
    )
    run = (step("dense_fwd", parts, 0, 1, 2, 3, "rows"),)
    back = (
        ("x", "saved", 0, xs),
        ("w", "saved", 1, (K, M)),
        ("g", "cotangent", 0, ys),
        ("dx", "gradient", 0, xs),
    )
    more = (("dw", "gradient", 0, (K, M)), ("db", "gradient", 0, (M,)))
    dx, dw = step("dense_dx", parts, 1, 2, 3, "rows"), step("dense_dw", 1, 0, 2, 4, 5, "rows")
    plans = (
        Plan("forward", (), (), given, run, (3,), (0, 1)),
        Plan("inference", (), (), given, run, (3,)),
        Plan("backward", (), ("x",), buffers(*back), (dx,), gradients=(3,)),
        Plan("backward", (), ("x", "w", "b"), buffers(*back, *more), (dx, dw), gradients=(3, 4, 5)),
    )
    return Toy(
        "dense", blueprint, DENSE_C, plans, {"dense_fwd": "ppppi", "dense_dx": "pppi", "dense_dw": "ppppi"}
    )


ALL = {"affine": affine, "softmax": softmax, "norm": norm, "dense": dense}
