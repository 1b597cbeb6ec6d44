"""Prints the median milliseconds of one example in onnxruntime on one core, for an ONNX file, as `--latency-command` expects.

The thread's own CPU time is measured, so that other programs on a busy core add nothing.

    svdc sparsify ... --goal latency=15ms --latency-command "python benchmarks/frame.py"

`--goal latency=...` alone uses the geometric mean of batches of 1 and 128: where examples arrive one by one, such as frames
of audio, this is the time that counts.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

CALLS, WARM = 30, 3


def milliseconds(file: str | Path) -> float:
    """The median time of a call with one example of random numbers (zeros for integer inputs)."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    generator, feed = np.random.default_rng(0), {}
    for each in session.get_inputs():
        shape = [size if isinstance(size, int) else 1 for size in each.shape]
        numbers = generator.standard_normal(shape)
        feed[each.name] = numbers.astype(np.float32) if "float" in each.type else np.zeros(shape, np.int64)
    times = []
    for _ in range(WARM + CALLS):
        begun = time.thread_time()
        session.run(None, feed)
        times.append(time.thread_time() - begun)
    return 1000 * statistics.median(times[WARM:])


if __name__ == "__main__":
    print(f"{milliseconds(sys.argv[1]):.3f}")
