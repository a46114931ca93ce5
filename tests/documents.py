"""What the documentation says, to be checked: links, commands and Python in Markdown."""

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
PLACEHOLDER = "..."  # of anything; `DIR`, `$WORKDIR` and the like are values as any other
CONFIG = "configs/arithmetic.py"  # in place of a config file that is left open
SOME = {"benchmark.py": "aggregation", "experiment.py": "supervision"}  # in place of NAME
NUMBER = re.compile(r"(=)[NK]$")
OLD = "docs/benchmark_tables.md"  # quotes the commands of past runs
PASSED_ON = ("test.sh",)  # takes pytest's flags


def pages() -> list[pathlib.Path]:
  """The Markdown of the project, but for the changelog, which speaks of what is gone."""
  of_docs = [path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts]
  return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(of_docs)]


def texts() -> dict[str, str]:
  """Pages, and the docstrings of scripts and configs as pages of code, by path."""
  found = {str(path.relative_to(ROOT)): path.read_text() for path in pages()}
  del found[OLD]
  for path in sorted([*ROOT.glob("scripts/*.py"), *ROOT.glob("configs/**/*.py")]):
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    found[str(path.relative_to(ROOT))] = f"```\n{said}\n```\n"
  return found


def without_code(text: str) -> str:
  """The prose of a page: a bracket in code is no link."""
  return re.sub(r"`[^`]*`", "", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
  """The anchors of a page's headings, as a repository browser makes them."""
  found = set()
  for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M):
    heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    slug = re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-")
    found.add(slug if slug not in found else f"{slug}-1")
  return found


def broken_links(path: pathlib.Path, text: str) -> list[str]:
  """The relative links of a page whose file or heading is not there."""
  broken = []
  for link in LINK.findall(without_code(text)):
    if re.match(r"[a-z]+:", link):
      continue
    name, _, anchor = link.partition("#")
    target = (path.parent / name).resolve() if name else path
    there = target.exists()
    if there and anchor:
      there = anchor in anchors(text if target == path else target.read_text())
    if not there:
      broken.append(link)
  return broken


@dataclasses.dataclass(frozen=True)
class Command:
  """A call of a script, as a page has it."""

  script: str  # from the root of the repository
  arguments: tuple[str, ...]
  whole: bool  # False: what is required may be missing

  def __str__(self):
    return " ".join([self.script, *self.arguments])


def commands(text: str) -> Iterator[Command]:
  """The calls of scripts in a page: in blocks of code, and in code within a line."""
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
  """A call from the text after the script's name, which may go on with other commands."""
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
  """What is wrong with a call; "": nothing.  The script's own parser decides; nothing is run."""
  path = ROOT / given.script
  if path.stem == "NAME":
    return ""
  if not path.is_file():
    return "there is no such script"
  if path.parent.name != "scripts" or path.name in PASSED_ON:
    return ""
  return of_shell(path, given) if path.suffix == ".sh" else of_python(path, given)


def of_shell(path: pathlib.Path, given: Command) -> str:
  """Flags of a shell script are the patterns of its `case`."""
  known = {*re.findall(r"(--[a-z_]+)(?:=[^ )|]*)?(?= *[|)])", path.read_text()), "--help"}
  flags = [word.partition("=")[0] for word in given.arguments if word.startswith("--")]
  flags = flags[: flags.index("--")] if "--" in flags else flags
  return ", ".join(f"there is no {flag}" for flag in flags if flag not in known)


class Parsed(Exception):
  """Ends a script's `main` where its flags have been read."""


@functools.cache
def module(path: pathlib.Path) -> types.ModuleType:
  """A script, imported; tyro resolves its types by the module's name."""
  spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
  sys.modules[spec.name] = found = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(found)
  return found


def of_python(path: pathlib.Path, given: Command) -> str:
  """What the parser of a script says of a call."""
  script, read, said = module(path), command_line.parse, io.StringIO()
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
    contextlib.redirect_stderr(said),
    contextlib.redirect_stdout(said),
  ):
    try:
      script.main()
    except Parsed:
      return ""
    except SystemExit as error:
      if not error.code and "--help" in arguments:
        return ""
      words = f"{said.getvalue()}{error.code}"
      return "" if not given.whole and "Missing argument" in words else words  # a flag is named
    except ValueError as error:
      return str(error)
  return "its flags were not read"


def filled(args: type, argv: list[str], whole: bool) -> list[str]:
  """Arguments with values for required flags that a call leaves open."""
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
  """The Python of a page, and whether it says that it runs as it stands."""
  for info, code in FENCE.findall(text):
    if info.split()[:1] == ["python"]:
      yield code, "runnable" in info.split()
