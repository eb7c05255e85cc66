"""x86-64 processors with AVX-512 (F, BW, CD, DQ, VL)."""

from forge.energy import published
from forge.target import Target

TARGET = Target(
    name="cpu-v4",
    kind="cpu",
    arch="x86-64-v4",
    warp=1,
    aliases=("x86-64-v4", "avx512"),
    max_warps=1,
    copy_TBps=0.02,
    bf16_TFLOPs=0.2,
    l2_bytes=1 << 20,
    vector_bytes=64,
    contractions="extern",
    dot_dtypes=(),
    energy=published(150, 0.02, 0.2, 2.0, "a processor of"),
    summary="x86-64 with AVX-512, C and OpenMP",
)
