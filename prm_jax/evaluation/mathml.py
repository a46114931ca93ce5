"""Turns text with LaTeX into strings and MathML trees, for a page that takes no markup from data.

A tree is `[tag, {attribute: value}, child, ...]` with texts as leaves.  It keeps only presentation
elements and attributes of MathML Core, as latex2mathml passes on links, styles and markup in
`\\text`.
"""

import functools
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

MAX_FORMULA = 1_000  # characters; a longer formula stays LaTeX
MAX_DEPTH = 60
# A bracket or environment may not hold another start of its kind: otherwise many starts without an
# end would each be searched to the end of the text.
FORMULA = re.compile(
  r"""\$\$(?P<a>.+?)\$\$
  |(?<!\\)\\\[(?P<b>(?:(?!(?<!\\)\\\[).)+?)\\\]
  |(?<!\\)\\\((?P<c>(?:(?!(?<!\\)\\\().)+?)\\\)
  |(?<![\\$])\$(?P<d>[^$\n]+?)\$(?!\d)
  |(?P<e>\\begin\{(align|equation|gather)\*?\}(?:(?!\\begin\{\6\*?\}).)+?\\end\{\6\*?\})
  |(?P<f>\\boxed\{[^{}]*\})""",
  re.DOTALL | re.VERBOSE,
)
TAG = re.compile(
  "math|m(row|i|n|o|text|space|frac|sqrt|root|style|padded|phantom|sub|sup|subsup|under|over)"
  "|m(underover|multiscripts|table|tr|td|enclose|error)"
)
ATTRIBUTE = re.compile(
  "display|displaystyle|linethickness|stretchy|accent|accentunder|mathvariant|width|height|depth"
  "|columnalign|rowspacing|columnspacing|notation|lspace|rspace|fence|separator|minsize|maxsize"
)
# Words beside a formula, which would lose the spaces between them.
SHORT_TEXT = re.compile(r"\\text\{[^{}]*\}")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s")
VALUE = re.compile(r"[\w .,%+-]{1,40}")


def pieces(text: str) -> list[Any]:
  """Splits text into strings and formulas: `{"m": tree, "d": whether it is displayed}`."""
  out, end = [], 0
  for match in FORMULA.finditer(text):
    if (tree := typeset(match[match.lastgroup])) is None:
      continue
    out += [text[end : match.start()]] * (end < match.start())
    out.append({"m": tree, "d": match.lastgroup in ("a", "b", "e")})
    end = match.end()
  return out + [text[end:]] * (end < len(text))


def answer_pieces(text: str) -> list[Any]:
  """Returns `pieces` of an answer, which may be LaTeX without delimiters, such as `2\\pi`."""
  found = pieces(text)
  bare = "\\" in text and found == [text] and not WORD.search(SHORT_TEXT.sub("", text))
  return [{"m": tree, "d": False}] if bare and (tree := typeset(text)) else found


@functools.lru_cache(50_000)
def typeset(source: str) -> list[Any] | None:
  """Returns the tree of a formula, or None if it cannot be parsed."""
  from latex2mathml.converter import convert

  if len(source) > MAX_FORMULA or source.count("{") > MAX_DEPTH:
    return None
  try:
    return _clean(ElementTree.fromstring(convert(source)), MAX_DEPTH)
  except Exception:  # broken LaTeX raises errors of many kinds; the page shows its source
    return None


def _clean(element: ElementTree.Element, depth: int) -> list[Any]:
  """Returns the tree of an element with known tags and attributes; of other tags only the text."""
  tag = element.tag.rpartition("}")[2]
  known = TAG.fullmatch(tag) is not None
  if not depth:
    raise ValueError("nested too deeply")
  attributes = {
    name: value
    for name, value in element.attrib.items()
    if known and ATTRIBUTE.fullmatch(name) and VALUE.fullmatch(value)
  }
  node = [tag if known else "mtext", attributes]
  if element.text:
    node.append(element.text)
  for child in element:
    node.append(_clean(child, depth - 1) if known else "".join(child.itertext()))
    if child.tail:
      node.append(child.tail)
  return node
