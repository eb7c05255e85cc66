"""The demo's own parts: pairs start equal, data is split without overlap, and its claims can fail."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench import digits


@pytest.fixture(scope="module")
def data() -> digits.Digits:
    return digits.load(torch.device("cpu"))


def test_the_split_is_whole_and_apart(data: digits.Digits) -> None:
    assert data.x_train.shape == (1257, 64) and data.x_test.shape == (540, 64)
    assert float(data.x_train.max()) == 1.0 and float(data.x_train.min()) == 0.0
    seen = {row.numpy().tobytes() for row in data.x_train}
    # scikit-learn's set has no duplicate images, so any overlap would be a fault of the split.
    assert not [row for row in data.x_test if row.numpy().tobytes() in seen]


def test_plain_block_is_the_formula() -> None:
    block, x = digits.PlainBlock(), torch.randn(7, 64)
    with torch.no_grad():
        block.w.normal_()
    mean = x.double().square().mean(1, keepdim=True)
    h = x.double() * torch.rsqrt(mean + 1e-6) * block.w.double()
    z = h @ block.w1.double()
    gelu = 0.5 * z * (1 + torch.erf(z / 2**0.5))
    torch.testing.assert_close(block(x).double(), x.double() + gelu @ block.w2.double(), rtol=1e-4, atol=1e-5)


def test_pairs_start_equal_and_train_equally(data: digits.Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "EPOCHS", 2)
    first, second = digits.Classifier(digits.PlainBlock()), digits.Classifier(digits.PlainBlock())
    ticks: list[int] = []
    runs = [digits.train(model, data, 3, lambda: ticks.append(1)) for model in (first, second)]
    assert runs[0].loss == runs[1].loss and runs[0].accuracy == runs[1].accuracy and len(ticks) == 4
    other = digits.train(digits.Classifier(digits.PlainBlock()), data, 4, lambda: None)
    assert other.loss != runs[0].loss


def test_claims_can_fail() -> None:
    from bench import demo

    good = demo.Trained("esper", 1.0, 1.0, 97.0, (97.0,))
    plain = dataclasses.replace(good, impl="eager")
    counters = {"launches": 10, "eager_fallbacks": 0, "copies": 0}

    def failures(esper: demo.Trained, **counted: int) -> list[str]:
        result = demo.Result("cpu", trained=[esper, plain], counters={**counters, **counted})
        return result.failures()

    assert failures(good) == []
    assert "differ" in failures(dataclasses.replace(good, accuracy=96.4))[0]
    assert "under" in failures(dataclasses.replace(good, accuracy=94.9))[1]
    assert "fallbacks" in failures(good, eager_fallbacks=1)[0]
    assert "launch" in failures(good, launches=0)[0]
