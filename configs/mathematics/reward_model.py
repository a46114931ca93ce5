"""The reward models of scripts/mathematics.sh, which names the labels and the base model.

  python scripts/train.py --config=configs/mathematics/reward_model.py --workdir=runs/people \
    --config.data.directory=data/people --config.init.checkpoint=models/smollm2-135m

Learning rate, schedule and separator are those of configs/prm800k_smollm2_135m.py.  LoRA trains the
base models that a scale names in lora_bases, as in configs/prm800k_qwen2.5_coder_0.5b.py:
--config.model.lora_rank=16 --config.optim.trained=lora --config.optim.learning_rate=2e-4.

Cost: 3 seconds an update of a row of 1,024 tokens for SmolLM2-135M on two CPU cores, 4 to 6 for
Qwen2.5-Coder-0.5B with LoRA.

Expected: best-of-16 on MATH is no better than a majority vote.  docs/mathematics.md has the results
of each source of labels.
"""

from prm_jax.config import Data, Experiment, Init, Loss, Model, Optim, Train


def config() -> Experiment:
  return Experiment(
    data=Data(separator="\n", row_length=1024),
    init=Init(head="zeros"),
    model=Model(unroll_layers=True),
    loss=Loss(objective="process"),
    optim=Optim(
      learning_rate=2e-5, warmup_steps=10, final_fraction=0.0, weight_decay=0.0, b2=0.999
    ),
    train=Train(
      epochs=1, batch_rows=1, log_every=10, eval_every=1000, eval_rows=24, save_every=1000, keep=1
    ),
  )
