"""Runs an experiment of *Let's Verify Step by Step* and writes its figure, numbers and page.

  python scripts/experiment.py supervision --output_dir=runs/experiments
  python scripts/experiment.py active --output_dir=runs/experiments --scale=smoke
  python scripts/experiment.py supervision --from_json=runs/experiments/supervision.json \\
    --output_dir=figures

supervision: process and outcome supervision on the same solutions (section 4.1).  active: choosing
what to label (4.2).  generations: iterative retraining.  ood: other domains (section 5).  noise:
flipped labels.  tuning: the hyper-parameter search.  alternatives: the quick start with and without
rated alternatives of steps.  search: PRM-guided search against best-of-N.  rollouts: step labels
from rollouts.

Writes OUTPUT_DIR/NAME.json (every number, by seed), NAME.png and NAME.html.  A run that was stopped
resumes when it is started again.  Experiments with one OUTPUT_DIR share the base models and the
labeller.

--scale=smoke, cpu or full names a plan in configs/experiments/; --plan names another file.  With
--plan or --scale=full, --pool, --base and --labels or --labeller replace the embedded domain by
real candidates, a public model and human labels (docs/experiments.md).
"""

from prm_jax.runtime import exits

exits.on_signals(resumable=True)

import dataclasses
import pathlib
from typing import Annotated, Literal

import tyro

from prm_jax import experiments
from prm_jax.evaluation.figure_files import Vector
from prm_jax.runtime import command_line


@dataclasses.dataclass(frozen=True)
class Args:
  name: Annotated[Literal[experiments.NAMES], tyro.conf.Positional]
  output_dir: pathlib.Path
  scale: Literal["smoke", "cpu", "full"] = "cpu"  # minutes, an hour on two cores, 1.5B models
  plan: pathlib.Path | None = None  # a file that returns another plan
  seeds: tuple[int, ...] = ()  # in place of the plan's; tune on seeds from 100 up
  workers: int | None = None  # worker processes of one core each; 0: this process, all devices
  pool: str = ""  # candidates to choose from and to train on, JSON lines with is_correct
  test: str = ""  # candidates of other problems; not given: half of the pool's are held out
  labels: str = ""  # dataset of prepare_data.py on which the labeller is trained
  labeller: str = ""  # instead of --labels: the work directory of a trained labeller
  base: str = ""  # public model or work directory that every model starts from
  domains: tuple[str, ...] = ()  # of ood: NAME=FILE of candidates
  from_json: pathlib.Path | None = None  # results to draw again, without running anything
  figures: tuple[Vector, ...] = ()  # also writes the figure as NAME.pdf, NAME.svg


def main() -> None:
  args = command_line.parse(Args, __doc__)
  check(args)
  from prm_jax.experiments import jobs, report

  if args.from_json:
    lines = report.draw(args.from_json, args.output_dir, args.name, args.figures)
  else:
    plan = planned(args)
    jobs.run(args.name, plan, args.output_dir)
    scale = str(args.plan or args.scale)
    results = report.gather(args.name, scale, args.output_dir, plan.seeds)
    lines = report.write(results, args.output_dir, args.figures)
  print("\n".join(lines))


def check(args: Args) -> None:
  """Raises ValueError for flags that do not go together."""
  if args.from_json:
    unread = vars(args).keys() - {"name", "output_dir", "from_json", "figures"}
    command_line.refuse(args, unread, "has no effect with --from_json, which only draws")
  if args.name != "ood":
    command_line.refuse(args, ["domains"], f"has no effect on {args.name}: it goes with ood")
  if args.plan and args.scale != Args.scale:
    raise ValueError(f"--scale={args.scale} has no effect with --plan={args.plan}")


def planned(args: Args):
  """Returns the plan of the scale, changed by the flags."""
  from prm_jax.experiments import jobs
  from prm_jax.experiments.plan import Files, Plan

  configs = pathlib.Path(__file__).parent.parent / "configs" / "experiments"
  path = args.plan or configs / f"{args.scale}.py"
  plan = command_line.read(str(path), Plan)
  given = {name: value for name in vars(Files()) if (value := getattr(args, name, None))}
  flag = f"--{next(iter(given), '')}"
  own_data = hasattr(jobs.module(args.name), "study")  # it uses the quick start's data
  if given and own_data:
    raise ValueError(f"{args.name} uses the quick start's data and takes no {flag}")
  if given and not args.plan and args.scale != "full":
    raise ValueError(
      f"{flag}: the settings of --scale={args.scale} are for the embedded domain; give "
      "--plan=FILE of yours, such as configs/experiments/smollm2.py"
    )
  if args.labels or args.labeller:  # in place of the plan's
    given = {"labels": "", "labeller": ""} | given
  reported = plan.tuning_seeds if args.name == "tuning" else plan.seeds
  return dataclasses.replace(
    plan,
    files=Files() if own_data else dataclasses.replace(plan.files, **given),
    seeds=args.seeds or reported,
    workers=plan.workers if args.workers is None else args.workers,
  )


if __name__ == "__main__":
  exits.run(main)
