"""Checks how training scales: on simulated devices and hosts, and compiled for TPU slices.

Simulated: scripts/train.py makes the same run on one device and on more devices and hosts, which
are threads and processes of this machine.  Target: losses and gradient norms within 1e-6; no speed
is measured.

Compiled: the TPU compiler reports memory, collectives and estimated time of train steps for TPU
slices of up to 1,024 chips.  No TPU is needed, and no time is measured.  Targets: every step fits,
the 7B step on v5e:8x8 reaches 60 % of the peak by the full estimate, and no array is copied whole
because it could not be split.  Takes up to 31 minutes; --work stores the compilations.
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
from prm_jax.runtime import command_line, distributed
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
# The architecture of Llama-3.2-1B, for which there is no config file.
LLAMA = {"width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "head_size": 64}
LLAMA |= {"mlp_width": 8192, "norm_epsilon": 1e-5, "rope_theta": 5e5, "vocab_size": 128_256}
CODE = ("config.py", "types.py", "model", "training", "tpu", "runtime/compiler_options.py")


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  skip: Literal["none", "simulated", "compiled"] = "none"  # a part to leave out
  work: pathlib.Path = runner.ROOT / "runs/benchmark_scaling"  # reports of finished compilations


@dataclasses.dataclass(frozen=True)
class Case:
  """A config file of the project on a TPU slice, with some settings changed."""

  config: str
  topology: str
  llama: bool = False  # Llama-3.2-1B in place of the config's model
  rows: int | None = None
  tensor: int | None = None
  slices: int = 1
  step: str = "train"


# The most important case is first.  A config names the slice and settings of its production run.
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
  """Runs both parts, or the part that is not skipped."""
  out = {"targets": [], "tables": {}}
  if args.skip != "simulated":
    rows = simulated(*((LAYOUTS[:2], 2) if args.quick else (LAYOUTS, 20)))
    name = "largest relative difference of a loss or gradient norm to one device's"
    difference = max(row["difference to one device"] for row in rows)
    # float32 sums in another order
    out["targets"].append(runner.target(name, "<=", 1e-6, difference))
    out["tables"]["Simulated devices and hosts"] = rows
  if args.skip != "compiled":
    out["runs"] = compiled(args.work, CASES[:1] if args.quick else CASES)
    out["targets"] += targets(out["runs"])
    out["tables"]["Slices"] = [row(report) for report in out["runs"]]
  return out


def simulated(layouts: tuple, updates: int) -> list[dict]:
  """Returns rows of the table: every layout beside the first, which is one device."""
  out, single = [], None
  with tempfile.TemporaryDirectory() as directory:
    data = f"{directory}/data"
    sizes = ("--arithmetic.train_problems=200", "--arithmetic.test_problems=20")
    tokenizer = (f"--data={data}", f"--output={data}/tokenizer.model", "--vocab_size=320")
    finish([start(("prepare_data.py", "--dataset=arithmetic", *sizes, f"--output={data}"))])
    finish([start(("train_tokenizer.py", *tokenizer))])
    for i, (hosts, axes) in enumerate(layouts):
      runner.say(f"{hosts} hosts, mesh {axes}")
      metrics = train(data, f"{directory}/run{i}", hosts, axes, updates)
      single = metrics if single is None else single
      out.append(
        {
          "hosts": hosts,
          "mesh": " x ".join(map(str, axes)),
          "rows a batch": ROWS,
          "difference to one device": float(np.abs(metrics / single - 1).max()),
        }
      )
  return out


def start(command: tuple[str, ...], devices: int = 1) -> subprocess.Popen:
  """Starts a script of the project on simulated devices."""
  name, *options = command
  return subprocess.Popen(
    [sys.executable, str(runner.ROOT / "scripts" / name), *options],
    env=ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(devices)},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(jobs: list[subprocess.Popen]) -> None:
  """Waits for all processes; raises RuntimeError if one fails."""
  for job, (_, text) in [(job, job.communicate()) for job in jobs]:
    if job.returncode:
      raise RuntimeError(f"{' '.join(job.args)} failed:\n{text[-2000:]}")


def train(
  data: str, workdir: str, hosts: int, axes: tuple[int, int, int], updates: int
) -> np.ndarray:
  """Trains with a process per host, and returns loss and gradient norm of every update."""
  settings = dict(zip((f"mesh.{axis}" for axis in sharding_lib.AXES), axes))
  settings |= {f"train.{name}": updates for name in ("steps", "eval_every", "save_every")}
  settings |= {"train.batch_rows": ROWS, "train.log_every": 1}
  settings |= {"data.directory": data, "data.tokenizer": f"{data}/tokenizer.model"}
  command = ("train.py", f"--config={CONFIG}", f"--workdir={workdir}")
  command += tuple(f"--config.{name}={value}" for name, value in settings.items())
  if hosts > 1:
    with socket.socket() as free_port:
      free_port.bind(("127.0.0.1", 0))
      address = f"127.0.0.1:{free_port.getsockname()[1]}"
    command += (f"--hosts.coordinator_address={address}", f"--hosts.num_processes={hosts}")
  process_id = lambda i: (f"--hosts.process_id={i}",) if hosts > 1 else ()
  finish([start(command + process_id(i), math.prod(axes) // hosts) for i in range(hosts)])
  lines = map(json.loads, pathlib.Path(workdir, "metrics.jsonl").read_text().splitlines())
  return np.array([[x["loss"], x["gradient_norm"]] for x in lines if x["split"] == "train"])


def job(case: Case) -> compilation.Job:
  """Returns the compilation job of a case."""
  c = command_line.read(str(runner.ROOT / f"configs/prm800k_{case.config}.py"))
  if case.llama:
    choices = {name: getattr(c.model, name) for name in families.CHOICES}
    c = dataclasses.replace(
      c,
      init=config_lib.Init(checkpoint="models/Llama-3.2-1B"),
      model=config_lib.Model(**LLAMA, **choices),
    )
  rows = case.rows or c.train.batch_rows
  steps = c.train.steps * c.train.batch_rows // rows  # the same amount of data
  c = dataclasses.replace(
    c,
    mesh=dataclasses.replace(c.mesh, data=case.slices, tensor=case.tensor or c.mesh.tensor),
    train=dataclasses.replace(c.train, batch_rows=rows, steps=steps),
  )
  return compilation.Job(c, case.topology, case.step, case.slices)


def compiled(work: pathlib.Path, cases: tuple[Case, ...]) -> list[dict]:
  """Returns the reports (`compilation.report`) of all cases, each compiled in its own process."""
  files = [runner.ROOT / "prm_jax" / name for name in CODE]
  packages, reports = distributed.versions(), []
  for case in cases:
    asked = job(case)
    settings = [dataclasses.asdict(case), dataclasses.asdict(asked.config), packages]
    name = f"{case.config}_{case.topology.replace(':', '_')}_{case.step}"
    call = functools.partial(runner.apart, compilation.compiled_report, asked, **kernel.COMPILER)
    reports.append(runner.kept(work, name, settings, files, call))
  return reports


def targets(reports: list[dict]) -> list[dict]:
  """Returns the targets of the compiled part; the 7B step on v5e:8x8 is the first report."""
  share = reports[0].get("estimate", {}).get("mfu", 0.0)
  copies = sum(report["involuntary_rematerialisations"] for report in reports)
  rows = (
    ("steps that fit", "=", len(reports), sum(report["fits"] for report in reports)),
    ("MFU of the 7B step on v5e:8x8", ">=", 0.6, share),
    ("involuntary rematerialisations: copies of arrays that could not be split", "=", 0, copies),
  )
  return [runner.target(*row) for row in rows]


def row(report: dict) -> dict:
  """Returns a report as a row of the table."""
  gib, estimate = report["gib_per_chip"], report.get("estimate", {})
  slices = f" x {report['slices']} slices" if report["slices"] > 1 else ""
  traffic, share = "not known", estimate.get("mfu_by_cycles_alone")
  if report["collectives"]:
    gib_over_links = {True: 0.0, False: 0.0}  # by whether it overlaps arithmetic
    for kind in report["collectives"]["by_kind"]:
      gib_over_links[kind["beside_arithmetic"]] += kind["gib_over_links"]
    traffic = "{:.1f} + {:.1f}".format(*gib_over_links.values())
  return {
    "model": report["checkpoint"] + (", scoring" if report["step"] == "score" else ""),
    "slice (chips)": f"{report['topology']}{slices} ({report['chips']:,})",
    "mesh": " x ".join(str(size) for size in report["mesh"].values()),
    "rows": report["rows"],
    "GiB a chip": f"{gib['needed'] or math.inf:.2f} of {report['gib_of_a_chip']:.2f}",
    "headroom": f"{report['headroom']:.0%}" if report["fits"] else "**does not fit**",
    "GiB over the links: beside arithmetic + alone": traffic,
    "s a step": estimate.get("seconds_per_step"),
    "MFU: cycles alone": share and f"{share:.1%}",
    "MFU": estimate and f"{estimate['mfu']:.1%}",
    "chip-hours": report["run"]["chip_hours"] if "run" in report else None,
  }
