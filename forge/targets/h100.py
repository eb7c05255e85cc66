"""NVIDIA H100 (SXM). The same architecture as h200: a binary for one runs on the other."""

from forge.energy import published
from forge.target import Target

TARGET = Target(
    name="h100",
    kind="cuda",
    arch="sm_90a",
    capability=90,
    match="exact",
    aliases=("sm_90", "sm_90a", "hopper"),
    cards=("H100",),
    shared_bytes=232448,
    multiprocessors=132,
    async_copies=True,
    copy_TBps=2.97,
    bf16_TFLOPs=989.0,
    l2_bytes=50 << 20,
    memory_bytes=80 * 10**9,
    ptx_version=84,
    energy=published(700, 2.97, 989.0, 67.0),
    summary="NVIDIA H100, Hopper",
)
