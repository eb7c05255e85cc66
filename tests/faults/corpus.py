"""Small blueprints of many kinds, compiled by the forge: the clean controls, and what faults are planted in.

A block is compiled once. Its mutants are further kernels in the same module, so that a mutant costs no more
than the text of a manifest: `Block.with_kernel` has one kernel's record point to another entry.
"""

from __future__ import annotations

import base64
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch

from esper_ir import oracle, reference, text
from forge.ctoolchain import compile_c
from forge.pass_manager import run
from forge.pipelines import FAST
from forge.target import Target, resolve
from forge.toolchain import BUILD_LIMITS, request
from forge.work import Work
from library.manifest import pack, unpack
from runtime.sandbox import run_worker

Node = dict[str, Any]


def node(name: str, op: str, *inputs: str | float, **attrs: Any) -> Node:
    return {"id": name, "op": op, "inputs": list(inputs), **({"attrs": attrs} if attrs else {})}


def blueprint(
    name: str, dtype: str, inputs: Mapping[str, list[Any]], params: Mapping[str, list[Any]],
    nodes: Sequence[Node], outputs: Sequence[str] = ("y",), most: int = 4096,
) -> dict[str, Any]:  # fmt: skip
    """JSON of a blueprint over `rows`; a shape that begins with "int64" is of positions."""
    kinds = {n: ("int64", s[1:]) if s and s[0] == "int64" else (dtype, s) for n, s in inputs.items()}
    return {
        "format": "esper-blueprint/1",
        "name": name,
        "dims": {"rows": {"min": 1, "max": most, "tune": [64, 512]}},
        "inputs": {n: {"dtype": kind, "shape": shape} for n, (kind, shape) in kinds.items()},
        "params": {
            n: {"dtype": dtype, "shape": s, "init": {"kind": "normal", "std": 0.2}} for n, s in params.items()
        },
        "nodes": list(nodes),
        "outputs": list(outputs),
        "metadata": {},
    }


def _elementwise(c: int) -> Iterator[tuple[str, dict[str, list[Any]], dict[str, list[Any]], list[Node]]]:
    x: list[Any] = ["rows", c]
    yield (
        "scale_shift", {"x": x}, {"w": [c], "b": [c]},
        [node("m", "mul", "x", "w"), node("y", "add", "m", "b")],
    )  # fmt: skip
    yield (
        "affine_relu", {"x": x}, {"w": [c], "b": [c]},
        [node("m", "mul", "x", "w"), node("s", "add", "m", "b"), node("y", "relu", "s")],
    )  # fmt: skip
    yield (
        "bias_gelu", {"x": x}, {"b": [c]},
        [node("u", "add", "x", "b"), node("y", "gelu", "u", approximate="tanh")],
    )  # fmt: skip
    yield "gate", {"x": x, "z": x}, {}, [node("s", "silu", "x"), node("y", "mul", "s", "z")]
    yield (
        "sigmoid_blend", {"x": x, "z": x}, {"w": [c]},
        [node("a", "sigmoid", "w"), node("d", "sub", "x", "z"), node("m", "mul", "a", "d"),
         node("y", "add", "m", "z")],
    )  # fmt: skip
    yield (
        "tanh_residual", {"x": x}, {"w": [c]},
        [node("m", "mul", "x", "w"), node("t", "tanh", "m"), node("y", "add", "t", "x")],
    )  # fmt: skip


def _rows(c: int) -> Iterator[tuple[str, dict[str, list[Any]], dict[str, list[Any]], list[Node]]]:
    x: list[Any] = ["rows", c]
    yield "softmax", {"x": x}, {}, [node("y", "softmax", "x", dim=-1)]
    yield "log_softmax", {"x": x}, {}, [node("y", "log_softmax", "x", dim=-1)]
    yield (
        "rms_residual", {"x": x, "r": x}, {"w": [c]},
        [node("s", "add", "x", "r"), node("n", "rms_norm", "s", eps=1e-6), node("y", "mul", "n", "w")],
    )  # fmt: skip
    yield "layer_norm", {"x": x}, {"w": [c], "b": [c]}, [node("y", "layer_norm", "x", "w", "b", eps=1e-5)]
    yield (
        "centred", {"x": x}, {"w": [c]},
        [node("a", "mean", "x", dims=[1], keepdim=True), node("d", "sub", "x", "a"),
         node("y", "mul", "d", "w")],
    )  # fmt: skip
    yield (
        "unit_row", {"x": x}, {},
        [node("q", "mul", "x", "x"), node("s", "sum", "q", dims=[1], keepdim=True),
         node("o", "add", "s", 1.0), node("r", "rsqrt", "o"), node("y", "mul", "x", "r")],
    )  # fmt: skip
    yield (
        "soft_gate", {"x": x, "z": x}, {},
        [node("p", "softmax", "x", dim=-1), node("y", "mul", "p", "z")],
    )  # fmt: skip


def _products(c: int) -> Iterator[tuple[str, dict[str, list[Any]], dict[str, list[Any]], list[Node]]]:
    x: list[Any] = ["rows", c]
    yield (
        "dense_relu", {"x": x}, {"w": [c, 24], "b": [24]},
        [node("p", "matmul", "x", "w"), node("s", "add", "p", "b"), node("y", "relu", "s")],
    )  # fmt: skip
    yield (
        "mlp", {"x": x}, {"w1": [c, 32], "w2": [32, c]},
        [node("u", "matmul", "x", "w1"), node("h", "gelu", "u"), node("v", "matmul", "h", "w2"),
         node("y", "add", "x", "v")],
    )  # fmt: skip
    yield (
        "lora", {"x": x}, {"a": [c, 8], "b": [8, c]},
        [node("u", "matmul", "x", "a"), node("v", "matmul", "u", "b"), node("s", "mul", "v", 0.5),
         node("y", "add", "x", "s")],
    )  # fmt: skip
    yield (
        "glu", {"x": x}, {"wg": [c, 16], "wu": [c, 16]},
        [node("g", "matmul", "x", "wg"), node("u", "matmul", "x", "wu"), node("s", "silu", "g"),
         node("y", "mul", "s", "u")],
    )  # fmt: skip


def blueprints() -> list[dict[str, Any]]:
    """All of them, every name once: 17 kinds in several widths and types."""
    out = []
    for make, sizes in (
        (_elementwise, ((40, "float32"), (96, "float32"), (64, "bfloat16"))),
        (_rows, ((40, "float32"), (72, "float32"), (64, "bfloat16"))),
        (_products, ((40, "float32"), (64, "bfloat16"))),
    ):
        for width, dtype in sizes:
            for name, inputs, params, nodes in make(width):
                short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
                out.append(blueprint(f"{name}_{width}_{short}", dtype, inputs, params, nodes))
    return out


@dataclass(frozen=True, eq=False)
class Block:
    """One compiled blueprint. `texts`: of every kernel by its name, C functions or Triton modules; `prelude`:
    the C text before the functions; `container`: the artifact; `manifest`: its launch manifest as JSON.
    """

    name: str
    kind: str
    texts: Mapping[str, str]
    prelude: str
    container: bytes
    work: Work

    @property
    def manifest(self) -> dict[str, Any]:
        """A fresh copy of the manifest."""
        return json.loads(json.dumps(unpack(self.container).manifest))

    @cached_property
    def plans(self) -> list[dict[str, Any]]:
        """The launch plans as JSON, not to be changed."""
        return self.manifest["launch"]["plans"]

    @property
    def target(self) -> Target:
        return self.work.target

    def rows_of(self, kernel: str) -> tuple[int, int, int]:
        """(least, most, step) of the rows for which a kernel is launched."""
        launch = self.manifest["launch"]
        (dim,) = launch["interface"]["dims"]
        low, high, step = dim["max"], dim["min"], 1
        for plan in launch["plans"]:
            bounds = [(b["low"], b["high"]) for b in plan["bucket"]] or [(dim["min"], dim["max"])]
            for variant in [v for one in plan["steps"] for v in one.get("variants", ())]:
                if variant["kernel"] == kernel:
                    low, high = min(low, bounds[0][0]), max(high, bounds[0][1])
                    step = max([step, *(n for _, n in variant["guard"]["divisible"])])
        return low, high, step

    def programs(self, kernel: str) -> int | None:
        """Of every launch of a kernel along the first axis; None where that is no one number."""
        found = {str(step["grid"][0]) for _, step, _ in self.launches(kernel)}
        return int(found.pop()) if len(found) == 1 and "".join(found).isdigit() else None

    def dtypes(self, kernel: str, argument: int) -> set[str]:
        """Of the buffers that are given to a kernel as this argument."""
        given = [(plan, step["args"][argument]) for plan, step, _ in self.launches(kernel)]
        return {plan["buffers"][a["value"]]["dtype"] for plan, a in given if a["kind"] == "buffer"}

    def roundings(self, backward: bool, rows: int = 48) -> int:
        """Length of the accumulation of results, or of gradients, as `esper_ir.oracle` counts it."""
        assert self.work.graph is not None and self.work.joint is not None
        graph = self.work.joint.graph if backward else self.work.graph
        return oracle.accumulation_length(graph, {"rows": rows})

    @cached_property
    def scale(self) -> float:
        """Root mean square of results over that of what comes in, to a power of two, on ordinary values."""
        assert (graph := self.work.graph) is not None
        limits, generator = oracle.index_limits(graph), torch.Generator().manual_seed(0)
        given = {
            n: oracle.draw("normal", t, {"rows": 48}, generator, limits.get(n))
            for n, t in graph.inputs.items()
        }
        made = reference.evaluate(graph, given, precision="float64").values()
        came = [t.double() for t in given.values() if t.is_floating_point()]
        out, into = (max(float(t.square().mean().sqrt()) for t in each) for each in (made, came))
        return 2.0 ** round(math.log2(out / into))

    def roles(self, kernel: str) -> list[set[str]]:
        """What each argument of a kernel is over all launches: "leaf" (a tensor that the caller gives, also
        where it was saved), "output", "gradient", "cotangent", "saved", "temp", "size rows", ..."""
        found: list[set[str]] = []
        for plan, step, forward in self.launches(kernel):
            found = found or [set() for _ in step["args"]]
            for at, argument in enumerate(step["args"]):
                buffer = argument["kind"] == "buffer"
                role = _role(plan["buffers"][argument["value"]], forward) if buffer else ""
                found[at].add(role or f"size {argument['value']}")
        return found

    def launches(self, kernel: str) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]]:
        """(plan, step, the forward plan) of every step that may launch a kernel."""
        plans = self.plans
        forward = next((p for p in plans if p["phase"] == "forward"), None)
        for plan in plans:
            for step in plan["steps"]:
                if kernel in [v["kernel"] for v in step.get("variants", ())]:
                    yield plan, step, forward


def _role(buffer: Mapping[str, Any], forward: Mapping[str, Any] | None) -> str:
    source = str(buffer["source"])
    if source == "saved" and forward:
        source = forward["buffers"][forward["saved"][buffer["index"]]]["source"]
        source = "saved" if source != "input" else source
    return "leaf" if source == "input" else source


def compiled(data: Mapping[str, Any], target: str) -> Block:
    """Compile one blueprint for a target ("cpu", "h100")."""
    chosen = resolve(target)
    work = run(FAST, Work(text.parse(json.dumps(data)), chosen, FAST.name))
    assert work.built is not None
    side = {n: t.decode() for n, t in work.built.side_files.items()}
    if chosen.kind == "cpu":
        prelude, texts = _functions(side.get("module.c", ""))
        return Block(data["name"], "c", texts, prelude, work.container, work)
    texts = {n.removesuffix(".triton.py"): t for n, t in side.items() if n.endswith(".triton.py")}
    return Block(data["name"], "triton", texts, "", work.container, work)


OPENS = '__attribute__((visibility("default")))\nvoid '


def _functions(module: str) -> tuple[str, dict[str, str]]:
    head, *rest = module.split(OPENS)
    return head, {t.partition("(")[0]: OPENS + t[: t.index("\n}\n") + 3] for t in rest}


def with_kernels(block: Block, changed: Mapping[str, str]) -> bytes:
    """The machine code of the block with more kernels: text by entry name (the text defines that entry)."""
    if block.kind == "c":
        module = block.prelude + "\n".join([*block.texts.values(), *changed.values()])
        return compile_c(module, block.target).data
    sources = tuple(block.work.kernels.by_key.values())
    asked = request(sources, block.target)
    known = {k["entry"]: k for k in asked["kernels"]}
    kernels = [
        {**known[entry.rpartition("__")[0]], "entry": entry, "text": text} for entry, text in changed.items()
    ]
    every = [*asked["kernels"], *kernels]
    made = run_worker("forge.build_worker", {**asked, "stage": "compile", "kernels": every}, BUILD_LIMITS)
    ordered = list(made["code"].values())
    joined = run_worker(
        "forge.build_worker", {**asked, "kernels": [], "stage": "assemble", "texts": ordered}, BUILD_LIMITS
    )
    return base64.b64decode(joined["cubin"])


def packed(block: Block, manifest: Mapping[str, Any], code: bytes | None) -> bytes:
    """An artifact of the block with another manifest and, where given, other machine code."""
    made = unpack(block.container)
    fields = {k: v for k, v in manifest.items() if k not in ("artifact_id", "blobs")}
    fields["version"] = sha256(json.dumps(fields, sort_keys=True).encode() + (code or b"")).hexdigest()
    blobs = [
        (b["name"], b["kind"], code if code is not None and at == 0 else bytes(made.blobs[b["name"]]))
        for at, b in enumerate(made.manifest["blobs"])
    ]
    return pack(fields, blobs)


def here() -> str:
    """Target of this machine's processor."""
    return "cpu" if platform.machine() in ("x86_64", "aarch64") else "auto"
