"""benchmarks/: a quick run of each, and the properties that their figures depend on."""

import ctypes.util
import functools
import itertools
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import types
from unittest import mock

import numpy as np
import pytest
import tiny
from conftest import (
  ENVIRONMENT,
  ROOT,
  call_script,
  completion,
  make_row,
  needs_libtpu,
  run_script,
  step,
  write_lines,
)

from benchmarks import quickstart, runner, scaling, training, tree
from prm_jax.input_pipeline import step_dataset, token_tree
from prm_jax.runtime import processes
from prm_jax.types import StepTree


def benchmark(tmp_path, *arguments):
  """Returns the figures of a quick run, and its standard output."""
  path = tmp_path / "figures.json"
  done = run_script("benchmark.py", *arguments, "--quick", f"--json={path}")
  return json.loads(path.read_text()), done.stdout


@pytest.fixture
def source(tmp_path):
  """Returns a folder of PRM800K files of five solutions, whose last steps have two completions."""
  last = step(completion("Two.", -1), completion("6.", 0), chosen=None)
  steps = [step(completion("Add.", 1)), last]
  for name in ("phase1_train", "phase1_test", "phase2_train", "phase2_test"):
    rows = [make_row(steps, "found_error", problem=f"{name} {i}?") for i in range(5)]
    write_lines(tmp_path / f"source/{name}.jsonl", rows)
  return tmp_path / "source"


@pytest.fixture
def model(tmp_path, arithmetic_data):
  """Returns a folder with a tiny public model and its tokenizer."""
  tiny.public(tmp_path / "model", 320, arithmetic_data / "tokenizer.model")
  return tmp_path / "model"


@pytest.mark.slow
def test_the_aggregator_agrees_with_float64_and_its_section_is_replaced(tmp_path):
  """best_of_n agrees with float64 at every size; --docs replaces the benchmark's section."""
  page, around = tmp_path / "page.md", "# Title\n\n<!-- aggregation: {} -->\n\nAfter.\n"
  page.write_text(around.format("begin -->\nold\n<!-- aggregation: end"))
  figures, text = benchmark(tmp_path, "aggregation", f"--docs={page}")
  rows = [row for rows in figures["tables"].values() for row in rows]
  assert all(row["s"] > 0 for row in rows) and len(figures["targets"]) == 8
  assert all(row["error"] < 1e-6 for row in rows if "best_of_n" in row["method"])
  marked = f"begin -->\n\n{text.rstrip()}\n\n<!-- aggregation: end"
  assert page.read_text() == around.format(marked)


def test_the_page_has_the_figures_of_each_benchmark_that_ran(tmp_path):
  """The page has the figures of each benchmark that ran; a second run does not measure them again.

  The run is compared with earlier figures, and names the benchmarks that failed or do not exist.
  """
  marks = re.findall(r"<!-- ([\w.-]+): begin", (ROOT / "docs/benchmark_tables.md").read_text())
  output, earlier = tmp_path / "all", tmp_path / "earlier"
  earlier.mkdir()
  before = [runner.target("`rerank.py`, 1,000 lines, s", "<", 60, 1e-3)]
  before = json.dumps({"machine": runner.machine(), "targets": before})
  (earlier / "reranking.json").write_text(before)
  flags = ("all", "--quick", f"--output_dir={output}")
  done = run_script("benchmark.py", *flags, f"--against={earlier}", "--only", "reranking")
  assert "### Against" in done.stdout and "| worse |" in done.stdout
  page = (output / "benchmarks.md").read_text()
  assert page.count("Not run.") == len(marks) - 1 and "| 1,000 |" in page
  targets = json.loads((output / "reranking.json").read_text())["targets"]
  assert len(targets) == 2 and all(target["measured"] > 0 for target in targets)
  assert "AMD" not in page  # of the authors' machines
  (output / "benchmarks.md").unlink()  # is written again from the figures
  run_script("benchmark.py", *flags, f"--against={earlier}", "--only", "reranking")
  assert "### Against" in page and (output / "benchmarks.md").read_text() == page
  before = (output / "reranking.json").stat().st_mtime_ns
  empty = f"--source={tmp_path}"
  done = run_script("benchmark.py", *flags, empty, "--only", "reranking", "tree", code=1)
  assert (output / "reranking.json").stat().st_mtime_ns == before
  assert done.stderr.strip().endswith("for the reasons above: tree")
  done = call_script("benchmark.py", *flags, "--only", "reranking", "nonsense", code=1)
  assert "--only nonsense" in done.stderr
  assert all(mark in done.stderr for mark in marks)


@pytest.mark.slow
def test_both_dtypes_train_and_score(tmp_path, model):
  """Both dtypes train and score; the times of a score step's parts add up to the step's."""
  figures, _ = benchmark(tmp_path, "dtypes", f"--model={model}")
  products, steps, parts = figures["tables"].values()
  assert [row["step"] for row in steps] == ["train", "score"] and len(products) == 5
  assert all(value > 0 for row in products + steps for key, value in row.items() if "/s" in key)
  for row in parts:
    assert sum([*row.values()][2:]) == pytest.approx(row["s"])


def test_a_regression_follows_the_direction_of_its_target():
  """Fewer seconds, more speed and figures nearer to an equal one are better.

  Small changes and new targets are not regressions.
  """
  old = [runner.target("s", "<", 9, 4.0), runner.target("speed", ">=", 2, 4.0)]
  old += [runner.target(*each) for each in (("fit", "=", 13, 10), ("copies", "=", 0, 0))]
  old += [runner.target("difference", ">=", 0, -0.02), runner.target("GB", "<", 3, 0)]
  now = [runner.target("s", "<", 9, 5.0), runner.target("speed", ">=", 2, 5.0)]
  alike = [runner.target("s", "<", 9, 4.1), runner.target("new", ">=", 2, 5.0)]
  zero = [runner.target("s", "<", 9, 0.0)]

  def verdicts(targets):
    return [row[""] for row in runner.regressions({"targets": targets}, {"targets": old})]

  assert verdicts(now) == ["worse", "better"]
  assert verdicts(alike) == ["same"] and verdicts(zero) == ["better"]
  assert verdicts([runner.target("fit", "=", 13, 13), runner.target("copies", "=", 0, 5)]) == [
    "better",
    "worse",
  ]
  assert verdicts([runner.target("fit", "=", 13, 16), runner.target("copies", "=", 0, 0)]) == [
    "same",
    "same",
  ]
  differences = [runner.target("difference", ">=", 0, x) for x in (-0.01, 0.01, -0.04)]
  assert verdicts(differences) == ["better", "better", "worse"]
  assert verdicts([runner.target("GB", "<", 3, 1)]) == ["worse"]


def test_the_history_of_the_quick_start_keeps_every_run(tmp_path):
  """Each run of the quick start adds a line to the history, whose table has all lines."""
  path = tmp_path / "history.csv"
  line = {"version": "1", "seconds": "1"}
  assert quickstart.recorded(path, line) == [line]
  assert quickstart.recorded(path, line | {"version": "2"}) == [line, line | {"version": "2"}]
  assert len(path.read_text().splitlines()) == 3


@pytest.mark.slow
def test_trees_and_paths_are_trained_and_scored(tmp_path, source, model):
  """Trees and paths are trained and scored on real and on generated solutions."""
  figures, _ = benchmark(tmp_path, "tree", f"--source={source}", f"--model={model}")
  trained, scored = figures["tables"].values()
  for phase in trained[:2]:
    assert phase["paths"] == 2 * phase["problems"] and phase["labels"] == 3 * phase["problems"]
    assert phase["distinct tokens"] < phase["flattened tokens"]
  assert scored[-1]["flattened / distinct"] == 1 < scored[0]["flattened / distinct"]
  assert len(trained) == 3 and len(figures["targets"]) == 5


@pytest.mark.slow
def test_a_second_run_of_training_reuses_its_figures(tmp_path, source, model):
  """This project trains on the peer's rows; a second run reuses its figures."""
  arguments = ("training", "--peer=none", f"--source={source}", f"--model={model}")
  arguments = (*arguments, f"--work={tmp_path}/work")
  figures, _ = benchmark(tmp_path, *arguments)
  (trees,) = figures["runs"]
  assert trees["targets"] < trees["steps"]  # a tree reads a shared label once
  assert len(trees["after"]["labels"]) == 8 and len(trees["losses"]) == 1
  assert benchmark(tmp_path, *arguments)[0]["runs"] == figures["runs"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_loads_report_sizes_and_memory(tmp_path, model):
  """Loads of a small and a larger model report the sizes of their tensors and memory."""
  figures, text = benchmark(tmp_path, "loading", f"--model={model}")
  small, large = figures["tables"]["Loads"]
  assert 1000 * small["shards GB"] == pytest.approx(4 * small["million parameters"])  # float32
  assert large["million parameters"] > 2 * 0.152 * 64  # embedding and language-model head
  assert large["highest GB"] >= large["growth GB"] > 0 and "| model | 1 |" in text


@pytest.mark.slow
def test_all_samples_are_generated_and_their_times_add_up(tmp_path, model):
  """All samples are generated, and the times of a step's products add up to the total."""
  path = model / "tokenizer_config.json"
  about = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps(about | {"chat_template": "{{ messages[-1]['content'] }}"}))
  figures, text = benchmark(tmp_path, "generation", f"--model={model}", "--peer_python=")
  (row,) = figures["tables"]["All prompts"]
  assert 4 <= row["tokens"] <= 16 and len(figures["ours"]["step"]) == 10
  assert sum(x["ms"] for x in figures["ours"]["step"][1:-1]) == figures["ours"]["step"][-1]["ms"]
  assert len(figures["targets"]) == 1 and "| logits |" in text


@pytest.mark.slow
def test_two_hosts_have_the_losses_of_one_device(tmp_path):
  """A job of two hosts gives the same losses as one device."""
  figures, text = benchmark(tmp_path, "scaling", "--skip=compiled")
  assert figures["targets"][0]["met"] and "| 2 | 1 x 4 x 2 |" in text


@pytest.mark.slow
@needs_libtpu
def test_all_forms_of_attention_compile(tmp_path):
  """All three forms of attention compile, and the kernel meets its targets."""
  figures, _ = benchmark(tmp_path, "kernel", f"--work={tmp_path}")
  assert len(figures["runs"]) == 3 and all(target["met"] for target in figures["targets"])


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("agregation",), "there is no agregation"),
    (("aggregation", f"--docs={ROOT}/README.md"), "no line <!-- aggregation: begin -->"),
    (("training", "--threads=9999"), "9999: only"),
    (("tree", "--source=nowhere"), "no such file"),
  ],
)
def test_wrong_arguments_are_errors_before_any_work(arguments, message):
  """The error names a misspelt benchmark, a wrong value or a missing file."""
  done = call_script("benchmark.py", *arguments, code=1)
  assert message in done.stderr


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"machine": ...}, 'no "machine"'),
    ({"machine": {"date": "today"}}, 'no "processor"'),
    ({"targets": [{"target": "s"}]}, 'no "measured"'),
  ],
)
def test_figures_to_compare_with_are_checked_before_any_work(change, message, tmp_path):
  """A file of --against without a benchmark's figures is an error that names it."""
  path, output = tmp_path / "old.json", tmp_path / "new.json"
  figures = {"machine": runner.machine(), "targets": []} | change
  path.write_text(json.dumps({key: x for key, x in figures.items() if x is not ...}))
  flags = ("reranking", f"--against={path}", f"--json={output}")
  with mock.patch("benchmarks.reranking.run", side_effect=AssertionError("measured")):
    done = call_script("benchmark.py", *flags, code=1)
  assert str(path) in done.stderr and message in done.stderr
  assert not output.exists()


def test_figures_of_other_sizes_are_measured_again(tmp_path, monkeypatch):
  """`all` measures again what --quick measured, not the reverse; the quick start has one size."""
  commands = []

  def measured(command, **_):
    commands.append(command)
    (file,) = (x.removeprefix("--json=") for x in command if x.startswith("--json="))
    about = {"machine": runner.machine(), "quick": "--quick" in command, "command": ""}
    figures = about | {"seconds": 1.0, "targets": [], "tables": {}}
    pathlib.Path(file).write_text(json.dumps(figures))
    return types.SimpleNamespace(returncode=0)

  monkeypatch.setattr("subprocess.run", measured)
  flags = ("all", f"--output_dir={tmp_path}", "--only", "dtypes", "quickstart")
  counts = []
  for quick in (["--quick"], ["--quick"], [], [], ["--quick"]):
    call_script("benchmark.py", *flags, *quick)
    counts.append(len(commands))
  assert counts == [2, 2, 3, 3, 3]


def test_the_page_of_tables_has_every_benchmark():
  """docs/benchmark_tables.md has a marked section for every benchmark that `all` runs."""
  page = (ROOT / "docs/benchmark_tables.md").read_text()
  names = sorted(runpy.run_path(str(ROOT / "scripts/benchmark.py"))["EVERY"])
  assert sorted(re.findall(r"<!-- (\S+): begin -->", page)) == names
  assert sorted(re.findall(r"<!-- (\S+): end -->", page)) == names


def test_figures_are_measured_once_for_the_same_content(tmp_path):
  """A measurement is repeated if its settings or code change; a failed one leaves no file."""
  calls, code = itertools.count(), tmp_path / "code"
  code.mkdir()
  (code / "a.py").write_text("one")

  def kept(settings):
    return runner.kept(tmp_path, "x", settings, [code], lambda: {"call": next(calls)})["call"]

  assert [kept(1), kept(1), kept(2)] == [0, 0, 1]
  (code / "a.py").write_text("two")
  assert [kept(1), kept(1)] == [2, 2]
  with pytest.raises(ZeroDivisionError):
    runner.kept(tmp_path, "y", 1, [], lambda: {"call": 1 / 0})
  assert not list(tmp_path.glob("y*"))


def surroundings(name):
  """Returns an environment variable, and the number of cores of the process."""
  return os.environ.get(name), len(processes.usable_cores())


def test_a_measurement_has_its_own_process():
  """A measurement's variables and cores do not change this process; its abort is an error here."""
  cores = processes.usable_cores()
  assert runner.apart(surroundings, "A_NAME", cores=cores[:1], A_NAME="value") == ("value", 1)
  assert "A_NAME" not in os.environ and processes.usable_cores() == cores
  with pytest.raises(RuntimeError):
    runner.apart(os.abort)


MEASURED = """
import os, time
from benchmarks import runner

def measure():
  print("began", flush=True)
  time.sleep(30)
  print("went on", flush=True)
  os._exit(0)  # or it would wait for its parent, and this test for it

if __name__ == "__main__":
  runner.apart(measure)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_killed_benchmark_ends_its_measurement(tmp_path):
  """A measurement does not go on, and take the cores, after its benchmark was killed."""
  (tmp_path / "measured.py").write_text(MEASURED)
  command, env = [sys.executable, str(tmp_path / "measured.py")], ENVIRONMENT | {"PYTHONPATH": ROOT}
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as benchmark:
    assert benchmark.stdout.readline() == "began\n"
    benchmark.kill()
    assert benchmark.stdout.read() == ""


def test_a_section_has_minutes_dates_and_rounded_numbers():
  """The heading gives minutes and dates of the runs; numbers in tables have three digits."""
  runs = [{"process_seconds": 600.0, "date": f"2030-01-0{day}"} for day in (2, 1, 2)]
  figures = {"machine": runner.machine(), "command": "c", "quick": False, "seconds": 1.0}
  figures |= {"runs": runs, "targets": [runner.target("ratio", ">=", 2, 1.2345, ", noisy")]}
  figures |= {"tables": {"Rows": [{"a": 1234567, "b": None}, {"a": 0.00001, "c": "x"}]}}
  text = runner.document(figures)
  assert text.startswith("`c`, 30 minutes, 2030-01-01 and 2030-01-02;")
  assert "| ratio | >= 2 | 1.23 | **no**, noisy |" in text
  assert "### Rows\n\n| a | b | c |\n| --- | --- | --- |\n| 1,234,567 |  |  |" in text
  assert "| 1e-05 |  | x |" in text


def test_the_peer_gets_one_row_for_each_leaf(source):
  """As in TRL's converter, each alternative step is a row of its own that repeats its prefix."""
  rows = training.peer_rows([source / "phase2_train.jsonl"], "paper")
  assert len(rows) == 10
  assert rows[:2] == [
    {"prompt": "phase2_train 0?", "completions": ["Add.", "Two."], "labels": [True, False]},
    {"prompt": "phase2_train 0?", "completions": ["Add.", "6."], "labels": [True, True]},
  ]
  rows = training.peer_rows([source / "phase1_train.jsonl"], "trl")  # for which neutral is wrong
  assert [row["labels"] for row in rows[:2]] == [[True, False], [True, False]]


def test_trees_hold_the_labels_of_the_rows(tmp_path):
  """A tree has each label of its problem's rows once, and both labels where rows disagree."""
  rows = [
    {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]},
    {"prompt": "q", "completions": ["a"], "labels": [True]},
    {"prompt": "p", "completions": ["a", "c"], "labels": [True, True]},
    {"prompt": "p", "completions": ["a"], "labels": [False]},
  ]
  write_lines(tmp_path / "rows.jsonl", rows)
  chains = training.chains(str(tmp_path / "rows.jsonl"))
  encode = lambda chain: token_tree.encode(chain, tiny.TOKENIZER, tiny.contract())
  merged = training.merged((chain.problem, encode(chain)) for chain in chains)
  assert [tiny.classes(tree) for tree in merged] == [[0, 2, 0, 2], [2]]
  assert [len(tree) for tree in merged] == [9, 5]


def test_each_side_trains_in_its_fastest_form(tmp_path, monkeypatch):
  """A few updates choose dtype and allocator of all seeds, by the median without the first."""
  calls = []

  def train(settings, environment):
    allocator = "jemalloc" if "LD_PRELOAD" in environment else "glibc"
    assert ("GLIBC_TUNABLES" in environment) == (allocator == "glibc")
    form = (settings["dtype"], allocator)
    calls.append((form, settings["seed"], settings["max_updates"]))
    seconds = 8.0 - 2 * (form[0] == "bfloat16") - faster * (form[1] == "jemalloc")
    return {"update_seconds": [20.0 - seconds, seconds, 90.0, seconds]}

  def apart(function, *args, cores, **environment):
    return function(*args, environment)

  monkeypatch.setattr(runner, "apart", apart)
  monkeypatch.setattr(ctypes.util, "find_library", {"jemalloc": "libjemalloc.so.2"}.get)
  side = training.Side("side", train, {}, (), [])
  glibc, jemalloc = ("bfloat16", "glibc"), ("bfloat16", "jemalloc")
  tried = [(form, 1, training.TRIED) for form in (("float32", "glibc"), glibc, jemalloc)]
  for faster, chosen in ((1.0, jemalloc), (-1.0, glibc)):
    args = training.Args(seeds=(1, 2), work=tmp_path / chosen[1])
    runs = side.runs(args, training.SETTINGS, {})
    assert calls == [*tried, (chosen, 1, -1), (chosen, 2, -1)]
    assert [run["form"] for run in runs] == [chosen] * 2
    seconds = {
      "float32, glibc": 8.0,
      "bfloat16, glibc": 6.0,
      "bfloat16, jemalloc": 6.0 - faster,
    }
    assert training.tries(runs) == [{"side": "side"} | seconds]
    assert side.runs(args, training.SETTINGS, {}) == runs and len(calls) == 5
    calls.clear()
  monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
  args = training.Args(dtypes=("float32",), work=tmp_path / "one")
  assert training.tries(side.runs(args, training.SETTINGS, {})) == []
  assert calls == [(("float32", "glibc"), 0, -1)]  # with one form there is nothing to choose


def test_training_is_compared_with_the_peer():
  """Speed and AUROC are compared on the same test labels; a difference within noise is marked."""
  labels, problems = [[1, 0], [1, 1], [0, 1], [1, 0]], ["p", "p", "q", "r"]

  def run(side, seconds, good):
    scores = [[0.5 + (x - 0.5) * good for x in row] for row in labels]
    found = {"side": side, "steps": 20, "train_seconds": seconds, "train_cpu_seconds": seconds}
    return found | {"after": {"scores": scores, "labels": labels}}

  ours = run(training.OURS, 2.0, 1)
  faster, *_, auroc = training.targets(2.0, [ours, run(training.PEER, 8.0, -1)], problems)
  assert (faster["measured"], faster["asked"], faster["met"]) == (4.0, ">= 2", True)
  assert auroc["measured"] == 1.0 and auroc["met"] and "within noise" not in auroc["note"]
  equal = run(training.PEER, 8.0, 1)
  within = training.targets(2.0, [ours, equal], problems)[-1]
  assert within["note"] == ", 95 % [0.000, 0.000], within noise: not distinguishable"
  assert within["target"] == auroc["target"]  # so that two runs can be compared
  assert training.targets(2.0, [ours], problems) == []
  equal["after"]["labels"] = labels[::-1]
  with pytest.raises(ValueError, match="other test labels"):
    training.targets(2.0, [ours, equal], problems)


def test_the_peer_counts_what_it_trains_on(tmp_path):
  """The peer's figures count the batches of its updates, not those that its loader prefetches."""
  pytest.importorskip("trl", reason="the peer of the training benchmark is installed apart")
  transformers = pytest.importorskip("transformers")
  tokenizers = pytest.importorskip("tokenizers")
  from benchmarks import trl_peer

  vocabulary = {"[PAD]": 0, "a": 1, "b": 2, "\n": 3}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[PAD]"))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "removed")
  sizes = {"vocab_size": 4, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
  config = transformers.LlamaConfig(**sizes, num_attention_heads=1, pad_token_id=0)
  transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
  tokenizer.save(str(tmp_path / "model/tokenizer.json"))
  row = {"prompt": "a b", "completions": ["a", "b b"], "labels": [True, False]}
  write_lines(tmp_path / "rows.jsonl", [row] * 2)
  settings = training.SETTINGS | {"batch": 1, "max_updates": 1, "learning_rate": 0.1, "seed": 0}
  settings |= {"model": str(tmp_path / "model"), "max_length": 64, "threads": 1, "dtype": "float32"}
  result = trl_peer.measure(settings | dict.fromkeys(("train", "test"), tmp_path / "rows.jsonl"))
  assert (result["updates"], result["steps"], result["tokens"], result["slots"]) == (1, 2, 7, 7)
  assert len(result["losses"]) == 1 and result["after"]["labels"] == [[1, 0], [1, 0]]
  assert np.abs(np.subtract(result["after"]["scores"], result["before"]["scores"])).max() > 1e-3


def test_both_forms_train_side_by_side():
  """Trees and paths take turns in proportion to their batches, over whole epochs."""
  batches = {
    form: [types.SimpleNamespace(form=form, i=i) for i in range(count)]
    for form, count in {"paths": 4, "trees": 1}.items()
  }
  turns = []

  def update(batch):
    turns.append((batch.form, batch.i))
    return 10.0 * (batch.i + 1)

  assert tree.side_by_side(update, batches, 2) == {"paths": 100.0, "trees": 10.0}
  assert [form for form, _ in turns] == ["paths", "trees", "paths", "paths", "trees", "paths"]


def test_solutions_without_shared_steps_pack_alike():
  """With one solution for each problem, trees and paths pack into the same rows."""
  solutions = [StepTree(f"p{i}", ("ab", "c" * i), (-1, 0), (1, -1)) for i in range(1, 9)]
  pack = functools.partial(step_dataset.pack, solutions, tiny.TOKENIZER, tiny.contract(), 32)
  assert pack(True)[0].hash == pack(False)[0].hash


def test_scaling_covers_the_asked_slices():
  """The scaling benchmark has every model and slice of the targets and production configs."""
  jobs = [scaling.job(case) for case in scaling.CASES]
  covered = {(pathlib.Path(j.config.init.checkpoint).name, j.topology) for j in jobs}
  asked = {("Llama-3.2-1B", "v5e:4x4"), ("Qwen2.5-32B", "v5p:8x8x16")}
  for topology in ("v5e:8x8", "v5p:4x4x4", "v6e:8x8", "v5p:8x8x16"):
    asked.add(("Qwen2.5-Math-7B", topology))
  assert asked <= covered
  for path in (ROOT / "configs").glob("*.py"):
    if "--topology=" in (text := path.read_text()):
      topology = text.split("--topology=")[1].split()[0]
      name = path.stem.removeprefix("prm800k_")
      assert any((c.config, c.topology) == (name, topology) for c in scaling.CASES)
  assert (jobs[0].config.train.batch_rows, jobs[0].config.train.steps) == (64, 237)  # of 32 and 475
