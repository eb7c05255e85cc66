"""Bundles with every value exchanged for other kinds of value, unsigned and signed by the right key: refused
by name, or an import after which everything can be read. Never a crash, never half of it.
"""

from __future__ import annotations

import base64
import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from esper_ir.diagnostics import EsperError
from library import dsse, seen
from library.audit import verify_library
from library.bundle import export_bundle, import_bundle, read_bundle, read_file
from library.canon import canonical_json
from library.contracts import KernelQuery
from library.history import audit
from library.hub import export_kernel
from library.manifest import pack
from library.repair import repair
from library.store import Library
from tests.library.helpers import contents, make_container, make_manifest, old_manifest
from tests.library.test_bundle import framed

FEW: tuple[Any, ...] = (None, -1, "../../x", [], {"a": 1})
MANY: tuple[Any, ...] = (
    *FEW,
    True,
    0,
    1.5,
    "",
    "\0",
    {},
    [[]],
    [None],
    "A" * 100,
    1 << 70,
    10**400,
    "\u00e9",
    [{}],
)
Spot = tuple[str | int, ...]


@pytest.fixture
def donor(lib: Library, fast_tmp: Path) -> Path:
    """A bundle of two artifacts with everything on them."""
    report = {"policy": "p", "generated_tags": ["trainable"], "wep": {"latency_ms_p99": 1.0}}
    first = lib.put_artifact(make_container(1), side_files={"k.ptx": b"ptx"}).id
    lib.record_verdict(first, report, passed=True)
    lib.annotate(first, {"risk_score": 0.25})
    second = lib.put_artifact(make_container(2, blueprint=1)).id
    lib.record_verdict(second, {}, passed=False, reason="wrong")
    export_bundle(lib, lib.artifacts(), fast_tmp / "bundle")
    return fast_tmp / "bundle"


def spots(value: Any, path: Spot = ()) -> Iterator[Spot]:
    """Where every value of a document stands."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from spots(item, (*path, key))


def exchanged(value: Any, path: Spot, other: Any) -> Any:
    changed = copy.deepcopy(value)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = other
    return changed


def visit(data: bytes, empty: Path, work: Path) -> bool:
    """Import into a fresh copy of an empty library; whether it was taken."""
    shutil.copytree(empty, work)
    try:
        with Library.open(work) as other:
            seen.forget(other.trust.home, other.origin)  # every visit is to a copy of one library
            before = contents(work)
            try:
                import_bundle(other, data)
            except EsperError as error:
                assert error.exit_code in (2, 10, 11, 12, 13, 14, 15, 16), error
                assert contents(work) == before, "half a bundle"
                return False
            usable(other)
            return True
    finally:
        shutil.rmtree(work)


def usable(lib: Library) -> None:
    """Everything that was taken can be read back, and holds."""
    lib.find(KernelQuery(), explain=True)
    for record in lib.artifacts():
        assert lib.contract(record.id).id == record.id
        assert isinstance(lib.annotation(record.id), dict)
    assert verify_library(lib, lib.artifacts(), contents=True).findings == ()
    assert audit(lib).findings == ()


def bundles(index: Any, changed: Iterator[Any], objects: dict[str, bytes]) -> Iterator[bytes]:
    order = [row["digest"] for row in index["objects"]]
    for document in changed:
        try:
            text = canonical_json(document)
        except EsperError:
            continue  # what cannot be written as JSON at all
        yield framed(text, [objects[digest] for digest in order])


def every_value(donor: Path, fast_tmp: Path, values: tuple[Any, ...]) -> tuple[int, set[Spot]]:
    """(visited, spots where a change was taken)."""
    index, objects = read_bundle(read_file(donor))
    Library.open(fast_tmp / "empty").close()
    visited, taken = 0, set()
    for spot in spots(index):
        documents = (exchanged(index, spot, value) for value in values)
        for data in bundles(index, (d for d in documents if d != index), objects):
            visited += 1
            if visit(data, fast_tmp / "empty", fast_tmp / "work"):
                taken.add(spot)
    return visited, taken


# What a bundle may go without: its checkpoint or proofs, and notes on an artifact.
OPTIONAL = {
    ("checkpoint",),
    ("artifacts", 0, "proof"),
    ("artifacts", 1, "proof"),
    ("artifacts", 0, "annotations"),
}


def test_every_unsigned_value(donor: Path, fast_tmp: Path) -> None:
    visited, taken = every_value(donor, fast_tmp, FEW)
    assert visited > 150 and taken <= OPTIONAL


@pytest.mark.slow
def test_every_unsigned_value_long(donor: Path, fast_tmp: Path) -> None:
    visited, taken = every_value(donor, fast_tmp, MANY)
    assert visited > 600 and taken <= OPTIONAL


Get = Callable[[dict[str, Any]], str]
Put = Callable[[dict[str, Any], str], Any]
SIGNED: dict[str, tuple[str, str, Get, Put]] = {
    "provenance": (
        "compiler",
        dsse.IN_TOTO,
        lambda i: i["artifacts"][0]["envelope"],
        lambda i, e: i["artifacts"][0].update(envelope=e),
    ),
    "verdict": (
        "validator",
        dsse.IN_TOTO,
        lambda i: i["artifacts"][0]["verdicts"][0]["envelope"],
        lambda i, e: i["artifacts"][0]["verdicts"][0].update(envelope=e),
    ),
    "annotation": (
        "validator",
        dsse.IN_TOTO,
        lambda i: i["artifacts"][0]["annotations"][0],
        lambda i, e: i["artifacts"][0].update(annotations=[e]),
    ),
    "checkpoint": (
        "compiler",
        dsse.CHECKPOINT,
        lambda i: i["checkpoint"],
        lambda i, e: i.update(checkpoint=e),
    ),
    "trust": ("root", dsse.TRUST, lambda i: i["trust"], lambda i, e: i.update(trust=e)),
}


def resigned(
    lib: Library, index: dict[str, Any], what: str, values: tuple[Any, ...]
) -> Iterator[dict[str, Any]]:
    """The index with one statement changed and signed again by a key that may."""
    role, kind, get, put = SIGNED[what]
    payload = json.loads(base64.b64decode(json.loads(base64.b64decode(get(index)))["payload"]))
    for spot in spots(payload):
        for value in values:
            statement = canonical_json(exchanged(payload, spot, value))
            changed = copy.deepcopy(index)
            put(changed, base64.b64encode(dsse.seal(statement, kind, [lib.trust.signer(role)])).decode())
            yield changed


def every_signed_value(
    lib: Library, donor: Path, fast_tmp: Path, what: str, values: tuple[Any, ...]
) -> tuple[int, int]:
    """(visited, taken): a trusted key signs nonsense."""
    index, objects = read_bundle(read_file(donor))
    Library.open(fast_tmp / "empty").close()
    visited, taken = 0, 0
    for data in bundles(index, resigned(lib, index, what, values), objects):
        visited += 1
        taken += visit(data, fast_tmp / "empty", fast_tmp / "work")
    return visited, taken


@pytest.mark.parametrize("what", SIGNED)
def test_every_signed_value(lib: Library, donor: Path, fast_tmp: Path, what: str) -> None:
    visited, taken = every_signed_value(lib, donor, fast_tmp, what, FEW[:3])
    assert visited >= 15 and taken < visited / 2


@pytest.mark.slow
@pytest.mark.parametrize("what", SIGNED)
def test_every_signed_value_long(lib: Library, donor: Path, fast_tmp: Path, what: str) -> None:
    visited, taken = every_signed_value(lib, donor, fast_tmp, what, MANY)
    assert visited >= 80 and taken < visited


def test_an_annotation_speaks_only_about_its_own_fields(lib: Library) -> None:
    """Even signed, it does not change what was measured."""
    artifact = lib.put_artifact(make_container(1)).id
    lib.record_verdict(artifact, {"policy": "p", "wep": {"latency_ms_p99": 1.0}}, passed=True)
    with pytest.raises(EsperError):
        lib.annotate(artifact, {"wep": {"latency_ms_p99": 0.001}})
    lib.annotate(artifact, {"risk_score": 0.5})
    (match,) = lib.find(KernelQuery()).matches
    assert (match.latency_ms, match.risk) == (1.0, 0.5)


def containers(old: bool, values: tuple[Any, ...]) -> Iterator[tuple[Spot, bytes]]:
    """Containers whose manifest has one value exchanged, and whose id and digests fit again."""
    made, now = old_manifest(), make_manifest()
    made |= {} if old else {"format": now["format"], "blueprint": now["blueprint"]}
    for spot in spots(made):
        for value in values:
            try:
                yield spot, pack(exchanged(made, spot, value), [("code", "elf", b"code")])
            except EsperError:
                continue  # the writer refuses it already


def lived(lib: Library, data: bytes, place: Path) -> None:
    """Stored, proven, read, repaired, exported both ways."""
    artifact = lib.put_artifact(data).id
    lib.record_verdict(artifact, {"policy": "p"}, passed=True)
    usable(lib)
    assert repair(lib, lib.artifacts(), {}) == []
    assert json.loads(lib.blueprint_text(lib.record(artifact).blueprint)).keys()
    export_bundle(lib, lib.artifacts(), place.with_suffix(".bundle"))
    export_kernel(lib, lib.record(artifact), place.with_suffix(".kernel"))


@pytest.mark.parametrize("old", [False, True], ids=["now", "before"])
def test_every_value_of_a_manifest(home: Path, fast_tmp: Path, old: bool) -> None:
    """What the grammar lets through can be used in every way, or is refused by name."""
    visited = 0
    for spot, data in containers(old, FEW):
        visited += 1
        place = fast_tmp / f"l{visited}"
        with Library.open(place) as lib:
            try:
                lived(lib, data, place)
            except EsperError as error:
                assert error.exit_code in (2, 11, 12, 16), (spot, error)
        shutil.rmtree(place)
    assert visited > 60
