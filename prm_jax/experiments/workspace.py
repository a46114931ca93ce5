"""Models and results of one seed: each is made once, so a killed run goes on where it stopped."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prm_jax import aggregation as agg
from prm_jax import step_metrics
from prm_jax.config import Experiment, Model
from prm_jax.evaluation.reranking import powers_of_two
from prm_jax.experiments.tasks import Problem, Task
from prm_jax.pretrained import families
from prm_jax.runtime import json_lines, storage
from prm_jax.scoring.scorer import Scorer
from prm_jax.training import checkpoint, loop
from prm_jax.types import StepTree

DIGITS = 6  # of stored accuracies
ROW_LENGTH = 512  # tokens; shorter rows repeat what samples of a problem share


@dataclasses.dataclass(frozen=True)
class Workspace:
  directory: pathlib.Path
  # Where models of each objective start, unless their settings name a checkpoint; without either
  # they start at random.
  bases: Mapping[str, str]
  seed: int

  def result(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The stored result of that name, or that of `make`, which is stored."""
    path = self.directory / f"{name}.json"
    if not path.is_file():
      found = {"seed": self.seed, "run": name} | make()
      with storage.written(path) as out:
        out.write(json.dumps(found) + "\n")
    return json_lines.document(path)

  def model(
    self,
    name: str,
    c: Experiment,
    solutions: Sequence[StepTree],
    evaluation: Sequence[StepTree],
    recipe: str,
  ) -> Scorer:
    """A reward model trained on the solutions; a training that was stopped is resumed."""
    workdir = self.directory / name
    if not finished(workdir, c):
      train = dataclasses.replace(c.train, seed=self.seed)
      c = dataclasses.replace(c, train=train)
      base = self.bases.get(c.loss.objective)
      if base and not c.init.checkpoint:
        init = dataclasses.replace(c.init, checkpoint=base)
        choices = {name: getattr(c.model, name) for name in families.CHOICES}
        c = dataclasses.replace(c, init=init, model=dataclasses.replace(Model(), **choices))
      loop.run(c, workdir, loop.Solutions([*solutions], [*evaluation], recipe))
    return load(workdir)


def finished(workdir: storage.Path, c: Experiment) -> bool:
  """Whether a run has made all its updates."""
  latest = checkpoint.latest(workdir)
  return latest is not None and latest[0] >= c.train.steps


def load(workdir: storage.Path | str) -> Scorer:
  """A trained model that scores in rows that hold many samples of a problem."""
  scorer = Scorer.load(workdir)
  return dataclasses.replace(scorer, row_length=max(scorer.row_length, ROW_LENGTH))


def step_probabilities(scorer: Scorer, problems: Sequence[Problem]) -> list[list[np.ndarray]]:
  """Class probabilities `[steps, K, C]` (`[1, K, C]` of an outcome model) of each solution."""
  pairs = [(each.text, solution.steps) for each in problems for solution in each.solutions]
  found = iter(scorer.by_head(pairs))
  return [[next(found) for _ in each.solutions] for each in problems]


def solution_scores(scorer: Scorer, probabilities: Sequence[np.ndarray]) -> np.ndarray:
  """`[solutions]` log score of each: the product over steps of P(right), or P(right answer)."""
  right = scorer.contract.right_classes
  with np.errstate(divide="ignore"):
    return np.array([np.log(p.mean(1)[:, right].sum(-1)).sum() for p in probabilities])


@dataclasses.dataclass(frozen=True)
class Samples:
  """The samples of P test problems as arrays `[P, M]`, padded where a problem has fewer."""

  index: np.ndarray  # distinct solution of its problem
  correct: np.ndarray
  valid: np.ndarray  # there, and with an answer
  answers: np.ndarray  # equal answers of a problem have equal numbers
  sizes: np.ndarray  # [P]

  @classmethod
  def of(cls, task: Task) -> "Samples":
    """Those of a task's test problems."""
    problems = task.test
    sizes = np.array([len(each.samples) for each in problems])
    shape = (len(problems), task.most or sizes.max())
    index, correct, valid, answers = (np.zeros(shape, kind) for kind in (int, bool, bool, int))
    for p, each in enumerate(problems):
      of, there = np.array(each.samples), slice(len(each.samples))
      numbers: dict[str | None, int] = {}
      ids = [numbers.setdefault(solution.answer, len(numbers)) for solution in each.solutions]
      index[p, there] = of
      correct[p, there] = np.array([solution.correct for solution in each.solutions])[of]
      valid[p, there] = np.array([solution.answer is not None for solution in each.solutions])[of]
      answers[p, there] = np.array(ids)[of]
    return cls(index, correct, valid, answers, sizes)

  @property
  def draws(self) -> dict[str, Any]:
    """`n` and `sizes` of `aggregation.best_of_n`."""
    most = self.correct.shape[1]
    return {"n": powers_of_two(most), "sizes": None if (self.sizes == most).all() else self.sizes}


def best_of_n(scores: Sequence[np.ndarray], samples: Samples) -> list[list[float]]:
  """`[P][K]` chance that the best-scored of N samples is right, N = 1, 2, 4, ... M."""
  by_sample = [each[index] for each, index in zip(scores, samples.index)]
  with jax.enable_x64(True):
    ranked = agg.join_ties(np.array(by_sample))
    return rounded(agg.best_of_n(ranked, samples.correct, samples.valid, **samples.draws))


def rounded(values: Any) -> list:
  return np.round(np.asarray(values, np.float64), DIGITS).tolist()


def judged(scorer: Scorer, task: Task) -> dict[str, Any]:
  """How well a model picks among the test samples, and rates steps whose exact rating is known."""
  probabilities = step_probabilities(scorer, task.test)
  scores = [solution_scores(scorer, each) for each in probabilities]
  result = {"accuracy": best_of_n(scores, Samples.of(task))}
  if scorer.contract.objective == "outcome":
    pairs = [
      (np.exp(score), solution.correct)
      for problem, each in zip(task.test, scores)
      for solution, score in zip(problem.solutions, each)
    ]
  else:
    pairs = list(rated(scorer, task.test, probabilities))
  if pairs:
    score, right = map(np.array, zip(*pairs))
    found = step_metrics.step_metrics(np.stack([1 - score, score], -1), right.astype(int), (0, 1))
    result |= {"auroc": found["auroc"], "ece": found["ece"]}
  return result


def rated(
  scorer: Scorer, problems: Sequence[Problem], probabilities: Sequence[Sequence[np.ndarray]]
) -> Iterator[tuple[float, bool]]:
  """(P(right), is right) of each step up to the first error, where exact ratings are known."""
  right = scorer.contract.right_classes
  for problem, each in zip(problems, probabilities):
    for solution, found in zip(problem.solutions, each):
      if solution.ratings is None:
        continue
      for score, rating in zip(found.mean(1)[:, right].sum(-1), solution.ratings):
        yield score, rating >= 0
        if rating < 0:
          break


def problems_of(task: Task) -> dict[str, Any]:
  """N, and votes, oracle, level and pass rate of each test problem."""
  samples = Samples.of(task)
  draws, outcomes = samples.draws, (samples.correct, samples.valid)
  vote = agg.majority_vote(
    samples.answers, *outcomes, **draws, key=jax.random.key(0), permutations=64
  )
  return {
    "n": draws["n"],
    "majority": rounded(vote[0]),
    "oracle": rounded(agg.pass_at_n(*outcomes, **draws)),
    "level": [each.level for each in task.test],
    "test_hash": hashlib.sha256(repr([each.text for each in task.test]).encode()).hexdigest(),
    "pass_rate": rounded((samples.correct & samples.valid).sum(1) / samples.sizes),
  }
