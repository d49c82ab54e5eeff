"""Text at URLs, in a file system in memory and on a web server: copied once, and again where it has changed."""

import functools
import http.server
import os
import sys
import threading

import fsspec
import pytest

from jaxformer.data import DataConfig, remote
from jaxformer.data.folder import files
from jaxformer.data.pairs import _lines
from jaxformer.data.text import documents


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    for name, text in {"a.txt": "first", "b.txt": "second", "deep/c.txt": "third", "d.jsonl": '{"text": "fourth"}'}.items():
        system.pipe(f"/bucket/{name}", text.encode())
    return system


def test_a_url_means_what_the_path_would(memory, tmp_path):
    """The same names, and so the same documents held out."""
    for name in ("a.txt", "b.txt", "deep/c.txt", "d.jsonl"):
        (tmp_path / "bucket" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bucket" / name).write_bytes(memory.cat(f"/bucket/{name}"))
    for pattern in ("bucket", "bucket/*.txt", "bucket/**/*.txt", "bucket/a.txt", "bucket/deep"):
        url, path = f"memory://{pattern}", str(tmp_path / pattern)
        assert list(files(url)) == list(files(path))
        assert documents(DataConfig(path=url)) == documents(DataConfig(path=path))
    pairs = "one\teins\ntwo\tzwei\n"
    memory.pipe("/bucket/pairs.tsv", pairs.encode())
    (tmp_path / "pairs.tsv").write_text(pairs)
    assert _lines("memory://bucket/pairs.tsv") == _lines(str(tmp_path / "pairs.tsv"))


def test_a_file_is_copied_once_and_again_when_it_has_changed(memory, monkeypatch):
    copied, get = [], memory.get_file
    monkeypatch.setattr(type(memory), "get_file", lambda self, path, to: (copied.append(path), get(path, to)))
    assert documents(DataConfig(path="memory://bucket", validation_fraction=0.0)).train == [
        "first",
        "second",
        "fourth",
        "third",
    ]
    files("memory://bucket")
    assert len(copied) == 4
    memory.pipe("/bucket/b.txt", b"changed")
    memory.rm("/bucket/a.txt")
    assert documents(DataConfig(path="memory://bucket", validation_fraction=0.0)).train == ["changed", "fourth", "third"]
    assert copied[4:] == ["/bucket/b.txt"]


def test_a_copy_that_was_interrupted_is_made_again(memory, monkeypatch):
    get = memory.get_file

    def fails(self, path, to):
        if path.endswith("b.txt"):
            with open(to, "wb") as file:
                file.write(b"sec")
            raise ConnectionError("reset by peer")
        get(path, to)

    monkeypatch.setattr(type(memory), "get_file", fails)
    with pytest.raises(ValueError, match="memory://bucket cannot be read: ConnectionError: reset by peer"):
        files("memory://bucket")
    monkeypatch.setattr(type(memory), "get_file", lambda self, path, to: get(path, to))
    assert files("memory://bucket")["b.txt"].read_text() == "second"


def test_many_at_once_copy_once(memory, monkeypatch):
    copied, get = [], memory.get_file
    monkeypatch.setattr(type(memory), "get_file", lambda self, path, to: (copied.append(path), get(path, to)))
    threads = [threading.Thread(target=files, args=("memory://bucket",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(copied) == [f"/bucket/{name}" for name in ("a.txt", "b.txt", "d.jsonl", "deep/c.txt")]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/none.txt", "memory://bucket/none.txt cannot be read: there is no such file"),
        ("memory://bucket/*.csv", r"no file at memory://bucket/\*.csv"),
        ("nothing://bucket/a.txt", "nothing://bucket/a.txt cannot be read: Protocol not known: nothing"),
        ("s3://bucket/a.txt", r"pip install 'jaxformer\[s3\]'"),
        ("gs://bucket/a.txt", r"pip install 'jaxformer\[gcs\]'"),
        ("http://" + "127.0.0.1:9/a.txt", "127.0.0.1:9/a.txt cannot be read: .*Cannot connect to host"),
    ],
)
def test_what_cannot_be_read_is_named(memory, url, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match=message):
        files(url)


def test_names_that_lead_out_of_the_copy_are_refused():
    with pytest.raises(ValueError, match="does not lie below"):
        remote._relative("/bucket/../../etc/passwd", "/bucket")


def test_a_web_server(tmp_path):
    (tmp_path / "text.txt").write_text("served")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = "http://" + f"127.0.0.1:{server.server_port}/text.txt"
        try:
            assert documents(DataConfig(path=url)).train[0].startswith("serve")
            os.utime(tmp_path / "text.txt", (1, 1))
            (tmp_path / "text.txt").write_text("anew, and longer")
            assert documents(DataConfig(path=url)).train[0].startswith("anew")
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(ValueError, match="cannot be read"):
        files(url.replace("text", "none"))
