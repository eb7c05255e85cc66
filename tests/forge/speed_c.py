"""Speed of the C kernels beside torch's eager operators: `python -m tests.forge.speed_c`. A report, not a
test."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from esper_ir.types import DType
from forge.plan import KernelPlan
from forge.target import resolve
from tests.forge import plans as P
from tests.forge.native import call, library
from tests.forge.plans import BF16, F32, tensors

ROWS, COLS = 512, 1024


def best(run: Callable[[], object], seconds: float = 1.0) -> float:
    """Shortest of as many runs as fit, in seconds: other work on the machine only ever adds."""
    run()
    found, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        found = min(found, time.perf_counter() - start)
    return found


def memory(dtype: DType) -> dict[str, torch.Tensor]:
    full = ("x", "r", "g", "y", "dh")
    out = tensors(dict.fromkeys(full, (ROWS, COLS)), dict.fromkeys(full, dtype))
    out |= tensors(dict.fromkeys(("w", "bias", "dw"), (COLS,)), dict.fromkeys(("w", "bias", "dw"), dtype))
    return out | {"rstd": torch.rand(ROWS), "part": torch.zeros(64, COLS), "mean": torch.zeros(ROWS)}


def eager(data: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    x, r, w, bias, g = (data[n].clone() for n in ("x", "r", "w", "bias", "g"))
    inputs = [t.requires_grad_() for t in (x, r, w)]
    out = F.rms_norm(x + r, (COLS,), w, 1e-6)
    plain = [t.detach() for t in (x, r, w, bias)]
    return {
        "rms_forward": lambda: F.rms_norm(plain[0] + plain[1], (COLS,), plain[2], 1e-6),
        "rms_backward": lambda: torch.autograd.grad(out, inputs, g, retain_graph=True),
        "layer_norm": lambda: F.layer_norm(plain[0], (COLS,), plain[2], plain[3]),
        "softmax": lambda: F.softmax(plain[0], -1),
        "bias_gelu": lambda: F.gelu(plain[0] + plain[3]),
    }


def main() -> None:
    torch.set_num_threads(1)
    print(f"{ROWS}x{COLS}, one thread, ns per element, shortest run of one second")
    names = list(dict.fromkeys(("cpu-v3", resolve("cpu").name)))
    print(f"{'kernel':14}{'dtype':10}" + "".join(f"{n:>10}" for n in names) + f"{'eager':>10}")
    for dtype in (BF16, F32):
        data = memory(dtype)
        peers = eager(data)
        made: dict[str, tuple[KernelPlan, ...]] = {
            "rms_forward": (P.rms_forward(COLS, dtype, 8),),
            "rms_backward": (P.rms_backward(COLS, dtype, ROWS // 64), P.column_sum(COLS, dtype, 1024)),
            "layer_norm": (P.layer_norm(COLS, dtype),),
            "softmax": (P.softmax(COLS, dtype),),
            "bias_gelu": (P.bias_gelu(COLS, dtype),),
        }
        for name, steps in made.items():
            times = [_native(steps, data, target) for target in names] + [best(peers[name])]
            cells = "".join(f"{t / ROWS / COLS * 1e9:10.3f}" for t in times)
            print(f"{name:14}{dtype.value:10}{cells}", flush=True)


def _native(steps: tuple[KernelPlan, ...], data: dict[str, torch.Tensor], target: str) -> float:
    code = library(steps, resolve(target))

    def run() -> None:
        for plan in steps:
            call(code, plan, data, {"m": ROWS, "parts": 64})

    return best(run)


if __name__ == "__main__":
    main()
