"""Refusals of the deciding half: code, exit code, title. docs/errors.d/controller.md has one entry for
each."""

from __future__ import annotations

from collections.abc import Mapping

from esper_ir.diagnostics import (
    EXIT_BACKEND,
    EXIT_CONFLICT,
    EXIT_FAILURE,
    EXIT_NOT_FOUND,
    EXIT_USAGE,
    Refusals,
)

CODES: Mapping[str, tuple[int, str]] = {
    "E1030": (EXIT_USAGE, "configuration refused"),
    "E1031": (EXIT_USAGE, "validation gave something else than losses"),
    "E1032": (EXIT_USAGE, "schedule or journal to replay cannot be used"),
    "E1033": (EXIT_CONFLICT, "state of another controller"),
    "E1034": (EXIT_NOT_FOUND, "no run here"),
    "E1035": (EXIT_BACKEND, "optional package missing"),
    "E1036": (EXIT_FAILURE, "a callback was given what it cannot use"),
}

fail = Refusals(CODES)
