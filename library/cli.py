"""`esper-library`: thin commands over library.store. `--json` prints one document on stdout, all else goes to
stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from esper_ir.diagnostics import EXIT_INTERRUPTED, EsperError
from library.audit import verify_library
from library.keys import ROLES, key_path, new_key
from library.paths import trust_home
from library.records import ArtifactRecord
from library.store import Library
from library.trust import Role, TrustStore

F = TypeVar("F", bound=Callable[..., Any])


class Tool(click.Group):
    """A group whose commands end in the exit code of their refusal."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """As click's, but an EsperError becomes its text on stderr and its exit code, an interruption 130."""
        given = args[0] if args else extra.get("args")
        arguments = list(given) if given is not None else sys.argv[1:]
        try:
            return super().main(*args, **extra)
        except EsperError as error:
            if "--json" in arguments:
                emit({"schema": "esper-library/error/1", "error": error.to_json()})
            click.echo(error.render(), err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)


@click.group(cls=Tool, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--library", "path", type=click.Path(path_type=Path), help="Directory of the library [ESPER_LIBRARY]."
)
@click.pass_context
def main(context: click.Context, path: Path | None) -> None:
    """Blueprints, artifacts and verdicts: what is stored, whether it is sound, and who is trusted."""
    context.obj = path


def as_json(function: F) -> F:
    """The `--json` option, the same everywhere."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(function)


def emit(document: dict[str, Any]) -> None:
    """The one document on stdout."""
    click.echo(json.dumps(document, indent=2, sort_keys=True))


def reading(context: click.Context) -> Library:
    """The library for a command that changes nothing."""
    return Library.open(context.obj, readonly=True)


def writing(context: click.Context, *roles: str) -> Library:
    """The library for a command that changes something, with only the keys it needs."""
    return Library.open(context.obj, create=False, roles=roles)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Aligned columns on stdout, plain enough to pipe."""
    all_lines = [tuple(head), *(tuple(str(c) for c in line) for line in lines)]
    widths = [max(len(line[i]) for line in all_lines) for i in range(len(head))]
    for line in all_lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def when(seconds: float) -> str:
    """UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


@main.command("ls")
@click.option("--state", help="Only artifacts in this state.")
@click.option("--blueprint", help="Only artifacts of this blueprint (id or prefix).")
@click.option("--blueprints", is_flag=True, help="List blueprints instead.")
@as_json
@click.pass_context
def list_command(
    context: click.Context, state: str | None, blueprint: str | None, blueprints: bool, as_json: bool
) -> None:
    """List artifacts, or blueprints."""
    with reading(context) as lib:
        if blueprints:
            found = [record.__dict__ for record in lib.blueprints()]
        else:
            of = lib.blueprint(blueprint).id if blueprint else None
            found = [record.to_json() for record in lib.artifacts(of, state.upper() if state else None)]
    if as_json:
        emit({"schema": "esper-library/ls/1", "blueprints" if blueprints else "artifacts": found})
    elif blueprints:
        table(("BLUEPRINT", "NAME", "STATE"), [(r["id"], r["name"], r["state"]) for r in found])
    else:
        rows = [(r["id"], r["name"], r["state"], f"{r['size']}", when(r["created"])) for r in found]
        table(("ARTIFACT", "NAME", "STATE", "BYTES", "STORED"), rows)


@main.command("show")
@click.argument("artifact")
@as_json
@click.pass_context
def show_command(context: click.Context, artifact: str, as_json: bool) -> None:
    """Everything known about one artifact: ARTIFACT is an id, a unique prefix or a blueprint id."""
    with reading(context) as lib:
        record = lib.resolve(artifact)
        document = described(lib, record)
    if as_json:
        emit({"schema": "esper-library/show/1", **document})
        return
    for key, value in record.to_json().items():
        if value != "":
            click.echo(f"{key:15} {when(value) if key == 'created' else value}")
    for file in document["side_files"]:
        click.echo(f"{'beside':15} {file['name']} ({file['size']} bytes)")
    verdict = document["verdict"]
    if verdict:
        click.echo(
            f"{'verdict':15} {verdict['result']} at {when(verdict['time'])} by key {verdict['keyid'][:16]}"
        )


def described(lib: Library, record: ArtifactRecord) -> dict[str, Any]:
    """An artifact with what belongs to it, as data."""
    verdict = lib.verdict(record.id)
    return {
        "artifact": record.to_json(),
        "side_files": [file.__dict__ for file in lib.side_files(record.id)],
        "verdict": verdict.to_json() if verdict else None,
    }


@main.command("verify")
@click.argument("artifacts", nargs=-1)
@click.option("--contents", is_flag=True, help="Read and hash every object, not only look for it.")
@as_json
@click.pass_context
def verify_command(context: click.Context, artifacts: tuple[str, ...], contents: bool, as_json: bool) -> None:
    """Check artifacts (all without an argument): corrupt, untrusted and unavailable are reported apart."""
    with reading(context) as lib:
        wanted = [lib.resolve(a) for a in artifacts] or lib.artifacts()
        report = verify_library(lib, wanted, contents=contents or bool(artifacts))
    if as_json:
        emit({"schema": "esper-library/verify/1", **report.to_json()})
    else:
        click.echo(f"checked {report.checked} artifacts: {report.summary()}")
        for finding in report.findings:
            click.echo(f"  {finding.kind:11} {finding.code} {finding.subject}: {finding.message}")
    sys.exit(report.exit_code())


@main.group("keys")
def keys_group() -> None:
    """Keys of this user: one directory per role."""


@keys_group.command("list")
@as_json
def keys_list(as_json: bool) -> None:
    """Keys that the trust store lists, and whether the private half is here."""
    store = TrustStore(trust_home())
    document = store.document()
    found = [
        {
            "role": role,
            "keyid": keyid,
            "private": key_path(store.home, role, keyid).exists(),
            "revoked_from": document.revoked_keys.get(keyid),
        }
        for role in ROLES
        for keyid in document.roles[role].keyids
    ]
    if as_json:
        emit({"schema": "esper-library/keys/1", "version": document.version, "keys": found})
        return
    lines = [
        (k["role"], k["keyid"], "here" if k["private"] else "-", _revoked(k["revoked_from"])) for k in found
    ]
    table(("ROLE", "KEY", "PRIVATE", "REVOKED"), lines)


def _revoked(sequence: int | None) -> str:
    return "-" if sequence is None else f"from ledger entry {sequence}"


@keys_group.command("new")
@click.argument("role", type=click.Choice(ROLES))
@as_json
def keys_new(role: str, as_json: bool) -> None:
    """Add a key to ROLE, signed into the trust store by the local root key. The newest one signs."""
    _report_key(add_key(TrustStore(trust_home()), role), role, as_json)


def add_key(store: TrustStore, role: str) -> str:
    """A new key in the role; its id."""
    store.bootstrap()
    current = store.document_or_expired()
    keyid, raw = new_key(store.home, role)
    listed = current.roles[role]
    roles = {**current.roles, role: Role((*listed.keyids, keyid), listed.threshold)}
    store.amend(keys={**current.keys, keyid: raw}, roles=roles)
    return keyid


def _report_key(keyid: str, role: str, as_json: bool) -> None:
    if as_json:
        emit({"schema": "esper-library/key/1", "role": role, "keyid": keyid})
    else:
        click.echo(f"{role} {keyid}")


if __name__ == "__main__":
    main()
