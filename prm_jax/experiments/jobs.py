"""An experiment over its seeds: shared models first, then each seed, in worker processes.

Whatever is finished is a file below the output directory, so a run that was killed goes on.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import importlib
import multiprocessing
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax

from prm_jax.experiments import plan as plan_lib
from prm_jax.experiments.plan import Plan
from prm_jax.runtime import progress

POLL = 1.0  # seconds between looks at what is finished


def module(name: str):
  """The module of an experiment.

  It has TITLE, QUESTION and PAPER; `runs` and `run`, which names and makes the results of a seed;
  `summarise`, `panels` and `tables`, of all of them; and `study`, if it has data of its own.
  """
  return importlib.import_module(f"prm_jax.experiments.{name}")


def run(name: str, plan: Plan, directory: pathlib.Path, workers: int) -> None:
  """Makes every result of an experiment that is not there yet.

  Args:
    workers: processes, each with one core; 0: this process, with all devices.

  Raises:
    ValueError: the directory has results of another plan, and which fields differ; or there are
      several hosts.
  """
  if jax.process_count() > 1:
    raise ValueError("experiments run on one host; train a larger labeller with train.py")
  for each in ("shared", name):
    plan_lib.check(plan, directory / each)
  jobs = [functools.partial(seed_job, name, plan, directory, seed) for seed in plan.seeds]
  with _pool(workers) as submit:
    with progress.waiting("preparing the models that all seeds share"):
      submit(functools.partial(shared_job, name, plan, directory)).result()
    expected = [
      directory / name / f"seed-{seed}" / f"{each}.json"
      for seed in plan.seeds
      for each in module(name).runs(plan)
    ]
    waiting = [submit(job) for job in jobs]
    with progress.Progress(desc=name, total=len(expected), unit="models") as bar:
      while waiting:
        for future in [each for each in waiting if each.done()]:
          waiting.remove(future)
          future.result()  # raises what went wrong there
          bar.reach(sum(path.is_file() for path in expected))
        bar.reach(sum(path.is_file() for path in expected))
        time.sleep(POLL if waiting else 0)


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Any]:
  """A function that runs a job and returns its future: here, or in one of the worker processes."""
  if not workers:
    yield _Here
    return
  context = multiprocessing.get_context("spawn")
  cores, free = context.Queue(), sorted(os.sched_getaffinity(0))
  workers = min(workers, len(free))
  for core in free[:workers]:
    cores.put(core)
  with concurrent.futures.ProcessPoolExecutor(workers, context, _begin, (cores,)) as pool:
    try:
      yield pool.submit
    except BaseException:
      for process in pool._processes.values():
        process.kill()
      raise


class _Here:
  """A job that runs in this process when its result is asked for; trainings show their own bars."""

  def __init__(self, job):
    self.result = job

  def done(self) -> bool:
    return True


def _begin(cores) -> None:
  """Begins a worker: one core, so that results do not depend on how many there are; and it ends
  with its parent, and silently."""
  ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
  jax.config.update("jax_platforms", "cpu")
  os.sched_setaffinity(0, {cores.get()})
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's


@contextlib.contextmanager
def _job(directory: pathlib.Path, log: pathlib.Path) -> Iterator[None]:
  """Where a job runs: programs compiled once are found again; a worker prints to `log`."""
  jax.config.update("jax_compilation_cache_dir", str(directory / "shared" / "compiled"))
  if multiprocessing.parent_process() is None:
    yield
    return
  log.parent.mkdir(parents=True, exist_ok=True)
  with contextlib.ExitStack() as stack:
    file = stack.enter_context(log.open("a", encoding="utf-8"))
    stack.enter_context(contextlib.redirect_stderr(file))
    stack.enter_context(contextlib.redirect_stdout(file))
    yield


def shared_job(name: str, plan: Plan, directory: pathlib.Path) -> None:
  """Trains the base and the labeller, if they are needed and not there."""
  from prm_jax.experiments import shared

  if not hasattr(module(name), "study"):
    with _job(directory, directory / "shared" / "log.txt"):
      shared.prepare(plan, directory)


def seed_job(name: str, plan: Plan, directory: pathlib.Path, seed: int) -> None:
  """Trains and judges every model of one seed that has no result yet."""
  from prm_jax.experiments import shared
  from prm_jax.experiments.workspace import Workspace

  of, space = module(name), Workspace(directory / name / f"seed-{seed}", {}, seed)
  if all((space.directory / f"{each}.json").is_file() for each in ["problems", *of.runs(plan)]):
    return
  with _job(directory, space.directory / "log.txt"):
    own = getattr(of, "study", None)
    study = own(plan, space) if own else shared.study(space, plan, directory)
    plan_lib.keep(plan, directory / name)
    space.result("problems", study.problems)
    of.run(study)
