"""A worker process of `workers`: `python -m prm_jax.evaluation.answers.worker MEMORY SECONDS`."""

import functools
import json
import os
import resource
import sys


def _at_most(kind: int, limit: int) -> int:
  """Returns the limit, or this process's hard limit if that is lower."""
  hard = resource.getrlimit(kind)[1]
  return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def main() -> None:
  """Judges the jobs on standard input, one JSON line each, until the input ends."""
  memory, seconds = map(int, sys.argv[1:])
  out = os.fdopen(os.dup(1), "w")  # libraries print to standard error
  os.dup2(2, 1)
  from prm_jax.evaluation.answers import math_verify_judge, string_graders

  judges = {
    "math_verify": math_verify_judge.judge,
    "openai": lambda a, b: "equal" if string_graders.openai_equal(a, b) else "different",
  }
  most = _at_most(resource.RLIMIT_AS, memory)
  resource.setrlimit(resource.RLIMIT_AS, (most, most))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  sys.set_int_max_str_digits(5_000)

  def send(kind: str, value: str = "") -> None:
    print(json.dumps([kind, value]), file=out, flush=True)

  math_verify_judge.reads = functools.partial(send, "reads")
  send("ready")
  for line in sys.stdin:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + seconds
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]  # `ulimit -t` may have set one
    resource.setrlimit(resource.RLIMIT_CPU, (_at_most(resource.RLIMIT_CPU, limit), hard))
    job = json.loads(line)
    try:
      verdict = judges[job.pop("grader")](**job)
    except MemoryError:
      verdict = "undecided: memory"
    except RecursionError:
      verdict = "undecided: nested too deeply"
    except Exception as error:  # sympy raises errors of any kind
      verdict = f"undecided: {type(error).__name__}"
    send("verdict", verdict)


if __name__ == "__main__":
  main()
