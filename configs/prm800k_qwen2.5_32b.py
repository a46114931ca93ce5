"""Qwen2.5-32B as a process reward model on PRM800K, on a v5p-128 slice (64 chips).

  hf download Qwen/Qwen2.5-32B --local-dir=models/Qwen2.5-32B
  python scripts/prepare_data.py --dataset=prm800k --output=data/prm800k
  python scripts/train.py --config=configs/prm800k_qwen2.5_32b.py --workdir=runs/qwen_32b
  python scripts/export.py --checkpoint=runs/qwen_32b --output=exports/qwen_32b

Cost: about 10.4 minutes of steps (11.1 chip-hours), estimated from the compiler's cycles and stated
assumptions: 1.32 s a step, 66% of the chips' peak. Loading, compilation, evaluation and checkpoints
come on top. The 475 steps are two epochs (as in the paper, F.1) of about 31 million tokens: 97,782
phase-2 solutions at 317 tokens each, as in the sample at hand. Memory per chip, by the compiler:
5.64 GiB of parameters, optimiser state and batch, and 25.33 GiB of temporaries, of 95 GiB (headroom
67%). Time and memory come from

  python scripts/compile_for_tpu.py --config=configs/prm800k_qwen2.5_32b.py \
    --topology=v5p:4x4x4

Expected: unknown. It was never run, as no TPU was at hand. No public PRM of this size that was
trained on PRM800K alone was found for comparison. The learning rate is search-and-learn's, here for
some 400 solutions an update; sweep it on a tenth of the data, as the paper did.
"""

from prm_jax.config import Data, Experiment, Init, Mesh, Model, Optim, Train


def config() -> Experiment:
  return Experiment(
    data=Data(directory="data/prm800k", separator="\n\n", row_length=4096),
    init=Init(checkpoint="models/Qwen2.5-32B"),
    model=Model(  # the checkpoint's shape, so that compile_for_tpu.py runs without it
      width=5120,
      layers=64,
      heads=40,
      head_size=128,
      mlp_width=27_648,
      norm_epsilon=1e-5,
      attention_bias=True,
      rope_theta=1e6,
      tied_embeddings=False,
      vocab_size=152_064,
      dtype="bfloat16",
      remat="full",
      saved=("attention", "attention_inputs", "residual", "gate", "up"),
    ),
    optim=Optim(learning_rate=1e-6, warmup_steps=20),
    mesh=Mesh(fsdp=-1, tensor=2),
    train=Train(steps=475, batch_rows=32, log_every=10, eval_every=100, save_every=100),
  )
