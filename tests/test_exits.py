"""How scripts end: signals, errors in one line, files that are whole or not there, progress."""

import errno
import fcntl
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny
from conftest import ROOT, call_script, run_script
from scored_files import generated, write

from prm_jax import config as config_lib
from prm_jax.runtime import json_lines, progress, storage
from prm_jax.scoring import batching, candidates
from prm_jax.training import loop

TEXT = {"capture_output": True, "text": True}
WRITING = """
from prm_jax.runtime import exits
exits.on_signals({arguments})
import pathlib, sys, time
from prm_jax.runtime import storage
with storage.written({path!r}) as a, storage.written_directory({path!r} + ".d") as b:
  a.write("half")
  (b / "part").write_text("half")
  with exits.scratch_directory() as c:
    print(c, flush=True)
    {work}
"""


def start(path, work="time.sleep(60)", arguments=""):
  """A process in the middle of writing, and its scratch directory."""
  code = WRITING.format(path=str(path), work=work, arguments=arguments)
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
  child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes)
  return child, pathlib.Path(child.stdout.readline().strip())


@pytest.mark.parametrize(
  ("number", "arguments", "code", "line"),
  [
    (signal.SIGINT, "", -signal.SIGINT, "-c: stopped by Ctrl-C\n"),
    (signal.SIGTERM, "", 143, "-c: stopped by SIGTERM\n"),
    (signal.SIGTERM, "75, '; again'", 75, "-c: stopped by SIGTERM; again\n"),
  ],
)
def test_a_signal_ends_a_script_with_one_line(tmp_path, number, arguments, code, line):
  """Nothing unfinished is left, no exception is raised, and the exit code says what came."""
  child, scratch = start(tmp_path / "out", arguments=arguments)
  child.send_signal(number)
  _, said = child.communicate(timeout=30)
  assert (child.returncode, said) == (code, line)
  assert [*tmp_path.iterdir()] == [] and not scratch.exists()


def test_a_script_that_writes_on_is_halted(tmp_path):
  """Files that come while what is unfinished is being deleted would be left behind."""
  work = "for i in range(10**9): (b / str(i)).touch()"
  child, _ = start(tmp_path / "out", work=work)
  time.sleep(0.5)
  child.terminate()
  _, said = child.communicate(timeout=30)
  assert (child.returncode, said) == (143, "-c: stopped by SIGTERM\n")
  assert [*tmp_path.iterdir()] == []


def test_ctrl_c_ends_a_loop_around_the_script():
  """The script dies of SIGINT, so the shell that waits for it stops too, with 130."""
  code = "from prm_jax.runtime import exits; exits.on_signals(); "
  code += "import os, signal; os.killpg(0, signal.SIGINT); import time; time.sleep(30)"
  loop = f"for i in 1 2; do {sys.executable} -c '{code}'; done; echo not reached"
  done = subprocess.run(["bash", "-c", loop], cwd=ROOT, start_new_session=True, **TEXT)
  assert (done.returncode, done.stdout) == (-signal.SIGINT, "")


def test_what_sigkill_leaves_is_deleted_by_the_next_writer(tmp_path):
  """Files and directories of dead processes are, those of running ones and other names are not."""
  child, _ = start(tmp_path / "out")
  assert len([*tmp_path.iterdir()]) == 2
  with storage.written(tmp_path / "out") as file, storage.written_directory(tmp_path / "out.d"):
    file.write("new")
    assert len([*tmp_path.iterdir()]) == 4  # the other process still writes
  child.kill()
  child.communicate()
  (tmp_path / f".another.{child.pid}.unfinished").touch()
  (tmp_path / f".old.{child.pid}.replaced").mkdir()  # it was killed while it replaced a directory
  with storage.written(tmp_path / "out"), storage.written_directory(tmp_path / "old"):
    assert (tmp_path / "old").is_dir()
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {"out", "out.d", "old", f".another.{child.pid}.unfinished"}


@pytest.mark.parametrize("name", ["50%s", "[a]*", "a b.c", ".x"])
def test_names_of_outputs_are_only_names(tmp_path, name):
  """They are no patterns: what others left stays, what this output left goes."""
  for left in (f".{name}.99999999.unfinished", ".a.99999999.unfinished"):
    (tmp_path / left).touch()
  with storage.written(tmp_path / name) as file:
    file.write("new")
  assert {path.name for path in tmp_path.iterdir()} == {name, ".a.99999999.unfinished"}


def test_signals_that_a_parent_ignores_stay_ignored(tmp_path):
  """A job in the background of a shell is not ended by Ctrl-C."""
  code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
  code += "from prm_jax.runtime import exits; exits.on_signals()\n"
  code += "import os; os.kill(os.getpid(), signal.SIGINT); print('alive')"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, text=True)
  assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_files_take_their_names_together(tmp_path):
  """If the last one cannot be written, the first ones keep their old contents; the error has both.

  A limit on the size of files stands for a full disk.
  """
  for name in "ab":
    (tmp_path / name).write_text("old")
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  with pytest.raises(OSError) as caught, storage.written_together() as output:
    output(tmp_path / "a").write("new")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
      output(tmp_path / "b").write("x" * 20_000)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  text = f"{tmp_path / 'a'}, {tmp_path / 'b'}: {os.strerror(errno.EFBIG)}; nothing was replaced"
  assert str(caught.value) == text
  assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old", "b": "old"}
  with storage.written_together() as output:
    output(tmp_path / "a").write("new")
    output(tmp_path / "b", "wb").write(b"new")
    assert (tmp_path / "a").read_text() == "old"
  assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == "new"
  with pytest.raises(OSError, match="two outputs have this name"), storage.written_together() as o:
    o(tmp_path / "c")
    o(tmp_path / "." / "c")


def test_a_file_system_without_locks(tmp_path, monkeypatch):
  """Files are written there; what another process left is not touched, as it may still write."""

  def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", no_locks)
  (tmp_path / ".a.99999999.unfinished").touch()
  with storage.written(tmp_path / "a") as file:
    file.write("new")
  assert {path.name for path in tmp_path.iterdir()} == {"a", ".a.99999999.unfinished"}


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ([], "FileNotFoundError"),
    (["--methods", "nothing"], "rerank.py: --methods nothing: unknown; there are "),
  ],
)
def test_an_error_is_one_line(tmp_path, flags, message):
  """An error of the input has the script's name and no traceback; the exit code is 1."""
  lines = write(tmp_path / "a.jsonl", generated()) if flags else tmp_path / "missing.jsonl"
  message = message if flags else f"rerank.py: {lines}: no such file, or not a regular file"
  done = run_script("rerank.py", f"--input={lines}", f"--output_dir={tmp_path / 'o'}", *flags)
  assert done.returncode == 1
  assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_a_reader_that_stops_is_no_error_message(tmp_path):
  """`rerank.py ... | head` ends without a traceback."""
  path = write(tmp_path / "a.jsonl", generated())
  command = f"{sys.executable} scripts/rerank.py --input={path} --output_dir={tmp_path}"
  command += " --format=csv --resamples=16 --permutations=2"
  done = subprocess.run(f"{command} | true", shell=True, capture_output=True, text=True, cwd=ROOT)
  assert (done.stdout, done.stderr) == ("", "")


def test_progress_where_there_is_no_terminal(monkeypatch, capsys):
  """A plain line now and then with done, rate and time left; none for work that is soon over."""
  monkeypatch.setattr(progress, "SECONDS", 0.1)
  with progress.Progress(desc="scoring", total=4, unit="solutions") as bar:
    bar.reach(1)
    time.sleep(0.15)
    bar.reach(2.7)
    bar.reach(3)
  said = capsys.readouterr().err
  assert said.startswith("scoring: 2/4 solutions (50%), ") and said.endswith(" left\n")
  assert said.count("\n") == 1 and "\r" not in said


def test_a_signal_is_answered_in_compiled_code(tmp_path):
  """Python's own handlers would wait for the call to end."""
  child, _ = start(
    tmp_path / "out", work="import hashlib; hashlib.pbkdf2_hmac('md5', b'', b'', 10**9)"
  )
  time.sleep(0.5)
  child.send_signal(signal.SIGINT)
  began = time.monotonic()
  child.communicate(timeout=30)
  assert child.returncode == -signal.SIGINT and time.monotonic() - began < 10


def test_a_full_disk_leaves_the_old_report_whole(tmp_path):
  """The page of an earlier run does not stand beside the numbers of this one.

  A limit on the size of files, between those of report.json and of the page, stands for the disk.
  """
  path, out = write(tmp_path / "a.jsonl", generated()), tmp_path / "out"
  flags = (f"--input={path}", f"--output_dir={out}", "--resamples=100", "--permutations=2")
  done = call_script("rerank.py", *flags)
  assert done.returncode == 0, done.stderr
  before = {each: each.read_bytes() for each in out.iterdir()}
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  most = len(before[out / "report.json"]) + 20_000
  resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
  try:
    done = call_script("rerank.py", *flags, "--seed=1")
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert done.returncode == 1 and str(out / "report.html") in done.stderr
  assert done.stderr.endswith("File too large; nothing was replaced\n")
  assert {each: each.read_bytes() for each in out.iterdir()} == before


def test_help_describes_the_options_of_hosts():
  """Not with the text of the option before them."""
  said = run_script("score.py", "--help").stdout
  assert "several: where JAX does not find them itself" in said.split("hosts options")[1][:200]


def test_scoring_says_how_far_it_is(arithmetic_data, tmp_path, monkeypatch, capsys):
  """score.py has a line now and then where there is no terminal, and says what ends a step."""
  with tiny.first_device():
    loop.run(tiny.experiment(arithmetic_data, config_lib.Loss()), tmp_path / "run")
    said = capsys.readouterr().err
    assert "steps end with the separator '\\n', tokens [3]" in said
    assert re.search(r"step 2 of 8: loss .* tokens/s \d+, .*\d+:\d+ left", said)
    monkeypatch.setattr(progress, "SECONDS", 0.001)
    monkeypatch.setattr(batching, "BATCH_TOKENS", 128)
    source = arithmetic_data / "candidates.jsonl"
    flags = [f"--checkpoint={tmp_path}/run", f"--input={source}", f"--output={tmp_path}/o.jsonl"]
    scored = call_script("score.py", *flags)
  assert scored.returncode == 0, scored.stderr
  said = scored.stderr.splitlines()
  assert said[0] == f"loading {tmp_path}/run"
  assert "steps end with the separator '\\n', tokens [3]" in said
  done = [int(found[1]) for found in map(re.compile(r"scoring: (\d+)/48 ").match, said) if found]
  assert len(set(done)) > 3 and done == sorted(done)
  assert any("solutions/s, " in line and line.endswith(" left") for line in said)


def test_long_integers_in_other_keys_are_kept(tmp_path):
  """score.py keeps every key as it was, integers of any length too."""
  line = b'{"problem": "p", "steps": ["a"], "id": {"n": [123456789012345678901234567890, -1]}}'
  record = json_lines.parse(line, "here")
  kept = candidates.scored(record, ["a"], np.array([[[0.25, 0.25, 0.5]]]), tiny.contract())
  assert json.loads(json.dumps(kept))["id"] == json.loads(line)["id"]
