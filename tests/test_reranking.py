"""From a file of scored samples to the report: curves, figure, page and command line."""

import fractions
import functools
import itertools
import json
import pathlib

import numpy as np
import pytest
from scored_files import generated, ranked, rated, write, written

from prm_jax.evaluation import methods as methods_lib
from prm_jax.evaluation import report_figures, report_tables
from prm_jax.evaluation.methods import solution_scores
from prm_jax.evaluation.reranking import powers_of_two
from prm_jax.evaluation.sample_files import read_scored_samples
from prm_jax.evaluation.scored_samples import write_bundle

ROOT = pathlib.Path(__file__).resolve().parents[1]

# The figures of the row of openai/prm800k's scored-test-samples.jsonl that its README shows.
RELEASED = {
  "problem": "What is the resulting complex number?",
  "answer": "7i - 2",
  "is_correct": True,
  "subject": "Precalculus",
  "level": 2,
  "unique_id": "test/precalculus/779.json",
  "steps": ["I multiply by i.", "So I write it down.", "I get 7i - 2.", "# Answer\n\n7i - 2"],
  "rating_probs": [
    {"-1": 0.593068042770836, "1": 0.387681464904673, "0": 0.01925049232449113},
    {"1": 0.9101000509718192, "-1": 0.05710269249567796, "0": 0.0327972565325028},
    {"1": 0.9291714977657496, "-1": 0.04241488752473914, "0": 0.028413614709511318},
    {"-1": 0.7507610598005641, "1": 0.1384993425138924, "0": 0.11073959768554346},
  ],
  "orm_score": 0.6326445937156677,
  "prm_score": 0.09157553704097245,
  "ground_truth_answer": "-2+7i",
}


def without(record, key):
  return {k: v for k, v in record.items() if k != key}


def check_released_row(path):
  samples = read_scored_samples([path])
  report, scores = ranked(samples, methods=["prm_product"])
  assert np.exp(scores["prm_product"][0, 0]) == pytest.approx(0.09157553704097245, rel=1e-12)
  assert report["n"] == [1]
  assert report["curves"]["prm_product"]["accuracy"] == [1.0]
  (notice,) = report["notices"]
  assert notice.startswith("prm_score is the product of rating_probs on all 1 lines")
  strict = solution_scores(samples, neutral="negative")["prm_product"][0, 0]
  expected = np.prod([p["1"] for p in RELEASED["rating_probs"]])
  assert np.exp(strict) == pytest.approx(expected, rel=1e-12)


def test_released_figures(tmp_path):
  """The product of the released row's rating_probs is its prm_score to 1e-12."""
  check_released_row(write(tmp_path / "row.jsonl", [RELEASED]))


@pytest.mark.shared_data
def test_released_row(shared):
  """The released row itself, as upstream published it."""
  check_released_row(shared / "data/reranking/openai_scored_sample.jsonl")


def test_a_wrong_prm_score_is_a_warning_that_names_the_line(tmp_path):
  """A prm_score that contradicts its rating_probs is one notice, with the first such line."""
  records = [rated(prm_score=0.1), rated(prm_score=0.5)]
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
  (notice,) = ranked(samples, methods=["oracle"])[0]["notices"]
  assert "scored.jsonl:1: prm_score is 0.1" in notice
  assert "(2 such lines)" in notice


def test_curves_equal_counting(tmp_path):
  """Every curve equals the mean over all subsets of the candidates in the file."""
  records = list(generated())
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
  methods = ["oracle", "random", "all_correct", "majority", "weighted_orm", "weighted_mean_orm"]
  methods += ["orm", "prm_product", "prm_min", "prm_last", "prm_mean"]
  report, _ = ranked(samples, [1, 2, 3, 4], methods=methods, permutations=500)
  assert list(report["curves"]) == methods
  pools = {}
  for record in records:
    pools.setdefault(record["problem"], []).append(record)

  def curve(pick):
    return [
      np.mean(
        [
          np.mean([pick(subset) for subset in itertools.combinations(pool, n)])
          for pool in pools.values()
        ]
      )
      for n in (1, 2, 3, 4)
    ]

  def best(key):
    return curve(lambda subset: max(subset, key=key)["is_correct"])

  def vote(subset, value=len):
    by_answer = {}
    for r in subset:
      by_answer.setdefault(r["answer"], []).append(r["orm_score"])
    votes = {answer: value(scores) for answer, scores in by_answer.items()}
    return np.mean([answer == "3" for answer in votes if votes[answer] == max(votes.values())])

  expected = {
    "prm_product": best(lambda r: r["rating_probs"][1]["1"]),
    "prm_min": best(lambda r: r["rating_probs"][1]["1"]),
    "prm_last": best(lambda r: r["rating_probs"][1]["1"]),
    "prm_mean": best(lambda r: r["rating_probs"][1]["1"]),
    "orm": best(lambda r: r["orm_score"]),
    "oracle": curve(lambda subset: any(r["is_correct"] for r in subset)),
    "random": curve(lambda subset: np.mean([r["is_correct"] for r in subset])),
    "all_correct": curve(lambda subset: all(r["is_correct"] for r in subset)),
    "majority": curve(vote),
  }
  for name, values in expected.items():
    np.testing.assert_allclose(report["curves"][name]["accuracy"], values, atol=1e-7, err_msg=name)
  assert report["curves"]["majority"]["standard_error"] == [0, 0, 0, 0]
  for name, value in (("weighted_orm", sum), ("weighted_mean_orm", np.mean)):
    each = report["curves"][name]
    error = np.array(each["standard_error"])
    off = np.abs(np.array(each["accuracy"]) - curve(functools.partial(vote, value=value)))
    assert np.all(off <= 5 * error + 1e-9), name
    assert error[-1] == 0


@pytest.mark.shared_data
def test_real_samples_equal_counting(shared):
  """On real candidates every curve equals a count over all subsets, in exact fractions."""
  path = shared / "data/reranking/qwen25math_math100_bo8.jsonl"
  pools = [json.loads(line)["samples"] for line in path.read_text().splitlines()]
  report, _ = ranked(read_scored_samples([path]), range(1, 9))
  assert (report["problems"], report["candidates"]) == (35, 8)
  assert list(report["curves"]) == ["orm", "majority", "oracle", "random"]
  assert any("orm_score is negative" in notice for notice in report["notices"])

  def share(picks):  # tied picks are as likely as each other
    return fractions.Fraction(sum(s["is_correct"] for s in picks), len(picks))

  def best(subset):
    top = max(s["score"] for s in subset)
    return share([s for s in subset if s["score"] == top])

  def vote(subset):
    answers = [s["answer"] for s in subset]
    most = max(map(answers.count, answers))
    return share([subset[answers.index(a)] for a in set(answers) if answers.count(a) == most])

  def oracle(subset):
    return fractions.Fraction(any(s["is_correct"] for s in subset))

  for name, right in (("orm", best), ("majority", vote), ("oracle", oracle)):
    accuracy = report["curves"][name]["accuracy"]
    assert accuracy[-1] == pytest.approx(float(sum(map(right, pools)) / 35), abs=1e-12)
    for n in range(1, 8):
      counted = [[right(subset) for subset in itertools.combinations(p, n)] for p in pools]
      expected = sum(sum(each) / fractions.Fraction(len(each)) for each in counted) / 35
      assert accuracy[n - 1] == pytest.approx(float(expected), abs=1e-7), (name, n)


@pytest.mark.shared_data
def test_samples_without_steps(shared, tmp_path):
  """A file without step probabilities gets figure and page, without examples."""
  path = shared / "data/reranking/qwen25math_math100_bo8.jsonl"
  report, paths = written(read_scored_samples([path]), tmp_path)
  assert report["examples"] == []
  assert list(report["by_level"]) == [f"Level {i}" for i in range(1, 6)]
  page = paths[2].read_text()
  assert "By level, at N = 8" in page
  assert "Some solutions" not in page


def test_report_schema(tmp_path):
  """report.json has the keys and lengths that other tools rely on, and no NaN."""
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", generated())])
  _, paths = written(samples, tmp_path / "out")
  assert [p.name for p in paths] == ["report.json", "best_of_n.png", "report.html"]
  assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in paths)
  stored = json.loads(paths[0].read_text(), parse_constant=pytest.fail)
  assert (stored["problems"], stored["samples"], stored["n"]) == (6, 24, [1, 2, 4])
  prm = ["prm_product", "prm_min", "prm_mean", "prm_last", "prm_soft_min"]
  votes = ["majority", "weighted_prm_product", "weighted_orm"]
  assert list(stored["curves"]) == [*prm, "orm", *votes, "oracle", "random"]
  for curve in stored["curves"].values():
    for low, middle, high in zip(curve["low"], curve["accuracy"], curve["high"], strict=True):
      assert 0 <= low <= middle + 1e-9 <= high + 2e-9 <= 1 + 4e-9
  assert list(stored["paired"]) == ["prm_product - orm", "prm_product - majority", "orm - majority"]
  for pair in stored["paired"].values():
    assert len(pair["difference"]) == len(pair["low"]) == len(pair["high"]) == 3
  difference = stored["paired"]["prm_product - orm"]["difference"]
  curves = [np.array(stored["curves"][name]["accuracy"]) for name in ("prm_product", "orm")]
  np.testing.assert_allclose(difference, curves[0] - curves[1], atol=1e-9)
  assert list(stored["by_level"]) == ["1", "2"]
  mean = np.mean([g["curves"]["orm"]["accuracy"] for g in stored["by_level"].values()], axis=0)
  np.testing.assert_allclose(mean, curves[1], atol=1e-9)  # equally many problems at each level
  assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_methods_without_their_keys_are_absent(tmp_path):
  """A file without orm_score, answers or rating_probs gives the curves that need none of them."""
  bare = [rated(answer=..., orm_score=..., rating_probs=..., steps=...) for _ in range(2)]
  samples = read_scored_samples([write(tmp_path / "bare.jsonl", bare)])
  report, paths = written(samples, tmp_path)
  assert list(report["curves"]) == ["oracle", "random"]
  assert report["paired"] == {}
  page = paths[2].read_text()
  assert "Some solutions" not in page
  only_orm = [rated(rating_probs=..., orm=0.1 * i) for i in range(2)]
  samples = read_scored_samples([write(tmp_path / "orm.jsonl", only_orm)])
  assert list(ranked(samples)[0]["paired"]) == ["orm - majority"]


def test_chosen_methods(tmp_path):
  """Methods asked for are computed in their order; an impossible one is an error that says why."""
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", generated())])
  alone, _ = ranked(samples, methods=["weighted_prm_min", "orm"])
  assert list(alone["curves"]) == alone["drawn"] == ["weighted_prm_min", "orm"]
  assert list(alone["paired"]) == ["weighted_prm_min - orm"]  # the first and each other
  more, _ = ranked(samples, methods=["orm", "majority", "weighted_prm_min"])
  assert list(more["paired"]) == ["orm - majority", "orm - weighted_prm_min"]
  for name in alone["curves"]:  # whatever else is computed
    assert more["curves"][name]["accuracy"] == alone["curves"][name]["accuracy"]
  with pytest.raises(
    ValueError, match=r"prm_mni: unknown \(nearest: prm_min\); there are prm_product"
  ):
    ranked(samples, methods=["orm", "prm_mni"])
  logits = [rated(rating_probs=..., orm=-1.5), rated(rating_probs=..., orm=0.5)]
  samples = read_scored_samples([write(tmp_path / "logits.jsonl", logits)])
  report, _ = ranked(samples)
  assert list(report["curves"]) == ["orm", "majority", "oracle", "random"]
  assert "some orm_score is negative: no weighted vote by it" in report["notices"]
  with pytest.raises(ValueError, match=r'weighted_orm: an "orm_score" is negative, -1\.5'):
    ranked(samples, methods=["weighted_orm"])
  with pytest.raises(ValueError, match='the file has no "rating_probs"; there are orm, majority'):
    ranked(samples, methods=["prm_last"])
  unanswered = [rated(answer=...)]
  samples = read_scored_samples([write(tmp_path / "unanswered.jsonl", unanswered)])
  with pytest.raises(ValueError, match='majority: the file has no "answer"'):
    ranked(samples, methods=["majority"])


def test_breakdowns(tmp_path):
  """The curves of a breakdown's groups, weighted by size, average to the curve of all."""
  records = [r | {"subject": "AB"[r["level"] - 1]} for r in generated(problems=12)]
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
  options = {"methods": ["orm", "majority", "oracle"]}
  report, _ = ranked(samples, **options)
  sizes = {
    kind: [group["problems"] for group in report[f"by_{kind}"].values()]
    for kind in ("level", "subject", "difficulty")
  }
  assert sizes == {"level": [6, 6], "subject": [6, 6], "difficulty": [3, 3, 2, 2, 2]}
  for kind, weights in sizes.items():
    for name, curve in report["curves"].items():
      groups = [g["curves"][name]["accuracy"] for g in report[f"by_{kind}"].values()]
      mean = np.average(groups, axis=0, weights=weights)
      np.testing.assert_allclose(mean, curve["accuracy"], atol=1e-9)
  only, _ = ranked(samples, by=["subject"], **options)
  assert only["by_subject"] == report["by_subject"]
  assert only["by_level"] == only["by_difficulty"] == {}
  samples = read_scored_samples([write(tmp_path / "b.jsonl", [rated()])])
  with pytest.raises(ValueError, match="--by level: no candidate has a level; there are diff"):
    ranked(samples, by=["level"])


def test_difficulty(tmp_path):
  """Difficulty groups are fifths by share of right candidates; missing ones count as wrong."""
  right = [2, 0, 4, 3, 1, 2]
  records = [
    rated(f"Problem {p}", i < count, "3" if i < count else "4")
    for p, count in enumerate(right)
    for i in range(4 if p != 3 else 3)
  ]
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
  padded, _ = ranked(samples, methods=["orm", "random"])
  groups = padded["by_difficulty"]
  assert list(groups) == ["1", "2", "3", "4", "5"]
  # The first of five takes the sixth problem: 4 of 4, and 3 of 3, one of 4 lacking.
  assert [group["problems"] for group in groups.values()] == [2, 1, 1, 1, 1]
  rates = [group["pass_rate"] for group in groups.values()]
  assert rates == [[0.75, 1.0], [0.5, 0.5], [0.5, 0.5], [0.25, 0.25], [0.0, 0.0]]
  for group in groups.values():
    low, high = group["pass_rate"]
    assert low - 1e-9 <= group["curves"]["random"]["accuracy"][0] <= high + 1e-9
  assert groups["2"]["curves"]["orm"]["low"] == [None] * 3  # one problem has no spread
  own, _ = ranked(samples, pad_short=False, methods=["orm", "random"])
  assert own["by_difficulty"]["1"]["pass_rate"] == [1.0, 1.0]


@pytest.mark.parametrize("band", ["simultaneous", "generation"])
def test_bands(tmp_path, band):
  """The requested band is computed, and report, page and table name it."""
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", generated(12, 10))])
  some = {"n": [1, 2, 5, 10], "methods": ["orm", "majority", "oracle", "all_correct"]}
  pointwise, _ = ranked(samples, **some)
  report, paths = written(samples, tmp_path, band=band, **some)
  assert report["band"] == band
  assert report["interval"] in paths[2].read_text().replace("\n", " ")
  assert report["interval"] in report_tables.format_table(report)
  page = paths[2].read_text().replace("\n", " ")
  if band == "simultaneous":
    for each in report["paired"].values():
      reach = each["critical_value"] * np.array(each["problem_standard_error"])
      np.testing.assert_allclose(each["high"], np.array(each["difference"]) + reach, atol=1e-9)
    assert report["paired_interval"] == report["interval"]
    assert "established at every N where its band leaves out 0" in page
    one = read_scored_samples([write(tmp_path / "one.jsonl", [rated()])])
    with pytest.raises(ValueError, match="--band simultaneous takes at least 2 problems"):
      ranked(one, band=band)
  else:
    assert report["paired"] == pointwise["paired"]
    assert "established at an N where its interval leaves out 0, at that N alone" in page
  for name, curve in report["curves"].items():
    there = [low is not None for low in curve["low"]]
    assert there == [high is not None for high in curve["high"]]
    if band == "simultaneous":
      assert all(there)
      reach = curve["critical_value"] * np.array(curve["problem_standard_error"])
      expected = np.minimum(np.array(curve["accuracy"]) + reach, 1)
      np.testing.assert_allclose(curve["high"], expected, atol=1e-9)
    else:  # the jackknife can say nothing of votes, or where half of the candidates are drawn
      assert there == [name in ("orm", "oracle")] * 2 + [False, False]


def test_noise_of_votes(tmp_path):
  """Curves, groups and differences have the Monte-Carlo error of sampled votes, exact ones none.

  Independent problems: the square of the mean's error is that of the groups', weighted.
  """
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", generated(12, 10))])
  methods = ["orm", "majority", "weighted_orm", "weighted_mean_orm"]
  report, _ = ranked(samples, [1, 3, 10], methods=methods, by=["level"])
  curves, paired = report["curves"], report["paired"]
  noise = {name: np.array(curves[name]["standard_error"]) for name in methods[1:]}
  assert noise["weighted_orm"][1] > 0 and not noise["majority"].any()
  assert "standard_error" not in curves["orm"] and "standard_error" not in paired["orm - majority"]
  assert paired["orm - weighted_orm"]["standard_error"] == noise["weighted_orm"].tolist()
  groups = [g["curves"]["weighted_orm"]["standard_error"] for g in report["by_level"].values()]
  both = np.sqrt(np.square(groups).sum(axis=0)) / 2  # six problems each
  np.testing.assert_allclose(both, noise["weighted_orm"], atol=1e-12)
  other, _ = ranked(samples, [1, 3, 10], methods=methods[:1:-1], by=["level"])
  error = other["paired"]["weighted_mean_orm - weighted_orm"]["standard_error"]
  expected = np.hypot(noise["weighted_orm"], noise["weighted_mean_orm"])
  np.testing.assert_allclose(error, expected, atol=1e-12)


def test_more_methods_than_styles(tmp_path):
  """A figure draws at most eight methods; a notice names the others, and tables have all."""
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", generated())])
  methods = ["oracle", "random", *methods_lib.RANKED, "all_correct", "majority"]
  report, paths = written(samples, tmp_path, methods=methods)
  assert report["drawn"] == methods[:8] and list(report["curves"]) == methods
  (notice,) = [each for each in report["notices"] if "the figures show" in each]
  assert notice.endswith("the first 8 methods, without all_correct, majority")
  assert notice in paths[2].read_text()
  assert len(set(report_figures._styles(report).values())) == 8


def test_every_n(tmp_path):
  """--n all gives exact curves at every N and only the votes named; tables show some N."""
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", generated(5, 50))])
  chosen, (notice,) = methods_lib.choose(samples, [], every_n=True)
  assert set(chosen) == set(methods_lib.STANDARD) - set(methods_lib.VOTES)
  assert "name them in --methods" in notice
  methods = ["orm", "majority"]
  report, paths = written(samples, tmp_path, n=["all"], methods=methods)
  assert report["n"] == list(range(1, 51))
  some, _ = ranked(samples, [3, 17], methods=methods)
  for name, curve in report["curves"].items():
    assert len(curve["low"]) == 50
    picked = [curve["accuracy"][2], curve["accuracy"][16]]
    np.testing.assert_allclose(picked, some["curves"][name]["accuracy"], atol=1e-7)
  header = report_tables.format_table(report).splitlines()[3].split()
  assert header == ["N", "1", "2", "4", "8", "16", "32", "50"]
  assert paths[2].read_text().count("<th>32</th>") == 2
  assert report_tables.shown([10, 20]) == [0, 1]
  assert report_tables.shown(range(10, 310, 10)) == [0, 1, 3, 6, 12, 25, 29]


def test_bundle_without_its_sources(tmp_path):
  """A bundle gives the same curves; without its sources a notice replaces the examples."""
  path = write(tmp_path / "scored.jsonl", generated())
  samples = read_scored_samples([path])
  write_bundle(samples, tmp_path / "bundle")
  again = read_scored_samples([tmp_path / "bundle"])
  whole, _ = ranked(samples, methods=["orm", "prm_product"])
  path.unlink()
  report, _ = written(again, tmp_path / "out", methods=["orm", "prm_product"])
  assert report["curves"] == whole["curves"]
  assert report["examples"] == []
  assert f"no solutions to show: {path}: " in report["notices"][-1]


def test_missing_candidates(tmp_path):
  """A candidate without an answer is never chosen; pad_short says how lacking ones count."""
  records = [
    rated("A", right=False, answer=None, score=0.99),
    rated("A", score=0.1),
    rated("B", score=0.5),
  ]
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
  padded, _ = ranked(samples, methods=["prm_product"])
  assert padded["curves"]["prm_product"]["accuracy"] == [0.5, 1.0]
  assert len(padded["notices"]) == 2
  own, _ = ranked(samples, pad_short=False, methods=["prm_product"])
  assert own["curves"]["prm_product"]["accuracy"] == [0.75, 1.0]


def test_default_n():
  """Powers of two up to M, and M itself."""
  assert powers_of_two(1) == [1]
  assert powers_of_two(8) == [1, 2, 4, 8]
  assert powers_of_two(1860)[-3:] == [512, 1024, 1860]
