"""Reading scored samples: lines, groups, several files and bundles; errors name the place."""

import json
import os
import random

import msgspec
import numpy as np
import pytest
from scored_files import FINE, candidate, check_equal, drawn, fails, in_groups, write

from prm_jax.evaluation import scored_samples
from prm_jax.evaluation.sample_files import read_scored_samples, read_solutions
from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine


@pytest.mark.shared_data
def test_a_real_file_of_groups(shared):
  """A real file of groups: a bare score is the ORM's, and texts are found again."""
  path = shared / "data/reranking/qwen25math_math100_bo8.jsonl"
  samples = read_scored_samples([path])
  groups = [json.loads(line) for line in path.read_text().splitlines()]
  assert samples.correct.shape == (35, 8)
  assert samples.valid.all() and (samples.sizes == 8).all()
  assert samples.step_probs is None and samples.step_slots is None
  assert samples.orm.tolist() == [[s["score"] for s in g["samples"]] for g in groups]
  assert samples.correct.tolist() == [[s["is_correct"] for s in g["samples"]] for g in groups]
  assert samples.levels == tuple(g["level"] for g in groups)
  answers = [[s["answer"] for s in g["samples"]] for g in groups]
  for ids, texts in zip(samples.answer_ids, answers):
    assert (ids[:, None] == ids).tolist() == [[a == b for b in texts] for a in texts]
  slots = [(3, 5), (0, 7), (34, 0)]
  for (p, m), record in zip(slots, read_solutions(samples, slots)):
    assert record["text"] == groups[p]["samples"][m]["text"]
    assert record["ground_truth_answer"] == groups[p]["ground_truth_answer"]


@pytest.mark.parametrize(
  ("size", "name"), [(None, "g.jsonl"), (3, "g.jsonl"), (None, "g.jsonl.gz")]
)
def test_groups_equal_lines(tmp_path, size, name):
  """One candidate a line and one problem a line give the same arrays."""
  records = sorted(drawn(1), key=lambda r: r["problem"])
  lines = read_scored_samples([write(tmp_path / "lines.jsonl", records)])
  groups = read_scored_samples([write(tmp_path / name, in_groups(records, size))])
  assert len(set(groups.sizes)) > 1  # unequal numbers of samples, too
  check_equal(lines, groups, but=("files", "file_bytes", "lines", "offsets", "indices"))
  slots = [(p, size - 1) for p, size in enumerate(groups.sizes)]
  assert read_solutions(groups, slots) == read_solutions(lines, slots)
  p, m = 2, 5
  line, index = (1 + p, m) if size is None else (groups.lines[p, m], m % size)
  assert groups.where(p, m) == f'{tmp_path / name}:{line}: "samples"[{index}]'
  assert lines.where(p, m) == f"{tmp_path / 'lines.jsonl'}:{lines.lines[p, m]}"


def test_files_of_groups_merge(tmp_path):
  """Files of groups merge as files of lines do; files of different samples do not merge."""
  records = sorted(drawn(2), key=lambda r: r["problem"])
  whole = read_scored_samples([write(tmp_path / "whole.jsonl", in_groups(records))])

  def without(*keys):
    return [{k: v for k, v in r.items() if k not in keys} for r in records]

  prm = write(tmp_path / "prm.jsonl", in_groups(without("orm_score")))
  orm = write(tmp_path / "orm.jsonl", in_groups(without("rating_probs", "prm_score")))
  merged = read_scored_samples([prm, orm])
  check_equal(whole, merged, but=("files", "file_bytes", "offsets"))
  assert read_solutions(merged, [(3, 2)]) == read_solutions(whole, [(3, 2)])
  lines = write(tmp_path / "lines.jsonl", records)
  fails([prm, lines], "lines.jsonl:1: the same candidate is at ", 'prm.jsonl:1: "samples"[0]')
  other = write(tmp_path / "other.jsonl", in_groups(records, 3))
  fails([prm, other], 'other.jsonl:2: "samples"[0]: the same candidate is at ', '"samples"[3]')
  short = write(tmp_path / "short.jsonl", in_groups(records[:-1]))
  fails([prm, short], f"{short}: ends before the candidate at {prm}:7: ", '"samples"[')
  records[1] = records[1] | {"orm_score": 77.0}
  changed = write(tmp_path / "changed.jsonl", in_groups(records))
  fails([orm, changed], 'changed.jsonl:1: "samples"[1]: "orm_score" is 77.0')


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ({"samples": []}, '"samples" is []: expected a list of objects, not empty'),
    ({"samples": [{"is_correct": False, "score": 1}, 3]}, '"samples"[1]: is 3: expected an object'),
    ({"samples": [{"is_correct": 1, "score": 1}]}, '"samples"[0]: "is_correct" is 1'),
    ({"samples": [{"is_correct": True}]}, '"samples"[0]: no "orm_score"'),
    (
      {"samples": [{"is_correct": True, "score": 1, "orm_score": 1}]},
      '"samples"[0]: "score" and "orm_score" are both here',
    ),
    (
      {"samples": [{"is_correct": True, "score": 1, "problem": "B"}]},
      "\"samples\"[0]: \"problem\" is 'B', but 'A' for the whole line",
    ),
  ],
)
def test_malformed_groups(tmp_path, line, message):
  """The message names file, line, the sample's place from 0, and the value."""
  good = {"problem": "A", "samples": [{"is_correct": True, "score": 0.5}]}
  path = write(tmp_path / "groups.jsonl", [good, "", {"problem": "A"} | line])
  fails([path], f"{path}:3: {message}")


def test_the_step_of_a_sample_is_named(tmp_path):
  """A wrong probability names file, line, sample and step."""
  bad = {"steps": ["a", "b"], "is_correct": False, "rating_probs": [FINE, FINE | {"0": 0.5}]}
  good = bad | {"rating_probs": [FINE] * 2}
  path = write(tmp_path / "g.jsonl", [{"problem": "A", "samples": [good, good, bad]}])
  fails([path], f"{path}:1: \"samples\"[2]: \"rating_probs[1]\" is {{'-1': 0.25, '0': 0.5")


def test_answers_are_grouped_once(tmp_path):
  """group_answers gets a problem's distinct answers in order; its numbers become 0, 1, 2, ..."""
  answers = ["1/2", "0.5", "7", None, "0.5", "1/2", "8"]
  records = [candidate("A", right=False, answer=a) for a in answers]
  records += [candidate("B", answer="0.5"), candidate("C", right=False, answer=None)]
  path = write(tmp_path / "scored.jsonl", records)
  seen = []

  def halves(texts):
    seen.append(list(texts))
    return np.array([-5 if text in ("1/2", "0.5") else 1000 + int(text) for text in texts])

  samples = read_scored_samples([path], group_answers=halves)
  assert seen == [["1/2", "0.5", "7", "8"], ["0.5"], []]
  assert samples.answer_ids.tolist()[0] == [0, 0, 1, 0, 0, 0, 2]
  assert samples.answer_ids.tolist()[1:] == [[0] * 7] * 2
  plain = read_scored_samples([path])
  assert plain.answer_ids.tolist()[0] == [0, 1, 2, 0, 1, 0, 3]
  check_equal(samples, plain, but=("answer_ids",))
  assert not plain.valid[0, 3] and not plain.valid[2].any()


def test_a_wrong_grouping_is_an_error(tmp_path):
  """A grouping that is not one integer for each answer is an error that shows it."""
  path = write(tmp_path / "scored.jsonl", [candidate(), candidate(right=False, answer="4")])
  fails([path], "gave [0] for ['3', '4']", error=ValueError, group_answers=lambda texts: [0])
  fails([path], "expected an integer for each", error=ValueError, group_answers=lambda t: t)


def plain_reading(paths, monkeypatch):
  """The same by the standard library's parser alone, with every step checked by itself."""
  with monkeypatch.context() as patch:

    def refuse(line):
      raise msgspec.DecodeError("refused")

    patch.setattr(msgspec.json, "decode", refuse)
    patch.setattr(scored_samples, "BLOCK", 1)
    try:
      return read_scored_samples(paths)
    except BadLine as error:
      return str(error)


@pytest.mark.parametrize("block", [1, 30, 2**16])
@pytest.mark.parametrize("name", ["scored.jsonl", "scored.jsonl.gz"])
def test_fast_reading_equals_plain_reading(tmp_path, monkeypatch, block, name):
  """The parser and the sizes of blocks and buffers change no bit of an array."""
  path = write(tmp_path / name, drawn(block, 150))
  plain = plain_reading([path], monkeypatch)
  monkeypatch.setattr(scored_samples, "BLOCK", block)
  monkeypatch.setattr(json_lines, "READ_BYTES", 100 + block)
  check_equal(read_scored_samples([path]), plain)
  flat = [[r[k] for k in ("-1", "0", "1")] for x in drawn(block, 150) for r in x["rating_probs"]]
  assert plain.step_probs.tolist() == flat
  m = plain.correct.shape[1]
  texts = [record["rating_probs"] for record in drawn(block, 150)]
  for p, place in ((0, 0), (3, 4), (6, 1)):
    mine = plain.step_probs[plain.step_slots == p * m + place]
    expected = texts[plain.lines[p, place] - 1]
    assert mine.tolist() == [[r[k] for k in ("-1", "0", "1")] for r in expected]


@pytest.mark.parametrize("seed", range(40))
def test_of_two_mistakes_the_first_is_reported(tmp_path, monkeypatch, seed):
  """The error is that of the first bad line, though probabilities are checked at the end."""
  rng = random.Random(seed)
  records = list(drawn(seed, 60))
  bad_probs = rng.choice(
    [{"-1": 2.0, "0": 0.0, "1": 0.0}, {"-1": float("nan"), "0": 0, "1": 1}, {"0": 1}, [1], "x"]
  )
  mistakes = {}
  for line in rng.sample(range(1, 60), 3):
    record = dict(records[line])
    kind = rng.randrange(4)
    if kind == 0:
      step = rng.randrange(len(record["steps"]))
      record["rating_probs"] = list(record["rating_probs"])
      record["rating_probs"][step] = bad_probs
      mistakes[line] = f'"rating_probs[{step}]'
    elif kind == 1:
      record["orm_score"] = rng.choice(["high", float("inf"), True, 10**400])
      mistakes[line] = '"orm_score" is '
    elif kind == 2:
      del record["answer"]
      mistakes[line] = 'no "answer"'
    else:
      mistakes[line] = "not JSON"
      record = "{"
    records[line] = record
  path = write(tmp_path / "scored.jsonl", records)
  first = min(mistakes)
  message = fails([path], f"{path}:{first + 1}: {mistakes[first]}")
  plain = plain_reading([path], monkeypatch)
  assert plain == message


def test_solutions_are_read_as_their_scores_were(tmp_path):
  """A byte order mark, a NaN in an unread key and huge integers are read, and found again."""
  path = tmp_path / "scored.jsonl"
  lines = [candidate(note=float("nan")), candidate(prm_score=10**30, note=10**400), candidate()]
  path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(x).encode() for x in lines))
  samples = read_scored_samples([path])
  assert samples.lines.tolist() == [[1, 2, 3]]
  assert samples.prm_score[0, 1] == 1e30
  assert len(read_solutions(samples, [(0, 0), (0, 2)])) == 2


def test_what_is_no_file_is_not_opened(tmp_path):
  """A folder or a pipe is an error: a pipe cannot be read twice."""
  os.mkfifo(tmp_path / "pipe")
  for path in (tmp_path, tmp_path / "pipe"):
    fails([path], f"{path}: is a folder or a pipe", error=OSError)
  fails([tmp_path / "none"], "No such file", error=FileNotFoundError)


def test_two_files_merge_line_by_line(tmp_path):
  """Two files of the same candidates equal one file with the keys of both, gzip or not."""
  records = list(drawn(3))
  whole = read_scored_samples([write(tmp_path / "whole.jsonl", records)])

  def without(*keys):
    return [{k: v for k, v in r.items() if k not in keys} for r in records]

  prm = write(tmp_path / "prm.jsonl", without("orm_score"))
  orm = write(tmp_path / "orm.jsonl.gz", without("rating_probs", "prm_score"))
  merged = read_scored_samples([prm, orm])
  check_equal(whole, merged, but=("files", "file_bytes", "offsets"))
  p, m = 3, 2
  assert read_solutions(merged, [(p, m)]) == [records[merged.lines[p, m] - 1]]


def test_files_that_disagree(tmp_path):
  """Two files of different candidates, or of different lengths, are never merged."""
  a = write(tmp_path / "a.jsonl", [candidate(), candidate()])
  b = write(tmp_path / "b.jsonl", [candidate(), candidate(answer="4", right=False)])
  fails([a, b], f"{b}:2: ", " is ", "for the same candidate of an earlier input")
  c = write(tmp_path / "c.jsonl", [candidate()])
  fails([a, c], f"{c}: ends before the candidate at {a}:2")


def test_blank_lines_are_no_candidates(tmp_path):
  """Blank lines are skipped and counted: line numbers in errors are those of each file."""
  records = [candidate(), candidate(right=False, answer="4"), candidate(orm=0.1)]
  a = write(tmp_path / "a.jsonl", [records[0], "", "  ", *records[1:], ""])
  b = write(tmp_path / "b.jsonl", records)
  samples = read_scored_samples([a, b])
  assert samples.lines.tolist() == [[1, 4, 5]]
  assert read_solutions(samples, [(0, 1), (0, 2)]) == records[1:]
  b = write(b, [*records[:2], candidate(orm=0.2)])
  fails([a, b], f'{b}:3: "orm_score" is 0.2')
  for lines in ([], ["", ""]):
    blank = write(tmp_path / "blank.jsonl", lines)
    fails([blank], f"{blank}: empty")


@pytest.mark.parametrize(
  ("bad", "message"),
  [
    (candidate(problem=...), 'no "problem"'),
    (candidate(is_correct="yes"), "\"is_correct\" is 'yes': expected bool, got str"),
    (candidate(orm_score=...), 'no "orm_score", which the lines before have'),
    (candidate(unique_id="x"), '"unique_id" is here, and on none of the lines before'),
    (candidate(orm_score=float("nan")), '"orm_score" is nan'),
    (candidate(orm_score=10**400), '"orm_score" is 1000'),
    (candidate(steps=["only one"]), "expected one for each of 1 steps"),
    (candidate(rating_probs=[FINE, {"2": 1.0}]), '"rating_probs[1]" is {\'2\': 1.0}: no "-1"'),
    (
      candidate(rating_probs=[FINE, FINE | {"1": 5}]),
      "\"rating_probs[1]\" is {'-1': 0.25, '0': 0.0, '1': 5",
    ),
    (candidate(answer=None), '"is_correct" is true, but "answer" is None'),
    (candidate(level=5), "\"level\" is '5', but None before"),
  ],
)
def test_malformed_lines(tmp_path, bad, message):
  """A bad line is an error with file, line, key and value."""
  path = write(tmp_path / "scored.jsonl", [candidate(), bad])
  fails([path], f"{path}:2: ", message)
