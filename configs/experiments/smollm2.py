"""The experiments on real candidates, real labels and SmolLM2-135M, only to show that they run.

  python scripts/fetch_model.py smollm2-135m --output=models
  python scripts/prepare_data.py --dataset=prm800k --source=DIR --output=data/prm800k
  python scripts/experiment.py supervision --plan=configs/experiments/smollm2.py \
    --pool=candidates.jsonl --labels=data/prm800k --base=models/smollm2-135m --output_dir=runs/real

candidates.jsonl has records with `problem`, `text` or `steps`, `answer` and `is_correct`.  The plan
reads eight problems, four samples each, and holds out half of the problems.  Domains for `ood`:
--domains gsm8k=process_bench/gsm8k.jsonl omnimath=process_bench/omnimath.jsonl

Cost: noise takes 2.5 minutes on two CPU cores.  Expected: figures and tables at chance level.
"""

import dataclasses
import pathlib
import runpy

from prm_jax.config import Data, Experiment, Loss, Model, Optim, Train
from prm_jax.experiments.plan import Plan

CPU = pathlib.Path(__file__).with_name("cpu.py")


def config() -> Plan:
  def settings(objective: str, steps: int) -> Experiment:
    return Experiment(
      data=Data(separator="\n\n", row_length=512),
      model=Model(unroll_layers=False),
      loss=Loss(objective=objective),
      optim=Optim(learning_rate=1e-4, warmup_steps=1),
      train=Train(
        steps=steps, batch_rows=1, eval_every=steps, eval_rows=1, save_every=steps, keep=1
      ),
    )

  plan = runpy.run_path(str(CPU))["config"]()
  return dataclasses.replace(
    plan,
    process=settings("process", 2),
    outcome=settings("outcome", 2),
    labeller=settings("process", 4),
    files=dataclasses.replace(plan.files, problems=8, samples=4),
    seeds=(0,),
    samples=(1, 2),
    heads=2,
    generations=2,
    noise=(0.0, 0.2),
    language_model_weights=(0.0,),
    learning_rates=(1e-4,),
    updates=(1, 2),
    workers=0,
  )
