"""Little launches beside each other: the same numbers, fewer launches, and no step before what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

import esper_ir.text as text
from esper_ir.types import Dim, DType
from forge import horizontal
from forge.emit.triton_joined import size_text
from forge.groups import Group
from forge.horizontal import joined
from forge.lowered import Call, Launch, Lowered, Operand
from forge.plan import Access, JoinedTile, KernelPlan, Load, PointTile, Store
from forge.service import front
from forge.work import Work
from tests.forge.test_interpreter import ROOT
from tests.forge.whole import check


def mlp(rows: int | str, width: int, hidden: int, dtype: str = "bfloat16") -> dict[str, Any]:
    """linear, gelu, linear, with biases and torch's layout of weights."""
    shapes = {"x": [rows, width], "w1": [hidden, width], "b1": [hidden], "w2": [width, hidden], "b2": [width]}
    nodes = [("u", "linear", ["x", "w1", "b1"]), ("h", "gelu", ["u"]), ("y", "linear", ["h", "w2", "b2"])]
    return {
        "format": "esper-blueprint/1", "name": "mlp",
        "dims": {rows: {"min": 1, "max": 4096, "tune": [1024]}} if isinstance(rows, str) else {},
        "inputs": {name: {"dtype": dtype, "shape": shape} for name, shape in shapes.items()},
        "nodes": [{"id": i, "op": op, "inputs": given} for i, op, given in nodes], "outputs": ["y"],
    }  # fmt: skip


CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "sizes known": (mlp(48, 32, 64), {}),
    "rows vary": (mlp("rows", 24, 40), {"rows": 37}),
    "float32": (mlp("rows", 16, 33, "float32"), {"rows": 5}),
}


def launches(work: Work) -> list[int]:
    return [len(low.plan.steps) for low in work.lowerings]


def parts(work: Work) -> list[JoinedTile]:
    found = (s.plan.tile for s in work.kernels.by_key.values())
    return [tile for tile in found if isinstance(tile, JoinedTile)]


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers_in_fewer_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document, dims = CASES[name]
    blueprint = text.parse(json.dumps(document))
    work = check(blueprint, dims, "h100")
    made = parts(work)
    assert made and all(len({p.tile.warps for p in tile.parts}) == 1 for tile in made)
    monkeypatch.setattr(horizontal, "LITTLE", 0)
    apart = launches(front(blueprint, "h100"))
    assert launches(work)[-1] < apart[-1] and sum(launches(work)) < sum(apart)


def test_products_come_before_second_stages() -> None:
    """Both weight gradients stand beside the partial sums of the biases, what adds these up comes last; no
    product is a sum of parts where smaller tiles fill a card.
    """
    low = front(text.parse(json.dumps(mlp(256, 64, 256))), "h100").lowerings[-1]
    plans = [s.plan for _, made in low.lowered for s in made.steps if isinstance(s, Launch)]
    held = [p.tile.parts if isinstance(p.tile, JoinedTile) else (p,) for p in plans]
    assert [sum(p.product for p in ps) for ps in held] == [1, 2, 0]
    assert [len(ps) for ps in held] == [1, 4, 2]
    wide = front(text.parse(json.dumps(mlp(1024, 256, 1024))), "h100").lowerings[0]
    assert [made.template for _, made in wide.lowered] == ["matmul", "matmul"]


def test_where_launches_stay_apart() -> None:
    blueprint = text.parse(json.dumps(mlp(48, 32, 64)))
    assert not parts(front(blueprint, "cpu"))
    large = parts(front(text.parse(json.dumps(mlp(65536, 512, 2048))), "h100"))
    assert all((p.rows * p.cols).static <= horizontal.LITTLE for tile in large for p in tile.parts)


def copy(source: str, target: str, size: int = 64) -> Lowered:
    accesses = tuple(Access(b, DType.float32, (Dim.of(1),)) for b in (source, target))
    plan = KernelPlan("k", (Dim.of(size),), accesses, (Load("v", 0), Store(1, "v")), PointTile(256, 4), ())
    return Lowered("points", (Launch(plan, (1, 1, 1)),))


def call(source: str, target: str) -> Lowered:
    return Lowered("extern", (Call("prod", (Operand(source, ()),), (Operand(target, ()),)),))


def order(*rows: Lowered, names: dict[str, int] | None = None) -> list[set[str]]:
    """What each launch writes."""
    made = joined([(Group(()), row) for row in rows], names or {}, {}, 1 << 17)
    steps = [step for _, low in made for step in low.steps]
    return [
        {o.value for o in s.outs} if isinstance(s, Call)
        else {s.plan.accesses[t.access].buffer for t in s.plan.body if isinstance(t, Store)}
        for s in steps
    ]  # fmt: skip


def test_nothing_runs_before_what_it_needs() -> None:
    assert order(copy("a", "b"), copy("b", "c"), copy("a", "d")) == [{"b"}, {"c", "d"}]
    assert order(copy("a", "b"), copy("c", "a")) == [{"b"}, {"a"}]  # written after it was read
    assert order(copy("a", "b"), copy("c", "b")) == [{"b"}, {"b"}]  # the second value stays
    assert order(copy("a", "b"), copy("c", "d"), names={"b": 1, "c": 1}) == [{"b"}, {"d"}]  # one memory
    assert order(copy("a", "b"), call("b", "c"), copy("c", "d"), copy("a", "e")) == [{"b"}, {"c"}, {"d", "e"}]
    assert order(copy("a", "b"), copy("a", "c", 1 << 22)) == [{"b"}, {"c"}]  # not little


def test_a_wide_kernel_stays_by_itself() -> None:
    other = copy("a", "c")
    step = other.steps[0]
    assert isinstance(step, Launch)
    wide = replace(other, steps=(replace(step, plan=replace(step.plan, wide=True)),))
    assert order(copy("a", "b"), wide) == [{"b"}, {"c"}]


def test_sizes_as_text() -> None:
    assert size_text(("floordiv", ("add", "rows", 15), 16)) == "((n_rows + 15) // 16)"


CODE = """
import json, sys
import esper_ir.text as text
from forge.service import front
from tests.forge.interpreted import compare
cases = json.loads(sys.argv[1])
print(json.dumps([compare(front(text.parse(json.dumps(c)), "h100"), d, "g") for c, d in cases]))
"""


@pytest.mark.slow
def test_triton_says_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(list(CASES.values()))], cwd=ROOT, capture_output=True,
        text=True, env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for answer in json.loads(done.stdout):
        assert answer["results"] and all(r["ok"] for r in answer["results"].values()), answer
