"""Grades candidate solutions: decides whether each answer is right.

  python scripts/grade.py --input=samples.jsonl --output=graded.jsonl

Input: JSON lines (plain or .gz), one candidate each, with `ground_truth_answer` and `answer`; a
line without `answer` has `text`, from which the script extracts the final answer.  Output: the same
lines with `answer`, `is_correct` (true, false, or null if undecided) and `verdict`: equal,
different, missing, or undecided with the reason.  A candidate that was cut off (`finished` is
false) or has no answer is missing: it is not correct, and rerank.py never chooses it.

--right writes the right candidates as `prompt` and `completion`, a step a line, on which train.py
trains a generator (configs/generator.py); they need `problem` and `steps`.

Worker processes judge each distinct pair of answers once, for --seconds at most, and --verdicts
keeps the verdicts for the next run.  docs/answers.md has the rules of the graders.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import collections
import dataclasses
import itertools
import json
import pathlib
from typing import IO, Annotated, Any

import msgspec

from prm_jax import config as config_lib
from prm_jax.evaluation.answers import extraction, grading
from prm_jax.runtime import command_line, json_lines, progress, storage

CHUNK = 16_384  # lines in memory at once
MISSING = "missing"


@dataclasses.dataclass(frozen=True)
class Args(config_lib.Checked):
  input: pathlib.Path  # candidates
  output: pathlib.Path  # the same with grades
  right: pathlib.Path | None = None  # file of the right candidates, to train a generator on
  grader: grading.Name = "math_verify"  # by value; openai and math: the rules of benchmarks
  extract: extraction.Rule = "auto"  # where the answer stands in `text`, if a line has no `answer`
  precision: Annotated[int, msgspec.Meta(ge=0, le=15)] = 6  # decimals that count, with math_verify
  seconds: config_lib.Positive = 5.0  # time limit of a pair, which is then undecided
  workers: config_lib.Whole = 0  # worker processes; 0: one per core
  verdicts: pathlib.Path = grading.CACHE  # file of known verdicts


class Candidate(msgspec.Struct):
  """The keys that are read from a line."""

  ground_truth_answer: json_lines.NotBlank
  answer: str | msgspec.UnsetType | None = msgspec.UNSET
  text: str | None = None
  finished: bool | None = None

  def __post_init__(self):
    if self.answer is msgspec.UNSET and self.text is None and self.finished is not False:
      raise ValueError('no "answer", and no "text" that may hold it')


class Solution(msgspec.Struct):
  """The further keys that --right reads from a line."""

  problem: json_lines.Text
  steps: Annotated[list[str], msgspec.Meta(min_length=1)]


def main() -> None:
  args = command_line.parse(Args, __doc__)
  if args.precision != Args.precision and args.grader != "math_verify":
    raise ValueError(f"--precision has no effect with --grader={args.grader}")
  storage.refuse_inputs([args.output, args.right], [args.input])
  grader = grading.Grader(args.grader, args.verdicts, args.seconds, args.workers, args.precision)
  with storage.written_together() as output, grader:
    right = args.right and output(args.right)
    counts = grade(args.input, output(args.output), grader, args.extract, right)
  total = sum(counts.values())
  for verdict, count in counts.most_common():
    print(f"{verdict:32}{count:10,}{100 * count / max(total, 1):8.1f} %")
  print(f"{total:,} candidates -> {args.output}")


def candidate(record: dict[str, Any], where: str) -> Candidate:
  """Returns the keys of a line; raises BadLine, also for a line that holds a problem's samples."""
  if isinstance(record.get("samples"), list) and not record.keys() & {"steps", "text"}:
    message = 'a problem with "samples"; grade.py takes one candidate a line'
    raise json_lines.BadLine(f"{where}: {message}")
  return json_lines.convert(record, Candidate, where)


def grade(
  path: pathlib.Path, out: IO, grader: grading.Grader, rule: extraction.Rule, right: IO | None
) -> collections.Counter:
  """Writes the graded lines of a file, and returns the number of candidates by verdict.

  Args:
    right: file that gets the right candidates, to train on.
  """
  counts, done = collections.Counter(), 0
  total = sum(1 for _ in json_lines.lines(path))
  with progress.Progress(desc="grading", total=total, unit="candidates") as bar:
    lines = json_lines.read(path)
    while chunk := list(itertools.islice(lines, CHUNK)):
      candidates = [candidate(record, f"{path}:{number}") for number, _, record in chunk]
      answers = [
        extraction.final_answer(x.text or "", rule) if x.answer is msgspec.UNSET else x.answer
        for x in candidates
      ]
      answered = [bool(answer and answer.strip()) for answer in answers]  # blank is no answer
      graded = [i for i, x in enumerate(candidates) if answered[i] and x.finished is not False]
      pairs = [(answers[i], candidates[i].ground_truth_answer) for i in graded]
      per_pair = len(chunk) / max(len({*pairs}), 1)  # candidates, for the progress bar
      reach = lambda decided, done=done, scale=per_pair: bar.reach(done + decided * scale)
      verdicts = dict(zip(graded, grader.verdicts(pairs, reach)))
      for i, (number, _, record) in enumerate(chunk):
        verdict = verdicts.get(i, MISSING)
        counts[verdict] += 1
        correct = None if verdict.startswith("undecided") else verdict == grading.EQUAL
        record |= {"answer": answers[i], "is_correct": correct, "verdict": verdict}
        out.write(json.dumps(record, ensure_ascii=False) + "\n")
        if right and correct:
          solution = json_lines.convert(record, Solution, f"{path}:{number}")
          # the prompt of generate.py --prompt=plain
          example = {"prompt": f"{solution.problem}\n", "completion": "\n".join(solution.steps)}
          right.write(json.dumps(example, ensure_ascii=False) + "\n")
      bar.reach(done := done + len(chunk))
  return counts


if __name__ == "__main__":
  exits.run(main)
