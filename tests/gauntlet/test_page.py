"""The HTML report: what it says, that it is self-contained and harmless, and that a browser draws it."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gauntlet import entries, page, plots
from gauntlet.cli import main
from gauntlet.entries import Entry
from gauntlet.report import UNMEASURED, WEP, StageReport, UrabraskValidationReport
from library.records import ArtifactRecord, VerdictRecord
from library.store import Library
from tests.faults import toys
from tests.gauntlet.conftest import put

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = "<script>alert(1)</script>\"'&"


def works(scale: float) -> dict[str, Any]:
    quantiles = [scale * (900 + 10 * at) for at in range(41)]
    return {"quantiles_us": quantiles, "process_medians_us": [1100 * scale] * 5, "median_us": 1100 * scale}


def report(artifact: str, *, passed: bool = True, reason: str = "", **wep: Any) -> dict[str, Any]:
    stages = (
        StageReport("numerics", "passed" if passed else "failed", 1.0, reason,
                    metrics={"tolerance_used": 0.4} if passed else {"margin": 7.0}),
        StageReport("measurement", "passed", 9.0, metrics={
            "dims": {"rows": 64}, "processes": 5, "works": {"both": works(1), "eager both": works(2)}}),
    )  # fmt: skip
    profile = WEP(
        latency_ms_median=1.1, latency_interval_ms=(1.0, 1.2), latency_ms_p99=1.3, both_ms_median=1.1,
        eager_both_ms_median=2.2, flops=1e8, bytes_moved=1e6, bandwidth_bytes_per_s=1e10,
        peak_flops_per_s=1e11, memory_mb_peak=2.0, workspace_bytes=5e5, roofline_share=0.9, variance=0.01,
        conditions="steady", op_class="product",
    )  # fmt: skip
    hardware = {"card": "a card", "torch": "2.13"}
    made = UrabraskValidationReport(
        artifact, passed, reason, stages, WEP.of({**vars(profile), **wep}), hardware, 1.7e9, 10.0,
        baseline_comparison={"both": 50.0},
    )  # fmt: skip
    return made.to_json()


def entry(name: str = "block", count: int = 1, **options: Any) -> Entry:
    artifact = f"{name}-id"
    state = "VALIDATED" if options.get("passed", True) else "REJECTED"
    record = ArtifactRecord(
        artifact, "d", 1, "b", name, "cpu", "cpu", "v3", "fast", "v", "", "", "", state, "", "", "", 0.0, 1
    )
    verdicts = tuple(
        VerdictRecord(artifact, "v3", "card", state, "", "k", 1.7e9 + at, at, report(artifact, **options))
        for at in range(count)
    )
    said = {"generated_tags": ["high_speed"], "conf_level": "Moderate", "urabrask_interest": 0.25}
    notes = tuple({"version": at + 1, "time": 1.7e9, "annotation": said} for at in range(count))
    return Entry(record, verdicts, notes, {"gcc": "12"})


class Checker(HTMLParser):
    """Tags balance, and nothing is fetched or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert tag not in ("script", "link", "img", "iframe", "object")
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "srcset")
            assert name != "href" or (value or "").startswith("#")
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    assert not checker.open and "url(" not in text and "@import" not in text
    return checker


def test_it_says_which_list_of_cases_it_was() -> None:
    full, quick = entry(), entry()
    for found, cases in ((full, "full"), (quick, "quick")):
        found.verdicts[-1].report["hardware_context"]["cases"] = cases
    short = "proven by the short list of cases"
    assert short in page.page([quick], "") and short not in page.page([full], "")


def test_it_says_what_was_found() -> None:
    bad = entry("broken", passed=False, reason="numerics: y at rows=7: off by 3", power_watts_avg=300.0)
    text = page.page([entry(count=2), bad], "A title")
    seen = checked(text).seen
    assert seen.count("details") == 2 and seen.count("polyline") >= 8 and "circle" in seen
    wanted = ("A title", "1 REJECTED, 1 VALIDATED", "off by 3", "+50 %", "1 to 1.2", "high_speed", "Moderate")
    for words in (*wanted, "a card", "History", "Tags over time", "gcc 12", "300 W", UNMEASURED):
        assert words in text, words
    assert '<rect class="bar bad"' in text, "an error over its bound stands out"


def test_hostile_texts_are_only_text() -> None:
    text = page.page([entry(EVIL, reason=EVIL, conditions=EVIL)], EVIL, EVIL)
    checked(text)
    assert "<script" not in text and "&lt;script&gt;" in text


def test_an_odd_report_costs_its_own_place_only() -> None:
    odd = entry("odd", latency_interval_ms=[None, {}])
    odd.verdicts[-1].report["stages"][1]["metrics"]["works"] = {"both": {"quantiles_us": "x"}}
    text = page.page([entry(), odd], "t")
    checked(text)
    assert text.count("cannot be drawn") == 1 and "<h1>t</h1>" in text and "block-id" in text


def test_without_any_measurement() -> None:
    names = [f for f in WEP.__dataclass_fields__ if f not in ("shapes", "conditions", "op_class", "dtype")]
    bare: dict[str, Any] = dict.fromkeys(names, UNMEASURED)
    checked(page.page([entry(**bare)], "t"))
    checked(page.page([], "t"))
    assert "nothing was judged yet" in page.page([], "t")


@pytest.mark.parametrize("value", [0.0, 1e-9, 1.0, 1e12])
def test_plots_hold_any_positive_numbers(value: float) -> None:
    assert "NaN" not in plots.distributions({"a": ("own", [value, value * 3])}, [value or 1.0])
    assert "<rect" in plots.bars([("a", value, "a", "own")], "ms", mark=1.0)
    assert plots.history([("a", value, value, value), ("b", 2 * value, value, 3 * value)])
    if value:
        assert "<circle" in plots.roofline([("a", value, value, True)], 1e10, 1e12)


def test_ticks_are_round() -> None:
    assert plots.Axis(0, 11.5, 0, 1).ticks() == [0, 5, 10]
    assert plots.Axis(0.8, 240, 0, 1, log=True).ticks() == [1, 10, 100]
    assert plots.number(0.00012) == "1e-4" and plots.number(12345) == "12345"


def test_command_names_a_damaged_report(home: Path, tmp_path: Path) -> None:
    with Library.open(home, roles=("compiler", "validator")) as library:
        good, bad = put(home, toys.affine()), put(home, toys.norm())
        library.record_verdict(good, report(good), passed=True)
        library.record_verdict(bad, {"policy": "p", "wep": 3}, passed=True)
        assert [e.record.id for e in entries.read(library) if e.problem] == [bad]
    out = tmp_path / "out.html"
    run = CliRunner().invoke(main, ["report", "--html", str(out), "--library", str(home)])
    assert run.exit_code == 1 and bad in run.stderr
    text = out.read_text()
    checked(text)
    assert "E0910" in text and good in text
    only = CliRunner().invoke(main, ["report", good, "--html", str(out), "--json", "--library", str(home)])
    assert only.exit_code == 0 and '"artifacts": 1' in only.stdout
    nowhere = CliRunner().invoke(main, ["report", "--html", "/nowhere/x.html", "--library", str(home)])
    assert nowhere.exit_code == 1 and "E0913" in nowhere.stderr and "x.html" in nowhere.stderr
    annotated = CliRunner().invoke(main, ["annotate", "--library", str(home)])
    assert annotated.exit_code == 1 and good in annotated.stdout and "E0910" in annotated.stderr


@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: the page was NOT drawn (apt install chromium)"
)
def test_a_browser_draws_it(tmp_path: Path) -> None:
    text = page.page([entry(count=2), entry("broken", passed=False, reason="off")], "Drawn")
    place, shot = tmp_path / "page.html", tmp_path / "shot.png"
    place.write_text(text.replace("<details ", "<details open "), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/u"]
    size = "--window-size=1300,1800"
    subprocess.run([*command, size, f"--screenshot={shot}", place.as_uri()], check=True, capture_output=True,
                   timeout=120)  # fmt: skip
    dumped = subprocess.run(
        [*command, "--dump-dom", place.as_uri()], check=True, capture_output=True, timeout=120
    )
    assert dumped.stdout.decode().count("<svg") == text.count("<svg") > 6
    image = pytest.importorskip("PIL.Image", reason="no pillow here: the picture was NOT looked at")
    with image.open(shot) as drawn:
        assert drawn.size == (1300, 1800)
        colours = drawn.convert("RGB").getcolors(1 << 20)
    assert colours is not None
    seen = {colour for count, colour in colours if count > 20}
    wanted = dict(re.findall(r"--(own|eager|bad):#([0-9a-f]{6})", text)[:3])
    for name, value in wanted.items():
        assert tuple(bytes.fromhex(value)) in seen, f"nothing is drawn in the colour of {name}"
