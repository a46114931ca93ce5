"""A page of solutions: which step does the model doubt, and is it right?"""

from prm_jax.evaluation.page.page import SEEN, Problem, Record, from_records, render

__all__ = ["SEEN", "Problem", "Record", "from_records", "render"]
