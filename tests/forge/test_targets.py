"""Targets are data: names, aliases, what fits a machine, and capabilities that agree with each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from esper_ir.diagnostics import EXIT_USAGE, Accepted, EsperError
from esper_ir.types import DType
from forge.target import resolve, targets
from library.platform import Platform

NAMES = {"h100", "h200", "a100", "l40s", "rtx4090", "t4", "b200", "mi300x", "cpu-v3", "cpu-v4", "interpreter"}
FORGE = Path(__file__).parents[2] / "forge"


def test_every_target_is_found_by_name_and_alias() -> None:
    known = targets()
    assert set(known) == NAMES
    words = [word for target in known.values() for word in (target.name, *target.aliases)]
    assert len(words) == len(set(words)), "an alias with two owners"
    for target in known.values():
        assert all(resolve(word) is target for word in (target.name, *target.aliases))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_capabilities_agree(name: str) -> None:
    target = resolve(name)
    assert target.kind in ("cuda", "hip", "cpu", "interpreter") and target.match in ("exact", "family")
    assert target.contractions in ("template", "extern")
    assert bool(target.capability) == (target.kind == "cuda")
    if target.kind == "cuda":
        assert target.arch.startswith(f"sm_{target.capability}")
        assert (target.match == "exact") == target.arch.endswith("a")
    assert set(target.dot_dtypes) <= set(target.dtypes)
    assert bool(target.dot_dtypes) == (target.contractions == "template")
    assert (target.bf16_TFLOPs > 0) or DType.bfloat16 not in target.dot_dtypes or target.kind == "interpreter"
    assert target.stored == (target.kind != "interpreter")
    assert target.vector_bytes in (16, 32, 64) and target.summary


def test_one_binary_serves_hopper() -> None:
    assert resolve("h100").arch == resolve("h200").arch == "sm_90a"
    hopper = Platform(cuda_cc=(9, 0), driver=12040, cpu_level=4, card="NVIDIA H200")
    assert all(isinstance(hopper.accepts("cuda", resolve(n).arch), Accepted) for n in ("h100", "h200"))


@pytest.mark.parametrize(
    ("here", "auto", "cpu"),
    [
        (Platform(cuda_cc=(9, 0), driver=12040, cpu_level=4, card="NVIDIA H200"), "h200", "cpu-v4"),
        (Platform(cuda_cc=(9, 0), driver=12040, cpu_level=3, card="NVIDIA H100 80GB HBM3"), "h100", "cpu-v3"),
        (Platform(cuda_cc=(8, 9), driver=12040, cpu_level=4, card="NVIDIA L40S"), "l40s", "cpu-v4"),
        (Platform(cuda_cc=(8, 6), driver=12040, cpu_level=3, card="NVIDIA RTX A6000"), "a100", "cpu-v3"),
        (Platform(gfx="gfx942", cpu_level=4), "mi300x", "cpu-v4"),
        (Platform(cpu_level=4), "cpu-v4", "cpu-v4"),
        (Platform(cpu_level=3), "cpu-v3", "cpu-v3"),
    ],
)
def test_auto_and_cpu_are_the_best_of_the_machine(here: Platform, auto: str, cpu: str) -> None:
    assert resolve("auto", here).name == auto
    assert resolve("cpu", here).name == cpu


def test_this_machine_has_a_target() -> None:
    assert resolve("cpu").kind == "cpu"
    assert resolve("auto").stored


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(EsperError) as caught:
        resolve("h10")
    assert caught.value.code == "E0510" and caught.value.exit_code == EXIT_USAGE
    assert "h100" in caught.value.details["near"] and "h100" in str(caught.value)
    with pytest.raises(EsperError, match="E0510.*\n.*one of: .*cpu-v3"):
        resolve("zzzzzzzz")
    with pytest.raises(EsperError, match="E0511"):
        resolve("auto", Platform(cpu_level=2))


def test_code_asks_for_capabilities_not_names() -> None:
    """No string of the forge outside forge/targets is the name of a card."""
    cards = {t.name for t in targets().values() if t.kind in ("cuda", "hip")}
    wrong = []
    for path in FORGE.rglob("*.py"):
        if path.parent.name == "targets":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in cards]
        wrong += [f"{path.name}: {name}" for name in found]
    assert not wrong, wrong
