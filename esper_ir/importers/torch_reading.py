"""One exported program becoming a blueprint: leaves, nodes by the rules of `importers/aten`, outputs."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from esper_ir.builder import Value
from esper_ir.diagnostics import Diagnostic, EsperError
from esper_ir.discover import collect
from esper_ir.graph import Blueprint, Leaf
from esper_ir.importers import aten
from esper_ir.importers.context import Context, Rule, unsupported
from esper_ir.importers.torch_alias import functional_name, writes
from esper_ir.importers.torch_dims import Dims, bind
from esper_ir.importers.torch_source import finding, refused
from esper_ir.importers.torch_values import constant, dtype_of, initialiser
from esper_ir.text import NAME
from esper_ir.types import Dim, DType, TensorType
from esper_ir.verify import typed

RULES: Mapping[str, Rule] = collect(aten, "RULES")
"""How every operator of torch that has a counterpart is written here, by torch's name of it."""
UNKNOWN = object()
"""The value of a node after an error: what depends on it is passed over in silence."""
SKIPPED = frozenset({
    "aten.sym_size.int", "aten.sym_stride.int", "aten.sym_numel.default", "aten._assert_async.msg",
    "aten._assert_scalar.default", "aten._assert_tensor_metadata.default", "aten.sym_constrain_range.default",
    "aten.sym_constrain_range_for_size.default", "aten._assert_async.default",
    "aten._functional_assert_async.msg",
})  # fmt: skip


def region(node: Node) -> fx.GraphModule | None:
    """The graph that a node runs with gradients switched on or off, else None."""
    if str(node.target) != "wrap_with_set_grad_enabled":
        return None
    inner: Any = node.args[1]
    return getattr(node.graph.owning_module, inner.target)


class Reading:
    """One exported program becoming a blueprint."""

    def __init__(self, program: ExportedProgram, module: nn.Module, context: Context, dims: Dims) -> None:
        self.program, self.module, self.context, self.dims = program, module, context, dims
        self.env: dict[Node, Any] = {}
        self.findings: list[Diagnostic] = []
        self.values: dict[str, Tensor] = {}
        self.frozen: set[str] = set()
        self.inputs: list[Leaf] = []
        self.kept: list[Leaf] = []
        self.buffers: dict[str, Node] = {}
        self.first = self._first_names()

    # Leaves.

    def leaves(self, rows: Sequence[dict[int, str]]) -> None:
        """Inputs in the order of the call, then parameters, buffers and constants that something reads."""
        holders = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        specs = self.program.graph_signature.input_specs
        first = self.first
        place = {label: i for i, label in enumerate(first)}
        given = [(s, holders[s.arg.name]) for s in specs if s.arg.name in holders]
        given.sort(key=lambda pair: place.get(first.get(pair[0].target or "", ""), -1))
        inputs = [
            n for s, n in given if s.kind is InputKind.USER_INPUT and isinstance(n.meta.get("val"), Tensor)
        ]
        bind(self.dims, rows, [n.meta["val"] for n in inputs])
        builder = self.context.builder
        for label, spec in self.dims.specs.items():
            builder.dim(label, min=spec.min, max=spec.max, tune=spec.tune, multiple_of=spec.multiple_of)
        taken: set[str] = {first.get(s.target, s.target) for s, _ in given if s.target}
        made: dict[str, Value] = {}
        for spec, node in given:
            if spec.kind is InputKind.USER_INPUT:
                if node in inputs:
                    self._guarded(node, lambda n=node: self._input(n, taken))
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                if node.users:
                    self._guarded(node, lambda s=spec, n=node: self._held(s, n, made))

    def _guarded(self, node: Node, make: Callable[[], Any]) -> None:
        try:
            self.env[node] = make()
        except EsperError as error:
            self.env[node] = UNKNOWN
            self.findings.append(finding(node, error))

    def _first_names(self) -> dict[str, str]:
        """The first name of every parameter and buffer that is held under several."""
        owner: dict[int, str] = {}
        out: dict[str, str] = {}
        held = (self.module.named_parameters, self.module.named_buffers)
        for every in held:
            for label, tensor in every(remove_duplicate=False):
                out[label] = owner.setdefault(id(tensor), label)
        return out

    def _input(self, node: Node, taken: set[str]) -> Value:
        label = node.name
        while label in taken:
            label += "_"
        taken.add(label)
        meta = node.meta["val"]
        kind = TensorType(dtype_of(meta, label), tuple(self.dims.of(s) for s in meta.shape))
        self.inputs.append(Leaf(label, "input", kind))
        return self.context.builder._leaf(self.inputs[-1])

    def _held(self, spec: Any, node: Node, made: dict[str, Value]) -> Value:
        label = self._label(spec.target)
        if label in made:
            return made[label]
        tensor = self._tensor(spec)
        kind = TensorType(dtype_of(tensor, label), tuple(Dim.of(s) for s in tensor.shape))
        if spec.kind is InputKind.CONSTANT_TENSOR:
            leaf = constant(label, tensor)
        else:
            path, _, last = spec.target.rpartition(".")
            holder = self._submodule(path)
            role = "param" if spec.kind is InputKind.PARAMETER else "buffer"
            leaf = Leaf(label, role, kind, initialiser(holder if role == "param" else None, last, tensor))
            if role == "param" and not tensor.requires_grad:
                self.frozen.add(label)
        self.values[label] = tensor.detach().cpu().clone()
        self.kept.append(leaf)
        if leaf.kind == "buffer":
            self.buffers[label] = node
        made[label] = self.context.builder._leaf(leaf)
        return made[label]

    def _label(self, target: Any) -> str:
        """The name of a leaf: the first of the names that torch has for the tensor."""
        label: str = self.first.get(target) or str(target)
        return label if NAME.fullmatch(label) else re.sub(r"[^A-Za-z0-9_.]", "_", label)

    def _submodule(self, path: str) -> nn.Module | None:
        try:
            return self.module.get_submodule(path)
        except AttributeError:
            return None

    def _tensor(self, spec: Any) -> Tensor:
        if spec.kind is InputKind.CONSTANT_TENSOR or spec.target in self.program.constants:
            return self.program.constants[spec.target]  # type: ignore[return-value]
        return self.program.state_dict[spec.target]

    # Nodes.

    def nodes(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                self._guarded(node, lambda n=node: self._node(n))
            elif node.op == "get_attr":
                held = getattr(graph.owning_module, str(node.target))
                self.env[node] = self._constant(str(node.target), held) if isinstance(held, Tensor) else held

    def _constant(self, label: str, tensor: Tensor) -> Value:
        """A tensor that stands in the graph itself."""
        taken = {leaf.name for leaf in (*self.inputs, *self.kept)}
        while label in taken:
            label += "_"
        self.kept.append(constant(label, tensor))
        self.values[label] = tensor.detach().cpu().clone()
        return self.context.builder._leaf(self.kept[-1])

    def _inlined(self, node: Node, inner: fx.GraphModule) -> list[Any]:
        """A region with its own switch for gradients; without them its results are cut off."""
        enabled, _, *given = node.args
        places = [n for n in inner.graph.nodes if n.op == "placeholder"]
        for held, outside in zip(places, given, strict=True):
            self.env[held] = self._arguments(outside)
        self.nodes(inner.graph)
        (end,) = [n for n in inner.graph.nodes if n.op == "output"]
        made = self._arguments(end.args[0])
        if enabled:
            return made
        floating = [isinstance(v, Value) and v.type.dtype.is_floating for v in made]
        return [self.context.op("detach", v) if f else v for v, f in zip(made, floating, strict=True)]

    def _node(self, node: Node) -> Any:
        val = node.meta.get("val")
        if any(self.env.get(n) is UNKNOWN for n in node.all_input_nodes):
            return UNKNOWN
        if isinstance(val, (int, float, bool)):
            return val
        if isinstance(val, torch.SymInt):
            return self.dims.of(val)
        inner = region(node)
        if inner is not None:
            return self._inlined(node, inner)
        if str(node.target) in SKIPPED or not (node.users or writes(node)):
            return None
        if node.target is operator.getitem:
            return self._part(*self._arguments(node.args))
        arguments, named = self._arguments(node.args), self._arguments(node.kwargs)
        metas = val if isinstance(val, (tuple, list)) else (val,)
        self.context.shapes = tuple(self._shape(m) for m in metas)
        convert = self._rule(node).convert
        try:
            inspect.signature(convert).bind(self.context, *arguments, **named)
        except TypeError as error:
            raise unsupported(f"this form of it has no counterpart: {error}") from None
        return convert(self.context, *arguments, **named)

    def _part(self, whole: Any, index: int) -> Any:
        if whole[index] is None:
            raise unsupported(f"output {index} has no counterpart")
        return whole[index]

    def _rule(self, node: Node) -> Rule:
        rule = RULES.get(str(node.target))
        if rule is None and hasattr(node.target, "_schema") and writes(node):
            written: Any = node.args[0]
            if written.op == "placeholder":
                return Rule("update", lambda b, x, *rest, **more: b.update(x, lambda: self._written(node)))
            rule = RULES.get(functional_name(node))
        if rule is None:
            raise unsupported(
                "no operator of the language does this", hint="`esper-forge ops` lists the operators"
            )
        return rule

    def _written(self, node: Node) -> Value:
        """The new value of a buffer that an operator writes into."""
        rule = RULES[functional_name(node)]
        return rule.convert(self.context, *self._arguments(node.args), **self._arguments(node.kwargs))

    def _shape(self, meta: Any) -> tuple[Dim, ...] | None:
        if not isinstance(meta, Tensor):
            return None
        found = [self.dims.maybe(s) for s in meta.shape]
        return None if any(d is None for d in found) else tuple(d for d in found if d is not None)

    def _arguments(self, given: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return [self._arguments(v) for v in given]
        if isinstance(given, Mapping):
            return {k: self._arguments(v) for k, v in given.items()}
        if isinstance(given, Node):
            return self.env.get(given, UNKNOWN)
        if isinstance(given, torch.dtype):
            return DType.parse(str(given).removeprefix("torch."))
        return given

    # The end.

    def finish(self, told: Callable[[], dict[str, Any]]) -> Blueprint:
        """The outputs, and the blueprint without the nodes that none of them needs."""
        outputs = [] if self.findings else self._outputs()
        if self.findings:
            raise refused(self.context.builder.name, self.findings)
        if not outputs:
            raise unsupported("the module returns no tensor")
        metadata = told()
        self.context.builder.metadata.update(metadata)
        seeds = () if self.context.seed is None else (self.context.seed,)
        made = self.context.builder.build(*outputs, updates=self.context.updates, random=seeds)
        live = typed(made).nodes
        read = {r for n in live for r in n.tensors}
        leaves = tuple(v for v in made.leaves if v.kind == "input" or v.name in read)
        idle = sorted(v.name for v in made.leaves if v.kind == "param" and v not in leaves)
        if idle:
            metadata["imported"]["unused"] = idle
        ids = {n.id for n in live}
        nodes = tuple(n for n in made.nodes if n.id in ids)
        values = {v.name: self.values[v.name] for v in leaves if v.name in self.values}
        wanted = self._differentiable(leaves)
        return replace(
            made, leaves=leaves, nodes=nodes, differentiable=wanted, values=values, metadata=metadata
        )

    def _differentiable(self, leaves: Sequence[Leaf]) -> tuple[str, ...] | None:
        """None, which means all that can be, unless a parameter is frozen."""
        if not self.frozen:
            return None
        found = [v for v in leaves if v.kind in ("input", "param") and v.type.dtype.is_floating]
        return tuple(v.name for v in found if v.name not in self.frozen)

    def _outputs(self) -> list[Value]:
        """What the module returns, in order; None is left out, and a value twice is copied."""
        (end,) = [n for n in self.program.graph.nodes if n.op == "output"]
        found: list[Value] = []
        specs = self.program.graph_signature.output_specs
        for spec, given in zip(specs, end.args[0], strict=True):  # type: ignore[arg-type]
            value = self._arguments(given)
            if spec.kind is OutputKind.BUFFER_MUTATION:
                self._update(spec.target, value)
            elif spec.kind is not OutputKind.USER_OUTPUT:
                self.findings.append(finding(end, unsupported(f"the module writes into {spec.target}")))
            elif isinstance(value, Value):
                found.append(self._own(value, found))
            elif value is not None:
                self.findings.append(
                    finding(end, unsupported(f"the module returns {value!r}", "return tensors"))
                )
        for label in self._counters() & set(self.context.updates):
            del self.context.updates[label]
        seen = list(found)
        for label, value in self.context.updates.items():
            cut = self.context.op("detach", value) if value.type.dtype.is_floating else value
            self.context.updates[label] = self._own(cut, seen)
            seen.append(self.context.updates[label])
        return found

    def _update(self, target: Any, value: Any) -> None:
        buffer = self._label(target)
        self.context.updated.add(buffer)
        if self.context.training_updates and isinstance(value, Value):
            self.context.updates[buffer] = value

    def _counters(self) -> set[str]:
        """Whole numbers that only their own next value reads."""
        (end,) = [n for n in self.program.graph.nodes if n.op == "output"]

        def own(user: Node) -> bool:
            return set(user.users) <= {end} and (writes(user) or end in user.users)

        idle = [n for n, held in self.buffers.items() if all(own(u) for u in held.users)]
        return {n for n in idle if not self.buffers[n].meta["val"].is_floating_point()}

    def _own(self, value: Value, found: list[Value]) -> Value:
        """A value that is no leaf and no other output."""
        leaves = {leaf.name for leaf in (*self.inputs, *self.kept)}
        if value.name not in leaves and all(v.name != value.name for v in found):
            return value
        return self.context.op("cast", value, dtype=value.type.dtype)
