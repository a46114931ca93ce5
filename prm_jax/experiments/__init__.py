"""The paper's experiments; `jobs` runs one, each has a module of its name."""

NAMES = ("supervision", "active", "generations", "ood", "noise", "tuning")
NAMES += ("alternatives", "search", "rollouts")
