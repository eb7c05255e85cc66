"""NVIDIA B200."""

from forge.energy import published
from forge.target import Target

TARGET = Target(
    name="b200",
    kind="cuda",
    arch="sm_100a",
    capability=100,
    match="exact",
    aliases=("sm_100", "sm_100a", "blackwell"),
    cards=("B200",),
    shared_bytes=232448,
    multiprocessors=148,
    async_copies=True,
    copy_TBps=7.1,
    bf16_TFLOPs=2250.0,
    l2_bytes=126 << 20,
    memory_bytes=180 * 10**9,
    ptx_version=86,
    energy=published(1000, 7.1, 2250.0, 80.0),
    summary="NVIDIA B200, Blackwell",
)
