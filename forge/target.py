"""Hardware as data: everything that code asks of a target is a field here, never its name.

One file per target in forge/targets, each with a record TARGET; adding hardware is adding a file.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache

import forge.targets
from esper_ir.diagnostics import EXIT_USAGE, Accepted, EsperError
from esper_ir.discover import collect
from esper_ir.types import DType
from forge.energy import Energy
from library.platform import Platform
from runtime.system import machine

EVERY_DTYPE = tuple(DType)
HALF_DTYPES = (DType.bfloat16, DType.float16)


@dataclass(frozen=True)
class Target:
    """`kind`: cuda, hip, cpu or interpreter. `arch`: what the compiler is asked for ("sm_90a", "gfx942",
    "x86-64-v3"). `capability`: CUDA compute capability times ten, else 0. `warp`: threads that run in step.

    `match`: "exact" code runs on this architecture only, "family" also on its successors. `cards`: words of
    the device's own name, to tell cards of one architecture apart. `stored`: whether artifacts may be kept.

    `memory_bytes`: of the device, 0 where it is the machine's.
    `shared_bytes`: most on-chip memory of one program; `max_warps` per multiprocessor; `l2_bytes`;
    `vector_bytes`: of the widest load. `contractions`: "template" (ours and library calls compete) or
    "extern" (library calls only); `dot_dtypes`: operand types with matrix instructions; `dtypes`: element
    types supported at all.

    `async_copies`: memory is copied to on-chip memory while a program goes on.

    `copy_TBps`: bytes read plus written per second by a large copy; measured on h200 (4.25, 0.885 of the
    published peak), elsewhere the same share of the published peak, on a cpu an order of magnitude.
    `bf16_TFLOPs`: published dense peak, 0 without hardware for it. Both only order candidates.
    `energy`: what bytes and operations cost in joules; it orders what the objective `power` chooses.
    `ptx_version`: PTX ISA asked of the compiler, 0 for none.
    """

    name: str
    kind: str
    arch: str
    capability: int = 0
    warp: int = 32
    match: str = "family"
    aliases: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()
    stored: bool = True
    shared_bytes: int = 0
    max_warps: int = 64
    multiprocessors: int = 1
    copy_TBps: float = 0.0
    bf16_TFLOPs: float = 0.0
    l2_bytes: int = 0
    memory_bytes: int = 0
    vector_bytes: int = 16
    contractions: str = "template"
    async_copies: bool = False
    dot_dtypes: tuple[DType, ...] = HALF_DTYPES
    dtypes: tuple[DType, ...] = EVERY_DTYPE
    energy: Energy | None = None
    ptx_version: int = 0
    summary: str = ""


@lru_cache(maxsize=1)
def targets() -> dict[str, Target]:
    """Every target by name."""
    return collect(forge.targets, "TARGET")


def resolve(name: str, here: Platform | None = None) -> Target:
    """A target by name or alias. "cpu" is the best one of this machine; "auto" the card present, else "cpu".

    `here` describes the machine (probed when left out and needed). E0510 for an unknown name, E0511 when none
    fits.
    """
    if name in ("auto", "cpu"):
        return _best(name, here)
    known = targets()
    by_alias = {alias: target for target in known.values() for alias in (target.name, *target.aliases)}
    if name in by_alias:
        return by_alias[name]
    names = sorted({*by_alias, "auto", "cpu"})
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"one of: {', '.join(names)}"
    details = {"near": near}
    raise EsperError("E0510", f"unknown target {name!r}", hint=hint, exit_code=EXIT_USAGE, details=details)


def _best(name: str, here: Platform | None) -> Target:
    card = here if here is not None else machine("cuda") if name == "auto" else machine("cpu")
    fits = [t for t in targets().values() if t.stored and isinstance(card.accepts(t.kind, t.arch), Accepted)]
    cards = [t for t in fits if t.kind != "cpu"]
    if name == "auto" and cards:
        return max(cards, key=lambda t: (any(word in card.card for word in t.cards), t.capability, t.name))
    processors = [t for t in fits if t.kind == "cpu"]
    if not processors:
        hint = "name a target; an x86-64 processor with AVX2 or a known card is needed to run here"
        raise EsperError("E0511", f"no target fits this machine ({name})", hint=hint, exit_code=EXIT_USAGE)
    return max(processors, key=lambda t: t.vector_bytes)
