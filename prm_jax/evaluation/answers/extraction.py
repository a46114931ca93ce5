"""The final answer of a solution's text."""

import re
from typing import Literal

Rule = Literal["auto", "boxed", "heading", "last_line"]
BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)|\\boxed\s+(?=[^\s{])")
HEADING = re.compile(r"^#+ *Answer\b:?[ \t]*", re.MULTILINE)  # of PRM800K's solutions
SAID = re.compile(r"(?i)\b(?:final )?answer(?: is)?\s*:?\s+(?=\S)")
# How solutions end after the prompt of Minerva, and the language model harness.
HOPED = re.compile(r"(?is).*final answer is:?\s*(\S.*?)[.\s]*")
OPENED_BY = {r"\]": r"\[", r"\)": r"\(", "$$": "$$"}
# Boxes that are one answer: "\boxed{1}, \boxed{2}", "\boxed{3} papers and \boxed{4} bins".
BETWEEN = re.compile(r"[^\n]{0,30}?(?:,|\band\b|\bor\b)[^\n]{0,10}|[\s$]{0,4}")
MAX_HOPED = 500  # characters of such an end
MAX_TEXT = 2**20  # characters from the end that are looked at


def final_answer(text: str, rule: Rule = "auto") -> str | None:
  """The final answer in a text; None if it has none.

  Args:
    rule: "boxed": what is in the last `\\boxed{...}`, with balanced braces; several that are joined
      by commas or words like "and" are one answer.  "heading": what follows the last "# Answer".
      "last_line": the last line or displayed formula, from "answer is" on if it says so.  "auto":
      the first of these that there is; but before all "The final answer is X. I hope it is correct"
      after the last box.
  """
  text = text[-MAX_TEXT:]
  found = _hoped(text) if rule == "auto" else None
  if found is None and rule in ("auto", "boxed"):
    found = _boxed(text)
  if found is None and rule in ("auto", "heading") and (places := [*HEADING.finditer(text)]):
    found = text[places[-1].end() :]
  if found is None and rule in ("auto", "last_line"):
    text = text.strip()
    last = text.rpartition("\n")[2]
    if fence := OPENED_BY.get(last.strip(" .")):  # the last line of a displayed formula
      last = text[: -len(last)].rpartition(fence)[2]
    found = last[[*SAID.finditer(last)][-1].end() :] if SAID.search(last) else last
  return (found or "").strip() or None


def _hoped(text: str) -> str | None:
  end = text.rfind("I hope it is correct")
  found = HOPED.fullmatch(text[max(end - MAX_HOPED, 0) : end]) if end >= 0 else None
  return found[1] if found and not BOX.search(found[1] + text[end:]) else None


def _boxed(text: str) -> str | None:
  boxes, closed = [], closings(text)  # start, end, content of each box
  for match in BOX.finditer(text):
    if boxes and match.start() < boxes[-1][1]:
      continue  # in the box before
    if text[match.end()] != "{":  # \boxed 5
      if content := re.match(r"[^\s$]+", text[match.end() :]):
        boxes.append((match.start(), match.end() + content.end(), content[0]))
    elif (end := closed.get(match.end())) is not None:
      boxes.append((match.start(), end + 1, text[match.end() + 1 : end]))
  if not boxes:
    return None
  parts = [boxes[-1]]
  for box in boxes[-2::-1]:
    if not BETWEEN.fullmatch(text[box[1] : parts[-1][0]]):
      break
    parts.append(box)
  return ", ".join(dict.fromkeys(content for _, _, content in parts[::-1]))


def closings(text: str) -> dict[int, int]:
  """Where each brace that is closed is closed."""
  found, open_at = {}, []
  for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
    if brace[0] == "{":
      open_at.append(brace.start())
    elif brace[0] == "}" and open_at:
      found[open_at.pop()] = brace.start()
  return found
