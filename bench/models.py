"""The whole models of the benchmark: a Llama-like decoder and a ResNet-like CNN, plain torch, sizes as data.

What `runtime.swap` replaces are modules of their own with torch's names and layouts; `decoder_swaps` and
`cnn_swaps` say which blueprint stands for which of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


class Cnn(nn.Module):
    """`cnn(images, classes)` is the mean cross entropy; images [n, 3, image, image], memory channels-last."""

    def __init__(self, sizes: CnnSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.stem = nn.Conv2d(3, sizes.width, 7, 2, 3, bias=False, dtype=sizes.dtype)
        self.norm = NormRelu(sizes.width, dtype=sizes.dtype)
        self.pool = nn.MaxPool2d(3, 2, 1)
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
        x = self.stages(self.pool(self.norm(self.stem(x))))
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


# -- blueprints


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _blueprint(name: str, low: int, tune: tuple[int, ...], **parts: Any) -> dict[str, Any]:
    dims = {"rows": {"min": low, "max": 131072, "tune": list(tune)}}
    return {"format": "esper-blueprint/1", "name": name, "dims": dims, **parts}


def _leaf(kind: str, *shape: int | str, init: str = "kaiming_uniform") -> dict[str, Any]:
    return {"dtype": kind, "shape": list(shape), "init": {"kind": init}}


def _node(name: str, op: str, *inputs: str, **attrs: Any) -> dict[str, Any]:
    return {"id": name, "op": op, "inputs": list(inputs), **({"attrs": attrs} if attrs else {})}


def mlp_blueprint(sizes: DecoderSizes, tune: tuple[int, ...] = (8192,)) -> dict[str, Any]:
    """`MLP` with torch's names and [out, in] weights; x [rows, width]."""
    kind = _named(sizes.dtype)
    shapes = {"gate": (sizes.hidden, sizes.width), "up": (sizes.hidden, sizes.width)}
    shapes["down"] = (sizes.width, sizes.hidden)
    return _blueprint(
        "model_mlp", 1, tune,
        inputs={"x": {"dtype": kind, "shape": ["rows", sizes.width]}},
        params={
            f"{n}.weight": {"dtype": kind, "shape": list(s), "init": {"kind": "kaiming_uniform"}}
            for n, s in shapes.items()
        },
        nodes=[
            {"id": "g", "op": "linear", "inputs": ["x", "gate.weight"]},
            {"id": "u", "op": "linear", "inputs": ["x", "up.weight"]},
            {"id": "a", "op": "silu", "inputs": ["g"]},
            {"id": "h", "op": "mul", "inputs": ["a", "u"]},
            {"id": "y", "op": "linear", "inputs": ["h", "down.weight"]},
        ],
        outputs=["y"],
    )  # fmt: skip


def norm_blueprint(sizes: DecoderSizes, tune: tuple[int, ...] = (8192,)) -> dict[str, Any]:
    """`RMSNorm`; x [rows, width]."""
    kind = _named(sizes.dtype)
    return _blueprint(
        "model_norm", 1, tune,
        inputs={"x": {"dtype": kind, "shape": ["rows", sizes.width]}},
        params={"weight": {"dtype": kind, "shape": [sizes.width], "init": {"kind": "ones"}}},
        nodes=[
            {"id": "n", "op": "rms_norm", "inputs": ["x"], "attrs": {"eps": EPS}},
            {"id": "y", "op": "mul", "inputs": ["n", "weight"]},
        ],
        outputs=["y"],
    )  # fmt: skip


def _attention_nodes(sizes: DecoderSizes, half: int) -> list[dict[str, Any]]:
    """`o` from `h1`: `Attention` with the rotation before heads and rows change places."""
    heads = ["batch", "rows", sizes.heads, 2 * half]
    found = [_node(f"{n}_row", "reshape", n, shape=["rows", 1, half]) for n in ("cos", "sin")]
    for name in "qkv":
        last = "h" if name == "v" else "r"
        found.append(_node(f"{name}_p", "linear", "h1", f"attention.{name}.weight"))
        found.append(_node(f"{name}_h", "reshape", f"{name}_p", shape=heads))
        if name != "v":
            found.append(_node(f"{name}_r", "rope", f"{name}_h", "cos_row", "sin_row"))
        found.append(_node(f"{name}_t", "permute", f"{name}_{last}", dims=[0, 2, 1, 3]))
    return [
        *found,
        _node("a", "scaled_dot_product_attention", "q_t", "k_t", "v_t", is_causal=True),
        _node("a_t", "permute", "a", dims=[0, 2, 1, 3]),
        _node("a_w", "reshape", "a_t", shape=["batch", "rows", sizes.width]),
        _node("o", "linear", "a_w", "attention.out.weight"),
    ]


def layer_blueprint(sizes: DecoderSizes, batch: int = 4, rows: int = 2048) -> dict[str, Any]:
    """`DecoderLayer` as a whole; x [batch, rows, width]."""
    kind, half = _named(sizes.dtype), sizes.width // sizes.heads // 2
    square, wide = (sizes.width, sizes.width), (sizes.hidden, sizes.width)
    shapes = {f"attention.{n}.weight": square for n in ("q", "k", "v", "out")}
    shapes |= {"mlp.gate.weight": wide, "mlp.up.weight": wide, "mlp.down.weight": wide[::-1]}
    norms = {f"norm{n}.weight": _leaf(kind, sizes.width, init="ones") for n in (1, 2)}
    params = {**norms, **{n: _leaf(kind, *s) for n, s in shapes.items()}}
    table = {"dtype": kind, "shape": ["rows", half]}
    made = _blueprint(
        "model_layer", 1, (rows,),
        inputs={"x": {"dtype": kind, "shape": ["batch", "rows", sizes.width]}, "cos": table, "sin": table},
        params=params,
        nodes=[
            _node("n1", "rms_norm", "x", eps=EPS),
            _node("h1", "mul", "n1", "norm1.weight"),
            *_attention_nodes(sizes, half),
            _node("r", "add", "x", "o"),
            _node("n2", "rms_norm", "r", eps=EPS),
            _node("h2", "mul", "n2", "norm2.weight"),
            _node("g", "linear", "h2", "mlp.gate.weight"),
            _node("u", "linear", "h2", "mlp.up.weight"),
            _node("s", "silu", "g"),
            _node("m", "mul", "s", "u"),
            _node("d", "linear", "m", "mlp.down.weight"),
            _node("y", "add", "r", "d"),
        ],
        outputs=["y"],
        differentiable=["x", *params],
    )  # fmt: skip
    made["dims"] = {"batch": {"min": 1, "max": 4096, "tune": [batch]}, **made["dims"]}
    return made


def embedding_blueprint(sizes: DecoderSizes, tune: tuple[int, ...] = (8192,)) -> dict[str, Any]:
    """`nn.Embedding`; tokens [rows]."""
    return _blueprint(
        "model_embedding", 1, tune,
        inputs={"tokens": {"dtype": "int64", "shape": ["rows"]}},
        params={"weight": _leaf(_named(sizes.dtype), sizes.words, sizes.width, init="normal")},
        nodes=[_node("y", "embedding", "tokens", "weight")],
        outputs=["y"],
    )  # fmt: skip


def head_blueprint(sizes: DecoderSizes, tune: tuple[int, ...] = (8192,)) -> dict[str, Any]:
    """`Head`; x [rows, width], targets [rows]. Logits are kept in the model's type, not in float32."""
    kind = _named(sizes.dtype)
    return _blueprint(
        "model_head", 1, tune,
        inputs={
            "x": {"dtype": kind, "shape": ["rows", sizes.width]},
            "targets": {"dtype": "int64", "shape": ["rows"]},
        },
        params={
            "norm.weight": _leaf(kind, sizes.width, init="ones"),
            "words.weight": _leaf(kind, sizes.words, sizes.width),
        },
        nodes=[
            _node("n", "rms_norm", "x", eps=EPS),
            _node("h", "mul", "n", "norm.weight"),
            _node("z", "linear", "h", "words.weight"),
            _node("wide", "cast", "z", dtype="float32"),
            _node("y", "cross_entropy", "wide", "targets"),
        ],
        outputs=["y"],
    )  # fmt: skip


def excite_blueprint(
    channels: int, side: int, inner: int, dtype: torch.dtype, tune: tuple[int, ...] = (64,)
) -> dict[str, Any]:
    """`SqueezeExcite` on images [rows, side, side, channels]."""
    kind = _named(dtype)
    return _blueprint(
        f"model_excite_{channels}", 1, tune,
        inputs={"x": {"dtype": kind, "shape": ["rows", side, side, channels]}},
        params={
            "down.weight": {"dtype": kind, "shape": [inner, channels], "init": {"kind": "kaiming_uniform"}},
            "up.weight": {"dtype": kind, "shape": [channels, inner], "init": {"kind": "kaiming_uniform"}},
        },
        nodes=[
            {"id": "m", "op": "mean", "inputs": ["x"], "attrs": {"dims": [1, 2]}},
            {"id": "d", "op": "linear", "inputs": ["m", "down.weight"]},
            {"id": "r", "op": "relu", "inputs": ["d"]},
            {"id": "u", "op": "linear", "inputs": ["r", "up.weight"]},
            {"id": "s", "op": "sigmoid", "inputs": ["u"]},
            {"id": "e", "op": "reshape", "inputs": ["s"], "attrs": {"shape": ["rows", 1, 1, channels]}},
            {"id": "y", "op": "mul", "inputs": ["x", "e"]},
        ],
        outputs=["y"],
    )  # fmt: skip


def decoder_swaps(sizes: DecoderSizes, batch: int = 4, rows: int = 2048) -> Mapping[str, dict[str, Any]]:
    """Blueprint by pattern of module names: all of the decoder."""
    return {
        "embedding": embedding_blueprint(sizes, (batch * rows,)),
        "layers.*": layer_blueprint(sizes, batch, rows),
        "head": head_blueprint(sizes, (batch * rows,)),
    }


def decoder_parts(sizes: DecoderSizes, tune: tuple[int, ...] = (8192,)) -> Mapping[str, dict[str, Any]]:
    """The same for norms and MLPs alone, which leave attention, residuals and the loss to the host."""
    norm = norm_blueprint(sizes, tune)
    return {"layers.*.mlp": mlp_blueprint(sizes, tune), "layers.*.norm?": norm, "head.norm": norm}


def cnn_swaps(cnn: Cnn, tune: tuple[int, ...] = (64,)) -> Mapping[str, dict[str, Any]]:
    """Blueprint by pattern of module names: the gates, one blueprint per stage."""
    found: dict[str, dict[str, Any]] = {}
    for number, (channels, side) in enumerate(cnn.sides()):
        inner = max(channels // 16, 4)
        found[f"stages.{number}.*.excite"] = excite_blueprint(channels, side, inner, cnn.sizes.dtype, tune)
    return found
