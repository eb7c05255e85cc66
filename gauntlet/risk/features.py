"""What a risk model may know about an artifact and where it is to be used: numbers by name, from records
alone.

All of it is there before the artifact is used: the verdict's report (what was tested, how near the bound
it came, what it costs), the manifest (what kind of code it is) and the sizes it is to be used at. A
number that was not measured is NaN, which the model treats as missing. A change of a name, a unit or a
meaning is a new SCHEMA, and models and outcomes of another schema are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper_ir import text, verify
from esper_ir.expand import expand
from esper_ir.graph import Graph
from esper_ir.opdef import Contraction, Lookup, Movement, Opaque, Pointwise, Reduction, Scan
from esper_ir.registry import lookup
from library.manifest import blueprint_text

SCHEMA = "esper-risk-features/1"
MISSING = math.nan
TILE = 16
"""Ranges are cut into pieces that are multiples of this: sizes with one rest end in the same kind of tail."""
WIDTHS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Feature:
    """`more`: what a larger value does to the risk by its meaning (+1, -1, or 0: not known beforehand); a
    model is held to it, so that more tests than any that it has seen never count as a danger."""

    name: str
    text: str
    more: int = 0


FEATURES = (
    Feature("numerics_used", "worst error of outputs over its bound (1 is the bound)", 1),
    Feature("gradients_used", "worst error of gradients over its bound", 1),
    Feature("worst_used", "the worse of the two: the margin of the worst input", 1),
    Feature("drift", "root mean square error against float64 over the result's, log10"),
    Feature("numerics_cases", "cases of outputs that passed, log2(1 + n)", -1),
    Feature("gradients_cases", "cases of gradients that passed, log2(1 + n)", -1),
    Feature("memory_cases", "cases in fenced memory that passed, log2(1 + n)", -1),
    Feature("repeat_cases", "cases of equal bits that passed, log2(1 + n)", -1),
    Feature("soak_steps", "steps of the short optimisation, log2(1 + n)", -1),
    Feature("sizes_tested", "different sizes among the cases of outputs, log2(1 + n)", -1),
    Feature("size_distance", "from the sizes of use to the nearest tested one, octaves, worst dim", 1),
    Feature("size_beyond", "octaves by which the sizes of use exceed the largest tested one", 1),
    Feature("rest_untested", "1: a size of use leaves a rest of a division by 16 that no tested one left", 1),
    Feature("gradient_distance", "as size_distance, to the sizes that gradients were tested at", 1),
    Feature("gradient_rest_untested", "as rest_untested, for gradients", 1),
    Feature("range_octaves", "how wide the declared ranges are, octaves, widest dim"),
    Feature("dims", "symbolic dims"),
    Feature("masked", "share of dims that tiles need not divide"),
    Feature("atomics", "1: equal bits are not promised (atomics, or a library that does not)"),
    Feature("variants", "guarded variants of kernels"),
    Feature("buckets", "plans that serve a part of the range only"),
    Feature("backward_plans", "plans for different sets of gradients"),
    Feature("kernels", "launches of the plan with the most"),
    Feature("externs", "library calls of the plan with the most"),
    Feature("workspace", "bytes of workspace at the tested sizes, log2(1 + n)"),
    Feature("temporaries", "buffers between steps of one plan, most"),
    Feature("spills", "bytes of registers spilled, log2(1 + n)"),
    Feature("registers", "registers of a thread"),
    Feature("shared_memory", "bytes of shared memory, log2(1 + n)"),
    Feature("occupancy", "share of the card's warps"),
    Feature("pointwise", "pointwise primitives"),
    Feature("reductions", "reductions"),
    Feature("contractions", "products"),
    Feature("scans", "running values"),
    Feature("movements", "movements of data"),
    Feature("opaque", "operators with a template of their own"),
    Feature("width", "bits of the narrowest floating type"),
    Feature("row_length", "largest extent that is always the same, log2"),
    Feature("latency", "median time of forward and backward, ms, log2"),
    Feature("eager_ratio", "eager's time over the artifact's"),
    Feature("roofline_share", "share of the roofline"),
    Feature("variance", "spread of the medians of processes"),
    Feature("arch", "number of the architecture (90 for sm_90, 4 for x86-64-v4)"),
    Feature("card", "1: for a card, 0: for a processor"),
    Feature("toolchain", "version of the compiler, major + minor / 100"),
)
NAMES = tuple(f.name for f in FEATURES)


def of(
    report: Mapping[str, Any], manifest: Mapping[str, Any], used: Sequence[Sizes] = ()
) -> dict[str, float]:
    """Every feature by name. `report`: the JSON of a verdict; `manifest`: the container's; `used`: sizes
    of the dims in use (none: the tuned ones)."""
    used = used or tuned(manifest)
    graph = graph_of(manifest)
    found = {
        **_tested(report),
        **_distance(report, used),
        **_profile(report.get("wep", {})),
        **_launch(manifest),
        **_meaning(graph),
        **_place(manifest),
    }
    assert found.keys() == set(NAMES), sorted(found.keys() ^ set(NAMES))
    return {name: float(found[name]) for name in NAMES}


def graph_of(manifest: Mapping[str, Any]) -> Graph:
    """The artifact's blueprint, verified and typed."""
    return verify.typed(text.parse(blueprint_text(manifest)))


def tuned(manifest: Mapping[str, Any]) -> list[dict[str, int]]:
    """The sizes that the artifact was made for: of each dim its tuned ones, in step."""
    dims = manifest["launch"]["interface"]["dims"]
    longest = max((len(d["tune"]) for d in dims), default=0) or 1
    return [{d["name"]: ([*d["tune"]] or [d["min"]])[min(at, len(d["tune"]) - 1)] for d in dims}
            for at in range(longest)]  # fmt: skip


# -- groups


def family(graph: Graph) -> str:
    """What is computed, sizes and types left out: near copies share it, so that they are never on both
    sides of a split."""
    return "+".join(sorted(node.op for node in graph.nodes))


def check_pattern(report: Mapping[str, Any]) -> str:
    """The stages that were passed, in their order."""
    return "+".join(s["name"] for s in report.get("stages", ()) if s["outcome"] == "passed")


# -- by what they come from


def _stages(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Metrics of the stages that passed."""
    return {s["name"]: s["metrics"] for s in report.get("stages", ()) if s["outcome"] == "passed"}


def _count(metrics: Mapping[str, Any] | None, name: str) -> float:
    """log2(1 + n); 0 for a stage that was not run."""
    return math.log2(1 + float((metrics or {}).get(name, 0)))


def _tested(report: Mapping[str, Any]) -> dict[str, float]:
    stages = _stages(report)
    numerics, gradients = stages.get("numerics", {}), stages.get("gradients", {})
    used = [_number(m.get("tolerance_used")) for m in (numerics, gradients)]
    known = [u for u in used if not math.isnan(u)]
    drift = _number(numerics.get("drift"))
    return {
        "numerics_used": used[0],
        "gradients_used": used[1],
        "worst_used": max(known) if known else MISSING,
        "drift": math.log10(max(drift, 1e-12)) if not math.isnan(drift) else MISSING,
        "numerics_cases": _count(numerics, "cases"),
        "gradients_cases": _count(gradients, "cases"),
        "memory_cases": _count(stages.get("memory"), "cases"),
        "repeat_cases": _count(stages.get("determinism"), "cases"),
        "soak_steps": _count(stages.get("soak"), "steps"),
        "sizes_tested": math.log2(1 + max(map(len, numerics.get("sizes", {}).values()), default=0)),
    }


def _distance(report: Mapping[str, Any], used: Sequence[Sizes]) -> dict[str, float]:
    """How far the sizes of use lie from those that passed. Without a test of a kind: missing, since the
    counts of cases say so already."""
    stages = _stages(report)
    outputs = stages.get("numerics", {}).get("sizes", {})
    gradients = stages.get("gradients", {}).get("sizes", {})
    pairs = [(name, size) for sizes in used for name, size in sizes.items()]
    return {
        "size_distance": _worst(_octaves(size, outputs.get(name, ())) for name, size in pairs),
        "size_beyond": _worst(_beyond(size, outputs.get(name, ())) for name, size in pairs),
        "rest_untested": _worst(_new_rest(size, outputs.get(name, ())) for name, size in pairs),
        "gradient_distance": _worst(_octaves(size, gradients.get(name, ())) for name, size in pairs),
        "gradient_rest_untested": _worst(_new_rest(size, gradients.get(name, ())) for name, size in pairs),
    }


def _worst(values: Iterable[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return max(known) if known else MISSING


def _octaves(size: int, tested: Sequence[int]) -> float:
    return min((abs(math.log2((size + 1) / (t + 1))) for t in tested), default=MISSING)


def _beyond(size: int, tested: Sequence[int]) -> float:
    return max(0.0, math.log2((size + 1) / (max(tested) + 1))) if tested else MISSING


def _new_rest(size: int, tested: Sequence[int]) -> float:
    return float(size % TILE not in {t % TILE for t in tested}) if tested else MISSING


def _number(value: Any) -> float:
    """What is "unmeasured" or absent is missing."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else MISSING


def _log2(value: Any) -> float:
    number = _number(value)
    return math.log2(1 + number) if number >= 0 else MISSING


def _profile(wep: Mapping[str, Any]) -> dict[str, float]:
    times = [_number(wep.get(n)) for n in ("forward_ms_median", "backward_ms_median")]
    eager = [_number(wep.get(f"eager_{n}")) for n in ("forward_ms_median", "backward_ms_median")]
    total = sum(t for t in times if not math.isnan(t))
    pairs = [(a, b) for a, b in zip(times, eager, strict=True) if a > 0 and b > 0]
    ratio = sum(b for _, b in pairs) / sum(a for a, _ in pairs) if pairs else MISSING
    return {
        "workspace": _log2(wep.get("workspace_bytes")),
        "spills": _log2(wep.get("spills")),
        "registers": _number(wep.get("registers")),
        "shared_memory": _log2(wep.get("shared_memory_bytes")),
        "occupancy": _number(wep.get("occupancy")),
        "latency": math.log2(total) if total else MISSING,
        "eager_ratio": ratio,
        "roofline_share": _number(wep.get("roofline_share")),
        "variance": _number(wep.get("variance")),
    }


def _launch(manifest: Mapping[str, Any]) -> dict[str, float]:
    launch = manifest["launch"]
    dims, plans = launch["interface"]["dims"], launch["plans"]
    ranges = {d["name"]: (d["min"], d["max"]) for d in dims}
    partial = [p for p in plans if any((b["low"], b["high"]) != ranges.get(b["dim"]) for b in p["bucket"])]
    steps = [[s["step"] for s in p["steps"]] for p in plans]
    variants = [len(s["variants"]) for p in plans for s in p["steps"] if s["step"] == "kernel"]
    between = [sum(b["source"] in ("temp", "zeroed") for b in p["buffers"]) for p in plans]
    return {
        "range_octaves": max((math.log2(d["max"] / max(d["min"], 1)) for d in dims), default=0.0),
        "dims": len(dims),
        "masked": sum(d["multiple_of"] % TILE != 0 for d in dims) / max(len(dims), 1),
        "atomics": float(manifest["determinism"] != "deterministic"),
        "variants": max(variants, default=0),
        "buckets": len(partial),
        "backward_plans": sum(p["phase"] == "backward" for p in plans),
        "kernels": max((s.count("kernel") for s in steps), default=0),
        "externs": max((s.count("extern") for s in steps), default=0),
        "temporaries": max(between, default=0),
    }


KINDS = {
    "pointwise": Pointwise, "reductions": Reduction, "contractions": Contraction, "scans": Scan,
    "movements": Movement | Lookup,
}  # fmt: skip


def _kinds(graph: Graph) -> dict[str, int]:
    """Primitives by kind."""
    found = [lookup(node.op).lowering for node in expand(graph).nodes]
    counts = {name: sum(isinstance(f, kind) for f in found) for name, kind in KINDS.items()}
    own = sum(isinstance(f, Opaque) and not isinstance(f, Scan | Lookup) for f in found)
    return {**counts, "opaque": own}


def _meaning(graph: Graph) -> dict[str, float]:
    leaves = [t for name, t in graph.types.items() if name in graph.inputs]
    fixed = [d.static for t in leaves for d in t.shape if d.static]
    widths = [WIDTHS[t.dtype.value] for t in leaves if t.dtype.value in WIDTHS]
    return {**_kinds(graph), "width": min(widths, default=32), "row_length": math.log2(max(fixed, default=1))}


def _place(manifest: Mapping[str, Any]) -> dict[str, float]:
    target = manifest["target"]
    arch = re.search(r"(\d+)\D*$", str(target.get("arch", "")))
    return {
        "arch": float(arch[1]) if arch else MISSING,
        "card": float(target.get("kind") == "cuda"),
        "toolchain": _version(manifest.get("toolchain", {})),
    }


def _version(toolchain: Mapping[str, Any]) -> float:
    """Of Triton, else of the C compiler."""
    named = next((str(toolchain[k]) for k in ("triton", "cc", "compiler") if k in toolchain), "")
    found = re.search(r"(\d+)\.(\d+)", named)
    return int(found[1]) + int(found[2]) / 100 if found else MISSING
