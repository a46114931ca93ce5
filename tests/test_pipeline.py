"""The pipelines of the README, from files to figures, through the scripts themselves."""

import json

import pytest
from conftest import run_script

TINY = [
  "--config.model.width=16",
  "--config.model.layers=1",
  "--config.model.mlp_width=24",
  "--config.train.steps=3",
  "--config.train.eval_rows=8",
]


def ok(name, *arguments):
  done = run_script(name, *arguments)
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_generated_data_to_report(tmp_path):
  """quickstart.sh in small: the output of each stage is the input of the next."""
  data = tmp_path / "data"
  ok(
    "prepare_data.py",
    "--dataset=arithmetic",
    f"--output={data}",
    "--arithmetic.train_problems=20",
    "--arithmetic.test_problems=6",
    "--arithmetic.candidates=16",
  )
  ok("train_tokenizer.py", f"--data={data}", f"--output={data}/t.model", "--vocab_size=320")
  scored = []
  for objective in ("process", "outcome"):
    ok(
      "train.py",
      "--config=configs/arithmetic.py",
      f"--workdir={tmp_path}/{objective}",
      f"--config.loss.objective={objective}",
      f"--config.data.directory={data}",
      f"--config.data.tokenizer={data}/t.model",
      *TINY,
    )
    scored.append(tmp_path / f"{objective}.jsonl")
    ok(
      "score.py",
      f"--checkpoint={tmp_path}/{objective}",
      f"--input={data}/candidates.jsonl",
      f"--output={scored[-1]}",
    )
  table = ok("rerank.py", "--input", *scored, f"--output_dir={tmp_path}/report")
  report = json.loads((tmp_path / "report/report.json").read_text())
  assert (report["problems"], report["samples"]) == (6, 96)
  assert {"prm_product", "prm_min", "orm", "majority", "oracle", "random"} <= set(report["curves"])
  assert set(report["by_level"]) == {"1", "2", "3", "4", "5"}
  assert "prm_product" in table and "report.html" in table
  assert (tmp_path / "report/best_of_n.png").read_bytes().startswith(b"\x89PNG")
  assert "data:image/png;base64" in (tmp_path / "report/report.html").read_text()


@pytest.mark.shared_data
def test_real_rows_to_evaluation(prm800k_sample, tmp_path):
  """configs/prm800k_small.py on real PRM800K: every test label is evaluated."""
  data = tmp_path / "data"
  ok("prepare_data.py", "--dataset=prm800k", f"--source={prm800k_sample}", f"--output={data}")
  ok("train_tokenizer.py", f"--data={data}", f"--output={data}/t.model", "--vocab_size=1000")
  ok(
    "train.py",
    "--config=configs/prm800k_small.py",
    f"--workdir={tmp_path}/run",
    f"--config.data.directory={data}",
    f"--config.data.tokenizer={data}/t.model",
    "--config.data.row_length=512",
    *TINY,
  )
  printed = ok(
    "evaluate.py",
    f"--checkpoint={tmp_path}/run",
    "--benchmark=prm800k",
    f"--data_dir={data}",
    f"--output={tmp_path}/evaluation.json",
  )
  result = json.loads((tmp_path / "evaluation.json").read_text())
  assert result["count_by_class"] == {"-1": 200, "0": 111, "1": 1411}
  assert 0 <= result["auroc"] <= 1 and result["ece"] is not None
  assert "AUROC" in printed
