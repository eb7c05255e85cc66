"""Merkle tree hashing of RFC 9162, section 2.1: leaf = SHA-256(0x00 || entry),
node = SHA-256(0x01 || left || right)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

EMPTY = hashlib.sha256(b"").digest()


def leaf_hash(entry: bytes) -> bytes:
    """Hash of one entry."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of an inner node."""
    return hashlib.sha256(b"\x01" + left + right).digest()


@dataclass(frozen=True)
class Frontier:
    """The tree's right edge: roots of the perfect subtrees that `size` splits into, largest first.

    Enough to append and to know the root; at most 64 hashes for any size.
    """

    size: int = 0
    peaks: tuple[bytes, ...] = ()

    def append(self, leaf: bytes) -> Frontier:
        """The frontier of the tree with one more leaf hash."""
        peaks, low = [*self.peaks, leaf], self.size
        while low & 1:
            right = peaks.pop()
            peaks.append(node_hash(peaks.pop(), right))
            low >>= 1
        return Frontier(self.size + 1, tuple(peaks))

    def root(self) -> bytes:
        """Tree head: right-to-left fold of the peaks."""
        if not self.peaks:
            return EMPTY
        head = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            head = node_hash(peak, head)
        return head

    def pack(self) -> bytes:
        """Peaks as bytes, for the row that keeps them."""
        return b"".join(self.peaks)

    @staticmethod
    def unpack(size: int, data: bytes) -> Frontier:
        """Inverse of `pack`; ValueError when the number of peaks does not fit the size."""
        if len(data) != 32 * size.bit_count():
            raise ValueError("frontier does not fit its size")
        return Frontier(size, tuple(data[i : i + 32] for i in range(0, len(data), 32)))


def _split(size: int) -> int:
    """Largest power of two smaller than `size`."""
    return 1 << ((size - 1).bit_length() - 1)


def root_of(leaves: Sequence[bytes]) -> bytes:
    """Tree head over leaf hashes."""
    frontier = Frontier()
    for leaf in leaves:
        frontier = frontier.append(leaf)
    return frontier.root()


class Tree:
    """All leaf hashes of a log, with the perfect subtrees computed once, for many proofs."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self._levels: list[list[bytes]] = [list(leaves)]
        while len(self._levels[-1]) > 1:
            below = self._levels[-1]
            self._levels.append([node_hash(below[i], below[i + 1]) for i in range(0, len(below) - 1, 2)])

    def __len__(self) -> int:
        return len(self._levels[0])

    def head(self, low: int, high: int) -> bytes:
        """Tree head over leaves low to high - 1, where `low` is a multiple of the next power of two."""
        size = high - low
        if size & (size - 1) == 0:
            level = size.bit_length() - 1
            return self._levels[level][low >> level]
        middle = low + _split(size)
        return node_hash(self.head(low, middle), self.head(middle, high))

    def inclusion(self, index: int, size: int) -> list[bytes]:
        """Audit path of leaf `index` in the tree of the first `size` (section 2.1.3.1), lowest sibling
        first.
        """
        return self._path(index, 0, size)

    def _path(self, index: int, low: int, high: int) -> list[bytes]:
        if high - low == 1:
            return []
        middle = low + _split(high - low)
        if index < middle:
            return [*self._path(index, low, middle), self.head(middle, high)]
        return [*self._path(index, middle, high), self.head(low, middle)]

    def consistency(self, old: int, new: int) -> list[bytes]:
        """Proof that the tree of `old` leaves is a prefix of that of `new` (section 2.1.4.1)."""
        return self._subproof(old, 0, new, True) if 0 < old < new else []

    def _subproof(self, old: int, low: int, high: int, whole: bool) -> list[bytes]:
        if old == high:
            return [] if whole else [self.head(low, high)]
        middle = low + _split(high - low)
        if old <= middle:
            return [*self._subproof(old, low, middle, whole), self.head(middle, high)]
        return [*self._subproof(old, middle, high, False), self.head(low, middle)]


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Section 2.1.3.2."""
    if not 0 <= index < size:
        return False
    fn, sn, head = index, size - 1, leaf
    for sibling in proof:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            head = node_hash(sibling, head)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            head = node_hash(head, sibling)
        fn, sn = fn >> 1, sn >> 1
    return sn == 0 and head == root


def verify_consistency(old: int, new: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Section 2.1.4.2."""
    if old == new:
        return not proof and old_root == new_root
    if not 0 < old < new or not proof:
        return old == 0 and not proof
    path = list(proof) if old & (old - 1) else [old_root, *proof]
    fn, sn = old - 1, new - 1
    while fn & 1:
        fn, sn = fn >> 1, sn >> 1
    old_head = new_head = path[0]
    for sibling in path[1:]:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            old_head, new_head = node_hash(sibling, old_head), node_hash(sibling, new_head)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            new_head = node_hash(new_head, sibling)
        fn, sn = fn >> 1, sn >> 1
    return sn == 0 and old_head == old_root and new_head == new_root
