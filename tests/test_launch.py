"""scripts/launch_tpu.sh, the image and docs/tpu.md.  No cloud is needed or asked."""

import ast
import os
import pathlib
import re
import shlex
import signal
import subprocess

import conftest
import pytest
from conftest import ROOT

from prm_jax.runtime import distributed, preemption

SCRIPT = ROOT / "scripts" / "launch_tpu.sh"
PLACE = ("--project=my-project", "--zone=us-east5-a", "--name=qwen-7b")
RUN = (
  *PLACE,
  "--topology=v5p:2x4x4",
  "--config=configs/prm800k_qwen2.5_math_7b.py",
  "--workdir=gs://my-bucket/runs/qwen 7b",
  "--copy=gs://my-bucket/data/prm800k=data/prm800k",
  "--commit=HEAD",
)
OVERRIDES = ("--config.data.separator=a 'b' $(c)", "--config.train.steps=7")
# Records its calls; `list` prints the file "names", `describe` the next line of "states", and `cat`
# that of "told", and fails where it is empty.
GCLOUD = """#!/bin/bash
echo "$@" >> "$FAKE/calls"
case " $* " in
  *" list "*) cat "$FAKE/names" ;;
  *" describe "*) head -n 1 "$FAKE/states"; sed -i 1d "$FAKE/states" ;;
  *" cat "*) grep -m 1 . <(head -n 1 "$FAKE/told"); code=$?; sed -i 1d "$FAKE/told"; exit $code ;;
  *" create "*) ! grep -q refuse "$FAKE/names" ;;
esac
"""


pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a launch is of a commit")


def launch(*flags, script=SCRIPT, **environment):
  command = ["bash", str(script), *flags]
  return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def dry_run(*flags):
  """The printed commands, each as its words, and the startup script of the workers."""
  done = launch(*flags, "--dry_run", "--", *OVERRIDES)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  job = "\n".join(line.removeprefix("#   ") for line in lines if line.startswith("#   "))
  return [shlex.split(line) for line in lines if not line.startswith("#   ")], job


def test_scripts_are_bash():
  """Every script parses."""
  for path in (ROOT / "scripts").glob("*.sh"):
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize(
  ("topology", "accelerator", "runtime"),
  [
    ("v5e:8x8", "v5litepod-64", "v2-alpha-tpuv5-lite"),
    ("v5p:4x4x4", "v5p-128", "v2-alpha-tpuv5"),
    ("v6e:4x8", "v6e-32", "v2-alpha-tpuv6e"),
  ],
)
def test_a_dry_run_prints_every_command(topology, accelerator, runtime):
  """The commit goes to the bucket; the slice is asked for, watched and given back.

  gcloud counts chips, of v5p cores, where compile_for_tpu.py names the shape.
  """
  archive, copy, create, told, state, delete = dry_run(*RUN, f"--topology={topology}", "--spot")[0]
  head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
  assert archive[:2] == ["git", "archive"] and archive[-1] == head.stdout.strip()
  assert copy[-1].startswith("gs://my-bucket/runs/qwen 7b/launch/qwen-7b-")
  queue = ["gcloud", "compute", "tpus", "queued-resources"]
  assert create[:6] == [*queue, "create", "qwen-7b"]
  chosen = {f"--accelerator-type={accelerator}", f"--runtime-version={runtime}", "--spot"}
  assert {*PLACE[:2], *chosen} <= {*create}
  assert told[:3] == ["gcloud", "storage", "cat"] and state[:6] == [*queue, "describe", "qwen-7b"]
  assert delete[:6] == [*queue, "delete", "qwen-7b"]
  assert {*PLACE[:2], "--force", "--quiet"} <= {*delete}  # nobody is there to answer
  assert dry_run(*PLACE, "--delete")[0] == [delete]


def test_values_reach_the_workers_as_they_were_given(tmp_path):
  """Spaces, quotes and `$(...)` in overrides and paths are text on the workers too."""
  _, job = dry_run(*RUN)
  (tmp_path / "job.sh").write_text(job)
  subprocess.run(["bash", "-n", str(tmp_path / "job.sh")], check=True)
  shown = job[: job.index("# Runs as root")] + 'printf "%s\\n" "${arguments[@]}" "${copies[@]}"'
  done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
  assert done.stdout.splitlines() == [
    "--config=configs/prm800k_qwen2.5_math_7b.py",
    "--workdir=gs://my-bucket/runs/qwen 7b",
    *OVERRIDES,
    "gs://my-bucket/data/prm800k=data/prm800k",
  ]


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--name=a;rm -rf ~", "--name=a;rm -rf ~: expected a-z, 0-9 and -"),
    ("--workdir=runs/a", "gs://BUCKET/DIRECTORY, which outlives the slice"),
    ("--copy=gs://my-bucket/x=/etc", "unknown argument --copy=gs://my-bucket/x=/etc"),
    ("--config=configs/none.py", "--config=configs/none.py: not in commit"),
  ],
)
def test_bad_input_is_refused(flag, message):
  """What would lose the results, or fail once the slice is paid for, is refused at once."""
  done = launch(*RUN, flag, "--dry_run")
  assert done.returncode == 2 and done.stdout == ""
  assert done.stderr.startswith("launch_tpu.sh: ") and message in done.stderr


def test_uncommitted_changes_are_refused(tmp_path):
  """A launch is of a commit; changes beside it would silently not be trained."""
  subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", tmp_path], check=True)
  (tmp_path / "new").touch()
  done = launch(*RUN, "--commit=", script=tmp_path / "scripts" / "launch_tpu.sh")
  assert done.returncode == 2 and "uncommitted changes" in done.stderr


@pytest.mark.parametrize(
  ("there", "told", "states", "code", "calls"),
  [
    ("", ["0"], [], 0, "create delete"),
    ("", ["", "1"], ["ACTIVE"], 1, "create delete"),
    ("", ["", "", "0"], ["SUSPENDED", "ACTIVE"], 0, "create delete create delete"),
    ("", [""], ["FAILED"], 2, "create delete"),
    ("a/qwen-7b", ["0"], [], 2, ""),  # another run's slice is left alone
    ("a/other-qwen-7b", ["75"], [], 75, "create delete"),
    ("refuse", [], [], 2, "create delete"),  # what may be there of it is deleted
  ],
)
def test_no_slice_is_left_behind(tmp_path, there, told, states, code, calls):
  """Whatever ends the watch, the slice is given back; after a preemption it is asked for again."""
  files = {"gcloud": GCLOUD, "sleep": "#!/bin/bash\n", "names": there}
  files |= {"told": "\n".join(told) + "\n", "states": "\n".join(states) + "\n"}
  for name, text in files.items():
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  done = launch(*RUN, FAKE=str(tmp_path), PATH=f"{tmp_path}:{os.environ['PATH']}")
  assert done.returncode == code, done.stderr
  made = re.findall(r"queued-resources (create|delete) ", (tmp_path / "calls").read_text())
  assert " ".join(made) == calls


@pytest.mark.parametrize(
  ("codes", "told"), [([0], "0"), ([75, 134, 1], "1"), ([75] * 20, "75"), ([], "75")]
)
def test_workers_restart_and_tell_the_end(tmp_path, codes, told):
  """The job trains again after a preemption, at most 20 times, and not after an error.

  Without a code the installation fails each time.
  """
  job = dry_run(*RUN)[1].replace("/opt", str(tmp_path)).replace("/var/log", str(tmp_path))
  train = f"#!/bin/bash\ncode=$(head -n 1 {tmp_path}/codes); sed -i 1d {tmp_path}/codes; exit $code"
  files = {"job.sh": job, "codes": "".join(f"{code}\n" for code in codes), "train": train}
  files |= {"sleep": "#!/bin/bash\n", "tar": "#!/bin/bash\n", "python3": "#!/bin/bash\n"}
  files["gcloud"] = f'#!/bin/bash\n[[ $* = *" - "*/exit ]] && cat > {tmp_path}/exit\ntrue'
  for name, text in files.items():
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  if codes:
    (tmp_path / "prm_jax/.venv/bin").mkdir(parents=True)
    (tmp_path / "prm_jax/.venv/bin/python").symlink_to(tmp_path / "train")
  else:
    (tmp_path / "tar").write_text("#!/bin/bash\nexit 1\n")
  environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
  subprocess.run(["bash", str(tmp_path / "job.sh"), "service"], check=True, env=environment)
  assert (tmp_path / "exit").read_text() == f"{told}\n"
  assert (tmp_path / "codes").read_text() == ""


def test_exit_codes_are_the_documented_ones():
  """Workers restart on the codes that docs/checkpoints.md says to restart on, and on no other."""
  text = (ROOT / "docs" / "checkpoints.md").read_text()
  codes = dict(re.findall(r"^\| (\d+) \| .* \| (.*) \|$", text, re.MULTILINE))
  again = [code for code, answer in codes.items() if answer == "yes"]
  assert f"case $code in {' | '.join(again)})" in SCRIPT.read_text()
  signals = (signal.SIGABRT, signal.SIGKILL, signal.SIGTERM)
  own = {preemption.EXIT_CODE, distributed.LOST}
  assert {*map(int, again)} == own | {128 + number for number in signals}
  # XPK restarts on 127 to 255 without being told
  assert "--restart-on-exit-codes=75" in (ROOT / "docs" / "tpu.md").read_text()


def test_the_image():
  """What the Dockerfile copies is in the repository and not ignored; its extras are setup.py's."""
  lines = (ROOT / "Dockerfile").read_text().splitlines()
  copied = [w for line in lines if line.startswith("COPY ") for w in line.split()[1:-1]]
  assert {"setup.py", "README.md", "prm_jax", "scripts", "configs"} <= {*copied}
  ignore = (ROOT / ".dockerignore").read_text().splitlines()
  assert all((ROOT / name).exists() and f"!{name}" in ignore for name in copied)
  setup = (ROOT / "setup.py").read_text()
  extras = ast.literal_eval(re.search(r"extras_require=(\{.*?\n  \})", setup, re.DOTALL).group(1))
  for path in (ROOT / "Dockerfile", SCRIPT):
    (asked,) = re.findall(r"'\.\[([\w,]+)\]'", path.read_text())
    assert {*asked.split(",")} <= {*extras}


def test_documented_flags_exist():
  """Every flag that docs/tpu.md gives to a script is one that its --help lists."""
  text = (ROOT / "docs" / "tpu.md").read_text().replace("\\\n", " ")
  commands = re.findall(r"^ *(?:python|bash) scripts/(\S+)(.*?)(?:  #.*)?$", text, re.MULTILINE)
  assert {"prepare_data.py", "compile_for_tpu.py", "launch_tpu.sh"} <= {
    name for name, _ in commands
  }
  known = {}
  for name, flags in commands:
    if name not in known:
      path = pathlib.Path(ROOT, "scripts", name)
      said = (
        path.read_text() if path.suffix == ".sh" else conftest.run_script(name, "--help").stdout
      )
      known[name] = {*re.findall(r"--[a-z_]+(?:\.[a-z_0-9]+)*", said)}
    used = {word.partition("=")[0] for word in shlex.split(flags) if word.startswith("--")}
    assert used - {"--"} <= known[name], name


def test_documented_costs_are_the_configs_own():
  """The chip-hours and slices of docs/tpu.md are those of the configs' docstrings."""
  text = (ROOT / "docs" / "tpu.md").read_text()
  rows = re.findall(r"^\| `(\S+)` \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
  assert len(rows) >= 4
  for name, topology, hours in rows:
    docstring = ast.get_docstring(ast.parse((ROOT / "configs" / f"{name}.py").read_text()))
    assert f"({hours} chip-hours)" in docstring and f"--topology={topology}" in docstring
