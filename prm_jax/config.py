"""The configuration of one experiment.  Each file in configs/ returns an `Experiment`.

Every default stands here and nowhere else.  `parse` reads a config file and applies dotted
overrides from the command line (`--config.optim.learning_rate=1e-5`).  An unknown key is an error
that names the nearest one; a value of the wrong type or out of range, one that names the value.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import pathlib
import re
import runpy
import sys
import traceback
import types
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

Args = TypeVar("Args")

Count = Annotated[int, "at least 1"]
Whole = Annotated[int, "at least 0"]
Positive = Annotated[float, "above 0"]
NonNegative = Annotated[float, "at least 0"]
Share = Annotated[float, "0 to 1"]
Decay = Annotated[float, "at least 0 and below 1"]
Axis = Annotated[int, "-1 or at least 1"]
_RANGES = {
  "at least 1": lambda value: value >= 1,
  "at least 0": lambda value: value >= 0,
  "above 0": lambda value: value > 0,
  "0 to 1": lambda value: 0 <= value <= 1,
  "at least 0 and below 1": lambda value: 0 <= value < 1,
  "-1 or at least 1": lambda value: value == -1 or value >= 1,
}


class Checked:
  """Base of the dataclasses below: ValueError for a value of a wrong type or out of range."""

  def __post_init__(self):
    section = type(self).__name__.lower()
    for key, hint in get_type_hints(type(self), include_extras=True).items():
      value = getattr(self, key)
      kind, *ranges = get_args(hint) if get_origin(hint) is Annotated else (hint,)
      if get_origin(kind) is Literal:
        fine, expected = value in get_args(kind), f"one of {', '.join(get_args(kind))}"
      elif kind == tuple[str, ...]:
        fine = isinstance(value, tuple) and all(isinstance(text, str) for text in value)
        expected = "a tuple of texts"
      else:
        # An int is a float to anyone who writes one; a bool, which Python calls an int, is neither.
        fine = isinstance(value, (int, float) if kind is float else kind)
        fine = fine and (kind is bool or not isinstance(value, bool))
        expected = kind.__name__
      for name in ranges if fine else ():
        fine, expected = _RANGES[name](value), name
      if not fine:
        raise ValueError(f"{section}.{key}={value!r}: expected {expected}")


@dataclasses.dataclass(frozen=True)
class Data(Checked):
  directory: str = ""  # what prepare_data.py wrote
  # A tokenizer.json or tokenizer.model (train_tokenizer.py writes one), or a directory that holds
  # one.  "": that of init.checkpoint.
  tokenizer: str = ""
  separator: str = "\n\n"  # text after the problem and after each step, encoded on its own
  row_length: Count = 2048  # tokens; examples are packed into rows of this length
  # Solutions of a problem become one tree, in which what they have in common is encoded once.
  # False: each path of that tree, from the problem to a last step, is encoded by itself, as
  # elsewhere; for comparison, as it costs more and gives the same gradients.
  merge: bool = True
  eval_split: str = "test"  # split evaluated on during training
  # With loss.objective="language_model", in place of directory: JSON lines, plain or .gz, of
  # {"text": ...} or {"prompt": ..., "completion": ...}; of the latter only completions count, and
  # prompts may hold special tokens, spelled out as a chat format has them.
  text_train: str = ""
  text_eval: str = ""


PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")  # weights of a layer


@dataclasses.dataclass(frozen=True)
class Model(Checked):
  width: Count = 512
  layers: Count = 8
  heads: Count = 8
  kv_heads: Count = 8  # divides heads
  head_size: Count = 64  # even
  mlp_width: Count = 1408  # of the gated hidden layer
  activation: Literal["silu", "gelu_tanh"] = "silu"  # of the feed-forward gate
  norm_epsilon: Positive = 1e-6
  norm_offset: bool = False  # norms multiply by 1 + weight (Gemma)
  post_norms: bool = False  # also a norm after attention and feed-forward (Gemma 2, 3)
  query_key_norm: bool = False  # of each head's queries and keys (Qwen3, Gemma 3)
  attention_bias: bool = False  # of queries, keys and values (Qwen2)
  attention_scalar: Whole = 0  # scores are divided by its square root; 0: head_size
  attention_softcap: NonNegative = 0.0  # scores to cap * tanh(scores / cap) (Gemma 2); 0: none
  window: Whole = 0  # tokens that a sliding layer sees, oneself included; 0: no layer slides
  window_pattern: str = "s"  # sliding (s) and full (f) layers, repeated over the layers
  rope_theta: Positive = 10_000.0
  local_rope_theta: NonNegative = 0.0  # of sliding layers (Gemma 3); 0: rope_theta, scaled alike
  rope_scaling: Literal["none", "linear", "llama3"] = "none"  # the four below belong to it
  rope_factor: Positive = 1.0
  rope_low_factor: Positive = 1.0
  rope_high_factor: Positive = 4.0
  rope_original_length: Count = 8192  # tokens of the context before it was extended
  context_length: Whole = 0  # tokens the model was made for, for whom it is exported to; 0: unknown
  scale_embeddings: bool = False  # by sqrt(width) (Gemma)
  tied_embeddings: bool = True  # the language-model head is the embedding
  logit_softcap: NonNegative = 0.0  # of next-token logits (Gemma 2); 0: none
  embedding_std: Positive = 0.02  # of the token embedding at initialisation
  dtype: Literal["float32", "bfloat16"] = "float32"  # of activations
  param_dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters but the step head's
  # What the backward pass recomputes of a layer: "none" of it; all but products of activations and
  # weights ("dots_no_batch"); all but matrix products, those of attention too ("dots"); all of it.
  remat: Literal["none", "dots", "dots_no_batch", "full"] = "none"
  # With remat="full", what is kept all the same: outputs of PROJECTIONS, and of "attention".
  saved: tuple[str, ...] = ()
  # In which devices add up their gradients of the layers' matrices and of the embedding.
  # "activations": in their dtype, as for all else (norms, biases, a language-model head); bfloat16
  # halves the bytes and has three digits.
  gradient_dtype: Literal["float32", "activations"] = "float32"
  unroll_layers: bool = False  # faster steps on CPU, slower compilation
  # "dense" holds the scores of all pairs of tokens at once: fastest for rows of a few hundred.
  # "blockwise" takes memory that grows with the row and skips what nobody sees, on CPU and GPU.
  # "kernel" does so on a TPU.  "auto": what suits the row and the platform.
  attention: Literal["auto", "dense", "blockwise", "kernel"] = "auto"
  # Low-rank factors beside the layers' weights (LoRA, arXiv:2106.09685), which then stay as they
  # are: optim.trained="lora".  Their product counts lora_alpha / lora_rank.
  lora_rank: Whole = 0  # 0: none
  lora_alpha: Positive = 16.0
  lora_targets: tuple[str, ...] = PROJECTIONS

  def __post_init__(self):
    super().__post_init__()
    if self.heads % self.kv_heads:
      raise ValueError(
        f"model.heads={self.heads}: expected a multiple of model.kv_heads={self.kv_heads}"
      )
    if self.head_size % 2:
      raise ValueError(
        f"model.head_size={self.head_size}: expected an even number, of which rotary positions "
        "turn one half against the other"
      )
    if not self.window_pattern or set(self.window_pattern) - set("sf"):
      raise ValueError(
        f"model.window_pattern={self.window_pattern!r}: expected letters s (sliding) and f (full)"
      )
    if self.rope_scaling == "llama3" and self.rope_high_factor <= self.rope_low_factor:
      raise ValueError(
        f"model.rope_high_factor={self.rope_high_factor}: expected above "
        f"model.rope_low_factor={self.rope_low_factor}"
      )
    if unknown := set(self.lora_targets) - set(PROJECTIONS):
      raise ValueError(
        f"model.lora_targets={self.lora_targets!r}: {', '.join(sorted(unknown))} is none of "
        f"{', '.join(PROJECTIONS)}"
      )
    if self.saved and self.remat != "full":
      raise ValueError(
        f'model.saved={self.saved!r} with model.remat={self.remat!r}: only remat="full" has what '
        "it keeps listed"
      )
    if unknown := set(self.saved) - {*PROJECTIONS, "attention"}:
      raise ValueError(
        f"model.saved={self.saved!r}: {', '.join(sorted(unknown))} is none of "
        f"{', '.join(PROJECTIONS)}, attention"
      )
    if not self.lora_targets or len(set(self.lora_targets)) < len(self.lora_targets):
      raise ValueError(
        f"model.lora_targets={self.lora_targets!r}: expected some weights, each once; without "
        "factors, leave it out"
      )


@dataclasses.dataclass(frozen=True)
class Init(Checked):
  """What the parameters are before the first update."""

  # Directory of a public model (config.json and safetensors), or the work directory of another run,
  # also in a bucket; its architecture takes the place of the section model, but for dtype and the
  # like.  "": from scratch.
  checkpoint: str = ""
  # Step head.  "zeros": uniform probabilities, unless the checkpoint has a head of these classes: a
  # run's own, or a `score` of this shape; not one whose prm_jax.json names other classes.
  # "tokens": the language-model head's rows of `head_tokens`, without bias, so that the first
  # probabilities are those of the next token among these (before Gemma 2's soft cap of its logits,
  # which the step head does not have).
  # "random": normal with `head_std`, from the run's seed: the trunk learns faster through it than
  # through zeros, which a rate for fine-tuning hardly moves.
  head: Literal["zeros", "random", "tokens"] = "zeros"
  head_std: Positive = 0.02  # of a random head; as transformers draws a new classifier's
  head_tokens: tuple[str, ...] = ()  # in class order: negative, neutral, positive; wrong, right

  def __post_init__(self):
    super().__post_init__()
    if (self.head == "tokens") != bool(self.head_tokens):
      raise ValueError(
        f"init.head={self.head!r} with init.head_tokens={self.head_tokens!r}: the tokens are given "
        'when, and only when, the head is "tokens"'
      )
    if self.head != "zeros" and not self.checkpoint:
      raise ValueError(
        f'init.head="{self.head}" needs init.checkpoint: a model from scratch begins with zeros'
      )


@dataclasses.dataclass(frozen=True)
class Loss(Checked):
  # "process" (PRM): a class of -1, 0, 1 at each step's end.  "outcome" (ORM): right or wrong at
  # every solution token, read at the last, after Cobbe et al. 2021 (paper appendix E).
  # "language_model": the next token of text (paper section 2.2), to start any of these from.
  objective: Literal["process", "outcome", "language_model"] = "process"
  # Next-token loss on the same solutions, as in Cobbe et al. section 4.2, for models trained from
  # scratch.  0: no vocabulary-size logits are ever computed.
  language_model_weight: NonNegative = 0.0

  def __post_init__(self):
    super().__post_init__()
    if self.objective == "language_model" and self.language_model_weight:
      raise ValueError(
        f"loss.language_model_weight={self.language_model_weight} weighs a loss beside the "
        'objective, but loss.objective="language_model" is that loss; leave the weight at 0'
      )


@dataclasses.dataclass(frozen=True)
class Optim(Checked):
  learning_rate: Positive = 1e-4  # peak, after warm-up
  final_fraction: Share = 0.05  # of the peak, at the end of the cosine
  warmup_steps: Whole = 100
  b1: Decay = 0.9
  b2: Decay = 0.98
  weight_decay: NonNegative = 0.05  # on matrices only
  clip_norm: Positive = 1.0  # global gradient norm
  # What is trained; the rest has no gradient and no moments.  The step head always is; with it
  # everything, nothing else, the last layers and the norm after them, or the factors of
  # model.lora_rank.  A language-model head of its own (model.tied_embeddings=False) is trained
  # where the loss uses it, but not with "lora": a tied one would not be either.
  trained: Literal["all", "head", "last_layers", "lora"] = "all"
  last_layers: Count = 1  # how many, if they are what is trained
  # Learning rates of these, as multiples of the others'; 0: not trained.
  embedding_scale: NonNegative = 1.0
  head_scale: NonNegative = 1.0  # of the step head, and of a language-model head of its own

  def __post_init__(self):
    super().__post_init__()
    if self.last_layers != Optim.last_layers and self.trained != "last_layers":
      raise ValueError(
        f"optim.last_layers={self.last_layers} with optim.trained={self.trained!r}: only "
        'optim.trained="last_layers" has a number of layers'
      )


@dataclasses.dataclass(frozen=True)
class Mesh(Checked):
  """Devices per axis; -1: all that are left."""

  data: Axis = 1  # copies of the model (across slices)
  fsdp: Axis = -1  # rows of the batch, and slices of each parameter
  tensor: Axis = 1  # heads and feed-forward columns


LOWER_IS_BETTER = ("nll", "ece")  # of the metrics that train.best_metric may name


@dataclasses.dataclass(frozen=True)
class Train(Checked):
  steps: Count = 1000  # optimiser updates
  batch_rows: Count = 16  # rows per update
  microbatches: Count = 1  # gradient accumulation: passes per update
  log_every: Count = 50  # updates between lines of metrics.jsonl
  eval_every: Count = 500  # updates between evaluations (there is always one at the end)
  eval_rows: Count = 256  # rows of the evaluation split used during training, at most
  save_every: Count = 500  # updates between checkpoints (there is always one at the end)
  keep: Count = 2  # newest checkpoints kept
  # Checkpoints kept beside them: the best by a metric of the evaluation, of those saved at a step
  # that was evaluated (save_every and eval_every have such steps in common).
  keep_best: Whole = 1
  best_metric: Literal["nll", "accuracy", "auroc", "ece"] = "nll"
  # Writes a profiler trace of three updates from this one on to WORKDIR/profile; 0: none.
  profile_at: Whole = 0
  seed: Whole = 0  # of initialisation and row order


@dataclasses.dataclass(frozen=True)
class Experiment(Checked):
  data: Data = Data()
  model: Model = Model()
  init: Init = Init()
  loss: Loss = Loss()
  optim: Optim = Optim()
  mesh: Mesh = Mesh()
  train: Train = Train()

  def __post_init__(self):
    super().__post_init__()
    if (self.loss.objective == "language_model") != bool(self.data.text_train):
      raise ValueError(
        f"loss.objective={self.loss.objective!r} with data.text_train={self.data.text_train!r}: "
        "text is given when, and only when, a language model is trained"
      )
    if self.loss.objective == "language_model" and self.train.best_metric != "nll":
      raise ValueError(
        f"train.best_metric={self.train.best_metric!r}: of a language model there is only nll"
      )
    if bool(self.data.text_train) != bool(self.data.text_eval):
      raise ValueError("data.text_train and data.text_eval are given together")
    if (self.optim.trained == "lora") != (self.model.lora_rank > 0):
      raise ValueError(
        f"optim.trained={self.optim.trained!r} with model.lora_rank={self.model.lora_rank}: "
        'low-rank factors are there when, and only when, they are what is trained ("lora")'
      )


@dataclasses.dataclass(frozen=True)
class Hosts(Checked):
  """The processes of one job, where JAX cannot find out by itself (it does on TPU slices)."""

  coordinator_address: str = ""  # HOST:PORT of process 0, the port any free one; "": found, or none
  num_processes: Count = 1
  process_id: Whole = 0  # of this one

  def __post_init__(self):
    super().__post_init__()
    if self.process_id >= self.num_processes:
      raise ValueError(
        f"hosts.process_id={self.process_id}: expected below hosts.num_processes="
        f"{self.num_processes}"
      )
    if self.num_processes > 1 and not re.fullmatch(r".+:\d+", self.coordinator_address):
      raise ValueError(
        f"hosts.coordinator_address={self.coordinator_address!r}: expected HOST:PORT of process 0"
      )


def read(path: str) -> Experiment:
  """Runs a config file's `config()`.  Config files are code of yours, like any Python file.

  Raises:
    SystemExit: there is no such file, or what it says makes no experiment; names file and line.
  """
  if not pathlib.Path(path).is_file():
    raise SystemExit(f"--config={path}: no such file; see configs/ for examples")
  try:
    config = runpy.run_path(path).get("config")
    experiment = config() if callable(config) else None
  except Exception as error:  # whatever somebody's code may raise
    raise SystemExit(_mistake(path, error)) from error
  if not callable(config):
    raise SystemExit(
      f"{path}: there is no function config() in it; a config file is Python that defines one "
      "and returns an Experiment: see configs/ for examples"
    )
  if not isinstance(experiment, Experiment):
    raise SystemExit(f"{path}: config() returned {type(experiment).__name__}, not Experiment")
  return experiment


def from_json(kind: Any, value: Any) -> Any:
  """A value read from JSON as the dataclass, tuple or plain value it was written from."""
  if isinstance(kind, types.UnionType) and value is not None:
    kind = next(each for each in get_args(kind) if each is not type(None))
  if isinstance(value, dict) and dataclasses.is_dataclass(kind):
    hints = get_type_hints(kind)
    return kind(**{key: from_json(hints.get(key), each) for key, each in value.items()})
  if isinstance(value, list):
    inner = get_args(kind)[0] if get_origin(kind) is tuple else None
    return tuple(from_json(inner, each) for each in value)
  return value


def _mistake(path: str, error: Exception) -> str:
  """What went wrong in a config file, and at which line of it."""
  lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
  if isinstance(error, SyntaxError) and error.filename == path:
    lines, error = [error.lineno], SyntaxError(error.msg)
  where = ":".join(map(str, [path, *lines[-1:]]))
  unknown = re.fullmatch(
    r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'.*", str(error)
  )
  section = globals().get(unknown[1]) if unknown else None
  if isinstance(section, type) and issubclass(section, Checked):
    keys = [field.name for field in dataclasses.fields(section)]
    near = difflib.get_close_matches(unknown[2], keys, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(keys)}"
    return f"{where}: {unknown[1]} has no {unknown[2]}; {hint}"
  kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
  return f"{where}: {kind}{error}"


def parse(args: type[Args], description: str | None = None) -> Args:
  """Command-line flags of a script, from a frozen dataclass.

  A script with an `Experiment` field named `config` takes `--config=FILE` for its defaults and
  `--config.SECTION.KEY=VALUE` for overrides.  For what is False by default, `--NAME` alone will do.

  Raises:
    SystemExit: a flag or the config file is wrong; the message is in it or on standard error.
  """
  argv, fields = sys.argv[1:], {f.name for f in dataclasses.fields(args)}
  switches = {f"--{f.name}" for f in dataclasses.fields(args) if f.default is False}
  argv = [
    f"{each}=True" if each in switches and after not in ("True", "False") else each
    for each, after in zip(argv, [*argv[1:], ""])
  ]
  default = None
  if "config" in fields:
    file = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    file.add_argument("--config", metavar="FILE")
    known, argv = file.parse_known_args(argv)
    if known.config is None and not {"-h", "--help"} & set(argv):
      raise SystemExit("--config=FILE is required; see configs/ for examples")
    experiment = Experiment() if known.config is None else read(known.config)
    required = {
      f.name: tyro.MISSING_NONPROP if f.default is dataclasses.MISSING else f.default
      for f in dataclasses.fields(args)
    }
    default = args(**(required | {"config": experiment}))
  return tyro.cli(
    args,
    default=default,
    args=argv,
    description=description,
    use_underscores=True,
    config=(tyro.conf.FlagConversionOff,),
  )
