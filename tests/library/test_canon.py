"""Canonical JSON and the strict reader."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_ir.diagnostics import EsperError
from library.canon import JsonLimits, canonical_json, parse_json

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(TEXT, x), max_leaves=20)


@given(VALUES)
def test_reading_what_was_written_gives_it_back(value: Any) -> None:
    data = canonical_json(value)
    assert parse_json(data) == value
    assert canonical_json(parse_json(data)) == data


@given(st.dictionaries(TEXT, st.integers(), max_size=6), st.randoms())
def test_order_of_keys_does_not_matter(value: dict[str, int], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical_json(dict(items)) == canonical_json(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, {"a": {1, 2}}, "\ud800", object()])
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    with pytest.raises(EsperError) as error:
        canonical_json(value)
    assert error.value.code == "E0734"


@pytest.mark.parametrize(
    "text",
    [b'{"a":1,"a":2}', b'{"a":{"b":1,"b":1}}', b"NaN", b"[Infinity]", b"1e999", b"{", b"", b'"\xff"', b"[1]x",
     b"[" * 200 + b"]" * 200, b"1" * 5000, b'\xef\xbb\xbf{}'],
)  # fmt: skip
def test_refused_documents(text: bytes) -> None:
    with pytest.raises(EsperError) as error:
        parse_json(text)
    assert error.value.code == "E0734" and error.value.exit_code == 11


def test_brackets_inside_texts_are_not_depth() -> None:
    text = json.dumps({"a": "[" * 500, "b": '\\"[{' * 200}).encode()
    assert parse_json(text)["a"] == "[" * 500


def test_size_limit_is_checked_before_parsing() -> None:
    with pytest.raises(EsperError) as error:
        parse_json(b"[" * 101, JsonLimits(max_bytes=100))
    assert error.value.code == "E0735" and error.value.exit_code == 15
