"""The knobs of a configuration on the command line: an option for each, made when a command that takes them is used.

Not before, as the fields of a configuration are slow to import and ``autotune --help`` has no need of them.
"""

from __future__ import annotations

import functools
import inspect
from typing import Annotated, Any

import typer
import typer.core

_GIVEN = "autotune.space.knobs"  # where the values stand in a command's context


class KnobCommand(typer.core.TyperCommand):
    """A command that takes an option for each knob beside its own; its function reads them by `given_knobs`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's own parameters, then the knobs, then --help."""
        own = super().get_params(ctx)
        return [*own[:-1], *_parameters(), *own[-1:]]


def given_knobs(context: typer.Context) -> dict[str, str | bool]:
    """Return the knobs that were given, as written, by option."""
    return dict(context.meta.get(_GIVEN, {}))


@functools.cache
def _parameters() -> tuple[Any, ...]:
    from autotune.space.knobs import knobs

    def carrier(**values: Any) -> None:
        """Carry the options to typer, which makes them from a signature; never called."""

    signature = []
    for knob in knobs():
        written = f"--{knob.option}/--no-{knob.option}" if knob.is_flag else f"--{knob.option}"
        option = typer.Option(written, help=knob.help, callback=_keep, expose_value=False)
        annotation: Any = Annotated[bool | None if knob.is_flag else str | None, option]
        name = knob.option.replace("-", "_")
        signature.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    carrier.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    carrier.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(carrier)
    return tuple(typer.main.get_command(app).params)


def _keep(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> None:
    if value is not None:
        context.meta.setdefault(_GIVEN, {})[str(parameter.name).replace("_", "-")] = value
