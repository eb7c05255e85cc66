"""NVIDIA GeForce RTX 4090."""

from forge.energy import published
from forge.target import Target

TARGET = Target(
    name="rtx4090",
    kind="cuda",
    arch="sm_89",
    capability=89,
    aliases=("sm_89", "ada"),
    cards=("4090",),
    shared_bytes=101376,
    max_warps=48,
    multiprocessors=128,
    async_copies=True,
    copy_TBps=0.89,
    bf16_TFLOPs=165.0,
    l2_bytes=72 << 20,
    memory_bytes=24 * 10**9,
    ptx_version=84,
    energy=published(450, 0.89, 165.0, 82.6),
    summary="NVIDIA GeForce RTX 4090, Ada",
)
