"""The controller's configuration: one frozen record with every default, from a mapping or a YAML file.

Unknown keys are refused with the nearest names; values are checked for type and range. Thresholds of the
gates are `runtime.seeds.lifecycle.Limits`, under the key `limits`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from runtime.seeds.commands import Graft
from runtime.seeds.lifecycle import Limits
from runtime.strategy.errors import fail

T = TypeVar("T")
POLICIES = ("heuristic", "random", "fixed_schedule", "off", "replay")
STRATEGIES = ("auto", "FIXED_RAMP", "PERFORMANCE_LINKED", "DRIFT_CONTROLLED", "GRAD_NORM_GATED")


@dataclass(frozen=True)
class PlateauSettings:
    """When progress has stopped: the best validation loss of the last `window` epochs is less than
    `min_improvement` (relative) below the best before. Not before epoch `warmup`."""

    window: int = 4
    min_improvement: float = 0.02
    warmup: int = 4


@dataclass(frozen=True)
class SiteSettings:
    """What makes a slot worth a seed. A slot's score is `gain_weight` times its share of the predicted gain
    plus the robust distance of its health from that of comparable slots; slots under `min_score` are left
    alone. `min_gain`, `min_alignment`: a predicted gain below either counts as none. `recovered`: a
    germinated seed is cancelled when the score fell under this share of what it was. `min_samples`:
    sampled steps before the health of a slot counts."""

    min_score: float = 3.0
    gain_weight: float = 6.0
    min_alignment: float = 0.2
    min_gain: float = 0.001
    recovered: float = 0.25
    min_samples: int = 4
    memory: float = 0.7


@dataclass(frozen=True)
class QuerySettings:
    """What the library is asked for. `required`, `preferred`, `excluded`: tags; `blueprints`: only these
    (ids or prefixes, best first; empty: any). `memory_pressure`: share of memory in use from which
    `low_memory` is preferred; `latency_budget_ms`: bound for p99 latency, from which `high_speed` is
    preferred as well. `candidates`: how many answers are looked at."""

    required: tuple[str, ...] = ()
    preferred: tuple[str, ...] = ("trainable", "numerically_stable")
    excluded: tuple[str, ...] = ()
    blueprints: tuple[str, ...] = ()
    memory_pressure: float = 0.8
    latency_budget_ms: float | None = None
    candidates: int = 50


@dataclass(frozen=True)
class Planned:
    """One line of a fixed schedule: at this epoch, this slot ("module/chunk") gets this artifact; without
    one, what a query finds."""

    epoch: int
    slot: str
    artifact: str = ""


@dataclass(frozen=True)
class Settings:
    """Everything a controller can be told. `waiting`: seeds that may wait in GERMINATED at a time;
    `fine_tune_epochs`: epochs of FINE_TUNING before its seed is measured again; `max_germinations`: in one
    run; `seed`: of the random policy; `random_chance`: that it germinates at an epoch; `telemetry_every`:
    steps between samples; `strategy`: of grafting, "auto" chooses by stability; `run_dir`: where events are
    written; `journal`: what the replay policy replays."""

    policy: str = "heuristic"
    plateau: PlateauSettings = PlateauSettings()
    sites: SiteSettings = SiteSettings()
    query: QuerySettings = QuerySettings()
    graft: Graft = Graft()
    limits: Limits | None = None
    schedule: tuple[Planned, ...] = ()
    strategy: str = "auto"
    waiting: int = 1
    fine_tune_epochs: int = 2
    max_germinations: int = 1000
    seed: int = 0
    random_chance: float = 0.2
    telemetry_every: int = 50
    run_dir: str = ""
    journal: str = ""
    tensorboard: bool = False
    field_reports: bool = True


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "policy": POLICIES,
    "strategy": STRATEGIES,
    "graft.operator": ("lerp", "add", "mul", "gate"),
    "graft.curve": ("linear", "sigmoid", "cosine"),
    "graft.objective": ("proximal", "reconstruct", "ste", "shadow"),
    "graft.isolate": ("until_fine_tuning", "always", "never"),
    "graft.fossil": ("frozen", "train"),
}
_INFINITE = math.inf
_RANGE: Mapping[str, tuple[float, float]] = {
    "plateau.window": (1, _INFINITE),
    "plateau.warmup": (0, _INFINITE),
    "sites.memory": (0, 1),
    "sites.recovered": (0, _INFINITE),
    "sites.min_samples": (0, _INFINITE),
    "query.candidates": (1, _INFINITE),
    "query.memory_pressure": (0, 1),
    "query.latency_budget_ms": (0, _INFINITE),
    "graft.ramp_steps": (0, _INFINITE),
    "graft.lr_scale": (1e-12, 1e12),
    "telemetry_every": (1, _INFINITE),
    "max_germinations": (0, _INFINITE),
    "waiting": (1, _INFINITE),
    "fine_tune_epochs": (1, _INFINITE),
    "random_chance": (0, 1),
}
"""Least and most; others are free, but finite."""


def settings_of(given: Settings | Mapping[str, Any] | Path | str | None) -> Settings:
    """From a record, a mapping, the path of a YAML file, or nothing. E1030 with the nearest names for keys
    that are not known, and for values of the wrong type or range."""
    if given is None:
        return Settings()
    if isinstance(given, Settings):
        return given
    if isinstance(given, Mapping):
        return _record(Settings, given, "")
    return _record(Settings, _read(Path(given)), "")


def _read(path: Path) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise fail(
            "E1035",
            "reading a YAML file needs PyYAML",
            node=str(path),
            hint="pip install 'esper-forge[growth]'",
        ) from None
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _once(yaml.SafeLoader)) or {}
    except FileNotFoundError:
        raise fail("E1030", "no such file", node=str(path)) from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise fail("E1030", f"cannot be read: {error}", node=str(path)) from None


def _once(loader: Any) -> Any:
    """A loader that refuses a key given twice, where YAML's own takes the last."""

    class Once(loader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key.value, str)]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                line = node.start_mark.line + 1
                raise fail("E1030", f"{twice!r} is given twice", node=f"mapping at line {line}")
            return super().construct_mapping(node, deep)

    return Once


def _record(kind: type[T], given: Any, where: str) -> T:
    if not isinstance(given, Mapping):
        raise fail("E1030", f"must be a mapping, not {type(given).__name__}", node=where or "configuration")
    fields = dataclasses.fields(typing.cast(Any, kind))
    names = [f.name for f in fields]
    missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in given]
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(names)}"
            raise fail("E1030", f"unknown key {str(key)!r}", node=where or "configuration", hint=hint)
    if missing:
        raise fail("E1030", f"misses {', '.join(missing)}", node=where)
    hints = typing.get_type_hints(kind)
    return kind(**{k: _value(hints[k], v, f"{where}.{k}".lstrip(".")) for k, v in given.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = next(a for a in arguments if a is not type(None))
        return None if value is None else _value(inner, value, where)
    if dataclasses.is_dataclass(hint):
        return (
            value
            if isinstance(value, typing.cast(type, hint))
            else _record(typing.cast(type, hint), value, where)
        )
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise fail("E1030", f"must be a list, not {type(value).__name__}", node=where)
        return tuple(_value(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    return _plain(hint, value, where)


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1 << 1000 else _INFINITE
    allowed = _CHOICES.get(where)
    if value is False and "off" in (allowed or ()):
        value = "off"  # YAML reads the bare word as a truth value
    if type(value) is not kind:
        raise fail("E1030", f"must be {kind.__name__}, not {value!r}", node=where)
    if allowed and value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.3)
        hint = f"one of {', '.join(allowed)}" + (f"; did you mean {near[0]}?" if near else "")
        raise fail("E1030", f"{value!r} is not known", node=where, hint=hint)
    return _within(value, where) if kind in (int, float) else value


def _within(value: float, where: str) -> float:
    if value != value:
        raise fail("E1030", "must be a number, not NaN", node=where)
    bounded = where.startswith("limits.")  # by themselves, and some of them may be infinite
    if isinstance(value, float) and math.isinf(value) and not bounded:
        raise fail("E1030", f"must be finite, not {value}", node=where)
    least, most = _RANGE.get(where, (-_INFINITE, _INFINITE))
    if value < least:
        raise fail("E1030", f"must be at least {least:g}, not {value}", node=where)
    if value > most:
        raise fail("E1030", f"must be at most {most:g}, not {value}", node=where)
    return value
