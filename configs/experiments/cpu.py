"""The experiments at the scale of two CPU cores.

  python scripts/experiment.py NAME --output_dir=runs/experiments

Cost and results: docs/experiments.md.
"""

import pathlib
import runpy

from prm_jax.config import Data, Experiment, Loss, Optim, Train
from prm_jax.experiments.plan import Plan, Quickstart


def config() -> Plan:
  quick = runpy.run_path(str(pathlib.Path(__file__).parent.parent / "arithmetic.py"))["config"]()

  def settings(
    objective: str, learning_rate: float, steps: int, language_model_weight: float = 1.0
  ) -> Experiment:
    return Experiment(
      data=Data(separator="\n", row_length=128),
      model=quick.model,
      loss=Loss(objective=objective, language_model_weight=language_model_weight),
      optim=Optim(learning_rate=learning_rate, warmup_steps=50),
      train=Train(
        steps=steps,
        batch_rows=4,
        eval_every=steps,
        save_every=min(steps, 1000),
        log_every=200,
        keep=1,
      ),
    )

  return Plan(
    process=settings("process", 2e-3, 800, 0.0),  # the experiment tuning chose this and `outcome`
    outcome=settings("outcome", 1e-3, 800),
    labeller=settings("process", 2e-3, 4000),
    process_base=settings("process", 4e-3, 12_000),
    outcome_base=settings("outcome", 2e-3, 8000),
    quickstart=Quickstart(quick),
    seeds=(30, 31, 32, 33, 34),  # other seeds were looked at while the domain was made
    samples=(1, 2, 4, 8),
    generations=3,
    language_model_weights=(0.0, 1.0),
    learning_rates=(5e-4, 1e-3, 2e-3),
    updates=(200, 400, 800),
    workers=2,
  )
