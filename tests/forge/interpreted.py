"""Plans run through Triton's interpreter, step by step, on CPU tensors.

    TRITON_INTERPRET=1 python -m tests.forge.interpreted CASES

CASES is JSON, a case or a list of them: {"path": file, "sizes": {"64": 32}, "dims": {"rows": 37}}, or with
"blueprint": document, or with "seed": 7, "dtype": "float32" for a random graph; and optionally "target",
"variant" ("g" for any sizes, "a" for multiples of 16 where that matters) and "own", a tile for every product
that can be a kernel of ours. Printed is a list with, per case,
each result's distance from float64 and from eager, and the number of programs launched.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import esper_ir.text as text
from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint
from forge.emit.triton import emit
from forge.lower import Kernels
from forge.pass_manager import run
from forge.pipelines import FAST
from forge.plan import JoinedTile, KernelPlan, ProductWay
from forge.service import front
from forge.tune.journal import Choices
from forge.work import Work
from library.launch import KernelStep, evaluate
from tests.forge.dags import blueprint as random_blueprint
from tests.forge.whole import Machine, Sizes, close, compared, rms

TUNED = 256  # a few programs share the rows, not as many as a card has


@lru_cache(maxsize=1)
def texts() -> tempfile.TemporaryDirectory[str]:
    """Where the kernels' texts lie (Triton reads a kernel's file again): gone with the process."""
    return tempfile.TemporaryDirectory(prefix="esper-texts-")


def load_kernel(source: str, name: str) -> Any:
    path = Path(tempfile.mkdtemp(dir=texts().name)) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


class Interpreter(Machine):
    """The last variant of every kernel, or the first. Of the backward plans only the one with every gradient:
    each program takes milliseconds.
    """

    every_mask = False

    def __init__(self, work: Work, variant: str = "g") -> None:
        super().__init__(work)
        self.variant, self.programs = variant, 0
        self.made: dict[str, Any] = {}

    def launch(self, step: KernelStep, memory: list[torch.Tensor], dims: Sizes) -> None:
        names = [v.kernel for v in step.variants]
        chosen = names[0] if self.variant == "a" else names[-1]
        if chosen not in self.made:
            self.made[chosen] = load_kernel(emit(self.kernels[chosen], interpreted=True), chosen)
        grid = tuple(evaluate(g, dims) for g in step.grid)
        self.programs += grid[0] * grid[1] * grid[2]
        step_args = step.args[: len(self.kernels[chosen].buffers) + len(self.kernels[chosen].sizes)]
        args = [
            memory[a.value] if isinstance(a.value, int) and a.kind == "buffer" else evaluate(a.value, dims)
            for a in step_args
        ]
        self.made[chosen][grid](*args)


def planned(blueprint: Blueprint, target: str, own: Sequence[int]) -> Work:
    work = front(blueprint, target, FAST.name)
    if not own:
        return work
    ways = {k: ProductWay(True, *own) for k in work.kernels.drafts}
    steps = tuple(s for s in FAST.steps if s[0] not in ("build", "package"))
    kernels = Kernels(choices=Choices(ways))
    return run(replace(FAST, steps=steps), Work(blueprint, work.target, FAST.name, kernels=kernels))


def compare(work: Work, dims: Sizes, variant: str) -> dict[str, Any]:
    machine = Interpreter(work, variant)
    found, wide, eager = compared(work, machine, dims)
    rows = {
        name: {
            "ok": close(value, wide[name], eager[name]),
            "off": rms(value.double() - wide[name].double()),
            "eager": rms(eager[name].double() - wide[name].double()),
            "equal": torch.equal(value, eager[name]),
        }
        for name, value in found.items()
    }
    described = sum(getattr(k.plan.tile, "descriptors", False) for k in work.kernels.by_key.values())
    dual = sum(p.matmul is not None and p.matmul.second is not None for p in _kernels(work))
    return {"results": rows, "programs": machine.programs, "described": described, "dual": dual}


def _kernels(work: Work) -> list[KernelPlan]:
    """All kernels, those beside each other one by one."""
    plans = [k.plan for k in work.kernels.by_key.values()]
    return [part for p in plans for part in (p.tile.parts if isinstance(p.tile, JoinedTile) else (p,))]


def small(path: Path, sizes: Mapping[str, int]) -> Blueprint:
    """The blueprint with some static sizes replaced, so that the interpreter is quick."""
    data = json.loads(path.read_text())
    shapes = [v for part in ("inputs", "params") for v in data.get(part, {}).values()]
    for leaf in shapes:
        leaf["shape"] = [sizes.get(str(s), s) for s in leaf["shape"]]
    for dim in data.get("dims", {}).values():
        dim["tune"] = [TUNED]
    return text.parse(json.dumps(data))


def one(case: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison of one case; a refusal is reported by its code."""
    if "seed" in case:
        choice = random.Random(case["seed"])
        made = random_blueprint(choice, choice.randint(1, 9), case.get("dtype", "float32"))
    elif "blueprint" in case:
        made = text.parse(json.dumps(case["blueprint"]))
    else:
        made = small(Path(case["path"]), case.get("sizes", {}))
    try:
        work = planned(made, case.get("target", "h100"), case.get("own", ()))
        return compare(work, case["dims"], case.get("variant", "g"))
    except EsperError as error:
        return {"refused": error.code, "results": {}, "programs": 0}


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    print(json.dumps([one(c) for c in (cases if isinstance(cases, list) else [cases])]))
