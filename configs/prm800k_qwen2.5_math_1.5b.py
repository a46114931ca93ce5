"""Qwen2.5-Math-1.5B as a process reward model on PRM800K, on a v5e-16 slice.

  hf download Qwen/Qwen2.5-Math-1.5B --local-dir=models/Qwen2.5-Math-1.5B
  python scripts/prepare_data.py --dataset=prm800k --output=data/prm800k
  python scripts/train.py --config=configs/prm800k_qwen2.5_math_1.5b.py --workdir=runs/qwen_1.5b
  python scripts/export.py --checkpoint=runs/qwen_1.5b --output=exports/qwen_1.5b

Cost: about 6.5 minutes of steps (1.7 chip-hours), estimated from the compiler's cycles and stated
assumptions: 0.41 s a step, 45% of the chips' peak. Loading, compilation, evaluation and checkpoints
come on top. The 950 steps are two epochs (as in the paper, F.1) of about 31 million tokens: 97,782
phase-2 solutions at 317 tokens each, as in the sample at hand. Memory per chip, by the compiler:
1.08 GiB of parameters, optimiser state and batch, and 6.02 GiB of temporaries, of 15.75 GiB
(headroom 55%). Time and memory come from

  python scripts/compile_for_tpu.py --config=configs/prm800k_qwen2.5_math_1.5b.py \
    --topology=v5e:4x4

Expected: unknown. It was never run, as no TPU was at hand. Public PRMs of this size trained on
PRM800K with TRL reach a mean ProcessBench F1 of 40.4 (search-and-learn). The learning rate is
search-and-learn's, here for some 200 solutions an update; sweep it on a tenth of the data, as the
paper did.
"""

from prm_jax.config import Data, Experiment, Init, Mesh, Model, Optim, Train


def config() -> Experiment:
  return Experiment(
    data=Data(directory="data/prm800k", separator="\n\n", row_length=4096),
    init=Init(checkpoint="models/Qwen2.5-Math-1.5B"),
    model=Model(  # the checkpoint's shape, so that compile_for_tpu.py runs without it
      width=1536,
      layers=28,
      heads=12,
      kv_heads=2,
      head_size=128,
      mlp_width=8960,
      attention_bias=True,
      vocab_size=151_936,
      dtype="bfloat16",
      remat="full",
      saved=("attention", "attention_inputs", "residual", "gate", "up"),
    ),
    optim=Optim(learning_rate=1e-6, warmup_steps=40),
    mesh=Mesh(fsdp=-1, tensor=1),
    train=Train(steps=950, batch_rows=16, log_every=10, eval_every=100, save_every=100),
  )
