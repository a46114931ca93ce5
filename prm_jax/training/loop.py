"""The training loop.

Reads top to bottom: what to train on, the state (new or restored), then steps, each followed by
what is due: a line of metrics, an evaluation, a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import grain
import jax
import numpy as np

from prm_jax import config as config_lib
from prm_jax import step_metrics as metrics_lib
from prm_jax.datasets import labelled
from prm_jax.input_pipeline import packing, step_dataset, text_dataset, token_tree, tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import distributed, json_lines, preemption, storage, workdir_lock
from prm_jax.training import checkpoint as checkpoint_lib
from prm_jax.training import goodput as goodput_lib
from prm_jax.training import initialization as start_lib
from prm_jax.training import programs as programs_lib
from prm_jax.training import step as step_lib
from prm_jax.training.metric_log import Log, Silent
from prm_jax.types import Batch

PREFETCHED = 2  # batches built ahead
PROFILED = 3  # updates of a profiler trace
TRACE = jax.profiler.ProfileOptions()
TRACE.python_tracer_level = 0  # its hooks have crashed a process in which other threads run Python
AHEAD = 2  # updates that the host may be ahead of the devices

# Settings a run may be resumed with although it was started with others: they change what is
# reported and where sums are made, not what is learnt.
FREE = {"train.log_every", "train.eval_every", "train.eval_rows", "train.save_every", "train.keep"}
FREE |= {"train.profile_at", "train.keep_best", "train.best_metric"}
FREE |= {"mesh.data", "mesh.fsdp", "mesh.tensor", "data.directory", "data.tokenizer"}
FREE |= {"data.text_train", "data.text_eval"}
# rounding apart
FREE |= {"model.remat", "model.saved", "model.unroll_layers", "model.attention"}
FREE |= {"train.microbatches"}


@dataclasses.dataclass(frozen=True)
class Rows:
  """What a run trains and is evaluated on."""

  train: packing.PackedRows
  evaluation: packing.PackedRows
  manifest: dict[str, Any]  # how they came to be, by split
  tokenizer: tokenizers.Tokenizer
  metadata: checkpoint_lib.Metadata  # of the run's checkpoints; its config is resolved


def read_rows(c: config_lib.Experiment, workdir: storage.Path | None = None) -> Rows:
  """Reads, converts, tokenises and packs both splits.

  Args:
    workdir: of the run, which may be one to resume; None: a new one.
  """
  c, tokenizer, vocab_size = start_lib.find(c, workdir)
  read = _read_text if c.loss.objective == "language_model" else _read_labelled
  contract, (rows, manifest), (eval_rows, eval_manifest) = read(c, tokenizer)
  return Rows(
    train=rows,
    evaluation=eval_rows,
    manifest={"train": manifest, c.data.eval_split: eval_manifest},
    tokenizer=tokenizer,
    metadata=checkpoint_lib.Metadata(c, contract, vocab_size, rows.hash),
  )


def _read_labelled(c: config_lib.Experiment, tokenizer: tokenizers.Tokenizer):
  """The contract, and (rows, manifest) of both splits."""
  recipe = labelled.read_manifest(c.data.directory).recipe
  contract = token_tree.step_contract(
    tokenizer,
    c.data.separator,
    c.loss.objective,
    recipe=recipe["name"],
    neutral="negative" if recipe["neutral"] == "negative" else "positive",
  )
  print(f"reading {c.data.directory}", file=sys.stderr, flush=True)
  train = step_dataset.load(c.data, "train", tokenizer, contract)
  evaluation = step_dataset.load(c.data, c.data.eval_split, tokenizer, contract, evaluation=True)
  return contract, train, evaluation


def _read_text(c: config_lib.Experiment, tokenizer: tokenizers.Tokenizer):
  """The same of text."""
  train, evaluation = (
    text_dataset.load(path, tokenizer, c.data.row_length)
    for path in (c.data.text_train, c.data.text_eval)
  )
  return text_dataset.contract(tokenizer), train, evaluation


def run(c: config_lib.Experiment, workdir: str | storage.Path) -> dict[str, Any]:
  """Trains to `c.train.steps`, resuming from the newest checkpoint of `workdir` if it has one.

  Returns:
    The metrics of the last evaluation.

  Raises:
    ValueError: the work directory belongs to another run or is in use, none of its checkpoints can
      be read, or the loss is not finite.
    OSError: a file cannot be read or written.
    preemption.Preempted: SIGTERM came; the state is saved.
  """
  workdir = storage.absolute(workdir)
  with preemption.PreemptionGuard() as notice, workdir_lock.locked(workdir) as hold:
    return _run(c, hold, notice)


def _run(
  c: config_lib.Experiment, hold: workdir_lock.WorkdirLock, notice: preemption.PreemptionGuard
) -> dict[str, Any]:
  workdir = hold.workdir
  goodput = goodput_lib.Goodput()
  with goodput.spent_on("start"):
    rows = read_rows(c, workdir)
  c = rows.metadata.config
  mesh = sharding_lib.make_mesh(c.mesh)
  distributed.check_same(facts(rows, workdir))
  about = rows.metadata
  programs = programs_lib.make(c, about.vocab_size, len(about.contract.classes), mesh)
  rates = np.asarray(step_lib.learning_rate(c.optim, c.train.steps)(np.arange(c.train.steps)))

  def evaluated(state: step_lib.TrainState) -> dict[str, Any]:
    with goodput.spent_on("evaluation"):
      batches = eval_batches(rows.evaluation, c.train, mesh)
      return evaluate(state.params, batches, programs, c.loss.objective)

  notice.defer()
  with contextlib.ExitStack() as stack:
    stack.enter_context(jax.set_mesh(mesh))
    # closed, whatever happens: a save under way is finished
    checkpointer = stack.enter_context(
      contextlib.closing(checkpoint_lib.Checkpointer(workdir, c.train))
    )

    def restored(step: int, then: checkpoint_lib.Metadata) -> step_lib.TrainState:
      check_same_run(about, then, workdir)
      return checkpointer.restore(step, programs.abstract)

    with goodput.spent_on("start"):
      found = checkpointer.newest(restored)
      if found is None:
        if c.init.checkpoint:
          params = start_lib.public_params(c, rows.tokenizer, programs.abstract.params)
          state = programs.begin(params)
        else:
          state = programs.init(jax.random.key(c.train.seed))
        if distributed.is_first():
          rows.tokenizer.save(workdir)
      else:
        state = found[2]
      if distributed.is_first():
        with json_lines.written(workdir / "manifest.json") as file:
          file.write(json.dumps(rows.manifest, indent=1) + "\n")
      step = int(state.step)  # waits
    # stopped by SIGTERM before it could be done: then it is done now, and stands in the log once
    missing = step > 0 and step % c.train.eval_every == 0
    missing = missing and checkpointer.evaluation(step) is None
    again = c.data.eval_split if missing else None
    log = Log(hold, c.train.steps, step, again) if distributed.is_first() else Silent()
    stack.enter_context(contextlib.closing(log))
    if past := log.last.get("goodput"):
      goodput.resume(past)
    log.say(summary(c, rows.manifest["train"], params_of(state), mesh, step))
    if step and (changed := other_packages(checkpointer.versions(step))):
      log.say(f"warning: packages have changed since step {step} was saved: {changed}")

    trace = stack.enter_context(contextlib.ExitStack())  # a short run ends within it
    batches = train_batches(rows.train, c.train, mesh, step)
    tokens = c.train.batch_rows * c.data.row_length * rows.train.fill  # of a step, on average
    result, pending, due, window = {}, [], None, None
    if missing:
      log.write(step, c.data.eval_split, evaluated(state))
    notice.heed()
    while step < c.train.steps:
      with goodput.spent_on("data"):
        batch = next(batches)
      if step + 1 == c.train.profile_at:
        jax.block_until_ready(state)
        profile = trace.enter_context(storage.local(workdir / "profile", unless=hold.taken_by))
        trace.enter_context(jax.profiler.trace(str(profile), profiler_options=TRACE))
      with goodput.spent_on("compilation") if window is None else contextlib.nullcontext():
        state, metrics = programs.train_step(state, batch)
      window = window or goodput_lib.Window(goodput, tokens)  # from here: the step is compiled
      step += 1
      pending.append(metrics)
      log.advance()
      checkpointer.check()
      if c.train.profile_at and step == c.train.profile_at + PROFILED - 1:
        jax.block_until_ready(state)
        trace.close()
      if due:  # read the numbers of earlier steps only once the next one is under way
        record(log, window, *due)
        due = None
      if len(pending) > AHEAD:  # so that a save at the next step does not wait for many
        jax.block_until_ready(pending[-1 - AHEAD])
      last = step == c.train.steps
      preempted = notice.reached(step) and not last
      save_now = last or preempted or step % c.train.save_every == 0
      evaluate_now = last or (step % c.train.eval_every == 0 and not preempted)
      if evaluate_now or save_now or step % c.train.log_every == 0:
        due, pending = (step, pending, {"learning_rate": rates[step - 1].item()}), []
        if save_now or evaluate_now:
          record(log, window, *due)  # stops here rather than keep a diverged state
          due = None
      if evaluate_now:
        result = evaluated(state)
        log.write(step, c.data.eval_split, result)
      if save_now:
        hold.check()
        if not (last or preempted):
          log.write(step, "goodput", goodput.summary())  # what the next process goes on from
        log.sync()  # what a checkpoint counts as done is in the log, even if the machine dies
        with goodput.spent_on("checkpoint"):
          checkpointer.save(state, rows.metadata, result if evaluate_now else None)
      if preempted or last:
        with goodput.spent_on("checkpoint"):
          checkpointer.finish()
        hold.check()
        log.write(step, "goodput", goodput.summary())
      if preempted:
        raise preemption.Preempted(f"told to stop (SIGTERM); step {step} is saved")
      if evaluate_now or save_now:
        window.restart()
    if not result:  # the run had ended before
      result = evaluated(state)
      log.say(f"nothing left to do: {workdir} is at step {step} of {c.train.steps}")
  return result


def facts(rows: Rows, workdir: storage.Path) -> dict[str, Any]:
  """What all hosts of a job must have alike: settings, data, packages, place.

  Where a host has its data is its own affair, so long as the rows are the same.
  """
  own = {"directory", "tokenizer", "text_train", "text_eval"}
  values = rows.metadata.to_json() | {"hash of the evaluation rows": rows.evaluation.hash}
  settings = {
    f"{section}.{key}": value
    for section, fields in values.pop("config").items()
    for key, value in fields.items()
    if section != "data" or key not in own
  }
  python = sys.version.split()[0]
  return settings | values | {"python": python, "workdir": str(workdir)}


def train_batches(
  rows: packing.PackedRows, c: config_lib.Train, mesh: jax.sharding.Mesh, step: int
) -> Iterator[Batch]:
  """The batches of the updates from `step` on, built ahead by a thread."""
  order = packing.shuffled(rows, c.seed)

  def batch(step: int) -> Batch:
    return sharding_lib.global_batch(lambda i: order[step * c.batch_rows + i], c.batch_rows, mesh)

  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED)
  return iter(grain.MapDataset.range(step, c.steps).map(batch).to_iter_dataset(options))


def eval_batches(
  rows: packing.PackedRows, c: config_lib.Train, mesh: jax.sharding.Mesh
) -> Iterator[Batch]:
  """The rows of an evaluation during training, each once."""
  for numbers in packing.eval_order(rows, c.batch_rows, c.eval_rows):
    yield sharding_lib.global_batch(lambda i, of=numbers: rows[of[i]], c.batch_rows, mesh)


def record(
  log: Log,
  window: goodput_lib.Window,
  step: int,
  pending: list[dict[str, jax.Array]],
  extra: dict[str, float],
) -> None:
  """Writes the means of a window of steps; stops the run on a loss that is not finite."""
  values = jax.device_get(pending)  # waits for them
  means = {key: float(np.mean([v[key] for v in values])) for key in values[0]}
  means |= extra | window.close(len(pending))
  log.write(step, "train", means)
  if warning := goodput_lib.data_bound(means):  # of this host: others may have other machines
    log.warn(warning)
  if not (math.isfinite(means["loss"]) and math.isfinite(means["gradient_norm"])):
    raise ValueError(
      f"loss {means['loss']}, gradient norm {means['gradient_norm']} in the steps up to {step}: "
      "lower optim.learning_rate or raise optim.warmup_steps; the last checkpoint is from before"
    )


def evaluate(
  params: Any, batches: Iterable[Batch], programs: programs_lib.Programs, objective: str
) -> dict[str, Any]:
  """Step metrics over all read positions of some batches; of text, the mean loss of a token.

  Every host computes its rows' probabilities, and every host has all of them in the end.
  """
  if objective == "language_model":
    pairs = [jax.device_get(programs.read(params, batch)) for batch in batches]
    count = sum(int(count) for _, count in pairs)
    nll = sum(float(nll) for nll, _ in pairs) / max(count, 1)
    return {"count": count, "nll": nll, "perplexity": math.exp(min(nll, 700.0))}
  log_probs, targets = [], []
  for batch in batches:
    of_batch = np.asarray(programs.gather(batch.read_targets))
    kept = of_batch >= 0
    log_probs.append(np.asarray(programs.read(params, batch))[kept])
    targets.append(of_batch[kept])
  probabilities = np.exp(np.concatenate(log_probs).astype(np.float64))
  targets = np.concatenate(targets)
  if objective == "process":
    return metrics_lib.step_metrics(probabilities, targets - 1)
  return metrics_lib.outcome_metrics(probabilities, targets)


def check_same_run(
  now: checkpoint_lib.Metadata, then: checkpoint_lib.Metadata, workdir: storage.Path
) -> None:
  """Refuses to go on with a run under other settings or on other rows."""
  differences = []
  for section in (field.name for field in dataclasses.fields(now.config)):
    old, new = getattr(then.config, section), getattr(now.config, section)
    for key in (field.name for field in dataclasses.fields(new)):
      was, value = getattr(old, key), getattr(new, key)
      if was != value and f"{section}.{key}" not in FREE:
        differences.append(f"  {section}.{key}: {was!r} then, {value!r} now")
  for field in dataclasses.fields(now.contract):
    was, value = getattr(then.contract, field.name), getattr(now.contract, field.name)
    if was != value:
      differences.append(f"  step contract, {field.name}: {was!r} then, {value!r} now")
  if not differences and now.rows_hash != then.rows_hash:
    differences.append("  the packed training rows: other data than then")
  if differences:
    raise ValueError(
      f"{workdir} holds a run with other settings; give this one its own --workdir, or go back to "
      "the old settings:\n" + "\n".join(differences)
    )


def other_packages(then: dict[str, str]) -> str:
  """Packages of which a checkpoint was written by another version than is here."""
  now = distributed.versions()
  changed = [name for name in now if name in then and then[name] != now[name]]
  return ", ".join(f"{name} {then[name]}, now {now[name]}" for name in changed)


def params_of(state: step_lib.TrainState) -> int:
  return sum(x.size for x in jax.tree.leaves(state.params))


def summary(c: config_lib.Experiment, manifest: dict, params: int, mesh, step: int) -> str:
  """What is trained, on what data and devices: the first lines on the screen."""
  targets = ", ".join(f"{count} {name}" for name, count in manifest["targets"].items())
  things = "texts" if c.loss.objective == "language_model" else "solutions"
  epochs = c.train.steps * c.train.batch_rows / manifest["rows"]
  lines = [
    f"{c.loss.objective.replace('_model', '')} model, {params:,} parameters, on {mesh.size} "
    f"{mesh.devices.flat[0].platform} device(s) as {dict(mesh.shape)}",
    f"{manifest['examples']:,} {things} ({targets}), {manifest['tokens']:,} tokens in "
    f"{manifest['rows']:,} rows of {c.data.row_length} ({manifest['fill']:.1%} full), "
    f"{c.train.steps} steps = {epochs:.1f} epochs",
  ]
  if manifest.get("merged"):
    paths = manifest["tokens_of_paths"]
    times = paths / manifest["tokens"]
    lines.append(f"prefix trees: {paths:,} tokens path by path, {times:.2f} times as many")
  if manifest["longer_than_a_row"]:
    lines.append(f"{len(manifest['longer_than_a_row'])} {things} were longer than a row and cut")
  if step:
    lines.append(f"resuming at step {step}")
  return "\n".join(lines)
