"""Whole networks over pictures, small: every one can be built at the size it is known for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def unit(inner: int, outer: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias and its norm."""
    conv = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outer)]


class Inception(nn.Module):
    """Four branches of one picture, joined: three convolutions, and a pool."""

    def __init__(
        self, inner: int = 6, point: int = 3, three: tuple[int, int] = (2, 4),
        five: tuple[int, int] = (2, 3), pooled: int = 2,
    ) -> None:  # fmt: skip
        super().__init__()
        self.branches = nn.ModuleList([
            nn.Conv2d(inner, point, 1),
            nn.Sequential(nn.Conv2d(inner, three[0], 1), nn.Conv2d(*three, 3, padding=1)),
            nn.Sequential(nn.Conv2d(inner, five[0], 1), nn.Conv2d(*five, 5, padding=2)),
            nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), nn.Conv2d(inner, pooled, 1)),
        ])  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Bottleneck(nn.Module):
    """ResNet's deep block: narrowed, convolved, widened, added to its (projected) operand."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.steps = nn.Sequential(
            *unit(inner, width, 1), nn.ReLU(inplace=True), *unit(width, width, 3, stride),
            nn.ReLU(inplace=True), *unit(width, outer, 1),
        )  # fmt: skip
        self.short = nn.Sequential(*(unit(inner, outer, 1, stride) if inner != outer else []))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.steps(x)
        out += self.short(x)
        return self.relu(out)


class DeepResNet(nn.Module):
    def __init__(self, stem: int = 4, counts: Sequence[int] = (1, 2), classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(*unit(3, stem, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        inner, blocks = stem, []
        for stage, count in enumerate(counts):
            for place in range(count):
                stride = 2 if stage and not place else 1
                blocks.append(Bottleneck(inner, stem * 2**stage, stride))
                inner = 4 * stem * 2**stage
        self.blocks, self.pool = nn.Sequential(*blocks), nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class Vgg(nn.Module):
    """Runs of convolutions with a pool behind each; a classifier with dropout."""

    def __init__(
        self, plan: Sequence[tuple[int, int]] = ((4, 1), (6, 2)), side: int = 2, hidden: int = 12,
        classes: int = 5, rate: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        inner, steps = 3, list[nn.Module]()
        for width, count in plan:
            for _ in range(count):
                steps += [nn.Conv2d(inner, width, 3, padding=1), nn.ReLU()]
                inner = width
            steps.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*steps)
        self.classifier = nn.Sequential(
            nn.Linear(inner * side * side, hidden), nn.ReLU(), nn.Dropout(rate), nn.Linear(hidden, hidden),
            nn.ReLU(), nn.Dropout(rate), nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


class Growing(nn.Module):
    """DenseNet's block: every layer sees all that was made before it."""

    def __init__(self, inner: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(inner + i * growth), nn.ReLU(inplace=True),
                          nn.Conv2d(inner + i * growth, growth, 3, padding=1, bias=False), nn.Dropout(0.0))
            for i in range(count)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        kept = [x]
        for layer in self.layers:
            kept.append(layer(x))
            x = torch.cat(kept, 1)
        return x


class DenseNet(nn.Module):
    def __init__(
        self, width: int = 4, growth: int = 2, counts: Sequence[int] = (2, 1), classes: int = 5
    ) -> None:
        super().__init__()
        steps = [*unit(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        for place, count in enumerate(counts):
            steps.append(Growing(width, growth, count))
            width += growth * count
            if place + 1 < len(counts):
                steps += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                steps += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2, 2)]
                width //= 2
        self.steps, self.norm = nn.Sequential(*steps), nn.BatchNorm2d(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.steps(x)), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(x, (1, 1)).view(x.size(0), -1))


class Fire(nn.Module):
    """SqueezeNet's module: squeezed, then expanded by two convolutions side by side."""

    def __init__(self, inner: int, narrow: int, wide: int) -> None:
        super().__init__()
        self.squeeze, self.relu = nn.Conv2d(inner, narrow, 1), nn.ReLU(inplace=True)
        self.point, self.three = nn.Conv2d(narrow, wide, 1), nn.Conv2d(narrow, wide, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.squeeze(x))
        return torch.cat([self.relu(self.point(x)), self.relu(self.three(x))], 1)


class SqueezeNet(nn.Module):
    """Fire modules between pools that round up; `runs` are (narrow, wide) of each."""

    def __init__(
        self, stem: int = 4, runs: Sequence[Sequence[tuple[int, int]]] = (((2, 3), (2, 3)), ((3, 4),)),
        classes: int = 5,
    ) -> None:  # fmt: skip
        super().__init__()
        steps: list[nn.Module] = [nn.Conv2d(3, stem, 7, 2), nn.ReLU(inplace=True)]
        for run in runs:
            steps.append(nn.MaxPool2d(3, 2, ceil_mode=True))
            for narrow, wide in run:
                steps.append(Fire(stem, narrow, wide))
                stem = 2 * wide
        self.features = nn.Sequential(*steps)
        self.classifier = nn.Sequential(
            nn.Dropout(0.0), nn.Conv2d(stem, classes, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(self.classifier(self.features(x)), 1)


class Inverted(nn.Module):
    """MobileNet's block: widened, convolved by depth, narrowed; added where the shape stays."""

    def __init__(self, inner: int, widen: int, outer: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = inner * widen
        first = [*unit(inner, wide, 1), nn.ReLU6(inplace=True)] if widen != 1 else []
        depth = [*unit(wide, wide, kernel, stride, wide), nn.ReLU6(inplace=True)]
        self.steps = nn.Sequential(*first, *depth, *unit(wide, outer, 1))
        self.kept = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.steps(x)
        return y + x if self.kept else y


Plan = Sequence[tuple[int, int, int, int, int]]
SMALL: Plan = ((1, 4, 3, 1, 1), (2, 6, 5, 2, 2))


class MobileNet(nn.Module):
    """`plan`: widening, width, kernel, stride and count; `relu` is what stem and head are rectified by."""

    def __init__(
        self, relu: type[nn.Module] = nn.ReLU6, stem: int = 4, plan: Plan = SMALL, last: int = 12,
        classes: int = 5,
    ) -> None:  # fmt: skip
        super().__init__()
        inner, steps = stem, [*unit(3, stem, 3, 2), relu()]
        for widen, outer, kernel, stride, count in plan:
            for place in range(count):
                steps.append(Inverted(inner, widen, outer, kernel, 1 if place else stride))
                inner = outer
        self.features = nn.Sequential(*steps, *unit(inner, last, 1), relu(), nn.AdaptiveAvgPool2d((1, 1)))
        self.drop, self.fc = nn.Dropout(0.0), nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(torch.flatten(self.features(x), 1)))


class Gates(nn.Module):
    """Blocks whose squeezed gate goes on in the place of the picture, down to one pixel."""

    def __init__(self, stem: int = 4, plan: Plan = SMALL, last: int = 12, classes: int = 5) -> None:
        super().__init__()
        inner, steps = stem, [*unit(3, stem, 3, 2), nn.ReLU(inplace=True)]
        for widen, outer, kernel, stride, count in plan:
            for place in range(count):
                steps += self.block(inner, inner * widen, outer, kernel, 1 if place else stride)
                inner = outer
        self.features = nn.Sequential(*steps, *unit(inner, last, 1), nn.ReLU(inplace=True))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(last, classes)

    @staticmethod
    def block(inner: int, wide: int, outer: int, kernel: int, stride: int) -> list[nn.Module]:
        first = [*unit(inner, wide, 1), nn.ReLU(inplace=True)] if wide != inner else []
        return [
            *first, *unit(wide, wide, kernel, stride, wide), nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d((1, 1)), nn.Conv2d(wide, wide // 4, 1, bias=False), nn.ReLU(inplace=True),
            nn.Conv2d(wide // 4, wide, 1, bias=False), nn.Sigmoid(), *unit(wide, outer, 1),
        ]  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.features(x)), 1))


class Shuffling(nn.Module):
    """ShuffleNet's unit with a projection where the width changes."""

    def __init__(self, inner: int, outer: int, groups: int) -> None:
        super().__init__()
        narrow, self.groups = outer // 4, groups
        self.first = nn.Sequential(*unit(inner, narrow, 1, groups=groups))
        self.depth = nn.Sequential(*unit(narrow, narrow, 3, groups=narrow))
        self.last = nn.Sequential(*unit(narrow, outer, 1, groups=groups))
        self.short = nn.Sequential(*(unit(inner, outer, 1) if inner != outer else []))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        n, c, h, w = y.size()
        y = y.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)
        return F.relu(self.last(self.depth(y))) + self.short(x)


class ShuffleNet(nn.Module):
    def __init__(
        self, widths: Sequence[int] = (6, 12, 24, 30), counts: Sequence[int] = (2, 1), groups: int = 3,
        classes: int = 5,
    ) -> None:  # fmt: skip
        super().__init__()
        inner, *outer, last = widths
        self.stem, blocks = nn.Sequential(*unit(3, inner, 3, 2)), list[nn.Module]()
        for width, count in zip(outer, counts, strict=True):
            for _ in range(count):
                blocks.append(Shuffling(inner, width, groups))
                inner = width
        self.blocks, self.last = nn.Sequential(*blocks), nn.Sequential(*unit(inner, last, 1))
        self.fc = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), kernel_size=3, stride=2, padding=1)
        x = F.relu(self.last(self.blocks(x)))
        return self.fc(F.adaptive_avg_pool2d(x, (1, 1)).view(x.size(0), -1))


class Patches(nn.Module):
    """ViT over unfolded patches, its encoder that of torch, a classifier with GELU."""

    def __init__(
        self, side: int = 8, patch: int = 4, width: int = 8, depth: int = 1, heads: int = 2, wide: int = 12,
        classes: int = 5,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patch, self.embed = patch, nn.Linear(3 * patch**2, width)
        self.place = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width))
        self.cls, self.drop = nn.Parameter(torch.randn(1, 1, width)), nn.Dropout(0.0)
        layer = nn.TransformerEncoderLayer(width, heads, wide, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(
            nn.Linear(width, wide), nn.GELU(), nn.Dropout(0.0), nn.Linear(wide, classes)
        )

    def forward(self, picture: Tensor) -> Tensor:
        p = self.patch
        x = picture.unfold(2, p, p).unfold(3, p, p).reshape(picture.shape[0], -1, p * p * 3)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), self.embed(x)), dim=1)
        x = self.drop(x + self.place[:, : x.shape[1]])
        return self.head(self.encoder(x)[:, 0])


def windows(x: Tensor, n: int) -> Tensor:
    """[b, h, w, c] as [b * windows, n * n, c]."""
    b, h, w, c = x.shape
    return x.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, n * n, c)


def distances(n: int) -> tuple[Tensor, Tensor]:
    """Between the places of a window: the table of them, logarithmic, and the row of every pair."""
    steps = torch.arange(-(n - 1), n, dtype=torch.float32) * (8 / (n - 1))
    table = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1).flatten(0, 1)
    table = torch.sign(table) * torch.log2(table.abs() + 1.0) / 3.0
    ends = torch.arange(n)
    places = torch.stack(torch.meshgrid(ends, ends, indexing="ij"), -1).flatten(0, 1)
    apart = places[:, None] - places[None] + n - 1
    return table, (apart[..., 0] * (2 * n - 1) + apart[..., 1]).flatten()


def strangers(side: int, n: int, shift: int) -> Tensor:
    """[windows, n * n, n * n]: what keeps places apart that only the shift brought together."""
    places = torch.arange(side)
    region = (places >= side - n).long() + (places >= side - shift).long()
    held = windows((region[:, None] * 3 + region)[None, :, :, None], n).squeeze(-1)
    return torch.where(held[:, None] != held[:, :, None], -100.0, 0.0)


class Windowed(nn.Module):
    """Swin v2's block: cosine attention in (shifted) windows, norms behind, places through a small MLP."""

    def __init__(self, width: int, side: int, heads: int, window: int, shift: int, inner: int) -> None:
        super().__init__()
        self.side, self.heads, self.window, self.shift = side, heads, window, shift
        self.scale = nn.Parameter(torch.log(10 * torch.ones(heads, 1, 1)))
        self.mlp = nn.Sequential(
            nn.Linear(2, inner), nn.ReLU(inplace=True), nn.Linear(inner, heads, bias=False)
        )
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(width) * 0.1) for _ in range(2))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * width, width)
        )
        table, index = distances(window)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("index", index)
        self.register_buffer("mask", strangers(side, window, shift) if shift else None)

    def attend(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias, requires_grad=False), self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        most = torch.log(torch.tensor(1.0 / 0.01))
        att = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        att = att * torch.clamp(self.scale, max=most).exp()
        bias = self.mlp(self.table)[self.index].view(n, n, -1).permute(2, 0, 1).contiguous()
        att = att + (16 * torch.sigmoid(bias)).unsqueeze(0)
        if self.shift:
            mask = self.get_buffer("mask")
            count = mask.shape[0]
            att = att.view(b // count, count, self.heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
            att = att.view(-1, self.heads, n, n)
        return self.proj((torch.softmax(att, -1) @ v).transpose(1, 2).reshape(b, n, c))

    def forward(self, x: Tensor) -> Tensor:
        b, length, c = x.shape
        s, n = self.side, self.window
        y = x.view(b, s, s, c)
        if self.shift:
            y = torch.roll(y, shifts=(-self.shift, -self.shift), dims=(1, 2))
        y = self.attend(windows(y, n)).view(b, s // n, s // n, n, n, c)
        y = y.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, s, s, c)
        if self.shift:
            y = torch.roll(y, shifts=(self.shift, self.shift), dims=(1, 2))
        x = x + self.norm1(y.view(b, length, c))
        return x + self.norm2(self.fc(x))


class Merging(nn.Module):
    """Four neighbours as one token of twice the width."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.narrow, self.norm = nn.Linear(4 * width, 2 * width, bias=False), nn.LayerNorm(2 * width)

    def forward(self, x: Tensor) -> Tensor:
        b, _, c = x.shape
        y = x.view(b, self.side, self.side, c)
        y = torch.cat([y[:, i::2, j::2, :] for j in (0, 1) for i in (0, 1)], -1).view(b, -1, 4 * c)
        return self.norm(self.narrow(y))


class SwinV2(nn.Module):
    def __init__(
        self, side: int = 8, patch: int = 2, width: int = 4, window: int = 2, depths: Sequence[int] = (2, 1),
        heads: Sequence[int] = (1, 2), inner: int = 6, classes: int = 5,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patch, self.norm0 = nn.Conv2d(3, width, patch, patch), nn.LayerNorm(width)
        side, blocks = side // patch, list[nn.Module]()
        for stage, (depth, count) in enumerate(zip(depths, heads, strict=True)):
            if stage:
                blocks.append(Merging(width, side))
                width, side = 2 * width, side // 2
            for place in range(depth):
                shift = window // 2 if place % 2 and side > window else 0
                blocks.append(Windowed(width, side, count, window, shift, inner))
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(width)
        self.pool, self.head, self.drop = nn.AdaptiveAvgPool1d(1), nn.Linear(width, classes), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm0(self.patch(x).flatten(2).transpose(1, 2)))
        return self.head(torch.flatten(self.pool(self.norm(self.blocks(x)).transpose(1, 2)), 1))


Shapes = tuple[tuple[int, ...], ...]
Picture = tuple[str, Callable[[], nn.Module], Shapes, bool]
PICTURES: tuple[Picture, ...] = (
    ("inception", Inception, ((3, 6, 7, 6),), True),
    ("deep_resnet", DeepResNet, ((2, 3, 20, 18),), True),
    ("vgg", Vgg, ((3, 3, 8, 8),), True),
    ("dense_net", DenseNet, ((2, 3, 20, 18),), True),
    ("squeeze_net", SqueezeNet, ((2, 3, 22, 24),), True),
    ("mobile_net", MobileNet, ((3, 3, 12, 10),), True),
    ("efficient_net", lambda: MobileNet(nn.ReLU), ((3, 3, 12, 10),), True),
    ("gates", Gates, ((3, 3, 12, 10),), True),
    ("shuffle_net", ShuffleNet, ((2, 3, 14, 12),), True),
    ("patches", Patches, ((3, 3, 8, 8),), True),
    ("swin_v2", SwinV2, ((3, 3, 8, 8),), True),
)
