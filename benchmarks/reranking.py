"""scripts/rerank.py on a generated file of 930,000 scored samples (2 GB), reading included.

Targets: under 60 s and 3 GB for the whole report, and under 1 s to read the file's bundle again.
Takes 5 minutes, most of them to write the file.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import msgspec
import numpy as np

from benchmarks import runner

PROBLEMS, CANDIDATES = 500, 1860
WRONG_ANSWERS = 44  # distinct wrong answers to a problem
DISTINCT = 4096  # step texts, and step probabilities, that samples draw from
MEAN_STEPS = 12
RELOAD = """
import sys, time
from prm_jax.evaluation.sample_files import read_scored_samples
start = time.perf_counter()
read_scored_samples(sys.argv[1:])
print(time.perf_counter() - start)
"""


def run(args: runner.Common) -> dict:
  """Writes the file, times scripts/rerank.py on it, and reads its bundle in a new process."""
  problems, candidates = (20, 50) if args.quick else (PROBLEMS, CANDIDATES)
  with tempfile.TemporaryDirectory() as directory:
    path, bundle = pathlib.Path(directory, "scored.jsonl"), pathlib.Path(directory, "bundle")
    runner.say(f"writing {problems * candidates:,} lines")
    generate(path, problems, candidates)
    command = [sys.executable, str(runner.ROOT / "scripts/rerank.py"), f"--input={path}"]
    command += [f"--output_dir={directory}/report", f"--write_bundle={bundle}"]
    environment = os.environ | {"PYTHONPATH": str(runner.ROOT), "JAX_PLATFORMS": "cpu"}
    with pathlib.Path(directory, "log").open("w+") as log:
      start = time.perf_counter()
      script = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
      _, status, usage = os.wait4(script.pid, 0)  # the usage of this process alone
      seconds = time.perf_counter() - start
      script.returncode = os.waitstatus_to_exitcode(status)
      log.seek(0)
      if script.returncode:
        raise RuntimeError(f"rerank.py ended with {script.returncode}: {log.read()[-2000:]}")
    reload = [sys.executable, "-c", RELOAD, str(bundle)]
    reloaded = subprocess.run(reload, env=environment, stdout=subprocess.PIPE, check=True)
    row = {
      "lines": problems * candidates,
      "GB": path.stat().st_size / 1e9,
      "s": seconds,
      "CPU s": usage.ru_utime + usage.ru_stime,
      "peak GB": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9,
      "bundle GB": bundle.stat().st_size / 1e9,
      "s to read the bundle": float(reloaded.stdout),
    }
  name = f"`rerank.py`, {row['lines']:,} lines"
  shape = f"{problems} x {candidates:,} x {MEAN_STEPS}"
  return {
    "targets": [
      runner.target(f"{name}, s", "<", 60, row["s"]),
      runner.target(f"{name}, peak GB", "<", 3, row["peak GB"]),
      runner.target(f"reload of a {shape} bundle, s", "<", 1, row["s to read the bundle"]),
    ],
    "tables": {"`rerank.py --write_bundle`, all cores": [row]},
  }


def generate(path: pathlib.Path, problems: int, candidates: int, seed: int = 0) -> None:
  """Writes a file in the form of OpenAI's scored-test-samples.jsonl.

  Right candidates are commoner among high scores, wrong answers are unequally popular, one
  candidate in 200 has no answer; there are 3 to 21 steps, 12 on average, of 60 to 100 characters.
  """
  rng = np.random.default_rng(seed)
  text = lambda length: "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz      "), length))
  texts = np.array([text(rng.integers(60, 101)) for _ in range(DISTINCT)], object)
  wrong = 1 / (1 + np.exp(np.linspace(9, -5, DISTINCT)))  # P(-1), ascending
  neutral = (1 - wrong) * rng.uniform(0, 0.3, DISTINCT)
  right = 1 - wrong - neutral
  classes = zip(wrong.tolist(), neutral.tolist(), right.tolist())
  ratings = np.array([dict(zip(("-1", "0", "1"), each)) for each in classes], object)
  popularity = 1 / np.arange(1, WRONG_ANSWERS + 1)
  popularity /= popularity.sum()
  with path.open("wb") as file:
    for p in range(problems):
      correct = rng.random(candidates) < rng.beta(1.2, 1.5)
      wrong_answers = 1 + rng.choice(WRONG_ANSWERS, candidates, p=popularity)
      missing = ~correct & (rng.random(candidates) < 0.01)
      ends = np.cumsum(rng.integers(3, 22, candidates))
      starts = np.concatenate([[0], ends[:-1]])
      # the worst step of a wrong solution tends to have a high P(-1)
      skew = np.repeat(np.where(correct, 0.9, 1.3), ends - starts)
      rows = (rng.beta(1, 5, ends[-1]) * DISTINCT * skew).astype(int).clip(max=DISTINCT - 1)
      prm = np.exp(np.add.reduceat(np.log(neutral + right)[rows], starts)).tolist()
      orm = (1 / (1 + np.exp(-rng.normal(np.where(correct, 1, -1), 1.5)))).tolist()
      steps, probs = texts[rng.integers(DISTINCT, size=ends[-1])].tolist(), ratings[rows].tolist()
      problem = {
        "problem": f"Problem {p}: {text(150)}",
        "subject": f"Subject {p % 7}",
        "level": p % 5 + 1,
        "unique_id": f"test/{p}.json",
        "ground_truth_answer": "0",
      }
      for m, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        answer = None if missing[m] else "0" if correct[m] else str(wrong_answers[m])
        sample = {
          "steps": steps[start:end],
          "answer": answer,
          "is_correct": bool(correct[m]),
          "rating_probs": probs[start:end],
          "orm_score": orm[m],
          "prm_score": prm[m],
        }
        file.write(msgspec.json.encode(problem | sample) + b"\n")
