r"""Rewrites the signs of plain text as LaTeX.

`latex("3√2")` is `3\sqrt{2}`, and `latex("2·10^-3")` is `2\cdot 10^{-3}`.
"""

import re
from collections.abc import Callable

SIGNS = {
  **dict.fromkeys("·⋅∙", r"\cdot "),
  "\u00d7": r"\times ",
  "÷": r"\div ",
  "\u2212": "-",
  "±": r"\pm ",
  **dict.fromkeys("≤⩽", r"\le "),
  **dict.fromkeys("≥⩾", r"\ge "),
  "≠": r"\ne ",
  "π": r"\pi ",
  "∞": r"\infty ",
  "∈": r"\in ",
  "\u222a": r"\cup ",
  "∩": r"\cap ",
  "∅": r"\emptyset ",
  **dict.fromkeys("°º", r"^{\circ}"),
  "½": r"\frac{1}{2}",
  "⅓": r"\frac{1}{3}",
  "⅔": r"\frac{2}{3}",
  "¼": r"\frac{1}{4}",
  "¾": r"\frac{3}{4}",
  "⅕": r"\frac{1}{5}",
  "⅙": r"\frac{1}{6}",
  "⅛": r"\frac{1}{8}",
  **dict.fromkeys("€£¥≈∴∠", " "),
}
TABLE = str.maketrans(SIGNS)
ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
# A root with the number, letter or bracket that it covers; other brackets, to find the closing one.
ROOT = re.compile(r"([√∛∜])\s*(?:(\d+(?:\.\d+)?|[A-Za-zπ](?![A-Za-z]))|(\())?|[()]")
SCRIPTS = [
  (re.compile(f"[{signs}]+"), mark, str.maketrans(signs, "0123456789+-n"[: len(signs)]))
  for mark, signs in (("^", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"), ("_", "₀₁₂₃₄₅₆₇₈₉"))
]
# The unit of 5 cm²; 5m² is a product.
UNIT = re.compile(r"(?<=[\dπ)}])(?:\s*([cdkm]m|in|ft|yd|mi)|\s+(m|[A-Za-z]{4,}))(?=[²³]\s*$)")
TEMPERATURE = re.compile(r"([°º]|\^\s*(?:\{\s*\\circ\s*\}|\\circ))\s*[CF](?![A-Za-z])")
DOTS = re.compile(
  r"(?<=\.)(\d{1,300})(?:\.{2,3}|…)(?=[\s$]*$)"
)  # 3.14..., whose last dot may be gone
# 2e5, 1e-3, 2.0e-5, 2e-05; but 2e-5 may be 2e - 5.
SCIENTIFIC = re.compile(
  r"(?<![\w.\\])(?:(\d+)[eE](\d{1,4}|[+-]0\d)|(1|\d*\.\d+)[eE]([+-]?\d{1,4}))(?![\w.])"
)
NEGATIVE = re.compile(r"\^\s*-\s*(\d+(?:\.\d+)?|[A-Za-z]|\([^()]*\))")  # 10^-3
NAME = re.compile(r"(?<![A-Za-z\\])(pi(?![A-Za-z_])|log(?=\s*_))")
BASE = re.compile(r"(\\log\s*_\s*)(\d+(?=\s+\d|\s*\()|10(?=\s*[A-Za-z\\]))")  # \log_2 8


def latex(text: str) -> str:
  """Returns a text with LaTeX commands for the signs of plain text.

  A root covers the number, letter or bracket after it, and a minus after ^ belongs to the exponent.
  Digits after log_ are its base if a space or bracket follows.
  """
  text = DOTS.sub(r"\1", TEMPERATURE.sub(r"\1", text))
  text = SCIENTIFIC.sub(r"\1\3\\cdot 10^{\2\4}", text)
  if not text.isascii():
    if any(root in text for root in ROOTS):
      text = ROOT.sub(_root_rule(), text)
    text = UNIT.sub(r"\\text{ \1\2}", text)
    for pattern, mark, digits in SCRIPTS:
      text = pattern.sub(lambda x, m=mark, d=digits: f"{m}{{{x[0].translate(d)}}}", text)
    text = text.translate(TABLE)
  text = NEGATIVE.sub(r"^{-\1}", text.replace(r"\varnothing", r"\emptyset"))
  text = text.replace(r"\sqrt\pi", r"\sqrt{\pi}")
  return BASE.sub(r"\1{\2}", NAME.sub(r"\\\1", text))


def _root_rule() -> Callable[[re.Match], str]:
  """Returns a function that rewrites the matches of ROOT, from left to right."""
  closing: list[str] = []  # what ends each open bracket

  def rewritten(match: re.Match) -> str:
    root, covered, bracket = match.groups()
    if covered:
      return f"{ROOTS[root]}{{{covered}}}"
    if bracket or match[0] == "(":
      closing.append("}" if bracket else ")")
      return ROOTS[root] + "{" if bracket else "("
    if root:
      return ROOTS[root]
    return closing.pop() if closing else ")"

  return rewritten
