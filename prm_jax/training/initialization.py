"""The state at step 0 of a run: architecture, tokenizer and parameters.

A run starts from random parameters, or from a checkpoint (`init.checkpoint`), which then gives the
architecture, the default tokenizer and the weights: the directory of a public model, or the work
directory of another run.  All of it is stored with the run's own checkpoints, so that resuming and
scoring do not need that directory.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from prm_jax import config as config_lib
from prm_jax.input_pipeline import tokenizers
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import export, families, weights
from prm_jax.runtime import storage
from prm_jax.training import checkpoint as checkpoint_lib
from prm_jax.training import step as step_lib
from prm_jax.training.trainable import Params, merge, merge_lora
from prm_jax.types import StepContract


def resolve(c: config_lib.Experiment, found: config_lib.Model) -> config_lib.Experiment:
  """The experiment with the architecture `found` in `init.checkpoint`.

  Raises:
    ValueError: a field of the section model differs both from its default and from `found`.
  """
  choices = {name: getattr(c.model, name) for name in families.CHOICES}
  for name, value in vars(c.model).items():
    known = (getattr(config_lib.Model(), name), getattr(found, name))
    if name not in choices and value not in known:
      raise ValueError(
        f"model.{name}={value!r}, but {c.init.checkpoint} has {getattr(found, name)!r}; leave it "
        "out: the architecture is the checkpoint's"
      )
  return dataclasses.replace(c, model=dataclasses.replace(found, **choices))


def architecture(path: str) -> config_lib.Model:
  """Architecture of a public model (`families.read`) or of another run."""
  if latest := checkpoint_lib.latest(path):
    about = latest[1]
    return dataclasses.replace(about.config.model, lora_rank=0, vocab_size=about.vocab_size)
  if storage.in_bucket(storage.path(path)):
    raise FileNotFoundError(
      f"{path}: no run with a checkpoint; a public model is read from a local disk: copy it first"
    )
  return families.read(path).config


def find(
  c: config_lib.Experiment, workdir: storage.Path | None
) -> tuple[config_lib.Experiment, tokenizers.Tokenizer, int]:
  """The resolved experiment, its tokenizer and its vocabulary size.

  A run with checkpoints in `workdir` takes them from there, as the public checkpoint may be gone.
  (If the section init has changed, the loop refuses to resume.)

  Raises:
    FileNotFoundError: no tokenizer is named.
    ValueError: as `resolve`, or the tokenizer has ids beyond the public model's embedding.
  """
  latest = checkpoint_lib.latest(workdir) if workdir and c.init.checkpoint else None
  kept = latest[1] if latest and latest[1].config.init == c.init else None
  named = c.data.tokenizer or (workdir if kept else c.init.checkpoint)
  if not named:
    raise FileNotFoundError(
      "no tokenizer: give --config.data.tokenizer=FILE (scripts/train_tokenizer.py makes one), or "
      "--config.init.checkpoint=DIR, a public model with its own"
    )
  tokenizer = tokenizers.load(named)
  if not c.init.checkpoint:
    if 0 < c.model.vocab_size < tokenizer.vocab_size:
      raise ValueError(
        f"model.vocab_size={c.model.vocab_size}, but {named} has {tokenizer.vocab_size} ids"
      )
    return c, tokenizer, c.model.vocab_size or tokenizer.vocab_size
  model = kept.config.model if kept else architecture(c.init.checkpoint)
  rows = kept.vocab_size if kept else model.vocab_size
  if tokenizer.vocab_size > rows:
    raise ValueError(
      f"{named}: a tokenizer of {tokenizer.vocab_size} ids, but {c.init.checkpoint} has an "
      f"embedding of {rows} rows; use the model's own tokenizer"
    )
  return resolve(c, model), tokenizer, rows


def public_params(
  c: config_lib.Experiment,
  contract: StepContract,
  tokenizer: tokenizers.Tokenizer,
  abstract: Params,
) -> Params:
  """Parameters of `init.checkpoint`, with the step head of `init.head` and new low-rank factors.

  `c` is resolved; `abstract` describes the parameters, as `decoder.abstract_params` does.  A head
  of the checkpoint is kept with `init.head="zeros"`, unless its contract has other classes or
  another number of heads than `contract`, the run's.  Other heads, and new factors, are drawn as
  `decoder` declares them.

  Raises:
    ValueError: a text of `init.head_tokens` is not one token, or there are not as many as classes;
      a language-model head is needed and not there; or as `weights.load`.
  """
  head, texts, classes = abstract["head"], c.init.head_tokens, contract.classes
  ids = [tokenizer.encode(text) for text in texts]
  if texts and [len(each) for each in ids] != [1] * len(classes):
    raise ValueError(
      f"init.head_tokens={texts!r}: expected {len(classes)} texts, one for each class of the head "
      f"and each a single token; found the tokens {ids} (mind the space before a word)"
    )
  blocks = {name: x for name, x in abstract["blocks"].items() if "_lora_" not in name}
  base = abstract | {"blocks": blocks}
  start = step_lib.first_head(c)
  from_run = checkpoint_lib.latest(c.init.checkpoint) is not None
  params, found = run_params(c, base) if from_run else model_params(c, base)
  meaning = lambda contract: (contract.objective, contract.classes, contract.heads)
  heads = {name: x for name, x in abstract.items() if decoder.is_head(name)}
  kept = start == "zeros" and (from_run or heads.keys() <= weights.LAYOUTS.keys())
  if kept and (found is None or meaning(found) == meaning(contract)):
    heads = {}
  factors = [name for name in abstract["blocks"] if name not in blocks]
  sizes = {
    "vocab_size": abstract["embedding"].shape[0],
    "num_classes": len(classes),
    "heads": contract.heads,
  }

  def draw(key: jax.Array) -> Params:
    drawn = step_lib.init_params(key, config=c.model, **sizes)
    new = {name: drawn["blocks"][name] for name in factors}
    return {name: drawn[name] for name in heads} | {"blocks": new}

  key = jax.random.key(c.train.seed)
  described = heads | {"blocks": {name: abstract["blocks"][name] for name in factors}}
  drawn = jax.jit(draw, out_shardings=sharding_lib.shardings(described))(key)
  params |= drawn | {"blocks": params["blocks"] | drawn["blocks"]}
  if start == "tokens":
    columns = lambda p: p.get("language_model", p["embedding"].T)[:, jnp.array(ids).ravel()]
    made = jax.jit(lambda p: columns(p).astype(head.dtype), out_shardings=head.sharding)
    params |= {"head": made(params)}
  elif start == "random":
    normal = jax.jit(lambda key: jax.random.normal(key, head.shape), out_shardings=head.sharding)
    params |= {"head": c.init.head_std * normal(key)}
  return params


def run_params(c: config_lib.Experiment, abstract: Params) -> tuple[Params, StepContract]:
  """Parameters of another run's newest readable checkpoint, factors merged; its head's contract."""
  mesh = abstract["head"].sharding.mesh
  _, metadata, params = checkpoint_lib.restore_params(c.init.checkpoint, mesh)
  convert = lambda params: merge(abstract, merge_lora(params, metadata.config.model))
  convert = jax.jit(convert, out_shardings=sharding_lib.shardings(abstract))
  return convert(params), metadata.contract


def model_params(c: config_lib.Experiment, abstract: Params) -> tuple[Params, StepContract | None]:
  """Parameters of a public model, and the contract of its step head, if `prm_jax.json` gives one.

  The step head is a classifier's, if there is one of the right shape, else zeros.

  Raises:
    ValueError: the run needs a language-model head, and the directory is a classifier's.
  """
  directory = c.init.checkpoint
  head, objective, weight = c.init.head, c.loss.objective, c.loss.language_model_weight
  used = head == "tokens" or objective == "language_model" or weight
  # `weights.load` returns zeros in place of a head that is not there.
  if used and not c.model.tied_embeddings and "lm_head.weight" not in weights.tensors(directory):
    raise ValueError(
      f"{directory}: no lm_head.weight, as in a classifier, but init.head={head!r} with "
      f"loss.objective={objective!r} and loss.language_model_weight={weight} needs a language-"
      "model head; start from the language model that it was made from"
    )
  exported = (pathlib.Path(directory) / export.CONTRACT).is_file()
  contract = export.read_contract(directory) if exported else None
  return weights.load(directory, abstract, c.model), contract
