"""PRM800K on disk: nothing lost, bad input told, downloads verified, no TensorFlow."""

import copy
import functools
import gzip
import hashlib
import http.server
import json
import subprocess
import sys
import threading

import pytest
import tensorflow_datasets as tfds

from prm_jax.datasets import math_splits, prm800k
from prm_jax.datasets.arithmetic import arithmetic_dataset_builder
from prm_jax.datasets.prm800k import codec
from prm_jax.datasets.prm800k.records import MAX_LINE_BYTES, parse_line, parts

tfds.disable_progress_bar()


def same(a, b):
  """Equal as JSON: 1, 1.0 and true are three values; the order of keys does not matter."""
  return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def line(row):
  return json.dumps(row).encode() + b"\n"


def lines(path):
  return path.read_text(encoding="utf-8").split("\n")[:-1]


def write_source(folder, raw_rows, phase="phase2"):
  folder.mkdir(parents=True, exist_ok=True)
  for split, rows in raw_rows.items():
    (folder / f"{phase}_{split}.jsonl").write_bytes(b"".join(map(line, rows)))
  return folder


def test_synthetic_rows_survive_the_dataset(tmp_path, raw_rows):
  """Every form of row comes back from the stored dataset as it was, with file and line."""
  odd = copy.deepcopy(raw_rows["train"][0])
  odd["question"]["difficulty"] = {"level": [1, 2.0, None]}  # keys upstream does not have
  odd["label"]["steps"][0]["human_completion"] = {"text": "x", "corrected_rating": -1}
  odd["label"]["steps"][0]["completions"][0]["rating"] = 1
  odd["label"]["total_time"] = 1.5
  odd["generation"] = 2**40
  del odd["question"]["pre_generated_answer"]
  odd["question"]["ground_truth_answer"] = ""
  raw_rows["train"].append(odd)
  source = write_source(tmp_path / "source", raw_rows)
  prm800k.Builder(source=source, config="phase2", data_dir=tmp_path / "out").download_and_prepare()
  for split, rows in raw_rows.items():
    stored = prm800k.read_rows(tmp_path / "out", split)
    assert len(stored) == len(rows)
    for i, row in enumerate(rows):
      assert same(stored[i].row, row)
      assert stored[i].source == f"phase2_{split}.jsonl:{i + 1}"


def test_codec_tells_apart_what_equals_in_python(raw_rows):
  """true, 1 and 1.0, a missing key and null, [] and null are stored as different things."""
  row = raw_rows["train"][2]
  for value in (0, 0.0, -0.0, 1, 1.0, None, 10**400):
    row["question"]["pre_generated_verifier_score"] = value
    assert same(codec.decode(codec.encode(prm800k.Record(row, "f", 1))).row, row)
  row["label"]["steps"][1]["x"] = True
  row["question"]["pre_generated_steps"] = None
  del row["question"]["ground_truth_solution"]
  assert same(codec.decode(codec.encode(prm800k.Record(row, "f", 1))).row, row)


def test_the_same_bytes_in_every_process(tmp_path, raw_rows):
  """Shards are the same to the byte whoever writes them, so workers' can be compared and hashed."""
  source = write_source(tmp_path / "source", raw_rows)
  program = (
    "import sys; from prm_jax.datasets import prm800k;"
    "prm800k.Builder(source=sys.argv[1], config='phase2', data_dir=sys.argv[2])"
    ".download_and_prepare()"
  )
  for out in ("a", "b"):
    command = [sys.executable, "-c", program, str(source), str(tmp_path / out)]
    subprocess.run(command, check=True, capture_output=True)
  shards = sorted((tmp_path / "a").rglob("*.array_record*"))
  assert len(shards) == 2
  for shard in shards:
    twin = tmp_path / "b" / shard.relative_to(tmp_path / "a")
    assert shard.read_bytes() == twin.read_bytes()


@pytest.mark.shared_data
def test_real_rows_survive_the_dataset(tmp_path, prm800k_sample):
  """Every raw row of the real sample is reconstructed from what was stored, none is called bad."""
  prm800k.Builder(source=prm800k_sample, data_dir=tmp_path).download_and_prepare()
  for split, count in (("train", 721), ("test", 219)):
    raw = [
      (f"phase{phase}_{split}.jsonl:{i}", json.loads(text))
      for phase in (1, 2)
      for i, text in enumerate(lines(prm800k_sample / f"phase{phase}_{split}.jsonl"), 1)
    ]
    stored = prm800k.read_rows(tmp_path, split)
    assert len(stored) == len(raw) == count
    for record, (source, row) in zip(stored, raw):
      assert record.source == source
      assert same(record.row, row)


def test_no_tensorflow(tmp_path, raw_rows):
  """Building and reading imports no TensorFlow: users need not install it."""
  source = write_source(tmp_path / "source", raw_rows)
  program = (
    "import sys; from prm_jax.datasets import prm800k;"
    f"prm800k.Builder(source={str(source)!r}, config='phase2', data_dir={str(tmp_path)!r})"
    ".download_and_prepare();"
    f"assert len(list(prm800k.read_rows({str(tmp_path)!r}, 'train'))) == 3;"
    "assert 'tensorflow' not in sys.modules and 'torch' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def edited(row, path, value):
  """A copy of `row` with `value` at `path`; with no value, without the key."""
  row = copy.deepcopy(row)
  here = row
  for key in path[:-1]:
    here = here[key]
  if value is KeyError:
    del here[path[-1]]
  else:
    here[path[-1]] = value
  return row


STEP = ("label", "steps", 0)
BAD_VALUES = [
  ((*STEP, "completions", 0, "rating"), 2, "label.steps[0].completions[0].rating is 2"),
  ((*STEP, "completions", 0, "rating"), True, "completions[0].rating is True"),
  ((*STEP, "completions", 0, "rating"), "1", "completions[0].rating is '1'"),
  ((*STEP, "completions", 0, "rating"), 0.5, "rating is 0.5"),
  ((*STEP, "completions", 0, "rating"), KeyError, "completions[0].rating is missing"),
  ((*STEP, "completions", 0, "flagged"), "no", "flagged is 'no'"),
  ((*STEP, "completions", 0, "text"), " \n", "the step is empty"),
  ((*STEP, "completions", 0, "text"), 7, "text is 7"),
  ((*STEP, "completions"), [], "label.steps[0].completions is []"),
  ((*STEP, "completions"), None, "label.steps[0].completions is None"),
  ((*STEP, "completions"), ["a"], "label.steps[0].completions[0] is 'a'; expected an object"),
  ((*STEP, "human_completion"), {"text": ""}, "human_completion.text is ''"),
  ((*STEP, "human_completion"), KeyError, "label.steps[0].human_completion is missing"),
  ((*STEP, "chosen_completion"), 1, "chosen_completion is 1; expected null or an index below 1"),
  ((*STEP, "chosen_completion"), -1, "chosen_completion is -1"),
  (STEP, "text", "label.steps[0] is 'text'"),
  (("label", "steps"), [], "label.steps is []"),
  (("label", "steps"), {}, "label.steps is {}; expected a list"),
  (("label", "finish_reason"), "done", "label.finish_reason is 'done'"),
  (("label",), KeyError, "label is missing"),
  (("question",), KeyError, "question is missing"),
  (("question", "problem"), KeyError, "question.problem is missing"),
  (("question", "problem"), "", "question.problem is ''"),
  (("question", "ground_truth_answer"), 5, "question.ground_truth_answer is 5"),
  (("question", "pre_generated_steps"), ["a", None], "question.pre_generated_steps[1] is None"),
  (("is_quality_control_question",), 0, "is_quality_control_question is 0; expected true or false"),
  (("generation",), "7", "generation is '7'; expected an integer or null"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD_VALUES)
def test_a_wrong_value_is_named(raw_rows, path, value, message):
  """A row that breaks the format is an error with file, line, key, value and expectation."""
  row = edited(raw_rows["train"][2], path, value)
  with pytest.raises(prm800k.BadRecord) as error:
    parse_line(line(row), "dir/f.jsonl", 17)
  assert str(error.value).startswith("dir/f.jsonl:17: ")
  assert message in str(error.value)


BAD_LINES = [
  (b'{"labeler": "a", "timesta', "truncated"),
  (line({"a": 1})[:-4], "not JSON"),
  (b'{"labeler": "caf\xe9"}\n', "not UTF-8: byte 0xe9 at byte 17"),
  (b"[1, 2]\n", "the record is [1, 2]; expected a JSON object"),
  (b"problem,step,rating\n", "not JSON"),
  (b'{"a": NaN}\n', "NaN"),
  (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "nested too deeply"),
  (b'{"a": 1' + b"0" * 5000 + b"}\n", "not JSON"),
  (b'\xef\xbb\xbf{"a": 1}\n', "BOM"),
  (b'__import__("os").abort()\n', "not JSON"),
]


@pytest.mark.parametrize(("text", "message"), BAD_LINES)
def test_a_broken_line_is_named(text, message):
  """What is not a JSON object in UTF-8 is an error naming file and line, never a crash."""
  with pytest.raises(prm800k.BadRecord) as error:
    parse_line(text, "f.jsonl", 3)
  assert str(error.value).startswith("f.jsonl:3: ")
  assert message in str(error.value)


@pytest.mark.parametrize("text", ["\\ud800", "x" * 10 + "\\udfff"])
def test_text_that_is_no_unicode(raw_rows, text):
  """JSON can escape half a surrogate pair; that could not be stored or tokenised."""
  row = raw_rows["train"][2]
  row["question"]["problem"] = "PROBLEM"
  bad = line(row).replace(b"PROBLEM", text.encode())
  with pytest.raises(prm800k.BadRecord, match=r"f.jsonl:3: unpaired surrogate"):
    parse_line(bad, "f.jsonl", 3)


def test_unknown_keys_may_not_nest_without_end(raw_rows):
  """Unknown keys are kept, but a bomb of brackets in one is refused."""
  row = raw_rows["train"][2]
  row["bomb"] = json.loads("[" * 200 + "]" * 200)
  with pytest.raises(prm800k.BadRecord, match="nested more than"):
    parse_line(line(row), "f.jsonl", 3)


def test_skip_counts_and_passes_over_bad_records(tmp_path, raw_rows):
  """Under skip the good rows keep their line numbers, and each bad one is counted and quoted."""
  good = line(raw_rows["train"][0])
  path = tmp_path / "f.jsonl"
  long = b'{"a": "' + b"x" * (MAX_LINE_BYTES + 10) + b'"}\n'
  path.write_bytes(b"id,text\n" + good + b'{"a":\n' + b"\n" + long + good + b"\xff\n" + good[:-1])
  skipped = prm800k.BadRecords()
  records = list(prm800k.read_records(path, skipped=skipped))
  assert [r.line for r in records] == [2, 6, 8]
  assert skipped.count == 4
  assert [e.split(":")[1] for e in skipped.examples] == ["1", "3", "5", "7"]
  assert "longer than" in skipped.examples[2]
  with pytest.raises(prm800k.BadRecord, match=r"f.jsonl:1: the file starts with b'id,text"):
    list(prm800k.read_records(path))


@pytest.mark.parametrize("size", [1, 700, 3000, 10**6])
def test_parts_of_a_file(tmp_path, raw_rows, size):
  """Wherever a file is cut, its parts give the rows and the bad lines of the whole, in order."""
  rows = [line(row) for split in raw_rows.values() for row in split]
  path = tmp_path / "f.jsonl"
  path.write_bytes(rows[0] + b"\n{}\n" + b"".join(rows[1:]) + b"[]\n" + rows[0][:-1])
  whole, skipped, skipped_by_parts = prm800k.BadRecords(), prm800k.BadRecords(), []
  expected = list(prm800k.read_records(path, skipped=whole))
  found, sizes = [], []
  for part in parts(path, size):
    skipped_by_parts.append(prm800k.BadRecords())
    found += prm800k.read_records(part, skipped=skipped_by_parts[-1], on_bytes=sizes.append)
  for bad in skipped_by_parts:
    skipped.update(bad)
  assert found == expected and len(found) == 6
  assert skipped == whole and whole.count == 2
  assert sum(sizes) == path.stat().st_size
  assert size > 1 or len(parts(path, size)) == 9  # a part is never less than a line


def test_many_shards(tmp_path, raw_rows, monkeypatch):
  """Rows of many shards, among them empty ones, are in the order of the files."""
  monkeypatch.setattr(prm800k.Builder, "SHARD_BYTES", 1000)
  source = write_source(tmp_path, raw_rows)
  write_source(tmp_path, raw_rows, "phase1")
  (source / "phase1_test.jsonl").write_bytes(b"")
  (source / "phase2_train.jsonl").write_bytes(b"{}\n" * 400 + line(raw_rows["train"][1]))
  builder = prm800k.Builder(source=source, data_dir=tmp_path / "out", on_bad_record="skip")
  builder.download_and_prepare()
  assert builder.info.splits["train"].num_shards > 3
  assert builder.skipped["train"].count == 400 and len(builder.skipped["train"].examples) == 10
  stored = [record.source for record in prm800k.read_rows(tmp_path / "out", "train")]
  assert stored == [*(f"phase1_train.jsonl:{i}" for i in (1, 2, 3)), "phase2_train.jsonl:401"]
  assert len(prm800k.read_rows(tmp_path / "out", "test")) == 2


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n", "git lfs pull"),
    (gzip.compress(b"{}", mtime=0), "this is a gzip file"),
    (b"PAR1\x00\x00", "this is a Parquet file"),
    (b"[\n{}\n]\n", "expected JSON lines"),
  ],
)
def test_another_format_is_recognised(tmp_path, content, message):
  """A Git LFS pointer, which a clone without LFS holds, is called by its name; so are others."""
  path = tmp_path / "phase1_train.jsonl"
  path.write_bytes(content)
  with pytest.raises(prm800k.BadRecord, match=message):
    list(prm800k.read_records(path))


def test_missing_files_are_named(tmp_path, raw_rows):
  """Only the files that the config needs are asked for, and all missing ones are named."""
  source = write_source(tmp_path / "data", raw_rows)
  with pytest.raises(FileNotFoundError, match=r"lacks data/phase1_train.jsonl, data/phase1_test"):
    prm800k.Builder(source=source, config="all", data_dir=tmp_path).download_and_prepare()
  # the same files, given by the folder above
  prm800k.Builder(source=tmp_path, config="phase2", data_dir=tmp_path / "o").download_and_prepare()


def test_an_empty_split_is_an_error(tmp_path, raw_rows):
  """A file without one good row ends in a message that says so, even under skip."""
  source = write_source(tmp_path / "s", raw_rows)
  (source / "phase2_test.jsonl").write_bytes(b"")
  with pytest.raises(ValueError, match=r"'test' has no rows in .*phase2_test.jsonl"):
    prm800k.Builder(source=source, config="phase2", data_dir=tmp_path).download_and_prepare()
  (source / "phase2_test.jsonl").write_bytes(b"{}\n")
  builder = prm800k.Builder(source=source, config="phase2", data_dir=tmp_path, on_bad_record="skip")
  with pytest.raises(ValueError, match=r"'test' has no rows in .*all 1 are bad, .*:1: labeler"):
    builder.download_and_prepare()


@pytest.fixture
def server(tmp_path):
  """A local HTTP server of the folder it returns with its address."""
  folder = tmp_path / "served"
  folder.mkdir()

  class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
      pass

    def send_header(self, keyword, value):
      if keyword == "Content-Length" and (folder / "cut").exists():
        value = str(int(value) + 9)  # the connection ends before all is sent
      super().send_header(keyword, value)

  handler = functools.partial(Quiet, directory=folder)
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{httpd.server_port}/"
    httpd.shutdown()


@pytest.mark.parametrize(
  "damage", ["none", "wrong byte", "truncated", "cut off", "longer", "missing"]
)
def test_downloads_are_verified(tmp_path, raw_rows, server, damage):
  """A download is used only if its size and sha256 are upstream's; the error says what to do."""
  folder, url = server
  write_source(folder / "data", raw_rows)
  infos = {}
  for path in (folder / "data").iterdir():
    content = path.read_bytes()
    infos[f"{url}data/{path.name}"] = tfds.core.download.checksums.UrlInfo(
      size=tfds.core.utils.Size(len(content)),
      checksum=hashlib.sha256(content).hexdigest(),
      filename=path.name,
    )
  victim = folder / "data" / "phase2_test.jsonl"
  if damage == "missing":
    victim.unlink()
  elif damage != "none":
    if damage == "cut off":
      (folder / "cut").touch()
    content = victim.read_bytes()
    victim.write_bytes(
      {
        "wrong byte": content[:-9] + b"X" + content[-8:],
        "truncated": content[:-9],
        "cut off": content[:-9],
        "longer": content + b"\n",
      }[damage]
    )

  class Builder(prm800k.Builder, skip_registration=True):
    name = "prm800k"
    pkg_dir_path = prm800k.Builder._get_pkg_dir_path()
    BASE_URL = url
    url_infos = infos

  builder = Builder(config="phase2", data_dir=tmp_path / "out")
  if damage == "none":
    (tmp_path / "downloads" / "data").mkdir(parents=True)
    (tmp_path / "downloads" / "data" / "phase2_test.jsonl").write_bytes(b"an older, broken one")
    builder.download_and_prepare(download_dir=tmp_path / "downloads")
    assert same(prm800k.read_rows(tmp_path / "out", "train")[0].row, raw_rows["train"][0])
    victim.unlink()  # once downloaded, it is not asked for again
    again = Builder(config="phase2", data_dir=tmp_path / "again")
    again.download_and_prepare(download_dir=tmp_path / "downloads")
  else:
    message = "could not download.*404" if damage == "missing" else "is not upstream's file"
    with pytest.raises(RuntimeError, match=message):
      builder.download_and_prepare(download_dir=tmp_path / "downloads")
    assert not list((tmp_path / "downloads").rglob("phase2_test*"))
    assert not list((tmp_path / "out").rglob("dataset_info.json"))


def test_upstream_table():
  """The sizes and hashes of upstream's files are the published ones."""
  infos = prm800k.Builder.url_infos | math_splits.Builder.url_infos
  sizes = {
    url.rpartition("/prm800k/")[2]: (int(i.size), i.checksum[:8]) for url, i in infos.items()
  }
  assert sizes == {
    "data/phase1_train.jsonl": (7900236, "e9da6a73"),
    "data/phase1_test.jsonl": (829105, "f4b3bc5b"),
    "data/phase2_train.jsonl": (456135365, "1110237f"),
    "data/phase2_test.jsonl": (12240719, "6b172efa"),
    "math_splits/train.jsonl": (10896985, "90d96dae"),
    "math_splits/test.jsonl": (446564, "35dc4108"),
  }


def test_generated_rows_take_the_same_road(tmp_path, raw_rows):
  """Rows from an iterator are checked, stored and read exactly like upstream's."""
  builder = arithmetic_dataset_builder.Builder(
    rows={split: iter(rows) for split, rows in raw_rows.items()}, data_dir=tmp_path
  )
  builder.download_and_prepare()
  assert builder.name == "arithmetic"
  stored = prm800k.read_rows(tmp_path, "test")
  assert [r.source for r in stored] == ["arithmetic_test:1", "arithmetic_test:2"]
  assert same(stored[1].row, raw_rows["test"][1])
  raw_rows["test"][0]["label"]["finish_reason"] = "tired"
  with pytest.raises(prm800k.BadRecord, match="tired"):
    list(prm800k.numbered(raw_rows["test"], "x"))


@pytest.mark.shared_data
def test_math_splits(tmp_path, prm800k_sample):
  """The 500 test problems are read whole, and a damaged line is named."""
  builder = math_splits.Builder(source=prm800k_sample, splits=("test",), data_dir=tmp_path)
  builder.download_and_prepare()
  data = tfds.builder_from_directory(prm800k.find_dataset(tmp_path)).as_data_source("test")
  raw = [json.loads(text) for text in lines(prm800k_sample / "math_splits" / "test.jsonl")]
  assert len(data) == len(raw) == 500
  for row, example in zip(raw, data):
    assert row == {k: v.decode() if isinstance(v, bytes) else int(v) for k, v in example.items()}


def test_math_splits_bad_lines(tmp_path):
  """A missing key or a pointer file is an error naming file and line."""
  path = tmp_path / "test.jsonl"
  path.write_text('{"problem": "p"}\n')
  with pytest.raises(ValueError, match=r"test.jsonl:1: solution is None; expected str"):
    list(math_splits.read_problems(path))
  path.write_text("version https://git-lfs.github.com/spec/v1\n")
  with pytest.raises(ValueError, match="git lfs pull"):
    list(math_splits.read_problems(path))
