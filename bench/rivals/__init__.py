"""Others' attention as backends of the model, for measurements of a training step alone.

`register` adds them to the names that `backend=` takes; nothing in `gem` knows of them. All return
the log-sum-exp and take its gradient, which the model's sinks need.
"""

from gem.attention import backends

RIVALS = {
    "fa4_expanded": "bench.rivals.fa4_expanded",
    "sdpa_cudnn": "bench.rivals.sdpa_cudnn",
    "sdpa_efficient": "bench.rivals.sdpa_efficient",
}


def register() -> None:
    backends.BY_NAME.update(RIVALS)
