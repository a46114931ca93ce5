"""The experiments at the smallest scale, only to show that they run: `--scale=smoke`."""

import dataclasses
import pathlib
import runpy

from prm_jax.datasets.arithmetic import Generator
from prm_jax.experiments.plan import Plan, Quickstart, Rollouts, Search
from prm_jax.experiments.tasks import Embedded

SIZES = Generator(train_problems=20, test_problems=6, candidates=16)  # of the quick start
CPU = pathlib.Path(__file__).with_name("cpu.py")


def config() -> Plan:
  plan = runpy.run_path(str(CPU))["config"]()
  return dataclasses.replace(
    plan,
    **{
      name: short(getattr(plan, name))
      for name in ("process", "outcome", "labeller", "process_base", "outcome_base")
    },
    search=Search(widths=(2, 4), problems=3, updates=40, labelled=4),
    rollouts=Rollouts(counts=(1, 2), problems=20, updates=8),
    quickstart=Quickstart(short(plan.quickstart.settings), 8, 8, SIZES),
    embedded=Embedded(pool_problems=12, pool_samples=8, test_problems=10, test_samples=16),
    seeds=(0, 1),
    samples=(1, 2),
    process_problems=100,
    outcome_problems=100,
    labeller_problems=50,
    domain_samples=8,
    generations=3,
    noise=(0.0, 0.2),
    learning_rates=(1e-3,),
    updates=(4, 8),
  )


def short(c):
  train = dataclasses.replace(c.train, steps=8, eval_every=8, save_every=8, log_every=4)
  return dataclasses.replace(c, train=train)
