"""Jobs side by side, each in a process of its own: what breaks, dies or hangs costs the others nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

Job = tuple[Callable[..., Any], Sequence[Any]]  # what can be pickled, and gives what JSON can hold
POLL_S = 0.1


def _one(path: str, call: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """What a process does: the answer, or why there is none, lands in a file that appears whole."""
    import torch

    torch.set_num_threads(1)
    try:
        told: dict[str, Any] = {"gave": call(*arguments)}
    except Exception as error:
        told = {"broke": f"{type(error).__name__}: {str(error)[:300]}"}
    draft = Path(f"{path}.part")
    draft.write_text(json.dumps(told), encoding="utf-8")
    draft.rename(path)


def together(
    jobs: Mapping[str, Job], workers: int, limit_s: float = 600.0
) -> tuple[dict[str, Any], dict[str, str]]:
    """What each job gave, and why the others did not; at most `workers` at a time, in the order of `jobs`.
    Whatever runs when `limit_s` are over is ended."""
    context = multiprocessing.get_context("spawn")
    waiting, running = list(jobs.items()), dict[str, BaseProcess]()
    end = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="esper-crowd-") as folder:
        paths = {name: os.path.join(folder, str(number)) for number, name in enumerate(jobs)}
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < workers:
                name, (call, arguments) = waiting.pop(0)
                process = context.Process(target=_one, args=(paths[name], call, tuple(arguments)))
                process.start()
                running[name] = process
            time.sleep(POLL_S)
            running = {name: process for name, process in running.items() if process.is_alive()}
        for process in running.values():
            process.kill()
            process.join()
        late = dict.fromkeys((*running, *dict(waiting)), f"not done after {limit_s:g} s")
        return _answers(paths, late)


def _answers(paths: Mapping[str, str], late: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    gave: dict[str, Any] = {}
    broke = dict(late)
    for name, path in paths.items():
        if os.path.exists(path):
            told = json.loads(Path(path).read_text(encoding="utf-8"))
            broke.pop(name, None)
            (broke if "broke" in told else gave)[name] = told.get("broke", told.get("gave"))
        else:
            broke.setdefault(name, "its process died")
    return gave, broke
