"""A drawn figure as the content of a file: PNG for screens, PDF and SVG for papers."""

import io
from typing import Any, Literal

Vector = Literal["pdf", "svg"]  # matplotlib is imported when it draws: scripts name this before


def encoded(figure: Any, kind: str = "png", **options: Any) -> bytes:
  """The bytes of a matplotlib figure, without a date: drawn again, it gives the same.

  Text stays text: PDF embeds its fonts (TrueType); SVG names them, and a reader without them shows
  another sans-serif.

  Args:
    kind: "png", "pdf" or "svg".
    options: of `savefig`.
  """
  import matplotlib

  fonts = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "prm_jax"}
  dated = {"pdf": "CreationDate", "svg": "Date"}.get(kind)
  buffer = io.BytesIO()
  with matplotlib.rc_context(fonts):
    figure.savefig(buffer, format=kind, metadata={dated: None} if dated else None, **options)
  return buffer.getvalue()
