import copy
import math
import pickle
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_interp.config import InputError
from fd_interp.tasks.task import Batch, Task
from fd_interp.tasks.text import TextCorpus

END = "<|endoftext|>"
WORDS = ["the", "cat", "dog", "ran", "sat", "Zoë", "said", "“hi”", "and", "then", "went", "home", "."]


def stories(n: int, seed: int = 0) -> list[str]:
    """Different from each other, of more than fifty letters each."""
    draw = random.Random(seed)
    return [f"{number}: " + " ".join(draw.choices(WORDS, k=draw.randint(25, 40))) for number in range(n)]


def written(path: Path, documents: list[str]) -> str:
    path.write_bytes(f"\n{END}\n".join(documents).encode())
    return str(path)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("text") / "stories.txt", stories(60))


@pytest.fixture(scope="module")
def task(source: str) -> TextCorpus:
    return TextCorpus(source=source, vocab=290, context=8, smoothing=2.0)


@pytest.fixture(scope="module")
def real_tasks(shared_data: Path) -> dict[str, TextCorpus]:
    files = {"tinystories": "tinystories/train_head.txt", "wikitext": "wikitext-2/valid.txt"}
    return {name: TextCorpus(source=str(shared_data / file)) for name, file in files.items()}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def training_ids(task: TextCorpus) -> list[int]:
    """The training text of `task`, which is made of the first 54 of 60 stories, one document at a time."""
    separator = task.token_strings().index(END)
    return [token for story in stories(60)[:54] for token in [separator, *task.encode(story).tolist()]][1:]


def stream(windows: torch.Tensor) -> list[int]:
    """The text that windows overlapping by one token were cut from."""
    return [windows[0, 0].item(), *windows[:, 1:].flatten().tolist()]


class TestWindows:
    @settings(max_examples=25, deadline=None)
    @given(st.integers(1, 40), st.integers(2, 40), st.floats(0.05, 0.95), st.integers(0, 99))
    def test_no_token_is_lost_but_the_tail(
        self, tmp_path_factory: pytest.TempPathFactory, context: int, n: int, fraction: float, seed: int
    ) -> None:
        documents = stories(n, seed)
        path = written(tmp_path_factory.getbasetemp() / "packed.txt", documents)
        task = TextCorpus(source=path, vocab=257, context=context, held_out_fraction=fraction)
        held_out = min(n - 1, max(1, round(n * fraction)))
        for part, windows in ((documents[:-held_out], "train_windows"), (documents[-held_out:], "held_out_windows")):
            cut = getattr(task, windows)
            assert torch.equal(cut[:-1, -1], cut[1:, 0])
            assert cut.shape[1] == context + 1
            assert int(cut.max()) < task.d_vocab == 257
            text = END.join(part)
            n_tokens = sum(len(document.encode()) for document in part) + len(part) - 1
            assert 0 <= n_tokens - len(stream(cut)) < context
            assert text.startswith(task.decode(torch.tensor(stream(cut))).rstrip("\ufffd"))

    def test_the_separator_stands_between_documents_and_nowhere_else(self, task: TextCorpus) -> None:
        separator = task.token_strings().index(END)
        ids = stream(task.train_windows)
        documents = task.decode(torch.tensor(ids)).split(END)
        assert documents[:-1] == stories(60)[: len(documents) - 1]
        assert ids.count(separator) == len(documents) - 1
        assert ids[0] != separator

    def test_no_held_out_document_is_trained_on(self, tmp_path: Path) -> None:
        first, last = stories(20), stories(5, seed=1)
        last[2] = first[3]
        task = TextCorpus(source=written(tmp_path / "a.txt", first + last), vocab=260, context=4, held_out_fraction=0.2)
        trained = task.decode(torch.tensor(stream(task.train_windows)))
        held_out = task.decode(torch.tensor(stream(task.held_out_windows))).split(END)
        assert len(held_out) == 4
        assert all(document not in trained for document in held_out[:-1])
        assert first[3] in trained

    def test_no_document_is_lost_among_thousands(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.txt", [str(number) for number in range(3000)])
        task = TextCorpus(source=path, vocab=257, context=1, held_out_fraction=0.5)
        held_out = task.decode(torch.tensor(stream(task.held_out_windows))).split(END)
        assert held_out == [str(number) for number in range(1500, 3000)]

    def test_a_single_document_is_cut_in_two(self, tmp_path: Path) -> None:
        [text] = stories(1)
        task = TextCorpus(source=written(tmp_path / "a.txt", [text * 10]), vocab=257, context=4, held_out_fraction=0.25)
        parts = [task.decode(torch.tensor(stream(cut))) for cut in (task.train_windows, task.held_out_windows)]
        cut = round(0.75 * len(text * 10))
        assert (text * 10)[:cut].startswith(parts[0].rstrip("\ufffd"))
        assert (text * 10)[cut:].startswith(parts[1].rstrip("\ufffd"))


class TestSampling:
    def test_samples_are_training_windows_and_all_of_them(self, task: TextCorpus) -> None:
        tokens, targets = task.sample(20_000, generator())
        assert tokens.shape == targets.shape == (20_000, 8)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        drawn = Counter(map(tuple, torch.cat([tokens, targets[:, -1:]], dim=1).tolist()))
        windows = Counter(map(tuple, task.train_windows.tolist()))
        assert drawn.keys() == windows.keys()
        expected = 20_000 / windows.total()
        assert all(abs(drawn[w] - c * expected) < 6 * math.sqrt(c * expected) for w, c in windows.items())

    def test_held_out_windows_are_distinct_and_at_most_all(self, task: TextCorpus) -> None:
        every = sorted(task.held_out_windows[:, :-1].tolist())
        assert sorted(task.held_out(10**6, generator()).tokens.tolist()) == every
        some = task.held_out(len(every) - 1, generator()).tokens.tolist()
        assert len(some) == len(every) - 1
        assert not Counter(map(tuple, some)) - Counter(map(tuple, every))

    @pytest.mark.parametrize("draw", ["sample", "held_out"])
    def test_a_batch_is_a_function_of_the_generator(self, task: TextCorpus, draw: str) -> None:
        def batch(seed: int) -> Batch:
            return getattr(task, draw)(6, generator(seed))

        assert torch.equal(batch(1).tokens, batch(1).tokens)
        assert not torch.equal(batch(1).tokens, batch(2).tokens)

    def test_a_batch_is_no_view_of_the_text(self, task: TextCorpus) -> None:
        before = task.train_windows.clone()
        for part in task.sample(5, generator()):
            part.zero_()
        assert torch.equal(task.train_windows, before)


class TestPredictors:
    def test_the_bigram_is_its_formula(self, task: TextCorpus) -> None:
        ids = training_ids(task)
        seen, pairs, followed = Counter(ids), Counter(pairwise(ids)), Counter(ids[:-1])
        tokens = torch.tensor([[0, 5, 289, ids[3]], [ids[4], ids[-1], 100, ids[0]]])
        for row, log_probs in zip(tokens.tolist(), task.bayes(tokens), strict=True):
            for last, log_prob in zip(row, log_probs.tolist(), strict=True):
                for token in range(290):
                    unigram = (seen[token] + 1) / (len(ids) + 290)
                    p = (pairs[last, token] + 2.0 * unigram) / (followed[last] + 2.0)
                    assert log_prob[token] == pytest.approx(math.log(p), abs=1e-12)

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.integers(0, 289), min_size=1, max_size=20))
    def test_rows_sum_to_one_and_nothing_is_impossible(self, task: TextCorpus, tokens: list[int]) -> None:
        log_probs = task.bayes(torch.tensor([tokens]))
        assert log_probs.shape == (1, len(tokens), 290)
        assert torch.allclose(log_probs.exp().sum(-1), torch.ones(1, len(tokens), dtype=torch.float64), atol=1e-12)
        assert log_probs.isfinite().all()

    def test_only_the_last_token_counts(self, task: TextCorpus) -> None:
        one, other = task.bayes(torch.tensor([[66, 67, 68], [90, 67, 69]]))
        assert torch.equal(one[1], other[1])
        assert not torch.equal(one[2], other[2])

    def test_after_a_token_that_never_occurs_the_unigram_is_left(self, source: str) -> None:
        task = TextCorpus(source=source, vocab=257)
        seen = task.token_frequencies()
        assert seen[256] == 0
        [after_nothing, after_something] = task.bayes(torch.tensor([[256, task.frequent(1)[0]]]))[0].exp()
        n = len(training_ids(task))
        assert torch.allclose(after_nothing, (seen * n + 1) / (n + 257), atol=1e-12)
        assert not torch.allclose(after_something, after_nothing, atol=1e-2)

    @pytest.mark.parametrize("wrong", [-1, 290])
    def test_tokens_outside_the_vocabulary(self, task: TextCorpus, wrong: int) -> None:
        with pytest.raises(InputError, match=r"tokens must be in \[0, 290\)"):
            task.bayes(torch.tensor([[0, wrong]]))

    def test_bayes_has_the_loss_of_the_last_baseline(self, task: TextCorpus) -> None:
        tokens, targets = task.held_out(10**6, generator())
        loss = -task.bayes(tokens).gather(-1, targets[..., None]).mean().item()
        assert task.baselines()[-1].loss == pytest.approx(loss, abs=1e-12)

    def test_the_unigram_baseline_is_its_formula(self, task: TextCorpus) -> None:
        uniform, unigram, _ = task.baselines()
        assert uniform.loss == pytest.approx(math.log(290))
        ids = training_ids(task)
        p = {token: (ids.count(token) + 1) / (len(ids) + 290) for token in range(290)}
        targets = task.held_out_windows[:, 1:].flatten().tolist()
        assert unigram.loss == pytest.approx(-sum(math.log(p[token]) for token in targets) / len(targets))

    def test_frequencies_are_those_of_the_training_text(self, task: TextCorpus) -> None:
        frequencies = task.token_frequencies()
        ids = training_ids(task)
        assert frequencies.dtype == torch.float64
        assert frequencies.sum().item() == pytest.approx(1, abs=1e-12)
        assert frequencies.tolist() == pytest.approx([ids.count(token) / len(ids) for token in range(290)])

    def test_entropies_of_a_text_that_is_known(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.txt", ["abaacaab" * 50, "ab" * 20])
        task = TextCorpus(source=path, vocab=257, context=4)
        # a a b, a a c, a b a, a c a ... : letters a, b, c are 5, 2, 1 of 8.
        assert task.unigram_entropy() == pytest.approx(-sum(p * math.log(p) for p in (5 / 8, 2 / 8, 1 / 8)))
        after_a = (2 / 5, 2 / 5, 1 / 5)  # after b and c there is always a
        assert task.bigram_entropy() == pytest.approx(5 / 8 * -sum(p * math.log(p) for p in after_a), rel=5e-3)

    def test_frequent_tokens(self, tmp_path: Path) -> None:
        task = TextCorpus(source=written(tmp_path / "a.txt", ["cccbba" * 5, "abc" * 5]), vocab=257, context=4)
        assert [task.token_strings()[token] for token in task.frequent(3)] == ["c", "b", "a"]
        for k in (0, 4):
            with pytest.raises(InputError, match=r"k must be in \[1, 3\]"):
                task.frequent(k)

    @pytest.mark.parametrize("name", ["tinystories", "wikitext"])
    def test_knowing_more_is_better_on_real_text(self, real_tasks: dict[str, TextCorpus], name: str) -> None:
        task = real_tasks[name]
        assert [baseline.name for baseline in task.baselines()] == ["uniform", "unigram", "bigram"]
        uniform, unigram, bigram = (baseline.loss for baseline in task.baselines())
        assert bigram < unigram - 1 < uniform - 2
        assert task.bigram_entropy() < task.unigram_entropy() < uniform
        # The training text is large for 300 tokens, so its entropies are nearly the held-out losses.
        assert unigram == pytest.approx(task.unigram_entropy(), abs=0.03)
        assert bigram == pytest.approx(task.bigram_entropy(), abs=0.08)


class TestTokenizer:
    @given(st.text(st.characters(codec="utf-8"), max_size=60))
    def test_decoding_undoes_encoding(self, task: TextCorpus, text: str) -> None:
        tokens = task.encode(text)
        assert task.decode(tokens) == text
        assert ((tokens >= 0) & (tokens < task.d_vocab)).all()

    def test_text_never_becomes_a_special_token(self, task: TextCorpus) -> None:
        for same in (task, pickle.loads(pickle.dumps(task)), copy.deepcopy(task)):
            assert task.token_strings().index(END) not in same.encode(f"a{END}b").tolist()

    def test_the_most_that_the_text_supports_is_said_and_works(self, source: str) -> None:
        with pytest.raises(InputError, match=r"supports at most \d+ tokens, not 5000") as raised:
            TextCorpus(source=source, vocab=5000).token_frequencies()
        supported = int(str(raised.value).split("at most ")[1].split()[0])
        assert 290 < supported < 5000
        assert len(TextCorpus(source=source, vocab=supported).token_strings()) == supported
        with pytest.raises(InputError, match="supports at most"):
            TextCorpus(source=source, vocab=supported + 1).token_strings()

    def test_a_pair_must_be_seen_twice_to_become_a_token(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.txt", ["ab ab", "cd"])
        with pytest.raises(InputError, match="supports at most 258 tokens"):
            TextCorpus(source=path, vocab=259, context=1).token_strings()
        assert TextCorpus(source=path, vocab=258, context=1).token_strings()[-1] == "ab"

    def test_held_out_text_does_not_choose_the_tokens(self, tmp_path: Path) -> None:
        documents = [*["abcd " * 40] * 9, "wxyz " * 400]
        strings = TextCorpus(source=written(tmp_path / "a.txt", documents), vocab=260, context=4).token_strings()
        assert set(strings[257:]) <= {"ab", "cd", "abcd", " abcd", " ab", "bc", "bcd", "abc", " a", " abc"}

    def test_strings_read_as_text_and_tell_tokens_apart(self, task: TextCorpus) -> None:
        strings = task.token_strings()
        assert len(set(strings)) == len(strings) == 290
        assert {END, "a", "\n", " ", "ë", " the", "<0x80>", "<0xE2><0x80>", "<0xFF>"} <= set(strings)
        assert "".join(strings[token] for token in task.encode("the cat, then.\n")) == "the cat, then.\n"

    def test_somebodys_tokenizer(self, source: str, shared_data: Path) -> None:
        folder = shared_data / "stories260K" / "tok512_hf"
        task = TextCorpus(source=source, tokenizer=str(folder), separator="<s>", context=8)
        assert task.d_vocab == 512
        assert task.decode(task.encode("Once upon a time, there was")) == "Once upon a time, there was"
        assert {" the", " he", "he", "<s>"} <= set(task.token_strings())
        assert task.train_windows.eq(task.token_strings().index("<s>")).any()
        assert TextCorpus(source=source, tokenizer=str(folder / "tokenizer.json"), separator="<s>").d_vocab == 512

    def test_its_vocabulary_is_known_without_the_text(self, shared_data: Path) -> None:
        folder = shared_data / "stories260K" / "tok512_hf"
        assert TextCorpus(source="absent.txt", tokenizer=str(folder), separator="<s>").d_vocab == 512
        assert TextCorpus(source="absent.txt").d_vocab == 300

    def test_a_vocabulary_with_holes_and_a_tokenizer_that_cuts_and_pads(self, source: str, tmp_path: Path) -> None:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, END: 4, "the": 9}, unk_token="?"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=200)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        task = TextCorpus(source=source, tokenizer=str(tmp_path), context=4)
        assert task.d_vocab == len(task.token_frequencies()) == len(task.token_strings()) == 10
        n_words = sum(len(story.split()) for story in stories(60)[:54])
        assert 0 <= n_words + 53 - len(stream(task.train_windows)) < 4

    def test_its_separator_must_be_known(self, source: str, shared_data: Path) -> None:
        task = TextCorpus(source=source, tokenizer=str(shared_data / "stories260K" / "tok512_hf"))
        with pytest.raises(InputError, match=r"no token '<\|endoftext\|>'; its special tokens: <unk>, <s>, </s>"):
            task.train_windows  # noqa: B018

    def test_no_tokenizer_there(self, source: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"there is no .*tokenizer\.json"):
            TextCorpus(source=source, tokenizer=str(tmp_path)).token_strings()
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(InputError, match=r"is not a tokenizer\.json"):
            TextCorpus(source=source, tokenizer=str(tmp_path)).token_strings()


class TestValue:
    def test_it_is_a_task(self, task: TextCorpus) -> None:
        assert isinstance(task, Task)
        assert (task.d_vocab, task.n_ctx) == (290, 8)

    def test_json_gives_it_back_before_and_after_reading(self, source: str) -> None:
        task = TextCorpus(source=source, vocab=280, context=4, held_out_fraction=0.3)
        before = task.model_dump_json()
        same = TextCorpus.model_validate_json(before)
        assert task.fingerprint == same.fingerprint
        assert task.model_dump_json() == before
        assert task == same
        assert hash(task) == hash(same)
        assert task != TextCorpus(source=source, vocab=281, context=4, held_out_fraction=0.3)

    def test_a_changed_copy_reads_anew(self, task: TextCorpus) -> None:
        assert len(task.model_copy(update={"vocab": 280}).token_strings()) == 280
        assert task.model_copy(update={"context": 4}).train_windows.shape[1] == 5
        assert task.model_copy() == task
        with pytest.raises(InputError, match="held_out_fraction"):
            task.model_copy(update={"held_out_fraction": 2})

    def test_the_fingerprint_tells_texts_and_windows_apart(self, task: TextCorpus, tmp_path: Path) -> None:
        documents = stories(60)
        same = TextCorpus(source=written(tmp_path / "same.txt", documents), vocab=290, context=8)
        other_end = TextCorpus(source=written(tmp_path / "other.txt", [*documents[:-1], "!"]), vocab=290, context=8)
        assert same.fingerprint == task.fingerprint
        changes = [{"context": 9}, {"vocab": 289}, {"held_out_fraction": 0.2}, {"max_documents": 59}]
        others = [other_end, *(task.model_copy(update=change) for change in changes)]
        assert len({task.fingerprint, *(other.fingerprint for other in others)}) == 6

    def test_another_process_makes_the_same_tokens(self, task: TextCorpus) -> None:
        program = (
            "import sys; from fd_interp.tasks.text import TextCorpus;"
            "heavy = {'tokenizers', 'datasets', 'pyarrow', 'transformer_lens'} & set(sys.modules);"
            "print(TextCorpus.model_validate_json(sys.argv[1]).fingerprint, *heavy)"
        )
        ran = subprocess.run([sys.executable, "-c", program, task.model_dump_json()], capture_output=True, text=True)
        assert ran.stdout.strip() == task.fingerprint, ran.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "TextCorpus needs the field 'source'"),
        ({"source": ""}, "source"),
        ({"source": "a.txt", "vocab": 256}, "vocab: .* greater than 256, not 256"),
        ({"source": "a.txt", "context": 0}, "context"),
        ({"source": "a.txt", "held_out_fraction": 0.0}, "held_out_fraction"),
        ({"source": "a.txt", "held_out_fraction": 1.0}, "held_out_fraction"),
        ({"source": "a.txt", "smoothing": 0.0}, "smoothing"),
        ({"source": "a.txt", "max_documents": 0}, "max_documents"),
        ({"source": "a.txt", "separator": ""}, "separator"),
        ({"source": "a.txt", "vocabulary": 300}, "no field 'vocabulary', did you mean vocab"),
    ],
)
def test_wrong_fields(fields: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TextCorpus(**fields)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([""], "holds no text"),
        (["abc", "d" * 40], r"the training text of .* has 3 tokens, fewer than one window of 9"),
        (["abcdefgh", "d" * 40], r"the training text of .* has 8 tokens, fewer than one window of 9"),
        (["abc" * 9, "d"], r"the held-out text of .* has 1 tokens, fewer than one window of 9"),
        (["abc" * 9, "abc" * 9], r"the held-out text of .* has 0 tokens"),
        (["x"], r"the training text of .* has 1 tokens"),
    ],
)
def test_texts_too_small(tmp_path: Path, documents: list[str], message: str) -> None:
    task = TextCorpus(source=written(tmp_path / "a.txt", documents), vocab=257, context=8)
    for use in (task.baselines, task.token_frequencies, lambda: task.sample(1, generator())):
        with pytest.raises(InputError, match=message):
            use()


def test_every_field_about_the_source_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"column": "story", "name": "small", "split": "validation", "max_documents": 3}

    def read(source: str, **fields: str | int) -> list[str]:
        assert (source, fields) == ("owner/stories", where)
        return stories(3)

    monkeypatch.setattr("fd_interp.tasks.text.read_documents", read)
    assert len(TextCorpus(source="owner/stories", vocab=257, **where).train_windows) > 0


def test_a_window_that_just_fits(tmp_path: Path) -> None:
    task = TextCorpus(source=written(tmp_path / "a.txt", ["abcdefghi", "rstuvwxyz"]), vocab=257, context=8)
    assert task.decode(task.sample(1, generator()).targets[0]) == "bcdefghi"
    assert task.decode(task.held_out(1, generator()).targets[0]) == "stuvwxyz"


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        TextCorpus(source=str(tmp_path / "absent.txt")).sample(1, generator())
