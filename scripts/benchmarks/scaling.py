"""How training scales: the same run on more simulated devices and hosts, and train steps compiled
for TPU slices up to 1,024 chips.
"""

from __future__ import annotations

from benchmarks import compiled_topologies, simulated_scaling

PARTS = ("simulated", "compiled")


def run(args) -> dict:
  """Runs and compiles everything, or reads what was compiled.  `args`: of scripts/benchmark.py.

  Raises:
    RuntimeError: the TPU compiler is not installed, or a compilation or a run failed.
  """
  out = {}
  if "simulated" not in args.skip:
    out["simulated"] = simulated_scaling.run(args.quick)
    out["targets"] = simulated_scaling.targets(out["simulated"])
  if "compiled" not in args.skip:
    cases = compiled_topologies.CASES[:1] if args.quick else compiled_topologies.CASES
    out["compiled"] = compiled_topologies.run(args.work, cases)
    out["targets"] = out.get("targets", []) + compiled_topologies.targets(out["compiled"])
  return out


def tables(figures: dict) -> str:
  """The figures as Markdown."""
  out = []
  if simulated := figures.get("simulated"):
    out += ["### Simulated devices and hosts", simulated_scaling.tables(simulated)]
  if compiled := figures.get("compiled"):
    targets = compiled_topologies.targets(compiled)
    out += ["### Slices", compiled_topologies.tables(compiled, targets)]
  return "\n\n".join(out)
