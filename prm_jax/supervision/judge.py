"""A generative verifier as judge: its votes on the first wrong step become labels and scores.

A language model reads a problem and a solution, writes a critique, and ends it with a verdict.  Its
text is parsed and never run: code in it, as GenPRM writes, is not executed.

A template is a prompt and a parser of the answer.  The words of the prompts are ours; tags,
headings and verdicts are spelt as upstream, because models are trained on them.  The example of an
answer in a prompt does not parse as a verdict, because models that think repeat it.
"""

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from prm_jax.evaluation.verdicts import NONE_WRONG, Verdict, labels, plurality
from prm_jax.generation.engines import Completion, Engine, Limits, Prompt, derived_seed, naming
from prm_jax.generation.sampling import Sampling
from prm_jax.runtime import json_lines, progress
from prm_jax.runtime.journal import Journal
from prm_jax.scoring import candidates

Name = Literal["critic", "thinkprm", "genprm"]  # of a template

# All patterns are bounded after their first word, so that a search is linear in the text.
BOX = "\\boxed{"
INDEX = re.compile(r"\\boxed\{\s{0,9}(?:\\text\{)?([+-]?[0-9]{1,9})\s{0,9}\}")
STEP = re.compile(r"\\boxed\{\s{0,9}(?:\\text\{)?(correct|incorrect)\s{0,9}\}")
THOUGHT = "</think>"  # ends the thoughts of a model that thinks before it answers
PARAGRAPH = re.compile(r"\\boxed\{\s{0,9}(?:\\text\{)?([Yy]es|[Nn]o)\s{0,9}\}")
QUESTION = "Is the solution correct?"
ANSWER = re.compile(r"\W{0,9}(Yes|No)\b(?!/)")
NUMBER = re.compile(r"\A\s{0,9}Step [0-9]{1,9}:")  # in front of a step


@dataclasses.dataclass(frozen=True)
class Template:
  prompt: Callable[[str, Sequence[str]], str]  # (problem, steps) -> message
  verdict: Callable[[str, int], Verdict]  # (whole answer, number of steps) -> verdict


def _layout(task: str, problem: str, solution: str, answer: str) -> str:
  return f"{task}\n\n[Math Problem]\n\n{problem}\n\n[Solution]\n\n{solution}\n\n{answer}"


def _paragraphs(steps: Sequence[str], first: int) -> str:
  tagged = (f"<paragraph_{i}>\n{step}\n</paragraph_{i}>" for i, step in enumerate(steps, first))
  return "\n\n".join(tagged)


def critic_prompt(problem: str, steps: Sequence[str]) -> str:
  r"""Returns ProcessBench's prompt: the index of the first wrong paragraph, or -1, in `\boxed{}`.

  Upstream: `code/templates/critique_template.txt` in QwenLM/ProcessBench; for any chat model.
  """
  return _layout(
    "Below are a math problem and a solution of it. The solution is split into paragraphs, each "
    "between tags with its index, counted from 0.",
    problem,
    _paragraphs(steps, first=0),
    "Check the solution paragraph by paragraph. If a paragraph has an error, stop there and answer "
    "with its index: the earliest one that has an error. If no paragraph has one, answer with -1.\n"
    "\nPut the answer (the index alone) in \\boxed{} at the end of your review.",
  )


def critic_verdict(text: str, count: int) -> Verdict:
  r"""Returns the integer in the last `\boxed{}`; undecided unless it is a step's index or -1."""
  match = INDEX.match(text, at) if (at := text.rfind(BOX)) >= 0 else None
  index = int(match[1]) if match else count
  return index if NONE_WRONG <= index < count else None


def thinkprm_prompt(problem: str, steps: Sequence[str]) -> str:
  """Returns ThinkPRM's prompt: a judgement on each numbered step.

  Khalifa et al. 2025, arXiv 2504.16828.  Upstream: `format_verification_cot_for_thinkprm` in
  `utils/helper.py` of mukhal/ThinkPRM, which begins the answer with "Let's verify step by step:";
  the form of the answer is figure 14's.
  """
  numbered = (f"Step {i}: {NUMBER.sub('', step).strip()}" for i, step in enumerate(steps, 1))
  return _layout(
    "You are given a math problem and a proposed step-by-step solution:",
    problem,
    "\n".join(numbered),
    "Review each step of the proposed solution and judge whether it is correct. The solution may "
    "be incomplete: judge only the steps that it has. Answer in this form:\n"
    "\n"
    "Let's verify step by step:\n"
    "Step 1: <critique> The step is \\boxed{correct/incorrect}\n"
    "Step 2: <critique> The step is \\boxed{correct/incorrect}\n"
    "...\n"
    "\n"
    "Stop after the first incorrect step. The last line of the answer is:\n"
    f"{QUESTION} Yes/No",
  )


def thinkprm_verdict(text: str, count: int) -> Verdict:
  r"""Returns the first step whose box is `\boxed{incorrect}`; the k-th box judges step k.

  As `extract_step_cots_and_labels` in upstream's `utils/answer_utils.py`, which reads lines.  If
  the last "Is the solution correct?" contradicts the boxes, the answer is undecided.  Without boxes
  that line decides nothing: "No" names no step, and counting "Yes" alone would be a bias.
  """
  verdict = _first((box[1] == "incorrect" for box in STEP.finditer(text)), count)
  at = text.rfind(QUESTION)
  answer = ANSWER.match(text, at + len(QUESTION)) if at >= 0 else None
  if answer and (answer[1] == "Yes") != (verdict == NONE_WRONG):
    return None
  return verdict


def genprm_prompt(problem: str, steps: Sequence[str]) -> str:
  r"""Returns GenPRM's prompt: `\boxed{Yes}` or `\boxed{No}` for each paragraph.

  Zhao et al. 2025, arXiv 2504.00891.  Upstream: the critique prompt of appendix A.2, and the form
  in which `prm_evaluation/` of RyanLiu112/GenPRM writes answers.  Upstream's evaluation makes each
  paragraph a turn of a conversation and executes the code in it; here one answer judges all, and
  nothing is executed.
  """
  return _layout(
    "You are a math teacher. Your task is to review and critique the paragraphs in a solution step "
    "by step. Do not solve the problem yourself. Below are the problem and the solution, split "
    "into paragraphs with tags, counted from 1.",
    problem,
    _paragraphs(steps, first=1),
    "Judge each paragraph in turn, with Yes if it is correct and No if it is not. No code will be "
    "run. Answer for each paragraph in this form:\n"
    "\n"
    "<analyze>\n"
    "Let's analyze the Paragraph 1 step by step: ...\n"
    "</analyze>\n"
    "<verify>\n"
    "...\n"
    "</verify>\n"
    "<output>\n"
    "**Judgement**: $\\boxed{Yes|No}$\n"
    "</output>\n"
    "\n"
    "Stop after the first paragraph that is judged No.",
  )


def genprm_verdict(text: str, count: int) -> Verdict:
  r"""Returns the first step whose box is `\boxed{No}`: the k-th box after thoughts is step k's."""
  judgements = PARAGRAPH.finditer(text, text.rfind(THOUGHT) + 1)
  return _first((box[1].lower() == "no" for box in judgements), count)


def _first(wrong: Iterable[bool], count: int) -> Verdict:
  """Returns the first wrong step by judgements in step order; undecided if there are too few.

  If none is wrong, every step needs a judgement.  Judgements past the last step are ignored, but a
  first error among them makes the answer undecided.
  """
  number = 0
  for number, is_wrong in enumerate(wrong, 1):
    if is_wrong:
      return number - 1 if number <= count else None
  return NONE_WRONG if number >= count else None


TEMPLATES: dict[Name, Template] = {
  "critic": Template(critic_prompt, critic_verdict),
  "thinkprm": Template(thinkprm_prompt, thinkprm_verdict),
  "genprm": Template(genprm_prompt, genprm_verdict),
}


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


def read(path: pathlib.Path, separator: str) -> list[Solution]:
  """Reads the record, problem and steps of each line of a file.

  Raises:
    BadLine: a line has no problem, or neither steps nor text.
  """
  return [
    (record, *candidates.solution(record, separator, where))
    for where, record in json_lines.records(path)
  ]


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

  For the arguments see `read`, `judged` and `line`.
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
  # ProcessBench calls it final_answer_correct.
  given = record.get("is_correct", record.get("final_answer_correct"))
  right = probabilities(verdicts, len(steps))
  decided = len(verdicts) - verdicts.count(None)
  known = isinstance(given, bool)
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
