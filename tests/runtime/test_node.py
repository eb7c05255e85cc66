"""The autograd node in C++ beside the Python path: the same results bit by bit, the same refusals, nothing
kept."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import runtime
from esper_ir.diagnostics import EsperError
from runtime import functions, node
from tests.runtime import artifacts as a
from tests.runtime.conftest import Put
from tests.runtime.test_autograd import put_two_way

pytestmark = pytest.mark.skipif(
    not node.available(), reason=f"THE AUTOGRAD NODE IS NOT HERE ({node.state()}): its tests did not run"
)
Leaves = tuple[Tensor, Tensor, Tensor]


def leaves(rows: int = 5) -> Leaves:
    generator = torch.Generator().manual_seed(rows)
    x, r = (torch.randn(rows, a.N, generator=generator, requires_grad=True) for _ in range(2))
    return x, torch.randn(a.N, generator=generator, requires_grad=True), r


@pytest.fixture
def both(put: Put) -> tuple[runtime.Block, runtime.Block]:
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


def test_calls_and_backwards_go_through_it(both: tuple[runtime.Block, runtime.Block]) -> None:
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
def test_the_bits_are_those_of_the_python_path(
    both: tuple[runtime.Block, runtime.Block], mask: tuple[bool, ...], flow: str
) -> None:
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


def test_odd_inputs_are_answered_as_before(both: tuple[runtime.Block, runtime.Block]) -> None:
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


def test_twice_only_when_retained_and_never_after_a_change(both: tuple[runtime.Block, runtime.Block]) -> None:
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


def test_double_backward_is_refused_by_name(both: tuple[runtime.Block, runtime.Block]) -> None:
    x, w, r = leaves()
    (dx,) = torch.autograd.grad(both[0](x, w, r)[0].sum(), x, create_graph=True)
    with pytest.raises(EsperError) as refused:
        torch.autograd.grad(dx.sum(), w)
    assert refused.value.code == "E0816"


def test_hooks_on_saved_tensors(both: tuple[runtime.Block, runtime.Block]) -> None:
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


def test_an_error_of_a_hook_reaches_the_caller(both: tuple[runtime.Block, runtime.Block]) -> None:
    class Mine(Exception): ...

    def pack(_: Tensor) -> Tensor:
        raise Mine

    with pytest.raises(Mine), saved_tensors_hooks(pack, lambda t: t):
        both[0](*leaves())


def test_from_many_threads(both: tuple[runtime.Block, runtime.Block]) -> None:
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


def test_more_sizes_than_are_remembered(both: tuple[runtime.Block, runtime.Block]) -> None:
    block, _ = both
    w = leaves()[1]
    for rows in range(1, 300):
        x = torch.ones(rows, a.N, requires_grad=True)
        (dx,) = torch.autograd.grad(block(x, w, x)[0].sum(), x)
        assert dx.shape == x.shape


def test_off_by_the_environment(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_NODE", "0")
    assert runtime.load(put(), functional=True)._state.node is None and node.state() == "off"


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(EsperError) as refused:
        node.build()
    assert refused.value.code == "E0827" and not list(node.HERE.glob("*.part"))
