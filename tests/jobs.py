"""Scripts of the project as jobs of one or several hosts, which are processes on the CPU."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from conftest import CACHE, ROOT


def free_address() -> str:
  """HOST:PORT with a free port."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{free.getsockname()[1]}"


def start(script: str, *arguments, hosts: int = 1, devices: int = 1, each=None, environment=None):
  """Starts a script on `hosts` processes with `devices` CPU devices in total; returns them.

  Args:
    each: further arguments of single hosts, by number.
    environment: further environment variables.
  """
  variables = {
    "PATH": "/usr/bin:/bin",
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(devices // hosts),
    "JAX_COMPILATION_CACHE_DIR": CACHE,
  }
  address, processes = free_address(), []
  for i in range(hosts):
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    if hosts > 1:
      command += [f"--hosts.coordinator_address={address}", f"--hosts.num_processes={hosts}"]
      command += [f"--hosts.process_id={i}"]
    command += (each or {}).get(i, [])
    processes.append(
      subprocess.Popen(
        command, env=variables | (environment or {}), stderr=subprocess.PIPE, text=True, cwd=ROOT
      )
    )
  return processes


def finish(processes, code: int = 0, timeout: float = 300.0) -> list[str]:
  """Standard error of each process; asserts that all end with this exit code."""
  said = [process.communicate(timeout=timeout)[1] for process in processes]
  for process, text in zip(processes, said):
    assert process.returncode == code, text
  return said


def wait_for(there: Callable[[], bool], processes, seconds: float = 240.0) -> None:
  """Waits until `there()` is true, while the processes run."""
  end = time.monotonic() + seconds
  while not there():
    for process in processes:
      if process.poll() is not None or time.monotonic() > end:
        kill(processes)
        raise AssertionError(process.communicate()[1])
    time.sleep(0.1)


def wait_for_line(text: str, processes, seconds: float = 240.0) -> None:
  """Waits until the first process has printed a line with this text, while all of them run."""
  timer = threading.Timer(seconds, kill, [processes])
  timer.start()
  try:
    said = []
    for line in processes[0].stderr:  # ends with the process
      said.append(line)
      if text in line:
        return
  finally:
    timer.cancel()
  kill(processes)
  raise AssertionError("".join(said))


def kill(processes) -> None:
  for process in processes:
    process.send_signal(signal.SIGKILL)
