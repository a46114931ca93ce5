"""Code for model cards that reads an export in transformers and in vLLM, by its contract.

Only numbers are put into the code.  A snippet runs in the export's directory as it stands.
"""

from prm_jax.types import StepContract

# Documented uses of vLLM; see docs.vllm.ai, "Token classification" and "Generative models".
VLLM_DOCUMENTED = {
  "token-classification": "vLLM 0.26 documents `PoolerConfig(task=...)` and `LLM.encode` for token "
  "classification, and converts a decoder's `ForTokenClassification` by itself",
  "causal-lm": "vLLM 0.26 documents `LLM.generate`",
}

_ENCODE = '''
# No token is added, and special tokens that a text spells out are read as its letters.
PLAIN = {{"add_special_tokens": False, "split_special_tokens": True}}


def encode(problem, steps):
  """Token ids, and the positions at which the model is read."""
  ids, ends = {start}, []
  for text in (problem, *steps):  # each encoded alone, and followed by the separator
    ids += tokenizer.encode(text, **PLAIN) + {separator}
    ends.append(len(ids) - 1)
  return ids, {reads}


def probabilities(problem, steps):
  """P(right) of {what}."""
  ids, reads = encode(problem, steps)
{logits}
  classes = {classes}
  return classes[:, {right}].sum(-1).tolist()  # {names}


print(probabilities("What is 2 + 3?", ["I add 2 and 3.", "2 + 3 = 6"]))
'''
_TRANSFORMERS = """import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

MODEL = "."  # this directory, or the model's name on the hub
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForTokenClassification.from_pretrained(MODEL).eval()
"""
_TRANSFORMERS_LOGITS = """  with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0, reads].float()"""
_VLLM = """from transformers import AutoTokenizer
from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig

MODEL = "."  # this directory, or the model's name on the hub
tokenizer = AutoTokenizer.from_pretrained(MODEL)
llm = LLM(model=MODEL, runner="pooling", pooler_config=PoolerConfig(task="token_classify"))
"""
_VLLM_LOGITS = """  (output,) = llm.encode(
    [{"prompt_token_ids": ids}],
    pooling_params=PoolingParams(use_activation=False),  # logits, whose softmax is taken here
    pooling_task="token_classify",
  )
  logits = output.outputs.data[reads].float()"""
_GENERATE = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = "."  # this directory, or the model's name on the hub
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL).eval()

ids = {start} + tokenizer.encode("What is 2 + 3?\\n", add_special_tokens=False)
with torch.no_grad():
  output = model.generate(
    torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=16, do_sample=False
  )
print(tokenizer.decode(output[0, len(ids) :]))
"""
_VLLM_GENERATE = """from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

MODEL = "."  # this directory, or the model's name on the hub
tokenizer = AutoTokenizer.from_pretrained(MODEL)
llm = LLM(model=MODEL)

ids = {start} + tokenizer.encode("What is 2 + 3?\\n", add_special_tokens=False)
sampling = SamplingParams(temperature=0.0, max_tokens=16)
(output,) = llm.generate([{{"prompt_token_ids": ids}}], sampling)
print(output.outputs[0].text)
"""


def of(contract: StepContract | None, bos_id: int | None) -> dict[str, str]:
  """Returns the code for "transformers" and "vLLM"; without a contract, for a language model."""
  start = "[]" if bos_id is None else f"[{int(bos_id)}]"
  if contract is None:
    return {
      "transformers": _GENERATE.format(start=start),
      "vLLM": _VLLM_GENERATE.format(start=start),
    }
  outcome, heads, right = contract.objective == "outcome", contract.heads, contract.right_classes
  classes = "logits.double().softmax(-1)"  # in float32 a sum of classes hides a small P(wrong)
  if heads > 1:  # an ensemble: the mean of its heads
    shape = f"({heads}, {len(contract.classes)})"
    classes = f"logits.double().unflatten(-1, {shape}).softmax(-1).mean(-2)"
  options = {
    "start": start,
    "separator": [int(each) for each in contract.separator_ids],
    "reads": "ends[-1:]" if outcome else "ends[1:]",
    "what": "the solution" if outcome else "each step",
    "classes": classes,
    "right": right,
    "names": f"{len(right)} of {len(contract.classes)} classes count as right",
  }
  return {
    "transformers": _TRANSFORMERS + _ENCODE.format(logits=_TRANSFORMERS_LOGITS, **options),
    "vLLM": _VLLM + _ENCODE.format(logits=_VLLM_LOGITS, **options),
  }
