r"""A canonical spelling of an answer, without interpretation.

`normal_form(r"$\dfrac12$ cm")` and `normal_form(r"\frac{1}{2}\text{ cm}")` are equal, and `number`
gives 1/2 and 0.5 the same value.  `grading` decides whether answers of different forms are equal.
"""

import decimal
import re
from fractions import Fraction

from prm_jax.evaluation.answers.plain_text import latex

MAX_CHARACTERS = 2_000  # of an answer; a longer one is its own normal form
MAX_DIGITS = 400  # of a plain number
FENCES = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"), ("**", "**"))
COMMANDS = {
  r"\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|displaystyle|limits|mathstrut)(?![A-Za-z])": "",
  r"\\[!,;:>]|\\q?quad(?![A-Za-z])|~|\\ ": " ",
  r"\\[dtc]frac(?![A-Za-z])": r"\\frac",
  r"\\(?:text(?:bf|rm|it|normal)?|mbox|math(?:rm|bf|it)|operatorname)\s*\{([^{}]*)\}": r" \1 ",
  r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])": "",
  r"\\(?:leq|leqslant)(?![A-Za-z])|<=": r"\\le ",
  r"\\(?:geq|geqslant)(?![A-Za-z])|>=": r"\\ge ",
  r"\\(?:neq)(?![A-Za-z])|!=": r"\\ne ",
  r"\\lt(?![A-Za-z])": "<",
  r"\\gt(?![A-Za-z])": ">",
  r"\\(?:cdot|times)(?![A-Za-z])": "*",
  r"\\lbrace(?![A-Za-z])": r"\\{",
  r"\\rbrace(?![A-Za-z])": r"\\}",
  r"\\\{\s*\\\}": r"\\emptyset ",
  "\u2013": "-",
  r"\\frac\s*(\d)\s*(\d)": r"\\frac{\1}{\2}",
  r"\\frac\s*(\d)\s*\{": r"\\frac{\1}{",
  r"(\\frac\{[^{}]*\})\s*(\d)": r"\1{\2}",
  r"\\sqrt\s*(\d|[a-zA-Z](?![a-zA-Z]))": r"\\sqrt{\1}",
}
COMMANDS = [(re.compile(pattern), to) for pattern, to in COMMANDS.items()]
SIGN = r"\s*(?:\\?%|percent(?:age)?|pct)\s*"
PERCENT = re.compile(rf"(?<=[\d}}])(?:\s|~|\\[ ,;:!])*(?:{SIGN}|\\(?:text|mathrm)\{{{SIGN}\}})$")
GROUPED = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+)(?![\d,])")
PLAIN = re.compile(r"([+-]?)(\d+(?:\.\d*)?|\.\d+)(?:/(\d+))?")
MIXED = re.compile(r"(?<![\d./^_])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])")  # 2 1/2
# 0.1\overline{6}, 0.1\dot{6}, 0.(3); brackets after a decimal may be a factor.
REPEATING = re.compile(
  r"(?<![\d.,])(\d{0,100})\.(?:(\d{0,100})\\(?:overline|bar|dot)\s*(?:\{(\d{1,100})\}|(\d))"
  r"(?!\d*\\dot)|\((\d{1,100})\)(?!\s*[\^(\w{*=]))"
)
# "10,\! 080", "10\,080": commas and narrow spaces separate thousands
NARROW = re.compile(r"(?<=\d)(?:,\s*\\!|\{,\}|\\[,!])\s*(?=\d{3}(?!\d))")
# 12 000; 0.123 456
THOUSANDS = re.compile(r"(?:(?<![\w.^])[1-9]\d{0,2}|(?<=\d\.)\d{3})(?:\s+\d{3})+(?!\d)")
BASE_DIGITS = re.compile(r"(?<!\d)\d+(?:\s+\d+)+(?=\s*_)")  # 1101 0010_2
# Words with a hyphen, such as y-axis or two-to-one, but not R - r.
WORDS = re.compile(r"(?:[A-Za-z' ]|-(?=[A-Za-z]{3})|(?<=[A-Za-z]{3})-)*")
FRACTION = re.compile(r"([+-]?)(\d+)?\\frac\{([+-]?\d+)\}\{(\d+)\}")


def normal_form(answer: str) -> str:
  """Returns the answer in one spelling, without fences, spaces and styles."""
  if len(answer) > MAX_CHARACTERS:
    return answer
  text = PERCENT.sub("", _without_dollars(answer))  # as MATH's and OpenAI's graders do
  text = NARROW.sub("", latex(text))
  for pattern, to in COMMANDS:
    text = pattern.sub(to, text)
  if choice := re.fullmatch(r"\(?([A-Z])\)?", text.strip()):  # (C)
    return choice[1]
  if re.fullmatch(r"[-+]?" + GROUPED.pattern + r"(?:\.\d+)?\s*(?:\D.*)?", text.strip()):
    text = GROUPED.sub(lambda m: m[1] + m[2].replace(",", ""), text)
  if WORDS.fullmatch(text.strip()):
    return " ".join(text.lower().split()).removeprefix("the ")
  text = BASE_DIGITS.sub(_joined, numerals(text))
  return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"\s+", " ", text))  # 3 4 is not 34


def is_percentage(answer: str) -> bool:
  """Returns whether the answer ends in a percent sign, which its normal form lacks."""
  if len(answer) > MAX_CHARACTERS or not ("%" in answer or "percent" in answer or "pct" in answer):
    return False
  return bool(PERCENT.search(_without_dollars(answer)))


def _without_dollars(answer: str) -> str:
  return unfenced(answer).replace(r"\$", "").replace("$", "")


def numerals(text: str) -> str:
  r"""Returns a text without spaces between thousands.

  Mixed numbers and repeating decimals become terms of `\frac`.
  """
  text = MIXED.sub(_mixed, REPEATING.sub(_repeating, NARROW.sub("", text)))
  return THOUSANDS.sub(_joined, text)


def _joined(match: re.Match) -> str:
  return re.sub(r"\s+", "", match[0])


def _repeating(match: re.Match) -> str:
  whole, fixed, *given = match.groups(default="")
  repeating = "".join(given)
  value = Fraction(int(whole + fixed + repeating) - int(whole + fixed or 0))
  value /= 10 ** len(fixed) * (10 ** len(repeating) - 1)
  return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _mixed(match: re.Match) -> str:
  whole, above, below = match.groups()
  grouped = len(whole) == 3 and match.string[: match.start()].endswith(",")  # 1,234 1/2
  if grouped or above.startswith("0") or int(above[:100]) >= int(below[:100]):  # 12 000/3
    return match[0]
  return rf"{whole}\frac{{{above}}}{{{below}}}"


def unfenced(answer: str) -> str:
  """Returns an answer without the dollars, brackets, stars or box around the whole of it."""
  text = answer.strip().removesuffix(".").strip()
  for _ in range(4):
    for start, end in FENCES:
      inner = text[len(start) : len(text) - len(end)]
      whole = len(text) > len(start + end) and text.startswith(start) and text.endswith(end)
      if whole and (_balanced(inner) if "{" in start else start not in inner):
        text = inner.strip()
        break
  return text


def _balanced(text: str) -> bool:
  depth = 0
  for brace in re.findall(r"\\.|[{}]", text):
    depth += {"{": 1, "}": -1}.get(brace, 0)
    if depth < 0:
      return False
  return depth == 0


def number(form: str) -> Fraction | None:
  """Returns the value of a plain number in normal form, None if the form is not a plain number.

  Plain numbers are 12, -0.5, 3/4, \\frac{3}{4} and 1\\frac{4}{5}.
  """
  if len(form) > MAX_DIGITS:
    return None
  if match := PLAIN.fullmatch(form):
    sign, value, below = match.groups()
    if below is not None and ("." in value or not int(below)):
      return None
    value = Fraction(value) / Fraction(below or 1)
    return -value if sign == "-" else value
  if match := FRACTION.fullmatch(form):
    sign, whole, above, below = match.groups()
    if not int(below) or (whole and not above.isdigit()):
      return None
    value = int(whole or 0) + Fraction(int(above), int(below))
    return -value if sign == "-" else value
  return None


def hundredth(form: str) -> str:
  """Returns the normal form of a hundredth of a plain number; other forms as they are."""
  if (value := number(form)) is None:
    return form
  return f"{decimal.Decimal(form) / 100:f}" if "." in form else str(value / 100)
