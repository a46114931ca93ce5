"""The same run on more devices and hosts, simulated on one machine: equal losses, and what is sent.

Devices are threads and hosts are processes here, so nothing is a speed.  Every job is
`scripts/train.py` on generated arithmetic; what devices exchange is read from the compiled step.
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
from benchmarks.training_report import table

from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.tpu import compile, hlo
from prm_jax.training import programs as programs_lib
from prm_jax.types import CLASSES

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/arithmetic.py"
DEVICES = 8  # the most that a layout has
UPDATES = 20
CLOSE = 1e-6  # sums in another order, in float32
PROBLEMS = 200
# Hosts, and devices along (data, fsdp, tensor).
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
STRONG_ROWS = 16  # of a batch, on however many devices
WEAK = ((1, (1, 1, 1)), (1, (1, 2, 1)), (2, (1, 4, 1)), (2, (1, 8, 1)))
WEAK_ROWS = 2  # of a batch, on each device
QUICK = {"strong": STRONG[:1] + STRONG[4:5], "weak": WEAK[:1], "updates": 2}


def run(quick: bool) -> list[dict]:
  """Trains in every layout; each with one device as well, where that has not been done."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", DEVICES)
  sizes = QUICK if quick else {"strong": STRONG, "weak": WEAK, "updates": UPDATES}
  layouts = [("strong", *layout, STRONG_ROWS) for layout in sizes["strong"]]
  layouts += [("weak", h, axes, WEAK_ROWS * int(np.prod(axes))) for h, axes in sizes["weak"]]
  out, alone = [], {}
  with tempfile.TemporaryDirectory() as directory:
    data = prepare(pathlib.Path(directory))
    for kind, hosts, axes, rows in layouts:
      say(f"{kind}: {hosts} hosts, mesh {axes}, {rows} rows a batch")
      c = experiment(data, axes, rows, sizes["updates"])
      if rows not in alone:
        alone[rows] = train(experiment(data, (1, 1, 1), rows, sizes["updates"]), data, 1)
      found = alone[rows] if axes == (1, 1, 1) else train(c, data, hosts)
      apart = np.abs(found / alone[rows] - 1).max()
      about = {"kind": kind, "hosts": hosts, "axes": axes, "rows": rows, "apart": float(apart)}
      out.append(about | exchanged(c))
  return out


def prepare(directory: pathlib.Path) -> pathlib.Path:
  """Generated problems and their tokenizer, by the project's own scripts."""
  data = directory / "data"
  script(
    "prepare_data.py",
    "--dataset=arithmetic",
    f"--arithmetic.train_problems={PROBLEMS}",
    "--arithmetic.test_problems=20",
    f"--output={data}",
  )
  script(
    "train_tokenizer.py", f"--data={data}", f"--output={data}/tokenizer.model", "--vocab_size=320"
  )
  return data


def script(name: str, *arguments: str) -> None:
  command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
  subprocess.run(command, check=True, capture_output=True, text=True)


def experiment(
  data: pathlib.Path, axes: tuple[int, int, int], rows: int, updates: int
) -> config_lib.Experiment:
  c = config_lib.read(str(CONFIG))
  return dataclasses.replace(
    c,
    data=dataclasses.replace(c.data, directory=str(data), tokenizer=str(data / "tokenizer.model")),
    mesh=config_lib.Mesh(*axes),
    train=dataclasses.replace(
      c.train, steps=updates, batch_rows=rows, log_every=1, eval_every=updates, save_every=updates
    ),
  )


def train(c: config_lib.Experiment, data: pathlib.Path, hosts: int) -> np.ndarray:
  """Losses and gradient norms of every update, by a job of so many hosts."""
  devices = c.mesh.data * c.mesh.fsdp * c.mesh.tensor
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  changed = {"data": ("directory", "tokenizer"), "mesh": ("data", "fsdp", "tensor")}
  changed["train"] = ("steps", "batch_rows", "log_every", "eval_every", "save_every")
  with tempfile.TemporaryDirectory(dir=data.parent) as workdir:
    command = [sys.executable, str(ROOT / "scripts/train.py"), f"--config={CONFIG}"]
    command += [f"--workdir={workdir}/run"]
    command += [
      f"--config.{section}.{key}={getattr(getattr(c, section), key)}"
      for section, keys in changed.items()
      for key in keys
    ]
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "JAX_NUM_CPU_DEVICES": str(devices // hosts),
    }
    jobs = []
    for i in range(hosts):
      of_host = [f"--hosts.coordinator_address={address}", f"--hosts.num_processes={hosts}"]
      of_host += [f"--hosts.process_id={i}"]
      jobs.append(
        subprocess.Popen(
          command + (of_host if hosts > 1 else []),
          env=environment,
          stdout=subprocess.DEVNULL,
          stderr=subprocess.PIPE,
          text=True,
        )
      )
    said = [job.communicate()[1] for job in jobs]
    for job, text in zip(jobs, said):
      if job.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{text[-2000:]}")
    lines = map(json.loads, (pathlib.Path(workdir) / "run/metrics.jsonl").read_text().splitlines())
    return np.array(
      [[line["loss"], line["gradient_norm"]] for line in lines if line["split"] == "train"]
    )


def exchanged(c: config_lib.Experiment) -> dict:
  """What a device holds and exchanges in a step, by the program compiled for simulated devices."""
  mesh = sharding_lib.make_mesh(c.mesh, jax.devices()[: c.mesh.data * c.mesh.fsdp * c.mesh.tensor])
  vocabulary = compile.resolved(c)[1]
  programs = programs_lib.make(c, vocabulary, len(CLASSES[c.loss.objective]), mesh)
  batch = compile.abstract_batch(c, mesh)
  with jax.set_mesh(mesh):
    compiled = programs.train_step.lower(programs.abstract, batch).compile()
  found = hlo.read(compiled.as_text()).collectives
  return {
    "state": sharding_lib.bytes_of_a_device(programs.abstract),
    "collectives": sum(each.times for each in found),
    "bytes": sum(each.traffic for each in found),
  }


def targets(done: list[dict]) -> list[dict]:
  """Losses and gradient norms are those of one device."""
  apart = max(each["apart"] for each in done)
  what = "largest relative difference of a loss or gradient norm to one device's"
  return [{"what": what, "target": CLOSE, "measured": apart, "met": apart <= CLOSE}]


def tables(done: list[dict]) -> str:
  """The figures as Markdown."""
  (goal,) = targets(done)
  met = "yes" if goal["met"] else "**no**"
  asked = (goal["what"], f"<= {goal['target']:.0e}", f"{goal['measured']:.1e}", met)
  head = (
    "scaling",
    "hosts",
    "mesh",
    "rows a batch",
    "differences to one device",
    "MB of state a device",
    "collectives a step",
    "MB a device and step",
  )
  rows = [
    (
      each["kind"],
      each["hosts"],
      " x ".join(map(str, each["axes"])),
      each["rows"],
      f"{each['apart']:.1e}",
      f"{each['state'] / 1e6:.2f}",
      each["collectives"],
      f"{each['bytes'] / 1e6:.2f}",
    )
    for each in done
  ]
  return "\n\n".join([table(("target", "asked", "found", "met"), [asked]), table(head, rows)])


def say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
