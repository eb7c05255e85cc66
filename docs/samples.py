"""The page of torch's operator samples: what ran, what has no counterpart and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COUNTS = Path(__file__).resolve().parent.parent / "tests" / "esper_ir" / "opinfo" / "counts.json"
KINDS = ("float64", "float32", "bfloat16")
HEAD = """# torch's operator samples

The operators of the language mean what torch's operators of that name mean. PyTorch tests its own with
samples (`torch.testing._internal`); the same samples run here: the call is written as a blueprint, evaluated
whole and expanded to primitives, and its gradients are compared with autograd, in three element types. A
result may be off by four times torch's own distance from float64 and a few roundings of its type (gradients
of attention by eight times as many: they take the result as it was rounded, as flash attention does).

`make test-slow` runs all of them, `make test` the first one of each. Cells are samples passed of samples run
(a dash: torch has none in that type). "refused" counts torch's error inputs that end in an `EsperError`.

This page is generated from `tests/esper_ir/opinfo/counts.json` by `make docs`.
"""


def page() -> str:
    document: dict[str, Any] = json.loads(COUNTS.read_text(encoding="utf-8"))
    rows: dict[str, Any] = document["operators"]
    return "\n".join([HEAD, _summary(document["torch"], rows), _reasons(rows), _table(rows)])


def _summary(torch: str, rows: dict[str, Any]) -> str:
    lines = ["| element type | run | passed | with gradients | excluded |", "|---|---|---|---|---|"]
    total = [0, 0, 0, 0]
    for kind in KINDS:
        sums = [sum(r["counts"].get(kind, [0] * 4)[i] for r in rows.values()) for i in range(4)]
        total = [a + b for a, b in zip(total, sums, strict=True)]
        lines.append(f"| {kind} | " + " | ".join(f"{n:,}" for n in sums) + " |")
    lines.append("| all | " + " | ".join(f"{n:,}" for n in total) + " |")
    share = 100 * total[3] / max(total[0] + total[3], 1)
    refused = sum(r["refused"][0] for r in rows.values())
    told = f"torch {torch}, {len(rows)} operators, {share:.1f} % excluded, {refused} error inputs refused."
    return f"{told}\n\n" + "\n".join(lines) + "\n"


def _reasons(rows: dict[str, Any]) -> str:
    reasons: dict[str, int] = {}
    for row in rows.values():
        for reason, count in row["reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"| {reason} | {count} |" for reason, count in ordered]
    return "\n".join(["## Excluded, and why", "", "| reason | samples |", "|---|---|", *lines]) + "\n"


def _table(rows: dict[str, Any]) -> str:
    lines = ["## By operator", "", f"| operator of torch | {' | '.join(KINDS)} | excluded | refused |"]
    lines.append("|---|---|---|---|---|---|")
    for name, row in sorted(rows.items()):
        cells = [_cell(row["counts"].get(kind)) for kind in KINDS]
        left = sum(c[3] for c in row["counts"].values())
        lines.append(f"| `{name}` | {' | '.join(cells)} | {left or ''} | {row['refused'][0] or ''} |")
    return "\n".join(lines) + "\n"


def _cell(counts: list[int] | None) -> str:
    return "-" if counts is None else f"{counts[1]} of {counts[0]}"
