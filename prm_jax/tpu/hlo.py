"""Reads what a compiled program does on one chip from its HLO text.

The text is HLO after all compiler passes, as `jax.stages.Compiled.as_text()` returns it.
Instructions in a loop count once for each trip, which XLA's own cost analysis does not do.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BETWEEN_SLICES = "between slices"  # the kind of a transfer over the data-centre network
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z\d\-]*)\((.*)$")
_ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]")
_CALLED = re.compile(
  r"\b(?:calls|body|branch_computations|\w+_computation|to_apply)=\{?%([^,)} ]+)"
)


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
    ring = self.chips and self.kind not in ("collective-permute", BETWEEN_SLICES)
    share = (self.chips - 1) / self.chips if ring else 1.0
    return self.times * self.bytes * share * (2 if self.kind == "all-reduce" else 1)


class Program(NamedTuple):
  """Totals over one run of a program on one chip."""

  cycles: int  # sum of the compiler's estimates; 0: it wrote none
  without_cycles: dict[str, int]  # executions of custom calls, which have no estimate, by target
  collectives: tuple[Collective, ...]
  loops: dict[str, int]  # trips of each while loop, by name
  unknown_loops: int  # loops whose trip count the text does not give; each counts as one trip

  def in_loop(self, loop: str) -> dict[str, int]:
    """Number of collectives in one trip of a loop, by kind."""
    return dict(collections.Counter(each.kind for each in self.collectives if each.loop == loop))


class Instruction(NamedTuple):
  name: str
  type: str
  opcode: str
  rest: str  # operands and attributes

  def find(self, pattern: str) -> str | None:
    """The first group of a pattern in operands and attributes."""
    found = re.search(pattern, self.rest)
    return found and found[1]


Computations = dict[str, list[Instruction]]


def read(text: str) -> Program:
  """Totals of a program.

  Raises:
    ValueError: the text has no ENTRY computation.
  """
  computations, entry = _parse(text)
  if entry is None:
    raise ValueError("no HLO program: there is no ENTRY computation")
  cycles, unknown, loops, collectives = 0, 0, {}, {}
  without_cycles: collections.Counter[str] = collections.Counter()
  for each, times, loop, fused in walk(computations, entry):
    kind = each.opcode.removesuffix("-start")
    if each.opcode == "recv" and "is_host_transfer=true" in each.rest:
      kind = BETWEEN_SLICES
    if kind in (*KINDS, BETWEEN_SLICES):
      # The pieces of one collective, in several fusions, share its channel.
      key = (fused and kind in KINDS and each.find(r"channel_id=(\d+)")) or each.name
      beside = fused is not None and _has_arithmetic(computations, fused)
      found = collectives.setdefault(key, _collective(each, kind, times, loop, beside))
      if fused and "all-reduce-scatter" in fused:  # of the reduced array a chip keeps its slice
        found = dataclasses.replace(found, kind="reduce-scatter")
      collectives[key] = dataclasses.replace(found, overlapped=found.overlapped or beside)
    elif each.opcode == "while":
      trips = _trip_count(each, computations)
      loops[each.name] = trips or 1
      unknown += trips is None
    elif fused:
      continue  # the fusion has the estimate
    elif estimate := each.find(r'"estimated_cycles":"(\d+)"'):
      cycles += times * int(estimate)
    elif each.opcode == "custom-call":
      without_cycles[each.find(r'custom_call_target="([^"]+)"') or each.opcode] += times
  return Program(cycles, dict(without_cycles), tuple(collectives.values()), loops, unknown)


def walk(
  computations: Computations,
  name: str,
  times: int = 1,
  loop: str | None = None,
  fused: str | None = None,
) -> Iterator[tuple[Instruction, int, str | None, str | None]]:
  """Every instruction that a computation executes, in order, those of called computations too.

  Yields:
    The instruction; the product of the trip counts of the loops around it; the names of the
    innermost loop and of the fused or asynchronous computation around it.
  """
  for each in computations.get(name, ()):
    yield each, times, loop, fused
    called = _CALLED.findall(each.rest)
    if each.opcode == "while":
      trips = _trip_count(each, computations) or 1
      yield from walk(computations, called[0], times * trips, each.name, fused)
    elif each.opcode in ("fusion", "call", "conditional", "async-start"):
      inside = each.opcode in ("fusion", "async-start")
      for other in called:
        yield from walk(computations, other, times, loop, fused or (other if inside else None))


def _parse(text: str) -> tuple[Computations, str | None]:
  """Instructions of each computation by its name, and the name of the entry computation."""
  found, entry, current = {}, None, []
  for line in text.splitlines():
    if header := _HEADER.match(line):
      current = found.setdefault(header[2], [])
      entry = header[2] if header[1] else entry
    elif match := _INSTRUCTION.match(line):
      current.append(Instruction(*match.groups()))
  return found, entry


def _has_arithmetic(computations: Computations, name: str) -> bool:
  """Whether a computation multiplies matrices."""
  return any(each.opcode in ("convolution", "dot") for each, *_ in walk(computations, name))


def _trip_count(loop: Instruction, computations: Computations) -> int | None:
  """As annotated, or the only number that the loop's condition compares with; None: unknown."""
  if known := loop.find(r'"known_trip_count":\{"n":"(\d+)"'):
    return int(known)
  numbers = {
    int(each.rest.split(")")[0])
    for each, *_ in walk(computations, loop.find(r"condition=%?([\w.\-]+)"))
    if each.opcode == "constant" and each.type.startswith(("s32[]", "u32[]"))
  }
  return numbers.pop() if len(numbers) == 1 else None


def _collective(
  each: Instruction, kind: str, times: int, loop: str | None, fused: bool
) -> Collective:
  chips, asynchronous = _group_size(each.rest), each.opcode.endswith("-start")
  arrays = _ARRAY.findall(each.type)
  if kind == BETWEEN_SLICES:  # a receive has the type (data, u32[], token[])
    arrays, chips = arrays[:1], None
  sizes: collections.Counter[str] = collections.Counter()
  for dtype, shape in arrays:
    sizes[dtype] += BYTES[dtype] * math.prod(int(size) for size in shape.split(",") if size)
  total = sizes.total()
  if asynchronous and each.type.startswith("("):  # the type holds operands and results
    operand = total // (1 + (chips or 1)) if kind in ("all-gather", "reduce-scatter") else total / 2
    total = int(total - operand if kind == "all-gather" else operand)
  elif kind == "reduce-scatter" and not asynchronous:
    total *= chips or 1
  dtype = max(sizes, key=sizes.get, default="?")
  return Collective(kind, dtype, total, chips, times, loop, fused or asynchronous)


def _group_size(rest: str) -> int | None:
  """Chips in a replica group, from any of the three notations of HLO."""
  if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
    axes = re.findall(r"'([^']+)'(:\(\d+\)(\d+))?", named[2])
    return math.prod(int(part or sizes[axis]) for axis, _, part in axes)
  if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
    return int(iota[1])
  listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
  return listed and len(listed[1].split(","))
