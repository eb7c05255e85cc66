"""The Python builder, the typed graph builder and the eager twin."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from esper_ir.builder import Builder, GraphBuilder
from esper_ir.diagnostics import EsperError
from esper_ir.eager import EagerTwin, constant_value, initialise, to_torch
from esper_ir.graph import Leaf
from esper_ir.reference import evaluate
from esper_ir.text import load, parse, render
from esper_ir.types import TensorType
from tests.source import ROOT


def mlp() -> Builder:
    b = Builder("mlp", description="test")
    b.dim("rows", max=64, tune=(8,))
    x = b.input("x", "float32", ["rows", 6])
    w = b.param("w", "float32", [6, 4], {"kind": "normal", "std": 0.5})
    b.silu(x @ w + 1.0, name="y")
    return b


def test_builder_makes_what_the_text_says() -> None:
    b = Builder("mlp")
    b.dim("rows", max=64, tune=(8,))
    x = b.input("x", "float32", ["rows", 6])
    w = b.param("w", "float32", [6, 4], "ones")
    y = b.silu(2 * (x @ w) - 1.0, name="y")
    assert str(y.type) == "float32[rows, 4]"
    bp = b.build(y)
    assert parse(render(bp)) == bp
    assert [n.op for n in bp.nodes] == ["matmul", "mul", "sub", "silu"]
    assert b.softmax(y, dim=-1).type == y.type


def test_values_are_cut_and_compared_as_in_torch() -> None:
    b = Builder("parts")
    b.dim("rows", min=2, max=64, tune=(8,))
    x = b.input("x", "float32", ["rows", 6, 5])
    keys = [
        (slice(None), 0), (-1,), (Ellipsis, slice(1, None, 2)), (None, slice(0, 2), Ellipsis, -1),
        (slice(None), slice(-3, -1)),
    ]  # fmt: skip
    made = [b.cast(x[k], dtype="float32") for k in keys]
    bp = b.build(*made, x @ x.T, 2.0**x, b.where(x < 0.5, x, -x), b.where(x >= 0.5, x, 1.0))
    data = torch.randn(4, 6, 5)
    found = to_torch(bp)(data)
    wanted = [data[k] for k in keys]
    wanted += [
        data @ data.mT,
        2.0**data,
        torch.where(data < 0.5, data, -data),
        torch.where(data >= 0.5, data, 1.0),
    ]
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(EsperError, match="E0203"):
        x[[0, 1]]


def test_builder_names_the_callers_line() -> None:
    b = Builder("b")
    x = b.input("x", "float32", [3])
    with pytest.raises(EsperError) as caught:
        b.matmul(x, x)
    assert caught.value.code == "E0204" and caught.value.hint is not None
    assert "test_builder.py:" in caught.value.hint
    with pytest.raises(EsperError) as caught:
        b.exp(Builder("c").input("x", "float32", [3]))
    assert caught.value.code == "E0403"
    for call in (lambda: b.input("x", "float32", [1]), lambda: b.exp(x, name="x")):
        with pytest.raises(EsperError) as caught:
            call()
        assert caught.value.code == "E0304"
    with pytest.raises(AttributeError):
        b.not_an_operator(x)


def test_graph_builder_shares_equal_nodes() -> None:
    kind = TensorType.of("float32", [3])
    b = GraphBuilder({"x": kind})
    x = b.value("x")
    first, second = b("exp", x), b("exp", x)
    assert first == second
    assert b("mul", x, 1.0) != b("mul", x, 1)
    graph = b.graph({"out": first, "again": first, "x2": x})
    assert graph.outputs == ("out", "again", "x2")
    values = evaluate(graph, {"x": torch.ones(3)})
    assert torch.equal(values["out"], values["again"]) and torch.equal(values["x2"], torch.ones(3))


def test_eager_twin_trains() -> None:
    twin = to_torch(load(ROOT / "examples" / "digits_block.json"))
    assert sorted(n for n, _ in twin.named_parameters()) == ["w", "w1", "w2"]
    x = torch.randn(5, 64)
    h = torch.nn.functional.rms_norm(x, (64,), twin.w, 1e-6)
    wanted = x + torch.nn.functional.gelu(h @ twin.w1) @ twin.w2
    torch.testing.assert_close(twin(x), wanted)
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    for bad in (torch.randn(5, 63), torch.randn(64), torch.randn(5, 64).double()):
        with pytest.raises(EsperError) as caught:
            twin(bad)
        assert caught.value.code == "E0402"
    with pytest.raises(EsperError):
        twin(x, x)


INITS = [
    ("zeros", {}, 0.0, 0.0), ("ones", {}, 1.0, 0.0), ("constant", {"value": 3.0}, 3.0, 0.0),
    ("normal", {"mean": 1.0, "std": 0.5}, 1.0, 0.5), ("uniform", {"low": -1.0, "high": 1.0}, 0.0, 3**-0.5),
    ("kaiming_uniform", {}, 0.0, (1 / 3 / 200) ** 0.5), ("xavier_uniform", {}, 0.0, (2 / 500) ** 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "numbers", "mean", "std"), INITS, ids=[r[0] for r in INITS])
def test_initialisers(kind: str, numbers: dict[str, float], mean: float, std: float) -> None:
    leaf = Leaf("w", "param", TensorType.of("float32", [300, 200]), {"kind": kind, **numbers})
    value = initialise(leaf, torch.Generator().manual_seed(0))
    assert torch.equal(value, initialise(leaf, torch.Generator().manual_seed(0)))
    assert value.mean().item() == pytest.approx(mean, abs=0.02) and value.std().item() == pytest.approx(
        std, rel=0.05
    )


def test_initialiser_of_unknown_size() -> None:
    with pytest.raises(EsperError) as caught:
        initialise(Leaf("w", "param", TensorType.of("float32", ["n"])))
    assert caught.value.code == "E0404"
    assert (
        initialise(Leaf("w", "param", TensorType.of("bfloat16", [2]), {"kind": "ones"})).dtype
        is torch.bfloat16
    )


def test_constants_inline_and_in_a_file(tmp_path: Path) -> None:
    import hashlib

    header = json.dumps({"k": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    data = struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.5, -2.0)
    (tmp_path / "k.safetensors").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    kind = TensorType.of("float32", [2])
    stored = Leaf("k", "constant", kind, data={"file": "k.safetensors", "sha256": digest})
    assert constant_value(stored, tmp_path).tolist() == [1.5, -2.0]
    assert constant_value(Leaf("k", "constant", kind, data=(1.5, -2.0))).tolist() == [1.5, -2.0]
    wrong = Leaf("k", "constant", kind, data={"file": "k.safetensors", "sha256": "0" * 64})
    with pytest.raises(EsperError) as caught:
        constant_value(wrong, tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("E0112", 11)
    for bad in ((1.0,), ("x", "y"), ((1.0, 2.0),)):
        with pytest.raises(EsperError):
            constant_value(Leaf("k", "constant", kind, data=bad))
    for cut in range(0, len(data), 7):
        (tmp_path / "k.safetensors").write_bytes(data[:cut])
        short = hashlib.sha256(data[:cut]).hexdigest()
        with pytest.raises(EsperError):
            constant_value(
                Leaf("k", "constant", kind, data={"file": "k.safetensors", "sha256": short}), tmp_path
            )


def test_twin_with_a_constant() -> None:
    b = Builder("b")
    x, k = b.input("x", "float32", [2]), b.constant("layer.k", "float32", [2], [1.0, 2.0])
    w = b.param("layer.0.w", "float32", [2], "ones")
    twin = EagerTwin(b.build(x * k + w))
    assert twin(torch.ones(2)).tolist() == [2.0, 3.0]
    assert list(twin.state_dict()) == ["layer.0.w"]


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a"), ("forward", "w"), ("w.", "v")])
def test_names_that_a_module_cannot_have(names: tuple[str, str]) -> None:
    b = Builder("b")
    first, second = (b.param(n, "float32", [2], "ones") for n in names)
    with pytest.raises(EsperError) as caught:
        EagerTwin(b.build(first + second))
    assert caught.value.code == "E0404"


def test_nothing_ambient_changes_the_meaning() -> None:
    twin = to_torch(load(ROOT / "examples" / "digits_block.json"))
    x = torch.randn(5, 64)
    wanted = twin(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(twin(x), wanted)
    backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = backend.fp32_precision
    backend.fp32_precision = "bf16"
    try:
        assert torch.equal(twin(x), wanted) and backend.fp32_precision == "bf16"
    finally:
        backend.fp32_precision = before


def test_constants_of_a_file_are_checked_when_the_blueprint_is_read(tmp_path: Path) -> None:
    b = Builder("b")
    kind = {"file": "k.safetensors", "sha256": "0" * 64}
    text = render(b.build(b.input("x", "float32", [2]) * b.constant("k", "float32", [2], [1.0, 2.0])))
    path = tmp_path / "b.json"
    path.write_text(text.replace("[1.0, 2.0]", json.dumps(kind)))
    for code in ("E0113", "E0112"):
        with pytest.raises(EsperError) as caught:
            load(path)
        assert caught.value.code == code
        (tmp_path / "k.safetensors").write_bytes(b"")


def test_what_the_text_form_refuses_is_refused_at_once() -> None:
    b = Builder("b")
    with pytest.raises(EsperError, match="E0111.*unknown initialiser 'gauss'"):
        b.param("w", "float32", [3], {"kind": "gauss"})
    with pytest.raises(EsperError, match="E0110.*min 9 is above max 4"):
        b.dim("rows", min=9, max=4)
    with pytest.raises(EsperError, match="E0110"):
        b.dim("rows", max=10, tune=[11])
