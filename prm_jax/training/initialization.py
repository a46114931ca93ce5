"""The state at step 0 of a run: architecture, tokenizer and parameters.

A run starts from random parameters, or from a checkpoint (`init.checkpoint`), which then gives the
architecture, the default tokenizer and the weights.  That is the directory of a public model, or
the work directory of another run: for example a language model, or a reward model whose step head
is trained further.  All of it is stored with the run's own checkpoints, so that resuming and
scoring do not need that directory.
"""

from __future__ import annotations

import dataclasses
import pathlib

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

Params = trainable.Params


def resolve(
  c: config_lib.Experiment, known: config_lib.Model | None = None
) -> config_lib.Experiment:
  """The experiment with the architecture of `init.checkpoint`; unchanged without one.

  Args:
    known: that architecture, if it is known already; then the directory is not read.

  Raises:
    ValueError: a field of the section model differs both from its default and from the
      checkpoint's architecture; or as `families.read`.
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
  """Architecture and vocabulary size (rows of the embedding) of a public model or another run.

  Raises:
    ValueError, OSError: as `families.read`.
  """
  if latest := checkpoint_lib.latest(path):
    return trainable.without_lora(latest[1].config.model), latest[1].vocab_size
  if storage.in_bucket(storage.path(path)):
    raise FileNotFoundError(
      f"{path}: no run with a checkpoint; a public model is read from a local disk: copy it first"
    )
  preset = families.read(path)
  return preset.config, preset.vocab_size


def find(
  c: config_lib.Experiment, workdir: storage.Path | None
) -> tuple[config_lib.Experiment, tokenizers.Tokenizer, int]:
  """The resolved experiment, its tokenizer and its vocabulary size.

  A resumed run takes them from its work directory, as the public checkpoint may be gone.  (If the
  section init has changed, the loop refuses to resume.)

  Args:
    workdir: of a run that may have checkpoints; None: of a new run.

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
  """Path of a new run's tokenizer; FileNotFoundError if the configuration names none."""
  if not (named := c.data.tokenizer or c.init.checkpoint):
    raise FileNotFoundError(
      "no tokenizer: give --config.data.tokenizer=FILE (scripts/train_tokenizer.py makes one), or "
      "--config.init.checkpoint=DIR, a public model with its own"
    )
  return named


def public_params(
  c: config_lib.Experiment, tokenizer: tokenizers.Tokenizer, abstract: Params
) -> Params:
  """Parameters of `init.checkpoint`, with the step head of `init.head` and new low-rank factors.

  Args:
    c: as resolved.
    abstract: the parameters as `ShapeDtypeStruct`s with shardings.

  Raises:
    ValueError: a text of `init.head_tokens` is not one token, or there are not as many as classes;
      a language-model head is needed and not there; or as `weights.load`.
  """
  ids = head_ids(c.init, tokenizer, abstract["head"].shape[1])  # fails before the slow part
  blocks = {name: x for name, x in abstract["blocks"].items() if "_lora_" not in name}
  base = abstract | {"blocks": blocks}
  from_run = checkpoint_lib.latest(c.init.checkpoint) is not None
  params = run_params(c, base) if from_run else model_params(c, base)
  params |= new_head(c, params, ids, abstract)
  return params | {"blocks": params["blocks"] | new_factors(c, abstract)}


def run_params(c: config_lib.Experiment, abstract: Params) -> Params:
  """Parameters of another run's newest readable checkpoint, with low-rank factors merged.

  Its step head is kept if it has the classes of the objective, else replaced by zeros.
  """
  mesh = abstract["head"].sharding.mesh
  _, metadata, params = checkpoint_lib.restore_params(c.init.checkpoint, mesh)

  def convert(params: Params) -> Params:
    merged = trainable.merge_lora(params, metadata.config.model)
    if not same_classes(metadata.contract, c.loss.objective):
      merged |= {name: jnp.zeros(abstract[name].shape) for name in trainable.HEAD}
    return jax.tree.map(lambda x, like: x.astype(like.dtype), merged, abstract)

  return jax.jit(convert, out_shardings=sharding_lib.shardings(abstract))(params)


def model_params(c: config_lib.Experiment, abstract: Params) -> Params:
  """Parameters of a public model.

  The step head is a classifier's, if there is one of the right shape and `prm_jax.json`, where it
  exists, gives it the classes of the objective; else zeros.
  """
  check_language_model(c)
  directory = c.init.checkpoint
  params = weights.load(directory, abstract, c.model)
  exported = (pathlib.Path(directory) / export.CONTRACT).is_file()
  if exported and not same_classes(export.read_contract(directory), c.loss.objective):
    params |= {name: _zeros(abstract[name]) for name in trainable.HEAD}
  return params


def same_classes(contract: StepContract, objective: str) -> bool:
  """Whether a step head with this contract has the classes, by name, of the objective."""
  return (contract.objective, contract.classes) == (objective, CLASSES[objective])


def check_language_model(c: config_lib.Experiment) -> None:
  """ValueError if the run needs a language-model head that the public directory does not have.

  Token classifiers have none, and `weights.load` returns zeros in its place.
  """
  used = {
    'init.head="tokens"': c.init.head == "tokens",
    'loss.objective="language_model"': c.loss.objective == "language_model",
    f"loss.language_model_weight={c.loss.language_model_weight}": c.loss.language_model_weight > 0,
  }
  if c.model.tied_embeddings or not any(used.values()):
    return
  if "lm_head.weight" not in weights.tensors(c.init.checkpoint):
    user = next(name for name, uses in used.items() if uses)
    raise ValueError(
      f"{c.init.checkpoint}: no lm_head.weight, as in a classifier, but {user} needs the "
      "language-model head; start from the language model that it was made from"
    )


def new_head(
  c: config_lib.Experiment, params: Params, ids: list[int], abstract: Params
) -> dict[str, jax.Array]:
  """The step head that `init.head` asks for; with "zeros" nothing, as `params` has it already."""
  head = abstract["head"]
  if c.init.head == "zeros":
    return {}
  if c.init.head == "tokens":
    made = jax.jit(lambda p: head_columns(p, ids).astype(head.dtype), out_shardings=head.sharding)
    weight = made(params)
  else:
    draw = jax.jit(lambda key: jax.random.normal(key, head.shape), out_shardings=head.sharding)
    weight = c.init.head_std * draw(jax.random.key(c.train.seed))
  return {"head": weight, "head_bias": _zeros(abstract["head_bias"])}


def head_ids(init: config_lib.Init, tokenizer: tokenizers.Tokenizer, num_classes: int) -> list[int]:
  """The token of each class in `init.head_tokens`, in class order; [] for other heads."""
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


def head_columns(params: Params, ids: list[int]) -> jax.Array:
  """Columns `[D, C]` of the language-model head, which may be the embedding transposed."""
  if "language_model" in params:
    return params["language_model"][:, jnp.array(ids)]
  return params["embedding"][jnp.array(ids)].T


def new_factors(c: config_lib.Experiment, abstract: Params) -> dict[str, jax.Array]:
  """Low-rank factors of the layers at step 0, whose product is zero; {} without LoRA."""
  factors = {name: x for name, x in abstract["blocks"].items() if "_lora_" in name}
  if not factors:
    return {}
  rows, classes = abstract["embedding"].shape[0], abstract["head"].shape[1]

  def draw(key: jax.Array) -> Params:
    params = step_lib.init_params(key, config=c.model, vocab_size=rows, num_classes=classes)
    return {name: params["blocks"][name] for name in factors}

  made = jax.jit(draw, out_shardings=sharding_lib.shardings(factors))
  return made(jax.random.key(c.train.seed))


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
  return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
