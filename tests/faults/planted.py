"""Faults planted in the hand-made artifacts: class, what is changed, and the stage that has to refuse it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from library.launch import Argument, KernelStep, Plan
from tests.faults import toys
from tests.faults.handmade import Toy, edit


@dataclass(frozen=True)
class Fault:
    """`stages`: where it may be refused first. `subtle`: the error is under ten times the bound. `behind`:
    where it is refused when the stage of integrity, which sees variables that outlive a call, is left out.
    """

    name: str
    kind: str
    stages: tuple[str, ...]
    toy: Toy
    subtle: bool = False
    behind: tuple[str, ...] = ()


TOYS: dict[str, Callable[[], Toy]] = toys.ALL

LISTED = Path(__file__).with_name("planted.txt")


def listed() -> Iterator[tuple[str, str, str, int, str, str]]:
    """(class, toy, stages, occurrence, taken out, put in) of every entry of planted.txt."""
    for block in LISTED.read_text(encoding="utf-8").split("\n== ")[1:]:
        head, old, new = block.rstrip("\n").split("\n")
        kind, toy, stages, number = head.split(" | ")
        yield kind, toy, stages, int(number), old.removeprefix("- "), new.removeprefix("+").removeprefix(" ")


def _edited(toy: Toy, number: int, old: str, new: str) -> Toy:
    """`number`: which occurrence of the text; 0: it has exactly one."""
    if not number:
        return edit(toy, (old, new))
    starts = [m.start() for m in re.finditer(re.escape(old), toy.source)]
    at = starts[number - 1]
    return replace(toy, source=toy.source[:at] + new + toy.source[at + len(old) :])


def _with(toy: Toy, at: int, change: Callable[[Plan], Plan]) -> Toy:
    return replace(toy, plans=tuple(change(p) if i == at else p for i, p in enumerate(toy.plans)))


def _step(plan: Plan, at: int, **changes: object) -> Plan:
    return replace(
        plan, steps=tuple(replace(s, **changes) if i == at else s for i, s in enumerate(plan.steps))
    )


def _argument(plan: Plan, step: int, position: int, value: int | str) -> Plan:
    found = plan.steps[step]
    assert isinstance(found, KernelStep)
    args = list(found.args)
    args[position] = Argument(args[position].kind, value)
    return _step(plan, step, args=tuple(args))


def _plans() -> Iterator[tuple[str, str, str, Toy]]:
    """Faults of the launch manifest instead of the kernels."""
    affine, dense, norm = toys.affine(), toys.dense(), toys.norm()
    floor = (("floordiv", "rows", 16), 1, 1)
    yield "plan: grid too small", "affine", "memory", _with(affine, 1, lambda p: _step(p, 0, grid=floor))
    yield "plan: grid too small", "norm", "memory", _with(norm, 2, lambda p: _step(p, 0, grid=floor))
    yield "plan: step missing", "affine", "memory", _with(affine, 2, lambda p: replace(p, steps=p.steps[:1]))
    yield "plan: step missing", "dense", "memory", _with(dense, 3, lambda p: replace(p, steps=p.steps[1:]))
    yield (
        "plan: buffers swapped",
        "affine",
        "numerics",
        _with(affine, 1, lambda p: _argument(_argument(p, 0, 1, 2), 0, 2, 1)),
    )
    yield (
        "plan: buffers swapped",
        "affine",
        "gradients",
        _with(affine, 2, lambda p: replace(p, gradients=(4, 8, 7))),
    )
    yield "plan: wrong size", "affine", "gradients", _with(affine, 2, lambda p: _argument(p, 1, 4, 1))
    yield (
        "plan: steps in the wrong order",
        "affine",
        "memory",
        _with(affine, 2, lambda p: replace(p, steps=p.steps[::-1])),
    )
    yield (
        "plan: partial gradients wrong",
        "dense",
        "memory gradients",
        _with(dense, 2, lambda p: _argument(p, 0, 0, 2)),
    )
    yield (
        "forged manifest",
        "affine",
        "integrity",
        replace(affine, params={**affine.params, "affine_sum": "pppp"}),
    )
    yield "forged manifest", "affine", "integrity", replace(affine, params={**affine.params, "missing": "p"})
    yield (
        "forged manifest",
        "affine",
        "integrity",
        _with(affine, 2, lambda p: replace(p, wanted=("x", "w"), gradients=(4,))),
    )
    yield (
        "forged manifest",
        "affine",
        "integrity",
        _with(affine, 1, lambda p: _step(p, 0, grid=(("mul", "rows", 1 << 30), 1, 1))),
    )
    yield "forged manifest", "dense", "integrity", replace(dense, plans=dense.plans[:2])


LOOP = "#pragma omp parallel for\n  for (int64_t p = 0; p < gx; p++)"


def _races() -> Iterator[tuple[str, Toy]]:
    """A variable of each iteration declared outside the parallel loop, so that the threads share it."""
    one = f"{LOOP} {{\n    double sw[C], sb[C];"
    yield "affine", edit(toys.affine(), (one, f"  double sw[C], sb[C];\n{LOOP} {{"))
    one = f"{LOOP} {{\n    double acc[C];"
    yield "norm", edit(toys.norm(), (one, f"  double acc[C];\n{LOOP} {{"))
    soft = toys.softmax()
    start = soft.source.index(LOOP)
    hoisted = (
        soft.source[:start]
        + "  volatile double sum;\n"
        + soft.source[start:].replace("double sum = 0;", "sum = 0;", 1)
    )
    yield "softmax", replace(soft, source=hoisted)
    start = soft.source.rindex(LOOP)
    hoisted = (
        soft.source[:start]
        + "  volatile double dot;\n"
        + soft.source[start:].replace("double dot = 0;", "dot = 0;", 1)
    )
    yield "softmax", replace(soft, source=hoisted)


def faults() -> list[Fault]:
    """All of them."""
    out: list[Fault] = []
    for at, (kind, toy, stages, number, old, new) in enumerate(listed()):
        named, hidden = tuple(stages.split()), "static" in new
        made = _edited(TOYS[toy](), number, old, new)
        first, behind = (("integrity",), named) if hidden else (named, ())
        bare = kind.removeprefix("subtle ")
        out.append(Fault(f"{at} {kind}, {toy}", bare, first, made, kind.startswith("subtle "), behind))
    out += [
        Fault(f"{at} race on the stack, {toy}", "race", ("determinism",), made)
        for at, (toy, made) in enumerate(_races())
    ]
    for at, (kind, toy, stages, made) in enumerate(_plans()):
        out.append(Fault(f"{kind} {at}, {toy}", kind, tuple(stages.split()), made))
    return out
