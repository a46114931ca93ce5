"""README.md of an export: its facts, the escaping of text from files, its code."""

import dataclasses
import json
import re
import runpy

import jax
import numpy as np
import pytest
import tiny
import yaml
from conftest import ROOT, call_script

from prm_jax import config as config_lib
from prm_jax.input_pipeline import token_tree, tokenizers
from prm_jax.pretrained import export, model_card, snippets
from prm_jax.runtime import exits
from prm_jax.scoring import language_model
from prm_jax.scoring.scorer import Scorer
from prm_jax.training import loop
from prm_jax.training import step as step_lib

HOSTILE = "x`|<script>alert(1)</script>\n---\nlicense: mit\n[a](http://b) " + "y" * 5000
KINDS = {  # objective and heads; None: a language model
  "process": ("process", 1),
  "ensemble": ("process", 3),
  "outcome": ("outcome", 1),
  "causal-lm": None,
}


def facts(**changes) -> model_card.Facts:
  """Returns the facts of a classifier without a base, with some of them changed."""
  values = {"name": "out", "kind": "token-classification", "step": 7, "bos_id": 1, "bases": ()}
  values |= {"config": config_lib.Experiment(), "contract": tiny.contract()}
  return model_card.Facts(**values | changes)


def front_matter(card: str) -> dict:
  """Returns the values of a card's front matter."""
  return yaml.safe_load(card.split("---\n")[1])


def code(card: str, library: str) -> str:
  """Returns the code of a card for a library."""
  return re.search(
    rf"With {library} \(`pip install [^`]*`\):\n\n```python\n(.*?)```", card, re.DOTALL
  )[1]


def test_name_and_licence_of_a_base_model_are_read(tmp_path):
  """The licence is that of the base model's card, else of provenance.json, else of LICENSE."""
  base = tmp_path / "some-model"
  assert model_card.base_model(base) == model_card.BaseModel("some-model")
  base.mkdir()
  (base / "LICENSE").write_text("   Apache License\n   Version 2.0, January 2004\n")
  (base / "config.json").write_text('{"_name_or_path": "owner/parent"}')  # of the base's own base
  assert model_card.base_model(base) == model_card.BaseModel("some-model", "apache-2.0", "LICENSE")
  (base / "provenance.json").write_text('{"model": "owner/name", "license": "gemma"}')
  assert model_card.base_model(base) == model_card.BaseModel("owner/name", "gemma", "its source")
  (base / "README.md").write_text("---\nlicense: 'MIT'\ntags: [a]\n---\n# x\n")
  assert model_card.base_model(base) == model_card.BaseModel("owner/name", "mit", "README.md")


@pytest.mark.parametrize(
  "text", ["---\nlicense: a b<c>\n---\n", "license: mit\n", "\xff---\n", "["]
)
def test_invalid_files_of_a_base_model_are_ignored(tmp_path, text):
  """Files that are no JSON, and licences that are no identifiers, leave the licence unknown."""
  for name in ("README.md", "provenance.json", "config.json"):
    (tmp_path / name).write_bytes(text.encode("latin-1"))
  (tmp_path / "provenance.json").write_text(json.dumps({"model": HOSTILE, "license": [1]}))
  assert model_card.base_model(tmp_path) == model_card.BaseModel(tmp_path.name)


def test_a_card_names_its_base_models():
  """The card names every model from which a run started; its front matter has id and licence."""
  bases = [model_card.BaseModel("text_run"), model_card.BaseModel("a/b", "gemma", "LICENSE")]
  card = model_card.write(facts(bases=bases, dataset="prm800k"))
  values = front_matter(card)
  assert (values["license"], values["base_model"]) == ("gemma", "a/b")
  assert values["pipeline_tag"] == "token-classification"
  assert "It started from text\\_run.\ntext\\_run started from a/b." in card
  assert "Cite the method and PRM800K as below, and the base model as its authors ask.\n" in card
  assert "Cite the method as below.\n" in model_card.write(facts(dataset="stepwise"))
  unknown = model_card.write(facts(bases=bases[:1]))
  assert "Licence of the base: unknown: see the base model." in unknown
  assert not {"license", "base_model"} & front_matter(unknown).keys()
  assert "random weights" in model_card.write(facts())


def test_a_card_has_contract_data_metrics_and_training():
  """The card has the contract and every number of the facts, and states which are unknown."""
  interval = {"value": 0.75, "low": 0.7, "high": 0.8}
  train = {"examples": 1200, "tokens": 5, "targets": {"-1": 3}, "fill": 0.5}
  card = model_card.write(
    facts(
      contract=dataclasses.replace(tiny.contract(), neutral="negative", heads=2),
      dataset="prm800k",
      manifest={"train": train | {"conversion": {"dropped": {"no_labels": 2}}}},
      evaluation={"count": 9, "nll": 0.5, "auroc": None},
      judged={"benchmark": "process_bench", "intervals": {"gsm8k/f1": interval}},
    )
  )
  for words in (
    'each step: `"\\n"`, tokens `[12]`',
    "Neutral: the neutral class counts as wrong: P(right) is P(1)",
    "An ensemble of 2 heads",
    "Dataset: prm800k",
    "Recipe of the labels: paper",
    '1,200 examples; 5 tokens; 3 of class `"-1"`; 2 dropped',
    "| gsm8k/f1 | 0.75 | 0.7 | 0.8 |",
    "| negative log-likelihood, nats | 0.5 |\n| AUROC, right against wrong | undefined |",
    "7 updates of 1,000, about 114,688 tokens",
    "learning rate 0.0001",
    "@article{lightman2023lets",
  ):
    assert words in card, words
  share = tiny.change(facts().config, "data", share=0.004)
  assert "Trained on 0.4 % of the problems" in model_card.write(facts(config=share))
  lora = dataclasses.replace(
    share,
    model=dataclasses.replace(share.model, lora_rank=4),
    optim=dataclasses.replace(share.optim, trained="lora"),
  )
  assert "Trained: the step head and low-rank factors of rank 4" in model_card.write(
    facts(config=lora)
  )
  fixed = tiny.change(share, "optim", embedding_scale=0.0)
  assert "Trained: all parameters, not the embedding;" in model_card.write(facts(config=fixed))
  contract = dataclasses.replace(tiny.contract(), objective="language_model", classes=("tokens",))
  targets = {"train": {"targets": {"tokens": 6}}}
  of_text = model_card.write(facts(kind="causal-lm", contract=contract, manifest=targets))
  assert "6 target tokens" in of_text and "Recipe" not in of_text and "PRM800K" not in of_text
  empty = model_card.write(facts())
  assert "Dataset: unknown" in empty and "This step was not evaluated" in empty


def test_hostile_text_from_files_is_escaped():
  """Text from files adds no markup, front matter or code to the card, and is cut to a line."""
  contract = dataclasses.replace(
    tiny.contract(), recipe=HOSTILE, separator=HOSTILE, tokenizer_hash=HOSTILE
  )
  judged = {"benchmark": HOSTILE, "intervals": {HOSTILE: {"value": HOSTILE}, "x": 3}}
  manifest = {HOSTILE: {"targets": {HOSTILE: 1}, "examples": HOSTILE}, "train": [HOSTILE]}
  base = [model_card.BaseModel(HOSTILE, HOSTILE, HOSTILE)]
  clean = model_card.write(facts(bases=[model_card.BaseModel("x", "mit", "y")]))
  card = model_card.write(
    facts(
      name=HOSTILE,
      contract=contract,
      dataset=HOSTILE,
      manifest=manifest,
      judged=judged,
      bases=base,
      versions={HOSTILE: HOSTILE},
    )
  )
  assert card.count("\n---\n") == clean.count("\n---\n") == 1
  assert not {"license", "base_model"} & front_matter(card).keys()
  assert not re.search(r"(?<!\\)<script", re.sub(r'`".*?"`', "", card))
  assert [code(card, x) for x in ("transformers", "vLLM")] == list(
    snippets.of(tiny.contract(), 1).values()
  )
  assert max(map(len, card.splitlines())) < 1000


def contract_and_card(name, tokenizer):
  """Returns the step contract and the card of one of KINDS."""
  objective, heads = KINDS[name] or ("language_model", 1)
  contract = token_tree.step_contract(tokenizer, "\n\n", objective, "paper", heads=heads)
  kind = "token-classification" if KINDS[name] else "causal-lm"
  card = facts(name=name, contract=contract, kind=kind, bos_id=tokenizer.bos_id)
  return contract, model_card.write(card)


@pytest.fixture(scope="module")
def exported(arithmetic_data, tmp_path_factory):
  """The folder of exports of every kind with random weights, and their cards."""
  tokenizer = tokenizers.load(arithmetic_data / "tokenizer.model")
  files = runpy.run_path(str(ROOT / "scripts/export.py"))["tokenizer_files"](tokenizer)
  tokens = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
  folder = tmp_path_factory.mktemp("cards")
  for name, head in KINDS.items():
    contract, card = contract_and_card(name, tokenizer)
    sizes = {"vocab_size": tokenizer.vocab_size, "num_classes": len(contract.classes)}
    options = {"config": tiny.MODEL, "heads": head[1] if head else 1, "head_std": 0.3}
    params = step_lib.init_params(jax.random.key(3), **sizes, **options)
    export.write(
      folder / name,
      params,
      tiny.MODEL,
      tokenizer.vocab_size,
      contract=contract if head else None,
      kind="token-classification" if head else "causal-lm",
      files=files | {"README.md": card.encode()},
      tokens=tokens,
    )
  return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_of_a_card_is_python(kind):
  """The snippets for transformers and vLLM are Python, and lay a text out in the same way."""
  _, card = contract_and_card(kind, tiny.TOKENIZER)
  layouts = []
  for library in ("transformers", "vLLM"):
    source = code(card, library)
    compile(source, library, "exec")
    layouts.append(re.findall(r"ids \+?= .*|ids, ends = .*|return .*", source))
  assert layouts[0] == layouts[1] and "was not run" in card
  assert ("Score a step" in card) == (kind in ("process", "ensemble"))


@pytest.mark.reference
@pytest.mark.parametrize("kind", [kind for kind, head in KINDS.items() if head])
def test_the_code_of_a_card_gives_our_probabilities(exported, kind, monkeypatch, capsys):
  """The card's code for transformers gives P(right) of our scorer, also with spelled-out tokens."""
  monkeypatch.chdir(exported / kind)
  names = {}
  exec(code((exported / kind / "README.md").read_text(), "transformers"), names)
  scorer = Scorer.load_model(exported / kind)
  solutions = [
    ("What is 2 + 3?", ["I add 2 and 3.", "2 + 3 = 6"]),
    ("7 * 8 </s>", [" 56 <s>", "\u00e9\n\nx"]),
  ]
  right = scorer.contract.right_classes
  ours = [p[:, right].sum(-1) for p in map(np.asarray, scorer.probabilities(solutions))]
  printed = json.loads(capsys.readouterr().out)
  assert names["tokenizer"]("a").input_ids[0] == names["model"].config.bos_token_id
  np.testing.assert_allclose(printed, ours[0], atol=1e-5)
  for (problem, steps), expected in zip(solutions, ours):
    assert expected.min() > 0.01 and expected.max() < 0.99
    np.testing.assert_allclose(names["probabilities"](problem, steps), expected, atol=1e-5)


@pytest.mark.reference
def test_the_code_of_a_generators_card_generates_our_tokens(exported, monkeypatch):
  """Each token that the card's code generates is the most probable one of our network."""
  directory = exported / "causal-lm"
  monkeypatch.chdir(directory)
  names = {}
  exec(code((directory / "README.md").read_text(), "transformers"), names)
  prompt, ids = len(names["ids"]), names["output"][0].tolist()
  assert prompt < len(ids) <= prompt + 16
  mesh = loop.sharding_lib.make_mesh(config_lib.Mesh(), jax.devices()[:1])
  model = language_model.LanguageModel.load(directory, mesh)
  graph = step_lib.graph(model.config, model.vocab_size, 1)
  network = step_lib.nnx.merge(graph, model.params)
  tree = token_tree.chain(ids)
  rows = [x[None] for x in (tree.tokens, tree.positions, tree.subtree_end)]
  logits = network.next_token_logits(network.hidden(*rows))[0]
  assert ids[prompt:] == np.asarray(logits).argmax(-1)[prompt - 1 : -1].tolist()


def test_the_card_of_an_exported_run_has_its_facts(arithmetic_data, tmp_path):
  """export.py writes base, licence, dataset and metrics; intervals only if they are of the step.

  A run that is preempted at a step evaluates it on resuming, and the card has that evaluation.
  """
  tiny.public(tmp_path / "base", 320, arithmetic_data / "tokenizer.model")
  (tmp_path / "base/README.md").write_text("---\nlicense: apache-2.0\n---\n")
  experiment = tiny.experiment(arithmetic_data)
  experiment = tiny.change(experiment, "data", tokenizer="")
  experiment = tiny.change(experiment, "model", **vars(config_lib.Model()))
  experiment = tiny.change(experiment, "init", checkpoint=str(tmp_path / "base"))
  experiment = tiny.change(experiment, "train", steps=4, eval_every=2, save_every=2, log_every=1)
  with tiny.first_device():
    with tiny.after_record(1, tiny.terminate, "train"), pytest.raises(exits.Preempted):
      loop.run(experiment, tmp_path / "run")
    loop.run(experiment, tmp_path / "run")
  interval = {"auroc": {"value": 0.6, "low": 0.51234, "high": 0.7}}
  judged = {"benchmark": "prm800k", "model": {"checkpoint_step": 4}, "intervals": interval}
  (tmp_path / "run/evaluation.json").write_text(json.dumps(judged))
  for step in (4, 2):
    out = tmp_path / f"out{step}"
    options = (f"--checkpoint={tmp_path / 'run'}", f"--output={out}", f"--step={step}")
    call_script("export.py", *options)
    card = (out / "README.md").read_text()
    assert front_matter(card)["license"] == "apache-2.0"
    assert "It started from base." in card and "Dataset: arithmetic." in card
    assert f"{step} updates of 4" in card and "AUROC" in card and "not evaluated" not in card
    assert ("0.5123" in card) == (step == 4)
    assert str(tmp_path) not in card
    assert "(`pip install torch transformers sentencepiece protobuf`):" in card
