"""PRM-guided search against best-of-N, with a small language model trained on the embedded domain.

Language model and reward model are trained on problems outside the test.  At each budget of N
lanes, a search and N samples write about the same number of tokens.  The pick is the finished
solution with the best score.
"""

import collections
import functools
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from prm_jax import aggregation as agg
from prm_jax.datasets import arithmetic
from prm_jax.evaluation.answers import extraction
from prm_jax.experiments import models, quickstart, tasks
from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.models import Samples
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.quickstart import QuickStartStudy
from prm_jax.experiments.results import Results, Table, over_n
from prm_jax.experiments.study import Make
from prm_jax.generation import prompts, search
from prm_jax.generation.cached_scorer import CachedScorer
from prm_jax.generation.engines import Limits, Prompt, derived_seed
from prm_jax.generation.sampling import Sampling
from prm_jax.generation.search import Search
from prm_jax.input_pipeline import prefix_tree
from prm_jax.runtime import storage
from prm_jax.scoring.scorer import Scorer
from prm_jax.supervision import synthetic
from prm_jax.supervision.active import log_scores
from prm_jax.types import StepTree

TITLE = "Search guided by a process reward model"
QUESTION = (
  "A reward model can choose among finished solutions, or step by step while they are written. "
  "Which solves more problems with as many solutions under way? A small language model and a "
  "process model, both trained on other problems of the embedded domain; the pick of a search is "
  "its finished solution with the best product of step scores."
)
PAPER = (
  "The paper has no search: it leaves improving the generator to other work (section 2). Snell "
  "et al. (2024) and Beeching et al. (2024) found beam search better than best-of-N on MATH at "
  "small budgets and on harder problems, diverse subtrees better at large budgets; Puri et al. "
  "(2025) found particle filtering better than both."
)
LABELS = {
  "best_of_n": "Best-of-N",
  "weighted": "Weighted vote",
  "majority": "Majority voting",
  "beam": "Beam search",
  "lookahead": "Beam search, one step ahead",
  "dvts": "Diverse subtrees (DVTS)",
  "particles": "Particle filtering",
}
SEARCHES = ("beam", "lookahead", "dvts", "particles")
KINDS = {"generated": "written", "scored": "read by the reward model"}
LIMITS = Limits(max_new_tokens=96)
BATCH = 1024  # lanes under way


def runs(plan: Plan) -> dict[str, Make]:
  return {"samples": _of_samples} | {
    f"{rule}-{n}": functools.partial(_of_search, rule=rule, n=n)
    for rule, n in itertools.product(SEARCHES, plan.search.widths)
  }


def study(plan: Plan, directory: pathlib.Path, seed: int) -> "SearchStudy":
  """Returns the study of the quick start's test problems, with the language model's samples."""
  return SearchStudy(quickstart.adapted(plan, directory, seed), directory, seed)


class SearchStudy(QuickStartStudy):
  """One seed's language model and reward model, made on first use, and the test problems."""

  @functools.cached_property
  def test(self) -> list[arithmetic.Problem]:
    return self.problems["test"][: self.plan.search.problems]

  @functools.cached_property
  def reward_model(self) -> Scorer:
    """The process model, trained on the quick start's records and the language model's samples."""
    trees, test = (
      quickstart.trees(self.generator, "process", split) for split in ("train", "test")
    )
    workdir = self.directory / "prm"
    samples = [] if models.finished(workdir, self.plan.process) else self.labelled()
    return self.model("prm", self.plan.process, [*trees, *samples], test, "paper")

  def labelled(self) -> list[StepTree]:
    """Returns the language model's samples of training problems, with exact labels.

    A reward model without them overrates mistakes that only the language model makes, such as
    clauses left out and values restated again and again, and a search finds these.
    """
    s = self.plan.search
    problems = self.problems["train"][: s.labelled]
    asked = self.prompts(problems, len(self.test))
    samples = self.language_model.generate(asked, s.own, Sampling(s.temperature), LIMITS)
    trees = []
    for sample in sorted(samples, key=lambda sample: (sample.prompt, sample.sample)):
      if steps := prompts.split(sample.text, "lines"):
        problem = problems[sample.prompt]
        trees.append(synthetic.process(problem.text, steps, arithmetic.rate(problem, steps)))
    return trees

  def prompts(self, problems: Sequence[arithmetic.Problem], first: int = 0) -> list[Prompt]:
    """Returns a prompt for each problem, its text and a newline, with a seed of its own.

    Args:
      first: the number of the first prompt, from which its seed is derived.
    """
    return [
      Prompt("", each.text, "\n", derived_seed(self.seed, i))
      for i, each in enumerate(problems, first)
    ]

  def search(self, rule: str, n: int) -> list[search.Found]:
    """Runs a search on every test problem; returns what it found, by problem."""
    s = search.Settings(n, limits=LIMITS, rule=rule, expansions=min(4, n), max_step_tokens=32)
    scorer = CachedScorer(self.reward_model, max(min(BATCH // n, len(self.test)), 1))
    engine = Search(self.language_model, scorer, s)
    return sorted(engine.run(self.prompts(self.test)), key=lambda found: found.prompt)

  @functools.cached_property
  def samples(self) -> list[list[tuple[list[str], bool, int]]]:
    """(steps, finished, tokens) of samples, by problem; as many as the widest search has lanes."""
    path = self.directory / "samples.jsonl"
    if not path.is_file():
      with storage.written(path) as out:
        for found in self.search("best_of_n", max(self.plan.search.widths)):
          lanes = sorted(found.lanes, key=lambda lane: lane.stream)
          samples = [[lane.steps, lane.end == "stop", len(lane.tokens)] for lane in lanes]
          out.write(json.dumps(samples) + "\n")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

  @functools.cached_property
  def task(self) -> tasks.Task:
    """The test problems with `samples`; there is no pool."""
    test = []
    for problem, samples in zip(self.test, self.samples):
      solutions = [_solution(problem, steps, finished) for steps, finished, _ in samples]
      test.append(tasks.problem(problem.text, problem.level, solutions))
    return tasks.Task((), tuple(test))


def _solution(problem: arithmetic.Problem, steps: Sequence[str], finished: bool) -> tasks.Solution:
  answer = extraction.final_answer("\n".join(steps)) if finished else None
  return tasks.Solution(tuple(steps), answer == str(problem.answer), answer)


def _of_samples(study: SearchStudy, name: str) -> dict[str, Any]:
  """Returns accuracies `[P][K]` of best-of-N and of votes at the K widths, and tokens at each."""
  n, samples = study.plan.search.widths, Samples.of(study.task)
  right = models.right_steps(study.reward_model, study.task.test)
  scores = [log_scores(each) for each in right]
  by_sample = np.array([each[index] for each, index in zip(scores, samples.index)])
  outcomes = (samples.correct, samples.valid, n)
  with jax.enable_x64(True):
    best = agg.best_of_n(agg.join_ties(by_sample), *outcomes)
  key = jax.random.key(study.seed)
  weighted, _ = agg.majority_vote(
    samples.answers, *outcomes, np.exp(by_sample), key=key, permutations=256
  )
  votes, _ = agg.majority_vote(samples.answers, *outcomes)
  accuracy = {"best_of_n": best, "weighted": weighted, "majority": votes}
  spent = [_spent(study, width) for width in n]
  return {name: models.rounded(x) for name, x in accuracy.items()} | {"spent": spent}


def _spent(study: SearchStudy, n: int) -> dict[str, int]:
  """Counts tokens of the first n samples of each problem: written, and read by the reward model."""
  spent = collections.Counter()
  for problem, samples in zip(study.test, study.samples):
    trees = [study.reward_model.encode(problem.text, steps) for steps, _, _ in samples[:n]]
    spent["scored"] += len(prefix_tree.merge(trees)[0])
    spent["generated"] += sum(tokens for _, _, tokens in samples[:n])
  return dict(spent)


def _of_search(study: SearchStudy, name: str, rule: str, n: int) -> dict[str, Any]:
  """Returns the accuracy of a search's pick `[P][1]`, ties shared, and its tokens."""
  accuracy, spent = [], collections.Counter()
  for found in study.search(rule, n):
    finished = [lane for lane in found.lanes if lane.end == "stop"]
    scores = [np.prod(x.right) for x in finished]
    picks = [x for x, score in zip(finished, scores) if score == max(scores)]
    correct = [_solution(study.test[found.prompt], x.steps, True).correct for x in picks]
    accuracy.append([float(np.mean(correct)) if correct else 0.0])
    spent.update(found.spent)
  return {"accuracy": accuracy, "spent": dict(spent)}


def _curves(results: Results) -> dict[str, np.ndarray]:
  """Returns the accuracy of each method over the budget, `[S, P, K]`."""
  samples, widths = results.of("samples"), results.plan["search"]["widths"]
  methods = ("best_of_n", "weighted", "majority")
  return {name: np.array([each[name] for each in samples]) for name in methods} | {
    rule: np.concatenate([results.accuracy(f"{rule}-{n}") for n in widths], axis=2)
    for rule in SEARCHES
  }


def _by_width(results: Results, rule: str) -> list[Sequence[dict[str, int]]]:
  """Returns the tokens spent at each budget, by seed."""
  if rule == "best_of_n":
    return [*zip(*(each["spent"] for each in results.of("samples")))]
  runs = (f"{rule}-{n}" for n in results.plan["search"]["widths"])
  return [[each["spent"] for each in results.of(run)] for run in runs]


def _tokens(results: Results, rule: str, kind: str) -> list[float]:
  """Returns the tokens of a problem at each budget, mean over seeds."""
  problems = len(results.of("samples")[0]["best_of_n"])
  seeds = _by_width(results, rule)
  return [float(np.mean([spent[kind] for spent in each])) / problems for each in seeds]


def panels(results: Results) -> list[Panel]:
  """Returns panels over lanes, written tokens, and tokens that the reward model reads."""
  curves = _curves(results)

  def curve(name: str, x: Sequence[float]) -> Curve:
    style = {"dashed": name == "majority", "colour": list(LABELS).index(name)}
    return Curve.over_n(LABELS[name], x, results.intervals(curves[name]), **style)

  y, widths = "% problems solved", results.plan["search"]["widths"]
  over_lanes = [curve(name, widths) for name in LABELS if name in curves]
  out = [Panel(over_lanes, "N = solutions of a problem under way", y)]
  for kind, label in KINDS.items():
    over_tokens = [curve(x, _tokens(results, x, kind)) for x in ("best_of_n", *SEARCHES)]
    out.append(Panel(over_tokens, f"tokens of a problem {label}", y))
  return out


def tables(results: Results) -> list[Table]:
  """Returns the tables of page and screen."""
  curves, widths = _curves(results), results.plan["search"]["widths"]
  header, at = ["N", *map(str, widths)], range(len(widths))
  labels = {name: label for name, label in LABELS.items() if name in curves}
  searches = {name: LABELS[name] for name in SEARCHES}
  more = lambda rule: results.intervals(curves[rule] - curves["best_of_n"])
  tokens = [
    [f"{LABELS[rule]}, {label}", *(f"{x:,.0f}" for x in _tokens(results, rule, kind))]
    for rule in ("best_of_n", *SEARCHES)
    for kind, label in KINDS.items()
  ]
  saved = lambda seeds: np.mean([each["scored_from_start"] / each["scored"] for each in seeds])
  tokens += [
    [f"{label}, times as many if read from the start"]
    + [f"{saved(seeds):.1f}" for seeds in _by_width(results, rule)]
    for rule, label in searches.items()
  ]
  solved = over_n(labels, lambda name: results.intervals(curves[name]), at)
  gained = over_n(searches, more, at, sign=True)
  return [
    Table("% of problems solved, with 95 % intervals", header, solved),
    Table("Points more than best-of-N with as many lanes", header, gained),
    Table("Tokens of a problem", header, tokens),
  ]
