"""The file's own random number generator: integer arithmetic that every runtime has, reproducible by a seed.

The numbers of a round fill a table. Each is a product of three odd integers modulo 2^64: one for its row, one for its
column, and one for the round, which is multiplied by a constant from round to round. So each place in the table is a
multiplicative congruential generator (the constant: Steele & Vigna 2022, "Computationally easy, spectrally good
multipliers"). The factors of rows and columns, and that of the first round, are hashes of seed and place (the finalizer of
SplitMix64; Steele, Lea & Flood 2014). Of a product only the upper bits count, and a conversion to float keeps these.

Two multiplications and one conversion per number take a quarter to a half of the time of onnxruntime's RandomUniformLike,
whose seed is fixed when a session is made. Also tried: SplitMix64 on a counter (as slow as RandomUniformLike), a 32-bit hash
(slower), RandomNormalLike (slower).

Normal numbers are made in pairs from uniform ones (Box & Muller 1958).
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
"""Columns of the table, which has two rows or more: where a draw takes little noise, some is made in vain."""

FRESH = -1
"""The default seed: any seed below 0 asks for a fresh one."""

STEP, GAMMA, KEY = 0xF1357AEA2E62A9C5, 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def draw_inside(model: ir.Model, rounds: Rounds, required: bool) -> None:
    """Make the loop draw its noise itself, standard normal, instead of reading it from an input; `seed` becomes an input.

    required: whether `seed` has no default.
    """
    graph = model.graph
    graph.inputs.pop()
    op = Builder(graph, stem="outer_")
    draws = op("Mul", rounds.sizes, rounds.copies)  # numbers for each call in a round
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
    # (copies, size), like noise that is read from an input
    shaped = [inner("Reshape", piece, op.shape(rounds.copies, -1)) for piece in pieces[:-1]]
    for before, now in zip(old, shaped, strict=True):
        replace(list(rounds.body), before, now)
    rounds.body.sort()


def _carry(rounds: Rounds, first: ir.Value, op: Builder) -> tuple[ir.Node, ir.Value]:
    """Make the loop carry the factor of the round; returns the new loop node, and the factor within its body."""
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
    """Add the input `seed`; returns it as a scalar. Unless it is required it has a default, and callers may leave it out."""
    import onnx_ir as ir

    seed = ir.Value(name=SEED, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(seed)
    if not required:
        seed.const_value = ir.Tensor(np.array(FRESH, np.int64), name=SEED)
        graph.register_initializer(seed)
    return op("Reshape", seed, op.constant([]), name="seed_must_be_one_number")


def _key(op: Builder, seed: ir.Value) -> ir.Value:
    """The seed, or a fresh one if it is below 0.

    onnxruntime's generators are seeded with the time at which its library was loaded, and the nodes of each new session
    start from that again. Only Dropout takes its seeds from a counter of the whole process, so that no two calls get the
    same one, whatever their session and thread; its mask reveals that seed. The uniform numbers that Dropout is applied to,
    whose generator starts from other digits of the clock, separate processes whose counters happen to agree. A fork copies
    both, so forked processes draw alike; a graph cannot see that.
    """
    bits = 61
    uniform = op("RandomUniform", dtype=11, shape=[bits])
    # onnxruntime takes a Dropout whose mask is not read for one in inference, and removes it.
    _, mask = op.many("Dropout", 2, uniform, op.constant(0.5, np.float32), op.constant(True))
    some = op("Where", mask, uniform, op.constant(0, np.float64))
    fresh = op("Cast", op("MatMul", some, op.constant([2.0**place for place in range(bits)], np.float64)), to=7)
    return op("Where", op("Less", seed, op.constant(0)), fresh, seed)


def _odd_numbers(op: Builder, key: ir.Value, count: ir.Value) -> ir.Value:
    """`count` odd 64-bit numbers, each a hash of the key and its place."""
    places = op("Range", op.constant(0), count, op.constant(1))
    value = op("Add", op("Mul", places, op.constant(_signed(GAMMA))), op("Mul", key, op.constant(_signed(KEY))))
    for place, (shift, factor) in enumerate(MIX):
        last = place == len(MIX) - 1
        word = op("Cast", value, to=13)  # only unsigned numbers can be shifted
        word = op("BitwiseXor", word, op("BitShift", word, op.constant(shift, np.uint64), direction="RIGHT"))
        value = op("Mul", op("Cast", word, to=7), op.constant(_signed(2 * factor if last else factor)))
    return op("Add", value, op.constant(1))


def _normal(op: Builder, outer: Builder, integers: ir.Value) -> ir.Value:
    """Standard normal numbers from odd 64-bit integers, given as floats in an even number of rows."""
    one, two = op.many("Split", 2, integers, axis=0, num_outputs=2)
    number = lambda value: outer.constant(value, np.float32)  # noqa: E731
    uniform = op("Mul", op("Abs", one), number(2.0**-63))  # above 0: the integers are odd
    radius = op("Sqrt", op("Mul", op("Log", uniform), number(-2)))
    angle = op("Mul", two, number(math.pi * 2.0**-63))
    return op("Concat", op("Mul", radius, op("Cos", angle)), op("Mul", radius, op("Sin", angle)), axis=0)


def _signed(value: int) -> int:
    """An unsigned 64-bit word as the signed number with the same bits, for ONNX's multiplication."""
    return (value + 2**63) % 2**64 - 2**63
