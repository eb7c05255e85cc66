"""KernelPlan -> C: one function per plan, OpenMP over programs, vector loops over columns.

    void NAME(void *const *args, int64_t gx, int64_t gy, int64_t gz)

`args[i]` points at parameter i: the pointers of `plan.buffers`, then `plan.sizes` as int32 (int64 when
`plan.wide`). `gx` is the number of programs; every program does the same work whichever thread runs it, so
bits do not depend on the number of threads. Row reductions run in `LANES` interleaved sums (element j in
lane j mod LANES) that are added in a binary tree: the order is part of the text and the same for every
vector width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from esper_ir.diagnostics import EsperError
from forge.emit.c_across import across_tile
from forge.emit.c_expr import REGISTER, Block, Term
from forge.emit.c_kept import Kept
from forge.emit.c_math import preamble
from forge.emit.c_moments import Sets, about_means
from forge.emit.c_reduce import Column, Lanes, combined, identity, lane_loop
from forge.emit.c_scan import scan_tile
from forge.emit.c_text import Lines, Scope, Text, braces, by_runs, flush, indent, simd
from forge.emit.c_together import Together
from forge.plan import (
    Access,
    Compute,
    KernelPlan,
    Load,
    Phase,
    PointTile,
    Reduce,
    RowTile,
    ScanTile,
    Stmt,
    Store,
    SumTile,
    phases,
)
from forge.target import Target


def emit_module(plans: Iterable[KernelPlan], target: Target) -> str:
    """One translation unit with a function per plan and the definitions they use."""
    functions = [emit(plan, target) for plan in plans]
    return preamble("\n".join(functions)) + "\n" + "\n".join(functions)


def emit(plan: KernelPlan, target: Target) -> str:
    """The C function of a plan; it needs `preamble(text)` before it (see `emit_module`).

    Raises E0522 when the target is no cpu or the plan is a contraction, E0523 for a body that its tile
    cannot hold.
    """
    tiles = {RowTile: _row_tile, PointTile: _point_tile, SumTile: _sum_tile, ScanTile: scan_tile}
    spelled = tiles.get(type(plan.tile))
    if target.kind != "cpu" or spelled is None or plan.product:
        what = f"{type(plan.tile).__name__} on {target.name}"
        hint = "contractions are extern steps on cpu targets"
        raise EsperError("E0522", f"no C for {what}", node=plan.name, hint=hint)
    text = Text(plan)
    return "\n".join([*text.opening(), *indent(spelled(text)), "}", ""])


def _row_tile(text: Text) -> Lines:
    tile = text.plan.tile
    assert isinstance(tile, RowTile)
    if tile.block_rows > 1 and not tile.programs:
        return across_tile(text)
    before, found = phases(text.plan)
    columns = _partial_rows(text)
    kept, sweeps = Kept.choose(text, found, tile)
    together = Together.of(text, before, sweeps, kept)

    def sweep(row: Scope, number: int) -> Lines:
        return _sweep(text, row, sweeps[number], number, columns, kept)

    if together is not None:
        loop = together.lines(sweep)
    else:
        row = Scope(Block(), {}, text.index(None))
        text.statements(before, row)
        lines = [*text.offsets(), *flush(row), *kept.line(text, row)]
        for number, phase in enumerate(sweeps):
            lines += sweep(row, number)
            text.statements(phase.scalars, row)
            lines += flush(row)
        loop = [*kept.declare(), *text.each_row(lines)]
    declared = [line for column in columns.values() for line in column.declare()]
    again = about_means(text, columns, before)
    return text.parallel([*declared, *_program_rows(tile, loop), *again])


def _program_rows(tile: RowTile, loop: Lines) -> Lines:
    """The rows of program p: one run of them, or every `programs`-th block."""
    if not tile.programs:
        return [*_range("p", tile.rows_per_program), *loop]
    stride = tile.programs * tile.block_rows
    upwards = "for (int64_t turn = 0; turn < turns; turn++)"
    downwards = "for (int64_t turn = turns - 1; turn >= 0; turn--)"
    return [
        f"const int64_t turns = (rows + {stride - 1}) / {stride};",
        *braces(
            downwards if tile.reverse else upwards,
            [*_range(f"(turn * {tile.programs} + p)", tile.block_rows), *loop],
        ),
    ]


def _range(block: str, size: int) -> Lines:
    return [f"const int64_t first = {block} * {size}, last = first + {size} < rows ? first + {size} : rows;"]


def _partial_rows(text: Text) -> dict[str, Column]:
    out: dict[str, Column] = {}
    for stmt in text.plan.body:
        if isinstance(stmt, Reduce) and stmt.axis == "col":
            access = _partial_access(text, stmt)
            place = f"{text.buffers[access.buffer]} + {text.partial_row(access)}"
            out[stmt.name] = Column(f"c{len(out)}", access.dtype, stmt.combine, place)
    used = {a for s in text.plan.body if isinstance(s, Compute) for a in s.args}
    if used & out.keys():
        raise text.refuse(f"{sorted(used & out.keys())} used before its partial sums are combined")
    return out


def _partial_access(text: Text, reduce: Reduce) -> Access:
    stores = [s for s in text.plan.body if isinstance(s, Store) and s.value == reduce.name]
    found = [text.plan.accesses[s.access] for s in stores]
    kind = text.dtypes[reduce.name]
    if len(found) != 1 or not found[0].partial or found[0].dtype is not kind:
        raise text.refuse(f"col reduction {reduce.name} needs one store to a {kind.value} partial workspace")
    return found[0]


def _sweep(
    text: Text, row: Scope, phase: Phase, number: int, columns: Mapping[str, Column], kept: Kept
) -> Lines:
    """One pass over the columns of a row."""
    stmts, read = kept.prune(phase, number)
    lanes = [
        Lanes(f"a{number}_{i}", text.dtypes[r.name], r.combine, r.arg)
        for i, r in enumerate(phase.reduces)
        if r.axis == "row"
    ]
    inner = row.inner(text.index("j"))
    for name in sorted(read):
        array, kind = kept.place(name)
        inner.values[name] = inner.block.let(kind, array)
        inner.block.exact.add((inner.values[name].text, text.dtypes[name]))
    text.statements(stmts, inner)
    for name, at in kept.first.items():
        if at == number:
            inner.block.lines.append(f"{kept.arrays[name][0]}[j] = {inner.values[name].text};")
    for reduce in phase.reduces:
        if reduce.axis == "col" and not reduce.about:
            inner.block.lines.append(columns[reduce.name].add(inner.values[reduce.arg]))
    body = [*inner.block.lines, *(lane.add(inner.values[lane.arg]) for lane in lanes)]
    for reduce, lane in zip((r for r in phase.reduces if r.axis == "row"), lanes, strict=True):
        row.values[reduce.name] = Term(lane.result, lane.kind)
    sizes = text.runs(stmts) or kept.runs(read)
    return lane_loop(lanes, body, sizes) if lanes else by_runs(sizes, lambda at, end: simd(at, end, body))


def _point_tile(text: Text) -> Lines:
    tile = text.plan.tile
    assert isinstance(tile, PointTile)
    if any(isinstance(s, Reduce) for s in text.plan.body):
        raise text.refuse("a reduction in a PointTile")
    row = Scope(Block(), {}, text.index(None))
    text.statements((s for s in text.plan.body if "c" not in _axes(text, s)), row)
    inner = row.inner(text.index("j"))
    text.statements((s for s in text.plan.body if "c" in _axes(text, s)), inner)
    step = tile.block
    head = [
        f"const int64_t total = rows * cols, first = p * {step};",
        f"const int64_t last = first + {step} < total ? first + {step} : total;",
    ]
    if len(text.plan.space) == 1:
        return text.parallel([*head, *row.block.lines, *simd("first", "last", inner.block.lines)])
    lines = [
        "const int64_t i = e / cols, start = e % cols;",
        "const int64_t end = cols - start < last - e ? cols : start + last - e;",
        *text.row_indices("i"),
        *text.offsets(),
        *row.block.lines,
        *simd("start", "end", inner.block.lines),
        "e += end - start;",
    ]
    return text.parallel([*head, *braces("for (int64_t e = first; e < last;)", lines)])


def _axes(text: Text, stmt: Stmt) -> str:
    return text.plan.store_axes(stmt) if isinstance(stmt, Store) else text.axes[stmt.name]


def _sum_tile(text: Text) -> Lines:
    tile = text.plan.tile
    assert isinstance(tile, SumTile)
    reduces = [s for s in text.plan.body if isinstance(s, Reduce)]
    if len(text.plan.space) != 2 or any(r.axis != "col" for r in reduces):
        raise text.refuse("a SumTile adds over (parts, cols)")
    adds, after = _split_sum(text.plan.body, {name for r in reduces for name in (r.arg, *r.about)})
    lines, finish = [], Block()
    row = Scope(Block(), {}, text.index(None))
    text.statements((s for s in adds if "c" not in _axes(text, s)), row)
    inner = row.inner(text.index("j"))
    text.statements((s for s in adds if "c" in _axes(text, s)), inner)
    last = Scope(finish, {}, text.index("j", row=False))
    each = [*text.row_indices("i"), *text.offsets(), *row.block.lines]
    for number, reduce in enumerate(reduces):
        kind, place = text.dtypes[reduce.name], f"s{number}[j - start]"
        lines += [f"{REGISTER[kind]} s{number}[{tile.block_cols}];"]
        clear, sets = [f"{place} = {identity(reduce.combine, kind)};"], Sets(number, kind)
        if reduce.about:
            lines += sets.begin(tile.block_cols)
            clear += sets.clear()
            each += sets.row(inner.values[reduce.about[0]].text)
            parts = (inner.values[name].text for name in (reduce.arg, *reduce.about[1:]))
            inner.block.lines += sets.add(place, *parts)
        else:
            added = combined(reduce.combine, kind, place, inner.values[reduce.arg].text)
            inner.block.lines.append(f"{place} = {added};")
        lines += simd("start", "end", clear)
        last.values[reduce.name] = finish.let(kind, place)
    text.statements(after, last)
    step = tile.block_cols
    program = [
        f"const int64_t start = p * {step}, end = start + {step} < cols ? start + {step} : cols;",
        *lines,
        *braces("for (int64_t i = 0; i < rows; i++)", [*each, *simd("start", "end", inner.block.lines)]),
        *simd("start", "end", finish.lines),
    ]
    return text.parallel(program)


def _split_sum(body: Sequence[Stmt], args: set[str]) -> tuple[list[Stmt], list[Stmt]]:
    """Statements that the sums need, and those that run once on the finished sums."""
    wanted, adds = set(args), []
    for stmt in reversed(body):
        if isinstance(stmt, (Load, Compute)) and stmt.name in wanted:
            adds.insert(0, stmt)
            wanted |= set(stmt.args) if isinstance(stmt, Compute) else set()
    later: set[str] = set()
    after: list[Stmt] = []
    for stmt in reversed(body):
        if isinstance(stmt, Store) or (isinstance(stmt, (Load, Compute)) and stmt.name in later):
            after.insert(0, stmt)
            later |= {stmt.value} if isinstance(stmt, Store) else set(getattr(stmt, "args", ()))
    return adds, after
