"""What the commands of `esper-library` share: errors to exit codes, one JSON document, plain tables."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import click

from esper_ir.diagnostics import EXIT_INTERRUPTED, EsperError, printable
from library.paths import os_error
from library.store import Library

F = TypeVar("F", bound=Callable[..., Any])


class Interruptible(click.Group):
    """A group whose commands end with 130 when they are interrupted, whatever they were at; click's own would
    say "Aborted!" and end with 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted; what was finished is stored", err=True)
            ctx.exit(EXIT_INTERRUPTED)


class Tool(Interruptible):
    """A group whose commands end in the exit code of their refusal."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """As click's, but an EsperError becomes its text on stderr and its exit code."""
        given = args[0] if args else extra.get("args")
        arguments = list(given) if given is not None else sys.argv[1:]
        try:
            return super().main(*args, **extra)
        except EsperError as error:
            refused(error, "--json" in arguments)
        except OSError as error:  # a file named on the command line, or a disk that fails under us
            refused(os_error(error, "cannot use", error.filename or "a file"), "--json" in arguments)


def refused(error: EsperError, as_json: bool) -> NoReturn:
    """Say why, as text and where asked as the document, and end with the refusal's exit code."""
    if as_json:
        emit("error", {"error": error.to_json()})
    click.echo(error.render(), err=True)
    sys.exit(error.exit_code)


def as_json(function: F) -> F:
    """The `--json` option, the same everywhere."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(function)


def emit(name: str, document: dict[str, Any]) -> None:
    """The one document on stdout."""
    click.echo(json.dumps({"schema": f"esper-library/{name}/1", **document}, indent=2, sort_keys=True))


def reading(context: click.Context) -> Library:
    """The library for a command that changes nothing."""
    return Library.open(context.obj, readonly=True)


def writing(context: click.Context, *roles: str) -> Library:
    """The library for a command that changes something, with only the keys it needs."""
    return Library.open(context.obj, create=False, roles=roles)


def table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """Aligned columns on stdout, plain enough to pipe."""
    cells = [tuple(head), *(tuple(_cell(c) for c in line) for line in lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    for line in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    return printable(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def say(text: str) -> None:
    """A line on stdout in which nothing steers the terminal."""
    click.echo(printable(text))


def when(seconds: float) -> str:
    """UTC, to the second."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s"  # no such date
