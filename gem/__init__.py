"""GEM-style ads model training: jagged attention, the GEM model and its trainer."""

__version__ = "0.1.0"
