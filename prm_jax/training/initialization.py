"""Where a run starts: its architecture, its tokenizer and its parameters at step 0.

From scratch, or from a public checkpoint (`init.checkpoint`): then the directory's config.json says
the architecture, its tokenizer is the default, and its weights are streamed into their shardings.
The work directory of another run serves as well: of a language model say, or of the same classes,
whose step head is then trained on.
What was found is stored with the run's own checkpoints, so that resuming and scoring do without
the directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from prm_jax import config as config_lib
from prm_jax.input_pipeline import tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import export, families, weights
from prm_jax.runtime import storage
from prm_jax.training import checkpoint as checkpoint_lib
from prm_jax.training import step as step_lib
from prm_jax.training import trainable
from prm_jax.types import CLASSES, StepContract


def resolve(
  c: config_lib.Experiment, known: config_lib.Model | None = None
) -> config_lib.Experiment:
  """The experiment with the architecture of `init.checkpoint`; unchanged without one.

  Args:
    known: that architecture, where a run's own checkpoint has kept it; the directory is not read.

  Raises:
    ValueError: a field of the section model is set (differs from its default) to something else
      than the directory says; or as `families.read`.
  """
  if not c.init.checkpoint:
    return c
  found = known or architecture(c.init.checkpoint)[0]
  default, choices = config_lib.Model(), {}
  for field in dataclasses.fields(c.model):
    name, value = field.name, getattr(c.model, field.name)
    if name in families.CHOICES:
      choices[name] = value
    elif value not in (getattr(default, name), getattr(found, name)):
      raise ValueError(
        f"model.{name}={value!r}, but {c.init.checkpoint} has {getattr(found, name)!r}; leave it "
        "out: the architecture is the checkpoint's"
      )
  return dataclasses.replace(c, model=dataclasses.replace(found, **choices))


def architecture(path: str) -> tuple[config_lib.Model, int]:
  """Of a public model, or of the work directory of a run: its configuration, its embedding's rows.

  Raises:
    ValueError, OSError: as `families.read`.
  """
  if latest := checkpoint_lib.latest(path):
    return trainable.without_factors(latest[1].config.model), latest[1].vocab_size
  if storage.in_bucket(storage.path(path)):
    raise FileNotFoundError(
      f"{path}: no run with a checkpoint; a public model is read from a local disk: copy it first"
    )
  preset = families.read(path)
  return preset.config, preset.vocab_size


def find(
  c: config_lib.Experiment, workdir: storage.Path | None
) -> tuple[config_lib.Experiment, tokenizers.Tokenizer, int]:
  """The resolved experiment, its tokenizer, and the number of rows of its embedding.

  A run that is resumed takes them from its work directory: the public checkpoint may be gone.  (If
  `init` is not what it was, the loop refuses to go on.)

  Raises:
    FileNotFoundError: no tokenizer is named.
    ValueError: as `resolve`, or the tokenizer has ids beyond the public model's embedding.
  """
  latest = None if workdir is None else checkpoint_lib.latest(workdir)
  kept = latest[1] if latest and latest[1].config.init == c.init else None
  if c.init.checkpoint and kept:
    tokenizer = tokenizers.load(c.data.tokenizer or workdir)
    return resolve(c, kept.config.model), tokenizer, kept.vocab_size
  named = named_tokenizer(c)
  tokenizer = tokenizers.load(named)
  if not c.init.checkpoint:
    return c, tokenizer, tokenizer.vocab_size
  rows = architecture(c.init.checkpoint)[1]
  if tokenizer.vocab_size > rows:
    raise ValueError(
      f"{named}: a tokenizer of {tokenizer.vocab_size} ids, but {c.init.checkpoint} has an "
      f"embedding of {rows} rows; use the model's own tokenizer"
    )
  return resolve(c), tokenizer, rows


def named_tokenizer(c: config_lib.Experiment) -> str:
  """Where a new run's tokenizer is; FileNotFoundError if nothing says it."""
  if not (named := c.data.tokenizer or c.init.checkpoint):
    raise FileNotFoundError(
      "no tokenizer: give --config.data.tokenizer=FILE (scripts/train_tokenizer.py makes one), or "
      "--config.init.checkpoint=DIR, a public model with its own"
    )
  return named


def public_params(
  c: config_lib.Experiment, tokenizer: tokenizers.Tokenizer, abstract: Any
) -> dict[str, Any]:
  """Parameters of `init.checkpoint`, the head that `init.head` asks for, new low-rank factors.

  Args:
    c: as resolved.
    abstract: the parameters as `ShapeDtypeStruct`s with shardings.

  Raises:
    ValueError: a text of `init.head_tokens` is not one token, or there are not as many as classes;
      a language-model head is needed and not there; or as `weights.load`.
  """
  ids = head_ids(c.init, tokenizer, abstract["head"].shape[1])  # before the slow part
  source, objective = c.init.checkpoint, c.loss.objective
  factors = {name: x for name, x in abstract["blocks"].items() if "_lora_" in name}
  blocks = {name: x for name, x in abstract["blocks"].items() if "_lora_" not in name}
  if checkpoint_lib.latest(source):
    params = run_params(source, abstract | {"blocks": blocks}, objective)
  else:
    check_language_model(c)
    params = weights.load(source, abstract | {"blocks": blocks}, c.model)
    exported = (pathlib.Path(source) / export.CONTRACT).is_file()
    if exported and not same_classes(export.read_contract(source), objective):
      params |= {name: _zeros(abstract[name]) for name in trainable.HEAD}
  if ids:
    layout = abstract["head"]
    take = functools.partial(head_rows, ids=tuple(ids), dtype=layout.dtype)
    params["head"] = jax.jit(take, out_shardings=layout.sharding)(params)
  if c.init.head == "random":
    draw = functools.partial(jax.random.normal, shape=abstract["head"].shape)
    drawn = jax.jit(draw, out_shardings=abstract["head"].sharding)(jax.random.key(c.train.seed))
    params["head"] = c.init.head_std * drawn
  if c.init.head != "zeros":
    params["head_bias"] = _zeros(abstract["head_bias"])  # a classifier's may be something else
  if factors:
    rows, classes = abstract["embedding"].shape[0], abstract["head"].shape[1]

    def new(key):
      fresh = step_lib.init_params(key, config=c.model, vocab_size=rows, num_classes=classes)
      return {name: fresh["blocks"][name] for name in factors}

    make = jax.jit(new, out_shardings=jax.tree.map(lambda x: x.sharding, factors))
    params["blocks"] |= make(jax.random.key(c.train.seed))
  return params


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
  return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)


def same_classes(then: StepContract, objective: str) -> bool:
  """Whether the step head of a checkpoint has the classes, by name, that the objective trains."""
  return (then.objective, then.classes) == (objective, CLASSES[objective])


def check_language_model(c: config_lib.Experiment) -> None:
  """ValueError if the run uses a language-model head that the public directory leaves out.

  Token classifiers have none, and `weights.load` gives zeros in its place.
  """
  uses = {
    'init.head="tokens"': c.init.head == "tokens",
    'loss.objective="language_model"': c.loss.objective == "language_model",
    f"loss.language_model_weight={c.loss.language_model_weight}": c.loss.language_model_weight > 0,
  }
  used = [name for name, does in uses.items() if does]
  if not used or c.model.tied_embeddings:
    return
  if "lm_head.weight" not in weights.tensors(c.init.checkpoint):
    raise ValueError(
      f"{c.init.checkpoint}: no lm_head.weight, as in a classifier, but {used[0]} needs the "
      "language-model head; start from the language model that it was made from"
    )


def run_params(workdir: str, abstract: Any, objective: str) -> dict[str, Any]:
  """Parameters of another run's newest checkpoint that reads back, low-rank factors merged.

  Its step head is kept if it has the classes of `objective`; otherwise the head is zeros.
  """
  mesh = abstract["head"].sharding.mesh
  with contextlib.closing(checkpoint_lib.Checkpointer(workdir)) as checkpointer:

    def stored(step: int, metadata: checkpoint_lib.Metadata) -> Any:
      shape = (metadata.vocab_size, len(metadata.contract.classes))
      return checkpointer.restore_params(
        step, sharding_lib.abstract_params(metadata.config.model, *shape, mesh)
      )

    _, metadata, params = checkpointer.newest(stored)
  c = metadata.config.model

  def begin(params):
    merged = trainable.merge(params, c)
    if not same_classes(metadata.contract, objective):
      merged |= {name: jnp.zeros(abstract[name].shape) for name in trainable.HEAD}
    return jax.tree.map(lambda x, like: x.astype(like.dtype), merged, abstract)

  return jax.jit(begin, out_shardings=sharding_lib.shardings(abstract))(params)


def head_ids(init: config_lib.Init, tokenizer: tokenizers.Tokenizer, num_classes: int) -> list[int]:
  """The token of each class, for a head of tokens; else nothing."""
  if init.head != "tokens":
    return []
  if len(init.head_tokens) != num_classes:
    raise ValueError(
      f"init.head_tokens={init.head_tokens!r}: {len(init.head_tokens)} texts, but the head has "
      f"{num_classes} classes"
    )
  encoded = [tokenizer.encode(text) for text in init.head_tokens]
  for text, ids in zip(init.head_tokens, encoded):
    if len(ids) != 1:
      raise ValueError(
        f"init.head_tokens: {text!r} is {len(ids)} tokens {ids}; each class takes one token (mind "
        "the space before a word)"
      )
  return [ids[0] for ids in encoded]


def head_rows(params: dict[str, Any], ids: tuple[int, ...], dtype: Any) -> jax.Array:
  """Step head `[D, C]` of the language-model head's columns, which may be the embedding's rows."""
  if "language_model" in params:
    return params["language_model"][:, jnp.array(ids)].astype(dtype)
  return params["embedding"][jnp.array(ids)].T.astype(dtype)
