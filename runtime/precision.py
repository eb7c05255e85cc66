"""How torch multiplies float32 operands of a library call on a card: as declared, whatever the flags say.

torch keeps two process-wide flags: products default to full float32, convolutions to TF32 (ten bits of
mantissa). A step says `ieee` or `tf32`, and that is part of the artifact's meaning; so a flag that says
otherwise is turned for the length of the call and put back. Calls of other threads that torch begins in
between see the turned flag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.extern import Run

_C: Any = torch._C


def _convolution() -> tuple[Callable[[], bool], Callable[[bool], None]]:
    """The flag of convolutions alone where torch has one (2.9), else the one of all of cuDNN."""
    get, put = (getattr(_C, f"_{w}_fp32_precision_{w}ter", None) for w in ("get", "set"))
    if get is None or put is None:
        return _C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32
    return lambda: get("cuda", "conv") == "tf32", lambda on: put("cuda", "conv", "tf32" if on else "ieee")


_FLAGS: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "matmul": (_C._get_cublas_allow_tf32, _C._set_cublas_allow_tf32),
    "cudnn": _convolution(),
}


def allows_tf32(flag: str) -> bool:
    """Whether torch's flag ("matmul", "cudnn") lets float32 operands be cut to TF32 on a card."""
    return _FLAGS[flag][0]()


def declared(run: Run, flag: str, tf32: bool) -> Run:
    """`run` under the flag ("matmul", "cudnn") that its step declares. torch's own error where its two ways
    of setting a flag were mixed so that they contradict each other.
    """
    get, put = _FLAGS[flag]

    def under(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor] | None:
        kind = inputs[-1]
        if kind.dtype is not torch.float32 or not kind.is_cuda or get() is tf32:
            return run(inputs, outs)
        put(tf32)
        try:
            return run(inputs, outs)
        finally:
            put(not tf32)

    return under
