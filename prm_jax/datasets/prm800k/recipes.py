"""Turns PRM800K's records into labelled steps, by a named recipe.

Public converters read PRM800K in at least seven ways.  The defensible choices are options of
`Recipe`; plain mistakes are not, and docs/data.md lists them.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import Any, Literal

import msgspec

from prm_jax.datasets.prm800k.records import UNFINISHED, Completion, HumanCompletion, Record
from prm_jax.types import StepTree, problem_key

ANSWER = "# Answer"  # opens the answer in a solution's last step


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
  """The rules that make labels of records.  The defaults are the paper's (Lightman et al. 2023).

  Attributes:
    name: part of the step contract; prepare_data.py adds the options that were changed.
    neutral: rating 0 is a "class" of its own, counts as "positive" or as "negative", or its label
      is dropped ("drop").  The paper keeps the class (2.6) and scores it as positive (F.2).
    alternatives: completions that were not chosen become "siblings" of the chosen one, or are
      dropped ("drop").  The paper counts their labels (B); only the chosen one is ever continued.
      Where none was chosen, "drop" keeps the first one rated -1: the solution's own step.
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
    phases: the phases of the collection to read.
  """

  name: str
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
  "paper": Recipe("paper"),
  # Qwen2.5-Math-7B-PRM800K: its card says that neutral is positive and that problems of the test
  # set were removed; other options are the paper's.
  "qwen": Recipe("qwen", neutral="positive"),
  # examples/datasets/prm800k.py of TRL: `rating == 1`, nothing filtered, phase 1 only.
  "trl": Recipe(
    "trl",
    neutral="negative",
    unrated="negative",
    quality_control="keep",
    screening="keep",
    unfinished="keep",
    past_first_error="keep",
    phases=(1,),
  ),
}


def phase_of(record: Record) -> int:
  """Returns the phase in the source file's name; generated records count as phase 2."""
  return 1 if record.source.startswith("phase1") else 2


def dropping_rule(record: Record, recipe: Recipe) -> str:
  """Returns the name of the rule by which `recipe` drops the whole record; "" if it keeps it."""
  solution, reason = record.solution, record.solution.label.finish_reason
  rules = {
    "phase": phase_of(record) not in recipe.phases,
    "quality_control": solution.is_quality_control_question and recipe.quality_control == "drop",
    "screening": solution.is_initial_screening_question and recipe.screening == "drop",
    reason: reason in UNFINISHED and recipe.unfinished == "drop",
  }
  return next((rule for rule, drops in rules.items() if drops), "")


Node = tuple[Completion | HumanCompletion, int, int | None]  # candidate, parent, label


def convert(record: Record, recipe: Recipe) -> tuple[StepTree | str, Counter]:
  """Converts a record to a tree of labelled steps, for a process model (see `nodes`).

  Returns:
    The tree, or the name of the rule that drops the record; and the number of labels that each rule
    dropped.  "human" counts the labels given to human completions, which have no rating.
  """
  kept, counts = nodes(record, recipe)
  if not kept:
    return "no_labels", Counter()
  candidates, parents, labels = zip(*kept)
  texts = tuple(candidate.text for candidate in candidates)
  problem = record.solution.question.problem
  return StepTree(problem, texts, parents, labels, source=record.source), counts


def nodes(record: Record, recipe: Recipe) -> tuple[list[Node], Counter]:
  """Returns the nodes that `recipe` keeps, in preorder, and counts of labels as `convert` does.

  The path is the chosen completion of each step, or the human one where none was chosen.  The path
  ends at a step that has neither (the first error of phase 2: `chosen_completion` is null), with
  that step's completions as labelled children.  Unlabelled steps at the end of the path are left
  out: the head does not read them.
  """
  kept: list[Node] = []
  counts: Counter = Counter()
  tip = -1  # the path's last node
  ended = ""  # the rule that ended the path
  for step in record.solution.label.steps:
    completions = step.completions or []
    if ended:
      counts[ended] += len(completions)
      continue
    chosen = step.chosen
    errors = (completion for completion in completions if completion.rating == -1)
    own = chosen or next(errors, None)  # the solution's own completion
    for candidate in filter(None, (*completions, step.human_completion)):
      label, rule = _label(candidate, recipe)
      if candidate is chosen:
        chosen_label = label
      elif recipe.alternatives == "drop" and candidate is not own:
        rule = "alternatives"
      elif not rule:
        kept.append((candidate, tip, label))
      if candidate is step.human_completion:
        counts["human"] += not rule
      elif rule:
        counts[rule] += 1
    if chosen is None:
      ended = "unreachable"
      continue
    kept.append((chosen, tip, chosen_label))  # last: its children come next in preorder
    tip = len(kept) - 1
    if chosen is not step.human_completion and chosen.rating == -1:
      ended = "past_first_error" if recipe.past_first_error == "drop" else ""
  while kept and kept[-1][2] is None:  # only steps of the path can be unlabelled
    kept.pop()
  return kept, counts


def _label(completion: Completion | HumanCompletion, recipe: Recipe) -> tuple[int | None, str]:
  """Returns the label of a completion; or None and the rule that dropped it."""
  if isinstance(completion, HumanCompletion):
    return (1, "") if recipe.human_completions == "positive" else (None, "context")
  if completion.rating is None:
    return (-1, "") if recipe.unrated == "negative" else (None, "unrated")
  if completion.rating == 0:
    neutral = {"class": 0, "positive": 1, "negative": -1, "drop": None}
    return neutral[recipe.neutral], "neutral" if recipe.neutral == "drop" else ""
  return completion.rating, ""


def convert_outcome(record: Record, recipe: Recipe) -> tuple[StepTree | str, Counter]:
  """Converts a whole solution to a chain with its outcome and no labels, for an outcome model.

  The solution is the pre-generated one, or else the path of a record that was labelled to its end.
  `finish_reason` "solution" means that upstream found the answer right; otherwise the answer is
  compared with the ground truth, as text.  Returns what `convert` does; the rules are "no_answer"
  and "no_ground_truth".
  """
  question = record.solution.question
  solved = record.solution.label.finish_reason == "solution"
  steps, answer = question.pre_generated_steps, question.pre_generated_answer
  if not steps or answer is None:
    path = [step.chosen for step in record.solution.label.steps]
    if not solved or None in path or ANSWER not in path[-1].text:
      return "no_answer", Counter()
    steps = [step.text for step in path]
    answer = steps[-1].rpartition(ANSWER)[2]
  truth = question.ground_truth_answer
  if not solved and truth is None:
    return "no_ground_truth", Counter()
  chain = tuple(steps), tuple(range(-1, len(steps) - 1)), (None,) * len(steps)
  right = solved or answer.strip() == truth.strip()
  return StepTree(question.problem, *chain, outcome=right, source=record.source), Counter()


def convert_all(
  records: Iterable[Record],
  recipe: Recipe,
  objective: str = "process",
  excluded_problems: Collection[str] = (),
) -> tuple[list[StepTree], dict[str, Any]]:
  """Converts records to the trees that the recipe keeps, in order, and counts what it drops.

  Args:
    objective: "process" for step labels, "outcome" for whole solutions with the outcome.
    excluded_problems: test problems, whose records are dropped (rule "test_problem").  White space
      does not matter.

  Returns:
    The trees, and a split's entry in manifest.json.  `labels_read` counts ratings, including null;
    each one is in `labels` or in `labels_dropped`.
  """
  converter = convert if objective == "process" else convert_outcome
  excluded = {*map(problem_key, excluded_problems)}
  trees: list[StepTree] = []
  seen: set[StepTree] = set()
  counts: dict[str, Any] = {
    "rows": {"read": 0, "kept": 0},
    "labels": Counter({"1": 0, "0": 0, "-1": 0}),
    "dropped": Counter(),
    "unlabelled_steps": 0,
    "labels_read": Counter({"1": 0, "0": 0, "-1": 0, "null": 0}),
    "labels_dropped": Counter(),
    "human_labels": 0,
    "duplicates": 0,
    "by_phase": defaultdict(Counter),
    "by_finish_reason": defaultdict(Counter),
  }
  for record in records:
    is_test = problem_key(record.solution.question.problem) in excluded
    rule = "test_problem" if is_test else dropping_rule(record, recipe)
    tree, labels = (rule, Counter()) if rule else converter(record, recipe)
    if isinstance(tree, StepTree):
      content = dataclasses.replace(tree, source="")
      counts["duplicates"] += content in seen
      if content in seen and recipe.duplicates == "drop":
        tree = "duplicate"
      else:
        trees.append(tree)
      seen.add(content)
    _count(counts, record, tree, labels)
  for name in ("dropped", "labels_dropped"):
    counts[name] = dict(sorted((+counts[name]).items()))
  for name in ("by_phase", "by_finish_reason"):
    groups = sorted(counts[name].items())
    counts[name] = {key: dict(sorted(group.items())) for key, group in groups}
  return trees, counts


def _count(counts: dict[str, Any], record: Record, tree: StepTree | str, dropped: Counter) -> None:
  """Adds a record, its tree (or the rule that dropped it) and its dropped labels to `counts`."""
  label = record.solution.label
  ratings = [c.rating for step in label.steps for c in step.completions or ()]
  kept = Counter(rows_read=1, rows_kept=0)
  if isinstance(tree, StepTree):
    labels = Counter(str(label) for label in tree.labels if label is not None)
    kept += Counter(labels, rows_kept=1)
    counts["labels"].update(labels)
    counts["human_labels"] += dropped.pop("human", 0)
    counts["labels_dropped"].update(dropped)
    counts["unlabelled_steps"] += tree.labels.count(None)
  else:
    counts["dropped"][tree] += 1
    counts["labels_dropped"][tree] += len(ratings)
  counts["rows"]["read"] += 1
  counts["rows"]["kept"] += kept["rows_kept"]
  counts["labels_read"].update("null" if rating is None else str(rating) for rating in ratings)
  counts["by_phase"][str(phase_of(record))].update(kept)
  counts["by_finish_reason"][label.finish_reason].update(kept)
