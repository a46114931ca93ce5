"""A small process reward model from scratch on real PRM800K rows (CPU, or any device).

  python scripts/prepare_data.py --dataset=prm800k --source=DIR --output=data/prm800k
  python scripts/train_tokenizer.py --data=data/prm800k --output=data/prm800k/tokenizer.model \
    --vocab_size=2000
  python scripts/train.py --config=configs/prm800k_small.py --workdir=runs/prm800k_small
  python scripts/evaluate.py --checkpoint=runs/prm800k_small --benchmark=prm800k \
    --data_dir=data/prm800k --output=runs/prm800k_small/evaluation.json

It only checks the pipeline.  It is not a useful verifier: a million parameters cannot learn
mathematics from a few hundred solutions.

Cost: 3 minutes on two CPU cores for 716 training solutions (some 5,300 labels).

Expected, on 1,722 labels of 217 test solutions (seed 0, one run):

  step AUROC 0.579 (0.5 is chance)   log-likelihood -0.587 nats   calibration error 0.008
  accuracy 0.819, all of it from calling every step positive: 1.000 of class 1, 0.000 of 0 and -1

Calibration is good because the model has learnt the classes' frequencies and little else.
"""

from prm_jax.config import Data, Experiment, Loss, Model, Optim, Train


def config() -> Experiment:
  return Experiment(
    data=Data(directory="data/prm800k", tokenizer="data/prm800k/tokenizer.model", row_length=1024),
    model=Model(width=128, layers=4, heads=4, kv_heads=2, head_size=32, mlp_width=352),
    loss=Loss(objective="process", language_model_weight=1.0),
    optim=Optim(learning_rate=2e-3, warmup_steps=20),
    train=Train(steps=150, batch_rows=4, log_every=10, eval_every=75, save_every=75, eval_rows=32),
  )
