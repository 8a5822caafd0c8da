"""GEM-style ads model training: jagged attention, the GEM model and its trainer."""

from gem.inductor import compile_in_process
from gem.ptxas import use_installed_ptxas

__version__ = "0.1.0"

# Triton and Inductor read the variables that these set when they compile, so that any import of gem
# is in time.
use_installed_ptxas()
compile_in_process()
