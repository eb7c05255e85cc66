"""Every refusal of the growth side: code, exit code, title. docs/errors.d/growth.md has an entry for each."""

from __future__ import annotations

from collections.abc import Mapping

from esper_ir.diagnostics import (
    EXIT_CONFLICT,
    EXIT_FAILURE,
    EXIT_INTEGRITY,
    EXIT_NOT_FOUND,
    EXIT_USAGE,
    Refusals,
)

CODES: Mapping[str, tuple[int, str]] = {
    "E1001": (EXIT_NOT_FOUND, "no module matches the site"),
    "E1002": (EXIT_CONFLICT, "model wrapped already, or not wrapped"),
    "E1003": (EXIT_USAGE, "artifact does not fit the slot"),
    "E1004": (EXIT_CONFLICT, "command not allowed in this state"),
    "E1005": (EXIT_CONFLICT, "gate refused"),
    "E1006": (EXIT_CONFLICT, "checkpoint of another model"),
    "E1007": (EXIT_INTEGRITY, "checkpoint damaged"),
    "E1008": (EXIT_USAGE, "optimizer or scheduler cannot be operated on"),
    "E1009": (EXIT_FAILURE, "a call that the loop must make is missing"),
    "E1010": (EXIT_INTEGRITY, "state tensor and mirror differ"),
    "E1011": (EXIT_INTEGRITY, "journal chain broken"),
    "E1012": (EXIT_CONFLICT, "ranks differ"),
    "E1013": (EXIT_USAGE, "setting of the growth side"),
    "E1014": (EXIT_NOT_FOUND, "no such slot or site"),
    "E1015": (EXIT_USAGE, "chunks do not divide the features"),
    "E1016": (EXIT_FAILURE, "training cannot go on"),
    "E1017": (EXIT_USAGE, "checkpoint of a sharded model"),
}

fail = Refusals(CODES)
