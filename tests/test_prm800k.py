"""PRM800K on disk: whole records, errors that name bad input, verified downloads."""

import copy
import hashlib
import itertools
import json
import re
import types

import conftest
import msgspec
import pytest
import tensorflow_datasets as tfds
from hypothesis import given
from hypothesis import strategies as st

from prm_jax.datasets import prm800k
from prm_jax.datasets.prm800k import records
from prm_jax.datasets.prm800k.prm800k_dataset_builder import cut
from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine

tfds.disable_progress_bar()


def line(row):
  """The line of a row in a JSON lines file."""
  return json.dumps(row).encode() + b"\n"


def test_every_form_of_record_survives_the_dataset(tmp_path, raw_rows):
  """The dataset stores each record's JSON byte for byte, with keys that upstream does not have."""
  odd = copy.deepcopy(raw_rows["train"][0])
  odd["question"]["difficulty"] = {"level": [1, 2.0, None]}
  odd["label"]["steps"][0]["human_completion"] = {"text": "x", "corrected_rating": -1}
  odd["generation"] = 2**40
  del odd["question"]["pre_generated_answer"]
  raw_rows["train"].append(odd)
  source = conftest.write_prm800k(tmp_path / "source", raw_rows)
  prm800k.Builder(source=source, config="phase2", data_dir=tmp_path / "out").download_and_prepare()
  for split, rows in raw_rows.items():
    stored = prm800k.stored_records(tmp_path / "out", split)
    assert [record.json + b"\n" for record in stored] == [line(row) for row in rows]
    assert stored[1].source == f"phase2_{split}.jsonl:2"
  assert prm800k.stored_records(tmp_path / "out", "train")[3].solution.generation == 2**40


@pytest.mark.shared_data
def test_real_records_survive_the_dataset(tmp_path, prm800k_sample):
  """The dataset stores every line of the real sample as it is, and its parsed labels are equal."""
  prm800k.Builder(source=prm800k_sample, data_dir=tmp_path).download_and_prepare()
  for split, count in (("train", 721), ("test", 219)):
    names = [f"phase{phase}_{split}.jsonl" for phase in (1, 2)]
    raw = [(prm800k_sample / name).read_bytes().splitlines() for name in names]
    stored = prm800k.stored_records(tmp_path, split)
    assert [record.json for record in stored] == raw[0] + raw[1] and len(stored) == count
    assert stored[count - 1].source == f"{names[1]}:{len(raw[1])}"
    for record in stored:
      ours, theirs = msgspec.to_builtins(record.solution.label), json.loads(record.json)["label"]
      assert ours.keys() == theirs.keys()
      for step, their_step in zip(ours["steps"], theirs["steps"], strict=True):
        assert step["completions"] == their_step["completions"]
        assert step["chosen_completion"] == their_step["chosen_completion"]


def test_every_process_writes_the_same_bytes(tmp_path, raw_rows):
  """Another process writes the same shards, byte for byte, and imports neither TensorFlow nor
  torch."""
  source = conftest.write_prm800k(tmp_path / "source", raw_rows)
  program = (
    "import sys; from prm_jax.datasets import prm800k;"
    "prm800k.Builder(source=sys.argv[1], config='phase2', data_dir=sys.argv[2])"
    ".download_and_prepare();"
    "assert len(list(prm800k.stored_records(sys.argv[2], 'train'))) == 3;"
    "assert 'tensorflow' not in sys.modules and 'torch' not in sys.modules"
  )
  conftest.python("-c", program, source, tmp_path / "a")
  prm800k.Builder(source=source, config="phase2", data_dir=tmp_path / "b").download_and_prepare()
  a, b = (sorted((tmp_path / out).rglob("*.array_record*")) for out in ("a", "b"))
  assert [path.read_bytes() for path in a] == [path.read_bytes() for path in b] and len(a) == 2


STEP = ("label", "steps", 0)
EMPTY = {"completions": [], "human_completion": None, "chosen_completion": None}
BAD_VALUES = [  # one of each kind: path in the record, value, part of the message
  ((*STEP, "completions", 0, "rating"), 2, 'completions[0].rating" is 2'),
  ((*STEP, "completions", 0, "rating"), KeyError, 'no "rating"'),
  ((*STEP, "completions", 0, "text"), " \n", r"""text" is ' \n': expected str that is not blank"""),
  (STEP, EMPTY, "steps[0] is empty"),
  ((*STEP, "chosen_completion"), 1, "chosen_completion is 1, of 1 completions"),
  (("label", "finish_reason"), "done", "label.finish_reason\" is 'done'"),
  (("label", "finish_reason"), "done - at `$.x`", "label.finish_reason\" is 'done - at `$.x`'"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD_VALUES)
def test_a_wrong_value_is_named(raw_rows, path, value, message):
  """A record with a wrong or missing value is an error with file, line, field and value."""
  row = here = raw_rows["train"][2]
  for key in path[:-1]:
    here = here[key]
  here[path[-1]] = value
  if value is KeyError:
    del here[path[-1]]
  with pytest.raises(BadLine, match="^dir/f.jsonl:17: .*" + re.escape(message)):
    records.parse(line(row), "f.jsonl:17", "dir/f.jsonl:17")


@pytest.mark.parametrize(
  "value", [b'"\\ud800"', b'"\xe9"', b"NaN", b"[" * 2000 + b"]" * 2000, b"["]
)
def test_broken_json_is_named(raw_rows, value):
  """Broken or deeply nested JSON is an error, also in a key that upstream does not have."""
  row = line(raw_rows["train"][2]).rstrip()
  records.parse(row[:-1] + b', "key": "\xc3\xa9"}', "f:1")
  with pytest.raises(BadLine, match=r"f:1: (not JSON|nested 2001 deep)"):
    records.parse(row[:-1] + b', "key": ' + value + b"}", "f:1")


@given(size=st.integers(1, 8000), order=st.permutations(range(7)))
def test_parts_of_a_file_hold_the_records_of_the_whole(tmp_path_factory, size, order):
  """Wherever a file is cut, its parts hold the records and bad lines of the whole file in order."""
  rows = [conftest.phase1_row(), conftest.phase2_row(), conftest.gave_up_row()]
  lines = [*map(line, rows), b"\n", b"{}\n", b"[]\n", line(conftest.outcome_row())]
  path = tmp_path_factory.mktemp("parts") / "f.jsonl"
  path.write_bytes(b"".join(lines[i] for i in order).rstrip(b"\n"))
  skipped, skipped_in_parts = [], []
  expected = list(prm800k.read_records(path, skipped))
  parts = list(cut(path, size))
  records_of_parts = (prm800k.read_records(path, skipped_in_parts, **part) for part in parts)
  assert list(itertools.chain(*records_of_parts)) == expected and len(expected) == 4
  assert skipped_in_parts == skipped and len(skipped) == 2
  assert parts[-1]["stop"] == path.stat().st_size


def test_records_of_many_shards_keep_their_order(tmp_path, raw_rows, monkeypatch):
  """Records of many shards, some of them empty, are read in the order of the files."""
  monkeypatch.setattr(prm800k.Builder, "SHARD_BYTES", 1000)
  source = conftest.write_prm800k(tmp_path, raw_rows)
  conftest.write_prm800k(tmp_path, raw_rows, "phase1")
  (source / "phase2_train.jsonl").write_bytes(b"{}\n" * 400 + line(raw_rows["train"][1]))
  builder = prm800k.Builder(source=source, data_dir=tmp_path / "out", on_bad_record="skip")
  builder.download_and_prepare()
  assert builder.info.splits["train"].num_shards > 3
  assert [len(builder.skipped[split]) for split in ("train", "test")] == [400, 0]
  stored = [record.source for record in prm800k.stored_records(tmp_path / "out", "train")]
  assert stored == [*(f"phase1_train.jsonl:{i}" for i in (1, 2, 3)), "phase2_train.jsonl:401"]
  assert len(prm800k.stored_records(tmp_path / "out", "test")) == 4


def test_an_empty_file_is_an_error(tmp_path, raw_rows):
  """An empty source file is an error, because its records would be missed."""
  source = conftest.write_prm800k(tmp_path, raw_rows)
  (source / "phase2_test.jsonl").write_bytes(b" \n")
  with pytest.raises(BadLine, match=r"phase2_test\.jsonl: empty"):
    prm800k.Builder(source=source, config="phase2", data_dir=tmp_path).download_and_prepare()


def test_a_long_line_is_not_read_whole(tmp_path, monkeypatch):
  """A line longer than the limit is an error that names it, and no part of the file is longer."""
  monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 1000)
  path = tmp_path / "a.jsonl"
  path.write_bytes(b"{}\n" + b"x" * 5000)
  parts = list(cut(path, 100))
  assert max(part["stop"] - part["start"] for part in parts) <= 1100
  with pytest.raises(BadLine, match=f"^{path}:2: a line of over 1000 bytes"):
    list(prm800k.read_records(path, [], **parts[0]))


def test_missing_files_are_named(tmp_path, raw_rows):
  """A config needs only its own phase's files; an error names a missing or unusable one."""
  source = conftest.write_prm800k(tmp_path / "data", raw_rows)
  with pytest.raises(FileNotFoundError, match=r"lacks data/phase1_train.jsonl, data/phase1_test"):
    prm800k.Builder(source=source, config="all", data_dir=tmp_path).download_and_prepare()
  with pytest.raises(FileNotFoundError, match="absent: no such folder"):
    prm800k.Builder(source=tmp_path / "absent", data_dir=tmp_path).download_and_prepare()
  # the folder above holds the same files
  prm800k.Builder(source=tmp_path, config="phase2", data_dir=tmp_path / "o").download_and_prepare()
  (source / "phase2_test.jsonl").write_bytes(b"{}\n")
  options = {"source": source, "config": "phase2", "on_bad_record": "skip"}
  with pytest.raises(ValueError, match=r"'test' of .* has no good record; bad: .*:1: "):
    prm800k.Builder(**options, data_dir=tmp_path / "empty").download_and_prepare()
  pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n"
  (source / "phase2_train.jsonl").write_bytes(pointer)
  with pytest.raises(BadLine, match="git lfs pull"):
    prm800k.Builder(**options, data_dir=tmp_path / "out").download_and_prepare()


@pytest.fixture
def upstream(tmp_path, raw_rows, monkeypatch, served):
  """The folder of a local HTTP server that serves the synthetic rows in upstream's place."""
  folder, url = served
  conftest.write_prm800k(folder / "data", raw_rows)
  infos = {}
  for path in (folder / "data").iterdir():
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    info = types.SimpleNamespace(size=path.stat().st_size, checksum=sha256)
    infos[f"{url}data/{path.name}"] = info
  monkeypatch.setattr(prm800k.Builder, "BASE_URL", url)
  monkeypatch.setattr(prm800k.Builder, "url_infos", infos)
  return folder / "data"


def test_only_broken_downloads_are_repeated(tmp_path, raw_rows, upstream):
  """A broken earlier download is replaced, and a good one is not requested again."""
  downloads = tmp_path / "downloads"
  (downloads / "data").mkdir(parents=True)
  (downloads / "data" / "phase2_test.jsonl").write_bytes(b"an older, broken one")
  for out in ("out", "again"):
    builder = prm800k.Builder(config="phase2", data_dir=tmp_path / out)
    builder.download_and_prepare(download_dir=downloads)
    (upstream / "phase2_test.jsonl").unlink(missing_ok=True)
    first = prm800k.stored_records(tmp_path / out, "train")[0]
    assert first.json + b"\n" == line(raw_rows["train"][0])


@pytest.mark.parametrize("damage", ["wrong bytes", "missing"])
def test_downloads_are_verified(tmp_path, upstream, damage):
  """A download is used only if its SHA-256 is upstream's; otherwise no file of it is left."""
  file = upstream / "phase2_test.jsonl"
  if damage == "missing":
    file.unlink()
  else:
    file.write_bytes(file.read_bytes()[:-9] + b"X" * 9)
  builder = prm800k.Builder(config="phase2", data_dir=tmp_path / "out")
  message = "could not download.*" + ("404" if damage == "missing" else "not upstream's")
  with pytest.raises(RuntimeError, match=message):
    builder.download_and_prepare(download_dir=tmp_path / "downloads")
  assert not list((tmp_path / "downloads").rglob("phase2_test*"))
  assert not list((tmp_path / "out").rglob("dataset_info.json"))
