"""The peer of the training benchmark: TRL's PRMTrainer, in a virtual environment of its own.

  python trl_peer.py SETTINGS.json

Reads its settings, trains once over the rows and writes what it measured to settings["output"].
It stands alone: no part of prm_jax is imported, nor installed beside it.
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import sys
import tempfile
import time


def main() -> None:
  settings = json.loads(pathlib.Path(sys.argv[1]).read_text())
  os.environ["OMP_NUM_THREADS"] = str(settings["threads"])  # before torch
  os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
  import torch

  torch.set_num_threads(settings["threads"])
  result = measure(settings)
  packages = ("trl", "torch", "transformers", "accelerate", "datasets")
  result["versions"] = {name: importlib.metadata.version(name) for name in packages}
  result["versions"]["python"] = platform.python_version()
  result["threads"] = torch.get_num_threads()
  output = pathlib.Path(settings["output"])
  unfinished = output.with_suffix(".unfinished")
  unfinished.write_text(json.dumps(result) + "\n")
  unfinished.replace(output)


def measure(settings: dict) -> dict:
  import torch
  import transformers
  from trl.experimental.prm import PRMConfig, PRMTrainer

  start = time.perf_counter()
  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=settings["tokenizer"])
  tokenizer.add_special_tokens({"pad_token": tokenizer.convert_ids_to_tokens(settings["pad_id"])})
  transformers.set_seed(settings["seed"])  # of the head, which is random
  model = transformers.AutoModelForTokenClassification.from_pretrained(
    settings["model"], num_labels=2, dtype=torch.float32
  )
  loaded = time.perf_counter() - start
  counts = {"slots": 0, "tokens": 0, "steps": 0}
  train, test = (read(settings[key]) for key in ("train", "test"))

  class Counted(PRMTrainer):
    def training_step(self, model, inputs, *args, **kwargs):
      # not in the collator, which is one batch ahead when max_updates ends the training
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
        warmup_steps=settings["warmup_updates"],
        weight_decay=settings["weight_decay"],
        adam_beta1=settings["b1"],
        adam_beta2=settings["b2"],
        max_grad_norm=settings["clip_norm"],
        max_length=settings["max_length"],
        step_separator=settings["separator"],
        seed=settings["seed"],
        # TRL's defaults, bfloat16 and recomputed activations, would be slower here
        bf16=False,
        gradient_checkpointing=False,
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
    collate = trainer.data_collator
    before = evaluate(trainer.model, trainer.eval_dataset, collate, settings["batch"])

    class Clock(transformers.TrainerCallback):
      times, cpu = [], []

      def tick(self, *_, **__):
        self.times.append(time.perf_counter())
        self.cpu.append(time.process_time())

      on_train_begin = on_step_end = tick

    trainer.add_callback(Clock)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    after = evaluate(trainer.model, trainer.eval_dataset, collate, settings["batch"])
  return {
    "load_seconds": loaded,
    "train_seconds": Clock.times[-1] - Clock.times[0],
    "train_cpu_seconds": Clock.cpu[-1] - Clock.cpu[0],
    "update_seconds": [b - a for a, b in zip(Clock.times, Clock.times[1:])],
    "updates": len(Clock.times) - 1,
    "rows": len(trainer.train_dataset),
    **counts,
    "losses": losses,
    "before": before,
    "after": after,
  }


def read(path: str):
  """The rows of a JSON lines file as a dataset."""
  import datasets

  lines = pathlib.Path(path).read_text().splitlines()
  return datasets.Dataset.from_list([json.loads(line) for line in lines])


def evaluate(model, dataset, collate, batch: int) -> dict:
  """P(right) at each labelled separator, by row; and the labels."""
  import torch

  model.eval()
  scores, labels = [], []
  start = time.perf_counter()
  with torch.no_grad():
    for i in range(0, len(dataset), batch):
      rows = collate([dataset[j] for j in range(i, min(i + batch, len(dataset)))])
      given = rows.pop("labels")
      probabilities = model(**rows).logits.softmax(-1)[..., 1]
      for row, kept in zip(probabilities, given):
        scores.append(row[kept >= 0].tolist())
        labels.append(kept[kept >= 0].tolist())
  model.train()
  return {"scores": scores, "labels": labels, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
  main()
