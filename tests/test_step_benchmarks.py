"""Step benchmarks: definitions, upstream's protocols on real data, and files of scored lines."""

import dataclasses
import json

import numpy as np
import pytest
import tiny
from conftest import call_script, completion, make_row, read_lines, step, write_lines

from prm_jax import aggregation as agg
from prm_jax import step_metrics
from prm_jax.datasets import prepare
from prm_jax.datasets import process_bench as process_bench_data
from prm_jax.evaluation import (
  diagnostics,
  first_error,
  judged,
  prm800k_steps,
  prm_bench,
  process_bench,
  step_benchmarks,
  step_comparison,
  step_figure,
)
from prm_jax.evaluation.judged import Judged, Labelled, from_record, problem_weights
from prm_jax.runtime.json_lines import BadLine
from prm_jax.scoring import candidates
from prm_jax.scoring.scorer import Scorer
from prm_jax.types import StepContract

GROUPS = ("gsm8k", "math")
read = lambda name, folder: step_benchmarks.read(name, folder)[0]
COARSE = np.linspace(0, 1, 11)  # scores of random cases, so that some equal the threshold


def with_scores(solution, scores, **more):
  """Returns the labelled solution with these scores of its steps."""
  scores = np.asarray(scores, float)
  probs = np.stack([1 - scores, 0 * scores, scores], axis=1)
  names = [field.name for field in dataclasses.fields(judged.Labelled)]
  labelled = {name: getattr(solution, name) for name in names}
  return Judged(**labelled, probs=probs, scores=scores, **more)


def random_solutions(seed, count=60):
  """Returns solutions of both groups, four to a problem, with random labels and scores."""
  rng, out = np.random.default_rng(seed), []
  for i in range(count):
    steps = int(rng.integers(1, 6))
    error = int(rng.integers(-1, steps))
    labels = [1] * steps if error < 0 else [1] * error + [-1] + [None] * (steps - error - 1)
    answer = bool(rng.integers(2))
    about = (str(i), GROUPS[i % 2], f"p{i // 4}", ["s"] * steps, labels, answer)
    out.append(with_scores(judged.Labelled(*about), rng.choice(COARSE, steps)))
  return out


def by_hand(solutions, threshold):
  """Returns error accuracy, correct accuracy and F1 by ProcessBench's loop over solutions."""
  right = {True: [], False: []}
  for each in solutions:
    label = each.labels.index(-1) if -1 in each.labels else -1
    prediction = -1
    for i, score in enumerate(each.scores):
      if score < threshold:
        prediction = i
        break
    right[label != -1].append(prediction == label)
  errors, correct = (np.mean(right[x]) for x in (True, False))
  f1 = 2 * errors * correct / (errors + correct) if errors + correct else 0.0
  return errors, correct, f1


@pytest.mark.parametrize("seed", range(2))
def test_process_bench_equals_its_definition(seed):
  """Accuracies, F1, both means and the curve equal a loop over solutions and thresholds."""
  solutions = random_solutions(seed)
  for threshold in (0.0, 0.3, 0.5, 0.55, 1.0):
    result = process_bench.evaluate(solutions, threshold)
    f1, sizes = [], []
    for group in GROUPS:
      members = [each for each in solutions if each.group == group]
      expected = by_hand(members, threshold)
      subset = result["subsets"][group]
      assert [subset[name] for name in first_error.MEASURES] == pytest.approx(expected)
      f1.append(expected[2])
      sizes.append(len(members))
    assert result["mean_f1"] == pytest.approx(np.mean(f1))
    assert result["weighted_f1"] == pytest.approx(np.average(f1, weights=sizes))
  curve = result["curve"]
  for threshold, value in zip(curve["threshold"], curve["groups"]["math"]["f1"]):
    members = [each for each in solutions if each.group == "math"]
    assert value == pytest.approx(by_hand(members, threshold)[2])


@pytest.mark.parametrize("seed", range(3))
def test_best_threshold_is_at_least_as_good_as_a_grid(seed):
  """F1 at the best threshold equals the highest F1 on a fine grid of thresholds."""
  solutions = random_solutions(seed)
  best = first_error.best_threshold(solutions)
  grid = [by_hand(solutions, threshold)[2] for threshold in np.linspace(0, 1, 2001)]
  assert by_hand(solutions, best)[2] == pytest.approx(max(grid))
  with pytest.raises(ValueError, match="both are needed"):
    first_error.best_threshold([x for x in solutions if x.first_error < 0])


def test_solutions_of_a_problem_are_resampled_together():
  """All solutions of a problem share their bootstrap weight, and intervals contain the value."""
  solutions = random_solutions(0)
  weights = problem_weights(solutions)
  assert (weights[0] == 1).all() and weights.shape == (judged.RESAMPLES + 1, len(solutions))
  for i in range(0, len(solutions), 4):
    assert (weights[:, i : i + 4] == weights[:, i : i + 1]).all()
  np.testing.assert_array_equal(weights.sum(1), len(solutions))
  intervals = process_bench.evaluate(solutions, 0.5)["intervals"]
  assert all(x["low"] <= x["value"] <= x["high"] for x in intervals.values())
  repeated = [
    with_scores(x, x.scores) for x in solutions[:4]
  ] * 3  # one problem: nothing to resample
  alike = process_bench.evaluate(repeated, 0.5)["intervals"]["math/f1"]
  assert alike["low"] == alike["high"] == alike["value"]


@pytest.mark.shared_data
def test_known_predictors_on_process_bench(shared):
  """Constant predictors and the labels themselves get their known results on real solutions."""
  solutions = read("process_bench", shared / "data" / "process_bench")
  assert len(solutions) == 1255
  constant = process_bench.evaluate([with_scores(x, [0.5] * len(x.steps)) for x in solutions], 0.5)
  truth = lambda x: [0.0 if label == -1 else 1.0 for label in x.labels]
  perfect = process_bench.evaluate([with_scores(x, truth(x)) for x in solutions], 0.5)
  for part in constant["subsets"].values():
    assert (part["error_accuracy"], part["correct_accuracy"], part["f1"]) == (0, 1, 0)
  assert constant["mean_f1"] == constant["weighted_f1"] == 0
  assert perfect["mean_f1"] == perfect["weighted_f1"] == 1
  assert {name: part["n"] for name, part in perfect["subsets"].items()} == {
    "gsm8k": 132,
    "math": 373,
    "olympiadbench": 382,
    "omnimath": 368,
  }
  first = process_bench.evaluate([with_scores(x, [0.0] * len(x.steps)) for x in solutions], 0.5)
  at_first = [x.labels[0] == -1 for x in solutions if x.first_error >= 0 and x.group == "math"]
  assert first["subsets"]["math"]["error_accuracy"] == pytest.approx(np.mean(at_first))


def upstream_prm_bench(rows, labels_of):
  """Returns the measures of each class by the loops of PRMBench's own task.py."""
  by_class = {}
  for row in rows:
    key = f"{row['classification']}_{row['idx']}"
    for name, item, wrong in (
      (row["classification"], key, row["error_steps"]),
      *(
        [("correct", f"correct_{row['idx']}", [])] if row["classification"] == "redundency" else []
      ),
    ):
      labels = labels_of(item)
      steps = [step - 1 for step in wrong]
      first = min(steps) if steps else -1
      counts = by_class.setdefault(
        name, {"TP": 0, "FP": 0, "TN": 0, "FN": 0, "first": [], "steps": []}
      )
      for i, label in enumerate(labels):
        if i == first:
          counts["first"].append(not label)
        kind = ("TN" if not label else "FP") if i in steps else ("TP" if label else "FN")
        counts[kind] += 1
        counts["steps"].append(kind in ("TP", "TN"))
  by_class["total"] = {
    key: sum(
      (v[key] for k, v in by_class.items() if k != "correct"),
      [] if key in ("first", "steps") else 0,
    )
    for key in ("TP", "FP", "TN", "FN", "first", "steps")
  }
  out = {}
  for name, c in by_class.items():
    f1 = []
    for hit, false, missed in ((c["TP"], c["FP"], c["FN"]), (c["TN"], c["FN"], c["FP"])):
      precision = hit / (hit + false) if hit + false else -1
      recall = hit / (hit + missed) if hit + missed else -1
      f1.append(2 * precision * recall / (precision + recall) if precision + recall else -1)
    score = f1[0] if name == "multi_solutions" else 0.5 * f1[0] + 0.5 * f1[1]
    first = np.mean(c["first"]) if c["first"] else None
    out[name] = (f1[0], abs(f1[1]), np.mean(c["steps"]), first, score)
  return out


@pytest.mark.shared_data
@pytest.mark.parametrize("predictor", ["random", "right", "wrong", "truth"])
def test_prm_bench_equals_upstreams_protocol(shared, predictor):
  """On the real lines, every class and the total equal the results of upstream's loops."""
  path = shared / "data" / "prm_bench" / "sample.jsonl"
  rows = read_lines(path)
  solutions, rng = read("prm_bench", path.parent), np.random.default_rng(0)
  assert len(solutions) == 688 + 84
  scores = {
    "random": lambda x: rng.uniform(size=len(x.steps)),
    "right": lambda x: np.ones(len(x.steps)),
    "wrong": lambda x: np.zeros(len(x.steps)),
    "truth": lambda x: [float(label == 1) for label in x.labels],
  }[predictor]
  by_id = {x.id: with_scores(x, scores(x)) for x in solutions}
  result = prm_bench.evaluate([*by_id.values()], 0.5)
  expected = upstream_prm_bench(rows, lambda item: [x > 0.5 for x in by_id[item].scores])
  classes = result["classes"] | {"total": result["total"]}
  assert classes.keys() == expected.keys()
  for name, part in classes.items():
    *values, score = expected[name]
    given = [part[measure] for measure in prm_bench.MEASURES]
    known = [(x, y) for x, y in zip(given, values) if x is not None and y is not None]
    assert [x for x, _ in known] == pytest.approx([y for _, y in known])
    assert len(known) >= (2 if name in ("multi_solutions", "correct") else 4)
    assert name == "correct" or given[-1] == pytest.approx(score)
  if predictor == "truth":
    assert result["total"]["prm_score"] == 1
  if predictor == "right":
    assert result["total"]["negative_f1"] == 0 and result["classes"]["multi_solutions"]["f1"] == 1


def prm_bench_line(kind, error_steps, **more):
  """Returns a line of PRMBench, whose solution has two steps and whose original has one."""
  line = {"idx": "a", "classification": kind, "error_steps": error_steps}
  line |= {"original_question": "q", "modified_question": "r"}
  return line | {"original_process": ["x"], "modified_process": ["x", "y"]} | more


def test_prm_bench_takes_error_steps_beyond_the_last(tmp_path):
  """Error steps that a solution does not have, as in 100 of upstream's lines, are ignored."""
  row = prm_bench_line("circular", [2, 7])
  write_lines(tmp_path / "a.jsonl", [row, row])  # the second has the same id
  (solution,) = read("prm_bench", tmp_path)
  assert list(solution.labels) == [1, -1]
  write_lines(tmp_path / "a.jsonl", [prm_bench_line("circular", [2, 0])])  # counted from 0
  with pytest.raises(BadLine, match=r'a\.jsonl:1: "error_steps\[1\]" is 0'):
    read("prm_bench", tmp_path)


def test_prm_bench_resamples_all_wordings_of_a_problem_together(tmp_path):
  """Lines of one idx share their bootstrap weight, however each class words the question."""
  lines = [
    prm_bench_line(kind, [2], idx=idx, modified_question=f"{idx}, worded for {kind}")
    for kind in ("circular", "deception")
    for idx in "abc"
  ]
  write_lines(tmp_path / "a.jsonl", lines)
  weights = problem_weights(read("prm_bench", tmp_path))
  np.testing.assert_array_equal(weights[:, :3], weights[:, 3:])
  assert len(np.unique(weights[:, :3], axis=0)) > 1


def test_prm_bench_totals_a_single_class_as_the_class():
  """Where all solutions are right by design, the total's PRM-Score is the F1, as of their class."""
  solutions = [dataclasses.replace(x, group=prm_bench.ALL_RIGHT) for x in random_solutions(3)]
  measured = prm_bench.measures(solutions, 0.5)
  for name in ("prm_score", "f1"):
    np.testing.assert_array_equal(measured[f"total/{name}"], measured["multi_solutions/f1"])


def test_weighted_auroc_equals_auroc_of_repeated_steps():
  """A step of weight k counts as k steps; the AUROC of a single class is NaN."""
  rng = np.random.default_rng(0)
  scores, positive = rng.choice(COARSE, 50), rng.integers(0, 2, 50).astype(bool)
  weights = rng.integers(0, 3, (20, 50)).astype(float)
  trees = np.arange(50)
  values = prm800k_steps.weighted_auroc(scores, positive, trees, weights)
  for row, value in zip(weights.astype(int), values):
    expected = step_metrics.auroc(np.repeat(scores, row), np.repeat(positive, row))
    assert value == pytest.approx(expected)
  one_class = prm800k_steps.weighted_auroc(scores, positive, trees, weights * positive)
  assert np.isnan(one_class).all()


def test_diagnostics_equal_their_definitions():
  """Length bias, calibration, and shares of solutions equal direct computations."""
  import scipy.stats

  solutions = random_solutions(3)
  report = diagnostics.diagnose(solutions, 0.5)
  several = [x for x in solutions if len(x.steps) > 1]
  at_last = np.mean([np.argmin(x.scores) == len(x.scores) - 1 for x in several])
  assert report["minimum_at_last_step"] == pytest.approx(at_last)
  right = [x for x in solutions if x.first_error < 0]
  rho = scipy.stats.spearmanr([x.scores.min() for x in right], [len(x.steps) for x in right])
  assert report["length_bias"]["min"]["right"] == pytest.approx(rho.statistic)
  assert {*report["length_bias"]} == {*agg.REDUCTIONS}
  lucky = [x for x in solutions if x.answer_is_right and x.first_error >= 0]
  detected = np.mean([(x.scores < 0.5).any() for x in lucky])
  assert report["right_answer_wrong_steps"]["n"] == len(lucky)
  assert report["right_answer_wrong_steps"]["detected"] == pytest.approx(detected)
  steps = diagnostics.steps_of(solutions)
  metrics = step_metrics.step_metrics(steps["probs"], steps["label"])
  assert report["calibration"]["ece"] == pytest.approx(metrics["ece"])
  assert sum(row["count"] for row in report["calibration"]["by_step"]) == metrics["count"]
  rating = report["by_rating"]["ratings"]["-1"]
  assert rating["mean_score"] == pytest.approx(steps["score"][steps["label"] == -1].mean())


@pytest.fixture
def drawn(monkeypatch):
  """Returns a function that draws the figure of a result with `changes`, and returns its axes."""
  figures = []
  monkeypatch.setattr(
    "matplotlib.figure.Figure.savefig", lambda each, *_, **__: figures.append(each)
  )

  def draw(**changes):
    calibration = diagnostics.calibration(random_solutions(0))
    step_figure.draw({"diagnostics": {"calibration": calibration}} | changes)
    figures[0].draw_without_rendering()
    return figures[0].axes

  return draw


def f1_curve(names):
  """Returns the threshold and the curve of a result with these groups."""
  groups = {name: {"f1": [0.0, 0.5, None]} for name in names}
  return {"threshold": 0.5, "curve": {"threshold": [0.0, 0.5, 1.0], "groups": groups}}


def test_legends_hide_no_data(drawn):
  """Each legend of the figure lies below its panel and the label of the axis."""
  for axes in drawn(**f1_curve(("gsm8k", "math", "olympiadbench", "omnimath"))):
    label = axes.xaxis.label.get_window_extent()
    legend = axes.get_legend().get_window_extent()
    assert legend.y0 >= 0 and legend.y1 <= label.y0


@pytest.mark.parametrize("by_class", [False, True])
def test_the_figure_names_any_group(drawn, by_class):
  """A group's name that matplotlib would hide or read as a formula is in the figure as it is."""
  names = ["_a", r"a$\frac$", "b\x1b"]
  classes = {"classes": {name: {"prm_score": 0.5} for name in names}}
  axes = drawn(**classes if by_class else f1_curve(names))[2]
  texts = axes.get_yticklabels() if by_class else axes.get_legend().get_texts()
  assert [text.get_text().strip() for text in texts] == [*names[:2], "b?"]


def test_error_auroc_of_heads_that_disagree_at_mistakes_is_1():
  """If an ensemble disagrees exactly at its mistakes, its uncertainty ranks them first."""
  solutions = []
  for each in random_solutions(1):
    labels = [1 if label is None else label for label in each.labels]
    scores = np.where(np.array(labels) == 1, 0.95, 0.05)
    scores[0] = 1 - scores[0]  # the first decision is wrong
    std = np.full(len(scores), 0.001)
    std[0] = 0.2
    about = {name: getattr(each, name) for name in ("id", "group", "problem", "steps")}
    solutions.append(with_scores(judged.Labelled(**about, labels=labels), scores, std=std))
  uncertainty = diagnostics.diagnose(solutions, 0.5)["uncertainty"]
  without = random_solutions(2)  # not scored by an ensemble
  assert diagnostics.diagnose([*solutions, *without], 0.5)["uncertainty"] == uncertainty
  assert uncertainty["error_auroc"] == 1
  assert uncertainty["certain"]["share"] == 0
  assert (
    uncertainty["bins"][-1]["wrong_decisions"] == 1
    and uncertainty["bins"][0]["wrong_decisions"] == 0
  )
  alike = [dataclasses.replace(each, std=0 * each.std) for each in solutions]
  (bin,) = diagnostics.diagnose(alike, 0.5)["uncertainty"]["bins"]  # whatever their order
  assert bin["count"] == sum(len(each.scores) for each in alike)


def test_agreement_on_prm_bench_is_of_its_own_decisions(tmp_path):
  """PRMBench calls a step that scores the threshold wrong, so 0.5 and 0.4 are one decision."""
  results = []
  for name, scores in (("a", [0.9, 0.5]), ("b", [0.9, 0.4])):
    line = prm_bench_line("circular", [2], step_scores=scores)
    path = write_lines(tmp_path / f"{name}.jsonl", [line])
    results.append(tmp_path / f"{name}.json")
    evaluate("--benchmark=prm_bench", f"--input={path}", f"--output={results[-1]}")
  assert step_comparison.compared(tuple(results))["agreement"]["same_decision"] == 1


def test_agreement_of_two_models():
  """A model agrees with itself in all decisions, and with its opposite in none."""
  solutions = random_solutions(2)
  same = diagnostics.agreement(solutions, solutions, (0.5, 0.5))
  assert (same["spearman"], same["kappa"], same["same_decision"]) == pytest.approx((1, 1, 1))
  opposite = [
    with_scores(judged.Labelled(x.id, x.group, x.problem, x.steps, x.labels), 1 - x.scores)
    for x in solutions
  ]
  other = diagnostics.agreement(solutions, opposite, (0.55, 0.45))
  assert other["pearson"] == pytest.approx(-1) and other["same_decision"] == 0
  assert other["kappa"] < 0


@pytest.fixture
def scored_lines(tmp_path):
  """Returns a file of ProcessBench's lines with `rating_probs`, its solutions and its lines."""
  solutions = random_solutions(4)
  lines = []
  for i, each in enumerate(solutions):
    label = each.first_error
    line = {"id": f"{each.group}-{i}", "problem": each.problem, "steps": list(each.steps)}
    line |= {"label": label, "final_answer_correct": each.answer_is_right}
    lines.append(
      line | {"rating_probs": [dict(zip(("-1", "0", "1"), p)) for p in each.probs.tolist()]}
    )
  return write_lines(tmp_path / "scored.jsonl", lines), solutions, lines


def evaluate(*flags):
  """Returns what evaluate.py prints."""
  return call_script("evaluate.py", *flags).stdout


def test_scored_lines_are_evaluated_and_compared(scored_lines, tmp_path):
  """evaluate.py evaluates scored lines, finds a threshold on other rows, and compares results."""
  path, solutions, lines = scored_lines
  a, b = tmp_path / "a.json", tmp_path / "b.json"
  flags = ("--benchmark=process_bench", f"--input={path}")
  printed = evaluate(*flags, f"--output={a}", "--threshold=0.3")
  result = json.loads(a.read_text())
  expected = by_hand([x for x in solutions if x.group == "math"], 0.3)
  assert [result["subsets"]["math"][name] for name in first_error.MEASURES] == pytest.approx(
    expected
  )
  assert result["threshold"] == 0.3 and result["threshold_from"] == "given"
  assert "mean of the subsets" in printed and f"{100 * expected[2]:.1f}" in printed
  assert (tmp_path / "a.json.png").read_bytes().startswith(b"\x89PNG")
  half = write_lines(tmp_path / "half.jsonl", lines[:20])
  evaluate(*flags, f"--output={b}", f"--threshold_data={half}")
  other = json.loads(b.read_text())
  assert other["threshold"] == pytest.approx(first_error.best_threshold(solutions[:20]))
  assert (
    "half.jsonl, 20 solutions, 20 of them on problems that are reported" in other["threshold_from"]
  )
  evaluate(*flags, f"--output={tmp_path / 'math.json'}", "--split=math")
  assert [*json.loads((tmp_path / "math.json").read_text())["subsets"]] == ["math"]
  printed = evaluate("--compare", a, b, f"--output={tmp_path / 'c.json'}")
  paired = json.loads((tmp_path / "c.json").read_text())["paired"]["math/f1"]
  later = by_hand([x for x in solutions if x.group == "math"], other["threshold"])[2]
  assert paired["difference"] == pytest.approx(expected[2] - later)
  assert paired["low"] <= paired["difference"] <= paired["high"]
  assert "kappa" in printed and "0.0 to 0.0" in evaluate("--compare", a, a)


def test_a_comparison_has_the_numbers_of_the_evaluations(tmp_path):
  """Also of probabilities near 0 and 1, whose logarithm and order the file has to keep."""
  for name, right in (("a", 1 - 1e-12), ("b", 1 - 1e-11)):
    lines = [
      {
        "problem": f"p{i}",
        "steps": ["a", "b"],
        "labels": [1, -1],
        "step_scores": [right, 1 - 1e-10],
      }
      for i in range(3)
    ]
    path = write_lines(tmp_path / f"{name}.jsonl", lines)
    evaluate("--benchmark=prm800k", f"--input={path}", f"--output={tmp_path / name}.json")
  paired = step_comparison.compared((tmp_path / "a.json", tmp_path / "b.json"))["paired"]
  for side in "ab":
    intervals = json.loads((tmp_path / f"{side}.json").read_text())["intervals"]
    for name in ("nll", "auroc"):
      assert paired[name][side] == pytest.approx(intervals[name]["value"], rel=1e-9)


def test_two_models_scores_of_prm800k_are_compared(tmp_path):
  """Results of two files of the same labelled lines are compared; those of other labels are not."""
  line = {"steps": ["a", "b"], "labels": [1, -1]}
  for name, scores, change in (
    ("a", [0.9, 0.2], {}),
    ("b", [0.8, 0.6], {}),
    ("c", [0.8, 0.6], {"labels": [1, 1]}),
  ):
    lines = [line | {"problem": f"p{i}", "step_scores": scores} for i in range(3)]
    path = write_lines(tmp_path / f"{name}.jsonl", [*lines[:2], lines[2] | change])
    evaluate("--benchmark=prm800k", f"--input={path}", f"--output={tmp_path / name}.json")
  a, b, c = (tmp_path / f"{name}.json" for name in "abc")
  paired = step_comparison.compared((a, b))["paired"]
  assert paired["first_error/error_accuracy"]["difference"] == 1
  with pytest.raises(ValueError, match="not of the same solutions: 1 of 3 differ"):
    step_comparison.compared((a, c))
  c.write_text(json.dumps(json.loads(a.read_text()) | {"solutions": []}))
  with pytest.raises(ValueError, match="solutions: the first has 3, the second 0"):
    step_comparison.compared((a, c))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({}, None),
    ({"probs": ...}, 'solutions[0]" is .*: no "probs"'),
    ({"probs": ..., "steps": ..., "rating_probs": []}, 'solutions[0]" is .*: no "steps"'),
    ({"probs": [[0.5, 0.5]] * 2}, "probs: expected 3 numbers from 0 to 1 for each of 2 steps"),
    ({"probs": [[2, -1, 0]] * 2}, "probs: expected 3 numbers from 0 to 1"),
    ({"scores": ["x", 1]}, r'solutions[0].scores" is .*x'),
    ({"scores": [None, 1]}, "scores: expected a number for each of 2 steps"),
    ({"std": [0.1]}, "std: expected a number for each of 2 steps"),
  ],
)
def test_a_result_of_another_version_is_an_error(tmp_path, change, message):
  """Stored solutions are read as they were; a missing or wrong field is named with the file."""
  given = with_scores(judged.Labelled("a", "g", "p", ["s", "t"], [1, -1]), [0.25, 0.5])
  (entry,) = json.loads(json.dumps(judged.stored([given])))
  entry = {key: value for key, value in (entry | change).items() if value is not ...}
  path = tmp_path / "result.json"
  about = {"benchmark": "process_bench", "threshold": 0.5, "solutions": [entry]}
  path.write_text(json.dumps(about))
  if not message:
    (read,) = step_comparison.read_result(path).solutions
    assert read.labels == given.labels and read.problem == judged.short_hash("p")
    np.testing.assert_array_equal(read.probs, given.probs)
    np.testing.assert_array_equal(read.scores, given.scores)
    return
  with pytest.raises(BadLine, match=rf"result\.json: .*{message.replace('[0]', '.0.')}"):
    step_comparison.read_result(path)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"rating_probs": None}, ":3: neither rating_probs nor step_scores"),
    ({"rating_probs": [{"1": 0.5, "-1": 0.5}] * 9}, ":3: 9 rating_probs of"),
    ({"rating_probs": [{"1": 7}]}, ":3: .*7"),
    ({"label": 99}, ":3: .*label is 99, of"),
    ({"steps": []}, ":3: "),
    ({"verdicts": [-1, 9]}, ":3: verdict 9 of"),
    ({"rating_probs": None, "step_scores": [1.5]}, ":3: .*1.5"),
  ],
)
def test_a_bad_scored_line_is_an_error(scored_lines, change, message):
  """The error of a bad line has its number and says what is wrong."""
  path, _, lines = scored_lines
  lines[2] |= change
  write_lines(path, lines)
  with pytest.raises(ValueError, match=f"{path}{message}"):
    step_benchmarks.scored("process_bench", path)


def test_scores_of_a_file_are_those_of_the_model():
  """The scores of score.py's lines are the model's P(right), of nearly certain steps too."""
  contract = StepContract("process", ("-1", "0", "1"), "\n", (1,), "", "positive", "", "paper")
  heads = np.array([[[1e-9, 2e-9, 1 + 6e-8]], [[0.2, 0.3, 0.503]]])
  line = candidates.scored({"problem": "p"}, ["a", "b"], heads, contract)
  solution = Labelled("id", "math", "p", ["a", "b"], [1, -1])
  found = from_record(solution, line, "FILE:1")
  np.testing.assert_allclose(found.scores, contract.right(heads)[:, 0], rtol=1e-15)
  np.testing.assert_allclose(1 - found.scores, [1e-9, 0.2 / 1.003], rtol=1e-6)


def test_step_scores_are_probabilities_of_right(scored_lines):
  """Lines with `step_scores` give the scores of the same P(right) in `rating_probs`."""
  path, _, lines = scored_lines
  right = [[p["0"] + p["1"] for p in line.pop("rating_probs")] for line in lines]
  plain = [line | {"step_scores": scores} for line, scores in zip(lines, right)]
  solutions = step_benchmarks.scored("process_bench", write_lines(path, plain))[0]
  assert [each.scores.tolist() for each in solutions] == right
  assert all(np.allclose(each.probs.sum(1), 1) for each in solutions)


def test_step_scores_are_read_from_lines_of_every_form(tmp_path):
  """PRMBench's lines, with those of the original solution, and labelled lines take step scores."""
  scores = {"step_scores": [0.9, 0.2], "original_step_scores": [0.7]}
  path = write_lines(tmp_path / "scored.jsonl", [prm_bench_line("redundency", [2], **scores)])
  found = sorted(each.scores.tolist() for each in step_benchmarks.scored("prm_bench", path)[0])
  assert found == [[0.7], [0.9, 0.2]]
  write_lines(path, [{"problem": "p", "steps": ["a"], "labels": [-1], "step_scores": [0.3]}])
  (_, (tree,)) = prm800k_steps.scored(path, "positive")
  assert tree.scores.tolist() == [0.3]
  line = prm_bench_line("redundency", [2], steps=7, **scores)  # not a key of this form: ignored
  assert step_benchmarks.scored("prm_bench", write_lines(path, [line]))[0]


def test_flags_that_exclude_each_other_are_an_error():
  """Each invalid combination of flags ends with a message before any file is read."""
  for flags, message in (
    (["--output=a"], "one of --checkpoint"),
    (["--input=a", "--data_dir=b", "--output=c"], "--input has its own labels"),
    (["--checkpoint=a", "--readout=trl", "--data_dir=b", "--output=c"], "go with --model"),
    (["--input=a", "--output=c", "--threshold=1", "--threshold_data=b"], "not both"),
    (["--input=a", "--output=c", "--threshold=nan"], "threshold=nan"),
    (["--input=a", "--output=c", "--step=4"], "--step goes with a model"),
    (["--input=a", "--output=a"], "a is an input"),
    (["--compare", "a.png", "b", "--output=a"], "a.png is an input"),
    (["--compare", "a", "b", "--threshold=0.3"], "--threshold has no effect with --compare"),
    (["--compare", "a", "b", "--benchmark=prm_bench"], "--benchmark has no effect"),
    (["--compare", "a", "b", "--checkpoint=c"], "--checkpoint has no effect"),
    (["--checkpoint=a", "--data_dir=b", "--output=c", "--neutral=negative"], "--neutral goes with"),
  ):
    assert message in call_script("evaluate.py", *flags, code=(1, 2)).stderr


def test_an_outcome_model_takes_no_threshold(arithmetic_data, tmp_path):
  """A threshold for an outcome model, which decides no steps, is an error."""
  experiment = tiny.experiment(arithmetic_data, objective="outcome")
  run = tiny.untrained(experiment, tmp_path / "run")
  flags = (f"--checkpoint={run}", f"--data_dir={arithmetic_data}", f"--output={tmp_path / 'out'}")
  completed = call_script("evaluate.py", *flags, "--threshold=0.3", code=1)
  assert "takes no threshold" in completed.stderr
  assert "labels" in evaluate(*flags) and not (tmp_path / "out.png").exists()


@pytest.mark.parametrize("output", ["math/all.json", "gsm8k"])  # with gsm8k.png
def test_a_file_of_the_benchmark_is_not_overwritten(output, tmp_path):
  """An output below --data_dir that has the name of one of its files is an error."""
  for name in ("math/all.json", "gsm8k.png"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("[]")
  flags = ("--checkpoint=a", "--benchmark=process_bench", f"--data_dir={tmp_path}")
  completed = call_script("evaluate.py", *flags, f"--output={tmp_path / output}", code=1)
  assert "is an input: give another name" in completed.stderr
  assert (tmp_path / "math/all.json").read_text() == "[]"
  (tmp_path / "own.json").write_text('{"benchmark": "process_bench"}')  # an earlier result
  flags += (f"--output={tmp_path / 'own.json'}",)
  assert "is an input" not in call_script("evaluate.py", *flags, code=1).stderr


def test_data_is_checked_before_a_model_is_loaded(tmp_path, scored_lines):
  """An error in the data or its flags is reported before the model is loaded."""
  path, _, lines = scored_lines
  folder, empty = tmp_path / "subset", tmp_path / "empty"
  folder.mkdir()
  empty.mkdir()
  (steps := tmp_path / "steps").mkdir()
  (steps / "manifest.json").write_text('{"dataset": "stepwise"}')
  write_lines(folder / "gsm8k.jsonl", lines[:1])
  process = "--benchmark=process_bench"
  for flags, message in (
    ([process, f"--data_dir={path}"], "scored.jsonl: is a file; give the folder"),
    ([process, f"--data_dir={tmp_path / 'none'}"], "none: no such folder"),
    ([process, f"--data_dir={empty}"], "gsm8k.json, math.json, olympiadbench.json, omnimath"),
    ([f"--data_dir={folder}"], "data of process_bench: give --benchmark=process_bench"),
    ([process, f"--data_dir={steps}"], "data of stepwise: give --benchmark=prm800k"),
    ([process, f"--data_dir={folder}", "--split=math"], "no solution of --split=math"),
    ([process, f"--data_dir={folder}", f"--threshold_data={tmp_path}/t"], "No such file"),
    (
      ["--benchmark=prm_bench", "--readout=skywork-o1-prm", f"--data_dir={folder}"]
      + [f"--threshold_data={path}"],
      "by differences between them: give --threshold",
    ),
    ([process, f"--data_dir={folder}"], "no/model"),
  ):
    output = f"--output={tmp_path / 'out.json'}"
    completed = call_script("evaluate.py", "--model=no/model", output, *flags, code=1)
    before, _, error = completed.stderr.partition("evaluate.py: ")
    assert message in error
    assert ("loading" in before) == (message == "no/model")


def test_a_mean_over_some_subsets_names_those_missing():
  """The table of fewer than ProcessBench's four subsets names the missing ones."""
  table = process_bench.table(process_bench.evaluate(random_solutions(0), 0.5))
  assert "without olympiadbench, omnimath: " in "\n".join(table)


def test_prepared_benchmarks_equal_published_files(tmp_path, scored_lines):
  """Published files, as lines or as an array, and what prepare_data.py writes of them are equal."""
  _, _, lines = scored_lines
  raw = tmp_path / "raw"
  raw.mkdir()
  for group in GROUPS:
    rows = [line | {"generator": "g"} for line in lines if line["id"].startswith(group)]
    text = json.dumps(rows) if group == "math" else "".join(json.dumps(row) + "\n" for row in rows)
    (raw / f"{group}.{'json' if group == 'math' else 'jsonl'}").write_text(text)
  flags = ("--dataset=process_bench", f"--source={raw}", f"--output={tmp_path / 'out'}")
  call_script("prepare_data.py", *flags)
  assert read("process_bench", raw) == read("process_bench", tmp_path / "out")
  (tmp_path / "bad").mkdir()
  write_lines(tmp_path / "bad" / "math.jsonl", [{"id": "math-0", "problem": "p", "label": -1}])
  with pytest.raises(BadLine, match=r'bad/math\.jsonl:1: no "steps"'):
    prepare.prepare_benchmark(tmp_path / "c", "process_bench", source=tmp_path / "bad")
  for name, names in (
    ("math_splits", r"train\.jsonl, test\.jsonl$"),
    ("process_bench", r"omnimath\.json, also as \.jsonl$"),
    ("prm_bench", r"expected some of \*\.jsonl$"),
  ):
    (tmp_path / name).mkdir()
    with pytest.raises(FileNotFoundError, match=names):
      prepare.prepare_benchmark(tmp_path / "c", name, source=tmp_path / name)
  folder = tmp_path / "lines"
  folder.mkdir()
  row = prm_bench_line("redundency", [2], original_process=["x", "y"], modified_process=["x", ""])
  write_lines(folder / "a.jsonl", [row])
  prepare.prepare_benchmark(tmp_path / "b", "prm_bench", source=folder)
  solutions = read("prm_bench", folder)
  assert solutions == read("prm_bench", tmp_path / "b")
  assert [(x.id, x.labels) for x in solutions] == [("correct_a", [1, 1]), ("redundency_a", [1, -1])]


def test_files_without_a_published_checksum_are_downloaded_once(tmp_path, monkeypatch, served):
  """ProcessBench's arrays are downloaded once, and the manifest says that no checksum is known."""
  folder, url = served
  benchmark = dataclasses.replace(process_bench_data.BENCHMARK, BASE_URL=url)
  monkeypatch.setitem(prepare.BENCHMARKS, "process_bench", benchmark)
  for name in ("gsm8k", "math", "olympiadbench", "omnimath"):
    row = {"problem": "p", "steps": ["a"], "label": -1, "final_answer_correct": True}
    rows = [row | {"id": f"{name}-{i}"} for i in range(2)]
    (folder / f"{name}.json").write_text(json.dumps(rows))
  for output in (tmp_path / "first", tmp_path / "second"):
    options = {"source": None, "download_dir": tmp_path / "downloads"}
    manifest = prepare.prepare_benchmark(output, "process_bench", **options)
    assert manifest["source"]["math.json"]["is_upstream"] is None
    assert [each.id for each in read("process_bench", output)][2:4] == ["math-0", "math-1"]
    (folder / "math.json").unlink(missing_ok=True)
  assert (tmp_path / "downloads" / "process_bench" / "math.json").is_file()


def prm800k_line(ratings):
  """Returns a line of PRM800K with completions of these ratings at each step, the last chosen."""
  probs = lambda rating: (
    {"-1": 0.8, "0": 0.1, "1": 0.1} if rating < 0 else {"-1": 0.1, "0": 0.2, "1": 0.7}
  )
  steps = []
  for i, each in enumerate(ratings):
    completions = [
      completion(f"{i} {j}", rating, None) | {"rating_probs": probs(rating)}
      for j, rating in enumerate(each)
    ]
    steps.append(step(*completions, chosen=None if each[-1] < 0 else len(each) - 1))
  return make_row(steps, "found_error", 1)


def test_prm800k_lines_with_probabilities_are_judged(tmp_path):
  """Step metrics count every rated completion, the first error only those on the chosen path."""
  line = prm800k_line([[-1, 0], [1], [0, -1]])
  path = write_lines(tmp_path / "scored.jsonl", [line])
  judged_paths, trees = step_benchmarks.scored("prm800k", path)
  assert [x for tree in trees for x in tree.labels] == [-1, 0, 1, 0, -1]
  assert [list(each.labels) for each in judged_paths] == [[0, 1, -1]]
  result = step_benchmarks.result("prm800k", judged_paths, trees, 0.5)
  assert result["auroc"] == 1 and result["count_by_class"] == {"-1": 2, "0": 2, "1": 1}
  assert result["first_error"]["error_accuracy"] == 1 and result["first_error"]["f1"] is None
  table = prm800k_steps.table(result)
  assert len(table) == 7 and table[-1].endswith("correct accuracy n/a, F1 n/a")
  result["count_by_class"]["0"], result["f1_by_class"]["0"] = 0, None  # of a model of two classes
  assert len(prm800k_steps.table(result)) == 6
  del line["label"]["steps"][1]["completions"][0]["rating_probs"]
  write_lines(path, [line])
  with pytest.raises(ValueError, match=r"scored\.jsonl:1: .*rating_probs\[2\].* is {}"):
    step_benchmarks.scored("prm800k", path)


def test_plain_lines_are_judged_up_to_their_last_label(tmp_path):
  """Steps after the last label, and lines without a label, play no part, as in training."""
  lines = [
    {"problem": f"p{i}", "steps": ["x"] * len(labels), "labels": labels, "step_scores": scores}
    for i, (labels, scores) in enumerate(
      [
        ([True, False], [0.9, 0.1]),
        ([True, True, None], [0.9, 0.8, 0.2]),
        ([None, None], [0.9, 0.2]),
      ]
    )
  ]
  lines = [line | {"is_correct": False} for line in lines]
  path = write_lines(tmp_path / "scored.jsonl", lines)
  paths, trees = step_benchmarks.scored("prm800k", path)
  assert [list(each.labels) for each in paths] == [[1, -1], [1, 1]]
  first = step_benchmarks.result("prm800k", paths, trees, 0.5)["first_error"]
  assert (first["n"], first["error_accuracy"], first["correct_accuracy"]) == (2, 1, 1)
  unlabelled = write_lines(tmp_path / "unlabelled.jsonl", lines[2:])
  with pytest.raises(ValueError, match=r"unlabelled\.jsonl: no labelled step"):
    step_benchmarks.scored("prm800k", unlabelled)


@pytest.mark.parametrize(
  ("given", "expected"),
  [
    ([[0.9, 0.3], [1, 0]], [[1, -1], [1, -1]]),  # soft
    ([[1.0, 0.0]], [[1, -1]]),  # soft, too
    ([[1, 0], [1, 1]], [[1, 0], [1, 1]]),  # ratings
    ([[1.0, 0.0], [1.0, -1.0]], [[1, 0], [1, -1]]),  # ratings, too
    ([[True, False], [1, 0]], [[1, -1], [1, -1]]),  # binary
    ([[0.9, 0.3], [True, False]], "rows.jsonl:2: the label of step 1 is true: .*soft so far"),
    (
      [[1, 0], [1, -1], [0.5, 1]],
      "rows.jsonl:3: the label of step 1 is 0.5: .*labels are ratings$",
    ),
    ([[0.9, 0.3], [[3, 1], [0, 4]]], "rows.jsonl:2: .*expected one kind of labels"),
  ],
)
def test_all_labels_of_a_file_are_of_one_kind(tmp_path, given, expected, capsys):
  """The reader decides over the whole file what plain labels mean; mixed kinds are an error.

  A warning says that 0 is neutral if all labels are 0 or 1.
  """
  rows = [{"problem": "p", "steps": ["a", "b"], "labels": labels} for labels in given]
  scored = [row | {"step_scores": [0.9, 0.2]} for row in rows]
  for lines, read in (
    (rows, lambda path: step_benchmarks.threshold_data(path, "positive")),
    (scored, lambda path: step_benchmarks.scored("prm800k", path)[0]),
  ):
    path = write_lines(tmp_path / "rows.jsonl", lines)
    if isinstance(expected, str):
      with pytest.raises(BadLine, match=expected):
        read(path)
    else:
      assert [list(each.labels) for each in read(path)] == expected
      warned = "0 counts as neutral" in capsys.readouterr().err
      assert warned == (given == [[1, 0], [1, 1]])


def test_auroc_and_its_interval_are_of_one_score(tmp_path):
  """With --neutral=negative too, AUROC, interval and calibration rank steps by 1 - P(-1)."""
  probs = [(0.05, 0.9, 0.05), (0.3, 0, 0.7), (0.8, 0.1, 0.1)]
  rated = [dict(zip(("-1", "0", "1"), p)) for p in probs]
  lines = [
    {"problem": f"p{i}", "steps": ["a", "b", "c"], "labels": [0, 1, -1], "rating_probs": rated}
    for i in range(4)
  ]
  path = write_lines(tmp_path / "scored.jsonl", lines)
  paths, trees = step_benchmarks.scored("prm800k", path, neutral="negative")
  result = step_benchmarks.result("prm800k", paths, trees, 0.5)
  assert result["auroc"] == result["intervals"]["auroc"]["low"] == 1
  assert result["diagnostics"]["calibration"]["ece"] == pytest.approx(result["ece"])


def test_a_threshold_is_found_on_files_of_any_form(tmp_path):
  """A threshold comes from PRM800K's lines or plain ones; lines without scores need a model."""
  lines = [prm800k_line([[1], [0, -1]]), prm800k_line([[1], [1]])]
  plain = {"problem": "p", "steps": ["a"], "labels": [-1], "rating_probs": [{"-1": 0.7, "1": 0.3}]}
  right = plain | {"labels": [1], "rating_probs": [{"-1": 0.4, "1": 0.6}]}
  bare = [
    {key: value for key, value in row.items() if key != "rating_probs"} for row in (plain, right)
  ]
  by_step = [row | {"step_scores": [score]} for row, score in zip(bare, (0.3, 0.6))]

  def choose(path):
    known = step_benchmarks.threshold_data(path, "positive")
    return step_benchmarks.choose_threshold(None, path, known, scorer=None, judged=[])

  for rows, middle in ((lines, 0.55), ([plain, right], 0.45), (by_step, 0.45)):
    path = write_lines(tmp_path / "rows.jsonl", rows)
    threshold, origin = choose(path)
    assert threshold == pytest.approx(middle) and "none of them on problems that are" in origin
  write_lines(path, bare)
  with pytest.raises(ValueError, match="no rating_probs or step_scores, and no model"):
    choose(path)
  write_lines(path, [right, right])
  with pytest.raises(ValueError, match=r"rows\.jsonl: .*both are needed; 0 of 2 have one"):
    choose(path)


def test_alternatives_are_scored_as_chains_of_their_own(prm_run, monkeypatch):
  """A step beside the path is scored as the chain that ends with it; NaN is an error."""
  scorer = Scorer.load(prm_run)
  steps, labels = ["2+3=6", "2+3=5", "So 5.", "So 6."], [-1, 1, 1, -1]
  tree = judged.Labelled("a", "all", "2 + 3", steps, labels, parents=[-1, -1, 1, 1])
  ((scored,), speed) = judged.score(scorer, [tree])
  assert speed["solutions"] == 1 and len(tree.paths()) == 3
  for path in tree.paths():
    (chain,) = scorer.probabilities([(tree.problem, [steps[i] for i in path])])
    np.testing.assert_allclose(scored.probs[path], chain, rtol=1e-4)
  nan = lambda self, trees, problems, on_share: [np.full((1, 1, 3), np.nan) for _ in trees]
  monkeypatch.setattr(Scorer, "read", nan)
  with pytest.raises(ValueError, match="a: the model gives NaN"):
    judged.score(scorer, [tree])
