"""NVIDIA H200 (SXM): an H100 with faster memory."""

from forge.energy import published
from forge.target import Target

TARGET = Target(
    name="h200",
    kind="cuda",
    arch="sm_90a",
    capability=90,
    match="exact",
    cards=("H200",),
    shared_bytes=232448,
    multiprocessors=132,
    async_copies=True,
    copy_TBps=4.25,
    bf16_TFLOPs=989.0,
    l2_bytes=50 << 20,
    memory_bytes=141 * 10**9,
    ptx_version=84,
    energy=published(700, 4.25, 989.0, 67.0),
    summary="NVIDIA H200, Hopper",
)
