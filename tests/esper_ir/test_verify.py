"""The verifier: each kind of mistake has its code, all are found at once, and each marks its node."""

from __future__ import annotations

import json
from typing import Any

import pytest

from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint, Leaf, Node
from esper_ir.registry import OPS, OTHERWISE
from esper_ir.text import parse
from esper_ir.types import DimSpec, DType, TensorType
from esper_ir.verify import typed, verify

X = {"dtype": "float32", "shape": ["rows", 8]}


def build(nodes: list[dict[str, Any]], outputs: list[str] | None = None, **more: Any) -> Blueprint:
    document = {
        "format": "esper-blueprint/1",
        "name": "t",
        "dims": {"rows": {"max": 64}, "cols": {"max": 64}},
        "inputs": {
            "x": X,
            "c": {"dtype": "float32", "shape": ["cols"]},
            "i": {"dtype": "int64", "shape": [3]},
        },
        "nodes": nodes,
        "outputs": outputs or [nodes[-1]["id"]],
        **more,
    }
    return parse(json.dumps(document))


def node(op: str, *inputs: Any, id: str = "y", **attrs: Any) -> dict[str, Any]:
    return {"id": id, "op": op, "inputs": list(inputs), "attrs": attrs}


def errors(bp: Blueprint) -> list[str]:
    return [d.code for d in verify(bp) if d.level == "error"]


BAD: list[tuple[str, dict[str, Any]]] = [
    ("E0201", node("exp", "x", "x")),
    ("E0201", node("add", "x")),
    ("E0202", node("exp", "x", alpha=1)),
    ("E0202", node("reshape", "x")),
    ("E0203", node("softmax", "x", dim=1.5)),
    ("E0203", node("gelu", "x", approximate="magic")),
    ("E0203", node("sum", "x", dims="all")),
    ("E0203", node("leaky_relu", "x", negative_slope=True)),
    ("E0203", node("softmax", "x", dim=None)),
    ("E0103", node("cast", "x", dtype="float8")),
    ("E0104", node("reshape", "x", shape=["rows+"])),
    ("E0204", node("add", "x", "i")),
    ("E0204", node("matmul", "x", "c")),
    ("E0204", node("layer_norm", "x", normalized_shape=[4])),
    ("E0205", node("matmul", "i", "i")),
    ("E0205", node("where", "x", "x", "x")),
    ("E0205", node("gelu", "i")),
    ("E0206", node("add", "x", "c")),
    ("E0206", node("reshape", "x", shape=[3, -1])),
    ("E0207", node("softmax", "x", dim=2)),
    ("E0207", node("sum", "x", dims=[1, -1])),
    ("E0207", node("permute", "x", dims=[0, 0])),
    ("E0208", node("gelu", 1.0)),
    ("E0208", node("add", 1, 2)),
    ("E0301", node("gellu", "x")),
    ("E0302", node("exp", "nowhere")),
    ("E0302", node("exp", "x.1")),
    ("E0303", node("exp", "y")),
    ("E0307", node("reshape", "x", shape=["rows*8", "1"]) | {"id": "a"}),
    ("E0307", node("full", shape=["other"], value=1)),
    ("E0206", node("full", shape=["rows-10"], value=1)),
]


@pytest.mark.parametrize(("code", "row"), BAD, ids=[f"{c}-{r['op']}-{i}" for i, (c, r) in enumerate(BAD)])
def test_each_mistake_has_its_code(code: str, row: dict[str, Any]) -> None:
    if row["id"] == "a":  # a reshape that is right: the code is only for unknown dims
        assert errors(build([row], ["a"])) == []
        return
    bp = build([row])
    found = [d for d in verify(bp) if d.level == "error"]
    assert [d.code for d in found] == [code], found
    assert found[0].node == "y" and "> y = " in found[0].context and "^^^" in found[0].context
    with pytest.raises(EsperError) as caught:
        typed(bp)
    assert caught.value.code == code and caught.value.diagnostics == tuple(found)


def test_nearest_names_are_offered() -> None:
    (found, *_) = verify(build([node("gellu", "x")]))
    assert found.hint is not None and "gelu" in found.hint
    for other, ours in OTHERWISE.items():
        (found, *_) = verify(build([node(other, "x")]))
        assert ours in OPS and other not in OPS and found.hint == f"did you mean {ours}?"
    (found, *_) = verify(build([node("gelu", "yy")]))
    assert found.code == "E0302" and found.hint == "check the spelling", "a node does not read itself"


def test_everything_at_once() -> None:
    nodes = [
        node("gellu", "x", id="a"),
        node("exp", "nowhere", id="b"),
        node("add", "x", "i", id="d"),
        node("exp", "f", id="e"),
        node("exp", "e", id="f"),
        node("exp", "x", id="f2"),
        node("exp", "x", id="f2"),
        node("softmax", "a", dim="x", id="g"),
        node("mul", "a", "d", id="y"),
    ]
    bp = build(nodes, ["y", "none"])
    assert sorted(errors(bp)) == sorted(["E0301", "E0302", "E0204", "E0303", "E0304", "E0203", "E0302"])
    with pytest.raises(EsperError) as caught:
        typed(bp)
    assert caught.value.code == "E0308" and len(caught.value.diagnostics) == 7
    assert str(caught.value).count("  error E") == 7
    cycle = next(d for d in verify(bp) if d.code == "E0303")
    assert "e <- f <- e" in cycle.message or "f <- e <- f" in cycle.message


def test_names_outputs_and_differentiable() -> None:
    assert errors(build([node("exp", "x", id="c")], ["c"])) == ["E0304"]
    assert errors(build([node("exp", "x")], ["y", "y"])) == ["E0306"]
    assert errors(build([node("exp", "x")], differentiable=["i"])) == ["E0310"]
    assert errors(build([node("exp", "x")], differentiable=["y"])) == ["E0310"]
    assert errors(Blueprint("n", (), (), ())) == ["E0306"]


def test_warnings_do_not_stop() -> None:
    bp = build([node("exp", "x", id="dead"), node("exp", "x")], ["y"])
    assert {(d.code, d.node, d.level) for d in verify(bp)} == {
        ("E0305", "c", "warning"), ("E0305", "i", "warning"), ("E0309", "dead", "warning"),
    }  # fmt: skip
    assert [n.id for n in typed(bp).nodes] == ["y"]


def test_unknown_dim_of_a_leaf() -> None:
    leaf = Leaf("x", "input", TensorType.of("float32", ["n"]))
    assert errors(Blueprint("n", (leaf,), (Node("y", "exp", ("x",)),), ("y",))) == ["E0307"]
    negative = Leaf("x", "input", TensorType.of("float32", ["n-2"]))
    bp = Blueprint("n", (negative,), (Node("y", "exp", ("x",)),), ("y",), {"n": DimSpec()})
    assert errors(bp) == ["E0206"]


def test_order_and_master_parameters() -> None:
    """Nodes in any order; a float32 master parameter is read through one cast to its compute dtype."""
    params = {"w": {"dtype": "float32", "shape": [8, 4], "compute": "bfloat16"}}
    inputs = {"x": {"dtype": "bfloat16", "shape": ["rows", 8]}}
    nodes = [node("exp", "u", id="y"), node("matmul", "x", "w", id="u")]
    graph = typed(build(nodes, ["y"], params=params, inputs=inputs))
    assert [(n.id, n.op) for n in graph.nodes] == [("w:compute", "cast"), ("u", "matmul"), ("y", "exp")]
    assert graph.types["y"].dtype is DType.bfloat16 and graph.inputs["w"].dtype is DType.float32


def test_symbolic_shapes() -> None:
    rows = [
        ("matmul", ["x", "w"], {}, "[rows, 4]"),
        ("flatten", ["x"], {}, "[8*rows]"),
        ("reshape", ["x"], {"shape": [-1, 4]}, "[2*rows, 4]"),
        ("reshape", ["x"], {"shape": [2, "rows", -1]}, "[2, rows, 4]"),
        ("expand", ["x"], {"shape": [5, -1, 8]}, "[5, rows, 8]"),
        ("permute", ["x"], {"dims": [1, 0]}, "[8, rows]"),
        ("mean", ["x"], {"dims": [-1], "keepdim": True}, "[rows, 1]"),
        ("unsqueeze", ["x"], {"dim": 0}, "[1, rows, 8]"),
    ]
    params = {"w": {"dtype": "float32", "shape": [8, 4]}}
    for op, inputs, attrs, wanted in rows:
        graph = typed(build([{"id": "y", "op": op, "inputs": inputs, "attrs": attrs}], params=params))
        assert str(graph.types["y"]) == f"float32{wanted}"


def test_registry_is_broad() -> None:
    assert len(OPS) >= 100
    assert all(name == op.name for name, op in OPS.items())
