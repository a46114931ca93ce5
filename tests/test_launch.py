"""scripts/launch_tpu.sh, the worker's script and the image: no cloud is needed or asked."""

import ast
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import conftest
import pytest

from prm_jax.runtime import distributed, preemption

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Records its call as a shell would read it; answers with the next line of the file that is named
# as one of its arguments, the last line again and again; `503` is a failure.
GCLOUD = """#!/bin/bash
{ printf '%q ' "${0##*/}" "$@"; echo; } >> "$RECORD"
for answers in "$ANSWERS"/*; do
  case " $* " in *" ${answers##*/} "*)
    answer=$(head -n 1 "$answers")
    if [ "$(wc -l < "$answers")" -gt 1 ]; then sed -i 1d "$answers"; fi
    if [ "$answer" = 503 ]; then exit 1; fi
    echo "$answer"
  esac
done
"""


class Launcher:
  """The script with stand-ins of the cloud's commands, which record how they were called."""

  def __init__(self, folder):
    self.bin = folder / "bin"
    self.bin.mkdir()
    self.record = folder / "record"
    for name in ("gcloud", "xpk"):
      (self.bin / name).write_text(GCLOUD)
      (self.bin / name).chmod(0o755)
    self.cache = folder / "cache"
    self.answers = folder / "answers"
    self.answers.mkdir()

  def __call__(self, *flags, **answers):
    self.record.write_text("")
    for argument, lines in answers.items():
      (self.answers / argument).write_text("".join(f"{line}\n" for line in lines))
    return subprocess.run(
      ["bash", str(ROOT / "scripts" / "launch_tpu.sh"), *flags],
      capture_output=True,
      text=True,
      timeout=300,
      env={
        "PATH": f"{self.bin}:{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/"),
        "RECORD": str(self.record),
        "ANSWERS": str(self.answers),
        "XDG_CACHE_HOME": str(self.cache),
        "WATCH_SECONDS": "0",
      },
    )

  def printed(self, *flags):
    """The commands of a dry run, which runs none of them."""
    done = self(*flags, "--dry_run") if "--" not in flags else self(*before("--dry_run", flags))
    assert done.returncode == 0, done.stderr
    assert self.recorded() == []
    lines = done.stdout.splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]

  def recorded(self):
    return [shlex.split(line) for line in self.record.read_text().splitlines()]


def before(flag, flags):
  """`flags` with one more, ahead of the overrides."""
  at = flags.index("--")
  return *flags[:at], flag, *flags[at:]


@pytest.fixture
def launcher(tmp_path):
  return Launcher(tmp_path)


@pytest.fixture(scope="module")
def commit():
  done = subprocess.run(
    ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
  )
  if done.returncode:
    pytest.skip("this is not a git checkout, and a launch is of a commit")
  return done.stdout.strip()


def documented_codes():
  """What docs/checkpoints.md says of each exit code: whether to start again."""
  text = (ROOT / "docs" / "checkpoints.md").read_text()
  return dict(re.findall(r"^\| (\d+) \| .* \| (.*) \|$", text, re.MULTILINE))


RESTARTED = [code for code, again in documented_codes().items() if again == "yes"]
PLACE = ("--project=my-project", "--zone=us-east5-a")
RUN = (
  *PLACE,
  "--name=qwen-7b",
  "--topology=v5p:2x4x4",
  "--config=configs/prm800k_qwen2.5_math_7b.py",
  "--workdir=gs://my-bucket/runs/qwen 7b",
  "--copy=gs://my-bucket/data/prm800k=data/prm800k",
  "--commit=HEAD",
)
CLUSTER = ("--cluster=tpus", "--image=us-docker.pkg.dev/my-project/images/prm_jax")
CREATE = ("gcloud", "compute", "tpus", "queued-resources", "create")
OVERRIDES = ("--", "--config.data.separator=a 'b' $(c)", "--config.train.steps=7")


def command(commands, *start):
  """The one command that begins with `start`."""
  found = [c for c in commands if c[: len(start)] == list(start)]
  assert len(found) == 1, commands
  return found[0]


def verbs(commands):
  """What each of gcloud's commands does: create, cp ..."""
  return [c[4] if c[1] == "compute" else c[2] for c in commands]


def value(arguments, flag):
  return next(a.removeprefix(f"{flag}=") for a in arguments if a.startswith(f"{flag}="))


def test_tpu_vms(launcher, commit):
  """A slice of the compiled shape is asked for; its workers train the commit by themselves."""
  commands = launcher.printed(*RUN, "--spot", *OVERRIDES)
  archive = value(command(commands, "git", "archive"), "--output")
  assert commands[0][-1] == commit and commit in archive
  assert command(commands, "gcloud", "storage", "cp", archive)[-1] == (
    f"gs://my-bucket/runs/qwen 7b/launch/source-{commit}.tar.gz"
  )
  create = command(commands, *CREATE, "qwen-7b")
  assert {*PLACE, "--spot", "--type=v5p", "--topology=2x4x4", "--node-id=qwen-7b"} <= set(create)
  assert "--runtime-version=v2-alpha-tpuv5" in create
  assert value(create, "--metadata-from-file").startswith("startup-script=")
  assert "--spot" not in command(launcher.printed(*RUN), *CREATE)


def test_the_startup_script(launcher, commit):
  """It is bash, fetches the commit, and hands the job on with every value as it was given."""
  assert launcher(*RUN, *OVERRIDES).returncode == 0
  path = launcher.cache / "prm_jax" / "launch" / "qwen-7b-startup.sh"
  subprocess.run(["bash", "-n", str(path)], check=True)
  text = path.read_text()
  assert f"source-{commit}.tar.gz" in text and f"RESTART_CODES={','.join(RESTARTED)}" in text
  job = shlex.split(shlex.split(text[text.index("tpu_worker.sh install") :])[2])
  assert job == [
    "bash",
    "scripts/tpu_worker.sh",
    "run",
    "--copy=gs://my-bucket/data/prm800k=data/prm800k",
    "--",
    "--config=configs/prm800k_qwen2.5_math_7b.py",
    "--workdir=gs://my-bucket/runs/qwen 7b",
    *OVERRIDES[1:],
  ]


@pytest.mark.parametrize(
  ("topology", "type_", "runtime", "xpk"),
  [
    ("v5e:8x8", "v5litepod", "v2-alpha-tpuv5-lite", "v5litepod-8x8"),
    ("v5p:4x4x4", "v5p", "v2-alpha-tpuv5", "v5p-4x4x4"),
    ("v6e:8x8", "v6e", "v2-alpha-tpuv6e", "v6e-8x8"),
  ],
)
def test_generations(launcher, commit, topology, type_, runtime, xpk):
  """The notation of compile_for_tpu.py becomes that of gcloud and of XPK."""
  flags = [f for f in RUN if not f.startswith("--topology")]
  create = command(launcher.printed(*flags, f"--topology={topology}"), *CREATE)
  assert {f"--type={type_}", f"--runtime-version={runtime}"} <= set(create)
  create = launcher.printed(*flags, f"--topology={topology}", *CLUSTER)[-1]
  assert value(create, "--tpu-type") == xpk


def test_gke(launcher, commit):
  """XPK starts an image of the commit, restarts it after a preemption, and signals reach it."""
  commands = launcher.printed(*RUN, *CLUSTER, *OVERRIDES)
  image = f"us-docker.pkg.dev/my-project/images/prm_jax:{commit}"
  build = command(commands, "gcloud", "builds", "submit")
  assert build[3] == value(commands[0], "--output") and f"--tag={image}" in build
  create = command(commands, "xpk", "workload", "create")
  assert {*PLACE, "--cluster=tpus", "--workload=qwen-7b", f"--docker-image={image}"} <= set(create)
  assert value(create, "--restart-on-exit-codes") == ",".join(RESTARTED)
  words = shlex.split(value(create, "--command"))
  assert words[:4] == ["exec", "bash", "scripts/tpu_worker.sh", "run"]
  assert words[-2:] == list(OVERRIDES[1:])


def test_exit_codes_are_the_documented_ones():
  """What the code exits with when it is to be started again stands in the table as such."""
  codes = {preemption.EXIT_CODE, distributed.LOST}
  codes |= {128 + number for number in (signal.SIGABRT, signal.SIGKILL, signal.SIGTERM)}
  assert {*map(int, RESTARTED)} == codes
  assert {code for code in documented_codes() if code not in RESTARTED} == {"0", "1", "2"}
  loop = f"case $? in {'|'.join(RESTARTED)})"
  assert loop in (ROOT / "docs" / "checkpoints.md").read_text()


def test_several_slices(launcher, commit):
  """More slices are one request of as many nodes, and each has its logs."""
  create = command(launcher.printed(*RUN, "--slices=2"), *CREATE)
  assert {"--node-count=2", "--node-prefix=qwen-7b"} <= set(create)
  nodes = [c[5] for c in launcher.printed(*RUN, "--slices=2", "--logs")[1:]]
  assert nodes == ["qwen-7b-0", "qwen-7b-1"]


@pytest.mark.parametrize("road", [(), CLUSTER[:1]])
def test_logs_and_delete(launcher, road):
  """A name and a place are enough to read the logs of every worker, and to give the slice back."""
  flags = (*PLACE, "--name=qwen-7b", *road)
  logs, delete = launcher.printed(*flags, "--logs"), launcher.printed(*flags, "--delete")
  if road:
    assert 'jobset-name"="qwen-7b"' in command(logs, "gcloud", "logging", "read")[3]
    assert "--workload=qwen-7b" in command(delete, "xpk", "workload", "delete")
  else:
    ssh = command(logs, "gcloud", "compute", "tpus", "tpu-vm", "ssh", "qwen-7b")
    assert "--worker=all" in ssh and "--command=tail -n 50 /var/log/prm_jax.log" in ssh
    (delete,) = delete
    assert delete[:6] == ["gcloud", "compute", "tpus", "queued-resources", "delete", "qwen-7b"]
    assert "--quiet" in delete  # nobody is there to answer


@pytest.mark.parametrize("flags", [RUN, (*RUN, *CLUSTER), (*RUN, "--logs"), (*RUN, "--delete")])
def test_a_dry_run_prints_what_is_run(launcher, commit, flags):
  """A dry run's commands are, word for word, those that are run without it."""
  printed = launcher.printed(*flags, *OVERRIDES)
  done = launcher(*flags, *OVERRIDES)
  assert done.returncode == 0, done.stderr
  assert launcher.recorded() == [c for c in printed if c[0] != "git"]
  if printed[0][0] == "git":
    assert pathlib.Path(value(printed[0], "--output")).stat().st_size > 0


def test_a_dry_run_prints_what_a_watch_runs(launcher, commit):
  """Also what --watch runs later, after a preemption, a failure and the end, is printed before."""
  printed = launcher.printed(*RUN, "--spot", "--watch")
  states = {"cat": ["", "running", "0"], "describe": ["SUSPENDED"], "delete": ["503", "done"]}
  done = launcher(*RUN, "--spot", "--watch", **states, list=["qwen-7b"])
  assert done.returncode == 0, done.stderr
  assert {*map(tuple, launcher.recorded())} == {tuple(c) for c in printed if c[0] != "git"}
  watched = ["cat", "describe", "delete", "create", "delete", "list"]
  assert verbs(printed[1:]) == ["cat", "cp", "create", "cp", *watched]


def test_watch(launcher, commit):
  """A slice that was taken away is asked for again; at the end it is given back."""
  states = {"cat": ["1"] + ["running"] * 3 + ["0"], "describe": ["ACTIVE", "SUSPENDED", "ACTIVE"]}
  done = launcher(*RUN, "--spot", "--watch", **states)
  assert done.returncode == 0, done.stderr
  words = verbs(launcher.recorded())
  assert words[:4] == ["cat", "cp", "create", "cp"]
  look = ["cat", "describe"]
  assert words[4:] == [*look, *look, "delete", "create", *look, "cat", "delete"]
  assert launcher(*RUN, "--watch", cat=["1"]).returncode == 1
  assert launcher.recorded()[-1][4] == "delete"


def test_watch_outlives_failures(launcher, commit):
  """A call that fails is made again until it is done; nothing is left behind that is paid for."""
  listed = "projects/p/locations/z/queuedResources/"
  answers = {
    "cat": ["", "503", "running", "1"],
    "describe": ["SUSPENDED"],
    # After the preemption: it failed, then the connection was lost, then it has worked, whatever
    # the call says; the same at the end.
    "delete": ["503"] * 2 + ["503"] * 2 + ["done"],
    "create": ["done", "503", "503"],
    "list": [listed + "qwen-7b", listed + "other-qwen-7b"]  # after the two of delete
    + ["503", listed + "qwen-7b"]  # after the two of create
    + ["503", "503"],  # at the end
  }
  done = launcher(*RUN, "--watch", **answers)
  assert done.returncode == 1, done.stderr
  again = ["delete", "list"] * 2 + ["create", "list"] * 2
  end = ["delete", "list"] * 2 + ["delete"]
  words = verbs(launcher.recorded())
  assert words == ["cat", "cp", "create", "cp", "cat", "cat", "describe", *again, "cat", *end]
  for what, times in (("delete", 4), ("request", 2)):
    line = f"launch_tpu.sh: {what} failed for qwen-7b; trying again in 0 seconds"
    assert done.stderr.count(line) == times


def test_a_request_that_is_refused_leaves_no_run(launcher, commit):
  """Only a run that was asked for is recorded as running: the next try needs no --force."""
  assert launcher(*RUN, create=["503"]).returncode == 1
  assert verbs(launcher.recorded()) == ["cat", "cp", "create"]


@pytest.mark.parametrize("road", [(), CLUSTER])
def test_a_second_run_in_a_directory(launcher, commit, road):
  """A directory in which a run goes on is refused and left alone, unless --force is given."""
  done = launcher(*RUN, *road, cat=["running"])
  assert done.returncode == 2 and "--force" in done.stderr
  assert "gs://my-bucket/runs/qwen 7b has not ended" in done.stderr
  assert verbs(launcher.recorded()) == ["cat"]
  done = launcher(*RUN, *road, "--force")
  assert done.returncode == 0 and len(launcher.recorded()) > 1, done.stderr
  assert launcher(*RUN, *road, cat=["0"]).returncode == 0


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--name=a;rm -rf ~", "--name=a;rm -rf ~: expected a word"),
    ("--name=$(id)", "expected a word"),
    ("--name=", "expected a word"),
    ("--project=p`id`", "expected the ID of a Google Cloud project"),
    ("--zone=us-east5", "expected a zone, such as us-east5-a"),
    ("--topology=v5p-64", "expected v5e:AxB, v5p:AxBxC or v6e:AxB"),
    ("--topology=v5e:4x4x4", "expected v5e:AxB"),
    ("--workdir=runs/a", "expected gs://BUCKET/DIRECTORY"),
    ("--workdir=gs://b/$(id)", "expected gs://BUCKET/DIRECTORY"),
    ("--copy=gs://my-bucket/x", "expected gs://BUCKET/DIRECTORY=DIRECTORY"),
    ("--copy=gs://my-bucket/x=a/../../etc", "expected a folder below the repository"),
    ("--config=configs/none.py", "--config=configs/none.py: not in commit"),
    ("--commit=none", "--commit=none: no such commit"),
    ("--slices=0", "expected a number of slices"),
    ("--cluster=C", "expected the name of a cluster"),
    ("--steps=3", "unknown argument --steps=3"),
  ],
)
def test_bad_input_is_refused(launcher, commit, flag, message):
  """What a shell elsewhere could misread, or the cloud would refuse later, is refused at once."""
  done = launcher(*RUN, flag)
  assert done.returncode == 2
  assert message in done.stderr and done.stderr.startswith("launch_tpu.sh: ")
  assert launcher.recorded() == []


def test_what_belongs_elsewhere_is_refused(launcher, commit):
  """An option that would do nothing on a cluster says where it belongs."""
  assert "xpk cluster create --spot" in launcher(*RUN, *CLUSTER, "--spot").stderr
  assert "restarts the run by itself" in launcher(*RUN, *CLUSTER, "--watch").stderr


@pytest.fixture
def worker(tmp_path):
  """A checkout with a train.py that says how it was called, and waits for SIGTERM if told to."""
  (tmp_path / "checkout" / "scripts").mkdir(parents=True)
  shutil.copy(ROOT / "scripts" / "tpu_worker.sh", tmp_path / "checkout" / "scripts")
  (tmp_path / "checkout" / "scripts" / "train.py").write_text(
    "import json, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    "print(json.dumps(sys.argv[1:]), flush=True)\n"
    "if '--wait' in sys.argv: time.sleep(300)\n"
  )

  def start(*flags):
    return subprocess.Popen(
      ["bash", str(tmp_path / "checkout" / "scripts" / "tpu_worker.sh"), "run", *flags],
      stdout=subprocess.PIPE,
      text=True,
      env={"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"},
    )

  return tmp_path / "checkout", start


def test_a_worker_copies_and_trains(tmp_path, worker):
  """What a run needs is copied whole, once, and train.py gets its arguments as they were given."""
  checkout, start = worker
  source = tmp_path / "bucket" / "prm800k"
  (source / "all" / "1.0.0").mkdir(parents=True)
  (source / "manifest.json").write_text("{}")
  (source / "all" / "1.0.0" / "x.array_record").write_bytes(b"\0\1")
  flags = (f"--copy={source}=data/prm800k", "--", "--config=c.py", "--workdir=a b")
  for _ in range(2):
    process = start(*flags)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert json.loads(out) == ["--config=c.py", "--workdir=a b"]
    (source / "manifest.json").write_text("changed")
  assert (checkout / "data" / "prm800k" / "manifest.json").read_text() == "{}"
  copied = checkout / "data" / "prm800k" / "all" / "1.0.0" / "x.array_record"
  assert copied.read_bytes() == b"\0\1"
  assert not (checkout / "data" / "prm800k.incomplete").exists()


def test_a_preemption_reaches_the_training(worker):
  """SIGTERM to the worker's process is train.py's, and its exit code is the process's."""
  _, start = worker
  process = start("--", "--wait")
  process.stdout.readline()  # it has begun
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=300)
  assert process.returncode == 75


@pytest.fixture
def machine(tmp_path, worker, launcher):
  """A TPU VM as the worker's script sees it: its commands are stand-ins that record their calls."""
  checkout, _ = worker
  for name in ("curl", "uv", "systemctl"):
    shutil.copy(launcher.bin / "gcloud", launcher.bin / name)
  (checkout / ".venv").mkdir()  # as `uv venv` would
  (tmp_path / "log").write_text("a line")

  def call(*arguments, **environment):
    launcher.record.write_text("")
    subprocess.run(
      ["bash", str(checkout / "scripts" / "tpu_worker.sh"), *arguments],
      check=True,
      timeout=300,
      env={
        "PATH": f"{launcher.bin}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "RECORD": str(launcher.record),
        "ANSWERS": str(launcher.answers),
        "UNITS": str(tmp_path),
        "LOG": str(tmp_path / "log"),
        "RESTART_CODES": ",".join(RESTARTED),
        "LAUNCH": "gs://my-bucket/runs/qwen 7b/launch",
      }
      | environment,
    )
    return launcher.recorded()

  return checkout, call


def test_a_worker_becomes_a_service(tmp_path, machine):
  """The job is installed once, and runs as a service that is started again after a preemption."""
  checkout, call = machine
  job = "bash scripts/tpu_worker.sh run -- --workdir=gs://my-bucket/runs/qwen\\ 7b "
  assert ["uv", "pip", "install"] in [c[:3] for c in call("install", job)]
  again = call("install", job)
  assert [c[0] for c in again] == ["systemctl", "systemctl"]
  assert again[-1] == ["systemctl", "enable", "--now", "--no-block", "prm_jax", "prm_jax_log"]
  unit = (tmp_path / "prm_jax.service").read_text().splitlines()
  assert f"RestartForceExitStatus={' '.join(RESTARTED)} SIGTERM" in unit
  assert f"ExecStart=/bin/bash {checkout}/job.sh" in unit
  codes = f"RESTART_CODES={','.join(RESTARTED)}"
  assert f'Environment={codes} "LAUNCH=gs://my-bucket/runs/qwen 7b/launch"' in unit
  done = subprocess.run(
    ["bash", "job.sh"],
    cwd=checkout,
    capture_output=True,
    text=True,
    check=True,
    env={"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"},
  )
  assert json.loads(done.stdout) == ["--workdir=gs://my-bucket/runs/qwen 7b"]


@pytest.mark.parametrize(
  ("code", "status", "worker_number", "told"),
  [
    ("exited", "0", "0", True),
    ("exited", "1", "0", True),
    ("exited", "0", "1", False),  # one worker tells for all
    ("exited", "1", "1", True),  # the others only lost it
    *(("exited", code, "0", False) for code in RESTARTED),  # it will be started again
    ("killed", "KILL", "0", False),
  ],
)
def test_the_end_of_a_run_is_told(machine, launcher, code, status, worker_number, told):
  """The state that --watch reads is written at the end of a run, and only then; the log, always."""
  url = "http://metadata.google.internal/computeMetadata/v1/instance"
  (launcher.bin / "curl").write_text(
    "#!/bin/bash\n"
    f'case "${{@: -1}}" in {url}/hostname) echo w-{worker_number}.example ;;\n'
    f"{url}/attributes/agent-worker-number) echo {worker_number} ;; esac\n"
  )
  _, call = machine
  copied = [c[-1] for c in call("ended", EXIT_CODE=code, EXIT_STATUS=status) if c[2] == "cp"]
  folder = "gs://my-bucket/runs/qwen 7b/launch"
  assert copied == [f"{folder}/w-{worker_number}.log"] + [f"{folder}/state"] * told


def test_the_end_is_told_again_if_that_failed(machine, launcher):
  """One failed call does not leave --watch waiting beside a slice that is paid for."""
  _, call = machine
  (launcher.answers / "-").write_text("503\ndone\n")
  calls = call("ended", EXIT_CODE="exited", EXIT_STATUS="1")
  assert sum(c[-1].endswith("/state") for c in calls) == 2


def test_a_crash_that_comes_again(machine, launcher):
  """Ten starts without a new checkpoint are an error; what a preemption ended does not count."""
  _, call = machine

  def checkpoint(step):
    url = f"gs://my-bucket/runs/qwen 7b/checkpoints/{step}/"
    (launcher.answers / "ls").write_text(f"{url}\n")

  def starts(times):
    for _ in range(times):
      call("run", "--")

  starts(1)  # before there is a checkpoint
  checkpoint(100)
  starts(10)
  for code, status in (("exited", "75"), ("exited", "143"), ("killed", "TERM")):
    call("ended", EXIT_CODE=code, EXIT_STATUS=status)
  starts(2)
  call("ended", EXIT_CODE="killed", EXIT_STATUS="KILL")
  call("ended", EXIT_CODE="exited", EXIT_STATUS="134")
  checkpoint("200.unreadable")
  starts(1)
  with pytest.raises(subprocess.CalledProcessError) as error:
    starts(1)
  assert error.value.returncode == 1  # of which `ended` tells
  assert launcher.recorded() == [
    ["gcloud", "storage", "ls", "gs://my-bucket/runs/qwen 7b/checkpoints/"]
  ]
  checkpoint(200)
  starts(1)


def test_the_image(commit):
  """All that the Dockerfile copies is in a commit and not ignored; its extras are in setup.py."""
  lines = (ROOT / "Dockerfile").read_text().splitlines()
  copied = [w for line in lines if line.startswith("COPY ") for w in line.split()[1:-1]]
  ignore = (ROOT / ".dockerignore").read_text().splitlines()
  for name in copied:
    subprocess.run(["git", "ls-files", "--error-unmatch", name], check=True, cwd=ROOT)
    assert f"!{name}" in ignore
  assert {"setup.py", "README.md", "prm_jax", "scripts", "configs"} <= set(copied)
  setup = (ROOT / "setup.py").read_text()
  extras = ast.literal_eval(re.search(r"extras_require=(\{.*?\n  \})", setup, re.DOTALL).group(1))
  for place in ("Dockerfile", "scripts/tpu_worker.sh"):
    (asked,) = re.findall(r"'\.\[([\w,]+)\]'", (ROOT / place).read_text())
    assert set(asked.split(",")) <= set(extras)


def flags_of(text):
  """The flags that a help text lists."""
  return set(re.findall(r"--[a-z_]+(?:\.[a-z_0-9]+)*", text))


def documented():
  """The flags of each command of docs/tpu.md, by script."""
  text = (ROOT / "docs" / "tpu.md").read_text().replace("\\\n", " ")
  commands = {}
  for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
    for line in block.splitlines():
      if found := re.match(r"(?:python|bash) scripts/(\S+)(.*)", line.strip()):
        commands.setdefault(found[1], []).append(found[2].partition("  #")[0])
  return commands


def test_documented_flags_exist(launcher):
  """Every flag that docs/tpu.md gives to a script is one that its --help lists."""
  for script, commands in documented().items():
    if script.endswith(".sh"):
      text = (ROOT / "scripts" / script).read_text()
    else:
      text = conftest.run_script(script, "--help").stdout
    known = flags_of(text)
    for flags in commands:
      used = {w.partition("=")[0] for w in shlex.split(flags) if w.startswith("--") and w != "--"}
      assert used <= known, (script, used - known)
  assert {"prepare_data.py", "compile_for_tpu.py", "launch_tpu.sh", "score.py"} <= set(documented())


def test_documented_costs_are_the_configs_own():
  """The chip-hours and slices of docs/tpu.md are those of the configs' docstrings."""
  text = (ROOT / "docs" / "tpu.md").read_text()
  rows = re.findall(r"^\| `(\S+)` \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
  assert len(rows) >= 4
  for name, topology, hours in rows:
    docstring = ast.get_docstring(ast.parse((ROOT / "configs" / f"{name}.py").read_text()))
    assert f"({hours} chip-hours)" in docstring and f"--topology={topology}" in docstring
