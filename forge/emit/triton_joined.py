"""JoinedTile: a function per part, and a kernel that deals its programs to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forge.emit.writer import Writer, size_name
from forge.plan import JoinedTile, KernelPlan
from library.launch import Size

PLACES = ("tl.program_id(0)", "tl.program_id(1)", "tl.num_programs(0)", "tl.num_programs(1)")
"""Where a program is among those of its kernel; a part is told."""
GIVEN = ("at_0", "at_1", "of_0", "of_1")


def joined(plan: KernelPlan, emit_kernel: Callable[[KernelPlan], str]) -> str:
    """Functions of the parts, then the kernel."""
    tile = plan.tile
    assert isinstance(tile, JoinedTile)
    names = [f"{plan.name}_part{i}" for i in range(len(tile.parts))]
    texts = [_told(emit_kernel(replace(p, name=n)), n) for p, n in zip(tile.parts, names, strict=True)]
    return "\n\n".join([*texts, _dealt(plan, tile, names)])


def _told(text: str, name: str) -> str:
    """A kernel as a function of its place."""
    for place, given in zip(PLACES, GIVEN, strict=True):
        text = text.replace(place, given)
    return text.replace(f"def {name}(", f"def {name}({', '.join(GIVEN)}, ", 1)


def _dealt(plan: KernelPlan, tile: JoinedTile, names: list[str]) -> str:
    w = Writer()
    pointer = {b: f"p_{i}" for i, b in enumerate(plan.buffers)}
    w.line("@triton.jit")
    with w.block(f"def {plan.name}({', '.join([*pointer.values(), *map(size_name, plan.sizes)])}):"):
        w.line("pid = tl.program_id(0)")
        for at, (part, name) in enumerate(zip(tile.parts, names, strict=True)):
            given = [pointer[b] for b in part.buffers] + list(map(size_name, part.sizes))
            _branch(w, tile, at, name, given)
    return w.text()


def _branch(w: Writer, tile: JoinedTile, at: int, name: str, given: list[str]) -> None:
    """The programs of one part; numbers along the second axis come after those along the first. One `if`
    after the other: in an `else` the compiler gives a part shared memory of its own.
    """
    x, y = tile.grids[at]
    across = size_text(x)
    own = f"(pid - {_end(tile, at - 1)})" if at else "pid"
    place = (f"{own} % {across}", f"{own} // {across}") if y != 1 else (own, "pid * 0")
    inside = [f"(pid >= {_end(tile, at - 1)})"] if at else []
    inside += [f"(pid < {_end(tile, at)})"] if at + 1 < len(tile.parts) else []
    with w.block(f"if {' & '.join(inside)}:"):
        w.line(f"{name}({', '.join([*place, across, size_text(y), *given])})")


def _end(tile: JoinedTile, at: int) -> str:
    """How many programs the parts up to this one have."""
    counts = [f"{size_text(x)} * {size_text(y)}" if y != 1 else size_text(x) for x, y in tile.grids[: at + 1]]
    known = [x * y for x, y in tile.grids[: at + 1] if isinstance(x, int) and isinstance(y, int)]
    return str(sum(known)) if len(known) == len(counts) else f"({' + '.join(counts)})"


def size_text(size: Size) -> str:
    """A size of the launch manifest as an expression."""
    if not isinstance(size, tuple):
        return size_name(size) if isinstance(size, str) else str(size)
    operator, a, b = size
    sign = {"add": "+", "mul": "*", "floordiv": "//"}[operator]
    return f"({size_text(a)} {sign} {size_text(b)})"
