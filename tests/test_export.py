"""Exports: directories that transformers opens, and that we load again bit for bit."""

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

BASE = reference_models.config("llama2")
CONTRACT = tiny.contract()
VOCABULARY = reference_models.VOCABULARY
# One of each family, with its distinguishing options.
CASES = ("llama3", "mistral_window", "qwen2_window", "qwen3", "gemma2", "gemma3")


def abstract_params(config, dtype="float32"):
  """Returns the parameters of a model as shapes that are sharded over two devices."""
  mesh = sharding_lib.make_mesh(config_lib.Mesh(tensor=2))
  tree = decoder.abstract_params(config, VOCABULARY, 3, mesh)
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), tree)


def assert_equal(got, expected):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
  ("case", "dtype"), [*((case, "float32") for case in CASES), ("qwen3", "bfloat16")]
)
def test_an_export_loads_as_the_same_model(tmp_path, case, dtype):
  """Loading an export gives its configuration and its parameters, bit for bit."""
  config = reference_models.config(case)
  params = jax.tree.map(lambda x: x.astype(dtype), reference_models.params(config))
  export.write(tmp_path / "lm", params, config, VOCABULARY, contract=None, kind="causal-lm")
  assert families.read(tmp_path / "lm") == config
  model_type = json.loads((tmp_path / "lm/config.json").read_text())["model_type"]
  assert case.startswith(families.MODEL_TYPES[model_type])
  loaded = weights.load(tmp_path / "lm", abstract_params(config, dtype), config)
  assert_equal(loaded, params | {k: np.zeros_like(params[k]) for k in ("head", "head_bias")})
  if case == "gemma3":
    return
  export.write(tmp_path / "prm", params, config, VOCABULARY, contract=CONTRACT)
  loaded = weights.load(tmp_path / "prm", abstract_params(config, dtype), config)
  if not config.tied_embeddings:  # a classifier has none
    params = params | {"language_model": np.zeros_like(params["language_model"])}
  assert_equal(loaded, params)
  assert export.read_contract(tmp_path / "prm") == CONTRACT


def test_the_config_has_classes_and_contract(tmp_path):
  """config.json and prm_jax.json have the step contract, with the classes in its order."""
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
  """An existing directory is not overwritten, and an error half-way leaves no directory."""
  params = reference_models.params(BASE)
  (tmp_path / "there").mkdir()
  (tmp_path / "there/x").write_text("x")
  with pytest.raises(FileExistsError, match="exists already"):
    export.write(tmp_path / "there", params, BASE, VOCABULARY, contract=CONTRACT)
  with pytest.raises(TypeError):
    export.write(
      tmp_path / "new", params, BASE, VOCABULARY, contract=CONTRACT, files={"a": b"", "b": 3}
    )
  assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_run_that_started_without_a_language_model_head_exports_none(tmp_path):
  """A user who started from a classifier is told, and does not publish a generator of zeros."""
  config = reference_models.config("qwen2_window")
  export.write(
    tmp_path / "prm", reference_models.params(config), config, VOCABULARY, contract=CONTRACT
  )
  params = weights.load(tmp_path / "prm", abstract_params(config), config)
  with pytest.raises(ValueError, match="no language-model head"):
    export.write(tmp_path / "lm", params, config, VOCABULARY, contract=None, kind="causal-lm")
  assert not (tmp_path / "lm").exists()


def test_models_that_no_public_class_can_hold_are_refused():
  """Exporting Gemma 3 with a head, an unknown architecture, or no step head is an error."""
  options = {"contract": CONTRACT, "kind": "token-classification", "dtype": "float32", "tokens": {}}
  with pytest.raises(ValueError, match=r"no token-classification class for gemma3.*causal-lm"):
    export.config_json(reference_models.config("gemma3"), 9, **options)
  unknown = dataclasses.replace(reference_models.config("gemma3"), context_length=0)
  text = {"contract": None, "kind": "causal-lm", "dtype": "float32", "tokens": {}}
  assert export.config_json(unknown, 9, **text)["model_type"] == "gemma3_text"  # its own length
  odd = dataclasses.replace(BASE, attention_bias=True, query_key_norm=True)
  with pytest.raises(ValueError, match="no public family has this architecture"):
    export.config_json(odd, 9, **options)
  with pytest.raises(ValueError, match="has no step head"):
    text = dataclasses.replace(CONTRACT, objective="language_model")
    export.config_json(BASE, 9, **options | {"contract": text})


def test_export_py_refuses_a_model_before_it_loads_it(arithmetic_data, tmp_path):
  """A run without a class in transformers is refused without restoring its parameters."""
  gemma = dataclasses.replace(reference_models.config("gemma3"), vocab_size=0)
  experiment = dataclasses.replace(tiny.experiment(arithmetic_data), model=gemma)
  run = tiny.untrained(experiment, tmp_path / "run")
  done = conftest.call_script(
    "export.py", f"--checkpoint={run}", f"--output={tmp_path}/out", code=1
  )
  assert "no token-classification class for gemma3" in done.stderr
  assert "loading" not in done.stderr


def test_a_broken_contract_is_an_error(tmp_path):
  """Reading a prm_jax.json with a wrong value is an error that has the field and the value."""
  values = dataclasses.asdict(CONTRACT) | {"classes": None}
  (tmp_path / "prm_jax.json").write_text(json.dumps(values))
  with pytest.raises(ValueError, match='"classes" is null: expected'):
    export.read_contract(tmp_path)


@pytest.mark.reference
@pytest.mark.parametrize("case", CASES)
def test_logits_of_an_export_in_transformers_equal_ours(tmp_path, case):
  """An export opened by transformers' classes has our next-token and class logits."""
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
def exported(prm_run, tmp_path_factory):
  """The export of a run with the project's own tokenizer."""
  directory = tmp_path_factory.mktemp("export") / "out"
  conftest.call_script("export.py", f"--checkpoint={prm_run}", f"--output={directory}")
  return directory


def test_an_exported_run_has_the_same_probabilities(prm_run, exported, tmp_path):
  """An export of export.py has its run's step probabilities and contract; one needs a step head."""
  solutions = [("1+1=", ["2\n", "so 3"]), ("2+2=", ["4"])]
  run, scorer = (
    load(path, devices=jax.devices()[:1])
    for load, path in ((Scorer.load, prm_run), (Scorer.load_model, exported))
  )
  for a, b in zip(scorer.probabilities(solutions), run.probabilities(solutions), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)  # rows of another length: sums in another order
  contract = export.read_contract(exported)
  assert scorer.facts()["tokenizer_hash"] == contract.tokenizer_hash
  assert "model.safetensors" in scorer.facts()["sha256"]
  about = (run.params, run.config, run.vocab_size)
  export.write(tmp_path / "lm", *about, contract=contract, kind="causal-lm")
  run.tokenizer.save(tmp_path / "lm")
  with pytest.raises(ValueError, match=r"score\.weight is missing"):
    Scorer.load_model(tmp_path / "lm")
  tokenizer = tokenizers.load(exported)
  assert contract == token_tree.step_contract(
    tokenizer, contract.separator, contract.objective, contract.recipe
  )
  again = conftest.call_script(
    "export.py", f"--checkpoint={prm_run}", f"--output={exported}", code=1
  )
  assert "exists already" in again.stderr
