"""From a file of scored samples to the report: curves, figure, page and command line."""

import gzip
import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from prm_jax.evaluation import report as report_files
from prm_jax.evaluation.reranking import powers_of_two, rerank, solution_scores
from prm_jax.evaluation.scored_samples import read_scored_samples, read_solutions
from prm_jax.json_lines import BadLine

ROOT = pathlib.Path(__file__).resolve().parents[1]
QUICK = {"resamples": 300, "permutations": 20}

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


def candidate(problem="Add 1 and 2.", right=True, answer="3", score=0.9, orm=0.5, **extra):
  record = {
    "problem": problem,
    "steps": ["One step.", "Another."],
    "answer": answer,
    "ground_truth_answer": "3",
    "is_correct": right,
    "rating_probs": [{"-1": 0.0, "0": 0.25, "1": 0.75}, {"-1": 1 - score, "0": 0.0, "1": score}],
    "orm_score": orm,
  }
  return {key: value for key, value in (record | extra).items() if value is not ...}


def write(path, records):
  text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
  with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as f:
    f.write(text)
  return path


def without(record, key):
  return {k: v for k, v in record.items() if k != key}


def generated(problems=6, candidates=4, seed=0):
  """Interleaved problems, with levels; both scores know something, the PRM's more."""
  rng = np.random.default_rng(seed)
  for _ in range(candidates):
    for p in range(problems):
      right = bool(rng.random() < 0.5)
      yield candidate(
        f"Problem {p}",
        right,
        "3" if right else str(rng.integers(4, 6)),
        float(rng.uniform(0.3, 1) if right else rng.uniform(0, 0.5)),
        float(rng.uniform(0.2, 1) if right else rng.uniform(0, 0.8)),
        level=p % 2 + 1,
        unique_id=f"id/{p}",
      )


def run(*args):
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  command = [sys.executable, str(ROOT / "scripts/rerank.py"), *map(str, args)]
  return subprocess.run(command, capture_output=True, text=True, env=environment)


def check_released_row(path):
  samples = read_scored_samples([path])
  report, scores = rerank(samples, **QUICK)
  assert np.exp(scores["prm_product"][0, 0]) == pytest.approx(0.09157553704097245, rel=1e-12)
  assert report["n"] == [1]
  assert report["curves"]["prm_product"]["accuracy"] == [1.0]
  (notice,) = report["notices"]
  assert notice.startswith("prm_score is the product of rating_probs on all 1 lines")
  strict = solution_scores(samples, neutral="negative")["prm_product"][0, 0]
  expected = np.prod([p["1"] for p in RELEASED["rating_probs"]])
  assert np.exp(strict) == pytest.approx(expected, rel=1e-12)


def test_released_figures(tmp_path):
  """The released row's numbers give its prm_score to 1e-12, and the file's own score is checked."""
  check_released_row(write(tmp_path / "row.jsonl", [RELEASED]))


@pytest.mark.shared_data
def test_released_row(shared):
  """The released row itself, as upstream published it."""
  check_released_row(shared / "data/reranking/openai_scored_sample.jsonl")


def test_a_wrong_prm_score_is_a_warning_that_names_the_line(tmp_path):
  """A prm_score that its rating_probs contradict is said, once, with the first line."""
  records = [candidate(prm_score=0.1), candidate(prm_score=0.5)]
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
  (notice,) = rerank(samples, **QUICK)[0]["notices"]
  assert "scored.jsonl:1: prm_score is 0.1" in notice
  assert "(2 such lines)" in notice


def test_curves_equal_counting(tmp_path):
  """Every curve equals the mean over all subsets of the candidates in the file."""
  records = list(generated())
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
  report, _ = rerank(samples, [1, 2, 3, 4], resamples=300, permutations=3000)
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

  def vote(subset):
    votes = {r["answer"]: 0 for r in subset}
    for r in subset:
      votes[r["answer"]] += 1
    return np.mean([a == "3" for a in votes if votes[a] == max(votes.values())])

  expected = {
    "prm_product": best(lambda r: r["rating_probs"][1]["1"]),
    "prm_min": best(lambda r: r["rating_probs"][1]["1"]),
    "prm_last": best(lambda r: r["rating_probs"][1]["1"]),
    "prm_mean": best(lambda r: r["rating_probs"][1]["1"]),
    "orm": best(lambda r: r["orm_score"]),
    "oracle": curve(lambda subset: any(r["is_correct"] for r in subset)),
    "random": curve(lambda subset: np.mean([r["is_correct"] for r in subset])),
  }
  for name, values in expected.items():
    np.testing.assert_allclose(report["curves"][name]["accuracy"], values, atol=1e-9, err_msg=name)
  majority = report["curves"]["majority"]
  error = np.array(majority["standard_error"])
  assert np.all(np.abs(np.array(majority["accuracy"]) - curve(vote)) <= 5 * error + 1e-9)
  assert error[-1] == 0


def test_report_schema(tmp_path):
  """report.json has the keys and lengths that other tools rely on, and no NaN."""
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", generated())])
  report, scores = rerank(samples, **QUICK)
  paths = report_files.write_report(report, samples, scores, tmp_path / "out")
  assert [p.name for p in paths] == ["report.json", "best_of_n.png", "report.html"]
  assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in paths)
  stored = json.loads(paths[0].read_text(), parse_constant=pytest.fail)
  assert (stored["problems"], stored["samples"], stored["n"]) == (6, 24, [1, 2, 4])
  prm = ["prm_product", "prm_min", "prm_mean", "prm_last"]
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
  """A file without orm_score, answers or rating_probs gives the curves that it allows."""
  bare = [candidate(answer=..., orm_score=..., rating_probs=..., steps=...) for _ in range(2)]
  samples = read_scored_samples([write(tmp_path / "bare.jsonl", bare)])
  report, scores = rerank(samples, **QUICK)
  assert list(report["curves"]) == ["oracle", "random"]
  assert report["paired"] == {}
  page = report_files.write_report(report, samples, scores, tmp_path)[2].read_text()
  assert "Some solutions" not in page
  only_orm = [candidate(rating_probs=..., orm=0.1 * i) for i in range(2)]
  samples = read_scored_samples([write(tmp_path / "orm.jsonl", only_orm)])
  assert set(rerank(samples, **QUICK)[0]["paired"]) == {"orm - majority"}


def test_two_files_merge_line_by_line(tmp_path):
  """The PRM's and the ORM's files for the same candidates equal one file with both, gzip or not."""
  records = list(generated())
  whole = write(tmp_path / "whole.jsonl", records)
  prm = write(tmp_path / "prm.jsonl", [without(r, "orm_score") for r in records])
  orm = write(tmp_path / "orm.jsonl.gz", [without(r, "rating_probs") for r in records])
  merged = read_scored_samples([prm, orm])
  expected = rerank(read_scored_samples([whole]), **QUICK)[0]
  assert rerank(merged, **QUICK)[0]["curves"] == expected["curves"]
  p, m = 3, 2
  (record,) = read_solutions(merged, [(p, m)])
  assert record == records[merged.lines[p, m] - 1]
  assert record["problem"] == merged.problems[p]


def test_files_that_disagree(tmp_path):
  """Two files of different candidates, or of different lengths, are never merged."""
  a = write(tmp_path / "a.jsonl", [candidate(), candidate()])
  b = write(tmp_path / "b.jsonl", [candidate(), candidate(answer="4", right=False)])
  with pytest.raises(BadLine, match=r'b\.jsonl:2: "(answer|is_correct)" is'):
    read_scored_samples([a, b])
  c = write(tmp_path / "c.jsonl", [candidate()])
  with pytest.raises(BadLine, match=r"c\.jsonl: ends before the candidate at .*a\.jsonl:2"):
    read_scored_samples([a, c])


def test_blank_lines_are_no_candidates(tmp_path):
  """They are passed over, and lines after them keep their numbers, in each file its own."""
  records = [candidate(), candidate(right=False, answer="4"), candidate(orm=0.1)]
  a = write(tmp_path / "a.jsonl", [records[0], "", "  ", *records[1:], ""])
  b = write(tmp_path / "b.jsonl", records)
  samples = read_scored_samples([a, b])
  assert samples.lines.tolist() == [[1, 4, 5]]
  assert read_solutions(samples, [(0, 1), (0, 2)]) == records[1:]
  b = write(b, [*records[:2], candidate(orm=0.2)])
  with pytest.raises(BadLine, match=r'b\.jsonl:3: "orm_score" is 0.2'):
    read_scored_samples([a, b])
  with pytest.raises(BadLine, match=r"blank\.jsonl: empty"):
    read_scored_samples([write(tmp_path / "blank.jsonl", ["", ""])])


def test_missing_candidates(tmp_path):
  """No answer: never chosen.  Fewer lines than others: drawn and missing, or never there."""
  records = [
    candidate("A", right=False, answer=None, score=0.99),
    candidate("A", score=0.1),
    candidate("B", score=0.5),
  ]
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
  padded, _ = rerank(samples, **QUICK)
  assert padded["curves"]["prm_product"]["accuracy"] == [0.5, 1.0]
  assert len(padded["notices"]) == 2
  own, _ = rerank(samples, pad_short=False, **QUICK)
  assert own["curves"]["prm_product"]["accuracy"] == [0.75, 1.0]


@pytest.mark.parametrize(
  ("bad", "message"),
  [
    ('{"problem": "A', "not JSON"),
    ("[1, 2]", "expected an object"),
    ('{"problem": "\\ud800"}', "half of a surrogate pair"),
    (candidate(steps=["fine", "\ud83d"]), "half of a surrogate pair"),
    (candidate(problem=...), '"problem" is None'),
    (candidate(is_correct="yes"), "\"is_correct\" is 'yes'"),
    (candidate(orm_score=...), 'no "orm_score"'),
    (candidate(unique_id="x"), '"unique_id" is here'),
    (candidate(orm_score="high"), "\"orm_score\" is 'high'"),
    (candidate(orm_score=float("nan")), '"orm_score" is nan'),
    (candidate(orm_score=10**400), '"orm_score" is 1000'),
    (candidate(rating_probs=[{"-1": 10**400, "0": 0.5, "1": 0}] * 2), "of step 0 is"),
    (candidate(steps=[]), '"steps" is []'),
    (candidate(steps=["only one"]), "expected one for each of 1 steps"),
    (candidate(rating_probs=[{"-1": 0, "0": 0, "1": 1}, {"2": 1.0}]), "of step 1 is {'2': 1.0}"),
    (candidate(rating_probs=[{"-1": 0, "0": 0, "1": 1}, [0, 0, 1]]), "of step 1 is [0, 0, 1]"),
    (candidate(rating_probs=[{"-1": 0, "0": 0, "1": 5}] * 2), "of step 0 is {'-1': 0"),
    (candidate(rating_probs=[{"-1": float("nan"), "0": 0, "1": 1}] * 2), "of step 0 is"),
    (candidate(answer=3), '"answer" is 3'),
    (candidate(answer=None), '"is_correct" is true, but "answer" is None'),
    (candidate(level=5), "\"level\" is '5', but None before"),
  ],
)
def test_malformed_lines(tmp_path, bad, message):
  """A bad line is an error naming file, line and value; never a silent number."""
  path = write(tmp_path / "scored.jsonl", [candidate(), bad])
  with pytest.raises(BadLine) as error:
    read_scored_samples([path])
  assert f"{path}:2: " in str(error.value)
  assert message in str(error.value)


def test_broken_files(tmp_path):
  """Bytes that are not UTF-8, a cut gzip file, an empty file: each says which and where."""
  for encoding in ("utf-16", "utf-16-le"):  # with a mark at the start, and without
    wide = tmp_path / "wide.jsonl"
    wide.write_bytes(json.dumps(candidate()).encode(encoding))
    with pytest.raises(BadLine, match=r"wide\.jsonl:1: not UTF-8"):
      read_scored_samples([wide])
  path = tmp_path / "latin.jsonl"
  path.write_bytes(json.dumps(candidate()).encode() + b'\n{"problem": "\xe9"}\n')
  with pytest.raises(BadLine, match=r"latin\.jsonl:2: not UTF-8"):
    read_scored_samples([path])
  whole = write(tmp_path / "whole.jsonl.gz", [candidate(f"Problem {i}") for i in range(50)])
  cut = tmp_path / "cut.jsonl.gz"
  cut.write_bytes(whole.read_bytes()[:-20])
  with pytest.raises(BadLine, match=r"cut\.jsonl\.gz:\d+: "):
    read_scored_samples([cut])
  empty = write(tmp_path / "empty.jsonl", [])
  with pytest.raises(BadLine, match="empty"):
    read_scored_samples([empty])


def test_text_from_files_is_escaped(tmp_path):
  """Nothing in a problem, step, answer or file name can run on the page."""
  attack = "<script>alert(1)</script>"
  evil = candidate(
    problem=attack,
    steps=[attack, '"><img src=x onerror=alert(1)>'],
    answer=attack,
    ground_truth_answer=attack,
    subject=attack,
    level=attack,
  )
  path = write(tmp_path / "<b>.jsonl", [evil, dict(evil, orm_score=0.1)])
  samples = read_scored_samples([path])
  report, scores = rerank(samples, **QUICK)
  page = report_files.write_report(report, samples, scores, tmp_path)[2].read_text()
  assert "&lt;script&gt;alert(1)" in page
  assert "<script" not in page
  assert "<img src=x" not in page
  assert "<b>.jsonl" not in page
  assert "http" not in page.replace("http-equiv", "")  # nothing is fetched


def test_default_n():
  """Powers of two up to M, and M itself."""
  assert powers_of_two(1) == [1]
  assert powers_of_two(8) == [1, 2, 4, 8]
  assert powers_of_two(1860)[-3:] == [512, 1024, 1860]


def test_command_line(tmp_path):
  """The script prints the table and the paths, and the three files are there."""
  path = write(tmp_path / "scored.jsonl", generated())
  out = tmp_path / "out"
  done = run("--input", path, "--output_dir", out, "--n", 1, 3, "--neutral=negative")
  assert done.returncode == 0, done.stderr
  assert "prm_product" in done.stdout
  assert "prm_product - orm" in done.stdout
  for name in ("report.json", "best_of_n.png", "report.html"):
    assert str(out / name) in done.stdout
    assert (out / name).stat().st_size > 1000
  report = json.loads((out / "report.json").read_text())
  assert report["n"] == [1, 3]
  assert report["neutral"] == "negative"


def test_command_line_errors(tmp_path):
  """Bad input ends with a message and a non-zero status, without a traceback or a report."""
  path = write(tmp_path / "scored.jsonl", [candidate(), "{"])
  done = run("--input", path, "--output_dir", tmp_path / "out")
  assert done.returncode == 1
  assert done.stderr.startswith(f"rerank.py: {path}:2: not JSON")
  assert not (tmp_path / "out").exists()
  done = run(f"--input={write(path, [candidate()])}", f"--output_dir={tmp_path / 'out'}", "--n=2")
  assert done.returncode == 1
  assert "expected whole numbers in 1..1" in done.stderr
