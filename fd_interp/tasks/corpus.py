"""Documents of real text, from files here or from a Hub data set."""

import glob
import io
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fd_interp.config import InputError, nearest

END = "<|endoftext|>"
"""Between the documents of a text file, as in TinyStories."""

_TITLE = re.compile(r" = [^=\s].* =\s*")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_documents(
    source: str,
    *,
    column: str = "text",
    name: str | None = None,
    split: str = "train",
    max_documents: int | None = None,
) -> list[str]:
    """The documents of `source` that are not blank, in order, at most `max_documents` of them.

    `source` is a path when it exists, begins with `.`, `/` or `~`, ends like a file that is read here or is a glob
    pattern, and else the name of a Hub data set. A folder stands for all its files, in order of their paths.

    - `.txt`: documents stand between `<|endoftext|>` marks, without the line breaks next to them. Text with WikiText
      titles (` = Title = `) is cut into its articles, every line kept. Any other file is one document.
    - `.json`, a list, and `.jsonl`, a value a line: each a string, or an object with the document at `column`.
    - `.parquet` and Hub data sets: each row's `column`, or articles where the rows are the lines of WikiText.

    A Hub data set is streamed, no further than needed, when `max_documents` is given; else it is downloaded once and
    kept by `datasets`. With `HF_HUB_OFFLINE=1` only what was kept is read.

    Raises:
        InputError: no such path or data set, no network, not UTF-8, not what the suffix says, or no text at all.
    """
    if not _is_path(source):
        documents = _hub(source, column=column, name=name, split=split, streaming=max_documents is not None)
    elif name is not None:
        raise InputError(f"name is a configuration of a Hub data set, but {source!r} is a path: leave name out")
    else:
        documents = chain.from_iterable(_READERS[path.suffix](path, column) for path in _files(source))
    kept = list(islice((document for document in documents if document.strip()), max_documents))
    if not kept:
        raise InputError(f"{source!r} holds no text")
    return kept


def _is_path(source: str) -> bool:
    looks_like_one = source.startswith((".", "/", "~")) or Path(source).suffix in _READERS or glob.has_magic(source)
    return looks_like_one or Path(source).exists()


def _files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in _READERS and file.is_file())
    elif path.exists():
        found = [path]
    else:
        found = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
    for file in found:
        if file.suffix not in _READERS:
            raise InputError(f"{str(file)!r} is not a kind of file that is read: {', '.join(_READERS)}")
    if not found:
        raise InputError(
            f"there is no folder with {', '.join(_READERS)} files at {source!r}"
            if path.is_dir()
            else f"there is no file at {source!r} (the current folder is {str(Path.cwd())!r})"
        )
    return found


def _read_text(path: Path, column: str) -> Iterator[str]:
    text = _decoded(path)
    if END in text:
        return (document.strip("\r\n") for document in text.split(END))
    return _articles(io.StringIO(text))


def _read_json(path: Path, column: str) -> Iterator[str]:
    values = _parsed(_decoded(path), str(path))
    if not isinstance(values, list):
        raise InputError(f"{str(path)!r} must be a list of documents, not {type(values).__name__}")
    return _from_rows((_cell(value, column, path) for value in values), str(path))


def _read_jsonl(path: Path, column: str) -> Iterator[str]:
    lines = enumerate(_decoded(path).split("\n"), start=1)
    values = (_parsed(line, f"{path}, line {number}") for number, line in lines if line.strip())
    return _from_rows((_cell(value, column, path) for value in values), str(path))


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except pyarrow.ArrowInvalid:
        raise InputError(f"{str(path)!r} is not a Parquet file") from None
    if column not in file.schema_arrow.names:
        raise InputError(f"{str(path)!r} has no column {column!r}, {nearest(column, file.schema_arrow.names)}")
    batches = file.iter_batches(columns=[column])
    return _from_rows(chain.from_iterable(batch.column(0).to_pylist() for batch in batches), str(path))


_READERS = {".txt": _read_text, ".json": _read_json, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _decoded(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is not UTF-8 text (byte {error.start})") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where!r} is not JSON: {error}") from None


def _cell(value: Any, column: str, path: Path) -> Any:
    if not isinstance(value, dict):
        return value
    if column not in value:
        raise InputError(f"{str(path)!r} has an object without {column!r}, {nearest(column, value)}")
    return value[column]


def _from_rows(rows: Iterable[Any], where: str) -> Iterator[str]:
    """Rows are documents, unless the first that is not blank is a title: then they are lines."""
    texts = (_checked(row, where) for row in rows)
    for first in texts:
        if first.strip():
            everything = chain([first], texts)
            return _articles(everything) if _TITLE.fullmatch(first) else everything
    return iter(())


def _checked(row: Any, where: str) -> str:
    if row is None:
        return ""
    if not isinstance(row, str):
        raise InputError(f"every document of {where!r} must be a string, not {type(row).__name__} {str(row)[:40]}")
    if not row.isascii() and any("\ud800" <= letter <= "\udfff" for letter in row):
        raise InputError(f"a document of {where!r} has half a surrogate pair, which is no Unicode text: {row[:40]!a}")
    return row


def _articles(lines: Iterable[str]) -> Iterator[str]:
    """A title after a blank line begins an article; a formula may look like a title, but stands inside a paragraph."""
    article = list[str]()
    after_blank = True
    for line in lines:
        if after_blank and _TITLE.fullmatch(line):
            yield "".join(article)
            article = []
        article.append(line)
        after_blank = not line.strip()
    yield "".join(article)


def _hub(source: str, *, column: str, name: str | None, split: str, streaming: bool) -> Iterator[str]:
    if not _HUB_NAME.fullmatch(source):
        raise InputError(f"{source!r} is neither a path nor a name of a Hub data set like 'roneneldan/TinyStories'")
    from datasets import config, load_dataset
    from datasets.exceptions import DatasetsError

    offline = config.HF_HUB_OFFLINE
    if not offline and not _hub_answers():
        raise InputError(
            f"there is no path {source!r} and the Hub does not answer: give a path, or connect to the network, "
            "or set HF_HUB_OFFLINE=1 to read what was downloaded before"
        )
    what = f"data set {source!r}" + (f" ({name})" if name else "") + (" with HF_HUB_OFFLINE=1" if offline else "")
    try:
        data: Any = load_dataset(source, name, split=split, streaming=streaming and not offline)
    except (DatasetsError, OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{what} cannot be read: {' '.join(str(error).split())}") from None
    return _from_rows(_column(data, column, what), source)


def _column(data: Any, column: str, what: str) -> Iterator[Any]:
    for batch in data.iter(batch_size=1000):
        if column not in batch:
            raise InputError(f"{what} has no column {column!r}, {nearest(column, batch)}")
        yield from batch[column]


def _hub_answers() -> bool:
    """One question with a short wait: `datasets` would try for 24 s before it gives up."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=3)
    except Exception:  # the errors of requests or of httpx, as the version has it, without a common base
        return False
    return True
