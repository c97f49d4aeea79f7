"""Refuses to run code that a run directory from somebody else (unpacked, cloned) names.

`search.json` names scripts and models with code of their own, `data/` holds pickled functions, and a search that is
resumed or explained runs them. The folder `trusted` of `$AUTOTUNE_HOME` has an empty file for each that this user has
handed over, named by the digest of the code and of its place; who owns a file proves nothing. A search that would run
anything else is refused, with its name, until the user adds `--trust-run-dir`. No link in a run directory may lead out
of it. A pickled file is known by its digest in the plan; the process that unpickles it compares them.
"""

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, RunDirectoryError
from autotune.planning.plan import SearchPlan
from autotune.storage.home import home, writable
from autotune.values.workload import CODE_FILE, STEP_FILE


def check(run_dir: Path, plan: SearchPlan, *, trusted: bool, delivers: bool = True) -> None:
    """Refuse a search whose code, or output file if it `delivers`, this user neither gave nor vouches for."""
    plan = plan if delivers else plan.model_copy(update={"output": None})
    if trusted:
        return remember(plan)
    unknown = actions(plan)
    with contextlib.suppress(AutotuneError):  # no home: nothing is noted
        unknown = {name: shown for name, shown in unknown.items() if not (home() / "trusted" / name).is_file()}
    if unknown:
        raise RunDirectoryError(
            f"{run_dir}: was not begun by you on this machine, and going on {', '.join(unknown.values())}; if you "
            "trust whoever made it, add --trust-run-dir (trust_run_dir=True)"
        )


def remember(plan: SearchPlan) -> None:
    """Note that this user has handed over what a search runs; without a home, resuming has to ask."""
    with contextlib.suppress(AutotuneError, OSError):
        for name in actions(plan):
            (writable("trusted") / name).touch()


def actions(plan: SearchPlan) -> dict[str, str]:
    """Return all that a search does beyond training a model of the library, in words, by the file that notes it."""
    found: list[tuple[str, Any]] = []  # words, and the key by which it is noted
    workload = plan.workload
    code, step, recipe, spec = workload.own_code, workload.own_step, workload.recipe, workload.model
    if code is not None:
        key = code.model_dump(mode="json", include={"kind", "command", "is_module", "directory", "sha256"})
        runs = f"runs `{code.command_line}` in {code.directory}" if code.command else f"unpickles data/{CODE_FILE}"
        found.append((runs, key))
    if recipe is not None and recipe.reward is not None:
        key = recipe.model_dump(mode="json", include={"reward", "directory"})
        found.append((f"runs {recipe.reward} in {recipe.directory}", key))
    if step is not None:
        key = step.model_dump(mode="json", include={"directory", "search_path", "sha256"})
        found.append((f"unpickles data/{STEP_FILE}", key))
    if spec.trust_remote_code:
        of_model = spec.config.get("auto_map") or {}
        named = [spec.name, spec.path, *(str(value).partition("--")[0] for value in _texts(of_model))]
        # The library takes a folder of that name, where there is one, for the repository of the hub.
        places = [str(Path(name).resolve()) if name and Path(name).exists() else name for name in named]
        found.append((f"runs code of the model {spec.name}", [places, of_model, spec.source, spec.revision]))
    found += [(f"runs kernels of {kernel}", ["kernel", kernel]) for kernel in spec.hub_kernels]
    found += [(f"tells {name} of its trials", ["tracker", name]) for name in plan.report_to]
    if plan.fleet.address is not None:
        found.append((f"joins the cluster at {plan.fleet.address}", ["cluster", plan.fleet.address]))
    if plan.output is not None:
        found.append((f"writes its answer to {plan.output}", ["output", plan.output]))
    return {hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest(): shown for shown, key in found}


def check_within(run_dir: Path) -> None:
    """Refuse a directory with a link that leads out of it, or with a pipe, a socket or a device."""
    whole = run_dir.resolve()
    for folder, folders, files in os.walk(run_dir):
        for path in (Path(folder, name) for name in (*folders, *files)):
            try:
                mode = path.lstat().st_mode
            except OSError:  # a running search has removed it
                continue
            if stat.S_ISLNK(mode) and not path.resolve().is_relative_to(whole):
                raise RunDirectoryError(f"{path}: a link to {path.readlink()}, out of the run directory; remove it")
            if not (stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise RunDirectoryError(f"{path}: a pipe, a socket or a device, no file of a search; remove it")
        if "wandb" in folders:  # a tracker of --report-to, which links to its logs elsewhere and replaces such links
            folders.remove("wandb")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _texts(inner)
