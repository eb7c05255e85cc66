"""The implementations that are measured beside each other, each as a function of a block's leaves."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch.nn import functional as F

import runtime
from bench.blocks import Block
from esper_ir import canonical, text
from library.store import Library
from runtime.binding import Block as Native

try:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.group_norm import LigerGroupNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.softmax import LigerSoftmaxFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
except ImportError:
    LigerFusedAddRMSNormFunction = None

Fn = Callable[..., Any]
EAGER, COMPILE, MAX, LIGER = "eager", "compile", "compile-max-autotune", "liger"
COMPILE_OPTIONS: dict[str, dict[str, Any]] = {
    COMPILE: {},
    # Without CUDA graphs; coordinate descent is part of this mode.
    MAX: {"mode": "max-autotune-no-cudagraphs"},
}


def _liger() -> dict[str, Fn]:
    if LigerFusedAddRMSNormFunction is None or not torch.cuda.is_available():
        return {}
    return {
        "rmsnorm_residual": lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6)[0],
        "layernorm": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5),
        "softmax": lambda x: LigerSoftmaxFunction.apply(x),
        "cross_entropy": lambda x, t: LigerCrossEntropyFunction.apply(x, t, None)[0],
        "swiglu": lambda x, wg, wu, wd: LigerSiLUMulFunction.apply(x @ wg, x @ wu) @ wd,
        "groupnorm_silu": lambda x, w, b: F.silu(LigerGroupNormFunction.apply(x, w, b, x.shape[1], 32, 1e-5)),
    }


LIGER_BLOCKS = _liger()


def names(block: Block, device: torch.device) -> list[str]:
    """Peers of a block on a device; max-autotune is for cards."""
    found = [EAGER, COMPILE]
    if device.type == "cuda":
        found.append(MAX)
    return found + ([LIGER] if block.name in LIGER_BLOCKS else [])


def peer(name: str, block: Block, args: list[Tensor], cotangent: Tensor) -> tuple[Fn, float]:
    """(function, seconds until its first forward and backward were done). Compiled for exactly these
    sizes."""
    fn = LIGER_BLOCKS[block.name] if name == LIGER else block.fn
    if name in COMPILE_OPTIONS:
        inductor.force_disable_caches = True  # so that the seconds are those of a compilation
        fn = torch.compile(_own(fn), dynamic=False, **COMPILE_OPTIONS[name])
    begin = time.perf_counter()
    torch.autograd.grad(fn(*args), [t for t in args if t.requires_grad], cotangent)
    with torch.no_grad():
        fn(*args)
    if args[0].is_cuda:
        torch.cuda.synchronize()
    return fn, time.perf_counter() - begin


def _own(fn: Fn) -> Fn:
    """A copy with a code object of its own, since Dynamo keeps what it compiled by code object."""
    assert isinstance(fn, types.FunctionType)
    return types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )


def blueprint_id(path: Path) -> str:
    return canonical.blueprint_id(text.load(path))


def esper(name: str, library: Library, **options: Any) -> Native:
    """An artifact, or the best proven one of a blueprint here, called with every leaf in the file's order."""
    return runtime.load(name, library=library, functional=True, **options)
