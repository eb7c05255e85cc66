"""torch's operators in terms of ours: what each call of theirs is in a blueprint.

Keys are "name" or "name.variant" of torch's operator records. A rule has the signature of the torch function,
after the builder; `Excluded` says why a form of a call has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from esper_ir.builder import Builder

Rule = Callable[..., Any]


class SampleBuilder(Builder):
    """A builder whose `op` gives all outputs of an operator that has several."""

    def op(self, op: str, *operands: Any, name: str | None = None, **attrs: Any) -> Any:
        made = self.many(op, *operands, name=name, **attrs)
        return made[0] if len(made) == 1 else made


class Excluded(Exception):
    """This form of the call has no counterpart; the message is the reason."""


def flat(rule: Rule) -> Rule:
    """torch takes a number as a vector of one element where an axis is asked for."""

    def wrapped(b: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.type.rank:
            return rule(b, x, *args, **kwargs)
        others = [b.op("unsqueeze", a, dim=0) if _is_number(a) else a for a in args]
        made = rule(b, b.op("unsqueeze", x, dim=0), *others, **kwargs)
        many = isinstance(made, tuple)
        out = tuple(b.op("reshape", v, shape=[]) for v in (made if many else (made,)))
        return out if many else out[0]

    return wrapped


def _is_number(value: Any) -> bool:
    return hasattr(value, "type") and not value.type.rank


def plain(name: str, **attrs: Any) -> Rule:
    """The operator of that name on the operands as they are."""
    return lambda b, *operands: b.op(name, *operands, **attrs)


def listed(value: Any, rank: int = 0) -> tuple[int, ...]:
    """A number or several as a tuple."""
    found = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return found * rank if rank and len(found) == 1 else found


def merged(*tables: Mapping[str, Rule]) -> dict[str, Rule]:
    """All rules; a name with two rules is refused."""
    out: dict[str, Rule] = {}
    for table in tables:
        twice = set(out) & set(table)
        assert not twice, twice
        out.update(table)
    return out
