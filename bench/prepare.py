"""Compiles what the benches run into a library, here for a card elsewhere or for this machine.

    python -m bench.prepare out/card --target h100

makes out/card/library and out/card/trust (keys of its own), out/card/compiled.json with what each
compilation took, and out/card.tar of all three, which keeps the file modes that the library insists on.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.blocks import Block, available
from bench.results import commit
from bench.training import MODELS, model_blueprints
from esper_ir import canonical, text
from forge.explain import group_flops
from forge.lower import PhaseLowering
from forge.lowered import Call
from forge.pass_manager import run
from forge.pipelines import FAST, Pipeline, Step
from forge.service import CompileResult, compile_file
from forge.target import resolve
from forge.work import Work
from library.store import Library

HERE = Path(__file__).resolve().parent
HOST_BLOCK = HERE / "blueprints" / "host_block.json"
HOST_STEPS = 3
REPEATED = "host_block_3"
UNBUILT = replace(FAST, steps=tuple(s for s in FAST.steps if s[0] not in ("build", "package")))


def repeat_last(work: Work) -> Work:
    """The last step of every training plan again until the plan has `HOST_STEPS`: a block of that many
    launches with a known meaning, since the step writes the same values again. Inference stays as it is.
    """
    return replace(work, lowerings=tuple(_repeated(low) for low in work.lowerings))


def _repeated(low: PhaseLowering) -> PhaseLowering:
    steps = low.plan.steps
    if low.plan.phase == "inference" or len(steps) >= HOST_STEPS:
        return low
    again = (*steps, *[steps[-1]] * (HOST_STEPS - len(steps)))
    return replace(low, plan=replace(low.plan, steps=again))


def repeating() -> Pipeline:
    steps: list[Step] = []
    for step in FAST.steps:
        steps.append(step)
        if step[0] == "plan":
            steps.append(("repeat", repeat_last))
    return Pipeline(FAST.name, FAST.summary, tuple(steps))


def compile_repeated(target: str, library: Library) -> str:
    """The host block with three launches forward and three backward; its artifact id."""
    blueprint = replace(
        text.load(HOST_BLOCK), name=REPEATED, metadata={"description": "three launches each way"}
    )
    work = run(repeating(), Work(blueprint, resolve(target), FAST.name))
    library.put_blueprint(canonical.blueprint_id(blueprint), text.render(blueprint).encode(), blueprint.name)
    return library.put_artifact(work.container).id


def compile_models(which: str, target: str, library: Library) -> dict[str, dict[str, Any]]:
    """What `runtime.swap` puts into the whole models; one artifact may stand for several modules."""
    made: dict[str, dict[str, Any]] = {}
    modules: dict[str, list[str]] = {}  # the same blueprint stands for several
    for key, blueprint in model_blueprints(which).items():
        modules.setdefault(json.dumps(blueprint), []).append(key)
    with tempfile.TemporaryDirectory(prefix="esper-models-") as folder:
        for at, (document, keys) in enumerate(modules.items()):
            path = Path(folder, f"{at}.json")
            path.write_text(document, encoding="utf-8")
            for found in compile_file(path, targets=(target,), library=library):
                name = json.loads(document)["name"]
                made[found.artifact_id] = {**_facts(name, found), "modules": keys}
                click.echo(f"{name}: {found.artifact_id} {found.seconds['total']:.1f} s", err=True)
    return made


def compile_all(
    target: str, library: Library, only: Sequence[str] = (), models: str = ""
) -> dict[str, dict[str, Any]]:
    """Every block that has a blueprint, the two host blocks and those of `models` ("large", "small", none);
    seconds of each by artifact id."""
    made: dict[str, dict[str, Any]] = {}
    blocks = {block.blueprint: block for block in available(tuple(only))}
    for path in [*blocks, HOST_BLOCK]:
        for found in compile_file(path, targets=(target,), library=library):
            made[found.artifact_id] = _facts(path.stem, found)
            if path in blocks:
                made[found.artifact_id] |= _of_block(blocks[path], path, target)
            click.echo(f"{path.stem}: {found.artifact_id} {found.seconds['total']:.1f} s", err=True)
    if models:
        made |= compile_models(models, target, library)
    repeated = compile_repeated(target, library)
    made[repeated] = {"block": REPEATED}
    click.echo(f"{REPEATED}: {repeated}", err=True)
    return made


def kernel_flops(path: Path, target: str, block: Block) -> dict[str, dict[str, int]]:
    """{size: {"phase group": operations}} of the groups that multiply in a kernel of ours."""
    work = run(UNBUILT, Work(text.load(path), resolve(target), FAST.name))
    found: dict[str, dict[str, int]] = {}
    for sizes in block.sizes:
        groups: Counter[str] = Counter()
        rows = [(low, *row) for low in work.lowerings for row in low.lowered]
        for low, group, made in rows:
            if not any(isinstance(step, Call) for step in made.steps):
                # Of several launches with a group's name the one that multiplies.
                flops = group_flops(low.parts.graph, group, sizes)
                groups |= Counter({f"{low.phase.name} {group.name}": flops})
        found[block.size_label(sizes)] = dict(groups)
    return found


def _of_block(block: Block, path: Path, target: str) -> dict[str, Any]:
    """What the waterfall and the order of proofs ask for. `leaf_bytes` at the smallest size: what proving
    cannot make smaller."""
    least = min(sum(leaf.nbytes(sizes) for leaf in block.leaves) for sizes in block.sizes)
    return {"flops": kernel_flops(path, target, block), "leaf_bytes": least}


def _facts(name: str, found: CompileResult) -> dict[str, Any]:
    return {
        "block": name,
        "total": found.seconds["total"],
        "kernels": found.kernels,
        "bytes": found.size_bytes,
    }


def pack(folder: Path) -> Path:
    """A tar beside the folder; an unpacked copy anywhere is the same library."""
    out = folder.with_suffix(".tar")
    with tarfile.open(out, "w") as tar:
        tar.add(folder, arcname=folder.name)
    return out


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--target", default="h100", show_default=True)
@click.option("--only", multiple=True, help="Words in the names of blocks; the host blocks always.")
@click.option(
    "--models", type=click.Choice(tuple(MODELS)), default="large", help="Of what size; default large."
)
def main(folder: Path, target: str, only: tuple[str, ...], models: str) -> None:
    """Compile the blocks for TARGET into FOLDER/library and pack it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with Library.open(folder / "library", trust=folder / "trust", roles=("compiler",)) as library:
        made = compile_all(target, library, only, models)
    (folder / "compiled.json").write_text(json.dumps(made, indent=1), encoding="utf-8")
    head, dirty = commit()
    (folder / "commit").write_text(f"{head} {int(dirty)}\n", encoding="utf-8")
    place = pack(folder)
    click.echo(f"{place}: {place.stat().st_size >> 10} KiB", err=True)


if __name__ == "__main__":
    main()
