"""The whole models of the benchmark: a Llama-like decoder and a ResNet-like CNN, plain torch, sizes as data.

What `runtime.swap` replaces are modules of their own with torch's names and layouts; `bench.swaps` says which
blueprint stands for which of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-6


@dataclass(frozen=True)
class DecoderSizes:
    """`hidden` of the gated MLP; `words` of the vocabulary; `context`: the longest sequence; `tied`: one
    matrix for embedding and head."""

    layers: int = 8
    width: int = 1024
    heads: int = 16
    hidden: int = 2816
    words: int = 32000
    context: int = 2048
    tied: bool = False
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class CnnSizes:
    """`depths`: residual blocks per stage, each stage twice as wide and half as large as the one before."""

    depths: tuple[int, ...] = (2, 2, 2, 2)
    width: int = 64
    image: int = 224
    classes: int = 1000
    dtype: torch.dtype = torch.bfloat16


SMALL_DECODER = DecoderSizes(2, 64, 4, 176, 256, 64, dtype=torch.float32)
SMALL_CNN = CnnSizes((1, 1), 16, 32, 10, dtype=torch.float32)


# -- decoder


class RMSNorm(nn.Module):
    """x [..., width], normalised in float32, rounded, then scaled."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * self.weight


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.up = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(hidden, width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, rows, width]; cos and sin [rows, width / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; x [batch, rows, width]."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (
            nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            made.unflatten(-1, (self.heads, -1)).transpose(1, 2) for made in (self.q(x), self.k(x), self.v(x))
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class DecoderLayer(nn.Module):
    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.norm1 = RMSNorm(sizes.width, sizes.dtype)
        self.attention = Attention(sizes.width, sizes.heads, sizes.dtype)
        self.norm2 = RMSNorm(sizes.width, sizes.dtype)
        self.mlp = MLP(sizes.width, sizes.hidden, sizes.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """Norm, projection onto the words, mean cross entropy; x [..., width], targets [...]."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.norm = RMSNorm(sizes.width, sizes.dtype)
        self.words = nn.Linear(sizes.width, sizes.words, bias=False, dtype=sizes.dtype)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).flatten(0, -2).float(), targets.flatten())

    def logits(self, x: Tensor) -> Tensor:
        return self.words(self.norm(x))


class Decoder(nn.Module):
    """`decoder(tokens, targets)` is the mean cross entropy; without targets, logits [batch, rows, words]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.words, sizes.width, dtype=sizes.dtype)
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.layers))
        self.head = Head(sizes)
        if sizes.tied:
            self.head.words.weight = self.embedding.weight
        half = sizes.width // sizes.heads // 2
        angle = torch.outer(torch.arange(sizes.context), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angle.cos().to(sizes.dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(sizes.dtype), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x, rows = self.embedding(tokens), tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:rows], self.sin[:rows])
        return self.head.logits(x) if targets is None else self.head(x, targets)


# -- CNN


class NormRelu(nn.BatchNorm2d):
    """Batch norm, then ReLU; the names of the norm."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class Residual(nn.Module):
    """relu(shortcut(x) + norm(conv(norm_relu(conv(x)))))."""

    def __init__(self, channels: int, out: int, stride: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False, dtype=dtype)
        self.norm1 = NormRelu(out, dtype=dtype)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False, dtype=dtype)
        self.norm2 = nn.BatchNorm2d(out, dtype=dtype)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False, dtype=dtype)
        self.excite = SqueezeExcite(out, max(out // 16, 4), dtype)

    def forward(self, x: Tensor) -> Tensor:
        made = self.excite(self.norm2(self.conv2(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + made)


class SqueezeExcite(nn.Module):
    """x scaled per channel by a gate of its own means."""

    def __init__(self, channels: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.down = nn.Linear(channels, inner, bias=False, dtype=dtype)
        self.up = nn.Linear(inner, channels, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))
        return x * gate[:, :, None, None]


class Stem(nn.Module):
    """Images [n, 3, image, image] to a quarter of their side."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 7, 2, 3, bias=False, dtype=dtype)
        self.norm = NormRelu(width, dtype=dtype)
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.norm(self.conv(x)))


class Cnn(nn.Module):
    """`cnn(images, classes)` is the mean cross entropy; images [n, 3, image, image], memory channels-last."""

    def __init__(self, sizes: CnnSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.stem = Stem(sizes.width, sizes.dtype)
        stages, channels = [], sizes.width
        for number, depth in enumerate(sizes.depths):
            out = sizes.width << number
            first = Residual(channels, out, 1 if number == 0 else 2, sizes.dtype)
            rest = (Residual(out, out, 1, sizes.dtype) for _ in range(depth - 1))
            stages.append(nn.Sequential(first, *rest))
            channels = out
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, sizes.classes, dtype=sizes.dtype)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        x = images.contiguous(memory_format=torch.channels_last)
        x = self.stages(self.stem(x))
        logits = self.head(x.mean((2, 3)))
        return logits if classes is None else F.cross_entropy(logits.float(), classes)

    def sides(self) -> tuple[tuple[int, int], ...]:
        """(channels, side of the image) in each stage."""
        first = -(-self.sizes.image // 4)
        return tuple((self.sizes.width << n, -(-first // (1 << n))) for n in range(len(self.sizes.depths)))


# -- batches


def decoder_batch(
    sizes: DecoderSizes, batch: int, rows: int, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens and targets [batch, rows]; the same seed gives the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, sizes.words, (batch, rows + 1), generator=generator).to(device)
    return made[:, :-1].contiguous(), made[:, 1:].contiguous()


def cnn_batch(sizes: CnnSizes, batch: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images [batch, 3, image, image], channels-last, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, 3, sizes.image, sizes.image, generator=generator).to(device, sizes.dtype)
    classes = torch.randint(0, sizes.classes, (batch,), generator=generator).to(device)
    return images.contiguous(memory_format=torch.channels_last), classes
