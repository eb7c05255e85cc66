"""A block as a module: copies, files, devices, threads, hooks, tools that watch, and what is refused."""

from __future__ import annotations

import copy
import io
import json
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, vmap
from torch.func import grad as func_grad
from torch.utils.flop_counter import FlopCounterMode

from esper_ir.safetensors import read_tensor
from tests.runtime.matrix.cell import (
    CLOSE,
    COMPILED,
    DYNAMIC,
    EAGER,
    WIDTH,
    Bench,
    Row,
    eagerly,
    plain,
    same,
)


def copied(b: Bench) -> None:
    other = copy.deepcopy(b.block)
    with torch.no_grad():
        other.down.weight.mul_(2)
    x = b.x()
    torch.testing.assert_close(b.compiled(other)(x), 2 * b.block(x), **CLOSE)
    same(b, b.compiled(b.block), b.leaf())


def state_dict(b: Bench) -> None:
    other = b.load()
    other.load_state_dict(b.block.state_dict())
    x = b.x()
    assert torch.equal(b.compiled(other)(x), b.compiled(b.block)(x))
    other.load_state_dict({k: v * 2 for k, v in b.block.state_dict().items()}, assign=True)
    torch.testing.assert_close(b.compiled(other)(x), plain(x, other), **CLOSE)


def safetensors(b: Bench) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "w.safetensors"
        _write(path, b.block.state_dict())
        data = path.read_bytes()
        other = b.load()
        other.load_state_dict({k: read_tensor(data, k).to(b.device) for k in b.block.state_dict()})
    x = b.x()
    assert torch.equal(b.compiled(other)(x), b.compiled(b.block)(x))


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """The format is a length, a JSON header and the bytes."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.detach().cpu().numpy().tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def meta(b: Bench) -> None:
    with torch.device("meta"):
        block = b.load()
    assert all(p.is_meta for p in block.parameters())
    assert b.compiled(block)(torch.empty(4, WIDTH, device="meta")).shape == (4, WIDTH)
    block.to_empty(device=b.device).load_state_dict(b.block.state_dict())
    x = b.x()
    assert torch.equal(b.compiled(lambda x: block(x))(x), b.block(x))


def saved_host(b: Bench) -> None:
    host = nn.Sequential(nn.Linear(WIDTH, WIDTH, device=b.device), b.block)
    file = io.BytesIO()
    torch.save(host, file)
    file.seek(0)
    back = torch.load(file, weights_only=False, map_location=b.device)
    x = b.x()
    torch.testing.assert_close(b.compiled(back)(x), host(x), **CLOSE)
    assert b"CUfunction" not in file.getvalue()


def exported(b: Bench) -> None:
    host = nn.Sequential(b.block, nn.ReLU())
    rows = torch.export.Dim("rows", min=2, max=1000)
    program = torch.export.export(host, (b.x(4),), dynamic_shapes=[{0: rows}])
    x = b.x(7)
    torch.testing.assert_close(program.module()(x), host(x), **CLOSE)


def threads(b: Bench) -> None:
    problems: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for turn in range(20):
            x = torch.randn(1 + (seed + turn) % 7, WIDTH, generator=generator).to(b.device).requires_grad_()
            (got,) = torch.autograd.grad(b.block(x).sum(), x)
            (want,) = torch.autograd.grad(plain(x, b.block).sum(), x)
            if not torch.allclose(got, want, **CLOSE):
                problems.append(f"{seed} {turn}")

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not problems


def hooks(b: Bench) -> None:
    seen: list[str] = []
    b.block.register_forward_pre_hook(lambda m, i: seen.append("before"))
    b.block.register_forward_hook(lambda m, i, o: seen.append("after"))
    b.block.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    b.block.down.weight.register_hook(lambda g: seen.append("weight"))
    b.block.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    b.block(b.leaf()).square().sum().backward()
    assert set(seen) == {"before", "after", "backward", "weight", "accumulated"}


def other_values(b: Bench) -> None:
    x = b.x()
    values = {k: v * 2 for k, v in b.block.state_dict().items()}
    got = functional_call(b.block, values, (x,))
    with torch.no_grad():
        for p in b.block.parameters():
            p.mul_(2)
    torch.testing.assert_close(got, plain(x, b.block), **CLOSE)
    nn.utils.parametrizations.weight_norm(b.block.up)
    b.block(b.leaf()).sum().backward()
    assert b.block.up.parametrizations.weight.original0.grad is not None


def fakes(b: Bench) -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert b.block(torch.randn(3, WIDTH, device=b.device)).shape == (3, WIDTH)


def flops(b: Bench) -> None:
    hidden = b.block.gate.weight.shape[0]
    forward = 2 * 5 * 3 * WIDTH * hidden
    with FlopCounterMode(display=False) as counted:
        y = b.block(b.leaf())
    assert counted.get_total_flops() == forward
    with FlopCounterMode(display=False) as counted:
        y.sum().backward()
    assert counted.get_total_flops() == 2 * forward


def profiled(b: Bench) -> None:
    with torch.profiler.profile() as found:
        b.block(b.leaf()).sum().backward()
    names = {event.key for event in found.key_averages()}
    assert "esper::model_mlp" in names and "esper::model_mlp.backward" in names


def subclass(b: Bench) -> None:
    class Own(Tensor):
        pass

    x = b.x()
    y = b.block(x.as_subclass(Own))
    torch.testing.assert_close(y.as_subclass(Tensor), b.block(x), **CLOSE)


def distributed_tensor(b: Bench) -> None:
    from torch.distributed.tensor import DTensor

    class Sharded(Tensor):
        pass

    Sharded.__name__ = DTensor.__name__  # one needs no process group to be refused
    b.block(b.x().as_subclass(Sharded))


def nested(b: Bench) -> None:
    b.block(torch.nested.nested_tensor([b.x(2), b.x(3)], layout=torch.jagged))


def func(b: Bench) -> None:
    func_grad(b.compiled(lambda x: b.block(x).sum()))(b.x())


def func_inside(b: Bench) -> None:
    b.compiled(func_grad(lambda x: b.block(x).sum()))(b.x())


def mapped(b: Bench) -> None:
    vmap(b.block)(torch.randn(3, 5, WIDTH, device=b.device))


def forward_mode(b: Bench) -> None:
    jvp(b.block, (b.x(),), (b.x(),))


def dual(b: Bench) -> None:
    with forward_ad.dual_level():
        b.block(forward_ad.make_dual(b.x(), b.x()))


def sparse(b: Bench) -> None:
    b.block(b.x().to_sparse())


def no_tensor(b: Bench) -> None:
    b.block([1.0, 2.0])


def elsewhere(b: Bench) -> None:
    b.block(torch.randn(3, WIDTH, device="meta" if b.device.type == "cpu" else "cpu"))


INSIDE = {EAGER: "E0817", COMPILED: "E0817", DYNAMIC: "E0817"}
ROWS = (
    Row("`deepcopy`", copied),
    Row("`state_dict`, also `assign=True`", state_dict),
    Row("safetensors", safetensors, note="names and layouts are torch's"),
    Row("`torch.device('meta')`", meta),
    Row("`torch.save` of the host", saved_host, note="by id; loading checks everything again"),
    Row("`torch.export` of the host", exported, eagerly()),
    Row("threads that share a block", threads, eagerly()),
    Row("hooks", hooks, eagerly(), "of modules, tensors, accumulated gradients"),
    Row("`functional_call`, parametrizations", other_values, eagerly()),
    Row("fake tensors", fakes, eagerly()),
    Row("FLOP counter", flops, eagerly(), "forward and backward"),
    Row("profiler", profiled, eagerly(), "`esper::<name>`, `esper::<name>.backward`"),
    Row("tensor subclass that is no other layout", subclass, eagerly()),
    Row("DTensor", distributed_tensor, eagerly("E0818"), "pass `tensor.to_local()`"),
    Row("varlen: nested tensor", nested, eagerly("E0818")),
    Row("`torch.func.grad`", func, eagerly("E0817"), "`runtime.twin(id)` there"),
    Row("`torch.func.grad`, compiled", func_inside, {COMPILED: "E0817"}),
    Row("`torch.func.vmap`", mapped, eagerly("E0817")),
    Row("`torch.func.jvp`", forward_mode, eagerly("E0817")),
    Row("forward-mode AD", dual, eagerly("E0817")),
    Row("sparse tensor", sparse, eagerly("E0821")),
    Row("no tensor", no_tensor, eagerly("E0818")),
    Row("tensor on another device", elsewhere, eagerly("E0814")),
)
