"""One step of a recurrent layer: composites of products and gates, torch's order of gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import torch
from esper_ir.opdef import Attr, Attrs, ByExpansion, Composite, Emit, Number, OpDef, Operand, Sample, Val
from esper_ir.ops.contraction import PRECISION
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.rules import accept, same, tensor
from esper_ir.types import Dim, TensorType

Types = Sequence[TensorType | Number]


def _infer(gates: int, states: int) -> Callable[[Types, Attrs], tuple[TensorType, ...]]:
    """x [batch, in], `states` of [batch, hidden], weights [gates hidden, in] and [gates hidden, hidden], and
    two biases [gates hidden] or none.
    """

    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        types = [tensor(o, i) for i, o in enumerate(operands)]
        accept(types, "float")
        if len({t.dtype for t in types}) > 1:
            raise EsperError("E0205", f"{types[0]} and others differ in dtype", hint="add a cast")
        x, state = types[0], types[1]
        rest = types[1 + states :]
        if x.rank != 2 or any(t.rank != 2 for t in types[1 : 3 + states]) or len(rest) not in (2, 4):
            hint = "x, states [batch, hidden], two weights, and two biases or none"
            raise EsperError("E0204", f"{', '.join(map(str, types))} are no cell", hint=hint)
        hidden = state.shape[1]
        wanted = [(rest[0], (hidden * gates, x.shape[1])), (rest[1], (hidden * gates, hidden))]
        wanted += [(b, (hidden * gates,)) for b in rest[2:]]
        wanted += [(s, (x.shape[0], hidden)) for s in types[1 : 1 + states]]
        for kind, shape in wanted:
            if kind.rank != len(shape):
                raise EsperError("E0204", f"{kind} does not have rank {len(shape)}")
            for a, b in zip(kind.shape, shape, strict=True):
                same(a, b, "sizes of a recurrent cell", kind.shape, shape)
        return (state,) * states

    return infer


def _half(emit: Emit, x: Operand, w: Operand, bias: Sequence[Operand], attrs: Attrs) -> Val:
    turned = emit("permute", w, dims=(1, 0))
    y = emit("matmul", x, turned, precision=attrs["precision"])
    return emit("add", y, bias[0]) if bias else y


def _gate(emit: Emit, x: Val, at: int, hidden: Dim) -> Val:
    return emit("slice", x, dim=1, start=hidden * at, end=hidden * (at + 1))


def _halves(emit: Emit, inputs: Sequence[Operand], states: int, attrs: Attrs) -> tuple[Val, Val]:
    """What the operand and what the state add, in the compute type."""
    w = inputs[1 + states :]
    own = _half(emit, inputs[0], w[0], w[2:3], attrs)
    past = _half(emit, inputs[1], w[1], w[3:4], attrs)
    return up(emit, own), up(emit, past)


def _expand_lstm(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """c' = s(f) c + s(i) tanh(g); h' = s(o) tanh(c'), of the gates i, f, g, o."""
    hidden, dtype = val(inputs[1]).type.shape[1], val(inputs[1]).type.dtype
    both = emit("add", *_halves(emit, inputs, 2, attrs))
    i, f, g, o = (_gate(emit, both, at, hidden) for at in range(4))
    kept = emit("mul", emit("sigmoid", f), up(emit, val(inputs[2])))
    c = emit("add", kept, emit("mul", emit("sigmoid", i), emit("tanh", g)))
    h = emit("mul", emit("sigmoid", o), emit("tanh", c))
    return to(emit, h, dtype), to(emit, c, dtype)


def _expand_gru(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """n = tanh(in + s(r) hn); h' = n + s(z) (h - n), of the gates r, z, n."""
    h = val(inputs[1])
    hidden = h.type.shape[1]
    own, past = _halves(emit, inputs, 1, attrs)
    r, z = (
        emit("sigmoid", emit("add", _gate(emit, own, at, hidden), _gate(emit, past, at, hidden)))
        for at in range(2)
    )
    held = emit("mul", r, _gate(emit, past, 2, hidden))
    n = emit("tanh", emit("add", _gate(emit, own, 2, hidden), held))
    out = emit("add", n, emit("mul", z, emit("sub", up(emit, h), n)))
    return (to(emit, out, h.type.dtype),)


def _expand_plain(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    both = emit("add", *_halves(emit, inputs, 1, attrs))
    return (to(emit, emit(attrs["nonlinearity"], both), val(inputs[1]).type.dtype),)


def _reference(name: str) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        if name == "lstm_cell":
            x, h, c, *w = inputs
            return tuple(torch.lstm_cell(x, (h, c), *w))
        call = name if name == "gru_cell" else f"rnn_{attrs['nonlinearity']}_cell"
        return (getattr(torch, call)(*inputs),)

    return reference


def _samples(gates: int, states: int, cases: Sequence[Attrs]) -> tuple[Sample, ...]:
    out = []
    for dtype, batch, width, hidden, biased, attrs in (
        ("float32", 3, 5, 4, True, cases[0]), ("float32", 2, 3, 6, False, cases[-1]),
        ("bfloat16", 3, 5, 4, True, cases[0]), ("float64", 3, 5, 4, True, cases[-1]),
    ):  # fmt: skip
        shapes = [
            (batch, width),
            *[(batch, hidden)] * states,
            (gates * hidden, width),
            (gates * hidden, hidden),
        ]
        shapes += [(gates * hidden,)] * 2 if biased else []
        out.append(Sample(tuple(TensorType.of(dtype, s) for s in shapes), attrs))
    return tuple(out)


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    weights = [tensor(o, i) for i, o in enumerate(operands)][1 + len(outputs) :]
    per_row = weights[0].numel + weights[1].numel
    return tensor(operands[0]).shape[0] * per_row * 2


def _cell(name: str, gates: int, states: int, expand: Any, params: tuple[Attr, ...] = (),
          cases: Sequence[Attrs] = ({},)) -> OpDef:  # fmt: skip
    return OpDef(
        name=name, infer=_infer(gates, states), reference=_reference(name), vjp=ByExpansion(),
        lowering=Composite(expand), samples=_samples(gates, states, cases), arity=(3 + states, 5 + states),
        params=(*params, PRECISION), cost=_cost,
        doc=f"torch.{name}(x, state, weights, biases): one step",
    )  # fmt: skip


KIND = Attr("nonlinearity", "str", "tanh", ("tanh", "relu"))

OPS = (
    _cell("lstm_cell", 4, 2, _expand_lstm),
    _cell("gru_cell", 3, 1, _expand_gru),
    _cell("rnn_cell", 1, 1, _expand_plain, (KIND,), ({}, {"nonlinearity": "relu"})),
)
