"""A small process reward model from scratch on real PRM800K rows (CPU, or any device).

  python scripts/prepare_data.py --dataset=prm800k --source=DIR --output=data/prm800k
  python scripts/train_tokenizer.py --data=data/prm800k --output=data/prm800k/tokenizer.model
  python scripts/train.py --config=configs/prm800k_small.py --workdir=runs/prm800k_small
  python scripts/evaluate.py --checkpoint=runs/prm800k_small --benchmark=prm800k \
    --data_dir=data/prm800k --output=runs/prm800k_small/evaluation.json
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
