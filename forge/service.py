"""Compile blueprints into a library: what the command line and other programs call."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import esper_ir.canonical as canonical
import esper_ir.text as text
from esper_ir.diagnostics import EXIT_USAGE, EsperError
from esper_ir.graph import Blueprint
from forge.ctoolchain import find_compiler
from forge.emit import c as emit_c
from forge.emit.triton import emit_kernel
from forge.emit.triton_scalars import preamble
from forge.lower import Kernels
from forge.objectives import objective
from forge.pass_manager import run
from forge.pipelines import EFFORTS, FAST, pipeline
from forge.target import resolve
from forge.toolchain import pairs
from forge.tune.journal import Choices
from forge.tune.journal import read as read_journal
from forge.work import Tuning, Work
from library.canon import canonical_json
from library.store import Library
from runtime.sandbox import levels_here

SHORT = "E0549"


@dataclass(frozen=True)
class CompileResult:
    """One artifact as stored. `seconds` by step of the pipeline and "total"; `kernels` and `externs` count
    steps. `tuned`: where tiles were measured, how many ("timed"), "gain" (how much faster the groups are that
    got another tile than their first; 1 where none did), "building_s" and "measuring_s".
    """

    artifact_id: str
    blueprint_id: str
    target: str
    pipeline: str
    status: str
    seconds: dict[str, float]
    size_bytes: int
    kernels: int
    externs: int
    warnings: tuple[str, ...]
    tuned: dict[str, Any]


def compile_blueprint(
    blueprint: Blueprint,
    *,
    pipelines: Sequence[str] = ("fast",),
    targets: Sequence[str] = ("auto",),
    objectives: Sequence[str] = ("speed",),
    library: Library,
    progress: Callable[[str], None] = lambda step: None,
    replay: object = None,
    incumbents: object = None,
    deny: Sequence[str] = (),
    budget_s: float | None = None,
    failed: list[EsperError] | None = None,
) -> list[CompileResult]:
    """Every pipeline x target x objective; nothing is written for one that fails, the others stand. With
    `failed` refusals are put there and the rest is compiled; without it the first one is raised.

    `replay` is a tuning journal (parsed JSON): its choices are made again and nothing is measured.
    `incumbents` is one too: a pipeline that measures starts from its tiles. `deny` are codes of warnings that
    are errors here ("all": every one). `budget_s`: seconds that a pipeline which measures may spend on a
    target.
    """
    out = []
    for target_name in targets:
        target = resolve(target_name)
        if not target.stored:
            hint = "`esper-forge print` and `explain` take it"
            raise EsperError("E0515", f"nothing is stored for {target.name}", hint=hint, exit_code=EXIT_USAGE)
        for name, aim in product(pipelines, map(objective, objectives)):
            started = time.perf_counter()
            journal = incumbents if replay is None else replay
            kernels = Kernels(choices=Choices() if journal is None else read_journal(journal))
            told = partial(_told, progress, f"{target.name} {pipeline(name).name}")
            tuning = replace(_tuning(name, budget_s, library, told), replayed=replay is not None)
            given = {"denied": tuple(deny), "kernels": kernels, "tuning": tuning}
            work = Work(blueprint, target, pipeline(name).name, aim, **given)
            with _apart(failed):
                work = run(pipeline(name), work, progress=told)
                out.append(_store(work, library, time.perf_counter() - started))
    return out


@contextmanager
def _apart(failed: list[EsperError] | None) -> Iterator[None]:
    """A refusal goes into the list, where there is one."""
    try:
        yield
    except EsperError as error:
        if failed is None:
            raise
        failed.append(error)


def _told(progress: Callable[[str], None], what: str, step: str) -> None:
    progress(f"{what}: {step}")


def _tuning(name: str, budget_s: float | None, library: Library, told: Callable[[str], None]) -> Tuning:
    """Trials and seconds of a pipeline; a budget that is named is the only limit."""
    trials, seconds = EFFORTS.get(name, (0, 0.0))
    if budget_s is not None:
        trials, seconds = (100_000 if budget_s > seconds else trials), budget_s
    return Tuning(trials, seconds, library, told)


def compile_file(
    path: Path | str,
    pipelines: Sequence[str] = ("fast",),
    targets: Sequence[str] = ("auto",),
    *,
    library: Library,
    progress: Callable[[str], None] = lambda step: None,
) -> list[CompileResult]:
    """The same from a blueprint file."""
    return compile_blueprint(
        text.load(Path(path)), pipelines=pipelines, targets=targets, library=library, progress=progress
    )


def front(blueprint: Blueprint, target_name: str, name: str = "fast", aim: str = "speed") -> Work:
    """The work up to the plans, without building: for `explain` and `print`."""
    chosen = pipeline(name)
    steps = tuple(s for s in chosen.steps if s[0] not in ("build", "package"))
    return run(
        type(chosen)(chosen.name, chosen.summary, steps),
        Work(blueprint, resolve(target_name), chosen.name, objective(aim)),
    )


def built(blueprint: Blueprint, target_name: str) -> Work:
    """The work up to machine code, which nothing stores."""
    steps = tuple(s for s in FAST.steps if s[0] != "package")
    return run(replace(FAST, steps=steps), Work(blueprint, resolve(target_name), FAST.name))


def ptx_text(work: Work) -> str:
    """PTX of all kernels of built work, one module; E0552 where the target has none."""
    found = work.built.side_files.get("module.ptx") if work.built else None
    if found is None:
        what = f"{work.target.name} has no PTX, or nothing of this block is a kernel of ours"
        raise EsperError("E0552", what, hint="--what text", exit_code=EXIT_USAGE)
    return found.decode()


def _store(work: Work, library: Library, seconds: float) -> CompileResult:
    assert work.built is not None
    blueprint_id = canonical.blueprint_id(work.blueprint)
    library.put_blueprint(blueprint_id, text.render(work.blueprint).encode(), work.blueprint.name)
    provenance = {
        "host": platform.node(),
        "python": platform.python_version(),
        "seconds": {k: round(v, 4) for k, v in work.seconds.items()},
        "toolchain": dict(work.built.toolchain),
    }
    side = {
        **work.built.side_files,
        "plans.txt": _plans(work).encode(),
        "journal.json": work.kernels.choices.to_bytes(),
        "provenance.json": canonical_json(provenance),
        **({"tuning.json": json.dumps(work.trials, indent=1).encode()} if work.trials else {}),
    }
    record = library.put_artifact(work.container, side_files=side, provenance=provenance)
    steps = [s for low in work.lowerings for s in low.plan.steps]
    return CompileResult(
        artifact_id=record.id,
        blueprint_id=blueprint_id,
        target=work.target.name,
        pipeline=work.pipeline,
        status=str(record.state),
        seconds={**{k: round(v, 4) for k, v in work.seconds.items()}, "total": round(seconds, 4)},
        size_bytes=len(work.container),
        kernels=len(work.kernels.by_key),
        externs=sum(type(s).__name__ == "ExternStep" for s in steps),
        warnings=(*(str(f) for f in work.findings), *_untimed(work)),
        tuned=dict(work.trials.get("spent", {})),
    )


def _untimed(work: Work) -> tuple[str, ...]:
    """What the measuring could not do."""
    out = []
    if why := work.trials.get("untimed"):
        out.append(f"untimed: {why}; `esper-forge tune` measures it where it is")
    if short := work.trials.get("short"):
        few = f"{SHORT}: the budget did not reach to other tiles of {len(short)} groups"
        out.append(f"{few}; `esper-forge tune` goes on with a larger --budget")
    if unkept := work.trials.get("unkept"):
        out.append(f"measurements were not kept: {unkept}")
    return tuple(out)


def _plans(work: Work) -> str:
    return "\n\n".join(str(s.plan) for s in work.kernels.by_key.values()) + "\n"


def as_json(result: CompileResult) -> dict[str, Any]:
    """A row of `artifacts` in the command's document."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in result.__dict__.items()}


def kernel_text(work: Work) -> str:
    """Triton or C text of every kernel of a work that has its plans."""
    plans = tuple(s.plan for s in work.kernels.by_key.values())
    if work.target.kind == "cpu":
        return emit_c.emit_module(plans, work.target)
    return preamble(False, pairs(work.target)) + "\n\n" + "\n\n".join(emit_kernel(p) for p in plans)


def key_differences(library: Library, first: str, second: str) -> list[dict[str, Any]]:
    """Fields of the key (blueprint, target, pipeline, toolchain, interface, choices) in which two artifacts
    differ.
    """
    a, b = (
        library.load(library.resolve(i).id, allow_unvalidated=True).container.manifest
        for i in (first, second)
    )
    fields = (
        "format",
        "blueprint",
        "target",
        "pipeline",
        "objective",
        "toolchain",
        "determinism",
        "launch",
        "externs",
    )
    rows = []
    for field in fields:
        if a[field] != b[field]:
            rows += [
                {"field": name, "first": x, "second": y} for name, x, y in _differ(field, a[field], b[field])
            ]
    return rows


def _differ(path: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """Leaves that differ, by dotted path."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(set(a) | set(b))
        return [d for k in keys if a.get(k) != b.get(k) for d in _differ(f"{path}.{k}", a.get(k), b.get(k))]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [
            d
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            if x != y
            for d in _differ(f"{path}[{i}]", x, y)
        ]
    return [(path, a, b)]


def checkup(library: Path | None) -> list[dict[str, Any]]:
    """What compiling needs, each with what was found and whether it is needed on this machine."""
    found = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else ""
    missing = "missing: pip install esper-forge[forge]"
    rows = [
        {"check": "triton", "ok": bool(found), "needed": True, "found": found or missing},
        _attempt("c compiler", False, lambda: str(find_compiler())),
        {"check": "sandbox", "ok": True, "needed": False, "found": levels_here()[-1]},
        _attempt("target auto", True, lambda: resolve("auto").name),
        _attempt("library", True, lambda: _writable(library)),
    ]
    return rows


def _attempt(check: str, needed: bool, look: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"check": check, "ok": True, "needed": needed, "found": look()}
    except EsperError as error:
        return {"check": check, "ok": False, "needed": needed, "found": f"{error.code}: {error.message}"}


def _writable(library: Path | None) -> str:
    with Library.open(library, roles=("compiler",)) as store:
        return str(store.home)
