"""The configuration of one experiment.  Each file in configs/ returns an `Experiment`.

Every default stands here and nowhere else.  `load` reads a config file and applies dotted
overrides from the command line (`--config.optim.learning_rate=1e-5`); unknown keys and wrong
types are errors that name the nearest key.
"""

from __future__ import annotations

import dataclasses
import pathlib
import runpy
import sys
from typing import Literal, TypeVar

import tyro

Args = TypeVar("Args")


@dataclasses.dataclass(frozen=True)
class Data:
  directory: str = ""  # what prepare_data.py wrote
  tokenizer: str = ""  # a SentencePiece model (train_tokenizer.py writes one)
  separator: str = "\n\n"  # text after the problem and after each step, encoded on its own
  row_length: int = 2048  # tokens; examples are packed into rows of this length
  eval_split: str = "test"  # split evaluated on during training


@dataclasses.dataclass(frozen=True)
class Model:
  width: int = 512
  layers: int = 8
  heads: int = 8
  kv_heads: int = 8
  head_size: int = 64
  mlp_width: int = 1408  # of the SwiGLU hidden layer
  rope_theta: float = 10_000.0
  norm_epsilon: float = 1e-6
  tied_embeddings: bool = True  # only matters with loss.language_model_weight > 0
  embedding_std: float = 0.02  # of the token embedding at initialisation
  dtype: Literal["float32", "bfloat16"] = "float32"  # of activations; parameters are float32
  remat: bool = False  # recompute each layer in the backward pass
  unroll_layers: bool = False  # faster steps on CPU, slower compilation


@dataclasses.dataclass(frozen=True)
class Loss:
  # "process" (PRM): a class of -1, 0, 1 at each step's end.  "outcome" (ORM): right or wrong at
  # every solution token, read at the last, after Cobbe et al. 2021 (paper appendix E).
  objective: Literal["process", "outcome"] = "process"
  # Next-token loss on the same solutions, as in Cobbe et al. section 4.2, for models trained from
  # scratch.  0: no vocabulary-size logits are ever computed.
  language_model_weight: float = 0.0


@dataclasses.dataclass(frozen=True)
class Optim:
  learning_rate: float = 1e-4  # peak, after warm-up
  final_fraction: float = 0.05  # of the peak, at the end of the cosine
  warmup_steps: int = 100
  b1: float = 0.9
  b2: float = 0.98
  weight_decay: float = 0.05  # on matrices only
  clip_norm: float = 1.0  # global gradient norm


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Devices per axis; -1: all that are left."""

  data: int = 1  # copies of the model (across slices)
  fsdp: int = -1  # rows of the batch, and slices of each parameter
  tensor: int = 1  # heads and feed-forward columns


@dataclasses.dataclass(frozen=True)
class Train:
  steps: int = 1000  # optimiser updates
  batch_rows: int = 16  # rows per update
  microbatches: int = 1  # gradient accumulation: passes per update
  log_every: int = 50  # updates between lines of metrics.jsonl
  eval_every: int = 500  # updates between evaluations (there is always one at the end)
  eval_rows: int = 256  # rows of the evaluation split used during training, at most
  save_every: int = 500  # updates between checkpoints (there is always one at the end)
  keep: int = 2  # checkpoints kept
  seed: int = 0  # of initialisation and row order


@dataclasses.dataclass(frozen=True)
class Experiment:
  data: Data = Data()
  model: Model = Model()
  loss: Loss = Loss()
  optim: Optim = Optim()
  mesh: Mesh = Mesh()
  train: Train = Train()


def read(path: str) -> Experiment:
  """Runs a config file's `config()`.  Config files are code of yours, like any Python file."""
  if not pathlib.Path(path).is_file():
    raise SystemExit(f"--config={path}: no such file; see configs/ for examples")
  experiment = runpy.run_path(path)["config"]()
  if not isinstance(experiment, Experiment):
    raise SystemExit(f"{path}: config() returned {type(experiment).__name__}, not Experiment")
  return experiment


def parse(args: type[Args], description: str | None = None) -> Args:
  """Command-line flags of a script, from a frozen dataclass.

  A script with an `Experiment` field named `config` takes `--config=FILE` for its defaults and
  `--config.SECTION.KEY=VALUE` for overrides.
  """
  argv, fields = sys.argv[1:], {f.name for f in dataclasses.fields(args)}
  default = None
  if "config" in fields:
    given = [a for a in argv if a.startswith("--config=")]
    argv = [a for a in argv if not a.startswith("--config=")]
    if not given and not {"-h", "--help"} & set(argv):
      raise SystemExit("--config=FILE is required; see configs/ for examples")
    experiment = read(given[-1].removeprefix("--config=")) if given else Experiment()
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
