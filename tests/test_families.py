"""Public families: the logits of transformers, and config.json read, written and checked."""

import copy
import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np
import pytest
import reference_models
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import CASES, GEMMA3, LLAMA3, SLIDES

from prm_jax import config as config_lib
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import families, weights
from prm_jax.training import step as step_lib

GOLDEN = json.loads(reference_models.GOLDEN.read_text())
# Sums of up to fifty float32 terms, in two orders, through four layers; logits are below 20.
CLOSE = 1e-4


def saved(directory: pathlib.Path, values) -> pathlib.Path:
  """Returns the directory, to which it writes the values as config.json."""
  (directory / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
  return directory


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_stored_ones_of_transformers(case):
  """Models of every family, scaling, window and cap have the stored logits of transformers."""
  got = reference_models.logits(reference_models.config(case))[0][list(GOLDEN["positions"])]
  np.testing.assert_allclose(got, GOLDEN["logits"][case], rtol=0, atol=CLOSE)


@pytest.mark.reference
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_installed_transformers(case):
  """Models of every family have the logits of the installed transformers at every position."""
  got, _ = reference_models.logits(reference_models.config(case))
  expected = reference_models.transformers_logits(case)
  np.testing.assert_allclose(got, expected, rtol=0, atol=CLOSE)


@pytest.mark.reference
@pytest.mark.parametrize("case", CASES)
def test_config_json_is_exchanged_with_transformers(case, tmp_path):
  """A config.json that transformers writes or rewrites reads as the same configuration."""
  import transformers

  config = families.parse(CASES[case], case)
  reference_models.transformers_config(copy.deepcopy(CASES[case])).save_pretrained(tmp_path)
  assert families.read(tmp_path) == config
  written = families.write(config, config.vocab_size, CASES[case]["model_type"])
  transformers.AutoConfig.from_pretrained(saved(tmp_path, written)).save_pretrained(tmp_path)
  assert "rope_parameters" in (tmp_path / "config.json").read_text()  # as transformers 5 writes
  assert families.read(tmp_path) == config


NO_SCALING = {"rope_scaling": "none", "rope_factor": 1.0, "rope_original_length": 8192}
SCALING = {"rope_scaling": "llama3", "rope_high_factor": 5.0, "rope_original_length": 7}
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")


@pytest.mark.reference
@pytest.mark.parametrize("model_type", sorted({*families.MODEL_TYPES} - {"gemma3"}))  # gemma3_text
def test_defaults_are_those_of_transformers(model_type, tmp_path):
  """A key that a file leaves out has the value that transformers gives it."""
  values = {"model_type": model_type} | {key: CASES["llama2"][key] for key in NEEDED}
  values |= {"num_attention_heads": 32, "hidden_size": 128, "num_hidden_layers": 31}
  values["rope_theta"] = 10_000.0
  reference_models.transformers_config(dict(values)).save_pretrained(tmp_path)
  expected = families.read(tmp_path)
  got = families.parse(values, "here")
  assert dataclasses.replace(got, context_length=expected.context_length) == expected


@st.composite
def configurations(draw):
  """Draws (a configuration that a family's config.json can express, the family)."""
  example = CASES[draw(st.sampled_from(sorted(CASES)))]
  config, family = families.parse(example, "here"), families.MODEL_TYPES[example["model_type"]]
  kind = families.FAMILIES[family]
  count, real = st.integers(1, 9), st.floats(0.125, 64)
  fields = {name: draw(count) for name in ("layers", "kv_heads", "mlp_width")}
  fields |= {"heads": fields["kv_heads"] * draw(count), "head_size": 2 * draw(count)}
  fields["width"] = fields["heads"] * draw(count)
  fields["activation"] = draw(st.sampled_from(["silu", "gelu_tanh"]))
  fields |= {"norm_epsilon": draw(st.floats(1e-9, 0.5)), "rope_theta": draw(st.floats(1, 1e7))}
  fields |= {"context_length": draw(st.integers(1, 10**6)), "tied_embeddings": draw(st.booleans())}
  fields |= draw(st.sampled_from([NO_SCALING, NO_SCALING | {"rope_scaling": "linear"}, SCALING]))
  if fields["rope_scaling"] != "none":
    fields["rope_factor"] = draw(real)
  if config.attention_scalar:
    fields["attention_scalar"] = draw(count)
  for key in {"attn_logit_softcapping", "final_logit_softcapping"} & kind.keys:
    fields[families.NUMBERS[key]] = draw(st.sampled_from([0.0, 30.0]))
  if config.window:
    fields["window"] = draw(count)
    if not kind.fixed_layers:
      pattern = draw(st.text("sf", min_size=fields["layers"], max_size=fields["layers"]))
      fields |= window_fields(pattern, fields["window"])
      fields["local_rope_theta"] = config.local_rope_theta * bool(fields["window"])
  return dataclasses.replace(config, **fields), family


def window_fields(pattern: str, window: int) -> dict:
  """Returns the fields that `families.read` gives: the shortest pattern that repeats to this."""
  n = min(n for n in range(1, len(pattern) + 1) if (pattern[:n] * 9)[: len(pattern)] == pattern)
  return (
    {"window": window, "window_pattern": pattern[:n]}
    if "s" in pattern
    else {"window": 0, "window_pattern": "s"}
  )


@settings(max_examples=100, deadline=None)
@given(configurations())
def test_a_written_configuration_reads_as_itself(drawn):
  """Reading the written config.json of any configuration gives the same configuration."""
  config, family = drawn
  values = json.loads(json.dumps(families.write(config, 100, family)))
  assert families.MODEL_TYPES[values["model_type"]] == family
  assert families.parse(values, "here") == dataclasses.replace(config, vocab_size=100)


@pytest.mark.parametrize(
  ("family", "change"),
  [
    ("llama", {"attention_bias": True}),
    ("llama", {"window": 4}),
    ("qwen2", {"query_key_norm": True}),
    ("mistral", {"window": 4, "window_pattern": "sf"}),
    ("gemma3", {"attention_softcap": 50.0}),
    ("gemma2", {"local_rope_theta": 100.0}),
  ],
)
def test_an_architecture_outside_the_family_is_not_written(family, change):
  """Writing a configuration that the family's config.json cannot express is an error."""
  example = next(c for c in CASES.values() if c["model_type"].startswith(family))
  config = dataclasses.replace(families.parse(example, "here"), **change)
  with pytest.raises(ValueError, match=r"model\.\w+=|sliding_window=4|layer_types="):
    families.write(config, 100, family)


LLAMA, QWEN2 = CASES["llama2"], CASES["qwen2"]
QWEN_MATH = QWEN2 | {
  "architectures": ["Qwen2ForProcessRewardModel"],
  "auto_map": {"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"},
  "sliding_window": 4096,
  "use_sliding_window": False,
}
GEMMA_4B = """{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
  "eos_token_id": [1, 106], "image_token_index": 262144, "text_config": {"hidden_size": 2560,
  "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
  "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
  "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"}}"""


def test_a_missing_folder_is_named(tmp_path):
  """The error for a folder that does not exist says which command downloads models."""
  with pytest.raises(FileNotFoundError, match=r"nowhere: no such folder; .*fetch_model\.py"):
    families.read(tmp_path / "nowhere")


def test_llama_without_rope_theta_has_the_default(tmp_path):
  """A llama config.json without `rope_theta`, as Llama 2's, is read with transformers' 10,000."""
  values = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
  assert families.read(saved(tmp_path, values)).rope_theta == 10_000.0


def test_a_published_process_reward_model_is_read(tmp_path):
  """Keys of a model's own head and code are ignored, and so is a window that is switched off."""
  assert families.read(saved(tmp_path, QWEN_MATH)) == families.parse(QWEN2, "")


def test_the_text_part_of_a_model_with_pictures_is_read(tmp_path):
  """Keys that Gemma 3's published text_config leaves out have transformers' defaults."""
  c = families.read(saved(tmp_path, GEMMA_4B))
  assert (c.heads, c.kv_heads, c.head_size, c.vocab_size) == (8, 4, 256, 262_208)
  assert (c.rope_theta, c.local_rope_theta) == (1e6, 1e4)
  assert (c.rope_scaling, c.rope_factor) == ("linear", 8)
  assert (c.window, c.window_pattern, c.tied_embeddings) == (1024, "sssssf", True)


def test_rope_keys_of_transformers_4_and_5_are_read_alike():
  """The two rope keys of transformers 4 and the one object of transformers 5 mean the same."""
  old = CASES["llama3"]
  new = {k: v for k, v in old.items() if not k.startswith("rope")}
  new["rope_parameters"] = LLAMA3 | {"rope_theta": old["rope_theta"]}
  assert families.parse(new, "") == families.parse(old, "")
  new = {k: v for k, v in GEMMA3.items() if not k.startswith("rope")}
  new["rope_parameters"] = {
    "full_attention": GEMMA3["rope_scaling"] | {"rope_theta": GEMMA3["rope_theta"]},
    "sliding_attention": {"rope_type": "default", "rope_theta": GEMMA3["rope_local_base_freq"]},
  }
  assert families.parse(new, "") == families.parse(GEMMA3, "")


@pytest.mark.parametrize(
  ("values", "message"),
  [
    (
      LLAMA | {"model_type": "mixtral"},
      "model_type='mixtral': not supported; expected one of llama",
    ),
    (LLAMA | {"model_type": "mistral", "rope_theta": None}, "rope_theta is missing"),
    ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "required field `hidden_size`"),
    (LLAMA | {"hidden_act": "relu2"}, "hidden_act='relu2'"),
    (LLAMA | {"sliding_window": 4096}, "sliding_window=4096: not supported (in the family llama)"),
    (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    (LLAMA | {"is_causal": False}, "is_causal=false"),
    (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "rope_type='linear' has the keys []"),
    (LLAMA | {"rope_scaling": {"mrope_section": [1, 2]}}, "unknown field `mrope_section`"),
    (LLAMA | {"rope_parameters": {"rope_theta": 7.0}}, "rope_theta=100.0, but rope_theta is 7.0"),
    (LLAMA | {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3}, "rope_parameters too"),
    (QWEN2 | SLIDES | {"layer_types": ["full_attention"]}, "layer_types="),
    (QWEN2 | {"layer_types": ["sliding_attention"] * 3}, "with sliding_window=None"),
    ({"model_type": "gemma3", "text_config": LLAMA}, "expected an object of gemma3_text"),
    (LLAMA | {"num_attention_heads": 5}, "nor a multiple of 5 heads"),
    ([1], "expected an object, got [1]"),
    ("[" * 100_000, "nested 100000 deep"),
  ],
)
def test_unsupported_values_are_errors_with_file_and_key(tmp_path, values, message):
  """A feature that the decoder lacks, or an invalid value, is an error with file, key and value."""
  with pytest.raises(ValueError) as error:
    families.read(saved(tmp_path, values))
  assert str(tmp_path / "config.json") in str(error.value)
  assert message in str(error.value)
  assert len(str(error.value)) < 500


@pytest.mark.reference
@pytest.mark.shared_data
@pytest.mark.slow
def test_real_smollm2_has_the_logits_of_transformers(shared, smollm2):
  """SmolLM2 has the top token of transformers on 50 problems, and its logits within 2e-3."""
  import torch
  import transformers

  theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2).float().eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
  config = families.read(smollm2)
  mesh = sharding_lib.make_mesh(config_lib.Mesh(tensor=2))
  abstract = decoder.abstract_params(config, config.vocab_size, 3, mesh)
  params = weights.load(smollm2, abstract, config)
  graphdef = step_lib.graph(config, config.vocab_size, 3)

  @jax.jit
  def ours(params, tokens, positions, ends):
    model = nnx.merge(graphdef, params)
    return model.next_token_logits(model.hidden(tokens, positions, ends))[0]

  lines = (shared / "data/prm800k_sample/math_splits/test.jsonl").read_text().splitlines()[:50]
  for line in lines:
    ids = tokenizer.encode(json.loads(line)["problem"], add_special_tokens=False)
    length = -(-len(ids) // 64) * 64  # few shapes to compile
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(ids)] = ids
    positions = np.arange(length, dtype=np.int32)[None]
    got = np.asarray(ours(params, tokens, positions, np.full_like(tokens, length)))[: len(ids)]
    with torch.no_grad():
      expected = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-3)
    assert got[-1].argmax() == expected[-1].argmax()


def test_param_dtype_is_that_of_all_parameters_but_the_head():
  """With bfloat16, parameters but the head's are the rounded random numbers of float32."""
  c = dataclasses.replace(reference_models.config("gemma3"), param_dtype="bfloat16")
  init = functools.partial(step_lib.init_params, config=c, vocab_size=64, num_classes=3)
  for path, x in jax.tree_util.tree_leaves_with_path(jax.eval_shape(init, jax.random.key(0))):
    assert x.dtype == ("float32" if path[-1].key.startswith("head") else "bfloat16"), path
  exact, rounded = (
    decoder.weight(nnx.Rngs(0), (9,), 0.3, (None,), dtype)[...] for dtype in ("float32", "bfloat16")
  )
  np.testing.assert_array_equal(rounded, exact.astype("bfloat16"))
