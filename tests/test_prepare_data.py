"""scripts/prepare_data.py: whole datasets or none, exact counts, errors that say what to do."""

import json
import sys

import conftest
import jobs
import msgspec
import pytest
from msgspec.structs import replace

from prm_jax.datasets import arithmetic, labelled, prepare, prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.runtime.json_lines import BadLine

BEAM = prepare.Beam("DirectRunner", ("direct_num_workers=1",))


@pytest.fixture
def source(tmp_path, raw_rows):
  """A folder with upstream's four files in its own layout."""
  for phase in ("phase1", "phase2"):
    conftest.write_prm800k(tmp_path / "prm800k" / "data", raw_rows, phase)
  return tmp_path / "prm800k"


def leftovers(folder):
  """The hidden, temporary entries of a folder."""
  return list(folder.glob(".*"))


def test_the_command_writes_dataset_and_manifest(tmp_path, source):
  """One command writes the dataset and a manifest whose numbers add up, and prints its path."""
  output = tmp_path / "out"
  flags = ("--dataset=prm800k", f"--source={source}", f"--output={output}")
  run = conftest.call_script("prepare_data.py", *flags)
  assert f"manifest   {output / 'manifest.json'}" in run.stdout
  assert "warning: no math_splits/test.jsonl" in run.stderr
  manifest = json.loads((output / "manifest.json").read_text())
  train, test = manifest["splits"]["train"], manifest["splits"]["test"]
  # 3 rows in each phase; the problem "What is 2 + 3?" of one is in the test split
  assert train["rows"] == {"read": 6, "kept": 4} and train["dropped"] == {"test_problem": 2}
  assert train["labels"] == {"1": 6, "0": 0, "-1": 0}
  assert train["labels_dropped"] == {"test_problem": 8, "unrated": 4}
  assert (train["unlabelled_steps"], train["duplicates"]) == (2, 2)
  assert train["by_phase"]["1"] == {"rows_read": 3, "rows_kept": 2, "1": 3}
  assert train["outcome"]["right"] == 2
  assert manifest["test_problems"] == ["What is 2 + 3?"]
  assert test["by_finish_reason"]["give_up"] == {"rows_read": 2, "rows_kept": 0}
  assert manifest["total"]["rows"] == {"read": 10, "kept": 6}  # 4 and 2 in test
  assert manifest["source"]["data/phase1_train.jsonl"]["is_upstream"] is False
  assert len(prm800k.stored_records(output, "train")) == 6  # stored whole, dropped by the recipe
  assert leftovers(tmp_path) == []


def test_flags_change_a_recipe_and_the_manifest_records_them(tmp_path, source):
  """The command line can change a recipe's options, and the manifest records them."""
  flags = [f"--source={source}", f"--output={tmp_path / 'out'}", "--phases=phase2"]
  flags += ["--recipe_options.neutral=drop", "--recipe_options.unfinished=keep"]
  conftest.call_script("prepare_data.py", *flags)
  manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
  name = "paper(neutral=drop, unfinished=keep)"
  expected = replace(recipes.RECIPES["paper"], name=name, neutral="drop", unfinished="keep")
  assert msgspec.convert(manifest["recipe"], recipes.Recipe) == expected
  assert set(manifest["source"]) == {"data/phase2_train.jsonl", "data/phase2_test.jsonl"}
  nothing = replace(expected, phases=())
  with pytest.raises(ValueError, match=r"keeps none of the 6 records of train.*'phase': 4"):
    prepare.prepare_prm800k(tmp_path / "none", source=source, recipe=nothing)


def test_problems_of_math_splits_do_not_train(tmp_path, source):
  """Training rows of the 500 test problems of MATH are dropped and listed."""
  problem = {"problem": "Add 2 to  3.", "solution": "", "answer": "5", "subject": "", "level": 1}
  conftest.write_lines(source / "math_splits" / "test.jsonl", [problem | {"unique_id": ""}])
  for folder in (source, source / "data"):
    manifest = prepare.prepare_prm800k(tmp_path / folder.name / "o", source=folder)
    assert manifest["test_problems"] == ["Add 2 to  3.", "What is 2 + 3?"]
    assert manifest["splits"]["train"]["dropped"] == {"test_problem": 4}


def test_bad_records_fail_or_are_counted(tmp_path, source):
  """A bad record stops the command, which leaves nothing; under skip it is counted and quoted."""
  file = source / "data" / "phase2_train.jsonl"
  row = json.dumps(conftest.outcome_row()).replace('"rating": 1', '"rating": 2', 1)
  file.write_text(file.read_text() + row + "\n")
  flags = (f"--source={source}", f"--output={tmp_path / 'out'}")
  run = conftest.call_script("prepare_data.py", *flags, code=1)
  assert f'prepare_data.py: {file}:4: "label.steps[0].completions[0].rating" is 2: ' in run.stderr
  assert not (tmp_path / "out").exists() and leftovers(tmp_path) == []
  run = conftest.call_script("prepare_data.py", *flags, "--on_bad_record=skip")
  assert 'rating" is 2' in run.stdout
  manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
  train = manifest["splits"]["train"]
  assert manifest["bad_records"]["count"] == train["dropped"]["bad_record"] == 1
  assert train["rows"]["read"] == train["rows"]["kept"] + sum(train["dropped"].values()) == 7
  assert manifest["total"]["rows"] == {
    key: sum(part["rows"][key] for part in manifest["splits"].values()) for key in ("read", "kept")
  }


def test_an_empty_list_of_test_problems_is_an_error(tmp_path, source):
  """An empty list of test problems is an error, because no test problem would be dropped."""
  conftest.write_lines(source / "math_splits" / "test.jsonl", [])
  with pytest.raises(BadLine, match=r"math_splits/test.jsonl: empty"):
    prepare.prepare_prm800k(tmp_path / "out", source=source)


def test_only_an_earlier_output_is_replaced(tmp_path, source):
  """Only an earlier output is replaced, only on request, and it stays if the new one fails."""
  output = tmp_path / "out"
  prepare.prepare_prm800k(output, source=source)
  with pytest.raises(FileExistsError, match=r"add --overwrite$"):
    prepare.prepare_prm800k(output, source=source)
  (output / "mark").touch()
  prepare.prepare_prm800k(output, source=source, overwrite=True)
  assert not (output / "mark").exists() and not leftovers(tmp_path)
  for name in ("source", "download_dir"):
    options = {"source": None, "download_dir": tmp_path, name: source}
    with pytest.raises(ValueError, match=f"--{name}=.* is in --output=.* would be replaced"):
      prepare.prepare_prm800k(source, overwrite=True, **options)
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "manifest.json").write_text('{"train": {"tokens": 3}}')  # of train.py
  with pytest.raises(FileExistsError, match="is not a dataset's"):
    prepare.prepare_prm800k(tmp_path / "run", source=source, overwrite=True)
  (output / "raw").mkdir()
  with pytest.raises(ValueError, match="which would be replaced"):
    prepare.prepare_prm800k(output, source=output / "raw", overwrite=True)
  (source / "data" / "phase1_test.jsonl").write_text("{}\n")
  with pytest.raises(BadLine):
    prepare.prepare_prm800k(output, source=source, overwrite=True)
  assert len(prm800k.stored_records(output, "test")) == 4


def test_a_killed_run_leaves_no_dataset(tmp_path, source):
  """A run killed midway leaves no dataset, and the next one removes its temporary files."""
  file = source / "data" / "phase2_test.jsonl"
  rows = file.read_text()
  file.write_text(rows * 50_000)  # over a minute to write: time to be killed in
  output = tmp_path / "out"
  processes = jobs.start("prepare_data.py", f"--source={source}", f"--output={output}")
  jobs.wait_for(lambda: any(tmp_path.glob(".*/**/*.array_record*")), processes)
  jobs.kill(processes)
  assert not output.exists() and len(leftovers(tmp_path)) == 1
  file.write_text(rows)
  prepare.prepare_prm800k(output, source=source)
  assert leftovers(tmp_path) == []


def test_a_dataset_that_needs_no_download_needs_no_home(tmp_path):
  """Generated and local data are prepared where HOME cannot be written, as in some containers."""
  flags = ["--dataset=arithmetic", "--arithmetic.test_problems=2", "--arithmetic.train_problems=9"]
  output = tmp_path / "out"
  conftest.start_script("prepare_data.py", *flags, f"--output={output}", HOME="/proc/nohome")
  assert (output / "manifest.json").is_file()


def test_training_reads_what_the_manifest_counts(tmp_path, source):
  """The trees of each split have the labels that the manifest counts, for each dataset."""
  generator = arithmetic.Generator(train_problems=10, test_problems=5, candidates=2)
  manifests = {
    "a": prepare.prepare_arithmetic(tmp_path / "a", generator),
    "b": prepare.prepare_prm800k(tmp_path / "b", source=source),
  }
  for directory, manifest in manifests.items():
    for split, summary in manifest["splits"].items():
      trees, counts = labelled.step_trees(tmp_path / directory, split, "process")
      assert counts == {key: summary[key] for key in counts}
      assert len(trees) == summary["rows"]["kept"]
      own_paths, _ = labelled.step_trees(tmp_path / directory, split, "process", alternatives=False)
      assert [tree.source for tree in own_paths] == [tree.source for tree in trees]
      labels = [label for tree in trees for label in tree.labels if label is not None]
      assert len(labels) == sum(summary["labels"].values())
      trees, counts = labelled.step_trees(tmp_path / directory, split, "outcome")
      assert sum(tree.outcome for tree in trees) == summary["outcome"]["right"]
  assert manifests["a"]["splits"]["train"]["by_phase"].keys() == {"2"}


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ("--dataset=stepwise --recipe=qwen", "--recipe is for --dataset=prm800k or arithmetic"),
    ("--dataset=prm800k --arithmetic.seed=1", "--arithmetic is for --dataset=arithmetic"),
    ("--dataset=arithmetic --download_dir=d", "--download_dir is for --dataset=prm800k or"),
    ("--beam.options a=1", "--beam.options needs --beam.runner"),
    (
      "--dataset=arithmetic --arithmetic.test_problems=0 --arithmetic.train_problems=1",
      "arithmetic: no example in the split test",
    ),
  ],
)
def test_a_flag_that_cannot_apply_is_an_error(tmp_path, flags, message):
  """A flag that the dataset does not take, or an empty split, is an error and writes nothing."""
  flags = (*flags.split(), f"--output={tmp_path / 'out'}")
  assert message in conftest.call_script("prepare_data.py", *flags, code=1).stderr
  assert not list(tmp_path.iterdir())


@pytest.mark.shared_data
def test_the_real_sample_is_prepared_whole(tmp_path, prm800k_sample):
  """The real rows give the counted labels, and no training problem is a test problem."""
  manifest = prepare.prepare_prm800k(tmp_path / "out", source=prm800k_sample)
  assert manifest["total"]["rows"] == {"read": 940, "kept": 933}
  assert manifest["total"]["labels"] == {"1": 5722, "0": 479, "-1": 857}
  assert len(manifest["test_problems"]) == 535  # 500 of MATH, and those of the records of test
  assert "test_problem" not in manifest["splits"]["train"]["dropped"]
  assert manifest["test_problems_from"].endswith("math_splits/test.jsonl")
  manifest = prepare.prepare_benchmark(tmp_path / "math", "math_splits", source=prm800k_sample)
  assert manifest["splits"] == {"test": {"rows": {"read": 500, "kept": 500}}}
  assert manifest["source"]["test.jsonl"]["is_upstream"] is True
  raw = prm800k_sample / "math_splits" / "test.jsonl"
  assert (tmp_path / "math" / "test.jsonl").read_bytes() == raw.read_bytes()


@pytest.mark.beam
def test_beam_writes_the_same_bytes(tmp_path, source, monkeypatch):
  """Apache Beam writes the same files as one process, byte for byte, and reports bad records."""
  monkeypatch.setattr(prm800k.Builder, "SHARD_BYTES", 1000)
  with open(source / "data" / "phase2_train.jsonl", "a") as f:
    f.write('{"labeler": 3}\n' + json.dumps(conftest.phase1_row()) + "\n")
  files = []
  for out, beam in ((tmp_path / "here", prepare.Beam()), (tmp_path / "beam", BEAM)):
    manifest = prepare.prepare_prm800k(out, source=source, on_bad_record="skip", beam=beam)
    assert manifest["bad_records"]["count"] == 1
    paths = [path for path in out.rglob("*") if path.is_file()]
    files.append({path.relative_to(out): path.read_bytes() for path in paths})
  assert files[0] == files[1] and sum("train.array_record" in path.name for path in paths) >= 4
  with pytest.raises(BadLine, match=r"phase2_train.jsonl:4: \"labeler\" is 3: expected str"):
    prepare.prepare_prm800k(tmp_path / "bad", source=source, beam=BEAM)
  assert not (tmp_path / "bad").exists()
  with pytest.raises(ValueError, match="Apache Beam has no direct_workers=3"):
    prepare.Beam("DirectRunner", ("direct_workers=3",)).download_config()


def test_a_missing_apache_beam_is_named_with_its_extra(monkeypatch):
  """A runner without Apache Beam is an error that says how to install it."""
  monkeypatch.setitem(sys.modules, "apache_beam.options.pipeline_options", None)
  with pytest.raises(ValueError, match=r"--beam.runner=DirectRunner needs Apache Beam .*\[beam\]"):
    BEAM.download_config()
