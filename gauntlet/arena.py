"""Memory with a fence around it: what a kernel writes beyond its buffers, or reads there, becomes visible.

zones   bytes on both sides are filled at random and compared after the launch; any device
pages   (CPU) the pages on both sides may not be touched, so that a stray access, even a read, is a signal,
        and inputs may not be written; `end` puts the buffer against the upper page, `start` against the
        lower one
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ZONE = 4096
MAX_ZONE = 1 << 16
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


POOL = 1 << 20
_pools: dict[torch.device, Tensor] = {}


def random_bytes(count: int, seed: int, device: torch.device) -> Tensor:
    """`count` random bytes, not to be written to; the same seed gives the same. They are a stretch, chosen by
    the seed, of a pool that is drawn once."""
    pool = _pools.get(device)
    if pool is None or pool.numel() < 2 * max(count, POOL):
        pool = _pools[device] = _drawn(2 * max(count, POOL), device)
    start = seed * 2654435761 % POOL // 8 * 8
    return pool[start : start + count]


def _drawn(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(POOL)
    words = torch.empty((count + 7) // 8, dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count]


def poison(tensor: Tensor, seed: int) -> None:
    """Fill a dense tensor with random bytes, whatever they mean in its dtype."""
    flat = _bytes(tensor)
    flat.copy_(random_bytes(flat.numel(), seed, tensor.device))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in order of its elements."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_libc_memcmp = ctypes.CDLL(None).memcmp
_libc_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype and every byte agree. Both on one device."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_contiguous() and b.is_contiguous()):
        a, b = a.contiguous(), b.contiguous()
    if a.is_cpu and b.is_cpu:
        return _libc_memcmp(a.data_ptr(), b.data_ptr(), a.numel() * a.itemsize) == 0
    word = WORDS[a.itemsize]
    return torch.equal(a.view(word), b.view(word))


Pair = tuple[Tensor, Tensor]


def all_same(pairs: Sequence[Pair]) -> bool:
    """Whether `same_bits` holds for all; on a card one wait, whatever their number."""
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return False
    if all(a.is_cpu and b.is_cpu for a, b in pairs):
        return all(same_bits(a, b) for a, b in pairs)
    found = differing(pairs)
    return found is None or not bool(found)


def differing(pairs: Sequence[Pair]) -> Tensor | None:
    """On the device, without waiting for it: one truth value, whether any bit of any pair differs. None where
    there is nothing to compare. Shapes and types of a pair agree."""
    flags = [_word(a).ne(_word(b)).any() for a, b in pairs if a.numel()]
    return torch.stack(flags).any() if flags else None


def _word(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(WORDS[tensor.itemsize])


@dataclass
class _Fence:
    name: str
    whole: Tensor
    zone: int
    size: int
    lead: int
    before: Tensor
    after: Tensor

    def sides(self) -> tuple[Pair, Pair]:
        """What lies before and behind: as it is and as it was."""
        low, high = self.whole[: self.lead], self.whole[self.lead + self.size :]
        return (low, self.before), (high, self.after)

    def breach(self) -> str:
        found = []
        for side, (now, then) in zip(("before", "after"), self.sides(), strict=True):
            wrong = torch.nonzero(now != then).flatten()
            if wrong.numel():
                at = int(wrong[-1]) - self.lead if side == "before" else int(wrong[0])
                found.append(f"{wrong.numel()} bytes {side} {self.name!r} changed, the nearest at {at:+d}")
        return "; ".join(found)


class Zones:
    """Allocates fenced tensors of one run and says which fence was broken."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed
        self._fences: list[_Fence] = []

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, shift: int = 0) -> Tensor:
        """Poisoned tensor of `shape`; `shift` elements away from a 256-byte boundary."""
        size = prod(shape) * dtype.itemsize
        zone = min(max(ZONE, size), MAX_ZONE) // 256 * 256
        lead = zone + shift * dtype.itemsize
        self.seed += 1
        drawn = random_bytes(lead + size + zone, self.seed, self.device)
        before, after = drawn[:lead], drawn[lead + size :]  # of the pool, which nobody is given
        whole = drawn.clone()
        self._fences.append(_Fence(name, whole, zone, size, lead, before, after))
        return whole[lead : lead + size].view(dtype).reshape(shape)

    def seal(self) -> None:
        """Nothing: writes to inputs are found afterwards."""

    def sides(self) -> list[Pair]:
        """Of every fence what must be as it was, beside what it was."""
        return [side for fence in self._fences for side in fence.sides()]

    def breaches(self) -> str:
        """What was written outside, as a phrase; empty when nothing was."""
        return "; ".join(found for fence in self._fences if (found := fence.breach()))


def _protect(start: int, size: int, rights: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(size), rights):
        raise OSError(ctypes.get_errno(), "mprotect")


class Pages:
    """Allocates tensors between untouchable pages (CPU). They live as long as this object."""

    def __init__(self, seed: int, side: str = "end") -> None:
        self.side, self.seed = side, seed
        self._maps: list[mmap.mmap] = []
        self._inner: list[tuple[int, int]] = []

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, shift: int = 0) -> Tensor:
        """Poisoned tensor of `shape` against the guard page of the chosen side."""
        size = prod(shape) * dtype.itemsize
        inner = max(_PAGE, -(-size // _PAGE) * _PAGE)
        whole = mmap.mmap(-1, inner + 2 * _PAGE)
        self._maps.append(whole)
        start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        self._inner.append((start + _PAGE, inner))
        for page in (start, start + _PAGE + inner):
            _protect(page, _PAGE, 0)
        if not size:
            return torch.empty(shape, dtype=dtype)
        at = start + _PAGE + (inner - size if self.side == "end" else 0)
        view = (ctypes.c_char * size).from_address(at)
        tensor = torch.frombuffer(view, dtype=dtype, count=size // dtype.itemsize).reshape(shape)
        self.seed += 1
        poison(tensor, self.seed)
        return tensor

    def seal(self) -> None:
        """What was allocated so far may be read only: also a write of the bytes that are there is a signal.
        Other threads may read them at that time, and other kernels write them."""
        for start, size in self._inner:
            _protect(start, size, mmap.PROT_READ)

    def sides(self) -> list[Pair]:
        """Nothing: nobody can have written there."""
        return []

    def breaches(self) -> str:
        """A breach is a signal here."""
        return ""
