"""Searches: caches hold what whole forward passes give, and rules choose as they say."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import test_sampler
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax import aggregation as agg
from prm_jax import config as config_lib
from prm_jax.generation import cached_scorer, selection, step_writer
from prm_jax.generation import places as places_lib
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
from prm_jax.scoring import readouts
from prm_jax.scoring.scorer import Scorer

PROMPTS = tuple(Prompt("", text, "\n", i) for i, text in enumerate(test_sampler.PROBLEMS))
LIMITS, TEMPERATURE = Limits(max_new_tokens=24), Sampling(20.0)
RULES = [*selection.RULES]


@pytest.fixture(scope="module", autouse=True)
def few_shapes():
  """Sizes are rounded up further than for users, as every shape is traced and compiled.

  A context still grows, from the 64 places of a prompt.
  """
  coarse = lambda count, least: size(count, 16 if least == 1 else 128)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cached_scorer, "size", coarse)  # of blocks and of their pasts
    patch.setattr(step_writer, "size", coarse)  # of contexts
    patch.setattr(places_lib, "size", coarse)  # of what is kept
    patch.setattr(cached_scorer, "power_of_two", lambda count: max(power_of_two(count), 4))
    yield


@functools.cache
def scorer(kind: str = "plain") -> Scorer:
  config, _, params = test_sampler.params(kind, seed=3)
  head = jax.random.normal(jax.random.key(3), params["head"].shape)  # at first it is zero
  contract, params = tiny.contract(), params | {"head": head}
  readout = readouts.trained(tiny.TOKENIZER, contract)
  mesh = sharding_lib.make_mesh(config_lib.Mesh(), jax.devices()[:1])
  facts = (config, tiny.TOKENIZER.vocab_size, params, mesh)
  return Scorer(contract, test_sampler.Letters(), readout, *facts, row_length=128)


class Lines(test_sampler.Letters):
  """A quarter of the tokens are line breaks, so that a random model writes steps."""

  def decode(self, ids) -> str:
    return "".join("\n" if i % 4 == 0 else chr(97 + i % 26) for i in ids)


@functools.cache
def sampler(kind: str = "plain") -> Sampler:
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
  settings = {"rule": rule, "n": 4, "expansions": 2, "reduction": "last", "lookahead": 2}
  s = Settings(**settings | changed)
  writing = step_writer.Settings(TEMPERATURE, limits, max_step_tokens, s.steps_ahead, steps=steps)
  engine = Search(sampler(kind), CachedScorer(scorer(guide), contexts), s, writing)
  found = {each.prompt: each for each in engine.run(prompts)}
  assert sorted(found) == [*range(len(prompts))]
  return found


@pytest.mark.parametrize(
  ("rule", "guide"), [*((rule, "plain") for rule in RULES), ("beam", "everything")]
)
def test_probabilities_are_those_of_the_whole_solution(rule, guide):
  """What a search records of each step is what the scorer gives the solution at its end."""
  for i, found in run(rule, guide=guide).items():
    for lane in found.lanes:
      whole = scorer(guide).by_head([(PROMPTS[i].problem, lane.steps)])[0]
      np.testing.assert_allclose(np.array(lane.probabilities), whole, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "everything"])
@pytest.mark.parametrize("rule", ["beam", "lookahead", "particles"])
def test_log_probabilities_are_those_of_the_whole_sequence(rule, kind):
  """Through every selection and copy; `everything` has a window that ends within the context."""
  for i, found in run(rule, kind=kind).items():
    for lane in found.lanes:
      expected = test_sampler.log_probs(kind, PROMPTS[i].text, lane.tokens).sum()
      np.testing.assert_allclose(lane.log_prob, expected, rtol=0, atol=1e-3)


def test_steps_that_wait_in_the_ring_are_read_before_it_goes_round(monkeypatch):
  """One problem of eight has its step after two tokens, the others, a token later, after five."""

  def end(self, b: int, full: bool) -> None:
    self._writing[b] = self._count[b] < (5 if self._stream[b] else 2)

  monkeypatch.setattr(StepWriter, "_end", end)
  monkeypatch.setattr(StepWriter, "_full", lambda self, rows: np.ones(len(rows), bool))
  s = step_writer.Settings(TEMPERATURE, LIMITS, max_step_tokens=5)
  writer = StepWriter(sampler(), 8, 1, 8, s)
  writer.begin(0, [1, 2, 3], 0, [Lane(0, 0)])
  assert writer.write() == []
  for g in range(1, 8):
    writer.begin(g, [1, 2, 3], 0, [Lane(1, 0)])
  assert [writer.write() for _ in range(4)] == [[], [], [], [0]]


def test_blank_lines_part_steps_and_stop_strings_end_them():
  """Steps of several lines; the text ends with the stop string, also where that is ahead."""
  for i, found in run("beam", steps="paragraphs", max_step_tokens=24).items():
    for lane in found.lanes:
      assert [*lane.steps] == (prompts_lib.split(lane.text, "paragraphs") or [" "])
      whole = scorer().by_head([(PROMPTS[i].problem, lane.steps)])[0]
      np.testing.assert_allclose(np.array(lane.probabilities), whole, atol=1e-5)
  letter = next(x.steps[-1] for x in run("beam")[3].lanes if x.end == "stop")[0]
  for rule in ("beam", "lookahead"):
    for found in run(rule, limits=Limits(24, (letter,))).values():
      for lane in found.lanes:
        assert letter not in lane.text[:-1]
        assert letter not in lane.text or len(lane.tokens) == len(lane.text)  # none behind it
        assert lane.end == "stop" or letter not in lane.text


@pytest.mark.parametrize("rule", RULES)
def test_a_problem_does_not_depend_on_those_beside_it(rule):
  """Three at a time, of which one is followed by a fourth; and each in a search of its own."""
  for i, found in run(rule).items():
    alone = run(rule, prompts=PROMPTS[i : i + 1])[0]
    assert [lane.tokens for lane in found.lanes] == [lane.tokens for lane in alone.lanes]
    assert found.spent == alone.spent


def test_a_problem_does_not_depend_on_the_number_of_contexts():
  """One problem at a time, all with the context of the one before, and three."""
  alone = run("beam", contexts=1)
  for i, found in run("beam").items():
    assert [lane.tokens for lane in found.lanes] == [lane.tokens for lane in alone[i].lanes]
    assert found.spent == alone[i].spent


def test_without_a_choice_a_search_gives_what_the_sampler_gives():
  """best_of_n: the same texts and log-probabilities, for the same seeds."""
  searched = run("best_of_n", max_step_tokens=LIMITS.max_new_tokens)
  for each in sampler().generate(PROMPTS, 4, TEMPERATURE, LIMITS):
    (lane,) = [x for x in searched[each.prompt].lanes if x.stream == each.sample]
    assert lane.tokens == each.tokens
    np.testing.assert_allclose(lane.log_prob, sum(each.log_probs), atol=1e-4)
    assert (lane.end == "stop") == (each.end == "stop" and lane.steps != (" ",))


def test_each_distinct_token_is_encoded_once():
  """The reward model reads as many tokens as the solutions' prefix tree has."""
  for i, found in run("best_of_n").items():
    trees = [scorer().encode(PROMPTS[i].problem, lane.steps) for lane in found.lanes]
    assert found.spent["scored"] == len(prefix_tree.merge(trees)[0])
    assert found.spent["scored_from_start"] >= found.spent["scored"]


def test_unfinished_solutions_come_last_and_finished_ones_best_first():
  for rule in RULES:
    for found in run(rule, max_steps=3).values():
      ends = [lane.end for lane in found.lanes]
      assert ends == sorted(ends, key=lambda end: end != "stop") and len(ends) <= 4
      scores = [lane.score for lane in found.lanes if lane.end == "stop"]
      assert scores == sorted(scores, reverse=True)
      assert all(len(lane.steps) <= 3 for lane in found.lanes)


PIECES = st.lists(
  st.lists(st.sampled_from(["a", "b", "cd"]), min_size=1, max_size=4), min_size=1, max_size=8
)


@pytest.mark.parametrize("kind", ["plain", "everything"])  # the latter with a window of 5 tokens
@settings(max_examples=20, deadline=None)
@given(rounds=st.lists(PIECES, min_size=1, max_size=3), tree_tokens=st.sampled_from([4, 99]))
def test_whatever_is_kept_probabilities_are_those_of_the_whole_solution(rounds, tree_tokens, kind):
  """Solutions that begin others, equal ones, ones that were kept before, in trees of any size."""
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


@functools.cache
def shared_reader(kind: str) -> CachedScorer:
  return CachedScorer(scorer(kind), 2)


def test_a_context_grows():
  """More tokens than its first places."""
  reader = CachedScorer(scorer(), 1)
  steps = tuple("abcdefgh" * 12 for _ in range(4))
  for count in range(1, len(steps) + 1):
    pairs = [("P", steps[:count]), ("P", (*steps[: count - 1], "x"))]
    found = reader.probabilities({0: pairs})[0]
    for each, whole in zip(found, dataclasses.replace(scorer(), row_length=512).by_head(pairs)):
      np.testing.assert_allclose(each, whole[-1], atol=1e-5)
    reader.keep({0: pairs[:1]})
  assert reader.places[0].size > 256


def test_a_published_readout_is_read_alike(monkeypatch):
  """Also where a prefix is encoded otherwise than in the whole, so that reads are on branches.

  Arrays have the sizes that they have for users.
  """
  monkeypatch.setattr(cached_scorer, "size", size)
  monkeypatch.setattr(places_lib, "size", size)
  monkeypatch.setattr(cached_scorer, "power_of_two", power_of_two)
  joined = readouts.PUBLISHED["trl-joined"](tiny.TOKENIZER, {}, "\n")
  published = dataclasses.replace(scorer(), readout=joined)
  reader = CachedScorer(published, 1)
  steps = ("ab", "c", "abc", "d")
  whole = published.by_head([("P", steps)])[0]
  for count in range(1, len(steps) + 1):
    (found,) = reader.probabilities({0: [("P", steps[:count])]})[0]
    np.testing.assert_allclose(found, whole[count - 1], atol=1e-5)
    reader.keep({0: [("P", steps[:count])]})


def test_an_outcome_model_guides_no_search():
  outcome = dataclasses.replace(scorer(), contract=tiny.contract("outcome"))
  with pytest.raises(ValueError, match="rates no steps"):
    CachedScorer(outcome, 1)


def test_a_step_that_the_reward_model_cannot_read_cuts_its_lane_off(monkeypatch):
  """One lane does not end the run."""
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


LANES = st.lists(
  st.tuples(st.sampled_from([0.1, 0.5, 0.9]), st.booleans(), st.integers(0, 2)),
  min_size=1,
  max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(lanes=LANES)
def test_rules_choose_as_they_say(lanes):
  """Against a slow statement: who goes on, how often; and that finished lanes do not."""
  scores, finished, trees = (np.array(x) for x in zip(*lanes))
  s = selection.Scored(scores, finished, trees)
  choose = lambda rule: [*selection.RULES[rule](s, 8, 2, np.random.default_rng(0))]
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
def test_a_search_scores_as_the_aggregator_does(how):
  """Every reduction that generate.py accepts is known to a search, with the same value."""
  right = np.array([0.9, 0.4, 0.7])
  expected = np.exp(agg.reduce_steps(np.log(right), np.zeros(3, int), 1, how)[0])
  np.testing.assert_allclose(search_lib.REDUCTIONS[how](right), expected, rtol=1e-6)


def test_particles_are_drawn_by_their_odds():
  s = selection.Scored(np.array([0.2, 0.5, 0.8]), np.array([False, True, False]), np.zeros(3, int))
  drawn = selection.particles(s, 100_000, 1, np.random.default_rng(0))
  share = np.bincount(drawn) / len(drawn)
  np.testing.assert_allclose(share, np.array([0.25, 1, 4]) / 5.25, atol=5e-3)


PATHS = st.lists(
  st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=5
)


@settings(max_examples=100, deadline=None)
@given(rounds=st.lists(PATHS, min_size=1, max_size=5))
def test_places_are_shared_by_what_begins_alike_and_freed(rounds):
  """A place belongs to one prefix; what is kept keeps its place; others are used again."""
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


def test_settings_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match=r"n=6, settings\.expansions=4: expected n a multiple"):
    search_lib.Settings("beam", n=6)
