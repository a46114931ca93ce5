"""The fastest way to run an experiment on a slice, among those that fit.

Rows of a batch, microbatches, what the backward pass recomputes and the mesh are tried in the order
of what arithmetic promises.  Each compilation corrects the arithmetic, and the search ends when
nothing that is left promises more than what was found.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.tpu import compile, cost_model
from prm_jax.tpu.compile import Job
from prm_jax.training.step import TrainState

# What is kept of a layer, from least to most; each spares about as much work for its bytes.
KEPT = (("attention",), ("query", "key", "value"), ("output",), ("gate",), ("up",))
SLACK = 1.0  # GiB beside state and activations, until a compilation says how much


@dataclasses.dataclass(frozen=True)
class Candidate:
  job: Job
  tokens_per_second: float  # by arithmetic alone
  gib: float  # of a chip: state and what is kept of layers


def candidates(job: Job) -> list[Candidate]:
  """All that make sense, the most promising first."""
  saved = [tuple(itertools.chain(*KEPT[:n])) for n in range(len(KEPT) + 1)]
  out = []
  for split in (1, 2, 4, 8):
    asked = job.config
    asked = dataclasses.replace(
      asked,
      mesh=dataclasses.replace(asked.mesh, fsdp=-1, tensor=split),
      model=dataclasses.replace(asked.model, remat="full"),
    )
    try:
      c, state = compile.described(dataclasses.replace(job, config=asked))
    except ValueError:  # the chips make no such mesh
      continue
    if c.model.heads % split:
      continue
    rows = [c.train.batch_rows * times // 2 for times in (1, 2, 4, 8)]
    for names, batch, passes in itertools.product(saved, rows, (1, 2, 4)):
      mesh = state.step.sharding.mesh.shape
      if not batch or batch % (mesh["data"] * mesh["fsdp"] * passes):
        continue
      steps = max(c.train.steps * c.train.batch_rows // batch, 1)  # over as much data
      changes = {
        "model": {"saved": names},
        "train": {"batch_rows": batch, "microbatches": passes, "steps": steps},
      }
      now = Job(_changed(asked, changes), job.topology, job.step, job.slices)
      speed, gib = promised(_changed(c, changes), state, job.chip())
      out.append(Candidate(now, speed, gib))
  return sorted(out, key=lambda each: -each.tokens_per_second)


def _changed(c: config_lib.Experiment, changes: dict[str, dict[str, Any]]) -> config_lib.Experiment:
  sections = {k: dataclasses.replace(getattr(c, k), **v) for k, v in changes.items()}
  return dataclasses.replace(c, **sections)


def promised(
  c: config_lib.Experiment, state: TrainState, chip: cost_model.Chip
) -> tuple[float, float]:
  """Tokens a second, and GiB of a chip that state and activations take, by arithmetic."""
  mesh, rows = state.step.sharding.mesh, c.train.batch_rows
  sizes = dict(mesh.shape)
  flops = cost_model.step_flops(c, rows, state.params)
  seconds = cost_model.seconds(c, chip, mesh.size, sizes, flops, None)["seconds_per_step"]
  kept = cost_model.kept_bytes(c, sizes)
  kept = kept["residual"] + sum(kept[name] for name in c.model.saved)
  gib = (sharding_lib.bytes_of_a_device(state) + kept) / 2**30
  return rows * c.data.row_length / seconds, gib


def run(
  job: Job, work: pathlib.Path, most: int, say: Callable[[str], None] = lambda _: None
) -> list[dict]:
  """Compiles the most promising until nothing left promises more, or `most` are compiled.

  Returns:
    Their reports (`ahead_of_time.report`), the fastest that fits first.

  Raises:
    ValueError: no candidate could be run on the slice at all.
    RuntimeError: the compiler failed on each.
  """
  left = candidates(job)
  if not left:
    raise ValueError(
      f"--topology={job.topology}: {job.config.train.batch_rows} rows, half, two and four times as "
      "many cannot be split over its chips; set --config.train.batch_rows"
    )
  memory, slack, ratio = job.chip().memory, SLACK, 1.0
  done, failed = [], []
  while left and len(done) + len(failed) < most:
    best = max((speed(each) for each in done), default=0.0)
    fitting = [each for each in left if each.gib + slack <= memory]
    if not fitting or fitting[0].tokens_per_second * ratio <= best:
      break
    now = fitting[0]
    left.remove(now)
    try:
      found = compile.report(now.job, compile.compiled(now.job, work))
    except RuntimeError as error:  # a compiler that aborts is no reason to lose the others
      failed.append(error)
      say(str(error))
      continue
    done.append(found)
    slack = max(slack, found["gib_per_chip"]["needed"] - now.gib)
    if found["fits"]:
      ratio = speed(found) / now.tokens_per_second
    say(row(found))
  if not done:
    raise failed[0]
  return sorted(done, key=lambda each: -speed(each))


def speed(found: dict) -> float:
  """Estimated tokens a second; 0 of what does not fit."""
  return found["estimate"]["tokens_per_second"] if found["fits"] else 0.0


def row(found: dict) -> str:
  """A report as a line."""
  what = " ".join(found["saved"]) or "nothing"
  mesh = "x".join(str(size) for size in found["mesh"].values())
  fits = "does not fit"
  if found["fits"]:
    guess = found["estimate"]
    fits = f"{guess['tokens_per_second']:,.0f} tokens/s, {guess['mfu']:.1%} of the peak"
  return (
    f"{found['rows']} rows in {found['microbatches']}, mesh {mesh}, saved {what}: "
    f"{found['gib_per_chip']['needed']:.2f} GiB, {fits}"
  )
