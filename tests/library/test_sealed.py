"""The sealed form: it says what the manifest says, or the container is refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esper_ir.diagnostics import EsperError
from library import launch as lm
from library.canon import canonical_json
from library.manifest import MAGIC, SEALED, pack, unpack
from library.sealed import Sealed, SealedPlan, seal
from library.store import Library
from tests.library.helpers import make_manifest

HEAD = len(MAGIC) + 8
INTERFACE = lm.Interface(
    inputs=(
        lm.TensorSpec("x", "input", "float32", ("n", ("mul", "n", 2))),
        lm.TensorSpec("w", "param", "bfloat16", (4,)),
        lm.TensorSpec("mean", "buffer", "float32", (4,)),
        lm.TensorSpec("seed", "input", "int64", (1,)),
    ),
    outputs=(
        lm.TensorSpec("y", "output", "float32", ("n",)),
        lm.TensorSpec("next", "output", "float32", (4,)),
    ),
    dims=(lm.DimSource("n", 1, 4096, 4, (8, 64), 0, 0),),
    differentiable=("x", "w"),
    updates=(("mean", 1),),
    random=("seed",),
)
GUARD = lm.Guard((0, 1), (("n", 16), (("floordiv", "n", 4), 2)), ((("add", "n", 1), 65),))
STEP = lm.KernelStep(
    "g",
    (lm.Variant(GUARD, "k"), lm.Variant(lm.Guard(), "k2")),
    (lm.Argument("buffer", 0), lm.Argument("size", ("ceildiv", "n", 3)), lm.Argument("buffer", 2)),
    (("ceildiv", "n", 8), 2, 1),
)
CALL = lm.ExternStep(
    "e", "mm", (lm.View(0, ("n", 8), (1, 0)),), (lm.View(2),), {"precision": "ieee", "eps": 1e-6, "t": True}
)
BUFFERS = (
    lm.Buffer("x", "input", 0, "float32", ("n", ("mul", "n", 2))),
    lm.Buffer("t", "zeroed", 0, "float32", (("max", "n", 7),)),
    lm.Buffer("y", "output", 0, "float32", ("n",)),
)
KERNELS = tuple(
    lm.Kernel(n, "code", f"{n}_entry", (lm.Param("ptr", 0, 8), lm.Param("i32", 8, 4)), 4, shared, 2, 40, 1)
    for n, shared in (("k", 0), ("k2", 1024))
)
PLANS = (
    lm.Plan("inference", (lm.Bound("n", 1, 64),), (), BUFFERS, (STEP, CALL), outputs=(2, 2)),
    lm.Plan("forward", (), (), BUFFERS, (STEP,), outputs=(2, 2), saved=(0, 1)),
    lm.Plan("backward", (), ("x", "w"), (replace(BUFFERS[0], source="saved"),), (), gradients=(0, 0)),
)
LAUNCH = lm.LaunchManifest(INTERFACE, PLANS, KERNELS)


def manifest(launch: lm.LaunchManifest = LAUNCH) -> dict[str, Any]:
    return {**make_manifest(), "launch": lm.to_json(launch)}


def container(launch: lm.LaunchManifest = LAUNCH) -> bytes:
    return pack(manifest(launch), [("code", "elf", b"code"), ("more", "elf", b"m" * 70)])


def sealed_of(data: bytes) -> Sealed:
    found = unpack(data, verified=True).sealed
    assert found is not None
    return found


def test_it_says_what_the_manifest_says() -> None:
    read = sealed_of(container()).launch()
    assert read.interface == LAUNCH.interface
    assert lm.to_json(read) == lm.to_json(LAUNCH)
    for got, plan in zip(read.plans, PLANS, strict=True):
        assert (got.phase, got.bucket, got.wanted, got.buffers) == (
            plan.phase,
            plan.bucket,
            plan.wanted,
            plan.buffers,
        )
        assert (got.steps, got.outputs, got.saved, got.gradients) == (
            plan.steps,
            plan.outputs,
            plan.saved,
            plan.gradients,
        )
    for got, kernel in zip(read.kernels, KERNELS, strict=True):
        assert got.kinds == kernel.kinds == ("ptr", "i32") and got.params == kernel.params
        assert got.__dict__.items() >= kernel.__dict__.items()


def test_no_plan_is_read_before_it_is_asked_for() -> None:
    plan = sealed_of(container()).launch().plans[0]
    assert isinstance(plan, SealedPlan) and "buffers" not in plan.__dict__ and "bucket" not in plan.__dict__
    assert plan.bucket[0].high == 64 and "buffers" not in plan.__dict__
    assert plan.rows() == plan.rows() and plan.buffers[1].source == "zeroed"
    with pytest.raises(AttributeError):
        _ = plan.nothing  # type: ignore[attr-defined]
    made = replace(plan, phase="forward")
    assert made.rows() is None and made.steps == plan.steps
    kernel = replace(sealed_of(container()).launch().kernels[0], warps=8)
    assert kernel.kinds == ("ptr", "i32") and kernel.warps == 8


def respell(data: bytes, written: bytes) -> bytes:
    """The container with another sealed form, all else adapted."""
    (length,) = struct.unpack_from("<Q", data, len(MAGIC))
    (old,) = struct.unpack_from("<Q", data, HEAD + length)
    text, blobs = data[HEAD : HEAD + length], data[-(-(HEAD + length + 8 + old) // 64) * 64 :]
    start = SEALED + struct.pack("<Q", length) + text + struct.pack("<Q", len(written)) + written
    return start + b"\0" * (-len(start) % 64) + blobs


def test_another_sealed_form_is_refused() -> None:
    data = container()
    assert data.startswith(SEALED) and respell(data, seal(unpack(data).manifest)) == data
    others = (
        LAUNCH.plans[0].steps[:1],
        (replace(STEP, grid=(1, 1, 1)), CALL),
        (replace(STEP, args=STEP.args[::-1]), CALL),
    )
    forms = [seal({**unpack(data).manifest, "launch": lm.to_json(changed(steps))}) for steps in others]
    forms += [seal({**unpack(data).manifest, "externs": [{"op": "mm"}]}), b"{}", b"x"]
    for form in forms:
        assert form
        with pytest.raises(EsperError) as error:
            unpack(respell(data, form))
        assert error.value.code == "E0733" and error.value.node == "sealed"
    for form in (b"", b"\n"):
        with pytest.raises(EsperError) as error:
            unpack(respell(data, form))
        assert error.value.exit_code == 11


def changed(steps: Any) -> lm.LaunchManifest:
    return replace(LAUNCH, plans=(replace(PLANS[0], steps=steps), *PLANS[1:]))


def test_any_flipped_byte_of_it_is_refused() -> None:
    data = container()
    (length,) = struct.unpack_from("<Q", data, len(MAGIC))
    (size,) = struct.unpack_from("<Q", data, HEAD + length)
    for at in range(HEAD + length, HEAD + length + 8 + size, 11):
        flipped = bytearray(data)
        flipped[at] ^= 1
        with pytest.raises(EsperError) as error:
            unpack(bytes(flipped))
        assert error.value.exit_code in (11, 15), at


def test_it_cannot_be_taken_away_or_hidden_from_an_older_reader() -> None:
    """Without it the container is another one, with another digest; with it the first word is one that a
    reader which does not know the form refuses."""
    data = container()
    (length,) = struct.unpack_from("<Q", data, len(MAGIC))
    text = data[HEAD : HEAD + length]
    start = MAGIC + struct.pack("<Q", length) + text
    blobs = data[-(-(HEAD + length + 8 + len(seal(unpack(data).manifest))) // 64) * 64 :]
    old = start + b"\0" * (-len(start) % 64) + blobs
    found = unpack(old)
    assert found.sealed is None and found.head["title"] == unpack(data).head["title"]
    assert {n: bytes(b) for n, b in found.blobs.items()} == {
        n: bytes(b) for n, b in unpack(data).blobs.items()
    }
    with pytest.raises(EsperError):
        unpack(MAGIC + data[len(MAGIC) :])
    with pytest.raises(EsperError):
        unpack(SEALED + old[len(MAGIC) :])


def test_a_malformed_launch_manifest_is_not_sealed() -> None:
    assert pack(make_manifest(), []).startswith(MAGIC)
    assert seal({**unpack(container()).manifest, "launch": {"plans": []}}) == b""


def test_proving_looks_at_it(tmp_path: Path, esper_library: Path) -> None:
    """What a compiler key alone could put in its place is neither stored nor proven."""
    with Library.open() as library:
        lying = respell(
            container(), seal({**unpack(container()).manifest, "launch": lm.to_json(changed((CALL,)))})
        )
        with pytest.raises(EsperError) as error:
            library.put_artifact(lying)
        assert error.value.code == "E0733" and not library.artifacts()
        record = library.put_artifact(container())
        library.record_verdict(record.id, {"stages": []}, passed=True)
        loaded = library.load(record.id)
        assert loaded.container.sealed is not None and "manifest" not in loaded.container.__dict__
        assert loaded.container.manifest == unpack(container()).manifest
        assert canonical_json(loaded.container.manifest) == loaded.container.text


def test_of_the_parameters_only_the_rows_asked_for_are_read() -> None:
    lines = seal(unpack(container()).manifest).split(b"\n")
    lines[1] = lines[1].replace(b'"i32"],[0,8],[8,4]],[[', b'"i32"],[0,8],[8,4]],[[nonsense ', 1)
    first, second = Sealed(b"\n".join(lines)).launch().kernels
    assert first.params == KERNELS[0].params and first.kinds == ("ptr", "i32")
    with pytest.raises(StopIteration):
        _ = second.params


def test_kernels_with_no_parameters_stand_among_others() -> None:
    bare = replace(KERNELS[0], name="bare", params=())
    kernels = (bare, *KERNELS, replace(bare, name="bare2"), replace(bare, name="bare3"))
    read = sealed_of(container(replace(LAUNCH, kernels=kernels))).launch()
    assert [k.params for k in read.kernels] == [k.params for k in kernels]
