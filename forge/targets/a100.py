"""NVIDIA A100 (SXM, 80 GB)."""

from forge.energy import published
from forge.target import Target

TARGET = Target(
    name="a100",
    kind="cuda",
    arch="sm_80",
    capability=80,
    aliases=("sm_80", "ampere"),
    cards=("A100",),
    shared_bytes=166912,
    multiprocessors=108,
    async_copies=True,
    copy_TBps=1.80,
    bf16_TFLOPs=312.0,
    l2_bytes=40 << 20,
    memory_bytes=80 * 10**9,
    ptx_version=84,
    energy=published(400, 1.80, 312.0, 19.5),
    summary="NVIDIA A100, Ampere",
)
