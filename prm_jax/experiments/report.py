"""Writes an experiment's results as JSON, and from the JSON alone its figure, tables and page."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from prm_jax.evaluation import page
from prm_jax.evaluation.figure_files import encoded
from prm_jax.experiments import figures, jobs
from prm_jax.experiments.results import Results, Table
from prm_jax.runtime import json_lines, storage

NOTES = (
  "Intervals: 95 % percentile bootstrap over seeds, and over problems within a seed, given the "
  "shared models; with few seeds they are somewhat too narrow where seeds differ much. Best-of-N "
  "is the exact expectation over draws of N samples; equal scores share the pick. The score of a "
  "process model is the product over steps of the probability that the step is not negative. The "
  "paper's models are language models on MATH: compare the order of the curves, not their height."
)


def gather(name: str, scale: str, directory: pathlib.Path, seeds: Sequence[int]) -> Results:
  """Reads the stored results of every seed."""
  folders = [directory / name / f"seed-{seed}" for seed in seeds]
  runs = sorted({path.stem for folder in folders for path in folder.glob("*.json")} - {"problems"})
  read = json_lines.document
  plan = read(directory / name / "plan.json")
  info = [read(folder / "problems.json") for folder in folders]
  results = [read(folder / f"{run}.json") for folder in folders for run in runs]
  return Results(name, scale, plan, [*seeds], info, results)


def write(results: Results, directory: pathlib.Path, vector: Sequence[str] = ()) -> list[str]:
  """Writes NAME.json, and NAME.png and NAME.html from it; returns the tables for the screen."""
  module = jobs.module(results.experiment)
  content = vars(results) | {"summary": module.summarise(results)}
  with storage.written(directory / f"{results.experiment}.json") as out:
    out.write(json.dumps(content) + "\n")
  return draw(directory / f"{results.experiment}.json", directory, results.experiment, vector)


def draw(
  path: pathlib.Path, directory: pathlib.Path, name: str, vector: Sequence[str] = ()
) -> list[str]:
  """Writes NAME.png and NAME.html of a results file; returns its tables for the screen.

  Args:
    vector: further formats in which the figure is written: "pdf", "svg".

  Raises:
    ValueError, OSError: the file has no results of that experiment, or cannot be read.
  """
  content = json_lines.document(path)
  if content.get("experiment") != name:
    raise ValueError(f"{path}: not the results of {name}, but {content.get('experiment')!r}")
  try:
    summary = content.pop("summary")
    results = Results(**content)
    module = jobs.module(name)
    figure = figures.draw(module.panels(results, summary))
    tables = module.tables(results, summary)
  except (KeyError, TypeError, IndexError, AttributeError) as error:
    raise ValueError(f"{path}: not the results of an experiment, or damaged: {error!r}") from error
  png = encoded(figure)
  with storage.written_together() as output:
    output(directory / f"{results.experiment}.png", "wb").write(png)
    output(directory / f"{results.experiment}.html").write(_page(module, results, tables, png))
    for kind in dict.fromkeys(vector):
      output(directory / f"{results.experiment}.{kind}", "wb").write(encoded(figure, kind))
  return [line for table in tables for line in [*table.lines(), ""]]


def _page(module: Any, results: Results, tables: Sequence[Table], png: bytes) -> str:
  files = [f"{name} {value}" for name, value in results.plan["files"].items() if value]
  data = f"data and models: {', '.join(files)}" if files else "the embedded domain"
  seeds = ", ".join(map(str, results.seeds))
  setup = f"Scale {results.scale}, {len(results.seeds)} seeds ({seeds}), {data}."
  texts = {"question": module.QUESTION, "paper": module.PAPER, "notes": NOTES}
  body = figures.with_tables(png, module.TITLE, tables, **texts)
  return page.render([], module.TITLE, setup, body)
