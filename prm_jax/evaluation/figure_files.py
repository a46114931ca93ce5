"""Encodes a figure as the content of a file: PNG for screens, PDF and SVG for papers."""

import io
from typing import Any, Literal

Vector = Literal["pdf", "svg"]  # scripts name it in flags, before they import matplotlib


def encoded(figure: Any, kind: str = "png") -> bytes:
  """Returns a matplotlib figure as bytes, without a date, so that equal figures give equal bytes.

  Text stays text: PDF embeds its fonts (TrueType); SVG names them, and a reader without them shows
  another sans-serif.

  Args:
    kind: "png", "pdf" or "svg".
  """
  import matplotlib

  fonts = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "prm_jax"}
  dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
  buffer = io.BytesIO()
  with matplotlib.rc_context(fonts):
    figure.savefig(buffer, format=kind, metadata=dates.get(kind))
  return buffer.getvalue()
