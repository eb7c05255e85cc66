"""Manifests that lie and machine code that was tampered with are refused before anything runs, and never
break the judge itself; what is for another machine is blamed on nobody."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
import torch

from gauntlet import cubin
from gauntlet.elf import Malformed
from gauntlet.extents import Range, interval, outside
from gauntlet.isolate import ForkServer
from gauntlet.runner import judge
from gauntlet.stage import Context, Failed, Outcome, Passed
from gauntlet.stages import integrity
from gauntlet.subject import Subject
from library.launch import SIZE_OPS, Size, evaluate
from library.manifest import pack, unpack
from tests.faults import corpus, handmade, toys

Manifest = dict[str, Any]


def _open(container: bytes) -> tuple[Manifest, list[tuple[str, str, bytes]]]:
    made = unpack(container)
    manifest = json.loads(json.dumps(made.manifest))
    blobs = [(b["name"], b["kind"], bytes(made.blobs[b["name"]])) for b in manifest["blobs"]]
    return {k: v for k, v in manifest.items() if k not in ("artifact_id", "blobs")}, blobs


def _integrity(manifest: Manifest, blobs: list[tuple[str, str, bytes]]) -> Outcome:
    subject = Subject(unpack(pack(manifest, blobs)), torch.device("cpu"))
    return integrity.STAGE.run(Context(subject, lambda event: None))


# -- code for a card, judged where there is none


@pytest.fixture(scope="module")
def card() -> bytes:
    pytest.importorskip("triton")
    data = next(d for d in corpus.blueprints() if d["name"] == "scale_shift_40_f32")
    return corpus.compiled(data, "h100").container


def _table(change: Callable[[list[Manifest]], None]) -> Callable[[Manifest], None]:
    """A change of the first kernel's parameter table."""

    def changed(manifest: Manifest) -> None:
        change(manifest["launch"]["kernels"][0]["params"])

    return changed


def _kernel(**fields: Any) -> Callable[[Manifest], None]:
    return lambda manifest: manifest["launch"]["kernels"][0].update(fields)


def _target(**fields: Any) -> Callable[[Manifest], None]:
    return lambda manifest: manifest["target"].update(fields)


LIES: dict[str, tuple[Callable[[Manifest], None], str]] = {
    "a parameter left out": (_table(lambda t: t.pop()), "parameter table"),
    "a parameter too many": (
        _table(lambda t: t.append({"kind": "ptr", "offset": 64, "size": 8})), "parameter table",
    ),
    "two parameters swapped": (_table(lambda t: t.insert(0, t.pop())), "parameter table"),
    "a pointer for a number": (
        _table(lambda t: next(p for p in t if p["kind"] == "i32").update(kind="ptr", size=8)),
        "parameter table",
    ),
    "a number for a pointer": (_table(lambda t: t[0].update(kind="i64")), "which takes"),
    "another width": (_table(lambda t: t[0].update(size=4)), "wrong kind or size"),
    "another offset": (_table(lambda t: t[1].update(offset=4)), "parameter table"),
    "no scratch pointers": (_kernel(scratch=0), "parameter table"),
    "no such entry": (_kernel(entry="elsewhere"), "no entry"),
    "no warps": (_kernel(warps=0), "warps"),
    "less than no shared memory": (_kernel(shared=-1), "shared memory"),
    "more shared memory than there is": (_kernel(shared=1 << 30), "shared memory"),
    "code for an older card": (_target(arch="sm_80"), "machine code for sm_90"),
    "an architecture that only looks like it": (_target(arch="sm_900"), "machine code for sm_90"),
    "no architecture": (_target(arch="90"), "machine code for sm_90"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_code_for_a_card_is_refused(card: bytes, lie: str) -> None:
    manifest, blobs = _open(card)
    assert isinstance(_integrity(manifest, blobs), Passed)
    change, sign = LIES[lie]
    change(manifest)
    found = _integrity(manifest, blobs)
    assert isinstance(found, Failed) and sign in found.reason, found


def _code(card: bytes, change: Callable[[bytearray], None]) -> Outcome:
    manifest, blobs = _open(card)
    (name, kind, data), *rest = blobs
    code = bytearray(data)
    change(code)
    return _integrity(manifest, [(name, kind, bytes(code)), *rest])


@pytest.mark.parametrize("arch", [0, 9, 80, 100])
def test_code_of_another_architecture_is_refused(card: bytes, arch: int) -> None:
    """By the file itself, whatever the manifest says; 0 and 9 are part of "sm_90"."""

    def other(code: bytearray) -> None:
        (flags,) = struct.unpack_from("<I", code, 48)
        struct.pack_into("<I", code, 48, flags & ~0xFF | arch)

    found = _code(card, other)
    assert isinstance(found, Failed) and f"machine code for sm_{arch}," in found.reason


def test_two_sections_of_one_name_are_refused(card: bytes) -> None:
    """Which of two tables a driver reads, nobody knows."""
    names = sorted(cubin.read(_open(card)[1][0][2]).kernels)
    first, second = next((a, b) for a, b in combinations(names, 2) if len(a) == len(b))
    one, two = (f".nv.info.{name}\0".encode() for name in (first, second))

    def twice(code: bytearray) -> None:
        at = code.index(two)
        code[at : at + len(two)] = one

    found = _code(card, twice)
    assert isinstance(found, Failed) and "two sections" in found.reason


def test_corrupted_code_for_a_card_never_breaks_the_judge(card: bytes) -> None:
    good = _open(card)[1][0][2]
    rng, refused = random.Random(4), 0
    table = struct.unpack_from("<Q", good, 40)[0]
    for _turn in range(300):
        data = bytearray(good[: rng.choice((len(good), rng.randrange(64, len(good))))])
        for _ in range(rng.randrange(1, 6)):
            low = rng.choice((0, min(table, len(data) - 1)))
            data[rng.randrange(low, min(low + 4096, len(data)))] = rng.randrange(256)
        try:
            cubin.read(bytes(data))
        except Malformed:
            refused += 1
    assert refused > 100
    short = _code(card, lambda code: code.__delitem__(slice(200, None)))
    assert isinstance(short, Failed) and "machine code" in short.reason


# -- sizes


def _spike(at: int, height: int) -> Size:
    """`height` at one size, 0 elsewhere: corners and samples show nothing."""
    off = ("sub", "rows", at)
    return ("mul", ("max", 0, ("sub", 1, ("mul", off, off))), height)


def test_a_grid_that_is_huge_for_one_size_only_is_refused() -> None:
    manifest, blobs = _open(handmade.build(toys.affine()))
    for where in ("grid", "shape"):
        forged = json.loads(json.dumps(manifest))
        spike = json.loads(json.dumps(_spike(777, 1 << 41)))
        plan = forged["launch"]["plans"][0]
        if where == "grid":
            plan["steps"][0]["grid"][0] = ["add", plan["steps"][0]["grid"][0], spike]
        else:
            plan["buffers"].append(
                {"name": "more", "source": "temp", "index": 0, "dtype": "float32", "shape": [spike]}
            )
        found = _integrity(forged, blobs)
        assert isinstance(found, Failed) and "'rows': 777" in found.reason, found


def test_a_size_that_does_not_fit_its_parameter_is_refused() -> None:
    manifest, blobs = _open(handmade.build(toys.affine()))
    plan = manifest["launch"]["plans"][0]
    number = next(a for a in plan["steps"][0]["args"] if a["kind"] == "size")
    number["value"] = ["mul", "rows", 1 << 30]
    kinds = {p["kind"] for k in manifest["launch"]["kernels"] for p in k["params"]}
    found = _integrity(manifest, blobs)
    assert isinstance(found, Failed) == ("i32" in kinds), (found, kinds)


@pytest.mark.parametrize(("most", "sane"), [(1 << 21, True), (1 << 40, False)])
def test_sizes_that_no_memory_holds_together_are_no_lie(most: int, sane: bool) -> None:
    """Each of two may be large alone: 2^21 rows of 2^20 tokens are within the range, never allocated."""
    manifest, blobs = _open(handmade.build(toys.affine()))
    dims = manifest["launch"]["interface"]["dims"]
    dims.append({**dims[0], "name": "batch", "min": 1, "max": 1 << 20, "multiple_of": 1})
    dims[0] |= {"min": 1, "max": most, "multiple_of": 1}
    shape = [dims[0]["name"], "batch"]
    buffer = {"name": "wide", "dtype": "float32", "shape": shape, "source": "temp", "index": 0}
    plan = manifest["launch"]["plans"][0]
    plan["buffers"].append(buffer)
    plan["bucket"] = []
    subject = Subject(unpack(pack(manifest, blobs)), torch.device("cpu"))
    found = list(integrity._extents(subject, subject.launch.plans[0]))
    assert (not any("'wide'" in line for line in found)) is sane, found


def _expression(rng: random.Random, depth: int) -> Size:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(("a", "b", rng.randrange(-4, 9)))
    return (rng.choice(SIZE_OPS), _expression(rng, depth - 1), _expression(rng, depth - 1))


def _values(size: Size, ranges: dict[str, Range]) -> Iterator[int]:
    for a in ranges["a"].values():
        for b in ranges["b"].values():
            yield evaluate(size, {"a": a, "b": b})


def test_intervals_hold_every_value() -> None:
    """Against trying everything, over random expressions."""
    rng, ranges, told = random.Random(8), {"a": Range(1, 12), "b": Range(4, 24, 4)}, 0
    for _ in range(1500):
        size = _expression(rng, 3)
        found = interval(size, ranges)
        if found is None:
            continue
        values = list(_values(size, ranges))
        assert found[0] <= min(values) and max(values) <= found[1], size
        assert bool(outside((size,), ranges, 0, 40)) == (min(values) < 0 or max(values) > 40), size
        told += 1
    assert told > 500


def test_what_cannot_be_bounded_is_refused() -> None:
    ranges = {"a": Range(1, 1 << 30), "b": Range(1, 1 << 30)}
    assert "cannot be bounded" in outside((("sub", ("mul", "a", "b"), "a"),), ranges, 0, 1 << 62)
    assert outside((("sub", ("mul", "a", 2), "a"),), {"a": Range(1, 4096)}, 0, 1 << 40) == ""
    assert outside((("mul", "a", "b"),), ranges, 0, 1 << 40) and not outside(("a", 2), ranges, 0, 1 << 31)


# -- forged manifests


VALUES: tuple[Any, ...] = (
    -1, 0, 1, 7, 1 << 40, -(1 << 70), True, None, 1.5, "", "rows", "x", "y", [], {}, ["mul", "rows", "rows"],
    ["floordiv", "rows", 0], ["mod", "rows", ["sub", "rows", "rows"]], ["sub", "rows", 4000], "float32",
    "float8", "extern", "kernel", "input", "saved", "cotangent", "ptr", "backward",
)  # fmt: skip


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from _places(value, (*path, key))


def _forged(manifest: Manifest, rng: random.Random) -> Manifest:
    """One to three places of the launch manifest with something else in them, or nothing."""
    forged = json.loads(json.dumps(manifest))
    for _ in range(rng.choice((1, 1, 2, 3))):
        path = rng.choice(list(_places(forged["launch"]))[1:])
        at = forged["launch"]
        for key in path[:-1]:
            at = at[key]
        if rng.random() < 0.8:
            at[path[-1]] = rng.choice(VALUES)
        else:
            del at[path[-1]]
    return forged


@pytest.mark.parametrize("make", [toys.affine, toys.dense])
def test_forged_manifests_never_break_the_judge(make: Callable[[], handmade.Toy]) -> None:
    """An exception there would leave the artifact without a verdict, again and again."""
    manifest, blobs = _open(handmade.build(make()))
    rng = random.Random(11)
    found = [_integrity(_forged(manifest, rng), blobs) for _ in range(250)]
    assert sum(isinstance(one, Failed) for one in found) > 200
    assert all(isinstance(one, Failed | Passed) for one in found)


def test_memory_of_no_type_is_refused() -> None:
    """Of a temporary too, which nothing outside declares."""
    manifest, blobs = _open(handmade.build(toys.affine()))
    forged = json.loads(json.dumps(manifest))
    (temporary, *_) = [b for p in forged["launch"]["plans"] for b in p["buffers"] if b["source"] == "temp"]
    temporary["dtype"] = "input"
    found = _integrity(forged, blobs)
    assert isinstance(found, Failed) and "'input', which there is not" in found.reason


@pytest.mark.slow
def test_what_integrity_lets_through_gets_a_verdict(server: ForkServer) -> None:
    manifest, blobs = _open(handmade.build(toys.affine()))
    rng, judged = random.Random(12), 0
    while judged < 25:
        forged = _forged(manifest, rng)
        if forged == manifest or isinstance(_integrity(forged, blobs), Failed):
            continue
        found = judge(pack(forged, blobs), "cpu", server, quick=True)
        assert found.passed is not None, (found.reason, forged["launch"])
        judged += 1


# -- another machine


def test_an_artifact_for_another_processor_is_blamed_on_nobody(server: ForkServer) -> None:
    manifest, blobs = _open(handmade.build(toys.affine()))
    manifest["target"]["arch"] = "x86-64-v9"
    found = judge(pack(manifest, blobs), "cpu", server, quick=True)
    assert found.passed is None and "E0903" in found.reason, found
