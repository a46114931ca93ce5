"""scripts/benchmark.py scaling: the half that runs on simulated devices and hosts."""

import pytest
from conftest import ROOT, run_script


@pytest.fixture
def scaling(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / "scripts")
  from benchmarks import simulated_scaling

  return simulated_scaling


def test_what_devices_exchange_is_read_from_the_step(scaling, arithmetic_data):
  """One device exchanges nothing; eight hold an eighth of what divides, and pay in bytes."""
  alone, eight = (
    scaling.exchanged(scaling.experiment(arithmetic_data, axes, 8, 2))
    for axes in ((1, 1, 1), (1, 4, 2))
  )
  assert alone["collectives"] == alone["bytes"] == 0
  assert eight["collectives"] > 0 and eight["bytes"] > 0
  assert alone["state"] / 8 < eight["state"] < alone["state"] / 4


def test_a_difference_is_a_missed_target(scaling):
  """The table says so; nothing hides behind a mean."""
  about = {"kind": "strong", "hosts": 1, "axes": (1, 1, 1), "rows": 8}
  about |= {"state": 1, "collectives": 0, "bytes": 0.0}
  done = [about | {"apart": 1e-7}, about | {"apart": 1e-5}]
  assert [goal["met"] for goal in scaling.targets(done)] == [False]
  assert "1.0e-05 | **no**" in scaling.tables(done)


@pytest.mark.slow
def test_two_hosts_in_the_benchmark():
  """The whole of it at small sizes: data, jobs of one and two hosts, tables."""
  done = run_script("benchmark.py", "scaling", "--skip", "compiled", "--quick")
  assert done.returncode == 0, done.stderr
  assert "| strong | 2 | 1 x 4 x 2 |" in done.stdout
