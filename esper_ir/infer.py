"""Attributes checked and completed, types inferred: the one place where an operator's rule is applied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from esper_ir.diagnostics import EsperError, did_you_mean
from esper_ir.opdef import REQUIRED, Attr, Number, OpDef
from esper_ir.types import Dim, DimSpec, DType, TensorType, declared

Operands = Sequence[TensorType | Number]
Inferred = tuple[tuple[tuple[str, Any], ...], tuple[TensorType, ...]]
"""Resolved attributes sorted by name, and output types."""


def _wrong(attr: Attr, value: Any) -> EsperError:
    wanted = f"one of {', '.join(map(str, attr.choices))}" if attr.choices else attr.kind
    return EsperError("E0203", f"attribute {attr.name!r} is {str(value)[:80]!r}", hint=f"it must be {wanted}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(attr: Attr, value: Any) -> Number:
    if not isinstance(value, (int, float)) or (isinstance(value, bool) and attr.kind == "float"):
        raise _wrong(attr, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise EsperError("E0109", f"attribute {attr.name!r} is {value}", hint="numbers must be finite")
    return value


def _float(attr: Attr, value: Any) -> float:
    try:
        return float(_number(attr, value))
    except OverflowError:
        raise _wrong(attr, value) from None


def _sequence(attr: Attr, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > 64:
        raise _wrong(attr, value)
    return tuple(value)


def _dim(attr: Attr, value: Any) -> Dim:
    if _is_int(value) or isinstance(value, (str, Dim)):
        return Dim.of(value)
    raise _wrong(attr, value)


def convert(attr: Attr, value: Any) -> Any:
    """The value in its typed form (DType, Dim, tuple, float); E0203 when it is not of the kind."""
    if value is None:
        if attr.default is None:
            return None
        raise _wrong(attr, value)
    if attr.kind == "float":
        value = _float(attr, value)
    elif attr.kind == "number":
        value = _number(attr, value)
    elif attr.kind == "scalar":
        value = _number(attr, value) if isinstance(value, (int, float)) else _dim(attr, value)
    elif attr.kind == "dtype":
        value = value if isinstance(value, DType) else DType.parse(value)
    elif attr.kind == "shape":
        value = tuple(_dim(attr, v) for v in _sequence(attr, value))
    elif attr.kind == "ints":
        value = _sequence(attr, value)
        if not all(_is_int(v) for v in value):
            raise _wrong(attr, value)
    elif not (
        _is_int(value) if attr.kind == "int" else isinstance(value, bool if attr.kind == "bool" else str)
    ):
        raise _wrong(attr, value)
    if attr.choices and value not in attr.choices:
        raise _wrong(attr, value)
    return value


def complete(op: OpDef, given: Mapping[str, Any]) -> dict[str, Any]:
    """Typed attributes with defaults filled in; E0202 for unknown or missing ones."""
    known = {a.name for a in op.params}
    for name in given:
        if name not in known:
            has = f"{op.name} has {', '.join(sorted(known))}" if known else f"{op.name} has no attributes"
            hint = did_you_mean(str(name), sorted(known), has)
            raise EsperError("E0202", f"unknown attribute {str(name)[:64]!r}", hint=hint)
    out: dict[str, Any] = {}
    for attr in op.params:
        if attr.name not in given and attr.default is REQUIRED:
            raise EsperError(
                "E0202", f"attribute {attr.name!r} is missing", hint=attr.doc or f"kind: {attr.kind}"
            )
        out[attr.name] = convert(attr, given.get(attr.name, attr.default))
    return out


def check_arity(op: OpDef, count: int) -> None:
    least, most = op.arity
    if not least <= count <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise EsperError("E0201", f"{op.name} takes {wanted} operands, not {count}", hint=op.doc)


def infer(op: OpDef, operands: Operands, given: Mapping[str, Any]) -> Inferred:
    """Check operands and attributes, complete the attributes and give the output types.

    Raises EsperError E0109, E0103, E0104, E0201-E0208.
    """
    check_arity(op, len(operands))
    attrs = complete(op, given)
    if op.resolve is not None:
        attrs = op.resolve(operands, attrs)
    types = op.infer(operands, attrs)
    return tuple(sorted(attrs.items())), types


def exact(value: Any) -> Any:
    """A key that tells 1, 1.0 and True (and 0.0 and -0.0) apart."""
    if isinstance(value, (bool, int, float)):
        return (type(value).__name__, repr(value))
    if isinstance(value, tuple):
        return tuple(exact(v) for v in value)
    return value


class Inference:
    """`infer` with its results kept: large graphs repeat few combinations. `dims`: declared ranges, which
    proofs of inequalities use.
    """

    def __init__(self, dims: Mapping[str, DimSpec]) -> None:
        self._dims = dims
        self._known: dict[Any, Inferred] = {}

    def __call__(self, op: OpDef, operands: Operands, given: Mapping[str, Any]) -> Inferred:
        key = (
            op.name,
            tuple(exact(o) for o in operands),
            tuple((k, exact(v)) for k, v in sorted(given.items())),
        )
        try:
            found = self._known.get(key)
        except TypeError:  # an unhashable value: a wrong attribute, which `infer` names
            return infer(op, operands, given)
        if found is None:
            with declared(self._dims):
                found = self._known[key] = infer(op, operands, given)
        return found


def bind(attrs: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Attributes with every dimension as a number: what a reference is given."""

    def value(v: Any) -> Any:
        if isinstance(v, Dim):
            return v.value(sizes)
        return tuple(value(e) for e in v) if isinstance(v, tuple) else v

    return {name: value(v) for name, v in attrs.items()}
