"""A wrapped layer under torch.compile: one opaque operator decides at run time what the layer's slots do.

`esper::slots_(h!, key, grad)` stands in the graph for committed grafts, live seeds, incubation and telemetry
of one layer, so a graph is compiled once and stays right while artifacts come and go. It works in place:
where there is nothing to do it does nothing, and the compiler copies only where somebody else still needs h.
Otherwise it runs what eager mode runs, on a graph of its own, and `esper::slots_backward_` goes through that;
the result of the forward is the ticket by which the backward finds it. (`esper::slots` is the same as a
function with a gradient: what a traced forward calls, and what is taken apart into these.)

Keeping a tensor from the forward to the backward costs as much as all else that a quiet layer does. So the
layers of one graph share a ticket: each takes that of the layer before it (`esper::slots_next_(h!, ticket,
key)`) and hands it on, numbered by the first that has something to do, and all backwards look where the
last points. A layer that is called a second time in a graph begins another. In a part that is computed
again in the backward each has its own: one of all would have all such parts computed at once.

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
from runtime.state import graph_task


class Through(Protocol):
    """What the operator needs of a layer."""

    quiet: bool
    watched: bool  # nothing but telemetry

    def run(self, h: Tensor, counts: bool) -> Tensor: ...

    def watch(self, h: Tensor, counts: bool) -> Callable[[Tensor], None] | None: ...


_layers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_loud: set[str] = set()  # keys of layers that have something to do
_waiting: dict[int, dict[str, Callable[[Tensor], None]]] = {}  # by ticket, by key of the layer: what g is for
# uint64, which no kernel computes with: a compiled graph will not take its memory for a value of its own.
_NOTHING = torch.zeros((), dtype=torch.uint64)
_tickets = iter(range(2, 1 << 62, 2))  # and one more in a backward
_define = torch.library.Library("esper", "FRAGMENT")
_unsafe = (torch.Tag.cudagraph_unsafe,)  # a recorded graph would repeat what the slots did that day
_define.define("slots(Tensor h, str key, bool grad) -> (Tensor, Tensor)")
_define.define("slots_(Tensor(a!) h, str key, bool grad) -> Tensor", tags=_unsafe)
_define.define("slots_next_(Tensor(a!) h, Tensor ticket, str key) -> Tensor", tags=_unsafe)
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
    return sum(map(len, _waiting.values()))


def forget(key: str) -> None:
    """Drop what forwards of a layer left for backwards that never came."""
    for ticket in [t for t, backs in _waiting.items() if key in backs]:
        _taken(ticket, key)


def _taken(ticket: int, key: str) -> Callable[[Tensor], None] | None:
    """What waits for a backward, which waits no longer."""
    backs = _waiting.get(ticket)
    found = backs.pop(key, None) if backs is not None else None
    if not backs:
        _waiting.pop(ticket, None)
    return found


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
    return _run_next(h, _NOTHING, key, grad)


def _run_next(h: Tensor, ticket: Tensor, key: str, grad: bool = True) -> Tensor:
    """The ticket, or a numbered one where the backward must come and it had no number."""
    layer = _layers.get(key)
    if layer is None or layer.quiet:
        _loud.discard(key)
        return ticket
    again = graph_task() != -1
    counts = not (again and _began(key))
    back = layer.watch(h, counts) if layer.watched and grad else _through(layer, h, grad, counts)
    if back is None:
        return ticket
    number = 0 if ticket is _NOTHING else int(ticket)
    if not number:
        number = next(_tickets) + again
        ticket = torch.scalar_tensor(number, dtype=torch.uint64)
    _waiting.setdefault(number, {})[key] = back
    return ticket


def _began(key: str) -> bool:
    """Whether a forward outside of a backward left something that waits: where parts are computed again the
    backward is given that of the second forward alone."""
    return any(not number & 1 and key in backs for number, backs in _waiting.items())


def _through(layer: Any, h: Tensor, grad: bool, counts: bool) -> Callable[[Tensor], None] | None:
    """h becomes what the layer makes of it; what turns the gradient of that into the gradient of h."""
    with _with_autograd(), torch.set_grad_enabled(grad):
        # A compiled graph writes over its buffers when it has no more use for them: what the backward will
        # need of this layer's input and result has to lie in memory of its own.
        x = (h.detach().clone() if grad else h.detach()).requires_grad_(grad)
        y = layer.run(x, counts)
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
    back = _taken(int(ticket), key)
    if back is not None:
        back(g)


def _operator(h: Tensor, key: str, grad: bool) -> Tensor:
    ticket = _run(h, key, grad) if key in _loud else _NOTHING
    return ticket.clone() if ticket is _NOTHING else ticket  # an operator's results are its caller's own


def _next_operator(h: Tensor, ticket: Tensor, key: str) -> Tensor:
    made = _run_next(h, ticket, key) if key in _loud else ticket
    return made.clone() if made is ticket else made


def _ticket(h: Tensor, key: str, grad: bool) -> Tensor:
    _tell_inductor()
    return torch.empty((), dtype=torch.uint64, device="cpu")


def _next_ticket(h: Tensor, ticket: Tensor, key: str) -> Tensor:
    return _ticket(h, key, True)


def _nothing(g: Tensor, ticket: Tensor, key: str) -> None:
    _tell_inductor()


class _Chain:
    """The layers of a graph that is traced, as far as they share a ticket."""

    def __init__(self, tracer: Any) -> None:
        self.tracer, self.keys = tracer, set[str]()
        self.last: Tensor | None = None  # of the newest layer

    def call(self, h: Tensor, key: str) -> Tensor:
        """The operator, on the ticket of the layer before."""
        self.keys.add(key)
        slots, last = torch.ops.esper, self.last
        made: Tensor = slots.slots_(h, key, True) if last is None else slots.slots_next_(h, last, key)
        self.last = made
        return made


_chains: weakref.WeakKeyDictionary[Any, _Chain] = weakref.WeakKeyDictionary()


def _chain(key: str) -> _Chain | None:
    """Where a layer with a gradient stands in a trace that has forward and backward in one graph; None in any
    other call, and in a part that is computed again (there, tensors are kept by hooks). A part that is traced
    into a graph of its own has its own."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    if mode is None or autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    proxies: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    tracer = None if proxies is None else proxies.tracer
    found = _chains.get(mode)
    if found is None or found.tracer is not tracer or key in found.keys:
        found = _chains[mode] = _Chain(tracer)
    return found


class _Node(torch.autograd.Function):
    """`esper::slots` in the graph of the host."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, key: str, grad: bool) -> tuple[Tensor, Tensor]:
        ctx.key, ctx.chain = key, _chain(key)
        if ctx.chain is not None:
            y = h.clone()
            ticket = ctx.chain.call(y, key)
        else:
            y, ticket = _functional(h, key, grad)
            ctx.save_for_backward(ticket)
        ctx.mark_non_differentiable(ticket)
        return y, ticket

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        ticket = ctx.saved_tensors[0] if ctx.chain is None else ctx.chain.last
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


for _name, _kernel, _fake in (
    ("slots_", _operator, _ticket),
    ("slots_next_", _next_operator, _next_ticket),
    ("slots_backward_", _slots_backward, _nothing),
):
    for _place in ("CPU", "CUDA"):
        _define.impl(_name, _kernel, _place)
    torch.library.register_fake(f"esper::{_name}", _fake, lib=_define)
    _define.impl(_name, torch.library.fallthrough_kernel, "Autograd")
_define.impl("slots", _functional, "CompositeExplicitAutograd")
_define.impl("slots", _differentiable, "Autograd")


# -- inductor
# -------------------------------------------------------------------------------------------------------

NOTHING, LOUD, WAITING, run, run_next, run_back = _NOTHING, _loud, _waiting, _run, _run_next, _go_back
"""What compiled programs import: the ticket of layers that are quiet, who is not, and what is called then."""
_NAMES = ("LOUD", "NOTHING", "WAITING", "run", "run_back", "run_next")
_IMPORTS = f"from runtime.seeds.traced import {', '.join(f'{n} as esper_{n.lower()}' for n in _NAMES)}"
_told: list[str] = []


def _forward_call(node: Any, key: str) -> str:
    return f"esper_nothing if {key!r} not in esper_loud else esper_run"


def _next_call(node: Any, key: str) -> str:
    ticket = node.inputs[1].codegen_reference()
    return f"{ticket} if {key!r} not in esper_loud else esper_run_next"


def _backward_call(node: Any, key: str) -> str:
    return "None if not esper_waiting else esper_run_back"


def _key_of(args: Any) -> str:
    return next(a for a in args if isinstance(a, str))


Writing = Callable[[Any, str], str]
_CALLS: dict[str, Writing] = {
    "slots_": _forward_call, "slots_next_": _next_call, "slots_backward_": _backward_call,
}  # fmt: skip


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


def _lowered(lowering: Any, operator: Any, call: Writing) -> Any:
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
                node.__class__, node.python_kernel_name = written, call(node, _key_of(args))
            node.skip_size_stride_alignment_checks = True  # of the ticket, at every call
        return made

    return lower
