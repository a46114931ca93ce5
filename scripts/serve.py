"""Serves the scores of a trained model, or of a published one, over HTTP.

  python scripts/serve.py --checkpoint=runs/prm --port=8000
  python scripts/serve.py --model=Qwen2.5-Math-PRM-7B --readout=qwen2.5-math-prm --dtype=bfloat16

  curl http://127.0.0.1:8000/score -d '{"solutions": [{"problem": "1 + 2?", "steps": ["3"]}]}'

An answer has the `rating_probs` and `prm_score` of each solution (`orm_score` of an outcome model),
the numbers that score.py writes.  Solutions of many requests share batches.  The server prints its
address when it is ready; --port=0 takes a free port.  On SIGTERM or Ctrl-C it answers all accepted
requests, then stops.  docs/serving.md describes the requests and their limits.

There is no password and no encryption: leave --host as it is, or put a proxy in front.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import asyncio
import dataclasses
import sys
from typing import Annotated

import msgspec

from prm_jax.runtime import command_line
from prm_jax.scoring import options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args(options.RewardModel):
  host: str = "127.0.0.1"  # address to listen on
  port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000  # 0: a free port


def main() -> None:
  args = command_line.parse(Args, __doc__)
  args.check_model()
  from prm_jax.runtime import progress
  from prm_jax.scoring import service

  listener = service.listen(args.host, args.port)  # fails before the model is loaded
  with progress.waiting(f"loading {args.name}"):
    scorer = args.load()
  print(f"steps end with {scorer.contract.described_separator}", file=sys.stderr)
  asyncio.run(service.Service(scorer, args.name).serve(listener))


if __name__ == "__main__":
  exits.run(main)
