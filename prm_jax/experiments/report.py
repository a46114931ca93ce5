"""Writes an experiment's results as JSON, and from the JSON alone its figure, tables and page."""

import json
import pathlib
from collections.abc import Sequence

from prm_jax.experiments import figures, jobs
from prm_jax.experiments.results import Results
from prm_jax.runtime import json_lines, storage

NOTES = (
  "Intervals: 95 % percentile bootstrap over seeds, and over problems within a seed (once for all "
  "seeds if they share the test), given the shared models; with few seeds they are somewhat too "
  "narrow where seeds differ much. Best-of-N is the exact expectation over draws of N samples; "
  "equal scores share the pick. The score of a process model is the product over steps of the "
  "probability that the step is not negative. The paper's models are language models on MATH: "
  "compare the order of the curves, not their height."
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
  """Writes NAME.json, NAME.png and NAME.html; returns lines for the screen, as `draw` does."""
  return _draw(results, directory, vector, {".json": (json.dumps(vars(results)) + "\n").encode()})


def draw(
  path: pathlib.Path, directory: pathlib.Path, name: str, vector: Sequence[str] = ()
) -> list[str]:
  """Writes NAME.png and NAME.html of a results file.

  Args:
    vector: further formats in which the figure is written: "pdf", "svg".

  Returns:
    The tables as lines for the screen; the last line names the files.

  Raises:
    ValueError, OSError: the file has no results of that experiment, or cannot be read.
  """
  content = json_lines.document(path)
  if content.get("experiment") != name:
    raise ValueError(f"{path}: not the results of {name}, but {content.get('experiment')!r}")
  try:
    return _draw(Results(**content), directory, vector, {})
  except (LookupError, TypeError, ValueError, AttributeError) as error:
    raise ValueError(f"{path}: not the results of an experiment, or damaged: {error!r}") from error


def _draw(
  results: Results, directory: pathlib.Path, vector: Sequence[str], files: dict[str, bytes]
) -> list[str]:
  module = jobs.module(results.experiment)
  panels, tables = module.panels(results), module.tables(results)
  given = [f"{name} {value}" for name, value in results.plan["files"].items() if value]
  data = f"data and models: {', '.join(given)}" if given else "the embedded domain"
  seeds = ", ".join(map(str, results.seeds))
  files = files | figures.contents(
    panels,
    tables,
    title=module.TITLE,
    about=f"Scale {results.scale}, {len(results.seeds)} seeds ({seeds}), {data}.",
    alt=module.TITLE,
    question=module.QUESTION,
    paper=module.PAPER,
    notes=NOTES,
    vector=vector,
  )
  with storage.written_together() as output:
    for end, each in files.items():
      output(directory / f"{results.experiment}{end}", "wb").write(each)
  written = f"-> {directory / results.experiment}{', '.join(files)}"
  return [*(line for table in tables for line in [*table.lines(), ""]), written]
