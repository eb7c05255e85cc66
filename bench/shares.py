"""Figures of bench.products: products beside the library's, families beside the best of their peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench import figures as blocks
from bench.families import PRODUCTS, SMALL, SWIGLU
from bench.measure import PHASES
from bench.peers import EAGER
from bench.results import figure, geomean

OWN_SHARE, CHOSEN_SHARE, AHEAD, GATED_AHEAD = 0.90, 0.98, 1.0, 1.1
ALONE = ("matmul_nn", "matmul_nt", "matmul_tn")
Row = dict[str, Any]
Ratios = dict[str, tuple[float, float, float]]


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Of each family that was measured, with targets: runs of single families join in one file."""
    found: dict[str, Any] = {}
    for family, judge in ((PRODUCTS, _products), (SMALL, _small), (SWIGLU, _gated)):
        mine = [r for r in rows if r["family"] == family]
        ours = [r for r in mine if blocks.is_ours(r)]
        wrong = sorted({f"{r['case']} {r['impl']}" for r in ours if not r.get("correct")})
        if mine:
            found |= judge(mine) | {f"{family}_wrong_or_missing": figure(len(wrong), "cases", 0, which=wrong)}
    return found


def _products(rows: Sequence[Row]) -> dict[str, Any]:
    """Speed of kernels of ours, and of what the forge takes by default, as shares of torch.matmul's; with an
    epilogue as shares of the best peer's."""
    quantity = "dev" if any(r.get("dev_ms") for r in rows) else "wall"
    alone = [r for r in rows if r["block"] in ALONE]
    fused = [r for r in rows if r["block"] not in ALONE]
    own = _of(alone, quantity, lambda r: r["impl"] != "esper-fast")
    chosen = _of(alone, quantity, lambda r: r["impl"] != "esper-own")
    out = _least("own_products_vs_library", own, OWN_SHARE)
    out |= _least("chosen_products_vs_library", chosen, CHOSEN_SHARE)
    for name, left in (("own", "esper-fast"), ("chosen", "esper-own")):
        found = _of(fused, quantity, lambda r, left=left: r["impl"] != left)
        out |= _least(
            f"{name}_products_with_epilogue_vs_best_peer", found, AHEAD if name == "chosen" else None
        )
        eager = _of(
            fused,
            quantity,
            lambda r, left=left: r["impl"] == EAGER or blocks.is_ours(r) and r["impl"] != left,
        )
        out |= {f"{name}_products_with_epilogue_vs_eager": figure(geomean(_mids(eager)), "ratio")}
    tried = [r["tried"] for r in rows if r.get("tried")]
    return {**out, "own_products_tiles_tried": figure(min(tried, default=None), "tiles", over=len(tried))}


def _small(rows: Sequence[Row]) -> dict[str, Any]:
    """Wall and device time plain, wall graphed, each phase: ahead of every peer."""
    out: dict[str, Any] = {}
    for mode, quantity in (("plain", "wall"), ("plain", "dev"), ("graphed", "wall")):
        for phase in PHASES:
            found = _of(rows, quantity, mode=mode, phase=phase)
            name = f"small_{phase}_{mode if mode == 'graphed' else quantity}"
            behind = {k: round(v[0], 3) for k, v in found.items() if v[0] < AHEAD}
            out[f"{name}_geomean_vs_best_peer"] = figure(
                geomean(_mids(found)), "ratio", AHEAD, at_least=True, over=len(found)
            )
            count = len(behind) if found else None
            out[f"{name}_behind_a_peer"] = figure(count, "sizes", 0, which=behind)
    return out


def _gated(rows: Sequence[Row]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for quantity in ("dev", "wall"):
        out |= _least(f"swiglu_fb_{quantity}_vs_best_peer", _of(rows, quantity, phase="fb"), GATED_AHEAD)
    return out


def _of(
    rows: Sequence[Row], quantity: str, keep: Callable[[Row], bool] = lambda r: True, *, mode: str = "plain",
    phase: str = "f",
) -> Ratios:  # fmt: skip
    return blocks.ratios([r for r in rows if keep(r)], quantity, mode, phase)


def _mids(found: Ratios) -> list[float]:
    return [mid for mid, _, _ in found.values()]


def _least(name: str, found: Ratios, target: float | None) -> dict[str, Any]:
    """The smallest ratio with its bounds, by which the target is met, all of them, and their mean."""
    worst = min(found, key=lambda k: found[k][0], default=None)
    mid, low, high = found[worst] if worst else (None, None, None)
    each = {k: v[0] for k, v in found.items()}
    return {
        f"{name}_min": figure(mid, "ratio", target, at_least=True, lo=low, hi=high, each=each),
        f"{name}_geomean": figure(geomean(_mids(found)), "ratio", over=len(found)),
    }
