# A handful of problems, to see in minutes that every stage works.  The figures mean nothing.
generator=models/smollm2-135m
bases=(models/smollm2-135m)
levels=()
reported=4
own=4
training=1
n=3
own_n=3
prompt=(--prompt=plain --steps=lines)
sampling=(--temperature=1 --max_new_tokens=24 --batch=8)
rollouts=(--rollouts=1)
parts=(1 2)
people_part=2
recipe=configs/mathematics/reward_model.py
updates=(--config.train.epochs=0 --config.train.steps=2 --config.train.eval_rows=2)
settings=("--temperature=0.5 --max_new_tokens=24")
