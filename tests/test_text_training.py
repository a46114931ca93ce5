"""Language-model training: rows of text, the next-token loss, runs that start from its result."""

import dataclasses
import gzip
import itertools
import json

import jax
import numpy as np
import optax
import pytest
import tiny
from conftest import call_script, write_lines

from prm_jax import config as config_lib
from prm_jax.input_pipeline import text_dataset, tokenizers
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import families, weights
from prm_jax.scoring import scorer
from prm_jax.training import checkpoint, loop, trainable
from prm_jax.training import loss as loss_lib
from prm_jax.training import step as step_lib

TEXT = config_lib.Loss(objective="language_model")


@pytest.fixture(autouse=True, scope="module")
def one_device():
  with tiny.first_device():
    yield


def targets(piece):
  """The (previous, next) pairs of tokens that a piece trains on."""
  at = np.flatnonzero(piece.previous >= 0)
  return list(zip(piece.tokens[piece.previous[at]].tolist(), piece.tokens[at].tolist()))


@pytest.mark.parametrize("length", [2, 3, 7, 11, 64])
def test_a_long_document_continues_in_further_rows(length):
  """A document of any length predicts each token but the first once, from the one before it."""
  text = "0123456789"
  pieces, lost = text_dataset.encode(None, text, tiny.TOKENIZER, length)
  whole = [tiny.TOKENIZER.bos_id, *tiny.TOKENIZER.encode(text), tiny.TOKENIZER.eos_id]
  assert [pair for piece in pieces for pair in targets(piece)] == list(itertools.pairwise(whole))
  assert max(map(len, pieces)) <= length and lost == 0


def test_only_completions_are_learnt():
  """Tokens of a prompt are not predicted; those of a completion that do not fit are counted."""
  t = tiny.TOKENIZER
  (piece,), lost = text_dataset.encode("ab", "cd", t, 64)
  c, d = t.encode("cd")
  assert targets(piece) == [(t.encode("b")[0], c), (c, d), (d, t.eos_id)]
  assert lost == 0
  (piece,), lost = text_dataset.encode("ab", "cd", t, 4)
  assert targets(piece) == [(t.encode("b")[0], c)] and lost == 2
  assert text_dataset.encode("abcdef", "g", t, 4) == ([], 5)


def test_text_files_may_be_compressed_and_errors_name_the_line(tmp_path):
  """A .gz file gives the rows of the plain one; an empty file or a bad line is an error."""
  path = write_lines(tmp_path / "f.jsonl", [{"text": "abc"}, {"prompt": "", "completion": "de"}])
  packed = tmp_path / "f.jsonl.gz"
  packed.write_bytes(gzip.compress(path.read_bytes()))
  rows, manifest = text_dataset.load(path, tiny.TOKENIZER, 16, tiny.TOKENIZER.vocab_size)
  assert (
    rows.hash == text_dataset.load(packed, tiny.TOKENIZER, 16, tiny.TOKENIZER.vocab_size)[0].hash
  )
  assert manifest["targets"] == {"tokens": 4 + 3} and manifest["rows"] == 1
  empty = write_lines(tmp_path / "empty.jsonl", [])
  with pytest.raises(ValueError, match=r"empty\.jsonl: empty: it has no line"):
    text_dataset.load(empty, tiny.TOKENIZER, 16, tiny.TOKENIZER.vocab_size)
  bad = write_lines(tmp_path / "f.jsonl", [{"text": "fine"}, {"prompt": "a", "completion": ["b"]}])
  with pytest.raises(ValueError, match=r"f.jsonl:2: .*completion"):
    text_dataset.load(bad, tiny.TOKENIZER, 16, tiny.TOKENIZER.vocab_size)
  with pytest.raises(ValueError, match=r"f.jsonl:1: the prompt spells out token .* only 3"):
    text_dataset.load(path, tiny.TOKENIZER, 16, 3)


def test_logits_in_parts_give_the_same_loss(monkeypatch):
  """Computing a row's logits in parts gives the loss and gradient of all logits at once."""
  batch = tiny.batch(rows=2, row_length=50)
  model = tiny.merged()
  hidden = jax.random.normal(jax.random.key(0), (2, 50, tiny.MODEL.width))

  weights = jax.random.uniform(jax.random.key(1), (2, 50))

  def at_once(hidden):
    logits = model.next_token_logits(hidden)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens)
    return (nll * weights).sum()

  def summed(hidden):
    return (loss_lib.token_nll(model, hidden, batch.tokens) * weights).sum()

  expected = jax.jit(jax.value_and_grad(at_once))(hidden)
  for size in (16, 64):
    monkeypatch.setattr(loss_lib, "LOGITS", size)
    parts = jax.jit(jax.value_and_grad(summed))(hidden)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), parts, expected
    )


@pytest.fixture(scope="module")
def text_run(arithmetic_data, tmp_path_factory):
  """(work directory, last metrics) of a short run on text that trains low-rank factors."""
  directory = tmp_path_factory.mktemp("text")
  lines = [{"text": "1 + 1 = 2. " * 8}, {"prompt": "2 + 2 =", "completion": " 4"}]
  train, held = (write_lines(directory / f"{name}.jsonl", lines) for name in ("train", "held"))
  given = tiny.experiment(arithmetic_data)
  text = dataclasses.replace(
    given,
    data=dataclasses.replace(given.data, text_train=str(train), text_eval=str(held)),
    model=dataclasses.replace(tiny.MODEL, lora_rank=2, lora_targets=("query", "gate")),
    loss=TEXT,
    optim=config_lib.Optim(learning_rate=3e-2, warmup_steps=0, trained="lora"),
    train=config_lib.Train(steps=30, batch_rows=2, log_every=30, eval_every=15, save_every=30),
  )
  metrics = loop.run(text, directory / "text")
  return directory / "text", metrics


def test_microbatches_of_text_give_the_gradient_of_the_batch():
  """Text rows, which have no reads, are accumulated too: sums as of the whole batch."""
  batch = dataclasses.replace(tiny.batch(rows=4), read_positions=np.zeros((4, 0), np.int32))
  count = lambda part: part.tokens.sum() + part.read_positions.size
  assert step_lib.accumulated(count, batch, 2) == count(batch)


def test_a_process_model_starts_from_a_language_model(arithmetic_data, text_run):
  """Training on text lowers its loss, and a process model starts from the run, factors merged."""
  workdir, metrics = text_run
  evaluations = [record for record in tiny.records(workdir) if record["split"] == "test"]
  assert evaluations[-1]["nll"] == metrics["nll"] < evaluations[0]["nll"]
  assert metrics["perplexity"] == pytest.approx(np.exp(metrics["nll"]))

  process = tiny.change(tiny.experiment(arithmetic_data), "data", tokenizer="")
  init = config_lib.Init(checkpoint=str(workdir))
  process = dataclasses.replace(process, model=config_lib.Model(), init=init)
  about, params = tiny.public_params(process)
  chosen = {"embedding_std": config_lib.Model().embedding_std, "vocab_size": about.vocab_size}
  assert about.config.model == dataclasses.replace(tiny.MODEL, **chosen)
  trained = tiny.final_state(workdir).params
  assert params["head"].shape == (tiny.MODEL.width, 3) and not np.any(params["head"])
  np.testing.assert_array_equal(params["embedding"], trained["embedding"])
  moved = np.abs(params["blocks"]["gate"] - trained["blocks"]["gate"]).max()
  assert moved > 1e-3  # the product of the factors was added


def test_a_language_model_is_exported_with_merged_factors(text_run, tmp_path):
  """export.py --kind=causal-lm writes a text run's weights, factors merged, and its tokenizer.

  Without the flag, a run without a step head is an error.
  """
  workdir, _ = text_run
  flags = (f"--checkpoint={workdir}", f"--output={tmp_path}/lm")
  result = call_script("export.py", *flags, code=1)
  assert "'language_model' has no step head; export it with --kind=causal-lm" in result.stderr
  result = call_script("export.py", *flags, "--kind=causal-lm")
  _, tokenizer = scorer.newest(workdir)
  on = sharding_lib.make_mesh(config_lib.Mesh())
  _, about, params = checkpoint.restore_params(workdir, on)
  expected = trainable.merge_lora(params, about.config.model)
  config = families.read(tmp_path / "lm")
  written = json.loads((tmp_path / "lm/config.json").read_text())
  assert (written["model_type"], config.vocab_size) == ("llama", about.vocab_size)
  abstract = decoder.abstract_params(config, about.vocab_size, 1, on)
  loaded = weights.load(tmp_path / "lm", abstract, config)
  heads = {name: np.zeros_like(expected[name]) for name in ("head", "head_bias")}
  jax.tree.map(np.testing.assert_array_equal, loaded, expected | heads)
  assert tokenizers.load(tmp_path / "lm").hash == tokenizer.hash


def test_a_language_model_cannot_score_steps(text_run, arithmetic_data, tmp_path):
  """Scoring or evaluating with a run on text is an error that says what to do with the run."""
  workdir, _ = text_run
  solutions, output = tmp_path / "solutions.jsonl", tmp_path / "output"
  solutions.write_text('{"problem": "1 + 1", "steps": ["2"]}\n')
  for name, flag in [
    ("score.py", f"--input={solutions}"),
    ("evaluate.py", f"--data_dir={arithmetic_data}"),
  ]:
    result = call_script(name, f"--checkpoint={workdir}", f"--output={output}", flag, code=1)
    assert "trained on text, so it has no step probabilities" in result.stderr
    assert f"--config.init.checkpoint={workdir}" in result.stderr
  assert [*tmp_path.iterdir()] == [solutions]


@pytest.mark.parametrize("unused", [{"share": 0.25}, {"also": "x"}, {"eval_split": "train"}])
def test_settings_of_labelled_data_are_refused_for_texts(unused):
  """Settings that training on texts would ignore are errors that name them."""
  data = config_lib.Data(text_train="a", text_eval="b", **unused)
  with pytest.raises(ValueError, match=rf"data\.{next(iter(unused))}=.*expected its default"):
    config_lib.Experiment(loss=TEXT, data=data)


def test_text_files_require_the_language_model_objective():
  """Text without its objective, the objective without text, and one of two files are errors."""
  for loss, files in [(config_lib.Loss(), ("a", "b")), (TEXT, ("", "")), (TEXT, ("a", ""))]:
    data = config_lib.Data(text_train=files[0], text_eval=files[1])
    with pytest.raises(ValueError, match="expected both texts with language_model"):
      config_lib.Experiment(loss=loss, data=data)
