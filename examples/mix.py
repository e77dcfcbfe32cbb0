"""Averages the logits of two decodes, step by step: mix.py A B | toast-sample | toast-detokenize

A and B are streams of toast-decode --inline. The head names both runs, so that the sampler sends
each token to both decodes: two prompts, one answer.
"""

import signal
import sys

from toastkit.frames import End, Error, FrameReader, FrameWriter, Head, Logits
from toastkit.stages.arrays import from_numpy, to_numpy


def steps(name):
    """The frames that the two streams have in common: the prompts' own frames are left out."""
    for frame in FrameReader(open(name, "rb")):
        if isinstance(frame, (Head, Logits, End, Error)):
            yield frame


signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when the reader goes away
output = FrameWriter(sys.stdout.buffer)
for a, b in zip(steps(sys.argv[1]), steps(sys.argv[2])):
    if isinstance(a, Error) or isinstance(b, Error):
        output.write(a if isinstance(a, Error) else b)
        sys.exit(1)
    if isinstance(a, Head):
        a.run = [a.run, b.run]
    elif isinstance(a, Logits):
        a.logits = from_numpy((to_numpy(a.logits) + to_numpy(b.logits)) / 2)
    output.write(a)
