"""The paper's experiments: each runs, resumes, and draws its page again from its JSON."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
import tiny
from conftest import ROOT, call_script, run_script, write_lines

from prm_jax import aggregation as agg
from prm_jax import experiments
from prm_jax.aggregation.intervals import interval
from prm_jax.config import Experiment
from prm_jax.datasets import arithmetic
from prm_jax.experiments import (
  active,
  jobs,
  models,
  noise,
  quickstart,
  report,
  results,
  rollouts,
  search,
  shared,
  study,
  tasks,
)
from prm_jax.experiments import plan as plan_lib
from prm_jax.experiments.plan import Files, Plan
from prm_jax.generation.engines import Completion, Limits
from prm_jax.runtime import command_line, exits
from prm_jax.runtime.json_lines import BadLine
from prm_jax.types import StepTree

SMOKE = command_line.read(str(ROOT / "configs/experiments/smoke.py"), Plan)
SMOKE = dataclasses.replace(SMOKE, workers=0)  # where stand-ins replace the models
TWO = {key: SMOKE.domains[key] for key in ("longer chains", "other wording")}
FEW = dataclasses.replace(SMOKE, domains=TWO)
ALL_RIGHT = dataclasses.replace(FEW, threshold=1.0)  # so that no solution is cut at an error
NAMES = [name for name in experiments.NAMES if name not in ("search", "rollouts")]
EMBEDDED = {name: ALL_RIGHT if name in ("active", "generations") else FEW for name in NAMES}


@dataclasses.dataclass
class Trained:
  """The settings and the data of a model, instead of its training."""

  c: Experiment
  trees: list[StepTree]


TRAINED: dict[str, Trained] = {}  # by seed and name


class Untrained:
  """A stand-in for a trained model: its probabilities are a function of its name and the text."""

  directory, step = None, 8

  def __init__(self, name: str, objective: str, heads: int = 1):
    self.contract = dataclasses.replace(tiny.contract(objective), heads=heads)
    self._name = name

  def by_head(self, solutions, on_share=None):
    rate = lambda text, steps: np.array([self._step(text + each) for each in self._read(steps)])
    return [rate(*each) for each in solutions]

  def _read(self, steps):
    return steps if self.contract.objective == "process" else ["".join(steps)]

  def _step(self, text):
    digest = hashlib.sha256(f"{text}{self._name}".encode()).digest()
    heads, classes = self.contract.heads, len(self.contract.classes)
    weights = np.frombuffer(digest[: heads * classes], np.uint8).reshape(heads, classes) + 1.0
    return weights / weights.sum(-1, keepdims=True)


@contextlib.contextmanager
def stand_ins():
  """Replaces every trained model of the block by an `Untrained`, and records it in TRAINED."""
  TRAINED.clear()

  def model(self, name, c, solutions, evaluation, recipe, base=""):
    assert solutions and evaluation
    TRAINED[f"{self.seed}/{name}"] = Trained(c, [*solutions])
    return load(self.directory / name)

  def load(path):
    name = pathlib.Path(path).name
    objective = "outcome" if "outcome" in name or name == "orm" else "process"
    return Untrained(name, objective, SMOKE.heads if name == "ensemble" else 1)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(study.Study, "model", model)
    patch.setattr(models, "load", load)
    yield


@pytest.fixture
def untrained():
  """Runs the test with stand-ins for trained models."""
  with stand_ins():
    yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Returns a function: an experiment's name to its folder and its models, run once."""

  @functools.cache
  def run(name):
    directory = tmp_path_factory.mktemp("finished")
    with stand_ins():
      jobs.run(name, EMBEDDED[name], directory)
    return directory, dict(TRAINED)

  return run


@pytest.fixture
def files(tmp_path):
  """Returns a plan on files of candidates: some rated, some cut off, one problem never solved."""
  rng = np.random.default_rng(0)
  lines = []
  for p in range(6):
    for k in range(6):
      line = {"problem": f"p{p}", "steps": [f"a{rng.integers(3)}", f"b{k}"], "level": p % 2}
      line |= {"is_correct": bool(p and k % 3 == 0), "answer": f"{k % 3}", "finished": k != 5}
      lines.append(line | ({"labels": [1, -1 if k % 3 else 1]} if p == 1 else {}))
  pool = write_lines(tmp_path / "pool.jsonl", lines)
  line = {"steps": ["a", "b"], "label": -1}
  judged = [line | {"problem": f"q{p}", "final_answer_correct": p > 0} for p in range(3)]
  bench = write_lines(tmp_path / "gsm8k.jsonl", judged)
  model = tmp_path / "model"
  model.mkdir()
  given = Files(pool=str(pool), base=str(model), labeller=str(model), domains=(f"gsm8k={bench}",))
  return dataclasses.replace(SMOKE, files=given)


def gather(name: str, directory: pathlib.Path, seeds=SMOKE.seeds):
  """Returns the stored results of an experiment."""
  return report.gather(name, "smoke", directory, seeds)


# `alternatives` has the quick start's data only.
@pytest.mark.parametrize(
  ("name", "source"),
  [
    *((name, "embedded") for name in NAMES),
    *((name, "files") for name in NAMES if name != "alternatives"),
  ],
)
def test_an_experiment_resumes_and_its_figure_comes_from_its_json_alone(
  name, source, tmp_path, finished, untrained, files
):
  """A resumed run makes missing results only; the JSON alone gives the same figure and page."""
  plan = files if source == "files" else EMBEDDED[name]
  if source == "files":
    jobs.run(name, plan, tmp_path)
  else:
    shutil.copytree(finished(name)[0], tmp_path, dirs_exist_ok=True)
  results = gather(name, tmp_path)
  lines = report.write(results, tmp_path)
  first = {end: (tmp_path / f"{name}.{end}").read_bytes() for end in ("png", "html")}
  stored = [tmp_path / name / "seed-1" / f"{run}.json" for run in jobs.module(name).runs(plan)]
  assert all(path.is_file() for path in stored)
  stored[-1].unlink()  # as if killed before it was made
  TRAINED.clear()
  jobs.run(name, plan, tmp_path)
  both = {"1/prm", "1/orm"}  # of ood's one result
  again = {key for key in TRAINED if not key.startswith("0/")}
  assert again <= (both if name == "ood" else {f"1/{stored[-1].stem}"})
  assert gather(name, tmp_path) == results
  shutil.rmtree(tmp_path / name)
  (tmp_path / f"{name}.png").unlink()
  elsewhere = tmp_path / "elsewhere"
  assert report.draw(tmp_path / f"{name}.json", elsewhere, name)[:-1] == lines[:-1]
  assert (elsewhere / f"{name}.png").read_bytes() == first["png"]
  assert (elsewhere / f"{name}.html").read_bytes() == first["html"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_search_resumes_and_its_figure_comes_from_its_json_alone(tmp_path, monkeypatch):
  """A search with briefly trained models resumes and draws its figure from its JSON alone."""
  monkeypatch.setattr(search, "SEARCHES", ("beam", "particles"))
  sizes = dataclasses.replace(SMOKE.search, widths=(2,), problems=2, updates=10)
  plan = dataclasses.replace(SMOKE, search=sizes, seeds=(0,))
  jobs.run("search", plan, tmp_path)
  results = gather("search", tmp_path, plan.seeds)
  lines = report.write(results, tmp_path)
  folder = tmp_path / "search" / "seed-0"
  spent = json.loads((folder / "beam-2.json").read_text())["spent"]
  assert 0 < spent["scored"] < spent["scored_from_start"]
  (folder / "beam-2.json").unlink()
  (folder / "samples.jsonl").unlink()  # as if killed before it was made
  jobs.run("search", plan, tmp_path)
  assert gather("search", tmp_path, plan.seeds) == results
  assert report.draw(tmp_path / "search.json", tmp_path / "elsewhere", "search")[:-1] == lines[:-1]


@dataclasses.dataclass(frozen=True)
class Writer:
  """A stand-in for a language model: about half of its rollouts have the right answer."""

  answers: dict[str, int]  # by problem
  batch: int = 1

  def generate(self, prompts, n, sampling, limits):
    for i, prompt in enumerate(prompts):
      for k in range(n):
        wrong = np.random.default_rng([prompt.seed, k]).integers(2)
        text = f"# Answer\n\n{self.answers[prompt.problem] + wrong}"
        yield Completion(i, k, text, "stop", token_count=7)


@pytest.mark.parametrize("trained", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("one_device")
def test_labels_of_rollouts_resume_and_their_figure_comes_from_its_json_alone(
  trained, tmp_path, monkeypatch, request
):
  """The rollouts of stand-ins, and of briefly trained models, resume and draw from their JSON."""
  if not trained:
    request.getfixturevalue("untrained")
    answers = lambda study: {p.text: p.answer for p in study.problems["train"]}
    writer = property(lambda study: Writer(answers(study)))
    monkeypatch.setattr(quickstart.QuickStartStudy, "language_model", writer)
  monkeypatch.setattr(rollouts, "ARMS", {arm: arm for arm in ("exact", "counts")})
  monkeypatch.setattr(rollouts, "LIMITS", Limits(max_new_tokens=16))
  sizes = dataclasses.replace(SMOKE.rollouts, counts=(2,), problems=4)
  search_sizes = dataclasses.replace(SMOKE.search, updates=10)
  process = tiny.change(SMOKE.process, "model", width=16, layers=1, heads=2, kv_heads=2)
  plan = dataclasses.replace(
    SMOKE, process=process, rollouts=sizes, search=search_sizes, seeds=(0,)
  )
  jobs.run("rollouts", plan, tmp_path)
  results = gather("rollouts", tmp_path, plan.seeds)
  lines = report.write(results, tmp_path)
  folder = tmp_path / "rollouts" / "seed-0"
  result = json.loads((folder / "all-2.json").read_text())
  assert 0 < result["rollouts"] <= 2 * 6 * result["solutions"]
  (folder / "binary-2.json").unlink()
  (folder / "rollouts.journal").write_text("torn")  # as if killed while it was made
  TRAINED.clear()
  jobs.run("rollouts", plan, tmp_path)
  assert trained or not TRAINED
  assert gather("rollouts", tmp_path, plan.seeds) == results
  again = report.draw(tmp_path / "rollouts.json", tmp_path / "elsewhere", "rollouts")
  assert again[:-1] == lines[:-1]  # the last line names the files


def test_results_of_another_plan_are_not_mixed(tmp_path, untrained):
  """A folder refuses another plan of an experiment, and of the models that experiments share."""
  plan = dataclasses.replace(FEW, noise=(0.0,), seeds=(0,))
  wrong = dataclasses.replace(SMOKE.files, pool="no.jsonl", base="base", labeller="labeller")
  with pytest.raises(FileNotFoundError):  # and leaves no plan behind
    jobs.run("noise", dataclasses.replace(plan, files=wrong), tmp_path)
  jobs.run("noise", plan, tmp_path)
  other = dataclasses.replace(plan, threshold=0.4)
  with pytest.raises(ValueError, match="threshold differ"):
    jobs.run("noise", other, tmp_path)
  jobs.run("tuning", other, tmp_path)
  blind = dataclasses.replace(plan, blind=0.5)
  with pytest.raises(ValueError, match=r"shared has results of another plan \(blind differ"):
    jobs.run("ood", blind, tmp_path)
  train = dataclasses.replace(plan.labeller.train, steps=plan.labeller.train.steps + 1)
  labeller = dataclasses.replace(plan.labeller, train=train)
  with pytest.raises(ValueError, match=r"shared has results of .* \(labeller settings differ"):
    jobs.run("ood", dataclasses.replace(plan, labeller=labeller), tmp_path)
  jobs.run("noise", dataclasses.replace(plan, seeds=(0, 1)), tmp_path)  # seeds may change
  plan_lib.check(dataclasses.replace(plan, workers=2), tmp_path / "noise")  # and workers


def test_other_shared_models_do_not_concern_an_experiment_without_them(tmp_path, untrained):
  """An experiment with its own data runs where others have shared models of another plan."""
  plan_lib.keep(SMOKE, tmp_path / "shared")
  plan = dataclasses.replace(SMOKE, blind=0.5, seeds=(0,))
  jobs.run("alternatives", plan, tmp_path)
  with pytest.raises(ValueError, match="blind differ"):
    jobs.run("noise", plan, tmp_path)


@pytest.mark.parametrize("changed", ["labeller/weights", "labeller/config.json", "pool"])
def test_a_changed_file_of_the_same_name_is_another_plan(changed, tmp_path):
  """Results of a pool or a labeller are not mixed with those of other content under its name.

  What evaluate.py writes into the folder of a labeller or base is not their content.
  """
  labeller, folder = tmp_path / "labeller", tmp_path / ("noise" if changed == "pool" else "shared")
  labeller.mkdir()
  for path in (labeller / "weights", tmp_path / "pool"):
    path.write_text("1")
  paths = {"pool": str(tmp_path / "pool"), "base": str(labeller), "labeller": str(labeller)}
  plan = dataclasses.replace(SMOKE, files=dataclasses.replace(SMOKE.files, **paths))
  plan_lib.keep(plan, folder)
  for name in ("evaluation.json", "evaluation.json.png"):
    (labeller / name).write_text('{"benchmark": "prm800k"}')
  plan_lib.check(plan, folder)
  (tmp_path / changed).write_text("2")
  with pytest.raises(ValueError, match="contents of files differ"):
    plan_lib.check(plan, folder)


def test_a_base_and_settings_that_name_a_checkpoint_contradict_each_other():
  """A plan with both a base and another initial checkpoint is refused."""
  files = dataclasses.replace(SMOKE.files, pool="pool.jsonl", base="base", labeller="labeller")
  init = dataclasses.replace(SMOKE.outcome.init, checkpoint="model")
  with pytest.raises(ValueError, match=r"outcome\.init\.checkpoint='model'"):
    dataclasses.replace(SMOKE, files=files, outcome=dataclasses.replace(SMOKE.outcome, init=init))


@pytest.mark.parametrize(
  "wrong",
  [
    {"seeds": (0, 0)},
    {"seeds": ()},
    {"tuning_seeds": ()},
    {"samples": (2, 1)},
    {"noise": (0.1, 0.2)},
    {"noise": (0.0, 0.2, 0.2)},
  ],
)
def test_a_plan_has_each_seed_once_growing_samples_and_a_share_without_noise(wrong):
  """A seed named twice would count twice, and noise is compared with none."""
  with pytest.raises(ValueError, match=rf"plan\.{next(iter(wrong))}="):
    dataclasses.replace(SMOKE, **wrong)


def test_labels_replace_the_labeller_of_a_plan(tmp_path):
  """--labels with a plan that names a labeller trains a labeller, and so reads the labels."""
  flags = ("--scale=full", f"--labels={tmp_path / 'labels'}", f"--output_dir={tmp_path}")
  done = call_script("experiment.py", "noise", *flags, code=1)
  assert f"{tmp_path / 'labels'}" in done.stderr
  assert "labeller=" not in done.stderr


def test_a_preempted_experiment_ends_with_75(tmp_path, monkeypatch):
  """SIGTERM during training in experiment.py itself ends it with one line, as of train.py."""

  def preempted(*_):
    raise exits.Preempted("stopped by SIGTERM; step 3 is saved")

  monkeypatch.setattr(jobs, "run", preempted)
  flags = ("--scale=smoke", f"--output_dir={tmp_path}")
  done = call_script("experiment.py", "noise", *flags, code=75)
  line = "experiment.py: stopped by SIGTERM; step 3 is saved; run the same command again to resume"
  assert done.stderr == f"{line}\n"


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (("--from_json=a", "--scale=smoke"), "--scale has no effect with --from_json"),
    (("--from_json=a", "--plan=b"), "--plan has no effect with --from_json"),
    (("--from_json=a", "--seeds", "1"), "--seeds has no effect with --from_json"),
    (("--from_json=a", "--pool=b"), "--pool has no effect with --from_json"),
    (("--plan=b", "--scale=full"), "--scale=full has no effect with --plan=b"),
    (("--plan=b", "--domains", "c=d"), "--domains has no effect on noise"),
  ],
)
def test_flags_without_effect_are_refused(flags, message, tmp_path):
  """Flags that drawing again, a plan of one's own or this experiment would ignore are errors."""
  done = call_script("experiment.py", "noise", *flags, f"--output_dir={tmp_path}", code=1)
  assert message in done.stderr


def test_a_domain_cannot_have_the_name_of_a_row(tmp_path, files, untrained):
  """A domain called as the aggregate row is an error, as one would replace the other."""
  named = dataclasses.replace(files.files, domains=(f"Aggregate={tmp_path / 'gsm8k.jsonl'}",))
  with pytest.raises(ValueError, match="--domains Aggregate"):
    jobs.run("ood", dataclasses.replace(files, files=named), tmp_path)


@pytest.mark.parametrize("domains", [("a",), ("a=",), ("=a",), ("a=b", "a=c")])
def test_a_domain_needs_a_name_and_a_file(domains):
  """A domain without a name, without a file or given twice is refused before training."""
  with pytest.raises(ValueError, match="expected NAME=FILE, each name once"):
    Files(pool="pool", base="base", labels="labels", domains=domains)


def test_an_outcome_model_cannot_be_the_labeller(tmp_path, untrained, monkeypatch):
  """A labeller that rates whole solutions only is an error."""
  monkeypatch.setattr(models, "load", lambda path: Untrained("x", "outcome"))
  with pytest.raises(ValueError, match="outcome model cannot label steps"):
    jobs.run("noise", SMOKE, tmp_path)


def test_domains_differ_from_all_training_data():
  """Problems of each domain have a pattern of text that no training problem has."""
  trees = [*shared.critiques(SMOKE, "process"), *shared.labelled_trees(SMOKE)]
  taught = " ".join(tree.problem for tree in trees)
  new = {"longer chains": "[GH]", "other numbers": "[A-F][*+~-][6-9]"}
  new |= {"other operations": "[A-F][<&]", "other wording": r"mod 3 from \d$"}
  assert new.keys() == SMOKE.domains.keys()
  for name, pattern in new.items():
    text = next(arithmetic.distinct_problems(7, 1, SMOKE.domains[name])).text
    assert re.search(pattern, text) and not re.search(pattern, taught)


def solutions(trained: Trained) -> list[tuple[str, tuple[str, ...]]]:
  """Returns the problems and steps that a model was trained on."""
  return [(tree.problem, tree.steps) for tree in trained.trees]


def test_arms_of_supervision_have_the_same_solutions_and_larger_sets_hold_smaller(finished):
  """Arms differ only in labels: of steps, the labeller's outcome, or the answer's correctness."""
  models = finished("supervision")[1]
  last: list = []
  for n in SMOKE.samples:
    arms = ("process", "outcome_labeller", "outcome_answer")
    process, labeller, answer = (models[f"1/{arm}-{n}"].trees for arm in arms)
    whole = solutions(models[f"1/outcome_answer-{n}"])
    assert whole == solutions(models[f"1/outcome_labeller-{n}"]) and {*last} < {*whole}
    cut = [(p, steps[: len(tree.steps)]) for (p, steps), tree in zip(whole, process)]
    assert cut == [(tree.problem, tree.steps) for tree in process]  # up to the first wrong step
    assert [-1 not in tree.labels for tree in process] == [tree.outcome for tree in labeller]
    assert [tree.outcome for tree in labeller] != [tree.outcome for tree in answer]
    last = whole
  repeats = solutions(models["1/outcome_repeats-2"])
  assert len({*repeats}) < len(repeats)


def test_rules_add_equally_many_solutions_to_the_selectors(finished):
  """Every rule keeps the solutions of the first selector and adds as many distinct ones."""
  models = finished("active")[1]
  names = [name for name in jobs.module("active").runs(SMOKE) if "-" in name]
  chosen = {name: solutions(models[f"1/{name}"]) for name in names}
  first, problems = solutions(models["1/start"]), SMOKE.embedded.pool_problems
  sizes = [len(each.solutions) for each in SMOKE.embedded.task(1, SMOKE.setting).pool]
  ensemble = models["1/ensemble"]
  assert ensemble.c.loss.heads == SMOKE.heads and solutions(ensemble) == first
  for name, pairs in chosen.items():
    count = int(name.rpartition("-")[2])
    assert pairs[: len(first)] == first and len({*pairs}) == len(pairs)
    assert len(pairs) <= (1 + count) * problems
    if name.startswith(("uniform", "convincing", "entropy", "coverage")):
      assert len(pairs) == sum(min(count + 1, size) for size in sizes), name
  twos = [frozenset(pairs) for name, pairs in chosen.items() if name.endswith("-2")]
  assert len({*twos}) >= len(twos) - 1  # in a small pool two rules may choose alike


def test_each_generation_adds_to_the_labels_of_the_last(finished):
  """Each generation has more solutions; the arms choose differently from the third model on."""
  models = finished("generations")[1]
  chosen = lambda name: frozenset(solutions(models[f"1/{name}"]))
  assert chosen("first") < chosen("convincing-1") < chosen("convincing-2")
  assert chosen("convincing-1") < chosen("frozen-2")
  assert chosen("uniform-1") < chosen("uniform-2")
  assert len({chosen(f"{arm}-2") for arm in ("convincing", "frozen", "uniform")}) == 3


def test_tuning_trains_the_settings_of_its_names(finished):
  """The name of each tuning run gives its objective, weight, learning rate and updates."""
  models = finished("tuning")[1]
  for name in jobs.module("tuning").runs(SMOKE):
    c = models[f"1/{name}"].c
    values = c.loss.language_model_weight, c.optim.learning_rate, c.train.steps
    assert name == "-".join([c.loss.objective, *(f"{value:g}" for value in values)])


@pytest.mark.parametrize("text", ["{}", "[]", '{"experiment": "../x"}', "no"])
def test_a_damaged_file_is_an_error_that_names_it(text, tmp_path):
  """The error about a results file of wrong content names the file."""
  path = tmp_path / "x.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=r"x\.json"):
    report.draw(path, tmp_path, "supervision")


def test_a_damaged_curve_is_an_error_that_names_the_file(tmp_path, finished):
  """The error about a curve that is too short names the results file, not only the curve."""
  shutil.copytree(finished("supervision")[0], tmp_path, dirs_exist_ok=True)
  report.write(gather("supervision", tmp_path), tmp_path)
  path = tmp_path / "supervision.json"
  content = json.loads(path.read_text())
  next(x for x in content["runs"] if x["run"] == "process-2")["accuracy"] = [[0.5]]
  path.write_text(json.dumps(content))
  with pytest.raises(ValueError, match=r"supervision\.json: .*damaged"):
    report.draw(path, tmp_path, "supervision")


def test_levels_are_in_the_order_of_their_numbers():
  """Level 10 comes after level 9."""
  info = {"n": [1], "majority": [[0.5], [0.0], [1.0]], "level": ["9", "10", "2"], "test_hash": ""}
  results = report.Results("x", "smoke", {}, [0], [info], [])
  assert [*results.breakdown([], "level")] == ["2", "9", "10"]


def test_texts_are_escaped(tmp_path, finished):
  """A level, which comes from a file, is escaped in the page and on the screen."""
  shutil.copytree(finished("supervision")[0], tmp_path, dirs_exist_ok=True)
  report.write(gather("supervision", tmp_path), tmp_path)
  path = tmp_path / "supervision.json"
  content = json.loads(path.read_text())
  content["info"][0]["level"][0] = "<script>level\x1b[2J"
  path.write_text(json.dumps(content))
  lines = report.draw(path, tmp_path, "supervision", ["svg"])
  assert any("<script>level?[2J" in line for line in lines)
  assert "</text>" in (tmp_path / "supervision.svg").read_text()
  page = (tmp_path / "supervision.html").read_text()
  assert "<script>level" not in page and "&lt;script&gt;level" in page and "\x1b" not in page


def problems(rng: np.random.Generator) -> list[tasks.Problem]:
  """Returns problems with repeated samples, some of them without an answer."""
  made = []
  for p in range(4):
    answers = [None, "1", "2", "3"]
    samples = [
      tasks.Solution((f"s{k}",), correct=k == 1, answer=answers[k])
      for k in rng.integers(0, 4, size=3 + p)
    ]
    made.append(tasks.problem(f"p{p}", p % 2, samples))
  return made


def test_best_of_n_of_distinct_solutions_is_that_of_all_samples():
  """Best-of-N of solutions with their counts equals that of the samples with repetitions."""
  rng = np.random.default_rng(0)
  test = problems(rng)
  scores = [rng.normal(size=len(each.solutions)) for each in test]
  result = np.array(models.best_of_n(scores, models.Samples.of(tasks.Task((), tuple(test)))))
  for p, each in enumerate(test):
    solutions = [each.solutions[i] for i in each.samples]
    m = len(solutions)
    expected = agg.best_of_n(
      np.array([[scores[p][i] for i in each.samples]], np.float32),
      np.array([[s.correct for s in solutions]]),
      np.array([[s.answer is not None for s in solutions]]),
      [min(n, m) for n in (1, 2, 4, 6)],
    )
    assert result[p] == pytest.approx(np.asarray(expected[0]), abs=1e-6)  # stored with 6 digits


@pytest.mark.parametrize(("seeds", "count"), [(1, 1), (1, 5), (4, 1), (3, 5)])
def test_a_resample_is_a_mean_over_drawn_seeds_and_problems(seeds, count):
  """The weights of a resample are counts of draws, and add up to 1."""
  weights = results.resampled((seeds, count))
  assert np.allclose(weights.sum((1, 2)), 1)
  counts = weights * seeds * count
  drawn = counts.round()  # before %: 4.999999 % 5 is far from 0
  assert np.allclose(counts, drawn) and not (drawn.sum(2) % count).any()


def test_a_share_of_nothing_is_unknown():
  """A ratio is of the means; it is None where the whole is 0 or negative."""
  part, whole = np.full((2, 3, 3), 0.5), np.full((2, 3, 3), [2.0, 0.0, -1.0])
  ratios = results.ratios(part, whole)
  assert interval(ratios)["mean"] == [0.25, None, None]
  unknown = results.ratio_interval(ratios[:, 2])
  assert unknown == {"mean": [None], "low": [None], "high": [None]}
  assert results.percent(unknown) == "-"


def test_efficiency_is_the_ratio_of_labels_for_equal_accuracy():
  """The data ratio is 3 where uniform needs 3 times the labels; it is missing without a slope."""
  rng = np.random.default_rng(0)
  sizes = np.array([100, 200, 400, 800])
  offset = rng.normal(scale=0.01, size=(5, 40, 1))
  line = lambda factor: 0.1 * np.log2(factor * sizes) - 0.5 + offset
  efficiency = lambda uniform, convincing: active.efficiency(
    {"uniform": uniform, "convincing": convincing},
    {"uniform": sizes, "convincing": sizes},
    "uniform",
  )["convincing"]
  ratios = efficiency(line(1), line(3))
  assert ratios["data_ratio"]["mean"] == pytest.approx([3])
  assert ratios["data_ratio"]["low"] == pytest.approx([3])
  assert ratios["slope_ratio"]["mean"] == pytest.approx([1])
  assert efficiency(line(1), 2 * line(1))["slope_ratio"]["mean"] == pytest.approx([2])
  flat = efficiency(np.ones((5, 40, 4)), line(1))
  assert flat["data_ratio"] == {"mean": [None], "low": [None], "high": [None]}


def test_flips_have_the_given_share_and_grow_with_it():
  """Label noise flips the given share of labels; a larger share flips the same ones and more."""
  ratings = [(1, 0, 1, -1)] * 2000
  some, more = (noise.flipped(ratings, share, seed=0) for share in (0.1, 0.3))
  changed = [(np.array(x) < 0) != (np.array(ratings) < 0) for x in (some, more)]
  assert abs(changed[0].mean() - 0.1) < 5 * np.sqrt(0.09 / 8000)
  assert not (changed[0] & ~changed[1]).any()
  assert noise.flipped(ratings, 0.0, seed=0) == ratings


def test_a_pool_is_read_from_files_in_their_forms(tmp_path):
  """A pool holds candidates of `text` or `steps` and ProcessBench lines; test problems differ."""
  path = tmp_path / "pool.jsonl"
  rows = [
    {"problem": "p", "text": "a\n\nb", "is_correct": True, "answer": "1", "level": 3},
    {"problem": "p", "text": "a\n\nb", "is_correct": True, "answer": "1"},
    {"problem": "p", "text": "b", "is_correct": True, "answer": "$1$"},
    {"problem": "p", "steps": ["c"], "is_correct": None, "answer": None},  # undecided
    {"problem": "q", "steps": ["a", "b", "c"], "final_answer_correct": False, "label": 1},
    {"problem": "r", "steps": ["a"], "final_answer_correct": True, "label": -1},
  ]
  write_lines(path, rows)
  p, q, r = tasks.read(path, "\n\n")
  assert p.samples == (0, 0, 1, 2) and p.times.tolist() == [2, 1, 1] and p.level == "3"
  assert [x.correct for x in p.solutions] == [True, True, False]
  assert [x.answer for x in p.solutions] == ["1", "1", None] and q.solutions[0].answer
  assert q.solutions[0].ratings == (1, -1, -1) and r.solutions[0].ratings == (1,)
  assert [sum(x.answer is None for x in each.solutions) for each in (p, q, r)] == [1, 0, 0]
  task, other = (tasks.from_files([p, q, r], (), seed=seed) for seed in (0, 1))
  assert task.test == other.test  # so that seeds can share their resamples
  assert all(x.answer is not None for each in task.pool for x in each.solutions)
  assert {x.text for x in task.pool} | {x.text for x in task.test} == {"p", "q", "r"}
  assert not {x.text for x in task.pool} & {x.text for x in task.test}
  assert [x.text for x in tasks.read(path, "\n\n", problems=1, most=1)] == ["p"]
  long = [dataclasses.replace(x, samples=x.samples * 9) for x in task.pool]
  task = tasks.from_files([*long, *task.test], (), seed=0)
  assert len(task.test[0].samples) < 9  # N does not exceed the test problems' samples
  assert models.problems_of(task)["n"][-1] == max(len(x.samples) for x in task.test)
  path.write_text(json.dumps({"problem": "p", "steps": ["a"]}) + "\n")
  with pytest.raises(BadLine, match=r"pool.jsonl:1: .*is_correct"):
    tasks.read(path, "\n\n")


def test_the_embedded_task_depends_on_the_seed_only_and_holds_problems_out():
  """A seed always gives the same embedded task, whose test problems are not in the pool."""
  sizes = tasks.Embedded(pool_problems=8, pool_samples=6, test_problems=5, test_samples=7)
  task = sizes.task(3, SMOKE.setting)
  assert task == sizes.task(3, SMOKE.setting)
  assert not {x.text for x in task.pool} & {x.text for x in task.test}
  assert [len(x.samples) for x in task.test] == [7] * 5


def test_a_critic_with_blind_spots_takes_only_mistakes_there_for_right():
  """Blind spots turn mistakes into right steps; a larger share holds those of a smaller one."""
  rng = np.random.default_rng(0)
  problems = arithmetic.distinct_problems(0, 300, dataclasses.replace(SMOKE.setting, stray=0.3))
  seen = collections.Counter()
  for problem in problems:
    sample = arithmetic.solve(problem, rng)
    some, more, all_ = (tasks.believed(problem, sample, share) for share in (0.25, 0.5, 1.0))
    assert tasks.believed(problem, sample, 0.0) == sample.ratings
    assert all_ == tuple(abs(rating) for rating in sample.ratings)
    for exact, a, b in zip(sample.ratings, some, more):
      assert a == b == exact or (exact == -1 and a <= b)
      seen[exact, a] += 1
  assert 0.15 < seen[-1, 1] / (seen[-1, 1] + seen[-1, -1]) < 0.35


@pytest.mark.slow
def test_two_real_runs_give_the_same_numbers(tmp_path):
  """An experiment with trained models in worker processes gives the same numbers twice."""
  results = []
  for k in range(2):
    run_script("experiment.py", "noise", "--scale=smoke", f"--output_dir={tmp_path / str(k)}")
    results.append((tmp_path / str(k) / "noise.json").read_text())
  assert results[0] == results[1]
