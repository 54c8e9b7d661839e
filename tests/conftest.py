"""The tests need no network, and each process keeps to one thread: several run side by side."""

import os


# Read when Transformers and the Hub client are imported, so they stand before every other import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy

import pytest
import torch

from tests import tiny


torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def _models() -> dict:
    return {}


def _copy_of(models: dict, family: str):
    if family not in models:
        models[family] = tiny.MODELS[family]()
    return copy.deepcopy(models[family])


@pytest.fixture
def tiny_model(_models):
    """A function from a family of `tests.tiny.MODELS` to a copy of its model, which is built once a session."""
    return lambda family: _copy_of(_models, family)


@pytest.fixture
def tiny_llama(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def tiny_tokenizer(_tokenizer):
    return copy.deepcopy(_tokenizer)


@pytest.fixture(scope="session")
def _tokenizer():
    return tiny.tokenizer()
