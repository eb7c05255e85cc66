"""Reading tensors of a safetensors file: an 8-byte header length, a JSON header, the data. No code is
run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EXIT_NOT_FOUND, EsperError
from esper_ir.lazy import torch

DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
MAX_HEADER = 100 * 2**20


def _bad(reason: str) -> EsperError:
    return EsperError("E0112", f"not a safetensors file: {reason}")


def _sizes(value: Any, count: int | None, what: str) -> list[int]:
    plain = isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value
    )
    if not plain or (count is not None and len(value) != count):
        raise _bad(what)
    return value


def load_file(path: Path | str) -> dict[str, Any]:
    """Every tensor of a file by name, for `load_state_dict`, as the function of this name in the package
    `safetensors` gives them. Raises EsperError E0112, E0113.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise EsperError(
            "E0113", f"cannot read {path}: {error.strerror}", node=str(path), exit_code=EXIT_NOT_FOUND
        ) from None
    header, _ = _header(data)
    return {name: read_tensor(data, name) for name in header if name != "__metadata__"}


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """What the file says of its tensors, and where their bytes begin."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, MAX_HEADER):
        raise _bad("the header is cut off")
    try:
        header = json.loads(data[8 : 8 + size].decode("utf-8"))
    except (ValueError, RecursionError):
        raise _bad("the header is not JSON") from None
    return header if isinstance(header, dict) else {}, 8 + size


def read_tensor(data: bytes, key: str) -> Any:
    """The tensor called `key` (little-endian, row major). Raises EsperError E0112."""
    header, begin = _header(data)
    entry = header.get(key)
    if not isinstance(entry, dict) or DTYPES.get(str(entry.get("dtype"))) is None:
        raise EsperError("E0112", f"no tensor {key!r} of a known dtype in the file")
    shape = _sizes(entry.get("shape"), None, "bad shape")
    start, end = _sizes(entry.get("data_offsets"), 2, "bad offsets")
    dtype = getattr(torch, DTYPES[entry["dtype"]])
    body = bytearray(data[begin + start : begin + end])
    if not len(body) == end - start == math.prod(shape) * dtype.itemsize:
        raise _bad(f"the data of {key!r} do not have the size of their shape")
    if not body:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(body, dtype=dtype).reshape(shape)
