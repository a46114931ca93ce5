"""The speed of scripts/rerank.py, reading included, on a generated file of scored samples."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
WRONG_ANSWERS = 44  # distinct ones of a problem, beside the right one
MEAN_STEPS = 12
RELOAD = """
import sys, time
from prm_jax.evaluation.sample_files import read_scored_samples
start = time.perf_counter()
read_scored_samples(sys.argv[1:])
print(time.perf_counter() - start)
"""
TABLE = 4096  # distinct step texts, and distinct step probabilities


def generate(
  path: pathlib.Path | str, problems: int = 500, candidates: int = 1860, seed: int = 0
) -> int:
  """Writes a file in the form of OpenAI's scored-test-samples.jsonl; returns its bytes.

  Right candidates are commoner among high scores, wrong answers are unequally popular, 1 candidate
  in 200 has none; there are 3 to 21 steps, 12 on average, of 60 to 100 characters.  All candidates
  of a problem follow each other.  Steps and their probabilities are drawn from tables of 4096,
  already in JSON: drawing text takes longer than all else.
  """
  rng = np.random.default_rng(seed)
  texts = np.array([_text(rng, rng.integers(60, 101)) for _ in range(TABLE)], object)
  wrong = 1 / (1 + np.exp(np.linspace(9, -5, TABLE)))  # P(-1), ascending
  neutral = (1 - wrong) * rng.uniform(0, 0.3, TABLE)
  right = 1 - wrong - neutral
  ratings = np.array(
    [
      f'{{"-1": {a!r}, "0": {b!r}, "1": {c!r}}}'
      for a, b, c in zip(wrong.tolist(), neutral.tolist(), right.tolist())
    ],
    object,
  )
  log_not_wrong = np.log(neutral + right)
  popularity = 1 / np.arange(1, WRONG_ANSWERS + 1)
  popularity /= popularity.sum()
  size = 0
  with open(path, "w", encoding="ascii") as file:
    for p in range(problems):
      skill = rng.beta(1.2, 1.5)  # of the generator, at this problem
      correct = rng.random(candidates) < skill
      answers = np.where(
        correct, 0, 1 + rng.choice(WRONG_ANSWERS, candidates, p=popularity)
      ).tolist()
      missing = ~correct & (rng.random(candidates) < 0.01)
      steps = rng.integers(3, 22, candidates)
      ends = np.cumsum(steps)
      # The worst step of a wrong solution tends to have a high P(-1).
      quality = rng.beta(1, 5, ends[-1]) * TABLE * np.repeat(np.where(correct, 0.9, 1.3), steps)
      rows = np.minimum(quality.astype(int), TABLE - 1)
      prm = np.exp(np.add.reduceat(log_not_wrong[rows], ends - steps)).tolist()
      orm = (1 / (1 + np.exp(-rng.normal(np.where(correct, 1, -1), 1.5)))).tolist()
      step_json = texts[rng.integers(TABLE, size=ends[-1])].tolist()
      rating_json = ratings[rows].tolist()
      head = f'{{"problem": "Problem {p}: {_text(rng, 150)[1:]}, "subject": "Subject {p % 7}"'
      head += f', "level": {p % 5 + 1}, "unique_id": "test/{p}.json", "ground_truth_answer": "0"'
      lines = []
      for m, (end, count) in enumerate(zip(ends.tolist(), steps.tolist())):
        answer = "null" if missing[m] else f'"{answers[m]}"'
        lines.append(
          f'{head}, "steps": [{", ".join(step_json[end - count : end])}], "answer": {answer}, '
          f'"is_correct": {"true" if correct[m] else "false"}, "rating_probs": '
          f'[{", ".join(rating_json[end - count : end])}], "orm_score": {orm[m]!r}, '
          f'"prm_score": {prm[m]!r}}}\n'
        )
      size += file.write("".join(lines))
  return size


def run(problems: int = 500, candidates: int = 1860, seed: int = 0) -> dict[str, float]:
  """Generates a file, times scripts/rerank.py on it, as from a terminal, and reads its bundle.

  Returns:
    "problems", "candidates", "lines" and "bytes" of the file; "generate_seconds"; of the script,
    start, imports and the writing of a bundle included: "seconds" of wall time, "cpu_seconds",
    "peak_gb" (10^9 bytes of resident memory); and "bundle_gb", and "bundle_seconds" to read that
    in a new process, without its start.

  Raises:
    RuntimeError: the script failed.
    subprocess.CalledProcessError: the reading of the bundle did.
  """
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory) / "scored.jsonl"
    start = time.perf_counter()
    size = generate(path, problems, candidates, seed)
    generated = time.perf_counter() - start
    command = [sys.executable, str(ROOT / "scripts/rerank.py"), f"--input={path}"]
    bundle = f"{directory}/bundle"
    command += [f"--output_dir={directory}/report", f"--write_bundle={bundle}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    log = pathlib.Path(directory) / "log"
    with log.open("w") as output:
      start = time.perf_counter()
      script = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
      _, status, usage = os.wait4(script.pid, 0)  # the usage of this process alone
      seconds = time.perf_counter() - start
      script.returncode = os.waitstatus_to_exitcode(status)
    if script.returncode:
      raise RuntimeError(f"rerank.py ended with {script.returncode}: {log.read_text()[-2000:]}")
    reload = [sys.executable, "-c", RELOAD, bundle]
    reloaded = subprocess.run(reload, env=environment, stdout=subprocess.PIPE, check=True)
    bundle_size = os.path.getsize(bundle)
  return {
    "problems": problems,
    "candidates": candidates,
    "lines": problems * candidates,
    "bytes": size,
    "generate_seconds": generated,
    "seconds": seconds,
    "cpu_seconds": usage.ru_utime + usage.ru_stime,
    "peak_gb": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9,
    "bundle_gb": bundle_size / 1e9,
    "bundle_seconds": float(reloaded.stdout),
  }


def _text(rng: np.random.Generator, length: int) -> str:
  """Letters and spaces as a JSON string."""
  letters = rng.choice(list("abcdefghijklmnopqrstuvwxyz      "), length)
  return f'"{"".join(letters)}"'
