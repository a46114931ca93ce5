"""README, CONTRIBUTING and docs/: links, commands, Python and names of formats are correct."""

import contextlib
import dataclasses
import importlib.util
import io
import os
import re
import subprocess

import documents
import msgspec
import pytest
from conftest import ROOT

from prm_jax import types
from prm_jax.datasets import prm_bench, process_bench
from prm_jax.evaluation import scored_samples
from prm_jax.supervision import label_answers, label_requests

PAGES = [str(path.relative_to(ROOT)) for path in documents.pages()]
TEXTS = documents.texts()


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page):
  """Every relative link of a page names an existing file and an existing heading."""
  path = ROOT / page
  assert not documents.broken_links(path, path.read_text())


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if "scripts/" in text])
def test_scripts_accept_the_documented_commands(page, monkeypatch):
  """Every call of a script on a page, values included, is accepted by the script's parser."""
  monkeypatch.chdir(ROOT)
  commands = [*documents.commands(TEXTS[page])]
  assert len(commands) >= len(re.findall(r"^ *(?:python|bash) scripts/\w", TEXTS[page], re.M))
  errors = {str(command): documents.complaint(command) for command in commands}
  assert not {command: error for command, error in errors.items() if error}


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_compile_and_run(page, tmp_path, monkeypatch):
  """Python blocks compile; blocks marked `python runnable` run in order in an empty folder.

  They print what their comments say.
  """
  monkeypatch.chdir(tmp_path)
  names = {}
  for code, runnable in documents.python_blocks((ROOT / page).read_text()):
    compiled = compile(code, page, "exec")
    if runnable:
      with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compiled, names)
      assert out.getvalue().splitlines() == re.findall(r"^# (\[.*)$", code, re.MULTILINE)


KINDS = {  # of lines, by the section of docs/formats.md
  "Candidates": (scored_samples.Candidate,),
  "Labelling requests and answers": (
    label_requests.Request,
    label_requests.Key,
    label_answers.Answer,
  ),
  "Benchmarks of steps": (process_bench.Solution, prm_bench.Line),
  "Models": (types.StepContract,),
}

CALLS = {  # call: part of the error, or "" for a correct call
  "python scripts/score.py --checkpoint=runs/prm --input=a --output=b": "",
  "python scripts/score.py --checkpoint=runs/prm --input=a --output=b --fast": "--fast",
  "python scripts/score.py --checkpoint=runs/prm": "--input",  # required
  "python scripts/score.py --checkpoint=runs/prm ...": "",
  "python scripts/scores.py --input=a": "no such script",
  "python scripts/rerank.py --input=a --output_dir=b --band=wide": "wide",  # no choice
  "python scripts/train.py --config=configs/none.py --workdir=w": "none.py",
  "python scripts/train.py --config=... --workdir=w --config.train.epoch=2": "train.epochs",
  "python scripts/train.py --config=... --workdir=w --config.train.steps=-1": "-1",
  "python scripts/benchmark.py aggregation --quicker": "--quicker",
  "bash scripts/mathematics.sh --source=DIR --size=3": "there is no --size",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_command_is_reported(call, monkeypatch):
  """An unknown flag, value, file or script is reported, in a code block and within a line."""
  monkeypatch.chdir(ROOT)
  for written in (call, call.replace(" --", " \\\n  --")):
    (command,) = documents.commands(f"Do\n\n```\n{written}\n```\n")
    error = documents.complaint(command)
    assert (CALLS[call] in error) if CALLS[call] else not error
  (inline,) = documents.commands(f"so `{call}` does it")
  assert bool(documents.complaint(inline)) == bool(CALLS[call])


def test_a_broken_link_is_reported():
  """A missing file or heading is reported; code and web addresses are not checked."""
  page = ROOT / "docs" / "data.md"
  text = "# A `b` c\n[1](models.md) [2](#a-b-c) [3](none.md) [4](#none) [5](models.md#none)\n"
  text += "[6](https://example.com/none) `[7](none.md)` [8](../configs/none.py)\n"
  expected = ["none.md", "#none", "models.md#none", "../configs/none.py"]
  assert documents.broken_links(page, text) == expected


def test_formats_name_every_key():
  """Each section of docs/formats.md names every key of the lines that it describes."""
  page = (ROOT / "docs" / "formats.md").read_text()
  for heading, kinds in KINDS.items():
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
    named = {*re.findall(r"`(\w+)`", section)}
    for kind in kinds:
      struct = issubclass(kind, msgspec.Struct)
      keys = msgspec.structs.fields(kind) if struct else dataclasses.fields(kind)
      assert named >= {key.name for key in keys}, (heading, kind)


@pytest.mark.parametrize("page", [page for page in PAGES if "reference/" in page])
def test_a_reference_page_names_modules_that_exist(page):
  """A reference page is empty in a clone; the modules that it refers to can be imported."""
  note = re.search(r"^(> In a clone .*\n(?:> .*\n)*)\n", (ROOT / page).read_text(), re.M)[1]
  assert "bash scripts/docs.sh" in note
  for module in re.findall(r"help\(([\w.]+)\)", note):
    assert importlib.util.find_spec(module)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning():
  environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp")}
  done = subprocess.run(
    ["bash", "scripts/docs.sh", "-E"], cwd=ROOT, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  page = (ROOT / done.stdout.split()[-1]).with_name("reference") / "scripts.html"
  assert "--skip_cut_off" in page.read_text() and "In a clone" not in page.read_text()
