"""The paper's experiments: each has a module of its name, and `jobs` runs one of them."""

NAMES = ("supervision", "active", "generations", "ood", "noise", "tuning")
NAMES += ("alternatives", "search", "rollouts")
