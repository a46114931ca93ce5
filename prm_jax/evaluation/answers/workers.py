"""Worker processes that judge pairs of answers, and that may hang, crash or run out of memory.

Each worker process has one job at a time.  The parent kills and replaces a worker that misses its
deadline, and the kernel limits a worker's memory and processor time.  Jobs and verdicts are lines
of JSON, so a worker that a hostile answer takes over can only give wrong verdicts.  An answer that
has hung twice is not tried again.
"""

import collections
import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

START_SECONDS = 120.0  # to import sympy on a busy machine
MEMORY_BYTES = 2 * 2**30  # of a worker's address space
MAX_JOBS = 5_000  # of a worker, which is then replaced: sympy's caches only grow
MAX_HUNG = 2  # jobs in which an answer may hang
STARTING = -1  # in place of the number of a job


@dataclasses.dataclass
class _Worker:
  process: subprocess.Popen
  deadline: float  # of the job, or of the start
  job: int | None = STARTING  # None: the worker is idle
  reading: str = ""  # the answer that it parses; "": it compares both
  done: int = 0
  buffer: bytes = b""


class Workers:
  """A pool of worker processes, which start with the first job and which `close` ends."""

  def __init__(self, count: int, seconds: float):
    self.count, self.seconds = count or len(os.sched_getaffinity(0)), seconds
    self.replaced = 0  # workers that were killed or died
    self._workers: list[_Worker] = []
    self._hung = collections.Counter()  # by answer, the jobs in which it hung
    self._selector = selectors.DefaultSelector()

  def close(self) -> None:
    for worker in self._workers:
      self._end(worker)
    self._workers = []
    self._selector.close()

  def run(self, jobs: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yields the number and the verdict of each job, in the order in which the jobs end.

    A job that exceeds a limit or crashes its worker is "undecided: time", "memory" or "crash".

    Raises:
      RuntimeError: a worker does not start.
    """
    waiting, open_jobs = collections.deque(range(len(jobs))), len(jobs)
    while len(self._workers) < min(self.count, len(jobs)):
      self._workers.append(self._start())
    while open_jobs:
      for worker in self._workers:
        while worker.job is None and waiting:
          number = waiting.popleft()
          if max(self._hung[jobs[number][key]] for key in "ab") < MAX_HUNG:
            self._give(worker, number, jobs[number])
          else:
            open_jobs -= 1
            yield number, "undecided: time"
      if not open_jobs:
        return
      timeout = min(worker.deadline for worker in self._workers) - time.monotonic()
      for key, _ in self._selector.select(max(timeout, 0)):
        for number, verdict in self._read(key.data):
          open_jobs -= 1
          yield number, verdict
      now = time.monotonic()
      for worker in [w for w in self._workers if now >= w.deadline]:
        if worker.job == STARTING:
          raise RuntimeError(f"a worker did not start in {START_SECONDS:.0f} s")
        a, b = jobs[worker.job]["a"], jobs[worker.job]["b"]
        self._hung[worker.reading or max(a, b, key=len)] += 1
        open_jobs -= 1
        yield worker.job, "undecided: time"
        self._replace(worker)

  def _give(self, worker: _Worker, number: int, job: dict[str, Any]) -> None:
    worker.job, worker.deadline = number, time.monotonic() + self.seconds
    with contextlib.suppress(BrokenPipeError):  # it has died: `_read` sees the end
      worker.process.stdin.write(json.dumps(job).encode() + b"\n")
      worker.process.stdin.flush()

  def _read(self, worker: _Worker) -> Iterator[tuple[int, str]]:
    data = os.read(worker.process.stdout.fileno(), 2**16)
    if not data:  # the worker has died
      if worker.job == STARTING:
        raise RuntimeError(f"a worker ended with {worker.process.wait()} before its first job")
      if worker.job is not None:
        reason = {-signal.SIGXCPU: "time", -signal.SIGKILL: "memory"}
        yield worker.job, f"undecided: {reason.get(worker.process.wait(), 'crash')}"
      self._replace(worker)
      return
    worker.buffer += data
    *lines, worker.buffer = worker.buffer.split(b"\n")
    for line in lines:
      kind, value = json.loads(line)
      if kind == "reads":
        worker.reading = value
        continue
      number, worker.job, worker.deadline = worker.job, None, float("inf")  # idle
      if kind == "verdict":
        worker.done += 1
        yield number, str(value)
        if worker.done >= MAX_JOBS or value == "undecided: memory":
          self._replace(worker, counted=False)

  def _start(self) -> _Worker:
    command = [sys.executable, "-m", "prm_jax.evaluation.answers.worker"]
    command += [str(MEMORY_BYTES), str(int(self.seconds) + 2)]
    process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      start_new_session=True,  # Ctrl-C reaches the parent only
    )
    worker = _Worker(process, time.monotonic() + START_SECONDS)
    self._selector.register(process.stdout, selectors.EVENT_READ, worker)
    return worker

  def _replace(self, worker: _Worker, counted: bool = True) -> None:
    self._end(worker)
    self.replaced += counted
    self._workers[self._workers.index(worker)] = self._start()

  def _end(self, worker: _Worker) -> None:
    self._selector.unregister(worker.process.stdout)
    with contextlib.suppress(ProcessLookupError):
      os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    with contextlib.suppress(BrokenPipeError):
      worker.process.stdin.close()
    worker.process.stdout.close()
