"""A folder in which documented commands run as in a clone: the code, and small inputs of the pages.

Its language model has memorised two solutions, one of which is right, so that sampling, grading
and training on right solutions work as with a real one.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import fake_bucket
import fake_server
import published_models
import tiny
from conftest import ROOT, completion, make_row, read_lines, step, write_lines

from prm_jax.generation import prompts
from prm_jax.runtime import command_line

COPIED = ("benchmarks", "configs", "docs", "scripts", "tests")
SHAPE = {"width": 16, "layers": 6, "heads": 4, "kv_heads": 2, "head_size": 4, "mlp_width": 24}
VOCAB = 403  # of published_models
LARGE = ("qwen2.5_math_1.5b", "qwen2.5_math_7b", "qwen2.5_math_72b", "qwen2.5_32b", "gemma3_4b")
CHAT = "{{ messages[-1]['content'] + '\\n' }}"
SERVER = "http://127.0.0.1:8000/v1"
CHOICE = {"message": {"content": "\\boxed{-1}"}, "finish_reason": "stop"}
VERDICT = {"choices": [CHOICE], "usage": {"completion_tokens": 3}}  # every solution is right
MADE = """
prepare_data.py --dataset=arithmetic --output=data/arithmetic --arithmetic.train_problems=30
  --arithmetic.test_problems=6 --arithmetic.candidates=8
train_tokenizer.py --data=data/arithmetic --output=data/arithmetic/tokenizer.model --vocab_size=320
train.py --config=configs/arithmetic.py --workdir=runs/generator --config.data.row_length=512
  --config.data.tokenizer=data/arithmetic/tokenizer.model --config.loss.language_model_weight=0
  --config.loss.objective=language_model --config.data.text_train=text.jsonl
  --config.data.text_eval=text.jsonl --config.train.steps=150 --config.train.eval_rows=1
train.py --config=configs/arithmetic.py --workdir=runs/prm --config.data.directory=data/arithmetic
  --config.data.tokenizer=data/arithmetic/tokenizer.model --config.train.steps=4
export.py --checkpoint=runs/generator --kind=causal-lm --output=models/smollm2-135m
export.py --checkpoint=runs/prm --output=exports/prm
prepare_data.py --source=DIR --output=data/prm800k
"""


def make(folder: pathlib.Path, run) -> None:
  """Fills a new folder; `run` runs a command in it."""
  for name in COPIED:
    shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
  candidates(folder)
  labelled(folder)
  prm800k(folder / "DIR")
  shutil.copytree(folder / "process_bench", folder / "DIR/process_bench")
  (folder / "DIR/prm800k_sample").mkdir()
  shutil.copy(folder / "DIR/phase2_test.jsonl", folder / "DIR/prm800k_sample")
  shutil.copytree(folder / "DIR", folder / "prm800k/data")
  for command in MADE.replace("\n  ", " ").strip().splitlines():
    name, *arguments = command.split()
    run([f"scripts/{name}", *arguments])
  for name in ("policy", "base", "models/qwen2.5-coder-0.5b"):
    shutil.copytree(folder / "models/smollm2-135m", folder / name)
  template = folder / "models/qwen2.5-coder-0.5b/chat_template.jinja"
  template.write_text(CHAT)
  for name in ("Qwen2.5-Math-PRM-7B", "models/Qwen2.5-Math-PRM-7B"):
    (folder / name).mkdir()
    published_models.write(folder / name, "qwen2.5-math-prm")
  for name in LARGE:
    large(folder, folder / f"configs/prm800k_{name}.py")
  shutil.copytree(folder / "runs/prm", folder / "runs/smollm2")
  shutil.copytree(folder / "data/prm800k", folder / "data/people")
  author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
  for arguments in (["init", "-q"], ["add", "configs"], [*author, "commit", "-qm", "configs"]):
    subprocess.run(["git", *arguments], cwd=folder, check=True)


def before(folder: pathlib.Path, command) -> None:
  """Writes the answers to labelling requests before the command that reads them."""
  if "--answers=answers.jsonl" in command.arguments:
    requests = [line["request"] for line in read_lines(folder / "requests.jsonl")]
    key = read_lines(folder / "requests.key.jsonl")
    known = {each["request"]: each.get("labels") for each in key}
    answers = [{"request": x, "labeller": "ann", "labels": known[x] or [1, -1]} for x in requests]
    write_lines(folder / "answers.jsonl", answers)


@contextlib.contextmanager
def servers() -> Iterator[dict[str, str]]:
  """Runs a chat server and a bucket; yields the environment variables with their addresses."""
  judge, bucket = fake_server.Server(lambda *_: VERDICT), fake_bucket.Server()
  with fake_server.running(judge), fake_server.running(bucket):
    variables = {"URL": judge.url, "PROJECT": "my-project"}
    variables |= {"ZONE": "us-east5-a", "BUCKET": fake_bucket.NAME}
    yield bucket.environment | variables | {"WORKDIR": f"gs://{fake_bucket.NAME}/runs/qwen_7b"}


def candidates(folder: pathlib.Path) -> None:
  """Writes problems, texts, and samples with scores of all kinds and the keys of ProcessBench."""
  problems = [f"What is {i} - {i - 5}?" for i in range(5, 29)]
  solved = [{"problem": x, "ground_truth_answer": "5"} for x in problems]
  solutions = [["I subtract.", f"It is {x}.", f"# Answer\n\n{x}"] for x in (5, 6)]
  samples, scores = [], {"rating_probs": [], "orm_score": []}
  for each in solved:
    for k in range(4):
      right = k % 2 == 0
      steps = [f"Sample {k}.", *solutions[k % 2]]
      line = each | {"steps": steps, "answer": steps[-1][-1], "is_correct": right, "sample": k}
      line |= {"id": f"{each['problem']}/{k}", "generator": "g", "final_answer_correct": right}
      line |= {"label": -1 if right else 2, "logprob": -1.0 - k, "tokens": 9, "finished": True}
      samples.append(
        line | {"my_rm_score": 1.0 - k, "my_rm": 0.5 - k, "level": 1 + len(samples) // 4 % 2}
      )
      scores["orm_score"].append(0.9 - k / 5)
      p = [0.9, 0.8, 0.9 if right else 0.3, 0.7]
      scores["rating_probs"].append([{"-1": 1 - x, "0": 0.0, "1": x} for x in p])
  for name in ("samples", "candidates", "graded", "mine"):
    write_lines(folder / f"{name}.jsonl", samples)
  for name in (
    "scored",
    "scored_prm",
    "scored_process_bench",
    "people",
    "roll",
    "both",
    "judged",
    "scored_orm",
  ):
    key = "orm_score" if name == "scored_orm" else "rating_probs"
    lines = [line | {key: score} for line, score in zip(samples, scores[key])]
    write_lines(folder / f"{name}.jsonl", lines)
  for i, name in enumerate(("gsm8k", "math", "olympiadbench", "omnimath")):
    write_lines(folder / f"process_bench/{name}.jsonl", samples[24 * i :][:24])
  write_lines(folder / "ten/gsm8k.jsonl", samples[:10])
  for name in ("problems", "test", "math"):
    write_lines(folder / f"{name}.jsonl", solved[:3])
  write_lines(folder / "solved.jsonl", [{"problem": problems[-1], "steps": solutions[0]}])
  examples = [prompts.Example(problems[-1], tuple(solutions[0]))]
  texts = []
  for form in ("plain", "few_shot"):
    for problem in problems:
      prompt = prompts.maker(form, None, examples=examples)(problem, 0)
      text = prompt.before + prompt.problem + prompt.after
      texts += [{"prompt": text, "completion": "\n".join(steps)} for steps in solutions]
  write_lines(folder / "text.jsonl", texts)
  write_lines(folder / "data/right_held_out.jsonl", texts[:2])


def labelled(folder: pathlib.Path) -> None:
  """Writes labelled steps as stepwise rows and as lines of PRMBench."""
  rows = []
  for i in range(60):
    labels, steps = [True, bool(i % 2)], ["I add.", f"It is {2 * i + 1 - i % 2}."]
    rows.append({"problem": f"What is {i} + {i}?", "steps": steps, "labels": labels})
  write_lines(folder / "labelled.jsonl", rows)
  write_lines(folder / "known.jsonl", [rows[1] | {"labels": [1, 1]}, rows[2] | {"labels": [1, -1]}])
  keys = {"problem": "prompt", "steps": "completions", "labels": "labels"}
  write_lines(folder / "train.jsonl", [{keys[k]: v for k, v in row.items()} for row in rows])
  bench = []
  for i, kind in enumerate(("circular", "redundency", "correct", "multi_solutions") * 3):
    texts = {"original_question": f"q{i}", "modified_question": f"q{i}"}
    texts |= {"original_process": ["x"], "modified_process": ["x", "y"]}
    errors = [2] if i % 4 < 2 else []
    bench.append({"idx": str(i), "classification": kind, "error_steps": errors} | texts)
  write_lines(folder / "prm_bench/all.jsonl", bench)


def prm800k(folder: pathlib.Path) -> None:
  """Writes PRM800K files with right and wrong solutions, and test problems of MATH."""
  for name in ("phase1_train", "phase1_test", "phase2_train", "phase2_test"):
    rows = []
    for i in range(60):
      texts = [completion("Two.", -1), completion("6.", 0)][: 1 + i % 2]
      steps = [step(completion("Add.", 1)), step(*texts, chosen=None)]
      if i % 3 == 0:
        steps = [step(completion("Add.", 1)), step(completion("# Answer\n\n5", 1))]
      end = "found_error" if i % 3 else "solution"
      rows.append(make_row(steps, end, 1, f"{name} {i}?"))
    write_lines(folder / f"{name}.jsonl", rows)
  about = {"solution": "", "answer": "5", "subject": "Algebra"}
  tests = [{"problem": f"test {i}?", "unique_id": str(i), "level": 1 + i % 2} for i in range(12)]
  write_lines(folder / "math_splits/test.jsonl", [about | each for each in tests])


def large(folder: pathlib.Path, path: pathlib.Path) -> None:
  """Writes the checkpoint of a config for a large model, with random weights of a tiny shape."""
  c = command_line.read(str(path))
  model = dataclasses.replace(c.model, **SHAPE, vocab_size=VOCAB, context_length=131_072)
  family = "gemma3" if "gemma" in path.name else "qwen2"
  tokenizer = folder / "Qwen2.5-Math-PRM-7B/tokenizer.json"
  tiny.public(folder / c.init.checkpoint, VOCAB, tokenizer, model, family)
