"""Library calls of the closed table against torch's own functions, and what becomes of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from esper_ir.diagnostics import EsperError
from library.launch import ExternStep, View
from runtime.calls import CALLS
from runtime.executor import Extern
from runtime.externs import TABLE, prepare, strided
from runtime.layout import ExternCall

CONV = {"stride": "2,1", "padding": "1,1", "dilation": "1,1", "groups": 2, "precision": "ieee"}


def call(op: str, attrs: dict[str, Any], inputs: list[Tensor], *outs: Tensor) -> list[Tensor]:
    """Results, wherever the call put them."""
    made = prepare(op, attrs, len(inputs))(inputs, outs)
    return list(made) if made is not None else list(outs)


def seeded(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(got: Tensor, want: Tensor) -> int:
    """How many numbers were compared."""
    torch.testing.assert_close(got, want.to(got.dtype), rtol=2e-5, atol=2e-5)
    return got.numel()


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_convolution_and_its_gradients(order: str) -> None:
    def place(t: Tensor) -> Tensor:
        return t.permute(0, 2, 3, 1).contiguous() if order == "NHWC" else t

    x, w = seeded(2, 4, 6, 5).requires_grad_(), seeded(6, 2, 3, 3).requires_grad_()
    y = functional.conv2d(x, w, None, (2, 1), 1, 1, 2)
    g = seeded(*y.shape)
    dx, dw = torch.autograd.grad(y, (x, w), g)
    attrs = {**CONV, "data_format": order}
    held = [place(t.detach()) for t in (x, w, g)]
    assert close(call("conv2d", attrs, held[:2], place(y.detach()))[0], place(y.detach()))
    assert close(
        call("conv2d_input_grad", attrs, [held[2], held[1]], torch.empty_like(held[0]))[0], place(dx)
    )
    assert close(
        call("conv2d_weight_grad", attrs, [held[2], held[0]], torch.empty_like(held[1]))[0], place(dw)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_and_its_gradients(causal: bool, dtype: torch.dtype) -> None:
    """Through torch's kernel for the CPU, and for float64 by the formulas."""
    q, k, v = (seeded(2, 3, n, 8, dtype=dtype).requires_grad_() for n in (5, 7, 7))
    attrs = {"is_causal": causal, "scale": 0.3}
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    g = seeded(*out.shape, dtype=dtype)
    wanted = torch.autograd.grad(out, (q, k, v), g)
    held = [t.detach() for t in (q, k, v)]
    lse = torch.empty(2, 3, 5, dtype=dtype)
    got = call("attention", attrs, held, torch.empty_like(out), lse)
    close(got[0], out.detach())
    assert len(call("attention", attrs, held, torch.empty_like(out))) == 1
    given = [g, *held, got[0], got[1].contiguous()]
    grads = call("attention_grad", attrs, given, *map(torch.empty_like, held))
    for mine, want in zip(grads, wanted, strict=True):
        close(mine, want)


def test_results_are_adopted_only_into_memory_of_the_plan() -> None:
    """A result that the library allocated takes its slot; memory of the caller's is written instead."""
    x, w = seeded(1, 4, 5, 5), seeded(4, 2, 3, 3)
    attrs = {**CONV, "stride": "1,1", "data_format": "NCHW"}
    step = ExternStep("c", "conv2d", (View(0), View(1)), (View(2),), attrs)
    views = [strided(View(n), tuple(t.shape), {}) for n, t in enumerate((x, w, x))]

    class Here:
        device = torch.device("cpu")

    for fresh in (2, 3):
        home = torch.zeros_like(x)
        slots: list[Any] = [x, w, home]
        bound = ExternCall(step, ((0, views[0]), (1, views[1])), ((2, views[2]),), fresh)
        Extern(bound, Here())(0, slots)  # type: ignore[arg-type]
        want = functional.conv2d(x, w, None, 1, 1, 1, 2)
        close(slots[2], want)
        assert (slots[2] is home) == (fresh == 3) and torch.equal(home, want if fresh == 3 else home * 0)


def test_autocast_does_not_reach_a_call() -> None:
    x, w = seeded(1, 4, 5, 5), seeded(4, 2, 3, 3)
    attrs = {**CONV, "data_format": "NCHW"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (got,) = call("conv2d", attrs, [x, w], torch.empty(1, 4, 3, 5))
    assert got.dtype is torch.float32


Case = tuple[str, dict[str, Any], Callable[[], list[Tensor]], Callable[..., Tensor]]
POOL = {"kernel": "3,2", "stride": "2,2", "padding": "1,0", "data_format": "NCHW"}
CASES: list[Case] = [
    ("cat", {"dim": 1}, lambda: [seeded(2, 3), seeded(2, 4)], lambda a, b: torch.cat((a, b), 1)),
    ("pad", {"before": "1,0", "value": 2.0}, lambda: [seeded(2, 3)],
     lambda x: functional.pad(x, (0, 2, 1, 1), value=2.0)),
    ("cumsum", {"dim": 0}, lambda: [seeded(4, 3)], lambda x: x.cumsum(0)),
    ("embedding", {}, lambda: [torch.tensor([[2, 0], [1, 2]]), seeded(3, 5)],
     lambda rows, table: functional.embedding(rows, table)),
    ("max_pool2d", POOL, lambda: [seeded(1, 2, 6, 6)],
     lambda x: functional.max_pool2d(x, (3, 2), (2, 2), (1, 0))),
    ("avg_pool2d", {**POOL, "count_include_pad": False}, lambda: [seeded(1, 2, 6, 6)],
     lambda x: functional.avg_pool2d(x, (3, 2), (2, 2), (1, 0), count_include_pad=False)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "attrs", "inputs", "meaning"), CASES, ids=[c[0] for c in CASES])
def test_call_is_torchs(op: str, attrs: Any, inputs: Any, meaning: Any) -> None:
    given = inputs()
    want = meaning(*given)
    assert close(call(op, attrs, given, torch.empty_like(want))[0], want)


def test_recurrence_is_the_loop() -> None:
    a, b = torch.rand(3, 9), seeded(3, 9)
    h, want = torch.zeros(3), []
    for t in range(9):
        h = a[:, t] * h + b[:, t]
        want.append(h)
    assert close(call("recurrence", {"dim": 1}, [a, b], torch.empty(3, 9))[0], torch.stack(want, 1))


def test_table_is_closed() -> None:
    assert set(CALLS) < set(TABLE)
    for op, attrs, inputs in (("conv2d", {"axis": 1}, 2), ("cat", {"dim": 0}, 0), ("conv4d", {}, 2)):
        with pytest.raises(EsperError) as error:
            prepare(op, attrs, inputs)
        assert error.value.code == "E0809"
