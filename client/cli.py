"""The `nearline` command: which verbs there are. Each lives with its noun in commands/."""

from typing import Annotated

import typer

from nearline import __version__
from nearline.client.commands import demo, errands, fleet, invoke, logs, models, profile, settings, up


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


app = typer.Typer(
    name="nearline",
    help="Serve many language models and LoRA adapters from few machines; idle ones cost only disk.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("up")(up.up)
app.add_typer(models.model, name="model")
app.add_typer(models.adapter, name="adapter")
for group, remove in ((models.model, models.remove_model), (models.adapter, models.remove_adapter)):
    group.command("remove", hidden=True)(remove)  # as people try it first
models.model.command("set")(settings.set_model)
models.model.command("verify")(errands.verify_model)
models.model.command("evict")(errands.evict_model)
models.model.command("copy")(errands.copy_model)
models.adapter.command("copy")(errands.copy_adapter)
models.adapter.command("verify")(errands.verify_adapter)
app.command("profile")(profile.profile)
app.command("invoke")(invoke.invoke)
app.add_typer(invoke.job, name="job")
app.command("ps")(fleet.ps)
app.command("nodes")(fleet.nodes)
app.command("queues")(fleet.queues)
app.command("top")(fleet.top)
app.command("logs")(logs.logs)
app.command("demo")(demo.demo)
up.pass_through(app, {"controller": up.controller, "node": up.node, "replay": up.replay, "simulate": up.simulate})


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and leave.")
    ] = False,
) -> None:
    """Serve many language models and LoRA adapters from few machines; idle ones cost only disk."""
