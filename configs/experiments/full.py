"""The experiments on MATH: models of 1.5B on one host of eight v5e chips, labelled by one of 7B.

  python scripts/prepare_data.py --dataset=prm800k --output=data/prm800k
  python scripts/train.py --config=configs/prm800k_qwen2.5_math_7b.py --workdir=runs/qwen_7b
  python scripts/experiment.py NAME --scale=full --output_dir=runs/experiments

Data: data/math_pool.jsonl, 1,000 graded samples of each of 12,000 training problems, and
data/math_test.jsonl, 1,000 of each of the 500 test problems, of one generator (grade.py adds
`is_correct`); and models/Qwen2.5-Math-1.5B.  `ood` needs --domains NAME=FILE as well.

The cost is an estimate: without a TPU at hand, the experiments were never run at this scale.  A
solution has 350 tokens, and configs/prm800k_qwen2.5_math_1.5b.py needs 1.7 v5e chip-hours for 62
million tokens; a forward pass alone is a third of that.  The table gives v5e chip-hours of three
seeds (tuning: two); eight chip-hours are an hour of the host:

  NAME          training   scoring the test   scoring the pool   together
  supervision        175                 66                           240
  active             127                 71                244        440
  generations          8                 30                730        770
  ood                 73                 10                            83
  noise               58                 41                            99
  tuning             220                 41                           260

Labels of the 7B model come on top, for three seeds of at most 0.42 billion tokens each.  Six models
a seed score the whole pool in `generations`; Files(samples=...) bounds that.  A model with its
optimiser takes 18 GB of disk, and `supervision` trains 39: delete a model once its .json exists.

The paper's own sizes (section 4): 1 to 200 samples of a problem, three seeds, best-of-500.
"""

import dataclasses
import pathlib
import runpy

from prm_jax.config import Experiment
from prm_jax.experiments.plan import Files, Plan

HERE = pathlib.Path(__file__).parent.parent


def of(name: str, **train) -> Experiment:
  c = runpy.run_path(str(HERE / name))["config"]()
  init = dataclasses.replace(c.init, checkpoint="")  # it starts from files.base
  return dataclasses.replace(c, init=init, train=dataclasses.replace(c.train, **train))


def config() -> Plan:
  # 6,400 updates of 65,536 tokens see the largest set once; smaller sets get fewer updates.
  small = of("prm800k_qwen2.5_math_1.5b.py", steps=6400, keep=1, keep_best=0)
  outcome = dataclasses.replace(small, loss=dataclasses.replace(small.loss, objective="outcome"))
  plan = runpy.run_path(str(HERE / "experiments" / "cpu.py"))["config"]()
  return dataclasses.replace(
    plan,
    process=small,
    outcome=outcome,
    files=Files(
      pool="data/math_pool.jsonl",
      test="data/math_test.jsonl",
      labeller="runs/qwen_7b",
      base="models/Qwen2.5-Math-1.5B",
    ),
    proportional=True,
    seeds=(0, 1, 2),
    samples=(1, 5, 20, 100),
    language_model_weights=(0.0,),
    learning_rates=(5e-7, 1e-6, 2e-6),
    updates=(3200, 6400),
    workers=0,
  )
