"""The peer of the generation benchmark: transformers' `generate`, in its own environment.

  python generation_peer.py SETTINGS.json

It stands alone: no part of prm_jax is imported.
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
  """Tokens and seconds of each run asked for, and what they depend on.

  A run has a dtype, a batch, prompts (the first so many) and the most new tokens.  Prompts are
  sorted by length, and each batch is padded at its left.
  """
  import torch
  import transformers

  torch.set_num_threads(settings["threads"])
  torch.manual_seed(0)
  found, models = [], {}
  for run in settings["runs"]:
    if run["dtype"] not in models:
      models.clear()
      models[run["dtype"]] = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=getattr(torch, run["dtype"]), attn_implementation="sdpa"
      ).eval()
    model = models[run["dtype"]]
    prompts = sorted(settings["prompts"][: run["prompts"]], key=len)
    each = min(settings["samples"], run["batch"])
    rows = [prompt for prompt in prompts for _ in range(settings["samples"] // each)]
    size = run["batch"] // each
    generate(model, rows[:size], each, 2, settings)  # what the first call prepares
    start, tokens = time.perf_counter(), 0
    for i in range(0, len(rows), size):
      tokens += generate(model, rows[i : i + size], each, run["max_new_tokens"], settings)
    found.append(run | {"tokens": tokens, "seconds": time.perf_counter() - start})
  versions = {name: metadata.version(name) for name in ("torch", "transformers")}
  return {"runs": found, "versions": versions}


def generate(model, rows: list[list[int]], each: int, most: int, settings: dict) -> int:
  """Samples of each row; the number of tokens up to the ends of the samples, end tokens too."""
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
      num_return_sequences=each,
      max_new_tokens=most,
      eos_token_id=settings["end_tokens"],
      pad_token_id=pad,
    )[:, width:]
  ended = torch.isin(out, torch.tensor(settings["end_tokens"]))
  before = (ended.cumsum(1) - ended.int()) == 0  # tokens with no end before them
  return int(before.sum())


if __name__ == "__main__":
  main()
