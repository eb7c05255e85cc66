"""The rows that can meet, in every combination: autocast, checkpointing, what is trained, how inputs lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.runtime.matrix.cell import COMPILED, EAGER, WIDTH, WORKS, Bench, Row, same

Host = Callable[[Tensor], Tensor]
TRAINED: dict[str, tuple[str, ...]] = {
    "all": ("gate.weight", "up.weight", "down.weight"),
    "none": (),
    "one": ("up.weight",),
}


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = op is torch.ops.esper.fwd.default
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, Callable[[Any], Host]] = {
    "no": lambda block: block,
    "checkpoint": lambda block: partial(checkpoint, block, use_reentrant=False),
    "selective": lambda block: partial(
        checkpoint,
        block,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, _policy),
    ),
}


def _inputs(b: Bench) -> dict[str, Tensor]:
    odd = torch.randn(6 * WIDTH + 1, device=b.device)[1:].view(6, WIDTH)
    return {
        "dense": b.x(6),
        "strided": torch.randn(WIDTH, 6, device=b.device).T,
        "expanded": b.x(1).expand(6, WIDTH),
        "misaligned": odd,
    }


def _hosts(b: Bench) -> Iterator[tuple[str, Host]]:
    for (name, wrap), cast in itertools.product(CHECKPOINTS.items(), (False, True)):
        inner = wrap(b.block)

        def host(x: Tensor, inner: Host = inner, cast: bool = cast) -> Tensor:
            with torch.autocast(b.device.type, dtype=torch.bfloat16) if cast else nullcontext():
                return inner(x)

        yield f"{name}, autocast {cast}", host


def every_one(b: Bench) -> None:
    """24 ways to train and wrap, with each way to lie in memory."""
    for (_, host), names in itertools.product(_hosts(b), TRAINED.values()):
        for name, parameter in b.block.named_parameters():
            parameter.requires_grad_(name in names)
        torch.compiler.reset()  # the limit of recompilations is per function, and this one is many
        fn = b.compiled(host)
        for x in _inputs(b).values():
            same(b, fn, x.detach().requires_grad_())


def accumulated_everywhere(b: Bench) -> None:
    """Gradients of all hosts together, into the same weights, are the sum of each alone."""
    x = b.x(6)
    want = [torch.zeros_like(p) for p in b.block.parameters()]
    for _, host in _hosts(b):
        for total, g in zip(
            want, torch.autograd.grad(b.block(x).square().sum(), list(b.block.parameters())), strict=True
        ):
            total += g
        b.compiled(host)(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in b.block.parameters()], want, rtol=2e-4, atol=2e-4)


BOTH = {EAGER: WORKS, COMPILED: WORKS}
NOTE = "autocast, 3 kinds of checkpointing, 3 of frozen, 4 of memory"
ROWS = (
    Row("all of autocast x checkpoint x frozen x memory", every_one, BOTH, NOTE),
    Row("gradients accumulated over all of them", accumulated_everywhere, BOTH),
)
