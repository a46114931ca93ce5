"""Grades candidate solutions: is the answer the right one?

  python scripts/grade.py --input=samples.jsonl --output=graded.jsonl

Input: JSON lines (plain or .gz), one candidate each, with `ground_truth_answer`, and `answer` or
else `text`, from which the final answer is extracted.  Output: the same lines with `answer`,
`is_correct` (true, false; null where it is undecided) and `verdict`: equal, different, missing, or
undecided and why.  A candidate that was cut off (`finished` is false) or has no answer is missing:
it is not correct, and rerank.py never chooses it.

--right gets the candidates that are right as `prompt` and `completion`, a step a line, on which
train.py trains a generator (configs/generator.py); they need `problem` and `steps`.

Worker processes decide, each pair for --seconds at most; each distinct pair is decided once, and
verdicts are kept in --verdicts for the next run.  docs/answers.md has the rules of the graders.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before what takes time to import

import collections
import dataclasses
import itertools
import json
import pathlib
from typing import Annotated, Any

import msgspec

from prm_jax import config as config_lib
from prm_jax.evaluation.answers import extraction, grading
from prm_jax.runtime import command_line, json_lines, progress, storage

CHUNK = 16_384  # lines in memory at once
MISSING = "missing"


@dataclasses.dataclass(frozen=True)
class Args(config_lib.Checked):
  input: pathlib.Path
  output: pathlib.Path
  right: pathlib.Path | None = None  # file of what is right, to train a generator on
  grader: grading.Name = "math_verify"
  extract: extraction.Rule = "auto"  # where `text` has its answer, if a line has no `answer`
  precision: Annotated[int, msgspec.Meta(ge=0, le=15)] = 6  # decimals that count (math_verify)
  seconds: config_lib.Positive = 5.0  # for a pair; then it is undecided
  workers: config_lib.Whole = 0  # processes; 0: one for each core
  verdicts: pathlib.Path = grading.CACHE  # file of known verdicts


class Candidate(msgspec.Struct):
  """The keys of a line that are read."""

  ground_truth_answer: json_lines.Text
  answer: str | None = None
  text: str = ""
  finished: bool | None = None


class Solution(msgspec.Struct):
  """The keys of a line that is kept for --right."""

  problem: json_lines.Text
  steps: Annotated[list[str], msgspec.Meta(min_length=1)]

  def example(self) -> dict[str, str]:
    """As generate.py --prompt=plain asks for it."""
    return {"prompt": f"{self.problem}\n", "completion": "\n".join(self.steps)}


def main() -> None:
  args = command_line.parse(Args, __doc__)
  if args.output.resolve() == args.input.resolve():
    raise ValueError(f"--output={args.output} is the input: give another name")
  options = {"precision": args.precision} if args.grader == "math_verify" else {}
  grader = grading.Grader(args.grader, args.verdicts, args.seconds, args.workers, **options)
  with storage.written_together() as output, grader:
    right = args.right and output(args.right)
    counts = grade(args.input, output(args.output), grader, args.extract, right)
  total = sum(counts.values())
  for verdict, count in counts.most_common():
    print(f"{verdict:32}{count:10,}{100 * count / max(total, 1):8.1f} %")
  print(f"{total:,} candidates -> {args.output}")


def grade(
  path: pathlib.Path, out: Any, grader: grading.Grader, rule: extraction.Rule, kept: Any = None
):
  """Writes the graded lines of a file; returns how often each verdict was given.

  Args:
    kept: file that gets the right ones, to train on.
  """
  counts, done = collections.Counter(), 0
  total = sum(1 for _ in json_lines.lines(path))
  with progress.Progress(desc="grading", total=total, unit="candidates") as bar:
    lines = json_lines.read(path)
    while chunk := list(itertools.islice(lines, CHUNK)):
      found = [
        json_lines.convert(record, Candidate, f"{path}:{number}") for number, _, record in chunk
      ]
      answers = [
        each.answer if "answer" in record else extraction.final_answer(each.text, rule)
        for each, (_, _, record) in zip(found, chunk)
      ]
      graded = [i for i, x in enumerate(answers) if x and found[i].finished is not False]
      pairs = [(answers[i], found[i].ground_truth_answer) for i in graded]
      each_is = len(chunk) / max(len({*pairs}), 1)
      reach = lambda decided, done=done, each_is=each_is: bar.reach(done + decided * each_is)
      verdicts = dict(zip(graded, grader.verdicts(pairs, reach)))
      for i, (number, _, record) in enumerate(chunk):
        verdict = verdicts.get(i, MISSING)
        counts[verdict] += 1
        right = None if verdict.startswith("undecided") else verdict == grading.EQUAL
        record |= {"answer": answers[i], "is_correct": right, "verdict": verdict}
        out.write(json.dumps(record, ensure_ascii=False) + "\n")
        if kept and right:
          solution = json_lines.convert(record, Solution, f"{path}:{number}")
          kept.write(json.dumps(solution.example(), ensure_ascii=False) + "\n")
      bar.reach(done := done + len(chunk))
  return counts


if __name__ == "__main__":
  exits.run(main)
