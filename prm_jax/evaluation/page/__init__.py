"""A web page of solutions, which shows the steps that the model doubts and whether it is right."""

from prm_jax.evaluation.page.page import SEEN, Problem, Record, from_records, render, template

__all__ = ["SEEN", "Problem", "Record", "from_records", "render", "template"]
