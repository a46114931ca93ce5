"""A generative verifier as judge: its votes on the first wrong step become labels and scores.

A language model reads a problem and a solution, writes a critique, and ends it with a verdict.  Its
text is parsed and never run: code in it, as GenPRM writes, is not executed.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prm_jax.evaluation.verdicts import NONE_WRONG, Verdict, labels, plurality
from prm_jax.generation.engines import Completion, Engine, Limits, Prompt, derived_seed, naming
from prm_jax.generation.sampling import Sampling
from prm_jax.runtime import json_lines, progress
from prm_jax.runtime.journal import Journal
from prm_jax.scoring import candidates
from prm_jax.supervision.judge_templates import TEMPLATES, Name


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings that determine the verdicts on a solution, besides the model."""

  template: Name
  votes: int
  sampling: Sampling
  limits: Limits
  seed: int


@dataclasses.dataclass(frozen=True)
class Judgement:
  """A judge's verdicts on a solution."""

  number: int  # of the solution
  verdicts: tuple[Verdict, ...]
  tokens: int  # of all its answers
  cut: int = 0  # answers that were cut off at the token limit


Solution = tuple[dict[str, Any], str, tuple[str, ...]]  # record, problem and steps


def annotate(
  solutions: Sequence[Solution],
  left: Sequence[int],
  engine: Engine,
  make: Callable[[str, int], Prompt],
  s: Settings,
  about: Mapping[str, Any],
  journal: Journal,
) -> None:
  """Judges the solutions at the indices `left` and adds them to the journal; shows progress.

  For the other arguments see `judged` and `line`.
  """
  asked = {i: solutions[i][1:] for i in left}
  undecided: collections.Counter[bool] = collections.Counter()
  done = len(journal.done)
  total = done + len(left)
  name = lambda i: f"solution {left[i] + 1}, of {json_lines.show(solutions[left[i]][1])}"
  bar = progress.Progress(desc="judging", total=total, initial=done, unit="solutions")
  with bar, naming(name):
    for judgement in judged(asked, engine, make, s):
      number = judgement.number
      journal.add(number, [line(*solutions[number], judgement, about)])
      undecided.update(verdict is None for verdict in judgement.verdicts)
      share = 100 * undecided[True] / undecided.total()
      bar.set_postfix_str(f"{share:.0f} % undecided", refresh=False)
      bar.update()


def message(text: str, seed: int) -> Prompt:
  """Returns the prompt for a chat server, which applies the model's chat template itself."""
  return Prompt("", text, "", seed)


def judged(
  solutions: Mapping[int, tuple[str, Sequence[str]]],
  engine: Engine,
  make: Callable[[str, int], Prompt],
  s: Settings,
) -> Iterator[Judgement]:
  """Yields the judgement of each solution as soon as all of its votes have arrived.

  Args:
    solutions: problem and steps by number.  The seeds of a solution follow from its number, so a
      resumed run may leave out solutions that are done.
    make: makes a prompt from a message and a seed: `message` for a chat server, `prompts.maker`
      with the form "chat" and no system message for this project's sampler.

  Raises:
    ValueError, OSError: as `Engine.generate`.
  """
  numbers, template = [*solutions], TEMPLATES[s.template]
  asked = [make(template.prompt(*solutions[i]), derived_seed(s.seed, i)) for i in numbers]
  arrived: dict[int, dict[int, Completion]] = collections.defaultdict(dict)
  for completion in engine.generate(asked, s.votes, s.sampling, s.limits):
    number = numbers[completion.prompt]
    arrived[number][completion.sample] = completion
    if len(arrived[number]) == s.votes:
      votes = [vote for _, vote in sorted(arrived.pop(number).items())]
      count = len(solutions[number][1])
      verdicts = tuple(  # an answer that was cut off is undecided
        template.verdict(vote.text, count) if vote.end == "stop" else None for vote in votes
      )
      cut = sum(vote.end != "stop" for vote in votes)
      yield Judgement(number, verdicts, sum(vote.token_count for vote in votes), cut)


def probabilities(verdicts: Sequence[Verdict], count: int) -> list[float]:
  """Returns P(right) of each step; the product is the share of decided verdicts without an error.

  P(right) of step i is 1 - (verdicts whose first error is i) / (verdicts that find none before i):
  one minus the hazard of the first error, in discrete time.  A verdict says nothing of the steps
  after its error, so only verdicts that reach step i vote on it.  The product telescopes, because
  each numerator is the next denominator.  Two cases have no ratio:

  * No verdict reaches step i, because all found an earlier error: 0.5.  The product is 0 already.
  * No verdict is decided: 0.5 ** (1 / count), so that the product is 0.5 for any number of steps.
  """
  decided = [each for each in verdicts if each is not None]
  if not decided:
    return [0.5 ** (1 / count)] * count
  out, left = [], len(decided)
  for i in range(count):
    wrong = decided.count(i)
    out.append(1 - wrong / left if left else 0.5)
    left -= wrong
  return out


def line(
  record: dict[str, Any],
  problem: str,
  steps: Sequence[str],
  judgement: Judgement,
  about: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns the record with labels and scores, for prepare_data.py, rerank.py and evaluate.py.

  Args:
    about: facts about the judge, for the provenance.
  """
  verdicts = judgement.verdicts
  first = plurality(verdicts)
  given = candidates.outcome(record)
  right = probabilities(verdicts, len(steps))
  decided = len(verdicts) - verdicts.count(None)
  known = given is not None
  judged_correct = None if first is None else first == NONE_WRONG
  others = candidates.SCORES["process"]  # another model's scores
  return {key: value for key, value in record.items() if key not in others} | {
    "problem": problem,
    "steps": [*steps],
    "labels": labels(first, len(steps)),
    "rating_probs": [{"-1": 1 - p, "0": 0.0, "1": p} for p in right],
    "prm_score": math.prod(right),
    "is_correct": given if known else judged_correct,
    "verdicts": [*verdicts],
    "provenance": {
      "method": "judge",
      **about,
      "agreement": verdicts.count(first) / decided if decided else None,
      "tokens": judgement.tokens,
      "cut_off": judgement.cut,
      "outcome": "answer" if known else "labeller",
    },
  }


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
  """Summarizes lines made by `line` for the screen."""
  verdicts = [verdict for each in lines for verdict in each["verdicts"]]
  given = collections.Counter(str(label) for each in lines for label in each["labels"])
  tokens, cut = (sum(each["provenance"][key] for each in lines) for key in ("tokens", "cut_off"))
  answers = (each for each in lines if each["provenance"]["outcome"] == "answer")
  firsts = ((plurality(each["verdicts"]), each["is_correct"]) for each in answers)
  known = [right == (first == NONE_WRONG) for first, right in firsts if first is not None]
  share = lambda part, whole: f"{100 * part / max(whole, 1):.1f} %"
  out = [
    f"{len(lines):,} solutions, {len(verdicts):,} verdicts, "
    f"{share(verdicts.count(None), len(verdicts))} undecided ({share(cut, len(verdicts))} cut off "
    "at --max_new_tokens)",
    f"labels: {given['-1']:,} -1, {given['1']:,} 1; {given['None']:,} steps without one",
    f"{tokens / max(len(verdicts), 1):,.0f} tokens a verdict",
  ]
  if known:
    out.append(
      f"verdicts agree with the final answer on {share(sum(known), len(known))} of "
      f"{len(known):,} solutions"
    )
  return out
