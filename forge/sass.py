"""A look at what the assembler wrote, for a known fault of it.

ptxas 12.8 builds wrong wgmma descriptors for some kernels that read one shared buffer plainly and later
transposed: the low half of an address is carried into a high half that starts from the low half again. Seen
as weight gradients off by 170 %, or as an illegal address; 12.9 and 13.1 write the pair correctly from the
same PTX (bench/NOTES.md).
"""

from __future__ import annotations

import re

_LOW = re.compile(r"UIADD3 (UR\d+), (UP\d), (UR\d+), (\S+), URZ ;")
_HIGH = re.compile(r"UIADD3\.X (UR\d+), (UR\d+), (\S+), URZ, (UP\d), !UPT ;")
_WRITE = re.compile(r"\bU[A-Z0-9]+(?:\.\S+)? (UR\d+),")


def bad_carries(sass: str) -> list[str]:
    """Offending instruction pairs in the disassembly of a module; empty when there is none."""
    if "HGMMA" not in sass:
        return []
    pending: dict[str, tuple[str, str]] = {}
    out: list[str] = []
    for line in sass.splitlines():
        high = _HIGH.search(line)
        if high and pending.get(high[4], ("", ""))[0] == high[2]:
            out.append(f"{pending[high[4]][1]} | {line.strip()}")
        written = _WRITE.search(line)
        if written:  # rewritten in between: the pair is sound
            pending = {p: v for p, v in pending.items() if v[0] != written[1]}
        low = _LOW.search(line)
        if low and low[1] != low[3]:
            pending[low[2]] = (low[3], line.strip())
    return out
