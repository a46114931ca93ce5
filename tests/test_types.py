"""Type hints of what other code calls: mypy finds nothing wrong, and sees them from outside."""

import subprocess
import sys

from conftest import ENVIRONMENT, ROOT

CALLS = """
import jax
import numpy as np
from prm_jax import aggregation as agg
from prm_jax import config

scores, correct = np.zeros((2, 3)), np.zeros((2, 3), bool)
curve = agg.best_of_n(scores, correct)
reveal_type(curve)
config.Optim(learning_rate="fast")
"""


def mypy(*arguments):
  command = [sys.executable, "-m", "mypy", f"--cache-dir={ROOT}/.mypy_cache", *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)


def test_type_hints_are_consistent():
  """The aggregator, configuration, values and rewards are typed as they are written."""
  done = mypy()
  assert done.returncode == 0, done.stdout


def test_callers_see_the_hints(tmp_path):
  """A caller's wrong argument is found, and the result of a call has a type."""
  (tmp_path / "calls.py").write_text(CALLS)
  done = mypy(str(tmp_path / "calls.py"))
  assert done.returncode == 1
  assert "calls.py:9: note: Revealed type is" in done.stdout and "Array" in done.stdout
  assert 'calls.py:10: error: Argument "learning_rate"' in done.stdout
