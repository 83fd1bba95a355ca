"""How the page looks: colours for light and dark, and a layout for narrow and wide windows."""

from __future__ import annotations

from collections.abc import Mapping

from ....runlog.windows import PHASES

__all__ = ["DARK", "LIGHT", "RUN_COLOURS", "css", "phase_colour", "run_colour"]

RUN_COLOURS = 6

LIGHT: Mapping[str, str] = {
    "page": "#f6f7f9",
    "card": "#ffffff",
    "ink": "#1b232c",
    "soft": "#55606d",
    "rule": "#dfe3e8",
    "good": "#1b7f4b",
    "bad": "#b3261e",
    "warn": "#8a5a00",
    "data": "#b26a00",
    "forward": "#2f86c4",
    "backward": "#1d4f91",
    "waiting": "#c2392b",
    "optimizer": "#1e8449",
    "other": "#78838f",
    "run0": "#1f6fb2",
    "run1": "#c4521a",
    "run2": "#22814f",
    "run3": "#7c4fa3",
    "run4": "#95690a",
    "run5": "#b8336a",
}
DARK: Mapping[str, str] = {
    "page": "#10151b",
    "card": "#19212a",
    "ink": "#e6eaef",
    "soft": "#a3aebb",
    "rule": "#323d49",
    "good": "#5ccf94",
    "bad": "#ff8f80",
    "warn": "#f0b95b",
    "data": "#e6a23c",
    "forward": "#74bdf0",
    "backward": "#4a86dc",
    "waiting": "#ee6a5a",
    "optimizer": "#4fc38a",
    "other": "#8f9ba8",
    "run0": "#6db3ee",
    "run1": "#f2925f",
    "run2": "#5cc994",
    "run3": "#c09be6",
    "run4": "#e0b652",
    "run5": "#f283ae",
}


def phase_colour(phase: str) -> str:
    """The CSS value of a phase's colour."""
    assert phase in PHASES
    return f"var(--{phase})"


def run_colour(index: int) -> str:
    """The CSS value of the colour of the run (or line) number `index`."""
    return f"var(--run{index % RUN_COLOURS})"


def css() -> str:
    """The whole style sheet."""
    light = "".join(f"--{name}:{value};" for name, value in LIGHT.items())
    dark = "".join(f"--{name}:{value};" for name, value in DARK.items())
    return f":root{{color-scheme:light dark;{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{_RULES}"


_RULES = """\
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1440px;margin:0 auto;padding:20px clamp(12px,2.5vw,32px) 48px}
h1{font-size:1.6rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:36px 0 12px}
h3{font-size:.95rem;margin:0 0 2px}
p{margin:4px 0}
a{color:inherit}
code,.mono{font-family:ui-monospace,"SF Mono",Menlo,Consolas,monospace;font-size:.88em;overflow-wrap:anywhere}
.soft{color:var(--soft)}
.head{display:flex;flex-wrap:wrap;gap:4px 14px;align-items:center}
.state{border:1.5px solid currentColor;border-radius:99px;padding:0 11px;font-size:.85rem;font-weight:600}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(138px,1fr));gap:10px;margin:18px 0 0}
.tile,.card{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.tile{padding:9px 13px}
.tile b{display:block;font-size:1.12rem;line-height:1.3;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:.82rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr));gap:14px}
.card{padding:13px 15px;margin:0;min-width:0}
.wide{grid-column:1/-1}
.note{border-left:3px solid var(--warn);padding:2px 0 2px 11px;margin:14px 0}
.note.bad{border-color:var(--bad);color:inherit}
.key{display:flex;flex-wrap:wrap;gap:1px 14px;list-style:none;margin:2px 0 5px;padding:0;
 font-size:.82rem;color:var(--soft)}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px;vertical-align:-1px}
.key .again{background:none;border-left:2px dotted var(--soft);border-radius:0;width:0;margin-left:5px}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round}
svg .axis{stroke:var(--rule);stroke-width:1}
svg .start{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 4}
svg .miss{stroke:var(--bad);stroke-width:1.8}
svg .tip{fill:transparent}
svg .tip:hover{fill:var(--ink);fill-opacity:.08}
.bars{display:grid;grid-template-columns:max-content 1fr max-content;gap:5px 11px;
 align-items:center;font-variant-numeric:tabular-nums}
.bar{display:flex;gap:1px;height:18px;border-radius:3px;overflow:hidden;min-width:0}
.bar i{display:block;min-width:0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:4px 16px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--soft);font-weight:600}
tr:last-child td,tr:last-child th{border-bottom:0}
td.n,th.n{text-align:right;white-space:nowrap}
td.w{overflow-wrap:anywhere;min-width:9em;width:100%}
td.when,th.when{white-space:nowrap}
.pairs th{white-space:nowrap;max-width:16em;overflow:hidden;text-overflow:ellipsis}
details{margin-top:8px}
summary{cursor:pointer;color:var(--soft);font-size:.88rem}
footer{margin-top:40px;color:var(--soft);font-size:.82rem}
@media (max-width:520px){svg text{font-size:16px}.bars{grid-template-columns:max-content 1fr}.bars .last{grid-column:2}
 h2{margin-top:28px}.tiles{grid-template-columns:1fr 1fr}}
@media print{body{background:none}.card,.tile{break-inside:avoid}}
"""
