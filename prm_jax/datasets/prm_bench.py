"""PRMBench (Song et al. 2025, arXiv:2501.03124): 6,216 solutions with errors of eight classes.

github.com/ssmisya/PRMBench, Apache-2.0.
"""

from typing import Annotated

import msgspec

from prm_jax.datasets.benchmarks import Benchmark, Steps, url_infos
from prm_jax.runtime import json_lines

BASE_URL = (
  "https://raw.githubusercontent.com/ssmisya/PRMBench/a1ae4eab803e14c4c6316bf89d1679b0486faa8c/"
  "mr_eval/tasks/prmtest_classified/data/"
)


class Line(msgspec.Struct):
  """A line of PRMBench's files.  Keys that are not listed are ignored."""

  idx: str  # of the original solution: lines of several classes share it
  classification: json_lines.Text
  original_question: json_lines.Text
  modified_question: json_lines.Text
  original_process: Steps
  modified_process: Steps
  error_steps: list[Annotated[int, msgspec.Meta(ge=1)]]  # a few are beyond the last step


BENCHMARK = Benchmark(
  "prm_bench",
  BASE_URL,
  [url.removeprefix(BASE_URL) for url in url_infos() if url.startswith(BASE_URL)],
  Line,
  lambda folder: sorted(folder.glob("*.jsonl")),
  split="test",
)
