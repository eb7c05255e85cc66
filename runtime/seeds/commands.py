"""Commands as values, the queue they wait in, and the journal of what was done. No torch here.

Nothing moves a slot but a command, and a command takes effect only at an epoch boundary, together with all
others of that boundary, in the order of the slots. Each is carried out once, whatever its number of
deliveries. The journal is a file of JSON lines that is only ever appended to; each line holds the hash of
the one before, so that an edit, a cut in the middle or a swap shows; lineage is its replay.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from runtime.seeds.errors import fail
from runtime.seeds.lifecycle import Issuer, Verb

log = logging.getLogger("esper.growth")
GENESIS = "0" * 64
SCHEMA = "esper-journal/1"


class GraftingStrategy(StrEnum):
    """How progress along a ramp is made (`runtime.seeds.grafting`)."""

    FIXED_RAMP = "FIXED_RAMP"
    PERFORMANCE_LINKED = "PERFORMANCE_LINKED"
    DRIFT_CONTROLLED = "DRIFT_CONTROLLED"
    GRAD_NORM_GATED = "GRAD_NORM_GATED"


@dataclass(frozen=True)
class Graft:
    """What a graft is to be like; every field has the default of the design."""

    operator: str = "lerp"  # how the seed's result is blended with the layer's
    curve: str = "linear"  # of alpha over the ramp
    objective: str = "proximal"  # what a seed minimises beside its host
    isolate: str = "until_fine_tuning"  # how long the host's gradient passes the graft by
    fossil: str = "frozen"  # what a kept graft's parameters do; `train`: at the host's learning rate
    ramp_steps: int = 0  # [steps] that alpha rises; 0: `limits.ramp_steps`
    lr_scale: float = 1.0  # learning rate of a seed by that of the host's first group


@dataclass(frozen=True)
class KasminaControlCommand:
    """One command. `target_layer_id`: name of the wrapped module; `target_seed_id`: number of the chunk in
    it. `kernel_artifact_id` is needed by request_germination alone. `issuer` says on whose behalf; `hard`
    drops a graft at once where "cull" otherwise takes alpha down first."""

    target_layer_id: str
    target_seed_id: int
    command: Verb
    kernel_artifact_id: str = ""
    selected_for_tags: tuple[str, ...] = ()
    grafting_strategy: GraftingStrategy = GraftingStrategy.FIXED_RAMP
    command_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    reason: str = ""
    graft: Graft = Graft()
    hard: bool = False
    issuer: Issuer = Issuer.CONTROLLER

    @property
    def slot(self) -> str:
        """Id of the slot that is meant: `layer/chunk`."""
        return f"{self.target_layer_id}/{self.target_seed_id}"

    def to_json(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "command": self.command.value,
            "selected_for_tags": list(self.selected_for_tags),
            "grafting_strategy": self.grafting_strategy.value,
            "graft": dict(self.graft.__dict__),
            "issuer": self.issuer.value,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KasminaControlCommand:
        """Strict: E1013 for fields or values that are not known."""
        try:
            given = dict(data)
            return cls(
                **{
                    **given,
                    "command": Verb(given["command"]),
                    "selected_for_tags": tuple(given.get("selected_for_tags", ())),
                    "grafting_strategy": GraftingStrategy(given.get("grafting_strategy", "FIXED_RAMP")),
                    "graft": Graft(**given.get("graft", {})),
                    "issuer": Issuer(given.get("issuer", "controller")),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise fail("E1013", f"not a command: {error}", node=str(data)[:80]) from None


class Queue:
    """Commands that wait for the boundary; each id is taken once, also across boundaries and resumes."""

    def __init__(self) -> None:
        self._waiting: list[KasminaControlCommand] = []
        self._seen: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, command: KasminaControlCommand) -> bool:
        """False when a command of this id was taken before."""
        if command.command_id in self._seen:
            return False
        self._seen.add(command.command_id)
        self._waiting.append(command)
        return True

    def take(self, order: Mapping[str, int]) -> list[KasminaControlCommand]:
        """All that wait, in the order of the slots (`order`: number by slot id), then of their arrival."""
        found, self._waiting = self._waiting, []
        return sorted(found, key=lambda c: order.get(c.slot, len(order)))

    def seen(self, ids: Iterable[str]) -> None:
        """Remember ids that were carried out before (replay of a journal)."""
        self._seen.update(ids)

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": [c.to_json() for c in self._waiting], "seen": sorted(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting = [KasminaControlCommand.from_json(c) for c in state["waiting"]]
        self._seen = set(state["seen"])


def line_hash(previous: str, body: Mapping[str, Any]) -> str:
    """SHA-256 of the hash before and the line's own document, keys sorted."""
    return _hash(previous, _text(body))


def _encoder() -> Callable[[Any], str]:
    """What writes a line: JSON without blanks, keys sorted. `JSONEncoder.encode` makes its part in C anew for
    each document, which takes as long as the writing; that part is made once where there is one."""
    whole = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False)
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return whole.encode
    in_c = make(None, whole.default, json.encoder.encode_basestring_ascii, None, ":", ",", True, False, True)
    return lambda document: "".join(in_c(document, 0))


_text = _encoder()


def _hash(previous: str, text: str) -> str:
    return hashlib.sha256((previous + text).encode()).hexdigest()


class Journal:
    """Append-only, hash-chained. `path` None keeps it in memory.

    A line is {"schema", "seq", "kind", "epoch", "step", ..., "previous", "hash"}. Kinds: "command" (applied:
    slot, from, to, command), "refused", "fault", "rollback", "tombstone", "open".
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else None
        self._fresh: list[str] = []  # lines that nobody asked for yet, as text
        self._waiting: list[str] = []  # lines that are not in the file yet
        self._stale = False  # whether the file has lines that do not count any more
        self._unsure = False  # whether a loss of power could take what was written
        self.lines = []
        if self.path is None or not self.path.exists():
            return
        try:
            self.lines = list(read(self.path, repair=True))
        except OSError as error:
            raise fail("E1011", f"{self.path.name} cannot be read: {error}", node=str(self.path)) from None

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All lines as documents."""
        self._lines.extend(map(json.loads, self._fresh))
        self._fresh = []
        return self._lines

    @lines.setter
    def lines(self, lines: list[dict[str, Any]]) -> None:
        self._lines, self._fresh = lines, []
        self.head = lines[-1]["hash"] if lines else GENESIS

    def append(self, kind: str, **facts: Any) -> dict[str, Any]:
        """One line, durable before this returns where there is a file."""
        self.extend([{"kind": kind, **facts}])
        self.sync()
        return self.lines[-1]

    def extend(self, bodies: Iterable[Mapping[str, Any]]) -> None:
        """Several lines in one write: all of them, or (after a kill) a prefix that ends at a line. A kill of
        the process takes nothing that was written; `sync` makes it outlast the machine too. What cannot be
        written (a full disk) is logged, and written with the lines after it."""
        made: list[str] = []
        previous, seq = self.head, len(self._lines) + len(self._fresh)
        for body in bodies:
            text = _text({"schema": SCHEMA, "seq": seq, **body, "previous": previous})
            previous, seq = _hash(previous, text), seq + 1
            made.append(f'{text[:-1]},"hash":"{previous}"}}')
        self._fresh += made
        self.head = previous
        if self.path is not None:
            self._waiting += made
            self._write(sync=False)

    def sync(self) -> None:
        """Have everything that was written on the disk before this returns."""
        if self._unsure:
            self._write(sync=True)

    def _write(self, *, sync: bool) -> None:
        assert self.path is not None
        self._unsure = True
        lost = len(self._lines) + len(self._fresh) > len(self._waiting) and not self.path.exists()
        if self._stale or lost:
            done = _replace(self.path, self.lines)
        else:
            done = append_lines(self.path, self._waiting, sync=sync)
        if done:
            self._waiting, self._stale, self._unsure = [], False, not sync

    def verify(self) -> None:
        """E1011 names the first line that does not follow from those before it."""
        check(self.lines)

    def reset(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Go back to the lines of a checkpoint. What it did not know goes to a side file, so that nothing is
        lost."""
        wanted = [dict(line) for line in lines]
        check(wanted)
        same = 0
        while same < min(len(wanted), len(self.lines)) and wanted[same]["hash"] == self.lines[same]["hash"]:
            same += 1
        dropped, before = self.lines[same:], len(self.lines)
        self.lines = wanted
        if self.path is None or (not dropped and before == len(wanted)):
            return
        if dropped:
            append_lines(self.path.with_suffix(".rolled_back.jsonl"), map(_text, dropped), sync=True)
        self._stale = True
        self._write(sync=True)


def append_lines(path: Path, lines: Iterable[str], *, sync: bool) -> bool:
    """Append whole lines to a file, on the disk before this returns when `sync`. False, with an error in the
    log and the file as it was, when they cannot be written."""
    data = "".join(line + "\n" for line in lines).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _whole(descriptor, data)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        log.error("%s cannot be written: %s", path, error)
        return False
    return True


def _whole(descriptor: int, data: bytes) -> None:
    """All of `data`, or none of it."""
    before = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        os.ftruncate(descriptor, before)
        raise


def cut_torn(path: Path) -> None:
    """Cut off a last line that a kill left half written: what is appended to it would be lost with it."""
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        os.truncate(path, whole)


def _replace(path: Path, documents: Iterable[Mapping[str, Any]]) -> bool:
    fresh = path.with_suffix(".tmp")
    fresh.unlink(missing_ok=True)
    if not append_lines(fresh, map(_text, documents), sync=True):
        return False
    fresh.touch()
    os.replace(fresh, path)
    return True


def check(lines: Iterable[Mapping[str, Any]]) -> None:
    """E1011 unless every line follows from the one before."""
    previous = GENESIS
    for number, line in enumerate(lines):
        body = {k: v for k, v in line.items() if k != "hash"}
        if line.get("previous") != previous or line.get("seq") != number:
            raise fail("E1011", f"line {number} does not follow from line {number - 1}", node=str(number))
        if line_hash(previous, body) != line.get("hash"):
            raise fail("E1011", f"line {number} was changed", node=str(number))
        previous = str(line["hash"])


def read(path: Path, *, repair: bool = False) -> Iterator[dict[str, Any]]:
    """The lines of a journal, checked. A torn last line (a kill while it was written) is left out, and with
    `repair` cut off the file; anything else that is wrong is E1011."""
    if repair:
        cut_torn(path)
    whole = path.read_bytes().rpartition(b"\n")[0]
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(whole.split(b"\n") if whole else []):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            raise fail("E1011", f"{path.name}: line {number} is no JSON object", node=str(number))
        lines.append(line)
    check(lines)
    yield from lines
