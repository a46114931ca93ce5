"""How training scales: on simulated devices and hosts, and compiled for TPU slices.

Simulated: the same run by scripts/train.py on more devices and hosts, which are threads and
processes of this machine, beside one device.  Target: losses and gradient norms within 1e-6; no
speed is measured.  25 minutes.  Compiled: see benchmarks/slices.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import jax
import numpy as np

from benchmarks import runner, slices
from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.tpu import compilation, hlo
from prm_jax.training import step as step_lib
from prm_jax.types import CLASSES

PARTS = ("simulated", "compiled")
CONFIG = runner.ROOT / "configs/arithmetic.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(runner.ROOT), "JAX_PLATFORMS": "cpu"}
DEVICES = 8  # the most that a layout has
CLOSE = 1e-6  # relative; float32 sums in another order
# Hosts, and devices along (data, fsdp, tensor).  Strong: 16 rows in all; weak: 2 for each device.
STRONG = (
  (1, (1, 1, 1)),
  (1, (1, 8, 1)),
  (1, (1, 4, 2)),
  (1, (2, 2, 2)),
  (2, (1, 4, 2)),
  (4, (1, 4, 2)),
  (2, (2, 2, 2)),
  (4, (2, 2, 2)),
)
WEAK = ((1, (1, 1, 1)), (1, (1, 2, 1)), (2, (1, 4, 1)), (2, (1, 8, 1)))
QUICK_STRONG = (STRONG[0], STRONG[4])


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  skip: tuple[str, ...] = ()
  """A part to leave out: simulated or compiled."""
  work: pathlib.Path = runner.ROOT / "runs/benchmark_scaling"
  """Reports of finished compilations."""


def run(args: Args) -> dict:
  """Both parts, or the one that is not skipped."""
  if set(args.skip) - set(PARTS) or set(args.skip) == set(PARTS):
    raise ValueError(f"--skip {' '.join(args.skip)}: expected one of {PARTS}")
  out = {"targets": [], "tables": {}}
  if "simulated" not in args.skip:
    done = simulated(args.quick)
    apart = max(each["differences to one device"] for each in done)
    what = "largest relative difference of a loss or gradient norm to one device's"
    out["targets"].append(runner.target(what, "<=", CLOSE, apart))
    out["tables"]["Simulated devices and hosts"] = done
  if "compiled" not in args.skip:
    out["runs"] = slices.run(args.work, slices.CASES[:1] if args.quick else slices.CASES)
    out["targets"] += slices.targets(out["runs"])
    out["tables"]["Slices"] = [slices.row(found) for found in out["runs"]]
  return out


def simulated(quick: bool) -> list[dict]:
  """Rows of the table: every layout, held against one device with the same rows a batch."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", DEVICES)
  strong, weak, updates = (QUICK_STRONG, WEAK[:1], 2) if quick else (STRONG, WEAK, 20)
  layouts = [("strong", *layout, 16) for layout in strong]
  layouts += [("weak", hosts, axes, 2 * int(np.prod(axes))) for hosts, axes in weak]
  out, alone = [], {}
  with tempfile.TemporaryDirectory() as directory:
    data = prepare(pathlib.Path(directory, "data"))
    for kind, hosts, axes, rows in layouts:
      runner.say(f"{kind}: {hosts} hosts, mesh {axes}, {rows} rows a batch")
      flags = settings(data, axes, rows, updates)
      if rows not in alone:
        alone[rows] = train(settings(data, (1, 1, 1), rows, updates), directory, 1, 1)
      found = alone[rows]
      if axes != (1, 1, 1):
        found = train(flags, directory, hosts, int(np.prod(axes)))
      apart = float(np.abs(found / alone[rows] - 1).max())
      out.append(
        {
          "scaling": kind,
          "hosts": hosts,
          "mesh": " x ".join(map(str, axes)),
          "rows a batch": rows,
          "differences to one device": apart,
        }
        | exchanged(changed(config_lib.read(str(CONFIG)), flags))
      )
  return out


def prepare(data: pathlib.Path) -> pathlib.Path:
  """Generated problems and their tokenizer, by the project's own scripts."""
  sizes = ("--arithmetic.train_problems=200", "--arithmetic.test_problems=20")
  for name, *options in (
    ("prepare_data.py", "--dataset=arithmetic", *sizes, f"--output={data}"),
    (
      "train_tokenizer.py",
      f"--data={data}",
      f"--output={data}/tokenizer.model",
      "--vocab_size=320",
    ),
  ):
    command = [sys.executable, str(runner.ROOT / "scripts" / name), *options]
    subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT)
  return data


def settings(data: pathlib.Path, axes: tuple[int, int, int], rows: int, updates: int) -> dict:
  """What a run changes of configs/arithmetic.py, by section."""
  every = dict.fromkeys(("steps", "eval_every", "save_every"), updates)
  return {
    "data": {"directory": str(data), "tokenizer": f"{data}/tokenizer.model"},
    "mesh": dict(zip(sharding_lib.AXES, axes)),
    "train": every | {"batch_rows": rows, "log_every": 1},
  }


def changed(c: config_lib.Experiment, changes: dict[str, dict]) -> config_lib.Experiment:
  sections = {k: dataclasses.replace(getattr(c, k), **v) for k, v in changes.items()}
  return dataclasses.replace(c, **sections)


def train(changes: dict, directory: str, hosts: int, devices: int) -> np.ndarray:
  """Loss and gradient norm of every update, from a job of several processes."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  flags = [f"--config.{k}.{key}={x}" for k, v in changes.items() for key, x in v.items()]
  with tempfile.TemporaryDirectory(dir=directory) as workdir:
    command = [sys.executable, str(runner.ROOT / "scripts/train.py"), f"--config={CONFIG}"]
    command += [f"--workdir={workdir}/run", *flags]
    host = [f"--hosts.coordinator_address={address}", f"--hosts.num_processes={hosts}"]
    jobs = [
      subprocess.Popen(
        command + ([*host, f"--hosts.process_id={i}"] if hosts > 1 else []),
        env=ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(devices // hosts)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
      )
      for i in range(hosts)
    ]
    said = [job.communicate()[1] for job in jobs]
    for job, text in zip(jobs, said):
      if job.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{text[-2000:]}")
    lines = map(json.loads, pathlib.Path(workdir, "run/metrics.jsonl").read_text().splitlines())
    return np.array(
      [[line["loss"], line["gradient_norm"]] for line in lines if line["split"] == "train"]
    )


def exchanged(c: config_lib.Experiment) -> dict:
  """What a device holds and exchanges in a step, from the program compiled for it."""
  count = c.mesh.data * c.mesh.fsdp * c.mesh.tensor
  mesh = sharding_lib.make_mesh(c.mesh, jax.devices()[:count])
  vocabulary = compilation.resolved(c)[1]
  programs = step_lib.make(c, vocabulary, len(CLASSES[c.loss.objective]), mesh)
  batch = compilation.abstract_batch(c, mesh)
  with jax.set_mesh(mesh):
    compiled = programs.train_step.lower(programs.abstract, batch).compile()
  found = hlo.read(compiled.as_text()).collectives
  return {
    "MB of state a device": sharding_lib.bytes_of_a_device(programs.abstract) / 1e6,
    "collectives a step": sum(each.times for each in found),
    "MB a device and step": sum(each.traffic for each in found) / 1e6,
  }
