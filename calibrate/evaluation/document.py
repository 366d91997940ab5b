"""A report as a list of blocks, rendered to Markdown and to one self-contained HTML file."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5c636b; --line: #d5d9de; --paper: #fdfdfc; --band: #f1f3f5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe2e6; --soft: #9aa2ab; --line: #3a4047; --paper: #17191c; --band: #202428; }
}
body { font: 15px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 76rem; padding: 2rem 1.2rem 5rem; }
h1, h2, h3 { line-height: 1.25; margin: 2.2em 0 0.6em; } h1 { margin-top: 0; }
p, li { max-width: 48rem; }
.wide { overflow-x: auto; margin: 1em 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: 0.28em 0.75em; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
tbody tr:hover { background: var(--band); } tr.strong td { font-weight: 650; }
figure { margin: 1.4em 0; } figure svg { background: #fff; border-radius: 6px; max-width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: 13.5px; max-width: 48rem; }
code { background: var(--band); padding: 0 0.25em; border-radius: 3px; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the title."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; `code` in backquotes is the only mark-up."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; the rows at the places in `strong` stand out."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Figure:
    """A picture: `name` of its file beside the Markdown, SVG text, and what it shows."""

    name: str
    svg: str
    caption: str


Block = Heading | Text | Table | Figure


def to_markdown(blocks: Sequence[Block]) -> str:
    """The report; figures are files `figures/NAME.svg` beside it."""
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"{'#' * block.level} {block.text}")
        elif isinstance(block, Text):
            parts.append(block.text)
        elif isinstance(block, Table):
            lines = [block.header, ["--", *["--:"] * (len(block.header) - 1)]]
            for i, row in enumerate(block.rows):
                lines.append([f"**{cell}**" if i in block.strong and cell else cell for cell in row])
            parts.append(
                "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
            )
        else:
            parts.append(f"![{block.caption}](figures/{block.name}.svg)\n\n{block.caption}")
    return "\n\n".join(parts) + "\n"


def to_html(blocks: Sequence[Block]) -> str:
    """The report in one file that loads nothing else."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    body = "\n".join(map(_to_html, blocks))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _to_html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{_inline(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{_inline(block.text)}</p>"
    if isinstance(block, Table):
        head = "".join(f"<th>{_inline(cell)}</th>" for cell in block.header)
        rows = [
            f"<tr{' class=strong' if i in block.strong else ''}>{''.join(f'<td>{_inline(c)}</td>' for c in row)}</tr>"
            for i, row in enumerate(block.rows)
        ]
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    return f"<figure>{block.svg}<figcaption>{_inline(block.caption)}</figcaption></figure>"


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
