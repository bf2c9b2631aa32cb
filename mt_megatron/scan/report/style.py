"""Colours, style sheet and script of the HTML report: all inline, nothing is fetched.

Colours are Okabe and Ito's set (2008), which people with any common colour blindness can tell apart; every
colour comes with a letter, a pattern or a label besides. Print and light pages share one look.
"""

from __future__ import annotations

from mt_megatron.scan.findings.finding import Cause

from .data import CATEGORIES, BarKind

CAUSE_MARK: dict[Cause, tuple[str, str]] = {
    "slow_compute": ("late", "C"),
    "host_contention": ("late", "H"),
    "host_pause": ("late", "P"),
    "slow_data": ("late", "D"),
    "slow_checkpoint": ("late", "K"),
    "uneven_work": ("work", "U"),
    "slow_link": ("link", "L"),
    "slow_group": ("link", "G"),
    "slow_node_link": ("link", "N"),
    "hang": ("hang", "X"),
    "unknown": ("unsure", "?"),
}
"""The colour class and the letter of each cause in the grid."""

BAR_CLASS: dict[BarKind, str] = {
    "forward": "b-fwd",
    "backward": "b-bwd",
    "optimizer": "b-opt",
    "data": "b-data",
    "checkpoint": "b-ckpt",
    "pause": "b-pause",
    "collective": "b-coll",
    "p2p": "b-p2p",
    "wait": "b-wait",
    "step": "b-step",
}

PART_CLASS: dict[str, str] = dict(
    zip(CATEGORIES, ("b-fwd", "b-coll", "b-wait", "b-bubble", "b-data", "b-ckpt", "b-pause"), strict=True)
)

_LIGHT = """--bg:#fff;--panel:#f6f7f9;--text:#1d2126;--dim:#5c6670;--line:#d5dae0;--cell:#e3e7ec;
--late:#d55e00;--work:#e69f00;--link:#0072b2;--hang:#a3326f;--unsure:#f0e442;--ok:#007a5a;--fwd:#7fc4ee;
--bwd:#2a7fba;--opt:#009e73;--data:#e69f00;--ckpt:#8a5a2b;--pause:#1d2126;--coll:#cc79a7;--p2p:#d8c91f;
--hatch:#8d97a1;--hatchbg:#eceff2;--fault:#d55e0022;--on:#fff;"""

_DARK = """--bg:#14171b;--panel:#1d2127;--text:#e8ebee;--dim:#a3adb7;--line:#39414a;--cell:#2c333b;
--late:#f07f2e;--work:#f0b429;--link:#4aa8e0;--hang:#e08bb8;--unsure:#f0e442;--ok:#2fc498;--fwd:#8ccbf2;
--bwd:#3f8fca;--opt:#26b78c;--data:#f0b429;--ckpt:#b98552;--pause:#f2f4f6;--coll:#d98fb8;--p2p:#e6da4a;
--hatch:#76818c;--hatchbg:#262c33;--fault:#f07f2e2e;--on:#111;"""

_RULES = """
*{box-sizing:border-box}
body{margin:0 auto;padding:28px 28px 60px;max-width:1120px;background:var(--bg);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
h1{font-size:22px;margin:0}h2{font-size:18px;margin:38px 0 6px}h3{font-size:15px;margin:18px 0 6px}
h1,h2,h3,p,li{overflow-wrap:anywhere}
p{margin:6px 0}.dim{color:var(--dim)}.facts{color:var(--dim);margin:2px 0 0}
.mono,pre{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:13px}
pre{background:var(--panel);border:1px solid var(--line);border-radius:6px;padding:10px 12px;overflow:auto;
max-height:340px;white-space:pre-wrap}
.simulated{display:inline-block;border:1.5px dashed var(--dim);border-radius:4px;padding:0 8px;
margin-left:10px;font-size:13px;font-weight:600;vertical-align:3px}
.card{border:1px solid var(--line);border-left:8px solid var(--late);border-radius:8px;
background:var(--panel);padding:14px 20px 16px;margin:16px 0;break-inside:avoid}
.card.work{border-left-color:var(--work)}.card.link{border-left-color:var(--link)}
.card.hang{border-left-color:var(--hang)}.card.unsure{border-left-color:var(--unsure)}
.card.fine{border-left-color:var(--ok)}
.card h2{margin:0;font-size:21px;line-height:1.3}.card .cost{font-size:16px;margin:4px 0 8px}
.card ul{margin:4px 0 8px;padding-left:20px}.card h3{margin:12px 0 2px;font-size:13px;color:var(--dim);
text-transform:uppercase;letter-spacing:.04em}
.tag{display:inline-block;border:1px solid var(--line);border-radius:999px;padding:0 10px;margin-right:6px;
font-size:13px;color:var(--dim);background:var(--bg)}
.weak{margin:12px 0;color:var(--dim)}.weak summary{cursor:pointer;color:var(--text)}
.next{border-top:1px solid var(--line);margin-top:10px;padding-top:8px}
table{border-collapse:collapse;margin:8px 0;font-size:14px}
th,td{text-align:left;padding:3px 18px 3px 0;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
figure{margin:10px 0 0;overflow-x:auto}figcaption{color:var(--dim);font-size:13.5px;margin-top:4px}
figure.ranks{display:flex;flex-wrap:wrap;gap:6px 36px;align-items:center}
svg{display:block;max-width:100%;height:auto}svg text{fill:var(--text);font-size:12px;font-family:inherit}
svg .dim{fill:var(--dim)}svg .bold{font-weight:700}svg .grid{stroke:var(--line);fill:none}
svg .curve{stroke:var(--bwd);stroke-width:1.6;fill:none}svg .fault{fill:var(--fault)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13.5px;margin:8px 0 0;color:var(--dim)}
.legend svg{display:inline-block;vertical-align:-2px;margin-right:6px;width:16px;height:14px}
.cell{fill:var(--cell);stroke:var(--bg)}.cell.absent{fill:url(#absent);stroke:var(--line)}
.cell.late{fill:var(--late)}.cell.work{fill:var(--work)}.cell.link{fill:var(--link)}.cell.hang{fill:var(--hang)}
.cell.unsure{fill:var(--unsure)}svg text.on{fill:var(--on);font-weight:700}
svg text.on.unsure,svg text.on.work{fill:#111}
.edge{stroke:var(--link);stroke-width:3;fill:none;stroke-linecap:round}
.b-fwd{fill:var(--fwd)}.b-bwd{fill:var(--bwd)}.b-opt{fill:var(--opt)}.b-data{fill:var(--data)}
.b-ckpt{fill:var(--ckpt)}.b-pause{fill:var(--pause)}.b-coll{fill:var(--coll)}.b-p2p{fill:var(--p2p)}
.b-wait{fill:url(#hatch)}.b-bubble{fill:url(#dots)}.b-step{fill:none;stroke:var(--line)}
.ground{fill:var(--panel)}.ground.culprit{fill:var(--fault)}
[data-t]:hover{stroke:var(--text);stroke-width:1.5}.lit .cell:not(.pick){opacity:.35}
#tip{position:fixed;pointer-events:none;background:var(--text);color:var(--bg);padding:4px 9px;
border-radius:5px;font-size:13px;max-width:420px;display:none;z-index:9;white-space:pre-line}
.narrow{display:none}
@media screen and (max-width:760px){body{padding:18px 14px 40px}.card{padding:12px 14px}
.wide{display:none}.narrow{display:block}}
@media print{
body{padding:0;max-width:none;font-size:11pt}h2,h3{break-after:avoid}figure,table{break-inside:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}pre{max-height:none}}
"""

CSS = (
    f":root{{{_LIGHT}}}@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    f"@media print{{:root{{{_LIGHT}}}}}{_RULES}"
)
"""Light, dark where the reader's system is, and light again in print."""

PATTERNS = """<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>
<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" style="fill:var(--hatchbg)"/><rect width="2" height="6" style="fill:var(--hatch)"/>
</pattern><pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse">
<rect width="6" height="6" style="fill:var(--hatchbg)"/>
<circle cx="3" cy="3" r="1.3" style="fill:var(--hatch)"/></pattern>
<pattern id="absent" width="8" height="8" patternUnits="userSpaceOnUse">
<rect width="8" height="8" style="fill:var(--bg)"/><path d="M0 0L8 8M8 0L0 8" style="stroke:var(--line)"/>
</pattern></defs></svg>"""

SCRIPT = """
const tip=document.getElementById('tip');
document.addEventListener('mousemove',e=>{const t=e.target.closest&&e.target.closest('[data-t]');
if(!t){tip.style.display='none';return}
tip.textContent=t.getAttribute('data-t');tip.style.display='block';
const x=Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8),y=e.clientY+18;
tip.style.left=x+'px';tip.style.top=(y+tip.offsetHeight>innerHeight?e.clientY-tip.offsetHeight-10:y)+'px'});
document.querySelectorAll('[data-ranks]').forEach(card=>{const ranks=card.dataset.ranks.split(',');
const grid=document.getElementById('ranks');if(!grid)return;
const light=on=>{grid.classList.toggle('lit',on);grid.querySelectorAll('.cell').forEach(c=>
c.classList.toggle('pick',on&&ranks.includes(c.dataset.rank)))};
card.addEventListener('mouseenter',()=>light(true));card.addEventListener('mouseleave',()=>light(false))});
"""
"""Tool tips, and a finding's ranks light up in the grid. Without it the page shows the same."""
