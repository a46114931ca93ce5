# One host of four v5p chips (v5p:2x2x1): Qwen2.5-Math-7B-Instruct writes, Qwen2.5-Math-7B becomes
# reward models.
#
#   (source scripts/environment.sh; environment .venv '[tpu]')
#   .venv/bin/hf download Qwen/Qwen2.5-Math-7B-Instruct --local-dir=models/Qwen2.5-Math-7B-Instruct
#   .venv/bin/hf download Qwen/Qwen2.5-Math-7B --local-dir=models/Qwen2.5-Math-7B
#   python=.venv/bin/python bash scripts/mathematics.sh --source=PRM800K --scale=qwen2.5_math_7b
#
# Cost: about 14 chip-hours by the compiler's estimates, stage by stage in docs/mathematics.md.
# Expected: unknown.  It was never run, as no TPU was at hand.
generator=models/Qwen2.5-Math-7B-Instruct
bases=(models/Qwen2.5-Math-7B)
levels=()
reported=250
own=250
training=1000
n=64
own_n=16
prompt=(--prompt=chat --steps=paragraphs)
sampling=(--temperature=0.7 --max_new_tokens=1024 --dtype=bfloat16 --batch=1024 --tensor=4)
rollouts=(--rollouts=8 --balanced=4)
parts=(1 2 4)
recipe=configs/prm800k_qwen2.5_math_7b.py
updates=(
  --config.train.epochs=2 --config.train.microbatches=4
  --config.tpu.compiler_options xla_tpu_scoped_vmem_limit_kib=32768 # 7 % faster for this batch
)
settings=(
  "--temperature=0.7 --max_new_tokens=1024"
  "--temperature=1.0 --max_new_tokens=1024"
)
