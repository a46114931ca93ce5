"""How training scales: on simulated devices and hosts, and compiled for TPU slices.

Simulated: the same run by scripts/train.py on more devices and hosts, which are threads and
processes of this machine, beside one device.  Target: losses and gradient norms within 1e-6; no
speed is measured.  25 minutes.

Compiled: train steps for TPU slices of up to 1,024 chips: memory, collectives, estimated time.  No
TPU is needed, and no time is measured.  Targets: every step fits, the 7B step on v5e:8x8 reaches
65 % of the peak by the compiler's cycles, and no array is copied whole because it could not be
split.  25 minutes; compilations are kept.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from typing import Literal

import numpy as np

from benchmarks import kernel, runner
from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import families
from prm_jax.runtime import command_line
from prm_jax.tpu import compilation

CONFIG = runner.ROOT / "configs/arithmetic.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(runner.ROOT), "JAX_PLATFORMS": "cpu"}
ROWS = 16  # of a batch
# Hosts, and devices along (data, fsdp, tensor).
LAYOUTS = (
  (1, (1, 1, 1)),
  (2, (1, 4, 2)),
  (1, (1, 8, 1)),
  (1, (2, 2, 2)),
  (4, (1, 4, 2)),
  (4, (2, 2, 2)),
)
# The architecture of Llama-3.2-1B, which no config file has.
LLAMA = {"width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "head_size": 64}
LLAMA |= {"mlp_width": 8192, "norm_epsilon": 1e-5, "rope_theta": 5e5, "vocab_size": 128_256}
CODE = ("config.py", "types.py", "model", "training", "tpu", "runtime/compiler_options.py")


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  skip: Literal["none", "simulated", "compiled"] = "none"  # a part to leave out
  work: pathlib.Path = runner.ROOT / "runs/benchmark_scaling"  # reports of finished compilations


@dataclasses.dataclass(frozen=True)
class Case:
  """A config file of the project on a slice, with some of its settings changed."""

  config: str
  topology: str
  llama: bool = False  # that model in place of the config's own
  rows: int | None = None
  tensor: int | None = None
  slices: int = 1
  step: str = "train"


# The most important first.  A config's own slice and settings are its production.
CASES = (
  Case("qwen2.5_math_7b", "v5e:8x8", rows=64),
  Case("qwen2.5_math_1.5b", "v5e:4x4", llama=True),
  Case("qwen2.5_math_7b", "v5p:2x4x4"),
  Case("qwen2.5_math_1.5b", "v5e:4x4"),
  Case("qwen2.5_math_7b", "v6e:8x8", rows=64),
  Case("qwen2.5_math_7b", "v5p:4x4x4", rows=64),
  Case("qwen2.5_math_7b", "v5p:8x8x16", rows=256, tensor=4),
  Case("qwen2.5_32b", "v5p:8x8x16", rows=256, tensor=4),
  Case("qwen2.5_math_72b", "v5p:4x4x8"),
  Case("gemma3_4b", "v5p:2x4x4"),
  Case("qwen2.5_32b", "v5p:4x4x4"),
  Case("qwen2.5_math_7b", "v5p:2x4x4", step="score"),
  Case("qwen2.5_math_7b", "v5p:4x4x4", rows=128, slices=2),
)


def run(args: Args) -> dict:
  """Both parts, or the one that is not skipped."""
  out = {"targets": [], "tables": {}}
  if args.skip != "simulated":
    rows = simulated(*((LAYOUTS[:2], 2) if args.quick else (LAYOUTS, 20)))
    what = "largest relative difference of a loss or gradient norm to one device's"
    apart = max(row["difference to one device"] for row in rows)
    # float32 sums in another order
    out["targets"].append(runner.target(what, "<=", 1e-6, apart))
    out["tables"]["Simulated devices and hosts"] = rows
  if args.skip != "compiled":
    out["runs"] = compiled(args.work, CASES[:1] if args.quick else CASES)
    out["targets"] += targets(out["runs"])
    out["tables"]["Slices"] = [row(found) for found in out["runs"]]
  return out


def simulated(layouts: tuple, updates: int) -> list[dict]:
  """Rows of the table: every layout, held against the first, which is one device."""
  out, alone = [], None
  with tempfile.TemporaryDirectory() as directory:
    data = f"{directory}/data"
    sizes = ("--arithmetic.train_problems=200", "--arithmetic.test_problems=20")
    tokenizer = (f"--data={data}", f"--output={data}/tokenizer.model", "--vocab_size=320")
    finish([start(("prepare_data.py", "--dataset=arithmetic", *sizes, f"--output={data}"))])
    finish([start(("train_tokenizer.py", *tokenizer))])
    for i, (hosts, axes) in enumerate(layouts):
      runner.say(f"{hosts} hosts, mesh {axes}")
      found = train(data, f"{directory}/run{i}", hosts, axes, updates)
      alone = found if alone is None else alone
      out.append(
        {
          "hosts": hosts,
          "mesh": " x ".join(map(str, axes)),
          "rows a batch": ROWS,
          "difference to one device": float(np.abs(found / alone - 1).max()),
        }
      )
  return out


def start(command: tuple[str, ...], devices: int = 1) -> subprocess.Popen:
  """A script of the project on simulated devices, started."""
  name, *options = command
  return subprocess.Popen(
    [sys.executable, str(runner.ROOT / "scripts" / name), *options],
    env=ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(devices)},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(jobs: list[subprocess.Popen]) -> None:
  """RuntimeError: one of the processes failed."""
  for job, (_, text) in [(job, job.communicate()) for job in jobs]:
    if job.returncode:
      raise RuntimeError(f"{' '.join(job.args)} failed:\n{text[-2000:]}")


def train(
  data: str, workdir: str, hosts: int, axes: tuple[int, int, int], updates: int
) -> np.ndarray:
  """Loss and gradient norm of every update, from a job of several processes."""
  settings = dict(zip((f"mesh.{axis}" for axis in sharding_lib.AXES), axes))
  settings |= {f"train.{name}": updates for name in ("steps", "eval_every", "save_every")}
  settings |= {"train.batch_rows": ROWS, "train.log_every": 1}
  settings |= {"data.directory": data, "data.tokenizer": f"{data}/tokenizer.model"}
  command = ("train.py", f"--config={CONFIG}", f"--workdir={workdir}")
  command += tuple(f"--config.{name}={value}" for name, value in settings.items())
  if hosts > 1:
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      address = f"127.0.0.1:{free.getsockname()[1]}"
    command += (f"--hosts.coordinator_address={address}", f"--hosts.num_processes={hosts}")
  own = lambda i: (f"--hosts.process_id={i}",) if hosts > 1 else ()
  finish([start(command + own(i), math.prod(axes) // hosts) for i in range(hosts)])
  lines = map(json.loads, pathlib.Path(workdir, "metrics.jsonl").read_text().splitlines())
  return np.array([[x["loss"], x["gradient_norm"]] for x in lines if x["split"] == "train"])


def job(case: Case) -> compilation.Job:
  """The job of a case."""
  c = command_line.read(str(runner.ROOT / f"configs/prm800k_{case.config}.py"))
  if case.llama:
    choices = {name: getattr(c.model, name) for name in families.CHOICES}
    c = dataclasses.replace(
      c,
      init=config_lib.Init(checkpoint="models/Llama-3.2-1B"),
      model=config_lib.Model(**LLAMA, **choices),
    )
  rows = case.rows or c.train.batch_rows
  steps = c.train.steps * c.train.batch_rows // rows  # over as much data
  c = dataclasses.replace(
    c,
    mesh=dataclasses.replace(c.mesh, data=case.slices, tensor=case.tensor or c.mesh.tensor),
    train=dataclasses.replace(c.train, batch_rows=rows, steps=steps),
  )
  return compilation.Job(c, case.topology, case.step, case.slices)


def compiled(work: pathlib.Path, cases: tuple[Case, ...]) -> list[dict]:
  """The reports (`compilation.report`) of all cases, each compiled in a process of its own."""
  files = [runner.ROOT / "prm_jax" / name for name in CODE]
  packages, done = runner.versions(*compilation.PACKAGES), []
  for case in cases:
    asked = job(case)
    settings = [dataclasses.asdict(case), dataclasses.asdict(asked.config), packages]
    name = f"{case.config}_{case.topology.replace(':', '_')}_{case.step}"
    call = functools.partial(runner.apart, compilation.compiled_report, asked, **kernel.COMPILER)
    done.append(runner.kept(work, name, settings, files, call))
  return done


def targets(done: list[dict]) -> list[dict]:
  """Of the compiled part; the first report is that of the 7B step on v5e:8x8."""
  share = done[0].get("estimate", {}).get("mfu_by_cycles_alone", 0.0)
  copies = sum(found["involuntary_rematerialisations"] for found in done)
  rows = (
    ("steps that fit", "=", len(done), sum(found["fits"] for found in done)),
    ("MFU of the 7B step on v5e:8x8, by the compiler's cycles alone", ">=", 0.65, share),
    ("involuntary rematerialisations: copies of arrays that could not be split", "=", 0, copies),
  )
  return [runner.target(*each) for each in rows]


def row(found: dict) -> dict:
  """A report as a line of the table."""
  gib, guess = found["gib_per_chip"], found.get("estimate", {})
  slices = f" x {found['slices']} slices" if found["slices"] > 1 else ""
  over, share = "not known", guess.get("mfu_by_cycles_alone")
  if found["collectives"]:
    over = [0.0, 0.0]
    for each in found["collectives"]["by_kind"]:
      over[not each["beside_arithmetic"]] += each["gib_over_links"]
    over = "{:.1f} + {:.1f}".format(*over)
  return {
    "model": found["checkpoint"] + (", scoring" if found["step"] == "score" else ""),
    "slice (chips)": f"{found['topology']}{slices} ({found['chips']:,})",
    "mesh": " x ".join(str(size) for size in found["mesh"].values()),
    "rows": found["rows"],
    "GiB a chip": f"{gib['needed'] or math.inf:.2f} of {found['gib_of_a_chip']:.2f}",
    "headroom": f"{found['headroom']:.0%}" if found["fits"] else "**does not fit**",
    "GiB over the links: beside arithmetic + alone": over,
    "s a step": guess.get("seconds_per_step"),
    "MFU: cycles alone": share and f"{share:.1%}",
    "MFU": guess and f"{guess['mfu']:.1%}",
    "chip-hours": found["run"]["chip_hours"] if "run" in found else None,
  }
