"""Blocks in the programs that inductor writes: called past the dispatcher, on memory that nothing copied."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import runtime
from bench.models import SMALL_CNN, SqueezeExcite
from runtime.swapping import Fit, swap
from tests.runtime import artifacts as a
from tests.runtime.conftest import Put
from tests.runtime.test_autograd import put_two_way

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def programs(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call gives, and the programs that were written for it; they call no operator of ours."""
    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(call)
    ours = [code for code in codes if "esper" in code]
    assert ours and not any("torch.ops.esper" in code for code in ours)
    return found, ours


@pytest.mark.parametrize("dynamic", [False, True])
def test_forward_and_backward_are_called_directly(put: Put, dynamic: bool) -> None:
    fn = runtime.load(put_two_way(put), functional=True)
    w = torch.randn(a.N, requires_grad=True)
    compiled = torch.compile(lambda *v: fn(*v)[0], fullgraph=True, dynamic=dynamic)

    def gradients(call: Callable[..., Tensor], rows: int) -> Any:
        x, r = (
            torch.randn(rows, a.N, generator=torch.Generator().manual_seed(at)).requires_grad_()
            for at in (0, 1)
        )
        y = call(x, w, r)
        return y.detach(), *torch.autograd.grad(y.sum(), (x, w, r))  # a cotangent with strides of 0

    got, codes = programs(lambda: gradients(compiled, 5))
    torch.testing.assert_close(got, gradients(lambda *v: fn(*v)[0], 5))
    calls = [line for code in codes for line in code.splitlines() if "esper_operators." in line]
    assert sum(".forward(" in line for line in calls) == sum(".backward(" in line for line in calls) == 1
    if dynamic:
        torch.testing.assert_close(gradients(compiled, 9), gradients(lambda *v: fn(*v)[0], 9))


def test_recomputed_and_under_autocast(put: Put) -> None:
    block = runtime.load(put())
    x = torch.randn(5, a.N, requires_grad=True)

    def step(inner: Callable[[Tensor], Tensor]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(inner, x, use_reentrant=False)
        return y.detach(), *torch.autograd.grad(y, (x, block.w), torch.ones_like(y))

    compiled = torch.compile(block, fullgraph=True)
    got, _ = programs(lambda: step(compiled))
    torch.testing.assert_close(got, step(block))


class Gated(nn.Module):
    """A block of ours on images, between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        channels = SMALL_CNN.width
        self.before = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.excite = SqueezeExcite(channels, 4, torch.float32)
        self.after = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.excite(self.before(x)))


def test_images_are_not_copied(ids: dict[str, str]) -> None:
    net, side = Gated(), SMALL_CNN.image // 4
    x = torch.randn(4, SMALL_CNN.width, side, side).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    leaves = (x, *net.parameters())

    def gradients(call: Callable[[Tensor], Tensor]) -> Any:
        y = call(x)
        return y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))

    want = gradients(net)
    swap(net, {"excite": Fit(ids["stages.0.*.excite"], channels_last=True)})
    got, codes = programs(lambda: gradients(torch.compile(net, fullgraph=True)))
    for mine, own in zip(got, want, strict=True):
        torch.testing.assert_close(mine, own, **CLOSE)
    assert len(codes) == 2
    for code in codes:  # convolutions and blocks are calls: whatever else there is would be a copy
        assert "async_compile.cpp" not in code and ".copy_(" not in code and "clone" not in code
        assert "assert_size_stride" in code


def test_torchs_own_checks_on_images(ids: dict[str, str]) -> None:
    name, side = ids["stages.0.*.excite"], SMALL_CNN.image // 4
    fn = runtime.load(name, functional=True)
    channels = SMALL_CNN.width
    xs = [torch.randn(4, channels, side, side), torch.randn(4, channels), torch.randn(channels, 4)]
    for mask in (0, 7):
        ts = [x.detach().requires_grad_(bool(mask >> at & 1)) for at, x in enumerate(xs)]
        torch.library.opcheck(torch.ops.esper.fwd.default, (name, mask, ts, 1))
        got = torch.ops.esper.fwd(name, mask, ts, 1)[0]
        inside = fn(ts[0].permute(0, 2, 3, 1), *ts[1:])
        torch.testing.assert_close(got, inside.permute(0, 3, 1, 2))


SCRIPT = """
import sys, torch, runtime
from torch._dynamo.utils import counters
fn = runtime.load(sys.argv[1], functional=True)
x, w = torch.ones(5, int(sys.argv[2])), torch.full((int(sys.argv[2]),), 2.0, requires_grad=True)
y = torch.compile(fn, fullgraph=True)(x, w)
y.sum().backward()
assert y.eq(2).all() and w.grad.eq(5).all()
print(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_a_program_from_the_cache_of_another_process(put: Put, tmp_path: Path) -> None:
    name = put()
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    hits = []
    for _ in range(2):
        command = [sys.executable, "-c", SCRIPT, name, str(a.N)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        hits.append(sum(map(int, done.stdout.split())))
    assert hits[0] == 0 and hits[1] > 0
