"""The bench `runtime`: loading, launching and the first step of one artifact in one document, beside every
other way to have a compiled block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import host, load, side
from bench.blocks import Block, Sizes
from bench.results import figure
from library.store import Library

HOST_LOAD_US = 300.0
HOST_PIECES = ("read_and_verify", "machine", "check_machine", "decode", "program", "bind")
SHOWN = ("ahead_s", "load_ms", "first_step_ms", "second_step_ms", "total_ms", "processes", "bytes", "why")


def measure(
    library: Library,
    artifact: str,
    block: Block,
    sizes: Sizes,
    ids: Mapping[str, str],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Rows of the stacked host block and of the side by side; figures of all."""
    unproven = bool(options["unproven"])
    loaded = load.measure(library, artifact, block, unproven)
    launched = host.measure(library, ids, seconds=options["host_seconds"])
    beside = side.measure(
        side.Side(library, artifact, block, sizes, unproven, options["threads"]), options["side_rounds"]
    )
    show(beside["rows"])
    details = {"load": loaded["details"], "host": {k: launched[k] for k in ("notes", "launches", "rounds")}}
    return {
        "rows": [*launched["rows"], *beside["rows"]],
        "figures": {**_gated(loaded), **launched["figures"], **beside["figures"]},
        "details": details,
    }


def _gated(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The bound on loading holds for its 99th percentile too, and the part without the driver has its own."""
    found = dict(loaded["figures"])
    name = "load_uncached_us_p99"
    found[name] = figure(found[name]["value"], "us", load.UNCACHED_US)
    pieces = loaded["details"]["pieces"]
    spent = sum(pieces[piece]["p50"] for piece in HOST_PIECES if piece in pieces)
    found["load_without_driver_us_p50"] = figure(spent, "us", HOST_LOAD_US)
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """The side by side as a table on standard error."""
    table = Table(title="a fresh process: until the first forward with backward is done")
    for name in ("implementation", "phase", *SHOWN):
        table.add_column(name)
    for row in rows:
        table.add_row(row["impl"], row["phase"], *(_cell(row.get(name)) for name in SHOWN))
    Console(stderr=True, width=160).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)[:60]
