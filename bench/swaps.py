"""Blueprints of the whole models' modules, and which of them `runtime.swap` puts where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bench.models import EPS, Cnn, DecoderSizes


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _blueprint(name: str, low: int, tune: tuple[int, ...], **parts: Any) -> dict[str, Any]:
    dims = {"rows": {"min": low, "max": 131072, "tune": list(tune)}}
    return {"format": "esper-blueprint/1", "name": name, "dims": dims, **parts}


def _leaf(kind: str, *shape: int | str, init: str = "kaiming_uniform") -> dict[str, Any]:
    return {"dtype": kind, "shape": list(shape), "init": {"kind": init}}


def _node(name: str, op: str, *inputs: str, **attrs: Any) -> dict[str, Any]:
    return {"id": name, "op": op, "inputs": list(inputs), **({"attrs": attrs} if attrs else {})}


def mlp_blueprint(sizes: DecoderSizes, tune: tuple[int, ...] = (8192,)) -> dict[str, Any]:
    """`MLP` with torch's names and [out, in] weights; x [rows, width]."""
    kind = _named(sizes.dtype)
    shapes = {"gate": (sizes.hidden, sizes.width), "up": (sizes.hidden, sizes.width)}
    shapes["down"] = (sizes.width, sizes.hidden)
    return _blueprint(
        "model_mlp", 1, tune,
        inputs={"x": {"dtype": kind, "shape": ["rows", sizes.width]}},
        params={
            f"{n}.weight": {"dtype": kind, "shape": list(s), "init": {"kind": "kaiming_uniform"}}
            for n, s in shapes.items()
        },
        nodes=[
            {"id": "g", "op": "linear", "inputs": ["x", "gate.weight"]},
            {"id": "u", "op": "linear", "inputs": ["x", "up.weight"]},
            {"id": "a", "op": "silu", "inputs": ["g"]},
            {"id": "h", "op": "mul", "inputs": ["a", "u"]},
            {"id": "y", "op": "linear", "inputs": ["h", "down.weight"]},
        ],
        outputs=["y"],
    )  # fmt: skip


def norm_blueprint(sizes: DecoderSizes, tune: tuple[int, ...] = (8192,)) -> dict[str, Any]:
    """`RMSNorm`; x [rows, width]."""
    kind = _named(sizes.dtype)
    return _blueprint(
        "model_norm", 1, tune,
        inputs={"x": {"dtype": kind, "shape": ["rows", sizes.width]}},
        params={"weight": {"dtype": kind, "shape": [sizes.width], "init": {"kind": "ones"}}},
        nodes=[
            {"id": "n", "op": "rms_norm", "inputs": ["x"], "attrs": {"eps": EPS}},
            {"id": "y", "op": "mul", "inputs": ["n", "weight"]},
        ],
        outputs=["y"],
    )  # fmt: skip


def _attention_nodes(sizes: DecoderSizes, half: int) -> list[dict[str, Any]]:
    """`o` from `h1`: `Attention` with the rotation before heads and rows change places."""
    heads = ["batch", "rows", sizes.heads, 2 * half]
    found = [_node(f"{n}_row", "reshape", n, shape=["rows", 1, half]) for n in ("cos", "sin")]
    for name in "qkv":
        last = "h" if name == "v" else "r"
        found.append(_node(f"{name}_p", "linear", "h1", f"attention.{name}.weight"))
        found.append(_node(f"{name}_h", "reshape", f"{name}_p", shape=heads))
        if name != "v":
            found.append(_node(f"{name}_r", "rope", f"{name}_h", "cos_row", "sin_row"))
        found.append(_node(f"{name}_t", "permute", f"{name}_{last}", dims=[0, 2, 1, 3]))
    return [
        *found,
        _node("a", "scaled_dot_product_attention", "q_t", "k_t", "v_t", is_causal=True),
        _node("a_t", "permute", "a", dims=[0, 2, 1, 3]),
        _node("a_w", "reshape", "a_t", shape=["batch", "rows", sizes.width]),
        _node("o", "linear", "a_w", "attention.out.weight"),
    ]


def layer_blueprint(sizes: DecoderSizes, batch: int = 4, rows: int = 2048) -> dict[str, Any]:
    """`DecoderLayer` as a whole; x [batch, rows, width]."""
    kind, half = _named(sizes.dtype), sizes.width // sizes.heads // 2
    square, wide = (sizes.width, sizes.width), (sizes.hidden, sizes.width)
    shapes = {f"attention.{n}.weight": square for n in ("q", "k", "v", "out")}
    shapes |= {"mlp.gate.weight": wide, "mlp.up.weight": wide, "mlp.down.weight": wide[::-1]}
    norms = {f"norm{n}.weight": _leaf(kind, sizes.width, init="ones") for n in (1, 2)}
    params = {**norms, **{n: _leaf(kind, *s) for n, s in shapes.items()}}
    table = {"dtype": kind, "shape": ["rows", half]}
    made = _blueprint(
        "model_layer", 1, (rows,),
        inputs={"x": {"dtype": kind, "shape": ["batch", "rows", sizes.width]}, "cos": table, "sin": table},
        params=params,
        nodes=[
            _node("n1", "rms_norm", "x", eps=EPS),
            _node("h1", "mul", "n1", "norm1.weight"),
            *_attention_nodes(sizes, half),
            _node("r", "add", "x", "o"),
            _node("n2", "rms_norm", "r", eps=EPS),
            _node("h2", "mul", "n2", "norm2.weight"),
            _node("g", "linear", "h2", "mlp.gate.weight"),
            _node("u", "linear", "h2", "mlp.up.weight"),
            _node("s", "silu", "g"),
            _node("m", "mul", "s", "u"),
            _node("d", "linear", "m", "mlp.down.weight"),
            _node("y", "add", "r", "d"),
        ],
        outputs=["y"],
        differentiable=["x", *params],
    )  # fmt: skip
    made["dims"] = {"batch": {"min": 1, "max": 4096, "tune": [batch]}, **made["dims"]}
    return made


def embedding_blueprint(sizes: DecoderSizes, tune: tuple[int, ...] = (8192,)) -> dict[str, Any]:
    """`nn.Embedding`; tokens [rows]."""
    return _blueprint(
        "model_embedding", 1, tune,
        inputs={"tokens": {"dtype": "int64", "shape": ["rows"]}},
        params={"weight": _leaf(_named(sizes.dtype), sizes.words, sizes.width, init="normal")},
        nodes=[_node("y", "embedding", "tokens", "weight")],
        outputs=["y"],
    )  # fmt: skip


def head_blueprint(sizes: DecoderSizes, tune: tuple[int, ...] = (8192,)) -> dict[str, Any]:
    """`Head`; x [rows, width], targets [rows]. Logits are kept in the model's type, not in float32."""
    kind = _named(sizes.dtype)
    return _blueprint(
        "model_head", 1, tune,
        inputs={
            "x": {"dtype": kind, "shape": ["rows", sizes.width]},
            "targets": {"dtype": "int64", "shape": ["rows"]},
        },
        params={
            "norm.weight": _leaf(kind, sizes.width, init="ones"),
            "words.weight": _leaf(kind, sizes.words, sizes.width),
        },
        nodes=[
            _node("n", "rms_norm", "x", eps=EPS),
            _node("h", "mul", "n", "norm.weight"),
            _node("z", "linear", "h", "words.weight"),
            _node("wide", "cast", "z", dtype="float32"),
            _node("y", "cross_entropy", "wide", "targets"),
        ],
        outputs=["y"],
    )  # fmt: skip


def _gate(x: str, channels: int, prefix: str = "", result: str = "y") -> list[dict[str, Any]]:
    """`SqueezeExcite` of x as the node `result`."""
    return [
        _node("means", "mean", x, dims=[1, 2]),
        _node("d", "linear", "means", f"{prefix}down.weight"),
        _node("kept", "relu", "d"),
        _node("u", "linear", "kept", f"{prefix}up.weight"),
        _node("s", "sigmoid", "u"),
        _node("e", "reshape", "s", shape=["rows", 1, 1, channels]),
        _node(result, "mul", x, "e"),
    ]


def excite_blueprint(
    channels: int, side: int, inner: int, dtype: torch.dtype, tune: tuple[int, ...] = (64,)
) -> dict[str, Any]:
    """`SqueezeExcite` on images [rows, side, side, channels]."""
    kind = _named(dtype)
    return _blueprint(
        f"model_excite_{channels}", 1, tune,
        inputs={"x": {"dtype": kind, "shape": ["rows", side, side, channels]}},
        params={
            "down.weight": _leaf(kind, inner, channels),
            "up.weight": _leaf(kind, channels, inner),
        },
        nodes=_gate("x", channels),
        outputs=["y"],
    )  # fmt: skip


def _norm(name: str, x: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Batch norm of x by the batch's statistics as the node `name`; the next running ones by buffer."""
    over = {"dims": [0, 1, 2]}
    nodes = [
        _node(f"{name}_y", "batch_norm", x, f"{name}.weight", f"{name}.bias", data_format="NHWC"),
        _node(f"{name}_m", "mean", x, **over),
        _node(f"{name}_v", "var", x, correction=1, **over),
    ]
    for short, long in (("m", "mean"), ("v", "var")):
        nodes += [
            _node(f"{name}_{short}_now", "detach", f"{name}_{short}"),
            _node(f"{name}_{long}", "lerp", f"{name}.running_{long}", f"{name}_{short}_now", "momentum"),
        ]
    return nodes, {f"{name}.running_{long}": f"{name}_{long}" for long in ("mean", "var")}


def _trained(
    name: str, tune: tuple[int, ...], kind: str, norms: Mapping[str, int], nodes: list[dict[str, Any]],
    updates: Mapping[str, str], params: Mapping[str, Any], shape: tuple[int, int, int],
) -> dict[str, Any]:  # fmt: skip
    """A block on images x [rows, *shape] with batch norms (channels by name)."""
    leaves, buffers = dict(params), dict[str, Any]()
    for norm, channels in norms.items():
        ones, zeros = (_leaf(kind, channels, init=init) for init in ("ones", "zeros"))
        leaves |= {f"{norm}.weight": ones, f"{norm}.bias": zeros}
        buffers |= {f"{norm}.running_mean": zeros, f"{norm}.running_var": ones}
    return _blueprint(
        name, 1, tune,
        inputs={"x": {"dtype": kind, "shape": ["rows", *shape]}},
        params=leaves,
        buffers=buffers,
        constants={"momentum": {"dtype": kind, "shape": [1], "data": [0.1]}},
        differentiable=["x", *leaves],
        nodes=nodes,
        outputs=["y", *updates.values()],
        updates=dict(updates),
    )  # fmt: skip


def stem_blueprint(width: int, image: int, dtype: torch.dtype, tune: tuple[int, ...]) -> dict[str, Any]:
    """`Stem` in training."""
    kind = _named(dtype)
    norm, updates = _norm("norm", "c")
    conv = _node("c", "conv2d", "x", "conv.weight", stride=[2], padding=[3], data_format="NHWC")
    pool = _node("y", "max_pool2d", "r", kernel=[3], stride=[2], padding=[1], data_format="NHWC")
    nodes = [conv, *norm, _node("r", "relu", "norm_y"), pool]
    params = {"conv.weight": _leaf(kind, width, 7, 7, 3)}
    return _trained("model_stem", tune, kind, {"norm": width}, nodes, updates, params, (image, image, 3))


def residual_blueprint(
    channels: int, out: int, side: int, stride: int, dtype: torch.dtype, tune: tuple[int, ...]
) -> dict[str, Any]:
    """`Residual` in training."""
    kind, inner, layout = _named(dtype), max(out // 16, 4), {"data_format": "NHWC"}
    params = {
        "conv1.weight": _leaf(kind, out, 3, 3, channels), "conv2.weight": _leaf(kind, out, 3, 3, out),
        "excite.down.weight": _leaf(kind, inner, out), "excite.up.weight": _leaf(kind, out, inner),
    }  # fmt: skip
    first, updates = _norm("norm1", "c1")
    second, more = _norm("norm2", "c2")
    nodes = [
        _node("c1", "conv2d", "x", "conv1.weight", stride=[stride], padding=[1], **layout),
        *first,
        _node("r1", "relu", "norm1_y"),
        _node("c2", "conv2d", "r1", "conv2.weight", padding=[1], **layout),
        *second,
        *_gate("norm2_y", out, "excite.", "gated"),
    ]
    shortcut = "x"
    if stride != 1 or channels != out:
        params["shortcut.weight"] = _leaf(kind, out, 1, 1, channels)
        nodes.append(_node("short", "conv2d", "x", "shortcut.weight", stride=[stride], **layout))
        shortcut = "short"
    nodes += [_node("t", "add", shortcut, "gated"), _node("y", "relu", "t")]
    norms = {"norm1": out, "norm2": out}
    name = f"model_residual_{out}_{stride}"
    return _trained(name, tune, kind, norms, nodes, updates | more, params, (side, side, channels))


def decoder_swaps(sizes: DecoderSizes, batch: int = 4, rows: int = 2048) -> Mapping[str, dict[str, Any]]:
    """Blueprint by pattern of module names: all of the decoder."""
    return {
        "embedding": embedding_blueprint(sizes, (batch * rows,)),
        "layers.*": layer_blueprint(sizes, batch, rows),
        "head": head_blueprint(sizes, (batch * rows,)),
    }


def decoder_parts(sizes: DecoderSizes, tune: tuple[int, ...] = (8192,)) -> Mapping[str, dict[str, Any]]:
    """The same for norms and MLPs alone, which leave attention, residuals and the loss to the host."""
    norm = norm_blueprint(sizes, tune)
    return {"layers.*.mlp": mlp_blueprint(sizes, tune), "layers.*.norm?": norm, "head.norm": norm}


def cnn_swaps(cnn: Cnn, tune: tuple[int, ...] = (64,)) -> Mapping[str, dict[str, Any]]:
    """Blueprint by pattern of module names: all but the head. They hold in training, with the batch's
    statistics. On an H200 a step takes longer so than with `cnn_parts`, which is what the bench measures: see
    bench/NOTES.md."""
    sizes = cnn.sizes
    found = {"stem": stem_blueprint(sizes.width, sizes.image, sizes.dtype, tune)}
    channels, side = cnn.sides()[0]
    for number, (out, _) in enumerate(cnn.sides()):
        for at in range(sizes.depths[number]):
            stride = 2 if number and not at else 1
            made = residual_blueprint(channels, out, side, stride, sizes.dtype, tune)
            found[f"stages.{number}.{at}"] = made
            channels, side = out, -(-side // stride)
    return found


def cnn_parts(cnn: Cnn, tune: tuple[int, ...] = (64,)) -> Mapping[str, dict[str, Any]]:
    """The same for the gates alone, one blueprint per stage."""
    found: dict[str, dict[str, Any]] = {}
    for number, (channels, side) in enumerate(cnn.sides()):
        inner = max(channels // 16, 4)
        found[f"stages.{number}.*.excite"] = excite_blueprint(channels, side, inner, cnn.sizes.dtype, tune)
    return found
