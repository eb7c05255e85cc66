"""Faults of the launch plans: the kernels are right, and are launched wrongly.

The small forms are in the kernels: a little of what such a launch leaves behind.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from tests.faults.corpus import Block
from tests.faults.fault import FaultClass, Mutant
from tests.faults.sites import (
    SHARE,
    Site,
    added,
    dtype_of,
    idle,
    mixed,
    of_role,
    only_subtracted,
    scale_of,
    sites,
    stored,
)  # fmt: skip

Plan = dict[str, Any]


def _edits(block: Block) -> Iterator[tuple[dict[str, Any], Plan, str]]:
    """A fresh launch manifest for every plan, that plan in it, and its name."""
    launch = block.manifest["launch"]
    for at, plan in enumerate(launch["plans"]):
        fresh = copy.deepcopy(launch)
        name = f"plan {at} ({plan['phase']} {' '.join(plan['wanted'])})"
        yield fresh, fresh["plans"][at], name


def _kernels(plan: Plan) -> list[int]:
    return [at for at, step in enumerate(plan["steps"]) if step["step"] == "kernel"]


def _launches(block: Block) -> Iterator[tuple[Plan, int]]:
    """(plan, number of the step) of every launch."""
    for _, plan, _ in _edits(block):
        yield from ((plan, at) for at in _kernels(plan))


def _grids(block: Block) -> Iterator[Mutant]:
    """One program too few where their number follows from the rows."""
    for plan, at in _launches(block):
        for axis, size in enumerate(plan["steps"][at]["grid"]):
            if not isinstance(size, int):
                fresh, own, name = _again(block, plan)
                own["steps"][at]["grid"][axis] = ["max", 1, ["sub", size, 1]]
                yield Mutant("grid too small", "", f"{name} step {at}", launch=fresh)
    for site in _stores(block):
        last = "p == gx - 1" if block.kind == "c" else "tl.program_id(0) == tl.num_programs(0) - 1"
        if site.row() is not None:
            text = site.put(site.where(last, site.spoilt(2 * SHARE[dtype_of(block)]), site.value))
            place = f"store {site.argument}: a little not written"
            yield Mutant("grid too small", site.kernel, place, text, subtle=True)


def _stores(block: Block) -> Iterator[Site]:
    """Of whole tensors, for a caller or another kernel."""
    return of_role(block, "store", "output", "gradient", "temp")


def _again(block: Block, plan: Plan) -> tuple[dict[str, Any], Plan, str]:
    return next((f, p, n) for f, p, n in _edits(block) if p == plan)


def _steps(block: Block) -> Iterator[Mutant]:
    """A kernel is not launched: what it should have written is stale."""
    for _, plan, _ in _edits(block):
        if len(plan["steps"]) < 2:
            continue
        for at in _kernels(plan):
            fresh, own, name = _again(block, plan)
            del own["steps"][at]
            yield Mutant("stale workspace", "", f"{name} without step {at}", launch=fresh)
    for site in _stores(block):
        text = site.put(site.spoilt(2 * SHARE[dtype_of(block)]))
        place = f"store {site.argument}: a little of what lay there"
        yield Mutant("stale workspace", site.kernel, place, text, subtle=True)


def _order(block: Block) -> Iterator[Mutant]:
    """A kernel runs before the one whose results it reads: as if nothing stood between them."""
    for _, plan, _ in _edits(block):
        for at in range(len(plan["steps"]) - 1):
            first, second = plan["steps"][at], plan["steps"][at + 1]
            if _written(block, first) & _touched(second):
                fresh, own, name = _again(block, plan)
                own["steps"][at : at + 2] = [second, first]
                yield Mutant("missing barrier", "", f"{name} steps {at} and {at + 1}", launch=fresh)
    yield from _turns(block)


C_HELD = re.compile(r"const float t\d+ = ((w\d+)\[r\]);")


def _turns(block: Block) -> Iterator[Mutant]:
    """A little of what lay in a place one turn before: of the row before, by a kernel that follows another,
    or a loop that follows another."""
    kind = "missing barrier"
    for site in of_role(block, "load", "temp"):
        if (row := site.row()) and not only_subtracted(block, site.kernel):
            index = site.where(f"{row[0]} > 0", f"{site.index} - {row[1]}", site.index)
            text = site.put(mixed(site, site.at(index), 2 * SHARE[dtype_of(block)]))
            yield Mutant(
                kind, site.kernel, f"{site.value} of the row before", text, subtle=True, by_value=True
            )
    for kernel, text in block.texts.items() if block.kind == "c" else ():
        for m in C_HELD.finditer(text):
            of = re.search(rf"{m[2]}\[r\] = s(\d+_\d+);", text)
            if of and f"a{of[1]}[l] = max_f(" in text:
                continue  # which is only subtracted: any number would do
            share = (1 if only_subtracted(block, kernel) else 4) * SHARE[dtype_of(block)]
            value = f"{m[1]} * {1 - share!r}f + {m[2]}[r ? r - 1 : r] * {share!r}f"
            made = text[: m.start(1)] + value + text[m.end(1) :]
            yield Mutant(kind, kernel, f"{m[0]} of the row before", made, subtle=True, by_value=True)


def _touched(step: dict[str, Any]) -> set[int]:
    if step["step"] == "extern":
        return {v["buffer"] for v in step["inputs"]}
    return {a["value"] for a in step["args"] if a["kind"] == "buffer"}


def _written(block: Block, step: dict[str, Any]) -> set[int]:
    """Buffers that a step writes."""
    if step["step"] == "extern":
        return {v["buffer"] for v in step["outs"]}
    places = stored(block, step["variants"][0]["kernel"])
    return {step["args"][n]["value"] for n in places}


def _swapped(block: Block) -> Iterator[Mutant]:
    """Two arguments of one shape and type in each other's place; not where a sum takes both. Of a product
    of the two nothing changes."""
    for plan, at in _launches(block):
        args = plan["steps"][at]["args"]
        for i, j in _alike(block, plan, at):
            fresh, own, name = _again(block, plan)
            own["steps"][at]["args"][i], own["steps"][at]["args"][j] = args[j], args[i]
            yield Mutant("buffers swapped", "", f"{name} step {at} arguments {i}, {j}", launch=fresh)
    yield from _other_buffer(block)


def _other_buffer(block: Block) -> Iterator[Mutant]:
    """A little of the other argument in a load of either."""
    seen: set[tuple[str, int, int]] = set()
    for plan, at in _launches(block):
        kernels = [v["kernel"] for v in plan["steps"][at]["variants"]]
        seen |= {(k, *pair) for i, j in _alike(block, plan, at) for k in kernels for pair in ((i, j), (j, i))}
    for kernel, i, j in sorted(seen):
        loads = [s for s in sites(block, kernel) if s.what == "load"]
        if j in {s.argument for s in loads} and not only_subtracted(block, kernel):
            # A mask flips, and is off by all of a value.
            masked = {s.name for s in loads if re.search(rf"\b{s.name} <= ", block.texts[kernel])}
            for site in [s for s in loads if s.argument == i and s.name not in masked]:
                share = 0.4 * SHARE[dtype_of(block)] * (scale_of(block) if site.roles == {"saved"} else 1.0)
                text = site.put(mixed(site, site.at(site.index, j), share))
                place = f"a little of argument {j} in {site.value}"
                yield Mutant("buffers swapped", kernel, place, text, subtle=True)


def _alike(block: Block, plan: Plan, at: int) -> Iterator[tuple[int, int]]:
    """Neighbouring arguments that are different buffers of one shape and type."""
    args = plan["steps"][at]["args"]
    names = [v["kernel"] for v in plan["steps"][at]["variants"]]
    places = [i for i, a in enumerate(args) if a["kind"] == "buffer"]
    for i, j in zip(places, places[1:], strict=False):
        one, two = (plan["buffers"][args[n]["value"]] for n in (i, j))
        same = (one["dtype"], one["shape"]) == (two["dtype"], two["shape"]) and args[i] != args[j]
        if same and not any(added(block, kernel, i, j) for kernel in names):
            yield i, j


def _sizes(block: Block) -> Iterator[Mutant]:
    """One row fewer than there are."""
    for plan, at in _launches(block):
        kernels = [v["kernel"] for v in plan["steps"][at]["variants"]]
        if block.kind == "triton" and all(idle(_own(block.texts[k], k), "n_rows") for k in kernels):
            continue
        for i, argument in enumerate(plan["steps"][at]["args"]):
            if argument["kind"] == "size" and argument["value"] == "rows":
                fresh, own, name = _again(block, plan)
                own["steps"][at]["args"][i] = {"kind": "size", "value": ["max", 1, ["sub", "rows", 1]]}
                yield Mutant("wrong size", "", f"{name} step {at}", launch=fresh)
    for kernel, text in block.texts.items():
        for m in (C_MEAN if block.kind == "c" else T_MEAN).finditer(text):
            # A root mean square is off by half of it, a mean by what it is beside the values.
            root = "rsqrt" in text[m.end() : m.end() + 160]
            share = (3 if root else 12) * SHARE[dtype_of(block)]
            size = float.fromhex(m[1]) if block.kind == "c" else float(m[1])
            made = f"{text[: m.start(1)]}{size * (1 + share)!r}{text[m.end(1) :]}"
            place = f"{m[0]} a little larger"
            yield Mutant("wrong size", kernel, place, made, subtle=True, by_value=True)


C_MEAN = re.compile(r"const float t\d+ = \w+ / (0x[^;]+)f;")
T_MEAN = re.compile(r"_div\(v\d+, (\d+)\)")


def _own(text: str, kernel: str) -> str:
    """The kernel without the functions before it."""
    return text[text.index(f"def {kernel}(") :]


def _forged(block: Block) -> Iterator[Mutant]:
    """What the manifest says about a kernel is not what the machine code takes."""
    launch = block.manifest["launch"]
    for at, kernel in enumerate(launch["kernels"][:2]):
        fresh = copy.deepcopy(launch)
        fresh["kernels"][at]["entry"] = "nowhere"
        yield Mutant("forged manifest", kernel["name"], "an entry that is not there", launch=fresh)
        fresh = copy.deepcopy(launch)
        fresh["interface"]["dims"][0]["max"] *= 2
        yield Mutant("forged manifest", kernel["name"], "a wider range", launch=fresh)


CLASSES = (
    FaultClass("grid too small", _grids),
    FaultClass("stale workspace", _steps),
    FaultClass("missing barrier", _order),
    FaultClass("buffers swapped", _swapped, by_value=True),
    FaultClass("wrong size", _sizes),
    FaultClass("forged manifest", _forged, no_small="A claim that does not hold is no number."),
)
