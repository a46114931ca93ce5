"""A web page of solutions, which shows the steps that the model doubts and whether it is right.

The page is one HTML file that holds its data.  It fetches nothing, and no text of the data becomes
markup.
"""

import base64
import gzip
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import msgspec
import numpy as np

from prm_jax.evaluation.candidate_table import is_number
from prm_jax.evaluation.mathml import answer_pieces, pieces
from prm_jax.evaluation.step_scores import ScoredSteps
from prm_jax.runtime import json_lines
from prm_jax.runtime.progress import Progress
from prm_jax.types import RATINGS

HERE = pathlib.Path(__file__).parent
PAGE_PROBLEMS = 4  # problems of a block of data, which the browser unpacks to show one of them
# Characters shown as a question mark: halves of surrogate pairs (from paths that are no UTF-8), and
# controls, such as those that reverse text.
UNSEEN = {*range(0xD800, 0xE000), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F)}
UNSEEN |= {*range(0x2066, 0x206A), *range(32), *range(0x7F, 0xA0)} - {*b"\t\n\r"}
SEEN = dict.fromkeys(UNSEEN, "?")


class Record(ScoredSteps, kw_only=True):
  """The keys of a candidate's record that the page reads; other readers may accept more types."""

  problem: json_lines.Text
  unique_id: str | int | None = None  # of the problem; default: its text
  text: str | None = None
  answer: str | None = None
  is_correct: bool | None = None
  final_answer_correct: bool | None = None
  finished: bool | None = None

  def __post_init__(self):
    self.check(self.steps)


class Step(msgspec.Struct, omit_defaults=True):
  """A step with P(not wrong), its standard deviation over an ensemble, and its label or rating."""

  text: list[Any]  # `mathml.pieces`
  p: float | None
  std: float | msgspec.UnsetType = msgspec.UNSET
  label: int | msgspec.UnsetType = msgspec.UNSET


class Solution(msgspec.Struct):
  """A solution; `correct` is None if it is unknown."""

  steps: list[Step]
  correct: bool | None
  missing: bool  # it was cut off, or has no answer
  answer: list[Any]
  scores: dict[str, float]
  why: list[str]  # reasons for showing it


class Problem(msgspec.Struct):
  """A problem with the solutions that the page shows."""

  text: list[Any]
  truth: list[Any]
  level: str
  subject: str
  solutions: list[Solution]


def from_records(
  records: Sequence[Mapping[str, Any]],
  labels: Mapping[tuple[str, tuple[str, ...]], Sequence[int | None]] = {},
  why: Sequence[str] = (),
  neutral: str = "positive",
  own: Mapping[str, str] = {},
) -> list[Problem]:
  """Returns the problems of records (`candidate_table.Candidate`, or with `text` for `steps`).

  Args:
    labels: labels of steps, by problem and steps.  A solution without an entry takes that of its
      longest prefix with one.
    why: the reason for showing each record; "" or a missing reason is none.
    neutral: "positive" counts neutral steps as right, anything else as wrong.
    own: keys of a solution's other scores, by the names that the page gives them.
  """
  problems: dict[str, Problem] = {}
  own = {_text(name): key for name, key in own.items()}
  for i, record in enumerate(Progress(records, desc="typesetting", unit="solutions", leave=False)):
    if (name := name_of(record)) not in problems:
      about = {key: _text(record.get(key)) for key in ("level", "subject")}
      if about["level"].isdigit():
        about["level"] = f"Level {about['level']}"  # as in MATH
      truth = answer_pieces(_text(record.get("ground_truth_answer")))
      problems[name] = Problem(_pieces(record["problem"]), truth, solutions=[], **about)
    reasons = [why[i]] if i < len(why) and why[i] else []
    problems[name].solutions.append(_solution(record, labels, reasons, neutral, own))
  return list(problems.values())


def name_of(record: Mapping[str, Any]) -> str:
  """Returns what names a record's problem: its `unique_id`, 7 and "7" alike, or its text."""
  name = record.get("unique_id")
  return record["problem"] if name in (None, "") else str(name)


def _solution(record, labels, why: list[str], neutral: str, own: Mapping[str, str]) -> Solution:
  texts = record.get("steps") or [record.get("text") or ""]
  std, right = record.get("step_std"), _right(record, neutral)
  known = _known(labels, record["problem"], texts)
  steps = []
  for i, text in enumerate(texts):
    step = Step(_pieces(text), round(right[i], 9) if len(right) == len(texts) else None)
    if std and len(std) == len(texts):
      step.std = round(std[i], 4)
    if known[i] is not None:
      step.label = known[i]
    steps.append(step)
  # The product of the steps is computed: the file's `prm_score` may count neutral otherwise.
  names = ({} if right else {"PRM": "prm_score"}) | {"ORM": "orm_score"} | own
  scores = {name: record[key] for name, key in names.items() if is_number(record.get(key))}
  if right:
    scores = {"PRM": float(np.prod(right))} | scores | {"lowest step": min(right)}
  scores = {name: scores[name] for name in dict.fromkeys((*own, *scores)) if name in scores}
  answer = record.get("answer")
  missing = record.get("finished") is False or ("answer" in record and not _text(answer).strip())
  correct = record.get("is_correct")
  if correct is None:
    correct = record.get("final_answer_correct")  # ProcessBench's name
  return Solution(steps, correct, missing, answer_pieces(_text(answer)), scores, why)


def _known(labels, problem: str, steps: Sequence[str]) -> list[int | None]:
  """Returns a label or None for each step, from the longest prefix of the steps with labels.

  PRM800K's labelled solutions end at their first wrong step.
  """
  for n in range(len(steps), 0, -1) if labels else ():
    if (known := labels.get((problem, tuple(steps[:n])))) is not None:
      return [*known, *[None] * (len(steps) - n)]
  return [None] * len(steps)


def _right(record: Mapping[str, Any], neutral: str) -> list[float]:
  """Returns P(right) of each step; [] if the record has no scores of steps."""
  if ratings := record.get("rating_probs"):
    right = [p.get("1", 0.0) + (neutral == "positive") * p.get("0", 0.0) for p in ratings]
    totals = (sum(p.get(str(rating), 0.0) for rating in RATINGS) for p in ratings)
    right = [p / total for p, total in zip(right, totals)]
  else:
    right = record.get("step_scores") or []
  return [min(p, 1.0) for p in right]


def _text(value: Any) -> str:
  return "" if value is None else str(value).translate(SEEN)


def _pieces(value: Any) -> list[Any]:
  return pieces(_text(value))


def template(path: pathlib.Path) -> jinja2.Template:
  """Returns a template that escapes every text but our own Markup, and shows bytes as base64."""
  return jinja2.Template(
    path.read_text(encoding="utf-8"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
  )


def _shown(value: Any) -> Any:
  if isinstance(value, bytes):
    return base64.b64encode(value).decode()
  return value.translate(SEEN) if type(value) is str else value  # Markup stays


def render(
  problems: Sequence[Problem], title: str, subtitle: str, report: str = "", threshold: float = 0.5
) -> str:
  """Returns the page as one HTML file.

  Args:
    report: HTML to show above the solutions; it must come from autoescaping templates.
    threshold: a step with a lower P(right) is doubted; a step above the middle between the
      threshold and 1 has no colour.
  """
  encode = lambda value: msgspec.json.encode(value).replace(b"<", b"\\u003c").decode()
  names = dict.fromkeys(name for p in problems for s in p.solutions for name in s.scores)
  index = {"problems": [[_flags(p), _search(p)] for p in problems], "size": PAGE_PROBLEMS}
  index |= {"scores": [*names], "threshold": threshold, "sure": (1 + threshold) / 2}
  blocks = [problems[i : i + PAGE_PROBLEMS] for i in range(0, len(problems), PAGE_PROBLEMS)]
  packed = [gzip.compress(msgspec.json.encode(block), 6, mtime=0) for block in blocks]
  script = (HERE / "page.js").read_text(encoding="utf-8")
  return template(HERE / "page.html").render(
    title=title,
    subtitle=subtitle,
    style=(HERE / "page.css").read_text(encoding="utf-8"),
    script=script,
    script_hash=hashlib.sha256(script.encode()).digest(),
    report=report,
    scored=bool(names),
    index=encode(index),
    pages=packed,
  )


def _flags(problem: Problem) -> int:
  """Returns the bits by which the page filters problems.

  1: a solution is right; 2: one is wrong; 4: the best-scored is wrong; 8: the worst-scored is right
  although another is wrong.  Of equal scores all count: none is right, or all are.
  """
  known = [s for s in problem.solutions if s.correct is not None]
  right, wrong = any(s.correct for s in known), any(not s.correct for s in known)
  first_score = lambda solution: next(iter(solution.scores.values()))
  scored = [(first_score(s), s.correct) for s in known if s.scores and not s.missing]
  extreme = lambda pick: [correct for x, correct in scored if x == pick(scored)[0]]
  high = bool(scored) and not any(extreme(max))
  low = bool(scored) and all(extreme(min)) and wrong
  return right + 2 * wrong + 4 * high + 8 * low


def _search(problem: Problem) -> str:
  plain = lambda parts: "".join(x if isinstance(x, str) else _letters(x["m"]) for x in parts)
  answers = dict.fromkeys(plain(s.answer) for s in problem.solutions)
  return " ".join([plain(problem.text), problem.level, problem.subject, *answers]).lower()


def _letters(tree: list[Any]) -> str:
  return "".join(x if isinstance(x, str) else _letters(x) for x in tree[2:])
