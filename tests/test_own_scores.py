"""A user's own scores: columns of numbers, scores of steps, weights of votes, the warning."""

import csv
import dataclasses
import io
import math

import numpy as np
import pytest
from conftest import write_lines
from scored_files import (
  bundled,
  candidate,
  check_equal,
  fails,
  generated,
  in_groups,
  ranked,
  rated,
  samples_of,
  shown_on,
  written,
)

from prm_jax.evaluation import methods as methods_lib
from prm_jax.evaluation import report as report_lib
from prm_jax.evaluation import report_figure, report_table
from prm_jax.evaluation.figure_files import encoded
from prm_jax.evaluation.scored_samples import read_scored_samples, unused_numbers


def renamed(records, **names):
  """Yields the records with other names for some keys; a key whose new name is None is dropped."""
  for record in records:
    changed = {names.get(key, key): value for key, value in record.items()}
    yield {key: value for key, value in changed.items() if key is not None}


def read(path, records, scores):
  """Returns the samples of a file of the records, with columns of scores."""
  return read_scored_samples([write_lines(path, records)], scores=scores)


def with_logits(seed=0):
  """Yields candidates with `logit`, of both signs and in eighths, so that sums are exact."""
  rng = np.random.default_rng(seed)
  for record in generated(8, 6, seed):
    yield record | {"logit": round(8 * rng.normal(2 * record["is_correct"] - 1, 2)) / 8}


@pytest.fixture(scope="module")
def built_in(tmp_path_factory):
  """Returns the report on `generated()`, with `orm_score`."""
  path = tmp_path_factory.mktemp("built_in") / "a.jsonl"
  return ranked(samples_of(path, generated()))[0]


@pytest.mark.parametrize(
  ("form", "name"), [(list, "my rm - 2"), (list, "orm_score"), (in_groups, "score")]
)
def test_a_column_equals_the_built_in_score(tmp_path, built_in, form, name):
  """A column has the curves, votes, groups and bands of the same numbers in `orm_score`."""
  records = list(generated())
  samples = read(tmp_path / "b.jsonl", form(renamed(records, orm_score=name)), [name])
  report, scores = ranked(samples, label=["My RM"])
  assert ("orm" in report["curves"]) == (name == "orm_score")
  np.testing.assert_array_equal(scores[name], samples.scores[0])
  for ours, theirs in ((name, "orm"), (f"weighted_{name}", "weighted_orm")):
    assert report["curves"][ours] == built_in["curves"][theirs]
    for kind in ("level", "difficulty"):
      for group, each in report[f"by_{kind}"].items():
        assert each["curves"][ours] == built_in[f"by_{kind}"][group]["curves"][theirs]
  assert report["paired"][f"{name} - majority"] == built_in["paired"]["orm - majority"]
  assert report["labels"][name] == "My RM"
  assert report["labels"][f"{name} - majority"] == "My RM \N{MINUS SIGN} Majority voting"


@pytest.mark.parametrize(("form", "neutral"), [(list, "positive"), (in_groups, "negative")])
def test_step_scores_equal_ratings(tmp_path, form, neutral):
  """Step scores p give the same bits as ratings with P(1) = p and P(-1) = 1 - p."""
  rng = np.random.default_rng(0)
  plain, as_ratings = [], []
  for record in generated():
    scores = rng.random(len(record["steps"])).tolist()
    del record["rating_probs"]
    ratings = [{"-1": 1 - p, "0": 0.0, "1": p} for p in scores]
    plain.append(record | {"step_scores": scores})
    as_ratings.append(record | {"rating_probs": ratings})
  ours = samples_of(tmp_path / "a.jsonl", form(plain))
  theirs = samples_of(tmp_path / "b.jsonl", form(as_ratings))
  check_equal(ours, theirs, but=("files", "file_bytes", "places"))
  again = read_scored_samples([bundled(ours, tmp_path / "bundle")])
  check_equal(ours, again)
  scores, expected = (methods_lib.solution_scores(each, neutral) for each in (ours, theirs))
  assert scores.keys() == expected.keys() and scores.keys() >= methods_lib.OF_STEPS
  for name in scores:
    np.testing.assert_array_equal(scores[name], expected[name])
  report, _ = ranked(ours, neutral=neutral, methods=["prm_product"])
  shown, expected = (
    report_lib.solutions(*each, report) for each in ((ours, scores), (theirs, expected))
  )
  assert shown == expected and len(shown[0]) == len(ours.problems)


def test_step_scores_without_texts_of_steps(tmp_path):
  """A solution that is one text may have any number of step scores, and the page shows them."""
  record = candidate(steps=..., rating_probs=..., text="One.\n\nTwo.", step_scores=[1, 0.25])
  samples = samples_of(tmp_path / "a.jsonl", [record, record | {"step_scores": [0.5]}])
  report, paths = written(samples, tmp_path, methods=["prm_product"])
  assert report["curves"]["prm_product"]["accuracy"] == [1.0, 1.0]
  (problem,) = shown_on(paths[2].read_text())
  assert [each["scores"]["PRM"] for each in problem["solutions"]] == [0.5, 0.25]
  assert [each["steps"][0]["p"] for each in problem["solutions"]] == [0.5, None]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"step_scores": [0.5, -1.5]},
      '"step_scores[1]" is -1.5: expected float >= 0.0; a step score is the prob',
    ),
    ({"step_scores": [1.5, 0.5]}, "put logits through 1 / (1 + exp(-x))"),
    ({"step_scores": [math.nan, 0.5]}, '"step_scores[0]" is nan'),
    ({"step_scores": [0.5]}, "1 step_scores of 2 steps"),
    ({"step_scores": []}, '"step_scores" is []'),
    ({"step_scores": ["0.5", 1]}, "\"step_scores[0]\" is '0.5': expected float"),
    ({"step_scores": ...}, '"step_scores" must be on all lines or on none'),
  ],
)
def test_wrong_step_scores(tmp_path, changes, message):
  """Step scores that are no probabilities, or not one for each step, name the line."""
  fine = {"rating_probs": ..., "step_scores": [0.0, 1.0]}
  records = [candidate(**fine), candidate(**(fine | changes))]
  fails([write_lines(tmp_path / "a.jsonl", records)], f"{tmp_path}/a.jsonl:2: ", message)


def test_ratings_come_before_step_scores(tmp_path):
  """`step_scores` beside `rating_probs` change nothing."""
  records = list(generated())
  both = [record | {"step_scores": [0.1, 0.2]} for record in records]
  ours, theirs = samples_of(tmp_path / "a.jsonl", both), samples_of(tmp_path / "b.jsonl", records)
  check_equal(ours, theirs, but=("files", "file_bytes", "places"))


@pytest.mark.parametrize(
  ("value", "message"),
  [
    (..., 'no "my_rm", which other candidates have'),
    ("0.5", "\"my_rm\" is '0.5': expected a finite number"),
    (True, '"my_rm" is true: expected a finite number'),
    (None, '"my_rm" is null: expected a finite number'),
    (math.nan, '"my_rm" is nan: expected a finite number'),
    (10**400, '"my_rm" is 1000'),
    ([0.5, 1], '"my_rm" is [0.5, 1]: expected a finite number; a list of P(right) by step is read'),
  ],
)
def test_wrong_numbers_of_a_column(tmp_path, value, message):
  """A column's value that is missing or no finite number is an error with file, line and value."""
  records = [candidate(my_rm=3), candidate(my_rm=value)]
  path = write_lines(tmp_path / "a.jsonl", records)
  fails([path], f"{path}:2: {message}", scores=["my_rm"])
  write_lines(path, in_groups(records))
  fails([path], f'{path}:1: "samples"[1]: {message}', scores=["my_rm"])


def test_a_missing_column_names_the_nearest_key(tmp_path):
  """The error of a column that no line has names all files and the nearest key with a number."""
  a = write_lines(tmp_path / "a.jsonl", [candidate(my_rm_name="x", my_rm_score=0.5)])
  b = write_lines(
    tmp_path / "b.jsonl", [{"problem": "Add 1 and 2.", "is_correct": True, "rm_b": 1}]
  )
  nearest = "no \"my_rm\", which --score names; the nearest key with a number is 'my_rm_score'"
  fails([a], f"{a}:1: {nearest}", scores=["my_rm"])
  fails([a, b], f"{a}:1 and {b}:1: {nearest}", scores=["rm_b", "my_rm"])
  c = write_lines(tmp_path / "c.jsonl", [candidate(orm_score=...)])
  fails([c], 'no "my_rm", which --score names; no key has a number', scores=["my_rm"])
  cut = candidate(right=False, finished=False)  # needs no score, so it says nothing of the name
  d = write_lines(tmp_path / "d.jsonl", [cut, candidate(my_rm_score=0.5)])
  fails([d], f"{d}:2: {nearest}", scores=["my_rm"])


@pytest.mark.parametrize("score", [{}, {"my_rm": None}, {"my_rm": 7.0}])
def test_a_candidate_that_was_cut_off_needs_no_number(tmp_path, score):
  """A cut-off candidate may lack the column, and is never chosen whatever its score is."""
  cut = candidate(right=False, answer=None, finished=False, **score)
  samples = read(tmp_path / "a.jsonl", [cut, candidate(my_rm=1.5)], ["my_rm"])
  report, _ = ranked(samples, methods=["my_rm"])
  assert report["curves"]["my_rm"]["accuracy"] == [0.5, 1.0]


@pytest.mark.parametrize("form", ["groups", "two files"])
def test_a_bundle_has_the_columns_that_were_named(tmp_path, form):
  """A bundle gives the report of its lines, for all columns or those that --score names."""
  records = list(with_logits())
  given = in_groups(records) if form == "groups" else records
  paths = [write_lines(tmp_path / "a.jsonl", given)]
  if form == "two files":
    write_lines(paths[0], renamed(records, logit=None))
    alone = [{"logit": record["logit"]} for record in records]  # lines of scores and nothing else
    paths.append(write_lines(tmp_path / "b.jsonl", alone))
  samples = read_scored_samples(paths, scores=["logit", "orm_score"])
  bundle = bundled(samples, tmp_path / "bundle")
  again = read_scored_samples([bundle])
  check_equal(samples, again)
  options = {"label": ["A", "B"], "vote_weight": "softmax"}
  ours, paths = written(again, tmp_path / "out", **options)
  theirs, _ = ranked(samples, **options)
  assert ours == theirs and ours["curves"]["logit"] != ours["curves"]["orm_score"]
  shown = shown_on(paths[2].read_text())[0]["solutions"]
  assert [*shown[0]["scores"]][:2] == ["A", "B"]
  assert any("the pick of A" in why for each in shown for why in each["why"])
  part, _ = ranked(again, score=["orm_score"], vote_weight="softmax")
  assert part["curves"]["orm_score"] == ours["curves"]["orm_score"]
  assert "logit" not in part["curves"]
  with pytest.raises(
    ValueError, match=r"--score my_rm: not among .* read \(logit, orm_score\); a b"
  ):
    ranked(again, score=["my_rm"])


def test_a_bundle_has_places_in_large_files(tmp_path):
  """Lines beyond 4 GiB of a file, beside the -1 of plain lines, are stored as whole numbers."""
  samples = samples_of(tmp_path / "a.jsonl", generated())
  places = samples.places.copy()
  places[..., -1].flat[:2] = -1, 5_000_000_000
  samples = dataclasses.replace(samples, places=places)
  again = read_scored_samples([bundled(samples, tmp_path / "bundle")])
  np.testing.assert_array_equal(again.places, places)


def solved(samples, **options):
  """Returns the accuracy of both weighted votes at each N."""
  report, _ = ranked(samples, methods=["weighted_logit", "weighted_mean_logit"], **options)
  return np.array([curve["accuracy"] for curve in report["curves"].values()])


@pytest.mark.parametrize("how", ["sigmoid", "softmax"])
def test_votes_by_logits_equal_plain_votes_by_their_weights(tmp_path, how):
  """Sigmoid and softmax votes by x equal plain votes by 1 / (1 + exp(-x)) and by exp(x)."""
  records = list(with_logits())
  logits = read(tmp_path / "a.jsonl", records, ["logit"])
  sigmoid = lambda x: 1 / (1 + math.exp(-x))
  weight = {"sigmoid": sigmoid, "softmax": math.exp}[how]
  changed = [r | {"logit": weight(r["logit"])} for r in records]
  plain = read(tmp_path / "b.jsonl", changed, ["logit"])
  # Weights that differ in their last digit, if at all, which no vote here turns on.
  np.testing.assert_allclose(solved(logits, vote_weight=how), solved(plain), atol=1e-9)
  assert np.abs(solved(plain) - solved(plain, vote_weight=how)).max() > 1e-3


def test_softmax_votes_ignore_a_constant_of_the_problem(tmp_path):
  """A large constant added to a problem's scores changes sigmoid votes, but not softmax votes."""
  records = list(with_logits())
  moved = [r | {"logit": r["logit"] + 1000 * int(r["problem"][-1]) - 3000} for r in records]
  samples = [read(tmp_path / "a.jsonl", each, ["logit"]) for each in (records, moved)]
  np.testing.assert_array_equal(*(solved(each, vote_weight="softmax") for each in samples))
  accuracy, shifted = (solved(each, vote_weight="sigmoid") for each in samples)
  assert np.abs(accuracy - shifted).max() > 1e-3


def test_negative_scores_weigh_no_vote_unless_a_flag_says_how(tmp_path):
  """Votes by negative scores need --vote_weight, which a notice or an error recommends."""
  samples = read(tmp_path / "a.jsonl", with_logits(), ["logit"])
  report, _ = ranked(samples)
  assert "weighted_logit" not in report["curves"] and "weighted_orm" in report["curves"]
  (notice,) = [each for each in report["notices"] if "negative" in each]
  assert notice.startswith("some logit is negative") and "--vote_weight=sigmoid" in notice
  with pytest.raises(
    ValueError, match=r"weighted_mean_logit: a score is negative, .*--vote_weight="
  ):
    ranked(samples, methods=["weighted_mean_logit"])
  weighed, _ = ranked(samples, vote_weight="softmax")
  same = report["curves"].keys() - {"weighted_orm"}
  assert {k: weighed["curves"][k] for k in same} == {k: report["curves"][k] for k in same}
  (notice,) = [each for each in weighed["notices"] if "softmax" in each]
  assert notice == "where orm_score or a --score weighs votes, the weight is its softmax"
  assert "weighted_logit" in weighed["drawn"] and "weighted_logit" not in report["drawn"]
  (notice,) = ranked(samples, methods=["orm"], vote_weight="sigmoid")[0]["notices"]
  assert notice.startswith("--vote_weight=sigmoid has no effect")


NAMES = ["orm", "random", "prm_my", "mean_a", "a", "weighted_b", "score_orm", "=1+1", "_x", "$y$ $"]


def test_any_name_is_a_column(tmp_path):
  """A column may have any name, as of a method, a formula or markup, and has its own curve."""
  rng = np.random.default_rng(0)
  names = [*NAMES, "<b>&", "x" * 300]
  records = [r | dict(zip(names, rng.random(len(names)).tolist())) for r in generated()]
  samples = read(tmp_path / "a.jsonl", records, names)
  report, paths = written(samples, tmp_path, vote_weight="softmax")
  columns = {each["column"]: name for name, each in report["own"].items()}
  assert [*columns] == names and len(set(columns.values())) == len(names)
  assert columns["orm"] == "score_orm" and columns["prm_my"] == "prm_my"
  for name in names:
    alone = read(tmp_path / "b.jsonl", renamed(records, **{name: "only"}), ["only"])
    expected, _ = ranked(alone, methods=["only", "weighted_only"], vote_weight="softmax")
    for ours, theirs in (("", "only"), ("weighted_", "weighted_only")):
      assert report["curves"][ours + columns[name]] == expected["curves"][theirs], name
  page = paths[2].read_text()
  assert "<b>" not in page and "&lt;b&gt;&amp;" in page
  rows = csv.DictReader(io.StringIO(report_table.format_csv(report), newline=""))
  assert not [row for row in rows if row["curve"].startswith(report_table.FORMULA)]
  assert report_table.format_table(report)


def test_odd_labels_are_drawn_as_they_are(tmp_path):
  """Figures show labels of any characters unchanged, at curves and in the legend of groups."""
  labels = ["_hidden", r"$\frac{", "<b>&"]
  names = ["a", "b", "c"]
  records = [r | dict.fromkeys(names, 1.0) for r in generated()]
  report, _ = ranked(read(tmp_path / "a.jsonl", records, names), label=labels)
  for figure in (report_figure.draw_curves(report), report_figure.draw_groups(report, "level")):
    svg = encoded(figure, "svg").decode()
    for label in ("_hidden", r"$\frac{", "&lt;b&gt;&amp;"):
      assert f">{label}</text>" in svg


@pytest.mark.parametrize(
  ("score", "label"), [(["a"], ["A", "B"]), (["a", "b"], ["A"]), (["a", "b"], ["A", "A"])]
)
def test_labels_are_one_for_each_column(tmp_path, score, label):
  """A number of labels other than that of columns, or a repeated label, is an error."""
  samples = read(tmp_path / "a.jsonl", [candidate(a=1, b=2)] * 2, score)
  with pytest.raises(ValueError, match=f"--score {score[0]}.* --label 'A'"):
    ranked(samples, score=score, label=label)


@pytest.mark.parametrize("form", [list, in_groups])
def test_unused_numbers_are_named(tmp_path, form):
  """Numbers that differ within a problem and rank nothing are named, bookkeeping aside."""
  records = [
    rated(f"P{i % 2}", orm=i / 5, sample=i, tokens=9 + i, logprob=-i / 2, level=2,
          temperature=0.5 + i % 2, prm_score_std=i / 9, flag=i > 2,
          my_rm=i / 3, judge=i, text=str(i), prm_score=i / 7)
    for i in range(6)
  ]  # fmt: skip
  path = write_lines(tmp_path / "a.jsonl", form(records))
  assert unused_numbers([path], read_scored_samples([path])) == ["my_rm", "judge"]
  samples = read_scored_samples([path], scores=["judge"])
  assert unused_numbers([path], samples) == ["my_rm"]
  assert unused_numbers([path], samples, standard=False) == ["orm_score", "my_rm", "prm_score"]
  assert unused_numbers([bundled(samples, tmp_path / "b")], samples) == []
  if form is list:  # a second file may have scores alone
    scores = write_lines(tmp_path / "c.jsonl", [{"rm_b": r["judge"] / 7} for r in records])
    both = [path, scores]
    assert unused_numbers(both, read_scored_samples(both)) == ["my_rm", "judge", "rm_b"]
  write_lines(path, form(renamed(records, rating_probs=None, orm_score="score", judge=None)))
  expected = ["score", "my_rm", "prm_score"] if form is list else ["my_rm", "prm_score"]
  assert unused_numbers([path], read_scored_samples([path])) == expected
