"""Small compiled artifacts for the tests that need real blueprints: made once per session, proven by
decree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.models import SMALL_CNN, SMALL_DECODER, Cnn
from bench.swaps import cnn_parts, decoder_parts, norm_blueprint
from forge.service import compile_file
from library.store import Library

SIDE = 32


def square_blueprint(name: str, out: int) -> dict[str, Any]:
    """y = gelu(x @ w + b) with w [in, out]: the other layout than torch's."""
    return {
        "format": "esper-blueprint/1",
        "name": name,
        "dims": {"rows": {"min": 1, "max": 64, "tune": [8]}},
        "inputs": {"x": {"dtype": "float32", "shape": ["rows", SIDE]}},
        "params": {
            "weight": {"dtype": "float32", "shape": [SIDE, out], "init": {"kind": "normal", "std": 0.1}},
            "bias": {"dtype": "float32", "shape": [out], "init": {"kind": "zeros"}},
        },
        "nodes": [
            {"id": "p", "op": "matmul", "inputs": ["x", "weight"]},
            {"id": "s", "op": "add", "inputs": ["p", "bias"]},
            {"id": "y", "op": "gelu", "inputs": ["s"]},
        ],
        "outputs": ["y"],
    }


def columns_blueprint() -> dict[str, Any]:
    """y = softmax over the rows of x * weight: rows meet each other, so nothing may be folded into them."""
    return {
        "format": "esper-blueprint/1",
        "name": "columns",
        "dims": {"rows": {"min": 1, "max": 64, "tune": [8]}},
        "inputs": {"x": {"dtype": "float32", "shape": ["rows", SIDE]}},
        "params": {"weight": {"dtype": "float32", "shape": [SIDE], "init": {"kind": "ones"}}},
        "nodes": [
            {"id": "s", "op": "mul", "inputs": ["x", "weight"]},
            {"id": "y", "op": "softmax", "inputs": ["s"], "attrs": {"dim": 0}},
        ],
        "outputs": ["y"],
    }


def norm_relu_blueprint(channels: int, side: int) -> dict[str, Any]:
    """Batch norm with ReLU in training on [rows, side, side, channels], and the next running statistics."""
    vector = {"dtype": "float32", "shape": [channels]}
    ones, zeros = ({**vector, "init": {"kind": kind}} for kind in ("ones", "zeros"))
    norm = {"op": "batch_norm", "attrs": {"data_format": "NHWC"}}
    over = {"dims": [0, 1, 2]}
    return {
        "format": "esper-blueprint/1",
        "name": "norm_relu",
        "dims": {"rows": {"min": 1, "max": 64, "tune": [4]}},
        "inputs": {"x": {"dtype": "float32", "shape": ["rows", side, side, channels]}},
        "params": {"weight": ones, "bias": zeros},
        "buffers": {"running_mean": zeros, "running_var": ones},
        "constants": {"momentum": {"dtype": "float32", "shape": [1], "data": [0.1]}},
        "differentiable": ["x", "weight", "bias"],
        "nodes": [
            {"id": "n", "inputs": ["x", "weight", "bias"], **norm},
            {"id": "y", "op": "relu", "inputs": ["n"]},
            {"id": "m", "op": "mean", "inputs": ["x"], "attrs": over},
            {"id": "v", "op": "var", "inputs": ["x"], "attrs": {**over, "correction": 1}},
            {"id": "next_mean", "op": "lerp", "inputs": ["running_mean", "m", "momentum"]},
            {"id": "next_var", "op": "lerp", "inputs": ["running_var", "v", "momentum"]},
        ],
        "outputs": ["y", "next_mean", "next_var"],
        "updates": {"running_mean": "next_mean", "running_var": "next_var"},
    }  # fmt: skip


def dropped_blueprint() -> dict[str, Any]:
    """x * weight, about half of the columns dropped by a hash of a drawn seed, the others doubled."""
    f32 = {"op": "cast", "attrs": {"dtype": "float32"}}
    return {
        "format": "esper-blueprint/1",
        "name": "dropped",
        "dims": {"rows": {"min": 1, "max": 64, "tune": [8]}},
        "inputs": {
            "seed": {"dtype": "int64", "shape": [1]},
            "x": {"dtype": "float32", "shape": ["rows", SIDE]},
        },
        "params": {"weight": {"dtype": "float32", "shape": [SIDE], "init": {"kind": "normal"}}},
        "random": ["seed"],
        "nodes": [
            {"id": "low", "op": "remainder", "inputs": ["seed", 65536]},
            {"id": "drawn", "inputs": ["low"], **f32},
            {"id": "number", "op": "arange", "attrs": {"end": SIDE}},
            {"id": "place", "inputs": ["number"], **f32},
            {"id": "scaled", "op": "mul", "inputs": ["place", 12.9898]},
            {"id": "shifted", "op": "mul", "inputs": ["drawn", 0.0371]},
            {"id": "angle", "op": "add", "inputs": ["scaled", "shifted"]},
            {"id": "wave", "op": "sin", "inputs": ["angle"]},
            {"id": "kept", "op": "gt", "inputs": ["wave", 0.0]},
            {"id": "mask", "inputs": ["kept"], **f32},
            {"id": "twice", "op": "mul", "inputs": ["mask", 2.0]},
            {"id": "p", "op": "mul", "inputs": ["x", "weight"]},
            {"id": "y", "op": "mul", "inputs": ["p", "twice"]},
        ],
        "outputs": ["y"],
    }


def documents() -> dict[str, dict[str, Any]]:
    """Blueprint by the name that a test uses."""
    cnn = Cnn(SMALL_CNN)
    found = {**decoder_parts(SMALL_DECODER, (32,)), **cnn_parts(cnn, (4,))}
    channels, side = SMALL_CNN.width, SMALL_CNN.image // 4
    return {
        **found,
        "square": square_blueprint("square", SIDE),
        "oblong": square_blueprint("oblong", 48),
        "columns": columns_blueprint(),
        "dropped": dropped_blueprint(),
        "norm_bf16": norm_blueprint(replace(SMALL_DECODER, dtype=torch.bfloat16), (32,)),
        "norm_relu": norm_relu_blueprint(channels, side),
    }


def fill(folder: Path, target: str = "cpu", only: tuple[str, ...] = ()) -> dict[str, str]:
    """Compile all, or `only` some, into the library that ESPER_LIBRARY names; artifact id by name."""
    made: dict[str, str] = {}
    by_text: dict[str, str] = {}
    with Library.open() as library:
        for name, document in documents().items():
            if only and name not in only:
                continue
            text = json.dumps(document)
            if text not in by_text:
                path = folder / f"{document['name']}.json"
                path.write_text(text, encoding="utf-8")
                (found,) = compile_file(path, targets=(target,), library=library)
                library.record_verdict(found.artifact_id, {"stages": []}, passed=True)
                by_text[text] = found.artifact_id
            made[name] = by_text[text]
    return made
