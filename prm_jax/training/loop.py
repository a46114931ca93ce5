"""The training loop: `open_run` prepares a run, `train` makes its updates."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from typing import Any

import jax
import numpy as np

from prm_jax import config as config_lib
from prm_jax import step_metrics
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import distributed, json_lines, preemption, storage, workdir_lock
from prm_jax.training import checkpoint as checkpoint_lib
from prm_jax.training import initialization
from prm_jax.training import programs as programs_lib
from prm_jax.training import step as step_lib
from prm_jax.training.goodput import Goodput
from prm_jax.training.metric_log import Log, UpdateMetrics
from prm_jax.training.rows import Rows, eval_batches, read_rows, train_batches
from prm_jax.types import Batch

PROFILED = 3  # updates of a profiler trace


def run(c: config_lib.Experiment, workdir: str | storage.Path) -> dict[str, Any]:
  """Trains to `c.train.steps`, resuming from the newest checkpoint of `workdir` if it has one.

  Returns:
    The metrics of the last evaluation.

  Raises:
    ValueError: the work directory belongs to another run or is in use, none of its checkpoints can
      be read, or the loss is not finite.
    OSError: a file cannot be read or written.
    preemption.Preempted: SIGTERM came during training; the state is saved.
  """
  with contextlib.ExitStack() as stack:
    lock = stack.enter_context(workdir_lock.WorkdirLock(storage.absolute(workdir)))
    opened, state = open_run(c, lock, stack)
    return train(opened, state)


@dataclasses.dataclass(frozen=True)
class Due:
  """What is to be done after an update."""

  log: bool
  evaluate: bool
  save: bool
  preempted: bool  # stop before the last update

  @classmethod
  def after(cls, step: int, c: config_lib.Train, told_to_stop: bool) -> Due:
    """What is due after `step` updates.

    The last update is always evaluated and saved.  A preempted run only saves, as it is about to be
    killed; the evaluation is made up for when it is resumed.
    """
    last = step == c.steps
    preempted = told_to_stop and not last
    evaluate = last or (step % c.eval_every == 0 and not preempted)
    save = last or preempted or step % c.save_every == 0
    return cls(evaluate or save or step % c.log_every == 0, evaluate, save, preempted)


def train(run: Run, state: step_lib.TrainState) -> dict[str, Any]:
  """Makes the updates that are left, each followed by what is due; returns and raises as `run`."""
  c, log, split = run.config.train, run.log, run.config.data.eval_split
  if run.owes_evaluation:
    log.write(run.start, split, run.evaluate(state))
  result, updates = {}, run.updates
  batches = train_batches(run.rows.train, c, run.mesh, run.start)
  for step in range(run.start + 1, c.steps + 1):
    with run.goodput.spent_on("data"):
      batch = next(batches)
    state, metrics = run.update(step, state, batch)
    updates.add(metrics)
    run.checkpointer.check()
    due = Due.after(step, c, run.guard.reached(step))
    if due.log:
      updates.close_record(step)
    if due.evaluate or due.save:
      updates.write()  # raises if the loss is not finite, before such a state is saved
    if due.evaluate:
      result = run.evaluate(state)
      log.write(step, split, result)
    if due.save:
      run.save(state, result if due.evaluate else None, stop=due.preempted or step == c.steps)
    if due.preempted:
      raise preemption.Preempted(f"stopped by SIGTERM; step {step} is saved")
    if due.evaluate or due.save:
      updates.restart()
  if not result:  # all updates had been made before
    result = run.evaluate(state)
    log.say(f"nothing left to do: {run.lock.workdir} is at step {run.start} of {c.steps}")
  return result


@dataclasses.dataclass(frozen=True)
class Run:
  """An opened run: what the loop works with."""

  config: config_lib.Experiment  # as resolved
  rows: Rows
  mesh: jax.sharding.Mesh
  programs: programs_lib.Programs
  lock: workdir_lock.WorkdirLock
  checkpointer: checkpoint_lib.Checkpointer
  guard: preemption.PreemptionGuard
  log: Log
  updates: UpdateMetrics
  goodput: Goodput
  trace: contextlib.ExitStack  # the profiler's, while it traces
  start: int  # updates made before this process
  owes_evaluation: bool  # SIGTERM came when an evaluation was due at `start`

  def update(
    self, step: int, state: step_lib.TrainState, batch: Batch
  ) -> tuple[step_lib.TrainState, dict[str, jax.Array]]:
    """The train step, with its time accounted for, and traced if `train.profile_at` says so."""
    first = self.config.train.profile_at
    if step == first:
      jax.block_until_ready(state)
      self.trace.enter_context(_profiled(self.lock))
    with self.goodput.spent_on("compilation" if step == self.start + 1 else "updates"):
      state, metrics = self.programs.train_step(state, batch)
    if first and step == first + PROFILED - 1:
      jax.block_until_ready(state)
      self.trace.close()
    return state, metrics

  def evaluate(self, state: step_lib.TrainState) -> dict[str, Any]:
    """Step metrics over the evaluation rows; for a language model, loss per token.

    Every host computes the probabilities of its rows, and receives those of all rows.
    """
    objective, programs = self.config.loss.objective, self.programs
    with self.goodput.spent_on("evaluation"):
      batches = eval_batches(self.rows.evaluation, self.config.train, self.mesh)
      if objective == "language_model":
        pairs = [jax.device_get(programs.read(state.params, batch)) for batch in batches]
        count = sum(int(count) for _, count in pairs)
        nll = sum(float(nll) for nll, _ in pairs) / max(count, 1)
        return {"count": count, "nll": nll, "perplexity": math.exp(min(nll, 700.0))}
      log_probs, targets = [], []
      for batch in batches:
        batch_targets = np.asarray(programs.gather(batch.read_targets))
        kept = batch_targets >= 0
        log_probs.append(np.asarray(programs.read(state.params, batch))[kept])
        targets.append(batch_targets[kept])
      probabilities = np.exp(np.concatenate(log_probs).astype(np.float64))
      if objective == "process":
        return step_metrics.step_metrics(probabilities, np.concatenate(targets) - 1)
      return step_metrics.outcome_metrics(probabilities, np.concatenate(targets))

  def save(self, state: step_lib.TrainState, evaluation: dict[str, Any] | None, stop: bool) -> None:
    """Starts to save a checkpoint; if the process stops after it, waits until it is on disk.

    Records that the checkpoint counts as done are on disk before it, even if the machine dies.
    """
    step = int(state.step)
    self.lock.check()
    if not stop:
      self.log.write(step, "goodput", self.goodput.summary())  # the next process goes on from it
    self.log.sync()
    with self.goodput.spent_on("checkpoint"):
      self.checkpointer.save(state, self.rows.metadata, evaluation)
      if stop:
        self.checkpointer.finish()
    if stop:
      self.lock.check()
      self.log.write(step, "goodput", self.goodput.summary())


def open_run(
  c: config_lib.Experiment, lock: workdir_lock.WorkdirLock, stack: contextlib.ExitStack
) -> tuple[Run, step_lib.TrainState]:
  """Reads the data and restores or initialises the state; `stack` closes what has been opened."""
  workdir, goodput = lock.workdir, Goodput()
  with goodput.spent_on("start"):
    rows = read_rows(c, workdir)
  c, metadata = rows.metadata.config, rows.metadata
  mesh = sharding_lib.make_mesh(c.mesh)
  distributed.check_same(rows.facts(workdir))
  programs = programs_lib.make(c, metadata.vocab_size, len(metadata.contract.classes), mesh)
  stack.enter_context(jax.set_mesh(mesh))
  checkpointer = checkpoint_lib.Checkpointer(workdir, c.train)
  stack.enter_context(contextlib.closing(checkpointer))
  with goodput.spent_on("start"):
    state = first_state(rows, programs, checkpointer, workdir)
    start = int(state.step)  # waits
  saved = checkpointer.info(start) if start else {}
  owes_evaluation = bool(saved) and start % c.train.eval_every == 0 and not saved["evaluation"]
  guard = stack.enter_context(preemption.PreemptionGuard())
  log = Log(lock, c.train.steps, start, c.data.eval_split if owes_evaluation else None)
  stack.enter_context(contextlib.closing(log))
  if "goodput" in log.last:
    goodput.resume(log.last["goodput"])
  log.say(summary(rows, sum(x.size for x in jax.tree.leaves(state.params)), mesh, start))
  if changed := other_packages(saved.get("versions", {})):
    log.say(f"warning: packages have changed since step {start} was saved: {changed}")
  rates = np.asarray(step_lib.learning_rate(c.optim, c.train.steps)(np.arange(c.train.steps)))
  tokens = c.train.batch_rows * c.data.row_length * rows.train.fill  # of an update, on average
  opened = Run(
    config=c,
    rows=rows,
    mesh=mesh,
    programs=programs,
    lock=lock,
    checkpointer=checkpointer,
    guard=guard,
    log=log,
    updates=UpdateMetrics(log, goodput, rates, tokens),
    goodput=goodput,
    trace=stack.enter_context(contextlib.ExitStack()),
    start=start,
    owes_evaluation=owes_evaluation,
  )
  return opened, state


def first_state(
  rows: Rows,
  programs: programs_lib.Programs,
  checkpointer: checkpoint_lib.Checkpointer,
  workdir: storage.Path,
) -> step_lib.TrainState:
  """The state of the newest readable checkpoint; without one, random or from `init.checkpoint`.

  The first host writes the manifest and, for a new run, the tokenizer to the work directory.
  """
  c = rows.metadata.config

  def restore(step: int, then: checkpoint_lib.Metadata) -> step_lib.TrainState:
    check_same_run(rows.metadata, then, workdir)
    return checkpointer.restore(step, programs.abstract)

  if found := checkpointer.newest(restore):
    state = found[2]
  elif c.init.checkpoint:
    params = initialization.public_params(c, rows.tokenizer, programs.abstract.params)
    state = programs.begin(params)
  else:
    state = programs.init(jax.random.key(c.train.seed))
  if distributed.is_first():
    if not found:
      rows.tokenizer.save(workdir)
    with json_lines.written(workdir / "manifest.json") as file:
      file.write(json.dumps(rows.manifest, indent=1) + "\n")
  return state


@contextlib.contextmanager
def _profiled(lock: workdir_lock.WorkdirLock):
  """Writes a profiler trace of the block to WORKDIR/profile."""
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # its hooks have crashed processes with other Python threads
  folder = lock.workdir / "profile"
  with (
    storage.local(folder, unless=lock.taken_by) as local,
    jax.profiler.trace(str(local), profiler_options=options),
  ):
    yield


def check_same_run(
  now: checkpoint_lib.Metadata, then: checkpoint_lib.Metadata, workdir: storage.Path
) -> None:
  """ValueError if a run would be resumed with other settings or on other rows."""

  def fixed(metadata: checkpoint_lib.Metadata) -> dict[str, Any]:
    contract = dataclasses.asdict(metadata.contract)
    settings = config_lib.settings(metadata.config, leave_out=config_lib.CHANGEABLE)
    return settings | {f"step contract, {name}": value for name, value in contract.items()}

  old, new = fixed(then), fixed(now)
  names = [name for name in new if old[name] != new[name]]
  changed = [f"{name}: {old[name]!r} then, {new[name]!r} now" for name in names]
  if not changed and now.rows_hash != then.rows_hash:
    changed = ["the packed training rows: other data than then"]
  if changed:
    raise ValueError(
      f"{workdir} holds a run with other settings; give this one its own --workdir, or go back to "
      "the old settings:\n  " + "\n  ".join(changed)
    )


def other_packages(then: dict[str, str]) -> str:
  """Packages whose versions differ from those that wrote a checkpoint."""
  now = distributed.versions()
  changed = [name for name in now if name in then and then[name] != now[name]]
  return ", ".join(f"{name} {then[name]}, now {now[name]}" for name in changed)


def summary(rows: Rows, params: int, mesh: jax.sharding.Mesh, start: int) -> str:
  """The first lines on the screen: model, data and devices."""
  c, manifest = rows.metadata.config, rows.manifest["train"]
  targets = ", ".join(f"{count} {name}" for name, count in manifest["targets"].items())
  examples = "texts" if c.loss.objective == "language_model" else "solutions"
  epochs = c.train.steps * c.train.batch_rows / manifest["rows"]
  lines = [
    f"{c.loss.objective.replace('_model', '')} model, {params:,} parameters, on {mesh.size} "
    f"{mesh.devices.flat[0].platform} device(s) as {dict(mesh.shape)}",
    f"{manifest['examples']:,} {examples} ({targets}), {manifest['tokens']:,} tokens in "
    f"{manifest['rows']:,} rows of {c.data.row_length} ({manifest['fill']:.1%} full), "
    f"{c.train.steps} steps = {epochs:.1f} epochs",
  ]
  if manifest.get("merged"):
    paths = manifest["tokens_of_paths"]
    times = paths / manifest["tokens"]
    lines.append(f"prefix trees: {paths:,} tokens path by path, {times:.2f} times as many")
  if manifest["longer_than_a_row"]:
    cut = len(manifest["longer_than_a_row"])
    lines.append(f"{cut} {examples} were longer than a row and cut")
  if start:
    lines.append(f"resuming at step {start}")
  return "\n".join(lines)
