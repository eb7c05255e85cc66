"""NVIDIA T4: no bfloat16, and matrix instructions out of Triton's reach: contractions are library calls."""

from esper_ir.types import DType
from forge.energy import published
from forge.target import Target

TARGET = Target(
    name="t4",
    kind="cuda",
    arch="sm_75",
    capability=75,
    aliases=("sm_75", "turing"),
    cards=("T4",),
    shared_bytes=65536,
    max_warps=32,
    multiprocessors=40,
    copy_TBps=0.28,
    l2_bytes=4 << 20,
    memory_bytes=16 * 10**9,
    contractions="extern",
    dot_dtypes=(),
    dtypes=tuple(d for d in DType if d is not DType.bfloat16),
    ptx_version=84,
    energy=published(70, 0.28, 65.0, 8.1),
    summary="NVIDIA T4, Turing",
)
