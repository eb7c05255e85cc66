"""What an import promises beside equal values: names, sizes that vary, precision, refusals with lines."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper_ir.canonical import blueprint_id
from esper_ir.diagnostics import EsperError
from esper_ir.eager import to_torch
from esper_ir.importers.torch_dims import from_options
from esper_ir.importers.torch_export import RULES, from_torch
from esper_ir.importers.torch_values import save
from esper_ir.reference import evaluate
from esper_ir.safetensors import read_tensor
from esper_ir.text import load
from esper_ir.types import DimSpec
from esper_ir.verify import typed
from tests.esper_ir.networks import Frozen, ResNet
from tests.esper_ir.test_import_torch import inputs, same
from tests.pace import slowness
from tests.source import ROOT


def refusal(module: Any, given: Any, **more: Any) -> EsperError:
    with pytest.raises(EsperError) as caught:
        from_torch(module, given, **more)
    return caught.value


# Names and values.


def test_a_shared_parameter_is_one_leaf() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    blueprint = from_torch(module, torch.randn(3, 4), dynamic=0)
    assert [v.name for v in blueprint.of_kind("param")] == ["0.weight", "0.bias", "2.bias"]
    same(module, blueprint, inputs([(3, 4)]))


def test_values_are_those_at_import_and_survive_the_file(tmp_path: Path) -> None:
    module = ResNet().eval()
    blueprint = from_torch(module, torch.randn(2, 3, 20, 18), dynamic=0)
    before = {n: v.clone() for n, v in module.state_dict().items()}
    with torch.no_grad():
        module.fc.weight.zero_()
    files = save(blueprint, tmp_path / "net.json")
    twin = to_torch(load(files[0]))
    data = files[1].read_bytes()
    twin.load_state_dict({n: read_tensor(data, n) for n in twin.state_dict()})
    for name, value in twin.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert blueprint.values.keys() == twin.state_dict().keys()


def test_initialisers_are_those_of_the_layers() -> None:
    module = nn.Sequential(nn.Linear(16, 4), nn.LayerNorm(4), nn.Conv1d(3, 5, 3))
    module[2].extra = nn.Parameter(torch.full((2, 1), 0.25))

    def forward(x: Tensor) -> Tensor:
        return module[2](module[1](module[0](x))) * module[2].extra.sum()

    module.forward = forward
    init = {v.name: dict(v.init or {}) for v in from_torch(module, torch.randn(2, 3, 16)).of_kind("param")}
    assert init["0.weight"] == {"kind": "kaiming_uniform"} and init["1.weight"] == {"kind": "ones"}
    assert init["0.bias"] == {"kind": "uniform", "low": -0.25, "high": 0.25}
    assert init["2.bias"]["high"] == pytest.approx(1 / 3) and init["2.extra"]["value"] == 0.25


def test_the_id_does_not_depend_on_values() -> None:
    ids = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        ids.add(blueprint_id(from_torch(nn.Linear(4, 4), torch.randn(3, 4), dynamic=0)))
    assert len(ids) == 1


def test_frozen_parameters_get_no_gradient() -> None:
    blueprint = from_torch(Frozen(), torch.randn(3, 6), dynamic=0)
    assert blueprint.differentiable == ("x", "a.weight", "b.weight")
    assert [len(v.type.shape) for v in blueprint.of_kind("constant")] == [1]


class Held(nn.Module):
    """A large plain tensor, infinities, an unused parameter, a buffer that only changes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(40, 40)
        self.edge = torch.tensor([float("inf"), -1.0])
        self.idle = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.minimum(x @ self.table, self.edge[0]) + self.calls


def test_constants_and_leaves_that_nothing_reads(tmp_path: Path) -> None:
    blueprint = from_torch(Held(), torch.randn(3, 40))
    assert {v.name: isinstance(v.data, dict) for v in blueprint.of_kind("constant")} == {
        "table": True,
        "edge": True,
    }
    assert not blueprint.of_kind("param") and set(blueprint.updates) == {"calls"}
    files = save(blueprint, tmp_path / "held.json")
    twin = to_torch(load(files[0]), base=tmp_path)
    x = torch.randn(3, 40)
    torch.testing.assert_close(twin(x), x @ blueprint.values["table"] + 1)


@pytest.mark.parametrize("dynamic", [0, None])
@pytest.mark.parametrize("frozen", [False, True])
def test_running_statistics_are_updated_as_in_the_module(dynamic: int | None, frozen: bool) -> None:
    """Through both readings: as exported, and decomposed (a view that is written into)."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3, momentum=0.3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            if frozen:
                y.view(-1)[0] = 1.0
            return y

    module = Normed()
    given = inputs([(4, 3, 5, 2)])
    blueprint = from_torch(module, given, dynamic=dynamic)
    assert set(blueprint.updates) == {"norm.running_mean", "norm.running_var"}
    assert blueprint.metadata["imported"]["left_out"] == ["norm.num_batches_tracked"]
    twin = to_torch(blueprint)
    for _ in range(3):
        torch.testing.assert_close(twin(*given), module(*given))
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(value, module.state_dict()[name], msg=name)
    without = from_torch(Normed(), given, updates=False)
    assert not without.updates and len(without.metadata["imported"]["left_out"]) == 3


def test_counters_that_something_reads_are_kept() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return x * self.steps

    module, x = Counted(), torch.randn(3, 4)
    blueprint = from_torch(module, x)
    twin = to_torch(blueprint)
    for _ in range(3):
        torch.testing.assert_close(twin(x), module(x))
    assert int(twin.get_buffer("steps")) == int(module.steps) == 3 + int(blueprint.values["steps"])


@pytest.mark.parametrize("function", [F.gelu, torch.matmul, F.mse_loss, functools.partial(torch.sum, dim=1)])
def test_functions_of_torch(function: Any) -> None:
    given = inputs([(4, 4)] * (1 if isinstance(function, functools.partial) or function is F.gelu else 2))
    found = to_torch(from_torch(function, given))(*given)
    torch.testing.assert_close(found, function(*given))


# Sizes.


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x[:, None, :] * y[None]).sum(-1) / x.shape[0] + y.numel()


def test_axes_with_names_and_ranges() -> None:
    given = inputs([(3, 5), (4, 5)])
    spec = DimSpec(1, 100, (10, 20))
    blueprint = from_torch(Two(), given, dynamic={"x": {0: ("rows", spec)}, "y": {0: "others"}})
    assert blueprint.dims["rows"] == spec and blueprint.dims["others"].tune == (4,)
    assert [str(v.type) for v in blueprint.leaves] == ["float32[rows, 5]", "float32[others, 5]"]
    same(Two(), blueprint, given)
    same(Two(), blueprint, inputs([(7, 5), (1, 5)]))


@pytest.mark.parametrize(
    ("dynamic", "dims"),
    [(None, []), (0, ["batch", "batch2"]), ([0, 1], ["batch", "batch2", "size1"]), ({0: 0}, ["batch"]),
     ({"y": [0]}, ["batch"]), ({"x": -1, "y": 1}, ["size1"])],
)  # fmt: skip
def test_forms_of_dynamic(dynamic: Any, dims: list[str]) -> None:
    given = inputs([(3, 5), (4, 5)])
    blueprint = from_torch(Two(), given, dynamic=dynamic)
    assert sorted(blueprint.dims) == sorted(dims)
    same(Two(), blueprint, given)


def test_an_axis_of_one_may_vary() -> None:
    blueprint = from_torch(nn.Linear(4, 2), torch.randn(1, 4), dynamic=0)
    assert str(blueprint.leaves[0].type) == "float32[batch, 4]" and blueprint.dims["batch"].tune == (1,)


PARTS: tuple[Any, ...] = (
    lambda x: x[:, -1],
    lambda x: x[:, 1:] * x[:, :-1],
    lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    lambda x: torch.roll(x, 1, 1),
    lambda x: x[:, -3:-1],
    lambda x: x.diff(dim=1),
)


@pytest.mark.parametrize("function", PARTS)
def test_parts_along_an_axis_that_varies(function: Any) -> None:
    """Proved from the range of the dim; gradients too."""

    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    given = inputs([(3, 5, 4)])
    blueprint = from_torch(Part(), given, dynamic={"x": {1: ("t", DimSpec(4, 64))}})
    same(Part(), blueprint, given)
    same(Part(), blueprint, inputs([(3, 9, 4)]))
    if function is PARTS[4]:
        assert refusal(Part(), given, dynamic={"x": {1: ("t", DimSpec(2, 64))}}).code in ("E0206", "E0405")


def test_a_size_in_multiples() -> None:
    spec = DimSpec(16, 64, multiple_of=16)
    blueprint = from_torch(nn.Linear(4, 2), torch.randn(16, 4), dynamic={"input": {0: ("rows", spec)}})
    assert blueprint.dims["rows"].multiple_of == 16 and blueprint.dims["rows"].tune == (16,)


def test_options_of_the_command_line() -> None:
    assert from_options(()) is None and from_options(("0", "1")) == [0, 1]
    assert from_options(("x:0=rows", "y:1", "x:1=n:2:8")) == {
        "x": {0: "rows", 1: ("n", DimSpec(2, 8))},
        "y": {1: None},
    }
    for wrong in (("x",), ("0", "x:1"), ("x:0=1a",)):
        with pytest.raises(EsperError, match="E0407"):
            from_options(wrong)


def test_a_named_axis_of_the_only_input() -> None:
    blueprint = from_torch(nn.Linear(4, 2), torch.randn(16, 4), dynamic=from_options(("0=rows:1:4096",)))
    assert (blueprint.dims["rows"].min, blueprint.dims["rows"].max) == (1, 4096)
    told = refusal(Two(), inputs([(3, 5), (4, 5)]), dynamic=from_options(("0=rows",)))
    assert told.code == "E0407" and "which input" in told.message and "x:0=" in told.message


@pytest.mark.parametrize(
    "dynamic", [5, {"z": 0}, {2: 0}, {"x": 7}, {"x": {"a": 1}}, {"x": {0: "not a name"}}]
)
def test_bad_dynamic(dynamic: Any) -> None:
    assert refusal(Two(), inputs([(3, 5), (4, 5)]), dynamic=dynamic).code == "E0407"


def test_a_size_that_the_code_fixes() -> None:
    def fixed(x: Tensor) -> Tensor:
        return x.view(6, 4)

    error = refusal(fixed, torch.randn(6, 4), dynamic=0)
    assert error.code == "E0405" and "batch" in error.message


# Precision.


def test_precision_in_force_is_written_down() -> None:
    module = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Flatten(), nn.Linear(20, 2))

    def found() -> list[str]:
        return [dict(n.attrs)["precision"] for n in from_torch(module, torch.randn(2, 3, 5)).nodes
                if "precision" in dict(n.attrs)]  # fmt: skip

    # As a context: torch's own test utilities, once imported, forbid to set these flags for good.
    with torch.backends.cudnn.flags(allow_tf32=True):
        assert found() == ["tf32", "ieee"]
    try:
        torch.set_float32_matmul_precision("high")
        with torch.backends.cudnn.flags(allow_tf32=False):
            assert found() == ["ieee", "tf32"]
    finally:
        torch.set_float32_matmul_precision("highest")


def test_precision_by_the_switches_of_each_backend() -> None:
    """They and the older ones do not mix in one process: a fresh one sets them."""
    script = (
        "import torch\n"
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'\n"
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "from esper_ir.importers.torch_export import precision_in_force as found\n"
        "print(found().matmul, found().convolution)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["tf32", "ieee"], done.stderr


# Random numbers.


class Dropping(nn.Module):
    """Elements, channels, attention weights and noise, each drawn anew."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        image = x.view(x.shape[0], 16, -1, 5)
        q = torch.ones_like(image)
        return (
            F.dropout(x, self.p),
            F.dropout2d(image, self.p),
            F.scaled_dot_product_attention(q, q, q, dropout_p=self.p),
            x + torch.randn_like(x),
            torch.bernoulli(torch.full_like(x, self.p)),
        )


def test_what_is_dropped_is_drawn_for_every_call() -> None:
    torch.manual_seed(3)
    x = torch.rand(64, 400) + 0.5
    blueprint = from_torch(Dropping(), x, dynamic=0)
    assert blueprint.random == ("seed",) and [v.name for v in blueprint.of_kind("input")] == ["x", "seed"]
    twin = to_torch(blueprint)
    held = x.clone().requires_grad_()
    first, second = twin(held), twin(x)
    assert all(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    elements, channels, attended, noisy, truths = (t.detach() for t in first)
    assert abs(float((elements == 0).float().mean()) - 0.3) < 0.02
    assert torch.allclose(elements[elements != 0], (x / 0.7)[elements != 0])
    whole = (channels == 0).flatten(2).float().mean(-1)
    assert set(whole.unique().tolist()) == {0.0, 1.0} and abs(float(whole.mean()) - 0.3) < 0.06
    assert abs(float(attended.mean()) - 1.0) < 0.05 and float(attended.std()) > 0.1
    noise = noisy - x
    assert abs(float(noise.mean())) < 0.03 and abs(float(noise.std()) - 1.0) < 0.03
    assert abs(float(truths.mean()) - 0.3) < 0.02
    first[0].sum().backward()
    assert torch.equal(held.grad != 0, elements != 0)
    agree = float(((elements == 0) == (truths == 1)).float().mean())
    assert abs(agree - (0.3 * 0.3 + 0.7 * 0.7)) < 0.03  # two places of one block are independent


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_at_its_ends(p: float) -> None:
    x = torch.rand(4, 400)

    def ends(x: Tensor) -> Tensor:
        return F.dropout(x, p) + F.alpha_dropout(x, p, training=p == 0.0)

    torch.testing.assert_close(to_torch(from_torch(ends, x))(x), ends(x))


# Refusals.


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.erfinv(x)
        y = y + torch.lgamma(x)
        z = x[x > 0]
        return torch.randperm(4) + y + z.sum() + torch.complex(x, x).real


def test_everything_at_once_with_the_lines() -> None:
    error = refusal(Wrong(), torch.rand(3, 4))
    lines = {d.context.splitlines()[-1].strip() for d in error.diagnostics}
    assert error.code in ("E0406", "E0103") and len(error.diagnostics) >= 4
    assert {"y = torch.erfinv(x)", "y = y + torch.lgamma(x)", "z = x[x > 0]"} <= lines
    assert all(Path(__file__).name in d.context for d in error.diagnostics)


@pytest.mark.parametrize(
    ("function", "code", "word"),
    [
        (lambda x: x + 1 if x.sum() > 0 else x, "E0405", "data-dependent"),
        (lambda x: torch.poisson(x.abs()) + x, "E0406", "random"),
        (lambda x: x.nonzero(), "E0406", "depends on the data"),
        (lambda x: x.add_(1), "E0406", "writes"),
        (lambda x: 3, "E0406", "returns 3"),
        (lambda x: None, "E0406", "no tensor"),
        (lambda x: torch.fft.rfft(x).abs(), "E0406", ""),
        (lambda x, y: x, "E0405", "inputs"),
        (lambda x: x.to(torch.complex64).real, "E0103", "complex64"),
    ],
)
def test_refusals(function: Any, code: str, word: str) -> None:
    error = refusal(function, torch.rand(3, 4))
    assert error.code == code and word in str(error), str(error)


def test_writes_that_somebody_sees() -> None:
    def through_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        part = y[:, 1:3]
        part.mul_(3)
        y[0] = 1.0
        y.view(-1)[2:4] = x[0, :2]
        return y, part.sum()

    x = torch.rand(3, 4)
    found = to_torch(from_torch(through_a_view, x))(x)
    for ours, theirs in zip(found, through_a_view(x), strict=True):
        torch.testing.assert_close(ours, theirs)


# Rules as a whole.


def test_every_rule_names_an_operator_of_torch() -> None:
    for name in RULES:
        space, op, overload = name.split(".")
        assert space == "aten" and hasattr(getattr(torch.ops.aten, op, None), overload), name


class Deep(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(blocks))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.gelu(layer(norm(x)), approximate="tanh").relu_()
        return x


def test_five_hundred_nodes_in_five_seconds_beyond_torch() -> None:
    module, x = Deep(100), torch.randn(4, 8)
    spent: list[float] = []
    export = torch.export.export

    def timed(*given: Any, **more: Any) -> Any:
        start = time.process_time()
        try:
            return export(*given, **more)
        finally:
            spent.append(time.process_time() - start)

    torch.export.export = timed
    try:
        start = time.process_time()
        blueprint = from_torch(module, x, dynamic=0)
        total = time.process_time() - start
    finally:
        torch.export.export = export
    assert len(blueprint.nodes) == 500
    assert total - sum(spent) < 5.0 * slowness(), total - sum(spent)


@pytest.mark.parametrize(
    ("shape", "least"), [((4, 5), 2), ((4, 5, 1, 1), 2), ((4, 5, 3), 1)], ids=["rows", "pixels", "runs"]
)
def test_a_batch_that_has_no_variance_is_outside_the_range(shape: tuple[int, ...], least: int) -> None:
    """torch refuses one value per channel in training; where other axes give more, a batch of one is fine."""
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](5)
    made = from_torch(norm, (torch.randn(shape),), dynamic=0)
    assert [d.min for d in made.dims.values()] == [least]
    evaluated = from_torch(norm.eval(), (torch.randn(shape),), dynamic=0)
    assert [d.min for d in evaluated.dims.values()] == [1]


def test_one_value_per_channel_gives_the_bias() -> None:
    """As the language means it, where torch's functional form refuses: variance 0, whatever the value."""
    norm = nn.BatchNorm1d(5)
    made = from_torch(norm, (torch.randn(4, 5),), dynamic=0)
    given = {n: torch.randn(5) for n in ("weight", "bias")}
    found = evaluate(typed(made), {"input": torch.randn(1, 5), **given, "running_mean": torch.zeros(5),
                                   "running_var": torch.ones(5)}, precision="float64")  # fmt: skip
    torch.testing.assert_close(found[made.outputs[0]].float(), given["bias"][None], atol=1e-5, rtol=1e-5)
