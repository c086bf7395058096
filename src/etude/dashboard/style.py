"""The stylesheet of the report: readable in light and dark, on screen and on paper."""

STYLE = r"""
:root {
  --paper: #fcfbf8; --card: #ffffff; --ink: #1d1f24; --soft: #646a76; --edge: #e4e1d9; --code: #f5f3ee;
  --good: #1a7f4b; --bad: #b3382c; --mid: #9a6700; --accent: #3057d5;
  --c0: #3057d5; --c1: #d1602b; --c2: #1a8a6a; --c3: #8a4fc4; --c4: #b58a10; --c5: #c23a72;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14161a; --card: #1c1f25; --ink: #e8e6e1; --soft: #9aa1ad; --edge: #2f343d; --code: #23272e;
    --good: #4cc38a; --bad: #ff7b6b; --mid: #e0b341; --accent: #8aa6ff;
    --c0: #8aa6ff; --c1: #f2965f; --c2: #4cc3a0; --c3: #c49bf0; --c4: #dfba4a; --c5: #f07fae;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 30px; letter-spacing: -.02em; margin: 0; }
h2 { font-size: 19px; letter-spacing: -.01em; margin: 48px 0 14px; }
h3 { font-size: 13px; font-weight: 600; margin: 0 0 6px; }
p { margin: 6px 0; }
.soft, small { color: var(--soft); }
small { font-size: 12.5px; }
code, pre { font: 12.5px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext; }
.grid-of { display: grid; gap: 16px; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); }
.wide { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr)); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 16px 18px; min-width: 0; }
.facts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); margin-top: 22px; }
.facts .card { padding: 12px 16px; }
.value { font-size: 23px; font-weight: 650; letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.name { color: var(--soft); font-size: 12.5px; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--soft); font-size: 10.5px; font-variant-numeric: tabular-nums; }
svg text.label { fill: var(--ink); font-size: 13px; }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
svg .grid { stroke: var(--edge); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .interval { stroke-width: 6; stroke-linecap: round; opacity: .35; }
svg .dot { stroke: none; } svg .dot:hover { stroke: var(--ink); stroke-width: 1.5; }
.line.s0, .interval.s0 { stroke: var(--c0); } .dot.s0 { fill: var(--c0); }
.line.s1, .interval.s1 { stroke: var(--c1); } .dot.s1 { fill: var(--c1); }
.line.s2, .interval.s2 { stroke: var(--c2); } .dot.s2 { fill: var(--c2); }
.line.s3, .interval.s3 { stroke: var(--c3); } .dot.s3 { fill: var(--c3); }
.line.s4, .interval.s4 { stroke: var(--c4); } .dot.s4 { fill: var(--c4); }
.line.s5, .interval.s5 { stroke: var(--c5); } .dot.s5 { fill: var(--c5); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin-top: 6px; font-size: 12px; color: var(--soft); }
.legend b { font-weight: 600; color: var(--ink); font-variant-numeric: tabular-nums; }
.legend i { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 5px; }
i.s0 { background: var(--c0); } i.s1 { background: var(--c1); } i.s2 { background: var(--c2); }
i.s3 { background: var(--c3); } i.s4 { background: var(--c4); } i.s5 { background: var(--c5); }
details { margin-top: 10px; }
summary { cursor: pointer; }
summary:hover { color: var(--accent); }
.rollout > summary { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: baseline; }
.rollout > summary::before { content: "\25B8"; color: var(--soft); }
.rollout[open] > summary::before { content: "\25BE"; }
.badge { font-size: 12px; font-weight: 600; border: 1px solid currentColor; border-radius: 20px; padding: 0 9px; }
.good { color: var(--good); } .bad { color: var(--bad); } .mid { color: var(--mid); }
.turn { border-left: 3px solid var(--edge); padding: 2px 0 2px 14px; margin: 14px 0; }
.turn.agent { border-color: var(--c0); } .turn.user { border-color: var(--c4); }
.role { font-size: 12px; font-weight: 650; color: var(--soft); }
.box { background: var(--code); border-radius: 7px; padding: 8px 11px; margin-top: 6px; }
.box.call { border-left: 3px solid var(--c1); } .box.result { border-left: 3px solid var(--c2); }
.strip { display: flex; flex-wrap: wrap; gap: 3px; margin: 4px 0 10px; }
.strip span { width: 13px; height: 13px; border-radius: 3px; border: 1px solid var(--edge); position: relative; }
.strip span i { position: absolute; inset: 0; border-radius: 2px; background: var(--good); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--edge); font-weight: 400; }
th { color: var(--soft); font-size: 12.5px; }
.origin { color: var(--soft); }
@media print { details { display: block; } .card { break-inside: avoid; } }
"""
