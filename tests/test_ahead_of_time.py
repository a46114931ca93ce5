"""Compiling for a slice that is not there."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.tpu import compile, cost_model
from prm_jax.training import step

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
      f"--work={tmp_path}/work",
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
  gib = found["gib_per_chip"]
  assert gib["needed"] == gib["arguments"] + gib["temporaries"] and gib["temporaries"] > 0
  assert found["headroom"] == 1 - gib["needed"] / 15.75
  assert found["involuntary_rematerialisations"] == 0
  # what stands in the estimate was read from the program
  assert found["estimate"]["parts"]["compiled_code"] > 0
  assert any("cycles" in each for each in found["estimate"]["assumptions"])
  kinds = {row["kind"] for row in found["collectives"]["by_kind"]}
  assert "all-gather" in kinds and kinds & {"all-reduce", "reduce-scatter"}
  seconds = found["estimate"]["seconds_per_step"]
  assert found["run"]["chip_hours"] == pytest.approx(4 * 5000 * seconds / 3600)
  # and is not compiled again
  kept = next((tmp_path / "work").glob("*.json"))
  written = kept.stat().st_mtime_ns
  assert compiled(tmp_path, "v5e:2x2", "--config.train.batch_rows=8").returncode == 0
  assert kept.stat().st_mtime_ns == written


def verdict(c, gib, needed):
  """A report on a compilation that was none."""
  found = compile.Compiled(gib, needed, None, "no reason", 1.0, 0)
  return compile.report(compile.Job(c, "v5e:2x2"), found)


def test_what_does_not_fit_says_what_to_change(tmp_path):
  """By arithmetic; and no time is estimated of what cannot run."""
  from prm_jax.input_pipeline import tokenizers

  tokenizers.train_sentencepiece(["1 + 2 = 3\n"] * 50, tmp_path / "tokenizer.model", 320)
  c = config_lib.Experiment(
    data=config_lib.Data(tokenizer=str(tmp_path / "tokenizer.model")), model=tiny.MODEL
  )
  found = verdict(c, None, 20.0)
  assert not found["fits"] and "estimate" not in found
  assert found["changes"][0].startswith("--config.model.remat=full")
  gib = {"arguments": 1.0, "temporaries": 2.0, "temp_size": 2.5}
  found = verdict(c, gib, 3.0)
  assert found["fits"] and found["collectives"] is None
  assert found["no_collectives_because"] == "no reason"


def test_what_the_compiler_refuses_for_its_size():
  """In both of its messages; one leaves out arguments.  Another error is none of size."""
  used = "It requires 20.58G. Used 16.58G of 15.50G hbm. Exceeded hbm capacity by 1.08G."
  assert compile.refused(used, 1.25, 15.75) == pytest.approx(16.83)
  temporaries = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(16.85G) exceeds available HBM (15.75G)."
  )
  assert compile.refused(temporaries, 1.25, 15.75) == pytest.approx(18.10)
  assert compile.refused("Used 17.2M of 16.0M vmem", 1.25, 15.75) is None
  assert compile.refused("Used 300.00G of 200.00G host", 1.25, 15.75) is None


@pytest.mark.parametrize(
  ("topology", "wrap", "links"),
  [
    ("v5p:4x4x8", (True, True, True), 600e9),
    ("v5p:2x4x4", (False, False, False), 300e9),
    ("v5e:8x8", (False, False), 100e9),
    ("v5e:16x8", (True, False), 100e9),
    ("v6e:16x16", (True, True), 400e9),
  ],
)
def test_rings_are_those_of_the_slice(topology, wrap, links):
  """Where links do not close to a ring, half as many bytes reach a chip in a second."""
  job = compile.Job(config_lib.Experiment(), topology)
  assert job.wrap() == wrap and job.chip().links == links


def test_what_is_no_slice_is_refused_and_leaves_no_file(tmp_path):
  """A generation that is not known is named with those that are."""
  done = compiled(tmp_path, "v9:2x2")
  assert done.returncode and "v9:2x2: expected one of v5e, v5p" in done.stderr
  assert not (tmp_path / "compile.json").exists()


def multiply_adds(weight=0.0, untied=False, text=False, rank=0, **optim):
  """Of a token, by `step_flops`: 3 layers, rows of 10, 50 ids."""
  data = {"text_train": "a", "text_eval": "b"} if text else {}
  sizes = {"layers": 3, "tied_embeddings": not untied, "lora_rank": rank}
  c = config_lib.Experiment(
    model=dataclasses.replace(tiny.MODEL, lora_targets=("gate",), **sizes),
    data=config_lib.Data(row_length=10, **data),
    loss=config_lib.Loss("language_model" if text else "process", weight),
    optim=config_lib.Optim(**optim),
  )
  init = functools.partial(step.init_params, config=c.model, vocab_size=50, num_classes=3)
  params = jax.eval_shape(init, jax.random.key(0))
  return cost_model.step_flops(c, rows=2, params=params) / (2 * 2 * 10)


WEIGHTS = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24  # query and output, key and value, feed-forward
SCORES = 2 * 5 * 16  # and values: of half of the row, by 4 heads of 4
VOCABULARY = 50 * 16


@pytest.mark.parametrize(
  ("choice", "expected"),
  [
    ({}, 3 * 3 * (WEIGHTS + SCORES)),
    ({"trained": "head"}, 3 * (WEIGHTS + SCORES)),
    ({"trained": "lora", "rank": 2}, 3 * (2 * WEIGHTS + 3 * SCORES + 3 * 2 * (16 + 24))),
  ],
)
def test_operations_of_a_step_are_counted_by_hand(choice, expected):
  """Forward, back through what the gradient passes, and to what is trained; no embedding."""
  assert multiply_adds(**choice) == expected
  assert multiply_adds(**choice, untied=True) == expected


@pytest.mark.parametrize(
  ("choice", "passes"),
  [
    ({}, 3),
    ({"untied": True}, 3),
    ({"embedding_scale": 0.0}, 2),
    ({"trained": "lora", "rank": 2, "untied": True}, 2),
    ({"trained": "head"}, 1),
    ({"trained": "head", "untied": True}, 2),  # forward and to its own weights
  ],
)
def test_the_vocabulary_counts_only_where_the_loss_uses_it(choice, passes):
  """Logits of a token, and back as far as something is trained."""
  assert multiply_adds(0.5, **choice) - multiply_adds(**choice) == passes * VOCABULARY


def test_a_language_model_multiplies_by_its_head():
  """With the objective of text as with a weight beside another."""
  for untied in (True, False):
    assert multiply_adds(untied=untied, text=True) == multiply_adds(0.5, untied=untied)
