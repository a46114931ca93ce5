"""Arithmetic about steps on TPU chips, each against a count by hand."""

import dataclasses

import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.tpu import compile, cost_model, hlo, sweep

MESH = {"data": 1, "fsdp": 4, "tensor": 2}
ALL = ("attention", "query", "key", "value", "output", "gate", "up")
CHIP = cost_model.Chip(memory=1.0, flops=1e12, clock=1e9, links=1e9, network=1e8)


def experiment(saved=ALL, remat="full", rows=16, **train):
  return config_lib.Experiment(
    data=config_lib.Data(row_length=1024),
    model=dataclasses.replace(tiny.MODEL, dtype="bfloat16", remat=remat, saved=saved),
    train=config_lib.Train(batch_rows=rows, **train),
  )


def test_kept_activations_are_counted_by_hand():
  """Bytes of a chip: 4 rows of 1,024, 2 layers, 2 bytes; heads and feed-forward split in two."""
  kept, tokens = cost_model.kept_bytes(experiment(), MESH), 4 * 1024 * 2 * 2
  assert kept["gate"] == kept["up"] == tokens * 24 / 2
  assert kept["query"] == tokens * 16 / 2 and kept["key"] == tokens * 8 / 2
  assert kept["output"] == kept["residual"] == tokens * 16
  assert kept["attention"] == tokens * (16 + 8) / 2  # a normaliser of each head, in float32
  assert cost_model.kept_bytes(experiment(microbatches=2), MESH)["gate"] == kept["gate"] / 2


def test_what_is_kept_is_not_computed_again():
  """Of full recomputation, products whose output is not kept; the last one is never needed."""
  tokens = 16 * 1024 * 2
  assert cost_model.recomputed_flops(experiment()) == 0
  assert cost_model.recomputed_flops(experiment(ALL[:-1])) == tokens * 2 * 16 * 24
  products = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 2 * 16 * 24)
  assert cost_model.recomputed_flops(experiment(())) == tokens * products
  assert cost_model.recomputed_flops(experiment((), remat="none")) == 0


def test_the_kernel_is_counted_by_live_blocks():
  """Two blocks of 512: three of four pairs; heads of 4 as if of 128; its forward once or twice."""
  pairs = 3 * 512 * 512
  once = 2 * 128 * 4 * 2 * pairs * (2 + 7)
  assert cost_model.kernel_flops(experiment(), 1, training=True) == once
  again = cost_model.kernel_flops(experiment(ALL[1:]), 1, training=True)
  assert again == once * 11 / 9
  assert cost_model.kernel_flops(experiment(), 3, training=False) == 3 * once * 2 / 9


def test_what_has_no_gradient_takes_no_backward_time():
  """Of the head alone: no recomputation, the kernel forward, no sums of gradients; of LoRA, none
  of the layers' matrices.
  """
  head = dataclasses.replace(experiment(()), optim=config_lib.Optim(trained="head"))
  assert cost_model.recomputed_flops(head) == 0
  assert cost_model.kernel_flops(head, 1, True) == cost_model.kernel_flops(head, 1, False)
  alone = {"data": 1, "fsdp": 8, "tensor": 1}
  assert cost_model.expected_traffic(head, alone, True) == 0


def collective(kind, size, hidden):
  return hlo.Collective(kind, "f32", size, 2, 1, None, hidden)


def test_seconds_add_up():
  """Cycles, kernel, and collectives of their own; hidden ones only where they last longer."""
  c = dataclasses.replace(experiment(), data=config_lib.Data(row_length=64))  # no kernel
  program = hlo.Program(2 * 10**9, {}, (collective("all-reduce", 10**9, False),), (), 0)
  found = cost_model.seconds(c, CHIP, 8, MESH, 1.2e13, program)
  assert found["seconds_per_step"] == 2 + 1
  assert found["mfu"] == pytest.approx(1.2e13 / (3 * 8 * 1e12))
  unsure = dataclasses.replace(program, unknown_loops=1)  # cycles of one trip are not the loop's
  assert cost_model.seconds(c, CHIP, 8, MESH, 1.2e13, unsure)["compiled_code_from"] == "arithmetic"
  apart = dataclasses.replace(program, collectives=(collective(hlo.BETWEEN, 10**8, False),))
  found = cost_model.seconds(c, CHIP, 8, MESH, 1.2e13, apart)
  assert found["seconds_per_step"] == 2 + 1 and found["parts"]["between_slices"] == 1
  hidden = collective("all-gather", 10 * 10**9, True)
  slow = dataclasses.replace(program, collectives=(*program.collectives, hidden))
  assert cost_model.seconds(c, CHIP, 8, MESH, 1.2e13, slow)["seconds_per_step"] == 5 + 1


def test_without_text_the_estimate_says_so():
  """Collectives are not taken for none, and cycles are not made up."""
  found = cost_model.seconds(experiment(), CHIP, 8, MESH, 1e13, None)
  words = " ".join(found["assumptions"])
  assert "collectives: by arithmetic" in words and "no cycles from the compiler" in words
  assert found["compiled_code_from"] == "arithmetic"
  weights = 2 * 16 * (2 * 16 + 2 * 8 + 3 * 24) / 2  # two layers, half of each on a chip
  gradients = 2 * 4 * weights * 3 / 4  # float32, a ring of four
  sums = 4 * 2 * (4 * 1024 * 16 * 2 * 2) / 2  # of 4 rows, bfloat16, a ring of two
  assert found["parts"]["collectives_alone"] == pytest.approx((gradients + sums) / 1e9)


def test_what_would_make_it_fit_is_computed():
  """The largest that is kept goes first, as many as it takes; then passes, rows, chips."""
  c = experiment(rows=4096)
  gib = {name: size / 2**30 for name, size in cost_model.kept_bytes(c, MESH).items()}
  first, passes, rows, chips = cost_model.changes(c, MESH, arguments=4.0, excess=1.9 * gib["gate"])
  assert first.startswith("--config.model.saved query key value gate up: without output, attention")
  assert passes.startswith("--config.train.microbatches=2:") and "batch_rows=2048" in rows
  assert chips.startswith("a slice of 2 times")
  assert cost_model.changes(experiment((), rows=4), MESH, 0.1, 50.0) == [
    "nothing by itself: fewer saved, microbatches and more chips together"
  ]


def report(job, needed, fits=True, rate=1.0):
  promised = next(c for c in sweep.candidates(job) if c.job == job).tokens_per_second
  return {
    "fits": fits,
    "gib_per_chip": {"needed": needed},
    "estimate": {"tokens_per_second": promised * rate, "mfu": 0.5},
    "rows": 16,
    "microbatches": 1,
    "saved": ["gate"],
    "mesh": {"data": 1, "fsdp": 4},
  }


@pytest.fixture
def job(tmp_path):
  """The tiny model on four chips, as a public directory."""
  import json

  from prm_jax.pretrained import families

  (tmp_path / "config.json").write_text(json.dumps(families.write(tiny.MODEL, 64, "llama")))
  c = experiment()
  model = config_lib.Model(dtype="bfloat16")
  init = config_lib.Init(checkpoint=str(tmp_path))
  return compile.Job(dataclasses.replace(c, model=model, init=init), "v5e:2x2")


def test_a_sweep_takes_the_most_promising_first(job, monkeypatch, tmp_path):
  """Promises fall along the list, and it ends when none is left that could be faster."""
  listed = sweep.candidates(job)
  speeds = [each.tokens_per_second for each in listed]
  assert speeds == sorted(speeds, reverse=True) and len({each.job for each in listed}) == len(
    listed
  )
  tried = []
  monkeypatch.setattr(compile, "compiled", lambda job, work: tried.append(job))
  monkeypatch.setattr(compile, "report", lambda job, _: report(job, 0.1))
  found = sweep.run(job, tmp_path, most=5)
  assert tried == [listed[0].job] and len(found) == 1


def test_a_sweep_learns_from_what_does_not_fit(job, monkeypatch, tmp_path):
  """Memory beyond arithmetic is added to what other candidates are thought to need."""
  tried = []
  monkeypatch.setattr(compile, "compiled", lambda job, work: tried.append(job))
  monkeypatch.setattr(compile, "report", lambda job, _: report(job, 99.0, fits=False))
  found = sweep.run(job, tmp_path, most=5)
  assert len(tried) == 1 and not found[0]["fits"]  # nothing else could fit either
  monkeypatch.setattr(compile, "report", lambda job, _: report(job, 1.5, fits=False))
  assert len(sweep.run(job, tmp_path, most=3)) == 3


def test_a_sweep_goes_on_where_the_compiler_failed(job, monkeypatch, tmp_path):
  """What it aborts on is said and left out; if that is everything, it is the error."""
  first, said = sweep.candidates(job)[0].job, []

  def compiled(job, work):
    if job == first:
      raise RuntimeError("the compiler ended with -6")

  monkeypatch.setattr(compile, "compiled", compiled)
  monkeypatch.setattr(compile, "report", lambda job, _: report(job, 0.5))
  assert len(sweep.run(job, tmp_path, 2, said.append)) == 1
  assert said[0] == "the compiler ended with -6"
  with pytest.raises(RuntimeError, match="ended with -6"):
    sweep.run(job, tmp_path, 1)
