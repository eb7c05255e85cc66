"""When something fails: the table of the manual, case by case, in every state; and bad input, which changes
nothing."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import runtime
from esper_ir.diagnostics import EsperError
from library.store import Library
from runtime import loader
from runtime.cache import Cache
from runtime.errors import fail as runtime_fail
from runtime.seeds.bans import Bans
from runtime.seeds.commands import Graft, Journal, KasminaControlCommand
from runtime.seeds.lifecycle import Fault, Issuer, Lifecycle, Verb
from tests.runtime.seeds.garden import LIMITS, Bed, batches, loss_of, net, some, validate

S = Lifecycle
Own = tuple[Library, dict[str, str]]
LATER = ("TRAINING", "GRAFTING", "STABILIZATION", "EVALUATING", "FINE_TUNING")
ALL = ("DORMANT", "GERMINATED", "LOADING", *LATER)


def into(bed: Bed, artifact: str, state: str) -> None:
    """Any of ALL."""
    if state in LATER:
        bed.bring(artifact, state)
    elif state != "DORMANT":
        bed.send(Verb.REQUEST_GERMINATION, artifact)
        bed.growth.commit(autopilot=False)
        if state == "LOADING":
            bed.send(Verb.ADVANCE)
            bed.growth.commit(autopilot=False)
    assert bed.slot.state.name == state


def settle(bed: Bed, boundaries: int = 3) -> list[Any]:
    """Go on until nothing of the seed is left; what was applied."""
    applied = []
    for _ in range(boundaries):
        bed.step(8)
        applied += bed.growth.commit().applied
    return applied


def revoke(library: Library, artifact: str) -> None:
    library.revoke(artifact, "for the test")


def remove(library: Library, artifact: str) -> None:
    where(library, artifact).unlink()


def tamper(library: Library, artifact: str) -> None:
    path = where(library, artifact)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    os.chmod(path, 0o600)
    path.write_bytes(bytes(data))


def where(library: Library, artifact: str) -> Path:
    digest = library.record(artifact).digest
    (found,) = [p for p in library.home.rglob(f"*{digest[4:]}*") if p.is_file()]
    return found


@pytest.mark.parametrize("damage", [revoke, remove, tamper])
@pytest.mark.parametrize("state", some(ALL, ["LOADING"]))
def test_an_artifact_goes_bad_in_every_state(
    own: Own, damage: Callable[..., None], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is loaded: refused, or CULLED(load) without an embargo. After: a revoked one is taken out,
    the others run on from verified memory. The run never stops and the host is never touched."""
    library, ids = own
    bed = Bed()
    into(bed, ids["lora"], state)
    damage(library, ids["lora"])
    monkeypatch.setattr(loader, "_cache", Cache())
    if state == "DORMANT":
        (refusal,) = bed.command(Verb.REQUEST_GERMINATION, ids["lora"]).refused
        assert refusal.code in ("E1005", "E0721", "E0730", "E0731", "E0732", "E0733", "E0734", "E0742")
        assert bed.slot.state is S.DORMANT
        return
    applied = settle(bed)
    reached = [a.target for a in applied]
    if state in ("GERMINATED", "LOADING"):
        assert S.CULLED in reached and bed.slot.state is S.DORMANT
        assert ids["lora"] in bed.growth.bans.quarantine and not bed.growth.bans.embargoes
        (refusal,) = bed.command(Verb.REQUEST_GERMINATION, ids["lora"]).refused
        assert refusal.code != "E1004"
        assert bed.command(Verb.REQUEST_GERMINATION, ids["mlp"]).applied  # the site itself is free
        report = library.outcomes(ids["lora"])[-1]
        assert report.outcome == "CRASHED" and report.seed_id == "body/0"
    elif damage is revoke:
        assert S.CULLED in reached and bed.slot.seed is None
        assert any("REVOKED" in a.reason for a in applied)
    else:
        assert S.CULLED not in reached and bed.slot.seed is not None


class Broken:
    """Makes the seed's kernels fail from now on; the device survives unless `sticky`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bed: Bed, sticky: bool = False) -> None:
        details = {"cuda_error": 700} if sticky else {}
        state = bed.slot.seed.block._state

        def refuse(*_: Any, **__: Any) -> Any:
            raise runtime_fail("E0820", "a launch failed for the test", node="g", details=dict(details))

        state.node = None
        state.memo.hot.clear()
        state.memo._cold.clear()
        choose = type(state).choose
        monkeypatch.setattr(type(state), "choose", lambda at, *a: refuse() if at is state else choose(at, *a))


@pytest.mark.parametrize("state", some(LATER, ["TRAINING", "GRAFTING"]))
def test_kernels_crash_in_every_state(
    own: Own, state: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """alpha = 0: the host's own result; alpha > 0: the eager twin's, the same values. Then the seed goes, the
    artifact is ranked last and told of."""
    library, ids = own
    bed = Bed()
    bed.bring(ids["mlp"], state)
    bed.step(3)
    x = batches(1)[0][0]
    wanted = bed.model(x).detach().clone()
    Broken(monkeypatch, bed)
    caplog.set_level(logging.CRITICAL)
    torch.testing.assert_close(bed.model(x), wanted)
    bed.step(1)
    monkeypatch.undo()
    assert bed.slot.fault is Fault.EXEC and bed.slot.broken
    reached = [a.target for a in settle(bed)]
    assert S.CULLED in reached and bed.slot.seed is None
    assert ids["mlp"] in bed.growth.bans.quarantine and ids["mlp"] in loader._faulty


def test_a_lost_device_is_raised_with_the_artifact(
    ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed()
    bed.bring(ids["mlp"], "GRAFTING")
    bed.step(2)
    Broken(monkeypatch, bed, sticky=True)
    with pytest.raises(EsperError) as error:
        bed.step(1)
    assert error.value.code == "E0820" and error.value.details["artifact"] == ids["mlp"]


@pytest.mark.parametrize("state", some(LATER[1:], ["FINE_TUNING"]))
def test_a_nan_is_stopped_before_the_host_and_asks_for_a_rollback(ids: dict[str, str], state: str) -> None:
    bed = Bed()
    bed.bring(ids["mlp"], state)
    bed.step(2)
    assert bed.slot.alpha > 0
    with torch.no_grad():
        bed.slot.seed.named()["w2"].fill_(float("inf"))
    x = batches(1)[0][0]
    with bed.growth.override("body/0", 0.0):
        plain = bed.model(x)
    assert torch.equal(bed.model(x), plain) and torch.isfinite(plain).all()
    loss_of(bed.model, batches(1)[0]).backward()
    assert all(torch.isfinite(p.grad).all() for p in bed.model.parameters() if p.grad is not None)
    boundary = bed.growth.commit()
    assert "not finite" in boundary.rollback and bed.slot.fault is Fault.NONFINITE


def test_a_nan_of_the_host_is_no_fault_of_the_seed(ids: dict[str, str]) -> None:
    bed = Bed()
    bed.bring(ids["mlp"], "GRAFTING")
    bed.step(2)
    assert bed.slot.alpha > 0
    with torch.no_grad():
        bed.model.front.weight.fill_(float("nan"))
    assert bed.model(batches(1)[0][0]).isnan().any()
    assert bed.growth.commit().rollback == "" and bed.slot.fault is Fault.NONE


# -- bad input
# -------------------------------------------------------------------------------------------------------


def untouched(bed: Bed) -> Callable[[], None]:
    """A check that nothing of the training changed since."""
    before = copy.deepcopy(
        {k: v for k, v in bed.growth.state_dict().items() if k not in ("journal", "queue")}
    )
    weights = [p.detach().clone() for p in bed.model.parameters()]
    groups = str(bed.optimizer.state_dict()["param_groups"])
    random = torch.get_rng_state()
    epoch = bed.growth.epoch

    def check() -> None:
        after = bed.growth.state_dict()
        after["epoch"], after["ticks"] = epoch, before["ticks"]
        assert {k: str(v) for k, v in before.items()} == {k: str(after[k]) for k in before}
        assert all(torch.equal(a, b) for a, b in zip(weights, bed.model.parameters(), strict=True))
        assert str(bed.optimizer.state_dict()["param_groups"]) == groups
        assert torch.equal(torch.get_rng_state(), random)

    return check


def test_an_unknown_site_names_the_nearest() -> None:
    model = net()
    keys, kind = list(model.state_dict()), type(model.body)
    with pytest.raises(EsperError) as error:
        runtime.wrap(model, sites=["body", "boddy"])
    assert error.value.code == "E1001" and "body" in error.value.hint
    with pytest.raises(EsperError) as error:
        runtime.wrap(model, sites=nn.Conv2d)
    assert error.value.code == "E1001" and "Linear" in error.value.hint
    for many in (0, 17):
        with pytest.raises(EsperError) as error:
            runtime.wrap(model, sites="body", seeds_per_layer=many)
        assert error.value.code == "E1015"
    assert list(model.state_dict()) == keys and type(model.body) is kind
    boxed = runtime.wrap(nn.Sequential(nn.Sequential(nn.Linear(4, 4))), sites="0", seeds_per_layer=5)
    with pytest.raises(EsperError) as error:
        boxed(torch.randn(2, 4))  # how many features a container gives is known now
    assert error.value.code == "E1015"
    runtime.wrap(model, sites=nn.Linear)
    with pytest.raises(EsperError) as error:
        runtime.wrap(model, sites="body")
    assert error.value.code == "E1002"
    with pytest.raises(EsperError) as error:
        runtime.growth_of(net())
    assert error.value.code == "E1002"


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("half", "E1003", "shape_fits"),
        ("conv", "E1003", "shape_fits"),
        ("bf16", "E1003", "dtype_fits"),
        ("absent", "E0721", "no artifact"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(ids: dict[str, str], name: str, code: str, word: str) -> None:
    bed = Bed()
    check = untouched(bed)
    artifact = ids.get(name, "0" * 12 + "-cpu-v2-fast-00000000")
    (refusal,) = bed.command(Verb.REQUEST_GERMINATION, artifact).refused
    assert refusal.code == code and word in refusal.reason
    check()


def test_an_untrusted_artifact_is_refused(own: Own, tmp_path: Path) -> None:
    library, ids = own
    path = tmp_path / "new.json"
    document = json.loads(library.blueprint_text(library.record(ids["lora"]).blueprint))
    document["params"]["a"]["init"]["std"] = 0.03
    path.write_text(json.dumps(document))
    from forge.service import compile_file

    (found,) = compile_file(path, targets=("cpu",), library=library)
    bed = Bed()
    check = untouched(bed)
    (refusal,) = bed.command(Verb.REQUEST_GERMINATION, found.artifact_id).refused
    assert refusal.code == "E1005" and "validated" in refusal.reason
    check()
    with pytest.warns(loader.UnvalidatedWarning):
        open_bed = Bed(allow_unvalidated=True)  # for development
        known = {"risk": 0.0, "confident": True, "latency_us": 1.0}
        open_bed.growth.measure("body/0", **known)
        assert open_bed.plant(found.artifact_id).applied[-1].target is S.TRAINING
    library.record_verdict(found.artifact_id, {"stages": []}, passed=True)
    (refusal,) = bed.command(Verb.REQUEST_GERMINATION, found.artifact_id).refused
    assert "risk not measured" in refusal.reason and "confident" in refusal.reason


def test_unknown_words_of_a_graft(ids: dict[str, str]) -> None:
    bed = Bed()
    check = untouched(bed)
    words: list[dict[str, Any]] = [{n: "x"} for n in ("operator", "curve", "objective", "isolate", "fossil")]
    for wrong in [*words, {"lr_scale": 0.0}, {"ramp_steps": -1}]:
        (refusal,) = bed.command(Verb.REQUEST_GERMINATION, ids["mlp"], graft=Graft(**wrong)).refused
        assert refusal.code == "E1013"
    check()


def test_commands_in_the_wrong_state_or_to_nobody(ids: dict[str, str]) -> None:
    bed = Bed()
    check = untouched(bed)
    bed.growth.submit(KasminaControlCommand("nowhere", 3, Verb.CULL))
    for verb in (Verb.PROMOTE, Verb.ADVANCE, Verb.CULL, Verb.CANCEL_GERMINATION, Verb.RELEASE, Verb.ROLLBACK):
        bed.send(verb, issuer=Issuer.OPERATOR)
    codes = sorted(r.code for r in bed.growth.commit().refused)
    assert codes == ["E1004"] * 6 + ["E1014"]
    check()


def test_a_command_is_carried_out_once(ids: dict[str, str]) -> None:
    bed = Bed()
    command = KasminaControlCommand("body", 0, Verb.REQUEST_GERMINATION, ids["mlp"])
    assert bed.growth.submit(command) and not bed.growth.submit(command)
    assert len([a for a in bed.growth.commit().applied if a.command_id == command.command_id]) == 1
    assert not bed.growth.submit(command)
    again = KasminaControlCommand.from_json(json.loads(json.dumps(command.to_json())))
    assert again == command and not bed.growth.submit(again)
    with pytest.raises(EsperError) as error:
        KasminaControlCommand.from_json({**command.to_json(), "command": "explode"})
    assert error.value.code == "E1013"


def test_a_forgotten_optimizer_step_is_noticed(ids: dict[str, str]) -> None:
    bed = Bed()
    bed.bring(ids["mlp"], "GRAFTING")
    with pytest.raises(EsperError) as error:
        bed.growth.commit()
    assert error.value.code == "E1009"


def test_a_journal_that_was_edited_or_cut(ids: dict[str, str], tmp_path: Path) -> None:
    bed = Bed(run_dir=tmp_path)
    bed.plant(ids["mlp"])
    bed.command(Verb.CANCEL_GERMINATION)
    path = tmp_path / "journal.jsonl"
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    edited, shuffled = text.replace("TRAINING", "GRAFTING", 1), [lines[1], lines[0], *lines[2:]]
    for damaged in (edited, "".join(lines[1:]), "".join(lines[:1] + lines[2:]), "".join(shuffled)):
        path.write_text(damaged)
        with pytest.raises(EsperError) as error:
            Journal(path)
        assert error.value.code == "E1011"
    for damaged in (b"3\n", b"\xff\n", b"[" * 100_000 + b"\n", text.encode() + b"\0\0\n"):
        path.write_bytes(damaged)
        with pytest.raises(EsperError) as error:
            Journal(path)
        assert error.value.code == "E1011"
    path.write_text(text + lines[0][:40])  # a kill while a line was written
    assert len(Journal(path).lines) == len(lines) and path.read_text() == text


def test_a_tombstone_is_not_lost_behind_one_that_a_kill_tore(tmp_path: Path) -> None:
    path = tmp_path / "tombstones.jsonl"
    Bans(path).bury("body/0", "a", 1, "for the test")
    path.write_bytes(path.read_bytes() + b'{"schema":"esper-tombstone/1"}\n' + path.read_bytes()[:20])
    Bans(path).bury("body/0", "b", 2, "for the test")
    assert [line["artifact"] for line in Bans(path).tombstones] == ["a", "b"]


def test_a_full_disk_is_logged_and_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, write = Journal(tmp_path / "journal.jsonl"), os.write
    journal.append("command", slot="a/0")

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:20])

    monkeypatch.setattr(os, "write", full)
    journal.append("command", slot="b/0")
    monkeypatch.undo()
    assert len(Journal(journal.path).lines) == 1 and len(journal.lines) == 2
    journal.append("command", slot="c/0")
    assert Journal(journal.path).lines == journal.lines and len(journal.lines) == 3
    (tmp_path / "journal.jsonl").unlink()  # by somebody else: the run knows what stood there
    journal.append("command", slot="d/0")
    assert Journal(journal.path).lines == journal.lines and len(journal.lines) == 4


def test_arms_leave_no_trace(ids: dict[str, str]) -> None:
    """With, without and snapshot are measured, and everything is to the bit as before."""
    bed = Bed(net(dropout=0.5))
    bed.bring(ids["mlp"], "EVALUATING")
    bed.step(5)
    check = untouched(bed)
    modes = [m.training for m in bed.model.modules()]

    def noisy(model: nn.Module) -> list[Tensor]:
        torch.rand(3)
        return [torch.tensor(v) for v in validate(model)]

    arms = bed.growth.arms("body/0", noisy)
    check()
    assert modes == [m.training for m in bed.model.modules()]
    assert len(arms.with_graft) == len(arms.without) == len(arms.snapshot) == 4
    assert arms.with_graft != arms.without != arms.snapshot
    assert {"ablation", "contribution", "latency_share"} <= set(bed.growth.evidence(bed.slot))
    assert LIMITS.contribution == 0.01
