"""What the site adds to Sphinx: flags of scripts and settings of configs as tables, and MathML.

Scripts and configs are read as text and never imported.
"""

import ast
import dataclasses
import inspect
import itertools
import pathlib
import re
import textwrap
from collections.abc import Iterator

from docutils import nodes
from latex2mathml import converter
from sphinx import application

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Pages of the site that are files beside docs/: there they are links, as a repository is read.
BESIDE = {"readme": "README.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
BESIDE |= {"notebooks": "notebooks/README.md"}


@dataclasses.dataclass(frozen=True)
class Field:
  """A field of a dataclass, as its source says it."""

  name: str
  type: str
  default: str | None  # None: required
  text: str


class Module:
  """A source file, with what its imports from the project mean."""

  def __init__(self, path: pathlib.Path):
    self.text = path.read_text()
    self.tree = ast.parse(self.text)
    self.lines = self.text.splitlines()
    self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
    self.imported = {}  # name: the file that it is
    for node in self.tree.body:
      if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prm_jax"):
        folder = ROOT / node.module.replace(".", "/")
        for alias in node.names:
          self.imported[alias.asname or alias.name] = folder / f"{alias.name}.py"

  def found(self, node: ast.expr | None) -> tuple["Module", str] | None:
    """The module and name of a class of the project; None for anything else."""
    if isinstance(node, ast.Name) and node.id in self.classes:
      return self, node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      path = self.imported.get(node.value.id)
      if path and path.is_file() and node.attr in (module := Module(path)).classes:
        return module, node.attr
    return None

  def fields(self, name: str, flat: bool = True) -> Iterator[Field]:
    """The fields of a dataclass, those of its bases first; flat: nested ones by dotted names."""
    body = self.classes[name].body
    for base in self.classes[name].bases:
      if found := self.found(base):
        yield from found[0].fields(found[1], flat)
    for i, node in enumerate(body):
      if not isinstance(node, ast.AnnAssign):
        continue
      field = node.target.id
      nested = self.found(node.annotation)
      if flat and nested and nested[1] != "Experiment":
        for each in nested[0].fields(nested[1]):
          yield dataclasses.replace(each, name=f"{field}.{each.name}")
        continue
      after = body[i + 1] if i + 1 < len(body) else None
      default = ast.unparse(node.value) if node.value else None
      yield Field(field, self._type(node.annotation), default, self._comment(node, after))

  def _type(self, node: ast.expr) -> str:
    """A type as it is written; in place of another module's name for a choice, the choice."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      path = self.imported.get(node.value.id)
      for each in Module(path).tree.body if path and path.is_file() else ():
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == node.attr:
          written = ast.unparse(each.value)
          return written if written.startswith("Literal[") else ast.unparse(node)
    return ast.unparse(node)

  def _comment(self, node: ast.AnnAssign, after: ast.stmt | None) -> str:
    """What is said of a field: in a string after it, or in comments above it and at its end."""
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
      return " ".join(after.value.value.split())
    above = []
    for line in reversed(self.lines[: node.lineno - 1]):
      if not line.strip().startswith("#"):
        break
      above.insert(0, line.strip().lstrip("# "))
    behind = self.lines[node.end_lineno - 1][node.end_col_offset :].partition("#")[2].strip()
    return " ".join([*above, behind]).strip()


def cell(text: str) -> str:
  """Text in a cell of a Markdown table."""
  return re.sub(r"([|<*])", r"\\\1", text)


def code(text: str) -> str:
  return f"`{text}`".replace("|", "\\|") if text else ""


TYPES = {"Path": "path", "str": "text", "Escaped": "text", "LocalPath": "text", "Text": "text"}
TYPES |= {"Count": "int, from 1", "Whole": "int, from 0", "Share": "0 to 1", "Decay": "0 to 1"}
TYPES |= {"Positive": "number above 0", "NonNegative": "number from 0", "Theta": "number from 1"}
TYPES |= {"Axis": "int", "float": "number", "bool": "yes or no"}


def type_name(text: str) -> str:
  """A type for people: without the modules that it is from."""
  text = re.sub(r"Changeable\[(.+)\]$", r"\1", text).replace(" | None", "")
  text = re.sub(r"Annotated\[(\w+), .*\]$", r"\1", text)
  text = re.sub(r"Literal\[(.*)\]$", r"\1", re.sub(r"\b[a-z_]+\.(?=\w)", "", text))
  if several := re.match(r"tuple\[(.*), \.\.\.\]$", text):
    return f"{type_name(several[1])}; several"
  return TYPES.get(text, text)


def table(fields: Iterator[Field], prefix: str = "") -> list[str]:
  """A Markdown table of fields."""
  rows = [f"| {'flag' if prefix else 'setting'} | takes | default | |", "|---|---|---|---|"]
  for each in fields:
    default = "required" if each.default is None else code(each.default.replace("'", '"'))
    takes = cell(type_name(each.type))
    rows.append(f"| {code(prefix + each.name)} | {takes} | {default} | {cell(each.text)} |")
  return rows if len(rows) > 2 else []


def scripts() -> str:
  """Every script: what it says of itself, and its flags."""
  lines = []
  for path in sorted((ROOT / "scripts").glob("*.py")):
    module = Module(path)
    lines += ["", f"## {path.name}", "", "```text", ast.get_docstring(module.tree), "```", ""]
    if "Args" in module.classes:
      lines += table(module.fields("Args"), "--")
  return "\n".join(lines)


def settings() -> str:
  """Every section of an experiment's configuration."""
  module = Module(ROOT / "prm_jax/config.py")
  lines = []
  for node in module.classes["Experiment"].body:
    if isinstance(node, ast.AnnAssign):
      name, section = node.target.id, ast.unparse(node.annotation)
      lines += ["", f"## {name}", ""]
      if said := ast.get_docstring(module.classes[section]):
        lines += [textwrap.fill(said, 100), ""]
      lines += table(
        dataclasses.replace(field, name=f"{name}.{field.name}") for field in module.fields(section)
      )
  return "\n".join(lines)


def read(app: application.Sphinx, name: str, source: list[str]) -> None:
  """Puts generated tables in place of their marks, and files beside docs/ in place of links.

  What a page says to those who read it without the site is left out.
  """
  for mark, make in (("<!-- scripts -->", scripts), ("<!-- settings -->", settings)):
    if mark in source[0]:
      source[0] = source[0].replace(mark, make())
  source[0] = re.sub(r"^> In a clone .*\n(> .*\n)*\n", "", source[0], flags=re.M)
  if name in BESIDE:
    text = (ROOT / BESIDE[name]).read_text()
    folder = pathlib.Path("..", BESIDE[name]).parent
    source[0] = re.sub(r"(?<=\]\()(?!https?:|#)", f"{folder}/", text).replace("](../docs/", "](")
  up = "../" * (name.count("/") + 1)
  for page, path in BESIDE.items():
    source[0] = source[0].replace(f"]({up}{path}", f"]({up[3:]}{page}.md")


SECTION = re.compile(r"(Args|Returns|Raises|Yields):$")
RESULT = re.compile(r"  (\w[\w ,]*): ")


def escaped(line: str) -> str:
  """A line in which |x| is no substitution and x_ no link, outside of `code`."""
  parts = re.split(r"(`[^`]*`)", line)
  parts[::2] = [re.sub(r"(\||(?<=\w)_(?!\w))", r"\\\1", part) for part in parts[::2]]
  return "".join(parts)


def docstring(app: application.Sphinx, what, name, obj, options, lines: list[str]) -> None:
  """Makes reStructuredText of what docstrings leave to the eye, before napoleon reads them.

  An indented block keeps its lines, as it is a formula.  Several named results are a list.
  """
  start = lines.index("Returns:") + 1 if "Returns:" in lines else len(lines)
  listed = len([*filter(RESULT.match, itertools.takewhile(lambda x: x[:1] == " ", lines[start:]))])
  out, section, literal = [], "", False
  for line in lines:
    if line and line[0] != " ":
      section, literal = line if SECTION.match(line) else "", False
    if section == "Returns:" and listed > 1:
      line = ":returns:" if line == section else RESULT.sub(r"  * **\1**: ", line)
    elif line[:1] == " " and not section and not out[-1] and ">>>" not in line and not literal:
      out += ["::", ""]
      literal = True
    out.append(line if literal else escaped(line))
  has_fields = what == "class" and {"__dataclass_fields__", "__struct_fields__"} & {*dir(obj)}
  if has_fields and "Args:" not in lines:
    out += described(obj)
  lines[:] = out


def described(kind: type) -> list[str]:
  """The fields of a dataclass or struct, with the comments beside them."""
  module = Module(pathlib.Path(inspect.getsourcefile(kind)))
  if kind.__name__ not in module.classes:
    return []
  fields = [field for field in module.fields(kind.__name__, flat=False) if field.name[0] != "_"]
  return [
    "",
    *(f"* **{each.name}**: {escaped(each.text or type_name(each.type))}" for each in fields),
  ]


def mathml(display: str):
  """The visitor of a formula: MathML, which browsers lay out without a script."""

  def visit(self, node) -> None:
    found = converter.convert(node.astext(), display=display)
    self.body.append(f'<div class="formula">{found}</div>' if display == "block" else found)
    raise nodes.SkipNode

  return visit


def setup(app: application.Sphinx) -> dict[str, bool]:
  app.connect("source-read", read)
  app.connect("autodoc-process-docstring", docstring, priority=400)  # napoleon: 500
  app.add_html_math_renderer("mathml", (mathml("inline"), None), (mathml("block"), None))
  app.config.html_math_renderer = "mathml"
  return {"parallel_read_safe": True, "parallel_write_safe": True}
