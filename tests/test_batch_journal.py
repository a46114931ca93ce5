"""Scoring that is killed continues from the batches that were done."""

import jax.numpy as jnp
import pytest
import tiny
from conftest import call_script, read_lines, write_lines

from prm_jax import config as config_lib
from prm_jax.input_pipeline import token_tree
from prm_jax.model import sharding as sharding_lib
from prm_jax.scoring import batch_journal, batching
from prm_jax.scoring.scorer import Scorer


@pytest.fixture
def forwards(monkeypatch):
  """The number of batches computed, which stops the run when it reaches `forwards.stop`."""

  class Forwards:
    count, stop = 0, 0

  def counted(self, batch, forward=Scorer.forward):
    Forwards.count += 1
    if Forwards.count == Forwards.stop:
      raise OSError("stopped")
    return forward(self, batch)

  monkeypatch.setattr(Scorer, "forward", counted)
  monkeypatch.setattr(batching, "BATCH_TOKENS", 1)
  with tiny.first_device():
    yield Forwards


def taken(forwards, script, *flags, stop=0):
  """Runs a script, which fails at the batch `stop`; returns how many batches it computed."""
  forwards.count, forwards.stop = 0, stop
  call_script(script, *flags, code=1 if stop else 0)
  return forwards.count - bool(stop)


@pytest.fixture
def source(arithmetic_data, tmp_path):
  """A file of candidates of problems that share no prefix, which need several batches."""
  lines = read_lines(arithmetic_data / "candidates.jsonl")
  lines = [line | {"problem": f"{i}: {line['problem']}"} for i, line in enumerate(lines)]
  return write_lines(tmp_path / "in.jsonl", lines)


@pytest.mark.parametrize("script", ["score.py", "annotate.py", "evaluate.py"])
def test_a_stopped_run_continues_from_its_batches(
  prm_run, arithmetic_data, source, tmp_path, forwards, script
):
  """The next run computes only the batches that are missing, and writes what a whole run does."""
  flags = [f"--checkpoint={prm_run}", f"--input={source}"]
  if script == "evaluate.py":
    flags[1:] = [f"--data_dir={arithmetic_data}", "--split=train"]
  every = taken(forwards, script, *flags, f"--output={tmp_path}/whole/o")
  assert every > 4
  stopped = (script, *flags, f"--output={tmp_path}/stopped/o")
  assert taken(forwards, *stopped, stop=3) == 2
  assert [path.name for path in (tmp_path / "stopped").iterdir()] == [".o.journal"]
  assert taken(forwards, *stopped, stop=3) == 2  # the host is a batch ahead: one was done before
  assert taken(forwards, *stopped) == every - 2
  whole, resumed = (
    {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
    for name in ("whole", "stopped")
  )
  assert whole == resumed


@pytest.fixture
def stopped(prm_run, source, tmp_path, forwards):
  """The flags of a run of score.py that was stopped, and its number of batches.

  One of them is in the journal.
  """
  flags = ["score.py", f"--checkpoint={prm_run}", f"--input={source}"]
  every = taken(forwards, *flags, f"--output={tmp_path}/whole")
  flags.append(f"--output={tmp_path}/o")
  assert taken(forwards, *flags, stop=3) == 2
  return flags, every


def changed_input(monkeypatch, source):
  write_lines(source, read_lines(source)[::-1])


def longer_batches(monkeypatch, source):
  monkeypatch.setattr(batching, "BATCH_TOKENS", 256)


def other_weights(monkeypatch, source):
  identity = Scorer.identity
  monkeypatch.setattr(Scorer, "identity", lambda self: identity(self) | {"weights": "other"})


def another_kind_of_model(monkeypatch, source):
  monkeypatch.setattr(Scorer, "identity", lambda self: {"sha256": "of a public model"})


def torn_journal(monkeypatch, source):
  journal = source.parent / ".o.journal"
  journal.write_bytes(journal.read_bytes()[:-9])


CHANGES = changed_input, longer_batches, other_weights, another_kind_of_model, torn_journal


def test_a_moved_model_is_the_same_model(prm_run, tmp_path):
  """The name of a model's folder is not part of its identity; the hashes of its files are."""
  call_script("export.py", f"--checkpoint={prm_run}", f"--output={tmp_path}/a")
  before = Scorer.load_model(tmp_path / "a").identity()
  (tmp_path / "a").rename(tmp_path / "b")
  assert Scorer.load_model(tmp_path / "b").identity() == before
  assert before["sha256"]


@pytest.mark.parametrize("change", CHANGES)
def test_batches_of_other_contents_or_weights_are_not_used(
  stopped, source, tmp_path, forwards, monkeypatch, change
):
  """Everything is computed again if the first batch is another one, or was not written whole."""
  flags, _ = stopped
  change(monkeypatch, source)
  fresh = taken(forwards, *flags[:-1], f"--output={tmp_path}/fresh")
  assert taken(forwards, *flags) == fresh
  assert (tmp_path / "o").read_bytes() == (tmp_path / "fresh").read_bytes()
  assert not (tmp_path / ".o.journal").exists()


def test_batches_before_a_change_are_used(stopped, source, forwards):
  """Settings that change no batch, such as a line's other fields, do not compute it again."""
  flags, every = stopped
  write_lines(source, [line | {"note": "new"} for line in read_lines(source)])
  assert taken(forwards, *flags) == every - 1


def test_a_result_is_of_its_own_batch(tmp_path, monkeypatch):
  """Runs that are killed on an input that changes leave no result that another batch could take.

  Here the results of the second input's end, in the first run, follow those of a shorter second run
  that was killed earlier.
  """
  monkeypatch.setattr(batching, "BATCH_TOKENS", 64)
  with tiny.first_device():
    mesh = sharding_lib.make_mesh(config_lib.Mesh())
    trees = [token_tree.chain([i] * 32, [31]) for i in range(24)]

  def read(count, stop):
    """Reads the first `count` trees, then the last 16, or stops after so many batches."""
    left = [stop]

    def forward(batch):
      if not left[0]:
        raise KeyboardInterrupt
      left[0] -= 1
      tokens = jnp.take_along_axis(batch.tokens, batch.read_positions, 1)
      return -tokens[..., None, None].astype(jnp.float32)

    with batch_journal.beside(tmp_path / "out") as journal:
      journal.open({}, mesh)
      for part in trees[:count], trees[8:]:
        names = [str(each.tokens[0]) for each in part]
        out = batching.read(part, names, forward, mesh, 32, journal=journal)
    return [round(-each.item()) for each in out]

  for count, stop in ((8, 10), (6, 6)):
    with pytest.raises(KeyboardInterrupt):
      read(count, stop)
  assert read(6, stop=99) == [*range(8, 24)]


def test_an_undefined_result_is_not_recorded(stopped, forwards, monkeypatch):
  """A run whose model gave NaN computes the batch again."""
  flags, every = stopped
  counted = Scorer.forward
  with monkeypatch.context() as patch:
    patch.setattr(Scorer, "forward", lambda self, batch: counted(self, batch) * jnp.nan)
    call_script(*flags, code=1)
  assert taken(forwards, *flags) == every - 1
