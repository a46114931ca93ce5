"""Type hints of the public interface: mypy accepts them, and checks the calls of other code."""

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
  """Returns the finished process of mypy."""
  command = [sys.executable, "-m", "mypy", f"--cache-dir={ROOT}/.mypy_cache", *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)


def test_type_hints_are_consistent():
  """mypy finds no error in the aggregator, configuration, types and rewards."""
  result = mypy()
  assert result.returncode == 0, result.stdout


def test_callers_see_the_hints(tmp_path):
  """mypy finds a caller's wrong argument, and knows the type of a result."""
  (tmp_path / "calls.py").write_text(CALLS)
  result = mypy(str(tmp_path / "calls.py"))
  assert result.returncode == 1
  assert "calls.py:9: note: Revealed type is" in result.stdout and "Array" in result.stdout
  assert 'calls.py:10: error: Argument "learning_rate"' in result.stdout
