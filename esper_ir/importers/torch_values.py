"""Tensors of an imported module: how a fresh one is drawn, how constants are kept, the file beside it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint, Leaf
from esper_ir.safetensors import DTYPES
from esper_ir.text import render
from esper_ir.types import DType, TensorType

INLINE = 1024
"""Constants of at most this many elements stand in the text."""
_CODES = {name: code for code, name in DTYPES.items()}


def dtype_of(tensor: Any, name: str) -> DType:
    """E0103 for an element type that the language lacks."""
    return DType.parse(str(tensor.dtype).removeprefix("torch."), name)


def initialiser(module: nn.Module | None, name: str, value: Tensor) -> dict[str, Any] | None:
    """How a fresh value is drawn: the rule of the layer that holds it (torch's defaults), else one number
    when all elements are equal, else a normal distribution of the spread found, to one digit.
    """
    if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        if name == "weight":
            return {"kind": "kaiming_uniform"}
        if name == "bias":
            return _bias(module)
    if isinstance(module, nn.Embedding):
        return {"kind": "normal", "mean": 0.0, "std": 1.0}
    return _found(value)


def _bias(module: nn.Module) -> dict[str, Any]:
    weight: Any = module.weight
    fan = weight.shape[1] * math.prod(weight.shape[2:])
    bound = 1.0 / math.sqrt(fan) if fan else 0.0
    return {"kind": "uniform", "low": -bound, "high": bound}


def _found(value: Tensor) -> dict[str, Any] | None:
    if not value.numel() or not value.is_floating_point():
        return None
    wide = value.detach().double()
    first = float(wide.flatten()[0])
    if bool((wide == first).all()):
        if first in (0.0, 1.0):
            return {"kind": "ones" if first else "zeros"}
        return {"kind": "constant", "value": first} if math.isfinite(first) else None
    std = float(wide.std()) if wide.numel() > 1 else 0.0
    if not math.isfinite(std):
        return None
    return {"kind": "normal", "mean": 0.0, "std": float(f"{std:.0e}")}


def _nested(tensor: Tensor) -> Any:
    if not tensor.is_floating_point():
        return tensor.tolist()
    return tensor.double().tolist()


def constant(name: str, tensor: Tensor) -> Leaf:
    """A leaf with the data inline when they are few and finite, else in a file beside the blueprint."""
    kind = TensorType.of(dtype_of(tensor, name), tensor.shape)
    finite = not tensor.is_floating_point() or bool(tensor.isfinite().all())
    if tensor.numel() <= INLINE and finite:
        return Leaf(name, "constant", kind, data=_tuples(_nested(tensor)))
    data = to_bytes({name: tensor})
    digest = hashlib.sha256(data).hexdigest()
    return Leaf(
        name, "constant", kind, data={"file": f"{digest[:16]}.safetensors", "sha256": digest, "key": name}
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file: an 8-byte header length, a JSON header, the data; the same bytes for the same
    tensors.
    """
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().flatten()
        body = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        code = _CODES[dtype_of(tensor, name).value]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, at + len(body)]}
        parts.append(body)
        at += len(body)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def save(blueprint: Blueprint, path: Path | str) -> list[Path]:
    """Write the blueprint, the values of its params and buffers (the same name with the ending
    .safetensors) and its large constants; the files written. Raises EsperError E0113.
    """
    path = Path(path)
    files: list[tuple[Path, bytes]] = [(path, render(blueprint).encode())]
    kept = {leaf.name for leaf in blueprint.leaves if leaf.kind in ("param", "buffer")}
    values = {n: t for n, t in blueprint.values.items() if n in kept}
    if values:
        files.append((path.with_suffix(".safetensors"), to_bytes(values)))
    for leaf in blueprint.of_kind("constant"):
        if isinstance(leaf.data, Mapping):
            files.append(
                (path.parent / leaf.data["file"], to_bytes({leaf.name: blueprint.values[leaf.name]}))
            )
    try:
        for place, data in files:
            place.write_bytes(data)
    except OSError as error:
        raise EsperError("E0113", f"cannot write {error.filename}: {error.strerror}") from None
    return [place for place, _ in files]
