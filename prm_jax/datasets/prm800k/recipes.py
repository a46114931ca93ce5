"""Turns PRM800K's records into labelled steps, by a named recipe.

Public converters read PRM800K in at least seven ways.  Defensible choices are options of `Recipe`,
and a recipe is a set of options.  Plain mistakes are not options: continuing a rejected alternative
(OpenR takes the last completion of each step as the prefix of the next), appending alternatives one
after another as if they were steps (rlhf-book), and repeating the labels of a shared prefix once
per alternative (TRL).  docs/data.md says more.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import pathlib
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, Literal

from prm_jax.datasets.prm800k.records import UNFINISHED, Record, Step
from prm_jax.datasets.prm800k.stored import stored_records
from prm_jax.types import StepTree

OBJECTIVES = ("process", "outcome")
ANSWER = "# Answer"  # opens the answer in a solution's last step


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How records become labels.  The defaults are the paper's (Lightman et al. 2023).

  Attributes:
    neutral: rating 0 is a "class" of its own, counts as "positive" or as "negative", or its label
      is dropped ("drop").  The paper keeps the class (2.6) and scores it as positive (F.2).
    alternatives: completions that were not chosen become "siblings" of the chosen one, or "drop"
      drops them.  The paper counts their labels (B); only the chosen one is ever continued.  Where
      none was chosen, "drop" keeps the first one rated -1: the solution's own step.
    human_completions: a step that the labeler wrote (phase 1) is "positive", as the upstream README
      says (a "+1 step"), or unlabelled "context".
    unrated: a completion with rating null is "context" (on the path it stays, without a label;
      beside the path it is omitted) or "negative", as TRL's `rating == 1` makes it.
    quality_control: records shown to every labeler to check them: "drop" (paper, B) or "keep".
    screening: records that screened new labelers: "drop" or "keep".
    unfinished: records that end in bad_problem or give_up: "drop" (paper, B) or "keep".
    past_first_error: labels after the first step on the path rated -1: "drop" (paper, 2.6) or
      "keep".  The siblings of that step share its prefix and stay.
    duplicates: records with the problem, steps and labels of an earlier one: "keep" (no known
      reader drops them; the manifest counts them) or "drop".
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
  # set were removed; the rest is the paper's.
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


def recipe_of(entry: dict[str, Any]) -> Recipe:
  """The recipe that a manifest's "recipe" describes, with the options that were changed.

  Raises:
    ValueError: it has other options.
  """
  options = {key: value for key, value in entry.items() if key != "name"}
  try:
    return Recipe(**options | {"phases": tuple(options["phases"])})
  except (KeyError, TypeError) as error:
    raise ValueError(
      f"the manifest's recipe {options} is of another version ({error}); write the dataset again "
      "with scripts/prepare_data.py"
    ) from error


@dataclasses.dataclass
class Conversion:
  """What became of one record."""

  tree: StepTree | None = None
  rule: str = ""  # why there is no tree
  labels_dropped: Counter = dataclasses.field(default_factory=Counter)  # by rule
  human_labels: int = 0  # of the tree's labels; human completions have no rating


def phase_of(record: Record) -> int:
  """The phase that the source file's name says; generated records are like phase 2."""
  return 1 if record.source.startswith("phase1") else 2


def dropping_rule(record: Record, recipe: Recipe) -> str:
  """The name of the rule by which `recipe` drops the whole record; "" if it keeps it."""
  solution = record.solution
  if phase_of(record) not in recipe.phases:
    return "phase"
  if solution.is_quality_control_question and recipe.quality_control == "drop":
    return "quality_control"
  if solution.is_initial_screening_question and recipe.screening == "drop":
    return "screening"
  if solution.label.finish_reason in UNFINISHED and recipe.unfinished == "drop":
    return solution.label.finish_reason
  return ""


def convert(record: Record, recipe: Recipe) -> Conversion:
  """The labelled steps of a record as a tree, for a process model.

  The path is the chosen completion of each step, or the human one where none was chosen.  The path
  ends at a step that has neither (the first error of phase 2: `chosen_completion` is null), with
  that step's completions as labelled children.  Unlabelled steps at the end of the path are left
  out: the head reads nothing there.
  """
  if rule := dropping_rule(record, recipe):
    return Conversion(rule=rule)
  conversion = Conversion()
  nodes: list[tuple[str, int, int | None]] = []  # text, parent, label
  tip = -1  # the path's last node
  ended = ""  # the rule that ended the path
  for step in record.solution.label.steps:
    if ended:
      conversion.labels_dropped[ended] += len(step.completions or ())
      continue
    decision = decide(step, recipe)
    conversion.labels_dropped += decision.labels_dropped
    conversion.human_labels += decision.human_label
    nodes += [(text, tip, label) for text, label in decision.siblings]
    if decision.next is None:
      ended = "unreachable"
      continue
    text, label = decision.next
    nodes.append((text, tip, label))  # after its siblings: its own children come next in preorder
    tip = len(nodes) - 1
    if decision.next_is_error and recipe.past_first_error == "drop":
      ended = "past_first_error"
  while nodes and nodes[-1][2] is None:  # only steps of the path can be unlabelled
    nodes.pop()
  if not nodes:
    return Conversion(rule="no_labels")
  problem = record.solution.question.problem
  conversion.tree = StepTree(problem, *zip(*nodes), source=record.source)
  return conversion


@dataclasses.dataclass
class Decision:
  """What a recipe makes of one step."""

  siblings: list[tuple[str, int]]  # text and label of the completions beside the path
  next: tuple[str, int | None] | None = None  # text and label of the path's next step, if any
  next_is_error: bool = False  # it is rated -1, whatever label the recipe gives it
  labels_dropped: Counter = dataclasses.field(default_factory=Counter)  # by rule
  human_label: bool = False  # does the human completion carry a label?


def decide(step: Step, recipe: Recipe) -> Decision:
  """Which completion continues the path, which ones stand beside it, and with what labels."""
  decision = Decision(siblings=[])
  for i, completion in enumerate(step.completions or ()):
    label, rule = _label(completion.rating, recipe)
    if i == step.chosen_completion:
      decision.next = completion.text, label
      decision.next_is_error = completion.rating == -1
    elif recipe.alternatives == "drop" and i != _own_error(step):
      rule = "alternatives"
    elif not rule:
      decision.siblings.append((completion.text, label))
    if rule:
      decision.labels_dropped[rule] += 1
  if human := step.human_completion:
    positive = recipe.human_completions == "positive"
    if step.chosen_completion is None:
      decision.next = human.text, 1 if positive else None
      decision.human_label = positive
    elif positive and recipe.alternatives == "siblings":
      decision.siblings.append((human.text, 1))
      decision.human_label = True
  return decision


def _own_error(step: Step) -> int | None:
  """Index of the solution's own completion where none was chosen: the first one rated -1."""
  if step.chosen_completion is not None or step.human_completion is not None:
    return None
  ratings = [completion.rating for completion in step.completions or ()]
  return ratings.index(-1) if -1 in ratings else None


def _label(rating: int | None, recipe: Recipe) -> tuple[int | None, str]:
  """The label of a rating, or None and the rule that dropped it."""
  if rating is None:
    return (-1, "") if recipe.unrated == "negative" else (None, "unrated")
  if rating == 0:
    neutral = {"class": 0, "positive": 1, "negative": -1, "drop": None}
    return neutral[recipe.neutral], "neutral" if recipe.neutral == "drop" else ""
  return rating, ""


def convert_outcome(record: Record, recipe: Recipe) -> Conversion:
  """The whole solution and whether its answer is right, for an outcome model (ORM).

  The solution is the pre-generated one, or else the path of a record that was labelled to its end.
  `finish_reason` "solution" is upstream's word that the answer is right; otherwise the answer is
  compared with the ground truth, as text.  The tree is a chain without labels.  The rules are
  those of `convert`, "no_answer" and "no_ground_truth".
  """
  if rule := dropping_rule(record, recipe):
    return Conversion(rule=rule)
  question = record.solution.question
  solved = record.solution.label.finish_reason == "solution"
  steps, answer = question.pre_generated_steps, question.pre_generated_answer
  if not steps or answer is None:
    path = [decide(step, recipe).next for step in record.solution.label.steps]
    if not solved or None in path:
      return Conversion(rule="no_answer")
    steps = [text for text, _ in path]
    _, found, answer = steps[-1].rpartition(ANSWER)
    if not found:
      return Conversion(rule="no_answer")
  truth = question.ground_truth_answer
  if not solved and truth is None:
    return Conversion(rule="no_ground_truth")
  tree = StepTree(
    problem=question.problem,
    steps=tuple(steps),
    parents=tuple(range(-1, len(steps) - 1)),
    labels=(None,) * len(steps),
    outcome=solved or answer.strip() == truth.strip(),
    source=record.source,
  )
  return Conversion(tree)


class Counts:
  """What a conversion read, kept and dropped: a split's part of manifest.json."""

  def __init__(self):
    self.records: Counter = Counter()  # read, kept, duplicates
    self.dropped: Counter = Counter()  # records by rule
    self.labels: Counter = Counter()  # kept
    self.labels_read: Counter = Counter()
    self.labels_dropped: Counter = Counter()  # by rule
    self.human_labels = 0  # of `labels`
    self.unlabelled_steps = 0  # kept as context
    self.outcomes: Counter = Counter()  # right, wrong
    self.by_phase: dict[str, Counter] = collections.defaultdict(Counter)
    self.by_finish_reason: dict[str, Counter] = collections.defaultdict(Counter)
    self.test_problems: set[str] = set()  # that were dropped

  def add(self, record: Record, conversion: Conversion) -> None:
    """Counts one record and what became of it."""
    label = record.solution.label
    ratings = [c.rating for step in label.steps for c in step.completions or ()]
    self.records["read"] += 1
    self.labels_read.update("null" if rating is None else str(rating) for rating in ratings)
    kept: Counter = Counter()
    if (tree := conversion.tree) is not None:
      kept.update(str(label) for label in tree.labels if label is not None)
      self.records["kept"] += 1
      self.labels += kept
      self.labels_dropped += conversion.labels_dropped
      self.human_labels += conversion.human_labels
      self.unlabelled_steps += tree.labels.count(None)
      if tree.outcome is not None:
        self.outcomes["right" if tree.outcome else "wrong"] += 1
    else:
      self.dropped[conversion.rule] += 1
      self.labels_dropped[conversion.rule] += len(ratings)
    kept.update({"rows_read": 1, "rows_kept": int(tree is not None)})
    for group in (self.by_phase[str(phase_of(record))], self.by_finish_reason[label.finish_reason]):
      group.update(kept)

  def to_json(self) -> dict[str, Any]:
    """The counts as manifest.json has them.

    `labels_read` counts ratings, null among them; each one is in `labels` or in `labels_dropped`.
    """

    def by_group(groups: dict[str, Counter]) -> dict[str, dict[str, int]]:
      return {key: dict(sorted(group.items())) for key, group in sorted(groups.items())}

    return {
      "rows": {name: self.records[name] for name in ("read", "kept")},
      "labels": {name: self.labels[name] for name in ("1", "0", "-1")},
      "dropped": dict(sorted(self.dropped.items())),
      "unlabelled_steps": self.unlabelled_steps,
      "labels_read": {name: self.labels_read[name] for name in ("1", "0", "-1", "null")},
      "labels_dropped": dict(sorted(self.labels_dropped.items())),
      "human_labels": self.human_labels,
      "duplicates": self.records["duplicates"],
      "by_phase": by_group(self.by_phase),
      "by_finish_reason": by_group(self.by_finish_reason),
    }


def convert_all(
  records: Iterable[Record],
  recipe: Recipe,
  objective: str = "process",
  excluded_problems: Collection[str] = (),
) -> tuple[list[StepTree], Counts]:
  """The trees of the records that the recipe keeps, in order, and counts of all.

  Args:
    objective: "process" for step labels, "outcome" for whole solutions with the outcome.
    excluded_problems: their records are dropped (rule "test_problem"), because they are tested on.
      White space does not matter.
  """
  if objective not in OBJECTIVES:
    raise ValueError(f"objective={objective!r}; expected one of {', '.join(OBJECTIVES)}")
  function = convert if objective == "process" else convert_outcome
  excluded = {" ".join(problem.split()) for problem in excluded_problems}
  trees: list[StepTree] = []
  counts = Counts()
  seen: set[bytes] = set()  # digests of trees
  for record in records:
    problem = record.solution.question.problem
    if " ".join(problem.split()) in excluded:
      conversion = Conversion(rule="test_problem")
      counts.test_problems.add(problem)
    else:
      conversion = function(record, recipe)
    if (tree := conversion.tree) is not None:
      content = repr(dataclasses.replace(tree, source="")).encode()
      digest = hashlib.blake2b(content, digest_size=16).digest()
      if digest in seen:
        counts.records["duplicates"] += 1
        if recipe.duplicates == "drop":
          conversion = Conversion(rule="duplicate")
      seen.add(digest)
    counts.add(record, conversion)
    if conversion.tree is not None:
      trees.append(conversion.tree)
  return trees, counts


def step_trees(
  directory: str | pathlib.Path,
  split: str,
  objective: str,
  recipe: dict[str, Any],
  excluded_problems: Collection[str],
  limit: int | None = None,
) -> tuple[list[StepTree], dict[str, Any]]:
  """The trees of a prepared split and their counts: a reader of `datasets.labelled`."""
  records = itertools.islice(stored_records(directory, split), limit)
  trees, counts = convert_all(records, recipe_of(recipe), objective, excluded_problems)
  return trees, counts.to_json()
