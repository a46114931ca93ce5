"""Scoring that is killed continues from the batches that were done."""

import pytest
import tiny
from conftest import call_script, read_lines, write_lines

from prm_jax.scoring import batching
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


@pytest.mark.parametrize(
  ("script", "flags"),
  [
    ("score.py", ["--input={data}/candidates.jsonl", "--merge=False"]),
    ("evaluate.py", ["--data_dir={data}", "--split=train"]),
  ],
)
def test_a_stopped_run_continues_from_its_batches(
  prm_run, arithmetic_data, tmp_path, forwards, script, flags
):
  """The next run computes only the batches that are missing, and writes what a whole run does."""
  flags = [f"--checkpoint={prm_run}", *(flag.format(data=arithmetic_data) for flag in flags)]
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


def test_another_run_starts_over(prm_run, arithmetic_data, tmp_path, forwards, monkeypatch):
  """Batches of other flags, inputs or weights are not used."""
  lines = read_lines(arithmetic_data / "candidates.jsonl")
  source = write_lines(tmp_path / "in.jsonl", lines)
  flags = ["score.py", f"--checkpoint={prm_run}", f"--input={source}", f"--output={tmp_path}/o"]
  other, flags = [*flags, "--merge=False", "--skip_cut_off"], [*flags, "--merge=False"]
  every = taken(forwards, *flags)
  taken(forwards, *flags, stop=3)
  assert taken(forwards, *other, stop=3) == 2
  taken(forwards, *flags, stop=3)
  write_lines(source, lines[::-1])
  assert taken(forwards, *flags, stop=3) == 2
  monkeypatch.setattr(Scorer, "weights", property(lambda self: self.params["head"] + 1))
  assert taken(forwards, *flags) == every
