"""Reading scored samples: lines, groups, several files and bundles; errors name the place."""

import gzip
import itertools
import os

import msgspec
import numpy as np
import pytest
from conftest import read_lines, write_lines
from scored_files import FINE, bundled, candidate, check_equal, drawn, fails, in_groups, samples_of

from prm_jax.evaluation.sample_arrays import write_bundle
from prm_jax.evaluation.scored_samples import read_scored_samples, read_solutions
from prm_jax.runtime import json_lines


def without(records, *keys):
  """Returns the records without these keys."""
  return [{k: v for k, v in r.items() if k not in keys} for r in records]


@pytest.mark.shared_data
def test_a_real_file_of_groups(shared):
  """On a real file of groups a bare score is the ORM's, and texts are read again."""
  path = shared / "data/reranking/qwen25math_math100_bo8.jsonl"
  samples = read_scored_samples([path])
  groups = read_lines(path)
  assert samples.correct.shape == (35, 8)
  assert samples.valid.all() and (samples.sizes == 8).all() and samples.step_probs is None
  assert samples.orm.tolist() == [[s["score"] for s in g["samples"]] for g in groups]
  assert samples.correct.tolist() == [[s["is_correct"] for s in g["samples"]] for g in groups]
  assert samples.levels == tuple(g["level"] for g in groups)
  for ids, group in zip(samples.answer_ids, groups):
    texts = [s["answer"] for s in group["samples"]]
    assert (ids[:, None] == ids).tolist() == [[a == b for b in texts] for a in texts]
  slots = [(3, 5), (0, 7), (34, 0)]
  for (p, m), record in zip(slots, read_solutions(samples, slots)):
    assert record["text"] == groups[p]["samples"][m]["text"]
    assert record["ground_truth_answer"] == groups[p]["ground_truth_answer"]


@pytest.mark.parametrize(
  ("parser", "name"), [("msgspec", "scored.jsonl"), ("json", "scored.jsonl.gz")]
)
def test_arrays_equal_the_numbers_of_the_lines(tmp_path, monkeypatch, parser, name):
  """Every number equals that of its line to the last bit, with either parser and small buffers."""

  def refuse(line):
    raise msgspec.DecodeError("refused")

  if parser == "json":
    monkeypatch.setattr(msgspec.json, "decode", refuse)
  monkeypatch.setattr(json_lines, "READ_BYTES", 137)
  records = list(drawn(7, 150))
  samples = samples_of(tmp_path / name, records)
  flat = [[r[k] for k in ("-1", "0", "1")] for x in records for r in x["rating_probs"]]
  assert samples.step_probs.tolist() == flat
  assert samples.step_counts.tolist() == [len(record["steps"]) for record in records]
  p, m = np.unravel_index(samples.slots, samples.correct.shape)
  assert samples.places[p, m, 0, 0].tolist() == list(range(1, 151))
  assert [samples.problems[i] for i in p] == [record["problem"] for record in records]
  for column, key in ((samples.orm, "orm_score"), (samples.prm_score, "prm_score")):
    assert column[p, m].tolist() == [record[key] for record in records]
  assert samples.correct[p, m].tolist() == [record["is_correct"] for record in records]
  assert samples.valid[p, m].tolist() == [bool(record["answer"]) for record in records]


@pytest.mark.parametrize(("size", "name"), [(3, "g.jsonl"), (None, "g.jsonl.gz")])
def test_groups_equal_lines(tmp_path, size, name):
  """One candidate a line and one problem a line give the same arrays."""
  records = sorted(drawn(1), key=lambda r: r["problem"])
  lines = samples_of(tmp_path / "lines.jsonl", records)
  groups = samples_of(tmp_path / name, in_groups(records, size))
  assert len(set(groups.sizes)) > 1  # unequal numbers of samples, too
  check_equal(lines, groups, but=("files", "file_bytes", "places"))
  slots = [(p, size - 1) for p, size in enumerate(groups.sizes)]
  assert read_solutions(groups, slots) == read_solutions(lines, slots)
  line, index = groups.places[2, 5, 0, :2]
  assert index == (5 if size is None else 5 % size)
  assert groups.where(2, 5) == f'{tmp_path / name}:{line}: "samples"[{index}]'
  assert lines.where(2, 5) == f"{tmp_path / 'lines.jsonl'}:{lines.places[2, 5, 0, 0]}"


@pytest.mark.parametrize("form", [list, in_groups])
def test_files_of_the_same_candidates_merge(tmp_path, form):
  """Two files equal one with the keys of both; files that contradict each other are an error."""
  records = sorted(drawn(2), key=lambda r: r["problem"])
  whole = samples_of(tmp_path / "whole.jsonl", form(records))
  prm = write_lines(tmp_path / "prm.jsonl", form(without(records, "orm_score")))
  orm = write_lines(tmp_path / "orm.jsonl.gz", form(without(records, "rating_probs", "prm_score")))
  merged = read_scored_samples([prm, orm])
  check_equal(whole, merged, but=("files", "file_bytes", "places"))
  assert read_solutions(merged, [(3, 2)]) == read_solutions(whole, [(3, 2)])
  short = write_lines(tmp_path / "short.jsonl", form(records[:-1]))
  fails([prm, short], f"{short}: ends before the candidate at {prm}:")
  records[1] = records[1] | {"orm_score": 77.0}
  changed = write_lines(tmp_path / "changed.jsonl", form(records))
  where = "changed.jsonl:2: " if form is list else 'changed.jsonl:1: "samples"[1]: '
  fails([orm, changed], f'{where}"orm_score" is 77.0')


def test_of_several_contradictions_the_first_key_is_named(tmp_path):
  """The error of files that differ in many keys names the first of the later line, in every run."""
  keys = [f"key{i}" for i in range(50)]
  a = write_lines(tmp_path / "a.jsonl", [candidate(**dict.fromkeys(keys, 1))])
  b = write_lines(tmp_path / "b.jsonl", [candidate(**dict.fromkeys(reversed(keys), 2))])
  fails([a, b], f'{b}:1: "key49" is 2, but 1 in an earlier file')


def test_nan_does_not_contradict_itself(tmp_path):
  """NaN in two files, or on two lines of a problem, is one value; as a level it is missing."""
  records = [candidate(level=float("nan"), entropy=[float("nan")])] * 2
  paths = [write_lines(tmp_path / name, records) for name in ("a.jsonl", "b.jsonl")]
  assert read_scored_samples(paths).levels == (None,)


def test_blank_lines_are_skipped_but_counted(tmp_path):
  """Blank lines are skipped, and the line numbers in errors still count them."""
  records = [candidate(), candidate(right=False, answer="4"), candidate(orm=0.1)]
  a = write_lines(tmp_path / "a.jsonl", [records[0], "", "  ", *records[1:], ""])
  b = write_lines(tmp_path / "b.jsonl", records)
  samples = read_scored_samples([a, b])
  assert samples.places[0, :, :, 0].tolist() == [[1, 1], [4, 2], [5, 3]]
  assert read_solutions(samples, [(0, 1), (0, 2)]) == records[1:]
  b = write_lines(b, [*records[:2], candidate(orm=0.2)])
  fails([a, b], f'{b}:3: "orm_score" is 0.2')
  for lines in ([], ["", ""]):
    blank = write_lines(tmp_path / "blank.jsonl", lines)
    fails([blank], f"{blank}: empty")


def test_a_pipe_is_refused(tmp_path):
  """A pipe, which cannot be read again for the solutions, is an error."""
  os.mkfifo(tmp_path / "pipe")
  fails([tmp_path / "pipe"], f"{tmp_path}/pipe: no such file, or not a regular file", error=OSError)


@pytest.mark.parametrize(
  ("bad", "message"),
  [
    (candidate(is_correct="yes"), "\"is_correct\" is 'yes': expected bool | null, got str"),
    ({"problem": "A", "answer": "1"}, 'no "is_correct", which grade.py adds; its keys are '),
    (candidate(orm_score=...), '"orm_score" must be on all lines or'),
    (candidate(unique_id="x"), '"unique_id" must be on all lines'),
    (candidate(orm_score=float("nan")), '"orm_score" is nan'),
    (candidate(orm_score=10**400), '"orm_score" is 1000'),
    (candidate(steps=["only one"]), "2 rating_probs of 1 steps"),
    (
      candidate(rating_probs=[FINE, {"2": 1.0}]),
      "\"rating_probs[1]\" is {'2': 1.0}: expected prob",
    ),
    (
      candidate(rating_probs=[FINE, FINE | {"1": 5}]),
      "[1]\" is {'-1': 0.25, '0': 0.0, '1': 5}: exp",
    ),
    (candidate(answer=None), '"is_correct" is true, but "answer" is null'),
    (candidate(answer=" "), '"is_correct" is true, but "answer" is \' \''),
    (candidate(step_std=[0.1]), "1 step_std of 2 steps"),
    (candidate(step_std=["x", None]), "\"step_std[0]\" is 'x': expected float"),
    (candidate(step_std=[0.1, float("nan")]), '"step_std[1]" is nan'),
    (candidate(level=5), '"level" is 5, but null before for the same problem'),
    ({"problem": "A", "samples": []}, '"samples" is []: expected array of length >= 1'),
    ({"problem": "A", "samples": [3]}, '"samples[0]" is 3: expected object'),
    (
      {"problem": "A", "samples": [{"score": 1, "orm_score": 2}]},
      '"samples"[0]: "orm_score" is 1, but 2 beside the sample\'s score',
    ),
    (
      {"problem": "A", "samples": [candidate("A"), candidate("B")]},
      "\"samples\"[1]: \"problem\" is 'B', but 'A' on the whole line",
    ),
    (
      {"samples": [candidate(), candidate(rating_probs=[FINE, FINE | {"0": 0.5}])]},
      '"samples"[1]: "rating_probs[1]" is {',
    ),
  ],
)
def test_a_malformed_line_is_an_error(tmp_path, bad, message):
  """The error of a bad line has its file, line, sample, key and value."""
  path = write_lines(tmp_path / "scored.jsonl", [candidate(), bad])
  fails([path], f"{path}:2: {message}" if message.startswith('"samp') else f"{path}:2: ", message)


MISTAKES = (
  (candidate(rating_probs=[FINE, FINE | {"0": 2}]), '"rating_probs[1]'),
  (candidate(rating_probs=[FINE | {"0": float("nan")}, FINE]), '"rating_probs[0]'),
  (candidate(orm_score=True), '"orm_score" is true'),
  (candidate(answer=...), '"answer" must be on all'),
  ("{", "not JSON"),
)


def test_of_two_mistakes_the_first_is_reported(tmp_path):
  """Of two bad lines the first is reported, whatever their mistakes."""
  for (first, message), (second, _) in itertools.permutations(MISTAKES, 2):
    path = write_lines(tmp_path / "scored.jsonl", [candidate(), first, candidate(), second])
    fails([path], f"{path}:2: {message}")


@pytest.mark.parametrize(
  ("form", "missing"),
  [
    ("lines", ()),
    ("lines", ("orm_score",)),
    ("groups", ("answer",)),
    ("two files", ("rating_probs", "prm_score")),
  ],
)
def test_a_bundle_gives_the_same_samples(tmp_path, monkeypatch, missing, form):
  """A bundle gives equal samples, and the same solutions from any working directory."""
  records = without(drawn(5), *missing)
  monkeypatch.chdir(tmp_path)
  paths = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"][: 1 + (form == "two files")]
  for path in paths:
    write_lines(path, in_groups(records) if form == "groups" else records)
  samples = read_scored_samples([path.name for path in paths])
  bundled(samples, "scores")  # the name does not matter
  with gzip.open("scores.gz", "wb") as file:
    write_bundle(samples, file)
  check_equal(samples, read_scored_samples(["scores.gz"]), but=["files"])
  (tmp_path / "elsewhere").mkdir()
  monkeypatch.chdir("elsewhere")
  again = read_scored_samples(["../scores"])
  check_equal(samples, again, but=["files"])
  assert again.files == tuple(paths)
  texts = [r for r in records if r["problem"] == samples.problems[4]]
  assert read_solutions(again, [(4, 2), (4, 0)]) == [texts[2], texts[0]]


def test_solutions_of_a_changed_source_are_an_error(tmp_path):
  """The texts of a source that has changed or is gone are an error that names the file."""
  path = tmp_path / "scored.jsonl"
  samples = samples_of(path, [candidate("A"), candidate("B")])
  whole = path.read_bytes()
  for data, message in (
    (whole + b" ", f"expected {len(whole)} bytes"),
    (whole[::-1], "not JSON"),
    (whole.replace(b'"A"', b'"C"'), "line 1: another problem"),
    (None, "No such file"),
  ):
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(OSError, match=message) as error:
      read_solutions(samples, [(0, 0)])
    assert str(path) in str(error.value)


class Evil:
  """Leaves a file behind when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return os.mkdir, (self.path,)


def test_a_foreign_bundle_is_an_error(tmp_path):
  """A bundle beside another file, of another version, incomplete or with a pickle is refused."""
  bundle, path = tmp_path / "scores.npz", tmp_path / "scored.jsonl"
  bundled(samples_of(path, [candidate()]), bundle)
  fails([path, bundle], f"{bundle}: is a score bundle, which is read alone")
  header = np.frombuffer(b'{"format": "prm_jax score bundle", "version": 1}', np.uint8)
  evil = np.array([Evil(str(tmp_path / "run"))], object)
  for changes, message in (
    ({"header": header}, "'version': 1"),
    ({"correct": None}, 'no "correct"'),
    ({"header": None}, "'header'"),
    ({"orm": evil}, "cannot be loaded"),
    ({"score": np.zeros(1)}, "unknown"),
    ({"header": evil}, "cannot be loaded"),
  ):
    with np.load(bundle, allow_pickle=False) as stored:
      arrays = {k: v for k, v in (dict(stored) | changes).items() if v is not None}
    with open(tmp_path / "changed", "wb") as file:
      np.savez(file, **arrays)
    fails([tmp_path / "changed"], "changed: not a score bundle of this version, or dam", message)
  assert not (tmp_path / "run").exists()


def test_a_damaged_bundle_is_an_error(tmp_path):
  """A bundle that is cut off is an error; a changed byte is an error or changes nothing."""
  bundle = tmp_path / "scores.npz"
  samples = samples_of(tmp_path / "scored.jsonl", [candidate()])
  bundled(samples, bundle)
  data = bundle.read_bytes()
  for end in range(2, len(data), 211):
    bundle.write_bytes(data[:end])
    fails([bundle], str(bundle))
  for at in range(2, len(data), 61):
    bundle.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
    try:
      check_equal(samples, read_scored_samples([bundle]))  # a byte that means nothing
    except json_lines.BadLine as error:
      assert str(bundle) in str(error)
