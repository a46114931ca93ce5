"""Scripts of the project as jobs of one or several hosts, each a process on the CPU."""

import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from conftest import ENVIRONMENT, ROOT, run_script

from prm_jax.runtime import journal as journal_lib

CONFIG = """
import pathlib, sys
sys.path.insert(0, {tests!r})
import tiny

def config():
  c = tiny.experiment(pathlib.Path({data!r}), language_model_weight=1.0)
  return tiny.change(c, "train", log_every=1, **{train})
"""


def config_file(folder: pathlib.Path, data: pathlib.Path, **train) -> pathlib.Path:
  """Writes a config file of the tiny run with these settings of the section train."""
  path = folder / "config.py"
  path.write_text(CONFIG.format(tests=str(ROOT / "tests"), data=str(data), train=train))
  return path


def free_address() -> str:
  """HOST:PORT with a free port."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{free.getsockname()[1]}"


def start(script: str, *arguments, hosts: int = 1, devices: int = 1, each=None, environment=None):
  """Starts a script on `hosts` processes with `devices` CPU devices in total; the processes.

  Args:
    each: further arguments by host number.
    environment: further environment variables.
  """
  env = ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(devices // hosts)} | (environment or {})
  address, processes = free_address(), []
  for i in range(hosts):
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    if hosts > 1:
      command += [f"--hosts.coordinator_address={address}", f"--hosts.num_processes={hosts}"]
      command += [f"--hosts.process_id={i}"]
    log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - lives as long as the process
    command += (each or {}).get(i, [])
    processes.append(subprocess.Popen(command, env=env, stderr=log, cwd=ROOT))
    processes[-1].log = log
  return processes


def said(process) -> str:
  """A process's standard error so far."""
  return pathlib.Path(process.log.name).read_text()


def finish(processes, code: int = 0, timeout: float = 300.0) -> list[str]:
  """The standard error of each process; asserts that all end with this exit code."""
  for process in processes:
    assert process.wait(timeout) == code, said(process)
  return [*map(said, processes)]


def wait_for(reached: Callable[[], bool], processes, seconds: float = 240.0) -> None:
  """Waits until `reached()` is true, while the processes run."""
  end = time.monotonic() + seconds
  while not reached():
    if time.monotonic() > end or any(process.poll() is not None for process in processes):
      kill(processes)
      raise AssertionError("\n".join(map(said, processes)))
    time.sleep(0.1)


def kill(processes) -> None:
  for process in processes:
    process.send_signal(signal.SIGKILL)
    process.wait()


def kill_again(kills: int, script: str, flags, out: pathlib.Path) -> None:
  """Kills a job with a journal, starts it again, `kills` times or until its end, and finishes it.

  Four in five kills come while it works, right after the journal has grown.  Asserts that the
  output is then there, and no journal.
  """
  rng, sizes, journal = random.Random(0), [], journal_lib.path(out, 0)
  size = lambda: journal.stat().st_size if journal.exists() else 0
  for kill_number in range(kills):
    before = size()
    processes = start(script, *flags, f"--output={out}")
    if kill_number % 5 == 4:  # at any time
      time.sleep(rng.uniform(0, 8))
    else:
      wait_for(lambda before=before: size() > before or out.exists(), processes)
      time.sleep(rng.uniform(0, 0.3))
    kill(processes)
    sizes.append(size())
    if out.exists():
      break
  assert sizes[0] and len({*sizes}) > kills // 2  # most kills came while it worked
  if journal.exists() or not out.exists():
    run_script(script, *flags, f"--output={out}")
  assert out.exists() and not journal.exists()
