"""Adding and removing parameters under a running optimizer, with its schedulers.

A graft has one group of its own, made after the first group (so schedules that keep their numbers in the
groups know it) and named by `KEY`. Schedulers keep more numbers in lists beside the groups; those are
extended and cut in the same call. Optimizers that cannot take such a group (LBFGS works on one, SparseAdam
on sparse gradients, Muon on matrices) get a companion: an AdamW of the seeds' own, stepped after each step of
the host's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runtime.seeds.errors import fail

KEY = "esper_graft"
_PLAIN = (bool, int, float, str)
COMPANION_LR = 1e-3
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_LISTS = (
    "base_lrs", "max_lrs", "min_lrs", "lr_lambdas", "_last_lr", "base_momentums", "max_momentums",
)  # fmt: skip


def _alone(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether the optimizer cannot have these as a group of their own."""
    kind = type(optimizer)
    if issubclass(kind, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        return True
    muon = getattr(torch.optim, "Muon", None)
    return muon is not None and issubclass(kind, muon) and any(p.dim() != 2 for p in parameters)


def all_schedulers(scheduler: Any) -> list[Any]:
    """A scheduler (or several) with those inside it, each once."""
    if scheduler is None:
        return []
    given = list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler]
    found: list[Any] = []
    for one in given:
        found += [one, *all_schedulers(getattr(one, "_schedulers", None))]
    return list({id(s): s for s in found}.values())


class Surgeon:
    """What holds an optimizer and its schedulers, and operates on both."""

    def __init__(self, optimizer: Optimizer, scheduler: Any = None) -> None:
        if not isinstance(optimizer, Optimizer):
            raise fail("E1008", f"{type(optimizer).__name__} is no torch.optim.Optimizer")
        self.optimizer, self.schedulers = optimizer, all_schedulers(scheduler)
        for one in self.schedulers:
            owner = getattr(one, "optimizer", optimizer)
            if owner is not optimizer:
                raise fail("E1008", f"{type(one).__name__} schedules another optimizer")
        self.companion: torch.optim.AdamW | None = None

    def _holder(self, name: str) -> tuple[Optimizer, int] | None:
        for held in (self.optimizer, self.companion):
            for at, group in enumerate(held.param_groups if held is not None else ()):
                if held is not None and group.get(KEY) == name:
                    return held, at
        return None

    def accompanies(self, name: str) -> bool:
        """Whether the graft's group is the companion's."""
        found = self._holder(name) if self.companion is not None else None
        return found is not None and found[0] is self.companion

    def names(self) -> list[str]:
        """Grafts that have a group."""
        held = [self.optimizer, *([self.companion] if self.companion else [])]
        return [g[KEY] for o in held for g in o.param_groups if KEY in g]

    def insert(self, name: str, named: Mapping[str, nn.Parameter], lr_scale: float = 1.0) -> bool:
        """A group for a graft's parameters. False when there are none to learn. E1008 when the optimizer
        refuses them; nothing is changed then."""
        parameters = list(named.values())
        if not parameters:
            return False
        if self._holder(name) is not None:
            raise fail("E1008", f"{name} has a group already", node=name)
        if _alone(self.optimizer, parameters):
            self._accompany(name, parameters, lr_scale)
            return True
        group = _after(self.optimizer.param_groups[0], lr_scale)
        given: list[Any] = parameters
        if "param_names" in self.optimizer.param_groups[0]:
            given = [(f"{name}.{leaf}", p) for leaf, p in named.items()]
        try:
            self.optimizer.add_param_group({**group, "params": given, KEY: name})
        except (ValueError, TypeError) as error:
            kind = type(self.optimizer).__name__
            raise fail("E1008", f"{kind} refuses {name}: {error}", node=name) from None
        _first_state(self.optimizer, parameters)
        for scheduler in self.schedulers:
            _lengthen(scheduler, lr_scale, len(self.optimizer.param_groups))
        return True

    def _accompany(self, name: str, parameters: list[nn.Parameter], lr_scale: float) -> None:
        group: dict[str, Any] = {"params": parameters, "lr": COMPANION_LR * lr_scale, KEY: name}
        if self.companion is None:
            self.companion = torch.optim.AdamW([group], lr=COMPANION_LR, weight_decay=0.0)
        else:
            self.companion.add_param_group(group)

    def remove(self, name: str) -> bool:
        """Take a graft's group, its state and its places in the schedulers away. False when it has none."""
        found = self._holder(name)
        if found is None:
            return False
        held, at = found
        group = held.param_groups.pop(at)
        for parameter in group["params"]:
            held.state.pop(parameter, None)
            parameter.grad = None
        if held is self.companion:
            self.companion = self.companion if held.param_groups else None
            return True
        for scheduler in self.schedulers:
            _shorten(scheduler, at)
        return True

    def rename(self, name: str, fresh: str) -> None:
        """The group of a graft under another name."""
        found = self._holder(name)
        if found is not None:
            found[0].param_groups[found[1]][KEY] = fresh

    def state_dict(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """Optimizer and companion by the names of their parameters, and the schedulers."""
        names = {id(p): name for name, p in parameters.items()}
        held = self.companion
        return {
            "optimizer": named_state(self.optimizer, names),
            "companion": named_state(held, names) if held is not None else None,
            "schedulers": [_copied(s.state_dict()) for s in self.schedulers],
        }

    def load_state_dict(self, saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
        """Become what `state_dict` gave. E1006 for other parameters or schedulers."""
        if len(saved["schedulers"]) != len(self.schedulers):
            raise fail("E1006", f"the checkpoint has {len(saved['schedulers'])} schedulers, this run "
                       f"{len(self.schedulers)}")  # fmt: skip
        load_named_state(self.optimizer, saved["optimizer"], parameters)
        self.companion = None
        if saved["companion"] is not None:
            self.companion = torch.optim.AdamW([next(iter(parameters.values()))], lr=COMPANION_LR)
            load_named_state(self.companion, saved["companion"], parameters)
        groups = len(self.optimizer.param_groups)
        for scheduler, state in zip(self.schedulers, saved["schedulers"], strict=True):
            lambdas = getattr(scheduler, "lr_lambdas", None)
            if isinstance(lambdas, list):
                lambdas[:] = [*lambdas[:groups], *[lambdas[0]] * (groups - len(lambdas))]
            scheduler.load_state_dict(_copied(state))

    def parameters(self, name: str) -> list[nn.Parameter]:
        found = self._holder(name)
        return [] if found is None else list(found[0].param_groups[found[1]]["params"])


def _after(first: Mapping[str, Any], lr_scale: float) -> dict[str, Any]:
    """A group like the first, its rates scaled."""
    left_out = ("params", "param_names", KEY)
    group: dict[str, Any] = {k: v for k, v in first.items() if k not in left_out}
    for option, value in group.items():
        if value is not None and not isinstance(value, _PLAIN):
            group[option] = copy.deepcopy(value)
    for rate in _RATES:
        if rate in group and lr_scale != 1.0:
            group[rate] = group[rate] * lr_scale
    return group


def _first_state(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """State that an optimizer makes when it is made, and `add_param_group` forgets."""
    if isinstance(optimizer, torch.optim.Adagrad):
        group = optimizer.param_groups[-1]
        for parameter in parameters:
            value = group["initial_accumulator_value"]
            full = torch.full_like(parameter, value, memory_format=torch.preserve_format)
            optimizer.state[parameter] = {"step": torch.tensor(0.0), "sum": full}


def _lengthen(scheduler: Any, lr_scale: float, groups: int) -> None:
    for name in _LISTS:
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and len(values) == groups - 1:
            value = copy.deepcopy(values[0]) if isinstance(values[0], Tensor) else values[0]
            scaled = name in ("base_lrs", "max_lrs", "min_lrs", "_last_lr") and lr_scale != 1.0
            values.append(value * lr_scale if scaled else value)


def _shorten(scheduler: Any, at: int) -> None:
    for name in _LISTS:
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and len(values) > at:
            del values[at]


# -- state by name
# -------------------------------------------------------------------------------------------------------


def named_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """State and options of an optimizer by the names of its parameters (`names`: name by id of the tensor);
    parameters that nothing names are E1008."""
    groups = []
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k != "params"}
        named = [_name(p, names) for p in group["params"]]
        groups.append({"options": copy.deepcopy(options), "names": named})
    state = {_name(p, names): _copied(s) for p, s in optimizer.state.items()}
    return {"kind": type(optimizer).__name__, "groups": groups, "state": state}


def _name(parameter: Tensor, names: Mapping[int, str]) -> str:
    found = names.get(id(parameter))
    if found is None:
        shape = list(parameter.shape)
        raise fail("E1008", f"the optimizer holds a parameter of shape {shape} that is not the model's")
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(v) for v in value)
    return copy.deepcopy(value)


def load_named_state(
    optimizer: Optimizer, saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Make an optimizer what `named_state` found: groups in that order with those options, state by name.
    E1006 when the parameters are not the same."""
    if saved["kind"] != type(optimizer).__name__:
        raise fail("E1006", f"the checkpoint is of {saved['kind']}, this is {type(optimizer).__name__}")
    wanted = [name for group in saved["groups"] for name in group["names"]]
    absent = [name for name in [*wanted, *saved["state"]] if name not in parameters]
    if absent:
        raise fail("E1006", f"the checkpoint has {absent[0]}, this model does not", node=absent[0])
    groups = [
        {**copy.deepcopy(g["options"]), "params": [parameters[n] for n in g["names"]]}
        for g in saved["groups"]
    ]
    optimizer.param_groups[:] = groups
    optimizer.state.clear()
    for name, state in saved["state"].items():
        optimizer.state[parameters[name]] = _copied(state)
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer._params = optimizer.param_groups[0]["params"]
