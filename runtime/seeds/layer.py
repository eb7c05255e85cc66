"""A wrapped layer: what its forward does beyond the host's own, and its slots.

A live seed is not registered in any module, so nothing of the host (clipping, decay, state dict, parameter
count) sees it before it is committed.
"""

from __future__ import annotations

import copy
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from esper_ir.diagnostics import EsperError
from runtime.driver import STICKY
from runtime.seeds import incubation, traced
from runtime.seeds.commands import Graft, GraftingStrategy
from runtime.seeds.errors import fail
from runtime.seeds.facts import Observer
from runtime.seeds.grafting import Reading, blend, guarded
from runtime.seeds.lifecycle import LIVE, Fault, Lifecycle
from runtime.seeds.seed import Seed, Spec, same_random
from runtime.seeds.state import PROBE, StateTensor
from runtime.state import graph_task, recomputing

_P = {name: at for at, name in enumerate(PROBE)}
_STATES = tuple(Lifecycle(code) for code in range(14))
_ACTIVE = frozenset(int(s) for s in (*LIVE, Lifecycle.TRAINING))
_NONE: Mapping[str, Tensor | float] = MappingProxyType({})
overrides: ContextVar[Mapping[str, Tensor | float]] = ContextVar("overrides", default=_NONE)
"""alpha by slot id, for counterfactual forwards of this context alone: a number, or a value per sample."""


def _hook(h: Tensor, hear: Callable[[Tensor], None]) -> None:
    """`h.register_hook(hear)` without a handle to remove it by, which takes longer than all the rest."""
    if h._backward_hooks is not None:
        h.register_hook(hear)
        return
    h._backward_hooks = OrderedDict({-1: hear})  # handles are numbered from 0
    if h.grad_fn is not None:
        h.grad_fn._register_hook_dict(h)


def _no_scale() -> None:
    """Of a layer whose model has no gradient scaler."""


class Slot:
    """One chunk of a layer, which can hold one seed. State and numbers stand in the layer's state tensor."""

    def __init__(self, site: Site, index: int) -> None:
        self.site, self.index, self.id = site, index, f"{site.name}/{index}"
        self.artifact = ""
        self.seed: Seed | None = None
        self.graft = Graft()
        self.strategy = GraftingStrategy.FIXED_RAMP
        self.reading = Reading()
        self.grads: dict[str, Tensor] = {}
        self.batches = 0
        self.broken = False
        self.pull: Tensor | None = None
        self.before: dict[str, Tensor] | None = None  # the host's tensors when the graft began
        self.expires = 0  # epoch until which an embargo lasts
        self.notes: dict[str, Any] = {}  # reason, fault, what the next boundary must know
        self._hooks: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        """Nothing hears the gradients of a copy: it has no optimizer."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        notes = {k: v for k, v in self.notes.items() if isinstance(v, (str, int, float, list))}
        kept = {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in ("_hooks", "notes")}
        made.__dict__.update({**kept, "_hooks": [], "notes": notes})
        return made

    @property
    def state(self) -> Lifecycle:
        return _STATES[self.site.state.get("lifecycle", self.index)]

    @property
    def alpha(self) -> float:
        return self.site.state.get("alpha", self.index)

    @property
    def fault(self) -> Fault:
        return Fault(self.site.state.get("fault", self.index))

    def get(self, name: str) -> Any:
        return self.site.state.get(name, self.index)

    def set(self, **values: float | int) -> None:
        self.site.state.set(self.index, **values)

    def fail(self, fault: Fault) -> None:
        """Note a fault that the host knows of; the first one stays."""
        if self.fault is Fault.NONE:
            self.set(fault=int(fault))

    @property
    def isolated(self) -> bool:
        """Whether the host's gradient passes the graft by."""
        if self.graft.isolate == "until_fine_tuning":
            return self.state is not Lifecycle.FINE_TUNING and self.get("round") < 2
        return self.graft.isolate == "always"

    def bounds(self) -> tuple[int, int]:
        """First feature of the chunk and the first after it."""
        width, many = self.site.features, len(self.site.slots)
        size, more = divmod(width, many)
        first = self.index * size + min(self.index, more)
        return first, first + size + (self.index < more)

    def listen(self) -> None:
        """Take gradients of the task away from `.grad` as they come: nothing that looks at the host's
        gradients (a scaler, clipping) meets a seed's."""
        self.deaf()
        if self.seed is not None:
            for name, parameter in self.seed.named().items():
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._taker(name)))

    def deaf(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _taker(self, name: str) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                # The loss scale of this moment, and nothing of an overflow, which the scaler will answer.
                scale = self.site.loss_scale()
                grad = grad if scale is None else grad * scale.reciprocal().to(grad.device)
                self.take(name, torch.where(torch.isfinite(grad).all(), grad, torch.zeros_like(grad)))

        return take

    def take(self, name: str, grad: Tensor) -> None:
        """Add to what the next step learns from."""
        held = self.grads.get(name)
        self.grads[name] = grad.detach().clone() if held is None else held.add_(grad)

    def overheard(self, g: Tensor) -> None:
        """The root mean square of a gradient at the seed's result."""
        self.pull = torch.linalg.vector_norm(g, dtype=torch.float32) / max(g.numel(), 1) ** 0.5

    def drop(self) -> None:
        """Forget gradients that no step used."""
        self.grads, self.batches = {}, 0

    def add(self, name: str, value: Tensor) -> None:
        """To a sum of the probe, on the device."""
        column = self.site.state.device["probe"][self.index]
        column[_P[name]] += value

    def spec(self) -> Spec | None:
        """What its chunk looks like, once the layer was called."""
        seen = self.site.spec
        if seen is None:
            return None
        first, end = self.bounds()
        shape = list(seen.shape)
        shape[self.site.axis] = end - first
        return Spec(tuple(shape), seen.dtype, seen.device)


class Site:
    """A wrapped layer: its slots, its state tensor, and what its forward does beyond the host's."""

    def __init__(self, name: str, module: nn.Module, slots: int, key: str, radius: float) -> None:
        self.name, self.key, self.original = name, key, type(module)
        self.chain: nn.ModuleList = nn.ModuleList()
        self.slots = tuple(Slot(self, i) for i in range(slots))
        place = next((t.device for t in module.parameters()), torch.device("cpu"))
        self.state = StateTensor(slots, place)
        self.radius = radius
        self.spec: Spec | None = None
        self.observer: Observer | None = None
        self.sampling = False
        self.teaching = True  # False on steps that only measure
        self.loss_scale: Callable[[], Tensor | None] = _no_scale
        self.active: tuple[Slot, ...] = ()
        self.quiet = self.watched = self._busy = False
        self._copies = False
        traced.enrol(key, self)
        self.refresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        """A copy that stands alone: nobody observes it and no scaler scales its loss."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        left_out = ("loss_scale", "observer", "_attend")
        made.__dict__.update(
            {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in left_out}
        )
        made.key = f"{uuid.uuid4().hex[:12]}:{self.name}"
        made.loss_scale, made.observer, made.sampling = _no_scale, None, False
        traced.enrol(made.key, made)
        made.refresh()
        return made

    @property
    def axis(self) -> int:
        """The axis of the features: channels of images, else the last."""
        return 1 if self.spec is not None and len(self.spec.shape) == 4 else -1

    @property
    def features(self) -> int:
        """Features of the layer's result; 0 until it was called."""
        return self.spec.shape[self.axis] if self.spec is not None else 0

    def refresh(self) -> None:
        """Called whenever something changes that the forward depends on."""
        codes = self.state.column("lifecycle")
        held = overrides.get()
        self.active = ()
        if any(codes):
            self.active = tuple(s for s, code in zip(self.slots, codes, strict=True) if code in _ACTIVE)
        touched = any(s.id in held for s in self.active)
        self._busy = bool(self.active or len(self.chain) or touched or self.spec is None)
        self.sample(self.sampling)

    def sample(self, on: bool) -> None:
        """Whether the next forwards are observed."""
        self.sampling = on
        self._attend = getattr(self.observer, "attend", None) if on else None
        self.quiet = not (self._busy or on)
        self.watched = on and not self._busy
        traced.hear(self.key, self.quiet)

    def run(self, h: Tensor, counts: bool = True) -> Tensor:
        """The layer's result from the host's; `counts` as in `watch`."""
        if self.sampling and torch.is_grad_enabled():  # not a validation
            hear = self.watch(h, counts)
            if hear is not None and h.requires_grad:
                _hook(h, hear)
        else:
            self._see(h)
        if not self._busy:
            return h
        for graft in self.chain:
            h = graft(h)
        return self._through(h) if self.active else h

    def _see(self, h: Tensor) -> None:
        seen = self.spec
        if seen is not None and h.shape == seen.shape and h.dtype is seen.dtype and h.device == seen.device:
            return
        if seen is None or h.numel() > 0:
            self.spec = Spec(tuple(h.shape), h.dtype, h.device)
            if self.features < len(self.slots):
                told = f"{self.name} has {self.features} features and {len(self.slots)} chunks"
                self.spec = seen
                raise fail("E1015", told, node=self.name)
            self.state.move(h.device)
            self.refresh()

    def watch(self, h: Tensor, counts: bool = True) -> Callable[[Tensor], None] | None:
        """Have h observed; what has its gradient observed. `counts` False where h was observed before, in
        the forward that this one repeats: then for its gradient alone."""
        attend = self._attend
        hear = attend(self, h) if attend is not None and graph_task() == -1 else None
        if hear is None:
            hear = self._again(h, counts) if recomputing() else self._seated(h)
        return hear

    def _again(self, h: Tensor, counts: bool) -> Callable[[Tensor], None]:
        """The same in a forward that is computed again, all of it as the gradient comes: only then is h
        of the graph that the backward goes through. Else the first forward is, and was observed."""
        self._see(h)
        kept = h.detach().clone()

        def heard(g: Tensor) -> None:
            hear = self._seated(kept, counts)
            if hear is not None:
                hear(g)

        return heard

    def _seated(self, h: Tensor, counts: bool = True) -> Callable[[Tensor], None] | None:
        """The same where the observer has not met results like this one, or takes each half by itself."""
        self._see(h)
        observer: Any = self.observer
        columns = self.state.device["health"]
        if observer is None or h.numel() == 0:
            return None
        if hasattr(observer, "seat") and observer.seat(self, h, columns):
            return observer.attend(self, h, counts)

        @torch.no_grad()
        def gradient(g: Tensor) -> None:
            observer.gradient(self, g.detach(), columns)

        if counts:
            with torch.no_grad():
                observer.activation(self, h.detach(), columns)
        return gradient

    # -- slots
    # ---------------------------------------------------------------------------------------------------

    def _through(self, h: Tensor) -> Tensor:
        held = overrides.get()
        training = [s for s in self.active if s.state is Lifecycle.TRAINING and s.id not in held]
        live = [s for s in self.active if s not in training]
        if training and not held and torch.is_grad_enabled():
            h = self._overhear(h, training)
        if not live:
            return h
        if len(self.slots) == 1:
            return self._grafted(live[0], h, held)
        parts = {s.index: s for s in live}
        pieces = []
        for slot in self.slots:
            first, end = slot.bounds()
            piece = h.narrow(self.axis, first, end - first)
            pieces.append(self._grafted(slot, piece, held) if slot.index in parts else piece)
        return torch.cat(pieces, self.axis)

    def _grafted(self, slot: Slot, h: Tensor, held: Mapping[str, Tensor | float]) -> Tensor:
        """h with one seed blended in. What is read on the device is a copy, so that the column may be written
        before the backward."""
        seed, isolated = slot.seed, slot.isolated
        assert seed is not None
        alpha = self.state.device["alpha"][slot.index].clone()
        if slot.id in held:
            alpha = torch.as_tensor(held[slot.id], dtype=torch.float32, device=h.device)
        graph = torch.is_grad_enabled() and (seed.learns or not isolated)
        told: list[Tensor] = []
        with torch.set_grad_enabled(graph):
            z = self._called(slot, h.detach() if isolated else guarded(h, told))
        if slot.id in held and z.requires_grad:
            z.register_hook(slot.overheard)  # a shadow step: how strong the task's gradient is at z
        finite = torch.isfinite(z.detach()).all()
        told.append(finite)
        if not recomputing():  # what the host gave already is no fault of the seed
            own = ~finite & torch.isfinite(h.detach()).all()
            self.state.device["fault"][slot.index].masked_fill_(own, int(Fault.NONFINITE))
        return blend(h, z, alpha, finite, isolated=isolated)

    def _called(self, slot: Slot, h: Tensor) -> Tensor:
        """A seed whose result is in the host's: when its kernels fail the eager twin answers."""
        seed = slot.seed
        assert seed is not None
        with torch.autocast(h.device.type, enabled=False):
            z = seed(h)
        if seed.broken and not slot.broken:
            slot.broken = True
            slot.fail(Fault.EXEC)
        return z

    def _overhear(self, h: Tensor, slots: list[Slot]) -> Tensor:
        """Have the backward bring the gradient at h to seeds that incubate. The value is h itself."""
        if not h.requires_grad:
            h = (
                h.detach().requires_grad_().clone()
            )  # nothing below learns, and the backward must come this far
        kept = h.detach().clone() if self._copies else h.detach()
        version = kept._version

        def hook(g: Tensor) -> None:
            if kept._version != version:
                self._copies = True  # the host wrote over its result: keep a copy from now on
                return
            for slot in slots:
                self._learn(slot, kept, g)

        h.register_hook(hook)
        return h

    def _learn(self, slot: Slot, h: Tensor, g: Tensor) -> None:
        """One batch of incubation, inside the host's backward. Nothing that fails here reaches the host."""
        if slot.seed is None or slot.state is not Lifecycle.TRAINING or slot.broken:
            return
        try:
            with same_random(h.device), torch.autocast(h.device.type, enabled=False):
                self._taught(slot, slot.seed, *self._chunk(slot, h, g))
        except EsperError as error:
            if error.details.get("cuda_error") in STICKY:
                raise
            slot.broken = True
            slot.fail(Fault.EXEC)
            slot.notes["error"] = f"{error.code} {error.message}"
        if slot.seed.broken and not slot.broken:
            slot.broken = True
            slot.fail(Fault.EXEC)

    def _chunk(self, slot: Slot, h: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.slots) == 1:
            return h, g.detach()
        first, end = slot.bounds()
        size = end - first
        return h.narrow(self.axis, first, size), g.detach().narrow(self.axis, first, size)

    def _taught(self, slot: Slot, seed: Seed, h: Tensor, g: Tensor) -> None:
        teach = self.teaching and slot.graft.objective != "shadow"
        named = seed.named()
        with torch.set_grad_enabled(teach):
            z = seed(h)
        with torch.no_grad():
            d = z.detach() - h
            at = incubation.scales(h, g, self.radius)
            sane = torch.isfinite(at.g) & torch.isfinite(at.h)
            good = sane & torch.isfinite(d).all()
            self.state.device["fault"][slot.index].masked_fill_(sane & ~good, int(Fault.NONFINITE))
            slot.add("nonfinite", (sane & ~good).float())
            if not self.teaching:
                self._measured(slot, d, g, at, good)
                return
        if teach:
            cotangent = torch.where(good, incubation.slope(slot.graft.objective, d, g, at), 0.0)
            grads = torch.autograd.grad(z, list(named.values()), cotangent.to(z.dtype))
            self._noted(slot, named, grads, at, g, good)

    def _measured(self, slot: Slot, d: Tensor, g: Tensor, at: incubation.Scales, good: Tensor) -> None:
        """A held-out batch: what G2 is judged by."""
        gain, predicted, ratio = (torch.where(good, v, 0.0) for v in incubation.held_out(d, g, at))
        for name, value in (("held", good.float()), ("gain", gain), ("gain_sq", gain * gain),
                            ("predicted", predicted), ("predicted_sq", predicted * predicted),
                            ("ratio", ratio)):  # fmt: skip
            slot.add(name, value)
        column = self.state.device["probe"][slot.index]
        column[_P["ratio_max"]] = torch.maximum(column[_P["ratio_max"]], ratio)

    def _noted(
        self,
        slot: Slot,
        named: Mapping[str, nn.Parameter],
        grads: tuple[Tensor, ...],
        at: incubation.Scales,
        g: Tensor,
        good: Tensor,
    ) -> None:
        norm = torch.stack([torch.linalg.vector_norm(v, dtype=torch.float32) for v in grads]).norm()
        fine = good & torch.isfinite(norm)
        slot.add("nonfinite", (good & ~fine).float())
        slot.add("grads", fine.float())
        count = max(sum(p.numel() for p in named.values()), 1)
        # By the host's own scale: what the same step would move h by, so that no loss scale enters.
        slot.add("seed_grad", torch.where(fine, norm * at.reach / count**0.5, 0.0))
        slot.add("host_grad", fine.float() * (1.0 / max(g.numel(), 1) ** 0.5))
        for name, value in zip(named, grads, strict=True):
            slot.take(name, torch.where(fine, value, torch.zeros_like(value)))
        slot.batches += 1


@contextmanager
def overriding(sites: Mapping[str, Site], alphas: Mapping[str, Tensor | float]) -> Iterator[None]:
    """Forwards of this context with these alphas instead."""
    mark = overrides.set({**overrides.get(), **alphas})
    try:
        for site in sites.values():
            site.refresh()
        yield
    finally:
        overrides.reset(mark)
        for site in sites.values():
            site.refresh()
