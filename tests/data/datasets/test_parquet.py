from pathlib import Path

import pytest
from omegaconf import OmegaConf

from gem.data.datasets import ParquetFiles


@pytest.fixture
def folder(tmp_path):
    for name in ("b.parquet", "a.parquet", "below/c.parquet", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def names(files):
    return [Path(file).name for file in files]


def test_folder_file_pattern_and_list(folder):
    assert names(ParquetFiles(str(folder)).prepare()) == ["a.parquet", "b.parquet", "c.parquet"]
    assert names(ParquetFiles(folder / "b.parquet").prepare()) == ["b.parquet"]
    assert names(ParquetFiles(f"{folder}/[ab].parquet").prepare()) == ["a.parquet", "b.parquet"]
    assert names(ParquetFiles(f"{folder}/**/*.parquet").prepare()) == [
        "a.parquet",
        "b.parquet",
        "c.parquet",
    ]
    paths = [f"{folder}/below", f"{folder}/b.parquet", f"{folder}/*.parquet"]
    assert names(ParquetFiles(paths).prepare()) == ["c.parquet", "b.parquet", "a.parquet"]
    assert ParquetFiles(OmegaConf.create(paths)).prepare() == ParquetFiles(paths).prepare()


@pytest.mark.parametrize("path", ["nothing", "*.csv", ["a.parquet", "missing.parquet"]])
def test_nothing_found(folder, path):
    paths = [f"{folder}/{p}" for p in ([path] if isinstance(path, str) else path)]
    with pytest.raises(FileNotFoundError, match=r"data.dataset.path=.* leads to no parquet file"):
        ParquetFiles(paths).prepare()


@pytest.mark.parametrize("path", [None, 3, [], "", [3]])
def test_no_path(path):
    with pytest.raises(ValueError, match=r"data.dataset.path=.*; it must be a folder, a file"):
        ParquetFiles(path)


def test_a_path_that_was_not_set():
    with pytest.raises(ValueError, match="data.dataset.path is not set"):
        ParquetFiles("???")
