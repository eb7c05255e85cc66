"""Library calls that look up, join and run along an axis: rows by number, positions, order, scans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from runtime.extern import Attrs, Run, aten, ints, plain


def lookup(attrs: Attrs) -> Run:
    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        rows, weight = inputs
        torch.index_select(weight, 0, rows.reshape(-1), out=outs[0].view(-1, weight.shape[1]))

    return run


def lookup_gradient(attrs: Attrs) -> Run:
    """Rows are added in the order of a sort: the same on every run."""

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
        g, rows = inputs
        return (aten.embedding_dense_backward(g, rows, outs[0].shape[0], -1, False),)

    return plain(run)


def cat(attrs: Attrs) -> Run:
    dim = int(attrs["dim"])

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        torch.cat(list(inputs), dim, out=outs[0])

    return run


def pad(attrs: Attrs) -> Run:
    """The operand inside a constant border; `before` has a number per axis."""
    before, value = ints(attrs["before"]), attrs["value"]

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        (x,), (out,) = inputs, outs
        out.fill_(value)
        for axis, (start, size) in enumerate(zip(before, x.shape, strict=True)):
            out = out.narrow(axis, start, size)
        out.copy_(x)

    return run


def cumsum(attrs: Attrs) -> Run:
    dim, reverse = int(attrs["dim"]), bool(attrs.get("reverse"))

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        if reverse:
            outs[0].copy_(torch.cumsum(inputs[0].flip(dim), dim).flip(dim))
            return
        torch.cumsum(inputs[0], dim, out=outs[0])

    return run


def scan(name: str) -> Callable[[Attrs], Run]:
    """A running value along `dim`; extrema give their places too."""
    call = getattr(torch, name)

    def prepare(attrs: Attrs) -> Run:
        dim, reverse = int(attrs["dim"]), bool(attrs.get("reverse"))

        def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
            if reverse:
                return (call(inputs[0].flip(dim), dim).flip(dim),)
            made = call(inputs[0], dim)
            return (made,) if isinstance(made, Tensor) else tuple(made)

        return plain(run)

    return prepare


# Positions along an axis.


def gather(attrs: Attrs) -> Run:
    dim = int(attrs["dim"])

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        torch.gather(inputs[0], dim, inputs[1], out=outs[0])

    return run


def scatter(name: str) -> Callable[[Attrs], Run]:
    call = getattr(torch, name)

    def prepare(attrs: Attrs) -> Run:
        dim = int(attrs["dim"])

        def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
            x, places, source = inputs
            return (call(x, dim, places, source),)

        return plain(run)

    return prepare


def unsort(attrs: Attrs) -> Run:
    """Positions are a permutation: every element is written once, so the order of writing is no matter."""
    dim = int(attrs["dim"])

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        outs[0].scatter_(dim, inputs[1], inputs[0])

    return run


def sort(attrs: Attrs) -> Run:
    dim, descending = int(attrs["dim"]), bool(attrs["descending"])

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
        return tuple(torch.sort(inputs[0], dim=dim, descending=descending, stable=True))

    return plain(run)


def prod(attrs: Attrs) -> Run:
    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        torch.prod(inputs[0], 1, out=outs[0])

    return run


def recurrence(attrs: Attrs) -> Run:
    """h[t] = a[t] h[t-1] + b[t] by doubling: log2(length) passes over the operands."""
    dim, reverse = int(attrs["dim"]), bool(attrs.get("reverse"))

    def run(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        a, b = ((t.flip(dim) if reverse else t).movedim(dim, -1) for t in inputs)
        step = 1
        while step < b.shape[-1]:
            before = functional.pad(b[..., :-step], (step, 0))
            b, a = b + a * before, a * functional.pad(a[..., :-step], (step, 0))
            step *= 2
        made = b.movedim(-1, dim)
        outs[0].copy_(made.flip(dim) if reverse else made)

    return run
