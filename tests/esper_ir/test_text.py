"""The parser against bad input: only EsperError comes out, with the right code."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from esper_ir.diagnostics import EsperError
from esper_ir.text import json_schema, load, parse, render, to_json
from esper_ir.verify import verify
from tests.source import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.json"))


def text(**changes: Any) -> str:
    document = {
        "format": "esper-blueprint/1",
        "name": "t",
        "dims": {"rows": {}},
        "inputs": {"x": {"dtype": "float32", "shape": ["rows", 8]}},
        "nodes": [{"id": "y", "op": "exp", "inputs": ["x"]}],
        "outputs": ["y"],
    }
    document.update(changes)
    return json.dumps({k: v for k, v in document.items() if v is not ...})


def leaf(**changes: Any) -> str:
    return text(params={"w": {"dtype": "float32", "shape": [8], **changes}})


def node(**changes: Any) -> str:
    return text(nodes=[{"id": "y", "op": "exp", "inputs": ["x"], **changes}])


BAD: list[tuple[str, str]] = [
    ("E0101", ""),
    ("E0101", "{"),
    ("E0101", "nonsense"),
    ("E0101", text() + "x"),
    ("E0101", text()[:-5]),
    ("E0101", text(metadata={"a": "\ud800"})),
    ("E0102", "[" * 65 + "]" * 65),
    ("E0102", text(metadata={"a": json.loads("[" * 70 + "]" * 70)})),
    ("E0102", text(nodes=[{"id": "y", "op": "exp", "inputs": ["x"]}] * 100_001)),
    ("E0102", leaf(shape=[1] * 17)),
    ("E0103", leaf(dtype="float8")),
    ("E0103", leaf(compute="quux")),
    ("E0104", leaf(shape=["rows+"])),
    ("E0104", leaf(shape=["rows/2"])),
    ("E0104", leaf(shape=["(" * 40 + "rows"])),
    ("E0104", leaf(shape=["floordiv(rows, 0)"])),
    ("E0104", leaf(shape=["9" * 30])),
    ("E0104", leaf(shape=[""])),
    ("E0104", leaf(shape=["*".join(f"(a{i}+b{i})" for i in range(40))])),
    ("E0104", leaf(shape=["a²"])),
    ("E0105", "[]"),
    ("E0105", "3"),
    ("E0105", text(extra=1)),
    ("E0105", text(outputs=...)),
    ("E0105", text(nodes={})),
    ("E0105", text(inputs=[])),
    ("E0105", node(op=3)),
    ("E0105", node(inputs="x")),
    ("E0105", node(inputs=[None])),
    ("E0105", node(attrs={"a": {"b": 1}})),
    ("E0105", leaf(shape=[2.5])),
    ("E0105", leaf(shape=[True])),
    ("E0105", leaf(data=[1])),
    ("E0105", text(name=3)),
    ("E0105", text(metadata=[])),
    ("E0106", '{"format": 1, "format": 1}'),
    ("E0106", text()[:-1] + ', "name": "u"}'),
    ("E0107", node(id="")),
    ("E0107", node(id="a b")),
    ("E0107", node(id="1x")),
    ("E0107", node(id="1.")),
    ("E0107", node(id="12345.x")),
    ("E0107", text(dims={"a.b": {}})),
    ("E0107", text(name="")),
    ("E0107", node(id="x" * 300)),
    ("E0107", text(dims={"floordiv": {}})),
    ("E0108", text(format="esper-blueprint/2")),
    ("E0108", text(format="other")),
    ("E0108", text(format=1)),
    ("E0109", text().replace('"min"', "NaN").replace("{}", '{"min": NaN}')),
    ("E0109", node(attrs={"a": 10**400})),
    ("E0109", text(metadata={"a": 0}).replace('{"a": 0}', '{"a": 1e999}')),
    ("E0110", text(dims={"rows": {"min": 5, "max": 4}})),
    ("E0110", text(dims={"rows": {"min": -1}})),
    ("E0110", text(dims={"rows": {"max": 10, "tune": [11]}})),
    ("E0110", leaf(shape=[-1])),
    ("E0110", text(dims={"rows": {"min": 5, "max": 7, "multiple_of": 8}})),
    ("E0111", leaf(init={"kind": "magic"})),
    ("E0111", leaf(init={"kind": "normal", "low": 1})),
    ("E0111", leaf(init={"kind": "constant"})),
    ("E0111", leaf(init="magic")),
    (
        "E0112",
        text(
            constants={"k": {"dtype": "float32", "shape": [1], "data": {"file": "../a", "sha256": "0" * 64}}}
        ),
    ),
]


@pytest.mark.parametrize(("code", "data"), BAD, ids=[f"{c}-{i}" for i, (c, _) in enumerate(BAD)])
def test_bad_text(code: str, data: str) -> None:
    with pytest.raises(EsperError) as caught:
        parse(data)
    assert caught.value.code == code, caught.value
    assert caught.value.message


def test_limits_exit_with_fifteen() -> None:
    with pytest.raises(EsperError) as caught:
        parse(b" " * (64 * 2**20 + 1))
    assert (caught.value.code, caught.value.exit_code) == ("E0102", 15)


def test_bytes_that_are_no_text() -> None:
    for data in (b"\xff\xfe", b"\x00", b'"\xc3', b"\xef\xbb\xbf{}"):
        with pytest.raises(EsperError):
            parse(data)


def test_missing_file() -> None:
    with pytest.raises(EsperError) as caught:
        load("/nowhere/at/all.json")
    assert (caught.value.code, caught.value.exit_code) == ("E0113", 10)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_verify_and_round_trip(path: Any) -> None:
    bp = load(path)
    assert verify(bp) == []
    assert parse(render(bp)) == bp and parse(json.dumps(to_json(bp))) == bp


def survives(data: bytes) -> str:
    """Parsing and verifying raise nothing but EsperError: its code, "" where they pass."""
    try:
        verify(parse(data))
    except EsperError as error:
        assert error.code.startswith("E0") and str(error)
        return error.code
    return ""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_truncation_at_every_byte(path: Any) -> None:
    data = path.read_bytes().rstrip()
    for end in range(len(data)):
        with pytest.raises(EsperError):
            parse(data[:end])


def mutated(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not out:
            break
        at = rng.randrange(len(out))
        kind = rng.randrange(5)
        if kind == 0:
            out[at] = rng.randrange(256)
        elif kind == 1:
            del out[at : at + rng.randint(1, 20)]
        elif kind == 2:
            out[at:at] = rng.choice(
                [b"{", b"}", b"[", b'"', b",", b"-", b"1e9", b"null", b"\\u12", b"9" * 25, b"-1"]
            )
        elif kind == 3:
            other = rng.randrange(len(out))
            out[at : at + 8] = out[other : other + 8]
        else:
            start = rng.randrange(len(out))
            out[at:at] = out[start : start + rng.randint(1, 60)]
    return bytes(out)


def swapped(document: Any, rng: random.Random) -> Any:
    """Well-formed JSON with values exchanged: gets past the reader into meaning."""
    pool = [
        0,
        -1,
        2**40,
        1.5,
        True,
        None,
        "",
        "x",
        "y",
        "rows",
        [],
        {},
        "float16",
        "matmul",
        "sum",
        [1],
        "rows*rows",
    ]
    if rng.random() < 0.04:
        return rng.choice(pool)
    if isinstance(document, dict):
        return {k: swapped(v, rng) for k, v in document.items() if rng.random() > 0.01}
    if isinstance(document, list):
        return [swapped(v, rng) for v in document]
    return document


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_random_mutation(path: Any) -> None:
    data = path.read_bytes()
    rng = random.Random(7)
    codes = {survives(mutated(data, rng)) for _ in range(400)}
    assert len(codes - {""}) > 1, "bytes that are not the example's are refused in several ways"
    codes = {survives(json.dumps(swapped(json.loads(data), rng)).encode()) for _ in range(400)}
    assert len(codes - {""}) > 1, codes


def test_schema_names_every_section() -> None:
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org")
    assert set(to_json(load(EXAMPLES[0]))) <= set(schema["properties"])
    assert json.loads(json.dumps(schema)) == schema


def test_the_shipped_schema_is_this_one(request: pytest.FixtureRequest) -> None:
    path = ROOT / "esper_ir" / "blueprint.schema.json"
    text = json.dumps(json_schema(), indent=1) + "\n"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "stale: pytest --update-golden writes it"
