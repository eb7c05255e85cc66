"""The launch manifest: everything needed to choose, check and launch the kernels of one artifact, as
strict data.

It is what forge writes, what runtime executes and what gauntlet reads; it lives in the container's
"launch" key.

Sizes are a closed grammar, never evaluated as code: an int, the name of a dim, or [operator, a, b] with
operator one of `SIZE_OPS`. Buffers are numbered within a plan; a step names them by number.

    Interface   tensors in and out (name, kind, dtype, shape), where each dim is read from, what is
    differentiable Plan        one phase (forward, inference, backward) for one bucket of sizes: buffers,
    steps Buffer      where its memory comes from (input, saved, cotangent, output, gradient, temp), dtype,
    shape KernelStep  variants (first whose guard holds is launched), arguments, grid
    ExternStep  a library call from a closed table (runtime/externs.py) on views of buffers
    Kernel      entry point in a blob, its parameter table, threads and shared memory
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from esper_ir.diagnostics import EsperError
from library.sizes import SIZE_OPS as SIZE_OPS
from library.sizes import Size, check_size
from library.sizes import bad as _bad
from library.sizes import evaluate as evaluate

OPTIONAL = ("updates", "random")


@dataclass(frozen=True)
class TensorSpec:
    """`kind`: input, param, buffer, constant (interface inputs) or output."""

    name: str
    kind: str
    dtype: str
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class DimSource:
    """A dim, its inclusive range, known divisor, tuned sizes, and the tensor axis it is read from."""

    name: str
    min: int
    max: int
    multiple_of: int
    tune: tuple[int, ...]
    tensor: int
    axis: int


@dataclass(frozen=True)
class Interface:
    """`inputs` are all leaves in blueprint order (inputs, params, buffers, constants); `differentiable`
    names a subset. `updates`: (buffer, number of the output that is its next value), the last outputs;
    `random`: inputs that are drawn for every call. Both are left out of the JSON where they are empty."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: tuple[DimSource, ...]
    differentiable: tuple[str, ...]
    updates: tuple[tuple[str, int], ...] = ()
    random: tuple[str, ...] = ()


@dataclass(frozen=True)
class Buffer:
    """`source`: "input" (`index` into interface.inputs), "saved" (`index` into the forward plan's
    `saved`), "cotangent" (`index` into interface.outputs), "output" (a result, fresh memory), "gradient"
    (fresh memory), "temp" (workspace, contents undefined on entry), "zeroed" (workspace that must be zero
    on entry). All are dense row-major of `shape`.
    """

    name: str
    source: str
    index: int
    dtype: str
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Argument:
    """`kind`: "buffer" (value = buffer number), "size" (value = Size)."""

    kind: str
    value: Size


@dataclass(frozen=True)
class Guard:
    """All must hold. `aligned`: buffers whose address is a multiple of 16 bytes; `divisible`: (size,
    divisor); `at_most`: (size, bound).
    """

    aligned: tuple[int, ...] = ()
    divisible: tuple[tuple[Size, int], ...] = ()
    at_most: tuple[tuple[Size, int], ...] = ()


@dataclass(frozen=True)
class Variant:
    guard: Guard
    kernel: str


@dataclass(frozen=True)
class KernelStep:
    """One launch. The last variant has an empty guard, unless no kernel serves the general case (then
    E0812)."""

    group: str
    variants: tuple[Variant, ...]
    args: tuple[Argument, ...]
    grid: tuple[Size, Size, Size]


@dataclass(frozen=True)
class View:
    """The first elements of a buffer, in most views all of them, as a tensor of `shape` whose axes are then
    permuted by `permute` (empty: as it is)."""

    buffer: int
    shape: tuple[Size, ...] = ()
    permute: tuple[int, ...] = ()


@dataclass(frozen=True)
class ExternStep:
    """`op` from the closed table of runtime/externs.py; `attrs` are JSON scalars. Writes into `outs`,
    nothing else."""

    group: str
    op: str
    inputs: tuple[View, ...]
    outs: tuple[View, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True)
class Bound:
    """Inclusive range of one dim."""

    dim: str
    low: int
    high: int


@dataclass(frozen=True)
class Plan:
    """`phase`: "forward" (saves), "inference", "backward". The first plan of a phase whose `bucket` holds
    and whose `wanted` (backward: names of interface.differentiable) contains every gradient asked for is run.

    `outputs`: buffer per interface output (forward, inference); `saved`: buffers handed to the backward
    (forward); `gradients`: buffer per name in `wanted` (backward), two names may share one buffer.
    """

    phase: str
    bucket: tuple[Bound, ...]
    wanted: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[KernelStep | ExternStep, ...]
    outputs: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()


@dataclass(frozen=True)
class Param:
    """`kind`: ptr, i32, i64. Offset and size in bytes in the kernel's parameter block."""

    kind: str
    offset: int
    size: int


@dataclass(frozen=True)
class Kernel:
    """CUDA: `entry` in the cubin `blob`, launched with 32*warps threads and `shared` bytes; `params` are
    the declared parameters followed by `scratch` null pointers. CPU: `void entry(void *const *args,
    int64_t gx, int64_t gy, int64_t gz)` in the shared object, `args[i]` pointing at parameter i as in
    cuLaunchKernel.
    """

    name: str
    blob: str
    entry: str
    params: tuple[Param, ...]
    warps: int = 0
    shared: int = 0
    scratch: int = 0
    registers: int = 0
    spills: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its parameters."""
        return tuple([param.kind for param in self.params])


@dataclass(frozen=True)
class LaunchManifest:
    interface: Interface
    plans: tuple[Plan, ...]
    kernels: tuple[Kernel, ...]


def to_json(value: Any) -> Any:
    """Plain JSON data of any of these records."""
    if is_dataclass(value) and not isinstance(value, type):
        out = {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
        for name in OPTIONAL if isinstance(value, Interface) else ():
            _ = out[name] or out.pop(name)
        if isinstance(value, KernelStep):
            return {"step": "kernel", **out}
        return {"step": "extern", **out} if isinstance(value, ExternStep) else out
    if isinstance(value, (tuple, list)):
        return [to_json(v) for v in value]
    if isinstance(value, Mapping):
        return {k: to_json(v) for k, v in value.items()}
    return value


def from_json(data: Any, *, lazy: bool = False) -> LaunchManifest:
    """Decode strictly: unknown or missing keys, wrong types, unknown dims, buffers or kernels are refused
    (E0720).

    `lazy` leaves buffers and steps of each plan until they are first asked for, and checks them then: for
    bytes whose strict reading a trusted signature vouches for, so that loading pays only for the plans
    that run.
    """
    if not isinstance(data, dict) or not isinstance(data.get("interface"), dict):
        raise _bad("launch", "not an object with an interface")
    raw = data["interface"].get("dims")
    named = raw if isinstance(raw, list) else []
    dims = frozenset(d["name"] for d in named if isinstance(d, dict) and isinstance(d.get("name"), str))
    try:
        return _decode_lazily(data, dims) if lazy else _checked(_record(LaunchManifest)(data, dims))
    except _Wrong as wrong:
        raise _bad("launch" + "".join(reversed(wrong.path)), wrong.what) from None


def _check_calls(interface: Interface) -> None:
    """What a call updates and draws must be there, and of the right kind."""
    leaves = {spec.name: spec for spec in interface.inputs}
    first = len(interface.outputs) - len(interface.updates)
    for name, at in interface.updates:
        leaf = leaves.get(name)
        out = interface.outputs[at] if 0 < first <= at < len(interface.outputs) else None
        if leaf is None or out is None or leaf.kind != "buffer":
            raise _bad("launch.interface.updates", f"{name!r} and output {at}")
        if (leaf.dtype, leaf.shape) != (out.dtype, out.shape):
            raise _bad("launch.interface.updates", f"{name!r} is of another type than output {at}")
    for name in interface.random:
        leaf = leaves.get(name)
        fits = leaf is not None and (leaf.kind, leaf.dtype) == ("input", "int64")
        if leaf is None or not fits or not all(isinstance(s, int) for s in leaf.shape):
            raise _bad("launch.interface.random", f"{name!r}")


def _checked(manifest: LaunchManifest) -> LaunchManifest:
    _check_calls(manifest.interface)
    names = {k.name for k in manifest.kernels}
    for at, plan in enumerate(manifest.plans):
        _check_plan(plan, names, f"launch.plans[{at}]")
    return manifest


def _decode_lazily(data: dict[str, Any], dims: frozenset[str]) -> LaunchManifest:
    plans, kernels = data.get("plans"), data.get("kernels")
    if len(data) != 3 or not isinstance(plans, list) or not isinstance(kernels, list):
        raise _Wrong(f"LaunchManifest with the keys {sorted(data)}")
    made = tuple(_lazy(LazyKernel, raw, dims, f"launch.kernels[{i}]", None) for i, raw in enumerate(kernels))
    names = {k.name for k in made}

    def check(plan: Plan, where: str) -> None:
        _check_plan(plan, names, where)

    heads = tuple(_lazy(LazyPlan, raw, dims, f"launch.plans[{i}]", check) for i, raw in enumerate(plans))
    interface = _record(Interface)(data["interface"], dims)
    _check_calls(interface)
    return LaunchManifest(interface, heads, made)


class LazyPlan(Plan):
    """A plan whose buffers and steps are decoded, and all of it checked, when they are first read."""

    def __getattr__(self, name: str) -> Any:
        return _rest(self, Plan, name)


class LazyKernel(Kernel):
    """A kernel of which only what loading needs is decoded before it is launched."""

    def __getattr__(self, name: str) -> Any:
        return _rest(self, Kernel, name)


_EARLY = {
    LazyPlan: (Plan, ("phase", "bucket", "wanted", "outputs", "saved", "gradients")),
    LazyKernel: (Kernel, ("name", "blob", "entry", "shared")),
}


@cache
def _early(kind: Any) -> tuple[frozenset[str], list[tuple[str, _Decode]]]:
    record, names = _EARLY[kind]
    hints = get_type_hints(record)
    return frozenset(hints), [(name, _decoder(hints[name])) for name in names]


def _lazy(kind: Any, raw: Any, dims: frozenset[str], where: str, check: Any) -> Any:
    """The record with its early fields."""
    keys, parts = _early(kind)
    if raw.__class__ is not dict or raw.keys() != keys:
        raise _bad(where, f"not the fields of a {_EARLY[kind][0].__name__}")
    out, name = object.__new__(kind), ""
    values = out.__dict__
    try:
        for name, part in parts:
            values[name] = part(raw[name], dims)
    except _Wrong as wrong:
        raise _bad(f"{where}.{name}" + "".join(reversed(wrong.path)), wrong.what) from None
    values["_raw"] = (raw, dims, where, check)
    return out


def _rest(record: Any, kind: Any, name: str) -> Any:
    """Decode the whole record strictly and keep all its fields; the one asked for."""
    raw, dims, where, check = record.__dict__.get("_raw", (None,) * 4)
    if raw is None or name not in raw:
        raise AttributeError(name)
    try:
        whole = _record(kind)(raw, dims)
    except _Wrong as wrong:
        raise _bad(where + "".join(reversed(wrong.path)), wrong.what) from None
    if check is not None:
        check(whole, where)
    record.__dict__.update(whole.__dict__)
    return record.__dict__[name]


_Decode = Callable[[Any, frozenset[str]], Any]


class _Wrong(Exception):
    """What does not fit; `path` is put together on the way out, innermost first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.path: list[str] = []


@cache
def _decoder(kind: Any) -> _Decode:
    """The function that decodes one type, made once per type."""
    if kind == Size:
        return _decode_size
    origin = get_origin(kind)
    if origin is tuple:
        return _tuple(get_args(kind))
    if origin in (Union, UnionType):
        return _decode_step
    if origin is not None or kind is Mapping:
        return _decode_attributes
    return _record(kind) if is_dataclass(kind) else _scalar(kind)


def _decode_size(data: Any, dims: frozenset[str]) -> Size:
    if data.__class__ is int or (data.__class__ is str and data in dims):
        return data
    try:
        return check_size(data, dims, "")
    except EsperError as error:
        raise _Wrong(error.message.removeprefix("launch manifest: ")) from None


def _decode_attributes(data: Any, dims: frozenset[str]) -> dict[str, Any]:
    if not isinstance(data, dict) or not all(isinstance(v, (int, float, str, bool)) for v in data.values()):
        raise _Wrong("attributes must be JSON scalars")
    return dict(data)


def _scalar(kind: Any) -> _Decode:
    def decode(data: Any, dims: frozenset[str]) -> Any:
        if data.__class__ is not kind:
            raise _Wrong(f"expected {kind.__name__}, found {data!r}")
        return data

    return decode


def _tuple(args: tuple[Any, ...]) -> _Decode:
    several = len(args) == 2 and args[1] is Ellipsis
    single = _decoder(args[0])
    each = [single] if several else [_decoder(kind) for kind in args]

    def decode(data: Any, dims: frozenset[str]) -> tuple[Any, ...]:
        if not isinstance(data, (list, tuple)):
            raise _Wrong(f"expected a list, found {data!r}")
        if not several and len(data) != len(each):
            raise _Wrong(f"expected {len(each)} items, found {len(data)}")
        out: list[Any] = []
        try:
            for item in data:
                out.append((single if several else each[len(out)])(item, dims))
        except _Wrong as wrong:
            wrong.path.append(f"[{len(out)}]")
            raise
        return tuple(out)

    return decode


def _decode_step(data: Any, dims: frozenset[str]) -> Any:
    kinds = {"kernel": KernelStep, "extern": ExternStep}
    kind = kinds.get(data["step"]) if isinstance(data, dict) and isinstance(data.get("step"), str) else None
    if kind is None:
        raise _Wrong("a step must be a kernel or an extern")
    return _record(kind)({k: v for k, v in data.items() if k != "step"}, dims)


@cache
def _record(kind: Any) -> _Decode:
    hints = get_type_hints(kind)
    keys = hints.keys()
    plain = [(name, hint) for name, hint in hints.items() if hint in (str, int, float, bool)]
    parts = [(name, _decoder(hint)) for name, hint in hints.items() if hint not in (str, int, float, bool)]
    optional = frozenset(OPTIONAL) if kind is Interface else frozenset()

    def decode(data: Any, dims: frozenset[str]) -> Any:
        if optional and data.__class__ is dict:
            empty = [name for name in optional & data.keys() if not data[name]]
            data = {**dict.fromkeys(optional, ()), **data} if not empty else {}
        if data.__class__ is not dict or data.keys() != keys:
            wrong = sorted(set(data) ^ keys) if isinstance(data, dict) else data
            raise _Wrong(f"{kind.__name__} with wrong keys: {wrong}")
        # What a frozen dataclass's __init__ does, for all fields at once.
        out = object.__new__(kind)
        values, name = out.__dict__, ""
        values.update(data)
        try:
            for name, wanted in plain:
                if data[name].__class__ is not wanted:
                    raise _Wrong(f"expected {wanted.__name__}, found {data[name]!r}")
            for name, part in parts:
                values[name] = part(data[name], dims)
        except _Wrong as wrong:
            wrong.path.append(f".{name}")
            raise
        return out

    return decode


_SOURCES = ("input", "saved", "cotangent", "output", "gradient", "temp", "zeroed")


def _check_plan(plan: Plan, kernels: set[str], where: str) -> None:
    count = len(plan.buffers)
    numbers = [*plan.outputs, *plan.saved, *plan.gradients]
    if plan.phase not in ("forward", "inference", "backward"):
        raise _bad(where, f"unknown phase {plan.phase!r}")
    if any(b.source not in _SOURCES for b in plan.buffers):
        raise _bad(where, "unknown buffer source")
    for step in plan.steps:
        numbers += _check_step(step, kernels, where)
    if any(not 0 <= n < count for n in numbers):
        raise _bad(where, "a buffer number out of range")


def _check_step(step: KernelStep | ExternStep, kernels: set[str], where: str) -> list[int]:
    if isinstance(step, ExternStep):
        return [v.buffer for v in (*step.inputs, *step.outs)]
    if not step.variants or any(v.kernel not in kernels for v in step.variants):
        raise _bad(where, f"step {step.group}: unknown kernel")
    if any(a.kind not in ("buffer", "size") for a in step.args):
        raise _bad(where, f"step {step.group}: unknown argument kind")
    used = [a.value for a in step.args if a.kind == "buffer"] + [
        i for v in step.variants for i in v.guard.aligned
    ]
    return [n if isinstance(n, int) else -1 for n in used]
