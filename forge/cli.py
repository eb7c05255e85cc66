"""esper-forge: compile blueprints, and show why the kernels are what they are."""

from __future__ import annotations

import glob
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from esper_ir.diagnostics import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_NOT_FOUND, EXIT_USAGE, EsperError
from library.cli_base import Interruptible

LIBRARY = click.option(
    "--library", type=click.Path(path_type=Path), help="Library directory (default: ESPER_LIBRARY)."
)
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
TARGET = click.option(
    "--target", "targets", multiple=True, help="Hardware target, repeatable (default: auto)."
)


BUDGET = click.option("--budget", help="Time to measure in, as 90s, 30m or 2h (at most 24h).")
LONGEST_S = 24 * 3600.0
WIDEST = 64  # characters of a column


@click.group(cls=Interruptible, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="esper-forge")
def main() -> None:
    """Compile BlueprintIR graphs to forward and backward kernels."""


@contextmanager
def _errors(as_json: bool, document: Callable[[], dict[str, Any]] = dict) -> Iterator[None]:
    """Refusals to standard error with their exit code; with --json also as a document."""
    try:
        yield
    except EsperError as error:
        if as_json:
            click.echo(json.dumps({"schema": "esper-error/1", **document(), "error": error.to_json()}))
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("interrupted; what was finished is stored", err=True)
        sys.exit(EXIT_INTERRUPTED)


def _seconds(budget: str | None) -> float | None:
    """Seconds of a budget; E0519 for what is none."""
    if budget is None:
        return None
    number, unit = budget[:-1], {"s": 1.0, "m": 60.0, "h": 3600.0}.get(budget[-1:])
    try:
        found = float(number) * unit if unit else math.nan
    except ValueError:
        found = math.nan
    if not 0 < found <= LONGEST_S:
        hint = "a number and s, m or h, at most 24h: 90s, 30m, 2h"
        raise EsperError("E0519", f"no budget: {budget!r}", hint=hint, exit_code=EXIT_USAGE)
    return found


def _files(paths: tuple[str, ...]) -> list[Path]:
    """Every file meant, in order; E0512 for a path, pattern or directory that means none."""
    out: list[Path] = []
    for text in paths:
        path = Path(text)
        if path.is_dir():
            found = sorted(path.glob("*.json"))
        else:
            found = [path] if path.exists() or text == "-" else sorted(Path(p) for p in glob.glob(text))
        if not found:
            raise EsperError("E0512", "no such blueprint file", node=text, exit_code=EXIT_NOT_FOUND)
        out += found
    return out


def _blueprint(path: Path) -> Any:
    import esper_ir.text as text

    return text.parse(sys.stdin.buffer.read(), source="-") if str(path) == "-" else text.load(path)


@main.command("compile")
@click.argument("paths", nargs=-1, required=True)
@click.option("--pipeline", "pipelines", multiple=True, help="Pipeline, repeatable (default: fast).")
@TARGET
@click.option("--objective", "objectives", multiple=True, help="speed (default), memory, power; repeatable.")
@click.option(
    "--memory-budget", "memory", multiple=True, help="Share of what speed keeps, from 0 to 1; repeatable."
)
@click.option(
    "--replay", type=click.Path(path_type=Path), help="Make the choices of this tuning journal again."
)
@click.option("--deny", multiple=True, help="Make a warning an error: its code, or all. Repeatable.")
@click.option("--background", is_flag=True, help="Give way to all else on the machine, as beside a training.")
@BUDGET
@LIBRARY
@JSON
def compile_(
    paths: tuple[str, ...],
    pipelines: tuple[str, ...],
    targets: tuple[str, ...],
    objectives: tuple[str, ...],
    memory: tuple[str, ...],
    replay: Path | None,
    deny: tuple[str, ...],
    background: bool,
    budget: str | None,
    library: Path | None,
    as_json: bool,
) -> None:
    """Compile blueprint files, directories, globs or - (standard input) into the library."""
    from forge.objectives import within
    from forge.service import as_json as row
    from library.store import Library
    from runtime.sandbox import give_way

    if background:
        give_way(whole=True)
    rows: list[dict[str, Any]] = []
    failed: list[EsperError] = []
    with _errors(as_json), Library.open(library, roles=("compiler",)) as store:
        options = {
            "pipelines": pipelines or ("fast",),
            "targets": targets or ("auto",),
            "objectives": (*objectives, *map(within, memory)) or ("speed",),
            "library": store,
            "replay": _journal(replay) if replay else None,
            "deny": deny,
            "budget_s": _seconds(budget),
        }
        for path in _files(paths):
            made, refused = _compile_one(path, options, as_json)
            failed += refused
            for error in refused:
                click.echo(f"{path}: {error}", err=True)
            rows += [{"path": str(path), **row(r)} for r in made]
            for r in made:
                known = "" if r.status == "PENDING_BENCHMARKING" else f"  {r.status}"
                click.echo(f"{path}: {_summary(row(r))}{known}", err=as_json)
            for warning in dict.fromkeys(w for r in made for w in r.warnings):
                click.echo(f"{path}: {warning.strip()}", err=True)
    if as_json:
        errors = [e.to_json() for e in failed]
        click.echo(json.dumps({"schema": "esper-compile/1", "artifacts": rows, "errors": errors}, indent=1))
    if failed:
        sys.exit(failed[0].exit_code or EXIT_FAILURE)


@main.command("tune")
@click.argument("artifact_id", required=False)
@click.option(
    "--build-only", type=click.Path(path_type=Path), help="Write the candidates of ID to this file."
)
@click.option("--trials", default=300, show_default=True, help="How many candidates --build-only makes.")
@click.option("--time-only", type=click.Path(path_type=Path), help="Time the candidates of this file here.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Where --time-only writes its times.")
@click.option(
    "--measured", type=click.Path(path_type=Path), help="Take the times of this file, then tune ID."
)
@BUDGET
@LIBRARY
@JSON
def tune_(
    artifact_id: str | None,
    build_only: Path | None,
    trials: int,
    time_only: Path | None,
    output: Path | None,
    measured: Path | None,
    budget: str | None,
    library: Path | None,
    as_json: bool,
) -> None:
    """Search on from the tiles of an artifact, on the machine that it runs on; or build its candidates here
    and time them there.
    """
    from forge import tuning
    from forge.service import as_json as row
    from library.store import Library

    with _errors(as_json), Library.open(library, roles=("compiler",)) as store, _progress(as_json) as tell:
        if (artifact_id is None) is (time_only is None):
            raise EsperError("E0528", "tune takes an artifact, or --time-only FILE", exit_code=EXIT_USAGE)
        name, seconds = str(artifact_id), _seconds(budget)
        if time_only is not None:
            found = tuning.time_candidates(store, time_only, output, budget_s=seconds, progress=tell)
        elif build_only is not None:
            found = tuning.build_candidates(store, name, build_only, trials=trials, progress=tell)
        else:
            made = tuning.tune_artifact(store, name, budget_s=seconds, measured=measured, progress=tell)
            found = {"schema": "esper-compile/1", "artifacts": [row(made)], "errors": []}
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    click.echo(_tuned(found))
    for warning in dict.fromkeys(w for r in found.get("artifacts", ()) for w in r["warnings"]):
        click.echo(warning.strip(), err=True)


def _tuned(found: dict[str, Any]) -> str:
    if "artifacts" not in found:
        return "{candidates} candidates of {groups} groups, {failed} refused  {file}".format(**found)
    return _summary(found["artifacts"][0])


def _summary(made: dict[str, Any]) -> str:
    """Id, seconds, and what measuring came to where there was any."""
    line, tuned = f"{made['artifact_id']}  {made['seconds']['total']:.1f} s", made["tuned"]
    if not tuned:
        return line
    gain = f"{tuned['gain']:.2f}x" if tuned["gain"] != 1 else "none"
    spent = f"measuring {tuned['measuring_s']:.1f} s, building {tuned['building_s']:.1f} s"
    return f"{line}  {tuned['timed']} tiles timed, gain over the rules' choice: {gain}, {spent}"


def _compile_one(path: Path, options: dict[str, Any], as_json: bool) -> tuple[list[Any], list[EsperError]]:
    """What one file gave, and refusals: what else was asked for is still compiled."""
    from forge.service import compile_blueprint

    refused: list[EsperError] = []
    try:
        with _progress(as_json) as tell:
            told = {"progress": lambda step: tell(f"{path}: {step}"), "failed": refused}
            return compile_blueprint(_blueprint(path), **told, **options), refused
    except EsperError as error:
        return [], [*refused, error]


def _journal(path: Path) -> Any:
    """A tuning journal as data (forge.tune.journal checks what it says)."""
    from library.canon import parse_json

    if not path.is_file():
        raise EsperError("E0512", "no such file", node=str(path), exit_code=EXIT_NOT_FOUND)
    return parse_json(path.read_bytes())


@contextmanager
def _progress(as_json: bool) -> Iterator[Callable[[str], None]]:
    """A live line on a terminal, nothing elsewhere."""
    if as_json or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


@main.command()
@click.argument("path")
@click.option("--target", default="auto", help="Hardware target (default: auto).")
@click.option("--objective", default="speed", help="speed (default), memory, memory-0.5, power.")
@JSON
def explain(path: str, target: str, objective: str, as_json: bool) -> None:
    """Show the fusion groups with bytes, operations and floors, and why candidates were refused."""
    from forge.explain import explain as document
    from forge.explain import render
    from forge.service import front

    with _errors(as_json):
        made = document(front(_blueprint(_files((path,))[0]), target, aim=objective))
        click.echo(json.dumps(made, indent=1) if as_json else render(made))


@main.command("import")
@click.argument("target")
@click.option("--input", "inputs", multiple=True, help="Example input: float32[8,64], or name=int64[4].")
@click.option("--dynamic", multiple=True, help="Axis that varies: 0, or x:0=tokens, or x:0=tokens:1:4096.")
@click.option("--set", "arguments", multiple=True, help="Argument of the class: width=64.")
@click.option("--train/--eval", "training", default=True, help="Mode of the module (default: --train).")
@click.option("--updates/--no-updates", default=True, help="Buffers that training writes (default: yes).")
@click.option("--name", help="Name of the blueprint (default: that of the class).")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; values go beside it.")
@JSON
def import_(target: str, output: Path | None, as_json: bool, **options: Any) -> None:
    """Make a blueprint of a torch class: TARGET is path.py:Class. The file is run."""
    import esper_ir.canonical as canonical
    import esper_ir.text as text
    from esper_ir.importers.torch_values import save
    from forge.importing import import_file

    with _errors(as_json):
        made = import_file(target, **options)
        files = [str(path) for path in save(made, output)] if output else []
        document = {
            "schema": "esper-import/1",
            "id": canonical.blueprint_id(made),
            "name": made.name,
            "files": files,
            **made.metadata,
        }
        for label in made.metadata["imported"].get("left_out", ()):
            click.echo(
                f"{made.name}: {label} is written in training, the blueprint leaves that out", err=True
            )
        if as_json:
            click.echo(json.dumps(document, indent=1))
            return
        click.echo("\n".join(files) if files else text.render(made).rstrip())
        values = str(output.with_suffix(".safetensors")) if output else ""
        if values in files:
            load = "from esper_ir.safetensors import load_file; module.load_state_dict(load_file"
            click.echo(f"values: {load}({values!r}))", err=True)


@main.command()
@click.argument("first")
@click.argument("second")
@JSON
def diff(first: str, second: str, as_json: bool) -> None:
    """Say in what two blueprints differ; exit code 1 when they do."""
    from esper_ir.compare import compare, render

    with _errors(as_json):
        found = compare(*(_blueprint(_files((path,))[0]) for path in (first, second)))
        click.echo(json.dumps(found.to_json(), indent=1) if as_json else render(found))
        if found.rows:
            sys.exit(EXIT_FAILURE)


@main.command()
@click.argument("path")
@click.option("--svg", type=click.Path(path_type=Path), help="Draw it, coloured by kernel, into this file.")
@click.option("--target", default="auto", help="Hardware target of the picture (default: auto).")
@JSON
def show(path: str, svg: Path | None, target: str, as_json: bool) -> None:
    """Print a blueprint: leaves and nodes with their types and floating-point operations."""
    from esper_ir.show import document, render
    from esper_ir.verify import typed, verify
    from forge.analysis import analyse

    with _errors(as_json):
        blueprint = _blueprint(_files((path,))[0])
        made = document(blueprint)
        if svg is not None:
            _draw(blueprint, target, svg)
        click.echo(json.dumps(made, indent=1) if as_json else render(made))
        for warning in (*verify(blueprint), *analyse(blueprint, typed(blueprint))):
            click.echo(str(warning).strip(), err=True)


def _draw(blueprint: Any, target: str, path: Path) -> None:
    from forge.picture import svg
    from forge.service import front

    try:
        path.write_text(svg(front(blueprint, target)), encoding="utf-8")
    except OSError as error:
        raise EsperError("E0551", f"cannot be written: {error.strerror}", node=str(path)) from None
    click.echo(f"{path}", err=True)


@main.command("print")
@click.argument("path")
@click.option("--target", default="auto", help="Hardware target (default: auto).")
@click.option(
    "--what", type=click.Choice(["plan", "text", "ptx"]), default="plan",
    help="Kernel plans, kernel text, or what is assembled for NVIDIA's cards.",
)  # fmt: skip
def print_(path: str, target: str, what: str) -> None:
    """Print the kernel plans, the Triton or C text made from them, or the PTX made from that."""
    from forge.service import built, front, kernel_text, ptx_text

    with _errors(False):
        blueprint = _blueprint(_files((path,))[0])
        if what == "ptx":
            click.echo(ptx_text(built(blueprint, target)))
            return
        work = front(blueprint, target)
        plans = "\n\n".join(str(s.plan) for s in work.kernels.by_key.values())
        click.echo(plans if what == "plan" else kernel_text(work))


@main.command()
@JSON
def ops(as_json: bool) -> None:
    """List the operators of the graph language: gradients, and how every target runs them."""
    from forge.operators import rows

    found = rows()
    if not as_json:
        found = [{k: r[k] for k in ("op", "kind", "doc")} for r in found]
    _table(found, as_json, "esper-ops/2", "ops")


@main.command()
@JSON
def targets(as_json: bool) -> None:
    """List hardware targets; `auto` and `cpu` resolve on this machine."""
    from forge.target import targets as known

    rows = [{"target": t.name, "kind": t.kind, "arch": t.arch} for _, t in sorted(known().items())]
    _table(rows, as_json, "esper-targets/1", "targets")


@main.command()
@JSON
def templates(as_json: bool) -> None:
    """List the fusion templates that kernels are made from."""
    from forge.explain import templates as known

    _table(known(), as_json, "esper-templates/1", "templates")


@main.command()
@JSON
def pipelines(as_json: bool) -> None:
    """List the pipelines and their steps."""
    from forge.pipelines import PIPELINES

    rows = [
        {"pipeline": p.name, "does": p.summary, "steps": [s for s, _ in p.steps]} for p in PIPELINES.values()
    ]
    _table(rows, as_json, "esper-pipelines/1", "pipelines")


@main.command("explain-miss")
@click.argument("first")
@click.argument("second")
@LIBRARY
@JSON
def explain_miss(first: str, second: str, library: Path | None, as_json: bool) -> None:
    """Say which fields of two artifacts' keys differ."""
    from forge.service import key_differences
    from library.store import Library

    with _errors(as_json), Library.open(library, create=False, readonly=True) as store:
        rows = key_differences(store, first, second)
        if not rows:
            click.echo("the two keys do not differ", err=True)
        if not as_json:
            for row in rows:
                row["first"], row["second"] = _apart(_cell(row["first"]), _cell(row["second"]))
        _table(rows, as_json, "esper-explain-miss/1", "differences")


@main.command()
@LIBRARY
@JSON
def doctor(library: Path | None, as_json: bool) -> None:
    """Check what compiling needs: Triton, assembler, C compiler, sandbox, library."""
    from forge.service import checkup

    with _errors(as_json):
        rows = checkup(library)
        _table(rows, as_json, "esper-doctor/1", "checks")
        if not all(r["ok"] for r in rows if r["needed"]):
            sys.exit(EXIT_FAILURE)


def _table(rows: list[dict[str, Any]], as_json: bool, schema: str, key: str) -> None:
    if as_json:
        click.echo(json.dumps({"schema": schema, key: rows}, indent=1))
        return
    lines = [tuple(name.upper() for name in rows[0])] if rows else []
    lines += [tuple(map(_cell, row.values())) for row in rows]
    widths = [min(max(map(len, column)), WIDEST) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(f"{text:<{w}}" for text, w in zip(line, widths, strict=True)).rstrip())


def _apart(first: str, second: str) -> tuple[str, str]:
    """Both, as much as fits; of long ones from a little before where they part."""
    begin = len(os.path.commonprefix((first, second))) - WIDEST // 4
    if max(len(first), len(second)) <= WIDEST or begin <= 0:
        return _short(first), _short(second)
    return _short("..." + first[begin:]), _short("..." + second[begin:])


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _cell(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return " > ".join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    one_line = not isinstance(value, str) or value.isprintable()
    return str(value) if one_line and not isinstance(value, (list, dict)) else json.dumps(value)


if __name__ == "__main__":
    main()
