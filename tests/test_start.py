"""Starting a run from a public checkpoint: what is read, what is refused, what is stored."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.input_pipeline import tokenizers
from prm_jax.training import checkpoint, loop, mesh, start

PUBLIC_ROWS = 400  # of the public model's embedding: more than its tokenizer has ids


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  """Runs take one of the eight CPU devices: that compiles faster."""
  devices = jax.devices()[:1]
  monkeypatch.setattr(mesh, "make_mesh", functools.partial(mesh.make_mesh, devices=devices))


@pytest.fixture(scope="module")
def public(arithmetic_data, tmp_path_factory):
  """(directory of a public model with its tokenizer, its parameters)."""
  directory = tmp_path_factory.mktemp("public") / "model"
  return directory, tiny.public(directory, PUBLIC_ROWS, arithmetic_data / "tokenizer.model")


@pytest.fixture
def experiment(arithmetic_data, public):
  """A run of two updates that says nothing about architecture or tokenizer."""
  given = tiny.experiment(arithmetic_data, config_lib.Loss())
  return dataclasses.replace(
    tiny.change(given, "train", steps=2),
    model=config_lib.Model(unroll_layers=True),
    init=config_lib.Init(checkpoint=str(public[0])),
    data=dataclasses.replace(given.data, tokenizer=""),
  )


def public_params(experiment):
  rows = loop.read_rows(experiment)
  with jax.set_mesh(on := mesh.make_mesh(config_lib.Mesh())):
    about = rows.metadata
    shape = (about.vocab_size, len(about.contract.classes))
    abstract = loop.make_programs(about.config, *shape, on).abstract
    params = start.public_params(rows.metadata.config, rows.tokenizer, abstract.params)
  return rows.metadata, params


def test_the_first_state_is_the_public_model(experiment, public):
  """Its hidden states are those of the weights in the files, under a head of zeros."""
  metadata, params = public_params(experiment)
  assert metadata.config.model == dataclasses.replace(
    tiny.MODEL, unroll_layers=True, embedding_std=config_lib.Model().embedding_std
  )
  assert metadata.vocab_size == PUBLIC_ROWS
  original = dict(public[1])
  for name in ("head", "head_bias"):
    assert not np.asarray(params[name]).any()
    params.pop(name), original.pop(name)
  jax.tree.map(np.testing.assert_array_equal, params, original)


def test_the_head_of_tokens_is_the_language_model_head(experiment, public):
  """Step logits are then the next-token logits of the classes' tokens, in class order."""
  tokenizer = tokenizers.load(public[0])
  tokens = ("1", "2", "+")
  asked = tiny.change(experiment, "init", head="tokens", head_tokens=tokens)
  ids = [tokenizer.encode(text)[0] for text in tokens]
  _, params = public_params(asked)
  np.testing.assert_array_equal(params["head"], public[1]["embedding"][np.array(ids)].T)
  untied = {"language_model": np.arange(12.0).reshape(3, 4)}
  np.testing.assert_array_equal(
    start.head_rows(untied, (3, 0), np.float32), untied["language_model"][:, [3, 0]]
  )
  many = tiny.change(asked, "init", head_tokens=("1", "no such token", "+"))
  with pytest.raises(ValueError, match=r"'no such token' is .* tokens"):
    public_params(many)
  with pytest.raises(ValueError, match="2 texts, but the head has 3 classes"):
    public_params(tiny.change(asked, "init", head_tokens=("1", "2")))


def test_a_run_stores_all_it_needs(experiment, public, tmp_path):
  """It is resumed, bit for bit, and read without the public model, which has gone by then."""
  gone = tmp_path / "public"
  shutil.copytree(public[0], gone)
  experiment = tiny.change(experiment, "init", checkpoint=str(gone))
  experiment = tiny.change(experiment, "train", save_every=1)
  loop.run(experiment, tmp_path / "whole")

  class KilledError(Exception):
    pass

  def killed(self, state, metadata, save=checkpoint.Checkpointer.save):
    save(self, state, metadata)
    raise KilledError

  with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
    patch.setattr(checkpoint.Checkpointer, "save", killed)
    loop.run(experiment, tmp_path / "killed")
  shutil.rmtree(gone)
  loop.run(experiment, tmp_path / "killed")
  whole, resumed = (tiny.final_state(tmp_path / name) for name in ("whole", "killed"))
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)
  assert whole.params["embedding"].shape[0] == PUBLIC_ROWS
  assert tokenizers.load(tmp_path / "whole").hash == tokenizers.load(public[0]).hash
  with pytest.raises(ValueError, match=r"init\.checkpoint: .* then, .* now"):
    loop.run(tiny.change(experiment, "init", checkpoint=str(public[0])), tmp_path / "killed")


def test_what_contradicts_the_public_model_is_refused(experiment, public, tmp_path):
  """A field of the architecture, or a tokenizer with ids beyond the embedding, is named."""
  with pytest.raises(ValueError, match=r"model\.width=32, but .* has 16"):
    loop.read_rows(tiny.change(experiment, "model", width=32))
  same = start.resolve(tiny.change(experiment, "model", width=16))
  assert same == start.resolve(experiment)
  with pytest.raises(FileNotFoundError, match=r"no tokenizer: give --config\.data.tokenizer"):
    loop.read_rows(tiny.change(experiment, "init", checkpoint=""))
  small = tmp_path / "small"
  tiny.public(small, 300, public[0] / "tokenizer.model")
  with pytest.raises(ValueError, match=r"ids, but .* has an embedding of 300 rows"):
    loop.read_rows(tiny.change(experiment, "init", checkpoint=str(small)))


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"head": "tokens", "checkpoint": "d"}, "init.head_tokens="),
    ({"head_tokens": ("+",), "checkpoint": "d"}, "init.head_tokens="),
    ({"head": "tokens", "head_tokens": ("+",)}, "needs init.checkpoint"),
    ({"head_tokens": ["+"]}, "expected a tuple of texts"),
  ],
)
def test_half_an_initial_head_is_an_error(values, message):
  """Tokens and their use come together, and only with a model to take them from."""
  with pytest.raises(ValueError, match=message):
    config_lib.Init(**values)


def test_metadata_survives_json(experiment):
  """Nested settings, tuples and all, come back as they were."""
  asked = tiny.change(experiment, "init", head="tokens", head_tokens=("-", "0", "+"))
  metadata = checkpoint.Metadata(asked, tiny.contract(), 7, "hash")
  assert checkpoint.Metadata.from_json(json.loads(json.dumps(metadata.to_json()))) == metadata
