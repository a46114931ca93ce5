"""The implicit process reward of two language models."""

import asyncio
import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
import tiny
from conftest import call_script, read_lines, write_lines
from flax import nnx

from prm_jax import config as config_lib
from prm_jax.evaluation.judged import Labelled, score
from prm_jax.input_pipeline import tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.scoring import scorer as scorer_lib
from prm_jax.scoring.implicit import ImplicitScorer
from prm_jax.scoring.language_model import LanguageModel, token_log_probs
from prm_jax.scoring.rater import SolutionError
from prm_jax.scoring.request_queue import RequestQueue
from prm_jax.training import loss as loss_lib

BETA = 0.3
SOLUTIONS = [
  ("2+2", ("so 4", "the answer is 4")),
  ("2+2", ("so 4", "the answer is 5")),
  ("2+2", ("so 4",)),
  ("2+2", ("so 5", "the answer is 5", "no")),
  ("x", ("y" * 70, "\u00e9")),  # longer than a row
  ("2+2", ("so 4", "the answer is 4")),  # again
]


def scorer_of(seeds=(0, 1), devices=4, **changes) -> ImplicitScorer:
  """Returns a scorer of two tiny random models over four devices; equal seeds give equal models."""
  mesh = sharding_lib.make_mesh(config_lib.Mesh(data=2, fsdp=-1), jax.devices()[:devices])
  whole = sharding_lib.replicated(mesh)
  models = [
    LanguageModel(
      f"model {seed}",
      tiny.TOKENIZER,
      tiny.MODEL,
      tiny.TOKENIZER.vocab_size,
      jax.device_put(tiny.model(seed, 1)[1], whole),
    )
    for seed in seeds
  ]
  return dataclasses.replace(ImplicitScorer(*models, mesh, BETA), row_length=64, **changes)


@jax.jit
def next_token_logits(params, tokens):
  """Returns the logits `[T, V]` of a row that is one sequence."""
  model, T = nnx.merge(tiny.model(0, 1)[0], params), len(tokens)
  return model.next_token_logits(
    model.hidden(tokens[None], np.arange(T)[None], np.full((1, T), T))
  )[0]


def of_solution(problem: str, steps) -> np.ndarray:
  """Returns P(right) of the steps of one solution, computed alone and in NumPy."""
  encode = tiny.TOKENIZER.encode
  parts = [[1, *encode(f"{problem}\n")], *(encode(f"{step}\n") for step in steps)]
  tokens = np.array([*itertools.chain(*parts)])
  length = len(tokens)
  padded = np.pad(tokens, (0, 96 - length))  # to compile once; a decoder sees no later token
  log_probs = []
  for seed in (0, 1):
    logits = np.asarray(next_token_logits(tiny.model(seed, 1)[1], padded)[:length], np.float64)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    log_probs.append(logits[np.arange(length - 1), tokens[1:]])
  ends = np.cumsum([len(part) for part in parts]) - 1  # token i is predicted at i - 1
  sums = [(log_probs[0] - log_probs[1])[a:b].sum() for a, b in itertools.pairwise(ends)]
  return 1 / (1 + np.exp(-BETA * np.array(sums)))


@pytest.fixture(scope="module")
def expected():
  """Returns P(right) of the steps of each solution, computed alone."""
  return {solution: of_solution(*solution) for solution in set(SOLUTIONS)}


@pytest.fixture
def chunk_of_5(monkeypatch):
  """Computes the logits of five tokens of a row at a time, in newly compiled programs."""
  monkeypatch.setattr(loss_lib, "LOGITS", 5)
  token_log_probs.clear_cache()
  yield
  token_log_probs.clear_cache()


@pytest.mark.parametrize(("merge", "chunk"), [(True, 256), (True, 5), (False, 256)])
def test_probabilities_equal_those_of_each_solution_alone(expected, request, merge, chunk):
  """Neither merging of prefixes nor chunking of logits changes the probability of a step."""
  if chunk == 5:
    request.getfixturevalue("chunk_of_5")
  scorer = scorer_of(merge=merge)
  scores = scorer.by_head(SOLUTIONS, on_share=(shares := []).append)
  assert shares and max(shares) <= 1
  for solution, probabilities in zip(SOLUTIONS, scores, strict=True):
    assert probabilities.shape == (len(solution[1]), 1, 2) and probabilities.dtype == np.float64
    np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=1e-12)
    # Sums of up to 70 float32 differences of log-probabilities of about 10, times beta.
    np.testing.assert_allclose(probabilities[:, 0, 1], expected[solution], atol=1e-5)
  assert not np.allclose(scores[0][1], scores[1][1])  # another last token is another reward


def test_memory_of_logits_is_bounded(monkeypatch):
  """The compiled pass holds the logits of `LOGITS` reads of a row at a time, never all of them."""
  monkeypatch.setattr(loss_lib, "LOGITS", 32)
  token_log_probs.clear_cache()
  batch = tiny.batch(rows=4, row_length=512)
  reads = np.tile(np.arange(512, dtype=np.int32), (4, 1))
  batch = dataclasses.replace(batch, read_positions=reads)
  graph, params = tiny.model(0, 1)
  text = token_log_probs.lower(params, batch, graph).as_text()
  V = tiny.TOKENIZER.vocab_size
  assert f"tensor<4x32x{V}xf32>" in text and f"tensor<4x512x{V}xf32>" not in text


def test_the_server_and_the_benchmarks_get_its_probabilities():
  """The queue of serve.py and the benchmarks of evaluate.py get the probabilities of `by_head`."""
  scorer = scorer_of()
  expected = scorer.by_head(SOLUTIONS)

  async def served():
    queue = RequestQueue(scorer)
    running = asyncio.create_task(queue.run())
    found = await queue.read(await queue.encode(SOLUTIONS), [problem for problem, _ in SOLUTIONS])
    running.cancel()
    queue.close()
    return found

  labels = [[1] * len(steps) for _, steps in SOLUTIONS]
  asked = [Labelled("", "", *each, given) for each, given in zip(SOLUTIONS, labels)]
  for found, judged, wanted in zip(asyncio.run(served()), score(scorer, asked)[0], expected):
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_allclose(judged.scores, wanted[:, 0, 1], atol=1e-6)


def test_very_different_models_give_finite_probabilities():
  """Large log-ratios of both signs give no NaN."""
  scorer = scorer_of()
  sharper = lambda model: model.params | {"final_norm": model.params["final_norm"] * 300}
  sharp = [dataclasses.replace(m, params=sharper(m)) for m in (scorer.policy, scorer.reference)]
  extreme = dataclasses.replace(scorer, policy=sharp[0], reference=sharp[1])
  for probabilities in extreme.probabilities(SOLUTIONS):
    assert np.isfinite(probabilities).all()


def test_a_solution_that_cannot_be_scored_is_an_error_with_its_index():
  """A solution that is too long or has an unknown token is an error with its index."""
  with pytest.raises(SolutionError, match="at most 16384") as error:
    scorer_of().by_head([("p", ("a",)), ("p", ("a" * 20_000,))])
  assert error.value.index == 1
  scorer = scorer_of()
  smaller = dataclasses.replace(scorer.reference, vocab_size=100)
  with pytest.raises(SolutionError, match="beyond the embedding's 100 rows"):
    dataclasses.replace(scorer, reference=smaller).by_head([("p", ("a",))])


def test_the_context_length_is_that_of_the_shorter_model():
  """Of two models with a known context length, the shorter one counts; 0 is unknown."""
  scorer = scorer_of()

  def context_length(*lengths):
    models = zip((scorer.policy, scorer.reference), lengths)
    configs = [(x, dataclasses.replace(x.config, context_length=n)) for x, n in models]
    policy, reference = (dataclasses.replace(x, config=config) for x, config in configs)
    return dataclasses.replace(scorer, policy=policy, reference=reference).config.context_length

  assert [context_length(0, 0), context_length(0, 9), context_length(7, 9)] == [0, 9, 7]


@pytest.fixture(scope="module")
def models(arithmetic_data, tmp_path_factory):
  """Returns a folder of tiny language models: policy, base, and one with another tokenizer."""
  directory = tmp_path_factory.mktemp("models")
  tokenizer = arithmetic_data / "tokenizer.model"
  for seed, name in enumerate(("policy", "base", "other")):
    tiny.public(directory / name, 320, tokenizer, seed=seed)
  tokenizers.train_sentencepiece(
    ["other text 1 2 3"] * 9, directory / "other" / "tokenizer.model", 310
  )
  return directory


@pytest.fixture
def samples(arithmetic_data, tmp_path):
  """Returns a file of twelve candidate solutions."""
  lines = read_lines(arithmetic_data / "candidates.jsonl")[:12]
  return write_lines(tmp_path / "samples.jsonl", lines)


def test_score_py_scores_with_two_language_models(models, samples, tmp_path, monkeypatch):
  """score.py keeps each line's keys, adds the scores, and names both models in the contract.

  The files of each model, which may have gigabytes, are hashed once.
  """
  hashed, hashes = [], scorer_lib.file_hashes
  record = lambda directory: hashed.append(directory.name) or hashes(directory)
  monkeypatch.setattr(scorer_lib, "file_hashes", record)
  out = tmp_path / "scored.jsonl"
  flags = (f"--model={models / 'policy'}", f"--reference={models / 'base'}", "--beta=0.2")
  call_script("score.py", "--readout=implicit", *flags, f"--input={samples}", f"--output={out}")
  assert hashed == ["policy", "base"]
  before, after = (read_lines(p) for p in (samples, out))
  own = ImplicitScorer.load(models / "policy", models / "base", 0.2)
  found = own.probabilities([(each["problem"], each["steps"]) for each in before])
  for old, new, probabilities in zip(before, after, found, strict=True):
    assert old.items() <= new.items()
    right = [each["1"] for each in new["rating_probs"]]
    np.testing.assert_allclose(right, probabilities[:, 1], atol=1e-5)
    assert new["prm_score"] == pytest.approx(np.prod(right))
  about = json.loads((tmp_path / "scored.jsonl.contract.json").read_text())
  assert about["recipe"] == "implicit" and about["beta"] == 0.2
  assert about["model"]["sha256"] != about["reference"]["sha256"]
  assert about["reference"]["directory"] == str(models / "base")


def test_wrong_flags_of_score_py_are_errors(models, samples, tmp_path):
  """Different tokenizers, conflicting flags and a beta of 0 are errors, and nothing is written."""

  def error(*flags, readout="implicit"):
    files = (f"--input={samples}", f"--output={tmp_path}/o")
    return call_script("score.py", *files, f"--readout={readout}", *flags, code=1).stderr

  policy, base = f"--model={models / 'policy'}", f"--reference={models / 'base'}"
  other = error(policy, f"--reference={models / 'other'}")
  assert f"{models / 'policy'} and {models / 'other'} have different tokenizers" in other
  assert "--readout=implicit needs --reference=DIR" in error(policy)
  assert "only it takes --reference and --beta" in error(policy, base, readout="trl")
  assert "--beta=0.0: expected a positive number" in error(policy, base, "--beta=0")
  step = error(f"--checkpoint={models / 'policy'}", "--step=3", base)
  assert "--step=3: " in step and "is a public model" in step
  assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_classifier_is_no_language_model(models, tmp_path):
  """A model with a class head, which predicts no text, is refused as policy; so is a wrong path."""
  tiny.public(tmp_path / "prm", 320, models / "policy" / "tokenizer.model", head=True)
  with pytest.raises(ValueError, match="prm: a classifier, which predicts no text"):
    ImplicitScorer.load(tmp_path / "prm", models / "base")
  with pytest.raises(FileNotFoundError, match=r"none: neither a model's config.json nor a run's"):
    ImplicitScorer.load(tmp_path / "none", models / "base")


def test_runs_of_train_py_on_text_are_policy_and_reference(text_run, monkeypatch):
  """Work directories of language models are accepted, and those of reward models are refused."""
  with tiny.first_device():
    own = ImplicitScorer.load(text_run, text_run)
    assert own.step == 2 and own.facts()["model"]["step"] == 2
    np.testing.assert_array_equal(own.probabilities([("1 + 1", ("2", "so 2"))])[0], 0.5)
    about, tokenizer = scorer_lib.newest(text_run)
    contract = dataclasses.replace(about.contract, objective="process")
    process = dataclasses.replace(about, contract=contract)
    monkeypatch.setattr(scorer_lib, "newest", lambda workdir: (process, tokenizer))
    with pytest.raises(ValueError, match=r"run: trained as a reward model \(process\)"):
      ImplicitScorer.load(text_run, text_run)
