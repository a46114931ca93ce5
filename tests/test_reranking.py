"""Reports of best-of-N: curves against counting, methods, breakdowns, bands, odd data."""

import fractions
import functools
import itertools
import json
import math
import re

import numpy as np
import pytest
from scored_files import bundled, generated, ranked, rated, samples_of, shown_on, written

from prm_jax.evaluation import methods as methods_lib
from prm_jax.evaluation import page, report_figure, report_table
from prm_jax.evaluation.reranking import Options
from prm_jax.evaluation.scored_samples import read_scored_samples

SOME = {"methods": ["prm_product", "orm"]}  # for tests of any methods: votes take long


@pytest.mark.shared_data
def test_prm_score_of_a_released_row(shared):
  """The product of a released row's rating_probs is its prm_score to 1e-12."""
  path = shared / "data/reranking/openai_scored_sample.jsonl"
  row = json.loads(path.read_text())
  samples = read_scored_samples([path])
  report, scores = ranked(samples, methods=["prm_product"])
  assert np.exp(scores["prm_product"][0, 0]) == pytest.approx(row["prm_score"], rel=1e-12)
  assert report["n"] == [1] and report["curves"]["prm_product"]["accuracy"] == [1.0]
  (notice,) = report["notices"]
  assert notice.startswith("prm_score is the product of the step scores on all 1 lines")
  strict = methods_lib.solution_scores(samples, neutral="negative")["prm_product"][0, 0]
  expected = np.prod([p["1"] for p in row["rating_probs"]])
  assert np.exp(strict) == pytest.approx(expected, rel=1e-12)


def test_a_wrong_prm_score_is_a_warning_that_names_the_line(tmp_path):
  """Scores that contradict their rating_probs give one notice, which names the first line."""
  records = [rated(prm_score=0.1), rated(prm_score=0.5)]
  samples = samples_of(tmp_path / "scored.jsonl", records)
  (notice,) = ranked(samples, methods=["oracle"])[0]["notices"]
  assert "scored.jsonl:1: prm_score is 0.1" in notice
  assert "(2 such lines)" in notice


def test_equal_answers_graded_differently_are_a_warning_that_names_both(tmp_path):
  """One answer to a problem graded right and wrong gives a notice; to two problems it does not."""
  same = {"answer": "3", "finished": True}
  rows = [rated("p", False, "4"), rated("p", False, **same), rated("p", True, **same)]
  rows += [rated("q", True, "4")]
  samples = samples_of(tmp_path / "scored.jsonl", rows)
  *_, notice = ranked(samples, methods=["oracle"])[0]["notices"]
  assert "scored.jsonl:3 and" in notice and "scored.jsonl:2 are equal" in notice
  assert "(1 such answers)" in notice
  rows[1]["finished"] = False  # a candidate without an answer
  samples = samples_of(tmp_path / "scored.jsonl", rows)
  assert not any("are equal" in x for x in ranked(samples, methods=["oracle"])[0]["notices"])


def test_curves_equal_counting(tmp_path):
  """Every curve equals the mean over all subsets of N candidates of a problem."""
  records = list(generated())
  samples = samples_of(tmp_path / "scored.jsonl", records)
  methods = ["oracle", "random", "all_correct", "majority", "weighted_orm", "weighted_mean_orm"]
  methods += ["orm", "prm_product", "prm_min", "prm_last", "prm_mean"]
  report, _ = ranked(samples, [1, 2, 3, 4], methods=methods, permutations=500)
  assert list(report["curves"]) == methods
  pools = {}
  for record in records:
    pools.setdefault(record["problem"], []).append(record)

  def curve(pick):
    shares = lambda n: [
      np.mean([pick(subset) for subset in itertools.combinations(pool, n)])
      for pool in pools.values()
    ]
    return [np.mean(shares(n)) for n in (1, 2, 3, 4)]

  def best(key):
    return curve(lambda subset: max(subset, key=key)["is_correct"])

  def vote(subset, value=len):
    by_answer = {}
    for r in subset:
      by_answer.setdefault(r["answer"], []).append(r["orm_score"])
    votes = {answer: value(scores) for answer, scores in by_answer.items()}
    return np.mean([answer == "3" for answer in votes if votes[answer] == max(votes.values())])

  last = best(lambda r: r["rating_probs"][1]["1"])  # the first step is the same in all
  expected = {
    **dict.fromkeys(["prm_product", "prm_min", "prm_last", "prm_mean"], last),
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
  """On real candidates every curve equals a count over all subsets in exact fractions."""
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


def test_a_report_has_the_keys_that_other_tools_rely_on(tmp_path):
  """report.json has the keys and lengths that other tools rely on, and no NaN."""
  _, paths = written(samples_of(tmp_path / "scored.jsonl", generated()), tmp_path / "out")
  assert [p.name for p in paths] == ["report.json", "best_of_n.png", "report.html"]
  assert sorted(paths) == sorted((tmp_path / "out").iterdir())
  assert paths[1].read_bytes().startswith(b"\x89PNG")
  stored = json.loads(paths[0].read_text(), parse_constant=pytest.fail)
  assert (stored["problems"], stored["samples"], stored["n"]) == (6, 24, [1, 2, 4])
  assert list(stored["curves"]) == methods_lib.standard()
  for curve in stored["curves"].values():
    for low, middle, high in zip(curve["low"], curve["accuracy"], curve["high"], strict=True):
      assert 0 <= low <= middle + 1e-9 <= high + 2e-9 <= 1 + 4e-9
  assert list(stored["paired"]) == ["prm_product - orm", "prm_product - majority", "orm - majority"]
  for name, pair in stored["paired"].items():
    a, b = (np.array(stored["curves"][each]["accuracy"]) for each in name.split(" - "))
    np.testing.assert_allclose(pair["difference"], a - b, atol=1e-9)
    assert len(pair["low"]) == len(pair["high"]) == 3


def test_methods_keep_their_order_and_values(tmp_path):
  """Methods keep the order of --methods and their values; an unknown method is an error."""
  samples = samples_of(tmp_path / "scored.jsonl", generated())
  alone, _ = ranked(samples, methods=["weighted_prm_min", "orm"])
  assert list(alone["curves"]) == alone["drawn"] == ["weighted_prm_min", "orm"]
  assert list(alone["paired"]) == ["weighted_prm_min - orm"]  # the first and each other
  more, _ = ranked(samples, methods=["orm", "majority", "weighted_prm_min"])
  assert list(more["paired"]) == ["orm - majority", "orm - weighted_prm_min"]
  for name in alone["curves"]:
    assert more["curves"][name]["accuracy"] == alone["curves"][name]["accuracy"]
  with pytest.raises(ValueError, match="prm_mni: unknown; there are prm_product, prm_min"):
    ranked(samples, methods=["orm", "prm_mni"])


@pytest.mark.parametrize(
  ("keys", "standard", "name", "message"),
  [
    ({"answer": ..., "orm_score": ..., "rating_probs": ...}, [], "majority", 'has no "answer"'),
    ({"rating_probs": ...}, ["orm", "majority", "weighted_orm"], "prm_last", 'no "rating_probs"'),
    ({"rating_probs": ..., "orm": -1.5}, ["orm", "majority"], "weighted_orm", r"negative, -1\.5"),
  ],
)
def test_a_method_whose_keys_a_file_lacks_is_left_out(tmp_path, keys, standard, name, message):
  """A method whose keys the file lacks is left out, and an error if --methods names it."""
  samples = samples_of(tmp_path / "scored.jsonl", [rated(**keys), rated(**keys)])
  report, paths = written(samples, tmp_path)
  assert list(report["curves"]) == [*standard, "oracle", "random"]
  assert list(report["paired"]) == ["orm - majority"] * ("orm" in standard)
  (problem,) = shown_on(paths[2].read_text())  # without probabilities
  assert len(problem["solutions"]) == 2
  assert not any(step["p"] for each in problem["solutions"] for step in each["steps"])
  with pytest.raises(ValueError, match=f"{name}: .*{message}"):
    ranked(samples, methods=[name])


def test_groups_average_to_all_problems(tmp_path):
  """The curves of a breakdown's groups, weighted by size, average to the curve of all problems."""
  records = [r | {"subject": "AB"[r["level"] - 1]} for r in generated(problems=12)]
  samples = samples_of(tmp_path / "scored.jsonl", records)
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
  with pytest.raises(ValueError, match="--by level: no candidate has a level; there are diff"):
    ranked(samples_of(tmp_path / "b.jsonl", [rated()]), by=["level"])


def test_groups_of_difficulty_are_fifths_by_the_share_of_right_candidates(tmp_path):
  """Groups of difficulty are fifths by share of right candidates; cut-off ones count as wrong."""
  right = [2, 0, 4, 3, 1, 2]
  records = [
    rated(f"Problem {p}", i < count, "3" if i < count else "4")
    for p, count in enumerate(right)
    for i in range(4 if p != 3 else 3)
  ]
  samples = samples_of(tmp_path / "scored.jsonl", records)
  padded, _ = ranked(samples, pad_short=True, methods=["orm", "random"])
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
  own, _ = ranked(samples, methods=["orm", "random"])
  assert own["by_difficulty"]["1"]["pass_rate"] == [1.0, 1.0]


@pytest.mark.parametrize("band", ["simultaneous", "generation"])
def test_each_band_is_computed_and_named(tmp_path, band):
  """The band of --band is computed, and report, page and table name it."""
  samples = samples_of(tmp_path / "scored.jsonl", generated(12, 10))
  some = {"n": [1, 2, 5, 10], "methods": ["orm", "majority", "oracle", "all_correct"]}
  report, paths = written(samples, tmp_path, band=band, **some)
  assert report["interval"] in report_table.format_table(report)
  page = paths[2].read_text().replace("\n", " ")
  assert report["interval"] in page and report["paired_interval"] in page
  if band == "simultaneous":
    assert report["paired_interval"] == report["interval"]
    for curve in [*report["curves"].values(), *report["paired"].values()]:
      reach = curve["critical_value"] * np.array(curve["problem_standard_error"])
      high = np.array(curve.get("difference") or curve["accuracy"]) + reach
      np.testing.assert_allclose(np.minimum(curve["high"], 1), np.minimum(high, 1), atol=1e-9)
    with pytest.raises(ValueError, match="--band simultaneous needs at least 2 problems"):
      ranked(samples_of(tmp_path / "one.jsonl", [rated()]), band=band)
  else:
    assert report["paired"] == ranked(samples, **some)[0]["paired"]
    for name, curve in report["curves"].items():
      # The jackknife can say nothing of votes, or where half of the candidates are drawn.
      bounded = [name in ("orm", "oracle")] * 2 + [False, False]
      for key in ("low", "high"):
        assert [bound is not None for bound in curve[key]] == bounded


def test_sampled_votes_have_a_standard_error(tmp_path):
  """Curves, groups and differences have the Monte-Carlo error of sampled votes."""
  samples = samples_of(tmp_path / "scored.jsonl", generated(12, 10))
  methods = ["weighted_mean_orm", "orm", "majority", "weighted_orm"]
  report, _ = ranked(samples, [1, 3, 10], methods=methods, by=["level"])
  curves, paired = report["curves"], report["paired"]
  noise = {name: np.array(curves[name]["standard_error"]) for name in methods if name != "orm"}
  assert noise["weighted_orm"][1] > 0 and not noise["majority"].any()
  assert "standard_error" not in curves["orm"]
  for name in ("majority", "weighted_orm"):
    error = paired[f"weighted_mean_orm - {name}"]["standard_error"]
    both = np.hypot(noise["weighted_mean_orm"], noise[name])
    np.testing.assert_allclose(error, both, atol=1e-12)
  groups = [g["curves"]["weighted_orm"]["standard_error"] for g in report["by_level"].values()]
  both = np.sqrt(np.square(groups).sum(axis=0)) / 2  # six problems each
  np.testing.assert_allclose(both, noise["weighted_orm"], atol=1e-12)


def test_a_figure_draws_at_most_eight_methods(tmp_path):
  """Of many methods a figure draws eight, each in its own style, and a notice names the others."""
  samples = samples_of(tmp_path / "scored.jsonl", generated())
  methods = ["oracle", "random", *methods_lib.RANKED, "all_correct", "majority"]
  report, paths = written(samples, tmp_path, methods=methods)
  assert report["drawn"] == methods[:8] and list(report["curves"]) == methods
  (notice,) = [each for each in report["notices"] if "the figures show" in each]
  assert notice.endswith(f"the first 8 methods, without {', '.join(methods[8:])}")
  assert notice.removeprefix("the") in paths[2].read_text()
  (axes,) = report_figure.draw_curves(report).axes
  assert len({(line.get_color(), line.get_marker()) for line in axes.get_lines()}) == 8


@pytest.mark.parametrize(
  "wrong", [{"n": (0,)}, {"n": ("all", 2)}, {"seed": 2**70}, {"resamples": 0}, {"permutations": 1}]
)
def test_options_out_of_range_are_errors_before_the_work(wrong):
  """An option out of range is an error that shows its value, before a file is read."""
  ((key, value),) = wrong.items()
  with pytest.raises(ValueError, match=re.escape(f"options.{key}={value}: ")):
    Options(**wrong)


def test_n_all_gives_every_n_without_votes_that_are_not_named(tmp_path):
  """`--n all` gives every N, without votes that --methods does not name; tables show some N."""
  samples = samples_of(tmp_path / "scored.jsonl", generated(5, 50))
  scores = methods_lib.solution_scores(samples)
  chosen, (notice,) = methods_lib.choose(samples, scores, [], every_n=True)
  assert [*chosen] == [*methods_lib.RANKED, "oracle", "random"]
  assert "name them in --methods" in notice
  methods = ["orm", "majority"]
  report, paths = written(samples, tmp_path, n=["all"], methods=methods)
  assert report["n"] == list(range(1, 51))
  some, _ = ranked(samples, [3, 17], methods=methods)
  for name, curve in report["curves"].items():
    assert len(curve["low"]) == 50
    picked = [curve["accuracy"][2], curve["accuracy"][16]]
    np.testing.assert_allclose(picked, some["curves"][name]["accuracy"], atol=1e-7)
  header = report_table.format_table(report).splitlines()[3].split()
  assert header == ["N", "1", "2", "4", "8", "16", "32", "50"]
  assert paths[2].read_text().count("<th>32</th>") == 2
  assert report_table.shown([10, 20]) == [0, 1]
  assert report_table.shown(range(10, 310, 10)) == [0, 1, 3, 6, 12, 25, 29]


def test_a_bundle_without_its_sources(tmp_path):
  """A bundle gives the curves of its sources; if they are gone, a notice replaces solutions."""
  path = tmp_path / "scored.jsonl"
  bundled(samples_of(path, generated()), tmp_path / "bundle")
  whole, _ = ranked(read_scored_samples([path]), methods=["orm", "prm_product"])
  path.unlink()
  again = read_scored_samples([tmp_path / "bundle"])
  report, paths = written(again, tmp_path / "out", methods=["orm", "prm_product"])
  assert report["curves"] == whole["curves"] and not shown_on(paths[-1].read_text())
  assert f"no solutions to show: {path}: " in report["notices"][-1]


@pytest.mark.parametrize("missing", [None, "", " "])
def test_candidates_without_an_answer_are_never_chosen(tmp_path, missing):
  """A candidate without an answer is drawn but never chosen, and pad_short counts absent ones."""
  records = [rated("A", right=False, answer=missing, score=0.99), rated("A", score=0.1), rated("B")]
  samples = samples_of(tmp_path / "scored.jsonl", records)
  for pad_short, expected in ((True, [0.5, 1.0]), (False, [0.75, 1.0])):
    report, _ = ranked(samples, pad_short=pad_short, methods=["prm_product"])
    assert report["curves"]["prm_product"]["accuracy"] == expected
    assert len(report["notices"]) == 2


def test_equal_shares_print_alike(tmp_path):
  """At N = 1 votes, scores and the oracle solve the same share, to the last digit."""
  records = [
    rated(f"Problem {p}", right, "3" if right else str(4 + i % 3), score=(i + 1) / 9)
    for p in range(20)
    for i in range(8)
    for right in [(p + i * p) % 20 < 9]
  ]
  report, _ = ranked(samples_of(tmp_path / "scored.jsonl", records))
  first = {each["accuracy"][0] for name, each in report["curves"].items() if "weighted" not in name}
  assert first == {sum(each["is_correct"] for each in records) / len(records)}


def test_a_notice_says_why_there_are_no_votes(tmp_path):
  """Without any `answer` there are no votes, and the table says so in a sentence."""
  records = [{key: value for key, value in rated().items() if key != "answer"}] * 2
  report, _ = ranked(samples_of(tmp_path / "scored.jsonl", records))
  assert "majority" not in report["curves"]
  assert '\nNo candidate has "answer": no votes.' in report_table.format_table(report)


def solved(report, name="random"):
  """Returns the accuracy of a method at each N."""
  return report["curves"][name]["accuracy"]


def test_a_text_of_several_problems_is_suspected(tmp_path):
  """If a problem's text has twice the usual candidates, a notice recommends unique_id."""
  records = [rated(text) for text in ("A", "B", "B", "C") for _ in range(3)]
  report, _ = ranked(samples_of(tmp_path / "a.jsonl", records), methods=["random"])
  assert "one problem text stands for several problems" in report["notices"][0]
  assert "give each its unique_id" in report["notices"][0]


def test_absent_candidates_are_wrong_only_if_the_file_says_so(tmp_path):
  """Absent candidates do not count, unless `drawn` says that they were generated and cut off."""
  records = [rated("A"), *(rated("B", right=i < 2, level="2") for i in range(4))]
  rank = functools.partial(ranked, methods=["random"])
  report, _ = rank(samples_of(tmp_path / "a.jsonl", records), n=[1, 4])
  assert solved(report) == pytest.approx([3 / 4, 3 / 4])
  assert "N counts those that exist, and a larger N draws all" in report["notices"][0]
  assert "give each its unique_id" not in report["notices"][0]
  counted = [r | {"drawn": 4} for r in records]
  report, _ = rank(samples_of(tmp_path / "b.jsonl", counted), n=[1, 4])
  assert solved(report) == pytest.approx([(1 / 4 + 1 / 2) / 2, (1 + 1 / 2) / 2])
  assert '3 more were generated and cut off, as "drawn" or OpenAI' in report["notices"][0]
  more = [r | {"drawn": 8} for r in records]
  report, _ = ranked(samples_of(tmp_path / "c.jsonl", more), methods=["oracle"])
  assert report["n"] == [1, 2, 4, 8]
  again = read_scored_samples([bundled(samples_of(tmp_path / "c.jsonl", more), tmp_path / "d")])
  assert ranked(again, methods=["oracle"])[0]["curves"] == report["curves"]


def test_openais_release_counts_1860_solutions(tmp_path):
  """A problem of OpenAI's release, known by its ids, counts 1,860 solutions; others do not."""
  keys = {"rating_probs": ..., "steps": []}
  record = {k: v for k, v in rated("A", unique_id="test/algebra/1.json").items() if k not in keys}
  rank = functools.partial(ranked, n=[1], methods=["random"])
  records = [record] * 1860 + [record | {"problem": "B", "unique_id": "test/algebra/2.json"}]
  report, _ = rank(samples_of(tmp_path / "a.jsonl", records))
  assert solved(report) == pytest.approx([(1 + 1 / 1860) / 2])
  others = [r | {"unique_id": r["unique_id"].removesuffix(".json")} for r in records]
  report, _ = rank(samples_of(tmp_path / "b.jsonl", others))
  assert solved(report) == pytest.approx([1])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_scores_that_differ_by_rounding_tie(tmp_path, order):
  """Scores that are equal in exact arithmetic tie, although float sums and products differ."""
  pairs = [(0.7, 0.2), (0.9, 0.0), (0.3, 0.6)]
  records = []
  for i, which in enumerate(order):
    steps = [{"-1": 0.1, "0": zero, "1": one} for zero, one in (pairs[which], pairs[which - 1])]
    records.append(rated("A", i == 0, "3" if i == 0 else "4", steps=["a", "b"], rating_probs=steps))
  methods = sorted(methods_lib.OF_STEPS)
  report, _ = ranked(samples_of(tmp_path / "a.jsonl", records), n=[3], methods=methods)
  for name in methods:
    assert report["curves"][name]["accuracy"] == pytest.approx([1 / 3]), name


def test_a_large_mostly_empty_table_is_refused(tmp_path, monkeypatch):
  """A table of mostly absent candidates is an error, not an allocation of much memory."""
  monkeypatch.setattr("prm_jax.evaluation.candidate_table.MAX_SLOTS", 100)
  records = [rated(f"P{i}") for i in range(30)] + [rated("Q")] * 15
  with pytest.raises(ValueError, match=r"a.jsonl: 31 problems with up to 15 candidates, but 45 in"):
    samples_of(tmp_path / "a.jsonl", records)
  assert len(samples_of(tmp_path / "b.jsonl", records[:10]).problems) == 10
  with pytest.raises(ValueError, match=r'"drawn" is 1000000000000: expected int <= 2147483647'):
    samples_of(tmp_path / "d.jsonl", [rated(drawn=10**12)])
  with pytest.raises(ValueError, match="up to 1,000,000,000 candidates"):
    samples_of(tmp_path / "c.jsonl", [rated(drawn=10**9)])


def test_any_text_is_a_level_or_subject(tmp_path):
  """Levels and subjects may be any text, and the page shows no control characters."""
  odd = ["cm²", "x" * 5000 + "9" * 5000, "a\x00", "\u202e1 leveL", "٣", "", "=1+1"]
  records = [rated(f"P{i}", level=text, subject=text) for i, text in enumerate(odd)]
  records.append(rated("Q", level="2"))
  report, paths = written(samples_of(tmp_path / "a.jsonl", records), tmp_path / "out", **SOME)
  assert len(report["by_subject"]) >= len(odd) - 1
  text = paths[-1].read_text()
  assert not {*text, *json.dumps(shown_on(text), ensure_ascii=False)} & {*map(chr, page.SEEN)}


def test_any_json_is_a_right_answer(tmp_path):
  """The page shows a right answer of any JSON type as text, and report.json stays JSON."""
  truths = [math.nan, {"a": [1]}, 10**30, True, "\x00\u2067"]
  records = []
  for i, truth in enumerate(truths):
    records += [rated(f"P{i}", ground_truth_answer=truth)]
    records += [rated(f"P{i}", right=False, ground_truth_answer=truth)]
  _, paths = written(samples_of(tmp_path / "a.jsonl", records), tmp_path / "out", **SOME)
  shown = [problem["truth"] for problem in shown_on(paths[-1].read_text())]
  assert shown == [[str(truth).translate(page.SEEN)] for truth in truths]
  json.loads(paths[0].read_text(), parse_constant=pytest.fail)


def test_huge_scores_are_ranked_and_weigh_votes(tmp_path):
  """Scores near the limits of float64 are ranked, weigh votes and are shown."""
  records = [rated("A", False, "4", orm=-1e308), rated("A", orm=1e308), rated("A", orm=0.0)]
  report, _ = written(samples_of(tmp_path / "a.jsonl", records), tmp_path / "out", n=[3])
  assert solved(report, "orm") == [1.0]
