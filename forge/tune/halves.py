"""Tuning in two halves: candidates built where there is no card, timed where there is no compiler.

`build_only` writes the tiles around every prior as code into one file; `time_only` compares and times them on
the device, keeps what it measured, and gives the measurements back as a document for the machine that built
them. The file is a gzipped JSON document "esper-candidates/1"; its code runs in the sandboxed worker that all
candidates run in.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import random
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EXIT_USAGE, EsperError
from forge.lower import Kernels
from forge.plan import Tile
from forge.target import Target
from forge.tune import candidates, space
from forge.tune.candidates import Built, Timer
from forge.tune.search import FINAL_ROUNDS, FINALISTS, MOST, ROUNDS, SEED, subjects
from forge.tune.store import Store
from forge.tune.tiles import tile_of, tile_row
from forge.tune.trials import Hunt, Trial, gain, report, trial_of
from library.canon import JsonLimits, parse_json
from library.paths import os_error

SCHEMA, TIMES = "esper-candidates/1", "esper-tuning/1"
MOST_BYTES = 512 << 20
LEAST = 4
"""Tiles of a group, the prior among them, however little it weighs."""


def build_only(
    kernels: Kernels, target: Target, toolchain: str, trials: int,
    progress: Callable[[str], None] = lambda text: None, only: Collection[str] | None = None,
    least: int = LEAST,
) -> dict[str, Any]:  # fmt: skip
    """Candidates of every group, about `trials` of them: the tiles nearest to the prior, by the bytes that
    the groups move, `least` each at least. `only`: keys of the groups, all without it.
    """
    found, sites = subjects(kernels, only)
    hunts = [h for h in found if only is None or h.key in only]
    weight = sum(h.floor_us for h in hunts) or 1.0
    asked: list[tuple[Hunt, Tile]] = []
    for hunt in hunts:
        hunt.share = max(int(trials * hunt.floor_us / weight), least)
        asked += [(hunt, tile) for tile in around(hunt.prior, hunt.share, hunt.idle)]
    rows = []
    for at in range(0, len(asked), MOST):
        progress(f"tune: {at} of {len(asked)} candidates built")
        part = asked[at : at + MOST]
        work = [(sites[h.key], h.key, tile) for h, tile in part]
        made = candidates.build(work, kernels.choices.given, target)
        rows += [_row(h, tile, found) for (h, tile), found in zip(part, made, strict=True)]
    groups = [{**h.report(), "trials": []} for h in hunts]
    return {
        "schema": SCHEMA, "target": target.name, "arch": target.arch, "toolchain": toolchain,
        "groups": groups, "candidates": rows,
    }  # fmt: skip


def around(prior: Tile, count: int, idle: Collection[str] = ()) -> list[Tile]:
    """The prior and the tiles nearest to it; of the last distance a part, drawn at random."""
    found, edge, rng = {repr(prior): prior}, [prior], random.Random(SEED)
    while edge and len(found) < count:
        fresh = {repr(t): t for e in edge for t in space.neighbours(e, idle) if repr(t) not in found}
        edge = [fresh[name] for name in sorted(fresh)]
        rng.shuffle(edge)
        found |= {repr(t): t for t in edge[: count - len(found)]}
    return list(found.values())


def _row(hunt: Hunt, tile: Tile, found: Built | str) -> dict[str, Any]:
    base = {"key": hunt.key, **tile_row(tile)}
    if isinstance(found, str):
        return {**base, "wrong": found}
    code = base64.b64encode(found.code).decode()
    return {**base, "dims": dict(found.dims), "values": list(found.values), "plan": found.plan,
            "kernels": found.kernels, "code": code}  # fmt: skip


def time_only(
    document: Mapping[str, Any], device: str, store: Store | None, seconds: float = math.inf,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Compare and time what `build_only` made: every candidate, then the best of every group beside its
    prior. What the store knows is not timed again. The measurements; on an interrupt those made so far.
    E0526.
    """
    hunts, built, failed = _read(document)
    arch, toolchain = str(document["arch"]), str(document["toolchain"])
    timer = Timer(device, arch, toolchain, store)
    for hunt in hunts:
        hunt.recall(store.measurements(hunt.key, arch, toolchain) if store else ())
    for hunt, trial in failed:
        timer.keep(hunt, trial)
    timer.priors.update(
        {h.key: built[h.key, repr(h.prior)] for h in hunts if (h.key, repr(h.prior)) in built}
    )
    try:
        _time_all(hunts, built, timer, time.monotonic() + seconds, progress)
    except KeyboardInterrupt:
        progress("tune: interrupted; what was measured is kept")
    return report(hunts, arch, toolchain)


def _time_all(
    hunts: Sequence[Hunt], built: Mapping[tuple[str, str], Built], timer: Timer, end: float,
    progress: Callable[[str], None],
) -> None:  # fmt: skip
    by_key = {h.key: h for h in hunts}
    waiting = [(by_key[k], b) for (k, name), b in built.items() if name not in by_key[k].trials]
    for at in range(0, len(waiting), MOST):
        if time.monotonic() > end:
            break
        progress(f"tune: {at} of {len(waiting)} candidates timed, {gain(hunts):.2f}x so far")
        timer.time(waiting[at : at + MOST], ROUNDS)
    last = [(h, (h.key, repr(t))) for h in hunts for t in h.finalists(FINALISTS)]
    timer.time([(h, built[name]) for h, name in last if name in built], FINAL_ROUNDS)


def _read(
    document: Mapping[str, Any],
) -> tuple[list[Hunt], dict[tuple[str, str], Built], list[tuple[Hunt, Trial]]]:
    """Groups, candidates by key and tile, and those that could not be built."""
    try:
        hunts = {str(g["key"]): hunt_of(g) for g in document["groups"]}
        built, failed = {}, []
        for row in document["candidates"]:
            key, tile = str(row["key"]), tile_of("candidate", row)
            if row.get("wrong"):
                failed.append((hunts[key], Trial(tile, wrong=str(row["wrong"])[:300])))
                continue
            dims = {str(k): int(v) for k, v in row["dims"].items()}
            code = base64.b64decode(row["code"], validate=True)
            values = tuple(map(str, row["values"]))
            built[key, repr(tile)] = Built(key, tile, dims, values, row["plan"], row["kernels"], code)
        return list(hunts.values()), built, failed
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _bad(f"{type(error).__name__}: {error}") from error


def hunt_of(group: Mapping[str, Any]) -> Hunt:
    """A group of a document, nothing tried."""
    prior = {"kind": group["kind"], "tile": group["prior"]}
    idle = tuple(map(str, group.get("idle", ())))
    floor = float(group["floor_us"])
    return Hunt(str(group["key"]), str(group["group"]), tile_of("prior", prior), floor, idle=idle)


def take(document: Mapping[str, Any], store: Store) -> int:
    """Keep the measurements that `time_only` gave; how many there were. E0526."""
    count = 0
    try:
        for group in document["groups"]:
            trials = [t for t in map(trial_of, group["trials"]) if t is not None]
            for trial in trials:
                store.put_measurement(
                    str(group["key"]), str(document["arch"]), str(document["toolchain"]), trial.row()
                )
            count += len(trials)
    except (KeyError, TypeError, AttributeError) as error:
        raise _bad(f"{type(error).__name__}: {error}") from error
    return count


def write(document: Mapping[str, Any], path: Path) -> None:
    """As one gzipped file, the same bytes for the same candidates. E0702, E0703, E0710; nothing half-written
    stays.
    """
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(gzip.compress(data, compresslevel=6, mtime=0))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise os_error(error, "write", path) from error


def read(path: Path, schema: str) -> dict[str, Any]:
    """A document of this schema, gzipped or not. E0526 for anything that is not one."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            opened = zlib.decompressobj(wbits=31)
            data = opened.decompress(data, MOST_BYTES)
            if opened.unconsumed_tail or not opened.eof:
                raise ValueError(f"cut off, or more than {MOST_BYTES >> 20} MiB")
        found = parse_json(data, JsonLimits(max_bytes=MOST_BYTES))
    except (OSError, ValueError, zlib.error, EsperError) as error:
        raise _bad(f"{path}: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != schema:
        raise _bad(f"{path}: not a {schema} document")
    return found


def _bad(what: str) -> EsperError:
    return EsperError(
        "E0526", f"tuning file: {what}", exit_code=EXIT_USAGE,
        hint="use what `esper-forge tune --build-only` or `--time-only` wrote",
    )  # fmt: skip
