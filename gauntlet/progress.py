"""What a terminal shows while artifacts are proven: the stage, a bar, and how long it will still take."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from esper_ir.diagnostics import EsperError

MARKS = {
    "VALIDATED": ("green", "VALIDATED"),
    "REJECTED": ("red", "REJECTED"),
    "PENDING_BENCHMARKING": ("yellow", "PENDING"),
}
EXPECTED_S = {True: 20.0, False: 216.0}
"""Of one artifact (quick or not), as long as none is done."""


class Estimate:
    """Seconds left of a run over `count` artifacts, from those that are done: what remains of the present one
    by its stages, and the mean for each to come."""

    def __init__(self, count: int, expected_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.count, self.expected, self.now = count, expected_s, now
        self.done, self.total = 0, 0.0
        self.stages: dict[str, float] = defaultdict(float)
        self._spent: dict[str, float] = {}
        self._stage, self._since, self._began = "", now(), now()

    def stage(self, name: str) -> None:
        """A stage of the present artifact begins."""
        here = self.now()
        if self._stage:
            self._spent[self._stage] = self._spent.get(self._stage, 0.0) + here - self._since
        self._stage, self._since = name, here

    def finished(self) -> None:
        """The present artifact is done."""
        self.stage("")
        for name, seconds in self._spent.items():
            self.stages[name] += seconds
        self.total += self.now() - self._began
        self.done += 1
        self._spent, self._began = {}, self.now()

    def left(self) -> float:
        """Never below zero."""
        to_come = max(self.count - self.done, 0)
        if not to_come:
            return 0.0
        each = self.total / self.done if self.done else self.expected
        return self._present(each) + each * (to_come - 1)

    def _present(self, each: float) -> float:
        here = self.now()
        if not self.done:
            return max(each - (here - self._began), 0.0)
        means = {name: seconds / self.done for name, seconds in self.stages.items()}
        ahead = sum(mean for name, mean in means.items() if name not in self._spent and name != self._stage)
        spent = self._spent.get(self._stage, 0.0) + here - self._since
        return ahead + max(means.get(self._stage, 0.0) - spent, 0.0)


class Left(ProgressColumn):
    """The time left, as it goes."""

    def __init__(self, estimate: Estimate) -> None:
        super().__init__(Column(no_wrap=True))
        self.estimate = estimate

    def render(self, task: Task) -> Text:
        """For rich."""
        return Text(f"{_span(self.estimate.left())} left")


class Report:
    """On standard error: a bar on a terminal, and one line per verdict everywhere. A context manager."""

    def __init__(self, count: int, quick: bool) -> None:
        self.estimate = Estimate(count, EXPECTED_S[quick])
        self.live = sys.stderr.isatty() and count > 0
        self.colour = self.live and not os.environ.get("NO_COLOR")
        what = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        columns = (what, BarColumn(12), MofNCompleteColumn(), Left(self.estimate))
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not self.live)
        self.task = self.bar.add_task("", total=count)

    def __enter__(self) -> Report:
        self.bar.start()
        return self

    def __exit__(self, *details: object) -> None:
        self.bar.stop()

    def event(self, artifact_id: str, event: Any) -> None:
        """What the judge tells of an artifact."""
        if event.get("event") != "stage":
            return
        self.estimate.stage(event["name"])
        part = f" {event['part']}/{event['parts']}" if "part" in event else ""
        self.bar.update(self.task, description=f"{artifact_id}: {event['name']}{part}")

    def verdict(self, found: Any) -> None:
        """One artifact is done."""
        colour, word = MARKS[found.state]
        mark = click.style(word, fg=colour) if self.colour else word
        again = "" if found.recorded or found.passed is None else " (recorded before)"
        lines = [f"{mark} {found.artifact_id} {found.seconds:.1f} s{again}"]
        lines += [f"  {found.reason}"] if found.reason else []
        lines += [f"  esper-gauntlet replay {found.case[:16]}"] if found.case else []
        self._done(lines)

    def error(self, artifact_id: str, error: EsperError) -> None:
        """One artifact could not be judged."""
        text = error.render()
        self._done([text if artifact_id in text else f"{artifact_id}: {text}"])

    def left(self, artifact_id: str, error: EsperError) -> None:
        """One artifact is for another machine."""
        self._done([f"left pending: {artifact_id}: {error.message}"])

    def _done(self, lines: list[str]) -> None:
        for line in lines:
            if self.live:
                self.bar.console.print(Text.from_ansi(line))  # above the bar
            else:
                click.echo(line, err=True)
        self.estimate.finished()
        self.bar.update(self.task, advance=1, description="")


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
