"""Colours, style sheet and script of the report: all inline, nothing is fetched.

Colours are Okabe and Ito's set (2008), which people with any common colour blindness can tell apart; whatever
a colour says, a word, a shape or a line's style says besides.
"""

from __future__ import annotations

_LIGHT = """--bg:#fff;--panel:#f6f7f9;--text:#1d2126;--dim:#5c6670;--line:#d5dae0;--curve:#0072b2;
--early:#8d97a1;--bad:#c2410c;--perturbed:#cc79a733;--perturbedline:#a3326f;--mark:#007a5a;"""

_DARK = """--bg:#14171b;--panel:#1d2127;--text:#e8ebee;--dim:#a3adb7;--line:#39414a;--curve:#56b4e9;
--early:#76818c;--bad:#f07f2e;--perturbed:#cc79a740;--perturbedline:#e08bb8;--mark:#2fc498;"""

_RULES = """
*{box-sizing:border-box}
body{margin:0 auto;padding:28px 28px 60px;max-width:1120px;background:var(--bg);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
h1{font-size:22px;margin:0}h2{font-size:18px;margin:38px 0 6px}h3{font-size:15px;margin:20px 0 2px}
h1,h2,h3,p,li,td{overflow-wrap:anywhere}p{margin:6px 0}.dim,.facts,figcaption{color:var(--dim)}
.facts{margin:2px 0 0}figcaption{font-size:13.5px;margin-top:2px}figure{margin:8px 0 0;overflow-x:auto}
.card{border:1px solid var(--line);border-left:8px solid var(--mark);border-radius:8px;
background:var(--panel);padding:12px 20px;margin:14px 0;break-inside:avoid}
.card.bad{border-left-color:var(--bad)}
.card h2{margin:0;font-size:18px}.card ul{margin:4px 0;padding-left:20px}
svg{display:block;max-width:100%;height:auto}svg text{fill:var(--text);font-size:12px;font-family:inherit}
svg .dim{fill:var(--dim)}svg .grid{stroke:var(--line);fill:none}
svg .curve{stroke:var(--curve);stroke-width:1.5;fill:none;stroke-linejoin:round}
svg .early{stroke:var(--early);stroke-width:1.5;stroke-dasharray:5 4;fill:none}
svg .also{fill:var(--early)}
svg .alert{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:3 3}svg .broken{fill:var(--bad)}
svg .bookmark{stroke:var(--mark);stroke-width:1.5}
svg .session{stroke:var(--dim);stroke-width:1;stroke-dasharray:8 4}
svg .perturbed{fill:var(--perturbed);stroke:var(--perturbedline);stroke-width:.5}
svg .ground{fill:var(--panel)}svg .heat,.ramp{image-rendering:pixelated}
.legend{color:var(--dim);font-size:13px;margin:2px 0 0}.ramp{width:180px;height:11px;vertical-align:-1px}
.swatch{display:inline-block;width:12px;height:11px;vertical-align:-1px;margin-left:14px;
border:1px solid var(--line)}
.swatch.bad{background:rgb(213,94,0)}.swatch.none{background:var(--panel)}
table{border-collapse:collapse;margin:8px 0;font-size:13px;width:100%}
th,td{text-align:left;padding:2px 12px 2px 0;border-bottom:1px solid var(--line);
vertical-align:middle;white-space:nowrap}
th{position:sticky;top:0;background:var(--bg);font-weight:600}td.path{white-space:normal}
.scroll{overflow-x:auto}.spark{display:inline-block;vertical-align:middle;max-width:none}
.last{font-variant-numeric:tabular-nums;margin-left:6px}td .bad{color:var(--bad);font-weight:700}
details summary{cursor:pointer;margin:10px 0}
#tip{position:fixed;pointer-events:none;background:var(--text);color:var(--bg);padding:3px 9px;
border-radius:5px;font-size:13px;display:none;z-index:9}
@media screen and (max-width:760px){body{padding:18px 14px 40px}}
@media print{body{padding:0;max-width:none;font-size:11pt}h2,h3{break-after:avoid}figure{break-inside:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""

CSS = (
    f":root{{{_LIGHT}}}@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    f"@media print{{:root{{{_LIGHT}}}}}{_RULES}"
)
"""Light, dark where the reader's system is, and light again in print."""

SCRIPT = """
const tip=document.getElementById('tip');
const bytes=text=>Uint8Array.from(atob(text),c=>c.charCodeAt(0)).buffer;
for(const map of document.querySelectorAll('image.heat')){
let values,steps,labels;
map.addEventListener('pointermove',event=>{
values??=new Float32Array(bytes(map.dataset.values));steps??=new Int32Array(bytes(map.dataset.steps));
labels??=map.dataset.labels.split(',');
const box=map.getBoundingClientRect(),rows=+map.dataset.rows,columns=+map.dataset.columns;
const row=Math.min(rows-1,Math.max(0,Math.floor((event.clientY-box.top)/box.height*rows)));
const column=Math.min(columns-1,Math.max(0,Math.floor((event.clientX-box.left)/box.width*columns)));
const value=values[row*columns+column];
const shown=Number.isNaN(value)?'no value':Number.isFinite(value)?value.toPrecision(4):'not finite';
const words=map.dataset.words||'layer {r}, step {c}';
tip.textContent=words.replace('{r}',labels[row]).replace('{c}',steps[column])+': '+shown;
tip.style.display='block';
tip.style.left=Math.min(event.clientX+14,innerWidth-tip.offsetWidth-8)+'px';
tip.style.top=(event.clientY+18)+'px';});
map.addEventListener('pointerleave',()=>{tip.style.display='none';});}
"""
