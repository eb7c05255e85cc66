"""What the commands of `esper-gauntlet` share: options, documents on standard output, refusals as exits."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import click

from esper_ir.diagnostics import EXIT_INTERRUPTED, EsperError

SCHEMA = "esper-gauntlet/1"

library_option = click.option(
    "--library", metavar="DIR", help="Library to use (default: ESPER_LIBRARY, else the user's)."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
device_option = click.option(
    "--device", metavar="NAME", help="cpu or cuda:N (default: what the artifact is for)."
)


def emit(document: dict[str, Any]) -> None:
    click.echo(json.dumps({"schema": SCHEMA, **document}, indent=2, sort_keys=True))


@contextlib.contextmanager
def named(as_json: bool) -> Iterator[None]:
    """Refusals become a line on standard error (or a document), and the exit code of their code."""
    try:
        yield
    except EsperError as error:
        if as_json:
            emit({"error": error.to_json()})
        else:
            click.echo(error.render(), err=True)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        click.echo("interrupted; nothing was recorded for the artifact being judged", err=True)
        raise SystemExit(EXIT_INTERRUPTED) from None
