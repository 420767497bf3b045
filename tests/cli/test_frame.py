"""The frame: help, version, where common options may stand, start-up, completion."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.command_line import CommandLine
from support.tiers import TierBuilder

from backends.registry import open_store
from tiered import __version__
from tiered.api.broker_place import Place
from tiered.cli.frame import Program, program

HEAVY = {"numpy", "rich", "boto3", "botocore", "obstore", "fsspec", "s3fs", "lz4"}


def commands():
    found = {}

    def walk(group: Program, path: tuple[str, ...]) -> None:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            found[(*path, name)] = command
            if isinstance(command, Program):
                walk(command, (*path, name))

    walk(program(), ())
    return found


def test_version(tiered: CommandLine):
    assert tiered.good("--version").text == f"tiered {__version__}\n"


def test_help_names_every_command_in_one_line(tiered: CommandLine):
    text = tiered.good("--help").text
    for (name,), command in ((path, one) for path, one in commands().items() if len(path) == 1):
        assert any(line.split()[:1] == [name] and command.help in line for line in text.split("\n"))


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_help_of_each_command_says_what_the_contract_asks(
    path: tuple[str, ...], tiered: CommandLine
):
    command = commands()[path]
    text = tiered.good(*path, "--help").text
    summary = command.help or ""
    assert summary.endswith(".")
    assert summary.count(". ") == 0
    examples = text.split("Examples:\n")[1].strip().splitlines()
    assert len(examples) == 2
    assert all("tiered " in example for example in examples)
    for option in ("--config", "--endpoint-url", "--cluster", "--quiet", "--json", "--debug"):
        assert f" {option}" in text
    for argument in command.params:
        if isinstance(argument, click.Argument):
            assert argument.help, argument.name
            assert argument.help.split()[-1] in text


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_examples_parse(path: tuple[str, ...]):
    """Each example names only options and arguments that its command has."""
    import shlex

    for example in (commands()[path].epilog or "").splitlines():
        words = shlex.split(example.removeprefix('eval "$(').removesuffix(')"').split(" > ")[0])
        assert "tiered" in words
        words = words[words.index("tiered") + 1 :]
        group: click.Command = program()
        context = click.Context(group)
        while isinstance(group, Program):
            context = group.make_context(None, list(words), parent=context, resilient_parsing=False)
            words = [*context._protected_args, *context.args]
            if not words:
                break
            found = group.get_command(context, words[0])
            assert found is not None, words
            group, words = found, words[1:]
        if not isinstance(group, Program):
            group.make_context(None, list(words), parent=context)


def test_no_stub_is_offered(tiered: CommandLine):
    for later in ("query", "gc", "mount", "archive", "sql", "timer", "store", "restore", "lease"):
        assert tiered(later).code == 2


def test_an_unknown_command_or_option_or_none_is_wrong_usage(tiered: CommandLine):
    assert tiered("xyzzy").error == "no such command 'xyzzy'; see `tiered --help`"
    assert tiered("ls", "--frob", "memory://x").code == 2
    for words in (("ls",), ("query", "memory://x", "t", "--key"), ("ls", "--frob", "memory://x")):
        assert tiered(*words).error.endswith(f"see `tiered {words[0]} --help`")
    assert tiered().code == 2


def test_common_options_stand_before_or_after_the_command(tiered: CommandLine):
    def value(*arguments: str) -> object:
        rows = tiered.good(*arguments, "--json").document["settings"]
        return next(row["value"] for row in rows if row["key"] == "region")

    assert value("--region", "mars", "config", "show") == "mars"
    assert value("config", "--region", "mars", "show") == "mars"
    assert value("config", "show", "--region", "mars") == "mars"
    assert value("--region", "venus", "config", "show", "--region", "mars") == "mars"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, tiered: CommandLine):
    script = tiered.good("completion", shell).text
    assert "_TIERED_COMPLETE" in script
    assert tiered("completion", "tcsh").code == 2


def test_completion_answers_a_shell():
    run = subprocess.run(
        [sys.executable, "-m", "tiered"],
        env={"_TIERED_COMPLETE": "bash_complete", "COMP_WORDS": "tiered att", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.split() == ["plain,attach"]


def completed(*words: str, shell: str = "bash") -> list[str]:
    """What a shell is answered for the last word."""
    run = subprocess.run(
        [sys.executable, "-m", "tiered"],
        env={
            "_TIERED_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": " ".join(("tiered", *words)),
            "COMP_CWORD": words[-1] if shell == "fish" else str(len(words)),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    return run.stdout.split()


def test_topics_and_brokers_are_completed(tmp_path: Path):
    store = open_store(f"{tmp_path}")
    for name in ("east-1", "east-2"):
        TierBuilder(store, prefix=Place("c", name).prefix).add([b"x"])
    url = str(tmp_path)
    assert completed("lease", url, "--broker", "ea") == ["plain,east-1", "plain,east-2"]
    assert completed("verify", url, "--brokers", "west,east-1") == ["plain,west,east-1"]
    assert completed("ls", url, "--cluster", "") == ["plain,c"]
    assert completed("cat", url, "t") == [], "of which broker?"
    assert completed("cat", "--broker", "east-1", url, "t") == ["plain,topic-ä"]
    assert completed("--broker", "east-1", "pause", url, "") == ["plain,topic-ä"]
    for words in (("cat", f"{url}/nothing", "t"), ("cat", "s3://", "t"), ("cat", "frob://x", "t")):
        assert completed(*words) == []
    assert completed("verify", "/tm") == ["dir,/tm"]


def test_topics_of_a_broker_are_completed(tiered: CommandLine, tmp_path: Path):
    tiered.good("store", "create", tmp_path / "store")
    put = '{"topic": "orders", "queue_id": 0, "properties": {}, "body_base64": ""}'
    (tmp_path / "one").write_text(put)
    tiered.good("store", "put", tmp_path / "store", tmp_path / "one")
    found = completed("attach", str(tmp_path / "store"), "--topics", "or")
    assert found == ["plain,orders"]


def imported(*arguments: str) -> set[str]:
    code = f"import sys; sys.argv = ['tiered', *{arguments!r}]\nfrom tiered.__main__ import main\n"
    code += "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
    code += "sys.stderr.write(' '.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return {name.partition(".")[0] for name in run.stderr.split()}


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("attach", "--help")])
def test_help_loads_nothing_heavy(arguments: tuple[str, ...]):
    assert imported(*arguments) & HEAVY == set()


MODULES_MAX = 150


def test_help_loads_few_modules():
    """Of its own and of others', the interpreter's too: what a start costs is what it loads."""
    code = "import sys; sys.argv = ['tiered', '--help']\nfrom tiered.__main__ import main\n"
    code += "try: main()\nexcept SystemExit: sys.stderr.write(str(len(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stderr) <= MODULES_MAX
