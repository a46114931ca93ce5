"""The quick start at full size.  Slow: `bash scripts/test.sh -m slow` (5 minutes a seed)."""

import json
import os
import subprocess

import pytest
from conftest import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_process_model_beats_the_outcome_model_and_voting(seed, tmp_path):
  """At N = 1024 the intervals of the three differences are above zero; best-of-N never falls."""
  subprocess.run(
    ["bash", "scripts/quickstart.sh", str(seed), str(tmp_path)],
    cwd=ROOT,
    check=True,
    env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", str(tmp_path))},
  )
  report = json.loads((tmp_path / "report/report.json").read_text())
  assert report["n"][-1] == 1024 and report["problems"] >= 100
  for pair in ("prm_product - orm", "prm_product - majority", "orm - majority"):
    assert report["paired"][pair]["low"][-1] > 0, pair
  curve = report["curves"]["prm_product"]["accuracy"]
  falls = [earlier - later for i, earlier in enumerate(curve) for later in curve[i:]]
  assert max(falls) < 1e-9
