"""Train steps compiled for TPU slices up to 1,024 chips, without one: memory, collectives, time.

Each compilation is a process of its own and stays in a file: an interrupted run goes on where it
was.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from importlib import util

from benchmarks import public_shapes
from benchmarks.training_report import table

from prm_jax import config as config_lib
from prm_jax.tpu import compile
from prm_jax.tpu.compile import Job

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Case:
  """A config file of the project on a slice, with some of its settings changed."""

  config: str
  topology: str
  shape: str = ""  # of public_shapes, in place of the config's own model
  rows: int | None = None
  tensor: int | None = None
  slices: int = 1
  step: str = "train"


# In the order of importance.  A config's own slice and settings are its production.
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


def job(case: Case, models: pathlib.Path) -> Job:
  """What is compiled; `models` is where config.json files of public models are written."""
  c = config_lib.read(str(ROOT / f"configs/prm800k_{case.config}.py"))
  shape = case.shape or pathlib.Path(c.init.checkpoint).name
  rows = case.rows or c.train.batch_rows
  steps = c.train.steps * c.train.batch_rows // rows  # over as much data
  c = dataclasses.replace(
    c,
    init=dataclasses.replace(c.init, checkpoint=public_shapes.write(models, shape)),
    mesh=dataclasses.replace(c.mesh, data=case.slices, tensor=case.tensor or c.mesh.tensor),
    train=dataclasses.replace(c.train, batch_rows=rows, steps=steps),
  )
  return Job(c, case.topology, case.step, case.slices)


def run(work: pathlib.Path, cases: tuple[Case, ...] = CASES) -> list[dict]:
  """Compiles everything, or reads what was.

  Returns:
    Reports (`ahead_of_time.report`), each with the name of its config.

  Raises:
    RuntimeError: the TPU compiler is not installed, or a compilation failed.
  """
  if util.find_spec("libtpu") is None:
    raise RuntimeError("the TPU compiler is not installed: pip install libtpu")
  done = []
  for case in cases:
    asked = job(case, work / "models")
    print(f"{case.config} on {case.topology}:", end=" ", file=sys.stderr, flush=True)
    found = compile.report(asked, compile.compiled(asked, work))
    print(f"{found['gib_per_chip']['needed']:.2f} GiB a chip", file=sys.stderr, flush=True)
    done.append(found | {"config": case.config, "process_seconds": found["compile_seconds"]})
  return done


def targets(done: list[dict]) -> list[dict]:
  """All fit, without unasked copies; the 7B step on v5e:8x8 uses 65 % of the peak."""
  fit = sum(found["fits"] for found in done)
  rows = [{"what": "steps that fit", "target": len(done), "measured": fit, "met": fit == len(done)}]
  for found in done:
    if (found["checkpoint"], found["topology"]) == ("Qwen2.5-Math-7B", "v5e:8x8"):
      what = "MFU of the 7B step on v5e:8x8, by the compiler's cycles alone"
      for key, words in (("alone", ""), ("without_attention", ", without attention's operations")):
        share = found.get("estimate", {}).get(f"mfu_by_cycles_{key}", 0.0)
        about = {"what": what + words, "target": 0.65, "measured": share, "met": share >= 0.65}
        rows.append(about)
  copies = sum(found["involuntary_rematerialisations"] for found in done)
  what = "copies of arrays that the compiler could not split (involuntary rematerialisation)"
  rows.append({"what": what, "target": 0, "measured": copies, "met": copies == 0})
  return rows


def tables(done: list[dict], met: list[dict]) -> str:
  """The reports as Markdown."""
  asked = table(
    ("target", "asked", "found", "met"),
    [
      (
        each["what"],
        f">= {each['target']:.0%}" if isinstance(each["target"], float) else each["target"],
        f"{each['measured']:.1%}" if isinstance(each["target"], float) else each["measured"],
        "yes" if each["met"] else "**no**",
      )
      for each in met
    ],
  )
  head = (
    "model",
    "slice (chips)",
    "mesh",
    "rows",
    "GiB a chip: arguments + temporaries",
    "headroom",
    "GiB over the links: beside arithmetic + alone",
    "s a step",
    "MFU: cycles alone",
    "MFU",
    "chip-hours",
  )
  return "\n\n".join([asked, table(head, [row(found) for found in done])])


def row(found: dict) -> tuple[str, ...]:
  """A report as a line of the table."""
  gib = found["gib_per_chip"]
  about = (
    found["checkpoint"] + (", scoring" if found["step"] == "score" else ""),
    " x ".join([found["topology"], *([f"{n} slices"] if (n := found["slices"]) > 1 else [])])
    + f" ({found['chips']:,})",
    " x ".join(str(size) for size in found["mesh"].values()),
    f"{found['rows']:,}",
  )
  if not found["fits"]:
    needed = f"**does not fit**: {gib['needed']:.2f} of {found['gib_of_a_chip']:.2f}"
    return (*about, needed, *[""] * 6)
  over = "not known"
  if found["collectives"] is not None:
    kinds = found["collectives"]["by_kind"]
    alone, beside = (
      sum(each["gib_over_links"] for each in kinds if each["beside_arithmetic"] == hidden)
      for hidden in (False, True)
    )
    over = f"{beside:.1f} + {alone:.1f}"
  guess = found["estimate"]
  share = guess.get("mfu_by_cycles_alone")
  return (
    *about,
    f"{gib['arguments']:.2f} + {gib['temporaries']:.2f} of {found['gib_of_a_chip']:.2f}",
    f"{found['headroom']:.0%}",
    over,
    f"{guess['seconds_per_step']:.2f}",
    "" if share is None else f"{share:.1%}",
    f"{guess['mfu']:.1%}" + ("" if share else " (no cycles)"),
    f"{found['run']['chip_hours']:.1f}" if "run" in found else "",
  )
