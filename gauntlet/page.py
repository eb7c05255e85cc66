"""The report of a library as one self-contained HTML file: no scripts, nothing to fetch.

Every text comes from artifacts and is escaped; every number that was not measured says so.
"""

from __future__ import annotations

import html
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gauntlet import plots
from gauntlet.entries import Entry
from gauntlet.peers import number as measured
from gauntlet.plots import number
from gauntlet.report import UNMEASURED
from gauntlet.style import STYLE

COLUMNS = (
    "artifact", "verdict", "class", "median ms", "p99 ms", "gain over eager", "of the roofline",
    "error / bound", "peak MB", "variance", "tags", "risk", "interest",
)  # fmt: skip
PALETTE = {"both": "own", "eager both": "eager", "compile both": "compile", "forward": "own",
           "eager forward": "eager", "compile forward": "compile"}  # fmt: skip
NAMES = {"own": "this artifact", "eager": "eager", "compile": "torch.compile"}


def page(entries: Sequence[Entry], title: str, note: str = "") -> str:
    """The document. `note`: a line under the title, such as what measured it."""
    states = Counter(e.record.state for e in entries)
    counts = ", ".join(f"{n} {state}" for state, n in sorted(states.items())) or "nothing was judged yet"
    parts = [
        f"<h1>{_t(title)}</h1>",
        f'<p class="soft">{len(entries)} artifacts: {_t(counts)}. {_t(note)}</p>',
        _problems(entries),
        '<div class="scroll"><table><thead><tr>'
        + "".join(_head(c) for c in COLUMNS)
        + "</tr></thead><tbody>",
        *(_shown(_row, f"<tr><td colspan={len(COLUMNS)}>{{}}</td></tr>", e) for e in entries),
        "</tbody></table></div>",
        "<h2>Each artifact</h2>",
        *(_shown(_details, "<p>{}</p>", e, entries) for e in entries),
    ]
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_t(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>{''.join(parts)}"
        f'<p class="soft">Written {made} by esper-gauntlet report.</p>'
        "</main></body></html>\n"
    )


def _shown(draw: Callable[..., str], otherwise: str, entry: Entry, *rest: Any) -> str:
    """What `draw` makes of an entry; an odd report costs its own place on the page and no other."""
    try:
        return draw(entry, *rest)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        told = f"{entry.record.id}: its report cannot be drawn: {type(error).__name__}: {error}"
        return otherwise.format(f"<span class=bad>{_t(told)}</span>")


def _t(text: Any) -> str:
    return html.escape(str(text), quote=True)


NUMERIC = (*COLUMNS[3:10], COLUMNS[-1])


def _head(name: str) -> str:
    return f"<th{' class=n' if name in NUMERIC else ''}>{_t(name)}</th>"


def _problems(entries: Iterable[Entry]) -> str:
    rows = [f"<li><code>{_t(e.record.id)}</code> {_t(e.problem)}</li>" for e in entries if e.problem]
    return f'<p class="bad">Cannot be read:</p><ul>{"".join(rows)}</ul>' if rows else ""


def _row(entry: Entry) -> str:
    record = entry.record
    name = f'<a href="#{_t(record.id)}">{_t(record.name)}</a><br><code class="soft">{_t(record.id)}</code>'
    wep = entry.report["wep"] if entry.report else {}
    numbers = (
        _n(entry.of("latency_ms_median"), _span(entry.report)), _n(entry.of("latency_ms_p99")),
        _gain(entry), _percent(entry.of("roofline_share")), _n(entry.of("tolerance_used")),
        _n(entry.of("memory_mb_peak")), _percent(entry.of("variance")),
    )  # fmt: skip
    state, kind = _t(record.state), _t(wep.get("op_class", "-"))
    interest = _n(_float(entry.annotation.get("urabrask_interest")))
    cells = [f"<td>{name}</td><td class={state}>{state}</td><td>{kind}</td>", *map(_cell, numbers)]
    cells.append(f"<td class=tags>{_tags(entry)}</td><td>{_risk(entry)}</td>{_cell(interest)}")
    return f"<tr>{''.join(cells)}</tr>"


def _cell(inner: str) -> str:
    """Of a number."""
    return f"<td class=n>{inner}</td>"


def _absent() -> str:
    return f"<span class=soft>{UNMEASURED}</span>"


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _n(value: float | None, span: Sequence[float] = ()) -> str:
    if value is None:
        return _absent()
    between = f"{number(span[0])} to {number(span[1])}" if span else ""
    return number(value) + (f"<br><span class=soft>{between}</span>" if between else "")


def _percent(value: float | None) -> str:
    return _absent() if value is None else f"{100 * value:.3g} %"


def _gain(entry: Entry) -> str:
    gains = entry.report["baseline_comparison"] if entry.report else {}
    value = _float(gains.get("both", gains.get("forward")))
    return _absent() if value is None else f"{value:+.3g} %"


def _tags(entry: Entry) -> str:
    return "".join(f"<span class=tag>{_t(tag)}</span>" for tag in entry.tags)


def _risk(entry: Entry) -> str:
    said = entry.annotation
    score = _float(said.get("risk_score"))
    told = "no score" if score is None else f"{score:.3g} ({_t(said.get('risk_basis', '-'))})"
    return f"{told}<br><span class=soft>{_t(said.get('conf_level', 'Speculative'))}</span>"


def _details(entry: Entry, entries: Sequence[Entry]) -> str:
    record = entry.record
    state, code = _t(record.state), f"<code>{_t(record.id)}</code>"
    head = f"<summary><span class={state}>{state}</span> {_t(record.name)} {code}</summary>"
    opened = " open" if record.state != "VALIDATED" else ""
    if entry.problem or not entry.report:
        body = f"<p class=bad>{_t(entry.problem or 'no verdict')}</p>"
    else:
        reason = entry.report.get("reason")
        body = (f"<p class=bad>{_t(reason)}</p>" if reason else "") + _conditions(entry)
        body += f'<div class="grid-of">{"".join(_figures(entry, entries))}</div>{_stages(entry)}'
    return (
        f'<details id="{_t(record.id)}"{opened}>{head}<div>{body}{_history(entry, entries)}</div></details>'
    )


def _conditions(entry: Entry) -> str:
    report, found = entry.report or {}, entry.measurement
    context = report.get("hardware_context", {})
    dims = ", ".join(f"{k}={v}" for k, v in found.get("dims", {}).items())
    said = str(report["wep"].get("conditions", UNMEASURED))
    kind = "soft" if said in ("steady", UNMEASURED) else "warn"
    facts = [context.get("card", ""), f"torch {context.get('torch', '-')}", dims and f"at {dims}",
             "proven by the short list of cases" if context.get("cases") == "quick" else "",
             f"{found.get('processes', 0)} processes",
             f"{report['wep'].get('samples', 0)} samples"]  # fmt: skip
    told = ", ".join(str(fact) for fact in facts if fact)
    return f"<p class=soft>{_t(told)}. Conditions: <span class={kind}>{_t(said)}</span></p>"


def _figures(entry: Entry, entries: Sequence[Entry]) -> Iterable[str]:
    pictures = {
        "Latency: share of calls that took at most so long": _latency(entry),
        "Roofline: measured ceilings, all artifacts of this hardware": _roofline(entry, entries),
        "Median per phase": _phases(entry),
        "Error over its bound, worst case of each stage": _errors(entry),
        "Memory": _memory(entry),
        "Power": _power(entry),
    }
    for title, picture in pictures.items():
        inner = picture or f"<p class=soft>{UNMEASURED}</p>"
        yield f"<figure><h3>{_t(title)}</h3>{inner}</figure>"


def _latency(entry: Entry) -> str:
    works, medians = entry.measurement.get("works", {}), []
    rows = {}
    primary = "both" if "both" in works else "forward"
    for name in (primary, f"eager {primary}", f"compile {primary}"):
        if name in works:
            kind = PALETTE[name]
            rows[NAMES[kind]] = (kind, [q / 1e3 for q in works[name]["quantiles_us"]])
    if primary in works:
        medians = [m / 1e3 for m in works[primary]["process_medians_us"]]
    return plots.distributions(rows, medians)


def _roofline(entry: Entry, entries: Sequence[Entry]) -> str:
    bandwidth, peak = entry.of("bandwidth_bytes_per_s"), entry.of("peak_flops_per_s")
    own = _place(entry)
    if not bandwidth or not peak or own is None:
        return ""
    same = [e for e in entries if e.report and _card(e) == _card(entry) and e is not entry]
    others = [place for place in map(_place, same) if place is not None]
    points = [(*p, False) for p in others] + [(*own, True)]
    return plots.roofline(points, bandwidth, peak)


def _card(entry: Entry) -> str:
    return str((entry.report or {}).get("hardware_context", {}).get("card", ""))


def _place(entry: Entry) -> tuple[str, float, float] | None:
    flops, moved, ms = (entry.of(n) for n in ("flops", "bytes_moved", "latency_ms_median"))
    return (entry.record.name, flops / moved, flops / ms * 1e3) if flops and moved and ms else None


def _phases(entry: Entry) -> str:
    rows = []
    for phase in ("forward", "backward", "both"):
        for prefix, kind in (("", "own"), ("eager_", "eager"), ("compile_", "compile")):
            value = entry.of(f"{prefix}{phase}_ms_median")
            if value is not None:
                name = f"{phase}, {'this' if kind == 'own' else NAMES[kind]}"
                rows.append((name, value, f"{number(value)} ms", kind))
    return plots.bars(rows, "ms")


def _errors(entry: Entry) -> str:
    rows = []
    for stage in (entry.report or {}).get("stages", ()):
        used = _float(stage["metrics"].get("tolerance_used", stage["metrics"].get("margin")))
        if used is not None:
            rows.append((stage["name"], used, number(used), "bad" if used > 1 else "own"))
    return plots.bars(rows, "error over bound (1 is the bound)", mark=1.0)


def _memory(entry: Entry) -> str:
    wanted = (("has to move", "bytes_moved", 1.0), ("peak of a call", "memory_mb_peak", 1e6),
              ("workspace", "workspace_bytes", 1.0))  # fmt: skip
    rows = []
    for name, key, scale in wanted:
        value = entry.of(key)
        if value is not None:
            rows.append(
                (
                    name,
                    value * scale / 1e6,
                    f"{number(value * scale / 1e6)} MB",
                    "own" if scale > 1 else "soft",
                )
            )
    return plots.bars(rows, "MB")


def _power(entry: Entry) -> str:
    wanted = (("on average", "power_watts_avg", "own"), ("idle", "power_watts_idle", "soft"))
    rows = [(n, v, f"{number(v)} W", kind) for n, key, kind in wanted if (v := entry.of(key)) is not None]
    return plots.bars(rows, "W")


def _stages(entry: Entry) -> str:
    rows = []
    for stage in (entry.report or {}).get("stages", ()):
        kind = {"passed": "VALIDATED", "failed": "REJECTED"}.get(stage["outcome"], "soft")
        name, outcome, reason = (_t(stage[key]) for key in ("name", "outcome", "reason"))
        cases, seconds = _t(stage["metrics"].get("cases", "")), f"{stage['seconds']:.2f} s"
        first = f"<td>{name}</td><td class={kind}>{outcome}</td>{_cell(seconds)}{_cell(cases)}"
        rows.append(f"<tr>{first}<td>{reason}</td></tr>")
    head = "<tr><th>stage</th><th>outcome</th><th class=n>time</th><th class=n>cases</th><th>reason</th></tr>"
    return f"<h2>Stages</h2>{_table(head, rows)}"


def _table(head: str, rows: Iterable[str]) -> str:
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def _history(entry: Entry, entries: Sequence[Entry]) -> str:
    """Verdicts over this artifact and over what else was compiled from its blueprint for its target."""
    own = (entry.record.blueprint, entry.record.target)
    kin = [e for e in entries if (e.record.blueprint, e.record.target) == own]
    told = sorted(((v, e) for e in kin for v in e.verdicts), key=lambda pair: pair[0].time)
    rows, points = [], []
    for verdict, one in told:
        context = verdict.report.get("hardware_context", {})
        median, span = measured(verdict.report, "latency_ms_median"), _span(verdict.report)
        what = (
            _when(verdict.time),
            one.record.id,
            one.record.pipeline,
            verdict.result,
            context.get("torch", "-"),
        )
        cells = [f"<td>{_t(c)}</td>" for c in (*what, _toolchain(one))]
        rows.append(f"<tr>{''.join(cells)}{_cell(_n(median, span))}</tr>")
        if median is not None and span:
            points.append((f"{what[0]} {one.record.id}", median, *span))
    if not rows:
        return ""
    heads = ("when", "artifact", "pipeline", "verdict", "torch", "compiler")
    head = "<tr>" + "".join(f"<th>{h}</th>" for h in heads) + "<th class=n>ms</th></tr>"
    picture = plots.history(points)
    drawn = f"<figure class=half>{picture}</figure>" if picture else ""
    return f"<h2>History</h2>{drawn}{_table(head, rows)}{_versions(entry)}"


def _span(report: Mapping[str, Any] | None) -> list[float]:
    span = report["wep"].get("latency_interval_ms") if report else None
    known = [_float(v) for v in span] if isinstance(span, list) else []
    return [v for v in known if v is not None] if len(known) == 2 and None not in known else []


def _toolchain(entry: Entry) -> str:
    """Names and versions; what is longer (flags) stands in the artifact's provenance."""
    return ", ".join(f"{k} {v}" for k, v in sorted(entry.toolchain.items()) if len(v) <= 48)


def _versions(entry: Entry) -> str:
    if len(entry.annotations) < 2:
        return ""
    rows = []
    for said in entry.annotations:
        tags = _t(" ".join(said["annotation"].get("generated_tags", ())))
        rows.append(f"<tr>{_cell(_t(said['version']))}<td>{_when(said['time'])}</td><td>{tags}</td></tr>")
    head = "<tr><th class=n>version</th><th>when</th><th>tags</th></tr>"
    return f"<h2>Tags over time</h2>{_table(head, rows)}"


def summary(entries: Iterable[Entry]) -> Mapping[str, Any]:
    """What the command says on standard output."""
    listed = list(entries)
    return {"artifacts": len(listed), "unreadable": [e.record.id for e in listed if e.problem]}
