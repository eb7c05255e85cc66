"""A seed: one artifact in one chunk of a layer, with parameters of its own. Whether it fits, and making it.

A layer's result may be [rows, features], [batch, ..., features] or [n, channels, height, width]; the block's
input may have fewer leading axes (they are folded into its first), and images are given to it with the
channels last. A seed has one input and gives one tensor of the input's shape and dtype.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper_ir.diagnostics import Accepted, EsperError, Rejected
from library import ledger
from library.launch import Interface
from library.records import PENDING_BENCHMARKING, VALIDATED, ArtifactRecord
from library.store import Library
from runtime import loader
from runtime.binding import Block, build
from runtime.seeds.commands import Graft
from runtime.seeds.grafting import effective
from runtime.seeds.lifecycle import Number
from runtime.seeds.state import artifact_prefix
from runtime.state import given

NHWC, NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
SPECULATIVE = "Speculative"
PROBES = 3


@dataclass(frozen=True)
class Spec:
    """What a chunk of a layer gives: shape (of the last call seen), dtype, device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Layout:
    """How a chunk becomes the block's input: `images` moves channels last, `rank` is the block's."""

    images: bool
    rank: int

    def into(self, h: Tensor) -> Tensor:
        x = h.permute(NHWC) if self.images else h
        return x.reshape(-1, *x.shape[x.dim() - self.rank + 1 :]) if x.dim() > self.rank else x

    def back(self, z: Tensor, like: Tensor) -> Tensor:
        shape = [like.shape[i] for i in NHWC] if self.images else list(like.shape)
        z = z.reshape(shape)
        return z.permute(NCHW) if self.images else z


def layout_of(interface: Interface, spec: Spec) -> Accepted[Layout] | Rejected:
    """How the artifact takes a chunk; why not: codes E0810 shape, E0811 dtype, E0814 device."""
    inputs = given(interface)
    outputs = interface.outputs[: len(interface.outputs) - len(interface.updates)]
    if len(inputs) != 1 or len(outputs) != 1:
        many = f"{len(inputs)} inputs and {len(outputs)} outputs"
        return Rejected("E0810", f"a seed has one input and one output, this has {many}")
    (entry,), (result,) = inputs, outputs
    for found in (entry.dtype, result.dtype):
        if getattr(torch, found) is not spec.dtype:
            here = str(spec.dtype).removeprefix("torch.")
            return Rejected("E0811", f"{found} where the layer gives {here}")
    if entry.shape != result.shape:
        return Rejected("E0810", f"gives {list(result.shape)} for {list(entry.shape)}")
    images = len(spec.shape) == 4
    shape = tuple(spec.shape[i] for i in NHWC) if images else spec.shape
    rank = len(entry.shape)
    if rank > len(shape):
        return Rejected("E0810", f"takes {list(entry.shape)}, the layer gives {list(shape)}")
    if rank < len(shape):
        extra = len(shape) - rank + 1
        shape = (math.prod(shape[:extra]), *shape[extra:])
    return _unified(interface, entry.shape, shape) or Accepted(Layout(images, rank))


def _unified(interface: Interface, wanted: Sequence[Any], shape: tuple[int, ...]) -> Rejected | None:
    ranges = {d.name: d for d in interface.dims}
    for at, (want, size) in enumerate(zip(wanted, shape, strict=True)):
        dim = ranges.get(want) if isinstance(want, str) else None
        if dim is None and want != size:
            return Rejected("E0810", f"takes {list(wanted)}, the layer gives {list(shape)} (axis {at})")
        if dim is not None and (not dim.min <= size <= dim.max or size % dim.multiple_of):
            return Rejected("E0813", f"{dim.name} = {size} is outside {dim.min}..{dim.max}")
    return None


@contextmanager
def same_random(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside is drawn again by what comes after."""
    cpu = torch.random.get_rng_state()
    card = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.random.set_rng_state(cpu)
        if card is not None:
            torch.cuda.set_rng_state(card, device)


class Seed(nn.Module):
    """`seed(h)`: the layer's result at alpha = 1, of h's shape and dtype. Not registered in the host while it
    lives in a slot; a committed graft is, and is this same module."""

    layout: Layout
    graft: Graft
    digest: str
    _draws: bool
    _named: dict[str, nn.Parameter] | None

    def __init__(self, block: Block, layout: Layout, graft: Graft, features: int, digest: str) -> None:
        super().__init__()
        draws = bool(block.program.interface.random)
        vars(self).update(layout=layout, graft=graft, digest=digest, _draws=draws, _named=None)
        self.block = block
        if graft.operator == "gate":
            dtype = getattr(torch, given(block.program.interface)[0].dtype)
            place = block.program.device
            self.gate = nn.Parameter(torch.zeros(features, dtype=dtype, device=place))

    @property
    def artifact_id(self) -> str:
        return self.block.artifact_id

    @property
    def prefix(self) -> int:
        return artifact_prefix(self.digest)

    @property
    def broken(self) -> bool:
        """Whether a launch failed, so that the eager twin answers now."""
        return self.block.failed_in_use

    def raw(self, h: Tensor) -> Tensor:
        """What the block gives for a chunk, in the chunk's shape. Draws from a copy of the host's random
        stream."""
        x = self.layout.into(h)
        if self._draws:
            with same_random(h.device):
                return self.layout.back(self.block(x), h)
        return self.layout.back(self.block(x), h)

    def forward(self, h: Tensor) -> Tensor:
        out = self.raw(h)
        gate = self._parameters.get("gate")
        if gate is not None and self.layout.images:
            gate = gate.reshape(-1, 1, 1)
            score = torch.sigmoid((h * gate).sum(1, keepdim=True))
            return torch.lerp(h, out, score)
        return effective(self.graft.operator, h, out, gate)

    def named(self) -> dict[str, nn.Parameter]:
        """What learns, by name. Empty for a fixed function."""
        found = self._named
        if found is None:
            kept = self.block.program.interface.differentiable
            found = {n: p for n, p in self.block.named_parameters() if n in kept}
            gate = self._parameters.get("gate")
            if gate is not None and found:
                found["gate"] = gate
            vars(self)["_named"] = found
        return found

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        vars(self)["_named"] = None
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Seed:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "_named"})
        made._named = None
        return made

    def count(self) -> int:
        """Parameters that learn."""
        return sum(p.numel() for p in self.named().values())

    @property
    def learns(self) -> bool:
        """Whether its parameters ask for gradients."""
        return any(p.requires_grad for p in self.named().values())

    def learn(self, on: bool) -> None:
        """Whether parameters ask for gradients; none is left over when they stop."""
        for parameter in self.named().values():
            parameter.requires_grad_(on)
            if not on:
                parameter.grad = None


@dataclass(frozen=True)
class Probe:
    """What calling a new seed showed: `exec_us` is the median of a few calls."""

    finite: bool
    shape: bool
    exec_us: int


class _Timed:
    """Made-up inputs by shape, and what artifacts took for them: bytes that were differentiated and timed
    once in this process, on this shape, are only called when they are probed again. Few of each are kept."""

    MOST = 64

    def __init__(self) -> None:
        self.inputs: dict[Spec, Tensor] = {}
        self.exec_us: dict[tuple[str, str, Spec], int] = {}

    def input(self, spec: Spec) -> Tensor:
        if spec not in self.inputs:
            generator = torch.Generator().manual_seed(0)
            made = torch.randn(spec.shape, generator=generator).to(device=spec.device, dtype=spec.dtype)
            keep(self.inputs, spec, made, self.MOST)
        return self.inputs[spec]


def keep(memo: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put a value into a memo that forgets its oldest."""
    memo[key] = value
    while len(memo) > most:
        memo.pop(next(iter(memo)), None)


_known = _Timed()


def probe(seed: Seed, spec: Spec) -> Probe:
    """Call a seed on made-up values of the layer's shape; the first time also backward, and timed. Nothing of
    it stays."""
    key = (seed.digest, seed.graft.operator, spec)
    h = _known.input(spec)
    exec_us = _known.exec_us.get(key)
    with torch.set_grad_enabled(exec_us is None):
        z = seed(h)
    finite = _finite(z.detach())
    if exec_us is None:
        named = seed.named()
        found = list(torch.autograd.grad(z.float().sum(), list(named.values()))) if named else []
        finite = finite and all(map(_finite, found))
        exec_us = round(sorted(_timed(seed, h) for _ in range(PROBES))[PROBES // 2] * 1e6)
        if finite and not seed.broken:
            keep(_known.exec_us, key, exec_us, _Timed.MOST)
    return Probe(finite, z.shape == h.shape and z.dtype is h.dtype, exec_us)


def _finite(values: Tensor) -> bool:
    """Whether all are. A sum is finite only if all of its terms are; where it is not, it may have overflowed,
    and the ends decide (of a set with something that is no number they are none either)."""
    if not values.numel() or math.isfinite(values.sum().item()):
        return True
    return all(math.isfinite(end.item()) for end in torch.aminmax(values))


@torch.no_grad()
def _timed(seed: Seed, h: Tensor) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    seed(h)
    if h.is_cuda:
        torch.cuda.synchronize(h.device)
    return time.perf_counter() - began


def make(
    artifact_id: str,
    library: Any,
    spec: Spec,
    features: int,
    graft: Graft,
    key: int,
    unvalidated: bool = False,
) -> Seed:
    """Load, verify and build a seed with parameters drawn from `key` (the same on every rank), the process's
    random numbers untouched. Errors: those of `runtime.load`, and the codes of `layout_of`."""
    device = spec.device
    block = build(
        artifact_id, device=device, library=library, fallback="eager", allow_unvalidated=unvalidated,
        generator=torch.Generator().manual_seed(key),
    )  # fmt: skip
    judged = _fitted(block.program.interface, block.record.digest, spec)
    if isinstance(judged, Rejected):
        raise EsperError(judged.code, f"{artifact_id}: {judged.reason}", node=artifact_id)
    return Seed(block, judged.value, graft, features, block.record.digest)


def state_in_library(library: Any, artifact_id: str) -> str:
    """Its state now, past every cache; "MISSING" when it is not there."""
    try:
        return loader.open_library(library).record(artifact_id).state
    except EsperError:
        return "MISSING"


def known_facts(
    library: Any, artifact_id: str, spec: Spec | None, unvalidated: bool = False
) -> tuple[str, dict[str, Number]]:
    """An artifact's state, and what gate G0 asks of it, from its records and its verified manifest. What
    nobody measured is absent; so is everything about the fit when the layer has not been called yet. Errors:
    those of the library for what is missing, untrusted or damaged."""
    state, facts = _standing(loader.open_library(library), artifact_id)
    if state == VALIDATED or (unvalidated and state == PENDING_BENCHMARKING):
        device = None if spec is None else spec.device
        entry = loader.load_entry(artifact_id, device=device, library=library, allow_unvalidated=unvalidated)
        facts |= declared(entry.record.digest, entry.program.interface)
        if spec is not None:
            judged = _fitted(entry.program.interface, entry.record.digest, spec)
            wrong = judged.code if isinstance(judged, Rejected) else ""
            facts |= {"shape_fits": wrong not in ("E0810", "E0813"), "dtype_fits": wrong != "E0811"}
            facts["device_fits"] = entry.program.device == spec.device
    return state, facts


_fits: dict[tuple[str, Spec], Accepted[Layout] | Rejected] = {}


def _fitted(interface: Interface, digest: str, spec: Spec) -> Accepted[Layout] | Rejected:
    """`layout_of`, worked out once for the bytes of an artifact and what a chunk looks like."""
    found = _fits.get((digest, spec))
    if found is None:
        found = layout_of(interface, spec)
        keep(_fits, (digest, spec), found, 256)
    return found


_standings: dict[tuple[str, str], tuple[int, Any, str, dict[str, Number]]] = {}


def _standing(opened: Library, artifact_id: str) -> tuple[str, dict[str, Number]]:
    """An artifact's state now, and what the signed verdict and annotation say. Read and verified again when
    the library's ledger has grown, in which every change of a state is an entry, or its trust changed; not
    at every boundary."""
    key = (str(opened.home), artifact_id)
    size, trust = ledger.size(opened.index), opened.trust.document()
    known = _standings.get(key)
    if known is None or known[0] != size or known[1] is not trust:
        record = opened.record(artifact_id)
        known = size, trust, record.state, _judged(opened, record)
        keep(_standings, key, known, 256)
    return known[2], dict(known[3])


def _judged(opened: Library, record: ArtifactRecord) -> dict[str, Number]:
    """What the signed verdict and annotation say."""
    verdict = opened.verdict(record.id)
    facts: dict[str, Number] = {"validated": record.state == VALIDATED and verdict is not None}
    report: Mapping[str, Any] = verdict.report if verdict is not None else {}
    told = {**report, **(opened.annotation(record.id) if verdict is not None else {})}
    if isinstance(told.get("risk_score"), (int, float)):
        facts["risk"] = float(told["risk_score"])
    facts["confident"] = str(told.get("conf_level") or SPECULATIVE) != SPECULATIVE
    latency = dict(report.get("wep") or {}).get("latency_ms_p99")
    if isinstance(latency, (int, float)):
        facts["latency_us"] = float(latency) * 1e3
    return facts


def declared(digest: str, interface: Interface) -> dict[str, float]:
    """How many parameters learn, and bytes of all of them; counted once for the bytes of an artifact."""
    found = _declared.get(digest)
    if found is None:
        found = _counted(interface)
        keep(_declared, digest, found, 256)
    return found


_declared: dict[str, dict[str, float]] = {}


def _counted(interface: Interface) -> dict[str, float]:
    leaves = [s for s in interface.inputs if s.kind == "param"]
    sizes = [math.prod(n for n in s.shape if isinstance(n, int)) for s in leaves]
    learn = [n for s, n in zip(leaves, sizes, strict=True) if s.name in interface.differentiable]
    memory = sum(n * getattr(torch, s.dtype).itemsize for s, n in zip(leaves, sizes, strict=True))
    return {"parameters": float(sum(learn)), "memory": float(memory)}
