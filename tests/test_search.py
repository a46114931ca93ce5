"""Searches guided by a reward model: cached passes equal whole forward passes; selection rules."""

import dataclasses
import functools
import gc
import math
import types
import weakref

import jax
import numpy as np
import pytest
import test_sampler
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax import aggregation as agg
from prm_jax import config as config_lib
from prm_jax.generation import cache as cache_lib
from prm_jax.generation import cached_scorer, samples, step_writer
from prm_jax.generation import prompts as prompts_lib
from prm_jax.generation import search as search_lib
from prm_jax.generation.cached_scorer import CachedScorer
from prm_jax.generation.engines import Limits, Prompt
from prm_jax.generation.places import Places, power_of_two, size
from prm_jax.generation.sampler import Sampler
from prm_jax.generation.sampling import Sampling
from prm_jax.generation.search import Search, Settings
from prm_jax.generation.step_writer import Lane, StepWriter
from prm_jax.input_pipeline import prefix_tree
from prm_jax.model import sharding as sharding_lib
from prm_jax.scoring import rater, readouts
from prm_jax.scoring.scorer import Scorer

PROMPTS = tuple(Prompt("", text, "\n", i) for i, text in enumerate(test_sampler.PROBLEMS))
LIMITS, TEMPERATURE = Limits(max_new_tokens=24), Sampling(20.0)
RULES = [*search_lib.RULES]


@pytest.fixture(scope="module", autouse=True)
def few_shapes():
  """Rounds sizes up further than for users, because every shape is traced and compiled.

  A context still grows beyond its first 64 places.
  """
  coarse = lambda count, least: size(count, 16 if least == 1 else 128)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cached_scorer, "size", coarse)  # of blocks and of their pasts
    patch.setattr(step_writer, "size", coarse)  # of contexts
    patch.setattr(cache_lib, "size", coarse)  # of what is kept
    patch.setattr(cached_scorer, "power_of_two", lambda count: max(power_of_two(count), 4))
    yield


@functools.cache
def scorer(kind: str = "plain") -> Scorer:
  """Returns a random process model of one of the configurations of test_sampler."""
  config, _, params = test_sampler.params(kind, seed=3)
  head = jax.random.normal(jax.random.key(3), params["head"].shape)  # initially zero
  contract, params = tiny.contract(), params | {"head": head}
  readout = readouts.trained(tiny.TOKENIZER, contract)
  mesh = sharding_lib.make_mesh(config_lib.Mesh(), jax.devices()[:1])
  facts = (config, tiny.TOKENIZER.vocab_size, params, mesh)
  return Scorer(contract, test_sampler.Letters(), readout, *facts, row_length=128)


class Lines(test_sampler.Letters):
  """A tokenizer with line breaks for a quarter of its ids, so that a random model writes steps."""

  def decode(self, ids) -> str:
    return "".join("\n" if i % 4 == 0 else chr(97 + i % 26) for i in ids)


@functools.cache
def sampler(kind: str = "plain") -> Sampler:
  """Returns a random language model whose samples have several steps and often end."""
  return dataclasses.replace(test_sampler.sampler(kind, end=range(3, 258, 16)), tokenizer=Lines())


@functools.cache
def run(
  rule: str,
  contexts: int = 3,
  kind: str = "plain",
  guide: str = "plain",
  max_step_tokens: int = 8,
  limits: Limits = LIMITS,
  steps: str = "lines",
  prompts: tuple[Prompt, ...] = PROMPTS,
  **changed,
):
  """Returns the search's result for each prompt, by the prompt's index."""
  settings = {"rule": rule, "expansions": 2, "reduction": "last", "lookahead": 2}
  settings |= {"max_step_tokens": max_step_tokens, "steps": steps}
  s = Settings(4, TEMPERATURE, limits, **settings | changed)
  engine = Search(sampler(kind), CachedScorer(scorer(guide), contexts), s)
  found = {each.prompt: each for each in engine.run(prompts)}
  assert sorted(found) == [*range(len(prompts))]
  return found


@pytest.mark.parametrize(
  ("rule", "guide"), [*((rule, "plain") for rule in RULES), ("beam", "everything")]
)
def test_step_probabilities_equal_those_of_the_whole_solution(rule, guide):
  """The scorer gives the finished solution the step probabilities that the search recorded."""
  for i, found in run(rule, guide=guide).items():
    for lane in found.lanes:
      whole = scorer(guide).by_head([(PROMPTS[i].problem, lane.steps)])[0]
      np.testing.assert_allclose(np.array(lane.probabilities), whole, atol=1e-5)


@pytest.mark.parametrize(
  ("rule", "kind"),
  [("beam", "plain"), ("particles", "plain"), ("lookahead", "plain"), ("lookahead", "everything")],
)
def test_log_probabilities_equal_those_of_an_uncached_forward_pass(rule, kind):
  """A lane that was selected and copied has the log-probability of one pass without a cache.

  The attention window of `everything` is shorter than the context.
  """
  for i, found in run(rule, kind=kind).items():
    for lane in found.lanes:
      expected = test_sampler.log_probs(kind, PROMPTS[i].text, lane.tokens).sum()
      np.testing.assert_allclose(lane.log_prob, expected, rtol=0, atol=1e-3)


def test_finished_steps_are_scored_before_the_ring_overwrites_them(monkeypatch):
  """A step that waits for other problems is scored before the ring overwrites its tokens.

  One problem of eight ends its step after two tokens; the others end theirs at the ring's end.
  """

  def end(self, b: int, full: bool) -> None:
    self._writing[b] = self._count[b] < (5 if self._stream[b] else 2)

  monkeypatch.setattr(StepWriter, "_end", end)
  monkeypatch.setattr(StepWriter, "_full", lambda self, rows: np.ones(len(rows), bool))
  s = step_writer.Settings(1, TEMPERATURE, LIMITS)
  writer = StepWriter(sampler(), 8, 8, s, max_step_tokens=5)
  writer.begin(0, [1, 2, 3], 0, [Lane(0, 0)])
  assert writer.write() == []
  for g in range(1, 8):
    writer.begin(g, [1, 2, 3], 0, [Lane(1, 0)])
  assert [writer.write() for _ in range(4)] == [[], [], [], [0]]


def test_blank_lines_separate_steps():
  """Paragraph steps may have several lines, and the scorer rates them like any other steps."""
  for i, found in run("beam", steps="paragraphs", max_step_tokens=24).items():
    for lane in found.lanes:
      assert [*lane.steps] == (prompts_lib.split(lane.text, "paragraphs") or [" "])
      whole = scorer().by_head([(PROMPTS[i].problem, lane.steps)])[0]
      np.testing.assert_allclose(np.array(lane.probabilities), whole, atol=1e-5)


@pytest.mark.parametrize("rule", ["beam", "lookahead"])
def test_a_solution_ends_at_its_first_stop_string(rule):
  """A text ends with the stop string, even if the lookahead writes beyond it."""
  letter = next(x.steps[-1] for x in run("beam")[3].lanes if x.end == "stop")[0]
  for found in run(rule, limits=Limits(24, (letter,))).values():
    for lane in found.lanes:
      assert letter not in lane.text[:-1]
      assert letter not in lane.text or len(lane.tokens) == len(lane.text)  # none after it
      assert lane.end == "stop" or letter not in lane.text


@pytest.mark.parametrize("rule", RULES)
def test_solutions_do_not_depend_on_the_other_problems(rule):
  """A problem gets the same solutions in a batch, in a reused context and in its own search."""
  for i, found in run(rule).items():
    alone = run(rule, prompts=PROMPTS[i : i + 1])[0]
    assert [lane.tokens for lane in found.lanes] == [lane.tokens for lane in alone.lanes]
    assert found.spent == alone.spent


def test_solutions_do_not_depend_on_the_number_of_contexts():
  """One problem at a time, each in its predecessor's context, gives the solutions of three."""
  alone = run("beam", contexts=1)
  for i, found in run("beam").items():
    assert [lane.tokens for lane in found.lanes] == [lane.tokens for lane in alone[i].lanes]
    assert found.spent == alone[i].spent


def test_best_of_n_gives_the_samples_of_the_sampler():
  """best_of_n gives the tokens and log-probabilities of the sampler for the same seeds."""
  searched = run("best_of_n", max_step_tokens=LIMITS.max_new_tokens)
  for each in sampler().generate(PROMPTS, 4, TEMPERATURE, LIMITS):
    (lane,) = [x for x in searched[each.prompt].lanes if x.stream == each.sample]
    assert lane.tokens == each.tokens
    np.testing.assert_allclose(lane.log_prob, sum(each.log_probs), atol=1e-4)
    assert (lane.end == "stop") == (each.end == "stop" and lane.steps != (" ",))


def test_the_reward_model_encodes_each_distinct_token_once():
  """The reward model encodes as many tokens as the solutions' prefix tree has."""
  for i, found in run("best_of_n").items():
    trees = [scorer().encode(PROMPTS[i].problem, lane.steps) for lane in found.lanes]
    assert found.spent["scored"] == len(prefix_tree.merge(trees)[0])
    assert found.spent["scored_from_start"] >= found.spent["scored"]


@pytest.mark.parametrize("rule", RULES)
def test_finished_solutions_come_first_best_first(rule):
  """A search lists finished solutions by descending score, then those cut off at max_steps."""
  for found in run(rule, max_steps=3).values():
    ends = [lane.end for lane in found.lanes]
    assert ends == sorted(ends, key=lambda end: end != "stop") and len(ends) <= 4
    scores = [lane.score for lane in found.lanes if lane.end == "stop"]
    assert scores == sorted(scores, reverse=True)
    assert all(len(lane.steps) <= 3 for lane in found.lanes)


PIECES = st.lists(
  st.lists(st.sampled_from(["a", "b", "cd"]), min_size=1, max_size=4), min_size=1, max_size=8
)


@pytest.mark.parametrize("kind", ["plain", "everything"])  # `everything` has a window of 5 tokens
@settings(max_examples=20, deadline=None)
@given(rounds=st.lists(PIECES, min_size=1, max_size=3), tree_tokens=st.sampled_from([4, 99]))
def test_cached_probabilities_equal_those_of_the_whole_solution(rounds, tree_tokens, kind):
  """The cache changes no probability, whichever prefixes of the solutions it kept before."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cached_scorer, "TREE_TOKENS", tree_tokens)
    reader = shared_reader(kind)
    reader.begin(1)
    for several in rounds:
      pairs = [("P", tuple(steps)) for steps in several]
      found = reader.probabilities({1: pairs})[1]
      for each, whole in zip(found, scorer(kind).by_head(pairs)):
        np.testing.assert_allclose(each, whole[-1], atol=1e-5)
      reader.keep({1: pairs[::2]})


def test_nan_of_the_reward_model_is_an_error():
  """A search does not choose among solutions whose probabilities are NaN."""
  broken = dataclasses.replace(
    scorer(), params=scorer().params | {"head": np.nan * scorer().params["head"]}
  )
  with pytest.raises(ValueError, match="the model gives NaN"):
    CachedScorer(broken, 1).probabilities({0: [("P", ("a",))]})


@functools.cache
def shared_reader(kind: str) -> CachedScorer:
  """Returns a cached scorer with two contexts, the same for all examples."""
  return CachedScorer(scorer(kind), 2)


def test_a_cached_scorer_is_freed_with_its_last_reference():
  """Its weights and cache leave the device at once, as an experiment makes one after the other."""
  reader = CachedScorer(scorer(), 1)
  assert reader.length("P", ("a",)) > 0
  freed = weakref.ref(reader)
  gc.disable()
  try:
    del reader
    assert freed() is None
  finally:
    gc.enable()


def test_a_growing_context_changes_no_probability():
  """Solutions with more tokens than a context's first places get their usual probabilities."""
  reader = CachedScorer(scorer(), 1)
  steps = tuple("abcdefgh" * 12 for _ in range(4))
  for count in range(1, len(steps) + 1):
    pairs = [("P", steps[:count]), ("P", (*steps[: count - 1], "x"))]
    found = reader.probabilities({0: pairs})[0]
    for each, whole in zip(found, dataclasses.replace(scorer(), row_length=512).by_head(pairs)):
      np.testing.assert_allclose(each, whole[-1], atol=1e-5)
    reader.keep({0: pairs[:1]})
  assert reader.places[0].size > 256


def test_a_published_readout_has_the_same_cached_probabilities(monkeypatch):
  """The cache changes no probability of a readout whose prefixes are branches of the token tree.

  Arrays have the sizes that they have for users.
  """
  monkeypatch.setattr(cached_scorer, "size", size)
  monkeypatch.setattr(cache_lib, "size", size)
  monkeypatch.setattr(cached_scorer, "power_of_two", power_of_two)
  joined = readouts.PUBLISHED["trl-joined"](tiny.TOKENIZER, "\n")
  published = dataclasses.replace(scorer(), readout=joined)
  reader = CachedScorer(published, 1)
  steps = ("ab", "c", "abc", "d")
  whole = published.by_head([("P", steps)])[0]
  for count in range(1, len(steps) + 1):
    (found,) = reader.probabilities({0: [("P", steps[:count])]})[0]
    np.testing.assert_allclose(found, whole[count - 1], atol=1e-5)
    reader.keep({0: [("P", steps[:count])]})


def test_an_outcome_model_cannot_guide_a_search():
  """An outcome model, which rates no steps, is refused as the guide of a search."""
  outcome = dataclasses.replace(scorer(), contract=tiny.contract("outcome"))
  with pytest.raises(ValueError, match="rates no steps"):
    CachedScorer(outcome, 1)


def test_a_step_that_the_reward_model_cannot_encode_ends_its_lane_alone(monkeypatch):
  """A lane whose step cannot be encoded is cut off, and the search goes on with the others."""
  every = [lane for found in run("best_of_n").values() for lane in found.lanes]
  letter = "".join(lane.text for lane in every).replace("\n", "")[0]
  encode = Scorer.encode

  def picky(self, problem, steps):
    if letter in steps[-1]:
      raise ValueError(f"no {letter}")
    return encode(self, problem, steps)

  monkeypatch.setattr(Scorer, "encode", picky)
  lanes = [lane for found in run.__wrapped__("best_of_n").values() for lane in found.lanes]
  assert any(letter in lane.text for lane in lanes)
  assert all(lane.end == "length" for lane in lanes if letter in lane.text)
  assert all(len(lane.probabilities) == len(lane.steps) for lane in lanes)


def test_a_problem_that_is_too_long_for_the_reward_model_is_named(monkeypatch):
  """If the reward model cannot read even a blank step of a problem, the user reads which it is."""
  monkeypatch.setattr(rater, "MAX_TOKENS", 20)
  s = Settings(4, TEMPERATURE, LIMITS, rule="best_of_n", max_step_tokens=8)
  engine = Search(sampler(), CachedScorer(scorer(), 3), s)
  problems = [{"problem": text} for text in test_sampler.PROBLEMS]
  journal = types.SimpleNamespace(done={}, add=lambda *_: None)
  with pytest.raises(ValueError, match=r"^problem 4, 'Add 1 to 7, .*at most 20 can be scored"):
    samples.search(problems, range(4), engine, prompts_lib.maker("plain", None), s, journal)


LANES = st.lists(
  st.tuples(st.sampled_from([0.1, 0.5, 0.9]), st.booleans(), st.integers(0, 2)),
  min_size=1,
  max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(lanes=LANES)
def test_each_rule_chooses_the_lanes_of_its_definition(lanes):
  """Each rule continues the unfinished lanes of its definition, in the number of copies."""
  scores, finished, trees = (np.array(x) for x in zip(*lanes))
  s = Settings(n=8, expansions=2)
  given = [Lane(0, tree, score=x, end="stop" if end else None) for x, end, tree in lanes]
  choose = lambda rule: [*search_lib.RULES[rule](given, s, np.random.default_rng(0))]
  going = [i for i in range(len(lanes)) if not finished[i]]
  assert choose("best_of_n") == going
  chosen = choose("beam")
  assert set(chosen) <= set(going) and len(chosen) == (8 if going else 0)
  assert len(set(chosen)) == min(4, len(going))
  left_out = [scores[i] for i in going if i not in chosen]
  assert all(scores[i] >= max(left_out, default=0) for i in chosen)
  counts = [chosen.count(i) for i in set(chosen)]
  assert not counts or max(counts) - min(counts) <= 1
  for tree in set(trees):
    members = [i for i in range(len(lanes)) if trees[i] == tree]
    best = max(members, key=lambda i: (scores[i], -i))
    mine = [i for i in choose("dvts") if trees[i] == tree]
    assert mine == ([] if finished[best] else [best, best])
  drawn = choose("particles")
  assert len(drawn) == (0 if finished.all() else 8)


@pytest.mark.parametrize("how", agg.REDUCTIONS)
def test_solution_scores_are_the_aggregators(how):
  """Each solution is reduced alone, however many there are; one without steps has the score 0.

  Long products keep their order, and NaN is not hidden.
  """
  right = [(0.9, 0.4, 0.7), (), (0.5,), (0.0, 1.0), (0.05,) * 40, (0.05,) * 39 + (0.9,)]
  with np.errstate(divide="ignore"):
    logs = [np.log(p, dtype=np.float32) for p in right]
  alone = [agg.reduce_steps(p, np.zeros(len(p), int), 1, how)[0] for p in logs]
  expected = [np.exp(np.float64(x)) if p else 0 for x, p in zip(alone, right)]
  scores = search_lib.solution_scores(right, how)
  np.testing.assert_allclose(scores, expected, rtol=1e-4)
  assert scores[5] >= scores[4] > 0
  assert np.isnan(search_lib.solution_scores([(0.5, math.nan)], how)[0])


def test_particles_are_drawn_by_their_odds():
  """The rule `particles` draws each lane in proportion to the odds of its score."""
  lanes = [Lane(0, 0, score=0.2), Lane(1, 0, score=0.5, end="stop"), Lane(2, 0, score=0.8)]
  rule, s = search_lib.RULES["particles"], Settings(100_000, rule="particles")
  drawn = rule(lanes, s, np.random.default_rng(0))
  share = np.bincount(drawn) / len(drawn)
  np.testing.assert_allclose(share, np.array([0.25, 1, 4]) / 5.25, atol=5e-3)


PATHS = st.lists(
  st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=5
)


@settings(max_examples=100, deadline=None)
@given(rounds=st.lists(PATHS, min_size=1, max_size=5))
def test_equal_prefixes_share_places_and_dropped_ones_free_theirs(rounds):
  """A place holds one prefix; kept prefixes keep their places, and dropped ones free theirs."""
  places, kept = Places(), []
  for paths in rounds:
    places.keep(kept)
    before = {tuple(path): places.find(path) for path in kept}
    prefix_of = {}
    for path in paths:
      for end, place in enumerate(places.add(path), 1):
        assert prefix_of.setdefault(place, path[:end]) == path[:end]
    assert all(places.find(path) == found for path, found in before.items())
    needed = {tuple(p[:i]) for p in [*paths, *kept] for i in range(1, len(p) + 1)}
    assert len({place for p in [*paths, *kept] for place in places.find(p)}) == len(needed)
    kept = paths
  distinct = [
    {tuple(p[:i]) for p in [*a, *b] for i in range(1, len(p) + 1)}
    for a, b in zip([[], *rounds], rounds)
  ]
  assert places.size <= max(map(len, distinct))


def test_n_must_be_a_multiple_of_expansions():
  """A beam search whose n is not a multiple of its expansions is an error with both values."""
  with pytest.raises(ValueError, match=r"n=6, settings\.expansions=4: expected n a multiple"):
    search_lib.Settings(n=6)


def test_a_letter_in_two_steps_is_whole():
  """If a token holds a line break and the first byte of a letter, the next step has the letter."""
  parts = [b"ab", b"\n\xe2", b"\x86\x92", b" c\n"]

  class Bytes(Lines):
    def decode(self, ids) -> str:
      return b"".join(parts[i] for i in ids).decode(errors="replace")

  engine = dataclasses.replace(sampler(), end_tokens=frozenset())
  settings = Settings(1, TEMPERATURE, LIMITS, rule="beam", expansions=1)
  writer = StepWriter(engine, 1, 16, settings, max_step_tokens=8)
  writer.sampler = dataclasses.replace(engine, tokenizer=Bytes())
  lane = Lane(0, 0)
  for part in ([0, 1], [2, 3]):
    lane = writer._grown(lane, step := step_writer._Step([part]))
    assert writer._ahead(lane, step) == lane.steps  # of which the reward model scores each
  assert (lane.text, lane.steps) == ("ab\n\u2192 c\n", ("ab", "\u2192 c"))
