"""The text form: strict JSON in, JSON out. `parse(render(b)) == b` for every blueprint."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EXIT_INTEGRITY, EXIT_LIMIT, EXIT_NOT_FOUND, EsperError, did_you_mean
from esper_ir.graph import Blueprint, Leaf, Node, Ref
from esper_ir.types import Dim, DimSpec, DType, TensorType

FORMAT = "esper-blueprint/1"
MAX_BYTES = 64 * 2**20
MAX_NESTING = 64
MAX_NODES = 100_000
MAX_RANK = 16
NAME = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_.]{0,254}|[0-9]{1,4}\.[A-Za-z0-9_.]{1,250})", re.ASCII)
SYMBOL = re.compile(r"(?!floordiv\Z)[A-Za-z_]\w{0,63}", re.ASCII)
SECTIONS = {"inputs": "input", "params": "param", "buffers": "buffer", "constants": "constant"}
INITIALISERS = {
    "zeros": {}, "ones": {}, "constant": {"value": None}, "normal": {"mean": 0.0, "std": 1.0},
    "uniform": {"low": 0.0, "high": 1.0}, "eye": {}, "kaiming_uniform": {"a": math.sqrt(5.0)},
    "xavier_uniform": {},
}  # fmt: skip
"""Kinds of initialisers with their numbers and defaults; None: must be given."""

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def _too_big(what: str, limit: int) -> EsperError:
    return EsperError(
        "E0102", f"{what}: the limit is {limit:,}", hint="split the blueprint", exit_code=EXIT_LIMIT
    )


def _check_nesting(data: bytes) -> None:
    depth = 0
    for match in _TOKEN.finditer(data):
        first = match.group()[:1]
        if first in b"[{":
            depth += 1
            if depth > MAX_NESTING:
                raise _too_big("nesting too deep", MAX_NESTING)
        elif first in b"]}":
            depth -= 1


def _pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise EsperError("E0106", f"key {key[:64]!r} occurs twice in one object")
        out[key] = value
    return out


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise EsperError("E0109", f"the number {text[:40]} is not finite")
    return value


def _no_constant(text: str) -> float:
    raise EsperError("E0109", f"{text} is not a number of JSON", hint="numbers must be finite")


def _integer(text: str) -> int:
    value = int(text) if len(text) <= 20 else 2**64
    if not -(2**63) <= value < 2**63:
        raise EsperError("E0109", f"the integer {text[:40]} does not fit in 64 bits")
    return value


def _decode(data: bytes | str, source: str) -> Any:
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)
    if len(raw) > MAX_BYTES:
        raise _too_big(f"{source} has {len(raw):,} bytes", MAX_BYTES)
    _check_nesting(raw)
    try:
        text = raw.decode("utf-8")
        return json.loads(
            text,
            object_pairs_hook=_pairs,
            parse_float=_finite,
            parse_int=_integer,
            parse_constant=_no_constant,
        )
    except json.JSONDecodeError as error:
        hint = f"line {error.lineno}, column {error.colno}"
        raise EsperError("E0101", f"{source} is not JSON: {error.msg}", hint=hint) from None
    except UnicodeDecodeError as error:
        raise EsperError("E0101", f"{source} is not UTF-8 at byte {error.start}") from None


def _expect(value: Any, kind: type | tuple[type, ...], where: str, wanted: str) -> Any:
    if not isinstance(value, kind) or (
        isinstance(value, bool) and bool not in (kind if isinstance(kind, tuple) else (kind,))
    ):
        raise EsperError("E0105", f"{where} is {json.dumps(value)[:60]}", hint=f"it must be {wanted}")
    return value


def _object(value: Any, where: str, required: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    """An object with exactly these keys; E0105 names the first that is unknown or missing."""
    found = _expect(value, dict, where, "an object")
    for key in found:
        if key not in required and key not in optional:
            known = [*required, *optional]
            hint = did_you_mean(key, known, f"keys: {', '.join(known)}")
            raise EsperError("E0105", f"{where} has the unknown key {key[:64]!r}", hint=hint)
    for key in required:
        if key not in found:
            raise EsperError("E0105", f"{where} lacks the key {key!r}")
    return found


def _name(value: Any, where: str, pattern: re.Pattern[str] = NAME) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        hint = "letters, digits, _ and (not for dims) dots; a letter, _ or `0.` first; at most 255"
        raise EsperError("E0107", f"{where}: bad name {str(value)[:64]!r}", hint=hint)
    return value


def _map(value: Any, where: str, pattern: re.Pattern[str] = NAME) -> dict[str, Any]:
    found = _expect(value, dict, where, "an object")
    for key in found:
        _name(key, where, pattern)
    return found


def _int(value: Any, where: str, least: int = 0) -> int:
    number = _expect(value, int, where, f"an integer >= {least}")
    if number < least or number > 2**48:
        raise EsperError("E0110", f"{where} is {number}", hint=f"from {least} to 2**48")
    return number


def dim_spec(value: Any, name: str) -> DimSpec:
    """The range of the dim `name`, as a blueprint writes it; E0110."""
    where = f"dims.{name}"
    found = _object(value, where, (), ("min", "max", "tune", "multiple_of"))
    low = _int(found.get("min", 1), f"{where}.min")
    high = _int(found.get("max", 2**31 - 1), f"{where}.max", 1)
    multiple = _int(found.get("multiple_of", 1), f"{where}.multiple_of", 1)
    tune = _expect(found.get("tune", []), list, f"{where}.tune", "a list of sizes")
    sizes = tuple(_int(t, f"{where}.tune") for t in tune)
    if low > high:
        raise EsperError(
            "E0110", f"{where}: min {low} is above max {high}", hint="exchange them, or correct one"
        )
    if -(-low // multiple) * multiple > high:
        what = f"{where}: no size from {low} to {high} is a multiple of {multiple}"
        raise EsperError("E0110", what, hint=f"max has to reach {-(-low // multiple) * multiple}")
    for size in sizes:
        if not low <= size <= high or size % multiple:
            raise EsperError(
                "E0110", f"{where}.tune: {size} is outside the declared range", hint=f"{low} to {high}"
            )
    return DimSpec(low, high, sizes, multiple)


def _dim(value: Any, where: str) -> Dim:
    if isinstance(value, int) and not isinstance(value, bool):
        return Dim.of(_int(value, where))
    return Dim.of(_expect(value, str, where, "a size or an expression over dims"))


def _type(found: Mapping[str, Any], where: str) -> TensorType:
    shape = _expect(found["shape"], list, f"{where}.shape", "a list of sizes")
    if len(shape) > MAX_RANK:
        raise _too_big(f"{where} has {len(shape)} dimensions", MAX_RANK)
    dtype = DType.parse(_expect(found["dtype"], str, f"{where}.dtype", "the name of a dtype"), where)
    return TensorType(dtype, tuple(_dim(s, f"{where}.shape") for s in shape))


def initialiser(value: Any, where: str) -> dict[str, Any]:
    """An initialiser; a bare string is short for {"kind": ...}. Only what was written is kept. E0111."""
    found = (
        {"kind": value} if isinstance(value, str) else _expect(value, Mapping, where, "an object with `kind`")
    )
    kind = found.get("kind")
    known = INITIALISERS.get(kind) if isinstance(kind, str) else None
    if known is None:
        hint = did_you_mean(str(kind), INITIALISERS, f"one of: {', '.join(INITIALISERS)}")
        raise EsperError("E0111", f"{where}: unknown initialiser {str(kind)[:64]!r}", hint=hint)
    for key, number in found.items():
        if key != "kind" and (
            key not in known or isinstance(number, bool) or not isinstance(number, (int, float))
        ):
            raise EsperError(
                "E0111", f"{where}: {key[:64]!r} does not fit {kind}", hint=f"numbers: {', '.join(known)}"
            )
    missing = [k for k, v in known.items() if v is None and k not in found]
    if missing:
        raise EsperError("E0111", f"{where}: {kind} needs {missing[0]!r}")
    return dict(found)


def _data(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        found = _object(value, where, ("file", "sha256"), ("key",))
        name, digest = found["file"], found["sha256"]
        plain = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}", name, re.ASCII)
        if not plain or not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise EsperError("E0112", f"{where}: a file name beside the blueprint and its sha256 are needed")
        return found
    return freeze(value, where)


def _leaf(section: str, name: str, value: Any) -> Leaf:
    kind = SECTIONS[section]
    where = f"{section}.{name}"
    needed = ("dtype", "shape", "data") if kind == "constant" else ("dtype", "shape")
    extra = {"param": ("init", "compute"), "buffer": ("init",)}.get(kind, ())
    found = _object(value, where, needed, extra)
    compute = DType.parse(found["compute"], where) if "compute" in found else None
    init = initialiser(found["init"], f"{where}.init") if "init" in found else None
    data = _data(found["data"], f"{where}.data") if kind == "constant" else None
    return Leaf(name, kind, _type(found, where), init, compute, data)


def freeze(value: Any, where: str) -> Any:
    """Lists as tuples; objects are refused (attributes and data are hashable). Nesting is bounded by the
    parser.
    """
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v, where) for v in value)
    if isinstance(value, dict):
        raise EsperError("E0105", f"{where} holds an object", hint="numbers, strings, truth values and lists")
    return value


def _ref(value: Any, where: str) -> Ref:
    if isinstance(value, str):
        return _name(value, where)
    return _expect(value, (int, float, bool), where, "the name of a value or a number")


def _node(value: Any, index: int) -> Node:
    where = f"nodes[{index}]"
    found = _object(value, where, ("id", "op"), ("inputs", "attrs"))
    name = _name(found["id"], where)
    op = _expect(found["op"], str, f"{where}.op", "the name of an operator")
    if len(op) > 255:
        raise EsperError("E0107", f"{where}: the operator name is too long")
    inputs = _expect(found.get("inputs", []), list, f"{where}.inputs", "a list of operands")
    attrs = _map(found.get("attrs", {}), f"{where}.attrs")
    frozen = {k: freeze(v, f"{where}.attrs.{k}") for k, v in attrs.items()}
    return Node(name, op, tuple(_ref(r, f"{where}.inputs") for r in inputs), tuple(sorted(frozen.items())))


def _names(value: Any, where: str) -> tuple[str, ...]:
    return tuple(_name(v, where) for v in _expect(value, list, where, "a list of names"))


def _format(document: Any) -> None:
    found = _expect(document, dict, "the document", "an object").get("format")
    if found == FORMAT:
        return
    match = re.fullmatch(r"esper-blueprint/(\d{1,6})", found, re.ASCII) if isinstance(found, str) else None
    if match:
        hint = "install a newer version of Esper"
        raise EsperError("E0108", f"format version {match[1]} is not known here", hint=hint)
    raise EsperError("E0108", f"format is {str(found)[:64]!r}", hint=f"it must be {FORMAT!r}")


def _surrogates(value: Any) -> None:
    """Text that cannot be written as UTF-8 is refused where it enters."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise EsperError(
            "E0101", "the text holds half a surrogate pair", hint="write valid Unicode"
        ) from None


def parse(data: bytes | str, *, source: str = "<text>", base: Path | None = None) -> Blueprint:
    """Read a blueprint. `source` names it in errors; `base` is the folder of files that constants name.

    Checks form, and the digests of those files; `esper_ir.verify` checks meaning. Raises EsperError
    E0101-E0113 and nothing else.
    """
    document = _decode(data, source)
    _format(document)
    optional = ("dims", *SECTIONS, "differentiable", "updates", "random", "metadata")
    found = _object(document, "the document", ("format", "name", "nodes", "outputs"), optional)
    _surrogates(document)
    nodes = _expect(found["nodes"], list, "nodes", "a list")
    if len(nodes) > MAX_NODES:
        raise _too_big(f"{len(nodes):,} nodes", MAX_NODES)
    dims = {n: dim_spec(v, n) for n, v in _map(found.get("dims", {}), "dims", SYMBOL).items()}
    leaves = [_leaf(s, n, v) for s in SECTIONS for n, v in _map(found.get(s, {}), s).items()]
    if base is not None:
        _check_files(leaves, base)
    wanted = found.get("differentiable")
    name = _expect(found["name"], str, "name", "a text")
    if not name or len(name) > 255:
        raise EsperError("E0107", "name is empty or longer than 255 characters")
    return Blueprint(
        name=name,
        leaves=tuple(leaves),
        nodes=tuple(_node(n, i) for i, n in enumerate(nodes)),
        outputs=_names(found["outputs"], "outputs"),
        dims=dims,
        differentiable=None if wanted is None else _names(wanted, "differentiable"),
        metadata=_expect(found.get("metadata", {}), dict, "metadata", "an object"),
        updates={n: _name(v, f"updates.{n}") for n, v in _map(found.get("updates", {}), "updates").items()},
        random=_names(found.get("random", []), "random"),
    )


def _check_files(leaves: Sequence[Leaf], base: Path) -> None:
    for leaf in leaves:
        if isinstance(leaf.data, Mapping):
            read_file(leaf, base)


def read_file(leaf: Leaf, base: Path) -> bytes:
    """The bytes of the file that a constant names; E0113 when unreadable, E0112 (exit 11) on another
    digest.
    """
    path = base / leaf.data["file"]
    try:
        data = path.read_bytes()
    except OSError as error:
        hint, reason = "it lies beside the blueprint", f"cannot read {path}: {error.strerror}"
        raise EsperError("E0113", reason, node=leaf.name, hint=hint, exit_code=EXIT_NOT_FOUND) from None
    if hashlib.sha256(data).hexdigest() != leaf.data["sha256"]:
        raise EsperError("E0112", f"{path} has another digest", node=leaf.name, exit_code=EXIT_INTEGRITY)
    return data


def load(path: str | Path) -> Blueprint:
    """Read a blueprint file (at most 64 MiB). Raises EsperError as `parse`, and E0113 when it cannot be
    read.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EsperError(
            "E0113", f"cannot read {path}: {reason}", node=str(path), exit_code=EXIT_NOT_FOUND
        ) from None
    return parse(data, source=str(path), base=path.parent)


def _thaw(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_thaw(v) for v in value]
    if isinstance(value, Dim):
        return value.to_json()
    return value.value if isinstance(value, DType) else value


def _leaf_json(leaf: Leaf) -> dict[str, Any]:
    out: dict[str, Any] = {"dtype": leaf.type.dtype.value, "shape": [d.to_json() for d in leaf.type.shape]}
    if leaf.compute is not None:
        out["compute"] = leaf.compute.value
    if leaf.init is not None:
        out["init"] = dict(leaf.init)
    if leaf.kind == "constant":
        out["data"] = _thaw(leaf.data)
    return out


def _dim_json(spec: DimSpec) -> dict[str, Any]:
    out: dict[str, Any] = {"min": spec.min, "max": spec.max}
    if spec.tune:
        out["tune"] = list(spec.tune)
    if spec.multiple_of != 1:
        out["multiple_of"] = spec.multiple_of
    return out


def _node_json(node: Node) -> dict[str, Any]:
    out: dict[str, Any] = {"id": node.id, "op": node.op, "inputs": list(node.inputs)}
    if node.attrs:
        out["attrs"] = {k: _thaw(v) for k, v in node.attrs}
    return out


def to_json(bp: Blueprint) -> dict[str, Any]:
    """The blueprint as a JSON document."""
    out: dict[str, Any] = {"format": FORMAT, "name": bp.name}
    if bp.dims:
        out["dims"] = {n: _dim_json(s) for n, s in bp.dims.items()}
    for section, kind in SECTIONS.items():
        leaves = bp.of_kind(kind)
        if leaves:
            out[section] = {leaf.name: _leaf_json(leaf) for leaf in leaves}
    out["nodes"] = [_node_json(n) for n in bp.nodes]
    out["outputs"] = list(bp.outputs)
    if bp.differentiable is not None:
        out["differentiable"] = list(bp.differentiable)
    if bp.updates:
        out["updates"] = dict(bp.updates)
    if bp.random:
        out["random"] = list(bp.random)
    if bp.metadata:
        out["metadata"] = dict(bp.metadata)
    return out


def _block(key: str, rows: Sequence[str], brackets: str) -> str:
    inner = ",\n".join(f"    {row}" for row in rows)
    return f"  {json.dumps(key)}: {brackets[0]}\n{inner}\n  {brackets[1]}"


def render(bp: Blueprint) -> str:
    """Readable JSON text: one line per leaf and node."""

    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    parts = []
    for key, value in to_json(bp).items():
        if isinstance(value, dict) and key != "metadata":
            parts.append(_block(key, [f"{dump(k)}: {dump(v)}" for k, v in value.items()], "{}"))
        elif key == "nodes" and value:
            parts.append(_block(key, [dump(v) for v in value], "[]"))
        else:
            parts.append(f"  {json.dumps(key)}: {dump(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _open_object(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "propertyNames": {"pattern": f"^{NAME.pattern}$"},
        "additionalProperties": values,
    }


def _closed_object(properties: Mapping[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    out: dict[str, Any] = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return {**out, "required": list(required)} if required else out


def _leaf_schema(kind: str) -> dict[str, Any]:
    size = {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}
    properties: dict[str, Any] = {
        "dtype": {"enum": [d.value for d in DType]},
        "shape": {"type": "array", "items": size, "maxItems": MAX_RANK},
    }
    if kind in ("param", "buffer"):
        number = {"type": "number"}
        kinds = [
            _closed_object({"kind": {"const": k}, **dict.fromkeys(v, number)}, ("kind",))
            for k, v in INITIALISERS.items()
        ]
        properties["init"] = {"oneOf": [{"enum": list(INITIALISERS)}, *kinds]}
    if kind == "param":
        properties["compute"] = {"enum": [d.value for d in DType if d.is_floating]}
    if kind == "constant":
        text, digest = {"type": "string"}, {"type": "string", "pattern": "^[0-9a-f]{64}$"}
        file = _closed_object({"file": text, "sha256": digest, "key": text}, ("file", "sha256"))
        properties["data"] = {"oneOf": [{"type": ["array", "number", "boolean"]}, file]}
    needed = ("dtype", "shape", "data") if kind == "constant" else ("dtype", "shape")
    return _open_object(_closed_object(properties, needed))


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the text form. It checks shape only; `verify` knows the meaning."""
    name, size = {"type": "string", "pattern": f"^{NAME.pattern}$"}, {"type": "integer", "minimum": 0}
    names = {"type": "array", "items": name}
    dim = _closed_object(
        {"min": size, "max": size, "multiple_of": size, "tune": {"type": "array", "items": size}}
    )
    operand = {"oneOf": [name, {"type": ["number", "boolean"]}]}
    operands = {"type": "array", "items": operand}
    node = {"id": name, "op": {"type": "string"}, "inputs": operands, "attrs": {"type": "object"}}
    properties: dict[str, Any] = {
        "format": {"const": FORMAT},
        "name": {"type": "string", "minLength": 1, "maxLength": 255},
        "dims": _open_object(dim),
        **{section: _leaf_schema(kind) for section, kind in SECTIONS.items()},
        "nodes": {"type": "array", "items": _closed_object(node, ("id", "op")), "maxItems": MAX_NODES},
        "outputs": {**names, "minItems": 1, "uniqueItems": True},
        "differentiable": names,
        "updates": _open_object(name),
        "random": names,
        "metadata": {"type": "object"},
    }
    schema = _closed_object(properties, ("format", "name", "nodes", "outputs"))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Esper blueprint", **schema}
