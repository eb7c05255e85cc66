"""A block in torch's FLOP counter: as many as the counter finds in the same mathematics by torch calls.

`torch.utils.flop_counter` imports Triton where it is installed, so nothing of it is touched before the
program that counts has done so: then the operators enter its registry, and the counters already at work.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from library.launch import evaluate
from library.manifest import blueprint_document
from runtime.eager import twin_of
from runtime.loader import Entry
from runtime.operators import sizes

log = logging.getLogger("esper.runtime")
COUNTER = "torch.utils.flop_counter"
_entries: dict[str, Entry] = {}


def watch(entry: Entry) -> None:
    """Called where a dispatch mode sees a block: make it count, if counting is what the mode does."""
    counting = sys.modules.get(COUNTER)
    if counting is None:
        return
    _entries[entry.record.id] = entry
    rules = {torch.ops.esper.fwd: _forward, torch.ops.esper.bwd: _backward}
    for op, rule in rules.items():
        if op not in counting.flop_registry:
            counting.register_flop_formula(op, get_raw=True)(rule)
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if counter is not None and hasattr(counter, "flop_registry"):
            counter.flop_registry.update({op: counting.flop_registry[op] for op in rules})


def _forward(name: str, mask: int, xs: Sequence[Tensor], turned: int, **_: Any) -> int:
    return _counted(name, tuple(map(int, sizes(_entries[name].program, xs, turned))), 0)


def _backward(
    name: str, dims: Sequence[int], mask: int, saved: Sequence[Tensor], *rest: Any, **_: Any
) -> int:
    return _counted(name, tuple(int(d) for d in dims), mask)


@lru_cache(maxsize=1024)
def _counted(name: str, dims: tuple[int, ...], mask: int) -> int:
    """FLOPs of the twin on tensors without memory: of its forward, or of the backward for a mask."""
    found: list[int] = []

    def work() -> None:
        with FakeTensorMode():
            found.append(_count(name, dims, mask))

    # A thread of its own: no dispatch mode, no grad mode, and not inside the backward that may be running.
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0] if found else 0


def _count(name: str, dims: tuple[int, ...], mask: int) -> int:
    entry, counting = _entries[name], sys.modules[COUNTER]
    values = dict(zip(entry.program.dim_names, dims, strict=True))
    leaves = []
    for at, spec in enumerate(entry.program.interface.inputs):
        shape, dtype = [evaluate(s, values) for s in spec.shape], getattr(torch, spec.dtype)
        asked = bool(mask >> at & 1)
        leaves.append(torch.empty(shape, dtype=dtype, requires_grad=asked))
    twin = twin_of(blueprint_document(entry.container.manifest))
    try:
        with torch.set_grad_enabled(bool(mask)), counting.FlopCounterMode(display=False) as forward:
            found = twin(*leaves)
        if not mask:
            return int(forward.get_total_flops())
        outputs = [o for o in (found if isinstance(found, tuple) else (found,)) if o.requires_grad]
        with counting.FlopCounterMode(display=False) as backward:
            torch.autograd.backward(outputs, [torch.empty_like(o) for o in outputs])
        return int(backward.get_total_flops())
    except Exception as error:
        log.warning("%s: FLOPs are not counted: %s", name, error)
        return 0
