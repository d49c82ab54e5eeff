"""Ids of a hub, against a server on this machine that answers as the hub does."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import published
import pytest

import jaxformer as jf
from jaxformer.cli import pretrained
from jaxformer.hf import hub as hub_module

pytest.importorskip("huggingface_hub")
COMMITS = {"main": "a" * 40, "v1": "b" * 40}


class Hub(http.server.BaseHTTPRequestHandler):
    """One model, org/tiny, of two revisions: the files of ``folders[commit]``."""

    folders: dict = {}
    asked: list = []

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def log_message(self, *args):
        pass

    def _answer(self, with_body):
        self.asked.append(self.path)
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:4] == ["api", "models", "org", "tiny"]:
            commit = self._commit(parts[5] if len(parts) > 5 else "main")
            if commit is None:
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            if parts[4:5] == ["tree"]:
                tree = [self._entry(commit, path) for path in self._files(commit)]
                return self._send(200, json.dumps(tree).encode(), {}, with_body)
            siblings = [{"rfilename": path.relative_to(self.folders[commit]).as_posix()} for path in self._files(commit)]
            return self._send(200, json.dumps({"id": "org/tiny", "sha": commit, "siblings": siblings}).encode(), {}, with_body)
        if parts[:3] == ["org", "tiny", "resolve"] and (commit := self._commit(parts[3])):
            content = (self.folders[commit] / "/".join(parts[4:])).read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
            return self._send(200, content, headers, with_body)
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)

    def _entry(self, commit, path):
        name, content = path.relative_to(self.folders[commit]).as_posix(), path.read_bytes()
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _commit(self, revision):
        return COMMITS.get(revision, revision if revision in COMMITS.values() else None)

    def _files(self, commit):
        return sorted(path for path in self.folders[commit].rglob("*") if path.is_file())

    def _send(self, status, content, headers, with_body=True):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The server's address; its revision v1 is another model than main."""
    root = tmp_path_factory.mktemp("hub")
    for revision, name in (("main", "llama"), ("v1", "gpt2")):
        folder = Hub.folders[COMMITS[revision]] = root / revision
        published.folder(folder, name)
        (folder / "pytorch_model.bin").write_bytes(b"a pickle")
        (folder / "original").mkdir()
        (folder / "original" / "model.safetensors").write_bytes(b"nobody asked for it")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield address(server.server_port)
    server.shutdown()
    server.server_close()


def address(port):
    host = "127.0.0.1"
    return f"http://{host}:{port}"


LOAD = """
import sys
import jaxformer as jf
try:
    print(jf.hf.load(*sys.argv[1:2], **dict(pair.split("=") for pair in sys.argv[2:]))[0].position)
except FileNotFoundError as error:
    print("refused:", error)
"""


def load(address, cache, *arguments):
    variables = {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", "JAX_PLATFORMS": "cpu"}
    variables |= {"HF_HUB_ETAG_TIMEOUT": "2", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run([sys.executable, "-c", LOAD, *arguments], capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_id_is_downloaded_once_and_pinned_by_its_revision(hub, tmp_path):
    assert "rope" in load(hub, tmp_path, "org/tiny")
    assert "learned" in load(hub, tmp_path, "org/tiny", f"revision={COMMITS['v1']}")
    names = {path.name for path in tmp_path.rglob("snapshots/*/*")}
    assert {"config.json", "model.safetensors"} <= names and not names & {"pytorch_model.bin", "original"}
    nowhere = address(9)
    assert "rope" in load(nowhere, tmp_path, "org/tiny"), "what is there is used without a network"
    assert "learned" in load(nowhere, tmp_path, "org/tiny", f"revision={COMMITS['v1']}")


def test_what_cannot_be_had_says_why(hub, tmp_path):
    assert "refused: org/other is not a folder, and the Hugging Face Hub has no model" in load(hub, tmp_path, "org/other")
    assert "with a revision 'v9'" in load(hub, tmp_path, "org/tiny", "revision=v9")
    offline = load(address(9), tmp_path, "org/tiny")
    assert (
        "the Hugging Face Hub cannot be reached" in offline
        and "hf download org/tiny" in offline
        and "'model*.safetensors*'" in offline
    )


def beginning(folder):
    init = jf.training.run.InitConfig(folder=str(folder))
    return jf.Config(model=jf.presets.llama(vocab_size=9, d_model=16, n_layers=1, n_heads=2), init=init, run_dir="new")


def test_a_name_that_the_hub_does_not_have_may_be_that_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match=r"quikstart is not a folder \(did you mean quickstart\?\), has not been downloaded"
    ):
        jf.hf.load("quikstart")


def test_a_path_is_no_id(tmp_path, monkeypatch):

    for path in (tmp_path / "missing", "./missing", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="is not a folder"):
            jf.hf.load(path)
    monkeypatch.setattr(hub_module, "_download", lambda name, _: pytest.fail(f"the hub was asked for {name}"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "runs"))
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "file").write_text("")
    for path in ("runs/quikstart", "./runs/quikstart", "./runs/quikstart/", tmp_path / "runs" / "quikstart", "~/quikstart"):
        for read in (jf.hf.load, pretrained.load, lambda path: pretrained.begin(beginning(path))):
            with pytest.raises(FileNotFoundError, match="quikstart is not a folder; did you mean .*runs/quickstart[?]"):
                read(path)
    with pytest.raises(FileNotFoundError, match="runs/file is not a folder but a file"):
        jf.hf.load("runs/file")
    (tmp_path / "runs" / "quickstart").rmdir()
    published.folder(tmp_path / "runs" / "quickstart", "llama")
    assert jf.hf.load("~/quickstart")[0] == jf.hf.load("runs/quickstart")[0]
    with pytest.raises(ValueError, match="needs a Hub id, but .* is a local folder"):
        jf.hf.load(tmp_path, revision="main")
