"""Damaged input for test_fuzz.py: mutations, and how each kind of file is read and checked.

A target, such as `record`, writes one mutated input into an empty folder and reads it.  It returns
None if the project accepts the input and reads what an independent reader does; otherwise it raises
the project's error, or AssertionError.
"""

import ast
import contextlib
import copy
import dataclasses
import functools
import gzip
import io
import json
import math
import os
import pathlib
import random
import re
import shutil
import sys
import zipfile

import conftest
import numpy as np
import safetensors.numpy
import scored_files
import sentencepiece
import tiny
import tokenizers as hf

from prm_jax import config as config_lib
from prm_jax.datasets.prm800k import records
from prm_jax.datasets.stepwise import records as stepwise_records
from prm_jax.evaluation import process_bench, report, reranking
from prm_jax.evaluation.scored_samples import read_scored_samples
from prm_jax.input_pipeline import tokenizers
from prm_jax.pretrained import export
from prm_jax.runtime import command_line, json_lines
from prm_jax.scoring.scorer import Scorer

TEXTS = ["What is 2 + 3?", "a" * 40 + "!", "\u00e9\u4e8c \U0001f600\n\n  ", "</s><s> <|x|>", ""]
REGEXES = ["(a+)+$", "(a|aa)+$", "(.*)*x", "(", "[", "\\p{Zz}", "(?=a*a*a*a*b)", "a{9999999}"]
VALUES = [None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308]
VALUES += [math.nan, math.inf, -math.inf, "", " ", "x", "1", "\x00", "\u202e", "cm\u00b2"]
VALUES += ["x" * 10**5, [], [[]], {}, {"-1": 1}, [None] * 1000, {"a": {"b": [1]}}]
VALUES += ["\u2028", "NaN", [0.1, 0.2]]


DEEP = re.compile(r'"<nested (\d+)>"')  # json.dumps cannot write lists nested so deep


def deep(count):
  """What `dumped` replaces by lists nested so deep."""
  return f"<nested {count}>"


def places(value, path=()):
  """The path of every value in a JSON document."""
  yield path
  if isinstance(value, dict | list):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
      yield from places(inner, (*path, key))


def edited(value, draw: random.Random):
  """A document with one value deleted, doubled or replaced."""
  value = copy.deepcopy(value)
  path = draw.choice([*places(value)])
  if not path:
    return draw.choice(VALUES)
  holder = functools.reduce(lambda inner, key: inner[key], path[:-1], value)
  kind = draw.random()
  if kind < 0.2:
    del holder[path[-1]]
  elif kind < 0.3 and isinstance(holder, list):
    holder.insert(path[-1], copy.deepcopy(holder[path[-1]]))
  elif kind < 0.4:
    holder[path[-1]] = deep(draw.choice([3, 50, 99, 150, 900, 990, 1010, 3000]))
  else:
    holder[path[-1]] = draw.choice(VALUES)
  return value


def dumped(value, draw: random.Random) -> bytes:
  """A document as JSON, with or without escapes."""
  text = json.dumps(value, ensure_ascii=draw.random() < 0.5)
  text = DEEP.sub(lambda match: "[" * int(match[1]) + "1" + "]" * int(match[1]), text)
  return text.encode(errors="surrogatepass")


def damaged(data: bytes, draw: random.Random) -> bytes:
  """Bytes with a few of them changed, cut, doubled, removed or put before."""
  for _ in range(draw.choice([1, 1, 2, 5])):
    at, end = draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)
    kind = draw.randrange(7)
    if kind <= 1 and data:
      at = min(at, len(data) - 1)
      data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    elif kind == 2:
      data = data[:at]
    elif kind == 3:
      data = data[:at] + data[min(at, end) : min(at, end) + 40] + data[at:]
    elif kind == 4:
      data = data[:at] + data[at + draw.randrange(1, 40) :]
    elif kind == 5:
      data = draw.choice([b"\xef\xbb\xbf", b"\n \r\n", b"\x1f\x8b", b"PAR1", b"\x00"]) + data
    else:
      data = data.replace(b"\n", draw.choice([b"\r\n", b"\n\n", b"\r", b""]))
  return data


def lines_file(folder, rows, draw) -> pathlib.Path:
  """A file of JSON lines with one edited row, or damaged, or compressed."""
  rows = [dumped(row, draw) for row in rows]
  chosen = draw.randrange(len(rows))
  if draw.random() < 0.7:
    rows[chosen] = dumped(edited(json.loads(rows[chosen]), draw), draw)
  data = b"\n".join(rows) + b"\n"
  if draw.random() < 0.4:
    data = damaged(data, draw)
  path = folder / draw.choice(["in.jsonl", "in.jsonl", "in.jsonl.gz"])
  if path.suffix == ".gz" and draw.random() < 0.9:
    data = gzip.compress(data)
    data = damaged(data, draw) if draw.random() < 0.3 else data
  path.write_bytes(data)
  return path


def json_of(path):
  """(line number, object) of each line that is not blank, by the json module."""
  data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
  lines = [(i, line) for i, line in enumerate(data.split(b"\n"), 1) if line and not line.isspace()]
  return [(i, json.loads(line.decode("utf-8-sig"))) for i, line in lines]


def record(folder, base, draw):
  rows = [conftest.phase1_row(), conftest.phase2_row(), conftest.gave_up_row()]
  path = lines_file(folder, rows, draw)
  read = [*records.read_records(path)]
  expected = json_of(path)
  assert [r.source for r in read] == [f"{path.name}:{i}" for i, _ in expected]
  for ours, (_, row) in zip(read, expected):
    assert json.loads(ours.json) == row or "NaN" in str(row)
    assert ours.solution.question.problem == row["question"]["problem"]
    for step, given in zip(ours.solution.label.steps, row["label"]["steps"], strict=True):
      assert step.chosen_completion == given["chosen_completion"]
      theirs = [(c["text"], c["rating"]) for c in given["completions"] or []]
      assert [(c.text, c.rating) for c in step.completions or []] == theirs


def scored(folder, base, draw):
  rows = [*scored_files.generated(3, 3, draw.randrange(100))]
  if draw.random() < 0.3:
    rows = [*scored_files.in_groups(rows)]
  path = lines_file(folder, rows, draw)
  samples = read_scored_samples([path])
  flat = []
  for _, row in json_of(path):
    shared = {k: v for k, v in row.items() if k != "samples"}
    many = row["samples"] if "samples" in row and "is_correct" not in row else [{}]
    flat += [
      shared | each | ({"orm_score": each["score"]} if "score" in each else {}) for each in many
    ]
  assert len(flat) == len(samples.slots)
  assert samples.correct.ravel()[samples.slots].tolist() == [r["is_correct"] for r in flat]
  at = [int(slot) // samples.correct.shape[1] for slot in samples.slots]
  assert [samples.problems[p] for p in at] == [r["problem"] for r in flat]
  if samples.orm is not None:
    assert samples.orm.ravel()[samples.slots].tolist() == [r["orm_score"] for r in flat]
  if samples.step_probs is not None:
    probs = [[r.get(k, 0) for k in ("-1", "0", "1")] for row in flat for r in row["rating_probs"]]
    assert samples.step_probs.tolist() == probs
  if draw.random() < 0.02:
    made, scores = reranking.rerank(samples, reranking.Options(**scored_files.QUICK))
    report.contents(made, report.solutions(samples, scores, made)[0])


def bundle(folder, base, draw):
  source, path = base / "bundle.npz", folder / "bundle.npz"
  if draw.random() < 0.4:
    path.write_bytes(damaged(source.read_bytes(), draw))
  else:
    with np.load(source) as stored:
      arrays = dict(stored)
    name = draw.choice(sorted(arrays))
    x = arrays[name]
    changes = [x[:-1], x.T, x.astype(np.float16), x.astype("U5")]
    changes += [x * 0 - 1, x[..., None], x * 0 + 200]
    changes += [np.full(x.shape, draw.choice([np.nan, np.inf, 2.0**60, -1.0])), np.zeros((0, 0))]
    if name == "header":
      header = edited(json.loads(x.tobytes()), draw)
      changes = [np.frombuffer(dumped(header, draw), np.uint8)]
    arrays[name] = draw.choice(changes)
    if draw.random() < 0.2:
      del arrays[name]
    saved = np.savez_compressed if draw.random() < 0.1 else np.savez
    saved(path, **arrays)
  samples = read_scored_samples([path])
  with zipfile.ZipFile(path) as archive:
    for member in archive.namelist():
      if member != "header.npy":
        theirs = np.lib.format.read_array(io.BytesIO(archive.read(member)))
        ours = getattr(samples, member.removesuffix(".npy"))
        np.testing.assert_array_equal(ours, theirs)
  made, scores = reranking.rerank(
    samples, reranking.Options(**scored_files.QUICK, methods=("random",))
  )
  report.contents(made, report.solutions(samples, scores, made)[0])


NUMBERS = ["0", "1", "-1", "1e9", "1e400", "inf", "nan", "-inf", "0.5", "1000000000000", "", "x"]
NUMBERS += ["True", "None", "0x10", "1_000", "\\n", "\\q", "s", "full", "float32"]
NUMBERS += ["\u0663", "1e-320"]


def config(folder, base, draw):
  known = config_lib.settings(config_lib.Experiment(), "nothing")
  key, text = draw.choice(sorted(known)), draw.choice(NUMBERS)
  section, name = key.split(".")
  if draw.random() < 0.5:  # a config file
    with contextlib.suppress(ValueError, SyntaxError):
      text = repr(ast.literal_eval(text))
    path = folder / "config.py"
    made = f"{section.title()}({name}={text})"
    path.write_text(
      "from prm_jax.config import *\n"
      + draw.choice(["", "def f(:\n", "\n", "raise OSError\n"])
      + f"def config():\n  return Experiment({section}={made})\n"
    )
    value = getattr(getattr(command_line.read(str(path)), section), name)
    expected = ast.literal_eval(text)
  else:
    flag = f"--config.{draw.choice([key, key, key, key[:-1], 'optim.lr'])}"
    argv = sys.argv
    sys.argv = ["script.py", f"--config={conftest.ROOT}/configs/arithmetic.py", f"{flag}={text}"]
    output = io.StringIO()
    try:
      with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        args = command_line.parse(Args)
    except SystemExit as end:
      message = f"{output.getvalue()}{end.code if isinstance(end.code, str) else ''}"
      named = flag in message or f"{section}.{name}" in message
      raise SystemExit(f"{folder if named else ''}{message}") from None
    finally:
      sys.argv = argv
    value = getattr(getattr(args.config, section), name)
    kind = type(known[key])
    expected = (text == "True") if kind is bool else text
    if key in ("data.separator", "init.head_tokens"):
      expected = config_lib.unescaped(text)
    if kind in (int, float):
      expected = kind(text)
    elif kind is tuple:
      expected = (float(expected) if key == "loss.class_weights" else expected,)
  assert value == expected, (key, text, value)
  assert not isinstance(value, float) or math.isfinite(value), (key, value)


@dataclasses.dataclass(frozen=True)
class Args:
  config: config_lib.Experiment = config_lib.Experiment()


def damage_one(source, folder, draw) -> pathlib.Path:
  """A copy of a directory with one of its files edited, damaged, emptied or removed."""
  copied = shutil.copytree(source, folder / "copy")
  path = draw.choice(sorted(p for p in copied.rglob("*") if p.is_file()))
  data, kind = path.read_bytes(), draw.random()
  if kind < 0.05:
    path.unlink()
  elif kind < 0.1:
    path.write_bytes(b"")
  elif kind < 0.7 and data[:1] == b"{" and b"\n{" not in data:
    path.write_bytes(dumped(edited(json.loads(data), draw), draw))
  else:
    path.write_bytes(damaged(data, draw))
  return copied


def checkpointed(folder, base, draw):
  workdir = damage_one(base / "run", folder, draw)
  params = Scorer.load(str(workdir)).params
  with np.load(base / "params.npz") as stored:
    for name, x in stored.items():
      ours = functools.reduce(lambda inner, key: inner[key], name.split("."), params)
      np.testing.assert_array_equal(np.asarray(ours), x)


def model(folder, base, draw):
  directory = damage_one(base / "exported", folder, draw)
  scorer = Scorer.load_model(directory)
  tensors = safetensors.numpy.load_file(directory / "model.safetensors")
  np.testing.assert_array_equal(scorer.params["embedding"], tensors["model.embed_tokens.weight"])
  if scorer.params["head"].any():
    np.testing.assert_array_equal(np.asarray(scorer.params["head"]).T, tensors["score.weight"])
  values = json.loads((directory / "config.json").read_text("utf-8-sig"))
  assert scorer.config.norm_epsilon == values.get("rms_norm_eps", 1e-6)
  assert scorer.config.layers == values["num_hidden_layers"]
  contract = json.loads((directory / "prm_jax.json").read_text("utf-8-sig"))
  assert list(scorer.contract.classes) == contract["classes"]
  scorer.encode("What is 2 + 3?", ["5"])


def tokenizer(folder, base, draw):
  kind = draw.choice(["json", "json", "regex", "sentencepiece"])
  source = base / ("sentencepiece" if kind == "sentencepiece" else "json")
  if kind == "regex":
    directory = shutil.copytree(source, folder / "copy")
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    pattern = {"Regex": draw.choice(REGEXES)}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    values["pre_tokenizer"] = split
    if draw.random() < 0.3:
      values["normalizer"] = {"type": "Replace", "pattern": pattern, "content": "b"}
    path.write_text(json.dumps(values))
  else:
    directory = damage_one(source, folder, draw)
  ours = tokenizers.load(directory)
  companions = [name for name in tokenizers.COMPANIONS if (directory / name).is_file()]
  for text in TEXTS:
    ids = ours.encode(text)
    assert all(0 <= i < max(ours.vocab_size, 1) for i in ids)
    if companions and kind != "regex":
      continue  # they may add tokens
    if ours.kind == "tokenizer.json":
      theirs = hf.Tokenizer.from_file(str(directory / "tokenizer.json"))
      theirs.no_truncation(), theirs.no_padding()
      theirs.encode_special_tokens = True
      assert ids == theirs.encode(text, add_special_tokens=False).ids
    else:
      theirs = sentencepiece.SentencePieceProcessor(str(directory / "tokenizer.model"))
      assert ids == theirs.EncodeAsIds(text)


FORMS = {  # of labelled steps: labels as given, and as they are stored
  "binary": ([[True, None], [False]], lambda x: 1 if x else -1),
  "ratings": ([[1, 0], [-1]], lambda x: x),
  "soft": ([[0.25, 1], [0.5]], lambda x: (1 - x, x)),
  "counts": ([[[1, 4], [3, 3]], ["2 of 3"]], None),
}


def labelled_steps(folder, base, draw):
  kind = draw.choice(sorted(FORMS))
  rows = [{"problem": "p", "steps": ["a"] * len(x), "labels": x} for x in FORMS[kind][0]]
  if kind == "binary" and draw.random() < 0.7:
    rows[0] = {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]}
    tagged = "p Step 1: a ки\nStep 2: b ки"
    rows[1] = {"input": tagged, "label": tagged.replace("ки", "+", 1).replace("ки", "-")}
  path = lines_file(folder, rows, draw)
  rows = json_lines.records(path)
  lines = [(*stepwise_records.parse(row, where), where) for where, row in rows]
  kind = stepwise_records.kind_of(lines)
  for (solution, _, _), (_, theirs) in zip(lines, json_of(path), strict=True):
    labels = [stepwise_records.label(value, kind) for value in solution.labels]
    if "labels" in theirs:
      texts = theirs.get("completions", theirs.get("steps"))
      assert solution.steps == texts and len(labels) == len(texts)
      if kind != "counts":
        stored = FORMS[kind][1]
        assert labels == [None if x is None else stored(x) for x in theirs["labels"]]


def judged_steps(folder, base, draw):
  right = [{"-1": 0.25, "0": 0.25, "1": 0.5}] * 2
  rows = [
    {"id": f"math-{i}", "problem": "p", "steps": ["a", "b"], "label": i - 1, "rating_probs": right}
    for i in range(3)
  ]
  path = lines_file(folder, rows, draw)
  solutions = [*process_bench.solutions(json_lines.records(path), "positive")]
  for each, (_, theirs) in zip(solutions, json_of(path), strict=True):
    assert each.first_error == theirs["label"] and each.steps == theirs["steps"]
    probs = [[row.get(name, 0) for name in ("-1", "0", "1")] for row in theirs["rating_probs"]]
    assert each.probs.tolist() == probs
  if draw.random() < 0.05:
    process_bench.evaluate(solutions, 0.5)


TARGETS = {  # with their shares of the inputs
  "records": (record, 0.2),
  "scored samples": (scored, 0.2),
  "labelled steps": (labelled_steps, 0.05),
  "judged steps": (judged_steps, 0.05),
  "bundles": (bundle, 0.1),
  "configs": (config, 0.05),
  "checkpoints": (checkpointed, 0.05),
  "exported models": (model, 0.1),
  "tokenizers": (tokenizer, 0.2),
}


def prepare(base: pathlib.Path, run: pathlib.Path) -> None:
  """Writes the inputs that are mutated: a copy of the run, its export, a bundle and tokenizers."""
  shutil.copytree(run, base / "run")
  with tiny.first_device():
    scorer = Scorer.load(str(run))
  flat = {}
  for name, x in scorer.params.items():
    flat |= {f"{name}.{k}": v for k, v in x.items()} if isinstance(x, dict) else {name: x}
  np.savez(base / "params.npz", **flat)
  files = scorer.tokenizer.files()
  export.write(
    base / "exported",
    scorer.params,
    scorer.config,
    scorer.vocab_size,
    contract=scorer.contract,
    files=files,
  )
  (base / "sentencepiece").mkdir()
  scorer.tokenizer.save(base / "sentencepiece")
  samples = scored_files.samples_of(base / "scored.jsonl", scored_files.generated(4, 4))
  scored_files.bundled(samples, base / "bundle.npz")
  bpe = hf.Tokenizer(hf.models.BPE(unk_token="[UNK]"))
  bpe.pre_tokenizer = hf.pre_tokenizers.Whitespace()
  trainer = hf.trainers.BpeTrainer(vocab_size=200, special_tokens=["[UNK]", "<s>", "</s>"])
  bpe.train_from_iterator([text for text in TEXTS if text] * 5, trainer)
  (base / "json").mkdir()
  bpe.save(str(base / "json" / "tokenizer.json"))
  added = {"3": {"content": "</s>", "special": True}}
  settings = {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "added_tokens_decoder": added}
  (base / "json" / "tokenizer_config.json").write_text(json.dumps(settings))


def attempt(kind: str, seed: int, folder: pathlib.Path, base: pathlib.Path) -> tuple[str, str]:
  """("refused", its message), ("accepted", "") or ("failed", why)."""
  folder.mkdir()
  try:
    TARGETS[kind][0](folder, base, random.Random(f"{kind} {seed}"))
    return "accepted", ""
  except (ValueError, OSError, SystemExit) as error:
    text = str(error)
    if len(text) > 3000 or "Traceback" in text or str(folder) not in text:
      return "failed", f"{type(error).__name__}: unclear: {text[:500]!r}"
    return "refused", text
  except BaseException as error:
    return "failed", f"{type(error).__name__}: {str(error)[:500]}"
  finally:
    shutil.rmtree(folder)


def worker(pipe, folder: str, base: str) -> None:
  """Attempts the jobs that come through the pipe and sends each one's verdict."""
  sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
  with tiny.first_device():
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
      pipe.send(attempt(*job, pathlib.Path(folder) / "input", pathlib.Path(base)))
