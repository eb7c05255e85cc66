"""`esper-forge import`, `diff` and `show` on a user's file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from esper_ir.diagnostics import EXIT_NOT_FOUND, EXIT_USAGE, EsperError
from esper_ir.eager import to_torch
from esper_ir.safetensors import load_file, read_tensor
from esper_ir.text import load
from forge.cli import main

SOURCE = """
import torch
from torch import nn
from helper_of_model import half

class Gate(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.norm = nn.Linear(width, 2 * width), nn.BatchNorm1d(width)

    def forward(self, x, mask=None):
        a, b = self.up(self.norm(x)).chunk(2, -1)
        return half(a) * b if mask is None else torch.where(mask, a, b)

class Bad(nn.Module):
    def forward(self, x):
        y = torch.erfinv(x)
        return y + torch.lgamma(x)

def function(x, y):
    return x @ y

class Broken(nn.Module):
    def __init__(self):
        raise ValueError("no width")

text = "no module"
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(SOURCE)
    (tmp_path / "helper_of_model.py").write_text("def half(x):\n    return x / 2\n")
    return tmp_path / "model.py"


def forge(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_a_class_becomes_a_file_with_its_values(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "bp.json"
    done = forge("import", f"{model}:Gate", "--input", "float32[8,4]", "--set", "width=4", "--dynamic",
          "x:0=rows:1:64",
                 "--eval", "-o", out, "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["schema"] == "esper-import/1" and told["imported"]["mode"] == "eval"
    assert [Path(f).name for f in told["files"]] == ["bp.json", "bp.safetensors"]
    blueprint = load(out)
    assert blueprint.name == "Gate" and blueprint.dims["rows"].max == 64
    twin = to_torch(blueprint)
    values = load_file(out.with_suffix(".safetensors"))
    twin.load_state_dict(values)
    data = out.with_suffix(".safetensors").read_bytes()
    assert all(torch.equal(read_tensor(data, name), value) for name, value in values.items())
    torch.manual_seed(0)
    up = torch.nn.Linear(4, 8)
    assert torch.equal(twin.get_parameter("up.weight"), up.weight)
    plain = forge("import", f"{model}:Gate", "--input", "float32[8,8]", "--eval", "-o", out)
    call = plain.stderr.split("values: ")[1].strip()
    module = to_torch(load(out))
    exec(call, {"module": module})
    assert module.get_parameter("up.weight").shape == (16, 8)
    with pytest.raises(EsperError) as error:
        load_file(tmp_path / "absent.safetensors")
    assert error.value.code == "E0113"


def test_what_training_writes(model: Path) -> None:
    done = forge("import", f"{model}:Gate", "--input", "float32[8,8]", "--dynamic", 0)
    assert done.exit_code == 0 and "norm.num_batches_tracked is written in training" in done.stderr
    assert set(json.loads(done.stdout)["updates"]) == {"norm.running_mean", "norm.running_var"}
    done = forge("import", f"{model}:Gate", "--input", "float32[8,8]", "--no-updates", "--json")
    assert len(json.loads(done.stdout)["imported"]["left_out"]) == 3


def test_functions_and_keyword_inputs(model: Path) -> None:
    done = forge("import", f"{model}:function", "--input", "float32[3,4]", "--input", "float32[4,5]")
    assert done.exit_code == 0 and json.loads(done.stdout)["nodes"][0]["op"] == "matmul"
    done = forge("import", f"{model}:Gate", "--input", "float32[3,8]", "--input", "mask=bool[3,8]")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["inputs"]["mask"]["dtype"] == "bool"


def test_everything_unsupported_is_told_with_its_line(model: Path) -> None:
    done = forge("import", f"{model}:Bad", "--input", "float32[8,8]", "--json")
    assert done.exit_code == 1
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "E0406" and len(error["diagnostics"]) == 2
    shown = [d["context"] for d in error["diagnostics"]]
    assert "y = torch.erfinv(x)" in shown[0] and "torch.lgamma(x)" in shown[1]
    assert all("model.py:" in text for text in shown)


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [
        (("{}:Gate", "--input", "float32[8,7]"), "E0405", 1),
        (("{}:Gate", "--input", "float33[8,8]"), "E0103", 1),
        (("{}:Gate", "--input", "8,8"), "E0517", EXIT_USAGE),
        (("{}:Gate", "--input", "float32[8,8]", "--set", "width"), "E0517", EXIT_USAGE),
        (("{}:Gate", "--input", "float32[8,8]", "--set", "height=3"), "E0516", 1),
        (("{}:Gate", "--input", "float32[8,8]", "--dynamic", "y:0"), "E0407", 1),
        (("{}:Gate", "--input", "float32[8,8]", "--dynamic", "first"), "E0407", 1),
        (("{}:Gate", "--input", "float32[8,8]", "--dynamic", "5"), "E0407", 1),
        (("{}:Broken", "--input", "float32[8,8]"), "E0516", 1),
        (("{}:Missing",), "E0516", EXIT_NOT_FOUND),
        (("{}:text",), "E0516", 1),
        (("{}x:Gate",), "E0516", EXIT_NOT_FOUND),
        (("{}",), "E0516", EXIT_USAGE),
    ],
)
def test_refusals_have_names(model: Path, arguments: tuple[str, ...], code: str, exit_code: int) -> None:
    done = forge("import", *(a.format(model) for a in arguments))
    assert (done.exit_code, done.stderr[:5]) == (exit_code, code), done.stderr


def test_diff_and_show(model: Path, tmp_path: Path) -> None:
    for name, extra in (("a", ()), ("b", ("--eval",))):
        forge("import", f"{model}:Gate", "--input", "float32[8,8]", "-o", tmp_path / f"{name}.json", *extra)
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    assert forge("diff", a, a).exit_code == 0
    done = forge("diff", a, b, "--json")
    rows = json.loads(done.stdout)["differences"]
    assert done.exit_code == 1 and ("node", "batch_norm") in {(r["what"], r["name"]) for r in rows}
    shown = forge("show", a)
    assert "linear(batch_norm, up.weight, up.bias" in shown.stdout and "FLOP" in shown.stdout
