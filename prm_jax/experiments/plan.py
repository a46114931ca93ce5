"""The scale of the experiments: data, models and seeds.  Files in configs/ return a `Plan`."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from prm_jax.config import Checked, Count, Experiment, NonNegative, Positive, Share, Whole
from prm_jax.datasets import download
from prm_jax.datasets.arithmetic import HARD, Generator, Setting
from prm_jax.experiments.tasks import Embedded
from prm_jax.runtime import command_line, json_lines, storage

Counts = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
BASE_SEED, LABELLER_SEED = 10_000, 10_001  # of data that are nobody's pool or test
DOMAINS = {  # variants of the embedded domain that no model was trained on
  "longer chains": dataclasses.replace(HARD, lengths=(7, 7, 8, 8, 8)),
  "other numbers": dataclasses.replace(HARD, operands=(6, 7, 8, 9)),
  "other operations": dataclasses.replace(HARD, operations=("<", "&")),
  "other wording": dataclasses.replace(HARD, layout="start last"),
}


def middle(samples: Sequence[int]) -> int:
  """The number of solutions a problem at which arms are compared that do not grow."""
  return samples[len(samples) // 2]


@dataclasses.dataclass(frozen=True)
class Files(Checked):
  """Data and models in place of the embedded ones."""

  pool: str = ""  # candidates to choose from and to train on: JSON lines, as rerank.py reads them
  test: str = ""  # candidates of other problems; "": half of the pool's problems are held out
  labels: str = ""  # a dataset of prepare_data.py, on which the labeller is trained
  labeller: str = ""  # or a trained labeller: work directory of train.py
  domains: tuple[str, ...] = ()  # NAME=FILE of candidates of domains that training never saw
  problems: Whole = 0  # of pool and of test that are read, at most; 0: all
  samples: Whole = 0  # of each problem that are read, at most; 0: all
  base: str = ""  # where every model starts from: a public model, or a work directory of train.py

  def _rules(self):
    some = bool(self.pool) or bool(self.labels) or bool(self.labeller) or bool(self.base)
    whole = self.pool and self.base and bool(self.labels) != bool(self.labeller)
    yield some and not whole, "pool base labels labeller", "pool, base, and labels or a labeller"
    alone = (self.test or self.domains) and not self.pool
    yield alone, "test domains pool", "a pool, too"
    names = [each.partition("=")[0] for each in self.domains]
    wrong = len({*names}) < len(names) or not all("=" in each for each in self.domains)
    yield wrong, "domains", "NAME=FILE, each name once"


@dataclasses.dataclass(frozen=True)
class Quickstart(Checked):
  """The quick start, whose alternatives are measured."""

  settings: Experiment
  process_updates: Count = 5000
  outcome_updates: Count = 6000
  generator: Generator = Generator()


@dataclasses.dataclass(frozen=True)
class Search(Checked):
  """Sizes of the experiment search, on the quick start's data."""

  widths: Counts = (4, 16, 64)  # lanes of a problem
  problems: Count = 100  # of the test
  solutions: Count = 2  # of each training problem, for the language model
  updates: Count = 3000  # of the language model
  labelled: Count = 2000  # training problems whose samples by it are labelled
  own: Count = 8  # samples of each of these
  temperature: NonNegative = 1.3  # of these: mistakes that are rare at 1 are what a search finds

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
  outcome: Experiment  # of an outcome model, tuned apart so that it is as strong as it can be
  labeller: Experiment  # of the large PRM that labels, trained on exact or human labels
  # What they start from, trained on random mistakes: the base of process models on critiques of
  # steps, and from it the base of outcome models on verdicts on whole solutions.
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
  tuning_seeds: tuple[Whole, ...] = (100, 101)  # of the experiment tuning
  proportional: bool = False  # updates grow with the data; the settings' are for the largest set
  process_problems: Count = 12_000  # of the process base, two solutions of each
  outcome_problems: Count = 30_000  # of the outcome base: with fewer it learns them by heart
  # Share of the operations' tables at which the bases take mistakes for right: labels teach those.
  blind: Share = 0.25
  labeller_problems: Count = 6000  # two solutions of each
  taught_stray: Share = 0.12  # chance of a rare mistake at each clause of theirs and the labeller's
  threshold: Share = 0.2  # of P(negative), above which the labeller calls a step wrong
  heads: Count = 4  # of the selector's ensemble
  domains: dict[str, Setting] = dataclasses.field(default_factory=lambda: dict(DOMAINS))
  domain_samples: Count = 100  # candidates of each problem there: Table 1 is best-of-100
  generations: Count = 4  # of iterative retraining
  noise: tuple[Share, ...] = (0.0, 0.1, 0.2, 0.3)  # shares of labels that are flipped
  workers: Whole = 0  # processes, each with one core; 0: this process alone, with all devices

  def _rules(self):
    for name in ("process", "outcome", "labeller"):
      field = f"{name}.init.checkpoint"
      named = bool(self.files.base) and bool(getattr(self, name).init.checkpoint)
      yield named, f"files.base {field}", "one of them: every model starts from the base"


SMALL = 2**20  # bytes of a file whose content tells one directory from another
# What the shared models depend on, beside the files that they are made from.
SHARED = ("labeller", "process_base", "outcome_base", "setting", "process_problems")
SHARED += ("outcome_problems", "labeller_problems", "taught_stray", "blind")


def check(plan: Plan, directory: pathlib.Path) -> None:
  """Compares the plan with the one of the results below a directory, if it has any.

  Args:
    directory: of an experiment, or "shared".

  Raises:
    ValueError: which fields differ.
  """
  if (path := directory / "plan.json").is_file():
    then, now = json_lines.document(path), _fields(plan, directory)
    if changed := [key for key in now if then.get(key) != now[key]]:
      raise ValueError(
        f"{directory} has results of another plan ({', '.join(changed)} differ); give this one its "
        "own --output_dir"
      )


def keep(plan: Plan, directory: pathlib.Path) -> None:
  """Stores the plan beside the results, once its data could be read."""
  if not (path := directory / "plan.json").is_file():
    with storage.written(path) as out:
      out.write(json.dumps(_fields(plan, directory), indent=1) + "\n")


def _sha256(path: str) -> str:
  """Of a file's content; of a directory's file names and sizes, and the content of small files."""
  if "://" in path:
    return path  # remote storage: by name alone
  if not pathlib.Path(path).is_dir():
    return download.sha256_of(path)
  digest = hashlib.sha256()
  for each in sorted(p for p in pathlib.Path(path).rglob("*") if p.is_file()):
    size = each.stat().st_size
    digest.update(f"{each.relative_to(path)} {size}\n".encode())
    digest.update(each.read_bytes() if size <= SMALL else b"")
  return digest.hexdigest()


def _fields(plan: Plan, directory: pathlib.Path) -> dict[str, Any]:
  """The plan as JSON, as far as those results depend on it; files of candidates by content, too."""
  every = json.loads(json.dumps(dataclasses.asdict(plan)))
  if directory.name != "shared":
    domains = command_line.named_files("--domains", plan.files.domains).values()
    paths = [path for path in (plan.files.pool, plan.files.test, *domains) if path]
    found = {key: value for key, value in every.items() if key not in ("workers", "seeds")}
    return found | {"contents of files": [_sha256(path) for path in paths]}
  files = {key: every["files"][key] for key in ("labels", "labeller", "base")}
  contents = {"contents of files": [_sha256(path) for path in files.values() if path]}
  return {key: every[key] for key in SHARED} | files | contents
