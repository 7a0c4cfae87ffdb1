import numpy as np
import pytest

from jaxscale.data import IndexedDataset, IndexedWriter


@pytest.fixture
def make_store(tmp_path):
    """make_store(documents) writes the documents (lists of ids) and opens the store."""

    def make(documents, *, dtype=np.uint16, name="store"):
        with IndexedWriter(tmp_path / name, dtype) as writer:
            for document in documents:
                writer.add(np.array(document))
        return IndexedDataset(tmp_path / name)

    return make


@pytest.fixture
def random_documents():
    """random_documents(count) gives that many documents of 1 to `longest` ids below 1000."""

    def make(count, *, longest=40, seed=0):
        rng = np.random.default_rng(seed)
        return [rng.integers(0, 1000, rng.integers(1, longest + 1)).tolist() for _ in range(count)]

    return make
