"""Shared by all commands: options, errors as one line with an exit code, and output on stdout and stderr.

The options of `find`, `script` and `estimate` are made from fields (`autotune.planning.options`) when the command is
used, as they are slow to import. Values are passed on as text, which the fields parse and check.
"""

import contextlib
import functools
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_args

import typer
import typer.core

from autotune import errors
from autotune.units import visible

if TYPE_CHECKING:
    from autotune.output.progress import Progress

Json = Annotated[bool, typer.Option("--json", help="Print the result, or the error, as JSON on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer, and nothing else.")]
TrustRunDir = Annotated[
    bool, typer.Option("--trust-run-dir", help="Run its code although you did not begin it on this machine.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show predictions and conditions, too.")]

_LONGEST = 2000  # characters of an error, which may repeat what was given


@contextlib.contextmanager
def reporting_errors(*, as_json: bool, debug: bool) -> Iterator[None]:
    """Turn an error into one line, or a JSON object, and an exit code; with `debug` keep its traceback."""
    try:
        with errors.explaining_files():
            yield
            print(end="", flush=True)
    except typer.Exit:
        raise
    except BrokenPipeError:
        raise typer.Exit(0) from None
    except (Exception, KeyboardInterrupt) as error:
        if debug and isinstance(error, Exception):
            raise
        kind, code, text = type(error).__name__, errors.EXIT_BUG, str(error)
        if isinstance(error, errors.AutotuneError):
            code = error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            code, text = errors.EXIT_INTERRUPTED, "interrupted"
        else:
            text = f"a bug in autotune: {kind}: {text} (--debug shows the traceback)"
        line = visible(" ".join(text.split()))
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
        with contextlib.suppress(OSError):  # of stdout, which may be the error
            if as_json:
                print_json({"error": {"kind": kind, "message": line, "exit_code": code}})
        with contextlib.suppress(OSError):
            print(f"autotune: {line}", file=sys.stderr)
        raise typer.Exit(code) from None
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                print(end="", flush=True, file=stream)
            except OSError:  # nobody reads it, or its disk is full: what is left in it would fail again at the exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that runs within `reporting_errors` and has the option --debug beside its own options."""
    own = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)

    @functools.wraps(command)
    def run(*arguments: Any, debug: bool = False, **options: Any) -> None:
        with reporting_errors(as_json=options.get("as_json", False), debug=debug):
            silence_libraries(verbose=options.get("verbose", False))
            if not options.get("verbose"):
                os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
            command(*arguments, **options)

    run.__signature__ = own.replace(parameters=[*own.parameters.values(), option])  # type: ignore[attr-defined]
    return run


def silence_libraries(*, verbose: bool) -> None:
    """Keep a library's warning that concerns no training from the output, unless it is `verbose`."""
    # At its import, on processors with bfloat16 instructions: of a kernel for inference (bitsandbytes 0.50).
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.NOTSET if verbose else logging.ERROR)


def print_json(document: Any) -> None:
    from pydantic import ConfigDict, TypeAdapter

    adapter = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="strings"))
    print(adapter.dump_json(document, indent=2, ensure_ascii=True).decode())


def print_text(*lines: str, file: TextIO | None = None) -> None:
    """Print lines on `file` (stdout by default), with invisible characters as escapes."""
    for line in lines:
        print(visible(line), file=file)


def stdout() -> Any:
    """Return rich's console on stdout; without a terminal it is 120 columns wide, unless COLUMNS is set."""
    from autotune.output.terminal import Console

    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=120)


def stderr(*, quiet: bool = False, verbose: bool = False) -> Any:
    """Return rich's console on stderr, which prints nothing if `quiet`; InputError: both are asked for."""
    from autotune.output.terminal import Console

    if quiet and verbose:
        raise errors.InputError("--quiet and --verbose contradict each other; drop one of the two")
    return Console(stderr=True, quiet=quiet)


def show(document: Any, table: Any, *, as_json: bool) -> None:
    """Print a table, or the document as JSON."""
    if as_json:
        print_json(document)
    else:
        stdout().print(table, highlight=False)


def progress(*, quiet: bool, verbose: bool) -> "Progress":
    """Return what shows trials' progress on stderr, and take signals for a Ctrl-C; InputError: both are asked for."""
    from autotune.output.progress import Progress

    take_signals_for_ctrl_c()
    return Progress(stderr(quiet=quiet, verbose=verbose), verbose=verbose)


def take_signals_for_ctrl_c() -> None:
    """Take SIGTERM for a Ctrl-C, and SIGHUP, the end of the terminal, unless nohup has it ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


_GIVEN = "autotune.options"  # key in `typer.Context.meta`: values of options


def given(context: typer.Context) -> dict[str, Any]:
    """Return the values of the given options, by the names of `autotune.planning.options`."""
    return dict(context.meta.get(_GIVEN, {}))


@functools.cache
def _made(name: str, *, of_script: bool) -> tuple[Any, ...]:
    """Return typer's options for a class of `planning.options`; `of_script` leaves out those that a script decides."""
    from pydantic import NonNegativeInt, PositiveInt

    from autotune.planning import options

    decided: Collection[str] = ()
    if of_script:
        from autotune.planning.user_code import DECIDED_BY_CODE as decided
    listed = []
    for option, field in options.fields_by_name(getattr(options, name)).items():
        if option in decided:
            continue
        is_flag, word = field.annotation is bool, option.replace("_", "-")
        is_list = field.default == ()  # such an option may be repeated
        is_whole = bool({int, PositiveInt, NonNegativeInt} & {field.annotation, *get_args(field.annotation)})
        extra: Any = field.json_schema_extra
        made = typer.Option(
            f"--{word}/--no-{word}" if field.default is True else f"--{word}",
            *(("-o",) if option == "output" else ()),
            help=field.description,
            metavar="<int>" if is_whole else "<str>,..." if is_list else None,
            rich_help_panel=extra["group"],
            callback=_keep,
            expose_value=False,
        )
        default: Any = None if field.default in (None, ()) else str(field.default)
        if is_flag:
            default = None if field.default else False
        elif field.is_required():
            default = inspect.Parameter.empty
        kind: Any = bool if is_flag else list[str] if is_list else str
        annotation: Any = Annotated[kind | None, made]
        listed.append(inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    def carrier(**values: Any) -> None:
        """Carry the options to typer; never called."""

    carrier.__annotations__ = {parameter.name: parameter.annotation for parameter in listed}
    carrier.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(carrier)
    return tuple(typer.main.get_command(app).params)


def taking(name: str, *, of_script: bool = False) -> type[typer.core.TyperCommand]:
    """Return a class of commands that have, beside their own options, those that `_made` makes of a class."""

    class Command(typer.core.TyperCommand):
        def get_params(self, ctx: Any) -> list[Any]:
            return [*_made(name, of_script=of_script), *super().get_params(ctx)]

        def format_options(self, ctx: Any, formatter: Any) -> None:
            """Write the help of arguments and options by group; a command's own options are about its output."""
            from autotune.planning.options import GROUPS

            groups: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *GROUPS)}
            for parameter in self.get_params(ctx):
                usual = "Arguments" if parameter.param_type_name == "argument" else GROUPS[-1]
                if (record := parameter.get_help_record(ctx)) is not None:
                    groups[getattr(parameter, "rich_help_panel", None) or usual].append(record)
            for name, records in groups.items():
                if records:
                    with formatter.section(name):
                        formatter.write_dl(records)

    return Command


def _keep(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> None:
    if value not in (None, [], ()):
        context.meta.setdefault(_GIVEN, {})[str(parameter.name)] = value
