"""Public tokenizers: ids of the reference libraries, saving and loading, errors of bad files."""

import hashlib
import json
import pathlib
import re
import sys
from concurrent import futures

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
  """Returns a small tokenizer of the tokenizers library, laid out as that of a model family."""
  tokenizer = library.Tokenizer(models.BPE())
  first = pre_tokenizers.Digits(individual_digits=True)
  if kind != "smollm":
    pattern = QWEN if kind == "qwen" else QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
    first = pre_tokenizers.Split(library.Regex(pattern), behavior="isolated")
  last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "smollm")
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, last])
  if kind == "qwen":
    tokenizer.normalizer = normalizers.NFC()
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=500,
    special_tokens=SPECIAL,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(CORPUS, trainer)
  tokenizer.add_tokens([library.AddedToken("<think>", normalized=False, special=False)])
  if kind == "llama3":
    tokenizer.post_processor = processors.TemplateProcessing(
      single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 0)]
    )
  return tokenizer


@pytest.fixture(scope="module")
def originals():
  """Tokenizers of the library by kind; Mistral's writes spaces as U+2581 and puts one first."""
  return {kind: byte_level(kind) for kind in ("smollm", "qwen", "llama3")} | {
    "mistral": published_models.tokenizer_json("mistral")
  }


@pytest.fixture
def load(tmp_path):
  """A function that saves a tokenizer of the library with a config, and loads it from there."""

  def save_and_load(tokenizer, **config):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizers.load(tmp_path)

  return save_and_load


@pytest.fixture(scope="module")
def loaded(originals, tmp_path_factory):
  """The tokenizers of `originals`, loaded by the project."""
  directory = tmp_path_factory.mktemp("loaded")
  for kind, tokenizer in originals.items():
    tokenizer.save(str(directory / f"{kind}.json"))
  return {kind: tokenizers.load(directory / f"{kind}.json") for kind in originals}


@pytest.mark.parametrize("kind", ["smollm", "qwen", "llama3", "mistral"])
def test_ids_equal_those_of_the_library(originals, loaded, kind):
  """White space, LaTeX, digits, accents, emoji and other scripts get the ids of the library."""
  for text in GOLDEN:
    expected = originals[kind].encode(text, add_special_tokens=False).ids
    assert loaded[kind].encode(text) == expected, text


@settings(max_examples=100, deadline=None)
@given(left=st.text(max_size=20), right=st.text(max_size=20))
def test_texts_encoded_separately_decode_to_their_concatenation(loaded, left, right):
  """The joined ids of two texts decode to the joined texts, as for steps and separators."""
  for kind in ("smollm", "llama3"):
    tokenizer = loaded[kind]
    assert tokenizer.decode(tokenizer.encode(left) + tokenizer.encode(right)) == left + right


@pytest.mark.parametrize("kind", ["qwen", "llama3"])
def test_special_tokens_in_a_text_are_encoded_as_letters(loaded, kind):
  """A solution that spells out `<extra_0>` or `</s>` gets no special token unless allowed to."""
  tokenizer = loaded[kind]
  for special in SPECIAL:
    plain = tokenizer.encode(f"a{special}b")
    assert plain == tokenizer.encode(f"a{special[0]}") + tokenizer.encode(f"{special[1:]}b")
    assert tokenizer.decode(plain) == f"a{special}b"
    parsed = tokenizer.encode(f"a{special}b", special=True)
    assert parsed == [*tokenizer.encode("a"), SPECIAL.index(special), *tokenizer.encode("b")]
    assert tokenizer.decode(parsed) == f"a{special}b"
  assert tokenizer.encode("<extra_0>", special=True) == [2]


def test_threads_that_share_a_tokenizer_do_not_disturb_each_other(loaded):
  """Threads that encode special tokens, as tokens and as letters, get their own ids."""
  tokenizer, text, interval = loaded["qwen"], "a<bos>b", sys.getswitchinterval()
  encode = lambda i: tuple(tokenizer.encode(text, special=i % 2 == 0))
  expected = encode(0), encode(1)
  sys.setswitchinterval(1e-6)
  try:
    with futures.ThreadPoolExecutor(4) as pool:
      ids = [*pool.map(encode, range(40_000))]
  finally:
    sys.setswitchinterval(interval)
  assert ({*ids[::2]}, {*ids[1::2]}) == ({expected[0]}, {expected[1]})


def test_added_tokens_that_are_not_special_are_ordinary_vocabulary(originals, loaded):
  """`<think>` is one token with and without `special`, and counts in the size of the vocabulary."""
  number, tokenizer = originals["qwen"].token_to_id("<think>"), loaded["qwen"]
  assert tokenizer.encode("<think>") == tokenizer.encode("<think>", special=True) == [number]
  assert tokenizer.vocab_size == number + 1


def test_truncation_padding_and_dropout_of_a_file_are_off(originals, load):
  """A file saved with truncation, padding and dropout encodes whole texts, always alike."""
  stored = library.Tokenizer.from_str(originals["smollm"].to_str())
  text = "Let $x = 12345$. " * 20
  whole = stored.encode(text).ids
  stored.enable_truncation(5)
  stored.enable_padding(length=1000)
  stored.model.dropout = 0.5
  tokenizer = load(stored)
  assert tokenizer.encode(text) == tokenizer.encode(text, special=True) == whole


@pytest.mark.parametrize(
  ("kind", "config", "bos", "eos"),
  [
    ("smollm", {}, None, 1),  # the one known name among the added tokens
    ("llama3", {}, 0, 1),  # its post-processor puts <bos> first
    ("mistral", {"eos_token": {"content": "</s>"}}, 0, 2),
    ("llama3", {"add_bos_token": False, "bos_token": "<bos>"}, 0, 1),  # the post-processor counts
    ("smollm", {"add_bos_token": True, "bos_token": "<bos>"}, None, 1),
    ("smollm", {"bos_token": "<bos>", "eos_token": "<extra_0>"}, None, 2),  # named, not put first
    ("qwen", {"add_bos_token": None, "bos_token": None}, None, 1),
  ],
)
def test_first_and_last_tokens_follow_the_files(originals, load, kind, config, bos, eos):
  """`bos_id` is the token that the library puts before a text; `encode` leaves it out."""
  tokenizer = load(originals[kind], **config)
  assert (tokenizer.bos_id, tokenizer.eos_id) == (bos, eos)
  assert bos is None or tokenizer.encode("a")[:1] != [bos]


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["smollm", "qwen", "llama3"])  # not Mistral: v5 has other spaces
@pytest.mark.parametrize("add", [True, False, None])
def test_transformers_gives_the_same_input_ids(originals, load, tmp_path, kind, add):
  """`bos_id` and `encode` give transformers' `input_ids` for any `add_bos_token` in the config."""
  import transformers

  tokenizer = load(originals[kind], bos_token="<bos>", eos_token="</s>", add_bos_token=add)
  reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  for text in GOLDEN:
    assert reference(text)["input_ids"] == first + tokenizer.encode(text)
    special = tokenizer.encode(f"{text}</s><think>", special=True)
    assert reference(f"{text}</s><think>")["input_ids"] == first + special


def test_tokens_of_the_config_file_are_added(originals, load, tmp_path):
  """A token that only `tokenizer_config.json` has gets its id; a wrong id is an error."""
  size = originals["smollm"].get_vocab_size()
  spec = {"content": "<extra_1>", "special": True}
  tokenizer = load(originals["smollm"], added_tokens_decoder={str(size): spec})
  assert tokenizer.encode("<extra_1>", special=True) == [size] == [tokenizer.vocab_size - 1]
  assert tokenizer.text_size == size  # no text has it, so a model may lack its embedding
  assert len(tokenizer.encode("<extra_1>")) > 1
  tokenizer.save(tmp_path / "saved")
  assert tokenizers.load(tmp_path / "saved").hash == tokenizer.hash
  with pytest.raises(ValueError, match="do not belong together"):
    load(originals["smollm"], added_tokens_decoder={str(size + 5): spec})


def test_a_saved_tokenizer_loads_with_the_same_hash(originals, load, tmp_path):
  """Saving writes the same bytes, so that the hash in a checkpoint's step contract holds."""
  first = load(originals["llama3"], eos_token="</s>", chat_template="x")
  first.save(tmp_path / "work")
  again = tokenizers.load(tmp_path / "work")
  for name in ("tokenizer.json", "tokenizer_config.json"):
    assert (tmp_path / "work" / name).read_bytes() == (tmp_path / name).read_bytes()
  assert [again.hash, again.bos_id, again.eos_id] == [first.hash, first.bos_id, first.eos_id]
  (tmp_path / "tokenizer_config.json").unlink()
  bare = tokenizers.load(tmp_path)
  bare.save(tmp_path / "work")  # of a run that starts again
  assert tokenizers.load(tmp_path / "work").settings == bare.settings != first.settings


def sentencepiece_model(path, **options):
  """Returns the path of a small SentencePiece model with the defaults of public ones."""
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
def test_ids_of_public_models_equal_those_of_sentencepiece(tmp_path, options):
  """A public tokenizer.model gives sentencepiece's ids, also for U+2581 and the first space."""
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


def test_config_beside_a_sentencepiece_model_is_read(tmp_path):
  """`add_bos_token` counts; tokens added beside the model, which it would spell, are an error."""
  sentencepiece_model(tmp_path / "tokenizer.model")
  config = tmp_path / "tokenizer_config.json"
  config.write_text('{"add_bos_token": false, "eos_token": "<s>"}')
  assert (tokenizers.load(tmp_path).bos_id, tokenizers.load(tmp_path).eos_id) == (None, 1)
  config.write_text('{"added_tokens_decoder": {"320": {"content": "<extra_0>"}}}')
  with pytest.raises(ValueError, match=r"<extra_0>.*save it as tokenizer\.json"):
    tokenizers.load(tmp_path)


def test_the_setting_of_the_first_token_is_part_of_the_hash(tmp_path):
  """A tokenizer whose config turns `<s>` off has another hash, because scores would change."""
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


def test_a_directory_has_one_tokenizer(tmp_path):
  """tokenizer.json goes before tokenizer.model, and saving a second kind is an error."""
  with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json or tokenizer\.model here"):
    tokenizers.load(tmp_path)
  for name in ("tokenizer.model", "tokenizer.json"):
    (tmp_path / name).write_text("")
    assert tokenizers.find(tmp_path) == tmp_path / name
  path = sentencepiece_model(tmp_path / "other.model")
  with pytest.raises(ValueError, match="two tokenizers in one directory"):
    tokenizers.load(path).save(tmp_path)


def with_two_bos(text):
  """Returns the text of a tokenizer.json changed to put `<bos>` first twice."""
  values = json.loads(text)
  values["post_processor"]["single"].insert(0, values["post_processor"]["single"][0])
  return json.dumps(values)


BROKEN = "not a valid tokenizer.json"


@pytest.mark.parametrize(
  ("file", "change", "message"),
  [
    ("tokenizer.json", lambda text: text[:-9], BROKEN),
    ("tokenizer.json", lambda text: text.replace("BPE", "XPE"), BROKEN),
    ("tokenizer.json", with_two_bos, "['<bos>', '<bos>', 'a']; expected at most one token"),
    ("tokenizer_config.json", lambda text: text[:-1], "tokenizer_config.json beside it: "),
    ("tokenizer_config.json", lambda text: '{"added_tokens_decoder": [1]}', "added_tokens_decoder"),
  ],
)
def test_errors_of_broken_files_name_the_file(originals, load, tmp_path, file, change, message):
  """A file that is cut short, of another kind, or puts two tokens before a text is named."""
  load(originals["llama3"])
  (tmp_path / file).write_text(change((tmp_path / file).read_text()))
  with pytest.raises(ValueError) as error:
    tokenizers.load(tmp_path)
  assert str(error.value).startswith(f"{tmp_path / 'tokenizer.json'}: ")
  assert message in str(error.value)


def test_missing_and_foreign_files_are_errors_with_the_path(tmp_path):
  """The error for a missing file or another library's vocabulary names the path."""
  with pytest.raises(FileNotFoundError, match=r"nowhere: no such folder; .*fetch_model\.py"):
    tokenizers.load(tmp_path / "nowhere" / "tokenizer.json")
  path = tmp_path / "vocabulary.tiktoken"
  with pytest.raises(FileNotFoundError, match=re.escape(f"{path}: no tokenizer here")):
    tokenizers.load(path)
  path.write_text("IQ== 0\nIg== 1\n")
  with pytest.raises(ValueError, match=r"vocabulary\.tiktoken: not a SentencePiece model"):
    tokenizers.load(path)


def test_real_smollm2_ids(smollm2):
  """The real tokenizer gives the checked-in ids, no first token, and `<|im_end|>` as the last."""
  tokenizer = tokenizers.load(smollm2)
  assert {text: tokenizer.encode(text) for text in GOLDEN} == GOLDEN
  assert all(tokenizer.decode(ids) == text for text, ids in GOLDEN.items())
  assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (49152, None, 2)
  assert tokenizer.encode("<|im_start|>user\n", special=True)[0] == 1


@pytest.mark.reference
@pytest.mark.shared_data
@pytest.mark.slow
def test_real_smollm2_ids_are_those_of_transformers(smollm2, prm800k_sample, tmp_path):
  """transformers gives the same ids for problems and steps of PRM800K, also after saving."""
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


def test_an_expression_that_backtracks_is_an_error(originals, load, tmp_path):
  """A panic of the library becomes a ValueError with the name of the file."""
  original = library.Tokenizer.from_str(originals["smollm"].to_str())
  pattern = library.Regex("(a|aa)+$")
  original.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
  tokenizer = load(original)
  assert tokenizer.encode("b")
  with pytest.raises(ValueError, match=rf"{tmp_path}/tokenizer.json: cannot encode 'aaaa.*gave up"):
    tokenizer.encode("a" * 100 + "b")
