r"""The two graders that papers report: MATH's, which compares strings, and OpenAI's for PRM800K.

This module reimplements the rules of hendrycks/math modeling/math_equivalence.py (`math_form`) and
of openai/prm800k prm800k/grading/grader.py.  It parses expressions with `expression`, because
sympy's own parser evaluates text as Python.
"""

import collections
import re
from typing import Any

import sympy

UNITS = "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard"
BRACKETS = "()[]"
SIGNS = {"√": "sqrt", "π": "pi", "∞": "inf", "\u222a": "U", "·": "*", "\u00d7": "*"}
TEXT = re.compile(r"^\\text\{(.+?)\}$")
FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
MAX_FACTORIAL = 1_000


def math_equal(a: str, b: str) -> bool:
  """Returns whether two answers are equal by MATH's `is_equiv`."""
  forms = [_math_form(text) for text in (a, b)]
  return a == b if None in forms else forms[0] == forms[1]


def _math_form(text: str) -> str | None:
  """Returns `math_form`, or None if it fails; upstream then compares the raw texts."""
  try:
    return math_form(text)
  except (IndexError, ValueError):
    return None


def math_form(text: str) -> str:
  """Returns the text in the normal form of MATH's `_strip_string`.

  Raises:
    IndexError: the text ends in \\frac or \\sqrt.
    ValueError: the text has several units.
  """
  text = text.replace("\n", "").replace(r"\!", "").replace("\\\\", "\\")
  text = text.replace("tfrac", "frac").replace("dfrac", "frac")
  for removed in (r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$"):
    text = text.replace(removed, "")
  if r"\text{ " in text:  # a unit
    text, _ = text.split(r"\text{ ")
  text = text.replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.")
  if not text:
    return text
  text = "0" + text if text[0] == "." else text
  sides = text.split("=")
  text = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else text
  text = _arguments(text, r"\sqrt", 1).replace(" ", "")
  text = _arguments(text, r"\frac", 2)
  text = r"\frac{1}{2}" if text == "0.5" else text
  match = re.fullmatch(r"(-?(?:0|[1-9]\d*))/(-?(?:0|[1-9]\d*))", text)
  return rf"\frac{{{match[1]}}}{{{match[2]}}}" if match and "-0" not in match.groups() else text


def _arguments(text: str, command: str, count: int) -> str:
  """Returns the text with braces around single-character arguments of a command."""
  head, *parts = text.split(command)
  out = [head]
  for part in parts:
    if part[0] != "{":
      if len(part) < count:
        return text
      rest = part[1:]
      if count == 2 and rest[0] != "{":
        rest = f"{{{rest[0]}}}{rest[1:]}"
      part = f"{{{part[0]}}}{rest}"
    out.append(part)
  return command.join(out)


def openai_equal(given: str, truth: str) -> bool:
  """Returns whether two answers are equal by OpenAI's `grade_answer`.

  Equal answers are the same string by MATH's rules or OpenAI's own, or have parts (of a tuple)
  whose differences sympy simplifies to 0.  Fractions must be in the same terms, and an integer must
  be written as one.
  """
  forms = [_math_or_raw(text) for text in (given, truth)]
  if forms[0] == forms[1]:
    return True
  given, truth = openai_form(given), openai_form(truth)
  if given == truth or not given:
    return given == truth
  truth_parts, given_parts = _parts(truth), _parts(given)
  if len(truth_parts) != len(given_parts):
    return False
  if len(truth_parts) > 1 and (truth[0] != given[0] or truth[-1] != given[-1]):
    return False
  return all(map(_part_equal, truth_parts, given_parts))


def _math_or_raw(text: str) -> str:
  text = text.strip()
  match = TEXT.search(text)
  form = _math_form(match[1].strip() if match else text)
  return text if form is None else form


def openai_form(text: str) -> str:
  """Returns the text in the normal form of OpenAI's `_normalize`."""
  if match := TEXT.search(text):
    text = match[1]
  text = text.replace(r"\%", "%").replace(r"\$", "$").replace("$", "").replace("%", "")
  text = text.replace(" or ", " , ").replace(" and ", " , ")
  for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
    text = text.replace(word, f"*10^{power}")
  for unit in UNITS.split():
    text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
  text = re.sub(r"\^ *\\circ", "", text)
  if text and text[0] == "{" and text[-1] == "}":
    text = text[1:-1]
  text = re.sub(r",\\! *", "", text)
  if _is_integer(text):
    text = str(round(float(text)))
  if "\\" in text:
    text = _plain(text)
  text = re.sub("- *", "-", text)
  text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text).replace(" ", "")  # 7 3/4
  text = text.replace("{", "").replace("}", "").lower()
  return str(int(float(text.replace(",", "")))) if _is_integer(_without_commas(text)) else text


def _plain(text: str) -> str:
  """Returns LaTeX as plain text (\\frac{1}{2} is 1/2), or unchanged if it cannot be read."""
  from pylatexenc import latex2text

  text = text.replace(r"\tfrac", r"\frac").replace(r"\dfrac", r"\frac").replace(r"\frac", r" \frac")
  try:
    text = latex2text.LatexNodes2Text().latex_to_text(text)
  except Exception:  # any kind, as upstream
    return text
  for sign, name in SIGNS.items():
    text = text.replace(sign, name)
  return text.strip()


def _is_integer(text: str) -> bool:
  try:
    value = float(text)
  except ValueError:
    return False
  return abs(value) < float("inf") and abs(value - round(value)) <= 1e-7


def _without_commas(text: str) -> str:
  while (shorter := re.sub(r"(\d)(,)(\d\d\d)($|\D)", r"\1\3\4", text)) != text:
    text = shorter
  return text


def _parts(text: str) -> list[str]:
  """Returns the parts of a tuple or an interval, or the text as the only part."""
  text = _without_commas(text)
  inner = text[1:-1]
  enclosed = len(text) > 2 and text[0] in BRACKETS and text[-1] in BRACKETS
  if enclosed and not any(bracket in inner for bracket in BRACKETS):
    return [part.strip() for part in inner.split(",")]
  return [text]


def _part_equal(truth: str, given: str) -> bool:
  if FRACTION.fullmatch(truth) and FRACTION.fullmatch(given):
    return truth == given
  if _is_integer(_without_commas(truth)) != _is_integer(_without_commas(given)):
    return False
  both = f"({truth})-({given})"
  letters = {x for x in both.replace("sqrt", "").replace("frac", "") if x.isalpha()}
  if len(letters) > 2 or "^{" in both or "^(" in both or re.search(r"\^[0-9]+\^|\^[0-9]{2}", both):
    return False
  try:
    return bool(sympy.simplify(expression(both)) == 0)
  except (ValueError, TypeError, ZeroDivisionError, AttributeError):
    return False


def expression(text: str) -> Any:
  """Returns the sympy expression of a plain text such as 3sqrt(2)/2+x^2.

  Raises:
    ValueError: the text is no expression.
  """
  parser = _Parser(text)
  value = parser.sum()
  if parser.tokens:
    raise ValueError(f"{text!r}: unexpected {parser.tokens[0]!r}")
  return value


class _Parser:
  """A recursive-descent parser: each method consumes its expression from the left of `tokens`."""

  def __init__(self, text: str):
    self.text = text
    self.tokens = collections.deque(re.findall(r"\d+\.?\d*|\.\d+|sqrt|pi|ln|\*\*|\S", text))

  def next_is(self, *expected: str) -> bool:
    return bool(self.tokens) and self.tokens[0] in expected

  def sum(self):
    value = self.product()
    while self.next_is("+", "-"):
      value += self.product() if self.tokens.popleft() == "+" else -self.product()
    return value

  def product(self):
    value = self.signed()
    while self.tokens and not self.next_is("+", "-", ")", "^", "**", "!"):
      if self.next_is("*", "/"):
        divided = self.tokens.popleft() == "/"
        value = value / self.signed() if divided else value * self.signed()
      else:
        value *= self.power()
    return value

  def signed(self):
    if self.next_is("+", "-"):
      return self.signed() if self.tokens.popleft() == "+" else -self.signed()
    return self.power()

  def power(self):
    """Parses an atom with its factorials and its exponent, which may have a sign."""
    value = self.atom()
    while self.next_is("!"):
      self.tokens.popleft()
      if not (value.is_Integer and 0 <= value <= MAX_FACTORIAL):
        raise ValueError(f"{self.text!r}: a factorial of {value}")
      value = sympy.factorial(value)
    if self.next_is("^", "**"):
      self.tokens.popleft()
      return value ** self.signed()
    return value

  def atom(self):
    """Parses a number, a letter, pi, a bracket, or a function of a bracket."""
    token = self.tokens.popleft() if self.tokens else ""
    if token == "(":
      value = self.sum()
      if not self.next_is(")"):
        raise ValueError(f"{self.text!r}: a bracket is not closed")
      self.tokens.popleft()
      return value
    if token in ("sqrt", "ln") and self.next_is("("):  # upstream takes sqrt2 for a name
      return (sympy.sqrt if token == "sqrt" else sympy.log)(self.atom())
    if token == "pi":
      return sympy.pi
    if re.fullmatch(r"[\d.]+", token):
      return sympy.Float(token) if "." in token else sympy.Integer(token)
    if len(token) == 1 and token.isalpha():
      return sympy.Symbol(token)
    raise ValueError(f"{self.text!r}: unexpected {token!r}")
