"""SIGINT, SIGTERM and SIGKILL at random moments of the scripts that write files."""

import collections
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import conftest
import pytest

from prm_jax.runtime import exits

MOMENTS = int(os.environ.get("PRM_JAX_INTERRUPTS", "50"))
CODES = {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: exits.TERMINATED, signal.SIGKILL: -9}
LISTENS = 0.5  # seconds after which a script surely handles signals itself
# Each script writes to the folder {out}; {work} holds a model, its data and scored candidates.
COMMANDS = {
  "prepare_data.py": "--dataset=arithmetic --arithmetic.train_problems=300 "
  "--arithmetic.test_problems=9 --overwrite=True --output={out}/data",
  "score.py": "--checkpoint={work}/run --input={work}/candidates.jsonl --output={out}/o.jsonl",
  "rerank.py": "--input={work}/scored.jsonl --output_dir={out} --write_bundle={out}/bundle.npz",
  "evaluate.py": "--checkpoint={work}/run --data_dir={work}/data --output={out}/evaluation.json",
  "export.py": "--checkpoint={work}/run --output={out}/exported",
}


def flags(script, work, out):
  """The script's arguments."""
  shutil.rmtree(out / "exported", ignore_errors=True)  # export.py replaces nothing
  return COMMANDS[script].format(work=work, out=out).split()


def run(script, work, out):
  conftest.run_script(script, *flags(script, work, out))


def start(script, work, out):
  command = [sys.executable, str(conftest.ROOT / "scripts" / script), *flags(script, work, out)]
  pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
  return subprocess.Popen(command, env=conftest.ENVIRONMENT, cwd=conftest.ROOT, **pipes)


def contents(folder):
  """The sha256 of each file by its path."""
  return {
    str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(folder.rglob("*"))
    if path.is_file()
  }


@pytest.fixture(scope="module")
def work(arithmetic_data, prm_run, tmp_path_factory):
  """A folder with the scripts' inputs: data, a model, candidates and scored candidates."""
  folder = tmp_path_factory.mktemp("work")
  (folder / "data").symlink_to(arithmetic_data)
  (folder / "run").symlink_to(prm_run)
  (folder / "candidates.jsonl").symlink_to(arithmetic_data / "candidates.jsonl")
  run("score.py", folder, folder)
  (folder / "o.jsonl").rename(folder / "scored.jsonl")
  return folder


@pytest.mark.parametrize(
  ("script", "moments"),
  [("score.py", 1)]
  + [pytest.param(script, MOMENTS, marks=pytest.mark.slow) for script in COMMANDS],
)
def test_an_interrupted_script_leaves_no_partial_output(work, tmp_path, script, moments):
  """A script stopped at any moment leaves no partly written file under an output's name.

  After SIGINT or SIGTERM it leaves no file but a journal, and prints one line; after SIGKILL the
  next run deletes the unfinished files.

    PRM_JAX_INTERRUPTS=50 bash scripts/test.sh -m slow -k interrupts -s
  """
  whole = tmp_path / "whole"
  whole.mkdir()
  if script != "score.py":  # the fixture `work` has run that, so its programs are compiled
    run(script, work, whole)
  began = time.monotonic()
  child = start(script, work, whole)
  _, errors = child.communicate()
  seconds = time.monotonic() - began
  assert child.returncode == 0, errors
  expected, out, draw = contents(whole), tmp_path / "out", random.Random(script)
  out.mkdir()
  counts = collections.Counter()
  allowed = ({}, expected)  # no file, or all files of an earlier run
  while waiting := [number for number in CODES if counts[number.name] < moments]:
    number, delay = waiting[counts.total() % len(waiting)], draw.uniform(LISTENS, seconds)
    before = contents(out).keys()
    child = start(script, work, out)
    time.sleep(delay)
    child.send_signal(number)
    _, errors = child.communicate()
    assert child.returncode in (0, CODES[number]), errors
    assert "Traceback" not in errors, errors
    counts[number.name if child.returncode else "ended before"] += 1
    if child.returncode == 0:
      seconds = max(LISTENS, min(seconds, delay))
    files = contents(out)
    hidden = {name for name in files if name.startswith(".")}
    assert {name: x for name, x in files.items() if name not in hidden} in allowed
    if number != signal.SIGKILL:
      left = [name for name in hidden - before if not name.endswith(".journal")]
      assert not left, (left, number, delay, errors)
      assert child.returncode == 0 or f"{script}: stopped by " in errors.splitlines()[-1], errors
  run(script, work, out)
  assert contents(out) == expected
  assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
  print(f"{script}, {seconds:.1f} s: {dict(counts)}")
