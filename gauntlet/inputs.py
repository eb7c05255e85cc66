"""The tensors of a case, from its recipe or as they were stored."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from esper_ir import oracle
from gauntlet.cases import Raw
from gauntlet.stage import Recipe
from gauntlet.subject import Subject
from library.launch import evaluate

COTANGENT = "cotangent:"
LAYOUTS = ("strided", "transposed", "offset", "misaligned", "expanded")
COTANGENTS = ("normal", "ones", "rows", "one-hot", "zeros", "strided", "alternating")


def tensor_of(raw: Raw, device: torch.device) -> Tensor:
    dtype = getattr(torch, raw.dtype)
    if not raw.data:
        return torch.empty(raw.shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(raw.data), dtype=dtype).reshape(raw.shape).to(device)


def raw_of(tensor: Tensor) -> Raw:
    dense = tensor.detach().cpu().contiguous()
    return Raw(str(dense.dtype).removeprefix("torch."), tuple(dense.shape), dense.reshape(-1).view(torch.uint8).numpy().tobytes())


def stored_form(subject: Subject, recipe: Recipe) -> dict[str, Raw]:
    """Everything that a replay needs."""
    out = {name: raw_of(tensor) for name, tensor in values(subject, recipe).items()}
    if recipe.cotangent:
        flowing = cotangents(subject, recipe)
        names = subject.blueprint.outputs
        out |= {COTANGENT + n: raw_of(c) for n, c in zip(names, flowing, strict=True) if c is not None}
    return out


def seeded(recipe: Recipe, name: str, device: torch.device) -> torch.Generator:
    """Every tensor of every case has its own stream."""
    key = f"{recipe.seed}:{recipe.draw}:{recipe.cotangent}:{sorted(recipe.dims.items())}:{name}"
    return torch.Generator(device=device).manual_seed(zlib.crc32(key.encode()) + (recipe.seed << 32))


def values(subject: Subject, recipe: Recipe) -> dict[str, Tensor]:
    """A dense tensor per leaf."""
    stored = subject.stored
    if stored:
        return {name: stored[name] for name, _, _ in subject.leaves}
    raise NotImplementedError(oracle)
