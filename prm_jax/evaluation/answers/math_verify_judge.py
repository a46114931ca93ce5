"""Judges two answers with math-verify, in a worker process that may be killed.

By itself, math-verify (0.9) calls 1/2004! and 1/2006! equal, and 11 in base 2 and 11, and an
equation and its right side in one order only.  This module puts every pair in the order that
math-verify judges correctly, and checks again the pairs that math-verify calls equal.
"""

import functools
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import latex2sympy2_extended as latex2sympy
import math_verify
import sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import grader
from sympy import Basic, Eq, FiniteSet, Interval, MatrixBase, Set, Tuple

from prm_jax.evaluation.answers.normal_form import normal_form, numerals, unfenced
from prm_jax.evaluation.answers.plain_text import latex

MAX_EXPONENT, MAX_FACTORIAL, MAX_DIGITS, MAX_DEPTH = 10_000, 5_000, 300, 30
IN_BASE = re.compile(r"(\d+)_\{?(\d+)\}?")
FENCED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
SENTENCE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}[ ,]+[A-Za-z]{2,}")
# Words after a number that belong to its value.  UNIT takes others for a unit: math-verify knows
# percent and few units, and reads the rest as products of letters.
NOT_UNITS = (
  "alpha|beta|gamma|delta|(?:var)?epsilon|zeta|theta|iota|kappa|lambda|sigma|upsilon|omega|infinity"
  "|sqrt|root|arc(?:sin|cos|tan|sec|csc|cot)|sinh|cosh|tanh|sech|csch|coth|modulo|squared|cubed"
  "|factorial|choose|plus|minus|times|over|divided|negative|remainder|percent|percentage|dozens?"
  "|half|halves|quarters?|(?:third|four|fif|six|seven|eigh|nin|ten|hundred|thousand)(?:th)?s?"
)
UNIT = re.compile(
  rf"((?:[^A-Za-z]|\\[A-Za-z]+)*[\d}}])\s+((?!(?i:{NOT_UNITS})\b)[A-Za-z]{{4,}}(?: [A-Za-z]+)*)\.?"
)
POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
POWER = re.compile(
  rf"(?i)(?<=[\d}}])(\$?)(?:\s|~|\\[ ,;])*(\\text\{{)?\s*({'|'.join(POWERS)})s?(?![A-Za-z])"
)
# A sum or product that ends in a letter: math-verify drops the c of 11a + 2c as a unit.
LETTER_LAST = re.compile(
  r"(?s)(?:.*=)?[^=]*(?:[\w})]\s*[+-]|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z]))[^=]*[\d}\s][A-Za-z][\s$.]*"
)
NO_UNITS = math_verify.LatexExtractionConfig(
  normalization_config=NormalizationConfig(
    units=False, malformed_operators=True, nits=True, boxed="all"
  )
)
UNITS, PLAIN = math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()
# A number among words and signs that are no mathematics (**Answer:** 5, 10 a.m.).  In a formula it
# cannot read, math-verify would take any number for the value, such as the 5 of 5@x+2.  Possessive
# quantifiers keep the time linear.
LONE_NUMBER = re.compile(
  r"(?:#+\s+|\d{1,2}[.)]\s+|\*\*)?[A-Za-z\s.:;,)=→⇒~$]*+(?:(?<=:)\*\*\s*)?"
  r"[-+]?(?:\d[\d,]*+(?:\.\d+)?|\.\d+)(?![\w.])"
  r"(?:[^\w\\^+*/=<>{}|!&\u2200-\u22ff\n-]|(?<=[\sA-Za-z.])[A-Za-z])*+(?:\\\\[^\S\n]*)?"
  r"(?:\n[^\d\\^]*)?"
)
# math-verify reads only a lone i as the imaginary unit, and does not read an upright e.
CONSTANT = re.compile(r"(?<=\d)(i)(?![A-Za-z_])|(?<![A-Za-z_\\])(i)(?=\d)|\\mathrm\{([ei])\}")
# Variables, or products of two; and what is none, such as \mathbb{R}.
LETTERS = re.compile(
  r"\\(?:math(?:bb|cal|frak|scr)|text|mbox|operatorname)\s*(?:\{[^{}]*\}|[A-Za-z])"
  r"|(?<![A-Za-z\\])[A-Za-z]{1,2}(?![A-Za-z])"
)
RARE = ("xi", "eta", "zeta", "chi", "iota", "upsilon")
INFINITE = sympy.oo, -sympy.oo, sympy.zoo, sympy.nan
EXACT, ROUNDED = 1e-25, 2e-2  # largest relative difference between equal values

warnings.filterwarnings("ignore")
reads = lambda answer: None  # called with the answer that is parsed next; set by `worker`


def judge(a: str, b: str, precision: int = 6) -> str:
  """Returns "equal", "different", or "undecided: " and the reason.

  Args:
    precision: number of decimals that count where a number is given in decimals.
  """
  if reason := too_large(latex(unfenced(a))) or too_large(latex(unfenced(b))):
    return f"undecided: {reason}"
  forms = normal_form(a), normal_form(b)
  if any(map(IN_BASE.fullmatch, forms)):
    values = [_in_base(form) for form in forms]
    if None not in values:
      return "equal" if values[0] == values[1] else "different"
  apart = _apart(a, b)
  reads(a)
  x = parsed(apart[0])
  reads(b)
  y = parsed(apart[1])
  reads("")
  if not x or not y:
    words = all(re.fullmatch(r"[A-Za-z' -]+", form) for form in forms)
    return "different" if words else "undecided: not parsed"
  options = {"float_rounding": precision, "timeout_seconds": None}
  x, y = _ordered(list(x), list(y))
  equal = math_verify.verify(x, y, **options)
  if not equal and _is(grader.is_equation, x[0]) == _is(grader.is_equation, y[0]):
    equal = math_verify.verify(y, x, **options)
  equal = equal or _round_alike(x[0], y[0], precision)
  equal = equal and not _of_a_multiple(x[0], y[0]) and not _contradicted(x[0], y[0])
  return "equal" if equal else "different"


def _apart(a: str, b: str) -> tuple[str, str]:
  """Returns the answers with a rare letter for R where an answer has both R and r.

  math-verify reads capitals as small letters.  In a sentence, words are no variables.
  """
  both: set[str] = set()
  for answer in (a, b):
    found = [x for x in LETTERS.findall(answer) if x[0] != "\\"]
    if SENTENCE.search(answer):
      found = [x for x in found if len(x) == 1 and x not in "AI"]
    letters = {*"".join(found)}
    both |= {x for x in letters if x.isupper() and x.lower() in letters}
  rare = (name for name in RARE if name not in a + b)
  names = {letter: rf"\{name} " for letter, name in zip(sorted(both), rare)}

  def rewritten(match: re.Match) -> str:
    text = match[0]
    return text if text[0] == "\\" else "".join(names.get(x, x) for x in text)

  return LETTERS.sub(rewritten, a), LETTERS.sub(rewritten, b)


def too_large(text: str) -> str:
  """Returns why an answer would take minutes or gigabytes to parse; "" if it would not."""
  depths = itertools.accumulate((c in "{([") - (c in "})]") for c in text)
  if max(depths, default=0) > MAX_DEPTH:
    return "nested too deeply"
  if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", text):
    return "control characters"
  if re.search(rf"\d{{{MAX_DIGITS}}}", re.sub(r"[\s,]|\\[!,]", "", text)):
    return "too many digits"
  for number in re.findall(r"([\d.,]+|[)}\]])\s*!", text):
    if not re.fullmatch(r"\d+", number) and re.search(r"!\s*\)?\s*!", text):
      return "nested factorials"
    if re.fullmatch(r"\d+", number) and int(number) > MAX_FACTORIAL:
      return "a large factorial"
  if re.search(r"\\(?:[dt]?binom|sum|prod|int)|\\choose|\*\*", text):
    limits = [int(digits) for digits in re.findall(r"\d+", text)]
    if max(limits, default=0) > MAX_EXPONENT or re.search(r"\d\^\{?\d", text):
      return "a large sum, product or binomial"
  exponents = re.findall(r"(?:\^|\*\*)\s*[{(]?\s*-?\s*([\d,]+)", text)
  if any(int(re.sub(r"\D", "", exponent) or 0) > MAX_EXPONENT for exponent in exponents):
    return "a large exponent"
  if len(re.findall(r"(?:\^|\*\*)[{(\s]*-?[\d.]+[})\s]*(?=\^|\*\*|!)", text)) > 1:
    return "a tower of powers"
  return ""


@functools.lru_cache(2_000)
def parsed(text: str) -> tuple[Any, ...]:
  """Returns what math-verify reads in a text: an expression and its source, or nothing."""
  text = numerals(latex(unfenced(text))).replace(r"\$", "")
  text = text.replace("$", "") if text.count("$") == 1 else text  # of money
  text = POWER.sub(lambda x: rf"\cdot 10^{{{POWERS[x[3].lower()]}}}{x[1]} {x[2] or ''}", text)
  if unit := UNIT.fullmatch(text):
    text = rf"{unit[1]}\text{{ {unit[2]}}}"
  text = CONSTANT.sub(r"{\1\2\3}", text)
  readers = [NO_UNITS if LETTER_LAST.fullmatch(text) else UNITS, PLAIN]
  if not FENCED.search(text) and not SENTENCE.search(text):
    readers = readers if LONE_NUMBER.fullmatch(text) else readers[:1]
    text = f"${text}$"
  parts = math_verify.parse(text, readers, parsing_timeout=None)
  if parts and isinstance(parts[0], str):  # only the source: math-verify could not read it
    return ()
  if parts and isinstance(parts[0], Eq) and isinstance(parts[0].rhs, Set):  # x in [1, 2]
    parts[0] = parts[0].rhs
  return tuple(parts)


def _in_base(form: str) -> int | None:
  """Returns the value of digits in the base of their subscript, else ten; None if not valid."""
  if match := IN_BASE.fullmatch(form):
    digits, base = match[1], int(match[2])
    return int(digits, base) if 2 <= base <= 36 and max(map(int, digits)) < base else None
  return int(form) if re.fullmatch(r"\d{1,300}", form) else None


def _is(kind: Callable[[Basic], bool], x: Any) -> bool:
  return isinstance(x, Basic) and kind(x)


def _ordered(x: list, y: list) -> tuple[list, list]:
  """Returns the two answers in the order gold, prediction.

  math-verify unwraps any equation in a prediction but only an assignment in gold, so an equation is
  gold.  A relation is gold too: only in gold does math-verify turn it into its set.
  """
  for kind in (grader.is_equation, grader.is_relation):
    if _is(kind, x[0]) != _is(kind, y[0]):
      x, y = (x, y) if _is(kind, x[0]) else (y, x)
      if kind is grader.is_equation:
        last = grader.take_last_relation(x[0])
        if isinstance(last, Eq) and not last.free_symbols:  # 5 + 6 = 11
          x = [last.rhs, *x[1:]]
      return x, y
  return (x, y) if str(x[-1]) <= str(y[-1]) else (y, x)


def _of_a_multiple(x: Any, y: Any) -> bool:
  """Returns whether x is an equation such as x/2 = 4, whose right side y is not the value of x."""
  if not isinstance(x, Eq) or _is(grader.is_equation, y):
    return False
  return x.lhs.is_Mul and any(factor.is_number and factor != 1 for factor in x.lhs.args)


def _round_alike(x: Any, y: Any, precision: int) -> bool:
  """Returns whether two single numbers, one of them given in decimals, are rounded to the same.

  math-verify rounds both, but sympy's Integer 3 is not equal to the rounded Float 3.000000.
  """
  if any(isinstance(each, Set | Tuple | MatrixBase) for each in (x, y)):
    return False
  a, b = _values(x), _values(y)
  if not a or not b or len(a + b) != 2 or not (a[0][1] or b[0][1]):
    return False
  return len({round(value * 10**precision) for value, _ in a + b}) == 1


def _contradicted(x: Any, y: Any) -> bool:
  """Returns whether values at 60 digits differ by more than rounding explains."""
  a, b = _values(x), _values(y)
  if a is None or b is None or len(a) != len(b):
    return False
  for (p, rough_p), (q, rough_q) in zip(a, b):
    limit = ROUNDED if rough_p or rough_q else EXACT
    if abs(p - q) > limit * max(abs(p), abs(q)):
      return True
  return False


def _values(x: Any) -> list[tuple[Any, bool]] | None:
  """Returns each number in x at 60 digits, and whether it was given in decimals.

  Returns None if a part of x is no number.
  """
  if _is(grader.is_assignment_relation, x):
    x = grader.take_last_relation(x).rhs
  parts = [x]
  if isinstance(x, Interval):
    parts = [end for end in (x.start, x.end) if end not in INFINITE]
  elif isinstance(x, FiniteSet | Tuple | latex2sympy.sets.FiniteSet):
    parts = [*x.args]
  elif isinstance(x, MatrixBase):
    parts = [*x]
  elif isinstance(x, Set) or not isinstance(x, Basic):
    return None
  out = []
  for part in parts:
    if not isinstance(part, Basic) or part.free_symbols or part.has(*INFINITE):
      return None
    try:
      value = sympy.N(part.doit(), 60)
    except Exception:  # sympy raises errors of any kind; math-verify's verdict then stands
      return None
    if not isinstance(value, Basic) or not value.is_comparable:
      return None
    out.append((value, part.has(sympy.Float)))
  ordered = isinstance(x, Tuple | Interval | MatrixBase)
  return out if ordered else sorted(out, key=lambda pair: pair[0])
