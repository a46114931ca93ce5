"""Runs commands for tests/test_documented_commands.py, scripts in forks of this process.

So the seconds of importing JAX are spent once.  Standard input has a JSON list on each line: the
folder, a file for the output, and the words of the command; standard output gets the number of its
process, and then its exit code.
"""

import json
import os
import pathlib
import runpy
import sys

import prm_jax.evaluation.reranking
import prm_jax.evaluation.step_benchmarks
import prm_jax.generation.options
import prm_jax.scoring.scorer
import prm_jax.training.loop  # noqa: F401

for line in sys.stdin:
  folder, log, *words = json.loads(line)
  if process := os.fork():
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    continue
  os.setsid()
  os.chdir(folder)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  os.dup2(file, 1)
  os.dup2(file, 2)
  if words[0] != "scripts":
    os.execvp(words[0], words)
  sys.argv = words[1:]
  sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)
  runpy.run_path(sys.argv[0], run_name="__main__")
  break
