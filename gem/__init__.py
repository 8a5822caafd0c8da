"""GEM-style ads model training: jagged attention, the GEM model and its trainer."""

from gem.ptxas import use_installed_ptxas

__version__ = "0.1.0"

# Triton reads the variables that this sets when it compiles, so that any import of gem is in time.
use_installed_ptxas()
