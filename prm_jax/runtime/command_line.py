"""Config files and the flags of scripts."""

import argparse
import dataclasses
import os
import pathlib
import re
import runpy
import shutil
import sys
import textwrap
import traceback
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, TypeVar, get_type_hints

import tyro

from prm_jax import config as config_lib
from prm_jax.runtime import exits

# Added to the flags that tyro lists, as it never sees this one.
CONFIG = "  --config=FILE    required: Python whose config() gives the defaults of all --config.*"

LEAST_WIDTH = 20  # columns of --help: in fewer than 5, tyro never ends

Args = TypeVar("Args")


def read(path: str, kind: type[Args] = config_lib.Experiment) -> Args:
  """Runs a config file, which is Python, and returns the result of its `config()`.

  If configs/NAME.py does not exist here, the project's own file of that name is used.

  Raises:
    SystemExit: there is no such file, it fails, or `config()` does not return a `kind` (experiment
      or plan).  The message names file and line.
  """
  if not os.path.exists(path) and path.startswith("configs/"):
    package = pathlib.Path(config_lib.__file__).parent
    files = (package / path, package.parent / path)  # of a wheel, of a checkout
    path = next((str(file) for file in files if file.exists()), path)
  try:
    experiment = runpy.run_path(path)["config"]()
    if not isinstance(experiment, kind):
      expected = {config_lib.Experiment: "an Experiment"}.get(kind, f"a {kind.__name__}")
      raise TypeError(f"config() returned {experiment!r}, not {expected}")
    return experiment
  except Exception as error:  # of any class: a config file is arbitrary code
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    text = f"{':'.join(map(str, [path, *lines[-1:]]))}: {type(error).__name__}: {error}"
    sections = {kind.__name__: get_type_hints(kind) for kind in config_lib.Checked.__subclasses__()}
    pattern = rf"({'|'.join(sections)})\.__init__\(\) got an unexpected keyword argument '(\w+)'"
    text = re.sub(r"\. Did you mean '\w+'\?", "", text)  # Python's own guess, from 3.13 on
    if unknown := re.search(pattern, text):
      text += f"; the nearest key is {config_lib.nearest(unknown[2], sections[unknown[1]])}"
    raise SystemExit(f"{exits.script()}: {text}; see configs/ for examples of config()") from error


def _wrong_flag(text: str) -> NoReturn:
  print(f"{exits.script()}: {text}", file=sys.stderr)
  sys.exit(2)


def named_files(flag: str, given: Sequence[str]) -> dict[str, str]:
  """Returns the files of NAME=FILE flags by name; ValueError for other forms or repeated names."""
  files: dict[str, str] = {}
  for text in given:
    name, _, file = text.partition("=")
    if not name or not file or name in files:
      raise ValueError(f"{flag} {text}: expected NAME=FILE, each name once")
    files[name] = file
  return files


def refuse(args: Any, flags: Collection[str], why: str) -> None:
  """Raises ValueError, `--FLAG WHY`, if one of these flags is not at its default."""
  for field in dataclasses.fields(args):
    if field.name in flags and getattr(args, field.name) != field.default:
      raise ValueError(f"--{field.name} {why}")


def _wrapped(text: str, width: int = sys.maxsize) -> str:
  """Wraps the paragraphs of a text, except those that begin indented, which are commands."""
  wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
  fill = lambda x: x if x.startswith(" ") else wrapper.fill(" ".join(x.split()))
  return "\n\n".join(map(fill, re.split(r"\n\s*\n", text.strip("\n").rstrip())))


def _name(flag: str) -> str:
  """Returns a flag in the spelling of its field: tyro also takes hyphens."""
  return f"--{flag[2:].replace('-', '_')}" if flag.startswith("--") else flag


def parse(args: type[Args], description: str | None = None) -> Args:
  """Parses the command line of a script into its frozen dataclass of flags.

  A script with an `Experiment` field named `config` takes `--config=FILE` for its defaults and
  `--config.SECTION.KEY=VALUE` for overrides.  A field that is False by default takes `--NAME`.
  A wrong flag or config file raises SystemExit, with the message in it or on standard error; a
  URL where a local path is expected raises ValueError.
  """
  fields, default = dataclasses.fields(args), None
  home = lambda flag: flag[1] + os.path.expanduser(flag[2])  # shells do not expand "~" after "="
  argv = [re.sub(r"^(--[\w.-]+=)(~[\w.-]*)(?=/|$)", home, text) for text in sys.argv[1:]]
  description = description or ""
  for text in (*argv, os.getcwd()):
    if not text.isascii() and text != text.encode(errors="replace").decode():
      _wrong_flag(f"{text!r}: not UTF-8, which libraries for data and checkpoints need")
  hints = get_type_hints(args)
  paths = {"--config", *(f"--{name}" for name in hints if "Path" in str(hints[name]))}
  for text, after in zip(argv, [*argv[1:], None]):
    flag, equals, value = text.partition("=")
    if _name(flag) in paths and (value if equals else after) == "":  # pathlib reads it as "."
      _wrong_flag(f"{flag}=: an empty path: is a variable of the shell not set?")
  switches = {f"--{field.name}" for field in fields if field.default is False}
  argv = [
    f"{flag}=True" if _name(flag) in switches and after not in ("True", "False") else flag
    for flag, after in zip(argv, [*argv[1:], ""])
  ]
  if any(field.name == "config" for field in fields):
    file = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    file.add_argument("--config", metavar="FILE", required=not {"-h", "--help"} & set(argv))
    known, argv = file.parse_known_args(argv)
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    experiment = read(known.config) if known.config else config_lib.Experiment()
    description = f"{description}\n\n{CONFIG}"
    default = args(**dict.fromkeys(required, tyro.MISSING_NONPROP), config=experiment)
  if (width := shutil.get_terminal_size().columns) < LEAST_WIDTH:
    os.environ["COLUMNS"] = str(width := LEAST_WIDTH)
  description = _wrapped(description, width)
  if tyro_strings := getattr(tyro, "_strings", None):
    # Its own function keeps line breaks of the source, and would undo those of `description`.
    tyro_strings.remove_single_line_breaks = lambda x: x if x == description else _wrapped(x)
  options = {
    "prog": exits.script(),
    "use_underscores": True,
    "config": (tyro.conf.FlagConversionOff,),
  }
  given = tyro.cli(args, args=argv, default=default, description=description, **options)
  _refuse_urls(given)
  return given


def _refuse_urls(args: Any, section: str = "") -> None:
  """Raises ValueError for a URL where a local path is expected: pathlib reads gs:// as a folder."""
  for field in dataclasses.fields(args):
    value, name = getattr(args, field.name), f"{section}{field.name}"
    if dataclasses.is_dataclass(value):
      _refuse_urls(value, f"{name}.")
    for path in value if isinstance(value, tuple) else [value]:
      if isinstance(path, pathlib.Path) and re.match(r"[a-z][a-z0-9+.-]*:/", str(path)):
        raise ValueError(
          f"--{name}={path}: expected a local path, as only work directories of train.py can be in "
          "a bucket; download the file first, or upload it later"
        )
