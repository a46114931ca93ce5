"""What rerank.py writes and prints: page, table, CSV, JSON, errors."""

import csv
import io
import json
import os
import pathlib
import subprocess
import sys

from scored_files import generated, ranked, rated, write, written

from prm_jax.evaluation import report_figures, report_tables
from prm_jax.evaluation.sample_files import read_scored_samples

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(*args):
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  command = [sys.executable, str(ROOT / "scripts/rerank.py"), *map(str, args)]
  return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_csv(tmp_path):
  """The CSV has every number of the report, unrounded, whatever characters a name has."""
  records = [r | {"subject": 'a "b",\nc'} for r in generated()]
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
  report, _ = ranked(samples, [1, 3], band="generation", methods=["orm", "majority"])
  noise = [0.0, 0.25]  # as if the vote were sampled
  report["curves"]["majority"]["standard_error"] = noise
  text = report_tables.format_csv(report)
  rows = {
    (row["breakdown"], row["group"], row["curve"], int(row["n"])): row
    for row in csv.DictReader(io.StringIO(text, newline=""))
  }
  assert len(rows) == 2 * (3 + 2 * (2 + 1 + 5))
  row = rows["subject", 'a "b",\nc', "orm", 3]
  assert float(row["value"]) == report["curves"]["orm"]["accuracy"][1]
  assert rows["", "", "majority", 1]["low"] == ""
  for breakdown, curves in (("", report["curves"]), ("level", report["by_level"]["1"]["curves"])):
    row = rows[breakdown, breakdown and "1", "orm", 3]
    assert float(row["problem_standard_error"]) == curves["orm"]["problem_standard_error"][1]
    assert row["standard_error"] == ""
  assert [rows["", "", "majority", n]["standard_error"] for n in (1, 3)] == ["", "0.25"]
  paired = report["paired"]["orm - majority"]
  row = rows["", "", "orm - majority", 3]
  assert [float(row[key]) for key in ("value", "low", "high")] == [
    paired[key][1] for key in ("difference", "low", "high")
  ]


def test_csv_has_no_formulas(tmp_path):
  """A group name that a spreadsheet would run is escaped; negative numbers are not."""
  names = ["=1+1", "+1", "-1", "@A", "\tA"]
  records = [r | {"subject": names[int(r["unique_id"][3:])]} for r in generated(5)]
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
  report, _ = ranked(samples, [2], by=["subject"], methods=["random", "oracle", "orm"])
  text = report_tables.format_csv(report)
  rows = list(csv.DictReader(io.StringIO(text, newline="")))
  groups = {row["group"] for row in rows if row["breakdown"] == "subject"}
  assert groups == {f"'{name}" for name in names}
  (low,) = [row["low"] for row in rows if row["curve"] == "random - oracle"]
  assert float(low) < 0


def test_table_shows_no_control_characters(tmp_path):
  """Control characters from a file do not reach the terminal."""
  records = [r | {"subject": "\x1b[2Jx\ny" + "z" * 60} for r in generated()]
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
  report, _ = ranked(samples, methods=["orm"])
  report["notices"].append("warning: a\x1b]0;b\x07\nc.jsonl:1")
  table = report_tables.format_table(report)
  assert "\x1b" not in table
  assert table.endswith("warning: a?]0;b??c.jsonl:1")
  assert "\n?[2Jx?y" in table
  assert report_figures.group_name("subject", "Algebra") == "Algebra"


def test_text_from_files_is_escaped(tmp_path):
  """Nothing in a problem, step, answer or file name can run on the page."""
  attack = "<script>alert(1)</script>"
  evil = rated(
    problem=attack,
    steps=[attack, '"><img src=x onerror=alert(1)>'],
    answer=attack,
    ground_truth_answer=attack,
    subject=attack,
    level=attack,
  )
  path = write(tmp_path / "<b>.jsonl", [evil, dict(evil, orm_score=0.1)])
  samples = read_scored_samples([path])
  _, paths = written(samples, tmp_path, methods=["prm_product", "orm"])
  page = paths[2].read_text()
  assert "&lt;script&gt;alert(1)" in page
  assert "<script" not in page
  assert "<img src=x" not in page
  assert "<b>.jsonl" not in page
  assert "http" not in page.replace("http-equiv", "")  # nothing is fetched


def test_command_line(tmp_path):
  """The script prints the table and the paths, and the three files are there."""
  path = write(tmp_path / "scored.jsonl", generated())
  out = tmp_path / "out"
  done = run("--input", path, "--output_dir", out, "--n", 1, 3, "--neutral=negative")
  assert done.returncode == 0, done.stderr
  assert "prm_product" in done.stdout
  assert "prm_product - orm" in done.stdout
  for name in ("report.json", "best_of_n.png", "report.html"):
    assert str(out / name) in done.stdout
    assert (out / name).stat().st_size > 1000
  report = json.loads((out / "report.json").read_text())
  assert report["n"] == [1, 3]
  assert report["neutral"] == "negative"


def test_json_on_standard_output(tmp_path):
  """--format=json prints the report and nothing else to standard output."""
  path = write(tmp_path / "scored.jsonl", generated())
  out = tmp_path / "out"
  done = run("--input", path, "--output_dir", out, "--methods", "orm", "--format=json", "--n=all")
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout) == json.loads((out / "report.json").read_text())
  assert str(out / "report.html") in done.stderr


def test_command_line_errors(tmp_path):
  """Bad input ends with a message and a non-zero status, without a traceback or a report."""
  path = write(tmp_path / "scored.jsonl", [rated(), "{"])
  done = run("--input", path, "--output_dir", tmp_path / "out")
  assert done.returncode == 1
  assert done.stderr.startswith(f"rerank.py: {path}:2: not JSON")
  assert not (tmp_path / "out").exists()
  done = run(f"--input={path}", f"--output_dir={tmp_path / 'out'}", f"--write_bundle={path}")
  assert done.stderr == f"rerank.py: --write_bundle {path} is an input: give another name\n"
  done = run(f"--input={write(path, [rated()])}", f"--output_dir={tmp_path / 'out'}", "--n=2")
  assert done.returncode == 1
  assert "expected whole numbers in 1..1" in done.stderr
