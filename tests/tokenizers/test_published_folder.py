"""What stands beside a tokenizer.json, and files that are damaged or strange."""

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer as Theirs

import jaxformer as jf
from jaxformer.tokenizers import tokenizer
from jaxformer.training import run
from tests import published_tokenizers as made

NAMES = ["qwen", "llama"]
TEXTS = ["", "  two  spaces  ", "the quick fox", "emoji 😀", "<s>a</s>", "<|im_end|>", "<think>x</think>"]


@pytest.fixture(scope="module")
def toks(tmp_path_factory):
    return {name: tokenizer.load(made.folder(tmp_path_factory.mktemp(name), name)) for name in NAMES}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}}, (1, 2, 0)),
        ({"tokenizer_config": {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}}, (1, 2, 2)),
        ({"tokenizer_config": {}, "special_tokens_map": {"eos_token": {"content": "<s>"}}}, (-1, 1, 1)),
        ({"tokenizer_config": {"eos_token": "</s>"}, "special_tokens_map": {"eos_token": "<s>"}}, (-1, 2, 2)),
        ({"tokenizer_config": {}, "generation_config": {"eos_token_id": [2, 1], "pad_token_id": 0}}, (-1, 2, 0)),
        ({"tokenizer_config": {}, "generation_config": {"eos_token_id": 2}, "config": {"eos_token_id": 1}}, (-1, 2, 2)),
        ({"tokenizer_config": {}, "config": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": -1}}, (1, 2, 2)),
        ({"tokenizer_config": {"bos_token": None}, "config": {"bos_token_id": 1}}, (-1, -1, 0)),
        ({"tokenizer_config": {}}, (-1, -1, 0)),
    ],
)
def test_control_ids_come_from_the_first_file_that_says(tmp_path, files, ids):
    tok = tokenizer.load(made.folder(tmp_path / "folder", "llama", **files))
    assert (tok.bos_id, tok.eos_id, tok.pad_id) == ids
    again = tokenizer.load(tok.save(tmp_path / "saved"))
    assert (again.bos_id, again.eos_id, again.pad_id) == ids
    assert again.content_hash == tok.content_hash


def test_an_id_to_pad_with_that_is_text_is_decoded(tmp_path):
    tok = tokenizer.load(made.folder(tmp_path, "qwen", tokenizer_config={}))
    assert tok.pad_id == 0 and tok.decode([0]) == "!"


def test_names_make_tokens_special(tmp_path):
    """A token that the config names is a control token, also where tokenizer.json does not call it special."""

    def change(values):
        for token in values["added_tokens"]:
            token["special"] = False

    free = tokenizer.load(made.folder(tmp_path / "free", "qwen", change, tokenizer_config={}))
    named = tokenizer.load(made.folder(tmp_path / "named", "qwen", change))
    (end,) = free.encode("<|im_end|>")
    assert named.eos_id == end and end not in named.encode("<|im_end|>")
    assert named.encode("<|im_end|>", special=True) == [end]


def test_tokens_that_only_the_config_has_are_added(tmp_path):
    held = json.loads(made.content("qwen"))["added_tokens"]
    new = max(token["id"] for token in held) + 1
    config = {**made.CONFIGS["qwen"], "added_tokens_decoder": {str(new): {"content": "<|tool|>", "special": True}}}
    tok = tokenizer.load(made.folder(tmp_path, "qwen", tokenizer_config=config))
    assert tok.vocab_size == new + 1
    assert tok.encode("<|tool|>", special=True) == [new] and new not in tok.encode("<|tool|>")


def test_a_model_that_would_make_control_ids_of_plain_text_refuses_it(tmp_path):
    """Unigram models hold their control tokens among their pieces, and find them in any text."""
    pieces = [["<unk>", 0.0], ["</s>", 0.0], *([c, -5.0] for c in "ab</s>▁")]
    values = {"model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))
    assert Theirs.from_file(str(tmp_path / "tokenizer.json")).encode("a</s>").ids[-1] == 1
    tok = tokenizer.load(tmp_path)
    assert tok.encode("<unk>", special=True) == [0] == tok.encode("z"), "what it does not know is no control text"
    with pytest.raises(ValueError, match="turns plain text into the control id of '</s>'"):
        tok.encode("a</s>")
    assert tok.encode("a</s>", special=True)[-1] == tok.eos_id


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded(toks, tmp_path, name):
    tok = toks[name]
    path = tok.save(tmp_path)
    assert path == tmp_path / "tokenizer.json" and (tmp_path / "tokenizer_config.json").is_file()
    for place in (path, tmp_path):
        again = tokenizer.load(place)
        assert again.content_hash == tok.content_hash
        assert again.encode_batch(TEXTS) == tok.encode_batch(TEXTS)
        assert (again.bos_id, again.eos_id, again.pad_id) == (tok.bos_id, tok.eos_id, tok.pad_id)
    assert toks["qwen"].content_hash != toks["llama"].content_hash


def test_a_run_directory_keeps_it(toks, tmp_path):
    cfg = jf.presets.llama(vocab_size=toks["qwen"].vocab_size, d_model=32, n_layers=1, n_heads=2, max_length=32)
    run.write_run(tmp_path / "run", jf.Config(model=cfg, run_dir=str(tmp_path / "run")), toks["qwen"])
    assert tokenizer.load(tmp_path / "run").content_hash == toks["qwen"].content_hash


def test_of_both_files_the_published_one_is_read(tmp_path):
    folder = made.folder(tmp_path, "qwen")
    (folder / "tokenizer.model").write_bytes(b"not read")
    assert tokenizer.load(folder).kind == "published"


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"tokenizer.json: .*install jaxformer\[hf\]"):
        tokenizer.load(made.folder(tmp_path, "qwen"))


def test_import_is_light():
    code = "import sys, jaxformer; print([m for m in ('tokenizers', 'jinja2') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# Damaged and strange files


def wrong_id(values):
    values["added_tokens"][-1]["id"] += 7


def no_id(values):
    del values["added_tokens"][-1]["id"]


@pytest.mark.parametrize(
    ("change", "files", "message"),
    [
        (wrong_id, {}, "added token '</think>' should have id"),
        (no_id, {}, "not a complete Hugging Face tokenizer.*missing field `id`"),
        (lambda values: values["model"].pop("merges"), {}, "not a complete Hugging Face tokenizer"),
        (None, {"tokenizer_config": {"eos_token": "<end>"}}, "eos_token is '<end>', which the tokenizer does not have"),
        (None, {"tokenizer_config": {"eos_token": 3.5}}, "tokenizer_config.json: eos_token=3.5 is not a token"),
        (None, {"tokenizer_config": [1]}, "tokenizer_config.json holds a JSON list"),
        (None, {"tokenizer_config": {"chat_template": 3}}, "chat_template must be a string"),
        (None, {"tokenizer_config": {"chat_template": [{"name": "x"}]}}, "chat_template must be a string"),
        (None, {"tokenizer_config": {"added_tokens_decoder": {"x": 3}}}, "added_tokens_decoder is not an object"),
        (None, {"tokenizer_config": {"added_tokens_decoder": {"9999": {"content": "<new>"}}}}, "'<new>' should have id 9999"),
        (None, {"tokenizer_config": {}, "generation_config": {"eos_token_id": 9999}}, "eos_token is 9999, which the tokenizer"),
    ],
)
def test_damaged_files_are_refused_by_path(tmp_path, change, files, message):
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*" + message) as error:
        tokenizer.load(made.folder(tmp_path, "qwen", change, **files))
    assert str(tmp_path) in str(error.value)


def test_truncated_files(tmp_path):
    content = made.content("qwen")
    for part in (0.1, 0.5, 0.99):
        (tmp_path / "tokenizer.json").write_text(content[: int(len(content) * part)], encoding="utf-8")
        with pytest.raises(ValueError, match=r"tokenizer\.json: it is not JSON"):
            tokenizer.load(tmp_path)
    made.folder(tmp_path, "qwen")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": ')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: it is not JSON"):
        tokenizer.load(tmp_path)
