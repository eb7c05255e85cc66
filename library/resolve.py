"""From what a person types to one record, or to a refusal that lists what was meant."""

from __future__ import annotations

import re

from esper_ir.diagnostics import EsperError
from library import rows
from library.errors import fail
from library.index import Index
from library.records import ArtifactRecord, BlueprintRecord

_TEXT = re.compile(r"[a-z0-9][a-z0-9_.-]{3,255}\Z")
_HEX = re.compile(r"[0-9a-f]{4,64}\Z")
_SHOWN = 20


def resolve_artifact(index: Index, text: str) -> ArtifactRecord:
    """Exact id, else unique id prefix, else the one artifact of a blueprint id or prefix.
    E0720, E0721, E0722."""
    _check(text)
    exact = rows.artifact(index, text)
    if exact is not None:
        return exact
    found = rows.artifacts_between(index, text, text + "\x7f", _SHOWN + 1)
    if not found and _HEX.match(text):
        blueprints = rows.blueprints(index, text, text + "g")
        found = [a for b in blueprints for a in rows.artifacts(index, blueprint=b.id, limit=_SHOWN + 1)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise not_found(index, text, "artifact")
    raise _ambiguous(text, "artifacts", [f"{a.id} {a.state}" for a in found], [a.id for a in found])


def resolve_blueprint(index: Index, text: str) -> BlueprintRecord:
    """Exact id or unique prefix of 4 hex digits or more. E0720, E0721, E0722."""
    _check(text)
    found = rows.blueprints(index, text, text + "g") if _HEX.match(text) else []
    if len(found) == 1:
        return found[0]
    if not found:
        raise not_found(index, text, "blueprint")
    raise _ambiguous(text, "blueprints", [f"{b.id} {b.name}" for b in found], [b.id for b in found])


def not_found(index: Index, text: str, what: str) -> EsperError:
    """E0721 with the ids that come closest."""
    near = (
        nearest(index, text)
        if what == "artifact"
        else [b.id for b in rows.blueprints(index, text[:1], text[:1] + "g")]
    )
    listed = ", ".join(near[:4])
    hint = f"nearest: {listed}" if listed else "`esper-library ls` lists what there is"
    named = [b.id[:12] for b in rows.blueprints(index) if b.name == text]
    if named:
        near, hint = named, f"that is a name; the id of its blueprint: {', '.join(named[:4])}"
    details = {"nearest": near[:4]}
    return fail("E0721", f"no {what} {text!r} in {index.home}", node=text, hint=hint, details=details)


def nearest(index: Index, text: str) -> list[str]:
    """Ids around `text` in order, those that share the longest prefix first."""
    return sorted(rows.neighbours(index, text), key=lambda other: (-_shared(text, other), other))


def _shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _ambiguous(text: str, what: str, lines: list[str], ids: list[str]) -> EsperError:
    more = "\n    ..." if len(lines) > _SHOWN else ""
    listed = "\n    ".join(lines[:_SHOWN])
    return fail(
        "E0722",
        f"{text!r} names {len(lines) if not more else f'more than {_SHOWN}'} {what}:\n    {listed}{more}",
        node=text,
        hint="give a longer prefix or the whole id",
        details={"candidates": ids[:_SHOWN]},
    )


def _check(text: str) -> None:
    if not isinstance(text, str):
        raise fail("E0720", f"{text!r} is not an id: it must be a text")
    if not _TEXT.match(text):
        raise fail("E0720", f"{text[:80]!r} is not an id: 4 or more of a-z 0-9 . _ -", node=text[:80])
