"""The command line around a run: schema, run directory, errors in one sentence."""

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gem.config import Config
from gem.train.checkpoint import find_checkpoint, run_directory
from gem.train.distributed import run_stamp

USER_ERROR = 2
_FULL = "HYDRA_FULL_ERROR"
_SHOW_TRACES = os.environ.get(_FULL) == "1"


def register() -> None:
    """Puts the config's schema and the resolvers that conf/ uses where Hydra finds them."""
    ConfigStore.instance().store(name="config_schema", node=Config)
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True)
    OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
    OmegaConf.register_new_resolver("cache_dir", _cache_dir, replace=True)


def launch(main: Callable[[], Any]) -> None:
    """Runs a Hydra main; an error that the user can mend is one sentence and exit status 2.

    HYDRA_FULL_ERROR=1 shows every stack trace.
    """
    # Hydra would print an error its own way, with a trace, and exit.
    os.environ[_FULL] = "1"
    with one_sentence():
        main()


@contextmanager
def one_sentence() -> Iterator[None]:
    """Ends the process with an error's explanation instead of a stack trace.

    Also around the function that Hydra calls, which Hydra would report in its own words.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError, IndexError, OSError) as error:
        if _SHOW_TRACES:
            raise
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(130)


def explain(error: BaseException) -> str:
    """What is wrong with the command line or config, in one sentence, with the nearest name."""
    chain = []
    link: BaseException | None = error
    while link is not None:
        chain.append(link)
        link = link.__cause__ or link.__context__
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return str(error).strip() or type(error).__name__
    text = "\n".join(str(link) for link in chain)
    if unknown := re.search(r"Key '([^']+)' (?:is not in struct|not in '\w+')", text):
        key = _full_key(text) or unknown[1]
        return f"there is no key {key}{_nearest(key, [*config_keys(), *_groups()])}"
    if unknown := re.search(r"Could not override '([^']+)'\.?\s*No match in the defaults", text):
        return f"there is no group {unknown[1]}{_nearest(unknown[1], _groups())}"
    for link in chain:
        if isinstance(link, MissingConfigException) and link.missing_cfg_file:
            group, _, option = str(link.missing_cfg_file).rpartition("/")
            options = sorted(link.options or [])
            offer = f" (there are {', '.join(options)})" if options else ""
            return f"{group or 'conf'} has no option {option}{offer}{_nearest(option, options)}"
    # OmegaConf's own says what is wrong, Hydra's around it only where.
    said = next((link for link in chain if isinstance(link, OmegaConfBaseException)), None)
    key = _full_key(text) or _merged_key(text)
    lines = [line for line in str(said or error).splitlines() if line and "https://" not in line]
    if isinstance(error, OverrideParseException):
        return f"cannot read '{error.override}': {lines[-1] if lines else error}"
    first = lines[0].strip()
    if "is not Optional" in first:
        return f"{key} cannot be null"
    return f"{key}: {first}" if said is not None and key and key not in first else first


def config_keys() -> list[str]:
    """Every dotted key of the config."""
    return list(_keys(Config, ""))


def _keys(kind: Any, path: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    for item in fields(kind):
        key = f"{path}.{item.name}" if path else item.name
        yield key
        if is_dataclass(hints[item.name]):
            yield from _keys(hints[item.name], key)


def _full_key(text: str) -> str | None:
    found = re.findall(r"full_key: (\S+)", text)
    if found:
        return found[0]
    found = re.search(r"Could not override '([^']+)'", text)
    return found[1] if found else None


def _merged_key(text: str) -> str | None:
    found = re.search(r"Error merging override ([^\s=]+)=", text)
    return found[1] if found else None


def _nearest(name: str, names: list[str]) -> str:
    # A right name in the wrong section, before a similar one.
    last = name.rsplit(".", 1)[-1]
    close = [key for key in names if key.rsplit(".", 1)[-1] == last]
    close = close or difflib.get_close_matches(name, sorted(set(names)), n=2, cutoff=0.75)
    return f"; did you mean {' or '.join(close[:2])}?" if close else ""


def _groups() -> list[str]:
    folder = Path(__file__).parents[2] / "conf"
    return [path.name for path in folder.iterdir() if path.is_dir()] if folder.exists() else []


def _run_dir(resume: str | None, fresh: str) -> str:
    """A new run's directory, or that of the run which `resume` continues."""
    if not resume:
        return fresh
    try:
        return str(run_directory(find_checkpoint(resume)))
    except ValueError:
        # Said when the run starts; nothing may be created in its place.
        return "."


def _cache_dir() -> str:
    base = os.environ.get("XDG_CACHE_HOME")
    return str(Path(base) / "gem") if base else str(Path(__file__).parents[2] / ".cache")
