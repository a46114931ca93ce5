"""The project's own sampler: cached steps equal whole forward passes; a seed determines a text."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_model
import tiny
from conftest import real_model
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from prm_jax import config as config_lib
from prm_jax.generation import cache as cache_lib
from prm_jax.generation import cached_decoder, sampling
from prm_jax.generation import sampler as sampler_lib
from prm_jax.generation.engines import Limits, Prompt, PromptError
from prm_jax.generation.sampler import Sampler
from prm_jax.generation.sampling import Sampling
from prm_jax.model import sharding as sharding_lib
from prm_jax.training import step as step_lib

PROBLEMS = ("2+2", "What is 3*4?", "x", "Add 1 to 7, then double it.")
LIMITS, FREE = Limits(max_new_tokens=12), Sampling()


class Letters(tiny.Bytes):
  """A tokenizer that decodes every list of ids."""

  def decode(self, ids) -> str:
    return bytes(i - 2 for i in ids if 2 <= i < 257).decode("latin-1")


# The sampler traces every layer, so `plain` has one; `everything` has two, one with a window.
PLAIN = dataclasses.replace(tiny.MODEL, layers=1)
EVERYTHING = dataclasses.replace(
  test_model.EVERYTHING, lora_rank=2, lora_alpha=2.0, lora_targets=("query", "output", "down")
)


@functools.cache
def params(kind: str, seed: int = 1):
  """Returns (configuration, graph, parameters) of a random model that varies its tokens."""
  config = {"plain": PLAIN, "everything": EVERYTHING}[kind]
  sizes = {"vocab_size": tiny.TOKENIZER.vocab_size, "num_classes": 3}
  init = functools.partial(step_lib.init_params, config=config, **sizes)
  if kind == "plain":
    made = jax.jit(init)(jax.random.key(seed))
  else:  # no parameter is zero or one
    rng = np.random.default_rng(seed)
    random = lambda x: jnp.asarray(rng.normal(size=x.shape) / 3, x.dtype)
    made = jax.tree.map(random, jax.eval_shape(init, jax.random.key(0)))
    made["embedding"] *= 3
  return config, step_lib.graph(config, *sizes.values()), made


@functools.cache
def sampler(
  kind: str = "plain", batch: int = 3, devices: int = 1, end=(257,), dtype="float32"
) -> Sampler:
  """Returns a sampler of random weights; equal arguments share one."""
  config, _, made = params(kind)
  config = dataclasses.replace(config, dtype=dtype)
  mesh = sharding_lib.make_mesh(config_lib.Mesh(data=devices, fsdp=1), jax.devices()[:devices])
  return Sampler.of(made, config, Letters(), frozenset(end), mesh, batch)


def completions(engine: Sampler, n: int = 3, s: Sampling = FREE, limits: Limits = LIMITS):
  """Returns `n` completions of each problem, by the numbers of problem and sample."""
  prompts = [Prompt("", problem, "\n", i) for i, problem in enumerate(PROBLEMS)]
  samples = {(x.prompt, x.sample): x for x in engine.generate(prompts, n, s, limits)}
  assert sorted(samples) == [(i, k) for i in range(len(PROBLEMS)) for k in range(n)]
  return samples


def distributions(kind: str, prompt: str, tokens) -> np.ndarray:
  """Returns the next token's log-probabilities after a prompt and each completion token.

  Computes `[1 + N, V]` by one forward pass without a cache.
  """
  _, graph, made = params(kind)
  begin = [1, *tiny.TOKENIZER.encode(prompt)]
  row = np.zeros((1, 64), np.int32)  # one length: one trace
  end = len(begin) + len(tokens)
  row[0, :end] = [*begin, *tokens]
  return np.asarray(_forward(graph, made, row))[len(begin) - 1 : end]


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph, made, row):
  model, length = nnx.merge(graph, made), row.shape[1]
  hidden = model.hidden(row, np.arange(length)[None], np.full((1, length), length))
  return jax.nn.log_softmax(model.next_token_logits(hidden)[0])


def log_probs(kind: str, prompt: str, tokens) -> np.ndarray:
  """Returns the log-probabilities of a completion's tokens by a forward pass without a cache."""
  return distributions(kind, prompt, tokens)[np.arange(len(tokens)), list(tokens)]


@pytest.mark.parametrize(
  ("kind", "dtype", "n", "atol"),
  [
    ("plain", "float32", 3, 1e-4),
    ("everything", "float32", 3, 1e-4),
    # Logits of 4 are rounded to a 64th, as are hidden states before them: up to 0.04 is seen.
    ("everything", "bfloat16", 1, 0.1),
  ],
)
def test_log_probabilities_equal_those_of_an_uncached_forward_pass(kind, dtype, n, atol):
  """Sampled tokens have the log-probabilities of one pass without a cache.

  More samples than slots refill the slots and wrap the rings around; the window of `everything`
  is shorter than the context and the ring.  The pass is in float32.
  """
  for (i, _), found in completions(sampler(kind, dtype=dtype), n).items():
    expected = log_probs(kind, f"{PROBLEMS[i]}\n", found.tokens)
    np.testing.assert_allclose(found.log_probs, expected, rtol=0, atol=atol)


def test_bfloat16_keeps_small_low_rank_updates():
  """A low-rank update of a thousandth of the weights changes a bfloat16 projection by its value.

  The weights lie on the grid of bfloat16, as public ones do: sums in bfloat16 would be the weights.
  """
  config = dataclasses.replace(PLAIN, lora_rank=2, lora_targets=("gate",), dtype="bfloat16")
  made = step_lib.init_params(jax.random.key(0), config=config, vocab_size=9, num_classes=3)
  blocks, keys = made["blocks"], jax.random.split(jax.random.key(1), 3)
  blocks["gate"] = blocks["gate"].astype("bfloat16").astype("float32")
  high = jax.random.normal(keys[0], blocks["gate_lora_out"].shape)
  update = config.lora_alpha / 2 * blocks["gate_lora_in"] @ high
  scale = 1e-3 * jnp.std(blocks["gate"]) / jnp.std(update)
  x = jax.random.normal(keys[1], (1, 8, config.width))

  def project(high):
    params = made | {"blocks": blocks | {"gate_lora_out": high}}
    (layer,) = cached_decoder.prepare(params, config)["layers"]
    return nnx.merge(cached_decoder._layer(config), layer).project(x, "gate")

  expected = scale * x @ update[0]
  change = project(scale * high) - project(0 * high)
  assert jnp.abs(change - expected).max() < 0.03 * jnp.abs(expected).max()


def test_prompts_that_share_a_context_give_the_same_tokens():
  """Prompts that continue one another give the same tokens in one context as in separate ones."""
  steps = ("one step\n", "<|im_end|> two\n", "three and more\n", "4\n")
  prompts = [Prompt("", "a problem", "\n", i, steps[:i]) for i in range(5)]
  prompts += [Prompt("", "a problem", "\n", 7, ("another\n", *steps[:i])) for i in range(3)]

  def tokens(batch: int, contexts: int):
    engine = sampler("everything", batch=batch)
    encoded = engine.encode(prompts)
    assert len(sampler_lib._chains(encoded, max(batch // 4 // 3, 1))) == contexts
    return {(x.prompt, x.sample): x.tokens for x in engine.generate(prompts, 3, FREE, LIMITS)}

  alone = tokens(batch=3, contexts=len(prompts))
  assert {*alone} == {(i, k) for i in range(len(prompts)) for k in range(3)}
  assert tokens(batch=64, contexts=2) == alone


def test_samples_beyond_the_context_length_are_a_warning():
  """A prompt and sample that may be longer than the model's context give a warning."""
  engine, prompt = sampler(), Prompt("", "x", "\n", 0)
  for room, expected in ((8, True), (64, False)):
    short = dataclasses.replace(engine, config=dataclasses.replace(PLAIN, context_length=room))
    with warnings.catch_warnings(record=True) as caught:
      next(short.generate([prompt], 1, FREE, LIMITS))
    assert ["the model's context of 8" in str(each.message) for each in caught] == [True] * expected


def test_the_mesh_of_a_sampler_is_not_its_callers():
  """While a caller has a completion, the mesh is the caller's own."""
  own = jax.sharding.get_abstract_mesh()
  some = sampler().generate([Prompt("", "x", "\n", 0)], 2, FREE, LIMITS)
  next(some)
  assert jax.sharding.get_abstract_mesh() == own


def test_a_prompt_of_too_many_tokens_is_refused(monkeypatch):
  """The cost of a line is bounded: nothing is computed for a text that no context holds."""
  monkeypatch.setattr(sampler_lib, "MAX_PROMPT", 20)
  prompts = [Prompt("", text, "", 0) for text in ("x", "x" * 30)]
  with pytest.raises(PromptError, match=r"a prompt of 31 tokens, .*expected 1 to 20") as error:
    next(sampler().generate(prompts, 1, FREE, LIMITS))
  assert error.value.refused.keys() == {1}


def test_nan_of_the_language_model_is_an_error():
  """Samples of damaged weights are not written as if they were drawn."""
  engine = sampler()
  weights = engine.weights | {"final_norm": engine.weights["final_norm"] * np.nan}
  with pytest.raises(ValueError, match="model gives NaN: damaged weights, or too large for its"):
    next(
      dataclasses.replace(engine, weights=weights).generate(
        [Prompt("", "x", "\n", 0)], 1, FREE, LIMITS
      )
    )


def test_rows_without_a_token_are_never_chosen():
  """Padding the embedding with rows of large logits changes no sample."""
  config, _, made = params("plain")
  rows = np.repeat(np.float32([[9], [-9]]), config.width, axis=1)
  padded = made | {"embedding": np.concatenate([made["embedding"], rows])}
  engine = sampler()
  other = Sampler.of(padded, config, Letters(), engine.end_tokens, engine.mesh, engine.batch)
  assert completions(other) == completions(engine)


@pytest.mark.parametrize(
  ("batch", "devices"),
  [(8, 4), *(pytest.param(batch, 1, marks=pytest.mark.slow) for batch in (1, 8, 64))],
)
def test_samples_depend_on_neither_batch_nor_slot_nor_mesh(batch, devices):
  """A sample has the same tokens in every slot, batch size and number of devices."""
  one = completions(sampler("everything"))
  assert len({x.text for x in one.values()}) > len(PROBLEMS)
  other = completions(sampler("everything", batch, devices), n=4)
  assert all(other[key].tokens == x.tokens for key, x in one.items())


def test_facts_change_with_whatever_determines_the_samples():
  """Facts change with weights, dtype and end tokens, but not with batch or mesh."""
  facts = sampler().facts()
  assert sampler(batch=8, devices=4).facts() == facts
  for other in (sampler("everything"), sampler(dtype="bfloat16"), sampler(end=())):
    assert other.facts() != facts
  config, _, made = params("plain")
  moved = made | {"final_norm": made["final_norm"].at[0].add(1e-3)}
  engine = sampler()
  other = Sampler.of(moved, config, Letters(), engine.end_tokens, engine.mesh)
  assert {key for key in facts if other.facts()[key] != facts[key]} == {"weights"}


def test_growing_rings_and_contexts_change_no_sample(monkeypatch):
  """Rings that grow twice, and contexts that grow for long prompts, give the same tokens.

  They grow while other slots are at different places, and other prompts under way.
  """
  engine = sampler(end=range(3, 258, 16))  # samples end, and others begin, at different steps
  expected, grow, sizes = completions(engine, n=4), cache_lib.grown, []
  monkeypatch.setattr(sampler_lib, "RING", 3)
  monkeypatch.setattr(sampler_lib, "LEAST_PLACES", 2)
  monkeypatch.setattr(cache_lib, "grown", lambda cache, C: sizes.append(C) or grow(cache, C))
  found = completions(engine, n=4)
  assert sizes == [4, 16, 32]  # of contexts
  for key, x in expected.items():
    assert found[key].tokens == x.tokens
    np.testing.assert_allclose(found[key].log_probs, x.log_probs, rtol=0, atol=1e-4)  # finer


def test_a_ring_that_has_wrapped_grows(monkeypatch):
  """A ring grows for a sample that began in its middle: its tokens lie on both sides of place 0."""
  engine = sampler(batch=1, end=range(3, 258, 8))
  expected = completions(engine, n=4)
  lengths = [len(x.tokens) for x in expected.values()]
  assert lengths[:3] == [5, 4, 12]  # the third begins at place 9 modulo 6, and fills the ring
  monkeypatch.setattr(sampler_lib, "RING", 6)
  for key, x in completions(engine, n=4).items():
    assert x.tokens == expected[key].tokens
    np.testing.assert_allclose(x.log_probs, expected[key].log_probs, rtol=0, atol=1e-4)


def test_a_completion_ends_at_an_end_token_a_stop_string_or_the_limit():
  """A completion ends at an end token, which its text lacks, at a stop string, or at the limit."""
  free = completions(sampler(end=()))
  assert {x.end for x in free.values()} == {"length"}
  assert all(len(x.tokens) == 12 for x in free.values())
  token = next(iter(free.values())).tokens[5]
  for key, x in completions(sampler(end=(token,))).items():
    before = free[key].tokens
    assert x.tokens == before[: before.index(token) + 1 if token in before else 12]
    assert x.end == ("stop" if token in before else "length")
    assert x.text == Letters().decode(x.tokens[: -1 if x.end == "stop" else None])
  stop = next(x.text for x in free.values() if x.text)[:2]
  for key, x in completions(sampler(end=()), limits=Limits(12, (stop,))).items():
    whole = free[key].text
    assert x.text == (whole[: whole.index(stop) + len(stop)] if stop in whole else whole)
    assert x.end == ("stop" if stop in whole else "length")


def test_a_text_is_decoded_only_where_it_may_end():
  """With a stop string, a text is decoded after tokens that have the string's last letter."""
  lengths = []

  class Counting(Letters):
    def decode(self, ids) -> str:
      lengths.append(len(ids))
      return super().decode(ids)

  engine = dataclasses.replace(sampler(end=()), tokenizer=Counting())
  found = completions(engine, limits=Limits(12, ("no!",))).values()
  may_end = sum("!" in Letters().decode([token]) for x in found for token in x.tokens)
  assert sum(length > 1 for length in lengths) <= may_end + len(found)


def test_temperature_zero_chooses_the_likeliest_token():
  """At temperature 0 each token is the likeliest by a forward pass without a cache."""
  for x in completions(sampler(), n=1, s=Sampling(temperature=0)).values():
    best = distributions("plain", f"{PROBLEMS[x.prompt]}\n", x.tokens).argmax(-1)[:-1]
    assert [*best] == [*x.tokens]


def allowed(logits: np.ndarray, s: Sampling) -> np.ndarray:
  """Returns the probabilities after temperature, top-k, top-p and min-p, applied in this order."""
  p = np.exp((logits - logits.max()) / s.temperature)
  order = np.argsort(-p, kind="stable")
  kept = order[: s.top_k or None]
  p_kept = p[kept] / p[kept].sum()
  before = np.cumsum(p_kept) - p_kept
  kept = kept[(before < s.top_p) & (p_kept >= s.min_p * p_kept[0])]
  out = np.zeros(len(p))
  out[kept] = p[kept] / p[kept].sum()
  return out


SETTINGS = [  # with the size of a vocabulary: each pair is compiled
  (Sampling(0.3), 300),
  (Sampling(2.0, top_k=40, min_p=0.1), 3),
  (Sampling(2.0, top_k=3, min_p=0.1), 50),
  (Sampling(top_k=40, top_p=0.9), 300),
  (Sampling(2.0, top_p=0.9), 300),
  (Sampling(top_p=0.2, min_p=0.1), 50),
]


@settings(max_examples=15, deadline=None)
@given(pair=st.sampled_from(SETTINGS), seed=st.integers(0, 99))
def test_samples_follow_the_truncated_distribution(pair, seed):
  """Evenly spaced uniform numbers choose each token in proportion to its truncated probability.

  Of more than 32 tokens, all are sorted only where the likeliest 32 do not suffice.
  """
  s, vocabulary = pair
  logits = np.random.default_rng(seed).normal(0, 3, vocabulary).astype(np.float32)
  draws = 4000
  uniform = ((np.arange(draws) + 0.5) / draws).astype(np.float32)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sampling, "LIKELIEST", 32)
    tokens, log_probs = chosen(jnp.tile(logits, (draws, 1)), uniform, s)
  expected = allowed(logits.astype(np.float64), s)
  share = np.bincount(tokens, minlength=vocabulary) / draws
  # An interval of length p has draws * p points, plus or minus one, and float32 sums are rounded.
  np.testing.assert_allclose(share, expected, rtol=0, atol=1.6 / draws)
  own = logits - np.log(np.exp(logits.astype(np.float64)).sum())
  np.testing.assert_allclose(log_probs, own[np.asarray(tokens)], atol=1e-4)


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1.2e-38, 1e-30])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_a_tiny_temperature_chooses_the_likeliest_token(temperature, top_p):
  """A user who asks for almost no randomness gets the likeliest token, not the first of all."""
  logits = np.random.default_rng(0).normal(0, 9, (40, 300)).astype(np.float32)
  tokens, _ = chosen(logits, np.full(40, 0.7, np.float32), Sampling(temperature, top_p=top_p))
  np.testing.assert_array_equal(tokens, logits.argmax(-1))


@functools.partial(jax.jit, static_argnums=2)
def chosen(logits, uniform, s):
  """Returns tokens and log-probabilities of `sampling.choose`, compiled."""
  return sampling.choose(logits, uniform, s)


@pytest.mark.parametrize("s", [Sampling(0.8), Sampling(0), Sampling(top_p=0.7)])
def test_choosing_a_few_rows_at_a_time_changes_no_token(s, monkeypatch):
  """A large vocabulary, whose rows are processed a few at a time, gives the same tokens."""
  rng = np.random.default_rng(0)
  logits, numbers = rng.normal(size=(12, 300)).astype(np.float32), rng.random(12, np.float32)
  choose = lambda: jax.jit(lambda *given: sampling.choose(*given, s)).trace(logits, numbers)
  run = lambda traced: traced.lower().compile()(logits, numbers)
  expected = run(choose())
  monkeypatch.setattr(sampling, "AT_ONCE", 4 * 300)
  few = choose()
  assert "scan" in str(few.jaxpr)
  for one, other in zip(run(few), expected):
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_sampled_frequencies_follow_the_model():
  """First tokens of many samples have the model's distribution, by a chi-square test."""
  draws = 2000
  every = range(tiny.TOKENIZER.vocab_size)
  samples = completions(sampler(end=every), n=draws)  # each ends at its first token
  for i, problem in enumerate(PROBLEMS):
    p = np.exp(distributions("plain", f"{problem}\n", ())[0].astype(np.float64))
    counts = np.bincount([samples[i, k].tokens[0] for k in range(draws)], minlength=len(p))
    common = p * draws >= 5
    observed = [*counts[common], counts[~common].sum()]
    expected = [*p[common] * draws, (1 - p[common].sum()) * draws]
    assert common.sum() > 3 and stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.fixture
def optimised():
  """Lets XLA optimise, unlike in other tests: a real model would otherwise take an hour."""
  jax.clear_caches()
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
  ("variable", "name"),
  [("PRM_JAX_SMOLLM2", "smollm2-135m"), ("PRM_JAX_QWEN_CODER", "qwen2.5-coder-0.5b")],
)
def test_greedy_texts_equal_those_of_transformers(variable, name, monkeypatch):
  """With real weights, greedy decoding of 20 prompts gives the tokens of transformers."""
  path = real_model(name, variable)
  import torch
  import transformers

  texts = [
    " and then ".join(f"add {7 * k + i} to {i}" for k in range(1 + i % 6)) for i in range(20)
  ]
  prompts = [Prompt("", f"Please {text}.", "\n", 0) for text in texts]
  one = jax.devices()[:1]
  monkeypatch.setattr(jax, "local_devices", lambda: one)  # eight copies would need 20 GB
  engine = Sampler.load(path, batch=8)
  found = engine.generate(prompts, 1, Sampling(temperature=0), Limits(64))
  ours = {x.prompt: [*x.tokens] for x in found}
  ids = [engine.tokenizer.encode(prompt.text) for prompt in prompts]
  width = max(map(len, ids))
  padded = torch.tensor([[0] * (width - len(each)) + each for each in ids])
  mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in ids])
  model = transformers.AutoModelForCausalLM.from_pretrained(path).float().eval()
  options = {"max_new_tokens": 64, "eos_token_id": [*engine.end_tokens], "pad_token_id": 0}
  plain = transformers.GenerationConfig(do_sample=False, **options)  # no penalty of repetitions
  theirs = model.generate(padded, attention_mask=mask, generation_config=plain)[:, width:].tolist()
  assert {i: theirs[i][: len(tokens)] for i, tokens in ours.items()} == ours
  assert all(len(x) == 64 or x[-1] in engine.end_tokens for x in ours.values())
