"""`esper-gauntlet`: prove and measure artifacts, tag them, show what was found, replay a rejection."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import click

from esper_ir.diagnostics import EXIT_FAILURE, EXIT_OK, EsperError
from gauntlet.cli_base import device_option, emit, json_option, library_option, named
from gauntlet.risk.cli import risk
from library.cli_base import Interruptible

BASELINES = ("eager", "torch.compile")


def _baselines(context: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
    given = [word.strip() for word in value.split(",") if word.strip()]
    unknown = [word for word in given if word not in BASELINES]
    if unknown or not given:
        raise click.BadParameter(f"{', '.join(unknown) or 'nothing'}: choose from {', '.join(BASELINES)}")
    return tuple(given)


@click.group(cls=Interruptible, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="esper-forge")
def main() -> None:
    """Prove, measure and explain compiled kernels."""


main.add_command(risk)


@main.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--pending", is_flag=True, help="Every artifact that has no verdict yet (the default without ID)."
)
@click.option(
    "--quick",
    is_flag=True,
    help="The short list of cases, and measured in seconds; the verdict counts all the same.",
)
@click.option(
    "--compare",
    default="eager",
    show_default=True,
    callback=_baselines,
    help="Baselines to measure beside, separated by commas: eager, torch.compile (eager is always there).",
)
@click.option("--again", is_flag=True, help="Judge and measure those that have a verdict once more.")
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 30) - 1),
    help="Draw the values of the cases as the verdict with this seed did (default: ESPER_SEED, else a new "
    "one each time).",
)
@device_option
@library_option
@json_option
def bench(
    ids: tuple[str, ...], pending: bool, quick: bool, compare: tuple[str, ...], again: bool,
    seed: int | None, device: str | None, library: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Run artifacts through every stage, measure those that pass, and sign the verdicts. Exit 1 if any is
    REJECTED. Of those that are pending, what is for other machines than this is named and left, which is no
    failure."""
    from gauntlet.isolate import ForkServer
    from gauntlet.progress import Report
    from library.store import Library

    with (
        named(as_json),
        Library.open(library, create=False, roles=("validator",)) as opened,
        ForkServer() as server,
    ):
        chosen = list(ids)
        if pending or not ids:
            # What failed in use comes first: it is being run somewhere.
            chosen += [a for a in opened.troubled() if a not in chosen]
            chosen += [r.id for r in opened.artifacts(state="PENDING_BENCHMARKING") if r.id not in chosen]
        done = _Done()
        with Report(len(chosen), quick) as bar:
            for artifact_id in chosen:
                found = _proven(
                    artifact_id, progress=bar.event, library=opened, quick=quick, device=device,
                    server=server, compare=compare, again=again, seed=seed,
                )  # fmt: skip
                done.add(artifact_id, found, bar, named=(*ids, device))
        if as_json:
            emit(done.to_json())
        elif done.left:
            click.echo(
                f"{len(done.left)} left pending, to be proven on a machine that they are for", err=True
            )
        elif not chosen:
            click.echo("nothing is pending", err=True)
    raise SystemExit(done.exit_code())


@dataclass
class _Done:
    """What came of a run of `bench`. `left`: what is for other machines and was not asked for by name."""

    verdicts: list[Any] = field(default_factory=list)
    errors: list[EsperError] = field(default_factory=list)
    left: list[EsperError] = field(default_factory=list)

    def add(self, artifact_id: str, found: Any, bar: Any, named: tuple[str | None, ...]) -> None:
        """Told as it comes. `named`: the ids and the device of the command line."""
        from gauntlet.runner import ELSEWHERE

        if not isinstance(found, EsperError):
            self.verdicts.append(found)
            bar.verdict(found)
        elif found.code == ELSEWHERE and not {artifact_id, found.node} & set(named):
            self.left.append(found)
            bar.left(artifact_id, found)
        else:
            self.errors.append(found)
            bar.error(artifact_id, found)

    def to_json(self) -> dict[str, Any]:
        refused = {"errors": self.errors, "left": self.left}
        told = {name: [e.to_json() for e in found] for name, found in refused.items() if found}
        return {"verdicts": [v.to_json() for v in self.verdicts], **told}

    def exit_code(self) -> int:
        if any(v.passed is False for v in self.verdicts):
            return EXIT_FAILURE
        if self.errors:
            return self.errors[0].exit_code
        return EXIT_FAILURE if any(v.passed is None for v in self.verdicts) else EXIT_OK


def _proven(artifact_id: str, **options: Any) -> Any:
    """A verdict, or why there is none."""
    from gauntlet.runner import prove

    try:
        return prove(artifact_id, **options)
    except EsperError as error:
        error.details.setdefault("artifact", artifact_id)
        return error


@main.command()
@click.argument("artifact", metavar="ID")
@library_option
@json_option
def show(artifact: str, library: str | None, as_json: bool) -> None:
    """The verdict on an artifact: every stage, its reason and its numbers."""
    from library.store import Library

    with named(as_json), Library.open(library, create=False, readonly=True) as opened:
        record = opened.resolve(artifact)
        verdict = opened.verdict(record.id)
        if as_json:
            emit(
                {
                    "artifact_id": record.id,
                    "state": record.state,
                    "verdict": verdict.to_json() if verdict else None,
                    "annotation": opened.annotation(record.id),
                }
            )
            return
        click.echo(f"{record.id}  {record.name}  {record.state}")
        if tagged := opened.annotation(record.id).get("generated_tags"):
            click.echo(f"  {' '.join(tagged)}")
        if verdict is None:
            click.echo(f"no verdict yet: esper-gauntlet bench {record.id}")
            return
        _say_circumstances(verdict.report.get("hardware_context", {}))
        for stage in verdict.report["stages"]:
            _say_stage(stage)
        click.echo("  profile")
        _say_numbers(verdict.report.get("wep", {}))


def _say_circumstances(context: dict[str, Any]) -> None:
    """On what it was judged, with which list and which values of cases, and behind which walls."""
    parts = (("on", "card"), ("cases", "cases"), ("seed", "seed"), ("sandbox", "sandbox"))
    click.echo("  " + ", ".join(f"{word} {context[key]}" for word, key in parts if key in context))


def _say_stage(stage: dict[str, Any]) -> None:
    """One stage with its numbers; the profile follows, distributions are for --json."""
    line = f"  {stage['outcome']:8} {stage['name']:12} {stage['seconds']:8.2f} s  {stage['reason']}"
    click.echo(line.rstrip())
    _say_numbers({k: v for k, v in sorted(stage["metrics"].items()) if k not in ("profile", "works")})
    if stage["case"]:
        click.echo(f"           esper-gauntlet replay {stage['case'][:16]}")


def _say_numbers(numbers: dict[str, Any]) -> None:
    """A number a line, to six digits; what nobody measured together at the end."""
    from gauntlet.report import UNMEASURED

    each = {k: v if isinstance(v, list) else [v] for k, v in numbers.items()}
    absent = [k for k, values in each.items() if values and all(v == UNMEASURED for v in values)]
    for key, value in numbers.items():
        if key not in absent:
            click.echo(f"           {key} = {f'{value:.6g}' if isinstance(value, float) else value}")
    if absent:
        click.echo(f"           {UNMEASURED}: {', '.join(absent)}")


@main.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@library_option
@json_option
def annotate(ids: tuple[str, ...], library: str | None, as_json: bool) -> None:
    """Sign tags, confidence and interest over artifacts that were validated (without ID: all of them), from
    what their verdicts measured and their peers'. The newest annotation counts; each is an entry of the
    ledger. Exit 1 if a report cannot be read; the others are annotated."""
    from gauntlet.annotating import annotate as run
    from library.store import Library

    with named(as_json), Library.open(library, create=False, roles=("validator",)) as opened:
        said, known = run(opened, ids)
    problems = list(known.problems.values())
    if as_json:
        emit({"annotations": said, **({"errors": [e.to_json() for e in problems]} if problems else {})})
    else:
        for artifact_id, found in said.items():
            click.echo(f"{artifact_id}  {' '.join(found['generated_tags'])}")
        for error in problems:
            click.echo(error.render(), err=True)
    raise SystemExit(EXIT_FAILURE if problems else EXIT_OK)


@main.command()
@click.option("--rules", is_flag=True, help="The rules behind the tags instead, by rank and without peers.")
@click.option("--metric", help="The distributions of speed, memory, power or drift instead.")
@library_option
@json_option
def tags(rules: bool, metric: str | None, library: str | None, as_json: bool) -> None:
    """The tags of every validated artifact, as they were signed."""
    from gauntlet.tags import RANKS, RULES
    from library.store import Library

    if rules:
        found: dict[str, Any] = {rule.tag: rule.text for rule in RULES}
        ranks = {rank.tag: f"{rank.text} ({rank.metric})" for rank in RANKS}
    else:
        ranks = {}
        with named(as_json), Library.open(library, create=False, readonly=True) as opened:
            found = _distributions(opened, metric) if metric else _tagged(opened)
    if as_json:
        emit({"rules": found, "ranks": ranks} if rules else {"distributions" if metric else "tags": found})
        return
    for name, text in found.items():
        click.echo(f"{name:20} {text}")
    if not (rules or metric) and "-" in found.values():
        click.echo("artifacts without tags (-) get them from `esper-gauntlet annotate`", err=True)
    if ranks:
        click.echo("\nfrom 20 peers on, of one class on one hardware:")
    for name, text in ranks.items():
        click.echo(f"{name:20} {text}")


def _tagged(library: Any) -> dict[str, str]:
    known = [r.id for r in library.artifacts(state="VALIDATED")]
    return {a: " ".join(library.annotation(a).get("generated_tags", ())) or "-" for a in known}


def _distributions(library: Any, name: str) -> dict[str, str]:
    """One line per class and hardware; what `annotate` saw."""
    from gauntlet.annotating import read_peers
    from gauntlet.peers import metric

    wanted = metric(name).name
    return {
        f"{row['op_class']} on {row['hardware']}": f"{row['basis']}, {row['n']} peers, "
        + ", ".join(f"{cut}: {value:.4g}" for cut, value in row["cuts"].items())
        for row in read_peers(library.home)
        if row["metric"] == wanted
    }


@main.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--html", "place", required=True, type=click.Path(dir_okay=False), help="File to write.")
@click.option("--title", default="Esper: artifacts and verdicts", help="Heading of the page.")
@library_option
@json_option
def report(ids: tuple[str, ...], place: str, title: str, library: str | None, as_json: bool) -> None:
    """Write one self-contained page about artifacts that were judged (without ID: all of them): verdicts with
    their reasons, latencies, roofline, errors against bounds, memory, history. Exit 1 if one cannot be
    read; the page names it."""
    from gauntlet import entries, page
    from library.store import Library

    with named(as_json), Library.open(library, create=False, readonly=True) as opened:
        found = entries.read(opened, ids)
        _write(place, page.page(found, title))
    told = page.summary(found)
    if as_json:
        emit({"html": place, **told})
    else:
        click.echo(f"{place}: {told['artifacts']} artifacts", err=True)
        for name in told["unreadable"]:
            click.echo(f"cannot be read: {name}", err=True)
    raise SystemExit(EXIT_FAILURE if told["unreadable"] else EXIT_OK)


def _write(place: str, text: str) -> None:
    """Whole or not at all. E0913 where the place cannot be written."""
    staged = f"{place}.{os.getpid()}"
    try:
        with open(staged, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(staged, place)
    except OSError as error:
        raise EsperError(
            "E0913", f"{place}: {error.strerror}", node=place, hint="choose a place that can be written"
        ) from error


@main.command()
@click.argument("case", metavar="CASE")
@device_option
@library_option
@json_option
def replay(case: str, device: str | None, library: str | None, as_json: bool) -> None:
    """Run one stored case of a rejected artifact again, alone. Exit 1 when it still fails."""
    from gauntlet.runner import replay as run

    with named(as_json):
        found = run(case, library=library, device=device)
    if as_json:
        emit({"passed": found.passed, "reason": found.reason, "stages": [vars(s) for s in found.stages]})
    else:
        click.echo("it passes now" if found.passed else f"it still fails: {found.reason}")
    raise SystemExit(EXIT_OK if found.passed else EXIT_FAILURE)


if __name__ == "__main__":
    main()
