"""scripts/mathematics.sh: reported problems are held out, and all stages run."""

import functools
import json
import os
import subprocess
import sys
import tarfile

import pytest
import tiny
from conftest import (
  ENVIRONMENT,
  ROOT,
  call_script,
  completion,
  make_row,
  read_lines,
  start_script,
  step,
  write_lines,
)

from prm_jax.datasets import math_splits

LEVELS = {1: 5, 2: 8, 3: 4, 4: 3}


@pytest.fixture
def source(tmp_path):
  """Returns a folder of PRM800K with 20 test problems, and records of some and of others."""
  folder = tmp_path / "prm800k"
  (folder / "math_splits").mkdir(parents=True)
  problems = [
    {
      "problem": f"level {level}, number {i}",
      "solution": "",
      "answer": str(i),
      "subject": "Algebra",
      "unique_id": f"test/{level}/{i}.json",
      "level": level,
    }
    for level, count in LEVELS.items()
    for i in range(count)
  ]
  steps = [step(completion("I add.", 1)), step(completion("# Answer\n\n5", -1))]
  names = ["a", "b", "b", "c", "level 1,  number 0", "∂", "e"]
  rows = [make_row(steps, "found_error", 1, name) for name in names]
  rows[3]["question"]["ground_truth_answer"] = None
  for name, lines in (
    ("math_splits/test", problems),
    ("phase1_train", [make_row(steps, "found_error", None, "f")]),
    ("phase1_test", [make_row(steps, "found_error", None, "level 2, number 2")]),
    ("phase2_train", rows),
    ("phase2_test", [make_row(steps, "found_error", 1, "level 2, number 1")]),
  ):
    write_lines(folder / f"{name}.jsonl", lines)
  return folder


def split(source, out, *flags, run=call_script):
  """Returns the reported problems, the own problems and the manifest of split_problems.py."""
  run("split_problems.py", f"--source={source}", f"--output={out}", *flags)
  read = lambda name: read_lines(out / f"{name}.jsonl")
  return read("reported"), read("own"), json.loads((out / "manifest.json").read_text())


def mathematics(*flags):
  """Returns the finished run of mathematics.sh."""
  command = ["bash", ROOT / "scripts" / "mathematics.sh", "--scale=smoke", *flags]
  environment = ENVIRONMENT | {"python": sys.executable, "PATH": os.environ["PATH"]}
  return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_reported_problems_are_in_no_other_file(source, tmp_path):
  """Half of each level is reported; the rest and solved training problems are for training."""
  reported, own, about = split(source, tmp_path / "out")
  names = lambda lines: {" ".join(x["problem"].split()) for x in lines}
  assert not names(reported) & names(own)
  assert names(own) - {x for x in names(own) if x.startswith("level")} == {*"ab∂ef"}
  of_level = lambda lines, level: sum(x.get("level") == level for x in lines)
  for level, count in LEVELS.items():
    assert of_level(reported, level) == -(-count // 2) and of_level(own, level) == count // 2
  assert all(line["ground_truth_answer"] for line in reported + own)
  ascii_locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
  otherwise = functools.partial(start_script, PYTHONHASHSEED="1", **ascii_locale)
  again = split(source, tmp_path / "again", run=otherwise)
  assert again == (reported, own, about)
  assert split(source, tmp_path / "other", "--seed=1")[0] != reported


def test_a_smaller_split_keeps_the_proportions_of_levels(source, tmp_path):
  """Fewer problems are drawn from the chosen levels in proportion to the levels' sizes."""
  flags = ("--reported=5", "--own=2", "--training=1", "--levels", "1", "2")
  reported, own, about = split(source, tmp_path / "out", *flags)
  assert len(reported) == 5 and about["reported"]["by_level"] == {"1": 2, "2": 3}
  assert len(own) == 3 and {x.get("level", "a") for x in own} <= {1, 2, "a"}


def test_the_test_problems_may_lie_beside_the_source(source, tmp_path, monkeypatch):
  """DIR may be upstream's folder `data`, beside the list of test problems, or `..` inside it."""
  (source / "data").mkdir()
  (source / "phase1_train.jsonl").rename(source / "data" / "phase1_train.jsonl")
  reported, own, _ = split(source / "data", tmp_path / "out")
  assert len(reported) + len(own) == sum(LEVELS.values()) + 1
  (source / "data" / "inner").mkdir()
  monkeypatch.chdir(source / "data" / "inner")
  assert math_splits.find_test("..") == source / "math_splits" / "test.jsonl"


def test_a_limit_of_training_problems_needs_their_source(tmp_path):
  """--training without the records that it limits is an error before anything is downloaded."""
  done = call_script("split_problems.py", f"--output={tmp_path / 'out'}", "--training=5", code=1)
  assert "--training limits the problems of PRM800K's" in done.stderr


def test_results_of_other_settings_are_not_mixed(tmp_path):
  """An output of another generator or source, and two base models of one name, are refused."""
  made = "--scale=smoke --generator=a --problems=4 --n=3 --source="
  (tmp_path / "made_with").write_text(f"{made}{tmp_path}\n")
  for flags, message in (
    (("--source=none", "--generator=b"), "was made with --scale=smoke --generator=a"),
    (("--source=configs",), f"not {made}{ROOT / 'configs'}: give another --output"),
    ((f"--source={tmp_path}/.", "--base=a/model", "--base=b/model/"), "are named model"),
  ):
    done = mathematics("--generator=a", "--problems=4", "--n=3", f"--output={tmp_path}", *flags)
    assert done.returncode == 2 and message in done.stderr


def test_a_try_that_failed_does_not_bind_the_next(source, tmp_path):
  """After a wrong --source the right one is taken; the problems then belong to it."""
  (tmp_path / "model").mkdir()
  (tmp_path / "empty").mkdir()
  flags = ["--settings", f"--output={tmp_path / 'out'}", f"--base={tmp_path / 'model'}"]
  flags += [f"--generator={tmp_path / 'model'}"]
  for folder, made in ((tmp_path / "empty", False), (source, True)):
    done = mathematics(*flags, f"--source={folder}")
    assert done.returncode == 1  # of the missing source, then of the model, which is empty
    assert (tmp_path / "out" / "problems").exists() == made, done.stderr
  assert (tmp_path / "out" / "made_with").read_text().endswith(f"--source={source}\n")


@pytest.mark.slow
def test_the_whole_chain_runs_with_a_tiny_random_model(source, arithmetic_data, tmp_path):
  """Every stage runs at the scale "smoke"; a second run makes no file again."""
  tiny.public(tmp_path / "model", 320, arithmetic_data / "tokenizer.model")
  out = tmp_path / "a run"
  flags = [f"--source={source}", f"--output={out}", f"--generator={tmp_path / 'model'}"]
  flags += [f"--base={tmp_path / 'model'}", "--problems=3", "--n=2"]
  done = mathematics(*flags)
  assert done.returncode == 0, done.stderr[-3000:]
  found = json.loads((out / "model" / "product" / "comparison.json").read_text())
  assert found["problems"] == 3 and found["candidates"] == 6
  models = ["people", "rollouts", "outcomes", "both"]
  assert {f"{x}{part}" for x in models for part in ("", "/2")} <= {*found["methods"]}
  with tarfile.open(out / "mathematics.tar.xz") as file:
    kept = {"problems/reported.jsonl", "model/both-2.jsonl", "model/source/people-2.jsonl"}
    assert kept <= {*file.getnames()}
  of_own = json.loads((out / "own" / "comparison.json").read_text())
  for how in ("soft_min", "calibrated"):
    assert "model:product" in of_own["methods"][f"model:{how}"]["minus"]
  training = read_lines(out / "training_rollouts.jsonl")
  test_problems = {x["problem"] for x in read_lines(source / "math_splits" / "test.jsonl")}
  assert training and not {x["problem"] for x in training} & test_problems
  sources = json.loads((out / "model/source/product/comparison.json").read_text())["methods"]
  assert all("people-2" in sources[x]["minus"] for x in ("people", "rollouts", "outcomes"))
  made = {path: path.stat().st_mtime for path in out.rglob("*.jsonl")}
  done = mathematics(*flags)
  assert done.returncode == 0, done.stderr[-3000:]
  assert {path: path.stat().st_mtime for path in out.rglob("*.jsonl")} == made
