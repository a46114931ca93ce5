"""Runs the peer of the training benchmark: TRL's PRMTrainer, in its own virtual environment.

  python trl_peer.py SETTINGS.json

Trains for at most one epoch and writes the figures to settings["output"].  Without settings it
prints the versions of its packages.  It imports no part of prm_jax.
"""

import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
from importlib import metadata

PACKAGES = ("trl", "torch", "transformers", "accelerate", "datasets")


def main() -> None:
  if len(sys.argv) < 2:
    return print(json.dumps({name: metadata.version(name) for name in PACKAGES}))
  settings = json.loads(pathlib.Path(sys.argv[1]).read_text())
  os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
  import torch

  torch.set_num_threads(settings["threads"])
  pathlib.Path(settings["output"]).write_text(json.dumps(measure(settings)))


def measure(settings: dict) -> dict:
  import datasets
  import torch
  import transformers
  from trl.experimental.prm import PRMConfig, PRMTrainer

  tokenizer_file = os.path.join(settings["model"], "tokenizer.json")
  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer_file)
  tokenizer.add_special_tokens({"pad_token": tokenizer.convert_ids_to_tokens(settings["pad_id"])})
  transformers.set_seed(settings["seed"])  # for the head, which is random
  model = transformers.AutoModelForTokenClassification.from_pretrained(
    settings["model"], num_labels=2, dtype=torch.float32
  )
  counts = {"slots": 0, "tokens": 0, "steps": 0}
  lines = [pathlib.Path(settings[key]).read_text().splitlines() for key in ("train", "test")]
  train, test = (datasets.Dataset.from_list([json.loads(x) for x in each]) for each in lines)

  class Counted(PRMTrainer):
    def training_step(self, model, inputs, *args, **kwargs):
      # counted here, because the collator is one batch ahead when max_updates ends the training
      counts["slots"] += inputs["input_ids"].numel()
      counts["tokens"] += int(inputs["attention_mask"].sum())
      counts["steps"] += int((inputs["labels"] >= 0).sum())
      return super().training_step(model, inputs, *args, **kwargs)

  with tempfile.TemporaryDirectory() as directory:
    trainer = Counted(
      model=model,
      args=PRMConfig(
        output_dir=directory,
        per_device_train_batch_size=settings["batch"],
        num_train_epochs=1,
        max_steps=settings["max_updates"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="cosine",
        warmup_steps=settings["warmup_steps"],
        weight_decay=settings["weight_decay"],
        adam_beta1=settings["b1"],
        adam_beta2=settings["b2"],
        max_grad_norm=settings["clip_norm"],
        max_length=settings["max_length"],
        step_separator=settings["separator"],
        seed=settings["seed"],
        bf16=settings["dtype"] == "bfloat16",
        gradient_checkpointing=False,  # TRL's default, recomputed activations, would be slower here
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
      ),
      train_dataset=train,
      eval_dataset=test,
      processing_class=tokenizer,
    )
    rows = trainer.eval_dataset, trainer.data_collator, settings["batch"]
    before = evaluate(trainer.model, *rows) if settings["evaluate"] else None

    class Clock(transformers.TrainerCallback):
      times, cpu = [], []

      def tick(self, *_, **__):
        self.times.append(time.perf_counter())
        self.cpu.append(time.process_time())

      on_train_begin = on_step_end = tick

    trainer.add_callback(Clock)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    after = evaluate(trainer.model, *rows) if settings["evaluate"] else None
  names = ("trl", "torch", "transformers", "accelerate", "datasets")
  return counts | {
    "versions": {name: metadata.version(name) for name in names},
    "train_seconds": Clock.times[-1] - Clock.times[0],
    "update_seconds": [end - start for start, end in itertools.pairwise(Clock.times)],
    "train_cpu_seconds": Clock.cpu[-1] - Clock.cpu[0],
    "updates": len(Clock.times) - 1,
    "losses": losses,
    "before": before,
    "after": after,
  }


def evaluate(model, dataset, collate, batch: int) -> dict:
  """Returns P(right) at each labelled separator, by row, and the labels."""
  import torch

  model.eval()
  scores, labels = [], []
  with torch.no_grad():
    for i in range(0, len(dataset), batch):
      rows = collate([dataset[j] for j in range(i, min(i + batch, len(dataset)))])
      batch_labels = rows.pop("labels")
      probabilities = model(**rows).logits.softmax(-1)[..., 1]
      for row, row_labels in zip(probabilities, batch_labels):
        scores.append(row[row_labels >= 0].tolist())
        labels.append(row_labels[row_labels >= 0].tolist())
  model.train()
  return {"scores": scores, "labels": labels}


if __name__ == "__main__":
  main()
