"""Whether an implementation's results and gradients are right, by the one rule of `esper_ir.oracle`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper_ir import grad, oracle, reference, text
from esper_ir.graph import Graph
from esper_ir.types import DType
from esper_ir.verify import typed


def results(fn: Callable[..., Any], args: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    """The output, then the gradient of every leaf that asks for one."""
    out = fn(*args)
    wanted = [t for t in args if t.requires_grad]
    return [out.detach(), *(torch.autograd.grad(out, wanted, cotangent) if wanted else ())]


@dataclass(frozen=True)
class Truth:
    """float64 results and eager's, with the roundings on the longest way to the output and to a gradient."""

    exact: list[Tensor]
    eager: list[Tensor]
    names: list[str]
    lengths: list[int]

    def facts(self, got: list[Tensor]) -> dict[str, Any]:
        """`correct`; where it is not `why`, and `single`: whether single elements alone are off."""
        found = list(self._found(got))
        wrong = [(name, one) for name, one in found if not one.passed]
        if not wrong:
            return {"correct": True}
        single = all(one.where is not None and one.rmse_margin <= 1.0 for _, one in wrong)
        return {"correct": False, "why": f"{wrong[0][0]}: {wrong[0][1].reason}", "single": single}

    def why_wrong(self, got: list[Tensor]) -> str:
        """Empty when every tensor passes."""
        return next((f"{name}: {one.reason}" for name, one in self._found(got) if not one.passed), "")

    def _found(self, got: list[Tensor]) -> Iterator[tuple[str, oracle.Comparison]]:
        for name, one, exact, eager, length in zip(
            self.names, got, self.exact, self.eager, self.lengths, strict=True
        ):
            kind = DType(str(eager.dtype).removeprefix("torch."))
            yield name, oracle.compare(one, exact, eager, length, kind)


def truth(path: Path, fn: Callable[..., Tensor], args: list[Tensor], cotangent: Tensor) -> Truth:
    """From the blueprint's own meaning in float64, on the device of the arguments."""
    blueprint = text.load(path)
    graph = typed(blueprint)
    names = [leaf.name for leaf in blueprint.leaves]
    wide = [t.detach().double().requires_grad_() if t.requires_grad else t for t in args]

    def meaning(*values: Tensor) -> Tensor:
        by_name = dict(zip(names, values, strict=True))
        return next(iter(reference.evaluate(blueprint, by_name, precision="float64").values()))

    wanted = [n for n, t in zip(names, args, strict=True) if t.requires_grad]
    sizes = reference.sizes_of(graph.inputs, dict(zip(names, args, strict=True)))
    exact = results(meaning, wide, cotangent.double())
    lengths = _lengths(graph, wanted, sizes)
    labels = [blueprint.outputs[0], *(f"d({n})" for n in wanted)]
    return Truth(exact, results(fn, args, cotangent), labels, lengths)


def _lengths(graph: Graph, wanted: list[str], sizes: Mapping[str, int]) -> list[int]:
    forward = oracle.accumulation_length(graph, sizes)
    if not wanted:
        return [forward]
    joint = grad.joint(graph, wanted).graph
    return [forward, *[oracle.accumulation_length(joint, sizes)] * len(wanted)]


def digest(tensor: Tensor) -> str:
    """sha256 of the bytes, row-major."""
    flat = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
