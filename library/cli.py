"""`esper-library`: looking at a library. Thin commands; `--json` prints one document on stdout, all else
stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from library import cli_keep, cli_trust, history, jobs, lineage, seen
from library.audit import verify_blueprints, verify_library
from library.bundle import read_bundle, read_file
from library.cli_base import Tool, as_json, emit, reading, say, table, when, writing
from library.contracts import KernelQuery
from library.doctor import examine
from library.errors import fail
from library.paths import writes_to
from library.records import ARTIFACT_MOVES, ArtifactRecord
from library.repair import repair
from library.store import Library


@click.group(cls=Tool, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="esper-forge")
@click.option(
    "--library", "path", type=click.Path(path_type=Path), help="Directory of the library [ESPER_LIBRARY]."
)
@click.pass_context
def main(context: click.Context, path: Path | None) -> None:
    """Blueprints, artifacts and verdicts: what is stored, whether it is sound, and who is trusted."""
    context.obj = path


@main.command("ls")
@click.option("--state", help="Only artifacts in this state.")
@click.option("--blueprint", help="Only artifacts of this blueprint (id or prefix).")
@click.option("--blueprints", is_flag=True, help="List blueprints instead.")
@click.option("--jobs", "list_jobs", is_flag=True, help="List jobs instead.")
@click.option("--limit", default=1000, show_default=True, help="At most so many; 0 for all.")
@as_json
@click.pass_context
def list_command(
    context: click.Context,
    state: str | None,
    blueprint: str | None,
    blueprints: bool,
    list_jobs: bool,
    limit: int,
    as_json: bool,
) -> None:
    """List artifacts, blueprints or jobs."""
    wanted = state.upper() if state else None
    states = _JOB_STATES if list_jobs else ARTIFACT_MOVES
    if wanted is not None and wanted not in states:
        raise fail("E0720", f"state {state!r} is not one of {', '.join(states)}")
    with reading(context) as lib:
        if list_jobs:
            what, found = "jobs", [dict(job.__dict__) for job in jobs.listed(lib, wanted)]
        elif blueprints:
            what, found = "blueprints", [dict(record.__dict__) for record in lib.blueprints()]
        else:
            of = lib.blueprint(blueprint).id if blueprint else None
            what, found = (
                "artifacts",
                [record.to_json() for record in lib.artifacts(of, wanted, limit or None)],
            )
    if as_json:
        emit("ls", {what: found})
        return
    columns = _COLUMNS[what]
    table([c.upper() for c in columns], [[_cell(row, c) for c in columns] for row in found])


_JOB_STATES = (jobs.QUEUED, jobs.RUNNING, jobs.DONE, jobs.DEAD)
_COLUMNS = {
    "artifacts": ("id", "name", "state", "size", "created"),
    "blueprints": ("id", "name", "state", "created"),
    "jobs": ("num", "kind", "subject", "state", "attempt", "owner"),
}


def _cell(row: dict[str, Any], column: str) -> str:
    return when(row[column]) if column == "created" else str(row[column])


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
        emit("show", document)
        return
    for key, value in record.to_json().items():
        if value != "":
            say(f"{key:15} {when(value) if key == 'created' else value}")
    for file in document["side_files"]:
        say(f"{'beside':15} {file['name']} ({file['size']} bytes)")
    verdict = document["verdict"]
    if verdict:
        say(f"{'verdict':15} {verdict['result']} at {when(verdict['time'])} by key {verdict['keyid'][:16]}")
    for key, value in document["annotation"].items():
        say(f"{key:15} {value}")


def described(lib: Library, record: ArtifactRecord) -> dict[str, Any]:
    """An artifact with what belongs to it, as data."""
    verdict = lib.verdict(record.id)
    return {
        "artifact": record.to_json(),
        "side_files": [file.__dict__ for file in lib.side_files(record.id)],
        "verdict": verdict.to_json() if verdict else None,
        "annotation": lib.annotation(record.id),
        "outcomes": len(lib.outcomes(record.id)),
    }


@main.command("query")
@click.option("--blueprint", help="Only artifacts of this blueprint (id or prefix).")
@click.option("--require", multiple=True, help="A tag that must be there; repeatable.")
@click.option("--prefer", multiple=True, help="A tag that ranks higher; repeatable.")
@click.option("--exclude", multiple=True, help="A tag that must not be there; repeatable.")
@click.option("--max-latency-ms", type=float, help="Bound of the p99 of forward and backward.")
@click.option("--max-memory-mb", type=float, help="Bound of the peak memory.")
@click.option("--max-risk", type=float, help="Bound of the risk score.")
@click.option("--arch", help="Architecture (sm_90) or target (h100).")
@click.option("--shape", help="Measured shape that the latency bound is about.")
@click.option("--limit", default=10, show_default=True, help="At most so many answers.")
@click.option("--explain", is_flag=True, help="Also why the others were not chosen.")
@as_json
@click.pass_context
def query_command(context: click.Context, as_json: bool, explain: bool, **options: Any) -> None:
    """Find validated artifacts by tags and bounds, best first."""
    with reading(context) as lib:
        blueprint = lib.blueprint(options["blueprint"]).id if options["blueprint"] else None
        wanted = KernelQuery(
            blueprint_id=blueprint,
            required_tags=options["require"],
            preferred_tags=options["prefer"],
            excluded_tags=options["exclude"],
            max_latency_ms=options["max_latency_ms"],
            max_memory_mb=options["max_memory_mb"],
            max_risk=options["max_risk"],
            target_gpu_arch=options["arch"],
            shape=options["shape"],
            limit=options["limit"],
        )
        result = lib.find(wanted, explain=explain)
    if as_json:
        refused = [r.__dict__ for r in result.refused]
        matches = [m.__dict__ for m in result.matches]
        emit("query", {"matches": matches, "refused": refused, "reasons": dict(result.reasons)})
        return
    lines = [
        (m.artifact_id, _known(m.latency_ms), _known(m.memory_mb), _known(m.risk), " ".join(m.tags))
        for m in result.matches
    ]
    table(("ARTIFACT", "P99 MS", "MB", "RISK", "TAGS"), lines)
    for refusal in result.refused:
        say(f"  not {refusal.artifact_id}: {refusal.reason}")


def _known(value: float | None) -> str:
    return "unmeasured" if value is None else f"{value:.4g}"


@main.command("lineage")
@click.argument("blueprint")
@click.option("--up", is_flag=True, help="Ancestors instead of the tree of descendants.")
@click.option("--svg", type=click.Path(path_type=Path), help="Also write a picture.")
@as_json
@click.pass_context
def lineage_command(
    context: click.Context, blueprint: str, up: bool, svg: Path | None, as_json: bool
) -> None:
    """Where a blueprint comes from and what came of it."""
    with reading(context) as lib:
        start = lib.blueprint(blueprint).id
        edges = lineage.ancestors(lib, start) if up else lineage.descendants(lib, start)
        lines = [] if up else lineage.tree_lines(lib, start)
        if svg is not None:
            with writes_to(svg):
                svg.write_text(lineage.picture(lib, start), encoding="utf-8")
    if as_json:
        emit("lineage", {"blueprint": start, "edges": [e.__dict__ for e in edges]})
        return
    for line in lines or [
        f"{e.distance}  {e.parent[:12]} -> {e.child[:12]}  {e.relation} {e.mutation}" for e in edges
    ]:
        say(line)


@main.command("diff")
@click.argument("one")
@click.argument("two")
@as_json
@click.pass_context
def diff_command(context: click.Context, one: str, two: str, as_json: bool) -> None:
    """What two blueprints differ in."""
    with reading(context) as lib:
        lines = lineage.diff(lib, lib.blueprint(one).id, lib.blueprint(two).id)
    if as_json:
        emit("diff", {"lines": lines})
    else:
        say("\n".join(lines) if lines else "no difference")


@main.command("verify")
@click.argument("artifacts", nargs=-1)
@click.option("--contents", is_flag=True, help="Read and hash every object, not only look for it.")
@click.option("--repair", "mend", is_flag=True, help="Put back what is lost, or file compile jobs.")
@click.option(
    "--from", "bundles", multiple=True, type=click.Path(path_type=Path), help="Bundle to repair from."
)
@as_json
@click.pass_context
def verify_command(
    context: click.Context,
    artifacts: tuple[str, ...],
    contents: bool,
    mend: bool,
    bundles: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Check artifacts (all without an argument): corrupt, untrusted and unavailable are reported apart."""
    done = []
    with writing(context, "compiler") if mend else reading(context) as lib:
        wanted = [lib.resolve(a) for a in artifacts] or lib.artifacts()
        if mend:
            objects = {d: o for place in bundles for d, o in read_bundle(read_file(place))[1].items()}
            done = repair(lib, wanted, objects)
        deeply = contents or mend or bool(artifacts)
        report = verify_library(lib, wanted, contents=deeply)
        if not artifacts:
            told = {(f.code, f.message) for f in report.findings}
            texts = verify_blueprints(lib, contents=deeply)
            report = report.joined([f for f in texts if (f.code, f.message) not in told])
    if as_json:
        emit("verify", {**report.to_json(), "repairs": [r.__dict__ for r in done]})
    else:
        for item in done:
            say(f"{item.artifact_id}: {item.what} {item.action}")
        say(f"checked {report.checked} artifacts: {report.summary()}")
        for finding in report.findings:
            say(f"  {finding.kind:11} {finding.code} {finding.subject}: {finding.message}")
        for hint in report.hints():
            say(f"  hint: {hint}")
    sys.exit(report.exit_code())


@main.command("audit")
@click.option("--sign", is_flag=True, help="Sign a checkpoint over the ledger's present head first.")
@click.option("--prove", type=int, help="Print the inclusion proof of this ledger entry instead.")
@click.option("--grown-from", type=int, help="Print the consistency proof from this size instead.")
@click.option(
    "--accept-rollback", is_flag=True, help="An older copy was put back on purpose: forget the later one."
)
@as_json
@click.pass_context
def audit_command(
    context: click.Context,
    sign: bool,
    prove: int | None,
    grown_from: int | None,
    accept_rollback: bool,
    as_json: bool,
) -> None:
    """Verify the whole ledger against its hashes, signed checkpoints, what was seen before, and the rows."""
    with writing(context, "validator") if sign else reading(context) as lib:
        if sign:
            lib.sign_head(every=0)
        if prove is not None or grown_from is not None:
            proof = (
                history.prove_entry(lib, prove)
                if prove is not None
                else history.prove_growth(lib, grown_from or 0)
            )
            emit("proof", {"origin": lib.origin, **proof})
            return
        if accept_rollback:
            seen.forget(lib.trust.home, lib.origin)
        report = history.audit(lib)
    if as_json:
        emit("audit", report.to_json())
    else:
        signed = f"{report.checkpoints} checkpoints, signed up to entry {report.signed}"
        say(f"{report.entries} entries, {signed}, head {report.root}")
        for finding in report.findings:
            say(f"  {finding.code} {finding.subject}: {finding.message}")
        say("all sound" if not report.findings else f"first bad entry: {report.first_bad or 'none'}")
    sys.exit(11 if report.findings else 0)


@main.command("doctor")
@as_json
@click.pass_context
def doctor_command(context: click.Context, as_json: bool) -> None:
    """What this library and its trust stand on: versions, places, file system, space, expiry."""
    facts, good = examine(context.obj)
    if as_json:
        emit("doctor", {"facts": facts, "ok": good})
    else:
        for key, value in facts.items():
            say(f"{key:18} {value}")
    sys.exit(0 if good else 1)


cli_keep.register(main)
cli_trust.register(main)

if __name__ == "__main__":
    main()
