"""Two processes: DDP and FSDP2 around a block, the ranks' plans compared. `run` gives outcomes by name."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import runtime
from bench.models import MLP
from esper_ir.diagnostics import EsperError
from tests.runtime.matrix.cell import CLOSE, COMPILED, EAGER, WIDTH, WORKS, plain

WORLD, ROWS_EACH = 2, 4


@dataclass
class Ranks:
    rank: int
    device: torch.device
    artifact_id: str
    mode: str

    def layer(self) -> nn.Module:
        """A block between two products, the same on all ranks."""
        torch.manual_seed(0)
        first, last = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        host = nn.Sequential(first, runtime.load(self.artifact_id), last).to(self.device)
        with torch.no_grad():
            for at, p in enumerate(host.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(at)) / 8)
        return host

    def batch(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(WORLD * ROWS_EACH, WIDTH, generator=generator).to(self.device)

    def mine(self) -> Tensor:
        return self.batch()[self.rank * ROWS_EACH : (self.rank + 1) * ROWS_EACH].contiguous()

    def compiled(self, module: nn.Module) -> nn.Module:
        if self.mode == COMPILED:
            module.compile(fullgraph=True, backend="aot_eager")
        return module


def wanted(r: Ranks, host: nn.Module) -> list[Tensor]:
    """Gradients of the whole batch by plain torch in one process."""
    first, block, last = host
    loss = last(plain(first(r.batch()), block)).square().mean()
    return list(torch.autograd.grad(loss, list(host.parameters())))


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _same(r: Ranks, model: nn.Module, want: list[Tensor], block: Any, **close: float) -> None:
    before = block.report()["counters"]["launches"]
    model(r.mine()).square().mean().backward()
    got = [_whole(p.grad) for p in model.parameters()]
    torch.testing.assert_close(got, want, **(close or CLOSE))
    assert block.report()["counters"]["launches"] > before


def ddp(r: Ranks) -> None:
    host = r.layer()
    want, block = wanted(r, host), host[1]
    ids = None if r.device.type == "cpu" else [r.device.index]
    model = DistributedDataParallel(r.compiled(host), device_ids=ids)
    _same(r, model, want, block)


def ddp_accumulated(r: Ranks) -> None:
    host = r.layer()
    want = [2 * g for g in wanted(r, host)]
    model = DistributedDataParallel(r.compiled(host), gradient_as_bucket_view=True, static_graph=False)
    with model.no_sync():
        model(r.mine()).square().mean().backward()
    model(r.mine()).square().mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], want, **CLOSE)


def fsdp(r: Ranks) -> None:
    host = r.layer()
    want, block = wanted(r, host), host[1]
    r.compiled(host)
    fully_shard(host)
    assert any(isinstance(p, DTensor) for p in block.parameters())
    _same(r, host, want, block)
    _same_again(r, host, want)


def _same_again(r: Ranks, host: nn.Module, want: list[Tensor]) -> None:
    """After an optimizer's step on the shards, weights moved as they should."""
    before = [_whole(p).detach().clone() for p in host.parameters()]
    torch.optim.SGD(host.parameters(), 0.1).step()
    moved = [(b - _whole(p).detach()) / 0.1 for b, p in zip(before, host.parameters(), strict=True)]
    torch.testing.assert_close(moved, want, rtol=2e-3, atol=2e-4)


def fsdp_each(r: Ranks) -> None:
    """The block as a unit of its own, resharded after the forward."""
    host = r.layer()
    want, block = wanted(r, host), host[1]
    r.compiled(host[1])
    fully_shard(host[1], reshard_after_forward=True)
    fully_shard(host)
    _same(r, host, want, block)


def fsdp_checkpointed(r: Ranks) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    host = r.layer()
    want, block = wanted(r, host), host[1]
    host[1] = Checkpointed(block)
    fully_shard(host[1])
    fully_shard(host)
    _same(r, host, want, block)


def fsdp_mixed(r: Ranks) -> None:
    """A policy that casts parameters to bfloat16 gives a float32 block what it refuses."""
    host = r.layer()
    fully_shard(host, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    host(r.mine())


def _swapped(r: Ranks) -> tuple[nn.Module, list[Tensor]]:
    """A plain host with the artifact in the place of its MLP; the gradients that are wanted."""
    host = r.layer()
    mlp = MLP(WIDTH, host[1].gate.weight.shape[0], torch.float32).to(r.device)
    mlp.load_state_dict(host[1].state_dict())
    host[1] = mlp
    want = wanted(r, host)
    runtime.swap(host, {"1": r.artifact_id})
    return host, want


def swapped_ddp(r: Ranks) -> None:
    host, want = _swapped(r)
    model = DistributedDataParallel(r.compiled(host))
    model(r.mine()).square().mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], want, **CLOSE)
    assert runtime.swapped(host)["1"]["counters"]["launches"]


def swapped_fsdp(r: Ranks) -> None:
    host, want = _swapped(r)
    r.compiled(host[1])
    fully_shard(host[1])
    fully_shard(host)
    host(r.mine()).square().mean().backward()
    torch.testing.assert_close([_whole(p.grad) for p in host.parameters()], want, **CLOSE)
    _same_again(r, host, want)


def digests(r: Ranks) -> None:
    block = runtime.load(r.artifact_id)
    assert runtime.same_on_all_ranks(block) == block.plan_digest()


def other_digests(r: Ranks) -> None:
    block = runtime.load(r.artifact_id)
    if r.rank:
        block.program.code.versions = {"cublas": "0.0.1"}
    try:
        runtime.same_on_all_ranks(block)
    finally:
        block.program.code.versions = {}


@dataclass(frozen=True)
class Shared:
    """A row of the table that needs two processes."""

    feature: str
    check: Callable[[Ranks], None]
    says: dict[str, str]
    note: str = ""


BOTH = {EAGER: WORKS, COMPILED: WORKS}
ONLY = {EAGER: WORKS}
ROWS = (
    Shared("DDP", ddp, BOTH),
    Shared("DDP, accumulating with `no_sync`", ddp_accumulated, BOTH),
    Shared("FSDP2, the host as one unit", fsdp, BOTH, "weights are gathered before the block sees them"),
    Shared("FSDP2, the block as a unit", fsdp_each, BOTH),
    Shared("FSDP2 with checkpoint", fsdp_checkpointed, ONLY),
    Shared("FSDP2, policy of another dtype", fsdp_mixed, {EAGER: "E0811"}, "compile the blueprint for it"),
    Shared("DDP, a module that `runtime.swap` replaced", swapped_ddp, BOTH),
    Shared(
        "FSDP2, a module that `runtime.swap` replaced", swapped_fsdp, BOTH, "replaced first, then sharded"
    ),
    Shared("the same plans on all ranks", digests, ONLY, "`runtime.same_on_all_ranks`"),
    Shared("other plans on a rank", other_digests, {EAGER: "E0840"}),
)


def applicable(kind: str, cards: int) -> list[Shared]:
    """All rows, but for two ranks on one card: NCCL wants a card each, and gloo gathers no shards there."""
    alone = kind == "cuda" and cards < WORLD
    return [row for row in ROWS if not (alone and row.feature.startswith("FSDP2"))]


def outcome(row: Shared, ranks: Ranks) -> str:
    """ "works", a code, or the traceback."""
    try:
        row.check(ranks)
    except EsperError as error:
        return error.code
    except Exception:
        return traceback.format_exc(limit=-6)
    return WORKS


def worker(rank: int, kind: str, artifact_id: str, folder: str, cards: int) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank % cards)
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" and cards >= WORLD else "gloo"
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=WORLD)
    found = {}
    for row in applicable(kind, cards):
        for mode in row.says:
            torch.compiler.reset()
            found[f"{row.feature} / {mode}"] = outcome(row, Ranks(rank, device, artifact_id, mode))
            dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run(kind: str, artifact_id: str, folder: Path, cards: int = 0) -> list[dict[str, str]]:
    """Outcomes of all rows on both ranks."""
    context = multiprocessing.get_context("spawn")
    places = (kind, artifact_id, str(folder), cards)
    processes = [context.Process(target=worker, args=(rank, *places)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        if process.is_alive():
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
