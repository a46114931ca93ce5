"""Problems to a file of candidate solutions, problem by problem, resumable after any kill.

Problems that are done stand in a journal beside the output, `OUTPUT.journal`, one line each with
all of its samples.  A kill can tear the last line only; the next run drops it, samples what is
missing, and at the end writes the output in the order of the input.  Journals are deleted last: an
output without one is finished, and is not sampled again.  Several hosts share the problems, each
with its own journal, on a disk that all of them see.
"""

import contextlib
import dataclasses
import fcntl
import glob
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from prm_jax.evaluation.answers import extraction
from prm_jax.generation import prompts as prompts_lib
from prm_jax.generation.engines import Completion, Engine, Limits, Prompt, derived_seed
from prm_jax.generation.sampling import Sampling
from prm_jax.generation.search import Found, Search
from prm_jax.runtime import json_lines, progress, storage
from prm_jax.scoring import candidates
from prm_jax.types import StepContract


@dataclasses.dataclass(frozen=True)
class Settings:
  """What decides the samples of a problem, beside the model."""

  n: int
  sampling: Sampling
  limits: Limits
  seed: int
  form: prompts_lib.Form
  steps: prompts_lib.Steps


@dataclasses.dataclass(frozen=True)
class Problem:
  number: int  # in the file, from 0
  record: dict[str, Any]  # the line: its keys go to each sample
  text: str


class Line(msgspec.Struct):
  """The key of a line that is read."""

  problem: json_lines.Text


def read(path: pathlib.Path) -> list[Problem]:
  """The problems of a file; BadLine if a line has no `problem`."""
  return [
    Problem(i, record, json_lines.convert(record, Line, where).problem)
    for i, (where, record) in enumerate(json_lines.records(path))
  ]


def record(problem: Problem, found: Completion, s: Settings) -> dict[str, Any]:
  """A line of the output: the problem's keys, and the sample in the form of scored samples.

  A sample that was cut off has no answer: it is missing, not wrong.  A problem's own `answer`, as
  MATH has it, becomes `ground_truth_answer`; other keys of a sample replace the problem's.
  """
  text = prompts_lib.solution(found.text, s.form)
  finished = found.end == "stop"
  given = {key: value for key, value in problem.record.items() if key != "logprob"}
  if "answer" in given:
    given = {"ground_truth_answer": given["answer"]} | given
  out = given | {
    "text": text,
    "steps": prompts_lib.split(text, s.steps) or [" "],
    "answer": extraction.final_answer(text) if finished else None,
    "tokens": found.token_count,
    "finished": finished,
    "sample": found.sample,
  }
  return out | ({"logprob": sum(found.log_probs)} if found.log_probs is not None else {})


class Journal:
  """The problems that are done, in a file that survives a kill."""

  def __init__(self, path: pathlib.Path, facts: dict[str, Any]):
    """Opens the journal; `facts` are those of the run that it belongs to.

    Raises:
      ValueError: it belongs to another run, and which facts differ; or another process has it open.
    """
    with contextlib.ExitStack() as stack:
      self._file = stack.enter_context(path.open("ab"))
      try:
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        raise ValueError(f"{path}: another process is sampling for this output") from None
      except OSError:  # some network file systems have no locks
        pass
      self.done, whole = _read(path, facts)
      self._file.truncate(whole)
      if not whole:
        self._write(facts)
      stack.pop_all()

  def add(self, number: int, samples: list[dict[str, Any]]) -> None:
    self._write({"problem": number, "samples": samples})
    self.done[number] = samples

  def _write(self, entry: dict[str, Any]) -> None:
    self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
    self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    self._file.close()


def _read(path: pathlib.Path, facts: dict[str, Any]) -> tuple[dict[int, list[dict]], int]:
  """The samples of each problem in a journal, and the length of what is whole in it.

  Raises:
    ValueError: it belongs to another run, and which facts differ.
  """
  facts, done, whole = json.loads(json.dumps(facts)), {}, 0
  for line in path.read_bytes().splitlines(keepends=True):
    if not line.endswith(b"\n"):
      break  # torn by a kill
    # A sample has its problem's keys, two levels deeper than in the input.
    entry = json_lines.parse(line, f"{path}", json_lines.MAX_DEPTH + 2)
    if not whole and entry != facts:
      changed = [
        f"{key}: {json_lines.show(entry.get(key))}, now {json_lines.show(facts.get(key))}"
        for key in facts | entry
        if entry.get(key) != facts.get(key)
      ]
      raise ValueError(
        f"{path} holds samples of another run ({'; '.join(changed)}); finish that one with its own "
        "settings, or delete the file"
      )
    if whole:
      done[entry["problem"]] = entry["samples"]
    whole += len(line)
  return done, whole


def generate(
  problems: Sequence[Problem],
  engine: Engine,
  make: Callable[[str, int], Prompt],
  s: Settings,
  journal: Journal,
) -> None:
  """Samples the problems that are not in the journal yet, and shows how it goes."""
  left = [problem for problem in problems if problem.number not in journal.done]
  asked = [make(each.text, derived_seed(s.seed, each.number)) for each in left]
  found: dict[int, dict[int, dict]] = {}
  tokens = ended = count = 0
  total, done = len(problems) * s.n, (len(problems) - len(left)) * s.n
  with progress.Progress(desc="sampling", total=total, initial=done, unit="samples") as bar:
    for completion in engine.generate(asked, s.n, s.sampling, s.limits):
      problem = left[completion.prompt]
      of = found.setdefault(problem.number, {})
      of[completion.sample] = record(problem, completion, s)
      if len(of) == s.n:
        journal.add(problem.number, [of[k] for k in sorted(found.pop(problem.number))])
      count, tokens = count + 1, tokens + completion.token_count
      ended += completion.end == "stop"
      rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
      bar.set_postfix_str(f"{rate:.0f} tokens/s, {100 * ended / count:.0f} % ended", refresh=False)
      bar.update()


def search(
  problems: Sequence[Problem],
  engine: Search,
  make: Callable[[str, int], Prompt],
  s: Settings,
  journal: Journal,
) -> None:
  """As `generate`, by search; samples have the scores of their steps besides."""
  left = [problem for problem in problems if problem.number not in journal.done]
  asked = [make(each.text, derived_seed(s.seed, each.number)) for each in left]
  generated, total, done = 0, len(problems), len(problems) - len(left)
  with progress.Progress(desc="searching", total=total, initial=done, unit="problems") as bar:
    for found in engine.run(asked):
      problem = left[found.prompt]
      journal.add(problem.number, searched(problem, found, s, engine.scorer.scorer.contract))
      generated += found.spent["generated"]
      rate = generated / max(bar.format_dict["elapsed"], 1e-9)
      bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
      bar.update()


def searched(
  problem: Problem, found: Found, s: Settings, contract: StepContract
) -> list[dict[str, Any]]:
  """The lines of a problem: as `record`, with `candidates.scored`'s keys and what the search spent.

  `search_score` is what the rule chose by; the tokens in `spent` are those of the whole problem.
  """
  lines = []
  for k, lane in enumerate(found.lanes):
    count = len(lane.tokens)
    completion = Completion(found.prompt, k, lane.text, lane.end, lane.tokens, None, count)
    line = record(problem, completion, s) | {"logprob": lane.log_prob}
    line = candidates.scored(line, lane.steps, np.array(lane.probabilities), contract)
    lines.append(line | {"search_score": lane.score, "spent": found.spent})
  return lines


def journal_path(output: pathlib.Path, host: int) -> pathlib.Path:
  return output.with_name(f"{output.name}.journal" + (f".{host}" if host else ""))


def check_output(output: pathlib.Path) -> None:
  """Makes the folder of the output.

  Raises:
    OSError: it cannot be written to, or the output is finished.
  """
  output.parent.mkdir(parents=True, exist_ok=True)
  if not os.access(output.parent, os.W_OK):
    raise PermissionError(f"{output.parent}: cannot be written to")
  if output.exists() and not _journals(output):
    raise FileExistsError(f"{output} is there; delete it to sample again")


def check_journals(output: pathlib.Path, facts: dict[str, Any]) -> None:
  """ValueError if there is a journal of another run, of any host."""
  for path in _journals(output):
    _read(path, facts)


def check_shared(output: pathlib.Path, hosts: int) -> None:
  """OSError if the journal of a host is not there."""
  for host in range(hosts):
    if not (path := journal_path(output, host)).is_file():
      raise FileNotFoundError(
        f"{path}: the journal of host {host} is not on this host's disk; hosts that share the "
        "problems need a disk that all of them see"
      )


def _journals(output: pathlib.Path) -> list[pathlib.Path]:
  return [*output.parent.glob(glob.escape(journal_path(output, 0).name) + "*")]


def write(output: pathlib.Path, problems: Sequence[Problem], hosts: int, facts: dict) -> list[dict]:
  """Writes the samples of all journals in the order of the problems, and deletes the journals."""
  check_shared(output, hosts)
  done, paths = {}, [journal_path(output, host) for host in range(hosts)]
  for path in paths:
    done |= _read(path, facts)[0]
  lines = [sample for problem in problems for sample in done[problem.number]]
  with storage.written(output) as out:
    out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
  for path in paths:
    path.unlink()
  return lines


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
  """What was sampled, for the screen."""
  spent = [line["spent"] for line in lines if line["sample"] == 0 and "spent" in line]
  sum_of = lambda name: sum(each[name] for each in spent)
  finished = sum(line["finished"] for line in lines)
  answered = sum(line["answer"] is not None for line in lines)
  share = lambda count: f"{100 * count / max(len(lines), 1):.1f} %"
  tokens = sum(line["tokens"] for line in lines)
  return [
    f"{len(lines):,} samples, {tokens:,} tokens",
    f"{share(finished)} ended, {share(len(lines) - finished)} were cut off",
    f"{share(answered)} have an answer",
    *(
      f"{verb} {sum_of(name):,} tokens; {sum_of(start):,} with each prefix read again"
      for verb, name, start in (
        ("the language model read", "read", "read_from_start"),
        ("the reward model read", "scored", "scored_from_start"),
      )
      if spent
    ),
  ]
