import multiprocessing

import pytest

from gem.data.datasets.cache import prepared


def test_written_once_and_found_again(tmp_path):
    written = []

    def write(directory):
        written.append(directory)
        (directory / "b.parquet").write_text("b")
        (directory / "a.parquet").write_text("a")

    files = prepared(tmp_path / "cache", "x", {"k": 1}, write)
    assert [file.rsplit("/", 1)[1] for file in files] == ["a.parquet", "b.parquet"]
    assert prepared(tmp_path / "cache", "x", {"k": 1}, write) == files
    assert len(written) == 1
    assert prepared(tmp_path / "cache", "x", {"k": 2}, write) != files
    assert prepared(tmp_path / "cache", "y", {"k": 1}, write) != files
    assert len(written) == 3
    # Only complete directories are left.
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def write(directory):
        (directory / "a.parquet").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        prepared(tmp_path, "x", {}, write)
    assert list(tmp_path.iterdir()) == []


def test_the_first_to_finish_wins(tmp_path):
    def other(directory):
        (directory / "a.parquet").write_text("first")

    def write(directory):
        # Another process finishes while this one writes.
        prepared(tmp_path, "x", {}, other)
        (directory / "a.parquet").write_text("second")

    [file] = prepared(tmp_path, "x", {}, write)
    assert open(file).read() == "first"
    assert len(list(tmp_path.iterdir())) == 1


def _prepare(cache, barrier, queue):
    def write(directory):
        barrier.wait(30)
        (directory / "a.parquet").write_text("same")

    queue.put(prepared(cache, "x", {}, write))


def test_two_processes_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_prepare, args=(tmp_path, barrier, queue)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    files = [queue.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(30)
    assert files[0] == files[1] and open(files[0][0]).read() == "same"
    assert len(list(tmp_path.iterdir())) == 1
