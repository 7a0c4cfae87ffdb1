"""Data files and tokenizers that are not what a user took them for."""

import gzip
import os

import pytest

from jaxscale.data.tokenizer import train_bpe
from tests.mistakes.said import assert_mistake, content, write_store

PACKED = gzip.compress(os.urandom(5000))
FILES = {
    "bytes.txt": bytes(range(256)),
    "utf16.txt": "The cat sat. ".encode("utf-16"),
    "latin.txt": "café ".encode("latin-1"),
    "space.txt": b" \n \n",
    "hidden/.a.txt": b"text",
    "mixed/a.txt": b"text",
    "mixed/b.jsonl": b'{"text": "a"}\n',
    "a.zip": b"PK\x03\x04",
    "a.tar.gz": PACKED,
    "a.zst": b"zst",
    "a.json": b'[{"text": "a"}]',
    "a.csv": b"a,b\n1,2\n",
    "a.xml": b"<a/>",
    "broken.jsonl": b'{"text": "a"}\n{"text": \n',
    "body.jsonl": b'{"body": "a"}\n',
    "list.jsonl": b"[1]\n",
    "number.jsonl": b'{"text": 3}\n',
    "null.jsonl": b'{"text": null}\n',
    "blank.jsonl": b"\n\n\n",
    "no.parquet": b"no parquet",
    "empty.parquet": b"",
    "no.arrow": b"no arrow",
    "no.txt.gz": b"no gzip",
    "cut.txt.gz": PACKED[:2000],
    "readme/README.md": b"no tokenizer",
    "empty.tokenizer.json": b"",
    "bytes.tokenizer.json": bytes(range(256)),
    "list.tokenizer.json": b"[1]",
    "object.tokenizer.json": b"{}",
    "sentencepiece.model": b"\n\x0b",
}


@pytest.fixture(scope="module", autouse=True)
def files(folder):
    import pyarrow
    import pyarrow.parquet

    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), folder / "body.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), folder / "number.parquet")
    (folder / "stores").mkdir()
    write_store(folder / "stores" / "s")
    os.mkfifo(folder / "fifo")
    (folder / "dangling.txt").symlink_to("nowhere.txt")
    train_bpe(["the cat sat on the mat"], folder / "bpe", vocab_size=260)
    text = (folder / "bpe" / "tokenizer.json").read_text()
    for name, config in (("endless", ""), ("misshapen", "{")):
        (folder / name).mkdir()
        (folder / name / "tokenizer.json").write_text(
            text.replace("<|endoftext|>", "<|x|>") if name == "endless" else text
        )
        if config:
            (folder / name / "tokenizer_config.json").write_text(config)


NO_FILE, UTF_8 = ("finds no file", "give 'python-stdlib'"), ("is not UTF-8 at byte", "convert it")
FIELD = "set config.data.text_field"
# A data path, and settings behind it -> what the message says.
DATA = {
    "bytes.txt": ("bytes.txt", *UTF_8),
    "utf16.txt": ("utf16.txt", *UTF_8),
    "latin.txt": ("latin.txt", *UTF_8),
    "space.txt": ("space.txt has 5 tokens", "lower seq_len, or add text"),
    "hidden": ("config.data.path='hidden'", *NO_FILE),
    "'*.nothing'": ("config.data.path='*.nothing'", *NO_FILE),
    "''": ("config.data.path=''", *NO_FILE),
    "~/nowhere.txt": ("config.data.path='~/nowhere.txt'", *NO_FILE),
    "text/0.txt,text/1.txt": ("config.data.path='text/0.txt,text/1.txt'", *NO_FILE),
    "https://example.com/a.txt": ("config.data.path='https://example.com/a.txt'", *NO_FILE),
    "hf:wikitext": ("config.data.path='hf:wikitext'", *NO_FILE),
    "python_stdlib": ("config.data.path='python_stdlib'", *NO_FILE),
    "mixed": ("config.data.path='mixed' mixes formats", "set config.data.format"),
    "a.zip": ("config.data.path='a.zip' holds packed files", "unpack them"),
    "a.tar.gz": ("config.data.path='a.tar.gz' holds packed files", "unpack them"),
    "a.zst": ("config.data.path='a.zst' holds packed files", "unpack them"),
    "a.json": ("config.data.path='a.json'", "set config.data.format to json"),
    "a.csv": ("config.data.path='a.csv'", "set config.data.format to csv"),
    "a.xml": ("config.data.path='a.xml'", "set config.data.format to text"),
    "broken.jsonl": ("broken.jsonl line 2 is not JSON", "correct it, or leave it out"),
    "body.jsonl": ("body.jsonl line 1 has no field 'text', only ['body']", FIELD),
    "list.jsonl": ("list.jsonl line 1 holds a list", "must be an object with 'text'"),
    "number.jsonl": ("number.jsonl line 1: field 'text' holds a int", FIELD),
    "null.jsonl": ("null.jsonl: none of the 1 documents holds text", "check config.data.path"),
    "blank.jsonl": ("blank.jsonl: none of the 0 documents holds text", "config.data.text_field"),
    "no.parquet": ("no.parquet is not Parquet", "copy it again, or move it away"),
    "empty.parquet": ("empty.parquet is not Parquet", "copy it again"),
    "body.parquet": ("body.parquet has no field 'text', only ['body']", FIELD),
    "number.parquet": ("number.parquet: field 'text' holds a int64", FIELD),
    "body.parquet --config.data.text_field=": ("has no field ''", FIELD),
    "no.arrow": ("no.arrow is not Arrow", "copy it again"),
    "no.txt.gz": ("no.txt.gz cannot be read", "copy it again"),
    "cut.txt.gz": ("cut.txt.gz cannot be read", "copy it again"),
    "fifo": ("fifo is no regular file", "move it away"),
    "/dev/zero": ("/dev/zero is no regular file", "move it away"),
    "dangling.txt": ("dangling.txt cannot be read", "make it readable"),
    "stores": ("is a folder with a token store in it", "'stores/s'"),
    "stores/t": ("config.data.path='stores/t'", *NO_FILE),
    "stores/s --config.model.vocab_size=200": ("outside range(vocab_size=200)", "set config.model"),
    "stores/s --config.seq_len=40000": ("less than two rows of seq_len=40000", "lower seq_len"),
    "a.json --config.data.format=jsonl": ("a.json line 1 holds a list", "must be an object"),
    "a.csv --config.data.format=csv": ("a.csv line 1 has no field 'text'", FIELD),
    "text --config.data.format=jsonl": ("'text' holds no jsonl file", "set config.data.format"),
    "text --config.data.format=indexed": ("no such file: text.bin and text.idx", "copy both"),
    "text --config.data.cache_dir=config.py": ("the cache config.py cannot", "set config.data.cac"),
}
NO_TOKENIZER = ("is no file, and no folder with a tokenizer.json", "give 'bytes'")
DAMAGED = ("is not a tokenizer.json", "copy it again, or name another")
# config.data.tokenizer -> what the message says.
TOKENIZERS = {
    "": ("config.data.tokenizer=''", *NO_TOKENIZER),
    "byte": ("config.data.tokenizer='byte'", *NO_TOKENIZER),
    "gpt2": ("config.data.tokenizer='gpt2'", *NO_TOKENIZER),
    "meta-llama/Llama-3.2-1B": ("'meta-llama/Llama-3.2-1B'", *NO_TOKENIZER),
    "readme": ("config.data.tokenizer='readme'", *NO_TOKENIZER),
    "fifo": ("config.data.tokenizer='fifo'", *NO_TOKENIZER),
    "empty.tokenizer.json": ("'empty.tokenizer.json'", *DAMAGED),
    "bytes.tokenizer.json": ("'bytes.tokenizer.json'", *DAMAGED),
    "list.tokenizer.json": ("'list.tokenizer.json'", *DAMAGED),
    "object.tokenizer.json": ("'object.tokenizer.json'", *DAMAGED),
    "sentencepiece.model": ("'sentencepiece.model'", *DAMAGED),
    "text/0.txt": ("'text/0.txt'", *DAMAGED),
    "bpe/tokenizer_config.json": ("'bpe/tokenizer_config.json'", *DAMAGED),
    "endless": ("'endless' has no token that ends a document", "name it in a tokenizer_config"),
    "misshapen": ("misshapen/tokenizer_config.json is not of the shape", "correct it"),
    "bpe": ("'bpe' has 260 ids but vocab_size=257", "set config.model.vocab_size to 260"),
}
TABLES = (DATA, TOKENIZERS)


@pytest.mark.parametrize("path", DATA)
def test_data_that_cannot_be_read_is_told(asked, folder, path):
    answer = asked(f"train --config=config.py --workdir=unwritten --config.data.path={path}")
    assert_mistake(answer, *DATA[path])
    assert content(folder / "unwritten") == {}


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_tokenizer_that_is_none_is_told(asked, folder, tokenizer):
    setting = f"--config.data.tokenizer={tokenizer}"
    answer = asked(f"train --config=config.py --workdir=unwritten {setting}")
    assert_mistake(answer, *TOKENIZERS[tokenizer])
    assert content(folder / "unwritten") == {}
