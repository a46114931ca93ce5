"""benchmarks/: one smoke test for each, and the properties that their figures rest on."""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import sys
import types

import numpy as np
import pytest
import tiny
from conftest import ROOT, completion, make_row, run_script, step

from benchmarks import kernel, packed_training, runner, scaling, slices, training, tree
from prm_jax import config as config_lib
from prm_jax.input_pipeline import step_dataset, token_tree
from prm_jax.types import StepTree

SECTIONS = (
  "aggregation", "reranking", "tree", "training", "training_phase1", "kernel", "scaling", "loading"
)  # fmt: skip


def benchmark(tmp_path, *arguments):
  """The figures of a quick run, and what it printed."""
  path = tmp_path / "figures.json"
  done = run_script("benchmark.py", *arguments, "--quick", f"--json={path}")
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(path.read_text()), done.stdout


@pytest.fixture
def source(tmp_path):
  """A folder of PRM800K files: five solutions each; a last step has two completions."""
  (tmp_path / "source").mkdir()
  for name in ("phase1_train", "phase1_test", "phase2_train", "phase2_test"):
    with (tmp_path / f"source/{name}.jsonl").open("w") as file:
      for i in range(5):
        last = step(completion("Two.", -1), completion("6.", 0), chosen=None)
        steps = [step(completion("Add.", 1)), last]
        row = make_row(steps, "found_error", problem=f"{name} {i}?")
        file.write(json.dumps(row) + "\n")
  return tmp_path / "source"


@pytest.fixture
def model(tmp_path, arithmetic_data):
  """A tiny public model with a tokenizer."""
  tiny.public(tmp_path / "model", 320, arithmetic_data / "tokenizer.model")
  return tmp_path / "model"


def test_aggregation(tmp_path):
  """Exact methods agree with float64, random trials within their noise; --docs keeps the page."""
  page, around = tmp_path / "page.md", "# Title\n\n<!-- aggregation: {} -->\n\nAfter.\n"
  page.write_text(around.format("begin -->\nold\n<!-- aggregation: end"))
  figures, text = benchmark(tmp_path, "aggregation", "--docs", f"--docs_file={page}")
  rows = [row for rows in figures["tables"].values() for row in rows]
  for row in rows:
    if "off" in row:
      assert row["off"] < 5, row
    elif "error" in row:
      assert row["error"] < 1e-6, row
  assert all(row["s"] > 0 for row in rows) and len(figures["targets"]) == 10
  assert all(np.isfinite(target["measured"]) for target in figures["targets"])
  marked = f"begin -->\n\n{text.rstrip()}\n\n<!-- aggregation: end"
  assert page.read_text() == around.format(marked)


def test_reranking(tmp_path):
  """rerank.py is timed on a generated file, and the reading of its bundle."""
  figures, text = benchmark(tmp_path, "reranking")
  assert len(figures["targets"]) == 3 and "| 1,000 |" in text
  assert all(target["measured"] > 0 for target in figures["targets"])


def test_tree(tmp_path, source, model):
  """Real solutions and generated ones are trained and scored in all forms."""
  figures, _ = benchmark(tmp_path, "tree", f"--source={source}", f"--model={model}")
  forms, trained, scored = figures["tables"].values()
  assert len(forms) == 9 and all(row["seconds an epoch"] > 0 for row in forms)
  phase1 = trained[0]
  assert phase1["paths"] == 2 * phase1["problems"] and phase1["labels"] == 3 * phase1["problems"]
  assert phase1["distinct tokens"] < phase1["flattened tokens"]
  assert scored[-1]["flattened / distinct"] == 1 < scored[0]["flattened / distinct"]
  assert len(figures["targets"]) == 5


def test_training(tmp_path, source, model):
  """This project's side trains on the peer's rows in both layouts, and is not run again."""
  arguments = ("training", "--peer=none", f"--source={source}", f"--model={model}", "--seeds", "0")
  arguments = (*arguments, f"--work={tmp_path}/work")
  figures, _ = benchmark(tmp_path, *arguments)
  packed, trees = figures["runs"]
  assert packed["steps"] == packed["targets"]  # every label of the peer's rows is read
  assert trees["targets"] < trees["steps"]  # a tree reads a shared label once
  assert packed["after"]["labels"] == trees["after"]["labels"] and len(packed["losses"]) == 1
  assert benchmark(tmp_path, *arguments)[0]["runs"] == figures["runs"]


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_loading(tmp_path, model):
  """All tensors are loaded, each load in a process of its own."""
  figures, text = benchmark(tmp_path, "loading", "--layers=1", f"--model={model}")
  small, large = figures["tables"]["Loads"]
  assert 1000 * small["shards GB"] == pytest.approx(4 * small["million parameters"])  # float32
  assert large["million parameters"] > 2 * 0.152 * 64  # embedding and language-model head
  assert large["highest GB"] >= large["growth GB"] > 0 and "| model | 1 |" in text


@pytest.mark.slow
def test_scaling(tmp_path):
  """Jobs of one and two hosts give the losses of one device."""
  figures, text = benchmark(tmp_path, "scaling", "--skip", "compiled")
  assert figures["targets"][0]["met"] and "| strong | 2 | 1 x 4 x 2 |" in text


@pytest.mark.slow
def test_kernel(tmp_path):
  """Attention alone is compiled in all forms; the kernel needs less than splash attention."""
  pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install libtpu")
  figures, _ = benchmark(tmp_path, "kernel", f"--work={tmp_path}")
  assert len(figures["runs"]) == 4 and all(target["met"] for target in figures["targets"])


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("agregation",), "there is no agregation"),
    (("aggregation", "--docs", f"--docs_file={__file__}"), "<!-- aggregation: begin -->"),
    (("scaling", "--skip", "whole"), "--skip whole: expected one of"),
    (("training", "--rows=0"), "at least 1"),
    (("training", "--threads=9999"), "9999: only"),
    (("tree", "--source=nowhere"), "no such file"),
  ],
)
def test_mistakes_are_errors_before_any_work(arguments, message):
  """A misspelt name, a wrong value or a missing file is named in the message."""
  done = run_script("benchmark.py", *arguments)
  assert done.returncode != 0 and message in done.stdout + done.stderr


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_of_tables_has_the_markers(name):
  """--docs finds its place."""
  before, after = runner.between_markers(ROOT / "docs/benchmark_tables.md", name)
  assert before and after


def test_figures_are_measured_once_for_the_same_content(tmp_path):
  """Settings and the contents of files decide; a failed measurement leaves no file."""
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
  return os.environ.get(name), os.environ.get("HOME"), len(runner.usable_cores())


def test_a_measurement_has_its_own_process():
  """With the given variables and cores; an abort of the process is an error here."""
  cores = runner.usable_cores()
  found = runner.apart(surroundings, "A_NAME", cores=cores[:1], A_NAME="value", HOME=None)
  assert found == ("value", None, 1)
  assert "A_NAME" not in os.environ and runner.usable_cores() == cores
  with pytest.raises(RuntimeError):
    runner.apart(os.abort)


def test_the_page_of_a_benchmark():
  """The heading has the minutes and days of the runs; cells have three digits."""
  runs = [{"process_seconds": 600.0, "date": f"2030-01-0{day}"} for day in (2, 1, 2)]
  figures = {"machine": runner.machine(), "command": "c", "quick": False, "seconds": 1.0}
  figures |= {"runs": runs, "targets": [runner.target("ratio", ">=", 2, 1.2345, ", noisy")]}
  figures |= {"tables": {"Rows": [{"a": 1234567, "b": None}, {"a": 0.00001, "c": "x"}]}}
  text = runner.document(figures)
  assert text.startswith("`c`, 30 minutes, 2030-01-01 and 2030-01-02;")
  assert "| ratio | >= 2 | 1.23 | **no**, noisy |" in text
  assert "### Rows\n\n| a | b | c |\n| --- | --- | --- |\n| 1,234,567 |  |  |" in text
  assert "| 1.0e-05 |  | x |" in text


def test_the_peer_gets_one_row_a_leaf(source):
  """As by TRL's converter each alternative repeats its prefix; neutral counts as right."""
  rows, left_out = training.peer_rows([source / "phase2_train.jsonl"], "paper")
  assert len(rows) == 10 and not left_out
  assert rows[:2] == [
    {"prompt": "phase2_train 0?", "completions": ["Add.", "Two."], "labels": [True, False]},
    {"prompt": "phase2_train 0?", "completions": ["Add.", "6."], "labels": [True, True]},
  ]
  rows, _ = training.peer_rows([source / "phase1_train.jsonl"], "trl")  # its neutral is wrong
  assert [row["labels"] for row in rows[:2]] == [[True, False], [True, False]]


def test_layouts_hold_the_same_labels(tmp_path):
  """A tree has each label of its problem's rows once, and two where they disagree."""
  rows = [
    {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]},
    {"prompt": "q", "completions": ["a"], "labels": [True]},
    {"prompt": "p", "completions": ["a", "c"], "labels": [True, True]},
    {"prompt": "p", "completions": ["a"], "labels": [False]},
  ]
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  chains = packed_training.chains(str(tmp_path / "rows.jsonl"))
  encode = lambda chain: token_tree.encode(chain, tiny.TOKENIZER, tiny.contract())
  apart, merged = (packed_training.laid_out(chains, encode, each) for each in ("packed", "trees"))
  assert [tree.read_targets.tolist() for tree in apart] == [[2, 0], [2], [2, 2], [0]]
  assert [tree.read_targets.tolist() for tree in merged] == [[0, 2, 0, 2], [2]]
  assert [len(tree) for tree in merged] == [9, 5]


def test_scores_go_back_to_their_rows():
  """However rows are packed, a row's scores are those at its own separators."""
  lengths = [9, 30, 5, 22, 14, 30, 3]
  rows = [
    token_tree.TokenTree(
      tokens=np.full(length, i),
      positions=np.arange(length),
      subtree_end=np.full(length, length),
      previous=np.arange(length) - 1,
      read_positions=np.array([0, length - 1]),
      read_targets=np.array([2, 0]),
    )
    for i, length in enumerate(lengths)
  ]

  def read(params, batch):  # a score that tells row and position
    at = [np.take_along_axis(x, batch.read_positions, 1) for x in (batch.tokens, batch.positions)]
    score = at[0] / 10 + at[1] / 1000
    return np.log(np.stack([1.1 - score, score + 1e-12, 0 * score + 1e-12], -1))

  c = config_lib.Experiment(
    data=config_lib.Data(row_length=32), train=config_lib.Train(batch_rows=2)
  )
  result = packed_training.evaluate(None, rows, c, read, lambda batch: batch)
  expected = [[i / 10, i / 10 + (length - 1) / 1000] for i, length in enumerate(lengths)]
  np.testing.assert_allclose(result["scores"], expected, atol=1e-9)
  assert result["labels"] == [[1, 0]] * 7


def test_training_is_held_against_the_peer():
  """Speed over all runs of a side, AUROC over the same resampled problems, and its noise."""
  labels, problems = [[1, 0], [1, 1], [0, 1], [1, 0]], ["p", "p", "q", "r"]

  def side(seconds, good):
    scores = [[0.5 + (x - 0.5) * good for x in row] for row in labels]
    run = {"steps": 20, "train_seconds": seconds, "train_cpu_seconds": seconds}
    return [run | {"layout": "trees", "after": {"scores": scores, "labels": labels}}]

  sides = {training.PEER: side(8.0, -1), "this project, trees": side(2.0, 1)}
  faster, *_, auroc = training.targets("phase2", sides, problems)
  assert (faster["measured"], faster["target"], faster["met"]) == (4.0, ">= 2", True)
  assert auroc["measured"] == 1.0 and auroc["met"] and "note" not in auroc
  sides[training.PEER] = side(8.0, 1)
  assert "not distinguishable" in training.targets("phase2", sides, problems)[-1]["note"]
  assert training.targets("phase2", {"this project, trees": side(1.0, 1)}, problems) == []
  sides[training.PEER][0]["after"]["labels"] = labels[::-1]
  with pytest.raises(ValueError, match="other test labels"):
    training.targets("phase2", sides, problems)


def test_the_peer_counts_what_it_trains_on(tmp_path):
  """One update of TRL's trainer is one batch, though its loader collates the next one as well."""
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
  (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
  settings = training.SETTINGS | {"batch": 1, "max_updates": 1, "learning_rate": 0.1, "seed": 0}
  settings |= {"model": str(tmp_path / "model"), "pad_id": 0, "max_length": 64, "threads": 1}
  result = trl_peer.measure(settings | dict.fromkeys(("train", "test"), tmp_path / "rows.jsonl"))
  assert (result["updates"], result["steps"], result["tokens"], result["slots"]) == (1, 2, 7, 7)
  assert len(result["losses"]) == 1 and result["after"]["labels"] == [[1, 0], [1, 0]]
  assert np.abs(np.subtract(result["after"]["scores"], result["before"]["scores"])).max() > 1e-3


def test_epochs_run_side_by_side():
  """Forms take turns in proportion; of padded batches two of a length stand for the others."""
  lengths = {"padded": [8, 4, 8, 8, 8], "packed": [6] * 4, "trees": [6]}
  batches = {
    form: [types.SimpleNamespace(tokens=np.zeros((1, n)), form=form, i=i) for i, n in enumerate(ns)]
    for form, ns in lengths.items()
  }
  turns = []

  def update(batch):
    turns.append((batch.form, batch.i))
    return 10.0 * (batch.i + 1)

  seconds = tree.side_by_side(update, batches, 2)
  assert seconds == {"padded": 4 * (10 + 50) / 2 + 20, "packed": 100.0, "trees": 10.0}
  assert [form for form, _ in turns].count("trees") == 2
  assert {i for form, i in turns if form == "padded"} == {0, 1, 4}
  places = [turns.index(("packed", i)) for i in range(4)]
  assert all(later - place > 1 for place, later in itertools.pairwise(places))


def test_nothing_shared_gives_the_same_rows():
  """One path a problem packs into the same rows with and without merging."""
  solutions = [StepTree(f"p{i}", ("ab", "c" * i), (-1, 0), (1, -1)) for i in range(1, 9)]
  pack = functools.partial(step_dataset.pack, solutions, tiny.TOKENIZER, tiny.contract(), 32)
  assert pack(True)[0].hash == pack(False)[0].hash


def test_the_kernel_is_held_against_the_leaner_splash():
  """The target is the worst ratio of all sizes; a form that does not fit needs more than any."""
  done = []
  for case in kernel.cases():
    size = 2**20 * (1 + list(kernel.FORMS).index(case.form))
    done.append({"case": dataclasses.asdict(case), "temporaries": size, "temp_size": 10 * size})
  assert [(t["measured"], t["met"]) for t in kernel.targets(done)] == [(0.5, True)] * 4
  assert "largest of 18" in kernel.targets(done)[0]["what"]
  done[1] |= {"temporaries": None, "temp_size": None}  # splash attention with one backward kernel
  (first, *_) = kernel.grouped(done, whole=False)
  assert kernel.row(first)["splash, one backward kernel"] == "does not fit"
  assert kernel.targets(done[:4])[0]["measured"] == pytest.approx(1 / 3)
  done[0] |= {"temporaries": None, "temp_size": None}
  assert not kernel.targets(done)[0]["met"]


def test_every_asked_slice_is_compiled(tmp_path):
  """1.2B, 7B and 32B on the slices of the targets, each production config, as much data each."""
  jobs = [slices.job(case, tmp_path) for case in slices.CASES]
  there = {(pathlib.Path(j.config.init.checkpoint).name, j.topology) for j in jobs}
  asked = {("Llama-3.2-1B", "v5e:4x4"), ("Qwen2.5-32B", "v5p:8x8x16")}
  for topology in ("v5e:8x8", "v5p:4x4x4", "v6e:8x8", "v5p:8x8x16"):
    asked.add(("Qwen2.5-Math-7B", topology))
  assert asked <= there
  for path in (ROOT / "configs").glob("*.py"):
    if "--topology=" in (text := path.read_text()):
      topology = text.split("--topology=")[1].split()[0]
      name = path.stem.removeprefix("prm800k_")
      assert any((c.config, c.topology) == (name, topology) for c in slices.CASES)
  assert (jobs[0].config.train.batch_rows, jobs[0].config.train.steps) == (64, 237)  # of 32 and 475


def test_devices_exchange_what_the_step_says(arithmetic_data):
  """One device exchanges nothing; eight hold an eighth of what divides, and pay in bytes."""
  c = config_lib.read(str(scaling.CONFIG))
  alone, eight = (
    scaling.exchanged(scaling.changed(c, scaling.settings(arithmetic_data, axes, 8, 2)))
    for axes in ((1, 1, 1), (1, 4, 2))
  )
  state, count, sent = ("MB of state a device", "collectives a step", "MB a device and step")
  assert alone[count] == alone[sent] == 0 and eight[count] > 0 and eight[sent] > 0
  assert alone[state] / 8 < eight[state] < alone[state] / 4
