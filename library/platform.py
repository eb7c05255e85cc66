"""What a machine can run, as a value. Probing it is the runtime's;
deciding from it is pure and repeatable."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from esper_ir.diagnostics import Accepted, Rejected

_SM = re.compile(r"sm_(\d+)(\d)([af]?)\Z")
_X86 = re.compile(r"x86-64-v([1-4])\Z")


@dataclass(frozen=True)
class Platform:
    """`cuda_cc` compute capability or None without a card; `driver` CUDA version the driver supports (12040
    is 12.4); `cpu_level` x86-64 level 1 to 4, 0 on another processor; `gfx` AMD architecture; `externs`
    library versions by name.
    """

    cuda_cc: tuple[int, int] | None = None
    driver: int | None = None
    cpu_level: int = 0
    torch: str = ""
    externs: Mapping[str, str] = field(default_factory=dict)
    gfx: str = ""
    card: str = ""

    def accepts(
        self,
        kind: str,
        arch: str,
        *,
        min_driver: int = 0,
        externs: Sequence[Mapping[str, Any]] = (),
        strict: bool = False,
    ) -> Accepted[tuple[str, ...]] | Rejected:
        """Whether code of `kind` ("cuda", "hip", "cpu") for `arch` runs here; the value lists tolerated
        mismatches.

        `externs`: {"name", "version"} per library step. Another version is tolerated and named, with `strict`
        refused; an absent one is always refused.
        """
        wrong = _MACHINES.get(kind, _no_machine)(self, arch)
        if wrong:
            return Rejected("E0781", wrong, {"kind": kind, "arch": arch})
        if kind == "cuda" and min_driver and (self.driver or 0) < min_driver:
            return Rejected(
                "E0782", f"needs a driver for CUDA {_cuda(min_driver)}, here is {_cuda(self.driver or 0)}"
            )
        return self._accepts_externs(externs, strict)

    def _accepts_externs(
        self, externs: Sequence[Mapping[str, Any]], strict: bool
    ) -> Accepted[tuple[str, ...]] | Rejected:
        notes: list[str] = []
        for step in externs:
            name, wanted = str(step.get("name", "")), str(step.get("version", ""))
            here = self.externs.get(name)
            if here is None:
                return Rejected("E0783", f"extern library {name} is not available here", {"name": name})
            if wanted and here != wanted:
                notes.append(f"{name} {here} instead of {wanted}")
        if notes and strict:
            return Rejected("E0783", "; ".join(notes), {"mismatches": notes})
        return Accepted(tuple(notes))

    def accepts_manifest(
        self, manifest: Mapping[str, Any], *, strict: bool = False
    ) -> Accepted[tuple[str, ...]] | Rejected:
        """`accepts` with the facts that a container's manifest states."""
        target = manifest["target"]
        driver = target.get("min_driver", 0)
        return self.accepts(
            target["kind"],
            target["arch"],
            min_driver=driver if isinstance(driver, int) else 0,
            externs=[step for step in manifest["externs"] if isinstance(step, Mapping)],
            strict=strict,
        )


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}" if version else "none"


def _no_machine(platform: Platform, arch: str) -> str:
    return f"unknown kind of target for {arch}"


def _cuda_machine(platform: Platform, arch: str) -> str:
    """A cubin runs on its own major version from its own minor version on;
    an `a` one only on exactly its own."""
    found = _SM.match(arch)
    if not found:
        return f"{arch!r} is not a CUDA architecture"
    if platform.cuda_cc is None:
        return f"needs a CUDA device ({arch}), there is none"
    major, minor, suffix = int(found[1]), int(found[2]), found[3]
    have = platform.cuda_cc
    fits = have == (major, minor) if suffix == "a" else have[0] == major and have[1] >= minor
    return "" if fits else f"built for {arch}, the device is sm_{have[0]}{have[1]}"


def _cpu_machine(platform: Platform, arch: str) -> str:
    found = _X86.match(arch)
    if not found:
        return f"{arch!r} is not a CPU architecture known here"
    level = int(found[1])
    return (
        ""
        if platform.cpu_level >= level
        else f"built for {arch}, this processor has level {platform.cpu_level}"
    )


def _hip_machine(platform: Platform, arch: str) -> str:
    if not platform.gfx:
        return f"needs an AMD device ({arch}), there is none"
    return "" if platform.gfx == arch else f"built for {arch}, the device is {platform.gfx}"


_MACHINES = {"cuda": _cuda_machine, "hip": _hip_machine, "cpu": _cpu_machine}
