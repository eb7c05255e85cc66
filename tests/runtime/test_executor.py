"""The executor on the cpu target: both dispatchers, sizes, guards, workspace, refusals by name."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from esper_ir.diagnostics import EsperError
from library.launch import Argument, Bound, Buffer, Guard, LaunchManifest, Plan, Variant
from runtime.dispatch import native_available
from runtime.executor import NOTHING
from tests.runtime import artifacts as a

BOTH = pytest.mark.parametrize(
    "native",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(not native_available(), reason="runtime._native is not built")
        ),
    ],
)


def refusal(code: str, call, *values, **named) -> EsperError:
    with pytest.raises(EsperError) as caught:
        call(*values, **named)
    assert caught.value.code == code, caught.value
    return caught.value


@BOTH
def test_forward_and_backward(native: bool) -> None:
    p = a.program(native=native)
    x, w = torch.randn(12, a.N), torch.randn(a.N)
    inference, forward, backward = p.launch.plans
    assert torch.equal(p.run(inference, [x, w])[0], x * w)
    y, *saved = p.run(forward, [x, w])
    assert torch.equal(y, x * w) and saved[0] is x and saved[1] is w
    g = torch.randn_like(y)
    dx, dw = p.run(backward, [*saved, g])
    assert torch.equal(dx, g * w)
    torch.testing.assert_close(dw, (g * x).sum(0))
    assert p.counters.launches == 4


@BOTH
def test_variants_are_chosen_by_address_and_size(native: bool) -> None:
    p = a.program(native=native)
    w, room = torch.randn(a.N), torch.randn(20 * a.N + 1)
    x, odd = room[: 4 * a.N].view(4, a.N), room[1 : 4 * a.N + 1].view(4, a.N)
    plan = p.launch.plans[0]
    for tensor in (x, odd, odd):
        assert torch.equal(p.run(plan, [tensor, w])[0], tensor * w)
    assert p.ready("inference", (4,)) is not p.ready("inference", (5,))
    ready = p.prepare(plan, (4,))
    for tensor in (x, odd, odd):
        ready([tensor, w])
    assert ready.variants()[0]["chosen"] == {"forward_aligned": 1, "forward_general": 2}
    assert [v["chosen"].keys() for v in p.prepare(plan, (5,)).variants()] == [{"forward_general"}]


@BOTH
def test_caller_gives_the_memory(native: bool) -> None:
    p = a.program(native=native)
    x, w, g = torch.randn(6, a.N), torch.randn(a.N), torch.randn(6, a.N)
    plan = p.launch.plans[2]
    mine = {3: torch.full((6, a.N), 7.0), 4: torch.full((a.PARTS, a.N), 7.0), 5: torch.full((a.N,), 7.0)}
    dx, dw = p.run(plan, [x, w, g], mine)
    assert dx is mine[3] and dw is mine[5] and not (mine[4] == 7).any()
    assert torch.equal(dx, g * w)
    refusal("E0810", p.run, plan, [x, w, g], {3: torch.empty(5, a.N)})


@BOTH
def test_zeroed_workspace_is_zero_every_time(native: bool) -> None:
    buffers = (
        a.X,
        Buffer("first", "temp", 0, "float32", (64,)),
        Buffer("counter", "zeroed", 0, "int32", (1,)),
        Buffer("y", "output", 0, "float32", (1,)),
    )
    plan = Plan("inference", (), (), buffers, (a.step("tally", "tally", a.args(2, 3), 5),), outputs=(3,))
    p = a.program(LaunchManifest(a.INTERFACE, (plan,), a.KERNELS), native=native)
    for _ in range(3):
        assert p.run(plan, [torch.randn(3, a.N), torch.randn(a.N)])[0].item() == 5
    given = torch.full((1,), 9, dtype=torch.int32)
    assert p.run(plan, [torch.randn(3, a.N), torch.randn(a.N)], {2: given})[0].item() == 5


@BOTH
def test_extern_step_between_kernels(native: bool) -> None:
    p = a.program(a.product(), native=native)
    x, w, m = torch.randn(7, a.N), torch.randn(a.N), torch.randn(5, a.N)
    m.requires_grad_()
    wanted = ((x * w) @ m.T).detach()
    torch.testing.assert_close(p.run(p.launch.plans[0], [x, w, m])[0], wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(p.run(p.launch.plans[0], [x, w, m])[0], wanted)


def test_non_dense_inputs_are_copied_once_and_counted() -> None:
    p = a.program()
    w, plan = torch.randn(a.N), p.launch.plans[0]
    strided, expanded = torch.randn(a.N, 6).T, torch.randn(1, a.N).expand(6, a.N)
    for at, x in enumerate((strided, expanded), 1):
        assert torch.equal(p.run(plan, [x, w])[0], x * w)
        assert p.counters.copies == at
    negated = torch.randn(6, a.N, dtype=torch.complex64).conj().imag
    for _ in range(2):
        assert negated.is_neg() and torch.equal(p.run(plan, [negated, w])[0], negated * w)


@BOTH
def test_a_cotangent_that_no_step_reads_is_not_made(
    native: bool,
) -> None:
    """As of results that update statistics: zeros for it would be written and read by nobody. One that is
    handed on as a gradient is made."""
    plans = a.scale().plans
    back = next(p for p in plans if p.phase == "backward" and set(p.wanted) == {"x", "w"})
    flow = next(b for b in back.buffers if b.source == "cotangent")
    more = [replace(flow, name=name, index=at) for at, name in enumerate(("unread", "handed"), 1)]
    count = len(back.buffers)
    back = replace(
        back,
        buffers=(*back.buffers, *more),
        wanted=(*back.wanted, "r"),
        gradients=(*back.gradients, count + 1),
    )
    outputs = [replace(a.INTERFACE.outputs[0], name=n) for n in ("y", "unread", "handed")]
    interface = replace(a.INTERFACE, outputs=tuple(outputs))
    p = a.program(LaunchManifest(interface, (plans[0], plans[1], back), a.KERNELS), native=native)
    ready = p.ready("backward", (5,), back.wanted)
    kept = p.saved_count
    assert {kept, kept + 2} <= ready.layout.read and kept + 1 not in ready.layout.read
    x, w, g = torch.randn(5, a.N), torch.randn(a.N), torch.randn(5, a.N)
    slots = ready(p.backward_feeds((5,), [x, w], [g, None, None], ready.layout.read))
    dx, dw, dr = (slots[i] for i in ready.layout.gradients)
    torch.testing.assert_close(dw, (g * x).sum(0))
    assert torch.equal(dx, g * w) and not dr.any() and dr.shape == g.shape
    assert slots[kept + 1] == NOTHING


def test_refusals_name_tensor_and_range() -> None:
    p = a.program()
    plan, w = p.launch.plans[0], torch.randn(a.N)
    refusal("E0810", p.run, plan, [torch.randn(3, a.N)])
    refusal("E0810", p.run, plan, [torch.randn(a.N), w])
    refusal("E0810", p.run, plan, [torch.randn(3, a.N + 1), w])
    refusal("E0811", p.run, plan, [torch.randn(3, a.N).double(), w])
    refusal("E0814", p.run, plan, [torch.randn(3, a.N, device="meta"), w])
    refusal("E0821", p.run, plan, [torch.randn(3, a.N).to_sparse(), w])
    error = refusal("E0813", p.run, plan, [torch.randn(1001, a.N), w])
    assert "1..1000" in error.message and error.exit_code == 2
    assert refusal("E0813", p.run, plan, [torch.randn(0, a.N), w]).details["value"] == 0
    refusal("E0815", p.plan_for, "backward", (3,), ("z",))


def test_admitted_shapes_are_still_checked_on_the_fast_path() -> None:
    p = a.program()
    plan, x, w = p.launch.plans[0], torch.randn(3, a.N), torch.randn(a.N)
    assert torch.equal(p.run(plan, [x, w])[0], x * w)
    assert refusal("E0811", p.run, plan, [x.double(), w]).node == "x"
    assert refusal("E0814", p.run, plan, [x.to("meta"), w]).node == "x"


def test_no_general_variant_is_a_named_refusal() -> None:
    only = (Variant(Guard(aligned=(0,)), "forward_aligned"),)
    plan = replace(a.forward("inference"), steps=(a.step("scale", only, a.args(0, 1, 2, "rows"), "rows"),))
    for native in (False, None):
        p = a.program(LaunchManifest(a.INTERFACE, (plan,), a.KERNELS), native=native)
        odd = torch.randn(4 * a.N + 1)[1:].view(4, a.N)
        assert refusal("E0812", p.run, plan, [odd, torch.randn(a.N)]).message
    only = (Variant(Guard(at_most=(("rows", 8),)), "forward_aligned"),)
    plan = replace(plan, steps=(a.step("scale", only, a.args(0, 1, 2, "rows"), "rows"),))
    p = a.program(LaunchManifest(a.INTERFACE, (plan,), a.KERNELS))
    assert p.run(plan, [torch.randn(8, a.N), torch.randn(a.N)])[0].shape == (8, a.N)
    assert refusal("E0812", p.run, plan, [torch.randn(9, a.N), torch.randn(a.N)]).message


def test_buckets_choose_the_plan() -> None:
    small = a.forward("inference", (Bound("rows", 1, 10),))
    large = a.forward("inference", (Bound("rows", 11, 1000),))
    p = a.program(LaunchManifest(a.INTERFACE, (small, large), a.KERNELS))
    assert p.plan_for("inference", (10,)) is small and p.plan_for("inference", (11,)) is large
    gap = a.program(LaunchManifest(a.INTERFACE, (small,), a.KERNELS))
    refusal("E0815", gap.plan_for, "inference", (11,))


def test_malformed_plans_are_refused_not_run() -> None:
    good = a.forward("inference")
    short = replace(good, steps=(a.step("s", "forward_general", a.args(0, 1, 2), "rows"),))
    swapped = replace(
        good,
        steps=(
            a.step("s", "forward_general", (*a.args(0, 1), Argument("size", 3), Argument("buffer", 2)), 1),
        ),
    )
    absent = replace(good, buffers=(replace(a.X, index=7), a.W, a.Y))
    foreign = replace(good, buffers=(replace(a.X, source="saved"), a.W, a.Y))
    for plan in (short, swapped, absent, foreign):
        p = a.program(LaunchManifest(a.INTERFACE, (plan,), a.KERNELS))
        assert refusal("E0809", p.prepare, plan, (3,)).message


@BOTH
def test_threads_share_a_program(native: bool) -> None:
    p = a.program(native=native)
    w = torch.randn(a.N)
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = torch.full((seed + 1, a.N), float(seed))
        for _ in range(200):
            if not torch.equal(p.run(p.launch.plans[0], [x, w])[0], x * w):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_of_shapes_is_bounded() -> None:
    p = a.program()
    w = torch.randn(a.N)
    for rows in range(1, 900):
        p.run(p.launch.plans[0], [torch.empty(rows, a.N), w])
    assert len(p._ready) <= 512 and len(p._known) <= 512
