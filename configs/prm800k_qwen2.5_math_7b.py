"""Qwen2.5-Math-7B as a process reward model on PRM800K, on a v5p-64 slice (32 chips).

  hf download Qwen/Qwen2.5-Math-7B --local-dir=models/Qwen2.5-Math-7B
  python scripts/prepare_data.py --dataset=prm800k --output=data/prm800k
  python scripts/train.py --config=configs/prm800k_qwen2.5_math_7b.py --workdir=runs/qwen_7b
  python scripts/export.py --checkpoint=runs/qwen_7b --output=exports/qwen_7b

Cost: about 4.5 minutes of steps (2.4 chip-hours), estimated from the compiler's cycles and stated
assumptions: 0.57 s a step, 65% of the chips' peak. Loading, compilation, evaluation and checkpoints
come on top. The 475 steps are two epochs (as in the paper, F.1) of about 31 million tokens: 97,782
phase-2 solutions at 317 tokens each, as in the sample at hand. Memory per chip, by the compiler:
2.54 GiB of parameters, optimiser state and batch, and 14.11 GiB of temporaries, of 95 GiB (headroom
82%). Time and memory come from

  python scripts/compile_for_tpu.py --config=configs/prm800k_qwen2.5_math_7b.py \
    --topology=v5p:2x4x4

Expected: unknown. It was never run, as no TPU was at hand. Public PRMs of this size trained on
PRM800K reach a mean ProcessBench F1 of 56.5 (Qwen's) and 54.7 (search-and-learn's, with TRL). The
learning rate is search-and-learn's, here for some 400 solutions an update; sweep it on a tenth of
the data, as the paper did.
"""

from prm_jax.config import Data, Experiment, Init, Mesh, Model, Optim, Train


def config() -> Experiment:
  return Experiment(
    data=Data(directory="data/prm800k", separator="\n\n", row_length=4096),
    init=Init(checkpoint="models/Qwen2.5-Math-7B"),
    model=Model(  # the checkpoint's shape, so that compile_for_tpu.py runs without it
      width=3584,
      layers=28,
      heads=28,
      kv_heads=4,
      head_size=128,
      mlp_width=18_944,
      attention_bias=True,
      tied_embeddings=False,
      vocab_size=152_064,
      dtype="bfloat16",
      remat="full",
      saved=("attention", "attention_inputs", "residual", "gate", "up"),
    ),
    optim=Optim(learning_rate=1e-6, warmup_steps=20),
    mesh=Mesh(fsdp=-1, tensor=1),
    train=Train(steps=475, batch_rows=32, log_every=10, eval_every=100, save_every=100),
  )
