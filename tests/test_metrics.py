"""Step and outcome metrics against counting by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax import step_metrics


def test_each_metric_equals_counting_by_hand():
  probs = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.4, 0.5, 0.1], [0.5, 0.1, 0.4]])
  metrics = step_metrics.step_metrics(probs, [-1, 1, -1, 1])
  assert metrics["count"] == 4
  assert metrics["count_by_class"] == {"-1": 2, "0": 0, "1": 2}
  assert metrics["nll"] == pytest.approx(-np.log([0.7, 0.8, 0.4, 0.4]).mean())
  assert metrics["accuracy"] == 0.5
  assert metrics["accuracy_by_class"] == {"-1": 0.5, "0": None, "1": 0.5}
  # P(not -1): 0.3 wrong, 0.9 right, 0.6 wrong, 0.5 right: three of four pairs in order.
  assert metrics["auroc"] == 0.75
  assert metrics["ece"] == pytest.approx((0.3 + 0.1 + 0.6 + 0.5) / 4)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.booleans()), max_size=12))
def test_auroc_counts_pairs(pairs):
  """AUROC is the share of (right, wrong) pairs in order, ties counting half."""
  right = [s for s, positive in pairs if positive]
  wrong = [s for s, positive in pairs if not positive]
  got = step_metrics.auroc([s for s, _ in pairs], [positive for _, positive in pairs])
  if not right or not wrong:
    assert got is None
  else:
    wins = [(a > b) + (a == b) / 2 for a, b in itertools.product(right, wrong)]
    assert got == pytest.approx(np.mean(wins))


@pytest.mark.parametrize(
  ("scores", "outcomes", "error"),
  [([0.42, 0.48], [1, 0], 0.05), ([0.35, 0.65], [1, 0], 0.65), ([1.0, 0.95], [1, 1], 0.025)],
)
def test_calibration_errors_cancel_within_a_bin_only(scores, outcomes, error):
  """Errors of opposite sign cancel within a bin and not across bins; 1.0 is in the last bin."""
  probs = np.stack([1 - np.array(scores), scores], axis=1)
  assert step_metrics.step_metrics(probs, outcomes, (0, 1))["ece"] == pytest.approx(error)


def test_a_row_of_the_diagram_has_limits_count_mean_and_share():
  """A row of the reliability diagram has its bin's limits, count, mean score and share of right."""
  found = step_metrics.calibration(np.array([0.35, 0.38]), np.array([True, False]))
  (row,) = found["bins"]
  assert found["count"] == 2 and found["ece"] == pytest.approx(0.135)
  assert (row["count"], row["share_not_wrong"], row["low"], row["high"]) == (2, 0.5, 0.3, 0.4)
  assert row["mean_probability"] == pytest.approx(0.365)


def test_absent_classes_and_no_steps_are_not_errors():
  """Without a wrong step, or without steps, metrics that are undefined are None."""
  metrics = step_metrics.step_metrics(np.full((2, 3), 1 / 3), [1, 1])
  assert metrics["auroc"] is metrics["accuracy_by_class"]["-1"] is None
  empty = step_metrics.step_metrics(np.zeros((0, 3)), [])
  assert empty["count"] == 0
  assert empty["nll"] is empty["accuracy"] is empty["auroc"] is empty["ece"] is None


def test_a_sure_mistake_has_a_finite_loss_and_nan_stays_nan():
  """A wrong step of probability 1 has a large finite loss, and NaN makes the metrics NaN."""
  assert 80 < step_metrics.step_metrics([[1.0, 0.0, 0.0]], [1])["nll"] < 90
  broken = step_metrics.step_metrics(np.full((2, 3), np.nan), [-1, 1])
  assert all(math.isnan(broken[key]) for key in ("nll", "auroc", "ece"))


def test_bad_input_is_an_error_that_shows_the_value():
  """A label or a shape of probabilities that does not fit the classes is an error."""
  with pytest.raises(ValueError, match="label 2"):
    step_metrics.step_metrics(np.full((1, 3), 1 / 3), [2])
  with pytest.raises(ValueError, match=r"\(1, 2\)"):
    step_metrics.step_metrics(np.full((1, 2), 1 / 2), [1])


def test_agreement_on_nothing_is_undefined():
  """Without items there is no kappa."""
  assert step_metrics.kappa([], []) is None


def test_sure_steps_include_the_limits():
  """0.1, 0.9 and a deviation of 0.01 are sure; steps after the first surely wrong do not count."""
  assert step_metrics.certain([0.9, 0.1, 0.5], [0.01, 0.01, 0.3])
  assert not step_metrics.certain([0.9, 0.11, 0.05], [0, 0, 0])
  assert not step_metrics.certain([0.95, 0.05], [0, 0.02])
