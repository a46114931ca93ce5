"""Worker processes that judge pairs of answers, and that may hang, crash or run out of memory.

Each worker process has one job at a time, which a thread of the parent waits for.  The parent kills
a worker that misses its deadline, and the kernel limits a worker's memory and processor time.  Jobs
and verdicts are lines of JSON, so a worker that a hostile answer takes over can only give wrong
verdicts, or none.  An answer that has hung twice is not tried again.
"""

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

from prm_jax.runtime import processes

START_SECONDS = 120.0  # to import sympy on a busy machine
MEMORY_BYTES = 2 * 2**30  # of a worker's address space
MAX_JOBS = 5_000  # of a worker, which is then replaced: sympy's caches only grow
MAX_LINE = 2**16  # characters that a worker writes for a verdict or an answer being parsed
MAX_HUNG = 2  # jobs in which an answer may hang


class _Worker:
  """A worker process; RuntimeError if it does not start."""

  def __init__(self, seconds: float):
    command = [sys.executable, "-m", "prm_jax.evaluation.answers.worker"]
    command += [str(MEMORY_BYTES), str(int(seconds) + 2)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    # In a session of its own, so that Ctrl-C reaches the parent only.
    self.process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    self.jobs = 0
    self.late = False  # it was killed, because it missed a deadline
    with self._deadline(START_SECONDS):
      if not self.process.stdout.readline():
        code = self.process.wait()
        if self.late:
          raise RuntimeError(f"a worker did not start in {START_SECONDS:.0f} s")
        raise RuntimeError(f"a worker ended with {code} before its first job")

  @contextlib.contextmanager
  def _deadline(self, seconds: float) -> Iterator[None]:
    """Kills the worker if the block takes longer."""
    timer = threading.Timer(seconds, self.kill, kwargs={"late": True})
    timer.start()
    try:
      yield
    finally:
      timer.cancel()

  def kill(self, late: bool = False) -> None:
    self.late |= late
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)

  def judge(self, job: dict[str, Any], seconds: float) -> tuple[str, str]:
    """Returns the verdict of a job, and the answer being parsed; "" once both are parsed."""
    self.jobs += 1
    reading = ""
    with self._deadline(seconds):
      with contextlib.suppress(BrokenPipeError):  # the worker has died, so its output ends
        print(json.dumps(job), file=self.process.stdin, flush=True)
      try:
        while line := self.process.stdout.readline(MAX_LINE):
          kind, value = json.loads(line)
          if kind == "verdict":
            return str(value), reading
          reading = str(value)
      except (RecursionError, TypeError, ValueError):  # killed while it wrote, or no verdict
        self.kill()
      code = self.process.wait()
    reason = {-signal.SIGXCPU: "time", -signal.SIGKILL: "time" if self.late else "memory"}
    return f"undecided: {reason.get(code, 'crash')}", reading

  def end(self) -> None:
    with contextlib.suppress(BrokenPipeError), self.process:
      self.kill()


class Workers:
  """A pool of worker processes, which start when there are jobs and which `close` ends."""

  def __init__(self, count: int, seconds: float):
    self.count, self.seconds = count or len(processes.usable_cores()), seconds
    self.replaced = 0  # workers that were killed or died
    self._workers: list[_Worker] = []  # without a job
    self._busy: set[_Worker] = set()
    self._hung = collections.Counter()  # by answer, the jobs in which it hung
    self._lock = threading.Lock()

  def close(self) -> None:
    while self._workers:
      self._workers.pop().end()

  def run(self, jobs: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yields the number and the verdict of each job, in the order in which the jobs end.

    A job that exceeds a limit or crashes its worker is "undecided: time", "memory" or "crash".

    Raises:
      RuntimeError: a worker does not start.
    """
    threads = futures.ThreadPoolExecutor(self.count)
    try:
      numbers = {threads.submit(self._verdict, job): i for i, job in enumerate(jobs)}
      for done in futures.as_completed(numbers):
        yield numbers[done], done.result()
    finally:
      threads.shutdown(wait=False, cancel_futures=True)
      for worker in [*self._busy]:  # none, unless the caller has stopped
        worker.kill()
      threads.shutdown()

  def _verdict(self, job: dict[str, Any]) -> str:
    a, b = job["a"], job["b"]
    with self._lock:
      if max(self._hung[a], self._hung[b]) >= MAX_HUNG:
        return "undecided: time"
      worker = self._workers.pop() if self._workers else None
    worker = worker or _Worker(self.seconds)
    self._busy.add(worker)
    verdict, reading = worker.judge(job, self.seconds)
    self._busy.discard(worker)
    died = worker.late or worker.process.poll() is not None
    with self._lock:
      self.replaced += died
      if worker.late:
        self._hung[reading or max(a, b, key=len)] += 1
      elif not died and worker.jobs < MAX_JOBS and verdict != "undecided: memory":
        self._workers.append(worker)
        return verdict
    worker.end()
    return verdict
