"""Where a run's time goes is in its metrics, and what slows it down is said."""

import json
import time

import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.training import goodput, loop, mesh


@pytest.fixture(scope="module")
def experiment(arithmetic_data):
  return tiny.experiment(arithmetic_data, config_lib.Loss())


def records(workdir, split):
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [line for line in lines if line["split"] == split]


def test_every_second_of_a_run_is_accounted_for(experiment, tmp_path):
  """Updates, start, compilation, data, evaluation and checkpoints add up to the whole."""
  start = time.perf_counter()
  loop.run(experiment, tmp_path)
  elapsed = time.perf_counter() - start
  (end,) = records(tmp_path, "goodput")
  parts = ("updates", "start", "compilation", "data", "evaluation", "checkpoint")
  assert sum(end[part] for part in parts) == pytest.approx(end["total"], rel=1e-6)
  assert end["total"] < elapsed
  assert end["goodput"] == pytest.approx(end["updates"] / end["total"])
  assert min(end[part] for part in parts) >= 0
  for line in records(tmp_path, "train"):
    assert 0 <= line["data_wait_seconds"] <= line["step_seconds"]


def test_waiting_for_data_is_said(experiment, tmp_path, monkeypatch, capsys):
  """Rows that come slower than updates: a warning that names the share and what to do."""
  build = mesh.global_batch

  def slowly(*args):
    time.sleep(0.3)
    return build(*args)

  monkeypatch.setattr(mesh, "global_batch", slowly)
  loop.run(experiment, tmp_path)
  assert "data is the bottleneck" in capsys.readouterr().err
  quick = {"data_wait_seconds": 0.01, "step_seconds": 1.0}
  assert goodput.data_bound(quick) is None


def test_a_trace_is_written_on_request(experiment, tmp_path):
  """train.profile_at: three updates in the profiler's format, and nothing without it."""
  loop.run(tiny.change(experiment, "train", profile_at=3), tmp_path / "with")
  assert list((tmp_path / "with" / "profile").rglob("*.xplane.pb"))
  loop.run(tiny.change(experiment, "train", steps=2), tmp_path / "without")
  assert not (tmp_path / "without" / "profile").exists()
