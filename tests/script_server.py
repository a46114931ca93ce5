"""A process that has imported the libraries and forks: scripts start without seconds of importing.

Each line of standard input is a request, [[SCRIPT, ARGUMENT, ...], STDOUT, STDERR] with the files
that take its output.  The answer is a line with the script's exit code.
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


def serve() -> list:
  """Answers requests.  Returns one in each forked process, which then runs it."""
  for line in sys.stdin:
    if (child := os.fork()) == 0:
      return json.loads(line)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
  sys.exit()


warnings.filterwarnings("ignore", ".* is multi-threaded", DeprecationWarning)  # of os.fork
for library in LIBRARIES:
  importlib.import_module(library)
sys.argv, *outputs = serve()
for number, path in enumerate([os.devnull, *outputs]):
  os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY), number)
sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
