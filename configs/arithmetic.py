"""The embedded default: process and outcome reward models on generated arithmetic.

  python scripts/train.py --config=configs/arithmetic.py --workdir=runs/process \
    --config.data.directory=DIR --config.data.tokenizer=DIR/tokenizer.model
  the same with --config.loss.objective=outcome
"""

from prm_jax.config import Data, Experiment, Loss, Model, Optim, Train


def config() -> Experiment:
  return Experiment(
    data=Data(separator="\n", row_length=96),
    model=Model(
      width=64,
      layers=3,
      heads=8,
      kv_heads=8,
      head_size=8,
      mlp_width=176,
      rope_theta=300.0,
      tied_embeddings=False,
      embedding_std=0.6,
      unroll_layers=True,
    ),
    loss=Loss(language_model_weight=1.0),
    optim=Optim(learning_rate=4e-3, warmup_steps=50),
    train=Train(steps=5000, batch_rows=4, eval_every=1000, save_every=1000, log_every=100),
  )
