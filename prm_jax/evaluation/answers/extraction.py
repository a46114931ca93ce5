"""Extracts the final answer from the text of a solution."""

import re
from typing import Literal

Rule = Literal["auto", "boxed", "heading", "last_line"]
BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)|\\boxed\s+(?=[^\s{])")
HEADING = re.compile(r"^#+ *Answer\b:?[ \t]*", re.MULTILINE)  # in PRM800K's solutions
# No two runs of \s stand side by side: that would take quadratic time.
SAID = re.compile(r"(?i)\b(?:final )?answer(?: is)?(?:\*\*)?(?:\s*(?::(?:\*\*)?|\*\*))?\s+(?=\S)")
# The ending that the prompts of Minerva and of lm-evaluation-harness ask for.
HOPED = re.compile(r"(?is).*final answer is:?\s*(\S.*?)[.\s]*")
OPENED_BY = {r"\]": r"\[", r"\)": r"\(", "$$": "$$"}
# Text between two boxes of one answer: "\boxed{1}, \boxed{2}", "\boxed{3} papers and \boxed{4}".
BETWEEN = re.compile(r"[^\n.]{0,30}?(?:,|\band\b|\bor\b)[^\n.]{0,10}|[\s$]{0,4}")
UNBRACED = re.compile(r"[^\s$]+")
MAX_HOPED = 500  # characters before "I hope it is correct" that are searched
MAX_TEXT = 2**20  # characters that are searched, from the end of the text


def final_answer(text: str, rule: Rule = "auto") -> str | None:
  """Returns the final answer in a text, or None if there is none.

  Args:
    rule: "boxed" takes the content of the last `\\boxed{...}`, with balanced braces; boxes that
      commas, "and" or "or" join in a sentence are one answer.  "heading" takes the text after the
      last "# Answer".  "last_line" takes the last line or displayed formula, after "answer is" if
      the line has it.  "auto" takes "The final answer is X. I hope it is correct" if no box is in
      X or after it; otherwise it tries the other rules in this order.
  """
  text = text[-MAX_TEXT:]
  answer = _hoped(text) if rule == "auto" else None
  if answer is None and rule in ("auto", "boxed"):
    answer = _boxed(text)
  if answer is None and rule in ("auto", "heading") and (headings := [*HEADING.finditer(text)]):
    answer = text[headings[-1].end() :]
  if answer is None and rule in ("auto", "last_line"):
    text = text.strip()
    last = text.rpartition("\n")[2]
    if fence := OPENED_BY.get(last.strip(" .")):  # the last line of a displayed formula
      last = text[: -len(last)].rpartition(fence)[2]
    said = [*SAID.finditer(last)]
    answer = last[said[-1].end() :] if said else last
  return (answer or "").strip() or None


def _hoped(text: str) -> str | None:
  end = text.rfind("I hope it is correct")
  match = HOPED.fullmatch(text[max(end - MAX_HOPED, 0) : end]) if end >= 0 else None
  return match[1] if match and not BOX.search(match[1] + text[end:]) else None


def _boxed(text: str) -> str | None:
  boxes, closed = [], _closings(text)  # start, end and content of each box
  for match in BOX.finditer(text):
    if boxes and match.start() < boxes[-1][1]:
      continue  # inside the previous box
    if text[match.end()] != "{":  # \boxed 5
      if content := UNBRACED.match(text, match.end()):
        boxes.append((match.start(), content.end(), content[0]))
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


def _closings(text: str) -> dict[int, int]:
  """Returns the position of the closing brace for each opening brace that has one."""
  closed, open_at = {}, []
  for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
    if brace[0] == "{":
      open_at.append(brace.start())
    elif brace[0] == "}" and open_at:
      closed[open_at.pop()] = brace.start()
  return closed
