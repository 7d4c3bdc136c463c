"""Data: files, data sets in memory, the order of samples, batches.

Importing it costs NumPy and nothing else.
"""

from odyssey.data import transforms
from odyssey.data.datasets import DATASETS, ArrayDataset, arrays, load
from odyssey.data.idx import read_idx
from odyssey.data.loader import DataLoader, Part, Pieces
from odyssey.data.nested import leaves, mapped
from odyssey.data.reader import Batch, SampleTrial
from odyssey.data.sample_scopes import SampleScopes
from odyssey.data.sampler import DistributedSampler, permutation
from odyssey.data.sources import (
    ImageFolder,
    columns,
    npy,
    npz,
    opened,
    shakespeare,
    split,
    text,
    tokens,
)
from odyssey.data.tables import csv
from odyssey.data.vocabulary import Vocabulary

__all__ = [
    "DATASETS",
    "ArrayDataset",
    "Batch",
    "DataLoader",
    "DistributedSampler",
    "ImageFolder",
    "Part",
    "Pieces",
    "SampleScopes",
    "SampleTrial",
    "Vocabulary",
    "arrays",
    "columns",
    "csv",
    "leaves",
    "load",
    "mapped",
    "npy",
    "npz",
    "opened",
    "permutation",
    "read_idx",
    "shakespeare",
    "split",
    "text",
    "tokens",
    "transforms",
]
