"""Runs scripts in forks of this process, which imports libraries once, and other commands.

Each line of standard input is a JSON list: the folder, the files for standard output and error,
and the words of the command, which start with "scripts" for a script of the project.  Standard
output gets the number of the command's process, and later its exit code.
"""

import importlib
import json
import os
import pathlib
import runpy
import sys
import warnings

LIBRARIES = (
  *("array_record", "flax.nnx", "grain", "jax.experimental.pallas", "jinja2", "msgspec", "optax"),
  *("matplotlib.backends.backend_agg", "matplotlib.figure", "orbax.checkpoint", "scipy.stats"),
  *("safetensors", "sentencepiece", "sympy", "tensorboardX", "tensorflow_datasets", "tokenizers"),
  "tyro",
)

warnings.filterwarnings("ignore", ".* is multi-threaded", DeprecationWarning)  # os.fork warns
for library in LIBRARIES:
  importlib.import_module(library)
for line in sys.stdin:
  folder, out, errors, *words = json.loads(line)
  if process := os.fork():
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    continue
  os.setsid()
  os.chdir(folder)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  for number, path in ((1, out), (2, errors)):  # which may be one file
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
  if words[0] != "scripts":
    os.execvp(words[0], words)
  sys.argv = words[1:]
  sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)
  runpy.run_path(sys.argv[0], run_name="__main__")
  break
