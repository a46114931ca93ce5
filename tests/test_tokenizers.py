"""Public tokenizers: the reference's own ids for any text, saved and found again, broken files."""

import hashlib
import json
import os
import pathlib
import re

import published_models
import pytest
import sentencepiece
import tokenizers as library
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from prm_jax.input_pipeline import tokenizers
from prm_jax.runtime import json_lines

GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / "data" / "smollm2_ids.json").read_text(encoding="utf-8")
)  # text -> ids of SmolLM2, by transformers with the pre-tokenizer the model was published with
CORPUS = [*GOLDEN, "Let $x+y = 123456$ isn't (a) 2,000 <= 3^4 ~ HelloWorld fooBAR\n\n 77"] * 3
SPECIAL = ["<bos>", "</s>", "<extra_0>"]
QWEN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(kind):
  """A tiny tokenizer of the library's own making, laid out as a family's is."""
  made = library.Tokenizer(models.BPE())
  first = pre_tokenizers.Digits(individual_digits=True)
  if kind != "smollm":
    pattern = QWEN if kind == "qwen" else QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
    first = pre_tokenizers.Split(library.Regex(pattern), behavior="isolated")
  last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "smollm")
  made.pre_tokenizer = pre_tokenizers.Sequence([first, last])
  if kind == "qwen":
    made.normalizer = normalizers.NFC()
  made.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=500,
    special_tokens=SPECIAL,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(CORPUS, trainer)
  made.add_tokens([library.AddedToken("<think>", normalized=False, special=False)])
  if kind == "llama3":
    made.post_processor = processors.TemplateProcessing(
      single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 0)]
    )
  return made


@pytest.fixture(scope="module")
def made():
  """Tokenizers of the library by kind; Mistral's writes spaces as U+2581 and puts one first."""
  return {kind: byte_level(kind) for kind in ("smollm", "qwen", "llama3")} | {
    "mistral": published_models.tokenizer_json("mistral")
  }


@pytest.fixture
def wrapped(tmp_path):
  """Reads a tokenizer as the project does, with a `tokenizer_config.json` beside it."""

  def wrap(tokenizer, **config):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizers.load(tmp_path)

  return wrap


@pytest.fixture(scope="module")
def read(made, tmp_path_factory):
  directory = tmp_path_factory.mktemp("read")
  for kind, tokenizer in made.items():
    tokenizer.save(str(directory / f"{kind}.json"))
  return {kind: tokenizers.load(directory / f"{kind}.json") for kind in made}


@pytest.mark.parametrize("kind", ["smollm", "qwen", "llama3", "mistral"])
def test_ids_are_those_of_the_library(made, read, kind):
  """White space, LaTeX, digits, combining marks, emoji, other scripts: never an id of our own."""
  for text in GOLDEN:
    assert read[kind].encode(text) == made[kind].encode(text, add_special_tokens=False).ids, text


@settings(max_examples=100, deadline=None)
@given(left=st.text(max_size=20), right=st.text(max_size=20))
def test_pieces_encoded_apart_decode_joined(read, left, right):
  """Steps and separators may be encoded apart: byte-level ids join as their texts do."""
  for kind in ("smollm", "llama3"):
    tokenizer = read[kind]
    assert tokenizer.decode(tokenizer.encode(left) + tokenizer.encode(right)) == left + right


@pytest.mark.parametrize("kind", ["smollm", "qwen", "llama3"])
def test_special_tokens_in_a_text_are_its_letters(read, kind):
  """A solution that spells `<extra_0>` or `</s>` neither ends nor scores a step; a prompt may."""
  tokenizer = read[kind]
  for special in SPECIAL:
    plain = tokenizer.encode(f"a{special}b")
    assert plain == tokenizer.encode(f"a{special[0]}") + tokenizer.encode(f"{special[1:]}b")
    assert tokenizer.decode(plain) == f"a{special}b"
    parsed = tokenizer.encode(f"a{special}b", special=True)
    assert parsed == [*tokenizer.encode("a"), SPECIAL.index(special), *tokenizer.encode("b")]
    assert tokenizer.decode(parsed) == f"a{special}b"
  assert tokenizer.encode("<extra_0>", special=True) == [2]


def test_added_tokens_that_are_not_special_are_vocabulary(made, read):
  """`<think>` is one token either way, as in the reference, and counts in the vocabulary."""
  number = made["qwen"].token_to_id("<think>")
  assert read["qwen"].encode("<think>") == read["qwen"].encode("<think>", special=True) == [number]
  assert read["qwen"].vocab_size == number + 1


def test_nothing_is_cut_padded_or_random(made, wrapped):
  """A file saved with truncation, padding and dropout still encodes whole texts, always alike."""
  stored = library.Tokenizer.from_str(made["smollm"].to_str())
  text = "Let $x = 12345$. " * 20
  whole = stored.encode(text).ids
  stored.enable_truncation(5)
  stored.enable_padding(length=1000)
  stored.model.dropout = 0.5
  tokenizer = wrapped(stored)
  assert tokenizer.encode(text) == tokenizer.encode(text, special=True) == whole


@pytest.mark.parametrize(
  ("kind", "config", "bos", "eos"),
  [
    ("smollm", {}, None, 1),  # the one known name among the added tokens
    ("llama3", {}, 0, 1),  # by the post-processor
    ("mistral", {"eos_token": {"content": "</s>"}}, 0, 2),
    ("llama3", {"add_bos_token": False, "bos_token": "<bos>"}, 0, 1),  # the file decides
    ("smollm", {"add_bos_token": True, "bos_token": "<bos>"}, None, 1),
    ("smollm", {"bos_token": "<bos>", "eos_token": "<extra_0>"}, None, 2),  # named, not put first
    ("qwen", {"add_bos_token": None, "bos_token": None}, None, 1),
  ],
)
def test_what_begins_and_ends_a_text(made, wrapped, kind, config, bos, eos):
  """`bos_id` is what the reference puts before a text; `encode` itself never does."""
  tokenizer = wrapped(made[kind], **config)
  assert (tokenizer.bos_id, tokenizer.eos_id) == (bos, eos)
  assert bos is None or tokenizer.encode("a")[:1] != [bos]


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["smollm", "qwen", "llama3"])  # of Mistral, v5 sets spaces anew
@pytest.mark.parametrize("add", [True, False, None])
def test_transformers_begins_a_text_alike(made, wrapped, tmp_path, kind, add):
  """`bos_id` and `encode` give the `input_ids` of a saved directory, whatever its config says."""
  import transformers

  tokenizer = wrapped(made[kind], bos_token="<bos>", eos_token="</s>", add_bos_token=add)
  reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  for text in GOLDEN:
    assert reference(text)["input_ids"] == first + tokenizer.encode(text)
    special = tokenizer.encode(f"{text}</s><think>", special=True)
    assert reference(f"{text}</s><think>")["input_ids"] == first + special


def test_tokens_of_the_config_file_are_added(made, wrapped, tmp_path):
  """A token only `tokenizer_config.json` knows gets its id; another id means other files."""
  size = made["smollm"].get_vocab_size()
  spec = {"content": "<extra_1>", "special": True}
  tokenizer = wrapped(made["smollm"], added_tokens_decoder={str(size): spec})
  assert tokenizer.encode("<extra_1>", special=True) == [size] == [tokenizer.vocab_size - 1]
  assert len(tokenizer.encode("<extra_1>")) > 1
  tokenizer.save(tmp_path / "saved")
  assert tokenizers.load(tmp_path / "saved").hash == tokenizer.hash
  with pytest.raises(ValueError, match="do not belong together"):
    wrapped(made["smollm"], added_tokens_decoder={str(size + 5): spec})


@pytest.mark.parametrize("kind", ["qwen", "llama3", "mistral"])
def test_a_saved_tokenizer_is_the_same_one(made, wrapped, tmp_path, kind):
  """Beside a checkpoint: the same bytes, so the hash in the step contract holds, and the ids."""
  first = wrapped(made[kind], eos_token="</s>", chat_template="x")
  first.save(tmp_path / "work")
  again = tokenizers.load(tmp_path / "work")
  for name in ("tokenizer.json", "tokenizer_config.json"):
    assert (tmp_path / "work" / name).read_bytes() == (tmp_path / name).read_bytes()
  assert [again.hash, again.bos_id, again.eos_id] == [first.hash, first.bos_id, first.eos_id]


def sentencepiece_model(path, **options):
  """A tiny model with the defaults of public ones: a space first, others merged."""
  with path.open("wb") as file:
    sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter(CORPUS),
      model_writer=file,
      vocab_size=500,
      hard_vocab_limit=False,
      model_type="bpe",
      byte_fallback=True,
      minloglevel=2,
      **options,
    )
  return path


IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
GEMMA = IDENTITY | {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}


# Llama 2 and Mistral; NFKC with white space merged; Gemma.
@pytest.mark.parametrize("options", [IDENTITY, {}, GEMMA])
def test_public_sentencepiece_ids_are_its_own(tmp_path, options):
  """Of a public tokenizer.model the ids are sentencepiece's, U+2581 and the first space too."""
  path = sentencepiece_model(tmp_path / "tokenizer.model", **options)
  reference = sentencepiece.SentencePieceProcessor(str(path))
  tokenizer = tokenizers.load(tmp_path)
  for text in [*GOLDEN, "▁a▁ ▁▁b", "<s>"]:
    assert tokenizer.encode(text) == reference.EncodeAsIds(text), text
  assert (tokenizer.bos_id, tokenizer.eos_id) == (reference.bos_id(), reference.eos_id())
  parsed = tokenizer.encode("<s>a b</s>c", special=True)
  a_b, c = reference.EncodeAsIds("a b"), reference.EncodeAsIds("c")
  assert parsed == [reference.bos_id(), *a_b, reference.eos_id(), *c]
  tokenizer.save(tmp_path / "work")
  assert tokenizers.load(tmp_path / "work").hash == tokenizer.hash


def test_files_beside_a_sentencepiece_model_count(tmp_path):
  """`add_bos_token` holds; tokens added beside the model would be letters, so they are refused."""
  sentencepiece_model(tmp_path / "tokenizer.model")
  config = tmp_path / "tokenizer_config.json"
  config.write_text('{"add_bos_token": false, "eos_token": "<s>"}')
  assert (tokenizers.load(tmp_path).bos_id, tokenizers.load(tmp_path).eos_id) == (None, 1)
  config.write_text('{"added_tokens_decoder": {"320": {"content": "<extra_0>"}}}')
  with pytest.raises(ValueError, match=r"<extra_0>.*save it as tokenizer\.json"):
    tokenizers.load(tmp_path)


def test_what_begins_a_text_is_part_of_the_hash(tmp_path):
  """Without the small file that turns `<s>` off it is another tokenizer: scores would change."""
  path = sentencepiece_model(tmp_path / "tokenizer.model")
  config, off = tmp_path / "tokenizer_config.json", '{"add_bos_token": false}'
  plain = hashlib.sha256(path.read_bytes()).hexdigest()
  for text, same in [("{}", True), ('{"add_bos_token": true}', True), (off, False)]:
    config.write_text(text)
    first = tokenizers.load(tmp_path)
    assert (first.hash == plain) == same == (first.bos_id is not None)
    first.save(tmp_path / "work")
    again = tokenizers.load(tmp_path / "work")
    assert (again.hash, again.bos_id) == (first.hash, first.bos_id)
  (tmp_path / "work" / config.name).unlink()
  assert tokenizers.load(tmp_path / "work").hash == plain != first.hash
  without = sentencepiece_model(tmp_path / "other.model", bos_id=-1)
  config.write_text(off)  # says nothing new of a model that has none
  assert tokenizers.load(without).hash == hashlib.sha256(without.read_bytes()).hexdigest()


def test_the_tokenizer_of_a_directory(tmp_path):
  """tokenizer.json goes before tokenizer.model, and no directory gets both."""
  with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json or tokenizer\.model here"):
    tokenizers.load(tmp_path)
  for name in ("tokenizer.model", "tokenizer.json"):
    (tmp_path / name).write_text("")
    assert tokenizers.find(tmp_path) == tmp_path / name
  path = sentencepiece_model(tmp_path / "other.model")
  with pytest.raises(ValueError, match="two tokenizers in one directory"):
    tokenizers.load(path).save(tmp_path)


def two_before(text):
  """The text of a tokenizer.json that puts `<bos>` twice."""
  values = json.loads(text)
  values["post_processor"]["single"].insert(0, values["post_processor"]["single"][0])
  return json.dumps(values)


BROKEN = "not a whole tokenizer.json"


@pytest.mark.parametrize(
  ("file", "change", "message"),
  [
    ("tokenizer.json", lambda text: text[:-9], BROKEN),
    ("tokenizer.json", lambda text: text.replace("BPE", "XPE"), BROKEN),
    ("tokenizer.json", two_before, "['<bos>', '<bos>', 'a']; expected at most one token"),
    ("tokenizer_config.json", lambda text: text[:-1], "tokenizer_config.json beside it: "),
    ("tokenizer_config.json", lambda text: '{"added_tokens_decoder": [1]}', "added_tokens_decoder"),
  ],
)
def test_broken_files_are_named(made, wrapped, tmp_path, file, change, message):
  """Cut short, of another kind, or with more before a text than the pipeline's one token."""
  wrapped(made["llama3"])
  (tmp_path / file).write_text(change((tmp_path / file).read_text()))
  with pytest.raises(ValueError) as error:
    tokenizers.load(tmp_path)
  assert str(error.value).startswith(f"{tmp_path / 'tokenizer.json'}: ")
  assert message in str(error.value)


def test_another_kind_of_file_is_named(tmp_path):
  """Neither a missing file nor a vocabulary of another library is taken for a tokenizer."""
  path = tmp_path / "vocabulary.tiktoken"
  with pytest.raises(FileNotFoundError, match=re.escape(f"{path}: no tokenizer here")):
    tokenizers.load(path)
  path.write_text("IQ== 0\nIg== 1\n")
  with pytest.raises(ValueError, match=r"vocabulary\.tiktoken: not a SentencePiece model"):
    tokenizers.load(path)


@pytest.fixture(scope="module")
def smollm2():
  path = pathlib.Path(os.environ.get("PRM_JAX_SMOLLM2", ""))
  if not (path / "provenance.json").is_file():
    pytest.skip("PRM_JAX_SMOLLM2 is not what scripts/fetch_model.py smollm2-135m writes")
  return path


def test_real_smollm2_ids(smollm2):
  """The real vocabulary: checked-in ids, nothing before a text, `<|im_end|>` ends it."""
  tokenizer = tokenizers.load(smollm2)
  assert {text: tokenizer.encode(text) for text in GOLDEN} == GOLDEN
  assert all(tokenizer.decode(ids) == text for text, ids in GOLDEN.items())
  assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (49152, None, 2)
  assert tokenizer.encode("<|im_start|>user\n", special=True)[0] == 1


@pytest.mark.reference
@pytest.mark.shared_data
@pytest.mark.slow
def test_real_smollm2_ids_are_those_of_transformers(smollm2, prm800k_sample, tmp_path):
  """Problems and steps of PRM800K: transformers gives the same ids, also after saving."""
  import transformers

  tokenizer = tokenizers.load(smollm2)
  texts = list(GOLDEN)
  for _, _, row in json_lines.read(prm800k_sample / "phase2_test.jsonl"):
    texts.append(row["question"]["problem"])
    texts += [c["text"] for s in row["label"]["steps"] for c in s["completions"] or ()]
  assert len(texts) > 1000
  tokenizer.save(tmp_path)
  for directory in (smollm2, tmp_path):
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    assert reference(texts)["input_ids"] == [tokenizer.encode(text) for text in texts]
    assert reference.eos_token_id == tokenizer.eos_id


def test_an_expression_that_backtracks_is_an_error(tmp_path):
  """The library panics, which no `except Exception` sees; the message names the file."""
  made = byte_level("llama")
  pattern = library.Regex("(a|aa)+$")
  made.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
  made.save(str(tmp_path / "tokenizer.json"))
  loaded = tokenizers.load(tmp_path)
  assert loaded.encode("b")
  with pytest.raises(ValueError, match=rf"{tmp_path}/tokenizer.json: cannot encode 'aaaa.*gave up"):
    loaded.encode("a" * 100 + "b")
