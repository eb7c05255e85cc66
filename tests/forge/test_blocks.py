"""Examples with library calls or positions, small: plans, C and calls against float64 and eager."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import esper_ir.text as text
from esper_ir.graph import Blueprint
from esper_ir.types import Dim
from forge.emit.writer import dim_text
from library.launch import ExternStep
from tests.forge.whole import check

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COUNTS = ("groups", "num_groups", "end", "start")
"""Attributes that are numbers of channels or positions."""

# name: (static sizes and what they become, dims).
BLOCKS: dict[str, tuple[dict[int, int], dict[str, int]]] = {
    "cross_entropy": ({32000: 70}, {"rows": 13}),
    "squeeze_excite": ({256: 24, 56: 5}, {"n": 3}),
    "dw_pw": ({256: 16, 28: 6}, {"n": 2}),
    "conv_res": ({128: 8, 56: 6}, {"n": 3}),
    "attention": ({64: 8, 16: 3}, {"batch": 2, "rows": 9}),
    "rope_qk_norm": ({64: 8, 32: 4, 16: 3}, {"batch": 2, "rows": 5}),
    "batchnorm_relu": ({256: 8, 56: 4}, {"n": 3}),
    "linear_cross_entropy": ({4096: 24, 32000: 50}, {"rows": 7}),
    "embedding_norm": ({32000: 11, 1024: 24}, {"rows": 9}),
    "max_pool_block": ({128: 8, 56: 7}, {"n": 2}),
    "mamba_scan": ({1024: 12}, {"batch": 2, "rows": 11}),
    "seed_norm": ({512: 24}, {"rows": 9}),
    "seed_lora": ({512: 24}, {"rows": 9}),
    "seed_attention": ({256: 24, 64: 8}, {"batch": 2, "rows": 7}),
    "seed_mlp": ({512: 16, 1024: 24}, {"rows": 9}),
    "seed_depthwise": ({128: 8, 28: 5}, {"n": 2}),
    "seed_conv": ({64: 8, 28: 5}, {"n": 2}),
    "seed_squeeze_excite": ({128: 8, 28: 5}, {"n": 2}),
    "seed_gated": ({512: 16, 1024: 24}, {"rows": 9}),
}


def shrunk(name: str, sizes: Mapping[int, int]) -> Blueprint:
    """The example with static sizes replaced wherever they stand."""
    data = json.loads((EXAMPLES / f"{name}.json").read_text())
    for leaf in [v for part in ("inputs", "params") for v in data.get(part, {}).values()]:
        leaf["shape"] = [_size(s, sizes) for s in leaf["shape"]]
    for node in data["nodes"]:
        node["attrs"] = {k: _attribute(k, v, sizes) for k, v in node.get("attrs", {}).items()}
    return text.parse(json.dumps(data))


def _size(value: Any, sizes: Mapping[int, int]) -> Any:
    return sizes.get(value, value) if isinstance(value, int) else value


def _attribute(name: str, value: Any, sizes: Mapping[int, int]) -> Any:
    if name in ("shape", "sizes"):
        return [_size(v, sizes) for v in value]
    return _size(value, sizes) if name in COUNTS else value


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("target", "backend"), [("h100", "plans"), ("cpu", "c")])
def test_block_means_the_same(name: str, target: str, backend: str) -> None:
    sizes, dims = BLOCKS[name]
    check(shrunk(name, sizes), dims, target, backend)


def test_symbolic_inner_axes_are_divided_as_a_whole() -> None:
    """A position along an outer axis is divided by the product of the inner ones, not by its first factor."""
    assert dim_text(Dim.of("8*rows")) == "(8 * n_rows)" and dim_text(Dim.sym("rows")) == "n_rows"


def test_a_bias_goes_into_the_call_on_the_cpu_only() -> None:
    """oneDNN adds it before it rounds; on a card the sum joins the kernel that follows."""
    sizes, dims = BLOCKS["conv_res"]
    for target, operands in (("cpu", 3), ("h100", 2)):
        work = check(shrunk("conv_res", sizes), dims, target)
        steps = [s for low in work.lowerings for s in low.plan.steps if isinstance(s, ExternStep)]
        assert {len(s.inputs) for s in steps if s.op == "conv2d"} == {operands}


def test_library_calls_are_named() -> None:
    """What has no template is a step of the closed table, in both directions."""
    sizes, dims = BLOCKS["conv_res"]
    work = check(shrunk("conv_res", sizes), dims, "h100")
    calls = {s.op for low in work.lowerings for s in low.plan.steps if isinstance(s, ExternStep)}
    assert calls == {"conv2d", "conv2d_input_grad", "conv2d_weight_grad"}
