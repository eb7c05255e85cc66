"""`Block`: an artifact as an nn.Module. Parameters under the blueprint's names; forward launches pre-built
plans."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler

from esper_ir.diagnostics import EsperError
from library.manifest import blueprint_document
from library.records import ArtifactRecord
from runtime import flops, functions, node, parameters, recovery
from runtime.eager import twin_of
from runtime.errors import fail
from runtime.executor import Counters, Program, Ready
from runtime.functions import PLAIN, State, lookup
from runtime.loader import Entry, load_entry, tags_of
from runtime.operators import enrol, mask_of
from runtime.state import device_of, recomputing, with_drawn

log = logging.getLogger("esper.runtime")
DISPATCH = ("auto", "op")
FALLBACK = ("error", "eager")
# What the eager twin may answer instead, when the caller opted in: sizes, buckets and variants that are
# not there.
SERVED_EAGERLY = frozenset({"E0812", "E0813", "E0815"})
_is_compiling = torch.compiler.is_compiling
_known = node.call
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_transforms = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)


class Handle:
    """An artifact and how it was asked for: shared by copies of a block, pickled by id, one program per
    device."""

    def __init__(self, entry: Entry, options: dict[str, Any]) -> None:
        self.entry, self.options = entry, options
        self.artifact_id = entry.record.id
        self._others: dict[int, Entry] = {entry.program.index: entry}
        self.twin: nn.Module | None = None

    def on(self, index: int) -> Entry:
        """The same artifact on another card of this machine."""
        if index not in self._others:
            device = torch.device("cuda", index)
            self._others[index] = load_entry(self.artifact_id, device=device, **self.options)
        return self._others[index]

    def eager(self) -> nn.Module:
        if self.twin is None:
            self.twin = twin_of(blueprint_document(self.entry.container.manifest))
        return self.twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return self

    def __copy__(self) -> Handle:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        device = self.entry.program.device
        place = self.options["library"]
        options = {**self.options, "library": None if place is None else str(getattr(place, "home", place))}
        return restore, (self.artifact_id, device.type, options)


def restore(artifact_id: str, kind: str, options: dict[str, Any]) -> Handle:
    """What unpickling calls: load by id, with every check, on this process's default device of that kind."""
    return Handle(load_entry(artifact_id, device=torch.device(kind), **options), options)


class Block(nn.Module):
    """`block(*inputs)` with the blueprint's inputs in order or by name; returns its output, or a tuple of
    them.

    Errors of a call: E0810 shape, E0811 dtype, E0813 size outside the declared range, E0814 device, E0816
    double backward, E0817 torch.func, E0818 kind of tensor, E0820 launch failure.
    """

    _debug: bool
    _handle: Handle
    _fallback: str
    _dispatch: str
    _name: str
    _blueprint: str
    _counters: Counters
    _arity: int
    _own_names: tuple[str, ...]
    _can: tuple[bool, ...]
    _flat: bool
    _state: State
    _index: int
    _broken: bool

    def __init__(
        self,
        handle: Handle,
        *,
        fallback: str = "error",
        dispatch: str = "auto",
        functional: bool = False,
        device: torch.device | None = None,
        debug: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        entry = handle.entry
        own = () if functional else entry.own
        counters = Counters()
        counters.loads = 1
        vars(self).update(  # at once: a module looks at every attribute that is set
            _debug=debug, _handle=handle, _fallback=fallback, _dispatch=dispatch, _name=handle.artifact_id,
            _blueprint=entry.program.title, _counters=counters, _can=entry.can,
            _arity=len(entry.can) - len(own), _own_names=tuple([s.name for s in own]),
            _flat=functional or entry.flat,
        )  # fmt: skip
        if own:
            place = device if device is not None else entry.program.device
            parameters.attach(self, entry.leaves, place, generator)
        self._bind()

    def _bind(self) -> None:
        """What cannot be copied or pickled, from what can."""
        entry: Entry = self._handle.entry
        entry.pin(self)
        entry.program.code.prime()
        self._seat(entry.program)

    def _seat(self, program: Program) -> None:
        """Run calls on this program from now on."""
        held = vars(self)
        if "_state" in held:
            self._state.tally(self._counters)
        state = State(program, self._counters, self._debug)
        state.gradients.recover = recovery.recoverer(weakref.ref(self))
        held.update(_state=state, _index=program.index, _broken=False)
        enrol(program)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_state", "_index")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Warns of a conversion to dtypes that no call of this block takes; it is allowed, as for a file."""
        before = [t.dtype for t in self.own_leaves()]
        done = super()._apply(fn, recurse)
        for name, was, now in zip(self._own_names, before, self.own_leaves(), strict=True):
            declared = self._declared(name)
            if now.dtype is not was and now.dtype is not declared:
                warnings.warn(
                    f"{name} of {self._name} is {now.dtype} from here on and declared {declared}: calls will "
                    "be refused (E0811). Compile the blueprint for that dtype, or convert back",
                    stacklevel=3,
                )
                break
        return done

    def _declared(self, name: str) -> torch.dtype:
        return next(leaf.dtype for leaf in self._handle.entry.leaves if leaf.spec.name == name)

    def extra_repr(self) -> str:
        return f"{self._blueprint}, {self._name}"

    @property
    def artifact_id(self) -> str:
        return self._name

    @property
    def program(self) -> Program:
        return self._state.program

    @property
    def record(self) -> ArtifactRecord:
        """The artifact's row in the library when it was loaded."""
        return self._handle.entry.record

    @property
    def failed_in_use(self) -> bool:
        """Whether a launch failed, so that the eager twin answers."""
        return self._broken

    # -- calls
    # ---------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        if named:
            inputs = self._in_order(inputs, named)
        if _is_compiling() or self._dispatch == "op" or _modes():
            return self._by_operator(inputs)
        tensors = [*inputs, *self._own()] if self._own_names else list(inputs)
        if _transforms() or forward_ad._current_level >= 0:
            raise functions.no_transform(self._name)
        if _profiler._is_profiler_enabled:
            with torch.profiler.record_function(f"esper::{self._blueprint}"):
                made = _known(self._state.node, tensors)
                return self._call(tensors) if made is None else made
        made = _known(self._state.node, tensors)
        return self._call(tensors) if made is None else made

    def _in_order(self, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Inputs of which some were passed by name. E0810."""
        names = self._takes()[len(inputs) :]
        if sorted(named) != sorted(names):
            raise self._miscounted(f"{len(inputs)} in order and {', '.join(named)} by name")
        return (*inputs, *[named[name] for name in names])

    def _takes(self) -> list[str]:
        """Names of what a caller passes."""
        return [s.name for s in self.program.interface.inputs[: self._arity]]

    def _miscounted(self, got: str) -> EsperError:
        names = self._takes()
        some = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        called = f"block({', '.join(names)})"
        return fail("E0810", f"takes {some} ({', '.join(names)}), got {got}", node=self._name, hint=called)

    def _own(self) -> list[Tensor]:
        """Parameters, buffers and constants as they are now; what replaced one (parametrize, swapping) is
        found by name."""
        if self._flat:
            found = self._parameters
            try:
                return [found[name] for name in self._own_names]  # type: ignore[misc]
            except KeyError:
                return [self._leaf(name) for name in self._own_names]
        return [self._leaf(name) for name in self._own_names]

    def _leaf(self, dotted: str) -> Tensor:
        path, _, name = dotted.rpartition(".")
        return getattr(self.get_submodule(path), name)

    def _call(self, tensors: list[Tensor]) -> Any:
        state = self._state
        try:
            if self._index >= 0 and _current_device() != self._index:
                return self._elsewhere(tensors)
            grad = functions.records()
            found = lookup(state.memo.hot, tensors, state.types, grad)
            if found is None:
                if any(t.__class__ not in PLAIN for t in tensors):
                    return self._special(tensors)
                if (over := len(tensors) - len(self._own_names) - self._arity) != 0:
                    raise self._miscounted(str(len(self._takes()) + over))
                found = state.choose(tensors, grad)
            return _launch(state, found, tensors)
        except EsperError as error:
            return self._instead(error, tensors)

    def _elsewhere(self, tensors: list[Tensor]) -> Any:
        """Tensors on a card that is not the current one, or another than the block was loaded on."""
        index = tensors[0].get_device() if tensors else self._index
        if index >= 0 and index != self._index:
            entry = self._handle.on(index)
            entry.pin(self)
            entry.program.code.prime()
            self._seat(entry.program)
        with torch.cuda.device(self._index):
            grad = functions.records()
            return _launch(self._state, self._state.choose(tensors, grad), tensors)

    def _moved(self, tensors: list[Tensor]) -> bool:
        """Whether all tensors are on one card, and not on the one the block was loaded on."""
        places = {t.get_device() for t in tensors}
        return len(places) == 1 and places.isdisjoint({self._index, -1})

    def on_images(self, tensors: list[Tensor], turned: int) -> Any:
        """A functional block traced by a compiler, on tensors of which those in the mask `turned` are images
        [n, c, h, w] where the block takes [n, h, w, c]; its outputs of rank 4 are images too."""
        return self._operate(tensors, turned)

    def _by_operator(self, inputs: Iterable[Tensor]) -> Any:
        if not _is_compiling():
            flops.watch(self._handle.entry)
        return self._operate([*inputs, *[self._leaf(name) for name in self._own_names]])

    def _operate(self, tensors: list[Tensor], turned: int = 0) -> Any:
        mask = mask_of(tensors, self._can) if functions.records() else 0
        found = torch.ops.esper.fwd(self._name, mask, tensors, turned)
        count = len(self._state.program.interface.outputs)
        return found[0] if count == 1 else tuple(found[:count])

    def _special(self, tensors: list[Tensor]) -> Any:
        """Subclasses of Tensor: those that dispatch (fake, functional) go by the operator, distributed
        ones are refused."""
        for tensor in tensors:
            kind = type(tensor)
            if not isinstance(tensor, Tensor):
                raise functions.no_tensor(self._name, tensor)
            if kind.__name__ in ("DTensor", "NestedTensor", "GradTrackingTensor"):
                raise fail(
                    "E0818",
                    f"a {kind.__name__} was passed to {self._name}",
                    node=self._name,
                    hint="pass local tensors: tensor.to_local(), or unpack the nested tensor",
                )
        return self._operate(tensors)

    def _instead(self, error: EsperError, tensors: list[Tensor]) -> Any:
        """Shapes alone on the meta device; the eager twin, if the caller opted in and it can answer."""
        if error.code in ("E0814", "E0818") and all(getattr(t, "is_meta", False) for t in tensors):
            return self._operate(tensors)
        if error.code == "E0814" and self._index >= 0 and self._moved(tensors):
            return self._elsewhere(tensors)
        if error.code == recovery.LAUNCH_FAILED:
            self.give_up(error)
            self._counters.eager_fallbacks += 1
            return self.by_twin(tensors)
        if self._fallback != "eager" or error.code not in SERVED_EAGERLY:
            raise error
        if not self._counters.eager_fallbacks:
            log.warning("%s: answered by the eager twin: %s", self._name, error.message)
        self._counters.eager_fallbacks += 1
        return self.by_twin(tensors)

    def by_twin(self, tensors: list[Tensor]) -> Any:
        """The same by the eager twin, on every leaf in order."""
        with torch.autocast(tensors[0].device.type, enabled=False):
            return self._handle.eager()(*tensors)

    def own_leaves(self) -> list[Tensor]:
        """Parameters, buffers and constants of the block in blueprint order; none of a functional block."""
        return [self._leaf(name) for name in self._own_names]

    def give_up(self, error: EsperError) -> None:
        """A launch failed: tell, and answer by the twin from now on; raises the error where nothing else can
        run on the device (its context is lost), and under ESPER_STRICT=1."""
        recovery.tell(self._handle.entry, self._handle.options["library"], error)
        if not recovery.survived(error):
            raise error
        if not self._broken:
            log.error("%s failed, its eager twin answers from now on: %s", self._name, error.message)
            self._state.tally(self._counters)
            self._state, self._broken = recovery.broken(self._state, error), True

    def rest(self, on: bool) -> None:
        """Have the eager twin answer (counted as a fallback) for as long as memory is short; only a block
        that was loaded with fallback="eager" can."""
        if self._broken or self._fallback != "eager":
            return
        program = self._state.program
        if on:
            error = fail("E0815", "kernels rest while memory is short", node=self._name)
            self._state.tally(self._counters)
            self._state = recovery.broken(self._state, error)
        else:
            self._seat(program)

    # -- facts
    # ---------------------------------------------------------------------------------------------------

    def plan_digest(self) -> str:
        """Digest of everything that decides which kernels run, for ranks to compare."""
        return self._state.program.plan_digest()

    def _counts(self) -> dict[str, int]:
        """This block's counters. Calls through the operators are counted per artifact and added to every
        block of it."""
        own, shared = self._counters.as_dict(), self._state.program.counters.as_dict()
        own["launches"] += self._state.launched()
        own["copies"] += self._state.copied()
        return {name: own[name] + shared[name] for name in own}

    def uncount(self) -> None:
        """Counters as after loading."""
        self._seat(self.program)
        for counter in Counters.__slots__:
            setattr(self._counters, counter, int(counter == "loads"))

    def report(self) -> dict[str, Any]:
        """Artifact, verdict, what was chosen, counters and tolerated differences, as plain data."""
        entry, program = self._handle.entry, self._state.program
        verdict, text = entry.verdict, blueprint_document(entry.container.manifest)
        return {
            "artifact": self._name,
            "blueprint": entry.container.manifest["blueprint"]["id"],
            "device": str(program.device),
            "target": dict(entry.container.manifest["target"]),
            "pipeline": entry.record.pipeline,
            "determinism": entry.record.determinism,
            "native": program.uses_native,
            "failed_in_use": self._broken,
            "dispatch": self._dispatch,
            "draws": list(program.interface.random),
            "updates": [name for name, _ in program.interface.updates],
            "imported_mode": text.get("metadata", {}).get("imported", {}).get("mode"),
            "variants": program.variants(),
            "counters": self._counts(),
            "verdict": verdict.__dict__.copy() if verdict is not None else None,
            "mismatches": list(entry.notes),
            "tags": tags_of(self._name, self._handle.options["library"]),
            "plan_digest": self.plan_digest(),
        }


def _launch(state: State, found: tuple[Ready, bool], tensors: list[Tensor]) -> Any:
    """Run the chosen plan: in a graph, or alone."""
    ready, asked = found
    if asked:
        return functions.call(state, ready, *tensors)
    slots = ready(tensors)
    state.counters.launches += ready.launches
    outputs = ready.layout.outputs
    return slots[outputs[0]] if len(outputs) == 1 else tuple([slots[i] for i in outputs])


class StatefulBlock(Block):
    """A block that draws, or whose buffers a training step updates: called and seen like any other."""

    def _takes(self) -> list[str]:
        drawn = self.program.interface.random
        return [name for name in super()._takes() if name not in drawn]

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        if named:
            inputs = self._in_order(inputs, named)
        interface = self.program.interface
        found = super().forward(*with_drawn(interface, inputs, device_of(inputs, self.program.device)))
        if not interface.updates:
            return found
        count = len(found) - len(interface.updates)
        if self.training and not recomputing():
            with torch.no_grad():
                for name, at in interface.updates:
                    self._leaf(name).copy_(found[at])
        return found[0] if count == 1 else found[:count]


class FunctionalBlock(Block):
    """The same as a plain callable over every leaf: `fn(x, w)`, with gradients for all of them; what a block
    draws is given, what it updates returned."""


def build(
    name: str,
    *,
    device: torch.device | str | None = None,
    library: Path | str | Any | None = None,
    functional: bool = False,
    allow_unvalidated: bool = False,
    fallback: str = "error",
    dispatch: str = "auto",
    debug: bool = False,
    generator: torch.Generator | None = None,
) -> Block:
    """What `runtime.load` does; see there. `generator`: what parameters are drawn from, in place of the
    process's own (on the processor)."""
    for value, known, what in ((fallback, FALLBACK, "fallback"), (dispatch, DISPATCH, "dispatch")):
        if value not in known:
            raise fail("E0819", f"{what}={value!r}", hint=f"one of {', '.join(known)}")
    options = {"library": library, "allow_unvalidated": allow_unvalidated}
    wanted = torch.device(device) if device is not None else None
    meta = wanted.type == "meta" if wanted is not None else torch.get_default_device().type == "meta"
    entry = load_entry(name, device=None if meta else wanted, **options)
    made = torch.device("meta") if meta else None
    interface = entry.program.interface
    stateful = bool(interface.updates or interface.random)
    kind = FunctionalBlock if functional else StatefulBlock if stateful else Block
    return kind(
        Handle(entry, options),
        fallback=fallback,
        dispatch=dispatch,
        functional=functional,
        device=made,
        debug=debug,
        generator=generator,
    )
