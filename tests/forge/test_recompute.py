"""Values computed again where they are read: the same meaning, fewer bytes."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_ir import text
from esper_ir.types import DType
from forge import recompute
from forge.lower import PhaseLowering
from forge.partition import partition
from forge.service import front
from forge.target import resolve
from library.launch import KernelStep, evaluate
from tests.forge.dags import blueprint as random_blueprint
from tests.forge.test_blocks import BLOCKS, EXAMPLES, shrunk
from tests.forge.test_graphs import CASES, MANY, SETTINGS, made
from tests.forge.whole import check


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little it spares."""
    monkeypatch.setattr(recompute, "LEAST", 0)
    monkeypatch.setattr(recompute, "WORTH", 0.0)


BOTH = [pytest.param(name, "h100", id=f"{name}-h100") for name in sorted(CASES)] + [
    pytest.param(name, "cpu", id=f"{name}-cpu", marks=[pytest.mark.slow] * (at % 3 > 0))
    for at, name in enumerate(sorted(CASES))
]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("name", "target"), BOTH)
def test_graphs_mean_the_same(name: str, target: str) -> None:
    blueprint = made(CASES[name])
    rows = 1 if "registers" in name else 2 if "power" in name else 7
    check(blueprint, {"rows": rows} if "rows" in blueprint.dims else {}, target)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "name", ["batchnorm_relu", "squeeze_excite", "dw_pw", "max_pool_block", "rope_qk_norm"]
)
def test_blocks_mean_the_same(name: str) -> None:
    sizes, dims = BLOCKS[name]
    check(shrunk(name, sizes), dims, "h100")


RANDOM = given(
    st.integers(0, 2**32), st.integers(4, 24), st.sampled_from(["float32", "bfloat16"]), st.integers(1, 9)
)


@pytest.mark.usefixtures("always")
@SETTINGS
@RANDOM
def test_random_graphs_mean_the_same(seed: int, nodes: int, dtype: str, rows: int) -> None:
    check(random_blueprint(random.Random(seed), nodes, dtype), {"rows": rows}, "h100")


@pytest.mark.usefixtures("always")
def test_a_gradient_that_cancels_is_known_as_well_as_what_it_is_made_of() -> None:
    """One element of 0.006, the rest of terms of the size of 1; eager was right by luck."""
    check(random_blueprint(random.Random(5530678), 10, "float32"), {"rows": 9}, "h100")


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@MANY
@RANDOM
def test_many_random_graphs_mean_the_same(seed: int, nodes: int, dtype: str, rows: int) -> None:
    check(random_blueprint(random.Random(seed), nodes, dtype), {"rows": rows}, "h100")


def full_size(low: PhaseLowering, sizes: dict[str, int]) -> float:
    """Accesses of a phase's kernels in multiples of the largest float16-sized tensor."""
    plan = low.plan
    counts = [1.0] * len(plan.buffers)
    for number, buffer in enumerate(plan.buffers):
        for size in buffer.shape:
            counts[number] *= evaluate(size, sizes)
        counts[number] *= DType(buffer.dtype).itemsize
    steps = [s for s in plan.steps if isinstance(s, KernelStep)]
    total = sum(
        counts[a.value] for s in steps for a in s.args if a.kind == "buffer" and isinstance(a.value, int)
    )
    return total / max(counts)


@pytest.mark.parametrize(
    ("name", "sizes", "inference", "backward"),
    [
        ("batchnorm_relu", {"n": 64}, 4.2, 5.3),
        ("squeeze_excite", {"n": 64}, 3.1, 4.1),
        ("groupnorm_silu", {"n": 16}, 3.1, 5.1),
    ],
)
def test_no_block_stores_what_its_inputs_say(
    name: str, sizes: dict[str, int], inference: float, backward: float
) -> None:
    """Batch norm reads x three times and writes y; its backward reads x and dy twice and writes dx. Group
    norm reads x once less."""
    work = front(text.load(EXAMPLES / f"{name}.json"), "h100")
    plans = [low for low in work.lowerings if len(low.plan.wanted) in (0, 3)]
    assert {low.phase.name for low in plans} == {"forward", "inference", "backward"}
    for low in plans:
        limit = backward if low.phase.name == "backward" else inference
        assert full_size(low, sizes) < limit, (low.phase.name, full_size(low, sizes))


def test_a_slow_operator_is_not_repeated_on_a_processor() -> None:
    """Two sums of erf(x) over other axes: on a card erf is cheaper than memory, on a processor it is not."""
    document = {
        "format": "esper-blueprint/1",
        "name": "twice",
        "inputs": {"x": {"dtype": "float32", "shape": [512, 8, 512]}},
        "nodes": [
            {"id": "e", "op": "erf", "inputs": ["x"]},
            {"id": "a", "op": "sum", "inputs": ["e"], "attrs": {"dims": [1]}},
            {"id": "b", "op": "softmax", "inputs": ["e"], "attrs": {"dim": -1}},
        ],
        "outputs": ["a", "b"],
    }
    blueprint = text.parse(json.dumps(document))
    found = {}
    for target in ("h100", "cpu"):
        work = front(blueprint, target)
        graph = next(low.parts.graph for low in work.lowerings if low.phase.name == "inference")
        found[target] = sum(n.op == "erf" for n in graph)
    assert found == {"h100": 2, "cpu": 1}


def test_what_was_tried_is_told() -> None:
    work = front(text.load(EXAMPLES / "squeeze_excite.json"), "h100")
    told = [r for low in work.lowerings for r in low.parts.refusals if r.group == "recompute"]
    assert any("spares" in r.why.reason for r in told)


def test_nothing_to_gain_changes_nothing() -> None:
    work = front(text.load(EXAMPLES / "layernorm.json"), "h100")
    graph = next(low.phase.graph for low in work.lowerings if low.phase.name == "inference")
    parts = partition(graph, resolve("h100"))
    again = recompute.recompute(parts, resolve("h100"), {"rows": 8192})
    assert again.graph is parts.graph and again.groups == parts.groups
