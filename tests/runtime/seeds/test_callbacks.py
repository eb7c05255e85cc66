"""Callbacks for Lightning and the Hugging Face Trainer: in real trainers where the packages are installed,
by the calls those make elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import runtime
from esper_ir.diagnostics import EsperError
from runtime.seeds.lifecycle import Lifecycle
from runtime.strategy import huggingface, lightning
from runtime.strategy.packet import AdaptationSignal
from tests.runtime.seeds import garden
from tests.runtime.seeds.conftest import Ids
from tests.runtime.seeds.garden import LIMITS, loss_of, validate

HAVE = {
    name: importlib.util.find_spec(name) is not None for name in ("lightning", "transformers", "accelerate")
}


def grown(ids: Ids) -> tuple[nn.Module, runtime.TamiyoController]:
    model = runtime.wrap(garden.net(), "body", limits=LIMITS)
    schedule = [{"epoch": 1, "slot": "body/0", "artifact": ids["lora"]}]
    config = {"policy": "fixed_schedule", "schedule": schedule, "limits": LIMITS, "telemetry_every": 2}
    return model, runtime.TamiyoController(model, config=config)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callbacks without the packages' base classes: what they do does not need them."""
    for module in (lightning, huggingface):
        if module.Base is object:
            monkeypatch.setattr(module, "Base", type("Base", (), {}))


def test_without_the_package_the_refusal_names_the_extra(monkeypatch: pytest.MonkeyPatch, ids: Ids) -> None:
    _, tamiyo = grown(ids)
    for module, make in ((lightning, lambda: lightning.GrowthCallback(tamiyo, validate)),
                         (huggingface, lambda: huggingface.GrowthCallback(tamiyo, None))):  # fmt: skip
        monkeypatch.setattr(module, "Base", object)
        with pytest.raises(EsperError) as refused:
            make()
        assert refused.value.code == "E1035"


def test_lightning_calls(ids: Ids, bare: None) -> None:
    model, tamiyo = grown(ids)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    callback = lightning.GrowthCallback(tamiyo, validate)
    trainer: Any = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[], should_stop=False)
    callback.on_fit_start(trainer, None)
    callback.on_fit_start(trainer, None)  # a second fit finds it attached
    data = iter(garden.batches(100))
    for _ in range(2):
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(model, next(data)).backward()
            optimizer.step()
        callback.on_train_epoch_end(trainer, None)
    assert tamiyo.growth.slots[0].state is Lifecycle.TRAINING and not trainer.should_stop
    state = callback.state_dict()
    callback.load_state_dict(state)
    tamiyo.end_epoch = lambda *_: AdaptationSignal(False, True, "lost")  # type: ignore[method-assign]
    callback.on_train_epoch_end(trainer, None)
    assert trainer.should_stop


def test_lightning_with_two_optimizers_is_refused(ids: Ids, bare: None) -> None:
    _, tamiyo = grown(ids)
    with pytest.raises(EsperError) as refused:
        lightning.GrowthCallback(tamiyo, validate).on_fit_start(SimpleNamespace(optimizers=[1, 2]), None)
    assert refused.value.code == "E1036"


def test_hugging_face_calls(ids: Ids, bare: None) -> None:
    model, tamiyo = grown(ids)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    held = garden.batches(3, seed=5)
    trainer = SimpleNamespace(
        optimizer=SimpleNamespace(optimizer=optimizer), lr_scheduler=None, eval_dataset=held,
        get_eval_dataloader=lambda: held, _prepare_inputs=lambda b: b, compute_loss=loss_of,
    )  # fmt: skip
    callback = huggingface.GrowthCallback(tamiyo, trainer, every=5)
    control = SimpleNamespace(should_training_stop=False)
    callback.on_train_begin(None, None, control)
    data = iter(garden.batches(100))
    for step in range(1, 11):
        optimizer.zero_grad()
        loss_of(model, next(data)).backward()
        optimizer.step()
        callback.on_step_end(None, SimpleNamespace(global_step=step), control)
    callback.on_epoch_end(None, None, control)
    assert tamiyo.growth.epoch == 2 and tamiyo.growth.slots[0].state is Lifecycle.TRAINING
    trainer.eval_dataset = None
    with pytest.raises(EsperError) as refused:
        callback._end(control)
    assert refused.value.code == "E1036"
    with pytest.raises(EsperError) as refused:
        model, tamiyo = grown(ids)
        huggingface.GrowthCallback(tamiyo, SimpleNamespace(optimizer=None)).on_train_begin(None, None, None)
    assert refused.value.code == "E1036"


@pytest.mark.skipif(not HAVE["lightning"], reason="lightning is not installed (the extra `lightning`)")
def test_in_lightnings_own_trainer(ids: Ids, tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer

    model, tamiyo = grown(ids)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), 0.05)

    trainer = Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False,
                      enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
                      callbacks=[lightning.GrowthCallback(tamiyo, validate)])  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(garden.batches(6), batch_size=None))
    assert tamiyo.growth.epoch == 3 and tamiyo.growth.step == 18
    assert tamiyo.growth.slots[0].state is Lifecycle.TRAINING


@pytest.mark.skipif(not (HAVE["transformers"] and HAVE["accelerate"]), reason="transformers is not installed")
def test_in_hugging_faces_own_trainer(ids: Ids, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model, tamiyo = grown(ids)

    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Tensor:
            return loss_of(model, (inputs["x"], inputs["y"]))

    rows = [{"x": x[i], "y": y[i]} for x, y in garden.batches(4) for i in range(len(x))]
    args = TrainingArguments(tmp_path, num_train_epochs=3, per_device_train_batch_size=32, report_to=[],
                             save_strategy="no", use_cpu=True, disable_tqdm=True,
                             remove_unused_columns=False)  # fmt: skip
    trainer = Mine(model=model, args=args, train_dataset=rows, eval_dataset=rows[:64])
    trainer.add_callback(huggingface.GrowthCallback(tamiyo, trainer))
    trainer.train()
    assert tamiyo.growth.epoch == 3 and tamiyo.growth.step == 12
    assert tamiyo.growth.slots[0].state is Lifecycle.TRAINING
