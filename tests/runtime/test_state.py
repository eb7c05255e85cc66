"""What a step does once: buffers updated, numbers drawn; under recomputation, traces and graphs."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import runtime
from bench.models import SMALL_CNN, NormRelu
from esper_ir.canonical import blueprint_id, interface_digest
from esper_ir.diagnostics import EsperError
from esper_ir.eager import to_torch
from esper_ir.importers.torch_export import from_torch
from esper_ir.text import parse, render
from esper_ir.verify import typed, verify
from forge.service import compile_file
from library.store import Library
from runtime import binding, functions, loader, node
from runtime.executor import Program
from runtime.swapping import Fit, swap
from tests.runtime.shelf import SIDE, dropped_blueprint, norm_relu_blueprint
from tests.runtime.test_executor import refusal

CLOSE = {"rtol": 1e-3, "atol": 1e-5}
CHANNELS, PIXELS = SMALL_CNN.width, SMALL_CNN.image // 4
Run = Callable[[Any, Tensor], Tensor]
RUNS: dict[str, Run] = {
    "plain": lambda block, x: block(x),
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "compiled": lambda block, x: torch.compile(block, fullgraph=True, backend="aot_eager")(x),
}
EACH = pytest.mark.parametrize("how", RUNS)


@pytest.fixture(autouse=True)
def forget() -> None:
    torch.compiler.reset()


@EACH
@pytest.mark.parametrize("of", ["block", "twin"])
def test_statistics_move_once_a_step(ids: dict[str, str], how: str, of: str) -> None:
    name = ids["norm_relu"]
    block = runtime.load(name) if of == "block" else runtime.twin(name)
    wanted = NormRelu(CHANNELS)
    for _ in range(3):
        x = torch.randn(4, PIXELS, PIXELS, CHANNELS, requires_grad=True)
        y = RUNS[how](block, x)
        y.square().sum().backward()
        want = wanted(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        torch.testing.assert_close(y, want, **CLOSE)
    for buffer in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(block, buffer), getattr(wanted, buffer), **CLOSE)


@pytest.mark.skipif(not node.available(), reason=f"the autograd node is not here ({node.state()})")
def test_a_block_with_statistics_stays_out_of_the_interpreter(
    ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a leaf of one element, results whose gradient nobody asks for, and an expanded cotangent."""
    fn, leaves = runtime.load(ids["norm_relu"], functional=True), runtime.load(ids["norm_relu"]).own_leaves()
    x = torch.randn(4, PIXELS, PIXELS, CHANNELS, requires_grad=True)

    def step(*tensors: Tensor) -> list[Tensor]:
        y, *moved = fn(*tensors)
        asked = [t for t in tensors if t.requires_grad]
        return [y, *moved, *torch.autograd.grad(y.sum(), asked)]

    want = step(x, *leaves)
    copies = fn.report()["counters"]["copies"]
    slow: list[str] = []
    for kind, name in ((runtime.Block, "_call"), (functions.Gradients, "_run"), (Program, "zeros")):
        was = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *a, was=was, name=name: slow.append(name) or was(*a))
    assert all(map(torch.equal, step(x, *leaves), want)) and not slow
    assert fn.report()["counters"]["copies"] == copies + 1
    *others, momentum = leaves
    negated = torch.complex(momentum, -momentum).conj().imag  # of one element: contiguous all the same
    assert momentum.numel() == 1 and negated.is_neg() and negated.is_contiguous()
    assert all(map(torch.equal, step(x, *others, negated), want)) and slow


@pytest.mark.parametrize("native", [True, False])
def test_a_lazily_negated_leaf_of_one_element(
    ids: dict[str, str], monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """Calls of these shapes are known, and the memory of this tensor holds another number."""
    fn, leaves = runtime.load(ids["norm_relu"], functional=True), runtime.load(ids["norm_relu"]).own_leaves()
    fn._state.node = None
    if not native:
        monkeypatch.setattr(binding, "lookup", functions.python_lookup)
    x = torch.randn(4, PIXELS, PIXELS, CHANNELS)
    *others, momentum = leaves
    want = [fn(x, *others, momentum) for _ in range(2)][1]
    negated = torch.complex(momentum, -momentum).conj().imag
    assert all(map(torch.equal, fn(x, *others, negated), want))
    slots = [x, *others, negated]
    fn.program.admit(slots)
    assert not slots[-1].is_neg()


def test_evaluation_leaves_statistics_alone(ids: dict[str, str]) -> None:
    block = runtime.load(ids["norm_relu"]).eval()
    y = block(torch.randn(4, PIXELS, PIXELS, CHANNELS))
    assert isinstance(y, Tensor) and not block.running_mean.any()
    other = copy.deepcopy(block.train())
    other(torch.randn(4, PIXELS, PIXELS, CHANNELS))
    assert other.running_mean.any() and not block.running_mean.any()
    assert set(block.state_dict()) == {"weight", "bias", "running_mean", "running_var"}
    back = pickle.loads(pickle.dumps(other))
    assert torch.equal(back.running_mean, other.running_mean)


@EACH
def test_what_was_dropped_is_dropped_again(ids: dict[str, str], how: str) -> None:
    """The mask of the forward and that of the backward, which repeats the forward, are the same bits."""
    block = runtime.load(ids["dropped"])
    masks = []
    for _ in range(4):
        x = torch.ones(3, SIDE, requires_grad=True)
        y = RUNS[how](block, x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y)) if how != "reentrant" else _backward(y, x)
        assert torch.equal(dx, y.detach()) and 0 < int((y[0] == 0).sum()) < SIDE
        masks.append((y[0] != 0).tolist())
    assert len({tuple(m) for m in masks}) > 1


def _backward(y: Tensor, x: Tensor) -> tuple[Tensor]:
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    return (x.grad,)


def test_torchs_generator_decides(ids: dict[str, str]) -> None:
    block, x = runtime.load(ids["dropped"]), torch.randn(3, SIDE)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(block(x))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    torch.manual_seed(1)
    twin = runtime.twin(ids["dropped"])
    twin.load_state_dict(block.state_dict())
    torch.manual_seed(1)
    torch.testing.assert_close(twin(x), found[0], **CLOSE)
    torch.manual_seed(1)
    assert torch.equal(runtime.load(ids["dropped"], functional=True)(_seed(1), x, block.weight), found[0])
    with torch.random.fork_rng():
        before = torch.get_rng_state()
        block(x)
        assert not torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(block(x=x), found[0])
    assert "takes 1 tensor (x), got 2" in str(refusal("E0810", block, x, x))
    assert "takes 1 tensor (x), got 0" in str(refusal("E0810", block))
    refusal("E0810", block, y=x)
    refusal("E0810", block, x, x=x)


def _seed(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(0, 1 << 62, (1,))


def test_a_replaced_module_draws_too(ids: dict[str, str]) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(SIDE))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x * self.weight)

    model = nn.Sequential(Dropped())
    swap(model, {"0": Fit(ids["dropped"])})
    x = torch.ones(2, 3, SIDE, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, y.detach()) and (y == 0).any()


class Torn(nn.Module):
    """What people write: a product, an activation, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIDE, SIDE)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.relu(self.inner(x)))


@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant"])
def test_torchs_own_dropout_imported(esper_library: Path, tmp_path: Path, how: str) -> None:
    loader._meant.clear()
    loader._libraries.clear()
    module, path = Torn().train(), tmp_path / "torn.json"
    path.write_text(render(from_torch(copy.deepcopy(module), torch.randn(8, SIDE), dynamic=0)))
    with Library.open() as library:
        (made,) = compile_file(path, targets=("cpu",), library=library)
        library.record_verdict(made.artifact_id, {"stages": []}, passed=True)
    model = nn.Sequential(module)
    swap(model, {Torn: Fit(made.artifact_id, mode="train")})
    x = torch.randn(400, SIDE, requires_grad=True)
    y, whole = RUNS[how](model, x), torch.relu(module.inner(x)).detach()
    y.backward(torch.ones_like(y))
    kept = (y != 0) & (whole > 0)
    share = 1 - kept.sum().item() / (whole > 0).sum().item()
    assert 0.25 < share < 0.35
    torch.testing.assert_close(y[kept], whole[kept] / 0.7, **CLOSE)
    torch.testing.assert_close(module.inner.bias.grad, (kept / 0.7).sum(0), **CLOSE)
    assert torch.equal(model.eval()(x), whole)


@pytest.mark.gpu
def test_a_captured_step_draws_anew(card_ids: dict[str, str]) -> None:
    block, x = runtime.load(card_ids["dropped"]), torch.ones(3, SIDE, device="cuda", requires_grad=True)
    flow = torch.ones(3, SIDE, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.autograd.grad(block(x), x, flow)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = block(x)
        (dx,) = torch.autograd.grad(y, x, flow)
    seen = set()
    for _ in range(6):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(dx, y.detach())
        seen.add(tuple((y[0] != 0).tolist()))
    assert len(seen) > 1


@pytest.mark.gpu
def test_a_captured_step_moves_statistics_once(card_ids: dict[str, str]) -> None:
    block = runtime.load(card_ids["norm_relu"])
    x = torch.randn(4, PIXELS, PIXELS, CHANNELS, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        block(x).sum().backward()
    torch.cuda.synchronize()
    wanted = NormRelu(CHANNELS).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.autograd.grad(block(x).sum(), x)
    block.running_mean.zero_()
    block.running_var.fill_(1.0)
    for _ in range(3):
        graph.replay()
        wanted(x.permute(0, 3, 1, 2))
    torch.testing.assert_close(block.running_mean, wanted.running_mean, **CLOSE)
    torch.testing.assert_close(block.running_var, wanted.running_var, **CLOSE)


def test_how_a_block_is_called_is_text_and_interface() -> None:
    for document, key in ((norm_relu_blueprint(4, 3), "updates"), (dropped_blueprint(), "random")):
        blueprint = parse(json.dumps(document))
        assert parse(render(blueprint)) == blueprint and json.loads(render(blueprint))[key] == document[key]
        without = parse(json.dumps({k: v for k, v in document.items() if k != key}))
        assert blueprint_id(blueprint) == blueprint_id(without)
        assert interface_digest(blueprint) != interface_digest(without)
        assert typed(blueprint) and to_torch(blueprint)


@pytest.mark.parametrize(
    "change",
    [
        {"updates": {"weight": "next_mean"}},
        {"updates": {"running_mean": "y"}},
        {"updates": {"running_mean": "next_mean"}},
        {"updates": {"running_mean": "next_mean", "running_var": "next_mean"}},
        {"updates": {"running_mean": "next_mean", "running_var": "m"}},
        {"outputs": ["next_mean", "next_var"]},
        {"random": ["x"]},
        {"random": ["nothing"]},
        {"random": ["weight"]},
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any]) -> None:
    document = {**norm_relu_blueprint(4, 3), **change}
    found = {d.code for d in verify(parse(json.dumps(document))) if d.level == "error"}
    assert "E0311" in found


def test_an_update_of_another_type_is_named() -> None:
    document = norm_relu_blueprint(4, 3)
    document["buffers"]["running_var"] = {"dtype": "float64", "shape": [4], "init": {"kind": "ones"}}
    with pytest.raises(EsperError) as caught:
        typed(parse(json.dumps(document)))
    assert "E03" in caught.value.code or "E02" in caught.value.code
