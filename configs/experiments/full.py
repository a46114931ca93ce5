"""The experiments on MATH: models of 1.5B on one host of eight v5e chips, labelled by one of 7B.

  python scripts/prepare_data.py --dataset=prm800k --output=data/prm800k
  python scripts/train.py --config=configs/prm800k_qwen2.5_math_7b.py --workdir=runs/qwen_7b
  python scripts/experiment.py NAME --scale=full --output_dir=runs/experiments

needs data/math_pool.jsonl, 1,000 graded samples of each of 12,000 training problems, and
data/math_test.jsonl, 1,000 of each of the 500 test problems, of one generator (grade.py adds
`is_correct`), and models/Qwen2.5-Math-1.5B.

Cost of supervision, by arithmetic alone: training sees 1, 5, 20 and 100 solutions of 12,000
problems once, three series and three seeds: at 350 tokens each 4.8 billion tokens.  The estimate in
configs/prm800k_qwen2.5_math_1.5b.py, 1.8 chip-hours for 62 million, makes that 138 chip-hours.
Scoring 500 by 1,000 test samples with 36 models is 6.3 billion tokens of a forward pass, a third of
the work each: 61.  Together 200 v5e chip-hours, 25 hours of the host, and the labels of the 7B
model on top: 0.42 billion tokens a seed.  Never run: no TPU was at hand.

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
  return dataclasses.replace(c, train=dataclasses.replace(c.train, **train))


def config() -> Plan:
  # 6,400 updates of 65,536 tokens see the largest set once; smaller sets get their share.
  small = of("prm800k_qwen2.5_math_1.5b.py", steps=6400)
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
    workers=0,
  )
