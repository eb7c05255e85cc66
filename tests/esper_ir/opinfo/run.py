"""torch's own operator samples against ours: results and gradients, counted.

The samples come from torch.testing._internal, which is no public interface: it is imported here alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from esper_ir.builder import Value
from esper_ir.diagnostics import EsperError
from esper_ir.expand import expand
from esper_ir.grad import joint
from esper_ir.graph import Graph
from esper_ir.reference import evaluate
from esper_ir.verify import typed
from tests.esper_ir.opinfo.images import IMAGES
from tests.esper_ir.opinfo.pointwise import POINTWISE
from tests.esper_ir.opinfo.reductions import REDUCTIONS
from tests.esper_ir.opinfo.structure import STRUCTURE
from tests.esper_ir.opinfo.table import Excluded, Rule, SampleBuilder, merged

NUMBERS = frozenset({n.partition(".")[0] for n in POINTWISE} | {"max", "min"})
RULES: dict[str, Rule] = merged(POINTWISE, REDUCTIONS, STRUCTURE, IMAGES)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ROUNDINGS = {torch.float64: 64, torch.float32: 8, torch.bfloat16: 4, torch.float16: 4}
"""Of the size of the result; float64 has no wider truth, so that what cancels counts in full."""
SLACK = {"nn.functional.scaled_dot_product_attention": 8.0}
"""On gradients: those of attention take the result as it was rounded, as flash attention does."""
FIXED: dict[str, dict[str, Any]] = {"sort": {"stable": True}, "argsort": {"stable": True}}
"""What is asked of torch besides, where it would leave the order of equal values open."""
FORMS = frozenset({"nn.functional.silu.complex", "bmm.triton_optimized"})
"""Records of forms that torch has for complex numbers or for another compiler only."""


@dataclass
class Tally:
    """Counts of one operator and dtype; `failed` holds what to look at."""

    run: int = 0
    passed: int = 0
    gradients: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return self.run + sum(self.excluded.values())


def records() -> dict[str, Any]:
    """torch's records that have a rule, by "name" or "name.variant"."""
    from torch.testing._internal.common_methods_invocations import op_db

    out = {}
    for record in op_db:
        key = record.name + (f".{record.variant_test_name}" if record.variant_test_name else "")
        known = key in RULES or record.name in RULES
        if known and key not in FORMS and set(DTYPES) & record.supported_dtypes("cpu"):
            out[key] = record
    return out


def rule_of(key: str) -> Rule:
    return RULES[key] if key in RULES else RULES[key.rpartition(".")[0]]


class Lifted:
    """A call as a blueprint: every tensor in it is an input."""

    def __init__(self, key: str, call: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.builder = SampleBuilder("sample")
        self.values: dict[str, torch.Tensor] = {}
        self.wanted: list[str] = []
        self.names: dict[int, str] = {}
        given = [self.lift(v) for v in call]
        made = rule_of(key)(self.builder, *given, **{k: self.lift(v) for k, v in kwargs.items()})
        outputs = made if isinstance(made, tuple) else (made,)
        if not outputs:
            raise Excluded("no result")
        self.outputs = [v.name for v in outputs]
        self.graph: Graph = typed(self.builder.build(*dict.fromkeys(outputs)))

    def lift(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return [self.lift(v) for v in value]
        if isinstance(value, (complex, str)) and not isinstance(value, str):
            raise Excluded("complex numbers")
        return value

    def tensor(self, value: torch.Tensor) -> Value:
        if value.dtype.is_complex or value.layout is not torch.strided:
            raise Excluded("complex numbers or sparse tensors")
        name = f"a{len(self.values)}"
        self.values[name] = value.detach()
        if value.requires_grad:
            self.wanted.append(name)
        self.names[id(value)] = name
        return self.builder.input(name, str(value.dtype).removeprefix("torch."), list(value.shape))


def results(made: Any) -> list[torch.Tensor]:
    return [v.detach() for v in made] if isinstance(made, (tuple, list)) else [made.detach()]


def rms(x: torch.Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt()) if x.numel() else 0.0


def agree(found: torch.Tensor, theirs: torch.Tensor, wide: torch.Tensor, slack: float = 1.0) -> str:
    """Empty, or what differs: the type, or an error larger than torch's own and a few roundings."""
    if found.dtype != theirs.dtype or found.shape != theirs.shape:
        return f"{found.dtype} {list(found.shape)} instead of {theirs.dtype} {list(theirs.shape)}"
    if not found.dtype.is_floating_point:
        return "" if torch.equal(found, theirs) else f"{found} instead of {theirs}"
    odd = ~(found.isfinite() & theirs.isfinite() & wide.isfinite())
    if odd.any():
        one, two, three = (v[odd].double() for v in (found, theirs, wide))
        same = [(one == v) | (one.isnan() & v.isnan()) for v in (two, three)]
        if not bool((same[0] | same[1] | (two != three)).all()):
            return f"{one} instead of {two}"
        found, theirs, wide = (v[~odd] for v in (found, theirs, wide))
    error, own = rms(found.double() - wide), rms(theirs.double() - wide)
    bound = 4 * own + slack * ROUNDINGS[found.dtype] * torch.finfo(found.dtype).eps * (rms(wide) + 0.05)
    return "" if error <= bound else f"error {error:.3g} beyond {bound:.3g}"


def forward(lifted: Lifted, theirs: list[torch.Tensor]) -> str:
    """Whole and expanded, in the declared types."""
    graph = lifted.graph
    wide = evaluate(graph, lifted.values, precision="float64")
    if len(theirs) != len(lifted.outputs):
        return f"{len(lifted.outputs)} results instead of {len(theirs)}"
    for form in (graph, expand(graph)):
        found = evaluate(form, lifted.values)
        for name, want in zip(lifted.outputs, theirs, strict=True):
            said = agree(found[name], want, wide[name])
            if said:
                return f"{name}: {said}"
    return ""


def gradient(lifted: Lifted, record: Any, call: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Of every tensor that requires one, against autograd."""
    leaves = [v for v in tensors((call, kwargs)) if v.requires_grad]
    made = record.op(*call, **kwargs)
    outs = [v for v in (made if isinstance(made, (tuple, list)) else [made]) if v.requires_grad]
    if not outs or not leaves:
        return ""
    pairs = zip(lifted.outputs, made if isinstance(made, (tuple, list)) else [made], strict=True)
    names = [n for n, v in pairs if v.requires_grad]
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.randn(v.shape, dtype=torch.float64, generator=generator).to(v.dtype) for v in outs]
    theirs = torch.autograd.grad(outs, leaves, seeds, allow_unused=True)
    wanted = [lifted.names[id(v)] for v in leaves]
    try:
        both = joint(lifted.graph, wanted)
    except EsperError as error:
        zero = all(g is None or not bool(g.any()) for g in theirs)
        return "" if error.code == "E0401" and zero else f"no gradient: {error}"
    given = dict(lifted.values)
    for name, label in both.cotangents.items():
        given[label] = torch.zeros_like(evaluate(lifted.graph, lifted.values)[name])
    for name, seed in zip(names, seeds, strict=True):
        given[both.cotangents[name]] = given[both.cotangents[name]] + seed
    found, wide = (evaluate(both.graph, given, precision=p) for p in ("declared", "float64"))
    for name, leaf, want in zip(wanted, leaves, theirs, strict=True):
        label = both.gradients[name]
        zeros = torch.zeros_like(leaf.detach())
        ours = (found[label], wide[label]) if label else (zeros, zeros.double())
        said = agree(ours[0], zeros if want is None else want, ours[1], SLACK.get(record.name, 1.0))
        if said:
            return f"gradient of {name}: {said}"
    return ""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors(v)


def check(key: str, record: Any, sample: Any, tally: Tally, backward: bool) -> None:
    call = (sample.input, *sample.args)
    if key in FIXED:
        sample.kwargs = {
            **dict(zip(("dim", "descending"), sample.args, strict=False)),
            **sample.kwargs,
            **FIXED[key],
        }
        call = (sample.input,)
    try:
        lifted = Lifted(key, call, sample.kwargs)
    except Excluded as reason:
        tally.excluded[str(reason)] += 1
        return
    except EsperError as error:
        tally.excluded[f"{error.code} {error.message[:60]}"] += 1
        return
    tally.run += 1
    with torch.no_grad():
        theirs = results(record.op(*call, **sample.kwargs))
    said = forward(lifted, theirs)
    if not said and backward and lifted.wanted:
        said = gradient(lifted, record, call, sample.kwargs)
        tally.gradients += 1
    if said:
        shapes = [tuple(t.shape) for t in tensors((call, sample.kwargs))]
        numbers = {k: v for k, v in sample.kwargs.items() if not isinstance(v, torch.Tensor)}
        tally.failed.append(f"{key} {shapes} {numbers}: {said[:300]}")
    else:
        tally.passed += 1


def measure(key: str, record: Any, dtype: torch.dtype, most: int | None = None) -> Tally | None:
    """All samples (or the first `most`) of one operator in one dtype; None where torch has none."""
    if dtype not in record.supported_dtypes("cpu"):
        return None
    backward = record.supports_autograd and dtype in record.supported_backward_dtypes("cpu")
    tally = Tally()
    torch.manual_seed(0)
    for number, sample in enumerate(record.sample_inputs("cpu", dtype, requires_grad=backward)):
        if most is not None and number >= most:
            break
        check(key, record, sample, tally, backward)
    return tally


def refusals(key: str, record: Any) -> Tally:
    """torch's error inputs: ours refuse them as well, with a code."""
    tally = Tally()
    for error in record.error_inputs("cpu") if record.error_inputs_func else ():
        sample = error.sample_input
        try:
            Lifted(key, (sample.input, *sample.args), sample.kwargs)
        except EsperError:
            tally.run += 1
            tally.passed += 1
        except (
            Excluded,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            AssertionError,
        ) as reason:
            tally.excluded[f"not expressible: {type(reason).__name__}"] += 1
        else:
            _accepted(key, error, tally)
    return tally


def _accepted(key: str, error: Any, tally: Tally) -> None:
    """What torch refuses and the language takes, with the reason where there is one."""
    sample = error.sample_input
    operands = (sample.input, *sample.args)
    if "out of bounds" in error.error_regex:
        tally.excluded["whether it is wrong depends on values"] += 1
    elif key.partition(".")[0] in NUMBERS and not all(isinstance(v, torch.Tensor) for v in operands):
        tally.excluded["numbers are operands here"] += 1
    else:
        tally.run += 1
        tally.failed.append(f"{key}: accepted {sample.summary()[:150]}: {error.error_regex[:100]}")


def short(reason: str) -> str:
    """A reason without the numbers of one sample."""
    code = reason.split(" ", 1)[0]
    return CODES.get(code, reason) if code.startswith("E0") else reason


CODES = {
    "E0109": "an attribute that is not finite",
    "E0203": "an attribute outside the range of the language (E0203)",
    "E0204": "shapes that the language refuses (E0204)",
    "E0205": "dtypes that the language refuses (E0205)",
    "E0206": "a size that the language cannot prove (E0206)",
    "E0207": "an axis of a tensor that has none (E0207)",
}
