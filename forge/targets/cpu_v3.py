"""x86-64 processors with AVX2, FMA and F16C."""

from forge.energy import published
from forge.target import Target

TARGET = Target(
    name="cpu-v3",
    kind="cpu",
    arch="x86-64-v3",
    warp=1,
    aliases=("x86-64-v3", "avx2"),
    max_warps=1,
    copy_TBps=0.02,
    bf16_TFLOPs=0.1,
    l2_bytes=1 << 20,
    vector_bytes=32,
    contractions="extern",
    dot_dtypes=(),
    energy=published(150, 0.02, 0.1, 1.0, "a processor of"),
    summary="x86-64 with AVX2, C and OpenMP",
)
