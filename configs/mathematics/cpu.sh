# Two CPU cores: Qwen2.5-Coder-0.5B writes; it and SmolLM2-135M become reward models.
generator=models/qwen2.5-coder-0.5b # --generator
bases=(models/smollm2-135m models/qwen2.5-coder-0.5b) # --base, of the reward models
levels=()      # levels of the test problems to take; none: all
reported=150   # --problems: number of problems to report on
own=120        # test problems of the other half, for labels and settings
training=100   # problems of PRM800K's training records, for the same
n=16           # --n: solutions of each problem that is reported on
own_n=8        # solutions of each other problem
prompt=(--prompt=chat --steps=paragraphs)
sampling=(--temperature=0.4 --max_new_tokens=400 --dtype=bfloat16 --batch=128)
rollouts=(--rollouts=4 --balanced=2)
reductions=(product soft_min) # the paper's; the best on problems that are not reported on
parts=(1 2 4)  # train on all (1 is required), half and a quarter of the problems
people_part=16 # of the human labels, about as many as the rollouts of training problems have
undivided=(qwen2.5-coder-0.5b) # these train on all problems only: a smaller part costs 3 hours
recipe=configs/mathematics/reward_model.py
updates=(--config.train.epochs=2 --config.model.dtype=bfloat16) # faster on some CPUs: prm-jax doctor
lora_bases=(qwen2.5-coder-0.5b) # LoRA trains these; the others train all weights
cpu_devices=2  # of scoring: attention keeps one core busy for each
settings=(     # --settings compares these
  "--temperature=0.4 --max_new_tokens=400"
  "--temperature=0.8 --max_new_tokens=400"
  "--temperature=0.4 --max_new_tokens=600"
)
