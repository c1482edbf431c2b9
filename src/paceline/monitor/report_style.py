"""The style sheet of a report, light and dark."""

from __future__ import annotations

# Distinguishable on white and on near black, also without full colour vision.
_LIGHT = ("#1f6fd6", "#e0701f", "#16906a", "#b0409a", "#7a5ae0", "#8a7400")
_DARK = ("#63a4ff", "#ff9d57", "#4cc79b", "#e284cd", "#ab94ff", "#d1b93f")
COLOURS = len(_LIGHT)


def _variables(colours: tuple[str, ...]) -> str:
    return "".join(f"--line-{index}:{colour};" for index, colour in enumerate(colours))


STYLE = (
    ":root{--page:#f6f7f9;--card:#fff;--text:#1b2330;--quiet:#667085;--rule:#e3e7ee;--grid:#e9ecf1;"
    "--good:#0d7a4f;--good-bg:#e5f6ee;--bad:#a8321f;--bad-bg:#fdebe7;"
    + _variables(_LIGHT)
    + "color-scheme:light dark}"
    "@media (prefers-color-scheme:dark){:root{--page:#12161c;--card:#1a2029;--text:#e6eaf0;--quiet:#93a0b3;"
    "--rule:#2b3441;--grid:#262e3a;--good:#6fdcae;--good-bg:#12302a;--bad:#ff9d8a;--bad-bg:#3a1d19;"
    + _variables(_DARK)
    + "}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 20px 56px}
h1{font-size:26px;line-height:1.2;margin:0 0 10px;letter-spacing:-.01em}
h2{font-size:15px;margin:0 0 8px}
.note{margin:0 0 6px;color:var(--quiet);max-width:75ch}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12.5px;overflow-wrap:anywhere}
.verdict{margin:18px 0;padding:12px 16px;border-radius:10px;border-left:4px solid}
.same{background:var(--good-bg);border-color:var(--good)}.same strong{color:var(--good)}
.differ{background:var(--bad-bg);border-color:var(--bad)}.differ strong{color:var(--bad)}
.cards,.charts{display:flex;flex-wrap:wrap;gap:16px;margin:18px 0}
.card{flex:1 1 270px}
figure{flex:1 1 430px;min-width:0}
.card,figure,section:not(.card){background:var(--card);border:1px solid var(--rule);border-radius:12px;
 padding:16px 18px;margin:0}
section:not(.card){margin-top:16px}
.card h2{font-size:17px;margin:0}
.sub,.stopped,figcaption,.nothing{color:var(--quiet);font-size:13px;margin:0}
.card code{font-size:11.5px}
dl{display:flex;flex-wrap:wrap;gap:10px 28px;margin:12px 0}
dt{font-size:12px;color:var(--quiet)}
dd{margin:0;white-space:nowrap;font-size:21px;font-weight:600;font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.5em;background:var(--c)}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--quiet);margin-bottom:4px}
figure:first-child{flex-basis:100%}
figure svg{display:block;width:100%;height:auto}
figcaption{margin-top:4px}
.grid{stroke:var(--grid)}.axis{stroke:var(--quiet);opacity:.6}
.tick,.label{fill:var(--quiet);font-size:12px;font-variant-numeric:tabular-nums}
.line{fill:none;stroke:var(--c);stroke-linejoin:round;stroke-linecap:round}
.faint{fill:none;stroke:var(--c);stroke-width:1;opacity:.28}
.mark{fill:var(--c)}
.wide{flex-basis:100%}
.bar{fill:var(--c)}.waits{fill:var(--c);opacity:.3}
.view{stroke:var(--quiet);opacity:.35;stroke-dasharray:1 3}
.again{stroke:var(--quiet);stroke-dasharray:6 4}
.repair{fill:var(--bad);opacity:.2}
.speed{fill:var(--quiet);opacity:.16}.speed-line{fill:none;stroke:var(--quiet);stroke-width:1.2;opacity:.8}
.failed path{fill:none;stroke:var(--bad);stroke-width:2.4;stroke-linecap:round}
.failed .halo{stroke:var(--card);stroke-width:5.5}
.joined{fill:var(--good);stroke:var(--card);stroke-width:1.2}
.left{fill:var(--quiet);stroke:var(--card);stroke-width:1.2}
.cause{fill:var(--card);font-size:11px;font-weight:600}
.checkpoint{fill:var(--quiet)}
.supervisor{fill:var(--card);stroke:var(--text);stroke-width:1.6}
.verdict-mark{fill:var(--bad);font-size:15px;font-weight:700}
.key svg{display:inline-block;width:1em;height:1em;margin-right:.4em;vertical-align:-.12em}
.happened{margin:10px 0 0;padding:0;list-style:none;font-size:13px;columns:2;column-gap:28px}
.happened li{display:flex;gap:10px;break-inside:avoid;padding:1px 0;overflow-wrap:anywhere}
.happened .when{flex:0 0 5.2em;text-align:right;color:var(--quiet);font-variant-numeric:tabular-nums}
.happened .bad{color:var(--bad)}.happened .good{color:var(--good)}
@media (max-width:760px){.happened{columns:1}}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}
thead th{color:var(--quiet);font-weight:500;vertical-align:bottom}
thead .group{text-align:left;color:var(--text);font-weight:600}
tbody th{font-weight:600;text-align:left}
tr:first-child>th:first-child{text-align:left}
tbody tr:last-child>*{border-bottom:0}
@media print{body{background:#fff;print-color-adjust:exact;-webkit-print-color-adjust:exact}
 figure,section,.card{break-inside:avoid}}
"""
    + "".join(f".c{index}{{--c:var(--line-{index})}}" for index in range(COLOURS))
)
