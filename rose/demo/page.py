"""Pieces of the report's HTML: its style sheet and its cards, tables and lists.

Owns the look of the page. Promises that every text is escaped and that nothing is fetched. Knows
nothing of demos.
"""

import html
from collections.abc import Iterable, Sequence

STYLE = """
:root { color-scheme: light dark; --page: #f5f6f8; --card: #ffffff; --ink: #1c2430; --muted: #647082;
  --grid: #e2e6ec; --serving: #3b6fd4; --rollout: #e0872a; --free: #dfe4ea; --slo: #c22f3d;
  --alone: #8592a3; --naive: #b3568f; --rose: #1f8a70; --met: #1f8a4c; --missed: #c22f3d; --open: #8a6d1f; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b2129; --ink: #e6eaf0;
  --muted: #9aa6b5; --grid: #313a46; --serving: #6b9bf2; --rollout: #f0a04b; --free: #2d3641; --slo: #ff6b76;
  --alone: #93a1b3; --naive: #d98abb; --rose: #45c0a0; --met: #4cc47f; --missed: #ff6b76; --open: #e0bd5c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 16px; }
main { max-width: 1120px; margin: 0 auto; padding: 2.2rem 1.2rem 3rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .8rem; }
h3 { font-size: 1rem; margin: 0 0 .2rem; }
p { margin: 0 0 .7rem; } .lead, .foot, figcaption { color: var(--muted); }
.lead { max-width: 48rem; } figcaption, .foot { font-size: .85rem; }
.verdicts, .charts { display: grid; gap: 1rem; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.card { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 1rem 1.1rem;
  margin: 0; min-width: 0; } .wide { grid-column: 1 / -1; }
.verdict { border-left: 5px solid var(--state); } .verdict p { margin: .3rem 0 0; font-size: .93rem; }
.met { --state: var(--met); } .missed { --state: var(--missed); } .open { --state: var(--open); }
.badge { color: var(--state); font-weight: 700; font-size: .8rem;
  text-transform: uppercase; letter-spacing: .04em; }
svg { display: block; width: 100%; height: auto; margin: .4rem 0; font-family: inherit; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: right; padding: .38rem .5rem; border-bottom: 1px solid var(--grid);
  font-variant-numeric: tabular-nums; vertical-align: top; }
.card:has(table) { overflow-x: auto; } td:last-child { overflow-wrap: anywhere; }
th { color: var(--muted); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
@media (max-width: 720px) { .verdicts, .charts { grid-template-columns: minmax(0, 1fr); }
  main { padding: 1.2rem .7rem; } th, td { padding: .3rem .2rem; } .card:has(table) { padding: .6rem; }
  table { font-size: .72rem; } }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
"""


def card(title: str, svg: str, caption: str, *, is_wide: bool = False) -> str:
    """A chart with its title and caption."""
    return (
        f'<figure class="card{" wide" if is_wide else ""}"><h3>{html.escape(title)}</h3>{svg}'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table from cells of plain text."""
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="card"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def bullets(title: str, notes: Sequence[str]) -> str:
    """A titled list; nothing at all without items."""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<h2>{html.escape(title)}</h2><ul>{items}</ul>" if items else ""


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page from its parts."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><main>"
    )
    return "\n".join((head, *parts, "</main></body></html>\n"))
