"""One spelling for every signed or hashed document, and a reader that refuses what the writer cannot make."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from library.errors import fail

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


@dataclass(frozen=True)
class JsonLimits:
    """What a document from outside may cost: `max_bytes` of text, `max_depth` of nested brackets."""

    max_bytes: int = 64 << 20
    max_depth: int = 128


DEFAULT_LIMITS = JsonLimits()


def canonical_json(obj: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8, no NaN: equal data gives equal bytes. E0734 for what JSON cannot say."""
    try:
        return _encode(obj).encode("utf-8")
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # UnicodeEncodeError (lone surrogates) is a ValueError
        raise fail("E0734", f"value cannot be written as canonical JSON: {error}") from error


def sha256_hex(data: bytes | memoryview) -> str:
    """SHA-256 as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def parse_json(data: bytes | memoryview, limits: JsonLimits = DEFAULT_LIMITS) -> Any:
    """Strict reader: duplicate keys, NaN, infinities, too deep, too long, not UTF-8 are E0734 or E0735."""
    raw = bytes(data)
    if len(raw) > limits.max_bytes:
        raise fail("E0735", f"JSON text of {len(raw)} bytes exceeds the limit of {limits.max_bytes}")
    _check_depth(raw, limits.max_depth)
    try:
        return _read(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise fail("E0734", f"not valid JSON: {error}") from error


def _check_depth(raw: bytes, limit: int) -> None:
    if raw.count(b"[") + raw.count(b"{") <= limit:
        return
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", raw)):
        depth += 1 if bracket in b"[{" else -1
        if depth > limit:
            raise fail("E0734", f"JSON nested deeper than {limit} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise ValueError(f"duplicate key {twice!r}")
    return result


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:40]} is out of range")
    return value


# Made once: json.loads makes a decoder for every text that it reads with hooks.
_strict = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite)
_scan = _strict.scan_once  # type: ignore[attr-defined]


def _read(text: str) -> Any:
    """As `decode`, which looks for spaces around a value before it looks for the value."""
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        value, end = None, -1
    return value if end == len(text) else _strict.decode(text)
