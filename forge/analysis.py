"""Static analysis before compiling: patterns that are legal and usually a mistake. Warnings unless denied.

Each check reads the typed graph and yields findings that mark a node or leaf. Sizes of dims are the ones to
tune for, where any are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from esper_ir.diagnostics import Diagnostic, EsperError
from esper_ir.graph import Blueprint, Graph, Node
from esper_ir.opdef import Contraction, NotDifferentiable, Opaque
from esper_ir.registry import OPS
from esper_ir.types import Dim, DType
from forge.target import Target

LONG = 256
"""Terms from which on a sum in 16 bits loses digits: their rounding is 2^-8 or 2^-11."""
SATURATING = frozenset({"sigmoid", "tanh", "softmax", "hardtanh", "hardsigmoid", "softsign", "erf", "relu6"})
RUNNING = frozenset({"cumsum", "cumprod", "logcumsumexp"})
CHAIN = 32
"""Additions one after the other in a 16-bit type."""
PRODUCTS = frozenset({"matmul", "linear", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d"})
LEAST_FLOPS = 1e7
"""Products below this are over before their intensity matters."""


@dataclass(frozen=True)
class Subject:
    """What is looked at. `sizes` binds every dim to the largest size to tune for, else to its minimum."""

    blueprint: Blueprint
    graph: Graph
    target: Target | None
    sizes: Mapping[str, int]

    def maker(self, ref: object, *ops: str) -> Node | None:
        """The node behind an operand, when it is one of these operators."""
        node = self.graph.by_output.get(ref) if isinstance(ref, str) else None
        return node if node is not None and (not ops or node.op in ops) else None


def analyse(blueprint: Blueprint, graph: Graph, target: Target | None = None) -> tuple[Diagnostic, ...]:
    """All findings, in the order of the checks; without a target those that need none."""
    sizes = {n: max(d.tune, default=d.min) for n, d in blueprint.dims.items()}
    subject = Subject(blueprint, graph, target, sizes)
    return tuple(f for check in CHECKS for f in check(subject))


def deny(findings: tuple[Diagnostic, ...], codes: tuple[str, ...]) -> None:
    """Raise the first finding whose code is listed ("all": any), with all that are."""
    refused = [f for f in findings if "all" in codes or f.code in codes]
    if refused:
        first = refused[0]
        raise EsperError(
            first.code, first.message, node=first.node, hint=first.hint, diagnostics=tuple(refused)
        )


def refuse_larger(blueprint: Blueprint, graph: Graph, target: Target) -> None:
    """E0548 where what must be in memory at once, the leaves and the results, is more than the target has at
    the smallest sizes that the blueprint allows.
    """
    if not target.memory_bytes:
        return
    least = {n: d.min for n, d in blueprint.dims.items()}
    total = sum(leaf.type.nbytes.value(least) for leaf in blueprint.leaves)
    total += sum(graph.types[v].nbytes.value(least) for v in dict.fromkeys(graph.outputs))
    if total > target.memory_bytes:
        what = f"{total / 1e9:.0f} GB of tensors at the smallest sizes"
        hint = "split the block, or name a target with more memory"
        raise EsperError("E0548", f"{what}, {target.name} has {target.memory_bytes / 1e9:.0f} GB", hint=hint)


def _warning(code: str, message: str, node: str | None, hint: str) -> Diagnostic:
    return Diagnostic(code, message, node=node, level="warning", hint=hint)


# Parameters.


def _reached(graph: Graph, flows: Callable[[Node, str], bool]) -> set[str]:
    """Values from which an output can be reached, over the operands that `flows` lets through."""
    reached = set(graph.outputs)
    for node in reversed(graph.nodes):
        if reached & set(node.outputs):
            reached |= {v for v in node.tensors if flows(node, v)}
    return reached


def _dead_parameters(s: Subject) -> Iterator[Diagnostic]:
    reached = _reached(s.graph, lambda node, value: True)
    for leaf in s.blueprint.of_kind("param"):
        if leaf.name not in reached:
            hint = "remove it, or connect it"
            yield _warning("E0501", "no output depends on this parameter", leaf.name, hint)


def _zero_gradients(s: Subject) -> Iterator[Diagnostic]:
    """Every path from the parameter runs through truth values, positions or an end of gradients."""
    types = s.graph.types

    def flows(node: Node, value: str) -> bool:
        stops = isinstance(OPS[node.op].vjp, NotDifferentiable) or node.op == "detach"
        return not stops and types[value].dtype.is_floating and any(t.dtype.is_floating for t in node.types)

    alive, used = _reached(s.graph, flows), _reached(s.graph, lambda node, value: True)
    for leaf in s.blueprint.of_kind("param"):
        if leaf.name in used and leaf.name not in alive and leaf.type.dtype.is_floating:
            hint = "make it a buffer, or use it where gradients pass"
            yield _warning("E0504", "the gradient of this parameter is always zero", leaf.name, hint)


# Numbers that cancel or overflow.


def _log_of_softmax(s: Subject) -> Iterator[Diagnostic]:
    for node in s.graph:
        if node.op == "log" and s.maker(node.inputs[0], "softmax"):
            message = "log of softmax loses small probabilities"
            yield _warning("E0502", message, node.id, "use log_softmax")


def _squared(s: Subject, ref: object) -> str | None:
    """The value whose square an operand is."""
    node = s.maker(ref, "square", "mul", "pow")
    if node is None:
        return None
    same = node.op == "square" or (node.op == "mul" and node.inputs[0] == node.inputs[-1])
    power = node.op == "pow" and node.inputs[1] in (2, 2.0)
    found = node.inputs[0] if same or power else None
    return found if isinstance(found, str) else None


def _mean_of_squares(s: Subject) -> Iterator[Diagnostic]:
    """mean(x x) - mean(x)^2: both are large where the mean is, and little is left."""
    for node in s.graph:
        if node.op != "sub":
            continue
        first, mean = s.maker(node.inputs[0], "mean"), s.maker(_squared(s, node.inputs[1]), "mean")
        inside = _squared(s, first.inputs[0]) if first is not None else None
        if mean is not None and inside is not None and inside == mean.inputs[0]:
            message = "the mean of squares minus the square of the mean cancels"
            yield _warning("E0505", message, node.id, "use var, which subtracts the mean first")


def _bare_exponential(s: Subject) -> Iterator[Diagnostic]:
    """sum(exp(x)) overflows from x = 89 on unless the largest x was subtracted."""
    for node in s.graph:
        made = s.maker(node.inputs[0], "exp") if node.op == "sum" else None
        if made is None or _below_maximum(s, made.inputs[0]):
            continue
        message = "a sum of exponentials without the maximum subtracted overflows"
        yield _warning("E0506", message, node.id, "use softmax or logsumexp")


def _below_maximum(s: Subject, ref: object) -> bool:
    """x - amax(x), also through a reshape, or something that is never positive."""
    node = s.maker(ref)
    if node is None:
        return False
    if node.op == "neg":
        return s.maker(node.inputs[0], "abs", "square", "relu", "softplus") is not None
    if node.op in ("log_softmax", "logsigmoid"):
        return True
    top = s.maker(node.inputs[1]) if node.op == "sub" else None
    while top is not None and top.op in ("reshape", "expand", "detach", "where", "cast", "unsqueeze"):
        top = s.maker(next((r for r in reversed(top.inputs) if isinstance(r, str)), None))
    return top is not None and top.op in ("amax", "max", "logsumexp")


def _half_accumulation(s: Subject) -> Iterator[Diagnostic]:
    """Running sums over a long axis, and long chains of additions, that are kept in 16 bits."""
    depth: dict[str, int] = {}
    for node in s.graph:
        if not node.types or node.types[0].dtype not in (DType.bfloat16, DType.float16):
            continue
        if node.op in RUNNING and node.types[0].shape[node.attr("dim")].value(s.sizes) >= LONG:
            yield _warning("E0503", "a running sum in 16 bits over a long axis", node.id, "cast first")
        if node.op == "add":
            depth[node.id] = 1 + max((depth.get(r, 0) for r in node.tensors), default=0)
            if depth[node.id] == CHAIN:
                message = f"{CHAIN} additions one after the other in 16 bits"
                yield _warning("E0503", message, node.id, "add in float32 and cast once")


def _saturating_chain(s: Subject) -> Iterator[Diagnostic]:
    """A saturating function of a saturating function: gradients are products of small slopes."""
    for node in s.graph:
        before = s.maker(node.inputs[0], *SATURATING) if node.op in SATURATING else None
        if before is not None:
            message = f"{node.op} of {before.op}: both saturate, gradients vanish"
            yield _warning("E0507", message, node.id, "keep one of the two, or normalise between them")


# What a block is for, and where it runs.


def _seed_shape(s: Subject) -> Iterator[Diagnostic]:
    """A seed adds to the layer that it grows on: its result has the type of its operand."""
    offered = s.blueprint.name.startswith("seed") or s.blueprint.metadata.get("role") == "seed"
    inputs = s.blueprint.of_kind("input")
    if not offered or not inputs or not s.graph.outputs:
        return
    made, given = s.graph.types[s.graph.outputs[0]], inputs[0].type
    if made != given:
        message = f"a seed that makes {made} of {given} fits into no layer"
        yield _warning("E0508", message, s.graph.outputs[0], "end in the shape and dtype of the input")


def _working_set(s: Subject) -> Iterator[Diagnostic]:
    """Leaves, their gradients and what a library call or an output keeps, at the sizes to tune for."""
    if s.target is None or not s.target.memory_bytes:
        return
    kept = set(s.graph.outputs)
    for node in s.graph:
        if isinstance(OPS[node.op].lowering, (Contraction, Opaque)):
            kept |= set(node.outputs)
    types = s.graph.types
    total = sum(2 * leaf.type.nbytes.value(s.sizes) for leaf in s.blueprint.leaves)
    total += sum(types[v].nbytes.value(s.sizes) for v in kept if v not in s.graph.inputs)
    if total > s.target.memory_bytes:
        message = (
            f"about {total / 1e9:.0f} GB at the tuned sizes, {s.target.name} has "
            f"{s.target.memory_bytes / 1e9:.0f} GB"
        )
        yield _warning("E0509", message, None, "tune for smaller sizes, or split the block")


def _intensity(s: Subject) -> Iterator[Diagnostic]:
    """Products that mostly read parameters and do below a tenth of the work per byte at which the roofline
    bends. (Low ranks and depthwise windows are slim by design: there the bytes are those of the data.)
    """
    target, params = s.target, {leaf.name for leaf in s.blueprint.of_kind("param")}
    if target is None or not target.bf16_TFLOPs or not target.copy_TBps or target.kind == "cpu":
        return
    ridge, types = target.bf16_TFLOPs / target.copy_TBps, s.graph.types
    for node in s.graph:
        if node.op not in PRODUCTS:
            continue
        names = (*node.tensors, *node.outputs)
        moved = sum(types[v].nbytes.value(s.sizes) for v in names)
        read = sum(types[v].nbytes.value(s.sizes) for v in names if v in params)
        flops = _flops(s, node)
        if flops >= LEAST_FLOPS and 2 * read > moved and flops < moved * ridge / 10:
            message = (
                f"{flops / moved:.1f} operations per byte; the roofline of {target.name} bends at {ridge:.0f}"
            )
            yield _warning("E0518", message, node.id, "tune for more rows, or fold it into a neighbour")


def _flops(s: Subject, node: Node) -> int:
    op = OPS[node.op]
    operands = [s.graph.types[r] if isinstance(r, str) else r for r in node.inputs]
    cost = op.cost(operands, node.types, dict(node.attrs)) if op.cost else Dim()
    return cost.value(s.sizes)


CHECKS = (
    _dead_parameters, _zero_gradients, _log_of_softmax, _half_accumulation, _mean_of_squares,
    _bare_exponential, _saturating_chain, _seed_shape, _working_set, _intensity,
)  # fmt: skip
