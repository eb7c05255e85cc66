"""The terminal board of a run: slots, stages, alphas, health, what happened last. Reads the run's events.

Works while a run writes and after it ended. On a terminal it is redrawn; elsewhere it is printed once, as it
stands.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from esper_ir.diagnostics import printable
from runtime.seeds.events import FILE, EventReader
from runtime.strategy.errors import fail
from runtime.strategy.running import FAILED, FINISHED, STARTED, gone

SHOWN_EVENTS = 12
BARS = "▁▂▃▄▅▆▇█"
QUIET = ("BOUNDARY", "EPOCH", "CHECKPOINT", STARTED)
_COLOUR = {
    "DORMANT": "dim",
    "TRAINING": "yellow",
    "GRAFTING": "magenta",
    "STABILIZATION": "cyan",
    "EVALUATING": "cyan",
    "FINE_TUNING": "yellow",
    "FOSSILIZED": "green",
    "CULLED": "red",
    "EMBARGOED": "red",
    "ROLLED_BACK": "bold red",
}


@dataclass
class Board:
    """What the events said so far. `end`: what they say of the run's end, "" while it goes on; `process`: who
    runs it."""

    losses: list[float] = field(default_factory=list)
    epoch: int = -1
    step: int = 0
    last: Mapping[str, Any] = field(default_factory=dict)
    latest: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=SHOWN_EVENTS))
    counts: dict[str, int] = field(default_factory=dict)
    end: str = ""
    reason: str = ""
    process: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """running, finished, failed, or stale: its process is gone and said nothing of an end."""
        return self.end or ("stale" if gone(self.process) else "running")

    def take(self, event: Mapping[str, Any]) -> None:
        """One event of the file."""
        kind = str(event.get("kind", ""))
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.epoch = max(self.epoch, int(event.get("epoch", -1)))
        self.step = max(self.step, int(event.get("step", 0)))
        if kind in (STARTED, "EPOCH"):
            self.end = self.reason = ""  # it goes on, or again
        if kind == "EPOCH":
            self.last = event.get("facts", {})
            loss = self.last.get("validation_loss")
            if isinstance(loss, int | float):
                self.losses.append(float(loss))
        elif kind == STARTED:
            self.process = event.get("facts", {})
        elif kind in (FINISHED, FAILED):
            self._ends(kind, event.get("facts", {}))
        elif kind not in QUIET:
            self.latest.append(event)

    def _ends(self, kind: str, facts: Mapping[str, Any]) -> None:
        if facts.get("run", self.process.get("run")) != self.process.get("run"):
            return  # one that another took the place of, in the same folder
        self.end = "finished" if kind == FINISHED else "failed"
        self.reason = str(facts.get("reason", ""))

    def to_json(self) -> dict[str, Any]:
        """As data, for `--json`."""
        return {
            "schema": "esper-watch/1",
            "epoch": self.epoch,
            "step": self.step,
            "finished": self.end == "finished",
            "state": self.state,
            "reason": self.reason,
            "validation_losses": self.losses,
            "last": dict(self.last),
            "counts": self.counts,
            "events": [dict(event) for event in self.latest],
        }

    def render(self) -> RenderableType:
        """The board as it stands."""
        return Group(self._head(), self._slots(), self._events())

    def _head(self) -> Text:
        state = self.state + (f": {printable(self.reason)[:200]}" if self.reason else "")
        if self.state == "stale":
            state = f"stale: process {self.process.get('pid')} is gone and said nothing of an end"
        text = Text(f"epoch {self.epoch}, step {self.step}, {state}", style="bold")
        loss, accuracy = self.last.get("validation_loss"), self.last.get("validation_accuracy")
        if isinstance(loss, int | float):
            text.append(f"   validation loss {loss:.4f} {sparkline(self.losses)}", style="default")
        if isinstance(accuracy, int | float):
            text.append(f"   accuracy {accuracy:.2f} %", style="default")
        kept, dropped = (self.counts.get(k, 0) for k in ("SEED_FOSSILIZED", "SEED_CULLED"))
        text.append(f"   fossilised {kept}, culled {dropped}", style="default")
        return text

    def _slots(self) -> Table:
        table = Table(title=f"slots ({self.last.get('slots_total', 0)})", title_justify="left", expand=False)
        for name in (
            "slot",
            "stage",
            "alpha",
            "round",
            "artifact",
            "score",
            "rank",
            "dead",
            "gain",
            "grafts",
        ):
            table.add_column(
                name, no_wrap=True, justify="left" if name in ("slot", "stage", "artifact") else "right"
            )
        for row in self.last.get("slots", ()):
            health = row.get("health", {})
            table.add_row(
                printable(str(row.get("slot", ""))),
                Text(str(row.get("state", "")), style=_COLOUR.get(str(row.get("state")), "default")),
                bar(row.get("alpha")),
                str(row.get("round") or ""),
                printable(str(row.get("artifact", "")))[:28],
                number(row.get("score")),
                number(health.get("effective_rank")),
                number(health.get("dead_node_ratio")),
                number(health.get("predicted_gain")),
                str(row.get("grafts") or ""),
            )
        return table

    def _events(self) -> Table:
        table = Table(title="what happened", title_justify="left", show_header=False, box=None)
        for event in self.latest:
            told = told_of(event.get("facts", {}))
            where = printable(str(event.get("slot", "")))
            table.add_row(f"{event.get('epoch')}", str(event.get("kind")), where, printable(told)[:110])
        return table


def told_of(facts: Mapping[str, Any]) -> str:
    """The facts of an event in one line: a move as a move, anything else by name."""
    if "source" in facts and "target" in facts:
        why = facts.get("reason")
        return f"{facts['source']} -> {facts['target']}" + (f": {why}" if why else "")
    return ", ".join(f"{k} {short(v)}" for k, v in facts.items())


def short(value: Any) -> str:
    """A value in a line of facts."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]


def number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "-"


def bar(alpha: Any) -> str:
    """alpha as a bar of ten and its number; empty at 0."""
    if not isinstance(alpha, int | float) or alpha <= 0.0:
        return ""
    return "█" * round(10 * min(alpha, 1.0)) + f" {alpha:.2f}"


def sparkline(values: list[float], width: int = 24) -> str:
    """The newest values as blocks, lowest to highest."""
    shown = values[-width:]
    if len(shown) < 2 or max(shown) == min(shown):
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(BARS[min(7, int(8 * (v - low) / span))] for v in shown)


def watch(folder: Path, console: Console, *, once: bool = False, interval_s: float = 0.5) -> Board:
    """Show the run in `folder` until it ends (or once). E1034 when there is none."""
    reader, board = EventReader(folder), Board()
    if not reader.path.exists():
        raise fail("E1034", f"no {FILE}", node=str(folder), hint="give the run_dir of the configuration")
    for event in reader.read():
        board.take(event)
    if once or board.state != "running" or not console.is_terminal:
        console.print(board.render())
        return board
    with Live(board.render(), console=console, auto_refresh=False, screen=False) as live:
        while board.state == "running":
            time.sleep(interval_s)
            for event in reader.read():
                board.take(event)
            live.update(board.render(), refresh=True)
    return board
