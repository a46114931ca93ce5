"""A resumable job over many items, which writes one JSON lines file at its end.

`OUTPUT.journal`, beside the output, has one line for each finished item, with that item's lines of
the output.  A kill can tear only the last line.  The next run drops that line, does the missing
items, and writes the output in the order of the items.  It deletes the journals last, so an output
without a journal is finished.  Several hosts share the items; each has its own journal, on a disk
that all of them see.
"""

import contextlib
import fcntl
import glob
import json
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from prm_jax.runtime import distributed, json_lines, storage

Lines = list[dict[str, Any]]


class OtherRun(ValueError):
  """A journal belongs to a run with other values of the same facts."""


class Journal:
  """The finished items of a job, in a file that survives a kill."""

  def __init__(self, path: pathlib.Path, facts: dict[str, Any]):
    """Opens the journal of the run that `facts` describe.

    Raises:
      OtherRun: it belongs to another run; the message has the facts that differ.
      ValueError: another process has it open, or it is another command's.
    """
    with contextlib.ExitStack() as stack:
      self._file = stack.enter_context(path.open("ab"))
      try:
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        raise ValueError(f"{path}: another process is working on this output") from None
      except OSError:  # some network file systems have no locks
        pass
      self.done, whole = _read(path, facts)
      self._file.truncate(whole)
      if not whole:
        self._write(facts)
      stack.pop_all()

  def add(self, item: int, lines: Lines) -> None:
    """Records an item as done, with its lines of the output."""
    self._write({"item": item, "lines": lines})
    self.done[item] = lines

  def _write(self, entry: dict[str, Any]) -> None:
    self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
    self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    with contextlib.suppress(OSError):  # what could not be written raised an error before
      self._file.close()


def _read(path: pathlib.Path, facts: dict[str, Any]) -> tuple[dict[int, Lines], int]:
  """Returns the lines of each item in a journal, and the length in bytes of its whole lines.

  Raises as `Journal` if it belongs to another run.
  """
  facts, done, whole = json.loads(json.dumps(facts)), {}, 0
  with path.open("rb") as file:
    for line in file:
      if not line.endswith(b"\n"):
        break  # torn by a kill
      # An entry nests keys of the input two levels deeper than the input does.
      entry = json_lines.parse(line, f"{path}", json_lines.MAX_DEPTH + 2)
      if not whole and entry != facts:
        changed = [
          f"{key}: {json_lines.show(entry.get(key))}, now {json_lines.show(facts.get(key))}"
          for key in facts | entry
          if entry.get(key) != facts.get(key)
        ]
        kind = OtherRun if entry.keys() == facts.keys() else ValueError
        raise kind(
          f"{path} is of another run ({'; '.join(changed)}); finish that one with its own "
          "settings, or delete the file"
        )
      if whole:
        done[entry["item"]] = entry["lines"]
      whole += len(line)
  return done, whole


def run(
  output: pathlib.Path,
  count: int,
  facts: dict[str, Any],
  work: Callable[[Journal, Sequence[int]], None],
) -> Lines | None:
  """Does the missing ones of `count` items, and writes the lines of all.  All hosts call it.

  Args:
    facts: everything that the lines depend on; a journal with other facts is an error.
    work: adds to this host's journal the items of `range(host, count, hosts)` that it lacks.

  Returns:
    The lines, on the first host.

  Raises:
    ValueError: there is a journal of another run, or another process works on this output.
    OSError: the hosts do not share the disk of the output.
  """
  host, hosts = jax.process_index(), jax.process_count()
  facts = facts | {"hosts": hosts}
  for journal in journals(output):
    _read(journal, facts)  # raises an error if the journal of any host belongs to another run
  # True if a kill came while the journals were being deleted.
  finished = output.exists() and not all(path(output, i).is_file() for i in range(hosts))
  distributed.check_same(facts | {"output": finished})
  if finished:
    if not distributed.is_first():
      return None
    for journal in journals(output):
      journal.unlink(missing_ok=True)
    return [line for _, line in json_lines.records(output)]
  with contextlib.closing(Journal(path(output, host), facts)) as journal:
    distributed.check_same({"journals": "open"})  # waits for all hosts
    check_shared(output, hosts)
    work(journal, [item for item in range(host, count, hosts) if item not in journal.done])
    distributed.check_same({"items": "done"})
    return write(output, count, hosts, facts) if distributed.is_first() else None


def path(output: pathlib.Path, host: int) -> pathlib.Path:
  """Returns the path of a host's journal."""
  return output.with_name(f"{output.name}.journal" + (f".{host}" if host else ""))


def check_output(output: pathlib.Path) -> None:
  """Makes the folder of the output.

  Raises:
    OSError: the folder cannot be written to, or the output is finished.
  """
  output.parent.mkdir(parents=True, exist_ok=True)
  if not os.access(output.parent, os.W_OK):
    raise PermissionError(f"{output.parent}: cannot be written to")
  if output.exists() and not journals(output):
    raise FileExistsError(f"{output} exists and is finished; delete it to make it again")


def check_shared(output: pathlib.Path, hosts: int) -> None:
  """Raises OSError if the journal of any host is missing."""
  for host in range(hosts):
    if not (journal := path(output, host)).is_file():
      raise FileNotFoundError(
        f"{journal}: the journal of host {host} is not on this host's disk; hosts that share the "
        "work need a disk that all of them see"
      )


def journals(output: pathlib.Path) -> list[pathlib.Path]:
  """Returns the paths of all hosts' journals that exist."""
  name = path(output, 0).name
  found = output.parent.glob(f"{glob.escape(name)}*")
  return [each for each in found if re.fullmatch(r"(\.\d+)?", each.name.removeprefix(name))]


def write(output: pathlib.Path, count: int, hosts: int, facts: dict[str, Any]) -> Lines:
  """Writes the lines of all journals in the order of the items, and deletes the journals."""
  check_shared(output, hosts)
  done, paths = {}, [path(output, host) for host in range(hosts)]
  for journal in paths:
    done |= _read(journal, facts)[0]
  lines = [line for item in range(count) for line in done[item]]
  with storage.written(output) as out:
    out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
  for journal in paths:
    journal.unlink()
  return lines
