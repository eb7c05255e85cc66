"""The named work: what every implementation computes, at which sizes, and the least it can cost.

A block is a blueprint in examples/ (used once the file is there) and a plain torch function of the same
leaves in the same order; eager torch and torch.compile run that function, so that all run the same
mathematics on the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
BF16 = "bfloat16"
Sizes = Mapping[str, int]
BYTES = {"bfloat16": 2, "float32": 4, "int64": 8}
SIZES = ("medium", "small", "large")  # of a block, in this order: medium is that of the published table


@dataclass(frozen=True)
class Leaf:
    """One tensor: its axes as names of sizes or numbers; values are normal with deviation `std`, or indices
    below `below`. Images and their kernels are dense with the channels last. `fixed`: no gradient is wanted.
    """

    name: str
    shape: tuple[str | int, ...]
    std: float = 1.0
    dtype: str = BF16
    below: str = ""
    fixed: bool = False

    def dims(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(n if isinstance(n, int) else sizes[n] for n in self.shape)

    def nbytes(self, sizes: Sizes) -> int:
        return math.prod(self.dims(sizes)) * BYTES[self.dtype]

    def make(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        """On the CPU, so that the same seed gives the same values whatever the device."""
        if self.below:
            return torch.randint(0, sizes[self.below], self.dims(sizes), generator=generator)
        value = torch.randn(self.dims(sizes), generator=generator) * self.std
        return value.to(getattr(torch, self.dtype))


def _no_flops(sizes: Sizes) -> float:
    return 0.0


@dataclass(frozen=True)
class Block:
    """`sizes`: three, named by `SIZES`. `result`: axes of the output; () for a scalar.

    `flops` of the forward in the unit that bounds it (matrix products), `backward` times as many for the
    backward. Least bytes: forward, every leaf read and the result written; backward, leaves and cotangent
    read, one gradient per floating leaf written, except those in `shared`, which are equal to another one.
    """

    name: str
    fn: Callable[..., Tensor]
    leaves: tuple[Leaf, ...]
    sizes: tuple[Sizes, ...]
    result: tuple[str | int, ...]
    flops: Callable[[Sizes], float] = _no_flops
    backward: float = 2.0
    shared: tuple[str, ...] = ()
    label: tuple[str, ...] = field(default=())
    widest: Callable[[Sizes], float] = _no_flops
    """Elements of the largest value inside, where it is larger than the leaves."""

    @property
    def blueprint(self) -> Path:
        return EXAMPLES / f"{self.name}.json"

    @property
    def chains(self) -> bool:
        """Whether the result can be the next block's first leaf."""
        return self.result == self.leaves[0].shape

    def named_sizes(self, names: tuple[str, ...] = SIZES) -> list[Sizes]:
        """In the order of `SIZES`."""
        return [sizes for name, sizes in zip(SIZES, self.sizes, strict=True) if name in names]

    def size_label(self, sizes: Sizes) -> str:
        return "x".join(str(sizes[n]) for n in self.label or tuple(sizes))

    def inputs(self, sizes: Sizes, device: torch.device, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = [leaf.make(sizes, generator).to(device) for leaf in self.leaves]
        return [
            t.requires_grad_() if t.is_floating_point() and not leaf.fixed else t
            for t, leaf in zip(made, self.leaves, strict=True)
        ]

    def least_bytes(self, sizes: Sizes, phase: str) -> int:
        read = sum(leaf.nbytes(sizes) for leaf in self.leaves)
        out = Leaf("y", self.result).nbytes(sizes)
        if phase == "f":
            return read + out
        unwritten = {x.name for x in self.leaves if x.below or x.fixed} | set(self.shared)
        written = sum(x.nbytes(sizes) for x in self.leaves if x.name not in unwritten)
        return read + out + read + out + written

    def memory(self, sizes: Sizes) -> float:
        """Bytes that comparing implementations with float64 about needs: leaves, results and gradients in
        several types, and a handful of the largest value inside."""
        return 14.0 * sum(leaf.nbytes(sizes) for leaf in self.leaves) + 48.0 * self.widest(sizes)

    def floor_ms(self, sizes: Sizes, phase: str, copy_bytes: float, flops: float) -> float:
        """max(FLOPs over the measured matrix rate, least bytes over the measured copy rate); rates per
        second."""
        work = self.flops(sizes) * (1.0 if phase == "f" else 1.0 + self.backward)
        compute = work / flops if flops else 0.0
        return 1e3 * max(compute, self.least_bytes(sizes, phase) / copy_bytes)


def rmsnorm_residual(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    h = (x + r).float()
    v = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return v.to(x.dtype) * w


def swiglu(x: Tensor, wg: Tensor, wu: Tensor, wd: Tensor) -> Tensor:
    return (F.silu(x @ wg) * (x @ wu)) @ wd


def _nchw(value: Tensor) -> Tensor:
    """What torch's convolutions take; memory stays channels-last."""
    return value.permute(0, 3, 1, 2)


def squeeze_excite(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    s = x.mean((1, 2))
    return x * torch.sigmoid(F.relu(s @ w1) @ w2)[:, None, None, :]


def dw_pw(x: Tensor, wd: Tensor, wp: Tensor) -> Tensor:
    h = F.relu(F.conv2d(_nchw(x), _nchw(wd), padding=1, groups=x.shape[-1]))
    return F.relu(F.conv2d(h, _nchw(wp))).permute(0, 2, 3, 1)


def conv_res(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    image = _nchw(x)
    return F.relu(image + F.conv2d(image, _nchw(w), b, padding=1)).permute(0, 2, 3, 1)


def rope_qk_norm(x: Tensor, cos: Tensor, sin: Tensor, w: Tensor) -> Tensor:
    a, b = F.rms_norm(x, (x.shape[-1],), w, 1e-6).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def batchnorm_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(_nchw(x), None, None, w, b, True)).permute(0, 2, 3, 1)


def max_pool_block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    made = F.relu(F.conv2d(_nchw(x), _nchw(w), b, padding=1))
    return F.max_pool2d(made, 3, 2, 1).permute(0, 2, 3, 1)


def mamba_scan(x: Tensor, wa: Tensor, wu: Tensor, wg: Tensor, wo: Tensor) -> Tensor:
    """The recurrence h[t] = a[t] h[t-1] + b[t] by doubling, in float32."""
    gate = torch.sigmoid(x @ wa)
    a, b = gate.float(), ((1.0 - gate) * (x @ wu)).float()
    step = 1
    while step < x.shape[1]:
        before = F.pad(b[:, :-step], (0, 0, step, 0))
        b, a = b + a * before, a * F.pad(a[:, :-step], (0, 0, step, 0))
        step *= 2
    return (b.to(x.dtype) * F.silu(x @ wg)) @ wo


def _rows(*counts: int, **others: int) -> tuple[Sizes, ...]:
    return tuple({"rows": n, **others} for n in counts)


def _images(*counts: int, **others: int) -> tuple[Sizes, ...]:
    return tuple({"n": n, **others} for n in counts)


_X = Leaf("x", ("rows", "cols"))
_MAP = ("n", "h", "w", "c")
_IMAGE = Leaf("x", _MAP)

_HEADS = ("batch", "heads", "rows", "width")
_HALVES = ("rows", "half")
_SEQUENCES = ((4, 2048), (16, 512), (1, 8192))


def _up(name: str) -> Leaf:
    return Leaf(name, ("cols", "hidden"), 0.02)


BLOCKS: tuple[Block, ...] = (
    Block(
        "rmsnorm_residual", rmsnorm_residual, (_X, Leaf("r", ("rows", "cols")), Leaf("w", ("cols",))),
        _rows(8192, 2048, 32768, cols=4096), ("rows", "cols"), shared=("r",),
    ),
    Block(
        "small_mlp", lambda x, w1, w2: x + F.gelu(x @ w1) @ w2,
        (_X, Leaf("w1", ("cols", "hidden"), 0.1), Leaf("w2", ("hidden", "cols"), 0.1)),
        _rows(1024, 256, 8192, cols=64, hidden=256), ("rows", "cols"),
        flops=lambda s: 4.0 * s["rows"] * s["cols"] * s["hidden"],
    ),
    Block(
        "swiglu", swiglu,
        (_X, _up("wg"), _up("wu"), Leaf("wd", ("hidden", "cols"), 0.02)),
        _rows(8192, 2048, 16384, cols=4096, hidden=11008), ("rows", "cols"),
        flops=lambda s: 6.0 * s["rows"] * s["cols"] * s["hidden"],
    ),
    Block(
        "linear_gelu", lambda x, w, b: F.gelu(x @ w + b),
        (_X, Leaf("w", ("cols", "out"), 0.02), Leaf("b", ("out",))),
        _rows(8192, 2048, 32768, cols=4096, out=4096), ("rows", "out"),
        flops=lambda s: 2.0 * s["rows"] * s["cols"] * s["out"],
    ),
    Block(
        "layernorm", lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b),
        (_X, Leaf("w", ("cols",)), Leaf("b", ("cols",))),
        _rows(8192, 2048, 32768, cols=4096), ("rows", "cols"),
    ),
    Block(
        "softmax", lambda x: torch.softmax(x, -1), (_X,),
        _rows(8192, 2048, 16384, cols=8192), ("rows", "cols"),
    ),
    Block(
        "bias_gelu", lambda x, b: F.gelu(x + b, approximate="tanh"), (_X, Leaf("b", ("cols",))),
        _rows(8192, 2048, 16384, cols=16384), ("rows", "cols"),
    ),
    Block(
        "lora", lambda x, a, b: x + 0.5 * ((x @ a) @ b),
        (_X, Leaf("a", ("cols", "rank"), 0.02), Leaf("b", ("rank", "cols"), 0.02)),
        _rows(8192, 2048, 32768, cols=4096, rank=16), ("rows", "cols"),
        flops=lambda s: 4.0 * s["rows"] * s["cols"] * s["rank"],
    ),
    Block(
        "cross_entropy", lambda x, t: F.cross_entropy(x.float(), t),
        (_X, Leaf("t", ("rows",), dtype="int64", below="cols")), _rows(4096, 1024, 8192, cols=32000), (),
    ),
    Block(
        "attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        tuple(Leaf(n, _HEADS) for n in "qkv"),
        tuple({"batch": b, "heads": 16, "rows": t, "width": 64} for b, t in _SEQUENCES),
        _HEADS,
        flops=lambda s: 2.0 * s["batch"] * s["heads"] * s["rows"] ** 2 * s["width"], backward=2.5,
        widest=lambda s: float(s["batch"] * s["heads"] * s["rows"] ** 2),
    ),
    Block(
        "squeeze_excite", squeeze_excite, (_IMAGE, Leaf("w1", ("c", 16), 0.1), Leaf("w2", (16, "c"), 0.1)),
        _images(64, 16, 128, c=256, h=56, w=56), _MAP,
    ),
    Block(
        "dw_pw", dw_pw,
        (_IMAGE, Leaf("wd", ("c", 3, 3, 1), 0.1), Leaf("wp", ("c", 1, 1, "c"), 0.05)),
        _images(64, 16, 128, c=256, h=28, w=28), _MAP,
        flops=lambda s: 2.0 * s["n"] * s["h"] * s["w"] * s["c"] ** 2,
    ),
    Block(
        "conv_res", conv_res, (_IMAGE, Leaf("w", ("c", 3, 3, "c"), 0.03), Leaf("b", ("c",))),
        _images(64, 16, 128, c=128, h=56, w=56), _MAP,
        flops=lambda s: 18.0 * s["n"] * s["h"] * s["w"] * s["c"] ** 2,
    ),
    Block(
        "groupnorm_silu", lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)),
        (Leaf("x", ("n", "c", "h", "w")), Leaf("w", ("c",)), Leaf("b", ("c",))),
        _images(16, 4, 64, c=320, h=64, w=64), ("n", "c", "h", "w"),
    ),
    Block(
        "geglu", lambda x, wg, wu, wd: (F.gelu(x @ wg) * (x @ wu)) @ wd,
        (_X, _up("wg"), _up("wu"), Leaf("wd", ("hidden", "cols"), 0.02)),
        _rows(8192, 2048, 32768, cols=1024, hidden=4096), ("rows", "cols"),
        flops=lambda s: 6.0 * s["rows"] * s["cols"] * s["hidden"],
    ),
    Block(
        "kl_div", lambda p, q: F.kl_div(p, q, log_target=True, reduction="sum"),
        (Leaf("p", ("rows", "cols")), Leaf("q", ("rows", "cols"))), _rows(8192, 2048, 32768, cols=8192), (),
    ),
    Block(
        "rope_qk_norm", rope_qk_norm,
        (Leaf("x", _HEADS), Leaf("cos", _HALVES, fixed=True), Leaf("sin", _HALVES, fixed=True),
         Leaf("w", ("width",))),
        tuple({"batch": b, "heads": 16, "rows": t, "width": 64, "half": 32} for b, t in _SEQUENCES), _HEADS,
        label=("batch", "heads", "rows", "width"),
    ),
    Block(
        "batchnorm_relu", batchnorm_relu, (_IMAGE, Leaf("w", ("c",)), Leaf("b", ("c",))),
        _images(64, 16, 128, c=256, h=56, w=56), _MAP,
    ),
    Block(
        "linear_cross_entropy", lambda x, t, w: F.cross_entropy((x @ w).float(), t),
        (_X, Leaf("t", ("rows",), dtype="int64", below="words"), Leaf("w", ("cols", "words"), 0.02)),
        _rows(4096, 1024, 8192, cols=4096, words=32000), (),
        flops=lambda s: 2.0 * s["rows"] * s["cols"] * s["words"],
        widest=lambda s: float(s["rows"] * s["words"]),
    ),
    Block(
        "embedding_norm", lambda t, e, w: F.rms_norm(F.embedding(t, e), (e.shape[1],), w, 1e-6),
        (Leaf("t", ("rows",), dtype="int64", below="words"), Leaf("e", ("words", "cols")),
         Leaf("w", ("cols",))),
        _rows(8192, 2048, 32768, cols=1024, words=32000), ("rows", "cols"),
    ),
    Block(
        "max_pool_block", max_pool_block, (_IMAGE, Leaf("w", ("c", 3, 3, "c"), 0.03), Leaf("b", ("c",))),
        tuple({**s, "half": 28} for s in _images(64, 16, 128, c=128, h=56, w=56)), ("n", "half", "half", "c"),
        flops=lambda s: 18.0 * s["n"] * s["h"] * s["w"] * s["c"] ** 2, label=_MAP,
    ),
    Block(
        "mamba_scan", mamba_scan,
        (Leaf("x", ("batch", "rows", "cols")), *(Leaf(f"w{n}", ("cols", "cols"), 0.03) for n in "augo")),
        tuple({"batch": b, "rows": t, "cols": 1024} for b, t in _SEQUENCES), ("batch", "rows", "cols"),
        flops=lambda s: 8.0 * s["batch"] * s["rows"] * s["cols"] ** 2,
    ),
)  # fmt: skip


def named(name: str) -> Block:
    """KeyError for a name that is not there."""
    return {block.name: block for block in BLOCKS}[name]


def available(only: tuple[str, ...] = ()) -> list[Block]:
    """Blocks whose blueprint is there, in order; `only` keeps those with one of these words in their name."""
    found = [block for block in BLOCKS if block.blueprint.exists()]
    return [b for b in found if not only or any(word in b.name for word in only)]
