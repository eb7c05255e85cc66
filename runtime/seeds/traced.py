"""A wrapped layer under torch.compile: one opaque operator decides at run time what the layer's slots do.

`esper::slots(h, key, grad)` stands in the graph for committed grafts, live seeds, incubation and telemetry
of one layer, so a graph is compiled once and stays right while artifacts come and go. Where there is nothing
to do it copies (an operator may not return its input). Otherwise it runs what eager mode runs, on a graph of
its own, and `esper::slots_backward` goes through that; the second result of the forward is the ticket by
which the backward finds it.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor


class Through(Protocol):
    """What the operator needs of a layer."""

    quiet: bool

    def run(self, h: Tensor) -> Tensor: ...


_layers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_waiting: dict[int, tuple[str, Tensor, Tensor]] = {}
_NOTHING = torch.zeros((), dtype=torch.int64)
_tickets = iter(range(1, 1 << 62))
_define = torch.library.Library("esper", "FRAGMENT")
_define.define("slots(Tensor h, str key, bool grad) -> (Tensor, Tensor)")
_define.define("slots_backward(Tensor g, Tensor ticket, str key) -> Tensor")
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_Key = torch._C.DispatchKey
_AUTOGRAD = torch._C.DispatchKeySet(_Key.ADInplaceOrView)
for _key in (_Key.AutogradCPU, _Key.AutogradCUDA, _Key.AutogradOther):
    _AUTOGRAD = _AUTOGRAD | torch._C.DispatchKeySet(_key)


def enrol(key: str, layer: Through) -> None:
    """Make a layer known to the operator while it lives."""
    _layers[key] = layer


def waiting() -> int:
    """How many forwards wait for their backward."""
    return len(_waiting)


def forget(key: str) -> None:
    """Drop what forwards of a layer left for backwards that never came."""
    for ticket in [t for t, (owner, _, _) in _waiting.items() if owner == key]:
        _waiting.pop(ticket, None)


def through(h: Tensor, key: str) -> Tensor:
    """The operator, as a traced forward calls it."""
    return torch.ops.esper.slots(h, key, torch.is_grad_enabled() and h.requires_grad)[0]


def _with_autograd() -> Any:
    """Below the operator autograd is switched off; what runs inside builds graphs of its own."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD
    return torch._C._ForceDispatchKeyGuard(include, exclude)


def _slots(h: Tensor, key: str, grad: bool) -> tuple[Tensor, Tensor]:
    layer = _layers.get(key)
    if layer is None or layer.quiet:
        return h.clone(), _NOTHING.clone()
    with _with_autograd(), torch.set_grad_enabled(grad):
        # A compiled graph writes over its buffers when it has no more use for them: what the backward will
        # need of this layer's input and result has to lie in memory of its own.
        x = (h.detach().clone() if grad else h.detach()).requires_grad_(grad)
        y = layer.run(x)
    ticket = next(_tickets) if grad else 0
    if grad:
        _waiting[ticket] = (key, x, y)
    out = y.detach()
    return (out.clone() if grad or y is x else out), torch.tensor(ticket)


def _slots_backward(g: Tensor, ticket: Tensor, key: str) -> Tensor:
    found = _waiting.pop(int(ticket), None) if _waiting else None
    if found is None:
        return g.clone()
    _, x, y = found
    with _with_autograd():
        torch.autograd.backward(y, g)
    return g.clone() if x.grad is None or x.grad is g else x.grad


def _slots_fake(h: Tensor, key: str, grad: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h), torch.empty((), dtype=torch.int64, device="cpu")


def _slots_backward_fake(g: Tensor, ticket: Tensor, key: str) -> Tensor:
    return torch.empty_like(g)


class _Node(torch.autograd.Function):
    """`esper::slots` in the graph of the host."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, h: Tensor, key: str, grad: bool) -> tuple[Tensor, Tensor]:
        y, ticket = _below(keyset, h, key, grad)
        ctx.key = key
        ctx.save_for_backward(ticket)
        ctx.mark_non_differentiable(ticket)
        return y, ticket

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (ticket,) = ctx.saved_tensors
        return None, torch.ops.esper.slots_backward.default(cotangents[0], ticket, ctx.key), None, None


def _below(keyset: Any, *values: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        op = torch.ops.esper.slots.default
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *values)


def _slots_autograd(keyset: Any, h: Tensor, key: str, grad: bool) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and h.requires_grad:
        return _Node.apply(keyset, h, key, grad)  # type: ignore[no-any-return]
    if h.__class__ is Tensor and not _modes():
        return _slots(h, key, grad)  # a compiled graph runs: one dispatch less
    return _below(keyset, h, key, grad)


for _place in ("CPU", "CUDA"):
    _define.impl("slots", _slots, _place)
    _define.impl("slots_backward", _slots_backward, _place)
torch.library.register_fake("esper::slots", _slots_fake, lib=_define)
torch.library.register_fake("esper::slots_backward", _slots_backward_fake, lib=_define)
_define.impl("slots", _slots_autograd, "Autograd", with_keyset=True)
