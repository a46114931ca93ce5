"""Reads the name and licence of a public model from its directory."""

import dataclasses
import pathlib
import re

from prm_jax.runtime import json_lines

BYTES = 1 << 16  # bytes read of a text file
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,39}")  # the hub's identifier, such as apache-2.0
TEXTS = {  # wording of licence files, by the hub's identifier
  "apache-2.0": re.compile(r"Apache License\s+Version 2\.0"),
  "mit": re.compile(r"MIT License|Permission is hereby granted, free of charge"),
  "gemma": re.compile(r"Gemma Terms of Use"),
}


@dataclasses.dataclass(frozen=True)
class BaseModel:
  """Name and licence from the files of a model: untrusted text, to be escaped before display."""

  name: str  # the name on the hub, or of the directory
  license: str = ""  # the hub's identifier; "": unknown
  found_in: str = ""  # the file that states the licence


def describe(directory: str | pathlib.Path) -> BaseModel:
  """Returns the name and licence in README.md, provenance.json and licence files.

  A directory that no longer exists gives only its name.
  """
  directory = pathlib.Path(directory)
  provenance = json_lines.document_or_empty(directory / "provenance.json")
  # Not the `_name_or_path` of config.json, which often names the model that this one started from.
  name = str(provenance.get("model"))
  name = name if HUB_ID.fullmatch(name) else directory.absolute().name
  front = re.match(r"---\s*\n(.*?)\n---\s*\n", _text(directory / "README.md"), re.DOTALL)
  pattern = r"^license:[ \t]*[\"']?([^\s\"']+)[\"']?[ \t]*$"
  line = re.search(pattern, front[1] if front else "", re.MULTILINE)
  stated_in = {"README.md": line and line[1], "its source": provenance.get("license")}
  for file, identifier in stated_in.items():
    if isinstance(identifier, str) and LICENSE.fullmatch(identifier.lower()):
      return BaseModel(name, identifier.lower(), file)
  for file in ("LICENSE", "LICENSE.txt", "LICENSE.md"):
    text = _text(directory / file)
    for identifier, pattern in TEXTS.items():
      if pattern.search(text):
        return BaseModel(name, identifier, file)
  return BaseModel(name)


def _text(path: pathlib.Path) -> str:
  """Returns the beginning of a file, or "" if it cannot be read."""
  try:
    with path.open("rb") as file:
      return file.read(BYTES).decode(errors="replace").replace("\r\n", "\n")
  except OSError:
    return ""
