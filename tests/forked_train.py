"""scripts/train.py as a function for the processes that tests/test_kills.py forks and kills."""

import os
import pathlib
import runpy
import sys

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "scripts" / "train.py"


def run(config: pathlib.Path, workdir: pathlib.Path, log: pathlib.Path) -> None:
  """Trains as from a terminal; standard output and error go to the file `log`."""
  file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  os.dup2(file, 1)
  os.dup2(file, 2)
  sys.argv = [str(SCRIPT), f"--config={config}", f"--workdir={workdir}"]
  runpy.run_path(str(SCRIPT), run_name="__main__")
