"""A queue of solutions before one model, so that many requests share its batches.

One thread owns the model and one encodes.  All other state belongs to the event loop, without
locks.
"""

import asyncio
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np

from prm_jax.input_pipeline.token_tree import TokenTree
from prm_jax.scoring import batching
from prm_jax.scoring.rater import Rater, SolutionError

BATCH_TOKENS = 4 * batching.BATCH_TOKENS  # of solutions that are taken from the queue at a time
WAIT = 0.002  # seconds in which further solutions may join those that are taken
SLICE = 2**16  # characters that are encoded at a time, so that requests take turns
Solution = tuple[str, tuple[str, ...]]  # problem and steps


class ModelError(RuntimeError):
  """The model failed; the process's log says how."""


class Entry(NamedTuple):
  """A solution in the queue."""

  problem: str
  tree: TokenTree
  answer: asyncio.Future[np.ndarray]  # as of `Scorer.by_head`


class RequestQueue:
  """Scores the solutions of many requests; `run` has to be under way in the same event loop."""

  def __init__(self, scorer: Rater):
    self.scorer = scorer
    self._entries: asyncio.Queue[Entry] = asyncio.Queue()
    self._model = futures.ThreadPoolExecutor(1, "model")
    self._encoder = futures.ThreadPoolExecutor(1, "encoder")

  async def in_encoder(self, function: Callable, *args: Any) -> Any:
    """The function's result, from the encoder's thread: for what would hold up the event loop."""
    return await asyncio.get_running_loop().run_in_executor(self._encoder, function, *args)

  async def encode(
    self, solutions: Sequence[Solution], most: int = sys.maxsize
  ) -> list[TokenTree | SolutionError]:
    """The token tree of each solution, or why it cannot be scored.

    Args:
      most: characters of a solution.
    """
    trees: list[TokenTree | SolutionError] = []
    while len(trees) < len(solutions):
      trees += await self.in_encoder(self._encode, solutions, len(trees), most)
    return trees

  def _encode(
    self, solutions: Sequence[Solution], start: int, most: int
  ) -> list[TokenTree | SolutionError]:
    """The trees of the next solutions, until they have SLICE characters."""
    trees, characters = [], 0
    for i, (problem, steps) in enumerate(solutions[start:], start):
      count = len(problem) + sum(map(len, steps))
      if count > most:
        trees.append(SolutionError(i, f"a solution of {count:,} characters; at most {most:,}"))
        continue
      try:
        trees.append(self.scorer.encode(problem, steps))
      except ValueError as error:
        trees.append(SolutionError(i, str(error)))
      if (characters := characters + count) >= SLICE:
        break
    return trees

  async def read(self, trees: Sequence[TokenTree], problems: Sequence[str]) -> list[np.ndarray]:
    """Class probabilities at the reads of encoded solutions, as of `Scorer.by_head`.

    If the caller is cancelled, what is still in the queue is dropped.

    Raises:
      ModelError: the model failed, or its probabilities are not numbers.
    """
    new = asyncio.get_running_loop().create_future
    entries = [Entry(problem, tree, new()) for problem, tree in zip(problems, trees)]
    for entry in entries:
      self._entries.put_nowait(entry)
    try:
      return await asyncio.gather(*(entry.answer for entry in entries))
    finally:
      for entry in entries:
        entry.answer.cancel()  # those that have not been read when one has failed

  async def run(self) -> None:
    """Reads what is in the queue, batch by batch, until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
      batch = await self._next()
      try:
        found = await loop.run_in_executor(self._model, self._read, batch) if batch else []
      except Exception:
        traceback.print_exc(file=sys.stderr)
        found = [np.full(1, np.nan)] * len(batch)
      for entry, probabilities in zip(batch, found):
        if entry.answer.done():  # cancelled
          continue
        if np.isfinite(probabilities).all():
          entry.answer.set_result(probabilities)
        else:
          entry.answer.set_exception(ModelError("the model failed; the server's log says how"))

  async def _next(self) -> list[Entry]:
    """The oldest entries, until they have BATCH_TOKENS; waits for the first one."""
    batch, tokens = [await self._entries.get()], 0
    await asyncio.sleep(WAIT)
    tokens = len(batch[0].tree)
    while tokens < BATCH_TOKENS and not self._entries.empty():
      batch.append(self._entries.get_nowait())
      tokens += 0 if batch[-1].answer.done() else len(batch[-1].tree)
    return [entry for entry in batch if not entry.answer.done()]

  def _read(self, batch: Sequence[Entry]) -> list[np.ndarray]:
    trees, problems = [entry.tree for entry in batch], [entry.problem for entry in batch]
    return self.scorer.read(trees, problems)

  def warm_up(self) -> None:
    """Compiles the program of the smallest batch."""
    tree = self.scorer.encode("1 + 1 = ?", ["2"])
    self._model.submit(self._read, [Entry("", tree, None)]).result()

  def close(self) -> None:
    """Ends the threads, when they have done what they were given."""
    self._model.shutdown()
    self._encoder.shutdown()
