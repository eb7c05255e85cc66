"""Events on a bus and in files, the board over them, the TensorBoard writer, the configuration."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from esper_ir.diagnostics import EsperError
from runtime.cli import main
from runtime.seeds.events import EventFile, EventReader, LocalBus, plain
from runtime.seeds.facts import Event
from runtime.seeds.lifecycle import Lifecycle, Limits
from runtime.strategy.board import Board, bar, sparkline, watch
from runtime.strategy.running import _began, gone, process
from runtime.strategy.settings import Settings, settings_of

ROW = {
    "slot": "blocks.1/0", "state": "GRAFTING", "alpha": 0.5, "round": 1,
    "artifact": "82a0b99e4082-cpu-v4-fast-0",
    "grafts": 0, "score": 4.5,
    "health": {"effective_rank": 0.07, "dead_node_ratio": 0.0, "predicted_gain": 0.02},
}  # fmt: skip


def write_run(folder: Path, finished: bool = True) -> None:
    bus = LocalBus()
    bus.subscribe(EventFile(folder))
    for epoch, loss in enumerate((2.0, 1.0, 0.5)):
        facts = {
            "validation_loss": loss,
            "validation_accuracy": 70.0 + epoch,
            "slots": [ROW],
            "slots_total": 4,
        }
        bus.publish(Event("EPOCH", epoch, 10 * epoch, "", facts))
    bus.publish(
        Event("SEED_STAGE_CHANGED", 2, 30, "blocks.1/0", {"source": "TRAINING", "target": "GRAFTING"})
    )
    bus.publish(Event("SEED_FOSSILIZED", 2, 30, "blocks.1/0", {"artifact": "82a0b99e4082-cpu-v4-fast-0"}))
    if finished:
        bus.publish(Event("RUN_FINISHED", 2, 30))


# -- events


def test_a_listener_that_raises_is_heard_no_more_and_the_others_are() -> None:
    bus, heard = LocalBus(), []

    def broken(event: Event) -> None:
        raise RuntimeError(event.kind)

    bus.subscribe(broken)
    stop = bus.subscribe(lambda e: heard.append(e.kind))
    bus.publish(Event("A", 0, 0))
    bus.publish(Event("B", 0, 0))
    stop()
    bus.publish(Event("C", 0, 0))
    assert heard == ["A", "B"]


def test_events_are_json_whatever_they_hold(tmp_path: Path) -> None:
    assert plain({"a": math.nan, "b": (1, Lifecycle.DORMANT), 3: Path("x")}) == {
        "a": None, "b": [1, Lifecycle.DORMANT.value], "3": "x"
    }  # fmt: skip
    EventFile(tmp_path)(Event("A", 1, 2, "s/0", {"loss": math.inf}))
    (line,) = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["facts"] == {"loss": None} and json.loads(line)["schema"] == "esper-event/1"


def test_a_reader_gives_each_event_once_and_waits_for_a_torn_line(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert list(reader.read()) == []
    write_run(tmp_path)
    assert len(list(reader.read())) == 6 and list(reader.read()) == []
    with reader.path.open("ab") as file:
        file.write(b'{"schema": "esper-event/1", "kind": "LA')
    assert list(reader.read()) == []
    with reader.path.open("ab") as file:
        file.write(b'TE"}\nno json\n{"schema": "other"}\n')
    assert [e["kind"] for e in reader.read()] == ["LATE"]


def test_what_cannot_be_written_does_not_stop_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = EventFile(tmp_path)
    file.path.mkdir()  # not writable, also for root
    for _ in range(3):
        file(Event("A", 0, 0))
    assert sum("events are not written" in r.message for r in caplog.records) == 1


# -- the board


def test_the_board_shows_slots_stages_alphas_and_health(tmp_path: Path) -> None:
    write_run(tmp_path)
    console = Console(record=True, width=140, file=(tmp_path / "screen").open("w", encoding="utf-8"))
    board = watch(tmp_path, console)
    text = console.export_text()
    for wanted in ("blocks.1/0", "GRAFTING", "0.50", "82a0b99e4082", "4.5", "0.07", "fossilised 1",
                   "finished",
                   "validation loss 0.5000", "accuracy 72.00 %", "SEED_FOSSILIZED", "slots (4)"):  # fmt: skip
        assert wanted in text, wanted
    assert board.losses == [2.0, 1.0, 0.5] and board.state == "finished"


def test_names_in_events_cannot_steer_the_terminal(tmp_path: Path) -> None:
    board = Board()
    board.take({"kind": "EPOCH", "epoch": 0, "facts": {"slots": [{**ROW, "slot": "a\x1b[2Jb/0"}]}})
    board.take({"kind": "SEED_FAULT", "epoch": 0, "slot": "x", "facts": {"reason": "\x1b]0;owned\x07"}})
    console = Console(record=True, width=140, file=(tmp_path / "screen").open("w", encoding="utf-8"))
    console.print(board.render())
    text = console.export_text()
    assert "\x1b" not in text and "owned" in text


def test_watch_from_the_command_line(tmp_path: Path) -> None:
    write_run(tmp_path, finished=False)  # no terminal: printed once although the run goes on
    done = CliRunner().invoke(main, ["watch", str(tmp_path)])
    assert done.exit_code == 0 and "GRAFTING" in done.output and "running" in done.output
    done = CliRunner().invoke(main, ["watch", str(tmp_path), "--json"])
    assert json.loads(done.stdout)["schema"] == "esper-watch/1" and json.loads(done.stdout)["epoch"] == 2
    done = CliRunner().invoke(main, ["watch", str(tmp_path / "none"), "--json"])
    assert done.exit_code == 10 and json.loads(done.stdout)["error"]["code"] == "E1034"


def test_the_board_tells_how_a_run_ended(tmp_path: Path) -> None:
    board = Board()

    def take(kind: str, **facts: Any) -> str:
        board.take({"kind": kind, "epoch": 1, "facts": facts})
        return board.state

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = {**process(), "pid": child.pid, "began": _began(child.pid)}
    assert take("RUN_STARTED", run="a", **began) == "running"
    assert take("RUN_STARTED", run="b", **began) == "running"
    assert take("RUN_FINISHED", run="a") == "running", "another took its place"
    assert take("RUN_FAILED", run="b", reason="ValueError: no\x1b[2J") == "failed"
    console = Console(record=True, width=140, file=(tmp_path / "screen").open("w", encoding="utf-8"))
    console.print(board.render())
    assert "failed: ValueError: no" in (shown := console.export_text()) and "\x1b" not in shown
    assert take("EPOCH") == "running", "it goes on"
    child.kill()
    while not gone(began):  # killed, and not even waited for
        pass
    assert board.state == "stale" == board.to_json()["state"]
    child.wait()
    assert board.state == "stale" and not gone({**began, "host": "elsewhere"}) and not gone({})
    assert gone({**process(), "began": "1"}), "another process has its number now"
    console.print(board.render())
    assert f"stale: process {child.pid} is gone" in console.export_text()
    assert take("RUN_FINISHED") == "finished"


ENDS = """
import os, sys, torch, runtime
def grown():
    model = runtime.wrap(torch.nn.Sequential(torch.nn.Linear(4, 4)), "0")
    runtime.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    return runtime.TamiyoController(model, policy="off", run_dir=sys.argv[1])
tamiyo = grown()
"""


@pytest.mark.parametrize(
    ("how", "state", "reason"),
    [
        ("", "finished", ""),
        ("with tamiyo: raise ValueError('in a block')", "failed", "ValueError: in a block"),
        ("raise ValueError('no data\\nmore')", "failed", "ValueError: no data"),
        ("if os.fork() == 0: sys.exit()\nos.wait()\nos.kill(os.getpid(), 9)", "stale", ""),
    ],
)
def test_a_run_says_its_end_though_nobody_closes_it(
    ids: dict[str, str], tmp_path: Path, how: str, state: str, reason: str
) -> None:
    subprocess.run([sys.executable, "-c", ENDS + how, str(tmp_path)], timeout=120, stderr=subprocess.DEVNULL)
    shown = CliRunner().invoke(main, ["watch", str(tmp_path), "--json"])
    found = json.loads(shown.stdout)
    assert (found["state"], found["reason"]) == (state, reason)
    ends = sum(found["counts"].get(kind, 0) for kind in ("RUN_FINISHED", "RUN_FAILED"))
    assert ends == (state != "stale")


def test_bars_and_sparklines() -> None:
    assert bar(0.0) == "" and bar(None) == "" and bar(1.0) == "█" * 10 + " 1.00"
    assert sparkline([1.0]) == "" and sparkline([2.0, 2.0]) == "" and sparkline([0.0, 1.0]) == "▁█"


# -- TensorBoard


def test_scalars_are_written_for_tensorboard(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed (the extra `growth`)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from runtime.strategy.tensorboard import TensorBoardWriter

    writer = TensorBoardWriter(tmp_path)
    writer(Event("EPOCH", 3, 0, "", {"validation_loss": 0.5, "validation_accuracy": None, "slots": [ROW]}))
    writer(Event("SEED_CULLED", 3, 0, "blocks.1/0", {"reason": "x"}))
    writer(Event("RUN_FINISHED", 3, 0))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    tags = found.Tags()["scalars"]
    assert found.Scalars("growth/validation_loss")[0].value == pytest.approx(0.5)
    assert {"slots/blocks.1/0/alpha", "slots/blocks.1/0/effective_rank"} <= set(tags)


def test_without_tensorboard_the_refusal_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from runtime.strategy.tensorboard import TensorBoardWriter

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(EsperError) as refused:
        TensorBoardWriter(tmp_path)
    assert refused.value.code == "E1035"


# -- the configuration

YAML = """
policy: random
plateau: {window: 6}
query:
  required: [trainable]
  latency_budget_ms: 2
limits: {concurrent: 2, speculative: true}
schedule:
  - {epoch: 3, slot: a/0}
"""


def test_a_yaml_file_is_read_into_one_record(tmp_path: Path) -> None:
    path = tmp_path / "growth.yaml"
    path.write_text(YAML, encoding="utf-8")
    found = settings_of(path)
    assert (found.policy, found.plateau.window, found.query.required) == ("random", 6, ("trainable",))
    assert found.query.latency_budget_ms == 2.0 and found.limits == Limits(concurrent=2, speculative=True)
    assert found.schedule[0].slot == "a/0" and found.plateau.warmup == Settings().plateau.warmup
    path.write_text("", encoding="utf-8")
    assert settings_of(path) == Settings() == settings_of(None) == settings_of({})


@pytest.mark.parametrize(
    ("given", "where", "told"),
    [
        ({"polcy": "off"}, "configuration", "did you mean policy"),
        ({"plateau": {"windw": 3}}, "plateau", "did you mean window"),
        ({"limits": {"trust_radios": 0.1}}, "limits", "did you mean trust_radius"),
        ({"policy": "heuristics"}, "policy", "did you mean heuristic"),
        ({"graft": {"operator": "plus"}}, "graft.operator", "lerp"),
        ({"plateau": {"window": "3"}}, "plateau.window", "must be int"),
        ({"plateau": {"window": True}}, "plateau.window", "must be int"),
        ({"plateau": {"window": 0}}, "plateau.window", "at least 1"),
        ({"plateau": 3}, "plateau", "must be a mapping"),
        ({"query": {"required": "trainable"}}, "query.required", "must be a list"),
        ({"schedule": [{"epoch": 1}]}, "schedule[0]", "slot"),
        ({"sites": {"min_score": math.nan}}, "sites.min_score", "NaN"),
        ({"sites": {"min_score": math.inf}}, "sites.min_score", "finite"),
        ({"sites": {"min_score": 10**400}}, "sites.min_score", "finite"),
        ({"sites": {"memory": 1.5}}, "sites.memory", "at most 1"),
        ({"random_chance": -0.1}, "random_chance", "at least 0"),
        ({"graft": {"lr_scale": 0}}, "graft.lr_scale", "at least"),
        ([1], "configuration", "must be a mapping"),
    ],
)
def test_bad_settings_are_refused_by_name(given: Any, where: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "growth.yaml"
    text = json.dumps(given)  # JSON is YAML, but for these
    path.write_text(text.replace("NaN", ".nan").replace("Infinity", ".inf"), encoding="utf-8")
    with pytest.raises(EsperError) as refused:
        settings_of(path)
    assert refused.value.code == "E1030" and refused.value.node == where and told in str(refused.value)


def test_the_bare_word_off_and_a_key_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "growth.yaml"
    path.write_text("policy: off\n", encoding="utf-8")  # a truth value to YAML
    assert settings_of(path).policy == "off"
    path.write_text("seed: 3\nplateau:\n  window: 3\n  window: 4\n", encoding="utf-8")
    with pytest.raises(EsperError) as refused:
        settings_of(path)
    assert refused.value.code == "E1030" and "twice" in refused.value.message


def test_files_that_are_not_there_or_no_yaml(tmp_path: Path) -> None:
    for text in (None, "a: [1", "a: !!python/object:os.system {}"):
        path = tmp_path / "growth.yaml"
        if text is not None:
            path.write_text(text, encoding="utf-8")
        with pytest.raises(EsperError) as refused:
            settings_of(path)
        assert refused.value.code == "E1030"


def test_importing_runtime_stays_light() -> None:
    code = (
        "import sys, runtime; heavy = {'yaml', 'rich', 'tensorboard', 'lightning', 'transformers', 'torch',"
        " 'runtime.controller'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
