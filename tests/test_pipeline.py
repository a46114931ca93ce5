"""The pipelines of the README, from files to figures, through the scripts themselves."""

import json

import pytest
from conftest import run_script

TINY = "--config.model.width=16 --config.model.layers=1 --config.model.mlp_width=24 "
TINY += "--config.train.steps=3 --config.train.eval_rows=8"


def ok(name, arguments):
  """Runs a script that must succeed; returns what it printed."""
  return run_script(name, *arguments.split()).stdout


def train(config, data, workdir, more=""):
  """Trains a tiny model with the settings of a config."""
  inputs = f"--config.data.directory={data} --config.data.tokenizer={data}/t.model"
  ok("train.py", f"--config=configs/{config}.py --workdir={workdir} {inputs} {more} {TINY}")


def test_generated_data_to_report(tmp_path):
  """The stages of quickstart.sh read each other's outputs, from data to the report."""
  data = tmp_path / "data"
  sizes = {"train_problems": 20, "test_problems": 6, "candidates": 16}
  flags = " ".join(f"--arithmetic.{name}={size}" for name, size in sizes.items())
  ok("prepare_data.py", f"--dataset=arithmetic --output={data} {flags}")
  ok("train_tokenizer.py", f"--data={data} --output={data}/t.model --vocab_size=320")
  for objective in ("process", "outcome"):
    run = tmp_path / objective
    train("arithmetic", data, run, f"--config.loss.objective={objective}")
    ok("score.py", f"--checkpoint={run} --input={data}/candidates.jsonl --output={run}.jsonl")
  scored = f"{tmp_path}/process.jsonl {tmp_path}/outcome.jsonl"
  table = ok("rerank.py", f"--input {scored} --output_dir={tmp_path}/report")
  report = json.loads((tmp_path / "report/report.json").read_text())
  assert (report["problems"], report["samples"]) == (6, 96)
  assert {"prm_product", "prm_min", "orm", "majority", "oracle", "random"} <= set(report["curves"])
  assert set(report["by_level"]) == {"1", "2", "3", "4", "5"}
  assert "prm_product" in table and "report.html" in table
  assert (tmp_path / "report/best_of_n.png").read_bytes().startswith(b"\x89PNG")
  assert "data:image/png;base64" in (tmp_path / "report/report.html").read_text()


@pytest.mark.slow
@pytest.mark.shared_data
def test_real_rows_to_evaluation(prm800k_sample, tmp_path):
  """A model of configs/prm800k_small.py is evaluated on every test label of real PRM800K rows."""
  data = tmp_path / "data"
  ok("prepare_data.py", f"--dataset=prm800k --source={prm800k_sample} --output={data}")
  ok("train_tokenizer.py", f"--data={data} --output={data}/t.model --vocab_size=1000")
  train("prm800k_small", data, tmp_path / "run", "--config.data.row_length=512")
  benchmark = f"--benchmark=prm800k --data_dir={data} --output={tmp_path}/evaluation.json"
  printed = ok("evaluate.py", f"--checkpoint={tmp_path}/run {benchmark}")
  result = json.loads((tmp_path / "evaluation.json").read_text())
  assert result["count_by_class"] == {"-1": 200, "0": 111, "1": 1411}
  assert 0 <= result["auroc"] <= 1 and result["ece"] is not None
  assert "AUROC" in printed
