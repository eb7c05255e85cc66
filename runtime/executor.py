"""Runs plans: sizes read from shapes, guards as integer comparisons, memory from torch's allocator, one
launch call.

A `Program` is one artifact on one device. `Program.run(plan, tensors)` is the plain entry that serves the
tuner, the gauntlet and tests; `runtime.binding` goes the shorter way through `admit` and `ready`.
Everything bound to sizes is memoised (bounded); nothing that is memoised changes afterwards, so that all
of it is safe from any number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from library.canon import canonical_json
from library.launch import Interface, LaunchManifest, Plan, TensorSpec, evaluate, to_json
from runtime import externs, node, pages
from runtime.bound import BoundDispatch, BoundLayout, Kernels, bind
from runtime.code import Code
from runtime.dispatch import Dispatch, NativeDispatch, Segment, dispatcher, native_available
from runtime.errors import fail
from runtime.layout import ExternCall, Functions, Layout, feed_count, lay_out, other_rank, other_size
from runtime.memo import Memo

READY_LIMIT = 256
NOTHING = 0  # in a slot that nothing reads: the cotangent of a result whose gradient no plan asks for
Dims = tuple[int, ...]
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_cpu: Callable[..., Tensor] = getattr(_guards, "_empty_strided_cpu", torch.empty_strided)
_empty_cuda: Callable[..., Tensor] | None = getattr(_guards, "_empty_strided_cuda", None)
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


class Counters:
    """What happened while a block or a program ran. Plain numbers: a lost update under threads is no harm."""

    __slots__ = ("launches", "eager_fallbacks", "copies", "loads")

    def __init__(self) -> None:
        self.launches = self.eager_fallbacks = self.copies = self.loads = 0

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


class Extern:
    """One library call of a plan, bound to slots."""

    def __init__(self, call: ExternCall, program: Program) -> None:
        self.call, self.program = call, program
        self._run = externs.prepare(call.step.op, call.step.attrs, len(call.inputs))

    def described(self) -> tuple[Any, ...]:
        """For `runtime/_node.cpp`: name, attributes, inputs and outs as (slot, shape, stride, whole)."""
        sides = (
            tuple((slot, view.shape, view.stride, view.whole) for slot, view in side)
            for side in (self.call.inputs, self.call.outs)
        )
        return (self.call.step.op, dict(self.call.step.attrs), *sides)

    def __call__(self, stream: int, slots: list[Any]) -> None:
        call = self.call
        inputs = [view.of(slots[slot]) for slot, view in call.inputs]
        outs = [view.of(slots[slot]) for slot, view in call.outs]
        made = self._run(inputs, outs)
        for value, out, (slot, view) in zip(made or (), outs, call.outs, strict=False):
            own = slot >= call.fresh and view.whole and value.is_contiguous()
            if own and value.dtype is out.dtype and value.shape == out.shape:
                slots[slot] = value
            else:
                out.copy_(value)


class Ready:
    """One plan for one tuple of sizes, launch-ready. `ready(feeds)` appends fresh memory to the list and
    launches."""

    __slots__ = (
        "plan", "dims", "layout", "launches", "parts",
        "_single", "_fresh", "_large", "_empty", "_index", "_code", "_node",
    )  # fmt: skip

    def __init__(
        self, program: Program, plan: Plan, dims: Dims, layout: Layout, words: bytes | None = None
    ) -> None:
        self.plan, self.dims, self.layout = plan, dims, layout
        self.parts: tuple[Dispatch | Extern, ...]
        self._node: Any = False  # of `runtime/_node.cpp`: None till the first call; no gain for kernels alone
        if words is not None and isinstance(layout, BoundLayout):
            self.launches: int = layout.launches
            self.parts = (BoundDispatch(layout, words, program.code.driver, program.index),)
        else:
            self.launches = sum(len(p.launches) if isinstance(p, Segment) else 1 for p in layout.parts)
            self.parts = tuple([program.bind(part) for part in layout.parts])
            self._node = None if any(isinstance(p, Extern) for p in self.parts) else False
        self._single = self.parts[0] if len(self.parts) == 1 else None
        self._fresh = tuple([(f.shape, f.stride, getattr(torch, f.dtype)) for f in layout.fresh])
        self._empty, self._index = program.empty, program.index
        self._large = pages.large(self._fresh, program.index)
        self._code = program.code  # what is bound here must stay mapped

    def __call__(self, slots: list[Any]) -> list[Any]:
        if self._node is None:
            self._node = self._prepared()
        if self._node and node.execute(self._node, slots):
            return slots
        empty = self._empty
        slots.extend([empty(*described) for described in self._fresh])
        if self._large:
            pages.advise(slots, self._large)
        stream = _raw_stream(self._index) if self._index >= 0 else 0
        if self._single is not None:
            self._single(stream, slots)
            return slots
        for part in self.parts:
            part(stream, slots)
        return slots

    def _prepared(self) -> Any:
        run, given = self.described(), self.layout.feeds + len(self.layout.given)
        return (run is not None and node.prepare(*run, given, self._index)) or False

    def _stream(self) -> int:
        return _raw_stream(self._index) if self._index >= 0 else 0

    def described(self) -> tuple[Any, Any] | None:
        """Parts (runs of kernels of the C dispatcher, library calls) and fresh memory (shape, stride, dtype);
        None when a run of kernels is too long for the C dispatcher."""
        parts: list[Any] = []
        for part in self.parts:
            if not isinstance(part, NativeDispatch | Extern):
                return None
            parts.append(part.program if isinstance(part, NativeDispatch) else part.described())
        return tuple(parts), self._fresh

    def check(self, tensors: Sequence[Tensor]) -> None:
        """E0810, E0811, E0821 unless what the caller passes is what the plan's buffers say."""
        for slot, name, shape, dtype in self.layout.expected:
            tensor = tensors[slot]
            if tuple(tensor.shape) != shape:
                raise fail(
                    "E0810",
                    f"buffer {name} has the shape {list(tensor.shape)}, expected {list(shape)}",
                    node=name,
                )
            if tensor.dtype is not getattr(torch, dtype):
                raise fail("E0811", f"buffer {name} has dtype {tensor.dtype}, expected {dtype}", node=name)
            if not tensor.is_contiguous():
                raise fail("E0821", f"buffer {name} is not dense", node=name)

    def variants(self) -> list[dict[str, Any]]:
        """Per launch: its group and how often each kernel was chosen."""
        out: list[dict[str, Any]] = []
        for part in self.parts:
            if not isinstance(part, Dispatch):
                out.append({"group": part.call.step.group, "extern": part.call.step.op})
                continue
            for launch, counts in zip(part.segment.launches, part.counts(), strict=True):
                chosen = {c.kernel: n for c, n in zip(launch.choices, counts, strict=True)}
                out.append({"group": launch.group, "grid": list(launch.grid), "chosen": chosen})
        return out


class Program:
    """One artifact on one device. `code` holds the mapped or loaded kernels; `native` forces a dispatcher."""

    def __init__(
        self,
        artifact_id: str,
        launch: LaunchManifest,
        code: Code,
        *,
        native: bool | None = None,
        strict: bool = False,
        title: str = "",
    ) -> None:
        self.title = title or artifact_id  # for profiles
        self.artifact_id, self.launch, self.code = artifact_id, launch, code
        self.interface: Interface = launch.interface
        self.device: torch.device = code.device
        self.index = -1 if code.device.type == "cpu" else int(code.device.index or 0)
        self.native, self.strict, self.counters = native, strict, Counters()
        self.functions = Functions({k.name: k for k in launch.kernels}, code.address)
        self._kernels = Kernels(self.functions)
        self.saved_count = _saved_count(launch)
        self.dim_names = tuple([d.name for d in self.interface.dims])
        self.dtypes = tuple([getattr(torch, spec.dtype) for spec in self.interface.inputs])
        self._ready: Memo[Any, Ready] = Memo(READY_LIMIT)
        self._known: Memo[Any, Dims] = Memo(READY_LIMIT)
        self.empty = self._allocator()

    def _allocator(self) -> Callable[..., Tensor]:
        if self.index < 0:
            return _empty_cpu
        if _empty_cuda is not None:
            return _empty_cuda  # on torch's current device: callers have made it ours
        device = self.device
        return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def bind(self, part: Segment | ExternCall) -> Dispatch | Extern:
        """A part of a layout as something to call with (stream, slots)."""
        if isinstance(part, Segment):
            return dispatcher(part, self.code.driver, self.index, self.native)
        return Extern(part, self)

    # -- sizes
    # ---------------------------------------------------------------------------------------------------

    def dims_of(self, shapes: Sequence[Sequence[int]]) -> Dims:
        """Value of every dim from the shapes of the interface's inputs, everything checked. E0810, E0813."""
        specs = self.interface.inputs
        if len(shapes) != len(specs):
            raise fail(
                "E0810",
                f"takes {len(specs)} tensors ({', '.join(s.name for s in specs)}), got {len(shapes)}",
                node=self.artifact_id,
            )
        for spec, shape in zip(specs, shapes, strict=True):
            if len(shape) != len(spec.shape):
                raise other_rank(spec, shape)
        dims = {d.name: int(shapes[d.tensor][d.axis]) for d in self.interface.dims}
        self._check_ranges(dims)
        for spec, shape in zip(specs, shapes, strict=True):
            wanted = tuple(evaluate(s, dims) for s in spec.shape)
            if wanted != tuple(shape):
                raise other_size(spec, shape, wanted)
        return tuple(dims.values())

    def _check_ranges(self, dims: Mapping[str, int]) -> None:
        for d in self.interface.dims:
            value = dims[d.name]
            fits = d.min <= value <= d.max and value % d.multiple_of == 0
            if not fits:
                step = f", a multiple of {d.multiple_of}" if d.multiple_of > 1 else ""
                raise fail(
                    "E0813",
                    f"{d.name} = {value} is outside the declared range {d.min}..{d.max}{step}",
                    node=self.interface.inputs[d.tensor].name,
                    hint="compile the blueprint with a wider range, or load with fallback='eager'",
                    details={"dim": d.name, "value": value, "min": d.min, "max": d.max},
                )

    def admit(self, tensors: list[Tensor], counters: Counters | None = None) -> Dims:
        """Sizes of a call. Tensors that must be copied to be dense are replaced in the list (and counted).
        Errors: E0810 shape, E0811 dtype, E0813 range, E0814 device, E0818 kind of tensor, E0821 layout."""
        dims = self._known.hot.get(tuple([t.shape for t in tensors]))
        if dims is None:
            return self._admit_slowly(tensors, counters)
        index = self.index
        for tensor, dtype in zip(tensors, self.dtypes, strict=False):
            plain = tensor.dtype is dtype and tensor.get_device() == index and tensor.is_contiguous()
            if not plain or tensor.is_neg() or (tensor.data_ptr() & 15 if index >= 0 else not tensor.is_cpu):
                return self._admit_slowly(tensors, counters)
        return dims

    def _admit_slowly(self, tensors: list[Tensor], counters: Counters | None) -> Dims:
        shapes = tuple([t.shape for t in tensors])
        dims = self._known.get(shapes)
        if dims is None:
            dims = self.dims_of(shapes)
        for at, (tensor, spec, dtype) in enumerate(
            zip(tensors, self.interface.inputs, self.dtypes, strict=True)
        ):
            tensors[at] = self.dense(tensor, dtype, spec.name, counters)
        self._known.put(shapes, dims)
        return dims

    def dense(
        self, tensor: Tensor, dtype: torch.dtype, name: str, counters: Counters | None = None
    ) -> Tensor:
        """The tensor itself, or one counted copy that is dense and, on a card, begins at a multiple of 16
        bytes: which kernel runs, and with it every bit of the result, never depends on an address.
        Refusals E0811, E0814, E0818, E0821."""
        if tensor.device.type != self.device.type or tensor.get_device() != self.index:
            raise fail(
                "E0814",
                f"{name} is on {tensor.device}, the artifact runs on {self.device}",
                node=name,
                hint=f"{name}.to({str(self.device)!r})",
            )
        if tensor.dtype is not dtype:
            raise fail(
                "E0811",
                f"{name} has dtype {tensor.dtype}, declared {dtype}",
                node=name,
                hint="ambient settings such as autocast do not change a blueprint: cast the input",
            )
        if tensor.layout is not torch.strided:
            raise fail(
                "E0821", f"{name} has the layout {tensor.layout}", node=name, hint="pass a strided tensor"
            )
        plain = tensor.is_contiguous() and not tensor.is_neg()
        if plain and not (self.index >= 0 and tensor.data_ptr() & 15):
            return tensor
        (counters or self.counters).copies += 1
        return (
            tensor.clone(memory_format=torch.contiguous_format)
            if plain
            else tensor.resolve_neg().contiguous()
        )

    # -- plans
    # ---------------------------------------------------------------------------------------------------

    def plan_for(self, phase: str, dims: Dims, wanted: Collection[str] = ()) -> Plan:
        """The plan that serves a call: of those whose bucket holds and whose gradients suffice, the one
        with the fewest gradients, the first among equals. E0815."""
        values = dict(zip(self.dim_names, dims, strict=True))
        asked = frozenset(wanted)
        # Saving for nobody is only slower: the forward plan serves where there is none without.
        for one in (phase, "forward") if phase == "inference" else (phase,):
            fitting = [
                p
                for p in self.launch.plans
                if p.phase == one
                and (not asked or asked.issubset(p.wanted))
                and all(b.low <= values[b.dim] <= b.high for b in p.bucket)
            ]
            if fitting:
                return fitting[0] if len(fitting) == 1 else min(fitting, key=lambda p: len(p.wanted))
        raise fail(
            "E0815",
            f"no {phase} plan for {values}"
            + (f" and the gradients of {', '.join(wanted)}" if wanted else ""),
            node=self.artifact_id,
            hint="compile the blueprint for these sizes and gradients",
        )

    def ready(self, phase: str, dims: Dims, wanted: tuple[str, ...] = ()) -> Ready:
        """Launch-ready plan of a phase for these sizes."""
        key = (phase, dims, wanted)
        found = self._ready.hot.get(key) or self._ready.get(key)
        return found or self._ready.put(key, self.prepare(self.plan_for(phase, dims, wanted), dims))

    def prepare(self, plan: Plan, dims: Dims, given: Collection[int] = (), separate: bool = False) -> Ready:
        """Bind a plan to sizes; `given` and `separate` as in `runtime.layout.lay_out`. Not memoised."""
        values = dict(zip(self.dim_names, dims, strict=True))
        again = partial(lay_out, plan, self.interface, self.saved_count, values, self.functions)
        if not given and not separate and self.uses_native:
            driver = self.code.driver
            found = bind(plan, self.interface, self.saved_count, values, self._kernels, driver, again)
            if found is not None:
                return Ready(self, plan, dims, *found)
        return Ready(self, plan, dims, again(given, separate))

    def run(
        self,
        plan: Plan,
        tensors: Sequence[Tensor | None],
        buffers: Mapping[int, Tensor] | None = None,
        dims: Dims | None = None,
    ) -> list[Tensor]:
        """Run one plan on plain tensors, below autograd.

        Forward and inference take the interface's inputs in order and return the outputs, then (forward)
        the saved tensors. Backward takes the saved tensors, then one cotangent per output (None counts as
        zeros), and returns a gradient per name in `plan.wanted`. `buffers` gives memory of the caller's
        for any buffer that the plan would allocate, by number. `dims` is needed only where the shapes of a
        backward plan do not tell.
        """
        given = tuple(sorted(buffers)) if buffers else ()
        with torch.no_grad(), self.current():
            feeds = self._feeds(plan, tensors, dims)
            values = feeds.pop()
            key = (id(plan), values, given)
            ready = self._ready.get(key)
            if ready is None or ready.plan is not plan:
                ready = self._ready.put(key, self.prepare(plan, values, given))
            if buffers:
                feeds.extend(buffers[number] for number in given)
            ready.check(feeds)
            slots = ready(feeds)
        self.counters.launches += ready.launches
        layout = ready.layout
        return [slots[i] for i in (*layout.outputs, *layout.saved, *layout.gradients)]

    def _feeds(self, plan: Plan, tensors: Sequence[Tensor | None], dims: Dims | None) -> list[Any]:
        """The dense feeds, and the sizes as the last item."""
        count = feed_count(plan, self.interface, self.saved_count)
        if len(tensors) != count:
            raise fail(
                "E0810",
                f"a {plan.phase} plan takes {count} tensors, got {len(tensors)}",
                node=self.artifact_id,
            )
        if plan.phase != "backward":
            feeds: list[Any] = list(tensors)
            sizes = self.admit(feeds)  # also where they are known: it copies what no kernel may be given
            return [*feeds, sizes if dims is None else dims]
        values = dims if dims is not None else self.backward_dims(plan, tensors)
        saved = [t for t in tensors[: self.saved_count] if t is not None]
        read = {self.saved_count + b.index for b in plan.buffers if b.source == "cotangent"}
        return [*self.backward_feeds(values, saved, tensors[self.saved_count :], read), values]

    def backward_feeds(
        self,
        dims: Dims,
        saved: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        read: Collection[int],
        counters: Counters | None = None,
    ) -> list[Any]:
        """What a backward plan reads (`read`: the slots), dense: zeros stand for a cotangent that is None."""
        feeds: list[Any] = [*saved, *cotangents]
        for at, tensor in enumerate(feeds):
            if tensor is not None:
                feeds[at] = self.dense(tensor, tensor.dtype, "a cotangent", counters)
            elif at in read:
                feeds[at] = self.zeros(self.interface.outputs[at - self.saved_count], dims)
            else:
                feeds[at] = NOTHING
        return feeds

    def zeros(self, spec: TensorSpec, dims: Dims) -> Tensor:
        """A cotangent that nobody gave."""
        values = dict(zip(self.dim_names, dims, strict=True))
        shape = [evaluate(s, values) for s in spec.shape]
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=self.device)

    def backward_dims(self, plan: Plan, tensors: Sequence[Tensor | None]) -> Dims:
        """Sizes from saved tensors and cotangents: every dim must stand alone on some axis of one of them."""
        found: dict[str, int] = {}
        for buffer in plan.buffers:
            at = buffer.index + (self.saved_count if buffer.source == "cotangent" else 0)
            tensor = tensors[at] if buffer.source in ("saved", "cotangent") else None
            for axis, size in enumerate(buffer.shape if tensor is not None else ()):
                if isinstance(size, str) and tensor is not None:
                    found[size] = int(tensor.shape[axis])
        missing = [name for name in self.dim_names if name not in found]
        if missing:
            raise fail(
                "E0810",
                f"the shapes of a backward call do not tell {', '.join(missing)}",
                node=self.artifact_id,
            )
        return tuple(found[name] for name in self.dim_names)

    @property
    def uses_native(self) -> bool:
        return native_available() if self.native is None else self.native

    def variants(self) -> list[dict[str, Any]]:
        """What was launched so far, by plan and sizes."""
        rows = [
            {"phase": ready.plan.phase, "dims": dict(zip(self.dim_names, ready.dims, strict=True)), **row}
            for ready in self._ready.values()
            for row in ready.variants()
        ]
        return rows

    def current(self) -> Any:
        """Context in which torch's current device is this program's."""
        return _Nothing() if self.index < 0 else torch.cuda.device(self.index)

    def prime(self) -> None:
        """Make every kernel launchable and bind every plan to the tuned sizes of its bucket."""
        self.code.prime()
        for plan in self.launch.plans:
            for dims in self._tuned(plan):
                self.ready(plan.phase, dims, tuple(sorted(plan.wanted)))

    def _tuned(self, plan: Plan) -> list[Dims]:
        sources = self.interface.dims
        longest = max((len(d.tune) for d in sources), default=0)
        low = {b.dim: b.low for b in plan.bucket}
        high = {b.dim: b.high for b in plan.bucket}
        out = []
        for at in range(longest):
            dims = tuple(d.tune[min(at, len(d.tune) - 1)] if d.tune else d.min for d in sources)
            if all(
                low.get(d.name, v) <= v <= high.get(d.name, v) for d, v in zip(sources, dims, strict=True)
            ):
                out.append(dims)
        return out

    def plan_digest(self) -> str:
        """Digest of everything that decides which kernels run: equal on two ranks exactly when they run
        the same."""
        text = canonical_json(
            {"id": self.artifact_id, "launch": to_json(self.launch), "versions": self.code.versions}
        )
        return hashlib.sha256(text).hexdigest()


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *details: object) -> None: ...


def _saved_count(launch: LaunchManifest) -> int:
    counts = {len(p.saved) for p in launch.plans if p.phase == "forward"}
    if len(counts) > 1:
        raise fail("E0809", f"forward plans hand over different numbers of tensors: {sorted(counts)}")
    return counts.pop() if counts else 0
