"""Requests for people's labels, with quality control (paper section 2.4 and appendix B).

A request is a line `{"request": ID, "problem": ..., "steps": [...]}`; nothing in it can bias a
labeller.  Scores, answers, quality control and the number of labellers are in the key, a file for
whoever hands out the requests and reads the answers.
"""

import hashlib
import pathlib
from collections.abc import Sequence
from typing import IO, Annotated, Any, Literal

import msgspec
import numpy as np

from prm_jax.runtime import json_lines

COMPLETE = "one for each step, or for the steps up to the first -1"
Rating = Annotated[int, msgspec.Meta(ge=-1, le=1)]
Ratings = Annotated[list[Rating], msgspec.Meta(min_length=1)]
Steps = Annotated[list[json_lines.Text], msgspec.Meta(min_length=1)]


class Item(msgspec.Struct):
  """A solution to label, or one with labels, as `label_answers.collect` makes it."""

  problem: json_lines.Text
  steps: Steps
  labels: list[Rating | None] | None = None
  is_correct: bool | None = None
  about: dict[str, Any] = {}  # why it was chosen; copied to the key and to the labels


class Known(Item):
  """A solution for quality control; its exact labels end at the first wrong step."""

  def __post_init__(self):
    labels = self.labels or []
    labels = labels[: labels.index(-1) + 1] if -1 in labels else labels
    if not labels or None in labels or not complete(labels, self.steps):
      raise ValueError(
        f"the quality-control item {json_lines.show(self.problem)} has labels {self.labels} for "
        f"{len(self.steps)} steps; expected {COMPLETE}"
      )
    self.labels = labels


class Request(msgspec.Struct):
  request: str
  problem: json_lines.Text
  steps: Steps


class Key(msgspec.Struct):
  """The facts about a request that labellers do not see."""

  request: str
  kind: Literal["single", "shared", "quality_control"]  # one, two or all labellers answer it
  labels: Ratings | None = None  # of quality control
  is_correct: bool | None = None
  about: dict[str, Any] = {}


def requests(
  chosen: Sequence[Item], known: Sequence[Known] = (), *, shared: float = 0.1, seed: int = 0
) -> list[tuple[Request, Key]]:
  """Returns requests in random order, each with its key.

  Args:
    known: quality-control items, which every labeller answers.
    shared: share of the chosen items that two labellers answer, to measure their agreement.
  """
  rng = np.random.default_rng(seed)
  twice = {*rng.permutation(len(chosen))[: round(shared * len(chosen))].tolist()}
  items = [(item, "shared" if i in twice else "single") for i, item in enumerate(chosen)]
  items += [(item, "quality_control") for item in known]
  out = []
  for number, i in enumerate(rng.permutation(len(items)).tolist()):
    item, kind = items[i]
    text = hashlib.sha256(repr((item.problem, item.steps)).encode()).hexdigest()
    # The name has a hash of the text, so that no answer of another round passes for this one's.
    name = f"{seed}-{number:06d}-{text[:8]}"
    labels = item.labels if kind == "quality_control" else None
    request = Request(name, item.problem, item.steps)
    out.append((request, Key(name, kind, labels, item.is_correct, item.about)))
  return out


def complete(labels: Sequence[int], steps: Sequence[str]) -> bool:
  """Returns whether every step has a label, or every step up to a first -1."""
  return len(labels) == len(steps) or (len(labels) < len(steps) and labels[-1] == -1)


def key(path: pathlib.Path) -> pathlib.Path:
  """Returns the path of the key that belongs to a file of requests."""
  return path.with_name(f"{path.name.removesuffix('.jsonl')}.key.jsonl")


def write(asked: Sequence[tuple[Request, Key]], requests: IO[str], keys: IO[str]) -> None:
  for request, about in asked:
    requests.write(msgspec.json.encode(request).decode() + "\n")
    keys.write(msgspec.json.encode(about).decode() + "\n")


def read(path: pathlib.Path) -> list[tuple[Request, Key]]:
  """Reads the requests of a file, each with its key; BadLine: one has no key, or occurs twice."""
  keys = _by_name(key(path), Key)
  asked = []
  for name, (where, request) in _by_name(path, Request).items():
    if name not in keys:
      raise json_lines.BadLine(f"{where}: request {name} is not in {key(path)}")
    asked.append((request, keys[name][1]))
  return asked


def _by_name(path: pathlib.Path, kind: type[Any]) -> dict[str, tuple[str, Any]]:
  """Returns place and content of a file's lines by their `request`; BadLine: two have the same."""
  found: dict[str, tuple[str, Any]] = {}
  for where, line in json_lines.structs(path, kind):
    if line.request in found:
      raise json_lines.BadLine(f"{where}: request {line.request} is in the file twice")
    found[line.request] = where, line
  return found
