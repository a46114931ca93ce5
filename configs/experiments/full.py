"""The experiments on MATH: models of 1.5B, labelled by one of 7B, on a v5e-16 slice.

  python scripts/prepare_data.py --dataset=prm800k --output=data/prm800k
  python scripts/experiment.py NAME --scale=full --output_dir=runs/experiments

needs data/math_pool.jsonl, 1,000 graded samples of each of 12,000 training problems, and
data/math_test.jsonl, 1,000 of each of the 500 test problems, of one generator (grade.py adds
`is_correct`), and the public models named below.

Cost of supervision, an estimate that nothing but arithmetic stands behind: training sees 1, 5, 20
and 100 solutions of 12,000 problems, three series and three seeds, at 350 tokens each 4.8 billion
tokens.  configs/prm800k_qwen2.5_math_1.5b.py takes 1.8 chip-hours for 62 million, so 138.  Scoring
500 by 1,000 test samples with 36 models is 6.3 billion tokens of a forward pass, a third of the
work each: 61.  Together about 200 v5e chip-hours, 12.5 hours of the slice.  active has 17 models a
seed in place of 12, and its selector scores the pool of 12 million samples, 4.2 billion tokens: 40
a seed.  Never run: no TPU was at hand.

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
  small = of("prm800k_qwen2.5_math_1.5b.py", steps=2000)
  outcome = dataclasses.replace(small, loss=dataclasses.replace(small.loss, objective="outcome"))
  plan = runpy.run_path(str(HERE / "experiments" / "cpu.py"))["config"]()
  return dataclasses.replace(
    plan,
    process=small,
    outcome=outcome,
    labeller=of("prm800k_qwen2.5_math_7b.py"),
    files=Files(
      pool="data/math_pool.jsonl",
      test="data/math_test.jsonl",
      labels="data/prm800k",
      base="models/Qwen2.5-Math-1.5B",
    ),
    seeds=(0, 1, 2),
    samples=(1, 5, 20, 100),
    workers=0,
  )
