"""compare.py: each figure is its definition, and solutions are those on which methods disagree."""

import json
import re

import numpy as np
import pytest
from conftest import call_script

from prm_jax.evaluation.candidate_table import SCORES
from prm_jax.experiments import comparison
from prm_jax.runtime.json_lines import BadLine

P, M = 12, 6


def lines(seed=0):
  """Graded candidates: of some problems all are right or wrong, and some are cut off."""
  rng, out = np.random.default_rng(seed), []
  for p in range(P):
    share = rng.choice([0.0, 0.3, 0.6, 1.0])
    for m in range(M):
      right, finished = bool(rng.random() < share), bool(rng.random() < 0.85)
      answer = "4" if right else str(rng.integers(5, 7))
      out.append(
        {
          "problem": f"p{p}",
          "steps": [f"step {m}", f"answer {answer}"],
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
  """The lines with probabilities that tell right from wrong so well."""
  rng = np.random.default_rng(seed)
  for line in given:
    p = [float(1 / (1 + np.exp(-rng.normal(strength * line["is_correct"])))) for _ in range(2)]
    yield line | {"rating_probs": [{"-1": 1 - x, "0": 0.0, "1": x} for x in p]}


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder, given = tmp_path_factory.mktemp("compare"), lines()
  strengths = {"people": 3.0, "people/2": 1.5, "people/4": 0.5, "other": 0.0}
  named = {
    name: write(folder / f"{i}.jsonl", scored(given, i, strength))
    for i, (name, strength) in enumerate(strengths.items())
  }
  return write(folder / "graded.jsonl", given), named


@pytest.fixture(scope="module")
def of(files):
  return comparison.read(*files)


def of_problem(p):
  return [line for line in lines() if line["problem"] == f"p{p}"]


def test_auc_is_of_pairs_within_a_problem(of, files):
  """Of a right and a wrong candidate of a problem, both with an answer, which is scored higher."""
  found = comparison.within_problems(
    of.scores["log-probability"], of.samples.correct, of.samples.valid
  )
  for p in range(P):
    there = [line for line in of_problem(p) if line["finished"]]
    pairs = [
      (a["logprob"] > b["logprob"]) + (a["logprob"] == b["logprob"]) / 2
      for a in there
      for b in there
      if a["is_correct"] and not b["is_correct"]
    ]
    assert found[p] == pytest.approx(np.mean(pairs), nan_ok=True) if pairs else np.isnan(found[p])


def test_the_best_of_all_is_the_best_finished_one(of):
  """At N = M a scorer's pick is its best candidate with an answer, ties shared; cut ones never."""
  found = comparison.solved(of, [1, M])
  for p in range(P):
    there = [line for line in of_problem(p) if line["finished"]]
    shortest = min((line["tokens"] for line in there), default=None)
    best = [line["is_correct"] for line in there if line["tokens"] == shortest]
    assert found["shortest"][p, -1] == pytest.approx(np.mean(best) if best else 0)
    assert found["oracle"][p, -1] == any(line["is_correct"] for line in there)
    right = np.mean([line["is_correct"] for line in of_problem(p)])
    for name, curve in found.items():
      assert curve[p, 0] == pytest.approx(right, abs=1e-9), name


def test_what_was_cut_off_needs_no_scores(of, files, tmp_path):
  """Without the scores of candidates that are never chosen, every number is the same."""
  graded, models = files
  fewer = {}
  for name, file in models.items():
    given = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [x if x["finished"] else {k: v for k, v in x.items() if k not in SCORES} for x in given]
    assert kept != given
    fewer[name] = write(tmp_path / f"{len(fewer)}.jsonl", kept)
  assert comparison.compare(comparison.read(graded, fewer)) == comparison.compare(of)


def test_votes_weigh_by_the_reduction_that_ranks(files):
  """A model's weights are its scores as probabilities, whichever reduction gives them."""
  graded, models = files
  by = {how: comparison.read(graded, models, how) for how in ("product", "soft_min")}
  for how, of in by.items():
    np.testing.assert_allclose(of.models["people"], np.exp(of.scores["people"]), err_msg=how)
  assert not np.allclose(by["product"].models["people"], by["soft_min"].models["people"])


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
  assert comparison.parts(name) == expected


def test_one_model_by_two_reductions_against_any_method(files, tmp_path):
  """NAME:REDUCTION is the model by that reduction, and differences from any method are there."""
  graded, models = files
  named = {"other": models["other"], "other:min": models["other"]}
  of = comparison.read(graded, named)
  by_min = comparison.read(graded, models, "min")
  np.testing.assert_array_equal(of.scores["other:min"], by_min.scores["other"])
  found = comparison.compare(of, against=["other:min"])["methods"]
  product, minimum = (found[name]["accuracy"]["mean"] for name in named)
  minus = found["other"]["minus"]["other:min"]["mean"]
  assert product != minimum and minus == pytest.approx(np.subtract(product, minimum))
  with pytest.raises(ValueError, match=r"--against nobody: no such method; .*other:min"):
    comparison.compare(of, against=["nobody"])
  with pytest.raises(ValueError, match="people:most: no reduction 'most'; there are product"):
    comparison.read(graded, {"people:most": models["people"]})
  outcome = [json.loads(line) for line in models["people"].read_text().splitlines()]
  for line in outcome:
    line["orm_score"] = line.pop("rating_probs")[0]["1"]
  file = write(tmp_path / "outcome.jsonl", outcome)
  assert "outcome" in comparison.read(graded, {"outcome": file}).models
  with pytest.raises(BadLine, match=r"outcome\.jsonl: no rating_probs, for outcome:min"):
    comparison.read(graded, {"outcome:min": file})


def test_length_is_of_the_candidates_that_can_be_chosen(of):
  """The rank correlation of scores and steps, and the mean steps of picks with shared ties."""
  scores, steps = np.array([[3.0, 2, 2, 9], [1, 1, 0, 5]]), np.array([[1.0, 2, 4, 1], [6, 8, 9, 1]])
  valid = np.array([[True, True, True, False]] * 2)
  found = comparison.length(scores, steps, valid)
  assert (found["pick"], found["random"]) == ((1 + 7) / 2, pytest.approx((7 / 3 + 23 / 3) / 2))
  assert comparison.length(-steps, steps, valid)["correlation"] == pytest.approx(-1)
  for equal in (0.0, -np.inf):
    assert comparison.length(np.full((2, 4), equal), steps, valid)["correlation"] is None
  assert of.steps[0, 0] == 2 and comparison.compare(of)["methods"]["people"]["length"]["pick"] == 2


def test_differences_are_of_the_same_problems(of):
  """A method minus another has the interval of the paired differences, and needs more problems
  the smaller it is."""
  found = comparison.compare(of)["methods"]
  for name, other in (("people", "majority"), ("other", "log-probability")):
    means = [found[x]["accuracy"]["mean"][-1] for x in (name, other)]
    minus = found[name]["minus"][other]
    assert minus["mean"][-1] == pytest.approx(means[0] - means[1])
    assert minus["low"][-1] <= minus["mean"][-1] <= minus["high"][-1]
  a, b = np.array([[1.0], [1.0], [0.0], [1.0]]), np.zeros((4, 1))
  deviation = np.std([1, 1, 0, 1], ddof=1)
  wanted = ((1.959964 + 0.841621) * deviation / 0.75) ** 2
  assert comparison.power(a, b)["problems_needed"] == pytest.approx(wanted, rel=1e-5)
  assert comparison.power(a, a)["problems_needed"] is None


def test_a_doubling_of_the_labels_is_a_slope(of, files):
  """The least-squares slope over log2 of the shares, of the values that the methods have; of each
  reduction by itself."""
  graded, models = files
  by_min = {f"{name}:min": models[name] for name in ("people", "people/2")}
  found = comparison.compare(comparison.read(graded, by_min))
  assert found["growth"]["people:min"]["shares"] == [0.5, 1]
  found = comparison.compare(of)
  assert [*found["growth"]] == ["people"] and found["growth"]["people"]["shares"] == [0.25, 0.5, 1]
  means = [found["methods"][f"people{part}"]["auc"]["mean"][0] for part in ("/4", "/2", "")]
  slope = found["growth"]["people"]["auc"]
  assert slope["mean"][0] == pytest.approx((means[2] - means[0]) / 2)
  assert slope["low"][0] < slope["mean"][0] < slope["high"][0]


def test_disagreements_have_one_right_pick(of):
  """Of the model and of the majority, whose answer most finished candidates have."""
  slots, why = comparison.disagreements(of, "people")
  assert slots and len(slots) == len(why) and "the pick of people" in why
  for (p, a), (q, b) in zip(slots[::2], slots[1::2]):
    assert p == q and of.samples.correct[p, a] != of.samples.correct[p, b]
    there = np.flatnonzero(of.samples.valid[p])
    assert of.scores["people"][p, a] == of.scores["people"][p, there].max()
    counts = np.bincount(of.samples.answer_ids[p, there])
    assert counts[of.samples.answer_ids[p, b]] == counts.max()


def test_compare_py_writes_all_and_other_candidates_are_refused(files, tmp_path):
  """JSON, picture and page; a file of other candidates is an error that names it."""
  graded, named = files
  scores = [f"{name}={path}" for name, path in named.items()]
  judged = process_bench(tmp_path)
  flags = (f"--input={judged}", f"--output={tmp_path / 'judged.json'}")
  done = call_script("evaluate.py", "--benchmark=process_bench", *flags)
  assert done.returncode == 0, done.stderr
  flags = [f"--input={graded}", f"--output_dir={tmp_path}", "--figures", "svg", "pdf"]
  flags += ["--scores", *scores, f"other:min={named['other']}", "--against", "other:min", "people"]
  done = call_script("compare.py", *flags, f"--process_bench=people={tmp_path / 'judged.json'}")
  assert done.returncode == 0, done.stderr
  shown = done.stdout
  assert "vote by people/4" in shown and "minus other:min" in shown
  assert "people - other:min" in shown and "other:min - people" not in shown  # once
  assert re.search(r"ProcessBench.*\n +gsm8k +math +mean\n +people +80\.0 .* +0\.0 ", shown)
  found = json.loads((tmp_path / "comparison.json").read_text())
  assert found["problems"] == P and found["candidates"] == P * M
  assert found["missing"] == sum(not line["finished"] for line in lines())
  assert found["methods"]["people"]["calibration"]["error"] < 1
  assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
  assert (tmp_path / "comparison.pdf").read_bytes().startswith(b"%PDF")
  assert "vote by people</text>" in (tmp_path / "comparison.svg").read_text()
  assert "comparison.json, .png, .html, .svg, .pdf" in shown
  assert "What a doubling of the labels adds" in (tmp_path / "comparison.html").read_text()
  other = write(tmp_path / "other.jsonl", scored(lines(1), 0, 1.0))
  with pytest.raises(BadLine, match=r"other\.jsonl: not the candidates of .*graded\.jsonl"):
    comparison.read(graded, {"x": other})
  with pytest.raises(BadLine, match=r"comparison\.json: .*benchmark"):
    comparison.process_bench(tmp_path / "comparison.json")


def process_bench(folder):
  """Scored lines of two subsets: in one, two of three wrong steps are found, in the other none."""
  about = [("gsm8k", 0, 0.1), ("gsm8k", 0, 0.1), ("gsm8k", 0, 0.9), ("gsm8k", -1, 0.9)]
  about += [("math", 0, 0.9), ("math", -1, 0.9)]
  return write(
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
