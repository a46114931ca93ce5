"""scripts/benchmark.py: all methods measure the same, and the figures go where they should."""

import itertools
import json
import os
import pathlib
import sys
import types

import jax
import numpy as np
import pytest
import tiny
from conftest import ROOT, completion, make_row, run_script, step

from prm_jax import config as config_lib
from prm_jax.input_pipeline import prefix_tree, token_tree, tokenizers
from prm_jax.training import step as step_lib

EXACT = ("numpy_sort", "numpy_argsort", "library", "library_bfloat16", "library_all_n")
DOCS = (
  "# Title\n\nBefore.\n\n<!-- aggregation: begin -->\nold\n<!-- aggregation: end -->\n\nAfter.\n"
)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
  """One quick run: its figures, what it printed, and the documentation it wrote into."""
  directory = tmp_path_factory.mktemp("benchmark")
  (directory / "docs.md").write_text(DOCS)
  done = run_script(
    "benchmark.py", "aggregation", "--quick", "--skip", "rerank",
    f"--json={directory}/figures.json", "--docs", f"--docs_file={directory}/docs.md",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  figures = json.loads((directory / "figures.json").read_text())
  return figures, done, (directory / "docs.md").read_text()


def methods(figures, names):
  return [
    (f"{size['candidates']} {name}", size["methods"][name])
    for size in figures["sizes"]
    for name in names
    if name in size["methods"]
  ]


def test_exact_methods_agree(quick):
  """numpy, where nothing ties, and the library give the float64 expectation of each problem."""
  for name, about in methods(quick[0], (*EXACT, "library_jit")):
    assert about["largest_error"] < 1e-6, name
    np.testing.assert_allclose(about["curve"], about["expected"], atol=1e-6, err_msg=name)


def test_random_trials_agree_within_their_noise(quick):
  """What the exact curve is compared with estimates the same curve."""
  for name, about in methods(quick[0], ("loop", "numpy_trials")):
    off = np.abs(np.subtract(about["curve"], about["expected"]))
    assert (off <= 5 * np.array(about["standard_error"]) + 1e-9).all(), name
  votes = quick[0]["sizes"][0]["methods"]
  estimate = votes["majority_trials"]
  off = np.abs(np.subtract(estimate["curve"], votes["majority"]["curve"]))
  # An outcome that none of 64 orders showed is missing from the standard error.
  assert (off <= 5 * np.array(estimate["standard_error"]) + 2e-3).all()
  assert votes["numpy_steps"]["difference"] < 1e-4  # log scores down to -30


def test_figures_have_their_fields(quick):
  """The JSON file holds times, memory, machine and targets."""
  figures, _, _ = quick
  assert {"machine", "command", "quick", "seconds", "sizes", "targets"} <= figures.keys()
  assert {"processor", "cores", "date", "python", "jax", "numpy"} <= figures["machine"].keys()
  for name, about in methods(figures, (*EXACT, "majority", "weighted", "jackknife", "band")):
    times = ("cpu_seconds", "wall_seconds", "first_wall_seconds", "peak_gb", "gb_before")
    assert all(about[key] > 0 for key in times), name
  for row in figures["targets"]:
    assert {"what", "target", "measured", "met"} == row.keys()
    assert np.isfinite(row["measured"])


def test_the_tables_go_between_the_markers(quick):
  """--docs replaces what stood between the markers by what was printed, and nothing else."""
  _, done, text = quick
  before, old, after = DOCS.partition("\nold\n")
  assert text == f"{before}\n\n{done.stdout.rstrip()}\n\n{after}"
  assert old and "| `best_of_n` |" in text and "(--quick)" in text


def test_the_benchmark_of_rerank(monkeypatch):
  """rerank.py is timed on a generated file, and the reading of its bundle; both are in the page."""
  monkeypatch.syspath_prepend(ROOT / "scripts")
  from benchmarks import reranking

  figures = reranking.run(3, 5)
  assert (figures["problems"], figures["candidates"], figures["lines"]) == (3, 5, 15)
  assert all(figures[key] > 0 for key in ("seconds", "peak_gb", "bundle_seconds", "bundle_gb"))


def test_documentation_without_markers_is_an_error_before_any_work(tmp_path):
  """A quarter of an hour is not spent on figures that have no place."""
  (tmp_path / "docs.md").write_text("# Title\n")
  done = run_script("benchmark.py", "aggregation", "--docs", f"--docs_file={tmp_path}/docs.md")
  assert done.returncode == 1
  assert "<!-- aggregation: begin -->" in done.stderr and "500 x" not in done.stderr


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("agregation",), "agregation"),
    (("aggregation", "--skip", "reranking"), "reranking"),
    (("training", "--source=nowhere", "--model=none.gguf"), "none.gguf: no such file"),
    (("training", "--rows=0"), "at least 1"),
    (("training", "--layouts", "trees", "trees"), "--layouts: at least one, each once"),
    (("tree", "--layers=0"), "at least 1"),
    (("tree", "--source=nowhere"), "no such file"),
    (("training", "--rows_of=phase1", "--source=nowhere", f"--model={__file__}"), "phase1_train"),
    (("training", "--peer=openr"), "openr"),
    (("training", "--threads=9999"), "9999: only"),
  ],
)
def test_mistakes_are_errors_before_any_work(arguments, message):
  """A misspelt benchmark or part, a missing file, or too few cores: named in the message."""
  done = run_script("benchmark.py", *arguments)
  assert done.returncode != 0 and message in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["aggregation", "training", "training_phase1", "tree"])
def test_the_documentation_has_the_markers(name):
  """--docs finds its place in docs/benchmarks.md."""
  text = pathlib.Path(ROOT, "docs/benchmarks.md").read_text()
  assert text.count(f"<!-- {name}: begin -->") == text.count(f"<!-- {name}: end -->") == 1


@pytest.fixture
def training(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / "scripts")
  from benchmarks import training

  return training


def write_source(directory):
  """Five solutions a split; the second step of each has two completions."""
  directory.mkdir()
  for split in ("train", "test"):
    with (directory / f"phase2_{split}.jsonl").open("w") as file:
      for i in range(5):
        last = step(completion("Two.", -1), completion("6.", 0), chosen=None)
        steps = [step(completion("Add.", 1)), last]
        row = make_row(steps, "found_error", problem=f"{split} {i}?")
        file.write(json.dumps(row) + "\n")
  return directory


def test_the_peer_gets_one_row_a_leaf(training, tmp_path):
  """As TRL's converter: each alternative repeats its prefix; neutral counts as right."""
  file = write_source(tmp_path / "source") / "phase2_train.jsonl"
  rows, left_out = training.peer_rows([file], "paper")
  assert len(rows) == 10 and not left_out
  assert rows[:2] == [
    {"prompt": "train 0?", "completions": ["Add.", "Two."], "labels": [True, False]},
    {"prompt": "train 0?", "completions": ["Add.", "6."], "labels": [True, True]},
  ]
  rows, _ = training.peer_rows([file, file], "trl")  # its neutral is wrong; nothing of phase 2
  assert not rows
  file = file.rename(file.with_name("phase1_train.jsonl"))
  rows, _ = training.peer_rows([file, file], "trl")
  assert len(rows) == 20 and [row["labels"][1] for row in rows[:2]] == [False, False]


def figures_of(settings, good):
  """What a side would write: `good` of its right steps score above its wrong ones."""
  lines = pathlib.Path(settings["test"]).read_text().splitlines()
  labels = [[int(x) for x in json.loads(line)["labels"]] for line in lines]
  scores = [[0.5 + (x - 0.5) * good for x in row] for row in labels]
  read = {"scores": scores, "labels": labels, "seconds": 1.0}
  out = {"updates": 3, "train_seconds": 2.0, "train_cpu_seconds": 4.0, "slots": 300, "tokens": 200}
  out |= {"steps": 20, "rows": 6, "losses": [1.0, 0.5], "versions": {"x": "1"}}
  return out | {"before": read | {"scores": [[0.5] * len(row) for row in labels]}, "after": read}


@pytest.fixture
def benchmark(training, tmp_path, monkeypatch):
  """Arguments of a benchmark whose sides are not run; and a list of (side, task, seed, cores)."""
  (tmp_path / "model.gguf").write_text("one")
  calls = []

  def child(python, script, given, log, threads):
    settings = json.loads(pathlib.Path(given).read_text())
    side = script.stem.removesuffix("_training").removesuffix("_peer")
    calls.append((side, settings.get("task"), settings.get("seed"), threads))
    if settings.get("task") == "export":
      return pathlib.Path(settings["output"]).mkdir()
    figures = figures_of(settings, 1 if side == "packed" else -1)
    if side == "packed":
      seconds = {"packed": 1.0, "trees": 0.5}[settings["layout"]]
      figures |= {"layout": settings["layout"], "targets": 15, "batch_rows": 1}
      figures |= {
        "train_seconds": seconds,
        "train_cpu_seconds": 3 * seconds,
        "compile_seconds": 2.0,
      }
    return pathlib.Path(settings["output"]).write_text(json.dumps(figures))

  words = types.SimpleNamespace(encode=lambda text: text.split() or [text], bos_id=None)
  monkeypatch.setattr(training, "child", child)
  monkeypatch.setattr(training, "usable_cores", lambda: [0, 1, 2])
  monkeypatch.setattr(training, "peer_versions", lambda python: {"trl": python})
  monkeypatch.setattr(training.tokenizers, "load", lambda path: words)
  args = types.SimpleNamespace(
    source=write_source(tmp_path / "source"), model=tmp_path / "model.gguf", quick=False, rows=6,
    config=ROOT / "configs/prm800k_smollm2_135m.py", test_rows=8, seeds=(0, 1), peer="trl",
    peer_seeds=(0,), threads=3, peer_python="python", work=tmp_path / "work", rows_of="phase2",
    layouts=("packed",), row_length=None, devices=1,
  )  # fmt: skip
  return args, calls


OURS = [("packed", "train", 0, 3), ("packed", "train", 1, 3)]
EXPORT, PEER = [("packed", "export", None, 3)], [("trl", None, 0, 3)]


def test_a_training_benchmark_goes_on_where_it_was(training, benchmark, monkeypatch):
  """Finished runs are read from their files; those of another model, code or packages are not."""
  args, calls = benchmark

  def measured():
    calls.clear()
    training.run(args)
    return calls

  result = training.run(args)
  assert calls == EXPORT + OURS + PEER  # the peer is prepared before anything long
  calls.clear()
  assert training.run(args) == result and not calls
  args.row_length = 2048
  assert measured() == OURS  # the peer has no packed rows
  args.rows = 5
  assert measured() == OURS + PEER
  args.model.write_text("two")
  assert measured() == EXPORT + OURS + PEER
  args.peer_python = "other packages"
  assert measured() == PEER
  monkeypatch.setattr(training, "source_hash", lambda config: "other code")
  assert measured() == OURS
  monkeypatch.setattr(training, "sha256", lambda path: path.name)
  assert measured() == EXPORT + OURS + PEER  # model and scripts


def test_the_comparison_and_its_tables(training, benchmark):
  """Rates over all runs of a side, AUROC by seed, differences with their noise, and names."""
  args, calls = benchmark
  args.layouts = ("packed", "trees")
  result = training.run(args)
  assert calls == EXPORT + [OURS[0]] * 2 + [OURS[1]] * 2 + PEER
  measured = [t["measured"] for t in result["targets"]]
  packed, trees = [2.0, 2 / 3, 4 / 3, 1.0], [4.0, 0.8, 8 / 3, 1.0]
  assert measured == pytest.approx(packed + trees)
  wanted = [">= 1.3", "", "", ">= 0", ">= 2", "", "", ">= 0"]
  assert [t["target"] for t in result["targets"]] == wanted
  auroc = result["auroc"]
  by_seed = {"before": [0.5, 0.5], "after": [1.0, 1.0]}
  assert auroc["sides"]["this project, trees"]["by_seed"] == by_seed
  assert auroc["differences"]["this project, packed"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
  text = training.tables(result | {"quick": False})
  assert "| TRL, seed 0 | 3 | 20 | 20 |" in text and "| yes |" in text
  assert "| this project, trees, seed 1 | 3 | 20 | 15 |" in text
  assert "this project, packed (seeds 0 1) - TRL (seed 0)" in text
  assert "not distinguishable" not in text
  assert "Model model.gguf; 3 threads; this project's settings prm800k_smollm2_135m.py" in text
  auroc["differences"]["this project, trees"] |= {"low": -0.1}
  text = training.tables(result | {"quick": False})
  assert text.count("| yes, within noise: not distinguishable |") == 1


def test_phase_1_has_no_test_rows(training, benchmark, monkeypatch):
  """Both files are trained on, in longer rows, with a target of their own and no AUROC."""
  args, calls = benchmark
  for split in training.SPLITS:
    file = args.source / f"phase2_{split}.jsonl"
    file.rename(file.with_name(f"phase1_{split}.jsonl"))
  args.rows_of, args.rows, args.layouts = "phase1", 99, ("trees",)
  args.seeds = (0,)
  result = training.run(args)
  assert calls == EXPORT + OURS[:1] + PEER
  assert result["rows"] == {"train": 20, "test": 0}
  assert result["settings"]["max_length"] == 2048 and result["auroc"] is None
  assert [t["target"] for t in result["targets"]] == [">= 10", "", ""]
  assert [t["met"] for t in result["targets"]] == [False, None, None]
  text = training.tables(result | {"quick": False})
  assert "AUROC" not in text and "20 training rows; left out of train: 0" in text


def test_rows_that_do_not_fit_are_left_out(training, benchmark, monkeypatch):
  """The sides would cut a long row at different places; how many there were is said."""
  args, calls = benchmark
  monkeypatch.setitem(training.SETTINGS, "max_length", 6)
  with pytest.raises(ValueError, match=r"phase2_train.jsonl: no path .* within 6 tokens"):
    training.run(args)
  assert not calls
  assert training.choose([3, 9, 4, 8, 5, 9], 3, 5, lambda row: row) == ([3, 4, 5], 2)
  monkeypatch.setitem(training.SETTINGS, "max_length", 7)  # two words, two steps, a separator each
  text = training.tables(training.run(args) | {"quick": False})
  assert "left out of train: 0 with unlabelled steps, 0 of more than 7 tokens" in text


def test_the_heading_describes_the_runs(monkeypatch):
  """Minutes and days are those of the runs, though they were measured before; paths are names."""
  monkeypatch.syspath_prepend(ROOT / "scripts")
  import benchmark as script

  args = script.Training(source=pathlib.Path("/a/some"), rows=7, work=pathlib.Path("/b"))
  assert script.command(args).endswith(" training --source some --rows 7")
  assert (args.section, script.Training(rows_of="phase1").section) == (
    "training",
    "training_phase1",
  )
  machine = script.machine() | {"date": "2030-03-03", "load_at_end": 0.0}
  figures = {"machine": machine, "command": "c", "quick": False, "seconds": 60.0}
  assert "1 minutes, 2030-03-03" in script.heading(figures)
  runs = [{"process_seconds": 600.0, "date": f"2030-01-0{day}"} for day in (2, 1, 2)]
  text = script.heading(figures | {"ours": runs[:2], "peers": runs[2:]})
  assert "`c`, 30 minutes, 2030-01-01 and 2030-01-02;" in text and "load" not in text


def test_a_failed_side_shows_its_last_words(training, tmp_path):
  """The end of its log is in the message."""
  script = tmp_path / "broken.py"
  script.write_text("raise SystemExit('no such trainer')")
  with pytest.raises(RuntimeError, match="no such trainer"):
    training.child(training.sys.executable, script, "none", tmp_path / "log", 1)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say cores")
def test_a_side_has_as_many_cores_as_threads(training, tmp_path):
  """The child is pinned, the process that starts it only meanwhile; large pages are asked for."""
  script, before = tmp_path / "cores.py", os.sched_getaffinity(0)
  script.write_text("import os; print(len(os.sched_getaffinity(0)), os.environ['GLIBC_TUNABLES'])")
  training.child(training.sys.executable, script, "none", tmp_path / "log", 1)
  assert (tmp_path / "log").read_text() == "1 glibc.malloc.hugetlb=1\n"
  assert os.sched_getaffinity(0) == before


def test_an_environment_of_somebody_else_is_left_alone(training, tmp_path):
  """Only a directory that this script made is replaced."""
  (tmp_path / "venv").mkdir()
  with pytest.raises(ValueError, match="move it away"):
    training.environment(tmp_path / "venv")


def test_an_interrupted_environment_is_made_again(training, tmp_path, monkeypatch):
  """Ctrl-C while it is made leaves a directory that the next run knows for its own."""

  def interrupted(command, **_):
    (tmp_path / "venv/half").mkdir()
    raise KeyboardInterrupt

  monkeypatch.setattr(training.subprocess, "run", interrupted)
  for _ in range(2):
    with pytest.raises(KeyboardInterrupt):
      training.environment(tmp_path / "venv")
  done = types.SimpleNamespace(returncode=0)
  monkeypatch.setattr(training.subprocess, "run", lambda command, **_: done)
  python = training.environment(tmp_path / "venv")
  assert python == tmp_path / "venv/bin/python" and not (tmp_path / "venv/half").exists()


def test_an_environment_without_the_peer_is_an_error(training, tmp_path):
  """Before this project's own runs, which take long."""
  python = tmp_path / "python"
  python.write_text("#!/bin/sh\necho No module named trl >&2\nexit 1\n")
  python.chmod(0o755)
  with pytest.raises(RuntimeError, match="python has no PRMTrainer of TRL:\nNo module named trl"):
    training.peer_versions(str(python))


def test_our_side_runs_the_project_s_own_code(training, tmp_path, arithmetic_data):
  """A tiny public model is trained on the rows; its scores move."""
  from benchmarks import packed_training as packed

  from prm_jax.pretrained import export

  model = config_lib.Model(width=16, layers=1, heads=2, kv_heads=1, head_size=8, mlp_width=16)
  tokenizer = tokenizers.load(arithmetic_data / "tokenizer.model")
  sizes = {"vocab_size": tokenizer.vocab_size, "num_classes": 3}
  init = jax.jit(lambda key: step_lib.init_params(key, config=model, **sizes))
  export.write(
    tmp_path / "model",
    init(jax.random.key(0)),
    model,
    tokenizer.vocab_size,
    contract=None,
    kind="causal-lm",
  )
  tokenizer.save(tmp_path / "model")
  config = "from prm_jax.config import *\ndef config():\n"
  (tmp_path / "config.py").write_text(config + "  return Experiment(train=Train(batch_rows=8))\n")
  source = write_source(tmp_path / "source")
  settings = training.SETTINGS | {"learning_rate": 0.1, "row_length": 64, "seed": 0}
  settings |= {"layout": "trees", "devices": 1}
  settings |= {"model": str(tmp_path / "model"), "config": str(tmp_path / "config.py")}
  for split in training.SPLITS:
    rows, _ = training.peer_rows([source / f"phase2_{split}.jsonl"], "paper")
    settings[split] = str(tmp_path / f"{split}.jsonl")
    pathlib.Path(settings[split]).write_text("".join(json.dumps(row) + "\n" for row in rows))
  result = packed.measure(settings)
  assert result["rows"] == 10 and result["updates"] == 1
  assert result["steps"] < result["tokens"] < result["slots"]
  # Both alternatives of a problem repeat "Add.": of 20 labels five are there twice.
  assert result["steps"] == round(result["targets"] * 20 / 15)
  assert result["after"]["labels"] == [[1, 0], [1, 1]] * 5
  assert np.ptp(np.concatenate(result["before"]["scores"])) < 1e-6  # the head is zero
  assert np.abs(np.subtract(result["after"]["scores"], result["before"]["scores"])).max() > 1e-3
  packed.export_model({"model": settings["model"], "output": str(tmp_path / "exported")})
  files = {path.name for path in (tmp_path / "exported").iterdir()}
  assert files == {"config.json", "model.safetensors", "tokenizer.model"}


def test_the_peer_counts_what_it_trains_on(training, tmp_path):
  """One update of TRL's trainer is one batch, though its loader collates the next one as well."""
  pytest.importorskip("trl", reason="the peer of the training benchmark is installed apart")
  transformers = pytest.importorskip("transformers")
  tokenizers = pytest.importorskip("tokenizers")
  from benchmarks import trl_peer

  vocabulary = {"[PAD]": 0, "a": 1, "b": 2, "\n": 3}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[PAD]"))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "removed")
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  sizes = {"vocab_size": 4, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
  config = transformers.LlamaConfig(**sizes, num_attention_heads=1, pad_token_id=0)
  transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
  row = {"prompt": "a b", "completions": ["a", "b b"], "labels": [True, False]}
  (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
  settings = training.SETTINGS | {"batch": 1, "max_updates": 1, "learning_rate": 0.1, "seed": 0}
  settings |= {"model": str(tmp_path / "model"), "tokenizer": str(tmp_path / "tokenizer.json")}
  settings |= dict.fromkeys(training.SPLITS, str(tmp_path / "rows.jsonl")) | {"pad_id": 0}
  result = trl_peer.measure(settings)
  assert (result["updates"], result["steps"], result["tokens"], result["slots"]) == (1, 2, 7, 7)
  assert len(result["losses"]) == 1 and result["after"]["labels"] == [[1, 0], [1, 0]]
  assert np.abs(np.subtract(result["after"]["scores"], result["before"]["scores"])).max() > 1e-3


def test_scores_go_back_to_their_rows(training):
  """However rows are packed, a row's scores are those at its own separators; of none, none."""
  from benchmarks import packed_training as packed

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
  result = packed.evaluate(None, rows, c, read, lambda batch: batch)
  expected = [[i / 10, i / 10 + (length - 1) / 1000] for i, length in enumerate(lengths)]
  np.testing.assert_allclose(result["scores"], expected, atol=1e-9)
  assert result["labels"] == [[1, 0]] * 7
  assert packed.evaluate(None, [], c, read, lambda batch: batch)["scores"] == []


def test_layouts_hold_the_same_labels(training, tmp_path):
  """A tree has each label of its problem's rows once, and two where they disagree."""
  from benchmarks import packed_training as packed

  rows = [
    {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]},
    {"prompt": "q", "completions": ["a"], "labels": [True]},
    {"prompt": "p", "completions": ["a", "c"], "labels": [True, True]},
    {"prompt": "p", "completions": ["a"], "labels": [False]},
  ]
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  contract = tiny.contract()
  chains = packed.chains(str(tmp_path / "rows.jsonl"))
  apart, merged = (
    packed.laid_out(chains, tiny.TOKENIZER, contract, layout) for layout in ("packed", "trees")
  )
  assert [tree.read_targets.tolist() for tree in apart] == [[2, 0], [2], [2, 2], [0]]
  assert [tree.read_targets.tolist() for tree in merged] == [[0, 2, 0, 2], [2]]
  assert [len(tree) for tree in merged] == [9, 5]


@pytest.fixture
def tree(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / "scripts")
  from benchmarks import tree

  return tree


class Slots:
  """In place of a model: every token slot takes a second, compilation ten seconds a shape."""

  tokenizer, contract = tiny.TOKENIZER, tiny.contract()

  def prepare(self, batches):
    return 10.0 * len({batch.tokens.shape for batch in batches})

  def update(self, batch):
    return float(batch.tokens.size)

  def score(self, pool, row_length, merge):
    groups = [[each] for each in pool.token_trees]
    if merge:
      groups = self.grouped(pool.token_trees, pool.problems)
    return float(sum(len(prefix_tree.merge(group)[0]) for group in groups))


def test_the_tree_benchmark(tree, tmp_path, monkeypatch):
  """Each form's slots, labels and seconds; the arithmetic beside them; targets and tables."""
  source = write_source(tmp_path / "source")
  file = source / "phase2_train.jsonl"
  for split in ("train", "test"):  # the same problems, so they merge
    (source / f"phase1_{split}.jsonl").write_text(file.read_text())
  (tmp_path / "model.gguf").touch()
  (tmp_path / "reranking").mkdir()
  samples = [{"text": "Add.\n\n6."}, {"text": "Add.\n\n5."}, {"text": "Add.\n\n6."}]
  record = {"problem": "2 + 3?", "samples": samples}
  (tmp_path / "reranking" / pathlib.Path(tree.POOLS).name).write_text(json.dumps(record) + "\n")
  Slots.grouped = staticmethod(tree.grouped)
  public, generated = Slots(), tree.generated
  monkeypatch.setattr(tree, "public", lambda *_: public)
  monkeypatch.setattr(tree.Model, "make", lambda *_: Slots())
  monkeypatch.setattr(tree, "generated", lambda *given: (generated(*given)[0], Slots()))
  lengths = {"phase 1": 64, "phase 2": 64, "arithmetic": 256, "real solutions": 64}
  monkeypatch.setattr(tree, "ROW_LENGTH", lengths)
  monkeypatch.setitem(tree.QUICK, "round", 64)
  args = types.SimpleNamespace(
    source=source, model=tmp_path / "model.gguf", quick=True, layers=4, rows=240,
    config=ROOT / "configs/prm800k_smollm2_135m.py",
  )  # fmt: skip
  result = tree.run(args)
  first, second, sums = result["training"]
  # "bos train 0?\n", "Add.\n" and two last steps of 5 and 3 tokens; each solution twice in phase 1.
  path, both = 10 + 5, 5 + 3
  assert (first["problems"], first["paths"], first["labels"]) == (2, 8, 6)
  assert (first["flattened"], first["distinct"]) == (8 * path + 4 * both, 2 * (path + both))
  assert (second["problems"], second["paths"], second["labels"]) == (4, 8, 12)
  assert first["forms"]["padded"] == {
    "updates": 2, "slots": 512, "seconds": 512.0, "compile_seconds": 10.0
  }  # fmt: skip
  assert [first["forms"][form]["slots"] for form in ("packed", "trees")] == [192, 64]
  assert first["measured"] == 3 and first["padded_to_trees"] == 8
  assert first["realised"] == pytest.approx(3 * first["distinct"] / first["flattened"])
  assert sums["arithmetic"] > 3 and sums["labels"] / sums["problems"] > 10
  real, pool = result["scoring"]
  assert (real["candidates"], real["flattened"], real["distinct"]) == (2, 32, 19)
  assert pool["measured"] == pool["arithmetic"] > 1
  assert [about["what"] for about in result["chains"]] == ["training", "training", "scoring"]
  assert all(about["measured"] == pytest.approx(1, abs=0.01) for about in result["chains"])
  *trained, scored = result["chains"]
  assert all(about["same_rows"] for about in trained) and scored["flattened"] == scored["distinct"]
  assert [t["met"] for t in result["targets"]][-1] and len(result["targets"]) == 7
  text = tree.tables(result | {"quick": False})
  assert "| phase 1 | c: trees, packed | 1 | 64 | 10.7 | 64.0 | 0.09 | 10 |" in text
  assert "| arithmetic, 4 samples | 4 |" in text and "4 layers of model.gguf's shape" in text


def test_epochs_run_side_by_side(tree):
  """Forms take turns in proportion; of padded batches two of a length stand for the others."""
  shapes = {"padded": [8, 4, 8, 8, 8], "packed": [6] * 4, "trees": [6]}
  batches = {
    form: [types.SimpleNamespace(tokens=np.zeros((1, n)), form=form, i=i) for i, n in enumerate(ns)]
    for form, ns in shapes.items()
  }
  turns = []

  def update(batch):
    turns.append((batch.form, batch.i))
    return 10.0 * (batch.i + 1)

  seconds = tree.side_by_side(update, batches, 2)
  assert seconds == {"padded": 4 * (10 + 50) / 2 + 20, "packed": 100.0, "trees": 10.0}
  assert [form for form, _ in turns].count("trees") == 2
  assert {i for form, i in turns if form == "padded"} == {0, 1, 4}
  assert [i for form, i in turns if form == "packed"] == [0, 1, 2, 3]
  places = [turns.index(("packed", i)) for i in range(4)]
  assert all(later - place > 1 for place, later in itertools.pairwise(places))


def test_the_tree_benchmark_runs_the_project_s_own_code(tree, monkeypatch):
  """A real train step and a real forward, compiled apart and once for each shape."""
  c = config_lib.Experiment(data=config_lib.Data(separator="\n"), model=tiny.MODEL)
  model = tree.Model.make(c, tiny.TOKENIZER, tiny.TOKENIZER.vocab_size)
  monkeypatch.setitem(tree.ROW_LENGTH, "phase 2", 64)
  chain = ("p", ("a", "b"), (-1, 0), (1, -1))
  about = tree.chains("phase 2", model, [tree.StepTree(*chain)], tree.QUICK)
  assert about["same_rows"] and about["measured"] > 0
  assert int(model.state.step) == 4 and len(model.step._found) == 1
  pool = tree.make_pool(model, [("p", ("a", "b")), ("p", ("a", "c")), ("p", ("a", "c"))])
  compiled = model.forward.seconds
  assert len(pool.problems) == 2 and all(model.score(pool, 64, merge) > 0 for merge in (1, 0))
  assert model.forward.seconds > compiled and len(model.forward._found) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_loading_is_measured_in_processes_of_its_own(arithmetic_data, tmp_path):
  """Both loads are there, with all their tensors: what was asked for is what was measured."""
  model = tmp_path / "model"
  tiny.public(model, 320, arithmetic_data / "tokenizer.model")
  figures = tmp_path / "loading.json"
  options = ["--quick", "--layers=1", f"--model={model}", f"--json={figures}"]
  done = run_script("benchmark.py", "loading", *options)
  assert done.returncode == 0, done.stderr
  small, large = json.loads(figures.read_text())["loads"]
  assert small["shards"] == 4 * small["parameters"]  # float32
  assert large["parameters"] > 2 * 152_064 * 64  # embedding and language-model head
  assert large["peak"] >= large["growth"] > 0 and large["seconds"] > 0
  assert "| model | 1 |" in done.stdout


def test_short_measurements_are_repeated_in_turn(tree):
  """Until there are enough repeats and enough seconds; the ratio is the median of the turns'."""
  order, seconds = [], iter([5.0, 4.0, 3.0, 6.0, 2.0, 7.0])

  def measure(merge):
    order.append(merge)
    return next(seconds)

  found = tree.alternately(measure, 2, 20.0)
  assert found["seconds"] == {"flattened": 5.0, "trees": 4.0}
  assert found["measured"] == 5 / 4  # of 5 / 4, 6 / 3 and 2 / 7
  assert order == [False, True, True, False, False, True]
