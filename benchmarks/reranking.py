"""Measures scripts/rerank.py on a generated file of 930,000 scored samples (2 GB).

Targets: under 60 s and 3 GB for the whole report, reading included.
Takes 5 minutes, most of them for writing the file.
"""

import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import msgspec
import numpy as np

from benchmarks import runner

PROBLEMS, CANDIDATES = 500, 1860
WRONG_ANSWERS = 44  # distinct wrong answers to a problem
DISTINCT = 4096  # step texts, and as many step probabilities, from which samples draw


def run(args: runner.Common) -> dict:
  """Writes the file and times scripts/rerank.py on it."""
  problems, candidates = (20, 50) if args.quick else (PROBLEMS, CANDIDATES)
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, "scored.jsonl")
    runner.say(f"writing {problems * candidates:,} lines")
    generate(path, problems, candidates)
    command = [sys.executable, str(runner.ROOT / "scripts/rerank.py"), f"--input={path}"]
    environment = os.environ | {"PYTHONPATH": str(runner.ROOT), "JAX_PLATFORMS": "cpu"}
    start = time.perf_counter()
    subprocess.run(
      [*command, f"--output_dir={directory}/report"],
      env=environment,
      stdout=subprocess.DEVNULL,
      check=True,
    )
    seconds = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)  # rerank.py is the only child
    row = {
      "lines": problems * candidates,
      "GB": path.stat().st_size / 1e9,
      "s": seconds,
      "CPU s": usage.ru_utime + usage.ru_stime,
      "peak GB": runner.peak_gb(resource.RUSAGE_CHILDREN),
    }
  name = f"`rerank.py`, {row['lines']:,} lines"
  return {
    "targets": [
      runner.target(f"{name}, s", "<", 60, row["s"]),
      runner.target(f"{name}, peak GB", "<", 3, row["peak GB"]),
    ],
    "tables": {"`rerank.py`, all cores": [row]},
  }


def generate(path: pathlib.Path, problems: int, candidates: int) -> None:
  """Writes a file in the form of OpenAI's scored-test-samples.jsonl.

  Scores are independent of correctness, and wrong answers are unequally popular.  One candidate in
  100 has no answer.  Solutions have 3 to 21 steps, 12 on average, of 60 to 100 characters.
  """
  rng = np.random.default_rng(0)
  text = lambda length: "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz      "), length))
  texts = np.array([text(rng.integers(60, 101)) for _ in range(DISTINCT)], object)
  classes = rng.dirichlet((0.5, 0.5, 5), DISTINCT)
  ratings = np.array([dict(zip(("-1", "0", "1"), each)) for each in classes.tolist()], object)
  with path.open("wb") as file:
    for p in range(problems):
      problem = {
        "problem": f"Problem {p}: {text(150)}",
        "subject": f"Subject {p % 7}",
        "level": p % 5 + 1,
        "unique_id": f"test/{p}.json",
        "ground_truth_answer": "0",
      }
      correct = rng.random(candidates) < rng.beta(1.2, 1.5)
      answers = np.where(correct, 0, 1 + rng.zipf(1.5, candidates) % WRONG_ANSWERS)
      for answer, steps in zip(answers.tolist(), rng.integers(3, 22, candidates)):
        rows = rng.integers(DISTINCT, size=(2, steps))
        sample = {
          "steps": texts[rows[0]].tolist(),
          "answer": None if answer and rng.random() < 0.02 else str(answer),
          "is_correct": answer == 0,
          "rating_probs": ratings[rows[1]].tolist(),
          "orm_score": rng.random(),
          "prm_score": float(np.prod(1 - classes[rows[1], 0])),
        }
        file.write(msgspec.json.encode(problem | sample) + b"\n")
