"""Blocks of well-known networks, small: convolutional ones, transformers, mixers, state spaces."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Basic(nn.Module):
    """ResNet's basic block, with a projection when the shape changes."""

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
                                  nn.MaxPool2d(3, 2, 1))  # fmt: skip
        self.layers = nn.Sequential(Basic(8, 8), Basic(8, 16, 2))
        self.pool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.layers(self.stem(x))), 1))


class Excited(nn.Module):
    """EfficientNet's inverted bottleneck with squeeze and excitation."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)
        )
        self.depth = nn.Sequential(nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False),
        nn.BatchNorm2d(wide),
                                   nn.ReLU6(inplace=True))  # fmt: skip
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 4, 1), nn.ReLU(),
        nn.Conv2d(4, wide, 1),
                                     nn.Sigmoid())  # fmt: skip
        self.project = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        return x + self.project(y * self.squeeze(y))


class Shuffled(nn.Module):
    """ShuffleNet's unit: grouped 1x1, shuffled channels, depthwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 1, groups=2, bias=False), nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.last = nn.Conv2d(8, 8, 1, groups=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        n, c, h, w = y.shape
        y = y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        return F.relu(self.last(self.depth(y)) + x)


class Dense(nn.Module):
    """DenseNet's block and transition, GoogLeNet's and SqueezeNet's joins."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(4 + 3 * i), nn.ReLU(inplace=True), nn.Conv2d(4 + 3 * i, 3, 3,
            padding=1),
                          nn.Dropout(0.0)) for i in range(3)
        )  # fmt: skip
        self.narrow, self.pool = nn.Conv2d(13, 4, 1), nn.AvgPool2d(2, 2)
        self.branches = nn.ModuleList(
            [nn.Conv2d(4, 2, 1), nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(4, 2, 5, padding=2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        y = self.pool(self.narrow(torch.cat(features, 1)))
        return torch.cat([*(b(y) for b in self.branches), F.max_pool2d(y, 3, 1, 1)], dim=1)


class ConvNeXt(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class ViT(nn.Module):
    """Patches by a strided convolution, a class token, one encoder layer of torch."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 5, width))
        self.encoder = nn.TransformerEncoderLayer(
            width, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), 1) + self.place
        return self.head(self.norm(self.encoder(x))[:, 0])


class Causal(nn.Module):
    """GPT-2's block: its mask in a buffer, GELU written out."""

    def __init__(self, width: int = 8, length: int = 6, heads: int = 2) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))
        self.drop, self.heads = nn.Dropout(0.0), heads

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.c_attn(x).split(c, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        return self.c_proj((self.drop(att) @ v).transpose(1, 2).contiguous().view(b, t, c))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        h = self.fc(self.ln_2(x))
        h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.proj(h)


class GPT(nn.Module):
    """A causal block between tied token embeddings, and the loss."""

    def __init__(self, width: int = 8, length: int = 6, words: int = 11) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.block = Causal(width, length)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(rows) + self.wpe(torch.arange(rows.shape[1], device=rows.device))
        logits = self.lm_head(self.block(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


class Llama(nn.Module):
    """Rotary positions, grouped heads, RMS norms, SwiGLU."""

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.head, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, width, bias=False)
        self.norm1, self.norm2 = RMSNorm(width), nn.RMSNorm(width, eps=1e-6)
        self.register_buffer(
            "inv_freq", 1.0 / 10000.0 ** (torch.arange(0, self.head, 2).float() / self.head), False
        )

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        angles = torch.outer(torch.arange(t, device=x.device).float(), self.inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        h = self.norm1(x)
        q = self.turn(self.q(h).view(b, t, self.heads, self.head).transpose(1, 2), cos, sin)
        k = self.turn(self.k(h).view(b, t, self.groups, self.head).transpose(1, 2), cos, sin)
        v = self.v(h).view(b, t, self.groups, self.head).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Mixer(nn.Module):
    def __init__(self, tokens: int = 6, width: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 12), nn.GELU(), nn.Linear(12, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Swin(nn.Module):
    """A shifted window with relative positions and cosine attention."""

    def __init__(self, width: int = 8, window: int = 2) -> None:
        super().__init__()
        self.window, self.heads = window, 2
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(2, 1, 1)))
        self.table = nn.Parameter(torch.randn(9, 2) * 0.1)
        places = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        apart = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0) + 1
        self.register_buffer("index", apart[..., 0] * 3 + apart[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        n = self.window
        y = torch.roll(x, shifts=(-1, -1), dims=(1, 2))
        y = y.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, n * n, c)
        qkv = self.qkv(y).reshape(y.shape[0], n * n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        att = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        att = att * torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
        bias = self.table[self.index.view(-1)].view(n * n, n * n, -1).permute(2, 0, 1).contiguous()
        att = torch.softmax(att + 16 * torch.sigmoid(bias).unsqueeze(0), -1)
        y = self.proj((att @ v).transpose(1, 2).reshape(-1, n * n, c))
        y = y.view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, c)
        return x + self.norm(torch.roll(y, shifts=(1, 1), dims=(1, 2)))


class StateSpace(nn.Module):
    """Mamba-2's chunked scan: segment sums, decays, einsums over chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(2, 8, 2, *s) * 0.3) for s in ((), (3,), (3,)))

    @staticmethod
    def segments(x: Tensor) -> Tensor:
        total = torch.cumsum(x, dim=-1)
        apart = total[..., :, None] - total[..., None, :]
        mask = torch.tril(torch.ones(x.size(-1), x.size(-1), device=x.device, dtype=torch.bool), diagonal=0)
        return apart.masked_fill(~mask, -torch.inf)

    def forward(self, x: Tensor) -> Tensor:
        x, b, c = (t.reshape(t.shape[0], 2, 4, *t.shape[2:]) for t in (x, self.b, self.c))
        a = self.a.reshape(2, 2, 4, 2).permute(0, 3, 1, 2)
        total = torch.cumsum(a, dim=-1)
        inside = torch.exp(self.segments(a))
        diagonal = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, inside, x)
        decay = torch.exp(total[:, :, :, -1:] - total)
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, decay, x)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
        carry = torch.exp(self.segments(F.pad(total[:, :, :, -1], (1, 0))))
        states = torch.einsum("bhzc,bchpn->bzhpn", carry, states)[:, :-1]
        between = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, torch.exp(total))
        return (diagonal + between).flatten(1, 2)


class Clusters(nn.Module):
    """NetVLAD: soft assignment, residual sums, two normalisations."""

    def __init__(self, width: int = 8, count: int = 4, ghosts: int = 1) -> None:
        super().__init__()
        self.count = count
        self.assign = nn.Parameter(torch.randn(width, count + ghosts) * 0.5)
        self.bn = nn.BatchNorm1d(count + ghosts)
        self.centres = nn.Parameter(torch.randn(1, width, count) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        share = F.softmax(self.bn(torch.matmul(x.view(-1, width), self.assign)), dim=1)[:, : self.count]
        share = share.view(-1, length, self.count)
        total = torch.sum(share, dim=1, keepdim=True) * self.centres
        found = torch.matmul(share.transpose(1, 2), x).transpose(1, 2) - total
        return F.normalize(F.normalize(found).reshape(-1, self.count * width))


class Recurrent(nn.Module):
    """A cell unrolled over the length, which is one axis; every step's output is kept."""

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.i2h, self.h2o, self.axis = nn.Linear(6 + 5, 5), nn.Linear(5, 3), axis

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        out = []
        for t in range(x.size(self.axis)):
            h = torch.tanh(self.i2h(torch.cat((x.select(self.axis, t), h), dim=1)))
            out.append(self.h2o(h))
        return torch.stack(out, dim=self.axis), h


class Frozen(nn.Module):
    """A frozen weight, a plain tensor, a value without gradient, a dictionary of results."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)
        self.shift = torch.linspace(-1, 1, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        y = self.base(x) + 2.0 * self.b(self.a(x)) + self.shift
        with torch.no_grad():
            level = y.abs().amax(-1, keepdim=True)
        return {"y": y / (level + 1.0), "level": level, "none": None, "x": x}


class LeNet(nn.Module):
    """Convolutions, pools and a classifier with dropout switched off by its rate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 8, 3)
        self.fc1, self.fc2, self.fc3 = nn.Linear(8 * 2 * 2, 12), nn.Linear(12, 10), nn.Linear(10, 7)
        self.drop = nn.Dropout(p=0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), kernel_size=2, stride=2)
        x = F.max_pool2d(F.relu(self.conv2(x)), kernel_size=2, stride=2)
        x = F.relu(self.fc2(self.drop(F.relu(self.fc1(x.view(-1, 8 * 2 * 2))))))
        return self.fc3(x)


class Tokens(nn.Module):
    """A picture as tokens of a convolution through torch's attention, sequence first, and an encoder."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv, self.project = nn.Conv2d(3, width, 4, 4), nn.Linear(width * 4, width)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.attention, self.norm = nn.MultiheadAttention(width, 2), nn.LayerNorm(width)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0), 1, enable_nested_tensor=False
        )
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        b = x.size(0)
        x = self.project(self.conv(x).flatten(start_dim=1)).unsqueeze(1)
        x = torch.cat((self.cls.expand(b, -1, -1), x), dim=1).transpose(0, 1)
        x = self.norm(self.attention(x, x, x)[0] + x)
        return self.out(self.encoder(x)[0])


class Rectified(nn.Module):
    """Causal attention with a rectifier in the place of softmax."""

    def __init__(self, width: int = 8, length: int = 6) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mask = torch.tril(torch.ones(length, length)).view(1, 1, length, length)
        self.register_buffer("bias", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (z.view(b, t, 2, c // 2).transpose(1, 2) for z in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.relu(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")))
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))


class UNet(nn.Module):
    """Down, up by a transposed convolution and by resampling, joined with what was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.join = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(16, 4, 3, padding=1)
        self.norm = nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        first = F.leaky_relu(self.norm(self.enter(x)), 0.2)
        low = F.elu(self.down(F.avg_pool2d(first, 2)))
        wide = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        return torch.sigmoid(self.join(torch.cat([first, self.up(low), wide], dim=1))).mean(dim=(2, 3))


def tokens(count: int = 2) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(3)
    return tuple(torch.randint(0, 11, (3, 6), generator=gen) for _ in range(count))


Shapes = tuple[tuple[int, ...], ...]
NETWORKS: tuple[tuple[str, Callable[[], nn.Module], Shapes, bool], ...] = (
    ("resnet", ResNet, ((2, 3, 20, 18),), True),
    ("mobile", lambda: Excited(6, 12), ((3, 6, 5, 6),), True),
    ("shuffle", Shuffled, ((3, 8, 5, 6),), True),
    ("dense", Dense, ((3, 4, 6, 8),), True),
    ("convnext", ConvNeXt, ((2, 8, 6, 5),), True),
    ("vit", ViT, ((3, 3, 8, 8),), True),
    ("causal", Causal, ((3, 6, 8),), True),
    ("llama", Llama, ((3, 5, 16),), True),
    ("mixer", Mixer, ((3, 6, 8),), True),
    ("swin", Swin, ((3, 4, 4, 8),), True),
    ("state_space", StateSpace, ((2, 8, 2, 3),), False),
    ("clusters", Clusters, ((3, 5, 8),), True),
    ("recurrent", Recurrent, ((3, 4, 6), (3, 5)), True),
    ("recurrent_by_time", lambda: Recurrent(0), ((4, 3, 6), (3, 5)), False),
    ("lenet", LeNet, ((3, 1, 16, 16),), True),
    ("tokens", Tokens, ((3, 3, 8, 8),), True),
    ("rectified", Rectified, ((3, 6, 8),), True),
    ("unet", UNet, ((3, 2, 8, 6),), True),
    ("frozen", Frozen, ((3, 6),), True),
    ("lstm_cell", lambda: nn.LSTMCell(6, 4), ((3, 6),), True),
    ("gru", lambda: nn.GRU(6, 4, 2, batch_first=True), ((3, 5, 6),), False),
    (
        "decoder",
        lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True),
        ((3, 4, 8), (3, 5, 8)),
        True,
    ),
)
