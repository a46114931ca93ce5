"""What a compiled program does on one chip, read from its text.

The text is HLO after all passes, as `Compiled.as_text()` gives it.  What stands in a loop counts as
often as the loop runs, which the compiler's own cost analysis does not do.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BETWEEN = "between slices"  # the kind of what arrives over the network that joins slices
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z\d\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLED = re.compile(
  r"\b(?:calls|to_apply|body|branch_computations|\w+_computation)=\{?(%[^,)} ]+)"
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
  """One operation that chips do together, a number of times."""

  kind: str  # of KINDS, or BETWEEN
  dtype: str  # of most of its bytes
  bytes: int  # of the whole: what all chips have together of a gather, of one chip's of a reduction
  chips: int | None  # that take part; None: the text does not say
  times: int  # in a run of the program
  loop: int | None  # which of the program's loops it stands in; None: in none
  hidden: bool  # it runs beside arithmetic (asynchronous, or in pieces inside fusions)

  @property
  def traffic(self) -> float:
    """Bytes that reach a chip in a run, by the ring algorithm."""
    share = 1.0 if not self.chips else (self.chips - 1) / self.chips
    if self.kind in ("collective-permute", BETWEEN):
      share = 1.0
    return self.times * self.bytes * share * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True)
class Program:
  cycles: int  # of the operations that the compiler gives an estimate for; 0: it gives none
  without_cycles: dict[str, int]  # operations without an estimate that take time, and how often
  collectives: tuple[Collective, ...]
  loops: tuple[int, ...]  # trips of each
  unknown_loops: int  # whose trips are not in the text; counted as one

  def in_loop(self, loop: int) -> dict[str, int]:
    """Collectives of one trip of a loop, by kind."""
    found = [each for each in self.collectives if each.loop == loop]
    return dict(collections.Counter(each.kind for each in found))


@dataclasses.dataclass(frozen=True)
class _Instruction:
  name: str
  type: str
  opcode: str
  rest: str  # operands and attributes


def read(text: str) -> Program:
  """Reads a program.

  Raises:
    ValueError: there is no entry computation in it.
  """
  computations, entry = _computations(text)
  if entry is None:
    raise ValueError("no HLO program: there is no ENTRY computation")
  cycles, unknown = 0, 0
  loops: list[int] = []
  timeless: collections.Counter[str] = collections.Counter()
  found: dict[str, Collective] = {}

  def visit(name: str, times: int, loop: int | None, fused: bool) -> None:
    nonlocal cycles, unknown
    for each in computations.get(name, ()):
      kind = each.opcode.removesuffix("-start")
      if kind in KINDS:
        # pieces of one, in several fusions, have its channel
        channel = re.search(r"channel_id=(\d+)", each.rest)
        key = f"channel {channel[1]}" if channel else f"{name} {each.name}"
        hidden = fused or each.opcode.endswith("-start")
        if key not in found:
          found[key] = _collective(each, kind, times, loop, hidden)
        continue
      if each.opcode == "recv" and "is_host_transfer=true" in each.rest:
        found[f"{name} {each.name}"] = _received(each, times, loop)
        continue
      if each.opcode == "while":
        condition = re.search(r"condition=%?([\w.\-]+)", each.rest)[1]
        trips = _trips(each, computations, condition)
        unknown += trips is None
        loops.append(trips or 1)
        visit(_called(each)[0], times * (trips or 1), len(loops) - 1, fused)
        continue
      estimate = _CYCLES.search(each.rest)
      if estimate and not fused:
        cycles += times * int(estimate[1])
      elif each.opcode == "custom-call" and not fused:
        target = re.search(r'custom_call_target="([^"]+)"', each.rest)
        timeless[target[1] if target else "custom-call"] += times
      if each.opcode in ("fusion", "call", "conditional", "async-start"):
        inside = fused or each.opcode in ("fusion", "async-start")
        for called in _called(each):
          visit(called, times, loop, inside)

  visit(entry, 1, None, False)
  return Program(cycles, dict(timeless), tuple(found.values()), tuple(loops), unknown)


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str | None]:
  """Instructions of each computation by its name, and the name of the first to run."""
  found, entry, current = {}, None, None
  for line in text.splitlines():
    if header := _HEADER.match(line):
      current = found.setdefault(header[2], [])
      entry = header[2] if header[1] else entry
    elif line.startswith("}"):
      current = None
    elif current is not None and (match := _INSTRUCTION.match(line)):
      current.append(_Instruction(*match.groups()))
  return found, entry


def _called(each: _Instruction) -> list[str]:
  return [name.lstrip("%") for name in _CALLED.findall(each.rest)]


def _trips(each: _Instruction, computations: dict, condition: str) -> int | None:
  """How often a loop runs: as annotated, or the only number that its condition compares with."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', each.rest):
    return int(known[1])
  numbers = set()
  for name in (condition, *(c for i in computations.get(condition, ()) for c in _called(i))):
    for instruction in computations.get(name, ()):
      if instruction.opcode == "constant" and instruction.type.startswith(("s32[]", "u32[]")):
        numbers.add(int(instruction.rest.split(")")[0]))
  return numbers.pop() if len(numbers) == 1 else None


def _arrays(shape: str) -> Iterator[tuple[str, int]]:
  """Dtype and bytes of each array of a type."""
  for dtype, sizes in _ARRAY.findall(shape):
    if dtype in BYTES:
      yield dtype, BYTES[dtype] * math.prod(int(size) for size in sizes.split(",") if size)


def _collective(
  each: _Instruction, kind: str, times: int, loop: int | None, hidden: bool
) -> Collective:
  by_dtype: collections.Counter[str] = collections.Counter()
  for dtype, size in _arrays(each.type):
    by_dtype[dtype] += size
  chips, total = _group(each.rest), sum(by_dtype.values())
  if each.opcode.endswith("-start") and each.type.startswith("("):  # operands and results
    operand = total // (1 + (chips or 1)) if kind in ("all-gather", "reduce-scatter") else total / 2
    total = int(total - operand if kind == "all-gather" else operand)
  if kind == "reduce-scatter" and not each.opcode.endswith("-start"):
    total *= chips or 1
  dtype = max(by_dtype, key=by_dtype.get, default="?")
  return Collective(kind, dtype, total, chips, times, loop, hidden)


def _received(each: _Instruction, times: int, loop: int | None) -> Collective:
  """What arrives from other slices, through the hosts: the type is (data, u32[], token[])."""
  dtype, size = next(_arrays(each.type), ("?", 0))
  return Collective(BETWEEN, dtype, size, None, times, loop, hidden=False)


def _group(rest: str) -> int | None:
  """Chips that take part, from one of the three ways in which groups are written."""
  if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
    axes = re.findall(r"'([^']+)'(:\(\d+\)(\d+))?", named[2])
    return math.prod(int(part or sizes[axis]) for axis, _, part in axes)
  if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
    return int(iota[1])
  if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
    return len(listed[1].split(","))
  return None
