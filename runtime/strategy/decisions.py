"""A decision with its reasons, and the record of them that `explain` reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from runtime.seeds.commands import KasminaControlCommand
from runtime.seeds.facts import Boundary

WAIT = "wait"
KEPT = 2000


@dataclass(frozen=True)
class Decision:
    """One thing decided at one boundary. `action`: a verb, or "wait" where something was considered and left;
    `because`: the reasons with their numbers, one a line; `command`: what was sent, None for waiting;
    `outcome`: what the mechanics answered."""

    epoch: int
    slot: str
    action: str
    because: tuple[str, ...]
    command: KasminaControlCommand | None = None
    outcome: str = ""

    def text(self) -> str:
        """As a person reads it."""
        where = f" {self.slot}" if self.slot else ""
        head = f"epoch {self.epoch}: {self.action}{where}" + (f" -> {self.outcome}" if self.outcome else "")
        return "\n".join([head, *(f"  {line}" for line in self.because)])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "command": self.command.to_json() if self.command else None}


class Record:
    """The newest `KEPT` decisions."""

    def __init__(self) -> None:
        self._kept: deque[Decision] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, decisions: Iterable[Decision], boundary: Boundary) -> list[Decision]:
        """Keep decisions with what became of their commands; equal waits in a row are kept once."""
        made = [replace(d, outcome=_answer(d.command, boundary)) if d.command else d for d in decisions]
        for decision in made:
            last = self._kept[-1] if self._kept else None
            waited = (
                last is not None and last.action == decision.action == WAIT and last.slot == decision.slot
            )
            if waited:
                self._kept.pop()
            self._kept.append(decision)
        return made

    def text(self, slot: str | None = None, epoch: int | None = None) -> str:
        """All, or those about one slot or epoch, oldest first."""
        chosen = [
            d for d in self._kept if (slot is None or d.slot == slot) and (epoch is None or d.epoch == epoch)
        ]
        return "\n".join(d.text() for d in chosen) or "nothing was decided"

    def state_dict(self) -> list[dict[str, Any]]:
        return [d.to_json() for d in self._kept]

    def load_state_dict(self, state: Iterable[Mapping[str, Any]]) -> None:
        self._kept.clear()
        for data in state:
            command = data["command"]
            given = {**data, "because": tuple(data["because"])}
            given["command"] = KasminaControlCommand.from_json(command) if command else None
            self._kept.append(Decision(**given))


def _answer(command: KasminaControlCommand, boundary: Boundary) -> str:
    """What became of a command. A refusal does not name its command: slot and verb do."""
    for done in boundary.applied:
        if done.command_id == command.command_id:
            return f"{done.source.name} -> {done.target.name}"
    for refusal in boundary.refused:
        if refusal.slot == command.slot and refusal.verb is command.command:
            return f"refused {refusal.code}: {refusal.reason}"
    return boundary.aborted or "queued"
