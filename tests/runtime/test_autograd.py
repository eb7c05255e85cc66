"""Gradients: eager function and operator pair, partial and odd cotangents, compile, checkpointing,
refusals."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import runtime
from esper_ir.diagnostics import EsperError
from library.launch import Buffer, KernelStep, LaunchManifest, Plan, TensorSpec
from runtime import loader
from runtime.functions import python_lookup
from tests.runtime import artifacts as a
from tests.runtime.conftest import TEXT, Put
from tests.runtime.test_executor import refusal

DISPATCH = pytest.mark.parametrize("dispatch", ["auto", "op"])


@pytest.fixture(autouse=True)
def forget() -> None:
    loader.cache().release()
    loader._meant.clear()
    loader._libraries.clear()
    torch.compiler.reset()


def two_way() -> LaunchManifest:
    """y = x * w and a second output z = x * w again; dx comes as one buffer for x and r, which is ignored
    forward."""
    interface = replace(
        a.INTERFACE,
        inputs=(*a.INTERFACE.inputs, TensorSpec("r", "input", "float32", ("rows", a.N))),
        outputs=(*a.INTERFACE.outputs, TensorSpec("z", "output", "float32", ("rows", a.N))),
        differentiable=("x", "w", "r"),
    )
    z, kept = replace(a.Y, name="z", index=1), Buffer("kept", "output", 2, "float32", ("rows", a.N))
    steps: tuple[KernelStep, ...] = tuple(
        a.step(f"scale{out}", "forward_general", a.args(0, 1, out, "rows"), "rows") for out in (2, 3, 4)
    )
    forward = Plan("forward", (), (), (a.X, a.W, a.Y, z, kept), steps, outputs=(2, 3), saved=(0, 4, 1))
    source = a.backward()
    buffers = (
        source.buffers[0],
        replace(source.buffers[1], index=2),
        source.buffers[2],
        *source.buffers[3:],
        Buffer("gz", "cotangent", 1, "float32", ("rows", a.N)),
    )
    both = replace(source, wanted=("x", "w", "r"), gradients=(3, 5, 3), buffers=buffers)
    only_x = replace(both, wanted=("x",), gradients=(3,), steps=both.steps[:1])
    return LaunchManifest(interface, (forward, both, only_x), a.KERNELS)


def put_two_way(put: Put) -> str:
    text = {**TEXT, "inputs": {**TEXT["inputs"], "r": TEXT["inputs"]["x"]}}
    return put(
        two_way(),
        blueprint={"id": "cd" * 32, "name": "two", "interface": "cd" * 32, "text": json.dumps(text)},
    )


@DISPATCH
def test_shared_buffers_none_cotangents_and_fresh_saved_tensors(put: Put, dispatch: str) -> None:
    fn = runtime.load(put_two_way(put), functional=True, dispatch=dispatch)
    x, r = (torch.randn(5, a.N, requires_grad=True) for _ in range(2))
    w = torch.randn(a.N, requires_grad=True)
    y, z = fn(x, w, r)
    assert torch.equal(y, z) and torch.equal(y, x * w)
    g = torch.randn_like(y)
    dx, dw, dr = torch.autograd.grad(y, (x, w, r), g, retain_graph=True)
    assert torch.equal(dx, g * w) and torch.equal(dx, dr)
    torch.testing.assert_close(dw, (g * x).sum(0))
    y, z = fn(x, w, r)
    y.backward(g)
    assert x.grad is not None and r.grad is not None and w.grad is not None
    x.grad.zero_()
    assert r.grad.any() and x.grad.data_ptr() != r.grad.data_ptr()


@DISPATCH
def test_only_what_is_asked_for_is_computed(put: Put, dispatch: str) -> None:
    fn = runtime.load(put_two_way(put), functional=True, dispatch=dispatch)
    x, r, w = torch.randn(5, a.N, requires_grad=True), torch.randn(5, a.N), torch.randn(a.N)
    y, _ = fn(x, w, r)
    y.sum().backward()
    assert w.grad is None and r.grad is None and x.grad is not None
    phases = {(row["phase"], row["group"]) for row in fn.report()["variants"]}
    assert ("backward", "backward") in phases and ("backward", "total") not in phases
    assert fn(x.detach(), w, r)[0].requires_grad is False
    with torch.no_grad():
        assert not fn(x, w, r)[0].requires_grad
    with torch.inference_mode():
        assert fn(x, w, r)[0].is_inference() or not fn(x, w, r)[0].requires_grad


@DISPATCH
def test_double_backward_is_refused_only_when_asked_for(put: Put, dispatch: str) -> None:
    block = runtime.load(put(), dispatch=dispatch)
    x = torch.randn(5, a.N, requires_grad=True)
    (dx,) = torch.autograd.grad(block(x).sum(), x, create_graph=True)
    torch.testing.assert_close(dx, block.w.detach().expand(5, -1))
    refusal("E0816", dx.sum().backward)


def test_transforms_and_forward_mode_are_refused(put: Put) -> None:
    fn = runtime.load(put(), functional=True)
    w = torch.randn(a.N)
    refusal("E0817", torch.func.grad(lambda x: fn(x, w).sum()), torch.randn(3, a.N))
    with torch.autograd.forward_ad.dual_level():
        refusal("E0817", fn, torch.autograd.forward_ad.make_dual(torch.randn(3, a.N), torch.ones(3, a.N)), w)


@DISPATCH
def test_inference_mode_records_no_graph_whatever_is_enabled_inside(put: Put, dispatch: str) -> None:
    block = runtime.load(put_two_way(put), functional=True, dispatch=dispatch)
    x, w, r = (torch.randn(shape, requires_grad=True) for shape in ((5, a.N), (a.N,), (5, a.N)))
    wanted = block(x, w, r)
    for _ in range(2):  # the second call of a size is not answered by Python
        with torch.inference_mode(), torch.enable_grad():
            found = block(x * 1, w, r)
        assert all(t.is_inference() and not t.requires_grad for t in found)
        assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))
    assert all(t.requires_grad for t in block(x, w, r))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_without_a_break(put: Put, dynamic: bool | None) -> None:
    block = runtime.load(put())
    graphs: list[int] = []

    def count(module: torch.fx.GraphModule, example: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(1)
        return module

    def host(x: Tensor) -> Tensor:
        return torch.relu(block(x + 1)) * 2

    compiled = torch.compile(host, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    counted = torch.compile(host, fullgraph=True, dynamic=dynamic, backend=count)
    for rows in (9, 16, 33):
        x = torch.randn(rows, a.N, requires_grad=True)
        for function in (compiled, counted):
            want = torch.autograd.grad(host(x).sum(), (x, block.w))
            got = torch.autograd.grad(function(x).sum(), (x, block.w))
            torch.testing.assert_close(got, want)
    assert len(graphs) == (1 if dynamic else 2)  # torch goes over to symbolic sizes by itself at the second


def test_compile_shared_and_fresh_tensors(put: Put) -> None:
    fn = runtime.load(put_two_way(put), functional=True)
    x, r = (torch.randn(5, a.N, requires_grad=True) for _ in range(2))
    w = torch.randn(a.N, requires_grad=True)
    want = torch.autograd.grad(fn(x, w, r)[0].sum(), (x, w, r))
    compiled = torch.compile(lambda *v: fn(*v)[0] + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w, r).sum(), (x, w, r)), want)


def test_operators_pass_torchs_own_checks(put: Put) -> None:
    name = put_two_way(put)
    fn = runtime.load(name, functional=True)
    xs = [torch.randn(5, a.N, requires_grad=True), torch.randn(a.N), torch.randn(5, a.N)]
    for mask in (0, 1, 7):
        ts = [x.detach().requires_grad_(bool(mask >> i & 1)) for i, x in enumerate(xs)]
        torch.library.opcheck(torch.ops.esper.fwd.default, (name, mask, ts, 0))
    assert fn is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(put: Put, reentrant: bool) -> None:
    block = runtime.load(put())
    x = torch.randn(5, a.N, requires_grad=True)
    want = torch.autograd.grad(block(x).square().sum(), (x, block.w))
    before = block.report()["counters"]["launches"]
    y = checkpoint(lambda t: block(t).square(), x, use_reentrant=reentrant)
    y.sum().backward()
    torch.testing.assert_close((x.grad, block.w.grad), want)
    assert block.report()["counters"]["launches"] - before == 1 + 1 + 2


def test_selective_checkpoint_sees_the_block(put: Put) -> None:
    block = runtime.load(put())
    x = torch.randn(5, a.N, requires_grad=True)

    def policy(ctx, op, *args, **kwargs):
        chosen = op is torch.ops.esper.fwd.default
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    before = block.report()["counters"]["launches"]
    y = checkpoint(
        lambda t: block(t).square(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    y.sum().backward()
    assert block.report()["counters"]["launches"] - before == 1 + 2


def test_dispatch_modes_and_fakes(put: Put) -> None:
    block = runtime.load(put())
    with FlopCounterMode(display=False):
        assert block(torch.randn(3, a.N)).shape == (3, a.N)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert block(torch.randn(3, a.N)).shape == (3, a.N)


def test_export_of_the_host(put: Put) -> None:
    block = runtime.load(put())
    host = torch.nn.Sequential(block, torch.nn.ReLU())
    x = torch.randn(4, a.N)
    program = torch.export.export(host, (x,))
    torch.testing.assert_close(program.module()(x), host(x))


def test_fallback_is_opt_in_counted_and_logged_once(put: Put, caplog: pytest.LogCaptureFixture) -> None:
    name = put()
    refusal("E0813", runtime.load(name), torch.randn(1001, a.N))
    block = runtime.load(name, fallback="eager")
    x = torch.randn(1001, a.N, requires_grad=True)
    for _ in range(2):
        y = block(x)
        assert torch.equal(y, x * block.w)
    y.sum().backward()
    assert block.report()["counters"]["eager_fallbacks"] == 2 and block.w.grad is not None
    assert sum("eager twin" in r.message for r in caplog.records) == 1
    refusal("E0811", block, torch.randn(3, a.N).double())


def test_a_conversion_to_another_dtype_is_told_at_once(put: Put) -> None:
    block = runtime.load(put())
    host = torch.nn.Sequential(block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host.cpu().float().to("meta").to_empty(device="cpu")
    with pytest.warns(UserWarning, match=r"w of .* is torch.bfloat16 .* declared torch.float32.*E0811"):
        host.bfloat16()
    refusal("E0811", block, torch.randn(3, a.N))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host.cpu().float()
    block(torch.randn(3, a.N))


def test_initial_values_are_those_of_the_twin(put: Put) -> None:
    name = put()
    torch.manual_seed(3)
    block = runtime.load(name)
    torch.manual_seed(3)
    twin = runtime.twin(name)
    assert torch.equal(block.w, twin.w)
    x = torch.randn(3, a.N)
    assert torch.equal(block(x), twin(x))


@pytest.mark.parametrize(
    "init", ["zeros", "ones", "eye", "kaiming_uniform", "xavier_uniform", {"kind": "uniform", "low": -1}]
)
@pytest.mark.parametrize("shape", [(3, 5), (4,), (2, 3, 3)])
def test_every_initialiser_matches_the_twin(init, shape: tuple[int, ...]) -> None:
    from esper_ir.eager import initialise
    from esper_ir.graph import Leaf
    from esper_ir.types import TensorType
    from runtime.parameters import value_of

    written = {"kind": init} if isinstance(init, str) else init
    spec = TensorSpec("w", "param", "float32", shape)
    torch.manual_seed(1)
    ours = value_of(spec, {"params": {"w": {"init": init}}}, None)
    torch.manual_seed(1)
    assert torch.equal(ours, initialise(Leaf("w", "param", TensorType.of("float32", shape), written)))


def test_frozen_and_accumulated(put: Put) -> None:
    block = runtime.load(put())
    block.w.requires_grad_(False)
    x = torch.randn(5, a.N, requires_grad=True)
    block(x).sum().backward()
    block(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * block.w.expand(5, -1))
    assert block.w.grad is None


def test_backward_in_another_thread_and_stacked(put: Put) -> None:
    blocks = torch.nn.Sequential(*[runtime.load(put()) for _ in range(8)])
    x = torch.randn(5, a.N, requires_grad=True)
    want = x.detach().clone().requires_grad_()
    h = want
    for block in blocks:
        h = h * block.w
    h.sum().backward()
    blocks(x).sum().backward()
    torch.testing.assert_close(x.grad, want.grad)


def test_debug_names_the_first_kernel_that_makes_nan(put: Put) -> None:
    bad = a.step("culprit", "poison", a.args(0, 1, 2, "rows"), "rows")
    plan = replace(a.forward("inference"), steps=(a.FORWARD_STEP, bad, a.FORWARD_STEP))
    name = put(LaunchManifest(a.INTERFACE, (plan, a.forward(), a.backward()), a.KERNELS))
    block, plain = runtime.load(name, debug=True), runtime.load(name)
    x = torch.randn(5, a.N)
    with torch.no_grad():
        assert torch.equal(plain(x), x * plain.w)  # the third step hides it
        assert "culprit" in refusal("E0822", block, x).message
        x[0, 0] = float("nan")
        block(x)  # what came in may go out
    x = torch.randn(5, a.N, requires_grad=True)
    want = torch.autograd.grad(plain(x).square().sum(), x)
    block.load_state_dict(plain.state_dict())
    torch.testing.assert_close(torch.autograd.grad(block(x).square().sum(), x), want)


def test_debug_names_the_kernel_that_writes_outside(put: Put) -> None:
    small = replace(
        a.backward(),
        buffers=(
            *a.backward().buffers[:4],
            Buffer("partial", "temp", 0, "float32", (2, a.N)),
            a.backward().buffers[5],
        ),
    )
    name = put(LaunchManifest(a.INTERFACE, (a.forward(), small), a.KERNELS))
    block = runtime.load(name, debug=True)
    x = torch.randn(5, a.N, requires_grad=True)
    assert "backward wrote outside" in refusal("E0823", block(x).sum().backward).message


def test_ranks_are_compared(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    block = runtime.load(put())
    dist = torch.distributed
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)

    def gather(other: str):
        def fake(out: list, mine: str, group=None) -> None:
            out[:] = [mine, other]

        return fake

    monkeypatch.setattr(dist, "all_gather_object", gather(block.plan_digest()))
    assert runtime.same_on_all_ranks(block) == block.plan_digest()
    monkeypatch.setattr(dist, "all_gather_object", gather("f" * 64))
    assert "rank 1" in refusal("E0840", runtime.same_on_all_ranks, block).message


def test_the_profiler_sees_the_block(put: Put) -> None:
    block = runtime.load(put())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        block(torch.randn(3, a.N))
    assert "esper::scale" in {event.key for event in found.key_averages()}


def test_the_native_lookup_says_what_the_python_one_says(put: Put) -> None:
    native = pytest.importorskip("runtime._native")
    block = runtime.load(put())
    x, w = torch.randn(3, a.N), block.w
    block(x)
    block(x.requires_grad_())
    with torch.no_grad():
        block(x)
    state = block._state
    plain = x.detach()
    calls = [
        [x, w],
        [plain, w],
        [plain, w.detach()],
        [torch.randn(4, a.N), w],
        [torch.randn(a.N, 3).T, w],
        [plain.double(), w],
        [plain.to("meta"), w],
        [plain.as_subclass(type("Own", (Tensor,), {})), w],
        [plain],
        [plain, w, w],
        [],
    ]
    for tensors in calls:
        for grad in (False, True):
            ours = python_lookup(state.memo.hot, tensors, state.types, grad)
            assert native.lookup(state.memo.hot, tensors, state.types, grad) is ours
    assert python_lookup(state.memo.hot, calls[0], state.types, True)[1]
    for wrong in ((), ({}, [], (), True), ({}, (), state.types, True), ([], [], state.types, True)):
        with pytest.raises(TypeError):
            native.lookup(*wrong)


def test_a_meta_tensor_beside_others_is_refused_whatever_was_called_before(put: Put) -> None:
    """Its device index is that of the processor; sizes that are known already must not let it through."""
    fn = runtime.load(put(), functional=True)
    x, w = torch.randn(5, a.N), torch.randn(a.N)
    for block in (fn, runtime.load(fn.artifact_id, functional=True)):
        block._state.node = None if block is not fn else block._state.node
        for _ in range(2):
            block(x, w)
            with pytest.raises(EsperError) as refused:
                block(x.to("meta"), w)
            assert refused.value.code == "E0814"
