"""Published readouts give the scores of their authors' own procedures."""

import dataclasses
import functools
import json
import runpy
import sys

import jax
import numpy as np
import published_models as models
import pytest
from conftest import ROOT, run_script

from prm_jax.evaluation import scored_samples
from prm_jax.input_pipeline import tokenizers
from prm_jax.pretrained import safetensors_files, weights
from prm_jax.scoring import batching, readouts
from prm_jax.scoring.readouts import PUBLISHED
from prm_jax.scoring.scorer import Scorer

PROBLEM = "What is  3 + 4 - 2?"
ORDINARY = ("Step 1: 3 + 4 = 7.", "So 7 - 2 = 5.", "The answer is: 5")
# White space at both ends and alone, letters that no merge knows, ends like a separator's start.
ODD = ("  so we have 7 .\t", " ", "\u00e9 \u4eae e\u0301 \\frac{1}{2}", "+", "5\r", "-  -")
EXACT = 2e-6  # float32 against float64 heads, packed against alone


@functools.cache
def tokenizer_of(name):
  """The tokenizer as its authors use it: special tokens in a text are parsed."""
  tokenizer = models.tokenizer_json(models.FAMILY[name][1])
  return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="session")
def published(tmp_path_factory):
  """Of a readout's name: a tiny directory, and the scorer that reads it."""

  @functools.cache
  def make(name):
    own = models.write(tmp_path_factory.mktemp(name), name)
    scorer = Scorer.load_published(own.directory, name)
    return own, dataclasses.replace(scorer, row_length=128)

  return make


def authors(own, name, steps, problem=PROBLEM):
  return models.AUTHORS[name](
    tokenizer_of(name), models.plain_chat(name), own.forward, problem, steps
  )


@pytest.mark.parametrize("name", PUBLISHED)
def test_scores_are_those_of_the_authors_procedure(published, name):
  """Packed scoring gives the scores of the authors' procedure, run on each solution alone."""
  own, scorer = published(name)
  steps = ORDINARY + ODD
  if name == "math-shepherd":
    steps = tuple(step for step in steps if "\u4eae" not in step)  # its tokens are letters it knows
  given = scorer.probabilities([(PROBLEM, steps), (PROBLEM, steps[:1]), (PROBLEM, steps)])
  assert [p.shape for p in given] == [(len(steps), 2), (1, 2), (len(steps), 2)]
  np.testing.assert_allclose(given[0].sum(1), 1, rtol=1e-6)
  expected = authors(own, name, steps)
  assert np.ptp(expected) > 1e-5  # else any position would do
  np.testing.assert_allclose(given[0][:, 1], expected, atol=EXACT)
  np.testing.assert_allclose(given[1][:, 1], authors(own, name, steps[:1]), atol=EXACT)
  np.testing.assert_array_equal(given[2], given[0])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_neighbouring_positions_say_something_else(published, name):
  """Reads one token earlier or later give other scores, so the comparison above can fail."""
  own, scorer = published(name)
  tree = scorer.encode(PROBLEM, ORDINARY)
  for shift in (-1, 1):
    reads = np.minimum(tree.read_positions + shift, len(tree) - 1)
    (moved,) = scorer.read([dataclasses.replace(tree, read_positions=reads)], [PROBLEM])
    difference = np.abs(moved[:2, 1] - authors(own, name, ORDINARY)[:2])
    assert difference.min() > 20 * EXACT


@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_are_those_of_the_authors_text(published, name):
  """Token ids equal those of the authors' procedure, and reads are at its tags."""
  _, scorer = published(name)
  encode, tree = tokenizer_of(name), scorer.encode(PROBLEM, ORDINARY)
  seen = []
  models.AUTHORS[name](
    encode,
    models.plain_chat(name),
    lambda ids: seen.append(ids) or np.zeros((len(ids), scorer.vocab_size)),
    PROBLEM,
    ORDINARY,
  )
  assert tree.tokens.tolist() == seen[-1][: len(tree)]
  assert tree.read_positions[-1] == len(tree) - 1
  after = [encode("+")[0]] if name == "rlhflow" else None
  tag = {
    "qwen2.5-math-prm": encode("<extra_0>"),
    "math-shepherd": encode("ки"),
    "rlhflow": encode("\n\n"),
  }.get(name, encode("\n"))
  for read in tree.read_positions:
    assert tree.tokens[read] == tag[-1]
    if after and read + 1 < len(tree):
      assert tree.tokens[read + 1] == after[0]


def test_separators_that_would_merge_do_not(published):
  """TRL and Skywork encode step and separator apart: as one text, "7." and the line break merge."""
  for name in ("trl", "skywork-o1-prm"):
    encode, (_, scorer) = tokenizer_of(name), published(name)
    assert encode("7.\n") != encode("7.") + encode("\n")
    tree = scorer.encode("a", ("7.", "5"))
    at = tree.read_positions[0]
    assert tree.tokens[at - 1 : at + 1].tolist() == [encode("7.")[-1], encode("\n")[0]]


def test_several_separator_tokens_are_read_at_the_last(published):
  """TRL labels the last token of a separator that has several."""
  own, _ = published("trl")
  layout = PUBLISHED["trl"](tokenizers.load(own.directory), {}, ".\n ###\n")
  ends = tokenizer_of("trl")(".\n ###\n")
  tree = layout.encode("a", ("b", "c"))
  assert len(ends) > 1
  assert tree.tokens[-len(ends) :].tolist() == ends
  assert tree.read_positions.tolist() == [len(tree) - 2 - len(ends), len(tree) - 1]
  assert all(tree.tokens[read] == ends[-1] for read in tree.read_positions)


@pytest.mark.parametrize(
  ("settings", "first"),
  [({"bos_token": "<|im_start|>"}, "<|im_start|>"), ({"bos_token": None}, ""), ({}, "")],
)
def test_trl_puts_a_first_token_that_the_tokenizer_would_not(published, settings, first):
  """TRL's first token is the configured bos_token, even if the tokenizer adds none by itself."""
  own, _ = published("trl")
  tokenizer = tokenizers.load(own.directory)
  assert tokenizer.bos_id is None
  tree = readouts.trl(tokenizer, settings, "").encode("a", ("b",))
  assert tree.tokens.tolist() == [
    t for x in (first, "a", "b", "\n") for t in tokenizer_of("trl")(x)
  ]


@pytest.mark.parametrize("name", ["trl", "skywork-o1-prm"])
def test_a_first_token_that_decodes_to_nothing(tmp_path, name):
  """A first token that is a control symbol without text is found by its name."""
  tokenizers.train_sentencepiece(["a b c 1 2 3"] * 9, tmp_path / "tokenizer.model", 310)
  settings = {"bos_token": "<s>", "add_bos_token": False}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  tokenizer = tokenizers.load(tmp_path)
  assert tokenizer.bos_id is None and tokenizer.decode([1]) == ""
  tree = PUBLISHED[name](tokenizer, settings, "").encode("a", ("b",))
  assert tree.tokens[0] == 1
  assert tokenizer.decode(tree.tokens[1:]).replace("\n", "") == "ab"
  with pytest.raises(ValueError, match="the tokenizer has no token '<start>'"):
    PUBLISHED[name](tokenizer, {"bos_token": "<start>"}, "")


@pytest.mark.parametrize("name", PUBLISHED)
def test_probabilities_of_exactly_zero_stay_in_place(published, name):
  """Probabilities of exactly 0 and 1 stay at their steps (Qwen's authors drop zeros)."""
  _, scorer = published(name)
  # Larger weights: each step is surely right or surely wrong.
  extreme = dataclasses.replace(scorer, head={k: 1e6 * v for k, v in scorer.head.items()})
  (given,) = extreme.probabilities([(PROBLEM, ORDINARY)])
  assert set(np.unique(given)) == {0.0, 1.0}
  assert given.shape == (3, 2)
  (usual,) = scorer.probabilities([(PROBLEM, ORDINARY)])
  if name in ("math-shepherd", "rlhflow", "trl"):  # whose heads are linear, but for a small bias
    np.testing.assert_array_equal(given.argmax(1), usual.argmax(1))


@pytest.mark.parametrize("name", ["qwen2.5-math-prm", "rlhflow", "skywork-o1-prm", "trl"])
def test_special_tokens_in_a_text_are_letters(published, name):
  """Special tokens spelled out in a step are plain letters: they add no read and end no turn."""
  _, scorer = published(name)
  specials = models.LLAMA_SPECIALS if name == "rlhflow" else models.QWEN_SPECIALS
  special = tokenizer_of(name)("".join(specials))
  assert len(special) == 4
  steps = ("a <extra_0> b", f"x{''.join(specials)}y", "<extra_0>")
  tree, plain = scorer.encode("p", steps), scorer.encode("p", ("a", "b", "c"))
  assert len(tree.read_positions) == 3
  for token in special:  # as many as the layout itself has put there
    assert np.count_nonzero(tree.tokens == token) == np.count_nonzero(plain.tokens == token)
  (given,) = scorer.probabilities([("p", steps)])
  assert given.shape == (3, 2)


def test_a_tag_inside_a_step_is_not_read(published):
  """Math-Shepherd's tag inside a problem or step is not read, and shifts no read."""
  own, scorer = published("math-shepherd")
  encode = tokenizer_of("math-shepherd")
  steps = ("the ки is 3", "ки ки 4", "5")
  tree = scorer.encode("add ки", steps)
  assert np.count_nonzero(tree.tokens == encode("ки")[0]) == 3 + 3
  text = "add ки the ки is 3 ки"
  assert tree.read_positions[0] == len(encode(text))  # after <s>
  assert len(tree.read_positions) == 3
  (given,) = scorer.probabilities([("add ки", steps)])
  expected = authors(own, "math-shepherd", steps, "add ки")[[2, 4, 5]]
  np.testing.assert_allclose(given[:, 1], expected, atol=EXACT)


def test_a_step_that_brings_its_tag_is_refused(published):
  """A step that ends with Math-Shepherd's tag, as in its own files, is refused with its index."""
  _, scorer = published("math-shepherd")
  with pytest.raises(batching.SolutionError, match="step 1 ends with the tag 'ки'") as error:
    scorer.probabilities([("p", ("a",)), ("p", ("a", "b ки "))])
  assert error.value.index == 1


def test_a_step_of_several_lines_is_read_at_its_end(published):
  """A step of several lines has Skywork's ids, and is read at its last line."""
  own, scorer = published("skywork-o1-prm")
  steps = ("first\n\nof three", "second", "\n")
  (given,) = scorer.probabilities([(PROBLEM, steps)])
  every_line = authors(own, "skywork-o1-prm", steps)
  assert len(every_line) == 6
  np.testing.assert_allclose(given[:, 1], every_line[[2, 3, 5]], atol=EXACT)


@pytest.mark.parametrize(
  ("template", "system"),
  [
    (models.LLAMA_TEMPLATE, models.DATE),
    (models.LLAMA_TEMPLATE.replace("26 Jul 2024", "1 Jan 2025"), "Today Date: 1 Jan 2025\n\n"),
    ([{"name": "default", "template": models.LLAMA_TEMPLATE}], models.DATE),
    (None, models.DATE),
    ("{{ bos_token }}{{ '<|start_header_id|>' }}...", ""),
  ],
)
def test_the_system_turn_is_the_templates(published, template, system):
  """The system turn follows the chat template: Llama 3.1 has one with a date, Llama 3 none.

  What is taken without a template is said in the contract's prompt.
  """
  own, _ = published("rlhflow")
  tokenizer = tokenizers.load(own.directory)
  layout = readouts.rlhflow(tokenizer, {"chat_template": template}, "")
  tree, encode = layout.encode("p", ("a",)), tokenizer_of("rlhflow")
  turn = "<|start_header_id|>system<|end_header_id|>"
  text = tokenizer.decode(tree.tokens)
  assert (f"{turn}" in text) == bool(system)
  assert f"{system}<|eot_id|>" in text or not system
  assert ("assumed" in layout.prompt) == (template is None)
  assert tree.tokens[-1] == encode("\n\n")[0]


def test_a_model_without_llama_turns_is_refused(published):
  """RLHFlow's readout refuses another chat template, and answers that are not one token each."""
  own, _ = published("rlhflow")
  tokenizer = tokenizers.load(own.directory)
  with pytest.raises(ValueError, match="not Llama 3's"):
    readouts.rlhflow(tokenizer, {"chat_template": "[INST]"}, "")
  whole = tokenizer.encode
  tokenizer.encode = lambda text, special=False: [9] if text == "\n\n-" else whole(text, special)
  with pytest.raises(ValueError, match="'-' after a line break is no token of its own"):
    readouts.rlhflow(tokenizer, {}, "")


@pytest.mark.parametrize(
  ("directory_of", "name", "message"),
  [
    ("trl", "qwen2.5-math-prm", "its weights lack score.0.weight, score.0.bias, score.2.weight"),
    ("rlhflow", "qwen2.5-math-prm", "the tokenizer has no token '<|im_start|>'"),
    ("trl", "math-shepherd", r"'ки' must be one token; it encodes to \["),
    ("trl", "orm", "--readout=orm: expected one of qwen2.5-math-prm, math-shepherd, "),
    ("trl", "", r"no prm_jax\.json in it, .*--readout=NAME is needed: one of qwen2\.5-math-prm, "),
  ],
)
def test_the_wrong_readout_says_what_is_missing(published, directory_of, name, message):
  """A directory without the readout's head, tag or special token is an error that names it."""
  own, _ = published(directory_of)
  with pytest.raises(ValueError, match=message):
    Scorer.load_published(own.directory, name)


def changed(own, directory, tensors):
  """A copy of a directory with other tensors."""
  for file in own.directory.iterdir():
    (directory / file.name).write_bytes(file.read_bytes())
  found = {n: t.read() for n, t in weights.tensors(own.directory).items()} | tensors
  safetensors_files.write_directory(directory, found.items())
  return directory


def test_damaged_directories_say_what_is_wrong(published, tmp_path):
  """A head of another shape and tokens beyond the embedding are errors that show the numbers."""
  own, _ = published("trl")
  three = {"score.weight": np.zeros((3, 16), np.float32), "score.bias": np.zeros(3, np.float32)}
  (tmp_path / "three").mkdir()
  with pytest.raises(ValueError, match=r"score.weight is \[3, 16\], expected \[2, 16\]"):
    Scorer.load_published(changed(own, tmp_path / "three", three), "trl")
  _, scorer = published("trl")
  small = dataclasses.replace(scorer, vocab_size=300)
  with pytest.raises(batching.SolutionError, match="beyond the embedding's 300 rows"):
    small.probabilities([("Janet has 16 eggs", ("sells the others.",))])


def test_other_heads_may_lie_beside_the_one_that_is_read(published, tmp_path):
  """A language-model head that the readout does not use is ignored; unknown tensors are not."""
  own, scorer = published("qwen2.5-math-prm")
  assert "lm_head.weight" in weights.tensors(own.directory)
  extra = {"model.layers.0.adapter.weight": np.zeros(3, np.float32)}
  with pytest.raises(ValueError, match=r"unknown: model\.layers\.0\.adapter\.weight"):
    Scorer.load_published(changed(own, tmp_path, extra), "qwen2.5-math-prm")
  assert "language_model" not in scorer.params


@pytest.mark.parametrize("name", ["qwen2.5-math-prm", "skywork-o1-prm"])
def test_a_published_head_is_not_started_from(published, name):
  """Training cannot start from a published reward head: the error says what to take instead."""
  own, _ = published(name)
  abstract = jax.eval_shape(lambda: own.params)
  message = rf"unknown: {min(models.HEADS[name])[:5]}.*own head cannot be started from: take the"
  with pytest.raises(ValueError, match=message):
    weights.load(own.directory, abstract, own.config)


def test_bfloat16_is_near(published):
  """bfloat16 parameters give probabilities near those of float32."""
  own, scorer = published("rlhflow")
  half = Scorer.load_published(own.directory, "rlhflow", "bfloat16")
  assert {str(x.dtype) for x in jax.tree.leaves(half.params["blocks"])} == {"bfloat16"}
  half = dataclasses.replace(half, row_length=128)
  (near,), (exact,) = (s.probabilities([(PROBLEM, ORDINARY)]) for s in (half, scorer))
  np.testing.assert_allclose(near, exact, atol=0.05)
  assert np.abs(near - exact).max() > 0


def lines_of(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_score_py_reads_a_published_model(published, tmp_path):
  """score.py keeps keys, writes the contract beside the scores, and rerank.py reads the file."""
  own, scorer = published("rlhflow")
  record = {"problem": PROBLEM, "answer": "5", "is_correct": True, "mine": [1, None]}
  source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  texts = [{"steps": list(ORDINARY)}, {"text": "##".join(ORDINARY)}, {"steps": ["+"]}]
  source.write_text("".join(json.dumps(record | text) + "\n" for text in texts))
  arguments = (f"--model={own.directory}", "--readout=rlhflow", f"--input={source}")
  done = run_script("score.py", *arguments, f"--output={out}", "--separator=##")
  assert done.returncode == 0, done.stderr
  (expected,) = scorer.probabilities([(PROBLEM, ORDINARY)])
  first, second, third = lines_of(out)
  assert record.items() <= first.items()
  assert second["steps"] == list(ORDINARY) and len(third["rating_probs"]) == 1
  for line in (first, second):
    assert [list(p) for p in line["rating_probs"]] == [["-1", "0", "1"]] * 3
    given = [[p["-1"], p["1"]] for p in line["rating_probs"]]
    np.testing.assert_allclose(given, expected, atol=EXACT)
    assert all(p["0"] == 0 for p in line["rating_probs"])
    assert line["prm_score"] == pytest.approx(np.prod(expected[:, 1]), rel=1e-4)
  samples = scored_samples.read_scored_samples([out])
  assert samples.step_probs.shape == (7, 3)
  contract = json.loads((tmp_path / "out.jsonl.contract.json").read_text())
  assert contract["readout"] == "rlhflow" and contract["classes"] == ["-1", "1"]
  assert contract["separator"] == "##" and contract["read"] == "at the token before the answer"
  assert sorted(contract["sha256"]) == ["config.json", "model.safetensors", "tokenizer.json"]
  assert contract["tokenizer_hash"] == contract["sha256"]["tokenizer.json"]


def score_py(monkeypatch, *arguments):
  """The message that score.py ends with, run in this process: starting one takes seconds."""
  monkeypatch.setattr(sys, "argv", ["score.py", *map(str, arguments)])
  with pytest.raises(SystemExit) as error:
    runpy.run_path(str(ROOT / "scripts" / "score.py"), run_name="__main__")
  return str(error.value)


def test_score_py_says_which_line_a_layout_refuses(published, tmp_path, monkeypatch):
  """A solution that a layout refuses is an error with file and line; nothing is written."""
  own, _ = published("math-shepherd")
  source = tmp_path / "in.jsonl"
  source.write_text('{"problem": "p", "steps": ["a"]}\n{"problem": "p", "steps": ["a ки"]}\n')
  flags = (f"--model={own.directory}", "--readout=math-shepherd", f"--input={source}")
  message = score_py(monkeypatch, *flags, f"--output={tmp_path}/o.jsonl")
  assert f"{source}:2: step 0 ends with the tag" in message
  assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (("--checkpoint=a", "--model=b"), "give one of --checkpoint=DIR and --model=DIR"),
    (("--checkpoint=a", "--readout=trl"), "go with --model"),
    (("--model=nowhere", "--readout=trl"), "nowhere: not a directory"),
  ],
)
def test_score_py_wants_one_model(tmp_path, monkeypatch, flags, message):
  """score.py takes either a checkpoint or a model, with the flags that belong to it."""
  arguments = (*flags, "--input=none", f"--output={tmp_path}/o.jsonl")
  assert message in score_py(monkeypatch, *arguments)
  assert not list(tmp_path.iterdir())


def test_the_contracts_place_is_tried_first(tmp_path, monkeypatch):
  """A contract that cannot be written beside the output is an error before the model is loaded."""
  (tmp_path / "o.jsonl.contract.json").mkdir()
  flags = ("--model=nowhere", "--readout=trl", "--input=none", f"--output={tmp_path}/o.jsonl")
  message = score_py(monkeypatch, *flags)
  assert message.startswith(f"score.py: {tmp_path}/o.jsonl.contract.json: is a directory")
  assert [path.name for path in tmp_path.iterdir()] == ["o.jsonl.contract.json"]
