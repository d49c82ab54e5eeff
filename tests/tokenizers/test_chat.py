"""Chat templates: what they see and may do, and conversations as ids."""

import sys
from datetime import datetime

import pytest

from jaxformer.tokenizers import tokenizer
from tests import published_tokenizers as made
from tests.published_tokenizers import TURNS, assistant, loaded, user

LOOP = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("chat"))


def test_a_conversation_is_the_templates_text(tok):
    talk = [user("hi"), assistant("Hello!"), user(" <b>&'\n ")]
    # a block's line is taken away whole (trim_blocks, lstrip_blocks); one inside a line only as far as it goes
    lines = ["user:hi", "assistant:Hello!", "user: <b>&'\n "]
    text = "".join(f"    <|im_start|>{line}<|im_end|>\n" for line in lines)
    assert tok.chat(talk) == text
    assert tok.chat(talk, add_generation_prompt=True) == text + "<|im_start|>assistant:"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é>\'"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", r'"\u00e9"'),
        (LOOP, "02"),
        ("a\n  {% if true %}\n b{% endif %}", "a\n b"),
        ("a{% generation %}b{% set x = 1 %}{% endgeneration %}c{{ x is defined }}", "abcFalse"),
        ("{{ eos_token }}{{ pad_token }}{{ bos_token is defined }}", "<|im_end|><|endoftext|>False"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueFalse"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{{ messages[0]['content'].split('é')[0].strip() }}", "<"),
    ],
)
def test_what_templates_rely_on(tok, template, text):
    assert tok.chat([user("<é>'")], template=template) == text


def test_tools_and_variables_reach_the_template(tok):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    template = "{{ tools[0].function.name }}{{ mood }}{{ eos_token }}{{ documents[0].title }}"
    text = tok.chat([user("x")], tools=[tool], template=template, mood="!", eos_token="E", documents=[{"title": "T"}])
    assert text == "f!ET"


def test_messages_as_interfaces_give_them(tok):
    """None stands for what is not there; reasoning has had several names."""
    template = "{% for m in messages %}{{ m.tool_calls is defined }}{{ m.reasoning_content }}{{ m.thinking }};{% endfor %}"
    talk = [assistant("a", tool_calls=None), assistant("a", reasoning="why"), assistant("a", thinking="so", reasoning=None)]
    assert tok.chat(talk, template=template) == "False;Falsewhywhy;Falsesoso;"
    assert talk[1] == assistant("a", reasoning="why"), "the caller's own stay as they are"


def test_of_several_templates_one_is_chosen(tmp_path):
    several = [{"name": name, "template": f"{name}!"} for name in ("default", "tool_use", "rag")]
    tok = loaded(tmp_path / "several", several)
    assert [tok.chat([user("x")], template=name) for name in (None, "rag", "{{ 'own' }}")] == ["default!", "rag!", "own"]
    assert tok.chat([user("x")], tools=[{}]) == "tool_use!"
    with pytest.raises(ValueError, match="no chat template 'defualt'; did you mean 'default'"):
        tok.chat([user("x")], template="defualt")
    without = loaded(tmp_path / "without", several[1:])
    with pytest.raises(ValueError, match=r"no default; pass template= with one of \['rag', 'tool_use'\]"):
        without.chat([user("x")])


def test_template_files_go_before_the_config_and_are_kept(tmp_path):
    folder = made.folder(tmp_path / "files", "qwen", tokenizer_config={**made.CONFIGS["qwen"], "chat_template": "old"})
    before = tokenizer.load(folder)
    (folder / "chat_template.jinja").write_text("new\n{{ messages[0].content }}", encoding="utf-8")
    tok = tokenizer.load(folder)
    assert (before.chat([user("x")]), tok.chat([user("x")])) == ("old", "new\nx")
    assert before.content_hash != tok.content_hash
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag", encoding="utf-8")
    both = tokenizer.load(folder)
    assert (both.chat([user("x")]), both.chat([user("x")], template="rag")) == ("new\nx", "rag")
    for one in (tok, both):
        again = tokenizer.load(one.save(tmp_path / "saved"))
        assert again.chat([user("x")]) == "new\nx" and again.content_hash == one.content_hash


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[0]['__class__'] }}",
        "{{ messages | attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ namespace.__init__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_stays_in_its_sandbox(tok, template):
    with pytest.raises(ValueError, match="the chat template failed: (access to|.*unsafe|Range too big|.*safe)"):
        tok.chat([user("x")], template=template)


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (
            [user("x")],
            {"template": "{{ raise_exception('roles must alternate') }}"},
            "the chat template failed: roles must alternate",
        ),
        ([user("x")], {"template": "{% if %}"}, "cannot be parsed: .*[Ee]xpected"),
        ([user("x")], {"template": "{{ 'a' + 1 }}"}, "the chat template failed: can only concatenate"),
        ([user("x")], {"template": "{{ messages[3].role.name }}"}, "the chat template failed: .*has no element 3"),
        ([], {}, "messages must be a list"),
        ("hi", {}, "messages must be a list"),
        (user("x"), {}, "messages must be a list"),
        (["hi"], {}, r"messages\[0\] must be a dict .*, not str"),
        ([user(object())], {}, r"messages\[0\]\['content'\] is object"),
        ([user("x")], {"tools": "f"}, "tools must be a list"),
        ([user("x")], {"tools": [print]}, "tools must be a list of JSON schemas"),
        ([user("x")], {"helper": print}, "helper is builtin_function_or_method"),
    ],
)
def test_what_is_wrong_is_said(tok, messages, options, message):
    with pytest.raises(ValueError, match=message):
        tok.chat(messages, **options)


def test_without_a_template(tmp_path):
    for tok in (loaded(tmp_path, None), tokenizer.load("byte")):
        for call in (tok.chat, tok.encode_chat):
            with pytest.raises(ValueError, match="no chat template"):
                call([user("x")])
    assert loaded(tmp_path, None).chat([user("x")], template="{{ messages[0].content }}") == "x"


def test_templates_without_jinja_say_what_to_install(tok, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"install jaxformer\[hf\]"):
        tok.chat([user("x")])


# Ids


def test_ids_of_a_conversation_have_the_templates_controls(tok):
    start, end = (tok.encode(text, special=True)[0] for text in ("<|im_start|>", "<|im_end|>"))
    ids = tok.encode_chat([user("hi")], add_generation_prompt=True)
    inner = [tok.encode(text) for text in ("    ", "user:hi", "\n", "assistant:")]
    assert ids == [*inner[0], start, *inner[1], end, *inner[2], start, *inner[3]]
    assert tok.encode("<think>x")[0] in tok.encode_chat([assistant("<think>x")]), "text, though it has one id"


@pytest.mark.parametrize(
    ("messages", "options", "where"),
    [
        ([user("a"), user("b<|im_end|>")], {}, r"messages'\]\[1\]\['content'\]"),
        ([{"role": "user<|im_end|>", "content": ""}], {}, r"\[0\]\['role'\]"),
        ([user([{"type": "text", "text": "<|im_end|>"}])], {}, r"\['content'\]\[0\]\['text'\]"),
        ([assistant("", tool_calls=[{"name": "f", "arguments": {"<|im_end|>": 1}}])], {}, "a key of"),
        ([user("a")], {"tools": [{"name": "<|im_end|>"}]}, r"tools'\]\[0\]"),
        ([user("a")], {"documents": [{"text": "<|im_end|>"}]}, "documents"),
        ([user("a")], {"mood": "<|im_end|>"}, "mood"),
    ],
)
def test_control_text_in_a_conversation_is_refused(tok, messages, options, where):
    with pytest.raises(ValueError, match=where + r".* holds '<\|im_end\|>'.*allow_special=True"):
        tok.encode_chat(messages, **options)
    more = tok.encode_chat(messages, allow_special=True, **options)
    assert more == tok.encode(tok.chat(messages, **options), special=True)


def test_control_text_that_a_normalizer_makes_is_refused(tmp_path):
    """A token that is looked for in normalized text is found where its characters are written otherwise."""

    def change(values):
        values["normalizer"] = {"type": "NFKC"}
        for token in values["added_tokens"]:
            token["normalized"] = True

    config = {**made.CONFIGS["qwen"], "chat_template": TURNS}
    tok = tokenizer.load(made.folder(tmp_path, "qwen", change, tokenizer_config=config))
    wide = "＜|im_end|＞"
    assert tok.eos_id in tok.encode(wide, special=True)
    with pytest.raises(ValueError, match=r"holds '<\|im_end\|>'"):
        tok.encode_chat([user(wide)])
