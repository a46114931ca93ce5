"""Reads the cycles, loops and collectives of a compiled program on one chip from its HLO text.

The text is HLO after all compiler passes, as `jax.stages.Compiled.as_text()` returns it.
Instructions in a loop count once for each trip, unlike in XLA's own cost analysis.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BETWEEN_SLICES = "between slices"  # the kind of a transfer over the data-centre network
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z\d\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")  # dtype, its bits, shape
_CALLED = re.compile(
  r"\b(?:calls|body|branch_computations|\w+_computation|to_apply)=\{?%([^,)} ]+)"
)


class Collective(NamedTuple):
  """A collective operation, with its number of executions in a run of the program."""

  kind: str  # one of KINDS, or BETWEEN_SLICES
  dtype: str  # the dtype of most of its bytes
  bytes: int  # of the gathered array on all chips together; of a reduction's operand on one chip
  chips: int | None  # size of the replica group; None: the text does not say
  times: int  # executions in one run of the program
  loop: str | None  # the innermost while loop around it; None: outside of loops
  overlapped: bool  # runs beside arithmetic: asynchronously, or in pieces inside fusions

  @property
  def traffic(self) -> float:
    """The bytes that reach a chip in one run of the program, by the ring algorithm."""
    ring = self.chips and self.kind not in ("collective-permute", BETWEEN_SLICES)
    share = (self.chips - 1) / self.chips if ring else 1.0
    return self.times * self.bytes * share * (2 if self.kind == "all-reduce" else 1)


class Program(NamedTuple):
  """The totals of one run of a program on one chip."""

  cycles: int  # sum of the compiler's estimates; 0: it wrote none
  without_cycles: dict[str, int]  # executions of custom calls without an estimate, by target
  collectives: tuple[Collective, ...]
  loops: dict[str, int]  # trips of each while loop, by name
  unknown_loops: int  # loops whose trip count the text does not give; each counts as one trip

  def in_loop(self, loop: str) -> dict[str, int]:
    """Returns the number of collectives in one trip of a loop, by kind."""
    return dict(collections.Counter(each.kind for each in self.collectives if each.loop == loop))


class Instruction(NamedTuple):
  name: str
  type: str
  opcode: str
  rest: str  # operands and attributes

  def find(self, pattern: str) -> str | None:
    """Returns the first group of a pattern in operands and attributes, or None without a match."""
    match = re.search(pattern, self.rest)
    return match and match[1]


Computations = dict[str, list[Instruction]]


def read(text: str) -> Program:
  """Returns the totals of a program.

  Raises:
    ValueError: the text has no ENTRY computation.
  """
  computations, entry = _parse(text)
  cycles, unknown, loops, collectives = 0, 0, {}, {}
  without_cycles: collections.Counter[str] = collections.Counter()
  for op, times, loop, fused in walk(computations, entry):
    kind = op.opcode.removesuffix("-start")
    if op.opcode == "recv" and "is_host_transfer=true" in op.rest:
      kind = BETWEEN_SLICES
    if kind in (*KINDS, BETWEEN_SLICES):
      # The pieces of one collective, in several fusions, share its channel.
      key = (fused and kind in KINDS and op.find(r"channel_id=(\d+)")) or op.name
      beside = fused is not None and _has_arithmetic(computations, fused)
      collective = collectives.setdefault(key, _collective(op, kind, times, loop, beside))
      if fused and "all-reduce-scatter" in fused:  # a chip keeps its slice of the reduced array
        collective = collective._replace(kind="reduce-scatter")
      collectives[key] = collective._replace(overlapped=collective.overlapped or beside)
    elif op.opcode == "while":
      trips = _trip_count(op, computations)
      loops[op.name] = trips or 1
      unknown += trips is None
    elif fused:
      continue  # the fusion has the estimate
    elif estimate := op.find(r'"estimated_cycles":"(\d+)"'):
      cycles += times * int(estimate)
    elif op.opcode == "custom-call":
      without_cycles[op.find(r'custom_call_target="([^"]+)"') or op.opcode] += times
  return Program(cycles, dict(without_cycles), tuple(collectives.values()), loops, unknown)


def walk(
  computations: Computations,
  name: str,
  times: int = 1,
  loop: str | None = None,
  fused: str | None = None,
) -> Iterator[tuple[Instruction, int, str | None, str | None]]:
  """Yields the instructions that a computation executes, in order, with those of its callees.

  Yields:
    The instruction; the product of the trip counts of the loops around it; the names of the
    innermost loop and of the fused or asynchronous computation around it.
  """
  for op in computations.get(name, ()):
    yield op, times, loop, fused
    called = _CALLED.findall(op.rest)
    if op.opcode == "while":
      trips = _trip_count(op, computations) or 1
      yield from walk(computations, called[0], times * trips, op.name, fused)
    elif op.opcode in ("fusion", "call", "conditional", "async-start"):
      inside = op.opcode in ("fusion", "async-start")
      for other in called:
        yield from walk(computations, other, times, loop, fused or (other if inside else None))


def _parse(text: str) -> tuple[Computations, str]:
  """Returns the instructions of each computation by its name, and the entry computation's name."""
  computations, entry, current = {}, None, []
  for line in text.splitlines():
    if header := _HEADER.match(line):
      current = computations.setdefault(header[2], [])
      entry = header[2] if header[1] else entry
    elif match := _INSTRUCTION.match(line):
      current.append(Instruction(*match.groups()))
  if entry is None:
    raise ValueError("no HLO program: there is no ENTRY computation")
  return computations, entry


def _has_arithmetic(computations: Computations, name: str) -> bool:
  """Returns whether a computation multiplies matrices."""
  return any(each.opcode in ("convolution", "dot") for each, *_ in walk(computations, name))


def _trip_count(loop: Instruction, computations: Computations) -> int | None:
  """Returns the annotated count, or the one constant of the loop's condition; None: unknown."""
  if known := loop.find(r'"known_trip_count":\{"n":"(\d+)"'):
    return int(known)
  numbers = {
    int(each.rest.split(")")[0])
    for each, *_ in walk(computations, loop.find(r"condition=%?([\w.\-]+)"))
    if each.opcode == "constant" and each.type.startswith(("s32[]", "u32[]"))
  }
  return numbers.pop() if len(numbers) == 1 else None


def _collective(
  op: Instruction, kind: str, times: int, loop: str | None, beside: bool
) -> Collective:
  chips, asynchronous = _group_size(op.rest), op.opcode.endswith("-start")
  arrays = _ARRAY.findall(op.type)
  if kind == BETWEEN_SLICES:  # a receive has the type (data, u32[], token[])
    arrays, chips = arrays[:1], None
  sizes: collections.Counter[str] = collections.Counter()
  for dtype, bits, shape in arrays:
    elements = math.prod(int(size) for size in shape.split(",") if size)
    sizes[dtype] += -(-int(bits or 8) * elements // 8)
  total = sizes.total()
  operands = op.rest.split(")")[0].count("%")
  if asynchronous and op.type.startswith("(") and len(arrays) != operands:
    # The type has operands and results; counts the larger of the two.
    parts = 1 + (chips or 1) if kind in ("all-gather", "reduce-scatter") else 2
    total -= total // parts
  elif kind == "reduce-scatter":
    total *= chips or 1
  dtype = max(sizes, key=sizes.get, default="?")
  return Collective(kind, dtype, total, chips, times, loop, beside or asynchronous)


def _group_size(rest: str) -> int | None:
  """Returns the chips of a replica group, in any of the three notations of HLO; None: not given."""
  if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
    axes = re.findall(r"'([^']+)'(:\(\d+\)(\d+))?", named[2])
    return math.prod(int(part or sizes[axis]) for axis, _, part in axes)
  if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
    return int(iota[1])
  listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
  return listed and len(listed[1].split(","))
