"""The scale of the experiments: data, models and seeds.  Files in configs/ return a `Plan`."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from prm_jax.config import Checked, Count, Experiment, NonNegative, Positive, Share, Whole
from prm_jax.datasets.arithmetic import HARD, Generator, Setting
from prm_jax.evaluation import step_benchmarks
from prm_jax.experiments.tasks import Embedded
from prm_jax.runtime import command_line, json_lines, storage

Counts = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
DOMAINS = {  # variants of the embedded domain that no model was trained on
  "longer chains": dataclasses.replace(HARD, lengths=(7, 7, 8, 8, 8)),
  "other numbers": dataclasses.replace(HARD, operands=(6, 7, 8, 9)),
  "other operations": dataclasses.replace(HARD, operations=("<", "&")),
  "other wording": dataclasses.replace(HARD, layout="start last"),
}


def middle(samples: Sequence[int]) -> int:
  """Returns the number of solutions a problem at which arms of one size are compared."""
  return samples[len(samples) // 2]


def changed(c: Experiment, **values: Any) -> Experiment:
  """Returns the settings with other values, each in the section that has a field of its name."""
  sections: dict[str, dict[str, Any]] = {}
  for key, value in values.items():
    names = ("loss", "optim", "train", "data", "init")  # without model: `heads` is the loss's
    section = next(name for name in names if hasattr(getattr(c, name), key))
    sections.setdefault(section, {})[key] = value
  new = {name: dataclasses.replace(getattr(c, name), **each) for name, each in sections.items()}
  return dataclasses.replace(c, **new)


@dataclasses.dataclass(frozen=True)
class Files(Checked):
  """Data and models in place of the embedded ones."""

  pool: str = ""  # candidates to choose from and to train on, one a line (`tasks.read`)
  test: str = ""  # candidates of other problems; "": half of the pool's problems are held out
  labels: str = ""  # a dataset of prepare_data.py, on which the labeller is trained
  labeller: str = ""  # instead of labels: a trained labeller, a work directory of train.py
  domains: tuple[str, ...] = ()  # NAME=FILE of candidates of domains that training never saw
  problems: Whole = 0  # most problems to read from each of these files; 0: all
  samples: Whole = 0  # most samples of a problem to read; 0: all
  base: str = ""  # where every model starts from: a public model, or a work directory of train.py

  def _rules(self):
    some = bool(self.pool or self.labels or self.labeller or self.base)
    whole = self.pool and self.base and bool(self.labels) != bool(self.labeller)
    yield some and not whole, "pool base labels labeller", "pool, base, and labels or a labeller"
    alone = (self.test or self.domains) and not self.pool
    yield alone, "test domains pool", "a pool with them"
    command_line.named_files("--domains", self.domains)  # raises an error of its own


@dataclasses.dataclass(frozen=True)
class Quickstart(Checked):
  """Settings of the quick start, for the experiments on its data."""

  settings: Experiment
  process_updates: Count = 5000
  outcome_updates: Count = 6000
  generator: Generator = Generator()


@dataclasses.dataclass(frozen=True)
class Search(Checked):
  """Sizes of the experiment search, on the quick start's data."""

  widths: Counts = (4, 16, 64)  # lanes of a problem
  problems: Count = 100  # test problems
  solutions: Count = 2  # of each training problem, for the language model
  updates: Count = 3000  # of the language model
  labelled: Count = 2000  # training problems for which the language model's samples are labelled
  own: Count = 8  # samples of each of these
  # Of these samples.  It is above 1, because a search finds mistakes that are rare at 1.
  temperature: NonNegative = 1.3

  def _rules(self):
    wrong = any(width > 4 and width % 4 for width in self.widths)
    yield wrong, "widths", "at most 4, or multiples of 4"


@dataclasses.dataclass(frozen=True)
class Rollouts(Checked):
  """Sizes of the experiment rollouts, on the quick start's data."""

  counts: Counts = (1, 2, 4, 8, 16)  # rollouts of a step
  problems: Count = 1000  # to label
  solutions: Count = 2  # of each
  updates: Count = 1500  # of a process model


@dataclasses.dataclass(frozen=True)
class Plan(Checked):
  """Sizes and settings at one scale."""

  process: Experiment  # model, optimiser and updates of a process model
  outcome: Experiment  # of an outcome model, tuned separately so that it is as strong as it can be
  labeller: Experiment  # of the large PRM that labels, trained on exact or human labels
  # The checkpoints that models start from, trained on random mistakes: the base of process models
  # on critiques of steps, and from it the base of outcome models on verdicts on whole solutions.
  process_base: Experiment
  outcome_base: Experiment
  quickstart: Quickstart
  seeds: tuple[Whole, ...]  # reported ones
  samples: Counts  # labelled solutions of each problem, growing
  # Axes of the search for each objective.
  language_model_weights: tuple[NonNegative, ...]
  learning_rates: tuple[Positive, ...]
  updates: Counts
  search: Search = Search()
  rollouts: Rollouts = Rollouts()
  setting: Setting = HARD  # of the embedded domain
  embedded: Embedded = Embedded()
  files: Files = Files()
  tuning_seeds: tuple[Whole, ...] = (100, 101)  # in place of `seeds` in the experiment tuning
  proportional: bool = False  # scales updates with the data; the settings' are for the largest set
  process_problems: Count = 12_000  # of the process base, two solutions of each
  outcome_problems: Count = 30_000  # of the outcome base, which would memorise a smaller set
  # Share of the operations' tables at which the bases take mistakes for right.  Labels teach these.
  blind: Share = 0.25
  labeller_problems: Count = 6000  # two solutions of each
  # Chance of a rare mistake at each clause in the data of the bases and of the labeller.
  taught_stray: Share = 0.12
  threshold: Share = 0.2  # of P(negative), above which the labeller calls a step wrong
  heads: Count = 4  # of the selector's ensemble
  domains: dict[str, Setting] = dataclasses.field(default_factory=lambda: dict(DOMAINS))
  domain_samples: Count = 100  # candidates of each of their problems: Table 1 is best-of-100
  generations: Count = 4  # of iterative retraining
  noise: tuple[Share, ...] = (0.0, 0.1, 0.2, 0.3)  # shares of labels that are flipped
  workers: Whole = 0  # worker processes of one core each; 0: this process, with all devices

  def _rules(self):
    for name in ("process", "outcome", "labeller"):
      field = f"{name}.init.checkpoint"
      named = bool(self.files.base) and bool(getattr(self, name).init.checkpoint)
      yield named, f"files.base {field}", "one of them: every model starts from the base"
    for name in ("seeds", "tuning_seeds"):
      seeds = getattr(self, name)
      yield not 0 < len(seeds) == len({*seeds}), name, "at least one, each once"
    for name in ("samples", "noise"):
      values = getattr(self, name)
      yield list(values) != sorted({*values}), name, "growing numbers"
    yield self.noise[:1] != (0,), "noise", "0 first, with which the others are compared"


SMALL = 2**20  # bytes up to which a directory's files are hashed by content
# The fields on which the shared models depend, in addition to their input files.
SHARED = ("process_base", "outcome_base", "setting", "process_problems")
SHARED += ("outcome_problems", "labeller_problems", "taught_stray", "blind")


def check(plan: Plan, directory: pathlib.Path) -> None:
  """Compares the plan with that of the results in a directory, if it has any.

  Args:
    directory: of an experiment, or "shared".

  Raises:
    ValueError: the plans differ, with the names of the fields.
  """
  if (path := directory / "plan.json").is_file():
    stored, fields = json_lines.document(path), _fields(plan, directory)
    if changed := [key for key in fields if stored.get(key, fields[key]) != fields[key]]:
      raise ValueError(
        f"{directory} has results of another plan ({', '.join(changed)} differ); give this one its "
        "own --output_dir"
      )


def keep(plan: Plan, directory: pathlib.Path) -> None:
  """Stores the plan beside the results; called after its data have been read."""
  if not (path := directory / "plan.json").is_file():
    with storage.written(path) as out:
      out.write(json.dumps(_fields(plan, directory), indent=1) + "\n")


def _sha256(path: str) -> str:
  """Returns the SHA-256 of a file's content, or of a directory's listing and small files.

  Results that evaluate.py has written into the directory are left out.
  """
  if "://" in path:
    return path  # remote storage: by name alone
  if not pathlib.Path(path).is_dir():
    return storage.sha256_of(path)
  digest = hashlib.sha256()
  for each in sorted(p for p in pathlib.Path(path).rglob("*") if p.is_file()):
    if step_benchmarks.is_result(each):
      continue
    size = each.stat().st_size
    digest.update(f"{each.relative_to(path)} {size}\n".encode())
    digest.update(each.read_bytes() if size <= SMALL else b"")
  return digest.hexdigest()


def _fields(plan: Plan, directory: pathlib.Path) -> dict[str, Any]:
  """Returns the fields that the directory's results depend on, as JSON, and hashes of files."""
  every = json.loads(json.dumps(dataclasses.asdict(plan)))
  files = every["files"]
  if directory.name == "shared":
    given = {key: files[key] for key in ("labels", "labeller", "base")}
    # `given` has a file under "labeller", so the settings need a name of their own.
    fields = {key: every[key] for key in SHARED} | {"labeller settings": every["labeller"]} | given
    paths = [*given.values()]
  else:
    fields = {key: value for key, value in every.items() if key not in ("workers", "seeds")}
    domains = command_line.named_files("--domains", plan.files.domains)
    paths = [files["pool"], files["test"], *domains.values()]
  return fields | {"contents of files": [_sha256(path) for path in paths if path]}
