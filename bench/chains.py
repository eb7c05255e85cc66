"""Chains of memory-bound operators as torch modules, imported: forward beside eager and torch.compile.

    python -m bench.chains --make out/chains --target h100     (anywhere: imports and compiles)
    python -m bench.chains --from out/chains --out out/chains   (there: checks against eager, times; minutes)

Of the kinds that collections of kernel problems ask for, in float32, at sizes of which several fit a card.
Nothing is tuned by hand. Peers compile side by side in processes of their own, into one cache; then one
process times everything, forward without gradients.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import runtime
from bench import measure, results
from bench.crew import say
from bench.peers import COMPILE, OURS, compile_options
from bench.results import figure
from esper_ir.importers.torch_export import from_torch
from forge.service import compile_blueprint
from library.store import Library

MEBI = 1 << 20
SMALLER = 64  # of the elements, with --tiny
LEVEL = 0.01  # behind by less
EAGER = "eager"
COMPILED_S = 60.0  # of one peer


@dataclass(frozen=True)
class Chain:
    """`make`: module or function; `shapes` of its float32 operands, normal, or uniform and from `low` on."""

    name: str
    make: Callable[[], Callable[..., Tensor]]
    shapes: tuple[tuple[int, ...], ...]
    low: float | None = None

    def operands(self, device: torch.device, tiny: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        shapes = [_tiny(s) if tiny else s for s in self.shapes]
        make = torch.randn if self.low is None else torch.rand
        return tuple(make(s, device=device) + (self.low or 0.0) for s in shapes)

    def module(self, device: torch.device) -> nn.Module:
        torch.manual_seed(1)
        made = self.make()
        module = made if isinstance(made, nn.Module) else _Called(made)
        return module.to(device).eval().requires_grad_(False)


class _Called(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.function(x, *more)


def _tiny(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same axes, the first one shorter."""
    return (max(shape[0] // SMALLER, 1), *shape[1:])


def _does(function: Callable[..., Tensor]) -> Callable[[], Callable[..., Tensor]]:
    return lambda: function


def _rms_over_channels(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()


def _exclusive_sum(x: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(x[:, :1]), x.cumsum(1)[:, :-1]), 1)


def _tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x.pow(3))))


def _hinge(prediction: Tensor, target: Tensor) -> Tensor:
    return torch.clamp(1.0 - prediction * target, min=0.0).mean()


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    return F.kl_div(p.softmax(-1).log(), q.softmax(-1), reduction="batchmean")


FLAT, IMAGE, LONG = (4096, 32768), (32, 64, 256, 256), (8192, 16384)
CHAINS = (
    Chain("scaled_columns", _does(lambda a, b: a[:, None] * b), ((8192,), (8192, 8192))),
    *(Chain(name, _does(fn), (FLAT,)) for name, fn in (
        ("leaky_relu", F.leaky_relu), ("tanh", torch.tanh), ("gelu", F.gelu), ("silu", F.silu),
        ("hardsigmoid", F.hardsigmoid), ("hardtanh", F.hardtanh), ("softplus", F.softplus),
        ("softsign", lambda x: x / (1 + x.abs())), ("mish", F.mish),
        ("softmax", lambda x: x.softmax(-1)), ("log_softmax", lambda x: x.log_softmax(-1)),
        ("logsumexp", lambda x: x.logsumexp(-1)), ("l1_norm", lambda x: x / x.abs().mean(1, keepdim=True)),
        ("l2_norm", lambda x: x / x.norm(dim=1, keepdim=True)),
        ("frobenius_norm", lambda x: x / x.norm()),
    )),
    Chain("tanh_gelu", _does(_tanh_gelu), ((8192, 8192),)),
    Chain("instance_norm", lambda: nn.InstanceNorm2d(64), (IMAGE,)),
    Chain("rms_over_channels", _does(_rms_over_channels), (IMAGE,)),
    Chain("layer_norm", lambda: nn.LayerNorm((64, 256, 256)), ((16, 64, 256, 256),)),
    Chain("group_norm", lambda: nn.GroupNorm(8, 64), (IMAGE,)),
    Chain("batch_norm", lambda: nn.BatchNorm2d(64), (IMAGE,)),
    *(Chain(name, _does(fn), ((64, 1024, 4095),)) for name, fn in (
        ("mean_rows", lambda x: x.mean(1)), ("sum_rows", lambda x: x.sum(1, keepdim=True)),
        ("max_rows", lambda x: x.amax(1)), ("argmin_rows", lambda x: x.argmin(1)),
    )),
    Chain("cumprod", _does(lambda x: x.cumprod(1)), (LONG,), 0.5),
    Chain("cumsum", _does(lambda x: x.cumsum(1)), (LONG,)),
    Chain("exclusive_sum", _does(_exclusive_sum), (LONG,)),
    Chain("reverse_sum", _does(lambda x: x.flip(1).cumsum(1).flip(1)), (LONG,)),
    *(Chain(name, _does(fn), (LONG, LONG)) for name, fn in (
        ("mse", lambda a, b: (a - b).pow(2).mean()), ("smooth_l1", F.smooth_l1_loss),
        ("huber", F.huber_loss), ("hinge", _hinge), ("kl_div", _divergence),
        ("cosine", lambda a, b: (1 - F.cosine_similarity(a, b, dim=1)).mean()),
    )),
    Chain("max_pool2d", lambda: nn.MaxPool2d(4, 1, 1), (IMAGE,)),
    Chain("avg_pool1d", lambda: nn.AvgPool1d(8, 1, 4), ((64, 128, 16384),)),
    Chain("clamp_softmax_scale", _does(lambda x: x.clamp(-1, 1).softmax(1) * 2), (IMAGE,)),
    Chain("norm_residual_gelu", lambda: _Residual(nn.LayerNorm(4096), F.gelu), ((8192, 4096),)),
    Chain("swish_norm", lambda: nn.Sequential(nn.SiLU(), nn.GroupNorm(16, 4096)), ((8192, 4096),)),
)  # fmt: skip


class _Residual(nn.Module):
    def __init__(self, norm: nn.Module, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.norm(x))


def named(words: tuple[str, ...]) -> list[Chain]:
    return [c for c in CHAINS if not words or any(w in c.name for w in words)]


# -- compiling


def make(folder: Path, target: str, chains: list[Chain], tiny: bool) -> dict[str, Any]:
    """Import and compile each; `chains.json` in the folder says which artifact is whose, or what failed."""
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Any] = {"tiny": tiny, "target": target, "chains": {}}
    places: dict[str, Any] = {"trust": folder / "trust", "roles": ("compiler",)}
    with Library.open(folder / "library", **places) as library:
        for chain in chains:
            began, device = time.monotonic(), torch.device("cpu")
            try:
                blueprint = from_torch(chain.module(device), chain.operands(device, tiny), name=chain.name)
                (found,) = compile_blueprint(blueprint, targets=(target,), library=library)
                row = {"artifact": found.artifact_id, "compile_s": time.monotonic() - began}
            except Exception as error:
                row = {"why": f"{type(error).__name__}: {error}"[:500]}
            made["chains"][chain.name] = row
            say(f"{chain.name}: {row.get('artifact', row.get('why'))}")
    (folder / "chains.json").write_text(json.dumps(made, indent=1))
    return made


# -- timing


def prepare(chains: list[Chain], tiny: bool) -> None:
    """In a process of its own: torch.compile of each, so that its cache has them."""
    device = results.device_here()
    for chain in chains:
        try:
            with torch.no_grad():
                _compiled(chain, device)(*chain.operands(device, tiny))
        except Exception as error:
            say(f"{chain.name}: its peer does not compile: {type(error).__name__}: {error}"[:300])


def _compiled(chain: Chain, device: torch.device) -> Any:
    torch._dynamo.reset()
    return torch.compile(chain.module(device), dynamic=False, **compile_options(COMPILE))


def _warmed(chains: list[Chain], tiny: bool, jobs: int) -> None:
    """A process for every share, each with one thread of Inductor: a start outlasts a compilation."""

    def some(share: list[Chain]) -> None:
        words = [sys.executable, "-m", "bench.chains", "--prepare", *(["--tiny"] if tiny else [])]
        words += [w for c in share for w in ("--only", f"={c.name}")]
        alone = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        try:
            subprocess.run(words, timeout=COMPILED_S * (1 + len(share)), check=False, env=alone)
        except subprocess.TimeoutExpired:
            say(f"{', '.join(c.name for c in share)}: their peers are not all compiled in time")

    began, shares = time.monotonic(), [s for n in range(jobs) if (s := chains[n::jobs])]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(some, shares))
    say(f"peers compiled in {time.monotonic() - began:.0f} s")


def timed(chain: Chain, made: Mapping[str, Any], library: Library, tiny: bool) -> dict[str, Any]:
    """A row: milliseconds by implementation, and whether ours is right; or why there are none."""
    row = {"chain": chain.name, "shapes": [list(s) for s in chain.shapes], "tiny": tiny, **made}
    if "artifact" not in made:
        return {**row, "correct": False}
    try:
        row |= _compared(chain, made["artifact"], library, tiny)
    except Exception as error:
        row |= {"correct": False, "why": f"{type(error).__name__}: {error}"[:500]}
    say(f"{chain.name}: " + (row.get("why") or f"right: {row['correct']}, {row['ms']}"))
    return row


def _compared(chain: Chain, artifact: str, library: Library, tiny: bool) -> dict[str, Any]:
    device = results.device_here()
    module, given = chain.module(device), chain.operands(device, tiny)
    ours = runtime.load(artifact, library=library, allow_unvalidated=True).to(device)
    # Counters of batches stay behind: nothing reads them.
    missing, _ = ours.load_state_dict(module.state_dict(), strict=False)
    assert not missing, missing
    with torch.no_grad():
        peer = _compiled(chain, device)
        calls = {EAGER: lambda: module(*given), OURS: lambda: ours(*given), COMPILE: lambda: peer(*given)}
        wide = chain.module(device).double()(*(g.double() for g in given))
        right = _right(calls[OURS](), calls[EAGER](), wide)
        del wide
        times = measure.measured(calls, measure.Effort(5, 5), device, "f")
    rows = {name: times.row(name) for name in calls}
    kind = "dev_ms" if device.type == "cuda" else "wall_ms"
    return {"correct": right, "ms": {n: r[kind] for n, r in rows.items()}, "rows": rows}


def _right(found: Tensor, plain: Tensor, wide: Tensor) -> bool:
    """No farther from float64 than twice eager and four roundings of the largest value; numbers exactly."""
    if not found.is_floating_point():
        return bool((found == plain).all())
    scale = float(wide.abs().max()) * torch.finfo(torch.float32).eps
    return bool((found - wide).abs().max() <= 2 * (plain - wide).abs().max() + 4 * scale)


def figures(rows: list[dict[str, Any]], asked: int) -> dict[str, Any]:
    """How many are right, and ahead of eager and of torch.compile (ahead: at most its time). Those behind by
    less than one in a hundred are counted as behind, and named: where a chain is one read and one write, all
    stand at the rate of the memory."""
    known = [r for r in rows if r.get("ms") and all(r["ms"].values())]
    found = {"correct": figure(sum(r["correct"] for r in rows), "chains", asked, at_least=True)}
    for peer, target in ((EAGER, 0.9), (COMPILE, 0.6)):
        times = {r["chain"]: r["ms"][OURS] / r["ms"][peer] for r in known if r["correct"]}
        ahead = [name for name, share in times.items() if share <= 1.0]
        level = [name for name, share in times.items() if 1.0 < share <= 1.0 + LEVEL]
        share = len(ahead) / asked if asked else None
        behind = [r["chain"] for r in rows if r["chain"] not in (*ahead, *level)]
        found[f"ahead_of_{peer}"] = figure(share, "ratio", target, at_least=True, behind=behind, level=level)
        found[f"level_with_{peer}"] = figure(len(level), "chains")
    return found


def written(
    chains: list[Chain], made: Mapping[str, Any], library: Library, tiny: bool, end: float, out: Path
) -> Path:
    """The results file, with a row for every chain that was begun before the time was over; written anew
    with each, so that a run that is stopped leaves what it has."""
    document = {**results.header("chains"), "rows": [], "figures": figures([], len(chains))}
    place = results.write(document, out)
    for chain in chains:
        if time.monotonic() > end:
            say(f"{chain.name}: not begun, the time is over")
            continue
        document["rows"].append(timed(chain, made[chain.name], library, tiny))
        document["figures"] = figures(document["rows"], len(chains))
        place = results.write(document, out)
    return place


@click.command()
@click.option("--only", multiple=True, help="Words in the names of chains; =name for one alone.")
@click.option("--make", "make_", type=click.Path(path_type=Path), help="Compile into this folder.")
@click.option("--from", "from_", type=click.Path(path_type=Path), help="Time what is in this folder.")
@click.option("--target", default="auto", show_default=True)
@click.option("--jobs", default=12, show_default=True, help="Processes that compile peers.")
@click.option("--seconds", default=3600.0, show_default=True, help="With --from: of all of it.")
@click.option("--tiny", is_flag=True, help=f"A {SMALLER}th of the elements: whether it runs.")
@click.option("--prepare", "prepare_", is_flag=True, hidden=True)
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
def main(
    only: tuple[str, ...], make_: Path | None, from_: Path | None, target: str, jobs: int,
    seconds: float, tiny: bool, prepare_: bool, out: Path,
) -> None:  # fmt: skip
    """Compile, or time and write the results file; both where neither is asked for."""
    end = time.monotonic() + seconds
    exact = {w[1:] for w in only if w.startswith("=")}
    chains = [c for c in CHAINS if c.name in exact] if exact else named(only)
    if prepare_:
        prepare(chains, tiny)
        return
    with tempfile.TemporaryDirectory(prefix="esper-chains-") as place:
        folder = make_ or from_ or Path(place)
        if from_ is None:
            make(folder, target, chains, tiny)
        if make_ is not None:
            return
        made = json.loads((folder / "chains.json").read_text())
        tiny, chains = made["tiny"], [c for c in chains if c.name in made["chains"]]
        _warmed(chains, tiny, jobs)
        with Library.open(folder / "library", trust=folder / "trust", roles=()) as library:
            say(f"written: {written(chains, made['chains'], library, tiny, end, out)}")


if __name__ == "__main__":
    main()
