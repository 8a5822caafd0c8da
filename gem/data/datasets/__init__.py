"""Data sets: each has `prepare()`, which returns parquet files for the loader."""

from gem.data.datasets.movielens import MovieLens
from gem.data.datasets.parquet import ParquetFiles
from gem.data.datasets.synthetic import Synthetic

__all__ = ["MovieLens", "ParquetFiles", "Synthetic"]
