"""Access: where a kernel reads or writes, as strides over its iteration space."""

from __future__ import annotations

from dataclasses import dataclass, replace

from esper_ir.types import Dim, DType
from forge.views import Window

INDEX = ""
"""Buffer of an access that reads no memory: the value is the element's own address, an integer."""

Parts = tuple[tuple[Dim, Dim], ...]
"""(size, stride) of the axes that one axis of the space is made of, outermost first."""


@dataclass(frozen=True)
class Access:
    """A buffer read or written: element `offset` + sum of position x stride over the axes of the space;
    `partial` marks the [programs, cols] workspace of a col reduction, addressed by program and column. With
    the buffer `INDEX` that number is itself the value: a position along an axis (stride 1) or a size (no
    strides, only the offset). Along an axis of `windows` the position that the window gives counts; where it
    has none, nothing is read and the value is `fill`. Of a `table` (stride and number of rows) the row is a
    value of the body, see `Load`; NaN is read where the table has no such row.

    `parts`: where the last axis is no run of one stride, the axes that it is made of, the same sizes in all
    accesses of a kernel that have any; the last of `strides` is then that of the innermost part.
    """

    buffer: str
    dtype: DType
    strides: tuple[Dim, ...]
    partial: bool = False
    offset: Dim = Dim()
    windows: tuple[Window, ...] = ()
    fill: float | int = 0
    table: tuple[Dim, Dim] | None = None
    parts: Parts = ()

    @property
    def axes(self) -> frozenset[int]:
        """Axes of the space along which the address, or whether there is one, changes."""
        moving = {axis for axis, stride in enumerate(self.strides) if stride != Dim()}
        last = {len(self.strides) - 1} if self.parts else set()
        return frozenset(moving | last | {w.axis for w in self.windows})

    @property
    def dims(self) -> tuple[Dim, ...]:
        """Every size that its address or its bounds depend on."""
        apart = (d for part in self.parts for d in part)
        return (*self.strides, self.offset, *(w.size for w in self.windows), *(self.table or ()), *apart)

    def letters(self) -> str:
        """The same as "r" (some axis but the last) and "c" (the last)."""
        last = len(self.strides) - 1
        return ("r" if self.axes - {last} else "") + ("c" if last in self.axes else "")

    def window(self, axis: int) -> Window | None:
        return next((w for w in self.windows if w.axis == axis), None)

    def led(self) -> Access:
        """The same in a space with one more axis in front."""
        windows = tuple(replace(w, axis=w.axis + 1) for w in self.windows)
        return replace(self, strides=(Dim(), *self.strides), windows=windows)
