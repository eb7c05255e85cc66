"""Library calls beside products: convolution, attention, pooling, lookup, joining, scans.

Every call has the form `run(inputs, outs)`. It either writes into `outs` and returns None, or returns its
results, which the caller puts in their place (a result that the library allocated anyway is not copied).
Attributes are JSON scalars; several numbers are one string, joined by commas. `data_format` NHWC means
dense tensors [n, h, w, c] and weights [out, h, w, in]: seen as NCHW they are torch's channels-last memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime import lookups
from runtime.extern import Attrs, Extern, Run, aten, ints, plain


def _first(x: Tensor, attrs: Attrs) -> Tensor:
    """Channels moved to axis 1."""
    return x.permute(0, 3, 1, 2) if attrs.get("data_format") == "NHWC" else x


def _last(x: Tensor, attrs: Attrs) -> Tensor:
    return x.permute(0, 2, 3, 1) if attrs.get("data_format") == "NHWC" else x


# Convolution.


def _geometry(attrs: Attrs) -> tuple[list[int], list[int], list[int], int]:
    return ints(attrs["stride"]), ints(attrs["padding"]), ints(attrs["dilation"]), int(attrs["groups"])


def _conv(attrs: Attrs) -> Run:
    stride, padding, dilation, groups = _geometry(attrs)

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
        x, w = (_first(t, attrs) for t in inputs[:2])
        bias = inputs[2] if len(inputs) > 2 else None
        out = aten.convolution(x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups)
        return (_last(out, attrs),)

    return plain(run)


def _bordered(x: Tensor, padding: Sequence[int]) -> Tensor:
    """With its zeros written out: they count where a weight is infinite, as they do in torch's own loops."""
    around = [size for size in reversed(padding) for _ in range(2)]
    return functional.pad(x, around) if any(around) else x


def _wide_conv(attrs: Attrs) -> Run:
    """In float32 by oneDNN: for few images torch may take a transform, in which an infinity spreads."""
    stride, padding, dilation, groups = _geometry(attrs)
    none, whole = [0] * len(stride), _conv(attrs)

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor] | None:
        if not inputs[0].numel() or not torch.backends.mkldnn.is_available():
            return whole(inputs, outs)
        x, w = (_first(t, attrs) for t in inputs[:2])
        bias = inputs[2] if len(inputs) > 2 else None
        x = _bordered(x, padding)
        return (_last(aten.mkldnn_convolution(x, w, bias, none, stride, dilation, groups), attrs),)

    return plain(run)


def _wide_weight_gradient(attrs: Attrs) -> Run:
    stride, padding, dilation, groups = _geometry(attrs)
    none, mask = [0] * len(stride), [False, True, False]

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
        g, x = (_first(t, attrs) for t in inputs)
        made = aten.convolution_backward(
            g, _bordered(x, padding), _first(outs[0], attrs), None, stride, none, dilation, False, none,
            groups, mask,
        )  # fmt: skip
        return (_last(made[1], attrs),)

    return plain(run)


def _conv_gradient(which: int) -> Callable[[Attrs], Run]:
    """0: of the input, from (cotangent, weight); 1: of the weight, from (cotangent, input). What is asked
    for also lends its shape and strides in place of the operand that the call does not read.
    """

    def prepare(attrs: Attrs) -> Run:
        stride, padding, dilation, groups = _geometry(attrs)
        mask = [which == 0, which == 1, False]

        def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
            g, other = (_first(t, attrs) for t in inputs)
            own = _first(outs[0], attrs)
            x, w = (own, other) if which == 0 else (other, own)
            made = aten.convolution_backward(
                g, x, w, None, stride, padding, dilation, False, [0] * len(stride), groups, mask
            )
            return (_last(made[which], attrs),)

        return plain(run)

    return prepare


# Attention. `lse`, float32 [batch, heads, queries]: logarithm of the sum of exponentials of the scaled
# scores. `layout` BSHD: operands and results are [batch, length, heads, width], which is how torch's kernels
# lay out what they return.

MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Scaled scores in float32 (float64 for float64); what is masked is -inf."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * scale
    if not causal:
        return scores
    kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~kept, -math.inf)


def _turned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Heads and rows exchanged in all but `lse`."""
    return [t.transpose(1, 2) if t.dim() == 4 else t for t in tensors]


def _attention(attrs: Attrs, run: Run) -> Run:
    if attrs.get("layout") != "BSHD":
        return plain(run)

    def turned(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
        return _turned(run(_turned(inputs), outs) or ())

    return plain(turned)


def _attention_gradient(attrs: Attrs) -> Run:
    return _attention(attrs, _Attention(attrs).backward)


class _Attention:
    """Chooses torch's kernel as torch does, once per shape and type."""

    def __init__(self, attrs: Attrs) -> None:
        self.causal, self.scale = bool(attrs["is_causal"]), float(attrs["scale"])
        self.known: dict[Any, int] = {}

    def choice(self, q: Tensor, k: Tensor, v: Tensor) -> int:
        key = (q.shape, k.shape, v.shape, q.dtype, q.device)
        found = self.known.get(key)
        if found is None:
            found = self._choose(q, k, v)
            if len(self.known) < 64:
                self.known[key] = found
        return found

    def _choose(self, q: Tensor, k: Tensor, v: Tensor) -> int:
        if not q.numel() or not k.numel() or q.dtype is torch.float64:
            return MATH
        alike = q.shape[-1] == k.shape[-1] == v.shape[-1]
        if q.device.type == "cpu":
            return FLASH if alike else MATH
        found = int(torch.ops.aten._fused_sdp_choice(q, k, v, None, 0.0, self.causal, scale=self.scale))
        fits = alike and q.shape[-1] % 8 == 0
        return found if found in (FLASH, EFFICIENT, CUDNN) and fits else MATH

    def forward(self, inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The result, and `lse` where it is asked for: where a backward follows."""
        q, k, v = inputs
        kind, wanted = self.choice(q, k, v), len(outs) > 1
        if kind == MATH:
            scores = _scores(q, k, self.causal, self.scale)
            out = torch.matmul(torch.softmax(scores, -1), v.to(scores.dtype)).to(q.dtype)
            return (out, torch.logsumexp(scores, -1)) if wanted else (out,)
        made = self._by_library(kind, q, k, v, wanted)
        if not wanted:
            return made[:1]
        lse = made[1].squeeze(-1) if made[1].dim() == 4 else made[1]
        return made[0], lse[..., : q.shape[-2]]

    def _by_library(self, kind: int, q: Tensor, k: Tensor, v: Tensor, wanted: bool) -> Sequence[Tensor]:
        if q.device.type == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, self.causal, scale=self.scale
            )
        if kind == FLASH:
            return aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, self.causal, False, scale=self.scale
            )
        if kind == EFFICIENT:
            return aten._scaled_dot_product_efficient_attention(
                q, k, v, None, wanted, 0.0, self.causal, scale=self.scale
            )
        return aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, wanted, 0.0, self.causal, False, scale=self.scale
        )

    def backward(self, inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
        g, q, k, v, out, lse = inputs
        kind = self.choice(q, k, v)
        if kind == MATH:
            return self._by_hand(inputs)
        if q.device.type == "cpu":
            lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, out, lse, 0.0, self.causal, scale=self.scale
            )
        most = (q.shape[-2], k.shape[-2])
        seed = torch.empty(
            (), dtype=torch.int64, device=q.device
        )  # without dropout torch's kernels read none
        if kind == FLASH:
            return aten._scaled_dot_product_flash_attention_backward(
                g, q, k, v, out, lse, None, None, *most, 0.0, self.causal, seed, seed, scale=self.scale
            )
        if kind == CUDNN:
            return aten._scaled_dot_product_cudnn_attention_backward(
                g, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None, *most, 0.0, self.causal,
                scale=self.scale,
            )  # fmt: skip
        missing = -lse.shape[-1] % 32
        padded = functional.pad(lse, (0, missing)) if missing else lse
        mask = [True, True, True, False]
        return aten._scaled_dot_product_efficient_attention_backward(
            g, q, k, v, None, out, padded, seed, seed, 0.0, mask, self.causal, scale=self.scale
        )[:3]

    def _by_hand(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """dv = p^T g; ds = p (g v^T - sum(g out)); dq = scale ds k; dk = scale ds^T q (Dao 2022)."""
        g, q, k, v, out, lse = inputs
        scores = _scores(q, k, self.causal, self.scale)
        p = torch.exp(scores - lse.to(scores.dtype).unsqueeze(-1))
        wg, wq, wk, wv = (t.to(scores.dtype) for t in (g, q, k, v))
        delta = (wg * out.to(scores.dtype)).sum(-1, keepdim=True)
        ds = p * (torch.matmul(wg, wv.transpose(-1, -2)) - delta) * self.scale
        found = (
            torch.matmul(ds, wk),
            torch.matmul(ds.transpose(-1, -2), wq),
            torch.matmul(p.transpose(-1, -2), wg),
        )
        return tuple(t.to(q.dtype) for t in found)


# Pooling.


def _max_numbers(attrs: Attrs) -> tuple[Any, ...]:
    names = ("kernel", "stride", "padding", "dilation")
    return (*(ints(attrs.get(n, "1")) for n in names), bool(attrs.get("ceil_mode", False)))


def _avg_numbers(attrs: Attrs) -> tuple[Any, ...]:
    names = ("kernel", "stride", "padding")
    more = attrs.get("ceil_mode", False), attrs["count_include_pad"]
    return (*(ints(attrs[n]) for n in names), *map(bool, more), attrs.get("divisor_override"))


def _max_pool(rank: int) -> Callable[[Attrs], Run]:
    call = getattr(aten, f"max_pool{rank}d_with_indices")

    def prepare(attrs: Attrs) -> Run:
        def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
            return tuple(_last(t, attrs) for t in call(_first(inputs[0], attrs), *_max_numbers(attrs)))

        return plain(run)

    return prepare


def _max_pool_gradient(rank: int) -> Callable[[Attrs], Run]:
    call = getattr(aten, f"max_pool{rank}d_with_indices_backward")

    def prepare(attrs: Attrs) -> Run:
        def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
            g, x, places = (_first(t, attrs) for t in inputs)
            return (_last(call(g, x, *_max_numbers(attrs), places), attrs),)

        return plain(run)

    return prepare


def _widened(x: Tensor, rank: int) -> Tensor:
    """torch has no three-dimensional mean of 16-bit numbers on the CPU."""
    return x.float() if rank == 3 and x.dtype.itemsize == 2 and x.device.type == "cpu" else x


def _avg_pool(rank: int) -> Callable[[Attrs], Run]:
    call = getattr(aten, f"avg_pool{rank}d")

    def prepare(attrs: Attrs) -> Run:
        def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
            x = _widened(_first(inputs[0], attrs), rank)
            return (_last(call(x, *_avg_numbers(attrs)), attrs).to(inputs[0].dtype),)

        return plain(run)

    return prepare


def _avg_pool_gradient(rank: int) -> Callable[[Attrs], Run]:
    call = getattr(aten, f"avg_pool{rank}d_backward")

    def prepare(attrs: Attrs) -> Run:
        def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
            g, like = (_widened(_first(t, attrs), rank) for t in (inputs[0], outs[0]))
            # torch's kernel for cards gives other numbers for overlapping or padded windows where the memory
            # of `like` (which is not read) is channels-last.
            like = like.contiguous() if like.is_cuda else like
            return (_last(call(g, like, *_avg_numbers(attrs)), attrs).to(inputs[0].dtype),)

        return plain(run)

    return prepare


def _adaptive(rank: int) -> Callable[[Attrs], Run]:
    call = getattr(aten, f"adaptive_max_pool{rank}d")

    def prepare(attrs: Attrs) -> Run:
        size = ints(attrs["output_size"])
        return plain(lambda inputs, outs: call(inputs[0], size))

    return prepare


def _adaptive_gradient(rank: int) -> Callable[[Attrs], Run]:
    call = getattr(aten, f"adaptive_max_pool{rank}d_backward")
    return lambda attrs: plain(lambda inputs, outs: (call(*inputs),))


_CONV = frozenset({"stride", "padding", "dilation", "groups", "data_format", "precision"})
_POOL = frozenset({"kernel", "stride", "padding", "ceil_mode", "data_format"})
_MAX = _POOL | {"dilation"}
_AVG = _POOL | {"count_include_pad", "divisor_override"}
_ATTENTION = frozenset({"is_causal", "scale", "layout"})

CALLS: Mapping[str, Extern] = {
    "conv2d": Extern(2, _CONV, _conv, "cudnn", most=3, wide=_wide_conv),
    "conv2d_input_grad": Extern(2, _CONV, _conv_gradient(0), "cudnn", wide=_conv_gradient(0)),
    "conv2d_weight_grad": Extern(2, _CONV, _conv_gradient(1), "cudnn", wide=_wide_weight_gradient),
    "conv3d": Extern(2, _CONV, _conv, "cudnn", most=3, wide=_wide_conv),
    "conv3d_input_grad": Extern(2, _CONV, _conv_gradient(0), "cudnn", wide=_conv_gradient(0)),
    "conv3d_weight_grad": Extern(2, _CONV, _conv_gradient(1), "cudnn", wide=_wide_weight_gradient),
    "attention": Extern(3, _ATTENTION, lambda a: _attention(a, _Attention(a).forward)),
    "attention_grad": Extern(6, _ATTENTION, _attention_gradient, wide=_attention_gradient),
    **{f"max_pool{n}d": Extern(1, _MAX, _max_pool(n)) for n in (2, 3)},
    **{f"max_pool{n}d_grad": Extern(3, _MAX, _max_pool_gradient(n)) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d": Extern(1, frozenset({"output_size"}), _adaptive(n)) for n in (2, 3)},
    **{
        f"adaptive_max_pool{n}d_grad": Extern(3, frozenset({"output_size"}), _adaptive_gradient(n))
        for n in (2, 3)
    },
    **{f"avg_pool{n}d": Extern(1, _AVG, _avg_pool(n)) for n in (2, 3)},
    **{f"avg_pool{n}d_grad": Extern(1, _AVG, _avg_pool_gradient(n)) for n in (2, 3)},
    "embedding": Extern(2, frozenset(), lookups.lookup),
    "embedding_grad": Extern(2, frozenset(), lookups.lookup_gradient),
    "cat": Extern(1, frozenset({"dim"}), lookups.cat, most=64),
    "pad": Extern(1, frozenset({"before", "after", "value"}), lookups.pad),
    "cumsum": Extern(1, frozenset({"dim", "reverse"}), lookups.cumsum),
    **{
        n: Extern(1, frozenset({"dim", "reverse"}), lookups.scan(n))
        for n in ("cumprod", "cummax", "cummin", "logcumsumexp")
    },
    "prod": Extern(1, frozenset(), lookups.prod),
    "gather": Extern(2, frozenset({"dim"}), lookups.gather),
    **{n: Extern(3, frozenset({"dim"}), lookups.scatter(n)) for n in ("scatter", "scatter_add")},
    "unsort": Extern(2, frozenset({"dim"}), lookups.unsort),
    "sort": Extern(1, frozenset({"dim", "descending"}), lookups.sort),
    "recurrence": Extern(2, frozenset({"dim", "reverse"}), lookups.recurrence),
}
"""By name; `runtime.externs.TABLE` holds them beside the products."""

NONDETERMINISTIC: Mapping[str, frozenset[str]] = {
    "cuda": frozenset(
        {
            "attention_grad",
            "max_pool2d_grad",
            "max_pool3d_grad",
            "avg_pool3d_grad",
            "conv2d_input_grad",
            "conv2d_weight_grad",
            "conv3d_input_grad",
            "conv3d_weight_grad",
            "scatter",
            "scatter_add",
            "adaptive_max_pool2d_grad",
            "adaptive_max_pool3d_grad",
        }
    ),
    "cpu": frozenset({"conv2d_weight_grad", "conv3d_weight_grad", "mm", "addmm", "bmm", "baddbmm"}),
}
"""Calls, by kind of target, whose bits may change from run to run: atomic sums on a card, on the CPU
sums that are split by the number of threads (products too: [4096, 40] x [40, 24] in float32 has other bits on
three threads than on one).
"""
