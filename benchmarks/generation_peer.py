"""Runs the peer of the generation benchmark: transformers' `generate`, in its own environment.

  python generation_peer.py SETTINGS.json

It imports no part of prm_jax.
"""

import json
import os
import pathlib
import sys
import time
from importlib import metadata


def main() -> None:
  settings = json.loads(pathlib.Path(sys.argv[1]).read_text())
  os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
  pathlib.Path(settings["output"]).write_text(json.dumps(measure(settings)))


def measure(settings: dict) -> dict:
  """Returns tokens and seconds of each run in the settings, and the packages' versions.

  A run has a dtype, a batch size, a number of prompts (the first ones) and a limit of new tokens.
  Prompts are sorted by length, and each batch is padded at its left.
  """
  import torch
  import transformers

  torch.set_num_threads(settings["threads"])
  torch.manual_seed(0)
  runs, models = [], {}
  for run in settings["runs"]:
    if run["dtype"] not in models:
      models.clear()
      models[run["dtype"]] = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=getattr(torch, run["dtype"]), attn_implementation="sdpa"
      ).eval()
    model = models[run["dtype"]]
    prompts = sorted(settings["prompts"][: run["prompts"]], key=len)
    samples = min(settings["samples"], run["batch"])  # per row in one call
    rows = [prompt for prompt in prompts for _ in range(settings["samples"] // samples)]
    size = run["batch"] // samples
    generate(model, rows[:size], samples, 2, settings)  # warms up
    start, tokens = time.perf_counter(), 0
    for i in range(0, len(rows), size):
      tokens += generate(model, rows[i : i + size], samples, run["max_new_tokens"], settings)
    runs.append(run | {"tokens": tokens, "seconds": time.perf_counter() - start})
  versions = {name: metadata.version(name) for name in ("torch", "transformers")}
  return {"runs": runs, "versions": versions}


def generate(model, rows: list[list[int]], samples: int, limit: int, settings: dict) -> int:
  """Samples from each row, and returns the number of tokens up to and including the end tokens."""
  import torch

  width, pad = max(map(len, rows)), settings["end_tokens"][0]
  ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
  mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
  with torch.inference_mode():
    out = model.generate(
      ids,
      attention_mask=mask,
      do_sample=True,
      temperature=settings["temperature"],
      top_k=0,
      top_p=1.0,
      repetition_penalty=1.0,
      num_return_sequences=samples,
      max_new_tokens=limit,
      eos_token_id=settings["end_tokens"],
      pad_token_id=pad,
    )[:, width:]
  ended = torch.isin(out, torch.tensor(settings["end_tokens"]))
  before = (ended.cumsum(1) - ended.int()) == 0  # tokens with no end token before them
  return int(before.sum())


if __name__ == "__main__":
  main()
