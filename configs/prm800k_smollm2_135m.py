"""A real model on real labels: SmolLM2-135M becomes a process reward model on PRM800K.

  python -m pip install ".[gguf]"
  python scripts/fetch_model.py smollm2-135m --output=models
  python scripts/prepare_data.py --dataset=prm800k --source=DIR --output=data/prm800k
  python scripts/train.py --config=configs/prm800k_smollm2_135m.py --workdir=runs/smollm2
  python scripts/evaluate.py --checkpoint=runs/smollm2 --benchmark=prm800k \
    --data_dir=data/prm800k --output=runs/smollm2/evaluation.json

DIR holds PRM800K's files.  The model (Apache License 2.0) comes from the Python package index; from
there on no network is needed.

One update trains on one row of about three and a half solutions; solutions of a problem share a
tree.  TRL's PRMTrainer takes four rows an update, with the same learning rate and optimiser;
scripts/benchmark.py training compares the two.  The separator is TRL's default too, and one token
to SmolLM2.  A newline inside a step is not mistaken for it: the head reads only where a step ends.

The head starts random, as TRL's does.  At this learning rate, in a run of 69 updates, a head of
zeros needed most of them to learn that seven steps in eight are right.

Cost: one epoch of 716 solutions (5,304 labels; 231,294 tokens as paths, 187,796 as trees, in 201
rows, one of them left out) on two CPU cores: 14 minutes (3 seconds an update) on one machine, some
25 on another; 5 GB of memory.  jemalloc saves up to a fifth of the time (docs/benchmarks.md,
"Training").

Expected, on 1,722 labels of 217 test solutions (seed 0; the ranges of two machines):

  step AUROC 0.646 to 0.653 (0.5 is chance)   log-likelihood -0.564 to -0.555 nats
  calibration error 0.013 to 0.020
  accuracy 0.82: the likeliest class calls nearly every step right, so look at AUROC

On ProcessBench and PRMBench: docs/judging.md, "Two models, judged".
"""

from prm_jax.config import Data, Experiment, Init, Loss, Model, Optim, Train


def config() -> Experiment:
  return Experiment(
    data=Data(directory="data/prm800k", separator="\n", row_length=1024),
    init=Init(checkpoint="models/smollm2-135m", head="random"),
    model=Model(unroll_layers=True),
    loss=Loss(objective="process"),
    optim=Optim(
      learning_rate=2e-5,
      warmup_steps=10,
      final_fraction=0.0,
      weight_decay=0.0,
      b2=0.999,
    ),
    train=Train(
      steps=200, batch_rows=1, log_every=8, eval_every=100, eval_rows=24, save_every=50, keep=1
    ),
  )
