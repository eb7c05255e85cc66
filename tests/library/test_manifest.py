"""The container: one spelling, and a reader that believes nothing."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper_ir.diagnostics import EsperError
from library.canon import canonical_json, parse_json, sha256_hex
from library.manifest import (
    ALIGN,
    MAGIC,
    artifact_id_of,
    blueprint_document,
    blueprint_text,
    pack,
    unpack,
)
from tests.library.helpers import make_container, make_manifest, old_manifest, text_of

HEAD = len(MAGIC) + 8


def respell(data: bytes, change: Any) -> bytes:
    """The container with its manifest changed and all else adapted, so that only the change is wrong."""
    (length,) = struct.unpack_from("<Q", data, len(MAGIC))
    manifest = parse_json(data[HEAD : HEAD + length])
    base = -(-(HEAD + length) // ALIGN) * ALIGN
    change(manifest)
    text = canonical_json(manifest)
    end = HEAD + len(text)
    return MAGIC + struct.pack("<Q", len(text)) + text + b"\0" * (-end % ALIGN) + data[base:]


@given(st.lists(st.binary(max_size=200), max_size=5))
@settings(max_examples=50)
def test_round_trip(blobs: list[bytes]) -> None:
    named = [(f"b{i}", "elf", data) for i, data in enumerate(blobs)]
    data = pack(make_manifest(), named)
    assert data == pack(make_manifest(), named)
    found = unpack(data)
    assert {n: bytes(v) for n, v in found.blobs.items()} == {n: b for n, _, b in named}
    assert all(row["offset"] % ALIGN == 0 for row in found.manifest["blobs"])
    assert unpack(data, verified=True).manifest == found.manifest


def test_id_is_what_the_fields_spell() -> None:
    manifest = unpack(make_container()).manifest
    blueprint, version = manifest["blueprint"]["id"], manifest["version"]
    assert (
        manifest["artifact_id"] == f"{blueprint[:12]}-cpu-v3-fast-{version[:8]}" == artifact_id_of(manifest)
    )


def test_every_cut_and_every_extension_is_refused() -> None:
    data = make_container(size=100)
    for end in [*range(0, len(data), 7), len(data) - 1]:
        with pytest.raises(EsperError) as error:
            unpack(data[:end])
        assert error.value.exit_code == 11, end
    for tail in (b"\0", b"x" * 64):
        with pytest.raises(EsperError) as error:
            unpack(data + tail)
        assert error.value.code == "E0732"


def test_any_flipped_byte_is_refused_or_changes_the_digest() -> None:
    """Free text may change and still parse: then the digest that the signature covers differs."""
    data = make_container(size=64)
    refused = 0
    for i in range(len(data)):
        changed = bytearray(data)
        changed[i] ^= 0x20
        try:
            unpack(bytes(changed))
        except EsperError as error:
            assert error.exit_code in (11, 15, 16), (i, error)
            refused += 1
        assert sha256_hex(bytes(changed)) != sha256_hex(data)
    assert refused > len(data) // 2


CHANGES: dict[str, Any] = {
    "missing key": lambda m: m.pop("launch"),
    "unknown key": lambda m: m.update(extra=1),
    "wrong type": lambda m: m.update(dims=[]),
    "bool for int": lambda m: m["blobs"][0].update(size=True),
    "other id": lambda m: m.update(artifact_id=m["artifact_id"][:-1] + "0"),
    "blueprint of the id": lambda m: m["blueprint"].update(id="0" * 64),
    "short version": lambda m: m.update(version=m["version"][:8]),
    "upper-case hash": lambda m: m["blueprint"].update(interface="AB"),
    "text that is an object": lambda m: m["blueprint"].update(text={"name": "x"}),
    "text that is a list": lambda m: m["blueprint"].update(text="[]"),
    "text that is no JSON": lambda m: m["blueprint"].update(text="{"),
    "text with a key twice": lambda m: m["blueprint"].update(text='{"a":1,"a":2}'),
    "text too deep": lambda m: m["blueprint"].update(text='{"a":' + "[" * 200 + "]" * 200 + "}"),
    "kind": lambda m: m["target"].update(kind="tpu"),
    "path in target": lambda m: m["target"].update(name="../x"),
    "determinism": lambda m: m.update(determinism="maybe"),
    "blob path": lambda m: m["blobs"][0].update(name="../../etc/passwd"),
    "blob twice": lambda m: m["blobs"][1].update(name=m["blobs"][0]["name"]),
    "blob digest": lambda m: m["blobs"][0].update(sha256="0" * 64),
    "blob offset": lambda m: m["blobs"][1].update(offset=m["blobs"][1]["offset"] + 64),
    "blobs overlap": lambda m: m["blobs"][1].update(offset=0),
    "blob size": lambda m: m["blobs"][1].update(size=m["blobs"][1]["size"] + 1),
    "negative": lambda m: m["blobs"][0].update(offset=-64),
    "huge": lambda m: m["blobs"][0].update(size=1 << 62),
    "blob dropped": lambda m: m["blobs"].pop(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_manifests_are_refused(name: str) -> None:
    with pytest.raises(EsperError) as error:
        unpack(respell(make_container(), CHANGES[name]))
    assert error.value.exit_code == 11


def test_newer_format_is_named() -> None:
    with pytest.raises(EsperError) as error:
        unpack(respell(make_container(), lambda m: m.update(format="esper-artifact/3")))
    assert error.value.code == "E0706"


def test_another_spelling_of_the_same_manifest_is_refused() -> None:
    data = make_container()
    (length,) = struct.unpack_from("<Q", data, len(MAGIC))
    text = data[HEAD : HEAD + length].replace(b'"dims":{}', b'"dims": {}')
    base = -(-(HEAD + length) // ALIGN) * ALIGN
    end = HEAD + len(text)
    other = MAGIC + struct.pack("<Q", len(text)) + text + b"\0" * (-end % ALIGN) + data[base:]
    with pytest.raises(EsperError) as error:
        unpack(other)
    assert error.value.code == "E0733"


def test_length_that_lies() -> None:
    data = bytearray(make_container())
    for value in (0, 1, len(data), 1 << 40, (1 << 64) - 1):
        data[len(MAGIC) : HEAD] = struct.pack("<Q", value)
        with pytest.raises(EsperError) as error:
            unpack(bytes(data))
        assert error.value.exit_code == 11


def test_the_text_of_a_blueprint_keeps_its_order() -> None:
    found = unpack(make_container()).manifest
    assert blueprint_text(found) == text_of(0)
    assert list(blueprint_document(found)["inputs"]) == ["z", "a"]


def test_a_container_of_the_first_format_is_read_in_order() -> None:
    """Its names were sorted; the launch interface knows their order."""
    found = unpack(pack(old_manifest(), [])).manifest
    assert list(found["blueprint"]["text"]["inputs"]) == ["a", "z"], "sorted, as the format had it"
    assert list(blueprint_document(found)["inputs"]) == ["z", "a"]
    assert list(parse_json(blueprint_text(found).encode())["inputs"]) == ["z", "a"]
    assert found["artifact_id"] == artifact_id_of(make_manifest())
