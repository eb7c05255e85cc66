"""From an id to a launch-ready program: verified bytes or a refusal, once per process, bounded in memory.

The library hands over bytes only after it verified them (state, digest, verdict signed by a validator
key); nothing reaches the dynamic linker or the driver before. Cached programs are shared by all modules of
the process.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from esper_ir.diagnostics import EsperError, Rejected
from library import launch as launch_manifest
from library.manifest import Container, blueprint_document, unpack
from library.platform import Platform
from library.records import PENDING_BENCHMARKING, VALIDATED, ArtifactRecord, LoadedArtifact, Verdict
from library.store import Library
from runtime import outcomes, system
from runtime.cache import Cache, CacheInfo
from runtime.code import Code, close_all, load_code
from runtime.errors import fail
from runtime.executor import Program
from runtime.parameters import Leaf, leaves_of
from runtime.select import Facts, Query, Ranking, nothing_suits, rank, recorded_versions

log = logging.getLogger("esper.runtime")
OUT_OF_MEMORY = 2
OPEN_LIBRARIES = 8
_REFUSALS = {"E0781": "E0802", "E0782": "E0804", "E0783": "E0808"}


class UnvalidatedWarning(UserWarning):
    """An artifact that nothing has proven is running."""


def strict() -> bool:
    """ESPER_STRICT=1: no unvalidated artifact, no other library version."""
    return os.environ.get("ESPER_STRICT") == "1"


class Entry:
    """One artifact on one device. `notes`: tolerated differences between the libraries recorded and those
    here."""

    def __init__(
        self,
        program: Program,
        record: ArtifactRecord,
        container: Container,
        verdict: Verdict | None,
        notes: Sequence[str],
    ) -> None:
        self.program, self.record, self.container, self.verdict = program, record, container, verdict
        self.notes = tuple(notes)
        self.nbytes = len(container.data)
        interface = program.interface
        self.own = tuple(s for s in interface.inputs if s.kind != "input")
        """What a module of it holds itself; `flat`: parameters alone, under names without dots."""
        self.flat = all(s.kind == "param" and "." not in s.name for s in self.own)
        self.can = tuple(s.name in interface.differentiable for s in interface.inputs)
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def pins(self) -> int:
        return len(self._users)

    def pin(self, user: Any) -> None:
        """Keep this entry in the cache while `user` lives."""
        self._users.add(user)

    @functools.cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """How `own` is made. E0819 where the size of one is symbolic."""
        text = blueprint_document(self.container.manifest)
        return leaves_of(self.own, text, self.program.interface.differentiable)

    def forked(self) -> bool:
        return self.program.index < 0


_cache: Cache[Entry] = Cache()
_libraries: OrderedDict[str, Library] = OrderedDict()
_libraries_lock = threading.Lock()
_faulty: set[str] = set()
_meant: dict[tuple[Any, ...], tuple[Any, ...]] = {}
"""What a name was resolved to, so that asking again costs a look-up and gives the same choice."""


def _after_fork() -> None:
    global _libraries_lock
    _libraries_lock = threading.Lock()
    _libraries.clear()  # a connection must not cross a fork: the child opens its own
    _cache.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def open_library(where: Library | Path | str | None = None) -> Library:
    """The library at a place, opened read-only once per process (default place: ESPER_LIBRARY, else the
    user's). Of more than OPEN_LIBRARIES the one asked for longest ago is let go: it is closed when nobody
    holds it."""
    if isinstance(where, Library):
        return where
    key = str(where) if where is not None else os.environ.get("ESPER_LIBRARY", "")
    with _libraries_lock:
        if key not in _libraries:
            opened = Library.open(where, create=False, readonly=True)
            opened.warm()
            _libraries[key] = opened
            if len(_libraries) > OPEN_LIBRARIES:
                _libraries.popitem(last=False)
        _libraries.move_to_end(key)
        return _libraries[key]


def tags_of(artifact_id: str, library: Library | Path | str | None) -> list[str]:
    """Tags of the newest annotation that a validator signed; none without one."""
    try:
        return list(open_library(library).annotation(artifact_id).get("generated_tags", []))
    except EsperError as error:
        log.warning("%s: no tags: %s", artifact_id, error.message)
        return []


def cache_info() -> CacheInfo:
    """Hits, misses, evictions and bytes of the process's cache."""
    return _cache.info()


def cache() -> Cache[Entry]:
    """The process-wide cache itself."""
    return _cache


def mark_faulty(artifact_id: str) -> bool:
    """An artifact failed in use: choose it last from now on in this process, and hold it no longer than its
    users do. False when that was known."""
    if artifact_id in _faulty:
        return False
    _faulty.add(artifact_id)
    for asked, meant in list(_meant.items()):
        if meant[0] == artifact_id:
            _cache.drop(meant)
            _meant.pop(asked, None)
    return True


def load_entry(
    name: str,
    *,
    device: torch.device | None = None,
    library: Library | Path | str | None = None,
    allow_unvalidated: bool = False,
) -> Entry:
    """The launch-ready program of an artifact id, id prefix or blueprint id. Cached by what was asked for."""
    if allow_unvalidated and strict():
        raise fail(
            "E0806",
            "ESPER_STRICT=1 does not run unvalidated artifacts",
            node=name,
            hint="prove it with `esper-gauntlet bench`, or unset ESPER_STRICT",
        )
    place = library if not isinstance(library, Library) else str(library.home)
    home = place if place is not None else os.environ.get("ESPER_LIBRARY")
    asked = (name, device, home, allow_unvalidated, strict())
    key = _meant.get(asked)
    if key is None:
        record = resolve(open_library(library), name, device, allow_unvalidated)
        key = _meant[asked] = (record.id, _device_for(record, device), *asked[2:])
    artifact_id, chosen = key[:2]
    return _cache.get(key, lambda: _load(artifact_id, chosen, library, allow_unvalidated))


def load_fresh(
    artifact_id: str,
    device: torch.device,
    *,
    library: Library | Path | str | None = None,
    allow_unvalidated: bool = False,
) -> Entry:
    """The same past the cache, kept by the caller alone: what an uncached load costs."""
    return _load(artifact_id, device, library, allow_unvalidated)


def _load(
    artifact_id: str,
    chosen: torch.device,
    library: Library | Path | str | None,
    allow_unvalidated: bool,
) -> Entry:
    loaded = open_library(library).load(artifact_id, allow_unvalidated=allow_unvalidated)
    record = loaded.record
    if loaded.verdict is None:
        warnings.warn(
            f"{record.id} runs unvalidated: nothing has proven it", UnvalidatedWarning, stacklevel=4
        )
    machine = system.machine(record.kind, int(chosen.index or 0))
    strictly = strict()
    notes = check_machine(loaded.container.head, machine, strictly)
    launch = launch_of(loaded)
    program = _program(record.id, launch, loaded.container, chosen, machine, strictly)
    if notes:
        log.warning("%s: %s", record.id, "; ".join(notes))
    return Entry(program, loaded.record, loaded.container, loaded.verdict, notes)


def _program(
    artifact_id: str,
    launch: launch_manifest.LaunchManifest,
    container: Container,
    device: torch.device,
    machine: Platform,
    strictly: bool,
) -> Program:
    versions = machine.externs if container.head["externs"] else {}

    def attempt() -> Code:
        return load_code(launch, container.blobs, device, name=artifact_id, versions=versions)

    try:
        code = attempt()
    except EsperError as error:
        if error.details.get("cuda_error") != OUT_OF_MEMORY or not _cache.release():
            raise
        code = attempt()
    # Code is unmapped when the last program and the last bound plan of it are gone, whatever the cache held.
    weakref.finalize(code, close_all, code.objects).atexit = False
    return Program(artifact_id, launch, code, strict=strictly, title=str(container.head["title"]))


def launch_of(loaded: LoadedArtifact) -> launch_manifest.LaunchManifest:
    """Of proven bytes the sealed form, where they have one: that it says what the manifest says was seen when
    they were proven. All else is read strictly."""
    container = loaded.container
    if loaded.verdict is not None and container.sealed is not None:
        return container.sealed.launch()
    return launch_manifest.from_json(container.manifest["launch"], lazy=loaded.verdict is not None)


def resolve(library: Library, name: str, device: torch.device | None, unvalidated: bool) -> ArtifactRecord:
    """The record that a name means: an artifact by id or prefix, or the best artifact of a blueprint."""
    if "-" in str(name):
        return library.resolve(name)
    ranking, blueprint, kinds = survey(library, name, device, unvalidated)
    if not ranking.chosen:
        raise nothing_suits(blueprint, ranking, kinds, platforms_here(device))
    return ranking.chosen[0]


def survey(
    library: Library, name: str, device: torch.device | None, unvalidated: bool = False
) -> tuple[Ranking, str, tuple[str, ...]]:
    """Every artifact of a blueprint, ranked or refused; the blueprint's id; the kinds of device asked for."""
    blueprint = library.blueprint(name).id
    kinds = ("cuda", "cpu") if device is None else (device.type,)
    platforms = platforms_here(device)
    faulty = outcomes.failed_before(library, blueprint) | _faulty
    query = Query(blueprint, kinds, faulty, unvalidated, strict=strict())
    rows = library.artifacts(blueprint=blueprint)
    return rank(query, platforms, rows, _facts(library, rows, kinds)), blueprint, kinds


def _facts(library: Library, rows: Sequence[ArtifactRecord], kinds: Sequence[str]) -> dict[str, Facts]:
    """What the manifests say of those that could run; of a file that cannot be read loading will say why."""
    found: dict[str, Facts] = {}
    for row in rows:
        if row.kind not in kinds or row.state not in (VALIDATED, PENDING_BENCHMARKING):
            continue
        try:
            found[row.id] = Facts.of(unpack(library.read(row.id), verified=True).manifest)
        except (EsperError, KeyError, TypeError, ValueError) as error:
            log.warning("%s: its manifest cannot be read: %s", row.id, error)
    return found


def platforms_here(device: torch.device | None = None) -> dict[str, Platform]:
    """What this process can run on, by kind."""
    out = {"cpu": system.machine("cpu")}
    if (device is None or device.type == "cuda") and torch.cuda.is_available():
        index = (
            system.default_device("cuda").index if device is None or device.index is None else device.index
        )
        out["cuda"] = system.machine("cuda", int(index or 0))
    return out


def _device_for(record: ArtifactRecord, device: torch.device | None) -> torch.device:
    if record.kind == "hip":
        raise fail(
            "E0802",
            f"{record.id} is for {record.arch}, not run yet",
            node=record.id,
        )
    if device is not None and device.type != record.kind:
        raise fail("E0802", f"{record.id} is for {record.kind}, asked for {device}", node=record.id)
    if record.kind == "cuda" and not torch.cuda.is_available():
        raise fail(
            "E0801",
            f"{record.id} needs a CUDA card ({record.arch}), torch sees none",
            node=record.id,
            hint="compile the blueprint with --target cpu, or run on a machine with the card",
        )
    if device is None or (device.type == "cuda" and device.index is None):
        return system.default_device(record.kind)
    return device


def check_machine(manifest: Mapping[str, Any], machine: Platform, refuse: bool) -> tuple[str, ...]:
    """Tolerated differences; E0802 architecture, E0804 driver, E0808 library absent or, with `refuse`,
    different."""
    target, driver = manifest["target"], manifest["target"].get("min_driver", 0)
    judged = machine.accepts(
        target["kind"],
        target["arch"],
        min_driver=driver if isinstance(driver, int) else 0,
        externs=recorded_versions(manifest["externs"]),
        strict=refuse,
    )
    if isinstance(judged, Rejected):
        code = _REFUSALS.get(judged.code, "E0802")
        raise fail(
            code,
            judged.reason,
            node=manifest["artifact_id"],
            hint="`python -m runtime doctor` shows this machine; `esper-forge compile` makes one for it",
            details=judged.details,
        )
    return judged.value
