"""The autograd node in C++ beside the Python path: the same results bit by bit, the same refusals, nothing
kept."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import runtime
from esper_ir.diagnostics import EsperError
from runtime import dispatch, functions, loader, node
from tests.runtime import artifacts as a
from tests.runtime.conftest import Put
from tests.runtime.test_autograd import put_two_way

pytestmark = pytest.mark.skipif(
    not node.available(), reason=f"THE AUTOGRAD NODE IS NOT HERE ({node.state()}): its tests did not run"
)
Leaves = tuple[Tensor, Tensor, Tensor]
Pair = tuple[runtime.Block, runtime.Block]


def leaves(rows: int = 5) -> Leaves:
    generator = torch.Generator().manual_seed(rows)
    x, r = (torch.randn(rows, a.N, generator=generator, requires_grad=True) for _ in range(2))
    return x, torch.randn(a.N, generator=generator, requires_grad=True), r


@pytest.fixture
def both(put: Put) -> Pair:
    """One artifact twice: through the node, and through Python alone."""
    name = put_two_way(put)
    with_node, without = (runtime.load(name, functional=True) for _ in range(2))
    without._state.node = None
    with_node(*leaves())  # the first call of a size is answered by Python, and teaches
    return with_node, without


def through_the_node(block: runtime.Block, call: Callable[[], object]) -> int:
    """Launches of the node while `call` runs."""
    before = block._state.launched()
    call()
    return block._state.launched() - before


def test_calls_and_backwards_go_through_it(both: Pair) -> None:
    block, _ = both
    x, w, r = leaves()
    y, z = block(x, w, r)
    assert type(y.grad_fn).__name__ != "CallBackward" and "esper" in y.grad_fn.name().lower()
    assert through_the_node(block, lambda: torch.autograd.grad((y, z), (x, w, r), (z.detach(), y.detach())))
    with torch.no_grad():
        assert block(x, w, r)[0].grad_fn is None
    assert block.report()["counters"]["launches"] >= block._state.launched() > 0


MASKS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("flow", ["dense", "expanded", "strided", "only y", "only z"])
def test_the_bits_are_those_of_the_python_path(both: Pair, mask: tuple[bool, ...], flow: str) -> None:
    found = []
    for block in both:
        tensors = [t.detach().requires_grad_(asked) for t, asked in zip(leaves(), mask, strict=True)]
        y, z = block(*tensors)
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        shaped = {"expanded": g[:1].expand(g.shape), "strided": g.t().contiguous().t()}.get(flow, g)
        outs = {"only y": [y], "only z": [z]}.get(flow, [y, z])
        torch.autograd.backward(outs, [shaped] * len(outs))
        found.append([y, z, *(t.grad for t in tensors)])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))


def test_odd_inputs_are_answered_as_before(both: Pair) -> None:
    block, plain = both
    x, w, r = (t.detach() for t in leaves())
    for odd in (x.t().contiguous().t(), torch.view_as_complex(torch.stack((x, -x), -1)).conj().imag):
        assert torch.equal(block(odd, w, r)[0], plain(odd, w, r)[0])
    for wrong in (x.double(), x[:, :-1], x.to("meta")):
        with pytest.raises(EsperError) as one:
            block(wrong, w, r)
        with pytest.raises(EsperError) as other:
            plain(wrong, w, r)
        assert one.value.code == other.value.code


def test_twice_only_when_retained_and_never_after_a_change(both: Pair) -> None:
    x, w, r = leaves()
    y, _ = both[0](x, w, r)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), x)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, torch.ones_like(y))
    y, _ = both[0](x, w, r)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_double_backward_is_refused_by_name(both: Pair) -> None:
    x, w, r = leaves()
    (dx,) = torch.autograd.grad(both[0](x, w, r)[0].sum(), x, create_graph=True)
    with pytest.raises(EsperError) as refused:
        torch.autograd.grad(dx.sum(), w)
    assert refused.value.code == "E0816"


def test_hooks_on_saved_tensors(both: Pair) -> None:
    x, w, r = leaves()
    plain = torch.autograd.grad(both[1](x, w, r)[0].sum(), (x, w, r))
    seen: list[torch.Size] = []
    with saved_tensors_hooks(lambda t: seen.append(t.shape) or t.clone(), lambda t: t):
        y, _ = both[0](x, w, r)
    assert seen and all(map(torch.equal, torch.autograd.grad(y.sum(), (x, w, r)), plain))
    with save_on_cpu():
        y, _ = both[0](x, w, r)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), (x, w, r)), plain))
    for reentrant in (True, False):
        y = checkpoint(lambda *t: both[0](*t)[0], x, w, r, use_reentrant=reentrant)
        x.grad = w.grad = r.grad = None
        y.sum().backward()
        assert all(
            torch.equal(t.grad, g) for t, g in zip((x, w, r), plain, strict=True) if t.grad is not None
        )


def inner(block: runtime.Block) -> None:
    with torch.enable_grad():
        block(*leaves(3))[0].sum().backward()


def test_backwards_in_backwards(both: Pair) -> None:
    block, plain = both
    x, w, r = leaves()
    expected = torch.autograd.grad(plain(x, w, r)[0].sum(), (x, w, r))
    y, _ = block(x, w, r)
    y.register_hook(lambda g: inner(block))
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), (x, w, r)), expected))
    with saved_tensors_hooks(lambda t: t, lambda t: inner(block) or t):
        y, _ = block(x, w, r)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), (x, w, r)), expected))


@pytest.mark.parametrize(
    ("unpack", "code"),
    [(lambda t: t.double(), "E0811"), (lambda t: t[:1].clone(), "E0810"), (lambda t: t.to("meta"), "E0814")],
    ids=["dtype", "shape", "device"],
)
def test_a_saved_tensor_that_comes_back_as_another_is_refused(
    both: Pair, unpack: Callable[[Tensor], Tensor], code: str
) -> None:
    """Its memory would be read as what was saved."""
    for block in both:
        with saved_tensors_hooks(lambda t: t, unpack):
            y, _ = block(*leaves())
        with pytest.raises(EsperError) as refused:
            y.sum().backward()
        assert refused.value.code == code


def test_vmap_over_a_backward_is_refused_by_name(both: Pair) -> None:
    for block in both:
        x, w, r = leaves()
        y, _ = block(x, w, r)
        with pytest.raises(EsperError) as refused:
            torch.autograd.grad(y, x, torch.stack((y, y)).detach(), is_grads_batched=True)
        assert refused.value.code == "E0817"


def test_compiled_autograd_is_refused_by_name(both: Pair) -> None:
    x, w, r = leaves()
    y, by_python = (block(x, w, r)[0].sum() for block in both)
    with compiled_autograd._enable(lambda graph: graph):
        with pytest.raises(EsperError) as refused:
            y.backward()
        by_python.backward()
    assert refused.value.code == "E0817" and "ESPER_NODE=0" in str(refused.value.hint)
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode(both: Pair) -> None:
    for block in both:
        x, w, r = leaves()
        with torch.autograd.detect_anomaly():
            y, _ = block(x, w, r)
            assert torch.autograd.grad(y.sum(), x, retain_graph=True)[0] is not None
            with pytest.raises(RuntimeError, match="returned nan values"):
                torch.autograd.grad(y, x, torch.full_like(y, float("nan")))


def test_tensors_that_are_no_leaves_and_outputs_that_are_changed(both: Pair) -> None:
    found = []
    for block in both:
        x, w, r = leaves()
        unused = torch.ones(3, requires_grad=True)
        y, z = block(x * 2, w, r[:])
        y.mul_(3)
        z.add_(y)
        asked = torch.autograd.grad(z.sum(), (x, w, r, unused), allow_unused=True)
        assert asked[3] is None
        found.append(asked[:3])
    assert all(map(torch.equal, *found))


def test_copies_go_through_it_too(both: Pair) -> None:
    x, w, r = leaves()
    for block in (copy.deepcopy(both[0]), pickle.loads(pickle.dumps(both[0]))):
        block(x, w, r)
        assert through_the_node(block, lambda: block(x, w, r)[0].sum().backward())  # noqa: B023


def test_inside_a_compiled_module(both: Pair) -> None:
    class Host(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = both[0]

        def forward(self, x: Tensor, w: Tensor, r: Tensor) -> Tensor:
            y, z = self.block(x * 2, w, r)
            return (y + z).sum()

    x, w, r = leaves()
    compiled = torch.compile(Host(), backend="aot_eager", fullgraph=True)
    one, other = (torch.autograd.grad(f(x, w, r), (x, w, r)) for f in (compiled, Host()))
    assert all(map(torch.equal, one, other))


def test_a_long_chain_is_dropped_without_recursion(both: Pair) -> None:
    _, w, r = leaves(1)
    y = r
    for _ in range(30_000):
        y, _ = both[0](y, w, r)
    assert y.grad_fn is not None
    last = weakref.ref(y)
    del y, _
    assert last() is None, "dropped, and this process is still there"


def _child(loss: Tensor, block: runtime.Block, queue: Any) -> None:
    loss.backward()
    block(*leaves())[0].sum().backward()
    queue.put("done")


def test_a_forked_process_goes_on(both: Pair) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_child, args=(both[0](*leaves())[0].sum(), both[0], queue))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and queue.get(timeout=5) == "done"


AT_EXIT = """
import sys, torch, runtime
block = runtime.load(sys.argv[1], functional=True)
leaves = [torch.ones(5, 8, requires_grad=True), torch.ones(8, requires_grad=True)]
kept = [block(*leaves, leaves[0]) for _ in range(3)]
kept[-1][0].grad_fn.register_hook(lambda *_: None)
torch.kept, torch.state = kept, block._state
assert block._state.launched()
"""


def test_an_interpreter_ends_with_graphs_alive(put: Put) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, put_two_way(put)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def resident() -> int:
    """KiB of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def test_calls_leave_no_memory_behind(both: Pair) -> None:
    x, w, r = leaves()
    flow = torch.ones(5, a.N)

    def calls(count: int) -> int:
        for _ in range(count):
            torch.autograd.grad(both[0](x, w, r)[0], x, flow)
        gc.collect()
        return resident()

    calls(2000)
    before = calls(2000)
    assert calls(20_000) - before < 1024  # fewer than 50 bytes a call


def test_an_error_of_a_hook_reaches_the_caller(both: Pair) -> None:
    class Mine(Exception): ...

    def pack(_: Tensor) -> Tensor:
        raise Mine

    with pytest.raises(Mine), saved_tensors_hooks(pack, lambda t: t):
        both[0](*leaves())


def test_from_many_threads(both: Pair) -> None:
    block, plain = both
    wrong: list[int] = []

    def work(rows: int) -> None:
        x, w, r = leaves(rows)
        expected = torch.autograd.grad(plain(x, w, r)[0].sum(), (x, w, r))
        for _ in range(30):
            got = torch.autograd.grad(block(x, w, r)[0].sum(), (x, w, r))
            if not all(map(torch.equal, got, expected)):
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 3, 5, 5, 7, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nothing_is_kept(put: Put) -> None:
    """A graph keeps what its backward needs and not the block; when it goes, all is gone."""
    block = runtime.load(put_two_way(put), functional=True)
    x, w, r = leaves()
    for _ in range(2):
        y, _z = block(x, w, r)
    seen = weakref.ref(block)
    count = len([o for o in gc.get_objects() if isinstance(o, functions.Gradients)])
    del block
    gc.collect()
    assert seen() is None
    assert torch.autograd.grad(y.sum(), x)[0] is not None
    del y, _z
    gc.collect()
    assert len([o for o in gc.get_objects() if isinstance(o, functions.Gradients)]) < count


def test_more_sizes_than_are_remembered(both: Pair) -> None:
    block, _ = both
    w = leaves()[1]
    for rows in range(1, 300):
        x = torch.ones(rows, a.N, requires_grad=True)
        (dx,) = torch.autograd.grad(block(x, w, x)[0].sum(), x)
        assert dx.shape == x.shape


def test_plans_beyond_the_native_tables(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    header = (node.HERE / "_segment.h").read_text()
    for name in ("MAX_BUFFERS", "MAX_ARGS"):
        assert f"#define {name} {getattr(dispatch, name)}\n" in header
    name = put_two_way(put)
    x, w, r = leaves()
    plain = torch.autograd.grad(runtime.load(name, functional=True)(x, w, r)[0].sum(), (x, w, r))
    loader.cache().release()
    monkeypatch.setattr(dispatch, "MAX_BUFFERS", 3)
    block = runtime.load(name, functional=True)
    for _ in range(3):
        assert all(map(torch.equal, torch.autograd.grad(block(x, w, r)[0].sum(), (x, w, r)), plain))
    assert block._state.launched() == 0 and block.report()["counters"]["launches"]


def test_off_by_the_environment(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_NODE", "0")
    assert runtime.load(put(), functional=True)._state.node is None and node.state() == "off"


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(EsperError) as refused:
        node.build()
    assert refused.value.code == "E0827" and not list(node.HERE.glob("*.part"))
