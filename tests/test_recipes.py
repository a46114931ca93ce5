"""Recipes turn PRM800K's rows into the labels that the paper and other readers count."""

import itertools
import json

import conftest
import pytest
from conftest import completion, make_row, step
from msgspec.structs import replace

from prm_jax.datasets import prm800k
from prm_jax.datasets.prm800k import recipes, records
from prm_jax.datasets.prm800k.recipes import RECIPES

PAPER = RECIPES["paper"]


def convert(row, recipe, source="phase1_train.jsonl:1", objective="process"):
  """The tree of a row, or the rule that dropped it."""
  record = records.parse(json.dumps(row).encode(), source)
  trees, counts = recipes.convert_all([record], recipe, objective)
  return trees[0] if trees else next(iter(counts["dropped"]))


def nodes(tree):
  """The (step, parent, label) of each node of a tree."""
  return list(zip(tree.steps, tree.parents, tree.labels))


def test_the_chosen_or_human_completion_is_continued():
  """The path continues with the chosen completion, or the human one where none was chosen."""
  tree = convert(conftest.phase1_row(), PAPER)
  assert nodes(tree) == [
    ("Count.", -1, 0),
    ("Add.", -1, 1),  # chosen; "Add!" is not rated: omitted
    ("2+3=6", 1, -1),
    ("2+3=4", 1, -1),
    ("2+3=5", 1, 1),  # human
    ("Done.\n\n# Answer\n\n5", 4, 1),
    ("# Answer\n\n5", 4, 1),
  ]
  assert (tree.problem, tree.source) == ("What is 2 + 3?", "phase1_train.jsonl:1")
  # where none was chosen, the rejected step and its alternatives are children of the prefix
  tree = convert(conftest.phase2_row(), PAPER)
  assert nodes(tree)[1:] == [("2+3=6", 0, -1), ("2+3=5", 0, 1), ("So?", 0, 0)]


def test_unrated_steps_are_context():
  """An unrated step on the path stays as context, unless no labelled step follows it."""
  tree = convert(conftest.unrated_row(), PAPER, "phase2_train.jsonl:2")
  assert nodes(tree) == [("First.", -1, None), ("2+3=5", 0, 1)]
  trl = replace(RECIPES["trl"], phases=(1, 2))
  assert convert(conftest.unrated_row(), trl, "phase2_train.jsonl:2").labels == (-1, 1, -1)
  row = make_row([step(completion("A", None))])
  assert convert(row, PAPER, "phase2_train.jsonl:2") == "no_labels"


def test_labels_stop_at_the_first_error_on_the_path():
  """The paper's labels end with the first error on the path; an option keeps the later ones."""
  beside = step(completion("a", -1), completion("b", 1), chosen=1)
  first = step(completion("c", -1), completion("d", 0), chosen=0)
  row = make_row([beside, first, step(completion("e", 1))])
  tree = convert(row, PAPER)
  assert nodes(tree) == [("a", -1, -1), ("b", -1, 1), ("d", 1, 0), ("c", 1, -1)]
  assert nodes(convert(row, replace(PAPER, past_first_error="keep")))[4:] == [("e", 3, 1)]


def test_each_option_changes_only_the_labels_that_it_names():
  """Each option of a recipe changes only the labels that it names."""

  def labels(row, source="phase1_train.jsonl:1", **options):
    """The label of each step with these options, or the rule that dropped the row."""
    tree = convert(row, replace(PAPER, **options), source)
    return tree if isinstance(tree, str) else dict(zip(tree.steps, tree.labels))

  neutral = make_row([step(completion("n", 0)), step(completion("p", 1))])
  assert labels(neutral, neutral="positive") == {"n": 1, "p": 1}
  assert labels(neutral, neutral="negative") == {"n": -1, "p": 1}
  assert labels(neutral, neutral="drop") == {"n": None, "p": 1}

  path = {"Add.": 1, "2+3=5": 1, "# Answer\n\n5": 1}
  assert labels(conftest.phase1_row(), alternatives="drop") == path
  dropped = labels(conftest.phase2_row(), alternatives="drop")
  assert list(dropped.values()) == [1, -1]  # the solution's own error is no alternative

  assert labels(conftest.phase1_row(), human_completions="context")["2+3=5"] is None
  assert labels(conftest.phase1_row(), unrated="negative")["Add!"] == -1
  beside = make_row([step(completion("a", 1), human="h")])  # a human step that was not continued
  assert labels(beside) == {"a": 1, "h": 1}
  assert labels(beside, human_completions="context") == {"a": 1}

  for rule in ("quality_control", "initial_screening"):
    row = make_row([step(completion("a"))]) | {f"is_{rule}_question": True}
    rule = rule.removeprefix("initial_")
    assert labels(row) == rule
    assert labels(row, **{rule: "keep"}) == {"a": 1}
  for reason in ("bad_problem", "give_up"):
    row = make_row([step(completion("a")), step(chosen=None)], reason)
    assert labels(row) == reason
    assert labels(row, unfinished="keep") == {"a": 1}
  assert labels(neutral, source="phase2_test.jsonl:1", phases=(1,)) == "phase"


def test_steps_after_a_step_without_a_choice_are_dropped():
  """Steps after one where nothing was chosen are dropped, because their prefix is unknown."""
  row = make_row([step(completion("a", 0), chosen=None), step(completion("b", 1))])
  trees, counts = recipes.convert_all(prm800k.numbered([row], "phase2_train.jsonl"), PAPER)
  assert nodes(trees[0]) == [("a", -1, 0)]
  assert counts["labels_dropped"] == {"unreachable": 1}


@pytest.mark.parametrize(
  ("row", "expected"),
  [
    (conftest.phase2_row(), False),  # 6 is not 5
    (conftest.outcome_row(), True),
    (conftest.phase1_row(), True),  # from the path of a solved row
    (conftest.unrated_row(), "no_answer"),
  ],
)
def test_an_outcome_is_that_of_the_answer_or_of_a_whole_path(row, expected):
  """The outcome is that of the pre-generated answer, or of a path labelled to its end."""
  tree = convert(row, PAPER, objective="outcome")
  if isinstance(expected, str):
    assert tree == expected
    return
  assert tree.outcome is expected
  assert set(tree.labels) == {None}
  assert tree.parents == tuple(range(-1, len(tree.steps) - 1))
  if steps := row["question"].get("pre_generated_steps"):
    assert list(tree.steps) == steps


def test_the_outcome_depends_on_the_answer_alone():
  """A right answer after wrong steps is a right outcome; without a true answer there is none."""
  row = conftest.phase2_row()
  row["question"]["pre_generated_answer"] = " 5"
  assert convert(row, PAPER, objective="outcome").outcome is True
  row["question"]["ground_truth_answer"] = None
  assert convert(row, PAPER, objective="outcome") == "no_ground_truth"


def test_duplicates_are_counted_and_test_problems_dropped():
  """Duplicates are counted and dropped by an option; test problems are always dropped."""
  rows = [conftest.phase2_row(), conftest.outcome_row(), conftest.phase2_row()]
  three = list(prm800k.numbered(rows, "phase2_train.jsonl"))
  trees, counts = recipes.convert_all(three, PAPER)
  assert (len(trees), counts["duplicates"]) == (3, 1)
  drop = replace(PAPER, duplicates="drop")
  trees, counts = recipes.convert_all(three, drop, excluded_problems={"Add  2 to 3."})
  assert [tree.source for tree in trees] == ["phase2_train.jsonl:1"]
  assert counts["dropped"] == {"duplicate": 1, "test_problem": 1}


@pytest.fixture(scope="module")
def real(prm800k_sample):
  """The records of the real sample, by split."""
  return {
    split: [
      record
      for phase in (1, 2)
      for record in prm800k.read_records(prm800k_sample / f"phase{phase}_{split}.jsonl")
    ]
    for split in ("train", "test")
  }


# Rows kept; labels +1, 0, -1.  Counted from the raw files by hand: ratings of the kept rows, and 3
# human completions in the phase 1 rows that were solved (14 with the two given up).
REAL = {
  ("paper", "train"): (716, 4311, 368, 657, {"give_up": 4, "screening": 1}),
  ("paper", "test"): (217, 1411, 111, 200, {"give_up": 2}),
  ("qwen", "train"): (716, 4311 + 368, 0, 657, {"give_up": 4, "screening": 1}),
  ("qwen", "test"): (217, 1411 + 111, 0, 200, {"give_up": 2}),
  ("trl", "train"): (1, 10, 0, 1, {"phase": 720}),
  ("trl", "test"): (5, 54 + 14, 0, 76 + 44 + 7, {"phase": 214}),
}


@pytest.mark.shared_data
@pytest.mark.parametrize(("recipe", "split"), REAL)
def test_recipes_on_real_records(real, recipe, split):
  """A recipe gives the hand-counted labels of real rows, and each rating is kept or dropped."""
  trees, counts = recipes.convert_all(real[split], RECIPES[recipe])
  kept, positive, neutral, negative, dropped = REAL[recipe, split]
  assert counts["rows"] == {"read": len(real[split]), "kept": kept}
  assert counts["labels"] == {"1": positive, "0": neutral, "-1": negative}
  assert counts["dropped"] == dropped
  read = sum(counts["labels_read"].values()) + counts["human_labels"]
  labels = sum(counts["labels"].values())
  assert read == labels + sum(counts["labels_dropped"].values())
  assert labels == sum(len(t.labels) - t.labels.count(None) for t in trees)


@pytest.mark.shared_data
def test_each_real_label_is_read_once(real):
  """Six real rows give their 75 labels once each, not the 220 that TRL's converter emits."""
  six = {f"phase{phase}_{split}.jsonl:1" for phase in (1, 2) for split in ("train", "test")}
  six |= {"phase1_test.jsonl:2", "phase1_test.jsonl:3"}
  rows = [record for record in itertools.chain(*real.values()) if record.source in six]
  trees, counts = recipes.convert_all(rows, replace(RECIPES["trl"], phases=(1, 2)))
  distinct = set()  # steps after their prefix
  for tree in trees:
    prefixes = []
    for text, parent in zip(tree.steps, tree.parents):
      prefixes.append((*(prefixes[parent] if parent >= 0 else ()), text))
    distinct |= {(tree.problem, *prefix) for prefix in prefixes}
  assert sum(counts["labels"].values()) == 75  # two completions of a step occur twice
  assert (len(rows), len(distinct)) == (6, 73)
