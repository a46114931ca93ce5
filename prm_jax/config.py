"""The configuration of one experiment.  Each file in configs/ returns an `Experiment`.

All defaults are here.  `runtime/command_line.py` reads a config file and the flags that override it
(`--config.optim.learning_rate=1e-5`).  The error for a wrong value names its field.
"""

import dataclasses
import difflib
import operator
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import tyro

T = TypeVar("T")

# Sizes index int32 arrays.  Devices store numbers as float32, in which larger ones are infinite.
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=3e38)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=3e38)]
Theta = Annotated[float, msgspec.Meta(ge=1, lt=2**31)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Decay = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Axis = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
CompilerOption = Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]*=.*$")]


ESCAPES = {"\n": r"\n", "\t": r"\t", "\\": r"\\"}  # how flags spell a text


def unescaped(text: str) -> str:
  r"""Returns the text of a flag with `\n`, `\t` and `\\` as line break, tab and backslash.

  Raises:
    ValueError: a backslash precedes anything else.
  """

  meanings = {escape: character for character, escape in ESCAPES.items()}

  def character(escape: re.Match) -> str:
    if escape[0] not in meanings:
      raise ValueError(f"{text}: {escape[0]} is none of \\n, \\t and \\\\ (a backslash)")
    return meanings[escape[0]]

  return re.sub(r"\\.?", character, text, flags=re.DOTALL)


_TEXT = tyro.constructors.PrimitiveConstructorSpec(
  nargs=1,
  metavar="TEXT",
  instance_from_str=lambda args: unescaped(args[0]),
  is_instance=lambda value: isinstance(value, str),
  str_from_instance=lambda value: ["".join(ESCAPES.get(x, x) for x in value)],
)
# A text that may have line breaks; flags spell them \n.
Escaped = Annotated[str, _TEXT]

# Markers of fields.  A resumed run must keep its settings, except CHANGEABLE ones, which affect
# reports or the rounding of sums, but not what is learnt.  All hosts of a job must have the same
# settings, except PER_HOST ones.
CHANGEABLE, PER_HOST = "may change on resuming", "may differ between hosts"
Changeable = Annotated[T, CHANGEABLE]
LocalPath = Annotated[str, CHANGEABLE, PER_HOST]


def nearest(name: str, names: Iterable[str]) -> str:
  """Returns the name that is probably meant: by initials (lr: learning_rate), else by letters."""
  initials = lambda each: "".join(word[0] for word in each.split("_"))
  similarity = lambda each: difflib.SequenceMatcher(None, name, each).ratio()
  return max(names, key=lambda each: (initials(each) == name, similarity(each)))


def choices(hint: Any) -> tuple[str, ...]:
  """Returns the values of a Literal, with or without markers; () for any other type."""
  while get_origin(hint) is Annotated:
    hint = get_args(hint)[0]
  return get_args(hint) if get_origin(hint) is Literal else ()


class Checked:
  """Base of the dataclasses below; a value of a wrong type or out of range is a ValueError."""

  def __post_init__(self):
    section = type(self).__name__.lower()
    for key, hint in get_type_hints(type(self), include_extras=True).items():
      value = getattr(self, key)
      try:
        object.__setattr__(self, key, msgspec.convert(value, hint))  # makes the int 1 a float
      except msgspec.ValidationError as error:
        text = f"; expected {hint}".replace("typing.", "") if "enum" in str(error) else ""
        if isinstance(value, str) and (allowed := choices(hint)):
          text += f"; the nearest is {nearest(value, allowed)}"
        raise ValueError(f"{section}.{key}={value!r}: {error}{text}") from None
    for wrong, keys, expected in self._rules():
      if wrong:
        within = "" if section == "experiment" else f"{section}."
        values = [f"{within}{key}={operator.attrgetter(key)(self)!r}" for key in keys.split()]
        raise ValueError(f"{', '.join(values)}: expected {expected}")

  def _rules(self) -> Iterator[tuple[bool, str, str]]:
    """Yields rules between fields: whether one is broken, the fields' names, what is expected."""
    return iter(())


@dataclasses.dataclass(frozen=True)
class Data(Checked):
  directory: LocalPath = ""  # what prepare_data.py wrote
  # A tokenizer.json, a tokenizer.model (train_tokenizer.py writes one), or a directory that holds
  # one of them.  "": the tokenizer of init.checkpoint.
  tokenizer: LocalPath = ""
  separator: Escaped = "\n\n"  # text after the problem and after each step, encoded on its own
  row_length: Count = 2048  # tokens of a row; examples are packed into rows of this length
  # True: the solutions of a problem become one prefix tree, so that shared steps are encoded once.
  # False: every path of the tree is encoded on its own, for the same gradients at a higher cost.
  merge: bool = True
  eval_split: str = "test"  # split evaluated on during training
  also: LocalPath = ""  # another dataset to train on too; its labels must be classes of the first
  share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0  # share of the problems to train on
  # Text for loss.objective="language_model", in place of directory: JSON lines, plain or .gz, of
  # {"text": ...} or {"prompt": ..., "completion": ...}.  Loss is computed on texts and completions
  # only.  Prompts may spell out the special tokens of a chat format.
  text_train: LocalPath = ""
  text_eval: LocalPath = ""  # likewise, to evaluate on

  @property
  def eval_name(self) -> str:
    """The name of the evaluation in metrics and counts; "train" is the name of the updates."""
    return "train_evaluation" if self.eval_split == "train" else self.eval_split


Projection = Literal["query", "key", "value", "output", "gate", "up", "down"]  # weights of a layer
PROJECTIONS = get_args(Projection)
Saved = Literal[Projection, "attention", "attention_inputs", "residual"]  # activations of a layer


@dataclasses.dataclass(frozen=True)
class Model(Checked):
  width: Count = 512
  layers: Count = 8
  heads: Count = 8
  kv_heads: Count = 8  # divides heads
  head_size: Annotated[int, msgspec.Meta(ge=2, multiple_of=2)] = 64
  mlp_width: Count = 1408  # of the gated hidden layer
  # Rows of the embedding; 0: those of the checkpoint, or the tokenizer's ids.  With a shape in the
  # config file, compile_for_tpu.py needs no checkpoint; an existing one must have that shape.
  vocab_size: Changeable[Whole] = 0
  activation: Literal["silu", "gelu_tanh"] = "silu"  # of the feed-forward gate
  norm_epsilon: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 1e-6
  norm_offset: bool = False  # norms multiply by 1 + weight (Gemma)
  post_norms: bool = False  # also a norm after attention and feed-forward (Gemma 2, 3)
  query_key_norm: bool = False  # of each head's queries and keys (Qwen3, Gemma 3)
  attention_bias: bool = False  # of queries, keys and values (Qwen2)
  attention_scalar: Whole = 0  # scores are divided by its square root; 0: head_size
  attention_softcap: NonNegative = 0.0  # scores to cap * tanh(scores / cap) (Gemma 2); 0: none
  window: Whole = 0  # tokens that a sliding layer attends to, itself included; 0: no sliding layer
  # Sliding (s) and full (f) layers, repeated over the layers.
  window_pattern: Annotated[str, msgspec.Meta(pattern="^[sf]+$")] = "s"
  rope_theta: Theta = 10_000.0  # base of the wavelengths of rotary positions
  local_rope_theta: NonNegative = 0.0  # of sliding layers (Gemma 3); 0: rope_theta, scaled alike
  rope_scaling: Literal["none", "linear", "llama3"] = "none"  # uses the next four fields
  rope_factor: Positive = 1.0
  rope_low_factor: Positive = 1.0
  rope_high_factor: Positive = 4.0
  rope_original_length: Count = 8192  # tokens of the context before it was extended
  context_length: Whole = 0  # longest in tokens, for warnings and exports; 0: unknown
  scale_embeddings: bool = False  # by sqrt(width) (Gemma)
  tied_embeddings: bool = True  # the language-model head is the embedding
  logit_softcap: NonNegative = 0.0  # of next-token logits (Gemma 2); 0: none
  # Not part of a public model's config.json: `CHOICES` of pretrained/families.py lists these.
  embedding_std: Positive = 0.02  # of the token embedding at initialisation
  dtype: Literal["float32", "bfloat16"] = "float32"  # of activations
  # Of the parameters, except the step head and low-rank factors, which are float32.
  param_dtype: Literal["float32", "bfloat16"] = "float32"
  # Rematerialisation: the outputs that the backward pass computes again.  "none": none.
  # "dots_no_batch": all but products of activations and weights.  "dots": all but matrix products,
  # including those of dense attention.  "full": the whole layer.
  remat: Changeable[Literal["none", "dots", "dots_no_batch", "full"]] = "none"
  # Arrays that are stored even with remat="full": outputs of projections and of "attention"
  # (blockwise or kernel); "attention_inputs", the rotated queries and keys, and values; "residual",
  # the stream after attention.  In as much memory, "attention_inputs" save more recomputation than
  # "query", "key" and "value" unless the model has query_key_norm, and "residual" more than
  # "output" unless it has post_norms.
  saved: Changeable[tuple[Saved, ...]] = ()
  # The dtype in which gradients of the layers' matrices are reduced across devices.
  # "activations": model.dtype; bfloat16 halves their traffic and keeps three digits.
  gradient_dtype: Literal["float32", "activations"] = "float32"
  # No scan over the layers: faster steps on a CPU, slower compilation.  With several CPU devices,
  # each keeps the gathered weights until the backward pass.
  unroll_layers: Changeable[bool] = False
  # "dense" stores the scores of all pairs of tokens: fastest for rows of a few hundred tokens.
  # "blockwise" (CPU, GPU) and "kernel" (TPU) use memory linear in the row and skip masked blocks.
  # "auto": chosen by row length and platform.
  attention: Changeable[Literal["auto", "dense", "blockwise", "kernel"]] = "auto"
  # LoRA (arXiv:2106.09685), for optim.trained="lora": frozen weights plus trained low-rank factors,
  # whose product is scaled by lora_alpha / lora_rank.
  lora_rank: Whole = 0  # 0: no factors
  lora_alpha: Positive = 16.0
  lora_targets: tuple[Projection, ...] = PROJECTIONS  # the weights that have factors

  def _rules(self):
    yield self.heads % self.kv_heads, "heads kv_heads", "a multiple of kv_heads"
    unscaled = self.rope_scaling == "llama3" and self.rope_high_factor <= self.rope_low_factor
    yield unscaled, "rope_high_factor rope_low_factor", "the first above the second"
    yield self.saved and self.remat != "full", "saved remat", 'remat="full" with saved'
    yield self.local_rope_theta and not self.window, "local_rope_theta window", "a window above 0"
    unlike = self.lora_rank and len({*self.lora_targets}) != (len(self.lora_targets) or 1)
    yield unlike, "lora_targets", "one or more weights, each once"


@dataclasses.dataclass(frozen=True)
class Init(Checked):
  """Parameters before the first update."""

  # Directory of a public model (config.json and safetensors), or another run's work directory.  Its
  # architecture replaces the section model, except dtypes, remat and the like.  "": random.
  checkpoint: str = ""
  # Step head.  "auto": "zeros"; with several loss.heads "random", so that each starts differently.
  # "zeros": uniform probabilities, or the checkpoint's own head of the same classes.
  # "tokens": columns of the language-model head for `head_tokens`, without bias: the initial
  # probabilities are those of the next token among these (without Gemma 2's soft cap).  "random":
  # normal.  A zero head passes no gradient to the trunk, so the first updates train only the head.
  head: Literal["auto", "zeros", "random", "tokens"] = "auto"
  head_std: Positive = 0.02  # of a random head; transformers uses 0.02 for new classifiers
  head_tokens: tuple[Escaped, ...] = ()  # in class order: negative, neutral, positive; wrong, right

  def _rules(self):
    other = (self.head == "tokens") != bool(self.head_tokens)
    yield other, "head head_tokens", 'head_tokens with head="tokens", and only then'
    alone = self.head == "tokens" and not self.checkpoint
    yield alone, "head checkpoint", "a checkpoint with a language-model head"


@dataclasses.dataclass(frozen=True)
class Loss(Checked):
  # "process" (PRM): a class of -1, 0, 1 at each step's end.  "outcome" (ORM): right or wrong at
  # every solution token, read at the last, after Cobbe et al. 2021 (paper appendix E).
  # "language_model": next-token prediction on text (paper section 2.2), to start the others from.
  objective: Literal["process", "outcome", "language_model"] = "process"
  # Weight of a next-token loss on the same solutions, as in Cobbe et al. section 4.2, for models
  # trained from scratch.  0: vocabulary logits are never computed.
  language_model_weight: NonNegative = 0.0
  # Weights of the classes in the mean loss, in class order: -1, 0, 1; or -1, 1; or wrong, right.
  # (): 1 each.
  class_weights: tuple[NonNegative, ...] = ()
  # Class heads on one trunk (an ensemble, as in ActPRM).  Each has its own initial values and its
  # own bootstrap weights, Poisson(1) for each labelled solution (Oza and Russell 2001).  The mean
  # of their probabilities is the score, the standard deviation its uncertainty.
  heads: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1

  def _rules(self):
    twice = self.objective == "language_model" and self.language_model_weight
    yield twice, "objective language_model_weight", "weight 0: the objective is that loss already"
    text = self.objective == "language_model" and (self.heads > 1 or self.class_weights)
    yield text, "objective heads class_weights", "an objective with a class head"
    none = self.class_weights and not any(self.class_weights)
    yield none, "class_weights", "a weight above 0"


@dataclasses.dataclass(frozen=True)
class Optim(Checked):
  learning_rate: Positive = 1e-4  # peak, after warm-up
  final_fraction: Share = 0.05  # of the peak, at the end of the cosine
  warmup_steps: Whole = 100
  b1: Decay = 0.9
  b2: Decay = 0.98
  weight_decay: NonNegative = 0.05  # on matrices only
  clip_norm: Positive = 1.0  # global gradient norm
  # Parameters that are trained; others have no gradients and no moments.  "head": the step head.
  # "lora": the step head and the factors of model.lora_rank.  An untied language-model head
  # (model.tied_embeddings=False) is trained where the loss uses it, except with "lora".
  trained: Literal["all", "head", "lora"] = "all"
  embedding_scale: NonNegative = 1.0  # of the embedding's learning rate; 0: not trained
  head_scale: NonNegative = 1.0  # likewise, of the step head and an untied language-model head


@dataclasses.dataclass(frozen=True)
class Mesh(Checked):
  """Devices along each mesh axis; -1: all remaining ones."""

  data: Changeable[Axis] = 1  # replicas of the parameters (across slices); shards the batch
  fsdp: Changeable[Axis] = -1  # shards the parameters and the batch
  tensor: Changeable[Axis] = 1  # shards attention heads and feed-forward columns


Metric = Literal["nll", "accuracy", "auroc", "ece"]  # of an evaluation
LOWER_IS_BETTER = ("nll", "ece")


@dataclasses.dataclass(frozen=True)
class Train(Checked):
  steps: Count = 1000  # optimiser updates
  epochs: NonNegative = 0.0  # passes over the training rows, in place of steps; 0: use steps
  batch_rows: Count = 16  # rows per update
  microbatches: Changeable[Count] = 1  # gradient accumulation: passes per update
  log_every: Changeable[Count] = 50  # updates between lines of metrics.jsonl
  eval_every: Changeable[Count] = 500  # updates between evaluations; the last is always evaluated
  eval_rows: Changeable[Count] = 256  # rows of the evaluation split used during training, at most
  save_every: Changeable[Count] = 500  # updates between checkpoints; the last is always saved
  keep: Changeable[Count] = 2  # newest checkpoints kept
  # Best checkpoints kept in addition, by best_metric.  Only steps that are both saved and evaluated
  # count, so save_every and eval_every should have steps in common.
  keep_best: Changeable[Whole] = 1
  best_metric: Changeable[Metric] = "nll"  # ranks steps; of nll and ece lower is better
  # Early stopping: the run ends after this many evaluations in a row without a better best_metric.
  # Each new best step is then saved, regardless of save_every.  0: no early stopping.
  stop_patience: Changeable[Whole] = 0
  wandb: Changeable[str] = ""  # project of Weights & Biases that also gets the metrics; "": none
  profile_at: Changeable[Whole] = 0  # first of three updates traced to WORKDIR/profile; 0: none
  seed: Whole = 0  # of initialisation, row order and the resampling of `loss.heads`

  def _rules(self):
    lost = self.stop_patience and not self.keep_best
    yield lost, "stop_patience keep_best", "keep_best of 1 or more, to keep the best step"


@dataclasses.dataclass(frozen=True)
class Tpu(Checked):
  # Options NAME=VALUE of the TPU compiler, for train.py and compile_for_tpu.py.  They add to or
  # override those of runtime/compiler_options.py; NAME= removes a default.  Other platforms ignore
  # them.
  compiler_options: Changeable[tuple[CompilerOption, ...]] = ()


@dataclasses.dataclass(frozen=True)
class Experiment(Checked):
  data: Data = Data()
  model: Model = Model()
  init: Init = Init()
  loss: Loss = Loss()
  optim: Optim = Optim()
  mesh: Mesh = Mesh()
  train: Train = Train()
  tpu: Tpu = Tpu()

  def _rules(self):
    text = self.loss.objective == "language_model"
    other = not text == bool(self.data.text_train) == bool(self.data.text_eval)
    keys = "loss.objective data.text_train data.text_eval"
    yield other, keys, "both texts with language_model, and only then"
    for key in ("share", "also", "eval_split") if text else ():
      unused = getattr(self.data, key) != getattr(Data, key)
      yield unused, f"loss.objective data.{key}", "its default: texts have no solutions or splits"
    other = text and self.train.best_metric != "nll"
    yield other, "loss.objective train.best_metric", "nll, the only metric of a language model"
    alike = self.loss.heads > 1 and self.init.head in ("zeros", "tokens")
    yield alike, "loss.heads init.head", "random (or auto): heads that start equal are no ensemble"
    other = (self.optim.trained == "lora") != (self.model.lora_rank > 0)
    yield other, "optim.trained model.lora_rank", 'a rank above 0 with "lora", and only then'
    many = self.train.batch_rows * self.data.row_length >= 2**31
    yield many, "train.batch_rows data.row_length", "fewer than 2**31 tokens an update"


def settings(c: Experiment, leave_out: str) -> dict[str, Any]:
  """Returns the fields of an experiment that are not marked `leave_out`, by `section.key`."""
  return {
    f"{section}.{key}": getattr(getattr(c, section), key)
    for section in get_type_hints(Experiment)
    for key, hint in get_type_hints(type(getattr(c, section)), include_extras=True).items()
    if leave_out not in get_args(hint)
  }


@dataclasses.dataclass(frozen=True)
class Hosts(Checked):
  """The processes of a job, where JAX does not detect them itself (it does on TPU slices)."""

  coordinator_address: str = ""  # HOST:PORT of process 0, any free port; "": detected, or one host
  num_processes: Count = 1
  process_id: Whole = 0  # of this process

  def _rules(self):
    beyond = self.process_id >= self.num_processes
    yield beyond, "process_id num_processes", "the first below the second"
    unknown = self.num_processes > 1 and not re.fullmatch(r".+:\d+", self.coordinator_address)
    yield unknown, "coordinator_address", "HOST:PORT"
