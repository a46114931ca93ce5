"""Scoring: a score depends on its solution alone, and never on a foreign contract."""

import dataclasses
import json

import numpy as np
import pytest
import tiny
from conftest import run_script

from prm_jax import aggregation as agg
from prm_jax import config as config_lib
from prm_jax.datasets import labelled, prm800k
from prm_jax.evaluation import prm800k_steps
from prm_jax.input_pipeline import step_dataset, tokenizers
from prm_jax.pretrained import export, safetensors_files, weights
from prm_jax.runtime import json_lines
from prm_jax.scoring import batching, candidates
from prm_jax.scoring.scorer import ContractError, Scorer
from prm_jax.training import loop
from prm_jax.types import CLASSES, StepContract


def train(arithmetic_data, workdir, objective):
  experiment = tiny.experiment(arithmetic_data, config_lib.Loss(objective=objective))
  short = dataclasses.replace(experiment.train, steps=3)
  loop.run(dataclasses.replace(experiment, train=short), workdir)
  return workdir


@pytest.fixture(scope="session")
def process_run(arithmetic_data, tmp_path_factory):
  return train(arithmetic_data, tmp_path_factory.mktemp("process"), "process")


@pytest.fixture(scope="session")
def outcome_run(arithmetic_data, tmp_path_factory):
  return train(arithmetic_data, tmp_path_factory.mktemp("outcome"), "outcome")


@pytest.fixture
def samples(arithmetic_data):
  lines = (arithmetic_data / "candidates.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def test_a_score_does_not_depend_on_the_others(process_run, samples):
  """A solution alone, packed with others or repeated has the same probabilities."""
  scorer = Scorer.load(process_run)
  solutions = [(s["problem"], tuple(s["steps"])) for s in samples]
  together = scorer.probabilities(solutions + solutions[:3])
  assert all(p.shape == (len(steps), 3) for p, (_, steps) in zip(together, solutions))
  np.testing.assert_allclose(np.concatenate(together).sum(1), 1, rtol=1e-6)
  for i in (0, 7, 20):
    np.testing.assert_allclose(scorer.probabilities([solutions[i]])[0], together[i], rtol=1e-5)
  for again, first in zip(together[-3:], together):
    np.testing.assert_array_equal(again, first)


def test_shared_prefixes_change_no_score(process_run, samples, monkeypatch):
  """Candidates merged into a prefix tree score as each does alone, and shared tokens run once."""
  scorer = Scorer.load(process_run)
  slots = []
  run = batching._run

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


def test_a_run_trained_with_the_kernel_is_scored_without_a_tpu(process_run, samples):
  """The attention implementation of training is replaced: it changes no score."""
  scorer = Scorer.load(process_run)
  config = dataclasses.replace(scorer.config, attention="kernel")
  other = dataclasses.replace(scorer, config=config)
  solution = [(samples[0]["problem"], samples[0]["steps"])]
  np.testing.assert_array_equal(other.probabilities(solution)[0], scorer.probabilities(solution)[0])


@pytest.mark.parametrize(
  ("count", "most", "batches"),
  [
    (63, 7, [4, 4]),  # not 7 and 1
    (24, 16, [4]),  # three fit, of the sizes that are compiled four
    (64, 4, [4, 4]),
    (400, 30, [30, 30]),  # 32 would be more than fit at once
    (1, 16, [1]),
  ],
)
def test_batches_of_scoring_are_full(process_run, samples, count, most, batches):
  """Scoring uses the fewest batches, all of one size, and that size is one of a few."""
  scorer = Scorer.load(process_run)
  length = scorer.row_length
  tree = scorer.encode(samples[0]["problem"], samples[0]["steps"])
  filled = dataclasses.replace(
    tree,
    tokens=np.ones(length, np.int32),
    positions=np.arange(length, dtype=np.int32),
    subtree_end=np.full(length, length, np.int32),
    previous=np.full(length, -1, np.int32),
  )
  shapes = []

  def forward(batch):
    shapes.append(len(batch.tokens))
    return np.zeros((*batch.read_positions.shape, 3), np.float32)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(batching, "BATCH_TOKENS", most * scorer.mesh.size * length)
    problems = [str(i) for i in range(count)]
    batching.read([filled] * count, problems, forward, scorer.mesh, length)
  assert shapes == [scorer.mesh.size * size for size in batches]


def test_a_solution_longer_than_a_row_is_scored_whole(process_run, samples):
  """A solution longer than a row is not cut: each of its steps has a probability."""
  scorer = Scorer.load(process_run)
  problem, steps = samples[0]["problem"], tuple(samples[0]["steps"])
  (long,) = scorer.probabilities([(problem, steps * 30)])
  (short,) = scorer.probabilities([(problem, steps)])
  assert len(long) == 30 * len(steps)
  np.testing.assert_allclose(long[: len(steps)], short, rtol=1e-5)


def test_a_solution_beyond_all_bounds_is_refused(process_run, samples):
  """A solution above the token limit is refused, and the error has its index."""
  solutions = [(samples[0]["problem"], ("1",)), (samples[0]["problem"], ("1 " * 9000,))]
  with pytest.raises(batching.SolutionError, match="at most 16384") as error:
    Scorer.load(process_run).probabilities(solutions)
  assert error.value.index == 1


def test_an_outcome_model_gives_one_probability_a_solution(outcome_run, samples):
  """An outcome model is read once, at the end of the solution."""
  scorer = Scorer.load(outcome_run)
  (p,) = scorer.probabilities([(samples[0]["problem"], samples[0]["steps"])])
  assert p.shape == (1, 2)
  assert [scorer.contract.classes[i] for i in scorer.contract.right_classes] == ["correct"]


@pytest.mark.parametrize("neutral", ["positive", "negative"])
def test_scoring_and_reranking_agree_on_what_is_right(neutral):
  """The prm_score that score.py writes is the product that rerank.py computes."""
  probabilities = np.random.default_rng(0).dirichlet(np.ones(3), 5)
  contract = StepContract("process", CLASSES["process"], "\n", (1,), "", neutral, "", "paper")
  record = candidates.scored({"problem": "p"}, ["a"] * 5, probabilities, contract)
  steps = agg.step_log_scores(probabilities, neutral)
  assert record["prm_score"] == pytest.approx(np.exp(np.asarray(steps).sum()), rel=1e-5)


def test_another_tokenizer_is_refused(process_run, arithmetic_data, tmp_path):
  """A tokenizer other than the one of training is an error, not different scores."""
  path = process_run / "tokenizer.model"
  own = path.read_bytes()
  tokenizers.train_sentencepiece(["other text 1 2 3"] * 9, path, 310)
  try:
    with pytest.raises(ContractError, match="hash"):
      Scorer.load(process_run)
  finally:
    path.write_bytes(own)


def test_data_of_another_recipe_is_refused(process_run, arithmetic_data):
  """Evaluation refuses a dataset that another recipe made: its labels mean something else."""
  scorer = Scorer.load(process_run)
  other = dataclasses.replace(scorer, contract=dataclasses.replace(scorer.contract, recipe="qwen"))
  with pytest.raises(ContractError, match="recipe=paper"):
    prm800k_steps.evaluate(other, arithmetic_data, "test")


def test_evaluation_counts_every_label(process_run, arithmetic_data):
  """Evaluation counts the labels of the manifest, and its calibration bins add up to them."""
  result = prm800k_steps.evaluate(Scorer.load(process_run), arithmetic_data, "test")
  manifest = json.loads((arithmetic_data / "manifest.json").read_text())
  assert result["count_by_class"] == manifest["splits"]["test"]["labels"]
  assert sum(b["count"] for b in result["calibration"]) == result["count"]


def test_score_py_keeps_every_key(process_run, arithmetic_data, tmp_path):
  """score.py keeps the keys and the order of lines and adds OpenAI's keys.

  A contract that an earlier run with --model left there does not stay: it is not theirs.
  """
  (tmp_path / "o.jsonl.contract.json").write_text('{"readout": "trl"}')
  text = {"problem": "A add 2\nfrom 3", "text": "A 3+2=5\n# Answer", "mine": {"k": [1, None]}}
  source = tmp_path / "in.jsonl"
  lines = (arithmetic_data / "candidates.jsonl").read_text().splitlines()[:5]
  source.write_text("\n".join([*lines, json.dumps(text)]) + "\n")
  done = run_script(
    "score.py", f"--checkpoint={process_run}", f"--input={source}", f"--output={tmp_path}/o.jsonl"
  )
  assert done.returncode == 0, done.stderr
  before = [json.loads(line) for line in source.read_text().splitlines()]
  after = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
  for old, new in zip(before, after, strict=True):
    assert old.items() <= new.items()
    assert len(new["rating_probs"]) == len(new["steps"])
    product = np.prod([p["0"] + p["1"] for p in new["rating_probs"]])
    assert new["prm_score"] == pytest.approx(product, rel=1e-12)
  assert after[-1]["steps"] == ["A 3+2=5", "# Answer"]
  assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "o.jsonl"]


def exported(process_run, directory, kind="token-classification"):
  """The run as a directory for transformers, with its tokenizer and contract."""
  scorer = Scorer.load(process_run)
  export.write(
    directory,
    scorer.params,
    scorer.config,
    scorer.vocab_size,
    contract=scorer.contract,
    kind=kind,
  )
  scorer.tokenizer.save(directory)
  return scorer


def test_an_export_scores_as_its_checkpoint(process_run, arithmetic_data, tmp_path):
  """score.py --model=EXPORT gives the checkpoint's scores and writes the export's contract."""
  scorer = exported(process_run, tmp_path / "export")
  source, out = arithmetic_data / "candidates.jsonl", tmp_path / "o.jsonl"
  done = run_script(
    "score.py", f"--model={tmp_path}/export", f"--input={source}", f"--output={out}"
  )
  assert done.returncode == 0, done.stderr
  lines = [json.loads(line) for line in out.read_text().splitlines()]
  expected = scorer.probabilities([(line["problem"], line["steps"]) for line in lines])
  for line, probabilities in zip(lines, expected, strict=True):
    given = [[p[name] for name in scorer.contract.classes] for p in line["rating_probs"]]
    np.testing.assert_allclose(given, probabilities, rtol=1e-4)  # rows of another length
  note = json.loads((tmp_path / "o.jsonl.contract.json").read_text())
  assert note["tokenizer_hash"] == scorer.contract.tokenizer_hash
  assert "model.safetensors" in note["sha256"]


def test_an_export_without_its_head_or_tokenizer_is_refused(process_run, tmp_path):
  """An export without a step head, or with another tokenizer, is an error."""
  exported(process_run, tmp_path / "a", kind="causal-lm")
  with pytest.raises(ValueError, match=r"its weights lack score\.weight"):
    Scorer.load_export(tmp_path / "a")
  exported(process_run, tmp_path / "b")
  tokenizers.train_sentencepiece(["other text 1 2"] * 9, tmp_path / "b" / "tokenizer.model", 310)
  with pytest.raises(ContractError, match="hash"):
    Scorer.load_export(tmp_path / "b")


def test_a_head_of_another_shape_is_refused(process_run, tmp_path):
  """A step head with fewer rows than the contract has classes is an error."""
  scorer = exported(process_run, tmp_path)
  found = {name: tensor.read() for name, tensor in weights.tensors(tmp_path).items()}
  found["score.weight"] = found["score.weight"][:2]
  safetensors_files.write_directory(tmp_path, found.items())
  width = scorer.config.width
  message = rf"score\.weight is \[2, {width}\], expected \[3, {width}\]"
  with pytest.raises(ValueError, match=message):
    Scorer.load_export(tmp_path)


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ('{"problem": "p", "steps": ["a"', "in.jsonl:2: not JSON"),
    ('{"steps": ["a"]}', 'in.jsonl:2: no "problem"'),
    (
      '{"problem": "p", "steps": []}',
      r'in.jsonl:2: "steps" is \[\]: expected array of length >= 1',
    ),
    (
      '{"problem": "p", "steps": ["a", 7]}',
      r'in.jsonl:2: "steps\[1\]" is 7: expected str, got int',
    ),
    ('{"problem": "p"}', "in.jsonl:2: neither"),
  ],
)
def test_bad_candidates_name_file_and_line(tmp_path, line, message):
  """A bad line is an error with file, line, key and value."""
  source = tmp_path / "in.jsonl"
  source.write_text('{"problem": "p", "steps": ["a"]}\n' + line + "\n")
  with pytest.raises(json_lines.BadLine, match=message):
    for number, _, record in json_lines.read(source):
      candidates.solution(record, "\n", f"{source}:{number}")


def test_score_py_leaves_no_half_file(process_run, tmp_path):
  """An error in the input ends score.py with status 1, a message and no output file."""
  source = tmp_path / "in.jsonl"
  source.write_text('{"problem": "p", "steps": ["a"]}\n{"problem": 3}\n')
  done = run_script(
    "score.py", f"--checkpoint={process_run}", f"--input={source}", f"--output={tmp_path}/o.jsonl"
  )
  assert done.returncode == 1
  assert "in.jsonl:2" in done.stderr and "Traceback" not in done.stderr
  assert list(tmp_path.iterdir()) == [source]


def test_a_place_that_cannot_be_written_is_said_first(tmp_path):
  """An output that cannot be written is an error before the model is loaded."""
  done = run_script("score.py", "--checkpoint=none", "--input=none", f"--output={tmp_path}")
  assert done.returncode == 1
  assert done.stderr.startswith(f"score.py: {tmp_path}: is a directory")


def test_a_failed_tokenizer_leaves_nothing(tmp_path):
  """An error while a tokenizer is trained is raised as it is, and no file is left."""

  def texts():
    yield "a"
    raise ValueError("of the reader")

  for given, message in ((texts(), "of the reader"), ([], "no texts")):
    with pytest.raises(ValueError, match=message):
      tokenizers.train_sentencepiece(given, tmp_path / "tokenizer.model", 310)
  assert not list(tmp_path.iterdir())


def test_a_missing_tokenizer_says_what_to_do_in_both_cases(tmp_path):
  """The error for a missing tokenizer says what to do before training and beside a checkpoint."""
  with pytest.raises(FileNotFoundError, match=r"before training, .*beside a checkpoint, put back"):
    tokenizers.SentencePiece(tmp_path / "tokenizer.model")


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("{", "not JSON"),
    ('{"dataset": "math_splits"}', "\"dataset\" is 'math_splits'"),
  ],
)
def test_another_manifest_is_an_error(tmp_path, text, message):
  """A manifest that is damaged or of another dataset names itself and what to do."""
  path = tmp_path / "manifest.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=message) as error:
    labelled.read_manifest(tmp_path)
  assert str(error.value).startswith(f"{path}: ")
  assert "scripts/prepare_data.py" in str(error.value)


def test_a_limit_is_on_the_rows_read(arithmetic_data, monkeypatch):
  """Texts for a tokenizer come from the first rows; later rows are not read."""
  read = []

  def records(*args):
    for record in prm800k.stored_records(*args):
      read.append(record)
      yield record

  monkeypatch.setattr("prm_jax.datasets.labelled.stored_records", records)
  few = list(step_dataset.texts(arithmetic_data, "train", 3))
  assert len(read) == 3
  assert few[0] == read[0].solution.question.problem
  with pytest.raises(ValueError, match="limit=0"):
    list(step_dataset.texts(arithmetic_data, "train", 0))
