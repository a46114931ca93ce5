"""README, CONTRIBUTING and docs/: links lead somewhere, commands and Python are what they say."""

import dataclasses
import importlib.util
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
from prm_jax.supervision import label_requests

PAGES = [str(path.relative_to(ROOT)) for path in documents.pages()]
TEXTS = documents.texts()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
  """Every relative link of a page names a file that is there, and a heading that it has."""
  path = ROOT / page
  assert not documents.broken_links(path, path.read_text())


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if "scripts/" in text])
def test_commands_are_those_of_the_scripts(page, monkeypatch):
  """Every call of a script is one that the script's own parser accepts, values included."""
  monkeypatch.chdir(ROOT)
  found = [*documents.commands(TEXTS[page])]
  assert len(found) >= len(re.findall(r"^ *(?:python|bash) scripts/\w", TEXTS[page], re.M))
  assert not {str(each): said for each in found if (said := documents.complaint(each))}


@pytest.mark.parametrize("page", PAGES)
def test_python_compiles_and_runs_where_it_says_so(page, tmp_path, monkeypatch):
  """Blocks of Python compile; those marked `python runnable` run, in order, in an empty folder."""
  monkeypatch.chdir(tmp_path)
  names = {}
  for code, runnable in documents.python_blocks((ROOT / page).read_text()):
    compiled = compile(code, page, "exec")
    if runnable:
      exec(compiled, names)


KINDS = {  # of lines, by the section of docs/formats.md
  "Candidates": (scored_samples.Candidate,),
  "Labelling requests and answers": (
    label_requests.Request,
    label_requests.Key,
    label_requests.Answer,
  ),
  "Benchmarks of steps": (process_bench.Solution, prm_bench.Line),
  "Models": (types.StepContract,),
}

CALLS = {  # a call: what is said of it
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
def test_a_wrong_call_is_found(call, monkeypatch):
  """A flag, value, file or script that does not exist is reported, in a block and in a line."""
  monkeypatch.chdir(ROOT)
  for written in (call, call.replace(" --", " \\\n  --")):
    (found,) = documents.commands(f"Do\n\n```\n{written}\n```\n")
    said = documents.complaint(found)
    assert (CALLS[call] in said) if CALLS[call] else not said
  (inline,) = documents.commands(f"so `{call}` does it")
  assert bool(documents.complaint(inline)) == bool(CALLS[call])


def test_a_wrong_link_is_found():
  """A file or a heading that is not there is reported; code and addresses are no links."""
  page = ROOT / "docs" / "data.md"
  text = "# A `b` c\n[1](models.md) [2](#a-b-c) [3](none.md) [4](#none) [5](models.md#none)\n"
  text += "[6](https://example.com/none) `[7](none.md)` [8](../configs/none.py)\n"
  expected = ["none.md", "#none", "models.md#none", "../configs/none.py"]
  assert documents.broken_links(page, text) == expected


def test_formats_name_every_key():
  """docs/formats.md has each key of the lines that the project's own structs read, in its place."""
  page = (ROOT / "docs" / "formats.md").read_text()
  for heading, kinds in KINDS.items():
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
    named = {*re.findall(r"`(\w+)`", section)}
    for kind in kinds:
      struct = issubclass(kind, msgspec.Struct)
      keys = msgspec.structs.fields(kind) if struct else dataclasses.fields(kind)
      assert named >= {key.name for key in keys}, (heading, kind)


@pytest.mark.parametrize("page", [page for page in PAGES if "reference/" in page])
def test_a_page_of_the_reference_says_where_its_content_is(page):
  """In a clone it is a frame: what it says to call there, and to read, is there."""
  note = re.search(r"^(> In a clone .*\n(?:> .*\n)*)\n", (ROOT / page).read_text(), re.M)[1]
  assert "bash scripts/docs.sh" in note
  for module in re.findall(r"help\(([\w.]+)\)", note):
    assert importlib.util.find_spec(module)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning():
  """scripts/docs.sh makes its environment and finds every page, link and docstring in order."""
  environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp")}
  done = subprocess.run(
    ["bash", "scripts/docs.sh", "-E"], cwd=ROOT, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  page = (ROOT / done.stdout.split()[-1]).with_name("reference") / "scripts.html"
  assert "--skip_cut_off" in page.read_text() and "In a clone" not in page.read_text()
