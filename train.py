"""Trains, evaluates or predicts: `python train.py model=gem_small`; see conf/ and --help."""

import hydra
from omegaconf import DictConfig

from gem.train.cli import launch, one_sentence, register

register()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    # Loaded after the command line is known to make sense: it takes seconds.
    from gem.train.app import run

    with one_sentence():
        return run(cfg)


if __name__ == "__main__":
    launch(main)
