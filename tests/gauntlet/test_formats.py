"""What is written and read: cases, reports, machine code; all of it survives malformed bytes."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest

from esper_ir.diagnostics import EsperError
from gauntlet import cases, elf
from gauntlet.report import UNMEASURED, WEP, StageReport, UrabraskValidationReport
from library.manifest import unpack
from tests.faults import handmade, toys

RAW = cases.Raw("float32", (2, 2), bytes(range(16)))
CASE = cases.Case(
    "a-cpu-fast-1",
    "numerics",
    "because",
    {"dims": {"rows": 2}},
    {"x": RAW, "n": cases.Raw("int64", (0,), b"")},
)


def test_a_case_comes_back(tmp_path: Path) -> None:
    path = cases.save(tmp_path / "cases", cases.encode(CASE))
    assert cases.load(tmp_path / "cases", path.stem[:10]) == CASE == cases.load(tmp_path, str(path))
    assert (
        cases.save(tmp_path / "cases", cases.encode(CASE)) == path and len(list(path.parent.iterdir())) == 1
    )


def test_a_case_is_a_safetensors_file() -> None:
    from esper_ir.safetensors import read_tensor

    found = read_tensor(cases.encode(CASE), "x")
    assert list(found.shape) == [2, 2] and found.view(-1).numpy().tobytes() == RAW.data


def test_a_changed_case_is_refused(tmp_path: Path) -> None:
    path = cases.save(tmp_path, cases.encode(CASE))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(EsperError) as refused:
        cases.load(tmp_path, path.stem)
    assert refused.value.code == "E0905" and refused.value.exit_code == 11


def test_malformed_cases_are_refused_by_name() -> None:
    good, rng = cases.encode(CASE), random.Random(1)
    for _ in range(400):
        data = bytearray(good[: rng.randrange(len(good) + 1)])
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            cases.decode(bytes(data))
        except EsperError as error:
            assert error.code == "E0905"


def test_what_was_not_measured_says_so() -> None:
    report = UrabraskValidationReport(
        "a", True, "", (StageReport("loads", "passed", 0.1),), WEP(load_us=3.0), {}, 1.0, 2.0
    )
    data = json.loads(json.dumps(report.to_json()))
    assert UrabraskValidationReport.of(data) == report
    assert (
        data["wep"]["load_us"] == 3.0 and data["wep"]["power_watts_avg"] == UNMEASURED == data["risk_score"]
    )
    assert 0 not in data["wep"].values()
    with pytest.raises(ValueError, match="latency_seconds"):
        WEP.of({"latency_seconds": 1})


def _object(toy: handmade.Toy) -> bytes:
    return bytes(unpack(handmade.build(toy)).blobs["code.so"])


def test_a_shared_object_is_read() -> None:
    code = elf.read(_object(toys.softmax()))
    assert {"softmax_fwd", "softmax_bwd"} <= set(code.exports) and "expf" in code.imports
    assert not code.constructors and not code.search and code.state == 0


def test_code_that_runs_on_loading_or_keeps_state_is_seen() -> None:
    affine = toys.affine()
    early = handmade.edit(
        affine, ("KERNEL(affine_fwd)", "__attribute__((constructor)) void early(void) {}\nKERNEL(affine_fwd)")
    )
    assert elf.read(_object(early)).constructors
    stateful = handmade.edit(affine, ("KERNEL(affine_fwd)", "int counter = 1;\nKERNEL(affine_fwd)"))
    assert elf.read(_object(stateful)).state >= 4


def test_malformed_objects_are_refused() -> None:
    good, rng = _object(toys.affine()), random.Random(2)
    refused = 0
    for _ in range(600):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(0, 1024)] = rng.randrange(256)
        try:
            elf.read(bytes(data[: rng.choice((len(data), rng.randrange(len(data))))]))
        except elf.Malformed:
            refused += 1
    assert refused > 100
    with pytest.raises(elf.Malformed):
        elf.read(struct.pack("<16s", b"\x7fELF"))
