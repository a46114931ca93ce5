"""Damaged files of every kind that the project reads end in a clear error, or are read rightly."""

import collections
import itertools
import multiprocessing
import os
import pathlib
import time
from multiprocessing import connection

import fuzzing
import pytest

INPUTS = int(os.environ.get("PRM_JAX_FUZZ", "20000"))
DEADLINE = 60.0  # seconds of an input
MEMORY = 4e9  # bytes of a process
WORKERS = 2


class Worker:
  """A process that attempts one input after another."""

  def __init__(self, base, folder):
    self.folder, spawn = folder, multiprocessing.get_context("spawn")
    self.folder.mkdir()
    self.pipe, theirs = spawn.Pipe()
    arguments = (theirs, str(folder), str(base))
    self.process = spawn.Process(target=fuzzing.worker, args=arguments, daemon=True)
    self.process.start()
    theirs.close()
    self.pipe.recv()  # all imports are done

  def begin(self, jobs) -> bool:
    """Gives the process its next job; returns whether there is one."""
    self.job, self.began = next(jobs, None), time.monotonic()
    self.pipe.send(self.job)
    return self.job is not None

  def memory(self) -> int:
    """The most bytes of memory that the process has used; 0 if it is dead."""
    status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
    return 1000 * int(status.split("VmHWM:")[1].split()[0]) if "VmHWM" in status else 0

  def answer(self, seconds):
    """The verdict on the job and its reason: "failed" if the process hangs or is dead."""
    try:
      return self.pipe.recv() if self.pipe.poll() else ("failed", f"the process took {seconds} s")
    except EOFError:
      return "failed", "the process died"

  def kill(self):
    self.process.kill()
    self.process.join()


@pytest.mark.parametrize("inputs", [200, pytest.param(INPUTS, marks=pytest.mark.slow)])
def test_damaged_input_is_refused_or_read_rightly(prm_run, tmp_path, inputs):
  """Damaged input gives an error that names the file, or is read as an independent reader does.

  No input raises another exception, takes over 60 s or over 4 GB, or kills its process.

    PRM_JAX_FUZZ=20000 bash scripts/test.sh -m slow -k fuzz -s
  """
  base = tmp_path / "base"
  base.mkdir()
  fuzzing.prepare(base, prm_run)
  jobs = [
    (kind, seed)
    for kind, (_, share) in fuzzing.TARGETS.items()
    for seed in range(max(int(inputs * share), 1))
  ]
  counts = {kind: collections.Counter() for kind in fuzzing.TARGETS}
  slowest, failures, most, numbers = collections.Counter(), [], 0, itertools.count()
  waiting = iter(jobs)
  start = lambda: Worker(base, tmp_path / f"worker{next(numbers)}")
  busy = [worker for worker in (start() for _ in range(WORKERS)) if worker.begin(waiting)]
  while busy:
    connection.wait([worker.pipe for worker in busy], timeout=1)
    for worker in list(busy):
      kind, seed = worker.job
      seconds = time.monotonic() - worker.began
      if not worker.pipe.poll() and seconds < DEADLINE:
        continue
      most, (verdict, why) = max(most, worker.memory()), worker.answer(seconds)
      counts[kind][verdict] += 1
      slowest[kind] = max(slowest[kind], seconds)
      busy.remove(worker)
      if verdict == "failed":
        failures.append((kind, seed, why))
        print(f"{kind} {seed}: {why}")
      if why.startswith("the process"):
        worker.kill()
        worker = start()
      busy += [worker] if worker.begin(waiting) else []
  print(f"\n{'kind':18}{'inputs':>8}{'refused':>9}{'accepted':>10}{'failed':>8}{'slowest, s':>12}")
  for kind, count in counts.items():
    figures = (count.total(), count["refused"], count["accepted"], count["failed"])
    print(
      f"{kind:18}{figures[0]:8}{figures[1]:9}{figures[2]:10}{figures[3]:8}{slowest[kind]:12.1f}"
    )
  print(f"largest process: {most / 1e9:.2f} GB")
  assert not failures, failures[:5]
  assert inputs < 1000 or all(count["accepted"] and count["refused"] for count in counts.values())
  assert most < MEMORY
