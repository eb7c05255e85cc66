"""How the report looks: colours by class, light and dark, for screen and print."""

from __future__ import annotations

STYLE = """
:root{--ink:#1b1f24;--soft:#5b6570;--line:#d8dde3;--back:#fff;--card:#f6f8fa;--own:#0b62c4;
--eager:#b35900;--compile:#6f42c1;--bad:#b3261e;--good:#1a7f37;--warn:#8a6100}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa5b1;--line:#39414a;--back:#14181d;
--card:#1c2228;--own:#6cb0ff;--eager:#ffa657;--compile:#c9a6ff;--bad:#ff8a80;--good:#6fdd8b;
--warn:#e3b341}}
*{box-sizing:border-box}
body{margin:0;padding:24px;font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--back)}
main{max-width:1500px;margin:auto}
h1{font-size:22px;margin:0 0 4px}
h2{font-size:17px;margin:26px 0 8px}
h3{font-size:13px;margin:0 0 4px;color:var(--soft);font-weight:600}
p{margin:4px 0}
.half{max-width:480px}td code{white-space:nowrap}
td.tags{min-width:215px}td code{font-size:11px}.soft{color:var(--soft)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{padding:5px 8px;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th{color:var(--soft);font-weight:600}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
a{color:var(--own);text-decoration:none}
a:hover{text-decoration:underline}
code{font:12px ui-monospace,monospace}
.VALIDATED{color:var(--good);font-weight:600}
.REJECTED,.REVOKED,.bad{color:var(--bad);font-weight:600}
.warn{color:var(--warn)}
.tag{display:inline-block;padding:0 6px;margin:0 3px 2px 0;border:1px solid var(--line);
border-radius:9px;font-size:11px;white-space:nowrap}
details{border:1px solid var(--line);border-radius:8px;margin:10px 0;background:var(--card)}
summary{cursor:pointer;padding:10px 14px;font-weight:600}
details>div{padding:0 14px 14px}
.grid-of{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:14px}
figure{margin:0;background:var(--back);border:1px solid var(--line);border-radius:6px;padding:10px}
svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
svg .grid{stroke:var(--line);stroke-width:1}
svg .line{fill:none;stroke-width:2}
svg .own{stroke:var(--own)}
svg .eager{stroke:var(--eager)}
svg .compile{stroke:var(--compile)}
svg .roof{stroke:var(--soft)}
svg .bound{stroke:var(--bad);stroke-dasharray:4 3}
svg .dot{stroke:var(--back);stroke-width:1}
svg .dot.own{fill:var(--own);stroke:var(--back)}
svg .dot.other{fill:var(--soft);opacity:.6}
svg .bar{stroke:none;fill:var(--own)}
svg .bar.eager{fill:var(--eager)}
svg .bar.compile{fill:var(--compile)}
svg .bar.bad{fill:var(--bad)}
svg .bar.soft{fill:var(--soft)}
svg text.key{stroke:none;font-weight:600}
svg text.key.own{fill:var(--own)}
svg text.key.eager{fill:var(--eager)}
svg text.key.compile{fill:var(--compile)}
svg text.value{fill:var(--ink)}
svg text.inside{fill:var(--back)}
@media print{details{break-inside:avoid}}
"""
