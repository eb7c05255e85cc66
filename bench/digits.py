"""Real data for the demo: scikit-learn's handwritten digits, a classifier around a block, its training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES, HIDDEN, CLASSES = 64, 256, 10
BATCH, EPOCHS = 64, 15


@dataclass(frozen=True)
class Digits:
    """1,797 images of 8x8 grey values in [0, 1], split once and for all; float32 [n, 64] and int64 [n]."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


def load(device: torch.device, held_out: float = 0.3) -> Digits:
    """Reads the copy that scikit-learn ships; raises ModuleNotFoundError where it is not installed."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels / 16.0, dtype=torch.float32)
    y = torch.tensor(labels, dtype=torch.int64)
    train, test = train_test_split(range(len(y)), test_size=held_out, random_state=0, stratify=labels)
    return Digits(*(part.to(device) for part in (x[train], y[train], x[test], y[test])))


class PlainBlock(nn.Module):
    """examples/digits_block.json in plain torch: h = rms_norm(x) * w; x + gelu(h @ w1) @ w2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(FEATURES))
        self.w1 = nn.Parameter(torch.empty(FEATURES, HIDDEN).normal_(std=0.1))
        self.w2 = nn.Parameter(torch.empty(HIDDEN, FEATURES).normal_(std=0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, (FEATURES,), self.w, 1e-6)
        return x + F.gelu(h @ self.w1) @ self.w2


class Classifier(nn.Module):
    """linear -> block -> linear."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, FEATURES)
        self.block = block
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)))


@dataclass(frozen=True)
class Run:
    """One training: test accuracy in percent, median milliseconds of a step, mean loss of the last epoch."""

    accuracy: float
    step_ms: float
    loss: float


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_equal(model: Classifier, seed: int) -> None:
    """Initial weights from the seed alone, by parameter name, so that both models of a pair start equal."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            value = torch.randn(parameter.shape, generator=generator)
            scale = 0.1 if parameter.dim() > 1 else 0.0
            parameter.copy_((value * scale).to(parameter.device))
            if name.endswith(".w"):
                parameter.fill_(1.0)


def train(model: Classifier, data: Digits, seed: int, tick: Callable[[], None]) -> Run:
    """Adam over batches whose order follows from the seed; `tick` is called once an epoch."""
    device = data.x_train.device
    start_equal(model, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    order = torch.Generator().manual_seed(seed)
    times: list[float] = []
    losses: list[Tensor] = []
    for _ in range(EPOCHS):
        losses = []
        # Whole batches only: one shape, so that no model is timed on the odd remainder.
        for rows in torch.randperm(len(data.y_train), generator=order).split(BATCH)[:-1]:
            x, y = data.x_train[rows.to(device)], data.y_train[rows.to(device)]
            synchronize(device)
            begin = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            synchronize(device)
            times.append(time.perf_counter() - begin)
            losses.append(loss.detach())
        tick()
    return Run(accuracy(model, data), 1e3 * sorted(times)[len(times) // 2], float(torch.stack(losses).mean()))


def accuracy(model: nn.Module, data: Digits) -> float:
    """Percent of the held-out images classified right."""
    with torch.no_grad():
        right = model(data.x_test).argmax(1) == data.y_test
    return 100.0 * float(right.float().mean())
