"""Score bundles: the same samples again, and nothing that a damaged file could do."""

import dataclasses
import os
import zipfile

import numpy as np
import pytest
from scored_files import candidate, check_equal, drawn, fails, in_groups, write

from prm_jax.evaluation import score_bundle
from prm_jax.evaluation.score_bundle import write_bundle
from prm_jax.evaluation.scored_samples import MissingSource, read_scored_samples, read_solutions
from prm_jax.runtime.json_lines import BadLine


@pytest.mark.parametrize(
  "missing", [(), ("orm_score",), ("answer",), ("rating_probs", "prm_score")]
)
@pytest.mark.parametrize("form", ["lines", "groups", "two files"])
def test_a_bundle_gives_the_same_samples(tmp_path, missing, form):
  """Every field of the reading comes back equal, and so do the solutions' texts."""
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
  """float32 only where every value survives it; integers and texts in few bytes."""
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
      assert stored["problems_bytes"].tobytes() == b"Add 1 and 2."


def test_a_bundle_from_another_folder(tmp_path, monkeypatch):
  """Sources given by relative paths are found from wherever the bundle is read."""
  write(tmp_path / "scored.jsonl", [candidate()])
  monkeypatch.chdir(tmp_path)
  write_bundle(read_scored_samples(["scored.jsonl"]), "scores.npz")
  (tmp_path / "elsewhere").mkdir()
  monkeypatch.chdir(tmp_path / "elsewhere")
  samples = read_scored_samples(["../scores.npz"])
  assert read_solutions(samples, [(0, 0)]) == [candidate()]


def test_a_bundle_without_its_source(tmp_path):
  """The scores are all there; the texts are an error of their own, whatever became of the file."""
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
  """With another file, or with a grouping of answers that came too late: an error."""
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
  """The bundle's arrays with some changed; None: left out, and not among the names."""
  with np.load(bundle, allow_pickle=False) as stored:
    arrays = {k: v for k, v in (dict(stored) | changes).items() if v is not None}
  arrays["names"] = np.array(sorted(arrays.keys() - {"names"}))
  with target.open("wb") as file:
    np.savez(file, **arrays)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"format": None}, '"format" is not "prm_jax score bundle"'),
    ({"format": np.array("other")}, '"format" is not'),
    ({"version": np.array(2)}, "version 2, and this program reads 1"),
    ({"correct": None}, "correct is not a file in the archive"),
    ({"correct": np.zeros((2, 2))}, '"correct" is of type float64'),
    ({"correct": np.zeros((2, 3), bool)}, '"correct" has shape (2, 3), not (2, 2)'),
    ({"sizes": np.array([2, 0])}, '"sizes" is [2, 0]'),
    ({"sizes": np.array([2])}, '"sizes" has shape (1,), not (2,)'),
    ({"offsets": np.zeros((2, 2, 2), int)}, '"offsets" has shape'),
    ({"run_slots": np.array([0, 1, 4])}, '"run_slots" is not within 0..3'),
    ({"run_lengths": np.array([2, 2, 3])}, '"step_probs" has shape (6, 3), not (7, 3)'),
    ({"run_lengths": np.array([2, 2, -2])}, '"run_lengths" has -2'),
    ({"run_slots": None}, "run_slots is not a file"),
    ({"step_probs": np.zeros((6, 3), complex)}, '"step_probs" is of type complex128'),
    ({"problems_ends": np.array([5, 1])}, '"problems_ends" does not fit'),
    ({"problems_bytes": np.array([255, 254], np.uint8)}, "can't decode byte 0xff"),
  ],
)
def test_a_foreign_or_damaged_bundle(tmp_path, changes, message):
  """Whatever is missing, of another type, or contradicts the rest is named."""
  records = [candidate("A"), candidate("A", right=False, answer="4"), candidate("B")]
  bundle = tmp_path / "scores.npz"
  write_bundle(read_scored_samples([write(tmp_path / "scored.jsonl", records)]), bundle)
  rewritten(bundle, bundle, **changes)
  fails([bundle], f"{bundle}: ", message)


@pytest.mark.parametrize(
  ("name", "at", "value", "message"),
  [
    ("step_probs", (4, 1), -0.125, '"step_probs" of step 4, from 0, is [0.25, -0.125, 0.75]'),
    ("step_probs", (5, 0), np.nan, '"step_probs" of step 5, from 0, is [nan'),
    ("step_probs", (5, 0), np.inf, '"step_probs" of step 5, from 0, is [inf'),
    ("step_probs", (0, 2), 0.8, '"step_probs" of step 0'),
    ("orm", (1, 0), np.inf, '"orm" is not finite for a candidate: problem 1, candidate 0'),
    ("lines", (0, 1), 0, '"lines" does not fit "sizes": problem 0, candidate 1'),
    ("lines", (1, 1), 9, '"lines" does not fit "sizes": problem 1, candidate 1'),
    ("lines", (0, 0), -1, '"lines" does not fit "sizes": problem 0, candidate 0'),
    ("valid", (1, 1), True, '"valid" is true where "lines" has no candidate: problem 1'),
    ("correct", (1, 1), True, '"correct" is true where "valid" is not: problem 1'),
    ("answer_ids", (0, 1), -1, '"answer_ids" is negative for a valid candidate: problem 0'),
    ("run_slots", 2, 1, '"run_slots" does not name each candidate once'),
    ("run_slots", 2, 3, '"run_slots" does not name each candidate once'),
  ],
)
def test_values_that_lines_could_not_have(tmp_path, name, at, value, message):
  """A bundle is checked as lines are: no curve comes of what reading these would refuse."""
  records = [candidate("A"), candidate("A", right=False, answer="4"), candidate("B")]
  bundle = tmp_path / "scores.npz"
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", records)])
  write_bundle(samples, bundle)
  with np.load(bundle) as stored:
    column = stored[name]
  column = column if column.dtype.kind in "fb" else column.astype(np.int64)
  column[at] = value
  rewritten(bundle, bundle, **{name: column})
  fails([bundle], f"{bundle}: ", message)


def test_a_source_that_is_no_file_is_not_opened(tmp_path):
  """A pipe in a bundle's list of sources is an error; to open it would wait for ever."""
  path = write(tmp_path / "scored.jsonl", [candidate()])
  samples = dataclasses.replace(read_scored_samples([path]), file_bytes=(0,))
  path.unlink()
  os.mkfifo(path)
  with pytest.raises(MissingSource, match="is a folder, a pipe or a device"):
    read_solutions(samples, [(0, 0)])


def test_a_pickle_in_a_bundle_is_not_run(tmp_path):
  """An object array is refused before anything of it is executed."""
  bundle = tmp_path / "scores.npz"
  write_bundle(read_scored_samples([write(tmp_path / "scored.jsonl", [candidate()])]), bundle)
  evil = np.array([Evil(str(tmp_path / "run"))], object)
  for name in ("format", "orm", "step_probs"):
    target = tmp_path / f"{name}.npz"
    rewritten(bundle, target, **{name: evil})
    fails([target], f"{target}: ", "Object arrays cannot be loaded")
  assert not (tmp_path / "run").exists()


def test_bytes_that_are_no_bundle(tmp_path):
  """Cut short, one byte changed anywhere, compressed, of another program: always a message."""
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
  bundle.write_bytes(data)
  with np.load(bundle) as stored:
    np.savez_compressed(bundle, **dict(stored))
  fails([bundle], "is compressed")


def test_a_bundle_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
  """An error half way leaves the file of that name as it was."""
  bundle = tmp_path / "scores.npz"
  samples = read_scored_samples([write(tmp_path / "scored.jsonl", [candidate()])])
  bundle.write_text("before")

  def full(file, **arrays):
    file.write(b"PK half")
    raise OSError("no space left")

  monkeypatch.setattr(score_bundle.np, "savez", full)
  with pytest.raises(OSError, match="no space left"):
    write_bundle(samples, bundle)
  assert bundle.read_text() == "before"
  assert sorted(p.name for p in tmp_path.iterdir()) == ["scored.jsonl", "scores.npz"]
