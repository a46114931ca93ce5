"""Templates of generative verifiers: the prompt for a critique, and a parser of its verdict.

The words of the prompts are ours; tags, headings and verdicts are spelt as upstream, because models
are trained on them.  The example of an answer in a prompt does not parse as a verdict, because
models that think repeat it.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from prm_jax.evaluation.verdicts import NONE_WRONG, Verdict

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
