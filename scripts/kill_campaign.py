"""Kills a training run again and again, and compares what it becomes with one that was left alone.

  python scripts/kill_campaign.py --directory=runs/kills --kills=100

Each kill comes at a random moment of one of three kinds: while the run is starting, after a random
step, or inside a save.  Two of three are SIGKILL, the others SIGTERM, some of these twice.  The run
is then started again, until it has reached its last step; then another begins, until all kills are
spent.  Every run must end with the parameters and optimiser state of the uninterrupted one, bit for
bit, and with its metrics.jsonl, which has a line for every step: the loss of a step says which rows
it saw.  A start must go on from the newest finished checkpoint, and must never find one unreadable.

The processes are forks of this one, which saves them the seconds of importing; the model is tiny.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import re
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable

from prm_jax import config as config_lib

TRAIN = pathlib.Path(__file__).with_name("train.py")
UNFINISHED = "orbax-checkpoint-tmp"
TIMES = ("tokens_per_second", "step_seconds", "data_wait_seconds")  # a record's, never alike
PATIENCE = 600  # seconds without an end after which a run counts as hanging
CONFIG = '''"""The run of kill_campaign.py."""
from prm_jax.config import *


def config():
  return Experiment(
    data=Data(directory={data!r}, tokenizer={tokenizer!r}, separator="\\n", row_length=128),
    model=Model(width=16, layers=2, heads=4, kv_heads=2, head_size=4, mlp_width=24),
    optim=Optim(learning_rate=3e-3, warmup_steps=2),
    train=Train(steps={steps}, batch_rows=8, log_every=1, eval_every=7, eval_rows=8, save_every=5),
  )
'''


@dataclasses.dataclass(frozen=True)
class Args:
  directory: pathlib.Path  # new, for data, runs and the compiled programs
  kills: int = 100
  steps: int = 60  # of each run
  seed: int = 0  # of the moments
  output: pathlib.Path | None = None  # what is printed at the end, as JSON


@dataclasses.dataclass
class Child:
  """A process that runs `function`; what it prints goes to the file `log`."""

  function: Callable[[], None]
  log: pathlib.Path
  code: int | None = None  # exit code, or minus the signal

  def __post_init__(self):
    sys.stdout.flush(), sys.stderr.flush()
    self.pid = os.fork()
    if self.pid == 0:
      self._run()

  def _run(self) -> None:
    code = 1
    try:
      file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
      os.dup2(file, 1), os.dup2(file, 2)
      self.function()
      code = 0
    except SystemExit as error:
      if isinstance(error.code, str):
        print(error.code, file=sys.stderr)
      code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
      traceback.print_exc()
    finally:
      sys.stdout.flush(), sys.stderr.flush()
      os._exit(code)

  def poll(self) -> bool:
    """Whether it has ended."""
    if self.code is None:
      pid, status = os.waitpid(self.pid, os.WNOHANG)
      self.code = os.waitstatus_to_exitcode(status) if pid else None
    return self.code is not None

  def wait(self) -> int:
    until = time.monotonic() + PATIENCE
    while not self.poll():
      if time.monotonic() > until:
        os.kill(self.pid, signal.SIGKILL)
        raise SystemExit(f"kill_campaign.py: it hangs: {self.log}")
      time.sleep(0.005)
    return self.code

  def kill(self, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
      os.kill(self.pid, number)


def prepare(directory: pathlib.Path) -> None:
  from prm_jax.datasets import arithmetic, prepare
  from prm_jax.input_pipeline import step_dataset, tokenizers

  generator = arithmetic.Generator(train_problems=30, test_problems=6, candidates=8)
  prepare.prepare_arithmetic(directory, generator)
  texts = step_dataset.texts(directory, "train", 100)
  tokenizers.train_sentencepiece(texts, directory / "tokenizer.model", 320)


def train(config: pathlib.Path, workdir: pathlib.Path) -> None:
  sys.argv = [str(TRAIN), f"--config={config}", f"--workdir={workdir}"]
  runpy.run_path(str(TRAIN), run_name="__main__")


def records(workdir: pathlib.Path) -> list[dict]:
  """Whole lines of metrics.jsonl, but for what depends on the clock."""
  path, found = workdir / "metrics.jsonl", []
  for line in path.read_text().splitlines() if path.exists() else ():
    with contextlib.suppress(ValueError):  # being written
      record = json.loads(line)
      if record["split"] != "goodput":
        found.append({k: v for k, v in record.items() if k not in TIMES})
  return found


def compare(whole: pathlib.Path, killed: pathlib.Path) -> None:
  """Raises AssertionError if the runs are not the same."""
  import jax
  import numpy as np

  from prm_jax.model import sharding as sharding_lib
  from prm_jax.training import checkpoint, programs

  def state(workdir):
    with contextlib.closing(checkpoint.Checkpointer(workdir)) as checkpointer:
      step, about = checkpointer.latest()
      on = sharding_lib.make_mesh(config_lib.Mesh())
      shape = (about.vocab_size, len(about.contract.classes))
      abstract = programs.make(about.config, *shape, on).abstract
      return jax.tree.map(np.asarray, checkpointer.restore(step, abstract))

  jax.tree.map(np.testing.assert_array_equal, state(whole), state(killed))
  assert records(whole) == records(killed), "the metrics differ"


def finished(workdir: pathlib.Path) -> list[int]:
  """Steps of the finished checkpoints."""
  folder = workdir / "checkpoints"
  return (
    sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.exists() else []
  )


def unfinished(workdir: pathlib.Path) -> set[str]:
  folder = workdir / "checkpoints"
  return {p.name for p in folder.iterdir() if UNFINISHED in p.name} if folder.exists() else set()


def moment(
  kind: str, child: Child, workdir: pathlib.Path, start: int, startup: float, draw: random.Random
) -> bool:
  """Waits for a random moment of the kind; False: the run has ended before."""
  began = time.monotonic()
  delay = draw.uniform(0, {"start": startup, "step": 0.02, "save": 0.3}[kind])
  steps = draw.randint(1, 10)
  before = unfinished(workdir)  # left by the last kill: the run deletes them
  while not child.poll() and time.monotonic() - began < PATIENCE:
    if kind == "start":
      break
    if kind == "step" and any(r["step"] >= start + steps for r in records(workdir)[-1:]):
      break
    before &= (now := unfinished(workdir))
    if kind == "save" and now - before:
      break
    time.sleep(0.001)
  time.sleep(delay)
  return not child.poll()


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  directory = args.directory.resolve()
  if directory.exists():
    raise SystemExit(f"kill_campaign.py: {directory} exists; give a new --directory")
  directory.mkdir(parents=True)
  os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory / "programs")
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  import prm_jax.training.loop  # noqa: F401 - before the forks; no device is touched

  def done(name: str, function: Callable[[], None]) -> None:
    if Child(function, directory / f"{name}.log").wait():
      raise SystemExit(f"kill_campaign.py: {name}: {(directory / f'{name}.log').read_text()}")

  data, config = directory / "data", directory / "config.py"
  done("prepare", lambda: prepare(data))
  tokenizer = str(data / "tokenizer.model")
  config.write_text(CONFIG.format(data=str(data), tokenizer=tokenizer, steps=args.steps))
  for name in ("compile", "whole"):  # the second finds its programs compiled, as the killed will
    whole, clock = directory / name, time.monotonic()
    child = Child(functools.partial(train, config, whole), directory / f"{name}.log")
    while not records(whole) and not child.poll():
      time.sleep(0.001)
    startup = time.monotonic() - clock
    if child.wait():
      raise SystemExit(f"kill_campaign.py: {(directory / f'{name}.log').read_text()}")
  done("compare", lambda: compare(directory / "compile", whole))
  print(f"seed {args.seed}; {startup:.1f} s to the first step", flush=True)

  draw, counts, rounds, kills, inside = random.Random(args.seed), collections.Counter(), 0, 0, 0
  longest = 0.0
  clock = time.monotonic()
  while kills < args.kills:
    workdir = directory / f"run_{rounds}"
    while finished(workdir)[-1:] != [args.steps]:
      expected = (finished(workdir) or [0])[-1]
      log = directory / f"run_{rounds}_{kills}.log"
      child = Child(functools.partial(train, config, workdir), log)
      kind = draw.choices(("start", "step", "save"), (15, 40, 45))[0]
      name = draw.choices(("SIGKILL", "SIGTERM", "SIGTERM twice"), (6, 2, 1))[0]
      told = None
      if kills < args.kills and moment(kind, child, workdir, expected, startup, draw):
        told = None if name == "SIGKILL" else time.monotonic()
        child.kill(signal.SIGKILL if name == "SIGKILL" else signal.SIGTERM)
        if name == "SIGTERM twice":
          time.sleep(draw.uniform(0, 0.1))
          child.kill(signal.SIGTERM)
        kills += 1
        counts[f"{name}, {kind}"] += 1
      code, said = child.wait(), log.read_text()
      longest = max(longest, time.monotonic() - told if told else 0.0)
      inside += code == -signal.SIGKILL and bool(unfinished(workdir))
      resumed = re.search(r"resuming at step (\d+)", said)
      # ended by SIGTERM itself: before the run listened, or after it had done
      wrong = code not in (0, -signal.SIGKILL, os.EX_TEMPFAIL, -signal.SIGTERM)
      # Python prints what SIGTERM raises inside its garbage collector, and the run heeds it later
      errors = re.sub(r"^Exception ignored in: .*\nTraceback", "", said, flags=re.MULTILINE)
      wrong |= "does not read back" in said or "Traceback" in errors
      wrong |= resumed is not None and int(resumed[1]) != expected
      wrong |= (finished(workdir) or [0])[-1] < expected
      if wrong:
        raise SystemExit(f"kill_campaign.py: exit code {code}, expected step {expected}: {log}")
    done(f"compare_{rounds}", functools.partial(compare, whole, workdir))
    rounds += 1
    print(f"{kills} kills, {rounds} runs as the uninterrupted one", flush=True)
  result = {
    "seed": args.seed,
    "kills": kills,
    "kinds": dict(sorted(counts.items())),
    "sigkills_that_left_an_unfinished_save": inside,
    "seconds_from_sigterm_to_exit_at_most": round(longest, 2),
    "runs": rounds,
    "steps_of_a_run": args.steps,
    "minutes": round((time.monotonic() - clock) / 60, 1),
    "verdict": "every run ended with the state and metrics of the uninterrupted one, bit for bit",
  }
  print(json.dumps(result, indent=1))
  if args.output:
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
  main()
