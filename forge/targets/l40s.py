"""NVIDIA L40S."""

from forge.energy import published
from forge.target import Target

TARGET = Target(
    name="l40s",
    kind="cuda",
    arch="sm_89",
    capability=89,
    cards=("L40S",),
    shared_bytes=101376,
    max_warps=48,
    multiprocessors=142,
    async_copies=True,
    copy_TBps=0.76,
    bf16_TFLOPs=362.0,
    l2_bytes=96 << 20,
    memory_bytes=48 * 10**9,
    ptx_version=84,
    energy=published(350, 0.76, 362.0, 91.6),
    summary="NVIDIA L40S, Ada",
)
