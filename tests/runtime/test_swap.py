"""Artifacts in the place of modules: the decoder and the CNN of bench/, layouts, wrappers, undo, refusals."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bench.models import (
    MLP,
    SMALL_CNN,
    SMALL_DECODER,
    Cnn,
    Decoder,
    NormRelu,
    RMSNorm,
    cnn_batch,
    decoder_batch,
)
from esper_ir.importers.torch_export import from_torch
from esper_ir.text import render
from forge.service import compile_file
from library.store import Library
from runtime import loader
from runtime.swapping import Fit, swap, swapped
from tests.runtime.shelf import SIDE
from tests.runtime.test_executor import refusal

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-3, "atol": 1e-5}


def decoder_plan(ids: dict[str, str]) -> dict[str, str]:
    return {key: ids[key] for key in ("layers.*.mlp", "layers.*.norm?", "head.norm")}


def cnn_plan(ids: dict[str, str]) -> dict[str, Fit]:
    found = {key: Fit(ids[key], channels_last=True) for key in ids if key.startswith("stages")}
    found["stages.0.*.norm1"] = Fit(ids["norm_relu"], channels_last=True, mode="train")
    return found


def both(ids: dict[str, str], **changes: Any) -> tuple[Decoder, Decoder]:
    """A plain decoder and one with artifacts in it, the same weights."""
    torch.manual_seed(0)
    plain = Decoder(SMALL_DECODER)
    ours = copy.deepcopy(plain)
    swap(ours, decoder_plan(ids), **changes)
    return plain, ours


def same_gradients(a: nn.Module, b: nn.Module) -> None:
    for (name, p), (other, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert name == other and (p.grad is None) == (q.grad is None)
        torch.testing.assert_close(p.grad, q.grad, **CLOSE)


def launches(model: nn.Module) -> int:
    return sum(report["counters"]["launches"] for report in swapped(model).values())


def test_a_decoder_trains_as_before(ids: dict[str, str]) -> None:
    plain, ours = both(ids)
    assert list(plain.state_dict()) == list(ours.state_dict())
    assert type(ours.layers[0].mlp).__name__ == "MLP" and isinstance(ours.layers[0].mlp, MLP)
    losses = []
    for model in (plain, ours):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            loss = model(*decoder_batch(SMALL_DECODER, 2, 16, CPU, step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    same_gradients(plain, ours)
    assert launches(ours) > 4 * 7 and not any(r["eager_calls"] for r in swapped(ours).values())


def test_undo_gives_everything_back(ids: dict[str, str]) -> None:
    plain, ours = both(ids)
    batch = decoder_batch(SMALL_DECODER, 2, 8, CPU)
    taken = swap(ours, undo=True)
    assert len(taken) == 7 and set(taken.values()) <= set(ids.values()) and not swapped(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in plain.modules()]
    assert torch.equal(plain(*batch), ours(*batch)) and "_esper_seat" not in ours.head.norm.__dict__
    assert swap(ours, undo=True) == {}
    swap(ours, decoder_plan(ids))
    assert len(swapped(ours)) == 7


def test_a_cnn_with_its_statistics(ids: dict[str, str]) -> None:
    torch.manual_seed(1)  # with 0 a value before a ReLU is 1e-7: its gradient is a matter of rounding
    plain = Cnn(SMALL_CNN)
    ours = copy.deepcopy(plain)
    swap(ours, cnn_plan(ids))
    assert list(plain.state_dict()) == list(ours.state_dict())
    for step in range(3):
        batch = cnn_batch(SMALL_CNN, 4, CPU, step)
        loss, want = ours(*batch), plain(*batch)
        loss.backward()
        want.backward()
        assert loss.item() == pytest.approx(want.item(), rel=1e-4)
    same_gradients(plain, ours)
    for name in ("running_mean", "running_var"):
        a, b = (getattr(m.stages[0][0].norm1, name) for m in (plain, ours))
        torch.testing.assert_close(a, b, **CLOSE)
    before = launches(ours)
    plain.eval(), ours.eval()
    torch.testing.assert_close(plain(batch[0]), ours(batch[0]), **CLOSE)
    assert launches(ours) > before  # the gates still run; the norm answered by its own forward


@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_are_updated_once_under_recomputation(ids: dict[str, str], reentrant: bool) -> None:
    norm = NormRelu(SMALL_CNN.width)
    plain = copy.deepcopy(norm)
    fit = Fit(ids["norm_relu"], channels_last=True, mode="train")
    swap(nn.ModuleDict({"n": norm}), {"n": fit})
    x = torch.randn(4, SMALL_CNN.width, 8, 8).contiguous(memory_format=torch.channels_last)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    checkpoint(lambda t: norm(t).square(), ours, use_reentrant=reentrant).sum().backward()
    plain(theirs).square().sum().backward()
    torch.testing.assert_close(norm.running_mean, plain.running_mean, **CLOSE)
    torch.testing.assert_close(norm.running_var, plain.running_var, **CLOSE)
    torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)
    assert norm.running_mean.abs().sum() > 0


class Gelu(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(super().forward(input))


@pytest.mark.parametrize(("key", "out"), [("square", SIDE), ("oblong", 48)])
def test_torchs_layout_of_weights(ids: dict[str, str], key: str, out: int) -> None:
    """The blueprint's weight is [in, out]; of a square one only the trial can tell."""
    model = nn.Sequential(Gelu(SIDE, out))
    plain = copy.deepcopy(model)
    swap(model, {"0": ids[key]})
    x = torch.randn(3, 5, SIDE)
    y, want = model(x), plain(x)
    torch.testing.assert_close(y, want, **CLOSE)
    y.square().sum().backward()
    want.square().sum().backward()
    same_gradients(plain, model)
    assert swapped(model)["0"]["counters"]["copies"] == 1  # the transposed weight


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIDE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * self.weight, -2)


def test_leading_axes_fold_only_where_rows_are_alone(ids: dict[str, str]) -> None:
    model = nn.Sequential(Columns())
    plain = copy.deepcopy(model)
    swap(model, {"0": ids["columns"]})
    x = torch.randn(6, SIDE)
    torch.testing.assert_close(model(x), plain(x), **CLOSE)
    refusal("E0810", model, torch.randn(2, 6, SIDE))


def test_refusals_change_nothing(ids: dict[str, str]) -> None:
    model = Decoder(SMALL_DECODER)
    classes = [type(m) for m in model.modules()]
    near = refusal("E0850", swap, model, {"layers.*.mpl": ids["head.norm"]})
    assert "layers.0.mlp" in str(near)
    refusal("E0850", swap, model, {nn.Conv2d: ids["head.norm"]})
    absent = refusal("E0851", swap, model, {"head.norm": ids["head.norm"], "layers.0.norm1": ids["square"]})
    assert "bias" in str(absent) or "shape" in str(absent)
    named = refusal(
        "E0851", swap, model, {MLP: Fit(ids["layers.*.mlp"], names={"gate.weight": "gat.weight"})}
    )
    assert "gate.weight" in str(named)
    refusal("E0851", swap, model, {MLP: Fit(ids["layers.*.mlp"], names={"nothing": "x"})})
    refusal("E0851", swap, nn.Sequential(model.head.norm.double()), {"0": ids["head.norm"]})
    model.head.norm.float()
    refusal("E0851", swap, nn.Sequential(nn.LayerNorm(64, eps=1e-6)), {"0": ids["head.norm"]})  # its bias
    refusal("E0852", swap, nn.Sequential(nn.LayerNorm(64, bias=False)), {"0": ids["head.norm"]})
    exchanged = {"gate.weight": "up.weight", "up.weight": "gate.weight"}
    refusal("E0852", swap, model, {MLP: Fit(ids["layers.*.mlp"], names=exchanged)})
    refusal("E0819", swap, model, {MLP: Fit(ids["layers.*.mlp"], mode="sometimes")})
    refusal("E0851", swap, model, {RMSNorm: Fit(ids["head.norm"], updates={"weight": 1})})
    refusal("E0853", swap, model, {"layers.0.norm1": ids["head.norm"], RMSNorm: ids["head.norm"]})
    assert [type(m) for m in model.modules()] == classes
    swap(model, {"head.norm": ids["head.norm"]})
    refusal("E0853", swap, model, {"head.norm": ids["head.norm"]})
    model.head.norm.__class__ = type("Later", (type(model.head.norm),), {})
    refusal("E0853", swap, model, undo=True)


def test_what_the_block_does_not_serve(ids: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    model, opted = (nn.Sequential(Gelu(SIDE, 48)) for _ in range(2))
    swap(model, {"0": ids["oblong"]})
    swap(opted, {"0": ids["oblong"]}, fallback="eager")
    many = torch.randn(65, SIDE)
    refusal("E0813", model, many)
    refusal("E0811", model, torch.randn(3, SIDE).double())
    for _ in range(2):
        linear = opted[0]
        assert torch.equal(opted(many), F.gelu(F.linear(many, linear.weight, linear.bias)))
    assert swapped(opted)["0"]["eager_calls"] == 2
    assert sum("answered by the module itself" in r.message for r in caplog.records) == 1
    mlp = nn.ModuleDict({"m": MLP(64, 176, torch.float32)})
    swap(mlp, {"m": ids["layers.*.mlp"]})
    x = torch.randn(2, 64)
    assert torch.equal(mlp["m"](x=x), mlp["m"](x))
    assert "missing" in str(refusal("E0854", mlp["m"]))
    assert "more" in str(refusal("E0854", mlp["m"], x, more=x))


def test_an_error_names_the_module_and_says_what_to_do(ids: dict[str, str]) -> None:
    """Found in a model of many blocks: which module, which artifact, what swap can do."""
    model = nn.Sequential(Gelu(SIDE, 48), Gelu(48, SIDE))
    swap(model, {"0": ids["oblong"]})
    for value, code, hint in (
        (torch.randn(65, SIDE), "E0813", "swap with fallback='eager'"),
        (torch.randn(3, SIDE).double(), "E0811", "swap with fallback='eager'"),
        (torch.randn(3, SIDE + 1), "E0810", "declared [rows, 32]"),
        (torch.randn(SIDE), "E0810", "2 axes"),
        (torch.randn(3, SIDE).numpy(), "E0818", "torch.as_tensor"),
    ):
        told = refusal(code, model, value)
        assert told.message.startswith(f"0 by {ids['oblong']}: ") and hint in str(told)
        assert "load with" not in str(told)
    columns = nn.Sequential(Columns())
    swap(columns, {"0": ids["columns"]})
    assert "rows affect each other" in str(refusal("E0810", columns, torch.randn(2, 6, SIDE)))


def test_every_refusal_of_a_fit_has_a_hint(ids: dict[str, str]) -> None:
    hooked = Gelu(SIDE, 48)
    hooked.forward = hooked.forward
    for module, fit in (
        (Gelu(SIDE, 48).double(), Fit(ids["oblong"])),
        (Gelu(SIDE, 49), Fit(ids["oblong"])),
        (hooked, Fit(ids["oblong"])),
        (Gelu(SIDE, 48), Fit(ids["oblong"], names={"other": "weight"})),
        (Gelu(SIDE, 48), Fit(ids["oblong"], updates={"mean": 1})),
        (nn.LayerNorm(64), Fit(ids["head.norm"])),
    ):
        assert refusal("E0851", swap, nn.Sequential(module), {"0": fit}).hint
    for plan in ([ids["oblong"]], {3: ids["oblong"]}):
        assert "layers.*.mlp" in str(refusal("E0819", swap, nn.Sequential(Gelu(SIDE, 48)), plan))


def test_copies_files_and_other_values(ids: dict[str, str]) -> None:
    _, ours = both(ids)
    batch = decoder_batch(SMALL_DECODER, 2, 8, CPU)
    want = ours(*batch)
    other = copy.deepcopy(ours)
    with torch.no_grad():
        other.head.norm.weight.mul_(2)
    assert torch.equal(ours(*batch), want) and not torch.equal(other(*batch), want)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    assert torch.equal(back(*batch), want) and len(swapped(back)) == 7
    swap(back, undo=True)
    assert type(back.head.norm) is RMSNorm
    other.load_state_dict(ours.state_dict(), assign=True)
    assert torch.equal(other(*batch), want)
    doubled = {name: value * 2 for name, value in ours.state_dict().items() if "mlp.down" in name}
    assert not torch.equal(functional_call(ours, doubled, batch), want)
    nn.utils.parametrizations.weight_norm(ours.layers[0].mlp.up)
    torch.testing.assert_close(ours(*batch), want, **CLOSE)
    ours(*batch).backward()
    assert ours.layers[0].mlp.up.parametrizations.weight.original0.grad is not None


def test_tied_and_frozen(ids: dict[str, str]) -> None:
    plain, ours = both(ids)
    for model in (plain, ours):
        model.layers[1].mlp.up.weight = model.layers[1].mlp.gate.weight
        model.layers[0].norm1.requires_grad_(False)
        model.layers[0].mlp.down.requires_grad_(False)
        model(*decoder_batch(SMALL_DECODER, 2, 8, CPU)).backward()
    same_gradients(plain, ours)
    assert ours.layers[0].norm1.weight.grad is None


def test_compiled_without_a_break(ids: dict[str, str]) -> None:
    torch.compiler.reset()
    plain, ours = both(ids)
    batch = decoder_batch(SMALL_DECODER, 2, 8, CPU)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    compiled(*batch).backward()
    plain(*batch).backward()
    same_gradients(plain, ours)
    assert launches(ours) > 0, "what was compiled runs the artifacts"


class Pooled(nn.Module):
    """A convolution, a norm with statistics, pooling and a product, as anybody writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(self.norm(self.conv(x)).mean((2, 3))))


def test_imported_compiled_and_put_in_its_own_place(esper_library: Path, tmp_path: Path) -> None:
    """The names of the leaves are the module's: an import needs no `Fit(names=...)`."""
    loader._meant.clear()
    loader._libraries.clear()
    plain, x = Pooled(), torch.randn(6, 8, 4, 4)
    path = tmp_path / "pooled.json"
    path.write_text(render(from_torch(copy.deepcopy(plain), x, dynamic=0)), encoding="utf-8")
    with Library.open() as library:
        (made,) = compile_file(path, targets=("cpu",), library=library)
        library.record_verdict(made.artifact_id, {"stages": []}, passed=True)
    model = nn.Sequential(copy.deepcopy(plain))
    swap(model, {Pooled: Fit(made.artifact_id, mode="train")})
    for _ in range(3):
        x = torch.randn(5, 8, 4, 4)
        y, want = model(x), plain(x)
        torch.testing.assert_close(y, want, **CLOSE)
        y.square().sum().backward()
        want.square().sum().backward()
    same_gradients(plain, model[0])
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x), **CLOSE)
    assert launches(model) > 0


class Lora(nn.Module):
    """A linear layer under an adapter, as PEFT builds them."""

    def __init__(self, base: nn.Linear, rank: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"a": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"a": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"a": nn.Dropout(dropout)})
        self.scaling, self.active_adapters = {"a": 0.5}, ["a"]
        self.disable_adapters = self.merged = False

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def get_base_layer(self) -> nn.Linear:
        return self.base_layer

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_A["a"](self.lora_dropout["a"](x))
        return self.base_layer(x) + self.lora_B["a"](low) * self.scaling["a"]


def test_adapted_weights(ids: dict[str, str]) -> None:
    """Adapted before or after the swap; what is no low-rank product is refused, or left to the module."""
    plain, ours = both(ids)
    for model in (plain, ours):
        torch.manual_seed(1)
        model.requires_grad_(False)
        model.layers[0].mlp.up = Lora(model.layers[0].mlp.up)
        model(*decoder_batch(SMALL_DECODER, 2, 8, CPU)).backward()
    same_gradients(plain, ours)
    assert ours.layers[0].mlp.up.lora_A["a"].weight.grad.abs().sum() > 0
    later = Decoder(SMALL_DECODER)
    later.layers[0].mlp.up = Lora(later.layers[0].mlp.up)
    assert "layers.0.mlp" in swap(later, {"layers.*.mlp": ids["layers.*.mlp"]})
    later.layers[0].mlp.up.lora_dropout["a"].p = 0.1
    refusal("E0854", later, *decoder_batch(SMALL_DECODER, 2, 8, CPU))
    later.eval()
    later(*decoder_batch(SMALL_DECODER, 2, 8, CPU))
    ours.layers[0].mlp.up.use_dora = {"a": True}
    assert "low rank" in str(refusal("E0854", ours, *decoder_batch(SMALL_DECODER, 2, 8, CPU)))


def test_a_hugging_face_llama(ids: dict[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    sizes = SMALL_DECODER
    config = transformers.LlamaConfig(
        hidden_size=sizes.width, intermediate_size=sizes.hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=sizes.words, max_position_embeddings=64, rms_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    ours = copy.deepcopy(plain)
    names = {f"{n}.weight": f"{n}_proj.weight" for n in ("gate", "up", "down")}
    done = swap(ours, {llama.LlamaMLP: Fit(ids["layers.*.mlp"], names), llama.LlamaRMSNorm: ids["head.norm"]})
    assert len(done) == 7 and list(plain.state_dict()) == list(ours.state_dict())
    tokens = torch.randint(0, sizes.words, (2, 16))
    for model in (plain, ours):
        model(tokens, labels=tokens).loss.backward()
    same_gradients(plain, ours)
    peft = pytest.importorskip("peft")
    grads = []
    for model in (plain, ours):
        torch.manual_seed(1)
        adapters = peft.LoraConfig(r=4, target_modules=["gate_proj", "down_proj"], init_lora_weights=False)
        wrapped = peft.get_peft_model(model, adapters)
        wrapped.zero_grad()
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        grads.append([p.grad for p in wrapped.parameters() if p.grad is not None])
    torch.testing.assert_close(grads[0], grads[1], **CLOSE)
    assert len(grads[0]) == 8
