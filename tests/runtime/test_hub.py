"""An exported repository loaded the way Hugging Face's `kernels` loads one."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from esper_ir.diagnostics import EsperError
from library.hub import BUNDLE, export_kernel
from library.store import Library
from runtime import loader
from tests.runtime import artifacts as a
from tests.runtime.conftest import Put


@pytest.fixture
def variant(put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The exported block, with a library that does not have it in force."""
    with Library.open() as library:
        found = export_kernel(library, library.record(put()), tmp_path / "repo")
    monkeypatch.setenv("ESPER_LIBRARY", str(tmp_path / "fresh"))
    loader.cache().release()
    loader._meant.clear()
    loader._libraries.clear()
    return found


def imported(variant: Path) -> ModuleType:
    """As that package does: by path, under the id of the metadata."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        for known in [k for k in sys.modules if k == name or k.startswith(f"{name}.")]:
            sys.modules.pop(known)  # with what it imported of itself: nothing is held for later tests
    return module


def test_it_runs_forward_and_backward(variant: Path) -> None:
    kernel = imported(variant)
    x, w = torch.randn(5, a.N, requires_grad=True), torch.randn(a.N, requires_grad=True)
    y = kernel.scale(x, w)
    assert torch.equal(y, x * w)
    dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert torch.equal(dx, w.detach().expand(5, -1))
    torch.testing.assert_close(dw, x.detach().sum(0))
    block = kernel.load()
    assert isinstance(block, nn.Module) and torch.equal(block(x), x * block.w)


def test_its_layer_takes_the_place_of_a_module(variant: Path) -> None:
    """Stateless, with the parameters of the module it stands in for."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(a.N))

    layer = imported(variant).layers.Scale
    assert layer.__init__ is nn.Module.__init__ and layer.can_torch_compile and layer.has_backward
    module, x = Scale(), torch.randn(3, a.N)
    assert torch.equal(layer.forward(module, x), x * module.w)


def test_a_changed_bundle_fails_on_import(variant: Path) -> None:
    data = bytearray((variant / BUNDLE).read_bytes())
    data[len(data) // 2] ^= 1
    (variant / BUNDLE).write_bytes(bytes(data))
    with pytest.raises(EsperError) as error:
        imported(variant)
    assert error.value.exit_code in (11, 12)


def test_a_cache_of_links_is_followed(variant: Path, tmp_path: Path) -> None:
    """The download cache keeps files elsewhere and links to them."""
    blobs = tmp_path / "blobs"
    shutil.copytree(variant, blobs)
    for path in variant.iterdir():
        path.unlink()
        path.symlink_to(blobs / path.name)
    assert imported(variant).artifact_id


def test_kernels_itself_loads_it(variant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("kernels", reason="the package `kernels` is not installed: NOT compared")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kernel = kernels.get_local_kernel(variant.parent.parent, backend="cpu")
    x, w = torch.randn(5, a.N), torch.randn(a.N)
    assert torch.equal(kernel.scale(x, w), x * w)
