"""torch modules and functions as blueprints, through torch.export.

The graph of torch.export (its composite operators whole) is read node by node; each operator has a rule in
`esper_ir/importers/aten/`. Operators without a rule are decomposed by torch first, and everything that
has no counterpart even then is reported at once, with its line in the user's module.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from esper_ir.builder import Builder
from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint
from esper_ir.importers.context import Context, Precision
from esper_ir.importers.torch_alias import functional_name, plain, writes
from esper_ir.importers.torch_dims import Dims, Dynamic, plan, shapes_for_export, widened
from esper_ir.importers.torch_reading import RULES, SKIPPED, Reading, region
from esper_ir.importers.torch_source import failed


class _Function(nn.Module):
    """A function as a module with its signature; those of torch itself have none that can be read."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        try:
            inspect.signature(function)
        except ValueError:
            self.forward = lambda *inputs: function(*inputs)
        else:
            self.forward = function  # type: ignore[method-assign]


def precision_in_force() -> Precision:
    """What torch's switches say now about products of float32 on the card."""
    backends: Any = torch.backends
    found = (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision)
    return Precision(*("tf32" if value == "tf32" else "ieee" for value in found))


def from_torch(
    module: nn.Module | Callable[..., Any],
    example_inputs: Sequence[Any] | Tensor,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic: Dynamic = None,
    name: str | None = None,
    updates: bool = True,
) -> Blueprint:
    """The blueprint of a module or function called with `example_inputs`, in the mode (train, eval) it is in.

    Parameters and buffers keep their names; their values are in `blueprint.values` (`to_torch` starts from
    them, `save` writes them). A parameter under several names is one leaf under the first. Frozen parameters
    are left out of `differentiable`. `dynamic`: an axis or several that vary in every input, or {input: axes}
    with axes an axis, several, or {axis: name} and {axis: (name, DimSpec)}; everything else is static.
    `updates`: buffers that a call writes (running statistics in training) get their next values from the
    blueprint's `updates`; without it, and for counters that nothing reads, they are listed as left out.
    float32 products get the precision in force in torch at the call.

    Raises EsperError E0103, E0405 (torch cannot export it), E0406 and the codes of shape rules (no
    counterpart, every place at once), E0407 (`dynamic`), E0408 (a size that is no dim).
    """
    args = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    held = module if isinstance(module, nn.Module) else _Function(module)
    title = name or _title(module)
    exported, dims, rows = _export(held, args, dict(kwargs or {}), dynamic, title)
    program = _decomposed(exported, title)
    reading = Reading(program, held, Context(Builder(title), precision_in_force(), updates), dims)
    reading.leaves(rows)
    reading.nodes(program.graph)
    return reading.finish(lambda: _metadata(module, held, reading.context))


def _title(module: Any) -> str:
    """The name of a class or function."""
    named = type(module) if isinstance(module, nn.Module) else module
    return getattr(named, "__name__", None) or type(named).__name__


def _positional(forward: Callable[..., Any]) -> str | None:
    kinds = inspect.signature(forward).parameters.values()
    return next((p.name for p in kinds if p.kind is inspect.Parameter.VAR_POSITIONAL), None)


def _names(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    """Tensors among the arguments, with the name of the parameter of `forward` that they belong to."""
    bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    out: list[tuple[str, Tensor]] = []
    for label, value in bound.items():
        found = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        out += [(label if len(found) == 1 else f"{label}_{i}", t) for i, t in enumerate(found)]
    return out


def _export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: Dynamic, title: str
) -> tuple[ExportedProgram, Dims, list[dict[int, str]]]:
    try:
        tensors = _names(module.forward, args, kwargs)
    except TypeError as error:
        takes = ", ".join(inspect.signature(module.forward).parameters)
        message = f"{title}.forward does not take these inputs: {error}"
        raise EsperError("E0405", message, node=title, hint=f"it takes: {takes or 'nothing'}") from None
    dims, rows = plan(dynamic, tensors)
    args, kwargs = widened((args, kwargs), rows)
    shapes = shapes_for_export(module.forward, args, kwargs, dims, rows, _positional(module.forward))
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:  # the module's own code runs here: whatever it raises is its answer
            raise failed(title, error) from error
    return program, dims, rows


def _readable(graph: fx.Graph) -> bool:
    """Every operator has a rule, in regions without gradients too."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    return all(_known(node, place) for node in graph.nodes)


def _known(node: Node, place: Mapping[Node, int]) -> bool:
    """Read without decomposition: a rule, and no write that somebody else sees."""
    if node.op != "call_function":
        return True
    inner = region(node)
    if inner is not None:
        return _readable(inner.graph)
    if not hasattr(node.target, "_schema"):
        return not isinstance(node.target, HigherOrderOperator)
    name = str(node.target)
    if name in SKIPPED:
        return True
    if not writes(node):
        return name in RULES
    if name in RULES and RULES[name].convert.__name__.startswith("writes_"):
        return True
    written: Any = node.args[0]
    counted = (
        written.op == "placeholder"
        and not node.users
        and not any(place[u] > place[node] for u in written.users)
    )
    return counted or (functional_name(node) in RULES and plain(node, node.graph, place))


def _decomposed(program: ExportedProgram, title: str) -> ExportedProgram:
    """The program itself when every operator has a rule; else decomposed by torch, known operators whole."""
    if _readable(program.graph):
        return program
    table = torch.export.default_decompositions()
    for op in [op for op in table if str(op) in RULES]:
        del table[op]
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        try:
            return program.run_decompositions(table)
        except Exception as error:  # torch's decompositions raise whatever they meet
            raise failed(title, error) from error


def _metadata(module: Any, held: nn.Module, context: Context) -> dict[str, Any]:
    precision = context.precision
    made: dict[str, Any] = {
        "imported": {
            "from": f"torch {torch.__version__.partition('+')[0]}",
            "module": _title(module),
            "mode": "train" if held.training else "eval",
            "precision": {"matmul": precision.matmul, "convolution": precision.convolution},
        }
    }
    left = sorted(context.updated - set(context.updates))
    if left:
        made["imported"]["left_out"] = left
    return made
