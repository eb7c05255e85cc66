"""The bench `models`: every way to train every model, made ready side by side and then timed one by one."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.crew import bounded, say
from bench.results import figure
from bench.training import COMPILE, EAGER, INSIDE, MODELS, OURS, WAYS, Model, deviation

SWAPPED_TARGET, INSIDE_TARGET = 0.97, 1.05  # of what compile(model) does in a second
NOISE_TARGET = 3.0
RESOLUTION = 2.0**-22  # a loss is a float32: closer than this two are the same
REPEATS, SPAN_S = 9, 3.0
THREADS = 8  # of a process that compiles a whole model


class Bench:
    """Processes of all ways; `options` of the harness, `ids` of the artifacts by key."""

    def __init__(
        self, which: str, library: Path, ids: Mapping[str, str], options: Mapping[str, Any], cuda: bool
    ) -> None:
        self.which, self.library, self.ids, self.options, self.cuda = which, library, ids, options, cuda
        self.end = time.monotonic() + options["models_seconds"]
        self.cards = (options["cards"].split(",") if options["cards"] else [""]) if cuda else [""]

    def measure(self) -> dict[str, Any]:
        models = MODELS[self.which]
        jobs = [(model, way) for way in WAYS for model in models if way not in self.options["skip"]]
        with tempfile.TemporaryDirectory(prefix="esper-models-") as folder:
            place = Path(folder)
            with ThreadPoolExecutor(len(jobs)) as pool:
                running = [pool.submit(self._process, place, at, *job) for at, job in enumerate(jobs)]
                self._start(place, len(jobs), running)
                answers = [future.result() for future in running]
        found = {(model.name, way): lines for (model, way), lines in zip(jobs, answers, strict=True)}
        rows = [row for model in models for row in self._rows(model, found)]
        return {"rows": rows, "figures": figures(rows)}

    def _start(self, place: Path, count: int, running: list[Any]) -> None:
        """Timing begins when all have compiled, or when half of the time left would be gone."""
        latest = time.monotonic() + 0.7 * (self.end - time.monotonic())
        while time.monotonic() < latest:
            ready = sum('"ready"' in p.read_text(encoding="utf-8") for p in place.glob("*.jsonl"))
            if ready + sum(f.done() for f in running) >= count:
                break
            time.sleep(0.2)
        (place / "go").touch()

    def _process(self, place: Path, at: int, model: Model, way: str) -> list[dict[str, Any]]:
        begin, card = time.monotonic(), self.cards[at % len(self.cards)]
        job = {
            "which": self.which, "model": model.name, "way": way, "library": str(self.library),
            "ids": dict(self.ids), "unproven": self.options["unproven"], "threads": self.options["threads"],
            "go": str(place / "go"), "turn_lock": str(place / f"turn-{card}"),
            "repeats": REPEATS if self.cuda else 3, "span_s": SPAN_S if self.cuda else 0.3,
        }  # fmt: skip
        path, out = place / f"{at}.json", place / f"{at}.jsonl"
        path.write_text(json.dumps(job), encoding="utf-8")
        environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(THREADS if self.cuda else 1),
            **({"CUDA_VISIBLE_DEVICES": card} if card else {}),
        }
        ended = bounded(
            [sys.executable, "-m", "bench.training", str(path), str(out)],
            max(self.end - time.monotonic(), 1.0),
            environment,
        )
        text = out.read_text(encoding="utf-8") if out.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        if ended and not any(line["kind"] == "broke" for line in lines):
            lines.append({"kind": "killed", "why": ended})
        why = [str(line["why"])[-300:] for line in lines if "why" in line]
        say(f"{model.name} {way}: {time.monotonic() - begin:.0f} s, {'; '.join(why) or 'done'}")
        return lines

    def _rows(
        self, model: Model, found: Mapping[tuple[str, str], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        ready = {way: _first(found.get((model.name, way), []), "ready") for way in WAYS}
        eager = ready[EAGER]
        noise = max((deviation(m, eager["losses"]) for m in eager["moved"]), default=None) if eager else None
        rows = []
        for way in WAYS:
            lines = found.get((model.name, way))
            if lines is None:
                continue
            kind = str(model.sizes.dtype).removeprefix("torch.")
            row = {
                "block": model.name, "size": model.label, "dtype": kind, "phase": "step", "impl": way,
                "mode": "plain", "wall_ms": None, "dev_ms": None,
            }  # fmt: skip
            made, timed = ready[way], _first(lines, "row")
            if made:
                row |= {"losses": made["losses"], "first_step_s": made["first_step_s"]}
                row |= _compared(made["losses"], eager, noise)
            if timed:
                count = model.batch * model.rows
                row |= {k: v for k, v in timed.items() if k != "kind"}
                row |= {"counted": model.counted, "per_s": 1e3 * count / timed["wall_ms"]}
            why = [_last_said(line["why"]) for line in lines if "why" in line]
            rows.append({"correct": False, **row, **({"why": why[0]} if why else {})})
        return rows


def _last_said(text: str) -> str:
    """The line of a traceback that names the error."""
    told = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(" ")]
    return told[-1][:300] if told else text[:300]


def _first(lines: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((line for line in lines if line["kind"] == kind), None)


def _compared(losses: list[float], eager: Mapping[str, Any] | None, noise: float | None) -> dict[str, Any]:
    """How far a loss curve lies from eager's, in units of what rounding alone moves it by."""
    if eager is None or noise is None:
        return {"correct": False}
    off, noise = deviation(losses, eager["losses"]), max(noise, RESOLUTION)
    return {"loss_off": off, "loss_noise": noise, "correct": off <= NOISE_TARGET * noise}


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates against compile(model), and loss curves against noise."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["block"] for row in rows):
        mine = {row["impl"]: row for row in rows if row["block"] == name}
        base = mine.get(COMPILE, {})
        for way, label, target in (
            (EAGER, "eager", None),
            (OURS, "swapped", SWAPPED_TARGET),
            (INSIDE, "inside_compile", INSIDE_TARGET),
        ):
            row = mine.get(way, {})
            there = bool(row.get("per_s") and base.get("per_s"))
            value = row["per_s"] / base["per_s"] if there else None
            bounds = {}
            if there:
                bounds = {"lo": base["wall_lo"] / row["wall_hi"], "hi": base["wall_hi"] / row["wall_lo"]}
            found[f"{name}_{label}_over_compile"] = figure(value, "ratio", target, at_least=True, **bounds)
        for way, label in ((OURS, "swapped"), (INSIDE, "inside_compile"), (COMPILE, "compile")):
            row = mine.get(way, {})
            value = row["loss_off"] / row["loss_noise"] if "loss_off" in row else None
            target = NOISE_TARGET if way != COMPILE else None
            found[f"{name}_{label}_loss_over_noise"] = figure(value, "ratio", target)
    return found
