"""The page of solutions in a real browser: colours, filters, keys, formulas, escaped text."""

import json
import re
import shutil

import numpy as np
import pytest
from conftest import call_script, completion, make_row, step, write_lines
from scored_files import shown_on

from prm_jax.evaluation import page
from prm_jax.evaluation.mathml import answer_pieces, pieces

ATTACK = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"

TRUTH = r"4\text{ units}"


def candidate(problem, probs, correct, text="step", **more):
  """Returns a record with a step for each probability."""
  ratings = [{"-1": 1 - p, "0": 0.0, "1": p} for p in probs]
  steps = [f"{text} {i}" for i in range(len(probs))]
  about = {"problem": problem, "steps": steps, "rating_probs": ratings, "is_correct": correct}
  return about | {"answer": "4"} | more


RECORDS = [
  candidate("What is $2 + 2$?", [0.9, 0.8], True, level=1, ground_truth_answer=TRUTH),
  candidate("What is $2 + 2$?", [0.95, 0.3, 0.9], False),
  candidate("Solve \\(x^2 = 4\\).", [0.99, 0.98], False, text=ATTACK, answer=ATTACK),
  candidate("Solve \\(x^2 = 4\\).", [0.2], True, text="$\\text{<b onclick=x>y</b>}$"),
  candidate("No score", [0.5], None) | {"rating_probs": None},
]
LABELS = {(RECORDS[2]["problem"], tuple(RECORDS[2]["steps"])): [1, -1]}


@pytest.fixture(scope="module")
def browser():
  """Returns a headless Chromium."""
  sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra test)")
  names = ("chromium", "chromium-browser", "google-chrome")
  if not (path := next(filter(None, map(shutil.which, names)), None)):
    pytest.skip("needs a browser: apt install chromium")
  with sync_api.sync_playwright() as driver:
    chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
    yield chromium
    chromium.close()


@pytest.fixture
def opened(browser, tmp_path):
  """Returns a function that opens a page; errors and requests of the page fail the test."""
  problems = []

  def open_page(records=RECORDS, width=1200, **options):
    path = tmp_path / "page.html"
    path.write_text(page.render(page.from_records(records, LABELS), "title", "about", **options))
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    tab.on("request", lambda r: None if r.url.startswith("file:") else problems.append(r.url))
    tab.goto(path.as_uri())
    tab.wait_for_selector("article, #found:text-is('no problem')")
    return tab

  yield open_page
  assert not problems


def test_the_first_doubted_step_is_named(opened):
  """A sentence and a colour show the first doubted step, and a sure step has no colour."""
  tab = opened()
  verdicts = tab.locator(".verdict").all_inner_texts()
  assert verdicts == [
    "No step is doubted; the least sure is step 2 (80 %).",
    "First doubted step: 2 of 3 (30 % right).",
  ]
  assert tab.locator("h3").all_inner_texts()[0].startswith("✓ right")
  colours = [
    step.evaluate("node => getComputedStyle(node).backgroundColor")
    for step in tab.locator(".step").all()
  ]
  plain, doubted = colours[0], colours[3]
  assert plain.endswith(", 0)") and not doubted.endswith(", 0)")
  assert tab.locator(".step.first b").all_inner_texts() == ["2"]
  assert tab.locator("#problem math mn").all_text_contents() == ["2", "2", "4"]  # MathML
  about = tab.locator("#problem .soft").text_content().replace("\xa0", " ")
  assert about == "Level 1 · Right answer: 4 units"


def test_long_formulas_stay_inside(opened):
  """A formula that is wider than its card scrolls by itself, and the page does not."""
  long = " + ".join(f"x_{{{i}}}" for i in range(30))
  texts = (f"\\[ {long} \\]", f"\\( {long} \\)")
  tab = opened([candidate("p", [0.5], True, text=text) for text in texts], width=400)
  assert tab.evaluate("document.documentElement.scrollWidth") <= 400
  assert tab.locator(".step math").count() == 2
  block = tab.locator(".step .formula:has(math[display='block'])")
  assert block.evaluate("node => getComputedStyle(node).display") == "flex"
  assert block.evaluate("node => node.scrollWidth > node.clientWidth")


def test_bold_words_of_a_model_are_bold(opened):
  """Markdown's `**words**` are bold beside formulas, and a product or power keeps its stars."""
  tab = opened(
    [
      candidate(
        "p", [0.5], True, text="**Step 1:** $x$. **Given:** 2**3**4, ** no **, (x)**(2) + y**(3)"
      )
    ]
  )
  text = tab.locator(".step .text")
  assert text.locator("b").all_inner_texts() == ["Step 1:", "Given:"]
  assert "2**3**4, ** no **, (x)**(2) + y**(3)" in text.inner_text()


def test_text_of_the_data_never_runs(opened):
  """Markup in a step, an answer or a formula is shown as text and never runs."""
  tab = opened()
  tab.keyboard.press("j")
  tab.wait_for_selector("article:has-text('document.title')")
  assert tab.title() == "title"
  assert tab.locator("article img, article script, article b[onclick]").count() == 0
  assert "<script>document.title" in tab.locator("article").first.inner_text()


def test_labels_stand_beside_probabilities(opened):
  """A label that contradicts a sure model is marked, and a sentence names the first wrong step."""
  tab = opened()
  tab.keyboard.press("j")
  tab.wait_for_selector("article:has-text('labelled wrong')")
  marked = tab.locator(".step.mistaken")
  assert marked.count() == 1 and "model sure it is right" in marked.inner_text()
  assert (
    "By its labels step 2 is the first wrong one." in tab.locator(".verdict").first.inner_text()
  )


def test_filters_search_and_sorting(opened):
  """Problems are filtered by kind and by words, and solutions are sorted by a score."""
  tab = opened()
  tab.select_option("#kind", "best_wrong")
  tab.wait_for_selector("#found:text-is('1 of 1 problems')")
  assert "Solve" in tab.locator("#problem h2").inner_text()
  tab.select_option("#kind", "all")
  tab.fill("#search", "2 + 2")
  tab.wait_for_selector("#found:text-is('1 of 1 problems')")
  tab.fill("#search", "no such thing")
  tab.wait_for_selector("#found:text-is('no problem')")
  tab.press("#search", "Enter")  # sends no form
  assert "?" not in tab.url and tab.locator("#found").inner_text() == "no problem"
  tab.fill("#search", "")
  first = lambda: tab.locator("article .soft").first.inner_text()
  assert first().startswith("PRM 0.720")
  tab.select_option("#sort", "file")
  tab.select_option("#sort", "lowest step")
  assert first().endswith("lowest step 0.800")


def test_keys_move_search_and_filter(opened):
  """J and k move between problems, arrows between solutions, / searches, and digits filter."""
  tab = opened()
  tab.keyboard.press("j")
  tab.wait_for_selector("#found:text-is('2 of 3 problems')")
  tab.keyboard.press("k")
  tab.wait_for_selector("#found:text-is('1 of 3 problems')")
  tab.keyboard.press("ArrowRight")
  tab.keyboard.press("ArrowRight")
  focused = "[...document.querySelectorAll('article')].indexOf(document.activeElement)"
  assert tab.evaluate(focused) == 1
  tab.keyboard.press("/")
  tab.keyboard.type("jk2")
  assert tab.input_value("#search") == "jk2"
  tab.keyboard.press("Escape")
  tab.fill("#search", "")
  tab.locator("#solutions").focus()
  tab.keyboard.press("2")
  tab.wait_for_selector("#found:text-is('1 of 1 problems')")


def test_a_telephone_shows_the_whole_page(opened):
  """At 400 pixels nothing is wider than the screen, and solutions stand below each other."""
  report = (
    "<div class=scroll><table><tr><th>N</th>" + "<td>12.345</td>" * 30 + "</tr></table></div>"
  )
  tab = opened(width=400, report=report)
  assert tab.evaluate("document.documentElement.scrollWidth") <= 400
  boxes = [each.bounding_box() for each in tab.locator("article").all()]
  assert boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"]
  tab.locator(".scroll").evaluate("node => node.scrollTo(200, 0)")
  assert tab.locator("th").bounding_box()["x"] < 30  # it stays


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast(dark):
  """Text has a contrast of 4.5 (WCAG AA) on the page, on cards and on the deepest step colour."""
  css = (page.HERE / "page.css").read_text()
  scope = css.split("prefers-color-scheme: dark", 1)[1] if dark else css
  colours = {name: colour(value) for name, value in re.findall(r"--(\w+): (#\w+)", scope)[:8]}
  doubted = np.array(re.search(r"--doubted: (\d+) (\d+) (\d+)", scope).groups(), float) / 255
  share = float(re.search(r"calc\((\S+) \* var\(--doubt\)", css)[1])
  deepest = share * doubted + (1 - share) * colours["panel"]
  for name in ("text", "soft", "good", "bad"):
    for ground in (colours["page"], colours["panel"], deepest):
      light, deep = sorted(map(luminance, (colours[name], ground)), reverse=True)
      assert (light + 0.05) / (deep + 0.05) >= 4.5, name


def colour(text):
  """Returns red, green and blue in 0..1 `[3]` of #rgb or #rrggbb."""
  digits = text[1:] if len(text) == 7 else "".join(2 * each for each in text[1:])
  return np.frombuffer(bytes.fromhex(digits), np.uint8) / 255


def luminance(rgb):
  """Returns the relative luminance, as WCAG defines it."""
  linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
  return linear @ [0.2126, 0.7152, 0.0722]


def test_the_edge_of_a_scrolling_part_fades(opened):
  """The right edge of a part fades until it is scrolled to its end."""
  report = "<div class=scroll><table><tr>" + "<td>12.345</td>" * 99 + "</tr></table></div>"
  tab = opened([candidate("Many", [0.5], True)] * 9, report=report)
  for place in ("#solutions", ".scroll"):
    tab.wait_for_selector(f"{place}.more")
    tab.locator(place).evaluate("node => node.scrollTo(99999, 0)")
    tab.wait_for_selector(f"{place}:not(.more)")
  assert opened().locator(".more").count() == 0


def test_plain_scores_have_no_words_about_steps(opened):
  """A solution without step scores has no verdict, and its only step has no number."""
  record = {"problem": "p", "text": "It is 4.", "is_correct": True, "rm": 2.0}
  tab = opened([record])
  assert tab.locator(".verdict, .meta").count() == 0
  assert "score" not in tab.locator("#kind").inner_text()  # nor filters by score
  assert tab.locator(".step").all_inner_texts() == ["It is 4."]


def test_colours_follow_the_system(opened):
  """The page has other colours in a system's dark mode."""
  tab = opened()
  colour = "getComputedStyle(document.body).backgroundColor"
  light = tab.evaluate(colour)
  tab.emulate_media(color_scheme="dark")
  assert tab.evaluate(colour) != light


def test_only_shown_problems_are_unpacked(opened):
  """On a page of many solutions the browser unpacks only the problems that it shows."""
  records = [
    candidate(f"Problem ${i}$ of many", [0.9, 0.4, 0.8], i % 2 == 0)
    for i in range(100)
    for _ in range(16)
  ]
  tab = opened(records)
  assert tab.locator("#found").inner_text() == "1 of 100 problems"
  assert tab.locator("article").count() == 16
  tab.fill("#search", "problem 99")
  tab.wait_for_selector("#found:text-is('1 of 1 problems')")
  assert tab.evaluate("opened.size") <= 8


def test_formulas_have_known_mathml_elements_only():
  """Links and styles in a formula are left out, and a formula that cannot be read stays text."""
  link = json.dumps(pieces(r"$\href{javascript:alert(1)}{x}$"))
  assert "javascript" not in link and '"mi"' in link
  assert "color:red" not in json.dumps(pieces(r"$\style{color:red}{x}$"))
  assert pieces("costs $5 and {") == ["costs $5 and {"]
  assert pieces("$" + "{" * 500 + "$") == ["$" + "{" * 500 + "$"]
  assert [type(x) for x in pieces("a $x$ b \\[y\\]")] == [str, dict, str, dict]
  assert answer_pieces(r"\frac{1}{2} or 3") == [r"\frac{1}{2} or 3"]  # words would lose spaces
  assert [type(x) for x in pieces(r"\[ a \\[4pt] b \]")] == [dict]  # a line break, and no start
  for start in ("\\[", "\\(", "\\begin{align}"):  # in linear time
    assert pieces(start * 20_000) == [start * 20_000]


def test_view_py_counts_labels_and_names_a_bad_line(tmp_path):
  """view.py shows candidates with or without probabilities; a bad line is an error."""
  source, labels = tmp_path / "scored.jsonl", tmp_path / "labels.jsonl"
  write_lines(source, RECORDS)
  row = {"problem": RECORDS[1]["problem"], "steps": RECORDS[1]["steps"], "labels": [1, -1, None]}
  labels.write_text(json.dumps(row) + "\n")
  flags = [f"--input={source}", f"--output={tmp_path / 'page.html'}"]
  completed = call_script("view.py", *flags, f"--labels={labels}")
  # another solution begins with the two steps that have labels
  assert "3 problems, 5 solutions, 2 with labels" in completed.stdout
  apart = [RECORDS[0], RECORDS[2], RECORDS[1] | {"prm_score": float("nan")}]
  write_lines(source, apart)
  labels.write_text(json.dumps(row | {"steps": ["\n".join(row["steps"])], "labels": [1]}) + "\n")
  completed = call_script("view.py", *flags, f"--labels={labels}", "--problems=1")
  assert "1 problems, 2 solutions, 0 with labels" in completed.stdout
  assert (
    "labels.jsonl: no solution there has the problem and steps of one that is" in completed.stderr
  )
  assert "null" not in json.dumps([p.scores for p in page.from_records(apart)[0].solutions])
  source.write_text('{"problem": "p", "steps": ["a"], "rating_probs": []}\n')
  completed = call_script("view.py", *flags, code=1)
  assert "0 rating_probs of 1 steps" in completed.stderr
  assert "scored.jsonl:1" in completed.stderr
  write_lines(source, [{"problem": problem, "unique_id": "u"} for problem in "pq"])
  completed = call_script("view.py", *flags, code=1)
  assert "scored.jsonl:2: \"problem\" is 'q', but 'p' before" in completed.stderr


def test_labels_of_first_steps_are_shown(tmp_path):
  """PRM800K's labels end at the first error: view.py shows them on the first steps of a solution.

  Of several labels those of the most steps count; other steps, or of another problem, have none.
  """
  labelled = [step(completion("a", 1)), step(completion("b", -1), chosen=None)]
  labels, source, out = (tmp_path / name for name in ("labels.jsonl", "scored.jsonl", "page.html"))
  rows = [make_row(labelled, "found_error", problem="p"), make_row(labelled[:1], problem="p")]
  write_lines(labels, rows)
  about = [("p", "abc"), ("p", "ab"), ("p", "ac"), ("p", "ca"), ("q", "abc")]
  lines = [{"problem": problem, "steps": [*steps], "is_correct": False} for problem, steps in about]
  write_lines(source, lines)
  done = call_script("view.py", f"--input={source}", f"--labels={labels}", f"--output={out}")
  assert "2 problems, 5 solutions, 3 with labels" in done.stdout
  shown = [
    [each.get("label") for each in solution["steps"]]
    for problem in shown_on(out.read_text())
    for solution in problem["solutions"]
  ]
  assert shown == [[1, -1, None], [1, -1], [1, None], [None] * 2, [None] * 3]


def test_the_name_of_a_problem_is_a_text_or_a_number(tmp_path):
  """view.py groups by a `unique_id`, text or number, and names the line of any other."""
  source = tmp_path / "scored.jsonl"
  line = {"problem": "p", "steps": ["a"], "is_correct": True}
  lines = [line | {"unique_id": name} for name in ("x", 7, "x", None, "7")]
  write_lines(source, lines)
  done = call_script("view.py", f"--input={source}")
  assert "3 problems, 5 solutions" in done.stdout
  done = call_script("view.py", f"--input={source}", "--problems=2")
  assert "2 problems, 4 solutions" in done.stdout
  write_lines(source, [lines[1], lines[4] | {"problem": "q"}])
  done = call_script("view.py", f"--input={source}", code=1)
  assert f"{source}:2: \"problem\" is 'q', but 'p' before for the same unique_id" in done.stderr
  source.write_text(json.dumps(line | {"unique_id": ["x"]}) + "\n")
  done = call_script("view.py", f"--input={source}", code=1)
  assert f"{source}:1: \"unique_id\" is ['x']" in done.stderr


def test_the_product_of_the_steps_is_of_the_shown_probabilities():
  """With --neutral=negative too, "PRM" is the product of the bars, not the file's prm_score."""
  ratings = [{"-1": 0.2, "0": 0.5, "1": 0.3}] * 2
  record = {"problem": "p", "steps": ["a", "b"], "rating_probs": ratings, "prm_score": 0.6400001}
  for neutral, right in (("positive", 0.8), ("negative", 0.3)):
    (solution,) = page.from_records([record], neutral=neutral)[0].solutions
    assert [step.p for step in solution.steps] == [right] * 2
    assert solution.scores["PRM"] == pytest.approx(right**2, rel=1e-12)
  del record["rating_probs"]
  assert page.from_records([record])[0].solutions[0].scores == {"PRM": 0.6400001}


def test_close_scores_are_compared_before_they_are_rounded():
  """Of two solutions with nearly one score, the higher is the best-scored: here the right one."""
  rows = [
    {"problem": "p", "steps": ["a"], "step_scores": [0.99998], "is_correct": True},
    {"problem": "p", "steps": ["b"], "step_scores": [0.99996], "is_correct": False},
  ]
  right, wrong = page.from_records(rows)[0].solutions
  assert right.scores["PRM"] > wrong.scores["PRM"]
  assert right.steps[0].p == 0.99998  # a rounded 0.49996 would not be doubted


def test_equal_scores_are_filtered_alike_in_any_order():
  """Two solutions with one score, one right and one wrong, are neither a wrong best nor a lure."""
  rows = [
    {"problem": "p", "steps": [text], "step_scores": [1.0], "is_correct": text == "a"}
    for text in "ab"
  ]
  for order in (rows, rows[::-1]):
    assert page._flags(page.from_records(order)[0]) == 3
  below = [*rows[1:], {"problem": "p", "steps": ["c"], "step_scores": [0.5], "is_correct": True}]
  assert page._flags(page.from_records(below)[0]) == 15


def test_other_keys_of_a_probability_do_not_count():
  """A key of `rating_probs` that is no rating changes no number, whatever its value is."""
  ratings = [{"-1": 0.2, "0": 0.5, "1": 0.3, "2": 1.0, "logit": None}]
  record = {"problem": "p", "steps": ["a"], "rating_probs": ratings}
  assert page.from_records([record])[0].solutions[0].steps[0].p == 0.8
