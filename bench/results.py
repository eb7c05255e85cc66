"""The results file: one JSON document per bench and run, written by the harness and read by everything
else."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from runtime import system

SCHEMA = "esper-bench/1"
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
REFERENCE_COPY_TBPS = 4.25  # of the H200 on which the targets in milliseconds were set


def figure(
    value: float | None, unit: str, target: float | None = None, *, at_least: bool = False, **more: Any
) -> dict[str, Any]:
    """One figure; `met` compares with the target: at most it, or at least it. Not measured: value None."""
    met = None
    if target is not None and value is not None:
        met = value >= target if at_least else value <= target
    found = {"value": value, "unit": unit, "target": target, "met": met}
    return {**found, **({"at_least": True} if at_least else {}), **more}


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def commit() -> tuple[str, bool]:
    """(commit, whether the working tree differs from it): ESPER_COMMIT and ESPER_DIRTY where there is no
    git."""
    given = os.environ.get("ESPER_COMMIT")
    if given:
        return given, os.environ.get("ESPER_DIRTY", "0") != "0"
    try:
        head = _git("rev-parse", "HEAD")
        return head, bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def header(bench: str, ceilings: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Everything of a document but rows and figures."""
    cuda = torch.cuda.is_available()
    driver = system.cuda_driver() if cuda else None
    head, dirty = commit()
    return {
        "schema": SCHEMA,
        "bench": bench,
        "commit": head,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "card": torch.cuda.get_device_name() if cuda else "cpu",
        "host": {"cores": os.cpu_count(), "processor": processor()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": version("triton"),
            "liger": version("liger-kernel"),
            "driver": str(driver.version) if driver else "",
        },
        "ceilings": dict(ceilings or {}),
    }


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def short_card(card: str) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "h100"."""
    found = re.search(r"\b([A-Z]{1,2}\d{2,3}[A-Z]?)\b", card)
    return found[1].lower() if found else re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def file_name(document: Mapping[str, Any]) -> str:
    """`part` of a document, where it has one, tells those of one bench and commit apart."""
    words = [document["bench"], document["date"][:10], short_card(document["card"]), document["commit"][:7]]
    return "-".join([*words, *([document["part"]] if document.get("part") else [])]) + ".json"


def write(document: Mapping[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(document)
    part = path.with_suffix(".part")  # whoever is stopped while writing leaves the file as it was
    part.write_text(json.dumps(plain(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return part.replace(path)


def plain(value: Any) -> Any:
    """JSON data with at most seven digits and no infinities."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def read(path: Path | str) -> dict[str, Any]:
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a results file ({document.get('schema')!r})")
    return document


def newest(bench: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The newest document of a bench per card, cards in order of their names."""
    latest: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(f"{bench}-*.json")):
        document = read(path)
        if document["date"] >= latest.get(document["card"], document)["date"]:
            latest[document["card"]] = document
    return [latest[card] for card in sorted(latest)]


def geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(v) for v in values if v and v > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None
