"""A page that one steps through, round by round: one file, which needs no network.

Every round is a drawing of its own in the page. The script shows one at a time; without it, and on
paper, all are there, one below the other.
"""

from __future__ import annotations

from html import escape

from pycoll._drawing.elements import style
from pycoll._drawing.shape import phases
from pycoll._drawing.svg import Picture
from pycoll._drawing.text import cost_line, headline

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
html{{color-scheme:light dark}}
body{{margin:16px 20px;font:15px/1.45 system-ui,sans-serif;background:#fff;color:#1f2328}}
h1{{font-size:20px;margin:0}}
p{{margin:4px 0}}
.bad-text{{color:#c40000;white-space:pre-wrap}}
nav{{position:sticky;top:0;display:flex;gap:8px;align-items:center;padding:8px 0;flex-wrap:wrap;
background:inherit;z-index:1}}
nav button{{font:inherit;min-width:40px;padding:3px 10px;cursor:pointer}}
nav input{{flex:1 1 180px;max-width:420px}}
nav output{{min-width:17em;font-weight:600}}
section{{overflow-x:auto}}
section h2{{font-size:15px;margin:14px 0 4px}}
.stepped section{{display:none}}
.stepped section.now{{display:block}}
.stepped section h2{{display:none}}
@media (prefers-reduced-motion:no-preference){{
.now .a:not(.lost){{stroke-dasharray:1;animation:go .6s ease-out}}
@keyframes go{{from{{stroke-dashoffset:1}}to{{stroke-dashoffset:0}}}}}}
@media screen and (prefers-color-scheme:dark){{
body{{background:#14171c;color:#e8ebef}}.bad-text{{color:#ff6b60}}}}
@media print{{nav{{display:none}}.stepped section{{display:block;break-inside:avoid}}
.stepped section h2{{display:block}}}}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{cost}</p>
{faults}<p><b>&#9656;</b> is sent, <b>&oplus;</b> is combined with what is there, <b>&#9660;</b>
takes its place, <b>&#9633;</b> has changed. A color is {whose}.</p>
<nav hidden>
<button type="button" data-go="0" aria-label="to the start">|&#9664;</button>
<button type="button" data-by="-1" aria-label="one round back">&#9664;</button>
<button type="button" data-by="1" aria-label="one round on">&#9654;</button>
<button type="button" id="play" aria-label="play or stop">play</button>
<input type="range" min="0" max="{last}" value="0" aria-label="round">
<output></output>
</nav>
{sections}
<script>
(() => {{
  const all = [...document.querySelectorAll("section")], nav = document.querySelector("nav");
  const range = nav.querySelector("input"), said = nav.querySelector("output");
  const play = document.getElementById("play");
  let now = 0, timer = 0;
  const show = (to) => {{
    now = Math.max(0, Math.min(all.length - 1, to));
    all.forEach((each, i) => each.classList.toggle("now", i === now));
    range.value = now;
    said.textContent = all[now].querySelector("h2").textContent;
  }};
  const stop = () => {{ clearInterval(timer); timer = 0; play.textContent = "play"; }};
  const start = () => {{
    if (now === all.length - 1) show(0);
    play.textContent = "stop";
    timer = setInterval(() => {{ show(now + 1); if (now === all.length - 1) stop(); }}, 1400);
  }};
  const turn = () => timer ? stop() : start();
  nav.addEventListener("click", (event) => {{
    const {{ go, by }} = event.target.dataset;
    if (event.target === play) return turn();
    stop();
    if (go) show(+go);
    if (by) show(now + +by);
  }});
  range.addEventListener("input", () => {{ stop(); show(+range.value); }});
  document.addEventListener("keydown", (event) => {{
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const to = {{ ArrowRight: now + 1, ArrowLeft: now - 1, ArrowDown: now + 1, ArrowUp: now - 1,
      PageDown: now + 1, PageUp: now - 1, Home: 0, End: all.length - 1 }}[event.key];
    if (event.key === " " && event.target.tagName !== "BUTTON") turn();
    else if (to !== undefined) {{ stop(); show(to); }}
    else return;
    event.preventDefault();
  }});
  document.body.classList.add("stepped");
  nav.hidden = false;
  show(+location.hash.slice(1) || 0);
}})();
</script>
</body>
</html>
"""


def page(picture: Picture) -> str:
    """Draw the page."""
    replay = picture.replay
    collective = replay.collective
    names = ["start"]
    phase = dict(phases(replay))
    current = ""
    for number in range(1, len(replay.rounds) + 1):
        current = phase.get(number, current)
        names.append(
            f"round {number} of {len(replay.rounds)}" + (f": {current}" if current else "")
        )
    if replay.stuck:
        names.append("stuck: these messages never arrive")
    sections = "\n".join(
        f"<section><h2>{name}</h2>\n{picture.frame(number)}</section>"
        for number, name in enumerate(names)
    )
    faults = "".join(f'<p class="bad-text">{escape(line)}</p>\n' for line in picture.faults())
    whose = {"broadcast": "a piece of the root's value", "scatter": "the rank that a block is for"}
    return _PAGE.format(
        title=escape(headline(replay)),
        style=style(),
        cost=escape(cost_line(replay)),
        faults=faults,
        whose=whose.get(collective, "the rank that the data comes from"),
        last=len(names) - 1,
        sections=sections,
    )
