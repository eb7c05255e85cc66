"""The fourteen states of a slot, the moves between them as data, the gates and their defaults. No torch here.

Only a command moves a slot. `MOVES` is the whole table: whatever is not in it is refused (E1004), whoever
asks. A move may stand behind a gate (`GATES`); a gate is a list of checks over measured numbers, a number
that nobody measured fails its check, and every answer is a `GateRecord` with each check, its value, its
threshold and its interval.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

from runtime.seeds.errors import fail


class Lifecycle(IntEnum):
    """Codes as they stand in the state tensor."""

    DORMANT = 0
    GERMINATED = 1
    LOADING = 2
    TRAINING = 3
    GRAFTING = 4
    STABILIZATION = 5
    EVALUATING = 6
    FINE_TUNING = 7
    FOSSILIZED = 8
    CULLED = 9
    CANCELLED = 10
    EMBARGOED = 11
    RESETTING = 12
    ROLLED_BACK = 13
    # Names used elsewhere.
    BLENDING = 4
    HOLDING = 5
    PROBATIONARY = 6
    PRUNED = 9


S = Lifecycle
LIVE = frozenset({S.GRAFTING, S.STABILIZATION, S.EVALUATING, S.FINE_TUNING})
"""States whose forward is `op(h, z, alpha)`; in all others y = h."""
LEARNING = frozenset({S.TRAINING, S.GRAFTING, S.FINE_TUNING})
"""States in which the seed's parameters move."""
HOLDING_SEED = frozenset({S.TRAINING}) | LIVE
"""States in which a slot holds a seed with parameters and, unless it is of a fixed function, a group in
the optimizer."""
WAITING = frozenset({S.GERMINATED, S.LOADING, S.TRAINING, S.GRAFTING, S.STABILIZATION, S.EVALUATING,
                     S.FINE_TUNING})  # fmt: skip
"""States with a deadline: whoever stays too long is culled (cancelled while it only waits in the queue)."""
ADAPTING = WAITING - {S.GERMINATED}
"""States that count towards the limit of concurrent adaptations."""


class Fault(IntEnum):
    """Why a slot failed: a column of its own, not a state."""

    NONE = 0
    LOAD = 1
    SHAPE = 2
    NONFINITE = 3
    EXEC = 4
    CHECKSUM = 5


class Verb(StrEnum):
    """What a command asks for; `rollback` is the trainer's alone and never queued."""

    REQUEST_GERMINATION = "request_germination"
    CANCEL_GERMINATION = "cancel_germination"
    PROMOTE = "promote"
    ADVANCE = "advance"
    CULL = "cull"
    RELEASE = "release"
    ROLLBACK = "rollback"


class Issuer(StrEnum):
    """Who may issue a move. Whatever an autopilot may do the controller may ask for as well."""

    CONTROLLER = "controller"
    AUTOPILOT = "autopilot"
    OPERATOR = "operator"
    TRAINER = "trainer"


@dataclass(frozen=True)
class Move:
    """One legal move. `gate` "" is no gate; `when` names a fact that chooses between moves of one verb:
    "trainable", "fixed", "round1", "final" (round 2, or fixed function), "soft" (alpha goes down first),
    "hard" (alpha is 0, or may be dropped), "up" (the ramp does not go to 0)."""

    source: Lifecycle
    target: Lifecycle
    verb: Verb
    issuer: Issuer = Issuer.CONTROLLER
    gate: str = ""
    when: frozenset[str] = frozenset()


def _m(source: S, target: S, verb: Verb, issuer: Issuer, gate: str = "", when: str = "") -> Move:
    return Move(source, target, verb, issuer, gate, frozenset(when.split()))


_C, _A, _O, _T = Issuer.CONTROLLER, Issuer.AUTOPILOT, Issuer.OPERATOR, Issuer.TRAINER
MOVES: tuple[Move, ...] = (
    _m(S.DORMANT, S.GERMINATED, Verb.REQUEST_GERMINATION, _C, "G0"),
    _m(S.GERMINATED, S.LOADING, Verb.ADVANCE, _A, "G0b"),
    _m(S.GERMINATED, S.CANCELLED, Verb.CANCEL_GERMINATION, _C),
    _m(S.LOADING, S.TRAINING, Verb.ADVANCE, _A, "G1", "trainable"),
    _m(S.LOADING, S.GRAFTING, Verb.ADVANCE, _A, "G1", "fixed"),
    _m(S.LOADING, S.CANCELLED, Verb.CANCEL_GERMINATION, _C),
    _m(S.LOADING, S.CULLED, Verb.CULL, _A),
    _m(S.TRAINING, S.GRAFTING, Verb.PROMOTE, _C, "G2"),
    _m(S.TRAINING, S.CANCELLED, Verb.CANCEL_GERMINATION, _C),
    _m(S.TRAINING, S.CULLED, Verb.CULL, _A),
    _m(S.GRAFTING, S.STABILIZATION, Verb.ADVANCE, _A, "G3", "up"),
    _m(S.GRAFTING, S.CULLED, Verb.CULL, _A, "", "hard"),
    _m(S.STABILIZATION, S.EVALUATING, Verb.ADVANCE, _A, "G3s"),
    _m(S.STABILIZATION, S.GRAFTING, Verb.CULL, _A, "", "soft"),
    _m(S.STABILIZATION, S.CULLED, Verb.CULL, _A, "", "hard"),
    _m(S.EVALUATING, S.FINE_TUNING, Verb.ADVANCE, _C, "G4", "trainable round1"),
    _m(S.EVALUATING, S.FOSSILIZED, Verb.PROMOTE, _C, "G5", "final"),
    _m(S.EVALUATING, S.GRAFTING, Verb.CULL, _A, "", "soft"),
    _m(S.EVALUATING, S.CULLED, Verb.CULL, _A, "", "hard"),
    _m(S.FINE_TUNING, S.STABILIZATION, Verb.ADVANCE, _C),
    _m(S.FINE_TUNING, S.CULLED, Verb.CULL, _A),
    _m(S.FOSSILIZED, S.RESETTING, Verb.ADVANCE, _A),
    _m(S.CULLED, S.EMBARGOED, Verb.ADVANCE, _A),
    _m(S.CANCELLED, S.RESETTING, Verb.ADVANCE, _A),
    _m(S.EMBARGOED, S.RESETTING, Verb.ADVANCE, _A, "embargo"),
    _m(S.RESETTING, S.DORMANT, Verb.ADVANCE, _A, "reset"),
    *(
        _m(source, S.ROLLED_BACK, Verb.ROLLBACK, _T)
        for source in (S.TRAINING, S.GRAFTING, S.STABILIZATION, S.EVALUATING, S.FINE_TUNING)
    ),
    _m(S.ROLLED_BACK, S.RESETTING, Verb.RELEASE, _O),
)
_BY_VERB: Mapping[tuple[Lifecycle, Verb], tuple[Move, ...]] = {
    (m.source, m.verb): tuple(n for n in MOVES if (n.source, n.verb) == (m.source, m.verb)) for m in MOVES
}
OUTCOMES: Mapping[Lifecycle, str] = {
    S.FOSSILIZED: "FOSSILIZED",
    S.CULLED: "CULLED",
    S.CANCELLED: "CANCELLED",
    S.ROLLED_BACK: "ROLLED_BACK",
}
"""States that end an adaptation, and what field reports call it."""


def moves_from(state: Lifecycle) -> tuple[Move, ...]:
    return tuple(m for m in MOVES if m.source is state)


def legal(source: Lifecycle, target: Lifecycle) -> bool:
    """Whether any command whatever takes a slot from one state to the other."""
    return any(m.source is source and m.target is target for m in MOVES)


def allowed(move: Move, issuer: Issuer) -> bool:
    """Whether this one may issue it: an operator whatever is not the trainer's, a controller what an
    autopilot may as well."""
    if issuer is Issuer.TRAINER or move.issuer is Issuer.TRAINER:
        return issuer is move.issuer
    rank = (Issuer.AUTOPILOT, Issuer.CONTROLLER, Issuer.OPERATOR)
    return rank.index(issuer) >= rank.index(move.issuer)


def choose(state: Lifecycle, verb: Verb, facts: Iterable[str]) -> Move | None:
    """The move that a verb means in a state, given the facts that hold (see `Move.when`); None when the table
    has none."""
    known = frozenset(facts)
    fitting = [m for m in _BY_VERB.get((state, verb), ()) if m.when <= known]
    return max(fitting, key=lambda m: len(m.when), default=None)


# -- gates
# -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A number with the interval it lies in (95 % unless said otherwise) and how many samples gave it."""

    value: float
    low: float
    high: float
    samples: int = 1

    @classmethod
    def exact(cls, value: float) -> Measured:
        return cls(value, value, value)


Number = Measured | float | bool
Evidence = Mapping[str, Number]
"""What is known about a slot when a gate is asked: number by name (`GATES` lists the names)."""


@dataclass(frozen=True)
class Requirement:
    """One check of a gate: `measure` `relation` the limit of that name (a field of `Limits`) or number.
    `bound` says which end of the interval must hold: "value", "low" or "high"."""

    measure: str
    relation: str  # one of >=, <=, <, >, ==
    limit: str | float
    bound: str = "value"


class Check(NamedTuple):
    """One requirement as it was found. `value` None: not measured, which fails."""

    measure: str
    relation: str
    threshold: float
    value: float | None
    low: float | None
    high: float | None
    samples: int
    passed: bool


@dataclass(frozen=True)
class GateRecord:
    """What a gate answered, and from which numbers; kept whether it passed or not."""

    gate: str
    slot: str
    epoch: int
    passed: bool
    checks: tuple[Check, ...]

    def refused(self) -> tuple[Check, ...]:
        return tuple(c for c in self.checks if not c.passed)

    def reason(self) -> str:
        """One line: which checks failed, with value and threshold."""
        return "; ".join(
            f"{c.measure} {'not measured' if c.value is None else f'{c.value:.6g}'} "
            f"(needs {c.relation} {c.threshold:.6g})"
            for c in self.refused()
        )

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "checks": [c._asdict() for c in self.checks]}


_LEAST: Mapping[str, float] = {
    "concurrent": 0, "grafting_locks": 0, "planned_epochs": 1, "deadline_fraction": 0.0, "deadline_least": 1,
    "embargo_epochs": 0, "trust_radius": 1e-9, "min_training_steps": 0,
    "held_out_every": 2,  # of one step in one, none would teach
    "ramp_steps": 1, "settle_steps": 0, "most_progress": 1, "seed_clip": 1e-9, "loss_sigmas": 0.0,
    "loss_window": 2, "checkpoints": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Every threshold and default of the growth side, in one place; YAML may set each by its name."""

    concurrent: int = 1  # adaptations at a time
    grafting_locks: int = 1  # seeds that may be in GRAFTING at a time (G2)
    planned_epochs: int = 100  # [epochs] of the run, as far as is known
    deadline_fraction: float = 0.1  # [share] of the planned epochs that a waiting state may last
    deadline_least: int = 5  # [epochs] that it may last at least
    embargo_epochs: int = 10  # [epochs] that an artifact that was culled is not tried again at its layer
    trust_radius: float = 0.2  # most ||z - h|| / ||h|| of a seed's result z beside the layer's h (G2)
    min_training_steps: int = 50  # [steps] of a seed in TRAINING (G2)
    g2_margin: float = 0.05  # [relative] by which the held-out loss is under the identity's (G2)
    activity: float = 0.05  # least ratio of gradient norms, each by the root of its parameter count (G2)
    held_out_every: int = 5  # [steps] one of so many measures the seed and does not teach it
    ramp_steps: int = 30  # [steps] that alpha rises
    alpha_target: float = 1.0  # [0 to 1] alpha at the end of a ramp
    loss_tolerance: float = 0.05  # [relative] to the pre-graft snapshot, while alpha is held (G3)
    validation_tolerance: float = 0.0  # [relative] to the pre-graft snapshot (G4)
    settle_steps: int = 20  # [steps] that STABILIZATION lasts at least
    contribution: float = 0.01  # [relative] to the loss without: least lower bound (G5)
    max_risk: float = 0.2  # [0 to 1] of an artifact (G0)
    speculative: bool = False  # takes verdicts of Speculative confidence, and risks that nobody scored
    max_latency_us: float = float("inf")  # [us] of a call of the artifact (G0)
    max_parameters: float = float("inf")  # of a seed (G0)
    max_memory: float = float("inf")  # [bytes] of a seed's parameters (G0)
    max_rent: float = 0.05  # [share] parameters of a graft by those of the host (G5)
    max_latency_share: float = float("inf")  # [share] latency of a graft by that of the host (G5)
    drift: float = 0.12  # [relative] weight drift above which DRIFT_CONTROLLED pauses
    gradient_low: float = 0.1  # norm of a seed's gradient; GRAD_NORM_GATED pauses below
    gradient_high: float = 1.0  # norm of it above which that pauses
    most_progress: int = 4  # PERFORMANCE_LINKED multiplies progress by at most
    seed_clip: float = 1.0  # norm that a seed's own gradient is clipped to
    loss_sigmas: float = 6.0  # [standard deviations] above the window's mean at which the trainer rolls back
    loss_window: int = 50  # [steps] of the trainer's window
    checkpoints: int = 5  # good ones kept

    def __post_init__(self) -> None:
        """E1013 for a number that no run could go on with."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not value >= least:
                raise fail("E1013", f"limits.{name}={value!r}", node=name, hint=f"at least {least:g}")

    def deadline(self) -> int:
        """Epochs that a waiting state may last."""
        return max(self.deadline_least, round(self.planned_epochs * self.deadline_fraction))


_TRUE = ("==", 1.0)
GATES: Mapping[str, tuple[Requirement, ...]] = {
    "G0": (
        Requirement("validated", *_TRUE),
        Requirement("shape_fits", *_TRUE),
        Requirement("dtype_fits", *_TRUE),
        Requirement("device_fits", *_TRUE),
        Requirement("risk", "<=", "max_risk"),
        Requirement("confident", *_TRUE),  # not Speculative, or opted in
        Requirement("latency_us", "<=", "max_latency_us"),
        Requirement("parameters", "<=", "max_parameters"),
        Requirement("memory", "<=", "max_memory"),
        Requirement("embargoed", "==", 0.0),
        Requirement("tombstoned", "==", 0.0),
        Requirement("quarantined", "==", 0.0),  # failed to load or crashed in this run
    ),
    "G0b": (Requirement("adapting", "<", "concurrent"),),
    "G1": (
        Requirement("bytes_verified", *_TRUE),
        Requirement("probe_finite", *_TRUE),
        Requirement("probe_shape", *_TRUE),
        Requirement("parameters_as_declared", *_TRUE),
        Requirement("group_inserted", *_TRUE),
        Requirement("ranks_prepared", *_TRUE),
    ),
    "G2": (
        Requirement("training_steps", ">=", "min_training_steps"),
        Requirement("held_out_gain", ">=", "g2_margin", "low"),
        Requirement("predicted_gain", "<", 0.0, "high"),
        Requirement("trust_ratio", "<=", "trust_radius"),
        Requirement("gradients_finite", *_TRUE),
        Requirement("activity", ">=", "activity"),
        Requirement("grafting", "<", "grafting_locks"),
        Requirement("fault", "==", 0.0),
    ),
    "G3": (
        Requirement("alpha_error", "==", 0.0),
        Requirement("snapshot_excess", "<=", "loss_tolerance"),
        Requirement("paused", "==", 0.0),
        Requirement("fault", "==", 0.0),
    ),
    "G3s": (Requirement("settled_steps", ">=", "settle_steps"), Requirement("fault", "==", 0.0)),
    "G4": (
        Requirement("validation_excess", "<=", "validation_tolerance"),
        Requirement("ablation", ">", 0.0),
        Requirement("fault", "==", 0.0),
    ),
    "G5": (
        Requirement("contribution", ">=", "contribution", "low"),
        Requirement("rent", "<=", "max_rent"),
        Requirement("latency_share", "<=", "max_latency_share"),
        Requirement("fault", "==", 0.0),
    ),
    "embargo": (Requirement("embargo_left", "<=", 0.0),),
    "reset": (Requirement("released", *_TRUE),),
}


_RELATIONS = {
    ">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt, "==": operator.eq,
}  # fmt: skip
"""Of a value and a threshold; False for NaN, all of them."""


def ask(gate: str, evidence: Evidence, limits: Limits, *, slot: str = "", epoch: int = 0) -> GateRecord:
    """What a gate says. A measure that is not in `evidence` fails; so does NaN."""
    checks: list[Check] = []
    for need in GATES[gate]:
        threshold = float(getattr(limits, need.limit)) if isinstance(need.limit, str) else need.limit
        found = evidence.get(need.measure)
        if found is None:
            checks.append(Check(need.measure, need.relation, threshold, None, None, None, 0, False))
        elif isinstance(found, Measured):
            held = _RELATIONS[need.relation](getattr(found, need.bound), threshold)
            checks.append(
                Check(need.measure, need.relation, threshold, found.value, found.low, found.high,
                      found.samples, held)
            )  # fmt: skip
        else:
            value = float(found)
            held = _RELATIONS[need.relation](value, threshold)
            checks.append(Check(need.measure, need.relation, threshold, value, value, value, 1, held))
    return GateRecord(gate, slot, epoch, all(c.passed for c in checks), tuple(checks))


@dataclass(frozen=True)
class Refusal:
    """A command that was not carried out: `code` E1004 (not in the table, or not for this issuer), E1005 (a
    gate; `record` has its numbers), E1003, E1012, or the code of the library or runtime."""

    code: str
    reason: str
    slot: str
    verb: Verb
    state: Lifecycle
    record: GateRecord | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            **{k: self.__dict__[k] for k in ("code", "reason", "slot")},
            "verb": self.verb.value,
            "state": self.state.name,
            "record": self.record.to_json() if self.record else None,
        }
