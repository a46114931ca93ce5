"""Language-model training: lines of text to rows, next-token loss, a run to start others from."""

import dataclasses
import gzip
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from conftest import call_script

from prm_jax import config as config_lib
from prm_jax.input_pipeline import text_dataset, tokenizers
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import families, weights
from prm_jax.scoring import scorer
from prm_jax.training import checkpoint, loop, trainable
from prm_jax.training import loss as loss_lib

TEXT = config_lib.Loss(objective="language_model")


@pytest.fixture(autouse=True, scope="module")
def one_device():
  with tiny.first_device():
    yield


def write(path, *records):
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return path


def targets(piece):
  """The (previous, next) tokens that a piece trains on."""
  at = np.flatnonzero(piece.previous >= 0)
  return list(zip(piece.tokens[piece.previous[at]].tolist(), piece.tokens[at].tolist()))


@pytest.mark.parametrize("length", [2, 3, 7, 11, 64])
def test_a_document_is_continued_in_other_rows(length):
  """Whatever the row, each token but the first is predicted once, from the one before it."""
  text = "0123456789"
  pieces, lost = text_dataset.encode(None, text, tiny.TOKENIZER, length)
  whole = [tiny.TOKENIZER.bos_id, *tiny.TOKENIZER.encode(text), tiny.TOKENIZER.eos_id]
  assert [pair for piece in pieces for pair in targets(piece)] == list(itertools.pairwise(whole))
  assert max(map(len, pieces)) <= length and lost == 0


def test_only_completions_are_learnt():
  """A prompt is read and not predicted; what does not fit the row is counted."""
  t = tiny.TOKENIZER
  (piece,), lost = text_dataset.encode("ab", "cd", t, 64)
  c, d = t.encode("cd")
  assert targets(piece) == [(t.encode("b")[0], c), (c, d), (d, t.eos_id)]
  assert lost == 0
  (piece,), lost = text_dataset.encode("ab", "cd", t, 4)
  assert targets(piece) == [(t.encode("b")[0], c)] and lost == 2
  assert text_dataset.encode("abcdef", "g", t, 4) == ([], 5)


def test_files_may_be_compressed_or_useless(tmp_path):
  """The rows of a .gz are those of the file; nothing to learn, or a bad line, is an error."""
  path = write(tmp_path / "f.jsonl", {"text": "abc"}, {"prompt": "", "completion": "de"})
  packed = tmp_path / "f.jsonl.gz"
  packed.write_bytes(gzip.compress(path.read_bytes()))
  rows, manifest = text_dataset.load(path, tiny.TOKENIZER, 16)
  assert rows.hash == text_dataset.load(packed, tiny.TOKENIZER, 16)[0].hash
  assert manifest["targets"] == {"tokens": 4 + 3} and manifest["rows"] == 1
  empty = write(tmp_path / "empty.jsonl")
  with pytest.raises(ValueError, match=r"empty\.jsonl: empty: it has no line"):
    text_dataset.load(empty, tiny.TOKENIZER, 16)
  bad = write(tmp_path / "f.jsonl", {"text": "fine"}, {"prompt": "a", "completion": ["b"]})
  with pytest.raises(ValueError, match=r"f.jsonl:2: .*completion"):
    text_dataset.load(bad, tiny.TOKENIZER, 16)


def test_logits_in_parts_change_nothing(monkeypatch):
  """The loss and its gradient of long rows, in parts, are those of all logits at once."""
  batch = tiny.batch(rows=2, row_length=50)
  model = tiny.merged()
  hidden = jax.random.normal(jax.random.key(0), (2, 50, tiny.MODEL.width))

  def naive(hidden):
    before = jnp.take_along_axis(hidden, jnp.maximum(batch.previous, 0)[..., None], 1)
    logits = model.next_token_logits(before)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens)
    return (nll * (batch.previous >= 0)).sum()

  expected = jax.jit(jax.value_and_grad(naive))(hidden)
  for size in (16, 64):
    monkeypatch.setattr(loss_lib, "LOGITS", size)
    found = jax.jit(jax.value_and_grad(lambda h: loss_lib.next_token_nll(model, h, batch)))(hidden)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected
    )


@pytest.fixture(scope="module")
def text_run(arithmetic_data, tmp_path_factory):
  """The work directory of a short run on text with low-rank factors, and its last metrics."""
  directory = tmp_path_factory.mktemp("text")
  lines = [{"text": "1 + 1 = 2. " * 8}, {"prompt": "2 + 2 =", "completion": " 4"}]
  train, held = (write(directory / f"{name}.jsonl", *lines) for name in ("train", "held"))
  given = tiny.experiment(arithmetic_data, config_lib.Loss())
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


def test_a_process_model_starts_from_a_language_model(arithmetic_data, text_run):
  """Text is learnt; the run's work directory is then a checkpoint to start from, factors merged."""
  workdir, metrics = text_run
  evaluations = [record for record in tiny.records(workdir) if record["split"] == "test"]
  assert evaluations[-1]["nll"] == metrics["nll"] < evaluations[0]["nll"]
  assert metrics["perplexity"] == pytest.approx(np.exp(metrics["nll"]))

  process = tiny.change(tiny.experiment(arithmetic_data, config_lib.Loss()), "data", tokenizer="")
  init = config_lib.Init(checkpoint=str(workdir))
  process = dataclasses.replace(process, model=config_lib.Model(), init=init)
  about, params = tiny.public_params(process)
  chosen = {"embedding_std": config_lib.Model().embedding_std, "vocab_size": about.vocab_size}
  assert about.config.model == dataclasses.replace(tiny.MODEL, **chosen)
  trained = tiny.final_state(workdir).params
  assert params["head"].shape == (tiny.MODEL.width, 3) and not np.any(params["head"])
  np.testing.assert_array_equal(params["embedding"], trained["embedding"])
  moved = np.abs(params["blocks"]["gate"] - trained["blocks"]["gate"]).max()
  assert moved > 1e-3  # by the product of the factors


def test_a_language_model_exports(text_run, tmp_path):
  """export.py --kind=causal-lm of a run on text: its weights, factors merged, and tokenizer."""
  workdir, _ = text_run
  flags = (f"--checkpoint={workdir}", f"--output={tmp_path}/lm")
  done = call_script("export.py", *flags)
  assert done.returncode == 1
  assert "'language_model', which has no step head; --kind=causal-lm" in done.stderr
  done = call_script("export.py", *flags, "--kind=causal-lm")
  assert done.returncode == 0, done.stderr
  _, tokenizer = scorer.newest(workdir)
  on = sharding_lib.make_mesh(config_lib.Mesh())
  _, about, params = checkpoint.restore_params(workdir, on)
  expected = trainable.merge_lora(params, about.config.model)
  preset = families.read(tmp_path / "lm")
  assert (preset.family, preset.config.vocab_size) == ("llama", about.vocab_size)
  abstract = decoder.abstract_params(preset.config, about.vocab_size, 1, on)
  loaded = weights.load(tmp_path / "lm", abstract, preset.config)
  heads = {name: np.zeros_like(expected[name]) for name in ("head", "head_bias")}
  jax.tree.map(np.testing.assert_array_equal, loaded, expected | heads)
  assert tokenizers.load(tmp_path / "lm").hash == tokenizer.hash


def test_a_model_of_text_is_not_scored_with(text_run, arithmetic_data, tmp_path):
  """It has a head of one class that nothing trained: an error that says what to do with it."""
  workdir, _ = text_run
  for name, flag in [
    ("score.py", "--input=none"),
    ("evaluate.py", f"--data_dir={arithmetic_data}"),
  ]:
    done = call_script(name, f"--checkpoint={workdir}", f"--output={tmp_path}/o", flag)
    assert done.returncode == 1
    assert "trained on text, so it has no step probabilities" in done.stderr
    assert f"--config.init.checkpoint={workdir}" in done.stderr
  assert not list(tmp_path.iterdir())


def test_text_and_its_objective_come_together():
  """Text without the objective, the objective without text, and half of the text are errors."""
  for loss, files in [(config_lib.Loss(), ("a", "b")), (TEXT, ("", "")), (TEXT, ("a", ""))]:
    data = config_lib.Data(text_train=files[0], text_eval=files[1])
    with pytest.raises(ValueError, match="expected both texts with language_model"):
      config_lib.Experiment(loss=loss, data=data)
