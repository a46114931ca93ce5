"""compare.py: its numbers equal their definitions, and its page shows disagreements."""

import json
import re

import numpy as np
import pytest
from conftest import call_script, read_lines, write_lines
from scored_files import ranked, samples_of, shown_on

from prm_jax import step_metrics
from prm_jax.evaluation.candidate_table import SCORES
from prm_jax.evaluation.figure_files import encoded
from prm_jax.experiments import comparison, comparison_files, comparison_page, figures
from prm_jax.runtime.json_lines import BadLine

P, M = 12, 6


def lines(seed=0):
  """Returns graded candidates; some problems have only right or wrong ones, some are cut off."""
  rng, out = np.random.default_rng(seed), []
  for p in range(P):
    share = rng.choice([0.0, 0.3, 0.6, 1.0])
    for m in range(M):
      right, finished = bool(rng.random() < share), bool(rng.random() < 0.85)
      answer = "4" if right else str(rng.integers(5, 7))
      out.append(
        {
          "problem": f"p{p}",
          "steps": [f"step {m}"] * (1 + m % 3) + [f"answer {answer}"],
          "answer": answer if finished else None,
          "is_correct": right and finished,
          "finished": finished,
          "level": 1 + p % 3,
          "logprob": -float(rng.integers(1, 9)),
          "tokens": int(rng.integers(5, 50)),
        }
      )
  return out


def scored(given, seed, strength):
  """Yields the lines with step probabilities that depend on `is_correct` with this strength."""
  rng = np.random.default_rng(seed)
  for line in given:
    means = [strength * line["is_correct"]] * len(line["steps"])
    p = (1 / (1 + np.exp(-rng.normal(means)))).tolist()
    yield line | {"rating_probs": [{"-1": 1 - x, "0": 0.0, "1": x} for x in p]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """Returns the file of graded candidates, and the file of each model's scores by its name."""
  folder, given = tmp_path_factory.mktemp("compare"), lines()
  strengths = {"people": 3.0, "people/2": 1.5, "people/4": 0.5, "other": 0.0}
  named = {
    name: write_lines(folder / f"{i}.jsonl", scored(given, i, strength))
    for i, (name, strength) in enumerate(strengths.items())
  }
  return write_lines(folder / "graded.jsonl", given), named


@pytest.fixture(scope="module")
def candidates(files):
  """Returns the candidates with the scores of all models."""
  return comparison_files.read(*files)


@pytest.fixture(scope="module")
def compared(candidates):
  """Returns the comparison of all methods."""
  return comparison.compare(candidates)


def of_problem(p):
  """Returns the lines of a problem."""
  return [line for line in lines() if line["problem"] == f"p{p}"]


def test_auc_is_over_pairs_within_a_problem(candidates):
  """AUC is the share of right-wrong pairs of answers whose right one is scored higher."""
  samples = candidates.samples
  scores = candidates.scores["log-probability"]
  auc = comparison.within_problems(scores, samples.correct, samples.valid)
  for p in range(P):
    finished = [line for line in of_problem(p) if line["finished"]]
    pairs = [
      (a["logprob"] > b["logprob"]) + (a["logprob"] == b["logprob"]) / 2
      for a in finished
      for b in finished
      if a["is_correct"] and not b["is_correct"]
    ]
    assert auc[p] == pytest.approx(np.mean(pairs), nan_ok=True) if pairs else np.isnan(auc[p])


def test_best_of_all_is_the_best_finished_candidate(candidates):
  """At N = M a method picks its best candidate with an answer; ties share the pick."""
  curves = comparison.solved(candidates, [1, M])
  for p in range(P):
    finished = [line for line in of_problem(p) if line["finished"]]
    for name, size in (
      ("shortest", lambda x: x["tokens"]),
      ("fewest steps", lambda x: len(x["steps"])),
    ):
      least = min(map(size, finished), default=None)
      best = [line["is_correct"] for line in finished if size(line) == least]
      assert curves[name][p, -1] == pytest.approx(np.mean(best) if best else 0)
    assert curves["oracle"][p, -1] == any(line["is_correct"] for line in finished)
    right = np.mean([line["is_correct"] for line in of_problem(p)])
    for name, curve in curves.items():
      assert curve[p, 0] == pytest.approx(right, abs=1e-9), name


def test_cut_off_candidates_need_no_scores(compared, files, tmp_path):
  """Without scores of the cut-off candidates, every number is the same."""
  graded, models = files
  fewer = {}
  for name, file in models.items():
    given = read_lines(file)
    kept = [x if x["finished"] else {k: v for k, v in x.items() if k not in SCORES} for x in given]
    assert kept != given
    fewer[name] = write_lines(tmp_path / f"{len(fewer)}.jsonl", kept)
  assert comparison.compare(comparison_files.read(graded, fewer)) == compared


@pytest.mark.parametrize("kept", [{"orm_score"}, {"rating_probs"}, {"step_scores"}])
@pytest.mark.parametrize("steps", ["rating_probs", "step_scores"])
def test_cut_off_candidates_may_have_other_scores(files, tmp_path, steps, kept):
  """A cut-off candidate may have any of the scores, even the first line: one model skipped it."""
  rows = sorted(read_lines(files[1]["other"]), key=lambda row: row["finished"])
  for i, row in enumerate(rows):
    row |= {"orm_score": i / 100, "step_scores": [p["1"] for p in row["rating_probs"]]}
  bare = lambda row, keys: {k: v for k, v in row.items() if k not in SCORES - keys}
  whole = [bare(row, {steps, "orm_score"}) for row in rows]
  some = [one if one["finished"] else bare(row, kept) for one, row in zip(whole, rows)]
  assert not some[0]["finished"] and some != whole
  report, other = (ranked(samples_of(tmp_path / "a.jsonl", x))[0] for x in (whole, some))
  assert {"prm_product", "orm", "weighted_orm"} < report["curves"].keys()
  assert other == report
  outcome = [bare(row, {"orm_score"} if row["finished"] else kept) for row in rows]
  assert samples_of(tmp_path / "b.jsonl", outcome).step_probs is None


def test_a_score_that_only_a_cut_off_candidate_lacks_is_an_error(files, tmp_path):
  """A scored file that says "cut off", where the graded file does not, lacks a score."""
  graded, models = files
  rows = read_lines(models["other"])
  at = next(i for i, row in enumerate(rows) if row["finished"] and not row["is_correct"])
  bare = {key: value for key, value in rows[at].items() if key not in SCORES}
  rows[at] = bare | {"finished": False}
  path = write_lines(tmp_path / "scored.jsonl", rows)
  with pytest.raises(BadLine, match=r"scored\.jsonl: lacks scores .*graded\.jsonl"):
    comparison_files.read(graded, {"other": path})


@pytest.mark.parametrize("key, value", [("steps", ["other", "answer"]), ("answer", "12")])
def test_scores_of_other_solutions_are_refused(files, tmp_path, key, value):
  """A scored file with other solutions of the same problems, graded alike, is an error."""
  graded, models = files
  rows = read_lines(models["other"])
  at = next(i for i, row in enumerate(rows) if row["finished"] and not row["is_correct"])
  rows[at][key] = value
  if key == "steps":
    rows[at]["answer"] = "12"  # of two differences the steps are named, in every run
  path = write_lines(tmp_path / "scored.jsonl", rows)
  with pytest.raises(
    BadLine, match=rf"scored\.jsonl:{at + 1}: not the {key} of .*d\.jsonl:{at + 1}"
  ):
    comparison_files.read(graded, {"other": path})


def test_votes_weigh_by_the_reduction_that_ranks(files, candidates):
  """The weight of a model's vote is the probability that ranks, under every reduction."""
  soft = comparison_files.read(*files, "soft_min")
  for each in (candidates, soft):
    np.testing.assert_allclose(each.models["people"], np.exp(each.scores["people"]))
  assert not np.allclose(candidates.models["people"], soft.models["people"])


def test_votes_weigh_products_of_many_steps(tmp_path):
  """Votes by products that underflow differ as the products do."""
  given = [
    {"problem": "p", "steps": ["s"] * 80, "answer": str(i), "is_correct": not i, "finished": True}
    for i in range(3)
  ]
  steps = [[{"-1": 1 - x, "0": 0.0, "1": x}] * 80 for x in (5e-5, 1e-5, 2e-5)]
  models = [line | {"rating_probs": each} for line, each in zip(given, steps)]
  files = [write_lines(tmp_path / f"{i}.jsonl", x) for i, x in enumerate((given, models))]
  solved = comparison.solved(comparison_files.read(files[0], {"m": files[1]}), [1, 2, 3])
  np.testing.assert_allclose(solved["vote by m"], [[1 / 3, 2 / 3, 1]], atol=0.05)


@pytest.mark.parametrize(
  "name, expected",
  [
    ("people", ("people", 1, "")),
    ("people/2", ("people", 2, "")),
    ("people/2:min", ("people", 2, "min")),
    ("org/model:last", ("org/model", 1, "last")),
    ("org/model", ("org/model", 1, "")),
  ],
)
def test_a_name_has_a_model_a_share_and_a_reduction(name, expected):
  """NAME/2:min names a model, its share of the labels and its reduction of steps."""
  assert comparison_files.parts(name) == expected


def test_one_model_by_two_reductions_against_any_method(files, tmp_path):
  """NAME:REDUCTION reduces a model's steps so, and --against compares with any method."""
  graded, models = files
  named = {"other": models["other"], "other:min": models["other"]}
  candidates = comparison_files.read(graded, named)
  by_min = comparison_files.read(graded, models, "min")
  np.testing.assert_array_equal(candidates.scores["other:min"], by_min.scores["other"])
  methods = comparison.compare(candidates, against=["other:min"])["methods"]
  product, minimum = (methods[name]["accuracy"]["mean"] for name in named)
  minus = methods["other"]["minus"]["other:min"]["mean"]
  assert product != minimum and minus == pytest.approx(np.subtract(product, minimum))
  with pytest.raises(ValueError, match=r"--against nobody: no such method; .*other:min"):
    comparison.compare(candidates, against=["nobody"])
  for name in ("random", "majority", "log-probability", "problems", "vote by other"):
    with pytest.raises(ValueError, match=f"{name}: this is a method"):
      comparison_files.read(graded, {name: models["people"]})
  with pytest.raises(ValueError, match="people:most: no reduction 'most'; there are product"):
    comparison_files.read(graded, {"people:most": models["people"]})
  outcome = read_lines(models["people"])
  for line in outcome:
    line["orm_score"] = line.pop("rating_probs")[0]["1"]
  file = write_lines(tmp_path / "outcome.jsonl", outcome)
  assert "outcome" in comparison_files.read(graded, {"outcome": file}).models
  for how in ("min", "calibrated"):
    with pytest.raises(BadLine, match=rf"no rating_probs or step_scores, for outcome:{how}"):
      comparison_files.read(graded, {f"outcome:{how}": file})
  with pytest.raises(BadLine, match=r"no rating_probs or step_scores and no orm_score, for bare"):
    comparison_files.read(graded, {"bare": graded})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True])
def test_a_log_probability_that_is_no_number_is_an_error(tmp_path, value):
  """compare.py names the line of a log-probability by which it cannot rank; -inf is one."""
  given, shown = lines(), "true" if value is True else value
  given[1]["logprob"] = value
  path = write_lines(tmp_path / "graded.jsonl", given)
  with pytest.raises(BadLine, match=rf"graded\.jsonl:2: logprob is {shown}: expected a finite"):
    comparison_files.read(path, {})
  given[1]["logprob"] = -np.inf
  candidates = comparison_files.read(write_lines(path, given), {})
  assert candidates.scores["log-probability"][0, 1] == -np.inf
  found = comparison.compare(candidates) | {"neutral": "positive"}
  comparison_page.contents(candidates, found, "t")  # JSON has no infinity


def test_a_notice_says_which_scores_some_records_lack(tmp_path):
  """A score that some records lack is not compared, and a notice says so; one of none is not."""
  given = [{key: value for key, value in line.items() if key != "tokens"} for line in lines()]
  del given[0]["logprob"], given[1]["logprob"]
  candidates = comparison_files.read(write_lines(tmp_path / "graded.jsonl", given), {})
  assert [*candidates.scores] == ["fewest steps"]
  assert candidates.notices() == ["2 of 72 records have no logprob: not compared"]


def test_length_counts_finished_candidates_only(candidates, compared):
  """Rank correlation of scores and steps, and mean steps of picks, leave out cut-off candidates."""
  scores, steps = np.array([[3.0, 2, 2, 9], [1, 1, 0, 5]]), np.array([[1.0, 2, 4, 1], [6, 8, 9, 1]])
  valid = np.array([[True, True, True, False]] * 2)
  length = comparison.length(scores, steps, valid)
  assert (length["pick"], length["random"]) == ((1 + 7) / 2, pytest.approx((7 / 3 + 23 / 3) / 2))
  assert comparison.length(-steps, steps, valid)["correlation"] == pytest.approx(-1)
  for equal in (0.0, -np.inf):
    assert comparison.length(np.full((2, 4), equal), steps, valid)["correlation"] is None
  assert candidates.steps[0, 0] == 2
  fewest = compared["methods"]["fewest steps"]["length"]
  assert fewest["correlation"] == pytest.approx(-1) and fewest["pick"] < fewest["random"]


def test_differences_are_paired_by_problem(compared, files):
  """A difference of methods has a paired interval and the problems needed to detect it."""
  methods = compared["methods"]
  for name, other in (("people", "majority"), ("other", "log-probability")):
    means = [methods[x]["accuracy"]["mean"][-1] for x in (name, other)]
    minus = methods[name]["minus"][other]
    assert minus["mean"][-1] == pytest.approx(means[0] - means[1])
    assert minus["low"][-1] <= minus["mean"][-1] <= minus["high"][-1]
  aucs = [methods[x]["auc"]["mean"][0] for x in ("other", "log-probability")]
  assert minus["auc"]["mean"][0] == pytest.approx(aucs[0] - aucs[1])
  assert minus["auc"]["low"][0] < minus["auc"]["mean"][0] < minus["auc"]["high"][0]
  assert "auc" not in methods["other"]["minus"]["majority"]  # a vote ranks answers
  graded, models = files
  twice = comparison_files.read(graded, {"a": models["other"], "b": models["other"]})
  none = comparison.compare(twice, against=["b"])["methods"]["a"]["minus"]["b"]
  for each in (none, none["auc"]):
    assert not any(np.abs(each[key]).max() for key in ("mean", "low", "high"))
  a, b = np.array([[1.0], [1.0], [0.0], [1.0]]), np.zeros((4, 1))
  deviation = np.std([1, 1, 0, 1], ddof=1)
  wanted = ((1.959964 + 0.841621) * deviation / 0.75) ** 2
  assert comparison.power(a, b)["problems_needed"] == pytest.approx(wanted, rel=1e-5)
  assert comparison.power(a, a)["problems_needed"] is None
  assert comparison.power(a, a + np.array([[0], [1e-16], [1e-16], [0]]))["problems_needed"] is None
  assert comparison.power(a[:1], b[:1]) == {"deviation": None, "problems_needed": None}


def test_groups_have_intervals_over_their_problems(candidates, compared):
  """A method's share of a level is the mean over its problems, with an interval of these alone."""
  levels = np.array([line["level"] for line in lines()[::M]])
  right = comparison.solved(candidates, [M])["people"][:, 0]
  for level in (1, 2, 3):
    group = compared["by"]["level"][str(level)]
    assert group["problems"] == (levels == level).sum()
    found, members = group["people"], right[levels == level]
    assert found["mean"][0] == pytest.approx(members.mean())
    assert members.min() <= found["low"][0] <= found["mean"][0] <= found["high"][0] <= members.max()
    minus = found["mean"][0] - group["majority"]["mean"][0]
    assert found["minus"]["mean"][0] == pytest.approx(minus, abs=1e-12)
    assert group["majority"]["minus"]["high"] == [0]


def test_calibration_error_of_all_problems_and_of_resamples(candidates, compared):
  """The error with its interval is that of `step_metrics.calibration`; a resample has its own."""
  found = compared["methods"]["people"]["calibration"]["ece"]
  assert found["mean"][0] == pytest.approx(candidates.calibration["people"]["ece"])
  assert found["low"][0] < found["high"][0]
  correct, valid = candidates.samples.correct, candidates.samples.valid
  scores, twice = candidates.models["people"], np.zeros((2, P))
  twice[0], twice[1, 3] = 1, 2  # every problem; the fourth problem, drawn twice
  error = comparison.calibration_error(scores, correct, valid, twice)
  alone = step_metrics.calibration(scores[3, valid[3]], correct[3, valid[3]])["ece"]
  assert error["low"][0] == error["high"][0] == pytest.approx(alone)


def test_growth_per_doubling_of_labels_is_a_slope(compared, files):
  """The gain of a doubling of the labels is the least-squares slope over log2 of the shares."""
  graded, models = files
  by_min = {f"{name}:min": models[name] for name in ("people", "people/2")}
  growth = comparison.compare(comparison_files.read(graded, by_min))["growth"]
  assert growth["people:min"]["shares"] == [0.5, 1]
  growth = compared["growth"]
  assert [*growth] == ["people"] and growth["people"]["shares"] == [0.25, 0.5, 1]
  means = [compared["methods"][f"people{part}"]["auc"]["mean"][0] for part in ("/4", "/2", "")]
  slope = growth["people"]["auc"]
  assert slope["mean"][0] == pytest.approx((means[2] - means[0]) / 2)
  assert slope["low"][0] < slope["mean"][0] < slope["high"][0]


def test_disagreements_have_one_right_pick(candidates):
  """A disagreement is a problem of which either the model or the majority picks a right answer."""
  samples, scores = candidates.samples, candidates.scores["people"]
  slots, why = comparison.disagreements(candidates, "people")
  assert slots and len(slots) == len(why) and "the pick of people" in why
  for (p, a), (q, b) in zip(slots[::2], slots[1::2]):
    assert p == q and samples.correct[p, a] != samples.correct[p, b]
    valid = np.flatnonzero(samples.valid[p])
    assert scores[p, a] == scores[p, valid].max()
    counts = np.bincount(samples.answer_ids[p, valid])
    assert counts[samples.answer_ids[p, b]] == counts.max()


def test_every_subset_of_process_bench_is_shown(compared):
  """Models judged on different subsets have all columns; an F1 may lack its interval."""
  f1 = lambda value, low: {"mean": [value], "low": [low], "high": [low]}
  judged = {"a": {"gsm8k": f1(0.5, 0.4)}, "b": {"gsm8k": f1(0.6, None), "math": f1(None, None)}}
  tables = comparison_page.tables(compared | {"process_bench": judged})
  table = next(each for each in tables if "ProcessBench" in each.caption)
  assert table.header == ["", "gsm8k", "math"]
  assert table.rows == [["a", "50.0 (40.0 to 40.0)", "-"], ["b", "60.0 (none to none)", "-"]]


def test_the_figure_names_any_model(files):
  """A name that matplotlib would hide or read as a formula is in the legend as it is."""
  graded, models = files
  named = {"_draft": models["people"], "$x_$": models["other"]}
  found = comparison.compare(comparison_files.read(graded, named), [1, M])
  text = encoded(figures.draw(comparison_page.panels(found)), "svg").decode()
  assert ">_draft</text>" in text and ">$x_$</text>" in text
  assert text.count(">95 % interval of majority</text>") == 2  # the only band of each panel


def test_compare_py_writes_all_and_refuses_other_candidates(files, tmp_path):
  """compare.py writes JSON, figures and a page; a file of other candidates is an error."""
  graded, named = files
  scores = [f"{name}={path}" for name, path in named.items()]
  judged = process_bench(tmp_path)
  flags = (f"--input={judged}", f"--output={tmp_path / 'judged.json'}")
  completed = call_script("evaluate.py", "--benchmark=process_bench", *flags)
  numbered = write_lines(tmp_path / "rm.jsonl", [x | {"rm": i} for i, x in enumerate(lines())])
  flags = [f"--input={numbered}", f"--output_dir={tmp_path}", "--figures", "svg", "pdf"]
  flags += ["--scores", *scores, f"other:min={named['other']}", "--against", "other:min", "people"]
  flags.append(f"--process_bench=people={tmp_path / 'judged.json'}")
  completed = call_script("compare.py", *flags)
  shown = completed.stdout
  assert "vote by people/4" in shown and "minus other:min" in shown
  assert "other:min - people" not in shown  # each pair once
  number = lambda digits: rf"[+-]\d+\.\d{{{digits}}}"
  spread = lambda digits: rf"{number(digits)} \({number(digits)} to {number(digits)}\)"
  assert re.search(rf"people - other:min +{spread(1)} +[\d,]+ +{spread(3)}\n", shown)
  assert re.search(r"\n +other:min +0\.\d\d \(0\.\d\d to 0\.\d\d\) +-?\d\.\d\d +\d\.\d", shown)
  assert re.search(r"by difficulty\n.*\n +people +100\.0 \(", shown)
  assert re.search(r"ProcessBench.*\n +gsm8k +math +mean\n +people +80\.0 .* +0\.0 ", shown)
  stored = json.loads((tmp_path / "comparison.json").read_text())
  assert stored["problems"] == P and stored["candidates"] == P * M
  assert stored["missing"] == sum(not line["finished"] for line in lines())
  assert f"\n{stored['missing']} candidates have no answer: they may be drawn" in shown
  assert "compare.py: warning: no method uses the numbers rm; to rank by one" in completed.stderr
  assert stored["methods"]["people"]["calibration"]["ece"]["mean"][0] < 1
  assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
  assert (tmp_path / "comparison.pdf").read_bytes().startswith(b"%PDF")
  assert "vote by people</text>" in (tmp_path / "comparison.svg").read_text()
  assert "comparison.json, .png, .html, .svg, .pdf" in shown
  assert "What a doubling of the labels adds" in (tmp_path / "comparison.html").read_text()
  other = write_lines(tmp_path / "other.jsonl", scored(lines(1), 0, 1.0))
  with pytest.raises(BadLine, match=r"other\.jsonl: not the candidates of .*graded\.jsonl"):
    comparison_files.read(graded, {"x": other})
  with pytest.raises(BadLine, match=r"comparison\.json: .*benchmark"):
    comparison_files.process_bench(tmp_path / "comparison.json")


def test_scores_that_are_no_probabilities_rank_only(files, tmp_path):
  """Negative scores have no vote and no calibration, and scores above 1 no calibration."""
  graded, models = files
  by_model = {"<b>": lambda p: np.log(p / (1 - p)), "large": lambda p: 9 * p, "p": lambda p: p}
  scores = []
  for i, (name, change) in enumerate(by_model.items()):
    given = read_lines(models["people"])
    for line in given:
      line["orm_score"] = change(line.pop("rating_probs")[0]["1"])
    scores.append(f"{name}={write_lines(tmp_path / f'{i}.jsonl', given)}")
  flags = (f"--input={graded}", f"--output_dir={tmp_path}", "--scores", *scores)
  completed = call_script("compare.py", *flags)
  negative = "o vote by <b> and no calibration of it: some orm_score is negative; P(right) of a "
  assert f"compare.py: n{negative}" in completed.stderr
  assert "compare.py: no calibration of large: some orm_score is above 1" in completed.stderr
  methods = json.loads((tmp_path / "comparison.json").read_text())["methods"]
  assert {"vote by large", "vote by p"} < methods.keys() and "vote by <b>" not in methods
  assert methods["<b>"]["calibration"] is methods["large"]["calibration"] is None
  assert methods["p"]["calibration"]["ece"]["mean"][0] > 0
  for name in by_model:
    assert methods[name]["accuracy"] == methods["p"]["accuracy"]
  text = (tmp_path / "comparison.html").read_text()
  assert f"N{negative.replace('<b>', '&lt;b&gt;')}" in text and "<b>" not in text


def test_neutral_steps_count_as_wrong_if_asked(tmp_path):
  """--neutral=negative leaves P(neutral) out of ranks and page; a prm_score shows what was meant.

  Else the best score is that of the wrong solutions, whose steps are neutral.
  """
  line = {"problem": "p", "answer": "4", "is_correct": True, "steps": ["right"], "prm_score": 0.7}
  line["rating_probs"] = [{"-1": 0.3, "0": 0.0, "1": 0.7}]
  wrong = line | {"answer": "5", "is_correct": False, "steps": ["neutral"], "prm_score": 0.1}
  wrong["rating_probs"] = [{"-1": 0.1, "0": 0.8, "1": 0.1}]
  path = write_lines(tmp_path / "a.jsonl", [line, wrong, wrong])
  for neutral, picked in (("negative", 1), ("positive", 0)):
    out = tmp_path / neutral
    flags = (f"--input={path}", f"--output_dir={out}", "--scores", f"m={path}", f"m:min={path}")
    done = call_script("compare.py", *flags, f"--neutral={neutral}")
    found = json.loads((out / "comparison.json").read_text())
    assert found["neutral"] == neutral
    assert found["methods"]["m"]["accuracy"]["mean"][-1] == picked
    warning = f"warning: {path}:2: prm_score is 0.1, but the product of its step scores is 0.9"
    assert done.stderr.count(warning) == (neutral == "positive")
  (problem,) = shown_on((tmp_path / "negative/comparison.html").read_text())
  assert [[step["p"] for step in x["steps"]] for x in problem["solutions"]] == [[0.7], [0.1]]


def test_compare_py_refuses_its_outputs_before_the_work(tmp_path):
  """An output that cannot be written, or that is an input, is an error before a file is read."""
  bad = write_lines(tmp_path / "comparison.json", ["no candidate"])
  for folder, message in ((tmp_path, f"output {bad} is an input"), (bad / "x", "Not a directory")):
    completed = call_script("compare.py", f"--input={bad}", f"--output_dir={folder}", code=1)
    assert message in completed.stderr
    assert "JSON" not in completed.stderr


def process_bench(folder):
  """Returns a file of scored lines: two of three errors are found in gsm8k, none in math."""
  about = [("gsm8k", 0, 0.1), ("gsm8k", 0, 0.1), ("gsm8k", 0, 0.9), ("gsm8k", -1, 0.9)]
  about += [("math", 0, 0.9), ("math", -1, 0.9)]
  return write_lines(
    folder / "judged.jsonl",
    [
      {
        "id": f"{subset}-{i}",
        "problem": f"p{i}",
        "steps": ["a step"],
        "label": label,
        "final_answer_correct": label == -1,
        "rating_probs": [{"-1": 1 - p, "0": 0.0, "1": p}],
      }
      for i, (subset, label, p) in enumerate(about)
    ],
  )
