"""placeholder --config=configs/arithmetic.py"""

from prm_jax.config import Data, Experiment, Loss, Model, Optim, Train


def config() -> Experiment:
  return Experiment()
