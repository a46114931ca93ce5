"""Training targets: soft labels, counts, class weights, and the heads of an ensemble."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from prm_jax import config as config_lib
from prm_jax import step_metrics
from prm_jax.input_pipeline import packing, token_tree
from prm_jax.pretrained import export
from prm_jax.runtime import exits
from prm_jax.scoring import candidates
from prm_jax.scoring.scorer import Scorer
from prm_jax.training import loop
from prm_jax.training import loss as loss_lib
from prm_jax.training import step as step_lib
from prm_jax.types import TWO_CLASSES, StepTree

TWO = token_tree.step_contract(tiny.TOKENIZER, "\n", "process", "stepwise", "none", TWO_CLASSES)


def chain(labels, problem="pp") -> StepTree:
  steps = tuple("abcd"[i] * (i + 1) for i in range(len(labels)))
  return StepTree(problem, steps, tuple(range(-1, len(labels) - 1)), tuple(labels))


def batch_of(*trees):
  """A batch with one row for each tree, padded to six rows so that one shape compiles."""
  encode = lambda i, tree: token_tree.encode(tree, tiny.TOKENIZER, TWO, number=i)
  rows = [packing.PackedRows([encode(i, x)], 48, round_reads_to=8) for i, x in enumerate(trees)]
  return packing.stack([row[0] for row in rows] + [rows[0][packing.EMPTY]] * (6 - len(rows)))


@functools.cache
def model(heads: int = 1):
  """A model whose heads are not zero."""
  sizes = {"vocab_size": tiny.TOKENIZER.vocab_size, "num_classes": 2, "heads": heads}
  init = functools.partial(step_lib.init_params, config=tiny.MODEL, head_std=1.0, **sizes)
  return step_lib.graph(tiny.MODEL, *sizes.values()), jax.jit(init)(jax.random.key(3))


read_log_probs = jax.jit(step_lib.read_log_probs, static_argnames="graphdef")


def log_probs(batch, heads=1):
  """Float64 class log-probabilities `[B, R, K, C]`."""
  graph, params = model(heads)
  return np.asarray(read_log_probs(params, batch, graphdef=graph), np.float64)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def loss_and_others(params, batch, config, graph, seed):
  sums = loss_lib.sums(nnx.merge(graph, params), batch, config, seed)
  return loss_lib.means(sums, loss_lib.weights(batch, config))


def loss_of(batch, config, heads=1, seed=0, metric="loss") -> float:
  """The training loss of a batch, or another metric."""
  graph, params = model(heads)
  return float(loss_and_others(params, batch, config, graph, seed)[metric])


def test_a_soft_label_has_the_soft_cross_entropy():
  """The loss is the mean of -p log q - (1 - p) log(1 - q) over soft labels p."""
  labels = [(0.75, 0.25), (1.0, 0.0), (0.1, 0.9)]
  batch = batch_of(chain(labels))
  found = log_probs(batch)[0, :3, 0]
  expected = -np.mean([w * wrong + r * right for (w, r), (wrong, right) in zip(labels, found)])
  assert loss_of(batch, config_lib.Loss()) == pytest.approx(expected, rel=1e-5)


def test_counts_are_a_binomial_likelihood():
  """Counts weigh as so many hard labels: (3, 1) as three wrong labels and a right one."""
  counts = batch_of(chain([(3, 1), (0, 4)]))
  repeated = [chain(x) for x in ([-1, 1], [-1, 1], [-1, 1], [1, 1])]
  config = config_lib.Loss()
  assert loss_of(counts, config) == pytest.approx(loss_of(batch_of(*repeated), config), rel=1e-5)


def test_training_and_evaluation_agree_on_the_accuracy():
  """Both take the last of classes with equal weights, such as two right rollouts of four."""
  targets = [(2, 2), (2, 2), (1, 1), (3, 1)]
  batch = batch_of(chain(targets))
  probabilities = np.exp(log_probs(batch)[0, : len(targets), 0])
  evaluated = step_metrics.step_metrics(probabilities, targets, (-1, 1))["accuracy"]
  assert loss_of(batch, config_lib.Loss(), metric="accuracy") == evaluated


def test_class_weights_give_a_weighted_mean():
  """With class weights the loss is a weighted mean, as torch's CrossEntropyLoss(weight=...).

  Weights of another number of classes are an error.
  """
  batch = batch_of(chain([-1, 1, 1]))
  found = log_probs(batch)[0, :3, 0]
  expected = -(5 * found[0, 0] + 0.5 * (found[1, 1] + found[2, 1])) / 6
  config = config_lib.Loss(class_weights=(5, 0.5))
  assert loss_of(batch, config) == pytest.approx(expected, rel=1e-5)
  with pytest.raises(ValueError, match=r"class_weights=\(1\.0, 2\.0\): expected .* 3 classes"):
    weighted = config_lib.Experiment(loss=config_lib.Loss(class_weights=(1, 2)))
    step_lib.make(weighted, 256, 3, jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor")))


bootstrap_weights = jax.jit(loss_lib.bootstrap_weights, static_argnames="config")


def test_each_head_has_its_own_sample_of_the_solutions():
  """Each head's loss weights every solution by a Poisson(1) draw of seed, solution and head.

  A draw is the same for all steps of a solution and in any batch.
  """
  trees = [chain([1, -1, 1][: i % 3 + 1], "p" * (i + 1)) for i in range(6)]
  batch, config = batch_of(*trees), config_lib.Loss(heads=3)
  weights = np.asarray(bootstrap_weights(batch, config, seed=1))
  assert weights.shape[2] == 3
  labelled = np.asarray(batch.read_targets).sum(-1) > 0
  assert all(len(np.unique(w[kept], axis=0)) == 1 for w, kept in zip(weights, labelled))
  found = log_probs(batch, heads=3)
  each = -np.einsum("brc,brkc->brk", batch.read_targets, found)
  expected = (each * weights).sum() / 3 / labelled.sum()
  assert loss_of(batch, config, heads=3, seed=1) == pytest.approx(expected, rel=1e-5)
  reordered = dataclasses.replace(batch, read_solutions=batch.read_solutions[::-1])
  again = np.asarray(bootstrap_weights(reordered, config, seed=1))
  np.testing.assert_array_equal(again[:, 0], weights[::-1, 0])
  many = dataclasses.replace(batch, read_solutions=np.arange(4_000).reshape(1, -1))
  draws = np.asarray(bootstrap_weights(many, config_lib.Loss(heads=8), 0)).ravel()
  assert draws.mean() == pytest.approx(1, abs=0.02) and draws.var() == pytest.approx(1, abs=0.04)
  other = np.asarray(bootstrap_weights(many, config_lib.Loss(heads=8), 1)).ravel()
  assert np.mean(draws == other) < 0.5


def test_several_heads_start_at_random():
  """One head starts at zeros and several at random, for which zeros are refused."""
  with_heads = lambda heads: config_lib.Experiment(loss=config_lib.Loss(heads=heads))
  assert [step_lib.initial_head(with_heads(heads)) for heads in (1, 4)] == ["zeros", "random"]
  with pytest.raises(ValueError, match=r"loss\.heads=4, init\.head='zeros'"):
    config_lib.Experiment(init=config_lib.Init(head="zeros"), loss=config_lib.Loss(heads=4))


def test_metrics_count_weighted_labels_as_so_many_labels():
  """Metrics of class weights `[n, C]` equal those of one label for each unit of weight."""
  rng = np.random.default_rng(0)
  probs, counts = rng.dirichlet(np.ones(2), 40), rng.integers(0, 4, (40, 2))
  counts[:, 1] += counts.sum(1) == 0
  rows, labels = [], []
  for p, (wrong, right) in zip(probs, counts):
    rows += [p] * (wrong + right)
    labels += [-1] * wrong + [1] * right
  weighted = step_metrics.step_metrics(probs, counts, (-1, 1))
  repeated = step_metrics.step_metrics(rows, labels, (-1, 1))
  assert weighted["nll"] == pytest.approx(repeated["nll"])
  assert weighted["ece"] == pytest.approx(repeated["ece"])
  assert weighted["count"] == 40


@pytest.fixture(scope="module")
def ensemble(arithmetic_data, tmp_path_factory):
  """(experiment, work directory, metrics) of a run of three heads on PRM800K's classes."""
  with tiny.first_device():
    run = tmp_path_factory.mktemp("ensemble")
    experiment = tiny.experiment(arithmetic_data, heads=3)
    return experiment, run, loop.run(experiment, run)


def test_an_ensemble_trains_scores_and_exports(ensemble, one_device, tmp_path):
  """Scored lines have the mean and deviation over an ensemble's heads, and an export keeps them."""
  _, run, metrics = ensemble
  scorer = Scorer.load(run)
  assert scorer.contract.heads == 3 and metrics["count"] > 0
  solution = ("1 + 2", ("3", "so 3"))
  (heads,) = scorer.by_head([solution])
  assert heads.shape == (2, 3, 3)
  assert np.abs(heads - heads.mean(1, keepdims=True)).max() > 1e-4
  record = candidates.scored({"problem": solution[0]}, solution[1], heads, scorer.contract)
  right = heads[..., 1:].sum(-1) / heads.sum(-1)
  np.testing.assert_allclose(record["step_std"], right.std(1))
  assert record["prm_score"] == pytest.approx(right.mean(1).prod())
  assert record["prm_score_std"] == pytest.approx(right.prod(0).std())
  files = {"tokenizer.model": (run / "tokenizer.model").read_bytes()}
  config = dataclasses.replace(scorer.config, tied_embeddings=True)
  export.write(
    tmp_path / "out",
    scorer.params,
    config,
    scorer.vocab_size,
    contract=scorer.contract,
    files=files,
  )
  (exported,) = Scorer.load_model(tmp_path / "out").by_head([solution])
  np.testing.assert_allclose(exported, heads, rtol=1e-5)


@pytest.mark.slow
def test_an_ensemble_resumes_bit_for_bit(ensemble, one_device, tmp_path):
  """A resumed run of an ensemble ends in the state of an uninterrupted one."""
  experiment, run, _ = ensemble
  with tiny.after_record(4, tiny.terminate), pytest.raises(exits.Preempted):
    loop.run(experiment, tmp_path)
  loop.run(experiment, tmp_path)
  tiny.assert_same_run(run, tmp_path)
