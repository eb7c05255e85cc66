"""A block in eager mode: one shared autograd.Function over launch-ready plans.

Differentiable once. What torch.autograd.Function does per call beyond its C part is left out: `apply` is
the C method, torch.func transforms were refused before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler as _profiler

from esper_ir.diagnostics import EsperError
from runtime import node
from runtime.dispatch import native_lookup
from runtime.errors import fail
from runtime.executor import NOTHING, READY_LIMIT, Counters, Dims, Program, Ready
from runtime.memo import Memo
from runtime.watch import Watched

Mask = tuple[bool, ...]
Saved = tuple[tuple[int, str, torch.Size, torch.dtype], ...]
_is_compiling = torch.compiler.is_compiling
PLAIN: tuple[type, ...] = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Classes whose tensors are what they seem; others dispatch, and take the operators."""


def records() -> bool:
    """Whether torch records a graph. Inference mode never does, also under `torch.enable_grad` inside it; a
    trace asks for the gradient mode alone, since it cannot ask for the other."""
    return torch.is_grad_enabled() and (_is_compiling() or not torch.is_inference_mode_enabled())


class Gradients:
    """Backward of one block: which plan answers which call, and the way of doing it that takes everything."""

    __slots__ = ("program", "counters", "ready", "recover", "_memo", "_debug")

    def __init__(
        self, program: Program, counters: Counters, ready: Callable[..., Ready], debug: bool
    ) -> None:
        self.program, self.counters, self.ready, self._debug = program, counters, ready, debug
        self._memo: Memo[Any, tuple[Ready, tuple[int, ...], Saved]] = Memo(READY_LIMIT)
        self.recover: Callable[..., Sequence[Tensor | None]] | None = None  # after a launch failed

    @property
    def title(self) -> str:
        """What profiles call it."""
        return f"esper::{self.program.title}.backward"

    def wanted(self, mask: Mask) -> tuple[str, ...]:
        """Names of the gradients asked for: `mask` per input of the interface."""
        interface = self.program.interface
        pairs = zip(interface.inputs, mask, strict=True)
        return tuple(s.name for s, asked in pairs if asked and s.name in interface.differentiable)

    def plan(self, mask: Mask, dims: Dims) -> tuple[Ready, tuple[int, ...], Saved] | None:
        """The plan that gives these gradients, per input of the interface the slot of its gradient (-1:
        None), and what it reads of the saved tensors; None when no differentiable input asks."""
        found = self._memo.get((mask, dims))
        if found is not None:
            return found
        wanted = self.wanted(mask)
        if not wanted:
            return None
        ready = self.ready("backward", dims, wanted)
        slot = dict(zip(ready.plan.wanted, ready.layout.gradients, strict=True))
        names = [s.name for s in self.program.interface.inputs]
        returns = tuple(slot.get(n, -1) if m else -1 for n, m in zip(names, mask, strict=True))
        reads = ready.layout.expected
        saved = tuple(
            (at, name, torch.Size(shape), getattr(torch, dtype))
            for at, name, shape, dtype in reads
            if at < self.program.saved_count
        )
        found = (ready, returns, saved)
        return found if self._debug else self._memo.put((mask, dims), found)

    def describe(self, mask: Mask, dims: Dims) -> tuple[Any, ...] | None:
        """The same for `runtime/_node.cpp`: parts, fresh memory and returns; None when a call must come
        here."""
        found = self.plan(mask, dims)
        run = found[0].described() if found is not None else None
        return None if found is None or run is None else (*run, found[1])

    def not_traced(self) -> None:
        """E0817: what `runtime/_node.cpp` answers to compiled autograd."""
        artifact_id = self.program.artifact_id
        raise fail(
            "E0817",
            f"{artifact_id} was called in eager mode, and compiled autograd would trace its backward",
            node=artifact_id,
            hint="compile the whole step with torch.compile, or set ESPER_NODE=0",
        )

    def __call__(
        self, dims: Dims, mask: Mask, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """A gradient per input of the interface, None where not asked for or not differentiable."""
        if torch.is_grad_enabled():
            return self._refusing(dims, mask, saved, cotangents)
        try:
            return self._run(dims, mask, saved, cotangents)
        except EsperError as error:
            if self.recover is None:
                raise
            return self.recover(error, mask, saved, cotangents)

    def _run(
        self, dims: Dims, mask: Mask, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        try:
            return self._launch(dims, mask, saved, cotangents)
        except (EsperError, RuntimeError):
            if all(t is None or torch._C._has_storage(t) for t in (*saved, *cotangents)):
                raise
            raise no_transform(self.program.artifact_id) from None  # vmap stands behind them

    def _launch(
        self, dims: Dims, mask: Mask, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        found = self.plan(mask, dims)
        if found is None or all(c is None for c in cotangents):
            return [None] * len(mask)
        ready, returns, reads = found
        slots: list[Any] = [*saved, *cotangents]
        index = self.program.index
        for at, name, shape, dtype in reads:
            tensor = slots[at]
            if tensor.shape != shape or tensor.dtype is not dtype or tensor.get_device() != index:
                raise not_as_saved(self.program.artifact_id, name, tensor, shape, dtype)
        low = 15 if index >= 0 else 0
        for at, tensor in enumerate(slots):
            if tensor is None and at not in ready.layout.read:
                slots[at] = NOTHING
            elif tensor is None or not tensor.is_contiguous() or tensor.is_neg() or tensor.data_ptr() & low:
                slots = self.program.backward_feeds(dims, saved, cotangents, ready.layout.read, self.counters)
                break
        ready(slots)
        self.counters.launches += ready.launches
        return [slots[i] if i >= 0 else None for i in returns]

    def _refusing(
        self, dims: Dims, mask: Mask, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Under create_graph: the gradients, tied to a refusal that is raised only if they are
        differentiated again."""
        with torch.no_grad():
            found = self._run(dims, mask, saved, cotangents)
        made = [g for g in found if g is not None]
        sources = [t for t in (*saved, *cotangents) if t is not None and t.requires_grad]
        if not made or not sources:
            return list(found)
        tied = iter(_Once.apply(self.program.artifact_id, len(made), *made, *sources))
        return [None if g is None else next(tied) for g in found]


class State:
    """What one block gives to its calls: the program, its own counters, and which plan answers which call.
    `node`: the same for `runtime/_node.cpp`, where that is built."""

    __slots__ = ("program", "counters", "ready", "memo", "types", "gradients", "node", "_debug", "_trains")

    def __init__(self, program: Program, counters: Counters, debug: bool = False) -> None:
        self.program, self.counters, self._debug = program, counters, debug
        # Without: results are places or truth values, which have no gradient whatever inputs ask for.
        self._trains = any(p.phase == "forward" for p in program.launch.plans)
        self.ready = _watching(program) if debug else program.ready
        self.types = (program.dtypes, PLAIN, program.index)
        self.memo: Memo[Any, list[Any]] = Memo(READY_LIMIT)
        self.gradients = Gradients(program, counters, self.ready, debug)
        self.node = None if debug else node.block(program.dtypes, PLAIN, program.index, self.gradients)

    def choose(self, tensors: list[Tensor], grad: bool) -> tuple[Ready, bool]:
        """The plan for a call that `lookup` did not know, everything checked; and whether it needs a
        graph. Tensors that are not dense are replaced in the list."""
        wanted = grad and any(t.requires_grad for t in tensors)
        asked = wanted and self._trains
        key = tuple([t.shape for t in tensors])
        dims = self.program.admit(tensors, self.counters)
        found = (self.ready("forward" if asked else "inference", dims), asked)
        if self._debug:
            return found
        pair = self.memo.get(key)
        if pair is None:
            pair = self.memo.put(key, [None, None])
        pair[wanted] = found
        self._teach(key, *found)
        return found

    def _teach(self, key: tuple[torch.Size, ...], ready: Ready, asked: bool) -> None:
        run = ready.described() if self.node is not None else None
        if run is not None:
            layout = ready.layout
            saved = layout.saved if asked else ()
            node.learn(self.node, key, asked, ready.dims, *run, layout.outputs, saved)

    def launched(self) -> int:
        """Kernels that `runtime/_node.cpp` launched for this block."""
        return 0 if self.node is None else node.launches(self.node)

    def copied(self) -> int:
        """Copies it made of cotangents that were not dense."""
        return 0 if self.node is None else node.copies(self.node)

    def tally(self, counters: Counters) -> None:
        """Before this state is left: what was counted there."""
        counters.launches += self.launched()
        counters.copies += self.copied()


def python_lookup(
    hot: dict[Any, list[Any]],
    tensors: list[Tensor],
    types: tuple[tuple[torch.dtype, ...], tuple[type, ...], int],
    grad: bool,
) -> tuple[Ready, bool] | None:
    """What `State.choose` found for such a call before; None when it must look. Also in
    `runtime/_native.c`."""
    dtypes, plain, index = types
    asked = 0
    for tensor, dtype in zip(tensors, dtypes, strict=False):
        if tensor.__class__ not in plain or tensor.dtype is not dtype:
            return None
        # A tensor of one element is contiguous under any stride, so it may be a lazily negated view.
        if tensor.get_device() != index or not tensor.is_contiguous() or tensor.is_neg():
            return None
        if (
            tensor.data_ptr() & 15 if index >= 0 else not tensor.is_cpu
        ):  # of a meta tensor the index is -1 too
            return None
        asked = asked or (grad and tensor.requires_grad)
    pair = hot.get(tuple([t.shape for t in tensors]))
    return None if pair is None else pair[1 if asked else 0]


lookup: Callable[..., tuple[Ready, bool] | None] = native_lookup() or python_lookup


def _watching(program: Program) -> Callable[..., Ready]:
    """Like `program.ready`, but every kernel is looked at; prepared anew for each call."""

    def ready(phase: str, dims: Dims, wanted: tuple[str, ...] = ()) -> Ready:
        plan = program.plan_for(phase, dims, wanted)
        return Watched(program, program.prepare(plan, dims, separate=True))

    return ready


class Call(torch.autograd.Function):
    """`call(state, *tensors)`: forward plan now, the smallest backward plan that suffices later."""

    @staticmethod
    def forward(ctx: Any, state: State, ready: Ready, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        slots: list[Any] = list(tensors)
        ready(slots)
        state.counters.launches += ready.launches
        layout = ready.layout
        ctx.save_for_backward(*[slots[i] for i in layout.saved])
        ctx.call = (state, ready.dims)
        outputs = layout.outputs
        return slots[outputs[0]] if len(outputs) == 1 else tuple([slots[i] for i in outputs])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        state, dims = ctx.call
        mask = ctx.needs_input_grad[2:]
        if _profiler._is_profiler_enabled:
            with torch.profiler.record_function(state.gradients.title):
                return (None, None, *state.gradients(dims, mask, ctx.saved_tensors, cotangents))
        return (None, None, *state.gradients(dims, mask, ctx.saved_tensors, cotangents))


call = super(torch.autograd.Function, Call).apply  # type: ignore[misc]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, artifact_id: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.artifact_id = artifact_id
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise double_backward(ctx.artifact_id)


def double_backward(artifact_id: str) -> Exception:
    """E0816."""
    return fail(
        "E0816",
        f"{artifact_id} is differentiable once; a gradient of its gradient was asked for",
        node=artifact_id,
        hint="use the eager twin for second derivatives: runtime.twin(id)",
    )


def no_tensor(name: str, value: object) -> EsperError:
    """E0818 for a value that is no tensor: an array, a list, a number."""
    return fail(
        "E0818",
        f"{type(value).__name__} where {name} takes a tensor",
        node=name,
        hint="torch.as_tensor(value) shares the memory of a numpy array; its dtype must be the declared one",
    )


def no_transform(artifact_id: str) -> EsperError:
    """E0817."""
    return fail(
        "E0817",
        f"{artifact_id} inside a torch.func transform, vmap (is_grads_batched), or forward-mode autograd",
        node=artifact_id,
        hint="use the eager twin there: runtime.twin(id)",
    )


def not_as_saved(
    artifact_id: str, name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype
) -> EsperError:
    """E0811, E0810, E0814: a hook on saved tensors gave back something else."""
    code = "E0811" if tensor.dtype is not dtype else "E0810" if tensor.shape != shape else "E0814"
    return fail(
        code,
        f"saved tensor {name} came back as {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
        f"was {dtype} {list(shape)}",
        node=artifact_id,
        hint="the unpack hook of saved_tensors_hooks must give back what was packed",
    )
