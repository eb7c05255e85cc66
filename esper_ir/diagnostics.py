"""Errors with a code, the node or file they concern and what to do; refusals of candidates as values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# What steers a terminal or turns the direction of writing; line ends and tabs are left.
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]")

MOST_NAMES = 1000

# Exit codes of every command line tool of the project.
EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 10
EXIT_INTEGRITY = 11
EXIT_UNTRUSTED = 12
EXIT_REVOKED = 13
EXIT_CONFLICT = 14
EXIT_LIMIT = 15
EXIT_BACKEND = 16
EXIT_INTERRUPTED = 130


def printable(text: str) -> str:
    """Text for a terminal: names and reasons come from files of others, and control characters in them are
    shown, not obeyed.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def did_you_mean(name: str, known: Iterable[str], every: str = "") -> str:
    """A hint: the names of `known` that look like `name` (nothing where none does, or where there are too
    many to look through), then what is said in `every` case.
    """
    names = list(islice(known, MOST_NAMES + 1))
    close = difflib.get_close_matches(name[:64], names, n=3) if len(names) <= MOST_NAMES else []
    return f"did you mean {' or '.join(close)}? {every}".rstrip() if close else every


class EsperError(Exception):
    """A refusal with a name.

    `code` is stable ("E0312") and documented in docs/errors.md; `node` is the graph node, file or artifact
    concerned; `hint` says what to do; `exit_code` is what a command line tool exits with.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        node: str | None = None,
        hint: str | None = None,
        exit_code: int = EXIT_FAILURE,
        details: Mapping[str, Any] | None = None,
        diagnostics: Iterable[Diagnostic] = (),
    ) -> None:
        self.code = code
        self.message = message
        self.node = node
        self.hint = hint
        self.exit_code = exit_code
        self.details: dict[str, Any] = dict(details or {})
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        super().__init__(self.render())

    def render(self) -> str:
        """One readable text: code, node, message, every diagnostic (of one with this message what it adds),
        hint.
        """
        where = f" [{self.node}]" if self.node else ""
        lines = [f"{self.code}{where}: {self.message}"]
        alone = len(self.diagnostics) == 1 and self.diagnostics[0].message == self.message
        lines += [d.render(head=not alone) for d in self.diagnostics]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return printable("\n".join(lines))

    def to_json(self) -> dict[str, Any]:
        """The same as data, for `--json`."""
        return {
            "code": self.code,
            "message": self.message,
            "node": self.node,
            "hint": self.hint,
            "exit_code": self.exit_code,
            "details": self.details,
            "diagnostics": [d.to_json() for d in self.diagnostics],
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(kind: type[EsperError], state: dict[str, Any]) -> EsperError:
    error = EsperError.__new__(kind)
    error.__dict__.update(state)
    Exception.__init__(error, error.render())
    return error


@dataclass(frozen=True)
class Diagnostic:
    """One finding of the verifier: `level` is "error" or "warning"; `context` is the printed graph to
    show.
    """

    code: str
    message: str
    node: str | None = None
    level: str = "error"
    context: str = ""
    hint: str | None = None

    def __str__(self) -> str:
        return self.render()

    def render(self, head: bool = True) -> str:
        """Code, node and message (the `head`), the printed graph, the hint."""
        where = f" [{self.node}]" if self.node else ""
        lines = [f"  {self.level} {self.code}{where}: {self.message}"] if head else []
        lines += [f"    {line}" for line in self.context.splitlines()]
        if self.hint:
            lines.append(f"    hint: {self.hint}" if head else f"  hint: {self.hint}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "node": self.node,
            "level": self.level,
            "context": self.context,
            "hint": self.hint,
        }


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not fit, with the reason; never an exception, always kept for `explain`."""

    code: str
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Accepted(Generic[T]):
    """A candidate that fits, with what it yields."""

    value: T


@dataclass(frozen=True)
class Refusals:
    """A package's table of refusals: code to (exit code, title). Calling it makes the error to raise."""

    codes: Mapping[str, tuple[int, str]]

    def __call__(
        self,
        code: str,
        message: str,
        *,
        node: str | None = None,
        hint: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> EsperError:
        """The error for `code`, with the exit code of the table."""
        return EsperError(code, message, node=node, hint=hint, exit_code=self.codes[code][0], details=details)
