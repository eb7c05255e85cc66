"""What travels through a pipeline: one frozen record that every step returns grown by its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from esper_ir.diagnostics import Diagnostic
from esper_ir.grad import Joint
from esper_ir.graph import Blueprint, Graph
from forge.lower import Kernels, PhaseLowering
from forge.target import Target
from forge.tune.store import Store
from library.launch import Kernel


@dataclass(frozen=True)
class Built:
    """Machine code: blobs as (name, kind, bytes), kernel records, texts kept beside the artifact, versions
    used.
    """

    blobs: tuple[tuple[str, str, bytes], ...]
    kernels: tuple[Kernel, ...]
    side_files: Mapping[str, bytes]
    toolchain: Mapping[str, Any]


@dataclass(frozen=True)
class Tuning:
    """How much to search, where measurements are kept, who is told of the progress. `replayed`: every tile is
    given by a journal, none is searched for.
    """

    trials: int = 300
    seconds: float = 300.0
    store: Store | None = None
    progress: Callable[[str], None] = lambda text: None
    replayed: bool = False


@dataclass(frozen=True)
class Work:
    """State of one compilation: blueprint x target x pipeline. `denied`: codes of warnings that fail it.
    `trials`: what the tuner measured, or why it did not.
    """

    blueprint: Blueprint
    target: Target
    pipeline: str
    objective: str = "speed"
    denied: tuple[str, ...] = ()
    findings: tuple[Diagnostic, ...] = ()
    graph: Graph | None = None
    joint: Joint | None = None
    saved: tuple[str, ...] = ()
    lowerings: tuple[PhaseLowering, ...] = ()
    kernels: Kernels = field(default_factory=Kernels)
    tuning: Tuning = Tuning()
    trials: Mapping[str, Any] = field(default_factory=dict)
    built: Built | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    container: bytes = b""
    seconds: Mapping[str, float] = field(default_factory=dict)
