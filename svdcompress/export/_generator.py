"""The file's own generator: random numbers from integer arithmetic that every runtime has, reproducible by a seed.

The numbers of a round fill a table. Each is a product of odd integers modulo 2^64: one of its row, one of its column, and one
of the round, which is multiplied by a constant from round to round. So each place has a multiplicative congruential generator
(the constant: Steele & Vigna 2022, "Computationally easy, spectrally good multipliers"). The factors of rows and columns, and
that of the first round, are hashes of seed and place (the finalizer of SplitMix64; Steele, Lea & Flood 2014). Of a product the
upper bits count, which a conversion to float keeps.

Two multiplications and one conversion a number take a quarter to a half of the time of onnxruntime's RandomUniformLike, whose
seed is fixed when a session is made. Tried too: SplitMix64 on a counter (as slow as RandomUniformLike), a 32-bit hash (slower),
RandomNormalLike (slower).

Normal numbers come by pairs from uniform ones (Box & Muller 1958).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from svdcompress.export._build import Builder, replace
from svdcompress.export._draw import SEED
from svdcompress.export._trace import OWN

if TYPE_CHECKING:
    import onnx_ir as ir

    from svdcompress.export._loop import Rounds

COLUMNS = 128
"""Of the table; it has two rows or more, so that some noise is made in vain where a draw takes little."""

FRESH = -1
"""The default seed: any below 0 asks for a fresh one."""

STEP, GAMMA, KEY = 0xF1357AEA2E62A9C5, 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def draw_inside(model: ir.Model, rounds: Rounds, required: bool) -> None:
    """Have the loop draw its noise itself, standard normal, instead of reading it from an input; `seed` becomes an input.

    required: it has no default.
    """
    graph = model.graph
    graph.inputs.pop()
    op = Builder(graph, stem="outer_")
    draws = op("Mul", rounds.sizes, rounds.copies)  # numbers of each call in a round
    count = op("ReduceSum", draws, keepdims=0)
    half = op("Div", op("Add", count, op.constant(2 * COLUMNS - 1)), op.constant(2 * COLUMNS))
    lanes = op("Mul", half, op.constant(2))
    spare = op("Sub", op("Mul", lanes, op.constant(COLUMNS)), count)
    sizes = op("Concat", draws, op("Reshape", spare, op.constant([1])), axis=0)
    hashed = _odd_numbers(op, _key(op, _seed(graph, op, required)), op("Add", lanes, op.constant(COLUMNS + 1)))
    down, across, first = op.many("Split", 3, hashed, op.shape(lanes, COLUMNS, 1), axis=0)
    down = op("Reshape", down, op.constant([-1, 1]))
    loop, state = _carry(rounds, first, op)
    rounds.loop = loop

    inner = Builder(rounds.body, constants=graph, stem="drawn_")
    product = inner("Mul", inner("Mul", down, state), across)
    flat = inner("Reshape", _normal(inner, op, inner("Cast", product, to=1)), op.constant([-1]))
    pieces = inner.many("Split", len(rounds.pieces) + 1, flat, sizes, axis=0)
    old = [piece for piece in rounds.pieces]
    # (copies, size), as the noise of an input has it
    shaped = [inner("Reshape", piece, op.shape(rounds.copies, -1)) for piece in pieces[:-1]]
    for before, now in zip(old, shaped, strict=True):
        replace(list(rounds.body), before, now)
    rounds.body.sort()


def _carry(rounds: Rounds, first: ir.Value, op: Builder) -> tuple[ir.Node, ir.Value]:
    """Have the loop carry the round's number: the loop's node, and the number."""
    import onnx_ir as ir

    old, body = rounds.loop, rounds.body
    assert old is not None
    kind = ir.TensorType(ir.DataType.INT64)
    state = ir.Value(name=f"{OWN}stream", shape=ir.Shape([1]), type=kind)
    body.inputs.append(state)
    following = Builder(body, constants=op.graph, stem="stream_")("Mul", state, op.constant(_signed(STEP)))
    following.type, following.shape = kind, ir.Shape([1])
    body.outputs.append(following)
    inputs, outputs = list(old.inputs), list(old.outputs)
    new = op.many("Loop", len(outputs) + 1, *inputs, first, body=body)
    for before, now in zip(outputs, new[:-1], strict=True):
        before.replace_all_uses_with(now)
    op.graph.remove(old, safe=True)
    node = new[0].producer()
    assert node is not None
    return node, state


def _seed(graph: ir.Graph, op: Builder, required: bool) -> ir.Value:
    """The input `seed`, a scalar; with a default callers may leave it out."""
    import onnx_ir as ir

    seed = ir.Value(name=SEED, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(seed)
    if not required:
        seed.const_value = ir.Tensor(np.array(FRESH, np.int64), name=SEED)
        graph.register_initializer(seed)
    return op("Reshape", seed, op.constant([]), name="seed_must_be_one_number")


def _key(op: Builder, seed: ir.Value) -> ir.Value:
    """The seed, or a fresh one in its place.

    onnxruntime's generators start from the time at which its library was loaded, and those of each session's nodes anew from
    there. Dropout alone takes its seeds from a counter of the whole process, so that no two calls have the same, of whatever
    session and thread; its mask tells that seed. The uniform numbers that it drops, whose generator starts from other digits of
    the clock, keep apart processes whose counters happen to meet.
    """
    bits = 61
    uniform = op("RandomUniform", dtype=11, shape=[bits])
    # A Dropout whose mask nobody reads is taken for one of inference, and taken out.
    _, mask = op.many("Dropout", 2, uniform, op.constant(0.5, np.float32), op.constant(True))
    some = op("Where", mask, uniform, op.constant(0, np.float64))
    fresh = op("Cast", op("MatMul", some, op.constant([2.0**place for place in range(bits)], np.float64)), to=7)
    return op("Where", op("Less", seed, op.constant(0)), fresh, seed)


def _odd_numbers(op: Builder, key: ir.Value, count: ir.Value) -> ir.Value:
    """As many odd 64-bit numbers, a hash of key and place each."""
    places = op("Range", op.constant(0), count, op.constant(1))
    value = op("Add", op("Mul", places, op.constant(_signed(GAMMA))), op("Mul", key, op.constant(_signed(KEY))))
    for place, (shift, factor) in enumerate(MIX):
        last = place == len(MIX) - 1
        word = op("Cast", value, to=13)  # only unsigned numbers can be shifted
        word = op("BitwiseXor", word, op("BitShift", word, op.constant(shift, np.uint64), direction="RIGHT"))
        value = op("Mul", op("Cast", word, to=7), op.constant(_signed(2 * factor if last else factor)))
    return op("Add", value, op.constant(1))


def _normal(op: Builder, outer: Builder, integers: ir.Value) -> ir.Value:
    """Standard normal numbers from odd 64-bit integers as floats, an even number of rows."""
    one, two = op.many("Split", 2, integers, axis=0, num_outputs=2)
    number = lambda value: outer.constant(value, np.float32)  # noqa: E731
    uniform = op("Mul", op("Abs", one), number(2.0**-63))  # above 0: the integers are odd
    radius = op("Sqrt", op("Mul", op("Log", uniform), number(-2)))
    angle = op("Mul", two, number(math.pi * 2.0**-63))
    return op("Concat", op("Mul", radius, op("Cos", angle)), op("Mul", radius, op("Sin", angle)), axis=0)


def _signed(value: int) -> int:
    """A 64-bit word as ONNX's multiplication has it."""
    return (value + 2**63) % 2**64 - 2**63
