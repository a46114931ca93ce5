"""Runs an experiment over its seeds: shared models first, then each seed, in worker processes.

Every finished result is a file below the output directory, so a run that was killed resumes.
"""

import contextlib
import functools
import importlib
import multiprocessing
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import jax

from prm_jax.experiments import plan as plan_lib
from prm_jax.experiments.plan import Plan
from prm_jax.runtime import processes, progress

POLL = 1.0  # seconds between updates of the progress bar


def module(name: str):
  """Returns the module of an experiment.

  It has TITLE, QUESTION and PAPER; `runs`, which returns the functions that make the results of a
  seed, by the names of the results; and `panels` and `tables`, which take the results of all seeds.
  An experiment with data of its own has `study`, and one that tests on further domains `domains`,
  which takes the study of a seed and refuses wrong data before the plan is stored.
  """
  return importlib.import_module(f"prm_jax.experiments.{name}")


def run(name: str, plan: Plan, directory: pathlib.Path) -> None:
  """Makes every result of an experiment that is missing.

  Raises:
    ValueError: the directory has results of another plan (the message names the fields that
      differ), or there are several hosts.
  """
  if jax.process_count() > 1:
    raise ValueError("experiments run on one host; train a larger labeller with train.py")
  shares = not hasattr(module(name), "study")  # uses the bases and the labeller
  for each in ("shared", name) if shares else (name,):
    plan_lib.check(plan, directory / each)
  with _pool(plan.workers) as submit:
    if shares:
      with progress.waiting("preparing the models that all seeds share"):
        submit(shared_job, plan, directory).result()
    expected = [
      directory / name / f"seed-{seed}" / f"{each}.json"
      for seed in plan.seeds
      for each in module(name).runs(plan)
    ]
    with progress.Progress(desc=name, total=len(expected), unit="models") as bar:
      waiting = set()
      for seed in plan.seeds:
        waiting.add(submit(seed_job, name, plan, directory, seed))
        bar.reach(sum(path.is_file() for path in expected))
      while waiting:
        done, waiting = futures.wait(waiting, POLL, futures.FIRST_COMPLETED)
        for future in done:
          future.result()  # raises the job's error
        bar.reach(sum(path.is_file() for path in expected))


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Any]:
  """Yields `submit` of an executor: jobs run here, or in worker processes."""
  if not workers:
    yield _here
    return
  context = multiprocessing.get_context("spawn")
  cores, free = context.Queue(), processes.usable_cores()
  workers = min(workers, len(free))
  for core in free[:workers]:
    cores.put(core)
  with futures.ProcessPoolExecutor(workers, context, _begin, (cores,)) as pool:
    try:
      yield pool.submit
    except BaseException:
      for process in pool._processes.values():
        process.kill()
      raise


def _here(job: Callable[..., None], *args: Any) -> futures.Future:
  """Runs a job in this process; returns a finished future."""
  future = futures.Future()
  future.set_result(job(*args))
  return future


def _begin(cores) -> None:
  """Starts a worker process on one core, so that results do not depend on the number of workers."""
  processes.end_with_parent()
  jax.config.update("jax_platforms", "cpu")
  os.sched_setaffinity(0, {cores.get()})
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone handles Ctrl-C


@contextlib.contextmanager
def _job(directory: pathlib.Path, log: pathlib.Path) -> Iterator[None]:
  """Runs a job with the experiments' compilation cache; a worker process prints to `log`."""
  jax.config.update("jax_compilation_cache_dir", str(directory / "shared" / "compiled"))
  if multiprocessing.parent_process() is None:
    yield
    return
  log.parent.mkdir(parents=True, exist_ok=True)
  with (
    log.open("a", encoding="utf-8") as file,
    contextlib.redirect_stderr(file),
    contextlib.redirect_stdout(file),
  ):
    yield


def shared_job(plan: Plan, directory: pathlib.Path) -> None:
  """Trains the bases and the labeller if they are missing."""
  from prm_jax.experiments import shared

  with _job(directory, directory / "shared" / "log.txt"):
    shared.prepare(plan, directory)


def seed_job(name: str, plan: Plan, directory: pathlib.Path, seed: int) -> None:
  """Trains and judges every model of one seed that has no result yet."""
  from prm_jax.experiments import models, shared

  experiment, folder = module(name), directory / name / f"seed-{seed}"
  runs = experiment.runs(plan)
  if all((folder / f"{each}.json").is_file() for each in ("problems", *runs)):
    return
  with _job(directory, folder / "log.txt"):
    if hasattr(experiment, "study"):
      study = experiment.study(plan, folder, seed)
    else:
      study = shared.study(plan, directory, folder, seed)
    task = study.task  # if a file cannot be read, no plan is left behind
    if hasattr(experiment, "domains"):
      experiment.domains(study)  # likewise if a domain is refused
    plan_lib.keep(plan, directory / name)
    study.result("problems", lambda: models.problems_of(task))
    for each, make in runs.items():
      study.result(each, functools.partial(make, study, each))
