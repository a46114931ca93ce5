"""Gemma-3-4B (its text half) as a process reward model on PRM800K, on a v5p-64 slice (32 chips).

  hf download google/gemma-3-4b-pt --local-dir=models/gemma-3-4b-pt
  python scripts/prepare_data.py --dataset=prm800k --output=data/prm800k
  python scripts/train.py --config=configs/prm800k_gemma3_4b.py --workdir=runs/gemma_4b
  python scripts/score.py --checkpoint=runs/gemma_4b --input=samples.jsonl --output=scored.jsonl

Cost: about 3.2 minutes of steps (1.7 chip-hours), estimated from the compiler's cycles and stated
assumptions: 0.40 s a step, 46% of the chips' peak. Loading, compilation, evaluation and checkpoints
come on top. The 475 steps are two epochs (as in the paper, F.1) of about 31 million tokens: 97,782
phase-2 solutions at 317 tokens each, as in the sample at hand. Memory per chip, by the compiler:
1.36 GiB of parameters, optimiser state and batch, and 9.53 GiB of temporaries, of 95 GiB (headroom
89%). Time and memory come from

  python scripts/compile_for_tpu.py --config=configs/prm800k_gemma3_4b.py \
    --topology=v5p:2x4x4

Expected: unknown. It was never run, as no TPU was at hand. No public PRM of this base was found for
comparison. The learning rate is search-and-learn's, here for some 400 solutions an update; sweep it
on a tenth of the data, as the paper did.

Transformers has no token-classification class for Gemma 3, so export.py refuses this reward model;
score.py reads its checkpoint.
"""

from prm_jax.config import Data, Experiment, Init, Mesh, Model, Optim, Train


def config() -> Experiment:
  return Experiment(
    data=Data(directory="data/prm800k", separator="\n\n", row_length=4096),
    init=Init(checkpoint="models/gemma-3-4b-pt"),
    model=Model(  # the checkpoint's shape, so that compile_for_tpu.py runs without it
      width=2560,
      layers=34,
      kv_heads=4,
      head_size=256,
      mlp_width=10_240,
      activation="gelu_tanh",
      norm_offset=True,
      post_norms=True,
      query_key_norm=True,
      attention_scalar=256,
      window=1024,
      window_pattern="sssssf",
      rope_theta=1e6,
      local_rope_theta=10_000.0,
      rope_scaling="linear",
      rope_factor=8.0,
      scale_embeddings=True,
      vocab_size=262_208,
      dtype="bfloat16",
      remat="full",
      saved=("attention", "query", "key", "value", "output", "gate", "up"),
    ),
    optim=Optim(learning_rate=1e-6, warmup_steps=20),
    mesh=Mesh(fsdp=-1, tensor=1),
    train=Train(steps=475, batch_rows=32, log_every=10, eval_every=100, save_every=100),
  )
