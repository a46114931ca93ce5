"""What the directory of a public model says about itself: its name and its licence."""

import dataclasses
import json
import pathlib
import re

BYTES = 1 << 16  # of a file that is looked at
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,39}")  # an identifier of the hub, as apache-2.0
TEXTS = {  # in a licence file, by the hub's identifier
  "apache-2.0": re.compile(r"Apache License\s+Version 2\.0"),
  "mit": re.compile(r"MIT License|Permission is hereby granted, free of charge"),
  "gemma": re.compile(r"Gemma Terms of Use"),
}


@dataclasses.dataclass(frozen=True)
class BaseModel:
  """Text from the files of a model: to be escaped where it is shown."""

  name: str  # on the hub, or of its directory
  license: str = ""  # the hub's identifier; "": unknown
  found_in: str = ""  # the file that says so


def describe(directory: str | pathlib.Path) -> BaseModel:
  """Name and licence, as far as README.md, provenance.json, config.json or LICENSE give them.

  A directory that is not there any more has only its name.
  """
  directory = pathlib.Path(directory)
  provenance, config = (_object(directory / f"{x}.json") for x in ("provenance", "config"))
  names = (provenance.get("model"), config.get("_name_or_path"))
  name = next((x for x in names if isinstance(x, str) and HUB_ID.fullmatch(x)), "")
  name = name or directory.absolute().name
  front = re.match(r"---\s*\n(.*?)\n---\s*\n", _text(directory / "README.md"), re.DOTALL)
  stated = r"^license:[ \t]*[\"']?([^\s\"']+)[\"']?[ \t]*$"
  line = re.search(stated, front[1] if front else "", re.MULTILINE)
  for found, file in ((line and line[1], "README.md"), (provenance.get("license"), "its source")):
    if isinstance(found, str) and LICENSE.fullmatch(found.lower()):
      return BaseModel(name, found.lower(), file)
  for file in ("LICENSE", "LICENSE.txt", "LICENSE.md"):
    text = _text(directory / file)
    for identifier, pattern in TEXTS.items():
      if pattern.search(text):
        return BaseModel(name, identifier, file)
  return BaseModel(name)


def _text(path: pathlib.Path) -> str:
  """The beginning of a file; "" if it cannot be read."""
  try:
    with path.open("rb") as file:
      return file.read(BYTES).decode(errors="replace").replace("\r\n", "\n")
  except OSError:
    return ""


def _object(path: pathlib.Path) -> dict:
  """A small JSON object; {} for anything else."""
  try:
    found = json.loads(_text(path))
  except (ValueError, RecursionError):
    return {}
  return found if isinstance(found, dict) else {}
