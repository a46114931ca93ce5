"""HTML tables for notebooks: text is escaped; low P(right) is shaded, on light and dark pages."""

import html
from collections.abc import Sequence
from typing import Any

MARKS = {1: "right", 0: "neutral", -1: "wrong"}  # names of the ratings
CELL = "text-align: left; white-space: pre-wrap; vertical-align: top"


class Html(str):
  """Markup that a notebook renders and that `table` does not escape."""

  def _repr_html_(self) -> str:
    return str(self)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Html:
  """Returns an HTML table.

  Args:
    head: names of the columns.
    rows: cells of each row; `Html` is not escaped, floats get three digits, the others are escaped.
  """
  lines = [_row("th", head), *(_row("td", row) for row in rows)]
  return Html(f"<table>{''.join(lines)}</table>")


def shade(text: Any, right: float) -> Html:
  """Returns the text on a shade that is stronger for a lower P(right); at 1 there is none."""
  doubt = min(max(1 - float(right), 0.0), 1.0)
  style = f"background: rgba(213, 94, 0, {0.75 * doubt:.2f}); padding: 0 4px; border-radius: 3px"
  return Html(f'<span style="{style}">{_text(text)}</span>')


def steps(texts: Sequence[str], right: Sequence[float], labels: Sequence[int | None] = ()) -> Html:
  """Returns a solution as a table: steps shaded by P(right) `[S]`, and ratings where known."""
  head = ["", "step", "P(right)"] + ["rated"] * bool(labels)
  rows = []
  for i, (text, p) in enumerate(zip(texts, right)):
    label = [MARKS.get(labels[i], "")] if labels else []
    rows.append([i + 1, shade(text, p), float(p), *label])
  return table(head, rows)


def _row(tag: str, cells: Sequence[Any]) -> str:
  inner = "".join(f'<{tag} style="{CELL}">{_text(cell)}</{tag}>' for cell in cells)
  return f"<tr>{inner}</tr>"


def _text(cell: Any) -> str:
  if isinstance(cell, Html):
    return cell
  return html.escape(f"{cell:.3f}" if isinstance(cell, float) else str(cell))
