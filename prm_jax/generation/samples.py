"""Samples or searches for candidate solutions, problem by problem, and journals their records."""

import collections
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from prm_jax.evaluation.answers import extraction
from prm_jax.generation import prompts as prompts_lib
from prm_jax.generation.engines import Completion, Engine, Prompt, derived_seed, naming
from prm_jax.generation.search import Found, Search
from prm_jax.generation.step_writer import Settings
from prm_jax.runtime import json_lines, progress
from prm_jax.runtime.journal import Journal
from prm_jax.scoring import candidates
from prm_jax.types import StepContract

# Keys that judge a solution.  The record of a problem may have them, if it is also a solution.
OF_A_SOLUTION = {"logprob", "is_correct", "final_answer_correct", "label", "labels", "verdict"}
OF_A_SOLUTION |= {"verdicts", "search_score", "spent", "rollouts", "provenance"}
OF_A_SOLUTION |= candidates.SCORES["process"] | candidates.SCORES["outcome"]
Problem = dict[str, Any]  # a record with `problem`, whose keys go to each sample


class Line(msgspec.Struct):
  """The keys of a problem's record that are read, or that grade.py reads of each sample."""

  problem: json_lines.Text
  ground_truth_answer: json_lines.NotBlank | None = None
  answer: str | None = None  # the ground truth, if there is no other


def read(path: pathlib.Path) -> list[Problem]:
  """Reads the problems of a file; raises BadLine for a record without `problem`."""
  problems = []
  for where, record in json_lines.records(path):
    json_lines.convert(record, Line, where)
    problems.append(record)
  return problems


def record(problem: Problem, completion: Completion, s: Settings) -> dict[str, Any]:
  """Returns an output record: the problem's keys, and a sample in the format of scored samples.

  A sample that was cut off has no answer: it is missing, not wrong.  A problem's own `answer`, as
  in MATH, becomes `ground_truth_answer`; other keys of a sample replace the problem's.  Keys that
  judge a solution (`OF_A_SOLUTION`) are dropped, because they may judge another solution.
  """
  text = prompts_lib.solution(completion.text, s.form)
  finished = completion.end == "stop"
  kept = {key: value for key, value in problem.items() if key not in OF_A_SOLUTION}
  if kept.get("ground_truth_answer") is None and kept.get("answer") is not None:
    kept["ground_truth_answer"] = kept["answer"]
  out = kept | {
    "text": text,
    "steps": prompts_lib.split(text, s.steps) or [" "],
    "answer": extraction.final_answer(text) if finished else None,
    "tokens": completion.token_count,
    "finished": finished,
    "sample": completion.sample,
  }
  if completion.log_probs is not None:
    out["logprob"] = sum(completion.log_probs)
  return out


def generate(
  problems: Sequence[Problem],
  left: Sequence[int],
  engine: Engine,
  make: Callable[[str, int], Prompt],
  s: Settings,
  journal: Journal,
) -> None:
  """Samples solutions of the problems at the indices `left` and journals them; shows progress."""
  asked = [make(problems[i]["problem"], derived_seed(s.seed, i)) for i in left]
  records: dict[int, dict[int, dict]] = collections.defaultdict(dict)  # by problem and sample
  tokens = ended = count = 0
  done = len(journal.done) * s.n
  total = done + len(left) * s.n
  bar = progress.Progress(desc="sampling", total=total, initial=done, unit="samples")
  with bar, naming(_name(problems, left)):
    for completion in engine.generate(asked, s.n, s.sampling, s.limits):
      i = left[completion.prompt]
      records[i][completion.sample] = record(problems[i], completion, s)
      if len(records[i]) == s.n:
        journal.add(i, [x for _, x in sorted(records.pop(i).items())])
      count, tokens = count + 1, tokens + completion.token_count
      ended += completion.end == "stop"
      rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
      bar.set_postfix_str(f"{rate:.0f} tokens/s, {100 * ended / count:.0f} % ended", refresh=False)
      bar.update()


def search(
  problems: Sequence[Problem],
  left: Sequence[int],
  engine: Search,
  make: Callable[[str, int], Prompt],
  s: Settings,
  journal: Journal,
) -> None:
  """Searches for solutions of the problems at the indices `left` and journals them.

  Takes the arguments of `generate`.  The records also have the scores of their steps.
  """
  asked = [make(problems[i]["problem"], derived_seed(s.seed, i)) for i in left]
  generated, done = 0, len(journal.done)
  total = done + len(left)
  bar = progress.Progress(desc="searching", total=total, initial=done, unit="problems")
  with bar, naming(_name(problems, left)):
    for found in engine.run(asked):
      i = left[found.prompt]
      journal.add(i, searched(problems[i], found, s, engine.scorer.scorer.contract))
      generated += found.spent["generated"]
      rate = generated / max(bar.format_dict["elapsed"], 1e-9)
      bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
      bar.update()


def _name(problems: Sequence[Problem], left: Sequence[int]) -> Callable[[int], str]:
  """Returns the function that names the problem of a prompt, numbered from 1."""
  show = lambda i: json_lines.show(problems[i]["problem"])
  return lambda i: f"problem {left[i] + 1}, {show(left[i])}"


def searched(
  problem: Problem, found: Found, s: Settings, contract: StepContract
) -> list[dict[str, Any]]:
  """Returns records as `record` does, with the keys of `candidates.scored` and two more.

  `search_score` is the score that the rule saw; `spent` counts the tokens of the whole problem.
  """
  records = []
  for k, lane in enumerate(found.lanes):
    count = len(lane.tokens)
    completion = Completion(found.prompt, k, lane.text, lane.end, lane.tokens, None, count)
    sample = record(problem, completion, s) | {"logprob": lane.log_prob}
    sample = candidates.scored(sample, lane.steps, np.array(lane.probabilities), contract)
    records.append(sample | {"search_score": lane.score, "spent": found.spent})
  return records


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
  """Summarizes the records for the screen."""
  spent = [line["spent"] for line in lines if line["sample"] == 0 and "spent" in line]
  sum_of = lambda name: sum(counts[name] for counts in spent)
  finished = sum(line["finished"] for line in lines)
  answered = sum(line["answer"] is not None for line in lines)
  share = lambda count: f"{100 * count / max(len(lines), 1):.1f} %"
  tokens = sum(line["tokens"] for line in lines)
  out = [
    f"{len(lines):,} samples, {tokens:,} tokens",
    f"{share(finished)} ended, {share(len(lines) - finished)} were cut off",
    f"{share(answered)} have an answer",
  ]
  for model, name in (("language", "read"), ("reward", "scored")) if spent else ():
    again = sum_of(f"{name}_from_start")
    out.append(
      f"the {model} model read {sum_of(name):,} tokens; {again:,} if each prefix were read again"
    )
  return out
