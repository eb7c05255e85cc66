"""MNIST-1D (Greydanus, 2020): ten classes of 40-sample signals, generated here; nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.growing.hosts import Towers, planted

SAMPLES, SEED = 12_500, 42  # a fifth of them is held out: half for validation, half for the test
PARTS, SIZE, STRIDE, CLASSES = 4, 10, 10, 10
BATCH = 125


@dataclass(frozen=True)
class Signals:
    """float32 [n, 40], standardised, and int64 [n]."""

    x: Tensor
    y: Tensor
    x_valid: Tensor
    y_valid: Tensor
    x_test: Tensor
    y_test: Tensor


def load(samples: int = SAMPLES) -> Signals:
    """Generates the set; ModuleNotFoundError without the package `mnist1d` (the extra `demo`)."""
    from mnist1d.data import get_dataset_args, make_dataset

    wanted = get_dataset_args()
    wanted.num_samples, wanted.seed = samples, SEED
    made = make_dataset(wanted)
    x, y, held, labels = (torch.tensor(made[k]) for k in ("x", "y", "x_test", "y_test"))
    mean, scale = x.float().mean(), x.float().std()
    x, held = (((t.float() - mean) / scale).contiguous() for t in (x, held))
    half = len(held) // 2
    return Signals(x, y.long(), held[:half], labels[:half].long(), held[half:], labels[half:].long())


def host(seed: int, kind: str = "", at: int = 0) -> Towers:
    """Four towers over overlapping windows of 16 samples, one of them perhaps crippled."""
    torch.manual_seed(seed)
    model = Towers(PARTS, SIZE, STRIDE, CLASSES)
    return planted(model, at, kind) if kind else model


def losses(model: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Cross entropy of every batch."""
    pairs = zip(x.split(BATCH), y.split(BATCH), strict=True)
    return [float(F.cross_entropy(model(a), b)) for a, b in pairs]


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Percent."""
    mode = model.training
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean()
    model.train(mode)
    return 100.0 * float(right)
