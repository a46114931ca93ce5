"""Scored samples for tests: records, files of them, their arrays and their reports."""

import base64
import dataclasses
import gzip
import json
import pathlib
import random
import re

import numpy as np
import pytest
from conftest import write_lines

from prm_jax.evaluation import report as report_files
from prm_jax.evaluation.reranking import Options, rerank
from prm_jax.evaluation.sample_arrays import ScoredSamples, write_bundle
from prm_jax.evaluation.scored_samples import read_scored_samples
from prm_jax.runtime.json_lines import BadLine

FINE = {"-1": 0.25, "0": 0.0, "1": 0.75}
QUICK = {"resamples": 256, "permutations": 20}  # options of rerank


def candidate(problem="Add 1 and 2.", right=True, answer="3", orm=0.5, **extra):
  """Returns a candidate's record; a key whose value is ... is left out."""
  record = {
    "problem": problem,
    "steps": ["One step.", "Another."],
    "answer": answer,
    "is_correct": right,
    "rating_probs": [FINE, FINE],
    "orm_score": orm,
  }
  return {key: value for key, value in (record | extra).items() if value is not ...}


def rated(problem="Add 1 and 2.", right=True, answer="3", score=0.9, orm=0.5, **extra):
  """Returns a candidate whose steps have the P(right) 1 and `score`."""
  ratings = [{"-1": 0.0, "0": 0.25, "1": 0.75}, {"-1": 1 - score, "0": 0.0, "1": score}]
  keys = {"rating_probs": ratings, "ground_truth_answer": "3"}
  return candidate(problem, right, answer, orm, **(keys | extra))


def generated(problems=6, candidates=4, seed=0):
  """Yields candidates of interleaved problems, with levels; right ones tend to higher scores."""
  rng = np.random.default_rng(seed)
  for _ in range(candidates):
    for p in range(problems):
      right = bool(rng.random() < 0.5)
      yield rated(
        f"Problem {p}",
        right,
        "3" if right else str(rng.integers(4, 6)),
        float(rng.uniform(0.3, 1) if right else rng.uniform(0, 0.5)),
        float(rng.uniform(0.2, 1) if right else rng.uniform(0, 0.8)),
        level=p % 2 + 1,
        unique_id=f"id/{p}",
      )


def bundled(samples, path):
  """Writes a bundle of the samples; returns its path."""
  with open(path, "wb") as file:
    write_bundle(samples, file)
  return pathlib.Path(path)


def samples_of(path, records):
  """Writes a file of the records; returns its samples."""
  return read_scored_samples([write_lines(path, records)])


def drawn(seed, count=400, problems=7):
  """Yields random candidates of problems of unequal size, with extreme numbers and odd texts."""
  rng = random.Random(seed)
  for _ in range(count):
    p = min(rng.randrange(problems), rng.randrange(problems))
    right = rng.random() < 0.4
    steps = rng.randint(1, 9)
    ratings = []
    for _ in range(steps):
      wrong = rng.random()
      zero = rng.choice([0, (1 - wrong) * rng.random()])
      ratings.append({"1": 1 - wrong - zero, "-1": wrong, "0": zero})
    yield {
      "problem": f"Problem {p}: \u00e9\U0001f600",
      "unique_id": f"id/{p}",
      "level": p % 3,
      "subject": None if p % 2 else "Algebra",
      "steps": ["A step\n\u2028 \U0001f600"] * steps,
      "rating_probs": ratings,
      "orm_score": rng.choice([rng.gauss(0, 5), 1, -0.0, 5e-324, 1e300]),
      "prm_score": rng.random(),
      "answer": "1" if right else rng.choice(["2", "3", "", None]),
      "is_correct": right,
    }


def in_groups(records, size=None):
  """Yields lines of `{"problem", ..., "samples"}` with up to `size` records of a problem."""
  shared = ("problem", "unique_id", "level", "subject")
  pools = {}
  for record in records:
    pools.setdefault(record["problem"], []).append(record)
  for pool in pools.values():
    for start in range(0, len(pool), size or len(pool)):
      part = pool[start : start + (size or len(pool))]
      yield {k: part[0][k] for k in shared if k in part[0]} | {
        "samples": [{k: v for k, v in r.items() if k not in shared} for r in part]
      }


def check_equal(a: ScoredSamples, b: ScoredSamples, but=()):
  """Asserts that all fields except those of `but` are equal and of the same type."""
  for field in dataclasses.fields(ScoredSamples):
    if field.name in but:
      continue
    x, y = getattr(a, field.name), getattr(b, field.name)
    assert type(x) is type(y), field.name
    if isinstance(x, np.ndarray):
      assert x.dtype == y.dtype, field.name
      np.testing.assert_array_equal(x, y, err_msg=field.name)
    else:
      assert x == y, field.name


def fails(paths, *parts, error=BadLine, **options):
  """Asserts that reading raises an error with all parts; returns its message."""
  with pytest.raises(error) as raised:
    read_scored_samples(paths, **options)
  message = str(raised.value)
  for part in parts:
    assert part in message
  return message


def ranked(samples, n=(), **options):
  """Returns the report and scores of `rerank`, by default with the options `QUICK`."""
  options = {k: tuple(v) if isinstance(v, list) else v for k, v in (QUICK | options).items()}
  return rerank(samples, Options(n=tuple(n), **options))


def shown_on(page):
  """Returns the problems in the data of a page."""
  blocks = re.findall(r'id="page-\d+">([^<]*)<', page)
  return [p for block in blocks for p in json.loads(gzip.decompress(base64.b64decode(block)))]


def written(samples, directory, n=(), **options):
  """Writes the files of a report; returns the report and their paths."""
  report, scores = ranked(samples, n, **options)
  problems, notices = report_files.solutions(samples, scores, report)
  report["notices"] += notices
  paths = []
  directory.mkdir(exist_ok=True)
  for name, data in report_files.contents(report, problems).items():
    paths.append(directory / name)
    paths[-1].write_bytes(data)
  return report, paths
