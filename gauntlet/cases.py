"""A failing case on disk: its recipe and its tensors in one file that any safetensors reader opens.

    u64 little-endian header length | JSON header, padded with spaces to 8 | tensor bytes

The header maps each tensor to dtype, shape and byte range, and `__metadata__` (texts only, as the format
asks) holds "recipe", "artifact", "stage" and "reason". The file name is the sha256 of the content.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EXIT_INTEGRITY, EXIT_NOT_FOUND, EsperError
from library.paths import writes_to

MAX_HEADER = 8 << 20
SUFFIX = ".safetensors"
DTYPES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
NAMES = {code: name for name, code in DTYPES.items()}


@dataclass(frozen=True)
class Raw:
    """A dense tensor as bytes: dtype by its torch name, shape, row-major little-endian data."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Case:
    """`tensors` by name: leaves of the blueprint as `x`, cotangents as `cotangent:y`."""

    artifact: str
    stage: str
    reason: str
    recipe: Mapping[str, Any]
    tensors: Mapping[str, Raw]


def encode(case: Case) -> bytes:
    """The file's bytes; the same case gives the same bytes."""
    header: dict[str, Any] = {
        "__metadata__": {
            "artifact": case.artifact,
            "format": "esper-case/1",
            "reason": case.reason,
            "recipe": json.dumps(case.recipe, sort_keys=True),
            "stage": case.stage,
        }
    }
    at, parts = 0, []
    for name in sorted(case.tensors):
        raw = case.tensors[name]
        end = at + len(raw.data)
        header[name] = {"dtype": DTYPES[raw.dtype], "shape": list(raw.shape), "data_offsets": [at, end]}
        parts.append(raw.data)
        at = end
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def decode(data: bytes) -> Case:
    """E0905 when the bytes are not a case."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > min(MAX_HEADER, len(data) - 8):
            raise ValueError("header runs past the end")
        header = json.loads(data[8 : 8 + length])
        meta, body = header.pop("__metadata__"), data[8 + length :]
        tensors = {name: _raw(entry, body) for name, entry in header.items()}
        return Case(meta["artifact"], meta["stage"], meta["reason"], json.loads(meta["recipe"]), tensors)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise EsperError(
            "E0905",
            f"not a case of the gauntlet: {error}",
            hint="a case is the file named in a REJECTED verdict",
            exit_code=EXIT_INTEGRITY,
        ) from error


def _raw(entry: Mapping[str, Any], body: bytes) -> Raw:
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(body):
        raise ValueError("a tensor runs past the end")
    return Raw(NAMES[entry["dtype"]], tuple(int(n) for n in entry["shape"]), body[start:end])


def save(folder: Path, data: bytes) -> Path:
    """Write under the name of its digest; there already is as good as written. E0702, E0703, E0710."""
    path = folder / (hashlib.sha256(data).hexdigest() + SUFFIX)
    with writes_to(path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():
            return path
        staged = folder / f".{path.name}.{os.getpid()}"
        with open(staged, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    return path


def load(folder: Path, name: str) -> Case:
    """By path, digest or a unique beginning of it; the bytes are checked against the name. E0904, E0905."""
    given = Path(name)
    found = [given] if given.is_file() else sorted(folder.glob(f"{given.name.removesuffix(SUFFIX)}*{SUFFIX}"))
    if len(found) != 1:
        what = "no case" if not found else f"{len(found)} cases"
        raise EsperError(
            "E0904",
            f"{what} {name!r} in {folder}",
            hint="`esper-gauntlet show ID` names the case of a rejected artifact",
            exit_code=EXIT_NOT_FOUND,
        )
    data = found[0].read_bytes()
    if found[0].parent == folder and hashlib.sha256(data).hexdigest() != found[0].name.removesuffix(SUFFIX):
        raise EsperError(
            "E0905",
            f"{found[0].name} does not match its name",
            hint="the file was changed",
            exit_code=EXIT_INTEGRITY,
        )
    return decode(data)
