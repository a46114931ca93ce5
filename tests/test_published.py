"""Published reward models have the scores of their authors' own procedures."""

import dataclasses
import functools
import json

import jax
import numpy as np
import published_models as models
import pytest
import tiny
from conftest import call_script, start_script

from prm_jax.evaluation import scored_samples
from prm_jax.generation import prompts
from prm_jax.input_pipeline import tokenizers
from prm_jax.pretrained import safetensors_files, weights
from prm_jax.scoring import readouts
from prm_jax.scoring.rater import SolutionError
from prm_jax.scoring.scorer import Scorer

PROBLEM = "What is  3 + 4 - 2?"
ORDINARY = ("Step 1: 3 + 4 = 7.", "So 7 - 2 = 5.", "The answer is: 5")
# Outer and sole white space, letters that no merge has, ends that look like separators.
ODD = ("  so we have 7 .\t", " ", "\u00e9 \u4eae e\u0301 \\frac{1}{2}", "+", "5\r", "-  -")
EXACT = 2e-6  # tolerance for float32 against float64 heads, and packed against alone


@pytest.fixture(scope="session")
def published(tmp_path_factory):
  """Returns a function from a readout's name to a tiny published model and its scorer."""

  @functools.cache
  def make(name):
    own = models.write(tmp_path_factory.mktemp(name), name)
    return own, dataclasses.replace(Scorer.load_model(own.directory, name), row_length=128)

  return make


def steps_for(name):
  """Returns ordinary and odd steps; Mistral's tokenizer cannot encode one of the letters."""
  return tuple(s for s in ORDINARY + ODD if name != "math-shepherd" or "\u4eae" not in s)


@pytest.mark.parametrize("name", readouts.PUBLISHED)
def test_scores_equal_those_of_the_authors_procedure(published, name):
  """Packed scoring gives the scores of the authors' procedure, run on each solution alone."""
  own, scorer = published(name)
  steps = steps_for(name)
  given = scorer.probabilities([(PROBLEM, steps), (PROBLEM, steps[:1]), (PROBLEM, steps)])
  assert [p.shape for p in given] == [(len(steps), 2), (1, 2), (len(steps), 2)]
  np.testing.assert_allclose(given[0].sum(1), 1, rtol=1e-6)
  expected = own.authors(PROBLEM, steps)
  assert np.ptp(expected) > 1e-5  # otherwise a wrong position could pass
  np.testing.assert_allclose(given[0][:, 1], expected, atol=EXACT)
  np.testing.assert_allclose(given[1][:, 1], own.authors(PROBLEM, steps[:1]), atol=EXACT)
  np.testing.assert_array_equal(given[2], given[0])


@pytest.mark.parametrize(("name", "benchmark"), models.BENCHMARK_AUTHORS)
def test_scores_equal_those_of_a_benchmarks_own_layout(published, name, benchmark):
  """A benchmark's name selects the layout of its code, and so the scores of that code."""
  own, plain = published(name)
  loaded = Scorer.load_model(own.directory, name, benchmark=benchmark)
  scorer = dataclasses.replace(loaded, row_length=128)
  steps = (
    "1. 3 + 4 = 7. ",
    "Step 2. So 7 - 2 = 5.",
    "Step 3: 5",
    "step  4.The answer",
    "5 \\frac{1}{2}",
  )
  (given,), (other,) = (each.probabilities([(PROBLEM, steps)]) for each in (scorer, plain))
  procedure = models.BENCHMARK_AUTHORS[name, benchmark]
  expected = procedure(own.encode, own.chat, own.forward, PROBLEM, steps)
  np.testing.assert_allclose(given[:, 1], expected, atol=EXACT)
  assert np.abs(given - other).max() > 1e-4
  assert scorer.facts()["prompt"] != plain.facts()["prompt"]


@pytest.mark.reference
@pytest.mark.parametrize("name", readouts.PUBLISHED)
def test_scores_equal_the_authors_on_torch(published, name):
  """Transformers, given the same directory, computes the same step scores."""
  import torch
  import transformers

  own, scorer = published(name)
  trunk = transformers.AutoModel.from_pretrained(own.directory).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(own.directory)

  def forward(ids):
    with torch.no_grad():
      return own.outputs(trunk(torch.tensor([ids])).last_hidden_state[0].double().numpy())

  encode = functools.partial(tokenizer.encode, add_special_tokens=False)
  chat = functools.partial(tokenizer.apply_chat_template, tokenize=False)
  expected = models.AUTHORS[name](encode, chat, forward, PROBLEM, steps_for(name))
  (given,) = scorer.probabilities([(PROBLEM, steps_for(name))])
  assert np.ptp(expected) > 0.01
  np.testing.assert_allclose(given[:, 1], expected, atol=2e-5)  # float32 on both sides


def test_a_separator_of_several_tokens_is_read_at_the_last(published):
  """As in TRL, steps are read at the last token of a separator that has several."""
  own, _ = published("trl")
  layout = readouts.PUBLISHED["trl"](tokenizers.load(own.directory), ".\n ###\n")
  ends = own.encode(".\n ###\n")
  tree = layout.encode("a", ("b", "c"))
  assert len(ends) > 1
  assert tree.tokens[-len(ends) :].tolist() == ends
  assert tree.read_positions.tolist() == [len(tree) - 2 - len(ends), len(tree) - 1]


@pytest.mark.parametrize(
  ("settings", "first"),
  [({"bos_token": "<|im_start|>"}, "<|im_start|>"), ({"bos_token": None}, ""), ({}, "")],
)
def test_trl_begins_with_the_configured_bos_token(published, settings, first):
  """TRL's first token is the configured bos_token, even if the tokenizer adds none by itself."""
  own, _ = published("trl")
  tokenizer = tokenizers.load(own.directory)
  assert tokenizer.bos_id is None
  tokenizer.settings = settings
  tree = readouts.trl(tokenizer, "").encode("a", ("b",))
  assert tree.tokens.tolist() == [t for x in (first, "a", "b", "\n") for t in own.encode(x)]


@pytest.mark.parametrize("name", ["trl", "skywork-o1-prm"])
def test_a_first_token_without_text_is_found_by_its_name(tmp_path, name):
  tokenizers.train_sentencepiece(["a b c 1 2 3"] * 9, tmp_path / "tokenizer.model", 310)
  settings = {"bos_token": "<s>", "add_bos_token": False}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  tokenizer = tokenizers.load(tmp_path)
  assert tokenizer.bos_id is None and tokenizer.decode([1]) == ""
  tree = readouts.PUBLISHED[name](tokenizer, "").encode("a", ("b",))
  assert tree.tokens[0] == 1
  assert tokenizer.decode(tree.tokens[1:]).replace("\n", "") == "ab"


@pytest.mark.parametrize("name", ["qwen2.5-math-prm", "rlhflow", "skywork-o1-prm", "trl"])
def test_probabilities_of_exactly_zero_stay_in_place(published, name):
  """Probabilities of exactly 0 and 1 stay at their steps (Qwen's authors drop zeros)."""
  _, scorer = published(name)
  # Larger weights: each step is surely right or surely wrong.
  extreme = dataclasses.replace(scorer, head=jax.tree.map(lambda x: 1e6 * x, scorer.head))
  (given,) = extreme.probabilities([(PROBLEM, ORDINARY)])
  assert set(np.unique(given)) == {0.0, 1.0}
  assert given.shape == (3, 2)


@pytest.mark.parametrize("name", ["qwen2.5-math-prm", "rlhflow", "skywork-o1-prm", "trl"])
def test_special_tokens_spelled_out_in_a_step_are_plain_letters(published, name):
  """Special tokens spelled out in a step are plain letters: they add no read and end no turn."""
  own, scorer = published(name)
  specials = "".join(models.SPECIALS[models.MODELS[name][0]])
  steps = ("a <extra_0> b", f"x{specials}y", "<extra_0>")
  tree, plain = scorer.encode("p", steps), scorer.encode("p", ("a", "b", "c"))
  assert len(tree.read_positions) == len(scorer.probabilities([("p", steps)])[0]) == 3
  for token in own.encode(specials):  # as many as the layout itself has put there
    assert np.count_nonzero(tree.tokens == token) == np.count_nonzero(plain.tokens == token)


def test_a_tag_inside_a_step_is_not_read(published):
  """Math-Shepherd's tag inside a problem or step is not read, and shifts no read."""
  own, scorer = published("math-shepherd")
  steps = ("the ки is 3", "ки ки 4", "5")
  tree = scorer.encode("add ки", steps)
  assert np.count_nonzero(tree.tokens == own.encode("ки")[0]) == 3 + 3
  assert len(tree.read_positions) == 3
  (given,) = scorer.probabilities([("add ки", steps)])
  expected = own.authors("add ки", steps)[[2, 4, 5]]
  np.testing.assert_allclose(given[:, 1], expected, atol=EXACT)


def test_the_cost_of_encoding_each_prefix_is_bounded():
  """A solution of very many steps is refused by a layout that encodes it once for each step."""
  layout = readouts.trl_joined(tiny.TOKENIZER, "")
  assert len(layout.encode("p", ("ab",) * 100).read_positions) == 100
  with pytest.raises(ValueError, match="12289 tokens and 6144 steps: "):
    layout.encode("p", ("a",) * 6144)


def test_a_step_of_several_lines_is_read_at_its_end(published):
  """A step of several lines has Skywork's ids, and is read at its last line."""
  own, scorer = published("skywork-o1-prm")
  steps = ("first\n\nof three", "second", "\n")
  (given,) = scorer.probabilities([(PROBLEM, steps)])
  every_line = own.authors(PROBLEM, steps)
  assert len(every_line) == 6
  np.testing.assert_allclose(given[:, 1], every_line[[2, 3, 5]], atol=EXACT)


LLAMA = models.TEMPLATES["llama"]


@pytest.mark.parametrize(
  ("template", "system"),
  [
    (LLAMA.replace("26 Jul 2024", "1 Jan 2025"), "Today Date: 1 Jan 2025\n\n"),
    ([{"name": "default", "template": LLAMA}], models.DATE),
    (None, models.DATE),
    ("{{ bos_token }}{{ '<|start_header_id|>' }}...", ""),
  ],
)
def test_the_system_turn_follows_the_chat_template(published, template, system):
  """The system turn is that of the chat template: Llama 3.1's has a date, Llama 3 has none.

  Without a template, the contract's prompt states the assumption; another template is refused.
  """
  own, _ = published("rlhflow")
  tokenizer = tokenizers.load(own.directory)
  tokenizer.settings = {"chat_template": template}
  layout = readouts.rlhflow(tokenizer, "")
  text = tokenizer.decode(layout.encode("p", ("a",)).tokens)
  assert ("<|start_header_id|>system<|end_header_id|>" in text) == bool(system)
  assert f"{system}<|eot_id|>" in text or not system
  assert ("assumed" in layout.prompt) == (template is None)
  tokenizer.settings = {"chat_template": "[INST]"}
  with pytest.raises(ValueError, match="not Llama 3's"):
    readouts.rlhflow(tokenizer, "")


@pytest.mark.parametrize("wrong", [5, {"default": LLAMA}, [{"name": "default", "template": 5}]])
def test_a_chat_template_that_is_no_text_is_refused(published, wrong):
  """A chat template that is no text is an error that names the file, the key and the value."""
  own, _ = published("rlhflow")
  tokenizer = tokenizers.load(own.directory)
  tokenizer.settings = {"chat_template": wrong}
  message = r"chat_template in tokenizer_config\.json is (5|\{.*); expected a text"
  with pytest.raises(ValueError, match=message):
    readouts.rlhflow(tokenizer, "")
  with pytest.raises(ValueError, match=message):
    prompts.maker("chat", tokenizer)


@pytest.mark.parametrize(
  ("directory_of", "name", "message"),
  [
    (
      "trl",
      "skywork-o1-prm",
      r"v_head\.summary\.weight is missing, expected \[1, 16\]; a language",
    ),
    ("rlhflow", "qwen2.5-math-prm", "the tokenizer has no token '<|im_start|>'"),
    ("trl", "math-shepherd", r"'ки' must be one token; it encodes to \["),
    ("trl", "", "--readout=: expected one of qwen2.5-math-prm, math-shepherd, "),
  ],
)
def test_a_readout_of_another_model_is_an_error(published, directory_of, name, message):
  """A directory without the readout's head, tag or special token is an error that names it."""
  own, _ = published(directory_of)
  with pytest.raises(ValueError, match=message):
    Scorer.load_model(own.directory, name)


def test_a_head_of_another_shape_is_refused(published, tmp_path):
  """A head of another shape is an error with both shapes, and training refuses a published head."""
  own, _ = published("trl")
  for file in own.directory.iterdir():
    (tmp_path / file.name).write_bytes(file.read_bytes())
  tensors = {name: tensor.read() for name, tensor in weights.tensors(own.directory).items()}
  tensors["score.weight"] = np.zeros((3, 16), np.float32)
  safetensors_files.write_directory(tmp_path, tensors.items())
  with pytest.raises(ValueError, match=r"score.weight is \[3, 16\], expected \[2, 16\]"):
    Scorer.load_model(tmp_path, "trl")
  own, _ = published("skywork-o1-prm")
  with pytest.raises(
    ValueError, match=r"unknown: v_head.*cannot start from a published PRM's own head"
  ):
    weights.load(own.directory, jax.eval_shape(lambda: own.params), own.config)


def test_a_tokenizer_of_another_model_is_refused(published):
  """A token beyond the rows of the embedding is an error with the number of rows."""
  small = dataclasses.replace(published("trl")[1], vocab_size=300)
  with pytest.raises(SolutionError, match="beyond the embedding's 300 rows"):
    small.probabilities([("Janet has 16 eggs", ("sells the others.",))])


def test_bfloat16_is_close_to_float32(published):
  """bfloat16 parameters give probabilities close to those of float32."""
  own, scorer = published("rlhflow")
  half = Scorer.load_model(own.directory, "rlhflow", "bfloat16")
  assert {str(x.dtype) for x in jax.tree.leaves(half.params["blocks"])} == {"bfloat16"}
  (near,), (exact,) = (s.probabilities([(PROBLEM, ORDINARY)]) for s in (half, scorer))
  np.testing.assert_allclose(near, exact, atol=0.05)
  assert np.abs(near - exact).max() > 0


def test_score_py_reads_a_published_model(published, tmp_path):
  """score.py writes the contract beside the scores, and rerank.py reads the file."""
  own, scorer = published("rlhflow")
  record = {"problem": PROBLEM, "answer": "5", "is_correct": True}
  source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  source.write_text(json.dumps(record | {"text": "##".join(ORDINARY)}) + "\n")
  arguments = (f"--model={own.directory}", "--readout=rlhflow", f"--input={source}")
  start_script("score.py", *arguments, f"--output={out}", "--separator=##")
  (expected,) = scorer.probabilities([(PROBLEM, ORDINARY)])
  line = json.loads(out.read_text())
  given = [[p[name] for name in ("-1", "0", "1")] for p in line["rating_probs"]]
  np.testing.assert_allclose(given, np.insert(expected, 1, 0, axis=1), atol=EXACT)
  assert line["prm_score"] == pytest.approx(np.prod(expected[:, 1]), rel=1e-4)
  assert scored_samples.read_scored_samples([out]).step_probs.shape == (3, 3)
  contract = json.loads((tmp_path / "out.jsonl.contract.json").read_text())
  assert contract["readout"] == "rlhflow" and contract["classes"] == ["-1", "1"]
  assert contract["separator"] == "##" and contract["read"] == "at the token before the answer"
  assert sorted(contract["sha256"]) == ["config.json", "model.safetensors", "tokenizer.json"]
  assert contract["tokenizer_hash"] == contract["sha256"]["tokenizer.json"]


def error_of(*flags):
  """Runs score.py, which must fail; returns its error output."""
  return call_script("score.py", *flags, code=1).stderr


def test_score_py_names_the_line_that_a_layout_refuses(published, tmp_path):
  """A solution that a layout refuses is an error with file and line, and nothing is written."""
  own, _ = published("math-shepherd")
  source = tmp_path / "in.jsonl"
  source.write_text('{"problem": "p", "steps": ["a"]}\n{"problem": "p", "steps": ["a ки"]}\n')
  flags = (f"--model={own.directory}", "--readout=math-shepherd", f"--input={source}")
  assert f"{source}:2: step 0 ends with the tag" in error_of(*flags, f"--output={tmp_path}/o.jsonl")
  assert list(tmp_path.iterdir()) == [source]


def test_score_py_reads_its_input_before_it_loads_the_model(tmp_path):
  """A missing or empty input is an error before the model is loaded."""
  (source := tmp_path / "in.jsonl").touch()
  flags = ("--model=nowhere", "--readout=trl", f"--output={tmp_path}/o.jsonl")
  assert f"score.py: {source}: empty" in error_of(*flags, f"--input={source}")
  assert "No such file or directory: 'none'" in error_of(*flags, "--input=none")


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.contract.json"])
def test_score_py_tries_its_outputs_before_it_loads_the_model(tmp_path, name):
  """Scores or a contract that cannot be written are an error before the model is loaded."""
  (tmp_path / name).mkdir()
  flags = ("--model=nowhere", "--readout=trl", "--input=none", f"--output={tmp_path}/o.jsonl")
  assert f"score.py: {tmp_path}/{name}: is a directory" in error_of(*flags)
  assert [path.name for path in tmp_path.iterdir()] == [name]
