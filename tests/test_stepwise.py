"""Labelled steps from any source: their forms, kinds of labels, splits and training."""

import hashlib
import http.server
import json

import msgspec
import pytest
import tiny
from conftest import call_script, write_lines

from prm_jax import config as config_lib
from prm_jax.datasets import arithmetic, labelled, prepare
from prm_jax.datasets.prm800k import recipes
from prm_jax.datasets.stepwise import records
from prm_jax.input_pipeline import step_dataset, token_tree
from prm_jax.runtime import json_lines, progress
from prm_jax.scoring import candidates
from prm_jax.scoring.scorer import Scorer
from prm_jax.training import loop
from prm_jax.types import StepTree

# The stepwise row of TRL's documentation ("Dataset formats and types").
TRL_ROW = {
  "prompt": "Which number is larger, 9.8 or 9.11?",
  "completions": [
    "The fractional part of 9.8 is 0.8, while the fractional part of 9.11 is 0.11.",
    "Since 0.11 is greater than 0.8, the number 9.11 is larger than 9.8.",
  ],
  "labels": [True, False],
}


def loaded(directory, split="train", objective="process", **changes):
  """What loading a split of a dataset says, with these settings of the data."""
  meaning = labelled.read_manifest(directory).meaning
  meaning |= {"classes": ("0", "1")} if objective == "outcome" else {}
  contract = token_tree.step_contract(tiny.TOKENIZER, "\n", objective, **meaning)
  data = config_lib.Data(str(directory), row_length=64, **changes)
  return step_dataset.load(data, split, tiny.TOKENIZER, contract, split == "test")[1]


def native(labels, problem="p", **more):
  """A row in the project's own form with these labels."""
  return {
    "problem": problem,
    "steps": [f"s{i}" for i in range(len(labels))],
    "labels": labels,
  } | more


def prepared(tmp_path, *rows, **options):
  """The training split's trees of a dataset of these rows, and the dataset's manifest."""
  source = write_lines(tmp_path / "train.jsonl", rows)
  options = {"test_share": 0.0} | options
  manifest = prepare.prepare_stepwise(
    tmp_path / "out", prepare.Stepwise(**options), source=source, overwrite=True
  )
  return labelled.step_trees(tmp_path / "out", "train", "process")[0], manifest


SHEPHERD = {
  "input": "Two plus two? Step 1: 2 + 2 = 4. ки\nStep 2: So 5 ки",
  "label": "Two plus two? Step 1: 2 + 2 = 4. +\nStep 2: So 5 -",
  "task": "GSM8K",
}


def test_three_forms_give_the_same_solution(tmp_path):
  """TRL's row, Math-Shepherd's tagged text and plain steps give the same labelled solution."""
  steps = ["Step 1: 2 + 2 = 4.", "Step 2: So 5"]
  forms = [
    SHEPHERD,
    SHEPHERD | {"is_correct": None},
    {"prompt": "Two plus two?", "completions": steps, "labels": [True, False], "problem": "?"},
    {"problem": "Two plus two?", "steps": steps, "labels": [True, False]},
    {"problem": "Two plus two?", "steps": steps, "labels": [1, -1]},
  ]
  expected = StepTree("Two plus two?", tuple(steps), (-1, 0), (1, -1), source="train.jsonl:1")
  for form in forms:
    trees, manifest = prepared(tmp_path, form)
    assert trees == [expected] and manifest["classes"] == ("-1", "1")


@pytest.mark.parametrize(
  ("labels", "kind"), [([1, 0], "binary"), ([1, 0, -1], "ratings"), ([1, -1], "ratings")]
)
def test_zero_of_a_trl_row_is_wrong_unless_the_file_has_minus_one(tmp_path, labels, kind):
  """TRL's rows may hold PRM800K's ratings; without -1 their 0 is a wrong step."""
  row = {"prompt": "p", "completions": ["s"] * len(labels), "labels": labels}
  trees, manifest = prepared(tmp_path, row)
  assert manifest["labels"] == kind
  assert trees[0].labels == (tuple(labels) if kind == "ratings" else (1, -1))


def test_bad_lines_can_be_skipped(tmp_path):
  """Lines that hold no labelled solution are counted and quoted; the others are kept.

  Math-Shepherd has some: a tag inside the problem, no "Step 1:", or two.
  """
  untagged = {"input": "Two plus two? ки Step 1: 4 ки", "label": "Two plus two? + Step 1: 4 +"}
  lower = {key: SHEPHERD[key].replace("Step 1", "step 1") for key in ("input", "label")}
  twice = {key: f"Do Step 1: of {SHEPHERD[key]}" for key in ("input", "label")}
  bad = untagged, twice, {"input": "?", "label": "?"}, SHEPHERD | {"label": "+"}, native(["+"])
  source = write_lines(tmp_path / "train.jsonl", [SHEPHERD, lower, *bad])
  source.write_text(source.read_text() + '{"problem": "cut of')  # by a kill
  options = (tmp_path / "out", prepare.Stepwise(test_share=0.0))
  with pytest.raises(json_lines.BadLine, match=r"train.jsonl:3: .*expected a problem"):
    prepare.prepare_stepwise(*options, source=source)
  manifest = prepare.prepare_stepwise(*options, source=source, on_bad_record="skip")
  assert manifest["splits"]["train"]["rows"] == {"read": 8, "kept": 2}
  assert manifest["splits"]["train"]["dropped"] == {"bad_record": 6}
  assert manifest["bad_records"]["count"] == 6
  whats = {
    4: "\"input\" has 'Step 1:' twice",
    5: "",
    6: "",
    7: "the label of step 1 is '+'",
    8: "not JSON",
  }
  for (line, what), shown in zip(
    whats.items(), manifest["bad_records"]["examples"][1:], strict=True
  ):
    assert f"train.jsonl:{line}: {what}" in shown
  source = write_lines(tmp_path / "all_bad.jsonl", [untagged])
  with pytest.raises(ValueError, match=r"no line holds a labelled solution; .*all_bad.jsonl:1: "):
    prepare.prepare_stepwise(tmp_path / "b", options[1], source=source, on_bad_record="skip")


@pytest.mark.parametrize(
  ("rows", "kind", "labels", "classes"),
  [
    ([[True, None, False]], "binary", (1, None, -1), 2),
    ([[1, 0, -1]], "ratings", (1, 0, -1), 3),
    ([[1, -1]], "ratings", (1, -1), 2),
    ([[0.25, 1]], "soft", ((0.75, 0.25), (0, 1)), 2),
    ([[1.0, 0], [0.5]], "soft", ((0, 1), (1, 0)), 2),
    ([[[3, 8], [8, 8]]], "counts", ((5, 3), (0, 8)), 2),
    ([["3 of 8", "0 of 4"]], "counts", ((5, 3), (4, 0)), 2),
  ],
)
def test_the_kind_of_labels_is_inferred_from_them(tmp_path, rows, kind, labels, classes):
  """Labels of each kind are recognised and converted; a neutral label makes a third class."""
  trees, manifest = prepared(tmp_path, *map(native, rows))
  assert manifest["labels"] == kind and len(manifest["classes"]) == classes
  assert trees[0].labels == labels
  about = labelled.read_manifest(tmp_path / "out").meaning
  assert about["recipe"] == f"stepwise, {kind} labels"
  assert about["neutral"] == ("positive" if classes == 3 else "none")


def test_annotate_py_declares_the_kind_of_its_labels(tmp_path):
  """Labels that annotate.py declares as soft are soft even if all are 0 and 1; rows without any
  label are an error."""
  declared = {"provenance": {"method": "rollouts", "labels": "soft"}}
  _, manifest = prepared(tmp_path, native([1.0, 0.0]) | declared)
  assert manifest["labels"] == "soft"
  with pytest.raises(ValueError, match="no labelled step to train on"):
    prepared(tmp_path, native([None, None]) | declared)


def test_an_ambiguous_zero_is_an_error(tmp_path):
  """Where 0 may be wrong or neutral, an error names the flag that decides it."""
  with pytest.raises(
    ValueError, match=r"--stepwise\.labels=binary .* or --stepwise\.labels=ratings"
  ):
    prepared(tmp_path, native([1, 0]))
  assert prepared(tmp_path, native([1, 0]), labels="binary")[0][0].labels == (1, -1)
  assert prepared(tmp_path, native([1, 0]), labels="ratings")[0][0].labels == (1, 0)


@pytest.mark.parametrize(
  ("row", "message"),
  [
    (native([2]), r"train\.jsonl:2: the label of step 1 is 2: expected one kind of labels"),
    (native([float("nan")]), r":2: the label of step 1 is nan"),
    (native(["8 of 3"]), r":2: the label of step 1 is '8 of 3'"),
    (native([[1, 0]]), r":2: the label of step 1 is \[1, 0\]"),
    (
      native(["+ - at `$.x`"]),
      r":2: the label of step 1 is '\+ - at \$\.x': expected one kind of labels",
    ),
    (native([-1]), r":2: the label of step 1 is -1: .*labels are binary so far"),
    (native([True, True]) | {"steps": ["a"]}, ":2: .*2 labels of 1 steps"),
    ({"problem": "p", "answer": "x"}, ":2: no labelled solution: expected"),
    (SHEPHERD | {"label": "Two"}, r':2: "label" is not "input" with'),
    (SHEPHERD | {"label": SHEPHERD["label"] + " So 6 +"}, r':2: "label" is not "input" with'),
    (SHEPHERD | {"input": "Two ки", "label": "Two +"}, r":2: \"input\" is 'Two ки': expected"),
    (TRL_ROW | {"completions": []}, ":2: "),
  ],
)
def test_a_bad_line_is_named(tmp_path, row, message):
  """A bad line is an error that names file, line and value, and no dataset is written."""
  with pytest.raises(json_lines.BadLine, match=message):
    prepared(tmp_path, native([True]), row)
  assert not (tmp_path / "out").exists()


def test_writing_shows_how_long_it_takes(tmp_path, monkeypatch, capsys):
  """While a dataset of any kind is written, a line says so every `progress.SECONDS`."""
  monkeypatch.setattr(progress, "SECONDS", 0.001)
  prepared(tmp_path, native([True, False]))
  first, *others = [x for x in capsys.readouterr().err.splitlines() if x.startswith("writing")]
  assert first == "writing stepwise" and "writing stepwise: 00:00" in others


def test_problems_are_held_out_whole(tmp_path):
  """The test split has all solutions of its problems, which are the same for any order of lines;
  a test file replaces it, and its problems are left out of training."""
  rows = [native([True, False], problem=f"p {i % 20}") for i in range(60)]
  write_lines(tmp_path / "all.jsonl", rows)
  options = prepare.Stepwise(test_share=0.2)
  out = tmp_path / "out"
  manifest = prepare.prepare_stepwise(out, options, source=tmp_path / "all.jsonl")
  splits = {
    s: {t.problem for t in labelled.step_trees(out, s, "process")[0]} for s in ("train", "test")
  }
  assert len(splits["test"]) == 4 and not splits["test"] & splits["train"]
  assert manifest["test_problems"] == sorted(splits["test"])
  write_lines(tmp_path / "all.jsonl", rows[::-1])
  prepare.prepare_stepwise(out, options, source=tmp_path / "all.jsonl", overwrite=True)
  assert {t.problem for t in labelled.step_trees(out, "test", "process")[0]} == splits["test"]
  folder = tmp_path / "folder"
  write_lines(folder / "train.jsonl", rows)
  write_lines(folder / "test.jsonl", [native([True], problem="p  3")])
  with pytest.raises(ValueError, match=r"test_share has no effect: .*test\.jsonl"):
    prepare.prepare_stepwise(out, options, source=folder, overwrite=True)
  manifest = prepare.prepare_stepwise(out, prepare.Stepwise(), source=folder, overwrite=True)
  trees, counts = labelled.step_trees(out, "train", "process")
  assert manifest["test_problems"] == ["p 3"]
  assert counts["dropped"] == {"test_problem": 3}
  assert manifest["splits"]["train"]["dropped"] == counts["dropped"]
  assert manifest["splits"]["train"]["rows"] == counts["rows"] == {"read": 60, "kept": 57}
  assert "p 3" not in {tree.problem for tree in trees}
  trees, manifest = prepared(tmp_path, rows[0], test_share=0.9)
  assert len(trees) == 1 and "test" not in manifest["splits"]  # not even if it is the only one
  unknown = [native([None], problem=f"u {i}") for i in range(30)]
  _, manifest = prepared(tmp_path, *rows, *unknown, test_share=0.2)
  assert manifest["splits"]["test"]["rows"] == {"read": 12, "kept": 12}  # labelled problems only


def prepare_data(source, output):
  """The completed run of prepare_data.py on a file."""
  flags = (f"--source={source}", f"--output={output}", "--overwrite=True")
  return call_script("prepare_data.py", "--dataset=stepwise", *flags)


def test_a_test_split_without_a_wrong_step_gets_a_warning(tmp_path):
  """A test split without a wrong step gets a warning, which advises a larger share only if the
  training split has wrong steps."""
  rows = [native([True], problem=f"p {i}") for i in range(20)]
  wrong = native([False], problem="q 1")
  for lines, expected in [
    ([*rows, wrong], "no wrong step; AUROC is undefined: raise --stepwise.test_share (0.05)\n"),
    (rows, "no wrong step; AUROC is undefined\n"),
  ]:
    run = prepare_data(write_lines(tmp_path / "all.jsonl", lines), tmp_path / "out")
    assert f"warning: test split: 1 solution(s), {expected}" in run.stderr
  lines = [native([True, False], problem=f"p {i}") for i in range(20)]
  run = prepare_data(write_lines(tmp_path / "all.jsonl", lines), tmp_path / "out")
  assert "warning: test" not in run.stderr


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_file_on_the_web_is_downloaded_once(tmp_path, served, file):
  """A source may be a URL, whose file is downloaded once, as it is, and named in the manifest."""
  folder, url = served
  content = write_lines(folder / file, [SHEPHERD]).read_bytes()
  options = {"source": url + file, "download_dir": tmp_path / "downloads"}
  for name in ("first", "second"):
    manifest = prepare.prepare_stepwise(tmp_path / name, prepare.Stepwise(), **options)
    assert manifest["source"]["train"]["url"] == url + file
    assert manifest["source"]["train"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert len(labelled.step_trees(tmp_path / name, "train", "process")[0]) == 1
    (folder / file).unlink(missing_ok=True)
  with pytest.raises(ValueError, match="the URL of a file"):
    prepare.prepare_stepwise(tmp_path / "out", prepare.Stepwise(), source=url)


def test_an_interrupted_download_is_an_error_and_not_kept(tmp_path, served, monkeypatch):
  """A connection that ends early is an error with advice; the next run downloads the file again."""
  folder, url = served
  write_lines(folder / "rows.jsonl", [SHEPHERD, SHEPHERD])
  half = lambda _, source, out: out.write(source.readline())
  options = {"source": url + "rows.jsonl", "download_dir": tmp_path / "downloads"}
  with monkeypatch.context() as patch:
    patch.setattr(http.server.SimpleHTTPRequestHandler, "copyfile", half)
    with pytest.raises(RuntimeError, match=r"ended [0-9]+ bytes early\. .* pass its path"):
      prepare.prepare_stepwise(tmp_path / "out", prepare.Stepwise(), **options)
  manifest = prepare.prepare_stepwise(tmp_path / "out", prepare.Stepwise(), **options)
  assert manifest["splits"]["train"]["rows"]["read"] == 2


def test_solutions_with_an_outcome_train_an_outcome_model(tmp_path):
  """An outcome model trains on whole solutions with `is_correct`, also after the last label."""
  rows = [native([True, None], is_correct=False), native([True], problem="q")]
  trees, _ = prepared(tmp_path, *rows)
  assert [tree.steps for tree in trees] == [("s0",), ("s0",)]
  outcomes, counts = labelled.step_trees(tmp_path / "out", "train", "outcome")
  assert [(tree.steps, tree.outcome) for tree in outcomes] == [(("s0", "s1"), False)]
  assert counts["dropped"] == {"no_is_correct": 1}
  tagged, _ = records.parse(SHEPHERD | {"is_correct": True}, "f:1")
  assert tagged.is_correct is True
  with pytest.raises(json_lines.BadLine, match=r"f:1: .*is_correct"):
    records.parse(SHEPHERD | {"is_correct": "yes"}, "f:1")
  prepared(tmp_path, *[native([None], is_correct=right) for right in (True, False)])
  assert len(labelled.step_trees(tmp_path / "out", "train", "outcome")[0]) == 2
  assert [*step_dataset.texts(tmp_path / "out", "train", 9)] == ["p", "s0"] * 2


def test_data_without_a_solution_for_the_objective_is_named(tmp_path):
  """The error for an objective without a solution names folder, split and what was dropped."""
  prepared(tmp_path, native([True]))
  message = "out: the split train has no solution for loss.objective=outcome.*no_is_correct': 1"
  with pytest.raises(ValueError, match=message):
    loaded(tmp_path / "out", objective="outcome")


@pytest.mark.parametrize("eval_split", ["test", "train"])
def test_held_out_problems_stay_out_of_an_added_dataset(tmp_path, eval_split):
  """Problems that a dataset holds out do not train as part of another, whatever is evaluated.

  Neither spaces nor the lack of a row for the objective, in either split, make them train.
  """
  rows = [native([True], problem=name) for name in ("a", "b", "held out", " held  out", "q", "c")]
  outcome = native([None], problem="q", is_correct=True)
  write_lines(tmp_path / "own" / "train.jsonl", rows[:3])
  write_lines(tmp_path / "own" / "test.jsonl", [native([False], problem="held out"), outcome])
  write_lines(tmp_path / "more.jsonl", rows[3:])
  options = prepare.Stepwise(test_share=0)
  prepare.prepare_stepwise(tmp_path / "first", prepare.Stepwise(), source=tmp_path / "own")
  prepare.prepare_stepwise(tmp_path / "second", options, source=tmp_path / "more.jsonl")
  about = loaded(tmp_path / "first", also=str(tmp_path / "second"), eval_split=eval_split)
  assert about["examples"] == 3  # a, b and c


def test_a_dataset_may_be_added_to_another_and_cut_to_a_share(tmp_path):
  """Training takes both datasets without the evaluated problems, and shares of their problems."""
  own = [{"problem": f"p{i}", "steps": ["s"], "labels": [-1 + i % 3]} for i in range(60)]
  more = [{"problem": f" p{i}", "steps": ["t"], "labels": [i % 2 == 0]} for i in range(30, 90)]
  for name, rows, share in (("own", own, 0.2), ("more", more, 0.0)):
    source = write_lines(tmp_path / f"{name}.jsonl", rows)
    prepare.prepare_stepwise(tmp_path / name, prepare.Stepwise(test_share=share), source=source)
  also = {"also": str(tmp_path / "more")}
  examples = lambda *split, **changes: loaded(tmp_path / "own", *split, **changes)["examples"]
  tested = {tree.problem for tree in labelled.step_trees(tmp_path / "own", "test", "process")[0]}
  both = examples(**also)
  added = sum(f"p{i}" not in tested for i in range(30, 90))
  assert len(tested) == 12 and both == 48 + added
  assert examples() == 48 and examples("test", **also) == 12
  assert [examples(share=share) for share in (0.25, 0.5, 0.001)] == [12, 24, 1]
  counts = [examples(share=share, **also) for share in (0.25, 0.5)]
  assert 0 < counts[0] < counts[1] < both


def test_datasets_with_another_meaning_of_neutral_are_not_joined(tmp_path, arithmetic_data):
  """A dataset whose neutral steps count as wrong is not added to one where they count as right."""
  generator = arithmetic.Generator(train_problems=5, test_problems=2, candidates=1)
  strict = msgspec.structs.replace(recipes.RECIPES["paper"], name="strict", neutral="negative")
  prepare.prepare_arithmetic(tmp_path / "strict", generator, recipe=strict)
  also = {"also": str(tmp_path / "strict")}
  with pytest.raises(ValueError, match=r"neutral counts as positive in .* and as negative in "):
    loaded(arithmetic_data, **also)
  loaded(arithmetic_data, objective="outcome", **also)  # outcomes have no neutral class


@pytest.mark.usefixtures("one_device")
def test_the_row_of_trls_documentation_becomes_a_model(tmp_path, arithmetic_data):
  """The row of TRL's documentation is prepared, trained on, scored and exported."""
  data, run = tmp_path / "data", tmp_path / "run"
  printed = prepare_data(write_lines(tmp_path / "trl.jsonl", [TRL_ROW]), data).stdout
  assert "binary labels" in printed and "--config.data.eval_split=train" in printed
  c = tiny.experiment(arithmetic_data)
  row_data = {"directory": str(data), "eval_split": "train", "row_length": 256}
  c = tiny.change(tiny.change(c, "data", **row_data), "model", layers=1)
  c = tiny.change(c, "train", steps=2, batch_rows=1, eval_every=2, save_every=2)
  loop.run(c, run)
  solution = {"problem": TRL_ROW["prompt"], "steps": TRL_ROW["completions"]}
  scorer = Scorer.load(run)
  (rating,) = scorer.by_head([(solution["problem"], solution["steps"])])
  scored = candidates.scored(solution, solution["steps"], rating, scorer.contract)
  assert [set(p) for p in scored["rating_probs"]] == [{"-1", "0", "1"}] * 2
  assert all(p["0"] == 0 for p in scored["rating_probs"])
  call_script("export.py", f"--checkpoint={run}", f"--output={tmp_path / 'exported'}")
  config = json.loads((tmp_path / "exported" / "config.json").read_text())
  assert config["id2label"] == {"0": "-1", "1": "1"}
  with pytest.raises(ValueError, match="no split 'test'"):
    loop.run(tiny.change(c, "data", eval_split="test"), tmp_path / "b")
