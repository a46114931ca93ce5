"""Exports: directories that transformers opens, and that we read again bit for bit."""

import dataclasses
import json

import conftest
import jax
import numpy as np
import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.input_pipeline import token_tree, tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import export, families, safetensors_files, weights
from prm_jax.scoring.scorer import Scorer
from prm_jax.training import loop

BASE = config_lib.Model(width=32, layers=3, heads=4, kv_heads=2, head_size=8, mlp_width=48)
CONTRACT = tiny.contract()
VOCABULARY = tiny.TOKENIZER.vocab_size
GEMMA = {
  "norm_offset": True,
  "post_norms": True,
  "scale_embeddings": True,
  "activation": "gelu_tanh",
  "attention_scalar": 8,
  "window": 6,
}
GEMMA3 = GEMMA | {
  "query_key_norm": True,
  "window_pattern": "ssf",
  "rope_theta": 1e6,
  "local_rope_theta": 1e4,
  "context_length": 131_072,
}
FAMILIES = {
  "llama": dataclasses.replace(BASE, rope_theta=1e5),
  "llama3": dataclasses.replace(
    BASE, tied_embeddings=False, rope_scaling="llama3", rope_factor=8.0, rope_original_length=16
  ),
  "mistral": dataclasses.replace(BASE, window=6),
  "qwen2": dataclasses.replace(BASE, attention_bias=True),
  "qwen3": dataclasses.replace(BASE, query_key_norm=True, tied_embeddings=False),
  "gemma2": dataclasses.replace(
    BASE, **GEMMA, window_pattern="sf", attention_softcap=50.0, logit_softcap=30.0
  ),
  "gemma3": dataclasses.replace(BASE, **GEMMA3),
}


def random_params(config, dtype="float32"):
  """Parameters that are all random: norms (about their neutral value), biases and head too."""
  random = np.random.default_rng(0)

  def new(path, x):
    mean = float(path[-1].key.endswith("norm") and not config.norm_offset)
    return jax.device_put(random.normal(mean, 0.3, x.shape).astype(x.dtype), x.sharding)

  return jax.tree_util.tree_map_with_path(new, described(config, dtype))


def described(config, dtype="float32"):
  mesh = sharding_lib.make_mesh(config_lib.Mesh(tensor=2))
  tree = sharding_lib.abstract_params(config, VOCABULARY, 3, mesh)
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), tree)


def assert_equal(got, expected):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
  ("family", "dtype"), [(family, "float32") for family in FAMILIES] + [("qwen3", "bfloat16")]
)
def test_out_and_in_again_is_bit_exact(tmp_path, family, dtype):
  """The config is that of the family, and every parameter comes back, in shards or in one file."""
  config, params = FAMILIES[family], random_params(FAMILIES[family], dtype)
  options = {"contract": None, "kind": "causal-lm", "shard_bytes": 20_000}
  export.write(tmp_path / "lm", params, config, VOCABULARY, **options)
  preset = families.read(tmp_path / "lm")
  assert dataclasses.replace(preset.config, param_dtype="float32") == config
  assert preset.vocab_size == VOCABULARY
  assert preset.family == {"llama3": "llama"}.get(family, family)
  assert len(list((tmp_path / "lm").glob("*.safetensors"))) > 1
  loaded = weights.load(tmp_path / "lm", described(config, dtype), preset.config)
  expected = params | {k: np.zeros_like(params[k]) for k in ("head", "head_bias")}
  assert_equal(loaded, expected)
  if family == "gemma3":
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
    random_params(BASE),
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
  contract = json.loads(json.dumps(dataclasses.asdict(CONTRACT)))
  assert config["prm_jax"] == contract
  beside = json.loads((tmp_path / "e/prm_jax.json").read_text())
  assert beside.pop("layout") and beside == contract
  read = safetensors_files.read_directory(tmp_path / "e")
  assert {tensor.dtype for tensor in read.values()} == {"bfloat16"}
  assert (tmp_path / "e/tokenizer.json").read_bytes() == b"{}"


def test_a_failed_export_leaves_nothing(tmp_path):
  """What is there is not overwritten, and an error half-way leaves no directory."""
  params = random_params(BASE)
  (tmp_path / "there").mkdir()
  (tmp_path / "there/x").write_text("x")
  with pytest.raises(FileExistsError, match="is there already"):
    export.write(tmp_path / "there", params, BASE, VOCABULARY, contract=CONTRACT)
  with pytest.raises(TypeError):
    export.write(
      tmp_path / "new", params, BASE, VOCABULARY, contract=CONTRACT, files={"a": b"", "b": 3}
    )
  assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_has_no_class_is_refused():
  """A classifier of Gemma 3, an architecture of no family, and a model without a step head."""
  with pytest.raises(ValueError, match=r"no token-classification class for gemma3.*causal-lm"):
    export.config_json(FAMILIES["gemma3"], 9, CONTRACT, "token-classification", "float32", {})
  odd = dataclasses.replace(BASE, attention_bias=True, query_key_norm=True)
  with pytest.raises(ValueError, match="no public family has this architecture"):
    export.config_json(odd, 9, CONTRACT, "token-classification", "float32", {})
  other = dataclasses.replace(CONTRACT, objective="language")
  with pytest.raises(ValueError, match="has no step head"):
    export.write("never", random_params(BASE), BASE, 9, contract=other)


@pytest.mark.parametrize(
  ("change", "message"),
  [({"classes": None}, r"got `null` - at `\$\.classes`"), ({"read": ...}, "required field `read`")],
)
def test_a_broken_contract_is_an_error(tmp_path, change, message):
  """A prm_jax.json without all its fields names the one that is wrong."""
  values = {k: v for k, v in (dataclasses.asdict(CONTRACT) | change).items() if v is not ...}
  (tmp_path / "prm_jax.json").write_text(json.dumps(values))
  with pytest.raises(ValueError, match=message):
    export.read_contract(tmp_path)


@pytest.mark.reference
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path, family):
  """The export, opened by transformers' own classes, computes what we compute.

  Step probabilities and next-token probabilities, in float32, within 1e-4 absolute.
  """
  import torch
  import transformers

  config, params = FAMILIES[family], random_params(FAMILIES[family])
  export.write(tmp_path / "lm", params, config, VOCABULARY, contract=None, kind="causal-lm")
  ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 24)).astype(np.int32)
  kinds = [("lm", transformers.AutoModelForCausalLM)]
  if family != "gemma3":
    export.write(tmp_path / "prm", params, config, VOCABULARY, contract=CONTRACT)
    kinds.append(("prm", transformers.AutoModelForTokenClassification))
  ours = dict(zip(("lm", "prm"), our_logits(config, params, ids)))
  for kind, auto in kinds:
    model, report = auto.from_pretrained(tmp_path / kind, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
      theirs = model.eval().float()(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    expected = softmax(theirs)
    # No answer is sure: a wrong logit would be seen.  And tokens differ.
    assert expected.max() < 0.999 and np.ptp(expected, axis=(0, 1)).max() > 0.3
    np.testing.assert_allclose(softmax(ours[kind]), expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(ours[kind], theirs, rtol=0, atol=1e-4)  # up to 20 in size


def softmax(logits):
  """Probabilities, float64."""
  e = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def our_logits(config, params, ids):
  """Next-token and class logits of whole sequences."""
  from flax import nnx

  from prm_jax.training import step as step_lib

  length = ids.shape[1]
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
  ends = np.full_like(ids, length)

  @jax.jit
  def run(params):
    model = nnx.merge(step_lib.graph(config, VOCABULARY, 3), params)
    hidden = model.hidden(ids, positions, ends)
    return model.next_token_logits(hidden), model.class_logits(hidden, positions)

  return map(np.asarray, run(params))


@pytest.fixture(scope="session")
def trained(arithmetic_data, tmp_path_factory):
  """A work directory of a short run with the project's own tokenizer, and its export."""
  experiment = tiny.experiment(arithmetic_data, config_lib.Loss())
  short = dataclasses.replace(experiment.train, steps=2, eval_every=2, save_every=2)
  workdir = tmp_path_factory.mktemp("export") / "run"
  loop.run(dataclasses.replace(experiment, train=short), workdir)
  done = conftest.run_script("export.py", f"--checkpoint={workdir}", f"--output={workdir}_out")
  assert done.returncode == 0, done.stderr
  return workdir, workdir.with_name("run_out")


def test_a_trained_model_exports_and_scores_alike(trained):
  """export.py of a run from scratch: our own reader gets the same probabilities."""
  workdir, out = trained
  solutions = [("1+1=", ["2\n", "so 3"]), ("2+2=", ["4"])]
  expected = Scorer.load(workdir).probabilities(solutions)
  got = Scorer.load_model(out).probabilities(solutions)
  for a, b in zip(got, expected):
    np.testing.assert_allclose(a, b, rtol=1e-5)  # rows of another length: sums in another order
  again = conftest.run_script("export.py", f"--checkpoint={workdir}", f"--output={out}")
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
