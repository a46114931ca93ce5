"""The commands of README, docs/ and docstrings run as printed, at small sizes.

A page's commands run in order, in a folder with the files that the pages take for granted.
"""

import importlib.util
import json
import os
import pathlib
import re
import select
import shutil
import signal
import string
import sys
import time
import urllib.request

import documented_workspace
import documents
import pytest
from conftest import CACHE, ENVIRONMENT, ForkServer

SECONDS = 300  # of a command
TEXTS = documents.texts()
# Flags added to those of a command: small sizes, and below replacements of what is missing here.
SHAPE = " ".join(f"--config.model.{k}={v}" for k, v in documented_workspace.SHAPE.items())
SHAPE += f" --config.model.vocab_size={documented_workspace.VOCAB} --config.mesh.tensor=1"
TRAIN = "--config.train.steps=2 --config.train.batch_rows=1 --config.train.eval_rows=2"
LARGE = r"configs/prm800k_(qwen2.5_math|qwen2.5_32b|gemma)"
OVERRIDES = {
  r"prepare_data.py --dataset=arithmetic": "--arithmetic.train_problems=30 "
  "--arithmetic.test_problems=6 --arithmetic.candidates=8",
  r"train_tokenizer.py": "--vocab_size=300",
  r"train.py": f"{TRAIN} --config.data.row_length=256",
  r"train.py --config=configs/mathematics/": "--config.train.epochs=0",
  rf"train.py --config={LARGE}": SHAPE,
  r"generate.py": "--n=4 --batch=8 --max_new_tokens=40",
  r"annotate.py --method=rollouts": "--rollouts=1 --batch=8 --max_new_tokens=16",
  r"annotate.py --method=judge": "--votes=2",
  r"experiment.py (?!.*--plan)(?!.*--from_json)": "--scale=smoke --seeds 0",
  # The tiny model in place of the checkpoint has another shape.
  r"compile_for_tpu.py": "--config.data.row_length=512 --config.train.batch_rows=4 "
  "--config.model.width=256 --config.model.layers=6 --config.model.heads=4 "
  "--config.model.kv_heads=4 --config.model.mlp_width=512 --config.init.checkpoint=models/none",
  r"compile_for_tpu.py (?!.*mesh)": "--topology=v5e:2x2 --config.mesh.tensor=1",
  r"benchmark.py": "--quick",
  r"benchmark.py all": "--only aggregation",
  # In place of a download, of the peers' environments, and of a port that may be taken.
  r"prepare_data.py (?!.*--source)(--dataset=prm800k|--output)": "--source=DIR",
  r"prepare_data.py --dataset=math_splits": "--source=DIR",
  r"benchmark.py training": "--peer=none",
  r"benchmark.py generation": "--peer_python=",
  r"serve.py": "--port=0",
}
NOT_RUN = {
  r"scripts/(test|docs|quickstart).sh": "makes an environment; tests run it elsewhere",
  r"fetch_model.py": "downloads",
  r"launch_tpu.sh (?!.*--dry_run)": "asks a cloud",
  r"prepare_data.py .*--beam": "Apache Beam is in no environment of the others",
  r"benchmark.py quickstart": "minutes; test_quickstart.py runs the quick start",
  r"benchmark.py (kernel|scaling)": "minutes of compiling; test_benchmarks.py runs them",
  r"mathematics.sh": "minutes; test_mathematics.py runs it",
  r"tests/reference_models.py": "needs torch; writes a file of the tests",
  r"(scripts/|experiment.py |benchmark.py )NAME": "stands for others, which are run",
}
if not importlib.util.find_spec("libtpu"):
  NOT_RUN["compile_for_tpu.py"] = "the TPU compiler is not installed"


def commands(page: str) -> list[documents.Command]:
  """Returns the complete commands of a page, except those that are not run."""
  complete = [command for command in documents.commands(TEXTS[page]) if command.whole]
  return [command for command in complete if not any(re.search(x, str(command)) for x in NOT_RUN)]


PAGES = [page for page in TEXTS if commands(page)]


class Runner:
  """Runs commands in a folder, one at a time, and writes what the last one printed to a log."""

  def __init__(self, log: pathlib.Path, environment: dict[str, str]):
    self.log, self.environment = log, environment
    self.server = ForkServer(environment)
    self.stdout = self.server.process.stdout

  def start(self, folder: pathlib.Path, words: list[str]) -> None:
    name = pathlib.Path(words[0]).name
    if name.endswith(".sh"):
      words = ["bash", *words]
    elif name in ("compile_for_tpu.py", "benchmark.py"):  # prepare the environment of JAX
      words = [sys.executable, *words]
    else:
      words = ["scripts", *words]
    self.log.unlink(missing_ok=True)
    self.process = self.server.start(folder, self.log, self.log, words)

  def end(self) -> str:
    """Returns the exit code and the end of the log of a failed command, or ""."""
    if not select.select([self.stdout], [], [], SECONDS)[0]:
      os.killpg(self.process, signal.SIGKILL)
    code = self.server.answer()
    return f"exit code {code}:\n{self.log.read_text()[-3000:]}" if code else ""

  def run(self, folder: pathlib.Path, words: list[str]) -> None:
    self.start(folder, words)
    served = "serve.py" not in words[0] or self.served()
    error = self.end()
    assert served and not error, f"{' '.join(words)}: {error or 'no scores'}"

  def served(self) -> bool:
    """Stops the started server; returns whether it gave a score before."""
    limit = time.monotonic() + SECONDS
    while not (ready := re.search(r"serving .* on (http:\S+)", self.printed())):
      if select.select([self.stdout], [], [], 0.2)[0] or time.monotonic() > limit:
        return False
    body = {"solutions": [{"problem": "What is 2 + 3?", "steps": ["2 + 3 = 5"]}]}
    try:
      with urllib.request.urlopen(f"{ready[1]}/score", json.dumps(body).encode()) as answer:
        return len(json.load(answer)["scores"]) == 1
    except OSError:
      return False
    finally:
      os.kill(self.process, signal.SIGTERM)

  def printed(self) -> str:
    return self.log.read_text() if self.log.exists() else ""


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
  """Returns a runner and the folder that each page gets a copy of."""
  home = tmp_path_factory.mktemp("documented")
  with documented_workspace.servers() as more:
    own = {"PATH": os.environ["PATH"], "HOME": str(home)}
    own |= {"MPLBACKEND": "agg", "MPLCONFIGDIR": CACHE}
    environment = ENVIRONMENT | more | own
    runner = Runner(home / "log", environment)
    folder = home / "template"
    folder.mkdir()
    documented_workspace.make(folder, lambda words: runner.run(folder, words))
    yield runner, folder
    runner.server.process.stdin.close()
    runner.server.process.wait()


def words(command: documents.Command, environment: dict[str, str]) -> list[str]:
  """Returns the words of a command, with variables substituted and flags of its size added."""
  text = string.Template("\0".join([command.script, *command.arguments]))
  text = text.safe_substitute(environment).replace(documented_workspace.SERVER, environment["URL"])
  arguments = text.split("\0")
  for pattern, flags in OVERRIDES.items():
    arguments += flags.split() if re.search(pattern, str(command)) else []
  return arguments


def make_room(folder: pathlib.Path, command: documents.Command) -> None:
  """Deletes the outputs of a command: alternatives on a page write to the same ones."""
  for word in command.arguments:
    if made := re.fullmatch(r"--(?:output|workdir)=([^$/][^$]*)", word):
      if (path := folder / made[1]).is_dir():
        shutil.rmtree(path)
      path.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.xdist_group("documented")  # one at a time: they have two cores
@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(page, workspace, tmp_path):
  """Each command of a page exits with 0, given the files that earlier commands of the page made."""
  runner, template = workspace
  folder = shutil.copytree(template, tmp_path / "clone")
  for command in commands(page):
    make_room(folder, command)
    documented_workspace.before(folder, command)
    start = time.monotonic()
    runner.run(folder, words(command, runner.environment))
    print(f"{time.monotonic() - start:6.1f} s  {command}")


def test_every_pattern_of_overrides_matches_a_command():
  calls = [str(command) for text in TEXTS.values() for command in documents.commands(text)]
  matched = lambda pattern: any(re.search(pattern, call) for call in calls)
  assert not [pattern for pattern in (*OVERRIDES, *NOT_RUN) if not matched(pattern)]
