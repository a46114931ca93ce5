"""Starting a run from a public model or from another run."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.input_pipeline import tokenizers
from prm_jax.model import decoder
from prm_jax.pretrained import export, safetensors_files, weights
from prm_jax.scoring.scorer import Scorer
from prm_jax.tpu import compilation
from prm_jax.training import checkpoint, initialization, loop
from prm_jax.training import step as step_lib

PUBLIC_ROWS = 400  # rows of the public model's embedding: more than its tokenizer has ids


@pytest.fixture(autouse=True, scope="module")
def one_device():
  with tiny.first_device():
    yield


@pytest.fixture(scope="module")
def public(arithmetic_data, tmp_path_factory):
  """(directory of a public model with its tokenizer, its parameters)."""
  directory = tmp_path_factory.mktemp("public") / "model"
  return directory, tiny.public(directory, PUBLIC_ROWS, arithmetic_data / "tokenizer.model")


@pytest.fixture(scope="module")
def experiment(arithmetic_data, public):
  """A run of two updates that takes architecture and tokenizer from the public model."""
  given = tiny.experiment(arithmetic_data)
  return dataclasses.replace(
    tiny.change(given, "train", steps=2),
    model=config_lib.Model(unroll_layers=True),
    init=config_lib.Init(checkpoint=str(public[0])),
    data=dataclasses.replace(given.data, tokenizer=""),
  )


@pytest.fixture(scope="module")
def whole(experiment, public, tmp_path_factory):
  """(an experiment that starts from a copy of the public model, the work directory of its run)."""
  directory = tmp_path_factory.mktemp("whole")
  shutil.copytree(public[0], directory / "public")
  experiment = tiny.change(experiment, "init", checkpoint=str(directory / "public"))
  experiment = tiny.change(experiment, "train", save_every=1)
  loop.run(experiment, directory / "run")
  return experiment, directory / "run"


@pytest.fixture
def classifier(public, tmp_path):
  """(directory of the public model as a token classifier, its parameters)."""
  directory = tmp_path / "classifier"
  return directory, tiny.public(directory, PUBLIC_ROWS, public[0] / "tokenizer.model", head=True)


def test_a_run_starts_from_the_public_model(experiment, public):
  """A run starts with the public model's architecture and parameters, and a step head of zeros."""
  metadata, params = tiny.public_params(experiment)
  assert metadata.config.model == dataclasses.replace(
    tiny.MODEL,
    unroll_layers=True,
    embedding_std=config_lib.Model().embedding_std,
    vocab_size=metadata.vocab_size,
  )
  assert metadata.vocab_size == PUBLIC_ROWS
  original = dict(public[1])
  for name in ("head", "head_bias"):
    assert not np.asarray(params[name]).any()
    params.pop(name), original.pop(name)
  jax.tree.map(np.testing.assert_array_equal, params, original)


def test_a_head_of_tokens_is_taken_from_the_language_model_head(experiment, public):
  """init.head="tokens" makes the step logits the next-token logits of the classes' tokens.

  A text that is no token, or a number of texts other than that of the classes, is an error.
  """
  tokenizer = tokenizers.load(public[0])
  tokens = ("1", "2", "+")
  asked = tiny.change(experiment, "init", head="tokens", head_tokens=tokens)
  ids = [tokenizer.encode(text)[0] for text in tokens]
  _, params = tiny.public_params(asked)
  np.testing.assert_array_equal(params["head"], public[1]["embedding"][np.array(ids)].T)
  for texts in [("1", "no such token", "+"), ("1", "2")]:
    with pytest.raises(ValueError, match=r"init\.head_tokens=.* expected 3 texts, one for each"):
      tiny.public_params(tiny.change(asked, "init", head_tokens=texts))


def test_a_random_head_depends_on_the_seed(experiment):
  """A random head follows the run's seed and `head_std` and has no bias; the trunk stays."""
  asked = tiny.change(experiment, "init", head="random", head_std=0.5)
  _, params = tiny.public_params(asked)
  _, again = tiny.public_params(asked)
  _, other = tiny.public_params(tiny.change(asked, "train", seed=1))
  np.testing.assert_array_equal(params["head"], again["head"])
  assert 0.3 < np.std(params["head"]) < 0.7 and not np.asarray(params["head_bias"]).any()
  assert np.abs(params["head"] - other["head"]).max() > 0.1
  np.testing.assert_array_equal(params["embedding"], other["embedding"])


def test_a_classifiers_head_is_kept_for_the_same_classes(experiment, classifier):
  """A classifier's head is kept unless its prm_jax.json gives it other classes."""
  directory, original = classifier
  from_it = tiny.change(experiment, "init", checkpoint=str(directory))

  def heads(experiment=from_it, contract=None):
    if contract:
      (directory / export.CONTRACT).write_text(json.dumps(dataclasses.asdict(contract)))
    return [np.asarray(tiny.public_params(experiment)[1][name]) for name in ("head", "head_bias")]

  theirs = [original[name] for name in ("head", "head_bias")]
  jax.tree.map(np.testing.assert_array_equal, heads(), theirs)
  jax.tree.map(np.testing.assert_array_equal, heads(contract=tiny.contract()), theirs)
  other = dataclasses.replace(tiny.contract(), classes=("1", "0", "-1"))
  assert not any(x.any() for x in heads(contract=other))
  tokens = tiny.change(from_it, "init", head="tokens", head_tokens=("1", "2", "+"))
  head, bias = heads(tokens)
  assert head.any() and not bias.any()


def test_a_missing_language_model_head_is_an_error_only_if_needed(experiment, classifier):
  """A classifier without a language-model head is refused only by runs that need one.

  A language-model head apart from the embedding gives a head of tokens its columns.
  """
  directory, original = classifier
  values = json.loads((directory / "config.json").read_text())
  (directory / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": False}))
  from_it = tiny.change(experiment, "init", checkpoint=str(directory))
  np.testing.assert_array_equal(tiny.public_params(from_it)[1]["embedding"], original["embedding"])
  weighted = tiny.change(from_it, "loss", language_model_weight=0.5)
  with pytest.raises(ValueError, match=r"classifier: no lm_head\.weight.*_weight=0\.5 needs"):
    tiny.public_params(weighted)
  asked = tiny.change(from_it, "init", head="tokens", head_tokens=("1", "2", "+"))
  with pytest.raises(ValueError, match=r"no lm_head\.weight.* init\.head='tokens' with"):
    tiny.public_params(asked)
  untied = dataclasses.replace(tiny.MODEL, tied_embeddings=False)
  columns = np.arange(16.0 * PUBLIC_ROWS, dtype=np.float32).reshape(16, PUBLIC_ROWS)
  tensors = weights.unload(original | {"language_model": columns}, untied)
  safetensors_files.write_directory(directory, tensors)
  ids = [tokenizers.load(directory).encode(text)[0] for text in ("1", "2", "+")]
  np.testing.assert_array_equal(tiny.public_params(asked)[1]["head"], columns[:, ids])


def test_a_run_starts_from_another(experiment, whole):
  """A run that starts from another keeps its head for the same objective, else begins at zeros."""
  state = tiny.final_state(whole[1])
  from_it = tiny.change(experiment, "init", checkpoint=str(whole[1]))
  metadata, params = tiny.public_params(from_it)
  assert np.any(params["head"])
  jax.tree.map(np.testing.assert_array_equal, params, state.params)
  assert compilation.resolved(from_it) == (metadata.config, PUBLIC_ROWS)
  _, params = tiny.public_params(tiny.change(from_it, "loss", objective="outcome"))
  assert params["head"].shape == (tiny.MODEL.width, 2) and not np.any(params["head"])
  np.testing.assert_array_equal(params["embedding"], state.params["embedding"])


def test_a_run_does_not_need_the_public_model_again(whole, public, tmp_path):
  """A run resumes bit for bit and can be read after the public model has been deleted."""
  experiment, finished = whole

  def killed(self, *arguments, save=checkpoint.Checkpointer.save):
    save(self, *arguments)
    raise KeyboardInterrupt

  with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(checkpoint.Checkpointer, "save", killed)
    loop.run(experiment, tmp_path / "killed")
  shutil.move(experiment.init.checkpoint, tmp_path / "elsewhere")
  loop.run(experiment, tmp_path / "killed")
  shutil.move(tmp_path / "elsewhere", experiment.init.checkpoint)
  tiny.assert_same_run(finished, tmp_path / "killed")
  assert tiny.final_state(finished).params["embedding"].shape[0] == PUBLIC_ROWS
  assert tokenizers.load(tmp_path / "killed").hash == tokenizers.load(public[0]).hash
  with pytest.raises(ValueError, match=r"init\.checkpoint: .* then, .* now"):
    loop.run(tiny.change(experiment, "init", checkpoint=str(public[0])), tmp_path / "killed")


def test_settings_that_contradict_the_public_model_are_refused(experiment, public, tmp_path):
  """The error names the architecture's field, a missing tokenizer, or one with too many ids."""
  with pytest.raises(ValueError, match=r"model\.width=32, but .* has 16"):
    loop.read_rows(tiny.change(experiment, "model", width=32))
  found = initialization.architecture(str(public[0]))
  same = initialization.resolve(tiny.change(experiment, "model", width=16), found)
  assert same == initialization.resolve(experiment, found)
  with pytest.raises(FileNotFoundError, match=r"no tokenizer: give --config\.data.tokenizer"):
    compilation.resolved(tiny.change(experiment, "init", checkpoint=""))
  small = tmp_path / "small"
  tiny.public(small, 300, public[0] / "tokenizer.model")
  with pytest.raises(ValueError, match=r"ids, but .* has an embedding of 300 rows"):
    loop.read_rows(tiny.change(experiment, "init", checkpoint=str(small)))


@pytest.fixture
def other_decoder():
  """Clears the caches of programs of `StepScorer` before the test and after it."""
  caches = (step_lib.graph, step_lib._programs)
  for cache in caches:
    cache.cache_clear()
  yield
  for cache in caches:
    cache.cache_clear()


@pytest.mark.usefixtures("other_decoder")
def test_a_new_head_needs_changes_of_the_decoder_only(experiment, public, tmp_path, monkeypatch):
  """A two-layer head declared in the decoder initialises, trains, scores, and is not exported.

  Its parameters are named head*, and none of them `head`.
  """
  init = decoder.StepScorer.__init__

  def declare(self, c, vocab_size, num_classes, rngs, heads=1):
    init(self, c, vocab_size, num_classes, rngs, heads)
    self.head_hidden = decoder.weight(rngs, (c.width, c.width), c.width**-0.5, ("fsdp", None))
    self.head_out = self.head
    del self.head, self.head_bias

  def class_logits(self, hidden, read_positions):
    x = jnp.take_along_axis(hidden, read_positions[..., None], axis=1)
    logits = jax.nn.relu(x @ self.head_hidden[...]) @ self.head_out[...]
    return logits.reshape(*read_positions.shape, -1, self.num_classes)

  monkeypatch.setattr(decoder.StepScorer, "__init__", declare)
  monkeypatch.setattr(decoder.StepScorer, "class_logits", class_logits)
  run = tiny.change(experiment, "optim", trained="head")
  _, start = tiny.public_params(run)
  assert start["head_hidden"].std() == pytest.approx(tiny.MODEL.width**-0.5, rel=0.2)
  loop.run(run, tmp_path / "run")
  scorer = Scorer.load(tmp_path / "run")
  trained = scorer.params
  changed = {name for name in trained if name != "blocks" and (trained[name] != start[name]).any()}
  assert changed == {"head_hidden", "head_out"}
  assert scorer.probabilities([("1+1", ["2"])])[0].shape == (1, 3)
  options = {"contract": None, "kind": "causal-lm"}
  export.write(tmp_path / "lm", trained, scorer.config, PUBLIC_ROWS, **options)
