"""Large results on a processor lie on huge pages where the system gives them on request.

Memory from the system comes in pages of 4 KiB, each cleared on its first touch. A result of 100 MB is 25,000
of them, and taking them costs more than writing it does. Torch's allocator does not ask for pages of 2 MiB
unless THP_MEM_ALLOC_ENABLE is set; NumPy does for arrays of 4 MiB and more (its alloc.c), and so do blocks.
Where the system has no such pages, or always gives them, asking changes nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

Described = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and type of memory that a plan asks for."""

LARGE = 4 << 20
"""Bytes from which on huge pages are asked for; as in `runtime/_torch.h`."""
PAGE = 4096
HUGE = 14  # MADV_HUGEPAGE
_madvise = getattr(ctypes.CDLL(None), "madvise", None)
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def large(fresh: Sequence[Described], index: int) -> tuple[int, ...]:
    """Which of the memory that a plan asks for is large, counted from its end; on a processor only."""
    if index >= 0 or _madvise is None:
        return ()
    sizes = [kind.itemsize * _elements(shape, stride) for shape, stride, kind in fresh]
    return tuple([at - len(sizes) for at, nbytes in enumerate(sizes) if nbytes >= LARGE])


def advise(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> None:
    """Asks for huge pages for these, which are dense and fresh."""
    for at in places:
        asked(tensors[at])


def asked(fresh: torch.Tensor) -> torch.Tensor:
    """The tensor, of memory that nobody wrote yet, on huge pages where it is large. A refusal is no matter:
    pages are small then."""
    nbytes = fresh.untyped_storage().nbytes()
    if nbytes >= LARGE and _madvise is not None:
        begin = -(-fresh.data_ptr() // PAGE) * PAGE
        end = (fresh.data_ptr() + nbytes) // PAGE * PAGE
        _madvise(begin, end - begin, HUGE)
    return fresh


def _elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
