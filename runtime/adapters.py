"""Weights under an adapter (PEFT's layers, known by their shape and not by import): the weight that the layer
as a whole applies, differentiable in what is trained.

A low-rank adapter on a linear layer is W x + s B (A x) = (W + s B A) x, so a block that takes a weight takes
the sum. What is no such sum (dropout on the adapter's branch, magnitudes of DoRA, other kinds) is refused by
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class Unfoldable(Exception):
    """The layer does more than apply a weight."""


def is_adapter(module: nn.Module) -> bool:
    """Whether the module wraps a layer in the way of PEFT."""
    return "base_layer" in module._modules


def adapted(layer: Any, name: str) -> Tensor:
    """`weight` of the wrapped layer with every active adapter folded in; other tensors as they are. Raises
    `Unfoldable`."""
    base = layer.base_layer
    found = adapted(base, name) if is_adapter(base) else getattr(base, name)
    if name != "weight" or layer.disable_adapters or layer.merged:
        return found
    for adapter in layer.active_adapters:
        found = found + _delta(layer, adapter)
    return found


def _delta(layer: Any, adapter: str) -> Tensor:
    kind = type(layer).__name__
    down, up = getattr(layer, "lora_A", None), getattr(layer, "lora_B", None)
    if down is None or up is None or adapter not in down:
        raise Unfoldable(f"{kind} is no low-rank adapter of a linear layer")
    variants: Mapping[str, Any] = getattr(layer, "lora_variant", {})
    if getattr(layer, "use_dora", {}).get(adapter) or adapter in variants:
        raise Unfoldable(f"{kind} does more than add a product of low rank ({adapter})")
    dropout = layer.lora_dropout[adapter]
    if layer.training and getattr(dropout, "p", 0.0) > 0.0:
        raise Unfoldable(f"dropout {dropout.p} on the adapter's branch while training ({adapter})")
    if getattr(up[adapter], "bias", None) is not None:
        raise Unfoldable(f"the adapter has a bias of its own ({adapter})")
    weight = (up[adapter].weight @ down[adapter].weight) * layer.scaling[adapter]
    weight = weight.t() if getattr(layer, "fan_in_fan_out", False) else weight
    base = layer.get_base_layer().weight
    if weight.shape != base.shape:
        raise Unfoldable(f"{kind} adapts {list(base.shape)} with {list(weight.shape)}")
    return weight.to(base.dtype)
