"""The installed package: one command for all scripts, a light core, and its extras."""

import ctypes.util
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT, python, write_lines
from packaging.requirements import Requirement
from scored_files import generated

import prm_jax
from prm_jax import __main__ as command_line
from prm_jax.runtime import completion, doctor, exits, processes

SCRIPTS = {path.stem for path in (ROOT / "scripts").glob("*.py")}
DOCTOR = "prm-jax doctor prints installed packages, devices, and what each extra lacks."
# Modules that only extras bring.
HEAVY = ("flax", "optax", "orbax", "grain", "tensorflow_datasets", "tokenizers", "sentencepiece")


def listed_commands(text):
  """Returns the names of the commands in a help text."""
  return {*re.findall(r"^  (\w+) +[A-Z]", text, re.M)}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
  """The folder of a wheel's files; the wheel is built from the source distribution."""
  folder = tmp_path_factory.mktemp("wheel")
  source = folder / "source"
  ignored = shutil.ignore_patterns(".*", "runs", "data", "models", "build", "*.egg-info")
  shutil.copytree(ROOT, source, ignore=ignored)
  quiet = {"check": True, "capture_output": True}
  sdist = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", folder]
  subprocess.run(sdist, cwd=source, **quiet)
  build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
  subprocess.run([*build, "--wheel-dir", folder, next(folder.glob("*.tar.gz"))], **quiet)
  with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
    wheel.extractall(folder / "site")
  shutil.rmtree(source)
  return folder / "site"


def test_the_help_lists_every_script_without_importing_jax():
  """`prm-jax --help` has a line for each script, and imports neither JAX nor numpy."""
  code = (
    "import sys, runpy; sys.argv = ['prm-jax', '--help']; runpy.run_module('prm_jax', run_name="
  )
  code += "'__main__', alter_sys=True)\nassert not {'jax', 'numpy'} & set(sys.modules)"
  assert listed_commands(python("-c", code).stdout) == SCRIPTS


# Shows the help of each script in a fork of a process with what all scripts import; exit codes.
HELP = """
import atexit, json, os, pathlib, runpy, sys
import jax, prm_jax.config
folder, *scripts = map(pathlib.Path, sys.argv[1:])
codes = {}
for script in scripts:
  if process := os.fork():
    codes[script.stem] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    continue
  for number, kind in ((1, "out"), (2, "err")):
    os.dup2(os.open(folder / f"{script.stem}.{kind}", os.O_WRONLY | os.O_CREAT), number)
  slow = {"flax", "grain", "matplotlib.figure", "optax", "orbax.checkpoint"}
  slow |= {"scipy.stats", "sympy", "tensorflow_datasets", "tokenizers", "torch"}
  atexit.register(lambda: print(slow & set(sys.modules), file=sys.stderr))
  sys.argv = [str(script), "--help"]
  runpy.run_path(sys.argv[0], run_name="__main__")
  sys.exit("the help did not end the script")
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def helps(tmp_path_factory):
  """The exit code, standard output and standard error of `--help` by script."""
  folder = tmp_path_factory.mktemp("help")
  scripts = [ROOT / "scripts" / f"{name}.py" for name in sorted(SCRIPTS)]
  result = python("-c", HELP, folder, *scripts)
  assert not result.stderr
  read = lambda name, kind: (folder / f"{name}.{kind}").read_text()
  return {
    name: (code, read(name, "out"), read(name, "err"))
    for name, code in json.loads(result.stdout).items()
  }


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_the_help_of_a_script_imports_no_slow_libraries(helps, script):
  """A script's `--help` imports no libraries of networks, checkpoints, plots or statistics."""
  code, output, errors = helps[script]
  imported = {"tensorflow_datasets"} if script == "prepare_data" else set()  # of its options
  assert (code, errors) == (0, f"{imported}\n") and "--help" in output
  assert "\n\n\n" not in output
  if script == "score":
    assert "jobs whose hosts JAX does not detect" in output.split("hosts options")[1][:200]
  if script == "rerank":  # a description and a comment, each of several lines in the source
    assert (
      "problem and its samples a line; or a bundle\nof" in output
      and "number. all: every N" in output
    )


def test_commands_are_the_scripts(monkeypatch, capsys):
  """`prm-jax COMMAND` runs the script of that name, and a wrong name gets the nearest one."""

  def call(*arguments):
    """Returns the exit code or error text, standard output and standard error."""
    monkeypatch.setattr(exits, "COMMAND", "")
    monkeypatch.setattr(sys, "argv", ["prm-jax", *arguments])
    code = 0
    try:
      command_line.run()
    except SystemExit as end:
      code = end.code
    return code, *capsys.readouterr()

  code, output, _ = call("split-problems", "--help")
  assert code == 0 and "usage: prm-jax split_problems" in output and "--reported" in output
  code, _, errors = call("split_problems", "--nonsense=1")
  assert code == 2 and "nonsense" in errors
  assert call("--version") == (0, f"prm_jax {prm_jax.__version__}\n", "")
  assert call("completion", "fish")[0].startswith("prm-jax: completion fish: expected")
  nearest = "prm-jax: no command scroe; did you mean score?  --help lists all"
  assert call("scroe") == (nearest, "", "")
  assert call("doctor", "--help")[:2] == (0, f"{DOCTOR}\n")
  assert call("doctor", "--what") == (2, "", "prm-jax doctor: takes no arguments, got --what\n")


def test_a_wheel_works_without_the_checkout(installed, tmp_path):
  """The wheel has all scripts but `benchmark`, and the configs, pages and data files."""
  for pattern in ("configs/*.py", "prm_jax/**/*.html", "prm_jax/**/*.js", "prm_jax/**/*.tsv"):
    for path in ROOT.glob(pattern):
      inside = path.relative_to(ROOT)
      inside = inside if inside.parts[0] == "prm_jax" else pathlib.Path("prm_jax") / inside
      assert (installed / inside).read_bytes() == path.read_bytes()
  outside = {"cwd": tmp_path, "PYTHONPATH": str(installed)}
  (installed / "setup.py").touch()  # as in some folders of packages
  train = ("train", "--config=configs/arithmetic.py")
  text = python("-m", "prm_jax", *train, code=2, **outside).stderr
  assert "--workdir" in text  # the config was found and read
  text = python("-m", "prm_jax", "--help", **outside).stdout
  assert listed_commands(text) == SCRIPTS - {"benchmark"}
  text = python("-m", "prm_jax", "benchmark", code=1, **outside).stderr
  assert text == "prm-jax: benchmark runs only in a clone: python scripts/benchmark.py\n"


LIGHT = f"""
import pathlib, runpy, sys
sys.modules.update(dict.fromkeys({HEAVY!r}))
for command in ("rerank", "grade", "view", "compare"):
  output = "--output_dir" if command in ("rerank", "compare") else "--output"
  sys.argv = ["prm-jax", command, "--input=scored.jsonl", f"{{output}}={{command}}.out"]
  if command == "rerank":
    sys.argv.append("--resamples=16")
  try:
    runpy.run_module("prm_jax", run_name="__main__", alter_sys=True)
  except SystemExit as end:
    if end.code:
      raise
  assert pathlib.Path(f"{{command}}.out").exists(), command
print(sys.modules["prm_jax"].__file__)
"""


def test_the_light_install_suffices(installed, tmp_path):
  """The wheel's commands that read files of scores work without the packages of [train]."""
  write_lines(tmp_path / "scored.jsonl", [{**each, "finished": True} for each in generated()])
  result = python("-c", LIGHT, cwd=tmp_path, PYTHONPATH=str(installed))
  assert result.stdout.endswith(f"{installed / 'prm_jax' / '__init__.py'}\n")
  names = {path.name for path in (tmp_path / "rerank.out").iterdir()}
  assert names >= {"report.html", "report.json"}


STUB = """#!/bin/sh
case $2 in
  venv) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  pip) exit 1 ;;
  *) echo "$0" ;;
esac
"""


def test_a_failed_installation_is_not_complete(tmp_path):
  """A failure of pip ends environment.sh, sourced without `set -e`; the folder is unfinished."""
  (tmp_path / "setup.py").touch()
  (tmp_path / "python").write_text(STUB)
  (tmp_path / "python").chmod(0o755)
  code = f"source '{ROOT}/scripts/environment.sh'; environment new '[train]'; echo installed"
  environment = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python")}
  done = subprocess.run(["bash", "-c", code], cwd=tmp_path, env=environment, capture_output=True)
  assert done.returncode == 1 and b"installed" not in done.stdout
  assert (tmp_path / "new/made_by_prm_jax").read_text() == "unfinished\n"


@pytest.mark.parametrize(
  ("script", "flag", "package", "extra"),
  [
    ("prepare_data.py", "--output=unused", "tensorflow_datasets", "train"),
    ("serve.py", "--checkpoint=none", "aiohttp", "serve"),
  ],
)
def test_a_missing_package_names_its_extra(script, flag, package, extra):
  """A command whose extra is not installed ends with one line that tells how to install it."""
  code = f"import sys; sys.modules['{package}'] = None; import runpy; del sys.argv[0]; "
  code += "runpy.run_path(sys.argv[0], run_name='__main__')"
  result = python("-c", code, ROOT / "scripts" / script, flag, code=1)
  assert result.stderr.strip().endswith(f"'prm_jax[{extra}]' (in a clone: '.[{extra}]')")
  assert len(result.stderr.splitlines()) == 1


def test_doctor_lists_the_missing_packages_of_each_extra(monkeypatch):
  """The report of `prm-jax doctor` has a line for every extra, with the packages that it lacks."""
  extras = {*importlib.metadata.metadata("prm_jax").get_all("Provides-Extra")}
  assert extras - doctor.PURPOSES.keys() <= {"test", "reference", "docs"}
  version = importlib.metadata.version

  def changed(name):
    if name in ("flax", "jax-cuda12-plugin"):
      raise importlib.metadata.PackageNotFoundError(name)
    return "0.0.1" if name == "optax" else version(name)

  monkeypatch.setattr(importlib.metadata, "version", changed)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  text = doctor.report()
  assert "ok       prm_jax" in text and re.search("x cpu .*; JAX_PLATFORMS=cpu is set", text)
  assert re.search(r"missing  \[train\] .*\n.*'prm_jax\[train\]' brings flax, optax 0.0.1 is", text)
  assert [*doctor.missing([Requirement("jax[cuda12]")])] == ["jax-cuda12-plugin"]


def test_doctor_measures_which_dtype_is_faster(monkeypatch):
  """The report advises bfloat16 where products are clearly faster in it, and only there."""
  assert doctor.gflops("float32") > 0
  for rate, dtype in ((170, "float32"), (300, "bfloat16")):
    monkeypatch.setattr(doctor, "gflops", {"float32": 150, "bfloat16": rate}.get)
    said = f"150 GFLOP/s in float32, {rate} in bfloat16; to train on it: "
    assert f"{said}--config.model.dtype={dtype}\n" in doctor.report()


@pytest.mark.skipif(sys.platform != "linux", reason="on other systems there is no faster one")
def test_doctor_names_a_faster_allocator(monkeypatch):
  """jemalloc where it is installed, else glibc's large pages; the name alone if it is in use."""
  monkeypatch.delenv("LD_PRELOAD", raising=False)
  monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
  large_pages = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 before the command, or install jemalloc"
  assert f"put {large_pages}" in doctor.allocator()
  monkeypatch.setattr(ctypes.util, "find_library", {"jemalloc": "libjemalloc.so.2"}.get)
  assert "put LD_PRELOAD=libjemalloc.so.2 MALLOC_CONF=" in doctor.allocator()
  for name, value in processes.allocator().items():
    monkeypatch.setenv(name, value)
  assert doctor.allocator().startswith("libjemalloc.so.2 ")


def test_bash_completes_commands_and_flags(tmp_path):
  """bash completes commands, and the flags that a script's help lists."""
  names = ("score", "generate", "benchmark", "compile_for_tpu")
  scripts = {name: ROOT / "scripts" / f"{name}.py" for name in names}
  file = tmp_path / "completion.sh"
  file.write_text(completion.shell("bash", scripts))

  def complete(*words):
    at = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _prm_jax"
    code = f"source {file}; {at}; echo ${{COMPREPLY[@]}}"
    return subprocess.check_output(["bash", "-c", code], text=True).split()

  assert complete("prm-jax", "s") == ["score"]
  assert complete("prm-jax", "score", "--me") == ["--merge"]
  assert "--hosts.coordinator_address" in complete("prm-jax", "score", "--h")
  assert complete("prm-jax", "score", "file") == []  # bash completes names of files
  assert complete("prm-jax", "compile") == ["compile_for_tpu"]
  assert complete("prm-jax", "compile-") == ["compile-for-tpu"]
  assert complete("prm-jax", "compile-for-tpu", "--to") == ["--topology"]
  assert complete("prm-jax", "completion", "z") == ["zsh"]
  assert complete("prm-jax", "generate", "--n") == ["--n"]
  assert complete("prm-jax", "score", "--ne") == []  # its help speaks of rerank.py's --neutral
  assert "--config" in complete("prm-jax", "compile_for_tpu", "--c")
  assert complete("prm-jax", "benchmark", "--") == ["--against", "--docs", "--help", "--json"]
