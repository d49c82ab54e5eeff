"""Corpora, packing, pairs and their batches (rules 5, 20 and 30)."""

import argparse
import datetime
import inspect
import itertools
import json
import os

import numpy as np
import pytest

from jaxformer.data import DataConfig, dates, iterate, load, packing, pairs, text
from jaxformer.tokenizers import disk_cache, tokenizer

BYTE = tokenizer.Bytes()
E, P = BYTE.eos_id, BYTE.pad_id


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("JAXFORMER_CACHE", str(folder))
    return folder


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def stream_of(*texts, eos=True):
    return packing.encode(BYTE, list(texts), eos)


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


# Config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "txt"}, "unknown data.task 'txt'; did you mean 'text'"),
        ({"batchsize": 3}, "did you mean 'batch_size'"),
        ({"length": 0}, "length=0 must be at least 1"),
        ({"batch_size": 2.0}, "batch_size=2.0 must be an integer"),
        ({"seed": 2**32}, "seed=4294967296 must be at least 0 and below"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0 must be at least 0 and below 1"),
        ({"tokenizer": ""}, "data.tokenizer is empty; it must be"),
        ({"target_path": "x"}, "data.target_path has no effect with data.task='text'"),
        ({"task": "dates", "path": "x"}, "reads no path"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)


def test_pairs_without_a_path_are_refused_when_they_are_read():
    with pytest.raises(ValueError, match="needs data.path"):
        load(DataConfig(task="pairs"))


# Documents


def test_the_default_corpus_is_the_standard_library():
    found = text.documents(DataConfig())
    assert len(found.train) > 300 and 0.02 < len(found.validation) / len(found.train) < 0.3 and not found.cut
    assert all(found.train) and not set(found.train) & set(found.validation)
    names = text._standard_library()
    assert list(names) == sorted(names) and "json/decoder.py" in names
    assert names["argparse.py"] == [inspect.getsource(argparse)]
    assert len({texts[0] for texts in names.values()}) == len(names)
    assert not [name for name in names if name.startswith(("test/", "site-packages/", "_sysconfigdata")) or "/tests/" in name]
    assert found == text.documents(DataConfig())


def test_folder_glob_and_file(tmp_path):
    files = {"b.txt": "B\r\n", "a.txt": "A", "sub/c.txt": "C", "sub/d.md": "D", "empty.txt": "", ".git/h.txt": "H"}
    folder = write(tmp_path, files)
    read = lambda path: text.documents(DataConfig(path=path, validation_fraction=0.0)).train  # noqa: E731
    assert read(folder) == ["A", "B\r\n", "C", "D"]
    assert read(f"{folder}/**/*.txt") == ["A", "B\r\n", "C"]
    assert read(f"{folder}/b.txt") == ["B\r\n"]


def test_held_out_files_do_not_depend_on_the_others(tmp_path):
    names = [f"part{i:02d}" for i in range(60)]
    few, many = text.held_out(names[:40], 0.2), text.held_out(names, 0.2)
    assert few and few == many & set(names[:40]) and many - few
    for name in names:
        (tmp_path / name).write_text(name)
    found = text.documents(DataConfig(path=str(tmp_path), validation_fraction=0.2))
    assert set(found.validation) == many and sorted(found.train + found.validation) == names
    assert len(text.held_out(names[:2], 1e-9)) == 1 and len(text.held_out(names[:2], 0.999999)) == 1
    assert text.held_out(names, 0.0) == set()


def test_one_document_is_cut_and_does_not_end(tmp_path):
    path = write(tmp_path, {"one.txt": "0123456789" * 10}) + "/one.txt"
    found = text.documents(DataConfig(path=path, validation_fraction=0.25))
    assert found == (["0123456789" * 7 + "01234"], ["56789" + "0123456789" * 2], True)
    data = load(DataConfig(path=path, validation_fraction=0.25, tokenizer="byte", length=100, batch_size=1))
    assert E not in data.train[0]["targets"] and E not in data.validation[0]["targets"]
    both = load(DataConfig(path=path, validation_path=path, tokenizer="byte", length=100, batch_size=1))
    assert E in both.train[0]["targets"] and E in both.validation[0]["targets"]
    assert both.summary["train_documents"] == both.summary["validation_documents"] == 1


def test_json_lines(tmp_path):
    lines = [json.dumps({"text": c * 10, "id": 1}) for c in "abcdefgh"]
    path = write(tmp_path, {"many.jsonl": "\n".join([*lines[:3], "", *lines[3:], '{"text": ""}\n'])}) + "/many.jsonl"
    found = text.documents(DataConfig(path=path, validation_fraction=0.3))
    assert found.train == [c * 10 for c in "abcde"] and found.validation == [c * 10 for c in "fgh"] and not found.cut


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad.jsonl, line 2: not JSON"),
        ("[" * 100_000, "bad.jsonl, line 2: not JSON .*recursion"),
        ('{"body": "x", "n": 1}', "line 2: a line must be an object with a string \"text\"; this one has 'body', 'n'"),
        ('{"text": 3}', "line 2: a line must be an object"),
        ("[1]", "line 2: .*this one is a list"),
        ('{"text": "\\ud800"}', "line 2: .*surrogate"),
    ],
)
def test_json_lines_errors(tmp_path, line, message):
    path = write(tmp_path, {"bad.jsonl": '{"text": "fine"}\n' + line}) + "/bad.jsonl"
    with pytest.raises(ValueError, match=message):
        text.documents(DataConfig(path=path))


def test_path_errors(tmp_path):
    folder = write(tmp_path, {"corpus.txt": "text", "latin.txt": b"line\ncaf\xe9", "empty/e.txt": ""})
    os.makedirs(f"{folder}/nothing")
    for path, message in [
        ("corpus.text", "corpus.text does not exist; did you mean .*corpus.txt"),
        ("no/corpus.txt", "there is no folder .*no"),
        ("*.csv", "no file matches .*csv"),
        ("nothing", "no file in folder"),
        ("empty", "holds no text"),
        ("latin.txt", "latin.txt, line 2: byte 8 is not UTF-8"),
    ]:
        good, bad = f"{folder}/corpus.txt", f"{folder}/{path}"
        for cfg in (DataConfig(path=bad), DataConfig(path=good, validation_path=bad)):
            with pytest.raises(ValueError, match=message):
                text.documents(cfg)


# Windows


def test_windows_keep_documents_apart():
    stream = stream_of("abc", "de", "", "f")
    assert stream.tokens.tolist() == [97, 98, 99, E, 100, 101, E, E, 102, E] and stream.tokens.dtype == np.int32
    batch = packing.windows(stream, np.array([0, 2, 7, 10]), 5, P, segment_documents=True)
    assert batch["tokens"].tolist() == [
        [97, 98, 99, E, 100],
        [99, E, 100, 101, E],
        [E, 102, E, P, P],
        [P, P, P, P, P],
    ]
    assert batch["targets"].tolist() == [
        [98, 99, E, 100, 101],
        [E, 100, 101, E, E],
        [102, E, P, P, P],
        [P, P, P, P, P],
    ]
    assert batch["weights"].tolist() == [[1, 1, 1, 0, 1], [1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert batch["segments"].tolist() == [[1, 1, 1, 1, 2], [1, 1, 2, 2, 2], [1, 2, 2, 3, 3], [1, 1, 1, 1, 1]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 0], [0, 1, 0, 1, 2], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]
    kinds = {name: array.dtype.name for name, array in batch.items()}
    assert kinds.pop("weights") == "float32" and set(kinds.values()) == {"int32"}


def test_one_stream_trains_across_borders():
    stream = stream_of("abc", "de")
    apart, joined = (packing.windows(stream, np.array([1]), 7, P, separate) for separate in (True, False))
    assert joined.keys() == {"tokens", "targets", "weights"}
    assert np.array_equal(apart["targets"], joined["targets"])
    assert apart["weights"].tolist() == [[1, 1, 0, 1, 1, 0, 0]]
    assert joined["weights"].tolist() == [[1, 1, 1, 1, 1, 0, 0]]


def test_padding_goes_by_length():
    ids, valid = packing.pad([[5, 6, 0]], 5, pad_id=0)
    assert ids.tolist() == [[5, 6, 0, 0, 0]] and valid.tolist() == [[True, True, True, False, False]]
    batch = packing.next_token(ids, valid)
    assert batch["tokens"].tolist() == [[5, 6, 0, 0]] and batch["targets"].tolist() == [[6, 0, 0, 0]]
    assert batch["weights"].tolist() == [[1, 1, 0, 0]]
    window = packing.windows(packing.Stream(np.array([5, 6, 0], np.int32), np.array([0, 3])), np.array([0]), 4, 0, True)
    assert window["weights"].tolist() == [[1, 1, 0, 0]]
    with pytest.raises(ValueError, match="sequence 1 has 3 tokens, more than the 2 that a row holds"):
        packing.pad([[1], [1, 2, 3]], 2, 0)


def test_long_documents_are_encoded_in_parts(monkeypatch):
    whole = stream_of("0123456789", "", "ab")
    monkeypatch.setattr(packing, "_PIECE", 3)
    monkeypatch.setattr(packing, "_GROUP", 5)
    assert list(packing._pieces(["0123", ""], 3)) == [(0, "012", False), (0, "3", True), (1, "", True)]
    parts = packing._encode(BYTE, ["0123456789", "", "ab"], True)
    monkeypatch.undo()
    assert parts == packing._encode(BYTE, ["0123456789", "", "ab"], True)
    assert whole.bounds.tolist() == [0, 11, 12, 15]


# Training batches


def numbers(count, length, batch_size, rows=slice(None), **fields):
    """Training batches over tokens that tell where they stand."""
    stream = packing.Stream(np.arange(count, dtype=np.int32), np.array([0, count]))
    return packing.train_batches(stream, DataConfig(length=length, batch_size=batch_size, **fields), 0, rows)


def starts(train, steps):
    return [start for step in steps for start in train[step]["tokens"][:, 0].tolist()]


def test_an_epoch_visits_every_stratum_once_and_all_starts_are_seen():
    train = numbers(count=64, length=7, batch_size=3)  # 57 starts of full rows: 9 strata, 3 batches an epoch
    epochs = [starts(train, range(3 * e, 3 * e + 3)) for e in range(60)]
    for epoch in epochs:
        assert sorted(start // 7 for start in epoch) == list(range(9))
    orders = {tuple(start // 7 for start in epoch) for epoch in epochs}
    assert len(orders) > 50  # a new order each time
    assert set(itertools.chain(*epochs)) == set(range(57))
    assert all((train[s]["weights"] == 1).all() for s in range(20))


def test_a_batch_depends_on_step_and_seed_alone():
    train, again, other = numbers(500, 7, 3), numbers(500, 7, 3), numbers(500, 7, 3, seed=1)
    forward = [train[step] for step in range(40)]
    backward = [again[step] for step in reversed(range(40))][::-1]
    assert all(map(equal, forward, backward))
    assert not any(equal(forward[i], forward[j]) for i in range(40) for j in range(i))
    assert starts(train, range(10)) != starts(other, range(10))
    assert equal(train[10**9], again[10**9])


@pytest.mark.parametrize("task", ["text", "pairs", "dates"])
def test_resuming_yields_exactly_the_rest(tmp_path, task):
    lines = "".join(f"source {i}\ttarget {i}\n" for i in range(11))
    path = None if task == "dates" else write(tmp_path, {"a.tsv": lines}) + "/a.tsv"
    cfg = DataConfig(task=task, path=path, tokenizer="byte", length=24, batch_size=4, validation_fraction=0.05, seed=3)
    made = load(cfg)
    uninterrupted = [made.train[step] for step in range(14)]
    assert len({batch["tokens"].shape for batch in uninterrupted}) == 1  # epochs of 8 or 10 rows: no batch is cut short
    assert not any(equal(a, b) for a, b in itertools.combinations(uninterrupted, 2))
    for k in range(14):
        resumed = iterate(load(cfg).train, k)
        rest = list(itertools.islice(resumed, 14 - k))
        resumed.close()
        assert len(rest) == 14 - k and all(map(equal, rest, uninterrupted[k:]))
    with pytest.raises(ValueError, match="start=-1"):
        iterate(made.train, -1)


@pytest.mark.parametrize("task", ["text", "pairs", "dates"])
def test_a_process_reads_its_rows_only(tmp_path, task):
    lines = "".join(f"source {i}\ttarget {i}\n" for i in range(50))
    path = None if task == "dates" else write(tmp_path, {"a.tsv": lines}) + "/a.tsv"
    cfg = DataConfig(task=task, path=path, tokenizer="byte", length=24, batch_size=4)
    whole, half = load(cfg), load(cfg, rows=slice(2, 4))
    assert whole.validation_bytes == half.validation_bytes and len(whole.validation) == len(half.validation)
    for all_rows, some in [(whole.train[5], half.train[5]), (whole.validation[0], half.validation[0])]:
        assert not equal(all_rows, some)
        assert equal({name: array[2:4] for name, array in all_rows.items()}, some)


def test_a_corpus_shorter_than_a_row(tmp_path):
    path = write(tmp_path, {"a.txt": "abc", "b.txt": "xy"})
    cfg = DataConfig(path=path, tokenizer="byte", length=10, batch_size=2)
    data = load(cfg)
    assert data.train[0]["tokens"].shape == data.validation[0]["tokens"].shape == (2, 10)
    assert sorted([data.train[0]["weights"].sum() / 2, data.validation[0]["weights"].sum()]) == [2, 3]
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"the training split has too few tokens to train on \(1\)"):
        load(DataConfig(path=path, tokenizer="byte", validation_fraction=0.5))


# Validation


@pytest.mark.parametrize("count", [1, 2, 14, 15, 16, 43])
def test_validation_predicts_every_token_once(count):
    stream = packing.Stream(np.arange(count, dtype=np.int32), np.array([0, count]))
    batches = packing.validation_batches(stream, DataConfig(length=7, batch_size=2), 99)
    assert {batch["tokens"].shape for batch in batches} <= {(2, 7)}
    targets = [batch["targets"][batch["weights"] > 0] for batch in batches]
    assert [t for part in targets for t in part.tolist()] == list(range(1, count))
    assert len(batches) == -(-(count - 1) // 14)
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_validation_rows_are_spread_evenly():
    stream = packing.Stream(np.arange(101, dtype=np.int32), np.array([0, 101]))
    rows = [
        [row[0] for batch in packing.validation_batches(stream, cfg, 500) for row in batch["tokens"].tolist()]
        for cfg in (DataConfig(length=10, batch_size=3, validation_rows=most) for most in (0, 4, 99))
    ]
    assert rows[0] == rows[2] == [*range(0, 100, 10), 500, 500]
    assert rows[1] == [0, 20, 50, 70, 500, 500]


def test_validation_bytes_are_those_of_the_targets(tmp_path):
    write(tmp_path, {"train/a.txt": "plain", "valid/a.txt": "aé😀", "valid/b.txt": "xyz"})
    fields = {"path": f"{tmp_path}/train", "validation_path": f"{tmp_path}/valid", "length": 4, "batch_size": 2}
    chars = load(DataConfig(**fields, tokenizer="char"))
    assert chars.validation_bytes == (2 + 4) + 2  # neither document's first character is predicted
    joined = load(DataConfig(**fields, tokenizer="char", segment_documents=False))
    assert joined.validation_bytes == (2 + 4) + 3
    assert load(DataConfig(**fields, tokenizer="byte")).validation_bytes == 6 + 2
    assert chars.summary == {
        "vocab_size": 3 + len(set("plainaé😀xyz")),
        "train_documents": 1,
        "train_characters": 5,
        "train_tokens": 6,
        "validation_documents": 2,
        "validation_characters": 6,
        "validation_tokens": 8,
    }


def test_tokenizer_given_named_or_trained(tmp_path):
    path = write(tmp_path, {"a.txt": "the cat sat on the mat " * 30})
    trained = load(DataConfig(path=path, vocab_size=275, length=8))
    assert trained.tokenizer.vocab_size == trained.summary["vocab_size"] == 275
    saved = trained.tokenizer.save(tmp_path.parent / f"{tmp_path.name}-saved")
    again = load(DataConfig(path=path, tokenizer=str(saved), length=8))
    given = load(DataConfig(path=path, length=8), tok=trained.tokenizer)
    other = load(DataConfig(path=path, tokenizer="byte", length=8))
    assert equal(again.train[3], trained.train[3]) and equal(given.train[3], trained.train[3])
    assert not equal(other.train[3], trained.train[3])
    with pytest.raises(ValueError, match="did you mean 'unigram'"):
        load(DataConfig(path=path, tokenizer="unigramm"))


def test_text_needs_an_eos_and_pairs_a_bos(tmp_path):
    tok = tokenizer.Bytes()
    tok.eos_id = -1
    path = write(tmp_path, {"a.tsv": "a\tb\nc\td\n", "b.tsv": "e\tf\n"})
    with pytest.raises(ValueError, match="no eos id, which the end of a document needs"):
        load(DataConfig(path=path), tok)
    tok.bos_id = -1
    with pytest.raises(ValueError, match="pairs need a tokenizer with a bos id"):
        load(DataConfig(task="pairs", path=f"{path}/a.tsv"), tok)


# Pairs


def test_pairs_from_one_file_or_two(tmp_path):
    table = "a b\tx y\r\n\nc\t\n\td\nlast\tone"
    sides = {"s.txt": "a b\n\nc\n\nlast\n", "g.txt": "x y\n\n\nd\none\n"}
    folder = write(tmp_path, {"t.tsv": table, "v.tsv": "v\tw\n", **sides})
    one = DataConfig(task="pairs", path=f"{folder}/t.tsv", validation_fraction=0.0)
    two = DataConfig(task="pairs", path=f"{folder}/s.txt", target_path=f"{folder}/g.txt", validation_fraction=0.0)
    assert pairs.read(one) == ([("a b", "x y"), ("last", "one")], [], 2)
    assert pairs.read(two) == ([("a b", "x y"), ("last", "one")], [], 3)
    held = DataConfig(task="pairs", path=f"{folder}/t.tsv", validation_path=f"{folder}/v.tsv")
    assert pairs.read(held) == ([("a b", "x y"), ("last", "one")], [("v", "w")], 2)


def test_one_source_is_on_one_side(tmp_path):
    lines = [f"{i % 40}\t{i}" for i in range(200)]
    path = write(tmp_path, {"t.tsv": "\n".join(lines)}) + "/t.tsv"
    found = pairs.read(DataConfig(task="pairs", path=path))
    sources = [{source for source, _ in side} for side in (found.train, found.validation)]
    assert all(sources) and not sources[0] & sources[1] and len(found.train) + len(found.validation) == 200


def test_pairs_errors(tmp_path):
    tables = {"two.tsv": "a\tb\nc\td\te\n", "e.tsv": "\n\n", "l.tsv": b"\n\xff\t"}
    folder = write(tmp_path, {"a.txt": "1\n2\n3\n", "b.txt": "1\n2\n", **tables})
    for fields, message in [
        ({"path": "a.txt", "target_path": "b.txt"}, "a.txt has 3 lines and .*b.txt 2"),
        ({"path": "a.txt"}, "a.txt, line 1: .* it has 0 tabs; .*target_path"),
        ({"path": "two.tsv"}, "two.tsv, line 2: a line must be source, tab, target, but it has 2 tabs$"),
        ({"path": "e.tsv"}, "holds no pairs"),
        ({"path": "twos.tsv"}, "twos.tsv does not exist; did you mean .*two.tsv"),
        ({"path": "."}, "is a folder"),
        ({"path": "l.tsv"}, "l.tsv, line 2: byte 1 is not UTF-8"),
    ]:
        with pytest.raises(ValueError, match=message):
            pairs.read(DataConfig(task="pairs", **{name: f"{folder}/{file}" for name, file in fields.items()}))


def test_pair_batches(tmp_path):
    folder = write(tmp_path, {"t.tsv": "abcd\tx\na\twxyz\nab\txyz\n", "v.tsv": "abc\tx\nab\txy\nfive5\tx\n"})
    fields = {"path": f"{folder}/t.tsv", "validation_path": f"{folder}/v.tsv"}
    cfg = DataConfig(task="pairs", **fields, tokenizer="byte", source_length=3, length=4, batch_size=3)
    data, bos = load(cfg), BYTE.bos_id
    assert data.summary["long_pairs_dropped"] == 3 and data.summary["train_pairs"] == 1
    assert data.test_pairs == [("abc", "x"), ("ab", "xy")] and data.validation_bytes == 3
    batch = data.validation[0]
    assert len(data.validation) == 1 and equal(batch, data.validation[-1])
    assert batch["source"].tolist() == [[97, 98, 99], [97, 98, P], [P, P, P]]
    assert batch["source_valid"].tolist() == [[True] * 3, [True, True, False], [False] * 3]
    assert batch["tokens"].tolist() == [[bos, 120, E, P], [bos, 120, 121, E], [P] * 4]
    assert batch["targets"].tolist() == [[120, E, P, P], [120, 121, E, P], [P] * 4]
    assert batch["weights"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    assert data.train[7]["targets"].tolist() == [[120, 121, 122, E]] * 3
    too_short = DataConfig(task="pairs", **fields, tokenizer="byte", source_length=1, length=2)
    with pytest.raises(
        ValueError, match="fits data.source_length=1 and data.length=2; source_length=4 and length=5 would fit all"
    ):
        load(too_short)


# Dates


def test_dates_as_people_write_them():
    date = datetime.date(1998, 5, 3)
    assert [dates.render(date, form) for form in dates.FORMATS] == [
        "3 May 1998",
        "May 3, 1998",
        "May 3rd, 1998",
        "3rd May 1998",
        "the 3rd of May, 1998",
        "Sunday, 3 May 1998",
        "Sunday, May 3, 1998",
        "Sunday the 3rd of May 1998",
        "1998, May 3",
        "3 May 1998",
        "May 3, 1998",
        "Sun, 3 May 1998",
        "3.5.1998",
        "5/3/1998",
        "1998/05/03",
    ]
    assert dates.render(datetime.date(2024, 9, 11), "{weekday:.3} {ordinal} {short} {year}") == "Wed 11th Sept. 2024"
    ordinals = [dates._ordinal(day) for day in (1, 2, 3, 4, 12, 13, 21, 22, 23, 31)]
    assert ordinals == ["1st", "2nd", "3rd", "4th", "12th", "13th", "21st", "22nd", "23rd", "31st"]


def test_every_source_has_one_answer():
    days = [datetime.date(year, 1, 1) + datetime.timedelta(i) for year in (1911, 2024) for i in range(365)]
    answers = {}
    for date, form, case in itertools.product(days, dates.FORMATS, set(dates._CASES)):
        assert answers.setdefault(case(dates.render(date, form)), date) == date
    assert len(answers) > 20 * len(days)


def test_test_dates_are_never_trained_on():
    train, validation, test = dates.splits()
    assert len(train) + len(validation) + len(test) == len({*train, *validation, *test}) == 73_049
    assert all(600 < len(side) < 900 for side in (validation, test))
    data = load(DataConfig(task="dates", tokenizer="char", length=12, batch_size=500))
    assert len(data.test_pairs) == len(dict(data.test_pairs)) == 1000
    assert data.test_pairs == load(DataConfig(task="dates", tokenizer="char", seed=9)).test_pairs
    read = lambda rows: {data.tokenizer.decode(row) for row in rows}  # noqa: E731
    batches = list(itertools.islice(iterate(data.train), 20))
    trained = set().union(*(read(b["source"]) for b in batches)), set().union(*(read(b["targets"]) for b in batches))
    assert trained[1] <= {date.isoformat() for date in train} and len(trained[0]) > 9000
    held = [*data.test_pairs, *zip(*(read_rows(data, name) for name in ("source", "targets")), strict=True)]
    assert len(held) == 2000
    for source, target in held:
        assert source not in trained[0] and target not in trained[1]
        assert datetime.date.fromisoformat(target) in validation + test


def read_rows(data, name):
    return [data.tokenizer.decode(row) for batch in data.validation for row in batch[name] if set(row) != {0}]


def test_date_batches_say_the_date():
    data = load(DataConfig(task="dates", tokenizer="char", length=11, source_length=40, batch_size=50))
    batch, tok = data.train[0], data.tokenizer
    for source, valid, target in zip(batch["source"], batch["source_valid"], batch["targets"], strict=True):
        date = datetime.date.fromisoformat(tok.decode(target))
        written = {case(dates.render(date, form)) for form in dates.FORMATS for case in dates._CASES}
        assert tok.decode(source[valid]) in written
    assert (batch["weights"] == 1).all() and data.validation_bytes == 10_000
    with pytest.raises(ValueError, match="length=10 are too short for the dates .*length=11 are enough for all"):
        load(DataConfig(task="dates", tokenizer="byte", length=10))


# Cache


def test_results_are_kept_and_damage_is_repaired(tmp_path, own_cache, monkeypatch):
    path = write(tmp_path, {"a.txt": "the cat sat on the mat " * 30, "b.txt": "a dog and a frog " * 30})
    cfg = DataConfig(path=path, vocab_size=275, length=8, batch_size=2)
    first = load(cfg)
    entries = {entry: entry.read_bytes() for entry in own_cache.iterdir()}
    assert sorted(entry.name.split("-")[0] for entry in entries) == ["tokenizer", "tokens", "tokens"]

    def forbidden(*_):
        raise AssertionError("made again")

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_encode", forbidden)
        patch.setattr(tokenizer.train_sentencepiece, "train", forbidden)
        assert equal(load(cfg).train[0], first.train[0])
        for entry in entries:
            entry.write_bytes(b"")
            with pytest.raises(AssertionError, match="made again"):
                load(cfg)
            entry.write_bytes(entries[entry])
    flip = lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]  # noqa: E731
    another = max(entries.values(), key=len)
    for damage in (flip, lambda data: data[:-7], lambda data: data + b"more", lambda data: b"?", lambda data: another):
        for entry, data in entries.items():
            entry.write_bytes(damage(data))
        assert equal(load(cfg).train[0], first.train[0])
        assert {entry: entry.read_bytes() for entry in own_cache.iterdir()} == entries


def test_cache_keys_tell_inputs_apart():
    inputs = [("a", ["b"]), ("ab", []), ("a", "b", []), ("a", ["", "b"]), ("a", ["b", ""]), ("a", 1)]
    keys = [disk_cache.key(*parts) for parts in inputs]
    assert len(set(keys)) == len(keys) and keys == [disk_cache.key(*parts) for parts in inputs]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.folder() != tmp_path / "jaxformer"
    monkeypatch.delenv("JAXFORMER_CACHE")
    assert disk_cache.folder() == tmp_path / "jaxformer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_cache.folder() == tmp_path / ".cache" / "jaxformer"


def test_a_cache_that_cannot_be_written_only_warns(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot cache tokens.*JAXFORMER_CACHE"):
        assert stream_of("ab").tokens.tolist() == [97, 98, E]


def test_writes_are_atomic(tmp_path, monkeypatch):
    path = tmp_path / "new" / "file"
    disk_cache.write(path, b"old")

    def fail(*_):
        raise OSError(28, "disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        disk_cache.write(path, b"new")
    assert [p.name for p in path.parent.iterdir()] == ["file"] and path.read_bytes() == b"old"


def test_other_texts_of_the_same_counts_are_told_apart(tmp_path):
    """By which processes know that they read the same."""

    def read(name, word):
        (tmp_path / name).write_text(f"the {word} sat on the mat, and on and on; " * 40)
        return load(DataConfig(path=str(tmp_path / name), tokenizer="byte", length=8, batch_size=2))

    fox, xof, again = read("a.txt", "fox"), read("b.txt", "xof"), read("c.txt", "fox")
    assert fox.summary == xof.summary and fox.tokenizer.content_hash == xof.tokenizer.content_hash
    assert fox.content_hash == again.content_hash != xof.content_hash


@pytest.mark.parametrize("rows", [1, 2])
def test_batches_of_any_size_have_no_end(rows, tmp_path):
    (tmp_path / "a.txt").write_text("one two three, " * 60)
    corpus = load(DataConfig(path=str(tmp_path / "a.txt"), tokenizer="byte", length=16, batch_size=rows))
    late = 10**12
    batch = next(iterate(corpus.train, late))
    assert batch["tokens"].shape == (rows, 16)
    np.testing.assert_array_equal(batch["tokens"], corpus.train[late]["tokens"])
    assert not np.array_equal(batch["tokens"], corpus.train[late + 1]["tokens"])
