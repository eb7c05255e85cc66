"""ScanTile kernels in Triton: running values along time, block by block, with the state in registers.

Where columns lie behind the time axis, a block of time is a tile [steps, parts, columns]: position part *
steps + step, so that a thread owns all steps of its part and column and adds them up without any other; the
parts are joined by one short scan, and each part then gets the state that it begins with. Where time is the
last axis, a tile is [rows, time] and the scan goes along its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from esper_ir.types import Dim
from forge.emit.triton_base import Kernel
from forge.emit.triton_scalars import TRITON_TYPE
from forge.emit.writer import dim_text
from forge.plan import INDEX, Access, Compute, Load, Scan, ScanTile, Stmt, Store

ONE = Dim.of(1)
COMBINED = {"sum": "_add", "prod": "_mul", "logsumexp": "_logaddexp"}
NEUTRAL = {"sum": "0.0", "prod": "1.0", "logsumexp": 'float("-inf")', "recurrence": "0.0"}


def scans(k: Kernel, tile: ScanTile) -> None:
    """Body of a ScanTile kernel."""
    _Emission(k, tile).emit()


@dataclass
class _Emission:
    k: Kernel
    tile: ScanTile

    def __post_init__(self) -> None:
        plan = self.k.plan
        self.deep = plan.cols != ONE  # columns behind the time axis
        self.time, self.outer = plan.space[-2], plan.space[:-2]
        self.span = self.tile.steps * self.tile.parts
        self.scans = [s for s in plan.body if isinstance(s, Scan)]
        self.reverse = self.scans[0].reverse
        self.loops = self._varying()

    def _varying(self) -> set[str]:
        """Values that change along time."""
        out: set[str] = set()
        at = len(self.k.plan.space) - 2
        for s in self.k.plan.body:
            if isinstance(s, Load):
                varies = at in self.k.plan.accesses[s.access].axes or s.row in out
            else:
                varies = not isinstance(s, Store) and bool(out & set(getattr(s, "args", ())))
            if varies or isinstance(s, Scan):
                out.add(getattr(s, "name", ""))
        return out

    # The whole -------------------------------------------------------------------------------------

    def emit(self) -> None:
        w = self.k.w
        self._places()
        early = [s for s in self.k.plan.body if not isinstance(s, Store) and s.name not in self.loops]
        late = [s for s in self.k.plan.body if s not in early]
        for s in early:
            self._statement(s)
        for s in self.scans:
            w.line(f"{s.name}_state = tl.full({self._edge()}, {self._neutral(s)[-1]}, {self._type(s)})")
        loads = [s for s in late if isinstance(s, Load) and self._reads(s)]
        w.line(f"blocks = tl.cdiv({dim_text(self.time)}, {self.span})")
        self._times("0", "")
        self._fetch(loads, "")
        with w.block("for i in tl.range(0, blocks):"):
            self._times("(i + 1)", "next_")
            self._fetch(loads, "next_")
            for s in late:
                if s in loads:
                    assert isinstance(s, Load)
                    w.line(f"{s.name} = {self.k.widened(self.k.plan.accesses[s.access], f'raw_{s.name}')}")
                else:
                    self._statement(s)
            for name in ("time", "time_ok", *(f"raw_{s.name}" for s in loads)):
                w.line(f"{name} = next_{name}")

    def _places(self) -> None:
        k, w, tile = self.k, self.k.w, self.tile
        w.line(f"pid = tl.program_id(0).to({k.index_type})")
        rows = ONE
        for size in self.outer:
            rows = rows * size
        if self.deep:
            cols = dim_text(k.plan.cols)
            w.line(f"across = tl.cdiv({cols}, {tile.block})")
            w.line("row = pid // across")
            # Not known to be neighbours but in pairs: else a thread would load eight columns of a row, the
            # steps of a part would lie in several threads, and the scan would have to go through all of them.
            w.line("none = tl.num_programs(1) - 1")
            near = f"(tl.arange(0, {tile.block}) ^ none)"
            if tile.block > 32:
                near = f"tl.max_contiguous(tl.multiple_of({near}, [2]), [2])"
            w.line(f"col = ((pid % across) * {tile.block} + {near})[None, None, :]")
            w.line(f"col_ok = col < {cols}")
            w.line(f"step = tl.arange(0, {tile.steps})[:, None, None]")
            w.line(f"part = tl.arange(0, {tile.parts})[None, :, None]")
            w.line(f"inner = (part * {tile.steps} + step).to({k.index_type})")
            return
        w.line(f"row = (pid * {tile.block} + tl.arange(0, {tile.block}))[:, None]")
        w.line(f"row_ok = row < {dim_text(rows)}")
        w.line(f"inner = tl.arange(0, {self.span}).to({k.index_type})[None, :]")

    def _times(self, block: str, prefix: str) -> None:
        at = f"(blocks - 1 - {block})" if self.reverse else block
        low = f" & ({prefix}time >= 0)" if self.reverse else ""
        self.k.w.line(f"{prefix}time = ({at} * {self.span} + inner).to({self.k.index_type})")
        self.k.w.line(f"{prefix}time_ok = ({prefix}time < {dim_text(self.time)}){low}")

    # Memory ----------------------------------------------------------------------------------------

    def _reads(self, s: Load) -> bool:
        """From a place that is known before the block; a row of a table is named by a value of the block."""
        return self.k.plan.accesses[s.access].buffer != INDEX and not s.row

    def _index(self, prefix: str = "") -> list[str]:
        rows = self._outer_index()
        return [*rows, f"{prefix}time", "col" if self.deep else "0"]

    def _outer_index(self) -> list[str]:
        out: list[str] = []
        inner = ONE
        for position, size in reversed(list(enumerate(self.outer))):
            text = "row" if inner == ONE else f"(row // {dim_text(inner)})"
            out.append(text if position == 0 else f"({text} % {dim_text(size)})")
            inner = inner * size
        return out[::-1]

    def _mask(self, access: Access, prefix: str = "", axes: frozenset[int] = frozenset()) -> str:
        time = len(self.k.plan.space) - 2
        moving = access.axes | axes
        parts = [f"{prefix}time_ok"] if time in moving else []
        if self.deep and time + 1 in moving:
            parts.append("col_ok")
        if not self.deep and any(a < time for a in moving):
            parts.append("row_ok")
        return " & ".join(parts)

    def _fetch(self, loads: list[Load], prefix: str) -> None:
        """Loads of one block in their stored type, while the block before is worked on."""
        for s in loads:
            access = self.k.plan.accesses[s.access]
            text = self.k.raw_load(access, self._index(prefix), self._mask(access, prefix))
            self.k.w.line(f"{prefix}raw_{s.name} = {text}")

    def _statement(self, s: Stmt) -> None:
        k = self.k
        if isinstance(s, Load):
            access = k.plan.accesses[s.access]
            k.load(s, self._index(), self._mask(access))
        elif isinstance(s, Compute):
            k.compute(s)
        elif isinstance(s, Scan):
            self._scan(s)
        elif isinstance(s, Store):
            self._store(s)

    def _store(self, s: Store) -> None:
        access = self.k.plan.accesses[s.access]
        address = f"{self.k.pointer[access.buffer]} + {self.k.offset(access, self._index())} + inner * 0"
        if self.deep:
            address += " + col * 0"
        else:
            address += " + row * 0"
        mask = "time_ok & col_ok" if self.deep else "time_ok & row_ok"
        value = f"tl.broadcast_to(({s.value}).to({TRITON_TYPE[access.dtype]}), {self._shape()})"
        self.k.w.line(f"tl.store({address}, {value}, mask={mask})")

    # Running values --------------------------------------------------------------------------------

    def _shape(self) -> str:
        tile = self.tile
        return f"[{tile.steps}, {tile.parts}, {tile.block}]" if self.deep else f"[{tile.block}, {self.span}]"

    def _edge(self) -> str:
        return f"[1, {self.tile.block}]" if self.deep else f"[{self.tile.block}, 1]"

    def _type(self, s: Scan) -> str:
        return TRITON_TYPE[self.k.dtypes[s.name]]

    def _number(self, s: Scan, text: str) -> str:
        """Without a point among whole numbers, which it would turn into floating ones."""
        return text if self.k.dtypes[s.name].is_floating else text.removesuffix(".0")

    def _neutral(self, s: Scan) -> list[str]:
        """The step, a number per operand, that changes nothing."""
        found = ["1.0", "0.0"] if s.combine == "recurrence" else [NEUTRAL[s.combine]]
        return [self._number(s, text) for text in found]

    def _scan(self, s: Scan) -> None:
        """What is outside of time changes nothing: the neutral step."""
        w = self.k.w
        neutral = self._neutral(s)
        parts = ["a", "b"][: len(s.args)]
        for part, arg, none in zip(parts, s.args, neutral, strict=True):
            value = f"tl.where(time_ok, ({arg}).to({self._type(s)}), {none})"
            w.line(f"{s.name}_{part} = tl.broadcast_to({value}, {self._shape()})")
        if self.deep:
            self._deep_scan(s, parts)
        else:
            self._flat_scan(s, parts)

    def _running(self, s: Scan, parts: list[str], prefix: str, axis: int) -> None:
        """`prefix`a, `prefix`b (or a alone): inclusive along an axis, over the same names."""
        names = [f"{prefix}{p}" for p in parts]
        call = f"axis={axis}, reverse={self.reverse}"
        if s.combine == "recurrence":
            self.k.w.line(
                f"{', '.join(names)} = tl.associative_scan(({', '.join(names)}), combine_fn=_recur, {call})"
            )
            return
        self.k.w.line(
            f"{names[0]} = tl.associative_scan({names[0]}, combine_fn={COMBINED[s.combine]}, {call})"
        )

    def _after(self, s: Scan, prefix: str, state: str) -> str:
        """The state behind a run of steps from the state before it."""
        if s.combine == "recurrence":
            return f"{prefix}a * {state} + {prefix}b"
        return f"{COMBINED[s.combine]}({prefix}a, {state})"

    def _flat_scan(self, s: Scan, parts: list[str]) -> None:
        w, name = self.k.w, s.name
        self._running(s, parts, f"{name}_", 1)
        w.line(f"{name} = {self._after(s, f'{name}_', f'{name}_state')}")
        last, zero = "0" if self.reverse else str(self.span - 1), self._number(s, "0.0")
        w.line(f"{name}_state = tl.sum(tl.where(inner == {last}, {name}, {zero}), 1, keep_dims=True)")

    def _deep_scan(self, s: Scan, parts: list[str]) -> None:
        w, name, tile = self.k.w, s.name, self.tile
        self._running(s, parts, f"{name}_", 0)
        edge, zero = "0" if self.reverse else str(tile.steps - 1), self._number(s, "0.0")
        for p in parts:
            w.line(f"{name}_all_{p} = tl.sum(tl.where(step == {edge}, {name}_{p}, {zero}), 0)")
        self._running(s, parts, f"{name}_all_", 0)
        w.line(f"{name}_ends = {self._after(s, f'{name}_all_', f'{name}_state')}")
        w.line(f"{name}_row = tl.arange(0, {tile.parts})[:, None]")
        before = (
            f"tl.minimum({name}_row + 1, {tile.parts - 1})"
            if self.reverse
            else f"tl.maximum({name}_row - 1, 0)"
        )
        wide = f"[{tile.parts}, {tile.block}]"
        w.line(f"{name}_from = tl.gather({name}_ends, tl.broadcast_to({before}, {wide}), 0)")
        first, last = (tile.parts - 1, 0) if self.reverse else (0, tile.parts - 1)
        w.line(f"{name}_from = tl.where({name}_row == {first}, {name}_state, {name}_from)[None, :, :]")
        w.line(f"{name} = {self._after(s, f'{name}_', f'{name}_from')}")
        w.line(
            f"{name}_state = tl.sum(tl.where({name}_row == {last}, {name}_ends, {zero}), 0, keep_dims=True)"
        )
