"""Commands that keep a library in shape: curate, archive, restore, supersede, revoke, export, import, gc."""

from __future__ import annotations

from pathlib import Path

import click

from esper_ir.diagnostics import EsperError
from library import curate
from library.bundle import export_bundle, import_bundle, read_file
from library.cli_base import as_json, emit, reading, say, table, writing
from library.gc import GRACE_S
from library.hub import export_kernel
from library.keys import key_path
from library.outcomes import take_spool
from library.paths import refuse_inside
from library.records import VALIDATED
from library.rotation import bar_artifact
from library.store import Library
from library.trust import replace_file


def register(main: click.Group) -> None:
    """Add these commands to the tool."""
    for command in (
        curate_command,
        archive_command,
        restore_command,
        supersede_command,
        revoke_command,
        export_command,
        import_command,
        gc_command,
    ):
        main.add_command(command)


@click.command("curate")
@click.option("--keep-mb", type=float, help="Archive the least worth until the rest fits so many MB.")
@click.option("--min-age-days", default=30.0, show_default=True, help="Leave younger artifacts alone.")
@click.option(
    "--apply",
    "place",
    type=click.Path(path_type=Path),
    help="Do it, into this bundle; without it nothing changes.",
)
@as_json
@click.pass_context
def curate_command(
    context: click.Context, keep_mb: float | None, min_age_days: float, place: Path | None, as_json: bool
) -> None:
    """What retention would archive, and how varied the library is; a dry run unless --apply is given."""
    with writing(context, "compiler") if place else reading(context) as lib:
        keep = int(keep_mb * 1e6) if keep_mb is not None else 1 << 62
        plans = curate.plan(lib, keep_bytes=keep, min_age_days=min_age_days)
        varied = curate.diversity(lib)
        if place is not None and plans:
            lib.archive([p.artifact_id for p in plans], place, "curation")
    if as_json:
        done = place is not None
        emit("curate", {"plans": [p.__dict__ for p in plans], "diversity": varied.to_json(), "applied": done})
        return
    table(
        ("ARTIFACT", "WORTH", "BYTES", "WHY"),
        [(p.artifact_id, f"{p.worth:.3g}", p.bytes, p.reason) for p in plans],
    )
    say(f"{varied.artifacts} validated artifacts of {varied.blueprints} blueprints")
    for name, bits in varied.entropy_bits.items():
        say(f"  {name:10} {varied.kinds[name]} kinds, {bits:.2f} bits")


@click.command("archive")
@click.argument("artifacts", nargs=-1, required=True)
@click.option("--to", "place", required=True, type=click.Path(path_type=Path), help="Bundle to write.")
@click.option("--reason", default="", help="Kept in the ledger.")
@as_json
@click.pass_context
def archive_command(
    context: click.Context, artifacts: tuple[str, ...], place: Path, reason: str, as_json: bool
) -> None:
    """Move artifacts out into a bundle; their history stays, they no longer load."""
    with writing(context, "compiler") as lib:
        ids = [lib.resolve(a).id for a in artifacts]
        size = lib.archive(ids, place, reason)
    _told(as_json, "archive", {"artifacts": ids, "bundle": str(place), "bytes": size})


@click.command("restore")
@click.argument("place", type=click.Path(path_type=Path))
@as_json
@click.pass_context
def restore_command(context: click.Context, place: Path, as_json: bool) -> None:
    """Bring archived artifacts back from the bundle PLACE, verified like any import."""
    with writing(context, "compiler") as lib:
        ids = lib.restore(place)
    _told(as_json, "restore", {"artifacts": ids})


@click.command("supersede")
@click.argument("artifact")
@click.argument("by")
@click.option("--reason", default="", help="Kept in the ledger.")
@as_json
@click.pass_context
def supersede_command(context: click.Context, artifact: str, by: str, reason: str, as_json: bool) -> None:
    """Put the better artifact BY in ARTIFACT's place; the old one still loads by its exact id."""
    with writing(context, "compiler") as lib:
        record = lib.supersede(lib.resolve(artifact).id, lib.resolve(by).id, reason)
    _told(as_json, "supersede", {"artifact": record.id, "by": record.superseded_by})


@click.command("revoke")
@click.argument("artifact")
@click.option("--reason", required=True, help="Kept in the ledger and told to whoever loads it.")
@as_json
@click.pass_context
def revoke_command(context: click.Context, artifact: str, reason: str, as_json: bool) -> None:
    """Never load ARTIFACT again, here and (with the root key) under this trust store anywhere. Final."""
    with writing(context, "compiler") as lib:
        record = lib.revoke(lib.resolve(artifact).id, reason)
        root = lib.trust.document_or_expired().roles["root"].keyids
        barred = any(key_path(lib.trust.home, "root", keyid).exists() for keyid in root)
        if barred:
            bar_artifact(lib.trust, record.digest)
    _told(as_json, "revoke", {"artifact": record.id, "digest": record.digest, "in_trust_store": barred})


@click.command("export")
@click.argument("place", type=click.Path(path_type=Path))
@click.argument("artifacts", nargs=-1)
@click.option("--measurements", is_flag=True, help="Write the tuner's timings as JSON lines instead.")
@click.option(
    "--hf-kernel", is_flag=True, help="Write the one artifact as a Hugging Face kernel repository in PLACE."
)
@as_json
@click.pass_context
def export_command(
    context: click.Context,
    place: Path,
    artifacts: tuple[str, ...],
    measurements: bool,
    hf_kernel: bool,
    as_json: bool,
) -> None:
    """Write ARTIFACTS (all validated ones without an argument) with signatures and proofs into the bundle
    PLACE."""
    with _exporting(context) as lib:
        if measurements:
            refuse_inside(place, lib.home, lib.trust.home)
            data = lib.timings().to_lines()
            replace_file(place, data)
            _told(as_json, "export", {"measurements": data.count(b"\n"), "file": str(place)})
            return
        if hf_kernel:
            if len(artifacts) != 1:
                raise click.UsageError("--hf-kernel takes one artifact")
            record = lib.resolve(artifacts[0])
            variant = export_kernel(lib, record, place)
            _told(as_json, "export", {"artifacts": [record.id], "variant": str(variant)})
            return
        records = [lib.resolve(a) for a in artifacts] or lib.artifacts(state=VALIDATED)
        size = export_bundle(lib, records, place)
    _told(as_json, "export", {"artifacts": [r.id for r in records], "bundle": str(place), "bytes": size})


def _exporting(context: click.Context) -> Library:
    """Writable, so that the ledger's head can be signed for the proofs; else as it is."""
    try:
        return writing(context, "compiler")
    except EsperError as error:
        if error.code != "E0702":
            raise
        return reading(context)


@click.command("import")
@click.argument("places", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--spool", "spools", multiple=True, type=click.Path(path_type=Path), help="Take in a runtime's spool."
)
@click.option(
    "--measurements",
    "timings",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Take in exported timings.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, take nothing.")
@as_json
@click.pass_context
def import_command(
    context: click.Context,
    places: tuple[Path, ...],
    spools: tuple[Path, ...],
    timings: tuple[Path, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Verify the bundles PLACES whole, then take them in; with --spool also outcomes of training runs."""
    with writing(context, "compiler") as lib:
        ids = [i for place in places for i in import_bundle(lib, read_file(place), dry_run=dry_run)]
        counts = [take_spool(lib, spool) for spool in spools if not dry_run]
        timed = sum(lib.timings().take_lines(read_file(t)) for t in timings if not dry_run)
    told: dict[str, object] = {"artifacts": ids, "measurements": timed}
    told |= {"outcomes": sum(n for n, _ in counts), "strange_lines": sum(n for _, n in counts)}
    _told(as_json, "import", told)


@click.command("gc")
@click.option("--apply", "go", is_flag=True, help="Do it; without it nothing changes.")
@click.option("--grace", default=GRACE_S, show_default=True, help="Seconds an object must have been marked.")
@as_json
@click.pass_context
def gc_command(context: click.Context, go: bool, grace: float, as_json: bool) -> None:
    """Remove bytes that no row names: marked now, removed after the grace period. Works on a full disk."""
    with writing(context, "compiler") as lib:
        report = lib.collect(grace_s=grace, dry_run=not go)
    _told(as_json, "gc", report.to_json())


def _told(as_json: bool, name: str, facts: dict[str, object]) -> None:
    if as_json:
        emit(name, facts)
        return
    for key, value in facts.items():
        say(f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
