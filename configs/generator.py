"""A generator that writes one step per line, fine-tuned on its own right solutions (paper 2.3, A).

  python scripts/fetch_model.py smollm2-135m --output=models
  python scripts/generate.py --model=models/smollm2-135m --prompt=few_shot --examples=solved.jsonl \
    --input=problems.jsonl --output=samples.jsonl --n=16
  python scripts/grade.py --input=samples.jsonl --output=graded.jsonl --right=data/right.jsonl
  and the same for held-out problems, to data/right_held_out.jsonl
  python scripts/train.py --config=configs/generator.py --workdir=runs/generator
  python scripts/generate.py --checkpoint=runs/generator --prompt=plain --input=test.jsonl \
    --output=test_samples.jsonl

The examples show the model the format, and its own right solutions teach it. Train for one epoch:
more would teach it the solutions. The first lines that train.py prints say how many epochs the
updates make; set --config.train.steps=UPDATES for one.

Cost: some 10 seconds an update of 1,024 tokens on two CPU cores beside other work (8 updates were
timed), half an hour for the 200. Samples come on top (docs/generation.md).

Expected: unknown. It was never run on real samples; tests/test_generate.py runs these commands with
a tiny model.
"""

from prm_jax.config import Data, Experiment, Init, Loss, Model, Optim, Train


def config() -> Experiment:
  return Experiment(
    data=Data(
      text_train="data/right.jsonl", text_eval="data/right_held_out.jsonl", row_length=1024
    ),
    init=Init(checkpoint="models/smollm2-135m"),
    model=Model(unroll_layers=True),
    loss=Loss(objective="language_model"),
    optim=Optim(learning_rate=2e-5, warmup_steps=10, weight_decay=0.0),
    train=Train(
      steps=200, batch_rows=1, log_every=10, eval_every=100, eval_rows=32, save_every=100
    ),
  )
