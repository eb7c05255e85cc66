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
    """When progress has stopped."""

    window: int = 4  # [epochs] that are compared with all before them
    min_improvement: float = 0.02  # [relative] of its best loss to the best before; less is a plateau
    warmup: int = 4  # [epochs] before which there is no plateau


@dataclass(frozen=True)
class SiteSettings:
    """What makes a slot worth a seed: its score is its share of the predicted gain plus the robust distance
    of its health from that of comparable slots."""

    min_score: float = 3.0  # slots under it are left alone
    gain_weight: float = 6.0  # score of a slot that has all of the predicted gain, fully aligned
    min_alignment: float = 0.2  # [-1 to 1] under which a predicted gain counts as none
    min_gain: float = 0.001  # [share] of the gradient, under which a predicted gain counts as none
    recovered: float = 0.25  # [share] of its score at germination, under which a waiting seed is cancelled
    min_samples: int = 4  # [sampled steps] of an epoch before the health of a slot counts
    memory: float = 0.7  # [share] of the sums behind the predicted gain that the next epoch keeps


@dataclass(frozen=True)
class QuerySettings:
    """What the library is asked for."""

    required: tuple[str, ...] = ()  # tags that an artifact must have
    preferred: tuple[str, ...] = ("trainable", "numerically_stable")  # tags that rank it higher
    excluded: tuple[str, ...] = ()  # tags that it must not have
    blueprints: tuple[str, ...] = ()  # only these (ids or prefixes), best first; empty: any
    memory_pressure: float = 0.8  # [share] of memory in use from which `low_memory` is preferred
    latency_budget_ms: float | None = None  # [ms] bound of p99 latency; with one `high_speed` is preferred
    candidates: int = 50  # answers that are looked at


@dataclass(frozen=True)
class Planned:
    """One line of a fixed schedule."""

    epoch: int  # at which it is asked for
    slot: str  # "module/chunk"
    artifact: str = ""  # id; empty: what the query finds


@dataclass(frozen=True)
class Settings:
    """Everything a controller can be told. The comments of fields, units in brackets, are the table of
    docs/controller.md."""

    policy: str = "heuristic"  # who gets a seed, and when
    plateau: PlateauSettings = PlateauSettings()
    sites: SiteSettings = SiteSettings()
    query: QuerySettings = QuerySettings()
    graft: Graft = Graft()
    limits: Limits | None = None
    schedule: tuple[Planned, ...] = ()  # lines for `fixed_schedule`
    strategy: str = "auto"  # of grafting; `auto` chooses by stability
    waiting: int = 1  # seeds that may wait for their turn at a time
    fine_tune_epochs: int = 2  # [epochs] of FINE_TUNING before a seed is measured again
    max_germinations: int = 1000  # seeds in one run
    seed: int = 0  # of the policy `random`
    random_chance: float = 0.2  # [0 to 1] that the policy `random` asks for a seed at an epoch
    telemetry_every: int = 50  # [steps] from one sample of a layer to the next; see `sites.min_samples`
    run_dir: str = ""  # folder for events; empty: none are written
    journal: str = ""  # path of what the policy `replay` replays
    tensorboard: bool = False  # scalars too, in `run_dir`
    field_reports: bool = True  # outcomes are told to the library


CHOICES: Mapping[str, tuple[str, ...]] = {
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
    allowed = CHOICES.get(where)
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
