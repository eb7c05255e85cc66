"""Movement without arithmetic as strided views, so that it costs nothing where a kernel can read through
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from esper_ir.graph import Graph, Node
from esper_ir.opdef import Creation, Movement
from esper_ir.ops.movement import divide
from esper_ir.ops.windows import outside
from esper_ir.registry import OPS
from esper_ir.types import Dim

ONE = Dim.of(1)
ZERO = Dim()


@dataclass(frozen=True)
class Window:
    """Position p along `axis` reads element floor((p * mul + add) / div) of `size`, where there is one."""

    axis: int
    mul: int
    add: int
    div: int
    size: Dim


@dataclass(frozen=True)
class View:
    """`base` (a value with memory of its own) read from element `offset` on with `strides` in elements, one
    per axis of `shape`. Where a position along an axis of `windows` has no element, the value is `fill`.
    """

    base: str
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim = ZERO
    windows: tuple[Window, ...] = ()
    fill: float | int = 0


def dense_strides(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Row-major strides in elements; an axis of size 1 has stride 0."""
    return _dense(tuple(shape))


@lru_cache(1 << 14)
def _dense(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    out: list[Dim] = []
    step = ONE
    for size in reversed(shape):
        out.append(ZERO if size == ONE else step)
        step = step * size
    return tuple(reversed(out))


def is_dense(view: View) -> bool:
    return not view.windows and view.offset == ZERO and view.strides == dense_strides(view.shape)


def movement(node: Node) -> str | None:
    """Kind of a movement node, else None."""
    lowering = OPS[node.op].lowering
    return lowering.kind if isinstance(lowering, Movement) else None


def results(graph: Graph, known: Mapping[str, View], made: Set[str]) -> set[str]:
    """What is stored for the outputs: the values behind them, and those outputs that are more than one of
    `made`, whole, in another shape. Of several shapes of one value the first lies in its memory.
    """
    homes = {known[o].base: o for o in reversed(graph.outputs)}
    shapes = made - set(graph.outputs)
    return set(homes) | {
        o for o in graph.outputs if homes[known[o].base] != o or not _again(graph, o, known[o], shapes)
    }


def _again(graph: Graph, name: str, view: View, of: Set[str]) -> bool:
    whole = is_dense(view) and graph.types[name].numel == graph.types[view.base].numel
    return view.base in of and whole


def views(graph: Graph) -> Mapping[str, View]:
    """How each value can be read: through its base where it is a view, from its own memory otherwise."""
    out: dict[str, View] = {n: View(n, t.shape, dense_strides(t.shape)) for n, t in graph.inputs.items()}
    for node in graph:
        for name, kind in zip(node.outputs, node.types, strict=True):
            out[name] = View(name, kind.shape, dense_strides(kind.shape))
        moved = _move(node, out[node.tensors[0]]) if movement(node) else None
        if moved is not None and moved.windows and _is_number(graph, moved.base):
            moved = None
        if moved is not None:
            out[node.id] = moved
    return out


def _is_number(graph: Graph, name: str) -> bool:
    """A value that no kernel reads from memory: outside its window it is another one."""
    maker = graph.by_output.get(name)
    return maker is not None and isinstance(OPS[maker.op].lowering, Creation)


def _move(node: Node, source: View) -> View | None:
    shape = node.types[0].shape
    kind = movement(node)
    if kind == "window":
        return _window(node, source)
    if source.windows:
        return _moved_windows(node, source)
    if kind == "expand":
        lead = len(shape) - len(source.shape)
        strides = [ZERO] * lead + [
            ZERO if old == ONE else stride for old, stride in zip(source.shape, source.strides, strict=True)
        ]
        return View(source.base, shape, tuple(strides), source.offset)
    if kind == "permute":
        order = permutation(node, len(shape))
        return View(source.base, shape, tuple(source.strides[i] for i in order), source.offset)
    return _part(node, source) if kind in ("slice", "flip") else _reshape(source, shape)


def _window(node: Node, source: View) -> View | None:
    """One more window; the same number has to stand outside of all."""
    axis, attr = int(node.attr("dim")), node.attr
    fill = outside(dict(node.attrs), node.types[0].dtype)
    taken = any(w.axis == axis for w in source.windows)
    if taken or (source.windows and source.fill != fill):
        return None
    window = Window(axis, attr("mul"), attr("add"), attr("div"), source.shape[axis])
    shape, windows = node.types[0].shape, (*source.windows, window)
    return View(source.base, shape, source.strides, source.offset, windows, fill)


def _moved_windows(node: Node, source: View) -> View | None:
    """A view of a view with windows: they follow an exchange of axes, new axes in front, and a part of
    another axis.
    """
    kind, shape = movement(node), node.types[0].shape
    plain = _move(node, View(source.base, source.shape, source.strides, source.offset))
    cut = kind == "slice" and all(w.axis != int(node.attr("dim")) for w in source.windows)
    if plain is None or not (cut or kind in ("permute", "expand")):
        return None
    places = {axis: axis + len(shape) - len(source.shape) for axis in range(len(source.shape))}
    if kind == "permute":
        places = {old: new for new, old in enumerate(permutation(node, len(shape)))}
    moved = tuple(Window(places[w.axis], w.mul, w.add, w.div, w.size) for w in source.windows)
    return View(plain.base, shape, plain.strides, plain.offset, moved, source.fill)


def _part(node: Node, source: View) -> View:
    """Every `step`-th element from `start` on along one axis; or the axis read backwards."""
    axis = int(node.attr("dim"))
    stride, size = source.strides[axis], source.shape[axis]
    backwards = movement(node) == "flip"
    start, step = (size - 1, -1) if backwards else (Dim.of(node.attr("start")), int(node.attr("step")))
    shape = node.types[0].shape
    strides = tuple(ZERO if n == ONE else s for n, s in zip(shape, source.strides, strict=True))
    moved = (*strides[:axis], strides[axis] * step, *strides[axis + 1 :])
    return View(source.base, shape, moved, source.offset + stride * start)


def permutation(node: Node, rank: int) -> tuple[int, ...]:
    """Axis order of a permute node: output axis i is input axis order[i]."""
    return tuple(int(d) % rank for d in node.attr("dims"))


def _reshape(source: View, shape: tuple[Dim, ...]) -> View | None:
    """A run of memory reshapes freely; otherwise axes may be split, and joined where they are one run."""
    if source.strides == dense_strides(source.shape):
        return View(source.base, shape, dense_strides(shape), source.offset)
    old = [(size, stride) for size, stride in zip(source.shape, source.strides, strict=True) if size != ONE]
    steps = _regrouped(old, [size for size in shape if size != ONE])
    if steps is None:
        return None
    remaining = iter(steps)
    strides = tuple(ZERO if size == ONE else next(remaining) for size in shape)
    return View(source.base, shape, strides, source.offset)


def _regrouped(old: Sequence[tuple[Dim, Dim]], sizes: Sequence[Dim]) -> list[Dim] | None:
    """Strides of axes of `sizes` over axes (size, stride) of equal numel; None where they are no view."""
    out: list[Dim] = []
    while sizes:
        found = _least_run([size for size, _ in old], sizes)
        if found is None:
            return None
        run, made = old[: found[0]], sizes[: found[1]]
        if any(outer != step * size for (_, outer), (size, step) in pairwise(run)):
            return None
        out += [step * run[-1][1] for step in dense_strides(made)]
        old, sizes = old[found[0] :], sizes[found[1] :]
    return out


def _least_run(old: Sequence[Dim], new: Sequence[Dim]) -> tuple[int, int] | None:
    """How many of the first axes of both have one numel; None where that cannot be told."""
    if not old:
        return None
    taken, made, have, want = 1, 1, old[0], new[0]
    while have != want:
        if divide(have, want) is not None and made < len(new):
            want, made = want * new[made], made + 1
        elif divide(want, have) is not None and taken < len(old):
            have, taken = have * old[taken], taken + 1
        else:
            return None
    return taken, made
