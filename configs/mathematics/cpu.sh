# Two CPU cores: Qwen2.5-Coder-0.5B writes, SmolLM2-135M and it become reward models.
generator=models/qwen2.5-coder-0.5b # --generator
bases=(models/smollm2-135m models/qwen2.5-coder-0.5b) # --base, of the reward models
levels=()      # of the test problems; none: all
reported=150   # --problems; the figures are about these
own=120        # test problems of the other half that everything else is made of,
training=100   # and problems of PRM800K's training records
n=16           # --n, samples of each problem that is reported on
own_n=8        # and of the others
prompt=(--prompt=chat --steps=paragraphs)
sampling=(--temperature=0.4 --max_new_tokens=400 --dtype=bfloat16 --batch=64)
rollouts=(--rollouts=4 --balanced=2)
reductions=(product soft_min) # of steps: the paper's, and the best on problems not reported on
parts=(1 2 4)  # models are trained on all (1 is needed), half and a quarter of the problems
recipe=configs/mathematics/reward_model.py
updates=(--config.train.epochs=2)
lora_bases=(qwen2.5-coder-0.5b) # trained with LoRA, the others with all weights
settings=(     # compared on own problems by --settings
  "--temperature=0.4 --max_new_tokens=400"
  "--temperature=0.8 --max_new_tokens=400"
  "--temperature=0.4 --max_new_tokens=600"
)
