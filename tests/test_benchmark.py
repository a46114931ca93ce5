"""scripts/benchmark.py: all methods measure the same, and the figures go where they should."""

import json
import pathlib
import types

import jax
import numpy as np
import pytest
from conftest import ROOT, completion, make_row, run_script, step

from prm_jax import config as config_lib
from prm_jax.input_pipeline import tokenizers, trees
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
    (("training", "--peer=openr"), "openr"),
    (("training", "--threads=9999"), "9999: only"),
  ],
)
def test_mistakes_are_errors_before_any_work(arguments, message):
  """A misspelt benchmark or part, a missing file, or too few cores: named in the message."""
  done = run_script("benchmark.py", *arguments)
  assert done.returncode != 0 and message in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["aggregation", "training"])
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
  rows, left_out = training.peer_rows(write_source(tmp_path / "source") / "phase2_train.jsonl")
  assert len(rows) == 10 and not left_out
  assert rows[:2] == [
    {"prompt": "train 0?", "completions": ["Add.", "Two."], "labels": [True, False]},
    {"prompt": "train 0?", "completions": ["Add.", "6."], "labels": [True, True]},
  ]


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
    figures |= {"train_seconds": 1.0, "compile_seconds": 2.0} if side == "packed" else {}
    return pathlib.Path(settings["output"]).write_text(json.dumps(figures))

  words = types.SimpleNamespace(encode=lambda text: text.split() or [text], bos_id=None)
  monkeypatch.setattr(training, "child", child)
  monkeypatch.setattr(training, "usable_cores", lambda: [0, 1, 2])
  monkeypatch.setattr(training, "peer_versions", lambda python: {"trl": python})
  monkeypatch.setattr(training.tokenizers, "load", lambda path: words)
  args = types.SimpleNamespace(
    source=write_source(tmp_path / "source"), model=tmp_path / "model.gguf", quick=False, rows=6,
    config=ROOT / "configs/prm800k_smollm2_135m.py", test_rows=8, seeds=(0, 1), peer="trl",
    peer_seeds=(0,), threads=3, peer_python="python", work=tmp_path / "work",
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
  result = training.run(benchmark[0])
  assert [t["measured"] for t in result["targets"]] == [2.0, pytest.approx(2 / 3), 1.0]
  assert result["auroc"]["ours"]["by_seed"] == {"before": [0.5, 0.5], "after": [1.0, 1.0]}
  assert result["auroc"]["difference"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
  text = training.tables(result | {"quick": False})
  assert "| TRL, seed 0 |" in text and "| this project, seed 1 |" in text and "| yes |" in text
  assert "this project (seeds 0 1) - TRL (seed 0)" in text and "not distinguishable" not in text
  assert "Model model.gguf; this project's settings prm800k_smollm2_135m.py; 3 threads" in text
  result["auroc"]["difference"] |= {"low": -0.1}
  text = training.tables(result | {"quick": False})
  assert "| yes, within noise: not distinguishable |" in text


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

  from prm_jax.model import export

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
  settings = training.SETTINGS | {"learning_rate": 0.1, "max_length": 64, "seed": 0}
  settings |= {"model": str(tmp_path / "model"), "config": str(tmp_path / "config.py")}
  for split in training.SPLITS:
    rows, _ = training.peer_rows(source / f"phase2_{split}.jsonl")
    settings[split] = str(tmp_path / f"{split}.jsonl")
    pathlib.Path(settings[split]).write_text("".join(json.dumps(row) + "\n" for row in rows))
  result = packed.measure(settings)
  assert result["rows"] == 10 and result["updates"] == 1
  assert result["steps"] < result["tokens"] < result["slots"]
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
  """However rows are packed, a row's scores are those at its own separators."""
  from benchmarks import packed_training as packed

  lengths = [9, 30, 5, 22, 14, 30, 3]
  rows = [
    trees.TokenTree(
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
