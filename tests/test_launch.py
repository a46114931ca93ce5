"""scripts/launch_tpu.sh and the Dockerfile.  Stand-in programs take the place of the cloud's."""

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import time

import pytest
from conftest import ROOT

from prm_jax.runtime import exits

SCRIPT = ROOT / "scripts" / "launch_tpu.sh"
PLACE = ("--project=my-project", "--zone=us-east5-a", "--name=qwen-7b")
ARGUMENTS = ("--config=configs/prm800k_qwen2.5_math_7b.py", "--workdir=gs://my-bucket/runs/qwen 7b")
COPY = "gs://my-bucket/data/prm800k=data/prm800k"
RUN = (*PLACE, *ARGUMENTS, "--topology=v5p:2x4x4", f"--copy={COPY}", "--commit=HEAD")
OVERRIDES = ("--config.data.separator=a 'b' $(c)", "--config.train.steps=7")
# Records its calls; `list` prints the file "names", `describe` the next line of "states", and `cat`
# the next line of "codes", or fails where it is empty.
GCLOUD = """#!/bin/bash
echo "$@" >> "$FAKE/calls"
case " $* " in
  *" list "*) cat "$FAKE/names" ;;
  *" describe "*) head -n 1 "$FAKE/states"; sed -i 1d "$FAKE/states" ;;
  *" cat "*) grep -m 1 . <(head -n 1 "$FAKE/codes"); code=$?; sed -i 1d "$FAKE/codes"; exit $code ;;
  *" create "*) ! grep -q refuse "$FAKE/names" ;;
esac
"""
TRUE = "#!/bin/bash\n"

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a launch is of a commit")


def bash(script, *flags, programs=None, **environment):
  """Returns the finished run of a script; programs in the folder `programs` come first."""
  if programs:
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "FAKE": str(programs)}
  command, env = ["bash", str(script), *flags], os.environ | environment
  return subprocess.run(command, capture_output=True, text=True, env=env)


def write(folder, **files):
  """Writes executable files."""
  for name, text in files.items():
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def dry_run(*flags):
  """Returns the printed commands, each as its words, and the startup script of the workers."""
  done = bash(SCRIPT, *flags, "--dry_run", "--", *OVERRIDES)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  job = "\n".join(line.removeprefix("#   ") for line in lines if line.startswith("#   "))
  commands = [shlex.split(line) for line in lines if not line.startswith("#   ")]
  if commands[0][0] == "git":  # the printed commands can be run: their files are kept
    folder = pathlib.Path(commands[0][3].removeprefix("--output=")).parent
    assert (folder / "job.sh").read_text() == f"{job}\n"
    shutil.rmtree(folder)
  return commands, job


@pytest.mark.parametrize(
  ("topology", "accelerator", "runtime"),
  [
    ("v5e:8x8", "v5litepod-64", "v2-alpha-tpuv5-lite"),
    ("v5p:4x4x4", "v5p-128", "v2-alpha-tpuv5"),  # gcloud counts cores of v5p
    ("v6e:4x8", "v6e-32", "v2-alpha-tpuv6e"),
  ],
)
def test_a_dry_run_prints_every_command(topology, accelerator, runtime):
  """A dry run prints the commands that upload the commit and create, watch and delete a slice."""
  archive, copy, create, code, state, delete = dry_run(*RUN, f"--topology={topology}", "--spot")[0]
  head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
  assert archive[:2] == ["git", "archive"] and archive[-1] == head.stdout.strip()
  assert copy[-1].startswith("gs://my-bucket/runs/qwen 7b/launch/qwen-7b-")
  queue = ["gcloud", "compute", "tpus", "queued-resources"]
  chosen = {f"--accelerator-type={accelerator}", f"--runtime-version={runtime}", "--spot"}
  assert create[:6] == [*queue, "create", "qwen-7b"] and {*PLACE[:2], *chosen} <= {*create}
  assert code[:3] == ["gcloud", "storage", "cat"] and state[:6] == [*queue, "describe", "qwen-7b"]
  assert delete[:6] == [*queue, "delete", "qwen-7b"]
  assert {*PLACE[:2], "--force", "--quiet"} <= {*delete}  # nobody is there to answer
  assert dry_run(*PLACE, "--delete")[0] == [delete]


def test_values_reach_the_workers_as_they_were_given(tmp_path):
  """Workers get spaces, quotes and `$(...)` in overrides and paths as plain text."""
  job = dry_run(*RUN)[1]
  shown = job[: job.index("# Runs as root")] + 'printf "%s\\n" "${arguments[@]}" "${copies[@]}"'
  write(tmp_path, job=shown)
  assert bash(tmp_path / "job").stdout.splitlines() == [*ARGUMENTS, *OVERRIDES, COPY]


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--name=a;rm -rf ~", "--name=a;rm -rf ~: expected a-z, 0-9 and -"),
    ("--workdir=runs/a", "gs://BUCKET/DIRECTORY, which outlives the slice"),
    ("--copy=gs://my-bucket/x=/etc", "--copy=gs://my-bucket/x=/etc: expected gs://BUCKET/DIR=DIR"),
    ("--copy=gs://my-bucket/d=2026/x=/etc", "x=/etc: expected gs://BUCKET/DIR=DIR"),
    ("--config=configs/none.py", "--config=configs/none.py: not a file of commit"),
    ("--config=", "no --config; --help lists the flags"),
    ("--topology=v5e:4x5", "v5e or v6e and one of 1x1|2x2|2x4|4x4|4x8|8x8|8x16|16x16"),
    ("--topology=v5p:8x4x4", "or ascending multiples of 4, as in 4x4x8"),
    ("--topology=v5p:08x8x8", "or ascending multiples of 4"),
    ("--topology=v5p:4x4x6", "or ascending multiples of 4, as in 4x4x8"),
  ],
)
def test_bad_input_is_refused(tmp_path, flag, message):
  """Arguments that would lose results, or fail on a running slice, are refused before it starts."""
  done = bash(SCRIPT, *RUN, flag, "--dry_run")
  assert done.returncode == 2 and done.stdout == ""
  assert done.stderr.startswith("launch_tpu.sh: ") and message in done.stderr


def test_uncommitted_changes_are_not_launched(tmp_path):
  """A launch with uncommitted changes is refused; a dry run prints the same warning."""
  git = '#!/bin/bash\n[ "$1" = status ] && echo "?? new" || exec /usr/bin/git "$@"'
  write(tmp_path, git=git, gcloud="#!/bin/bash\nexit 1")
  done = bash(SCRIPT, *RUN, "--commit=", programs=tmp_path)
  assert done.returncode == 2 and done.stdout == "" and "uncommitted changes" in done.stderr
  flags = (*RUN, "--commit=", "--dry_run")
  dry = bash(SCRIPT, *flags, programs=tmp_path, TMPDIR=str(tmp_path))
  assert dry.returncode == 0 and "queued-resources create" in dry.stdout
  assert dry.stderr.startswith(done.stderr)


@pytest.mark.parametrize(
  ("names", "codes", "states", "code", "calls"),
  [
    ("", "0\n", "", 0, "create delete"),
    ("", "\n1\n", "ACTIVE\n", 1, "create delete"),
    ("", "\n\n0\n", "SUSPENDED\nACTIVE\n", 0, "create delete create delete"),
    ("", "\n", "FAILED\n", 2, "create delete"),
    ("", "\n", "\n", 2, "create delete"),  # it is gone: somebody else deleted it
    ("a/qwen-7b", "0\n", "", 2, ""),  # another run's slice is left alone
    ("a/other-qwen-7b", "75\n", "", 75, "create delete"),
    ("refuse", "", "", 2, "create delete"),  # a slice that was created in part is deleted
  ],
)
def test_no_slice_is_left_behind(tmp_path, names, codes, states, code, calls):
  """The slice is deleted however the run ends; after a preemption it is created again."""
  write(tmp_path, gcloud=GCLOUD, sleep=TRUE, names=names, codes=codes, states=states)
  done = bash(SCRIPT, *RUN, programs=tmp_path)
  assert done.returncode == code, done.stderr
  requests = re.findall(r"queued-resources (create|delete) ", (tmp_path / "calls").read_text())
  assert " ".join(requests) == calls


SLOW_TO_DELETE = """#!/bin/bash
echo "$@" >> "$FAKE/calls"
case " $* " in
  *" cat "*) exit 1 ;;
  *" describe "*) echo ACTIVE ;;
  *" delete "*) echo > "$FAKE/deleting"; /bin/sleep 3; echo deleted >> "$FAKE/calls" ;;
esac
"""


@pytest.mark.parametrize("read", [True, False])
def test_interrupts_do_not_stop_the_deletion(tmp_path, read):
  """Ctrl-C during the deletion that an earlier Ctrl-C began leaves no slice behind.

  Nor does it if Ctrl-C also ended the reader of the output, as in `| tee log`.
  """
  write(tmp_path, gcloud=SLOW_TO_DELETE, calls="")
  env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAKE": str(tmp_path)}
  command = ["bash", str(SCRIPT), *RUN]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  launcher = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
  for seen in (lambda: " cat " in (tmp_path / "calls").read_text(), (tmp_path / "deleting").exists):
    while launcher.poll() is None and not seen():
      time.sleep(0.05)
    if not read:
      launcher.stdout.close()
      launcher.stderr.close()
    os.killpg(launcher.pid, signal.SIGINT)
  if read:
    assert "deleting qwen-7b" in launcher.communicate(timeout=60)[1]
  assert launcher.wait(timeout=60) == 130 or not read
  assert (tmp_path / "calls").read_text().endswith("deleted\n")


@pytest.mark.parametrize(
  ("codes", "last"), [([0], "0"), ([75, 134, 1], "1"), ([75] * 20, "75"), ([], "75")]
)
def test_workers_restart_and_report_the_exit_code(tmp_path, codes, last):
  """The job trains again after a preemption, at most 20 times, and not after an error.

  Where `codes` is empty, the installation fails each time.
  """
  job = dry_run(*RUN)[1].replace("/opt", str(tmp_path)).replace("/var/log", str(tmp_path))
  write(tmp_path, job=job, codes="".join(f"{code}\n" for code in codes), sleep=TRUE, python3=TRUE)
  write(tmp_path, tar=TRUE if codes else "#!/bin/bash\nexit 1\n")
  write(tmp_path, gcloud='#!/bin/bash\n[[ $* = *" - "*/exit ]] && cat > $FAKE/exit\ntrue')
  python = tmp_path / "prm_jax/.venv/bin"
  python.mkdir(parents=True)
  next_code = "code=$(head -n 1 $FAKE/codes); sed -i 1d $FAKE/codes; exit $code"
  write(python, python=f"#!/bin/bash\n{next_code}")
  assert bash(tmp_path / "job", "service", programs=tmp_path).returncode == 0
  assert (tmp_path / "exit").read_text() == f"{last}\n"
  assert (tmp_path / "codes").read_text() == ""


def test_workers_restart_on_the_documented_exit_codes():
  """Workers restart on exactly the codes that docs/checkpoints.md says to restart on."""
  text = (ROOT / "docs" / "checkpoints.md").read_text()
  codes = dict(re.findall(r"^\| (\d+) \| .* \| (.*) \|$", text, re.MULTILINE))
  again = [code for code, answer in codes.items() if answer == "yes"]
  assert f"case $code in {' | '.join(again)})" in SCRIPT.read_text()
  signals = {128 + number for number in (signal.SIGABRT, signal.SIGKILL, signal.SIGTERM)}
  assert {*map(int, again)} == signals | {exits.AGAIN}


def test_the_image_has_every_part_of_the_package():
  """The Dockerfile copies files that exist and are not ignored, and installs extras of setup.py."""
  lines = (ROOT / "Dockerfile").read_text().splitlines()
  copied = [w for line in lines if line.startswith("COPY ") for w in line.split()[1:-1]]
  assert {"setup.py", "README.md", "prm_jax", "scripts", "configs"} <= {*copied}
  ignore = (ROOT / ".dockerignore").read_text().splitlines()
  assert all((ROOT / name).exists() and f"!{name}" in ignore for name in copied)
  text = (ROOT / "Dockerfile").read_text()
  assert text.index("COPY scripts") < text.index("pip install"), "the package contains them"
  extras = re.findall(r'^    "(\w+)": \[?', (ROOT / "setup.py").read_text(), re.MULTILINE)
  for path in (ROOT / "Dockerfile", SCRIPT):
    (installed,) = re.findall(r"'\.\[([\w,]+)\]'", path.read_text())
    assert {*installed.split(",")} <= {*extras}
