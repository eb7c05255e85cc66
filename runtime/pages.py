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

from runtime.layout import Fresh

LARGE = 4 << 20
"""Bytes from which on huge pages are asked for; as in `runtime/_torch.h`."""
PAGE = 4096
HUGE = 14  # MADV_HUGEPAGE
_madvise = getattr(ctypes.CDLL(None), "madvise", None)
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def large(fresh: Sequence[Fresh], index: int) -> tuple[int, ...]:
    """Which of the memory that a plan asks for is large, counted from its end; on a processor only."""
    if index >= 0 or _madvise is None:
        return ()
    sizes = [getattr(torch, f.dtype).itemsize * _elements(f) for f in fresh]
    return tuple([at - len(sizes) for at, nbytes in enumerate(sizes) if nbytes >= LARGE])


def advise(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> None:
    """Asks for huge pages for these. A refusal is no matter: pages are small then."""
    assert _madvise is not None
    for at in places:
        begin = -(-tensors[at].data_ptr() // PAGE) * PAGE
        end = (tensors[at].data_ptr() + tensors[at].untyped_storage().nbytes()) // PAGE * PAGE
        _madvise(begin, end - begin, HUGE)


def _elements(fresh: Fresh) -> int:
    if 0 in fresh.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(fresh.shape, fresh.stride, strict=True))
