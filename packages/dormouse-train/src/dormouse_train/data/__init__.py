"""Bytes to train on: where they are found, how they are split and mapped, which of them make a step's batch."""

from dormouse_train.data.batches import Batches, Streams, open_batches
from dormouse_train.data.corpus import ByteView, Corpus, open_corpus, open_paths
from dormouse_train.data.markov import Markov

__all__ = ["Batches", "ByteView", "Corpus", "Markov", "Streams", "open_batches", "open_corpus", "open_paths"]
