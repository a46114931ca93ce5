"""Are answers equal?  Each distinct pair is judged once, and never for longer than a deadline.

Graders:

  math_verify  equal in value, by math-verify and the checks of `math_verify_judge`
  openai       the rules of openai/prm800k, which the paper's grades follow
  math         the rules of hendrycks/math: equal strings after its normalisation

Verdicts are "equal", "different", or "undecided: " and a reason (time, memory, not parsed, ...).
"""

import collections
import contextlib
import hashlib
import json
import pathlib
import re
import sqlite3
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, TypeVar

from prm_jax.evaluation.answers.extraction import final_answer
from prm_jax.evaluation.answers.normal_form import MAX_CHARACTERS, normal_form, number
from prm_jax.evaluation.answers.workers import MEMORY_BYTES, Workers
from prm_jax.runtime.progress import Progress

Name = Literal["math_verify", "openai", "math"]
EQUAL, DIFFERENT = DECIDED = "equal", "different"
CACHE = pathlib.Path("~/.cache/prm_jax/verdicts.sqlite").expanduser()
MAX_CLASSES = 8  # of a problem that a further answer is compared with, the most frequent first
RULES = "2"  # counts up when a grader's rules change, so that stored verdicts are not used
DECIMAL_COMMA = re.compile(r"([+-]?\d{1,300}),(\d{1,300})")
Pair = tuple[str, str]
T = TypeVar("T")


class Grader:
  """Judges pairs of answers; a context manager that ends its worker processes.

  Args:
    name: of the rules.
    cache: file of verdicts, which is made where it is missing; None: they are kept in memory.
    seconds: that a pair may take in a worker; beyond it is undecided.
    workers: processes; 0: one for each core.
    memory: bytes of address space of each.
    options: of `math_verify_judge.judge`.
  """

  def __init__(
    self,
    name: Name = "math_verify",
    cache: pathlib.Path | None = None,
    seconds: float = 5.0,
    workers: int = 0,
    memory: int = MEMORY_BYTES,
    **options: Any,
  ):
    self.name, self.options = name, options
    self.workers = Workers(workers, seconds, memory)
    self._known: dict[Pair, str] = {}
    self._cache = _Cache(cache) if cache else None
    self._about = json.dumps([name, RULES, _version(name), options], sort_keys=True)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.workers.close()

  def verdicts(
    self, pairs: Iterable[Pair], on_done: Callable[[int], None] = lambda count: None
  ) -> list[str]:
    """The verdict of each pair; the order of its two answers plays no part but with "openai", whose
    rules take the given answer first and the truth second.

    Args:
      on_done: called with the number of pairs that are decided.
    """
    pairs = [(_short(a), _short(b)) for a, b in pairs]
    pairs = [pair if self.name == "openai" else (min(pair), max(pair)) for pair in pairs]
    todo = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
    at_once = {pair: verdict for pair in todo if (verdict := self._at_once(*pair))}
    left = [pair for pair in todo if pair not in at_once]
    if left and self._cache:
      stored = self._cache.get([self._key(pair) for pair in left])
      at_once |= {pair: verdict for pair, verdict in zip(left, stored) if verdict}
      left = [pair for pair in left if pair not in at_once]
    self._known |= at_once
    on_done(len(at_once))
    jobs = [{"grader": self.name, "a": a, "b": b} | self.options for a, b in left]
    for done, (at, verdict) in enumerate(self.workers.run(jobs), len(at_once) + 1):
      self._known[left[at]] = verdict
      on_done(done)
    if left and self._cache:  # but not what depends on the machine: time and memory
      found = {self._key(pair): self._known[pair] for pair in left}
      self._cache.put({key: verdict for key, verdict in found.items() if verdict in DECIDED})
    return [self._known[pair] for pair in pairs]

  def _at_once(self, a: str, b: str) -> str | None:
    """The verdict where no worker is needed."""
    if a == b:
      return EQUAL
    if self.name == "math":
      from prm_jax.evaluation.answers import string_graders  # half a second, for sympy

      return EQUAL if string_graders.math_equal(a, b) else DIFFERENT
    if max(len(a), len(b)) > MAX_CHARACTERS:
      return "undecided: too long"
    if self.name == "openai":
      return None
    forms = normal_form(a), normal_form(b)
    if forms[0] == forms[1] and forms[0]:
      return EQUAL
    values = number(forms[0]), number(forms[1])
    if None in values:
      return EQUAL if _decimal_comma(a, forms[1]) or _decimal_comma(b, forms[0]) else None
    if values[0] == values[1]:
      return EQUAL
    return None if "." in forms[0] + forms[1] else DIFFERENT  # decimals may be rounded

  def _key(self, pair: Pair) -> bytes:
    return hashlib.sha256(json.dumps([self._about, *pair]).encode()).digest()

  def classes(self, problems: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """The equivalence class of each answer of each problem, numbered by first appearance.

    Answers of one normal form are of one class.  The others, by how often they were given, are
    compared with the most frequent classes so far; whatever is undecided stays apart.

    Args:
      problems: by problem, how often each answer was given.
    """
    states = [_Classes(answers) for answers in problems]
    with Progress(desc="joining equal answers", unit="problems", total=len(states)) as bar:
      # All problems advance together, so that workers are never idle.
      while asked := [(state, *state.question()) for state in states if state.open]:
        bar.reach(len(states) - len(asked))
        verdicts = self.verdicts([(a, b) for _, a, b in asked])
        for (state, *_), verdict in zip(asked, verdicts):
          state.told(verdict == EQUAL)
    out = []
    for state, answers in zip(states, problems):
      numbers = {}
      names = {answer: state.of[normal_form(answer)] for answer in answers}
      out.append({a: numbers.setdefault(name, len(numbers)) for a, name in names.items()})
    return out


class _Classes:
  """Joins the distinct forms of a problem's answers, one question at a time."""

  def __init__(self, answers: Mapping[str, int]):
    counts = collections.Counter()
    for answer, count in answers.items():
      counts[normal_form(answer)] += count
    self.of: dict[str, str] = {}  # each form -> the form that its class is named by
    self.names: list[str] = []
    self._values: dict[Fraction, str] = {}
    self._waiting = collections.deque(form for form, _ in counts.most_common())
    self._at = 0
    self._skip()

  @property
  def open(self) -> bool:
    return bool(self._waiting)

  def question(self) -> Pair:
    return self._waiting[0], self.names[self._at]

  def told(self, equal: bool) -> None:
    if equal:
      self._join(self.names[self._at])
    else:
      self._at += 1
    self._skip()

  def _join(self, name: str) -> None:
    self.of[self._waiting.popleft()] = name
    self._at = 0

  def _skip(self) -> None:
    """On to the next question; a form for which no class is left begins one."""
    while self._waiting:
      form = self._waiting[0]
      value = number(form)
      if value is not None and value in self._values:
        self._join(self._values[value])
      elif value is not None and self._at < MAX_CLASSES and self._plain(self._at):
        self._at += 1  # another number
      elif self._at < min(len(self.names), MAX_CLASSES):
        return
      else:
        self.names.append(form)
        if value is not None:
          self._values[value] = form
        self._join(form)

  def _plain(self, at: int) -> bool:
    return at < len(self.names) and number(self.names[at]) is not None


class _Cache:
  """Verdicts in a file.  Where it cannot be used there is a warning, and every pair is judged."""

  def __init__(self, path: pathlib.Path):
    self.path, self.usable = path, True

  def get(self, keys: Sequence[bytes]) -> list[str | None]:
    """The verdict of each key; None: it is not known."""
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
      print(f"warning: {self.path}: verdicts are not kept: {error}", file=sys.stderr)
      self.usable = False
      return None


def _decimal_comma(answer: str, form: str) -> bool:
  """Whether an answer is the decimal number in a form, written with a comma: 1,22 is 1.22."""
  found = DECIMAL_COMMA.fullmatch(answer.strip(" $"))
  return bool(found) and f"{found[1]}.{found[2]}" == form


def _short(text: str) -> str:
  """The answer; of a text that is too long for one, the answer that it ends with."""
  return text if len(text) <= MAX_CHARACTERS else final_answer(text) or text


def _version(name: Name) -> str:
  import importlib.metadata

  packages = {"math_verify": "math-verify", "openai": "sympy"}
  return importlib.metadata.version(packages[name]) if name in packages else ""
