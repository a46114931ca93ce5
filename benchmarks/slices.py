"""Train steps compiled for TPU slices of up to 1,024 chips: memory, collectives, estimated time.

No TPU is needed, and no time is measured.  Targets: every step fits, the 7B step on v5e:8x8 reaches
65 % of the peak by the compiler's cycles, and no array is copied whole because it could not be
split.  25 minutes; compilations are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

from benchmarks import runner
from prm_jax import config as config_lib
from prm_jax.tpu import compilation

SHAPES = runner.ROOT / "benchmarks/public_shapes.json"  # config.json of public models, by name
COMPILER = {  # environment of a compilation
  "JAX_PLATFORMS": "cpu",
  **dict.fromkeys(("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "LIBTPU_INIT_ARGS")),
}
CODE = ("config.py", "types.py", "model", "training", "tpu")


@dataclasses.dataclass(frozen=True)
class Case:
  """A config file of the project on a slice, with some of its settings changed."""

  config: str
  topology: str
  shape: str = ""  # of SHAPES, in place of the config's own model
  rows: int | None = None
  tensor: int | None = None
  slices: int = 1
  step: str = "train"


# The most important first.  A config's own slice and settings are its production.
CASES = (
  Case("qwen2.5_math_7b", "v5e:8x8", rows=64),
  Case("qwen2.5_math_1.5b", "v5e:4x4", shape="Llama-3.2-1B"),
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


def job(case: Case, models: pathlib.Path) -> compilation.Job:
  """The job of a case; config.json of its public model is written into `models`."""
  c = config_lib.read(str(runner.ROOT / f"configs/prm800k_{case.config}.py"))
  shape = case.shape or pathlib.Path(c.init.checkpoint).name
  rows = case.rows or c.train.batch_rows
  steps = c.train.steps * c.train.batch_rows // rows  # over as much data
  c = dataclasses.replace(
    c,
    init=dataclasses.replace(c.init, checkpoint=write_config(models, shape)),
    mesh=dataclasses.replace(c.mesh, data=case.slices, tensor=case.tensor or c.mesh.tensor),
    train=dataclasses.replace(c.train, batch_rows=rows, steps=steps),
  )
  return compilation.Job(c, case.topology, case.step, case.slices)


def write_config(directory: pathlib.Path, name: str) -> str:
  """Writes a folder with a public model's config.json, as far as shapes; returns its path."""
  path, shapes = directory / name, json.loads(SHAPES.read_text())
  path.mkdir(parents=True, exist_ok=True)
  (path / "config.json").write_text(json.dumps(shapes[name]))
  return str(path.resolve())


def run(work: pathlib.Path, cases: tuple[Case, ...] = CASES) -> list[dict]:
  """The reports (`compilation.report`) of all cases, each compiled in a process of its own."""
  files = [runner.ROOT / "prm_jax" / name for name in CODE]
  packages = runner.versions(*compilation.PACKAGES)
  done = []
  for case in cases:
    asked = job(case, work / "models")
    c = dataclasses.replace(asked.config, init=config_lib.Init())  # its path says nothing
    settings = [dataclasses.asdict(case), dataclasses.asdict(c), packages]
    name = f"{case.config}_{case.topology.replace(':', '_')}_{case.step}"
    measure = functools.partial(runner.apart, compilation.compiled_report, asked, **COMPILER)
    done.append(runner.kept(work, name, settings, files, measure))
  return done


def targets(done: list[dict]) -> list[dict]:
  rows = [runner.target("steps that fit", "=", len(done), sum(found["fits"] for found in done))]
  for found in done:
    if (found["checkpoint"], found["topology"]) == ("Qwen2.5-Math-7B", "v5e:8x8"):
      what = "MFU of the 7B step on v5e:8x8, by the compiler's cycles alone"
      for key, words in (("alone", ""), ("without_attention", ", without attention's operations")):
        share = found.get("estimate", {}).get(f"mfu_by_cycles_{key}", 0.0)
        rows.append(runner.target(what + words, ">=", 0.65, share))
  copies = sum(found["involuntary_rematerialisations"] for found in done)
  what = "copies of arrays that the compiler could not split (involuntary rematerialisation)"
  return [*rows, runner.target(what, "=", 0, copies)]


def row(found: dict) -> dict:
  """A report as a line of the table."""
  gib, memory = found["gib_per_chip"], found["gib_of_a_chip"]
  slices = f" x {found['slices']} slices" if found["slices"] > 1 else ""
  out = {
    "model": found["checkpoint"] + (", scoring" if found["step"] == "score" else ""),
    "slice (chips)": f"{found['topology']}{slices} ({found['chips']:,})",
    "mesh": " x ".join(str(size) for size in found["mesh"].values()),
    "rows": found["rows"],
  }
  if not found["fits"]:
    return out | {"GiB a chip": f"**does not fit**: {gib['needed']:.2f} of {memory:.2f}"}
  over = "not known"
  if found["collectives"] is not None:
    beside, alone = (
      sum(
        each["gib_over_links"]
        for each in found["collectives"]["by_kind"]
        if each["beside_arithmetic"] == overlapped
      )
      for overlapped in (True, False)
    )
    over = f"{beside:.1f} + {alone:.1f}"
  guess = found["estimate"]
  share = guess.get("mfu_by_cycles_alone")
  return out | {
    "GiB a chip": f"{gib['arguments']:.2f} + {gib['temporaries']:.2f} of {memory:.2f}",
    "headroom": f"{found['headroom']:.0%}",
    "GiB over the links: beside arithmetic + alone": over,
    "s a step": guess["seconds_per_step"],
    "MFU: cycles alone": "" if share is None else f"{share:.1%}",
    "MFU": f"{guess['mfu']:.1%}" + ("" if share else " (no cycles)"),
    "chip-hours": found["run"]["chip_hours"] if "run" in found else None,
  }
