"""Labelled steps of any source: TRL's rows, Math-Shepherd's tagged text, or plain JSON."""

from prm_jax.datasets.stepwise.stepwise_dataset_builder import Builder, Stepwise, stored_trees

__all__ = ["Builder", "Stepwise", "stored_trees"]
