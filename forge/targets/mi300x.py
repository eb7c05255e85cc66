"""AMD Instinct MI300X: compiled for, never measured here."""

from forge.energy import published
from forge.target import Target

TARGET = Target(
    name="mi300x",
    kind="hip",
    arch="gfx942",
    warp=64,
    match="exact",
    aliases=("gfx942",),
    cards=("MI300X",),
    shared_bytes=65536,
    max_warps=32,
    multiprocessors=304,
    copy_TBps=4.7,
    bf16_TFLOPs=1307.0,
    l2_bytes=32 << 20,
    memory_bytes=192 * 10**9,
    energy=published(750, 4.7, 1307.0, 163.4),
    summary="AMD Instinct MI300X (compile only)",
)
