"""Type hints of the public interface: mypy accepts them, and checks the calls of other code."""

from conftest import ROOT, python

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


MYPY = ("-m", "mypy", f"--cache-dir={ROOT}/.mypy_cache")


def test_type_hints_are_consistent():
  """mypy finds no error in the aggregator, configuration, types and rewards."""
  result = python(*MYPY, code=(0, 1))
  assert result.returncode == 0, result.stdout  # where mypy writes errors


def test_callers_see_the_hints(tmp_path):
  """mypy finds a caller's wrong argument, and knows the type of a result."""
  (tmp_path / "calls.py").write_text(CALLS)
  result = python(*MYPY, tmp_path / "calls.py", code=1)
  assert "calls.py:9: note: Revealed type is" in result.stdout and "Array" in result.stdout
  assert 'calls.py:10: error: Argument "learning_rate"' in result.stdout
