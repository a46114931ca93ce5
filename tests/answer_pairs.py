"""Answers rewritten by rules, changed by rules, and texts that hang or kill a grader."""

import itertools
import random
import re

INTEGER = re.compile(r"-?\d+")


def _sub(pattern, to):
  """A rule that replaces every match of a pattern."""
  return lambda a: re.sub(pattern, to, a)


def _whole(kind):
  """A rule for whole answers that are plain integers."""
  return lambda a: kind(int(a)) if INTEGER.fullmatch(a) and abs(int(a)) < 10**9 else a


def _fraction(kind):
  """A rule for whole answers that are \\frac{a}{b} of positive integers."""

  def rule(a):
    match = re.fullmatch(r"\\d?frac\{(\d+)\}\{(\d+)\}", a)
    return kind(int(match[1]), int(match[2])) if match else a

  return rule


STYLES = [
  lambda a: f"${a}$",
  lambda a: f"$ {a} $",
  lambda a: f"\\({a}\\)",
  lambda a: f"\\[{a}\\]",
  lambda a: f"$${a}$$",
  lambda a: f"\\boxed{{{a}}}",
  lambda a: f"$\\boxed{{{a}}}$",
  lambda a: f"\\boxed{{ {a} }}",
  lambda a: f"{a}.",
  lambda a: f" {a} ",
  lambda a: f"${a}$.",
  lambda a: f"\\[ \\boxed{{{a}}} \\]",
  lambda a: f"\\displaystyle {a}",
  lambda a: f"$\\displaystyle {a}$",
  lambda a: f"**{a}**",
  lambda a: f"$\\; {a}$",
  lambda a: f"\\( \\boxed{{{a}}} \\)",
  lambda a: f"$$ {a} $$",
  lambda a: f"${a} \\,$",
  lambda a: f"$ \\displaystyle {a} $.",
  lambda a: f"\\[ {a}\\]",
]
REWRITINGS = [
  _sub(r"\\frac", r"\\dfrac"),
  _sub(r"\\frac", r"\\tfrac"),
  _sub(r"\\dfrac", r"\\frac"),
  _sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
  _sub(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2"),
  _sub(r"\^(\d)(?!\d)", r"^{\1}"),
  _sub(r"\\sqrt\{(\d)\}", r"\\sqrt\1"),
  _sub(r"\\sqrt(\d)", r"\\sqrt{\1}"),
  _sub(r"(\d) ?\\sqrt", r"\1 \\cdot \\sqrt"),
  _sub(r"(\d) ?\\pi", r"\1 \\cdot \\pi"),
  _sub(r"\\left|\\right", ""),
  lambda a: (
    re.sub(r"([(\[])(.*)([)\]])$", r"\\left\1\2\\right\3", a)
    if a[0] in "([" and "\\left" not in a and "\\cup" not in a
    else a
  ),
  _sub(r" (?![A-Za-z])", ""),
  _sub(r",(?! ?\\!)(?!\d{3})(?=\S)", ", "),
  _sub(r" \+ ", "+"),
  _sub(r"(?<=[\w)}]) ?([+=]) ?(?=[\w(\\])", r" \1 "),
  _sub(r"\^\\circ", r"^{\\circ}"),
  _sub(r"\^\\circ", ""),
  _sub(r",\\! ?", ""),
  _sub(r",\\! ?", ","),
  _sub(r"\\\$", ""),
  _sub(r"\\text\{([^{}]*)\}", r"\\textbf{\1}"),
  _sub(r"\\text\{([^{}]*)\}", r"\\mathrm{\1}"),
  _sub(r"^\\text\{([^{}]*)\}$", r"\1"),
  _sub(r"\\mbox\{", r"\\text{"),
  _sub(r"_(\d)$", r"_{\1}"),
  _sub(r"_\{(\d)\}$", r"_\1"),
  _sub(r"pmatrix", "bmatrix"),
  _sub(r"(?<![\d.\\])\.(\d+)$", r"0.\1"),
  _whole(lambda n: f"{n}.0"),
  _whole(lambda n: f"{n}.00"),
  _whole(lambda n: f"\\frac{{{n}}}{{1}}"),
  _whole(lambda n: f"\\frac{{{2 * n}}}{{2}}"),
  _whole(lambda n: f"\\frac{{{-3 * n}}}{{-3}}"),
  _whole(lambda n: f"{2 * n}/2"),
  _whole(lambda n: f"{n - 1} + 1"),
  _whole(lambda n: f"{n + 7} - 7"),
  _whole(lambda n: f"x = {n}"),
  _whole(lambda n: f"{n:,}" if abs(n) > 999 else f"{n} \\cdot 1"),
  _whole(lambda n: f"\\sqrt{{{n * n}}}" if n >= 0 else f"-\\sqrt{{{n * n}}}"),
  _fraction(lambda a, b: f"{a}/{b}"),
  _fraction(lambda a, b: f"\\frac{{{2 * a}}}{{{2 * b}}}"),
  _fraction(lambda a, b: f"{a} \\div {b}"),
  _fraction(lambda a, b: f"\\frac{{{-a}}}{{{-b}}}"),
  _fraction(lambda a, b: f"{a} \\cdot \\frac{{1}}{{{b}}}"),
  _fraction(lambda a, b: f"\\frac{{1}}{{{b}}} + \\frac{{{a - 1}}}{{{b}}}"),
]


def equal_to(answer: str, count: int, rng: random.Random) -> list[str]:
  """Other spellings of an answer, by one to three rules."""
  once = [rule(answer) for rule in REWRITINGS]
  forms = {form for form in once if form != answer}
  for first, second in itertools.permutations(REWRITINGS[:30], 2):  # of spelling alone
    form = second(first(answer))
    if form != answer:
      forms.add(form)
    if len(forms) > 40:
      break
  forms |= {style(form) for form in [answer, *sorted(forms)] for style in STYLES}
  return rng.sample(sorted(forms), count)


def _numbers(change):
  """A rule that changes one of the numbers of an answer, each in turn."""

  def rules(a):
    for match in re.finditer(r"(?<![\d.\\!,_])\d+", a):
      before = a[: match.start()]
      if not re.search(r"_\{?$|\\sqrt$|\}\^$", before):  # \sqrt21 is \sqrt{2}1; units' powers
        yield before + change(match[0]) + a[match.end() :]

  return rules


def different_from(answer: str, count: int, rng: random.Random) -> list[str]:
  """Answers that are not equal to this one."""
  forms = set()
  for change in (
    lambda n: str(int(n) + 1),
    lambda n: str(int(n) + 2),
    lambda n: str(int(n) + 10),
    lambda n: str(10 * int(n) + 3),
    lambda n: str(3 * int(n) + 5),
    lambda n: f"{n}1",
    lambda n: str(int(n) + 100),
  ):
    forms |= {*_numbers(change)(answer)}
  words = re.fullmatch(r"\\text\{\(?([A-Za-z]+)\)?\}", answer)
  if words:
    pool = ["odd", "west", "north", "circle", "hyperbola", "Anna", "Briana", "Carla", "B", "D", "A"]
    pool += ["F", "3", "x", "none", "0", "7", "z+1", "Tim", "two"]
    forms = {f"\\text{{{word}}}" for word in pool} | {*pool}
    forms = {form for form in forms if words[1].lower() not in form.lower()}
  plain = re.fullmatch(
    r"-?(\\[dt]?frac\{\d+\}\{\d+\}|\d+|[\d\\a-z{} ]*(\\pi|\\sqrt *\{?\d+\}?))", answer
  )
  if plain and answer != "0":
    forms |= {f"{answer} + 1", f"{answer}\\sqrt{{2}}", f"2({answer})", f"({answer}, 1)"}
    forms |= {f"{answer} - \\pi", f"\\frac{{{answer}}}{{7}}", f"{answer}i", f"[{answer}, 999)"}
    forms |= {f"{answer}x", f"x = {answer} + 3", f"\\{{{answer}, 999\\}}"}
    forms |= {f"{answer} + \\frac{{1}}{{1000}}", f"{answer}e"}
    if not re.fullmatch(r"-?0+", answer):
      forms.add(answer[1:] if answer[0] == "-" else f"-{answer}")
  polynomial = re.fullmatch(r"[a-zR0-9^+ -]+", answer) and re.search("[a-zR]", answer)
  if polynomial:
    forms |= {f"{answer} + 1", f"{answer} - 7", f"2({answer})", f"{answer} + y", f"{answer} + w^2"}
    forms |= {f"({answer})^2", f"\\frac{{{answer}}}{{3}}", "0", "1", "\\pi", f"{answer} - 100"}
    forms |= {f"({answer})({k})" for k in range(3, 9)}
  if answer[0] in "([" and "\\cup" not in answer:
    forms |= {("[" if answer[0] == "(" else "(") + answer[1:]} if "infty" not in answer else set()
  forms |= {str(n) for n in rng.sample(range(2_000, 9_000), 25)}
  forms -= {answer}
  return rng.sample(sorted(forms), count)


def hostile(rng: random.Random) -> str:
  """A text that hangs or kills a grader."""
  n = rng.randrange(3, 9)
  return rng.choice(
    [
      "^".join(["9"] * n),
      "9^{9^{9^{9^{9}}}}",
      f"{n}00000000!",
      f"(({n}!)!)!",
      f"{n}^{{{n}00000000}}",
      f"\\sqrt[{n}000000]{{2^{{99999999}}}}",
      "1" * 10**6,
      "x" * 10**6,
      "{" * 10_000,
      "\\frac{" * 5_000 + "1",
      "(" * 5_000 + "1" + ")" * 5_000,
      f"\x00{n}\x00",
      "\\boxed{" * 1_000 + "1",
      "\\begin{pmatrix}" + "1 & " * 3_000 + "\\end{pmatrix}",
      f"\\binom{{{n}00000000}}{{{n}0000000}}",
      f"\\sum_{{k=1}}^{{10^{{{n + 6}}}}} \\sin(k)^k",
      f"\\int_0^{{{n}}} x^{{x^x}} e^{{\\sin(x^{n})}} dx",
      "(" + "+".join(f"x_{i}" for i in range(40)) + f")^{{{n}0}}",
      f"\\prod_{{k=1}}^{{{n}000000}} (1 + \\frac{{1}}{{k!}})",
      "".join(chr(rng.randrange(32, 0x2FFF)) for _ in range(300)),
    ]
  )
