"""Scoring: a score depends on its solution alone, and models of another contract are refused."""

import dataclasses
import errno
import json
import pathlib
import random
import types
import warnings

import jax
import numpy as np
import pytest
import tiny
from conftest import call_script, read_lines, write_lines

from prm_jax import aggregation as agg
from prm_jax import config as config_lib
from prm_jax.datasets import labelled
from prm_jax.evaluation import prm800k_steps, step_benchmarks
from prm_jax.input_pipeline import step_dataset, token_tree, tokenizers
from prm_jax.model import sharding
from prm_jax.runtime.json_lines import BadLine
from prm_jax.scoring import batching, candidates
from prm_jax.scoring.rater import MAX_TOKENS, SolutionError
from prm_jax.scoring.scorer import Scorer
from prm_jax.training import checkpoint, loop, step, trainable
from prm_jax.types import CLASSES, StepContract


@pytest.fixture(scope="module")
def scorer(prm_run):
  """Returns the scorer of a process model with random weights."""
  return Scorer.load(prm_run)


@pytest.fixture(scope="module")
def samples(arithmetic_data):
  """Returns the candidate solutions of the arithmetic dataset."""
  return read_lines(arithmetic_data / "candidates.jsonl")


def test_the_representation_of_a_scorer_has_no_weights(scorer):
  """repr() of a scorer shows the model's settings and step, and no array of weights."""
  assert "step=" in repr(scorer) and "width=" in repr(scorer)
  assert "Array" not in repr(scorer) and len(repr(scorer)) < 4000


def test_scorers_of_the_same_model_share_a_program(prm_run, scorer):
  """Loading a model again compiles no second program."""
  assert Scorer.load(prm_run).program is scorer.program


def test_annotate_py_labels_up_to_the_first_wrong_step(prm_run, scorer, samples, tmp_path):
  """annotate.py labels steps up to the first whose P(-1) is above the threshold."""
  source, out = tmp_path / "samples.jsonl", tmp_path / "labels.jsonl"
  write_lines(source, samples[:8])
  flags = (f"--checkpoint={prm_run}", f"--input={source}", f"--output={out}", "--threshold=0.3")
  call_script("annotate.py", *flags)
  lines = read_lines(out)
  scored = scorer.probabilities([(s["problem"], s["steps"]) for s in samples[:8]])
  for line, probabilities in zip(lines, scored, strict=True):
    wrong = np.flatnonzero(probabilities[:, 0] > 0.3)
    known = [label for label in line["labels"] if label is not None]
    assert len(known) == (wrong[0] + 1 if len(wrong) else len(probabilities))
    assert [label < 0 for label in known] == [False] * (len(known) - 1) + [bool(len(wrong))]
    assert line["provenance"]["labeller"] == str(prm_run)


def test_a_score_does_not_depend_on_the_other_solutions(scorer, samples):
  """A solution has the same probabilities alone, packed with others and repeated."""
  solutions = [(s["problem"], tuple(s["steps"])) for s in samples]
  together = scorer.probabilities(solutions + solutions[:3])
  assert all(p.shape == (len(steps), 3) for p, (_, steps) in zip(together, solutions))
  np.testing.assert_allclose(np.concatenate(together).sum(1), 1, rtol=1e-6)
  for i in (0, 7, 20):
    np.testing.assert_allclose(scorer.probabilities([solutions[i]])[0], together[i], rtol=1e-5)
  for again, first in zip(together[-3:], together):
    np.testing.assert_array_equal(again, first)


def test_shared_prefixes_change_no_score(scorer, samples, monkeypatch):
  """Candidates merged into a prefix tree have their own scores, and shared tokens run once."""
  slots, run = [], batching._run

  def counted(packed, *args):
    slots.append(sum(len(tree) for tree in packed.trees))
    return run(packed, *args)

  monkeypatch.setattr(batching, "_run", counted)
  problem = samples[0]["problem"]
  pool = [s["steps"] for s in samples if s["problem"] == problem]
  pool += [steps[:-1] + [f"{i}"] for steps in pool for i in range(20)]
  together = scorer.probabilities([(problem, steps) for steps in pool])
  apart = dataclasses.replace(scorer, merge=False).probabilities([(problem, s) for s in pool])
  for tree, alone in zip(together, apart):
    np.testing.assert_allclose(tree, alone, rtol=1e-5)
  merged, flat = slots
  assert scorer.row_length < merged < flat / 5


def test_a_run_trained_with_the_kernel_is_scored_without_a_tpu(scorer, samples):
  """Scoring replaces the attention kernel of training, which changes no score."""
  config = dataclasses.replace(scorer.config, attention="kernel")
  other = dataclasses.replace(scorer, config=config)
  solution = [(samples[0]["problem"], samples[0]["steps"])]
  np.testing.assert_array_equal(other.probabilities(solution)[0], scorer.probabilities(solution)[0])


def test_a_run_with_low_rank_factors_is_scored_with_both(prm_run, scorer, samples, monkeypatch):
  """A LoRA run is scored with its weights and factors, and has the scores of their sum."""
  low = dataclasses.replace(scorer.config, lora_rank=2, lora_targets=("query", "down"))
  mesh = sharding.make_mesh(config_lib.Mesh())
  number, about, trained = checkpoint.restore_params(prm_run, mesh)
  new = step.init_params(jax.random.key(0), config=low, vocab_size=scorer.vocab_size, num_classes=3)
  factors = {
    name: 0.3 * jax.random.normal(jax.random.key(i), x.shape, x.dtype)
    for i, (name, x) in enumerate(new["blocks"].items())
    if "_lora_" in name
  }
  factors = jax.device_put(factors, sharding.replicated(mesh))
  params = trained | {"blocks": trained["blocks"] | factors}
  lora = dataclasses.replace(about.config.optim, trained="lora")
  config = dataclasses.replace(about.config, model=low, optim=lora)
  stored = number, dataclasses.replace(about, config=config), params
  monkeypatch.setattr(checkpoint, "restore_params", lambda *_: stored)
  rate = lambda scorer: np.concatenate(
    scorer.probabilities([(s["problem"], s["steps"]) for s in samples[:4]])
  )
  merged = rate(dataclasses.replace(scorer, params=trainable.merge_lora(params, low)))
  assert np.abs(merged - rate(scorer)).max() > 1e-3
  np.testing.assert_allclose(rate(Scorer.load(prm_run)), merged, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  ("count", "most", "batches"),
  [
    (63, 7, [4, 4]),  # not 7 and 1
    (24, 16, [4]),  # three fit, of the sizes that are compiled four
    (400, 30, [30, 30]),  # 32 would be more than fit at once
  ],
)
def test_batches_of_scoring_are_full(scorer, monkeypatch, count, most, batches):
  """Scoring uses the fewest batches, all of one of the few compiled sizes."""
  length = scorer.row_length
  filled = token_tree.chain([1] * length, [0])
  shapes = []

  def forward(batch):
    shapes.append(len(batch.tokens))
    return np.zeros((*batch.read_positions.shape, 3), np.float32)

  monkeypatch.setattr(batching, "BATCH_TOKENS", most * scorer.mesh.size * length)
  batching.read([filled] * count, [str(i) for i in range(count)], forward, scorer.mesh, length)
  assert shapes == [scorer.mesh.size * size for size in batches]


def test_few_shapes_are_compiled(scorer):
  """Solutions of any number of steps share two numbers of reads for each row length."""
  shapes, rng = set(), random.Random(0)

  def forward(batch):
    assert batch.read_targets is None
    shapes.add((*batch.tokens.shape, batch.read_positions.shape[1]))
    return np.zeros((*batch.read_positions.shape, 1, 3), np.float32)

  for _ in range(30):
    tree = scorer.encode("p", ["1"] * rng.randint(1, 300))
    (found,) = batching.read([tree], ["p"], forward, scorer.mesh, scorer.row_length)
    assert found.shape == (len(tree.read_positions), 1, 3)
  assert all(R in (T // 16, T) for _, T, R in shapes)
  assert 2 < len(shapes) <= 2 * len({(B, T) for B, T, _ in shapes}) <= 10


def test_a_solution_longer_than_a_row_is_scored_whole(scorer, samples):
  problem, steps = samples[0]["problem"], tuple(samples[0]["steps"])
  (long,) = scorer.probabilities([(problem, steps * 30)])
  (short,) = scorer.probabilities([(problem, steps)])
  assert len(long) == 30 * len(steps)
  np.testing.assert_allclose(long[: len(steps)], short, rtol=1e-5)


def test_a_solution_above_the_token_limit_is_refused(scorer, samples):
  solutions = [(samples[0]["problem"], ("1",)), (samples[0]["problem"], ("1 " * 9000,))]
  with pytest.raises(SolutionError, match="at most 16384") as error:
    scorer.probabilities(solutions)
  assert error.value.index == 1


def test_a_solution_beyond_the_context_length_is_a_warning(scorer, samples):
  """A solution longer than the model's context is laid out, with a warning; others have none."""
  short = dataclasses.replace(scorer.config, context_length=64)
  short = dataclasses.replace(scorer, config=short)
  with warnings.catch_warnings(action="error"):
    short.encode(samples[0]["problem"], ("1",))
    scorer.encode(samples[0]["problem"], ("1 " * 64,))  # its context length is unknown
  with pytest.warns(UserWarning, match="the model's context of 64 tokens"):
    assert len(short.encode(samples[0]["problem"], ("1 " * 64,))) > 64


@pytest.mark.usefixtures("one_device")
def test_an_outcome_model_gives_one_probability_a_solution(arithmetic_data, samples, tmp_path):
  """A trained outcome model gives each solution one probability, read at its end."""
  experiment = tiny.experiment(arithmetic_data, objective="outcome")
  experiment = tiny.change(experiment, "optim", trained="head")  # less to compile
  loop.run(tiny.change(experiment, "train", steps=1), tmp_path)
  scorer = Scorer.load(tmp_path)
  (p,) = scorer.probabilities([(samples[0]["problem"], samples[0]["steps"])])
  assert p.shape == (1, 2)
  assert [scorer.contract.classes[i] for i in scorer.contract.right_classes] == ["correct"]


@pytest.mark.parametrize("neutral", ["positive", "negative"])
def test_scoring_and_reranking_agree_on_neutral_steps(neutral):
  """The prm_score that score.py writes equals the product that rerank.py computes."""
  probabilities = np.random.default_rng(0).dirichlet(np.ones(3), 5)
  contract = StepContract("process", CLASSES["process"], "\n", (1,), "", neutral, "", "paper")
  record = candidates.scored({"problem": "p"}, ["a"] * 5, probabilities[:, None], contract)
  steps = agg.step_log_scores(probabilities, neutral)
  assert record["prm_score"] == pytest.approx(np.exp(np.asarray(steps).sum()), rel=1e-5)


def test_another_tokenizer_is_refused(prm_run):
  """Scoring with a tokenizer other than that of training is an error."""
  path = prm_run / "tokenizer.model"
  own = path.read_bytes()
  tokenizers.train_sentencepiece(["other text 1 2 3"] * 9, path, 310)
  try:
    with pytest.raises(ValueError, match="hash"):
      Scorer.load(path.parent)
  finally:
    path.write_bytes(own)


def test_data_of_another_recipe_is_refused(scorer, arithmetic_data):
  """Evaluation refuses a dataset of another recipe, whose labels have another meaning."""
  other = dataclasses.replace(scorer, contract=dataclasses.replace(scorer.contract, recipe="qwen"))
  with pytest.raises(ValueError, match="recipe=paper"):
    prm800k_steps.check_recipe(other, arithmetic_data)


def test_evaluation_counts_every_label(scorer, arithmetic_data):
  """Evaluation and its calibration bins count exactly the labels of the manifest."""
  data = step_benchmarks.read("prm800k", arithmetic_data)
  judged, trees, _ = step_benchmarks.judge(scorer, *data)
  result = step_benchmarks.result("prm800k", judged, trees, 0.5)
  manifest = json.loads((arithmetic_data / "manifest.json").read_text())
  assert result["count_by_class"] == manifest["splits"]["test"]["labels"]
  bins = result["diagnostics"]["calibration"]["bins"]
  assert sum(b["count"] for b in bins) == result["count"] > result["first_error"]["n"] > 0


def test_score_py_keeps_every_key(prm_run, arithmetic_data, tmp_path):
  """score.py keeps the keys and order of lines, adds OpenAI's keys, and deletes an old contract.

  An earlier run with --model wrote that contract, which does not describe the new scores.
  """
  (tmp_path / "o.jsonl.contract.json").write_text('{"readout": "trl"}')
  text = {"problem": "A add 2\nfrom 3", "text": "A 3+2=5\n# Answer", "mine": {"k": [1, None]}}
  lines = [*read_lines(arithmetic_data / "candidates.jsonl")[:5], text]
  source = write_lines(tmp_path / "in.jsonl", lines)
  flags = (f"--checkpoint={prm_run}", f"--input={source}")
  call_script("score.py", *flags, f"--output={tmp_path}/o.jsonl")
  after = read_lines(tmp_path / "o.jsonl")
  for old, new in zip(lines, after, strict=True):
    assert old.items() <= new.items()
    assert len(new["rating_probs"]) == len(new["steps"])
    product = np.prod([(p["0"] + p["1"]) / sum(p.values()) for p in new["rating_probs"]])
    assert new["prm_score"] == pytest.approx(product, rel=1e-12)
  assert after[-1]["steps"] == ["A 3+2=5", "# Answer"]
  assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "o.jsonl"]


def test_scores_that_cannot_be_written_leave_the_old_contract(
  prm_run, arithmetic_data, tmp_path, monkeypatch
):
  """If the scores cannot take their name, the old ones keep the contract that describes them."""

  def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

  old = {tmp_path / name: "old" for name in ("o.jsonl", "o.jsonl.contract.json")}
  for path, text in old.items():
    path.write_text(text)
  source = arithmetic_data / "candidates.jsonl"
  flags = (f"--checkpoint={prm_run}", f"--input={source}", f"--output={tmp_path}/o.jsonl")
  monkeypatch.setattr(pathlib.Path, "replace", full)
  done = call_script("score.py", *flags, code=1)
  assert "No space left on device" in done.stderr
  (tmp_path / ".o.jsonl.journal").unlink()  # the work is not lost
  assert {path: path.read_text() for path in tmp_path.iterdir()} == old


def test_unfinished_solutions_can_be_skipped(scorer, samples, tmp_path):
  """Skipped lines pass unchanged, the others keep their scores, and a bad line is named."""
  path = tmp_path / "in.jsonl"
  records = [
    {"problem": each["problem"], "steps": each["steps"], "finished": i % 3 != 0}
    for i, each in enumerate(samples[:7])
  ]
  write_lines(path, records)
  every, some = (list(candidates.rated(path, scorer, "", skip)) for skip in (False, True))
  for record, a, b in zip(records, every, some, strict=True):
    assert (a.where, a.record, a.steps) == (b.where, b.record, b.steps)
    assert (b.probabilities is None) == (not record["finished"])
    if record["finished"]:
      np.testing.assert_allclose(b.probabilities, a.probabilities, atol=1e-5)
  with path.open("a") as file:
    file.write(json.dumps({"problem": "1 + 1", "steps": ["2 " * MAX_TOKENS]}) + "\n")
  with pytest.raises(BadLine, match=f"{path}:8: a solution of"):
    list(candidates.rated(path, scorer, "", True))


def test_a_wrong_line_is_an_error_before_any_is_scored(tmp_path, monkeypatch):
  """A wrong line at the end of a long file does not cost the scores of all lines before it."""
  monkeypatch.setattr(candidates, "CHUNK", 1)
  (path := tmp_path / "in.jsonl").write_text('{"problem": "p", "steps": ["a"]}\n{}\n')
  unused = types.SimpleNamespace(contract=tiny.contract())  # no `by_head`
  with pytest.raises(BadLine, match=f'{path}:2: no "problem"'):
    next(candidates.rated(path, unused, ""))
  for key in ("finished", "is_correct", "final_answer_correct"):
    write_lines(path, [{"problem": "p", "steps": ["a"], key: "false"}])
    with pytest.raises(BadLine, match=f"{path}:1: \"{key}\" is 'false': expected bool"):
      next(candidates.rated(path, unused, ""))


def test_scores_of_an_earlier_model_are_replaced(scorer):
  """Neither a new score nor a skipped line keeps an earlier model's scores of the same kind."""
  old = {"step_std": [9.0], "prm_score_std": 9.0, "prm_score": 9.0, "orm_score": 0.5}
  assert candidates.unscored({"problem": "p"} | old, scorer.contract) == {
    "problem": "p",
    "orm_score": 0.5,
  }
  record = candidates.scored(old, ["a"], np.full((1, 1, 3), 1 / 3), scorer.contract)
  assert record.keys() == {"orm_score", "steps", "rating_probs", "prm_score"}
  assert record["prm_score"] == pytest.approx(2 / 3)


def test_a_solution_without_a_score_is_an_error(scorer, samples, tmp_path, monkeypatch):
  """A solution without steps, and NaN of the model, are errors with index or line."""
  good = (samples[0]["problem"], ("1",))
  with pytest.raises(SolutionError, match="without steps") as error:
    scorer.by_head([good, ("p", ())])
  assert error.value.index == 1
  nan = lambda self, trees, problems, on_share: [np.full((1, 1, 3), x) for x in (0.5, np.nan)]
  monkeypatch.setattr(Scorer, "read", nan)
  path = tmp_path / "in.jsonl"
  lines = [{"problem": "p", "steps": [step]} for step in ("a", "a", "b")]
  write_lines(path, lines)
  with pytest.raises(BadLine, match=f"{path}:3: the model gives NaN"):
    list(candidates.rated(path, scorer, ""))


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({}, 'in.jsonl:2: no "steps" or "text"'),
    ({"samples": [{}]}, 'in.jsonl:2: a problem with "samples"; expected one candidate a line'),
    ({"steps": []}, r'in.jsonl:2: "steps" is \[\]: expected array of length >= 1'),
    ({"steps": ["a", 7]}, r'in.jsonl:2: "steps\[1\]" is 7: expected str, got int'),
  ],
)
def test_bad_candidates_name_file_and_line(keys, message):
  """A bad candidate is an error with file, line, key and value."""
  with pytest.raises(ValueError, match=message):
    candidates.solution({"problem": "p"} | keys, "\n", "in.jsonl:2")


def test_a_failed_tokenizer_training_leaves_no_file(tmp_path):
  """An error in reading the texts is raised unchanged, and no file is left."""
  with pytest.raises(ZeroDivisionError):
    tokenizers.train_sentencepiece((1 / 0 for _ in "a"), tmp_path / "tokenizer.model", 310)
  assert not list(tmp_path.iterdir())


def test_another_manifest_is_an_error(tmp_path):
  """The manifest of another dataset is an error that names it and the remedy."""
  (tmp_path / "manifest.json").write_text('{"dataset": "math_splits"}')
  with pytest.raises(
    ValueError, match=r"manifest.json: \"dataset\" is 'math_splits'.*prepare_data"
  ):
    labelled.read_manifest(tmp_path)


def test_tokenizer_texts_come_from_the_first_rows(arithmetic_data):
  """A limit on the texts for a tokenizer takes those of the first rows of a split."""
  few, many = (list(step_dataset.texts(arithmetic_data, "train", n)) for n in (3, 99))
  assert few == many[: len(few)] and 3 <= len(few) < len(many)
