"""Decoding launch manifests: strict and lazy agree, and every wrong key or type is refused with its place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from library.launch import LaunchManifest, from_json, to_json
from tests.runtime import artifacts as a
from tests.runtime.test_executor import refusal

MANIFESTS = pytest.mark.parametrize("launch", [a.scale(), a.product()], ids=["scale", "product"])


@MANIFESTS
def test_round_trip(launch: LaunchManifest) -> None:
    data = to_json(launch)
    assert from_json(data) == launch
    lazy = from_json(data, lazy=True)
    assert [p.phase for p in lazy.plans] == [p.phase for p in launch.plans]
    assert to_json(lazy) == data


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    yield path
    if isinstance(data, (dict, list)):
        for key in data if isinstance(data, dict) else range(len(data)):
            yield from places(data[key], (*path, key))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    out = copy.deepcopy(data)
    at = out
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return out


def read_all(data: Any) -> None:
    lazy = from_json(data, lazy=True)
    for plan in lazy.plans:
        _ = plan.steps
    for kernel in lazy.kernels:
        _ = kernel.params


@MANIFESTS
def test_every_wrong_type_is_refused_by_both(launch: LaunchManifest) -> None:
    data, tried = to_json(launch), 0
    for path in places(data):
        if not path or "attrs" in path:
            continue
        for value in (None, {"wrong": 1}, 1.5, True):
            wrong = changed(data, path, value)
            refusal("E0720", from_json, wrong)
            refusal("E0720", read_all, wrong)
            tried += 1
    assert tried > 100


@MANIFESTS
def test_every_missing_and_unknown_key_is_refused(launch: LaunchManifest) -> None:
    data, tried = to_json(launch), 0
    for path in places(data):
        if not path or "attrs" in path or isinstance(path[-1], int):
            continue
        tried += 1
        refusal("E0720", from_json, changed(data, path, KeyError))
        refusal("E0720", read_all, changed(data, path, KeyError))
        refusal("E0720", from_json, changed(data, (*path[:-1], "extra"), 1))
    assert tried > 20


def test_the_place_is_named() -> None:
    data = changed(to_json(a.scale()), ("plans", 1, "buffers", 0, "dtype"), 3)
    assert refusal("E0720", from_json, data).node == "launch.plans[1].buffers[0].dtype"
    assert refusal("E0720", read_all, data).node == "launch.plans[1].buffers[0].dtype"
    data = changed(to_json(a.scale()), ("plans", 0, "outputs"), [99])
    assert "out of range" in refusal("E0720", from_json, data).message
    refusal("E0720", read_all, data)
