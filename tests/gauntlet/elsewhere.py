"""A device that is not there: tensors that lie on the processor and say that they do not.

Nothing of theirs may meet a tensor of the processor (but a number), nor be asked for its elements there; so
code for a card that mixes both fails here as it would on a card.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from esper_ir import text
from esper_ir.diagnostics import EsperError
from forge.pass_manager import run
from forge.pipelines import FAST
from forge.target import resolve
from forge.work import Work
from gauntlet import arena, hosted, meaning
from gauntlet import subject as subject_module
from gauntlet.stage import Context
from gauntlet.stages import gradients, numerics, selftest
from gauntlet.subject import Subject
from library.manifest import unpack

_setup_privateuseone_for_python_backend("away")
THERE = torch.device("away:0")
MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Away(Tensor):
    """A tensor of the device; `inner` holds its elements."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Away:
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=THERE,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return ran(func, args, dict(kwargs or {}))


def ran(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    away = [isinstance(t, Away) for t in tensors]
    mixed = any(away) and any(not there and t.dim() for t, there in zip(tensors, away, strict=True))
    if mixed and func not in MOVES:
        raise RuntimeError(f"{func}: tensors of two devices")
    asked = kwargs.get("device")
    there = any(away) if asked is None else torch.device(asked).type == THERE.type
    if func is torch.ops.aten.copy_.default:
        there = away[0]
    if asked is not None and torch.device(asked).type == THERE.type:
        kwargs["device"] = torch.device("cpu")
    bare = tree_map(lambda t: t.inner if isinstance(t, Away) else t, (tuple(args), kwargs))
    made = func(*bare[0], **bare[1])
    written = [t for t in tensors if isinstance(t, Away)]
    known = {id(t.inner): t for t in written}

    def worn(t: Any) -> Any:
        if not isinstance(t, Tensor) or isinstance(t, Away) or not there:
            return t
        return known[id(t)] if id(t) in known else Away(t)

    return tree_map(worn, made)


class Elsewhere(TorchDispatchMode):
    """Inside, `THERE` is a device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return ran(func, args, dict(kwargs or {}))


class Eager(Subject):
    """A subject that runs `THERE`, with eager torch in the place of the artifact's kernels. `wrong`: by how
    much a result is off."""

    wrong = 0.0

    def infer(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        assert all(isinstance(t, Away) for t in values.values())
        if not self.declares(self.bound(values)):
            raise EsperError("E0813", "outside the declared range")
        found = meaning.outputs(self, values, "declared")
        return [t * (1 + self.wrong) if t.is_floating_point() else t for t in found]

    def forward(self, values: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return self.infer(values), []

    def trained(
        self, values: Mapping[str, Tensor], cotangents: Sequence[Tensor | None], wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        assert all(isinstance(t, Away) for t in (*values.values(), *cotangents) if t is not None)
        found = meaning.gradients(self, values, cotangents, wanted, "declared")
        return {n: g * (1 + self.wrong) for n, g in found.items()}


def judged(path: str, wrong: float, quick: bool, small: bool) -> dict[str, tuple[str, str]]:
    """Outcome and reason by stage, of a blueprint; `small`: references on the processor."""
    work = run(FAST, Work(text.load(Path(path)), resolve("cpu"), FAST.name))
    subject = Eager(unpack(work.container), THERE)
    subject.wrong, subject.hurry = wrong, quick
    if not small:
        hosted.ELEMENTS = 0
    told = {}
    for stage in (numerics.STAGE, gradients.STAGE, selftest.STAGE):
        found = stage.run(Context(subject, lambda event: None, quick))
        told[stage.name] = (type(found).__name__, getattr(found, "reason", ""))
    return told


def compared() -> dict[str, bool]:
    """What comparing bits there says of pairs that are alike, and of one that is not."""
    a = torch.arange(24.0).reshape(4, 6).to(THERE)
    b, strided = a.clone(), a.t().contiguous().t()
    off = a + torch.zeros(4, 6).index_fill(0, torch.tensor([3]), 1.0).to(THERE)
    zero, other = (torch.tensor(v).to(THERE) for v in (0.0, -0.0))
    return {
        "alike": arena.all_same([(a, b), (a, strided), (zero, zero), (a[:0], b[:0])]),
        "one off": arena.all_same([(a, b), (a, off)]),
        "another zero": arena.all_same([(zero, other)]),
        "another shape": arena.all_same([(a, b.reshape(6, 4))]),
    }


def main() -> None:
    for table in (subject_module.SWEPT, subject_module.ELEMENTS):
        table[THERE.type] = 1 << 12
    drawn = arena._drawn
    arena._drawn = lambda count, device: drawn(count, torch.device("cpu")).to(device)
    hosted._begun = lambda tensor: tensor.cpu()
    torch.cuda.synchronize = lambda *_: None
    if sys.argv[1] == "compared":
        with Elsewhere():
            print(json.dumps(compared()))
        return
    with Elsewhere():
        told = [judged(**case) for case in json.loads(sys.argv[1])]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
