"""Every container of calibration data users have, and what is refused."""

import json
import random

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from hf_ext.quantizers.base_config import CalibratedConfig
from hf_ext.quantizers.calibration import batches, load_calibration
from tests import tiny
from tests.numerics import assert_matches


MODEL = tiny.llama()


def rows_of(dataset, tokenizer=None, **options):
    options = {"sequence_length": 8, **options}
    return load_calibration(CalibratedConfig(dataset=dataset, tokenizer=tokenizer, **options), MODEL)


def lists(rows):
    return [row.tolist() for row in rows]


def test_texts_are_joined_and_cut(tiny_tokenizer):
    rows = rows_of(["w0 w1 w2", "w3 w4 w5 w6 w7", "w8 w9"], tiny_tokenizer, sequence_length=4)
    eos = tiny_tokenizer.eos_token_id
    ids = tiny_tokenizer("w0 w1 w2 w3 w4 w5 w6 w7 w8 w9")["input_ids"]
    assert lists(rows) == [[*ids[:3], eos], ids[3:7], [ids[7], eos, *ids[8:10]]]


def test_a_short_text_is_one_short_row(tiny_tokenizer):
    assert lists(rows_of(["w0 w1 w2"], tiny_tokenizer)) == [tiny_tokenizer("w0 w1 w2")["input_ids"]]


def test_long_rows_are_cut_and_empty_rows_dropped():
    rows = rows_of([list(range(12)), [], [5], [6, 7]])
    assert lists(rows) == [list(range(8)), [6, 7]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_taken_out(tiny_tokenizer, side):
    tiny_tokenizer.padding_side = side
    batch = tiny_tokenizer(["w0 w1 w2 w3", "w4 w5"], padding=True, return_tensors="pt")
    expected = [tiny_tokenizer(text)["input_ids"] for text in ("w0 w1 w2 w3", "w4 w5")]
    assert lists(rows_of(batch)) == expected
    assert lists(rows_of([dict(batch)])) == expected
    assert lists(rows_of(DataLoader(Dataset.from_dict(dict(batch)).with_format("torch"), batch_size=2))) == expected


def test_token_tensor_list_and_dataset_agree():
    tokens = torch.randint(0, 64, (5, 8))
    expected = tokens.tolist()
    assert lists(rows_of(tokens)) == expected
    assert lists(rows_of(list(tokens))) == expected
    assert lists(rows_of(expected)) == expected
    assert lists(rows_of(Dataset.from_dict({"input_ids": expected}))) == expected
    assert lists(rows_of(row for row in tokens)) == expected


def test_messages_use_the_chat_template(tiny_tokenizer):
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    expected = tiny_tokenizer("<user> w1 w2 </s> <assistant> w3 </s>")["input_ids"]
    assert lists(rows_of([messages], tiny_tokenizer)) == [expected]
    assert lists(rows_of(Dataset.from_list([{"messages": messages}]), tiny_tokenizer)) == [expected]
    split = {"prompt": messages[:1], "completion": messages[1:]}
    assert lists(rows_of([split], tiny_tokenizer)) == [expected]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_files(tiny_tokenizer, tmp_path, suffix):
    path = tmp_path / f"calibration{suffix}"
    path.write_text("w0 w1 w2" if suffix == ".txt" else json.dumps({"text": "w0 w1 w2"}) + "\n")
    assert lists(rows_of(str(path), tiny_tokenizer)) == [tiny_tokenizer("w0 w1 w2")["input_ids"]]


def test_the_draw_is_seeded():
    tokens = torch.arange(60).view(20, 3)
    first = rows_of(tokens, num_samples=5, seed=1)
    assert len(first) == 5
    assert lists(first) == lists(rows_of(tokens, num_samples=5, seed=1))
    assert lists(first) != lists(rows_of(tokens, num_samples=5, seed=2))
    assert all(row in tokens.tolist() for row in lists(first))


def test_batches_hold_rows_of_one_length():
    rows = [torch.arange(n) for n in (3, 5, 3, 5, 3, 2)]
    made = list(batches(rows, batch_size=2))
    assert [tuple(batch.shape) for batch in made] == [(2, 5), (2, 3), (1, 3), (1, 2)]
    assert_matches(
        torch.cat([batch.flatten() for batch in made]).sort().values, torch.cat(rows).sort().values, "exact"
    )


REFUSED = {
    "nothing": (None, ValueError, "needs calibration data"),
    "an empty list": ([], ValueError, "no row of at least 2 tokens"),
    "one token": ([[3]], ValueError, "no row of at least 2 tokens"),
    "blank text": (["  ", ""], ValueError, "no row of at least 2 tokens"),
    "a number": (7, TypeError, "allowed are"),
    "a list of numbers with a gap": ([1.5, 2.5], TypeError, "a calibration row is a float"),
    "floats": (torch.zeros(2, 4), TypeError, "token ids are whole numbers"),
    "another column": ([{"question": "w1"}], TypeError, "question"),
    "another vocabulary": ([[1, 64]], ValueError, "another model's tokenizer"),
    "negative tokens": ([[1, -100]], ValueError, "token ids from -100"),
    "a missing file": ("/nowhere/calibration.txt", FileNotFoundError, "does not exist"),
}


@pytest.mark.parametrize("dataset, kind, words", REFUSED.values(), ids=REFUSED.keys())
def test_refused(tiny_tokenizer, dataset, kind, words):
    with pytest.raises(kind, match=words):
        rows_of(dataset, tiny_tokenizer)


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(ValueError, match="tokenizer is needed"):
        rows_of(["w0 w1 w2"])


def test_messages_without_a_template_are_refused(tiny_tokenizer):
    tiny_tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        rows_of([[{"role": "user", "content": "w1"}]], tiny_tokenizer)


def test_a_named_set_goes_through_optimum(tiny_tokenizer, monkeypatch):
    """Optimum's own loader runs on a stand-in for the download, and the global generators are left alone."""
    text = [" ".join(f"w{i % 50}" for i in range(200))]
    monkeypatch.setattr("optimum.gptq.data.load_dataset", lambda *args, **options: {"text": text})
    before, drawn = torch.random.get_rng_state(), random.getstate()
    rows = rows_of("wikitext2", tiny_tokenizer, num_samples=3, seed=4)
    assert_matches(torch.random.get_rng_state(), before, "exact")
    assert random.getstate() == drawn
    ids = tiny_tokenizer(text[0])["input_ids"]
    assert len(rows) == 3
    for row in rows:
        assert any(ids[i : i + 8] == row.tolist() for i in range(len(ids)))
    assert lists(rows) == lists(rows_of("wikitext2", tiny_tokenizer, num_samples=3, seed=4))


def test_an_unknown_set_is_an_error_of_the_loader(tiny_tokenizer):
    with pytest.raises(Exception, match="no-such-set"):
        rows_of("nobody/no-such-set", tiny_tokenizer)
