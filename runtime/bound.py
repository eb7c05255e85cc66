"""A plan of kernels bound to sizes in C (`runtime/_bind.h`), from the rows of its sealed form.

The same launches, slots and memory as `runtime.layout` and `runtime.dispatch.encode` give, which stay the
meaning. Where the extension is not built, the plan is not sealed, calls a library or is odd in any way,
nothing is bound here and the caller goes that way, which names what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from library.launch import Interface, Plan
from library.sealed import SealedPlan
from runtime import dispatch
from runtime.dispatch import CPU, CUDA, NativeDispatch, Segment, native_bind, native_segment
from runtime.driver import Driver
from runtime.externs import dense
from runtime.layout import Fresh, Functions, Layout, feed_count


class Kernels(dict[str, tuple[Any, ...]]):
    """What binding asks of a kernel, by name: function, threads, shared memory, scratch, kinds of
    parameters."""

    def __init__(self, functions: Functions) -> None:
        super().__init__()
        self._functions = functions

    def __missing__(self, name: str) -> tuple[Any, ...]:
        kernel, function = self._functions.kernels[name], self._functions.address[name]
        made = (function, 32 * kernel.warps, kernel.shared, kernel.scratch, kernel.kinds)
        self[name] = made
        return made


class BoundLayout(Layout):
    """A layout whose parts are laid out again, in Python, where somebody wants to read them; what the caller
    passes is listed when a backward asks. `launches`: kernels of the plan."""

    launches: int

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__
        if name not in _LATE or "_again" not in values:
            raise AttributeError(name)
        if name == "parts":
            values[name] = values["_again"]().parts
        else:
            values["expected"], values["read"] = _passed(values["feeds"], *values["_places"])
        return values[name]


_LATE = ("parts", "expected", "read")


def _passed(
    feeds: int,
    slots: tuple[int, ...],
    buffers: list[Any],
    shapes: tuple[tuple[int, ...], ...],
    first: tuple[int, ...],
    handed: frozenset[int],
) -> tuple[Any, frozenset[int]]:
    """`expected` and `read` of a layout."""
    rows = zip(slots, buffers, shapes, strict=True)
    read = [a for n, a in enumerate(slots) if 0 <= a < feeds and (first[n] >= 0 or n in handed)]
    return tuple([(at, b[0], s, b[3]) for at, b, s in rows if 0 <= at < feeds]), frozenset(read)


class BoundDispatch(NativeDispatch):
    """A run of kernels bound in C."""

    def __init__(self, layout: BoundLayout, words: bytes, driver: Driver | None, device: int) -> None:
        self.layout, self.driver, self.device = layout, driver, device
        self.program, self._launch = native_segment(words)

    @property
    def segment(self) -> Segment:  # type: ignore[override]
        (found,) = self.layout.parts
        assert isinstance(found, Segment)
        return found


def addresses(driver: Driver | None) -> tuple[int, int, int]:
    """What `runtime/_segment.h` is told of the device: kind and the driver's functions."""
    if driver is None:
        return CPU, 0, 0
    return CUDA, driver.address("cuLaunchKernel"), driver.address("cuMemsetD8Async")


def bind(
    plan: Plan,
    interface: Interface,
    saved: int,
    dims: Mapping[str, int],
    kernels: Kernels,
    driver: Driver | None,
    again: Callable[[], Layout],
) -> tuple[BoundLayout, bytes] | None:
    """Layout and encoded segment, or None where Python must bind. `again` gives the layout by
    `runtime.layout.lay_out`; the other arguments are as there."""
    rows = plan.rows() if isinstance(plan, SealedPlan) else None
    if rows is None or len(rows[0]) > dispatch.MAX_BUFFERS:
        return None
    feeds = feed_count(plan, interface, saved)
    handed = frozenset((*plan.outputs, *plan.saved, *plan.gradients))
    about = (feeds, saved, plan.phase == "backward", handed)
    found = native_bind(rows, dims, about, kernels, addresses(driver))
    if found is None:
        return None
    words, shapes, slots, fresh, workspace, first = found
    buffers = rows[0]
    made = object.__new__(BoundLayout)
    made.__dict__.update(
        feeds=feeds,
        given=(),
        fresh=tuple([_fresh(n, shapes, buffers, workspace) for n in fresh]),
        outputs=tuple([slots[n] for n in plan.outputs]),
        saved=tuple([slots[n] for n in plan.saved]),
        gradients=tuple([slots[n] for n in plan.gradients]),
        workspace=workspace,
        _places=(slots, buffers, shapes, first, handed),
        _again=again,
        launches=len(rows[1]),
    )
    return made, words


def _fresh(number: int, shapes: tuple[tuple[int, ...], ...], buffers: list[Any], workspace: int) -> Fresh:
    if number < 0:
        return Fresh((workspace,), (1,), "uint8")
    return Fresh(shapes[number], dense(shapes[number]), buffers[number][3])
