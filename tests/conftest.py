"""Settings and fixtures of the whole suite.

JAX gets eight CPU devices before any backend starts, so that sharded code is tested on any machine.
Tests marked `shared_data` read the folder of real data beside the checkout.
"""

import contextlib
import dataclasses
import functools
import gzip
import http.server
import importlib.util
import io
import json
import os
import pathlib
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import fake_server
import jax
import pytest


def xla_knows(flag: str) -> bool:
  """Returns whether XLA has a flag: it ends the process at one that it does not know."""
  env = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
  code = "import jax; jax.numpy.zeros(1)"
  return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True).returncode == 0


# Compiling is most of the suite's time.  Only `start_script` and the slow campaign of
# tests/test_kills.py are optimised as for users.
NO_EMITTERS = " --xla_cpu_use_fusion_emitters=false"  # emitters are a third of compiling
FLAGS = os.environ.get("XLA_FLAGS", "").replace(NO_EMITTERS, "")
OPTIMISED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": FLAGS}
FIRST = "PRM_JAX_TEST_CACHE" not in os.environ  # the processes of pytest-xdist inherit both
if FIRST and xla_knows(NO_EMITTERS.strip()):
  os.environ["XLA_FLAGS"] = FLAGS + NO_EMITTERS
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_cpu_enable_async_dispatch", False)  # as distributed.join
# Tests compile the same small programs many times: the cache keeps them for the session.  The
# processes of pytest-xdist inherit the variable, and so the folder.
if FIRST:
  os.environ["PRM_JAX_TEST_CACHE"] = tempfile.mkdtemp(prefix="prm_jax_test_cache_")
CACHE = os.environ["PRM_JAX_TEST_CACHE"]
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a suite in the background of a shell
  signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = pathlib.Path(__file__).resolve().parents[1]
ENVIRONMENT = {  # of the processes that tests start
  "PATH": "/usr/bin:/bin",
  "PYTHONPATH": str(ROOT),
  "JAX_PLATFORMS": "cpu",
  "JAX_COMPILATION_CACHE_DIR": CACHE,
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
  "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
}
sys.path.insert(0, str(ROOT))  # for benchmarks/, which is not installed
SHARED = ROOT.parent / "shared"
# Packages that tests with these marks need besides; `scripts/test.sh --reference` installs them.
NEEDED = {"reference": ("torch", "transformers"), "beam": ("apache_beam",)}

needs_libtpu = pytest.mark.skipif(
  not importlib.util.find_spec("libtpu"),
  reason="the TPU compiler is not installed: pip install libtpu",
)


def pytest_addoption(parser):
  parser.addoption("--no_skips", action="store_true", help="a skipped test counts as a failure")


def pytest_collection_modifyitems(items):
  for item in items:
    for mark in filter(item.get_closest_marker, NEEDED):
      if absent := [name for name in NEEDED[mark] if importlib.util.find_spec(name) is None]:
        reason = f"{', '.join(absent)} not installed: bash scripts/test.sh --reference"
        item.add_marker(pytest.mark.skip(reason=reason))


def pytest_sessionfinish(session):
  reporter = session.config.pluginmanager.get_plugin("terminalreporter")
  if session.config.getoption("no_skips") and reporter and reporter.stats.get("skipped"):
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure():
  if FIRST:
    shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def own_signals():
  """Keeps scripts that run in this process from replacing pytest's signal handlers."""
  from prm_jax.runtime import exits

  exits.on_signals = lambda **_: None


@pytest.fixture
def one_device():
  """Runs take one of the eight devices, which compiles faster."""
  import tiny

  with tiny.first_device():
    yield


class ForkServer:
  """A process of tests/forked_script.py, which ends with this one."""

  def __init__(self, environment):
    command = [sys.executable, str(ROOT / "tests" / "forked_script.py")]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    self.process = subprocess.Popen(command, env=environment, bufsize=0, **pipes)

  def start(self, folder, out, errors, words) -> int:
    """Starts a command in a folder; returns the number of its process."""
    request = json.dumps([str(folder), str(out), str(errors), *words])
    self.process.stdin.write(request.encode() + b"\n")
    return self.answer()

  def answer(self) -> int:
    """The next number that the server prints."""
    line = self.process.stdout.readline()
    assert line, "tests/forked_script.py has ended: its error is on standard error"
    return int(line)


fork_server = functools.cache(lambda: ForkServer(ENVIRONMENT))


def ended(done, code):
  """Returns a finished process; asserts that it has the exit code, or one of them."""
  codes = code if isinstance(code, tuple) else (code,)
  assert done.returncode in codes, f"exit code {done.returncode}: {done.stderr[-3000:]}"
  return done


def run_script(name, *arguments, code=0):
  """Runs a script of the project in a fork of tests/forked_script.py, on the CPU; its result.

  Asserts that it ends with the exit code `code`, or one of them.
  """
  command = [str(ROOT / "scripts" / name), *map(str, arguments)]
  server = fork_server()
  with tempfile.TemporaryDirectory() as folder:
    outputs = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
    server.start(ROOT, *outputs, ["scripts", *command])
    answer = server.answer()
    texts = (path.read_text() for path in outputs)
    return ended(subprocess.CompletedProcess(command, answer, *texts), code)


def call_script(name, *arguments, code=0):
  """As `run_script`, but in this process, which is faster and reuses compiled programs.

  Raises an exception that the script does not turn into a message.
  """
  command = [str(ROOT / "scripts" / name), *map(str, arguments)]
  out, errors, ending = io.StringIO(), io.StringIO(), 0
  with (
    contextlib.chdir(ROOT),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(errors),
    pytest.MonkeyPatch.context() as patch,
  ):
    patch.setattr(sys, "argv", command)
    try:
      runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
      ending = 0 if end.code is None else end.code
      if not isinstance(ending, int):  # a message
        print(ending, file=errors)
        ending = 1
  texts = (out.getvalue(), errors.getvalue())
  return ended(subprocess.CompletedProcess(command, ending, *texts), code)


def python(*arguments, code=0, cwd=ROOT, **environment):
  """Runs a new Python, on the CPU; its result.  Asserts that it ends with this exit code."""
  command, env = [sys.executable, *map(str, arguments)], ENVIRONMENT | environment
  return ended(subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env), code)


def start_script(name, *arguments, code=0, **environment):
  """As `run_script`, but as from a terminal, optimised as for users."""
  return python(ROOT / "scripts" / name, *arguments, code=code, **OPTIMISED | environment)


@contextlib.contextmanager
def full_disk(most: int):
  """No file of this process can grow beyond `most` bytes in the block."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_lines(path, rows):
  """Writes rows, or texts of lines, as JSON lines, and the folder; returns the path."""
  path.parent.mkdir(parents=True, exist_ok=True)
  text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
  path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
  return path


def read_lines(path):
  """The rows of a file of JSON lines."""
  with path.open() as lines:
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def shared():
  """The folder of real data, for tests marked `shared_data`."""
  if not SHARED.is_dir():
    pytest.skip(f"{SHARED} is missing: it holds real data that is not part of the project")
  return SHARED


@pytest.fixture(scope="session")
def prm800k_sample(shared):
  """A small part of PRM800K in upstream's format."""
  return shared / "data" / "prm800k_sample"


def real_model(name, variable):
  """The folder of a real model that the environment names; skips the test without one."""
  path = pathlib.Path(os.environ.get(variable, ""))
  if not (path / "provenance.json").is_file():
    pytest.skip(f"{variable} is not what scripts/fetch_model.py {name} writes")
  return path


@pytest.fixture(scope="session")
def smollm2():
  """The folder of the real SmolLM2, if the environment names it."""
  return real_model("smollm2-135m", "PRM_JAX_SMOLLM2")


@pytest.fixture
def raw_rows():
  """Rows by split in every form that PRM800K has, a new copy for each test."""
  return {
    "train": [phase2_row(), unrated_row(), outcome_row()],
    "test": [phase1_row(), gave_up_row()],
  }


def write_prm800k(folder, raw_rows, phase="phase2"):
  """Writes PRM800K's files of a phase; returns the folder."""
  for split, rows in raw_rows.items():
    write_lines(folder / f"{phase}_{split}.jsonl", rows)
  return folder


def completion(text, rating=1, flagged=False):
  return {"text": text, "rating": rating, "flagged": flagged}


def step(*completions, chosen=0, human=None):
  if human is not None:
    human = {"text": human, "rating": None, "source": "human", "flagged": False}
  keys = ("completions", "human_completion", "chosen_completion")
  return dict(zip(keys, (list(completions) or None, human, chosen)))


def make_row(steps, reason="solution", generation=None, problem="What is 2 + 3?", **question):
  return {
    "labeler": "0b9e7a2c",
    "timestamp": "2022-08-01T10:00:00.123456",
    "generation": generation,
    "is_quality_control_question": False,
    "is_initial_screening_question": False,
    "question": {"problem": problem, "ground_truth_answer": "5", **question},
    "label": {"steps": steps, "total_time": 12345, "finish_reason": reason},
  }


def pre_generated(steps, answer, score, solution=None):
  """The further fields of a phase-2 question."""
  fields = {"steps": steps, "answer": answer, "verifier_score": score}
  return {"ground_truth_solution": solution} | {f"pre_generated_{k}": v for k, v in fields.items()}


def phase1_row():
  """A solved row with alternatives at each step, and a human completion where all are bad."""
  return make_row(
    [
      step(completion("Count.", 0), completion("Add.", 1), completion("Add!", None), chosen=1),
      step(completion("2+3=6", -1), completion("2+3=4", -1), chosen=None, human="2+3=5"),
      step(completion("Done.\n\n# Answer\n\n5"), completion("# Answer\n\n5"), chosen=1),
    ]
  )


def gave_up_row():
  """A row whose labeler gave up: the last step is empty, the one before it unrated."""
  unrated = step(completion("A?", None), chosen=None)
  return make_row([step(completion("Hm.", 0)), unrated, step(chosen=None)], "give_up")


def phase2_row():
  """A pre-generated solution, labelled up to the first error, which has alternatives."""
  texts = ["I add \u00e9 and \u4e8c.", "2+3=6", "# Answer\n\n6"]
  first, wrong = completion(texts[0], 1, None), completion(texts[1], -1, None)
  last = step(wrong, completion("2+3=5", 1), completion("So?", 0), chosen=None)
  question = pre_generated(texts, "6", 0.10225247968817909)
  return make_row([step(first), last], "found_error", 7, **question)


def unrated_row():
  """A row with an unrated step before a rated one, and an unrated last step."""
  ratings = {"First.": None, "2+3=5": 1, "So it is 5.": None}
  steps = [step(completion(text, rating, None)) for text, rating in ratings.items()]
  return make_row(steps, "found_error", 3, "What is  3 + 2?")


def outcome_row():
  """A solution with every step labelled right."""
  texts = ["2+3=5", "# Answer\n\n5"]
  steps = [step(completion(text, 1, None)) for text in texts]
  return make_row(steps, "solution", 1, "Add 2 to 3.", **pre_generated(texts, "5", 1, "$5$"))


@pytest.fixture(scope="session")
def arithmetic_data(tmp_path_factory):
  """A small generated dataset, prepared as by scripts/prepare_data.py, with its tokenizer."""
  from prm_jax.datasets import arithmetic, prepare
  from prm_jax.input_pipeline import step_dataset, tokenizers

  directory = tmp_path_factory.mktemp("arithmetic") / "data"
  generator = arithmetic.Generator(train_problems=30, test_problems=6, candidates=8)
  prepare.prepare_arithmetic(directory, generator)
  texts = step_dataset.texts(directory, "train", 100)
  tokenizers.train_sentencepiece(texts, directory / "tokenizer.model", 320)
  return directory


@pytest.fixture(scope="session")
def prm_run(arithmetic_data, tmp_path_factory):
  """The work directory of a process model with random weights and clearly different scores."""
  import tiny

  experiment = tiny.experiment(arithmetic_data)
  return tiny.untrained(experiment, tmp_path_factory.mktemp("untrained") / "run")


@pytest.fixture(scope="session")
def text_run(arithmetic_data, tmp_path_factory):
  """The work directory of a language model after two updates."""
  import tiny

  from prm_jax import config as config_lib
  from prm_jax.training import loop

  directory = tmp_path_factory.mktemp("text")
  (directory / "text.jsonl").write_text(json.dumps({"prompt": "2+2\n", "completion": "4"}) + "\n")
  given = tiny.experiment(arithmetic_data)
  loss = config_lib.Loss(objective="language_model")
  texts = dict.fromkeys(("text_train", "text_eval"), str(directory / "text.jsonl"))
  data = dataclasses.replace(given.data, **texts)
  train = config_lib.Train(steps=2, batch_rows=1, log_every=2, eval_every=2, save_every=2)
  with tiny.first_device():
    loop.run(dataclasses.replace(given, data=data, train=train, loss=loss), directory / "run")
  return directory / "run"


@pytest.fixture
def served(tmp_path, monkeypatch):
  """A folder, and the URL at which a local HTTP server serves it."""
  folder = tmp_path / "served"
  folder.mkdir()
  monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *args: None)
  handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
  httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
  with fake_server.running(httpd):
    yield folder, f"http://127.0.0.1:{httpd.server_port}/"
