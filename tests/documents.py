"""Readers of the documentation for its tests: links, commands and Python blocks of Markdown."""

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import io
import pathlib
import re
import shlex
import sys
import types
from collections.abc import Iterator
from unittest import mock

from conftest import ROOT

from prm_jax.runtime import command_line

FENCE = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
INTERPRETER = r"(?:python|bash) (scripts/|docs/|tests/)([\w.]+)((?:[^`\n])*)"
OPERATOR = re.compile(r"^[;&|<>]+$")
PLACEHOLDER = "..."  # for any arguments; `DIR`, `$WORKDIR` and the like count as values
CONFIG = "configs/arithmetic.py"  # in place of a config file that a page leaves open
SOME = {"benchmark.py": "aggregation", "experiment.py": "supervision"}  # in place of NAME
NUMBER = re.compile(r"(=)[NK]$")
OLD = "docs/benchmark_tables.md"  # quotes the commands of past runs
PASSED_ON = ("test.sh",)  # takes pytest's flags


def pages() -> list[pathlib.Path]:
  """Returns the Markdown files of the project except the changelog, which names old commands."""
  docs = [path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts]
  return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(docs)]


def texts() -> dict[str, str]:
  """Returns the text of pages, and the docstrings of scripts and configs as code, by path."""
  by_path = {str(path.relative_to(ROOT)): path.read_text() for path in pages()}
  del by_path[OLD]
  for path in sorted([*ROOT.glob("scripts/*.py"), *ROOT.glob("configs/**/*.py")]):
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    by_path[str(path.relative_to(ROOT))] = f"```\n{docstring}\n```\n"
  return by_path


def without_code(text: str) -> str:
  """Returns a page without its code, where brackets are no links."""
  return re.sub(r"`[^`]*`", "", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
  """Returns the anchors of a page's headings, as a repository browser makes them."""
  slugs = set()
  for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M):
    heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    slug = re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-")
    slugs.add(slug if slug not in slugs else f"{slug}-1")
  return slugs


def broken_links(path: pathlib.Path, text: str) -> list[str]:
  """Returns the relative links of a page whose file or heading does not exist."""
  broken = []
  for link in LINK.findall(without_code(text)):
    if re.match(r"[a-z]+:", link):
      continue
    name, _, anchor = link.partition("#")
    target = (path.parent / name).resolve() if name else path
    exists = target.exists()
    if exists and anchor:
      exists = anchor in anchors(text if target == path else target.read_text())
    if not exists:
      broken.append(link)
  return broken


@dataclasses.dataclass(frozen=True)
class Command:
  """A call of a script on a page."""

  script: str  # from the root of the repository
  arguments: tuple[str, ...]
  whole: bool  # False: required arguments may be missing

  def __str__(self):
    return " ".join([self.script, *self.arguments])


def commands(text: str) -> Iterator[Command]:
  """Yields the calls of scripts in a page, from blocks of code and from code within a line."""
  blocks = [match[2] for match in FENCE.finditer(text) if not match[1].startswith("python")]
  prose = FENCE.sub("", text)
  blocks += re.findall(r"(?:^    .*\n)+", prose, re.M)
  for block in blocks:
    joined = re.sub(r" *\\\n *", " ", block)
    for folder, name, rest in re.findall(INTERPRETER, joined):
      yield command(folder + name, rest)
  for span in re.findall(r"`([^`]+)`", prose):
    span = " ".join(span.split())
    if inside := re.search(INTERPRETER, span):
      yield command(inside[1] + inside[2], inside[3])
    elif (call := re.match(r"(\w+\.(?:py|sh)) (.*)", span)) and (
      ROOT / "scripts" / call[1]
    ).exists():
      yield command(f"scripts/{call[1]}", f"{call[2]} {PLACEHOLDER}")


def command(script: str, rest: str) -> Command:
  """Returns the call in the text after the script's name, up to the next command."""
  if rest.count('"') % 2:  # inside of another command's quotes
    rest = rest.partition('"')[0]
  words = shlex.shlex(rest, posix=True, punctuation_chars=";&|<>")
  words.whitespace_split, arguments = True, []
  for word in words:
    if OPERATOR.match(word):
      break
    arguments.append(word)
  kept = tuple(word for word in arguments if word != PLACEHOLDER and word[0] != "[")
  return Command(script, kept, whole=len(kept) == len(arguments))


@functools.cache
def complaint(given: Command) -> str:
  """Returns the error that the script's parser finds in a call, or ""; runs no work."""
  path = ROOT / given.script
  if path.stem == "NAME":
    return ""
  if not path.is_file():
    return "there is no such script"
  if path.parent.name != "scripts" or path.name in PASSED_ON:
    return ""
  return shell_error(path, given) if path.suffix == ".sh" else python_error(path, given)


def shell_error(path: pathlib.Path, given: Command) -> str:
  """Returns which flags of a call are not among the patterns of the script's `case`."""
  known = {*re.findall(r"(--[a-z_]+)(?:=[^ )|]*)?(?= *[|)])", path.read_text()), "--help"}
  flags = [word.partition("=")[0] for word in given.arguments if word.startswith("--")]
  flags = flags[: flags.index("--")] if "--" in flags else flags
  return ", ".join(f"there is no {flag}" for flag in flags if flag not in known)


class Parsed(Exception):
  """Ends a script's `main` once its flags have been read."""


@functools.cache
def module(path: pathlib.Path) -> types.ModuleType:
  """Returns an imported script; tyro resolves its types by the module's name."""
  spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
  sys.modules[spec.name] = script = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(script)
  return script


def python_error(path: pathlib.Path, given: Command) -> str:
  """Returns the error that a Python script's parser finds in a call, or ""."""
  script, read, printed = module(path), command_line.parse, io.StringIO()
  arguments = [NUMBER.sub(r"\g<1>2", word) for word in given.arguments]
  arguments = [f"--config={CONFIG}" if word == "--config=..." else word for word in arguments]
  arguments = [SOME.get(path.name, word) if word == "NAME" else word for word in arguments]

  def parse(args, description=None):
    sys.argv = [path.name, *filled(args, sys.argv[1:], given.whole)]
    read(args, description)
    raise Parsed

  def run(*_):
    raise Parsed

  with (
    mock.patch.object(command_line, "parse", parse),
    mock.patch.dict(
      vars(script), dict.fromkeys(("run", "every"), run) if path.name == "benchmark.py" else {}
    ),
    mock.patch.object(sys, "argv", [path.name, *arguments]),
    contextlib.redirect_stderr(printed),
    contextlib.redirect_stdout(printed),
  ):
    try:
      script.main()
    except Parsed:
      return ""
    except SystemExit as error:
      if not error.code and "--help" in arguments:
        return ""
      message = f"{printed.getvalue()}{error.code}"
      return "" if not given.whole and "Missing argument" in message else message
    except ValueError as error:
      return str(error)
  return "its flags were not read"


def filled(args: type, argv: list[str], whole: bool) -> list[str]:
  """Returns the arguments, with values for required flags that a call leaves open."""
  given, more = {word.partition("=")[0] for word in argv}, []
  for field in dataclasses.fields(args) if not whole else ():
    flag = f"--{field.name}"
    required = field.default is field.default_factory is dataclasses.MISSING
    if field.name == "config" and flag not in given:
      more.append(f"{flag}={CONFIG}")
    elif required and flag not in given and field.name != "name":  # that one is positional
      more += [flag, "x"]
  return [*argv, *more]


def python_blocks(text: str) -> Iterator[tuple[str, bool]]:
  """Yields the Python blocks of a page, and whether each is marked as runnable."""
  for info, code in FENCE.findall(text):
    if info.split()[:1] == ["python"]:
      yield code, "runnable" in info.split()
