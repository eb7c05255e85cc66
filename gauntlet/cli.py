"""`esper-gauntlet`: prove artifacts, show what was found, replay a rejection."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import click

from esper_ir.diagnostics import EXIT_FAILURE, EXIT_OK, EsperError
from gauntlet.cli_base import device_option, emit, json_option, library_option, named
from gauntlet.risk.cli import risk

MARKS = {
    "VALIDATED": ("green", "VALIDATED"),
    "REJECTED": ("red", "REJECTED"),
    "PENDING_BENCHMARKING": ("yellow", "PENDING"),
}

@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="esper-forge")
def main() -> None:
    """Prove, measure and explain compiled kernels."""


main.add_command(risk)


@main.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--pending", is_flag=True, help="Every artifact that has no verdict yet (the default without ID)."
)
@click.option("--quick", is_flag=True, help="The short list of cases; the verdict counts all the same.")
@device_option
@library_option
@json_option
def bench(
    ids: tuple[str, ...], pending: bool, quick: bool, device: str | None, library: str | None, as_json: bool
) -> None:
    """Run artifacts through every stage and sign the verdicts. Exit 1 if any is REJECTED."""
    from gauntlet.isolate import ForkServer
    from gauntlet.runner import Verdict, prove
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
        bar = _Progress(len(chosen))
        verdicts: list[Verdict] = []
        errors: list[EsperError] = []
        for artifact_id in chosen:
            try:
                found = prove(
                    artifact_id, library=opened, quick=quick, device=device, server=server, progress=bar.event
                )
            except EsperError as error:
                errors.append(error)
                bar.error(error)
                continue
            verdicts.append(found)
            bar.verdict(found)
        if as_json:
            failed = {"errors": [e.to_json() for e in errors]} if errors else {}
            emit({"verdicts": [v.to_json() for v in verdicts], **failed})
        elif not chosen:
            click.echo("nothing is pending", err=True)
    raise SystemExit(_exit_code(verdicts, errors))


def _exit_code(verdicts: list[Any], errors: list[EsperError]) -> int:
    if any(v.passed is False for v in verdicts):
        return EXIT_FAILURE
    if errors:
        return errors[0].exit_code
    return EXIT_FAILURE if any(v.passed is None for v in verdicts) else EXIT_OK


class _Progress:
    """Lines on standard error: the running stage on a terminal, one line per verdict everywhere."""

    def __init__(self, count: int) -> None:
        self.count, self.done, self.began = count, 0, time.monotonic()
        self.live = sys.stderr.isatty()
        self.colour = self.live and not os.environ.get("NO_COLOR")

    def event(self, artifact_id: str, event: Any) -> None:
        if self.live and event.get("event") == "stage":
            left = ""
            if self.done:
                each = (time.monotonic() - self.began) / self.done
                left = f", about {each * (self.count - self.done):.0f} s left"
            click.echo(
                f"\r\x1b[K{self.done + 1}/{self.count} {artifact_id}: {event['name']}{left}",
                nl=False,
                err=True,
            )

    def _line(self, text: str) -> None:
        click.echo(("\r\x1b[K" if self.live else "") + text, err=True)
        self.done += 1

    def verdict(self, found: Any) -> None:
        colour, word = MARKS[found.state]
        mark = click.style(word, fg=colour) if self.colour else word
        again = "" if found.recorded or found.passed is None else " (recorded before)"
        self._line(f"{mark} {found.artifact_id} {found.seconds:.1f} s{again}")
        if found.reason:
            click.echo(f"  {found.reason}", err=True)
        if found.case:
            click.echo(f"  esper-gauntlet replay {found.case[:16]}", err=True)

    def error(self, error: EsperError) -> None:
        self._line(error.render())


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
        for stage in verdict.report["stages"]:
            click.echo(
                f"  {stage['outcome']:8} {stage['name']:12} {stage['seconds']:8.2f} s  {stage['reason']}"
            )
            for key, value in sorted(stage["metrics"].items()):
                click.echo(f"           {key} = {value}")
            if stage["case"]:
                click.echo(f"           esper-gauntlet replay {stage['case'][:16]}")


@main.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@library_option
@json_option
def annotate(ids: tuple[str, ...], library: str | None, as_json: bool) -> None:
    """Sign tags over artifacts that were validated (without ID: all of them), from what their verdicts
    measured. The newest annotation counts; each is an entry of the ledger."""
    from gauntlet.runner import annotate as run
    from library.store import Library

    with named(as_json), Library.open(library, create=False, roles=("validator",)) as opened:
        chosen = ids or [r.id for r in opened.artifacts(state="VALIDATED")]
        said = {opened.resolve(name).id: run(name, opened) for name in chosen}
    if as_json:
        emit({"annotations": said})
        return
    for artifact_id, found in said.items():
        click.echo(f"{artifact_id}  {' '.join(found['generated_tags'])}")


@main.command()
@click.option("--rules", is_flag=True, help="The rules behind the tags instead.")
@library_option
@json_option
def tags(rules: bool, library: str | None, as_json: bool) -> None:
    """The tags of every validated artifact, as they were signed."""
    from gauntlet.tags import RULES
    from library.store import Library

    if rules:
        found: dict[str, Any] = {rule.tag: rule.text for rule in RULES}
    else:
        with named(as_json), Library.open(library, create=False, readonly=True) as opened:
            known = [r.id for r in opened.artifacts(state="VALIDATED")]
            found = {a: " ".join(opened.annotation(a).get("generated_tags", ())) or "-" for a in known}
    if as_json:
        emit({"rules" if rules else "tags": found})
        return
    for name, text in found.items():
        click.echo(f"{name:20} {text}")


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
