"""Our operators in the programs that inductor writes: a call of a Python function instead of the dispatcher.

An operator called from a compiled program goes through the dispatcher twice, for autograd and for the device,
which costs more than launching a small block. Inductor's programs are Python, so they are told to call the
function behind the operator, by a module and a name that a program taken from a cache finds again in a fresh
process. What is handed in is laid out as the blocks take it: dense, and images with the channels last. Where
inductor cannot be told (a C++ wrapper, another version) it calls the operators, which take any strides.

A program in a cache names these functions and passes these arguments: change them under new names only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

Images = Callable[..., Sequence[Collection[int]]]
_told: set[str] = set()


def tell(name: str, module: str, function: str, images: Images) -> None:
    """Register the lowering of `esper::<name>` to `<module>.<function>`, once. Called while the operator is
    traced: by then whoever compiles is imported. `images(*arguments)`: for each list of tensors among them,
    which of its items are images."""
    lowering = sys.modules.get("torch._inductor.lowering")
    register = getattr(lowering, "register_lowering", None)
    if name in _told or register is None:
        return
    operator = getattr(torch.ops.esper, name).default
    register(operator, type_promotion_kind=None)(_lowered(lowering, operator, module, function, images))
    _told.add(name)


def _lowered(lowering: Any, operator: Any, module: str, function: str, images: Images) -> Any:
    """The usual lowering of an unknown operator on dense operands, with another name in the program."""
    usual = lowering.fallback_handler(operator)
    short = "esper_" + module.rpartition(".")[2]
    written = with_line(lowering.ir.FallbackKernel, f"import {module} as {short}")

    def lower(*args: Any) -> Any:
        graph = lowering.V.graph
        marked, before = iter(images(*args)), len(graph.operations)
        made = usual(*(_dense(lowering.ir, a, next(marked)) if isinstance(a, list) else a for a in args))
        for node in graph.operations[before:] if not graph.cpp_wrapper else ():
            if getattr(node, "op_overload", None) is operator and type(node) is lowering.ir.FallbackKernel:
                node.__class__, node.python_kernel_name = written, f"{short}.{function}"
            node.skip_size_stride_alignment_checks = True  # of results, at every call
            graph.unaligned_buffers.discard(node.get_name())  # fresh memory, whatever the operands are
        return made

    return lower


def with_line(base: Any, line: str) -> Any:
    """The node of an unknown operator whose program begins with the import."""

    class Call(base):
        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once(line)
            super().codegen(wrapper)

    return Call


def _dense(ir: Any, values: list[Any], images: Collection[int]) -> list[Any]:
    """Tensors of a list as the block reads them; other items (sizes, a cotangent of nobody) as they are."""
    return [
        ir.ExternKernel.require_exact_strides(value, _strides(ir, value.get_size(), at in images))
        if isinstance(value, ir.TensorBox)
        else value
        for at, value in enumerate(values)
    ]


def _strides(ir: Any, sizes: Sequence[Any], image: bool) -> Sequence[Any]:
    if not image:
        return ir.FlexibleLayout.contiguous_strides(sizes)
    _, c, h, w = sizes
    return [c * h * w, 1, w * c, c]
