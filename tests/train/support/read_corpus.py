"""Tokenises a text and reads samples from all of it, as a run and its workers do; prints the peaks of resident memory.

    python read_corpus.py TEXT CACHE

Prints kibibytes as JSON: {"start": ..., "tokenised": ..., "read": ...}.
"""

import json
import re
import sys
from pathlib import Path

from runflat.train.data import Corpus, prepare

BATCH, NUM_STEPS = 64, 2000


def peak_kib() -> int:
    """The largest resident memory that this process has had, file pages included."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    text, cache = sys.argv[1:]
    peaks = {"start": peak_kib()}
    corpus = prepare([text], cache_dir=Path(cache), seq_len=128)
    peaks["tokenised"] = peak_kib()
    worker = Corpus.from_json(json.loads(json.dumps(corpus.to_json())))
    for step in range(NUM_STEPS):
        assert len(worker.train_sequences(step * BATCH, BATCH)) == BATCH
    peaks["read"] = peak_kib()
    print(json.dumps(peaks))
