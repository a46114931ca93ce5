"""The state at step 0 of a run: architecture, tokenizer and parameters.

A run starts from random parameters, or from a checkpoint (`init.checkpoint`), which then gives the
architecture, the default tokenizer and the weights.  The checkpoint is the directory of a public
model, or the work directory of another run.  The run's own checkpoints store all of it, so that
resuming and scoring do not need that directory.
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
  """Returns the experiment with the architecture `found` in `init.checkpoint`.

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
  """Returns the architecture of a public model (`families.read`) or of another run."""
  if latest := checkpoint_lib.latest(path):
    _, metadata = latest
    return dataclasses.replace(metadata.config.model, lora_rank=0, vocab_size=metadata.vocab_size)
  if storage.in_bucket(storage.path(path)):
    raise FileNotFoundError(
      f"{path}: no run with a checkpoint; a public model is read from a local disk: copy it first"
    )
  return families.read(path)


def find(
  c: config_lib.Experiment, workdir: storage.Path | None
) -> tuple[config_lib.Experiment, tokenizers.Tokenizer, int]:
  """Returns the resolved experiment, its tokenizer and its vocabulary size.

  A run with checkpoints in `workdir` takes them from there, as the public checkpoint may be gone.
  (If the section init has changed, the loop refuses to resume.)

  Raises:
    FileNotFoundError: no tokenizer is named.
    ValueError: as `resolve`, or the tokenizer has ids beyond the public model's embedding.
  """
  latest = checkpoint_lib.latest(workdir) if workdir and c.init.checkpoint else None
  stored = latest[1] if latest and latest[1].config.init == c.init else None
  source = c.data.tokenizer or (workdir if stored else c.init.checkpoint)
  if not source:
    raise FileNotFoundError(
      "no tokenizer: give --config.data.tokenizer=FILE (scripts/train_tokenizer.py makes one), or "
      "--config.init.checkpoint=DIR, a public model with its own"
    )
  tokenizer = tokenizers.load(source)
  if not c.init.checkpoint:
    if 0 < c.model.vocab_size < tokenizer.vocab_size:
      raise ValueError(
        f"model.vocab_size={c.model.vocab_size}, but {source} has {tokenizer.vocab_size} ids; "
        "raise it, or leave it out"
      )
    return c, tokenizer, c.model.vocab_size or tokenizer.vocab_size
  model = stored.config.model if stored else architecture(c.init.checkpoint)
  rows = stored.vocab_size if stored else model.vocab_size
  # A special token may have no embedding: Gemma 3's tokenizers have an image token, even those of
  # models that read only text.
  if tokenizer.text_size > rows:
    raise ValueError(
      f"{source}: a tokenizer of {tokenizer.text_size} ids, but {c.init.checkpoint} has an "
      f"embedding of {rows} rows; use the model's own tokenizer"
    )
  return resolve(c, model), tokenizer, rows


def public_params(
  c: config_lib.Experiment,
  contract: StepContract,
  tokenizer: tokenizers.Tokenizer,
  abstract: Params,
) -> Params:
  """Returns the parameters of `init.checkpoint`, with the step head of `init.head` and new factors.

  `init.head="zeros"` keeps the checkpoint's head, unless its contract has other classes or another
  number of heads than the run's.  Other heads, and low-rank factors, are drawn as `decoder`
  declares them.

  Args:
    c: resolved.
    contract: the run's.
    abstract: shape, dtype and sharding of the parameters, as `decoder.abstract_params` gives them.

  Raises:
    ValueError: `init.head_tokens` does not have one text per class, each a single token; the run
      needs a language-model head and the checkpoint has none; or as `weights.load`.
  """
  texts, classes = c.init.head_tokens, contract.classes
  ids = [tokenizer.encode(text) for text in texts]
  if texts and [*map(len, ids)] != [1] * len(classes):
    raise ValueError(
      f"init.head_tokens={texts!r}: expected {len(classes)} texts, one for each class of the head "
      f"and each a single token; found the tokens {ids} (mind the space before a word)"
    )
  blocks = {name: x for name, x in abstract["blocks"].items() if "_lora_" not in name}
  base = abstract | {"blocks": blocks}
  start = step_lib.initial_head(c)
  from_run = checkpoint_lib.latest(c.init.checkpoint) is not None
  params, stored = run_params(c, base) if from_run else model_params(c, base)
  meaning = lambda contract: (contract.objective, contract.classes, contract.heads)
  heads = [name for name in abstract if decoder.is_head(name)]
  kept = start == "zeros" and (from_run or {*heads} <= weights.LAYOUTS.keys())
  if kept and (stored is None or meaning(stored) == meaning(contract)):
    heads = []
  vocab_size = abstract["embedding"].shape[0]
  sizes = {"vocab_size": vocab_size, "num_classes": len(classes), "heads": contract.heads}
  head_std = c.init.head_std if start == "random" else 0.0

  def new(params: Params) -> Params:
    """Returns the parameters that the checkpoint does not give: heads and factors."""
    factors = {name: x for name, x in params["blocks"].items() if name not in blocks}
    return {name: params[name] for name in heads} | {"blocks": factors}

  draw = lambda key: new(step_lib.init_params(key, config=c.model, head_std=head_std, **sizes))
  shardings = sharding_lib.shardings(new(abstract))
  drawn = jax.jit(draw, out_shardings=shardings)(jax.random.key(c.train.seed))
  params |= drawn | {"blocks": params["blocks"] | drawn["blocks"]}
  if start == "tokens":
    head = abstract["head"]
    columns = lambda p: p.get("language_model", p["embedding"].T)[:, jnp.array(ids).ravel()]
    made = jax.jit(lambda p: columns(p).astype(head.dtype), out_shardings=head.sharding)
    params |= {"head": made(params)}
  return params


def run_params(c: config_lib.Experiment, abstract: Params) -> tuple[Params, StepContract]:
  """Returns another run's newest readable parameters, factors merged, and its head's contract."""
  mesh = abstract["embedding"].sharding.mesh
  _, metadata, params = checkpoint_lib.restore_params(c.init.checkpoint, mesh)
  convert = lambda params: merge(abstract, merge_lora(params, metadata.config.model, "float32"))
  convert = jax.jit(convert, out_shardings=sharding_lib.shardings(abstract))
  return convert(params), metadata.contract


def model_params(c: config_lib.Experiment, abstract: Params) -> tuple[Params, StepContract | None]:
  """Returns parameters of a public model, and the contract of its step head from `prm_jax.json`.

  The step head is the directory's own if that has the right shape, else zeros.  Without
  `prm_jax.json` the contract is None.

  Raises:
    ValueError: the run needs a language-model head, and the directory is a classifier's.
  """
  directory = c.init.checkpoint
  head, objective, weight = c.init.head, c.loss.objective, c.loss.language_model_weight
  used = head == "tokens" or objective == "language_model" or weight
  # `weights.load` returns zeros in place of a missing head.
  if used and not c.model.tied_embeddings and "lm_head.weight" not in weights.tensors(directory):
    raise ValueError(
      f"{directory}: no lm_head.weight, as in a classifier, but init.head={head!r} with "
      f"loss.objective={objective!r} and loss.language_model_weight={weight} needs a language-"
      "model head; start from the language model that it was made from"
    )
  exported = (pathlib.Path(directory) / export.CONTRACT).is_file()
  contract = export.read_contract(directory) if exported else None
  return weights.load(directory, abstract, c.model), contract
