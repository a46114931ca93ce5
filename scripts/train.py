"""Trains a process or outcome reward model, or a language model; run it again to resume.

  python scripts/train.py --config=configs/arithmetic.py --workdir=runs/prm \\
    --config.data.directory=data/arithmetic \\
    --config.data.tokenizer=data/arithmetic/tokenizer.model  # both from docs/tutorial.md
  python scripts/train.py --config=configs/prm800k_smollm2_135m.py --workdir=runs/smollm2 \\
    --config.optim.trained=lora --config.model.lora_rank=16  # LoRA on a public model

Flags override any setting: --config.optim.learning_rate=1e-4 --config.loss.objective=outcome.
With several hosts, run it on all of them, with a work directory that all of them can reach.
Writes checkpoints/, metrics.jsonl, manifest.json (counts of the data), the tokenizer and, if
tensorboardX is installed, TensorBoard events to the work directory.  train.wandb also sends the
metrics to Weights & Biases; train.stop_patience stops early.  After SIGTERM the script saves and
exits with code 75.  docs/checkpoints.md lists all exit codes.
"""

from prm_jax.runtime import exits

exits.on_signals(resumable=True)

import dataclasses

from prm_jax import config as config_lib
from prm_jax.runtime import command_line


@dataclasses.dataclass(frozen=True)
class Args:
  workdir: str  # folder of the run's checkpoints and logs, local or gs://BUCKET/DIR
  config: config_lib.Experiment = config_lib.Experiment()  # --config=FILE sets the defaults
  hosts: config_lib.Hosts = config_lib.Hosts()  # for jobs whose hosts JAX does not detect


def main() -> None:
  args = command_line.parse(Args, __doc__)
  from prm_jax.runtime import distributed  # slow imports, after errors in flags
  from prm_jax.training import loop

  with distributed.job(args.hosts, saves=True):
    loop.run(args.config, args.workdir)


if __name__ == "__main__":
  exits.run(main)
