"""Serves the scores of a trained model, or of a published one, over HTTP.

  python scripts/serve.py --checkpoint=runs/prm --port=8000
  python scripts/serve.py --model=Qwen2.5-Math-PRM-7B --readout=qwen2.5-math-prm --dtype=bfloat16

  curl http://127.0.0.1:8000/score -d '{"solutions": [{"problem": "1 + 2?", "steps": ["3"]}]}'

An answer has `rating_probs` and `prm_score` of each solution (of an outcome model, `orm_score`),
the numbers that score.py writes.  Solutions of many requests share batches.  It prints its address
when it is ready; --port=0 takes a free one.  SIGTERM and Ctrl-C end it when all requests that it
has are answered.  docs/serving.md has the requests, and the bounds of what clients may ask.

There is no password and no encryption: leave --host as it is, or put a proxy in front.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before what takes time to import

import asyncio
import dataclasses
import sys
from typing import Annotated, Literal

import msgspec

from prm_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Args(config_lib.Checked):
  checkpoint: str = ""  # work directory of train.py
  step: str = "latest"  # of the checkpoint: "latest", "best" by train.best_metric, or a number
  model: str = ""  # or directory of a published or exported model
  readout: str = ""  # of a published model
  dtype: Literal["float32", "bfloat16"] = "float32"  # of a published or exported model
  separator: config_lib.Escaped = ""  # of a published model, between steps; "": its authors'
  host: str = "127.0.0.1"
  port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  of_model = args.readout or args.separator or args.dtype != "float32"
  if bool(args.checkpoint) == bool(args.model) or (args.checkpoint and of_model):
    raise ValueError(
      "give one of --checkpoint=DIR and --model=DIR; --readout, --separator and --dtype "
      "go with --model"
    )
  from prm_jax.runtime import progress
  from prm_jax.scoring.scorer import Scorer

  try:
    from prm_jax.scoring import service
  except ModuleNotFoundError as error:
    raise SystemExit(f"serve.py: {error}; pip install 'prm_jax[serve]', or aiohttp") from error
  name = args.model or args.checkpoint
  listener = service.listen(args.host, args.port)  # fails before the model is loaded
  with progress.waiting(f"loading {name}"):
    if args.model:
      scorer = Scorer.load_model(args.model, args.readout, args.dtype, args.separator)
    else:
      scorer = Scorer.load(args.checkpoint, args.step)
  print(f"steps end with {scorer.contract.described_separator}", file=sys.stderr)
  asyncio.run(service.Service(scorer, name).serve(listener))


if __name__ == "__main__":
  exits.run(main)
