"""The launch manifest once more, as a load wants it: rows instead of objects, and a line for each plan, read
when the plan is bound.

It is made when the container is, and says nothing of its own: a strict reading of the container (on storing,
proving and importing it) makes it anew from the manifest and compares every byte. So whoever holds the bytes
under a validator's signature may believe it, and needs the manifest only for what no launch asks.

    head     {"artifact_id", "blobs": [[name, offset, size] ...], "externs", "interface", "kernels", "plans",
             "target", "title"}; kernels without their parameters, plans without their buffers and steps
    params   [[kinds, offsets, sizes of the parameters of a kernel] ...]
    plan ... [buffers, steps], one line a plan, in their order

A record is the list of its fields in the order of its class; a step has its kind before them. Of kernels and
plans the order is that of `_KERNEL`, `_HEAD` and `_LATE`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from esper_ir.diagnostics import EsperError
from library.canon import canonical_json
from library.errors import fail
from library.launch import (
    Argument,
    Bound,
    Buffer,
    DimSource,
    ExternStep,
    Guard,
    Interface,
    Kernel,
    KernelStep,
    LaunchManifest,
    Param,
    Plan,
    TensorSpec,
    Variant,
    View,
    from_json,
    to_json,
)
from library.sizes import Size

# How rows are written: another one needs another first word of the container (which names it), and other ids.
VERSION = 1
EXTERN, KERNEL = "x", "k"
_KERNEL = ("name", "blob", "entry", "warps", "shared", "scratch", "registers", "spills")
_PARAM = ("kind", "offset", "size")
_HEAD = ("phase", "outputs", "saved", "gradients", "bucket", "wanted")
_LATE = ("buffers", "steps")
_LATER = ("bucket", "wanted", *_LATE)
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def seal(manifest: Mapping[str, Any]) -> bytes:
    """The sealed form of a complete manifest; nothing where its launch manifest is malformed."""
    try:
        launch = from_json(manifest["launch"])
    except EsperError:
        return b""
    head = {
        "artifact_id": manifest["artifact_id"],
        "blobs": [[row["name"], row["offset"], row["size"]] for row in manifest["blobs"]],
        "externs": manifest["externs"],
        "interface": _row(launch.interface),
        "kernels": [[getattr(kernel, name) for name in _KERNEL] for kernel in launch.kernels],
        "plans": [[_row(getattr(plan, name)) for name in _HEAD] for plan in launch.plans],
        "target": manifest["target"],
        "title": manifest["blueprint"]["name"],
    }
    plans = [[_row(getattr(plan, name)) for name in _LATE] for plan in launch.plans]
    params = [[[getattr(p, f) for p in kernel.params] for f in _PARAM] for kernel in launch.kernels]
    text = b"\n".join(canonical_json(line) for line in (head, params, *plans))
    said = to_json(Sealed(text).launch())
    return text if said == to_json(launch) else b""  # a record that rows do not hold is not sealed


def _row(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        row = [_row(getattr(value, f.name)) for f in fields(value)]
        if isinstance(value, KernelStep | ExternStep):
            return [EXTERN if isinstance(value, ExternStep) else KERNEL, *row]
        return row
    return [_row(item) for item in value] if isinstance(value, (tuple, list)) else value


class Sealed:
    """A sealed form whose bytes a trusted signature covers. `head`: its first line."""

    def __init__(self, text: bytes | memoryview) -> None:
        try:
            self._lines = str(text, "utf-8").split("\n")
            self.head: dict[str, Any] = _scan(self._lines[0], 0)[0]
        except (ValueError, StopIteration) as error:
            raise fail("E0732", f"the sealed launch manifest cannot be read: {error}") from error

    def launch(self) -> LaunchManifest:
        """The launch manifest; of plans and kernels is read what is asked for, when it is."""
        head, lines = self.head, self._lines
        params = _Columns(lines[1])
        kernels = tuple([_kernel(at, row, params) for at, row in enumerate(head["kernels"])])
        plans = tuple([_plan(row, _Line(line)) for row, line in zip(head["plans"], lines[2:], strict=True)])
        return LaunchManifest(_interface(head["interface"]), plans, kernels)


class _Line:
    """A line that is parsed once, when it is first asked for."""

    __slots__ = ("_text", "_rows")

    def __init__(self, text: str) -> None:
        self._text, self._rows = text, None

    def rows(self) -> Any:
        if self._rows is None:
            self._rows = _scan(self._text, 0)[0]
        return self._rows


class _Columns:
    """The line of parameters. A kernel's row is parsed when it is asked for: a load binds one plan, and a
    plan has few of the kernels. A row is a list of lists of plain values: these brackets stand between rows
    alone."""

    __slots__ = ("_text", "_rows")

    def __init__(self, text: str) -> None:
        self._text, self._rows = text, None

    def row(self, at: int) -> list[list[Any]]:
        if self._rows is None:
            self._rows = self._text[3:-3].split("]],[[")
        return _scan(f"[[{self._rows[at]}]]", 0)[0]


class SealedPlan(Plan):
    """A plan whose bucket, buffers and steps are read when they are first asked for. (A field with a default
    cannot come late: its class has it.)"""

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__
        if name not in _LATER or "_row" not in values:
            raise AttributeError(name)
        if name in ("bucket", "wanted"):
            bucket, wanted = values["_row"][-2:]
            values["bucket"], values["wanted"] = _bounds(bucket), tuple(wanted)
        else:
            buffers, steps = values["_line"].rows()
            values["buffers"], values["steps"] = tuple(map(_buffer, buffers)), tuple(map(_step, steps))
        return values[name]

    def rows(self) -> list[Any] | None:
        """[buffers, steps] as they are sealed, not to be changed; None of a plan that was made otherwise."""
        line = self.__dict__.get("_line")
        return None if line is None else line.rows()


class SealedKernel(Kernel):
    """A kernel whose parameters are read when it is first bound."""

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__
        if name != "params" or "_params" not in values:
            raise AttributeError(name)
        params = values["params"] = tuple([Param(*row) for row in zip(*self._columns(), strict=True)])
        return params

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._columns()[0]) if "_params" in self.__dict__ else super().kinds

    def _columns(self) -> list[Any]:
        line, at = self.__dict__["_params"]
        return line.row(at)


# One reader a record. A frozen dataclass's __init__ costs five times as much as writing its fields at once.
_new = object.__new__


def _plan(row: list[Any], line: _Line) -> SealedPlan:
    made = _new(SealedPlan)
    values = made.__dict__
    values["phase"], outputs, saved, gradients, _, _ = row
    values["outputs"], values["saved"], values["gradients"] = tuple(outputs), tuple(saved), tuple(gradients)
    values["_row"], values["_line"] = row, line
    return made


def _kernel(at: int, row: list[Any], params: _Columns) -> SealedKernel:
    made = _new(SealedKernel)
    values = made.__dict__
    (
        values["name"], values["blob"], values["entry"], values["warps"],
        values["shared"], values["scratch"], values["registers"], values["spills"],
    ) = row  # fmt: skip
    values["_params"] = (params, at)
    return made


def _interface(row: list[Any]) -> Interface:
    inputs, outputs, dims, differentiable, updates, random = row
    made = _new(Interface)
    values = made.__dict__
    values["inputs"], values["outputs"] = tuple(map(_tensor, inputs)), tuple(map(_tensor, outputs))
    values["dims"], values["differentiable"] = tuple(map(_dim, dims)), tuple(differentiable)
    values["updates"], values["random"] = tuple(map(tuple, updates)), tuple(random)
    return made


def _tensor(row: list[Any]) -> TensorSpec:
    made = _new(TensorSpec)
    values = made.__dict__
    values["name"], values["kind"], values["dtype"], shape = row
    values["shape"] = _sizes(shape)
    return made


def _dim(row: list[Any]) -> DimSource:
    made = _new(DimSource)
    values = made.__dict__
    values["name"], values["min"], values["max"], values["multiple_of"], tune, *place = row
    values["tune"] = tuple(tune)
    values["tensor"], values["axis"] = place
    return made


def _buffer(row: list[Any]) -> Buffer:
    made = _new(Buffer)
    values = made.__dict__
    values["name"], values["source"], values["index"], values["dtype"], shape = row
    values["shape"] = _sizes(shape)
    return made


def _step(row: list[Any]) -> KernelStep | ExternStep:
    return _extern_step(row) if row[0] == EXTERN else _kernel_step(row)


def _kernel_step(row: list[Any]) -> KernelStep:
    made = _new(KernelStep)
    values = made.__dict__
    _, values["group"], variants, arguments, grid = row
    values["variants"], values["args"] = tuple(map(_variant, variants)), tuple(map(_argument, arguments))
    values["grid"] = _sizes(grid)
    return made


def _variant(row: list[Any]) -> Variant:
    (aligned, divisible, at_most), kernel = row
    guard = _new(Guard)
    values = guard.__dict__
    values["aligned"] = tuple(aligned)
    values["divisible"] = tuple([(_size(size), number) for size, number in divisible])
    values["at_most"] = tuple([(_size(size), number) for size, number in at_most])
    made = _new(Variant)
    values = made.__dict__
    values["guard"], values["kernel"] = guard, kernel
    return made


def _argument(row: list[Any]) -> Argument:
    made = _new(Argument)
    values = made.__dict__
    values["kind"], value = row
    values["value"] = value if value.__class__ is int else _size(value)
    return made


def _extern_step(row: list[Any]) -> ExternStep:
    _, group, op, inputs, outs, attrs = row
    return ExternStep(group, op, tuple(map(_view, inputs)), tuple(map(_view, outs)), attrs)


def _view(row: list[Any]) -> View:
    buffer, shape, permute = row
    return View(buffer, _sizes(shape), tuple(permute))


def _bounds(rows: list[Any]) -> tuple[Bound, ...]:
    return tuple([Bound(*row) for row in rows])


def _sizes(row: list[Any]) -> Any:
    return tuple([item if item.__class__ is not list else _size(item) for item in row])


def _size(item: Any) -> Size:
    return item if item.__class__ is not list else (item[0], _size(item[1]), _size(item[2]))
