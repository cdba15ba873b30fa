import json
from pathlib import Path

import datasets
import huggingface_hub.utils
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_interp.config import InputError
from fd_interp.tasks.corpus import read_documents

STORIES = ["One day\nit rained.", "Zoë said “no”.", "The end"]
ARTICLES = [
    " = First = \n \n It says <unk> . \n \n = = Part = = \n \n where k is \n = 1 <unk> and k = \n of it . \n \n",
    " = Second ( 1990 ) = \n \n More – text . \n",
]


def written(path: Path, text: str) -> str:
    path.write_bytes(text.encode())
    return str(path)


class TestTextFiles:
    @pytest.mark.parametrize("mark", ["<|endoftext|>", "\n<|endoftext|>\n", "\r\n<|endoftext|>\r\n"])
    def test_stories_stand_between_marks(self, tmp_path: Path, mark: str) -> None:
        assert read_documents(written(tmp_path / "a.txt", mark.join([*STORIES, ""]))) == STORIES

    def test_articles_begin_at_titles_and_keep_every_line(self, tmp_path: Path) -> None:
        assert read_documents(written(tmp_path / "a.txt", "".join(ARTICLES))) == ARTICLES

    def test_a_text_without_marks_is_one_document_as_it_is(self, tmp_path: Path) -> None:
        text = "A = B = C\n\n = not closed\n\r\nlast\u2028line "
        assert read_documents(written(tmp_path / "a.txt", text)) == [text]

    def test_a_byte_order_mark_is_no_text(self, tmp_path: Path) -> None:
        assert read_documents(written(tmp_path / "a.txt", "\ufeffHello")) == ["Hello"]

    def test_real_wikitext_has_sixty_articles_and_nothing_is_lost(self, shared_data: Path) -> None:
        for part in ("valid", "test"):
            path = shared_data / "wikitext-2" / f"{part}.txt"
            articles = read_documents(str(path))
            assert len(articles) == 60
            assert "".join(articles).strip() == path.read_bytes().decode().strip()

    def test_real_stories(self, shared_data: Path) -> None:
        stories = read_documents(str(shared_data / "tinystories" / "train_head.txt"))
        assert len(stories) == 2317
        assert stories[0].startswith("One day, a little girl named Lily found a needle")


class TestRows:
    @pytest.fixture(params=["list.json", "objects.json", "strings.jsonl", "objects.jsonl", "rows.parquet"])
    def make(self, request: pytest.FixtureRequest, tmp_path: Path):
        def write(rows: list[str | None]) -> str:
            path = tmp_path / request.param
            values = rows if request.param.startswith(("list", "strings")) else [{"story": row, "n": 1} for row in rows]
            if path.suffix == ".parquet":
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), path)
                return str(path)
            lines = "\n".join(json.dumps(value, ensure_ascii=False) for value in values)
            return written(path, json.dumps(values) if path.suffix == ".json" else lines + "\n")

        return write

    def test_every_row_is_a_document(self, make) -> None:
        rows = [*STORIES, "line\u2028separator"]
        assert read_documents(make(rows), column="story") == rows

    def test_blank_and_missing_rows_are_left_out(self, make) -> None:
        assert read_documents(make([None, *STORIES[:2], " \n", "", STORIES[2]]), column="story") == STORIES

    def test_rows_that_are_lines_of_wikitext_become_articles(self, make) -> None:
        lines = [line for article in ARTICLES for line in article.splitlines(keepends=True)]
        hub_form = [line if line.strip() else "" for line in ["", *lines]]
        expected = [article.replace("\n \n", "\n") for article in ARTICLES]
        assert read_documents(make(hub_form), column="story") == expected

    def test_no_more_than_asked(self, make) -> None:
        assert read_documents(make(["", *STORIES]), column="story", max_documents=2) == STORIES[:2]


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip), min_size=1))
def test_json_gives_back_any_list_of_texts(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    assert read_documents(written(path, json.dumps(texts))) == texts


class TestManyFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "deep").mkdir()
        written(tmp_path / "b.txt", "from b")
        written(tmp_path / "a.jsonl", '"from a"\n"and a"')
        written(tmp_path / "deep" / "c.txt", "from c")
        written(tmp_path / "notes.md", "not read")
        return tmp_path

    def test_a_folder_is_read_in_order_of_paths(self, folder: Path) -> None:
        assert read_documents(str(folder)) == ["from a", "and a", "from b", "from c"]

    def test_a_glob(self, folder: Path) -> None:
        assert read_documents(str(folder / "*.txt")) == ["from b"]
        assert read_documents(str(folder / "**" / "*.txt")) == ["from b", "from c"]

    def test_files_after_the_last_document_are_not_opened(self, folder: Path) -> None:
        written(folder / "z.json", "not JSON")
        assert read_documents(str(folder), max_documents=4)[-1] == "from c"
        with pytest.raises(InputError, match=r"z\.json' is not JSON"):
            read_documents(str(folder), max_documents=5)

    def test_home(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(folder))
        assert read_documents("~/b.txt") == ["from b"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n<|endoftext|>\n", "holds no text"),
        ("a.txt", b"caf\xe9", r"not UTF-8 text \(byte 3\)"),
        ("a.json", b"[1", "not JSON"),
        ("a.json", b'{"text": "a"}', "must be a list of documents, not dict"),
        ("a.json", b"[]", "holds no text"),
        ("a.json", b"[5]", "must be a string, not int 5"),
        ("a.json", b'["\\ud83d"]', "half a surrogate pair"),
        ("a.json", b'[{"txt": "a"}]', "object without 'text', did you mean txt"),
        ("a.jsonl", b'"a"\n\n{"text"', r"a\.jsonl, line 3' is not JSON"),
        ("a.parquet", b"PAR1", "not a Parquet file"),
        ("a.csv", b"text\nhello", r"not a kind of file that is read: \.txt, \.json, \.jsonl, \.parquet"),
    ],
)
def test_bad_files(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_documents(str(tmp_path / file))


def test_parquet_without_the_column_offers_those_it_has(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"texts": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="no column 'text', did you mean texts"):
        read_documents(str(tmp_path / "a.parquet"))


class Hub:
    """Stands in for the network: what was asked, and a data set to answer with."""

    def __init__(self, rows: list[str]) -> None:
        self.rows = rows
        self.asked: list[dict] = []
        self.rows_read = 0

    def load_dataset(self, path: str, name: str | None, *, split: str, streaming: bool):
        self.asked.append({"path": path, "name": name, "split": split, "streaming": streaming})
        return datasets.IterableDataset.from_generator(self._count) if streaming else self._all()

    def _all(self) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"text": self.rows})

    def _count(self):
        for row in self.rows:
            self.rows_read += 1
            yield {"text": row}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(STORIES * 1000)
    monkeypatch.setattr(datasets, "load_dataset", hub.load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    answering(monkeypatch, lambda url, timeout: None)
    return hub


def answering(monkeypatch: pytest.MonkeyPatch, head) -> None:
    session = type("Session", (), {"head": staticmethod(head)})()
    monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: session)


def refuse(*_, **__):
    raise ConnectionError("Name or service not known")


class TestHub:
    def test_the_whole_data_set_is_downloaded(self, hub: Hub) -> None:
        assert read_documents("owner/stories", name="small", split="validation") == STORIES * 1000
        assert hub.asked == [{"path": "owner/stories", "name": "small", "split": "validation", "streaming": False}]

    def test_a_part_of_it_is_streamed_and_no_further_than_needed(self, hub: Hub) -> None:
        assert read_documents("owner/stories", max_documents=2) == STORIES[:2]
        assert hub.asked[0]["streaming"]
        assert 2 <= hub.rows_read < len(hub.rows)

    @pytest.mark.parametrize("max_documents", [None, 2])
    def test_wikitext_rows_become_articles(self, hub: Hub, max_documents: int | None) -> None:
        hub.rows = ["", " = A = \n", "", " text \n", "", " = = B = = \n", "", " = C = \n", " more \n"]
        articles = read_documents("Salesforce/wikitext", max_documents=max_documents)
        assert articles == [" = A = \n text \n = = B = = \n", " = C = \n more \n"]

    @pytest.mark.parametrize("max_documents", [None, 2])
    def test_a_missing_column(self, hub: Hub, max_documents: int | None) -> None:
        with pytest.raises(
            InputError, match=r"data set 'owner/stories' \(small\) has no column 'txt', did you mean text"
        ):
            read_documents("owner/stories", name="small", column="txt", max_documents=max_documents)

    def test_no_network_is_said_at_once(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        answering(monkeypatch, refuse)
        with pytest.raises(InputError, match="the Hub does not answer"):
            read_documents("owner/stories")
        assert hub.asked == []

    def test_offline_reads_what_was_kept_without_asking(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        answering(monkeypatch, refuse)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        assert read_documents("owner/stories", max_documents=2) == STORIES[:2]
        assert not hub.asked[0]["streaming"]

    @pytest.mark.parametrize(
        "error",
        [
            ValueError("BuilderConfig 'x' not found.\nAvailable: ['y']"),
            datasets.exceptions.DatasetNotFoundError("Dataset 'x' doesn't exist"),
            ConnectionError("Couldn't reach 'x' on the Hub (OfflineModeIsEnabled)"),
            RuntimeError("Dataset scripts are no longer supported"),
        ],
    )
    def test_what_the_hub_refuses_is_one_sentence(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        def fail(*_, **__):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(InputError, match=r"^data set 'owner/stories' cannot be read: [^\n]*$"):
            read_documents("owner/stories")

    @pytest.mark.parametrize(
        "source",
        ["stories.txt", "data/stories.jsonl", "a/b.parquet", "./stories", "/no/stories", "~/no-stories", "no/*"],
    )
    def test_a_path_that_is_not_there_never_asks_the_hub(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        answering(monkeypatch, pytest.fail)
        with pytest.raises(InputError, match="there is no file at"):
            read_documents(source)
        assert hub.asked == []

    @pytest.mark.parametrize("source", ["a/b/c", "my stories", "owner/"])
    def test_neither_path_nor_name(self, hub: Hub, source: str) -> None:
        with pytest.raises(InputError, match="neither a path nor a name"):
            read_documents(source)
        assert hub.asked == []

    def test_a_folder_that_is_there_goes_before_a_name(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "owner" / "stories").mkdir(parents=True)
        with pytest.raises(
            InputError, match=r"no folder with \.txt, \.json, \.jsonl, \.parquet files at 'owner/stories'"
        ):
            read_documents("owner/stories")
        written(tmp_path / "owner" / "stories" / "a.txt", "local")
        assert read_documents("owner/stories") == ["local"]
        assert hub.asked == []

    def test_a_configuration_of_a_path_is_a_mistake(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="leave name out"):
            read_documents(written(tmp_path / "a.txt", "text"), name="wikitext-2-raw-v1")
