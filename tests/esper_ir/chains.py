"""Modules to import: small chains of one to eight operators, of the kinds that kernels are written for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[..., Tensor]


@dataclass(frozen=True)
class Chain:
    """`make` gives the module; `shapes` of its inputs; `varies`: the first axis of every input may vary."""

    name: str
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    varies: bool = True
    low: float = -1.0


class Steps(nn.Module):
    """One step after the other; the first is given all inputs."""

    def __init__(self, *steps: Step) -> None:
        super().__init__()
        self.layers = nn.ModuleList([s for s in steps if isinstance(s, nn.Module)])
        self.steps = steps

    def forward(self, *inputs: Tensor) -> Tensor:
        value = self.steps[0](*inputs)
        for step in self.steps[1:]:
            value = step(value)
        return value


class With(nn.Module):
    """A binary operator with a parameter on the right."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.held = nn.Parameter(torch.randn(shape) * 0.5 + 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.held)


class Beside(nn.Module):
    """A function of what a layer gives and of the second input."""

    def __init__(self, layer: nn.Module, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self.layer(x), y)


class Residual(nn.Module):
    """The operand added to what a step makes of it."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x) + x


def chain(name: str, *steps: Callable[[], Any], shapes: Sequence[Sequence[int]], **more: Any) -> Chain:
    """Every step is made anew: `lambda: nn.Linear(4, 4)` or `lambda: torch.tanh`."""
    return Chain(name, lambda: Steps(*(s() for s in steps)), tuple(tuple(s) for s in shapes), **more)


def plain(name: str, function: Step, *shapes: Sequence[int], **more: Any) -> Chain:
    return chain(name, lambda: function, shapes=shapes, **more)


add, mul, div, sub = torch.add, torch.mul, torch.div, torch.sub
IMAGE, VOLUME, ROWS = (2, 4, 9, 8), (2, 3, 6, 7, 6), (3, 16)


def conv(rank: int, inner: int, outer: int, kernel: Any = 3, **more: Any) -> Callable[[], nn.Module]:
    return lambda: (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](inner, outer, kernel, **more)


def up(rank: int, inner: int, outer: int, kernel: Any = 3, **more: Any) -> Callable[[], nn.Module]:
    made = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return lambda: made[rank - 1](inner, outer, kernel, **more)


def does(function: Step) -> Callable[[], Step]:
    return lambda: function


ONE: tuple[Chain, ...] = (
    plain("square_product", torch.matmul, (5, 8), (8, 6), varies=False),
    plain("matrix_vector", torch.matmul, (5, 40), (40, 1), varies=False),
    plain("batched_by_shared", torch.matmul, (2, 5, 8), (8, 6), varies=False),
    plain("batched_products", torch.bmm, (3, 5, 8), (3, 8, 6)),
    plain("matrix_vector_1d", torch.matmul, (5, 8), (8,), varies=False),
    plain("diagonal_product", lambda a, b: torch.diag(a) @ b, (6,), (6, 5), varies=False),
    plain("scaled_columns", lambda a, b: a[:, None] * b, (6,), (6, 5)),
    plain("four_axes_product", lambda a, b: torch.einsum("bijl,lk->bijk", a, b), (2, 3, 4, 8), (8, 6),
          varies=False),
    plain("upper_product", lambda a, b: torch.triu(a @ b), (6, 6), (6, 6), varies=False),
    plain("lower_product", lambda a, b: torch.tril(torch.tril(a) @ torch.tril(b)), (6, 6), (6, 6),
          varies=False),
    plain("transposed_left", lambda a, b: a.T @ b, (8, 5), (8, 6)),
    plain("transposed_both", lambda a, b: a.T @ b.T, (8, 5), (6, 8), varies=False),
    *(plain(f.__name__, f, ROWS) for f in (
        torch.relu, torch.tanh, torch.sigmoid, F.gelu, F.silu, F.leaky_relu, F.hardsigmoid, F.hardtanh,
        F.softplus,
        F.elu, F.selu, F.softsign, F.mish, F.hardswish, F.logsigmoid, F.relu6, F.celu, F.hardshrink,
        F.softshrink,
        F.tanhshrink)),
    plain("softmax", lambda x: torch.softmax(x, 1), ROWS),
    plain("log_softmax", lambda x: torch.log_softmax(x, 1), ROWS),
    plain("softsign_by_hand", lambda x: x / (1 + torch.abs(x)), ROWS),
    plain("gelu_by_hand", lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))), ROWS),
    chain("batch_norm", lambda: nn.BatchNorm2d(4), shapes=[IMAGE]),
    chain("instance_norm", lambda: nn.InstanceNorm2d(4), shapes=[IMAGE]),
    chain("group_norm", lambda: nn.GroupNorm(2, 4), shapes=[IMAGE]),
    chain("layer_norm", lambda: nn.LayerNorm((4, 9, 8)), shapes=[IMAGE]),
    plain("rms_by_hand", lambda x: x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5), IMAGE),
    plain("frobenius", lambda x: x / torch.norm(x, p="fro"), IMAGE),
    plain("l1_rows", lambda x: x / torch.mean(torch.abs(x), dim=1, keepdim=True), ROWS),
    plain("l2_rows", lambda x: x / torch.norm(x, p=2, dim=1, keepdim=True), ROWS),
    chain("max_pool1d", lambda: nn.MaxPool1d(3, 2, 1, 2), shapes=[(2, 3, 17)]),
    chain("max_pool2d", lambda: nn.MaxPool2d(4, 1, 1, 1), shapes=[IMAGE]),
    chain("max_pool3d", lambda: nn.MaxPool3d(2, 2, 1, ceil_mode=True), shapes=[VOLUME]),
    chain("avg_pool1d", lambda: nn.AvgPool1d(4, 1, 2), shapes=[(2, 3, 17)]),
    chain("avg_pool2d", lambda: nn.AvgPool2d(3), shapes=[IMAGE]),
    chain("avg_pool3d", lambda: nn.AvgPool3d(3, 2, 1), shapes=[VOLUME]),
    chain("adaptive_pools", lambda: nn.AdaptiveAvgPool2d((3, 2)), shapes=[(2, 4, 9, 8)]),
    plain("sum_over", lambda x: torch.sum(x, 1, keepdim=True), (3, 5, 7)),
    plain("mean_over", lambda x: torch.mean(x, 1), (3, 5, 7)),
    plain("max_over", lambda x: torch.max(x, 1)[0], (3, 5, 7)),
    plain("min_over", lambda x: torch.min(x, 2)[0], (3, 5, 7)),
    plain("product_over", lambda x: torch.prod(x, 1), (3, 5, 7)),
    plain("place_of_max", lambda x: torch.argmax(x, 1), (3, 5, 7)),
    plain("place_of_min", lambda x: torch.argmin(x, 1), (3, 5, 7)),
    chain("conv1d", conv(1, 4, 6, 3, stride=3, dilation=4, bias=False), shapes=[(2, 4, 30)]),
    chain("conv2d_stride", conv(2, 4, 6, 5, stride=2, padding=2), shapes=[IMAGE]),
    chain("conv2d_oblong", conv(2, 4, 6, (5, 3), dilation=(1, 2), padding=(2, 4)), shapes=[IMAGE]),
    chain("conv2d_groups", conv(2, 4, 8, 3, groups=4, padding="same"), shapes=[IMAGE]),
    chain("conv2d_depth_point", conv(2, 4, 4, 3, padding=1, groups=4), conv(2, 4, 8, 1), shapes=[IMAGE]),
    chain("conv3d", conv(3, 3, 5, (3, 5, 4), bias=False), shapes=[VOLUME]),
    chain("up1d", up(1, 4, 6, 5, stride=1, dilation=3), shapes=[(2, 4, 11)]),
    chain("up1d_strided", up(1, 4, 6, 3, stride=2, padding=1, dilation=2), shapes=[(2, 4, 11)]),
    chain("up2d", up(2, 4, 6, (3, 5), padding=(1, 2)), shapes=[IMAGE]),
    chain("up2d_groups", up(2, 4, 6, (3, 5), stride=(2, 3), padding=(1, 2), dilation=(2, 1), groups=2),
          shapes=[IMAGE]),
    chain("up3d", up(3, 4, 3, (3, 5, 5), bias=False), shapes=[(1, 4, 3, 4, 5)]),
    chain("up3d_strided", up(3, 4, 4, 3, stride=2, padding=1, output_padding=1, groups=2), shapes=[(1, 4,
          3, 4, 5)]),
    chain("up3d_oblong_groups", up(3, 8, 8, (3, 5, 7), stride=2, padding=(1, 2, 3), output_padding=1,
          groups=4), shapes=[(1, 8, 3, 4, 5)]),
    plain("cumsum", lambda x: torch.cumsum(x, 1), ROWS),
    plain("cumprod", lambda x: torch.cumprod(x, 1), ROWS),
    plain("cumsum_reverse", lambda x: torch.cumsum(x.flip(1), 1).flip(1), ROWS),
    plain("cumsum_exclusive", lambda x: torch.cat((torch.zeros_like(x.select(1, 0).unsqueeze(1)), x), 1)[:,
          :-1]
          .cumsum(1), ROWS),
    plain("cumsum_shifted", lambda x: torch.cat((torch.zeros_like(x[:, :1]), torch.cumsum(x[:, :-1], 1)), 1),
          ROWS),
    plain("cumsum_masked", lambda x, m: torch.cumsum(x * (m > 0), 1), ROWS, ROWS),
    plain("mse", lambda a, b: torch.mean((a - b) ** 2), ROWS, ROWS),
    plain("mse_loss", F.mse_loss, ROWS, ROWS),
    plain("huber", F.smooth_l1_loss, ROWS, ROWS),
    plain("hinge", lambda p, t: torch.mean(torch.clamp(1 - p * torch.sign(t), min=0)), (5, 4), (4,),
          varies=False),
    plain("kl_div", lambda p, t: F.kl_div(torch.log(torch.softmax(p, -1)), torch.softmax(t, -1),
                                          reduction="batchmean"), ROWS, ROWS),
    plain("cosine", lambda a, b: torch.mean(1 - F.cosine_similarity(a, b, dim=1)), ROWS, ROWS),
    plain("triplet", lambda a, p, n: F.triplet_margin_loss(a, p, n), ROWS, ROWS, ROWS),
    plain("attention", F.scaled_dot_product_attention, (2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
)  # fmt: skip


def scale(number: float) -> Callable[[], Step]:
    return lambda: lambda x: x * number


LINEAR: tuple[Chain, ...] = (
    chain("linear_scale_leaky", lambda: nn.Linear(16, 8), scale(2.0), lambda: nn.LeakyReLU(0.1),
          shapes=[ROWS]),
    chain("product_half_sum", lambda: With(lambda x, w: x @ w.T, 8, 16), does(lambda x: x / 2),
          does(lambda x: x.sum(1, keepdim=True)), scale(1.5), shapes=[ROWS]),
    chain("linear_reductions", lambda: nn.Linear(16, 8), does(lambda x: x.sum(1, keepdim=True)),
          does(lambda x: torch.max(x, 1, keepdim=True)[0]), does(lambda x: x.mean(1, keepdim=True)),
          does(lambda x: torch.logsumexp(x, 1, keepdim=True)), shapes=[ROWS]),
    chain("linear_double_clamp", lambda: nn.Linear(16, 8), scale(2.0), does(lambda x: x + x),
          does(lambda x: torch.clamp(x, -1, 1)), does(lambda x: torch.logsumexp(x, 1, keepdim=True)),
          does(lambda x: x * F.mish(x)), shapes=[ROWS]),
    Chain("linear_norm_residual", lambda: Beside(Steps(
        nn.Linear(16, 16), lambda x: nn.InstanceNorm2d(1)(x[:, None, None])[:, 0, 0]), lambda a,
        b: (a + b) * b),
        (ROWS, ROWS)),
    chain("linear_groups_hardtanh", lambda: nn.Linear(16, 12), lambda: nn.GroupNorm(3, 12),
          lambda: nn.Hardtanh(-0.5, 0.5), shapes=[ROWS]),
    chain("linear_groups_doubled", lambda: nn.Linear(16, 12), lambda: nn.GroupNorm(3, 12),
          lambda: nn.LeakyReLU(0.01), does(lambda x: x + x), shapes=[ROWS]),
    chain("linear_frozen_copy", lambda: nn.Linear(16, 8),
          does(lambda x: x.clone().detach() + x * 0.5), shapes=[ROWS]),
    chain("linear_sigmoid_sum", lambda: nn.Linear(16, 8), does(torch.sigmoid),
          does(lambda x: x.sum(1, keepdim=True)), shapes=[ROWS]),
    chain("linear_gelu_of_logs", lambda: nn.Linear(16, 8), does(lambda x: torch.logsumexp(x, 1,
          keepdim=True)),
          does(F.leaky_relu), does(F.leaky_relu), does(F.gelu), does(F.gelu), shapes=[ROWS]),
    chain("linear_dropout_softmax", lambda: nn.Linear(16, 8), lambda: nn.Dropout(0.0),
          does(lambda x: torch.softmax(x, 1)), shapes=[ROWS]),
    Chain("linear_dropout_evaluated", lambda: Steps(
        nn.Linear(16, 8), nn.Dropout(0.2), lambda x: torch.softmax(x, 1)).eval(), (ROWS,)),
    chain("linear_layers", lambda: nn.Linear(16, 24), lambda: nn.ReLU(), lambda: nn.Linear(24, 24),
          lambda: nn.ReLU(), lambda: nn.Linear(24, 16), shapes=[ROWS]),
    chain("linear_min_sub", lambda: nn.Linear(16, 8), lambda: With(torch.min, 1), lambda: With(sub, 1),
          shapes=[ROWS]),
    chain("linear_gated", lambda: nn.Linear(16, 8), does(lambda x: torch.sigmoid(x) * 0.7 + x),
          shapes=[ROWS]),
    chain("linear_bias_relu", lambda: nn.Linear(16, 8, bias=False), lambda: With(add, 8), does(torch.relu),
          shapes=[ROWS]),
    chain("linear_centred_gelu", lambda: nn.Linear(16, 8), does(lambda x: torch.max(x, 1,
          keepdim=True).values),
          does(lambda x: x - x.mean(1, keepdim=True)), does(F.gelu), shapes=[ROWS]),
    chain("linear_batch_norm", lambda: nn.Linear(16, 8), lambda: nn.BatchNorm1d(8), lambda: With(mul, 1),
          does(lambda x: torch.softmax(x, 1)), shapes=[ROWS]),
    chain("linear_divided", lambda: nn.Linear(16, 8), does(lambda x: F.gelu(x / 10.0)), shapes=[ROWS]),
    chain("linear_swish_norm", lambda: nn.Linear(16, 8), lambda: nn.GroupNorm(4, 8),
          does(lambda x: x * torch.sigmoid(x)), lambda: With(mul, 8), does(lambda x: x * torch.sigmoid(x)),
          shapes=[ROWS]),
    chain("linear_mish_norm", lambda: nn.Linear(16, 8), lambda: With(add, 8), lambda: nn.Hardtanh(),
          lambda: nn.Mish(), lambda: nn.GroupNorm(2, 8), shapes=[ROWS]),
    chain("linear_pooled", lambda: nn.Linear(16, 12), does(lambda x: F.avg_pool1d(x[:, None], 4)[:, 0]),
          does(F.gelu), scale(2.0), does(lambda x: torch.max(x, 1).values), shapes=[ROWS]),
)  # fmt: skip

PLANE: tuple[Chain, ...] = (
    chain("up2d_clamped", up(2, 4, 6, 3, stride=2, padding=1, output_padding=1), lambda: With(add, 6, 1, 1),
          does(lambda x: torch.clamp(x, 0.0, 1.0) * 2.0), does(lambda x: torch.clamp(x, 0.0, 1.0) / 2.0),
          shapes=[IMAGE]),
    chain("conv2d_mish_mish", conv(2, 4, 6), does(F.mish), does(F.mish), shapes=[IMAGE]),
    chain("up2d_pool_mean", up(2, 4, 4, 3, padding=1), lambda: nn.MaxPool2d(2), lambda: nn.Hardtanh(),
          does(lambda x: torch.tanh(x.mean((2, 3), keepdim=True))), shapes=[IMAGE]),
    chain("up2d_mish", up(2, 4, 4, 3, stride=2), does(lambda x: F.hardtanh(F.mish(x) + 0.5) * 2.0),
          shapes=[IMAGE]),
    chain("conv2d_min", conv(2, 4, 6), scale(2.0), does(lambda x: torch.min(x, 1, keepdim=True)[0]),
          shapes=[IMAGE]),
    chain("up2d_min_sum", up(2, 4, 6, 3, stride=2), does(lambda x: torch.min(x, 1, keepdim=True)[0]),
          does(lambda x: F.gelu(x.sum(2, keepdim=True))), lambda: With(add, 1, 1, 1), shapes=[IMAGE]),
    chain("up2d_logs", up(2, 4, 6), does(lambda x: x.mean((2, 3), keepdim=True)), lambda: With(add, 6, 1, 1),
          does(lambda x: torch.logsumexp(x, 1, keepdim=True)), does(lambda x: x.sum((2, 3)) * 10.0),
          shapes=[IMAGE]),
    chain("up2d_means", up(2, 4, 6), scale(0.5), does(lambda x: x.mean((2, 3), keepdim=True)),
          does(lambda x: x.mean((2, 3), keepdim=True)), shapes=[IMAGE]),
    chain("conv2d_tanh_pool", conv(2, 4, 6), does(lambda x: torch.tanh(x - 0.5) - 0.2),
          lambda: nn.AvgPool2d(2),
          shapes=[IMAGE]),
    chain("conv2d_gate_norm", conv(2, 4, 6), does(lambda x: torch.tanh(F.softplus(x)) * x),
          lambda: nn.BatchNorm2d(6), shapes=[IMAGE]),
    chain("conv2d_scaled_gelu", conv(2, 4, 6), lambda: With(mul, 6, 1, 1), does(F.leaky_relu), does(F.gelu),
          shapes=[IMAGE]),
    chain("conv2d_tanh_bias_pool", conv(2, 4, 6), does(lambda x: torch.tanh(x) * 1.5), lambda: With(add, 6,
          1, 1),
          lambda: nn.MaxPool2d(3), shapes=[IMAGE]),
    chain("conv2d_residual_logs", conv(2, 4, 6), lambda: Residual(Steps(
        nn.GroupNorm(2, 6), torch.tanh, F.hardswish)), does(lambda x: torch.logsumexp(x, 1, keepdim=True)),
          shapes=[IMAGE]),
    chain("conv2d_softmax_pools", conv(2, 4, 6), does(lambda x: torch.softmax(x, 1)), lambda: nn.MaxPool2d(2),
          lambda: nn.MaxPool2d(2), shapes=[(2, 4, 14, 12)]),
)  # fmt: skip

SPACE: tuple[Chain, ...] = (
    chain("conv3d_softmax_pools", conv(3, 3, 4), does(lambda x: torch.softmax(x, 1)), lambda: nn.MaxPool3d(2),
          lambda: nn.MaxPool3d(2), shapes=[(2, 3, 10, 11, 10)]),
    chain("conv3d_pooled_sum", conv(3, 3, 4), does(lambda x: x / 2.0), lambda: nn.MaxPool3d(2),
          lambda: nn.AdaptiveAvgPool3d(1), lambda: With(add, 4, 1, 1, 1), does(lambda x: x.sum(1)),
          shapes=[VOLUME]),
    chain("up3d_sum_residual", up(3, 3, 4, 3, stride=2, padding=1, output_padding=1), lambda: With(
        lambda x, w: (x + w + x.clone().detach()) * x + x, 4, 1, 1, 1), shapes=[(1, 3, 3, 4, 3)]),
    chain("conv3d_min_softmax", conv(3, 3, 6), does(lambda x: torch.softmax(torch.min(x, 2)[0], 1)),
          shapes=[VOLUME]),
    Chain("up3d_input_hardswish", lambda: Beside(nn.ConvTranspose3d(3, 4, 3, 2, 1, 1),
          lambda a, b: (a + b) * F.hardswish(a + b)), ((1, 3, 3, 4, 3), (1, 4, 6, 8, 6))),
    chain("up3d_norm_gelu", up(3, 3, 4, 4, stride=2, padding=1), lambda: With(add, 1),
          lambda: nn.LayerNorm((6,)),
          lambda: nn.AvgPool3d(2), does(F.gelu), shapes=[(1, 3, 3, 4, 3)]),
    chain("up3d_norm_scaled", up(3, 3, 4, 4, stride=2, padding=1), lambda: nn.LayerNorm(6), does(F.gelu),
          scale(1.5), shapes=[(1, 3, 3, 4, 3)]),
    chain("pool_up3d_clamp_softmax", lambda: nn.AvgPool3d(2), up(3, 3, 4, 3, stride=2, padding=1,
          output_padding=1),
          does(lambda x: torch.softmax(torch.clamp(x, 0, 1).view(x.size(0), 4, -1), 2).view(x.shape)),
          lambda: With(mul, 1, 4, 1, 1, 1), shapes=[VOLUME]),
    chain("conv3d_tanh_sigmoid", conv(3, 3, 4), lambda: With(lambda x, w: torch.tanh(x * w), 4, 1, 1, 1),
          lambda: With(lambda x, w: torch.sigmoid(x * w), 4, 1, 1, 1), shapes=[VOLUME]),
    chain("up3d_pool_scaled", up(3, 3, 4, 3, stride=2, padding=1), lambda: With(mul, 1),
          lambda: nn.AvgPool3d(2),
          lambda: With(add, 4, 1, 1, 1), lambda: With(mul, 1), shapes=[(1, 3, 3, 4, 3)]),
    chain("up3d_logs_hardswish", up(3, 3, 4, 3, stride=2, padding=1),
          does(lambda x: torch.logsumexp(x, 1, keepdim=True)), does(lambda x: x * torch.sigmoid(x + 3) / 6),
          lambda: With(sub, 1), does(lambda x: torch.clamp(x, -1, 1)), shapes=[(1, 3, 3, 4, 3)]),
    chain("up3d_swish_norm", up(3, 3, 4, 3, stride=2, padding=1), does(lambda x: torch.sigmoid(x) * x),
          lambda: nn.GroupNorm(2, 4), does(F.hardswish), shapes=[(1, 3, 3, 4, 3)]),
    chain("up3d_norm_pools", up(3, 3, 4, 3, stride=2, padding=1), lambda: nn.BatchNorm3d(4),
          lambda: nn.AvgPool3d(2), lambda: nn.AvgPool3d(2),
          shapes=[(2, 3, 5, 6, 5)]),
    chain("up3d_leaky_pool", up(3, 3, 4, 3, stride=2, padding=1, output_padding=1), does(F.leaky_relu),
          lambda: With(mul, 4, 1, 1, 1), does(F.leaky_relu), lambda: nn.MaxPool3d(2), shapes=[(1, 3, 3, 4,
          3)]),
    chain("up3d_pools_sum", up(3, 3, 4, 5, stride=2, padding=2), lambda: nn.MaxPool3d(2),
          lambda: nn.MaxPool3d(3),
          does(lambda x: x.sum(1, keepdim=True)), shapes=[(1, 3, 7, 7, 8)]),
    chain("conv3d_leaky_clamp", conv(3, 3, 4), does(F.leaky_relu), lambda: With(add, 4, 1, 1, 1),
          does(lambda x: F.gelu(torch.clamp(x, -1, 1))), shapes=[VOLUME]),
    chain("up3d_global", up(3, 3, 4, 3, stride=2, padding=1), scale(0.5), lambda: nn.MaxPool3d(2),
          lambda: nn.AdaptiveAvgPool3d((1, 1, 1)), does(lambda x: torch.clamp(x, 0, 1)), shapes=[(1, 3, 3,
          4, 3)]),
    chain("up3d_clamp_div", up(3, 4, 6, 3, stride=2, padding=1), does(lambda x: torch.clamp(x, min=-1.0) / 2),
          shapes=[(1, 4, 3, 4, 3)]),
)  # fmt: skip

CHAINS = (*ONE, *LINEAR, *PLANE, *SPACE)
