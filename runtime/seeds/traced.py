"""A wrapped layer under torch.compile: one opaque operator decides at run time what the layer's slots do.

`esper::slots_(h!, key, grad)` stands in the graph for committed grafts, live seeds, incubation and telemetry
of one layer, so a graph is compiled once and stays right while artifacts come and go. It works in place:
where there is nothing to do it does nothing, and the compiler copies only where somebody else still needs h.
Otherwise it runs what eager mode runs, on a graph of its own, and `esper::slots_backward_` goes through that;
the result of the forward is the ticket by which the backward finds it. (`esper::slots` is the same as a
function with a gradient: what a traced forward calls, and what is taken apart into these two.)

A call from compiled code into the dispatcher costs as much as a small layer. So inductor, whose compiled
graphs are Python programs, is told to write a look into one set in its place, and behind it a call of a
Python function. Where it cannot be told (a C++ wrapper, another version) it calls the operator.

A program in a cache imports these names and passes these arguments: change them under new names only.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.inlined import with_line


class Through(Protocol):
    """What the operator needs of a layer."""

    quiet: bool
    watched: bool  # nothing but telemetry

    def run(self, h: Tensor) -> Tensor: ...

    def watch(self, h: Tensor) -> Callable[[Tensor], None] | None: ...


_layers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_loud: set[str] = set()  # keys of layers that have something to do
_waiting: dict[int, tuple[str, Callable[[Tensor], None]]] = {}  # by ticket: of which layer, and what g is for
# uint64, which no kernel computes with: a compiled graph will not take its memory for a value of its own.
_NOTHING = torch.zeros((), dtype=torch.uint64)
_tickets = iter(range(1, 1 << 62))
_define = torch.library.Library("esper", "FRAGMENT")
_unsafe = (torch.Tag.cudagraph_unsafe,)  # a recorded graph would repeat what the slots did that day
_define.define("slots(Tensor h, str key, bool grad) -> (Tensor, Tensor)")
_define.define("slots_(Tensor(a!) h, str key, bool grad) -> Tensor", tags=_unsafe)
_define.define("slots_backward_(Tensor(a!) g, Tensor ticket, str key) -> ()", tags=_unsafe)
_Key = torch._C.DispatchKey
_AUTOGRAD = torch._C.DispatchKeySet(_Key.ADInplaceOrView)
for _key in (_Key.AutogradCPU, _Key.AutogradCUDA, _Key.AutogradOther):
    _AUTOGRAD = _AUTOGRAD | torch._C.DispatchKeySet(_key)


def enrol(key: str, layer: Through) -> None:
    """Make a layer known to the operator while it lives."""
    _layers[key] = layer


def hear(key: str, quiet: bool) -> None:
    """Whether a layer has something to do."""
    (_loud.discard if quiet else _loud.add)(key)


def waiting() -> int:
    """How many forwards wait for their backward."""
    return len(_waiting)


def forget(key: str) -> None:
    """Drop what forwards of a layer left for backwards that never came."""
    for ticket in [t for t, (owner, _) in _waiting.items() if owner == key]:
        _waiting.pop(ticket, None)


def through(h: Tensor, key: str) -> Tensor:
    """The operator, as a traced forward calls it."""
    return torch.ops.esper.slots(h, key, torch.is_grad_enabled() and h.requires_grad)[0]


def _with_autograd() -> Any:
    """Below the operator autograd is switched off; what runs inside builds graphs of its own."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD
    return torch._C._ForceDispatchKeyGuard(include, exclude)


def _slots_backward(g: Tensor, ticket: Tensor, key: str) -> None:
    """The operator of the backward: g is changed in place."""
    if _waiting:
        _go_back(g, ticket, key)


def _run(h: Tensor, key: str, grad: bool) -> Tensor:
    layer = _layers.get(key)
    if layer is None or layer.quiet:
        _loud.discard(key)
        return _NOTHING
    back = layer.watch(h) if layer.watched and grad else _through(layer, h, grad)
    if back is None:
        return _NOTHING
    ticket = next(_tickets)
    _waiting[ticket] = (key, back)
    return torch.scalar_tensor(ticket, dtype=torch.uint64)


def _through(layer: Any, h: Tensor, grad: bool) -> Callable[[Tensor], None] | None:
    """h becomes what the layer makes of it; what turns the gradient of that into the gradient of h."""
    with _with_autograd(), torch.set_grad_enabled(grad):
        # A compiled graph writes over its buffers when it has no more use for them: what the backward will
        # need of this layer's input and result has to lie in memory of its own.
        x = (h.detach().clone() if grad else h.detach()).requires_grad_(grad)
        y = layer.run(x)
    if y is not x:
        with torch.no_grad():
            h.copy_(y.detach())

    def back(g: Tensor) -> None:
        with _with_autograd():
            torch.autograd.backward(y, g)
        if x.grad is not None and x.grad.data_ptr() != g.data_ptr():
            with torch.no_grad():
                g.copy_(x.grad)

    return back if grad else None


def _go_back(g: Tensor, ticket: Tensor, key: str) -> None:
    if ticket is _NOTHING:  # of a layer that was quiet
        return
    found = _waiting.pop(int(ticket), None)
    if found is not None:
        found[1](g)


def _operator(h: Tensor, key: str, grad: bool) -> Tensor:
    ticket = _run(h, key, grad) if key in _loud else _NOTHING
    return ticket.clone() if ticket is _NOTHING else ticket  # an operator's results are its caller's own


def _ticket(h: Tensor, key: str, grad: bool) -> Tensor:
    _tell_inductor()
    return torch.empty((), dtype=torch.uint64, device="cpu")


def _nothing(g: Tensor, ticket: Tensor, key: str) -> None:
    _tell_inductor()


class _Node(torch.autograd.Function):
    """`esper::slots` in the graph of the host."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, key: str, grad: bool) -> tuple[Tensor, Tensor]:
        y, ticket = _functional(h, key, grad)
        ctx.key = key
        ctx.save_for_backward(ticket)
        ctx.mark_non_differentiable(ticket)
        return y, ticket

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (ticket,) = ctx.saved_tensors
        g = cotangents[0].clone()
        torch.ops.esper.slots_backward_(g, ticket, ctx.key)
        return g, None, None


def _functional(h: Tensor, key: str, grad: bool) -> tuple[Tensor, Tensor]:
    """The copy is the compiler's to leave out."""
    y = h.clone()
    return y, torch.ops.esper.slots_(y, key, grad)


def _differentiable(h: Tensor, key: str, grad: bool) -> Any:
    if torch.is_grad_enabled() and h.requires_grad:
        return _Node.apply(h, key, grad)
    return _functional(h, key, grad)


for _name, _kernel, _fake in (("slots_", _operator, _ticket), ("slots_backward_", _slots_backward, _nothing)):
    for _place in ("CPU", "CUDA"):
        _define.impl(_name, _kernel, _place)
    torch.library.register_fake(f"esper::{_name}", _fake, lib=_define)
    _define.impl(_name, torch.library.fallthrough_kernel, "Autograd")
_define.impl("slots", _functional, "CompositeExplicitAutograd")
_define.impl("slots", _differentiable, "Autograd")


# -- inductor
# -------------------------------------------------------------------------------------------------------

NOTHING, LOUD, WAITING, run, run_back = _NOTHING, _loud, _waiting, _run, _go_back
"""What compiled programs import: the ticket of layers that are quiet, who is not, and what is called then."""
_NAMES = ("LOUD", "NOTHING", "WAITING", "run", "run_back")
_IMPORTS = f"from runtime.seeds.traced import {', '.join(f'{n} as esper_{n.lower()}' for n in _NAMES)}"
_told: list[str] = []


def _forward_call(key: str) -> str:
    return f"esper_nothing if {key!r} not in esper_loud else esper_run"


def _backward_call(key: str) -> str:
    return "None if not esper_waiting else esper_run_back"


def _key_of(args: Any) -> str:
    return next(a for a in args if isinstance(a, str))


_CALLS = {"slots_": _forward_call, "slots_backward_": _backward_call}


def _tell_inductor() -> None:
    """Called while the operators are traced: by then whoever compiles is imported."""
    lowering = sys.modules.get("torch._inductor.lowering")
    register = getattr(lowering, "register_lowering", None)
    if _told or register is None:
        return
    for name, call in _CALLS.items():
        operator = getattr(torch.ops.esper, name).default
        register(operator, type_promotion_kind=None)(_lowered(lowering, operator, call))
        _told.append(name)


def _lowered(lowering: Any, operator: Any, call: Callable[[str], str]) -> Any:
    """The usual lowering of an unknown operator, with another text before the arguments of its call in the
    program that is written: a conditional expression, so that they are for its last branch alone."""
    usual = lowering.fallback_handler(operator)
    written = with_line(lowering.ir.FallbackKernel, _IMPORTS)

    def lower(*args: Any, **kwargs: Any) -> Any:
        graph = lowering.V.graph
        before = len(graph.operations)
        made = usual(*args, **kwargs)
        for node in graph.operations[before:] if not graph.cpp_wrapper else ():
            if getattr(node, "op_overload", None) is operator and type(node) is lowering.ir.FallbackKernel:
                node.__class__, node.python_kernel_name = written, call(_key_of(args))
            node.skip_size_stride_alignment_checks = True  # of the ticket, at every call
        return made

    return lower
