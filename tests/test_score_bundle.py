"""Score bundles: they give the same samples, and a damaged one is an error."""

import dataclasses
import json
import os
import zipfile

import numpy as np
import pytest
from scored_files import candidate, check_equal, drawn, fails, in_groups, write

from prm_jax.evaluation import scored_samples
from prm_jax.evaluation.sample_files import MissingSource, read_scored_samples, read_solutions
from prm_jax.evaluation.scored_samples import write_bundle
from prm_jax.runtime.json_lines import BadLine


@pytest.mark.parametrize(
  "missing", [(), ("orm_score",), ("answer",), ("rating_probs", "prm_score")]
)
@pytest.mark.parametrize("form", ["lines", "groups", "two files"])
def test_a_bundle_gives_the_same_samples(tmp_path, missing, form):
  """A bundle gives equal samples, and finds the same solutions."""
  records = [{k: v for k, v in r.items() if k not in missing} for r in drawn(5)]
  paths = [write(tmp_path / "a.jsonl.gz", in_groups(records) if form == "groups" else records)]
  if form == "two files":
    paths += [write(tmp_path / "b.jsonl", [r | {"more": 1} for r in records])]
  samples = read_scored_samples(paths)
  write_bundle(samples, tmp_path / "scores.npz")
  again = read_scored_samples([tmp_path / "scores.npz"])
  check_equal(samples, again)
  slots = [(4, 2), (0, 0)]
  assert read_solutions(again, slots) == read_solutions(samples, slots)
  assert [p.name for p in tmp_path.iterdir() if "unfinished" in p.name] == []


def test_a_bundle_is_small_and_exact(tmp_path):
  """Floats are stored as float32 only if that is exact, integers in the smallest type."""
  rounded = [candidate(orm=float(np.float32(0.1))), candidate(orm=float(np.float32(-3e-5)))]
  exact = [candidate(orm=0.1), candidate(orm=0.5)]
  for records, dtype in ((rounded, np.float32), (exact, np.float64)):
    samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
    write_bundle(samples, tmp_path / "scores.bin")  # the name does not matter
    check_equal(samples, read_scored_samples([tmp_path / "scores.bin"]))
    with np.load(tmp_path / "scores.bin", allow_pickle=False) as stored:
      assert stored["orm"].dtype == dtype
      assert stored["step_probs"].dtype == np.float32
      assert stored["answer_ids"].dtype == np.uint8
      assert json.loads(stored["header"].tobytes())["problems"] == ["Add 1 and 2."]


def test_a_bundle_from_another_folder(tmp_path, monkeypatch):
  """Sources given by relative paths are found from any working directory."""
  write(tmp_path / "scored.jsonl", [candidate()])
  monkeypatch.chdir(tmp_path)
  write_bundle(read_scored_samples(["scored.jsonl"]), "scores.npz")
  (tmp_path / "elsewhere").mkdir()
  monkeypatch.chdir(tmp_path / "elsewhere")
  samples = read_scored_samples(["../scores.npz"])
  assert read_solutions(samples, [(0, 0)]) == [candidate()]


def test_a_bundle_without_its_source(tmp_path):
  """A bundle whose source has changed or is gone has scores; reading solutions is an error."""
  path = write(tmp_path / "scored.jsonl", [candidate("A"), candidate("B")])
  write_bundle(read_scored_samples([path]), tmp_path / "scores.npz")
  samples = read_scored_samples([tmp_path / "scores.npz"])
  whole = path.read_bytes()
  for data, message in (
    (whole + b" ", f"has changed since it was read ({len(whole) + 1} bytes, not {len(whole)})"),
    (whole[::-1], "has changed since it was read"),
    (whole.replace(b'"A"', b'"C"'), "another problem"),
    (b"\xff" * len(whole), "has changed since it was read"),
  ):
    path.write_bytes(data)
    with pytest.raises(MissingSource) as error:
      read_solutions(samples, [(0, 0)])
    assert message in str(error.value) and str(path) in str(error.value)
  os.unlink(path)
  with pytest.raises(MissingSource, match="cannot be read again: No such file"):
    read_solutions(samples, [(0, 0)])
  assert issubclass(MissingSource, OSError)


def test_a_bundle_is_read_alone(tmp_path):
  """A bundle beside another file, or with a new grouping of answers, is an error."""
  path = write(tmp_path / "scored.jsonl", [candidate()])
  bundle = tmp_path / "scores.npz"
  write_bundle(read_scored_samples([path]), bundle)
  fails([path, bundle], f"{bundle}: is a score bundle, which is read alone")
  fails([bundle], "group its answers before", error=ValueError, group_answers=lambda t: [0])


class Evil:
  """Leaves a file behind when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return os.mkdir, (self.path,)


def rewritten(bundle, target, **changes):
  """The bundle's arrays with some changed; None: left out."""
  with np.load(bundle, allow_pickle=False) as stored:
    arrays = {k: v for k, v in (dict(stored) | changes).items() if v is not None}
  with target.open("wb") as file:
    np.savez(file, **arrays)


def header(**changes):
  """The header of a bundle of two problems, as bytes."""
  about = {"format": "prm_jax score bundle", "version": 2, "files": ["f"], "file_bytes": [1]}
  about |= {"problems": ["A", "B"], "levels": [None] * 2, "subjects": [None] * 2}
  return np.frombuffer(json.dumps(about | changes).encode(), np.uint8)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"header": None}, "header is not a file in the archive"),
    ({"header": header(format="other")}, "\"format\" is 'other'"),
    ({"header": header(version=1)}, '"version" is 1, expected 2'),
    ({"correct": None}, "correct is not a file in the archive"),
    ({"correct": np.zeros((2, 2))}, '"correct" is float64 [2, 2], expected bool [2, 2]'),
    ({"correct": np.zeros((2, 3), bool)}, '"correct" is bool [2, 3], expected bool [2, 2]'),
    ({"sizes": np.array([2, 0])}, '"sizes" is within 0..2'),
    ({"run_slots": np.array([0, 1, 4])}, '"run_slots" or "run_lengths" is out of range'),
    ({"run_lengths": np.array([2, 2, 3])}, '"run_lengths" adds up to 7 of 6 steps'),
    ({"step_probs": np.full((6, 3), 0.5)}, '"step_probs" of step 0, from 0, is [0.5, 0.5, 0.5]'),
  ],
)
def test_a_foreign_or_damaged_bundle(tmp_path, changes, message):
  """An array that is missing, or of another dtype, shape or range, is an error that names it."""
  records = [candidate("A"), candidate("A", right=False, answer="4"), candidate("B")]
  bundle = tmp_path / "scores.npz"
  write_bundle(read_scored_samples([write(tmp_path / "scored.jsonl", records)]), bundle)
  rewritten(bundle, bundle, **changes)
  fails([bundle], f"{bundle}: not a score bundle of version 2, or damaged: ", message)


def test_a_source_that_is_no_file_is_not_opened(tmp_path):
  """A pipe among a bundle's sources is an error: opening it could wait for ever."""
  path = write(tmp_path / "scored.jsonl", [candidate()])
  samples = dataclasses.replace(read_scored_samples([path]), file_bytes=(0,))
  path.unlink()
  os.mkfifo(path)
  with pytest.raises(MissingSource, match="is a folder, a pipe or a device"):
    read_solutions(samples, [(0, 0)])


def test_a_pickle_in_a_bundle_is_not_run(tmp_path):
  """A pickled array is refused, and nothing in it is executed."""
  bundle = tmp_path / "scores.npz"
  write_bundle(read_scored_samples([write(tmp_path / "scored.jsonl", [candidate()])]), bundle)
  evil = np.array([Evil(str(tmp_path / "run"))], object)
  for name in ("header", "orm", "step_probs"):
    target = tmp_path / f"{name}.npz"
    rewritten(bundle, target, **{name: evil})
    fails([target], f"{target}: ", "cannot be loaded")
  assert not (tmp_path / "run").exists()


def test_bytes_that_are_no_bundle(tmp_path):
  """A bundle that is cut or has a changed byte, and another zip file, is a BadLine."""
  bundle = tmp_path / "scores.npz"
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", [candidate()])])
  write_bundle(samples, bundle)
  data = bundle.read_bytes()
  for end in range(2, len(data), 211):
    bundle.write_bytes(data[:end])
    fails([bundle], str(bundle))
  for at in range(2, len(data), 61):
    bundle.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
    try:
      check_equal(samples, read_scored_samples([bundle]))  # a byte that means nothing
    except BadLine as error:
      assert str(bundle) in str(error)
  with zipfile.ZipFile(bundle, "w") as archive:
    archive.writestr("word/document.xml", "<a/>")
  fails([bundle], f"{bundle}: not a score bundle")


def test_a_bundle_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
  """An error while writing leaves the file of that name as it was."""
  bundle = tmp_path / "scores.npz"
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", [candidate()])])
  bundle.write_text("before")

  def full(file, **arrays):
    file.write(b"PK half")
    raise OSError("no space left")

  monkeypatch.setattr(scored_samples.np, "savez", full)
  with pytest.raises(OSError, match="no space left"):
    write_bundle(samples, bundle)
  assert bundle.read_text() == "before"
  assert sorted(p.name for p in tmp_path.iterdir()) == ["scored.jsonl", "scores.npz"]
