"""What the blueprint means, in float64 and as eager torch computes it: the two measures of every
comparison.

Both are computed on dense tensors that begin where torch's allocator begins: how a case lies in memory is a
matter between the artifact and its caller, and some of torch's own kernels fail on a card at other addresses.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from esper_ir import oracle, reference
from esper_ir.graph import Graph, Node
from esper_ir.opdef import Creation, Lookup, Movement, Pointwise, Reduction
from esper_ir.ops.attention import OPENED
from esper_ir.reference import Precision
from esper_ir.registry import lookup
from esper_ir.types import DType
from gauntlet import bodies
from gauntlet.subject import Subject

ALIGNED = 512
"""Bytes: where torch's allocator on a card begins every tensor."""
SHORT = 64


def outputs(
    subject: Subject, values: Mapping[str, Tensor], precision: Precision, *, flat: bool = False
) -> list[Tensor]:
    """Results in the order of the blueprint. `flat`: by the primitives that composites stand for."""
    leaves = {name: _leaf(subject, tensor, precision, False) for name, tensor in values.items()}
    with torch.no_grad():
        return _evaluated(subject, leaves, precision, flat)


def _evaluated(
    subject: Subject, leaves: Mapping[str, Tensor], precision: Precision, flat: bool
) -> list[Tensor]:
    graph = subject.flat if flat else subject.graph
    found = reference.evaluate(graph, leaves, precision=precision)
    return [found[name] for name in graph.outputs]


def gradients(
    subject: Subject,
    values: Mapping[str, Tensor],
    cotangents: Sequence[Tensor | None],
    wanted: Iterable[str],
    precision: Precision,
    *,
    flat: bool = False,
) -> dict[str, Tensor]:
    """By torch's autograd through the reference; zeros where no path leads. None is a cotangent of zeros.
    `flat`: through the primitives that composites stand for."""
    names = tuple(wanted)
    leaves = {name: _leaf(subject, tensor, precision, name in names) for name, tensor in values.items()}
    with torch.enable_grad():
        results = _evaluated(subject, leaves, precision, flat)
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None and r.requires_grad]
    if not pairs:
        return {name: torch.zeros_like(leaves[name]) for name in names}
    grads = torch.autograd.grad(
        [r for r, _ in pairs],
        [leaves[n] for n in names],
        [c.to(r.dtype) for r, c in pairs],
        allow_unused=True,
    )
    return {
        name: torch.zeros_like(leaves[name]) if grad is None else grad
        for name, grad in zip(names, grads, strict=True)
    }


EXACT = frozenset(
    "neg abs sign relu maximum minimum clamp where floor ceil round trunc cast eq ne lt le gt ge".split()
)
"""Pointwise operators that round nothing."""


def rounded(
    subject: Subject, values: Mapping[str, Tensor], cotangents: Sequence[Tensor | None] | None, turn: int
) -> dict[str, Tensor]:
    """Results in float64 with one random rounding of the compute type in every input and after every
    primitive that rounds (sqrt(K) of it where K terms are added), and of the declared type where that is
    shorter: one draw of what another correct order of operations may give (Monte Carlo arithmetic: Parker,
    1997). By output, or by "d(x)" where cotangents are given.
    """

    def evaluated(graph: Graph, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return shaken(subject, graph, given, turn, declared=True)

    return _opened(subject, values, cotangents, evaluated)


def flushed(
    subject: Subject, values: Mapping[str, Tensor], cotangents: Sequence[Tensor | None] | None
) -> dict[str, Tensor]:
    """What it changes in float64 results where those of a card's own functions are zero that are no normal
    numbers (`bodies.FLUSHED`). By output, or by "d(x)" where cotangents are given; nothing where it runs on a
    processor, or computes in float64.
    """
    if subject.device.type == "cpu" or _computed(subject) is not torch.float32:
        return {}
    return lost(subject, values, cotangents, torch.finfo(torch.float32).smallest_normal)


def lost(
    subject: Subject,
    values: Mapping[str, Tensor],
    cotangents: Sequence[Tensor | None] | None,
    least: float,
) -> dict[str, Tensor]:
    """`flushed`, of results under `least`."""

    def changed(graph: Graph, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept, small = (_by_bodies(graph, given, each) for each in (0.0, least))
        return {n: small[n] - t if t.is_floating_point() else torch.zeros_like(t) for n, t in kept.items()}

    return _opened(subject, values, cotangents, changed)


def _opened(
    subject: Subject, values: Mapping[str, Tensor], cotangents: Sequence[Tensor | None] | None,
    evaluated: Callable[[Graph, Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> dict[str, Tensor]:  # fmt: skip
    """What `evaluated` makes of the graph with library calls written out, or of that with its gradients."""
    if cotangents is None:
        graph = subject.opened
        found = evaluated(graph, values)
        return dict(zip(subject.blueprint.outputs, (found[n] for n in graph.outputs), strict=True))
    graph, names = subject.opened_joint
    found = evaluated(graph, _flowing(subject, values, cotangents))
    none = {f"d({n})": torch.zeros_like(values[n], dtype=torch.float64) for n in subject.joint.gradients}
    return none | {f"d({n})": found[at] for n, at in names.items()}


def _computed(subject: Subject) -> torch.dtype:
    """The type that the subject computes in."""
    return torch.float64 if subject.roundoff == oracle.BOUNDS[DType.float64].roundoff else torch.float32


def by_rules(
    subject: Subject, values: Mapping[str, Tensor], cotangents: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """Gradients in float64 by the blueprint's own rules (`esper_ir.grad`) and the bodies of its operators in
    the place of torch's autograd: "d(x)" to tensor."""
    given = _flowing(subject, values, cotangents)
    return _gradients(subject, values, _by_bodies(subject.joint.graph, given))


def by_bodies(subject: Subject, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Results in float64, pointwise operators by their bodies: output to tensor."""
    graph = subject.flat
    found = _by_bodies(graph, values)
    return dict(zip(subject.blueprint.outputs, (found[n] for n in graph.outputs), strict=True))


def _by_bodies(graph: Graph, given: Mapping[str, Tensor], least: float = 0.0) -> dict[str, Tensor]:
    known = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}

    where = next((t.device for t in known.values()), torch.device("cpu"))

    def after(node: Node, made: tuple[Tensor, ...], sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        made = made if node.tensors else tuple(t.to(where) for t in made)  # `evaluate_all` moves these later
        operands = [known[r] if isinstance(r, str) else r for r in node.inputs]
        out = tuple(bodies.result(node, operands, plain, least) for plain in made)
        known.update(zip(node.outputs, out, strict=True))
        return out

    with torch.no_grad():
        return reference.evaluate_all(graph, dict(known), precision="float64", after=after)


def asked(subject: Subject, values: Mapping[str, Tensor]) -> int:
    """The fewest different numbers that a function of one argument (`bodies.FUNCTIONS`) is asked for anywhere
    in the forward; as many as there are elements where there is none."""
    found = [max(t.numel() for t in values.values())]
    known = {n: t.double() if t.is_floating_point() else t for n, t in values.items()}

    def after(node: Node, made: tuple[Tensor, ...], sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        if len(node.tensors) == 1 and bodies.asks(node):
            found.append(torch.unique(known[node.tensors[0]]).numel())
        known.update(zip(node.outputs, made, strict=True))
        return made

    with torch.no_grad():
        reference.evaluate_all(subject.flat, dict(known), precision="float64", after=after)
    return min(found)


def _flowing(
    subject: Subject, values: Mapping[str, Tensor], cotangents: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """Leaves and cotangents by their names in the joint graph."""
    given = dict(values)
    for name, kind, flow in zip(subject.graph.outputs, subject.results, cotangents, strict=True):
        if name in subject.joint.cotangents:
            shape = [d.value(subject.bound(values)) for d in kind[2].shape]
            zeros = torch.zeros(shape, dtype=torch.float64, device=_where(values))
            given[subject.joint.cotangents[name]] = zeros if flow is None else flow
    return given


def _where(values: Mapping[str, Tensor]) -> torch.device:
    return next(iter(values.values())).device


def _gradients(
    subject: Subject, values: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    return {
        f"d({n})": torch.zeros_like(values[n], dtype=torch.float64) if at is None else found[at]
        for n, at in subject.joint.gradients.items()
    }


def shaken(
    subject: Subject, graph: Graph, given: Mapping[str, Tensor], turn: int, *, declared: bool = False
) -> dict[str, Tensor]:
    """Every value of the graph in float64, with random roundings as `rounded` says; of the compute type
    alone unless `declared`. In every second draw one operator rounds equal values alike, as it does in truth:
    two that share a maximum stay equal there, and what is rounded after them is seen."""
    card = any(t.is_cuda for t in given.values())  # draws there, of what lies there: a large case has many
    generator = torch.Generator(_where(given) if card else "cpu").manual_seed(1009 * turn + 1)
    seeds, alike = random.Random(1009 * turn + 1), turn % 2 == 1

    def moved(
        value: Tensor, count: int, least: float = 0.0, size: Tensor | None = None, grid: float = 0.0
    ) -> Tensor:
        if alike and count == 1:
            noise = _scattered(value, seeds.getrandbits(62))
        else:
            drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64, device=generator.device)
            noise = drawn.to(value.device).mul_(2).sub_(1)
        by = subject.roundoff * math.sqrt(count)
        share = max(by, least)
        below = (value.abs() >= grid / 2) & (share * value.abs() < grid / 2)  # among the subnormal numbers
        own = torch.where(below, value + grid / 2 * noise, value * (1 + share * noise))
        if size is None:
            return own
        return torch.where(by * size > share * value.abs(), value + by * size * noise, own)

    def kept(value: Tensor, count: int, kind: DType | None, size: Tensor | None) -> Tensor:
        """Where the compute type holds a value as it is, nothing is rounded to it; nor to a shorter one."""
        if not value.is_floating_point():
            return value
        value, narrow, least = value.double(), computed, 0.0
        if kind is not None and kind in oracle.BOUNDS:
            narrow, least = getattr(torch, kind.value), oracle.BOUNDS[kind].roundoff
        held = value == value.to(computed).to(narrow)
        info = torch.finfo(narrow)
        return torch.where(held, value, moved(value, count, least, size, info.smallest_normal * info.eps))

    def after(node: Node, made: tuple[Tensor, ...], sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        if not _rounds(node) and not (declared and _narrows(graph, node)):
            return made
        types = [graph.types[name].dtype if declared else None for name in node.outputs]
        count, size = oracle.terms(graph, node, sizes), _partial_sum(node, known)
        return tuple(kept(t, count, kind, size) for t, kind in zip(made, types, strict=True))

    def noted(node: Node, made: tuple[Tensor, ...], sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        out = after(node, made, sizes)
        known.update(zip(node.outputs, out, strict=True))
        return out

    computed = _computed(subject)
    with torch.no_grad():
        shifted = {n: v if _exact(v) else moved(v.double(), 1) for n, v in given.items()}
        known = dict(shifted)
        return reference.evaluate_all(graph, shifted, precision="float64", after=noted)


CERTAIN, FELT, LOOSE = 0.5, -20.0, 4.0
"""Of an exponent: how far it may be off; from where on its exponential is felt beside a largest one of 1; and
roundings of what it is the difference of."""


def decided(subject: Subject, values: Mapping[str, Tensor]) -> bool:
    """Whether roundings leave the exponents of attention what they are. A library keeps the logarithm of the
    sum of a row, and its backward takes exp(score - that): where scores are so large that one of their
    roundings is a number of one digit, any share of a row, also exp(60), is what a correct algorithm gives,
    and the float64 forms, in which a largest score less itself is zero, know nothing of it."""
    opened = [f"{node.id}:" for node in subject.flat if node.op in OPENED]
    if not opened:
        return True
    known = {n: t.double() if t.is_floating_point() else t for n, t in values.items()}
    with torch.no_grad():
        known = reference.evaluate_all(subject.opened, known, precision="float64")
    within = [node for node in subject.opened if any(node.id.startswith(scope) for scope in opened)]
    differences = {n.outputs[0]: n.tensors for n in within if n.op == "sub"}
    exponents = [n.tensors[0] for n in within if n.op == "exp" and n.tensors[0] in differences]
    for exponent in exponents:
        size = sum(torch.nan_to_num(known[n], posinf=0.0, neginf=0.0).abs() for n in differences[exponent])
        off = LOOSE * subject.roundoff * size
        if bool(((off > CERTAIN) & (known[exponent] + off > FELT)).any()):
            return False
    return True


def through_attention(subject: Subject) -> set[str]:
    """Labels of the gradients that come out of the backward of an attention, or depend on it."""
    (graph, names), found = subject.flat_joint, set[str]()
    for node in graph:
        if node.op == "attention_grad" or not found.isdisjoint(node.tensors):
            found.update(node.outputs)
    return {f"d({leaf})" for leaf, at in names.items() if at in found}


def _scattered(value: Tensor, seed: int) -> Tensor:
    """Numbers from -1 to 1 by the bits of float64 ones, the same for equal ones: as if drawn for each (by
    multiplying and folding, as in the finaliser of MurmurHash3, Appleby 2011). To sort them to see which are
    equal took most of the judge's time."""
    bits = (value + 0.0).view(torch.int64)  # -0 + 0 = 0
    bits = (bits ^ (bits >> 32)) * (2 * seed + 1)  # the digits of a short type stand at the top
    bits = (bits ^ (bits >> 32)) * -0x00AE502812AA7333
    return bits.to(torch.float64) * 2.0**-63


def _partial_sum(node: Node, known: Mapping[str, Tensor]) -> Tensor | None:
    """The size that partial sums have where terms of either sign cancel: roundings are of these, also where
    nothing is left in the end. None where no sum is taken, or where it is exact in any order."""
    if node.op not in ("sum", "mean") or _exact(operand := known[node.tensors[0]]):
        return None
    dims, keepdim = node.attr("dims"), node.attr("keepdim")
    size = torch.linalg.vector_norm(operand.double(), dim=tuple(dims), keepdim=keepdim)
    return size * (size.numel() / max(operand.numel(), 1)) if node.op == "mean" else size


def _exact(value: Tensor) -> bool:
    """Whether products and sums of these numbers are exact in any order: multiples of a `SHORT`-th of the
    largest one's power of two (ties, whole numbers, zeros), or no floating numbers."""
    if not value.is_floating_point():
        return True
    finite = torch.nan_to_num(value.double(), nan=0.0, posinf=0.0, neginf=0.0)
    top = float(finite.abs().max()) if finite.numel() else 0.0
    return not top or bool((finite * math.ldexp(SHORT, 1 - math.frexp(top)[1])).frac().eq(0).all())


def _rounds(node: Node) -> bool:
    """Movement, selection and comparison do not; nor does a largest or smallest element."""
    lowering = lookup(node.op).lowering
    if isinstance(lowering, Reduction):
        return lowering.combine in ("sum", "prod", "squares")
    if isinstance(lowering, Pointwise):
        return node.op not in EXACT
    return not isinstance(lowering, Movement | Creation | Lookup)


def _narrows(graph: Graph, node: Node) -> bool:
    """A cast to a type with fewer digits."""
    if node.op != "cast":
        return False
    given, made = (graph.types[name].dtype for name in (node.tensors[0], node.outputs[0]))
    known = oracle.BOUNDS
    return given in known and made in known and known[made].roundoff > known[given].roundoff


def _leaf(subject: Subject, tensor: Tensor, precision: Precision, wanted: bool) -> Tensor:
    """The value as the reference takes it, sharing memory where it can."""
    out = tensor.detach()
    if precision == "float64" and tensor.is_floating_point():
        out = subject.widened(tensor).detach()
    elif not out.is_contiguous() or (out.is_cuda and out.data_ptr() % ALIGNED):
        out = out.clone(memory_format=torch.contiguous_format)
    return out.detach().requires_grad_() if wanted else out


def directional(
    subject: Subject, values: Mapping[str, Tensor], along: Mapping[str, Tensor], step: float
) -> list[Tensor]:
    """(f(v + step*d) - f(v - step*d)) / (2*step) in float64: the derivative without any gradient rule."""
    wide = {n: t.to(torch.float64) if t.is_floating_point() else t for n, t in values.items()}
    moved = [
        outputs(
            subject, {n: t + sign * step * along[n] if n in along else t for n, t in wide.items()}, "float64"
        )
        for sign in (1, -1)
    ]
    return [(up - down) / (2 * step) for up, down in zip(*moved, strict=True)]
