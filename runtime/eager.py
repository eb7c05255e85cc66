"""The eager twin of an artifact: its blueprint run by the reference. The door to `esper_ir.eager`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Twin(nn.Module):
    """`twin(*leaves)`: every leaf of the blueprint in order, as a functional block takes them."""

    def __init__(self, text: Mapping[str, Any]) -> None:
        super().__init__()
        # Costs 140 ms to import and is needed only when a twin is asked for.
        from esper_ir import straight, verify
        from esper_ir import text as text_form

        self._run = straight.straight(verify.typed(text_form.parse(json.dumps(text))))

    def forward(self, *leaves: Tensor) -> Any:
        out = self._run(*leaves)
        return out[0] if len(out) == 1 else out


def twin_of(text: Mapping[str, Any]) -> Twin:
    """The functional twin of a blueprint's JSON; drawn parameters stay with the block."""
    return Twin(text)


def module_of(text: Mapping[str, Any], device: torch.device) -> nn.Module:
    """The twin as a module with parameters of its own."""
    from esper_ir import eager
    from esper_ir import text as text_form

    return eager.EagerTwin(text_form.parse(json.dumps(text))).to(device)
