"""Data sets of a user's own: by import path, by rows, from an iterator; what is refused."""

import itertools

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.config.strict import from_dict, to_dict
from jaxformer.data import FromIterator, iterate, load
from jaxformer.tokenizers import tokenizer

LENGTH, ROWS = 4, 6


def batch_of(step):
    tokens = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH) + step
    return {"tokens": tokens, "targets": tokens + 1, "weights": np.ones((ROWS, LENGTH), np.float32)}


class Plain:
    """Only what a data set must have."""

    def __init__(self, cfg):
        self.cfg, self.train, self.validation = cfg, self, [batch_of(-1)]

    def __getitem__(self, step):
        if step >= 100:
            raise IndexError("a hundred steps are all there is")
        return batch_of(step)


class Full(Plain):
    """Everything that a data set may have."""

    summary, validation_bytes, content_hash = {"rows": 7}, 5, "hash"

    def __init__(self, cfg, tokenizer=None, rows=None):
        super().__init__(cfg)
        self.given, self.tokenizer = (tokenizer, rows), jf.tokenizer.train("char", ["abc"])


no_function = 3


def nothing(cfg):
    return object()


def config(name, **fields):
    return jf.DataConfig(
        **{"task": f"test_data_custom:{name}", "tokenizer": "byte", "batch_size": ROWS, "length": LENGTH} | fields
    )


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_train_is_a_function_of_the_step_from_any_start():
    data = load(config("Plain"))
    assert data.tokenizer.kind == "byte" and data.summary == {} and data.test_pairs == []
    for step, batch in zip((3, 4, 5), iterate(data.train, 3), strict=False):
        equal(batch, batch_of(step))
    assert (batch_of(3)["tokens"] != batch_of(4)["tokens"]).any()
    (held_out,) = data.validation
    equal(held_out, batch_of(-1))


def test_a_process_has_its_rows_only():
    rows = np.array([1, 4])
    data = load(config("Plain"), rows=rows)
    for found, step in ((data.train[2], 2), (data.validation[0], -1)):
        equal(found, {name: x[rows] for name, x in batch_of(step).items()})
    whole = load(config("Full"), rows=rows).train[0]  # which was told the rows, and makes what it will
    assert len(whole["tokens"]) == ROWS


def test_what_a_data_set_may_have_is_used():
    tok = tokenizer.train("byte", [])
    data = load(config("Full"), tok, slice(None))
    assert (data.summary, data.validation_bytes, data.content_hash) == ({"rows": 7}, 5, "hash")
    assert data.tokenizer.kind == "char"
    assert load(config("Plain"), tok).tokenizer is tok


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "txet"}, r"unknown data.task 'txet'; did you mean 'text'\? \(or give 'package.module:name'\)"),
        ({"task": "test_data_custom:Plane"}, "has no 'Plane'; did you mean 'Plain'"),
        ({"task": "no_such_module:x"}, "cannot import 'no_such_module'"),
        ({"task": "test_data_custom:no_function"}, "must be a function of the DataConfig, not 3"),
        ({"task": "test_data_custom:nothing"}, "made object, which lacks train and validation"),
        (
            {"tokenizer": "unigram"},
            "has no text to train a unigram tokenizer on: give it an attribute tokenizer, or set data.tokenizer",
        ),
    ],
)
def test_what_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        load(config("Plain", **fields))


def test_without_a_tokenizer_it_is_bytes():
    assert load(config("Plain", tokenizer=jf.DataConfig().tokenizer)).tokenizer.kind == "byte"


def test_an_end_of_the_data_is_told():
    data = load(config("Plain"))
    with pytest.raises(ValueError, match="the data set has no batch for step 100: a hundred steps"):
        list(itertools.islice(iterate(data.train, 98), 3))


def test_an_iterator_is_asked_in_order_and_begun_anew_for_an_earlier_step():
    begun = []

    def batches():
        begun.append(0)
        for step in range(6):
            begun[-1] += 1
            yield batch_of(step)

    train = FromIterator(batches)
    for step in (0, 1, 4):  # 2 and 3 are made and dropped
        equal(train[step], batch_of(step))
    assert begun == [5]
    equal(train[1], batch_of(1))
    assert begun == [5, 2]
    with pytest.raises(IndexError, match="the iterator ended after 6 batches"):
        train[6]


def test_a_config_is_written_and_read_without_the_module():
    """A run can be loaded and sampled from where its data set cannot be imported."""
    cfg = config("Plain", task="gone:Data")
    assert from_dict(jf.DataConfig, to_dict(cfg), trust=True) == cfg
    with pytest.raises(ValueError, match="cannot import 'gone'"):
        load(cfg)
