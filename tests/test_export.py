"""Exports: directories that transformers opens, and that we read again bit for bit."""

import dataclasses
import json

import conftest
import jax
import numpy as np
import pytest
import reference_models
import tiny

from prm_jax import config as config_lib
from prm_jax.input_pipeline import token_tree, tokenizers
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import export, families, safetensors_files, weights
from prm_jax.scoring.scorer import Scorer
from prm_jax.training import loop

BASE = reference_models.config("llama2")
CONTRACT = tiny.contract()
VOCABULARY = reference_models.VOCABULARY
# One of each family, with whatever tells it from the others.
CASES = ("llama3", "mistral_window", "qwen2_window", "qwen3", "gemma2", "gemma3")


def described(config, dtype="float32"):
  mesh = sharding_lib.make_mesh(config_lib.Mesh(tensor=2))
  tree = decoder.abstract_params(config, VOCABULARY, 3, mesh)
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), tree)


def assert_equal(got, expected):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
  ("case", "dtype"), [*((case, "float32") for case in CASES), ("qwen3", "bfloat16")]
)
def test_out_and_in_again_is_bit_exact(tmp_path, case, dtype):
  """The config is that of the family, and every parameter comes back, in shards or in one file."""
  config = reference_models.config(case)
  params = jax.tree.map(lambda x: x.astype(dtype), reference_models.params(config))
  options = {"contract": None, "kind": "causal-lm", "shard_bytes": 20_000}
  export.write(tmp_path / "lm", params, config, VOCABULARY, **options)
  preset = families.read(tmp_path / "lm")
  assert preset.config == config
  assert case.startswith(preset.family)
  assert len(list((tmp_path / "lm").glob("*.safetensors"))) > 1
  loaded = weights.load(tmp_path / "lm", described(config, dtype), preset.config)
  assert_equal(loaded, params | {k: np.zeros_like(params[k]) for k in ("head", "head_bias")})
  if case == "gemma3":
    return
  export.write(tmp_path / "prm", params, config, VOCABULARY, contract=CONTRACT)
  loaded = weights.load(tmp_path / "prm", described(config, dtype), preset.config)
  if not config.tied_embeddings:  # a classifier has none
    params = params | {"language_model": np.zeros_like(params["language_model"])}
  assert_equal(loaded, params)
  assert export.read_contract(tmp_path / "prm") == CONTRACT


def test_the_config_says_classes_and_contract(tmp_path):
  """Classes are in the contract's order, and the contract stands in both files."""
  export.write(
    tmp_path / "e",
    reference_models.params(BASE),
    BASE,
    VOCABULARY,
    contract=CONTRACT,
    dtype="bfloat16",
    files={"tokenizer.json": b"{}"},
    tokens={"bos_token_id": 1, "eos_token_id": None},
  )
  config = json.loads((tmp_path / "e/config.json").read_text())
  assert config["architectures"] == ["LlamaForTokenClassification"]
  assert config["id2label"] == {"0": "-1", "1": "0", "2": "1"}
  assert config["label2id"] == {"-1": 0, "0": 1, "1": 2}
  assert (config["num_labels"], config["torch_dtype"]) == (3, "bfloat16")
  assert (config["bos_token_id"], config["eos_token_id"]) == (1, None)
  assert config["prm_jax"] == json.loads(json.dumps(dataclasses.asdict(CONTRACT)))
  assert json.loads((tmp_path / "e/prm_jax.json").read_text()) == config["prm_jax"] | {
    "layout": export.LAYOUTS["process"]
  }
  read = safetensors_files.read_directory(tmp_path / "e")
  assert {tensor.dtype for tensor in read.values()} == {"BF16"}
  assert (tmp_path / "e/tokenizer.json").read_bytes() == b"{}"


def test_a_failed_export_leaves_nothing(tmp_path):
  """What is there is not overwritten, and an error half-way leaves no directory."""
  params = reference_models.params(BASE)
  (tmp_path / "there").mkdir()
  (tmp_path / "there/x").write_text("x")
  with pytest.raises(FileExistsError, match="is there already"):
    export.write(tmp_path / "there", params, BASE, VOCABULARY, contract=CONTRACT)
  with pytest.raises(TypeError):
    export.write(
      tmp_path / "new", params, BASE, VOCABULARY, contract=CONTRACT, files={"a": b"", "b": 3}
    )
  assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_has_no_class_is_refused(tmp_path):
  """A classifier of Gemma 3, an architecture of no family, and a model without a step head."""
  options = {"contract": CONTRACT, "kind": "token-classification", "dtype": "float32", "tokens": {}}
  with pytest.raises(ValueError, match=r"no token-classification class for gemma3.*causal-lm"):
    export.config_json(reference_models.config("gemma3"), 9, **options)
  odd = dataclasses.replace(BASE, attention_bias=True, query_key_norm=True)
  with pytest.raises(ValueError, match="no public family has this architecture"):
    export.config_json(odd, 9, **options)
  with pytest.raises(ValueError, match="has no step head"):
    text = dataclasses.replace(CONTRACT, objective="language_model")
    export.write(tmp_path / "new", {}, BASE, 9, contract=text)


def test_a_broken_contract_is_an_error(tmp_path):
  """A prm_jax.json without all its fields names the one that is wrong."""
  values = dataclasses.asdict(CONTRACT) | {"classes": None}
  (tmp_path / "prm_jax.json").write_text(json.dumps(values))
  with pytest.raises(ValueError, match='"classes" is None: expected'):
    export.read_contract(tmp_path)


@pytest.mark.reference
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path, case):
  """The export, opened by transformers' own classes, has our next-token and class logits."""
  import torch
  import transformers

  config = reference_models.config(case)
  params = reference_models.params(config)
  export.write(tmp_path / "lm", params, config, VOCABULARY, contract=None, kind="causal-lm")
  classes = [transformers.AutoModelForCausalLM]
  if case != "gemma3":
    export.write(tmp_path / "prm", params, config, VOCABULARY, contract=CONTRACT)
    classes.append(transformers.AutoModelForTokenClassification)
  for name, auto, ours in zip(("lm", "prm"), classes, reference_models.logits(config)):
    model, report = auto.from_pretrained(tmp_path / name, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
      theirs = model.eval().float()(torch.tensor(reference_models.TOKENS)[None]).logits[0]
    theirs = theirs.numpy().reshape(ours.shape)  # our classes have an axis of heads, of size 1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)  # up to 20 in size


@pytest.fixture(scope="session")
def trained(arithmetic_data, tmp_path_factory):
  """A work directory of a short run with the project's own tokenizer, and its export."""
  experiment = tiny.experiment(arithmetic_data, config_lib.Loss())
  workdir = tmp_path_factory.mktemp("export") / "run"
  with tiny.first_device():
    loop.run(experiment, workdir)
  done = conftest.call_script("export.py", f"--checkpoint={workdir}", f"--output={workdir}_out")
  assert done.returncode == 0, done.stderr
  return workdir, workdir.with_name("run_out")


def test_a_trained_model_exports_and_scores_alike(trained):
  """export.py of a run from scratch: our own reader gets the same probabilities."""
  workdir, out = trained
  solutions = [("1+1=", ["2\n", "so 3"]), ("2+2=", ["4"])]
  alone = {"devices": jax.devices()[:1]}
  expected = Scorer.load(workdir, **alone).probabilities(solutions)
  got = Scorer.load_model(out, **alone).probabilities(solutions)
  for a, b in zip(got, expected):
    np.testing.assert_allclose(a, b, rtol=1e-5)  # rows of another length: sums in another order
  again = conftest.call_script("export.py", f"--checkpoint={workdir}", f"--output={out}")
  assert again.returncode == 1 and "is there already" in again.stderr


@pytest.mark.reference
def test_transformers_gets_the_same_step_probabilities(trained):
  """AutoTokenizer and AutoModelForTokenClassification, by the contract's words alone: 1e-4."""
  import torch
  import transformers

  workdir, out = trained
  contract = json.loads((out / "prm_jax.json").read_text())
  model = transformers.AutoModelForTokenClassification.from_pretrained(out).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(out)
  solutions = [("What is 12 + 30?", ["12 + 30\n= 42", "Answer: 42"]), ("7 * 8", [" 56 ", "\u00e9"])]
  for (problem, steps), ours in zip(solutions, Scorer.load(workdir).probabilities(solutions)):
    ids, ends = [model.config.bos_token_id], []
    for text in (problem, *steps):
      ids += tokenizer.encode(text, add_special_tokens=False) + contract["separator_ids"]
      ends.append(len(ids) - 1)
    with torch.no_grad():
      logits = model(torch.tensor([ids])).logits[0, ends[1:]]
    np.testing.assert_allclose(logits.softmax(-1).numpy(), ours, atol=1e-4)
  assert [model.config.id2label[i] for i in range(3)] == contract["classes"]
  assert tokenizer("a").input_ids[0] == model.config.bos_token_id
  own = tokenizers.load(out)
  assert token_tree.step_contract(own, contract["separator"], "process", contract["recipe"]) == (
    export.read_contract(out)
  )
