"""A tokenizer, step trees and a model small enough for every test."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import signal
from collections.abc import Callable

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from prm_jax import config as config_lib
from prm_jax.input_pipeline import packing, token_tree
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import families, safetensors_files, weights
from prm_jax.training import checkpoint, initialization, loop
from prm_jax.training import step as step_lib
from prm_jax.types import CLASSES, Batch, StepContract, StepTree

MODEL = config_lib.Model(
  width=16, layers=2, heads=4, kv_heads=2, head_size=4, mlp_width=24, embedding_std=1.0
)


class Bytes:
  """UTF-8 bytes as tokens: byte b is b + 2; id 1 starts a sequence, 257 ends it."""

  vocab_size = 258
  bos_id = 1
  eos_id = 257
  hash = "bytes"

  def encode(self, text: str, special: bool = False) -> list[int]:
    return [b + 2 for b in text.encode()]

  def decode(self, ids) -> str:
    return bytes(i - 2 for i in ids if 2 <= i < 257).decode()


TOKENIZER = Bytes()


def contract(objective: str = "process") -> StepContract:
  return token_tree.step_contract(TOKENIZER, "\n", objective, "paper")


@st.composite
def step_trees(draw, max_steps: int = 6) -> StepTree:
  """Random trees in preorder, some steps without a label."""
  count = draw(st.integers(1, max_steps))
  parents, path = [], [-1]
  for i in range(count):
    at = draw(st.integers(0, len(path) - 1))
    parents.append(path[at])
    path = path[: at + 1] + [i]
  text = st.text("abc", min_size=1, max_size=3)
  labels = draw(st.lists(st.sampled_from([-1, 0, 1, None]), min_size=count, max_size=count))
  labels[draw(st.integers(0, count - 1))] = 1  # at least one
  problem, steps = draw(text), tuple(draw(text) for _ in range(count))
  return StepTree(problem, steps, tuple(parents), tuple(labels), draw(st.booleans()))


def flatten(tree: StepTree) -> list[StepTree]:
  """Each labelled step alone, at the end of its own chain: what a tree must be equal to."""
  chains = []
  for i, label in enumerate(tree.labels):
    if label is None:
      continue
    path = [i]
    while tree.parents[path[0]] >= 0:
      path.insert(0, tree.parents[path[0]])
    steps, labels = tuple(tree.steps[j] for j in path), (None,) * (len(path) - 1) + (label,)
    parents = tuple(range(-1, len(path) - 1))
    chains.append(dataclasses.replace(tree, steps=steps, parents=parents, labels=labels))
  return chains


def experiment(directory: pathlib.Path, **loss) -> config_lib.Experiment:
  """A run of a few steps on the data of the fixture `arithmetic_data`, with these loss settings."""
  tokenizer = str(directory / "tokenizer.model")
  data = config_lib.Data(str(directory), tokenizer, separator="\n", row_length=128)
  train = config_lib.Train(
    steps=8, batch_rows=8, log_every=2, eval_every=4, eval_rows=8, save_every=3
  )
  optim = config_lib.Optim(learning_rate=3e-3, warmup_steps=2)
  loss = config_lib.Loss(**loss)
  return config_lib.Experiment(data=data, model=MODEL, loss=loss, optim=optim, train=train)


@functools.cache
def model(seed: int = 0, num_classes: int = 3):
  """(graph, parameters) with a head that is not zero."""
  sizes = {"vocab_size": TOKENIZER.vocab_size, "num_classes": num_classes}
  init = jax.jit(functools.partial(step_lib.init_params, config=MODEL, **sizes))
  key = jax.random.key(seed)
  params = init(key)
  params["head"] = jax.random.normal(key, params["head"].shape)
  return step_lib.graph(MODEL, *sizes.values()), params


def merged(seed: int = 0):
  return nnx.merge(*model(seed))


def abstract_mesh(c: config_lib.Mesh, chips: int) -> jax.sharding.AbstractMesh:
  """The mesh that these chips would form, without the chips."""
  sizes, axes = sharding_lib.axis_sizes(c, chips), sharding_lib.AXES
  auto = jax.sharding.AxisType.Auto
  return jax.sharding.AbstractMesh(sizes, axes, axis_types=(auto,) * len(axes))


def described(c: config_lib.Experiment, vocab_size: int, chips: int) -> step_lib.TrainState:
  """The training state of a resolved experiment, as shapes sharded over chips."""
  mesh = abstract_mesh(c.mesh, chips)
  params = decoder.abstract_params(c.model, vocab_size, len(CLASSES[c.loss.objective]), mesh)
  optimizer = step_lib.make_optimizer(c.optim, c.train.steps)
  return step_lib.abstract_state(params, optimizer=optimizer, loss=c.loss, optim=c.optim)


def change(experiment: config_lib.Experiment, section: str, **values) -> config_lib.Experiment:
  """The experiment with some fields of a section changed."""
  changed = dataclasses.replace(getattr(experiment, section), **values)
  return dataclasses.replace(experiment, **{section: changed})


def untrained(experiment: config_lib.Experiment, workdir: pathlib.Path) -> pathlib.Path:
  """The work directory of a run without updates: random weights, also of the head, at step 8."""
  rows = loop.read_rows(experiment)
  about, on = rows.metadata, sharding_lib.make_mesh(config_lib.Mesh(), jax.devices()[:1])
  made = step_lib.make(about.config, about.vocab_size, len(about.contract.classes), on)
  with jax.set_mesh(on):
    state = made.init(jax.random.key(0))
    head = 0.3 * jax.random.normal(jax.random.key(1), state.params["head"].shape)
    params, step = state.params | {"head": head}, jax.numpy.int32(8)
    state = dataclasses.replace(state, params=params, step=step)
    workdir.mkdir()
    rows.tokenizer.save(workdir)
    with contextlib.closing(checkpoint.Checkpointer(workdir, experiment.train)) as checkpointer:
      checkpointer.save(state, about)
      checkpointer.finish()
  return workdir


@contextlib.contextmanager
def first_device():
  """Runs in the block take one of the eight CPU devices, which compiles faster."""
  make = sharding_lib.make_mesh
  alone = lambda c, devices=None: make(c, (devices or jax.devices())[:1])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding_lib, "make_mesh", alone)
    yield


def terminate() -> None:
  """Sends this process SIGTERM."""
  os.kill(os.getpid(), signal.SIGTERM)


def kill() -> None:
  """Ends a run where it stands."""
  raise KeyboardInterrupt


@contextlib.contextmanager
def after_record(step: int, act: Callable[[], None], split: str = ""):
  """Runs in the block call `act` after each record of this step, or of one of its splits."""
  write = loop.Log.write

  def writing(self, at, name, values):
    write(self, at, name, values)
    if at == step and split in ("", name):
      act()

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.Log, "write", writing)
    yield


def final_state(workdir: pathlib.Path) -> step_lib.TrainState:
  """The state in a run's newest checkpoint, as numpy arrays."""
  step, metadata = checkpoint.latest(workdir)
  with contextlib.closing(checkpoint.Checkpointer(workdir)) as checkpointer:
    shape = (metadata.vocab_size, len(metadata.contract.classes))
    made = step_lib.make(metadata.config, *shape, sharding_lib.make_mesh(config_lib.Mesh()))
    return jax.tree.map(np.asarray, checkpointer.restore(step, made.abstract))


def assert_same_run(one, other) -> None:
  """Asserts that two runs end in the same state, bit for bit, and have the same records."""
  jax.tree.map(np.testing.assert_array_equal, final_state(one), final_state(other))
  assert records(one) == records(other)


def public(
  directory, vocab_size, tokenizer: pathlib.Path, model=MODEL, family="llama", head=False, seed=0
):
  """Writes the tiny model in the hub's format, with its class head or without; its parameters."""
  init = functools.partial(step_lib.init_params, config=model, vocab_size=vocab_size, num_classes=3)
  abstract = jax.eval_shape(init, jax.random.key(0))
  rng = np.random.default_rng(seed)
  params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), abstract)
  directory.mkdir()
  stored = {name: x for name, x in params.items() if head or not name.startswith("head")}
  safetensors_files.write_directory(directory, weights.unload(stored, model))
  (directory / "config.json").write_text(json.dumps(families.write(model, vocab_size, family)))
  shutil.copyfile(tokenizer, directory / f"tokenizer{tokenizer.suffix}")
  return params


def classes(tree: token_tree.TokenTree) -> list[int]:
  """The class of each target of a tree with hard labels."""
  assert np.all(np.sort(tree.read_targets) == [0] * (tree.read_targets.shape[1] - 1) + [1])
  return tree.read_targets.argmax(-1).tolist()


def public_params(experiment: config_lib.Experiment):
  """(metadata, parameters) of a new run that starts from `init.checkpoint`."""
  rows, on = loop.read_rows(experiment), sharding_lib.make_mesh(config_lib.Mesh())
  about = rows.metadata
  made = step_lib.make(about.config, about.vocab_size, len(about.contract.classes), on)
  with jax.set_mesh(on):
    params = initialization.public_params(
      about.config, about.contract, rows.tokenizer, made.abstract.params
    )
  return about, params


def batch(rows: int = 8, row_length: int = 64) -> Batch:
  """Random labelled solutions, one to a row."""
  rng = np.random.default_rng(0)
  packed = []
  for i in range(rows):
    labels = tuple(int(r) for r in rng.integers(-1, 2, i % 3 + 1))
    steps = tuple("abc"[: r + 2] for r in labels)
    tree = StepTree("p" * (i + 1), steps, tuple(range(-1, len(steps) - 1)), labels)
    encoded = token_tree.encode(tree, TOKENIZER, contract())
    packed.append(packing.PackedRows([encoded], row_length, round_reads_to=4)[0])
  return Batch(**{k: np.stack([row[k] for row in packed]) for k in packed[0]})


def flip(path: pathlib.Path) -> None:
  """Changes one bit in the middle of a file."""
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def records(workdir) -> list[dict]:
  """The lines of a run's metrics.jsonl, without times and the goodput lines."""
  times = {"tokens_per_second", "step_seconds", "data_wait_seconds"}
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  kept = [line for line in lines if line["split"] != "goodput"]
  return [{k: v for k, v in line.items() if k not in times} for line in kept]
