"""The outputs of rerank.py: page, table, CSV, JSON, figures, errors."""

import csv
import io
import json
import re

import pytest
from conftest import call_script, write_lines
from scored_files import generated, ranked, rated, samples_of, shown_on, written

from prm_jax.evaluation import report as report_lib
from prm_jax.evaluation import report_figure, report_table
from prm_jax.evaluation.figure_files import encoded


def test_csv_has_every_number(tmp_path):
  """The CSV has every number of the report, unrounded, and names with any characters."""
  records = [r | {"subject": 'a "b",\nc'} for r in generated()]
  samples = samples_of(tmp_path / "scored.jsonl", records)
  report, _ = ranked(samples, [1, 3], band="generation", methods=["orm", "majority"])
  report["curves"]["majority"]["standard_error"] = [0.0, 0.25]  # as if the vote were sampled
  text = report_table.format_csv(report)
  rows = {
    (row["breakdown"], row["group"], row["curve"], int(row["n"])): row
    for row in csv.DictReader(io.StringIO(text, newline=""))
  }
  assert len(rows) == 2 * (3 + 2 * (2 + 1 + 5))
  by_name = report["by_subject"]['a "b",\nc']
  parts = {("", ""): report, ("level", "1"): report["by_level"]["1"]}
  for place, each in (parts | {("subject", 'a "b",\nc'): by_name}).items():
    for i, n in enumerate((1, 3)):
      row, curve = rows[*place, "orm", n], each["curves"]["orm"]
      columns = ("value", "low", "high", "problem_standard_error", "standard_error")
      expected = [curve[k][i] for k in ("accuracy", "low", "high", "problem_standard_error")]
      assert [row[k] for k in columns] == ["" if x is None else str(x) for x in [*expected, None]]
  assert [rows["", "", "majority", n]["standard_error"] for n in (1, 3)] == ["", "0.25"]
  row = rows["", "", "orm - majority", 3]
  assert float(row["value"]) == report["paired"]["orm - majority"]["difference"][1]


def test_a_weighted_vote_is_never_called_exact():
  """Its draws may agree by chance, which an estimated error of 0 does not tell from exactness."""
  vote = {"standard_error": [0.0, 0.0]}
  note = report_table.vote_note({"curves": {"majority": vote, "weighted_orm": vote, "orm": {}}})
  assert note.startswith("votes: exact: majority; Monte-Carlo") and note.endswith(
    ": weighted_orm 0"
  )


def test_csv_has_no_formulas(tmp_path):
  """A group's name that a spreadsheet would run is escaped; a negative number is not."""
  names = ["=1+1", "+1", "-1", "@A", "\tA"]
  records = [r | {"subject": names[int(r["unique_id"][3:])]} for r in generated(5)]
  samples = samples_of(tmp_path / "scored.jsonl", records)
  report, _ = ranked(samples, [2], by=["subject"], methods=["random", "oracle"])
  rows = list(csv.DictReader(io.StringIO(report_table.format_csv(report), newline="")))
  assert {row["group"] for row in rows if row["group"]} == {f"'{name}" for name in names}
  (low,) = [row["low"] for row in rows if row["curve"] == "random - oracle"]
  assert float(low) < 0


def test_table_shows_no_control_characters(tmp_path):
  """Control characters of a file do not reach the terminal."""
  records = [r | {"subject": "\x1b[2Jx\ny" + "z" * 60} for r in generated()]
  samples = samples_of(tmp_path / "scored.jsonl", records)
  report, _ = ranked(samples, methods=["orm"])
  report["notices"].append("warning: a\x1b]0;b\x07\nc.jsonl:1")
  table = report_table.format_table(report)
  assert "\x1b" not in table
  assert table.endswith("Warning: a?]0;b??c.jsonl:1.")
  assert "\n?[2Jx?y" in table
  assert report_table.group_name("subject", "Algebra") == "Algebra"


def test_text_from_files_is_escaped(tmp_path):
  """No text of a problem, step, answer or file name becomes markup of the page."""
  attack = "<script>alert(1)</script>"
  keys = ("problem", "answer", "ground_truth_answer", "subject", "level")
  steps = [attack, '"><img src=x onerror=alert(1)>']
  samples = samples_of(tmp_path / "<b>.jsonl", [rated(**dict.fromkeys(keys, attack), steps=steps)])
  _, paths = written(samples, tmp_path, methods=["prm_product", "orm"])
  page = paths[2].read_text()
  for evil in ("<script>alert", "<img src=x", "<b>.jsonl"):
    assert evil not in page
  (problem,) = shown_on(page)
  assert problem["text"] == [attack] and problem["solutions"][0]["steps"][1]["text"] == [steps[1]]
  # nothing is fetched: the one address is MathML's name
  assert re.findall(r"https?://[^\s\"']*", page) == ["http://www.w3.org/1998/Math/MathML"]


def test_the_pick_of_hopeless_scores_has_an_answer(tmp_path):
  """If all answers have probability 0, the page still calls none without an answer the pick."""
  rows = [rated(right=False, answer=None, score=0.0), rated(score=0.0)]
  _, paths = written(samples_of(tmp_path / "a.jsonl", rows), tmp_path, methods=["prm_product"])
  (problem,) = shown_on(paths[2].read_text())
  why = {solution["missing"]: solution["why"] for solution in problem["solutions"]}
  picks = "the pick of the PRM and the pick of the ORM"
  assert not why[True] and why[False] == [f"{picks} and the right one that the PRM likes least"]


def test_rerank_py_prints_and_writes_a_report(tmp_path):
  """rerank.py prints a table, JSON or CSV, writes its files, and warns of unused numbers."""
  records = [r | {"my_rm": i / 7} for i, r in enumerate(generated())]
  path, out = write_lines(tmp_path / "scored.jsonl", records), tmp_path / "out"
  warning = "warning: no method uses the numbers my_rm; to rank by one: --score my_rm\n"

  def run(*flags):
    flags = (f"--input={path}", f"--output_dir={out}", "--resamples=256", *flags)
    completed = call_script("rerank.py", *flags)
    return completed.stdout, completed.stderr

  printed, errors = run("--format=csv", "--n=3")
  assert f"rerank.py: {warning}" in errors and "my_rm" not in printed
  assert str(out / "report.html") in errors
  flags = ("--score=my_rm", "--label=My RM", "--figures", "svg", "pdf", "svg")
  printed, errors = run(*flags, "--n", 1, 3, "--neutral=negative")
  assert "warning" not in errors and re.search(r"\nmy_rm - majority +\S", printed)
  assert "prm_product - orm" in printed
  for name in ("report.json", "best_of_n.png", "report.html"):
    assert str(out / name) in printed and (out / name).stat().st_size > 1000
  assert f"{out}/best_of_n.svg\n{out}/best_of_n.pdf\n" in printed
  assert "My RM" in (out / "report.html").read_text()
  assert "My RM</text>" in (out / "best_of_n.svg").read_text()
  report = json.loads((out / "report.json").read_text())
  assert (report["n"], report["neutral"]) == ([1, 3], "negative")
  printed, errors = run("--methods", "orm", "--format=json", "--n=all")
  assert json.loads(printed) == json.loads((out / "report.json").read_text())
  assert str(out / "report.html") in errors and "warning" not in errors


@pytest.mark.parametrize("n", [[1], [1, 2, 3], range(1, 9)])
def test_markers_and_intervals_are_at_their_n(tmp_path, n):
  """A curve's markers are drawn at N, and its intervals nearest to their own N."""
  samples = samples_of(tmp_path / "a.jsonl", generated(candidates=8))
  report, _ = ranked(samples, n, methods=["oracle", "orm", "prm_product", "majority", "random"])
  figure = report_figure.draw_curves(report)
  encoded(figure)  # lays it out
  (axes,) = figure.axes
  assert [list(line.get_xdata()) for line in axes.get_lines()] == [[*n]] * 5
  at = axes.transData.transform([(k, 50) for k in n])[:, 0]
  for bars in axes.collections:
    x = [bars.get_transform().transform(path.vertices)[0, 0] for path in bars.get_paths()]
    assert [abs(at - each).argmin() for each in x] == [*range(len(at))]
    assert abs(at - x).max() < 20  # pixels


def test_figures_for_papers_have_text_and_do_not_change(tmp_path):
  """A PDF embeds TrueType fonts, an SVG has text, and drawing again gives the same bytes."""
  report, _ = ranked(samples_of(tmp_path / "a.jsonl", generated()), methods=["orm", "majority"])
  figure = report_figure.draw_curves(report)
  png = encoded(figure)
  pdf, svg = (encoded(figure, kind) for kind in ("pdf", "svg"))
  assert pdf.startswith(b"%PDF") and b"/FontFile2" in pdf and b"/Type3" not in pdf
  assert b"Majority voting</text>" in svg and b"image" not in svg.split(b"</metadata>")[1]
  plain, more = (report_lib.contents(report, [], kinds) for kinds in ((), ("svg", "pdf")))
  assert [*more][-2:] == ["best_of_n.svg", "best_of_n.pdf"]
  assert plain["best_of_n.png"] == more["best_of_n.png"] == png
  again = report_figure.draw_curves(report)
  for kind, data in (("png", png), ("pdf", pdf), ("svg", svg)):
    assert encoded(again, kind) == data


def test_bad_input_leaves_no_report(tmp_path):
  """Bad input or flags end rerank.py with a message and status 1, and no file is written."""
  path, out = write_lines(tmp_path / "scored.jsonl", [rated(), "{"]), tmp_path / "out"
  completed = call_script("rerank.py", "--input", path, "--output_dir", out, code=1)
  assert completed.stderr.splitlines()[-1].startswith(f"rerank.py: {path}:2: not JSON")
  assert not out.exists()
  flags = (f"--input={write_lines(path, [rated(my_rm=1)])}", f"--output_dir={out}")
  nearest = 'no "my_mr", which --score names; the nearest key with a number'
  for flag, message in (
    (f"--write_bundle={path}", f"output {path} is an input: give another name"),
    (f"--write_bundle={out}/report.html", f"output {out}/report.html is named twice: "),
    ("--score=my_mr", f"{path}:1: {nearest}"),
    ("--n=2", "n=[2]: expected whole numbers in 1..1"),
  ):
    completed = call_script("rerank.py", *flags, flag, code=1)
    assert completed.stderr.splitlines()[-1].startswith(f"rerank.py: {message}")
    assert not [*out.glob("*")]
