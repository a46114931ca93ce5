"""Rewards for RL: each form agrees with its definition, and RL trainers can call the function."""

import dataclasses
import functools
import inspect
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tokenizers as hf
from conftest import ROOT
from jax.sharding import NamedSharding, PartitionSpec

from prm_jax import config as config_lib
from prm_jax.input_pipeline import token_tree, tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import export
from prm_jax.scoring import rewards
from prm_jax.scoring.reward_function import RewardFunction
from prm_jax.training import step as step_lib
from prm_jax.types import TWO_CLASSES, StepContract

B, G, S, L = 8, 4, 6, 24
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # float32 against float64


def slow_rewards(p, form, temperature=0.1):
  """The rewards of one solution's steps, as the papers write them."""
  if form == "raw":
    return list(p)
  if form == "implicit":
    near = [min(max(x, 2**-23), 1 - 2**-23) for x in p]
    return [math.log(x / (1 - x)) for x in near]
  if form == "product":
    products = [math.prod(p[:t]) for t in range(len(p) + 1)]
    return [products[t + 1] - (products[t] if t else 0) for t in range(len(p))]
  r = [2 * x - 1 for x in p]
  weights = [math.exp(-x / temperature) for x in r]
  return [x * w / sum(weights) for x, w in zip(r, weights)]


def slow_advantages(solutions, discount=1.0):
  """The advantages of the tokens of a prompt's completions, each a list of token rewards."""
  out = []
  for i, own in enumerate(solutions):
    others = [solution for j, solution in enumerate(solutions) if j != i]
    mean = sum(map(sum, others)) / max(sum(map(len, others)), 1)
    out.append(
      [
        sum(discount ** (u - t) * (own[u] - mean) for u in range(t, len(own)))
        for t in range(len(own))
      ]
    )
  return out


@functools.cache
def solutions(seed=0):
  """Random probabilities `[B, S]`, which of them are valid, and the steps' ends among L tokens.

  One solution has no step, one has S; padding holds values that must not be used.
  """
  rng = np.random.default_rng(seed)
  count = np.array([0, S, *rng.integers(1, S + 1, B - 2)])
  valid = np.arange(S) < count[:, None]
  p = np.where(valid, rng.uniform(size=(B, S)), np.nan).astype(np.float32)
  p[1, 2], p[2, 0] = 0, 1  # where a logarithm, or its gradient, is not finite
  ends = np.sort([rng.choice(L - 2, S, replace=False) for _ in range(B)]).astype(np.int32)
  return p, valid, np.where(valid, ends, rng.integers(0, L, (B, S)).astype(np.int32))


def padded(lists, size):
  """The lists as rows of an array, with zeros at their ends."""
  return np.array([[*each, *[0.0] * (size - len(each))] for each in lists])


def assert_under_vmap_and_sharded(function, expected, *arrays):
  """Asserts the values of `function` under vmap, and jitted with the batch over eight devices."""
  arrays = [jnp.asarray(x) for x in arrays]
  np.testing.assert_allclose(jax.jit(jax.vmap(function))(*arrays), expected, **TOLERANCE)
  mesh = sharding_lib.make_mesh(config_lib.Mesh(data=2, fsdp=4))
  sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
  values = jax.jit(function)(*(jax.device_put(x, sharding) for x in arrays))
  np.testing.assert_allclose(values, expected, **TOLERANCE)
  assert values.sharding.is_equivalent_to(sharding, values.ndim)


@pytest.mark.parametrize("form", rewards.FORMS)
def test_step_rewards_are_their_definition(form):
  """Each form agrees with its slow definition on the valid steps and is zero in padding."""
  p, valid, _ = solutions()
  expected = padded([slow_rewards(row[ok].tolist(), form) for row, ok in zip(p, valid)], S)
  function = functools.partial(rewards.step_rewards, form=form)
  assert_under_vmap_and_sharded(function, expected, p, valid)


def test_minimum_rewards_tend_to_the_minimum():
  """The sum tends to 2 min P - 1 as the temperature falls, and to the mean as it grows."""
  p, valid, _ = solutions()
  sums = lambda t: np.asarray(rewards.step_rewards(p, valid, "minimum", temperature=t).sum(-1))[1:]
  right = [row[ok] for row, ok in zip(p, valid)][1:]
  least = np.array([2 * r.min() - 1 for r in right])
  np.testing.assert_allclose(sums(1e-4), least, atol=1e-3)
  np.testing.assert_allclose(sums(1e5), [2 * r.mean() - 1 for r in right], atol=1e-3)
  errors = [np.abs(sums(t) - least).max() for t in (1, 0.1, 0.01)]
  assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("form", rewards.FORMS)
def test_padding_has_no_gradient(form):
  """Gradients are finite at P of 0 and 1 and with NaN in padding, where they are zero."""
  p, valid, _ = solutions()
  weights = jnp.arange(1.0, S + 1)
  total = lambda p: (rewards.step_rewards(p, valid, form) * weights).sum()
  gradient = np.asarray(jax.jit(jax.grad(total))(jnp.asarray(p)))
  assert np.isfinite(gradient).all()
  assert not gradient[~valid].any() and gradient[valid].any()


@pytest.mark.parametrize("form", rewards.FORMS)
def test_gradients_are_those_of_the_definition(form):
  """The gradient of each form is the slope of its slow definition, at P of 0 too.

  "implicit" has no gradient at 0, where its log-odds are clipped.
  """
  p, valid = np.array([0.3, 0.9, 0.1 if form == "implicit" else 0.0, 0.6]), np.ones(4, bool)
  gradient = jax.jit(jax.grad(lambda p: (rewards.step_rewards(p, valid, form) ** 2).sum()))
  slow = lambda p: sum(r**2 for r in slow_rewards(list(p), form))
  slopes = [(slow(p + d) - slow(p - d)) / 2e-5 for d in 1e-5 * np.eye(4)]
  np.testing.assert_allclose(gradient(jnp.asarray(p, jnp.float32)), slopes, atol=1e-3)


def test_implicit_rewards_are_sums_over_steps():
  """An implicit reward sums beta times the log-ratio over the step's tokens, its last included."""
  _, valid, ends = solutions()
  log_probs, reference = np.random.default_rng(1).normal(-3, 1, (2, B, L)).astype(np.float32)
  expected = np.zeros((B, S))
  for i, s in np.argwhere(valid):
    first = ends[i, s - 1] + 1 if s else 0
    for t in range(first, ends[i, s] + 1):
      expected[i, s] += 0.05 * (float(log_probs[i, t]) - float(reference[i, t]))
  arrays = log_probs, reference, ends, valid
  assert_under_vmap_and_sharded(rewards.implicit_step_rewards, expected, *arrays)


def test_step_rewards_stand_at_last_tokens():
  """A step's reward is at its last token; a step that ends after a cut completion gets no place."""
  _, valid, ends = solutions()
  values = np.random.default_rng(1).normal(size=(B, S)).astype(np.float32)
  expected = np.zeros((B, L))
  for i, s in np.argwhere(valid):
    expected[i, ends[i, s]] += values[i, s]
  place = lambda *arrays: rewards.at_tokens(*arrays, length=L)
  assert_under_vmap_and_sharded(place, expected, values, ends, valid)
  cut = rewards.at_tokens(values, ends, valid, L // 2)
  np.testing.assert_allclose(cut, expected[:, : L // 2], **TOLERANCE)


def test_returns_are_discounted_sums():
  """A return is the discounted sum of the rewards from its token on."""
  values = np.random.default_rng(1).normal(size=(B, L)).astype(np.float32)

  def expected(discount):
    returns = np.zeros((B, L + 1))
    for t in reversed(range(L)):
      returns[:, t] = values[:, t] + discount * returns[:, t + 1]
    return returns[:, :L]

  function = functools.partial(rewards.returns_to_go, discount=0.9)
  assert_under_vmap_and_sharded(function, expected(0.9), values)
  compiled = jax.jit(rewards.returns_to_go)
  for discount in (1.0, 0.5, 0.0):
    np.testing.assert_allclose(compiled(values, discount), expected(discount), **TOLERANCE)
  whole = rewards.returns_to_go(jnp.array([0, 0, 1]), 0.5)
  np.testing.assert_array_equal(whole, [0.25, 0.5, 1])


def test_advantages_leave_one_out():
  """Advantages agree with their slow definition, in a group with an empty completion too.

  The baseline is a mean per token; one per step would change if a step is cut in two
  (CJReinforce/PURE#2).
  """
  rng = np.random.default_rng(1)
  lengths = rng.integers(1, L + 1, (B, G))
  lengths[0, 0] = 0
  given = lambda n: rng.normal(size=n) * rng.integers(0, 2, n)  # many tokens end no step: reward 0
  groups = [[given(n).tolist() for n in row] for row in lengths]
  mask = np.arange(L) < lengths[..., None]
  given = np.where(mask, np.stack([padded(group, L) for group in groups]), np.nan)
  given = given.astype(np.float32)
  expected = lambda discount: np.stack(
    [padded(slow_advantages(group, discount), L) for group in groups]
  )
  # Sums of up to 24 normal rewards, less a mean, in float32.
  function = functools.partial(rewards.token_advantages, discount=0.9)
  assert_under_vmap_and_sharded(lambda *x: function(*x) / 10, expected(0.9) / 10, given, mask)
  undiscounted = jax.jit(rewards.token_advantages)(given, mask)
  np.testing.assert_allclose(undiscounted / 10, expected(1.0) / 10, **TOLERANCE)
  with pytest.raises(ValueError, match="G >= 2"):
    rewards.token_advantages(given[:, :1], mask[:, :1])


def test_wrong_arguments_are_refused():
  """An unknown form and shapes that differ are errors with the value."""
  p, valid, _ = solutions()
  with pytest.raises(ValueError, match=r"form='mean'.*product, minimum, raw"):
    rewards.step_rewards(p, valid, "mean")
  with pytest.raises(ValueError, match=r"\(8, 6\), valid \(8, 5\)"):
    rewards.step_rewards(p, valid[:, :5])


class Letters:
  """A rater: P(right) of a step is its share of the letter r; a step with "!" cannot be rated."""

  contract = StepContract("process", TWO_CLASSES, "\n\n", (1,), "", "none", "", "letters")

  def encode(self, problem, steps):
    if not steps or any("!" in step for step in steps):
      raise ValueError("without steps, or too long")
    return steps

  def read(self, token_trees, problems):
    self.seen = [*zip(problems, token_trees)]
    share = lambda step: step.count("r") / len(step.strip())
    return [np.array([[[1 - share(s), share(s)]] for s in steps]) for steps in token_trees]


CASES = {  # completion -> the shares of r of its steps
  "rr\n\nrx": [1, 0.5],
  "rrx": [2 / 3],
  "\n\n  \n\n": [],
  "": [],
  "rr\n\n\n\nxx\n\nrx \n\n": [1, 0, 0.5],
  "rr\n\n!": [],
}


@pytest.mark.parametrize("form", rewards.FORMS)
def test_a_reward_function_sums_the_rewards_of_steps(form):
  """A reward is the sum over steps; without steps it is that of a wrong one, or 0 if implicit."""
  function = RewardFunction(Letters(), form)
  found = function(prompts=["p"] * len(CASES), completions=list(CASES), trainer_state=None)
  nothing = [] if form == "implicit" else [0]
  expected = [sum(slow_rewards(p or nothing, form)) for p in CASES.values()]
  np.testing.assert_allclose(found, expected, **TOLERANCE)
  assert all(type(reward) is float for reward in found)
  assert function.__name__ == f"prm_{form}"
  with pytest.warns(UserWarning, match="no completion has a score: without steps, or too long"):
    function(["p"] * 2, ["!", ""])


def test_chats_are_texts():
  """The problem of a chat is the user's last turn, its solution the assistant's turns."""
  chat = lambda *turns: [{"role": role, "content": content} for role, content in turns]
  prompt = chat(("system", "s"), ("user", "old"), ("assistant", "r"), ("user", "2+2?"))
  function = RewardFunction(rater := Letters())
  parts = [{"type": "image"}, {"type": "text", "text": "rr"}, {"type": "text", "text": "x"}]
  call = chat(("assistant", None), ("tool", "5"), ("assistant", "rx"))  # of a tool
  answers = [chat(("assistant", "rr\n\nrx")), chat(("assistant", parts)), call, None, 7]
  found = [pytest.approx(x) for x in (0.5, 2 / 3, 0.5)]
  assert function([prompt] * 5, answers) == [*found, 0, 0]
  assert rater.seen == [("2+2?", ["rr", "rx"]), ("2+2?", ["rrx"]), ("2+2?", ["rx"])]
  del call[0]["content"]
  assert function([prompt], [call]) == found[2:]
  assert function(["2+2?"], ["rr\n\nrx"]) == [pytest.approx(0.5)]
  with pytest.raises(ValueError, match=r"prompt \[\].*a user's turn"):
    function([[]], ["r"])


def test_nan_of_the_model_is_no_reward():
  """A model that gives NaN is an error, as a trainer would take NaN for a missing reward."""
  rater = Letters()
  rater.read = lambda trees, problems: [np.full((1, 1, 2), np.nan)]
  with pytest.raises(ValueError, match="the model gives NaN"):
    RewardFunction(rater)(["p"], ["r"])


def test_the_problem_may_be_a_column():
  """With `problem=`, the model reads the problem in that column; a missing column is an error."""
  rater = Letters()
  RewardFunction(rater, problem="question")(["Solve: 2+2"], ["r"], question=["2+2"], answer=["4"])
  assert rater.seen == [("2+2", ["r"])]
  with pytest.raises(
    ValueError, match=r"problem='question': .*no such column; its columns: answer"
  ):
    RewardFunction(rater, problem="question")(["Solve: 2+2"], ["r"], answer=["4"])
  with pytest.raises(ValueError, match="no such column; its columns: none"):
    RewardFunction(rater, problem="question")(["Solve: 2+2"], ["r"])


def test_batches_of_any_size_share_programs():
  """Batches of 33 to 64 completions run one compiled program."""
  compiled, function = rewards.step_rewards._cache_size(), RewardFunction(Letters())
  for count in range(33, 65):
    function(["p"] * count, ["r\n\nx"] * count)
  assert rewards.step_rewards._cache_size() - compiled <= 1


def test_step_rewards_can_be_placed_on_tokens():
  """The rewards at the tokens that the character ends of steps give add up to the reward."""
  function = RewardFunction(Letters())
  prompts, completions = ["p"] * len(CASES), list(CASES)
  step_rewards = function.step_rewards(prompts, completions)
  totals = function(prompts, completions)
  for completion, steps, total in zip(completions, step_rewards, totals):
    starts = np.arange(0, len(completion), 3)  # of tokens of three characters
    ends = np.searchsorted(starts, steps.ends) - 1
    given = np.array(steps.rewards), ends, np.ones(len(ends), bool)
    placed = rewards.at_tokens(*map(jnp.asarray, given), length=len(starts))
    assert placed.sum() == pytest.approx(total)
    assert all(completion[end - 1] in "rx" for end in steps.ends)
  assert step_rewards[4].ends == [2, 8, 12]


def test_the_documented_places_are_last_tokens_of_letters_with_several():
  """The expression of docs/rewards.md gives the last token of a step that ends with an emoji."""
  code = re.search(r"`(numpy\.searchsorted.*?)`", (ROOT / "docs" / "rewards.md").read_text())[1]
  letters = {letter: i for i, letter in enumerate(hf.pre_tokenizers.ByteLevel.alphabet())}
  tokenizer = hf.Tokenizer(hf.models.BPE(letters, []))  # a token for each byte
  tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
  text = "a 😀\n\nπ.\n\nxπ"
  ends = RewardFunction(Letters()).step_rewards(["p"], [text])[0].ends
  places = eval(code, {"numpy": np, "offsets": tokenizer.encode(text).offsets, "ends": ends})
  assert [*places] == [len(text[:end].encode()) - 1 for end in ends]


OUTCOME = dataclasses.replace(Letters.contract, objective="outcome")


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"form": "mean"}, "form='mean'"),
    ({"temperature": 0.0}, "temperature=0.0"),
    ({"temperature": 1e-40}, "temperature=1e-40"),
    ({"rater": types.SimpleNamespace(contract=OUTCOME)}, "'outcome'"),
  ],
)
def test_wrong_reward_functions_are_refused(options, message):
  """An unknown form, too low a temperature and a model that rates no steps are errors at once."""
  with pytest.raises(ValueError, match=message):
    RewardFunction(**{"rater": Letters()} | options)


def test_tunix_and_trl_can_call_a_reward_function():
  """Calls as tunix 0.1.7 makes them, with NumPy columns, and trl 1.16.0, with chats, give rewards.

  tunix passes fields of its config to parameters of their name; TRL awaits coroutine functions.
  """
  function = RewardFunction(rater := Letters(), problem="question")
  assert {*inspect.signature(function).parameters} == {"prompts", "completions", "columns"}
  assert not inspect.iscoroutinefunction(function.__call__)
  prompts, completions, questions = ["Solve: 2+2", "Solve: 3+3"], ["rr\n\nrx", ""], ["2+2", "3+3"]
  given = {"question": np.array(questions), "answer": np.array(["4", "6"]), "mode": "train"}
  assert function(prompts=np.array(prompts), completions=completions, **given) == [0.5, 0]
  assert rater.seen == [("2+2", ["rr", "rx"])]
  chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
  answers = [[{"role": "assistant", "content": text}] for text in completions]
  given = {"question": questions, "completion_ids": [[1], [2]], "trainer_state": object()}
  given |= {"log_extra": print, "log_metric": print}
  assert function(prompts=chats, completions=answers, **given) == [0.5, 0]


@pytest.fixture
def example(arithmetic_data, tmp_path, monkeypatch):
  """Returns a function that runs an example of docs/rewards.md in a folder with a tiny model.

  It takes the example's heading and returns the calls of the reward function, each as prompts,
  completions, columns and rewards.
  """
  monkeypatch.chdir(tmp_path)
  tokenizer = tokenizers.load(arithmetic_data)
  contract = token_tree.step_contract(tokenizer, "\n", "process", "paper")
  init = functools.partial(step_lib.init_params, config=tiny.MODEL, num_classes=3)
  params = init(jax.random.key(0), vocab_size=tokenizer.vocab_size)
  params["head"] = jax.random.normal(jax.random.key(1), params["head"].shape)
  export.write("exports/prm", params, tiny.MODEL, tokenizer.vocab_size, contract=contract)
  tokenizer.save(tmp_path / "exports/prm")
  calls, call = [], RewardFunction.__call__

  def recorded(self, prompts, completions, **columns):
    calls.append((prompts, completions, columns, call(self, prompts, completions, **columns)))
    return calls[-1][-1]

  monkeypatch.setattr(RewardFunction, "__call__", recorded)
  text = (ROOT / "docs" / "rewards.md").read_text()

  def run(heading, **given):
    code = re.search(rf"^### {heading}$.*?^```python\n(.*?)^```$", text, re.M | re.S)[1]
    exec(code, given)
    return calls

  return run


def assert_rewards(calls, generations):
  """Asserts that every call has a problem and a finite reward for each completion."""
  assert calls
  for prompts, completions, columns, found in calls:
    assert len(prompts) == len(completions) == len(columns["question"]) == len(found)
    assert len(found) % generations == 0
    assert all(np.isfinite(found)) and min(found) >= -1 and max(found) <= 1
  assert any(len(set(found)) > 1 for *_, found in calls)


@pytest.mark.reference
def test_the_example_of_tunix_runs(example):
  """The example in the documentation trains a toy policy with tunix's GRPO learner."""
  common = pytest.importorskip("tunix.tests.test_common")
  import grain
  import optax
  from flax import nnx
  from tunix.rl import rl_cluster as cluster_lib
  from tunix.rl.rollout import base_rollout

  vocabulary = common.MockVocab()
  config = common.ModelConfig(vocab_size=vocabulary.GetPieceSize())
  policy, reference = (common.ToyTransformer(config=config, rngs=nnx.Rngs(0)) for _ in range(2))
  before = jax.tree.map(jnp.copy, nnx.state(policy, nnx.Param))
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1])[None], ("fsdp", "tp"))
  roles = (cluster_lib.Role.ACTOR, cluster_lib.Role.REFERENCE, cluster_lib.Role.ROLLOUT)
  cluster = cluster_lib.RLCluster(
    actor=policy,
    reference=reference,
    tokenizer=vocabulary,
    cluster_config=cluster_lib.ClusterConfig(
      role_to_mesh=dict.fromkeys(roles, mesh),
      rollout_engine="vanilla",
      offload_to_cpu=False,
      training_config=cluster_lib.RLTrainingConfig(
        actor_optimizer=optax.sgd(1e-2), eval_every_n_steps=10, max_steps=2
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=8, max_prompt_length=16, kv_cache_size=64
      ),
    ),
  )
  rows = ["hello world", "My name", "Tunix library", "input string"]
  dataset = grain.MapDataset.source(rows).batch(2)
  dataset = dataset.map(lambda batch: {"prompts": batch, "question": batch})
  assert_rewards(example("tunix", rl_cluster=cluster, dataset=dataset), generations=2)
  after = nnx.state(cluster.actor_trainer.model, nnx.Param)
  moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), before, after)
  assert max(jax.tree.leaves(moved)) > 0


@pytest.mark.reference
def test_the_example_of_trl_runs(example, tmp_path, monkeypatch):
  """The example in the documentation trains a toy policy with TRL's GRPO trainer."""
  trl = pytest.importorskip("trl")
  import tokenizers as fast
  import torch
  import transformers

  words = ["<pad>", "</s>", "<unk>", "2", "+", "=", "4", "so", "is", "step", "answer", "?"]
  model = fast.Tokenizer(
    fast.models.WordLevel({x: i for i, x in enumerate(words)}, unk_token="<unk>")
  )
  model.pre_tokenizer = fast.pre_tokenizers.Whitespace()
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=model, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
  ).save_pretrained("models/policy")
  sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
  torch.manual_seed(0)
  transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=len(words), num_attention_heads=2, pad_token_id=0, eos_token_id=1, **sizes
    )
  ).save_pretrained("models/policy")
  here = {"use_cpu": True, "bf16": False, "report_to": "none", "max_completion_length": 8}
  monkeypatch.setattr(trl, "GRPOConfig", functools.partial(trl.GRPOConfig, **here))
  assert_rewards(example("TRL"), generations=2)
  assert (tmp_path / "runs/grpo").is_dir()
