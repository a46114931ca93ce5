"""Compiling for a slice that is not there."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.training import ahead_of_time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def compiled(tmp_path, topology, *options):
  """compile_for_tpu.py on the arithmetic config with a tokenizer of its own, in a process."""
  tokenizer = tmp_path / "tokenizer.model"
  if not tokenizer.exists():
    from prm_jax.input_pipeline import tokenizers

    tokenizers.train_sentencepiece(["1 + 2 = 3\n"] * 50, tokenizer, 320)
  return subprocess.run(
    [
      sys.executable,
      ROOT / "scripts/compile_for_tpu.py",
      f"--config={ROOT}/configs/arithmetic.py",
      f"--config.data.tokenizer={tokenizer}",
      f"--topology={topology}",
      f"--output={tmp_path}/compile.json",
      *options,
    ],
    capture_output=True,
    text=True,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
  )


def test_a_step_compiles_for_a_slice_without_one(tmp_path):
  """The state's bytes a chip are those of its shards, and the verdict follows from them."""
  pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install libtpu")
  done = compiled(tmp_path, "v5e:2x2", "--config.train.batch_rows=8")
  assert done.returncode == 0, done.stderr[-2000:]
  found = json.loads((tmp_path / "compile.json").read_text())
  assert found["chips"] == 4 and found["fits"]
  # parameters and two moments, float32, most of them split four ways
  assert 12 * found["parameters"] / 4 < found["gib_per_chip"]["arguments"] * 2**30
  assert found["gib_per_chip"]["arguments"] * 2**30 < 12 * found["parameters"]


def test_what_is_no_slice_is_refused_and_leaves_no_file(tmp_path):
  """A generation that is not known is named with those that are."""
  done = compiled(tmp_path, "v9:2x2")
  assert done.returncode and "v9:2x2: expected one of v4, v5e" in done.stderr
  assert not (tmp_path / "compile.json").exists()


def test_operations_of_a_step_are_counted_by_hand():
  """Six for each token and multiplied parameter, and attention to half of the row."""
  c = config_lib.Experiment(
    model=dataclasses.replace(tiny.MODEL, layers=3, heads=4, head_size=4),
    data=config_lib.Data(row_length=10),
  )
  forward = 2 * 7 + 3 * (2 * 2 * 10 / 2 * 4 * 4)  # a token's: matrices, and scores and values
  assert ahead_of_time.step_flops(c, rows=2, multiplied=7) == 3 * forward * 2 * 10
