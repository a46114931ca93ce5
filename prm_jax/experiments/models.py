"""Trained models of an experiment, and how well they pick among the samples of test problems."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from prm_jax import aggregation as agg
from prm_jax import step_metrics
from prm_jax.config import Experiment
from prm_jax.evaluation.reranking import powers_of_two
from prm_jax.experiments.tasks import Problem, Task
from prm_jax.runtime import storage
from prm_jax.scoring.scorer import Scorer
from prm_jax.supervision.active import log_scores
from prm_jax.training import checkpoint

DIGITS = 6  # of stored accuracies
ROW_LENGTH = 512  # tokens; in shorter rows, text that samples share is encoded more often


def finished(workdir: storage.Path, c: Experiment) -> bool:
  """Returns whether a training run has made all its updates."""
  latest = checkpoint.latest(workdir)
  return latest is not None and latest[0] >= c.train.steps


def load(workdir: storage.Path | str) -> Scorer:
  """Loads a trained model; its rows are long enough for many samples of a problem."""
  scorer = Scorer.load(workdir)
  return dataclasses.replace(scorer, row_length=max(scorer.row_length, ROW_LENGTH))


def right_steps(scorer: Scorer, problems: Sequence[Problem]) -> list[list[np.ndarray]]:
  """Returns P(right) of each solution's steps by K heads, `[steps, K]`.

  For an outcome model, which judges whole solutions, it is `[1, K]`.
  """
  pairs = [(each.text, solution.steps) for each in problems for solution in each.solutions]
  probabilities = iter(scorer.by_head(pairs))
  return [[scorer.contract.right(next(probabilities)) for _ in x.solutions] for x in problems]


@dataclasses.dataclass(frozen=True)
class Samples:
  """The samples of P test problems as arrays `[P, M]`, padded where a problem has fewer."""

  index: np.ndarray  # which distinct solution of the problem a sample is
  correct: np.ndarray
  valid: np.ndarray  # not padding, and with an answer
  answers: np.ndarray  # equal answers of a problem have equal numbers
  sizes: np.ndarray  # [P] samples of each problem

  @classmethod
  def of(cls, task: Task) -> "Samples":
    """Collects the samples of a task's test problems."""
    sizes = np.array([len(each.samples) for each in task.test])
    shape = (len(task.test), sizes.max())
    index, correct, valid, answers = (np.zeros(shape, kind) for kind in (int, bool, bool, int))
    for p, problem in enumerate(task.test):
      numbers: dict[str | None, int] = {}
      for m, i in enumerate(problem.samples):
        solution = problem.solutions[i]
        index[p, m] = i
        correct[p, m] = solution.correct
        valid[p, m] = solution.answer is not None
        answers[p, m] = numbers.setdefault(solution.answer, len(numbers))
    return cls(index, correct, valid, answers, sizes)

  @property
  def draws(self) -> dict[str, Any]:
    """Returns the arguments `n` and `sizes` of `aggregation.best_of_n`."""
    return {"n": powers_of_two(self.correct.shape[1]), "sizes": self.sizes}


def best_of_n(scores: Sequence[np.ndarray], samples: Samples) -> list[list[float]]:
  """Returns `[P][K]`: the chance that the best-scored of N samples is right, N = 1, 2, 4, ... M."""
  by_sample = [each[index] for each, index in zip(scores, samples.index)]
  with jax.enable_x64(True):
    ranked = agg.join_ties(np.array(by_sample))
    return rounded(agg.best_of_n(ranked, samples.correct, samples.valid, **samples.draws))


def rounded(values: Any) -> list:
  return np.round(np.asarray(values, np.float64), DIGITS).tolist()


def judged(scorer: Scorer, task: Task) -> dict[str, Any]:
  """Returns a model's best-of-N on the test samples, and AUROC and ECE where they are defined.

  For an outcome model, AUROC and ECE are over solutions.  For a process model they are over steps
  up to the first error, of solutions whose exact ratings are known.
  """
  right = right_steps(scorer, task.test)
  result = {"accuracy": best_of_n([log_scores(each) for each in right], Samples.of(task))}
  by_step = scorer.contract.objective == "process"
  pairs = [
    pair
    for problem, each in zip(task.test, right)
    for solution, p in zip(problem.solutions, each)
    for pair in zip(p.mean(1), solution.right_until_error if by_step else [solution.correct])
  ]
  if pairs:
    score, truth = map(np.array, zip(*pairs))
    metrics = step_metrics.step_metrics(np.stack([1 - score, score], -1), truth.astype(int), (0, 1))
    result |= {key: metrics[key] for key in ("auroc", "ece")}
  return result


def problems_of(task: Task) -> dict[str, Any]:
  """Returns the values of N, the problems' hash, and votes, level and pass rate of each."""
  samples = Samples.of(task)
  draws, outcomes = samples.draws, (samples.correct, samples.valid)
  return {
    "n": draws["n"],
    "majority": rounded(agg.majority_vote(samples.answers, *outcomes, **draws)[0]),
    "level": [each.level for each in task.test],
    "test_hash": hashlib.sha256(repr([each.text for each in task.test]).encode()).hexdigest(),
    "pass_rate": rounded((samples.correct & samples.valid).sum(1) / samples.sizes),
  }
