"""Reads what a compiled program does on one chip from its HLO text.

The text is HLO after all compiler passes, as `jax.stages.Compiled.as_text()` returns it.
Instructions in a loop count once for each trip, which XLA's own cost analysis does not do.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BETWEEN_SLICES = "between slices"  # the kind of a transfer over the data-centre network
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
  """A collective operation, and how often a run of the program executes it."""

  kind: str  # one of KINDS, or BETWEEN_SLICES
  dtype: str  # the dtype of most of its bytes
  bytes: int  # the gathered array on all chips together; of a reduction, the operand on one chip
  chips: int | None  # size of the replica group; None: the text does not say
  times: int  # executions in one run of the program
  loop: str | None  # name of the innermost while loop around it; None: outside of loops
  overlapped: bool  # runs beside arithmetic: asynchronous, or in pieces inside fusions

  @property
  def traffic(self) -> float:
    """Bytes that reach a chip in one run of the program, by the ring algorithm."""
    share = 1.0 if not self.chips else (self.chips - 1) / self.chips
    if self.kind in ("collective-permute", BETWEEN_SLICES):
      share = 1.0
    return self.times * self.bytes * share * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True)
class Program:
  """Totals over one run of a program on one chip."""

  cycles: int  # sum of the compiler's estimates; 0: it wrote none
  without_cycles: dict[str, int]  # executions of custom calls, which have no estimate, by target
  collectives: tuple[Collective, ...]
  loops: dict[str, int]  # trips of each while loop, by name
  unknown_loops: int  # loops whose trip count the text does not give; each counts as one trip

  def in_loop(self, loop: str) -> dict[str, int]:
    """Number of collectives in one trip of a loop, by kind."""
    found = [each for each in self.collectives if each.loop == loop]
    return dict(collections.Counter(each.kind for each in found))


@dataclasses.dataclass(frozen=True)
class Instruction:
  name: str
  type: str
  opcode: str
  rest: str  # operands and attributes

  @property
  def called(self) -> list[str]:
    """Names of the computations that it calls."""
    return [name.lstrip("%") for name in _CALLED.findall(self.rest)]


@dataclasses.dataclass(frozen=True)
class Execution:
  """An instruction at one place of the program's call tree."""

  instruction: Instruction
  computation: str  # that holds it
  times: int  # product of the trip counts of the loops around it
  loop: str | None  # innermost loop around it
  fused: bool  # inside a fusion or an asynchronous computation


Computations = dict[str, list[Instruction]]


def read(text: str) -> Program:
  """Totals of a program.

  Raises:
    ValueError: the text has no ENTRY computation.
  """
  computations, entry = _parse(text)
  if entry is None:
    raise ValueError("no HLO program: there is no ENTRY computation")
  cycles, unknown = 0, 0
  loops: dict[str, int] = {}
  without_cycles: collections.Counter[str] = collections.Counter()
  collectives: dict[str, Collective] = {}
  for at in walk(computations, entry):
    each = at.instruction
    kind = each.opcode.removesuffix("-start")
    estimate = _CYCLES.search(each.rest)
    if kind in KINDS:
      # the pieces of one collective, in several fusions, share its channel
      channel = re.search(r"channel_id=(\d+)", each.rest)
      key = f"channel {channel[1]}" if channel else f"{at.computation} {each.name}"
      if key not in collectives:
        collectives[key] = _collective(at, kind)
    elif each.opcode == "recv" and "is_host_transfer=true" in each.rest:
      collectives[f"{at.computation} {each.name}"] = _received(at)
    elif each.opcode == "while":
      trips = _trip_count(each, computations)
      loops[each.name] = trips or 1
      unknown += trips is None
    elif estimate and not at.fused:
      cycles += at.times * int(estimate[1])
    elif each.opcode == "custom-call" and not at.fused:
      target = re.search(r'custom_call_target="([^"]+)"', each.rest)
      without_cycles[target[1] if target else "custom-call"] += at.times
  return Program(cycles, dict(without_cycles), tuple(collectives.values()), loops, unknown)


def walk(
  computations: Computations,
  name: str,
  times: int = 1,
  loop: str | None = None,
  fused: bool = False,
) -> Iterator[Execution]:
  """Every instruction that a computation executes, in order, those of called computations too."""
  for each in computations.get(name, ()):
    yield Execution(each, name, times, loop, fused)
    if each.opcode == "while":
      trips = _trip_count(each, computations) or 1
      yield from walk(computations, each.called[0], times * trips, each.name, fused)
    elif each.opcode in ("fusion", "call", "conditional", "async-start"):
      inside = fused or each.opcode in ("fusion", "async-start")
      for called in each.called:
        yield from walk(computations, called, times, loop, inside)


def _parse(text: str) -> tuple[Computations, str | None]:
  """Instructions of each computation by its name, and the name of the entry computation."""
  found, entry, current = {}, None, None
  for line in text.splitlines():
    if header := _HEADER.match(line):
      current = found.setdefault(header[2], [])
      entry = header[2] if header[1] else entry
    elif line.startswith("}"):
      current = None
    elif current is not None and (match := _INSTRUCTION.match(line)):
      current.append(Instruction(*match.groups()))
  return found, entry


def _trip_count(loop: Instruction, computations: Computations) -> int | None:
  """As annotated, or the only number that the loop's condition compares with; None: unknown."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
    return int(known[1])
  condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]
  numbers = {
    int(at.instruction.rest.split(")")[0])
    for at in walk(computations, condition)
    if at.instruction.opcode == "constant" and at.instruction.type.startswith(("s32[]", "u32[]"))
  }
  return numbers.pop() if len(numbers) == 1 else None


def _arrays(shape: str) -> Iterator[tuple[str, int]]:
  """Dtype and bytes of each array of an HLO type."""
  for dtype, sizes in _ARRAY.findall(shape):
    if dtype in BYTES:
      yield dtype, BYTES[dtype] * math.prod(int(size) for size in sizes.split(",") if size)


def _collective(at: Execution, kind: str) -> Collective:
  each, asynchronous = at.instruction, at.instruction.opcode.endswith("-start")
  by_dtype: collections.Counter[str] = collections.Counter()
  for dtype, size in _arrays(each.type):
    by_dtype[dtype] += size
  chips, total = _group_size(each.rest), sum(by_dtype.values())
  if asynchronous and each.type.startswith("("):  # the type holds operands and results
    operand = total // (1 + (chips or 1)) if kind in ("all-gather", "reduce-scatter") else total / 2
    total = int(total - operand if kind == "all-gather" else operand)
  if kind == "reduce-scatter" and not asynchronous:
    total *= chips or 1
  dtype = max(by_dtype, key=by_dtype.get, default="?")
  return Collective(kind, dtype, total, chips, at.times, at.loop, at.fused or asynchronous)


def _received(at: Execution) -> Collective:
  """A transfer from another slice, through the hosts; its type is (data, u32[], token[])."""
  dtype, size = next(_arrays(at.instruction.type), ("?", 0))
  return Collective(BETWEEN_SLICES, dtype, size, None, at.times, at.loop, overlapped=False)


def _group_size(rest: str) -> int | None:
  """Chips in a replica group, from any of the three notations of HLO."""
  if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
    axes = re.findall(r"'([^']+)'(:\(\d+\)(\d+))?", named[2])
    return math.prod(int(part or sizes[axis]) for axis, _, part in axes)
  if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
    return int(iota[1])
  if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
    return len(listed[1].split(","))
  return None
