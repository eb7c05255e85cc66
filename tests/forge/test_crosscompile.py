"""Machine code for cards that are not here: a shrunken norm for every architecture."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import esper_ir.text as text
from esper_ir.builder import Builder
from esper_ir.graph import Blueprint
from esper_ir.opdef import Pointwise
from esper_ir.registry import OPS
from esper_ir.types import DType, TensorType
from forge.emit.triton import emit
from forge.pass_manager import run
from forge.pipelines import pipeline
from forge.ptx import entries
from forge.service import front
from forge.target import resolve
from forge.toolchain import SCRATCH_POINTERS, request
from forge.work import Work
from library.launch import Kernel
from runtime.sandbox import Limits, run_worker

EXAMPLE = Path(__file__).parents[2] / "examples" / "rmsnorm_residual.json"
ELF_CUDA, ELF_AMD = 190, 224
OTHERS = ("a100", "b200", "t4", "mi300x")


def shrunken(dtype: str) -> Blueprint:
    data = json.loads(EXAMPLE.read_text())
    for part in ("inputs", "params"):
        for leaf in data[part].values():
            leaf["shape"] = [128 if s == 4096 else s for s in leaf["shape"]]
            leaf["dtype"] = dtype
    data["dims"]["rows"]["tune"] = [64]
    return text.parse(json.dumps(data))


def built(name: str) -> Work:
    target = resolve(name)
    dtype = "bfloat16" if DType.bfloat16 in target.dtypes else "float16"
    return run(pipeline("fast"), Work(shrunken(dtype), target, "fast"))


def elf(data: bytes) -> tuple[int, int]:
    """(machine, flags) of an ELF file of 64-bit little-endian code."""
    assert data[:4] == b"\x7fELF" and data[4] == 2 and data[5] == 1
    machine = struct.unpack_from("<H", data, 18)[0]
    return machine, struct.unpack_from("<I", data, 48)[0]


def check(name: str) -> None:
    work, target = built(name), resolve(name)
    assert work.built is not None
    for _, kind, data in work.built.blobs:
        machine, flags = elf(data)
        if target.kind == "hip":
            assert kind == "hsaco" and machine == ELF_AMD
        else:
            # Where the architecture stands in the flags depends on the ABI; 12.x writes it in one of two
            # bytes.
            assert kind == "cubin" and machine == ELF_CUDA
            assert target.capability in (flags & 0xFF, (flags >> 8) & 0xFF), hex(flags)
    phases = {low.phase.name for low in work.lowerings}
    assert phases == {"inference", "forward", "backward"} and len(work.built.kernels) == len(
        work.kernels.by_key
    )
    assert work.container and work.manifest["target"]["name"] == name


def test_h100_has_the_parameter_table_of_its_ptx() -> None:
    """What the manifest says of every entry is what stands in the module, with the two scratch pointers
    behind.
    """
    work = built("h100")
    assert work.built is not None
    found = {e.name: e.params for e in entries(work.built.side_files["module.ptx"].decode())}
    kernels: tuple[Kernel, ...] = work.built.kernels
    assert found.keys() == {k.entry for k in kernels}
    for kernel in kernels:
        theirs = found[kernel.entry]
        assert [(p.offset, p.size) for p in kernel.params] == [
            (p.offset, p.size) for p in theirs[: len(kernel.params)]
        ]
        assert len(theirs) == len(kernel.params) + SCRATCH_POINTERS == len(kernel.params) + kernel.scratch
        assert kernel.warps in (1, 2, 4, 8, 16) and kernel.registers > 0 and kernel.spills == 0
    ((_, _, cubin),) = work.built.blobs
    machine, _ = elf(cubin)
    assert machine == ELF_CUDA and cubin in work.container
    tools = work.built.toolchain
    assert tools["arch"] == "sm_90a" and tools["triton"] and tools["ptxas"] and tools["fp_fusion"] is True


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_cards(name: str) -> None:
    check(name)


def test_every_scalar_operator_has_a_text() -> None:
    for blueprint in operators():
        work = front(blueprint, "h100")
        assert all("def " in emit(s.plan) for s in work.kernels.by_key.values()), blueprint.name


def operators() -> list[Blueprint]:
    """One blueprint per element type with every pointwise operator, over the samples of its record."""
    out = []
    for name, op in sorted(OPS.items()):
        if not isinstance(op.lowering, Pointwise):
            continue
        b = Builder(name)
        made = []
        for i, s in enumerate(op.samples):
            operands = [
                b.input(f"a{i}_{k}", t.dtype, t.shape) if isinstance(t, TensorType) else t
                for k, t in enumerate(s.operands)
            ]
            made.append(b.op(name, *operands, **s.attrs))
        out.append(b.build(*made, differentiable=[]))
    return [*out, drawn()]


def drawn() -> Blueprint:
    """Arithmetic of whole numbers of 64 bits, with rests and powers, a quotient of a fraction by a whole
    number, and a sum of truth values."""
    b = Builder("drawn")
    b.dim("rows", max=64, tune=(8,))
    y = b.input("y", "float32", ["rows", 6])
    mean = b.div(b.sum(y), b.full(shape=(), value="rows", dtype="int64"))
    x, seed = b.input("x", "float32", [4, 6]), b.input("seed", "int64", [1])
    k, yes = b.input("k", "int64", [4, 6]), b.input("yes", "bool", [4, 6])
    whole = b.add(b.pow(2, k), b.pow(k, k))
    outs = b.dropout(x, seed, p=0.25), b.randn(seed, shape=(4, 6)), mean, whole, b.add(yes, yes)
    return b.build(*outs, differentiable=[])


def test_triton_takes_rests_of_whole_numbers() -> None:
    target = resolve("h100")
    made = tuple(s for s in front(drawn(), "h100").kernels.by_key.values() if s.variant == "a")
    done = run_worker(
        "forge.build_worker", {**request(made, target), "stage": "compile"}, Limits(seconds=200.0)
    )
    assert done["code"].keys() == {s.plan.name for s in made}


def compiled(*blueprints: Blueprint, target: str = "h100") -> bool:
    """Whether every kernel of any sizes has PTX; the worker refuses what Triton refuses."""
    sources = []
    for blueprint in blueprints:
        made = [s for s in front(blueprint, target).kernels.by_key.values() if s.variant == "a"]
        sources += [replace(s, plan=replace(s.plan, name=f"{blueprint.name}_{s.plan.name}")) for s in made]
    asked = {**request(tuple(sources), resolve(target)), "stage": "compile"}
    made_of = run_worker("forge.build_worker", asked, Limits(seconds=200.0))["code"]
    return bool(made_of) and all(".entry" in text for text in made_of.values())


def test_sizes_may_have_any_name() -> None:
    """A parameter is neither a word of the language nor a position of the kernel."""
    made = []
    for name in ("row", "col", "for", "tl", "v0", "p_0"):
        b = Builder(f"size_{name}")
        b.dim(name, min=1, max=64, tune=(8,))
        x = b.input("x", "float32", [name, 40, name, 64])
        made.append(b.build(b.softmax(x, dim=1), b.sum(x, dims=[0]), differentiable=[]))
    assert compiled(*made)
    b = Builder("first")
    b.dim("pid", min=1, max=64, tune=(8,))
    work = front(b.build(b.sum(b.input("x", "float32", ["pid", 64]), dims=[1])), "h100")
    assert all("n_pid" in emit(s.plan) for s in work.kernels.by_key.values())


def test_sweeps_may_have_any_length() -> None:
    """Columns of 64 bits are so from the first block on."""
    b = Builder("sweep")
    b.dim("n", min=1, max=2**31 - 1, tune=(1024,))
    assert compiled(
        b.build(b.sum(b.square(b.input("x", "float32", [8, 64, "n"])), dims=[2]), differentiable=[])
    )


def test_lookups_of_one() -> None:
    """A mask of a block has addresses of one."""
    b = Builder("one")
    made = b.embedding(b.input("i", "int64", [1]), b.param("e", "float32", [2, 1]))
    assert compiled(b.build(b.tanh(made)))


def test_numbers_take_the_type_of_the_other_operand() -> None:
    """libdevice has functions of two float64 values, none of one and a float32 number."""
    b = Builder("numbers")
    x, k = b.input("x", "float64", [64]), b.input("k", "int32", [64])
    outs = [b.op(op, *pair) for op in ("pow", "fmod", "atan2") for pair in ((x, 1.7), (1.7, x), (x, 2))]
    whole = [b.op(op, 2, k) for op in ("int_divide", "bitwise_left_shift", "pow")]
    assert compiled(b.build(*outs, *whole, b.op("copysign", x, -0.0), differentiable=[]))


def test_functions_of_whole_numbers() -> None:
    """Their results are float32, as torch's are; libdevice has none of them."""
    made = []
    for dtype in ("int64", "bool"):
        b = Builder(f"of_{dtype}")
        x = b.input("x", dtype, [64])
        names = ("exp", "log1p", "sqrt", "rsqrt", "erf", "sigmoid", "tanh", "cos")
        made.append(b.build(*(b.op(n, x) for n in names), b.op("atan2", x, x), b.op("xlogy", x, x)))
    b = Builder("powers")
    k, y = b.input("k", "int32", [64]), b.input("y", "float32", [64])
    outs = b.pow(k, 1.5), b.pow(k, y), b.pow(y, k), b.op("fmod", y, k), b.op("remainder", y, k)
    assert compiled(*made, b.build(*outs, differentiable=[]))


def test_columns_far_apart_have_addresses_of_64_bits() -> None:
    """2**14 columns with 2**18 elements between two of them."""
    b = Builder("far")
    x = b.input("x", "bfloat16", [2, 2**14, 2**18])
    work = front(b.build(b.softmax(x, dim=1), differentiable=[]), "h100")
    for source in work.kernels.by_key.values():
        assert source.plan.cols.static == 2**14
        lines = [line for line in emit(source.plan).splitlines() if line.strip().startswith("col = ")]
        assert lines and all("tl.int64" in line for line in lines), lines


@pytest.mark.slow
def test_triton_takes_the_text_of_every_scalar_operator() -> None:
    target, sources = resolve("h100"), []
    for blueprint in operators():
        made = [s for s in front(blueprint, "h100").kernels.by_key.values() if s.variant == "a"]
        for number, source in enumerate(made):
            plan = replace(source.plan, name=f"{blueprint.name}_{number}")
            sources.append(replace(source, plan=plan))
    asked: dict[str, Any] = {**request(tuple(sources), target), "stage": "compile"}
    done = run_worker("forge.build_worker", asked, Limits(seconds=540.0))
    assert done["code"].keys() == {s.plan.name for s in sources}


def test_less_than_zero_is_the_other_zero() -> None:
    """Triton's own minus is 0 - x, which makes one zero of both."""
    b = Builder("less")
    work = front(b.build(b.neg(b.input("x", "float32", [64])), differentiable=[]), "h100")
    made = tuple(s for s in work.kernels.by_key.values() if s.variant == "a")
    asked = {**request(made, resolve("h100")), "stage": "compile"}
    (code,) = run_worker("forge.build_worker", asked, Limits(seconds=200.0))["code"].values()
    assert not re.search(r"\bsub\.(rn\.)?f32", code) and re.search(r"neg\.f32|xor\.b32", code)
