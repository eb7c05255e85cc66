"""16-bit library calls by way of float32, where a processor has no instructions for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import externs, widening

CONV = {"stride": "1,1", "padding": "1,1", "dilation": "1,1", "groups": 1, "data_format": "NHWC"}
ATTEND = {"is_causal": True, "scale": 0.25}
SHORT = [torch.bfloat16, torch.float16]


def drawn(*shape: int, kind: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(kind)


def called(op: str, attrs: dict[str, Any], inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """What the caller of a library call has afterwards."""
    made = externs.prepare(op, attrs, len(inputs))(inputs, outs)
    for out, value in zip(outs, made or (), strict=False):
        out.copy_(value)
    return list(outs)


def case(op: str, kind: torch.dtype) -> tuple[dict[str, Any], list[Tensor], list[Tensor]]:
    """Attributes, operands and places for the results."""

    def t(*shape: int) -> Tensor:
        return drawn(*shape, kind=kind)

    if op == "attention_grad":
        q, k, v, g = (t(2, 3, 7, 16) for _ in range(4))
        scores = (q.float() @ k.float().transpose(-1, -2)) * ATTEND["scale"]
        scores = scores.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf)
        out = (scores.softmax(-1) @ v.float()).to(kind)
        return ATTEND, [g, q, k, v, out, scores.logsumexp(-1)], [torch.empty_like(q) for _ in range(3)]
    made: dict[str, tuple[dict[str, Any], list[Tensor], list[Tensor]]] = {
        "mm": ({}, [t(9, 24).t().contiguous().t(), t(24, 11)], [torch.empty(9, 11, dtype=kind)]),
        "addmm": (
            {"beta": 0.5, "alpha": 2.0},
            [t(11), t(9, 24), t(24, 11)],
            [torch.empty(9, 11, dtype=kind)],
        ),
        "bmm": ({}, [t(3, 9, 24), t(3, 24, 11)], [torch.empty(3, 9, 11, dtype=kind)]),
        "baddbmm": ({}, [t(3, 9, 11), t(3, 9, 24), t(3, 24, 11)], [torch.empty(3, 9, 11, dtype=kind)]),
        "conv2d": (CONV, [t(2, 8, 8, 6), t(5, 3, 3, 6), t(5)], [torch.empty(2, 8, 8, 5, dtype=kind)]),
        "conv2d_input_grad": (CONV, [t(2, 8, 8, 5), t(5, 3, 3, 6)], [torch.empty(2, 8, 8, 6, dtype=kind)]),
        "conv2d_weight_grad": (CONV, [t(2, 8, 8, 5), t(2, 8, 8, 6)], [torch.empty(5, 3, 3, 6, dtype=kind)]),
    }
    return made[op]


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize(
    "op",
    ["mm", "addmm", "bmm", "baddbmm", "conv2d", "conv2d_input_grad", "conv2d_weight_grad", "attention_grad"],
)
def test_it_is_the_float32_result_rounded_once(
    op: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    attrs, inputs, outs = case(op, kind)
    before = [t.clone() for t in inputs]
    wide = called(
        op, attrs, [t.float() for t in inputs], [torch.empty_like(o, dtype=torch.float32) for o in outs]
    )
    monkeypatch.setattr(widening, "slow", lambda kind: True)
    found = called(op, attrs, inputs, outs)
    for got, exact in zip(found, wide, strict=True):
        assert torch.equal(got, exact.to(kind))
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True)), "operands stay as they are"
    torchs = [torch.empty_like(o) for o in outs]
    monkeypatch.setattr(widening, "slow", lambda kind: False)
    for got, own in zip(found, called(op, attrs, inputs, torchs), strict=True):
        torch.testing.assert_close(got, own, rtol=0.03, atol=0.03)


def test_a_wider_result_is_written_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of weights are added up in float32."""
    monkeypatch.setattr(widening, "slow", lambda kind: True)
    a, b = drawn(9, 24, kind=torch.bfloat16), drawn(24, 11, kind=torch.bfloat16)
    (out,) = called("mm", {}, [a, b], [torch.empty(9, 11)])
    assert torch.equal(out, a.float() @ b.float())


def test_few_rows_along_the_memory_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(widening, "slow", lambda kind: True)
    monkeypatch.setattr(
        widening, "_room", lambda t: asked.append(t) or torch.empty_like(t, dtype=torch.float32)
    )
    w = drawn(11, 24, kind=torch.bfloat16).t()
    for rows, copies in ((1, 0), (4, 0), (5, 3)):
        called(
            "mm", {}, [drawn(rows, 24, kind=torch.bfloat16), w], [torch.empty(rows, 11, dtype=torch.bfloat16)]
        )
        assert len(asked) == copies
    called("mm", {}, [drawn(1, 24, kind=torch.bfloat16), w.contiguous()], [torch.empty(1, 11).bfloat16()])
    assert len(asked) == 6, "a weight whose rows are not summed along its memory"


def test_float32_is_left_alone() -> None:
    assert not widening.slow(torch.float32) and not widening.slow(torch.float64)
    for kind, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        assert widening.slow(kind) is not getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
