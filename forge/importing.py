"""A class of a user's Python file as a blueprint: what `esper-forge import` does."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper_ir.diagnostics import EXIT_NOT_FOUND, EXIT_USAGE, EsperError, did_you_mean
from esper_ir.graph import Blueprint
from esper_ir.importers.torch_dims import from_options
from esper_ir.importers.torch_export import from_torch
from esper_ir.ops.rules import torch_dtype
from esper_ir.types import DType

_INPUT = re.compile(r"(?:([A-Za-z_]\w*)[=:])?\s*([a-z]+\d*)\s*\[([\d,\s]*)\]\s*\Z", re.ASCII)


def example(text: str) -> tuple[str | None, Tensor]:
    """`float32[8,64]`, or `name=float32[8,64]` for a keyword argument, as a tensor without values:
    only its shape and dtype matter, and large ones take no memory. Raises E0517, E0103.
    """
    found = _INPUT.match(text)
    if found is None:
        hint = "a dtype and sizes, such as float32[8,64] or x=int64[4]"
        raise EsperError("E0517", f"cannot read --input {text!r}", hint=hint, exit_code=EXIT_USAGE)
    name, dtype, sizes = found.groups()
    kind = DType.parse(dtype, text)
    shape = [int(s) for s in sizes.replace(" ", "").split(",") if s]
    return name, torch.empty(shape, dtype=torch_dtype(kind))


def settings(options: Sequence[str]) -> dict[str, Any]:
    """`--set name=value` options: a value is JSON where it can be read as such, else a text. Raises E0517."""
    out: dict[str, Any] = {}
    for text in options:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            hint = "an argument of the class and its value, such as width=64"
            raise EsperError("E0517", f"cannot read --set {text!r}", hint=hint, exit_code=EXIT_USAGE)
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out


@contextmanager
def _beside(folder: Path) -> Any:
    """Modules beside the file can be imported while it is loaded."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _failed(what: str, error: BaseException, path: Path) -> EsperError:
    """The user's code raised: its message and its line."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    where = f", line {lines[-1]}" if lines else ""
    message = f"{what}: {type(error).__name__}: {error}"
    return EsperError("E0516", message, node=f"{path}{where}", hint="run the file with Python to see more")


def load(target: str) -> tuple[Path, str, Any]:
    """The object that `path.py:Name` means, the file having been run. Raises E0516."""
    text, _, name = target.rpartition(":")
    path = Path(text).resolve()
    if not text or not name:
        hint = "a Python file and a class or function in it, such as model.py:Block"
        raise EsperError("E0516", f"cannot read {target!r}", hint=hint, exit_code=EXIT_USAGE)
    if not path.is_file():
        raise EsperError("E0516", "no such file", node=text, exit_code=EXIT_NOT_FOUND)
    spec = importlib.util.spec_from_file_location(f"_esper_import_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise EsperError("E0516", "not a Python file", node=text, exit_code=EXIT_USAGE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        with _beside(path.parent):
            spec.loader.exec_module(module)
    except Exception as error:  # the user's own code runs here
        raise _failed("the file cannot be run", error, path) from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        hint = did_you_mean(name, (n for n, v in vars(module).items() if callable(v))) or None
        message = f"{path.name} has no {name}"
        raise EsperError("E0516", message, node=text, hint=hint, exit_code=EXIT_NOT_FOUND)
    return path, name, found


def built(path: Path, found: Any, arguments: dict[str, Any]) -> nn.Module | Callable[..., Any]:
    """A module or a function: classes, and functions that are given settings, are called first."""
    if isinstance(found, nn.Module) and not arguments:
        return found
    if not callable(found):
        raise EsperError("E0516", f"{found!r} is no module, class or function", node=str(path))
    if not isinstance(found, type) and not arguments:
        return found
    try:
        made = found(**arguments)
    except Exception as error:  # the user's own code runs here
        hint = "give the arguments of the class by --set name=value"
        raise EsperError("E0516", f"{_failed('it cannot be made', error, path).message}", node=str(path),
                         hint=hint) from error  # fmt: skip
    if not isinstance(made, nn.Module):
        raise EsperError("E0516", f"it makes a {type(made).__name__}, not a torch module", node=str(path))
    return made


@contextmanager
def _quietly() -> Iterator[None]:
    """Where torch cannot trace a module it logs a traceback and prints its graph; the refusal says that in a
    line, with the place in the user's file. What was written before a success is kept.
    """
    before, kept = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(kept):
            yield
    finally:
        logging.disable(before)
    sys.stderr.write(kept.getvalue())


def import_file(
    target: str,
    inputs: Sequence[str],
    *,
    dynamic: Sequence[str] = (),
    arguments: Sequence[str] = (),
    training: bool = True,
    name: str | None = None,
    updates: bool = True,
) -> Blueprint:
    """The blueprint of a class in a Python file (see `esper_ir.importers.torch_export.from_torch`). The file
    is run, as an import would; parameters are drawn from seed 0. Raises E0516, E0517 and
    the codes of `from_torch`.
    """
    torch.manual_seed(0)
    path, label, found = load(target)
    made = built(path, found, settings(arguments))
    if isinstance(made, nn.Module):
        made.train(training)
    given = [example(text) for text in inputs]
    axes = from_options(dynamic)
    with _quietly():
        return from_torch(
            made,
            tuple(t for n, t in given if n is None),
            kwargs={n: t for n, t in given if n is not None},
            dynamic=axes,
            name=name or label.rpartition(".")[2],
            updates=updates,
        )
