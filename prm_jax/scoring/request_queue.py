"""A queue of solutions in front of one model, so that many requests share its batches.

One thread runs the model and one encodes.  All state belongs to the event loop, so there are no
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
from prm_jax.scoring.rater import UNDEFINED, Rater, Solution, SolutionError, undefined

BATCH_TOKENS = 4 * batching.BATCH_TOKENS  # a batch accepts solutions until it has so many
WAIT = 0.002  # seconds in which more solutions may join a batch
SLICE = 2**16  # characters that are encoded at a time, so that requests take turns


class Refused(Exception):
  """A request is refused: the client gets a status, 500 if the model failed, and a message."""

  def __init__(self, status: int, message: str):
    super().__init__(message)
    self.status = status


class Entry(NamedTuple):
  """A solution in the queue."""

  problem: str
  tree: TokenTree
  answer: asyncio.Future[np.ndarray]  # class probabilities, as from `Rater.by_head`


class RequestQueue:
  """Scores the solutions of many requests, while `run` is running in the same event loop."""

  def __init__(self, scorer: Rater):
    self.scorer = scorer
    self._entries: asyncio.Queue[Entry] = asyncio.Queue()
    self._model = futures.ThreadPoolExecutor(1, "model")
    self._encoder = futures.ThreadPoolExecutor(1, "encoder")

  async def in_encoder(self, function: Callable, *args: Any) -> Any:
    """Runs a function that would block the event loop, in the encoder's thread."""
    return await asyncio.get_running_loop().run_in_executor(self._encoder, function, *args)

  async def encode(
    self,
    solutions: Sequence[Solution],
    most: int = sys.maxsize,
    on_tokens: Callable[[int], None] = lambda count: None,
  ) -> list[TokenTree | SolutionError]:
    """Returns the token tree of each solution, or the reason why it cannot be scored.

    Args:
      most: limit of characters; a longer solution is refused.
      on_tokens: called after each part of the work with that part's number of tokens; it may raise
        to stop.
    """
    trees: list[TokenTree | SolutionError] = []
    while len(trees) < len(solutions):
      made = await self.in_encoder(self._encode, solutions, len(trees), most)
      on_tokens(sum(len(tree) for tree in made if not isinstance(tree, SolutionError)))
      trees += made
    return trees

  def _encode(
    self, solutions: Sequence[Solution], start: int, most: int
  ) -> list[TokenTree | SolutionError]:
    """Encodes the solutions from `start` on, until they have SLICE characters."""
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
    """Returns the class probabilities of encoded solutions, as `Rater.by_head` does.

    If the caller is cancelled, its solutions that are still in the queue are dropped.

    Raises:
      Refused: the model failed, or its probabilities are not finite.
    """
    loop = asyncio.get_running_loop()
    entries = [Entry(problem, tree, loop.create_future()) for problem, tree in zip(problems, trees)]
    for entry in entries:
      self._entries.put_nowait(entry)
    try:
      return await asyncio.gather(*(entry.answer for entry in entries))
    finally:
      for entry in entries:
        entry.answer.cancel()  # those still open, if one has failed or the caller is cancelled

  async def run(self) -> None:
    """Scores the solutions in the queue, batch by batch, until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
      batch = await self._next()
      try:
        results = await loop.run_in_executor(self._model, self._read, batch) if batch else []
        if bad := undefined(results):
          print(f"{UNDEFINED} for {len(bad)} of {len(batch)} solutions", file=sys.stderr)
      except Exception:
        traceback.print_exc(file=sys.stderr)
        results = [np.full(1, np.nan)] * len(batch)
      for entry, probabilities in zip(batch, results):
        if entry.answer.done():  # cancelled
          continue
        if np.isfinite(probabilities).all():
          entry.answer.set_result(probabilities)
        else:
          failure = Refused(500, "the model failed; the server's log says how")
          entry.answer.set_exception(failure)

  async def _next(self) -> list[Entry]:
    """Takes the oldest entries, until they have BATCH_TOKENS; waits for the first one."""
    batch = [await self._entries.get()]
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
    """Ends the threads when they have finished their work."""
    self._model.shutdown()
    self._encoder.shutdown()
