"""Library calls multiply float32 as their step declares, and leave torch's flags as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from runtime import precision


class OnCard(NamedTuple):
    """What `declared` looks at of a tensor."""

    dtype: torch.dtype = torch.float32
    is_cuda: bool = True


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    held = {name: get() for name, (get, _) in precision._FLAGS.items()}
    yield
    for name, value in held.items():
        precision._FLAGS[name][1](value)


@pytest.mark.parametrize("flag", ["matmul", "cudnn"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("tf32", [False, True])
def test_flag_is_as_declared_during_the_call_and_as_before_after_it(
    flag: str, before: bool, tf32: bool
) -> None:
    get, put = precision._FLAGS[flag]
    put(before)
    during: list[bool] = []

    def run(inputs: Any, outs: Any) -> None:
        during.append(get())
        if len(during) == 2:
            raise RuntimeError("a library that fails")

    call = precision.declared(run, flag, tf32)
    x: Any = OnCard()
    call([x], [x])
    with pytest.raises(RuntimeError, match="library"):
        call([x], [x])
    assert during == [tf32, tf32] and get() is before


def test_other_types_and_places_leave_the_flag_alone() -> None:
    get, put = precision._FLAGS["cudnn"]
    put(True)
    during: list[bool] = []
    call = precision.declared(lambda inputs, outs: during.append(get()), "cudnn", False)
    for x in (OnCard(torch.bfloat16), OnCard(is_cuda=False)):
        call([x], [x])  # type: ignore[list-item]
    assert during == [True, True]


def test_torch_means_the_same_flags() -> None:
    """The private functions are those behind torch.backends."""
    torch.backends.cuda.matmul.allow_tf32 = True
    assert precision._FLAGS["matmul"][0]() is True
    torch.backends.cuda.matmul.allow_tf32 = False
    assert precision._FLAGS["matmul"][0]() is False
    for on in (False, True):
        with torch.backends.cudnn.flags(allow_tf32=on):
            assert precision._FLAGS["cudnn"][0]() is on
