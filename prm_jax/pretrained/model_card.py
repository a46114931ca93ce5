"""Writes the README.md of an export: a model card in the hub's format.

Text from files (names, recipes, separators) is bounded and escaped, and paths of this machine are
left out.  Where a fact is unknown, the card says so.
"""

import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prm_jax import config as config_lib
from prm_jax.pretrained import snippets
from prm_jax.runtime import json_lines
from prm_jax.types import StepContract

BYTES = 1 << 16  # read of a text file, at most
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,39}")  # the hub's identifier, such as apache-2.0
TEXTS = {  # wording of licence files, by the hub's identifier
  "apache-2.0": re.compile(r"Apache License\s+Version 2\.0"),
  "mit": re.compile(r"MIT License|Permission is hereby granted, free of charge"),
  "gemma": re.compile(r"Gemma Terms of Use"),
}
LONGEST = 120  # characters of a text from a file, at most
SHOWN = 24  # measures with intervals, at most
METRICS = {"nll": "negative log-likelihood, nats", "accuracy": "accuracy of the class"}
METRICS |= {"auroc": "AUROC, right against wrong", "ece": "expected calibration error"}
METRICS |= {"perplexity": "perplexity"}
NEUTRAL = {
  "positive": "the neutral class counts as right: P(right) is P(0) + P(1)",
  "negative": "the neutral class counts as wrong: P(right) is P(1)",
  "none": "there is no neutral class",
}
READ = {
  "process": "at the last token of the separator after each step",
  "outcome": "once, at the last token of the sequence, the end of the last separator",
}
CITATION = """@article{lightman2023lets,
  title={Let's Verify Step by Step},
  author={Lightman, Hunter and Kosaraju, Vineet and Burda, Yura and Edwards, Harri and Baker, Bowen
    and Lee, Teddy and Leike, Jan and Schulman, John and Sutskever, Ilya and Cobbe, Karl},
  journal={arXiv preprint arXiv:2305.20050},
  year={2023}
}"""


@dataclasses.dataclass(frozen=True)
class BaseModel:
  """Name and licence from the files of a model: untrusted text, to be escaped before display."""

  name: str  # the name on the hub, or of the directory
  license: str = ""  # the hub's identifier; "": unknown
  found_in: str = ""  # the file that states the licence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """The facts of a model card."""

  name: str  # of the exported directory
  kind: str  # see `export.write`
  step: int  # updates made
  config: config_lib.Experiment  # of the run
  contract: StepContract
  bos_id: int | None
  tokenizer: str = "tokenizer.json"  # name of its file
  bases: Sequence[BaseModel]  # the run's base, the base's own base, ...; (): random
  dataset: str = ""  # the name; "": unknown
  manifest: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the manifest of the run
  evaluation: Mapping[str, Any] | None = None  # metrics of this step during training
  judged: Mapping[str, Any] | None = None  # output of evaluate.py for this step
  versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of packages, by name

  @property
  def of_text(self) -> bool:
    """Whether the run trained a language model, which has no labels."""
    return self.contract.objective == "language_model"


def base_model(directory: str | pathlib.Path) -> BaseModel:
  """Returns the name and licence in README.md, provenance.json and licence files.

  A directory that no longer exists gives only its name.
  """
  directory = pathlib.Path(directory)
  provenance = json_lines.document_or_empty(directory / "provenance.json")
  # Not the `_name_or_path` of config.json, which often names the model that this one started from.
  name = str(provenance.get("model"))
  name = name if HUB_ID.fullmatch(name) else directory.absolute().name
  front = re.match(r"---\s*\n(.*?)\n---\s*\n", _beginning(directory / "README.md"), re.DOTALL)
  pattern = r"^license:[ \t]*[\"']?([^\s\"']+)[\"']?[ \t]*$"
  line = re.search(pattern, front[1] if front else "", re.MULTILINE)
  stated_in = {"README.md": line and line[1], "its source": provenance.get("license")}
  for file, identifier in stated_in.items():
    if isinstance(identifier, str) and LICENSE.fullmatch(identifier.lower()):
      return BaseModel(name, identifier.lower(), file)
  for file in ("LICENSE", "LICENSE.txt", "LICENSE.md"):
    for identifier, wording in TEXTS.items():
      if wording.search(_beginning(directory / file)):
        return BaseModel(name, identifier, file)
  return BaseModel(name)


def _beginning(path: pathlib.Path) -> str:
  """Returns the beginning of a text file, or "" if it cannot be read."""
  try:
    with path.open("rb") as file:
      return file.read(BYTES).decode(errors="replace").replace("\r\n", "\n")
  except OSError:
    return ""


def text(value: Any) -> str:
  """Returns text from a file as one bounded line of Markdown, escaped to show as it is."""
  line = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
  line = line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."
  return re.sub(r"([\\`*_{}\[\]()<>#|~&$@:])", r"\\\1", line)


def code(value: str) -> str:
  """Returns text as a bounded JSON string in a code span that it cannot leave."""
  shown = json.dumps(value[:LONGEST], ensure_ascii=True).replace("`", "\\u0060")
  return f"`{shown}`".replace("|", "\\u007c")


def write(facts: Facts) -> str:
  """Returns the text of the card."""
  process = facts.contract.objective == "process"
  noun = "process reward model" if process else "outcome reward model"
  if facts.kind == "causal-lm":
    noun = "language model"
  parts = [_front_matter(facts), f"# {text(facts.name)}\n", _origin(facts, noun)]
  if facts.kind == "causal-lm":
    parts.append(_code_section("Use it", snippets.of(None, facts.bos_id), facts))
  else:
    used = snippets.of(facts.contract, facts.bos_id)
    parts.append(_code_section("Score a step" if process else "Score a solution", used, facts))
    parts.append(_contract(facts.contract))
  parts += [_data(facts), _metrics(facts), _training(facts)]
  base = ", and the base model as its authors ask" if facts.bases else ""
  may_have = facts.dataset in ("", "prm800k") or facts.config.data.also
  used = " and PRM800K" if may_have and not facts.of_text else ""
  cite = f"Cite the method{used} as below{base}."
  parts.append(f"## How to cite\n\n{cite}\n\n```bibtex\n{CITATION}\n```\n")
  return "\n".join(parts)


def _front_matter(facts: Facts) -> str:
  """Returns the hub's metadata in YAML; every value is a constant or has passed a pattern."""
  lm = facts.kind == "causal-lm"
  lines = ["---", "library_name: transformers"]
  lines.append(f"pipeline_tag: {'text-generation' if lm else 'token-classification'}")
  known = [base.license for base in facts.bases if base.license]
  if known and LICENSE.fullmatch(known[0]):
    lines.append(f'license: "{known[0]}"')
  if facts.bases and HUB_ID.fullmatch(name := facts.bases[-1].name):
    lines.append(f'base_model: "{name}"')
  tags = ["prm_jax"]
  tags += [] if lm else ["reward-model", f"{facts.contract.objective}-reward-model"]
  return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---", ""])


def _origin(facts: Facts, noun: str) -> str:
  lines = [f"A {noun} made with prm_jax."]
  if not facts.bases:
    lines.append("It was trained from random weights; no licence of a base model applies.")
  started = ["It", *(text(base.name) for base in facts.bases)]
  lines += [f"{model} started from {base}." for model, base in itertools.pairwise(started)]
  if facts.bases:
    licences = [f"{text(x.license)} ({text(x.found_in)})" for x in facts.bases if x.license]
    licence = licences[0] if licences else "unknown: see the base model"
    lines.append(f"Licence of the base: {licence}.")
  if facts.kind == "causal-lm" and not facts.of_text:
    lines.append("This export has its trunk and language-model head, and no step head.")
  return "\n".join(lines) + "\n"


def _code_section(title: str, code_of: Mapping[str, str], facts: Facts) -> str:
  parts, packages = [f"## {title}\n"], {"transformers": "torch transformers", "vLLM": "vllm"}
  if facts.tokenizer == "tokenizer.model":  # transformers needs both to read it
    packages["transformers"] += " sentencepiece protobuf"
  for library, source in code_of.items():
    parts.append(f"With {library} (`pip install {packages[library]}`):\n")
    parts.append(f"```python\n{source.strip()}\n```\n")
  documented = snippets.VLLM_DOCUMENTED[facts.kind]
  parts.append(f"{documented}; the second snippet follows its pages, and was not run.\n")
  return "\n".join(parts)


def _contract(contract: StepContract) -> str:
  neutral = NEUTRAL.get(contract.neutral, text(contract.neutral))
  lines = [
    "## Contract\n",
    "Probabilities mean this only for a text laid out as in the code above; `prm_jax.json` has the "
    "layout in words.\n",
    f"* Separator, after the problem and after each step: {code(contract.separator)}, tokens "
    f"`{[int(each) for each in contract.separator_ids]}`, encoded by itself.",
    f"* Read {READ[contract.objective]}.",
    f"* Classes, in order: {', '.join(code(each) for each in contract.classes)}.",
  ]
  if contract.objective == "process":
    lines.append(f"* Neutral: {neutral}.")
  if contract.heads > 1:
    lines.append(f"* An ensemble of {contract.heads} heads, whose mean is the probability.")
  return "\n".join([*lines, f"* sha256 of the tokenizer: {code(contract.tokenizer_hash)}.", ""])


def _data(facts: Facts) -> str:
  c = facts.config
  name = text(facts.dataset) or "unknown: it was missing at the export"
  lines = ["## Data\n", f"* Dataset: {name}."]
  if not facts.of_text:
    lines.append(f"* Recipe of the labels: {text(facts.contract.recipe)}.")
  if c.data.also:
    lines.append("* With the solutions of a second dataset (`data.also`).")
  if c.data.share < 1:
    lines.append(f"* Trained on {100 * c.data.share:.4g} % of the problems (`data.share`).")
  for split in facts.manifest:
    counts = dict(_items(facts.manifest, split))
    name_of = lambda kind: "target tokens" if facts.of_text else f"of class {code(kind)}"
    targets = ", ".join(f"{_number(n)} {name_of(k)}" for k, n in _items(counts, "targets"))
    shown = [f"{_number(counts[key])} {key}" for key in ("examples", "tokens") if key in counts]
    dropped = sum(n for _, n in _items(counts.get("conversion"), "dropped") if _is_number(n))
    shown += [targets] if targets else []
    shown += [f"{_number(dropped)} dropped by the recipe"] if dropped else []
    lines.append(f"* {text(split)}: {'; '.join(shown)}.")
  return "\n".join([*lines, ""])


def _metrics(facts: Facts) -> str:
  lines = ["## Metrics\n"]
  if facts.judged:
    benchmark = text(facts.judged.get("benchmark", "?"))
    if benchmark == "prm800k":  # also the name for any other prepared dataset
      benchmark = "a dataset of labelled steps (`--benchmark=prm800k`)"
    lines.append(f"evaluate.py on {benchmark}, 95 % intervals:\n")
    lines += ["| measure | value | from | to |", "|---|---|---|---|"]
    for name, _ in _items(facts.judged, "intervals")[:SHOWN]:
      interval = dict(_items(facts.judged["intervals"], name))
      cells = [interval.get(key) for key in ("value", "low", "high")]
      lines.append(f"| {text(name)} | {' | '.join(map(_number, cells))} |")
    lines.append("")
  if facts.evaluation:
    counted, split = _number(facts.evaluation.get("count")), text(facts.config.data.eval_name)
    rows = f"at most {facts.config.train.eval_rows:,} rows"
    lines.append(f"During training, on {counted} targets of the split {split} ({rows}):\n")
    lines += ["| measure | value |", "|---|---|"]
    for name, words in METRICS.items():
      if name in facts.evaluation:
        lines.append(f"| {words} | {_number(facts.evaluation[name])} |")
    lines.append("")
  if not facts.judged and not facts.evaluation:
    lines.append("This step was not evaluated.\n")
  return "\n".join(lines)


def _training(facts: Facts) -> str:
  c, train = facts.config, dict(_items(facts.manifest, "train"))
  fill = train.get("fill") if _is_number(train.get("fill")) else 1.0
  tokens = facts.step * c.train.batch_rows * c.data.row_length * fill
  factors = f"low-rank factors of rank {c.model.lora_rank}, merged here"
  if c.loss.objective != "language_model" and c.optim.head_scale:
    factors = f"the step head and {factors}"
  trained = {"all": "all parameters", "head": "the step head", "lora": factors}[c.optim.trained]
  trained += ", not the embedding" * (c.optim.trained == "all" and not c.optim.embedding_scale)
  trained += ", not the heads" * (c.optim.trained == "all" and not c.optim.head_scale)
  lines = [
    "## Training\n",
    f"* {facts.step:,} updates of {c.train.steps:,}, about {tokens:,.0f} tokens (rows of "
    f"{c.data.row_length:,} tokens, {c.train.batch_rows:,} an update).",
    f"* Trained: {trained}; objective `{c.loss.objective}`.",
    f"* AdamW, learning rate {c.optim.learning_rate:g} after {c.optim.warmup_steps:,} updates of "
    f"warm-up, then a cosine to {c.optim.final_fraction:g} of it; weight decay "
    f"{c.optim.weight_decay:g}; gradient norm clipped at {c.optim.clip_norm:g}.",
    f"* Parameters {c.model.param_dtype}, activations {c.model.dtype}; seed {c.train.seed}.",
  ]
  if c.loss.language_model_weight:
    lines.append(f"* With a next-token loss of weight {c.loss.language_model_weight:g}.")
  if versions := ", ".join(f"{text(k)} {text(x)}" for k, x in facts.versions.items()):
    lines.append(f"* Packages: {versions}.")
  return "\n".join([*lines, ""])


def _items(values: Any, key: str) -> list[tuple[str, Any]]:
  """Returns the items of the object at `key`, or [] if there is no such object."""
  inner = values.get(key) if isinstance(values, Mapping) else None
  return list(inner.items()) if isinstance(inner, Mapping) else []


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> str:
  """Formats a number for people, and anything else as "undefined"."""
  if not _is_number(value):
    return "undefined"
  return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
