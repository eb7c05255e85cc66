"""`esper-forge show --svg`: every node once, in its kernel's colour, and what each kernel costs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

import esper_ir.text as text
from esper_ir.diagnostics import EXIT_FAILURE
from forge.cli import main
from forge.explain import explain
from forge.picture import svg
from forge.service import front

EXAMPLES = Path(__file__).parents[2] / "examples"
SPACE = "{http://www.w3.org/2000/svg}"


def drawn(root: ElementTree.Element) -> list[tuple[str, str, str, str]]:
    """(node, group, colour, class) of every box of a node, in the order of drawing."""
    out = []
    for box in root.iter(f"{SPACE}g"):
        note, rect = box.findtext(f"{SPACE}title") or "", box.find(f"{SPACE}rect")
        assert rect is not None
        if "; in " in note:
            node, group = note.split(" = ")[0], note.rsplit("; in ", 1)[1]
            out.append((node, group, str(rect.get("fill")), str(rect.get("class"))))
    return out


@pytest.mark.parametrize("name", ["squeeze_excite", "linear_gelu", "digits_block"])
def test_every_node_stands_once_in_the_colour_of_its_kernel(name: str) -> None:
    work = front(text.load(EXAMPLES / f"{name}.json"), "h100")
    root, made = ElementTree.fromstring(svg(work)), explain(work)
    phases = {(p["phase"], *p["wanted"]): p for p in made["phases"]}
    back = max((p for p in phases.values() if p["phase"] == "backward"), key=lambda p: len(p["wanted"]))
    shown = [phases["forward",], back]
    wanted = Counter(n.split(": ")[0] for p in shown for g in p["groups"] for n in g["nodes"])
    boxes = drawn(root)
    assert Counter(node for node, *_ in boxes) == wanted
    for phase in shown:
        count = sum(len(g["nodes"]) for g in phase["groups"])
        part, boxes = boxes[:count], boxes[count:]
        colours = {group: colour for _, group, colour, _ in part}
        assert all(colours[group] == colour for _, group, colour, _ in part)
        assert len(set(colours.values())) == len(phase["groups"]), "no two kernels look alike"
        called = {g["group"] for g in phase["groups"] if g["externs"]}
        assert {group for _, group, _, kind in part if "call" in kind} == called
    words = [t.text or "" for t in root.iter(f"{SPACE}text")]
    groups = [g for p in shown for g in p["groups"]]
    assert abs(sum(int(w[:-1]) for w in words if w.endswith("%")) - 200) <= len(groups)
    assert all(any(w.startswith(f"{g['group']}: "[:43]) for w in words) for g in groups)


def test_convolutions_have_their_operations_and_a_processor_estimates() -> None:
    root = ElementTree.fromstring(svg(front(text.load(EXAMPLES / "conv_res.json"), "cpu")))
    words = [t.text or "" for t in root.iter(f"{SPACE}text")]
    assert any(w.endswith(" G") for w in words), "the convolution's cell"
    assert "estimate us" in words and not any("floor" in w for w in words)


def test_the_command_writes_it_and_says_where_it_cannot(tmp_path: Path) -> None:
    path, source = tmp_path / "block.svg", str(EXAMPLES / "digits_block.json")
    made = CliRunner().invoke(main, ["show", source, "--svg", str(path), "--target", "cpu", "--json"])
    assert made.exit_code == 0 and json.loads(made.stdout)["schema"] == "esper-show/1"
    assert "digits_block for cpu" in path.read_text(encoding="utf-8")
    for bad in (tmp_path, tmp_path / "none" / "block.svg"):
        refused = CliRunner().invoke(main, ["show", source, "--svg", str(bad), "--target", "cpu"])
        assert refused.exit_code == EXIT_FAILURE and "E0551" in refused.stderr


def test_without_gradients_it_is_the_inference_that_is_drawn(tmp_path: Path) -> None:
    blueprint = {
        "format": "esper-blueprint/1",
        "name": "plain",
        "inputs": {"x": {"dtype": "int64", "shape": [8]}},
        "nodes": [{"id": "y", "op": "add", "inputs": ["x", "x"]}],
        "outputs": ["y"],
    }
    path = tmp_path / "plain.json"
    path.write_text(json.dumps(blueprint))
    root = ElementTree.fromstring(svg(front(text.load(path), "h100")))
    assert any((t.text or "").startswith("inference: floor") for t in root.iter(f"{SPACE}text"))
    assert [node for node, *_ in drawn(root)] == ["y"]
