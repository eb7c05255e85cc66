"""What a graph means: its operators' torch calls, one after the other. Differentiable by torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint, Graph, Node
from esper_ir.infer import bind
from esper_ir.lazy import torch
from esper_ir.ops.rules import torch_dtype
from esper_ir.registry import lookup
from esper_ir.types import Dim, DType, TensorType
from esper_ir.verify import typed

Precision = Literal["declared", "float64"]


def sizes_of(types: Mapping[str, TensorType], values: Mapping[str, Any]) -> dict[str, int]:
    """Size of every dim that stands alone in the shape of some input, read from the tensors.

    Raises EsperError E0402 for a missing value, another rank, or two tensors that disagree.
    """
    sizes: dict[str, int] = {}
    for name, kind in types.items():
        if name not in values:
            raise EsperError("E0402", f"no value for {name!r}", node=name)
        shape = tuple(values[name].shape)
        if len(shape) != kind.rank:
            raise EsperError("E0402", f"{name} is {kind}, the tensor has shape {list(shape)}", node=name)
        for dim, size in zip(kind.shape, shape, strict=True):
            symbol = str(dim)
            if dim == Dim.sym(symbol) and sizes.setdefault(symbol, size) != size:
                raise EsperError(
                    "E0402", f"{name}: {symbol} is {size} here and {sizes[symbol]} elsewhere", node=name
                )
    return sizes


def check_values(
    types: Mapping[str, TensorType], values: Mapping[str, Any], sizes: Mapping[str, int]
) -> None:
    """Every shape evaluates to the tensor's; E0402 otherwise."""
    for name, kind in types.items():
        unknown = {s for d in kind.shape for s in d.symbols()} - set(sizes)
        if unknown:
            raise EsperError("E0402", f"{name}: the size of {min(unknown)!r} is not known", node=name)
        wanted = [d.value(sizes) for d in kind.shape]
        if wanted != list(values[name].shape):
            found = list(values[name].shape)
            raise EsperError("E0402", f"{name}: shape {found} instead of {wanted}", node=name)


def _widened(attrs: Mapping[str, Any]) -> dict[str, Any]:
    wide = DType.float64
    return {k: wide if isinstance(v, DType) and v.is_floating else v for k, v in attrs.items()}


def _given(name: str, kind: TensorType, value: Any, precision: Precision) -> Any:
    wanted = torch_dtype(kind.dtype)
    if precision == "float64":
        return value.to(torch.float64) if kind.dtype.is_floating else value
    if value.dtype is not wanted:
        raise EsperError("E0402", f"{name}: dtype {value.dtype} instead of {kind.dtype.value}", node=name)
    return value


def accept(
    types: Mapping[str, TensorType], values: Mapping[str, Any], precision: Precision = "declared"
) -> tuple[dict[str, Any], dict[str, int]]:
    """The values as the graph takes them, and the sizes of the dims. E0402 when they do not fit."""
    sizes = sizes_of(types, values)
    check_values(types, values, sizes)
    return {name: _given(name, kind, values[name], precision) for name, kind in types.items()}, sizes


def _run(
    node: Node, values: Mapping[str, Any], sizes: Mapping[str, int], precision: Precision
) -> tuple[Any, ...]:
    attrs = bind(dict(node.attrs), sizes)
    if precision == "float64":
        attrs = _widened(attrs)
    operands = [values[r] if isinstance(r, str) else r for r in node.inputs]
    return lookup(node.op).reference(operands, attrs)


def evaluate_all(
    graph: Graph,
    values: Mapping[str, Any],
    *,
    precision: Precision = "declared",
    after: Callable[[Node, tuple[Any, ...], Mapping[str, int]], tuple[Any, ...]] | None = None,
) -> dict[str, Any]:
    """Every value of the graph by name; see `evaluate`. `after` is given each node with its results and the
    sizes of the dims, and returns what takes the place of the results."""
    known, sizes = accept(graph.inputs, values, precision)
    device = next((v.device for v in known.values()), torch.device("cpu"))
    with unmoved(device):
        for node in graph.nodes:
            made = _run(node, known, sizes, precision)
            made = after(node, made, sizes) if after else made
            if not node.tensors:
                made = tuple(value.to(device) for value in made)
            known.update(zip(node.outputs, made, strict=True))
    return known


@contextmanager
def unmoved(device: Any) -> Iterator[None]:
    """Autocast off and float32 products in float32, whatever is set around: nothing ambient changes a
    meaning.
    """
    with ExitStack() as stack:
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        for backend in _narrow():
            stack.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
            backend.fp32_precision = "ieee"
        yield


def _narrow() -> list[Any]:
    """Backends whose float32 products are set to be narrower."""
    found = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    return [backend for backend in found if backend.fp32_precision not in ("none", "ieee")]


def narrowed() -> bool:
    """Whether float32 products are set to be narrower. A trace takes the answer of its own time: torch's
    guards of global state trace again when TF32 is set or unset."""
    return bool(_narrow())


# What torch.compiler.assume_constant_result sets, without half a second of torch._dynamo.
narrowed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def evaluate(
    graph: Graph | Blueprint, values: Mapping[str, Any], *, precision: Precision = "declared"
) -> dict[str, Any]:
    """The outputs by name, from a tensor per leaf (inputs, params, buffers, constants), on their device.

    "declared": every value has its declared dtype. "float64": floating leaves are converted and every
    floating cast is to float64. Raises EsperError E0402 when a value is missing or does not fit.
    """
    typed_graph = typed(graph) if isinstance(graph, Blueprint) else graph
    known = evaluate_all(typed_graph, values, precision=precision)
    names = typed_graph.outputs
    if isinstance(graph, Blueprint):
        return {asked: known[name] for asked, name in zip(graph.outputs, names, strict=True)}
    return {name: known[name] for name in names}
