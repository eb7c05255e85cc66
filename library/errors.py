"""Every refusal of the library: code, exit code, title. docs/errors.d/library.md has one entry for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esper_ir.diagnostics import (
    EXIT_BACKEND,
    EXIT_CONFLICT,
    EXIT_INTEGRITY,
    EXIT_LIMIT,
    EXIT_NOT_FOUND,
    EXIT_REVOKED,
    EXIT_UNTRUSTED,
    EXIT_USAGE,
    EsperError,
)

CODES: Mapping[str, tuple[int, str]] = {
    "E0701": (EXIT_NOT_FOUND, "no library at this place"),
    "E0702": (EXIT_BACKEND, "library not writable"),
    "E0703": (EXIT_LIMIT, "no space left"),
    "E0704": (EXIT_UNTRUSTED, "unsafe directory or file"),
    "E0705": (EXIT_BACKEND, "network file system"),
    "E0706": (EXIT_BACKEND, "format not known to this version"),
    "E0707": (EXIT_BACKEND, "SQLite version with a known corruption bug"),
    "E0708": (EXIT_LIMIT, "library locked"),
    "E0709": (EXIT_INTEGRITY, "database damaged"),
    "E0710": (EXIT_BACKEND, "input or output error"),
    "E0711": (EXIT_BACKEND, "handle used after fork or close"),
    "E0712": (EXIT_BACKEND, "library opened read-only"),
    "E0720": (EXIT_USAGE, "malformed identifier or argument"),
    "E0721": (EXIT_NOT_FOUND, "not found"),
    "E0722": (EXIT_CONFLICT, "ambiguous"),
    "E0723": (EXIT_CONFLICT, "same id, other content"),
    "E0724": (EXIT_CONFLICT, "illegal transition"),
    "E0725": (EXIT_CONFLICT, "verdict is final"),
    "E0726": (EXIT_CONFLICT, "lease lost or held by another"),
    "E0730": (EXIT_INTEGRITY, "content does not match its digest"),
    "E0731": (EXIT_INTEGRITY, "bytes unavailable"),
    "E0732": (EXIT_INTEGRITY, "container malformed"),
    "E0733": (EXIT_INTEGRITY, "manifest malformed"),
    "E0734": (EXIT_INTEGRITY, "JSON refused"),
    "E0735": (EXIT_LIMIT, "too large"),
    "E0740": (EXIT_UNTRUSTED, "not validated"),
    "E0741": (EXIT_UNTRUSTED, "rejected by the gauntlet"),
    "E0742": (EXIT_REVOKED, "revoked"),
    "E0743": (EXIT_REVOKED, "archived"),
    "E0744": (EXIT_UNTRUSTED, "signature not by a trusted key"),
    "E0745": (EXIT_UNTRUSTED, "signed envelope malformed"),
    "E0746": (EXIT_UNTRUSTED, "signed statement is about something else"),
    "E0747": (EXIT_UNTRUSTED, "key missing or unknown"),
    "E0748": (EXIT_UNTRUSTED, "no trust store"),
    "E0749": (EXIT_REVOKED, "trust store expired"),
    "E0750": (EXIT_UNTRUSTED, "trust store rolled back"),
    "E0751": (EXIT_UNTRUSTED, "trust store without enough root signatures"),
    "E0752": (EXIT_UNTRUSTED, "role not open to this process"),
    "E0753": (EXIT_UNTRUSTED, "unsafe key file"),
    "E0754": (EXIT_UNTRUSTED, "passphrase missing or wrong"),
    "E0755": (EXIT_REVOKED, "key revoked"),
    "E0760": (EXIT_INTEGRITY, "ledger entry damaged"),
    "E0761": (EXIT_INTEGRITY, "ledger truncated, rolled back or forked"),
    "E0762": (EXIT_INTEGRITY, "checkpoint does not match the ledger"),
    "E0763": (EXIT_INTEGRITY, "row disagrees with the ledger"),
    "E0781": (EXIT_BACKEND, "built for another machine"),
    "E0782": (EXIT_BACKEND, "driver too old"),
    "E0783": (EXIT_BACKEND, "extern library of another version"),
    "E0770": (EXIT_INTEGRITY, "bundle malformed"),
}


def fail(
    code: str,
    message: str,
    *,
    node: str | None = None,
    hint: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> EsperError:
    """The error for `code`, with the exit code of the table. The caller raises it."""
    return EsperError(code, message, node=node, hint=hint, exit_code=CODES[code][0], details=details)
