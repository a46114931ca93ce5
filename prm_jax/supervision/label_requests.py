"""Requests for people's labels, and checks of their answers (paper section 2.4 and appendix B).

A request is a line `{"request": ID, "problem": ..., "steps": [...]}`; nothing in it can bias a
labeller.  Scores, answers, quality control and the number of labellers are in the key, a file for
whoever hands out the requests and reads the answers.  An answer is `{"request": ID,
"labeller": NAME, "labels": [1, 0, -1]}`: ratings up to and including the first wrong step, as in
PRM800K.
"""

import collections
import hashlib
import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Annotated, Any, Literal

import msgspec
import numpy as np

from prm_jax import step_metrics
from prm_jax.evaluation import candidate_table
from prm_jax.evaluation.step_scores import ScoredSteps
from prm_jax.runtime import json_lines
from prm_jax.supervision import active

COMPLETE = "one for each step, or for the steps up to the first -1"
PASS = 0.75  # agreement with quality control that a labeller must reach (appendix B)
Rating = Annotated[int, msgspec.Meta(ge=-1, le=1)]
Ratings = Annotated[list[Rating], msgspec.Meta(min_length=1)]
Steps = Annotated[list[json_lines.Text], msgspec.Meta(min_length=1)]


class Item(msgspec.Struct):
  """A solution to label, or with `labels`, one for quality control."""

  problem: json_lines.Text
  steps: Steps
  labels: list[Rating | None] | None = None  # exact, for all steps or up to the first wrong one
  is_correct: bool | None = None
  about: dict[str, Any] = {}  # why it was chosen; copied to the key and to the labels


class Request(msgspec.Struct):
  request: str
  problem: json_lines.Text
  steps: Steps


class Key(msgspec.Struct):
  """The facts about a request that labellers do not see."""

  request: str
  kind: Literal["single", "shared", "quality_control"]  # one, two or all labellers answer it
  labels: Ratings | None = None  # of quality control
  is_correct: bool | None = None
  about: dict[str, Any] = {}


class Answer(msgspec.Struct):
  request: str
  labeller: json_lines.Text
  labels: Ratings

  def __post_init__(self):
    if -1 in self.labels[:-1]:
      raise ValueError("labels go on after the first -1: end them there")


def requests(
  chosen: Sequence[Item], known: Sequence[Item] = (), *, shared: float = 0.1, seed: int = 0
) -> list[tuple[Request, Key]]:
  """Returns requests in random order, each with its key.

  Args:
    known: quality-control items, which every labeller answers.
    shared: share of the chosen items that two labellers answer, to measure their agreement.
  """
  rng = np.random.default_rng(seed)
  twice = {*rng.permutation(len(chosen))[: round(shared * len(chosen))].tolist()}
  items = [(item, "shared" if i in twice else "single") for i, item in enumerate(chosen)]
  items += [(item, "quality_control") for item in known]
  out = []
  for number, i in enumerate(rng.permutation(len(items)).tolist()):
    item, kind = items[i]
    text = hashlib.sha256(repr((item.problem, item.steps)).encode()).hexdigest()
    # The name has a hash of the text, so that no answer of another round passes for this one's.
    name = f"{seed}-{number:06d}-{text[:8]}"
    labels = _exact_labels(item) if kind == "quality_control" else None
    request = Request(name, item.problem, item.steps)
    out.append((request, Key(name, kind, labels, item.is_correct, item.about)))
  return out


def _exact_labels(item: Item) -> list[int]:
  """Returns a quality-control item's labels up to the first wrong step.

  Raises:
    ValueError: a label is missing, or there are more labels than steps.
  """
  labels = list(item.labels or [])
  labels = labels[: labels.index(-1) + 1] if -1 in labels else labels
  if not labels or None in labels or not _complete(labels, item.steps):
    raise ValueError(
      f"the quality-control item {json_lines.show(item.problem)} has labels {item.labels} for "
      f"{len(item.steps)} steps; expected {COMPLETE}"
    )
  return labels


def _complete(labels: Sequence[int], steps: Sequence[str]) -> bool:
  """Returns whether every step has a label, or every step up to a first -1."""
  return len(labels) == len(steps) or (len(labels) < len(steps) and labels[-1] == -1)


def collect(
  asked: Iterable[tuple[Request, Key]], answers: Iterable[tuple[str, Answer]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
  """Returns labelled solutions in the form of `datasets.stepwise`, and a report on the labellers.

  If there are quality-control solutions, labellers who agree with less than 75 % of them, or have
  answered none, are left out.  To agree is to find the same first wrong step, or none.  If a
  request has several answers, that of the labeller with the highest agreement is taken.

  Args:
    answers: pairs of FILE:LINE and answer.

  Raises:
    BadLine: an answer to an unknown request, a second answer by the same labeller, or more or fewer
      labels than the steps up to the first wrong one.
  """
  asked = {request.request: (request, key) for request, key in asked}
  by_request = _by_request(asked, answers)
  quality = _quality(asked, by_request)
  checked = any(key.kind == "quality_control" for _, key in asked.values())
  passed = lambda who: not checked or quality.get(who, 0.0) >= PASS
  lines, pairs = [], []
  for name, (request, key) in asked.items():
    trusted = {who: each for who, each in by_request.get(name, {}).items() if passed(who)}
    if not trusted or key.kind == "quality_control":
      continue
    for a, b in itertools.combinations(trusted.values(), 2):
      pairs += zip(a.labels, b.labels)
    best = max(trusted, key=lambda who: quality.get(who, 0.0))
    labels = trusted[best].labels
    unlabelled = [None] * (len(request.steps) - len(labels))
    line = {"problem": request.problem, "steps": request.steps, "labels": [*labels, *unlabelled]}
    if key.is_correct is not None:
      line["is_correct"] = key.is_correct
    line["provenance"] = {"method": "people", "request": name, "labeller": best, **key.about}
    lines.append(line)
  people = sorted({who for each in by_request.values() for who in each})
  report = {
    "requests": len(asked),
    "answered": len(by_request),
    "labelled": len(lines),
    "labellers": {
      who: {
        "answers": sum(who in each for each in by_request.values()),
        "quality_control": quality.get(who),
        "left_out": not passed(who),
      }
      for who in people
    },
    "agreement": agreement(pairs),
  }
  return lines, report


def _by_request(
  asked: Mapping[str, tuple[Request, Key]], answers: Iterable[tuple[str, Answer]]
) -> dict[str, dict[str, Answer]]:
  """Returns the answers by request and labeller; errors as `collect`."""
  by_request: dict[str, dict[str, Answer]] = collections.defaultdict(dict)
  for where, answer in answers:
    if answer.request not in asked:
      raise json_lines.BadLine(f"{where}: request {json_lines.show(answer.request)} was not made")
    if answer.labeller in by_request[answer.request]:
      who = json_lines.show(answer.labeller)
      raise json_lines.BadLine(f"{where}: {who} has answered request {answer.request} before")
    steps, labels = asked[answer.request][0].steps, answer.labels
    if not _complete(labels, steps):
      raise json_lines.BadLine(
        f"{where}: {len(labels)} labels for {len(steps)} steps; expected {COMPLETE}"
      )
    by_request[answer.request][answer.labeller] = answer
  return by_request


def _quality(asked: Mapping[str, tuple], by_request: Mapping[str, dict]) -> dict[str, float]:
  """Returns the share of quality-control items whose first wrong step each labeller finds."""
  right = collections.defaultdict(list)
  for name, answers in by_request.items():
    if labels := asked[name][1].labels:
      for who, answer in answers.items():
        same = len(answer.labels) == len(labels) and (answer.labels[-1] < 0) == (labels[-1] < 0)
        right[who].append(same)
  return {who: float(np.mean(each)) for who, each in right.items()}


def agreement(pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
  """Returns two labellers' agreement on the steps that both labelled: share, and Cohen's kappa.

  Neutral and positive count as equal, as when a solution is scored; `share_of_ratings`
  distinguishes them.
  """
  if not pairs:
    return {"steps": 0, "share": None, "kappa": None, "share_of_ratings": None}
  a, b = np.array(pairs).T
  return {
    "steps": len(a),
    "share": float(np.mean((a < 0) == (b < 0))),
    "kappa": step_metrics.kappa(a < 0, b < 0),
    "share_of_ratings": float(np.mean(a == b)),
  }


class Scored(ScoredSteps, kw_only=True):
  """The keys of a scored line that selection reads."""

  problem: json_lines.Text
  steps: Steps
  is_correct: bool | None  # None: undecided, counts as wrong
  rating_probs: candidate_table.Ratings
  finished: bool | None = None

  def __post_init__(self):
    self.check(self.steps)


Solution = tuple[str, tuple[str, ...]]  # problem and steps


def choose(
  path: pathlib.Path,
  rule: str,
  count: int,
  seed: int,
  globally: bool = False,
  labelled: Iterable[Item] = (),
  neutral: str = "positive",
) -> list[Item]:
  """Chooses solutions of a scored file by `active.select`, except those in `labelled`.

  Leaves out solutions that were cut off and not scored (score.py --skip_cut_off).

  Args:
    neutral: how the neutral class counts in P(right), "positive" or "negative".

  Raises:
    BadLine: a line has no `is_correct`, no scores, or scores that are not probabilities.
    ValueError: the rule is "uncertain" and the file has no `step_std`, which only ensembles write.
  """
  done = {(item.problem, tuple(item.steps)) for item in labelled}
  times: collections.Counter[Solution] = collections.Counter()
  lines: dict[Solution, Scored] = {}
  numbers: dict[str, int] = {}  # of problems
  for where, record in json_lines.records(path):
    if record.get("finished") is False and "rating_probs" not in record:
      continue
    line = json_lines.convert(record, Scored, where)
    solution = line.problem, tuple(line.steps)
    if solution in done:
      continue
    times[solution] += 1
    lines.setdefault(solution, line)
    numbers.setdefault(line.problem, len(numbers))
    if rule == "uncertain" and line.step_std is None:
      raise ValueError(f"{where}: no step_std: --rule=uncertain needs an ensemble (loss.heads)")
  pool = active.Pool(
    problems=np.array([numbers[problem] for problem, _ in lines]),
    correct=np.array([bool(line.is_correct) for line in lines.values()]),
    steps=[steps for _, steps in lines],
    times=np.array([times[solution] for solution in lines]),
    right=[_heads(line, neutral) for line in lines.values()],
  )
  scored, items = list(lines.values()), []
  for i in active.select(pool, rule, count, seed, not globally):
    line, about = scored[i], {"rule": rule, "score": float(np.exp(pool.scores[i]))}
    items.append(Item(line.problem, line.steps, is_correct=line.is_correct, about=about))
  return items


def _heads(line: Scored, neutral: str) -> np.ndarray:
  """Returns P(right) of each step as two heads with the ensemble's mean and deviation."""
  probs = np.array([msgspec.structs.astuple(each) for each in line.rating_probs])
  right = 1 - probs[:, : 1 + (neutral == "negative")].sum(1) / probs.sum(1)
  spread = np.zeros(len(right)) if line.step_std is None else np.array(line.step_std)
  return np.stack([right - spread, right + spread], axis=1)


def read_items(path: pathlib.Path, exact: bool = False) -> list[Item]:
  """Reads solutions with labels, such as a file that `collect` made.

  Args:
    exact: whether they are for quality control, so that labels must be complete.

  Raises:
    BadLine: a solution is damaged, or labels are not complete.
  """
  items = []
  for where, item in json_lines.structs(path, Item):
    try:
      if exact:
        _exact_labels(item)
    except ValueError as error:
      raise json_lines.BadLine(f"{where}: {error}") from None
    items.append(item)
  return items


def key(path: pathlib.Path) -> pathlib.Path:
  """Returns the path of the key that belongs to a file of requests."""
  return path.with_name(f"{path.name.removesuffix('.jsonl')}.key.jsonl")


def write(asked: Sequence[tuple[Request, Key]], requests: IO[str], keys: IO[str]) -> None:
  for request, about in asked:
    requests.write(msgspec.json.encode(request).decode() + "\n")
    keys.write(msgspec.json.encode(about).decode() + "\n")


def read(path: pathlib.Path) -> list[tuple[Request, Key]]:
  """Reads the requests of a file, each with its key; BadLine: one has no key, or occurs twice."""
  keys = _by_name(key(path), Key)
  asked = []
  for name, (where, request) in _by_name(path, Request).items():
    if name not in keys:
      raise json_lines.BadLine(f"{where}: request {name} is not in {key(path)}")
    asked.append((request, keys[name][1]))
  return asked


def _by_name(path: pathlib.Path, kind: type[Any]) -> dict[str, tuple[str, Any]]:
  """Returns place and content of a file's lines by their `request`; BadLine: two have the same."""
  found: dict[str, tuple[str, Any]] = {}
  for where, line in json_lines.structs(path, kind):
    if line.request in found:
      raise json_lines.BadLine(f"{where}: request {line.request} is in the file twice")
    found[line.request] = where, line
  return found


def table(report: dict[str, Any]) -> list[str]:
  """Returns the report of `collect` as lines of text."""
  lines = [f"{report['answered']:,} of {report['requests']:,} requests have an answer"]
  for who, counts in report["labellers"].items():
    quality = counts["quality_control"]
    passed = (
      "no quality control" if quality is None else f"{100 * quality:.0f} % of quality control"
    )
    why = "" if quality is None else f", under {100 * PASS:.0f} %"
    out = f": left out{why}" if counts["left_out"] else ""
    lines.append(f"{json_lines.show(who)}: {counts['answers']:,} answers, {passed}{out}")
  both = report["agreement"]
  if both["steps"]:
    kappa = "none" if both["kappa"] is None else f"{both['kappa']:.2f}"
    lines.append(
      f"agreement on {both['steps']:,} shared steps: {100 * both['share']:.1f} %, "
      f"kappa {kappa}; of ratings {100 * both['share_of_ratings']:.1f} %"
    )
  return [*lines, f"{report['labelled']:,} labelled solutions"]
