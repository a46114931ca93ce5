"""Step labels from rollouts: which rollouts are made, the labels from them, and resuming."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import random
import shutil

import jobs
import numpy as np
import pytest
import tiny
from conftest import call_script, read_lines, run_script, write_lines
from scipy import stats

from prm_jax.datasets import arithmetic, labelled, prepare
from prm_jax.evaluation.answers import grading
from prm_jax.generation.engines import Completion, Limits, Prompt, PromptError
from prm_jax.generation.sampler import Sampler
from prm_jax.generation.sampling import Sampling
from prm_jax.runtime import journal as journal_lib
from prm_jax.runtime.json_lines import BadLine
from prm_jax.supervision import rollout_labels, rollouts
from prm_jax.supervision.rollout_labels import Count, Problem, Settings, Solution
from prm_jax.training import loop

PROBLEMS = [*arithmetic.distinct_problems(0, 12, arithmetic.Setting())]
PROBLEMS_A_KILL = 100  # in `test_kills_lose_and_double_no_annotation`: a second of work


@dataclasses.dataclass
class Oracle:
  """An engine whose rollouts from right steps may be right, and from wrong ones never are."""

  share: float = 1.0  # of rollouts from right steps that are right
  asked: list[tuple[str, ...]] = dataclasses.field(default_factory=list)  # steps of each rollout

  def generate(self, prompts, n, sampling, limits):
    problems = {each.text: each for each in PROBLEMS}
    for i, prompt in enumerate(prompts):
      problem, steps = problems[prompt.problem], tuple(each.rstrip("\n") for each in prompt.begun)
      steps = tuple(each.replace("# Answer ", "# Answer\n\n") for each in steps)
      self.asked += [steps] * n
      right = -1 not in arithmetic.rate(problem, steps)
      for k in range(n):
        lucky = np.random.default_rng([prompt.seed, k]).random() < self.share
        answer = problem.answer + (not (right and lucky))
        yield Completion(i, k, f"# Answer\n\n{answer}", "stop", None, None, 7)


@pytest.fixture(scope="module")
def grader():
  with grading.Grader("math") as one:
    yield one


def solved(seed: int = 0, each: int = 4) -> tuple[list[Problem], list[list[int]]]:
  """Problems with solutions of the simulated solver, and the true ratings of each solution."""
  rng, problems, ratings = np.random.default_rng(seed), [], []
  for given in PROBLEMS:
    solutions = [arithmetic.solve(given, rng) for _ in range(each)]
    own = [Solution({}, x.steps, True, x.answer == given.answer) for x in solutions]
    problems.append(Problem(given.text, str(given.answer), own))
    ratings += [x.ratings for x in solutions]
  return problems, ratings


def annotated(engine, problems, s: Settings, tmp_path, form="plain", **more) -> list[dict]:
  """The output lines of all solutions."""
  make = lambda text, seed: Prompt("", text, "\n", seed)
  path = tmp_path / f"{random.random()}.journal"
  with (
    grading.Grader("math") as grader,
    contextlib.closing(journal_lib.Journal(path, {})) as journal,
  ):
    given = (Sampling(), Limits(20), "\n", grader, s, 3, {"labeller": "x"})
    annotator = rollouts.Annotator(engine, make, *given, form=form, **more)
    annotator.run(problems, range(len(problems)), journal)
    return [line for i in range(len(problems)) for line in journal.done[i]]


@pytest.mark.parametrize("search", ["all", "binary"])
@pytest.mark.parametrize("count", [1, 6])
def test_a_perfect_model_finds_the_first_error(search, count, tmp_path):
  """With perfect rollouts the labels are the true ones, up to the first error.

  A binary search looks for errors only in solutions with a wrong answer.
  """
  problems, ratings = solved()
  lines = annotated(Oracle(), problems, Settings(search=search, rollouts=count), tmp_path)
  wrong = 0
  for exact, line in zip(ratings, lines, strict=True):
    first = next((i for i, rating in enumerate(exact) if rating < 0), None)
    if search == "binary" and line["is_correct"]:
      first = None
    # A wrong chain may restate its way back: the ratings of later steps do not matter.
    expected = [True] * len(exact)
    if first is not None:
      wrong += 1
      expected = [True] * first + [False] + [None] * (len(exact) - first - 1)
    assert line["labels"] == expected
    unlabelled = [source is None for source in line["provenance"]["sources"]]
    assert unlabelled == [label is None for label in expected]
  assert wrong > 5


def test_the_answer_of_a_few_shot_rollout_ends_before_the_next_problem(tmp_path):
  """The stop string that begins a next problem, which stays in a text, is no part of its answer."""
  engine = Oracle()
  before = engine.generate
  engine.generate = lambda *given: (
    dataclasses.replace(x, text=f"{x.text}\n\nProblem:\n") for x in before(*given)
  )
  lines = annotated(engine, solved(each=1)[0], Settings(rollouts=1), tmp_path, "few_shot")
  assert any(line["rollouts"][0] == [1, 1] for line in lines)


def test_a_few_shot_rollout_may_go_on_with_the_next_problem(tmp_path):
  """After a step with the answer, the model begins a next problem, at the separator of the steps.

  No stop string can match, as a part of it is in the prompt; the answer counts all the same.
  """

  class Rambling(Oracle):
    def generate(self, prompts, n, sampling, limits):
      for i in range(len(prompts)):
        yield Completion(i, 0, "\nProblem:\nNext?\n\nSolution:\n", "length", None, None, 20)

  given = PROBLEMS[0]
  steps = f"# Answer\n\n{given.answer}", "So it is."
  problem = Problem(given.text, str(given.answer), [Solution({}, steps, True, True)])
  (line,) = annotated(Rambling(), [problem], Settings(rollouts=1), tmp_path, "few_shot")
  assert line["labels"] == [True, True]


def labelled_problems(directory) -> set[str]:
  """The texts of the problems in the journals of a directory."""
  texts = "".join(path.read_text() for path in directory.glob("*.journal"))
  lines = [json.loads(line)["lines"][0] for line in texts.splitlines() if "lines" in line]
  return {each["problem"] for each in lines}


def test_problems_that_the_engine_refuses_leave_the_others_in_the_journal(tmp_path):
  """If a server refuses two problems, the user reads which is the first; the others have labels."""
  refused = {PROBLEMS[1].text, PROBLEMS[2].text}

  class Refusing(Oracle):
    def generate(self, prompts, n, sampling, limits):
      bad = [i for i, prompt in enumerate(prompts) if prompt.problem in refused]
      for x in super().generate(prompts, n, sampling, limits):
        if x.prompt not in bad:
          yield x
      if bad:
        raise PromptError(dict.fromkeys(bad, "too long"))

  with pytest.raises(ValueError, match=r"^problem 2, .*: too long \(1 more were refused\)$"):
    annotated(Refusing(), solved()[0], Settings(rollouts=2), tmp_path)
  assert labelled_problems(tmp_path) == {x.text for x in PROBLEMS} - refused
  refused, engine = {x.text for x in PROBLEMS}, Refusing()  # as with a wrong key
  with pytest.raises(ValueError, match=r"^problem 1, .*: too long \(7 more were refused\)$"):
    annotated(engine, solved()[0], Settings(rollouts=2), tmp_path, at_once=1)


def test_many_problems_that_are_refused_before_the_others_begin_leave_these_labels(tmp_path):
  """The sampler refuses long prompts before any rollout; problems with short ones get labels."""
  refused = {each.text for each in PROBLEMS[1 : 2 + rollouts.REFUSED]}

  class Refusing(Oracle):
    def generate(self, prompts, n, sampling, limits):
      bad = [i for i, prompt in enumerate(prompts) if prompt.problem in refused]
      if bad:
        raise PromptError(dict.fromkeys(bad, "too long"))
      return super().generate(prompts, n, sampling, limits)

  with pytest.raises(ValueError, match=r"^problem 2, .*: too long \(8 more were refused\)$"):
    annotated(Refusing(), solved()[0], Settings(rollouts=2), tmp_path)
  assert labelled_problems(tmp_path) == {x.text for x in PROBLEMS} - refused


def test_a_binary_search_makes_rollouts_from_few_steps(tmp_path):
  """A solution with a wrong answer takes rollouts from at most log2 of its steps, rounded up."""
  problems, _ = solved(each=1)
  oracle = Oracle()
  annotated(oracle, problems, Settings(search="binary", rollouts=1), tmp_path)
  wrong = [x for p in problems for x in p.solutions if not x.right]
  assert 0 < len(oracle.asked) <= sum(math.ceil(math.log2(len(x.steps))) for x in wrong)


def test_solutions_with_equal_first_steps_share_their_rollouts(tmp_path):
  """Each sequence of first steps of a problem has its rollouts once."""
  problems, _ = solved(each=6)
  oracle = Oracle()
  annotated(oracle, problems, Settings(labels="counts", rollouts=2), tmp_path)
  prefixes = {
    (p.text, x.steps[:i]) for p in problems for x in p.solutions for i in range(1, len(x.steps))
  }
  assert len(oracle.asked) == 2 * len(prefixes)


def test_a_share_of_wrong_rollouts_is_compared_as_for_the_label():
  """0.58 x 50 is rounded below 29, but 29 of 50 are no more than 0.58: a wrong step."""
  s = Settings(rollouts=50, wrong_share=0.58)
  assert rollout_labels.is_wrong(Count(50, 29), s)
  assert not rollout_labels.is_enough(Count(29, 29), s)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.8])
def test_stopping_early_changes_no_hard_label(share):
  """Rollouts of a step stop as soon as no outcome of the rest could change its label."""
  s, stops = Settings(rollouts=8, wrong_share=share), []
  for outcomes in itertools.product((0, 1), repeat=8):
    whole = rollout_labels.is_wrong(Count(8, sum(outcomes)), s)
    enough = next(
      n for n in range(1, 9) if rollout_labels.is_enough(Count(n, sum(outcomes[:n])), s)
    )
    assert rollout_labels.is_wrong(Count(enough, sum(outcomes[:enough])), s) == whole
    stops.append(enough)
    if enough > 1:  # one fewer could still go either way
      n, k = enough - 1, sum(outcomes[: enough - 1])
      ends = {rollout_labels.is_wrong(Count(8, k + more), s) for more in range(8 - n + 1)}
      assert len(ends) == 2
  assert min(stops) < 8


def test_rollouts_stop_when_the_interval_is_narrow(tmp_path):
  """Rollouts of a step end at the first round whose 95 % Wilson interval is narrow enough."""
  s = Settings(labels="counts", rollouts=64, width=0.3)
  lines = annotated(Oracle(share=0.7), solved(each=2)[0], s, tmp_path)

  def width(k: int, n: int) -> float:
    p, z = k / n, stats.norm.ppf(0.975)
    return 2 * z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))

  counts = [tuple(x) for line in lines for x in line["rollouts"] if x]
  assert {n for _, n in counts} >= {12, 16} and max(n for _, n in counts) < 64
  for k, n in counts:
    assert n % rollouts.ROUND == 0 and width(k, n) <= 0.3
    # Whatever the last round brought, the one before was too wide.
    before = n - rollouts.ROUND
    assert before == 0 or any(
      width(j, before) > 0.3 for j in range(max(k - rollouts.ROUND, 0), min(k, before) + 1)
    )


@pytest.mark.parametrize("labels", ["soft", "counts"])
def test_soft_labels_and_counts_are_those_of_the_rollouts(labels, tmp_path):
  """Each step's label is of its rollouts, but the last step's is of the solution's answer."""
  s = Settings(labels=labels, rollouts=5)
  for line in annotated(Oracle(0.6), solved(each=2)[0], s, tmp_path):
    assert line["provenance"]["sources"] == ["rollouts"] * (len(line["steps"]) - 1) + ["answer"]
    counts = [*line["rollouts"][:-1], [5 * line["is_correct"], 5]]
    assert line["rollouts"][-1] is None
    assert line["labels"] == ([k / n for k, n in counts] if labels == "soft" else counts)


def test_tolerant_labels_soften_the_two_steps_before_the_first_error(tmp_path):
  """By SCAN's rule a step is 1, and near the first error its share over the model's confidence."""
  s = Settings(labels="tolerant", rollouts=12)
  softened = 0
  for line in annotated(Oracle(0.7), solved(seed=2)[0], s, tmp_path):
    confidence = np.divide(*line["provenance"]["problem"])
    counts = [*line["rollouts"][:-1], [12 * line["is_correct"], 12]]
    first = next((i for i, x in enumerate(counts) if x and not x[0]), None)
    for i, label in enumerate(line["labels"]):
      if first is None or i < first - 2:
        assert label == 1
      elif i < first:
        share = counts[i][0] / counts[i][1] / confidence
        assert label == pytest.approx(min(share, 1))
        softened += label < 1
      else:
        assert label == (0 if i == first else None)
  assert softened


def test_problems_that_the_model_does_not_solve_get_no_labels(tmp_path):
  """A problem solved less often than --sure has no labels and costs no rollouts of its steps."""
  s = Settings(rollouts=4, sure=0.5)
  lines = annotated(Oracle(0.3), solved(each=1)[0], s, tmp_path)
  unsure = [line for line in lines if np.divide(*line["provenance"]["problem"]) < 0.5]
  assert 0 < len(unsure) < len(lines)
  for line in unsure:
    assert {*line["labels"]} == {None} and line["provenance"]["spent"]["rollouts"] == 4
  assert "the model is not sure" in "\n".join(rollouts.table(lines))


@pytest.mark.usefixtures("one_device")
def test_labels_do_not_depend_on_the_batch_or_on_other_problems(text_run, tmp_path):
  """A problem alone, or in batches of another size, gets the same rollouts and labels."""
  s = Settings(labels="counts", rollouts=2)
  problems = lambda: solved(each=2)[0][:3]
  few, many = (Sampler.load(text_run, batch=batch) for batch in (3, 32))
  lines = annotated(few, problems(), s, tmp_path)
  assert annotated(many, problems(), s, tmp_path) == lines
  assert annotated(few, problems()[1:2], s, tmp_path) == lines[2:4]


def write(path, problems: int = 4, **changes) -> None:
  """Writes lines of solutions of the simulated solver."""
  rng, lines = np.random.default_rng(1), []
  for given in itertools.islice(arithmetic.distinct_problems(0, problems), problems):
    for _ in range(2):
      steps, answer = arithmetic.solve(given, rng).steps, str(given.answer)
      line = {"problem": given.text, "steps": steps, "ground_truth_answer": answer}
      lines.append(line | {"id": len(lines)} | changes)
  write_lines(path, lines)


@pytest.fixture(scope="module")
def annotations(text_run, tmp_path_factory):
  """A function that runs annotate.py --method=rollouts, once for each number of problems."""

  @functools.cache
  def run(problems: int):
    """The flags without --output, and the output."""
    folder = tmp_path_factory.mktemp("annotated")
    path, out = folder / "samples.jsonl", folder / "out.jsonl"
    write(path, problems)
    flags = [f"--checkpoint={text_run}", f"--input={path}", "--method=rollouts", "--prompt=plain"]
    flags += ["--labels=counts", "--rollouts=2", "--max_new_tokens=12", "--batch=16"]
    run_script("annotate.py", *flags, f"--output={out}")
    return flags, out

  return run


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_kills_lose_and_double_no_annotation(kills, annotations, tmp_path):
  """Killed at any moment and run again, an annotation loses and doubles nothing."""
  flags, whole = annotations(PROBLEMS_A_KILL * kills)
  out = tmp_path / "out.jsonl"
  jobs.kill_again(kills, "annotate.py", flags, out)
  assert out.read_bytes() == whole.read_bytes()
  found = [line["id"] for line in read_lines(out)]
  assert found == [*range(2 * PROBLEMS_A_KILL * kills)]


def test_two_hosts_share_the_problems(annotations, tmp_path):
  flags, one = annotations(PROBLEMS_A_KILL)
  two = tmp_path / "two.jsonl"
  jobs.finish(jobs.start("annotate.py", *flags, f"--output={two}", hosts=2, devices=2))
  assert one.read_bytes() == two.read_bytes()


def test_a_step_has_no_more_rollouts_than_its_limit(tmp_path):
  """The last round is smaller if the limit is no multiple of a round."""
  s = Settings(labels="counts", rollouts=7, width=0.01)
  lines = annotated(Oracle(0.6), solved(each=1)[0], s, tmp_path)
  counts = [each for line in lines for each in line["rollouts"] if each]
  assert counts and {n for _, n in counts} == {7}


def test_as_many_right_as_wrong_solutions_are_labelled(tmp_path, grader):
  """--balanced takes distinct finished solutions, of problems that have right and wrong ones."""
  made = lambda name, right, ended=True: Solution({}, (name,), ended, right)
  given = [made("a", True), made("a", True), made("b", False), made("c", True)]
  given += [made("d", False, ended=False)]
  assert [x.steps for x in rollouts.balance(given, 5)] == [("a",), ("b",)]
  assert rollouts.balance([made("a", True)], 5) == []
  about = [("p", "x", True), ("p", "y", False), ("p", "z", False), ("q", "x", True)]
  rows = [{"problem": p, "steps": [step], "is_correct": right} for p, step, right in about]
  rows = [row | {"ground_truth_answer": "1", "answer": "1"} for row in rows]
  path = write_lines(tmp_path / "samples.jsonl", rows)
  (problem,) = rollouts.read(path, "lines", grader, balanced=3)
  assert problem.text == "p" and [x.steps for x in problem.solutions] == [("x",), ("y",)]
  write_lines(path, rows[-1:])
  with pytest.raises(ValueError, match="no problem has both"):
    rollouts.read(path, "lines", grader, balanced=3)


def test_a_resumed_run_refuses_other_balanced_solutions(annotations, tmp_path, monkeypatch):
  """A journal is not continued if a verdict has changed, and with it which solutions are chosen."""
  flags, _ = annotations(PROBLEMS_A_KILL)
  command = ("annotate.py", *flags, "--balanced=2", f"--output={tmp_path}/out")
  read, left_out = rollouts.read, []

  def chosen(path, steps, grader, balanced):
    problems = read(path, steps, grader)
    for i in left_out:
      problems[-1].solutions.pop(i)
    return problems

  def stopped(*_):
    raise OSError("stopped")

  monkeypatch.setattr(rollouts, "read", chosen)
  monkeypatch.setattr(rollouts.Annotator, "run", stopped)
  for _ in range(2):  # the same solutions may go on
    assert "stopped" in call_script(*command, code=1).stderr
  left_out.append(0)
  assert "is of another run (" in (said := call_script(*command, code=1).stderr)
  assert "solutions: " in said


@pytest.mark.parametrize("labels", ["hard", "soft", "counts", "tolerant"])
def test_every_kind_of_labels_can_be_prepared(labels, tmp_path):
  """prepare_data.py keeps each label of an annotated line, with its weight."""
  lines = annotated(Oracle(0.6), solved()[0], Settings(labels=labels), tmp_path)
  path, out = tmp_path / "labels.jsonl", tmp_path / "data"
  write_lines(path, lines)
  manifest = prepare.prepare_stepwise(out, prepare.Stepwise(test_share=0.25), source=path)
  assert manifest["labels"] == {"hard": "binary", "counts": "counts"}.get(labels, "soft")
  assert [*manifest["classes"]] == ["-1", "1"]
  targets = {"hard": lambda x: 1 if x else -1, "counts": lambda x: (x[1] - x[0], x[0])}
  target = targets.get(labels, lambda x: (1 - x, x))
  expected = {
    (line["problem"], *line["steps"]): [target(x) for x in line["labels"] if x is not None]
    for line in lines
  }
  for split in ("train", "test"):
    for tree in labelled.step_trees(out, split, "process")[0]:
      begins = lambda key, tree=tree: key[: 1 + len(tree.steps)] == (tree.problem, *tree.steps)
      same = next(x for key, x in expected.items() if begins(key) and len(x) == len(tree.steps))
      assert [*tree.labels] == same


@pytest.mark.usefixtures("one_device")
def test_a_model_trains_on_rollout_counts(arithmetic_data, tmp_path):
  """The loss of a model that is trained on annotated lines goes down."""
  lines = annotated(Oracle(0.6), solved()[0], Settings(labels="counts"), tmp_path)
  path, out = tmp_path / "labels.jsonl", tmp_path / "data"
  write_lines(path, lines)
  prepare.prepare_stepwise(out, prepare.Stepwise(test_share=0.25), source=path)
  shutil.copyfile(arithmetic_data / "tokenizer.model", out / "tokenizer.model")
  c = tiny.change(tiny.experiment(out), "model", layers=1)
  c = tiny.change(c, "train", steps=30, eval_every=30, save_every=30)
  loop.run(c, tmp_path / "run")
  losses = [each["loss"] for each in tiny.records(tmp_path / "run") if "loss" in each]
  assert losses[-1] < losses[0]


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"ground_truth_answer": 3}, "samples.jsonl:1: .*ground_truth_answer"),
    ({"ground_truth_answer": ""}, "samples.jsonl:1: "),
    ({"steps": []}, "samples.jsonl:1: no steps"),
    ({"problem": "x", "ground_truth_answer": None}, "samples.jsonl:1: "),
  ],
)
def test_bad_lines_are_errors_with_file_line_and_value(changes, message, tmp_path, grader):
  """A line without steps, or without a usable answer, is an error with its file and line."""
  path = tmp_path / "samples.jsonl"
  write(path, 1, **changes)
  with pytest.raises(BadLine, match=message):
    rollouts.read(path, "lines", grader)


def test_lines_of_a_problem_with_other_answers_are_an_error(tmp_path, grader):
  """Two lines of a problem with different ground truth are an error with both answers."""
  path = tmp_path / "samples.jsonl"
  line = {"problem": "p", "steps": ["a"], "ground_truth_answer": "1"}
  other = line | {"ground_truth_answer": "2"}
  write_lines(path, [line, other])
  with pytest.raises(BadLine, match=r"jsonl:2: .*'2'.*'1'"):
    rollouts.read(path, "lines", grader)


def test_the_last_step_of_a_solution_that_was_cut_off_has_rollouts(tmp_path, grader):
  """A solution without an answer is continued after its last step too."""
  problem = PROBLEMS[3]
  steps = arithmetic.solve(problem, np.random.default_rng(0)).steps[:2]
  line = {"problem": problem.text, "steps": steps, "ground_truth_answer": str(problem.answer)}
  path = tmp_path / "samples.jsonl"
  path.write_text(json.dumps(line | {"finished": False, "is_correct": None}) + "\n")
  problems = rollouts.read(path, "lines", grader)
  (line,) = annotated(Oracle(), problems, Settings(labels="counts", rollouts=3), tmp_path)
  assert line["provenance"]["sources"] == ["rollouts"] * 2 and None not in line["rollouts"]
  assert line["is_correct"] is False


@pytest.mark.parametrize(
  "given, message",
  [
    (("--method=rollouts", "--threshold=0.5"), "--threshold does not go with --method=rollouts"),
    (("--method=model", "--rollouts=3"), "--rollouts does not go with --method=model"),
    (("--method=judge", "--search=binary"), "--search does not go with --method=judge"),
    (("--method=judge", "--url=http://x", "--served_model=m", "--temperature=0"), "are all equal"),
    (
      ("--method=judge", "--url=http://x", "--served_model=m", "--model=d"),
      "--model has no effect with --method=judge --url",
    ),
    (("--checkpoint=run", "--readout=trl"), "--readout goes with --model"),
    (("--method=rollouts", "--checkpoint=run", "--dtype=bfloat16"), "--dtype has no effect with"),
    (("--method=rollouts",), "give one of --model=DIR and --checkpoint=DIR, or --url=URL"),
    (("--method=rollouts", "--search=binary", "--labels=soft"), "labels with a binary search"),
    (("--method=rollouts", "--labels=soft", "--wrong_share=0.1"), "args.wrong_share=0.1: expected"),
    (("--method=rollouts", "--labels=counts", "--wrong_share=0.1"), "args.wrong_share=0.1"),
    (("--method=rollouts", "--labels=soft", "--tolerance=3"), "args.tolerance=3: expected"),
    (("--method=rollouts", "--tolerance=3"), "args.tolerance=3: expected"),
  ],
)
def test_flags_that_do_not_go_together_are_refused(given, message, tmp_path):
  """annotate.py ends with a message about a flag that its method or another flag excludes."""
  write(tmp_path / "samples.jsonl")
  paths = (f"--input={tmp_path / 'samples.jsonl'}", f"--output={tmp_path / 'out.jsonl'}")
  assert message in call_script("annotate.py", *given, *paths, code=(1, 2)).stderr
