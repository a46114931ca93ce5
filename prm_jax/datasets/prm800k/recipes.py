"""From a stored PRM800K row to labelled steps, by a named recipe.

Public converters read PRM800K in at least seven ways.  Where a choice can be defended it is an
option of `Recipe`, and a recipe is a set of them.  Plain mistakes are not options: continuing a
rejected alternative (OpenR keeps the last completion of each step as the prefix of the next),
appending alternatives one after another as if they were steps (rlhf-book), and repeating the
labels of a shared prefix once per alternative (TRL).  `docs/data.md` tells more.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Collection, Iterable
from typing import Any, Literal

from prm_jax.datasets.prm800k import Record
from prm_jax.datasets.prm800k.records import UNFINISHED
from prm_jax.types import StepTree

OBJECTIVES = ("process", "outcome")
ANSWER = "# Answer"  # opens the answer in a solution's last step


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How rows become labels.  The defaults are the paper's (Lightman et al. 2023).

  Attributes:
    neutral: rating 0 is a "class" of its own, counts as "positive" or as "negative", or its label
      is dropped ("drop").  The paper keeps the class (2.6) and scores it as positive (F.2).
    alternatives: completions that were not chosen are "siblings" of the chosen one, or "drop".  The
      paper counts their labels (B); only the chosen one is ever continued.  Where none was chosen,
      "drop" leaves the first one rated -1: the solution's own step.
    human_completions: a step the labeler wrote (phase 1) is "positive", as the upstream README
      says (a "+1 step"), or unlabelled "context".
    unrated: a completion with rating null is "context" (on the path it stays, without a label;
      beside the path it is omitted) or "negative", as TRL's `rating == 1` makes it.
    quality_control: rows served to every labeler to check them: "drop" (paper, B) or "keep".
    screening: rows that screened new labelers: "drop" or "keep".
    unfinished: rows that end in bad_problem or give_up: "drop" (paper, B) or "keep".
    past_first_error: labels after the first step on the path rated -1: "drop" (paper, 2.6) or
      "keep".  Its siblings share its prefix and stay.
    duplicates: rows with the same problem, steps and labels as an earlier one: "keep" (nobody says
      they drop them; the manifest counts them) or "drop".
    phases: which phases of the collection.
  """

  neutral: Literal["class", "positive", "negative", "drop"] = "class"
  alternatives: Literal["siblings", "drop"] = "siblings"
  human_completions: Literal["positive", "context"] = "positive"
  unrated: Literal["context", "negative"] = "context"
  quality_control: Literal["drop", "keep"] = "drop"
  screening: Literal["drop", "keep"] = "drop"
  unfinished: Literal["drop", "keep"] = "drop"
  past_first_error: Literal["drop", "keep"] = "drop"
  duplicates: Literal["keep", "drop"] = "keep"
  phases: tuple[int, ...] = (1, 2)


RECIPES = {
  "paper": Recipe(),
  # Qwen2.5-Math-7B-PRM800K: its card says that neutral is positive and that problems of the test
  # set were removed, and no more; the rest is the paper's.
  "qwen": Recipe(neutral="positive"),
  # examples/datasets/prm800k.py of TRL: `rating == 1`, nothing filtered, phase 1 only.
  "trl": Recipe(
    neutral="negative",
    unrated="negative",
    quality_control="keep",
    screening="keep",
    unfinished="keep",
    past_first_error="keep",
    phases=(1,),
  ),
}


def recipe_of(manifest: dict[str, Any]) -> Recipe:
  """The recipe that a prepared dataset's manifest counted by, changed options included."""
  options = {key: value for key, value in manifest["recipe"].items() if key != "name"}
  return Recipe(**options | {"phases": tuple(options["phases"])})


def phase_of(source: str) -> int:
  """The phase of a source such as "phase1_train.jsonl:3"; generated rows are like phase 2."""
  return 1 if source.startswith("phase1") else 2


def dropping_rule(row: dict[str, Any], recipe: Recipe, source: str) -> str | None:
  """The name of the rule by which `recipe` drops this row; None if it keeps it."""
  reason = row["label"]["finish_reason"]
  if phase_of(source) not in recipe.phases:
    return "phase"
  if row["is_quality_control_question"] and recipe.quality_control == "drop":
    return "quality_control"
  if row["is_initial_screening_question"] and recipe.screening == "drop":
    return "screening"
  if reason in UNFINISHED and recipe.unfinished == "drop":
    return reason
  return None


def convert(row: dict[str, Any], recipe: Recipe, *, source: str) -> StepTree | str:
  """The labelled steps of a row, or the name of the rule that dropped it.

  The path is the chosen completion of each step, or the human one where none was chosen.  Where a
  step has neither (the first error of phase 2: `chosen_completion` null), its completions are
  labelled children of the path so far, and the path ends.  Unlabelled steps at the end of the path
  are left out: nothing would be read there.

  Args:
    row: a checked row of `datasets.prm800k`.
    recipe: which labels to keep.
    source: "FILE:LINE"; FILE names the phase.
  """
  return _convert(row, recipe, source)[0]


def _convert(row, recipe, source) -> tuple[StepTree | str, collections.Counter, int]:
  """As `convert`; also how many ratings each rule dropped, and the labels of human completions."""
  dropped: collections.Counter = collections.Counter()
  if rule := dropping_rule(row, recipe, source):
    return rule, dropped, 0
  nodes: list[tuple[str, int, int | None]] = []  # text, parent, label
  tip, ended, humans = -1, None, 0  # the path's last step; why it ended
  for step in row["label"]["steps"]:
    completions, index = step["completions"] or (), step["chosen_completion"]
    if ended:
      dropped[ended] += len(completions)
      continue
    chosen, error = None, False
    for i, completion in enumerate(completions):
      label, rule = _label(completion["rating"], recipe)
      if i != index and recipe.alternatives == "drop" and i != _own_error(step):
        rule = "alternatives"
      elif i == index:
        chosen, error = (completion["text"], tip, label), completion["rating"] == -1
      elif rule is None:
        nodes.append((completion["text"], tip, label))
      if rule:
        dropped[rule] += 1
    if human := step["human_completion"]:
      label = 1 if recipe.human_completions == "positive" else None
      if index is None:
        chosen = human["text"], tip, label
      elif label and recipe.alternatives == "siblings":
        nodes.append((human["text"], tip, label))
      else:
        label = None
      humans += label is not None
    if chosen is None:
      ended = "unreachable"
      continue
    nodes.append(chosen)  # after its siblings: its own children come next in preorder
    tip = len(nodes) - 1
    if error and recipe.past_first_error == "drop":
      ended = "past_first_error"
  while nodes and nodes[-1][2] is None:  # unlabelled steps are the path's, so these are its end
    nodes.pop()
  if not nodes:
    return "no_labels", dropped, 0
  steps, parents, labels = zip(*nodes)
  problem = row["question"]["problem"]
  return StepTree(problem, steps, parents, labels, source=source), dropped, humans


def _own_error(step: dict[str, Any]) -> int | None:
  """Index of the solution's own completion at a step where none was chosen: the first rated -1."""
  if step["chosen_completion"] is not None or step["human_completion"] is not None:
    return None
  ratings = [completion["rating"] for completion in step["completions"] or ()]
  return ratings.index(-1) if -1 in ratings else None


def _label(rating: int | None, recipe: Recipe) -> tuple[int | None, str | None]:
  """The label of a rating, or None and the rule that took it."""
  if rating is None:
    return (-1, None) if recipe.unrated == "negative" else (None, "unrated")
  if rating == 0 and recipe.neutral != "class":
    return {"positive": (1, None), "negative": (-1, None), "drop": (None, "neutral")}[
      recipe.neutral
    ]
  return rating, None


def same_answer(answer: str, ground_truth: str) -> bool:
  """Do two final answers agree?  As text, for now."""
  return answer.strip() == ground_truth.strip()


def convert_outcome(row: dict[str, Any], recipe: Recipe, *, source: str) -> StepTree | str:
  """The whole solution and whether its answer is right, for an outcome model (ORM).

  The solution is the pre-generated one, or else the path of a row that was labelled to its end.
  `finish_reason` "solution" is upstream's word that the answer is right; otherwise the answer is
  compared with the ground truth.  Returns a chain without labels and with `outcome`, or the name
  of the rule that dropped the row: those of `convert`, "no_answer", "no_ground_truth".
  """
  if rule := dropping_rule(row, recipe, source):
    return rule
  question, solved = row["question"], row["label"]["finish_reason"] == "solution"
  steps, answer = question.get("pre_generated_steps"), question.get("pre_generated_answer")
  if not steps or answer is None:
    steps = _path_texts(row) if solved else None
    _, found, answer = steps[-1].rpartition(ANSWER) if steps else ("", "", "")
    if not found:
      return "no_answer"
  if not solved and question["ground_truth_answer"] is None:
    return "no_ground_truth"
  return StepTree(
    problem=question["problem"],
    steps=tuple(steps),
    parents=tuple(range(-1, len(steps) - 1)),
    labels=(None,) * len(steps),
    outcome=solved or same_answer(answer, question["ground_truth_answer"]),
    source=source,
  )


def _path_texts(row: dict[str, Any]) -> list[str] | None:
  """The solution's own steps; None if the path breaks."""
  texts = []
  for step in row["label"]["steps"]:
    if step["chosen_completion"] is not None:
      texts.append(step["completions"][step["chosen_completion"]]["text"])
    elif step["human_completion"] is not None:
      texts.append(step["human_completion"]["text"])
    else:
      return None
  return texts


@dataclasses.dataclass
class Counts:
  """What a conversion read, kept and dropped: a split's part of manifest.json."""

  rows_read: int = 0
  rows_kept: int = 0
  rows_dropped: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  labels_read: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  labels: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # kept
  labels_dropped: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  human_labels: int = 0  # of `labels`: of human completions, which have no rating
  unlabelled_steps: int = 0  # kept as context
  duplicates: int = 0
  outcomes: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )  # of an ORM
  by_phase: dict[str, collections.Counter] = dataclasses.field(default_factory=dict)
  by_finish_reason: dict[str, collections.Counter] = dataclasses.field(default_factory=dict)
  test_problems: set[str] = dataclasses.field(default_factory=set)

  def add(self, row: dict[str, Any], result: StepTree | str, source: str, dropped, humans) -> None:
    ratings = [c["rating"] for s in row["label"]["steps"] for c in s["completions"] or ()]
    kept = isinstance(result, StepTree)
    self.rows_read += 1
    self.labels_read.update("null" if r is None else str(r) for r in ratings)
    if kept:
      labels = collections.Counter(str(label) for label in result.labels if label is not None)
      self.rows_kept += 1
      self.labels += labels
      self.labels_dropped += dropped
      self.human_labels += humans
      self.unlabelled_steps += result.labels.count(None)
      if result.outcome is not None:
        self.outcomes["right" if result.outcome else "wrong"] += 1
    else:
      labels = collections.Counter()
      self.rows_dropped[result] += 1
      self.labels_dropped[result] += len(ratings)
    groups = (
      (self.by_phase, str(phase_of(source))),
      (self.by_finish_reason, row["label"]["finish_reason"]),
    )
    for table, key in groups:
      group = table.setdefault(key, collections.Counter())
      group.update({"rows_read": 1, "rows_kept": int(kept)})
      group.update(labels)

  def update(self, other: Counts) -> None:
    """Adds what another conversion counted."""
    for field in dataclasses.fields(self):
      mine, others = getattr(self, field.name), getattr(other, field.name)
      if isinstance(mine, int):
        setattr(self, field.name, mine + others)
      elif type(mine) is dict:  # of counters
        for key, group in others.items():
          mine.setdefault(key, collections.Counter()).update(group)
      else:
        mine.update(others)

  def to_json(self) -> dict[str, Any]:
    """`labels_read` counts ratings, null ones too: each is in `labels` or in `labels_dropped`."""
    return {
      "rows": {"read": self.rows_read, "kept": self.rows_kept},
      "labels": {name: self.labels[name] for name in ("1", "0", "-1")},
      "dropped": dict(sorted(self.rows_dropped.items())),
      "unlabelled_steps": self.unlabelled_steps,
      "labels_read": {name: self.labels_read[name] for name in ("1", "0", "-1", "null")},
      "labels_dropped": dict(sorted(self.labels_dropped.items())),
      "human_labels": self.human_labels,
      "duplicates": self.duplicates,
      "by_phase": {key: dict(sorted(v.items())) for key, v in sorted(self.by_phase.items())},
      "by_finish_reason": {
        key: dict(sorted(v.items())) for key, v in sorted(self.by_finish_reason.items())
      },
    }


def problem_key(problem: str) -> str:
  """Problems that differ in white space only are the same problem."""
  return " ".join(problem.split())


def content_key(tree: StepTree) -> bytes:
  """The same for trees of the same problem, steps and labels, in every process."""
  content = repr((tree.problem, tree.steps, tree.parents, tree.labels, tree.outcome))
  return hashlib.blake2b(content.encode(), digest_size=16).digest()


class Converter:
  """Converts one record after the other; `counts` tells what became of them.

  `seen` has the content of all trees so far.
  """

  def __init__(
    self, recipe: Recipe, objective: str = "process", excluded_problems: Collection[str] = ()
  ):
    """Args as of `convert_all`."""
    if objective not in OBJECTIVES:
      raise ValueError(f"objective={objective!r}; expected one of {', '.join(OBJECTIVES)}")
    self.counts = Counts()
    self._recipe, self._objective = recipe, objective
    self._excluded = {problem_key(problem) for problem in excluded_problems}
    self.seen: set[bytes] = set()

  def __call__(self, record: Record) -> StepTree | None:
    row, source = record.row, record.source
    problem = row["question"]["problem"]
    dropped, humans = collections.Counter(), 0
    if problem_key(problem) in self._excluded:
      result: StepTree | str = "test_problem"
      self.counts.test_problems.add(problem)
    elif self._objective == "outcome":
      result = convert_outcome(row, self._recipe, source=source)
    else:
      result, dropped, humans = _convert(row, self._recipe, source)
    if isinstance(result, StepTree):
      content = content_key(result)
      if content in self.seen:
        self.counts.duplicates += 1
        if self._recipe.duplicates == "drop":
          result = "duplicate"
      self.seen.add(content)
    self.counts.add(row, result, source, dropped, humans)
    return None if isinstance(result, str) else result


def convert_all(
  records: Iterable[Record],
  recipe: Recipe,
  objective: str = "process",
  excluded_problems: Collection[str] = (),
) -> tuple[list[StepTree], Counts]:
  """Converts the records of a split.

  Args:
    records: of `datasets.prm800k.read_rows` or `read_records`.
    recipe: of `RECIPES`, or your own.
    objective: "process" for step labels, "outcome" for whole solutions with the outcome.
    excluded_problems: rows of these problems are dropped (rule "test_problem"), because they are
      tested on.  White space does not matter.

  Returns:
    the trees, in order, and what was read, kept and dropped.
  """
  converter = Converter(recipe, objective, excluded_problems)
  return [tree for tree in map(converter, records) if tree is not None], converter.counts
