"""The implementations that are measured beside each other, each as a function of a block's leaves."""

from __future__ import annotations

import importlib
import importlib.util
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import mark_static_address
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.nn import functional as F

import runtime
from bench.blocks import Block
from esper_ir import canonical, text
from library.store import Library
from runtime.binding import Block as Native

LIGER_FUNCTIONS = {  # module of liger_kernel.ops -> its autograd function
    "cross_entropy": "LigerCrossEntropyFunction",
    "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
    "group_norm": "LigerGroupNormFunction",
    "layer_norm": "LigerLayerNormFunction",
    "rms_norm": "LigerRMSNormFunction",
    "softmax": "LigerSoftmaxFunction",
    "swiglu": "LigerSiLUMulFunction",
}
Fn = Callable[..., Any]
EAGER, COMPILE, MAX, LIGER = "eager", "compile", "compile-max-autotune", "liger"
REDUCE = "compile-reduce-overhead"
OURS = "esper"
"""Our own block, by whatever pipeline made it."""
SYNCHRONISING = ("cross_entropy", "linear_cross_entropy")
"""Blocks whose function of Liger asks the card for a number: no CUDA graph can hold it."""
OWN_TENSORS = (LIGER, REDUCE)
"""Liger's functions write gradients into their inputs and cotangents; CUDA graphs are told that addresses
stay, which other compilers must not hear."""


def best_options() -> dict[str, Any]:
    """max-autotune-no-cudagraphs as torch defines it, with the switches of this torch that it leaves off."""
    wanted = {"max_autotune": True, "coordinate_descent_tuning": True}
    if torch.cuda.is_available() and hasattr(inductor.triton, "enable_persistent_tma_matmul"):
        wanted["triton.enable_persistent_tma_matmul"] = True
    return wanted


def compile_options(name: str) -> dict[str, Any]:
    """Arguments of torch.compile."""
    if name == MAX:
        return {"options": best_options()}
    return {"mode": "reduce-overhead"} if name == REDUCE else {}


def _liger() -> dict[str, Fn]:
    """Where it has the block: the same mathematics, a gradient for every leaf. (Its GEGLU is tanh's, its
    divergence has no gradient for the target.)"""
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        return {}
    of = {
        module: getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply
        for module, name in LIGER_FUNCTIONS.items()
    }
    return {
        "rmsnorm_residual": lambda x, r, w: of["fused_add_rms_norm"](x, r, w, 1e-6)[0],
        "layernorm": lambda x, w, b: of["layer_norm"](x, w, b, 1e-5),
        "softmax": lambda x: of["softmax"](x),
        "cross_entropy": lambda x, t: of["cross_entropy"](x, t, None)[0],
        "linear_cross_entropy": lambda x, t, w: _first(of["fused_linear_cross_entropy"](x, w.t(), t)),
        "embedding_norm": lambda t, e, w: of["rms_norm"](F.embedding(t, e), w, 1e-6),
        "swiglu": lambda x, wg, wu, wd: of["swiglu"](x @ wg, x @ wu) @ wd,
        "groupnorm_silu": lambda x, w, b: F.silu(of["group_norm"](x, w, b, x.shape[1], 32, 1e-5)),
    }


def _first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


LIGER_BLOCKS = _liger()


def names(block: Block, device: torch.device, every: bool = True) -> list[str]:
    """Peers of a block on a device, the one that takes longest last; tuning and CUDA graphs are for cards.
    `every` False: without max-autotune."""
    found = [EAGER, COMPILE, *([LIGER] if block.name in LIGER_BLOCKS else [])]
    if device.type == "cuda":
        found += [REDUCE, *([MAX] if every else [])]
    return found


def uncaptured(block: Block) -> tuple[str, ...]:
    """Implementations of a block that no CUDA graph is made of."""
    return (REDUCE, LIGER) if block.name in SYNCHRONISING else (REDUCE,)


def tensors(name: str, args: Sequence[Tensor], cotangent: Tensor) -> tuple[list[Tensor], Tensor]:
    """What an implementation is called with: the common tensors or copies of its own."""
    if name not in OWN_TENSORS:
        return list(args), cotangent
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in args]
    if name == REDUCE:
        for copy in copies:
            mark_static_address(copy)
    return copies, cotangent.clone()


def peer(name: str, block: Block, args: list[Tensor], cotangent: Tensor) -> tuple[Fn, float | None]:
    """(function, seconds until its first forward and backward and its first forward without gradients were
    done; None when a compiler's cache had it). Compiled for exactly these sizes."""
    fn = LIGER_BLOCKS[block.name] if name == LIGER else block.fn
    if name in (COMPILE, MAX, REDUCE):
        fn = torch.compile(_own(fn), dynamic=False, **compile_options(name))
    before, begin = _cached(), time.perf_counter()
    wanted = [t for t in args if t.requires_grad]
    if wanted:
        torch.autograd.grad(fn(*args), wanted, cotangent)
    with torch.no_grad():
        fn(*args)
    if args[0].is_cuda:
        torch.cuda.synchronize()
    spent = time.perf_counter() - begin
    return fn, None if _cached() > before else spent


def _cached() -> int:
    return int(counters["inductor"]["fxgraph_cache_hit"])


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
