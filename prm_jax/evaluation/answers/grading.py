"""Decides whether answers are equal, each distinct pair once and within a deadline.

Graders:

  math_verify  equal values, by math-verify and the checks of `math_verify_judge`
  openai       the rules of openai/prm800k, which the paper's grades follow
  math         the rules of hendrycks/math: equal strings after its normalisation

A verdict is "equal", "different", or "undecided: " and a reason (time, memory, not parsed, ...).
"""

import collections
import contextlib
import hashlib
import json
import pathlib
import re
import sqlite3
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from fractions import Fraction
from importlib import metadata
from typing import Literal, TypeVar

from prm_jax.evaluation.answers.extraction import final_answer
from prm_jax.evaluation.answers.normal_form import (
  MAX_CHARACTERS,
  hundredth,
  is_percentage,
  normal_form,
  number,
)
from prm_jax.evaluation.answers.workers import Workers
from prm_jax.runtime import storage
from prm_jax.runtime.progress import Progress

Name = Literal["math_verify", "openai", "math"]
EQUAL, DIFFERENT = DECIDED = "equal", "different"
CACHE = storage.CACHE / "verdicts.sqlite"
PACKAGES = {  # the verdicts depend on them
  "math_verify": ("math-verify", "latex2sympy2-extended", "sympy"),
  "openai": ("pylatexenc", "sympy"),
}
MAX_CLASSES = 8  # most classes that an answer is compared with, the most frequent first
RULES = "11"  # increase it when a grader's rules change, so that stored verdicts are not used
DECIMAL_COMMA = re.compile(r"([+-]?\d{1,300}),(\d{1,300})")
Pair = tuple[str, str]
T = TypeVar("T")


class Grader:
  """Judges pairs of answers; as a context manager it ends its worker processes.

  Args:
    name: the rules.
    cache: file of verdicts, created if it is missing; None keeps them in memory only.
    seconds: the time limit of a pair in a worker process, after which it is undecided.
    workers: number of worker processes; 0 is one per core.
    precision: of `math_verify_judge.judge`; only for "math_verify".
  """

  def __init__(
    self,
    name: Name = "math_verify",
    cache: pathlib.Path | None = None,
    seconds: float = 5.0,
    workers: int = 0,
    precision: int = 6,
  ):
    self.name = name
    self.options = {} if precision == 6 else {"precision": precision}
    self.workers = Workers(workers, seconds)
    self._known: dict[Pair, str] = {}
    self._cache = _Cache(cache) if cache else None
    versions = [metadata.version(package) for package in PACKAGES.get(name, ())]
    self._about = json.dumps([name, RULES, versions, self.options], sort_keys=True)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.workers.close()

  def verdicts(
    self, pairs: Iterable[Pair], on_done: Callable[[int], None] = lambda count: None
  ) -> list[str]:
    """Returns the verdict of each pair.

    The order of the two answers plays no part, except for "openai", whose rules take the given
    answer first and the truth second.

    Args:
      on_done: called with the number of distinct new pairs that have a verdict so far.
    """
    pairs = [(_short(a), _short(b)) for a, b in pairs]
    pairs = [pair if self.name == "openai" else (min(pair), max(pair)) for pair in pairs]
    new = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
    judged = {pair: verdict for pair in new if (verdict := self._without_worker(*pair))}
    left = [pair for pair in new if pair not in judged]
    if left and self._cache:
      stored = self._cache.get([self._key(pair) for pair in left])
      judged |= {pair: verdict for pair, verdict in zip(left, stored) if verdict}
      left = [pair for pair in left if pair not in judged]
    self._known |= judged
    on_done(len(judged))
    jobs = [{"grader": self.name, "a": a, "b": b} | self.options for a, b in left]
    try:
      for done, (job, verdict) in enumerate(self.workers.run(jobs), len(judged) + 1):
        self._known[left[job]] = verdict
        on_done(done)
    finally:  # also when interrupted
      # An undecided verdict depends on the machine's speed and memory.
      decided = [pair for pair in left if self._known.get(pair) in DECIDED]
      if decided and self._cache:
        self._cache.put({self._key(pair): self._known[pair] for pair in decided})
    return [self._known[pair] for pair in pairs]

  def _without_worker(self, a: str, b: str) -> str | None:
    """Returns the verdict of a pair that needs no worker process, and None for the others."""
    if a == b:
      return EQUAL
    if self.name == "math":
      from prm_jax.evaluation.answers import string_graders  # half a second: it imports sympy

      return EQUAL if string_graders.math_equal(a, b) else DIFFERENT
    if max(len(a), len(b)) > MAX_CHARACTERS:
      return "undecided: too long"
    if self.name == "openai":
      return None
    forms = normal_form(a), normal_form(b)
    if forms[0] == forms[1] and forms[0]:
      return EQUAL
    if any(re.search(r"\d \d", form) for form in forms):  # which math-verify would add up
      return DIFFERENT
    values = number(forms[0]), number(forms[1])
    if None in values:
      return EQUAL if _decimal_comma(a, forms[1]) or _decimal_comma(b, forms[0]) else None
    # 50% has the normal form and the value of 50, and is 1/2 as well.
    parts = [value / 100 if is_percentage(x) else value for x, value in zip((a, b), values)]
    if values[0] == values[1] or parts[0] == parts[1]:
      return EQUAL
    return None if "." in forms[0] + forms[1] else DIFFERENT  # decimals may be rounded

  def _key(self, pair: Pair) -> bytes:
    return hashlib.sha256(json.dumps([self._about, *pair]).encode()).digest()

  def classes(self, problems: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Returns the equivalence class of each answer of each problem, numbered by first appearance.

    Answers with equal normal forms are in one class.  Other answers, the most frequent first, are
    compared with the most frequent classes so far.  An undecided pair counts as different.

    Args:
      problems: how often each answer of a problem was given.
    """
    joins = [_join(answers) for answers in problems]
    classes: list[dict[str, int]] = [{} for _ in joins]
    replies = dict.fromkeys(range(len(joins)))  # to a generator's last question; None starts it
    with Progress(desc="joining equal answers", unit="problems", total=len(joins)) as bar:
      while replies:  # all problems advance together, so that no worker process is idle
        questions = {}
        for i, reply in replies.items():
          try:
            questions[i] = joins[i].send(reply)
          except StopIteration as end:
            classes[i] = end.value
        bar.reach(len(joins) - len(questions))
        verdicts = self.verdicts(questions.values())
        replies = {i: verdict == EQUAL for i, verdict in zip(questions, verdicts)}
    return classes


def _join(answers: Mapping[str, int]) -> Generator[Pair, bool, dict[str, int]]:
  """Returns the class of each of a problem's answers, as `Grader.classes` does.

  Yields pairs of answers, and is sent whether they are equal.
  """
  forms = {answer: normal_form(answer) for answer in answers}
  percentages = {answer for answer in answers if is_percentage(answer)}
  # 50% is 50 if an answer without the sign is 50; otherwise it is 0.5.
  plain = {number(form) for answer, form in forms.items() if answer not in percentages} - {None}
  if not plain & {number(forms[answer]) for answer in percentages}:
    forms |= {answer: hundredth(forms[answer]) for answer in percentages}
  counts, spelling = collections.Counter(), {}
  for answer, form in forms.items():
    counts[form] += answers[answer]
    # The answer goes to math-verify: its form lacks the space between number and unit.
    spelling.setdefault(form, form if answer in percentages else answer)
  class_of: dict[str, str] = {}  # the first form of the class of each form
  classes: list[str] = []
  by_value: dict[Fraction, str] = {}
  for form, _ in counts.most_common():
    value = number(form)
    if value in by_value:
      class_of[form] = by_value[value]
      continue
    for name in classes[:MAX_CLASSES]:
      if value is not None and number(name) is not None and "." not in form + name:
        continue  # two plain numbers that differ; decimals may be rounded
      if (yield spelling[form], spelling[name]):
        class_of[form] = name
        break
    else:
      classes.append(form)
      class_of[form] = form
      if value is not None:
        by_value[value] = form
  numbers: dict[str, int] = {}
  return {a: numbers.setdefault(class_of[form], len(numbers)) for a, form in forms.items()}


class _Cache:
  """A file of verdicts.  If it cannot be used, a warning says so and every pair is judged."""

  def __init__(self, path: pathlib.Path):
    self.path, self.usable = path, True

  def get(self, keys: Sequence[bytes]) -> list[str | None]:
    """Returns the verdict of each key, None if it is not known."""
    query = "SELECT verdict FROM verdicts WHERE key = ?"
    read = lambda file: [(file.execute(query, (key,)).fetchone() or [None])[0] for key in keys]
    return self._with(read) or [None] * len(keys)

  def put(self, verdicts: Mapping[bytes, str]) -> None:
    query = "INSERT OR REPLACE INTO verdicts VALUES (?, ?)"
    self._with(lambda file: file.executemany(query, verdicts.items()))

  def _with(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
    if not self.usable:
      return None
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      with contextlib.closing(sqlite3.connect(self.path, timeout=20)) as file, file:
        file.execute("CREATE TABLE IF NOT EXISTS verdicts (key BLOB PRIMARY KEY, verdict TEXT)")
        return work(file)
    except (OSError, sqlite3.Error) as error:
      print(f"warning: {self.path}: verdicts are not stored: {error}", file=sys.stderr)
      self.usable = False
      return None


def _decimal_comma(answer: str, form: str) -> bool:
  """Returns whether an answer is the decimal number in a form, with a comma: 1,22 is 1.22."""
  match = DECIMAL_COMMA.fullmatch(answer.strip(" $"))
  return bool(match) and f"{match[1]}.{match[2]}" == form


def _short(text: str) -> str:
  """Returns the answer, or the final answer in a text that is too long to be one."""
  return text if len(text) <= MAX_CHARACTERS else final_answer(text) or text
