"""What work costs in joules: an estimate that orders choices, from constants that are data of a target.

Energy of a call = bytes moved x energy a byte + operations x energy an operation + static power x time, the
time being the larger of the two floors. (The form is that of Choi et al., A Roofline Model of Energy, IPDPS
2013.)
"""

from __future__ import annotations

from dataclasses import dataclass

STATIC_SHARE = 0.12
"""Of a board's power that flows whatever runs: an idle H200 is reported at 80 W of 700."""
COPY_SHARE = 0.5
"""Of it, beyond the static share, that a copy at full rate takes. A guess between the 0.13 that the pins and
cells of the memory alone need (3.9 pJ a bit: O'Connor et al., Fine-Grained DRAM, MICRO 2017) and 1."""


@dataclass(frozen=True)
class Energy:
    """Picojoules for a byte moved to or from memory, for an operation of a product in the widest half type,
    and for a scalar operation on one element; watts that flow in any case; where the numbers are from."""

    byte_pJ: float
    flop_pJ: float
    op_pJ: float
    static_watts: float
    source: str

    def moved(self, count: float, copy_TBps: float) -> float:
        """Picojoules of `count` bytes moved at the rate of a copy."""
        return count * (self.byte_pJ + self.static_watts / copy_TBps)

    def multiplied(self, flops: float, peak_TFLOPs: float) -> float:
        """Picojoules of the operations of a product at the peak."""
        return flops * (self.flop_pJ + (self.static_watts / peak_TFLOPs if peak_TFLOPs else 0.0))

    def computed(self, ops: float) -> float:
        """Picojoules of scalar operations that hide behind what their kernel moves."""
        return ops * self.op_pJ


def published(
    board_watts: float, copy_TBps: float, half_TFLOPs: float, fp32_TFLOPs: float, what: str = "board power"
) -> Energy:
    """Constants from published limits: products and scalar work draw the board's power at their peaks (which
    bounds them from above), a copy its share. Nobody measured them; `python -m bench.power` does.
    """
    dynamic = board_watts * (1 - STATIC_SHARE)
    return Energy(
        byte_pJ=COPY_SHARE * dynamic / copy_TBps,
        flop_pJ=dynamic / half_TFLOPs,
        op_pJ=dynamic / (fp32_TFLOPs / 2),
        static_watts=board_watts * STATIC_SHARE,
        source=f"estimated: {what} {board_watts:g} W over the published rates",
    )
