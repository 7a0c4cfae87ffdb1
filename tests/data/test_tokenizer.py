import builtins
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from jaxscale.data import ByteTokenizer, HuggingFaceTokenizer, open_tokenizer
from jaxscale.data.tokenizer import train_bpe

TEXTS = ["", "plain", "naïve 😀 \x00\r\n", "日本語"]


def write_tokenizer(folder, *, special=("<|endoftext|>",), truncate=False):
    """A word-level tokenizer.json whose post-processor adds special tokens, as Llama's does."""
    import tokenizers

    words = {word: number for number, word in enumerate(["[UNK]", "the", "cat", "sat", "mat"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    if special:
        token = (special[0], tokenizer.token_to_id(special[0]))
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[token]
        )
    if truncate:
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=4)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_decode_to_what_was_encoded(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.end_of_document]) == text


def test_bytes_have_257_ids():
    tokenizer = open_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a", "bc"])] == [[97], [98, 99]]


def test_a_character_cut_by_a_row_decodes_to_a_replacement():
    assert ByteTokenizer().decode(ByteTokenizer().encode("é")[:1]) == "\ufffd"


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_tokenizer_json_encodes_without_special_tokens(tmp_path, as_folder):
    path = write_tokenizer(tmp_path)
    tokenizer = open_tokenizer(str(tmp_path if as_folder else path))
    assert tokenizer.encode("the cat sat").tolist() == [1, 2, 3]
    assert tokenizer.encode("the").dtype == np.int32
    assert [ids.tolist() for ids in tokenizer.encode_batch(["the mat", "cat"])] == [[1, 4], [2]]
    assert tokenizer.decode(np.array([1, 2, 5])) == "the cat"
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (6, 5)


def test_truncation_and_padding_in_a_tokenizer_json_are_switched_off(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, truncate=True))
    assert [len(ids) for ids in tokenizer.encode_batch(["the cat sat on the mat", "cat"])] == [6, 1]


@pytest.mark.parametrize("eos", ["<end>", {"content": "<end>"}])
def test_the_tokenizer_config_beside_it_names_the_end_of_document(tmp_path, eos):
    path = write_tokenizer(tmp_path, special=["<|endoftext|>", "<end>"])
    fingerprint = HuggingFaceTokenizer(path).fingerprint
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    tokenizer = HuggingFaceTokenizer(path)
    assert tokenizer.end_of_document == 6
    assert tokenizer.fingerprint != fingerprint


@pytest.mark.parametrize(
    "content", ["", "[]", '"x"', '{"eos_token": 5}', '{"eos_token": ["x"]}', '{"eos_token": {}}']
)
def test_a_tokenizer_config_of_another_shape_is_named(tmp_path, content):
    path = write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match='tokenizer_config.json is not of the shape {"eos_token'):
        HuggingFaceTokenizer(path)


@pytest.mark.parametrize("content", ["{}", '{"eos_token": null}', '{"eos_token": "<gone>"}'])
def test_without_a_known_eos_token_a_usual_name_ends_documents(tmp_path, content, caplog):
    path = write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert HuggingFaceTokenizer(path).end_of_document == 5
    said = "the eos_token '<gone>' of its tokenizer_config.json is not in its vocabulary"
    assert (said in caplog.text) == ("<gone>" in content)


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no token that ends a document.*tokenizer_config.json"):
        HuggingFaceTokenizer(write_tokenizer(tmp_path, special=[]))


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"config.data.tokenizer='.*none.json' is no file, .*; give 'bytes' or"
    ):
        open_tokenizer(str(tmp_path / "none.json"))


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    for content in (b"{}", b"", b"[]", b"\xff", b'{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"config.data.tokenizer='.*' is not a tokenizer.json"):
            open_tokenizer(str(tmp_path))


def test_a_tokenizer_that_fails_at_a_text_or_has_huge_ids_is_named(tmp_path):
    path = write_tokenizer(tmp_path)
    damaged = json.loads(path.read_text())
    del damaged["model"]["vocab"]["[UNK]"]
    path.write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=r"tokenizer.json' cannot encode text: .*UNK"):
        HuggingFaceTokenizer(path).encode("unseen")
    damaged["model"]["vocab"]["mat"] = 2**31
    path.write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=r"tokenizer.json' has id 2147483648; ids are int32"):
        HuggingFaceTokenizer(path)


def test_a_tokenizer_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = write_tokenizer(tmp_path)

    def refused(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(ValueError, match=r"tokenizer.json' cannot be read: Permission denied"):
        open_tokenizer(str(path))


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    path = write_tokenizer(tmp_path)
    real_import = builtins.__import__

    def without_tokenizers(name, *rest, **options):
        if name == "tokenizers":
            raise ImportError(name)
        return real_import(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without_tokenizers)
    with pytest.raises(ValueError, match=r"pip install 'jaxscale\[data\]'"):
        open_tokenizer(str(path))


WORDS = [f"{one} {other}\n" for one in ("the cat", "a dog") for other in ("sat", "ran", "söt")] * 9


def test_a_trained_tokenizer_writes_any_text_and_its_own_in_fewer_tokens(tmp_path):
    train_bpe(WORDS, tmp_path / "a" / "b", vocab_size=270)
    tokenizer = open_tokenizer(str(tmp_path / "a" / "b"))
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (270, 0)
    for text in (*TEXTS, *WORDS):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the cat")) == 2 < len(tokenizer.encode("eht tac"))
    assert tokenizer.encode("<|endoftext|>").tolist() == [0]


def test_the_same_text_trains_the_same_tokenizer(tmp_path):
    for name in ("a", "b"):
        train_bpe(iter(WORDS), tmp_path / name, vocab_size=270)
    one, other = (open_tokenizer(str(tmp_path / name)).fingerprint for name in ("a", "b"))
    assert one == other


def test_a_text_of_few_words_gives_a_smaller_tokenizer_and_says_so(tmp_path, caplog):
    train_bpe(["ab ab"], tmp_path, vocab_size=300)
    assert open_tokenizer(str(tmp_path)).vocab_size == 259  # "ab" and " ab"
    assert caplog.messages == ["the text gives 259 tokens, not the 300 asked for"]


def test_a_trained_tokenizer_opens_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    train_bpe(WORDS, tmp_path, vocab_size=270)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), open_tokenizer(tmp_path)
    assert (theirs.eos_token_id, len(theirs)) == (ours.end_of_document, ours.vocab_size)
    for text in (*TEXTS, *WORDS):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text).tolist()
