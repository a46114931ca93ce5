"""How scripts end: signals, errors in one line, whole files or none; and their progress."""

import errno
import fcntl
import gzip
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import pytest
import tiny
import tqdm
from conftest import ENVIRONMENT, ROOT, call_script, full_disk, python, run_script, write_lines
from scored_files import generated

from prm_jax.runtime import exits, progress, storage
from prm_jax.scoring import batching

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
  """A process that is writing its outputs, and its scratch directory."""
  code = WRITING.format(path=str(path), work=work, arguments=arguments)
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
  child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes)
  return child, pathlib.Path(child.stdout.readline().strip())


SLEEP = "time.sleep(60)"
CREATE = "for i in range(10**9): (b / str(i)).touch()"  # stops before the files are deleted
COMPILED = (
  "import hashlib; hashlib.pbkdf2_hmac('md5', b'', b'', 10**9)"  # Python would wait minutes
)


@pytest.mark.parametrize(
  ("number", "work", "arguments", "code", "line"),
  [
    (signal.SIGINT, SLEEP, "", -signal.SIGINT, "stopped by Ctrl-C"),
    (signal.SIGTERM, SLEEP, "", 143, "stopped by SIGTERM"),
    (
      signal.SIGTERM,
      SLEEP,
      "resumable=True",
      75,
      "stopped by SIGTERM; run the same command again to resume",
    ),
    (signal.SIGTERM, CREATE, "", 143, "stopped by SIGTERM"),
    (signal.SIGINT, COMPILED, "", -signal.SIGINT, "stopped by Ctrl-C"),
  ],
)
def test_a_signal_ends_a_script_with_one_line(tmp_path, number, work, arguments, code, line):
  """SIGINT or SIGTERM ends a script with one line, its own exit code and no unfinished file."""
  child, scratch = start(tmp_path / "out", work, arguments)
  time.sleep(0 if work is SLEEP else 0.5)
  child.send_signal(number)
  _, errors = child.communicate(timeout=30)
  assert (child.returncode, errors) == (code, f"-c: {line}\n")
  assert [*tmp_path.iterdir()] == [] and not scratch.exists()


def test_ctrl_c_ends_a_shell_loop_around_a_script():
  """A script stopped by Ctrl-C dies of SIGINT, so that a shell loop around it ends too."""
  code = "from prm_jax.runtime import exits; exits.on_signals(); "
  code += "import os, signal; os.killpg(0, signal.SIGINT); import time; time.sleep(30)"
  loop = f"for i in 1 2; do {sys.executable} -c '{code}'; done; echo not reached"
  done = subprocess.run(["bash", "-c", loop], cwd=ROOT, start_new_session=True, **TEXT)
  assert (done.returncode, done.stdout) == (-signal.SIGINT, "")


def test_unfinished_files_of_killed_writers_are_deleted(tmp_path):
  """The next writer deletes the unfinished files of dead processes under its own name only."""
  child, _ = start(tmp_path / "out")
  assert len([*tmp_path.iterdir()]) == 2
  with storage.written(tmp_path / "out") as file, storage.written_directory(tmp_path / "out.d"):
    file.write("new")
    assert len([*tmp_path.iterdir()]) == 4  # the other process still writes
  child.kill()
  child.communicate()
  others = [".another.01234567.unfinished", ".out.v2.01234567.unfinished"]
  others.append(".old.v2.01234567.replaced")  # the only copy of another output, `old.v2`
  for name in others:
    (tmp_path / name).touch()
  (tmp_path / ".old.01234567.replaced").mkdir()  # as if killed while it replaced a directory
  with storage.written(tmp_path / "out"), storage.written_directory(tmp_path / "old"):
    assert (tmp_path / "old").is_dir()
  with storage.written_directory(tmp_path / "out.d"):
    pass
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {"out", "out.d", "old", *others}


@pytest.mark.parametrize(
  ("script", "flags", "flag"),
  [
    ("grade.py", ["--input=x.jsonl", "--output=gs://bucket/x.jsonl"], "--output=gs:/bucket"),
    ("rerank.py", ["--input", "a.jsonl", "gs://b/c.jsonl", "--output_dir=o"], "--input=gs:/b"),
  ],
)
def test_a_bucket_is_no_local_path(tmp_path, monkeypatch, script, flags, flag):
  """A bucket where a local path is expected is an error, and no folder of that name."""
  monkeypatch.chdir(tmp_path)
  done = run_script(script, *flags, code=1)
  assert done.stderr.startswith(f"{script}: {flag}")
  assert "expected a local path" in done.stderr and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("home", [{}, {"HOME": ""}])
def test_an_account_without_a_home_works(home):
  """Without HOME and an entry in the list of users, caches are in the folder of temporary files."""
  code = """
import pathlib, pwd, tempfile
def unknown(*_): raise KeyError
pwd.getpwuid = unknown
import prm_jax.datasets.download, prm_jax.evaluation.answers.grading
from prm_jax.runtime import storage
assert storage.CACHE == pathlib.Path(tempfile.gettempdir(), "prm_jax")
"""
  assert "HOME" not in ENVIRONMENT
  python("-c", code, **home)


@pytest.mark.parametrize("name", ["50%s", "[a]*", "a b.c", ".x"])
def test_names_of_outputs_are_no_patterns(tmp_path, name):
  """An output whose name has special characters deletes only its own unfinished files."""
  for left in (f".{name}.01234567.unfinished", ".a.01234567.unfinished"):
    (tmp_path / left).touch()
  with storage.written(tmp_path / name) as file:
    file.write("new")
  assert {path.name for path in tmp_path.iterdir()} == {name, ".a.01234567.unfinished"}


def test_signals_that_a_parent_ignores_stay_ignored(tmp_path):
  """A script in the background of a shell, which ignores SIGINT, is not ended by it."""
  code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
  code += "from prm_jax.runtime import exits; exits.on_signals()\n"
  code += "import os; os.kill(os.getpid(), signal.SIGINT); print('alive')"
  done = python("-c", code)
  assert (done.stdout, done.stderr) == ("alive\n", "")


def test_files_take_their_names_together(tmp_path):
  """If one of several outputs cannot be written, all keep their contents; the error names all.

  An error that is not of the disk is raised as it is.
  """
  for name in "ab":
    (tmp_path / name).write_text("old")
  for error in (KeyboardInterrupt(), ConnectionRefusedError(errno.ECONNREFUSED, "refused")):
    with pytest.raises(type(error)) as caught, storage.written_together() as output:
      output(tmp_path / "a").write("new")
      raise error
    assert caught.value is error
  with full_disk(10_000), pytest.raises(OSError) as caught, storage.written_together() as output:
    output(tmp_path / "a").write("new")
    file = output(tmp_path / "b")
    for _ in range(9):  # what is still in the buffer cannot be written either
      file.write("x" * 3000)
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
  with pytest.raises(OSError, match="is a directory"), storage.written(tmp_path):
    pytest.fail("the block must not run")


def test_a_link_and_the_mode_of_a_file_stay(tmp_path):
  """An output that is a link stays one: its target gets the contents and keeps its mode.

  A file to which the shell adds, /dev/stdout, is refused.
  """
  (tmp_path / "target").touch()
  (tmp_path / "target").chmod(0o600)
  (tmp_path / "link").symlink_to("target")
  with storage.written(tmp_path / "link") as file:
    file.write("new")
  assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"
  assert (tmp_path / "target").stat().st_mode & 0o777 == 0o600
  assert len([*tmp_path.iterdir()]) == 2
  (tmp_path / "far").symlink_to("folder/target")
  with storage.written(tmp_path / "far") as file:
    file.write("new")
  assert (tmp_path / "folder" / "target").read_text() == "new"
  with pytest.raises(OSError, match="/dev/stdout: is "), storage.written("/dev/stdout"):
    pytest.fail("the block must not run")


def test_equal_contents_are_equal_gzip_files(tmp_path):
  """The bytes of a .gz output depend on its contents only, not on time or name."""
  with storage.written_together() as output:
    for name in ("a.gz", "b.gz"):
      output(tmp_path / name).write("\u03c0\n")
  data = (tmp_path / "a.gz").read_bytes()
  assert data == (tmp_path / "b.gz").read_bytes() and gzip.decompress(data) == b"\xcf\x80\n"
  assert data[4:8] == bytes(4)  # no time


def test_a_file_system_without_locks(tmp_path, monkeypatch):
  """Without file locks outputs are written, and other processes' unfinished files stay."""

  def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", no_locks)
  (tmp_path / ".a.01234567.unfinished").touch()
  with storage.written(tmp_path / "a") as file:
    file.write("new")
  assert {path.name for path in tmp_path.iterdir()} == {"a", ".a.01234567.unfinished"}


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ([], "FileNotFoundError"),
    (["--methods", "nothing"], "rerank.py: --methods nothing: unknown; there are "),
  ],
)
def test_an_error_is_one_line(tmp_path, flags, message):
  """A mistake in the input ends a script with one line, without a traceback, and exit code 1."""
  lines = write_lines(tmp_path / "a.jsonl", generated()) if flags else tmp_path / "missing.jsonl"
  message = message if flags else f"rerank.py: {lines}: no such file, or not a regular file"
  done = run_script(
    "rerank.py", f"--input={lines}", f"--output_dir={tmp_path / 'o'}", *flags, code=1
  )
  assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_an_empty_path_is_no_folder(tmp_path):
  """A flag with the value of an unset variable writes nothing to the current folder."""
  lines = write_lines(tmp_path / "a.jsonl", generated())
  for flags in (["--output_dir="], ["--output-dir", ""]):
    done = run_script("rerank.py", f"--input={lines}", *flags, code=2)
    assert done.stderr.startswith(f"rerank.py: {flags[0].rstrip('=')}=: an empty path")


def test_help_ends_in_a_narrow_terminal():
  command, env = (
    [sys.executable, ROOT / "scripts/view.py", "--help"],
    ENVIRONMENT | {"COLUMNS": "1"},
  )
  assert not subprocess.run(command, env=env, timeout=60, stdout=subprocess.DEVNULL).returncode


def test_a_closed_pipe_is_no_error():
  """A script whose output's reader ends early, as in `rerank.py ... | head`, prints no error."""
  code = "from prm_jax.runtime import exits; exits.run(lambda: print(10**6 * str(0)))"
  command = f"{sys.executable} -c '{code}' | true"
  done = subprocess.run(command, shell=True, cwd=ROOT, **TEXT)
  assert (done.stdout, done.stderr) == ("", "")


def test_progress_without_a_terminal(monkeypatch, capsys):
  """Without a terminal, long work prints plain lines with its share done and time left.

  The first update, which may compile, counts for neither rate nor time left.
  """
  now, clock = 0.0, lambda: now
  monkeypatch.setattr(tqdm.std, "time", clock)
  monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=clock))
  monkeypatch.setattr(progress, "SECONDS", 0.1)
  with progress.Progress(desc="scoring", total=4, unit="solutions") as bar:
    assert str(bar) == "scoring: 0/4 solutions (0%)"
    now = 0.05
    bar.reach(1)
    assert str(bar) == "scoring: 1/4 solutions (25%)"
    now = 0.2
    bar.reach(2.7)
    bar.reach(3)
  log = capsys.readouterr().err
  assert log == "scoring: 2/4 solutions (50%), 6.67 solutions/s, 00:00 left\n"


def test_a_full_disk_leaves_the_old_report_whole(tmp_path):
  """If a report's last file cannot be written, all files of the report before it stay."""
  path, out = write_lines(tmp_path / "a.jsonl", generated()), tmp_path / "out"
  flags = (f"--input={path}", f"--output_dir={out}", "--resamples=100", "--permutations=2")
  call_script("rerank.py", *flags)
  before = {each: each.read_bytes() for each in out.iterdir()}
  with full_disk(len(before[out / "report.json"]) + 20_000):  # too little for report.html
    done = call_script("rerank.py", *flags, "--seed=1", code=1)
  assert str(out / "report.html") in done.stderr
  assert done.stderr.endswith("File too large; nothing was replaced\n")
  assert {each: each.read_bytes() for each in out.iterdir()} == before


def test_scoring_reports_its_progress(prm_run, arithmetic_data, tmp_path, monkeypatch):
  """score.py prints the separator of its steps, and lines with its progress."""
  monkeypatch.setattr(progress, "SECONDS", 0.001)
  monkeypatch.setattr(batching, "BATCH_TOKENS", 128)
  source = arithmetic_data / "candidates.jsonl"
  flags = [f"--checkpoint={prm_run}", f"--input={source}", f"--output={tmp_path}/o.jsonl"]
  with tiny.first_device():
    scored = call_script("score.py", *flags)
  lines = scored.stderr.splitlines()
  assert lines[0] == f"loading {prm_run}"
  assert "steps end with the separator '\\n', tokens [3]" in lines
  counts = [int(line[1]) for line in map(re.compile(r"scoring: (\d+)/48 ").match, lines) if line]
  assert len(set(counts)) > 3 and counts == sorted(counts)
  assert any("solutions/s, " in line and line.endswith(" left") for line in lines)


def test_commands_work_without_standard_streams():
  """A caller may close standard output and error, as some schedulers do."""
  command = [sys.executable, "-m", "prm_jax", "--version"]
  closed = ["bash", "-c", 'exec "$@" >&- 2>&-', "-", *command]
  assert subprocess.run(closed, cwd=ROOT, env=ENVIRONMENT).returncode == 0


STOPPED = """
import sys
from prm_jax.runtime import exits, progress
exits.on_signals(resumable=True)
def main():
  sys.stdin.readline()
  print("saving", file=progress._Lines())
  raise exits.Preempted("step 3 is saved")
exits.run(main)
"""


def test_a_stopped_run_has_its_exit_code_without_a_reader():
  """SIGTERM also ends `tee` in `train.py 2>&1 | tee log`; the run still ends with 75."""
  pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  run = subprocess.Popen([sys.executable, "-c", STOPPED], cwd=ROOT, env=ENVIRONMENT, **pipes)
  run.stderr.close()
  run.stdin.write("\n")
  run.stdin.close()
  assert run.wait(timeout=60) == exits.AGAIN
