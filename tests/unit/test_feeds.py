"""The feeds of a run, and what toast-feed does with them: frames made by hand, a FIFO."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hand_made import EOS, answer, draw, drawn, head, kinds, step

from tests.conftest import Toast
from toastkit.errors import DataError, NoInputError
from toastkit.frames import End, Frame, Head, Token, Tokens, pack_ids
from toastkit.session.feed import OPEN_SECONDS, FeedMessage, FeedReader, FeedWriter
from toastkit.session.run import RunDirectory, feed_of
from toastkit.stages.feed import bare_ids, feed_tokens
from toastkit.stages.run.pipe_feed import PipeFeed


@pytest.fixture
def reader(run: Path) -> Iterator[FeedReader]:
    made = FeedReader(run / "feed")
    yield made
    made.close()


def test_a_pipe_feed_reaches_decode(tmp_path: Path, run: Path, reader: FeedReader) -> None:
    """Nobody is told of a run that is over."""
    frames = draw([head(run=str(tmp_path / "gone")), *answer(3)[1:]], PipeFeed())
    assert drawn(frames) == [3]
    draw([head(run=str(run)), *answer(3)[1:]], PipeFeed(send=False))
    assert reader.read_available() == []
    feed = PipeFeed()
    draw([head(run=str(run)), *answer(3, EOS)[1:]], feed)
    assert reader.read_available() == [FeedMessage(2, 3), FeedMessage(3, EOS, None, True)]
    feed.begin(head(run=str(run)))
    feed.close("stop")
    feed.finish()
    assert reader.read_available() == [FeedMessage(None, None, None, True)]


def test_one_sampler_feeds_several_decodes(tmp_path: Path) -> None:
    """Their prompts differ in length, so that each takes the token for its own next one."""
    readers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        os.mkfifo(tmp_path / name / "feed", 0o600)
        readers.append(FeedReader(tmp_path / name / "feed"))
    both = head(run=[str(tmp_path / "a"), str(tmp_path / "b")])
    draw([both, *answer(3, EOS)[1:]], PipeFeed())
    for reader in readers:
        assert reader.read_available() == [
            FeedMessage(None, 3), FeedMessage(None, EOS, None, True),
        ]  # fmt: skip
        reader.close()


def test_feed_tokens_sends_and_passes_on(run: Path, reader: FeedReader) -> None:
    stream = [
        head(run=str(run)), Tokens(pack_ids([1])), step(1, 3), Token(1, 3), Token(2, EOS),
        Token(3, 4), head(run=str(run)), Token(1, 2),
    ]  # fmt: skip
    frames = list(feed_tokens(stream[:5] + stream[6:], str(run), False))
    assert kinds(frames) == [Head, Tokens, Token, Token, End, Head, Token, End]
    assert [f for f in frames if type(f) is End] == [End("eos", 2), End("stop", 1)]
    ends = [FeedMessage(2, EOS, None, True), FeedMessage(1, 2), OVER]
    assert reader.read_available() == [FeedMessage(1, 3), *ends]


def test_an_end_of_turn_that_is_ignored_ends_no_run(run: Path, reader: FeedReader) -> None:
    """Of a run that is given another answer may come; of one that a head names none does."""
    answers = [
        head(run=str(run)), Token(1, EOS), End("length", 1),
        head(run=str(run)), Token(2, 3), End("length", 1),
    ]  # fmt: skip
    for given, between in ((str(run), []), (None, [OVER])):
        assert list(feed_tokens(answers, given, True)) == answers
        sent = [FeedMessage(1, EOS), *between, FeedMessage(2, 3), OVER]
        assert reader.read_available() == sent


def test_bare_ids() -> None:
    """Neither thousands of digits nor zeros before the first are more than a number."""
    given = io.BytesIO(b"1 22\n\n333 0 007 4294967295")
    assert list(bare_ids(given)) == [Token(-1, n) for n in (1, 22, 333, 0, 7, 4294967295)]
    wrong = (b"-2", b"x", b"\xff", "²".encode(), "\u0663".encode(), b"4294967296", b"9" * 5000)
    for word in (*wrong, b"1" + b"0" * 5000):
        with pytest.raises(DataError, match="^cannot read line 2: .* is not a token id"):
            list(bare_ids(io.BytesIO(b"1\n" + word)))


OVER = FeedMessage(None, None, None, True)


def unreadable(*before: Frame) -> Iterator[Frame]:
    yield from before
    raise DataError("cannot read line 2")


@pytest.mark.parametrize("sent", [[], [Token(-1, 3)]])
def test_a_decode_hears_of_a_stream_that_cannot_be_read(run: Path, reader, sent: list) -> None:
    """Also where nothing was sent yet; it would wait for ever."""
    with pytest.raises(DataError, match="line 2"):
        list(feed_tokens(unreadable(*sent), str(run), False))
    assert reader.read_available() == [*(FeedMessage(None, t.id) for t in sent), OVER]


def test_a_decode_hears_of_every_other_end(run: Path, reader: FeedReader) -> None:
    """Without tokens, that of a saved answer, which may have been cut off sooner than decode's
    would be, and that of whoever reads on."""
    for stream in ([], [End("eos", 0)]):
        assert list(feed_tokens(stream, str(run), False)) == []
        assert reader.read_available() == [OVER]
    stream = [head(run=str(run)), Token(1, 3), End("length", 1)]
    assert list(feed_tokens(stream, None, False)) == stream
    assert reader.read_available() == [FeedMessage(1, 3), OVER]
    stage = feed_tokens([head(run=str(run)), Token(1, 3), Token(2, 4)], None, False)
    assert kinds([next(stage), next(stage)]) == [Head, Token]
    stage.close()
    assert reader.read_available() == [FeedMessage(1, 3), OVER]


def test_toast_feed_finds_the_one_run_of_a_session(toast: Toast, tmp_path: Path) -> None:
    """Nothing ends before the last of the ids, or where --end is not given."""
    session = tmp_path / "session"
    run = RunDirectory.create(session)
    reader = FeedReader(feed_of(run.path))
    for words in ["5", "6"], ["7", "8", "--end"], ["--end"]:
        assert toast("feed", "--session", str(session), *words).returncode == 0
    sent = [(message.pos, message.id, message.end) for message in reader.read_available()]
    assert sent == [(None, id, id in (8, None)) for id in (5, 6, 7, 8, None)]
    reader.close()
    other = RunDirectory.create(session)
    done = toast("feed", "--session", str(session), "5")
    assert done.returncode == 66 and b"has 2 runs to feed\n" in done.stderr
    run.remove()
    other.remove()


def test_nobody_comes_to_a_run_that_is_over(tmp_path: Path):
    """As after kill -9. A decode that is only late is waited for."""
    alive, killed = (RunDirectory.create(tmp_path / name) for name in ("a", "b"))
    killed.close()
    started = time.monotonic()
    with pytest.raises(NoInputError, match="no decode is reading"):
        FeedWriter([feed_of(killed.path)])
    assert time.monotonic() - started < OPEN_SECONDS / 2
    opened = []
    thread = threading.Thread(target=lambda: opened.append(FeedWriter(feed_of(alive.path))))
    thread.start()
    time.sleep(0.02)
    joined = RunDirectory.join(alive.path)
    reader = FeedReader(feed_of(alive.path))
    thread.join()
    opened[0].send(1, 2)
    assert reader.read_available() == [FeedMessage(1, 2)]
    for end in (opened[0], reader, joined, alive):
        end.close()


def test_a_sampler_does_not_wait_for_a_run_that_has_ended_since(tmp_path: Path) -> None:
    """As that of a decode whose prefill was killed before the first step."""
    made = RunDirectory.create(tmp_path)
    feed = PipeFeed()
    feed.begin(head(run=str(made.path)))
    made.remove()
    started = time.monotonic()
    feed.close("error")
    assert time.monotonic() - started < OPEN_SECONDS / 2 and not feed.awaited
    made = RunDirectory.create(tmp_path)
    feed.begin(head(run=str(made.path)))
    removing = threading.Timer(0.02, made.remove)
    removing.start()
    feed.close("error")
    assert time.monotonic() - started < OPEN_SECONDS / 2 and not feed.awaited
    removing.join()
