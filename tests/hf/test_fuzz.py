"""Whatever is changed in a file, reading it gives a value that can be used, or ValueError or FileNotFoundError: no other error,
no end of the process, in two seconds of computing and 500 MB. Where a file has a checksum, the value is the intact file's.

``fuzzing.changes`` draws the changes; ``FOUND`` holds those that once had another outcome.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests import fuzzing

NAMES = (
    "tokenizer.json, byte-level",
    "tokenizer.json, byte fallback",
    "beside a tokenizer.json",
    "chat template",
    "SentencePiece",
    "SentencePiece, NFKC",
    "char",
    "safetensors",
    "safetensors, sharded",
    "msgpack",
    "cached tokens",
    "cached tokenizer",
)
FOUND = [
    ("beside a tokenizer.json", {"config.json": b'{"pad_token_id": true}'}),
    ("beside a tokenizer.json", {"tokenizer_config.json": b'{"bos_token": -1}'}),
    ("beside a tokenizer.json", {"tokenizer_config.json": b'{"bos_token": 1099511627776}'}),
    ("beside a tokenizer.json", {"tokenizer_config.json": b'{"additional_special_tokens": true}'}),
    ("beside a tokenizer.json", {"tokenizer_config.json": b'{"added_tokens_decoder": {"0": {"content": "x", "lstrip": 1}}}'}),
    ("safetensors, sharded", {"model.safetensors.index.json": b'{"weight_map": {"a": "%b"}}' % (b"x" * 5000)}),
]


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    return fuzzing.readers(tmp_path_factory.mktemp("intact"))


def values(readers, name, folder, examples, number=0):
    """The outcomes of that many changes of an intact folder."""
    reader, outcomes = readers[name], []
    intact = fuzzing.outcome(reader, reader.files, folder)
    assert not isinstance(intact, Exception), intact

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(fuzzing.changes)
    def read(drawn):
        files = fuzzing.changed(reader.files, drawn)
        outcomes.append(fuzzing.outcome(reader, files, folder))
        assert not reader.keeps or outcomes[-1] == intact

    with fuzzing.cache_at(folder.parent / "cache"):
        read()
    return outcomes


def test_all_readers_are_there(readers):
    assert set(readers) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_changed_files(readers, name, tmp_path):
    outcomes = values(readers, name, tmp_path / "changed", examples=25)
    refused = [value for value in outcomes if isinstance(value, fuzzing.REFUSALS)]
    assert len(outcomes) >= 25 and (readers[name].keeps or len(refused) > 5), "most changes leave nothing to read"


@pytest.mark.parametrize("name", NAMES)
def test_more_changed_files(readers, name, tmp_path):
    values(readers, name, tmp_path / "changed", examples=400, number=1)


@pytest.mark.parametrize(("name", "files"), FOUND)
def test_what_was_found(readers, name, files, tmp_path):
    reader = readers[name]
    fuzzing.outcome(reader, reader.files | files, tmp_path)
