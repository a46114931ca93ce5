"""The training loop: `Run` opens a run, `train` makes its updates."""

import contextlib
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.experimental import multihost_utils

from prm_jax import config as config_lib
from prm_jax import step_metrics
from prm_jax.datasets import labelled
from prm_jax.input_pipeline import packing, step_dataset, text_dataset, token_tree, tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import distributed, exits, progress, storage, workdir_lock
from prm_jax.training import boards, evaluations, initialization, summary
from prm_jax.training import checkpoint as checkpoint_lib
from prm_jax.training import step as step_lib
from prm_jax.training.metric_log import Goodput, Log, UpdateMetrics
from prm_jax.types import Batch, StepTree

ROUND_READS_TO = 32  # of solutions in memory: few sizes of rows, so that runs share programs
PROFILED = 3  # updates in a profiler trace
PREFETCHED = 2  # batches built ahead


@dataclasses.dataclass(frozen=True)
class Solutions:
  """Labelled solutions in memory, which replace the dataset in `data.directory`."""

  train: list[StepTree]
  evaluation: list[StepTree]
  recipe: str  # where the labels are from, for the step contract


def run(
  c: config_lib.Experiment, workdir: str | storage.Path, solutions: Solutions | None = None
) -> dict[str, Any]:
  """Trains to `c.train.steps`, resuming from the newest checkpoint of `workdir` if it has one.

  Args:
    solutions: used instead of `c.data`.

  Returns:
    The metrics of the last evaluation.

  Raises:
    ValueError: the work directory belongs to another run or is in use, none of its checkpoints can
      be read, or the loss is not finite.
    OSError: a file cannot be read or written.
    exits.Preempted: SIGTERM came during training; the state is saved.
  """
  with contextlib.ExitStack() as stack:
    lock = stack.enter_context(workdir_lock.WorkdirLock(storage.absolute(workdir)))
    return train(Run(c, lock, stack, solutions))


def train(run: "Run") -> dict[str, Any]:
  """Makes the remaining updates, with evaluations and saves; returns and raises as `run`.

  The last update is always evaluated and saved.  A preempted run only saves, as it is about to be
  killed; the process that resumes it evaluates first.
  """
  c, updates, result = run.config.train, run.updates, {}
  if run.start and run.start % c.eval_every == 0 and run.start not in run.checkpointer.evaluations:
    result = run.evaluate_and_log(run.start)
  if run.start == c.steps or run.out_of_patience(run.start):
    run.log.say(f"nothing left to do: {run.lock.workdir} is at step {run.start} of {c.steps}")
    stored = run.checkpointer.info(run.start)
    if (metric := stored["config"]["train"]["best_metric"]) != c.best_metric:
      run.log.say(f"--step=best ranks by {metric}, train.best_metric when the run was trained")
    return result or stored["evaluation"] or run.evaluate()
  batches = train_batches(run.rows.train, c, run.mesh, run.start)
  for step in range(run.start + 1, c.steps + 1):
    with run.goodput.spent_on("data"):
      batch = next(batches)
    updates.add(run.update(step, batch))
    run.checkpointer.finish(wait=False)
    last = step == c.steps
    preempted = run.guard.reached(step) and not last
    evaluate = last or (step % c.eval_every == 0 and not preempted)
    save = last or preempted or step % c.save_every == 0
    if evaluate or save or step % c.log_every == 0:
      updates.close_record(step)
    if evaluate or save:
      updates.write()  # raises if the loss is not finite, before such a state is saved
    if evaluate:
      result = run.evaluate_and_log(step)
      last = last or run.out_of_patience(step)
      save = save or last or run.is_best(step)
    if save:
      run.save(step, stop=preempted or last)
    if preempted:
      raise exits.Preempted(f"stopped by SIGTERM; step {step} is saved")
    if last:
      break
    if evaluate or save:
      updates.restart()
  return result


class Run:
  """An opened run: its data, compiled programs, training state, checkpoints and log."""

  def __init__(
    self,
    c: config_lib.Experiment,
    lock: workdir_lock.WorkdirLock,
    stack: contextlib.ExitStack,
    solutions: Solutions | None = None,
  ):
    """Reads the data and restores or initialises the state; `stack` closes what is opened."""
    boards.check(c.train)
    self.lock, self.goodput = lock, Goodput()
    self.called: set[str] = set()  # names of the programs called so far
    self.warned = False
    with self.goodput.spent_on("start"):
      self.rows = read_rows(c, lock.workdir, solutions)
    metadata = self.rows.metadata
    self.config = c = metadata.config  # as resolved
    self.mesh = sharding_lib.make_mesh(c.mesh)
    facts = metadata.facts(leave_out=config_lib.PER_HOST) | distributed.versions()
    facts |= {"python": sys.version.split()[0], "workdir": str(lock.workdir)}
    distributed.check_same(facts)
    classes = len(metadata.contract.classes)
    self.programs = step_lib.make(c, metadata.vocab_size, classes, self.mesh)
    stack.enter_context(jax.set_mesh(self.mesh))
    self.checkpointer = checkpoint_lib.Checkpointer(lock.workdir, c.train)
    stack.enter_context(contextlib.closing(self.checkpointer))
    with self.goodput.spent_on("start"):
      self.state = self.first_state()
      self.start = int(self.state.step)  # updates made before this process; waits
      if self.start:
        self.checkpointer.evaluations = self.checkpointer.evaluations_until(self.start)
    self.guard = stack.enter_context(distributed.PreemptionGuard())
    self.log = Log(lock, c, self.start, stack)
    if "goodput" in self.log.last:
      self.goodput.resume(self.log.last["goodput"])
    params = sum(x.size for x in jax.tree.leaves(self.state.params))
    manifest = self.rows.manifest["train"]
    self.log.say("\n".join(summary.lines(metadata, manifest, self.mesh, params, self.start)))
    for warning in summary.warnings(c, self.rows.train, self.start):
      self.log.say(f"warning: {warning}")
    now = distributed.versions()
    then = self.checkpointer.info(self.start)["versions"] if self.start else now
    changed = [f"{name} {x}, now {now.get(name)}" for name, x in then.items() if x != now.get(name)]
    if changed:
      self.log.say(f"warning: packages have changed since step {self.start}: {'; '.join(changed)}")
    tokens = c.train.batch_rows * c.data.row_length * self.rows.train.fill
    self.updates = UpdateMetrics(self.log, self.goodput, c.train, tokens)
    self.trace = stack.enter_context(contextlib.ExitStack())  # the profiler's, while it traces

  def first_state(self) -> step_lib.TrainState:
    """Restores the newest readable checkpoint, else starts from `init.checkpoint` or at random.

    The first host writes the manifest and, for a new run, the tokenizer to the work directory.
    """
    c, rows, programs, workdir = self.config, self.rows, self.programs, self.lock.workdir

    def restore(step: int, then: checkpoint_lib.Metadata) -> step_lib.TrainState:
      checkpoint_lib.check_same_run(rows.metadata, then, workdir)
      return self.checkpointer.restore(step, programs.abstract)

    if newest := self.checkpointer.newest(restore):
      state = newest[2]
    elif c.init.checkpoint:
      with progress.waiting(f"loading {c.init.checkpoint}"):
        params = initialization.public_params(
          c, rows.metadata.contract, rows.tokenizer, programs.abstract.params
        )
      state = programs.begin(params)
    else:
      state = programs.init(jax.random.key(c.train.seed))
    if distributed.is_first():
      if not newest:
        rows.tokenizer.save(workdir)
      with storage.written(workdir / "manifest.json") as file:
        file.write(json.dumps(rows.manifest, indent=1) + "\n")
    return state

  def update(self, step: int, batch: Batch) -> dict[str, jax.Array]:
    """Makes an update and returns its metrics; profiles `PROFILED` updates from `profile_at` on."""
    first = self.config.train.profile_at
    if step == first:
      jax.block_until_ready(self.state)
      options = jax.profiler.ProfileOptions()
      options.python_tracer_level = 0  # Python hooks have crashed processes with threads
      folder = storage.local(self.lock.workdir / "profile", unless=self.lock.taken_by)
      folder = str(self.trace.enter_context(folder))
      self.trace.enter_context(jax.profiler.trace(folder, profiler_options=options))
    self.state, metrics = self.call("update", self.programs.train_step, self.state, batch)
    if first and step == first + PROFILED - 1:
      jax.block_until_ready(self.state)
      self.trace.close()
    return metrics

  def evaluate(self) -> dict[str, Any]:
    """Returns step metrics over the evaluation rows; for a language model, loss and perplexity.

    Every host computes the probabilities of its own rows, and receives those of all rows.
    """
    c, rows, objective = self.config.train, self.rows.evaluation, self.config.loss.objective
    size = c.batch_rows // c.microbatches  # a microbatch of training, which fits in memory
    read = lambda batch: self.call("evaluation", self.programs.read, self.state.params, batch)
    with self.goodput.spent_on("evaluation"):
      orders = packing.eval_order(rows, size, c.eval_rows)
      about = {"desc": "evaluating", "unit": "batches", "leave": False}
      batches = (
        sharding_lib.global_batch(lambda i, order=order: rows[order[i]], size, self.mesh)
        for order in progress.Progress(orders, disable=not distributed.is_first(), **about)
      )
      if objective == "language_model":
        pairs = [jax.device_get(read(batch)) for batch in batches]
        count = sum(int(count) for _, count in pairs)
        nll = sum(float(nll) for nll, _ in pairs) / max(count, 1)
        return {"count": count, "nll": nll, "perplexity": math.exp(min(nll, 700.0))}
      log_probs, targets = [], []
      for batch in batches:
        batch_targets = multihost_utils.process_allgather(batch.read_targets, tiled=True)
        kept = batch_targets.sum(-1) > 0
        log_probs.append(np.asarray(read(batch))[kept])
        targets.append(batch_targets[kept])
      probabilities = np.exp(np.concatenate(log_probs).astype(np.float64)).mean(axis=1)
      classes = self.rows.metadata.contract.labels
      return step_metrics.step_metrics(probabilities, np.concatenate(targets), classes)

  def call(self, name: str, program: Callable[..., Any], *args: Any) -> Any:
    """Calls a compiled program; the time of its first call counts as compilation."""
    if name in self.called:
      return program(*args)
    self.called.add(name)
    with self.goodput.spent_on("compilation"), progress.waiting(f"compiling the {name}"):
      return program(*args)

  def evaluate_and_log(self, step: int) -> dict[str, Any]:
    """Evaluates the current state; the log, and this and later checkpoints, record the result."""
    result, split = self.evaluate(), self.config.data.eval_name
    if not self.warned and (why := evaluations.why_undefined(result, self.config.train, split)):
      self.log.say(f"warning: {why}")
      self.warned = True
    self.checkpointer.evaluations[step] = result
    if not self.log.has(step, split):  # a resumed run may have evaluated it and been killed
      self.log.write(step, split, result)
    return result

  def is_best(self, step: int) -> bool:
    """Returns whether `train.stop_patience` is set and this step is the best.  All hosts agree."""
    c = self.config.train
    best, _ = evaluations.without_better(self.checkpointer.evaluations, c.best_metric)
    return c.stop_patience > 0 and distributed.somewhere(best == step)

  def out_of_patience(self, step: int) -> bool:
    """Returns whether `train.stop_patience` ends the run here; logs why.  All hosts agree.

    The checkpoint holds the evaluations, so a resumed run ends at the same step.
    """
    if not self.config.train.stop_patience:
      return False  # and spares the hosts a collective
    why = evaluations.why_stop(self.checkpointer.evaluations, self.config.train)
    if ends := distributed.somewhere(bool(why)):
      self.log.bar.total = step  # the last update, whose goodput record is printed
      self.log.say(f"early stopping at step {step}: {why}")
    return ends

  def save(self, step: int, stop: bool) -> None:
    """Starts an asynchronous save; with `stop`, waits until it is on disk.

    Syncs the log first, so that a crash loses no record of an update in the checkpoint.
    """
    self.lock.check()
    if not stop:
      self.log.write(step, "goodput", self.goodput.summary())  # the next process continues from it
    self.log.sync()
    with self.goodput.spent_on("checkpoint"):
      self.checkpointer.save(self.state, self.rows.metadata)
      if stop:
        self.checkpointer.finish()
    if stop:
      self.lock.check()
      self.log.write(step, "goodput", self.goodput.summary())


@dataclasses.dataclass(frozen=True)
class Rows:
  """The rows of a run, its tokenizer, and the metadata of its checkpoints."""

  train: packing.PackedRows
  evaluation: packing.PackedRows
  manifest: dict[str, Any]  # counts of what was read, packed and dropped, by split
  tokenizer: tokenizers.Tokenizer
  metadata: checkpoint_lib.Metadata  # its config is resolved


def read_rows(
  c: config_lib.Experiment,
  workdir: storage.Path | None = None,
  solutions: Solutions | None = None,
) -> Rows:
  """Reads, converts, tokenises and packs both splits; arguments as in `initialization.find`, `run`.

  With `train.epochs`, sets the number of updates from the number of rows.
  """
  c, tokenizer, vocab_size = initialization.find(c, workdir)
  data = c.data
  if c.loss.objective == "language_model":
    contract = token_tree.step_contract(tokenizer, "", c.loss.objective, "text")
    train = text_dataset.load(data.text_train, tokenizer, data.row_length, vocab_size)
    evaluation = text_dataset.load(data.text_eval, tokenizer, data.row_length, vocab_size)
  elif solutions:
    contract = token_tree.step_contract(
      tokenizer, data.separator, c.loss.objective, solutions.recipe, heads=c.loss.heads
    )
    how = {"row_length": data.row_length, "merge": data.merge, "round_reads_to": ROUND_READS_TO}
    pack = functools.partial(step_dataset.pack, tokenizer=tokenizer, contract=contract, **how)
    train, evaluation = pack(solutions.train), pack(solutions.evaluation, evaluation=True)
  else:
    meaning = labelled.read_manifest(data.directory).meaning
    contract = token_tree.step_contract(
      tokenizer, data.separator, c.loss.objective, **meaning, heads=c.loss.heads
    )
    with progress.waiting(f"reading {data.directory}"):
      train = step_dataset.load(data, "train", tokenizer, contract)
      evaluation = step_dataset.load(data, data.eval_split, tokenizer, contract, evaluation=True)
  if c.train.epochs:
    steps = max(round(c.train.epochs * len(train[0]) / c.train.batch_rows), 1)
    c = dataclasses.replace(c, train=dataclasses.replace(c.train, steps=steps))
  return Rows(
    train=train[0],
    evaluation=evaluation[0],
    manifest={"train": train[1], data.eval_name: evaluation[1]},
    tokenizer=tokenizer,
    metadata=checkpoint_lib.Metadata(c, contract, vocab_size, train[0].hash, evaluation[0].hash),
  )


def train_batches(
  rows: packing.PackedRows, c: config_lib.Train, mesh: jax.sharding.Mesh, step: int
) -> Iterator[Batch]:
  """Yields the batches of the updates after `step`; a thread builds them ahead."""
  order = packing.shuffled(rows, c.seed)

  def batch(step: int) -> Batch:
    return sharding_lib.global_batch(lambda i: order[step * c.batch_rows + i], c.batch_rows, mesh)

  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED)
  return iter(grain.MapDataset.range(step, c.steps).map(batch).to_iter_dataset(options))
