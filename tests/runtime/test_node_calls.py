"""Plans with library calls through the autograd node: the bits of the Python path, call by call and plan by
plan."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import runtime
from esper_ir.infer import bind
from esper_ir.opdef import Opaque, OpDef, Sample
from esper_ir.reference import evaluate
from forge.templates.extern import _scalars
from library.launch import Buffer, DimSource, ExternStep, Interface, LaunchManifest, Plan, TensorSpec, View
from runtime import node, timing
from runtime.calls import NONDETERMINISTIC
from runtime.executor import Extern, Ready
from runtime.externs import dense, prepare
from tests.esper_ir.cases import whole_graph
from tests.runtime import artifacts as a
from tests.runtime.conftest import TEXT, Put
from tests.runtime.test_every_call import CASES, DEVICES, drawn

pytestmark = pytest.mark.skipif(
    not node.available(), reason=f"THE AUTOGRAD NODE IS NOT HERE ({node.state()}): its tests did not run"
)
PYTHON_ONLY = ("pad", "scatter", "unsort", "recurrence", "cumprod", "cummax", "cummin", "logcumsumexp")
Leaves = list[Tensor]
Pair = tuple[runtime.Block, runtime.Block, Leaves]


def described(op: str, attrs: dict[str, Any], inputs: list[Tensor], outs: list[Tensor]) -> tuple[Any, ...]:
    """The call with every tensor in a slot of its own."""
    views = [(at, tuple(t.shape), dense(t.shape), True) for at, t in enumerate((*inputs, *outs))]
    return op, attrs, tuple(views[: len(inputs)]), tuple(views[len(inputs) :])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "sample"), CASES)
def test_a_call_gives_what_python_gives(op: OpDef, sample: Sample, device: str) -> None:
    graph = whole_graph(op, sample)
    (one,) = graph.nodes
    values = drawn(op, sample)
    eager = evaluate(graph, values, precision="declared")
    inputs = [values[r].to(device) for r in one.tensors]
    attrs: dict[str, Any] = bind(_scalars(one), {})
    assert isinstance(op.lowering, Opaque)
    name = op.lowering.template
    outs, own = ([torch.empty_like(eager[n], device=device) for n in graph.outputs] for _ in range(2))
    made = prepare(name, attrs, len(inputs))(inputs, outs)
    slots = node.perform(described(name, attrs, inputs, own), [*inputs, *own])
    if slots is None:  # by formulas, or not in its table
        reversed_sum = name == "cumsum" and attrs.get("reverse")
        small = "attention" in name or name.startswith("adaptive_max_pool3d")
        assert reversed_sum or small or name.startswith(PYTHON_ONLY)
        return
    exact = name not in NONDETERMINISTIC[device]
    for found, want in zip(slots[len(inputs) :], made if made is not None else outs, strict=False):
        assert found.shape == want.shape and found.dtype is want.dtype
        slack = 0.0 if exact else 1e-2
        torch.testing.assert_close(found, want.contiguous(), rtol=slack, atol=slack, equal_nan=True)


def attention(dtype: str = "float32", length: int = 6, width: int = 8) -> LaunchManifest:
    """Calls only: whatever the library brings takes its slot."""
    shape, attrs = ("rows", 2, length, width), {"is_causal": True, "scale": 0.4}
    feeds = [Buffer(n, "input", i, dtype, shape) for i, n in enumerate("qkv")]
    y, lse = Buffer("y", "output", 0, dtype, shape), Buffer("lse", "temp", 0, "float32", shape[:3])
    ahead = tuple(View(i) for i in range(3))
    call = ExternStep("y", "attention", ahead, (View(3),), attrs)
    saving = replace(call, outs=(View(3), View(4)))
    kept = [replace(b, source="saved", index=i) for i, b in enumerate((*feeds, y, lse))]
    flow = Buffer("g", "cotangent", 0, dtype, shape)
    grads = [Buffer(f"d{n}", "gradient", i, dtype, shape) for i, n in enumerate("qkv")]
    back = ExternStep(
        "d", "attention_grad", (View(5), *map(View, range(5))), tuple(map(View, (6, 7, 8))), attrs
    )
    plans = (
        Plan("inference", (), (), (*feeds, y), (call,), outputs=(3,)),
        Plan("forward", (), (), (*feeds, y, lse), (saving,), outputs=(3,), saved=(0, 1, 2, 3, 4)),
        Plan("backward", (), ("q", "k", "v"), (*kept, flow, *grads), (back,), gradients=(6, 7, 8)),
    )
    interface = Interface(
        inputs=tuple(TensorSpec(n, "input", dtype, shape) for n in "qkv"),
        outputs=(TensorSpec("y", "output", dtype, shape),),
        dims=(DimSource("rows", 1, 1000, 1, (16,), 0, 0),),
        differentiable=("q", "k", "v"),
    )
    return LaunchManifest(interface, plans, a.KERNELS)


def product() -> LaunchManifest:
    """y = (x * w) @ m^T: kernels and products by turns, operands seen transposed."""
    found = a.product()
    attrs = {"precision": "ieee"}
    (inference,) = found.plans
    t, y = inference.buffers[3], inference.buffers[4]
    forward = replace(inference, phase="forward", saved=(0, 1, 2, 3))
    kept = [replace(b, source="saved", index=i) for i, b in enumerate((*inference.buffers[:3], t))]
    flow = replace(y, name="g", source="cotangent", index=0)
    made = [
        Buffer("dx", "gradient", 0, "float32", ("rows", a.N)),
        Buffer("dw", "gradient", 1, "float32", (a.N,)),
        Buffer("dm", "gradient", 2, "float32", (5, a.N)),
        Buffer("dt", "temp", 1, "float32", ("rows", a.N)),
        Buffer("partial", "temp", 2, "float32", (a.PARTS, a.N)),
    ]
    steps = (
        ExternStep("dt", "mm", (View(4), View(2)), (View(8),), attrs),
        a.step("backward", "backward", a.args(0, 1, 8, 5, 9, "rows"), a.PARTS),
        ExternStep("dm", "mm", (View(4, (), (1, 0)), View(3)), (View(7),), attrs),
        a.step("total", "total", a.args(9, 6)),
    )
    back = Plan("backward", (), ("x", "w", "m"), (*kept, flow, *made), steps, gradients=(5, 6, 7))
    interface = replace(found.interface, differentiable=("x", "w", "m"))
    return LaunchManifest(interface, (inference, forward, back), found.kernels)


def convolution() -> LaunchManifest:
    """Channels last; both gradients one after the other, which the node asks for at once."""
    attrs = {
        "stride": "1,1", "padding": "1,1", "dilation": "1,1", "groups": 1, "data_format": "NHWC",
        "precision": "ieee",
    }  # fmt: skip
    x, y = ("rows", 5, 5, 4), ("rows", 5, 5, 6)
    feeds = [Buffer("x", "input", 0, "float32", x), Buffer("w", "input", 1, "float32", (6, 3, 3, 4))]
    out = Buffer("y", "output", 0, "float32", y)
    call = ExternStep("y", "conv2d", (View(0), View(1)), (View(2),), attrs)
    kept = [replace(b, source="saved") for b in feeds]
    flow = Buffer("g", "cotangent", 0, "float32", y)
    grads = [replace(b, name=f"d{b.name}", source="gradient") for b in feeds]
    back = (
        ExternStep("dx", "conv2d_input_grad", (View(2), View(1)), (View(3),), attrs),
        ExternStep("dw", "conv2d_weight_grad", (View(2), View(0)), (View(4),), attrs),
    )
    plans = (
        Plan("inference", (), (), (*feeds, out), (call,), outputs=(2,)),
        Plan("forward", (), (), (*feeds, out), (call,), outputs=(2,), saved=(0, 1)),
        Plan("backward", (), ("x", "w"), (*kept, flow, *grads), back, gradients=(3, 4)),
    )
    interface = Interface(
        inputs=(TensorSpec("x", "input", "float32", x), TensorSpec("w", "param", "float32", (6, 3, 3, 4))),
        outputs=(TensorSpec("y", "output", "float32", y),),
        dims=(DimSource("rows", 1, 1000, 1, (16,), 0, 0),),
        differentiable=("x", "w"),
    )
    return LaunchManifest(interface, plans, a.KERNELS)


KINDS: dict[str, tuple[Callable[[], LaunchManifest], Callable[[int], list[tuple[int, ...]]]]] = {
    "attention": (attention, lambda rows: [(rows, 2, 6, 8)] * 3),
    "product": (product, lambda rows: [(rows, a.N), (a.N,), (5, a.N)]),
    "convolution": (convolution, lambda rows: [(rows, 5, 5, 4), (6, 3, 3, 4)]),
}


def leaves(kind: str, rows: int = 4, dtype: torch.dtype = torch.float32) -> Leaves:
    generator = torch.Generator().manual_seed(rows)
    shapes = KINDS[kind][1](rows)
    return [torch.randn(s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes]


@pytest.fixture(params=list(KINDS))
def both(put: Put, request: pytest.FixtureRequest) -> Pair:
    """One artifact twice, through the node and through Python alone, and leaves for it."""
    launch = KINDS[request.param][0]()
    shapes = {s.name: {"dtype": s.dtype, "shape": list(s.shape)} for s in launch.interface.inputs}
    text = json.dumps({**TEXT, "name": request.param, "inputs": shapes, "params": {}, "nodes": []})
    mark = request.param.encode().hex().ljust(64, "0")
    name = put(launch, blueprint={"id": mark, "name": request.param, "interface": mark, "text": text})
    with_node, without = (runtime.load(name, functional=True) for _ in range(2))
    by_python(without)
    given = leaves(request.param)
    with_node(*given)
    return with_node, without, given


def by_python(block: runtime.Block) -> None:
    """From now on neither its calls nor its plans go through the node."""
    program = block.program

    def ready(phase: str, dims: tuple[int, ...], wanted: tuple[str, ...] = ()) -> Ready:
        made = program.prepare(program.plan_for(phase, dims, wanted), dims)
        made._node = False
        return made

    block._state.node, block._state.ready, block._state.gradients.ready = None, ready, ready


def gradients(block: runtime.Block, given: Leaves) -> list[Tensor]:
    y = block(*given)
    flow = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y, *torch.autograd.grad(y, [t for t in given if t.requires_grad], flow)]


def launched(block: runtime.Block, call: Callable[[], object]) -> int:
    before = block._state.launched()
    call()
    return block._state.launched() - before


def test_calls_and_kernels_are_made_there_and_counted_alike(both: Pair) -> None:
    block, plain, given = both
    plain(*given)
    counted = plain.report()["counters"]["launches"]
    gradients(plain, given)
    counted = plain.report()["counters"]["launches"] - counted
    assert launched(block, lambda: gradients(block, given)) == counted > 0
    with torch.no_grad():
        block(*given)  # teaches
        assert launched(block, lambda: block(*given)) > 0


def test_plans_by_themselves_give_the_same(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the operators run them inside compiled programs: library calls without the interpreter."""
    block, plain, given = both
    want = gradients(plain, given)
    program = block.program
    forward, back = (next(p for p in program.launch.plans if p.phase == n) for n in ("forward", "backward"))
    flow = torch.randn(want[0].shape, generator=torch.Generator().manual_seed(1))
    by_hand: list[str] = []
    was = Extern.__call__
    monkeypatch.setattr(
        Extern, "__call__", lambda self, *a: by_hand.append(self.call.step.op) or was(self, *a)
    )
    y, *saved = program.run(forward, [t.detach() for t in given])
    dims = program.dims_of([t.shape for t in given])
    assert all(map(torch.equal, (y, *program.run(back, [*saved, flow], dims=dims)), want)) and not by_hand
    strange = [t.detach() for t in given]
    strange[0] = strange[0].neg()._neg_view()  # copied before it gets there
    assert torch.equal(program.run(forward, strange)[0], y) and not by_hand
    monkeypatch.setattr(node, "execute", lambda *_: False)
    assert torch.equal(program.run(forward, strange)[0], y) and by_hand


def test_a_plan_by_itself_takes_only_what_it_may_read(both: Pair) -> None:
    block, _, given = both
    ready = block.program.ready("inference", block.program.dims_of([t.shape for t in given]))
    feeds = [t.detach() for t in given]
    ready(list(feeds))
    plan = ready._node
    if plan is False:
        pytest.skip("kernels only")
    for wrong in ([*feeds[1:]], [0, *feeds[1:]], [feeds[0].to("meta"), *feeds[1:]], tuple(feeds)):
        assert node.execute(plan, wrong) is False
    slots = list(feeds)
    assert node.execute(plan, slots) and len(slots) > len(feeds)
    for made in (None, 7, feeds):
        with pytest.raises((TypeError, ValueError)):
            node.execute(made, slots)


@pytest.mark.parametrize("asked", [(True, True, True), (True, False, False), (False, False, True)])
def test_the_bits_are_those_of_the_python_path(both: Pair, asked: tuple[bool, ...]) -> None:
    block, plain, given = both
    chosen = [t.detach().requires_grad_(on) for t, on in zip(given, asked, strict=False)]
    if not any(t.requires_grad for t in chosen):
        chosen[-1].requires_grad_()
    assert all(map(torch.equal, gradients(block, chosen), gradients(plain, chosen)))
    assert all(map(torch.equal, gradients(block, chosen), gradients(plain, chosen)))


def test_autocast_and_inference_mode_change_nothing(both: Pair) -> None:
    block, plain, given = both
    want = gradients(plain, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block(*given)
        assert y.dtype is torch.float32 and torch.equal(y, want[0])
    flow = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, torch.autograd.grad(y, given, flow), want[1:]))
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(block(*given), want[0])


def test_hooks_checkpoints_and_changes_in_place(both: Pair) -> None:
    block, plain, given = both
    want = torch.autograd.grad(plain(*given).sum(), given)
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = block(*given)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), given), want))
    y = checkpoint(lambda *t: block(*t), *given, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), given), want))
    y = block(*given)
    with torch.no_grad():
        given[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    forward = next(p for p in block.program.launch.plans if p.phase == "forward")
    if set(forward.outputs) & set(forward.saved):
        y = block(*given)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.mul_(2).sum().backward()


def test_from_many_threads_and_sizes(both: Pair) -> None:
    block, plain, _ = both
    kind = block._blueprint
    wrong: list[int] = []

    def work(rows: int) -> None:
        given = leaves(kind, rows)
        want = gradients(plain, given)
        for _ in range(10):
            if not all(map(torch.equal, gradients(block, given), want)):
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 3, 5, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_second_derivatives_are_refused(both: Pair) -> None:
    block, _, given = both
    made = torch.autograd.grad(block(*given).sum(), given[0], create_graph=True)[0]
    with pytest.raises(Exception, match="differentiable once"):
        torch.autograd.grad(made.sum(), given[1])


def test_what_only_python_can_is_left_to_it(put: Put) -> None:
    """A call that is not in the table, and one that turns out to be computed by formulas."""
    shape = ("rows", a.N)
    buffers = (a.X, a.W, Buffer("y", "output", 0, "float32", shape))
    call = ExternStep("y", "cumsum", (View(0),), (View(2),), {"dim": 0, "reverse": True})
    plan = Plan("inference", (), (), buffers, (call,), outputs=(2,))
    block = runtime.load(put(LaunchManifest(a.INTERFACE, (plan,), a.KERNELS)), functional=True)
    x, w = torch.randn(5, a.N), torch.randn(a.N)
    for _ in range(3):
        assert torch.equal(block(x, w), x.flip(0).cumsum(0).flip(0))
    assert block._state.launched() == 0
    q = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    call = described("attention", {"is_causal": False, "scale": 1.0}, [q] * 3, [q])
    assert node.perform(call, [q, q, q, torch.empty_like(q)]) is None


def test_a_result_comes_into_memory_that_a_kernel_used_before(put: Put) -> None:
    """What a call brings is otherwise not set aside before it."""
    shape = ("rows", a.N)
    buffers = (a.X, a.W, a.Y, Buffer("places", "temp", 0, "int64", shape))
    steps = (
        a.step("scale", "forward_general", a.args(0, 1, 2, "rows"), "rows"),
        ExternStep("sort", "sort", (View(0),), (View(2), View(3)), {"dim": 1, "descending": False}),
    )
    plan = Plan("inference", (), (), buffers, steps, outputs=(2,))
    block = runtime.load(put(LaunchManifest(a.INTERFACE, (plan,), a.KERNELS)), functional=True)
    x, w = torch.randn(5, a.N), torch.randn(a.N)
    for _ in range(3):
        assert torch.equal(block(x, w), x.sort(1).values)
    assert block._state.launched() == 4


def test_a_result_is_adopted_only_where_it_fits(put: Put) -> None:
    """One that lies otherwise in memory is copied into place."""
    x, w = torch.randn(1, 4, 5, 5), torch.randn(6, 4, 3, 3)
    attrs = {"stride": "1,1", "padding": "1,1", "dilation": "1,1", "groups": 1, "data_format": "NHWC"}
    given = [x.permute(0, 2, 3, 1).contiguous(), w.permute(0, 2, 3, 1).contiguous()]
    out = torch.zeros(1, 5, 5, 6)
    slots = node.perform(described("conv2d", attrs, given, [out]), [*given, out])
    assert slots[2].data_ptr() == out.data_ptr() and out.any()  # the caller's own is written


@pytest.mark.parametrize("both", ["product"], indirect=True)
def test_a_step_costs_less_there(both: Pair) -> None:
    """Forward and backward of sizes that one thread works on: measured at 0.5 of the Python path's time."""
    block, plain, given = both
    flow = torch.ones(4, 5)
    work = {
        name: lambda made=made: torch.autograd.grad(made(*given), given, flow)
        for name, made in (("node", block), ("python", plain))
    }
    found = timing.cpu_times(work, rounds=40, at_least_us=300)
    assert min(found["node"].samples) < 0.85 * min(found["python"].samples), found


CARD = {"name": "h100", "kind": "cuda", "arch": "sm_90a", "match": "exact"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_on_a_card(put: Put, dtype: str) -> None:
    """By whichever kernel torch chooses, in a graph of CUDA too."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the artifact is for sm_90a")
    launch = replace(attention(dtype, 128, 64), kernels=())
    name = put(launch, target=CARD)
    block, plain = (runtime.load(name, functional=True) for _ in range(2))
    plain._state.node = None
    generator = torch.Generator("cuda").manual_seed(0)
    kind = getattr(torch, dtype)
    q, k, v, g = (
        torch.randn(3, 2, 128, 64, generator=generator, device="cuda", dtype=kind) for _ in range(4)
    )
    given = [t.requires_grad_() for t in (q, k, v)]

    def both_ways(made: runtime.Block) -> list[Tensor]:
        """A result that keeps its graph would keep the leaves' accumulators with the stream they were made
        on, which a capture must not wait for."""
        y = made(*given)
        return [y.detach(), *torch.autograd.grad(y, given, g)]

    def check(found: list[Tensor], want: list[Tensor]) -> None:
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)

    want = both_ways(plain)
    check(both_ways(block), want)
    assert launched(block, lambda: check(both_ways(block), want)) == 2
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both_ways(block)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_ways(block)
    graph.replay()
    torch.cuda.synchronize()
    check(captured, want)
